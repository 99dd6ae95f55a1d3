"""TensorFlow's gradient functions of op types, such as `nn_grad._ReluGrad(op, grad)`, by name.

TensorFlow spreads these functions over several modules. In regrad each of the modules has all of
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from regrad.core.builtin import builtin
from regrad.core.registry import ALIASES, OPS, canonical
from regrad.core.rule import NoGradient, NoRule
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


def __getattr__(name: str) -> Callable[..., Any]:
    """Return the gradient function of this name, which takes `(op, grad, …)`.

    As in TensorFlow, the function returns one tensor for an op with one input. For an op with
    several inputs it returns a list, with None for inputs without a gradient.

    Raises AttributeError, with similar names, unless the name belongs to an op type with a
    gradient.
    """
    if name.startswith("__"):  # Python's own, such as __path__
        raise AttributeError(name)
    known = _op_types()
    if name not in known:
        raise AttributeError(f"there is no gradient function {name!r}.{near(name, known)}")
    rule = builtin(known[name])

    def function(op: OpView, *grads: Tensor | None) -> Any:
        return rule.of(op, *grads)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"The gradient of the op type `{known[name]}`."
    return function


def __dir__() -> list[str]:
    return sorted(_op_types())


def _op_types() -> dict[str, str]:
    """Return the op types by the names of their gradient functions."""
    named = {f"_{op_type}Grad": canonical(op_type) for op_type in [*ALIASES, *OPS]} | IRREGULAR
    return {
        name: t for name, t in named.items() if not isinstance(OPS[t].shipped, NoGradient | NoRule)
    }
