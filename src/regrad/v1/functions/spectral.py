"""Fourier transforms under TensorFlow's names: `tf.fft`, `tf.spectral.rfft`, …

Complex ones take complex tensors (`tf.cast` makes them of real ones), as TensorFlow's do. All are
functions of `regrad.fft`, along the last one, two or three axes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import regrad as rg
from regrad.v1.graph.forms import as_sizes, axes_of
from regrad.v1.graph.kinds import ANY, COMPLEX, FLOATS
from regrad.v1.graph.rows import define

__all__ = [
    "fft", "fft2d", "fft3d", "fftshift", "ifft", "ifft2d", "ifft3d", "ifftshift", "irfft",
    "irfft2d", "irfft3d", "rfft", "rfft2d", "rfft3d",
]  # fmt: skip

# -- complex to complex ----------------------------------------------------------------------------


def _along(op_type: str, count: int) -> Callable[[rg.Tensor], Any]:
    """An op along the last axes, which needs no rank to be made."""
    function, axes = rg.find_op(op_type).function, tuple(range(-count, 0))
    return lambda x: function(x, axes=axes, norm="backward")


def _transform(name: str, op_type: str, count: int) -> Callable[..., Any]:
    """Make the row of a transform along so many axes; the transform of a 1 is shown."""
    inverse = "inverse " * (op_type == "IFFT")
    axes = "axis" if count == 1 else f"{('two', 'three')[count - 2]} axes"
    brackets, close = "[" * count, "]" * count
    return define(
        f"tf.{name}(input)", op_type, _along(op_type, count), COMPLEX, f"{brackets}1 + 0j{close}",
        f"{brackets}1.+0.j{close}",
        doc=f"Return the {inverse}Fourier transform along the last {axes}, of the input's shape "
        "and dtype.",
        scope=name.upper(),
    )  # fmt: skip


fft, ifft = _transform("fft", "FFT", 1), _transform("ifft", "IFFT", 1)
fft2d, ifft2d = _transform("fft2d", "FFT", 2), _transform("ifft2d", "IFFT", 2)
fft3d, ifft3d = _transform("fft3d", "FFT", 3), _transform("ifft3d", "IFFT", 3)


# -- real numbers and half a spectrum --------------------------------------------------------------


def _lengths(value: Any) -> Any:
    return None if value is None else as_sizes(value)


def _real(x: rg.Tensor, fft_length: Any, count: int) -> rg.Tensor:
    return rg.fft.rfftn(x, s=fft_length, axes=tuple(range(-count, 0)))


def _inverse(x: rg.Tensor, fft_length: Any, count: int) -> rg.Tensor:
    return rg.fft.irfftn(x, s=fft_length, axes=tuple(range(-count, 0)))


rfft = define(
    "tf.spectral.rfft(input_tensor, fft_length=None)", "RFFT",
    lambda x, fft_length: _real(x, fft_length, 1), FLOATS, "[1.0, 2.0]", "[ 3.+0.j, -1.+0.j]",
    doc="Return the first half of the Fourier transform of real numbers along the last axis.",
    scope="rfft", fft_length=_lengths,
)  # fmt: skip
irfft = define(
    "tf.spectral.irfft(input_tensor, fft_length=None)", "IRFFT",
    lambda x, fft_length: _inverse(x, fft_length, 1), COMPLEX, "[3.0 + 0j, -1.0]", "[1., 2.]",
    doc="Return the inverse of `rfft`: real numbers.", scope="irfft", fft_length=_lengths,
)  # fmt: skip
rfft2d = define(
    "tf.spectral.rfft2d(input_tensor, fft_length=None)", None,
    lambda x, fft_length: _real(x, fft_length, 2), FLOATS, "[[1.0, 2.0]]", "[[ 3.+0.j, -1.+0.j]]",
    doc="Return `rfft` along the last axis, after that `fft` along the one before it.",
    scope="rfft2d", fft_length=_lengths,
)  # fmt: skip
irfft2d = define(
    "tf.spectral.irfft2d(input_tensor, fft_length=None)", None,
    lambda x, fft_length: _inverse(x, fft_length, 2), COMPLEX, "[[3.0 + 0j, -1.0]]", "[[1., 2.]]",
    doc="Return the inverse of `rfft2d`.", scope="irfft2d", fft_length=_lengths,
)  # fmt: skip
rfft3d = define(
    "tf.spectral.rfft3d(input_tensor, fft_length=None)", None,
    lambda x, fft_length: _real(x, fft_length, 3), FLOATS, "[[[1.0, 2.0]]]",
    "[[[ 3.+0.j, -1.+0.j]]]",
    doc="Return `rfft` along the last axis, after that `fft` along the two before it.",
    scope="rfft3d", fft_length=_lengths,
)  # fmt: skip
irfft3d = define(
    "tf.spectral.irfft3d(input_tensor, fft_length=None)", None,
    lambda x, fft_length: _inverse(x, fft_length, 3), COMPLEX, "[[[3.0 + 0j, -1.0]]]",
    "[[[1., 2.]]]", doc="Return the inverse of `rfft3d`.", scope="irfft3d", fft_length=_lengths,
)  # fmt: skip

# -- shifts ----------------------------------------------------------------------------------------

fftshift = define(
    "tf.signal.fftshift(x, axes=None)", None, rg.fft.fftshift, ANY, "[1, 2, 3]", "[3, 1, 2]",
    scope="fftshift", axes=axes_of,
)  # fmt: skip
ifftshift = define(
    "tf.signal.ifftshift(x, axes=None)", None, rg.fft.ifftshift, ANY, "[1, 2, 3]", "[2, 3, 1]",
    scope="ifftshift", axes=axes_of,
)  # fmt: skip
