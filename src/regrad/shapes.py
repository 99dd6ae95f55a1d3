"""Arithmetic of shapes and axes, for kernels and for functions that check arguments."""

from __future__ import annotations

from regrad.errors import ArgumentError, ShapeError

Axis = int | tuple[int, ...] | None
Shape = int | tuple[int, ...]


def as_shape(shape: Shape) -> tuple[int, ...]:
    """A shape from an int or a sequence of ints."""
    if isinstance(shape, int):
        return (shape,)
    return tuple(int(n) for n in shape)


def normalized_axes(axis: Axis, ndim: int, what: str = "axis") -> tuple[int, ...]:
    """The axes as a sorted tuple of non-negative ints; None means all."""
    if axis is None:
        return tuple(range(ndim))
    axes = [normalized_axis(a, ndim, what) for a in (axis if isinstance(axis, tuple | list) else (axis,))]
    if len(set(axes)) < len(axes):
        raise ArgumentError(f"{what} {axis} names an axis twice (the rank is {ndim})")
    return tuple(sorted(axes))


def normalized_axis(axis: int, ndim: int, what: str = "axis") -> int:
    """One axis as a non-negative int."""
    axis = int(axis)
    if not -ndim <= axis < ndim:
        raise ShapeError(f"{what} {axis} is out of range for a Tensor of rank {ndim}")
    return axis % ndim


def reduced_shape(shape: tuple[int, ...], axis: Axis, keepdims: bool) -> tuple[int, ...]:
    """The shape after a reduction over `axis`."""
    axes = normalized_axes(axis, len(shape))
    if keepdims:
        return tuple(1 if i in axes else n for i, n in enumerate(shape))
    return tuple(n for i, n in enumerate(shape) if i not in axes)


def spread_axes(small: tuple[int, ...], large: tuple[int, ...]) -> tuple[int, ...]:
    """The axes of `large` along which `small` is repeated when it is broadcast to it."""
    new = len(large) - len(small)
    stretched = [
        new + i for i, (s, n) in enumerate(zip(small, large[new:], strict=True)) if s == 1 != n
    ]
    return (*range(new), *stretched)
