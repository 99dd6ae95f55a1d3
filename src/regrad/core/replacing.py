"""Values that are replaced: what `replace` says in a map of rules, and how its function is called.

A rule leaves the value of an op as it is. `replace(forward, gradient)` puts another function in the
op's place: the call is one of `forward`, which carries a gradient of its own. Whatever makes the
node of a rule (a record, an `autograd.Function`, a primitive) then makes that of the replaced call,
so that higher orders, batches and compiled programs come with it.

Invariants:

* Values change in scopes only that are opened with `values=True` (`check_values`).
* A `forward` sees what a rule may name of the forward pass, and must return what the op would:
  its shape, and its dtype (`Forward.check`).
* An op that an innermost replacing rule is for gets the other value, or there is an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, NoReturn

from regrad.core import dims
from regrad.core.bindings import CountedRule
from regrad.core.builtin import derivative, own_rule
from regrad.core.call import Asked, Call, HostArrays
from regrad.core.containers import replaced
from regrad.core.dispatch import alias_of, check_differentiable, lift, run
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
    """A value in a map of rules that replaces values; see `replace`."""

    closes_over: tuple[str, ...] = ("forward", "gradient")

    def __init__(self, forward: Callable[..., Any], gradient: Any) -> None:
        self.forward = forward
        self.gradient = gradient
        rule = gradient if isinstance(gradient, str) else gradient and called(gradient)
        self.__name__: str = f"replace({called(forward)}{f', {rule}' if rule else ''})"

    @property
    def is_derivative(self) -> bool:
        """True if the gradient is the derivative of the function, as its library finds it."""
        return self.gradient is None or getattr(self.gradient, "rule", None) is derivative

    @property
    def identity(self) -> Any:
        return identity_of(self.forward), identity_of(self.gradient)

    def __repr__(self) -> str:
        return self.__name__


def gradient_of(value: Any) -> Any:
    """Return the rule of a value in a map: that of the gradient, if it replaces values."""
    if not isinstance(value, Replace):
        return value
    return own_rule if value.gradient is None else value.gradient


def check_values(rules: Mapping[Any, Any], values: bool, order: int | None, call: str) -> None:
    """Refuse a map that replaces values where the scope does not say so, or where it cannot."""
    keys = [key for key, rule in rules.items() if isinstance(rule, Replace)]
    whole = [key for key in rules if isinstance(key, at) and key.what is None]
    learning = [key for key, rule in rules.items() if hasattr(gradient_of(rule), "parameters")]
    if keys and not values:
        raise ArgumentError(
            f"the map replaces the values of {', '.join(map(repr, keys))} (rg.replace), and rules "
            f"leave values untouched unless the scope says otherwise. Write {call}."
        )
    if both := [key for key in keys if key in whole]:
        raise ArgumentError(
            f"{both[0]!r} is for whole calls, whose value rg.replace cannot replace. Say for which "
            "of its ops: rg.at(where, 'Relu'), or replace the module itself."
        )
    if order is not None and (own := [*keys, *whole, *learning]):
        raise ArgumentError(
            f"order={order} asks for the derivatives that ops have of their own, which are not "
            f"those of replaced values, whole calls or rules that learn: {own[0]!r}. Open a scope "
            "of its own for it."
        )


class _AfterDy:
    """A `forward` in the form of a rule, which takes `dy` first."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        own = inspect.signature(function).parameters.values()
        if any(p.kind is p.VAR_POSITIONAL for p in own):
            raise RuleError(f"replace: {called(function)} must name what it takes, not *args")
        dy = inspect.Parameter("dy", inspect.Parameter.POSITIONAL_ONLY)
        named = [p.replace(name="dy_") if p.name == "dy" else p for p in own]
        self.__signature__: inspect.Signature = inspect.Signature([dy, *named])

    def __call__(self, dy: Any, /, *args: Any, **options: Any) -> Any:
        return self.function(*args, **options)


class Forward(Asked):
    """The function of a `replace`, with its names resolved against an op type."""

    forward = None  # it is replaced by no other

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
        self._pull: Callable[[Any, Any], Any] = bound.pull

    def __call__(self, record: Record) -> Any:
        """Return the value that it computes, of the inputs, `y` and call that a record holds."""
        return self._pull(record, None)

    def run_on(
        self, host: HostArrays, call: Call, xs: Sequence[Any], ys: Sequence[Any],
        like: Sequence[Any], name: str = "",
    ) -> list[Any]:  # fmt: skip
        """Return the results for a call of a host's op, of arrays `xs` and the op's results `ys`.

        They have the shapes and dtypes of `like`. `ys` is empty if the function does not name y.
        """

        def compute(xs: Sequence[Any], ys: Sequence[Any]) -> Sequence[Any]:
            return outputs_of(call.value(xs, None if not ys else ys[0] if len(ys) == 1 else (*ys,)))

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
        where = "a line that is not known" if call.hit is None else call.hit.where
        return self.check(made, like, host.is_array, where)

    def check(self, got: Any, expected: Sequence[Any], is_array: Any, where: str) -> list[Any]:
        """Return the results, if they have the shapes and dtypes of the op's own."""
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
    """Return the results of a function, of one as well, as a list."""
    return list(y) if isinstance(y, list | tuple) else [y]


def _told(y: Any) -> str:
    return f"the shape {_shape(y)} and the dtype {y.dtype}"


def _shape(y: Any) -> Any:
    shape = y._data.shape if isinstance(y, Tensor) else y.shape  # (of a graph it may be unknown)
    return shape if isinstance(shape, dims.UnknownRank) else tuple(shape)


# -- regrad's own ops ------------------------------------------------------------------------------


class ReplacingRule(Rule):
    """A rule under which regrad's ops are run as others: it replaces values, or it `learns`."""

    replaces = True
    forward: Forward | None = None

    def __init__(self, value: Any, op: Op) -> None:
        self.name: str = value.__name__
        if op.several or op.stateful or not op.inputs:
            raise RuleError(
                f"{self.name}: the op type {op.type!r} returns several results, or has a state or "
                "no inputs, and a rule that replaces its value or learns cannot hold for it"
            )
        self.base = op
        gradient = value.gradient if isinstance(value, Replace) else value
        rule = gradient and resolve(gradient, op)
        # tensors that the rule learns: they are the last inputs of the op that is run instead
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
        self.functions: dict[int, Any] = found  # whose code, and what that reads, counts

    def keeps(self, wanted: frozenset[int]) -> Kept:
        raise AssertionError("an op was recorded whose value is replaced")

    def value(self, xs: Sequence[Tensor], attrs: Attrs, layout: Layout) -> Any:
        """Return the value that the function computes."""
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
        """Return the value of a call whose own value is known, with its gradient."""
        learned = [*map(lift, self.learned.values())]
        for name, x in zip(self.learned, learned, strict=True):
            check_differentiable(x, f"{self.name}: {name}")
        every, n, y, places = (*xs, *learned), len(xs), own, layout
        given = every if self.rule else ()
        if learned:
            places = (*(layout or range(n)), *range(n, len(every)))
        if self.forward is not None:  # (no gradient goes through it if there is a rule)
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
    """The gradient of a replaced call: that of its function goes on, or a rule is asked."""

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
    """The function itself, as `builtin` and `forward` in the gradient's rule ask for it."""

    vjp: Any = None

    def __init__(self, link: ReplacedCallRule, xs: Sequence[Any]) -> None:
        self.value: Any = partial(link.replacing.value, attrs=link.attrs, layout=link.given)
        self.learned: Sequence[Any] = xs[len(xs) - len(link.replacing.learned) :]

    def pull(self, xs: Sequence[Tensor], dys: Sequence[Any], only: int | None = None) -> Any:
        """Return the gradients of the function by the inputs that are floats."""
        moving = [i for i, x in enumerate(xs) if x.dtype.kind in "fc"]
        found = pulled(lambda xs: [self.value(xs)], xs, moving, dys)[1]
        return dict(zip(moving, found, strict=True))

    def values_at(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Return the value that the function computes of other inputs."""
        return outputs_of(self.value([*map(lift, leaves), *self.learned]))


class CountedReplacedCall(CountedRule):
    """The same, counted where the op was called."""

    def under(self, scopes: Mapping[Any, Any]) -> Rule:
        binding = scopes.get(self.key)
        if binding is None or binding.rule is not self.rule.replacing:  # pyright: ignore
            return self
        hit = binding.counted_at(self.hit.where, self.hit.path).hit
        return CountedReplacedCall(copy(self.rule), hit, self.key)
