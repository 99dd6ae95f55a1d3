"""Branches and loops: graphs inside an op, which the run chooses or repeats.

A region is built once, in a graph of its own, under the overrides in force around it. Tensors of
the outer graph that it uses become its inputs. Its gradient is built in the same inner graph, so
what that needs of the forward pass is computed again, where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import regrad as rg
from regrad import dims
from regrad.blocks import block
from regrad.deferral import later, spec_of_record
from regrad.dispatch import alias_of, computed
from regrad.errors import GradientError, GraphError
from regrad.executor import Plan, needed
from regrad.graph import CONST, INNERMOST, Graph, Node, put_down
from regrad.inference import Spec
from regrad.namespaces import backend_of, is_inexact
from regrad.pullback import StepBack, step_back
from regrad.registry import OPS, Input, Op
from regrad.ruleforms import Rule
from regrad.state import current, in_state
from regrad.tape import put
from regrad.v1.gradients import pull_within
from regrad.v1.graphs import current_graph

Values = Sequence[Any]


class Region:
    """A part of a graph that runs as a whole: `outputs`, given values for the `inputs`.

    The inputs are its own arguments (placeholders) and, after them, what stands inside for
    tensors of the outer graph (see `share_captures`).
    """

    def __init__(
        self, graph: Graph, arguments: Sequence[rg.Tensor], outputs: Sequence[rg.Tensor],
        targets: Sequence[Node] = (),
    ) -> None:  # fmt: skip
        self.graph = graph
        self.arguments = list(arguments)
        self.captured: list[rg.Tensor] = []
        self.outputs = list(outputs)
        self.targets = list(targets)

    @property
    def inputs(self) -> list[rg.Tensor]:
        """The arguments, and then what is captured."""
        return self.arguments + self.captured

    def spread(self, given: Iterable[tuple[rg.Tensor, rg.Tensor]] = ()) -> None:
        """Note which integers inside carry a gradient: those that come in as they do outside.

        `given` are pairs: what is given for an argument, and the argument.
        """
        for outer, inner in (*self.graph.captures.values(), *given):
            inner._data.carries |= outer._data.carries
        for node in self.graph.nodes:
            node.carry()

    def again(self) -> Region:
        """The same part of the graph, for an op that gives it more captured inputs."""
        return Region(self.graph, self.arguments, self.outputs, self.targets)

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

    def at_once(self, values: Sequence[rg.Tensor]) -> list[rg.Tensor]:
        """The outputs op by op in eager mode; open tapes record under the rules of the graph."""
        known = {x._data.id: v for x, v in zip(self.inputs, values, strict=True)}
        for node in needed([y._data.node for y in self.outputs], set(known)):
            if not all(s.id in known for s in node.symbols):
                ys = _at_once(node, known)
                known.update(zip((s.id for s in node.symbols), ys, strict=True))
        return [known[y._data.id] for y in self.outputs]


def _at_once(node: Node, known: dict[int, rg.Tensor]) -> Sequence[rg.Tensor]:
    if node.op is CONST:
        return [rg.asarray(node.attrs["value"])]
    if node.op.type in AT_ONCE:
        return AT_ONCE[node.op.type](node, [known[s.id] for s in node.sources()])
    if node.op.stateful:
        raise GraphError(
            f"a second derivative of tf.while_loop cannot pass {node.name!r}: an op of type "
            f"{node.op.type}, which has state. Read variables and draw random numbers before "
            "the loop."
        )
    xs = tuple([known[s.id] for s in node.sources()])
    attrs = {k: dims.resolved(v, lambda s: known[s.id]._data) for k, v in node.attrs.items()}
    with in_state(None):
        y = computed(node.op, xs, attrs, node.layout)
    y = tuple(map(alias_of, y)) if isinstance(y, tuple) else alias_of(y)
    state = current()
    if state is not None and state.tapes:
        put(state, node.op, node.rule, xs, attrs, y, node.layout)
    return y if isinstance(y, tuple) else [y]


# How branches and loops inside a loop run in eager mode: by op type, from the node and its inputs.
AT_ONCE: dict[str, Callable[[Node, list[rg.Tensor]], Sequence[rg.Tensor]]] = {}


@block
def inside(graph: Graph) -> Generator[Graph]:
    """Ops made in the block go into the inner graph."""
    before = INNERMOST.get()
    try:
        INNERMOST.set(graph)
        yield graph
    finally:
        INNERMOST.set(before)


def new_graph(name: str) -> Graph:
    """A graph for a region of the current one."""
    outer = current_graph()
    made = Graph(outer)
    made.scope = f"{outer.scope}{name}/"
    return made


def share_captures(*regions: Region) -> list[rg.Tensor]:
    """Give the regions the same captured inputs; the outer tensors for them."""
    outer = {
        key: tensor for region in regions for key, (tensor, _) in region.graph.captures.items()
    }
    for region in regions:
        region.captured = [region.graph.entering(x) for x in outer.values()]
    return list(outer.values())


def spec_of(x: rg.Tensor) -> Spec:
    """The static shape and dtype of a symbolic Tensor."""
    return spec_of_record(x._data.shape, x._data.dtype)


def _is_float(x: rg.Tensor) -> bool:
    return is_inexact(x._data.dtype)


def _zeros_for_none(wrt: Sequence[rg.Tensor], found: Sequence[Any]) -> list[rg.Tensor]:
    zeros = OPS["ZerosLike"].function
    return [zeros(x) if dx is None else dx for x, dx in zip(wrt, found, strict=True)]


def _of_floats(xs: Sequence[rg.Tensor], dxs: Sequence[Any]) -> list[Any]:
    """The gradients by the floats among what goes into a region or comes out of it.

    Those by integers cannot pass, and are refused if an override gave them a gradient.
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


def gradient_region(region: Region) -> Region:
    """The gradients by the float inputs, given the arguments and the gradients that arrive.

    Only float outputs have one arriving.
    """
    wrt = [x for x in region.inputs if x._data.carries]
    with inside(region.graph) as graph:
        ys = [y for y in region.outputs if _is_float(y)]
        arriving = [graph.placeholder(spec_of(y), "grad_ys") for y in ys]
        found = _of_floats(wrt, pull_within(ys, wrt, arriving))
        dxs = _zeros_for_none(list(filter(_is_float, wrt)), found)
    made = Region(graph, [*region.arguments, *arriving], dxs)
    _refuse_writers(made)
    return made


def _refuse_writers(region: Region) -> None:
    """The gradient computes again what it needs; it must not write again."""
    known = {x._data.id for x in region.arguments}
    for node in needed([y._data.node for y in region.outputs], known):
        if node.op.type.startswith(("Assign", "Apply")):
            raise GradientError(
                f"the gradient of a branch or loop would run {node.name!r} (type "
                f"{node.op.type}) again, which writes to a variable. Assign after the branch or "
                "loop, to what it returns, or use tf.stop_gradient inside."
            )


def _placed(xs: Sequence[rg.Tensor], dxs: Iterable[Any]) -> list[Any]:
    """Gradients of the float inputs in their places, None elsewhere."""
    found = iter(dxs)
    return [next(found) if _is_float(x) else None for x in xs]


def _op(type: str, name: str, kernel: Callable[..., Any], attrs: str, *first: Input) -> Op:
    """An op that runs regions. Their own rules conjugate where that is due, so it must not."""
    return Op(
        type, name, kernel, [*first, Input("xs", "many")], attrs.split(),
        several=True, stateful=True, holomorphic=False,
    )  # fmt: skip


# -- cond ----------------------------------------------------------------------------------------


def _if(run: Any, pred: Any, xs: Values, branches: Sequence[Region]) -> Any:
    return tuple(run.through(branches[0 if bool(pred) else 1], xs))


IF = _op("If", "cond", _if, "branches", Input("pred", "one"))


def cond_node(
    pred: rg.Tensor, branches: tuple[Region, Region], given: Sequence[rg.Tensor]
) -> tuple[rg.Tensor, ...]:
    """A node that runs one of two regions on the arguments given and on what both capture."""
    captured = share_captures(*branches)
    graph = current_graph()
    xs = [graph.entering(x) for x in (pred, *given, *captured)]
    specs = [_merged(a, b) for a, b in zip(*[b.outputs for b in branches], strict=True)]
    layout = 0, tuple(range(1, len(xs)))
    waits = [n for b in branches for n in b.graph.waits_for]
    with Graph.control_dependencies(graph, waits), graph.naming("If", "cond"):
        return put_down(graph, IF, IF.rule, tuple(xs), {"branches": branches}, layout, specs)


def _merged(a: rg.Tensor, b: rg.Tensor) -> Spec:
    """What is known of a result that comes from one of two branches."""
    m, n = spec_of(a), spec_of(b)
    if m.shape is None or n.shape is None or len(m.shape) != len(n.shape):
        return Spec(None, m.dtype)
    pairs = zip(m.shape, n.shape, strict=True)
    return Spec(tuple([p if dims.same((p,), (q,)) is True and type(p) is int else None
                       for p, q in pairs]), m.dtype)  # fmt: skip


AT_ONCE["If"] = lambda node, xs: node.attrs["branches"][0 if bool(xs[0]) else 1].at_once(xs[1:])


class RegionRule(Rule):
    """A rule that needs all that its op read and made."""

    def keeps(self, wanted: frozenset[int]) -> tuple[frozenset[int], bool]:
        return wanted | {0}, True

    def linear_in(self, wanted: frozenset[int]) -> bool:
        return False  # nobody can know before the run


class CondRule(RegionRule):
    """The gradient is a choice between the gradients of the branches."""

    name = "cond"

    def carries(self, node: Any, index: int) -> bool:
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


IF.rule = CondRule()
OPS[IF.type] = IF


# -- while_loop ----------------------------------------------------------------------------------

Call = Callable[[Region, Values, int], Sequence[Any]]  # with the number of the iteration


class Loop:
    """A loop: regions for the condition and the body, and for the body's gradient."""

    def __init__(self, cond: Region, body: Region, limit: int | None) -> None:
        self.cond = cond
        self.body = body
        self.limit = limit
        self.count = len(body.arguments)
        self.wrt = [_is_float(x) for x in body.captured]  # whether a capture has a gradient
        self.gradient: Region | None = None

    def steps(self, call: Call, values: Values, captured: Values) -> Iterator[Values]:
        """The loop variables at the beginning of each iteration, and at the end."""
        number = 0
        while True:
            yield values
            inputs = [*values, *captured]
            if (self.limit is not None and number >= self.limit) or not bool(
                call(self.cond, inputs, number)[0]
            ):
                return
            values, number = call(self.body, inputs, number), number + 1

    def spread(self, xs: Sequence[rg.Tensor]) -> None:
        """Note which integers of the body carry a gradient, from one iteration to the next too."""
        arguments = self.body.arguments
        pairs = [*zip(xs, arguments, strict=False), *zip(self.body.outputs, arguments, strict=True)]
        for _ in range(1 + sum(not _is_float(x) for x in arguments)):
            self.body.spread(pairs)

    def pull(self, call: Call, xs: Values, floats: int) -> list[Any]:
        """The gradients by the float variables at the start, and by the float captures.

        `xs` are the variables, the gradients that arrive at their final values, the captures.
        """
        values, dys, captured = (
            xs[: self.count], xs[self.count : self.count + floats], xs[self.count + floats :]
        )  # fmt: skip
        *steps, _ = self.steps(call, values, captured)
        back = self.step_back(call, captured)
        dvars, dcaptured = list(dys), None
        for number in reversed(range(len(steps))):
            (dvars, dcaptured), _ = back((dvars, dcaptured), (steps[number], number))
        return [*dvars, *(self.zeros(captured) if dcaptured is None else dcaptured)]

    def step_back(self, call: Call, captured: Values) -> StepBack:
        """Return one step of the backward pass; its entry: the variables, and the iteration."""
        assert self.gradient is not None
        gradient = self.gradient

        def pull(dvars: Values, entry: tuple[Values, Any]) -> Values:
            values, number = entry
            return call(gradient, [*values, *dvars, *captured], number)

        return step_back(pull, sum(self.wrt))

    def zeros(self, captured: Values) -> list[Any]:
        """The gradients by the float captures before any iteration."""
        return [_blank(x) for x, is_float in zip(captured, self.wrt, strict=False) if is_float]


def _blank(x: Any) -> Any:
    """Zeros for a value (of a variable itself, which stands as None, there is none)."""
    if isinstance(x, rg.Tensor):
        return rg.zeros_like(x)
    return None if x is None else backend_of(x).xp.zeros_like(x)


def _while(run: Any, xs: Values, loop: Loop) -> Any:
    *_, values = loop.steps(_calls(run), xs[: loop.count], xs[loop.count :])
    return tuple(values)


def _calls(run: Any) -> Call:
    """Calls of regions in the iterations of one loop."""
    outside = run.path

    def call(region: Region, values: Values, number: int) -> Sequence[Any]:
        run.path = (*outside, number)
        try:
            return run.through(region, values)
        finally:
            run.path = outside

    return call


WHILE = _op("While", "while", _while, "loop")


def while_node(
    cond: Region, body: Region, start: Sequence[rg.Tensor], specs: Sequence[Spec], limit: int | None
) -> tuple[rg.Tensor, ...]:
    """A node that repeats the body, on its own results, as long as the condition holds."""
    captured = share_captures(cond, body)
    graph = current_graph()
    xs = [graph.entering(x) for x in (*start, *captured)]
    attrs = {"loop": Loop(cond, body, limit)}
    waits = [*cond.graph.waits_for, *body.graph.waits_for]
    with Graph.control_dependencies(graph, waits), graph.naming("While", "while"):
        places = (tuple(range(len(xs))),)
        return put_down(graph, WHILE, WHILE.rule, tuple(xs), attrs, places, specs)


def _while_at_once(node: Node, xs: list[rg.Tensor]) -> Sequence[rg.Tensor]:
    loop = node.attrs["loop"]
    *_, last = loop.steps(
        lambda region, v, number: region.at_once(v), xs[: loop.count], xs[loop.count :]
    )
    return last


AT_ONCE["While"] = _while_at_once
AT_ONCE["WhileGrad"] = lambda node, xs: node.attrs["loop"].pull(
    lambda region, v, number: region.at_once(v), xs, node.attrs["floats"]
)


class WhileRule(RegionRule):
    """The gradient runs the loop again, and then back over its iterations."""

    name = "while_loop"

    def carries(self, node: Any, index: int) -> bool:
        loop: Loop = node.attrs["loop"]
        loop.spread(node.xs)
        return loop.body.arguments[index]._data.carries

    def pull(self, record: Any, dy: Any, wanted: Sequence[int]) -> Iterable[tuple[int, Any]]:
        old: Loop = record.attrs["loop"]
        start, xs = list(record.xs[: old.count]), list(record.xs)
        loop = Loop(old.cond.again(), old.body.again(), old.limit)
        loop.wrt = old.wrt
        arriving = _of_floats(record.y, dy)
        old.spread(start)
        loop.gradient = gradient_region(old.body)
        captured = share_captures(loop.cond, loop.body, loop.gradient)
        graph = current_graph()
        given = tuple([graph.entering(x) for x in (*start, *arriving, *captured)])
        with graph.naming("WhileGrad", "while_grad"):
            found = put_down(
                graph,
                WHILE_GRAD, WHILE_GRAD.rule, given, {"loop": loop, "floats": len(arriving)},
                (tuple(range(len(given))),), [spec_of(x) for x in xs if _is_float(x)],
            )  # fmt: skip
        return [(0, _placed(xs, found))]


WHILE.rule = WhileRule()
OPS[WHILE.type] = WHILE


def _while_grad(run: Any, xs: Values, loop: Loop, floats: int) -> Any:
    return tuple(loop.pull(_calls(run), xs, floats))


WHILE_GRAD = _op("WhileGrad", "while_grad", _while_grad, "loop floats")


class WhileGradRule(RegionRule):
    """Higher orders: the run differentiates the passes over the loop, op by op."""

    name = "while_loop"

    def pull(self, record: Any, dy: Any, wanted: Sequence[int]) -> Iterable[tuple[int, Any]]:
        loop, floats = record.attrs["loop"], record.attrs["floats"]

        def call(tensors: Sequence[rg.Tensor], sizes: Any) -> Sequence[rg.Tensor]:
            return loop.pull(lambda region, v, number: region.at_once(v), tensors, floats)

        return later_gradients(call, record, dy)


WHILE_GRAD.rule = WhileGradRule()
OPS[WHILE_GRAD.type] = WHILE_GRAD


def later_gradients(call: Any, record: Any, dy: Any) -> list[tuple[int, Any]]:
    """The gradients of a call, which the run makes in eager mode."""
    from regrad.deferral import differentiated

    xs = list(record.xs)
    places = [i for i, x in enumerate(xs) if _is_float(x)]
    specs = [spec_of(xs[i]) for i in places]
    found = later(differentiated(call, len(xs), places), [*xs, *dy], None, None, specs)
    return [(0, _placed(xs, found))]
