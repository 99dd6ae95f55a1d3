"""Pooling over windows, and normalization over neighboring channels. Data is NHWC."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from regrad.core.backends import Array, Namespace, in_single, placed_like
from regrad.core.op import TensorLike, op
from regrad.core.registry import gradient
from regrad.core.shapes import Shape, as_shape
from regrad.core.tensor import Tensor
from regrad.errors import ArgumentError
from regrad.graph.deferred import deferrable
from regrad.ops import windows
from regrad.ops.binary import pow
from regrad.ops.elementwise import square
from regrad.ops.windows import Ints, Padding, Pairs, Sizes, Windows, over_windows
from regrad.shapes.images import check_pool_padding

# Windows are boxes, so a pool over several axes is a sequence of pools along one axis: a 7×7
# window takes 14 steps instead of 49.

Kernel = Callable[..., Any]


def _windows(name: str, shape: Sizes, size: Sizes, strides: Sizes, pad: str | Pairs) -> Windows:
    win = windows.windows(name, tuple(shape[1:-1]), size, strides, pad, (1,) * len(size))
    check_pool_padding(name, size, win.padding)
    return win


# -- maximum -------------------------------------------------------------------------------------


def _max_pool_kernel(xp: Namespace, x: Array, win: Windows) -> Array:
    x = windows.pad_spatial(xp, x, win.padding, windows.lowest(x))
    for i in range(len(win.size)):
        places = windows.axis_places(win.along(i), i + 1)
        x = reduce(xp.maximum, [x[at] for at in places])
    return x


def _first_maxima(xp: Namespace, x: Array, win: Windows) -> list[tuple[int, Any]]:
    """Return for each axis, last first, the tap of the first maximum.

    The first maximum in row-major order is the first column within each row, then the first row.
    """
    x = windows.pad_spatial(xp, x, win.padding, windows.lowest(x))
    found = []
    for i in reversed(range(len(win.size))):
        places = windows.axis_places(win.along(i), i + 1)
        x, where = windows.first_maximum(xp, (x[at] for at in places))
        found.append((i, where))
    return found


def _to_maxima(xp: Namespace, x: Array, dy: Array, win: Windows) -> Array:
    """Add each element of dy at the position of its window's maximum in x."""
    if _in_tiles(xp, win):
        return _to_maxima_of_tiles(xp, x, dy, win)
    for i, where in reversed(_first_maxima(xp, x, win)):
        taps = win.along(i)
        parts = windows.sorted_out(xp, where, dy, len(taps))
        shape = (*dy.shape[: i + 1], win.padded[i], *dy.shape[i + 2 :])
        dy = windows.place_parts(xp, parts, windows.axis_places(taps, i + 1), shape)
    return windows.crop_spatial(dy, win.padding)


def _to_maxima_of_tiles(xp: Namespace, x: Array, dy: Array, win: Windows) -> Array:
    x = windows.pad_spatial(xp, x, win.padding, windows.lowest(x))
    where = windows.first_maximum(xp, (x[at] for at in win.places()))[1]
    taps = xp.arange(math.prod(win.size), dtype=where.dtype, **placed_like(where))
    mine = _upon_tiles(where, win) == xp.reshape(taps, (*(n for k in win.size for n in (1, k)), 1))
    return _from_tiles(xp, xp.where(mine, _upon_tiles(dy, win), 0), win)


# Windows that do not overlap are tiles. Their gradient is a single broadcast without a sum, which
# XLA compiles to one loop. `bench/formulations.py` measures it.


def _in_tiles(xp: Namespace, win: Windows) -> bool:
    return windows.library(xp) == "jax" and win.size == win.strides


def _upon_tiles(y: Array, win: Windows) -> Any:
    """Insert an axis of size 1 after each spatial axis of y, to broadcast to the tiles."""
    whole = slice(None)
    return y[(whole, *(at for _ in win.size for at in (whole, None)))]


def _from_tiles(xp: Namespace, tiles: Any, win: Windows) -> Array:
    """Join tiles to the data that they were cut from. Positions outside of tiles are zero."""
    sizes = [n * k for n, k in zip(win.outputs, win.size, strict=True)]
    x = xp.reshape(tiles, (tiles.shape[0], *sizes, tiles.shape[-1]))
    rest = tuple((0, n - size) for n, size in zip(win.padded, sizes, strict=True))
    return windows.crop_spatial(windows.pad_spatial(xp, x, rest), win.padding)


def _at_maxima(xp: Namespace, x: Array, values: Array, win: Windows) -> Array:
    """Return the elements of `values` at the maxima of x: the adjoint of `_to_maxima`."""
    values = windows.pad_spatial(xp, values, win.padding)
    for i, where in _first_maxima(xp, x, win):
        places = windows.axis_places(win.along(i), i + 1)
        values = windows.choose_part(xp, where, (values[at] for at in places))
    return values


def _pooling(op_type: str, name: str, compute: Kernel, **options: Any) -> Kernel:
    """Return an op that computes one number per window and channel of images or volumes."""

    def pool(xp, x: TensorLike, /, filter_size: Sizes, strides: Sizes, pad: str | Pairs) -> Tensor:
        return compute(xp, x, _windows(name, x.shape, filter_size, strides, pad))

    pool.__name__ = f"_{name}"
    return op(op_type, **options)(pool)


_max_pool = _pooling("MaxPool", "max_pool", _max_pool_kernel)
_max_pool3d = _pooling("MaxPool3D", "max_pool3d", _max_pool_kernel)


# The gradient is linear in dy, and piecewise constant in x.


@op("MaxPoolGrad")
def _max_pool_grad(
    xp, a: TensorLike, b: TensorLike, /, filter_size: Sizes, strides: Sizes, pad: str | Pairs
) -> Tensor:
    """Place b, shaped like the pooled a, at the first maximum of each window of a."""
    return _to_maxima(xp, a, b, _windows("max_pool", a.shape, filter_size, strides, pad))


@op("MaxPoolGradGrad")
def _max_pool_grad_grad(
    xp, a: TensorLike, b: TensorLike, /, filter_size: Sizes, strides: Sizes, pad: str | Pairs
) -> Tensor:
    """Return the elements of b, shaped like a, at the first maximum of each window of a."""
    return _at_maxima(xp, a, b, _windows("max_pool", a.shape, filter_size, strides, pad))


for _type in ("MaxPool", "MaxPool3D"):

    @gradient(_type)
    def _(dy, x, filter_size, strides, pad):
        return _max_pool_grad(x, dy, filter_size, strides, pad)


for _type in ("MaxPoolGrad", "MaxPoolGradGrad"):
    gradient(_type, "a")(lambda dy: None)


@gradient("MaxPoolGrad", "b")
def _(dy, a, filter_size, strides, pad):
    return _max_pool_grad_grad(a, dy, filter_size, strides, pad)


@gradient("MaxPoolGradGrad", "b")
def _(dy, a, filter_size, strides, pad):
    return _max_pool_grad(a, dy, filter_size, strides, pad)


# -- mean ----------------------------------------------------------------------------------------


def _sums(xp: Namespace, x: Array, win: Windows) -> Array:
    """Return the sum over each window."""
    x = windows.pad_spatial(xp, x, win.padding)
    for i in range(len(win.size)):
        x = reduce(add, [x[at] for at in windows.axis_places(win.along(i), i + 1)])
    return x


def _spread_sums(xp: Namespace, dy: Array, win: Windows) -> Array:
    """Add each element to every position of its window: the adjoint of `_sums`."""
    if _in_tiles(xp, win):
        sizes = [n for pair in zip(win.outputs, win.size, strict=True) for n in pair]
        tiles = xp.broadcast_to(_upon_tiles(dy, win), (dy.shape[0], *sizes, dy.shape[-1]))
        return _from_tiles(xp, tiles, win)
    for i in reversed(range(len(win.size))):
        taps = win.along(i)
        shape = (*dy.shape[: i + 1], win.padded[i], *dy.shape[i + 2 :])
        dy = windows.place_parts(xp, [dy] * len(taps), windows.axis_places(taps, i + 1), shape)
    return windows.crop_spatial(dy, win.padding)


def _over_counts(xp: Namespace, y: Array, win: Windows) -> Array:
    """Divide y by the number of elements of each window that lie in the data."""
    counts = reduce(np.multiply.outer, [win.counts(i) for i in range(len(win.size))])
    if (counts == math.prod(win.size)).all():
        return y / math.prod(win.size)
    return y / windows.constant(xp, counts[..., None], y, y.dtype)


def _means(xp: Namespace, x: Array, win: Windows) -> Array:
    return in_single(lambda xp, x: _over_counts(xp, _sums(xp, x, win), win), xp, x)


_avg_pool = _pooling("AvgPool", "avg_pool", _means, to_float=True)
_avg_pool3d = _pooling("AvgPool3D", "avg_pool3d", _means, to_float=True)


@op("AvgPoolGrad")
def _avg_pool_grad(
    xp, x: TensorLike, /, shape: Shape, filter_size: Sizes, strides: Sizes, pad: str | Pairs
) -> Tensor:
    """Return the adjoint of `avg_pool` for data of the given shape."""
    win = _windows("avg_pool", as_shape(shape), filter_size, strides, pad)
    return in_single(lambda xp, x: _spread_sums(xp, _over_counts(xp, x, win), win), xp, x)


for _type in ("AvgPool", "AvgPool3D"):

    @gradient(_type)
    def _(dy, x_shape, filter_size, strides, pad):
        return _avg_pool_grad(dy, x_shape, filter_size, strides, pad)


@gradient("AvgPoolGrad")
def _(dy, filter_size, strides, pad):
    pool = _avg_pool if len(filter_size) == 2 else _avg_pool3d
    return pool(dy, filter_size, strides, pad)


# -- public functions ----------------------------------------------------------------------------


@deferrable
def max_pool(x: TensorLike, /, filter_size: Ints, strides: Ints, pad: Padding) -> Tensor:
    """Return the maximum of each window of images.

    The gradient goes to the first maximum of a window, in row-major order. NaN is treated as the
    largest number.

    Args:
        x: Images, (batch, height, width, channels), or one image without the batch axis.
        filter_size: The size of the window, an int or (height, width).
        strides: The distance between windows, an int or a pair.
        pad: `"same"` (there are `ceil(n / stride)` windows, and the smaller half of the padding
            comes first), `"valid"` (no padding), an int, or pairs (before, after) for each axis.
            Padding is never the maximum.

    Returns:
        A Tensor of x's rank and dtype, with one element per window and channel.

    Raises:
        ShapeError: the rank is wrong, or a window does not fit.
        ArgumentError: `pad` is unknown, or sizes or strides are not positive ints.

    Op type: `MaxPool`. Source: `tf.maxPool` of TensorFlow.js.

    >>> import regrad as rg
    >>> from regrad.nn import max_pool
    >>> x = rg.tensor([1, 3, 2, 4, 8, 5, 6, 7], (1, 2, 4, 1))
    >>> max_pool(x, 2, 2, "valid").reshape((2,)).print()
    Tensor
        [8, 7]
    >>> rg.grad(lambda x: max_pool(x, 2, 2, "valid"))(x).reshape((2, 4)).print()
    Tensor
        [[0, 0, 0, 0],
         [1, 0, 0, 1]]
    """
    return over_windows(_max_pool, "max_pool", 2, x, (), strides, pad, filter_size=filter_size)


@deferrable
def max_pool3d(x: TensorLike, /, filter_size: Ints, strides: Ints, pad: Padding) -> Tensor:
    """Return the maximum of each window of volumes; see `max_pool`.

    Args:
        x: Volumes, (batch, depth, height, width, channels), or one volume without the batch axis.
        filter_size, strides, pad: As in `max_pool`, for three axes.

    Returns:
        A Tensor of x's rank and dtype, with one element per window and channel.

    Raises:
        ShapeError: the rank is wrong, or a window does not fit.

    Op type: `MaxPool3D`. Source: `tf.maxPool3d` of TensorFlow.js.

    >>> rg.nn.max_pool3d(rg.ones((1, 4, 4, 4, 1)), 2, 2, "valid").shape
    (1, 2, 2, 2, 1)
    """
    return over_windows(_max_pool3d, "max_pool3d", 3, x, (), strides, pad, filter_size=filter_size)


@deferrable
def avg_pool(x: TensorLike, /, filter_size: Ints, strides: Ints, pad: Padding) -> Tensor:
    """Return the mean of each window of images.

    The mean excludes padding. Both the forward and the backward pass divide by the number of
    elements of the window in the image. (TensorFlow.js divides the gradient by the window size.)

    Args:
        x: Images, (batch, height, width, channels), or one image without the batch axis.
        filter_size, strides, pad: As in `max_pool`.

    Returns:
        A Tensor of x's rank, with one element per window and channel. Integers become the
        default dtype.

    Raises:
        ShapeError: the rank is wrong, or a window does not fit.
        ArgumentError: `pad` is unknown, or sizes or strides are not positive ints.

    Op type: `AvgPool`. Source: `tf.avgPool` of TensorFlow.js.

    >>> import regrad as rg
    >>> from regrad.nn import avg_pool
    >>> x = rg.tensor([1, 3, 2, 4], (1, 2, 2, 1))
    >>> avg_pool(x, 2, 1, "same").reshape((2, 2)).print()
    Tensor
        [[2.5, 3.5],
         [3  , 4  ]]
    """
    return over_windows(_avg_pool, "avg_pool", 2, x, (), strides, pad, filter_size=filter_size)


@deferrable
def avg_pool3d(x: TensorLike, /, filter_size: Ints, strides: Ints, pad: Padding) -> Tensor:
    """Return the mean of each window of volumes; see `avg_pool`.

    Args:
        x: Volumes, (batch, depth, height, width, channels), or one volume without the batch axis.
        filter_size, strides, pad: As in `max_pool`, for three axes.

    Returns:
        A Tensor of x's rank, with one element per window and channel. Integers become the
        default dtype.

    Raises:
        ShapeError: the rank is wrong, or a window does not fit.

    Op type: `AvgPool3D`. Source: `tf.avgPool3d` of TensorFlow.js.

    >>> rg.nn.avg_pool3d(rg.ones((1, 4, 4, 4, 1)), 2, 2, "valid").shape
    (1, 2, 2, 2, 1)
    """
    return over_windows(_avg_pool3d, "avg_pool3d", 3, x, (), strides, pad, filter_size=filter_size)


# -- neighboring channels ------------------------------------------------------------------------


def _neighbours(xp: Namespace, x: Array, radius: int) -> Array:
    """Return the sum over the channels at a distance of at most `radius`."""
    n = x.shape[-1]
    radius = max(min(radius, n - 1), 0)
    flat = xp.reshape(x, (math.prod(x.shape[:-1]), n, 1))
    wide = windows.pad_spatial(xp, flat, ((radius, radius),))
    return xp.reshape(reduce(add, [wide[:, t : t + n] for t in range(2 * radius + 1)]), x.shape)


@op("NeighbourSum")
def _neighbour_sum(xp, x: TensorLike, /, radius: int) -> Tensor:
    """Return the sum over the channels within `radius`. The op is its own adjoint."""
    return _neighbours(xp, x, radius)


gradient("NeighbourSum")(lambda dy, radius: _neighbour_sum(dy, radius))


@op("LRN", to_float=True)
def _lrn(xp, x: TensorLike, /, depth_radius: int, bias: float, alpha: float, beta: float) -> Tensor:
    return x / (bias + alpha * _neighbours(xp, x * x, depth_radius)) ** beta


@gradient("LRN")
def _(dy, x, depth_radius, bias, alpha, beta):
    norm = bias + alpha * _neighbour_sum(square(x), depth_radius)
    dnorm = _neighbour_sum(dy * x * pow(norm, -beta - 1), depth_radius)
    return dy * pow(norm, -beta) - (2 * alpha * beta) * x * dnorm


@deferrable
def local_response_normalization(
    x: TensorLike,
    /,
    depth_radius: int = 5,
    bias: float = 1.0,
    alpha: float = 1.0,
    beta: float = 0.5,
) -> Tensor:
    """Return `x / (bias + alpha * s) ** beta`, where s sums `x²` over neighboring channels.

    Args:
        x: Images, (batch, height, width, channels), or one image without the batch axis.
        depth_radius: The largest distance of a neighboring channel.
        bias, alpha, beta: Numbers.

    Returns:
        A Tensor of x's shape. Integers become the default dtype.

    Raises ShapeError for a wrong rank, and ArgumentError for a negative or fractional radius.

    Op type: `LRN`. Source: `tf.localResponseNormalization` of TensorFlow.js.

    >>> rg.nn.local_response_normalization(rg.ones((1, 1, 1, 3)), 1).reshape((3,)).print()
    Tensor
        [0.5773503, 0.5, 0.5773503]
    """
    name = "local_response_normalization"
    if type(depth_radius) is not int or depth_radius < 0:
        raise ArgumentError(
            f"{name}: depth_radius must be an int of 0 or more, got {depth_radius!r}"
        )
    x, single = windows.as_batch(name, x, 2)
    return windows.without_batch(_lrn(x, depth_radius, bias, alpha, beta), single)
