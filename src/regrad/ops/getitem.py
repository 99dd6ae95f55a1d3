"""Indexing: `x[...]`, `at_set` and `at_add`, in terms of the ops of slicing and indexing."""

from __future__ import annotations

import builtins
from types import EllipsisType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from regrad.core import dims, dispatch
from regrad.core.backends import is_inexact
from regrad.core.shapes import shifted_shape, window
from regrad.core.tensor import Tensor, TensorLike, wrap
from regrad.errors import ArgumentError, DTypeError, IndexRangeError, ShapeError, kind
from regrad.graph.deferred import deferrable
from regrad.ops.array import broadcast_arrays, broadcast_to, permute_dims, reshape
from regrad.ops.binary import where
from regrad.ops.casting import astype
from regrad.ops.indexing import _scatter_update, gather_nd, scatter_nd, take
from regrad.ops.joining import stack
from regrad.ops.slicing import (
    Basic,
    _check_kind,
    _strided_slice,
    _strided_slice_grad,
    _strided_slice_update,
)

# -- x[...] --------------------------------------------------------------------------------------


class _IndexPlan(NamedTuple):
    """An index in two steps: a basic index, then integer Tensors along some axes of its result."""

    basic: Basic
    trivial: bool  # whether the basic step changes nothing
    arrays: list[Tensor]
    axes: list[int]  # of the basic step's result, one per array
    place: int  # the position of the arrays' common axes in the result


Index: TypeAlias = TensorLike | builtins.slice | EllipsisType | tuple[Any, ...] | None


def _plan_index(index: Index, shape: tuple[int, ...]) -> _IndexPlan:
    """Interpret an index by NumPy's rules."""
    entries = _expand([_entry(e) for e in (index if isinstance(index, tuple) else (index,))], shape)
    some = any(isinstance(e, Tensor) for e in entries)
    basic: list[Any] = []
    arrays: list[Tensor] = []
    axes: list[int] = []
    advanced: list[tuple[int, int]] = []  # (number of the entry, axis of the result)
    axis = out = 0
    for number, e in enumerate(entries):
        if some and isinstance(e, Tensor | int):
            advanced.append((number, out))  # next to arrays, NumPy treats ints as arrays
        if e is None:
            basic.append(None)
            out += 1
        elif isinstance(e, int):
            basic.append(_check_int(e, axis, shape))
            axis += 1
        elif isinstance(e, builtins.slice):
            basic.append(window(e, shape[axis]))
            axis, out = axis + 1, out + 1
        else:
            found = _nonzero_of_mask(e, axis, shape) if e.dtype.kind == "b" else [e]
            taken = _span(e)
            basic += [(0, n, 1) for n in shape[axis : axis + taken]] or [None]
            arrays += found
            axes += range(out, out + len(found))
            axis, out = axis + taken, out + len(found)
    trivial = len(basic) == len(shape) and all(map(_is_whole, basic, shape))
    numbers = [number for number, _ in advanced]
    together = not numbers or numbers[-1] - numbers[0] == len(numbers) - 1
    return _IndexPlan(
        tuple(basic), trivial, arrays, axes, advanced[0][1] if numbers and together else 0
    )


def _is_whole(entry: Any, n: Any) -> bool:
    """Return whether an entry of a basic index selects a whole axis."""
    if type(entry) is not tuple:
        return False
    first, count, step = entry
    whole = count is n or dims.same((count,), (n,))
    return type(first) is int and first == 0 and step == 1 and bool(whole)


def _entry(e: Any) -> Any:
    """Return one entry of an index: an int, a slice, None, `...`, or a Tensor (ints or bools)."""
    if e is None or e is ... or type(e) is int or isinstance(e, builtins.slice):
        return e
    if isinstance(e, int | np.integer) and not isinstance(e, bool):
        return int(e)
    if isinstance(e, str):
        raise ArgumentError(f"x[...]: an index consists of integers, slices and masks, got {e!r}")
    e = dispatch.lift(e, integers=not isinstance(e, float))
    if is_inexact(e.dtype):
        raise DTypeError(
            f"x[...]: an index consists of integers, slices and masks, got {kind(e)}. Convert it "
            "with astype(index, rg.int64)."
        )
    return e


def _span(e: Any) -> int:
    """Return the number of axes that an entry indexes."""
    if e is None:
        return 0
    return e.ndim if isinstance(e, Tensor) and e.dtype.kind == "b" else 1


def _expand(entries: list[Any], shape: tuple[int, ...]) -> list[Any]:
    """Replace `...` and missing trailing entries by full slices."""
    dots = [i for i, e in enumerate(entries) if e is ...]
    missing = len(shape) - sum(_span(e) for e in entries if e is not ...)
    if len(dots) > 1 or missing < 0:
        raise IndexRangeError(
            f"x[...]: too many indices for the shape {shape}"
            if missing < 0
            else "x[...]: an index can contain only one '...'"
        )
    at = dots[0] if dots else len(entries)
    return [*entries[:at], *[builtins.slice(None)] * missing, *entries[at + 1 :]]


def _check_int(i: int, axis: int, shape: tuple[int, ...]) -> int:
    n = shape[axis]
    if isinstance(n, dims.OPEN):  # the kernel checks the range
        return i if i >= 0 else n + i
    if not -n <= i < n:
        raise IndexRangeError(
            f"x[...]: the index {i} is out of range for axis {axis} of the shape {shape}"
        )
    return i % n


def _nonzero_of_mask(mask: Tensor, axis: int, shape: tuple[int, ...]) -> list[Tensor]:
    """Return a mask as one vector of indices per axis. A mask of rank 0 indexes a new axis."""
    sizes = shape[axis : axis + mask.ndim]
    fits = len(sizes) == mask.ndim and all(
        m in (n, 0) for m, n in zip(mask.shape, sizes, strict=True)
    )
    if not fits:  # (the standard allows an empty mask along any axis)
        raise IndexRangeError(
            f"x[...]: a mask of shape {mask.shape} does not fit the axes starting at {axis} of the "
            f"shape {shape}"
        )
    return [wrap(ids) for ids in np.nonzero(np.atleast_1d(_read_known(mask, "a mask in x[...]")))]


def _read_known(x: Tensor, what: str) -> np.ndarray:
    """Return the values of a Tensor, which must be known."""
    try:
        return x.numpy()
    except TypeError as error:  # JAX raises it for a traced array
        raise ArgumentError(
            f"{what} decides the shape of the result, so its values must be known. Under jit they "
            "are not known. Use where(mask, x, 0), which keeps the shape."
        ) from error


@deferrable
def getitem(x: TensorLike, index: Index, /) -> Tensor:
    """Return `x[index]`, by NumPy's rules.

    An index consists of ints, slices (with any step), `None`, `...`, integer arrays, lists or
    Tensors, and boolean masks. Gradients of elements that are selected repeatedly add up. The
    values of a mask must be known; under jit, use `where`.

    Raises IndexError (also a RegradError) for an int out of range, and DTypeError for floats.

    Op types: `StridedSlice` for ints and slices; `GatherV2` for one array, `GatherNd` for more.
    """
    x = dispatch.lift(x)
    plan = _plan_index(index, x.shape)
    y = x if plan.trivial else _strided_slice(x, index=plan.basic)
    if not plan.arrays:
        return y
    if len(plan.arrays) == 1:
        axis, ids = plan.axes[0], plan.arrays[0]
        return _block(take(y, ids, axis=axis), axis, ids.ndim, plan.place)
    ids = _vectors(plan)
    return _block(gather_nd(_leading(y, plan), ids), 0, ids.ndim - 1, plan.place)


def _vectors(plan: _IndexPlan) -> Tensor:
    """Combine the index arrays into index vectors."""
    arrays = [astype(a, np.int64) if a.dtype == np.uint64 else a for a in plan.arrays]
    return stack(broadcast_arrays(*arrays), axis=-1)


def _block(x: Tensor, block: int, count: int, to: int) -> Tensor:
    """Move the `count` axes that start at `block` to position `to`."""
    if block == to or count == 0:
        return x
    return permute_dims(x, shifted_shape(range(x.ndim), block, count, to))


def _leading(x: Tensor, plan: _IndexPlan) -> Tensor:
    """Move the axes that arrays index to the front of the basic step's result."""
    order = _order(x.ndim, plan)
    return x if order == list(range(x.ndim)) else permute_dims(x, tuple(order))


def _in_place(x: Tensor, plan: _IndexPlan) -> Tensor:
    """Move the axes of a result of `_leading` back to their positions."""
    order = _order(x.ndim, plan)
    if order == list(range(x.ndim)):
        return x
    return permute_dims(x, tuple(order.index(i) for i in range(x.ndim)))


def _order(ndim: int, plan: _IndexPlan) -> list[int]:
    return [*plan.axes, *[i for i in range(ndim) if i not in plan.axes]]


# -- x[...] = y ----------------------------------------------------------------------------------


@deferrable
def at_set(x: TensorLike, index: Index, y: TensorLike, /) -> Tensor:
    """Return x with `x[index]` replaced by y: `x[index] = y` as a function.

    Where the index contains a position repeatedly, every library uses the last value, and only
    the last value has a gradient.

    Args:
        index: As in `x[index]`. A mask together with a single number y also works under jit.
        y: The new values, which broadcast to `x[index]`.

    Returns:
        A Tensor of x's shape and dtype.

    Raises:
        IndexRangeError: an int is out of range (on NumPy and PyTorch).
        ShapeError: y does not broadcast to `x[index]`.
        DTypeError: the index has a float dtype.

    Op types: `TensorStridedSliceUpdate` for ints and slices, `TensorScatterUpdate` for arrays,
    `SelectV2` for a mask and a single number. Source: `jax.numpy.ndarray.at`.

    >>> rg.at_set(rg.tensor([1.0, 2.0, 3.0]), [0, 2], 9).print()
    Tensor
        [9, 2, 9]
    """
    x, y = _with_value("at_set", x, y)
    if y.ndim == 0 and (mask := _lone_mask(index, x.shape)) is not None:
        return where(mask, y, x)
    plan = _plan_index(index, x.shape)
    part = x if plan.trivial else _strided_slice(x, index=plan.basic)
    if plan.arrays:
        lines, ids = _leading(part, plan), _vectors(plan)
        updates = _updates("at_set", y, lines.shape, ids, plan)
        part = _in_place(_scatter_update(lines, ids, updates), plan)
    else:
        part = _fit("at_set", y, part.shape)
    return part if plan.trivial else _strided_slice_update(x, part, index=plan.basic)


@deferrable
def at_add(x: TensorLike, index: Index, y: TensorLike, /) -> Tensor:
    """Return x with y added to `x[index]`. Unlike in `x[index] += y`, repeated indices add up.

    Args:
        index: As in `x[index]`.
        y: The values to add, which broadcast to `x[index]`.

    Returns:
        A Tensor of x's shape and dtype.

    Raises:
        IndexRangeError: an int is out of range (on NumPy and PyTorch).
        ShapeError: y does not broadcast to `x[index]`.
        DTypeError: the index has a float dtype.

    A composition of `AddV2` with `StridedSliceGrad` or `ScatterNd`, which scatter y into zeros.
    Source: `jax.numpy.ndarray.at`.

    >>> rg.at_add(rg.tensor([1.0, 2.0, 3.0]), [0, 2, 0], 10).print()
    Tensor
        [21, 2, 13]
    """
    x, y = _with_value("at_add", x, y)
    if y.ndim == 0 and (mask := _lone_mask(index, x.shape)) is not None:
        return where(mask, x + y, x)
    plan = _plan_index(index, x.shape)
    shape = tuple(e[1] if e else 1 for e in plan.basic if not isinstance(e, int))
    if plan.arrays:
        ids = _vectors(plan)
        lines = tuple(shape[i] for i in _order(len(shape), plan))
        updates = _updates("at_add", y, lines, ids, plan)
        y = _in_place(scatter_nd(ids, updates, lines), plan)
    else:
        y = _fit("at_add", y, shape)
    return x + (y if plan.trivial else _strided_slice_grad(y, shape=x.shape, index=plan.basic))


def _with_value(name: str, x: TensorLike, y: TensorLike) -> tuple[Tensor, Tensor]:
    """Return x, and y cast to x's dtype."""
    x = dispatch.lift(x)
    y = y if dispatch.is_plain(y) else dispatch.lift(y)
    _check_kind(name, "y", y, x)
    return x, dispatch.lift_as(y, x.dtype)


def _lone_mask(index: Index, shape: tuple[int, ...]) -> Tensor | None:
    """Return the mask if the index consists only of a mask of x's leading axes, else None."""
    if isinstance(index, tuple | int | builtins.slice) or index is None or index is ...:
        return None
    mask = _entry(index)
    if not isinstance(mask, Tensor) or mask.dtype.kind != "b" or mask.shape != shape[: mask.ndim]:
        return None
    return reshape(mask, (*mask.shape, *[1] * (len(shape) - mask.ndim)))


def _updates(name: str, y: Tensor, lines: tuple[int, ...], ids: Tensor, plan: _IndexPlan) -> Tensor:
    """Broadcast y to `x[index]` and move the arrays' common axes to the front."""
    *batch, depth = ids.shape
    shape = shifted_shape((*batch, *lines[depth:]), 0, len(batch), plan.place)
    return _block(_fit(name, y, shape), plan.place, len(batch), 0)


def _fit(name: str, y: Tensor, shape: tuple[int, ...]) -> Tensor:
    if y.shape == shape:
        return y
    tail = shape[max(len(shape) - y.ndim, 0) :]
    if y.ndim > len(shape) or any(s not in (1, n) for s, n in zip(y.shape, tail, strict=True)):
        raise ShapeError(f"{name}: y has the shape {y.shape}, but x[index] has {shape}")
    return broadcast_to(y, shape)
