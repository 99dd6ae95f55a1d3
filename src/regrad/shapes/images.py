"""Forms of ops on images: convolutions, pools, resizing, blocks. Data is NHWC.

The kernels call the functions without a leading underscore to check their arguments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from regrad.errors import ShapeError
from regrad.shapes.sizes import Shape, as_sizes, differ, pairs, shorten, unlike
from regrad.shapes.table import Arguments, Attrs, Spec, form, second_dtype

SPATIAL: dict[int, tuple[str, ...]] = {
    1: ("width",),
    2: ("height", "width"),
    3: ("depth", "height", "width"),
}


def window_counts(
    name: str, inputs: Sequence[Any], size: Sequence[Any], strides: Sequence[int],
    pad: str | Sequence[tuple[int, int]], dilations: Sequence[int],
) -> list[Any]:  # fmt: skip
    """Return the number of windows along each spatial axis.

    There are `ceil(n / stride)` windows for `"same"`, otherwise as many as fit. Raises ShapeError
    if no window fits.
    """
    if pad == "same":
        return [(n + (s - 1)) // s for n, s in pairs(inputs, strides)]
    padding = [(0, 0)] * len(size) if isinstance(pad, str) else pad
    counts, axes = [], SPATIAL[len(size)]
    along = zip(inputs, size, strides, dilations, padding, axes, strict=True)
    for n, k, s, d, (lo, hi), axis in along:
        count = n + (lo + hi - (k - 1) * d)  # at stride 1
        if type(count) is int and count < 1:
            padded = tuple([m + before + after for m, (before, after) in pairs(inputs, padding)])
            raise ShapeError(
                f"{name}: a window that spans {(k - 1) * d + 1} elements of the {axis} does not "
                f"fit into {n + lo + hi} (the spatial shape is {tuple(inputs)}, with padding "
                f"{padded}). Use a smaller window or dilation, or pad='same'."
            )
        counts.append((count + (s - 1)) // s)
    return counts


def _counts(name: str, x: Sequence[Any], size: Sequence[Any], attrs: Attrs) -> list[Any]:
    dilations = attrs.get("dilations", (1,) * len(size))
    return window_counts(name, x[1:-1], size, attrs["strides"], attrs["pad"], dilations)


# -- convolution -----------------------------------------------------------------------------------


def check_filter(
    name: str, images: Sequence[Any], filter: Sequence[Any], depthwise: bool = False
) -> None:
    """Raise for a filter whose rank or number of channels does not fit the images."""
    n, last = len(images) - 2, "channels, multiplier" if depthwise else "in, out"
    axes = ", ".join(SPATIAL[n])
    if len(filter) != n + 2:
        raise ShapeError(
            f"{name}: the filter must have rank {n + 2}, ({axes}, {last}), got the shape {filter}"
        )
    if differ(images[-1], filter[-2]):
        raise ShapeError(
            f"{name}: the images have {images[-1]} channels (shape {images}, layout batch, {axes}, "
            f"channels), but the filter takes {filter[-2]} (shape {filter}, layout {axes}, {last})"
        )


def _convolved(arguments: Arguments, attrs: Attrs, depthwise: bool) -> Any:
    x, w = arguments[0].shape, arguments[1].shape
    n = len(x) - 2
    name = "depthwise_conv2d" if depthwise else f"conv{n}d"
    check_filter(name, x, w, depthwise)
    counts = _counts(name, x, w[:n], attrs)
    return shorten((x[0], *counts, w[-2] * w[-1] if depthwise else w[-1]))


form("Conv2D", "Conv3D")(partial(_convolved, depthwise=False))
form("DepthwiseConv2dNative")(partial(_convolved, depthwise=True))


def _by_images(arguments: Arguments, attrs: Attrs, depthwise: bool) -> Shape:
    x, w, shape = arguments[0].shape, arguments[1].shape, as_sizes(attrs["shape"])
    if shape is not None and x is not None and w is not None:
        expected = _convolved([Spec(shape, arguments[0].dtype), arguments[1]], attrs, depthwise)
        if unlike(x, expected):
            raise ShapeError(f"x has the shape {x}, expected {expected} for output_shape {shape}")
    return shape


form("Conv2DBackpropInput", "Conv3DBackpropInputV2")(partial(_by_images, depthwise=False))
form("DepthwiseConv2dNativeBackpropInput")(partial(_by_images, depthwise=True))


# -- pools, dilation -------------------------------------------------------------------------------


def check_pool_padding(name: str, size: Sequence[int], padding: Sequence[tuple[int, int]]) -> None:
    """Raise for a padding that contains a whole window."""
    for k, (lo, hi) in pairs(size, padding):
        if max(lo, hi) >= k:
            raise ShapeError(
                f"{name}: a padding of {max(lo, hi)} is as wide as the window ({k}), so a window "
                "would lie entirely in the padding. Use a smaller pad."
            )


def _pooled(arguments: Arguments, attrs: Attrs, name: str) -> Shape:
    shape, size = arguments[0].shape, attrs["filter_size"]
    counts = _counts(name, shape, size, attrs)
    if not isinstance(attrs["pad"], str):
        check_pool_padding(name, size, attrs["pad"])
    return shorten((shape[0], *counts, shape[-1]))


form("AvgPool", "AvgPool3D")(partial(_pooled, name="avg_pool"))
form("MaxPool", "MaxPool3D")(partial(_pooled, name="max_pool"))
form("MaxPoolGradGrad", dtype=second_dtype)(partial(_pooled, name="max_pool"))


def check_dilation(x: Sequence[Any], w: Sequence[Any]) -> None:
    """Raise for a dilation filter that does not fit the images."""
    if len(w) != 3 or differ(x[-1], w[-1]):
        raise ShapeError(
            f"dilation2d: the filter must have the shape (height, width, {x[-1]}) for images of "
            f"shape {x} (batch, height, width, channels), got {w}"
        )


@form("Dilation2D")
@form("Dilation2DArgmax", dtype=np.dtype(np.int16))
def _dilation(arguments: Arguments, attrs: Attrs) -> Shape:
    x, w = arguments[0].shape, arguments[1].shape
    check_dilation(x, w)
    return shorten((x[0], *_counts("dilation2d", x, w[:2], attrs), x[-1]))


@form("TapGather")
def _taps(arguments: Arguments, attrs: Attrs) -> Shape:
    x = arguments[0].shape
    return shorten((x[0], *_counts("tap_gather", x, attrs["size"], attrs), x[-1]))


# -- resizing, blocks ------------------------------------------------------------------------------


@form("ResizeBilinear", "ResizeNearestNeighbor")
def _resize(arguments: Arguments, attrs: Attrs) -> Shape:
    shape, size = arguments[0].shape, as_sizes(attrs["size"])
    return None if shape is None or size is None else (shape[0], *size, *shape[1 + len(size) :])


def cells_of(
    sizes: Sequence[Any], blocks: Sequence[int], paddings: Sequence[tuple[int, int]]
) -> list[Any]:
    """Return the number of blocks along each axis. They must divide the padded size."""
    padded = [size + (lo + hi) for size, (lo, hi) in pairs(sizes, paddings)]
    for size, block in pairs(padded, blocks):
        if type(size) is int and size % block:
            raise ShapeError(
                f"space_to_batch: the block {block} does not divide the padded size {size} "
                f"(spatial shape {tuple(sizes)} with paddings {paddings}, blocks {blocks})"
            )
    return [size // block for size, block in pairs(padded, blocks)]


@form("SpaceToBatchND")
def _space_to_batch(arguments: Arguments, attrs: Attrs) -> Shape:
    batch, *sizes = arguments[0].shape
    blocks = attrs["block_shape"]
    n = len(blocks)
    cells = cells_of(sizes[:n], blocks, attrs["paddings"])
    return shorten((batch * math.prod(blocks), *cells, *sizes[n:]))


def cropped_sizes(
    batch: Any, sizes: Sequence[Any], blocks: Sequence[int], crops: Sequence[tuple[int, int]]
) -> list[Any]:
    """Return the sizes after blocks from the batch have filled the axes and crops are removed."""
    if type(batch) is int and batch % (count := math.prod(blocks)):
        raise ShapeError(
            f"batch_to_space: the batch of {batch} is not a multiple of the {count} elements of "
            f"a block of shape {blocks}"
        )
    left = [size - (lo + hi) for size, (lo, hi) in pairs(sizes, crops)]
    if any(type(size) is int and size < 0 for size in left):
        raise ShapeError(f"batch_to_space: crops {crops} are larger than the image {tuple(sizes)}")
    return left


@form("BatchToSpaceND")
def _batch_to_space(arguments: Arguments, attrs: Attrs) -> Shape:
    batch, *cells = arguments[0].shape
    blocks = attrs["block_shape"]
    n = len(blocks)
    sizes = [cell * block for cell, block in pairs(cells[:n], blocks)]
    left = cropped_sizes(batch, sizes, blocks, attrs["crops"])
    return shorten((batch // math.prod(blocks), *left, *cells[n:]))
