"""Branches and loops in compiled plans, as XLA's control flow, with the variables they write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import regrad as rg
from regrad.graph.graph import Node
from regrad.graph.plan import PlanRun
from regrad.transforms.traces import find_jax
from regrad.v1.errors import UnimplementedError
from regrad.v1.graph.regions import Control, Step
from regrad.v1.graph.variables import read_state
from regrad.v1.run.tracing import (
    TraceRun,
    Values,
    all_nodes,
    find_touched,
    is_known,
    refusal,
    settle,
    settle_all,
    traces,
)

UNROLLED = 256  # the most iterations to unroll if XLA's loop fails
COUNTED = 100_000  # the most iterations to count while tracing


@traces("If")
def _if(trace: TraceRun, node: Node, values: list[Any], attrs: dict[str, Any]) -> Values:
    control: Control = attrs["control"]
    if is_known(values[0]):
        return trace.call_kernel(node, values, attrs)
    known, keys = control.known(values), _written(control.steps)

    def branch(step: Step) -> Callable[[], Any]:
        def run() -> Any:
            inner = trace.inside({})
            ys = inner.through(step, known)
            return settle_all(ys, _symbols(step.outputs)), _state(inner, keys)

        return run

    cond = find_jax().lax.cond
    ys, written = _fitted(node, lambda: cond(values[0], *map(branch, control.steps)))
    trace.written.update(written)
    return ys


@traces("While")
def _while(trace: TraceRun, node: Node, values: list[Any], attrs: dict[str, Any]) -> Values:
    """Trace XLA's loops. If shapes or sizes change during a loop, unroll its iterations."""
    loop: Control = attrs["control"]
    known = loop.known(values)
    count = _count(loop, known)
    most = loop.most(known) if count is None else count
    if most is None and any(loop.kept):
        raise refusal(
            node,
            "the gradient of a loop stores each iteration, and the maximum number is unknown. Pass "
            "maximum_iterations to tf.while_loop, or a condition that depends on constants only.",
        )
    try:
        return _fitted(node, lambda: _sweeps(trace, loop, known, most))
    except UnimplementedError:
        if count is None or count > UNROLLED:
            raise
        return trace.call_kernel(node, values, attrs)


def _sweeps(trace: TraceRun, loop: Control, known: dict[int, Any], most: int | None) -> list[Any]:
    """Return the results of the loop's sweeps, each of which is a loop of XLA."""
    whole = {key: _entries(known[key]) for key in loop.entries}
    rows: dict[int, Any] = {}  # the loop variables that later sweeps read, stacked by iteration
    total: Any = None if loop.test is not None else most
    finals: list[Any] = []
    for step, kept in zip(loop.steps, loop.kept, strict=True):
        sweep = _Sweep(trace, loop, step, kept, {**known}, {**rows}, whole)
        total, ys, stacks = sweep.run(total, most)
        finals += ys
        rows.update(zip(kept, stacks, strict=False))
        if step is loop.steps[-1]:
            finals += [stack[:most] for stack in stacks[len(kept) :]]
    return finals


class _Sweep:
    """One sweep over the iterations of a loop, as a loop of XLA."""

    def __init__(
        self, trace: TraceRun, loop: Control, step: Step, kept: Sequence[int],
        known: dict[int, Any], rows: dict[int, Any], whole: dict[int, Any],
    ) -> None:  # fmt: skip
        self.trace, self.loop, self.step, self.kept = trace, loop, step, kept
        self.known, self.stacked = known, rows | whole
        self.keys = _written([step])
        self.ids = [x._id for x in step.carries]

    def at(self, number: Any, xs: Values, state: dict[str, Any]) -> Any:
        """Return the state and the values of placeholders in an iteration."""
        index = find_jax().lax.dynamic_index_in_dim
        rows = {key: index(x, number, keepdims=False) for key, x in self.stacked.items()}
        known = {**self.known, **rows, **dict(zip(self.ids, xs, strict=True))}
        return self.trace.inside(state, number), known

    def turn(self, number: Any, xs: Values, state: dict[str, Any]) -> Any:
        """Return the next loop variables, the values to stack, and the next state."""
        run, known = self.at(number, xs, state)
        ys = settle_all(run.through(self.step, known), _symbols(self.step.outputs))
        n = len(self.ids)
        return ys[:n], [*[known[key] for key in self.kept], *ys[n:]], _state(run, self.keys)

    def run(self, total: Any, most: int | None) -> Any:
        """Return the number of iterations, the final loop variables, and the stacked values."""
        jax, step = find_jax(), self.step
        first = settle_all([self.known[key] for key in self.ids], _symbols(step.carries))
        state, tested = _state(self.trace, self.keys), total is None
        shapes = jax.eval_shape(lambda: self.turn(np.int32(0), first, state)[1])
        blank = [jax.numpy.zeros((max(most or 0, 1), *x.shape), x.dtype) for x in shapes]

        def goes_on(carry: Any) -> Any:
            number, xs, state, _ = carry
            if not tested:
                return number >= 0 if step.backward else number < total
            run, known = self.at(number, xs, state)
            go = settle(run.through(self.loop.test, known)[0], np.dtype(bool))
            return go if most is None else (number < most) & go

        def advance(carry: Any) -> Any:
            number, xs, state, stacks = carry
            ys, values, state = self.turn(number, xs, state)
            stacks = [s.at[number].set(x) for s, x in zip(stacks, values, strict=True)]
            return number + (-1 if step.backward else 1), ys, state, stacks

        start = total - 1 if step.backward else 0
        carry = jax.numpy.asarray(start, np.int32), first, state, blank
        number, xs, state, stacks = jax.lax.while_loop(goes_on, advance, carry)
        self.trace.written.update(state)
        return (number if tested else total), xs, stacks


def _entries(x: Any) -> Any:
    """Return entries as a JAX array of at least one entry, which XLA needs to trace the loop."""
    x = settle(x, x.dtype)
    return x if len(x) else find_jax().numpy.zeros((1, *x.shape[1:]), x.dtype)


# -- parts ---------------------------------------------------------------------------------------


def _fitted(node: Node, call: Callable[[], Any]) -> Any:
    """Return the result of the call. Turn JAX's shape errors into errors that name the op."""
    try:
        return call()
    except TypeError as error:
        if hasattr(error, "node"):  # an inner op raised it
            raise
        raise refusal(
            node,
            "in a compiled program the branches of a tf.cond must return equal shapes, and loop "
            f"variables must keep their shapes ({str(error).splitlines()[0].rstrip('.:')}).",
        ) from error


def _symbols(tensors: Sequence[rg.Tensor]) -> list[Any]:
    return [t._data for t in tensors]


def _written(steps: Sequence[Step]) -> list[str]:
    """Return the variables to which steps write."""
    return sorted({key for step in steps for key in find_touched(step.nodes).written})


def _state(trace: TraceRun, keys: Sequence[str]) -> dict[str, Any]:
    """Return the values of variables after a branch or an iteration."""
    values = {key: read_state(trace, None, key) for key in keys}
    return {key: settle(value, value.dtype) for key, value in values.items()}


def _count(loop: Control, known: dict[int, Any]) -> int | None:
    """Return the number of iterations of a loop if constants determine it, else None."""
    if loop.test is None:
        return loop.most(known)
    step = loop.steps[0].only(loop.test.reads)
    read = {s.id for part in (loop.test, step) for s in part.reads}
    nodes = all_nodes([*loop.test.nodes, *step.nodes])
    if any(node.op.stateful for node in nodes) or not all(is_known(known[key]) for key in read):
        return None
    values, run = {key: known[key] for key in read}, PlanRun({}, {})
    for number in range(COUNTED if loop.limit is None else min(loop.limit, COUNTED)):
        if not bool(run.through(loop.test, values)[0]):
            return number
        ys = run.through(step, values)
        values.update(zip([x._id for x in step.carries], ys, strict=True))
    return loop.limit
