"""Branches and loops in compiled plans, as XLA's control flow, with the variables they write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from regrad.graph.graph import Node
from regrad.graph.plan import PlanRun
from regrad.transforms.traces import find_jax
from regrad.v1.errors import UnimplementedError
from regrad.v1.graph.regions import Control, Step
from regrad.v1.run.tracing import TRACED, TraceRun, find_written, is_known, refusal, settle_all

UNROLLED = 256  # the most iterations to unroll if XLA's loop fails
COUNTED = 100_000  # the most iterations to count while tracing


def _if(trace: TraceRun, node: Node, values: Sequence[Any], attrs: dict[str, Any]) -> Any:
    control: Control = attrs["control"]
    if is_known(values[0]):
        return None
    known = control.known(values)
    keys = find_written(node for step in control.steps for node in step.nodes)

    def branch(step: Step) -> Any:
        inner = trace.inside({})
        ys = inner.through(step, known)
        return settle_all(ys, step.outputs), inner.state(keys)

    calls = [partial(branch, step) for step in control.steps]
    ys, written = _fitted(node, lambda: find_jax().lax.cond(values[0], *calls))
    trace.written.update(written)
    return ys


def _while(trace: TraceRun, node: Node, values: Sequence[Any], attrs: dict[str, Any]) -> Any:
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
        return None


def _sweeps(trace: TraceRun, loop: Control, known: dict[int, Any], most: int | None) -> list[Any]:
    """Return the results of the loop's sweeps, each of which is a loop of XLA."""
    rows = {key: _entries(known[key]) for key in loop.entries}  # stacked by iteration
    total: Any = None if loop.test is not None else most
    finals, stacks = [], []
    for step, kept in zip(loop.steps, loop.kept, strict=True):
        total, ys, stacks = _sweep(trace, loop, step, kept, known, rows, total, most)
        finals, rows = finals + ys, rows | dict(zip(kept, stacks, strict=False))
    return finals + [stack[:most] for stack in stacks[len(loop.kept[-1]) :]]


def _sweep(
    trace: TraceRun, loop: Control, step: Step, kept: Sequence[int], known: dict[int, Any],
    rows: dict[int, Any], total: Any, most: int | None,
) -> Any:  # fmt: skip
    """Return the number of iterations, the final loop variables, and the stacked values."""
    jax, ids, keys = find_jax(), [x._id for x in step.carries], find_written(step.nodes)

    def at(number: Any, xs: Sequence[Any], state: dict[str, Any]) -> Any:
        index = lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False)  # noqa: E731
        own = {**{key: index(x) for key, x in rows.items()}, **dict(zip(ids, xs, strict=True))}
        return trace.inside(state, number), known | own

    def turn(number: Any, xs: Sequence[Any], state: dict[str, Any]) -> Any:
        run, given = at(number, xs, state)
        ys = settle_all(run.through(step, given), step.outputs)
        return ys[: len(ids)], [*[given[i] for i in kept], *ys[len(ids) :]], run.state(keys)

    def goes_on(carry: Any) -> Any:
        number, xs, state, _ = carry
        if total is not None:
            return (number >= 0) & (number < total)
        run, given = at(number, xs, state)
        go = jax.numpy.asarray(run.through(loop.test, given)[0])
        return go if most is None else (number < most) & go

    def advance(carry: Any) -> Any:
        number, xs, state, stacks = carry
        ys, values, state = turn(number, xs, state)
        stacks = [s.at[number].set(x) for s, x in zip(stacks, values, strict=True)]
        return number + (-1 if step.backward else 1), ys, state, stacks

    first, state = settle_all([known[i] for i in ids], step.carries), trace.state(keys)
    stacks = []
    if kept or step.stacked:
        shapes = jax.eval_shape(lambda: turn(np.int32(0), first, state)[1])
        stacks = [jax.numpy.zeros((max(most or 0, 1), *x.shape), x.dtype) for x in shapes]
    start = jax.numpy.asarray(total - 1 if step.backward else 0, np.int32)
    carry = jax.lax.while_loop(goes_on, advance, (start, first, state, stacks))
    trace.written.update(carry[2])
    return (carry[0] if total is None else total), carry[1], carry[3]


def _entries(x: Any) -> Any:
    """Return entries as a JAX array of at least one entry, which XLA needs to trace the loop."""
    (x,) = settle_all([x], [x])
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


def _count(loop: Control, known: dict[int, Any]) -> int | None:
    """Return the number of iterations of a loop if constants determine it, else None."""
    if loop.test is None:
        return loop.most(known)
    step = loop.steps[0].only(loop.test.reads)
    values = {s.id: known[s.id] for part in (loop.test, step) for s in part.reads}
    stateful = loop.test.plan.stateful or step.plan.stateful
    if stateful or not all(map(is_known, values.values())):
        return None
    run = PlanRun({}, {})
    for number in range(COUNTED if loop.limit is None else min(loop.limit, COUNTED)):
        if not bool(run.through(loop.test, values)[0]):
            return number
        ys = run.through(step, values)
        values.update(zip([x._id for x in step.carries], ys, strict=True))
    return loop.limit


TRACED.update(If=_if, While=_while)
