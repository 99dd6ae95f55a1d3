"""Steps: the actions of a body, recorded so that they can be repeated on other inputs.

Tensors are identified by their ids, which are never reused. In a replay, `env` maps the ids of the
first run to the Tensors of this one. Take the body `lambda x: rg.sin(x) * w`, where `w` is a
Variable, x has the id 7, and w's value the id 7.5. Its first run leaves

    Step(Sin under its rule, xs=[7], ys=[8])
    Step(Mul under its rule, xs=[8, 7.5], ys=[9])          sources: [(w, 7.5)]

To replay it on x', begin with env = {7: x', 7.5: the current value of w} and run the steps in
order; the result is env[9].

A rule or a gradient function that closes over a Tensor of the first run works as well: it runs in a
region that has `env` (see `ReplayRegion`).

Invariants:

* A step names its inputs by ids that are in `env` when it runs, or holds constants.
* Each op keeps the rule that was active in the first run, even if other overrides are active now.
* A replay runs ops like calls of functions (`dispatch.rerun`). So the open tapes record it, and the
  capture of the enclosing body captures it and can replay it in turn.
* No step holds a Tensor of the first run, except for constants, because a program may live long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, NamedTuple

from regrad.autodiff.custom_functions import asks_needs
from regrad.core import containers, dispatch
from regrad.core.backends import is_traced
from regrad.core.bindings import CountedRule, WrappedRule
from regrad.core.pullback import run_taped
from regrad.core.registry import Op
from regrad.core.rule import Rule
from regrad.core.state import State, current, in_state, next_id
from regrad.core.tape import Place, Tape
from regrad.core.tensor import Tensor, twin, wrap
from regrad.transforms.region import OpenRegion

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr

    from regrad.autodiff.custom_calls import CustomCall
    from regrad.core.backends import Array
    from regrad.core.registry import Attrs
    from regrad.core.rule import Cotangent
    from regrad.core.tape import Record
    from regrad.transforms.region import Passage, Region
    from regrad.transforms.trail import Reached

Ref = int | float | Tensor  # the id of a Tensor of the first run, or a constant


class Env(dict[Any, Tensor]):
    """The Tensors of a replay, by the ids of the first run.

    `records` maps passages to the records of the regions that ran, with their inputs.
    """

    def __init__(self) -> None:
        self.records: dict[Any, tuple[Any, Sequence[Tensor]]] = {}


class BodyStep(NamedTuple):
    """One action of a body: an operation to run, and the ids of its inputs and outputs."""

    run: Callable[[Sequence[Tensor], Env], Sequence[Tensor]]
    xs: Sequence[Ref]
    ys: Sequence[float]

    def replay(self, env: Env) -> None:
        """Run it on the Tensors of this run, and add its results."""
        env.update(zip(self.ys, self.run([at(env, ref) for ref in self.xs], env), strict=True))


def at(env: Env, ref: Ref) -> Tensor:
    """Return the Tensor of this run for a Tensor of the first; each run gets its own constants."""
    return wrap(ref._data) if isinstance(ref, Tensor) else env[ref]


def held(xs: Sequence[Tensor], env: Env) -> Sequence[Tensor]:
    """Return a constant that was assigned to a Variable, for a body that reads the Variable."""
    return xs


# -- ops -------------------------------------------------------------------------------------------


def run_op(
    op: Op, rule: Rule, attrs: Attrs, layout: tuple[Place, ...] | None,
    xs: Sequence[Tensor], env: Env,
) -> Sequence[Tensor]:  # fmt: skip
    """An op, with the rule that was active."""
    y = dispatch.rerun(op, tuple(xs), attrs, layout, _rule_of_now(rule, op, env))
    return y if isinstance(y, tuple) else (y,)


def _rule_of_now(rule: Rule, op: Op, env: Env) -> Rule:
    """Return the rule; a user's rule sees this run's Tensors, and counts in the current scope.

    regrad's own rules close over nothing, so they need no region that has `env`.
    """
    if rule is op.rule or not rule.watches:
        return rule
    state = current()
    if isinstance(rule, CountedRule) and state is not None and (scopes := state.scopes):
        rule = rule.under(scopes)
    return reduce(ReplayRule, replays(), ReplayRule(rule, env))


def computed(
    function: Callable[[Sequence[Array]], Sequence[Array]], read: Callable[[Tensor], Array],
    xs: Sequence[Tensor], env: Env | None = None,
) -> list[Tensor]:  # fmt: skip
    """Return the results of a function of arrays, as constants."""
    return [wrap(array) for array in function([read(x) for x in xs])]


def run_strangers(
    jaxpr: Any, consts: Sequence[Any], xs: Sequence[Tensor], env: Env
) -> list[Tensor]:
    """Values that another library computed from the inputs of a trace: constants for the rules.

    `consts` are arrays, or ids of Tensors that held the arrays.
    """
    given = [env[c.number]._data if type(c) is Id else c for c in consts]
    return [wrap(array) for array in evaluate(jaxpr, given, [x._data for x in xs])]


class Id(NamedTuple):
    """The id of a Tensor whose array was closed over."""

    number: float


# -- custom functions ------------------------------------------------------------------------------


def as_written(call: CustomCall, back: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs a gradient function, with `needs` if the function accepts it."""
    return (lambda dy, needs: back(dy, needs)) if asks_needs(call.written) else lambda dy: back(dy)


class CustomRun(NamedTuple):
    """A call of a custom function: its inner steps, and its gradient function."""

    call: CustomCall
    back: Callable[..., Any]
    inner: Sequence[BodyStep]
    values: Sequence[Ref]
    close: containers.Rebuild
    cut: bool  # a tape of the body itself took the gradient

    def __call__(self, xs: Sequence[Tensor], env: Env) -> Sequence[Tensor]:
        call = self.call.on(tuple(xs))
        back = as_written(call, lambda *given: inside(env, partial(self.back, *given)))
        run = lambda: call.perform(lambda: (self._values(env), back), current())  # noqa: E731
        # (cut: run as if the body differentiated the call by xs, as in the first run.)
        ys = run_taped(Tape([x._id for x in xs]), run) if self.cut else run()
        return containers.flatten(ys)[0]

    def _values(self, env: Env) -> Any:
        mark = next_id()
        for step in self.inner:
            step.replay(env)
        ys = [at(env, ref) for ref in self.values]
        # A custom call takes over the Tensors that it returns: they get its gradient. A later step
        # may refer to the inner Tensors, so the call gets copies of the Tensors that were made
        # here.
        return self.close([twin(y) if y._id > mark else y for y in ys])


# -- regions ---------------------------------------------------------------------------------------


class RegionRun(NamedTuple):
    """An inner region: a loop, a branch, a batch."""

    run: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    passage: Any  # the passage of its rule, if it has one
    pulls: set[Any]

    def __call__(self, xs: Sequence[Tensor], env: Env) -> Sequence[Tensor]:
        if self.passage not in self.pulls:
            return self._run(xs, env)
        # A later step needs its gradient (`pull_region`). In the first run, the record was on a
        # tape of that run; here, a tape of this step alone makes it.
        xs = distinct(xs)
        tape = Tape([xs[i]._id for i in self.passage.wanted])
        ys = run_taped(tape, self._run, (xs, env))
        env.records[self.passage] = tape.records[-1], xs
        return ys

    def _run(self, xs: Sequence[Tensor], env: Env) -> Sequence[Tensor]:
        # A rule in the region may close over a Tensor of the first run that none of its steps
        # names.
        return inside(env, partial(self.run, xs))


def pull_region(first: Passage, dys: Sequence[Tensor], env: Env) -> Sequence[Tensor]:
    """The backward pass of a region, which the body itself ran."""
    record, xs = env.records[first.whole]
    rule = record.rule
    given = dict(zip(first.reached, dys, strict=True))
    passage = rule.passage.narrowed([i for i in rule.passage.reached if i in given])
    dxs = rule.answer(rule.inputs, passage, [given[i] for i in passage.reached])
    # (A captured value may have another place among the inputs in this run.)
    found = {rule.inputs[i]._id: dx for i, dx in zip(passage.wanted, dxs, strict=True)}
    return [found[xs[i]._id] for i in first.wanted]


def distinct(xs: Sequence[Tensor]) -> list[Tensor]:
    """Return the same Tensors, each with its own id."""
    ids: set[int] = set()
    ys = []
    for x in xs:
        y = dispatch.alias(x) if x._id <= 0 or x._id in ids else x
        ids.add(y._id)
        ys.append(y)
    return ys


class ReplayRegion:
    """A region in which Tensors of a first run are replaced by Tensors of its replay."""

    def __init__(self, region: Region, env: Env) -> None:
        self.region = region
        self.env = env
        self.outside: Any = region.capture

    def enter(self, x: Tensor) -> Tensor:
        """Return the stand-in for a Tensor.

        A capture that began inside records the Tensor of the first run, which other replays have as
        well. The capture of this replay records the current Tensor.
        """
        now = self.env.get(x._id)
        if now is None:
            return self.region.enter(x)
        # The two captures must record two names of one Tensor, so one of them is inactive for a
        # moment.
        capture = self.region.swap(self.outside)
        inner = self.region.enter(now)
        self.region.swap(capture)
        if capture is not self.outside:
            # without it, the capture would look up x, whose trace has ended
            if self.outside is not None:
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
    """Run code that may refer to Tensors of the first run."""
    state = current()
    if state is None or state.region is None:
        return run()
    region: Any = ReplayRegion(state.region, env)
    with in_state(State(state.tapes, state.overrides, state.guard, region)):
        return run()


def replaying(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a region that runs now; its references resolve to the Tensors here.

    The function may run later (in the walk, or in the replay of this replay), when the replays that
    are running here can no longer resolve Tensors of the first run.
    """
    for env in replays():
        run = partial(_inside_with, env, run)
    return run


def _inside_with(env: Env, run: Callable[..., Any], *args: Any) -> Any:
    return inside(env, partial(run, *args))


def replays() -> Iterator[Env]:
    """Yield the running replays, innermost first, up to the enclosing tapes."""
    state = current()
    region: Any = None if state is None else state.region
    while isinstance(region, ReplayRegion | OpenRegion):
        if isinstance(region, ReplayRegion):
            yield region.env
            region = region.region
        else:
            region = region.outer


class ReplayRule(WrappedRule):
    """A user's rule, which may refer to Tensors of the first run."""

    def __init__(self, rule: Rule, env: Env) -> None:
        super().__init__(rule)
        self.env = env

    def pull(self, record: Record, dy: Cotangent, wanted: Sequence[int]) -> Any:
        return inside(self.env, lambda: self.rule.pull(record, dy, wanted))


# -- of JAX ----------------------------------------------------------------------------------------


def evaluate(jaxpr: Jaxpr, consts: Sequence[Array], arrays: Sequence[Array]) -> list[Any]:
    """Return the results of a traced function, for these closed-over arrays."""
    from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

    return list(jaxpr_as_fun(ClosedJaxpr(jaxpr, list(consts)))(*arrays))


def kept_for(
    consts: Sequence[Array], places: dict[int, tuple[str, Any]], more: list[Any], pool: str
) -> list[tuple[str, Any]]:
    """Return where the closed-over values of a traced function are found: pools and places.

    `places` maps the id of an array to its place. A tracer without a place is added to `more`, the
    pool of this name. Any other array is a constant: it is its own place in the pool "constant".
    """
    for array in consts:
        if id(array) not in places:
            is_new = is_traced(array)
            places[id(array)] = (pool, len(more)) if is_new else ("constant", array)
            more += [array] if is_new else []
    return [places[id(array)] for array in consts]


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
