"""`compare_gradients` for functions of regrad: the gradient that counts, and another one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from regrad.autodiff.custom_calls import CustomCall, CustomRule
from regrad.autodiff.custom_functions import OpaqueFunction, unpack
from regrad.checking import slopes
from regrad.core import containers, dispatch
from regrad.core.backends import BACKENDS, is_inexact
from regrad.core.pullback import run_taped
from regrad.core.rule import Cotangent, Rule
from regrad.core.signatures import helpful
from regrad.core.state import masked
from regrad.core.tape import Record, effective
from regrad.core.tensor import Tensor, wrap
from regrad.core.walk import Grads, check_gradient, leaf_gradients, name_of, seed, walk, walk_from
from regrad.errors import ArgumentError, kind
from regrad.inspection.comparisons import RTOL, Compared, GradientComparison
from regrad.inspection.tapes import KeepingTape, Run, SeenTape, bare_rule, kind_of, op_type_of


@helpful("compare_gradients")
def compare_gradients(
    f: Callable[..., Any],
    other: Callable[..., Any] | Literal["true", "differences"] | None = None,
    *,
    surrogates: Sequence[str] = (),
    rtol: float = RTOL,
) -> Callable[..., GradientComparison]:
    """Return a function that compares the gradient of `f` with another one.

    Args:
        f: A function as `trace_gradients` takes it.
        other: None or `"true"`: the true gradient of f. All ops have their own rules, whatever
            scope is open, and custom functions are differentiated op by op. `"differences"`:
            central differences, in float64, of the arguments. Or another function of the same
            arguments.
        surrogates: Op types, names of rules, or names of arguments and Variables, whose gradients
            are meant to differ. `assert_same()` of the result passes them over.
        rtol: The tolerance, relative to the larger of both norms.

    Returns:
        A function of f's arguments that returns a `GradientComparison`: a row for each argument
        and Variable, and, next to the true gradient, a row for each input of each op under an
        override and of each custom function, in place: the gradient that arrived there goes
        through its rule and through its true derivative. (An override that lets no gradient
        pass, `"StopGradient"`, has no row of its own.)

    Raises:
        ArgumentError: f is not callable, or other is none of these.
        GradientError: an argument or the result cannot have a gradient, or the two gradients
            have other shapes.

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"Sin": lambda dy: 2 * dy}):
    ...     found = rg.compare_gradients(lambda x: rg.sin(x))(rg.tensor([0.0, 0.0]))
    >>> [(row.kind, row.ratio) for row in found.rows]
    [('argument', 2.0), ('op', 2.0)]
    """
    if not (other is None or other in ("true", "differences") or callable(other)):
        raise ArgumentError(
            "compare_gradients(f, other): other is a function, 'true', 'differences' or None, got "
            f"{kind(other)}"
        )

    def compared(*args: Any) -> GradientComparison:
        run = Run(f, args, KeepingTape(), "compare_gradients")
        watcher = _InPlace(run.tape, run.watched, wanted=other is None or other == "true")
        first = _gradients(run, watcher)
        if callable(other):
            second = Run(other, args, KeepingTape(), "compare_gradients")
            names, found = ("first", "second"), _matched(run, second, _gradients(second))
        elif other == "differences":
            names, found = ("given", "differences"), _by_differences(f, args, run)
        else:
            make_true(run.tape.records)
            names, found = ("given", "true"), _in_order(run, _gradients(run))
        rows = _rows(run, first, found)
        return GradientComparison.declare(
            [*rows, *watcher.rows], surrogates, names=names, rtol=rtol
        )

    return compared


def _gradients(run: Run, watcher: Any = None) -> Grads:
    """The gradients of a run, by id."""
    y = run.y
    if y._id not in run.watched:
        return {}
    return walk(reversed(run.tape.records), {y._id: seed(y)}, run.watched, watcher)


def _in_order(run: Run, grads: Grads) -> list[Any]:
    """The gradients by what a run was differentiated by."""
    return [_values(grads.get(x._id)) for _, x in run.sources]


def _rows(run: Run, first: Grads, found: Sequence[Any]) -> Iterable[Compared]:
    """The rows of arguments and Variables. What differences do not tell of has none."""
    count = len(run.aliases)
    named = zip(run.sources, _in_order(run, first), found, strict=False)
    for i, ((name, _), a, b) in enumerate(named):
        yield Compared.of("argument" if i < count else "parameter", name, a, b)


def _matched(run: Run, second: Run, grads: Grads) -> list[Any]:
    """The gradients of another run, by what the first one was differentiated by."""
    found = [_values(grads.get(x._id)) for x in second.aliases]
    by_variable = {v: alias for v, (_, alias) in second.tape.reads.items()}
    for v in run.tape.reads:
        alias = by_variable.get(v)
        found.append(None if alias is None else _values(grads.get(alias._id)))
    return found


def _values(x: Tensor | None) -> Any:
    return None if x is None else x._values()


def _by_differences(f: Callable[..., Any], args: Sequence[Any], run: Run) -> list[np.ndarray]:
    """The gradients by the arguments, by differences in double precision."""
    _, rebuild = containers.flatten(tuple(args))
    wide = [np.asarray(x._values()) for x in run.aliases]
    wide = [x.astype(np.complex128 if x.dtype.kind == "c" else np.float64) for x in wide]

    def values(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        pairs = zip(arrays, run.aliases, strict=True)
        xs = [wrap(BACKENDS[type(x._data)].from_numpy(np.asarray(a))) for a, x in pairs]
        return [f(*rebuild(xs))._values()]

    with np.errstate(all="ignore"):
        return slopes.gradients(values, wide)


# -- the true rule of each record ----------------------------------------------------------------


class TrueCustom(Rule):
    """The derivative of a custom function op by op, in place of the one that its author wrote."""

    def __init__(self, call: Any) -> None:
        self.call: CustomCall = call  # (the tape inspects, so it is not a mere rule)
        self.name: Any = call.name

    def pull(
        self, record: Record, dy: Cotangent, wanted: Sequence[int]
    ) -> Iterable[tuple[int, Any]]:
        xs = list(record.xs)
        for i in wanted:
            xs[i] = dispatch.alias(xs[i])
        tape = KeepingTape()
        tape.watched.update(xs[i]._id for i in wanted)
        with masked():
            ys = run_taped(tape, partial(_run_again, self.call), (xs,))
        watched = tape.close()
        make_true(tape.records)
        dys = dy if isinstance(dy, tuple) else (dy,)
        pairs = [(y._id, d) for y, d in zip(ys, dys, strict=True)
                 if d is not None and is_inexact(y.dtype)]  # fmt: skip
        ids, dys = [i for i, _ in pairs], [d for _, d in pairs]
        found = walk_from(reversed(tape.records), ids, dys, watched)
        return [(i, found.get(xs[i]._id)) for i in wanted]


def _run_again(call: CustomCall, xs: Sequence[Tensor]) -> list[Tensor]:
    """Return what a custom function computes of other tensors, by ops that have their own rules."""
    _, args, options = call.again
    leaves, rebuild = containers.flatten(args)
    given = iter(xs)
    args = rebuild([next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
    value, _ = unpack(call.custom.run(args, options, lambda *tensors, **named: None), call.name)
    return containers.flatten(value)[0]


def make_true(records: Iterable[Record]) -> None:
    """Put true rules into records that keep all that these need."""
    for record in records:
        record.rule = true_rule(record)


def true_rule(record: Record) -> Rule:
    """The rule that is the derivative of a record's op."""
    whose, _ = kind_of(record.rule, record)
    if whose == "built-in":
        return record.rule
    bare = bare_rule(record.rule)
    if isinstance(bare, CustomRule):
        return record.rule if isinstance(bare.custom, OpaqueFunction) else TrueCustom(bare)
    return effective(record.op, record.op.rule, record.specs, record.y)


class _InPlace:
    """Looks on while a walk runs, and compares each rule that is not the op's own with that one."""

    def __init__(self, tape: SeenTape, watched: set[int], wanted: bool) -> None:
        self.tape = tape
        self.watched = watched
        self.wanted = wanted
        self.rows: list[Compared] = []
        self.true: Any = {}

    def before(self, record: Record) -> None:
        self.true = None

    def __call__(self, record: Record, dy: Cotangent, leaf: int, dx: Tensor | None) -> None:
        whose, rule = kind_of(record.rule, record)
        if not self.wanted or whose == "built-in":
            return
        if self.true is None:
            self.true = self._true(record, dy)
        self.rows.append(
            Compared.of(
                "op", name_of(record, leaf), _values(dx), _values(self.true.get(leaf)),
                op_type=op_type_of(record), rule=rule, line=self.tape.line(record),
            )
        )  # fmt: skip

    def _true(self, record: Record, dy: Cotangent) -> dict[int, Tensor | None]:
        """The true gradients by a record's inputs."""
        given, record.rule = record.rule, true_rule(record)
        try:
            found = leaf_gradients(record, dy, self.watched)
            return {leaf: check_gradient(record, leaf, dx, dy) for leaf, dx in found.items()}
        finally:
            record.rule = given
