"""Elementwise functions under TensorFlow's names, such as `tf.exp`, `tf.add` and `tf.cast`.

Mixing tensors of different dtypes raises TypeError. Python numbers take the dtype of the other
operand. Functions that TensorFlow registers for floats only raise DTypeError for integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

import regrad as rg
from regrad.core.op import TensorLike
from regrad.errors import GraphError, ShapeError, UnknownShapeError
from regrad.graph.deferred import deferrable
from regrad.v1 import dtypes
from regrad.v1.graph.conversion import build, same_dtype
from regrad.v1.graph.forms import dtype_of, is_eager, one_op, rank_of, scope, tensor
from regrad.v1.graph.kinds import ANY, BOOLS, FLOATS, INEXACT, NUMBERS, REALS, check_kinds
from regrad.v1.graph.rows import define, elementwise, listed, row, written
from regrad.v1.graph.tensors import is_tensor
from regrad.v1.graph.values import whole_divisor

# -- functions of regrad --------------------------------------------------------------------------


@row("tf", "Abs", rg.abs, NUMBERS)
def abs(x):
    """Return the absolute value. The gradient at 0 is 0.

    Returns:
        A tensor of x's shape and dtype; complex numbers have real absolute values.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.abs(rg.asarray([-2.0, 3.0]))
    Tensor([2., 3.], dtype=float32)
    """


negative, sign, square = elementwise(NUMBERS, rg.negative, rg.sign, rg.square)
sqrt, rsqrt, reciprocal, exp, expm1, log, log1p = elementwise(
    INEXACT, rg.sqrt, rg.rsqrt, rg.reciprocal, rg.exp, rg.expm1, rg.log, rg.log1p
)
sin, cos, tan, asin, acos, atan = elementwise(
    INEXACT, rg.sin, rg.cos, rg.tan, rg.asin, rg.acos, rg.atan
)
sinh, cosh, tanh, asinh, acosh, atanh = elementwise(
    INEXACT, rg.sinh, rg.cosh, rg.tanh, rg.asinh, rg.acosh, rg.atanh
)
sigmoid, realdiv = elementwise(INEXACT, rg.nn.sigmoid, realdiv=rg.divide)
log_sigmoid, erf, erfc, lgamma, digamma = elementwise(
    FLOATS, rg.nn.log_sigmoid, rg.erf, rg.erfc, rg.lgamma, rg.digamma
)
ceil, floor = elementwise(FLOATS, rg.ceil, rg.floor)
round, maximum, minimum = elementwise(REALS, rg.round, rg.maximum, rg.minimum)


@row("tf", "Round", rg.round, FLOATS, scope="Rint")
def rint(x):
    """Return the nearest integer, rounding ties to even.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.rint(rg.asarray([-1.5, 2.5, 0.7]))
    Tensor([-2.,  2.,  1.], dtype=float32)
    """


is_nan, is_inf, is_finite = elementwise(
    FLOATS, is_nan=rg.isnan, is_inf=rg.isinf, is_finite=rg.isfinite
)

add, subtract, multiply, pow, squared_difference = elementwise(
    NUMBERS, rg.add, rg.subtract, rg.multiply, rg.pow, rg.squared_difference
)
(atan2,) = elementwise(FLOATS, rg.atan2, names="y x")
equal, not_equal = elementwise(ANY, rg.equal, rg.not_equal)
less, less_equal, greater, greater_equal = elementwise(
    REALS, rg.less, rg.less_equal, rg.greater, rg.greater_equal
)
logical_not, logical_and, logical_or, logical_xor = elementwise(
    BOOLS, rg.logical_not, rg.logical_and, rg.logical_or, rg.logical_xor
)


@row("tf", "FloorDiv", kinds=REALS)
def floor_div(x, y):
    """Return `x // y`, rounded down. An integer y must not be 0. The gradient is 0.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.floor_div(rg.asarray([7.0, -3.0]), rg.asarray([2.0, 2.0]))
    Tensor([ 3., -2.], dtype=float32)
    """
    return rg.floor_divide(x, whole_divisor("FloorDiv", y))


@row("tf", "FloorDiv", kinds=REALS, scope="floordiv")
def floordiv(x, y):
    """Return `x // y`, rounded down. An integer y must not be 0. The gradient is 0.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.floordiv(rg.asarray([7.0, -3.0]), rg.asarray([2.0, 2.0]))
    Tensor([ 3., -2.], dtype=float32)
    """
    return rg.floor_divide(x, whole_divisor("floordiv", y))


@row("tf", "FloorMod", lambda a, b: rg.remainder(a, whole_divisor("floormod", b)), REALS)
def floormod(x, y):
    """Return `x % y`, with the sign of y. An integer y must not be 0.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.floormod(rg.asarray([7.0, -3.0]), rg.asarray([2.0, 2.0]))
    Tensor([1., 1.], dtype=float32)
    """


mod = floormod


@row("tf.math", "Xlogy", rg.xlogy, INEXACT)
def xlogy(x, y):
    """Return `x * log(y)`. Where x is 0, the result and the gradient are 0.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.math.xlogy(rg.asarray([0.0, 2.0]), rg.asarray([0.0, 1.0]))
    Tensor([0., 0.], dtype=float32)
    """


@row("tf.math", "Xdivy", rg.xdivy, INEXACT)
def xdivy(x, y):
    """Return `x / y`. Where x is 0, the result and the gradient are 0.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.math.xdivy(rg.asarray([0.0, 2.0]), rg.asarray([0.0, 4.0]))
    Tensor([0. , 0.5], dtype=float32)
    """


@row("tf", "RealDiv", kinds=NUMBERS, scope="truediv")
def truediv(x, y):
    """Return `x / y`. Integers of 8 and 16 bits are cast to float32 first, others to float64.

    (Eager integers are divided as `regrad.divide` does.)

    >>> import regrad.v1 as tf
    >>> tf.truediv(tf.constant([1, 2]), 4).dtype
    tf.float64
    """
    if not is_eager(x, y) and x.dtype.kind in "iu":
        quotient = np.float32 if x.dtype.itemsize < 4 else np.float64
        x, y = rg.astype(x, quotient), rg.astype(y, quotient)
    return rg.divide(x, y)


divide = truediv


def div(x: TensorLike, y: TensorLike, name: str | None = None) -> Any:
    """Return `x / y` as in Python 2, where the quotient of integers is rounded down.

    Args:
        x, y: Tensors, arrays or numbers of one dtype. Shapes broadcast.
        name: The name of the op in the graph, by default 'div'.

    Returns:
        A tensor of the arguments' dtype; an eager Tensor if they are eager.

    Raises:
        DTypeError: in graph mode, an argument is not numeric, or the dtypes differ.
        ShapeError: the shapes do not broadcast.

    Source: `tf.div`.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.div(rg.asarray([7, -7]), 2)
    Tensor([ 3, -4], dtype=int64)
    """
    known = x if is_tensor(x) else tensor(y) if is_tensor(y) else tensor(x)
    return (floor_div if dtype_of(known).kind in "iu" else realdiv)(x, y, name=name or "div")


def _truncate_divide(x: rg.Tensor, y: rg.Tensor) -> rg.Tensor:
    """Return `x / y` rounded towards zero, like integer division in C. It has no gradient."""
    x, y = rg.stop_gradient(x), rg.stop_gradient(whole_divisor("TruncateDiv", y))
    return rg.sign(x) * rg.sign(y) * (rg.abs(x) // rg.abs(y))


@row("tf", None, kinds=INEXACT)
def div_no_nan(x: rg.Tensor, y: rg.Tensor) -> rg.Tensor:
    """Return `x / y`. Where y is 0, the result and the gradient are 0.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.div_no_nan(rg.asarray([7.0, -3.0]), rg.asarray([2.0, 0.0]))
    Tensor([3.5, 0. ], dtype=float32)
    """
    zero = rg.equal(y, 0)  # (y may be a list)
    return rg.where(zero, 0, x / rg.where(zero, 1, y))


@row("tf", None, _truncate_divide, REALS, scope="TruncateDiv")
def truncatediv(x, y):
    """Return `x / y` rounded towards zero, like integer division in C.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.truncatediv(rg.asarray([7.0, -3.0]), rg.asarray([2.0, 2.0]))
    Tensor([ 3., -1.], dtype=float32)
    """


@row("tf", None, kinds=REALS, scope="TruncateMod")
def truncatemod(x: rg.Tensor, y: rg.Tensor) -> rg.Tensor:
    """Return the remainder of `truncatediv`, which has the sign of x.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.truncatemod(rg.asarray([7.0, -3.0]), rg.asarray([2.0, 2.0]))
    Tensor([ 1., -1.], dtype=float32)
    """
    return x - _truncate_divide(x, y) * y


def scalar_mul(scalar: TensorLike, x: TensorLike, name: str | None = None) -> Any:
    """Return `scalar * x`.

    Args:
        scalar: A number, or a tensor of rank 0.
        x: A tensor or array of numbers, or a number.

    Returns:
        A tensor of x's shape and dtype.

    Raises:
        ShapeError: scalar does not have rank 0, or its rank is unknown.

    Op type: `Mul`. Source: `tf.scalar_mul`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.scalar_mul(3.0, tf.constant([1.0, 2.0]))))
    [3. 6.]
    """
    if (rank_of(scalar) if is_tensor(scalar) else np.ndim(scalar)) != 0:
        raise ShapeError(f"Only scalar multiply works, got {scalar}")
    return one_op("Mul", name or "mul", rg.multiply, scalar, x, kinds=NUMBERS)


# -- many tensors ----------------------------------------------------------------------------------


@written("tf", "AddN: * | N T")
def add_n(inputs: Sequence[TensorLike], name: str | None = None) -> Any:
    """Return the sum of a list of tensors of one shape and dtype.

    Args:
        inputs: Tensors or arrays of numbers.

    Returns:
        A tensor of their shape and dtype.

    Raises:
        GraphError: the list is empty, or not a list.

    Op type: `AddN`. Source: `tf.add_n`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.add_n([[1.0, 2.0], [10.0, 20.0]])))
    [11. 22.]
    """
    if not isinstance(inputs, list | tuple) or not inputs:
        raise GraphError(
            "inputs must be a list of at least one Tensor with the same dtype and shape"
        )
    if len(inputs) == 1:
        x = tensor(inputs[0])
        return one_op("Identity", name, rg.identity, x) if name else x
    return one_op("AddN", name, lambda *xs: rg.add_n(xs), *inputs, kinds=NUMBERS)


@written("tf")
def accumulate_n(inputs: Sequence[TensorLike], shape=None, tensor_dtype=None, name=None):
    """Return the sum of a list of tensors, like `add_n`.

    Args:
        inputs: Tensors or arrays of numbers, of one shape and dtype.
        shape, tensor_dtype: Without effect.

    Returns:
        A tensor of their shape and dtype.

    Raises:
        GraphError: the list is empty, or not a list.

    Op type: `AddN`. Source: `tf.accumulate_n`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.accumulate_n([[1.0, 2.0], [10.0, 20.0]])))
    [11. 22.]
    """
    return add_n(inputs, name or "AccumulateNV2")


# One op, as in TensorFlow 1.8. Later versions make a Minimum and a Maximum.


@row("tf", "ClipByValue", rg.clip, REALS, scope="clip_by_value")
def clip_by_value(t, clip_value_min, clip_value_max):
    """Return t, clipped to the range. At both bounds the gradient passes.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.clip_by_value(rg.asarray([-2.0, 0.5, 3.0]), clip_value_min=0.0, clip_value_max=1.0)
    Tensor([0. , 0.5, 1. ], dtype=float32)
    """


@written("tf", "SelectV2: * | T=Tindices")
def where(condition, x=None, y: Any = None, name=None):
    """Return x where the condition holds, y elsewhere. A condition of rank 1 selects rows.

    Without x and y, return the indices where the condition holds, as index vectors of int64. x, y
    and the condition broadcast. (TensorFlow 1 requires equal shapes.)

    Args:
        condition: A tensor or array of bools.
        x, y: Tensors, arrays or numbers of one dtype. Pass both or neither.

    Returns:
        With x and y, a tensor of their dtype, of the shape to which all arguments broadcast.
        Without them, a tensor of the shape `(count, rank)`. The count is known only in the run.

    Raises:
        GraphError: the caller passes only one of x and y.

    Op types: `SelectV2`, `Where`. Source: `tf.where`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     x = tf.constant([-1.0, 2.0])
    ...     print(sess.run(tf.where(x > 0.0, x, tf.zeros_like(x))), sess.run(tf.where(x > 0.0)))
    [0. 2.] [[1]]
    """
    if (x is None) != (y is None):
        raise GraphError("x and y must both be non-None or both be None.")
    if x is None:
        return one_op("Where", name, rg.find_op("Where").function, condition)
    if is_eager(condition, x, y):
        return _select(condition, x, y)
    with scope(name or "Select") as whole:
        condition = tensor(condition, dtypes.bool, name="condition")
        x, y = same_dtype("Select", x, y)
        return build("SelectV2", whole, _select, condition, x, y)


def _select(condition: rg.Tensor, x: rg.Tensor, y: rg.Tensor) -> Any:
    try:
        condition = _for_rows(condition, x, y)
    except UnknownShapeError:  # the ranks are read in the run, which needs no gradient
        ranked = rg.stop_gradient(x), rg.stop_gradient(y)
        condition = deferrable(_for_rows)(condition, *ranked)
    return rg.where(condition, x, y)


def _for_rows(condition: rg.Tensor, x: rg.Tensor, y: rg.Tensor) -> rg.Tensor:
    """Return the condition. A condition of rank 1 gets the missing axes of x and y."""
    if np.ndim(condition) == 1 and (rank := max(np.ndim(x), np.ndim(y))) > 1:
        return rg.expand_dims(condition, tuple(range(1, rank)))
    return condition


# -- casts -----------------------------------------------------------------------------------------


@written("tf", "Cast: * | SrcT DstT Truncate=no")
def cast(x: TensorLike, dtype: dtypes.DTypeLike, name: str | None = None) -> Any:
    """Return x cast to another dtype. A tensor of this dtype is returned unchanged.

    Args:
        x: A tensor, array or number.
        dtype: The dtype of the result.
        name: The name of the op in the graph, by default 'Cast'.

    Returns:
        A tensor of x's shape; an eager Tensor if x is eager.

    Raises:
        TypeError: `dtype` is not a dtype.

    Source: `tf.cast`.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.cast(rg.asarray([1.5, -1.5]), tf.int32)
    Tensor([ 1, -1], dtype=int32)
    """
    target = dtypes.to_numpy(dtype)
    if is_tensor(x) and dtype_of(x) == target:
        return tensor(x)
    return one_op("Cast", name, lambda x: rg.astype(x, target), x)


def _caster(name: str, dtype: dtypes.DType) -> Callable[..., Any]:
    declaration = f"tf.{name}(x, name='{name.title().replace('_', '')}')"
    doc = f"Return x as {dtype.name}.\n\nReturns:\n    A tensor of x's shape."
    result = repr(rg.asarray(np.asarray([1, 0], dtypes.to_numpy(dtype))))
    call = partial(_cast_to, dtype)
    return define(declaration, "Cast", rg.astype, ANY, "[True, False]", result, doc=doc, call=call)


def _cast_to(dtype: dtypes.DType, op_type: str, name: str, function: Any, x: TensorLike) -> Any:
    return cast(x, dtype, name=name)


to_float = _caster("to_float", dtypes.float32)
to_double = _caster("to_double", dtypes.float64)
to_int32 = _caster("to_int32", dtypes.int32)
to_int64 = _caster("to_int64", dtypes.int64)
to_complex64 = _caster("to_complex64", dtypes.complex64)
to_complex128 = _caster("to_complex128", dtypes.complex128)


def saturate_cast(value: TensorLike, dtype: dtypes.DTypeLike, name: str | None = None) -> Any:
    """Return a value cast to another dtype, after clipping it to the limits of that dtype.

    Args:
        value: A tensor or array of numbers, or a number.

    Returns:
        A tensor of the value's shape.

    Raises:
        DTypeError: the value does not hold real numbers.

    A composition. Source: `tf.saturate_cast`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.saturate_cast(tf.constant([-5.0, 300.0]), tf.uint8)))
    [  0 255]
    """
    with scope(name or "saturate_cast", value) as whole:
        value = tensor(value, name="value")
        low, high = _limits(dtype_of(value)), _limits(dtypes.to_numpy(dtype))
        if low[0] < high[0]:
            value = maximum(value, _inside(high[0], dtype_of(value)))
        if low[1] > high[1]:
            value = minimum(value, _inside(high[1], dtype_of(value)))
        return cast(value, dtype, name=whole)


def _limits(dtype: np.dtype) -> tuple[Any, Any]:
    info = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    return info.min, info.max


def _inside(limit: float, dtype: np.dtype) -> np.ndarray:
    """Return the limit in this dtype, or the next number towards zero if it is not exact."""
    found = np.asarray(limit).astype(dtype)
    exact = dtype.kind != "f" or not isinstance(limit, int) or int(found) == limit
    return np.asarray(found if exact else np.nextafter(found, dtype.type(0)))


# -- complex numbers -------------------------------------------------------------------------------


def _if_complex(op_type: str, name: str, function: Callable[..., Any], x: TensorLike) -> Any:
    """Call `one_op` for a complex tensor. Return a real tensor unchanged."""
    x = tensor(x)
    if dtype_of(x).kind == "c":
        return one_op(op_type, name, function, x)
    check_kinds(op_type, NUMBERS, x)
    return x


@row("tf", "Real: * | T Tout=dtype", rg.real, call=_if_complex)
def real(input):
    """Return the real part. A real tensor is returned unchanged.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.real(rg.asarray([1.0 + 2.0j]))
    Tensor([1.], dtype=float32)
    """


@written("tf", "Imag: * | T Tout=dtype")
def imag(input: TensorLike, name: str | None = None) -> Any:
    """Return the imaginary part, which is zeros for a real tensor.

    Args:
        input: A tensor or array of numbers, or a number.

    Returns:
        A tensor of the input's shape, of real floats.

    Op type: `Imag`. Source: `tf.imag`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.imag(tf.constant([1.0 + 2.0j]))))
    [2.]
    """
    x = tensor(input)
    if dtype_of(x).kind == "c":
        return one_op("Imag", name, rg.imag, x)
    return one_op("ZerosLike", name or "Imag", rg.zeros_like, x, kinds=NUMBERS)


@row("tf", "Conj", rg.conj, call=_if_complex)
def conj(x):
    """Return the complex conjugate. A real tensor is returned unchanged.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.conj(rg.asarray([1.0 + 2.0j]))
    Tensor([1.-2.j], dtype=complex64)
    """


def _angle(x: rg.Tensor) -> rg.Tensor:
    """Return the angles of complex numbers, from -π to π, as real floats of the same shape."""
    parts = (rg.imag(x), rg.real(x)) if dtype_of(x).kind == "c" else (rg.zeros_like(x), x)
    return rg.atan2(*parts)


@row("tf", None, kinds=FLOATS, scope="Complex")
def complex(real: rg.Tensor, imag: rg.Tensor) -> rg.Tensor:
    """Return complex numbers (complex64, complex128) from their parts (float32, float64).

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.complex(rg.asarray([1.0]), rg.asarray([2.0]))
    Tensor([1.+2.j], dtype=complex64)
    """
    kind = np.result_type(dtype_of(rg.asarray(real)), np.complex64)
    return rg.astype(real, kind) + 1j * rg.astype(imag, kind)


angle = define("tf.angle(input)", None, _angle, INEXACT, "[2.0j]", "[1.5707964]", scope="Angle")
__all__ = listed(__name__, "div divide mod saturate_cast scalar_mul")
