"""`gradient_override_map`: rules put in force by op type, within a scope."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from operator import call
from typing import Any, Self

from regrad.core import jobs, placed
from regrad.core.bindings import Onlookers, OpBinding
from regrad.core.blocks import stay
from regrad.core.callers import warn_of_open_scope
from regrad.core.places import at, spread
from regrad.core.registry import OPS, Op, find_op, resolve
from regrad.core.replacing import Replace, ReplacingRule, check_values
from regrad.core.rule import Rule, identity_of
from regrad.core.scopes import Scope, check_order, left_out_of_turn, unmarked
from regrad.core.signatures import helpful
from regrad.core.state import STATE, State, current, telling
from regrad.core.surrogates import Learns
from regrad.errors import ArgumentError, alike


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
            TensorFlow's `(op, grad, …)`; see `gradient`. The parameter `builtin` is the op's own
            gradient, for a rule that scales, clips or logs it, as in `lambda dy, builtin:
            3 * builtin(dy)`; `forward` is the op as a function of its inputs. A key
            `rg.at("block1.*", "Relu")` holds in one place only: in the scopes of `name_scope` that
            the pattern names, in a function, in a `Module` or a class of them. A rule may ask for
            the `site` of its op.
        values: whether rules may replace values, as `rg.replace(forward)` does.
        order: By default the rules hold at every order: where a gradient that they made is
            differentiated, the forward pass is differentiated by them, too. With `order=1` they
            give the first derivative alone, and derivatives of that gradient are true ones: of the
            rules' formulas, and of all else by the ops' own gradients.

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
        ArgumentError: the map is not a dict of op types to rules; a key for whole calls names no
            scope that decorates; two keys select one place; a rule replaces values without
            `values=True`; `order` is neither None nor 1; the scope is left in another thread or
            context.
        GradientError: a key counts calls in a compiled loop or branch; `order=1` where a gradient
            of a gradient passes one.
        UnknownOpError: an op type or rule name does not exist (with near names).
        RuleError: a rule asks for a name that the op type does not have.

    Source: `tf.Graph.gradient_override_map`, which checks neither keys nor names.

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"Sign": lambda dy, x: rg.where(abs(x) <= 1, dy, 0)}) as used:
    ...     rg.grad(rg.sign)(rg.tensor([-2.0, 0.5])).print()
    Tensor
        [0, 1]
    >>> used.assert_fired()
    >>> def relevance(x, order):
    ...     with rg.gradient_override_map({"Tanh": lambda dy, y: dy * y}, order=order):
    ...         return rg.grad(lambda x: rg.tanh(x) ** 2)(x)  # 2 tanh(x)²
    >>> for order in (None, 1):
    ...     print(round(rg.grad(lambda x: relevance(x, order))(0.5).item(), 4))
    0.8542
    1.4537
    """

    _onlookers = Onlookers()  # of a scope that is not open: none

    @helpful("gradient_override_map")
    def __init__(
        self, rules: Mapping[Any, Any], *, values: bool = False, order: int | None = None
    ) -> None:
        if not isinstance(rules, Mapping):
            raise ArgumentError(
                "gradient_override_map takes a dict of op types to rules, as in "
                f"gradient_override_map({{'Sign': rule}}), got {rules!r:.60}"
            )
        self._order = check_order("gradient_override_map", order)
        self._rules, self._marked = unmarked(spread(rules))
        check_values(self._rules, values, order, "gradient_override_map(rules, values=True)")
        self._values = values
        self._bindings: dict[Any, OpBinding] = {}
        self._warn_unless_entered()

    def _steps(self) -> Generator[Self]:
        self._note_entry()
        before = current()
        inside = self._inside(before)
        try:
            jobs.SCOPES[inside] = None
            jobs.settle()
            yield from stay(self, STATE, inside, telling)
        except GeneratorExit:  # nobody can leave it any more: wherever it is in force, it ends
            inside.overrides, inside.left = before and before.overrides, (before,)
            warn_of_open_scope(self._name, self._opener)
            raise
        finally:
            if inside in jobs.SCOPES:
                del jobs.SCOPES[inside]
            jobs.settle()
        if current() is not before:  # a scope inside is open
            inside.left = (before,)
            raise left_out_of_turn()
        while before is not None and before.left is not None:
            before = before.left[0]
            list(map(call, (partial(STATE.set, before), *telling(before))))
        self._warn_unless_hit()

    def _inside(self, before: State | None) -> State:
        """The state in the scope."""
        around = (before and before.overrides) or {}
        depth = 1 + max([b.depth for b in around.values()]) if around else 1
        new: dict[Any, OpBinding] = {}  # by op type, or by the place as well
        given: dict[Any, Any] = {}
        for key, value in self._rules.items():
            sisters: list[OpBinding] = []
            for name in placed.op_types(key):
                op = name if name is placed.CALL else OPS.get(name) or find_op(name)
                place = placed.place_of(key, op, value)
                stands = placed.Placed(self._key(op.type), place and place.identity, depth)
                known = given.setdefault(stands, value)
                if known is not value and identity_of(known) != identity_of(value):
                    # (Add and AddV2 with one rule is what portable code says)
                    raise ArgumentError(
                        f"two keys of the map name one op type: {', '.join(map(repr, self._rules))}"
                        f" are {', '.join(sorted({repr(b.op_type) for b in new.values()}))}"
                    )
                binding = self._bound(value, op, stands, place)
                binding.marked, binding.sisters = key in self._marked, sisters
                binding.once = self._order == 1
                sisters.append(binding)
                new[op.type if binding.kind else binding.shown] = binding
        self._bindings, self._onlookers = new, Onlookers()
        types = {b.op_type for b in new.values()}
        looked_at = [self._key(near) for op_type in types for near in _alike(op_type, len(OPS))]
        inside = {**dict.fromkeys(looked_at, self._onlookers), **around}
        inside.update(placed.choosers(new.values(), around))
        return before.overriding(inside) if before is not None else State(overrides=inside)

    def _bound(self, value: Any, op: Op, key: placed.Placed, place: at | None) -> OpBinding:
        """Return the binding of an entry of the map, to stand under a key in a state."""
        if place is not None and placed.asks_site(value, op):
            at_site = lambda site: self._resolve(placed.with_site(value, site), op)  # noqa: E731
            return OpBinding(op, at_site(None), key.depth, key, at_site, place)
        return OpBinding(op, self._resolve(value, op), key.depth, key, place=place)

    def _fresh(self, rules: Mapping[Any, Any]) -> gradient_override_map:
        return gradient_override_map(rules, values=self._values, order=self._order)

    def _resolve(self, value: Any, op: Op) -> Rule:
        """The rule that an entry of the map stands for."""
        if op is placed.CALL:
            if isinstance(value, Learns):
                raise ArgumentError(
                    f"{value!r} is for a whole call here, whose parameters are the Variables that "
                    "it reads. Read the parameter in the function, and return its gradient by name."
                )
            return placed.WholeCallRule(value)
        is_run_as_another = isinstance(value, Replace | Learns)
        return ReplacingRule(value, op) if is_run_as_another else resolve(value, op)

    def _key(self, op_type: str) -> Any:
        """Under what key a binding is found; a graph's own scope is found for its ops only."""
        return op_type

    def _collect(self, scope: Any) -> None:
        super()._collect(scope)
        self._onlookers = scope._onlookers

    def _instead(self, binding: OpBinding) -> str:
        return placed.elsewhere(binding) or super()._instead(binding)

    def _why_not(self, binding: OpBinding) -> str:
        return placed.elsewhere(binding) or super()._why_not(binding)

    def assert_fired(self, *op_types: Any) -> None:
        meant = [key for op_type in op_types for key in self._meant(op_type)]
        super().assert_fired(*meant)

    def _meant(self, asked: Any) -> list[str]:
        """The keys of this scope that are meant: one place, or an op type in all places."""
        if isinstance(asked, at):
            if asked.what is None:
                return [repr(asked)]
            return [repr(replace(asked, what=find_op(t).type)) for t in placed.op_types(asked)]
        of_type = [key for key, b in self._bindings.items() if b.op_type == find_op(asked).type]
        return of_type or [asked]

    def _others(self) -> Iterable[tuple[str, int]]:
        return [(hit.where, hit.count) for hit in self._onlookers.hits]

    def _hint(self) -> str:
        torch = " (For PyTorch code there is regrad.torch.gradient_override_map.)"
        jax = " (For JAX programs use rg.jax.override.)"
        return "the op type." + torch * ("torch" in sys.modules) + jax * ("jax" in sys.modules)

    def _key_of(self, op_type: str) -> str:
        return op_type if op_type.startswith("rg.at(") else find_op(op_type).type
