"""Arrays of real and complex numbers as vectors of reals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def reals(x: Any) -> np.ndarray:
    """An array as a vector of reals; a complex number makes two."""
    x = np.asarray(x)
    wide = np.complex128 if x.dtype.kind == "c" else np.float64
    return np.array(x, dtype=wide).ravel().view(np.float64)


def like(flat: np.ndarray, x: Any) -> np.ndarray:
    """A vector of reals as an array of the kind and shape of x."""
    x = np.asarray(x)
    return (flat.view(np.complex128) if x.dtype.kind == "c" else flat).reshape(x.shape)


def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """All arrays in one vector."""
    return np.concatenate([*map(reals, arrays)]) if arrays else np.zeros(0)


def natural(x: np.ndarray, step: float | None) -> np.ndarray:
    """The scale of each number: its size; for 0 that of the least other, or 1.

    Steps that the caller has chosen are absolute.
    """
    if step is not None:
        return np.ones_like(x)
    size = np.where(np.isfinite(x), np.abs(x), 1.0)
    least = min(1.0, size[size > 0].min(initial=1.0))
    return np.where(size > 0, size, least)


def place_of(k: int, x: np.ndarray) -> tuple[int, ...]:
    """The place of a real (the k-th) in an array."""
    which = k // 2 if x.dtype.kind == "c" else k
    return tuple(int(n) for n in np.unravel_index(which, x.shape))
