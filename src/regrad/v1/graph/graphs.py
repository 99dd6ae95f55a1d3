"""TensorFlow 1's graph API: the default graph, collections, scopes and overrides."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import regrad.graph.graph as engine
from regrad.core.bindings import OpBinding
from regrad.core.blocks import block, stay
from regrad.core.callers import CARRIERS, warn_caller
from regrad.core.dims import ErrorTerms
from regrad.core.name_scopes import AROUND
from regrad.core.overrides import gradient_override_map as OverrideScope
from regrad.core.places import at
from regrad.core.registry import OPS, RULES, Op, canonical, resolve
from regrad.core.rule import NoGradient, Rule
from regrad.core.state import current
from regrad.core.tape import rule_in_force
from regrad.core.tensor import TensorLike
from regrad.errors import ArgumentError, GraphError, UnknownOpError, UnusedOverrideWarning, near
from regrad.graph.graph import INNERMOST, Node
from regrad.inspection.drawings import Drawing
from regrad.shapes.infer import Spec
from regrad.v1.graph import draw
from regrad.v1.graph.tensors import Operation, Tensor, face, node_of, operation
from regrad.v1.graph.tf_op_types import is_never_made

__all__ = [
    "Graph", "GraphKeys", "add_to_collection", "control_dependencies", "device", "get_collection",
    "get_collection_ref", "get_default_graph", "name_scope", "reset_default_graph",
]  # fmt: skip

# Functions that get each new graph.
MADE: list[Callable[[Any], None]] = []

# Names of rules, or rule functions, by op type.
OpTypeMap = Mapping[str, str | Callable[..., Any]]


class Graph(engine.OpGraph):
    """A graph of ops, which a Session runs. The functions of `tf` add ops to the default graph.

    Source: `tf.Graph`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default() as g:
    ...     y = tf.sign(tf.constant([-2.0, 3.0]))
    >>> [op.name for op in g.get_operations()]
    ['Const', 'Sign']
    """

    words: ErrorTerms = ErrorTerms("tf.shape(x)[i]", "tf.cond or tf.where", "tf.constant")

    def __init__(self) -> None:
        super().__init__()
        self.seed: int | None = None
        self.variable_scopes: list[Any] = []  # see regrad.v1.graph.variables
        self.scope_counts: dict[str, int] = {}
        self.variables_by_name: dict[str, Any] = {}
        self._collections: dict[Any, list[Any]] = {}
        for tell in MADE:
            tell(self)

    @block
    def as_default(self) -> Generator[Graph]:
        """Return a context manager in which this graph is the default graph."""
        yield from stay(self, _DEFAULT, self)

    def view_of(self, node: Node) -> Any:
        return operation(node)

    # -- ops and tensors -------------------------------------------------------------------------

    def get_operations(self) -> list[Any]:
        """Return the ops, in the order of creation."""
        return [self.view_of(node) for node in self.nodes]

    def get_operation_by_name(self, name: str) -> Any:
        """Return the op with this name. Raises KeyError if there is no such op."""
        return self.view_of(self._node(name))

    def get_tensor_by_name(self, name: str) -> Any:
        """Return the tensor with a name such as `"x:0"`. Raises KeyError for an unknown name."""
        if not isinstance(name, str):
            raise ArgumentError(f"Tensor names are strings, not {type(name).__name__}.")
        op_name, colon, index = name.rpartition(":")
        if not colon or not index.isdigit():
            raise GraphError(
                f"{name!r} names an op, not a tensor: tensors are called op_name:output, as in "
                f"'{name}:0'"
            )
        node = self._node(op_name)
        if int(index) >= len(node.symbols):
            raise MissingNameError(
                f"The name {name!r} refers to a Tensor which does not exist. The operation, "
                f"{op_name!r}, has only {len(node.symbols)} outputs."
            )
        return face(engine.tensor_of(node.symbols[int(index)]))

    def as_graph_element(
        self, obj: TensorLike, allow_tensor: bool = True, allow_operation: bool = True
    ) -> Any:
        """Return the tensor or op of this graph for a name, a tensor, an op or a Variable.

        Raises TypeError for an object that is not allowed, and ValueError for one of another graph.
        """
        if isinstance(obj, str):
            obj = (self.get_tensor_by_name if ":" in obj else self.get_operation_by_name)(obj)
        obj = obj if isinstance(obj, Operation) else getattr(obj, "_ref", lambda: obj)()
        allowed = (Tensor,) * allow_tensor + (Operation,) * allow_operation
        if not isinstance(obj, allowed):
            names = " or ".join(kind.__name__ for kind in allowed)
            raise ArgumentError(
                f"Can not convert a {type(obj).__name__} into a {names}: {obj!r:.80}"
            )
        if obj.graph is not self:
            raise GraphError(f"{obj!r} is not an element of this graph.")
        return obj

    def _node(self, name: str) -> Node:
        node = self.by_name.get(name)
        if node is None:
            raise MissingNameError(
                f"The name {name!r} refers to an Operation not in the graph."
                f"{near(str(name), self.by_name)}"
            )
        return node

    @property
    def version(self) -> int:
        """The number of ops."""
        return len(self.nodes)

    def finalize(self) -> None:
        """Make the graph read-only: adding an op raises from now on."""
        self.finalized = True

    def unique_name(self, name: str, mark_as_used: bool = True) -> str:
        """Return a name in the current scope that no op has yet."""
        before = self._taken.copy()
        try:
            return self.unique(name)
        finally:
            if not mark_as_used:
                self._taken = before

    @contextlib.contextmanager
    def device(self, name: str | Callable[..., Any] | None) -> Iterator[None]:
        """Return a context manager without effect. NumPy decides where arrays are."""
        yield

    @contextlib.contextmanager
    def colocate_with(self, op: TensorLike, ignore_existing: bool = False) -> Iterator[None]:
        """Return a context manager without effect, as `device`. None needs `ignore_existing`."""
        if op is None and not ignore_existing:
            raise GraphError("colocate_with: to reset it, pass None with ignore_existing=True")
        yield

    @block
    def control_dependencies(  # pyright: ignore[reportIncompatibleMethodOverride] (TensorFlow's)
        self, control_inputs: Sequence[TensorLike] | None
    ) -> Generator[None]:
        """Return a context manager. Ops *made* in it run after these ops and tensors.

        None clears the control dependencies of the blocks around.
        """
        nodes = None if control_inputs is None else [node_of(x) for x in control_inputs]
        inner = INNERMOST.get()
        yield from engine.OpGraph.control_dependencies(inner or self, nodes).steps

    # -- seeing it -------------------------------------------------------------------------------

    summary: Callable[..., str] = draw.summary
    draw: Callable[..., Drawing] = draw.draw

    def to_dot(self, of: TensorLike = None) -> str:
        """Return the picture's source in Graphviz's language, with all scopes open."""
        return self.draw(of).dot()

    def to_svg(self, path: str | os.PathLike[str] | None = None, of: TensorLike = None) -> str:
        """Return the picture as SVG, drawn by Graphviz; see `Drawing.svg`."""
        return self.draw(of).svg(path)

    def _repr_svg_(self) -> str | None:
        return self.draw()._repr_svg_()

    # -- collections -----------------------------------------------------------------------------

    def add_to_collection(self, name: str, value: Any) -> None:
        """Add a value to a collection."""
        self._collections.setdefault(name, []).append(value)

    def add_to_collections(self, names: str | Iterable[str] | None, value: Any) -> None:
        """Add a value to several collections."""
        for name in [names] if isinstance(names, str) else dict.fromkeys(names or ()):
            self.add_to_collection(name, value)

    def get_collection(self, name: str, scope: str | None = None) -> list[Any]:
        """Return a copy of a collection, with `scope` only values whose names begin with it."""
        values = self._collections.get(name, [])
        if scope is None:
            return list(values)
        return [v for v in values if hasattr(v, "name") and re.match(scope, v.name)]

    def get_collection_ref(self, name: str) -> list[Any]:
        """Return the collection itself, not a copy."""
        return self._collections.setdefault(name, [])

    def get_all_collection_keys(self) -> list[Any]:
        """Return the names of the collections, in the order in which they were made."""
        return [name for name in self._collections if isinstance(name, str)]

    def clear_collection(self, name: str) -> None:
        """Empty a collection."""
        self._collections.pop(name, None)

    # -- overrides -------------------------------------------------------------------------------

    def gradient_override_map(
        self, op_type_map: OpTypeMap, order: int | None = None
    ) -> GraphOverrideScope:
        """Override the gradients of ops of these types that are made in this graph in the scope.

        A value of the map is a name registered with `RegisterGradient`, an op type whose rule
        applies, or a function. regrad looks a name up when it computes a gradient. As in
        `regrad.gradient_override_map`, the object bound by `as` has `hits` and `assert_fired()`,
        and `order=1` overrides first derivatives only: `gradients` of a result of `gradients` use
        the ops' own rules.

        Entering the scope raises TypeError unless the map is a dict of strings to strings or
        functions, and UnknownOpError (a LookupError) for a key that is not an op type. For an op
        type of TensorFlow that regrad.v1 never makes, it warns with an UnusedOverrideWarning.

        Source: `tf.Graph.gradient_override_map`.
        """
        return GraphOverrideScope(self, op_type_map, order)


class MissingNameError(GraphError, KeyError):
    """No op or tensor of the graph has this name."""

    def __str__(self) -> str:
        return Exception.__str__(self)


class GraphOverrideScope(OverrideScope):
    """An override scope of one graph. As in TensorFlow, it looks rule names up late."""

    def __init__(self, graph: Graph, op_type_map: OpTypeMap, order: int | None = None) -> None:
        super().__init__(op_type_map if isinstance(op_type_map, dict) else {}, order=order)
        self._graph = graph
        self._given = op_type_map
        self._used = False

    def _steps(self) -> Generator[Any]:
        self._idle = None  # the errors below replace the warning about an unused scope
        given = self._given
        if not isinstance(given, dict) or not all(
            isinstance(k, str | at) and (isinstance(v, str) or callable(v))
            for k, v in self._rules.items()
        ):
            raise ArgumentError(
                "op_type_map must be a dictionary mapping strings to strings (names registered "
                f"with RegisterGradient) or functions, got {given!r:.80}"
            )
        if self._used:
            raise SingleUseError(
                "a gradient_override_map scope can be entered only once; make a new one"
            )
        self._used = True
        never = [k for k in self._rules if isinstance(k, str) and is_never_made(k)]
        self._rules = {k: v for k, v in self._rules.items() if k not in never}
        for key in never:
            if key not in self._marked:
                warn_caller(
                    f"gradient_override_map: regrad.v1 never makes the op type {key!r} of "
                    "TensorFlow, so its rule has no effect. graph.summary() lists the op types of "
                    "a graph.", UnusedOverrideWarning, CARRIERS,
                )  # fmt: skip
        return (yield from super()._steps())

    def _fresh(self, rules: OpTypeMap) -> GraphOverrideScope:
        return GraphOverrideScope(self._graph, rules or self._given, self._order)

    def _resolve(self, value: str | Callable[..., Any], op: Op) -> Rule:
        if isinstance(value, str):
            return LateRule(value, op)
        rule = resolve(value, op)
        if rule is not op.shipped:
            rule.answers = False  # None means no gradient, as in TensorFlow
        return rule

    def _key(self, op_type: str) -> Any:
        return self._graph, op_type

    def _unmatched(self) -> list[OpBinding]:
        return [] if self.hits else super()._unmatched()  # TensorFlow never warns of unused keys


class SingleUseError(ArgumentError, AttributeError):
    """A scope was entered a second time (TensorFlow raises AttributeError here)."""


class LateRule(Rule):
    """A rule by name, which is looked up at the first gradient that passes."""

    def __init__(self, name: str, op: Op) -> None:
        self.name = name
        self.op = op
        self._found: Rule | None = None

    def keeps(self, wanted: frozenset[int]) -> tuple[frozenset[int], bool]:
        return frozenset(range(len(self.op.inputs))), True

    def found(self, where: str) -> Rule:
        """Return the rule. Raises a LookupError that names the op and the missing registration."""
        if self._found is None:
            if self.name not in RULES and canonical(self.name) not in OPS:
                raise UnknownOpError(
                    f"No gradient defined for operation{where} (op type: {self.op.type}): "
                    f"gradient_override_map set its rule to {self.name!r}, and nothing is "
                    f"registered under that name.{near(self.name, [*RULES, *OPS])} Register it "
                    f"with @tf.RegisterGradient({self.name!r})."
                )
            self._found = resolve(self.name, self.op)
        return self._found

    def pull(self, record: Any, dy: Any, wanted: Sequence[int]) -> Any:
        rule = self.found(f" {record.name!r}" if hasattr(record, "name") else "")
        if isinstance(rule, NoGradient) or self._is_of_positions(record):
            return [(i, None) for i in wanted]
        return rule.pull(record, dy, wanted)

    def _is_of_positions(self, record: Any) -> bool:
        """Return whether an op type lends its rule to an op such as ArgMax.

        Integers that ArgMax returns are positions. In TensorFlow they have no gradient.
        """
        lent = self.name not in RULES and isinstance(self.op.shipped, NoGradient)
        ys = record.y if isinstance(record.y, tuple) else (record.y,)
        return lent and all(y.dtype.kind in "iu" for y in ys)


# -- the default graph ---------------------------------------------------------------------------

_GLOBAL: list[Graph] = [Graph()]
_DEFAULT: ContextVar[Graph | None] = ContextVar("regrad_default_graph", default=None)


def get_default_graph() -> Graph:
    """Return the graph to which the functions of `tf` add ops.

    Returns:
        The graph of the innermost open `with graph.as_default()`, or the global one.

    Source: `tf.get_default_graph`.

    >>> with tf.Graph().as_default() as graph:
    ...     print(tf.get_default_graph() is graph)
    True
    """
    return _DEFAULT.get() or _GLOBAL[0]


class OpenBlockError(GraphError, AssertionError):
    """The graph was reset within `as_default()` (TensorFlow raises AssertionError here)."""


def reset_default_graph() -> None:
    """Replace the global graph by a new empty graph.

    Raises:
        GraphError: a `with graph.as_default()` is open. The error is an AssertionError as well.

    Source: `tf.reset_default_graph`.

    >>> x = tf.constant(1.0)
    >>> tf.reset_default_graph()
    >>> tf.get_default_graph().get_operations()
    []
    """
    if _DEFAULT.get() is not None:
        raise OpenBlockError(
            "Do not use tf.reset_default_graph() to clear nested graphs. If you need a cleared "
            "graph, exit the nesting and create a new graph."
        )
    _GLOBAL[0] = Graph()


def current_graph() -> engine.OpGraph:
    """Return the graph that gets new ops: the default graph, or the branch or loop being built."""
    graph = get_default_graph()
    region = INNERMOST.get()
    return region if region is not None and region.root is graph else graph


AROUND.append(lambda names, steps: current_graph().named(names, steps))


def add_op(
    op: Op, name: str | None, inputs: Sequence[TensorLike], attrs: dict[str, Any],
    specs: Sequence[Spec], rule: Rule | None = None,
) -> Any:  # fmt: skip
    """Add an op to the graph that is being built, and return its outputs.

    The last parameter of the op may be a list. By default the op gets the active rule.
    """
    graph, state = current_graph(), current()
    xs = tuple([graph.entering(x) for x in inputs])
    first = len(op.inputs) - 1
    layout = None if op.flat else (*range(first), tuple(range(first, len(xs))))
    if rule is None:
        rule = op.rule if state is None else rule_in_force(state, op, xs, graph.root)
    with graph.naming(op.type, name):
        return engine.put_down(graph, op, rule, xs, attrs, layout, specs)


def name_scope(
    name: str | None, default_name: str | None = None, values: Sequence[TensorLike] | None = None
) -> Any:
    """Return a context manager in which ops get names under `name/`; see `tf.Graph.name_scope`.

    Args:
        name: The name of the scope. A name that ends with a slash reenters that scope. None leaves
            all scopes.
        default_name: The name, if `name` is None.
        values: Without effect.

    Returns:
        A context manager. `as` binds the scope's name with its slash.

    Raises:
        ArgumentError: the name is not a string.

    Source: `tf.name_scope`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.name_scope("s") as scope:
    ...     print(scope, tf.constant(1.0, name="a").name)
    s/ s/a:0
    """
    return current_graph().name_scope(default_name if name is None else name)


def control_dependencies(control_inputs: Sequence[TensorLike] | None) -> Any:
    """Return a context manager. Ops *made* in it run after these ops and tensors.

    Args:
        control_inputs: Ops, tensors and Variables. None clears the dependencies of outer blocks.

    Returns:
        A context manager.

    Raises:
        ArgumentError: an input is neither a tensor nor an op.
        GraphError: an input belongs to another graph.

    Source: `tf.control_dependencies`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     v = tf.Variable(1.0)
    ...     sess.run(tf.global_variables_initializer())
    ...     with tf.control_dependencies([tf.assign(v, 5.0)]):
    ...         after = v.read_value()
    ...     print(sess.run(after))
    5.0
    """
    return get_default_graph().control_dependencies(control_inputs)


def device(device_name_or_function: str | Callable[..., Any] | None) -> Any:
    """Return a context manager without effect.

    NumPy decides where arrays are, or JAX in a session with `jit=True`.

    Args:
        device_name_or_function: Ignored.

    Returns:
        A context manager.

    Raises:
        ArgumentError: the argument is missing.

    Source: `tf.device`.

    >>> with tf.Graph().as_default(), tf.device("/gpu:0"):
    ...     print(tf.constant(1.0).device == "")
    True
    """
    return get_default_graph().device(device_name_or_function)


def add_to_collection(name: str, value: Any) -> None:
    """Add a value to a collection of the default graph.

    Args:
        name: The name of the collection, one of `tf.GraphKeys` or any other.
        value: Any object.

    Raises:
        ArgumentError: an argument is missing.

    Source: `tf.add_to_collection`.

    >>> with tf.Graph().as_default():
    ...     tf.add_to_collection("mine", 3)
    ...     print(tf.get_collection("mine"))
    [3]
    """
    get_default_graph().add_to_collection(name, value)


def get_collection(key: str, scope: str | None = None) -> list[Any]:
    """Return a copy of a collection of the default graph.

    Args:
        key: The name of the collection.
        scope: A regular expression. Only values whose names begin with a match are listed.

    Returns:
        A list, which is empty if the collection does not exist.

    Raises:
        ArgumentError: an argument is missing.

    Source: `tf.get_collection`.

    >>> with tf.Graph().as_default():
    ...     v, w = tf.Variable(1.0, name="a/v"), tf.Variable(1.0, name="b/w")
    ...     print([v.name for v in tf.get_collection(tf.GraphKeys.GLOBAL_VARIABLES, "a/")])
    ['a/v:0']
    """
    return get_default_graph().get_collection(key, scope)


def get_collection_ref(key: str) -> list[Any]:
    """Return a collection of the default graph, not a copy. Changing the list changes it.

    Args:
        key: The name of the collection. A missing collection is made.

    Returns:
        The list.

    Raises:
        ArgumentError: an argument is missing.

    Source: `tf.get_collection_ref`.

    >>> with tf.Graph().as_default():
    ...     tf.get_collection_ref("mine").append(3)
    ...     print(tf.get_collection("mine"))
    [3]
    """
    return get_default_graph().get_collection_ref(key)


class GraphKeys:
    """The names of TensorFlow's collections.

    Source: `tf.GraphKeys`.

    >>> import regrad.v1 as tf
    >>> tf.GraphKeys.TRAINABLE_VARIABLES
    'trainable_variables'
    """

    GLOBAL_VARIABLES = "variables"
    LOCAL_VARIABLES = "local_variables"
    MODEL_VARIABLES = "model_variables"
    TRAINABLE_VARIABLES = "trainable_variables"
    MOVING_AVERAGE_VARIABLES = "moving_average_variables"
    REGULARIZATION_LOSSES = "regularization_losses"
    LOSSES = "losses"
    SUMMARIES = "summaries"
    UPDATE_OPS = "update_ops"
    GLOBAL_STEP = "global_step"
    TRAIN_OP = "train_op"
    WEIGHTS = "weights"
    BIASES = "biases"
    ACTIVATIONS = "activations"
    METRIC_VARIABLES = "metric_variables"
