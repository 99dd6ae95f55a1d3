"""A charged particle that is steered to hit the origin: derivatives within derivatives."""

from __future__ import annotations

import regrad as rg

from .protocol import Function, function, tensor
from .solver import MODES, Gradient, argmin

DT = 0.1  # the duration of a step
MAX_STEPS = 500  # the bound of a flight; flights during the optimization take 350 to 360 steps


def potential(x: rg.Tensor, charges: rg.Tensor) -> rg.Tensor:
    return (1 / rg.sqrt((x - charges).square().sum(axis=1))).sum()


def miss(gradient: Gradient, w: rg.Tensor, max_steps: int | None) -> rg.Tensor:
    """Return the square of the position at which the particle crosses the x axis (Euler's method).

    Its gradient in reverse mode needs a bound of the number of steps. Forward mode does not.
    """
    x, velocity = rg.tensor([0, 8], dtype="float64"), rg.tensor([0.75, 0], dtype="float64")
    moved = rg.tensor([[0, -1], [0, 0]], dtype="float64")
    charges = rg.tensor([[10, 10], [10, 0]], dtype="float64") + w * moved
    force = gradient(lambda x: -potential(x, charges))

    def above(state: tuple[rg.Tensor, rg.Tensor]) -> rg.Tensor:
        x, velocity = state
        return (x + DT * velocity)[1] > 0

    def step(state: tuple[rg.Tensor, rg.Tensor]) -> tuple[rg.Tensor, rg.Tensor]:
        x, velocity = state
        return x + DT * velocity, velocity + DT * force(x)

    x, velocity = rg.while_loop(above, step, (x, velocity), max_steps=max_steps)
    return (x[0] - x[1] / velocity[1] * velocity[0]).square()


def variant(outer: Gradient, inner: Gradient) -> Function:
    """Return the steering w that minimizes the miss distance of the particle."""

    @function(lambda given: (tensor([given["w"]]),), float)
    @rg.jit
    def steering(w: rg.Tensor) -> rg.Tensor:
        most = MAX_STEPS if outer is rg.grad else None
        return argmin(outer, lambda w: miss(inner, w, most), w)[0]

    return steering


ff, fr, rf, rr = (variant(MODES[outer], MODES[inner]) for outer, inner in ("ff", "fr", "rf", "rr"))
