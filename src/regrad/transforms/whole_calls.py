"""Whole calls of decorated functions as one op: keys `rg.at("block1")`, which name no op.

The call is a region whose tapes keep only its inputs, as in `checkpoint`. So regrad has everything
that the call captures, including Variables. The rule replaces the gradient of the region, and can
compute the region's own gradient by `builtin`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from regrad.autodiff.variables import Variable
from regrad.core.backends import is_inexact
from regrad.core.call import Call, as_name
from regrad.core.dispatch import lift
from regrad.core.foreign import ForeignRule, asks_for, names_for, whole_layout, whole_op
from regrad.core.name_scopes import CALLERS, PATH, Path
from regrad.core.placed import CALL, Chooser, hiding
from regrad.core.places import steps_of
from regrad.core.replacing import Replace, gradient_of
from regrad.core.rule import free
from regrad.core.signatures import named
from regrad.core.state import current, in_state, masked
from regrad.core.tensor import Tensor, wrap
from regrad.errors import ArgumentError, GradientError
from regrad.graph.graph import is_symbolic
from regrad.transforms.arguments import Body, OpenedArguments
from regrad.transforms.checkpoint import recomputed
from regrad.transforms.region import Passage


def call(f: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call a decorated function, under the rule for the whole call if one exists."""
    state = current()
    binding: Any = state and state.overrides and state.overrides.get(CALL.type)
    if state is None or not binding:
        return f(*args, **options)
    pairs = named(f, args, options)
    options = dict(pairs[len(args) :])
    given = OpenedArguments((args, (*options.values(),)), {})
    bound = binding.bind(CALL, given.tensors)
    if bound is None:
        return f(*args, **options)
    path = ".".join(PATH.get())
    if any(map(is_symbolic, given.tensors)):
        raise GradientError(
            f"the call of {path!r} has a rule for the whole call, and was made in a graph. Define "
            "a gradient for the function with custom_grad, or call it in eager mode or under jit."
        )
    whole = WholeCall(f.__name__, bound, pairs, len(given.tensors))
    body = Body(lambda args, more: f(*args, **dict(zip(options, more, strict=True))), given)
    if isinstance(whole.value, Replace):
        body = ReplacedBody(body, whole)
    with in_state(state.overriding(hiding(state.overrides, path))):
        ys = recomputed(body, given.tensors, whole)
    return body.note(ys)


class WholeCall:
    """A call of a function under a rule for the whole call."""

    def __init__(self, name: str, rule: Any, given: Sequence[tuple[str, Any]], count: int) -> None:
        self.name = name
        self.hit: Any = rule.hit
        self.value: Any = rule.bare.value
        self.count = count  # the number of Tensor arguments
        self.names: list[str] = [name for name, x in given if isinstance(x, Tensor)]
        self.attrs: dict[str, Any] = {free(n): x for n, x in given if not isinstance(x, Tensor)}
        self.parameters: list[str] | None = None

    def bound(self, value: Any, moving: Sequence[bool], parameters: Sequence[str]) -> ForeignRule:
        """Return a rule or a replacement, bound to the names of this call."""
        asks = [name for name in asks_for(value) if name not in parameters]
        names = names_for(asks, self.names, moving)
        return ForeignRule(value, whole_op(self.name, names, parameters, self.attrs))

    def know(self, captured: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Record the Variables (by name) and Tensors that the call captured.

        `outputs` are the shapes and dtypes of its results.
        """
        self.outputs: Sequence[Any] = outputs
        if self.parameters is None:
            self.parameters = names_of(captured)

    def derive(
        self, own: Any, is_reverse: bool, function: Any, inputs: Sequence[Tensor],
        passage: Passage, dys: Sequence[Tensor],
    ) -> Sequence[Any]:  # fmt: skip
        """Return the rule's gradients by the wanted inputs, which replace the region's own."""
        if not is_reverse:
            raise GradientError(
                f"forward mode: the call of {self.name!r} has a rule for the whole call, which "
                "applies in reverse mode (grad, vjp)."
            )
        self.hit.pulled()
        passage, given = passage.whole, dict(zip(passage.reached, dys, strict=True))
        zeros = {i: wrap(np.zeros(*self.outputs[i])) for i in passage.reached if i not in given}
        dys = [given[i] if i in given else zeros[i] for i in passage.reached]
        assert self.parameters is not None
        moving = [i in passage.wanted for i in range(self.count)]
        rule = self.bound(gradient_of(self.value), moving, self.parameters)
        ys = function(inputs) if rule.keeps(range(len(rule.op.inputs)))[1] else [None]
        layout = whole_layout(rule.op, self.count, len(inputs))
        specs = [(x.shape, x.dtype) for x in inputs]
        many = [(dy.shape, dy.dtype) for dy in dys] if len(dys) > 1 else None
        pulls = WholeCallPulls(own, function, inputs, passage, zeros.values())
        one = Call(rule, specs, self.attrs, layout, many, self.hit, pulls)
        pair = (tuple(ys), tuple(dys)) if many else (ys[0], dys[0])
        return one.pull(inputs, *pair, passage.wanted)


def names_of(captured: Sequence[Any]) -> list[str]:
    """Return the names of the Variables and Tensors that a call captured."""
    return [
        as_name(each.name) if isinstance(each, Variable) and each.is_named else f"outer{i}"
        for i, each in enumerate(captured)
    ]


class ReplacedBody:
    """The body of a call whose value a rule replaces.

    It runs the function too, which shows what the call captures, and the shapes of the results.
    """

    def __init__(self, body: Body, whole: WholeCall) -> None:
        self.body = body
        self.function: Any = body.function
        self.whole = whole
        self.captured: list[Any] | None = None

    @property
    def note(self) -> Any:
        return self.body.note

    def __call__(self, xs: Sequence[Tensor]) -> Sequence[Tensor]:
        own, whole, region = self.body(xs), self.whole, current().region  # pyright: ignore
        if self.captured is None:
            self.captured = [*region.captured]
        more = [v._read() if isinstance(v, Variable) else region.enter(v) for v in self.captured]
        moving = [is_inexact(x.dtype) for x in xs]
        rule = whole.bound(whole.value, moving, names_of(self.captured))
        every, forward = [*xs, *more], rule.forward
        assert forward is not None
        layout = whole_layout(rule.op, len(xs), len(every))
        specs = [(x.shape, x.dtype) for x in every]
        call = Call(rule, specs, whole.attrs, layout, None, whole.hit, OwnFunction(self.body))
        with masked():
            made = call.value(every, tuple(own) if len(own) > 1 else own[0])
            ys = [lift(y) for y in forward.outputs_of(made)]
        return forward.check(ys, own, lambda y: isinstance(y, Tensor), whole.hit.where)


class OwnFunction:
    """The call's own function, for `forward` in the function that replaces it."""

    vjp: Any = None

    def __init__(self, body: Body) -> None:
        self.body = body

    def pull(self, xs: Sequence[Any], dys: Sequence[Any], only: int | None = None) -> Any:
        """Raise, because only a gradient has `builtin`."""
        raise AssertionError

    def values_at(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Return the function's results for other inputs."""
        return self.body([*map(lift, leaves)])


class WholeCallPulls:
    """The call's own gradient and value, for `builtin` and `forward` in its rule."""

    vjp: Any = None

    def __init__(
        self, own: Any, function: Any, inputs: Any, passage: Any, zeros: Iterable[Tensor]
    ) -> None:
        self.own: Any = own
        self.function: Any = function
        self.inputs: Sequence[Tensor] = inputs
        self.passage: Passage = passage
        self.unused: list[Tensor] = [*zeros]  # replacements for missing gradients

    def pull(self, xs: Sequence[Any], dys: Sequence[Any], only: int | None = None) -> Any:
        """Return the call's own gradients, by leaf."""
        pairs = zip(self.passage.reached, map(lift, dys), strict=True)
        given = {i: dy for i, dy in pairs if not any(dy is zero for zero in self.unused)}
        part = self.passage.narrowed(given)
        found = self.own([*given.values()], part) if given else ()
        return dict(zip(part.wanted, found, strict=True))

    def values_at(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Return the function's results for other inputs."""
        return self.function([*map(lift, leaves), *self.inputs[len(leaves) :]])


def refuse_block(path: Path) -> None:
    """Raise for a key for whole calls that selects a scope which is a block, not a call."""
    state = current()
    binding = state and state.overrides and state.overrides.get(CALL.type)
    steps = steps_of(path)
    for fit in binding.places.fits(steps) if isinstance(binding, Chooser) else ():
        if not fit.predicates:
            raise ArgumentError(
                f"{fit.key!r} selects whole calls as one op, but the scope {steps[-1].path!r} is "
                "a block. Decorate a function with it, @rg.name_scope(...), or name the op type "
                "of the key: rg.at(where, 'Relu')."
            )


CALLERS.append((call, refuse_block))
