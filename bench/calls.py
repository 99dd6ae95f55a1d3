"""Calls of compiled functions with almost no computation, for different kinds of arguments.

Both libraries return before the result is computed, and the suite does not wait for it. It measures
the time that a call spends in Python. Each function does the same in both libraries.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import regrad as rg
from bench.contestants import Contestants
from bench.measures import Speed
from bench.networks import JAX, REGRAD
from bench.report import Measure
from bench.timing import Call

A = jnp.ones(4)
X = rg.asarray(A)
HOST = np.ones(4, np.float32)


def double(x: Any) -> Any:
    return x * 2.0


def scaled(x: Any, k: Any) -> Any:
    return x * k


def product(p: Any) -> Any:
    return p["w"] * p["b"]


def mixed(x: Any, p: Any, s: Any, k: int, name: str) -> Any:
    return x * p["w"] * s * k


def pair(
    f: Callable[..., Any], ours: tuple[Any, ...], theirs: tuple[Any, ...],
    static: tuple[str, ...] = (), **options: Any,
) -> Callable[[], Contestants]:  # fmt: skip
    """Return the calls of the same function in both libraries."""

    def contestants() -> Contestants:
        return {
            REGRAD: partial(rg.jit(f, static_argnames=static), *ours, **options),
            JAX: partial(jax.jit(f, static_argnames=static), *theirs, **options),
        }

    return contestants


def closed_over(ours: Any, theirs: Any) -> Callable[[], Contestants]:
    """A function that takes one factor from its closure."""
    return lambda: {
        REGRAD: partial(rg.jit(lambda x: rg.multiply(x, ours)), X),
        JAX: partial(jax.jit(lambda x: x * theirs), A),
    }


def updating() -> Contestants:
    """A step that updates three parameters of four floats, which it may overwrite."""
    variables = [rg.Variable(jnp.ones(4)) for _ in range(3)]

    @rg.jit
    def ours(x):
        for v in variables:
            v.assign_sub(0.1 * x)
        return x

    @partial(jax.jit, donate_argnums=0)
    def theirs(values, x):
        return [v - 0.1 * x for v in values], x

    values = [jnp.ones(4) for _ in range(3)]

    def in_jax() -> None:
        nonlocal values
        values, _ = theirs(values, A)

    calls: dict[str, Call] = {REGRAD: lambda: ours(X), JAX: in_jax}
    return calls


ROWS: dict[str, Callable[[], Contestants]] = {
    "a Tensor": pair(double, (X,), (A,)),
    "a Tensor of NumPy data": pair(double, (rg.asarray(HOST),), (HOST,)),
    "a NumPy array": pair(double, (HOST,), (HOST,)),
    "a number": pair(scaled, (X, 2.0), (A, 2.0)),
    "a keyword": pair(scaled, (X,), (A,), k=2.0),
    "a static argument": pair(scaled, (X, 2), (A, 2), ("k",)),
    "a static argument, by name": pair(scaled, (X,), (A,), ("k",), k=2),
    "a dict of two": pair(product, ({"w": X, "b": X},), ({"w": A, "b": A},)),
    "five arguments": pair(
        mixed, (X, {"w": X}, 2.0, 3), (A, {"w": A}, 2.0, 3), ("k", "name"), name="a"
    ),
    "a tuple out": pair(lambda x: (x, x * 2.0), (X,), (A,)),
    "a closed-over Tensor": closed_over(X, A),
    "a closed-over NumPy array": closed_over(HOST, HOST),
    "three Variables updated": updating,
}

BOUNDS = {
    "a Tensor": 1.2, "a dict of two": 1.6, "five arguments": 1.5, "a tuple out": 1.45,
    "three Variables updated": 1.45,
}  # fmt: skip

MEASURES: dict[str, Measure] = {
    f"call-{title.removeprefix('a ').replace(' ', '-').replace(',', '')}": Speed(
        f"compiled call: {title}", row, {JAX: BOUNDS.get(title, 1.35)}
    )
    for title, row in ROWS.items()
}
