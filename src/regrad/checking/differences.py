"""Slopes by finite differences, with an estimate of their own error.

A slope is computed for all outputs of a function at once, along one direction. The function is
passed as `f(t)`, a vector of reals for each step t, which is NaN where it has no value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import comb, sqrt
from typing import NamedTuple

import numpy as np

from regrad.checking.reals import like, natural, reals

Curve = Callable[[float], np.ndarray]

EPS = 2.0**-52
FACTOR = 4.0  # ratio of successive steps
SMALLEST = 1e-9
STEP = 1e-3  # step of `gradients`, relative to each number
COLUMNS = 4  # number of columns of the extrapolation table


class Slopes(NamedTuple):
    """`best ± error` for each output; and, by step, the one-sided slopes and their noise."""

    best: np.ndarray
    error: np.ndarray
    left: np.ndarray
    right: np.ndarray
    noise: np.ndarray


def quick(f: Curve, step: float) -> np.ndarray:
    """Return the slopes at 0 by a central difference of five points, without an error estimate."""
    near, far = f(step) - f(-step), f(2 * step) - f(-2 * step)
    return (8 * near - far) / (12 * step)


def refined(f: Curve, start: float, made_of: np.ndarray | float = 0.0) -> Slopes:
    """Return the slopes at 0 by steps from `start` down, extrapolated to a step of 0.

    The result is the extrapolated value that agrees best with its neighbors. The disagreement, plus
    the noise of f at that step, is the error. `made_of` is the size of the terms that f sums, if it
    is larger than f.

    Source: Ridders, "Accurate computation of F'(x) and F'(x)F''(x)" (1982).
    """
    y = f(0.0)
    count = max(int(np.ceil(np.log(start / SMALLEST) / np.log(FACTOR))), COLUMNS + 1)
    steps = (start / FACTOR ** np.arange(count))[:, None]
    plus = np.array([f(t) for t in steps[:, 0]])
    minus = np.array([f(-t) for t in steps[:, 0]])
    central = (plus - minus) / (2 * steps)
    size = np.maximum.reduce([np.abs(plus), np.abs(minus), np.abs(central), made_of + 0 * plus])
    noise = 2 * (EPS * size + rounding(f)) / steps
    best, error = extrapolated(central, noise)
    return Slopes(best, error, (y - minus) / steps, (plus - y) / steps, noise)


def extrapolated(central: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the best entry of the extrapolation table of each output, and its error."""
    values, errors = [], []
    column = central
    for m in range(1, COLUMNS):
        better = column[1:] + (column[1:] - column[:-1]) / (FACTOR ** (2 * m) - 1)
        doubt = np.maximum(np.abs(better - column[1:]), np.abs(better - column[:-1]))
        values.append(better)
        errors.append(np.maximum(doubt, contradiction(better, noise[m:])) + noise[m:])
        column = better
    table, doubts = np.concatenate(values), np.concatenate(errors)
    doubts = np.where(np.isnan(doubts), np.inf, doubts)
    chosen = doubts.argmin(axis=0)[None]
    return np.take_along_axis(table, chosen, 0)[0], np.take_along_axis(doubts, chosen, 0)[0]


def contradiction(values: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Return how far each value is from the values of smaller steps, beyond their noise.

    (Long steps agree with each other if a function is flat far from this point.)
    """
    later = np.arange(len(values))[:, None] < np.arange(len(values))
    gaps = np.abs(values[:, None] - values) - 3 * noise
    return np.where(later[:, :, None] & (gaps > 0), gaps, 0.0).max(axis=1)


def rounding(f: Curve) -> np.ndarray:
    """Return the rounding noise in each output near 0: the residue of high-order differences.

    Outputs that do not change within the rounding of the arguments (a large number that is added
    and subtracted again) are sampled with a larger spacing.

    Source: Moré and Wild, "Estimating computational noise" (2011).
    """
    near = _scatter(f, 4 * EPS)
    return near if near.all() else np.where(near > 0, near, _scatter(f, 1e-7))


def _scatter(f: Curve, spacing: float) -> np.ndarray:
    """Return the size of alternating changes from point to point; only noise alternates."""
    values = np.array([f(k * spacing) for k in range(-4, 4)])
    differences = {order: np.diff(values, order, axis=0) for order in (4, 5, 6)}
    sizes = [np.abs(d).max(axis=0) / sqrt(comb(2 * n, n)) for n, d in differences.items()]
    turns = (differences[4][1:] * differences[4][:-1] < 0).any(axis=0)
    return np.where(turns, np.max(sizes, axis=0), 0.0)


# -- gradients by differences alone ----------------------------------------------------------------


def gradients(
    f: Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]], args: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Return the gradients of the sum of all outputs, number by number: for small functions.

    Args:
        f: A function of arrays of float64 or complex128.
        args: The point. For complex numbers, the result is the direction of steepest ascent.
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
