"""Discrete Fourier transforms: complex to complex, real to half a spectrum, and back.

All are linear. The matrices of the complex transforms are symmetric, so each transform is its own
rule. `RFFT` and `IRFFT` are each other's rules, except for the elements that half a spectrum
leaves out; `HermitianWeights` accounts for those. `ResizeAxis` trims an axis or pads it with zeros,
and is its own adjoint. The public functions are in `regrad.fft`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from regrad.core import backends
from regrad.core.backends import placed_like
from regrad.core.op import TensorLike, op
from regrad.core.registry import gradient
from regrad.core.tensor import Tensor
from regrad.ops.casting import real

# The adjoint has the scale of the transform. This maps it to the name for the opposite direction.
OTHER_WAY = {"backward": "forward", "ortho": "ortho", "forward": "backward"}


@op("ResizeAxis")
def resize_axis(xp, x: TensorLike, /, *, n: int, axis: int) -> Tensor:
    """Resize an axis to n elements: keep the first n, or append zeros."""
    more = n - x.shape[axis]
    if more <= 0:
        return x[(slice(None),) * axis + (slice(0, n),)]
    shape = (*x.shape[:axis], more, *x.shape[axis + 1 :])
    return xp.concat([x, xp.zeros(shape, dtype=x.dtype, **placed_like(x))], axis=axis)


gradient("ResizeAxis")(lambda dy, x_shape, axis: resize_axis(dy, n=x_shape[axis], axis=axis))


@op("FFT")
def fft(xp, x: TensorLike, /, *, axes: Sequence[int], norm: str) -> Tensor:
    """Return the transform of complex numbers along axes."""
    return xp.fft.fftn(x, axes=axes, norm=norm)


gradient("FFT")(lambda dy, axes, norm: fft(dy, axes=axes, norm=norm))


@op("IFFT")
def ifft(xp, x: TensorLike, /, *, axes: Sequence[int], norm: str) -> Tensor:
    """Return the inverse transform of complex numbers along axes."""
    return xp.fft.ifftn(x, axes=axes, norm=norm)


gradient("IFFT")(lambda dy, axes, norm: ifft(dy, axes=axes, norm=norm))


@op("RFFT", holomorphic=False)
def rfft(xp, x: TensorLike, /, *, axis: int, norm: str) -> Tensor:
    """Return the transform of real numbers along an axis, without the redundant half."""
    return xp.fft.rfft(x, axis=axis, norm=norm)


@gradient("RFFT")
def _(dy, x_shape, axis, norm):
    whole = resize_axis(dy, n=x_shape[axis], axis=axis)
    return real(ifft(whole, axes=(axis,), norm=OTHER_WAY[norm]))


@op("IRFFT", holomorphic=False)
def irfft(xp, x: TensorLike, /, *, n: int, axis: int, norm: str) -> Tensor:
    """Return the n real numbers whose `rfft` along an axis is x (`n // 2 + 1` elements)."""
    return xp.fft.irfft(x, n=n, axis=axis, norm=norm)


@gradient("IRFFT")
def _(dy, n, axis, norm):
    return _weigh(rfft(dy, axis=axis, norm=OTHER_WAY[norm]), n=n, axis=axis)


@op("HermitianWeights")
def _weigh(xp, x: TensorLike, /, *, n: int, axis: int) -> Tensor:
    """Multiply each element of x by its number of occurrences in a full spectrum of size n."""
    count = np.full(n // 2 + 1, 2)
    count[0] = 1
    if n % 2 == 0:
        count[-1] = 1
    shape = [1] * x.ndim
    shape[axis] = -1
    wide = backends.numpy_dtype(x.dtype)
    weights = backends.backend_of(x).from_numpy(count.astype(wide).reshape(shape), x)
    return x * weights


gradient("HermitianWeights")(lambda dy, n, axis: _weigh(dy, n=n, axis=axis))
