"""Elementwise ops of one, two and three tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from regrad.core import backends, dispatch
from regrad.core.backends import Array, DTypeLike, Namespace, is_inexact, special
from regrad.core.op import TensorLike, elementwise, entwined, op, piecewise_constant
from regrad.core.registry import gradient, not_differentiable
from regrad.core.signatures import public
from regrad.core.tensor import Tensor
from regrad.errors import ArgumentError, ShapeError
from regrad.ops.creation import as_numpy_dtype, zeros_like

Kernel = Callable[..., Any] | str  # or its name in the standard


# -- complex numbers ---------------------------------------------------------------------------
# Gradients follow TensorFlow's convention: for y = f(x) the gradient is dy * conj(f'(x)).


@op("Conj", elementwise=True, holomorphic=False)
def _conj(xp, x: TensorLike, /) -> Tensor:
    return xp.conj(x)


@gradient("Conj")
def _(dy):
    return conj(dy)


@public
def conj(x: TensorLike, /) -> Tensor:
    """Return the complex conjugate. A real Tensor is returned as it is.

    Returns:
        A Tensor of x's shape and dtype.

    Op type: `Conj` (for complex numbers).

    >>> rg.conj([1 + 2j])
    Tensor([1.-2.j], dtype=complex64)
    """
    x = dispatch.lift(x)
    return _conj(x) if x.dtype.kind == "c" else x


@op("Real", elementwise=True, holomorphic=False)
def real(xp, x: TensorLike, /) -> Tensor:
    """Return the real part.

    Returns:
        A Tensor of x's shape. The parts of complex64 numbers are float32, of complex128 float64.

    >>> rg.real([1 + 2j])
    Tensor([1.], dtype=float32)
    """
    return xp.real(x) if backends.is_complex(x) else x


@gradient("Real")
def _(dy, x_dtype):
    return dispatch.as_dtype(dy, backends.numpy_dtype(x_dtype))


@op("Imag", elementwise=True, holomorphic=False)
def imag(xp, x: TensorLike, /) -> Tensor:
    """Return the imaginary part, or zeros for real numbers.

    Returns:
        A Tensor of x's shape. The parts of complex64 numbers are float32, of complex128 float64.

    >>> rg.imag([1 + 2j])
    Tensor([2.], dtype=float32)
    """
    return xp.imag(x) if backends.is_complex(x) else xp.zeros_like(x)


@gradient("Imag")
def _(dy, x_dtype):
    return dy * 1j if backends.numpy_dtype(x_dtype).kind == "c" else None


# -- identity, casts ---------------------------------------------------------------------------

identity = elementwise(
    "Identity", "identity", lambda xp, x: x, """
    Return x itself, as an op that a rule can be attached to.

    >>> rg.identity([1.0, 2.0])
    Tensor([1., 2.], dtype=float32)
    """,
    lambda dy: dy,
)  # fmt: skip


@public
def positive(x: TensorLike, /) -> Tensor:
    """Return x itself, like `+x`.

    Returns:
        A Tensor of x's shape and dtype.

    Op type: `Identity`. Source: the Array API standard.

    >>> rg.positive([1.0, -2.0])
    Tensor([ 1., -2.], dtype=float32)
    """
    return identity(x)


stop_gradient = elementwise(
    "StopGradient",
    "stop_gradient",
    lambda xp, x: x,
    """Return x as a constant: no gradient flows back through it.

    `g(x) + stop_gradient(f(x) - g(x))` has the value of f and the gradient of g.

    Source: `tf.stop_gradient`.

    >>> rg.grad(lambda x: x * rg.stop_gradient(x))(rg.scalar(3.0))
    Tensor(3., dtype=float32)
    """,
)  # fmt: skip
not_differentiable("StopGradient")


@op("Cast", holomorphic=False)
def _cast(xp, x: TensorLike, /, *, dtype: DTypeLike) -> Tensor:
    return backends.cast(xp, x, dtype)


@gradient("Cast", "x")
def _(dy, x_dtype):
    dtype = backends.numpy_dtype(x_dtype)
    return dispatch.as_dtype(dy, dtype) if is_inexact(dtype) else dy


def _to_integers(attrs: dict[str, Any], xs: Sequence[Tensor]) -> bool:
    return is_inexact(xs[0].dtype) and not is_inexact(attrs["dtype"])


from regrad.core.registry import OPS  # noqa: E402

OPS["Cast"].rule.unless = _to_integers  # pyright: ignore[reportAttributeAccessIssue]


@public
def astype(x: TensorLike, dtype: DTypeLike, /, *, copy: bool = True, device: Any = None) -> Tensor:
    """Return x converted to another dtype.

    Between floats (and complex numbers) the gradient passes, converted back. A cast to integers
    or bools has no gradient, unless a rule is in force for the op type. A cast of complex numbers
    to real ones takes the real part; a cast to bools is True where x is not 0.

    Args:
        dtype: The dtype of the result.
        copy: For the standard's signature. Tensors are immutable, so nothing depends on it.

    Returns:
        A Tensor of x's shape; x itself if it has the dtype already.

    Raises:
        DTypeError: `dtype` is not a dtype that Tensors have.

    Op type: `Cast`. Source: the Array API standard.

    >>> rg.astype([1.5, -1.5], rg.int32)
    Tensor([ 1, -1], dtype=int32)
    """
    dtype = as_numpy_dtype(dtype)
    x = dispatch.lift_as(x, dtype) if dispatch.is_plain(x) else dispatch.lift(x)
    return x if x.dtype == dtype else _cast(x, dtype=dtype)


# -- one tensor --------------------------------------------------------------------------------


def _unary(type: str, name: str, kernel: Kernel, doc: str, *rules: Callable[..., Any]) -> Any:
    """A function of real and complex numbers; integers become float32."""
    return elementwise(type, name, kernel, doc, *rules, to_float=True)


abs = elementwise("Abs", "abs", "abs", """Return the absolute value. The gradient at 0 is 0.

    >>> rg.abs([-2.0, 3.0])
    Tensor([2., 3.], dtype=float32)
    """,
                  lambda dy, x: dy * sign(x), holomorphic=False)  # fmt: skip
negative = elementwise("Neg", "negative", "negative", """Return `-x`.

    >>> rg.negative([1.0, -2.0])
    Tensor([-1.,  2.], dtype=float32)
    """, lambda dy: -dy)  # fmt: skip
sign = elementwise("Sign", "sign", "sign", """
    Return the sign, -1, 0 or 1; `x / abs(x)` for complex x.

    The gradient of real x is 0.

    >>> rg.sign([-2.0, 0.0, 3.0])
    Tensor([-1.,  0.,  1.], dtype=float32)
    """,
                   holomorphic=False)  # fmt: skip
square = elementwise("Square", "square", "square", """Return `x * x`.

    >>> rg.square([2.0, -3.0])
    Tensor([4., 9.], dtype=float32)
    """, lambda dy, x: dy * (2 * x))  # fmt: skip
sqrt = _unary("Sqrt", "sqrt", "sqrt", """
    Return the square root; NaN for negative real x. The gradient at 0 is infinite.

    >>> rg.sqrt([4.0, 9.0])
    Tensor([2., 3.], dtype=float32)
    """,
              lambda dy, y: dy / (2 * y))  # fmt: skip
rsqrt = _unary("Rsqrt", "rsqrt", lambda xp, x: 1 / xp.sqrt(x), """Return `1 / sqrt(x)`.

    >>> rg.rsqrt([4.0, 16.0])
    Tensor([0.5 , 0.25], dtype=float32)
    """,
               lambda dy, y: dy * (-0.5 * y * square(y)))  # fmt: skip
reciprocal = _unary("Reciprocal", "reciprocal", lambda xp, x: 1 / x, """Return `1 / x`.

    >>> rg.reciprocal([2.0, -4.0])
    Tensor([ 0.5 , -0.25], dtype=float32)
    """,
                    lambda dy, y: -dy * square(y))  # fmt: skip
exp = _unary("Exp", "exp", "exp", """Return e to the power x.

    >>> rg.exp([0.0, 1.0])
    Tensor([1.      , 2.718282], dtype=float32)
    """, lambda dy, y: dy * y)  # fmt: skip


def _expm1(xp: Namespace, x: Array) -> Any:
    y = xp.expm1(x)
    if not backends.is_complex(x):
        return y
    # where x is not finite the libraries lose what the standard says is known
    y = xp.where(xp.isfinite(x), y, xp.exp(x) - 1)
    size, any_angle = xp.real(x), ~xp.isfinite(xp.imag(x))
    y = xp.where((size == -math.inf) & any_angle, xp.full_like(x, -1), y)
    return xp.where((size == math.inf) & any_angle, xp.full_like(x, complex("inf+nanj")), y)


expm1 = _unary("Expm1", "expm1", _expm1, """Return `exp(x) - 1`, accurate near 0.

    >>> rg.expm1([0.0, 1e-6])
    Tensor([0.0000000e+00, 1.0000005e-06], dtype=float32)
    """,
               lambda dy, y: dy * (y + 1))  # fmt: skip
log = _unary("Log", "log", "log", """
    Return the natural logarithm; -inf at 0, NaN for negative real x.

    >>> rg.log([1.0, 10.0])
    Tensor([0.       , 2.3025851], dtype=float32)
    """, lambda dy, x: dy / x)  # fmt: skip
log1p = _unary("Log1p", "log1p", "log1p", """Return `log(1 + x)`, accurate near 0.

    >>> rg.log1p([0.0, 1e-6])
    Tensor([0.000000e+00, 9.999995e-07], dtype=float32)
    """,
               lambda dy, x: dy / (1 + x))  # fmt: skip
log2 = _unary("Log2", "log2", "log2", """Return the logarithm to base 2.

    >>> rg.log2([1.0, 8.0])
    Tensor([0., 3.], dtype=float32)
    """,
              lambda dy, x: dy / (math.log(2) * x))  # fmt: skip
log10 = _unary("Log10", "log10", "log10", """Return the logarithm to base 10.

    >>> rg.log10([1.0, 10.0])
    Tensor([0., 1.], dtype=float32)
    """,
               lambda dy, x: dy / (math.log(10) * x))  # fmt: skip
sin = _unary("Sin", "sin", "sin", """Return the sine of x, in radians.

    >>> rg.sin([0.0, 1.0])
    Tensor([0.      , 0.841471], dtype=float32)
    """, lambda dy, x: dy * cos(x))  # fmt: skip
cos = _unary("Cos", "cos", "cos", """Return the cosine of x, in radians.

    >>> rg.cos([0.0, 1.0])
    Tensor([1.       , 0.5403023], dtype=float32)
    """, lambda dy, x: -dy * sin(x))  # fmt: skip
tan = _unary("Tan", "tan", "tan", """Return the tangent of x, in radians.

    >>> rg.tan([0.0, 1.0])
    Tensor([0.       , 1.5574077], dtype=float32)
    """, lambda dy, y: dy * (1 + square(y)))  # fmt: skip
asin = _unary("Asin", "asin", "asin", """
    Return the inverse sine, in [-π/2, π/2] radians; NaN for real x outside [-1, 1].

    >>> rg.asin([0.0, 1.0])
    Tensor([0.       , 1.5707964], dtype=float32)
    """,
              lambda dy, x: dy / sqrt((1 - x) * (1 + x)))  # fmt: skip
acos = _unary("Acos", "acos", "acos", """
    Return the inverse cosine, in [0, π] radians; NaN for real x outside [-1, 1].

    >>> rg.acos([0.0, 1.0])
    Tensor([1.5707964, 0.       ], dtype=float32)
    """,
              lambda dy, x: -dy / sqrt((1 - x) * (1 + x)))  # fmt: skip
atan = _unary("Atan", "atan", "atan", """Return the inverse tangent, in [-π/2, π/2] radians.

    >>> rg.atan([0.0, 1.0])
    Tensor([0.       , 0.7853982], dtype=float32)
    """,
              lambda dy, x: dy / (1 + square(x)))  # fmt: skip
sinh = _unary("Sinh", "sinh", "sinh", """Return the hyperbolic sine.

    >>> rg.sinh([0.0, 1.0])
    Tensor([0.       , 1.1752012], dtype=float32)
    """, lambda dy, x: dy * cosh(x))  # fmt: skip
cosh = _unary("Cosh", "cosh", "cosh", """Return the hyperbolic cosine.

    >>> rg.cosh([0.0, 1.0])
    Tensor([1.       , 1.5430807], dtype=float32)
    """, lambda dy, x: dy * sinh(x))  # fmt: skip
tanh = _unary("Tanh", "tanh", "tanh", """Return the hyperbolic tangent.

    >>> rg.tanh([0.0, 1.0])
    Tensor([0.       , 0.7615942], dtype=float32)
    """,
              lambda dy, y: dy * (1 - square(y)))  # fmt: skip
asinh = _unary("Asinh", "asinh", "asinh", """Return the inverse hyperbolic sine.

    >>> rg.asinh([0.0, 1.0])
    Tensor([0.       , 0.8813736], dtype=float32)
    """,
               lambda dy, x: dy / sqrt(1 + square(x)))  # fmt: skip
acosh = _unary("Acosh", "acosh", "acosh", """
    Return the inverse hyperbolic cosine, at least 0; NaN for real x below 1.

    >>> rg.acosh([1.0, 2.0])
    Tensor([0.      , 1.316958], dtype=float32)
    """,
               lambda dy, x: dy / (sqrt(x - 1) * sqrt(x + 1)))  # fmt: skip
atanh = _unary("Atanh", "atanh", "atanh", """
    Return the inverse hyperbolic tangent; NaN for real x outside [-1, 1].

    >>> rg.atanh([0.0, 0.5])
    Tensor([0.        , 0.54930615], dtype=float32)
    """,
               lambda dy, x: dy / ((1 - x) * (1 + x)))  # fmt: skip
erf = _unary("Erf", "erf", lambda xp, x: special(xp).erf(x), """
    Return the error function, `2 / sqrt(π)` times the integral of `exp(-t²)` from 0 to x.

    >>> rg.erf([0.0, 1.0])
    Tensor([0.       , 0.8427008], dtype=float32)
    """,
             lambda dy, x: dy * (2 / math.sqrt(math.pi) * exp(-square(x))))  # fmt: skip
erfc = _unary("Erfc", "erfc", lambda xp, x: special(xp).erfc(x), """
    Return `1 - erf(x)`, accurate where `erf(x)` is close to 1.

    >>> rg.erfc([0.0, 3.0])
    Tensor([1.0000000e+00, 2.2090497e-05], dtype=float32)
    """,
              lambda dy, x: dy * (-2 / math.sqrt(math.pi) * exp(-square(x))))  # fmt: skip
erfinv = _unary("Erfinv", "erfinv", lambda xp, x: special(xp).erfinv(x), """
    Return the inverse of `erf`; infinite at -1 and 1, NaN beyond.

    >>> rg.erfinv([0.0, 0.5])
    Tensor([0.        , 0.47693628], dtype=float32)
    """,
                lambda dy, y: dy * (math.sqrt(math.pi) / 2 * exp(square(y))))  # fmt: skip
lgamma = _unary("Lgamma", "lgamma", lambda xp, x: special(xp).gammaln(x),
                """Return the logarithm of the absolute value of the gamma function.

    >>> rg.lgamma([1.0, 5.0])
    Tensor([0.       , 3.1780539], dtype=float32)
    """,
                lambda dy, x: dy * digamma(x))  # fmt: skip
digamma = _unary("Digamma", "digamma", lambda xp, x: special(xp).psi(x)
                 if hasattr(special(xp), "psi") else special(xp).digamma(x),
                 """Return the derivative of `lgamma`.

    >>> rg.digamma([1.0, 5.0])
    Tensor([-0.5772157,  1.5061177], dtype=float32)
    """, lambda dy, x: dy * polygamma(x, 1))  # fmt: skip


@op("Polygamma", elementwise=True, to_float=True)
def polygamma(xp, x: TensorLike, /, n: int) -> Tensor:
    """Return the n-th derivative of `digamma`.

    Args:
        n: The order of the derivative, an int of 0 or more.

    >>> rg.polygamma([1.0, 2.0], 1)
    Tensor([1.644934  , 0.64493406], dtype=float32)
    """
    return special(xp).polygamma(n, x)


@gradient("Polygamma")
def _(dy, x, n):
    return dy * polygamma(x, n + 1)


@gradient("Sign")
def _(dy, x):
    if x.dtype.kind != "c":
        return zeros_like(dy)
    y = sign(x)
    return (dy - real(dy * conj(y)) * y) / abs(x)


OPS["Sign"].rule.flat = True

ceil = elementwise("Ceil", "ceil", "ceil", """
    Return the least integer that is not below x. The gradient is 0.

    >>> rg.ceil([1.2, -1.2])
    Tensor([ 2., -1.], dtype=float32)
    """, real=True)  # fmt: skip
floor = elementwise(
    "Floor", "floor", "floor", """
    Return the greatest integer that is not above x. The gradient is 0.

    >>> rg.floor([1.2, -1.2])
    Tensor([ 1., -2.], dtype=float32)
    """, real=True
)  # fmt: skip
round = elementwise("Round", "round", "round", """
    Return the nearest integer, and of two that are equally near the even one.

    The gradient is 0.

    >>> rg.round([0.5, 1.5, 1.7])
    Tensor([0., 2., 2.], dtype=float32)
    """)  # fmt: skip
trunc = elementwise("Trunc", "trunc", "trunc", """Return x without its fraction. The gradient is 0.

    >>> rg.trunc([1.7, -1.7])
    Tensor([ 1., -1.], dtype=float32)
    """, real=True)  # fmt: skip
for _type in ("Ceil", "Floor", "Round", "Trunc"):
    piecewise_constant(_type, lambda dy: None)


@op("Step", elementwise=True, real=True)
def step(xp, x: TensorLike, /, alpha: float = 0.0) -> Tensor:
    """Return 1 where x > 0 and `alpha` elsewhere; NaN stays NaN. The gradient is 0.

    Args:
        alpha: The value where x <= 0.

    Returns:
        A Tensor of x's shape and dtype.

    Source: `tf.step` of TensorFlow.js.

    >>> rg.step([-1.0, 0.0, 2.0])
    Tensor([0., 0., 1.], dtype=float32)
    """
    y = xp.where(x > 0, xp.ones_like(x), xp.full_like(x, alpha))
    return xp.where(x != x, x, y)


piecewise_constant("Step", lambda dy: zeros_like(dy))

isnan = elementwise("IsNan", "isnan", "isnan", """Return True where x is NaN.

    >>> rg.isnan([1.0, float("nan")])
    Tensor([False,  True], dtype=bool)
    """, boolean=True)  # fmt: skip
isinf = elementwise("IsInf", "isinf", "isinf", """Return True where x is infinite, of either sign.

    >>> rg.isinf([1.0, float("-inf")])
    Tensor([False,  True], dtype=bool)
    """, boolean=True)  # fmt: skip
isfinite = elementwise("IsFinite", "isfinite", "isfinite", """
    Return True where x is neither infinite nor NaN.

    >>> rg.isfinite([1.0, float("inf")])
    Tensor([ True, False], dtype=bool)
    """, boolean=True)  # fmt: skip
signbit = elementwise(
    "SignBit", "signbit", "signbit", """Return True where x is negative, -0 included.

    >>> rg.signbit([1.0, -0.0])
    Tensor([False,  True], dtype=bool)
    """, real=True, boolean=True
)  # fmt: skip
logical_not = elementwise("LogicalNot", "logical_not", "logical_not", """
    Return True where x is 0 or False.

    >>> rg.logical_not([True, False])
    Tensor([False,  True], dtype=bool)
    """, boolean=True)  # fmt: skip
bitwise_invert = elementwise("Invert", "bitwise_invert", "bitwise_invert", """
    Return `~x`: every bit of an integer inverted, or `not x` for bools.

    >>> rg.bitwise_invert(rg.asarray([0, 5]))
    Tensor([-1, -6], dtype=int64)
    """)  # fmt: skip
not_differentiable("IsNan", "IsInf", "IsFinite", "SignBit", "LogicalNot", "Invert")


# -- two tensors -------------------------------------------------------------------------------


def _binary(
    type: str,
    name: str,
    kernel: Kernel,
    doc: str,
    *rules: Callable[..., Any],
    to_float: bool = False,
    real: bool = False,
    boolean: bool = False,
) -> Any:
    return elementwise(
        type, name, kernel, doc, *rules,
        to_float=to_float, real=real, inputs="a b", boolean=boolean,
    )  # fmt: skip


add = _binary("AddV2", "add", "add", """Return `a + b`.

    >>> rg.add([1.0, 2.0], 10)
    Tensor([11., 12.], dtype=float32)
    """, lambda dy: dy, lambda dy: dy)  # fmt: skip
subtract = _binary("Sub", "subtract", "subtract", """Return `a - b`.

    >>> rg.subtract([1.0, 2.0], 10)
    Tensor([-9., -8.], dtype=float32)
    """, lambda dy: dy, lambda dy: -dy)  # fmt: skip
multiply = _binary("Mul", "multiply", "multiply", """Return `a * b`.

    >>> rg.multiply([1.0, 2.0], 10)
    Tensor([10., 20.], dtype=float32)
    """,
                   lambda dy, b: dy * b, lambda dy, a: dy * a)  # fmt: skip
divide = _binary("RealDiv", "divide", "divide", """Return `a / b`.

    >>> rg.divide([1.0, 2.0], 10)
    Tensor([0.1, 0.2], dtype=float32)
    """,
                 lambda dy, b: dy / b, lambda dy, b, y: -dy * (y / b),
                 to_float=True)  # fmt: skip
floor_divide = _binary(
    "FloorDiv", "floor_divide", "floor_divide", """
    Return `a // b`: the quotient, rounded down. The gradient is 0.

    >>> rg.floor_divide([7.0, -7.0], 2)
    Tensor([ 3., -4.], dtype=float32)
    """, real=True
)  # fmt: skip
piecewise_constant("FloorDiv", lambda dy: None)
remainder = _binary("FloorMod", "remainder", "remainder", """Return `a % b`, with the sign of b.

    >>> rg.remainder([7.0, -7.0], 3)
    Tensor([1., 2.], dtype=float32)
    """,
                    lambda dy: dy, lambda dy, a, b: -dy * floor_divide(a, b),
                    real=True)  # fmt: skip
maximum = _binary("Maximum", "maximum", "maximum", """
    Return the larger of a and b. Where they are equal, the gradient goes to a.

    >>> rg.maximum([1.0, 5.0], 3)
    Tensor([3., 5.], dtype=float32)
    """,
                  lambda dy, a, b: where(a >= b, dy, 0),
                  lambda dy, a, b: where(a >= b, 0, dy), real=True)  # fmt: skip
minimum = _binary("Minimum", "minimum", "minimum", """
    Return the smaller of a and b. Where they are equal, the gradient goes to a.

    >>> rg.minimum([1.0, 5.0], 3)
    Tensor([1., 3.], dtype=float32)
    """,
                  lambda dy, a, b: where(a <= b, dy, 0),
                  lambda dy, a, b: where(a <= b, 0, dy), real=True)  # fmt: skip
squared_difference = _binary(
    "SquaredDifference", "squared_difference", lambda xp, a, b: xp.square(a - b), """
    Return `(a - b)²`.

    >>> rg.squared_difference([1.0, 5.0], 3)
    Tensor([4., 4.], dtype=float32)
    """,
    lambda dy, a, b: dy * (2 * (a - b)), lambda dy, a, b: dy * (-2 * (a - b)),
)  # fmt: skip
atan2 = _binary("Atan2", "atan2", "atan2", """
    Return the angle of the point (b, a), in (-π, π] radians.

    The gradient at the origin is NaN.

    >>> rg.atan2([1.0, 1.0], [1.0, -1.0])
    Tensor([0.7853981, 2.3561945], dtype=float32)
    """,
                lambda dy, a, b: dy * (b / (square(a) + square(b))),
                lambda dy, a, b: dy * (-a / (square(a) + square(b))),
                to_float=True, real=True)  # fmt: skip
hypot = _binary("Hypot", "hypot", "hypot", """
    Return `sqrt(a² + b²)`, without overflow. The gradient at the origin is 0.

    >>> rg.hypot(3.0, 4.0)
    Tensor(5., dtype=float32)
    """,
                lambda dy, a, y: _grad_or_zero(dy, y) * (a / where(y == 0, 1, y)),
                lambda dy, b, y: _grad_or_zero(dy, y) * (b / where(y == 0, 1, y)),
                to_float=True)  # fmt: skip
logaddexp = _binary("LogAddExp", "logaddexp", "logaddexp", """
    Return `log(exp(a) + exp(b))`, without overflow.

    >>> rg.logaddexp(1000.0, 1000.0)
    Tensor(1000.6932, dtype=float32)
    """,
                    lambda dy, a, b, y: dy * _part(a, b, y),
                    lambda dy, a, b, y: dy * _part(b, a, y), to_float=True)  # fmt: skip


def _part(a, b, y):
    """The share of exp(a) in exp(y): all of it where a is y, which may be infinite."""
    return exp(where(logical_and(a == y, a != b), 0, a - y))


copysign = _binary("Copysign", "copysign", "copysign", """
    Return the absolute value of a with the sign of b.

    The gradient of a has its sign changed where a's sign is; that of b is 0.

    >>> rg.copysign([1.0, 2.0], [-3.0, 3.0])
    Tensor([-1.,  2.], dtype=float32)
    """,
                   lambda dy, a, y: where((a < 0) == signbit(y), dy, -dy),
                   lambda dy: None, to_float=True, real=True)  # fmt: skip
nextafter = _binary("NextAfter", "nextafter", "nextafter", """
    Return the next number from a towards b that the dtype can hold.

    >>> rg.nextafter(rg.tensor([1.0]), 2.0) - 1
    Tensor([1.1920929e-07], dtype=float32)
    """,
                    lambda dy: dy, lambda dy: None, to_float=True, real=True)  # fmt: skip


for _type in ("FloorMod", "NextAfter"):
    OPS[_type].rule.flat = True  # their rules ignore a, and yet they are not linear in it


# Lengths and deviations end at 0, where their gradient is 0 by convention. What the convention says
# of a second derivative would be wrong for smooth functions of them (the square of a length): it is
# NaN there, unless the gradient that arrives does not change with x.


@op("OrZero")
def or_zero(xp, value: TensorLike, x: TensorLike, /) -> Tensor:
    """`value`, a function of x; 0 where x is 0, and there so is its gradient."""
    return xp.where(x == 0, xp.zeros_like(value), value)


@gradient("OrZero", "value")
def _(dy, x):
    return _grad_or_zero(dy, x)


@gradient("OrZero", "x")
def _(dy, x):
    return where(x == 0, _grad_or_zero(dy, x), 0)  # (the value may mask a NaN there)


@op("OrZeroGrad")
def _grad_or_zero(xp, grad: TensorLike, x: TensorLike, /) -> Tensor:
    return xp.where((x == 0) & (grad == grad), xp.zeros_like(grad), grad)  # a NaN stays visible


entwined("OrZeroGrad", lambda dy, x: _grad_or_zero(dy, x), lambda dy: None,
         together=lambda dy, x: dy * astype(where(x == 0, math.nan, 1), dy.dtype))  # fmt: skip


def _pow_a(dy, a, b):
    # a ** 0 is a constant: its gradient is 0, also at 0⁰
    none = logical_and(a == 0, b == 0)
    return dy * where(none, 0, b * pow(where(none, 1, a), b - 1))


def _pow_b(dy, a, y):
    if a.dtype.kind == "c":
        return dy * (y * log(where(a == 0, 1, a)))
    return dy * (y * log(where(a > 0, a, 1)))


pow = _binary("Pow", "pow", "pow",
              """Return a to the power b. The gradient of b is 0 where a <= 0.

    >>> rg.pow([2.0, 3.0], 2)
    Tensor([4., 9.], dtype=float32)
    """,
              _pow_a, _pow_b)  # fmt: skip

equal = _binary("Equal", "equal", "equal", """Return True where `a == b`.

    >>> rg.equal([1.0, 2.0], [1.0, 3.0])
    Tensor([ True, False], dtype=bool)
    """, boolean=True)  # fmt: skip
not_equal = _binary("NotEqual", "not_equal", "not_equal", """Return True where `a != b`.

    >>> rg.not_equal([1.0, 2.0], [1.0, 3.0])
    Tensor([False,  True], dtype=bool)
    """, boolean=True)  # fmt: skip
less = _binary("Less", "less", "less", """Return True where `a < b`.

    >>> rg.less([1.0, 2.0], 2)
    Tensor([ True, False], dtype=bool)
    """, real=True, boolean=True)  # fmt: skip
less_equal = _binary("LessEqual", "less_equal", "less_equal", """Return True where `a <= b`.

    >>> rg.less_equal([1.0, 2.0], 1)
    Tensor([ True, False], dtype=bool)
    """, real=True, boolean=True)  # fmt: skip
greater = _binary("Greater", "greater", "greater", """Return True where `a > b`.

    >>> rg.greater([1.0, 2.0], 1)
    Tensor([False,  True], dtype=bool)
    """, real=True, boolean=True)  # fmt: skip
greater_equal = _binary("GreaterEqual", "greater_equal", "greater_equal", """
    Return True where `a >= b`.

    >>> rg.greater_equal([1.0, 2.0], 2)
    Tensor([False,  True], dtype=bool)
    """, real=True, boolean=True)  # fmt: skip
logical_and = _binary("LogicalAnd", "logical_and", "logical_and", """
    Return True where a and b are both true (not 0).

    >>> rg.logical_and([True, True], [True, False])
    Tensor([ True, False], dtype=bool)
    """, boolean=True)  # fmt: skip
logical_or = _binary("LogicalOr", "logical_or", "logical_or", """
    Return True where a or b or both are true (not 0).

    >>> rg.logical_or([True, False], [False, False])
    Tensor([ True, False], dtype=bool)
    """, boolean=True)  # fmt: skip
logical_xor = _binary("LogicalXor", "logical_xor", "logical_xor", """
    Return True where exactly one of a and b is true (not 0).

    >>> rg.logical_xor([True, True], [True, False])
    Tensor([False,  True], dtype=bool)
    """, boolean=True)  # fmt: skip
bitwise_and = _binary("BitwiseAnd", "bitwise_and", "bitwise_and", """
    Return `a & b`: the bits that are set in both, of integers or bools.

    >>> rg.bitwise_and(rg.asarray([6, 5]), 3)
    Tensor([2, 1], dtype=int64)
    """)  # fmt: skip
bitwise_or = _binary("BitwiseOr", "bitwise_or", "bitwise_or", """
    Return `a | b`: the bits that are set in either, of integers or bools.

    >>> rg.bitwise_or(rg.asarray([6, 5]), 3)
    Tensor([7, 7], dtype=int64)
    """)  # fmt: skip
bitwise_xor = _binary("BitwiseXor", "bitwise_xor", "bitwise_xor", """
    Return `a ^ b`: the bits that are set in one of the two, of integers or bools.

    >>> rg.bitwise_xor(rg.asarray([6, 5]), 3)
    Tensor([5, 6], dtype=int64)
    """)  # fmt: skip
bitwise_left_shift = _binary("LeftShift", "bitwise_left_shift", "bitwise_left_shift", """
    Return `a << b`: the bits of integers moved up by b places.

    >>> rg.bitwise_left_shift(rg.asarray([1, 3]), 2)
    Tensor([ 4, 12], dtype=int64)
    """)  # fmt: skip
bitwise_right_shift = _binary(
    "RightShift", "bitwise_right_shift", "bitwise_right_shift", """
    Return `a >> b`: the bits of integers moved down by b places; the sign stays.

    >>> rg.bitwise_right_shift(rg.asarray([8, -8]), 2)
    Tensor([ 2, -2], dtype=int64)
    """
)  # fmt: skip


@op("IsClose", elementwise=True)
def isclose(
    xp, a: TensorLike, b: TensorLike, /, *, rtol: float = 1e-5, atol: float = 1e-8,
    equal_nan: bool = False,
) -> Tensor:  # fmt: skip
    """Return where `abs(a - b) <= atol + rtol * abs(b)`; infinities are close to themselves.

    Args:
        a: The values.
        b: The values to which they are compared.
        rtol: The tolerance relative to b.
        atol: The absolute tolerance.
        equal_nan: Whether NaN is close to NaN.

    Returns a Tensor of bools. It has no gradient.

    Source: `numpy.isclose`.

    >>> import regrad as rg
    >>> rg.isclose(rg.tensor([1.0, 2.0]), rg.tensor([1.0, 2.1])).tolist()
    [True, False]
    """
    if a.dtype == xp.bool:
        a, b = (backends.cast(xp, x, np.uint8) for x in (a, b))
    finite = xp.isfinite(a) & xp.isfinite(b)
    x, y = (xp.where(finite, z, xp.zeros_like(z)) for z in (a, b))
    # (a difference of unsigned integers wraps around)
    size = xp.abs(x - y) if backends.is_complex(a) else xp.maximum(x, y) - xp.minimum(x, y)
    near = size <= atol + rtol * xp.abs(y)
    close = (finite & near) | (a == b)
    return close | ((a != a) & (b != b)) if equal_nan else close


not_differentiable(
    "IsClose", "Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual",
    "LogicalAnd", "LogicalOr", "LogicalXor",
    "BitwiseAnd", "BitwiseOr", "BitwiseXor", "LeftShift", "RightShift",
)  # fmt: skip


# -- three tensors, many tensors -----------------------------------------------------------------


@op("SelectV2", elementwise=True, promotes=("a", "b"))
def where(xp, condition: TensorLike, a: TensorLike, b: TensorLike, /) -> Tensor:
    """Return `a` where `condition` is true (not 0), and `b` elsewhere.

    The gradient is masked, never multiplied, so a NaN in the branch not taken does no harm
    here. It may still make one further back (`0 * inf`); then guard the input as well:
    `where(x > 0, log(where(x > 0, x, 1)), 0)`.

    Args:
        condition: A Tensor or array of bools; of numbers, those that are not 0 are true.
        a, b: The values to choose from, Tensors, arrays or numbers.

    Returns:
        A Tensor of the shape to which the three broadcast, of the dtype to which a and b promote.

    Source: the Array API standard; `tf.where`.

    >>> rg.where([True, False], [1.0, 2.0], 0)
    Tensor([1., 0.], dtype=float32)
    """
    mask: Any = condition if condition.dtype == xp.bool else condition != 0
    if xp is np and mask.shape == a.shape == b.shape and a.dtype in BITS and a.size >= 8192:
        return _chosen_bits(mask, a, b)
    if hasattr(mask, "new_zeros") and mask.numel() >= 8192 and _chooses_slowly(mask, a, b):
        return _chosen_bits_in_torch(mask, a, b)
    return xp.where(mask, a, b)


BITS = {np.dtype(np.float32): np.int32, np.dtype(np.float64): np.int64}


def _chosen_bits(mask: Array, a: Array, b: Array) -> Array:
    """`where` for large arrays of one shape.

    NumPy's goes to and fro with the mask, and processors cannot guess which way: this takes the
    bits of one or the other without asking (a third of the time for a mask like relu's).
    """
    whole = BITS[a.dtype]
    left, right = a.view(whole), b.view(whole)
    bits = left ^ right
    bits &= np.negative(mask.view(np.int8), dtype=whole)  # all ones where the mask is set
    bits ^= right
    return bits.view(a.dtype)


def _chooses_slowly(mask: Array, a: Array, b: Array) -> bool:
    """Return whether torch's own `where` would choose element by element: plain CPU floats."""
    import torch

    return (
        mask.device.type == a.device.type == b.device.type == "cpu"
        and type(mask) is type(a) is type(b) is torch.Tensor
        and a.dtype == b.dtype
        and a.dtype in (torch.float32, torch.float64)
        and torch.broadcast_shapes(a.shape, b.shape) == mask.shape
        and not (a.is_neg() or b.is_neg())  # whose bits say something else
        and not torch._C._are_functorch_transforms_active()
        and not torch.compiler.is_compiling()
    )


def _chosen_bits_in_torch(mask: Array, a: Array, b: Array) -> Any:
    """As above, a tenth of the time; a or b may be a number."""
    import torch

    whole = torch.int32 if a.dtype == torch.float32 else torch.int64
    right = b.view(whole)
    bits = a.view(whole) ^ right
    bits &= mask.to(whole).neg_()
    bits ^= right
    return bits.view(a.dtype)


@gradient("SelectV2", "a")
def _(dy, condition):
    return where(condition, dy, 0)


@gradient("SelectV2", "b")
def _(dy, condition):
    return where(condition, 0, dy)


@op("ClipByValue", elementwise=True, real=True)
def _clip(xp, x: TensorLike, min: TensorLike | None, max: TensorLike | None) -> Tensor:
    if min is not None:
        x = xp.maximum(x, min)
    return x if max is None else xp.minimum(x, max)


@gradient("ClipByValue", "x")
def _(dy, x, min, max):
    if min is not None:
        dy = where(x >= min, dy, 0)
    return dy if max is None else where(x <= max, dy, 0)


@gradient("ClipByValue", "min")
def _(dy, x, min, max):
    dy = where(x < min, dy, 0)
    return dy if max is None else where(min <= max, dy, 0)


@gradient("ClipByValue", "max")
def _(dy, x, min, max):
    return where((x if min is None else maximum(x, min)) > max, dy, 0)


@public
def clip(x: TensorLike, /, min: TensorLike | None = None, max: TensorLike = None) -> Tensor:
    """Return x limited to `[min, max]`. The gradient passes at both bounds.

    Args:
        min: The lower bound, which broadcasts to x; None for none.
        max: The upper bound, which broadcasts to x; None for none.

    Returns:
        A Tensor of the shape to which x and the bounds broadcast, and of x's dtype.

    Raises:
        ArgumentError: both bounds are numbers, and `min` is greater than `max`.

    Op type: `ClipByValue`. Source: the Array API standard.

    >>> rg.clip([-2.0, 0.5, 3.0], -1, 1)
    Tensor([-1. ,  0.5,  1. ], dtype=float32)
    """
    if type(min) in (int, float) and type(max) in (int, float) and min > max:
        raise ArgumentError(f"clip: min ({min}) must not be greater than max ({max})")
    return _clip(x, min, max)


@op("AddN", promotes=True)
def add_n(xp, xs: Sequence[TensorLike], /) -> Tensor:
    """Return the sum of tensors of one shape.

    Args:
        xs: A list of Tensors or arrays.

    Returns:
        A Tensor of their shape, of the dtype to which they promote.

    Raises:
        ArgumentError: `xs` is not a list of Tensors or arrays.
        ShapeError: the shapes differ.

    Source: `tf.add_n`.

    >>> rg.add_n([rg.ones((2,)), rg.ones((2,)), rg.ones((2,))])
    Tensor([3., 3.], dtype=float32)
    """
    shapes = {tuple(x.shape) for x in xs}
    if len(shapes) > 1:
        raise ShapeError(f"add_n: all tensors must have one shape, got {sorted(shapes)}")
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total


@gradient("AddN", "xs")
def _(dy, xs_shape):
    return [dy for _ in xs_shape]
