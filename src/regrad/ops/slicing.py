"""Slices and padding: ops that read or write blocks.

The ops come in adjoint pairs, and each is the other's rule: StridedSlice/StridedSliceGrad,
Slice/PadV2, MirrorPad/MirrorPadGrad.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from regrad.core import dims, dispatch, numbers
from regrad.core.backends import Array, Namespace, placed_like
from regrad.core.op import TensorLike, op
from regrad.core.registry import gradient
from regrad.core.shapes import Window, as_ints, as_shape, as_slice, ascending, flipped
from regrad.core.tensor import Tensor
from regrad.errors import ArgumentError, DTypeError, IndexRangeError, ShapeError
from regrad.graph.deferred import deferrable
from regrad.ops.creation_like import fitting, zeros_like
from regrad.ops.rows import _add_rows, _is_jax, _put

# -- slices --------------------------------------------------------------------------------------
# Basic indexing is two ops with one attribute. The attribute has an entry per axis: an int, None
# (a new axis) or a window (first, count, step).

Basic = tuple[int | Window | None, ...]


def _windows(index: Basic) -> list[Window]:
    """Return one window per axis of x. An int selects one element."""
    return [(e, 1, 1) if isinstance(e, int) else e for e in index if e is not None]


def _embed(
    xp: Namespace, x: Array, shape: Sequence[int], windows: Sequence[Window], value: complex = 0
) -> Array:
    """Fill an array with one value, except for ascending windows, which hold x."""
    if _is_jax(xp) and math.prod(x.shape):
        from jax import lax

        spare = [
            (first, n - 1 - first - (count - 1) * step, step - 1)
            for n, (first, count, step) in zip(shape, windows, strict=True)
        ]
        return lax.pad(x, xp.asarray(value, dtype=x.dtype), spare)
    y = xp.full(tuple(shape), value, dtype=x.dtype, **placed_like(x))
    if math.prod(x.shape):
        y[tuple(as_slice(w) for w in windows)] = x
    return y


@op("StridedSlice")
def _strided_slice(xp, x: TensorLike, /, *, index: Basic) -> Tensor:
    entries = [as_slice(ascending(e)) if isinstance(e, tuple) else e for e in index]
    y = x[tuple(entries)]
    back = flipped([e or (0, 1, 1) for e in index if not isinstance(e, int)])
    return xp.flip(y, axis=back) if back else y


@gradient("StridedSlice")
def _(dy, x_shape, index):
    return _strided_slice_grad(dy, shape=x_shape, index=index)


@op("StridedSliceGrad")
def _strided_slice_grad(xp, x: TensorLike, /, *, shape: tuple[int, ...], index: Basic) -> Tensor:
    windows = _windows(index)
    return _embed(xp, _ascend(xp, x, windows), shape, [ascending(w) for w in windows])


def _ascend(xp: Namespace, x: Array, windows: list[Window]) -> Array:
    """Return the values for windows in ascending order, with one axis per window."""
    x = xp.reshape(x, tuple(count for _, count, _ in windows))
    back = flipped(windows)
    return xp.flip(x, axis=back) if back else x


gradient("StridedSliceGrad")(lambda dy, index: _strided_slice(dy, index=index))


@op("TensorStridedSliceUpdate")
def _strided_slice_update(xp, x: TensorLike, updates: TensorLike, /, *, index: Basic) -> Tensor:
    windows = _windows(index)
    updates = _ascend(xp, updates, windows)
    if updates.shape == x.shape:
        # The windows cover all of x. JAX would scatter at an empty index, which XLA compiles to
        # a `map`. XLA 0.10 aborts if the map is reversed ("Invalid binary instruction opcode map").
        return updates
    place = tuple(as_slice(ascending(w)) for w in windows)
    return _put(xp, x, place, updates)


@gradient("TensorStridedSliceUpdate", "x")
def _(dy, index):
    return _strided_slice_update(dy, zeros_like(_strided_slice(dy, index=index)), index=index)


gradient("TensorStridedSliceUpdate", "updates")(lambda dy, index: _strided_slice(dy, index=index))


@op("Slice")
def _slice(xp, x: TensorLike, /, *, begin: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
    return x[tuple(builtins.slice(b, b + n) for b, n in zip(begin, size, strict=True))]


@gradient("Slice")
def _(dy, x_shape, begin, size):
    spare = [(b, n - b - s) for b, s, n in zip(begin, size, x_shape, strict=True)]
    return _pad(dy, paddings=tuple(spare), constant_value=0)


@deferrable
def slice(
    x: TensorLike, begin: int | Sequence[int], size: int | Sequence[int] | None = None
) -> Tensor:
    """Return a block of x.

    Args:
        begin: The first index along each axis, one int or ints, for the leading axes of x.
        size: The shape of the block; -1 means to the end of the axis, which is also the default.

    Returns:
        A Tensor of x's dtype and of the shape `size`. The remaining axes stay whole.

    Raises:
        IndexRangeError: the block does not lie within x.
        ShapeError: `begin` or `size` has more entries than x has axes.

    Op type: `Slice`. Source: `tf.slice`.

    >>> rg.slice(rg.tensor([1.0, 2.0, 3.0, 4.0]), [1], [-1]).print()
    Tensor
        [2, 3, 4]
    """
    x = dispatch.lift(x)
    begin = as_ints(begin, "begin")
    size = (-1,) * len(begin) if size is None else as_ints(size, "size")
    more = x.ndim - len(begin)
    if len(begin) != len(size) or more < 0:
        raise ShapeError(
            f"slice: begin and size must have one entry per axis of {x.shape}, got {begin} and "
            f"{size}"
        )
    begin = (*begin, *[0] * more)
    size = tuple(
        n - b if s == -1 else s
        for b, s, n in zip(begin, (*size, *[-1] * more), x.shape, strict=True)
    )
    if any(b < 0 or s < 0 or b + s > n for b, s, n in zip(begin, size, x.shape, strict=True)):
        raise IndexRangeError(f"slice: the block from {begin} of size {size} exceeds {x.shape}")
    return _slice(x, begin=begin, size=size)


# -- padding -------------------------------------------------------------------------------------

Paddings = tuple[tuple[int, int], ...]
MirrorMode = Literal["reflect", "symmetric", "edge"]


@op("PadV2")
def _pad(xp, x: TensorLike, /, *, paddings: Paddings, constant_value: complex) -> Tensor:
    shape = as_shape([a + n + b for (a, b), n in zip(paddings, x.shape, strict=True)])
    windows = [(a, n, 1) for (a, _), n in zip(paddings, x.shape, strict=True)]
    return _embed(xp, x, shape, windows, constant_value)


@gradient("PadV2")
def _(dy, x_shape, paddings):
    return _slice(dy, begin=tuple(a for a, _ in paddings), size=x_shape)


@op("MirrorPad")
def _mirror_pad(xp, x: TensorLike, /, *, paddings: Paddings, mode: MirrorMode) -> Tensor:
    for axis, pair in enumerate(paddings):
        if any(pair):
            x = xp.take(x, _mirror(xp, x.shape[axis], pair, mode, x), axis=axis)
    return x


def _mirror(xp: Namespace, n: int, pair: tuple[int, int], mode: MirrorMode, like: Array) -> Array:
    """Return for each element of the padded axis the index of the element that it repeats."""
    ids = np.pad(np.arange(n), pair, mode=mode)
    return xp.asarray(ids, **placed_like(like))


@gradient("MirrorPad")
def _(dy, x_shape, paddings, mode):
    return _mirror_pad_grad(dy, shape=x_shape, paddings=paddings, mode=mode)


@op("MirrorPadGrad")
def _mirror_pad_grad(
    xp, x: TensorLike, /, *, shape: tuple[int, ...], paddings: Paddings, mode: MirrorMode
) -> Tensor:
    for axis, (n, pair) in enumerate(zip(shape, paddings, strict=True)):
        if any(pair):
            ids = _mirror(xp, n, pair, mode, x)
            x = xp.moveaxis(x, axis, 0)
            rest = tuple(x.shape[1:])
            y = _add_rows(xp, n, ids, xp.reshape(x, (x.shape[0], math.prod(rest))))
            x = xp.moveaxis(xp.reshape(y, (n, *rest)), 0, axis)
    return x


gradient("MirrorPadGrad")(lambda dy, paddings, mode: _mirror_pad(dy, paddings=paddings, mode=mode))


@deferrable
def pad(
    x: TensorLike,
    paddings: int | Sequence[tuple[int, int]],
    mode: str = "constant",
    constant_value: complex = 0,
) -> Tensor:
    """Return x padded at the ends of its axes.

    Args:
        paddings: A pair `(before, after)` for each axis, or one int for all ends.
        mode: "constant" (`constant_value`), "reflect" (mirrored without the edge), "symmetric"
            (mirrored with the edge) or "edge" (the edge repeated). Gradients of repeated elements
            add to the gradients of their originals.
        constant_value: The number for the mode "constant".

    Returns:
        A Tensor of x's dtype.

    Raises:
        ArgumentError: `mode` is unknown, or `paddings` are not one pair of non-negative ints per
            axis.

    Op types: `PadV2`, and `MirrorPad` for the other modes. Source: `tf.pad`, `numpy.pad`.

    >>> rg.pad(rg.tensor([1.0, 2.0, 3.0]), [(2, 1)], "reflect").print()
    Tensor
        [3, 2, 1, 2, 3, 2]
    """
    x = dispatch.lift(x)
    unranked = isinstance(x._data.shape, dims.UnknownRank)
    rank = len(paddings) if unranked and not isinstance(paddings, int) else x.ndim
    pairs = _pairs(paddings, rank)
    if mode not in ("constant", "reflect", "symmetric", "edge"):
        raise ArgumentError(
            f"pad: mode must be 'constant', 'reflect', 'symmetric' or 'edge', got {mode!r}"
        )
    if mode == "constant":
        _check_kind("pad", "constant_value", constant_value, x)
        return _pad(x, paddings=pairs, constant_value=fitting(constant_value, x.dtype))
    sizes = () if unranked else x.shape
    if any(any(pair) and dims.same((n,), (0,)) for n, pair in zip(sizes, pairs, strict=False)):
        raise ShapeError(f"pad: an empty axis of {x.shape} has no elements to repeat ({mode})")
    return _mirror_pad(x, paddings=pairs, mode=mode)


def _pairs(paddings: Any, ndim: int) -> Paddings:
    if isinstance(paddings, int):
        paddings = [(paddings, paddings)] * ndim
    pairs = [as_ints(pair, "paddings") for pair in paddings if isinstance(pair, tuple | list)]
    wrong = [p for p in pairs if len(p) != 2 or any(isinstance(n, int) and n < 0 for n in p)]
    if wrong or len(pairs) != ndim or len(paddings) != ndim:
        raise ArgumentError(
            f"pad: paddings must be one pair (before, after) of 0 or more per axis ({ndim}), got "
            f"{paddings!r:.80}"
        )
    return tuple((before, after) for before, after in pairs)


def _check_kind(name: str, what: str, value: Any, x: Tensor) -> None:
    """Raise for values that x's dtype cannot represent, such as 1.5 for integers."""
    found = value if isinstance(value, Tensor) else numbers.listed(value)
    dtype = np.dtype(int) if found.dtype.kind == "O" else found.dtype
    whole = dtype.kind in "iu" and found is not value  # Python ints, which fit any dtype
    if found.size and not np.can_cast(np.uint8 if whole else dtype, x.dtype, "same_kind"):
        raise DTypeError(
            f"{name}: {what} is {dtype}, but x is {x.dtype}, which cannot hold it. Convert x first "
            f"with astype(x, rg.{dtype})."
        )
