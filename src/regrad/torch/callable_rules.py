"""Rules for torch callables that are not op types of regrad: the names they may use in a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from regrad.core.call import OwnOfOne
from regrad.core.foreign import USUAL, ForeignRule, asks_for, first_bound, names_for
from regrad.core.registry import Input, Op, not_yet
from regrad.core.rule import free
from regrad.torch.host.running import find_forward, forms_of


class CallableRule(ForeignRule):
    """A rule for a torch callable that is not an op type of regrad, or for an `autograd.Function`.

    The rule may name the parameters of the callable. If the call has one tensor, or only one tensor
    is differentiated, the rule may also call it x. Two tensors are also a and b, and any number of
    tensors is also the list xs.
    """

    def __init__(self, value: Any, op: Op, key: Any) -> None:
        self.value = value
        self.asked: list[str] = asks_for(value)
        self.forms: list[dict[str, Any]] = parameters_of(key)
        self.by_form: dict[Any, ForeignRule] = {}
        self.known: dict[Any, Any] = {}  # (see `call_cache`)
        every = dict.fromkeys([*[free(n) for form in self.forms for n in form], "x", "a", "b"])
        _bound(partial(super().__init__, value), op.type, [*every, "xs"])

    def for_call(self, filled: Any) -> ForeignRule:
        """Return the rule for a call with these arguments."""
        return self.with_names(filled.names, [x.requires_grad for x in filled.values], filled.attrs)

    def with_names(
        self, names: Sequence[str | None], moving: Sequence[bool], attrs: Mapping[str, Any]
    ) -> ForeignRule:
        """Return the rule for a call with tensors of these names, some of them differentiated."""
        asked = [name for name in self.asked if name not in attrs]
        inputs = names_for(asked, names, moving)
        form = len(names), *inputs, *attrs
        if form not in self.by_form:
            make = partial(ForeignRule, self.value)
            self.by_form[form] = _bound(make, self.op.type, inputs, [*attrs], len(names))
        return self.by_form[form]


def parameters_of(key: Any) -> list[dict[str, Any]]:
    """Return the parameters of a key that a rule may name, with their defaults, for each form."""
    if not isinstance(key, type):
        return forms_of(key)
    every = [*inspect.signature(find_forward(key)).parameters.values()]
    if key.setup_context is torch.autograd.Function.setup_context:
        every = every[1:]  # (without the context)
    return [{free(p.name): p.default for p in every if p.kind is p.POSITIONAL_OR_KEYWORD}]


def _bound(
    make: Callable[[Op], Any], name: str, names: Sequence[str], attrs: Sequence[str] = (),
    count: int | None = None,
) -> Any:  # fmt: skip
    """Return the rule for an op with these inputs, or with `count` tensors under usual names."""
    usual = [each for n, each in USUAL.items() if count in (None, n)]
    ops = []
    for each in [names, *usual, ["xs"]]:
        inputs = [Input(n, "many" if n == "xs" and each == ["xs"] else "one") for n in each]
        ops.append(Op(name, name, not_yet, inputs, attrs))
        ops[-1].rule = OwnOfOne()
    return first_bound(make, ops)
