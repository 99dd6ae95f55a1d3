"""Branches and loops in compiled plans: XLA's own, with the variables that they write to."""

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

UNROLLED = 256  # iterations of a loop that are written out one by one, if XLA's loop will not do
COUNTED = 100_000  # iterations that are counted while tracing


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
    """The loop again, its variables kept for each iteration, and then back over them."""
    loop: Loop = attrs["loop"]
    start, dys, captured = loop.opened(values, attrs["floats"])
    count = _count(loop, start, captured)
    most = loop.limit if count is None else count
    if most is None:
        raise refusal(
            node,
            "the gradient of a loop keeps each iteration, and nothing says how many there can be. "
            "Give tf.while_loop maximum_iterations, or a condition that follows from constants.",
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
    """Return the number of iterations; the variables and the state after them; and a stack of each.

    The stacks hold the variables at the start of each iteration. They are made if it is said how
    many iterations there can be at most.
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
    """The gradients by the float variables at the start, and by the float captures."""
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
    """A sum of gradients; of a variable itself, which stands as None, there is none."""
    return None if a is None else a + b


# -- parts ---------------------------------------------------------------------------------------


def _or_unrolled(
    trace: TraceRun, node: Node, values: Values, attrs: dict[str, Any],
    compiled: Callable[[], Values], count: int | None,
) -> Values:  # fmt: skip
    """XLA's loop; or, where shapes or sizes change on the way, its iterations one by one."""
    try:
        return _fitted(node, compiled)
    except UnimplementedError:
        if count is None or count > UNROLLED:
            raise
        return trace.call_kernel(node, values, attrs)


def _fitted(node: Node, call: Callable[[], Any]) -> Any:
    """Return the result of the call; JAX's errors about shapes that do not fit name the op."""
    try:
        return call()
    except TypeError as error:
        if hasattr(error, "node"):  # an op inside
            raise
        raise refusal(
            node,
            "in a compiled program the branches of a tf.cond give equal shapes, and the variables "
            f"of a loop keep theirs ({str(error).splitlines()[0].rstrip('.:')}).",
        ) from error


def _symbols(tensors: Sequence[rg.Tensor]) -> list[Any]:
    return [t._data for t in tensors]


def _written(*regions: GraphRegion) -> list[str]:
    """The variables to which regions write."""
    return sorted({key for region in regions for key in find_touched(region.nodes).written})


def _state(trace: TraceRun, keys: Sequence[str]) -> dict[str, Any]:
    """Variables as a branch or an iteration leaves them."""
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
    """The inputs on which the number of iterations depends, and the nodes in between."""
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
