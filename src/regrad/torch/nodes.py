"""The safety net: what autograd itself wrote down tells whether an override was passed over.

The idea: tables of torch's functions can miss one, today or in torch's next release. Autograd
cannot: whatever computes a gradient leaves a node in its graph, and the node's class says which op
it belongs to. So after each function that no rule covers, regrad looks at the nodes that it made:
at the last one of a function that a table says is harmless, else at all of them. With a rule for
"Tanh" in force

    y = somebody.fused_gelu(x)      # y.grad_fn: MulBackward, behind it TanhBackward

the node `TanhBackward` belongs to "Tanh", so the call raises PassedOverError: it names the function
and says what to write instead.

Autograd numbers its nodes as it makes them, per thread. A function's nodes
are those behind its results with a number not below the one at which it began.

Invariants:

* What is looked at once is remembered by its function and kinds of nodes (`Watch.harmless`), unless
  the node itself decides (`HOLDS`: an `EluBackward` may be of `elu` or of `selu`). A loop over
  layers pays for the first.
* A node that a table says is torch's plumbing (the factor of a dropout mask) is not the user's op.
* Leaves are the end: the nodes of earlier functions have smaller numbers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.overrides

from regrad.core.callers import PACKAGE
from regrad.errors import PassedOverError
from regrad.torch.composites import fused
from regrad.torch.host import LEAVES, func_gradient, number_of, sequence_nr, unwrap
from regrad.torch.optypes import HOLDS, following, holds, nodes_of, spellings, switch

# Ops inside a call that are torch's plumbing, and not ops that the caller wrote: the layout of an
# operand (anywhere), the factor of a dropout mask, the way in which a pool averages.
LAYOUT = frozenset({"Identity", "Reshape"})
PLUMBING = {
    "Mul": "dropout dropout_ alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ "
           "feature_alpha_dropout feature_alpha_dropout_ native_dropout dropout1d dropout2d "
           "dropout3d rrelu rrelu_",
    "RealDiv": "dropout dropout_ feature_dropout feature_dropout_ native_dropout dropout1d "
               "dropout2d dropout3d",
    "Mean": "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d",
}  # fmt: skip


class Watch:
    """Looks at the calls of torch functions that no rule of a scope covers.

    Autograd numbers its nodes as it makes them, so those of a call are known by their numbers.
    They are compared with those that belong to the overridden op types.
    """

    def __init__(self, rules: Iterable[str]) -> None:
        self.rules: frozenset[str] = frozenset(rules)
        self.harmless: dict[Any, str] = {}  # a function and its kinds of nodes: what reports show

    def look(
        self, func: Callable[..., Any], start: int, result: Any, note: Callable[[str, int], None]
    ) -> None:
        """Note what kept its gradient; raise if an overridden op type is among it.

        Args:
            func: the function of torch.
            start: the number of the first node that the call may have made.
            result: what it returned.
            note: is given the call as reports show it, and by how many frames of ours.
        """
        seen: set[Any] = set()
        end = sequence_nr()
        for y in (result,) if isinstance(result, torch.Tensor) else tensors((result,)):
            node = y.grad_fn or unwrap(y).grad_fn
            # (a function may return its input, or a view: that node is an earlier function's)
            if node is None or number_of(node) < start or node in seen:
                continue
            made = new_nodes(node, seen, start, end)
            key = (func, *map(type, made))
            shown = self.harmless.get(key)
            if shown is None:
                risky = [self.check(func, each) for each in made]
                shown = describe(func, made)
                if not any(risky):
                    self.harmless[key] = shown
            note(shown, 3)

    def check(self, func: Any, node: Any) -> bool:
        """Raise if a node belongs to an overridden op; return whether another of its kind could."""
        if func in fused() and func not in spellings():
            return False  # the table says what counts in it, and the scope takes it apart for that
        name = node.name()
        hidden = name.endswith("CopySlices")  # a view was changed in place, by a node out of sight
        # then the function's own name is all there is to go by: `relu_` would make ReluBackward
        types = types_of(node_named(getattr(func, "__name__", "")) if hidden else name)
        for op_type in types:
            if op_type not in self.rules or is_plumbing(func, op_type):
                continue
            # (a call may be the op itself, under arguments that make it another op)
            own = func in spellings() and spellings()[func].family.type == op_type
            if not own and (hidden or holds(op_type, node)):
                raise PassedOverError(
                    f"{name_of(func)} computes {op_type!r} inside ({node.name()}), which is "
                    "overridden, and would keep its own gradient. Write it with separate torch "
                    f"functions, or pass keep=[{name_of(func)}] to leave it as it is."
                )
        return hidden or any(op_type in HOLDS for op_type in self.rules.intersection(types))


@cache
def is_plumbing(func: Callable[..., Any], op_type: str) -> bool:
    """Return whether an op of this type is a detail of how torch computes a function."""
    name = getattr(func, "__name__", "")
    return op_type in LAYOUT or name in PLUMBING.get(op_type, "").split()


_TORCH = os.path.dirname(torch.__file__) + os.sep
LIBRARIES: tuple[str, ...] = (_TORCH, PACKAGE, "<eval_with_key>")  # (which torch.compile writes)


def is_returned(
    y: torch.Tensor, func: Any, args: Sequence[Any], options: Mapping[str, Any]
) -> bool:
    """Return whether a result is an input, into which nothing was written: `x.contiguous()`."""
    at = switch(func)
    writes = options.get("inplace") or (at is not None and args[at : at + 1] == (True,))
    if writes or getattr(func, "__name__", "").endswith("_"):
        return False
    return any(x is y for x in tensors(args))


def describe(func: Callable[..., Any], nodes: Sequence[Any]) -> str:
    """Return a call as the report shows it: `Tanh`, `torch.nn.functional.linear (MatMul)`."""
    if func in spellings():
        return name_of(func)
    named = [(node, t) for node in nodes for t in types_of(node.name())]
    types = {op_type for node, op_type in named if holds(op_type, node)}
    # (the one node of a fused kernel does not tell all that a rule would find in its parts)
    types |= {t for form in fused().get(func, ()) if form.when is None for t in form.contains}
    return f"{name_of(func)} ({', '.join(sorted(types))})" if types else name_of(func)


@cache
def gradients() -> frozenset[Any]:
    """Return the functions that run a backward pass; its ops are not the program's."""
    own: Any = torch.Tensor.grad.__get__  # pyright: ignore
    passes = torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward
    return frozenset({*passes, func_gradient, own})


def node_named(name: str) -> str:
    """Return the backward node of a torch function, by the name that torch would give it."""
    words = name.strip("_").split("_")
    return "".join(word.capitalize() for word in words) + "Backward"


def tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among some values, also in containers."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors(value)
        elif isinstance(value, dict):
            yield from tensors(value.values())


def new_nodes(node: Any, seen: set[Any], start: int = 0, end: int = LEAVES) -> list[Any]:
    """Return a node, and those behind it that are not in `seen`, with numbers in this range.

    (`seen` holds them: a wrapper that nobody holds goes, and the next may have its id.)
    """
    seen.add(node)
    found = [node]
    for each in found:  # which grows
        for behind, _ in each.next_functions:
            if behind is not None and start <= number_of(behind) < end and behind not in seen:
                seen.add(behind)
                found.append(behind)
    return found


@following
def types_of(node: str) -> tuple[str, ...]:
    """Return the op types that a backward node belongs to.

    torch numbers the overloads of a function behind the name of its node. It adds the kinds of
    arguments to the nodes of foreach functions (`ForeachMulBackward1ScalarList`).
    """
    word, found, _ = node.removeprefix("Foreach").lower().rpartition("backward")
    return _types().get(word + found, ())


@following
def _types() -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for op_type in {s.family.type for s in spellings().values()}:
        for node in map(str.lower, nodes_of(op_type)):  # (MaxPool2DWithIndices)
            found[node] = (*found.get(node, ()), op_type)
    return found


@following
def name_of(func: Callable[..., Any]) -> str:
    """Return a torch callable as reports show it: by its op type, or else by its name."""
    spelling = spellings().get(func)
    if spelling is not None:
        return spelling.family.type
    name = torch.overrides.resolve_name(func) if callable(func) else None
    name = name or getattr(func, "__qualname__", None) or str(func)
    return name.replace("_VariableFunctionsClass.", "torch.")
