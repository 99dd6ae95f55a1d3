"""Conversion of values to tensors of the graph and attributes of ops, and the building of ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

import regrad as rg
from regrad.core import dims, numbers
from regrad.core.dims import Dim, UnknownRank
from regrad.core.tensor import TensorLike
from regrad.errors import ArgumentError, DTypeError, GraphError, ShapeError
from regrad.graph.constants import as_attribute
from regrad.graph.graph import is_symbolic
from regrad.graph.size_ops import SHAPE
from regrad.v1 import dtypes
from regrad.v1.dtypes import DType
from regrad.v1.graph.graphs import current_graph
from regrad.v1.graph.static_shapes import ShapeLike, TensorShape
from regrad.v1.graph.tensors import CONVERSIONS, Operation, Tensor, face, is_tensor, rg_read

__all__ = ["constant", "convert_to_tensor"]


# The kinds that values of a kind may become: ints may become floats, fractions not ints.
BECOMES = {"i": "iufc", "u": "iufc", "f": "fc"}


def as_array(value: TensorLike, dtype: DType | None = None) -> np.ndarray:
    """Return a value as an array. Python ints become int32 and floats float32."""
    plain = not isinstance(value, np.ndarray | np.generic)
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ShapeError(f"a list of unequal rows is not a tensor: {error}") from None
    kind = array.dtype.kind
    if plain and (whole := numbers.integers(array, value)) is not None:
        array, kind = whole, "i"
    elif kind in "OSU":  # (NumPy's own strings lose zero bytes at the end)
        array, kind = _as_bytes(np.array(value, object) if plain else array), "O"
    usual = _default_dtype(array, value) if plain and kind in "iuf" else array.dtype
    wanted = usual if dtype is None else dtype._dtype
    if wanted.kind not in BECOMES.get(kind, kind) and array.size:
        got = "string" if kind == "O" else usual.name
        raise DTypeError(f"Expected {dtypes.of(wanted).name}, got {value!r:.60} of type {got!r}.")
    return numbers.under(array, wanted) if plain and wanted.kind != "O" else array.astype(wanted)


def _as_bytes(array: np.ndarray) -> np.ndarray:
    flat = [v.encode() if isinstance(v, str) else v for v in array.reshape(-1).tolist()]
    if not all(isinstance(v, bytes) for v in flat):
        raise DTypeError(f"a tensor holds numbers, bools or strings, got {array!r:.80}")
    return np.array(flat, object).reshape(array.shape)


def _default_dtype(array: np.ndarray, value: TensorLike) -> np.dtype:
    """Return the dtype for Python numbers. NumPy scalars in a list keep their dtype."""
    while isinstance(value, list | tuple) and value:
        value = value[0]
    if isinstance(value, np.ndarray | np.generic):
        return array.dtype
    if array.dtype.kind == "f":
        return np.dtype(np.float32)
    small = array.min(initial=0) >= -(2**31) and array.max(initial=0) < 2**31
    return np.dtype(np.int32 if small else np.int64)


def constant(
    value: TensorLike, dtype: dtypes.DTypeLike | None = None, shape: ShapeLike = None,
    name: str = "Const", verify_shape: bool = False,
) -> Tensor:  # fmt: skip
    """Return a constant tensor.

    By default Python ints become int32, Python floats float32, and arrays keep their dtype.

    Args:
        value: A number, a string, an array, or a list of them.
        dtype: The dtype of the result. By default the value's dtype.
        shape: The shape. A single value fills it. The last element of a shorter list is repeated.
        name: The name of the op in the graph.
        verify_shape: Raise unless the value itself has this shape.

    Returns:
        A tensor of the value's shape, or of `shape`.

    Raises:
        DTypeError: the dtype cannot hold the values.
        ShapeError: the values do not fit the shape.

    Op type: `Const`. Source: `tf.constant`.

    >>> import regrad.v1 as tf
    >>> tf.constant([1, 2]).dtype, tf.constant(1.5, name="half").name[:4]
    (tf.int32, 'half')
    """
    array = as_array(value, None if dtype is None else dtypes.as_dtype(dtype))
    if shape is not None:
        array = _filled(array, tuple(TensorShape(shape).as_list()), verify_shape)
    graph = current_graph()
    with graph.naming("Const", name):
        return face(graph.constant(array))


def _filled(array: np.ndarray, shape: tuple[Any, ...], verify: bool) -> np.ndarray:
    size = int(np.prod(shape))
    if (verify and array.shape != shape) or array.size > size or (size and not array.size):
        raise ShapeError(f"{array.size} values of shape {array.shape} do not fit the shape {shape}")
    flat = array.reshape(-1)
    return np.concatenate([flat, np.repeat(flat[-1:], size - flat.size)]).reshape(shape)


def convert_to_tensor(
    value: TensorLike, dtype: dtypes.DTypeLike | None = None, name: str | None = None,
    preferred_dtype: dtypes.DTypeLike | None = None,
) -> Tensor:  # fmt: skip
    """Return a value as a tensor of the graph. A tensor is returned unchanged.

    Args:
        value: A tensor, a variable, an array, a number, or a list of them. A list is stacked.
        dtype: The dtype of the result.
        name: The name of the op in the graph, if the conversion makes an op.
        preferred_dtype: The dtype to use if `dtype` is None and the value can have this dtype.

    Returns:
        A tensor of the value's shape.

    Raises:
        DTypeError: the value is a tensor whose dtype is not `dtype`.
        ArgumentError: the value is an op or a function.
        GraphError: the value is None.

    Source: `tf.convert_to_tensor`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     x = tf.constant(1.0)
    ...     print(tf.convert_to_tensor(x) is x, sess.run(tf.convert_to_tensor([x, 2.0])))
    True [1. 2.]
    """
    wanted = None if dtype is None else dtypes.as_dtype(dtype).base_dtype
    if type(value) in CONVERSIONS:
        return CONVERSIONS[type(value)](value, wanted, name)
    if isinstance(value, TensorShape):
        value = value.as_list()
    if is_tensor(value):
        found = value if isinstance(value, Tensor) else face(rg_read(value))
        if isinstance(found, rg.Tensor):  # an eager tensor becomes a constant
            found = constant(found.numpy(), name=name or "Const")
        if found._symbol.node.op.type == "VariableV2":
            found = face(found._read())
        if wanted is not None and found.dtype.base_dtype != wanted:
            raise ConversionError(
                f"Tensor conversion requested dtype {wanted.name} for Tensor with dtype "
                f"{found.dtype.name}: {found}. Use tf.cast."
            )
        return found
    if isinstance(value, list | tuple) and _holds_tensors(value):
        return CONVERSIONS[Sequence](value, wanted, name)
    if isinstance(value, Operation) or callable(value):
        raise ArgumentError(f"Can't convert {value!r:.80} to a tensor: it has no value")
    if value is None:
        raise GraphError("None values not supported: expected a tensor or a value")
    if wanted is None and preferred_dtype is not None:
        with suppress(DTypeError):
            return constant(value, preferred_dtype, name=name or "Const")
    return constant(value, wanted, name=name or "Const")


def _holds_tensors(values: Sequence[TensorLike]) -> bool:
    return any(
        _holds_tensors(v) if isinstance(v, list | tuple) else is_tensor(v) or isinstance(v, Dim)
        for v in values
    )


# -- building ops --------------------------------------------------------------------------------


class ConversionError(DTypeError, ValueError):
    """A tensor has another dtype than requested: TensorFlow raises a ValueError or a TypeError."""


def same_dtype(name: str, *values: TensorLike) -> list[Any]:
    """Return the values as tensors of one dtype, which is the dtype of the first tensor.

    Numbers take this dtype. Raises TypeError for tensors of different dtypes.
    """
    if is_eager(*values):
        return list(values)
    known = [v for v in values if is_tensor(v) and not is_eager(v)]
    wanted = convert_to_tensor(known[0]).dtype.base_dtype if known else None
    made = []
    for i, value in enumerate(values):
        operand = "xyz"[i] if i < 3 else None  # for the names `add/x` and `add/y`
        try:
            made.append(convert_to_tensor(value, wanted, operand))
        except DTypeError as error:
            if wanted is None:
                raise
            raise ConversionError(
                f"Input {i} of {name!r} has another dtype than {wanted.name}, which the others "
                f"have: {error}"
            ) from None
        wanted = wanted or made[0].dtype
    return made


def is_eager(*values: TensorLike) -> bool:
    """Return whether the values contain tensors and all of them are eager Tensors."""
    known = [v for v in values if is_tensor(v)]
    return bool(known) and all(isinstance(v, rg.Tensor) and not is_symbolic(v) for v in known)


def build(
    op_type: str, name: str | None, function: Callable[..., Any], *tensors: TensorLike, **attrs: Any
) -> Any:
    """Call a regrad function, and name the op of type `op_type` that it makes.

    `build` converts the arguments to tensors of the graph. If all are eager Tensors, it returns
    the eager result instead.
    """
    if is_eager(*tensors):
        return function(*tensors, **attrs)
    xs = [t if t is None else convert_to_tensor(t)._read() for t in tensors]
    graph = current_graph()
    with graph.naming(op_type, name):
        return face(function(*xs, **attrs))


def static_value(value: TensorLike, what: str) -> Any:
    """Return an attribute, such as an axis, as Python ints. A tensor's value must be known."""
    if value is None or isinstance(value, bool):
        return value
    sizes = as_sizes(value)
    if [*dims.parts(sizes)]:
        raise GraphError(
            f"{what} must be known when the graph is built; {value} is known only in the run"
        )
    return sizes


def as_sizes(value: TensorLike) -> Any:
    """Return sizes (numbers, Dimensions, tensors, or one tensor) as an attribute of an op.

    Numbers stay numbers. A size that is known only in the run is read in the run.
    """
    if isinstance(value, TensorShape):
        value = value.as_list()
    if isinstance(value, np.ndarray) or (is_eager(value) and value.dtype.kind in "iu"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return tuple([as_sizes(v) for v in value])
    if isinstance(value, Dim | UnknownRank):
        return value
    if is_tensor(value):
        x = convert_to_tensor(value)._read()
        node = x._data.node
        if x._data.content is None and node.op is SHAPE:
            return node.xs[0]._data.shape  # the tensor has unknown rank
        return as_attribute(x)
    if value is None:
        raise GraphError("a size is None here; pass a number, -1 or tf.shape(x)[i]")
    return int(value)
