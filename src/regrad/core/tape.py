"""Records, the tapes that hold them, and how an op comes to be on a tape.

All records are made here: by a tape's `write_unary` and its kin for what the fast path runs, by
`put` for any other op, and by `record_of` for a rule that is pulled through without a tape.
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
TIED = "_Tied"  # the op type of the record that ends a loop of Python's (`transforms.ties`)

# Where a parameter's tensors lie among the leaves: one index, several, or nowhere (None).
Place = int | tuple[int, ...] | None
Layout: TypeAlias = tuple[Place, ...] | None  # None: each parameter has one tensor
Spec: TypeAlias = tuple[Any, Any]  # a shape and a dtype, as the array has them
Result: TypeAlias = Tensor | tuple[Tensor, ...]  # of an op: one output, or several

_blank = object.__new__


@dataclass(slots=True, eq=False, repr=False)
class Record:
    """One executed op: ids, shapes and dtypes, and just the values that its rule names.

    It never holds a Tensor that no rule asked for, so a chain of additions keeps nothing.
    `inputs` are ids, `outputs` one id or (for several outputs) a tuple of them; `specs` are
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
    own = None  # of another library's op: how that computes it, and its gradient

    @property
    def places(self) -> Sequence[Place]:
        """The places of each parameter's tensors among the leaves."""
        return range(len(self.inputs))

    def argument(self, leaves: Sequence[Any], parameter: int) -> Any:
        """Return the part of `leaves` that belongs to a parameter: one item, a list, or None."""
        return leaves[parameter]

    def detail(self, parameter: int, which: int) -> Any:
        """The shape (0) or dtype (1) of a parameter; a list of them for a sequence."""
        return self.specs[parameter][which]

    def replace(self, x: Tensor, other: Tensor) -> None:
        """Keep another Tensor for the rule wherever x is kept."""
        self.xs = [other if kept is x else kept for kept in self.xs]
        if isinstance(self.y, tuple):
            self.y = tuple([other if kept is x else kept for kept in self.y])
        elif self.y is x:
            self.y = other

    def view(self) -> OpView:
        """Return the op as a rule in TensorFlow's form sees it."""
        return OpView(self)

    def wanted(self, watched: set[int]) -> list[int]:
        """The parameters through which a watched input is reached."""
        return [p for p, i in enumerate(self.inputs) if i in watched]

    def only(self, watched: set[int]) -> Self:
        """Return the record with 0 for the ids of all inputs but the watched (see `needs`)."""
        made = copy(self)
        made.inputs = tuple([i if i in watched else 0 for i in self.inputs])
        return made

    def by_parameter(self, gradients: Sequence[Any]) -> Iterable[tuple[int, Any]]:
        """One gradient per leaf, regrouped as `(parameter, gradient)`."""
        return enumerate(gradients)


@dataclass(slots=True, eq=False, repr=False)
class GroupedRecord(Record):
    """A record of an op with several outputs, or with sequences or optional tensors as inputs."""

    layout: tuple[Place, ...]
    output_specs: Sequence[Spec] = ()
    symbolic: Sequence[Tensor] | None = None  # the outputs, of a graph

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
        """The gradient that arrives at an output which nobody used: zeros."""
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
    """A record that is on no tape. `hit` is the counter of its op's line, if that is known.

    `pulled` holds the results of each `builtin` in the rule, by leaf.
    """

    __slots__ = ("hit", "own", "pulled")

    hit: Hit | None
    own: Any
    pulled: list[Mapping[int, Any]]


class LoneGroupedRecord(GroupedRecord):
    """The same of a grouped record."""

    __slots__ = ("hit", "own", "pulled")

    hit: Hit | None
    own: Any
    pulled: list[Mapping[int, Any]]


def positions(place: Place) -> tuple[int, ...]:
    """The leaves at a place."""
    if isinstance(place, tuple):
        return place
    return () if place is None else (place,)


def placed(leaves: Sequence[Any], place: Place) -> Any:
    """Return the part of the leaves that one parameter gets: one, a list of them, or None."""
    if isinstance(place, tuple):
        return [leaves[i] for i in place]
    return None if place is None else leaves[place]


def leaves_of(given: Any, place: Place) -> Sequence[Any]:
    """Return the leaves of what one parameter gets."""
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
    """Return a record that is on no tape; a plain one, unless a layout or outputs are given."""
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
    """Return the record of which these are the columns, the last one first."""
    spec, xs = (p, ()) if type(p) is tuple else ((p.shape, p.dtype), (known(p, i),))
    y = None if y is None else known(y, n)
    return Record(rule.op, rule, NO_ATTRS, (i,), (spec,), xs, n, y)


def made(entries: Iterator[Any]) -> Iterator[Record]:
    """The records that stand in entries, which come newest first."""
    for entry in entries:
        yield restored(entry, *islice(entries, 4)) if type(entry) is int else entry


class Tape:
    """The records that lead from what is watched, oldest first."""

    __slots__ = ("entries", "lost", "watched")

    plain = True  # admits any record and keeps what the rules name
    keeps_all = False  # its records keep all inputs and outputs, for inspection
    opens = False  # what else is one record (a compiled call, a checkpoint) runs op by op
    levels = 1  # for how many open tapes it stands

    def __init__(self, watched: Iterable[int] = ()) -> None:
        self.watched: set[int] = set(watched)
        self.entries: list[Any] = []  # records, or in their place their columns
        self.lost: set[int] | None = None  # ids of what left a custom function by a Variable

    @property
    def records(self) -> list[Record]:
        """The records, oldest first; those that are columns are made whole, and stay so."""
        entries = self.entries
        if int in map(type, entries):
            entries[:] = [*made(reversed(entries))][::-1]
        return entries

    # An op of one input whose rule is `short` (the key) is written as columns, which the garbage
    # collector does not follow: the array of the input, or its spec if the rule does not name
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
        record = _blank(Record)  # not by its constructor: a second call, at every op that is taped
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
        """Write the record of a call whose rule keeps for itself what it needs."""
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

        What was watched so far is returned, for the walk.
        """
        watched, self.watched = self.watched, set()
        return watched

    def admit(self, op: Op, rule: Rule, wanted: frozenset[int]) -> bool:
        """Return whether to record an op; an error refuses one that this tape cannot do with."""
        return True

    def read_plainly(self) -> None:
        """A watched tensor was read as a plain number (`float(x)`, `x.item()`, `bool(x)`)."""

    def walks_back(self) -> bool:
        """Return whether gradients will go back along the records; in forward mode they do not."""
        return True

    def wants(self, variable: VariableLike) -> bool:
        """Return whether reads of this Variable are watched (only `variable_grads` does)."""
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
    """Put the op on each tape that watches one of its inputs, under the rule in force now.

    An op that is run again, by `regrad.transforms.replay`, brings the `rule` that was in force the
    first time. The result is returned: that of another function, if the rule replaces values.
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
    """The rule for an op that is being created (in a graph, or at once), which counts the hit."""
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
    for found in (binding, own):  # (one that holds in some places may not hold here)
        if found is not None and (rule := found.bind(op, xs)) is not None:
            return rule
    return op.rule


def cuts(rule: Rule, attrs: Attrs, xs: Sequence[Tensor]) -> bool:
    """Return whether no gradient passes an op under this rule."""
    return not rule.watches or (rule.unless is not None and rule.unless(attrs, xs))


def effective(op: Op, rule: Rule, specs: Sequence[Spec], y: Result) -> Rule:
    """The rule itself, or for complex numbers the conjugated rule of a holomorphic op.

    Rules of an override are used as they are, except for those of other ops.
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
    """Write one record, which all the tapes that watch share.

    A rule for the first derivative alone is for the innermost tape that is open. The others, which
    differentiate the gradient, record the op under its own.
    """
    if not rule.once:
        _put(state, state.tapes, op, rule, xs, attrs, y, layout)
        return
    inner = innermost(state, op)
    outer = [tape for tape in state.tapes if tape not in inner]
    _put(state, inner, op, rule, xs, attrs, y, layout)
    _put(state, outer, op, op.rule, xs, attrs, y, layout)


def innermost(state: State, op: Op) -> list[Tape]:
    """Return the innermost of the open tapes, if it records here, with what a region adds to it.

    Raises:
        GradientError: it is that of a region, and stands for several.
    """
    last = open_tapes(state)[-1:]
    if last and state.region is not None and last[0] in state.region.tapes:
        last = tuple(state.region.tapes)
    if any(tape.levels > 1 for tape in last):
        kind = "region" if state.region is None else state.region.kind
        raise GradientError(
            f"order=1: {op.type!r} is created in the body of a {kind}, which is one "
            "op to two gradients at once, one of the other, and its rule is for one of them. "
            "Write the loop or the branch in Python, map over examples outside of the gradients, "
            "or let the rules hold at every order (order=None)."
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
    """The record of an op with groups of inputs or several outputs, and the ids to watch."""
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
    # of several outputs, those of integers have no gradient, unless a rule was put in force (in a
    # graph: for an op before, too)
    carrying = [t._id for t in outputs if is_inexact(t.dtype) or getattr(t._data, "carries", False)]
    return entry, carrying if carrying and several and op.owns(rule) else list(ids_out)


def _is_complex(y: Result) -> bool:
    return any(t.dtype.kind == "c" for t in (y if isinstance(y, tuple) else (y,)))


def _wanted(tapes: Sequence[Tape], ids: tuple[int, ...], layout: Layout) -> frozenset[int]:
    """The parameters through which these tapes reach the op."""
    if len(ids) == 1 and layout is None:
        return ONLY
    leaves = [i for i, x in enumerate(ids) for tape in tapes if x in tape.watched]
    if layout is None:
        return frozenset(leaves)
    return frozenset(
        p for p, place in enumerate(layout) if not set(positions(place)).isdisjoint(leaves)
    )


def kept_of(xs: tuple[Tensor, ...], leaves: frozenset[int]) -> Sequence[Tensor | None]:
    """The inputs without those that no rule asked for."""
    if not leaves:
        return ()
    if len(leaves) == len(xs):
        return xs
    return [x if i in leaves else None for i, x in enumerate(xs)]
