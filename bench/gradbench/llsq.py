"""The squared distance between a polynomial and the sign function, at n positions."""

from __future__ import annotations

import math
from typing import Any

import regrad as rg

from .protocol import function, tensor


def powers(t: rg.Tensor, count: int) -> rg.Tensor:
    """Return the rows 1, t, t², … of a matrix."""
    rows = [rg.ones_like(t)]
    while len(rows) < count:
        rows.append(rows[-1] * t)
    return rg.stack(rows)


def polynomial(x: rg.Tensor, t: rg.Tensor) -> rg.Tensor:
    """Return `x[0] + x[1] t + x[2] t² + …`, evaluated in groups of about √m coefficients.

    Two small matrix products replace one product with all m powers of t, which would not fit into
    a processor's cache.
    """
    size = math.isqrt(len(x) - 1) + 1
    groups = rg.pad(x, [(0, -len(x) % size)]).reshape((-1, size))
    near = powers(t, size)
    far = powers(near[-1] * t, len(groups))
    return (far * (groups @ near)).sum(axis=0)


def objective(x: rg.Tensor, n: int) -> rg.Tensor:
    t = -1 + rg.arange(n, dtype=rg.float64) * (2 / (n - 1))
    return rg.square(rg.sign(t) - polynomial(x, t)).sum() / 2


def read(given: dict[str, Any]) -> tuple[rg.Tensor, int]:
    return tensor(given["x"]), given["n"]


@function(read, float)
@rg.jit(static_argnums=1)
def primal(x: rg.Tensor, n: int) -> rg.Tensor:
    return objective(x, n)


@function(read)
@rg.jit(static_argnums=1)
def gradient(x: rg.Tensor, n: int) -> rg.Tensor:
    return rg.grad(lambda x: objective(x, n))(x)
