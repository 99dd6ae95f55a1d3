"""Rules for torch callables that are not op types of regrad: what they may name in a call."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from regrad.core.foreign import ForeignRule, OwnOfOne, asks_for
from regrad.core.registry import Input, Op
from regrad.core.rule import free
from regrad.errors import RuleError
from regrad.torch.host.running import find_forward


class RuleByCount(ForeignRule):
    """A rule for a torch callable that is not an op type of regrad.

    Its tensors are called x, or a and b; or xs, a list, however many there are.
    """

    def __init__(self, value: Any, op: Op, key: Any = None) -> None:
        self.value = value
        self.by_count: dict[int, ForeignRule] = {}
        errors: list[RuleError] = []
        for count in (1, 2, 3):
            try:
                super().__init__(value, _op_of(op.type, count))
                return
            except RuleError as error:
                errors.append(error)
        raise errors[0]

    def for_count(self, count: int) -> ForeignRule:
        """Return the rule for a call with so many tensors."""
        if count not in self.by_count:
            try:
                rule = ForeignRule(self.value, _op_of(self.op.type, count))
            except RuleError:  # it asks for xs
                rule = ForeignRule(self.value, _op_of(self.op.type, 3))
            self.by_count[count] = rule
        return self.by_count[count]


class FunctionRule(ForeignRule):
    """A rule for an `autograd.Function`: it may name the parameters of the forward pass.

    Of several tensors the one that is differentiated is called x as well, if there is only one. The
    names of `RuleByCount` go on working: a and b of two, xs of any number.
    """

    def __init__(self, value: Any, op: Op, function: Any) -> None:
        self.value = value
        self.parameters: list[str] = parameters_of(function)
        self.by_call: dict[Any, ForeignRule] = {}
        self.known: dict[Any, Any] = {}  # (see `call_cache`)
        known = dict.fromkeys([*self.parameters, "x", "a", "b", "xs"])
        super().__init__(value, _op_named(op.type, [Input(n, "one") for n in known], ()))

    def for_call(self, args: Sequence[Any], moving: Sequence[int]) -> ForeignRule:
        """Return the rule for a call with these arguments, some of which are differentiated."""
        places = tuple([i for i, x in enumerate(args) if isinstance(x, torch.Tensor)])
        call = places, tuple(moving), len(args)
        if call not in self.by_call:
            self.by_call[call] = self._for(places, moving, len(args))
        return self.by_call[call]

    def _for(self, places: Sequence[int], moving: Sequence[int], count: int) -> ForeignRule:
        asked = {*asks_for(self.value)} - {*self.parameters}
        if "xs" in asked or {"a", "b"} & asked:
            return ForeignRule(
                self.value, _op_of(self.op.type, 3 if "xs" in asked else len(places))
            )
        names = [*self.parameters, *(f"args{i}" for i in range(count))][:count]
        if "x" in asked and len(only := moving if len(places) > 1 else places) == 1:
            names[only[0]] = "x"
        inputs = [Input(names[i], "one") for i in places]
        attrs = [name for i, name in enumerate(names) if i not in places]
        return ForeignRule(self.value, _op_named(self.op.type, inputs, attrs))

    def attrs(self, args: Sequence[Any]) -> dict[str, Any]:
        """Return the arguments that are not tensors, by name."""
        pairs = zip(self.parameters, args, strict=False)
        return {name: x for name, x in pairs if not isinstance(x, torch.Tensor)}


def parameters_of(function: Any) -> list[str]:
    """The names of what an `autograd.Function` is applied to, as a rule may ask for them."""
    every = list(inspect.signature(find_forward(function)).parameters.values())
    if function.setup_context is torch.autograd.Function.setup_context:
        every = every[1:]  # the first is its context
    return [free(p.name) for p in every if p.kind is p.POSITIONAL_OR_KEYWORD]


def _op_named(name: str, inputs: Sequence[Input], attrs: Sequence[str]) -> Op:
    op = Op(name, name, lambda xp, *xs: xs, inputs, attrs)
    op.rule = OwnOfOne()
    return op


def _op_of(name: str, count: int) -> Op:
    """An op of so many tensors."""
    names = {1: ["x"], 2: ["a", "b"]}.get(count)
    inputs = [Input(n, "one") for n in names] if names else [Input("xs", "many")]
    return Op(name, name, lambda xp, *xs: xs, inputs)
