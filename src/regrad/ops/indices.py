"""Ops from and to indices: one-hot rows, positions of nonzero elements, distinct values."""

from __future__ import annotations

from typing import NamedTuple

from regrad.core import backends, dispatch
from regrad.core.backends import DTypeLike
from regrad.core.op import Indices, TensorLike, op
from regrad.core.promotion import get_default_dtype
from regrad.core.registry import not_differentiable
from regrad.core.shapes import as_count, normalized_axis
from regrad.core.signatures import public
from regrad.core.tensor import Tensor
from regrad.errors import ShapeError
from regrad.graph.deferred import deferrable
from regrad.ops.creation import as_numpy_dtype
from regrad.ops.creation_like import fitting
from regrad.ops.joining import unstack
from regrad.ops.rows import _as_index, _count_up

# -- from and to indices -------------------------------------------------------------------------


@op("OneHot")
def _one_hot(
    xp,
    indices: Indices,
    /,
    depth: int,
    *,
    on_value: complex = 1,
    off_value: complex = 0,
    axis: int = -1,
    dtype: DTypeLike,
) -> Tensor:
    depth = as_count(depth, "depth")
    dtype = as_numpy_dtype(dtype)
    native = backends.native_dtype(xp, dtype)
    values = [fitting(value, dtype) for value in (on_value, off_value)]
    ids = _as_index(xp, indices)
    hot = ids[..., None] == _count_up(xp, depth, ids)
    on, off = (xp.full_like(ids[..., None], value, dtype=native) for value in values)
    axis = normalized_axis(axis, ids.ndim + 1)
    return xp.moveaxis(xp.where(hot, on, off), -1, axis)


@public
def one_hot(
    indices: Indices,
    /,
    depth: int,
    *,
    on_value: complex = 1,
    off_value: complex = 0,
    axis: int = -1,
    dtype: DTypeLike | None = None,
) -> Tensor:
    """Return `on_value` at the index and `off_value` elsewhere, along a new axis.

    The result has no gradient, because the indices are integers.

    Args:
        indices: Integers of any shape. An index outside `[0, depth)` yields a row of `off_value`.
        depth: The size of the new axis.
        on_value, off_value: Numbers.
        axis: The position of the new axis in the result.
        dtype: The dtype; the default dtype by default (TensorFlow.js's `oneHot` returns int32).

    Returns:
        A Tensor of the indices' shape with the new axis.

    Raises:
        ArgumentError: `indices` is not a Tensor, an array or a number, or `depth` is not an int.
        DTypeError: the indices are not integers.

    Op type: `OneHot`. Source: `tf.one_hot`.

    >>> rg.one_hot([2, 0, -1], 3).print()
    Tensor
        [[0, 0, 1],
         [1, 0, 0],
         [0, 0, 0]]
    """
    values = {"on_value": on_value, "off_value": off_value, "axis": axis}
    dtype = get_default_dtype() if dtype is None else dtype
    return _one_hot(indices, depth, **values, dtype=dtype)


@op("Where")
def _index_vectors(xp, x: TensorLike, /) -> Tensor:
    return xp.stack(xp.nonzero(x), axis=-1)


@deferrable
def nonzero(x: TensorLike, /) -> tuple[Tensor, ...]:
    """Return the indices of the elements that are not 0.

    The values decide the shape, so they must be known. Under jit they are not known.

    Returns:
        A tuple of vectors of integers, one per axis of x. Each vector has one entry per nonzero
        element. The vectors have no gradient.

    Raises:
        ShapeError: x has no axes.

    Op type: `Where` (TensorFlow's name for it; `where` itself is `SelectV2`). Source: the Array
    API standard.

    >>> rg.nonzero([0.0, 5.0, 6.0])
    (Tensor([1, 2], dtype=int64),)
    """
    x = dispatch.lift(x)
    if x.ndim == 0:
        raise ShapeError("nonzero expects a Tensor of rank 1 or more, got rank 0")
    return unstack(_index_vectors(x), axis=-1)


@op("UniqueValues")
def unique_values(xp, x: TensorLike, /) -> Tensor:
    """Return the distinct values of x, sorted.

    The values decide the shape, so they must be known. Under jit they are not known.

    Returns:
        A Tensor of rank 1 and x's dtype. Every NaN is a separate value. The result has no gradient.

    Source: the Array API standard.

    >>> rg.unique_values([3.0, 1.0, 3.0])
    Tensor([1., 3.], dtype=float32)
    """
    return xp.sort(xp.unique_values(x))


@op("Unique")
def _unique(xp, x: TensorLike, /) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the distinct values, their first positions, the inverse indices and the counts."""
    flat = xp.reshape(x, (-1,))
    order = xp.argsort(flat, stable=True)
    ascending = flat[order]
    first = xp.concat([xp.ones_like(order[:1], dtype=xp.bool), ascending[1:] != ascending[:-1]])
    places = xp.arange(flat.shape[0], dtype=order.dtype, **backends.placed_like(flat))
    starts = places[first]
    counts = xp.concat([starts[1:], xp.full_like(order[:1], flat.shape[0])]) - starts
    number = xp.cumulative_sum(xp.astype(first, order.dtype), axis=0) - 1
    inverse = xp.reshape(number[xp.argsort(order)], tuple(x.shape))
    return ascending[first], order[first], inverse, counts


class UniqueAllResult(NamedTuple):
    """The distinct values of a Tensor, their first positions, inverse indices and counts."""

    values: Tensor
    indices: Tensor
    inverse_indices: Tensor
    counts: Tensor


class UniqueCountsResult(NamedTuple):
    """The distinct values of a Tensor and their counts."""

    values: Tensor
    counts: Tensor


class UniqueInverseResult(NamedTuple):
    """The distinct values of a Tensor and the inverse indices."""

    values: Tensor
    inverse_indices: Tensor


@public
def unique_all(x: TensorLike, /) -> UniqueAllResult:
    """Return the distinct values of x, sorted, with their positions and counts.

    The results have no gradient. The values decide the shapes, so they must be known. Under jit
    they are not known.

    Returns:
        `values`, `indices` (the first position of each value in the flattened x), `inverse_indices`
        (of x's shape; `values[inverse_indices]` is x) and `counts`. All but `inverse_indices` have
        rank 1. Every NaN is a separate value.

    Op type: `Unique`. Source: the Array API standard.

    >>> rg.unique_all(rg.tensor([3.0, 1.0, 3.0])).counts
    Tensor([1, 2], dtype=int64)
    """
    return UniqueAllResult(*_unique(x))


@public
def unique_counts(x: TensorLike, /) -> UniqueCountsResult:
    """Return the distinct values of x, sorted, and their counts; see `unique_all`.

    Returns:
        `values`, of x's dtype, and `counts`, integers, both of rank 1.

    Op type: `Unique`. Source: the Array API standard.

    >>> rg.unique_counts([3.0, 1.0, 3.0]).counts
    Tensor([1, 2], dtype=int64)
    """
    values, _, _, counts = _unique(x)
    return UniqueCountsResult(values, counts)


@public
def unique_inverse(x: TensorLike, /) -> UniqueInverseResult:
    """Return the distinct values of x, sorted, and the inverse indices; see `unique_all`.

    Returns:
        `values`, of rank 1 and of x's dtype, and `inverse_indices`, integers of x's shape.

    Op type: `Unique`. Source: the Array API standard.

    >>> rg.unique_inverse([3.0, 1.0, 3.0]).inverse_indices
    Tensor([1, 0, 1], dtype=int64)
    """
    values, _, inverse, _ = _unique(x)
    return UniqueInverseResult(values, inverse)


not_differentiable("OneHot", "Where", "UniqueValues", "Unique")
