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
    """The index of a range of places along one axis."""
    return (slice(None),) * axis + (slice(start, stop),)


def _move(xp: Namespace, x: Array, forward: bool, axis: int, fill: complex) -> Array:
    """x moved by one place along an axis; `fill` enters."""
    if not x.shape[axis]:
        return x
    entering = xp.full_like(x[_between(axis, 0, 1)], fill)
    staying = x[_between(axis, None, -1) if forward else _between(axis, 1, None)]
    return xp.concat([entering, staying] if forward else [staying, entering], axis=axis)


@op("Shift")
def _shift(xp, x: TensorLike, /, *, axis: int, forward: bool) -> Tensor:
    """x moved by one place along an axis; 0 enters."""
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
    """A scan of arguments that are checked and brought to the op's form."""
    x = dispatch.lift(x if dtype is None else convert(dispatch.lift(x), as_numpy_dtype(dtype)))
    axis = _scan_axis(op.__name__, x, axis)
    if include_initial and exclusive:
        raise ArgumentError(
            f"{op.__name__}: choose one of include_initial (starts with the empty scan and is one "
            "longer than x) and exclusive (the same without the last)"
        )
    if include_initial:  # the exclusive scan of one element more, which does not count
        more = [(0, 0)] * x.ndim
        more[axis] = (1, 0) if reverse else (0, 1)
        x = pad(x, more)
    y = op(x, axis=axis, exclusive=exclusive or include_initial, reverse=reverse)
    return y if dtype is None else convert(y, x.dtype)  # (small integers are summed as large ones)


def _scan_axis(name: str, x: Tensor, axis: int | None) -> int:
    """The axis of a scan; only vectors may leave it out."""
    if x.ndim == 0:
        raise ShapeError(f"{name}: a Tensor of rank 0 has no axis to run along; reshape it to (1,)")
    if axis is None and x.ndim > 1:
        raise ArgumentError(
            f"{name}: x has the shape {x.shape}; say along which axis (axis=-1 is the last)"
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
    """Return the sums of the elements so far along an axis.

    Args:
        axis: The axis, which may be left out if x has one.
        dtype: The dtype to which x is converted first; by default x's, and the default integer
            for bools and small integers.
        include_initial: Whether a 0 comes before the first sum; the result is one longer.
        exclusive: Whether each element is left out of its own sum, so that the first sum is 0.
        reverse: Whether the sums run from the end.

    Returns:
        A Tensor of x's shape.

    Raises:
        ArgumentError: `axis` is left out and x has several.

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
    # dy[i] reaches x[k] times the product of the elements before x[k], and of those between
    # k and i. The latter is a recurrence, which needs no division (x may have zeros).
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
    """Return the products of the elements so far along an axis.

    The gradient is right where elements are 0 as well, at any order.

    Args:
        axis: The axis, which may be left out if x has one.
        dtype: The dtype to which x is converted first; by default x's, and the default integer
            for bools and small integers.
        include_initial: Whether a 1 comes before the first product; the result is one longer.
        exclusive: Whether each element is left out of its own product, so that the first is 1.
        reverse: Whether the products run from the end.

    Returns:
        A Tensor of x's shape.

    Raises:
        ArgumentError: `axis` is left out and x has several.

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

    It takes about log2(n) steps over whole arrays, not n over elements.

    Args:
        decay: `decay[k]` links the places k-1 and k; the first has no effect. It broadcasts to x.
        reverse: Whether the recurrence runs from the end, `y[k] = x[k] + decay[k+1] * y[k+1]`
            (discounted returns of rewards x).

    Returns:
        A Tensor of the shape to which x and decay broadcast, of the dtype to which they promote.

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
    if xp is np and y.size > 256 * n:  # long rows: NumPy is quicker place by place
        y, links = np.array(np.moveaxis(y, axis, 0)), np.moveaxis(links, axis, 0)
        for k in range(1, n):
            y[k] += links[k] * y[k - 1]
        return np.moveaxis(y, 0, axis)
    while step < n:  # y[k] knows its last `step` places, links[k] links over them
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
    """Return the differences of neighbours along an axis, taken `n` times.

    Args:
        n: How often.
        prepend: Values joined to the start of x first, a Tensor or array.
        append: Values joined to the end of x first, a Tensor or array.

    Returns:
        A Tensor of x's dtype, with n elements fewer along the axis.

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
    for _ in range(min(n, size) if isinstance(size, int) else n):  # no more than empties x
        x = getitem(x, _between(axis, 1, None)) - getitem(x, _between(axis, None, -1))
    return x


# -- running extremes ----------------------------------------------------------------------------


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
    """For each place the first place of its run of equal elements (a NaN equals all after it)."""
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
    """Return the largest element so far along an axis.

    Of equal elements the first has the gradient.

    Args:
        axis: The axis, which may be left out if x has one.

    Returns:
        A Tensor of x's shape and dtype.

    Raises:
        ArgumentError: `axis` is left out and x has several.

    Op type: `CumulativeMax`. Source: `jax.lax.cummax`.

    >>> rg.cumulative_max(rg.tensor([1.0, 3.0, 2.0])).print()
    Tensor
        [1, 3, 3]
    """
    x = dispatch.lift(x)
    return _cumulative_max(x, axis=_scan_axis("cumulative_max", x, axis))


@deferrable
def cumulative_min(x: TensorLike, /, *, axis: int | None = None) -> Tensor:
    """Return the smallest element so far along an axis.

    Of equal elements the first has the gradient.

    Args:
        axis: The axis, which may be left out if x has one.

    Returns:
        A Tensor of x's shape and dtype.

    Raises:
        ArgumentError: `axis` is left out and x has several.

    Op type: `CumulativeMin`. Source: `jax.lax.cummin`.

    >>> rg.cumulative_min(rg.tensor([2.0, 3.0, 1.0])).print()
    Tensor
        [2, 2, 1]
    """
    x = dispatch.lift(x)
    return _cumulative_min(x, axis=_scan_axis("cumulative_min", x, axis))
