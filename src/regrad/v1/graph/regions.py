"""Branches and loops: graphs inside an op, which the run chooses or repeats.

A region is built once, in a graph of its own, under the overrides in force around it. Tensors of
the outer graph that it uses become its inputs. Its gradient is built in the same inner graph, so
what that needs of the forward pass is computed again, where it is used.

Such a region is not a `Region` of `regrad.transforms`. That is a run: Python that is recorded or
traced, whose gradient is the gradient of what it did. This one is a graph, which NumPy runs by a
plan; where JAX traces it, or a tape records it, it runs node by node (see `Interpreter`). Its
gradient is a set of nodes, made before any run, which can be fetched, named and overridden. The two
share the way back through a loop (`pull_loop`), the walk, the rules and the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

import regrad as rg
from regrad.core import dims
from regrad.core.backends import backend_of, is_inexact
from regrad.core.blocks import block, stay
from regrad.core.dispatch import alias_of, computed
from regrad.core.protocols import NodeLike
from regrad.core.pullback import Run as PullRun
from regrad.core.pullback import or_zeros, pull_loop
from regrad.core.rule import Rule
from regrad.core.state import current, in_state
from regrad.core.tape import placed, put
from regrad.errors import GradientError, GraphError
from regrad.graph.deferred import pull_call, spec_of_record
from regrad.graph.graph import CONST, INNERMOST, Graph, Node, graph_op
from regrad.graph.plan import Plan, Run, needed
from regrad.shapes.infer import Spec
from regrad.v1.graph.gradients import pull_in_graph
from regrad.v1.graph.graphs import add_op, current_graph

Values = Sequence[Any]


@dataclass(eq=False)
class GraphRegion:
    """A part of a graph that runs as a whole: `outputs`, given values for the `inputs`.

    The inputs are its own arguments (placeholders) and, after them, what stands inside for
    tensors of the outer graph (see `share_captures`).
    """

    graph: Graph
    arguments: Sequence[rg.Tensor]
    outputs: Sequence[rg.Tensor]
    targets: Sequence[Node] = ()
    captured: Sequence[rg.Tensor] = ()

    @property
    def inputs(self) -> list[rg.Tensor]:
        """The arguments, and then what is captured."""
        return [*self.arguments, *self.captured]

    def spread(self, given: Iterable[tuple[rg.Tensor, rg.Tensor]] = ()) -> None:
        """Note which integers inside carry a gradient: those that come in as they do outside.

        `given` are pairs of the value that is passed for an argument, and the argument.
        """
        for outer, inner in (*self.graph.captures.values(), *given):
            inner._data.carries |= outer._data.carries
        for node in self.graph.nodes:
            node.carry()

    def copy(self) -> GraphRegion:
        """The same part of the graph, for an op that passes it more captured inputs."""
        return GraphRegion(self.graph, self.arguments, self.outputs, self.targets)

    @cached_property
    def plan(self) -> Plan:
        """The plan that NumPy runs."""
        symbols = [y._data for y in self.outputs]
        return Plan(symbols, self.targets, [x._data for x in self.inputs])

    @cached_property
    def nodes(self) -> list[Node]:
        """The nodes that run, in order."""
        wanted = [*[y._data.node for y in self.outputs], *self.targets]
        return needed(wanted, {x._data.id for x in self.inputs})


class Interpreter(Run):
    """A run that takes the nodes of regions one by one, as no plan does that NumPy runs."""

    __slots__ = ()

    def through(self, region: GraphRegion, values: Values) -> list[Any]:
        known = {x._data.id: v for x, v in zip(region.inputs, values, strict=True)}
        self.compute(self.nodes_of(region, known), known)
        return [known[y._data.id] for y in region.outputs]

    def nodes_of(self, region: GraphRegion, known: dict[int, Any]) -> list[Node]:
        """The nodes of a region that run, in order."""
        return region.nodes

    def compute(self, nodes: Iterable[Node], known: dict[int, Any]) -> None:
        """Compute nodes in order; `known` are the values by symbol, and gets the new ones."""
        for node in nodes:
            made = node.symbols
            if not made or made[0].id not in known or not all(s.id in known for s in made):
                ys = self.outputs(node, [known[s.id] for s in node.sources()], known)
                for symbol, y in zip(made, ys, strict=True):
                    known.setdefault(symbol.id, y)

    def outputs(self, node: Node, values: list[Any], known: dict[int, Any]) -> Values:
        """The outputs of a node, given its inputs."""
        raise NotImplementedError

    def call_kernel(self, node: Node, values: Values, attrs: dict[str, Any]) -> Values:
        """The outputs of an op whose kernel is given the run."""
        arguments = [placed(list(values), place) for place in node.layout]
        y = node.op.kernels.kernel(self, *arguments, **attrs)  # pyright: ignore
        return y if node.op.several else [y]


class EagerRun(Interpreter):
    """A run in eager mode: open tapes record, under the rules of the graph."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__({}, {})

    def nodes_of(self, region: GraphRegion, known: dict[int, Any]) -> list[Node]:
        """Those that lead to the outputs; what only has to run first did so forward."""
        return needed([y._data.node for y in region.outputs], set(known))

    def outputs(self, node: Node, values: list[Any], known: dict[int, Any]) -> Values:
        op, layout = node.op, node.layout
        if not node.symbols:  # it may stop the run, and did not forward
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
def inside(graph: Graph) -> Generator[Graph]:
    """Ops made in the block go into the inner graph."""
    yield from stay(graph, INNERMOST, graph)


def new_graph(name: str) -> Graph:
    """A graph for a region of the current one."""
    outer = current_graph()
    made = Graph(outer)
    made.scope = f"{outer.scope}{name}/"
    return made


def share_captures(*regions: GraphRegion) -> list[rg.Tensor]:
    """Give the regions the same captured inputs; the outer tensors for them."""
    outer = {
        key: tensor for region in regions for key, (tensor, _) in region.graph.captures.items()
    }
    for region in regions:
        region.captured = [region.graph.entering(x) for x in outer.values()]
    return list(outer.values())


def waiting_for(*regions: GraphRegion) -> Any:
    """Ops made in the block run after what the regions' ops are to run after."""
    graph = current_graph()
    nodes = [node for region in regions for node in region.graph.waits_for]
    return Graph.control_dependencies(graph, nodes)


def spec_of(x: rg.Tensor) -> Spec:
    """The static shape and dtype of a symbolic Tensor."""
    return spec_of_record(x._data.shape, x._data.dtype)


def _is_float(x: rg.Tensor) -> bool:
    return is_inexact(x._data.dtype)


def _of_floats(xs: Sequence[rg.Tensor], dxs: Sequence[rg.Tensor | None]) -> list[Any]:
    """The gradients by the floats among what goes into a region or comes out of it.

    Those by integers cannot pass, and are refused if an override returned a gradient for them.
    """
    for x, dx in zip(xs, dxs, strict=True):
        if x._data.carries and not (_is_float(x) or dx is None) and is_inexact(dx.dtype):
            raise GradientError(
                f"a gradient would go by {x._data.name!r}, of {x._data.dtype}, into or out of a "
                "branch or loop: a rule is in force for an op that leads there. Only gradients by "
                "floats go in and out; make the op and the cast to floats on one side, and pass "
                "the floats, or use tf.stop_gradient."
            )
    return [dx for x, dx in zip(xs, dxs, strict=True) if _is_float(x)]


def gradient_region(region: GraphRegion) -> GraphRegion:
    """The gradients by the float inputs, given the arguments and the gradients that arrive.

    Only float outputs have one arriving.
    """
    wrt = [x for x in region.inputs if x._data.carries]
    with inside(region.graph) as graph:
        ys = [y for y in region.outputs if _is_float(y)]
        arriving = [graph.placeholder(spec_of(y), "grad_ys") for y in ys]
        found = _of_floats(wrt, pull_in_graph(ys, [x._data for x in wrt], arriving, graph.scope))
        dxs = [or_zeros(dx, x) for dx, x in zip(found, filter(_is_float, wrt), strict=True)]
    made = GraphRegion(graph, [*region.arguments, *arriving], dxs)
    _refuse_writers(made)
    return made


def _refuse_writers(region: GraphRegion) -> None:
    """The gradient computes again what it needs; it must not write again."""
    known = {x._data.id for x in region.arguments}
    for node in needed([y._data.node for y in region.outputs], known):
        if node.op.type.startswith(("Assign", "Apply")):
            raise GradientError(
                f"the gradient of a branch or loop would run {node.name!r} (type "
                f"{node.op.type}) again, which writes to a variable. Assign after the branch or "
                "loop, to what it returns, or use tf.stop_gradient inside."
            )


def _placed(xs: Sequence[rg.Tensor], dxs: Iterable[rg.Tensor | None]) -> list[Any]:
    """Gradients of the float inputs in their places, None elsewhere."""
    found = iter(dxs)
    return [next(found) if _is_float(x) else None for x in xs]


# An op that runs regions. Its rules conjugate where needed, so the walk must not.
_op = partial(graph_op, several=True, stateful=True, holomorphic=False)


# -- cond ----------------------------------------------------------------------------------------


def _if(run: Run, pred: np.ndarray, xs: Values, branches: Sequence[GraphRegion]) -> Any:
    return tuple(run.through(branches[0 if bool(pred) else 1], xs))


def cond_node(
    pred: rg.Tensor, branches: tuple[GraphRegion, GraphRegion], given: Sequence[rg.Tensor]
) -> tuple[rg.Tensor, ...]:
    """A node that runs one of two regions on the arguments given and on what both capture."""
    captured = share_captures(*branches)
    specs = [_merged(a, b) for a, b in zip(*[b.outputs for b in branches], strict=True)]
    with waiting_for(*branches):
        return add_op(IF, "cond", [pred, *given, *captured], {"branches": branches}, specs, IF.rule)


def _merged(a: rg.Tensor, b: rg.Tensor) -> Spec:
    """Return the known shape and dtype of a result that comes from one of two branches."""
    m, n = spec_of(a), spec_of(b)
    if m.shape is None or n.shape is None or len(m.shape) != len(n.shape):
        return Spec(None, m.dtype)
    pairs = zip(m.shape, n.shape, strict=True)
    return Spec(tuple([p if dims.same((p,), (q,)) is True and type(p) is int else None
                       for p, q in pairs]), m.dtype)  # fmt: skip


class WholeRule(Rule):
    """A rule that needs all that its op read and made."""

    def keeps(self, wanted: frozenset[int]) -> tuple[frozenset[int], bool]:
        return wanted | {0}, True

    def linear_in(self, wanted: frozenset[int]) -> bool:
        return False  # nobody can know before the run


class CondRule(WholeRule):
    """The gradient is a choice between the gradients of the branches."""

    name = "cond"

    def carries(self, node: NodeLike, index: int) -> bool:
        branches = node.attrs["branches"]
        for branch in branches:
            branch.spread()
        return any(branch.outputs[index]._data.carries for branch in branches)

    def pull(self, record: Any, dy: Any, wanted: Sequence[int]) -> Iterable[tuple[int, Any]]:
        xs = list(record.xs[1:])
        arriving = _of_floats(record.y, dy)
        made = []
        for branch in record.attrs["branches"]:
            branch.spread()
            made.append(gradient_region(branch))
        first = len(record.attrs["branches"][0].arguments)
        found = cond_node(record.xs[0], (made[0], made[1]), [*xs[:first], *arriving])
        return [(0, None), (1, _placed(xs, found))]


IF = _op("If", _if, "pred xs*", "branches", name="cond", rule=CondRule())


# -- while_loop ----------------------------------------------------------------------------------

Call = Callable[[GraphRegion, Values, int], Sequence[Any]]  # with the number of the iteration


class Loop:
    """A loop: regions for the condition and the body, and for the body's gradient."""

    def __init__(self, cond: GraphRegion, body: GraphRegion, limit: int | None) -> None:
        self.cond = cond
        self.body = body
        self.limit = limit
        self.count: int = len(body.arguments)
        self.wrt: list[bool] = [_is_float(x) for x in body.captured]  # which have a gradient
        self.gradient: GraphRegion | None = None

    def steps(self, call: Call, values: Values, captured: Values) -> Iterator[Values]:
        """The loop variables at the beginning of each iteration, and at the end."""
        number = 0
        while True:
            yield values
            inputs = [*values, *captured]
            over = self.limit is not None and number >= self.limit
            if over or not bool(call(self.cond, inputs, number)[0]):
                return
            values, number = call(self.body, inputs, number), number + 1

    def spread(self, xs: Sequence[rg.Tensor]) -> None:
        """Note which integers of the body carry a gradient, from one iteration to the next too."""
        arguments = self.body.arguments
        pairs = [*zip(xs, arguments, strict=False), *zip(self.body.outputs, arguments, strict=True)]
        for _ in range(1 + sum(not _is_float(x) for x in arguments)):
            self.body.spread(pairs)

    def opened(self, xs: Values, floats: int) -> tuple[Values, Values, Values]:
        """The variables, the gradients that arrive at their final values, and the captures."""
        n = self.count + floats
        return xs[: self.count], xs[self.count : n], xs[n:]

    def pull(self, call: Call, xs: Values, floats: int) -> list[Any]:
        """The gradients by the float variables at the start, and by the float captures."""
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
        """Go back over the iterations: entries are their numbers, with the variables at first."""

        def pull(dvars: Values, entry: tuple[Any, Values]) -> Values:
            number, values = entry
            assert self.gradient is not None
            return call(self.gradient, [*values, *dvars, *captured], number)

        return pull_loop(pull, dys, sum(self.wrt), entries, run, *sums)[:2]

    def zeros(self, captured: Values) -> list[Any]:
        """The gradients by the float captures before any iteration."""
        return [_blank(x) for x, is_float in zip(captured, self.wrt, strict=False) if is_float]


def _blank(x: Any) -> Any:
    """Zeros for a value (of a variable itself, which stands as None, there is none)."""
    if isinstance(x, rg.Tensor):
        return rg.zeros_like(x)
    return None if x is None else backend_of(x).xp.zeros_like(x)


def _while(run: Run, xs: Values, loop: Loop) -> Any:
    *_, values = loop.steps(_calls(run), xs[: loop.count], xs[loop.count :])
    return tuple(values)


def _calls(run: Run) -> Call:
    """Calls of regions in the iterations of one loop."""
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
    """A node that repeats the body, on its own results, as long as the condition holds."""
    xs = [*start, *share_captures(cond, body)]
    with waiting_for(cond, body):
        return add_op(WHILE, "while", xs, {"loop": Loop(cond, body, limit)}, specs, WHILE.rule)


class WhileRule(WholeRule):
    """The gradient runs the loop again, and then back over its iterations."""

    name = "while_loop"

    def carries(self, node: NodeLike, index: int) -> bool:
        loop: Loop = node.attrs["loop"]
        loop.spread(node.xs)
        return loop.body.arguments[index]._data.carries

    def pull(self, record: Any, dy: Any, wanted: Sequence[int]) -> Iterable[tuple[int, Any]]:
        old: Loop = record.attrs["loop"]
        start, xs = list(record.xs[: old.count]), list(record.xs)
        loop = Loop(old.cond.copy(), old.body.copy(), old.limit)
        loop.wrt = old.wrt
        arriving = _of_floats(record.y, dy)
        old.spread(start)
        loop.gradient = gradient_region(old.body)
        captured = share_captures(loop.cond, loop.body, loop.gradient)
        given = [*start, *arriving, *captured]
        attrs = {"loop": loop, "floats": len(arriving)}
        specs = [spec_of(x) for x in xs if _is_float(x)]
        found = add_op(WHILE_GRAD, "while_grad", given, attrs, specs, WHILE_GRAD.rule)
        return [(0, _placed(xs, found))]


WHILE = _op("While", _while, "xs*", "loop", name="while", rule=WhileRule())


def _while_grad(run: Run, xs: Values, loop: Loop, floats: int) -> Any:
    return tuple(loop.pull(_calls(run), xs, floats))


class WhileGradRule(WholeRule):
    """Higher orders: the run differentiates the passes over the loop, op by op."""

    name = "while_loop"

    def pull(self, record: Any, dy: Any, wanted: Sequence[int]) -> Iterable[tuple[int, Any]]:
        loop, floats = record.attrs["loop"], record.attrs["floats"]

        def call(tensors: Sequence[rg.Tensor], sizes: Any) -> Sequence[rg.Tensor]:
            return loop.pull(_calls(EagerRun()), tensors, floats)

        floats_in = [i for i, x in enumerate(record.xs) if _is_float(x)]
        return pull_call(call, record, dy, floats_in)


WHILE_GRAD = _op(
    "WhileGrad", _while_grad, "xs*", "loop floats", name="while_grad", rule=WhileGradRule()
)
