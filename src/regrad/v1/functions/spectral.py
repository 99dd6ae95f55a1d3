"""Fourier transforms under TensorFlow's names: `tf.fft`, `tf.spectral.rfft`, …

As in TensorFlow, `tf.fft` and its variants take complex tensors. (`tf.cast` converts real
tensors.) All functions call `regrad.fft`, along the last one, two or three axes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import regrad as rg
from regrad.core.op import TensorLike
from regrad.v1.graph.conversion import as_sizes
from regrad.v1.graph.forms import axes_of
from regrad.v1.graph.kinds import COMPLEX, FLOATS
from regrad.v1.graph.rows import define, row

# -- complex to complex ----------------------------------------------------------------------------


def _along(op_type: str, count: int) -> Callable[[rg.Tensor], Any]:
    """Return a function that makes an op along the last axes, without reading the rank."""
    function, axes = rg.find_op(op_type).function, tuple(range(-count, 0))
    return lambda x: function(x, axes=axes, norm="backward")


def _transform(name: str, op_type: str, count: int) -> Callable[..., Any]:
    """Make the row of a transform along `count` axes. Its example transforms a 1."""
    inverse = "inverse " * (op_type == "IFFT")
    axes = "axis" if count == 1 else f"{('two', 'three')[count - 2]} axes"
    brackets, close = "[" * count, "]" * count
    function, view = _along(op_type, count), f"{op_type}: * | Tcomplex"
    shown = f"{brackets}1 + 0j{close}", f"{brackets}1.+0.j{close}"
    return define(
        f"tf.{name}(input)", view, function, COMPLEX, *shown, scope=name.upper(),
        doc=f"Return the {inverse}Fourier transform along the last {axes}, of the input's shape "
        "and dtype.",
    )  # fmt: skip


fft, ifft = _transform("fft", "FFT", 1), _transform("ifft", "IFFT", 1)
fft2d, ifft2d = _transform("fft2d", "FFT", 2), _transform("ifft2d", "IFFT", 2)
fft3d, ifft3d = _transform("fft3d", "FFT", 3), _transform("ifft3d", "IFFT", 3)


# -- real numbers and half a spectrum --------------------------------------------------------------


def _half(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    axes = tuple(range(-count, 0))
    return lambda x, fft_length: function(x, s=fft_length, axes=axes)


def _lengths(value: TensorLike) -> Any:
    return None if value is None else as_sizes(value)


@row("tf.spectral", "RFFT", _half(rg.fft.rfftn, 1), FLOATS, scope="rfft", fft_length=_lengths)
def rfft(input_tensor, fft_length=None):
    """Return the first half of the Fourier transform of real numbers along the last axis.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.spectral.rfft(rg.asarray([1.0, 2.0]))
    Tensor([ 3.+0.j, -1.+0.j], dtype=complex64)
    """


@row("tf.spectral", "IRFFT", _half(rg.fft.irfftn, 1), COMPLEX, scope="irfft", fft_length=_lengths)
def irfft(input_tensor, fft_length=None):
    """Return the inverse of `rfft`, which is real.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.spectral.irfft(rg.asarray([3.0 + 0j, -1.0]))
    Tensor([1., 2.], dtype=float32)
    """


@row("tf.spectral", None, _half(rg.fft.rfftn, 2), FLOATS, scope="rfft2d", fft_length=_lengths)
def rfft2d(input_tensor, fft_length=None):
    """Return `rfft` along the last axis, then `fft` along the axis before it.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.spectral.rfft2d(rg.asarray([[1.0, 2.0]]))
    Tensor([[ 3.+0.j, -1.+0.j]], dtype=complex64)
    """


@row("tf.spectral", None, _half(rg.fft.irfftn, 2), COMPLEX, scope="irfft2d", fft_length=_lengths)
def irfft2d(input_tensor, fft_length=None):
    """Return the inverse of `rfft2d`.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.spectral.irfft2d(rg.asarray([[3.0 + 0j, -1.0]]))
    Tensor([[1., 2.]], dtype=float32)
    """


@row("tf.spectral", None, _half(rg.fft.rfftn, 3), FLOATS, scope="rfft3d", fft_length=_lengths)
def rfft3d(input_tensor, fft_length=None):
    """Return `rfft` along the last axis, then `fft` along the two axes before it.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.spectral.rfft3d(rg.asarray([[[1.0, 2.0]]]))
    Tensor([[[ 3.+0.j, -1.+0.j]]], dtype=complex64)
    """


@row("tf.spectral", None, _half(rg.fft.irfftn, 3), COMPLEX, scope="irfft3d", fft_length=_lengths)
def irfft3d(input_tensor, fft_length=None):
    """Return the inverse of `rfft3d`.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.spectral.irfft3d(rg.asarray([[[3.0 + 0j, -1.0]]]))
    Tensor([[[1., 2.]]], dtype=float32)
    """


@row("tf.signal", None, rg.fft.fftshift, scope="fftshift", axes=axes_of)
def fftshift(x, axes=None):
    """Return x with frequency 0 shifted to the middle of the axes.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.signal.fftshift(rg.asarray([1, 2, 3]))
    Tensor([3, 1, 2], dtype=int64)
    """


@row("tf.signal", None, rg.fft.ifftshift, scope="ifftshift", axes=axes_of)
def ifftshift(x, axes=None):
    """Return the inverse of `fftshift`.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.signal.ifftshift(rg.asarray([1, 2, 3]))
    Tensor([2, 3, 1], dtype=int64)
    """
