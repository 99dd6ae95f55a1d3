"""Gradients by differences alone, number by number: for small functions, to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from regrad.checking.differences import quick
from regrad.checking.reals import like, natural, reals

STEP = 1e-3  # relative to each number


def gradients(
    f: Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]], args: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """The gradients of the sum of all outputs, by central differences of five points.

    Args:
        f: A function of arrays of float64 or complex128.
        args: Where it is differentiated. For complex numbers, the direction of steepest ascent.
    """
    found = []
    for i, x in enumerate(args):
        flat = reals(x)
        scale = natural(flat, None)
        slopes = np.zeros_like(flat)
        for k in range(flat.size):

            def along(t: float, i: int = i, k: int = k) -> np.ndarray:
                moved = reals(args[i])
                moved[k] += t * natural(moved, None)[k]
                ys = f([*args[:i], like(moved, args[i]), *args[i + 1 :]])
                return np.array([sum(float(np.sum(np.real(y))) for y in ys)])

            slopes[k] = quick(along, STEP)[0] / scale[k]
        found.append(like(slopes, x))
    return found
