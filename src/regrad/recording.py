"""Writing records: an op goes on each tape that watches one of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from regrad.namespaces import is_inexact
from regrad.registry import OPS, Op
from regrad.ruleforms import Conjugated, NoGradient, Rule
from regrad.state import BESIDE, OPEN, State, current, refuse_elsewhere
from regrad.tape import GroupedRecord, Place, Record, Tape, positions
from regrad.tensors import Tensor

NO_ATTRS: dict[str, Any] = {}  # shared, never written to
ONLY, SECOND, BOTH = frozenset({0}), frozenset({1}), frozenset({0, 1})
REAL = (np.dtype(np.float32), np.dtype(np.float64))
CUT = NoGradient()


def record(
    op: Op,
    xs: tuple[Tensor, ...],
    attrs: dict[str, Any],
    y: Any,
    layout: tuple[Place, ...] | None = None,
    rule: Rule | None = None,
) -> None:
    """Put the op on each tape that watches one of its inputs, under the rule in force now.

    An op that is run again (see `capture`) brings the `rule` that was in force the first time.
    """
    state = current()
    if state is None:
        refuse_elsewhere(op.type, xs)
        return
    guard = state.guard
    if BESIDE or (OPEN and not (state.tapes or (guard is not None and guard.tapes))):
        refuse_elsewhere(op.type, xs)
    if rule is None:
        rule = rule_in_force(state, op, xs)
    if state.region is not None:
        state.region.did(op, rule, xs, attrs, y, layout)
    if state.tapes:
        put(state, op, rule, xs, attrs, y, layout)


def rule_in_force(state: State, op: Op, xs: Sequence[Tensor], graph: Any = None) -> Rule:
    """The rule for an op that is being created (in a graph, or at once), which counts the hit."""
    if state.guard is not None:
        state.guard.check(op, xs)
    if state.overrides is None:
        return op.rule
    binding = state.overrides.get(op.type)
    if graph is not None:
        own = state.overrides.get((graph, op.type))
        if own is not None and (binding is None or own.depth > binding.depth):
            binding = own
    return op.rule if binding is None else binding.bind(xs)


def cuts(rule: Rule, attrs: dict[str, Any], xs: Sequence[Tensor]) -> bool:
    """Whether no gradient passes an op under this rule."""
    return not rule.watches or (rule.unless is not None and rule.unless(attrs, xs))


def effective(op: Op, rule: Rule, specs: Sequence[tuple[Any, Any]], y: Any) -> Rule:
    """The rule itself, or for complex numbers the conjugated rule of a holomorphic op.

    Rules that an override gives are used as they are, but for those of other ops.
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
    attrs: dict[str, Any],
    y: Any,
    layout: tuple[Place, ...] | None = None,
) -> None:
    """Write one record, which all the tapes that watch share."""
    ids = tuple([x._id for x in xs])
    if state.tape is not None:
        if state.tape.watched.isdisjoint(ids):
            return
        tapes = state.tapes
    else:
        tapes = [tape for tape in state.tapes if not tape.watched.isdisjoint(ids)]
        if not tapes:
            return
    if cuts(rule, attrs, xs):
        rule = CUT
    if state.tape is None:
        tapes = [tape for tape in tapes if tape.admit(op, rule, _wanted([tape], ids, layout))]
    if not rule.watches or not tapes:
        return
    specs = [(x._data.shape, x._data.dtype) for x in xs]
    rule = effective(op, rule, specs, y)
    kept, keeps_y = rule.keeps(_wanted(tapes, ids, layout))
    if state.tape is None and any(tape.keeps_all for tape in tapes):
        kept, keeps_y = frozenset(range(len(layout or xs))), True
    if layout is None and type(y) is not tuple:
        saved = kept_of(xs, kept) if kept else ()
        entry = Record(op, rule, attrs, ids, specs, saved, y._id, y if keeps_y else None)
        for tape in tapes:
            tape.records.append(entry)
            tape.watched.add(y._id)
    else:
        entry, watches = _grouped(op, rule, attrs, ids, specs, xs, kept, y, keeps_y, layout)
        for tape in tapes:
            if rule.each:
                pairs = zip(ids, entry.outputs, strict=True)
                watches = [output for i, output in pairs if i in tape.watched]
            tape.records.append(entry)
            tape.watched.update(watches)


def put_one(
    tape: Tape, op: Op, rule: Rule, x: Tensor, y: Tensor, keeps: tuple[frozenset[int], bool]
) -> None:
    """Write the record of an op of one tensor on the only tape."""
    i, n = x._id, y._id
    if i in tape.watched:
        data = x._data
        tape.watched.add(n)
        tape.records.append(
            Record(
                op,
                rule,
                NO_ATTRS,
                (i,),
                ((data.shape, data.dtype),),
                (x,) if keeps[0] else (),
                n,
                y if keeps[1] else None,
            )
        )


def _grouped(
    op: Op,
    rule: Rule,
    attrs: dict[str, Any],
    ids: tuple[int, ...],
    specs: Sequence[tuple[Any, Any]],
    xs: tuple[Tensor, ...],
    kept: frozenset[int],
    y: Any,
    keeps_y: bool,
    layout: tuple[Place, ...] | None,
) -> tuple[GroupedRecord, list[int]]:
    """The record of an op with groups of inputs or several outputs, and the ids to watch."""
    layout = layout or tuple(range(len(xs)))
    several = isinstance(y, tuple)
    outputs = y if several else (y,)
    saved = kept_of(xs, frozenset(i for p in kept for i in positions(layout[p])))
    ids_out = tuple(t._id for t in outputs)
    entry = GroupedRecord(
        op, rule, attrs, ids, specs, saved, ids_out if several else y._id, y if keeps_y else None
    )
    entry.layout = layout
    entry.output_specs = [(t._data.shape, t.dtype) for t in outputs]
    entry.symbolic = outputs if outputs and type(outputs[0]) is not Tensor else None
    # of several outputs, those of integers have no gradient, unless a rule was put in force (in a
    # graph: for an op before, too)
    carrying = [t._id for t in outputs if is_inexact(t.dtype) or getattr(t._data, "carries", False)]
    return entry, carrying if carrying and several and op.owns(rule) else list(ids_out)


def _is_complex(y: Any) -> bool:
    return any(t.dtype.kind == "c" for t in (y if isinstance(y, tuple) else (y,)))


def _wanted(
    tapes: Sequence[Tape], ids: tuple[int, ...], layout: tuple[Place, ...] | None
) -> frozenset[int]:
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
