"""Python that runs once: what a body did, as data that can be done again.

A body that is traced (by `jit`, `cond`, `scan`, `vmap`, …) may be needed several times: its
gradient is a loop or a branch of its own, and so is the gradient of that. The user's Python must
not run again for it. It may count its calls, draw numbers, or read what has changed since, and
would then give the gradient of another function. So its first run is *captured*, as a list of
steps: ops with their attributes and the rules in force, custom functions, regions, and which Tensor
went where. To replay the steps on other inputs is to run the body again.

Tensors are known by their ids, which are never reused. In a replay, `env` maps the ids of the
first run to the Tensors of this one. A rule or a gradient function that closes over a Tensor of the
first run is served too: it runs in a region that knows `env` (see `ReplayRegion`).

For example, the first run of the body `lambda x: rg.sin(x) * w`, where `w` is a Variable, x has the
id 7, and w's value the id 7.5, leaves

    OpStep(Sin, rule, xs=[7], ys=[8])
    OpStep(Mul, rule, xs=[8, 7.5], ys=[9])          sources: [(w, 7.5)]

To replay it on x' is to begin with env = {7: x', 7.5: what w is worth now} and to run the steps in
order; the result is env[9].

Invariants:

* A step names its inputs by ids that are in `env` when it runs, or holds constants. An array that
  another library computed in the trace is neither: a *stranger*. A body with strangers of which too
  little is known is not `complete`; its Python runs again, and must do the same (see `trail`).
* Each op keeps the rule that was in force at first, also where other overrides are in force now.
* A replay runs ops as calls of functions do (`dispatch.rerun`). So it is recorded by the tapes that
  are open now, and captured by the body around, whose own replay repeats it in turn.
* No step holds a Tensor of the first run, other than constants: a program may live for long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from regrad.autodiff.custom_calls import CustomCall
from regrad.core import containers, dispatch
from regrad.core.backends import is_inexact, is_traced
from regrad.core.bindings import CountedRule, WrappedRule
from regrad.core.pullback import run_taped
from regrad.core.registry import Op
from regrad.core.rule import Rule
from regrad.core.state import State, current, in_state, next_id
from regrad.core.tape import Place, Tape
from regrad.core.tensor import Readable, Tensor, twin, wrap
from regrad.transforms.arguments import is_key, noted
from regrad.transforms.trail import Trail, capturing, resolved

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr

    from regrad.core.backends import Array
    from regrad.core.registry import Attrs
    from regrad.core.rule import Cotangent
    from regrad.core.tape import Record, Result
    from regrad.transforms.region import Passage, Region, RegionRule
    from regrad.transforms.trail import Reached

Flat = Callable[[Sequence[Tensor]], Sequence[Tensor]]  # a body once its containers are open


# -- the steps -------------------------------------------------------------------------------------

Ref = int | float | Tensor  # the id of a Tensor of the first run, or a constant
Env = dict[Any, Tensor]
Records = dict[Any, Any]  # of the regions that a replay has run, by their passages


class Capture(Trail):
    """A first run: its steps, and what it reached outside."""

    def __init__(self, kind: str, xs: Sequence[Tensor], expected: Trail | None = None) -> None:
        super().__init__(kind, xs, expected)
        state = current()
        # tapes beyond this depth were opened by the body itself, by a call of `grad`, say
        self.depth: int = 0 if state is None else len(state.tapes)
        self.mark: int = next_id()
        self.steps: list[Any] = []
        self.strangers: dict[int, tuple[int, Any]] = {}  # id() of an array: a number, the array
        self.patchy = False  # whether a body inside has strangers of which too little is known
        self.passages: set[Any] = set()  # of regions in here
        self.pulls: set[Any] = set()  # those through which the body asked for a gradient

    def ref(self, x: Tensor) -> Ref:
        """Return how a replay finds an input of a step."""
        if x._id in self.places:
            return x._id
        if 0 < x._id < self.mark:  # made earlier in this region: a gradient function saved it
            self.source(x, x)
            return x._id
        if not is_traced(x._data):
            return x
        # computed by another library, in this trace (with a JAX key, say)
        return self.strangers.setdefault(id(x._data), (next_id(), x._data))[0]

    def did(
        self, op: Op, rule: Rule, xs: Sequence[Tensor], attrs: Attrs, y: Result,
        layout: tuple[Place, ...] | None = None,
    ) -> None:  # fmt: skip
        refs = [self.ref(x) for x in xs]
        super().did(op, rule, xs, attrs, y, layout)
        outputs = y if isinstance(y, tuple) else (y,)
        self.steps.append(OpStep(op, rule, refs, attrs, layout, [t._id for t in outputs]))

    def custom(self, call: CustomCall, run: Callable[[], Any], state: State) -> Any:
        inputs = call.inputs
        refs = [self.ref(x) for x in inputs]
        # the ops inside are steps of the call: a replay runs them as its body, under its gradient
        outer, self.steps = self.steps, []
        try:
            value = run()
            leaves, close = containers.flatten(value)
            inside = [self.ref(leaf) for leaf in leaves]
        finally:
            inner, self.steps = self.steps, outer
        back = CapturedGradient(call)
        call.grad_func = lambda dy: back(dy)  # shared by all replays
        ids = {x._id for x in inputs}
        cut = any(not tape.watched.isdisjoint(ids) for tape in state.tapes[self.depth :])
        outputs = call.recorded(value, state)
        ys = containers.flatten(outputs)[0]
        self.made(ys)
        self.steps.append(CustomStep(call, back, refs, inner, inside, close, _ids(ys), cut))
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
        refs = [self.ref(x) for x in xs]
        self.steps.append(RegionStep(again, passage, refs, _ids(ys), self.pulls))
        super().region(kind, xs, ys, again, rule)

    def pulled(self, passage: Passage, dys: Sequence[Tensor], dxs: Sequence[Tensor]) -> None:
        """The backward pass of a region that was run in here, where it is not a region itself."""
        self.pulls.add(passage)
        self.steps.append(PullStep(passage, [self.ref(dy) for dy in dys], _ids(dxs)))
        # (by which inputs there are gradients depends on the tapes outside)
        for i, dx in zip(passage.wanted, dxs, strict=True):
            self.places[dx._id] = "gradient", len(self.pulls), i

    def foreign(
        self,
        function: Callable[[Sequence[Array]], Sequence[Array]],
        read: Callable[[Tensor], Array],
        xs: Sequence[Tensor],
        ys: Sequence[Tensor],
    ) -> None:
        run = partial(computed, function, read)
        self.steps.append(RunStep(run, [self.ref(x) for x in xs], _ids(ys)))
        super().foreign(function, read, xs, ys)

    def body(self, captured: Captured, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
        for source, number in captured.sources:
            value = self.assigned.get(source) if isinstance(source, Readable) else None
            if value is None:
                self.reach(source, number)
            elif number not in self.places:  # a constant that was assigned in here
                self.steps.append(HeldStep(self.ref(value), number))
        self.steps.append(RunStep(captured.replay, [self.ref(x) for x in xs], _ids(ys)))
        # what it made is known out here, too: records on tapes that go on may have kept it
        for number, place in captured.known.items():
            self.places.setdefault(number, place)
        super().body(captured, xs, ys)


def _ids(ys: Sequence[Tensor]) -> list[float]:
    return [y._id for y in ys]


def at(env: Env, ref: Ref) -> Tensor:
    """A Tensor of this run for one of the first; a constant is a Tensor of its own in each run."""
    return wrap(ref._data) if isinstance(ref, Tensor) else env[ref]


# Each step has a method `replay(env, records)` that reads its inputs from `env`, and adds what it
# makes under the ids of the first run.


class OpStep(NamedTuple):
    """An op, with the rule that was in force."""

    op: Op
    rule: Rule
    xs: Sequence[Ref]
    attrs: dict[str, Any]
    layout: tuple[Place, ...] | None
    ys: Sequence[float]

    def replay(self, env: Env, records: Records) -> None:
        xs = tuple([at(env, ref) for ref in self.xs])
        y = dispatch.rerun(self.op, xs, self.attrs, self.layout, self._rule(env))
        env.update(zip(self.ys, y if isinstance(y, tuple) else (y,), strict=True))

    def _rule(self, env: Env) -> Rule:
        """Return the rule; one of the user's sees this run's Tensors, and counts in today's scope.

        Rules of regrad's own close over nothing, so they need no region that knows `env`.
        """
        if self.rule is self.op.rule or not self.rule.watches:
            return self.rule
        rule, state = self.rule, current()
        if isinstance(rule, CountedRule) and state is not None and (scopes := state.scopes):
            rule = rule.under(scopes)
        return ReplayRule(rule, env)


class HeldStep(NamedTuple):
    """A constant that a Variable was given, for a body that reads the Variable."""

    value: Ref
    number: float

    def replay(self, env: Env, records: Records) -> None:
        env[self.number] = at(env, self.value)


class CustomStep(NamedTuple):
    """A call of a custom function: its inner steps, and its gradient function."""

    call: CustomCall
    back: CapturedGradient
    xs: Sequence[Ref]
    inner: Sequence[Any]
    values: Sequence[Ref]
    close: containers.Rebuild
    ys: Sequence[float]
    cut: bool  # a tape that the body itself opened took the gradient

    def replay(self, env: Env, records: Records) -> None:
        xs = [at(env, ref) for ref in self.xs]
        call = self.call.on(tuple(xs))
        again = lambda: (self._values(env, records), self._back(env))  # noqa: E731
        run = lambda: call.perform(again, current())  # noqa: E731
        ys = hidden(xs, run) if self.cut else run()
        env.update(zip(self.ys, containers.flatten(ys)[0], strict=True))

    def _values(self, env: Env, records: Records) -> Any:
        mark = next_id()
        for step in self.inner:
            step.replay(env, records)
        ys = [at(env, ref) for ref in self.values]
        # A custom call takes over the Tensors that it returns (they get its gradient). A later step
        # may mean the inner ones, so the call gets twins of those that were made here.
        return self.close([twin(y) if y._id > mark else y for y in ys])

    def _back(self, env: Env) -> Callable[[Any], Any]:
        return lambda dy: inside(env, partial(self.back, dy))


def hidden(xs: Sequence[Tensor], run: Callable[[], Any]) -> Any:
    """Run something as if the body were differentiating it by xs, as it did the first time."""
    return run_taped(Tape([x._id for x in xs]), run)


def distinct(xs: Sequence[Tensor]) -> list[Tensor]:
    """The same Tensors, each with an id of its own."""
    ids: set[int] = set()
    ys = []
    for x in xs:
        y = dispatch.alias(x) if x._id <= 0 or x._id in ids else x
        ids.add(y._id)
        ys.append(y)
    return ys


class RegionStep(NamedTuple):
    """A region inside: a loop, a branch, a batch."""

    run: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    passage: Any  # of its rule, if it has one
    xs: Sequence[Ref]
    ys: Sequence[float]
    pulls: set[Any]

    def replay(self, env: Env, records: Records) -> None:
        xs = [at(env, ref) for ref in self.xs]
        if self.passage in self.pulls:
            # A PullStep will ask for its gradient. The record that it needs was on a tape of the
            # first run; here a tape of this step alone makes one.
            xs = distinct(xs)
            tape = Tape([xs[i]._id for i in self.passage.wanted])
            ys = run_taped(tape, self._run, (xs, env))
            records[self.passage] = tape.records[-1], xs
        else:
            ys = self._run(xs, env)
        env.update(zip(self.ys, ys, strict=True))

    def _run(self, xs: Sequence[Tensor], env: Env) -> Sequence[Tensor]:
        # a rule in the region may close over a Tensor of the first run that no step of it names
        return inside(env, partial(self.run, xs))


class PullStep(NamedTuple):
    """The backward pass of a region, for which the body itself asked."""

    passage: Any
    dys: Sequence[Ref]
    dxs: Sequence[float]

    def replay(self, env: Env, records: Records) -> None:
        record, xs = records[self.passage]
        rule, passage = record.rule, record.rule.passage
        given = dict(zip(self.passage.reached, [at(env, ref) for ref in self.dys], strict=True))
        dys = [given[i] if i in given else record.unused(i) for i in passage.reached]
        dxs = rule.answer(rule.inputs, passage, dys)
        # (what the body closes over may stand at another place among the inputs of this run)
        found = {rule.inputs[i]._id: dx for i, dx in zip(passage.wanted, dxs, strict=True)}
        for i, number in zip(self.passage.wanted, self.dxs, strict=True):
            env[number] = found[xs[i]._id]


class RunStep(NamedTuple):
    """A smaller body, captured by itself, or a function of arrays that no gradient passes."""

    run: Callable[[Sequence[Tensor], Env], Sequence[Tensor]]
    xs: Sequence[Ref]
    ys: Sequence[float]

    def replay(self, env: Env, records: Records) -> None:
        ys = self.run([at(env, ref) for ref in self.xs], env)
        env.update(zip(self.ys, ys, strict=True))


def computed(
    function: Callable[[Sequence[Array]], Sequence[Array]], read: Callable[[Tensor], Array],
    xs: Sequence[Tensor], env: Env | None = None,
) -> list[Tensor]:  # fmt: skip
    """Return the results of a function of arrays, as constants."""
    return [wrap(array) for array in function([read(x) for x in xs])]


def foreign(
    function: Callable[[Sequence[Array]], Sequence[Array]],
    xs: Sequence[Tensor],
    read: Callable[[Tensor], Array],
) -> list[Tensor]:
    """Return the results of another library's function of Tensors' arrays, as constants.

    `read` returns the array of a Tensor. A capture does not know values computed by other ways, so
    that the Python of its body has to run again (see `Captured`).
    """
    xs = [dispatch.in_region(x) for x in xs]
    ys = computed(function, read, xs)
    if (capture := capturing()) is not None:
        capture.foreign(function, read, xs, ys)
    return ys


class StrangerStep(NamedTuple):
    """Values that another library computed from the inputs of a trace: constants to the rules."""

    jaxpr: Any
    consts: Sequence[Any]  # arrays, or ids of Tensors whose arrays they were
    xs: Sequence[float]
    ys: Sequence[float]

    def replay(self, env: Env, records: Records) -> None:
        consts = [env[c.number]._data if type(c) is _Id else c for c in self.consts]
        arrays = evaluate(self.jaxpr, consts, [env[i]._data for i in self.xs])
        env.update(zip(self.ys, map(wrap, arrays), strict=True))


class _Id(NamedTuple):
    number: float


# -- bodies ----------------------------------------------------------------------------------------


class Captured:
    """A flat body whose Python runs once, when it is called first; later calls replay it."""

    def __init__(self, flat: Flat, kind: str, expected: Trail | None = None) -> None:
        self.flat = flat
        self.function: Any | None = getattr(flat, "function", None)
        self.kind = kind
        self.expected = expected
        self.first: Capture | None = None

    def __call__(self, xs: Sequence[Tensor]) -> Sequence[Tensor]:
        state = current()
        if state is None or state.region is None:
            return self.flat(xs)
        if self.first is None:
            return self._begin(xs, state)
        if not self.complete:
            return Captured(self.flat, self.kind, self.first)._begin(xs, state)
        return self.replay(xs)

    @property
    def sources(self) -> Sequence[tuple[Any, float]]:
        """Return the things that the body reached outside, each with the id of its stand-in."""
        assert self.first is not None
        return self.first.sources

    @property
    def known(self) -> Mapping[float, Any]:
        """The ids of the Tensors of the first run, and where they came from."""
        assert self.first is not None
        return self.first.places

    def _begin(self, xs: Sequence[Tensor], state: State) -> Sequence[Tensor]:
        """Run the Python, capture it, and tell the capture around."""
        around = state.region.capture
        # with a key of JAX among the inputs, numbers drawn from it would be strangers
        if any(is_key(x._data) and is_traced(x._data) for x in xs):
            self._discover(xs, state)
            if self.complete:
                ys = self.replay(xs)
            else:  # a body inside draws from keys that it closes over: the next run counts
                again = {k: b.repeat() for k, b in (state.overrides or {}).items()}
                with in_state(state.overriding(again or None)):
                    ys = self._run(xs, state, self.expected)
        else:
            ys = self._run(xs, state, self.expected)
        if around is not None:
            around.body(self, xs, ys)
        return ys

    def _run(self, xs: Sequence[Tensor], state: State, expected: Trail | None) -> Sequence[Tensor]:
        """Run the Python in the trace that is open."""
        capture = Capture(self.kind, xs, expected)
        ys = self._captured(xs, capture, state.region)
        capture.let_go()
        if expected is not None:
            expected.finished(capture)
        self.complete = not (capture.strangers or capture.patchy)
        if not self.complete:
            _note_patch(state.region)
        return ys

    def _captured(self, xs: Sequence[Tensor], capture: Capture, region: Region) -> Sequence[Tensor]:
        """Run the Python, and keep what it did."""
        around = region.swap(capture)
        try:
            ys = [region.enter(y) for y in self.flat(xs)]
        finally:
            region.swap(around)
        self.xs: list[float] = _ids(xs)
        self.ys: list[Ref] = [capture.ref(y) for y in ys]
        self.assigned: dict[Any, Ref] = {
            v: capture.ref(value) for v, value in capture.assigned.items()
        }
        self.first = capture
        return ys

    def _discover(self, xs: Sequence[Tensor], state: State) -> None:
        """Run the Python in a trace of its own, which knows how strangers come from the inputs.

        Keys of JAX are split, and numbers drawn from them, by functions that no rule concerns and
        that are not steps. Of the trace only they are kept; the steps are replayed at once.
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
        assert self.first is not None
        inner = self.first.let_go()
        # assignments made in the trace are undone (the replay makes them); values read are kept
        region.values = values | {s: inner[i] for s, i in self.sources if isinstance(s, Readable)}
        numbers = [number for number, _ in self.first.strangers.values()]
        held = {id(x._data): _Id(i) for i, x in inner.items()}
        consts = [held.get(id(c), c) for c in closed.consts]
        self.first.steps.insert(0, StrangerStep(sliced(closed.jaxpr), consts, self.xs, numbers))
        self.complete: bool = not self.first.patchy

    def replay(self, xs: Sequence[Tensor], around: Env | None = None) -> Sequence[Tensor]:
        """Run the steps on other inputs; what they reached outside is found in today's region.

        `around` is the `env` of the body around, in whose replay this one is a step.
        """
        state = current()
        assert self.first is not None and state is not None
        region = state.region
        env: Env = {} if around is None else around
        env.update(zip(self.xs, xs, strict=True))
        for source, number in self.first.sources:
            if number not in env:
                env[number] = resolved(region.first(source, number))
        records: Records = {}
        for step in self.first.steps:
            step.replay(env, records)
        for variable, ref in self.assigned.items():
            region.assign(variable, at(env, ref))
        return [at(env, ref) for ref in self.ys]


def _note_patch(region: Region | None) -> None:
    """Tell the captures around that a body inside them cannot be replayed."""
    while region is not None:
        if region.capture is not None:
            region.capture.patchy = True
        region = region.outer


class CapturedGradient:
    """The gradient function of a custom call, whose Python runs once, too."""

    note: Any = None

    def __init__(self, call: CustomCall) -> None:
        self.call: CustomCall = call.on(())  # with the gradient function as the user wrote it
        self.flat: Captured = Captured(self._run, f"the gradient function of {call.name}")

    def __call__(self, dy: Cotangent) -> Any:
        self.close: containers.Rebuild
        dys, self.close = containers.flatten(dy)
        ys = self.flat(dys)
        return self.note(ys)

    def _run(self, dys: Sequence[Tensor]) -> Sequence[Tensor]:
        ys, self.note = noted(self.call.answer(self.close(dys)))
        return ys


# -- the region of a replay ------------------------------------------------------------------------


class ReplayRegion:
    """A region in which Tensors of a first run stand for those of its replay."""

    def __init__(self, region: Region, env: Env) -> None:
        self.region = region
        self.env = env
        self.outside: Any = region.capture

    def enter(self, x: Tensor) -> Tensor:
        """Return the stand-in for a Tensor.

        A capture that began in here is told the Tensor of the first run, which other replays know,
        too; the capture of this replay, the Tensor of now.
        """
        now = self.env.get(x._id)
        if now is None:
            return self.region.enter(x)
        # Two captures have to be told two names of one Tensor, so one is set aside for a moment.
        capture = self.region.swap(self.outside)
        inner = self.region.enter(now)
        self.region.swap(capture)
        if capture is not self.outside:
            if self.outside is not None:  # untold, it would look for x, whose trace has ended
                self.outside.source(now, inner)
            capture.source(x, inner)
        return inner

    def first(self, source: Reached, number: float) -> Any:
        """Return the Tensor with this id from outside of a body, if this run has it."""
        if number not in self.env or not isinstance(source, Tensor):
            return self.region.first(source, number)
        x = twin(source)
        x._id = number  # pyright: ignore[reportAttributeAccessIssue]
        return x

    def __getattr__(self, name: str) -> Any:
        return getattr(self.region, name)


def inside(env: Env, run: Callable[[], Any]) -> Any:
    """Run what may refer to Tensors of the first run."""
    state = current()
    if state is None or state.region is None:
        return run()
    region: Any = ReplayRegion(state.region, env)
    with in_state(State(state.tapes, state.overrides, state.guard, region)):
        return run()


class ReplayRule(WrappedRule):
    """A rule of the user's, which may refer to Tensors of the first run."""

    def __init__(self, rule: Rule, env: Env) -> None:
        super().__init__(rule)
        self.env = env

    def pull(self, record: Record, dy: Cotangent, wanted: Sequence[int]) -> Any:
        return inside(self.env, lambda: self.rule.pull(record, dy, wanted))


# -- of JAX ----------------------------------------------------------------------------------------


def evaluate(jaxpr: Jaxpr, consts: Sequence[Array], arrays: Sequence[Array]) -> list[Any]:
    """Return the results of a traced function, given the arrays that it had closed over."""
    from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

    return list(jaxpr_as_fun(ClosedJaxpr(jaxpr, list(consts)))(*arrays))


def sliced(jaxpr: Jaxpr) -> Any:
    """Return a traced function without the equations that its results do not need."""
    from jax.extend.core import Literal

    needed = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    kept = []
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            kept.append(eqn)
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
    return jaxpr.replace(eqns=kept[::-1])
