"""Gathers and scatters: ops that read or write at indices.

The ops come in adjoint pairs, and each is the other's rule: GatherV2/ScatterAdd,
GatherNd/ScatterNd, TakeAlongAxis/ScatterAlongAxis. Indices are integers of any dtype. Negative
indices count from the end, and gradients of repeated indices add up. An index out of range raises
IndexError on NumPy and PyTorch. JAX cannot raise in compiled code, so it clamps the index to the
nearest element, both forward and backward.
"""

from __future__ import annotations

import builtins
import math
from typing import Any

import numpy as np

from regrad.core import dispatch
from regrad.core.backends import Array, Namespace
from regrad.core.op import Indices, TensorLike, op
from regrad.core.registry import gradient, not_differentiable
from regrad.core.rule import no_gradient
from regrad.core.shapes import Shape, as_count, as_shape, broadcast_shapes, normalized_axis
from regrad.core.tensor import Tensor
from regrad.errors import ArgumentError, IndexRangeError, ShapeError
from regrad.graph.deferred import deferrable
from regrad.ops.array import broadcast_to, expand_dims, reshape
from regrad.ops.binary import logical_and, where
from regrad.ops.creation import arange
from regrad.ops.rows import (
    _add_rows,
    _as_index,
    _at,
    _count_up,
    _in_range,
    _is_jax,
    _linear,
    _permute,
    _pick,
    _zeros,
)
from regrad.shapes.arrays import check_updates, index_depth, slice_of_segments

# -- along one axis, separate indices for each line ----------------------------------------------


@op("TakeAlongAxis")
def _take_along_axis(xp, x: TensorLike, indices: Indices, /, *, axis: int) -> Tensor:
    return _pick(xp, x, indices, axis)


@gradient("TakeAlongAxis", "x")
def _(dy, indices, x_shape, axis):
    return scatter_along_axis(dy, indices, x_shape, axis=axis)


@op("ScatterAlongAxis")
def scatter_along_axis(
    xp, x: TensorLike, indices: Indices, /, shape: tuple[int, ...], *, axis: int
) -> Tensor:
    """Add x at `indices` along an axis of zeros: the adjoint of `take_along_axis`.

    x and `indices` have the same shape, which equals `shape` except along `axis`.
    """
    if _is_jax(xp) and indices.shape[axis] == 1:
        # one element per line: XLA fuses a comparison with the next op, but not a scatter
        across = [n if i == axis % len(shape) else 1 for i, n in enumerate(shape)]
        here = _in_range(xp, indices, shape[axis]) == xp.reshape(xp.arange(shape[axis]), across)
        return xp.where(here, x, xp.zeros_like(x))
    ids, stride = 0, 1
    for i in reversed(range(len(shape))):
        one = [1] * len(shape)
        if i == axis % len(shape):
            ids = ids + _in_range(xp, indices, shape[i]) * stride
        else:
            one[i] = shape[i]
            ids = ids + xp.reshape(_count_up(xp, shape[i], x), tuple(one)) * stride
        stride *= shape[i]
    rows = _add_rows(xp, stride, xp.reshape(ids, (-1,)), xp.reshape(x, (-1, 1)))
    return xp.reshape(rows, tuple(shape))


@gradient("ScatterAlongAxis", "x")
def _(dy, indices, axis):
    return _take_along_axis(dy, indices, axis=axis)


@deferrable
def take_along_axis(x: TensorLike, indices: TensorLike, /, *, axis: int = -1) -> Tensor:
    """Return elements of x, selected along an axis by indices of x's rank.

    `take_along_axis(x, argsort(x))` returns x sorted.

    Args:
        indices: Integers; negative values count from the end. x and `indices` broadcast along the
            other axes.

    Returns:
        A Tensor of x's dtype. Its size along the axis is the size of `indices`.

    Raises:
        ShapeError: the ranks differ, or the other axes do not broadcast.
        IndexRangeError: an index is out of range (on NumPy and PyTorch).

    Op type: `TakeAlongAxis`. Source: the Array API standard.

    >>> rg.take_along_axis([[1.0, 2.0], [3.0, 4.0]], [[1], [0]]).tolist()
    [[2.0], [3.0]]
    """
    x, indices = dispatch.lift(x), dispatch.lift(indices, integers=True)
    axis = normalized_axis(axis, x.ndim)
    if x.ndim != indices.ndim:
        raise ShapeError(
            f"take_along_axis: x and indices must have the same rank, got {x.shape} and "
            f"{indices.shape}. To select whole slices use take."
        )
    rest = [list(t.shape) for t in (x, indices)]
    sizes = [shape.pop(axis) for shape in rest]
    common = broadcast_shapes(*map(tuple, rest))
    x, indices = (
        _broadcast(t, (*common[:axis], n, *common[axis:]))
        for t, n in zip((x, indices), sizes, strict=True)
    )
    return _take_along_axis(x, indices, axis=axis)


def _broadcast(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x if x.shape == shape else broadcast_to(x, shape)


# -- along one axis, whole slices ----------------------------------------------------------------


@op("GatherV2")
def _take(xp, x: TensorLike, indices: Indices, /, *, axis: int, batch_dims: int) -> Tensor:
    ids = _as_index(xp, indices)
    if batch_dims:
        return _take_batched(xp, x, ids, axis, batch_dims)
    if xp is np:
        return np.take(x, ids, axis=axis)
    index = (builtins.slice(None),) * axis + (ids,)
    return _at(xp, x, index)


def _take_batched(xp: Namespace, x: Array, ids: Array, axis: int, batch_dims: int) -> Array:
    batch, picked, n = x.shape[:batch_dims], ids.shape[batch_dims:], x.shape[axis]
    rest = (*x.shape[batch_dims:axis], *x.shape[axis + 1 :])
    rows = xp.reshape(_permute(xp, x, axis, 1, batch_dims), (math.prod(batch) * n, math.prod(rest)))
    y = xp.reshape(rows[_batched_rows(xp, ids, batch_dims, n)], (*batch, *picked, *rest))
    return _permute(xp, y, batch_dims, len(picked), axis)


def _batched_rows(xp: Namespace, ids: Array, batch_dims: int, n: int) -> Array:
    """Turn indices into axes of size n, one axis per batch entry, into row numbers over all."""
    batch, picked = ids.shape[:batch_dims], ids.shape[batch_dims:]
    ids = xp.reshape(_in_range(xp, ids, n), (math.prod(batch), math.prod(picked)))
    return xp.reshape(_count_up(xp, math.prod(batch), ids)[:, None] * n + ids, (-1,))


@gradient("GatherV2", "x")
def _(dy, indices, x_shape, axis, batch_dims):
    return _scatter_add(dy, indices, shape=x_shape, axis=axis, batch_dims=batch_dims)


@op("ScatterAdd")
def _scatter_add(
    xp, x: TensorLike, indices: Indices, /, *, shape: tuple[int, ...], axis: int, batch_dims: int
) -> Tensor:
    batch, n = tuple(shape[:batch_dims]), shape[axis]
    rest = (*shape[batch_dims:axis], *shape[axis + 1 :])
    ids = _batched_rows(xp, indices, batch_dims, n)
    x = _permute(xp, x, axis, indices.ndim - batch_dims, batch_dims)
    y = _add_rows(xp, math.prod(batch) * n, ids, xp.reshape(x, (ids.shape[0], math.prod(rest))))
    return _permute(xp, xp.reshape(y, (*batch, n, *rest)), batch_dims, 1, axis)


@gradient("ScatterAdd", "x")
def _(dy, indices, axis, batch_dims):
    return _take(dy, indices, axis=axis, batch_dims=batch_dims)


@deferrable
def take(
    x: TensorLike, indices: TensorLike, /, *, axis: int | None = None, batch_dims: int = 0
) -> Tensor:
    """Return slices of x along an axis, selected by integers.

    Args:
        indices: Integers of any shape; negative values count from the end.
        axis: The axis. It is optional if x has rank 1.
        batch_dims: The number of leading axes that x and `indices` share.

    Returns:
        A Tensor of x's dtype and of shape
        `x.shape[:axis] + indices.shape[batch_dims:] + x.shape[axis + 1:]`.

    Raises:
        ArgumentError: `axis` is missing and x has several axes, or `batch_dims` is out of range.
        ShapeError: the first `batch_dims` axes differ.
        IndexRangeError: an index is out of range (on NumPy and PyTorch).

    Op type: `GatherV2`. Source: the Array API standard; `tf.gather` for `batch_dims`.

    >>> rg.take(rg.tensor([10.0, 20.0, 30.0]), [2, 0, -1]).print()
    Tensor
        [30, 10, 30]
    """
    x, indices = dispatch.lift(x), dispatch.lift(indices, integers=True)
    if axis is None and x.ndim > 1:
        raise ArgumentError(f"take: x has the shape {x.shape}; pass an axis, e.g. axis=0")
    axis = normalized_axis(axis or 0, x.ndim)
    if not 0 <= batch_dims <= min(axis, indices.ndim):
        raise ArgumentError(
            f"take: batch_dims must be from 0 to {min(axis, indices.ndim)} (axis {axis}, indices "
            f"of shape {indices.shape}), got {batch_dims}"
        )
    if x.shape[:batch_dims] != indices.shape[:batch_dims]:
        raise ShapeError(
            f"take: the first {batch_dims} axes must agree, got {x.shape} and {indices.shape}"
        )
    return _take(x, indices, axis=axis, batch_dims=batch_dims)


@deferrable
def repeat(x: TensorLike, repeats: Any, /, *, axis: int | None = None) -> Tensor:
    """Return x with each element along an axis repeated.

    Args:
        repeats: One int, or one per element along the axis. The values decide the shape, so they
            must be known.
        axis: The axis. None repeats the elements of the flattened x.

    Returns:
        A Tensor of x's dtype, with `sum(repeats)` elements along the axis.

    Raises:
        ArgumentError: `repeats` are not integers of 0 or more.
        ShapeError: the number of `repeats` is not the number of elements along the axis.

    A composition of `BroadcastTo` or `GatherV2`. Source: the Array API standard.

    >>> rg.repeat([1.0, 2.0], [1, 2])
    Tensor([1., 2., 2.], dtype=float32)
    """
    x = dispatch.lift(x)
    if axis is None:
        x, axis = reshape(x, (-1,)), 0
    axis = normalized_axis(axis, x.ndim)
    counts = np.asarray(repeats)
    if counts.dtype.kind not in "iu" or (counts < 0).any():
        raise ArgumentError(f"repeat: repeats must be integers of 0 or more, got {repeats!r:.60}")
    if counts.size == 1:
        lead, n, rest = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
        count = int(counts.item())
        spread = broadcast_to(expand_dims(x, axis + 1), (*lead, n, count, *rest))
        return reshape(spread, (*lead, n * count, *rest))
    if counts.shape != (x.shape[axis],):
        raise ShapeError(
            f"repeat: expected one number for each of the {x.shape[axis]} elements along axis "
            f"{axis}, got repeats of shape {counts.shape}"
        )
    return take(x, np.repeat(np.arange(x.shape[axis]), counts), axis=axis)


# -- by vectors of indices into the leading axes -------------------------------------------------


@op("GatherNd")
def gather_nd(xp, x: TensorLike, indices: Indices, /) -> Tensor:
    """Return slices of x at index vectors: `y[i…] = x[indices[i…, 0], indices[i…, 1], …]`.

    Args:
        indices: Integers, whose last axis holds the index vectors.

    Returns:
        A Tensor of x's dtype. Its shape is `indices.shape[:-1]`, followed by the shape of a
        slice of x.

    Raises:
        ShapeError: the index vectors have more entries than x has axes.
        IndexRangeError: an index is out of range (on NumPy and PyTorch).

    Source: `tf.gather_nd`.

    >>> rg.gather_nd([[1.0, 2.0], [3.0, 4.0]], [[0, 1], [1, 0]])
    Tensor([2., 3.], dtype=float32)
    """
    depth = index_depth("gather_nd", tuple(x.shape), tuple(indices.shape))
    ids = _as_index(xp, indices)
    if depth == 0:
        return xp.broadcast_to(x, (*ids.shape[:-1], *x.shape))
    index = tuple(ids[..., i] for i in range(depth))
    return _at(xp, x, index)


gradient("GatherNd", "x")(lambda dy, indices, x_shape: scatter_nd(indices, dy, x_shape))


@op("ScatterNd")
def scatter_nd(xp, indices: Indices, updates: TensorLike, /, shape: Shape) -> Tensor:
    """Return zeros with updates added at index vectors: the adjoint of `gather_nd`.

    Updates of the same position add up.

    Args:
        indices: Integers, whose last axis holds the index vectors.
        updates: The values to add, of shape `indices.shape[:-1] + shape[indices.shape[-1]:]`.
        shape: The shape of the result.

    Returns:
        A Tensor of the given shape and the updates' dtype.

    Raises:
        ShapeError: the updates have another shape, or the index vectors have too many entries.
        IndexRangeError: an index is out of range (on NumPy and PyTorch).

    Source: `tf.scatter_nd`.

    >>> rg.scatter_nd([[1], [3], [1]], rg.tensor([5.0, 6.0, 7.0]), (4,)).print()
    Tensor
        [0, 12, 0, 6]
    """
    shape = as_shape(shape)
    rows, depth = _rows_for("scatter_nd", xp, indices, updates, shape), indices.shape[-1]
    y = _add_rows(xp, math.prod(shape[:depth]), _linear(xp, indices, shape[:depth]), rows)
    return xp.reshape(y, shape)


gradient("ScatterNd", "updates")(lambda dy, indices: gather_nd(dy, indices))


def _rows_for(
    name: str, xp: Namespace, indices: Array, updates: Array, shape: tuple[int, ...]
) -> Array:
    """Reshape updates to one row per index vector."""
    check_updates(name, shape, tuple(indices.shape), tuple(updates.shape))
    *batch, depth = indices.shape
    return xp.reshape(updates, (math.prod(batch), math.prod(shape[depth:])))


@op("TensorScatterUpdate")
def _scatter_update(xp, x: TensorLike, indices: Indices, updates: TensorLike, /) -> Tensor:
    shape = tuple(x.shape)
    rows, depth = _rows_for("at_set", xp, indices, updates, shape), indices.shape[-1]
    if rows.shape[0] == 0:
        return x
    n, ids = math.prod(shape[:depth]), _linear(xp, indices, shape[:depth])
    y = xp.reshape(x, (n, rows.shape[1]))
    if xp is np:
        y = y.copy()
        y[ids] = rows
    else:
        writer = _last(xp, ids, n)
        y = xp.where(writer[:, None] < 0, y, rows[xp.clip(writer, 0, None)])
    return xp.reshape(y, shape)


def _last(xp: Namespace, ids: Array, n: int) -> Array:
    """Return the number of the last entry of `ids` that names each of n places, or -1.

    JAX and PyTorch do not define the order of assignments. A maximum is the same in any order.
    """
    numbers = _count_up(xp, ids.shape[0], ids)
    y = _zeros(xp, (n,), numbers) - 1
    if _is_jax(xp):
        return y.at[ids].max(numbers)
    if xp is not np:
        return y.scatter_reduce_(0, ids, numbers, "amax")
    y[ids] = numbers
    return y


@op("LastWriter")
def _last_writer(xp, indices: Indices, /, shape: tuple[int, ...]) -> Tensor:
    """Return the number of the last index vector that names each place, or -1."""
    return xp.reshape(_last(xp, _linear(xp, indices, shape), math.prod(shape)), shape)


not_differentiable("LastWriter")


@gradient("TensorScatterUpdate", "x")
def _(dy, indices, x_shape):
    depth = indices.shape[-1]
    kept = _last_writer(indices, x_shape[:depth]) < 0
    return where(reshape(kept, (*x_shape[:depth], *[1] * len(x_shape[depth:]))), dy, 0)


@gradient("TensorScatterUpdate", "updates")
def _(dy, indices, x_shape):
    *batch, depth = indices.shape
    writer = gather_nd(_last_writer(indices, x_shape[:depth]), indices)
    lasts = writer == reshape(arange(math.prod(batch)), tuple(batch))
    return where(reshape(lasts, (*batch, *[1] * len(x_shape[depth:]))), gather_nd(dy, indices), 0)


# -- by segments ---------------------------------------------------------------------------------


@op("UnsortedSegmentSum")
def segment_sum(xp, x: TensorLike, ids: Indices, num_segments: int) -> Tensor:
    """Return the sums of the slices of x that share an id: `y[k] = sum(x[ids == k])`.

    Args:
        ids: Integers, one per slice (row), in the shape of x's leading axes. They need not be
            sorted. Slices with a negative id are ignored.
        num_segments: The number of sums, an int.

    Returns:
        A Tensor of x's dtype. Its shape is `num_segments`, followed by the shape of a slice of x.

    Raises:
        ShapeError: `ids` does not have the shape of x's leading axes.
        IndexRangeError: an id is `num_segments` or more (on NumPy and PyTorch; JAX ignores it).

    Source: `tf.math.unsorted_segment_sum`.

    >>> rg.segment_sum(rg.tensor([1.0, 2.0, 3.0, 4.0]), [0, 2, 0, -1], 3).print()
    Tensor
        [4, 0, 2]
    """
    num_segments = as_count(num_segments, "num_segments")
    lead = tuple(ids.shape)
    rest = slice_of_segments(tuple(x.shape), lead)
    ids = xp.reshape(_as_index(xp, ids), (-1,))
    if not _is_jax(xp) and math.prod(lead) and int(ids.max()) >= num_segments:
        raise IndexRangeError(
            f"segment_sum: the id {int(ids.max())} is out of range for {num_segments} segments"
        )
    # ignored slices are added to an extra row
    ids = xp.where((ids < 0) | (ids >= num_segments), num_segments, ids)
    rows = xp.reshape(x, (math.prod(lead), math.prod(rest)))
    y = _add_rows(xp, num_segments + 1, ids, rows)[:num_segments]
    return xp.reshape(y, (num_segments, *rest))


@gradient("UnsortedSegmentSum", "x")
def _(dy, ids, num_segments):
    if num_segments == 0:
        return no_gradient(dy)
    inside = logical_and(ids >= 0, ids < num_segments)
    rows = take(dy, where(inside, ids, 0), axis=0)
    return where(reshape(inside, (*ids.shape, *[1] * (dy.ndim - 1))), rows, 0)
