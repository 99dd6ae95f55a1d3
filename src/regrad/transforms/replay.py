"""Python that runs once: the actions of a body, recorded so that they can be repeated.

A traced body (of `jit`, `cond`, `scan`, `vmap`, …) may be needed several times: its gradient is a
loop or a branch of its own, and so is the gradient of the gradient. The user's Python must not run
again for it. It may count its calls, draw numbers, or read state that has changed since, and would
then return the gradient of another function. So its first run is *captured* as a list of steps: ops
with their attributes and active rules, custom functions, regions, and the wiring of the Tensors. To
run the body again, regrad replays the steps on other inputs.

`steps` defines the steps, and how they run on other inputs.

Invariants:

* An array that another library computed in the trace is neither a constant nor the result of a
  step: it is a *stranger*. A body that has strangers without a recorded origin is not `complete`.
* The Python runs again for a body that is not complete, and for an eager `checkpoint`, which must
  free its intermediate values. It must do the same as in the first run (see `trail`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

from regrad.autodiff.custom_calls import CustomCall
from regrad.core import containers, dispatch
from regrad.core.backends import is_inexact, is_traced
from regrad.core.blocks import block
from regrad.core.registry import Op
from regrad.core.rule import Rule
from regrad.core.state import State, current, in_state, next_id, open_tapes
from regrad.core.tape import Place, Tape
from regrad.core.tensor import Readable, Tensor
from regrad.transforms.arguments import is_key, noted
from regrad.transforms.closures import Closure
from regrad.transforms.steps import (
    BodyStep,
    CustomRun,
    Env,
    Id,
    Ref,
    RegionRun,
    as_written,
    at,
    computed,
    held,
    pull_region,
    run_op,
    run_strangers,
    sliced,
)
from regrad.transforms.trail import Trail, capturing, resolved

if TYPE_CHECKING:
    from regrad.core.backends import Array
    from regrad.core.registry import Attrs
    from regrad.core.rule import Cotangent
    from regrad.core.tape import Result
    from regrad.transforms.region import Passage, Region, RegionRule

Flat = Callable[[Sequence[Tensor]], Sequence[Tensor]]  # a body without containers


class Capture(Trail):
    """A first run: its steps, and the values that it captured from outside."""

    def __init__(self, kind: str, xs: Sequence[Tensor], expected: Trail | None = None) -> None:
        super().__init__(kind, xs, expected)
        state = current()
        # Tapes beyond this depth were opened by the body itself, for example by a call of `grad`.
        self.depth: int = 0 if state is None else len(state.tapes)
        self.open: int = 0 if state is None else len(open_tapes(state))
        self.mark: int = next_id()
        self.steps: list[BodyStep] = []
        self.strangers: dict[int, tuple[int, Any]] = {}  # id() of an array: a number, the array
        self.patchy = False  # an inner body has strangers without a recorded origin
        self.passages: set[Any] = set()  # passages of inner regions
        self.pulls: set[Any] = set()  # passages through which the body itself computed a gradient

    def _keep(self, run: Any, refs: Sequence[Ref], ys: Sequence[Tensor]) -> None:
        self.steps.append(BodyStep(run, refs, _ids(ys)))

    def ref(self, x: Tensor) -> Ref:
        """Return the reference by which a replay finds an input of a step."""
        if x._id in self.places:
            return x._id
        if 0 < x._id < self.mark:  # made earlier in this region: a gradient function saved it
            self.source(x, x)
            return x._id
        if not is_traced(x._data):
            return x
        # Computed by another library in this trace (for example from a JAX key).
        return self.strangers.setdefault(id(x._data), (next_id(), x._data))[0]

    def did(
        self, op: Op, rule: Rule, xs: Sequence[Tensor], attrs: Attrs, y: Result,
        layout: tuple[Place, ...] | None = None,
    ) -> None:  # fmt: skip
        refs = [self.ref(x) for x in xs]
        if rule.once and len(open_tapes(current() or State())) > self.open:
            rule = op.rule  # the body differentiates the op itself: outside, that is a gradient
        super().did(op, rule, xs, attrs, y, layout)
        outputs = y if isinstance(y, tuple) else (y,)
        self._keep(partial(run_op, op, rule, attrs, layout), refs, outputs)

    def custom(self, call: CustomCall, run: Callable[[], Any], state: State) -> Any:
        # The ops inside are steps of the call: a replay runs them as its body, under its gradient.
        outer, self.steps = self.steps, []
        call.steps = outer
        try:
            value = run()
            leaves, close = containers.flatten(value)
            inside = [self.ref(leaf) for leaf in leaves]
        finally:
            inner, self.steps = self.steps, outer
            call.steps = None
        inputs = call.inputs  # (with the Variables that f has read)
        refs = [self.ref(x) for x in inputs]
        back = CapturedGradient(call)
        call.written = call.written or call.grad_func
        call.grad_func = as_written(call, back)  # shared by all replays
        ids = {x._id for x in inputs}
        cut = any(not tape.watched.isdisjoint(ids) for tape in state.tapes[self.depth :])
        outputs = call.recorded(value, state)
        ys = containers.flatten(outputs)[0]
        self.made(ys)
        self._keep(CustomRun(call, back, inner, inside, close, cut), refs, ys)
        return outputs

    def region(
        self,
        kind: str,
        xs: Sequence[Tensor],
        ys: Sequence[Tensor],
        again: Flat,
        rule: RegionRule | None,
    ) -> None:
        passage = None if rule is None else rule.passage
        self.passages.add(passage)
        self._keep(RegionRun(again, passage, self.pulls), [self.ref(x) for x in xs], ys)
        super().region(kind, xs, ys, again, rule)

    def pulled(self, passage: Passage, dys: Sequence[Tensor], dxs: Sequence[Tensor]) -> None:
        """Record the backward pass of a region in here, where it is not a region itself."""
        self.pulls.add(passage.whole)
        self._keep(partial(pull_region, passage), [self.ref(dy) for dy in dys], dxs)
        # (The tapes outside determine for which inputs there are gradients.)
        for i, dx in zip(passage.wanted, dxs, strict=True):
            self.places[dx._id] = "gradient", len(self.pulls), i

    def foreign(
        self,
        function: Callable[[Sequence[Array]], Sequence[Array]],
        read: Callable[[Tensor], Array],
        xs: Sequence[Tensor],
        ys: Sequence[Tensor],
    ) -> None:
        self._keep(partial(computed, function, read), [self.ref(x) for x in xs], ys)
        super().foreign(function, read, xs, ys)

    def body(self, captured: Captured, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
        for source, number in captured.first.sources:
            value = self.assigned.get(source) if isinstance(source, Readable) else None
            if value is None:
                self.reach(source, number)
            elif number not in self.places:  # a constant that the body assigned
                self.steps.append(BodyStep(held, [self.ref(value)], [number]))
        self._keep(captured.replay, [self.ref(x) for x in xs], ys)
        # Register its results out here as well: records on outer tapes may have kept them.
        for number, place in captured.first.places.items():
            self.places.setdefault(number, place)
        super().body(captured, xs, ys)


def _ids(ys: Sequence[Tensor]) -> list[float]:
    return [y._id for y in ys]


def foreign(
    function: Callable[[Sequence[Array]], Sequence[Array]],
    xs: Sequence[Tensor],
    read: Callable[[Tensor], Array],
) -> list[Tensor]:
    """Return the results of another library's function of Tensors' arrays, as constants.

    `read` returns the array of a Tensor. A capture cannot record values that were computed in other
    ways, so the Python of such a body has to run again (see `Captured`).
    """
    xs = [dispatch.in_region(x) for x in xs]
    ys = computed(function, read, xs)
    if (capture := capturing()) is not None:
        capture.foreign(function, read, xs, ys)
    return ys


# -- bodies ----------------------------------------------------------------------------------------


class Captured:
    """A flat body whose Python runs once, in the first call; later calls replay it.

    With `steps=False`, it keeps only a trail, and the Python runs again for each call, on the
    numbers that Generators drew in the first run.
    """

    def __init__(
        self, flat: Flat, kind: str, expected: Trail | None = None, *, steps: bool = True
    ) -> None:
        self.flat = flat
        self.function: Any | None = getattr(flat, "function", None)
        self.kind = kind
        self.steps = steps
        self.expected = expected
        self.first: Any = None  # a Capture, or the Trail of a run without steps
        reached = () if steps else Closure(self.function).generators
        # Generators, with their states.
        self.drawn: list[tuple[Any, Any]] = [(g, g.bit_generator.state) for _, g in reached]

    def __call__(self, xs: Sequence[Tensor]) -> Sequence[Tensor]:
        state = current()
        if state is None or state.region is None:
            return self.flat(xs)
        if self.first is None:
            return self._begin(xs, state)
        if not self.complete:
            again = copy(self)
            again.expected = self.first
            return again._begin(xs, state)
        return self.replay(xs)

    def _begin(self, xs: Sequence[Tensor], state: State) -> Sequence[Tensor]:
        """Run the Python, capture it, and report it to the enclosing capture."""
        around = state.region.capture
        # With a JAX key among the inputs, numbers drawn from it would be strangers.
        if self.steps and any(is_key(x._data) and is_traced(x._data) for x in xs):
            self._discover(xs, state)
            if self.complete:
                ys = self.replay(xs)
            else:  # an inner body draws from keys of its closure; the next run counts
                again = {k: b.repeat() for k, b in (state.overrides or {}).items()}
                with in_state(state.overriding(again or None)):
                    ys = self._run(xs, state)
        else:
            ys = self._run(xs, state)
        if around is not None:
            around.body(self, xs, ys)
        return ys

    def _run(self, xs: Sequence[Tensor], state: State) -> Sequence[Tensor]:
        """Run the Python in the open trace."""
        capture: Any = (Capture if self.steps else Trail)(self.kind, xs, self.expected)
        with drawn_again(() if self.expected is None else self.drawn):
            ys = self._captured(xs, capture, state.region)
        capture.went("the results", ys, ())
        capture.let_go()
        if self.expected is not None:
            self.expected.finished(capture)
        else:
            self.drawn = [*state.region.drawn.values(), *self.drawn]
        self.complete = self.steps and not (capture.strangers or capture.patchy)
        if not self.complete:
            _note_patch(state.region)
        return ys

    def _captured(self, xs: Sequence[Tensor], capture: Any, region: Region) -> Sequence[Tensor]:
        """Run the Python, and keep its steps."""
        around = region.swap(capture)
        try:
            ys = [region.enter(y) for y in self.flat(xs)]
        finally:
            region.swap(around)
        self.first = capture
        if self.steps:
            self.xs: list[float] = _ids(xs)
            self.ys: list[Ref] = [capture.ref(y) for y in ys]
            values = capture.assigned.items()
            self.assigned: dict[Any, Ref] = {v: capture.ref(value) for v, value in values}
        return ys

    def _discover(self, xs: Sequence[Tensor], state: State) -> None:
        """Run the Python in a separate trace, which records how strangers come from the inputs.

        Functions without a rule, which are not steps, split JAX keys and draw numbers from them.
        From the trace, regrad keeps only their results, and replays the steps at once.
        """
        import jax

        region, values = state.region, dict(state.region.values)

        def body(*arrays: Array) -> list[Any]:
            inner = [dispatch.stand_in(x, array) for x, array in zip(xs, arrays, strict=True)]
            capture = Capture(self.kind, inner)
            floats = [x for x in inner if not is_key(x._data) and is_inexact(x.dtype)]
            tape = Tape([x._id for x in floats])
            with in_state(State((tape,), state.overrides, None, region)):
                self._captured(inner, capture, region)
            return [array for _, array in capture.strangers.values()]

        closed = jax.make_jaxpr(body)(*[x._data for x in xs])
        inner = self.first.let_go()
        # Undo assignments made in the trace, which the replay makes again; keep values that were
        # read.
        region.values = values | {
            s: inner[i] for s, i in self.first.sources if isinstance(s, Readable)
        }
        numbers = [number for number, _ in self.first.strangers.values()]
        ids = {id(x._data): Id(i) for i, x in inner.items()}
        consts = [ids.get(id(c), c) for c in closed.consts]
        run = partial(run_strangers, sliced(closed.jaxpr), consts)
        self.first.steps.insert(0, BodyStep(run, self.xs, numbers))
        self.complete: bool = not self.first.patchy

    def replay(self, xs: Sequence[Tensor], around: Env | None = None) -> Sequence[Tensor]:
        """Run the steps on other inputs; captured values are found in the current region.

        `around` is the `env` of the enclosing body, if this replay is one of its steps.
        """
        state = current()
        assert state is not None
        region = state.region
        env = Env() if around is None else around
        env.update(zip(self.xs, xs, strict=True))
        for source, number in self.first.sources:
            if number not in env:
                env[number] = resolved(region.first(source, number))
        for step in self.first.steps:
            step.replay(env)
        for variable, ref in self.assigned.items():
            region.assign(variable, at(env, ref))
        return [at(env, ref) for ref in self.ys]


def _note_patch(region: Region | None) -> None:
    """Report to the enclosing captures that an inner body cannot be replayed."""
    while region is not None:
        if region.capture is not None:
            region.capture.patchy = True
        region = region.outer


@block
def drawn_again(drawn: Sequence[tuple[Any, Any]]) -> Generator[None]:
    """Let NumPy's Generators draw the same numbers again, then restore their current states."""
    now = [(generator, generator.bit_generator.state) for generator, _ in drawn]
    try:
        for generator, then in drawn:
            generator.bit_generator.state = then
        yield
    finally:
        for generator, state in now:
            generator.bit_generator.state = state


class CapturedGradient:
    """The gradient function of a custom call; its Python runs once, too.

    A gradient function with a `needs` parameter runs once for each value of it.
    """

    note: Any = None

    def __init__(self, call: CustomCall, needs: Any = ()) -> None:
        self.call: CustomCall = call.on(())  # with the gradient function as the user wrote it
        self.flat: Captured = Captured(self._run, f"the gradient function of {call.name}")
        self.needs = needs
        self.others: dict[Any, CapturedGradient] = {}

    def __call__(self, dy: Cotangent, needs: Any = ()) -> Any:
        if needs != self.needs:
            key = tuple(containers.flatten(needs)[0])
            if key not in self.others:
                self.others[key] = CapturedGradient(self.call, needs)
            return self.others[key](dy, needs)
        self.close: containers.Rebuild
        dys, self.close = containers.flatten(dy)
        ys = self.flat(dys)
        return self.note(ys)

    def _run(self, dys: Sequence[Tensor]) -> Sequence[Tensor]:
        ys, self.note = noted(self.call.answer(self.close(dys), lambda: self.needs))
        return ys
