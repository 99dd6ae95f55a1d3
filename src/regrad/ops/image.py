"""Grayscale dilation, resizing, and space to batch. Images are NHWC."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from operator import add
from typing import Any

import numpy as np

from regrad.core.backends import Array, Namespace
from regrad.core.dispatch import lift
from regrad.core.op import Indices, TensorLike, op
from regrad.core.registry import gradient, not_differentiable
from regrad.core.shapes import Shape, as_shape
from regrad.core.tensor import Tensor
from regrad.errors import ArgumentError, ShapeError, kind
from regrad.graph.deferred import deferrable
from regrad.ops import windows
from regrad.ops.array import reshape
from regrad.ops.binary import equal, where
from regrad.ops.creation import asarray
from regrad.ops.creation_like import zeros_like
from regrad.ops.reduction import sum
from regrad.ops.windows import Ints, Padding, Pairs, Sizes, Windows, over_windows
from regrad.shapes.images import cells_of, check_dilation, cropped_sizes

# -- dilation ------------------------------------------------------------------------------------
# For a fixed maximal tap per window, dilation is linear, and so are its gradients.


def _dilation_windows(
    x: Sequence[int], w: Sequence[int], strides: Sizes, pad: str | Pairs, dilations: Sizes
) -> Windows:
    check_dilation(tuple(x), tuple(w))
    return windows.windows("dilation2d", tuple(x[1:3]), tuple(w[:2]), strides, pad, dilations)


def _candidates(xp: Namespace, x: Array, w: Array, win: Windows) -> Array:
    """Yield the arrays whose elementwise maximum is the dilation, one per tap."""
    x = windows.pad_spatial(xp, x, win.padding, windows.lowest(x))
    taps = itertools.product(*map(range, win.size))
    return (x[at] + w[tap] for at, tap in zip(win.places(), taps, strict=True))


@op("Dilation2D", to_float=True)
def _dilation2d(
    xp, x: TensorLike, w: TensorLike, /, strides: Sizes, pad: str | Pairs, dilations: Sizes
) -> Tensor:
    parts = _candidates(xp, x, w, _dilation_windows(x.shape, w.shape, strides, pad, dilations))
    y = next(parts)
    for part in parts:
        y = xp.maximum(y, part)
    return y


@op("Dilation2DArgmax", to_float=True)
def _dilation2d_argmax(
    xp, x: TensorLike, w: TensorLike, /, strides: Sizes, pad: str | Pairs, dilations: Sizes
) -> Tensor:
    """Return the number of the first maximal tap of each window, in row-major order."""
    win = _dilation_windows(x.shape, w.shape, strides, pad, dilations)
    return windows.first_maximum(xp, _candidates(xp, x, w, win))[1]


not_differentiable("Dilation2DArgmax")


@gradient("Dilation2D", "x")
def _(dy, x, w, x_shape, w_shape, strides, pad, dilations):
    tap = _dilation2d_argmax(x, w, strides, pad, dilations)
    return _tap_scatter(dy, tap, x_shape, w_shape[:2], strides, pad, dilations)


@gradient("Dilation2D", "w")
def _(dy, x, w, w_shape, strides, pad, dilations):
    tap = _dilation2d_argmax(x, w, strides, pad, dilations)
    numbers = asarray(np.arange(math.prod(w_shape[:2]))[:, None, None, None, None])
    dw = sum(where(equal(tap, numbers), dy, zeros_like(dy)), axis=(1, 2, 3))
    return reshape(dw, w_shape)


@op("TapGather")
def _tap_gather(
    xp,
    x: TensorLike,
    tap: Indices,
    /,
    size: Sizes,
    strides: Sizes,
    pad: str | Pairs,
    dilations: Sizes,
) -> Tensor:
    """Return from each window of x the element at the position `tap`."""
    win = windows.windows("tap_gather", tuple(x.shape[1:3]), size, strides, pad, dilations)
    x = windows.pad_spatial(xp, x, win.padding)
    return windows.choose_part(xp, tap, (x[at] for at in win.places()))


@op("TapScatter")
def _tap_scatter(
    xp,
    x: TensorLike,
    tap: Indices,
    /,
    shape: Shape,
    size: Sizes,
    strides: Sizes,
    pad: str | Pairs,
    dilations: Sizes,
) -> Tensor:
    """Add each element of x at the position `tap` of its window: the adjoint of `tap_gather`."""
    batch, *spatial, channels = as_shape(shape)
    win = windows.windows("tap_scatter", tuple(spatial), size, strides, pad, dilations)
    parts = windows.sorted_out(xp, tap, x, math.prod(size))
    full = (batch, *win.padded, channels)
    return windows.crop_spatial(windows.place_parts(xp, parts, win.places(), full), win.padding)


@gradient("TapGather", "x")
def _(dy, tap, x_shape, size, strides, pad, dilations):
    return _tap_scatter(dy, tap, x_shape, size, strides, pad, dilations)


@gradient("TapScatter", "x")
def _(dy, tap, size, strides, pad, dilations):
    return _tap_gather(dy, tap, size, strides, pad, dilations)


@deferrable
def dilation2d(
    x: TensorLike, w: TensorLike, /, strides: Ints, pad: Padding, dilations: Ints = 1
) -> Tensor:
    """Return the maximum over each window of `x + w`: grayscale dilation.

    The gradients go to the first maximum of each window, in row-major order.

    Args:
        x: Images, (batch, height, width, channels), or one image without the batch axis.
        w: The structuring function, (height, width, channels).
        strides, pad, dilations: As in `conv2d`. Padding is never the maximum.

    Returns:
        A Tensor (batch, height, width, channels), with the dtype to which x and w promote.

    Raises:
        ShapeError: the rank is wrong, the channels differ, or a window does not fit.

    Op type: `Dilation2D`. Source: `tf.dilation2d` of TensorFlow.js.

    >>> import regrad as rg
    >>> from regrad.nn import dilation2d
    >>> x = rg.tensor([1, 5, 2, 3], (1, 1, 4, 1))
    >>> dilation2d(x, rg.tensor([0, 1], (1, 2, 1)), 1, "valid").reshape((3,)).print()
    Tensor
        [6, 5, 4]
    """
    return over_windows(_dilation2d, "dilation2d", 2, x, (w,), strides, pad, dilations=dilations)


# -- space to batch ------------------------------------------------------------------------------


@op("SpaceToBatchND")
def _space_to_batch(xp, x: TensorLike, /, block_shape: Sizes, paddings: Pairs) -> Tensor:
    n = len(block_shape)
    batch, *sizes = x.shape[: n + 1]
    cells, rest = cells_of(sizes, block_shape, paddings), tuple(x.shape[n + 1 :])
    x = windows.pad_spatial(xp, x, paddings)
    split = itertools.chain(*zip(cells, block_shape, strict=True))
    x = xp.reshape(x, (batch, *split, *rest))
    blocks, places = range(2, 2 * n + 1, 2), range(1, 2 * n, 2)
    x = xp.permute_dims(x, (*blocks, 0, *places, *range(2 * n + 1, x.ndim)))
    return xp.reshape(x, (batch * math.prod(block_shape), *cells, *rest))


@op("BatchToSpaceND")
def _batch_to_space(xp, x: TensorLike, /, block_shape: Sizes, crops: Pairs) -> Tensor:
    n, blocks = len(block_shape), math.prod(block_shape)
    batch, *cells = x.shape[: n + 1]
    sizes = [c * b for c, b in zip(cells, block_shape, strict=True)]
    cropped_sizes(batch, sizes, block_shape, crops)  # raises for sizes that do not fit
    rest = tuple(x.shape[n + 1 :])
    x = xp.reshape(x, (*block_shape, batch // blocks, *cells, *rest))
    axes = [n, *itertools.chain(*((n + 1 + i, i) for i in range(n)))]
    x = xp.permute_dims(x, (*axes, *range(2 * n + 1, x.ndim)))
    return windows.crop_spatial(xp.reshape(x, (batch // blocks, *sizes, *rest)), crops)


@gradient("SpaceToBatchND")
def _(dy, block_shape, paddings):
    return _batch_to_space(dy, block_shape, paddings)


gradient("BatchToSpaceND")(lambda dy, block_shape, crops: _space_to_batch(dy, block_shape, crops))


@deferrable
def space_to_batch(
    x: TensorLike, /, block_shape: Sequence[int], paddings: Sequence[Sequence[int]]
) -> Tensor:
    """Move blocks of the spatial axes into the batch axis.

    Args:
        x: A Tensor `(batch, *spatial, ...)`.
        block_shape: The size of a block along each spatial axis.
        paddings: Pairs (before, after) of zeros for each spatial axis. The padded sizes must be
            multiples of the block sizes.

    Returns:
        A Tensor `(batch * prod(block_shape), *spatial / block_shape, ...)`.

    Raises:
        ShapeError: the sizes do not fit.

    Op type: `SpaceToBatchND`. Source: `tf.spaceToBatchND` of TensorFlow.js.

    >>> x = rg.tensor([1, 2, 3, 4], (1, 2, 2))
    >>> rg.nn.space_to_batch(x, [1, 2], [[0, 0], [0, 0]]).tolist()
    [[[1.0], [3.0]], [[2.0], [4.0]]]
    """
    return _space_to_batch(*_check_blocks("space_to_batch", x, block_shape, paddings, "paddings"))


@deferrable
def batch_to_space(
    x: TensorLike, /, block_shape: Sequence[int], crops: Sequence[Sequence[int]]
) -> Tensor:
    """Move the batch into blocks of the spatial axes, and crop: the inverse of `space_to_batch`.

    Args:
        x: A Tensor `(batch, *spatial, ...)`. The batch must be a multiple of prod(block_shape).
        block_shape: The size of a block along each spatial axis.
        crops: Pairs (before, after) of the elements to cut off each spatial axis.

    Returns:
        A Tensor `(batch / prod(block_shape), *spatial * block_shape - crops, ...)`.

    Raises:
        ShapeError: the sizes do not fit.

    Op type: `BatchToSpaceND`. Source: `tf.batchToSpaceND` of TensorFlow.js.

    >>> x = rg.tensor([1, 3, 2, 4], (2, 2, 1))
    >>> rg.nn.batch_to_space(x, [1, 2], [[0, 0], [0, 0]]).tolist()
    [[[1.0, 2.0], [3.0, 4.0]]]
    """
    return _batch_to_space(*_check_blocks("batch_to_space", x, block_shape, crops, "crops"))


def _check_blocks(
    name: str, x: TensorLike, block_shape: Sequence[int], pairs: Sequence[Sequence[int]], what: str
) -> tuple[Tensor, Sizes, Pairs]:
    if not isinstance(block_shape, list | tuple) or not isinstance(pairs, list | tuple):
        raise ArgumentError(
            f"{name}: block_shape and {what} must be lists, one entry per spatial axis, got "
            f"{kind(block_shape)} and {kind(pairs)}"
        )
    n = len(block_shape)
    x, blocks = lift(x), windows.spread(block_shape, n, f"{name}: block_shape")
    if len(pairs) != n or x.ndim <= n:
        raise ShapeError(
            f"{name}: {n} blocks {blocks} need {n} pairs of {what} and a Tensor of rank {n + 1} "
            f"or more, got {len(pairs)} and the shape {x.shape}"
        )
    return x, blocks, windows.pairs_of(pairs, n, f"{name}: {what}")


# -- resizing ------------------------------------------------------------------------------------
# Resizing is linear in the image and separates by axis: each new row is a weighted sum of old rows.

Rows = tuple[tuple[np.ndarray, np.ndarray | None], ...]  # old rows and their weights (None is 1)


@lru_cache(maxsize=256)
def _nearest(old: int, new: int, align: bool, half: bool) -> Rows:
    r = np.arange(new)  # in integers, because r * (old / new) rounds below whole numbers
    if align and new > 1:
        at = (2 * r * (old - 1) + new - 1) // (2 * (new - 1))
    elif half:
        at = (2 * r + 1) * old // (2 * new)
    else:
        at = r * old // new
    return ((at, None),)


@lru_cache(maxsize=256)
def _bilinear(old: int, new: int, align: bool, half: bool) -> Rows:
    r = np.arange(new)
    if align and new > 1:
        at = r * (old - 1) / (new - 1)
    else:
        at = np.clip((r + 0.5) * old / new - 0.5, 0, old - 1) if half else r * old / new
    low = np.floor(at).astype(int)
    high = np.minimum(np.ceil(at).astype(int), old - 1)
    return (low, 1 - (at - low)), (high, at - low)


def _resize_axes(
    xp: Namespace, x: Array, rows: Array, *, size: Sizes, align: bool, half: bool
) -> Array:
    for axis, new in enumerate(size, 1):
        found = rows(x.shape[axis], new, align, half)
        x = reduce(add, [_weigh(xp, _take(xp, x, at, axis), w, axis) for at, w in found])
    return x


def _resize_axes_adjoint(
    xp: Namespace, dy: Array, rows: Array, shape: Sequence[int], *, align: bool, half: bool
) -> Array:
    for axis in (1, 2):
        found = rows(shape[axis], dy.shape[axis], align, half)
        parts = [(at, _weigh(xp, dy, w, axis)) for at, w in found]
        dy = reduce(add, [_add_rows(xp, part, at, axis, shape[axis]) for at, part in parts])
    return dy


def _take(xp: Namespace, x: Array, rows: np.ndarray, axis: int) -> Array:
    return xp.take(x, windows.constant(xp, rows, x), axis=axis)


def _weigh(xp: Namespace, x: Array, weights: np.ndarray | None, axis: int) -> Array:
    if weights is None:
        return x
    weights = weights.reshape(-1, *(1,) * (x.ndim - 1 - axis))
    return x * windows.constant(xp, weights, x, x.dtype)


def _add_rows(xp: Namespace, dy: Array, rows: np.ndarray, axis: int, size: int) -> Array:
    """Add dy to the rows `rows` (in rising order) of zeros: the adjoint of take."""
    shape = (*dy.shape[:axis], size, *dy.shape[axis + 1 :])
    library = windows.library(xp)
    if library == "jax":
        at = (slice(None),) * axis + (rows,)
        return xp.zeros(shape, dy.dtype).at[at].add(dy, indices_are_sorted=True)
    if library == "torch":
        return dy.new_zeros(shape).index_add(axis, windows.constant(xp, rows, dy), dy)
    dx, before = np.zeros(shape, dy.dtype), (slice(None),) * axis
    found, first, counts = np.unique(rows, return_index=True, return_counts=True)
    for i in range(counts.max()):  # all first occurrences, then all second ones, and so on
        more = counts > i
        dx[(*before, found[more])] += dy[(*before, first[more] + i)]
    return dx


def _resizing(op_type: str, name: str, rows: Array, **options: Any) -> Callable[..., Any]:
    """Return an op that resizes by `rows`. Its gradient is its adjoint, which is also an op."""

    def resize(xp, x: TensorLike, /, size: Sizes, align: bool, half: bool) -> Tensor:
        return _resize_axes(xp, x, rows, size=size, align=align, half=half)

    def adjoint(xp, x: TensorLike, /, shape: Shape, size: Sizes, align: bool, half: bool) -> Tensor:
        return _resize_axes_adjoint(xp, x, rows, as_shape(shape), align=align, half=half)

    resize.__name__, adjoint.__name__ = name, f"{name}_grad"
    forward, back = op(op_type, **options)(resize), op(f"{op_type}Grad")(adjoint)
    gradient(op_type)(lambda dy, x_shape, size, align, half: back(dy, x_shape, size, align, half))
    gradient(f"{op_type}Grad")(lambda dy, size, align, half: forward(dy, size, align, half))
    return forward


_resize_bilinear = _resizing("ResizeBilinear", "_resize_bilinear", _bilinear, to_float=True)
_resize_nearest = _resizing("ResizeNearestNeighbor", "_resize_nearest", _nearest)


@deferrable
def resize_bilinear(
    x: TensorLike,
    /,
    size: Sequence[int],
    align_corners: bool = False,
    half_pixel_centers: bool = False,
) -> Tensor:
    """Return images of another size. Each pixel is interpolated between four old pixels.

    Args:
        x: Images, (batch, height, width, channels), or one image without the batch axis.
        size: The new (height, width).
        align_corners: Keep the centers of the corner pixels in place. By default, the upper left
            edges stay in place (TensorFlow 1's convention).
        half_pixel_centers: Treat pixels as squares around their centers (the convention of
            TensorFlow 2, PyTorch and JAX). Not together with `align_corners`.

    Returns:
        A Tensor of x's rank. Integers become the default dtype.

    Raises ShapeError for a wrong rank or empty images, and ArgumentError for a wrong size.

    Op type: `ResizeBilinear`. Source: `tf.image.resizeBilinear` of TensorFlow.js.

    >>> import regrad as rg
    >>> from regrad.nn import resize_bilinear
    >>> x = rg.tensor([0, 1, 2, 3], (2, 2, 1))
    >>> resize_bilinear(x, (3, 3), align_corners=True).reshape((3, 3)).print()
    Tensor
        [[0, 0.5, 1],
         [1, 1.5, 2],
         [2, 2.5, 3]]
    """
    options = (size, align_corners, half_pixel_centers)
    return _resize(_resize_bilinear, "resize_bilinear", x, *options)


@deferrable
def resize_nearest(
    x: TensorLike,
    /,
    size: Sequence[int],
    align_corners: bool = False,
    half_pixel_centers: bool = False,
) -> Tensor:
    """Return images of another size. Each pixel is a copy of the nearest old pixel.

    Args:
        x: Images, (batch, height, width, channels), or one image without the batch axis.
        size: The new (height, width).
        align_corners, half_pixel_centers: As in `resize_bilinear`.

    Returns:
        A Tensor of x's rank and dtype.

    Raises ShapeError for a wrong rank or empty images, and ArgumentError for a wrong size.

    Op type: `ResizeNearestNeighbor`. Source: `tf.image.resizeNearestNeighbor` of TensorFlow.js.

    >>> rg.nn.resize_nearest(rg.tensor([1, 2], (1, 2, 1)), (1, 4)).reshape((4,)).print()
    Tensor
        [1, 1, 2, 2]
    """
    options = (size, align_corners, half_pixel_centers)
    return _resize(_resize_nearest, "resize_nearest", x, *options)


def _resize(
    resize: Callable[..., Any], name: str, x: TensorLike, size: Ints, align: bool, half: bool
) -> Tensor:
    if align and half:
        raise ArgumentError(f"{name}: choose align_corners or half_pixel_centers, not both")
    size = windows.spread(size, 2, f"{name}: size")
    x, single = windows.as_batch(name, x, 2)
    if any(type(n) is int and n == 0 for n in x.shape[1:3]):
        raise ShapeError(f"{name}: images of shape {x.shape} have no pixels to resize")
    return windows.without_batch(resize(x, size, bool(align), bool(half)), single)
