"""`gradient_override_map`: rules put in force by op type, within a scope."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Self

from regrad.core import jobs
from regrad.core.blocks import stay
from regrad.core.callers import find_caller, warn_of_open_scope
from regrad.core.registry import OPS, Op, find_op, resolve
from regrad.core.reports import Binding, Hit
from regrad.core.rule import Cotangent, NoGradient, Rule, RuleFunction, identity_of
from regrad.core.scopes import Scope, left_out_of_turn, unmarked
from regrad.core.signatures import helpful
from regrad.core.state import STATE, State, current, tell_followers
from regrad.core.tape import Record
from regrad.core.tensor import Tensor
from regrad.errors import ArgumentError, alike


class WrappedRule(Rule):
    """A rule with something around its pull."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.name: str = rule.name
        self.function: RuleFunction | None = rule.function
        self.watches: bool = rule.watches
        self.flat: bool = rule.flat
        self.constant: bool = rule.constant
        self.holomorphic: bool = rule.holomorphic
        self.answers: bool = rule.answers
        self.whole: bool = rule.whole
        self.keeps: Callable[..., Any] = rule.keeps
        self.carries: Callable[..., Any] = rule.carries
        self.unless: Callable[..., Any] | None = rule.unless
        self.hit: Any = rule.hit

    @property
    def bare(self) -> Rule:
        return self.rule.bare


class CountedRule(WrappedRule):
    """A rule that counts in a hit how often it runs."""

    def __init__(self, rule: Rule, hit: Hit) -> None:
        super().__init__(rule)
        self.hit = hit

    def under(self, binding: OpBinding | None) -> Rule:
        """Return the same rule for an op that is run again, counted in the scope open now."""
        if binding is None or binding.rule is not self.rule:
            return self
        return binding.counted_at(self.hit.where)

    def pull(
        self, record: Record, dy: Cotangent, wanted: Sequence[int]
    ) -> Iterable[tuple[int, Any]]:
        self.hit.ran += 1
        return self.rule.pull(record, dy, wanted)


class OpBinding(Binding):
    """A rule bound to an op type of regrad's."""

    def __init__(self, op: Op, rule: Rule, depth: int) -> None:
        super().__init__(op.type, rule.name)
        self.op = op
        self.rule = rule
        self.depth = depth  # how many scopes are around; the innermost wins
        self.counted: dict[str, CountedRule] = {}  # by line

    def bind(self, op: Op, xs: Sequence[Tensor]) -> Rule:
        """Return the rule for an op of `xs` that is being created, counted at its caller's line."""
        counted = self.counted_at(find_caller())
        counted.hit.add(xs[0]._data.shape if xs else ())
        return counted

    def counted_at(self, where: str) -> CountedRule:
        """Return the rule as it is counted at a source line."""
        if where not in self.counted:
            self.counted[where] = CountedRule(self.rule, self.hit_at(where))
        return self.counted[where]

    def copy(self) -> OpBinding:
        """Return the same rule with hits of its own: those of a program while it is traced."""
        return OpBinding(self.op, self.rule, self.depth)

    def absorb(self, hit: Hit, count: int, ran: int) -> None:
        """Count hits of a compiled program that runs, which were `hit` when it was traced."""
        mine = self.hit_at(hit.where)
        mine.count += count
        mine.ran += ran
        mine.sizes.update(hit.sizes)

    def repeat(self) -> OpBinding:
        """Return the same rule for ops that are created again: only its runs are counted."""
        return RepeatedBinding(self)


Overrides = Mapping[Any, OpBinding] | None  # by op type; see `State` for other keys


class RepeatedBinding(OpBinding):
    """A binding under which ops are created that were counted before."""

    def __init__(self, first: OpBinding) -> None:
        super().__init__(first.op, first.rule, first.depth)
        self.counted_at: Callable[..., Any] = first.counted_at
        self.hit_at: Callable[..., Any] = first.hit_at

    def bind(self, op: Op, xs: Sequence[Tensor]) -> Rule:
        counted: Any = super().bind(op, xs)
        counted.hit.count -= 1
        return counted

    def repeat(self) -> OpBinding:
        return self


class Onlookers(OpBinding):
    """Counts ops that no rule concerns: those whose types have names like the keys of a map.

    They tell the likely reason where a key matches nothing. It stands for them all, under their
    types in the place of rules; all other ops are created as if there were no scope.
    """

    rule: Rule = NoGradient()
    depth = 0  # (any other binding wins)

    def __init__(self) -> None:
        self.op_type = self.rule_name = ""
        self.by_line = {}

    def bind(self, op: Op, xs: Sequence[Tensor]) -> Rule:
        self.hit_at(op.type).count += 1
        return op.rule

    def copy(self) -> Onlookers:
        return Onlookers()

    repeat = copy  # whose counts nobody reads


@lru_cache
def _alike(op_type: str, count: int) -> list[str]:
    """The other op types of a name like that, of so many that there are."""
    return [name for name in alike(op_type, OPS) if name != op_type]


class gradient_override_map(Scope[OpBinding]):
    """Within the scope, ops of the given types are differentiated by the given rules.

    Args:
        rules: `{op type: rule}`. A rule is a function, a name given to `RegisterGradient`, or
            an op type whose own rule is to be used (`{"Round": "Identity"}` is the
            straight-through estimator). Functions are in the native form `(dy, x, …)` or in
            TensorFlow's `(op, grad, …)`; see `gradient`. `rules.builtin("Relu")` is the op type's
            own rule as a function, for one that scales, clips or logs it.

    An op is bound when it is *created*; where and when it is differentiated does not matter.
    Scopes nest, and the inner one wins op type by op type. They hold in their own thread and
    asyncio task, and in jobs, threads and tasks that are handed in or started there. The rules
    themselves, and the backward pass, run with scopes masked.

    The object bound by `as` tells what happened: `hits` lists op type, rule, source line, how
    many ops were created and how often the rule ran, and `assert_fired()` raises unless each
    rule ran. Keys that matched nothing are named in an UnusedOverrideWarning, with what ran in
    their place; `rules.optional` marks those that may match nothing.

    As a decorator, `@gradient_override_map(rules)`, it opens a scope of its own for each call of
    the function; the hits of all calls are told by the object that decorates. What runs after
    the call (a generator, a coroutine) is refused.

    Raises:
        ArgumentError: the map is not a dict of op types to rules; the scope is left in another
            thread or context.
        UnknownOpError: an op type or rule name does not exist (with near names).
        RuleError: a rule asks for a name that the op type does not have.

    Source: `tf.Graph.gradient_override_map`, which checks neither keys nor names.

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"Sign": lambda dy, x: rg.where(abs(x) <= 1, dy, 0)}) as used:
    ...     rg.grad(rg.sign)(rg.tensor([-2.0, 0.5])).print()
    Tensor
        [0, 1]
    >>> used.assert_fired()
    """

    _onlookers = Onlookers()  # of a scope that is not open: none

    @helpful("gradient_override_map")
    def __init__(self, rules: Mapping[str, str | RuleFunction]) -> None:
        if not isinstance(rules, Mapping):
            raise ArgumentError(
                "gradient_override_map takes a dict of op types to rules, as in "
                f"gradient_override_map({{'Sign': rule}}), got {rules!r:.60}"
            )
        self._rules, self._marked = unmarked(rules)
        self._bindings: dict[str, OpBinding] = {}
        self._warn_unless_entered()

    def _steps(self) -> Generator[Self]:
        self._note_entry()
        before = current()
        inside = self._inside(before)
        try:
            jobs.SCOPES[inside] = None
            jobs.settle()
            tell_followers(inside)
            yield from stay(self, STATE, inside)
        except GeneratorExit:  # nobody can leave it any more: wherever it is in force, it ends
            inside.overrides, inside.left = before and before.overrides, (before,)
            warn_of_open_scope(self._name, self._opener)
            raise
        finally:
            if inside in jobs.SCOPES:
                del jobs.SCOPES[inside]
            jobs.settle()
            tell_followers(current())
        if current() is not before:  # a scope inside is open
            inside.left = (before,)
            raise left_out_of_turn()
        while before is not None and before.left is not None:
            before = before.left[0]
            STATE.set(before)
        self._warn_unless_hit()

    def _inside(self, before: State | None) -> State:
        """The state in the scope."""
        around = (before and before.overrides) or {}
        depth = 1 + max([b.depth for b in around.values()]) if around else 1
        ops = {key: OPS.get(key) or find_op(key) for key in self._rules}
        new = {
            op.type: OpBinding(op, self._resolve(self._rules[key], op), depth)
            for key, op in ops.items()
        }
        if len(new) < len(ops):  # (Add and AddV2 with one rule is what portable code says)
            given = {(op.type, identity_of(self._rules[key])) for key, op in ops.items()}
            if len(new) < len(given):
                raise ArgumentError(
                    f"two keys of the map name one op type: {', '.join(map(repr, ops))} are "
                    f"{', '.join(sorted({repr(op.type) for op in ops.values()}))}"
                )
        for key in self._marked:
            new[ops[key].type].optional = True
        self._bindings, self._onlookers = new, Onlookers()
        looked_at = [self._key(near) for op_type in new for near in _alike(op_type, len(OPS))]
        inside = {**dict.fromkeys(looked_at, self._onlookers), **around}
        inside.update({self._key(op_type): b for op_type, b in new.items()})
        return before.overriding(inside) if before is not None else State(overrides=inside)

    def _fresh(self, rules: Mapping[str, str | RuleFunction]) -> gradient_override_map:
        return gradient_override_map(rules)

    def _resolve(self, value: str | RuleFunction, op: Op) -> Rule:
        """The rule that an entry of the map stands for."""
        return resolve(value, op)

    def _key(self, op_type: str) -> Any:
        """Under what key a binding is found; a graph's own scope is found for its ops only."""
        return op_type

    def _collect(self, scope: Any) -> None:
        super()._collect(scope)
        self._onlookers = scope._onlookers

    def _others(self) -> Iterable[tuple[str, int]]:
        return [(hit.where, hit.count) for hit in self._onlookers.hits]

    def _hint(self) -> str:
        torch = " (For PyTorch code there is regrad.torch.gradient_override_map.)"
        jax = " (For JAX programs use rg.jax.override.)"
        return "the op type." + torch * ("torch" in sys.modules) + jax * ("jax" in sys.modules)

    def _key_of(self, op_type: str) -> str:
        return find_op(op_type).type
