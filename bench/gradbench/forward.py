"""Derivatives in forward mode, for functions of few inputs."""

from __future__ import annotations

from collections.abc import Callable

import regrad as rg

Map = Callable[[rg.Tensor], rg.Tensor]


def jacobian(f: Map) -> Map:
    """Return all derivatives of f(x) with respect to a vector x, along a new last axis."""

    def of(x: rg.Tensor) -> rg.Tensor:
        directions = rg.eye(len(x), dtype=x.dtype)
        return rg.vmap(lambda dx: rg.jvp(f, [x], [dx])[1], out_axes=-1)(directions)

    return of
