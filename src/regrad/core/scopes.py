"""Scopes of overrides: a block, or the calls of a decorated function."""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple, Self, TypeVar

from regrad.core.blocks import Block
from regrad.core.callers import find_caller, find_opener
from regrad.core.reports import B, Report, reported
from regrad.errors import ArgumentError, GradientError, NotFiredError, UnusedOverrideWarning, kind

F = TypeVar("F", bound=Callable[..., Any])


class Optional(NamedTuple):
    """A value in a map of overrides whose key may match nothing."""

    closes_over = ("rule",)
    rule: Any


def optional(rule: Any) -> Optional:
    """Mark a rule in a map of overrides as optional: its key may match nothing.

    regrad warns when a scope ends and a key has matched no op, and `assert_fired()` raises. If a
    map is for many models, it may be correct that a key matches nothing. (An explicit
    `assert_fired("Relu6")` still checks the key.)

    Args:
        rule: Any rule that a map takes: a function, or the name of a rule or op type.

    Returns:
        A value for the map, in `gradient_override_map` as in `regrad.torch` and `regrad.jax`.

    Raises:
        Nothing. The map raises for a rule that does not fit its op type.

    >>> import regrad as rg
    >>> from regrad.rules import guided_relu, optional
    >>> GUIDED = {"Relu": optional(guided_relu), "Relu6": optional(guided_relu)}
    >>> with rg.gradient_override_map(GUIDED) as used:
    ...     rg.grad(lambda x: rg.nn.relu(x) * [1.0, -1.0])(rg.tensor([2.0, 2.0])).print()
    Tensor
        [1, 0]
    >>> used.assert_fired()
    """
    return Optional(rule)


def unmarked(rules: Mapping[Any, Any]) -> tuple[dict[Any, Any], list[Any]]:
    """Return a map with plain rules, and the keys whose rules were marked as optional."""
    marked = [key for key in rules if isinstance(rules[key], Optional)]
    bare = dict(rules)
    for key in marked:
        bare[key] = rules[key].rule
    return bare, marked


def check_order(api: str, order: Any) -> int | None:
    """Return the highest order at which rules apply: 1, or None for all; raise for other values."""
    if order is None or (type(order) is int and order == 1):
        return order
    raise ArgumentError(
        f"{api}: order is None (the rules apply at every order) or 1 (they define the first "
        "derivative, and derivatives of that gradient use the ops' own), "
        f"got {order!r:.60}"
    )


def refuse_once(name: str, overrides: Mapping[Any, Any] | None) -> None:
    """Raise for rules for the first derivative alone where another library differentiates."""
    if any(binding.once for binding in (overrides or {}).values()):
        raise GradientError(
            f"{name}: an override with order=1 is active, but only the library that calls the "
            "function can identify the first derivative. Let the rules apply at every order "
            "(order=None), or differentiate with regrad's functions."
        )


class Scope(Block, Report[B]):
    """Rules that are active within a block, with a report of their effects."""

    closes_over: tuple[str, ...] = ("_rules",)

    _rules: Mapping[Any, Any]
    _marked: Sequence[Any] = ()  # the keys that may match nothing
    _level = 3  # the stack level of a warning's line: the `with` statement
    _around: BaseException | None = None  # the exception that was being handled on entry
    _idle: weakref.ref[Any] | None = None  # warns if the scope is never used

    def _note_entry(self) -> None:
        """Record where the scope is entered. This is its first step."""
        self._idle = None
        self._opener = find_opener()
        self._around = sys.exc_info()[1]

    def _warn_unless_entered(self) -> None:
        """Warn if the scope is freed before it is entered: its call may look like a setting.

        This uses a weak reference. A `__del__` would run for every scope, and would lose a Ctrl-C
        that came meanwhile. The reference is cleared when the scope is entered. It does not call
        back if Python collects it as garbage together with the scope.
        """
        name, where = self._name, find_caller()

        def warn(_: object) -> None:
            if not sys.is_finalizing():
                message = f"{name} was not entered, so no rule applies: write `with {name}(…):`"
                message += f". The scope was made at {where}"
                warnings.warn(message, UnusedOverrideWarning, stacklevel=2)

        self._idle = weakref.ref(self, warn) if self._rules else None

    @property
    def _failed(self) -> bool:
        """True if the block that is being exited raises."""
        return sys.exc_info()[1] is not self._around

    def _warn_unless_hit(self) -> None:
        """Warn of entries that matched nothing in the block, unless the block raises."""
        idle = self._unmatched()
        if not idle or self._failed:
            return
        why = "" if self.hits else (
            f"no op of type {', '.join(b.shown for b in idle)} was created in the scope. "
            "An override binds ops when they are created, so call the model inside the scope; "
            f"and look at {self._hint()}"
        )  # fmt: skip
        self._warn_of_idle(idle, why, self._level)

    def _hint(self) -> str:
        """Return what to check if nothing matched."""
        raise NotImplementedError

    def _fresh(self, rules: Any) -> Self:
        """Return a scope like this one, not entered, with these rules."""
        raise NotImplementedError

    def __call__(self, f: F) -> F:
        """Decorate a function: each call runs in its own scope, and its hits count here."""
        self._idle = None
        check_decorated("gradient_override_map", f)
        rules = self._rules  # a variable of the closure, so that jit detects a changed rule

        @wraps(f)
        def scoped(*args: Any, **options: Any) -> Any:
            scope = self._fresh(rules)
            scope._level = 4  # the line of the call
            scope._marked = self._marked
            with scope:
                self._collect(scope)
                return f(*args, **options)

        return scoped  # pyright: ignore[reportReturnType] (it has the same signature)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a scope that is not open, with the same rules and a copy of the current hits."""
        made = copy.copy(self)
        made._bindings = {key: copy.copy(binding) for key, binding in self._bindings.items()}
        for binding in made._bindings.values():
            binding.by_line = copy.deepcopy(binding.by_line, memo)
        return made

    def __reduce__(self) -> Any:
        """Return the rules, with reports in place of their bindings."""
        state = {**self.__getstate__(), "_bindings": reported(self._bindings)}
        return object.__new__, (type(self),), state

    def __copy__(self) -> Self:
        made = object.__new__(type(self))
        made.__dict__.update(self.__getstate__())
        return made

    def _collect(self, scope: Any) -> None:
        """Let a scope count its hits here."""
        for key, binding in scope._bindings.items():
            binding.by_line = self._bindings.setdefault(key, binding).by_line

    def assert_fired(self, *op_types: str) -> None:
        """Raise NotFiredError unless the rule of each of these op types (by default all) ran."""
        if self._rules and not self._bindings:
            raise NotFiredError(
                f"no rule of this {type(self).__name__} ran: no code ran in its scope. Open it "
                "with `with`, or call the function that it decorates."
            )
        super().assert_fired(*op_types)


def left_out_of_turn() -> ArgumentError:
    """Return the error for a scope that is exited while a scope entered later is open."""
    return ArgumentError(
        "a gradient_override_map scope was exited out of order: scopes must nest, in one thread "
        "and task. Do not hold a scope open across a yield; open it where it is used."
    )


def check_decorated(name: str, f: object) -> None:
    """Raise for an object that does not run while it is called."""
    if isinstance(f, type):
        what = f"the class {f.__name__}. Decorate its methods."
    elif inspect.isgeneratorfunction(f) or inspect.isasyncgenfunction(f):
        what = "a generator, which runs after the call. Open the scope inside, between two yields."
    elif inspect.iscoroutinefunction(f):
        what = "a coroutine, which runs after the call. Open the scope inside it, with `with`."
    elif not callable(f):
        what = f"{kind(f)}."
    else:
        return
    raise ArgumentError(f"{name} decorates functions; this is {what}")
