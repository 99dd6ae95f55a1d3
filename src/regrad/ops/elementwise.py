"""Elementwise ops of one tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from regrad.core import backends, dispatch
from regrad.core.backends import Array, DTypeLike, Namespace, is_inexact, special
from regrad.core.op import TensorLike, elementwise, op, piecewise_constant
from regrad.core.registry import gradient, not_differentiable
from regrad.core.rule import no_gradient
from regrad.core.signatures import public
from regrad.core.tensor import Tensor
from regrad.ops.creation import as_numpy_dtype
from regrad.ops.creation_like import zeros_like

Kernel = Callable[..., Any] | str  # or its name in the standard


# -- complex numbers ---------------------------------------------------------------------------
# Gradients follow TensorFlow's convention: for y = f(x) the gradient is dy * conj(f'(x)).


@op("Conj", elementwise=True, holomorphic=False)
def _conj(xp, x: TensorLike, /) -> Tensor:
    return xp.conj(x)


gradient("Conj")(lambda dy: conj(dy))


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


gradient("Real")(lambda dy, x_dtype: dispatch.as_dtype(dy, backends.numpy_dtype(x_dtype)))


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
    return dy * 1j if backends.numpy_dtype(x_dtype).kind == "c" else no_gradient(dy)


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


gradient("Polygamma")(lambda dy, x, n: dy * polygamma(x, n + 1))


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
    piecewise_constant(_type, no_gradient)


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
