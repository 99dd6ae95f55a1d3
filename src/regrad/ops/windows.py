"""Windows that slide over the spatial axes: their positions, and reads and sums at them.

Convolution, pooling and dilation share this geometry. Data is NHWC: `(batch, *spatial,
channels)`. A *tap* is one position within the window. Reading a tap returns one element per window.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, reduce
from operator import add
from operator import index as as_int
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from regrad.core.backends import Array, DTypeLike, Namespace, numpy_dtype, placed_like
from regrad.core.dispatch import lift
from regrad.core.tensor import Tensor, TensorLike
from regrad.errors import ArgumentError, ShapeError, kind
from regrad.ops.array import expand_dims, squeeze
from regrad.shapes.images import SPATIAL, check_filter, window_counts

Sizes = tuple[int, ...]
Ints = int | Sequence[int]
Pairs = tuple[tuple[int, int], ...]
Padding = str | int | Sequence[Sequence[int]]
Places = Sequence[tuple[slice, ...]]


# -- arguments of the public functions -----------------------------------------------------------


def spread(value: Ints, n: int, where: str) -> tuple[int, ...]:
    """Return one positive int per spatial axis, from an int or a sequence of ints."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    values = value if isinstance(value, list | tuple) else (value,) * n
    ints = tuple(_int(v, where) for v in values)
    if len(ints) != n or min(ints) < 1:
        raise ArgumentError(f"{where} must be a positive int, or {n} of them, got {value!r}")
    return ints


def _int(value: Any, where: str) -> int:
    if isinstance(value, Tensor | bool) or not hasattr(type(value), "__index__"):
        raise ArgumentError(f"{where} must be plain Python ints, got {kind(value)}: {value!r:.60}")
    return as_int(value)


def as_padding(pad: Any, n: int, where: str) -> str | Pairs:
    """Return `"same"`, `"valid"`, or one pair of ints per spatial axis.

    An int applies to all pairs. Pairs for all axes, as in TensorFlow.js, are also accepted if the
    pairs of batch and channels are zero.
    """
    if isinstance(pad, np.ndarray):
        pad = pad.tolist()
    if isinstance(pad, str) and pad.lower() in ("same", "valid"):
        return pad.lower()
    if isinstance(pad, list | tuple):
        return pairs_of(pad, n, where)
    if isinstance(pad, str) or not hasattr(type(pad), "__index__"):
        raise _unknown_pad(pad, n, where)
    return pairs_of([(pad, pad)] * n, n, where)


def pairs_of(pairs: Any, n: int, where: str) -> Pairs:
    """Return one pair of non-negative ints per spatial axis."""
    items = [p for p in pairs if isinstance(p, list | tuple) and len(p) == 2]
    if len(items) != len(pairs) or len(items) not in (n, n + 2):
        raise _unknown_pad(pairs, n, where)
    found = tuple((_int(lo, where), _int(hi, where)) for lo, hi in items)
    if min(itertools.chain(*found), default=0) < 0:
        raise ArgumentError(f"{where} must not be negative, got {pairs!r}")
    if len(found) == n:
        return found
    if any(found[0]) or any(found[-1]):
        raise ArgumentError(f"{where}: batch and channels cannot be padded, got {pairs!r}")
    return found[1:-1]


def _unknown_pad(pad: Any, n: int, where: str) -> ArgumentError:
    axes = ", ".join(SPATIAL.get(n, ()))
    return ArgumentError(
        f"{where} must be 'same', 'valid', an int, or {n} pairs of ints (before, after) for "
        f"{axes or 'the spatial axes'}; got {pad!r}"
    )


def as_batch(name: str, x: TensorLike, n: int) -> tuple[Tensor, bool]:
    """Return x with a batch axis, and whether the axis was added."""
    x = lift(x)
    if x.ndim == n + 2:
        return x, False
    if x.ndim == n + 1:
        return expand_dims(x, axis=0), True
    axes = ", ".join((*SPATIAL[n], "channels"))
    raise ShapeError(
        f"{name}: x must have rank {n + 2}, (batch, {axes}) (NHWC), or rank {n + 1}, ({axes}); "
        f"got the shape {x.shape}"
    )


def without_batch(y: Tensor, single: bool) -> Tensor:
    """Remove the batch axis from y if `as_batch` added it."""
    return squeeze(y, axis=0) if single else y


def over_windows(
    op: Callable[..., Tensor], name: str, n: int, x: TensorLike, inputs: Sequence[Any],
    strides: Ints, pad: Padding, **sizes: Ints,
) -> Tensor:  # fmt: skip
    """Run an op over the windows of x, from the options of the public function."""
    sizes = {"strides": strides, **sizes}
    options = {key: spread(value, n, f"{name}: {key}") for key, value in sizes.items()}
    pad = as_padding(pad, n, f"{name}: pad")
    x, single = as_batch(name, x, n)
    return without_batch(op(x, *inputs, pad=pad, **options), single)


# -- geometry ------------------------------------------------------------------------------------


class Windows(NamedTuple):
    """The positions of windows: one entry per spatial axis in each field."""

    size: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    padding: Pairs
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def padded(self) -> tuple[int, ...]:
        """The sizes of the spatial axes including padding."""
        return tuple(n + lo + hi for n, (lo, hi) in zip(self.inputs, self.padding, strict=True))

    @property
    def reach(self) -> tuple[int, ...]:
        """The number of elements that a window spans, including dilation."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.size, self.dilations, strict=True))

    def along(self, i: int) -> list[slice]:
        """Return the taps along one spatial axis, as slices of padded data."""
        count, stride, step = self.outputs[i], self.strides[i], self.dilations[i]
        span = (count - 1) * stride + 1 if count else 0
        return [slice(t, t + span, stride) for t in range(0, self.size[i] * step, step)]

    def places(self) -> Places:
        """Return all taps in row-major order, as indices of padded data in NHWC layout."""
        axes = [self.along(i) for i in range(len(self.size))]
        return [(slice(None), *place) for place in itertools.product(*axes)]

    def counts(self, i: int) -> np.ndarray:
        """Return the number of data elements (without padding) of each window along an axis."""
        taps = np.arange(self.size[i]) * self.dilations[i] - self.padding[i][0]
        at = np.arange(self.outputs[i])[:, None] * self.strides[i] + taps
        return ((at >= 0) & (at < self.inputs[i])).sum(axis=1)


@lru_cache(maxsize=1024)
def windows(
    name: str, inputs: tuple[int, ...], size: tuple[int, ...], strides: tuple[int, ...],
    pad: str | Pairs, dilations: tuple[int, ...],
) -> Windows:  # fmt: skip
    """Return the windows of an op, with their padding and number.

    `"same"` makes `ceil(n / stride)` windows and puts the smaller half of the padding first.
    Otherwise there are as many windows as fit. Raises ShapeError if no window fits.
    """
    outputs = tuple(window_counts(name, inputs, size, strides, pad, dilations))
    if pad == "same":
        padding = tuple(
            _halves((o - 1) * s + (k - 1) * d + 1 - n)
            for n, o, s, k, d in zip(inputs, outputs, strides, size, dilations, strict=True)
        )
    else:
        padding = ((0, 0),) * len(size) if isinstance(pad, str) else pad
    return Windows(size, strides, dilations, padding, inputs, outputs)


def _halves(total: int) -> tuple[int, int]:
    total = max(total, 0)
    return total // 2, total - total // 2


# -- reading and adding at taps ------------------------------------------------------------------


def library(xp: Namespace) -> str:
    """Return `"numpy"`, `"jax"` or `"torch"`."""
    return {"numpy": "numpy", "jax.numpy": "jax"}.get(xp.__name__, "torch")


def constant(
    xp: Namespace, values: np.ndarray, like: Array, dtype: DTypeLike | None = None
) -> Array:
    """Return a NumPy array as an array of the library and device of `like`."""
    return xp.asarray(values, dtype=dtype, **placed_like(like))


def pad_spatial(xp: Namespace, x: Array, padding: Pairs, value: float = 0) -> Array:
    """Return x with `value` around its spatial axes."""
    if not any(itertools.chain(*padding)):
        return x
    full = [(0, 0), *padding] + [(0, 0)] * (x.ndim - 1 - len(padding))
    if library(xp) == "jax":
        return xp.pad(x, full, constant_values=value)
    shape = tuple(n + lo + hi for n, (lo, hi) in zip(x.shape, full, strict=True))
    y = xp.full(shape, value, dtype=x.dtype, **placed_like(x))
    y[_inside(x.shape, full)] = x
    return y


def crop_spatial(x: Array, padding: Pairs) -> Any:
    """Return x without its padding: the adjoint of `pad_spatial`."""
    sizes = [n - lo - hi for n, (lo, hi) in zip(x.shape[1:], padding, strict=False)]
    return x[(slice(None), *_inside(sizes, padding))]


def _inside(sizes: Sequence[int], padding: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    return tuple(slice(lo, lo + n) for n, (lo, _) in zip(sizes, padding, strict=True))


def lowest(x: Array) -> float:
    """Return the padding value that is never a maximum."""
    dtype = numpy_dtype(x.dtype)
    if dtype.kind == "b":
        return False
    return np.iinfo(dtype).min if dtype.kind in "iu" else -math.inf


def place_parts(
    xp: Namespace, parts: Iterable[Any], places: Places, shape: tuple[int, ...]
) -> Array:
    """Add the parts at their positions in zeros: the adjoint of reading at the positions."""
    parts = iter(parts)
    if library(xp) == "jax":
        return sum(_spread_out(p, at, shape) for p, at in zip(parts, places, strict=True))
    first = next(parts)
    y = xp.zeros(shape, dtype=first.dtype, **placed_like(first))
    for part, at in zip(itertools.chain([first], parts), places, strict=True):
        y[at] += part
    return y


def _spread_out(part: Array, place: tuple[slice, ...], shape: tuple[int, ...]) -> Any:
    """Place a part in zeros, by XLA's padding between elements (without a scatter)."""
    import jax

    config = []
    whole = (slice(0, None, 1),) * (len(shape) - len(place))
    for n, size, at in zip(shape, part.shape, (*place, *whole), strict=True):
        start, step = at.start or 0, at.step or 1
        config.append((start, n - start - (size - 1) * step - 1, step - 1))
    return jax.lax.pad(part, jax.numpy.zeros((), part.dtype), config)


def axis_places(taps: Sequence[slice], axis: int) -> Places:
    """Return taps along one axis as indices of the whole array."""
    return [((slice(None),) * axis + (tap,)) for tap in taps]


def first_maximum(xp: Namespace, parts: Iterable[Any]) -> tuple[Any, Any]:
    """Return the elementwise maximum of the parts, and the number of the first maximal part.

    NaN is treated as the largest number.
    """
    parts = iter(parts)
    best = next(parts)
    which = xp.zeros_like(best, dtype=xp.int16)
    for i, part in enumerate(parts, 1):
        better = ~(part <= best) & (best == best)
        which = xp.maximum(which, xp.astype(better, xp.int16) * i)
        best = xp.maximum(best, part)
    return best, which


def choose_part(xp: Namespace, which: Any, parts: Iterable[Any]) -> Array:
    """Return at each position the element of the part whose number is `which`."""
    return reduce(add, (_where(xp, which == i, part) for i, part in enumerate(parts)))


def sorted_out(xp: Namespace, which: Any, dy: Array, n: int) -> Iterable[Any]:
    """Yield n parts: `dy` in the part `which`, zero in the others. The adjoint of `choose_part`."""
    return (_where(xp, which == i, dy) for i in range(n))


def _where(xp: Namespace, mask: Array, x: Array) -> Array:
    """Return x where the mask is true, and 0 elsewhere (also for infinite x)."""
    if xp is np and x.dtype.kind == "f" and x.itemsize in (2, 4, 8):
        # np.where branches on each element; for a random mask this is ten times as fast
        bits = np.dtype(f"i{x.itemsize}")
        return (x.view(bits) & -mask.astype(bits)).view(x.dtype)
    return xp.where(mask, x, xp.zeros_like(x))


# -- convolution: geometry -----------------------------------------------------------------------


class ConvolutionPlan(NamedTuple):
    """The data that the three kernels of one convolution share.

    With `groups` > 1 every channel is a separate group, and the filter has the shape
    (*size, 1, channels * multiplier).
    """

    win: Windows
    groups: int
    images: Sizes  # the shapes
    filter: Sizes
    output: Sizes


def plan_of(
    name: str, images: Sequence[int], filter: Sequence[int], strides: Sizes, pad: str | Pairs,
    dilations: Sizes, depthwise: bool = False,
) -> ConvolutionPlan:  # fmt: skip
    """Return the plan of a convolution. Raises ShapeError if filter and images do not fit."""
    images, filter = tuple(images), tuple(filter)
    n = len(images) - 2
    check_filter(name, images, filter, depthwise)
    win = windows(name, images[1:-1], filter[:n], strides, pad, dilations)
    groups = images[-1] if depthwise else 1
    if depthwise:
        filter = (*filter[:n], 1, filter[-2] * filter[-1])
    return ConvolutionPlan(win, groups, images, filter, (images[0], *win.outputs, filter[-1]))


# -- convolution in NumPy: windows as rows of a matrix, multiplied by BLAS ------------------------

BLOCK = 2**22  # bytes per matrix of windows in one product; a larger matrix exceeds the cache
SMALL_BLOCK = 2**20  # the same for kernels without a matrix product


class NumPyKernels:
    """Kernels by im2col, over blocks of images."""

    @staticmethod
    def forward(x: np.ndarray, w: np.ndarray, plan: ConvolutionPlan) -> np.ndarray:
        """Return the convolution."""
        x = repeat_channels(pad_spatial(np, x, plan.win.padding), plan)
        y = np.zeros(plan.output, x.dtype)
        for block in _blocks(plan, x.itemsize):
            out = y[block]
            if plan.groups > 1:
                for place, tap in taps_of(w, plan):
                    out += x[block][place] * tap
            else:
                np.matmul(_columns(x[block], plan.win), as_rows(w), out=as_rows(out))
        return y

    @staticmethod
    def by_images(dy: np.ndarray, w: np.ndarray, plan: ConvolutionPlan) -> np.ndarray:
        """Return the gradient of the images."""
        channels = plan.images[-1] if plan.groups == 1 else plan.filter[-1]
        dx = np.zeros((plan.images[0], *plan.win.padded, channels), dy.dtype)
        for block in _blocks(plan, dy.itemsize):
            part, rows = dy[block], as_rows(dy[block])
            for place, tap in taps_of(w, plan):
                at = dx[block][place]
                at += part * tap if plan.groups > 1 else (rows @ tap.T).reshape(at.shape)
        return summed_copies(crop_spatial(dx, plan.win.padding), plan)

    @staticmethod
    def by_filter(x: np.ndarray, dy: np.ndarray, plan: ConvolutionPlan) -> np.ndarray:
        """Return the gradient of the filter."""
        x = repeat_channels(pad_spatial(np, x, plan.win.padding), plan)
        dw = np.zeros((math.prod(plan.filter[:-1]), plan.filter[-1]), dy.dtype)
        for block in _blocks(plan, dy.itemsize):
            rows = as_rows(dy[block])
            if plan.groups > 1:
                for i, place in enumerate(plan.win.places()):
                    dw[i] += np.einsum("rc,rc->c", as_rows(x[block][place]), rows)
            else:
                dw += _columns(x[block], plan.win).T @ rows
        return dw.reshape(plan.filter)


def repeat_channels(x: Array, plan: ConvolutionPlan) -> Any:
    """Repeat each channel of x once per filter of the channel."""
    multiplier = plan.filter[-1] // plan.groups if plan.groups > 1 else 1
    return x if multiplier == 1 else x.repeat(multiplier, axis=-1)


def summed_copies(x: Array, plan: ConvolutionPlan) -> Any:
    """Sum over the copies of each channel: the adjoint of `repeat_channels`."""
    return x if x.shape == plan.images else x.reshape(*plan.images, -1).sum(axis=-1)


def taps_of(w: Array, plan: ConvolutionPlan) -> Iterable[tuple[tuple[slice, ...], Any]]:
    """Yield the position of each tap with its matrix of weights (depthwise: its row)."""
    last = w.shape[-1:] if plan.groups > 1 else w.shape[-2:]
    return zip(plan.win.places(), w.reshape(-1, *last), strict=True)


def _blocks(plan: ConvolutionPlan, itemsize: int) -> list[slice]:
    """Split the batch into blocks that fit into the cache."""
    each = math.prod(plan.win.outputs) * itemsize
    if plan.groups > 1:
        step = SMALL_BLOCK // (each * plan.filter[-1])
    else:
        step = BLOCK // (each * math.prod(plan.filter[:-1]))
    return [slice(i, i + max(step, 1)) for i in range(0, plan.images[0], max(step, 1))]


def _columns(x: np.ndarray, win: Windows) -> np.ndarray:
    """Return one row per window, with its elements in the order of the filter's elements."""
    n, channels = len(win.size), x.shape[-1]
    batch, *spatial, last = x.strides
    moves = [s * stride for s, stride in zip(spatial, win.strides, strict=True)]
    taps = [s * dilation for s, dilation in zip(spatial, win.dilations, strict=True)]
    shape = (len(x), *win.outputs, *win.size, channels)
    view = as_strided(x, shape, (batch, *moves, *taps, last), writeable=False)
    count, size = math.prod(shape[: n + 1]), math.prod(shape[n + 1 :])
    if channels >= 8:
        return view.reshape(count, size)
    # with few channels, runs to copy are short, so copy along the outputs instead
    axes = (*range(n + 1, 2 * n + 2), *range(n + 1))
    return view.transpose(axes).reshape(size, count).T


def as_rows(y: Array) -> Any:
    """Return y as a matrix whose rows are its last axis."""
    return y.reshape(math.prod(y.shape[:-1]), y.shape[-1])
