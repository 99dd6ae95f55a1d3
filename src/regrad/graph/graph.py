"""Graphs: ops that are recorded to run later, with the same dispatch as ops that run at once.

The data of a symbolic Tensor is a `Symbol` instead of an array. An op of a symbolic Tensor is not
computed. regrad adds it to the symbol's graph as a `Node`, which is a record as on a tape, with
symbolic tensors in place of values. So rules, tapes and the backward pass treat both alike.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Generator, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from regrad.core import dims
from regrad.core.backends import BACKENDS, Backend, Namespace, is_inexact
from regrad.core.blocks import block, stay
from regrad.core.dims import Dim, ErrorTerms, SizeSource, UnknownRank
from regrad.core.name_scopes import PATH
from regrad.core.registry import OPS, Attrs, Input, Kernel, Op
from regrad.core.rule import NoGradient, Rule
from regrad.core.rule_forms import OpView, PerInput
from regrad.core.state import current, next_id, open_tapes
from regrad.core.tape import GroupedRecord, Layout, effective, placed, put, rule_in_force
from regrad.core.tensor import Tensor
from regrad.errors import ArgumentError, FinalizedError, GraphError, kind
from regrad.graph.constants import fold
from regrad.shapes.infer import Spec, infer

PLACES = [tuple(range(n)) for n in range(16)]  # for ops whose parameters are single tensors
VALID_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")
NO_RULE = NoGradient()


class Symbol(SizeSource):
    """An output of a node: the data of a symbolic Tensor, in place of an array.

    `content` holds the values of a small integer output, as far as they are known when the graph
    is built (numbers and Dims). Ops compute shapes, and shapes should stay known. `carries` is
    whether a gradient can propagate through this symbol. Floats carry gradients. Integers and
    bools do so only if an active override makes one, or if they are computed from such a tensor.
    """

    __slots__ = (
        "carries", "content", "dtype", "face", "index", "node", "relied", "shape", "spec",
    )  # fmt: skip

    shape: Any  # a tuple of ints and Dims, or an UnknownRank
    spec: Spec  # shape and dtype, in the form of inference

    def __init__(self, node: Node, index: int, spec: Spec) -> None:
        self.node: Node = node
        self.index: int = index
        self.dtype: np.dtype = spec.dtype
        self.id: int = next_id()
        self.carries: bool = is_inexact(spec.dtype)
        self.content: np.ndarray | None = None
        self.relied: bool = False  # whether the content was used for a shape
        self.face: Any = None  # the public object for it
        if spec.shape is not None and not dims.KINDS.issuperset(map(type, spec.shape)):
            what = f"{node.op.name}: expected integers for the sizes of the result"
            spec = Spec(dims.as_sizes(spec.shape, what), spec.dtype)
        if spec.shape is not None and None not in spec.shape:
            self.shape = spec.shape
            self.spec = spec
        else:
            self.shape = UnknownRank(self)
            self.refine(spec.shape)

    def refine(self, shape: Any) -> None:
        """Add knowledge of the shape. None is a size that is still unknown."""
        if shape is None or isinstance(shape, UnknownRank):
            self.spec = Spec(None, self.dtype)
            return
        old = self.shape
        known = list(old) if isinstance(old, tuple) else [None] * len(shape)
        pairs = enumerate(zip(known, shape, strict=True))
        self.shape = tuple(self._better(i, a, b) for i, (a, b) in pairs)
        self.spec = Spec(self.shape, self.dtype)

    def loosen(self, sizes: Any) -> None:
        """Forget known sizes that may change, because a run may feed another value here."""
        self.shape, self.content = UnknownRank(self), None
        self.refine(sizes)

    def _better(self, axis: int, old: Any, new: Any) -> Any:
        if isinstance(old, int) and old is not None:
            return old
        if new is not None and (isinstance(new, int) or old is None):
            return new
        return dims.size_of(self, axis) if old is None else old

    @property
    def words(self) -> ErrorTerms:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The words of the graph's public API, for messages."""
        return self.node.graph.root.words

    @property
    def ndim(self) -> int:
        """The number of axes. Raises UnknownShapeError if it is unknown."""
        return len(self.shape)

    @property
    def name(self) -> str:
        """`op_name:output`."""
        return f"{self.node.name}:{self.index}"

    def __repr__(self) -> str:
        return f"<symbol {self.name!r} shape={self.shape} dtype={self.dtype}>"


class SymbolBackend(Backend):
    """The backend of symbols. Operations that need values raise an error."""

    name = "graph"
    rank = 3

    def own(self, array: Symbol) -> Any:
        return array

    def to_numpy(self, array: Symbol) -> np.ndarray:
        raise GraphError(
            f"the value of {array.name!r} is known only when the graph runs: fetch it with "
            f"session.run(x). To choose by a value inside the graph use {array.words.choice}."
        )

    def from_numpy(self, array: np.ndarray, like: Symbol | None = None) -> Any:
        raise GraphError("an array enters a graph as a constant")


BACKENDS[Symbol] = SymbolBackend()


class Node(GroupedRecord):
    """An op of a graph: a record whose inputs and outputs are symbolic."""

    __slots__ = (
        "control", "derived", "face", "face_inputs", "graph", "name", "number", "plain", "sized",
        "symbols",
    )  # fmt: skip

    graph: OpGraph
    name: str
    number: int  # in order of creation, which is a valid order of execution
    derived: bool  # whether a backward pass made it
    control: tuple[Node, ...]  # nodes that must run before
    sized: list[Symbol]  # symbols whose shape (or value) the attributes need in a run
    symbols: tuple[Symbol, ...]  # the outputs
    face: Any  # the public object for it
    face_inputs: Any

    def unused(self, index: int) -> Any:
        given = self.op.owns(self.rule) or is_inexact(self.symbols[index].dtype)
        return super().unused(index) if given else None

    def view(self) -> Any:
        return self.graph.root.view_of(self)

    def sources(self) -> Iterator[Symbol]:
        """Yield the symbols that the op reads."""
        return (x._data for x in self.xs)

    def carry(self) -> None:
        """Record which integer and bool outputs carry a gradient."""
        for i, symbol in enumerate(self.symbols):
            if not symbol.carries and self.rule.watches:
                symbol.carries = not self.op.owns(self.rule) or self.rule.carries(self, i)

    def __repr__(self) -> str:
        return f"<node {self.name!r} type={self.op.type}>"


class Symbolic(Tensor):
    """A Tensor whose value a graph will compute. Its data is a Symbol."""

    __slots__ = ()

    def __repr__(self) -> str:
        symbol = self._data
        return f"<symbolic Tensor {symbol.name!r} shape={symbol.shape} dtype={symbol.dtype}>"

    __str__ = __repr__

    @property
    def op(self) -> Any:
        """The op whose output it is."""
        return self._data.node.view()

    @property
    def name(self) -> str:
        """`op_name:output`."""
        return self._data.name


def tensor_of(symbol: Symbol) -> Tensor:
    """Return the symbolic Tensor of an output."""
    y = Symbolic()
    y._data = symbol
    y._id = symbol.id
    return y


# -- ops that exist only in graphs ---------------------------------------------------------------


def graph_op(
    type: str, kernel: Kernel, inputs: str = "", attrs: str = "", *, name: str = "",
    rule: Rule | None = NO_RULE, **settings: Any,
) -> Op:  # fmt: skip
    """Make an op that exists only in graphs. Register it, unless its type begins with `_`.

    Args:
        inputs: The names of the inputs; `"x data*"` are a tensor and a list of tensors.
        name: The name of its functions, by default the type.
        rule: Its rule; None for the rule of an op that returns its first input.
        settings: Other settings of `Op`.
    """
    entries = [Input(n.rstrip("*"), "many" if n[-1] == "*" else "one") for n in inputs.split()]
    op = Op(type, name or type, kernel, entries, attrs.split(), **settings)
    op.rule = _passing(op) if rule is None else rule
    return op if type.startswith("_") else OPS.setdefault(type, op)


def _passing(op: Op) -> Rule:
    rule = PerInput(op, op.type.lstrip("_"))
    for i, entry in enumerate(op.inputs):
        rule.add(entry.name, lambda dy, i=i: None if i else dy)
    return rule


CONST = graph_op("Const", lambda xp, value: value, attrs="value")


def _unfed(xp: Namespace, spec: Spec) -> Any:
    raise GraphError("a placeholder must be fed")


PLACEHOLDER = graph_op("Placeholder", _unfed, attrs="spec")


# -- the graph -----------------------------------------------------------------------------------

# The graph of the region (a branch or the body of a loop) that is being built in this context.
INNERMOST: ContextVar[OpGraph | None] = ContextVar("regrad_region", default=None)


class _Here(threading.local):
    """Scope, control dependencies and pending name of a thread. Threads may share a graph."""

    scope = ""
    controls: tuple[Node, ...] = ()
    pending: tuple[str, str] | None = None  # an op type, and the name for its next op

    def __init__(self) -> None:
        self.nodes: list[Node] = []  # the nodes that this thread added


class OpGraph:
    """Nodes in order of creation, and the names in use.

    `outer` is the graph around a region. Its tensors may be used inside, and are listed in
    `captures` (outer id -> (outer Tensor, the placeholder that represents it inside)).
    """

    words: ErrorTerms = ErrorTerms()  # the words of the public API, for messages

    def __init__(self, outer: OpGraph | None = None) -> None:
        self.outer = outer
        self.root: OpGraph = self if outer is None else outer.root
        self.nodes: list[Node] = []
        self.captures: dict[int, tuple[Tensor, Tensor]] = {}
        self.by_name: dict[str, Node] = {}
        self.finalized = False
        self._here = _Here()
        self._lock = threading.RLock()
        self.waits_for: list[Node] = []  # nodes outside of a region that must run before it
        self._taken: dict[str, int] = {}
        self._constants: dict[Any, Tensor] = {}

    @property
    def scope(self) -> str:
        """The prefix of the names of ops in this thread."""
        return self._here.scope

    @scope.setter
    def scope(self, scope: str) -> None:
        self._here.scope = scope

    @property
    def controls(self) -> tuple[Node, ...]:
        """The nodes that run before each node that this thread adds."""
        return self._here.controls

    @property
    def own_nodes(self) -> list[Node]:
        """The nodes that this thread added. (Other threads may add nodes in between.)"""
        return self._here.nodes

    def view_of(self, node: Node) -> Any:
        """Return the view of a node for a rule in TensorFlow's form."""
        return OpView(node)

    # -- nodes -----------------------------------------------------------------------------------

    def add(
        self,
        op: Op,
        rule: Rule,
        xs: Sequence[Tensor],
        attrs: Attrs,
        layout: Layout = None,
        specs: Sequence[Spec] | None = None,
    ) -> Any:
        """Add an op. Return the symbolic Tensors of its outputs in the form of the op's result.

        `specs` are the shapes and dtypes of the outputs, which are inferred by default.
        """
        if self.finalized:
            raise FinalizedError("Graph is finalized and cannot be modified.")
        if rule.bare.replaces:
            raise GraphError(
                f"{rule.name}: the value of {op.type!r} cannot be replaced as TensorFlow 1 makes "
                "it, nor its rule learn. Use regrad's own function."
            )
        if self.outer is not None and op is not PLACEHOLDER and dims.sources(attrs.values()):
            attrs = {k: dims.moved(v, self._own_symbol) for k, v in attrs.items()}
        own, ids, known, given = [], [], [], []
        for x in xs:
            symbol = x._data
            own.append(symbol.node.symbolic[symbol.index])
            ids.append(symbol.id)
            known.append(symbol.spec)
            given.append((symbol.shape, symbol.dtype))
        if specs is None:
            specs = infer(op, [placed(known, p) for p in layout] if layout else known, attrs)
        node = Node(
            op, rule, attrs, tuple(ids), given, tuple(own), (), None, layout or PLACES[len(own)]
        )
        node.plain = layout is None and not op.several and op.flat
        node.graph, node.derived = self, False
        node.control = self._here.controls
        node.face = node.face_inputs = None
        node.sized = dims.sources(attrs.values()) if attrs else []
        made, own, known, returned = [], [], [], []
        for spec in specs:
            symbol = Symbol(node, len(made), spec)
            made.append(symbol)
            # (a separate Tensor, because `custom` may turn the user's Tensor into another op's)
            own.append(tensor_of(symbol))
            returned.append(tensor_of(symbol))
            known.append((symbol.shape, symbol.dtype))
        node.symbols = tuple(made)
        node.symbolic = tensors = tuple(own)
        node.output_specs = known
        node.outputs = tuple([t._id for t in tensors]) if op.several else tensors[0]._id
        node.y = tensors if op.several else tensors[0]
        node.rule = effective(op, rule, given, node.y)
        with self._lock:
            node.name = self._name_for(op)
            node.number = len(self.nodes)
            self.nodes.append(node)
        self.by_name[node.name] = node
        self._here.nodes.append(node)
        if made and made[0].dtype.kind in "iu":
            fold(node)
        node.carry()
        return tuple(returned) if op.several else returned[0]

    def constant(self, value: np.ndarray, key: Any = None) -> Tensor:
        """Return a Const node. Constants with the same key are shared."""
        shared = {} if key is None or self._here.controls else self._constants
        if key not in shared:
            spec = Spec(value.shape, value.dtype)
            shared[key] = self.add(CONST, NO_RULE, (), {"value": value}, specs=(spec,))
        return shared[key]

    def entering(self, x: Tensor) -> Tensor:
        """Return x as a Tensor of this graph. Arrays become constants, outer tensors captures."""
        symbol = x._data
        if type(symbol) is not Symbol:
            array = BACKENDS[type(symbol)].to_numpy(symbol)
            small = x._id == 0 and array.ndim == 0
            return self.constant(array, (array.dtype.str, array.tobytes()) if small else None)
        if symbol.node.graph is self:
            return x
        if self.outer is None or symbol.node.graph not in chain(self.outer):
            raise GraphError(
                f"{symbol.name!r} must be from the same graph as the op that is being built; a "
                "graph cannot use the tensors of another graph"
            )
        outer = self.outer.entering(x)
        key = outer._id  # (the id of an alias, which a tape may watch)
        if key not in self.captures:
            inner = self.placeholder(symbol.spec, "captured")
            inner._data.content = _own(symbol.content)
            inner._data.carries = symbol.carries
            self.captures[key] = outer, inner
        return self.captures[key][1]

    def _is_foreign(self, size: object) -> bool:
        return any(s.node.graph is not self for s in dims.leaves(size))

    def _own_symbol(self, symbol: Symbol) -> Symbol:
        """Return the symbol of this graph that represents a symbol of an outer graph."""
        return self.entering(tensor_of(symbol))._data

    def placeholder(self, spec: Spec, name: str | None = None) -> Tensor:
        """Return a placeholder, whose value the run feeds."""
        if self.outer is not None and spec.shape:  # sizes of outer tensors are unknown inside
            spec = Spec(tuple([None if self._is_foreign(n) else n for n in spec.shape]), spec.dtype)
        with self.naming("Placeholder", name):
            return self.add(PLACEHOLDER, NO_RULE, (), {"spec": spec}, specs=(spec,))

    # -- names -----------------------------------------------------------------------------------

    @block
    def naming(self, op_type: str, name: str | None) -> Generator[None]:
        """Set the name of the next op of this type in the block."""
        before = self._here.pending
        try:
            self._here.pending = (op_type, name) if name else None
            yield
        finally:
            self._here.pending = before

    def _name_for(self, op: Op) -> str:
        here = self._here
        if here.pending is not None and here.pending[0] == op.type:
            name, here.pending = here.pending[1], None
            if name.endswith("/"):  # a full name, which its scope has registered
                return name[:-1]
            return self.unique(name)
        return self._numbered(self.scope + op.type.lstrip("_"))

    def unique(self, name: str) -> str:
        """Return the name in the current scope, with a number if it is in use (`a`, `a_1`, …)."""
        if not VALID_NAME.fullmatch(name) and not (self.scope and name[:1] in "_-"):
            raise GraphError(
                f"{name!r} is not a valid node name: a name has letters, digits and _ . \\ / > -, "
                "and begins with a letter, a digit or a dot"
            )
        with self._lock:
            return self._numbered(self.scope + name)

    def _numbered(self, name: str) -> str:
        taken = self._taken
        key = name.lower()
        count = taken.get(key, 0)
        if not count:
            taken[key] = 1
            return name
        while (numbered := f"{name}_{count}").lower() in taken:
            count += 1
        taken[key] = count + 1
        taken[numbered.lower()] = 1
        return numbered

    @block
    def name_scope(self, name: str | None) -> Generator[str]:
        """Put the names of ops in the block under `name/`. `s/` re-enters a scope, None leaves all.

        `as` binds the scope with its slash.
        """
        if name and not isinstance(name, str):
            raise ArgumentError(f"name_scope: expected a name (a string), got {kind(name)}")
        scope, path = name or "", ()
        if scope and not scope.endswith("/"):
            scope, path = self.unique(scope) + "/", PATH.get()
        before = self.scope if path else ""
        path = (*path, *scope.removeprefix(before).split("/")[:-1])
        yield from self._with("scope", scope, stay(scope, PATH, path))

    @block
    def control_dependencies(self, nodes: Sequence[Node] | None) -> Generator[None]:
        """Run ops of the block after these nodes. None clears the dependencies of outer blocks."""
        for node in nodes or ():
            if node.graph not in chain(self):
                raise GraphError(f"{node.name!r} is not an element of this graph")
        self.waits_for += [n for n in nodes or () if n.graph is not self]
        nodes = nodes and [n for n in nodes if n.graph is self]
        before = self._here.controls if nodes is not None else ()
        more = tuple(n for n in nodes or () if n not in before)
        yield from self._with("controls", (*before, *more), stay(None))

    def named(self, names: Sequence[str], steps: Generator[Any]) -> Generator[Any]:
        """Run the steps of a block in which nodes are named after a scope of these names."""
        yield from self._with("scope", "/".join([f"{self.scope}{names[0]}", *names[1:], ""]), steps)

    def _with(self, name: str, value: Any, steps: Generator[Any]) -> Generator[Any]:
        """Run the steps of a block in which an attribute of `_Here` has a value for this thread."""
        here = vars(self._here)  # (this thread's dict, even if another thread ends the block)
        before = getattr(self._here, name)
        try:
            here[name] = value
            yield from steps
        finally:
            here[name] = before


def _own(content: np.ndarray | None) -> np.ndarray | None:
    """Return known values; None if some are sizes of another graph's tensors."""
    if content is None or any(isinstance(n, Dim) for n in content.flat):
        return None
    return content


def chain(graph: OpGraph | None) -> Iterator[OpGraph]:
    """Yield a region's graph and the graphs around it."""
    while graph is not None:
        yield graph
        graph = graph.outer


# -- adding ops ----------------------------------------------------------------------------------


def is_symbolic(x: object) -> bool:
    """Return whether a Tensor represents a value that a graph will compute."""
    return isinstance(x, Symbolic)


def home(xs: Sequence[Tensor]) -> OpGraph:
    """Return the graph for an op of these tensors: their graph, or the region being built."""
    symbol = next(x._data for x in xs if type(x) is Symbolic)
    graph = symbol.node.graph
    region = INNERMOST.get()
    if region is not None and graph in chain(region):
        return region
    if graph.outer is not None:
        raise made_inside(symbol)
    return graph


def in_innermost(x: Tensor) -> Tensor:
    """Return the Tensor that represents a symbolic Tensor in the region being built, if any."""
    region = INNERMOST.get()
    return x if region is None or x._data.node.graph not in chain(region) else region.entering(x)


def made_inside(symbol: Symbol) -> GraphError:
    """Return the error for a tensor of a branch or loop that is used outside of it."""
    return GraphError(
        f"{symbol.name!r} was made inside a branch or loop and cannot be used outside; return it "
        "from the function"
    )


def defer(
    op: Op,
    xs: tuple[Tensor, ...],
    attrs: Attrs,
    layout: Layout = None,
    specs: Sequence[Spec] | None = None,
) -> Any:
    """Add an op of symbolic Tensors to their graph, and to each tape that watches an input."""
    graph = home(xs)
    for x in xs:
        if type(x) is not Symbolic or x._data.node.graph is not graph:
            xs = tuple([graph.entering(x) for x in xs])
            break
    state = current()
    rule = op.rule if state is None else rule_in_force(state, op, xs, graph.root)
    if rule.bare.replaces:  # (its own value determines the shape and dtype of the replacement)
        own = graph.add(op, op.rule, xs, attrs, layout, specs)
        return rule.bare.run(rule, xs, attrs, own, layout)  # pyright: ignore (`ReplacingRule`)
    return put_down(graph, op, rule, xs, attrs, layout, specs)


def refuse_once(graph: OpGraph, called: str) -> None:
    """Raise for a rule of only the first derivative in a branch or loop."""
    if graph.outer is not None:
        raise GraphError(
            f"order=1: {called!r} is created in a branch or loop of the graph, where the rule "
            "would also apply to the second derivative. Let rules hold at every order (order=None) "
            "or write the loop in Python."
        )


def put_down(
    graph: OpGraph,
    op: Op,
    rule: Rule,
    xs: tuple[Tensor, ...],
    attrs: Attrs,
    layout: Layout = None,
    specs: Sequence[Spec] | None = None,
) -> Any:
    """Add an op with a rule to a graph, and to each tape that watches one of its inputs."""
    state, own = current(), rule
    if rule.once:
        refuse_once(graph, op.type)
        if state is not None and open_tapes(state):
            own = op.rule  # the tape takes the first derivative, so the graph does not use the rule
    y = graph.add(op, own, xs, attrs, layout, specs)
    if state is not None and state.tapes:
        put(state, op, rule, xs, attrs, y, layout)
    return y
