"""The recorder of regrad's own functions: tapes that store the origin of their records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import compress
from typing import Any

import numpy as np

from regrad.autodiff.custom_calls import CustomCall, CustomRule
from regrad.autodiff.custom_functions import OpaqueFunction, unpack
from regrad.autodiff.gradients import result, watched_inputs
from regrad.autodiff.variables import Variable, VariableTape
from regrad.checking import differences
from regrad.core import containers, dispatch
from regrad.core.backends import BACKENDS, is_inexact
from regrad.core.bindings import CountedRule, OpBinding
from regrad.core.callers import find_caller
from regrad.core.containers import replaced
from regrad.core.name_scopes import PATH
from regrad.core.pullback import pull_back, pull_through, run_taped, run_watched
from regrad.core.registry import OPS, Op
from regrad.core.rule import Conjugated, Cotangent, Rule, label, place
from regrad.core.state import State, current, in_state, masked
from regrad.core.tape import TIED, GroupedRecord, Record, effective
from regrad.core.tensor import Tensor, wrap
from regrad.core.walk import (
    Grads,
    check_gradient,
    leaf_gradients,
    name_of,
    seed,
    walk,
)
from regrad.inspection.numbers import wide
from regrad.inspection.recorder import (
    Kept,
    Leaf,
    Named,
    Recording,
    RuleKind,
    RunRecorder,
    SeenOp,
    Tool,
)


class Lines(list[Record]):
    """Records, each with the line of the user's code that made it, and its name scope."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[int, tuple[str, str]] = {}
        self.origins: dict[Any, Any] = {}  # ids of a loop's results, before they were tied

    def append(self, record: Record) -> None:
        if record.op.type == TIED:
            pairs = zip(record.outputs, record.inputs, strict=True)
            self.origins.update((y, self.origins.get(x, x)) for y, x in pairs)
        self.places[id(record)] = find_caller(), ".".join(PATH.get())
        super().append(record)


class SeenTape(VariableTape):
    """A tape that stores the line of each record; compiled bodies run op by op under it."""

    __slots__ = ("cuts",)

    plain = False
    opens = True

    def __init__(self, only: list[Variable] | None = None) -> None:
        super().__init__(only)
        self.entries: Any = Lines()
        self.cuts: list[SeenOp] = []  # ops that pass no gradient on

    def admit(self, op: Op, rule: Rule, wanted: frozenset[int]) -> bool:
        if not rule.watches:
            self.cuts.append(SeenOp(op.type, line=find_caller(), path=".".join(PATH.get())))
        return super().admit(op, rule, wanted)

    def place(self, record: Record) -> tuple[str, str]:
        """Return the line of the user's code that ran the op, and the path of its name scope."""
        return self.entries.places.get(id(record), ("", ""))


class KeepingTape(SeenTape):
    """A tape whose records also keep all inputs and outputs."""

    __slots__ = ()

    keeps_all = True


class TapedOp(SeenOp):
    """One record of a run."""

    __slots__ = ("record", "watched")

    def __init__(self, record: Record, tape: SeenTape, watched: set[int]) -> None:
        kind, rule = kind_of(record.rule, record)
        super().__init__(op_type_of(record), kind, rule, *tape.place(record))
        self.record: Record = record
        self.watched: set[int] = watched
        origin = tape.entries.origins
        self.takes: Sequence[Any] = [origin.get(i, i) for i in record.inputs if i in watched]
        outputs = record.outputs
        self.makes: Sequence[Any] = outputs if isinstance(outputs, tuple) else (outputs,)

    @property
    def leaves(self) -> list[int]:
        """Return the places of the differentiated inputs; the record must keep its inputs."""
        pairs = enumerate(zip(self.record.inputs, self.record.xs, strict=True))
        return [i for i, (key, x) in pairs if key in self.watched and is_inexact(x.dtype)]

    @property
    def xs(self) -> list[Tensor]:
        """Return the differentiated inputs."""
        return [self.record.xs[i] for i in self.leaves]

    @property
    def input_names(self) -> list[str]:
        """Return the names of the differentiated inputs."""
        return [name_of(self.record, i) for i in self.leaves]

    @property
    def title(self) -> str:
        """Return the rule of the op, for messages."""
        rule = bare_rule(self.record.rule)
        if isinstance(rule, CustomRule):
            return f"the gradient of the custom function {rule.name!r} ({self.rule})"
        return f"{label(rule)} for the op type {self.op_type!r}"

    @property
    def runs_alone(self) -> bool:
        """True if the op can run again without its program."""
        return isinstance(bare_rule(self.record.rule), CustomCall) or self.record.op.type in OPS

    def again(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Return the float results of the op for other inputs, under its rule."""
        record, rule = self.record, bare_rule(self.record.rule)
        given = tuple(replaced(record.xs, self.leaves, xs))
        if isinstance(rule, CustomCall):
            function, args, options = rule.again
            y = function(*with_tensors(args, given), **options)
        else:
            own = (
                None if rule is record.op.rule else {record.op.type: OpBinding(record.op, rule, 1)}
            )
            layout = record.layout if isinstance(record, GroupedRecord) else None
            with in_state((current() or State()).overriding(own)):
                y = dispatch.run(record.op, given, record.attrs, layout)
        ys = containers.flatten(y)[0]
        return [y for y in ys if isinstance(y, Tensor) and is_inexact(y.dtype)]

    def true(self, dys: Sequence[Any]) -> list[tuple[str, Tensor | None]]:
        """Return the true gradients by the watched inputs, with their names."""
        record = self.record
        dy = tuple(dys) if isinstance(record.outputs, tuple) else dys[0]
        leaves = [leaf for leaf, key in enumerate(record.inputs) if key in self.watched]
        names = [name_of(record, leaf) for leaf in leaves]  # (the rule may have the names)
        given, record.rule = record.rule, true_rule(record)
        try:
            found = leaf_gradients(record, dy, self.watched)
            dxs = [check_gradient(record, leaf, found.get(leaf), dy) for leaf in leaves]
        finally:
            record.rule = given
        return list(zip(names, dxs, strict=True))


class WalkTeller:
    """Observes a running backward pass, and reports its ops to a tool."""

    def __init__(self, tool: Tool, ops: Iterable[TapedOp]) -> None:
        self.tool = tool
        self.ops: dict[int, TapedOp] = {id(op.record): op for op in ops}
        self.dys: Sequence[Any] = ()
        self.dxs: list[tuple[str, Any]] = []

    def before(self, record: Record) -> None:
        self.dxs = []

    def __call__(self, record: Record, dy: Cotangent, leaf: int, dx: Tensor | None) -> None:
        op = self.ops.get(id(record))
        if op is None:  # the end of a loop
            return
        if not self.dxs:
            self.dys = dy if isinstance(dy, tuple) else (dy,)
            self.tool.arrived(op, self.dys)
        self.dxs.append((name_of(record, leaf), dx))
        if len(self.dxs) == len(op.takes):
            self.tool.left(op, self.dxs, self.dys)


class TapeRecorder(RunRecorder):
    """The recorder of regrad's functions."""

    def record(
        self, args: Sequence[Any], options: dict[str, Any], tape: SeenTape, gradients: bool = False
    ) -> None:
        """Run the function, and its gradients if requested, under a tape that records both."""
        self.tape = tape
        paths = containers.paths(tuple(args), "args") if args else []
        inputs, aliases, _ = watched_inputs(args, f"{self.api}(f)") if args else ((), [], None)
        self.arguments: list[tuple[str, Tensor]] = list(zip(paths, aliases, strict=True))
        tape.watched.update(x._id for x in aliases)
        self.forward: int = 0  # number of records of the forward pass

        def run(*inputs: Any) -> Any:
            value = self.f(*inputs, **options)
            self.forward = len(tape.records)
            if gradients:
                pull_back(tape, result(value, self.api), None, set(tape.watched), again=True)
            return value

        try:
            self.value: Any = run_taped(tape, run, inputs)
        finally:
            self.watched: set[int] = tape.close()
        self.ops: list[TapedOp] = [
            TapedOp(record, tape, self.watched) for record in tape.records if record.op.type != TIED
        ]

    @property
    def sources(self) -> list[tuple[str, Any, Tensor]]:
        """Return the differentiated arguments, then Variables, as (name, same, alias)."""
        arguments = [(name, i, x) for i, (name, x) in enumerate(self.arguments)]
        return [*arguments, *[(v.name, v, alias) for v, (_, alias) in self.tape.reads.items()]]

    def run(self, args: Sequence[Any], options: dict[str, Any], tool: Tool) -> Recording:
        with np.errstate(all="ignore") if tool.keeps else nullcontext():
            self.record(args, options, KeepingTape() if tool.keeps else SeenTape())
        for op in self.ops if tool.keeps else ():
            record = op.record
            ys = record.y if isinstance(record.y, tuple) else (record.y,)
            tool.ran(op, _named(record), [y for y in ys if y is not None and is_inexact(y.dtype)])
        return self.back(tool)

    def back(self, tool: Tool) -> Recording:
        """Run the backward pass of the last run."""
        y, grads = result(self.value, "trace_gradients"), Grads()
        if y._id in self.watched:
            grads[y._id] = seed(y)
            walk(reversed(self.tape.records), grads, self.watched, WalkTeller(tool, self.ops))
        count = len(self.arguments)
        leaves = [
            Leaf(name, "argument" if i < count else "parameter", x, grads.get(x._id), x._id, same)
            for i, (name, same, x) in enumerate(self.sources)
        ]
        cuts = [(op, "") for op in self.tape.cuts]
        made = [self.tape.entries.origins.get(y._id, y._id)]
        return Recording(self.value, [y], leaves, cuts, self.ops, made)

    def array(self, x: Any) -> Any:
        return None if x is None else x._values()

    def key(self, x: Any) -> int:
        return id(x._data)

    def type_of(self, op: Any) -> str:
        return op.record.op.type

    def kept(self, args: Sequence[Any], options: dict[str, Any]) -> Iterator[Kept]:
        """Yield each array that the records keep; a shared array counts for the first record."""
        self.record(args, options, SeenTape())
        seen: set[int] = set()
        for op in self.ops:
            record = op.record
            ys = record.y if isinstance(record.y, tuple) else (record.y,)
            saved = getattr(bare_rule(record.rule), "saved", ())  # of a custom function
            for x in (*record.xs, *ys, *(containers.flatten(saved)[0] if saved else [])):
                if isinstance(x, Tensor) and id(x._data) not in seen:
                    seen.add(id(x._data))
                    size = int(np.prod(x.shape)) * x.dtype.itemsize
                    yield op.op_type, op.line, op.path, size

    # -- another gradient ------------------------------------------------------------------------

    def true(self, args: Sequence[Any], options: dict[str, Any]) -> Sequence[Leaf]:
        make_true(self.tape.records)
        return self.back(Tool()).leaves

    def differences(self, args: Sequence[Any], options: dict[str, Any]) -> Sequence[Leaf]:
        _, rebuild = containers.flatten(tuple(args))
        aliases = [x for _, x in self.arguments]

        def values(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
            return [self.f(*rebuild(like(arrays, aliases)), **options)._values()]

        with np.errstate(all="ignore"):
            found = differences.gradients(values, [wide(x._values()) for x in aliases])
        pairs = zip(self.sources, like(found, aliases), strict=False)
        return [Leaf(name, "argument", x, g, x._id, same) for (name, same, x), g in pairs]


def _named(record: Record) -> Named:
    """Return the inputs of a record that keeps them, with their names."""
    return [(name_of(record, i), x) for i, x in enumerate(record.xs) if x is not None and x.size]


def like(arrays: Sequence[Any], xs: Sequence[Tensor]) -> list[Tensor]:
    """Return arrays as Tensors of the libraries of xs."""
    pairs = zip(arrays, xs, strict=True)
    return [wrap(BACKENDS[type(x._data)].from_numpy(np.asarray(a))) for a, x in pairs]


# -- whose rule ----------------------------------------------------------------------------------


def bare_rule(rule: Rule) -> Rule:
    """Return a rule without the wrappers that count hits or conjugate."""
    while isinstance(rule, Conjugated | CountedRule):
        rule = rule.rule
    return rule


def kind_of(rule: Rule, record: Record) -> tuple[RuleKind, str]:
    """Return the kind of a record's rule, with its name and place; "" if it is built in."""
    rule = bare_rule(rule)
    if isinstance(rule, CustomRule):
        return "custom", place(rule.custom.f)
    if rule is record.op.rule or record.op.owns(rule):
        return "built-in", ""
    return "override", place(rule.function) if rule.function else rule.name


def op_type_of(record: Record) -> str:
    """Return the op type of a record, or the name of a region or a custom function."""
    return record.rule.name if record.op.type.startswith(("_", "Custom")) else record.op.type


# -- the true rule of each record ----------------------------------------------------------------


class TrueCustom(Rule):
    """The derivative of a custom function op by op, which replaces its custom gradient."""

    def __init__(self, call: Any) -> None:
        self.call: CustomCall = call  # (the tape inspects it, so it needs more than the rule)
        self.name: Any = call.name

    def pull(
        self, record: Record, dy: Cotangent, wanted: Sequence[int]
    ) -> Iterable[tuple[int, Any]]:
        tape = KeepingTape()
        with masked():
            xs, ys = run_watched(tape, partial(_run_again, self.call), record.xs, wanted)
        make_true(tape.records)
        dys: Any = dy if isinstance(dy, tuple) else (dy,)
        arriving = [d is not None and is_inexact(y.dtype) for y, d in zip(ys, dys, strict=True)]
        found = pull_through(tape, [*compress(ys, arriving)], [*compress(dys, arriving)])
        return [(i, found.get(xs[i]._id)) for i in wanted]


def _run_again(call: CustomCall, xs: Sequence[Tensor]) -> list[Tensor]:
    """Return a custom function's results for other tensors, by ops with built-in rules."""
    _, args, options = call.again
    args = with_tensors(args, xs)
    value, _ = unpack(call.custom.run(args, options, lambda *tensors, **named: None), call.name)
    return containers.flatten(value)[0]


def with_tensors(args: Any, xs: Sequence[Tensor]) -> Any:
    """Return the same arguments with other Tensors in the places of their Tensors."""
    leaves, rebuild = containers.flatten(args)
    given = iter(xs)
    return rebuild([next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves])


def make_true(records: Iterable[Record]) -> None:
    """Put true rules into records that keep everything that these rules need."""
    for record in records:
        record.rule = true_rule(record)


def true_rule(record: Record) -> Rule:
    """Return the rule that is the derivative of a record's op."""
    whose, _ = kind_of(record.rule, record)
    if whose == "built-in":
        return record.rule
    bare = bare_rule(record.rule)
    if isinstance(bare, CustomRule):
        return record.rule if isinstance(bare.custom, OpaqueFunction) else TrueCustom(bare)
    return effective(record.op, record.op.rule, record.specs, record.y)
