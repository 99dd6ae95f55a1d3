"""Scans: cumulative ops along one axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from regrad.core import dispatch
from regrad.core.backends import Array, DTypeLike, Namespace, placed_like
from regrad.core.op import TensorLike, op
from regrad.core.registry import gradient, not_differentiable
from regrad.core.shapes import as_count, normalized_axis
from regrad.core.tensor import Tensor
from regrad.errors import ArgumentError, ShapeError
from regrad.graph.deferred import deferrable
from regrad.ops.creation import as_numpy_dtype, convert
from regrad.ops.getitem import getitem
from regrad.ops.indexing import scatter_along_axis
from regrad.ops.joining import concat
from regrad.ops.slicing import pad

# -- scans ---------------------------------------------------------------------------------------


def _between(axis: int, start: int | None, stop: int | None) -> tuple[slice, ...]:
    """Return the index of a range along one axis."""
    return (slice(None),) * axis + (slice(start, stop),)


def _move(xp: Namespace, x: Array, forward: bool, axis: int, fill: complex) -> Array:
    """Shift x by one position along an axis, and insert `fill`."""
    if not x.shape[axis]:
        return x
    entering = xp.full_like(x[_between(axis, 0, 1)], fill)
    staying = x[_between(axis, None, -1) if forward else _between(axis, 1, None)]
    return xp.concat([entering, staying] if forward else [staying, entering], axis=axis)


@op("Shift")
def _shift(xp, x: TensorLike, /, *, axis: int, forward: bool) -> Tensor:
    """Shift x by one position along an axis, and insert 0."""
    return _move(xp, x, forward, normalized_axis(axis, x.ndim), 0)


gradient("Shift")(lambda dy, axis, forward: _shift(dy, axis=axis, forward=not forward))


def _scan(
    xp: Namespace, name: str, x: Array, axis: int, exclusive: bool, reverse: bool, start: int
) -> Array:
    x = xp.flip(x, axis=axis) if reverse else x
    y = getattr(xp, name)(x, axis=axis)
    y = _move(xp, y, True, axis, start) if exclusive else y
    return xp.flip(y, axis=axis) if reverse else y


def _run_scan(
    op: Callable[..., Tensor],
    x: TensorLike,
    axis: int | None,
    dtype: DTypeLike | None,
    include_initial: bool,
    exclusive: bool,
    reverse: bool,
) -> Tensor:
    """Check the arguments of a scan, bring them to the op's form, and run it."""
    x = dispatch.lift(x if dtype is None else convert(dispatch.lift(x), as_numpy_dtype(dtype)))
    axis = _scan_axis(op.__name__, x, axis)
    if include_initial and exclusive:
        raise ArgumentError(
            f"{op.__name__}: pass only one of include_initial (prepends the empty scan) and "
            "exclusive (also drops the last element)"
        )
    if include_initial:  # an exclusive scan with one more element, whose value has no effect
        more = [(0, 0)] * x.ndim
        more[axis] = (1, 0) if reverse else (0, 1)
        x = pad(x, more)
    y = op(x, axis=axis, exclusive=exclusive or include_initial, reverse=reverse)
    return y if dtype is None else convert(y, x.dtype)  # (the sum of small integers is wider)


def _scan_axis(name: str, x: Tensor, axis: int | None) -> int:
    """Return the axis of a scan. The axis is optional only for vectors."""
    if x.ndim == 0:
        raise ShapeError(f"{name}: a Tensor of rank 0 has no axis to run along; reshape it to (1,)")
    if axis is None and x.ndim > 1:
        raise ArgumentError(
            f"{name}: x has the shape {x.shape}; pass an axis (axis=-1 is the last)"
        )
    return normalized_axis(axis or 0, x.ndim)


@op("Cumsum")
def _cumulative_sum(xp, x: TensorLike, /, *, axis: int, exclusive: bool, reverse: bool) -> Tensor:
    return _scan(xp, "cumulative_sum", x, axis, exclusive, reverse, 0)


@gradient("Cumsum")
def _(dy, axis, exclusive, reverse):
    return _cumulative_sum(dy, axis=axis, exclusive=exclusive, reverse=not reverse)


@deferrable
def cumulative_sum(
    x: TensorLike,
    /,
    *,
    axis: int | None = None,
    dtype: DTypeLike | None = None,
    include_initial: bool = False,
    exclusive: bool = False,
    reverse: bool = False,
) -> Tensor:
    """Return the cumulative sums along an axis.

    Args:
        axis: The axis. It is optional if x has rank 1.
        dtype: The dtype to which x is cast first. The default is x's dtype, or the default integer
            for bools and small integers.
        include_initial: Whether to prepend a 0, which makes the result longer by one element.
        exclusive: Whether to exclude each element from its own sum, so that the first sum is 0.
        reverse: Whether to sum from the end.

    Returns:
        A Tensor of x's shape.

    Raises:
        ArgumentError: `axis` is missing and x has several axes.

    Op type: `Cumsum`. Source: the Array API standard; `tf.cumsum`.

    >>> rg.cumulative_sum(rg.tensor([1.0, 2.0, 3.0]), exclusive=True).print()
    Tensor
        [0, 1, 3]
    """
    return _run_scan(_cumulative_sum, x, axis, dtype, include_initial, exclusive, reverse)


@op("Cumprod")
def _cumulative_prod(xp, x: TensorLike, /, *, axis: int, exclusive: bool, reverse: bool) -> Tensor:
    return _scan(xp, "cumulative_prod", x, axis, exclusive, reverse, 1)


@gradient("Cumprod")
def _(dy, x, axis, exclusive, reverse):
    # dy[i] reaches x[k] times the product of the elements before x[k] and the product of the
    # elements between k and i. The second product is a recurrence, which needs no division (x may
    # contain zeros).
    before = _cumulative_prod(x, axis=axis, exclusive=True, reverse=reverse)
    if exclusive:
        dy = _shift(dy, axis=axis, forward=reverse)
    links = _shift(x, axis=axis, forward=True) if reverse else x
    return before * linear_recurrence(dy, links, axis=axis, reverse=not reverse)


@deferrable
def cumulative_prod(
    x: TensorLike,
    /,
    *,
    axis: int | None = None,
    dtype: DTypeLike | None = None,
    include_initial: bool = False,
    exclusive: bool = False,
    reverse: bool = False,
) -> Tensor:
    """Return the cumulative products along an axis.

    The gradient is also correct where elements are 0, at any order.

    Args:
        axis: The axis. It is optional if x has rank 1.
        dtype: The dtype to which x is cast first. The default is x's dtype, or the default integer
            for bools and small integers.
        include_initial: Whether to prepend a 1, which makes the result longer by one element.
        exclusive: Whether to exclude each element from its own product, so that the first is 1.
        reverse: Whether to multiply from the end.

    Returns:
        A Tensor of x's shape.

    Raises:
        ArgumentError: `axis` is missing and x has several axes.

    Op type: `Cumprod`. Source: the Array API standard; `tf.math.cumprod`.

    >>> rg.cumulative_prod(rg.tensor([1.0, 2.0, 3.0]), reverse=True).print()
    Tensor
        [6, 6, 3]
    """
    return _run_scan(_cumulative_prod, x, axis, dtype, include_initial, exclusive, reverse)


@op("LinearRecurrence", broadcasts=True)
def linear_recurrence(
    xp, x: TensorLike, decay: TensorLike, /, *, axis: int = -1, reverse: bool = False
) -> Tensor:
    """Return `y[k] = x[k] + decay[k] * y[k-1]` along an axis.

    The computation takes about log2(n) steps over whole arrays, instead of n steps.

    Args:
        decay: `decay[k]` links positions k-1 and k. The first element has no effect. `decay`
            broadcasts to x.
        reverse: Whether the recurrence runs from the end, `y[k] = x[k] + decay[k+1] * y[k+1]`
            (the discounted returns of rewards x).

    Returns:
        A Tensor of the shape to which x and decay broadcast, with the dtype to which they promote.

    >>> rg.linear_recurrence(rg.tensor([1.0, 0.0, 0.0]), 0.5).print()
    Tensor
        [1, 0.5, 0.25]
    """
    y, links = xp.broadcast_arrays(x, decay)
    axis = normalized_axis(axis, y.ndim)
    if reverse:
        y = xp.flip(y, axis=axis)
        links = xp.flip(_move(xp, links, False, axis, 0), axis=axis)
    y = _recur(xp, y, links, axis)
    return xp.flip(y, axis=axis) if reverse else y


def _recur(xp: Namespace, y: Array, links: Any, axis: int) -> Array:
    n, step = y.shape[axis], 1
    if xp is np and y.size > 256 * n:  # for long rows, a loop over positions is faster in NumPy
        y, links = np.array(np.moveaxis(y, axis, 0)), np.moveaxis(links, axis, 0)
        for k in range(1, n):
            y[k] += links[k] * y[k - 1]
        return np.moveaxis(y, 0, axis)
    while step < n:  # y[k] covers its last `step` positions, and links[k] is their product
        head, tail, before = (
            _between(axis, None, step), _between(axis, step, None), _between(axis, None, -step)
        )  # fmt: skip
        y = xp.concat([y[head], y[tail] + links[tail] * y[before]], axis=axis)
        links = xp.concat([links[head], links[tail] * links[before]], axis=axis)
        step *= 2
    return y


@gradient("LinearRecurrence", "x")
def _(dy, decay, axis, reverse):
    return linear_recurrence(dy, decay, axis=axis, reverse=not reverse)


@gradient("LinearRecurrence", "decay")
def _(dy, decay, y, axis, reverse):
    dx = linear_recurrence(dy, decay, axis=axis, reverse=not reverse)
    if reverse:
        return _shift(dx, axis=axis, forward=True) * y
    return dx * _shift(y, axis=axis, forward=True)


@deferrable
def diff(
    x: TensorLike, /, *, axis: int = -1, n: int = 1, prepend: Any = None, append: Any = None
) -> Tensor:
    """Return the differences of adjacent elements along an axis, `n` times.

    Args:
        n: The number of times.
        prepend: Values to join to the start of x first, a Tensor or array.
        append: Values to join to the end of x first, a Tensor or array.

    Returns:
        A Tensor of x's dtype, with n fewer elements along the axis.

    Raises:
        ArgumentError: `n` is not an int.
        InvalidValueError: `n` is negative.

    A composition of `StridedSlice` and `Sub`. Source: the Array API standard.

    >>> rg.diff(rg.tensor([1.0, 4.0, 9.0])).print()
    Tensor
        [3, 5]
    """
    x = dispatch.lift(x)
    axis = normalized_axis(axis, x.ndim)
    parts = [part for part in (prepend, x, append) if part is not None]
    x = concat(parts, axis=axis) if len(parts) > 1 else x
    n, size = as_count(n, "n"), x.shape[axis]
    for _ in range(min(n, size) if isinstance(size, int) else n):  # stop when x is empty
        x = getitem(x, _between(axis, 1, None)) - getitem(x, _between(axis, None, -1))
    return x


# -- cumulative extrema --------------------------------------------------------------------------


def _run_extreme(xp: Namespace, x: Array, axis: int, largest: bool) -> Array:
    if xp is np:
        return (np.maximum if largest else np.minimum).accumulate(x, axis=axis)
    name = "cummax" if largest else "cummin"
    if xp.__name__ == "jax.numpy":
        import jax

        return getattr(jax.lax, name)(x, axis=axis)
    return getattr(x, name)(axis).values


@op("CumulativeMax")
def _cumulative_max(xp, x: TensorLike, /, *, axis: int) -> Tensor:
    return _run_extreme(xp, x, axis, True)


@op("CumulativeMin")
def _cumulative_min(xp, x: TensorLike, /, *, axis: int) -> Tensor:
    return _run_extreme(xp, x, axis, False)


@op("RunStarts")
def _run_starts(xp, x: TensorLike, /, *, axis: int) -> Tensor:
    """Return for each position the start of its run of equal elements (NaN equals all after)."""
    old, new = x[_between(axis, None, -1)], x[_between(axis, 1, None)]
    starts = (old != new) & (old == old)
    first = xp.zeros_like(x[_between(axis, 0, 1)], dtype=xp.bool)
    line = [1] * x.ndim
    line[axis] = -1
    count = xp.arange(x.shape[axis], **placed_like(x))
    places = xp.where(xp.concat([first, starts], axis=axis), xp.reshape(count, tuple(line)), 0)
    return _run_extreme(xp, places, axis, True)


not_differentiable("RunStarts")


def _to_run_starts(dy, y, axis):
    return scatter_along_axis(dy, _run_starts(y, axis=axis), y.shape, axis=axis)


gradient("CumulativeMax")(_to_run_starts)
gradient("CumulativeMin")(_to_run_starts)


@deferrable
def cumulative_max(x: TensorLike, /, *, axis: int | None = None) -> Tensor:
    """Return the cumulative maximum along an axis.

    For equal elements, the first one gets the gradient.

    Args:
        axis: The axis. It is optional if x has rank 1.

    Returns:
        A Tensor of x's shape and dtype.

    Raises:
        ArgumentError: `axis` is missing and x has several axes.

    Op type: `CumulativeMax`. Source: `jax.lax.cummax`.

    >>> rg.cumulative_max(rg.tensor([1.0, 3.0, 2.0])).print()
    Tensor
        [1, 3, 3]
    """
    x = dispatch.lift(x)
    return _cumulative_max(x, axis=_scan_axis("cumulative_max", x, axis))


@deferrable
def cumulative_min(x: TensorLike, /, *, axis: int | None = None) -> Tensor:
    """Return the cumulative minimum along an axis.

    For equal elements, the first one gets the gradient.

    Args:
        axis: The axis. It is optional if x has rank 1.

    Returns:
        A Tensor of x's shape and dtype.

    Raises:
        ArgumentError: `axis` is missing and x has several axes.

    Op type: `CumulativeMin`. Source: `jax.lax.cummin`.

    >>> rg.cumulative_min(rg.tensor([2.0, 3.0, 1.0])).print()
    Tensor
        [2, 2, 1]
    """
    x = dispatch.lift(x)
    return _cumulative_min(x, axis=_scan_axis("cumulative_min", x, axis))
