"""What is in force, as part of the keys under which JAX keeps its traces.

JAX keeps a trace by the function, and asks nobody whether it is still right. A function of
`from_regrad` that was traced under one `gradient_override_map` would keep its rules under another
one, and without any. `jax.make_user_context` makes a value of each thread a part of every key.
Here these values are the rules and the default dtype, from the first call of `from_regrad` on.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import jax

from regrad.core import promotion, state
from regrad.core.bindings import Overrides
from regrad.core.blocks import block
from regrad.core.jobs import CARRIERS
from regrad.core.rule import identity_of
from regrad.core.scopes import refuse_once
from regrad.core.state import current, in_state, is_held
from regrad.errors import GradientError
from regrad.transforms.jit import in_order

_RULES: Any = jax.make_user_context(None)
_DTYPE: Any = jax.make_user_context(None)


class Rules:
    """The rules in force; equal to others that do the same.

    It holds the rules, since they are compared by the identity of objects that must not die.
    """

    def __init__(self, overrides: Overrides) -> None:
        self.rules: list[Any] = [(k, tuple(b.sources)) for k, b in in_order(overrides or {})]
        self.identity: tuple[Any, ...] = tuple(
            [(k, *map(identity_of, sources)) for k, sources in self.rules]
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rules) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)


def follow() -> None:
    """From now on, tell JAX what is in force."""
    if _tell not in state.FOLLOWERS:
        state.FOLLOWERS.append(_tell)
        promotion.FOLLOWERS.append(lambda dtype: _DTYPE(dtype.str).__enter__())
        CARRIERS.append((_in_force, lambda overrides: _RULES(Rules(overrides))))
        _tell(_in_force())


def _tell(overrides: Overrides) -> None:
    """Tell JAX which overrides are in force in this thread, until it is told of others."""
    _RULES(Rules(overrides)).__enter__()


def _in_force() -> Overrides:
    now = current()
    return None if now is None else now.overrides


def check(name: str) -> None:
    """Raise where JAX would keep a trace as one without the rules that are in force."""
    overrides = _in_force() or {}
    refuse_once(name, overrides)
    if all(map(is_held, overrides)):
        return
    if places := [p for b in overrides.values() if (p := getattr(b, "place", None)) is not None]:
        raise GradientError(
            f"{name}: the key {places[0]!r} says where its rule holds, and JAX keeps one trace of "
            "the function for all places. Open the scope inside the function that is given to "
            "from_regrad."
        )
    if _RULES.value != Rules(overrides):
        raise GradientError(
            f"{name}: an override is in force that was brought here from another thread or task, "
            "of which JAX does not know: it would use what it keeps for other rules. Open the "
            "scope in the thread or task that calls the function, and do not await in it."
        )


@block
def nothing_in_force() -> Generator[None]:
    """Run a rule, which no override concerns."""
    before = _RULES.value
    try:
        with in_state(None):
            _tell(None)
            yield
    finally:
        _RULES(before).__enter__()
