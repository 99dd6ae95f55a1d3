"""The backward pass over records. One implementation serves every mode.

It visits records newest first and passes the incoming gradient through each record's rule. It
checks the rule's answer (number, kind, dtype, shape), sums it to the input's shape for ops
that declare that they broadcast, and adds gradients where paths meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, Protocol, TypeAlias

import numpy as np

from regrad.core import dims
from regrad.core.backends import DTypeLike, is_inexact, numpy_dtype
from regrad.core.dims import Shape
from regrad.core.dispatch import DEFERRALS, Deferral, alias_of, lift_as
from regrad.core.gradients import Gradients
from regrad.core.registry import OPS
from regrad.core.rule import NO_GRADIENT, Cotangent, describe_pull, wrong_gradient
from regrad.core.rule_forms import OpView
from regrad.core.state import current, in_state, masked
from regrad.core.tape import GroupedRecord, Record, positions, restored
from regrad.core.tensor import OURS, Tensor, TensorLike, TensorView, known, wrap
from regrad.errors import GradientError, RuleError, UnknownShapeError, kind

# Gradients by id. None means that a path leads here, but a rule on the path returned None.
Grads = dict[int, Tensor | None]
UNUSED: Any = object()
END: Any = object()  # comes after the oldest record

# The entries of a tape, newest first: an iterable, or the result of `drain`.
Entries: TypeAlias = Iterable[Any] | Callable[[], Any]


def drain(entries: list[Any]) -> Callable[[], Any]:
    """Return a function that removes and returns the newest record of a tape at each call."""
    entries.insert(0, END)
    return entries.pop


class Inspector(Protocol):
    """Observes a backward pass."""

    def before(self, record: Record) -> None:
        """Called before the record's rule runs."""

    def __call__(self, record: Record, dy: Cotangent, leaf: int, dx: Tensor | None) -> None:
        """Called with `dx`, a rule's gradient for an input, after its checks."""


def walk(
    records: Entries, grads: Grads, watched: set[int], inspect: Inspector | None = None
) -> Grads:
    """Propagate the gradients in `grads` (by id) back through `records`, which come newest first.

    Returns the same dict, with the gradients of values that no record produced.

    The open tapes record the ops that the rules create. Overrides do not apply to these ops, so
    that the result does not depend on the scope in which the backward pass runs.
    `inspect` gets each record before its rule runs, and each gradient that the rule returns.
    """
    state = current()
    if state is None or state.overrides is None:
        _walk(records, grads, watched, inspect)
    else:
        with in_state(state.overriding(None)):
            _walk(records, grads, watched, inspect)
    return grads


def walk_from(
    records: Entries,
    ys: Sequence[int],
    dys: Sequence[Tensor],
    watched: set[int],
    inspect: Inspector | None = None,
) -> Grads:
    """Return the gradients of `sum(y * dy)` over all ys, given by id; an id may occur twice."""
    grads: Grads = {}
    for y, dy in zip(ys, dys, strict=True):
        if y in watched:
            old = grads.get(y)
            grads[y] = dy if old is None else OPS["AddV2"].function(old, dy)
    return walk(records, grads, watched, inspect)


# a gradient may be infinite or NaN at a kink, without a warning
@np.errstate(all="ignore")  # (as a decorator it takes half the time that it takes as a block)
def _walk(records: Entries, grads: Grads, watched: set[int], inspect: Inspector | None) -> None:
    add = OPS["AddV2"].function
    pop, get = grads.pop, grads.get
    step = records if callable(records) else chain(records, (END,)).__next__
    while (record := step()) is not END:
        found: Any = UNUSED
        if type(record) is int:  # columns (see `Tape`)
            odd = _pull_columns(record, step, grads, add, inspect)
            if odd is None:
                continue
            record, found = odd
        dy = pop(record.outputs, UNUSED) if record.plain else collect(record, grads)
        if dy is UNUSED:
            continue
        if dy is None:
            for key in watched.intersection(record.inputs):
                grads.setdefault(key, None)
            continue
        if inspect is not None:
            inspect.before(record)
        pulls = record.rule.pulls if record.plain and found is UNUSED else None
        if not pulls and found is UNUSED:
            found = leaf_gradients(record, dy, watched)
        for leaf, key in enumerate(record.inputs):
            if key not in watched:
                continue
            if pulls:
                try:
                    dx = pulls[leaf](record, dy)
                except UnknownShapeError:
                    dx = leaf_gradients(record, dy, watched)[leaf]
            elif (dx := found[leaf]) is UNUSED:  # a sparse rule, for an output that nothing uses
                if inspect is not None:
                    inspect(record, dy, leaf, None)
                continue
            if dx is not None:
                shape, dtype = record.specs[leaf]
                try:
                    if (
                        type(dx) is not Tensor
                        or (data := dx._data).dtype is not dtype
                        or data.shape != shape
                    ):
                        dx = check_gradient(record, leaf, dx, dy)
                except UnknownShapeError:
                    dx = check_gradient(record, leaf, dx, dy)
            elif record.rule.answers:
                check_gradient(record, leaf, dx, dy)
            if inspect is not None:
                inspect(record, dy, leaf, dx)
            old = get(key)
            if old is None:  # no gradient yet, or a path without one
                grads[key] = dx
            elif dx is not None:
                grads[key] = add(old, dx)


def _pull_columns(
    n: int, step: Callable[[], Any], grads: Grads, add: Callable[..., Tensor], inspect: object
) -> tuple[Record, Any] | None:
    """Propagate the gradient through a one-input op that is stored as columns; `n` is the last.

    Unusual cases are left to the caller. It gets the record, and the gradient that the rule has
    returned, in a tuple (or UNUSED if the rule has not run yet).
    """
    rule, y, key, p = step(), step(), step(), step()
    dx = UNUSED
    if (dy := grads.pop(n, UNUSED)) is UNUSED:
        return None
    if type(p) is tuple:
        x, (shape, dtype) = None, p
    else:
        x = Tensor()  # (not by `known`, which would be a second call for each op)
        x._data, x._id, shape, dtype = p, key, p.shape, p.dtype
    try:
        if dy is not None and inspect is None:
            dx = rule.short(rule, dy, x, None if y is None else known(y, n))
            if type(dx) is Tensor and (data := dx._data).dtype is dtype and data.shape == shape:
                old = grads.get(key)
                grads[key] = dx if old is None else add(old, dx)
                return None
    except UnknownShapeError:
        pass
    grads[n] = dy
    return restored(n, rule, y, key, p), dx if dx is UNUSED else (dx,)


def leaf_gradients(record: Record, dy: Any, watched: set[int]) -> Any:
    """Return the gradients that the rule returns, by leaf.

    If a rule needs a size that is known only in the run of a graph, the rule runs in that run.
    """
    if type(dy) is tuple:
        dy = Gradients(dy)
    try:
        record = record.only(watched) if record.rule.asks_needs else record
        pulled = record.rule.pull(record, dy, record.wanted(watched))
        return dict(pulled if record.plain else open_groups(record, pulled))
    except UnknownShapeError:
        deferral = _deferral_of(record, dy)
        if deferral is None:
            raise
        return deferral.pull(record, dy, watched)
    except Exception as error:
        raise noted(error, describe_pull(record)) from error.__cause__


def noted(error: Exception, rule: str) -> Exception:
    """Add a note that names the rule to an error of the rule. regrad's own errors have the name."""
    if not isinstance(error, RuleError | GradientError):
        error.add_note(f"in {rule}")
    return error


def _deferral_of(record: Record, dy: Cotangent) -> Deferral | None:
    """Return the deferral that runs the rule in the run of a graph, if it gets tensors of one."""
    dys = dy if isinstance(dy, tuple) else (dy,)
    ys = record.y if isinstance(record.y, tuple) else (record.y,)
    given = (x for x in (*dys, *record.xs, *ys) if isinstance(x, Tensor))
    return next((DEFERRALS[type(x._data)] for x in given if type(x._data) in DEFERRALS), None)


def collect(record: Record, grads: Grads) -> Any:
    """Return the incoming gradient of a record: a Tensor, or a tuple for several outputs.

    It is UNUSED if the output leads nowhere, and None if it leads to y but no gradient came
    through. For several outputs, an output without a gradient has zeros, or None if the rule is
    `sparse`.
    """
    outputs = record.outputs
    if not isinstance(outputs, tuple):
        return grads.pop(outputs, UNUSED)
    dys = [grads.pop(i, UNUSED) for i in outputs]
    if all(dy is UNUSED for dy in dys):
        return UNUSED
    dys = [None if dy is UNUSED else dy for dy in dys]
    if all(dy is None for dy in dys):
        return None
    if record.rule.sparse:
        return tuple(dys)
    assert isinstance(record, GroupedRecord)
    return tuple(record.unused(i) if dy is None else dy for i, dy in enumerate(dys))


def open_groups(record: Record, pulled: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """Yield the gradients of parameters, leaf by leaf. A sequence needs a list of its length."""
    assert isinstance(record, GroupedRecord)
    for parameter, dx in pulled:
        place = record.layout[parameter]
        if not isinstance(place, tuple):
            yield from ((leaf, dx) for leaf in positions(place))
        elif dx is None:
            yield from ((leaf, None) for leaf in place)
        elif isinstance(dx, list | tuple) and len(dx) == len(place):
            yield from zip(place, dx, strict=True)
        else:
            got = f"{len(dx)} gradients" if isinstance(dx, list | tuple) else kind(dx)
            expected = f"a list, one gradient per tensor: the input is a sequence of {len(place)}."
            raise _wrong(record, place[0], got, expected)


def check_gradient(record: Record, leaf: int, dx: Any, dy: Cotangent) -> Tensor | None:
    """Return the gradient if it has the input's dtype and shape, or None; raise otherwise."""
    if dx is NO_GRADIENT or (dx is None and _may_be_none(record, leaf)):
        return None
    if record.rule.whole and isinstance(dx, list | tuple) and len(dx) == 1:
        (only,) = dx
        return None if only is None else check_gradient(record, leaf, only, dy)
    if dx is None:
        raise _wrong(
            record, leaf, "None", "a Tensor. Did it forget its return statement? For no gradient "
            "return rg.rules.no_gradient(dy), or use it as the rule.",
        )  # fmt: skip
    if isinstance(dx, TensorView):
        dx = dx._read()
    if not isinstance(dx, Tensor):
        hint = "Return a Tensor, or rules.no_gradient(dy); make a constant with zeros_like(dy)."
        if callable(dx):
            hint = "Was a function that makes rules passed without its parentheses: triangle()?"
        elif isinstance(dx, OpView):
            hint = "It was called in TensorFlow's form, (op, grad); name the first parameter dy."
        several = isinstance(dx, list | tuple)
        shown = f"{len(dx)} gradients for one input" if several else f"{dx!r:.60}"
        raise _wrong(record, leaf, shown, f"a Tensor, got {kind(dx)}. {hint}")
    shape, dtype = record.specs[leaf]
    data = dx._data
    if data.dtype != dtype and wrong_dtype(dx, dtype):
        expected = f"{numpy_dtype(dtype)}. Convert it with astype(dx, x.dtype)."
        raise _wrong(record, leaf, f"the dtype {dx.dtype}", expected)
    if not dims.same(data.shape, shape):
        return fit(record, leaf, dx, shape, dy)
    return dx


def _may_be_none(record: Record, leaf: int) -> bool:
    """Return whether None is allowed: for one of several inputs, for indices, in another form."""
    return not record.rule.answers or all(i.integers for i in record.op.inputs[leaf : leaf + 1])


def wrong_dtype(dx: Tensor, dtype: DTypeLike) -> bool:
    """Return whether a gradient has the wrong dtype (an integer input takes any dtype)."""
    dtype = numpy_dtype(dtype)
    return is_inexact(dtype) and dx.dtype != dtype


def fit(record: Record, leaf: int, dx: Tensor, shape: Shape, dy: Any) -> Tensor:
    """Sum a gradient of another shape where the op broadcasts, and raise for other ops.

    If the shapes are known only in the run of a graph, the run sums or checks.
    """
    got = dx._data.shape
    certain = dims.same(got, shape) is not None
    if record.op.broadcasts and (not certain or _was_spread(shape, got, dy._data.shape)):
        return OPS["SumTo"].function(dx, shape)
    if certain:
        expected = f"{tuple_of(shape)}. A gradient has the shape of its input."
        raise _wrong(record, leaf, f"the shape {tuple_of(got)}", expected)
    deferral = DEFERRALS[type(next(dims.leaves((got, shape))))]
    name = name_of(record, leaf)
    return deferral.fit(
        dx, shape,
        f"wrong gradient: {describe_pull(record, name)}, input {name!r}, whose gradient has its "
        "shape,",
    )  # fmt: skip


def tuple_of(shape: Shape) -> Any:
    """Return a shape in the form for messages (torch has its own class)."""
    return shape if isinstance(shape, dims.UnknownRank) else tuple(shape)


def _was_spread(small: Shape, large: Shape, y: Shape) -> bool:
    """Return whether `large` is `small` repeated along the axes that the op broadcast."""
    if len(small) > len(large):
        return False
    small = (1,) * (len(large) - len(small)) + tuple(small)
    y = (0,) * (len(large) - len(y)) + tuple(y[max(len(y) - len(large), 0) :])
    return not any(
        dims.differ(s, n) and (dims.differ(s, 1) or dims.differ(n, m))
        for s, n, m in zip(small, large, y, strict=True)
    )


def _wrong(record: Record, leaf: int, got: str, expected: str) -> RuleError:
    name = name_of(record, leaf)
    return wrong_gradient(describe_pull(record, name), name, got, expected)


def name_of(record: Record, leaf: int) -> str:
    """Return the name of an input: `x`, or `xs[2]` in a sequence."""
    own = record.rule.input_name(leaf)
    if own is not None:
        return own
    if not isinstance(record, GroupedRecord):
        return record.op.inputs[leaf].name if leaf < len(record.op.inputs) else str(leaf)
    for entry, place in zip(record.op.inputs, record.layout, strict=False):
        if place == leaf:
            return entry.name
        if isinstance(place, tuple) and leaf in place:
            return f"{entry.name}[{place.index(leaf)}]"
    return str(leaf)


def seed(y: Tensor, dy: TensorLike | None = None) -> Tensor:
    """Return the first gradient: `dy` in y's dtype, or ones."""
    if dy is None:
        data = y._data
        if type(data) is np.ndarray and data.size <= SMALL:
            return _ones(data.shape, data.dtype)
        with masked():
            ones = OPS["OnesLike"].function(y)
        return ones if type(ones) is not Tensor else alias_of(ones)  # (independent of y)
    return lift_as(dy, y.dtype)


SMALL = 64


@lru_cache(maxsize=256)
def _ones(shape: tuple[int, ...], dtype: np.dtype) -> Tensor:
    """Return ones, cached by shape and dtype (Tensors are immutable)."""
    ones = np.ones(shape, dtype)
    ones.flags.writeable = False
    shared = wrap(ones)
    shared._id = OURS
    return shared
