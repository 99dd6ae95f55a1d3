"""What is in force, as part of the keys under which JAX keeps its traces.

JAX keeps a trace by the function, and asks nobody whether it is still right. A function of
`from_regrad` that was traced under one `gradient_override_map` would keep its rules under another
one, and without any. `jax.make_user_context` makes a value of each thread a part of every key.
Here these values are the rules and the default dtype, from the first call of `from_regrad` on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from regrad.core import promotion, state
from regrad.core.bindings import Overrides
from regrad.core.jobs import CARRIERS
from regrad.core.rule import identity_of
from regrad.core.scopes import refuse_once
from regrad.core.state import current
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


def _tell(overrides: Overrides) -> Callable[[], None]:
    """Tell JAX which overrides are in force in this thread; return what takes that back."""
    told = _RULES(Rules(overrides))
    told.__enter__()
    return lambda: told.__exit__(None, None, None)


def _in_force() -> Overrides:
    now = current()
    return None if now is None else now.overrides


def is_behind() -> bool:
    """Return whether JAX was told of other overrides than are in force."""
    return (_RULES.value or Rules(None)) != Rules(_in_force())


def check(name: str) -> None:
    """Raise where JAX would keep a trace as one without the rules that are in force."""
    overrides = _in_force() or {}
    refuse_once(name, overrides)
    if places := [p for b in overrides.values() if (p := getattr(b, "place", None)) is not None]:
        raise GradientError(
            f"{name}: the key {places[0]!r} says where its rule holds, and JAX keeps one trace of "
            "the function for all places. Open the scope inside the function that is given to "
            "from_regrad."
        )
    if is_behind():
        raise GradientError(
            f"{name}: an override was brought here from another thread or task, or is in force in "
            "another task of this thread, and JAX does not know: it would use what it keeps for "
            "other rules. Open the scope in the thread or task that calls the function, and do not "
            "await in it."
        )
