"""Gradient descent with an adaptive step, as the evals `particle` and `saddle` prescribe it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import regrad as rg

from . import forward

Objective = Callable[[rg.Tensor], rg.Tensor]  # a function of a vector
Gradient = Callable[[Objective], Callable[[rg.Tensor], rg.Tensor]]

MODES: dict[str, Gradient] = {"f": forward.jacobian, "r": rg.grad}
SMALL = 1e-5


class State(NamedTuple):
    """The state of the descent."""

    x: rg.Tensor
    value: rg.Tensor
    slope: rg.Tensor
    rate: rg.Tensor
    successes: rg.Tensor  # the number of successes with the current rate


def argmin(gradient: Gradient, f: Objective, start: rg.Tensor) -> rg.Tensor:
    """Return the minimizer of f."""
    slope = gradient(f)

    def going(s: State) -> rg.Tensor:
        steepness = rg.linalg.vector_norm(s.slope)
        return (steepness > SMALL) & ((s.successes == 10) | (s.rate * steepness > SMALL))

    def step(s: State) -> State:
        return rg.cond(s.successes == 10, faster, attempt, s)

    def faster(s: State) -> State:
        return s._replace(rate=2 * s.rate, successes=0 * s.successes)

    def attempt(s: State) -> State:
        x = s.x - s.rate * s.slope
        value = f(x)
        return rg.cond(
            value < s.value,
            lambda: State(x, value, slope(x), s.rate, s.successes + 1),
            lambda: s._replace(rate=s.rate / 2, successes=0 * s.successes),
        )

    rate, none = rg.scalar(SMALL, "float64"), rg.scalar(0, "int32")
    first = State(start, f(start), slope(start), rate, none)
    return rg.while_loop(going, step, first).x


def argmax(gradient: Gradient, f: Objective, start: rg.Tensor) -> rg.Tensor:
    return argmin(gradient, lambda x: -f(x), start)
