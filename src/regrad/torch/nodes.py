"""The safety net: what autograd itself wrote down tells whether an override was passed over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.overrides
from torch.autograd.function import BackwardCFunction

from regrad.errors import PassedOverError
from regrad.reports import Untouched
from regrad.torch.composites import fused
from regrad.torch.optypes import HOLDS, nodes_of, spellings


class Watch:
    """Looks at one call of a torch function that no rule covers.

    Autograd's new nodes are compared with those that belong to the overridden op types.
    """

    def __init__(self, rules: Mapping[str, Any], args: Sequence[Any], options: Any) -> None:
        self.rules = rules
        self.seen = {x.grad_fn for x in tensors((args, options))}

    def look(self, func: Any, result: Any, untouched: Untouched, where: Callable[[], str]) -> None:
        """Note what kept its gradient; raise if an overridden op type is among it."""
        if func in gradients():
            return
        for node in self.seen:
            if isinstance(node, BackwardCFunction) and _is_news(node):
                name = node._forward_cls.__qualname__  # pyright: ignore
                untouched.note(f"{name} (autograd.Function)", where())
        for y in tensors((result,)):
            node = y.grad_fn
            if node is None or node in self.seen:
                continue
            self.seen.add(node)
            made = list(new_nodes(node, self.seen))
            for each in made:
                self._check(func, each)
            untouched.note(_described(func, made), where())

    def _check(self, func: Any, node: Any) -> None:
        if func in fused() and func not in spellings():
            return  # the table says what counts in it
        name = node.name().rstrip("0123456789")
        hidden = name.endswith(
            "CopySlices"
        )  # a view was changed in place, by a node that cannot be seen
        for op_type in types_of(_node_named(func) if hidden else name):
            holds = hidden or HOLDS.get(op_type, _always)(node)
            if op_type in self.rules and holds and not _is_spelled(func, op_type):
                raise PassedOverError(
                    f"{name_of(func)} computes {op_type!r} inside ({node.name()}), which is "
                    "overridden, and would keep its own gradient. Write it with separate torch "
                    f"functions, or pass keep=[{name_of(func)}] to leave it as it is."
                )


def _is_news(node: Any) -> bool:
    """Whether the node is of somebody else's Function, and is met for the first time."""
    if node._forward_cls.__module__.startswith("regrad.") or _MET in node.metadata:
        return False
    node.metadata[_MET] = True
    return True


_MET = "met by regrad"


def _described(func: Any, nodes: Sequence[Any]) -> str:
    """A call as the report shows it: `Tanh`, or `torch.nn.functional.linear (MatMul)`."""
    if func in spellings():
        return name_of(func)
    types = {
        op_type
        for node in nodes
        for op_type in types_of(node.name().rstrip("0123456789"))
        if HOLDS.get(op_type, _always)(node)
    }
    return f"{name_of(func)} ({', '.join(sorted(types))})" if types else name_of(func)


def _always(node: Any) -> bool:
    return True


@cache
def gradients() -> frozenset[Any]:
    """Functions whose results are gradients: what they ran is no op of the program's own."""
    return frozenset({torch.autograd.grad, torch.Tensor.grad.__get__})  # pyright: ignore


def _node_named(func: Any) -> str:
    """The backward node of a torch function, by the name that torch would give it."""
    words = getattr(func, "__name__", "").strip("_").split("_")
    return "".join(word.capitalize() for word in words) + "Backward"


def _is_spelled(func: Any, op_type: str) -> bool:
    """Whether the call is the op itself, under arguments that make it another op."""
    spelling = spellings().get(func)
    return spelling is not None and spelling.family.type == op_type


def tensors(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among some values, also in containers."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors(value)
        elif isinstance(value, dict):
            yield from tensors(value.values())


def new_nodes(node: Any, seen: set[Any]) -> Iterator[Any]:
    """A node, and those behind it that are not known. (`seen` holds them: a wrapper that nobody
    holds goes, and the next may have its id.)"""
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        for behind, _ in node.next_functions:
            if behind is not None and behind not in seen and not is_leaf(behind):
                seen.add(behind)
                stack.append(behind)


def is_leaf(node: Any) -> bool:
    """Whether a node stands for a leaf, where gradients are accumulated."""
    return node.name() == "torch::autograd::AccumulateGrad"


@cache
def types_of(node: str) -> tuple[str, ...]:
    """The op types that a backward node belongs to."""
    return _types().get(node.removeprefix("Foreach"), ())


@cache
def _types() -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for op_type in {s.family.type for s in spellings().values()}:
        for node in nodes_of(op_type):
            found[node] = (*found.get(node, ()), op_type)
    return found


@cache
def name_of(func: Any) -> str:
    """A torch callable as reports show it: its op type if it has one, or else its name."""
    spelling = spellings().get(func)
    if spelling is not None:
        return spelling.family.type
    name = torch.overrides.resolve_name(func) if callable(func) else None
    name = name or getattr(func, "__qualname__", None) or str(func)
    return name.replace("_VariableFunctionsClass.", "torch.")
