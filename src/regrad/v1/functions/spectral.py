"""Fourier transforms under TensorFlow's names: `tf.fft`, `tf.spectral.rfft`, …

Complex ones take complex tensors (`tf.cast` makes them of real ones), as TensorFlow's do. All are
functions of `regrad.fft`, along the last one, two or three axes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import regrad as rg
from regrad.v1.graph.forms import ANY, COMPLEX, FLOATS, as_sizes, axes_of, define

__all__ = [
    "fft", "fft2d", "fft3d", "fftshift", "ifft", "ifft2d", "ifft3d", "ifftshift", "irfft",
    "irfft2d", "irfft3d", "rfft", "rfft2d", "rfft3d",
]  # fmt: skip

# -- complex to complex ----------------------------------------------------------------------------


def _along(op_type: str, count: int) -> Callable[[rg.Tensor], Any]:
    """An op along the last axes, which needs no rank to be made."""
    function, axes = rg.find_op(op_type).function, tuple(range(-count, 0))
    return lambda x: function(x, axes=axes, norm="backward")


fft = define("tf.fft(input)", "FFT", _along("FFT", 1), COMPLEX,
             "The Fourier transform along the last axis.")  # fmt: skip
ifft = define("tf.ifft(input)", "IFFT", _along("IFFT", 1), COMPLEX,
              "The inverse Fourier transform along the last axis.")  # fmt: skip
fft2d = define("tf.fft2d(input)", "FFT", _along("FFT", 2), COMPLEX,
               "The Fourier transform along the last two axes.", scope="FFT2D")  # fmt: skip
ifft2d = define("tf.ifft2d(input)", "IFFT", _along("IFFT", 2), COMPLEX,
                "The inverse Fourier transform along the last two axes.",
                scope="IFFT2D")  # fmt: skip
fft3d = define("tf.fft3d(input)", "FFT", _along("FFT", 3), COMPLEX,
               "The Fourier transform along the last three axes.", scope="FFT3D")  # fmt: skip
ifft3d = define("tf.ifft3d(input)", "IFFT", _along("IFFT", 3), COMPLEX,
                "The inverse Fourier transform along the last three axes.",
                scope="IFFT3D")  # fmt: skip


# -- real numbers and half a spectrum --------------------------------------------------------------


def _lengths(value: Any) -> Any:
    return None if value is None else as_sizes(value)


def _real(x: rg.Tensor, fft_length: Any, count: int) -> rg.Tensor:
    return rg.fft.rfftn(x, s=fft_length, axes=tuple(range(-count, 0)))


def _inverse(x: rg.Tensor, fft_length: Any, count: int) -> rg.Tensor:
    return rg.fft.irfftn(x, s=fft_length, axes=tuple(range(-count, 0)))


rfft = define(
    "tf.spectral.rfft(input_tensor, fft_length=None)", "RFFT",
    lambda x, fft_length: _real(x, fft_length, 1), FLOATS,
    "The first half of the transform of real numbers; `fft_length` are the sizes that are used.",
    scope="rfft", fft_length=_lengths,
)  # fmt: skip
irfft = define(
    "tf.spectral.irfft(input_tensor, fft_length=None)", "IRFFT",
    lambda x, fft_length: _inverse(x, fft_length, 1), COMPLEX,
    "The inverse of `rfft`; `fft_length` are the sizes of the result.",
    scope="irfft", fft_length=_lengths,
)  # fmt: skip
rfft2d = define(
    "tf.spectral.rfft2d(input_tensor, fft_length=None)", None,
    lambda x, fft_length: _real(x, fft_length, 2), FLOATS,
    "`rfft` along the last axis, after that `fft` along the one before it.", scope="rfft2d",
    fft_length=_lengths,
)  # fmt: skip
irfft2d = define(
    "tf.spectral.irfft2d(input_tensor, fft_length=None)", None,
    lambda x, fft_length: _inverse(x, fft_length, 2), COMPLEX, "The inverse of `rfft2d`.",
    scope="irfft2d", fft_length=_lengths,
)  # fmt: skip
rfft3d = define(
    "tf.spectral.rfft3d(input_tensor, fft_length=None)", None,
    lambda x, fft_length: _real(x, fft_length, 3), FLOATS,
    "`rfft` along the last axis, after that `fft` along the two before it.", scope="rfft3d",
    fft_length=_lengths,
)  # fmt: skip
irfft3d = define(
    "tf.spectral.irfft3d(input_tensor, fft_length=None)", None,
    lambda x, fft_length: _inverse(x, fft_length, 3), COMPLEX, "The inverse of `rfft3d`.",
    scope="irfft3d", fft_length=_lengths,
)  # fmt: skip

# -- shifts ----------------------------------------------------------------------------------------

fftshift = define("tf.signal.fftshift(x, axes=None)", None, rg.fft.fftshift, ANY,
                  scope="fftshift", axes=axes_of)  # fmt: skip
ifftshift = define("tf.signal.ifftshift(x, axes=None)", None, rg.fft.ifftshift, ANY,
                   scope="ifftshift", axes=axes_of)  # fmt: skip
