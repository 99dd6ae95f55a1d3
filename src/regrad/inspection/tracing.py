"""`trace_gradients`, `find_nan` and `saved_bytes` for functions of regrad."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from regrad.autodiff.gradients import callable_or_raise
from regrad.core import containers
from regrad.core.backends import is_inexact
from regrad.core.signatures import helpful
from regrad.core.tape import Record
from regrad.core.tensor import Tensor
from regrad.core.walk import Grads, name_of, seed, walk
from regrad.inspection.nonfinite import CURES, MASKED, NonFinite, Operand, first_bad, operand
from regrad.inspection.numbers import Numbers, numbers_of, together
from regrad.inspection.saved import SavedBytes
from regrad.inspection.tapes import KeepingTape, Run, SeenTape, bare_rule, kind_of, op_type_of
from regrad.inspection.traces import GradientTrace, Step


@helpful("trace_gradients")
def trace_gradients(f: Callable[..., Any]) -> Callable[..., GradientTrace]:
    """Return a function that runs `f`, and then its backward pass, and tells what ran there.

    Args:
        f: A function of Tensors, arrays, numbers and containers of them that returns a Tensor. A
            result that is not a scalar is taken with the gradient 1 for each element.

    Returns:
        A function of f's arguments that returns a `GradientTrace`. Gradients are taken by all
        arguments and by the trainable Variables that f reads. For each op the trace has its rule
        (built-in, override or custom, with the place where it was written), the line of your code
        that ran it, and figures of the gradients that arrived and left; `trace.worst()` says what
        is most likely wrong. What jit and checkpoint run as a whole runs op by op here, under
        the rules in force.

    Raises:
        ArgumentError: f is not callable, or does not return a Tensor.
        GradientError: an argument or the result cannot have a gradient.

    >>> import regrad as rg
    >>> trace = rg.trace_gradients(lambda x: rg.sin(x * x))(rg.tensor([1.0, 2.0]))
    >>> [step.op_type for step in trace.steps]
    ['Sin', 'Mul']
    """
    callable_or_raise(f, "trace_gradients")

    def traced(*args: Any) -> GradientTrace:
        run = Run(f, args, SeenTape(), "trace_gradients")
        watcher = _Watcher(run.tape)
        grads = _walk(run, watcher)
        inputs = [(name, _figures(grads.get(x._id))) for name, x in run.sources]
        cuts = [Step(op, "built-in", "", line, "", None, ()) for op, line in run.tape.cuts]
        return GradientTrace(tuple(watcher.steps()), tuple(inputs), run.value, tuple(cuts))

    return traced


def _walk(run: Run, watcher: Any) -> Grads:
    """The gradients by all that a run was differentiated by, with someone looking on."""
    y = run.y
    if y._id not in run.watched:
        return {}
    return walk(reversed(run.tape.records), {y._id: seed(y)}, run.watched, watcher)


def _figures(x: Tensor | None) -> Numbers | None:
    return None if x is None else numbers_of(x._values())


class _Watcher:
    """Looks on while a walk runs, and keeps figures of each step."""

    def __init__(self, tape: SeenTape) -> None:
        self.tape = tape
        self.made: list[Any] = []

    def before(self, record: Record) -> None:
        self.made.append([record, None, []])

    def __call__(self, record: Record, dy: Any, leaf: int, dx: Tensor | None) -> None:
        entry = self.made[-1]
        if entry[1] is None:
            dys = dy if isinstance(dy, tuple) else (dy,)
            entry[1] = together(_figures(part) for part in dys)
        entry[2].append((name_of(record, leaf), _figures(dx)))

    def steps(self) -> list[Step]:
        """The steps, in the order in which they ran."""
        found = []
        for record, arrived, left in self.made:
            kind, rule = kind_of(record.rule, record)
            line = self.tape.line(record)
            found.append(Step(op_type_of(record), kind, rule, line, "", arrived, tuple(left)))
        return found


# -- where a NaN begins --------------------------------------------------------------------------


@helpful("find_nan")
def find_nan(f: Callable[..., Any]) -> Callable[..., NonFinite | None]:
    """Return a function that runs `f` forward and backward, and finds the first NaN or infinity.

    Args:
        f: A function as `trace_gradients` takes it.

    Returns:
        A function of f's arguments that returns a `NonFinite`, or None if all is finite: the op,
        the line of your code that ran it, the element, what the op was given there, and the usual
        cure. An argument or a Variable that is not finite to begin with is reported as such. An
        infinity that spoils neither the result nor a gradient (a mask of -inf) is not a finding.

    Raises:
        ArgumentError, GradientError: as `trace_gradients`.

    >>> import regrad as rg
    >>> found = rg.find_nan(lambda x: rg.log(x).sum())(rg.tensor([1.0, 0.0]))
    >>> found.op_type, found.phase, found.what, found.index
    ('Log', 'forward', 'inf', (1,))
    """
    callable_or_raise(f, "find_nan")

    def checked(*args: Any) -> NonFinite | None:
        with np.errstate(all="ignore"):  # what NumPy would warn of is reported
            run = Run(f, args, KeepingTape(), "find_nan")
        for name, x in run.sources:
            if bad := first_bad(x._values()):
                what, index, count = bad
                return NonFinite("argument", what, "", "", "", index, count, output=name)
        finder = _Finder(run.tape)
        _walk(run, finder)
        in_result = first_bad(run.y._values())
        if finder.found is None and in_result is None:
            return None
        made = [_made_forward(record, run.tape) for record in run.tape.records]
        forward = [each for each in made if each is not None]
        own = [
            each for each in forward
            if each.what == "NaN" or not any(o.is_infinite for o in each.operands)
        ]  # fmt: skip
        if own or finder.found is not None:
            return own[0] if own else finder.found
        return forward[0] if forward else None  # an infinity that the program was given

    return checked


def _made_forward(record: Record, tape: SeenTape) -> NonFinite | None:
    """Return what is not finite in the results of an op, if anything."""
    ys = record.y if isinstance(record.y, tuple) else (record.y,)
    for y in ys:
        if y is not None and is_inexact(y.dtype) and (bad := first_bad(y._values())):
            what, index, count = bad
            operands = _operands(record, y.shape, index)
            cure = CURES.get(record.op.type, "")
            op, line = op_type_of(record), tape.line(record)
            return NonFinite("forward", what, op, line, "", index, count, operands, "", cure)
    return None


def _operands(
    record: Record, shape: tuple[int, ...], index: tuple[int, ...]
) -> tuple[Operand, ...]:
    """The inputs of an op, as its records keep them, at an element of its result."""
    return tuple(
        operand(name_of(record, i), x._values(), shape, index)
        for i, x in enumerate(record.xs)
        if x is not None and x.size
    )


class _Finder:
    """Looks on while a walk runs, for the first gradient that is not finite."""

    def __init__(self, tape: SeenTape) -> None:
        self.tape = tape
        self.found: NonFinite | None = None

    def before(self, record: Record) -> None:
        pass

    def __call__(self, record: Record, dy: Any, leaf: int, dx: Tensor | None) -> None:
        if self.found or dx is None or (bad := first_bad(dx._values())) is None:
            return
        what, index, count = bad
        dys = [part for part in (dy if isinstance(dy, tuple) else (dy,)) if part is not None]
        given = [operand("dy", part._values(), dx.shape, index) for part in dys]
        operands = (*given, *_operands(record, dx.shape, index))
        kind, rule = kind_of(record.rule, record)
        name = rule if kind != "built-in" else ""
        cure = CURES.get(record.op.type, "")
        if what == "NaN" and any(o.name == "dy" and o.value == 0 for o in operands):
            cure = MASKED
        self.found = NonFinite(
            "backward", what, op_type_of(record), self.tape.line(record), "", index, count,
            operands, name, cure, name_of(record, leaf),
        )  # fmt: skip


# -- what is kept --------------------------------------------------------------------------------


@helpful("saved_bytes")
def saved_bytes(f: Callable[..., Any]) -> Callable[..., SavedBytes]:
    """Return a function that runs `f` and tells what its backward pass keeps in memory.

    Args:
        f: A function as `trace_gradients` takes it; it may return anything.

    Returns:
        A function of f's arguments that returns `SavedBytes`: bytes by op type and line of your
        code. An array that several ops keep is counted once, for the first. Views count as
        what they show.

    Raises:
        ArgumentError: f is not callable.

    >>> import regrad as rg
    >>> saved = rg.saved_bytes(lambda x: rg.sin(x + 1.0).sum())(rg.zeros((256,)))
    >>> saved.total, saved.rows[0].op_type
    (1024, 'Sin')
    """
    callable_or_raise(f, "saved_bytes")

    def measured(*args: Any) -> SavedBytes:
        run = Run(f, args, SeenTape(), "saved_bytes")
        return SavedBytes.of(_kept(run.tape))

    return measured


def _kept(tape: SeenTape) -> Iterator[tuple[str, str, str, int]]:
    """Each array that the records keep: op type, line, path, bytes."""
    seen: set[int] = set()
    for record in tape.records:
        ys = record.y if isinstance(record.y, tuple) else (record.y,)
        kept = [*record.xs, *ys, *_saved_by(record)]
        for x in kept:
            if isinstance(x, Tensor) and id(x._data) not in seen:
                seen.add(id(x._data))
                size = int(np.prod(x.shape)) * x.dtype.itemsize
                yield op_type_of(record), tape.line(record), "", size


def _saved_by(record: Record) -> list[Any]:
    """Return what a custom function saved for its gradient function."""
    rule = bare_rule(record.rule)
    saved = getattr(rule, "saved", ())
    return containers.flatten(saved)[0] if saved else []
