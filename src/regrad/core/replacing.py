"""Replaced values: `replace` in a map of rules, and the call of its function.

A rule does not change the value of an op. `replace(forward, gradient)` runs another function in
place of the op: the call becomes a call of `forward`, with its own gradient. The code that makes
the node for a rule (a record, an `autograd.Function`, a primitive) also makes the node of the
replaced call. So higher orders, batches and compiled programs need no further code.

Invariants:

* Values change only in scopes that are opened with `values=True` (`check_values`).
* A `forward` gets the values of the forward pass that a rule may name. It must return a result
  of the op's own shape and dtype (`Forward.check`).
* If the innermost rule for an op replaces values, the op gets the new value, or regrad raises.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, NoReturn

from regrad.core import dims
from regrad.core.backends import is_array
from regrad.core.bindings import CountedRule
from regrad.core.builtin import derivative, own_rule
from regrad.core.call import Asked, Call, HostArrays, OwnOfCall
from regrad.core.containers import flatten_objects, replaced
from regrad.core.dispatch import alias_of, check_differentiable, is_tensor, lift, run
from regrad.core.places import at
from regrad.core.pullback import pulled
from regrad.core.registry import Attrs, Input, Op, resolve
from regrad.core.rule import NO_GRADIENT, Kept, MapValue, Rule, called, identity_of, place
from regrad.core.rule_forms import BoundFunction, asked
from regrad.core.signatures import parameters_of
from regrad.core.state import current, masked
from regrad.core.tape import CUT, Layout, Record, positions
from regrad.core.tensor import Tensor, wrap
from regrad.errors import ArgumentError, RuleError, kind, near


class Replace(MapValue):
    """A value in a map of rules that replaces values. See `replace`."""

    closes_over: tuple[str, ...] = ("forward", "gradient")

    def __init__(self, forward: Callable[..., Any], gradient: Any) -> None:
        self.forward = forward
        self.gradient = gradient
        rule = gradient if isinstance(gradient, str) else gradient and called(gradient)
        self.__name__: str = f"replace({called(forward)}{f', {rule}' if rule else ''})"

    @property
    def is_derivative(self) -> bool:
        """True if the gradient is the derivative of the function, computed by its library."""
        return self.gradient is None or getattr(self.gradient, "rule", None) is derivative

    @property
    def identity(self) -> Any:
        return identity_of(self.forward), identity_of(self.gradient)

    def __repr__(self) -> str:
        return self.__name__


def gradient_of(value: Any) -> Any:
    """Return the gradient's rule of a value in a map that replaces values, or the value itself."""
    if not isinstance(value, Replace):
        return value
    return own_rule if value.gradient is None else value.gradient


def check_values(rules: Mapping[Any, Any], values: bool, order: int | None, call: str) -> None:
    """Raise for a map that replaces values without `values=True`, or where this is impossible."""
    keys = [key for key, rule in rules.items() if isinstance(rule, Replace)]
    whole = [key for key in rules if isinstance(key, at) and key.what is None]
    learning = [key for key, rule in rules.items() if hasattr(gradient_of(rule), "parameters")]
    if keys and not values:
        raise ArgumentError(
            f"the map replaces the values of {', '.join(map(repr, keys))} (rg.replace). This needs "
            f"values=True, because rules leave values unchanged by default. Write {call}."
        )
    if order is not None and (own := [*keys, *whole, *learning]):
        raise ArgumentError(
            f"order={order} uses the ops' own derivatives beyond that order. Replaced values, "
            "whole calls and rules with parameters have no such derivatives: "
            f"{own[0]!r}. Open a separate scope for it."
        )


class _AfterDy:
    """A `forward` in the form of a rule, which takes `dy` first."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        own = inspect.signature(function).parameters.values()
        if any(p.kind is p.VAR_POSITIONAL for p in own):
            raise RuleError(f"replace: {called(function)} must name its parameters, not take *args")
        dy = inspect.Parameter("dy", inspect.Parameter.POSITIONAL_ONLY)
        named = [p.replace(name="dy_") if p.name == "dy" else p for p in own]
        self.__signature__: inspect.Signature = inspect.Signature([dy, *named])

    def __call__(self, dy: Any, /, *args: Any, **options: Any) -> Any:
        return self.function(*args, **options)


class Forward(Asked):
    """The function of a `replace`, with its names resolved against an op type."""

    forward = None  # (no other function replaces it)

    def __init__(self, function: Callable[..., Any], op: Op) -> None:
        self.function = function
        self.op = op
        as_rule = _AfterDy(function)
        known = [*op.names(), "forward"]
        names, _ = asked(as_rule, op)
        if unknown := [name for name in names if name not in known]:
            raise RuleError(
                f"{self!r} takes {parameters_of(function)}, and the op type {op.type!r} has no "
                f"{unknown[0]!r}.{near(unknown[0], known)} It may name {', '.join(known)}."
            )
        bound = BoundFunction(as_rule, op, called(function))
        self.functions: Sequence[Any] = [function]
        self.keeps_y: bool = "y" in names
        self.is_call: bool = isinstance(getattr(op.rule, "base", op).rule, OwnOfCall)
        self._pull: Callable[[Any, Any], Any] = bound.pull

    def __call__(self, record: Record) -> Any:
        """Return the function's value, from the inputs, `y` and call that a record holds."""
        return self._pull(record, None)

    def run_on(
        self, host: HostArrays, call: Call, xs: Sequence[Any], ys: Sequence[Any],
        like: Sequence[Any], name: str = "",
    ) -> list[Any]:  # fmt: skip
        """Return the results for a call of a host's op, from arrays `xs` and the op's results `ys`.

        They have the shapes and dtypes of `like`. `ys` is empty if the function does not name y.
        """

        def compute(xs: Sequence[Any], ys: Sequence[Any]) -> Sequence[Any]:
            y = call.value(xs, None if not ys else ys[0] if len(ys) == 1 else (*ys,))
            return self.outputs_of(y)

        def by_regrad() -> Sequence[Any]:
            given, n = [*xs, *ys], len(xs)
            places = [i for i, x in enumerate(given) if host.is_array(x)]

            def flat(tensors: Sequence[Tensor]) -> list[Tensor]:
                every = replaced(given, places, tensors)
                made = compute(every[:n], every[n:])
                return [y if isinstance(y, Tensor) else wrap(host.as_array(y)) for y in made]

            return host.bridge(flat, [given[i] for i in places], name)

        if self.named is None:
            self.named: set[str] | None = host.names_in(self.functions)
        made = self.either(lambda: compute(xs, ys), by_regrad)
        if self.plain and any(isinstance(y, Tensor) for y in made):  # (for the first time)
            self.plain: bool | None = False
            made = by_regrad()
        where = "an unknown line" if call.hit is None else call.hit.where
        return self.check(made, like, host.is_array, where)

    def outputs_of(self, y: Any) -> list[Any]:
        """Return the results; a function that replaces a whole call may put them in containers."""
        if not self.is_call:
            return outputs_of(y)
        leaves = flatten_objects(y)[0]
        return [x for x in leaves if is_tensor(x) or is_array(x)] or [y]

    def check(self, got: Any, expected: Sequence[Any], is_array: Any, where: str) -> list[Any]:
        """Return the results if their shapes and dtypes match the op's own results, or raise."""
        ys = outputs_of(got)
        if len(ys) != len(expected) or not all(map(is_array, ys)):
            what = f"{len(expected)} tensors" if len(expected) > 1 else "one tensor"
            self._refuse(kind(ys[0] if len(ys) == 1 else got), f"{what}, like the op", where)
        for y, own in zip(ys, expected, strict=True):
            if y.dtype != own.dtype or dims.differ(_shape(y), _shape(own)):
                self._refuse(_told(y), f"those of the op's own result, {_told(own)}", where)
        return ys

    def _refuse(self, got: str, expected: str, where: str) -> NoReturn:
        raise RuleError(
            f"{self!r} for the op type {self.op.type!r} at {where} returned {got}, expected "
            f"{expected}."
        )

    def __repr__(self) -> str:
        return f"replace: the forward {called(self.function)!r} ({place(self.function)})"


def outputs_of(y: Any) -> list[Any]:
    """Return the results of a function as a list, also a single result."""
    return list(y) if isinstance(y, list | tuple) else [y]


def _told(y: Any) -> str:
    return f"the shape {_shape(y)} and the dtype {y.dtype}"


def _shape(y: Any) -> Any:
    shape = y._data.shape if isinstance(y, Tensor) else y.shape  # (may be unknown in a graph)
    return shape if isinstance(shape, dims.UnknownRank) else tuple(shape)


# -- regrad's own ops ------------------------------------------------------------------------------


class ReplacingRule(Rule):
    """A rule that runs regrad's ops as other ops: it replaces values, or it has parameters."""

    replaces = True
    forward: Forward | None = None

    def __init__(self, value: Any, op: Op) -> None:
        self.name: str = value.__name__
        if op.several or op.stateful or not op.inputs:
            raise RuleError(
                f"{self.name}: the op type {op.type!r} returns several results, or has a state or "
                "no inputs. A rule that replaces values or has parameters cannot apply to it"
            )
        self.base = op
        gradient = value.gradient if isinstance(value, Replace) else value
        rule = gradient and resolve(gradient, op)
        # the parameters of the rule: they are the last inputs of the op that runs instead
        self.learned: dict[str, Any] = getattr(gradient, "parameters", {})
        self.op: Op = getattr(rule, "op", op) if self.learned else op
        is_derivative = isinstance(value, Replace) and value.is_derivative
        self.rule: Rule | None = None if is_derivative else rule
        parts = []
        if isinstance(value, Replace):
            self.forward, parts = Forward(value.forward, self.op), [value.forward]
        if self.rule:
            parts += [self.rule.function, *getattr(self.rule, "functions", {}).values()]
        found = {id(f): f for f in (*parts, *self.learned.values()) if f is not None}
        self.functions: dict[int, Any] = found  # cache keys depend on their code

    def keeps(self, wanted: frozenset[int]) -> Kept:
        raise AssertionError("an op was recorded whose value is replaced")

    def value(self, xs: Sequence[Tensor], attrs: Attrs, layout: Layout) -> Any:
        """Return the function's value."""
        assert self.forward is not None
        n, own = len(xs) - len(self.learned), layout and layout[: len(self.base.inputs)]
        with masked():
            y = run(self.base, tuple(xs[:n]), attrs, own) if self.forward.keeps_y else None
            specs = [(x._data.shape, x._data.dtype) for x in xs]
            made = Call(self, specs, attrs, layout).value(xs, y)
            return made if isinstance(made, list | tuple) or made is None else lift(made)

    def run(
        self, counted: CountedRule, xs: tuple[Tensor, ...], attrs: Attrs, own: Any, layout: Layout
    ) -> Tensor:
        """Return the value of a call, with its gradient. The op's own value `own` is known."""
        learned = [*map(lift, self.learned.values())]
        for name, x in zip(self.learned, learned, strict=True):
            check_differentiable(x, f"{self.name}: {name}")
        every, n, y, places = (*xs, *learned), len(xs), own, layout
        given = every if self.rule else ()
        if learned:
            places = (*(layout or range(n)), *range(n, len(every)))
        if self.forward is not None:  # (with a rule, no gradient passes through the function)
            y = self.value([*map(alias_of, every)] if given else every, attrs, places)
            self.forward.check(y, [own], lambda y: isinstance(y, Tensor), counted.hit.where)
        elif (state := current()) is not None and state.region is not None:
            state.region.did(self.base, CUT, xs, attrs, own, layout)
        inputs = [Input(f"x{i}", "one") for i in range(len(given) + 1)]
        op = Op("_Replaced", "replaced", lambda xp, *xs: xs[-1], inputs, holomorphic=False)
        op.rule = CountedReplacedCall(
            ReplacedCallRule(self, attrs, places, len(given)), counted.hit, counted.key
        )
        with masked():
            return run(op, (*given, y), {})


class ReplacedCallRule(Rule):
    """The gradient of a replaced call: by its function's own gradient, or by a rule."""

    def __init__(self, rule: ReplacingRule, attrs: Attrs, layout: Layout, count: int) -> None:
        self.name: str = rule.name
        self.replacing = rule
        self.functions: dict[int, Any] = rule.functions
        self.attrs = attrs
        self.layout: Any = layout or tuple(range(count))
        self.count = count
        self.rule: Rule | None = rule.rule

    def keeps(self, wanted: frozenset[int]) -> Kept:
        if self.rule is None:
            return frozenset(), False
        reached = [p for p, at in enumerate(self.layout) if wanted.intersection(positions(at))]
        kept, keeps_y = self.rule.keeps(frozenset(reached))
        if self.rule.runs_op and self.replacing.forward:
            return frozenset(range(self.count)), keeps_y
        return frozenset([i for p in kept for i in positions(self.layout[p])]), keeps_y

    def linear_in(self, wanted: frozenset[int]) -> bool:
        return self.rule is None or super().linear_in(wanted)

    @property
    def given(self) -> Layout:
        """The layout of the op's inputs; None if it is one each."""
        plain = all(place == i for i, place in enumerate(self.layout))
        return None if plain else self.layout

    def pull(self, record: Record, dy: Any, wanted: Sequence[int]) -> Any:
        if self.rule is None:
            return [(0, dy)]
        n = self.count
        xs, reached = list(record.xs or [None] * n)[:n], [i for i in wanted if i < n]
        own = OwnFunction(self, xs) if self.replacing.forward else None
        specs, hit = list(record.specs)[:n], record.rule.hit
        call = Call(self.replacing, specs, self.attrs, self.given, None, hit, own)
        found = call.pull(xs, record.y, dy, reached)
        return [*zip(reached, found, strict=True), (n, NO_GRADIENT)]


class OwnFunction:
    """The replacement itself, for `builtin` and `forward` in the gradient's rule."""

    vjp: Any = None

    def __init__(self, link: ReplacedCallRule, xs: Sequence[Any]) -> None:
        self.value: Any = partial(link.replacing.value, attrs=link.attrs, layout=link.given)
        self.learned: Sequence[Any] = xs[len(xs) - len(link.replacing.learned) :]

    def pull(self, xs: Sequence[Tensor], dys: Sequence[Any], only: int | None = None) -> Any:
        """Return the function's gradients for the inputs that are floats."""
        moving = [i for i, x in enumerate(xs) if x.dtype.kind in "fc"]
        found = pulled(lambda xs: [self.value(xs)], xs, moving, dys)[1]
        return dict(zip(moving, found, strict=True))

    def values_at(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Return the function's value for other inputs."""
        return outputs_of(self.value([*map(lift, leaves), *self.learned]))


class CountedReplacedCall(CountedRule):
    """A `ReplacedCallRule` that counts at the op's call site."""

    def under(self, scopes: Mapping[Any, Any]) -> Rule:
        binding = scopes.get(self.key)
        if binding is None or binding.rule is not self.rule.replacing:  # pyright: ignore
            return self
        hit = binding.counted_at(self.hit.where, self.hit.path).hit
        return CountedReplacedCall(copy(self.rule), hit, self.key)
