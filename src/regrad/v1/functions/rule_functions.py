"""TensorFlow's gradient functions of op types, such as `nn_grad._ReluGrad(op, grad)`.

TensorFlow spreads these functions over several modules. In regrad each of the modules has all of
them.
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

# Names that do not follow the pattern `_ReluGrad` for Relu.
IRREGULAR = {
    "_BatchMatMul": "MatMul", "_BatchMatMulV2": "MatMul", "_ComplexAbsGrad": "Abs",
    "_ConcatGradV2": "ConcatV2", "_Conv3DBackpropFilterGrad": "Conv3DBackpropFilterV2",
    "_Conv3DBackpropInputGrad": "Conv3DBackpropInputV2", "_IdGrad": "Identity",
    "_IdNGrad": "IdentityN", "_SelectGradV2": "SelectV2",
}  # fmt: skip


def rule_function(name: str) -> Callable[..., Any]:
    """Return the gradient function of this name, which takes `(op, grad, …)`.

    As in TensorFlow, the function returns one tensor for an op with one input. For an op with
    several inputs it returns a list, with None for inputs without a gradient.

    Raises AttributeError, with similar names, unless the name belongs to an op type with a
    gradient.
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
    """Return the names of the functions, with their op types."""
    regular = {f"_{op_type}Grad": op_type for op_type in [*ALIASES, *OPS]}
    named = {**regular, **IRREGULAR}
    return {name: t for name, t in named.items() if not isinstance(_rule(t), NoGradient | NoRule)}


def _rule(op_type: str) -> Rule:
    return OPS[canonical(op_type)].shipped


def list_names() -> list[str]:
    """Return the names of the functions, sorted, for `dir`."""
    return sorted(names())
