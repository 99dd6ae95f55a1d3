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
from regrad.core.tensor import Tensor
from regrad.errors import GraphError, ShapeError, UnknownShapeError
from regrad.graph.deferred import deferrable
from regrad.v1 import dtypes
from regrad.v1.graph.conversion import build, same_dtype
from regrad.v1.graph.forms import dtype_of, is_eager, one_op, rank_of, scope, tensor
from regrad.v1.graph.kinds import ANY, BOOLS, FLOATS, INEXACT, NUMBERS, REALS, check_kinds
from regrad.v1.graph.rows import define, listed, row, written
from regrad.v1.graph.tensors import is_tensor
from regrad.v1.graph.values import whole_divisor

# Arrays that several examples use.
SPECIAL = "[1.0, float('nan'), float('inf')]"
PAIR = "[7.0, -3.0]", "[2.0, 2.0]"
INTS = "[1, 2]", "[1, 3]"
BITS = "[True, True]", "[True, False]"

# -- one tensor ------------------------------------------------------------------------------------


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


negative = define("tf.negative(x)", "Neg", rg.negative, NUMBERS, "[-2.0, 3.0]", "[ 2., -3.]")
sign = define("tf.sign(x)", "Sign", rg.sign, NUMBERS, "[-2.0, 3.0]", "[-1.,  1.]")
square = define("tf.square(x)", "Square", rg.square, NUMBERS, "[-2.0, 3.0]", "[4., 9.]")
round = define("tf.round(x)", "Round", rg.round, REALS, "[-1.5, 2.5, 0.7]", "[-2.,  2.,  1.]")
sqrt = define("tf.sqrt(x)", "Sqrt", rg.sqrt, INEXACT, "[4.0, 16.0]", "[2., 4.]")
rsqrt = define("tf.rsqrt(x)", "Rsqrt", rg.rsqrt, INEXACT, "[4.0, 16.0]", "[0.5 , 0.25]")


@row("tf", "Reciprocal", rg.reciprocal, INEXACT)
def reciprocal(x):
    """Return `1 / x`.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.reciprocal(rg.asarray([4.0, 16.0]))
    Tensor([0.25  , 0.0625], dtype=float32)
    """


exp = define("tf.exp(x)", "Exp", rg.exp, INEXACT, "[0.0, 0.5]", "[1.       , 1.6487212]")
expm1 = define("tf.expm1(x)", "Expm1", rg.expm1, INEXACT, "[0.0, 0.5]", "[0.       , 0.6487213]")
log = define("tf.log(x)", "Log", rg.log, INEXACT, "[1.0, 2.0]", "[0.       , 0.6931472]")
log1p = define("tf.log1p(x)", "Log1p", rg.log1p, INEXACT, "[0.0, 1.0]", "[0.       , 0.6931472]")
sin = define("tf.sin(x)", "Sin", rg.sin, INEXACT, "[0.0, 0.5]", "[0.        , 0.47942555]")
cos = define("tf.cos(x)", "Cos", rg.cos, INEXACT, "[0.0, 0.5]", "[1.        , 0.87758255]")
tan = define("tf.tan(x)", "Tan", rg.tan, INEXACT, "[0.0, 0.5]", "[0.       , 0.5463025]")
asin = define("tf.asin(x)", "Asin", rg.asin, INEXACT, "[0.0, 0.5]", "[0.       , 0.5235988]")
acos = define("tf.acos(x)", "Acos", rg.acos, INEXACT, "[0.0, 0.5]", "[1.5707964, 1.0471976]")
atan = define("tf.atan(x)", "Atan", rg.atan, INEXACT, "[0.0, 0.5]", "[0.       , 0.4636476]")
sinh = define("tf.sinh(x)", "Sinh", rg.sinh, INEXACT, "[0.0, 0.5]", "[0.       , 0.5210953]")
cosh = define("tf.cosh(x)", "Cosh", rg.cosh, INEXACT, "[0.0, 0.5]", "[1.       , 1.1276261]")
tanh = define("tf.tanh(x)", "Tanh", rg.tanh, INEXACT, "[0.0, 0.5]", "[0.       , 0.4621172]")
asinh = define("tf.asinh(x)", "Asinh", rg.asinh, INEXACT, "[0.0, 0.5]", "[0.       , 0.4812118]")
acosh = define("tf.acosh(x)", "Acosh", rg.acosh, INEXACT, "[1.0, 2.0]", "[0.      , 1.316958]")
atanh = define("tf.atanh(x)", "Atanh", rg.atanh, INEXACT, "[0.0, 0.5]", "[0.        , 0.54930615]")


@row("tf", "Sigmoid", rg.nn.sigmoid, INEXACT)
def sigmoid(x):
    """Return `1 / (1 + exp(-x))`.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.sigmoid(rg.asarray([0.0, 0.5]))
    Tensor([0.5       , 0.62245935], dtype=float32)
    """


@row("tf", "LogSigmoid", rg.nn.log_sigmoid, FLOATS)
def log_sigmoid(x):
    """Return `log(sigmoid(x))`, without overflow.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.log_sigmoid(rg.asarray([0.0, 0.5]))
    Tensor([-0.6931472, -0.474077 ], dtype=float32)
    """


erf = define("tf.erf(x)", "Erf", rg.erf, FLOATS, "[0.0, 0.5]", "[0.       , 0.5204999]")
erfc = define("tf.erfc(x)", "Erfc", rg.erfc, FLOATS, "[0.0, 0.5]", "[1.        , 0.47950011]")
lgamma = define("tf.lgamma(x)", "Lgamma", rg.lgamma, FLOATS, "[1.0, 2.0]", "[0., 0.]")


@row("tf", "Digamma", rg.digamma, FLOATS)
def digamma(x):
    """Return the derivative of `lgamma`.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.digamma(rg.asarray([1.0, 2.0]))
    Tensor([-0.5772157 ,  0.42278433], dtype=float32)
    """


ceil = define("tf.ceil(x)", "Ceil", rg.ceil, FLOATS, "[-1.5, 2.5, 0.7]", "[-1.,  3.,  1.]")
floor = define("tf.floor(x)", "Floor", rg.floor, FLOATS, "[-1.5, 2.5, 0.7]", "[-2.,  2.,  0.]")


@row("tf", "Round", rg.round, FLOATS, scope="Rint")
def rint(x):
    """Return the nearest integer, rounding ties to even.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.rint(rg.asarray([-1.5, 2.5, 0.7]))
    Tensor([-2.,  2.,  1.], dtype=float32)
    """


is_nan = define("tf.is_nan(x)", "IsNan", rg.isnan, FLOATS, SPECIAL, "[False,  True, False]")
is_inf = define("tf.is_inf(x)", "IsInf", rg.isinf, FLOATS, SPECIAL, "[False, False,  True]")


@row("tf", "IsFinite", rg.isfinite, FLOATS)
def is_finite(x):
    """Return True where x is neither infinite nor NaN.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.is_finite(rg.asarray([1.0, float('nan'), float('inf')]))
    Tensor([ True, False, False], dtype=bool)
    """


@row("tf", "LogicalNot", rg.logical_not, BOOLS)
def logical_not(x):
    """Return True where x is 0 or False.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.logical_not(rg.asarray([True, False]))
    Tensor([False,  True], dtype=bool)
    """


# -- two tensors -----------------------------------------------------------------------------------

add = define("tf.add(x, y)", "AddV2", rg.add, NUMBERS, *PAIR, "[ 9., -1.]", scope="Add")
subtract = define("tf.subtract(x, y)", "Sub", rg.subtract, NUMBERS, *PAIR, "[ 5., -5.]")
multiply = define("tf.multiply(x, y)", "Mul", rg.multiply, NUMBERS, *PAIR, "[14., -6.]")
realdiv = define("tf.realdiv(x, y)", "RealDiv", rg.divide, INEXACT, *PAIR, "[ 3.5, -1.5]")


def _floor_divide(x: Tensor, y: Tensor) -> Tensor:
    """Return `x // y`, rounded down. An integer y must not be 0. The gradient is 0."""
    return rg.floor_divide(x, whole_divisor("FloorDiv", y))


FLOOR = "FloorDiv", _floor_divide, REALS, *PAIR, "[ 3., -2.]"
floor_div = define("tf.floor_div(x, y)", *FLOOR)
floordiv = define("tf.floordiv(x, y)", *FLOOR, scope="floordiv")


@row("tf", "FloorMod", lambda a, b: rg.remainder(a, whole_divisor("floormod", b)), REALS)
def floormod(x, y):
    """Return `x % y`, with the sign of y. An integer y must not be 0.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.floormod(rg.asarray([7.0, -3.0]), rg.asarray([2.0, 2.0]))
    Tensor([1., 1.], dtype=float32)
    """


mod = floormod
pow = define("tf.pow(x, y)", "Pow", rg.pow, NUMBERS, *PAIR, "[49.,  9.]")
maximum = define("tf.maximum(x, y)", "Maximum", rg.maximum, REALS, *PAIR, "[7., 2.]")
minimum = define("tf.minimum(x, y)", "Minimum", rg.minimum, REALS, *PAIR, "[ 2., -3.]")


@row("tf", "SquaredDifference", rg.squared_difference, NUMBERS)
def squared_difference(x, y):
    """Return `(x - y)²`.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.squared_difference(rg.asarray([7.0, -3.0]), rg.asarray([2.0, 2.0]))
    Tensor([25., 25.], dtype=float32)
    """


equal = define("tf.equal(x, y)", "Equal", rg.equal, ANY, *INTS, "[ True, False]")
not_equal = define("tf.not_equal(x, y)", "NotEqual", rg.not_equal, ANY, *INTS, "[False,  True]")
less = define("tf.less(x, y)", "Less", rg.less, REALS, *PAIR, "[False,  True]")


@row("tf", "LessEqual", rg.less_equal, REALS)
def less_equal(x, y):
    """Return True where `x <= y`.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.less_equal(rg.asarray([1, 2]), rg.asarray([1, 3]))
    Tensor([ True,  True], dtype=bool)
    """


greater = define("tf.greater(x, y)", "Greater", rg.greater, REALS, *PAIR, "[ True, False]")


@row("tf", "GreaterEqual", rg.greater_equal, REALS)
def greater_equal(x, y):
    """Return True where `x >= y`.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.greater_equal(rg.asarray([1, 2]), rg.asarray([1, 3]))
    Tensor([ True, False], dtype=bool)
    """


@row("tf", "LogicalAnd", rg.logical_and, BOOLS)
def logical_and(x, y):
    """Return True where x and y are both true (not 0).

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.logical_and(rg.asarray([True, True]), rg.asarray([True, False]))
    Tensor([ True, False], dtype=bool)
    """


@row("tf", "LogicalOr", rg.logical_or, BOOLS)
def logical_or(x, y):
    """Return True where x or y or both are true (not 0).

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.logical_or(rg.asarray([True, True]), rg.asarray([True, False]))
    Tensor([ True,  True], dtype=bool)
    """


@row("tf", "LogicalXor", rg.logical_xor, BOOLS)
def logical_xor(x, y):
    """Return True where exactly one of x and y is true (not 0).

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.logical_xor(rg.asarray([True, True]), rg.asarray([True, False]))
    Tensor([False,  True], dtype=bool)
    """


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


@row("tf", "Atan2", rg.atan2, FLOATS)
def atan2(y, x):
    """Return the angle of the point (x, y), in radians, in (-π, π].

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.atan2(rg.asarray([1.0, -1.0]), rg.asarray([1.0, 0.0]))
    Tensor([ 0.7853981, -1.5707964], dtype=float32)
    """


# The dtypes to which `truediv` casts integers, by their size in bytes.
QUOTIENTS = {1: dtypes.float32, 2: dtypes.float32, 4: dtypes.float64, 8: dtypes.float64}


def truediv(x: TensorLike, y: TensorLike, name: str | None = None) -> Any:
    """Return `x / y`. Integers of 8 and 16 bits are cast to float32 first, others to float64.

    Args:
        x, y: Tensors, arrays or numbers of one dtype. Shapes broadcast.
        name: The name of the op in the graph, by default 'truediv'.

    Returns:
        A tensor of the shape to which the arguments broadcast; an eager Tensor if they are eager.

    Raises:
        DTypeError: in graph mode, an argument is not numeric, or the dtypes differ.
        ShapeError: the shapes do not broadcast.

    Source: `tf.truediv`.

    >>> import regrad.v1 as tf
    >>> tf.truediv(tf.constant([1, 2]), 4).dtype
    tf.float64
    """
    if is_eager(x, y):
        return rg.divide(x, y)
    with scope(name or "truediv") as whole:
        x, y = same_dtype("truediv", x, y)
        check_kinds("truediv", NUMBERS, x, y)
        if dtype_of(x).kind in "iu":
            quotient = QUOTIENTS[dtype_of(x).itemsize]
            x, y = cast(x, quotient), cast(y, quotient)
        return build("RealDiv", whole, rg.divide, x, y)


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
    zero = y == 0
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
    total = lambda *xs: rg.add_n(xs)  # noqa: E731
    return one_op("AddN", name, total, *inputs, kinds=NUMBERS)


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
        places = rg.find_op("Where").function
        return one_op("Where", name, places, condition)
    if is_eager(condition, x, y):
        return _select(condition, x, y)
    with scope(name or "Select") as whole:
        condition = tensor(condition, dtypes.bool, name="condition")
        x, y = same_dtype("Select", x, y)
        return build("SelectV2", whole, _select, condition, x, y)


def _select(condition: Tensor, x: Tensor, y: Tensor) -> Any:
    try:
        condition = _for_rows(condition, x, y)
    except UnknownShapeError:  # the ranks are read in the run, which needs no gradient
        ranked = rg.stop_gradient(x), rg.stop_gradient(y)
        condition = deferrable(_for_rows)(condition, *ranked)
    return rg.where(condition, x, y)


def _for_rows(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
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
    return one_op("Cast", name, _astype, x, dtype=target)


def _astype(x: rg.Tensor, dtype: np.dtype) -> rg.Tensor:
    return rg.astype(x, dtype)  # passes the dtype by position


def _caster(name: str, dtype: dtypes.DType) -> Callable[..., Any]:
    declaration = f"tf.{name}(x, name='{name.title().replace('_', '')}')"
    doc = f"Return x as {dtype.name}.\n\nReturns:\n    A tensor of x's shape."
    result = repr(rg.asarray(np.asarray([1, 0], dtypes.to_numpy(dtype))))
    call = partial(_cast_to, dtype)
    return define(declaration, "Cast", _astype, ANY, "[True, False]", result, doc=doc, call=call)


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
__all__ = listed(__name__, "div divide mod saturate_cast scalar_mul truediv")
