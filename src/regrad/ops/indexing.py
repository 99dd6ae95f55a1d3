"""Indexing ops: gathering and scattering, slices and padding, and `x[...]`.

The ops come in adjoint pairs, each the other's rule: GatherV2/ScatterAdd, GatherNd/ScatterNd,
TakeAlongAxis/ScatterAlongAxis, StridedSlice/StridedSliceGrad, Slice/PadV2,
MirrorPad/MirrorPadGrad.

Indices are integers of any dtype, negative ones count from the end, and repeated ones add up in
the gradient. An index out of range is an IndexError on NumPy and PyTorch; JAX, which cannot
raise in compiled code, takes the nearest element, forward and backward.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from regrad import dispatch, namespaces
from regrad.errors import ArgumentError, DTypeError, ShapeError, kind
from regrad.namespaces import is_inexact
from regrad.ops.array import (
    broadcast_arrays,
    broadcast_to,
    expand_dims,
    permute_dims,
    reshape,
    stack,
    unstack,
)
from regrad.ops.creation import arange, as_numpy_dtype, zeros_like
from regrad.ops.elementwise import astype, logical_and, where
from regrad.opsheet import Indices, op
from regrad.registry import gradient, not_differentiable
from regrad.shapes import (
    IndexRangeError,
    Shape,
    Window,
    as_shape,
    as_slice,
    ascending,
    broadcast_shapes,
    flipped,
    normalized_axis,
    shifted_shape,
    window,
)
from regrad.tensor import Tensor, wrap

# -- what the kernels share ----------------------------------------------------------------------


def _is_jax(xp: Any) -> bool:
    return xp.__name__ == "jax.numpy"


def _as_index(xp: Any, ids: Any) -> Any:
    """Integers of any dtype under the dtype that the library indexes by."""
    if ids.dtype == xp.bool:
        raise DTypeError("indices are integers, got bools. Select by a mask with x[mask].")
    if _is_jax(xp):
        return ids.astype(int)
    return namespaces.cast(xp, ids, np.intp)


def _in_range(xp: Any, ids: Any, n: int) -> Any:
    """Indices into an axis of size n as non-negative ones."""
    ids = _as_index(xp, ids)
    if _is_jax(xp):
        return xp.clip(xp.where(ids < 0, ids + n, ids), 0, max(n - 1, 0))
    if math.prod(ids.shape) == 0:
        return ids
    low, high = int(ids.min()), int(ids.max())
    if low < -n or high >= n:
        raise IndexRangeError(
            f"the index {low if low < -n else high} is out of range for an axis of size {n}"
        )
    return ids if low >= 0 else xp.where(ids < 0, ids + n, ids)


def _zeros(xp: Any, shape: Sequence[int], like: Any) -> Any:
    """Zeros of the dtype of an array, on its device."""
    if hasattr(like, "new_zeros"):
        return like.new_zeros(tuple(shape))
    return xp.zeros(shape, dtype=like.dtype)


def _count_up(xp: Any, n: int, like: Any) -> Any:
    """`[0, …, n - 1]`, on the device of an array."""
    return xp.arange(n, device=like.device) if hasattr(like, "new_zeros") else xp.arange(n)


def _add_rows(xp: Any, n: int, ids: Any, rows: Any) -> Any:
    """n rows of zeros with `rows[k]` added at `ids[k]`, which are all in range."""
    y = _zeros(xp, (n, rows.shape[1]), rows)
    if _is_jax(xp):
        return y.at[ids].add(rows)
    if xp is not np:
        return y.index_add_(0, ids, rows)
    width = rows.shape[1]
    if width >= 16 and rows.size >= 1 << 14 and rows.dtype in (np.float32, np.float64):
        return _add_rows_sparse(n, ids, rows)
    if width > 1 and rows.size > 256:  # add.at is fast for flat arrays only
        flat = (ids[:, None] * width + np.arange(width)).ravel()
        np.add.at(y.reshape(-1), flat, rows.ravel())
    else:
        np.add.at(y, ids, rows)
    return y


def _add_rows_sparse(n: int, ids: Any, rows: Any) -> Any:
    """The same by a sparse matrix product: several times faster for wide rows."""
    from scipy.sparse import csc_array

    k = len(ids)
    ones = np.ones(k, rows.dtype)
    return csc_array((ones, ids, np.arange(k + 1)), shape=(n, k)) @ rows


def _linear(xp: Any, indices: Any, sizes: Sequence[int]) -> Any:
    """Index vectors (on the last axis) into leading axes of these sizes, as flat row numbers."""
    ids = _zeros(xp, (math.prod(indices.shape[:-1]),), _as_index(xp, indices))
    for axis, n in enumerate(sizes):
        ids = ids * n + xp.reshape(_in_range(xp, indices[..., axis], n), (-1,))
    return ids


def _permuted(xp: Any, x: Any, block: int, count: int, to: int) -> Any:
    """x with the `count` axes from `block` on moved to `to`."""
    if block == to or count == 0:
        return x
    return xp.permute_dims(x, shifted_shape(range(x.ndim), block, count, to))


# -- along one axis, each line by its own indices ------------------------------------------------


@op("TakeAlongAxis")
def _take_along_axis(xp, x: Tensor, indices: Indices, /, *, axis: int) -> Tensor:
    if xp is np:
        return np.take_along_axis(x, _as_index(xp, indices), axis)
    ids = _in_range(xp, indices, x.shape[axis])
    if _is_jax(xp):
        return xp.take_along_axis(x, ids, axis, mode="clip")
    return x.gather(axis, ids)


@gradient("TakeAlongAxis", "x")
def _(dy, indices, x_shape, axis):
    return scatter_along_axis(dy, indices, x_shape, axis=axis)


@op("ScatterAlongAxis")
def scatter_along_axis(
    xp, x: Tensor, indices: Indices, /, shape: tuple[int, ...], *, axis: int
) -> Tensor:
    """Zeros of the given shape with x added at `indices` along an axis: take_along_axis's adjoint.

    x and `indices` have one shape, which is `shape` except along `axis`.
    """
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


def take_along_axis(x: Any, indices: Any, /, *, axis: int = -1) -> Tensor:
    """Elements of x, picked along `axis` by indices of x's rank.

    Along the other axes x and `indices` broadcast. `take_along_axis(x, argsort(x))` is x sorted.

    Op type: `TakeAlongAxis`.
    """
    x, indices = dispatch.lift(x), dispatch.lift(indices, integers=True)
    axis = normalized_axis(axis, x.ndim)
    if x.ndim != indices.ndim:
        raise ShapeError(
            f"take_along_axis: x and indices must have one rank, got {x.shape} and "
            f"{indices.shape}. To pick whole slices use take."
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
def _take(xp, x: Tensor, indices: Indices, /, *, axis: int, batch_dims: int) -> Tensor:
    ids = _as_index(xp, indices)
    if batch_dims:
        return _take_batched(xp, x, ids, axis, batch_dims)
    if xp is np:
        return np.take(x, ids, axis=axis)
    index = (builtins.slice(None),) * axis + (ids,)
    return x.at[index].get(mode="clip") if _is_jax(xp) else x[index]


def _take_batched(xp: Any, x: Any, ids: Any, axis: int, batch_dims: int) -> Any:
    batch, picked, n = x.shape[:batch_dims], ids.shape[batch_dims:], x.shape[axis]
    rest = (*x.shape[batch_dims:axis], *x.shape[axis + 1 :])
    rows = xp.reshape(
        _permuted(xp, x, axis, 1, batch_dims), (math.prod(batch) * n, math.prod(rest))
    )
    y = xp.reshape(rows[_batched_rows(xp, ids, batch_dims, n)], (*batch, *picked, *rest))
    return _permuted(xp, y, batch_dims, len(picked), axis)


def _batched_rows(xp: Any, ids: Any, batch_dims: int, n: int) -> Any:
    """Indices into axes of size n, one axis per batch entry, as row numbers over all of them."""
    batch, picked = ids.shape[:batch_dims], ids.shape[batch_dims:]
    ids = xp.reshape(_in_range(xp, ids, n), (math.prod(batch), math.prod(picked)))
    return xp.reshape(_count_up(xp, math.prod(batch), ids)[:, None] * n + ids, (-1,))


@gradient("GatherV2", "x")
def _(dy, indices, x_shape, axis, batch_dims):
    return _scatter_add(dy, indices, shape=x_shape, axis=axis, batch_dims=batch_dims)


@op("ScatterAdd")
def _scatter_add(
    xp, x: Tensor, indices: Indices, /, *, shape: tuple[int, ...], axis: int, batch_dims: int
) -> Tensor:
    batch, n = tuple(shape[:batch_dims]), shape[axis]
    rest = (*shape[batch_dims:axis], *shape[axis + 1 :])
    ids = _batched_rows(xp, indices, batch_dims, n)
    x = _permuted(xp, x, axis, indices.ndim - batch_dims, batch_dims)
    y = _add_rows(xp, math.prod(batch) * n, ids, xp.reshape(x, (ids.shape[0], math.prod(rest))))
    return _permuted(xp, xp.reshape(y, (*batch, n, *rest)), batch_dims, 1, axis)


@gradient("ScatterAdd", "x")
def _(dy, indices, axis, batch_dims):
    return _take(dy, indices, axis=axis, batch_dims=batch_dims)


def take(x: Any, indices: Any, /, *, axis: int | None = None, batch_dims: int = 0) -> Tensor:
    """Slices of x along `axis`, picked by integers.

    The shape is `x.shape[:axis] + indices.shape[batch_dims:] + x.shape[axis + 1:]`. `axis` may
    be left out if x has one. The first `batch_dims` axes belong together in x and indices.

    Op type: `GatherV2`. Source: the Array API standard; `tf.gather` for `batch_dims`.

    >>> import regrad as rg
    >>> rg.take(rg.tensor([10.0, 20.0, 30.0]), [2, 0, -1]).print()
    Tensor
        [30, 10, 30]
    """
    x, indices = dispatch.lift(x), dispatch.lift(indices, integers=True)
    if axis is None and x.ndim > 1:
        raise ArgumentError(f"take: which axis of {x.shape} is meant? Give axis=0, say.")
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


def repeat(x: Any, repeats: Any, /, *, axis: int | None = None) -> Tensor:
    """x with each element along `axis` repeated (of x flattened, by default).

    `repeats` is one number, or one per element; the numbers decide the shape and must be known.
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
            f"repeat: one number is due for each of the {x.shape[axis]} elements along axis "
            f"{axis}, got repeats of shape {counts.shape}"
        )
    return take(x, np.repeat(np.arange(x.shape[axis]), counts), axis=axis)


# -- by vectors of indices into the leading axes -------------------------------------------------


@op("GatherNd")
def gather_nd(xp, x: Tensor, indices: Indices, /) -> Tensor:
    """Slices of x at index vectors: `y[i…] = x[indices[i…, 0], indices[i…, 1], …]`.

    The last axis of `indices` holds the vectors; the shape is
    `indices.shape[:-1] + x.shape[indices.shape[-1]:]`.
    """
    depth = _depth("gather_nd", tuple(x.shape), tuple(indices.shape))
    ids = _as_index(xp, indices)
    if depth == 0:
        return xp.broadcast_to(x, (*ids.shape[:-1], *x.shape))
    index = tuple(ids[..., i] for i in range(depth))
    return x.at[index].get(mode="clip") if _is_jax(xp) else x[index]


def _depth(name: str, shape: tuple[int, ...], indices: tuple[int, ...]) -> int:
    """The length of the index vectors."""
    if not indices or indices[-1] > len(shape):
        raise ShapeError(
            f"{name}: the last axis of indices holds index vectors of up to {len(shape)} entries "
            f"for the shape {shape}; got indices of shape {indices}"
        )
    return indices[-1]


@gradient("GatherNd", "x")
def _(dy, indices, x_shape):
    return scatter_nd(indices, dy, x_shape)


@op("ScatterNd")
def scatter_nd(xp, indices: Indices, updates: Tensor, /, shape: Shape) -> Tensor:
    """Zeros of the given shape with `updates` added at index vectors: the adjoint of `gather_nd`.

    `updates` has the shape `indices.shape[:-1] + shape[indices.shape[-1]:]`. What falls on one
    place adds up.

    >>> import regrad as rg
    >>> rg.scatter_nd([[1], [3], [1]], rg.tensor([5.0, 6.0, 7.0]), (4,)).print()
    Tensor
        [0, 12, 0, 6]
    """
    shape = as_shape(shape)
    depth = _depth("scatter_nd", shape, tuple(indices.shape))
    rows = _rows_for("scatter_nd", xp, indices, updates, shape)
    y = _add_rows(xp, math.prod(shape[:depth]), _linear(xp, indices, shape[:depth]), rows)
    return xp.reshape(y, shape)


@gradient("ScatterNd", "updates")
def _(dy, indices):
    return gather_nd(dy, indices)


def _rows_for(name: str, xp: Any, indices: Any, updates: Any, shape: tuple[int, ...]) -> Any:
    """Updates as one row per index vector."""
    depth = indices.shape[-1]
    due = (*indices.shape[:-1], *shape[depth:])
    if tuple(updates.shape) != due:
        raise ShapeError(
            f"{name}: for indices of shape {tuple(indices.shape)} into {shape} the updates must "
            f"have the shape {due}, got {tuple(updates.shape)}"
        )
    return xp.reshape(updates, (math.prod(indices.shape[:-1]), math.prod(shape[depth:])))


@op("TensorScatterUpdate")
def _scatter_update(xp, x: Tensor, indices: Indices, updates: Tensor, /) -> Tensor:
    shape, depth = tuple(x.shape), indices.shape[-1]
    rows = _rows_for("at_set", xp, indices, updates, shape)
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


def _last(xp: Any, ids: Any, n: int) -> Any:
    """Which entry of `ids` names each of n places last; -1 where none does.

    JAX and PyTorch leave the order of assignments open; a maximum is the same in any order.
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
    """Which index vector names each place last; -1 where none does."""
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
def segment_sum(xp, x: Tensor, ids: Indices, num_segments: int) -> Tensor:
    """The sums of the slices of x that share an id: `y[k] = sum(x[ids == k])`.

    `ids` has the shape of x's leading axes (one id per row, as a rule) and need not be sorted.
    Slices with a negative id are left out. An id of `num_segments` or more is an error on NumPy
    and PyTorch; JAX leaves it out.

    >>> import regrad as rg
    >>> rg.segment_sum(rg.tensor([1.0, 2.0, 3.0, 4.0]), [0, 2, 0, -1], 3).print()
    Tensor
        [4, 0, 2]
    """
    lead, rest = tuple(x.shape[: ids.ndim]), tuple(x.shape[ids.ndim :])
    if lead != tuple(ids.shape):
        raise ShapeError(
            f"segment_sum: ids must have the shape of x's leading axes, got x of {tuple(x.shape)} "
            f"and ids of {tuple(ids.shape)}"
        )
    ids = xp.reshape(_as_index(xp, ids), (-1,))
    if not _is_jax(xp) and math.prod(lead) and int(ids.max()) >= num_segments:
        raise IndexRangeError(
            f"segment_sum: the id {int(ids.max())} is out of range for {num_segments} segments"
        )
    # what is left out goes to one more row
    ids = xp.where((ids < 0) | (ids >= num_segments), num_segments, ids)
    rows = xp.reshape(x, (math.prod(lead), math.prod(rest)))
    y = _add_rows(xp, num_segments + 1, ids, rows)[:num_segments]
    return xp.reshape(y, (num_segments, *rest))


@gradient("UnsortedSegmentSum", "x")
def _(dy, ids, num_segments):
    if num_segments == 0:
        return None
    inside = logical_and(ids >= 0, ids < num_segments)
    rows = take(dy, where(inside, ids, 0), axis=0)
    return where(reshape(inside, (*ids.shape, *[1] * (dy.ndim - 1))), rows, 0)


# -- slices --------------------------------------------------------------------------------------
# Basic indexing is two ops with one attribute: an entry per axis, which is an int, None (a new
# axis) or a window (first, count, step).

Basic = tuple[int | Window | None, ...]


def _windows(index: Basic) -> list[Window]:
    """One window per axis of x: an int selects one element."""
    return [(e, 1, 1) if isinstance(e, int) else e for e in index if e is not None]


def _embedded(
    xp: Any, x: Any, shape: Sequence[int], windows: Sequence[Window], value: complex = 0
) -> Any:
    """One value everywhere but in ascending windows, which hold x."""
    if _is_jax(xp) and math.prod(x.shape):
        from jax import lax

        spare = [
            (first, n - 1 - first - (count - 1) * step, step - 1)
            for n, (first, count, step) in zip(shape, windows, strict=True)
        ]
        return lax.pad(x, xp.asarray(value, dtype=x.dtype), spare)
    if hasattr(x, "new_full"):
        y = x.new_full(tuple(shape), value)
    else:
        y = xp.full(tuple(shape), value, dtype=x.dtype)
    if math.prod(x.shape):
        y[tuple(as_slice(w) for w in windows)] = x
    return y


@op("StridedSlice")
def _strided_slice(xp, x: Tensor, /, *, index: Basic) -> Tensor:
    entries = [as_slice(ascending(e)) if isinstance(e, tuple) else e for e in index]
    y = x[tuple(entries)]
    back = flipped([e or (0, 1, 1) for e in index if not isinstance(e, int)])
    return xp.flip(y, axis=back) if back else y


@gradient("StridedSlice")
def _(dy, x_shape, index):
    return _strided_slice_grad(dy, shape=x_shape, index=index)


@op("StridedSliceGrad")
def _strided_slice_grad(xp, x: Tensor, /, *, shape: tuple[int, ...], index: Basic) -> Tensor:
    windows = _windows(index)
    return _embedded(xp, _ascending(xp, x, windows), shape, [ascending(w) for w in windows])


def _ascending(xp: Any, x: Any, windows: list[Window]) -> Any:
    """What belongs into windows, with one axis per window, and first to last."""
    x = xp.reshape(x, tuple(count for _, count, _ in windows))
    back = flipped(windows)
    return xp.flip(x, axis=back) if back else x


@gradient("StridedSliceGrad")
def _(dy, index):
    return _strided_slice(dy, index=index)


@op("TensorStridedSliceUpdate")
def _strided_slice_update(xp, x: Tensor, updates: Tensor, /, *, index: Basic) -> Tensor:
    windows = _windows(index)
    place = tuple(as_slice(ascending(w)) for w in windows)
    updates = _ascending(xp, updates, windows)
    if _is_jax(xp):
        return x.at[place].set(updates)
    y = x.copy() if xp is np else x.clone()
    y[place] = updates
    return y


@gradient("TensorStridedSliceUpdate", "x")
def _(dy, index):
    return _strided_slice_update(dy, zeros_like(_strided_slice(dy, index=index)), index=index)


@gradient("TensorStridedSliceUpdate", "updates")
def _(dy, index):
    return _strided_slice(dy, index=index)


@op("Slice")
def _slice(xp, x: Tensor, /, *, begin: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
    return x[tuple(builtins.slice(b, b + n) for b, n in zip(begin, size, strict=True))]


@gradient("Slice")
def _(dy, x_shape, begin, size):
    spare = [(b, n - b - s) for b, s, n in zip(begin, size, x_shape, strict=True)]
    return _pad(dy, paddings=tuple(spare), constant_value=0)


def slice(x: Any, begin: int | Sequence[int], size: int | Sequence[int] | None = None) -> Tensor:
    """The block of x that begins at `begin` and has the shape `size`; -1 means to the end.

    `begin` and `size` may be shorter than x's rank; the other axes are taken whole.

    Op type: `Slice`. Source: `tf.slice`.

    >>> import regrad as rg
    >>> rg.slice(rg.tensor([1.0, 2.0, 3.0, 4.0]), [1], [-1]).print()
    Tensor
        [2, 3, 4]
    """
    x = dispatch.lift(x)
    begin = as_shape(begin)
    size = (-1,) * len(begin) if size is None else as_shape(size)
    more = x.ndim - len(begin)
    if len(begin) != len(size) or more < 0:
        raise ShapeError(
            f"slice: begin and size must have one entry per axis of {x.shape}, got {begin} and "
            f"{size}"
        )
    begin = (*begin, *[0] * more)
    size = tuple(
        n - b if s == -1 else s
        for b, s, n in zip(begin, (*size, *[-1] * more), x.shape, strict=True)
    )
    if any(b < 0 or s < 0 or b + s > n for b, s, n in zip(begin, size, x.shape, strict=True)):
        raise IndexRangeError(f"slice: {begin} to {size} elements on is not within {x.shape}")
    return _slice(x, begin=begin, size=size)


# -- padding -------------------------------------------------------------------------------------

Paddings = tuple[tuple[int, int], ...]


@op("PadV2")
def _pad(xp, x: Tensor, /, *, paddings: Paddings, constant_value: complex) -> Tensor:
    shape = [a + n + b for (a, b), n in zip(paddings, x.shape, strict=True)]
    windows = [(a, n, 1) for (a, _), n in zip(paddings, x.shape, strict=True)]
    return _embedded(xp, x, shape, windows, constant_value)


@gradient("PadV2")
def _(dy, x_shape, paddings):
    return _slice(dy, begin=tuple(a for a, _ in paddings), size=x_shape)


@op("MirrorPad")
def _mirror_pad(xp, x: Tensor, /, *, paddings: Paddings, mode: str) -> Tensor:
    for axis, pair in enumerate(paddings):
        if any(pair):
            x = xp.take(x, _mirrored(xp, x.shape[axis], pair, mode, x), axis=axis)
    return x


def _mirrored(xp: Any, n: int, pair: tuple[int, int], mode: str, like: Any) -> Any:
    """Which element of an axis of size n each element of the padded axis repeats."""
    ids = np.pad(np.arange(n), pair, mode=mode)
    return xp.asarray(ids, device=like.device) if hasattr(like, "new_zeros") else xp.asarray(ids)


@gradient("MirrorPad")
def _(dy, x_shape, paddings, mode):
    return _mirror_pad_grad(dy, shape=x_shape, paddings=paddings, mode=mode)


@op("MirrorPadGrad")
def _mirror_pad_grad(
    xp, x: Tensor, /, *, shape: tuple[int, ...], paddings: Paddings, mode: str
) -> Tensor:
    for axis, (n, pair) in enumerate(zip(shape, paddings, strict=True)):
        if any(pair):
            ids = _mirrored(xp, n, pair, mode, x)
            x = xp.moveaxis(x, axis, 0)
            rest = tuple(x.shape[1:])
            y = _add_rows(xp, n, ids, xp.reshape(x, (x.shape[0], math.prod(rest))))
            x = xp.moveaxis(xp.reshape(y, (n, *rest)), 0, axis)
    return x


@gradient("MirrorPadGrad")
def _(dy, paddings, mode):
    return _mirror_pad(dy, paddings=paddings, mode=mode)


def pad(
    x: Any,
    paddings: int | Sequence[tuple[int, int]],
    mode: str = "constant",
    constant_value: complex = 0,
) -> Tensor:
    """x with `(before, after)` elements more along each axis; one int means so many everywhere.

    `mode` says which: "constant" (`constant_value`), "reflect" (mirrored without the edge),
    "symmetric" (mirrored with it) or "edge" (the edge repeated). The gradients of mirrored
    elements add to those of the elements that they repeat.

    Op types: `PadV2`, and `MirrorPad` for the other modes. Source: `tf.pad`, `numpy.pad`.

    >>> import regrad as rg
    >>> rg.pad(rg.tensor([1.0, 2.0, 3.0]), [(2, 1)], "reflect").print()
    Tensor
        [3, 2, 1, 2, 3, 2]
    """
    x = dispatch.lift(x)
    pairs = _pairs(paddings, x.ndim)
    if mode not in ("constant", "reflect", "symmetric", "edge"):
        raise ArgumentError(
            f"pad: mode is 'constant', 'reflect', 'symmetric' or 'edge', got {mode!r}"
        )
    if mode == "constant":
        _check_kind("pad", "constant_value", dispatch.number_dtype(constant_value, True), x)
        return _pad(x, paddings=pairs, constant_value=constant_value)
    if any(n == 0 and any(pair) for n, pair in zip(x.shape, pairs, strict=True)):
        raise ShapeError(f"pad: an empty axis of {x.shape} has no elements to repeat ({mode})")
    return _mirror_pad(x, paddings=pairs, mode=mode)


def _pairs(paddings: Any, ndim: int) -> Paddings:
    if isinstance(paddings, int):
        paddings = [(paddings, paddings)] * ndim
    pairs = tuple(as_shape(pair) for pair in paddings if isinstance(pair, tuple | list))
    if len(pairs) != ndim or len(paddings) != ndim or any(len(p) != 2 or min(p) < 0 for p in pairs):
        raise ArgumentError(
            f"pad: paddings is one pair (before, after) of 0 or more per axis, {ndim} in all, got "
            f"{paddings!r:.80}"
        )
    return pairs


def _check_kind(name: str, what: str, dtype: np.dtype, x: Tensor) -> None:
    """Refuse values that x's dtype cannot hold in kind (1.5 among integers)."""
    if not np.can_cast(dtype, x.dtype, "same_kind"):
        raise DTypeError(
            f"{name}: {what} is {dtype} and x is {x.dtype}, which cannot hold it. Convert x first "
            f"with astype(x, rg.{dtype})."
        )


# -- x[...] --------------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """An index in two steps: a basic one, then integer Tensors along some axes of its result."""

    basic: Basic
    trivial: bool  # the basic step changes nothing
    arrays: list[Tensor]
    axes: list[int]  # of the basic step's result, one per array
    place: int  # where the arrays' common axes stand in the result


def _plan(index: Any, shape: tuple[int, ...]) -> _Plan:
    """An index as NumPy reads it."""
    entries = _expanded(
        [_entry(e) for e in (index if isinstance(index, tuple) else (index,))], shape
    )
    some = any(isinstance(e, Tensor) for e in entries)
    basic: list[Any] = []
    arrays: list[Tensor] = []
    axes: list[int] = []
    advanced: list[tuple[int, int]] = []  # (number of the entry, axis of the result)
    axis = out = 0
    for number, e in enumerate(entries):
        if some and isinstance(e, Tensor | int):
            advanced.append((number, out))  # beside arrays, NumPy counts ints as arrays
        if e is None:
            basic.append(None)
            out += 1
        elif isinstance(e, int):
            basic.append(_checked_int(e, axis, shape))
            axis += 1
        elif isinstance(e, builtins.slice):
            basic.append(window(e, shape[axis]))
            axis, out = axis + 1, out + 1
        else:
            found = _nonzero_of_mask(e, axis, shape) if e.dtype.kind == "b" else [e]
            taken = _span(e)
            basic += [(0, n, 1) for n in shape[axis : axis + taken]] or [None]
            arrays += found
            axes += range(out, out + len(found))
            axis, out = axis + taken, out + len(found)
    trivial = tuple(basic) == tuple((0, n, 1) for n in shape)
    numbers = [number for number, _ in advanced]
    together = not numbers or numbers[-1] - numbers[0] == len(numbers) - 1
    return _Plan(tuple(basic), trivial, arrays, axes, advanced[0][1] if numbers and together else 0)


def _entry(e: Any) -> Any:
    """One entry of an index: an int, a slice, None, `...`, or a Tensor of integers or bools."""
    if e is None or e is ... or type(e) is int or isinstance(e, builtins.slice):
        return e
    if isinstance(e, int | np.integer) and not isinstance(e, bool):
        return int(e)
    if isinstance(e, str):
        raise ArgumentError(f"x[...]: an index is made of integers, slices and masks, got {e!r}")
    e = dispatch.lift(e, integers=True)
    if is_inexact(e.dtype):
        raise DTypeError(
            f"x[...]: an index is made of integers, slices and masks, got {kind(e)}. Convert it "
            "with astype(index, rg.int64)."
        )
    return e


def _span(e: Any) -> int:
    """The number of axes that an entry indexes."""
    if e is None:
        return 0
    return e.ndim if isinstance(e, Tensor) and e.dtype.kind == "b" else 1


def _expanded(entries: list[Any], shape: tuple[int, ...]) -> list[Any]:
    """The entries with full slices for `...` and for the axes left out."""
    dots = [i for i, e in enumerate(entries) if e is ...]
    missing = len(shape) - sum(_span(e) for e in entries if e is not ...)
    if len(dots) > 1 or missing < 0:
        raise IndexRangeError(
            f"x[...]: too many indices for the shape {shape}"
            if missing < 0
            else "x[...]: an index can have one '...' only"
        )
    at = dots[0] if dots else len(entries)
    return [*entries[:at], *[builtins.slice(None)] * missing, *entries[at + 1 :]]


def _checked_int(i: int, axis: int, shape: tuple[int, ...]) -> int:
    n = shape[axis]
    if not -n <= i < n:
        raise IndexRangeError(
            f"x[...]: the index {i} is out of range for axis {axis} of the shape {shape}"
        )
    return i % n


def _nonzero_of_mask(mask: Tensor, axis: int, shape: tuple[int, ...]) -> list[Tensor]:
    """A mask as one vector of indices per axis (for a mask of rank 0: along a new axis)."""
    if mask.shape != shape[axis : axis + mask.ndim]:
        raise IndexRangeError(
            f"x[...]: a mask of shape {mask.shape} does not fit the axes from {axis} on of the "
            f"shape {shape}"
        )
    return [wrap(ids) for ids in np.nonzero(np.atleast_1d(_known(mask, "a mask in x[...]")))]


def _known(x: Tensor, what: str) -> np.ndarray:
    """The values of a Tensor, which must be there now."""
    try:
        return x.numpy()
    except TypeError as error:  # JAX's way to say that it is tracing
        raise ArgumentError(
            f"{what} decides the shape of the result, so its values must be known, and under jit "
            "they are not. Use where(mask, x, 0), which keeps the shape."
        ) from error


def getitem(x: Any, index: Any, /) -> Tensor:
    """`x[index]`, by NumPy's rules.

    An index is made of ints, slices (with any step), `None`, `...`, integer arrays, lists or
    Tensors, and boolean masks. Gradients of elements that are picked repeatedly add up. A mask's
    values must be known: under jit use `where`.

    Raises IndexError (also a RegradError) for an int out of range, and DTypeError for floats.

    Op types: `StridedSlice` for ints and slices; `GatherV2` for one array, `GatherNd` for more.
    """
    x = dispatch.lift(x)
    plan = _plan(index, x.shape)
    y = x if plan.trivial else _strided_slice(x, index=plan.basic)
    if not plan.arrays:
        return y
    if len(plan.arrays) == 1:
        axis, ids = plan.axes[0], plan.arrays[0]
        return _block(take(y, ids, axis=axis), axis, ids.ndim, plan.place)
    ids = _vectors(plan)
    return _block(gather_nd(_leading(y, plan), ids), 0, ids.ndim - 1, plan.place)


def _vectors(plan: _Plan) -> Tensor:
    """The index arrays as index vectors."""
    arrays = [astype(a, np.int64) if a.dtype == np.uint64 else a for a in plan.arrays]
    return stack(broadcast_arrays(*arrays), axis=-1)


def _block(x: Tensor, block: int, count: int, to: int) -> Tensor:
    """x with the `count` axes from `block` on moved to `to`."""
    if block == to or count == 0:
        return x
    return permute_dims(x, shifted_shape(range(x.ndim), block, count, to))


def _leading(x: Tensor, plan: _Plan) -> Tensor:
    """The basic step's result with the axes that arrays index in front."""
    order = _order(x.ndim, plan)
    return x if order == list(range(x.ndim)) else permute_dims(x, tuple(order))


def _in_place(x: Tensor, plan: _Plan) -> Tensor:
    """What `_leading` gave, with its axes where they were."""
    order = _order(x.ndim, plan)
    if order == list(range(x.ndim)):
        return x
    return permute_dims(x, tuple(order.index(i) for i in range(x.ndim)))


def _order(ndim: int, plan: _Plan) -> list[int]:
    return [*plan.axes, *[i for i in range(ndim) if i not in plan.axes]]


# -- x[...] = y ----------------------------------------------------------------------------------


def at_set(x: Any, index: Any, y: Any, /) -> Tensor:
    """x with y in the place of `x[index]`, to which y broadcasts: `x[index] = y` as a function.

    Where the index names a place repeatedly the last one counts, in every library, and only that
    one has a gradient. The dtype is x's. `index` is as in `x[index]`; a mask with a single number
    y needs no known values.

    Op types: `TensorStridedSliceUpdate` for ints and slices, `TensorScatterUpdate` for arrays,
    `SelectV2` for a mask and a single number.

    >>> import regrad as rg
    >>> rg.at_set(rg.tensor([1.0, 2.0, 3.0]), [0, 2], 9).print()
    Tensor
        [9, 2, 9]
    """
    x, y = _with_value("at_set", x, y)
    if y.ndim == 0 and (mask := _lone_mask(index, x.shape)) is not None:
        return where(mask, y, x)
    plan = _plan(index, x.shape)
    part = x if plan.trivial else _strided_slice(x, index=plan.basic)
    if plan.arrays:
        lines, ids = _leading(part, plan), _vectors(plan)
        updates = _updates("at_set", y, lines.shape, ids, plan)
        part = _in_place(_scatter_update(lines, ids, updates), plan)
    else:
        part = _fitted("at_set", y, part.shape)
    return part if plan.trivial else _strided_slice_update(x, part, index=plan.basic)


def at_add(x: Any, index: Any, y: Any, /) -> Tensor:
    """x with y added to `x[index]`: `x[index] += y` as a function, except that repeats add up.

    y broadcasts to `x[index]`; the dtype is x's.

    A composition of `AddV2` with `StridedSliceGrad` and `ScatterNd`, which place y in zeros.

    >>> import regrad as rg
    >>> rg.at_add(rg.tensor([1.0, 2.0, 3.0]), [0, 2, 0], 10).print()
    Tensor
        [21, 2, 13]
    """
    x, y = _with_value("at_add", x, y)
    if y.ndim == 0 and (mask := _lone_mask(index, x.shape)) is not None:
        return where(mask, x + y, x)
    plan = _plan(index, x.shape)
    shape = tuple(e[1] if e else 1 for e in plan.basic if not isinstance(e, int))
    if plan.arrays:
        ids = _vectors(plan)
        lines = tuple(shape[i] for i in _order(len(shape), plan))
        updates = _updates("at_add", y, lines, ids, plan)
        y = _in_place(scatter_nd(ids, updates, lines), plan)
    else:
        y = _fitted("at_add", y, shape)
    return x + (y if plan.trivial else _strided_slice_grad(y, shape=x.shape, index=plan.basic))


def _with_value(name: str, x: Any, y: Any) -> tuple[Tensor, Tensor]:
    """x, and y under x's dtype."""
    x = dispatch.lift(x)
    if type(y) in dispatch.NUMBERS:
        _check_kind(name, "y", dispatch.number_dtype(y, True), x)
        return x, dispatch.constant(y, x.dtype)
    y = dispatch.lift(y, integers=not is_inexact(x.dtype))
    _check_kind(name, "y", y.dtype, x)
    return x, dispatch.as_dtype(y, x.dtype)


def _lone_mask(index: Any, shape: tuple[int, ...]) -> Tensor | None:
    """The mask, if the index is a mask of x's leading axes and nothing else."""
    if isinstance(index, tuple | int | builtins.slice) or index is None or index is ...:
        return None
    mask = _entry(index)
    if not isinstance(mask, Tensor) or mask.dtype.kind != "b" or mask.shape != shape[: mask.ndim]:
        return None
    return reshape(mask, (*mask.shape, *[1] * (len(shape) - mask.ndim)))


def _updates(name: str, y: Tensor, lines: tuple[int, ...], ids: Tensor, plan: _Plan) -> Tensor:
    """y, broadcast to `x[index]`, with the arrays' common axes in front."""
    *batch, depth = ids.shape
    shape = shifted_shape((*batch, *lines[depth:]), 0, len(batch), plan.place)
    return _block(_fitted(name, y, shape), plan.place, len(batch), 0)


def _fitted(name: str, y: Tensor, shape: tuple[int, ...]) -> Tensor:
    if y.shape == shape:
        return y
    if y.ndim > len(shape) or broadcast_shapes(y.shape, shape) != shape:
        raise ShapeError(f"{name}: y has the shape {y.shape}, and x[index] has {shape}")
    return broadcast_to(y, shape)


# -- indices as results, and from them -----------------------------------------------------------


@op("OneHot")
def one_hot(
    xp,
    indices: Indices,
    /,
    depth: int,
    *,
    on_value: complex = 1,
    off_value: complex = 0,
    axis: int = -1,
    dtype: Any = None,
) -> Tensor:
    """`on_value` where the index is, `off_value` elsewhere, along a new axis of size `depth`.

    An index outside `[0, depth)` gives a row of `off_value`. float32 by default (TensorFlow.js's
    `oneHot` gives int32). It has no gradient: the indices are integers.

    >>> import regrad as rg
    >>> rg.one_hot([2, 0, -1], 3).print()
    Tensor
        [[0, 0, 1],
         [1, 0, 0],
         [0, 0, 0]]
    """
    native = namespaces.native_dtype(
        xp, namespaces.FLOAT if dtype is None else as_numpy_dtype(dtype)
    )
    ids = _as_index(xp, indices)
    hot = ids[..., None] == _count_up(xp, depth, ids)
    on, off = (xp.full_like(ids[..., None], value, dtype=native) for value in (on_value, off_value))
    axis = normalized_axis(axis, ids.ndim + 1)
    return xp.moveaxis(xp.where(hot, on, off), -1, axis)


@op("Where")
def _index_vectors(xp, x: Tensor, /) -> Tensor:
    return xp.stack(xp.nonzero(x), axis=-1)


def nonzero(x: Any, /) -> tuple[Tensor, ...]:
    """The indices of the elements that are not 0: one vector per axis.

    The values decide the shape, so they must be known (they are not under jit). No gradient.

    Op type: `Where` (TensorFlow's name for it; `where` itself is `SelectV2`).
    """
    x = dispatch.lift(x)
    if x.ndim == 0:
        raise ShapeError("nonzero takes a Tensor of rank 1 or more, got rank 0")
    return unstack(_index_vectors(x), axis=-1)


@op("UniqueValues")
def unique_values(xp, x: Tensor, /) -> Tensor:
    """The distinct values of x, sorted.

    The values decide the shape, so they must be known (they are not under jit). No gradient.
    """
    return xp.sort(xp.unique_values(x))


not_differentiable("OneHot", "Where", "UniqueValues")
