"""Branches and loops: one kind of node, with an inner graph that a run chooses from or repeats.

A node of control flow (`If`, `While`) has one inner graph, which is built once, under the overrides
that are active around it. Each input of the node has a placeholder in the inner graph. Tensors of
the outer graph that the inner graph uses become inputs of the node. A `Step` is a list of outputs
that a run computes together. The node has a list of steps (see `Control`):

* `If` has one step for each branch, and runs one of them.
* `While` has one step for each sweep over the iterations, and runs them one after another. A sweep
  repeats its step. The sweep of `tf.while_loop` runs while a condition holds. Each further sweep
  visits the same iterations, forward or backward. It reads the loop variables of earlier sweeps as
  they were at the start of the same iteration.

The gradient of a node is another node of the same kind, with the same inner graph. So it has
gradients of any order:

* The gradient of `If` chooses among the gradients of the branches.
* The gradient of `While` repeats the sweeps, and then runs one more sweep for each of them, from
  the last to the first, in the opposite direction. The loop variables of these sweeps are the
  gradients of the loop variables. Let y be the value at the end of an iteration of a loop variable
  x, and dy its gradient. All new sweeps use the gradients of the sum of y * dy over all loop
  variables.

A gradient recomputes the values of the forward pass that it needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Generator, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

import regrad as rg
from regrad.autodiff.custom_nodes import PathRule, reaching
from regrad.core.backends import is_inexact
from regrad.core.blocks import block, stay
from regrad.core.registry import OPS
from regrad.errors import GradientError, ShapeError
from regrad.graph.deferred import spec_of_record
from regrad.graph.graph import INNERMOST, PLACEHOLDER, Node, OpGraph, Symbol, graph_op
from regrad.graph.plan import GraphPlan, PlanRun, needed
from regrad.shapes.infer import Spec
from regrad.v1.graph.gradients import path, pull_in_graph
from regrad.v1.graph.graphs import add_op, current_graph

Tensors = Sequence[rg.Tensor]
# The outer tensors of the inputs of a node, each with its placeholder in the inner graph.
Inputs = list[tuple[rg.Tensor, rg.Tensor]]


@dataclass(eq=False)
class Step:
    """Outputs of the inner graph that a run computes together.

    In a loop the first outputs are the next values of the loop variables, `carries`. `targets` are
    ops that run too. `backward` is whether the sweep visits the last iteration first.
    """

    outputs: Tensors
    carries: Tensors = ()
    targets: Sequence[Node] = ()
    backward: bool = False

    @cached_property
    def nodes(self) -> list[Node]:
        """The nodes to run, in order."""
        return needed([*[y._data.node for y in self.outputs], *self.targets], set())

    @cached_property
    def reads(self) -> list[Symbol]:
        """The placeholders whose values the step needs."""
        return [node.symbols[0] for node in self.nodes if node.op is PLACEHOLDER]

    @cached_property
    def plan(self) -> GraphPlan:
        """The plan that NumPy runs."""
        return GraphPlan([y._data for y in self.outputs], self.targets, self.reads)

    @property
    def turns(self) -> list[tuple[rg.Tensor, rg.Tensor]]:
        """The loop variables, each with its value at the end of an iteration."""
        return list(zip(self.carries, self.outputs, strict=False))

    @property
    def stacked(self) -> Tensors:
        """The outputs after the loop variables, which a loop stacks."""
        return self.outputs[len(self.carries) :]

    def only(self, read: Iterable[Symbol]) -> Step:
        """Return the step with only the loop variables that determine the values of `read`."""
        ids, size, step = {s.id for s in read}, -1, self
        while size < len(ids):
            size = len(ids)
            kept = [(x, y) for x, y in self.turns if x._id in ids]
            step = Step([y for _, y in kept], [x for x, _ in kept], (), self.backward)
            ids.update(s.id for s in step.reads)
        return self if len(step.outputs) == len(self.outputs) else step  # its plan may exist


@dataclass(eq=False)
class Control:
    """The inner graph and the steps of a node.

    Args:
        loops: Whether it is a loop.
        test: The condition of a loop.
        limit: The maximum number of iterations.
        entries: The ids of the placeholders that have one entry of an input in each iteration. The
            outputs of the last step after its loop variables are stacked in the same way.
        inputs: The placeholders, one for each input of the node. The first input of an `If` is its
            predicate.
    """

    graph: OpGraph
    steps: list[Step]
    loops: bool = False
    test: Step | None = None
    limit: int | None = None
    entries: frozenset[int] = frozenset()
    inputs: Tensors = ()

    @property
    def parts(self) -> list[Step]:
        """The condition and the steps."""
        return [*([] if self.test is None else [self.test]), *self.steps]

    @cached_property
    def results(self) -> list[tuple[rg.Tensor, ...]]:
        """The inner tensors whose value an output of the node may have."""
        return [(x,) for x, _ in self.turns] + self.ends[len(self.turns) :]

    @cached_property
    def ends(self) -> list[tuple[rg.Tensor, ...]]:
        """The inner tensors whose gradient is the gradient of an output of the node."""
        ends = [step.outputs for step in self.steps]
        return list(zip(*([itertools.chain(*ends)] if self.loops else ends), strict=True))

    @cached_property
    def turns(self) -> list[tuple[rg.Tensor, rg.Tensor]]:
        """The loop variables of all sweeps, each with its value at the end of an iteration."""
        return [turn for step in self.steps for turn in step.turns]

    @cached_property
    def kept(self) -> list[list[int]]:
        """For each sweep the ids of the loop variables that later sweeps read."""
        kept = []
        for k, step in enumerate(self.steps, 1):
            read = {s.id for later in self.steps[k:] for s in later.reads}
            kept.append([x._id for x in step.carries if x._id in read])
        return kept

    def known(self, values: Iterable[Any]) -> dict[int, Any]:
        """Return the values of the inputs by the ids of their placeholders."""
        return {x._id: value for x, value in zip(self.inputs, values, strict=True)}

    def most(self, known: dict[int, Any]) -> int | None:
        """Return the maximum number of iterations. With entries it is their number."""
        counts = {len(known[i]) for i in self.entries}
        if len(counts) > 1:
            raise ShapeError(f"expected the same number of entries, got {sorted(counts)}")
        return counts.pop() if counts else self.limit

    # -- dependences of outputs on inputs --------------------------------------------------------

    def spread(self, xs: Tensors) -> Control:
        """Mark the inner integers that carry a gradient because their outer tensor carries one."""
        pairs = [*zip(xs, self.inputs, strict=True), *[(y, x) for x, y in self.turns]]
        while new := [x._data for y, x in pairs if y._data.carries and not x._data.carries]:
            for symbol in new:
                symbol.carries = True
            for node in self.graph.nodes:
                node.carry()
        return self

    def used(self, outputs: Iterable[int]) -> tuple[list[Symbol], dict[int, Symbol]]:
        """Return the symbols where a gradient of these outputs starts, and those it may reach.

        A symbol counts as reached if a gradient may reach it in any iteration.
        """
        ends = {y._id: y._data for i in outputs for y in self.results[i]}
        while True:
            used = reaching(ends.values())[1]
            more = {y._id: y._data for x, y in self.turns if x._id in used and y._id not in ends}
            if not more:
                return list(ends.values()), used
            ends.update(more)

    def watched(self, outputs: Iterable[int], inputs: Iterable[int]) -> set[int]:
        """Return the ids of the symbols on a path from these inputs to these outputs."""
        ends, used = self.used(outputs)
        ids = {x._id for x in (self.inputs[i] for i in inputs) if x._data.carries}
        while True:
            found = path(ends, ids)[1]
            more = {x._id for x, y in self.turns if y._id in found and x._id in used}
            if more <= ids:
                return found & used.keys()
            ids |= more


# -- building ------------------------------------------------------------------------------------


@block
def inside(graph: OpGraph | None) -> Generator[Any]:
    """Put ops made in the block into the inner graph, or into the default graph for None."""
    yield from stay(graph, INNERMOST, graph)


def new_graph(name: str) -> OpGraph:
    """Return a new inner graph for a node of the current graph."""
    outer = current_graph()
    made = OpGraph(outer)
    made.scope = f"{outer.scope}{name}/"
    return made


def control_node(
    name: str, inputs: Inputs, specs: Sequence[Spec], control: Control
) -> tuple[rg.Tensor, ...]:
    """Make a node of control flow. Captured tensors that a step reads become inputs."""
    own, graph = {x._id for _, x in inputs}, control.graph
    read = {s.id for step in control.parts for s in step.reads} | control.entries
    read |= {inputs[0][1]._id, *[x._id for x, _ in control.turns]}
    captured = [pair for pair in graph.captures.values() if pair[1]._id not in own]
    inputs = [pair for pair in (*inputs, *captured) if pair[1]._id in read]
    control.inputs, op = [x for _, x in inputs], WHILE if control.loops else IF
    with OpGraph.control_dependencies(current_graph(), graph.waits_for):
        return add_op(op, name, [x for x, _ in inputs], {"control": control}, specs, op.rule)


def all_nodes(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yield the nodes, and the nodes of the branches and loops in them."""
    for node in nodes:
        yield node
        for step in node.attrs["control"].parts if "control" in node.attrs else ():
            yield from all_nodes(step.nodes)


def writes(node: Node) -> bool:
    """Return whether the op writes to a variable."""
    return node.op.type.startswith(("Assign", "Apply", "ScatterUpdate"))


def spec_of(x: rg.Tensor) -> Spec:
    """Return the static shape and dtype of a symbolic Tensor."""
    return spec_of_record(x._data.shape, x._data.dtype)


# -- the gradient --------------------------------------------------------------------------------


def _is_float(x: rg.Tensor) -> bool:
    return is_inexact(x._data.dtype)


def _floats(xs: Tensors, dxs: Sequence[rg.Tensor | None]) -> list[Any]:
    """Return the gradients of the floats among tensors that pass into or out of the inner graph.

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


def _zeros(x: rg.Tensor) -> rg.Tensor:
    """Return zeros like x, from its shape alone. (A variable has no value.)"""
    zero = current_graph().constant(np.zeros((), x._data.dtype))
    return OPS["BroadcastTo"].function(zero, x._data.shape)


def _refuse_writers(steps: Iterable[Step]) -> None:
    """Raise if a gradient would write to a variable again when it recomputes the forward pass."""
    for node in (node for step in steps for node in step.nodes):
        if writes(node):
            raise GradientError(
                f"the gradient of a branch or loop would run {node.name!r} (type "
                f"{node.op.type}) again, which writes to a variable. Assign after the branch or "
                "loop, to what it returns, or use tf.stop_gradient inside."
            )


class ControlRule(PathRule):
    """The rule of control flow. It needs all inputs and outputs of the node.

    The rule returns gradients for the watched inputs, from the gradients of the used outputs.
    """

    by_leaf = sparse = True

    def __init__(self, name: str) -> None:
        self.name = name

    def keeps(self, wanted: frozenset[int]) -> tuple[frozenset[int], bool]:
        return frozenset({0}), True

    def carries(self, node: Any, index: int) -> bool:
        control: Control = node.attrs["control"].spread(node.xs)
        return any(y._data.carries for y in control.results[index])

    def sources(self, node: Node, used: Container[int]) -> Iterable[Symbol]:
        control: Control = node.attrs["control"].spread(node.xs)
        found = control.used([s.index for s in node.symbols if s.id in used])[1]
        return [x._data for key, x in control.known(node.xs).items() if key in found]

    def reached(self, node: Node, used: Container[int], watched: set[int]) -> list[int]:
        control: Control = node.attrs["control"].spread(node.xs)
        outputs = [s.index for s in node.symbols if s.id in used]
        inputs = [i for i, key in enumerate(node.inputs) if key in watched]
        found = control.watched(outputs, inputs)
        return [node.symbols[i].id for i in outputs for y in control.results[i] if y._id in found]

    def pull(self, record: Any, dy: Any, wanted: Sequence[int]) -> Iterable[tuple[int, Any]]:
        control: Control = record.attrs["control"]
        turns, reached = control.turns, [i for i, d in enumerate(dy) if d is not None]
        watched = control.watched(reached, wanted)
        moved = [i for i, (x, _) in enumerate(turns) if x._id in watched]
        inner = [x for x, _ in turns] + [control.inputs[i] for i in wanted]
        wrt = list({x._id: x for x in inner if x._id in watched}.values())
        ends = [*moved, *[i for i in reached if i >= len(turns)]]
        ys = [record.y[i] for i in ends]
        dys = [_zeros(y) if dy[i] is None and _is_float(y) else dy[i]
               for i, y in zip(ends, ys, strict=True)]  # fmt: skip
        dys = _floats(ys, dys)
        inner = [control.ends[i] for i in ends]
        with inside(control.graph) as graph:
            alike = filter(_is_float, [y for y, *_ in inner]) if control.loops else dys
            arriving = [graph.placeholder(spec_of(y), "grad_ys") for y in alike]
            dxs = [_pulled(ys, wrt, arriving, graph) for ys in zip(*inner, strict=True)]
        inputs = [*zip(record.xs, control.inputs, strict=True), *zip(dys, arriving, strict=True)]
        found = _gradient(record, inputs, arriving, dxs)
        return [(0, [found.get(x._id) for x in control.inputs])]


def _pulled(ys: Tensors, wrt: Tensors, dys: Tensors, graph: OpGraph) -> dict[int, rg.Tensor]:
    """Return the gradients of the floats among the inner tensors `wrt`, by id."""
    ys, sources = list(filter(_is_float, ys)), [x._data for x in wrt]
    found = _floats(wrt, pull_in_graph(ys, sources, dys, graph.scope))
    pairs = zip(filter(_is_float, wrt), found, strict=True)
    return {x._id: _zeros(x) if dx is None else dx for x, dx in pairs}


def _gradient(
    record: Any, inputs: Inputs, arriving: Tensors, dxs: list[dict[int, rg.Tensor]]
) -> dict[int, rg.Tensor]:
    """Return the gradients of the inputs of a node, by the ids of their placeholders.

    `dxs` are the inner gradients, by id, of each branch of an `If` or of all sweeps of a `While`.
    """
    control: Control = record.attrs["control"]
    found, outer, loops = dxs[0], control.known(record.xs), control.loops
    carries = {x._id: spec_of(y) for (x, _), y in zip(control.turns, record.y, strict=False)}
    back = dict(zip([key for key in found if key in carries], arriving, strict=False))
    along = [key for key in found if key in control.entries or not loops]
    with inside(control.graph) as graph:
        sums = {key: graph.placeholder(spec_of(dx), "sum")
                for key, dx in found.items() if key not in back and key not in along}  # fmt: skip
        totals = [total + found[key] for key, total in sums.items()]
    steps = [Step(list(found.values())) for found in dxs]
    if loops:
        *after, last = [_reversed(step, back, found) for step in reversed(control.steps)]
        ys = [*last.outputs, *totals, *[found[key] for key in along]]
        last = Step(ys, [*last.carries, *sums.values()], (), last.backward)
        steps = _recomputed(control, [*[step for step in after if step.carries], last])
    _refuse_writers(steps)
    specs = carries | {x._id: spec_of(outer[key]) for key, x in (back | sums).items()}
    ids = [x._id for step in steps for x in step.carries]
    entries = control.entries.union(x._id for x in arriving[len(back) :] if loops)
    made = control_node(
        record.op.name, [*inputs, *[(_zeros(outer[key]), x) for key, x in sums.items()]],
        [*[specs[key] for key in ids], *[spec_of(outer[key]) for key in along]],
        replace(control, steps=steps, entries=entries),
    )  # fmt: skip
    ends = dict(zip(ids, made, strict=False))
    answer = {key: ends[x._id] for key, x in (back | sums).items()}
    return answer | dict(zip(along, made[len(ids) :], strict=True))


def _reversed(step: Step, back: dict[int, rg.Tensor], dxs: dict[int, rg.Tensor]) -> Step:
    """Return the step of a sweep that carries the gradients of the step's loop variables."""
    ids = [x._id for x in step.carries if x._id in back]
    return Step([dxs[key] for key in ids], [back[key] for key in ids], (), not step.backward)


def _recomputed(control: Control, after: list[Step]) -> list[Step]:
    """Return the sweeps of a gradient, with the loop variables of the old sweeps that it reads."""
    steps = after
    for step in reversed(control.steps):
        own = [control.test] if control.test is not None and step is control.steps[0] else []
        step = step.only([s for reader in (*steps, *own) for s in reader.reads])
        steps = [step, *steps] if step.carries or own else steps
    return steps


# -- the nodes -----------------------------------------------------------------------------------


def _if(run: PlanRun, xs: Sequence[Any], control: Control) -> Any:
    return tuple(run.through(control.steps[0 if bool(xs[0]) else 1], control.known(xs)))


def _while(run: PlanRun, xs: Sequence[Any], control: Control) -> Any:
    """Run the sweeps in Python."""
    known, outside = control.known(xs), run.path
    most, whole = control.most(known), {key: known[key] for key in control.entries}
    total, stacks, finals = None if control.test else most, [], []
    rows: dict[int, dict[int, Any]] = {}  # values that belong to an iteration
    for step, kept in zip(control.steps, control.kept, strict=True):
        ids = [x._id for x in step.carries]
        numbers: Any = itertools.count() if total is None else range(total)
        for n in reversed(numbers) if step.backward else numbers:
            run.path = (*outside, n)
            if total is None and (n == most or not bool(run.through(control.test, known)[0])):
                total = n
                break
            if n in rows:
                known.update(rows[n])
            if whole:
                known.update((key, x[n]) for key, x in whole.items())
            if kept:
                rows[n] = rows.get(n, {}) | {key: known[key] for key in kept}
            ys = run.through(step, known)
            known.update(zip(ids, ys, strict=False))
            if len(ys) > len(ids):
                stacks.append(ys[len(ids) :])
        finals += [known[key] for key in ids]
    run.path, last = outside, control.steps[-1]
    if total == 0 and last.stacked:  # only for the shapes
        trial = copy(run)
        trial.written = dict(run.written)
        known.update((key, run.xp.zeros(x.shape[1:], x.dtype)) for key, x in whole.items())
        stacks = [trial.through(last, known)[len(last.carries) :]]
    columns = zip(*(reversed(stacks) if last.backward else stacks), strict=True)
    pairs = zip(last.stacked, columns, strict=True)
    return (*finals, *[run.xp.asarray(column, y._data.dtype)[:total] for y, column in pairs])


# Its rules conjugate where needed, so the backward pass must not.
_op = partial(graph_op, inputs="xs*", attrs="control", several=True, stateful=True,
              holomorphic=False)  # fmt: skip
IF = _op("If", _if, name="cond", rule=ControlRule("cond"))
WHILE = _op("While", _while, name="while", rule=ControlRule("while_loop"))
