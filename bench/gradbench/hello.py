"""The square of a number, and its gradient."""

from __future__ import annotations

import regrad as rg

from .protocol import function, tensor


def read(x: float) -> tuple[rg.Tensor]:
    return (tensor(x),)


@function(read, float)
@rg.jit
def square(x: rg.Tensor) -> rg.Tensor:
    return x * x


@function(read, float)
@rg.jit
def double(x: rg.Tensor) -> rg.Tensor:
    return rg.grad(lambda x: x * x)(x)
