"""A saddle point by descents within a descent: derivatives within derivatives."""

from __future__ import annotations

import regrad as rg

from .protocol import Function, function, tensor
from .solver import MODES, Gradient, argmax, argmin


def height(x: rg.Tensor, y: rg.Tensor) -> rg.Tensor:
    return x.square().sum() - y.square().sum()


def variant(outer: Gradient, inner: Gradient) -> Function:
    """The x with the least of the greatest heights over all y, and the y of that height."""

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
