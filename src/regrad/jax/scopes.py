"""Active rules and the default dtype, as part of the keys under which JAX keeps its traces.

JAX keeps a trace by the function, and does not check whether it is still right. A function of
`from_regrad` that was traced under one `gradient_override_map` would keep its rules under another
one, and without any. `jax.make_user_context` makes a thread-local value a part of every key. Here,
these values are the rules and the default dtype, from the first call of `from_regrad` on.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np

from regrad.core import promotion, state
from regrad.core.bindings import Overrides
from regrad.core.blocks import CCall
from regrad.core.rule import identity_of
from regrad.core.scopes import refuse_once
from regrad.core.state import current
from regrad.errors import GradientError
from regrad.jax.host.functions import setter_of
from regrad.transforms.jit import in_order

_RULES: Any = jax.make_user_context(None)
_DTYPE: Any = jax.make_user_context(None)
_PROCESS: Any = jax.make_user_context(None)


class ScopeRules:
    """The active rules; equal to others with the same effect.

    It holds the rules, because they are compared by the identity of objects that must stay alive.
    """

    def __init__(self, overrides: Overrides) -> None:
        self.rules: list[Any] = [(k, tuple(b.sources)) for k, b in in_order(overrides or {})]
        self.identity: tuple[Any, ...] = tuple(
            [(k, *map(identity_of, sources)) for k, sources in self.rules]
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScopeRules) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)


def follow() -> None:
    """From now on, report the active rules and the default dtype to JAX."""
    if _tell not in state.FOLLOWERS:
        state.FOLLOWERS.append(_tell)
        promotion.FOLLOWERS.append(_tell_dtype)
        _tell_dtype(promotion.PROCESS[0], True)()
        _tell_dtype(promotion.SCOPED.get(), False)()
        _tell(_in_force())[0]()


def _tell(overrides: Overrides) -> tuple[CCall, CCall]:
    """Return the C functions that report the active overrides to JAX, and reset them.

    (`_RULES(value)`, which is public, is a block in Python, in which a signal handler may raise.)
    """
    tell = setter_of(_RULES)
    return partial(tell, ScopeRules(overrides) if overrides else None), partial(tell, _RULES.value)


def _tell_dtype(default: np.dtype | None, everywhere: bool) -> CCall:
    """Return the function that reports the default dtype of a scope, or of the process, to JAX."""
    tell = _PROCESS.set_global if everywhere else setter_of(_DTYPE)
    return partial(tell, default and default.str)


def _in_force() -> Overrides:
    now = current()
    return None if now is None else now.overrides


def is_behind() -> bool:
    """Return whether JAX has other overrides than the active ones."""
    return (_RULES.value or ScopeRules(None)) != ScopeRules(_in_force())


def check(name: str) -> None:
    """Raise if JAX would keep a trace as if the active rules were not active."""
    overrides = _in_force() or {}
    refuse_once(name, overrides)
    if places := [p for b in overrides.values() if (p := getattr(b, "place", None)) is not None]:
        raise GradientError(
            f"{name}: the key {places[0]!r} depends on the place, and JAX keeps one trace of the "
            "function for all places. Open the scope inside the function that is passed to "
            "from_regrad."
        )
    if is_behind():
        raise GradientError(
            f"{name}: an override was brought here from another thread or task, or is active in "
            "another task of this thread, and JAX does not have it: JAX would use traces that it "
            "keeps for other rules. Open the scope in the thread or task that calls the "
            "function, and do not await in it."
        )
