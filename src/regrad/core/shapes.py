"""Arithmetic of shapes and axes, for kernels and for functions that check arguments."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from operator import index
from typing import Any

import numpy as np

from regrad.core import dims
from regrad.core.dims import Dim
from regrad.core.signatures import public
from regrad.errors import (
    ArgumentError,
    AxisError,
    InvalidValueError,
    RegradError,
    ShapeError,
    UnknownShapeError,
    brief,
)

Axis = int | tuple[int, ...] | None
Shape = int | tuple[int, ...]


LARGEST = 2**48  # the most elements of a Tensor: XLA ends the process at sizes beyond 64 bits


INTS = frozenset({int})


def as_ints(values: int | Sequence[int], what: str = "a shape") -> tuple[Any, ...]:
    """Return integers (or sizes of a graph) from one integer or a sequence."""
    if type(values) is tuple and INTS.issuperset(map(type, values)):
        return values
    # a Tensor or an array of rank 0 is one integer
    alone = isinstance(values, (int, *dims.OPEN)) or getattr(values, "ndim", 1) == 0
    try:
        given: Any = (values,) if alone else values
        return tuple([n if isinstance(n, dims.OPEN) else index(n) for n in given])
    except RegradError:  # a traced number has its own message
        raise
    except Exception:  # usually a TypeError, but NumPy's MaskError is a plain Exception
        raise ArgumentError(
            f"expected {what}, an integer or a sequence of integers, got {brief(values)}"
        ) from None


def as_shape(shape: int | Sequence[int], *, rest: bool = False) -> tuple[int, ...]:
    """Return a shape from an int or a sequence. With `rest` one size may be -1, to be inferred."""
    if type(shape) is int and 0 <= shape <= LARGEST:  # the most frequent case
        return (shape,)
    if isinstance(shape, dims.UnknownRank):
        return shape  # pyright: ignore[reportReturnType]
    sizes = as_ints(shape)
    if not _is_possible(sizes, -rest):
        raise ShapeError(
            f"a Tensor cannot have the shape {brief(sizes)}: expected sizes of 0 or more, and at "
            "most 2**48 elements"
        )
    return sizes


def _is_possible(sizes: Sequence[Dim | int], least: int) -> bool:
    """Return whether a Tensor could have these sizes, as far as they are known."""
    elements = 1
    for n in sizes:
        if isinstance(n, int):
            if n < least:
                return False
            elements *= n
    return elements <= LARGEST


def as_count(n: Any, what: str) -> Any:
    """Return a count of things to create: 0 or more."""
    if isinstance(n, dims.OPEN):
        return n
    try:
        count = index(n)
    except RegradError:
        raise
    except TypeError:
        raise ArgumentError(f"expected an integer for {what}, got {brief(n)}") from None
    if not 0 <= count <= LARGEST:
        raise InvalidValueError(f"{what} must lie between 0 and 2**48, got {brief(n)}")
    return count


def normalized_axes(axis: Axis, ndim: int, what: str = "axis") -> tuple[int, ...]:
    """Return the axes as a sorted tuple of non-negative ints; None means all."""
    if axis is None:
        return tuple(range(ndim))
    given = axis if isinstance(axis, tuple | list) else (axis,)
    axes = [normalized_axis(a, ndim, what) for a in given]
    if len(set(axes)) < len(axes):
        raise ArgumentError(f"{what} {axis} names an axis twice (the rank is {ndim})")
    return tuple(sorted(axes))


def normalized_axis(axis: int, ndim: int, what: str = "axis") -> int:
    """Return one axis as a non-negative int."""
    try:
        axis = int(axis)
    except RegradError:
        raise
    except (TypeError, ValueError):
        raise ArgumentError(f"expected an integer for {what}, got {axis!r}") from None
    if not -ndim <= axis < ndim:
        raise AxisError(f"{what} {axis} is out of range for a Tensor of rank {ndim}")
    return axis % ndim


def spread_axes(small: tuple[int, ...], large: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes of `large` along which broadcasting repeats `small`."""
    new = len(large) - len(small)
    stretched = [
        new + i for i, (s, n) in enumerate(zip(small, large[new:], strict=True)) if s == 1 != n
    ]
    return (*range(new), *stretched)


@public
def broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape to which tensors of these shapes broadcast together.

    Args:
        shapes: Shapes, tuples of ints.

    Raises:
        ShapeError: they do not broadcast.

    >>> import regrad as rg
    >>> rg.broadcast_shapes((3, 1), (4,))
    (3, 4)
    """
    try:
        if all(map(dims.is_known, shapes)):
            return np.broadcast_shapes(*shapes)
        from_the_end = zip_longest(*[shape[::-1] for shape in shapes], fillvalue=1)
        return tuple(reversed([_common_size(sizes) for sizes in from_the_end]))
    except UnknownShapeError:
        raise
    except ValueError:
        raise ShapeError(
            f"the shapes {' and '.join(map(str, shapes))} cannot be broadcast together"
        ) from None


def _common_size(sizes: Sequence[Dim | int]) -> Any:
    """Return the size to which sizes broadcast; UnknownShapeError if only the run can decide."""
    found: Any = 1
    for n in sizes:
        if isinstance(n, int) and n == 1:
            continue
        if (isinstance(found, int) and found == 1) or found == n:  # (a Dim may raise here)
            found = n
        else:
            raise ValueError
    return found


def part_sizes(sections_or_sizes: int | tuple[int, ...] | list[int], n: int) -> tuple[int, ...]:
    """Return the sizes of the parts of an axis of size n."""
    if not isinstance(sections_or_sizes, tuple | list):
        count = index(sections_or_sizes)
        if count > 0 and isinstance(n, dims.OPEN):
            return (n // count,) * count  # the kernel checks that they fill the axis
        if count < 1 or n % count:
            raise ShapeError(f"split: an axis of size {n} cannot be cut into {count} equal parts")
        return (n // count,) * count
    sizes = [s if isinstance(s, dims.OPEN) else index(s) for s in sections_or_sizes]
    if any(isinstance(s, dims.OPEN) for s in (*sizes, n)):
        rest = [i for i, s in enumerate(sizes) if isinstance(s, int) and s == -1]
        for i in rest[:1]:
            sizes[i] = n - sum(s for k, s in enumerate(sizes) if k != i)
        return tuple(sizes)  # the kernel checks that they fill the axis
    if sizes.count(-1) == 1:
        sizes[sizes.index(-1)] = n - sum(sizes) - 1
    if not sizes or min(sizes) < 0 or sum(sizes) != n:
        raise ShapeError(
            f"split: the sizes {list(sections_or_sizes)} do not add up to the axis' size {n}"
        )
    return tuple(sizes)


def shifted_shape(shape: Sequence[int], block: int, count: int, to: int) -> tuple[int, ...]:
    """Return `shape` with the `count` entries from `block` on moved to `to`."""
    rest = [*shape[:block], *shape[block + count :]]
    return (*rest[:to], *shape[block : block + count], *rest[to:])


# -- windows: the elements of an axis that a slice selects ---------------------------------------
# (first, count, step). Unlike a slice, a window is hashable, does not depend on a length,
# and has the number of selected elements.

Window = tuple[int, int, int]


def window(entry: slice, length: int) -> Window:
    """Return the window that a slice selects of an axis of this length."""
    if entry.start is None is entry.stop and entry.step is None:
        return 0, length, 1
    if entry.step is not None and index(entry.step) == 0:
        raise ArgumentError(f"the step of the slice {entry} is 0")
    if any(isinstance(n, dims.OPEN) for n in (length, entry.start, entry.stop)):
        if any(isinstance(n, dims.Dim) for n in (length, entry.start, entry.stop)):
            return _window_in_run(entry, length)
        return _symbolic_window(entry, length)
    first, stop, step = entry.indices(length)
    count = len(range(first, stop, step))
    return (first, count, step) if count else (0, 0, 1)


def _symbolic_window(entry: slice, length: Any) -> Any:
    """Return the window for another library's symbolic sizes, as `slice.indices` computes it.

    The library raises where a comparison has no answer for all sizes.
    """
    step = 1 if entry.step is None else index(entry.step)
    least, most = (0, length) if step > 0 else (-1, length - 1)

    def bound(at: Any, default: Any) -> Any:
        if at is None:
            return default
        at = at + length if at < 0 else at
        return least if at < least else most if at > most else at

    first = bound(entry.start, least if step > 0 else most)
    stop = bound(entry.stop, most if step > 0 else least)
    count = (stop - first + step - (1 if step > 0 else -1)) // step
    return (first, count, step) if count >= 0 else (0, 0, 1)


def _window_in_run(entry: slice, length: Dim | int) -> Any:
    """Return the window where the length of the axis, or a bound, is known only in the run."""
    step = 1 if entry.step is None else index(entry.step)
    given = {"start": entry.start, "stop": entry.stop, "length": length}
    open_ends = {name: value for name, value in given.items() if isinstance(value, dims.Dim)}

    def part(which: int) -> dims.Dim:
        def compute(*values: int) -> int:
            known = {**given, **dict(zip(open_ends, values, strict=True))}
            return window(slice(known["start"], known["stop"], step), known["length"])[which]

        key = ("window", which, step, *[getattr(value, "key", value) for value in given.values()])
        return dims.Dim(compute, tuple(open_ends.values()), key)

    return part(0), part(1), step


def ascending(entry: Window) -> Window:
    """Return the window of the same elements, first to last."""
    first, count, step = entry
    return entry if step > 0 else (first + (count - 1) * step, count, -step)


def as_slice(entry: Window) -> slice:
    """Return an ascending window as a slice."""
    first, count, step = entry
    return slice(first, first + count * step, step)


def flipped(windows: Sequence[Window]) -> tuple[int, ...]:
    """Return the axes along which windows run backwards."""
    return tuple(i for i, (_, _, step) in enumerate(windows) if step < 0)
