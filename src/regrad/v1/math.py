"""Elementwise functions under TensorFlow's names: `tf.exp`, `tf.add`, `tf.cast`, …

Tensors of different dtypes are never mixed (TypeError), and Python numbers take the dtype of
the tensor beside them. What TensorFlow registers for floats alone refuses integers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import regrad as rg
from regrad.deferral import deferrable
from regrad.errors import GraphError, ShapeError, UnknownShapeError
from regrad.tensors import Tensor
from regrad.v1 import dtypes
from regrad.v1.forms import (
    ANY,
    BOOLS,
    FLOATS,
    INEXACT,
    NUMBERS,
    REALS,
    binary,
    check_kinds,
    dtype_of,
    is_eager,
    one_op,
    rank_of,
    scope,
    tensor,
    unary,
)
from regrad.v1.tensors import build, is_tensor, same_dtype
from regrad.v1.values import whole_divisor

# -- one tensor ------------------------------------------------------------------------------------

abs = unary("Abs", "abs", rg.abs, NUMBERS)
negative = unary("Neg", "negative", rg.negative, NUMBERS)
sign = unary("Sign", "sign", rg.sign, NUMBERS)
square = unary("Square", "square", rg.square, NUMBERS)
round = unary("Round", "round", rg.round, REALS)
sqrt = unary("Sqrt", "sqrt", rg.sqrt, INEXACT)
rsqrt = unary("Rsqrt", "rsqrt", rg.rsqrt, INEXACT)
reciprocal = unary("Reciprocal", "reciprocal", rg.reciprocal, INEXACT)
exp = unary("Exp", "exp", rg.exp, INEXACT)
expm1 = unary("Expm1", "expm1", rg.expm1, INEXACT)
log = unary("Log", "log", rg.log, INEXACT)
log1p = unary("Log1p", "log1p", rg.log1p, INEXACT)
sin = unary("Sin", "sin", rg.sin, INEXACT)
cos = unary("Cos", "cos", rg.cos, INEXACT)
tan = unary("Tan", "tan", rg.tan, INEXACT)
asin = unary("Asin", "asin", rg.asin, INEXACT)
acos = unary("Acos", "acos", rg.acos, INEXACT)
atan = unary("Atan", "atan", rg.atan, INEXACT)
sinh = unary("Sinh", "sinh", rg.sinh, INEXACT)
cosh = unary("Cosh", "cosh", rg.cosh, INEXACT)
tanh = unary("Tanh", "tanh", rg.tanh, INEXACT)
asinh = unary("Asinh", "asinh", rg.asinh, INEXACT)
acosh = unary("Acosh", "acosh", rg.acosh, INEXACT)
atanh = unary("Atanh", "atanh", rg.atanh, INEXACT)
sigmoid = unary("Sigmoid", "sigmoid", rg.nn.sigmoid, INEXACT)
log_sigmoid = unary("LogSigmoid", "log_sigmoid", rg.nn.log_sigmoid, FLOATS)
erf = unary("Erf", "erf", rg.erf, FLOATS)
erfc = unary("Erfc", "erfc", rg.erfc, FLOATS)
lgamma = unary("Lgamma", "lgamma", rg.lgamma, FLOATS)
digamma = unary("Digamma", "digamma", rg.digamma, FLOATS)
ceil = unary("Ceil", "ceil", rg.ceil, FLOATS)
floor = unary("Floor", "floor", rg.floor, FLOATS)
rint = unary("Round", "rint", rg.round, FLOATS, default="Rint")
is_nan = unary("IsNan", "is_nan", rg.isnan, FLOATS)
is_inf = unary("IsInf", "is_inf", rg.isinf, FLOATS)
is_finite = unary("IsFinite", "is_finite", rg.isfinite, FLOATS)
logical_not = unary("LogicalNot", "logical_not", rg.logical_not, BOOLS)

# -- two tensors -----------------------------------------------------------------------------------

add = binary("AddV2", "add", rg.add, NUMBERS, default="Add")
subtract = binary("Sub", "subtract", rg.subtract, NUMBERS)
multiply = binary("Mul", "multiply", rg.multiply, NUMBERS)
realdiv = binary("RealDiv", "realdiv", rg.divide, INEXACT)
floor_div = binary("FloorDiv", "floor_div", rg.floor_divide, REALS)
floordiv = binary(
    "FloorDiv", "floordiv", lambda a, b: rg.floor_divide(a, whole_divisor("floordiv", b)), REALS,
    default="floordiv",
)  # fmt: skip
floormod = binary(
    "FloorMod", "floormod", lambda a, b: rg.remainder(a, whole_divisor("floormod", b)), REALS
)
mod = floormod
pow = binary("Pow", "pow", rg.pow, NUMBERS)
maximum = binary("Maximum", "maximum", rg.maximum, REALS)
minimum = binary("Minimum", "minimum", rg.minimum, REALS)
squared_difference = binary(
    "SquaredDifference", "squared_difference", rg.squared_difference, NUMBERS
)
equal = binary("Equal", "equal", rg.equal, ANY)
not_equal = binary("NotEqual", "not_equal", rg.not_equal, ANY)
less = binary("Less", "less", rg.less, REALS)
less_equal = binary("LessEqual", "less_equal", rg.less_equal, REALS)
greater = binary("Greater", "greater", rg.greater, REALS)
greater_equal = binary("GreaterEqual", "greater_equal", rg.greater_equal, REALS)
logical_and = binary("LogicalAnd", "logical_and", rg.logical_and, BOOLS)
logical_or = binary("LogicalOr", "logical_or", rg.logical_or, BOOLS)
logical_xor = binary("LogicalXor", "logical_xor", rg.logical_xor, BOOLS)


def atan2(y: Any, x: Any, name: str | None = None) -> Any:
    """The angle of the point (x, y)."""
    return one_op("Atan2", name or "Atan2", rg.atan2, y, x, kinds=FLOATS)


# What `truediv` makes of integers, by the number of their bits.
QUOTIENTS = {1: dtypes.float32, 2: dtypes.float32, 4: dtypes.float64, 8: dtypes.float64}


def truediv(x: Any, y: Any, name: str | None = None) -> Any:
    """`x / y`. Integers are cast first: those of 8 and 16 bits to float32, others to float64.

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
            due = QUOTIENTS[dtype_of(x).itemsize]
            x, y = cast(x, due), cast(y, due)
        return build("RealDiv", whole, rg.divide, x, y)


divide = truediv


def div(x: Any, y: Any, name: str | None = None) -> Any:
    """`x / y` as Python 2 has it: of integers the quotient rounded down."""
    known = x if is_tensor(x) else tensor(y) if is_tensor(y) else tensor(x)
    return (floor_div if dtype_of(known).kind in "iu" else realdiv)(x, y, name=name or "div")


def div_no_nan(x: Any, y: Any, name: str | None = None) -> Any:
    """`x / y`, and 0 where y is 0, with the gradient 0 there."""
    return one_op(None, name or "div_no_nan", _quotient_or_zero, x, y, kinds=INEXACT)


def _quotient_or_zero(x: Any, y: Any) -> Any:
    zero = y == 0
    return rg.where(zero, 0, x / rg.where(zero, 1, y))


def truncatediv(x: Any, y: Any, name: str | None = None) -> Any:
    """`x / y` rounded towards zero, as C divides integers. A composition."""
    return one_op(None, name or "TruncateDiv", _truncated, x, y, kinds=REALS)


def truncatemod(x: Any, y: Any, name: str | None = None) -> Any:
    """What `truncatediv` leaves: it has the sign of x. A composition."""
    return one_op(None, name or "TruncateMod", _remaining, x, y, kinds=REALS)


def _truncated(x: Any, y: Any) -> Any:
    return rg.sign(x) * rg.sign(y) * (rg.abs(x) // rg.abs(y))


def _remaining(x: Any, y: Any) -> Any:
    return x - _truncated(x, y) * y


def scalar_mul(scalar: Any, x: Any, name: str | None = None) -> Any:
    """`scalar * x` for a number or a tensor of rank 0; ValueError for a tensor of another rank."""
    if rank_of(scalar) if is_tensor(scalar) else np.ndim(scalar):
        raise ShapeError(f"Only scalar multiply works, got {scalar}")
    return one_op("Mul", name or "mul", rg.multiply, scalar, x, kinds=NUMBERS)


# -- many tensors ----------------------------------------------------------------------------------


def add_n(inputs: Any, name: str | None = None) -> Any:
    """The sum of a list of tensors of one shape and dtype.

    Raises ValueError for an empty list.
    """
    if not isinstance(inputs, list | tuple) or not inputs:
        raise GraphError(
            "inputs must be a list of at least one Tensor with the same dtype and shape"
        )
    if len(inputs) == 1:
        x = tensor(inputs[0])
        return one_op("Identity", name, rg.identity, x) if name else x
    return one_op("AddN", name or "AddN", _total, *inputs, kinds=NUMBERS)


def _total(*xs: Any) -> Any:
    return rg.add_n(xs)


def accumulate_n(
    inputs: Any, shape: Any = None, tensor_dtype: Any = None, name: str | None = None
) -> Any:
    """As `add_n`."""
    return add_n(inputs, name or "AccumulateNV2")


def clip_by_value(t: Any, clip_value_min: Any, clip_value_max: Any, name: str | None = None) -> Any:
    """t, brought into the range; the gradient passes at both bounds.

    One op, as in TensorFlow 1.8. (Later versions make a Minimum and a Maximum.)

    Op type: `ClipByValue`. Source: `tf.clip_by_value`.
    """
    bounds = clip_value_min, clip_value_max
    return one_op("ClipByValue", name or "clip_by_value", rg.clip, t, *bounds, kinds=REALS)


def where(condition: Any, x: Any = None, y: Any = None, name: str | None = None) -> Any:
    """x where the condition holds, y elsewhere. A condition of rank 1 selects rows.

    Without x and y: the places where it holds, as index vectors of int64. x, y and the condition
    broadcast (TensorFlow 1 wants equal shapes).

    Op types: `SelectV2`, `Where`. Source: `tf.where`.
    """
    if (x is None) != (y is None):
        raise GraphError("x and y must both be non-None or both be None.")
    if x is None:
        places = rg.find_op("Where").function
        return one_op("Where", name or "Where", places, condition)
    if is_eager(condition, x, y):
        return _select(condition, x, y)
    with scope(name or "Select") as whole:
        condition = tensor(condition, dtypes.bool, name="condition")
        x, y = same_dtype("Select", x, y)
        return build("SelectV2", whole, _select, condition, x, y)


def _select(condition: Any, x: Any, y: Any) -> Any:
    try:
        condition = _for_rows(condition, x, y)
    except UnknownShapeError:  # no gradient passes by what is asked for its rank
        ranked = rg.stop_gradient(x), rg.stop_gradient(y)
        condition = deferrable(_for_rows)(condition, *ranked)
    return rg.where(condition, x, y)


def _for_rows(condition: Any, x: Any, y: Any) -> Tensor:
    """A condition of rank 1 beside tensors of higher rank, with an axis for each of theirs."""
    if np.ndim(condition) == 1 and (rank := max(np.ndim(x), np.ndim(y))) > 1:
        return rg.expand_dims(condition, tuple(range(1, rank)))
    return condition


# -- casts -----------------------------------------------------------------------------------------


def cast(x: Any, dtype: Any, name: str | None = None) -> Any:
    """x under another dtype; a tensor that has it already comes back as it is.

    Source: `tf.cast`.
    """
    due = dtypes.to_numpy(dtype)
    if is_tensor(x) and dtype_of(x) == due:
        return tensor(x)
    return one_op("Cast", name or "Cast", _astype, x, dtype=due)


def _astype(x: Any, dtype: np.dtype) -> Any:
    # (regrad takes the dtype by position)
    return rg.astype(x, dtype)


def _caster(name: str, dtype: dtypes.DType) -> Callable[..., Any]:
    title = name.title().replace("_", "")

    def convert(x: Any, name: str = title) -> Any:
        return cast(x, dtype, name=name)

    convert.__name__ = convert.__qualname__ = name
    convert.__doc__ = f"x as {dtype.name}.\n\n    Source: `tf.{name}`."
    return convert


to_float = _caster("to_float", dtypes.float32)
to_double = _caster("to_double", dtypes.float64)
to_int32 = _caster("to_int32", dtypes.int32)
to_int64 = _caster("to_int64", dtypes.int64)
to_complex64 = _caster("to_complex64", dtypes.complex64)
to_complex128 = _caster("to_complex128", dtypes.complex128)


def saturate_cast(value: Any, dtype: Any, name: str | None = None) -> Any:
    """A value under another dtype, of which it takes the limits where it exceeds them."""
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


def _inside(limit: Any, dtype: np.dtype) -> np.ndarray:
    """A limit, or the next number towards zero where this dtype cannot have it exactly."""
    found = np.asarray(limit).astype(dtype)
    exact = dtype.kind != "f" or not isinstance(limit, int) or int(found) == limit
    return np.asarray(found if exact else np.nextafter(found, dtype.type(0)))


# -- complex numbers -------------------------------------------------------------------------------


def real(input: Any, name: str | None = None) -> Any:
    """The real part; a real tensor comes back as it is."""
    x = tensor(input)
    if dtype_of(x).kind == "c":
        return one_op("Real", name or "Real", rg.real, x)
    check_kinds("Real", NUMBERS, x)
    return x


def imag(input: Any, name: str | None = None) -> Any:
    """The imaginary part; zeros for a real tensor."""
    x = tensor(input)
    if dtype_of(x).kind == "c":
        return one_op("Imag", name or "Imag", rg.imag, x)
    return one_op("ZerosLike", name or "Imag", rg.zeros_like, x, kinds=NUMBERS)


def conj(x: Any, name: str | None = None) -> Any:
    """The complex conjugate; a real tensor comes back as it is.

    Raises TypeError for what is no number.
    """
    x = tensor(x)
    if dtype_of(x).kind == "c":
        return one_op("Conj", name or "Conj", rg.conj, x)
    check_kinds("Conj", NUMBERS, x)
    return x


def complex(real: Any, imag: Any, name: str | None = None) -> Any:
    """Complex numbers from their parts, two tensors of float32 or float64. A composition."""
    return one_op(None, name or "Complex", _of_parts, real, imag, kinds=FLOATS)


def _of_parts(real: Any, imag: Any) -> Any:
    kind = np.result_type(dtype_of(rg.asarray(real)), np.complex64)
    return rg.astype(real, kind) + 1j * rg.astype(imag, kind)


def angle(input: Any, name: str | None = None) -> Any:
    """The angle of complex numbers, from -π to π. A composition."""
    return one_op(None, name or "Angle", _angle, input, kinds=INEXACT)


def _angle(x: Any) -> Any:
    parts = (rg.imag(x), rg.real(x)) if dtype_of(x).kind == "c" else (rg.zeros_like(x), x)
    return rg.atan2(*parts)
