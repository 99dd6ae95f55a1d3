"""Branches and loops in compiled plans, as XLA's control flow, with the variables they write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import regrad as rg
from regrad.graph.graph import PLACEHOLDER, Node
from regrad.graph.plan import GraphPlan, PlanRun, needed
from regrad.transforms.traces import find_jax
from regrad.v1.errors import UnimplementedError
from regrad.v1.graph.regions import GraphRegion, Loop
from regrad.v1.graph.variables import read_state
from regrad.v1.run.tracing import (
    TraceRun,
    Values,
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
    pred, *xs = values
    if is_known(pred):
        return trace.call_kernel(node, values, attrs)
    keys = _written(*attrs["branches"])

    def branch(region: GraphRegion) -> Callable[[], Any]:
        def run() -> Any:
            inner = trace.inside({})
            ys = inner.through(region, xs)
            return settle_all(ys, _symbols(region.outputs)), _state(inner, keys)

        return run

    cond = find_jax().lax.cond
    ys, written = _fitted(node, lambda: cond(pred, *map(branch, attrs["branches"])))
    trace.written.update(written)
    return ys


@traces("While")
def _while(trace: TraceRun, node: Node, values: list[Any], attrs: dict[str, Any]) -> Values:
    loop: Loop = attrs["loop"]
    start, captured = values[: loop.count], values[loop.count :]
    keys = _written(loop.body)

    def compiled() -> Values:
        _, ys, written, _ = _forward(trace, loop, start, captured, keys)
        trace.written.update(written)
        return ys

    return _or_unrolled(trace, node, values, attrs, compiled, _count(loop, start, captured))


@traces("WhileGrad")
def _while_grad(trace: TraceRun, node: Node, values: list[Any], attrs: dict[str, Any]) -> Values:
    """Run the loop again, storing its variables for each iteration, then the backward pass."""
    loop: Loop = attrs["loop"]
    start, dys, captured = loop.opened(values, attrs["floats"])
    count = _count(loop, start, captured)
    most = loop.limit if count is None else count
    if most is None:
        raise refusal(
            node,
            "the gradient of a loop stores each iteration, and the maximum number is unknown. Pass "
            "maximum_iterations to tf.while_loop, or a condition that depends on constants only.",
        )
    if _written(loop.body):
        raise refusal(node, "it would write to variables again. Assign after the loop.")

    def compiled() -> Values:
        number, _, _, stacks = _forward(trace, loop, start, captured, (), most)
        return _back(trace, loop, dys, captured, number, stacks)

    return _or_unrolled(trace, node, values, attrs, compiled, count)


def _forward(
    trace: TraceRun, loop: Loop, start: Values, captured: Values, keys: Sequence[str],
    most: int | None = None,
) -> Any:  # fmt: skip
    """Return the number of iterations, the loop variables and the state after them, and stacks.

    The stacks hold the loop variables at the start of each iteration. `most`, the largest number of
    iterations, is the size of the stacks. Without it the list of stacks is empty.
    """
    jax, symbols = find_jax(), _symbols(loop.body.arguments)
    first = settle_all(start, symbols)
    kept = [] if most is None else first
    blank = [jax.numpy.zeros((max(most or 0, 1), *x.shape), x.dtype) for x in kept]

    def test(carry: Any) -> Any:
        number, xs, state, _ = carry
        (go,) = trace.inside(state, number).through(loop.cond, [*xs, *captured])
        go = settle(go, np.dtype(bool))
        return go if loop.limit is None else (number < loop.limit) & go

    def advance(carry: Any) -> Any:
        number, xs, state, stacks = carry
        stacks = [s.at[number].set(x) for s, x in zip(stacks, xs, strict=bool(stacks))]
        inner = trace.inside(state, number)
        ys = inner.through(loop.body, [*xs, *captured])
        return number + 1, settle_all(ys, symbols), _state(inner, keys), stacks

    return jax.lax.while_loop(test, advance, (np.int32(0), first, _state(trace, keys), blank))


def _back(
    trace: TraceRun, loop: Loop, dys: Values, captured: Values, number: Any, stacks: Values
) -> Values:
    """Return the gradients of the initial float loop variables and of the float captures."""
    region = loop.gradient
    assert region is not None
    symbols = _symbols(region.outputs)
    first = settle_all([*dys, *loop.zeros(captured)], symbols)

    def call(region: GraphRegion, values: Values, number: Any) -> Values:
        return settle_all(trace.inside({}, number).through(region, values), symbols)

    def run(step: Any, state: Any, stacks: Values) -> Any:
        def retreat(carry: Any) -> Any:
            number, state = carry
            return number - 1, step(state, (number, [s[number] for s in stacks]))[0]

        goes_on = lambda carry: carry[0] >= 0  # noqa: E731
        return find_jax().lax.while_loop(goes_on, retreat, (number - 1, state))[1], ()

    n = len(dys)
    dxs, sums = loop.go_back(call, first[:n], captured, stacks, run, first[n:], _add)
    return [*dxs, *(sums or ())]


def _add(a: Any, b: Any) -> Any:
    """Return the sum of two gradients, or None for a variable's ref, which has no gradient."""
    return None if a is None else a + b


# -- parts ---------------------------------------------------------------------------------------


def _or_unrolled(
    trace: TraceRun, node: Node, values: Values, attrs: dict[str, Any],
    compiled: Callable[[], Values], count: int | None,
) -> Values:  # fmt: skip
    """Trace XLA's loop. If shapes or sizes change during the loop, unroll its iterations."""
    try:
        return _fitted(node, compiled)
    except UnimplementedError:
        if count is None or count > UNROLLED:
            raise
        return trace.call_kernel(node, values, attrs)


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


def _written(*regions: GraphRegion) -> list[str]:
    """Return the variables to which regions write."""
    return sorted({key for region in regions for key in find_touched(region.nodes).written})


def _state(trace: TraceRun, keys: Sequence[str]) -> dict[str, Any]:
    """Return the values of variables after a branch or an iteration."""
    values = {key: read_state(trace, None, key) for key in keys}
    return {key: settle(value, value.dtype) for key, value in values.items()}


# -- counting ------------------------------------------------------------------------------------


def _count(loop: Loop, start: Values, captured: Values) -> int | None:
    """Return the number of iterations of a loop if constants determine it, else None."""
    steering, nodes = _steering(loop)
    values = [*start, *captured]
    if any(node.op.stateful for node in nodes) or not all(is_known(values[i]) for i in steering):
        return None
    own = [i for i in steering if i < loop.count]
    feeds = [[region.inputs[i]._data for i in steering] for region in (loop.cond, loop.body)]
    test = GraphPlan([loop.cond.outputs[0]._data], [], feeds[0])
    step = GraphPlan([loop.body.outputs[i]._data for i in own], [], feeds[1])
    run = PlanRun({}, {})
    for number in range(COUNTED if loop.limit is None else min(loop.limit, COUNTED)):
        given = [values[i] for i in steering]
        if not bool(test(given, run)[0]):
            return number
        for i, value in zip(own, step(given, run), strict=True):
            values[i] = value
    return loop.limit


def _steering(loop: Loop) -> tuple[list[int], list[Node]]:
    """Return the inputs that determine the number of iterations, and the nodes that use them."""
    nodes = needed([loop.cond.outputs[0]._data.node], set())
    found = _places(loop.cond, nodes)
    open_places = [i for i in found if i < loop.count]
    while open_places:
        more = needed([loop.body.outputs[open_places.pop()]._data.node], set())
        nodes += more
        new = _places(loop.body, more) - found
        found |= new
        open_places += [i for i in new if i < loop.count]
    return sorted(found), nodes


def _places(region: GraphRegion, nodes: Sequence[Node]) -> set[int]:
    read = {node.symbols[0].id for node in nodes if node.op is PLACEHOLDER}
    return {i for i, x in enumerate(region.inputs) if x._data.id in read}
