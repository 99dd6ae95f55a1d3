"""Sorting: order along one axis."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from regrad.core import dispatch
from regrad.core.backends import FLOAT, Array, Namespace, is_inexact
from regrad.core.op import TensorLike, op
from regrad.core.registry import gradient, not_differentiable
from regrad.core.shapes import Axis, normalized_axes, normalized_axis
from regrad.core.tensor import Tensor
from regrad.errors import ArgumentError, DTypeError, InvalidValueError, ShapeError
from regrad.graph.deferred import deferrable
from regrad.ops.array import expand_dims, moveaxis, permute_dims, reshape, squeeze
from regrad.ops.binary import logical_and, minimum, where
from regrad.ops.casting import astype
from regrad.ops.creation_like import zeros_like
from regrad.ops.elementwise import ceil, floor, isfinite, isnan, logical_not, round
from regrad.ops.indexing import scatter_along_axis, take
from regrad.ops.scan import _between
from regrad.shapes.arrays import axis_of_top

# -- sorting -------------------------------------------------------------------------------------


@op("Sort")
def sort(
    xp, x: TensorLike, /, *, axis: int = -1, descending: bool = False, stable: bool = True
) -> Tensor:
    """Return x sorted along an axis. NaN sorts last.

    Each gradient goes back to the original position of its element, in order for equal elements.

    Args:
        descending: Whether to put the largest element first.
        stable: Has no effect on the result: equal elements keep their order in either case. The
            Array API standard requires it.

    Returns:
        A Tensor of x's shape and dtype.

    Source: the Array API standard.

    >>> rg.sort([3.0, 1.0, 2.0])
    Tensor([1., 2., 3.], dtype=float32)
    """
    axis = normalized_axis(axis, x.ndim)
    if xp.__name__ == "jax.numpy":  # a compiled program shares this argsort with the rule
        return xp.take_along_axis(x, _sorting(xp, x, axis, descending, stable), axis=axis)
    if xp is not np:
        return xp.sort(x, axis=axis, descending=descending, stable=bool(stable))
    y = xp.sort(x, axis=axis)  # without `stable`, which is slower and has no effect on values
    return xp.flip(y, axis=axis) if descending else y


@gradient("Sort")
def _(dy, x, axis, descending):
    places = argsort(x, axis=axis, descending=descending)
    return scatter_along_axis(dy, places, x.shape, axis=axis)


@op("ArgSort")
def argsort(
    xp, x: TensorLike, /, *, axis: int = -1, descending: bool = False, stable: bool = True
) -> Tensor:
    """Return the indices that sort x along an axis. NaN sorts last.

    Args:
        descending: Whether to put the index of the largest element first.
        stable: Whether equal elements keep their order.

    Returns:
        A Tensor of x's shape and int64 (JAX's default integers on JAX). The result has no gradient.

    Source: the Array API standard.

    >>> rg.argsort([3.0, 1.0, 2.0])
    Tensor([1, 2, 0], dtype=int64)
    """
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
    """Return the largest elements along an axis, largest first, and their indices.

    For equal elements, the one with the lowest index comes first.

    Args:
        k: The number of elements.

    Returns:
        Two Tensors with `k` elements along the axis: the values, of x's dtype, and the indices, of
        int64 (JAX's default integers on JAX). Only the values have a gradient.

    Raises:
        ShapeError: the axis has fewer than `k` elements.

    Source: `tf.math.top_k`.

    >>> values, indices = rg.top_k(rg.tensor([1.0, 4.0, 2.0]), 2)
    >>> values.tolist(), indices.tolist()
    ([4.0, 2.0], [1, 2])
    """
    axis = axis_of_top(tuple(x.shape), axis, k)
    if xp.__name__ == "jax.numpy":
        import jax

        values, indices = jax.lax.top_k(xp.moveaxis(x, axis, -1), k)
        return xp.moveaxis(values, -1, axis), xp.moveaxis(indices, -1, axis).astype(int)
    indices = _largest(xp, x, k, axis)
    return xp.take_along_axis(x, indices, axis=axis), indices


def _largest(xp: Namespace, x: Array, k: int, axis: int) -> Array:
    """Return the indices of the k largest elements, largest first."""
    found = _partition(x, k, axis) if xp is np and 0 < 4 * k < x.shape[axis] else None
    return _sorting(xp, x, axis, True, True)[_between(axis, None, k)] if found is None else found


def _partition(x: np.ndarray, k: int, axis: int) -> Any:
    """Find the k largest without sorting the rest. Sort where a tie decides the selection."""
    chosen = np.argpartition(x, -k, axis=axis)[_between(axis, -k, None)]
    chosen = np.sort(chosen, axis=axis)
    values = np.take_along_axis(x, chosen, axis=axis)
    inside = np.count_nonzero(x >= values.min(axis=axis, keepdims=True), axis=axis)
    if np.any(inside != k):  # NaN also ends here
        return None
    return np.take_along_axis(chosen, _sorting(np, values, axis, True, True), axis=axis)


gradient("TopKV2")(lambda dy, y, x_shape, axis: scatter_along_axis(dy[0], y[1], x_shape, axis=axis))


@op("SearchSorted", promotes=("x1", "x2"))
def _searchsorted(xp, x1: TensorLike, x2: TensorLike, /, *, side: str) -> Tensor:
    places = xp.searchsorted(x1, x2, side=side)
    return places.astype(int) if xp.__name__ == "jax.numpy" else places


@deferrable
def searchsorted(x1: Any, x2: Any, /, *, side: str = "left", sorter: Any = None) -> Tensor:
    """Return the insertion indices of x2's elements into the sorted vector x1.

    Args:
        x1: A vector, ascending unless `sorter` is passed.
        x2: A Tensor, array or number.
        side: "left", or "right" to insert after equal elements.
        sorter: Indices that sort x1.

    Returns:
        A Tensor of x2's shape and int64 (JAX's default integers on JAX). It has no gradient.

    Raises:
        ShapeError: x1 is not a vector.
        ArgumentError: `side` is neither "left" nor "right".

    Op type: `SearchSorted`. Source: the Array API standard.

    >>> rg.searchsorted(rg.tensor([1.0, 2.0, 4.0]), rg.tensor([3.0, 1.0])).print()
    Tensor
        [2, 0]
    """
    x1 = dispatch.lift(x1)
    if x1.ndim != 1:
        raise ShapeError(f"searchsorted: x1 must be a vector, got the shape {x1.shape}")
    if side not in ("left", "right"):
        raise ArgumentError(f"searchsorted: side must be 'left' or 'right', got {side!r}")
    return _searchsorted(x1 if sorter is None else take(x1, sorter, axis=0), x2, side=side)


not_differentiable("ArgSort", "SearchSorted")


# -- quantiles -----------------------------------------------------------------------------------

# The weight of the upper neighbor in a quantile, from the position h and the lower position.
METHODS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda h, low: h - low,
    "lower": lambda h, low: zeros_like(h),
    "higher": lambda h, low: ceil(h) - low,
    "midpoint": lambda h, low: 0.5 * (ceil(h) - low),
    "nearest": lambda h, low: round(h) - low,
}


@deferrable
def quantile(
    x: TensorLike, /, q: TensorLike, *, axis: Axis = None, keepdims: bool = False,
    method: str = "linear",
) -> Tensor:  # fmt: skip
    """Return the q-quantiles of the elements over `axis`.

    The gradient goes to the one or two elements that determine a quantile.

    Args:
        x: The values, real. A NaN among them makes the result NaN.
        q: Numbers in [0, 1], a number or an array.
        axis: The axis or axes. By default, all axes.
        keepdims: Whether to keep the reduced axes, with size 1.
        method: The value between two elements: "linear" (interpolation), "lower", "higher",
            "midpoint" or "nearest".

    Returns a Tensor. Its shape is q's shape followed by x's shape without the reduced axes.
    Integers become float32.

    Raises ArgumentError for an unknown method, InvalidValueError for q outside [0, 1] (if q is a
    Tensor, the result is NaN there instead), DTypeError for complex numbers, and ShapeError for no
    elements.

    A composition of `Sort`, `GatherV2` and arithmetic. Source: `numpy.quantile`.

    >>> import regrad as rg
    >>> rg.quantile(rg.tensor([4.0, 1.0, 3.0]), [0.25, 1.0]).print()
    Tensor
        [2, 4]
    """
    if method not in METHODS:
        expected = ", ".join(map(repr, METHODS))
        raise ArgumentError(f"quantile: expected one of {expected} for 'method', got {method!r}")
    return _quantile("quantile", x, q, axis, keepdims, method)


@deferrable
def median(x: TensorLike, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the median over `axis` (all axes by default).

    For an even number of elements, the median is the mean of the two middle elements, and each
    gets half of the gradient. (`torch.median` returns the lower one, which is
    `quantile(x, 0.5, method="lower")`.)

    Args:
        x: The values, real. A NaN among them makes the result NaN.
        axis: The axis or axes.
        keepdims: Whether to keep the reduced axes, with size 1.

    Returns a Tensor; integers become float32.

    A composition, like `quantile`. Source: `numpy.median`.

    >>> import regrad as rg
    >>> rg.grad(rg.median)(rg.tensor([4.0, 1.0, 3.0, 9.0])).print()
    Tensor
        [0.5, 0, 0.5, 0]
    """
    return _quantile("median", x, 0.5, axis, keepdims, "linear")


def _quantile(
    name: str, x: TensorLike, q: TensorLike, axis: Axis, keepdims: bool, method: str
) -> Tensor:
    x = dispatch.lift(x)
    if x.dtype.kind == "c":
        raise DTypeError(f"{name}: complex numbers have no order. Take abs(x) or real(x) first.")
    x = x if is_inexact(x.dtype) else astype(x, FLOAT)
    axes = normalized_axes(axis, x.ndim)
    kept = tuple(i for i in range(x.ndim) if i not in axes)
    n = math.prod(x.shape[i] for i in axes)
    if n == 0:
        raise ShapeError(f"{name}: expected one element or more, got {x.shape} and axis={axis}")
    rest = tuple(x.shape[i] for i in kept)
    ordered = sort(reshape(permute_dims(x, (*kept, *axes)), (*rest, n)))
    y = _between_neighbours(ordered, *_neighbours(name, q, n, x.dtype, method))
    front = tuple(range(y.ndim - len(kept)))
    y = moveaxis(y, tuple(i + len(kept) for i in front), front)
    return expand_dims(y, tuple(i + len(front) for i in axes)) if keepdims and axes else y


def _neighbours(
    name: str, q: TensorLike, n: int, dtype: np.dtype, method: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the indices of the lower and upper neighbors, and the weight of the upper one."""
    if dispatch.is_tensor(q):
        shares = dispatch.as_dtype(dispatch.lift(q), dtype)
        inside = logical_and(shares >= 0, shares <= 1)
        h = where(inside, shares, 0) * (n - 1)
    else:  # in double precision, which indices into long axes need
        shares = np.asarray(q, np.float64)
        if not np.all((shares >= 0) & (shares <= 1)):
            raise InvalidValueError(f"{name}: expected numbers in [0, 1] for 'q', got {q!r}")
        h, inside = dispatch.lift(shares * (n - 1)), True
    low = floor(h)
    share = astype(METHODS[method](h, low), dtype)
    place = astype(low, np.dtype(np.int64))
    return place, minimum(place + 1, n - 1), where(inside, share, math.nan)


def _between_neighbours(ordered: Tensor, low: Tensor, high: Tensor, share: Tensor) -> Tensor:
    """Interpolate between sorted elements. NaN, which sorts last, makes the result NaN."""
    a, b = take(ordered, low, axis=-1), take(ordered, high, axis=-1)
    y = a * (1 - share) + b * share
    y = where(logical_and(share == 0, logical_not(isfinite(b))), a, y)  # avoids 0 times infinity
    last = take(ordered, [-1], axis=-1)
    last = expand_dims(last, tuple(range(last.ndim, y.ndim))) if y.ndim > last.ndim else last
    last = last if low.ndim else squeeze(last, -1)
    return where(isnan(last), last, y)
