"""Forward mode: the derivative of a function's outputs along directions of its inputs.

Forward mode has no rules of its own. The backward pass is a linear map from the gradients of the
outputs to the gradients of the inputs. regrad runs it at 0 under a tape, and the backward pass
through this tape is the transpose of the map: it takes the tangents of the inputs to the tangents
of the outputs. So custom gradients and overrides apply here as well, where they are linear in the
incoming gradient. (Townsend, "A new trick for calculating Jacobian vector products", 2017.)

The records between two regions are transposed together. A region (a loop, a branch, a compiled
program) pushes tangents through itself; under a `ForwardTape` it keeps nothing for a backward pass.
So a loop of unknown length has a derivative forward, and none backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from regrad.autodiff.custom_functions import OpaqueFunction
from regrad.core.backends import has_values, is_inexact, is_traced
from regrad.core.dispatch import alias_of
from regrad.core.pullback import run_taped, run_watched
from regrad.core.registry import Op
from regrad.core.rule import Rule, describe, label
from regrad.core.state import masked
from regrad.core.tape import Record, Tape
from regrad.core.tensor import Tensor
from regrad.core.walk import leaf_gradients, name_of, walk_from
from regrad.errors import GradientError
from regrad.ops.binary import logical_and, where
from regrad.ops.creation_like import zeros_like
from regrad.ops.joining import stack
from regrad.ops.reduction import any as any_of
from regrad.transforms.region import Passage, RegionRule, links_of
from regrad.transforms.steps import evaluate, sliced

if TYPE_CHECKING:
    from regrad.core.rule import Cotangent

Tangents = dict[Any, Tensor | None]  # by id; None means a zero tangent


class ForwardTape(Tape):
    """The tape of a function that needs forward mode only."""

    __slots__ = ()

    def walks_back(self) -> bool:
        return False


def pushed(
    f: Callable[[list[Tensor]], Sequence[Tensor]], xs: Sequence[Tensor], wanted: Sequence[int],
    dxs: Sequence[Tensor],
) -> tuple[Sequence[Tensor], list[Tensor | None]]:  # fmt: skip
    """Return the results of f and their tangents, given tangents of the inputs at `wanted`.

    A tangent is None where nothing is connected.
    """
    tape = ForwardTape()
    xs, ys = run_watched(tape, f, xs, wanted)
    tangents: Tangents = {xs[i]._id: dx for i, dx in zip(wanted, dxs, strict=True)}
    watched = tape.close()
    with masked():
        return ys, push_through(tape.records, watched, tangents, ys)


def push_through(
    records: Sequence[Record], watched: set[int], tangents: Tangents, ys: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return the tangents of the ys, along the records of a tape that begins at its inputs."""
    doubts: list[Tensor] = []
    plain: list[Record] = []
    leading, used = _leading_to(records, ys)
    for record in leading:
        if not isinstance(record.rule, RegionRule):
            plain.append(record)
            continue
        rule, edges = record.rule, record.rule.passage.edges
        sources = [rule.inputs[i] for i in edges if not used.isdisjoint(_outputs(record, edges[i]))]
        _transpose(plain, watched, tangents, sources, doubts)
        moving = {i: t for i in edges if (t := tangents.get(rule.inputs[i]._id)) is not None}
        edges = {i: edges[i] for i in moving}
        reached = sorted(set().union(*edges.values()))
        reached = [j for j in reached if record.outputs[j] in used and _is_float(record, j)]
        if reached:
            dys = rule.push(rule.inputs, Passage([*edges], reached, edges), [*moving.values()])
            tangents.update(zip(_outputs(record, reached), dys, strict=True))
    _transpose(plain, watched, tangents, ys, doubts)
    return _dispelled([tangents.get(y._id) for y in ys], doubts)


def _is_float(record: Record, output: int) -> bool:
    return is_inexact(record.output_specs[output][1])  # pyright: ignore[reportAttributeAccessIssue]


def _outputs(record: Record, places: Sequence[int]) -> list[Any]:
    return [record.outputs[i] for i in places]


def _leading_to(records: Sequence[Record], ys: Sequence[Tensor]) -> tuple[list[Record], set[Any]]:
    """Return the records that lead to the ys, oldest first, and the ids that they use."""
    used = {y._id for y in ys}
    found = []
    for record in reversed(records):
        leading = [inputs for inputs, ys in links_of(record) if not used.isdisjoint(ys)]
        if leading:
            found.append(record)
            used.update(*leading)
    return found[::-1], used


def _transpose(
    records: Sequence[Record], watched: set[int], tangents: Tangents,
    targets: Iterable[Tensor], doubts: list[Tensor],
) -> None:  # fmt: skip
    """Add the tangents of the targets, through records without regions.

    regrad runs the map from the gradients of the targets to the gradients of everything that has a
    tangent. It runs the map at 0, under a tape that admits only ops that are affine in the watched
    values. An affine map that is 0 at 0 is linear, so its backward pass is the transpose.
    """
    ys = {y._id: y for y in targets if is_inexact(y.dtype) and y._id in watched}
    for i in tangents.keys() & ys.keys():
        del ys[i]
    if not ys:
        return
    zeros = [alias_of(zeros_like(y)) for y in ys.values()]
    tape = LinearTape([z._id for z in zeros])
    between = [r for r in reversed(records) if r.outputs not in tangents]

    def pull() -> list[tuple[Tensor, Tensor]]:
        found = walk_from(between, [*ys], zeros, watched, tape)
        return [
            (dx, tangent) for i, dx in found.items()
            if dx is not None and (tangent := tangents.get(i)) is not None
        ]  # fmt: skip

    pairs = run_taped(tape, pull)
    ids, directions = [dx._id for dx, _ in pairs], [tangent for _, tangent in pairs]
    found = walk_from(reversed(tape.records), ids, directions, tape.close())
    tangents.update((i, found.get(z._id)) for i, z in zip(ys, zeros, strict=True))
    doubts += tape.doubts


def _dispelled(dys: list[Tensor | None], doubts: Sequence[Tensor]) -> list[Tensor | None]:
    """Make everything NaN if a rule maps 0 to a nonzero gradient (a program cannot raise)."""
    if not doubts:
        return dys
    broken = [any_of(logical_and(dx != 0, dx == dx)) for dx in doubts]
    return [None if dy is None else where(any_of(stack(broken)), np.nan, dy) for dy in dys]


def _constant(f: Callable[[], Any]) -> Any:
    """Return the array that a function makes in a trace, if it depends on no traced value."""
    import jax

    closed = jax.make_jaxpr(f)()
    jaxpr = sliced(closed.jaxpr)
    used = {id(v) for eqn in jaxpr.eqns for v in eqn.invars} | {id(v) for v in jaxpr.outvars}
    if any(
        id(v) in used and is_traced(c) for v, c in zip(jaxpr.constvars, closed.consts, strict=True)
    ):
        return None
    with jax.ensure_compile_time_eval():
        return np.asarray(evaluate(jaxpr, closed.consts, ())[0])


class LinearTape(Tape):
    """A tape that watches gradients in the backward pass, and rejects nonlinear uses of them.

    It observes the running walk: it has the rule that is running, and checks that the rule maps 0
    to 0. For traced gradients regrad cannot check values; `doubts` are the results of the user's
    rules at 0.
    """

    __slots__ = ("doubts", "record")

    plain = False

    def __init__(self, watched: Iterable[int]) -> None:
        super().__init__(watched)
        self.doubts: list[Tensor] = []

    def before(self, record: Record) -> None:
        """Note that a rule is about to run."""
        self.record: Record = record

    def admit(self, op: Op, rule: Rule, wanted: frozenset[int]) -> bool:
        if rule.constant:
            return False  # a constant factor, like any number
        if not rule.linear_in(wanted):
            if isinstance(getattr(self.record.rule, "custom", None), OpaqueFunction):
                raise GradientError(
                    "forward mode: an exported program has reverse mode only, because jax.export "
                    "stores only reverse mode; use vjp, grad or jacobian, and grad of grad for "
                    "hvp."
                )
            raise GradientError(
                "forward mode: the backward pass is not linear in the incoming gradient, because "
                f"{self.at_work()} applies the op type {op.type!r} to it. Such a rule has no "
                "forward-mode derivative; use vjp, grad or jacobian."
            )
        return True

    def __call__(self, record: Record, dy: Cotangent, leaf: int, dx: Tensor | None) -> None:
        if not isinstance(dx, Tensor):
            return
        if not has_values(dx._data):
            if record.rule.is_ours:
                return
            self.doubts.append(dx)
            arriving = dy if isinstance(dy, tuple) else (dy,)
            moves = any(t is not None and t._id in self.watched for t in arriving)
            if not moves or dx._id in self.watched or not is_traced(dx._data):
                return
            values = _constant(lambda: leaf_gradients(record, dy, {*record.inputs})[leaf]._data)
        else:
            values = dx._values()
        if values is None or np.any((values != 0) & ~np.isnan(values)):
            raise GradientError(
                f"forward mode: {self.at_work()} returns a nonzero gradient for the input "
                f"{name_of(record, leaf)!r} even if the incoming gradient is 0, so it is not "
                "linear in dy. Such a rule has no forward-mode derivative; use vjp, grad or "
                "jacobian."
            )

    def read_plainly(self) -> None:
        raise GradientError(
            f"forward mode: {self.at_work()} reads the incoming gradient as a plain number, so "
            "its result may depend on the gradient in any way. Such a rule has no forward-mode "
            "derivative; use vjp, grad or jacobian."
        )

    def at_work(self) -> str:
        """Return the name of the running rule, for a message."""
        rule = self.record.rule
        named = describe(rule.function, rule.name) if rule.function else label(rule)
        return f"{named} for the op type {self.record.op.type!r}"
