"""An ordinary differential equation, solved by a Runge-Kutta method."""

from __future__ import annotations

from typing import Any

import regrad as rg

from .protocol import function, tensor


def solution(x: rg.Tensor, steps: int) -> rg.Tensor:
    h = 2 / steps
    first = rg.ones(1, dtype=rg.float64)

    def rate(y: rg.Tensor) -> rg.Tensor:
        return x * rg.concat([first, y[:-1]])

    def step(y: rg.Tensor, _: None) -> tuple[rg.Tensor, None]:
        k1 = rate(y)
        k2 = rate(y + h / 2 * k1)
        k3 = rate(y + h / 2 * k2)
        k4 = rate(y + h * k3)
        return y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None

    # (Computing a step again takes less time than storing everything that its gradient needs.)
    y, _ = rg.scan(step, rg.zeros_like(x), length=steps, checkpoint=True)
    return y


def read(given: dict[str, Any]) -> tuple[rg.Tensor, int]:
    return tensor(given["x"]), given["s"]


primal = function(read)(rg.jit(solution, static_argnames="steps"))


@function(read)
@rg.jit(static_argnames="steps")
def gradient(x: rg.Tensor, steps: int) -> rg.Tensor:
    return rg.grad(lambda x: solution(x, steps)[-1])(x)
