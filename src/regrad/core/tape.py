"""Records, the tapes that hold them, and the code that writes ops to tapes.

All records are made here: by a tape's `write_unary` and similar methods for the fast path, by `put`
for any other op, and by `record_of` for a rule that is pulled without a tape.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self, TypeAlias

import numpy as np

from regrad.core.backends import is_inexact
from regrad.core.dims import is_known
from regrad.core.protocols import Overriding, VariableLike
from regrad.core.registry import OPS, Attrs, Op
from regrad.core.reports import Hit
from regrad.core.rule import Conjugated, NoGradient, Rule
from regrad.core.rule_forms import OpView
from regrad.core.state import BESIDE, OPEN, State, current, open_tapes, refuse_elsewhere
from regrad.core.tensor import Tensor, known, wrap
from regrad.errors import GradientError

NO_ATTRS: Attrs = {}  # shared, never written to
ONLY, SECOND, BOTH = frozenset({0}), frozenset({1}), frozenset({0, 1})
REAL = (np.dtype(np.float32), np.dtype(np.float64))
CUT = NoGradient()
TIED = "_Tied"  # the op type of the record at the end of a Python loop (`transforms.ties`)

# The positions of a parameter's tensors among the leaves: one index, several, or None.
Place = int | tuple[int, ...] | None
Layout: TypeAlias = tuple[Place, ...] | None  # None: each parameter has one tensor
Spec: TypeAlias = tuple[Any, Any]  # a shape and a dtype, as attributes of the array
Result: TypeAlias = Tensor | tuple[Tensor, ...]  # the results of an op: one or several outputs

_blank = object.__new__


@dataclass(slots=True, eq=False, repr=False)
class Record:
    """One executed op: ids, shapes and dtypes, and only the values that its rule names.

    A record holds no Tensor that its rule does not name. So a chain of additions keeps nothing.
    `inputs` are ids. `outputs` is one id or (for several outputs) a tuple of them. `specs` are
    `(shape, dtype)` of the inputs.
    """

    op: Op
    rule: Rule
    attrs: Attrs
    inputs: tuple[int, ...]
    specs: Sequence[Spec]
    xs: Sequence[Any]
    outputs: Any
    y: Any

    plain = True  # one output, and one tensor per parameter
    own = None  # for another library's op: an object that computes the op and its gradient

    @property
    def places(self) -> Sequence[Place]:
        """The places of each parameter's tensors among the leaves."""
        return range(len(self.inputs))

    def argument(self, leaves: Sequence[Any], parameter: int) -> Any:
        """Return the part of `leaves` that belongs to a parameter: one item, a list, or None."""
        return leaves[parameter]

    def detail(self, parameter: int, which: int) -> Any:
        """Return the shape (0) or dtype (1) of a parameter; a list of them for a sequence."""
        return self.specs[parameter][which]

    def replace(self, x: Tensor, other: Tensor) -> None:
        """Keep another Tensor for the rule wherever x is kept."""
        self.xs = [other if kept is x else kept for kept in self.xs]
        if isinstance(self.y, tuple):
            self.y = tuple([other if kept is x else kept for kept in self.y])
        elif self.y is x:
            self.y = other

    def view(self) -> OpView:
        """Return the op as the argument of a rule in TensorFlow's form."""
        return OpView(self)

    def wanted(self, watched: set[int]) -> list[int]:
        """Return the parameters that have a watched input."""
        return [p for p, i in enumerate(self.inputs) if i in watched]

    def only(self, watched: set[int]) -> Self:
        """Return the record with 0 as the id of every input that is not watched (see `needs`)."""
        made = copy(self)
        made.inputs = tuple([i if i in watched else 0 for i in self.inputs])
        return made

    def by_parameter(self, gradients: Sequence[Any]) -> Iterable[tuple[int, Any]]:
        """Regroup one gradient per leaf as `(parameter, gradient)`."""
        return enumerate(gradients)


@dataclass(slots=True, eq=False, repr=False)
class GroupedRecord(Record):
    """A record of an op with several outputs, or with sequences or optional tensors as inputs."""

    layout: tuple[Place, ...]
    output_specs: Sequence[Spec] = ()
    symbolic: Sequence[Tensor] | None = None  # the outputs, in a graph

    plain = False

    @property
    def places(self) -> Sequence[Place]:
        return self.layout

    def argument(self, leaves: Sequence[Any], parameter: int) -> Any:
        return placed(leaves, self.layout[parameter])

    def detail(self, parameter: int, which: int) -> Any:
        spec = self.argument(self.specs, parameter)
        return [s[which] for s in spec] if isinstance(spec, list) else spec and spec[which]

    def unused(self, index: int) -> Any:
        """Return the incoming gradient of an unused output: zeros."""
        if self.symbolic is not None:
            return OPS["ZerosLike"].function(self.symbolic[index])
        shape, dtype = self.output_specs[index]
        if not is_known(shape):
            return OPS["BroadcastTo"].function(wrap(np.zeros((), dtype)), shape)
        return wrap(np.zeros(shape, dtype))

    def wanted(self, watched: set[int]) -> list[int]:
        if self.rule.by_leaf:
            return super(GroupedRecord, self).wanted(watched)
        return [
            p
            for p, place in enumerate(self.layout)
            if any(self.inputs[i] in watched for i in positions(place))
        ]

    def by_parameter(self, gradients: Sequence[Any]) -> Iterable[tuple[int, Any]]:
        return [(p, self.argument(gradients, p)) for p in range(len(self.layout))]


class LoneRecord(Record):
    """A record that is on no tape. `hit` is the counter of its op's line, if known.

    `pulled` holds the results of each `builtin` in the rule, by leaf.
    """

    __slots__ = ("hit", "own", "pulled")

    hit: Hit | None
    own: Any
    pulled: list[Mapping[int, Any]]


class LoneGroupedRecord(GroupedRecord):
    """A `LoneRecord` that is grouped."""

    __slots__ = ("hit", "own", "pulled")

    hit: Hit | None
    own: Any
    pulled: list[Mapping[int, Any]]


def positions(place: Place) -> tuple[int, ...]:
    """Return the leaves at a place."""
    if isinstance(place, tuple):
        return place
    return () if place is None else (place,)


def placed(leaves: Sequence[Any], place: Place) -> Any:
    """Return the part of the leaves that one parameter gets: one, a list of them, or None."""
    if isinstance(place, tuple):
        return [leaves[i] for i in place]
    return None if place is None else leaves[place]


def leaves_of(given: Any, place: Place) -> Sequence[Any]:
    """Return the leaves of the value that one parameter gets."""
    return given if isinstance(place, tuple) else () if place is None else (given,)


def record_of(
    op: Op,
    rule: Rule,
    attrs: Attrs,
    inputs: tuple[int, ...],
    specs: Sequence[Spec],
    xs: Sequence[Tensor | None],
    outputs: int | tuple[int, ...],
    y: Result | None,
    layout: Layout = None,
    output_specs: Sequence[Spec] | None = None,
    hit: Hit | None = None,
    own: Any = None,
) -> Record:
    """Return a record that is on no tape. It is plain unless a layout or outputs are passed."""
    if layout is None and output_specs is None:
        record = LoneRecord(op, rule, attrs, inputs, specs, xs, outputs, y)
    else:
        layout = layout or tuple(range(len(inputs)))
        record = LoneGroupedRecord(
            op, rule, attrs, inputs, specs, xs, outputs, y, layout, output_specs or ()
        )
    record.hit, record.own, record.pulled = hit, own, []
    return record


def restored(n: int, rule: Any, y: Any, i: int, p: Any) -> Record:
    """Return the record that has these columns, the last one first."""
    spec, xs = (p, ()) if type(p) is tuple else ((p.shape, p.dtype), (known(p, i),))
    y = None if y is None else known(y, n)
    return Record(rule.op, rule, NO_ATTRS, (i,), (spec,), xs, n, y)


def made(entries: Iterator[Any]) -> Iterator[Record]:
    """Yield the records of entries, which come newest first."""
    for entry in entries:
        yield restored(entry, *islice(entries, 4)) if type(entry) is int else entry


class Tape:
    """The records that lead from the watched tensors, oldest first."""

    __slots__ = ("entries", "lost", "watched")

    plain = True  # admits any record and keeps the values that the rules name
    keeps_all = False  # its records keep all inputs and outputs, for inspection
    opens = False  # runs calls with one record (a compiled call, a checkpoint) op by op
    levels = 1  # the number of open tapes that it represents

    def __init__(self, watched: Iterable[int] = ()) -> None:
        self.watched: set[int] = set(watched)
        self.entries: list[Any] = []  # records, or the columns of a record in its place
        self.lost: set[int] | None = None  # ids of values that left a custom function by a Variable

    @property
    def records(self) -> list[Record]:
        """The records, oldest first. Columns are converted to records, permanently."""
        entries = self.entries
        if int in map(type, entries):
            entries[:] = [*made(reversed(entries))][::-1]
        return entries

    # An op of one input whose rule is `short` (the key) is stored as columns, which the garbage
    # collector does not track: the array of the input, or its spec if the rule does not name
    # x; its id; the output's array, if the rule names y; the rule; the output's id (see
    # `restored`).

    def write_unary(self, op: Op, x: Tensor, y: Tensor) -> None:
        """Write the record of `y = op(x)` under the op's own rule; x is watched and real."""
        rule = op.rule
        if not rule.watches:
            return
        kept, keeps_y = rule.plans.get(ONLY) or rule.keeps(ONLY)
        p, i, n = x._data, x._id, y._id
        self.watched.add(n)
        if rule.short is not None:
            of_x = p if kept else (p.shape, p.dtype)
            self.entries += (of_x, i, y._data if keeps_y else None, rule, n)
        else:
            specs, xs = ((p.shape, p.dtype),), (x,) if kept else ()
            entry = Record(op, rule, NO_ATTRS, (i,), specs, xs, n, y if keeps_y else None)
            self.entries.append(entry)

    def write_binary(self, op: Op, a: Tensor, b: Tensor, y: Tensor) -> None:
        """Write the record of `y = op(a, b)` under the op's own rule, of real numbers."""
        rule = op.rule
        if not rule.watches:
            return
        i, j, watched = a._id, b._id, self.watched
        wanted = (BOTH if i in watched else SECOND) if j in watched else ONLY
        kept, keeps_y = rule.plans.get(wanted) or rule.keeps(wanted)
        p, q = a._data, b._data
        record = _blank(Record)  # not by its constructor, which would be a second call for each op
        record.op = op
        record.rule = rule
        record.attrs = NO_ATTRS
        record.inputs = (i, j)
        record.specs = ((p.shape, p.dtype), (q.shape, q.dtype))
        record.xs = kept_of((a, b), kept)
        record.outputs = n = y._id
        record.y = y if keeps_y else None
        watched.add(n)
        self.entries.append(record)

    def write_call(self, op: Op, rule: Rule, xs: tuple[Tensor, ...], y: Tensor) -> None:
        """Write the record of a call whose rule itself keeps the values that it needs."""
        n = y._id
        self.watched.add(n)
        if rule.short is not None:
            data = xs[0]._data
            self.entries += ((data.shape, data.dtype), xs[0]._id, None, rule, n)
        else:
            ids = tuple([x._id for x in xs])
            specs = [(x._data.shape, x._data.dtype) for x in xs]
            self.entries.append(Record(op, rule, NO_ATTRS, ids, specs, (), n, None))

    def close(self) -> set[int]:
        """Watch nothing from now on (an asyncio task may still hold a copy of the state).

        Return the ids that were watched so far, for the backward pass.
        """
        watched, self.watched = self.watched, set()
        return watched

    def admit(self, op: Op, rule: Rule, wanted: frozenset[int]) -> bool:
        """Return whether to record an op. Raises for an op that this tape does not support."""
        return True

    def read_plainly(self) -> None:
        """Called when a watched tensor is read as a number (`float(x)`, `x.item()`, `bool(x)`)."""

    def walks_back(self) -> bool:
        """Return whether gradients go back along the records, unlike in forward mode."""
        return True

    def wants(self, variable: VariableLike) -> bool:
        """Return whether to watch reads of this Variable (only `variable_grads` does)."""
        return False


# -- writing ops on the tapes --------------------------------------------------------------------


def record(
    op: Op,
    xs: tuple[Tensor, ...],
    attrs: Attrs,
    y: Result,
    layout: Layout = None,
    rule: Rule | None = None,
) -> Any:
    """Put the op on each tape that watches one of its inputs, under the rule that is active now.

    An op that runs again, by `regrad.transforms.replay`, passes the `rule` that was active the
    first time. Returns the result, or another function's result if the rule replaces values.
    """
    state = current()
    if state is None:
        refuse_elsewhere(op.type, xs)
        return y
    guard = state.guard
    if BESIDE or (OPEN and not (state.tapes or (guard is not None and guard.tapes))):
        refuse_elsewhere(op.type, xs)
    if rule is None:
        rule = rule_in_force(state, op, xs)
        if state.overrides is not None and rule.bare.replaces:
            return rule.bare.run(rule, xs, attrs, y, layout)  # pyright: ignore (`ReplacingRule`)
    if state.region is not None:
        state.region.did(op, rule, xs, attrs, y, layout)
    if state.tapes:
        put(state, op, rule, xs, attrs, y, layout)
    return y


def rule_in_force(state: State, op: Op, xs: Sequence[Tensor], graph: object = None) -> Rule:
    """Return the rule for a new op (in a graph, or eager), which counts the hit."""
    if state.guard is not None:
        state.guard.check(op, xs)
    if state.overrides is None:
        return op.rule
    binding: Overriding | None = state.overrides.get(op.type)
    own: Overriding | None = None
    if graph is not None:
        own = state.overrides.get((graph, op.type))
    if own is not None and (binding is None or own.depth > binding.depth):
        binding, own = own, binding
    for found in (binding, own):  # (a binding may be limited to other places)
        if found is not None and (rule := found.bind(op, xs)) is not None:
            return rule
    return op.rule


def cuts(rule: Rule, attrs: Attrs, xs: Sequence[Tensor]) -> bool:
    """Return whether no gradient passes through an op under this rule."""
    return not rule.watches or (rule.unless is not None and rule.unless(attrs, xs))


def effective(op: Op, rule: Rule, specs: Sequence[Spec], y: Result) -> Rule:
    """Return the rule itself, or the conjugated rule of a holomorphic op for complex numbers.

    Rules of an override stay unchanged, except for own rules of other ops.
    """
    if not specs or specs[0][1] in REAL or not rule.watches:
        return rule
    holomorphic = op.holomorphic if op.owns(rule) else rule.holomorphic
    return Conjugated(rule, OPS["Conj"].function) if holomorphic and _is_complex(y) else rule


def put(
    state: State,
    op: Op,
    rule: Rule,
    xs: tuple[Tensor, ...],
    attrs: Attrs,
    y: Any,
    layout: Layout = None,
) -> None:
    """Write one record, which all watching tapes share.

    A rule for the first derivative alone goes on the innermost open tape. The other tapes, which
    differentiate the gradient, record the op under its own rule.
    """
    if not rule.once:
        _put(state, state.tapes, op, rule, xs, attrs, y, layout)
        return
    inner = innermost(state, op)
    outer = [tape for tape in state.tapes if tape not in inner]
    _put(state, inner, op, rule, xs, attrs, y, layout)
    _put(state, outer, op, op.rule, xs, attrs, y, layout)


def put_on(state: State, tape: Tape, op: Op, rule: Rule, x: Tensor, y: Tensor) -> None:
    """Write the record of an op under a rule on one tape, and under its own on the others."""
    others = [each for each in state.tapes if each is not tape]
    _put(state, [tape], op, rule, (x,), NO_ATTRS, y, None)
    _put(state, others, op, op.rule, (x,), NO_ATTRS, y, None)


def innermost(state: State, op: Op) -> list[Tape]:
    """Return the innermost open tape, with the inner tapes of a region, if it records here.

    Raises:
        GradientError: it belongs to a region and represents several tapes.
    """
    last = open_tapes(state)[-1:]
    if last and state.region is not None and last[0] in state.region.tapes:
        last = tuple(state.region.tapes)
    if any(tape.levels > 1 for tape in last):
        kind = "region" if state.region is None else state.region.kind
        raise GradientError(
            f"order=1: {op.type!r} is created in the body of a {kind}. Two nested gradients share "
            "this one op, and the rule is only for the inner gradient. Write the loop or the "
            "branch in Python, map over examples outside of the gradients, or let the rules apply "
            "at every order (order=None)."
        )
    return [tape for tape in last if tape in state.tapes]


def _put(
    state: State,
    tapes: Sequence[Tape],
    op: Op,
    rule: Rule,
    xs: tuple[Tensor, ...],
    attrs: Attrs,
    y: Any,
    layout: Layout,
) -> None:
    ids = tuple([x._id for x in xs])
    if len(tapes) != 1 or tapes[0].watched.isdisjoint(ids):
        tapes = [tape for tape in tapes if not tape.watched.isdisjoint(ids)]
        if not tapes:
            return
    if cuts(rule, attrs, xs):
        rule = CUT
    if not state.plain:
        tapes = [tape for tape in tapes if tape.admit(op, rule, _wanted([tape], ids, layout))]
    if not rule.watches or not tapes:
        return
    specs = [(x._data.shape, x._data.dtype) for x in xs]
    rule = effective(op, rule, specs, y)
    kept, keeps_y = rule.keeps(_wanted(tapes, ids, layout))
    if not state.plain and any(tape.keeps_all for tape in tapes):
        kept, keeps_y = frozenset(range(len(layout or xs))), True
    if layout is None and type(y) is not tuple:
        saved = kept_of(xs, kept) if kept else ()
        entry = Record(op, rule, attrs, ids, specs, saved, y._id, y if keeps_y else None)
        for tape in tapes:
            tape.watched.add(y._id)
            tape.entries.append(entry)
    else:
        entry, watches = _grouped(op, rule, attrs, ids, specs, xs, kept, y, keeps_y, layout)
        for tape in tapes:
            if rule.each:
                pairs = zip(ids, entry.outputs, strict=True)
                watches = [output for i, output in pairs if i in tape.watched]
            tape.entries.append(entry)
            tape.watched.update(watches)


def _grouped(
    op: Op,
    rule: Rule,
    attrs: Attrs,
    ids: tuple[int, ...],
    specs: Sequence[Spec],
    xs: tuple[Tensor, ...],
    kept: frozenset[int],
    y: Result,
    keeps_y: bool,
    layout: Layout,
) -> tuple[GroupedRecord, list[int]]:
    """Return the record of an op with groups of inputs or several outputs, and ids to watch."""
    layout = layout or tuple(range(len(xs)))
    several = isinstance(y, tuple)
    outputs = y if several else (y,)
    saved = kept_of(xs, frozenset(i for p in kept for i in positions(layout[p])))
    ids_out = tuple(t._id for t in outputs)
    entry = GroupedRecord(
        op, rule, attrs, ids, specs, saved, ids_out if several else y._id, y if keeps_y else None,
        layout, [(t._data.shape, t.dtype) for t in outputs],
        outputs if outputs and type(outputs[0]) is not Tensor else None,
    )  # fmt: skip
    # Integer outputs, of several, have no gradient, unless an override applies (in a graph: also if
    # one applied to an earlier op).
    carrying = [t._id for t in outputs if is_inexact(t.dtype) or getattr(t._data, "carries", False)]
    return entry, carrying if carrying and several and op.owns(rule) else list(ids_out)


def _is_complex(y: Result) -> bool:
    return any(t.dtype.kind == "c" for t in (y if isinstance(y, tuple) else (y,)))


def _wanted(tapes: Sequence[Tape], ids: tuple[int, ...], layout: Layout) -> frozenset[int]:
    """Return the parameters through which these tapes reach the op."""
    if len(ids) == 1 and layout is None:
        return ONLY
    leaves = [i for i, x in enumerate(ids) for tape in tapes if x in tape.watched]
    if layout is None:
        return frozenset(leaves)
    return frozenset(
        p for p, place in enumerate(layout) if not set(positions(place)).isdisjoint(leaves)
    )


def kept_of(xs: tuple[Tensor, ...], leaves: frozenset[int]) -> Sequence[Tensor | None]:
    """Return the inputs, with None in place of each input that no rule names."""
    if not leaves:
        return ()
    if len(leaves) == len(xs):
        return xs
    return [x if i in leaves else None for i, x in enumerate(xs)]
