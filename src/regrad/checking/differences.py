"""Slopes by differences, with an estimate of their own error.

A slope is taken of all outputs of a function at once, along one direction. The function comes as
`f(t)`, a vector of reals for each step t, which is NaN where it has no value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import comb, sqrt
from typing import NamedTuple

import numpy as np

from regrad.checking.reals import like, natural, reals

Curve = Callable[[float], np.ndarray]

EPS = 2.0**-52
FACTOR = 4.0  # from one step of a ladder to the next
SMALLEST = 1e-9
STEP = 1e-3  # of `gradients`, relative to each number
COLUMNS = 4  # how often an extrapolation is extrapolated again, and one


class Slopes(NamedTuple):
    """`best ± error` for each output; and by step, the slopes to both sides and their noise."""

    best: np.ndarray
    error: np.ndarray
    left: np.ndarray
    right: np.ndarray
    noise: np.ndarray


def quick(f: Curve, step: float) -> np.ndarray:
    """The slopes at 0 by a central difference of five points, whose error nobody knows."""
    near, far = f(step) - f(-step), f(2 * step) - f(-2 * step)
    return (8 * near - far) / (12 * step)


def refined(f: Curve, start: float, made_of: np.ndarray | float = 0.0) -> Slopes:
    """The slopes at 0 by steps from `start` down, extrapolated to none.

    Of all that the steps say, what agrees best with its neighbours counts. The disagreement,
    with the noise of f at that step, is the error. `made_of` is the size of what f adds up, if
    it is larger than f.

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
    """The best entry of the extrapolation table of each output, and its error."""
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
    """Return how far the values of smaller steps are from each, more than by their noise.

    (Long steps agree with each other where a function is flat far from here.)
    """
    later = np.arange(len(values))[:, None] < np.arange(len(values))
    gaps = np.abs(values[:, None] - values) - 3 * noise
    return np.where(later[:, :, None] & (gaps > 0), gaps, 0.0).max(axis=1)


def rounding(f: Curve) -> np.ndarray:
    """The rounding noise in each output near 0: what is left of differences of high order.

    What does not change within the rounding of the arguments (a large number that is added and
    taken away again) is asked further out.

    Source: Moré and Wild, "Estimating computational noise" (2011).
    """
    near = _scatter(f, 4 * EPS)
    return near if near.all() else np.where(near > 0, near, _scatter(f, 1e-7))


def _scatter(f: Curve, spacing: float) -> np.ndarray:
    """The size of what changes its sign from point to point, as noise does and a curve does not."""
    values = np.array([f(k * spacing) for k in range(-4, 4)])
    differences = {order: np.diff(values, order, axis=0) for order in (4, 5, 6)}
    sizes = [np.abs(d).max(axis=0) / sqrt(comb(2 * n, n)) for n, d in differences.items()]
    turns = (differences[4][1:] * differences[4][:-1] < 0).any(axis=0)
    return np.where(turns, np.max(sizes, axis=0), 0.0)


# -- gradients by differences alone ----------------------------------------------------------------


def gradients(
    f: Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]], args: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """The gradients of the sum of all outputs, number by number: for small functions.

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
