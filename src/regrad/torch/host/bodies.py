"""Functions that torch implements in Python, traced into: their inner calls reach the mode.

Such a function first calls the modes for itself, and then runs code without modes. regrad runs the
code with other globals: the checks return False, and the inner calls reach the modes as usual.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache, wraps
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch
import torch.overrides

from regrad.torch.host import mode_stack

CHECKS = frozenset(
    {"has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"}
)
_MODULES = ("torch.nn.functional", "torch.functional", "torch._jit_internal")
_OPERATORS = ("__rsub__", "__rdiv__", "__rtruediv__", "__rpow__", "__rmatmul__", "__floordiv__",
              "__rfloordiv__", "__rmod__", "norm", "istft", "stft", "unflatten")  # fmt: skip


def _return_false(*tensors: Any) -> bool:
    return False


def with_fast_path(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward pass of a transformer's module, without regrad's modes in its checks.

    torch has a faster path there, with other values at padding, and takes it only if nothing
    overrides its functions. The fast path has no gradient, so it matters only to rules that replace
    values (see `intercepts.CALLED`).
    """
    names = PatchedGlobals(sys.modules[forward.__module__])
    names["torch"] = PatchedModule(
        torch, overrides=PatchedModule(torch.overrides, has_torch_function=_is_overridden)
    )
    body = _with_names(forward, names)

    @wraps(forward)
    def run(*args: Any, **options: Any) -> Any:
        return (forward if torch.compiler.is_compiling() else body)(*args, **options)

    return run


@cache
def with_hooks_around(call: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return `nn.Module._call_impl`, which runs the hooks, with `_slow_forward` for `forward`.

    (The function does this under a TorchScript trace, and here its check for a trace returns True.)
    Return None for another library's call.
    """
    if "_slow_forward" not in getattr(call, "__code__", _return_false.__code__).co_names:
        return None
    names = PatchedGlobals(sys.modules[call.__module__])
    yes = dict.fromkeys(("_is_tracing", "_get_tracing_state"), lambda: True)  # (by version)
    names["torch"] = PatchedModule(torch, _C=PatchedModule(torch._C, **yes))
    return _with_names(call, names)


def has_hooks(module: torch.nn.Module) -> bool:
    """Return whether hooks run around the calls of a module, or around the calls of all modules."""
    held = {**vars(torch.nn.modules.module), **vars(module)}
    return any(hooks for name, hooks in held.items() if _HOOKS.fullmatch(name))


_HOOKS = re.compile(r"_(global_)?(for|back)ward_(pre_)?hooks")


class PatchedModule:
    """A module with some names replaced."""

    def __init__(self, module: Any, **names: Any) -> None:
        vars(self).update(names, module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def _is_overridden(values: Any) -> bool:
    """Return whether code other than regrad may change what functions do with some tensors."""
    if not all(hasattr(mode, "is_closed") for mode in mode_stack()):
        return True
    return any(torch.overrides.is_tensor_like(x) and _decides(type(x)) for x in values)


def _decides(kind: type) -> bool:
    """Return whether a subclass of Tensor may change what functions do with it."""
    own: Any = getattr(kind, "__torch_function__", None)
    plain = (torch.Tensor, torch.nn.Parameter)
    return kind not in plain and own is not torch.nn.Parameter.__torch_function__


@cache
def bodies() -> dict[Any, Callable[..., Any]]:
    """Return the functions that torch implements in Python, each with its traceable body."""
    every = {f for fs in torch.overrides.get_overridable_functions().values() for f in fs}
    found = {f: open_body(f) for f in every}
    return {f: body for f, body in found.items() if body is not None}


def open_body(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the body of a function that torch implements in Python, without its own call of modes.

    The calls inside the body reach the modes. Return None for functions written in C++.
    """
    if isinstance(function, FunctionType):
        if function.__module__ in _MODULES:
            return _body(function)
        if function.__module__ == "torch._tensor" and function.__name__ in _OPERATORS:
            return getattr(function, "__wrapped__", None) or _body(function)
    return None


@cache
def without_own_dispatch(function: FunctionType) -> Callable[..., Any]:
    """Return a function that torch implements in Python, without its call of modes for itself."""
    return _body(function)


def _body(function: FunctionType) -> Callable[..., Any]:
    return _with_names(function, _names_of(function.__globals__["__name__"]))


class PatchedGlobals(dict[str, Any]):
    """The globals of a module with some names replaced.

    Other names are looked up at each use, since programs may put functions into torch's modules.
    """

    def __init__(self, module: ModuleType) -> None:
        super().__init__(dict.fromkeys(CHECKS, _return_false), __name__=module.__name__)
        self.module = module
        self.helpers: dict[Any, Any] = {}

    def __contains__(self, name: object) -> bool:
        """Return whether a name exists; torch.compile calls this before a lookup."""
        return super().__contains__(name) or name in vars(self.module)

    def __missing__(self, name: str) -> Any:
        value = vars(self.module)[name]
        if not name.startswith("_") or not isinstance(value, FunctionType):
            return value
        if value not in self.helpers:
            self.helpers[value] = _with_names(value, self)
        return self.helpers[value]


@cache
def _names_of(module: str) -> PatchedGlobals:
    return PatchedGlobals(sys.modules[module])


def _with_names(function: FunctionType, names: dict[str, Any]) -> FunctionType:
    """Return a function of a module with other globals, and its inner functions too."""
    if function.__globals__["__name__"] != names["__name__"]:
        return function
    return remade(function, names, tuple(map(_open_cell, function.__closure__ or ())))


def remade(function: FunctionType, names: dict[str, Any], cells: Any) -> FunctionType:
    """Return a function with the same code, and other globals or closure cells."""
    code, name, defaults = function.__code__, function.__name__, function.__defaults__
    made = FunctionType(code, names, name, defaults, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _open_cell(cell: CellType) -> CellType:
    held = cell.cell_contents
    return CellType(open_body(held) or held)


def lines_of(function: Any) -> frozenset[str]:
    """Return the lines of a Python function, as `file:number`."""
    code = getattr(function, "__code__", None)
    if code is None:
        return frozenset()
    return frozenset(f"{code.co_filename}:{line}" for _, _, line in code.co_lines() if line)


def asks(function: Any) -> bool | None:
    """Return whether a Python function calls modes; None for a function written in C++."""
    code = getattr(function, "__code__", None)
    return None if code is None else not CHECKS.isdisjoint(code.co_names)


def is_python(function: Any) -> bool:
    """Return whether a function is written in Python, so that it can run with other globals."""
    return isinstance(function, FunctionType)
