"""Branches and loops: ops that contain graphs (regions), which a run chooses or repeats.

A region is built once, in its own inner graph, under the overrides that are active around it.
Tensors of the outer graph that the region uses become its inputs. The gradient of a region is
built in the same inner graph. The gradient therefore recomputes the values of the forward pass
that it needs.

A `GraphRegion` differs from a `Region` of `regrad.transforms`. A `Region` is a run of Python code,
recorded or traced, and its gradient is the gradient of the recorded ops. A `GraphRegion` is a
graph. NumPy runs it by a plan. Where JAX traces it or a tape records it, it runs node by node (see
`Interpreter`). The gradient of a `GraphRegion` is a set of nodes that exist before any run, so they
can be fetched, named and overridden. Both share the backward pass through a loop (`pull_loop`), the
traversal, the rules and the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

import regrad as rg
from regrad.autodiff.custom_nodes import PathRule, reaching
from regrad.core import dims
from regrad.core.backends import backend_of, is_inexact
from regrad.core.blocks import block, stay
from regrad.core.dispatch import alias_of, computed
from regrad.core.protocols import NodeLike
from regrad.core.pullback import Run as PullRun
from regrad.core.pullback import or_zeros, pull_loop
from regrad.core.state import current, in_state
from regrad.core.tape import placed, put
from regrad.errors import GradientError, GraphError
from regrad.graph.deferred import pull_call, spec_of_record
from regrad.graph.graph import CONST, INNERMOST, Node, OpGraph, Symbol, graph_op
from regrad.graph.plan import GraphPlan, PlanRun, needed
from regrad.shapes.infer import Spec
from regrad.v1.graph.gradients import path, pull_in_graph
from regrad.v1.graph.graphs import add_op, current_graph

Values = Sequence[Any]


@dataclass(eq=False)
class GraphRegion:
    """A part of a graph that computes `outputs` from values of its `inputs`.

    The inputs are the region's arguments (placeholders), followed by the inner tensors for captured
    tensors of the outer graph (see `share_captures`).
    """

    graph: OpGraph
    arguments: Sequence[rg.Tensor]
    outputs: Sequence[rg.Tensor]
    targets: Sequence[Node] = ()
    captured: Sequence[rg.Tensor] = ()

    @property
    def inputs(self) -> list[rg.Tensor]:
        """The arguments, followed by the captured inputs."""
        return [*self.arguments, *self.captured]

    def spread(self, given: Iterable[tuple[rg.Tensor, rg.Tensor]] = ()) -> None:
        """Mark the inner integers that carry a gradient because their outer tensor carries one.

        `given` are pairs of the outer tensor passed for an argument, and the argument.
        """
        pairs = (*self.graph.captures.values(), *given)
        new = [x._data for outer, x in pairs if outer._data.carries and not x._data.carries]
        for symbol in new:
            symbol.carries = True
        for node in self.graph.nodes if new else ():
            node.carry()

    def copy(self) -> GraphRegion:
        """Return the same region for another op, which may pass more captured inputs."""
        return GraphRegion(self.graph, self.arguments, self.outputs, self.targets)

    @cached_property
    def plan(self) -> GraphPlan:
        """The plan that NumPy runs."""
        symbols = [y._data for y in self.outputs]
        return GraphPlan(symbols, self.targets, [x._data for x in self.inputs])

    @cached_property
    def nodes(self) -> list[Node]:
        """The nodes to run, in order."""
        wanted = [*[y._data.node for y in self.outputs], *self.targets]
        return needed(wanted, {x._data.id for x in self.inputs})


class Interpreter(PlanRun):
    """A run that computes the nodes of regions one by one, without a NumPy plan."""

    __slots__ = ()

    def through(self, region: GraphRegion, values: Values) -> list[Any]:
        known = {x._data.id: v for x, v in zip(region.inputs, values, strict=True)}
        self.compute(self.nodes_of(region, known), known)
        return [known[y._data.id] for y in region.outputs]

    def nodes_of(self, region: GraphRegion, known: dict[int, Any]) -> list[Node]:
        """Return the nodes of a region to run, in order."""
        return region.nodes

    def compute(self, nodes: Iterable[Node], known: dict[int, Any]) -> None:
        """Compute nodes in order, and add their values to `known`, the values by symbol id."""
        for node in nodes:
            made = node.symbols
            if not made or made[0].id not in known or not all(s.id in known for s in made):
                ys = self.outputs(node, [known[s.id] for s in node.sources()], known)
                for symbol, y in zip(made, ys, strict=True):
                    known.setdefault(symbol.id, y)

    def outputs(self, node: Node, values: list[Any], known: dict[int, Any]) -> Values:
        """Return the outputs of a node, given its inputs."""
        raise NotImplementedError

    def call_kernel(self, node: Node, values: Values, attrs: dict[str, Any]) -> Values:
        """Return the outputs of an op whose kernel receives the run."""
        arguments = [placed(list(values), place) for place in node.layout]
        y = node.op.kernels.kernel(self, *arguments, **attrs)  # pyright: ignore
        return y if node.op.several else [y]


class EagerRun(Interpreter):
    """A run in eager mode. Open tapes record the nodes with the graph's rules."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__({}, {})

    def nodes_of(self, region: GraphRegion, known: dict[int, Any]) -> list[Node]:
        """Return the nodes that lead to the outputs. Control inputs ran in the forward pass."""
        return needed([y._data.node for y in region.outputs], set(known))

    def outputs(self, node: Node, values: list[Any], known: dict[int, Any]) -> Values:
        op, layout = node.op, node.layout
        if not node.symbols:  # an Assert, which passed in the forward pass
            return []
        if op is CONST:
            return [rg.asarray(node.attrs["value"])]
        if op in (IF, WHILE, WHILE_GRAD):
            return self.call_kernel(node, values, node.attrs)
        if op.stateful:
            raise GraphError(
                f"a second derivative of tf.while_loop cannot pass {node.name!r}: an op of type "
                f"{op.type}, which has state. Read variables and draw random numbers before "
                "the loop."
            )
        xs = tuple(values)
        attrs = node.attrs
        if node.sized:
            attrs = {k: dims.resolved(v, lambda s: known[s.id]._data) for k, v in attrs.items()}
        with in_state(None):
            y = computed(op, xs, attrs, layout)
        y = tuple(map(alias_of, y)) if isinstance(y, tuple) else alias_of(y)
        state = current()
        if state is not None and state.tapes:
            put(state, op, node.rule, xs, attrs, y, layout)
        return y if isinstance(y, tuple) else [y]


@block
def inside(graph: OpGraph) -> Generator[OpGraph]:
    """Put ops made in the block into the inner graph."""
    yield from stay(graph, INNERMOST, graph)


def new_graph(name: str) -> OpGraph:
    """Return a new inner graph for a region of the current graph."""
    outer = current_graph()
    made = OpGraph(outer)
    made.scope = f"{outer.scope}{name}/"
    return made


def share_captures(*regions: GraphRegion) -> list[rg.Tensor]:
    """Set the same captured inputs for all regions, and return the outer tensors for them."""
    outer = {
        key: tensor for region in regions for key, (tensor, _) in region.graph.captures.items()
    }
    for region in regions:
        region.captured = [region.graph.entering(x) for x in outer.values()]
    return list(outer.values())


def waiting_for(*regions: GraphRegion) -> Any:
    """Apply the control dependencies of the regions' ops to ops made in the block."""
    graph = current_graph()
    nodes = [node for region in regions for node in region.graph.waits_for]
    return OpGraph.control_dependencies(graph, nodes)


def spec_of(x: rg.Tensor) -> Spec:
    """Return the static shape and dtype of a symbolic Tensor."""
    return spec_of_record(x._data.shape, x._data.dtype)


def _is_float(x: rg.Tensor) -> bool:
    return is_inexact(x._data.dtype)


def _of_floats(xs: Sequence[rg.Tensor], dxs: Sequence[rg.Tensor | None]) -> list[Any]:
    """Return the gradients of the floats among the inputs or outputs of a region.

    Gradients of integers cannot pass. If an override returned one, raise GradientError.
    """
    for x, dx in zip(xs, dxs, strict=True):
        if x._data.carries and not (_is_float(x) or dx is None) and is_inexact(dx.dtype):
            raise GradientError(
                f"a gradient of {x._data.name!r}, of {x._data.dtype}, would pass into or out of a "
                "branch or loop, because an override is active for an op on the path. Only "
                "gradients of floats can pass. Put the op and the cast to floats on the same side "
                "and pass the floats, or use tf.stop_gradient."
            )
    return [dx for x, dx in zip(xs, dxs, strict=True) if _is_float(x)]


def gradient_region(
    region: GraphRegion, outputs: Iterable[int], inputs: Iterable[int]
) -> GraphRegion:
    """Make a region that returns the gradients of the float inputs at the indices `inputs`.

    Its arguments are the region's arguments and the gradients of the float outputs at the indices
    `outputs`.
    """
    wrt = [region.inputs[i] for i in inputs]
    with inside(region.graph) as graph:
        ys = list(filter(_is_float, [region.outputs[i] for i in outputs]))
        arriving = [graph.placeholder(spec_of(y), "grad_ys") for y in ys]
        found = _of_floats(wrt, pull_in_graph(ys, [x._data for x in wrt], arriving, graph.scope))
        dxs = [or_zeros(dx, x) for dx, x in zip(found, filter(_is_float, wrt), strict=True)]
    made = GraphRegion(graph, [*region.arguments, *arriving], dxs)
    _refuse_writers(made)
    return made


def _refuse_writers(region: GraphRegion) -> None:
    """Raise if a gradient would write to a variable again when it recomputes the forward pass."""
    known = {x._data.id for x in region.arguments}
    for node in needed([y._data.node for y in region.outputs], known):
        if node.op.type.startswith(("Assign", "Apply")):
            raise GradientError(
                f"the gradient of a branch or loop would run {node.name!r} (type "
                f"{node.op.type}) again, which writes to a variable. Assign after the branch or "
                "loop, to what it returns, or use tf.stop_gradient inside."
            )


def _placed(
    xs: Sequence[rg.Tensor], inputs: Iterable[int], dxs: Iterable[rg.Tensor | None]
) -> list[Any]:
    """Return a list with the gradients at the indices of the float inputs, None elsewhere."""
    found = dict(zip([i for i in inputs if _is_float(xs[i])], dxs, strict=True))
    return [found.get(i) for i in range(len(xs))]


# -- dependences of outputs on inputs ------------------------------------------------------------


@dataclass
class Part:
    """The dependences of a node's outputs on its inputs, in a branch or over iterations.

    `inputs` and `outputs` are the inner tensors for the inputs and outputs of the node. `turns` are
    pairs of an input of an iteration and its value for the next iteration.
    """

    inputs: Sequence[rg.Tensor]
    outputs: Sequence[rg.Tensor]
    turns: Sequence[tuple[rg.Tensor, rg.Tensor]] = ()

    def used(self, outputs: Iterable[int]) -> tuple[list[Symbol], dict[int, Symbol]]:
        """Return the symbols where a gradient of these outputs starts, and those it may reach.

        A symbol counts as reached if a gradient may reach it in any iteration.
        """
        ends = {(y := self.outputs[i]._data).id: y for i in outputs}
        while True:
            used = reaching(ends.values())[1]
            more = {y._id: y._data for x, y in self.turns if x._id in used and y._id not in ends}
            if not more:
                return list(ends.values()), used
            ends.update(more)

    def watched(self, outputs: Iterable[int], inputs: Iterable[int]) -> set[int]:
        """Return the ids of the inputs, and of the symbols on a path from them to these outputs."""
        ends, used = self.used(outputs)
        ids = {x._id for x in (self.inputs[i] for i in inputs) if x._data.carries}
        while True:
            found = path(ends, ids)[1]
            more = {x._id for x, y in self.turns if y._id in found and x._id in used}
            if more <= ids:
                return found
            ids |= more


class GraphRegionRule(PathRule):
    """The rule of an op that runs regions. It needs all inputs and outputs of the op.

    The rule returns gradients for the watched inputs, from the gradients of the used outputs.
    """

    by_leaf = sparse = True

    def keeps(self, wanted: frozenset[int]) -> tuple[frozenset[int], bool]:
        return wanted | {0}, True

    def linear_in(self, wanted: frozenset[int]) -> bool:
        return False  # unknown before the run

    def parts(self, node: Any) -> list[Part]:
        """Return the parts of the op. Their inputs are the last inputs of the node."""
        raise NotImplementedError

    def sources(self, node: Node, used: Container[int]) -> Iterable[Symbol]:
        outputs = [s.index for s in node.symbols if s.id in used]
        for part in self.parts(node):
            found = part.used(outputs)[1]
            xs = node.xs[len(node.xs) - len(part.inputs) :]
            yield from (x._data for x, own in zip(xs, part.inputs, strict=True) if own._id in found)

    def reached(self, node: Node, used: Container[int], watched: set[int]) -> list[int]:
        outputs = [s.index for s in node.symbols if s.id in used]
        found: set[int] = set()
        for part in self.parts(node):
            keys = node.inputs[len(node.inputs) - len(part.inputs) :]
            inner = part.watched(outputs, [i for i, key in enumerate(keys) if key in watched])
            found.update(i for i in outputs if part.outputs[i]._id in inner)
        return [node.symbols[i].id for i in found]


# An op that runs regions. Its rules conjugate where needed, so the backward pass must not.
_op = partial(graph_op, several=True, stateful=True, holomorphic=False)


# -- cond ----------------------------------------------------------------------------------------


def _if(run: PlanRun, pred: np.ndarray, xs: Values, branches: Sequence[GraphRegion]) -> Any:
    return tuple(run.through(branches[0 if bool(pred) else 1], xs))


def cond_node(
    pred: rg.Tensor, branches: tuple[GraphRegion, GraphRegion], given: Sequence[rg.Tensor]
) -> tuple[rg.Tensor, ...]:
    """Make a node that runs one of two regions, on `given` and on their captured inputs."""
    captured = share_captures(*branches)
    specs = [_merged(a, b) for a, b in zip(*[b.outputs for b in branches], strict=True)]
    with waiting_for(*branches):
        return add_op(IF, "cond", [pred, *given, *captured], {"branches": branches}, specs, IF.rule)


def _merged(a: rg.Tensor, b: rg.Tensor) -> Spec:
    """Return the static shape and dtype of a result of either of two branches."""
    m, n = spec_of(a), spec_of(b)
    if m.shape is None or n.shape is None or len(m.shape) != len(n.shape):
        return Spec(None, m.dtype)
    pairs = zip(m.shape, n.shape, strict=True)
    return Spec(tuple([p if dims.same((p,), (q,)) is True and type(p) is int else None
                       for p, q in pairs]), m.dtype)  # fmt: skip


class CondRule(GraphRegionRule):
    """The rule of `cond`, whose gradient is a `cond` of the gradients of the branches."""

    name = "cond"

    def carries(self, node: NodeLike, index: int) -> bool:
        branches = node.attrs["branches"]
        for branch in branches:
            branch.spread()
        return any(branch.outputs[index]._data.carries for branch in branches)

    def pull(self, record: Any, dy: Any, wanted: Sequence[int]) -> Iterable[tuple[int, Any]]:
        xs, branches = list(record.xs[1:]), record.attrs["branches"]
        outputs = [i for i, d in enumerate(dy) if d is not None]
        arriving = _of_floats([record.y[i] for i in outputs], [dy[i] for i in outputs])
        inputs = [
            i - 1 for i in wanted if i and any(b.inputs[i - 1]._data.carries for b in branches)
        ]
        first, second = (gradient_region(branch, outputs, inputs) for branch in branches)
        given = [*xs[: len(branches[0].arguments)], *arriving]
        found = cond_node(record.xs[0], (first, second), given)
        return [(0, None), (1, _placed(xs, inputs, found))]

    def parts(self, node: Any) -> list[Part]:
        branches = node.attrs["branches"]
        for branch in branches:
            branch.spread()
        return [Part(branch.inputs, branch.outputs) for branch in branches]


IF = _op("If", _if, "pred xs*", "branches", name="cond", rule=CondRule())


# -- while_loop ----------------------------------------------------------------------------------

Call = Callable[[GraphRegion, Values, int], Sequence[Any]]  # the int is the number of the iteration


class Loop:
    """A loop, with regions for the condition, the body, and the gradient of the body."""

    def __init__(self, cond: GraphRegion, body: GraphRegion, limit: int | None) -> None:
        self.cond = cond
        self.body = body
        self.limit = limit
        self.count: int = len(body.arguments)
        self.wrt: list[bool] = [_is_float(x) for x in body.captured]  # by captured input
        self.gradient: GraphRegion | None = None

    @property
    def turns(self) -> list[tuple[rg.Tensor, rg.Tensor]]:
        """The loop variables at the start of an iteration, each with its value at the end."""
        return list(zip(self.body.arguments, self.body.outputs, strict=True))

    def steps(self, call: Call, values: Values, captured: Values) -> Iterator[Values]:
        """Yield the loop variables at the start of each iteration, and at the end of the loop."""
        number = 0
        while True:
            yield values
            inputs = [*values, *captured]
            over = self.limit is not None and number >= self.limit
            if over or not bool(call(self.cond, inputs, number)[0]):
                return
            values, number = call(self.body, inputs, number), number + 1

    def spread(self, xs: Sequence[rg.Tensor]) -> None:
        """Mark the integers of the body that carry a gradient, also between iterations."""
        arguments = self.body.arguments
        pairs = [*zip(xs, arguments, strict=False), *zip(self.body.outputs, arguments, strict=True)]
        for _ in range(1 + sum(not _is_float(x) for x in arguments)):
            self.body.spread(pairs)

    def opened(self, xs: Values, floats: int) -> tuple[Values, Values, Values]:
        """Split xs into the loop variables, the gradients of their final values, and captures."""
        n = self.count + floats
        return xs[: self.count], xs[self.count : n], xs[n:]

    def pull(self, call: Call, xs: Values, floats: int) -> list[Any]:
        """Return the gradients of the initial float loop variables and of the float captures."""
        values, dys, captured = self.opened(xs, floats)
        *steps, _ = self.steps(call, values, captured)

        def run(step: Any, state: Any, entries: Any) -> Any:
            for entry in reversed(entries):
                state, _ = step(state, entry)
            return state, ()

        dvars, sums = self.go_back(call, dys, captured, list(enumerate(steps)), run)
        return [*dvars, *(self.zeros(captured) if sums is None else sums)]

    def go_back(
        self, call: Call, dys: Values, captured: Values, entries: Any, run: PullRun, *sums: Any
    ) -> tuple[Values, Values | None]:
        """Run the backward pass over the iterations.

        An entry is the number of an iteration and the loop variables at its start.
        """

        def pull(dvars: Values, entry: tuple[Any, Values]) -> Values:
            number, values = entry
            assert self.gradient is not None
            return call(self.gradient, [*values, *dvars, *captured], number)

        return pull_loop(pull, dys, sum(self.wrt), entries, run, *sums)[:2]

    def zeros(self, captured: Values) -> list[Any]:
        """Return zeros for the gradients of the float captures."""
        return [_blank(x) for x, is_float in zip(captured, self.wrt, strict=False) if is_float]


def _blank(x: Any) -> Any:
    """Return zeros like a value. For a variable's ref, whose value is None, return None."""
    if isinstance(x, rg.Tensor):
        return rg.zeros_like(x)
    return None if x is None else backend_of(x).xp.zeros_like(x)


def _while(run: PlanRun, xs: Values, loop: Loop) -> Any:
    *_, values = loop.steps(_calls(run), xs[: loop.count], xs[loop.count :])
    return tuple(values)


def _calls(run: PlanRun) -> Call:
    """Return a function that calls regions in the iterations of one loop."""
    outside, through = run.path, run.through

    def call(region: GraphRegion, values: Values, number: int) -> Sequence[Any]:
        run.path = (*outside, number)
        try:
            return through(region, values)
        finally:
            run.path = outside

    return call


def while_node(
    cond: GraphRegion, body: GraphRegion, start: Sequence[rg.Tensor], specs: Sequence[Spec],
    limit: int | None,
) -> tuple[rg.Tensor, ...]:  # fmt: skip
    """Make a node that repeats the body on its own results while the condition holds."""
    xs = [*start, *share_captures(cond, body)]
    with waiting_for(cond, body):
        return add_op(WHILE, "while", xs, {"loop": Loop(cond, body, limit)}, specs, WHILE.rule)


class WhileRule(GraphRegionRule):
    """The rule of `while_loop`. The gradient runs the loop again, then its iterations backward."""

    name = "while_loop"

    def carries(self, node: NodeLike, index: int) -> bool:
        loop: Loop = node.attrs["loop"]
        loop.spread(node.xs)
        return loop.body.arguments[index]._data.carries

    def pull(self, record: Any, dy: Any, wanted: Sequence[int]) -> Iterable[tuple[int, Any]]:
        old: Loop = record.attrs["loop"]
        start, xs = list(record.xs[: old.count]), list(record.xs)
        loop = Loop(old.cond.copy(), old.body.copy(), old.limit)
        (part,) = self.parts(record)
        outputs = [i for i, d in enumerate(dy) if d is not None]
        watched, used = part.watched(outputs, wanted), part.used(outputs)[1]
        ways = [i for i, x in enumerate(old.body.arguments) if x._id in watched and x._id in used]
        inputs = [*ways, *(i for i in wanted if i >= old.count and part.inputs[i]._data.carries)]
        loop.wrt = [i in inputs and _is_float(x) for i, x in enumerate(xs)][old.count :]
        ys = [record.y[i] for i in ways]
        arriving = _of_floats(ys, [or_zeros(dy[i], record.y[i]) for i in ways])
        loop.gradient = gradient_region(old.body, ways, inputs)
        captured = share_captures(loop.cond, loop.body, loop.gradient)
        given = [*start, *arriving, *captured]
        attrs = {"loop": loop, "floats": len(arriving)}
        specs = [spec_of(xs[i]) for i in inputs if _is_float(xs[i])]
        found = add_op(WHILE_GRAD, "while_grad", given, attrs, specs, WHILE_GRAD.rule)
        return [(0, _placed(xs, inputs, found))]

    def parts(self, node: Any) -> list[Part]:
        loop: Loop = node.attrs["loop"]
        loop.spread(node.xs)
        return [Part(loop.body.inputs, loop.body.arguments, loop.turns)]


WHILE = _op("While", _while, "xs*", "loop", name="while", rule=WhileRule())


def _while_grad(run: PlanRun, xs: Values, loop: Loop, floats: int) -> Any:
    return tuple(loop.pull(_calls(run), xs, floats))


class WhileGradRule(GraphRegionRule):
    """The rule for higher orders: the run differentiates both passes over the loop, op by op."""

    name = "while_loop"

    def pull(self, record: Any, dy: Any, wanted: Sequence[int]) -> Iterable[tuple[int, Any]]:
        loop, floats = record.attrs["loop"], record.attrs["floats"]

        def call(tensors: Sequence[rg.Tensor], sizes: Any) -> Sequence[rg.Tensor]:
            return loop.pull(_calls(EagerRun()), tensors, floats)

        return pull_call(call, record, dy, [i for i in wanted if _is_float(record.xs[i])])

    def parts(self, node: Any) -> list[Part]:
        loop: Loop = node.attrs["loop"]
        assert loop.gradient is not None
        dys = loop.gradient.arguments[loop.count :]
        ends = loop.gradient.outputs
        turns = [*loop.turns, *zip(dys, ends, strict=False)]
        return [Part(loop.gradient.inputs, [*dys, *ends[len(dys) :]], turns)]


WHILE_GRAD = _op(
    "WhileGrad", _while_grad, "xs*", "loop floats", name="while_grad", rule=WhileGradRule()
)
