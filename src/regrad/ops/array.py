"""Shape ops: reshaping, broadcasting, moving axes, joining and splitting."""

from __future__ import annotations

import math
from typing import Any

from regrad.errors import ShapeError
from regrad.opsheet import op
from regrad.registry import gradient
from regrad.shapes import Shape, as_shape, normalized_axes, spread_axes
from regrad.tensor import Tensor

# -- reshaping ---------------------------------------------------------------------------------


@op("Reshape")
def reshape(xp, x: Tensor, /, shape: Shape, *, copy: bool | None = None) -> Tensor:
    """x with another shape of the same size; one size may be -1."""
    shape = as_shape(shape)
    _check_size(tuple(x.shape), shape)
    return xp.reshape(x, shape)


@gradient("Reshape")
def _(dy, x_shape):
    return reshape(dy, x_shape)


def _check_size(old: tuple[int, ...], new: tuple[int, ...]) -> None:
    size, known = math.prod(old), math.prod(n for n in new if n != -1)
    if new.count(-1) > 1 or (size % (known or 1) if -1 in new else size != known):
        raise ShapeError(
            f"reshape: a Tensor of shape {old} has {size} elements and cannot have the shape {new}"
        )


@op("ExpandDims")
def expand_dims(xp, x: Tensor, /, axis: int | tuple[int, ...] = 0) -> Tensor:
    """x with new axes of size 1 at the given positions of the result."""
    axes = axis if isinstance(axis, tuple | list) else (axis,)
    for a in normalized_axes(tuple(axes), x.ndim + len(axes)):
        x = xp.expand_dims(x, axis=a)
    return x


@gradient("ExpandDims")
def _(dy, x_shape):
    return reshape(dy, x_shape)


# -- broadcasting and its adjoint ----------------------------------------------------------------


@op("BroadcastTo")
def broadcast_to(xp, x: Tensor, /, shape: Shape) -> Tensor:
    """x repeated along axes of size 1, and new leading ones, to the given shape."""
    return xp.broadcast_to(x, as_shape(shape))


@gradient("BroadcastTo")
def _(dy, x_shape):
    return sum_to(dy, x_shape)


@op("SumTo")
def sum_to(xp, x: Tensor, /, shape: Shape) -> Tensor:
    """x summed down to a shape that broadcasts to its own: the adjoint of `broadcast_to`."""
    shape = as_shape(shape)
    y = xp.sum(x, axis=spread_axes(shape, tuple(x.shape)), keepdims=True, dtype=x.dtype)
    return xp.reshape(y, shape)


@gradient("SumTo")
def _(dy, x_shape):
    return broadcast_to(dy, x_shape)


# -- moving axes ---------------------------------------------------------------------------------


@op("Transpose")
def permute_dims(xp, x: Tensor, /, axes: tuple[int, ...] | None = None) -> Tensor:
    """x with its axes in another order (reversed by default)."""
    axes = tuple(range(x.ndim))[::-1] if axes is None else tuple(a % x.ndim for a in axes)
    return xp.permute_dims(x, axes)


@gradient("Transpose")
def _(dy, axes):
    if axes is None:
        return permute_dims(dy)
    positive = [a % len(axes) for a in axes]
    return permute_dims(dy, tuple(positive.index(i) for i in range(len(axes))))


def matrix_transpose(x: Any, /) -> Tensor:
    """x with its last two axes exchanged."""
    from regrad.dispatch import lift

    x = lift(x)
    if x.ndim < 2:
        raise ShapeError(f"matrix_transpose needs a Tensor of rank 2 or more, got {x.shape}")
    *rest, i, j = range(x.ndim)
    return permute_dims(x, (*rest, j, i))
