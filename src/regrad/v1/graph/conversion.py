"""Conversion of values to tensors of the graph and attributes of ops, and the building of ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import regrad as rg
from regrad.core import numbers
from regrad.core.dims import Dim, UnknownRank
from regrad.core.tensor import TensorLike
from regrad.errors import ArgumentError, DTypeError, GraphError, ShapeError
from regrad.graph.constants import as_attribute, rely
from regrad.graph.graph import is_symbolic
from regrad.graph.size_ops import SHAPE
from regrad.v1 import dtypes
from regrad.v1.dtypes import DType
from regrad.v1.graph.graphs import FACES, current_graph
from regrad.v1.graph.static_shapes import ShapeLike, TensorShape
from regrad.v1.graph.tensors import CONVERSIONS, Operation, Tensor, face, is_tensor, rg_read

__all__ = ["constant", "convert_to_tensor"]


def as_array(value: TensorLike, dtype: DType | None = None) -> np.ndarray:
    """Return a value as an array. Python ints become int32 and floats float32."""
    wanted = None if dtype is None else dtype._dtype
    if isinstance(value, str | bytes):
        value = np.array(value if isinstance(value, bytes) else value.encode(), object)
    plain = not isinstance(value, np.ndarray | np.generic)
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ShapeError(f"a list of unequal rows is not a tensor: {error}") from None
    is_number = wanted is None or wanted.kind != "O"
    if plain and is_number and numbers.integers(array, value) is not None:
        return numbers.under(value, np.dtype(np.int64) if wanted is None else wanted)
    if array.dtype.kind in "OSU":
        if wanted is not None and wanted.kind != "O":
            raise _mismatch(value, "string", dtype)
        return _as_bytes(array)
    if plain and wanted is None:
        array = _converted(array, np.dtype(_python_dtype(array, value)))
    if wanted is None or wanted == array.dtype:
        return np.array(array)
    if not _fits(array, wanted, plain):
        raise _mismatch(value, array.dtype.name, dtype)
    return _converted(array, wanted) if plain else array.astype(wanted)


def _converted(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return Python numbers as an array of a dtype. Raises if the dtype cannot hold them."""
    return array.astype(dtype) if dtype.kind == "O" else numbers.under(array, dtype)


def _as_bytes(array: np.ndarray) -> np.ndarray:
    flat = [v.encode() if isinstance(v, str) else v for v in array.reshape(-1).tolist()]
    if not all(isinstance(v, bytes) for v in flat):
        raise DTypeError(f"a tensor holds numbers, bools or strings, got {array!r:.80}")
    made = np.empty(len(flat), object)
    made[:] = flat
    return made.reshape(array.shape)


def _python_dtype(array: np.ndarray, value: TensorLike) -> Any:
    """Return the dtype for Python numbers. NumPy scalars in a list keep their dtype."""
    if array.dtype.kind == "f" and not _holds_numpy(value):
        return np.float32
    if array.dtype.kind in "iu" and not _holds_numpy(value):
        small = array.size == 0 or (array.min() >= -(2**31) and array.max() < 2**31)
        return np.int32 if small else np.int64
    return array.dtype if array.size else np.float32


def _holds_numpy(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and _holds_numpy(value[0])
    return isinstance(value, np.ndarray | np.generic)


def _fits(array: np.ndarray, wanted: np.dtype, plain: bool) -> bool:
    """Return whether values may become a dtype. Ints may become floats, fractions not ints."""
    if array.dtype.kind == "b" or wanted.kind == "b":
        return array.dtype.kind == wanted.kind
    order = "iufc"
    wider = order.index(wanted.kind) >= order.index(array.dtype.kind)
    return wider or (array.dtype.kind in "iu" and wanted.kind in "iu") or array.size == 0


def _mismatch(value: TensorLike, got: str, wanted: DType | None) -> DTypeError:
    return DTypeError(
        f"Expected {wanted.name if wanted else 'numbers'}, got {value!r:.60} of type {got!r}."
    )


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
    if isinstance(value, Operation):
        raise ArgumentError(f"Can't convert Operation {value.name!r} to Tensor: it has no value")
    if isinstance(value, list | tuple) and _holds_tensors(value):
        return CONVERSIONS[Sequence](value, wanted, name)
    if callable(value):
        raise ArgumentError(f"expected a tensor or a value, got the function {value!r}")
    if value is None:
        raise GraphError("None values not supported: expected a tensor or a value")
    prefer = None if preferred_dtype is None else dtypes.as_dtype(preferred_dtype)
    if wanted is None and prefer is not None:
        try:
            return constant(value, prefer, name=name or "Const")
        except DTypeError:
            pass
    return constant(value, wanted, name=name or "Const")


def _holds_tensors(values: Sequence[TensorLike]) -> bool:
    nested = [v for v in values if isinstance(v, list | tuple)]
    return any(is_tensor(v) or isinstance(v, Dim) for v in values) or any(
        map(_holds_tensors, nested)
    )


# -- building ops --------------------------------------------------------------------------------


def same_dtype(name: str, *values: TensorLike) -> list[Any]:
    """Return the values as tensors of one dtype, which is the dtype of the first tensor.

    Numbers take this dtype. Raises TypeError for tensors of different dtypes.
    """
    known = [v for v in values if is_tensor(v)]
    if not known:
        first = convert_to_tensor(values[0], name=_operand_name(0))
        others = enumerate(values[1:], 1)
        return [first, *[convert_to_tensor(v, first.dtype, _operand_name(i)) for i, v in others]]
    if all(_is_eager(v) for v in known):
        return list(values)
    wanted = next(convert_to_tensor(v) for v in known if not _is_eager(v)).dtype.base_dtype
    made = []
    for i, value in enumerate(values):
        try:
            made.append(convert_to_tensor(value, wanted, name=_operand_name(i)))
        except DTypeError as error:
            raise ConversionError(
                f"Input {i} of {name!r} has another dtype than {wanted.name}, which the others "
                f"have: {error}"
            ) from None
    return made


def _operand_name(i: int) -> str | None:
    """Return the name of an operand's constant: x, y or z, for `add/x` and `add/y`."""
    return "xyz"[i] if i < 3 else None


def _is_eager(value: Any) -> bool:
    return isinstance(value, rg.Tensor) and not is_symbolic(value)


def build(
    op_type: str, name: str | None, function: Callable[..., Any], *tensors: TensorLike, **attrs: Any
) -> Any:
    """Call a regrad function, and name the op of type `op_type` that it makes.

    `build` converts the arguments to tensors of the graph. If all are eager Tensors, it returns
    the eager result instead.
    """
    if any(_is_eager(t) for t in tensors) and all(_is_eager(t) or t is None for t in tensors):
        return function(*tensors, **attrs)
    xs = [t if t is None else convert_to_tensor(t)._read() for t in tensors]
    graph = current_graph()
    with graph.naming(op_type, name):
        return face(function(*xs, **attrs))


def static_value(value: TensorLike, what: str) -> Any:
    """Return an attribute, such as an axis, as Python ints. A tensor's value must be known."""
    if isinstance(value, Tensor):
        content = value._symbol.content
        if content is None or any(isinstance(n, Dim) for n in content.flat):
            raise GraphError(
                f"{what} must be known when the graph is built; {value} is known only in the run"
            )
        rely(value._symbol)
        value = content
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return tuple(static_value(v, what) for v in value)
    return value if value is None or isinstance(value, bool) else int(value)


def as_sizes(value: TensorLike) -> Any:
    """Return sizes (numbers, Dimensions, tensors, or one tensor) as an attribute of an op.

    Numbers stay numbers. A size that is known only in the run is read in the run.
    """
    if isinstance(value, TensorShape):
        value = value.as_list()
    if isinstance(value, np.ndarray) or (_is_eager(value) and value.dtype.kind in "iu"):
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


class ConversionError(DTypeError, ValueError):
    """A tensor has another dtype than requested: TensorFlow raises a ValueError or a TypeError."""


FACES[object] = convert_to_tensor
