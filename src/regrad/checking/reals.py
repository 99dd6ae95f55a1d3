"""Arrays of real and complex numbers as vectors of reals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def reals(x: Any) -> np.ndarray:
    """Return an array as a vector of reals; a complex number becomes two reals."""
    x = np.asarray(x)
    wide = np.complex128 if x.dtype.kind == "c" else np.float64
    return np.array(x, dtype=wide).ravel().view(np.float64)


def like(flat: np.ndarray, x: Any) -> np.ndarray:
    """Return a vector of reals as an array with the dtype kind and shape of x."""
    x = np.asarray(x)
    return (flat.view(np.complex128) if x.dtype.kind == "c" else flat).reshape(x.shape)


def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return all arrays in one vector."""
    return np.concatenate([*map(reals, arrays)]) if arrays else np.zeros(0)


def natural(x: np.ndarray, step: float | None) -> np.ndarray:
    """Return the scale of each number: its size; for 0, the smallest other size, or 1.

    Steps that the caller has chosen are absolute.
    """
    if step is not None:
        return np.ones_like(x)
    size = np.where(np.isfinite(x), np.abs(x), 1.0)
    least = min(1.0, size[size > 0].min(initial=1.0))
    return np.where(size > 0, size, least)


def place_of(k: int, x: np.ndarray) -> tuple[int, ...]:
    """Return the place of the k-th real in an array."""
    which = k // 2 if x.dtype.kind == "c" else k
    return tuple(int(n) for n in np.unravel_index(which, x.shape))
