"""Forms of ops on images: convolutions, pools, resizing, blocks. Data is NHWC."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from regrad.errors import ShapeError
from regrad.shapes.sizes import Shape, as_sizes, differ, pairs, shorten, unlike
from regrad.shapes.table import Arguments, Attrs, Spec, form, second_dtype


def _windows(
    inputs: Sequence[Any], size: Sequence[Any], attrs: Attrs, dilations: Sequence[int] | None = None
) -> list[Any]:
    """Return how many windows there are along each spatial axis."""
    pad, strides = attrs["pad"], attrs["strides"]
    if pad == "same":
        return [(n + (s - 1)) // s for n, s in pairs(inputs, strides)]
    padding = [(0, 0)] * len(size) if isinstance(pad, str) else pad
    counts, dilations = [], dilations or [1] * len(size)
    for n, k, s, d, (lo, hi) in zip(inputs, size, strides, dilations, padding, strict=True):
        count = n + (lo + hi - (k - 1) * d)  # at stride 1
        if type(count) is int and count < 1:
            raise ShapeError(
                f"a window of shape {tuple(size)} does not fit into the spatial shape "
                f"{tuple(inputs)} with padding {pad!r}. Use a smaller window or dilation, or "
                "pad='same'."
            )
        counts.append((count + (s - 1)) // s)
    return counts


# -- convolution -----------------------------------------------------------------------------------


def _convolved(arguments: Arguments, attrs: Attrs, depthwise: bool) -> Any:
    x, w = arguments[0].shape, arguments[1].shape
    n = len(x) - 2
    if len(w) != n + 2:
        raise ShapeError(f"the filter must have rank {n + 2} for images of shape {x}, got {w}")
    if differ(x[-1], w[-2]):
        raise ShapeError(
            f"the images have {x[-1]} channels (shape {x}), and the filter takes {w[-2]} (shape "
            f"{w})"
        )
    counts = _windows(x[1:-1], w[:n], attrs, attrs["dilations"])
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


@form("AvgPool", "AvgPool3D", "MaxPool", "MaxPool3D")
@form("MaxPoolGradGrad", dtype=second_dtype)
def _pooling(arguments: Arguments, attrs: Attrs) -> Shape:
    shape, size = arguments[0].shape, attrs["filter_size"]
    counts = _windows(shape[1:-1], size, attrs)
    if not isinstance(attrs["pad"], str):
        for k, (lo, hi) in pairs(size, attrs["pad"]):
            if max(lo, hi) >= k:
                raise ShapeError(
                    f"a padding of {max(lo, hi)} is as wide as the window ({k}), so a window "
                    "would lie in the padding alone. Use a smaller pad."
                )
    return shorten((shape[0], *counts, shape[-1]))


@form("Dilation2D")
@form("Dilation2DArgmax", dtype=np.dtype(np.int16))
def _dilation(arguments: Arguments, attrs: Attrs) -> Shape:
    x, w = arguments[0].shape, arguments[1].shape
    if len(w) != 3 or differ(x[-1], w[-1]):
        raise ShapeError(
            f"dilation2d: the filter must have the shape (height, width, {x[-1]}) for images of "
            f"shape {x} (batch, height, width, channels), got {w}"
        )
    return shorten((x[0], *_windows(x[1:3], w[:2], attrs, attrs["dilations"]), x[-1]))


@form("TapGather")
def _taps(arguments: Arguments, attrs: Attrs) -> Shape:
    x = arguments[0].shape
    return shorten((x[0], *_windows(x[1:3], attrs["size"], attrs, attrs["dilations"]), x[-1]))


# -- resizing, blocks ------------------------------------------------------------------------------


@form("ResizeBilinear", "ResizeNearestNeighbor")
def _resize(arguments: Arguments, attrs: Attrs) -> Shape:
    shape, size = arguments[0].shape, as_sizes(attrs["size"])
    return None if shape is None or size is None else (shape[0], *size, *shape[1 + len(size) :])


@form("SpaceToBatchND")
def _space_to_batch(arguments: Arguments, attrs: Attrs) -> Shape:
    batch, *sizes = arguments[0].shape
    blocks = attrs["block_shape"]
    n = len(blocks)
    padded = [size + (lo + hi) for size, (lo, hi) in pairs(sizes[:n], attrs["paddings"])]
    if any(type(size) is int and size % block for size, block in pairs(padded, blocks)):
        raise ShapeError(
            f"space_to_batch: the blocks {blocks} do not divide the padded sizes {tuple(padded)}"
        )
    cells = [size // block for size, block in pairs(padded, blocks)]
    return shorten((batch * math.prod(blocks), *cells, *sizes[n:]))


@form("BatchToSpaceND")
def _batch_to_space(arguments: Arguments, attrs: Attrs) -> Shape:
    batch, *cells = arguments[0].shape
    blocks, crops = attrs["block_shape"], attrs["crops"]
    n, count = len(blocks), math.prod(blocks)
    sizes = [cell * block for cell, block in pairs(cells[:n], blocks)]
    left = [size - (lo + hi) for size, (lo, hi) in pairs(sizes, crops)]
    if type(batch) is int and batch % count:
        raise ShapeError(
            f"batch_to_space: the batch of {batch} is not a multiple of the {count} elements of "
            f"a block of shape {blocks}"
        )
    if any(type(size) is int and size < 0 for size in left):
        raise ShapeError(f"batch_to_space: crops {crops} are larger than the image {tuple(sizes)}")
    return shorten((batch // count, *left, *cells[n:]))
