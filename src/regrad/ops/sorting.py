"""Sorting: order along one axis."""

from __future__ import annotations

from typing import Any

import numpy as np

from regrad.core import dispatch
from regrad.core.backends import Array, Namespace
from regrad.core.op import TensorLike, op
from regrad.core.registry import gradient, not_differentiable
from regrad.core.shapes import normalized_axis
from regrad.core.tensor import Tensor
from regrad.errors import ArgumentError, ShapeError
from regrad.graph.deferred import deferrable
from regrad.ops.indexing import scatter_along_axis, take
from regrad.ops.scan import _between

# -- sorting -------------------------------------------------------------------------------------


@op("Sort")
def sort(
    xp, x: TensorLike, /, *, axis: int = -1, descending: bool = False, stable: bool = True
) -> Tensor:
    """x sorted along `axis`. NaNs count as largest.

    Each gradient goes back to where its element came from (of equal elements in their order).
    """
    axis = normalized_axis(axis, x.ndim)
    if xp.__name__ == "jax.numpy":  # in a compiled program the rule's argsort is this very one
        return xp.take_along_axis(x, _sorting(xp, x, axis, descending, stable), axis=axis)
    if xp is not np:
        return xp.sort(x, axis=axis, descending=descending, stable=bool(stable))
    y = xp.sort(x, axis=axis)  # without `stable`, which is slower and makes no difference here
    return xp.flip(y, axis=axis) if descending else y


@gradient("Sort")
def _(dy, x, axis, descending):
    places = argsort(x, axis=axis, descending=descending)
    return scatter_along_axis(dy, places, x.shape, axis=axis)


@op("ArgSort")
def argsort(
    xp, x: TensorLike, /, *, axis: int = -1, descending: bool = False, stable: bool = True
) -> Tensor:
    """The indices that sort x along `axis`; equal elements keep their order. Not differentiable."""
    return _sorting(xp, x, normalized_axis(axis, x.ndim), descending, stable)


def _sorting(xp: Namespace, x: Array, axis: int, descending: bool, stable: bool) -> Array:
    if xp is not np:
        return xp.argsort(x, axis=axis, descending=bool(descending), stable=bool(stable))
    if not descending:
        return np.argsort(x, axis=axis, stable=stable)
    back = np.argsort(np.flip(x, axis=axis), axis=axis, stable=stable)
    return x.shape[axis] - 1 - np.flip(back, axis=axis)


@op("TopKV2")
def top_k(xp, x: TensorLike, /, k: int = 1, *, axis: int = -1) -> tuple[Tensor, Tensor]:
    """The `k` largest elements along `axis`, largest first, and their indices.

    Of equal elements the first comes first. Raises ShapeError if there are not `k` elements.

    Source: `tf.math.top_k`.

    >>> import regrad as rg
    >>> values, indices = rg.top_k(rg.tensor([1.0, 4.0, 2.0]), 2)
    >>> values.print()
    Tensor
        [4, 2]
    """
    axis = normalized_axis(axis, x.ndim)
    if not 0 <= k <= x.shape[axis]:
        raise ShapeError(
            f"top_k: x has {x.shape[axis]} elements along axis {axis} of {tuple(x.shape)}, and k "
            f"is {k}; it must be from 0 to {x.shape[axis]}"
        )
    if xp.__name__ == "jax.numpy":
        import jax

        values, indices = jax.lax.top_k(xp.moveaxis(x, axis, -1), k)
        return xp.moveaxis(values, -1, axis), xp.moveaxis(indices, -1, axis).astype(int)
    indices = _largest(xp, x, k, axis)
    return xp.take_along_axis(x, indices, axis=axis), indices


def _largest(xp: Namespace, x: Array, k: int, axis: int) -> Array:
    """The places of the k largest, largest first."""
    found = _partition(x, k, axis) if xp is np and 0 < 4 * k < x.shape[axis] else None
    return _sorting(xp, x, axis, True, True)[_between(axis, None, k)] if found is None else found


def _partition(x: np.ndarray, k: int, axis: int) -> Any:
    """The places of the k largest without sorting the rest, unless a tie decides who is in."""
    chosen = np.argpartition(x, -k, axis=axis)[_between(axis, -k, None)]
    chosen = np.sort(chosen, axis=axis)
    values = np.take_along_axis(x, chosen, axis=axis)
    inside = np.count_nonzero(x >= values.min(axis=axis, keepdims=True), axis=axis)
    if np.any(inside != k):  # a NaN fails here as well
        return None
    return np.take_along_axis(chosen, _sorting(np, values, axis, True, True), axis=axis)


@gradient("TopKV2")
def _(dy, y, x_shape, axis):
    return scatter_along_axis(dy[0], y[1], x_shape, axis=axis)


@op("SearchSorted", promotes=("x1", "x2"))
def _searchsorted(xp, x1: TensorLike, x2: TensorLike, /, *, side: str) -> Tensor:
    places = xp.searchsorted(x1, x2, side=side)
    return places.astype(int) if xp.__name__ == "jax.numpy" else places


@deferrable
def searchsorted(x1: Any, x2: Any, /, *, side: str = "left", sorter: Any = None) -> Tensor:
    """The places in the ascending vector x1 at which the elements of x2 keep it in order.

    With `side="right"` a place comes after elements equal to x2's. `sorter` are indices that
    sort x1, if it is not. Not differentiable.

    Op type: `SearchSorted`.

    >>> import regrad as rg
    >>> rg.searchsorted(rg.tensor([1.0, 2.0, 4.0]), rg.tensor([3.0, 1.0])).print()
    Tensor
        [2, 0]
    """
    x1 = dispatch.lift(x1)
    if x1.ndim != 1:
        raise ShapeError(f"searchsorted: x1 must be a vector, got the shape {x1.shape}")
    if side not in ("left", "right"):
        raise ArgumentError(f"searchsorted: side is 'left' or 'right', got {side!r}")
    return _searchsorted(x1 if sorter is None else take(x1, sorter, axis=0), x2, side=side)


not_differentiable("ArgSort", "SearchSorted")
