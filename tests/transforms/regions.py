"""Regions: each turns a function of a vector, element by element, into the same by another way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import regrad as rg

Function = Callable[..., Any]


def in_while_loop(f: Function) -> Function:
    def run(x: Any) -> Any:
        goes_on, body = (lambda c: c[0] < 1), (lambda c: (c[0] + 1, f(c[1])))
        return rg.while_loop(goes_on, body, (0, x), max_steps=3)[1]

    return run


def in_both_branches(f: Function) -> Function:
    return lambda x: rg.cond(rg.sum(x) > -10, f, f, x)


REGIONS: dict[str, Function] = {
    "alone": lambda f: f, "checkpoint": rg.checkpoint, "jit": rg.jit, "vmap": rg.vmap,
    "map": lambda f: lambda x: rg.map(f, x),
    "cond": lambda f: lambda x: rg.cond(rg.sum(x) > -10, f, rg.zeros_like, x),
    "scan": lambda f: lambda x: rg.scan(lambda c, _: (f(c), None), x, length=1)[0],
    "scan, ys": lambda f: lambda x: rg.scan(lambda c, v: (c, f(v)), 0.0, x)[1],
    "scan, checkpoint": lambda f: (
        lambda x: rg.scan(lambda c, _: (f(c), None), x, length=1, checkpoint=True)[0]
    ),
    "while_loop": in_while_loop,
    "fori_loop": lambda f: lambda x: rg.fori_loop(0, 1, lambda i, c: f(c), x),
}  # fmt: skip
