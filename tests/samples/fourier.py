"""Samples of Fourier transforms. References: NumPy's, in double precision."""

from __future__ import annotations

from typing import Any

import numpy as np

import regrad as rg
from tests.samples import sample, spread

REAL = {n: spread(2, n, seed=n) for n in (4, 5)}
COMPLEX = {n: spread(2, n, seed=n) + 1j * spread(2, n, seed=n + 1) for n in (3, 4, 5)}
CUBE = spread(2, 3, 4, seed=2)


def row(name: str, x: np.ndarray, covers: Any, **options: Any) -> Any:
    """One transform of this name, in regrad and in NumPy."""
    said = ", ".join(f"{k}={v}" for k, v in options.items())
    return sample(
        f"{name} of {x.shape} {said}".strip(), lambda x: getattr(rg.fft, name)(x, **options), x,
        covers=covers, reference=lambda x: getattr(np.fft, name)(x, **options),
    )  # fmt: skip


SAMPLES = [
    *[row("fft", COMPLEX[n], "FFT", norm=norm)
      for n, norm in ((4, "backward"), (5, "ortho"), (4, "forward"))],
    *[row("ifft", COMPLEX[n], "IFFT", norm=norm)
      for n, norm in ((5, "backward"), (4, "ortho"), (5, "forward"))],
    *[row("rfft", REAL[n], "RFFT", norm=norm)
      for n in (4, 5) for norm in ("backward", "ortho", "forward")],
    *[row("irfft", COMPLEX[3], "IRFFT", n=n, norm=norm)
      for n in (4, 5) for norm in ("backward", "ortho", "forward")],
    row("fft", COMPLEX[4], ("FFT", "ResizeAxis"), n=3),
    row("fft", COMPLEX[4], ("FFT", "ResizeAxis"), n=6, axis=0),
    row("rfft", REAL[5], ("RFFT", "ResizeAxis"), n=4),
    row("rfft", REAL[5], ("RFFT", "ResizeAxis"), n=7),
    row("irfft", COMPLEX[5], ("IRFFT", "ResizeAxis"), n=5),
    row("irfft", COMPLEX[3], ("IRFFT", "ResizeAxis"), n=7),
    row("irfft", COMPLEX[3], "IRFFT"),
    *[row("hfft", COMPLEX[3], "IRFFT", n=n, norm=norm)
      for n, norm in ((4, "ortho"), (5, "forward"))],
    *[row("ihfft", REAL[n], "RFFT", norm=norm) for n, norm in ((4, "ortho"), (5, "forward"))],
    row("fftn", CUBE + 1j * CUBE[::-1], "FFT", s=(2, 5), axes=(0, 2)),
    row("ifftn", CUBE + 1j * CUBE[::-1], "IFFT", axes=(2, 1), norm="ortho"),
    row("rfftn", CUBE, ("RFFT", "FFT"), axes=(0, 2)),
    row("irfftn", CUBE + 1j * CUBE[::-1], ("IRFFT", "IFFT"), s=(3, 5), axes=(1, 2)),
    sample("weights of half a spectrum", lambda x: rg.find_op("HermitianWeights").function(
               x, n=4, axis=1), COMPLEX[3], covers="HermitianWeights",
           reference=lambda x: x * np.array([1, 2, 1])),
    row("fftshift", CUBE, ()), row("ifftshift", CUBE, (), axes=(1,)),
]  # fmt: skip
