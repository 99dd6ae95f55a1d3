"""Shape ops: reshaping, broadcasting, moving axes, joining and splitting, diagonals."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    part_sizes,
    spread_axes,
)
from regrad.core.signatures import public
from regrad.core.tensor import Tensor
from regrad.errors import ArgumentError, ShapeError, kind
from regrad.graph.deferred import deferrable
from regrad.ops.rows import _sums, _zeros

# -- reshaping -----------------------------------------------------------------------------------


@op("Reshape")
def reshape(xp, x: TensorLike, /, shape: Shape, *, copy: bool | None = None) -> Tensor:
    """x with another shape of the same size; one size may be -1."""
    shape = as_shape(shape, rest=True)
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
def expand_dims(xp, x: TensorLike, /, axis: int | tuple[int, ...] = 0) -> Tensor:
    """x with new axes of size 1 at the given positions of the result."""
    axes = axis if isinstance(axis, tuple | list) else (axis,)
    for a in normalized_axes(tuple(axes), x.ndim + len(axes)):
        x = xp.expand_dims(x, axis=a)
    return x


@gradient("ExpandDims")
def _(dy, x_shape):
    return reshape(dy, x_shape)


@op("Squeeze")
def squeeze(xp, x: TensorLike, /, axis: Axis = None) -> Tensor:
    """x without the given axes, which have size 1 (all such axes by default)."""
    shape = tuple(x.shape)
    axes = (
        [i for i, n in enumerate(shape) if n == 1]
        if axis is None
        else normalized_axes(axis, x.ndim)
    )
    if any(shape[i] != 1 for i in axes):
        raise ShapeError(f"squeeze: only axes of size 1 can be left out; axis {axis} of {shape}")
    return xp.reshape(x, tuple(n for i, n in enumerate(shape) if i not in axes))


@gradient("Squeeze")
def _(dy, x_shape):
    return reshape(dy, x_shape)


# -- broadcasting and its adjoint ----------------------------------------------------------------


@op("BroadcastTo")
def broadcast_to(xp, x: TensorLike, /, shape: Shape) -> Tensor:
    """x repeated along axes of size 1, and new leading ones, to the given shape."""
    shape = as_shape(shape)
    if xp is np and not dims.is_known(shape):  # NumPy has no symbolic sizes, and JAX has
        xp, x = backends.JAX.xp, backends.JAX.from_numpy(np.asarray(x))
    return xp.broadcast_to(x, shape)


@gradient("BroadcastTo")
def _(dy, x_shape):
    return sum_to(dy, x_shape)


@op("SumTo")
def sum_to(xp, x: TensorLike, /, shape: Shape) -> Tensor:
    """x summed down to a shape that broadcasts to its own: the adjoint of `broadcast_to`."""
    shape = as_shape(shape)
    axes = spread_axes(shape, tuple(x.shape))
    if xp is np and x.dtype.kind in "fc":
        return xp.reshape(_sums(xp, x, axes, True), shape)
    y = xp.sum(x, axis=axes, keepdims=True, dtype=x.dtype)
    return xp.reshape(y, shape)


@gradient("SumTo")
def _(dy, x_shape):
    return broadcast_to(dy, x_shape)


@deferrable
def broadcast_arrays(*arrays: Any) -> list[Tensor]:
    """The tensors, each broadcast to their common shape."""
    xs = [dispatch.lift(a) for a in arrays]
    shape = broadcast_shapes(*[x.shape for x in xs])
    return [x if dims.same(x.shape, shape) else broadcast_to(x, shape) for x in xs]


@deferrable
def meshgrid(*arrays: Any, indexing: str = "xy") -> list[Tensor]:
    """Coordinate tensors of the grid that vectors span.

    With `indexing="ij"` the k-th vector runs along axis k; "xy" exchanges the first two axes.
    """
    if indexing not in ("xy", "ij"):
        raise ArgumentError(f"meshgrid: indexing is 'xy' or 'ij', got {indexing!r}")
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
    """x laid side by side, `repetitions[i]` times along axis i.

    Repetitions for more axes than x has make new leading ones; for fewer, they are for the last.

    Op type: `Tile`.
    """
    return _tile(x, repetitions=as_shape(repetitions))


# -- moving axes ---------------------------------------------------------------------------------


@op("Transpose")
def permute_dims(xp, x: TensorLike, /, axes: tuple[int, ...] | None = None) -> Tensor:
    """x with its axes in another order (reversed by default)."""
    every = list(range(x.ndim))
    order = every[::-1] if axes is None else [a + x.ndim if a < 0 else a for a in axes]
    if sorted(order) != every:
        raise ShapeError(
            f"permute_dims: expected each axis of {tuple(x.shape)} once, got the axes {axes}"
        )
    return xp.permute_dims(x, tuple(order))


@gradient("Transpose")
def _(dy, axes):
    if axes is None:
        return permute_dims(dy)
    positive = [a % len(axes) for a in axes]
    return permute_dims(dy, tuple(positive.index(i) for i in range(len(axes))))


@deferrable
def matrix_transpose(x: TensorLike, /) -> Tensor:
    """x with its last two axes exchanged."""
    x = dispatch.lift(x)
    if x.ndim < 2:
        raise ShapeError(f"matrix_transpose needs a Tensor of rank 2 or more, got {x.shape}")
    *rest, i, j = range(x.ndim)
    return permute_dims(x, (*rest, j, i))


@deferrable
def swapaxes(x: TensorLike, axis1: int, axis2: int, /) -> Tensor:
    """x with two axes exchanged."""
    x = dispatch.lift(x)
    i, j = normalized_axis(axis1, x.ndim), normalized_axis(axis2, x.ndim)
    axes = list(range(x.ndim))
    axes[i], axes[j] = j, i
    return permute_dims(x, tuple(axes))


@deferrable
def moveaxis(
    x: TensorLike, source: int | tuple[int, ...], destination: int | tuple[int, ...], /
) -> Tensor:
    """x with the axes `source` moved to `destination`; the others keep their order."""
    x = dispatch.lift(x)
    old, new = (
        [normalized_axis(a, x.ndim) for a in (axes if isinstance(axes, tuple | list) else (axes,))]
        for axes in (source, destination)
    )
    if len(old) != len(new) or len(set(old)) < len(old) or len(set(new)) < len(new):
        raise ArgumentError(
            f"moveaxis: source and destination must name as many different axes, got {source} "
            f"and {destination}"
        )
    moved = dict(zip(new, old, strict=True))
    rest = iter([a for a in range(x.ndim) if a not in old])
    return permute_dims(x, tuple(moved[i] if i in moved else next(rest) for i in range(x.ndim)))


@op("ReverseV2")
def flip(xp, x: TensorLike, /, *, axis: Axis = None) -> Tensor:
    """x with the order of its elements reversed along `axis` (all axes by default)."""
    axes = normalized_axes(axis, x.ndim)
    return xp.flip(x, axis=axes) if axes else x


@gradient("ReverseV2")
def _(dy, axis):
    return flip(dy, axis=axis)


@op("Roll")
def roll(xp, x: TensorLike, /, shift: int | tuple[int, ...], *, axis: Axis = None) -> Tensor:
    """x rolled by `shift` places along `axis`; what leaves at one end enters at the other.

    Without an axis x is rolled as if it were flat.
    """
    return xp.roll(x, shift, axis=axis)


@gradient("Roll")
def _(dy, shift, axis):
    back = tuple(-s for s in shift) if isinstance(shift, tuple | list) else -shift
    return roll(dy, back, axis=axis)


# -- joining and splitting -----------------------------------------------------------------------


@op("ConcatV2", promotes=True)
def _concat(xp, xs: Sequence[TensorLike], /, *, axis: int) -> Tensor:
    rests = {(*x.shape[:axis], *x.shape[axis + 1 :]) for x in xs}
    if len(rests) > 1:
        raise ShapeError(
            f"concat: the shapes must agree except along axis {axis}, got "
            f"{', '.join(str(tuple(x.shape)) for x in xs)}"
        )
    return xp.concat(xs, axis=axis)


@gradient("ConcatV2", "xs")
def _(dy, xs_shape, axis):
    return split(dy, [shape[axis] for shape in xs_shape], axis=axis)


@deferrable
def concat(arrays: Sequence[Any], /, *, axis: int | None = 0) -> Tensor:
    """Tensors joined along an axis that they have (`None` joins them flat); dtypes promote.

    Op type: `ConcatV2`.
    """
    xs = _lift_all("concat", arrays)
    if axis is None:
        return _concat([reshape(x, (-1,)) for x in xs], axis=0)
    if len({x.ndim for x in xs}) > 1 or xs[0].ndim == 0:
        raise ShapeError(
            "concat: expected tensors of one rank, 1 or more, got "
            f"{', '.join(str(x.shape) for x in xs)}. To join along a new axis use stack."
        )
    return _concat(xs, axis=normalized_axis(axis, xs[0].ndim))


def _lift_all(name: str, arrays: Sequence[TensorLike]) -> list[Tensor]:
    if not isinstance(arrays, list | tuple) or not arrays:
        raise ArgumentError(f"{name} takes a list of at least one Tensor, got {kind(arrays)}")
    return [dispatch.lift(a) for a in arrays]


@op("Split")
def _split(xp, x: TensorLike, /, *, sizes: tuple[int, ...], axis: int) -> tuple[Tensor, ...]:
    axis = normalized_axis(axis, x.ndim)
    before, parts, start = (slice(None),) * axis, [], 0
    for size in sizes:
        parts.append(x[(*before, slice(start, start + size))])
        start += size
    if start != x.shape[axis]:
        raise ShapeError(
            f"split: the sizes {sizes} do not add up to the size {x.shape[axis]} of axis {axis}"
        )
    return tuple(parts)


@gradient("Split")
def _(dy, axis):
    return concat(dy, axis=axis)


@deferrable
def split(
    x: TensorLike, sections_or_sizes: int | tuple[int, ...] | list[int], /, axis: int = 0
) -> tuple[Tensor, ...]:
    """x cut along `axis`, into so many equal parts or into parts of the given sizes.

    One size may be -1, for what remains.

    Op type: `Split`. Source: `tf.split`.

    >>> import regrad as rg
    >>> rg.split(rg.tensor([1, 2, 3, 4]), [1, -1])[1].print()
    Tensor
        [2, 3, 4]
    """
    x = dispatch.lift(x)
    if isinstance(x._data.shape, dims.UnknownRank):  # the parts can be counted all the same
        length: Any = dims.size_of(x._data, axis)
        return _split(x, sizes=part_sizes(sections_or_sizes, length), axis=axis)
    axis = normalized_axis(axis, x.ndim)
    return _split(x, sizes=part_sizes(sections_or_sizes, x.shape[axis]), axis=axis)


@op("Pack", promotes=True)
def _stack(xp, xs: Sequence[TensorLike], /, *, axis: int) -> Tensor:
    return xp.stack(xs, axis=axis)


@gradient("Pack", "xs")
def _(dy, axis):
    return unstack(dy, axis=axis)


@deferrable
def stack(arrays: Sequence[Any], /, *, axis: int = 0) -> Tensor:
    """Tensors of one shape joined along a new axis; dtypes promote.

    Op type: `Pack`.
    """
    xs = _lift_all("stack", arrays)
    if any(dims.differ(x.shape, xs[0].shape) for x in xs):
        raise ShapeError(
            f"stack: all tensors must have one shape, got {', '.join(str(x.shape) for x in xs)}"
        )
    return _stack(xs, axis=normalized_axis(axis, xs[0].ndim + 1))


@op("Unpack")
def unstack(xp, x: TensorLike, /, *, axis: int = 0) -> tuple[Tensor, ...]:
    """The slices of x along `axis`, which they lose."""
    axis = normalized_axis(axis, x.ndim)
    before = (slice(None),) * axis
    return tuple(x[(*before, i)] for i in range(x.shape[axis]))


@gradient("Unpack")
def _(dy, axis):
    return stack(dy, axis=axis)


# -- triangles and diagonals ---------------------------------------------------------------------


@op("Tril")
def tril(xp, x: TensorLike, /, *, k: int = 0) -> Tensor:
    """The lower triangle of matrices: zero above the k-th diagonal."""
    _check_matrices("tril", x)
    return xp.tril(x, k=k)


@gradient("Tril")
def _(dy, k):
    return tril(dy, k=k)


@op("Triu")
def triu(xp, x: TensorLike, /, *, k: int = 0) -> Tensor:
    """The upper triangle of matrices: zero below the k-th diagonal."""
    _check_matrices("triu", x)
    return xp.triu(x, k=k)


@gradient("Triu")
def _(dy, k):
    return triu(dy, k=k)


def _check_matrices(name: str, x: Array) -> None:
    if x.ndim < 2:
        raise ShapeError(f"{name} takes matrices (rank 2 or more), got {tuple(x.shape)}")


@op("MatrixDiagPart")
def diagonal(xp, x: TensorLike, /, *, offset: int = 0) -> Tensor:
    """The diagonals of matrices; a positive offset is above the main one."""
    _check_matrices("diagonal", x)
    rows, columns = _diagonal_places(xp, tuple(x.shape[-2:]), offset, x)
    return x[..., rows, columns]


def _diagonal_places(
    xp: Namespace, shape: tuple[int, ...], offset: int, like: Array
) -> tuple[Any, Any]:
    """The indices of a diagonal's elements."""
    down, right = max(-offset, 0), max(offset, 0)
    length = max(min(shape[0] - down, shape[1] - right), 0)
    options = backends.placed_like(like)
    i = xp.arange(length, **options) if options else np.arange(length)
    return i + down, i + right


@gradient("MatrixDiagPart")
def _(dy, x_shape, offset):
    return diag(dy, offset=offset, shape=x_shape[-2:])


@op("MatrixDiag")
def diag(xp, x: TensorLike, /, *, offset: int = 0, shape: tuple[int, int] | None = None) -> Tensor:
    """Matrices with x on a diagonal and zeros elsewhere: the adjoint of `diagonal`.

    x is a vector, or vectors along the last axis. The matrices are square and just large enough,
    unless `shape` is given.
    """
    if x.ndim == 0:
        raise ShapeError("diag takes vectors (rank 1 or more), got a Tensor of rank 0")
    n = x.shape[-1] + abs(offset)
    sizes = as_shape((n, n) if shape is None else shape)
    places = _diagonal_places(xp, sizes, offset, x)
    if len(places[0]) != x.shape[-1]:
        raise ShapeError(
            f"diag: the diagonal {offset} of a matrix of shape {sizes} has {len(places[0])} "
            f"elements, got {x.shape[-1]}"
        )
    y = _zeros(xp, (*x.shape[:-1], *sizes), x)
    if hasattr(y, "at"):
        return y.at[(..., *places)].set(x)
    y[(..., *places)] = x
    return y


@gradient("MatrixDiag")
def _(dy, offset):
    return diagonal(dy, offset=offset)
