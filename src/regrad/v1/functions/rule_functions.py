"""TensorFlow's functions for the gradients of op types: `nn_grad._ReluGrad(op, grad)` and its kin.

In TensorFlow they are spread over modules of which nobody remembers which has what; here each of
the modules has all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from regrad.core.builtin import builtin
from regrad.core.registry import ALIASES, OPS, canonical
from regrad.core.rule import NoGradient, NoRule, Rule
from regrad.core.rule_forms import OpView
from regrad.errors import near
from regrad.v1.graph.tensors import Tensor

# names that are not made of the op type, as `_ReluGrad` is of Relu
IRREGULAR = {
    "_BatchMatMul": "MatMul", "_BatchMatMulV2": "MatMul", "_ComplexAbsGrad": "Abs",
    "_ConcatGradV2": "ConcatV2", "_Conv3DBackpropFilterGrad": "Conv3DBackpropFilterV2",
    "_Conv3DBackpropInputGrad": "Conv3DBackpropInputV2", "_IdGrad": "Identity",
    "_IdNGrad": "IdentityN", "_SelectGradV2": "SelectV2",
}  # fmt: skip


def rule_function(name: str) -> Callable[..., Any]:
    """Return the function of this name, which takes `(op, grad, …)`.

    As in TensorFlow, it returns one tensor for an op of one input, else a list, with None where
    there is no gradient.

    Raises AttributeError, with near names, for a name without an op type that has a gradient.
    """
    known = names()
    if name not in known:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"there is no gradient function {name!r}.{near(name, known)}")
    rule = builtin(known[name])

    def function(op: OpView, *grads: Tensor | None) -> Any:
        return rule.of(op, *grads)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"The gradient of the op type `{canonical(known[name])}`."
    return function


def names() -> dict[str, str]:
    """The names of the functions, with their op types."""
    regular = {f"_{op_type}Grad": op_type for op_type in [*ALIASES, *OPS]}
    named = {**regular, **IRREGULAR}
    return {name: t for name, t in named.items() if not isinstance(_rule(t), NoGradient | NoRule)}


def _rule(op_type: str) -> Rule:
    return OPS[canonical(op_type)].shipped


def list_names() -> list[str]:
    """Return the names that a module of these functions shows."""
    return sorted(names())
