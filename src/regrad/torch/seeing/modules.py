"""The running module: the path of each call of a module, and the names of parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import get_ident
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from regrad.core import containers


def found_in(f: Any, args: Sequence[Any], options: Any) -> dict[str, Any]:
    """Return the modules and tensors that a function uses, by name.

    They are the function itself, its arguments, and the values that it reads from outside. If there
    is only one module, its name is "".
    """
    held: dict[str, Any] = {}
    _add(held, "", getattr(f, "__self__", f))
    for name, value in [*argument_paths(args), *(options or {}).items()]:
        _add(held, name, value)
    for function in _functions(f):
        for name, value in _outer(function):
            _add(held, name, value)
    return held


def _add(held: dict[str, Any], name: str, value: Any) -> None:
    known = any(value is each for each in held.values())
    if isinstance(value, nn.Module | torch.Tensor) and not known:
        held.setdefault(name, value)


def argument_paths(args: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return the leaves of the arguments, with their paths."""
    args = tuple(args)
    return list(zip(containers.paths(args, "args"), containers.flatten(args)[0], strict=True))


def _functions(f: Any) -> list[FunctionType]:
    """Return the Python functions of a callable: itself, and the functions that it closes over."""
    f = getattr(f, "__func__", f)
    if not isinstance(f, FunctionType):
        return []
    inner = [value for _, value in _outer(f) if isinstance(value, FunctionType)]
    return [f, *inner]


def _outer(f: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the values that a function reads from outside, as (name, value)."""
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # (the cell is still empty)
            continue
    for name in f.__code__.co_names:
        if name in f.__globals__:
            yield name, f.__globals__[name]


class Unseen(nn.Module):
    """A module of regrad that wraps the user's modules."""


class ModulePaths:
    """The current place in a model: a stack of the modules whose forward pass runs."""

    def __init__(self, held: dict[str, Any]) -> None:
        modules = {name: m for name, m in held.items() if isinstance(m, nn.Module)}
        alone = len(modules) == 1
        self.roots: dict[int, str] = {id(m): "" if alone else name for name, m in modules.items()}
        self.modules = modules
        self.thread: int = get_ident()  # torch calls its hooks in all threads
        self.stack: list[tuple[Any, str]] = []
        self.known: dict[tuple[int, int], str] = {}
        self.met: dict[int, nn.Module] = {}  # all modules that ran, by id

    @property
    def path(self) -> str:
        """The path of the running module; "" outside of modules."""
        return self.stack[-1][1] if self.stack else ""

    @property
    def seen(self) -> list[nn.Module]:
        """All modules that were found or ran."""
        return [*self.modules.values(), *self.met.values()]

    def install(self) -> list[Any]:
        """Register hooks for the begin and the end of modules; return the handles."""
        return [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def _enter(self, module: nn.Module, args: Any) -> None:
        if isinstance(module, Unseen) or get_ident() != self.thread:
            return
        self.met[id(module)] = module
        self.stack.append((module, self._path_of(module)))

    def _leave(self, module: nn.Module, args: Any, y: Any) -> None:
        if isinstance(module, Unseen) or get_ident() != self.thread:
            return
        while self.stack and self.stack.pop()[0] is not module:
            pass

    def _path_of(self, module: nn.Module) -> str:
        if not self.stack:
            root = self.roots.get(id(module))
            return self._within_roots(module) if root is None else root
        parent, path = self.stack[-1]
        key = id(parent), id(module)
        if key not in self.known:
            self.known[key] = self._name_in(parent, path, module)
        return self.known[key]

    def _within_roots(self, module: nn.Module) -> str:
        """Return the path of a module that was called from outside of its model."""
        for name, root in self.modules.items():
            for inner, each in root.named_modules():
                if each is module:
                    return joined("" if len(self.modules) == 1 else name, inner)
        return type(module).__name__ if self.modules or len(self.met) > 1 else ""

    def _name_in(self, parent: nn.Module, path: str, module: nn.Module) -> str:
        for name, child in parent.named_children():
            if child is module:
                return joined(path, name)
        for name, child in parent.named_modules():
            if child is module:
                return joined(path, name)
        within = self._within_roots(module) if self.modules else ""
        return within or joined(path, type(module).__name__)

    def parameters(self) -> dict[int, str]:
        """Return the names of the parameters and buffers of all known modules, by tensor id."""
        alone = len(self.modules) == 1
        named: dict[int, str] = {}
        outer = [("" if alone else name, module) for name, module in self.modules.items()]
        for name, module in [*outer, *[("", module) for module in self.met.values()]]:
            for inner, x in (*module.named_parameters(), *module.named_buffers()):
                named.setdefault(id(x), joined(name, inner))
        return named


def joined(path: str, name: str) -> str:
    """Join two parts of a path, without the wrapper of torch.compile."""
    name = name.removeprefix("_orig_mod").removeprefix(".")
    return f"{path}.{name}" if path and name else path or name
