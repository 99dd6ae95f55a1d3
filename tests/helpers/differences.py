"""Derivatives by differences, of functions of arrays of NumPy."""

from collections.abc import Callable
from typing import Any

import numpy as np


def jacobian(f: Callable[[np.ndarray], Any], x: np.ndarray, step: float = 1e-3) -> np.ndarray:
    """Return all derivatives of f at x, to fourth order in the step: `f(x).shape + x.shape`."""
    columns = []
    for i in range(x.size):
        d = np.zeros_like(x)
        d.flat[i] = step
        near = np.asarray(f(x + d)) - np.asarray(f(x - d))
        far = np.asarray(f(x + 2 * d)) - np.asarray(f(x - 2 * d))
        columns.append((8 * near - far) / (12 * step))
    return np.stack(columns, -1).reshape(*columns[0].shape, *x.shape)


def error(found: Any, expected: np.ndarray) -> float:
    """Return the largest error, relative to the largest entry."""
    return float(np.abs(np.asarray(found) - expected).max() / np.abs(expected).max())
