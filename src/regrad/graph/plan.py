"""Running graphs: a plan is a function of the feeds and the variables.

regrad makes a plan once for each choice of fetches and feeds. A plan has only the ops that are
needed, in order of creation, as the lines of one Python function. Each line calls a kernel. A value
is freed after its last reader. Large results are written over operands that have no further
readers, or into memory that the plan reuses from run to run.

For example, fetching `y = tf.tanh(x * w + b)`, with `x` fed and `w`, `b` variables of 10,000
elements, runs

    def plan(run, arena, v1):
        v2 = k1(run)                                # the variable w
        v3 = k2(run, v2)                            # its value
        v2 = None
        v2 = k3(run)                                # the variable b
        v4 = k4(run, v2)
        v2 = None
        v2 = k5(v1, v3, out=arena(1, v1, k6))       # multiply, into the plan's own memory
        v1 = v3 = None
        v2 = k7(v2, v4, out=v2)                     # add, over the product
        v4 = None
        v4 = k8(v2)                                 # tanh, in a new array: the caller keeps it
        v2 = None
        return [v4]

Invariants:

* Nodes run in the order of their numbers. A node is made after its inputs and after the ops that
  it waits for, so this order respects dependences, and stateful ops run in the script's order.
* An array is overwritten only if a ufunc of this run made it, no other kernel has read it (such a
  kernel may have returned a view), it is not fetched, and this line is its last reader.
* The arena's memory never leaves a run: a fetched value, or a value written to a variable, is a
  separate array. Each run has a separate arena, so threads may run one plan at the same time.
* A line number of the function identifies its node, so an error in a kernel names the op.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from regrad.core import dims
from regrad.core.backends import Array
from regrad.core.generated import define
from regrad.core.kernel_errors import explain
from regrad.core.registry import Attrs
from regrad.core.tensor import wrap
from regrad.graph.graph import CONST, PLACEHOLDER, Node, Symbol

FETCHED = "fetched"  # marks the caller as the last reader of a fetched value
LARGE = 4096  # the number of elements from which overwriting an operand is faster


class PlanRun:
    """The state of one run: the old values of variables, and the values written since.

    Kernels of stateful ops get it as their first argument. `others` holds other state (random
    generators). `path` has the numbers of the open iterations. `drawn` has the states of the
    generators, so that recomputation in a gradient draws the same numbers. `xp` is the namespace of
    the arrays.
    """

    __slots__ = ("drawn", "others", "path", "variables", "written")
    xp: Any = np

    def __init__(self, variables: dict[Any, Any], others: dict[Any, Any]) -> None:
        self.variables: dict[Any, Any] = variables
        self.written: dict[Any, Any] = {}
        self.others: dict[Any, Any] = others
        self.path: tuple[int, ...] = ()
        self.drawn: dict[Any, Any] = {}

    def read(self, key: Any) -> Any:
        """Return the current value of a variable. Raise KeyError if it has no value."""
        return self.written[key] if key in self.written else self.variables[key]

    def write(self, key: Any, value: Any) -> Any:
        """Set the value of a variable, and return the stored array."""
        value = np.asarray(value)
        if not value.flags.writeable:  # a feed, or a view of a feed, which the caller may change
            value = value.copy()
        self.written[key] = value
        return value

    def through(self, step: Any, known: dict[int, Any]) -> list[Any]:
        """Return the outputs of a step of control flow, from values of placeholders by id."""
        return step.plan.nested([known[s.id] for s in step.reads], self)


class Shaped:
    """The shape of an array that has been freed."""

    __slots__ = ("shape",)

    def __init__(self, array: Array) -> None:
        self.shape: Array = array.shape


class Arena(dict[int, Any]):
    """Memory for large results within a plan. Fresh pages cost more than the arithmetic on them."""

    def __call__(self, slot: int, like: Array, dtype: np.dtype) -> Any:
        """Return an array with the shape of another array and arbitrary contents."""
        array = self.get(slot)
        if array is None or array.shape != like.shape:
            array = self[slot] = np.empty(like.shape, dtype)
        return array


def needed(targets: Iterable[Node], fed: set[int], measured: Iterable[Symbol] = ()) -> list[Node]:
    """Return the nodes that must run for the targets, in order. Feeds need no computation.

    The nodes of `measured` need not run for the sizes of these symbols.
    """
    known = fed.union(s.id for s in measured)
    seen: set[int] = set()
    found: list[Node] = []
    stack = list(targets)
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        found.append(node)
        stack += node.control
        # (`sized` are symbols whose shape the attributes need; a feed has a shape, too)
        stack += [s.node for s in node.sources() if s.id not in fed]
        stack += [s.node for s in node.sized if s.id not in known]
    return sorted(found, key=lambda node: node.number)


def _measured(feeds: Sequence[Symbol], fed: set[int]) -> dict[Symbol, list[Any]]:
    """Return the symbols whose sizes the feeds have too, with the axes: (feed, axis), or a size.

    A feed `x / 255` of unknown batch size has the batch size of the placeholder x.
    """
    found: dict[Symbol, list[Any]] = {}
    for n, feed in enumerate(feeds):
        for axis, size in enumerate(feed.shape if isinstance(feed.shape, tuple) else ()):
            source = size.args[0] if isinstance(size, dims.Dim) and size.key[0] == "size" else None
            if (
                isinstance(source, Symbol)
                and source.id not in fed
                and source.dtype.kind not in "iu"
            ):
                found.setdefault(source, list(source.shape))[size.key[2]] = (n, axis)
    return {s: axes for s, axes in found.items() if not any(isinstance(a, dims.Dim) for a in axes)}


def at_node(error: Exception, node: Node, values: Sequence[Any]) -> Exception:
    """Return a kernel's error with the graph's op in which it happened, and the op's inputs."""
    failure = explain(error, node.op, [wrap(value) for value in values])
    failure.add_note(f"in the graph's op {node.name!r}")
    if not hasattr(failure, "node"):
        failure.node, failure.values = node, values  # pyright: ignore
    return failure


class GraphPlan:
    """A compiled choice of fetches and feeds: `plan(feeds, run)` returns the fetched values.

    `stateful` is whether it reads or changes variables. `owned` lists which fetched values are
    arrays without other references.
    """

    def __init__(self, fetches: Sequence[Symbol], targets: Sequence[Node], feeds: Sequence[Symbol]):
        fed = {s.id for s in feeds}
        wanted = [s.node for s in fetches if s.id not in fed]
        measured = _measured(feeds, fed)
        self.nodes: list[Node] = needed([*wanted, *targets], fed, measured)
        sized = {s for node in self.nodes for s in node.sized if s.node not in self.nodes}
        self.shapes: dict[Symbol, list[Any]] = {s: measured[s] for s in measured if s in sized}
        feeds = [*feeds, *self.shapes]
        fed = {s.id for s in feeds}
        unfed = [n for n in self.nodes if n.op is PLACEHOLDER and n.outputs not in fed]
        self.unfed: Node | None = unfed[0] if unfed else None
        self.feeds: list[Symbol] = list(feeds)
        self.donates = False  # whether a run writes over the values of variables
        self.stateful: bool = any(node.op.stateful for node in self.nodes)
        self._prepare(fetches, feeds, fed)

    def _prepare(self, fetches: Sequence[Symbol], feeds: Sequence[Symbol], fed: set[int]) -> None:
        writer = _PlanWriter(self.nodes, fetches, feeds, fed)
        self.owned: list[bool] = writer.owned
        self.lines: list[Node | None] = writer.owners
        self.reads: dict[int, list[str]] = writer.reads
        self._arenas: list[Arena] = []  # free arenas; each run uses one exclusively
        self.function: Callable[..., Any] = writer.function()

    def with_shapes(self, values: Sequence[Any]) -> Sequence[Any]:
        """Return the fed values, and arrays without elements in memory for `_measured` symbols."""
        for symbol, axes in self.shapes.items():
            shape = [values[a[0]].shape[a[1]] if isinstance(a, tuple) else a for a in axes]
            values = [*values, np.broadcast_to(np.zeros((), symbol.dtype), shape)]
        return values

    def __call__(self, values: Sequence[Any], run: PlanRun) -> list[Any]:
        with np.errstate(all="ignore"):  # infinities are ordinary values here
            return self.nested(values, run)

    def nested(self, values: Sequence[Any], run: PlanRun) -> list[Any]:
        """Run the plan within the run of another plan, such as an iteration of a loop."""
        values = self.with_shapes(values)
        try:
            arena = self._arenas.pop()
        except IndexError:  # this is the first run, or other runs use all arenas
            arena = Arena()
        try:
            found = self.function(run, arena, *values)
            self._arenas.append(arena)
            return found
        except Exception as error:
            node, values = self._at_work(error)
            if node is None:
                raise
            raise at_node(error, node, values) from error.__cause__

    def _at_work(self, error: Exception) -> tuple[Node | None, list[Any]]:
        """Return the node whose line raised, and the values that it had read."""
        # The frame that raised still has its variables, so a run without errors stores nothing.
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code is self.function.__code__:
                node = self.lines[trace.tb_lineno]
                values = {**self.function.__globals__, **trace.tb_frame.f_locals}
                read = [values[name] for name in self.reads.get(id(node), ())]
                return node, [v for v in read if v is not None]  # (None represents variables)
            trace = trace.tb_next
        return None, []


class _PlanWriter:
    """Writes the function of a plan.

    The name of a value (`v1`) is reused after the value is freed. Constants and kernels (`k1`) are
    globals of the function. `s7` holds the shape or value with the id 7 that attributes need.
    """

    def __init__(
        self, nodes: list[Node], fetches: Sequence[Symbol], feeds: Sequence[Symbol], fed: set[int]
    ) -> None:
        self.scope: dict[str, Any] = {"Shaped": Shaped}
        self.text: list[str] = []
        self.owners: list[Node | None] = [None]  # by line; lines count from 1
        self.reads: dict[int, list[str]] = {}  # node -> the variables that it reads
        self.names: dict[int, str] = {}  # symbol id -> the variable that holds its value
        self.free: list[str] = []
        self.count = 0
        self.slots: dict[int, tuple[int, Any]] = {}  # symbol id -> its slot of the arena, and kind
        self.free_slots: dict[Any, list[int]] = {}
        self.slot_count = 0
        self.sized = {s.id for node in nodes for s in node.sized}
        self.fed = fed
        self.last = _last_readers(nodes, fetches)
        self.fresh = _fresh(nodes, fetches, fed)
        self.owned = [s.id in self.fresh for s in fetches]
        parameters = ", ".join(["run", "arena", *[self._name(s) for s in feeds]])
        self._line(f"def plan({parameters}):", None)
        for symbol in feeds:
            self._size(symbol)
        for node in nodes:
            self._write(node)
        self._line(f"    return [{', '.join(self.names[s.id] for s in fetches)}]", None)

    def function(self) -> Callable[..., list[Any]]:
        return define("plan", "\n".join(self.text), self.scope)

    def _line(self, text: str, node: Node | None) -> None:
        self.text.append(text)
        self.owners.append(node)

    def _name(self, symbol: Symbol) -> str:
        name = self.free.pop() if self.free else self._new()
        self.names[symbol.id] = name
        return name

    def _new(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def _constant(self, value: Any) -> str:
        name = f"k{len(self.scope)}"
        self.scope[name] = value
        return name

    def _size(self, symbol: Symbol) -> None:
        """Keep what attributes need of a value: its shape, or the value if it holds sizes."""
        if symbol.id in self.sized:
            value = self.names[symbol.id]
            kept = value if symbol.dtype.kind in "iu" else f"Shaped({value})"
            self._line(f"    s{symbol.id} = {kept}", symbol.node)

    def _write(self, node: Node) -> None:
        if node.op is CONST:
            self.names[node.symbols[0].id] = self._constant(node.attrs["value"])
            self._size(node.symbols[0])
            return
        if all(s.id in self.fed for s in node.symbols) and node.symbols:
            return  # it is in the plan only for another output, or for its control inputs
        arguments = self._arguments(node)
        if node.op.stateful:
            arguments.insert(0, "run")
        kernel, options = self._kernel(node)
        over = self._reused(node)
        dying = self._dying(node)
        if over:
            arguments.append(f"out={self.names[over.id]}")
            dying = [s for s in dying if s is not over]
            self.names[node.symbols[0].id] = self.names[over.id]
            if over.id in self.slots:
                self.slots[node.symbols[0].id] = self.slots[over.id]
            target = self.names[over.id]
        else:
            arguments += self._kept(node)
            # of several outputs some may be fed; the computed values of these outputs are dropped
            made = [s for s in node.symbols if s.id not in self.fed]
            skipped = {s.id for s in node.symbols} - {s.id for s in made}
            target = ", ".join("_" if s.id in skipped else self._name(s) for s in node.symbols)
        call = f"{kernel}({', '.join([*arguments, *options])})"
        comma = "," if node.op.several and len(node.symbols) == 1 else ""
        self._line(f"    {target}{comma} = {call}" if target else f"    {call}", node)
        for symbol in node.symbols:
            if symbol.id not in self.fed:
                self._size(symbol)
        self._release([*dying, *[s for s in node.symbols if self._unread(s)]])

    def _arguments(self, node: Node) -> list[str]:
        """Return the operands of a kernel call in the op's layout."""
        leaves = self.reads[id(node)] = [self.names[s.id] for s in node.sources()]
        arguments = []
        for place in node.layout:
            if isinstance(place, tuple):
                arguments.append(f"[{', '.join(leaves[i] for i in place)}]")
            else:
                arguments.append("None" if place is None else leaves[place])
        return arguments

    def _kernel(self, node: Node) -> tuple[str, list[str]]:
        """Return the kernel's name, and the keywords that are unknown before the run."""
        varying = {k: v for k, v in node.attrs.items() if dims.sources([v])}
        fixed = {k: v for k, v in node.attrs.items() if k not in varying}
        kernel: Any = node.op.kernels.kernel if node.op.stateful else node.op.kernels[np.ndarray]
        if fixed:  # bound once and not written as text, because attributes may be any objects
            kernel = partial(kernel, **fixed)  # (a partial of a partial is a single partial)
        options = []
        for name in list(varying):
            text = _written(varying[name])
            if text is not None:  # `shape=(v1.shape[0], 3)` is faster than a call
                options.append(f"{name}={text}")
                del varying[name]
        if varying:
            resolve = self._constant(partial(_resolved, varying, [s.id for s in node.sized]))
            values = ", ".join(f"s{s.id}" for s in node.sized)
            options.append(f"**{resolve}({values})")
        return self._constant(kernel), options

    def _dying(self, node: Node) -> list[Symbol]:
        """Return the values whose last reader is this node."""
        found = {s.id: s for s in node.sources() if self.last.get(s.id) is node}
        return [s for s in found.values() if self.names[s.id].startswith("v")]

    def _unread(self, symbol: Symbol) -> bool:
        is_read = symbol.id in self.last or symbol.id in self.fed
        return not is_read and self.names[symbol.id].startswith("v")

    def _release(self, symbols: Iterable[Symbol]) -> None:
        """Free these values: their names, and their slots in the arena."""
        symbols = list(symbols)
        for symbol in symbols:
            if symbol.id in self.slots:
                slot, kind = self.slots.pop(symbol.id)
                self.free_slots.setdefault(kind, []).append(slot)
        names = list(dict.fromkeys(self.names[s.id] for s in symbols))
        if names:
            self._line(f"    {' = '.join(names)} = None", None)
            self.free += names

    def _reused(self, node: Node) -> Symbol | None:
        """Return an operand made by this plan that is freed here and fits the result."""
        if not _is_ufunc(node) or not node.symbols or _elements(node.symbols[0]) < LARGE:
            return None
        y = node.symbols[0]
        for x in self._dying(node):
            if x.id in self.slots and not self._stays_inside(y):
                continue  # the plan's memory must not leave the plan
            if x.id in self.fresh and x.dtype == y.dtype and dims.same(x.shape, y.shape):
                return x
        return None

    def _stays_inside(self, symbol: Symbol) -> bool:
        """Return whether only ufuncs of this plan read the array."""
        return symbol.id in self.fresh and self.last.get(symbol.id) != FETCHED

    def _kept(self, node: Node) -> list[str]:
        """Return the argument with the memory for a large result that only ufuncs read."""
        if not _is_ufunc(node):
            return []
        y = node.symbols[0]
        if not self._stays_inside(y) or _elements(y) < LARGE:
            return []
        like = [x for x in node.sources() if dims.same(x.shape, y.shape)]
        if not like:
            return []
        # sizes that are unknown now are equal in each run if their keys are, so they share a slot
        kind = tuple(n if isinstance(n, int) else n.key for n in y.shape), y.dtype
        free = self.free_slots.get(kind)
        if free:
            slot = free.pop()
        else:
            slot = self.slot_count = self.slot_count + 1
        self.slots[y.id] = slot, kind
        return [f"out=arena({slot}, {self.names[like[0].id]}, {self._constant(y.dtype)})"]


def _written(value: Any) -> str | None:
    """Return an attribute as Python text if it consists of numbers and sizes of values."""
    if type(value) is int:
        return repr(value)
    if isinstance(value, dims.UnknownRank):
        return f"s{value.source.id}.shape"
    if isinstance(value, dims.Dim):
        return f"s{value.key[1]}.shape[{value.key[2]}]" if value.key[0] == "size" else None
    if type(value) is tuple:
        parts = [_written(item) for item in value]
        return None if None in parts else f"({''.join(f'{part}, ' for part in parts)})"
    return None


def _resolved(attrs: Attrs, ids: Sequence[int], *values: Any) -> dict[str, Any]:
    by_id = dict(zip(ids, values, strict=True))
    return {k: dims.resolved(v, lambda source: by_id[source.id]) for k, v in attrs.items()}


def _is_ufunc(node: Node) -> bool:
    return isinstance(node.op.kernels[np.ndarray], np.ufunc)


def _elements(symbol: Symbol) -> float:
    """Return the number of elements. Unknown sizes count as large."""
    if isinstance(symbol.shape, dims.UnknownRank):
        return 0  # no operand is known to have its shape
    return math.prod(n if isinstance(n, int) else LARGE for n in symbol.shape)


def _last_readers(nodes: Sequence[Node], fetches: Sequence[Symbol]) -> dict[int, Any]:
    """Return the last reader of each value. Fetched values live to the end."""
    last: dict[int, Any] = {s.id: node for node in nodes for s in node.sources()}
    return last | {s.id: FETCHED for s in fetches}


def _fresh(nodes: Sequence[Node], fetches: Sequence[Symbol], fed: set[int]) -> set[int]:
    """Return the values that lie in a separate array.

    A ufunc makes a new array. Other kernels may return a view of their inputs, so their inputs
    must not be overwritten.
    """
    made = {n.symbols[0].id for n in nodes if _is_ufunc(n) and n.symbols[0].id not in fed}
    for node in nodes:
        if not _is_ufunc(node):
            made.difference_update(s.id for s in node.sources())
    return made
