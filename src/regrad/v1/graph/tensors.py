"""The tensors and operations of TensorFlow 1's API."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import numpy as np

import regrad as rg
from regrad.core.rule_forms import OpView, as_many
from regrad.core.tensor import Readable, TensorLike, TensorView
from regrad.errors import ArgumentError, GraphError, near
from regrad.graph.graph import Node, Symbol, is_symbolic, tensor_of
from regrad.v1 import dtypes
from regrad.v1.dtypes import DType
from regrad.v1.graph import tf_names
from regrad.v1.graph.static_shapes import ShapeLike, TensorShape

__all__ = ["IndexedSlices", "Operation", "Tensor"]

# -- the open sessions, of which the innermost is the default session ----------------------------


class Runs(Protocol):
    """The part of a Session that graphs use. (The module of Session imports graphs.)"""

    graph: Any

    def run(self, fetches: Any, feed_dict: Mapping[Any, Any] | None = None) -> Any:
        """Return the values of the fetches."""


SESSIONS: ContextVar[tuple[Runs, ...]] = ContextVar("regrad_default_session", default=())


def default_session(what: str) -> Runs:
    """Return the innermost open session. Raises ValueError if no session is open."""
    sessions = SESSIONS.get()
    if not sessions:
        raise GraphError(
            f"Cannot {what}: No default session is registered. Use `with sess.as_default()` or "
            f"pass an explicit session to `{what}(session=sess)`"
        )
    return sessions[-1]


# -- operations ----------------------------------------------------------------------------------


class NodeDef(NamedTuple):
    """The definition of an op, which prints in TensorFlow's text format."""

    name: str
    op: str  # the op type
    input: list[str]  # names of inputs and control inputs
    attr: dict[str, Any]
    device: str = ""

    def __str__(self) -> str:
        lines = [f'name: "{self.name}"', f'op: "{self.op}"']
        lines += [f'input: "{name}"' for name in self.input]
        for key, value in sorted(self.attr.items()):
            shown = "\n".join(f"    {line}" for line in _attr_lines(value))
            lines += ["attr {", f'  key: "{key}"', "  value {", shown, "  }", "}"]
        return "\n".join(lines) + "\n"

    __repr__ = __str__


def _attr_lines(value: Any) -> list[str]:
    """Return the lines that TensorFlow prints for the value of an attribute."""
    if isinstance(value, list | tuple):
        return ["list {", *[f"  {line}" for item in value for line in _attr_lines(item)], "}"]
    if isinstance(value, np.dtype):
        return [f"type: {_DT.get(value.name, f'DT_{value.name.upper()}')}"]
    if isinstance(value, bytes):
        return [f's: "{value.decode(errors="backslashreplace")}"']
    shown = str(value).lower() if isinstance(value, bool) else str(value)
    return [f"{_KINDS.get(type(value), 'value')}: {shown}"]


_KINDS = {bool: "b", int: "i", float: "f"}
_DT = {"float32": "DT_FLOAT", "float64": "DT_DOUBLE", "float16": "DT_HALF", "object": "DT_STRING"}


class Operation(OpView):
    """An op of a graph. A rule receives the Operation as its argument `op`.

    `inputs` and `get_attr` follow TensorFlow. For example, the axis of a reduction is an input,
    and the attribute `T` is a dtype. Get the Operation of a tensor as `x.op`; user code does not
    make Operations.

    Args:
        node: The node of the graph.

    Source: `tf.Operation`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default():
    ...     op = tf.add(1.0, 2.0, name="three").op
    >>> op.name, op.type, [x.name for x in op.inputs]
    ('three', 'AddV2', ['three/x:0', 'three/y:0'])
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self.type: str = node.op.type.lstrip("_")
        self.name: str = node.name

    @property
    def graph(self) -> Any:
        """The graph of the op."""
        return self._node.graph.root

    @property
    def inputs(self) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The tensors that the op reads."""
        return tuple([x for x, _ in self._inputs()])

    def _inputs(self) -> list[tuple[Tensor, int | None]]:
        """The inputs, each with its index in the node, or None if only TensorFlow has it."""
        node = self._node
        if node.face_inputs is None:
            listed = tf_names.inputs(node)
            node.face_inputs = [
                (face(node.xs[x]), x) if isinstance(x, int) else (self._constant(*x), None)
                for x in listed
            ]
        return node.face_inputs

    def _constant(self, name: str, value: Any) -> Tensor:
        graph = self._node.graph
        with graph.name_scope(self.name + "/"):
            if isinstance(value, np.ndarray):
                with graph.naming("Const", name):
                    return face(graph.constant(value))
            if value is None:  # all axes, where the rank is unknown
                value = AllAxes(face(self._node.xs[0]))
            convert = CONVERSIONS.get(type(value), CONVERSIONS[Sequence])
            return convert(value, None, name)

    @property
    def outputs(self) -> list[Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The tensors that the op returns."""
        return [face(tensor_of(symbol)) for symbol in self._node.symbols]

    @property
    def control_inputs(self) -> list[Operation]:
        """The ops that must run before this op."""
        return [operation(node) for node in self._node.control]

    @property
    def node_def(self) -> NodeDef:
        """The definition of the op, which prints as text."""
        read = [x.name.removesuffix(":0") for x in self.inputs]
        waits = [f"^{other.name}" for other in self.control_inputs]
        return NodeDef(self.name, self.type, read + waits, tf_names.attrs(self._node))

    device = ""
    variable: Any = None  # the Variable, if this is the op of one

    def values(self) -> tuple[Tensor, ...]:
        """The outputs as a tuple."""
        return tuple(self.outputs)

    def run(self, feed_dict: Mapping[Any, Any] | None = None, session: Runs | None = None) -> None:
        """Run the op in a session, by default the default session."""
        (session or default_session("run")).run(self, feed_dict)

    def get_attr(self, name: str) -> Any:
        """Return an attribute by its TensorFlow name. Raises ValueError for an unknown name."""
        attrs = tf_names.attrs(self._node)
        if name == "_gradient_op_type" and self._node.rule is not self._node.op.rule:
            return self._node.rule.name.encode()
        if name not in attrs:
            raise GraphError(
                f"Operation {self.name!r} has no attr named {name!r}.{near(name, attrs)} "
                f"It has {', '.join(attrs) or 'none'}."
            )
        value = attrs[name]
        return dtypes.of(value) if isinstance(value, np.dtype) else value

    @property
    def record(self) -> Any:
        return self._node

    def places(self) -> Sequence[int | None]:
        return [place for _, place in self._inputs()]

    def shown(self, tensor: rg.Tensor | None) -> Any:
        return tensor if tensor is None else face(tensor)

    def own(self, answer: Any) -> Sequence[Any]:
        inputs = self._inputs()
        count = sum(place is not None for _, place in inputs)
        if isinstance(answer, list | tuple) and len(answer) == count:
            return list(answer)
        answer = as_many(answer, len(inputs), self._node)
        found = {place: dx for (_, place), dx in zip(inputs, answer, strict=True)}
        return [found[i] for i in range(count)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Operation) and other._node is self._node

    def __hash__(self) -> int:
        return hash(id(self._node))

    def __repr__(self) -> str:
        return f"<tf.Operation {self.name!r} type={self.type}>"

    def __str__(self) -> str:
        return str(self.node_def)


def operation(node: Node) -> Operation:
    """Return the Operation of a node, always the same object."""
    if node.face is None:
        node.face = Operation(node)
    return node.face


# -- tensors -------------------------------------------------------------------------------------

NO_VALUE = "the value of {} is known only when the graph runs; fetch it with session.run(x)"


def refusing(message: str) -> Callable[..., Any]:
    """Return a method that raises. In the message `{}` stands for the tensor."""

    def refuse(self: Tensor, *args: Any, **options: Any) -> NoReturn:
        """Raise: a symbolic tensor has no value before the run."""
        raise ArgumentError(message.format(self))

    return refuse


class InGraph:
    """The properties of an output of an op: the base class of Tensors and Variables."""

    __slots__ = ()
    __array_ufunc__ = None  # makes NumPy call __rmul__ for `array * tensor`
    __array_priority__ = 100

    _symbol: Symbol

    @property
    def op(self) -> Operation:
        """The op whose output it is."""
        return operation(self._symbol.node)

    @property
    def name(self) -> str:
        """The name of the op, a colon, and the index of the output."""
        return self._symbol.name

    @property
    def graph(self) -> Any:
        """The graph."""
        return self._symbol.node.graph.root

    @property
    def dtype(self) -> DType:
        """The dtype. A Variable has a reference dtype, such as `float32_ref`."""
        base = dtypes.of(self._symbol.dtype)
        return DType(base._dtype, True) if self._symbol.node.op.type == "VariableV2" else base

    @property
    def shape(self) -> TensorShape:
        """The static shape."""
        return TensorShape(self._symbol.shape)

    device = ""

    def get_shape(self) -> TensorShape:
        """Return the static shape."""
        return self.shape

    def set_shape(self, shape: ShapeLike) -> None:
        """Refine the static shape. Raises ValueError if the shapes are incompatible."""
        merged = self.shape.merge_with(shape)
        if merged._sizes is not None:
            self._symbol.refine(merged._sizes)


class Tensor(InGraph, TensorView):
    """A value that a graph will compute: `tf.Tensor`.

    The operators do not mix dtypes, as in TensorFlow. `==` compares element by element. In
    TensorFlow 1 `==` tests for identity; use `is` for this. The functions of `tf` return Tensors;
    user code does not make them.

    Args:
        tensor: The regrad Tensor that this object wraps.

    Source: `tf.Tensor`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     x = tf.constant([1.0, 2.0])
    ...     print(x * 2.0, sess.run(x * 2.0))
    Tensor("mul:0", shape=(2,), dtype=float32) [2. 4.]
    """

    __slots__ = ("__weakref__", "_tensor")

    def __init__(self, tensor: rg.Tensor) -> None:
        self._tensor = tensor

    def _read(self) -> rg.Tensor:
        """Return the wrapped Tensor. regrad's functions accept this object through this method."""
        node = self._tensor._data.node
        if node.op.type == "VariableV2":
            return operation(node).variable._read()
        return self._tensor

    def _ref(self) -> Tensor:
        """Return this tensor, as `Variable._ref` returns the output of the variable's op."""
        return self

    @property
    def _symbol(self) -> Symbol:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._tensor._data

    @property
    def value_index(self) -> int:
        """The index of this tensor among the outputs of its op."""
        return self._symbol.index

    def consumers(self) -> list[Operation]:
        """Return the ops that read this tensor."""
        here = self._symbol.id
        nodes = self._symbol.node.graph.nodes
        return [operation(n) for n in nodes if any(s.id == here for s in n.sources())]

    def eval(self, feed_dict: Mapping[Any, Any] | None = None, session: Runs | None = None) -> Any:
        """Return the value in a session, by default the default session."""
        return (session or default_session("eval")).run(self, feed_dict)

    def __repr__(self) -> str:
        return f"<tf.Tensor {self.name!r} shape={self.shape} dtype={self.dtype.name}>"

    def __str__(self) -> str:
        shape = "" if self.shape.ndims is None else f", shape={self.shape}"
        return f'Tensor("{self.name}"{shape}, dtype={self.dtype.name})'

    if TYPE_CHECKING:

        def __hash__(self) -> int: ...
    else:
        __hash__ = object.__hash__  # (`==` is elementwise)

    __bool__: Callable[..., Any] = refusing(
        "Using a `tf.Tensor` as a Python `bool` is not allowed: its value is known only when "
        "the graph runs. Use `if t is not None:` to test for a missing tensor, and tf.cond "
        "or tf.where to choose by its value. ({})"
    )
    __iter__: Callable[..., Any] = refusing(
        "Tensor objects are not iterable in a graph: use tf.unstack or tf.while_loop for {}"
    )
    __len__: Callable[..., Any] = refusing(
        "len is not defined for a symbolic Tensor; use x.shape[0] or tf.shape(x)[0] for {}"
    )
    __float__: Callable[..., Any] = refusing(NO_VALUE)
    __int__: Callable[..., Any] = refusing(NO_VALUE)
    __index__: Callable[..., Any] = refusing(NO_VALUE)
    __array__: Callable[..., Any] = refusing(NO_VALUE)
    numpy: Callable[..., Any] = refusing(NO_VALUE)


def face(y: Any) -> Any:
    """Wrap symbolic Tensors, also in tuples and lists. Return any other value unchanged."""
    if isinstance(y, list | tuple):
        made = [face(item) for item in y]
        return type(y)(*made) if hasattr(y, "_fields") else type(y)(made)
    if not isinstance(y, rg.Tensor) or not is_symbolic(y):
        return y
    symbol = y._data
    if y._id != symbol.id:  # an alias, which a tape recorded
        return Tensor(y)
    if symbol.face is None:
        symbol.face = Tensor(y)
    return symbol.face


# -- conversion to tensors -----------------------------------------------------------------------


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor, a variable or a regrad Tensor."""
    return isinstance(value, rg.Tensor | Readable)


# Functions that convert values to tensors through ops, by the value's type. The modules that
# define these ops add their functions. (TensorFlow: `tf.register_tensor_conversion_function`.)
CONVERSIONS: dict[type, Callable[[Any, DType | None, str | None], Tensor]] = {}


def rg_read(value: TensorLike) -> rg.Tensor:
    """Return a Variable, or a Tensor of either kind, as a regrad Tensor."""
    return value if isinstance(value, rg.Tensor) else type(value)._read(value)


def node_of(x: TensorLike) -> Node:
    """Return the node of a tensor, an op or a Variable."""
    if isinstance(x, Operation):
        return x._node
    tensor = x._tensor if isinstance(x, Tensor) else rg_read(x) if is_tensor(x) else x
    if not is_symbolic(tensor):
        raise ArgumentError(f"expected a tensor or an op, got {x!r:.60}")
    return tensor._data.node


@dataclass(eq=False, repr=False)
class IndexedSlices(TensorView):
    """Rows of a tensor: `values[i]` is added to row `indices[i]`. A rule may return IndexedSlices.

    regrad's gradients are dense. IndexedSlices become a dense tensor where they are used.

    Args:
        values: The rows, a tensor of shape `(n, …)`.
        indices: Integers, of shape `(n,)`. Rows with the same index are added.
        dense_shape: The shape of the dense tensor.

    Source: `tf.IndexedSlices`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     rows = tf.IndexedSlices(tf.constant([[1.0], [2.0]]), tf.constant([2, 0]), [3, 1])
    ...     print(sess.run(tf.convert_to_tensor(rows)).tolist())
    [[2.0], [0.0], [1.0]]
    """

    values: TensorLike
    indices: TensorLike
    dense_shape: TensorLike = None

    def _read(self) -> rg.Tensor:
        return CONVERSIONS[IndexedSlices](self, None, None)._read()


class AllAxes(NamedTuple):
    """All axes of a tensor whose rank is known only in the run."""

    x: Tensor
