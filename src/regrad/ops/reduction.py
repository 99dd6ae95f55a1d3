"""Reductions and cumulative ops. Each takes `axis` (None for all, an int or a tuple)."""

# ruff: noqa: A001 (the Array API standard's names)
from __future__ import annotations

from typing import Any

from regrad import namespaces
from regrad.opsheet import op
from regrad.registry import gradient
from regrad.shapes import Axis, normalized_axes
from regrad.tensor import Tensor

# -- sum and its adjoint -------------------------------------------------------------------------


@op("Sum")
def sum(
    xp, x: Tensor, /, *, axis: Axis = None, dtype: Any = None, keepdims: bool = False
) -> Tensor:
    """The sum over `axis` (all axes by default). Integers are summed as the standard says."""
    dtype = None if dtype is None else namespaces.native_dtype(xp, dtype)
    return xp.sum(x, axis=axis, dtype=dtype, keepdims=keepdims)


@gradient("Sum")
def _(dy, x_shape, axis, keepdims):
    return unreduce(dy, x_shape, axis, keepdims)


@op("Unreduce")
def unreduce(xp, x: Tensor, /, shape: tuple[int, ...], axis: Axis, keepdims: bool) -> Tensor:
    """A reduced tensor spread back over the axes that were reduced: the adjoint of `sum`."""
    if not keepdims:
        for i in normalized_axes(axis, len(shape)):
            x = xp.expand_dims(x, axis=i)
    return xp.broadcast_to(x, tuple(shape))


@gradient("Unreduce")
def _(dy, axis, keepdims):
    return sum(dy, axis=axis, keepdims=keepdims)
