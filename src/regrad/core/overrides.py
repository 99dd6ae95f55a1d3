"""`gradient_override_map`: apply rules by op type within a scope."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from operator import call
from typing import Any, Self

from regrad.core import dispatch, jobs, placed
from regrad.core.bindings import Onlookers, OpBinding
from regrad.core.blocks import stay
from regrad.core.callers import warn_of_open_scope
from regrad.core.parameters import ParameterBinding, split
from regrad.core.places import at, spread
from regrad.core.registry import OPS, Op, find_op, resolve
from regrad.core.replacing import Replace, ReplacingRule, check_values, gradient_of
from regrad.core.rule import Rule, identity_of
from regrad.core.scopes import Scope, check_order, left_out_of_turn, unmarked
from regrad.core.signatures import helpful
from regrad.core.state import STATE, State, current, telling
from regrad.core.surrogates import Learns
from regrad.errors import ArgumentError, alike


@lru_cache
def _alike(op_type: str, count: int) -> list[str]:
    """Return the other op types with a similar name. `count` is the number of op types."""
    return [name for name in alike(op_type, OPS) if name != op_type]


class gradient_override_map(Scope[OpBinding]):
    """Differentiate ops of the given types by the given rules, within the scope.

    Args:
        rules: `{op type: rule}`. A rule is a function, a name registered with `RegisterGradient`,
            or an op type, whose own rule then applies (`{"Round": "Identity"}` is the
            straight-through estimator). Functions have the native form `(dy, x, …)` or
            TensorFlow's `(op, grad, …)`; see `gradient`. The parameter `builtin` is the op's own
            gradient, for a rule that scales, clips or logs it, as in `lambda dy, builtin:
            3 * builtin(dy)`. The parameter `forward` is the op as a function of its inputs. A key
            `rg.at("block1.*", "Relu")` applies in one place only: in the scopes of `name_scope`
            that the pattern matches, in a function, in a `Module` or a class of them. A rule may
            take the `site` of its op.
        values: Whether rules may replace values, as `rg.replace(forward)` does.
        order: By default the rules apply at every order: if a gradient that the rules made is
            differentiated, they also apply to the forward pass. With `order=1` the rules define
            only the first derivative. Derivatives of that gradient are then true derivatives: of
            the rules' formulas, and, for all other ops, by the ops' own gradients.

    The scope binds an op when the op is *created*. It does not matter where and when the op is
    differentiated. Scopes nest, and the inner scope wins for each op type. A scope applies to its
    own thread and asyncio task, and to jobs, threads and tasks that are submitted or started there.
    Scopes do not apply inside the rules themselves, or in the backward pass.

    The object bound by `as` reports which ops the rules changed. `hits` lists op type, rule, source
    line, how many ops were created and how often the rule ran. `assert_fired()` raises unless each
    rule ran. An UnusedOverrideWarning names the keys that matched nothing, and the ops that ran
    instead. Mark keys that may match nothing with `rules.optional`.

    As a decorator, `@gradient_override_map(rules)`, it opens its own scope for each call of the
    function. The decorating object reports the hits of all calls. It raises for a function that
    runs after its call (a generator, a coroutine).

    Raises:
        ArgumentError: the map is not a dict of op types to rules; a key for whole calls names no
            scope that decorates; two keys select one place; a rule replaces values without
            `values=True`; `order` is neither None nor 1; the scope is exited in another thread or
            context.
        GradientError: a key counts calls in a compiled loop or branch; `order=1` where a gradient
            of a gradient passes one.
        UnknownOpError: an op type or rule name does not exist (with similar names).
        RuleError: a rule takes a name that the op type does not have.

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

    _onlookers = Onlookers()  # (empty until the scope is open)

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
        ops, _ = split(self._rules)
        check_values(ops, values, order, "gradient_override_map(rules, values=True)")
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
        except GeneratorExit:  # the object is collected, so no code can exit the scope: end it
            inside.overrides, inside.left = before and before.overrides, (before,)
            warn_of_open_scope(self._name, self._opener)
            raise
        finally:
            if inside in jobs.SCOPES:
                del jobs.SCOPES[inside]
            jobs.settle()
        if current() is not before:  # an inner scope is still open
            inside.left = (before,)
            raise left_out_of_turn()
        while before is not None and before.left is not None:
            before = before.left[0]
            list(map(call, (partial(STATE.set, before), *telling(before))))
        self._warn_unless_hit()

    def _inside(self, before: State | None) -> State:
        """Return the state within the scope."""
        around = (before and before.overrides) or {}
        depth = 1 + max([b.depth for b in around.values()]) if around else 1
        new: dict[Any, OpBinding] = {}  # by op type, or by the place as well
        given: dict[Any, Any] = {}
        rules, held = split(self._rules)
        for key, value in held.items():
            stands = placed.Placed(self._key(dispatch.PARAMETER.type), key.meaning, depth)
            rule = self._resolve(value, dispatch.PARAMETER)
            made = new[repr(key)] = ParameterBinding(key, rule, depth, stands)
            made.marked, made.once = key in self._marked, self._order == 1
        parameters = {b.key: b for b in new.values()}
        for key, value in rules.items():
            sisters: list[OpBinding] = []
            for name in placed.op_types(key):
                op = name if name is placed.CALL else OPS.get(name) or find_op(name)
                place = placed.place_of(key, op, value)
                stands = placed.Placed(self._key(op.type), place and place.identity, depth)
                known = given.setdefault(stands, value)
                if known is not value and identity_of(known) != identity_of(value):
                    # (portable code may have Add and AddV2 with one rule)
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
        ops = [b for b in new.values() if b.key not in parameters]
        inside |= {**parameters, **placed.choosers(ops, around)}
        return before.overriding(inside) if before is not None else State(overrides=inside)

    def _bound(self, value: Any, op: Op, key: placed.Placed, place: at | None) -> OpBinding:
        """Return the binding of an entry of the map, with its key in a state."""
        if place is not None and placed.asks_site(value, op):
            at_site = lambda site: self._resolve(placed.with_site(value, site), op)  # noqa: E731
            return OpBinding(op, at_site(None), key.depth, key, at_site, place)
        return OpBinding(op, self._resolve(value, op), key.depth, key, place=place)

    def _fresh(self, rules: Mapping[Any, Any]) -> gradient_override_map:
        return gradient_override_map(rules, values=self._values, order=self._order)

    def _resolve(self, value: Any, op: Op) -> Rule:
        """Return the rule for an entry of the map."""
        if op is placed.CALL:
            if isinstance(gradient_of(value), Learns):
                raise ArgumentError(
                    f"{value!r} is for a whole call here, and the parameters of a whole call are "
                    "the Variables that it reads. Read the parameter in the function, and return "
                    "its gradient by name."
                )
            return placed.WholeCallRule(value)
        is_run_as_another = isinstance(value, Replace | Learns)
        return ReplacingRule(value, op) if is_run_as_another else resolve(value, op)

    def _key(self, op_type: str) -> Any:
        """Return the key of a binding. A graph's own scope has other keys, for its ops alone."""
        return op_type

    def _collect(self, scope: Any) -> None:
        super()._collect(scope)
        self._onlookers = scope._onlookers

    def _instead(self, binding: OpBinding) -> str:
        if isinstance(binding, ParameterBinding):
            return binding.unread()
        return placed.elsewhere(binding) or super()._instead(binding)

    def _why_not(self, binding: OpBinding) -> str:
        return placed.elsewhere(binding) or super()._why_not(binding)

    def assert_fired(self, *op_types: Any) -> None:
        meant = [key for op_type in op_types for key in self._meant(op_type)]
        super().assert_fired(*meant)

    def _meant(self, asked: Any) -> list[str]:
        """Return the keys of this scope that match: one place, or an op type in all places."""
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
