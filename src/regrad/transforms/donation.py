"""Programs of XLA that write over what they are given: Variables are updated where they lie.

An array that a program is given for good is *donated*: XLA may use its memory for a result. So no
Variable's array may be anybody else's as well.
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
    """Return a function of arrays compiled, of which it may write over those at some places.

    What it compiles lives as long as what is returned.
    """

    def trace(*arrays: Array) -> Any:
        # signals do not wait for a trace: nothing has been given away yet
        with nullcontext() if are_deferred() else Deferred(), at_once():
            return f(*arrays)

    return jax.jit(trace, donate_argnums=tuple(donated))


def may_donate(jax: ModuleType) -> bool:
    """Return whether programs may write over arrays: not if JAX may call them twice."""
    return not searches_nan(jax)


def set_apart(values: Sequence[Array], others: Iterable[Array]) -> list[Any]:
    """Return traced arrays, each in memory of its own: those that are others as well are copied."""
    seen = {id(array) for array in others}
    made = []
    for value in values:
        made.append(JAX.xp.copy(value) if id(value) in seen else value)
        seen.add(id(value))
    return made
