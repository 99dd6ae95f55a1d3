"""The safety net: the nodes that autograd records show whether torch skipped an override.

A table of torch's functions can miss one, now or in the next release of torch. Autograd cannot.
Every function that computes a gradient leaves a node in its graph, and the class of the node names
the op. So after each call without a rule, regrad checks the nodes that the call created. For a
function that a table lists as harmless it checks the last node, otherwise all nodes. With an active
rule for "Tanh",

    y = library.fused_gelu(x)       # y.grad_fn: MulBackward, which leads to TanhBackward

the node `TanhBackward` belongs to "Tanh", so the call raises PassedOverError. The error names the
function and the alternatives.

Autograd numbers its nodes in the order of creation, per thread. The nodes of a call are the nodes
that its results depend on and whose number is not below the number at the start of the call.

Invariants:

* regrad caches each check by the function and the kinds of nodes (`Watch.harmless`), unless the
  contents of the node matter (`HOLDS`: an `EluBackward` may belong to `elu` or to `selu`). So a
  loop over layers pays only for the first layer.
* A node that a table lists as torch's internal step (the factor of a dropout mask) is not the
  user's op.
* The search ends at leaves; the nodes of earlier functions have smaller numbers.
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

# Ops that torch runs inside a call and that the caller did not write: the layout of an operand
# (anywhere), the factor of a dropout mask, the mean in an adaptive pooling.
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
    """Checks the calls of torch functions that no rule of a scope covers.

    Autograd numbers its nodes in the order of creation, so their numbers identify the nodes of a
    call. The check compares these nodes with the nodes of the overridden op types.
    """

    def __init__(self, rules: Iterable[str]) -> None:
        self.rules: frozenset[str] = frozenset(rules)
        self.harmless: dict[Any, str] = {}  # (function, kinds of nodes) -> its name in reports

    def look(
        self, func: Callable[..., Any], start: int, result: Any, note: Callable[[str, int], None]
    ) -> None:
        """Note a call that kept its gradient; raise if the call computed an overridden op.

        Args:
            func: The function of torch.
            start: The number of the first node that the call may have created.
            result: The result of the call.
            note: Receives the name of the call in reports, and the number of regrad's frames above.
        """
        seen: set[Any] = set()
        end = sequence_nr()
        for y in (result,) if isinstance(result, torch.Tensor) else tensors((result,)):
            node = y.grad_fn or unwrap(y).grad_fn
            # (a function may return its input or a view; their nodes belong to earlier functions)
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
        """Raise if a node belongs to an overridden op; return whether a similar node could."""
        if func in fused() and func not in spellings():
            return False  # the table lists the ops inside, and the scope decomposes it for them
        name = node.name()
        hidden = name.endswith("CopySlices")  # an in-place change of a view hides the node
        # In that case only the name of the function remains: `relu_` would create ReluBackward.
        types = types_of(node_named(getattr(func, "__name__", "")) if hidden else name)
        for op_type in types:
            if op_type not in self.rules or is_plumbing(func, op_type):
                continue
            # (the function may have arguments that make it a different op)
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
    """Return whether an op of this type is an internal step of a torch function."""
    name = getattr(func, "__name__", "")
    return op_type in LAYOUT or name in PLUMBING.get(op_type, "").split()


_TORCH = os.path.dirname(torch.__file__) + os.sep
LIBRARIES: tuple[str, ...] = (_TORCH, PACKAGE, "<eval_with_key>")  # (torch.compile's own code)


def is_returned(
    y: torch.Tensor, func: Any, args: Sequence[Any], options: Mapping[str, Any]
) -> bool:
    """Return whether a result is an unmodified input: `x.contiguous()`."""
    at = switch(func)
    writes = options.get("inplace") or (at is not None and args[at : at + 1] == (True,))
    if writes or getattr(func, "__name__", "").endswith("_"):
        return False
    return any(x is y for x in tensors(args))


def describe(func: Callable[..., Any], nodes: Sequence[Any]) -> str:
    """Return the name of a call in reports: `Tanh`, `torch.nn.functional.linear (MatMul)`."""
    if func in spellings():
        return name_of(func)
    named = [(node, t) for node in nodes for t in types_of(node.name())]
    types = {op_type for node, op_type in named if holds(op_type, node)}
    # (the one node of a fused kernel does not show every op of its decomposition)
    types |= {t for form in fused().get(func, ()) if form.when is None for t in form.contains}
    return f"{name_of(func)} ({', '.join(sorted(types))})" if types else name_of(func)


@cache
def gradients() -> frozenset[Any]:
    """Return the functions that run a backward pass; ops inside are not the program's."""
    own: Any = torch.Tensor.grad.__get__  # pyright: ignore
    passes = torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward
    return frozenset({*passes, func_gradient, own})


def node_named(name: str) -> str:
    """Return the backward node of a torch function, by torch's naming scheme."""
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
    """Return a node and the new nodes that it leads to, with numbers in this range.

    (`seen` holds references to the nodes: a freed wrapper could pass its id on to the next one.)
    """
    seen.add(node)
    found = [node]
    for each in found:  # (`found` grows during the loop)
        for behind, _ in each.next_functions:
            if behind is not None and start <= number_of(behind) < end and behind not in seen:
                seen.add(behind)
                found.append(behind)
    return found


@following
def types_of(node: str) -> tuple[str, ...]:
    """Return the op types that a backward node belongs to.

    torch appends the number of an overload to the name of the node. For foreach functions it also
    appends the kinds of arguments (`ForeachMulBackward1ScalarList`).
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
    """Return the name of a torch callable in reports: its op type, or otherwise its own name."""
    spelling = spellings().get(func)
    if spelling is not None:
        return spelling.family.type
    name = torch.overrides.resolve_name(func) if callable(func) else None
    name = name or getattr(func, "__qualname__", None) or str(func)
    return name.replace("_VariableFunctionsClass.", "torch.")
