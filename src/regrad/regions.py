"""Regions: bodies that are compiled, batched, repeated, or run again.

Inside a region the tapes outside are suspended. Tensors and Variables that the body uses without
being given them are found as it runs and become inputs; what it assigns to Variables becomes
outputs. Outside, the region is one record. Its gradient is the gradient of the body, which runs
(or is traced) under the overrides that were in force at first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from regrad import dispatch
from regrad.errors import ArgumentError
from regrad.gradients import run_taped
from regrad.namespaces import BACKENDS, is_inexact
from regrad.overrides import Binding
from regrad.registry import OPS, Input, Op
from regrad.ruleforms import Rule
from regrad.state import State, current, in_state, next_id
from regrad.tape import GroupedRecord, Tape
from regrad.tensor import Tensor, wrap
from regrad.variable import Variable
from regrad.walk import Grads, walk

Flat = Callable[[Sequence[Tensor]], Sequence[Tensor]]  # what a body is once its containers are open
Source = Tensor | Variable  # what a body takes from outside
Overrides = Mapping[Any, Binding] | None

STEP = 2.0**-20


class Region:
    """One run of a body: what it takes from outside, and what it assigns.

    `stand_ins` maps outer Tensors, by `id()`, to what stands for them inside; `values` are the
    values of Variables inside. What is not given there is added as it is found, and listed in
    `captured`. With a tape, what the suspended tapes watch is watched inside as well.
    """

    def __init__(
        self,
        kind: str,
        stand_ins: Mapping[int, Tensor] | None = None,
        values: Mapping[Variable, Tensor] | None = None,
        tape: Tape | None = None,
        traced: bool = False,
        around: State | Literal["here"] | None = "here",
    ) -> None:
        self.kind = kind
        self.around = current() if around == "here" else around
        self.traced = traced or ((outer := self.outer) is not None and outer.traced)
        self.tape = tape
        self.mark = next_id()
        self.count = 0
        self.stand_ins = dict(stand_ins or {})
        self.values = dict(values or {})
        self.captured: list[Source] = []
        self.assigned: list[Variable] = []
        self.kept: list[Tensor] = []  # so that no id() in `stand_ins` is used twice

    @property
    def outer(self) -> Region | None:
        """The region around, if there is one."""
        return None if self.around is None else self.around.region

    def enter(self, x: Tensor) -> Tensor:
        """What stands inside for a Tensor (itself, if it was made inside)."""
        if not 0 <= x._id < self.mark:
            return x
        if self.outer is not None:
            x = self.outer.enter(x)
        inner = self.stand_ins.get(id(x))
        if inner is None:
            inner = self.stand_ins[id(x)] = self._stand_in(x)
            self.kept.append(x)
            self.captured.append(x)
        return inner

    def read(self, variable: Variable) -> Tensor:
        """The value of a Variable at this point of the body."""
        if variable not in self.values:
            with in_state(self.around):
                value = variable._read()
            self.values[variable] = self._stand_in(value)
            self.captured.append(variable)
        return self.values[variable]

    def assign(self, variable: Variable, value: Tensor) -> None:
        """A Variable gets a new value, which leaves the region as an output."""
        self.values[variable] = value
        if variable not in self.assigned:
            self.assigned.append(variable)

    def array(self, value: Any) -> Tensor:
        """An array that the body uses: what stands for it, or a copy of what it holds now."""
        inner = self.stand_ins.get(id(value))
        if inner is not None:
            return inner
        if self.outer is not None:
            return self.outer.array(value)
        return wrap(BACKENDS[type(value)].own(value))

    def given(self, x: Tensor) -> Tensor:
        """The stand-in for an argument of the body."""
        y = type(x)()
        y._data = x._data
        y._id = self._early_id()  # pyright: ignore[reportAttributeAccessIssue]
        return y

    def _stand_in(self, x: Tensor) -> Tensor:
        if self.tape is None or self.around is None or not is_watched(x, self.around):
            return x
        y = self.given(x)
        self.tape.watched.add(y._id)
        return y

    def _early_id(self) -> float:
        """An id as old as the region: whatever runs inside sees it as coming from outside."""
        self.count += 1
        return self.mark + self.count * STEP

    def refuse_variable(self, name: str | None) -> None:
        """A Variable is being made inside."""
        raise ArgumentError(
            f"a Variable{f' ({name!r})' if name else ''} is being made inside {self.kind}, where "
            "the body may run any number of times, or be traced once for many calls. Make "
            "Variables outside, once, and assign to them inside."
        )


def is_watched(x: Tensor, state: State) -> bool:
    """Whether a tape of this state watches a float Tensor."""
    return any(x._id in tape.watched for tape in state.tapes) and is_inexact(x.dtype)


class RegionTape(Tape):
    """The tape of a body: as strict as the tapes that are suspended outside."""

    __slots__ = ("outer", "plain")

    def __init__(self, state: State | None) -> None:
        super().__init__()
        self.outer = () if state is None else state.tapes
        self.plain = all(tape.plain for tape in self.outer)

    def admit(self, op: Op, rule: Rule, wanted: frozenset[int]) -> None:
        for tape in self.outer:
            tape.admit(op, rule, wanted)

    def read_plainly(self) -> None:
        for tape in self.outer:
            tape.read_plainly()

    def wants(self, variable: Any) -> bool:
        return any(tape.wants(variable) for tape in self.outer)


def run_inside(
    body: Callable[[], Any], region: Region, overrides: Overrides, tapes: tuple[Tape, ...] = ()
) -> Any:
    """Run a body in a region, with these tapes and no others."""
    with in_state(State(tapes, overrides, None, region)):
        return body()


# -- running again ---------------------------------------------------------------------------------


class Again:
    """A body that ran once, as a function of all that it used: `again([*xs, *captured])`.

    It runs under the overrides that were in force at first. What it assigns to Variables is
    left alone: that has been done.
    """

    def __init__(self, f: Flat, count: int, captured: Sequence[Source], overrides: Overrides,
                 kind: str) -> None:  # fmt: skip
        self.f = f
        self.count = count
        self.captured = list(captured)
        self.overrides = again_in_force(overrides)
        self.kind = kind

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        pairs = list(zip(self.captured, tensors[self.count :], strict=True))
        stand_ins = {id(s): x for s, x in pairs if not isinstance(s, Variable)}
        # an argument that is also captured is another input, with a gradient of its own
        xs = [dispatch.alias(x) if id(x) in stand_ins else x for x in tensors[: self.count]]
        values = {s: x for s, x in pairs if isinstance(s, Variable)}
        region = Region(self.kind, stand_ins, values)
        return run_inside(
            lambda: self.f(xs), region, self.overrides, () if (s := current()) is None else s.tapes
        )


def again_in_force(overrides: Overrides) -> Overrides:
    """The same overrides for ops that are created again, which are no new hits."""
    return overrides and {key: binding.again() for key, binding in overrides.items()}


def pullback(f: Flat, count: int, wanted: Sequence[int], reached: Sequence[int]) -> Flat:
    """The gradient of a flat function: (xs…, dys…) to the gradients by the wanted xs.

    dys are those of the outputs `reached`, in order. Zeros stand where nothing is connected.
    """

    def pull(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        xs, dys = list(tensors[:count]), tensors[count:]
        tape = Tape()
        for i in wanted:
            xs[i] = dispatch.alias(xs[i])
            tape.watched.add(xs[i]._id)
        ys = run_taped(tape, f, (xs,))
        found = pull_through(tape, [ys[i] for i in reached], dys)
        zeros = OPS["ZerosLike"].function
        return [zeros(xs[i]) if (dx := found.get(xs[i]._id)) is None else dx for i in wanted]

    return pull


def pull_through(tape: Tape, ys: Sequence[Tensor], dys: Sequence[Tensor]) -> Grads:
    """The gradients of `sum(y * dy)` over all ys by what the tape watches."""
    watched = tape.close()
    grads: Grads = {}
    for y, dy in zip(ys, dys, strict=True):
        if y._id in watched:
            old = grads.get(y._id)
            grads[y._id] = dy if old is None else OPS["AddV2"].function(old, dy)
    return walk(reversed(tape.records), grads, watched)


# -- the record outside ----------------------------------------------------------------------------


def _no_kernel(xp: Any, xs: Sequence[Any]) -> Any:
    raise AssertionError("a region runs its own body")


REGION = Op("_Region", "region", _no_kernel, [Input("xs", "many")], several=True)


class RegionRule(Rule):
    """How the gradient passes a region: `pulls(dys, inputs)` gives it for the wanted inputs.

    `inputs` are the Tensors outside, all of them; `wanted` and `reached` are the places of the
    inputs that are watched and of the outputs that they lead to.
    """

    def __init__(
        self,
        name: str,
        inputs: Sequence[Tensor],
        wanted: Sequence[int],
        reached: Sequence[int],
        answer: Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Any]],
    ) -> None:
        self.name = name
        self.inputs = list(inputs)
        self.wanted = list(wanted)
        self.reached = list(reached)
        self.answer = answer

    def linear_in(self, wanted: frozenset[int]) -> bool:
        return True  # its body was checked op by op, see RegionTape

    def pull(self, record: Any, dy: Any, wanted: Sequence[int]) -> Any:
        dxs: list[Any] = [None] * len(self.inputs)
        given = self.answer(self.inputs, [dy[i] for i in self.reached])
        for i, dx in zip(self.wanted, given, strict=True):
            dxs[i] = dx
        return [(0, dxs)]


def record_region(rule: RegionRule, ys: Sequence[Tensor]) -> None:
    """Put a region on the open tapes that watch an input of it."""
    state = current()
    if state is None or not rule.wanted or not rule.reached:
        return
    keys = {i: rule.inputs[i]._id for i in rule.wanted}
    ids = tuple(keys.get(i, 0) for i in range(len(rule.inputs)))
    specs = [(x._data.shape, x._data.dtype) for x in rule.inputs]
    entry = GroupedRecord(REGION, rule, {}, ids, specs, (), tuple(y._id for y in ys), None)
    entry.layout = (tuple(range(len(ids))),)
    entry.output_specs = [(y._data.shape, y.dtype) for y in ys]
    entry.symbolic = None
    for tape in state.tapes:
        if not tape.watched.isdisjoint(keys.values()):
            tape.admit(REGION, rule, frozenset({0}))
            tape.records.append(entry)
            tape.watched.update(ys[i]._id for i in rule.reached)


def check_guard(inputs: Sequence[Tensor]) -> None:
    """A custom function around must have been given what the region takes in."""
    state = current()
    if state is not None and state.guard is not None:
        state.guard.check(REGION, inputs)


def watched_places(inputs: Sequence[Tensor]) -> tuple[int, ...]:
    """Which of these the open tapes watch."""
    state = current()
    if state is None or not state.tapes:
        return ()
    return tuple(i for i, x in enumerate(inputs) if is_watched(x, state))


def in_region(x: Tensor) -> Tensor:
    """What stands for a Tensor in the region that is open, if one is."""
    state = current()
    return x if state is None or state.region is None else state.region.enter(x)


def read_source(source: Source) -> Tensor:
    """The Tensor that a body takes from a source, as the tapes outside see it."""
    return source._read() if isinstance(source, Variable) else source


def fresh(y: Tensor) -> Tensor:
    """A result of a region under an id of the tapes outside."""
    z = type(y)()
    z._data = y._data
    z._id = next_id()
    return z
