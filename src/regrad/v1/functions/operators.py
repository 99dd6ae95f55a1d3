"""Operators of tensors and Variables, with TensorFlow's op names: `x + 1` is `add`, `add/y`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from regrad.core.tensor import Readable, TensorLike
from regrad.v1.functions import bitwise, linalg, math
from regrad.v1.functions.indexing import getitem
from regrad.v1.graph.forms import dtype_of, tensor
from regrad.v1.graph.tensors import Tensor
from regrad.v1.graph.variables import Variable

Operator = Callable[..., Any]


def _pair(function: Operator, name: str) -> tuple[Operator, Operator]:
    """Return an operator and its reflection."""

    def operator(self: Readable, other: TensorLike) -> Any:
        return function(self, other, name=name)

    def reflection(self: Readable, other: TensorLike) -> Any:
        return function(other, self, name=name)

    return operator, reflection


def _logical(for_bools: Operator, for_integers: Operator) -> Operator:
    """Return an operator that makes one op type for bools and another for integers."""

    def function(x: TensorLike, y: TensorLike, name: str) -> Any:
        own = x if isinstance(x, Readable) else y
        return (for_bools if dtype_of(own).kind == "b" else for_integers)(x, y, name=name)

    return function


TWO_SIDED: dict[str, Operator] = {
    "add": math.add, "sub": math.subtract, "mul": math.multiply, "truediv": math.truediv,
    "floordiv": math.floordiv, "mod": math.floormod, "pow": math.pow, "matmul": linalg.matmul,
    "and": _logical(math.logical_and, bitwise.bitwise_and),
    "or": _logical(math.logical_or, bitwise.bitwise_or),
    "xor": _logical(math.logical_xor, bitwise.bitwise_xor),
}  # fmt: skip


def _equal(self: Readable, other: TensorLike) -> Any:
    return False if other is None else math.equal(self, other)


def _not_equal(self: Readable, other: TensorLike) -> Any:
    return True if other is None else math.not_equal(self, other)


def _invert(self: Readable) -> Any:
    x = tensor(self)
    return math.logical_not(x) if dtype_of(x).kind == "b" else bitwise.invert(x)


OTHERS: dict[str, Any] = {
    "lt": math.less, "le": math.less_equal, "gt": math.greater, "ge": math.greater_equal,
    "invert": _invert, "getitem": getitem, "abs": math.abs, "neg": math.negative,
}  # fmt: skip

for _cls in (Tensor, Variable):
    for _name, _function in TWO_SIDED.items():
        _operator, _reflection = _pair(_function, _name)
        setattr(_cls, f"__{_name}__", _operator)
        setattr(_cls, f"__r{_name}__", _reflection)
    for _name, _function in OTHERS.items():
        setattr(_cls, f"__{_name}__", _function)
Tensor.__eq__, Tensor.__ne__ = _equal, _not_equal  # a Variable equals only itself
