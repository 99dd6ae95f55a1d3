"""Discrete Fourier transforms: the `fft` extension of the Array API standard.

All functions are differentiable, at any order. `norm` selects the direction that has the factor
`1/n`: "backward" (the inverse), "forward", or "ortho" (`1/sqrt(n)` in both). regrad truncates an
axis that is longer than `n`, and pads a shorter axis with zeros. Functions of complex numbers
also accept real numbers. Integers become float32 first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from regrad.core import dispatch
from regrad.core.backends import DTypeLike, is_inexact
from regrad.core.hints import hint_in as _hint_in
from regrad.core.promotion import get_default_dtype
from regrad.core.shapes import Axis, as_count, normalized_axes, normalized_axis
from regrad.core.signatures import answer_in
from regrad.core.tensor import Tensor, TensorLike
from regrad.errors import ArgumentError, DTypeError, InvalidValueError
from regrad.graph.deferred import deferrable
from regrad.ops import fourier
from regrad.ops.array import roll
from regrad.ops.casting import astype, conj
from regrad.ops.creation import as_numpy_dtype, asarray

__all__ = [
    "fft", "fftfreq", "fftn", "fftshift", "hfft", "ifft", "ifftn", "ifftshift", "ihfft", "irfft",
    "irfftn", "rfft", "rfftfreq", "rfftn",
]  # fmt: skip


# -- along one axis ------------------------------------------------------------------------------


@deferrable
def fft(
    x: TensorLike, /, *, n: int | None = None, axis: int = -1, norm: str = "backward"
) -> Tensor:
    """Return the Fourier transform along an axis.

    Args:
        x: The values, complex or real.
        n: The number of elements along the axis; by default x's size.
        axis: The axis.
        norm: "backward" (no factor), "ortho" (`1/sqrt(n)`) or "forward" (`1/n`).

    Returns:
        A complex Tensor of x's shape, with n elements along the axis.

    Raises:
        ArgumentError: `norm` is unknown.
        InvalidValueError: the axis is empty, or `n` is less than 1.

    Op type: `FFT`. Source: the Array API standard.

    >>> rg.real(rg.fft.fft(rg.tensor([1.0, 0.0, 0.0]))).print()
    Tensor
        [1, 1, 1]
    """
    return _complex_along("fft", fourier.fft, x, None if n is None else (n,), (axis,), norm)


@deferrable
def ifft(
    x: TensorLike, /, *, n: int | None = None, axis: int = -1, norm: str = "backward"
) -> Tensor:
    """Return the inverse of `fft`, by default with the factor `1/n`.

    Args:
        x: The values, complex or real.
        n: The number of elements along the axis; by default x's size.
        axis: The axis.
        norm: "backward" (`1/n`), "ortho" (`1/sqrt(n)`) or "forward" (no factor).

    Returns:
        A complex Tensor of x's shape, with n elements along the axis.

    Raises:
        ArgumentError: `norm` is unknown.
        InvalidValueError: the axis is empty, or `n` is less than 1.

    Op type: `IFFT`. Source: the Array API standard.

    >>> rg.real(rg.fft.ifft([2.0, 0.0])).print()
    Tensor
        [1, 1]
    """
    return _complex_along("ifft", fourier.ifft, x, None if n is None else (n,), (axis,), norm)


@deferrable
def rfft(
    x: TensorLike, /, *, n: int | None = None, axis: int = -1, norm: str = "backward"
) -> Tensor:
    """Return the first `n // 2 + 1` elements of the transform of real numbers.

    The other elements mirror these.

    Args:
        x: The values, real.
        n: The number of elements along the axis; by default x's size.
        axis: The axis.
        norm: "backward" (no factor), "ortho" (`1/sqrt(n)`) or "forward" (`1/n`).

    Returns:
        A complex Tensor of x's shape, with `n // 2 + 1` elements along the axis.

    Raises:
        ArgumentError: `norm` is unknown.
        InvalidValueError: the axis is empty, or `n` is less than 1.
        DTypeError: x is complex.

    Op type: `RFFT`. Source: the Array API standard.

    >>> rg.fft.rfft(rg.ones((4,))).shape
    (3,)
    """
    x, axis = _as_real("rfft", x), normalized_axis(axis, dispatch.lift(x).ndim)
    return fourier.rfft(_resized("rfft", x, n, axis), axis=axis, norm=_check("rfft", norm))


@deferrable
def irfft(
    x: TensorLike, /, *, n: int | None = None, axis: int = -1, norm: str = "backward"
) -> Tensor:
    """Return the n real numbers whose `rfft` is x.

    Imaginary parts of elements that are real in every such spectrum are ignored.

    Args:
        x: The values, complex or real.
        n: The number of elements along the axis; by default `2 * (m - 1)` for x's size m.
        axis: The axis.
        norm: "backward" (`1/n`), "ortho" (`1/sqrt(n)`) or "forward" (no factor).

    Returns:
        A real Tensor of x's shape, with n elements along the axis.

    Raises:
        ArgumentError: `norm` is unknown.
        InvalidValueError: the axis is empty, or `n` is less than 1.

    Op type: `IRFFT`. Source: the Array API standard.

    >>> rg.fft.irfft([4.0, 0.0, 0.0]).print()
    Tensor
        [1, 1, 1, 1]
    """
    x = _as_complex(x)
    axis = normalized_axis(axis, x.ndim)
    count = _size("irfft", 2 * (x.shape[axis] - 1) if n is None else n)
    x = _resized("irfft", x, count // 2 + 1, axis)
    return fourier.irfft(x, n=count, axis=axis, norm=_check("irfft", norm))


@deferrable
def hfft(
    x: TensorLike, /, *, n: int | None = None, axis: int = -1, norm: str = "backward"
) -> Tensor:
    """Return the real spectrum of a Hermitian signal whose first half is x.

    Args:
        x: The values, complex or real.
        n: The number of elements along the axis; by default `2 * (m - 1)` for x's size m.
        axis: The axis.
        norm: "backward" (no factor), "ortho" (`1/sqrt(n)`) or "forward" (`1/n`).

    Returns:
        A real Tensor of x's shape, with n elements along the axis.

    Raises:
        ArgumentError: `norm` is unknown.
        InvalidValueError: the axis is empty, or `n` is less than 1.

    A composition of `IRFFT` and `Conj`. Source: the Array API standard.

    >>> rg.fft.hfft([1.0, 0.0, 0.0]).print()
    Tensor
        [1, 1, 1, 1]
    """
    turned = fourier.OTHER_WAY[_check("hfft", norm)]
    return irfft(conj(_as_complex(x)), n=n, axis=axis, norm=turned)


@deferrable
def ihfft(
    x: TensorLike, /, *, n: int | None = None, axis: int = -1, norm: str = "backward"
) -> Tensor:
    """Return the first half of the Hermitian signal whose spectrum is x: the inverse of `hfft`.

    Args:
        x: The values, real.
        n: The number of elements along the axis; by default x's size.
        axis: The axis.
        norm: "backward" (`1/n`), "ortho" (`1/sqrt(n)`) or "forward" (no factor).

    Returns:
        A complex Tensor of x's shape, with `n // 2 + 1` elements along the axis.

    Raises:
        ArgumentError: `norm` is unknown.
        InvalidValueError: the axis is empty, or `n` is less than 1.
        DTypeError: x is complex.

    A composition of `RFFT` and `Conj`. Source: the Array API standard.

    >>> rg.fft.ihfft(rg.ones((4,))).shape
    (3,)
    """
    return conj(rfft(x, n=n, axis=axis, norm=fourier.OTHER_WAY[_check("ihfft", norm)]))


# -- along several axes --------------------------------------------------------------------------


@deferrable
def fftn(
    x: TensorLike,
    /,
    *,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: str = "backward",
) -> Tensor:
    """Return the transform along several axes.

    Args:
        x: The values, complex or real.
        s: The number of elements along each of the axes; by default x's sizes.
        axes: The axes; by default the last `len(s)` axes, or all axes.
        norm: As for `fft`, where n is the total number of elements.

    Returns:
        A complex Tensor of x's shape, with the sizes s along the axes.

    Raises:
        ArgumentError: `norm` is unknown, or axes and sizes do not fit.
        InvalidValueError: an axis is empty, or a size is less than 1.

    Op type: `FFT`. Source: the Array API standard.

    >>> rg.fft.fftn(rg.ones((2, 3))).shape
    (2, 3)
    """
    return _complex_along("fftn", fourier.fft, x, s, axes, norm)


@deferrable
def ifftn(
    x: TensorLike,
    /,
    *,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: str = "backward",
) -> Tensor:
    """Return the inverse of `fftn`.

    Args:
        x: The values, complex or real.
        s: The number of elements along each of the axes; by default x's sizes.
        axes: The axes; by default the last `len(s)` axes, or all axes.
        norm: As for `ifft`, where n is the total number of elements.

    Returns:
        A complex Tensor of x's shape, with the sizes s along the axes.

    Raises:
        ArgumentError: `norm` is unknown, or axes and sizes do not fit.
        InvalidValueError: an axis is empty, or a size is less than 1.

    Op type: `IFFT`. Source: the Array API standard.

    >>> rg.fft.ifftn(rg.ones((2, 3))).shape
    (2, 3)
    """
    return _complex_along("ifftn", fourier.ifft, x, s, axes, norm)


@deferrable
def rfftn(
    x: TensorLike,
    /,
    *,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: str = "backward",
) -> Tensor:
    """Return the transform of real numbers along several axes.

    The last axis is transformed by `rfft`, and the other axes by `fft`.

    Args:
        x: The values, real.
        s: The number of elements along each of the axes; by default x's sizes.
        axes: The axes; by default the last `len(s)` axes, or all axes.
        norm: As for `fft`, where n is the total number of elements.

    Returns:
        A complex Tensor of x's shape, with the sizes s along the axes, but `s[-1] // 2 + 1` along
        the last axis.

    Raises:
        ArgumentError: `norm` is unknown, or axes and sizes do not fit.
        InvalidValueError: an axis is empty, or a size is less than 1.
        DTypeError: x is complex.

    A composition of `RFFT` and `FFT`. Source: the Array API standard.

    >>> rg.fft.rfftn(rg.ones((2, 4))).shape
    (2, 3)
    """
    x, axes = _resized_all("rfftn", _as_real("rfftn", x), s, axes)
    half = fourier.rfft(x, axis=axes[-1], norm=_check("rfftn", norm))
    return fourier.fft(half, axes=axes[:-1], norm=norm) if axes[:-1] else half


@deferrable
def irfftn(
    x: TensorLike,
    /,
    *,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: str = "backward",
) -> Tensor:
    """Return the inverse of `rfftn`.

    Args:
        x: The values, complex or real.
        s: The number of elements along each of the axes; by default x's sizes. The last size is
            the n of `irfft`.
        axes: The axes; by default the last `len(s)` axes, or all axes.
        norm: As for `ifft`, where n is the total number of elements.

    Returns:
        A real Tensor of x's shape, with the sizes s along the axes.

    Raises:
        ArgumentError: `norm` is unknown, or axes and sizes do not fit.
        InvalidValueError: an axis is empty, or a size is less than 1.

    A composition of `IFFT` and `IRFFT`. Source: the Array API standard.

    >>> rg.fft.irfftn(rg.ones((2, 3))).shape
    (2, 4)
    """
    x = _as_complex(x)
    axes = _axes("irfftn", x, s, axes)
    sizes = [x.shape[axis] for axis in axes] if s is None else list(s)
    n = _size("irfftn", 2 * (sizes[-1] - 1) if s is None else sizes[-1])
    x, _ = _resized_all("irfftn", x, [*sizes[:-1], n // 2 + 1], axes)
    whole = fourier.ifft(x, axes=axes[:-1], norm=_check("irfftn", norm)) if axes[:-1] else x
    return fourier.irfft(whole, n=n, axis=axes[-1], norm=_check("irfftn", norm))


# -- frequencies and shifts ----------------------------------------------------------------------


def fftfreq(
    n: int, /, *, d: float = 1.0, dtype: DTypeLike | None = None, device: Any = None
) -> Tensor:
    """Return the frequencies of the elements of `fft`.

    Args:
        n: The number of samples.
        d: The distance between samples.
        dtype: The dtype of the result; the default dtype by default.
        device: The device of the result: "cpu" (NumPy data), or a device of JAX or PyTorch.

    Returns:
        A Tensor of shape `(n,)`.

    Raises:
        ArgumentError: `n` is not an int.
        InvalidValueError: `n` is less than 1.

    Source: the Array API standard.

    >>> import regrad as rg
    >>> rg.fft.fftfreq(4).tolist()
    [0.0, 0.25, -0.5, -0.25]
    """
    return asarray(np.fft.fftfreq(_size("fftfreq", n), d), dtype=_float(dtype), device=device)


def rfftfreq(
    n: int, /, *, d: float = 1.0, dtype: DTypeLike | None = None, device: Any = None
) -> Tensor:
    """Return the frequencies of the elements of `rfft`.

    Args:
        n: The number of samples.
        d: The distance between samples.
        dtype: The dtype of the result; the default dtype by default.
        device: The device of the result: "cpu" (NumPy data), or a device of JAX or PyTorch.

    Returns:
        A Tensor of shape `(n // 2 + 1,)`.

    Raises:
        ArgumentError: `n` is not an int.
        InvalidValueError: `n` is less than 1.

    Source: the Array API standard.

    >>> import regrad as rg
    >>> rg.fft.rfftfreq(4).tolist()
    [0.0, 0.25, 0.5]
    """
    return asarray(np.fft.rfftfreq(_size("rfftfreq", n), d), dtype=_float(dtype), device=device)


@deferrable
def fftshift(x: TensorLike, /, *, axes: Axis = None) -> Tensor:
    """Return x with the frequency 0 moved to the middle of the axes.

    Args:
        axes: The axis or axes. By default, all axes.

    Returns:
        A Tensor of x's shape and dtype.

    Raises:
        AxisError: x has no such axis.

    Op type: `Roll`. Source: the Array API standard.

    >>> rg.fft.fftshift([0.0, 1.0, -2.0, -1.0]).print()
    Tensor
        [-2, -1, 0, 1]
    """
    return _rolled(x, axes, lambda size: size // 2)


@deferrable
def ifftshift(x: TensorLike, /, *, axes: Axis = None) -> Tensor:
    """Return x with the shift of `fftshift` reversed.

    Args:
        axes: The axis or axes. By default, all axes.

    Returns:
        A Tensor of x's shape and dtype.

    Raises:
        AxisError: x has no such axis.

    Op type: `Roll`. Source: the Array API standard.

    >>> rg.fft.ifftshift([-2.0, -1.0, 0.0, 1.0]).print()
    Tensor
        [0, 1, -2, -1]
    """
    return _rolled(x, axes, lambda size: -(size // 2))


def _rolled(x: TensorLike, axes: Axis, shift: Callable[[Any], Any]) -> Tensor:
    x = dispatch.lift(x)
    places = normalized_axes(axes, x.ndim)
    return roll(x, tuple(shift(x.shape[axis]) for axis in places), axis=places)


# -- arguments -----------------------------------------------------------------------------------


def _complex_along(name: str, op: Any, x: TensorLike, s: Any, axes: Any, norm: str) -> Tensor:
    x, axes = _resized_all(name, _as_complex(x), s, axes)
    return op(x, axes=axes, norm=_check(name, norm))


def _check(name: str, norm: str) -> str:
    if norm not in fourier.OTHER_WAY:
        expected = ", ".join(map(repr, fourier.OTHER_WAY))
        raise ArgumentError(f"{name}: expected one of {expected} for 'norm', got {norm!r}")
    return norm


def _as_complex(x: TensorLike) -> Tensor:
    x = dispatch.lift(x)
    if x.dtype.kind == "c":
        return x
    return astype(x, "complex128" if x.dtype == np.float64 else "complex64")


def _as_real(name: str, x: TensorLike) -> Tensor:
    x = dispatch.lift(x)
    if x.dtype.kind == "c":
        raise DTypeError(f"{name}: expected real numbers, got {x.dtype}; use fft, or real(x)")
    single = not is_inexact(x.dtype) or x.dtype.itemsize < 4
    return astype(x, "float32") if single else x


def _size(name: str, n: Any) -> Any:
    if isinstance(n, int | np.integer) and n < 1:
        raise InvalidValueError(f"{name}: expected 1 element or more along the axis, got {n}")
    return as_count(n, "n")


def _resized(name: str, x: Tensor, n: Any, axis: int) -> Tensor:
    n = _size(name, x.shape[axis] if n is None else n)
    return x if n is x.shape[axis] or n == x.shape[axis] else fourier.resize_axis(x, n=n, axis=axis)


def _axes(name: str, x: Tensor, s: Any, axes: Any) -> tuple[int, ...]:
    if axes is None:
        axes = range(x.ndim) if s is None else range(-len(s), 0)
    found = tuple(normalized_axis(axis, x.ndim) for axis in axes)
    if not found or len(set(found)) < len(found) or (s is not None and len(s) != len(found)):
        raise ArgumentError(
            f"{name}: expected one or more distinct axes, and one size in 's' for each, got "
            f"axes={tuple(axes)} and s={s!r}"
        )
    return found


def _resized_all(name: str, x: Tensor, s: Any, axes: Any) -> tuple[Tensor, tuple[int, ...]]:
    axes = _axes(name, x, s, axes)
    for i, axis in enumerate(axes):
        x = _resized(name, x, None if s is None else s[i], axis)
    return x, axes


def _float(dtype: DTypeLike | None) -> np.dtype:
    return get_default_dtype() if dtype is None else as_numpy_dtype(dtype)


answer_in(sys.modules[__name__])
_hint_in(__name__)
