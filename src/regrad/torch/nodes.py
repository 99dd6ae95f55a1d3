"""The safety net: what autograd itself wrote down tells whether an override was passed over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.overrides

from regrad.errors import PassedOverError
from regrad.reports import Untouched
from regrad.torch.optypes import nodes_of, spellings


class Watch:
    """Looks at one call of a torch function that no rule covers.

    Autograd's new nodes are compared with those that belong to the overridden op types.
    """

    def __init__(self, rules: Mapping[str, Any], args: Sequence[Any]) -> None:
        self.rules = rules
        self.before = [x.grad_fn for x in tensors(args)]

    def look(self, func: Any, result: Any, untouched: Untouched, where: Callable[[], str]) -> None:
        """Note what kept its gradient; raise if an overridden op type is among it."""
        seen = set(map(id, self.before))
        for y in tensors((result,)):
            node = y.grad_fn
            if node is None or id(node) in seen:
                continue
            seen.add(id(node))
            for each in new_nodes(node, seen):
                self._check(func, each)
            untouched.note(name_of(func), where())

    def _check(self, func: Any, node: Any) -> None:
        name = node.name().rstrip("0123456789")
        for op_type in types_of(name):
            if op_type in self.rules and not _is_spelled(func, op_type):
                raise PassedOverError(
                    f"{name_of(func)} computes {op_type!r} inside ({node.name()}), which is "
                    "overridden, and would keep its own gradient. Write it with separate torch "
                    f"functions, or pass keep=[{name_of(func)}] to leave it as it is."
                )


def _is_spelled(func: Any, op_type: str) -> bool:
    """Whether the call is the op itself, under arguments that make it another op."""
    spelling = spellings().get(func)
    return spelling is not None and spelling.family.type == op_type


def tensors(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among some values, also in lists and tuples."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors(value)


def new_nodes(node: Any, seen: set[int]) -> Iterator[Any]:
    """A node, and those behind it that are not known."""
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        for behind, _ in node.next_functions:
            if behind is not None and id(behind) not in seen and not is_leaf(behind):
                seen.add(id(behind))
                stack.append(behind)


def is_leaf(node: Any) -> bool:
    """Whether a node stands for a leaf, where gradients are accumulated."""
    return node.name() == "torch::autograd::AccumulateGrad"


@cache
def types_of(node: str) -> tuple[str, ...]:
    """The op types that a backward node belongs to."""
    return _types().get(node, ())


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
    return name or getattr(func, "__qualname__", None) or str(func)
