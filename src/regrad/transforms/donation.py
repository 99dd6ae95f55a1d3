"""XLA programs that overwrite their inputs: Variables are updated in place.

A *donated* array is an array whose memory XLA may reuse for a result. So regrad donates a
Variable's array only if no other object holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from regrad.core.backends import JAX
from regrad.core.interrupts import Deferred, are_deferred, at_once
from regrad.core.sharding import searches_nan

if TYPE_CHECKING:
    from types import ModuleType

    from regrad.core.backends import Array


def compile_donating(jax: ModuleType, f: Callable[..., Any], donated: Iterable[int]) -> Any:
    """Return a compiled function of arrays that may overwrite the arrays at some places.

    The compiled code is freed together with the returned function.
    """

    def trace(*arrays: Array) -> Any:
        # Signals need not wait for a trace, because no array has been donated yet.
        with nullcontext() if are_deferred() else Deferred(), at_once():
            return f(*arrays)

    return jax.jit(trace, donate_argnums=tuple(donated))


def may_donate(jax: ModuleType) -> bool:
    """Return whether programs may overwrite arrays: JAX must not be able to call them twice."""
    return not searches_nan(jax)


def set_apart(values: Sequence[Array], others: Iterable[Array]) -> list[Any]:
    """Return traced arrays with separate memory: arrays that occur twice are copied."""
    seen = {id(array) for array in others}
    made = []
    for value in values:
        made.append(JAX.xp.copy(value) if id(value) in seen else value)
        seen.add(id(value))
    return made
