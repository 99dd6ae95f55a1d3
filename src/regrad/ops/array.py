"""Shape ops: reshaping, broadcasting, moving axes, joining and splitting, diagonals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from regrad.core import backends, dims, dispatch
from regrad.core.backends import Array, Namespace
from regrad.core.op import TensorLike, op
from regrad.core.registry import gradient
from regrad.core.shapes import (
    Axis,
    Shape,
    as_shape,
    broadcast_shapes,
    normalized_axes,
    normalized_axis,
    spread_axes,
)
from regrad.core.signatures import public
from regrad.core.tensor import Tensor
from regrad.errors import ArgumentError, ShapeError
from regrad.graph.deferred import deferrable
from regrad.ops.rows import _sums, _zeros
from regrad.shapes.arrays import order_of, squeezed
from regrad.shapes.matrices import matrices, sizes_around

# -- reshaping -----------------------------------------------------------------------------------


@op("Reshape")
def reshape(xp, x: TensorLike, /, shape: Shape, *, copy: bool | None = None) -> Tensor:
    """Return x with a different shape of the same size.

    Args:
        shape: The sizes of the result. One size may be -1; it is inferred from the others.
        copy: Has no effect, because Tensors are immutable. The Array API standard requires it.

    Returns:
        A Tensor of the given shape and x's dtype, with the elements in row-major order.

    Raises:
        ShapeError: the total sizes differ, or more than one size is -1.

    Source: the Array API standard.

    >>> rg.reshape([1.0, 2.0, 3.0, 4.0], (2, -1)).tolist()
    [[1.0, 2.0], [3.0, 4.0]]
    """
    shape = as_shape(shape, rest=True)
    _check_size(tuple(x.shape), shape)
    return xp.reshape(x, shape)


gradient("Reshape")(lambda dy, x_shape: reshape(dy, x_shape))


def _check_size(old: tuple[int, ...], new: tuple[int, ...]) -> None:
    size, known = math.prod(old), math.prod(n for n in new if n != -1)
    if new.count(-1) > 1 or (size % (known or 1) if -1 in new else size != known):
        raise ShapeError(
            f"reshape: a Tensor of shape {old} has {size} elements and cannot have the shape {new}"
        )


@op("ExpandDims")
def expand_dims(xp, x: TensorLike, /, axis: int | tuple[int, ...] = 0) -> Tensor:
    """Return x with new axes of size 1.

    Args:
        axis: The position, or positions, of the new axes in the result.

    Returns:
        A Tensor of x's dtype, with one additional axis for each position.

    Source: the Array API standard.

    >>> rg.expand_dims(rg.ones((2, 3)), (0, -1)).shape
    (1, 2, 3, 1)
    """
    axes = axis if isinstance(axis, tuple | list) else (axis,)
    for a in normalized_axes(tuple(axes), x.ndim + len(axes)):
        x = xp.expand_dims(x, axis=a)
    return x


gradient("ExpandDims")(lambda dy, x_shape: reshape(dy, x_shape))


@op("Squeeze")
def squeeze(xp, x: TensorLike, /, axis: Axis = None) -> Tensor:
    """Return x without axes of size 1.

    Args:
        axis: The axis or axes to remove. By default, all axes of size 1.

    Returns:
        A Tensor of x's dtype, without those axes.

    Raises:
        ShapeError: a given axis does not have size 1.

    Source: the Array API standard.

    >>> rg.squeeze(rg.ones((1, 3, 1))).shape
    (3,)
    """
    return xp.reshape(x, squeezed(tuple(x.shape), axis))


gradient("Squeeze")(lambda dy, x_shape: reshape(dy, x_shape))


# -- broadcasting and its adjoint ----------------------------------------------------------------


@op("BroadcastTo")
def broadcast_to(xp, x: TensorLike, /, shape: Shape) -> Tensor:
    """Return x repeated along axes of size 1 and new leading axes.

    Args:
        shape: The shape of the result. x must broadcast to it.

    Returns:
        A Tensor of the given shape and x's dtype.

    Raises:
        InvalidValueError: x does not broadcast to the shape.

    Source: the Array API standard.

    >>> rg.broadcast_to([1.0, 2.0], (2, 2)).tolist()
    [[1.0, 2.0], [1.0, 2.0]]
    """
    shape = as_shape(shape)
    if xp is np and not dims.is_known(shape):  # NumPy has no symbolic sizes; JAX has them
        xp, x = backends.JAX.xp, backends.JAX.from_numpy(np.asarray(x))
    return xp.broadcast_to(x, shape)


gradient("BroadcastTo")(lambda dy, x_shape: sum_to(dy, x_shape))


@op("SumTo")
def sum_to(xp, x: TensorLike, /, shape: Shape) -> Tensor:
    """Return x summed down to a shape that broadcasts to x's shape: the adjoint of `broadcast_to`.

    Args:
        shape: The shape of the result.

    Returns:
        A Tensor of the given shape and x's dtype.

    Raises:
        InvalidValueError: the shape does not broadcast to x's shape.

    >>> rg.sum_to(rg.ones((2, 3)), (3,))
    Tensor([2., 2., 2.], dtype=float32)
    """
    shape = as_shape(shape)
    axes = spread_axes(shape, tuple(x.shape))
    if xp is np and x.dtype.kind in "fc":
        return xp.reshape(_sums(xp, x, axes, True), shape)
    y = xp.sum(x, axis=axes, keepdims=True, dtype=x.dtype)
    return xp.reshape(y, shape)


gradient("SumTo")(lambda dy, x_shape: broadcast_to(dy, x_shape))


@deferrable
def broadcast_arrays(*arrays: Any) -> list[Tensor]:
    """Return the Tensors, each broadcast to their common shape.

    Args:
        *arrays: Tensors, arrays or numbers.

    Returns:
        A list of Tensors of one shape, each of its own dtype.

    Raises:
        ArgumentError: an argument is not a Tensor, an array or a number.
        ShapeError: the shapes do not broadcast.

    Op type: `BroadcastTo`. Source: the Array API standard.

    >>> x, y = rg.broadcast_arrays([1.0, 2.0], rg.ones((3, 1)))
    >>> x.shape, y.shape
    ((3, 2), (3, 2))
    """
    xs = [dispatch.lift(a) for a in arrays]
    shape = broadcast_shapes(*[x.shape for x in xs])
    return [x if dims.same(x.shape, shape) else broadcast_to(x, shape) for x in xs]


@deferrable
def meshgrid(*arrays: Any, indexing: str = "xy") -> list[Tensor]:
    """Return coordinate arrays of the grid that vectors span.

    Args:
        *arrays: Vectors, or numbers, one per axis of the grid.
        indexing: "ij" (the k-th vector runs along axis k) or "xy" (the first two axes swapped).

    Returns:
        A list of Tensors of the grid's shape, one per vector, each of its vector's dtype.

    Raises:
        ArgumentError: `indexing` is neither "ij" nor "xy".
        ShapeError: an array has more than one axis.

    Source: the Array API standard.

    >>> [x.tolist() for x in rg.meshgrid([1.0, 2.0], [3.0, 4.0], indexing="ij")]
    [[[1.0, 1.0], [2.0, 2.0]], [[3.0, 4.0], [3.0, 4.0]]]
    """
    if indexing not in ("xy", "ij"):
        raise ArgumentError(f"meshgrid: indexing must be 'xy' or 'ij', got {indexing!r}")
    xs = [dispatch.lift(a) for a in arrays]
    if any(x.ndim > 1 for x in xs):
        raise ShapeError(f"meshgrid takes vectors, got shapes {[x.shape for x in xs]}")
    axes = list(range(len(xs)))
    if indexing == "xy" and len(xs) > 1:
        axes[:2] = 1, 0
    along = [[1] * len(xs) for _ in xs]
    for x, axis, shape in zip(xs, axes, along, strict=True):
        shape[axis] = x.size
    return broadcast_arrays(*[reshape(x, tuple(s)) for x, s in zip(xs, along, strict=True)])


@op("Tile")
def _tile(xp, x: TensorLike, /, *, repetitions: tuple[int, ...]) -> Tensor:
    return xp.tile(x, repetitions)


@gradient("Tile")
def _(dy, x_shape, repetitions):
    more = len(repetitions) - len(x_shape)
    repetitions = (*[1] * -more, *repetitions)
    sizes = (*[1] * more, *x_shape)
    pairs = tuple(n for pair in zip(repetitions, sizes, strict=True) for n in pair)
    ones = tuple(n for size in sizes for n in (1, size))
    return reshape(sum_to(reshape(dy, pairs), ones), x_shape)


@public
def tile(x: TensorLike, repetitions: tuple[int, ...], /) -> Tensor:
    """Return x repeated along its axes, `repetitions[i]` times along axis i.

    Args:
        repetitions: One int per axis. With more ints than axes, x gets new leading axes. With
            fewer, they apply to the last axes.

    Returns:
        A Tensor of x's dtype. Each size is x's size times the number of repetitions.

    Op type: `Tile`. Source: the Array API standard.

    >>> rg.tile([1.0, 2.0], (2,))
    Tensor([1., 2., 1., 2.], dtype=float32)
    """
    return _tile(x, repetitions=as_shape(repetitions))


# -- moving axes ---------------------------------------------------------------------------------


@op("Transpose")
def permute_dims(xp, x: TensorLike, /, axes: tuple[int, ...] | None = None) -> Tensor:
    """Return x with its axes in another order.

    Args:
        axes: Each axis of x once; negative ones count from the end. The default reverses the order.

    Returns:
        A Tensor of x's dtype. Its i-th size is `x.shape[axes[i]]`.

    Raises:
        ShapeError: `axes` does not contain each axis of x exactly once.

    Source: the Array API standard.

    >>> rg.permute_dims(rg.ones((2, 3, 4)), (2, 0, 1)).shape
    (4, 2, 3)
    """
    return xp.permute_dims(x, order_of(tuple(x.shape), axes))


@gradient("Transpose")
def _(dy, axes):
    if axes is None:
        return permute_dims(dy)
    positive = [a % len(axes) for a in axes]
    return permute_dims(dy, tuple(positive.index(i) for i in range(len(axes))))


@deferrable
def matrix_transpose(x: TensorLike, /) -> Tensor:
    """Return x with its last two axes swapped.

    Returns:
        A Tensor of x's dtype and of shape `(..., n, m)`, for x of shape `(..., m, n)`.

    Raises:
        ShapeError: x has fewer than two axes.

    Op type: `Transpose`. Source: the Array API standard.

    >>> rg.matrix_transpose(rg.ones((2, 3, 4))).shape
    (2, 4, 3)
    """
    x = dispatch.lift(x)
    if x.ndim < 2:
        raise ShapeError(f"matrix_transpose needs a Tensor of rank 2 or more, got {x.shape}")
    *rest, i, j = range(x.ndim)
    return permute_dims(x, (*rest, j, i))


@deferrable
def swapaxes(x: TensorLike, axis1: int, axis2: int, /) -> Tensor:
    """Return x with two axes swapped.

    Args:
        axis1, axis2: The axes; negative values count from the end.

    Returns:
        A Tensor of x's dtype.

    Raises:
        AxisError: x has no such axis.

    Op type: `Transpose`. Source: `numpy.swapaxes`.

    >>> rg.swapaxes(rg.ones((2, 3, 4)), 0, 2).shape
    (4, 3, 2)
    """
    x = dispatch.lift(x)
    i, j = normalized_axis(axis1, x.ndim), normalized_axis(axis2, x.ndim)
    axes = list(range(x.ndim))
    axes[i], axes[j] = j, i
    return permute_dims(x, tuple(axes))


@deferrable
def moveaxis(
    x: TensorLike, source: int | tuple[int, ...], destination: int | tuple[int, ...], /
) -> Tensor:
    """Return x with some axes moved. The other axes keep their order.

    Args:
        source: The axis or axes to move.
        destination: The positions of these axes in the result, in the same number.

    Returns:
        A Tensor of x's dtype.

    Raises:
        ArgumentError: `source` and `destination` differ in length, or repeat an axis.
        AxisError: x has no such axis.

    Op type: `Transpose`. Source: the Array API standard.

    >>> rg.moveaxis(rg.ones((2, 3, 4)), 0, -1).shape
    (3, 4, 2)
    """
    x = dispatch.lift(x)
    old, new = (
        [normalized_axis(a, x.ndim) for a in (axes if isinstance(axes, tuple | list) else (axes,))]
        for axes in (source, destination)
    )
    if len(old) != len(new) or len(set(old)) < len(old) or len(set(new)) < len(new):
        raise ArgumentError(
            f"moveaxis: source and destination must name the same number of distinct axes, got "
            f"{source} and {destination}"
        )
    moved = dict(zip(new, old, strict=True))
    rest = iter([a for a in range(x.ndim) if a not in old])
    return permute_dims(x, tuple(moved[i] if i in moved else next(rest) for i in range(x.ndim)))


@op("ReverseV2")
def flip(xp, x: TensorLike, /, *, axis: Axis = None) -> Tensor:
    """Return x with the order of its elements reversed.

    Args:
        axis: The axis or axes. By default, all axes.

    Returns:
        A Tensor of x's shape and dtype.

    Source: the Array API standard.

    >>> rg.flip([1.0, 2.0, 3.0])
    Tensor([3., 2., 1.], dtype=float32)
    """
    axes = normalized_axes(axis, x.ndim)
    return xp.flip(x, axis=axes) if axes else x


gradient("ReverseV2")(lambda dy, axis: flip(dy, axis=axis))


@op("Roll")
def roll(xp, x: TensorLike, /, shift: int | tuple[int, ...], *, axis: Axis = None) -> Tensor:
    """Return x with its elements rolled; elements that leave at one end enter at the other.

    Args:
        shift: The number of places, one int or one per axis. Negative ones roll toward the start.
        axis: The axis or axes. None rolls x as if it were flat.

    Returns:
        A Tensor of x's shape and dtype.

    Source: the Array API standard.

    >>> rg.roll([1.0, 2.0, 3.0], 1)
    Tensor([3., 1., 2.], dtype=float32)
    """
    return xp.roll(x, shift, axis=axis)


@gradient("Roll")
def _(dy, shift, axis):
    back = tuple(-s for s in shift) if isinstance(shift, tuple | list) else -shift
    return roll(dy, back, axis=axis)


# -- triangles and diagonals ---------------------------------------------------------------------


@op("Tril")
def tril(xp, x: TensorLike, /, *, k: int = 0) -> Tensor:
    """Return the lower triangle of matrices, with zeros elsewhere.

    Args:
        k: The diagonal above which elements are 0. The main diagonal is 0; 1 is the one above it.

    Returns:
        A Tensor of x's shape and dtype.

    Raises:
        ShapeError: x has fewer than two axes.

    Source: the Array API standard.

    >>> rg.tril(rg.ones((2, 2))).tolist()
    [[1.0, 0.0], [1.0, 1.0]]
    """
    matrices("tril", tuple(x.shape))
    return xp.tril(x, k=k)


gradient("Tril")(lambda dy, k: tril(dy, k=k))


@op("Triu")
def triu(xp, x: TensorLike, /, *, k: int = 0) -> Tensor:
    """Return the upper triangle of matrices, with zeros elsewhere.

    Args:
        k: The diagonal below which elements are 0. The main diagonal is 0; 1 is the one above it.

    Returns:
        A Tensor of x's shape and dtype.

    Raises:
        ShapeError: x has fewer than two axes.

    Source: the Array API standard.

    >>> rg.triu(rg.ones((2, 2))).tolist()
    [[1.0, 1.0], [0.0, 1.0]]
    """
    matrices("triu", tuple(x.shape))
    return xp.triu(x, k=k)


gradient("Triu")(lambda dy, k: triu(dy, k=k))


@op("MatrixDiagPart")
def diagonal(xp, x: TensorLike, /, *, offset: int = 0) -> Tensor:
    """Return the diagonals of matrices.

    Args:
        offset: The diagonal: 0 for the main one, positive above it, negative below.

    Returns:
        A Tensor of x's dtype. The last two axes are replaced by one axis, the diagonal.

    Raises:
        ShapeError: x has fewer than two axes.

    Source: the Array API standard.

    >>> rg.linalg.diagonal([[1.0, 2.0], [3.0, 4.0]])
    Tensor([1., 4.], dtype=float32)
    """
    matrices("diagonal", tuple(x.shape))
    rows, columns = _diagonal_places(xp, tuple(x.shape[-2:]), offset, x)
    return x[..., rows, columns]


def _diagonal_places(
    xp: Namespace, shape: tuple[int, ...], offset: int, like: Array
) -> tuple[Any, Any]:
    """Return the indices of a diagonal's elements."""
    down, right = max(-offset, 0), max(offset, 0)
    length = max(min(shape[0] - down, shape[1] - right), 0)
    options = backends.placed_like(like)
    i = xp.arange(length, **options) if options else np.arange(length)
    return i + down, i + right


gradient("MatrixDiagPart")(lambda dy, x_shape, offset: diag(dy, offset=offset, shape=x_shape[-2:]))


@op("MatrixDiag")
def diag(xp, x: TensorLike, /, *, offset: int = 0, shape: tuple[int, int] | None = None) -> Tensor:
    """Return matrices with x on a diagonal and zeros elsewhere: the adjoint of `diagonal`.

    Args:
        x: A vector, or vectors along the last axis.
        offset: The diagonal: 0 for the main one, positive above it, negative below.
        shape: (rows, columns). By default, the smallest square that holds the diagonal.

    Returns:
        A Tensor of x's dtype. The last axis is replaced by two axes, the matrices.

    Raises:
        ShapeError: x is a number, or x's length is not the length of the diagonal.

    Source: `numpy.diag`.

    >>> rg.linalg.diag([1.0, 2.0]).tolist()
    [[1.0, 0.0], [0.0, 2.0]]
    """
    given = None if shape is None else as_shape(shape)
    sizes = sizes_around(tuple(x.shape), offset, given)
    places = _diagonal_places(xp, sizes, offset, x)
    y = _zeros(xp, (*x.shape[:-1], *sizes), x)
    if hasattr(y, "at"):
        return y.at[(..., *places)].set(x)
    y[(..., *places)] = x
    return y


gradient("MatrixDiag")(lambda dy, offset: diagonal(dy, offset=offset))
