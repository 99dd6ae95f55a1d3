"""The tensors and operations of TensorFlow 1's API."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import regrad as rg
from regrad.core.rule_forms import OpView, as_many
from regrad.core.tensor import Readable, TensorLike, TensorView
from regrad.errors import ArgumentError, GraphError, near
from regrad.graph.graph import Node, Symbol, Symbolic, is_symbolic, tensor_of
from regrad.v1 import dtypes
from regrad.v1.dtypes import DType
from regrad.v1.graph import tf_names
from regrad.v1.graph.graphs import FACES
from regrad.v1.graph.node_defs import NodeDef
from regrad.v1.graph.open_sessions import Runs, default_session
from regrad.v1.graph.static_shapes import ShapeLike, TensorShape

__all__ = ["IndexedSlices", "Operation", "Tensor"]

# -- operations ----------------------------------------------------------------------------------


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
            if value is None:  # all axes, where the rank is unknown
                value = AllAxes(face(self._node.xs[0]))
            return FACES[object](value, name=name)

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
        mine: list[Any] = [None] * count
        for (_, place), dx in zip(inputs, answer, strict=True):
            if place is not None:
                mine[place] = dx
        return mine

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


class Tensor(TensorView):
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
    __array_ufunc__ = None  # makes NumPy call __rmul__ for `array * tensor`
    __array_priority__ = 100

    def __init__(self, tensor: rg.Tensor) -> None:
        self._tensor = tensor

    def _read(self) -> rg.Tensor:
        """Return the wrapped Tensor. regrad's functions accept this object through this method."""
        node = self._tensor._data.node
        if node.op.type == "VariableV2":
            return operation(node).variable._read()
        return self._tensor

    @property
    def _symbol(self) -> Symbol:
        return self._tensor._data

    @property
    def op(self) -> Operation:
        """The op that computes this tensor."""
        return operation(self._symbol.node)

    @property
    def name(self) -> str:
        """The name of the op, a colon, and the index of the output."""
        return self._symbol.name

    @property
    def graph(self) -> Any:
        """The graph of the tensor."""
        return self._symbol.node.graph.root

    @property
    def value_index(self) -> int:
        """The index of this tensor among the outputs of its op."""
        return self._symbol.index

    @property
    def dtype(self) -> DType:
        """The dtype."""
        base = dtypes.of(self._symbol.dtype)
        return DType(base._dtype, True) if self._symbol.node.op.type == "VariableV2" else base

    @property
    def shape(self) -> TensorShape:
        """The static shape."""
        return TensorShape(self._symbol.shape)

    device = ""

    def get_shape(self) -> TensorShape:
        """The static shape."""
        return self.shape

    def set_shape(self, shape: ShapeLike) -> None:
        """Refine the static shape. Raises ValueError if the shapes are incompatible."""
        merged = self.shape.merge_with(shape)
        if merged._sizes is not None:
            self._symbol.refine(merged._sizes)

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
        __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise ArgumentError(
            "Using a `tf.Tensor` as a Python `bool` is not allowed: its value is known only when "
            "the graph runs. Use `if t is not None:` to test for a missing tensor, and tf.cond "
            f"or tf.where to choose by its value. ({self})"
        )

    def __iter__(self) -> Iterator[Any]:
        raise ArgumentError(
            f"Tensor objects are not iterable in a graph: use tf.unstack({self.name!r}) or "
            "tf.while_loop"
        )

    def __len__(self) -> int:
        raise ArgumentError(
            f"len is not defined for a symbolic Tensor ({self.name}); use x.shape[0] or tf.shape(x)"
        )

    def __float__(self) -> float:
        raise self._no_value("float(x)")

    def __int__(self) -> int:
        raise self._no_value("int(x)")

    __index__ = __int__

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise self._no_value("a NumPy array of it")

    def numpy(self) -> Any:
        """Raise: a symbolic tensor has no value before the run."""
        raise self._no_value("numpy()")

    def _no_value(self, what: str) -> ArgumentError:
        return ArgumentError(
            f"{what}: the value of {self} is known only when the graph runs; fetch it with "
            "session.run(x)"
        )


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


FACES.update({Node: operation, Symbolic: face})
