"""A saddle point by a descent around inner descents: derivatives within derivatives."""

from __future__ import annotations

import regrad as rg

from .protocol import Function, function, tensor
from .solver import MODES, Gradient, argmax, argmin


def height(x: rg.Tensor, y: rg.Tensor) -> rg.Tensor:
    return x.square().sum() - y.square().sum()


def variant(outer: Gradient, inner: Gradient) -> Function:
    """Return the x that minimizes the maximum over all y, and the y of that maximum."""

    @function(lambda given: (tensor(given["start"]),))
    @rg.jit
    def point(start: rg.Tensor) -> rg.Tensor:
        def greatest(x: rg.Tensor) -> rg.Tensor:
            return height(x, argmax(inner, lambda y: height(x, y), start))

        x = argmin(outer, greatest, start)
        y = argmax(outer, lambda y: height(x, y), start)
        return rg.concat([x, y])

    return point


ff, fr, rf, rr = (variant(MODES[outer], MODES[inner]) for outer, inner in ("ff", "fr", "rf", "rr"))
