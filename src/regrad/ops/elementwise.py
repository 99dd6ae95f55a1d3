"""Elementwise ops of one tensor."""

from __future__ import annotations

import math
from typing import Any

from regrad.core import backends
from regrad.core.backends import Array, Namespace, special
from regrad.core.op import TensorLike, op, piecewise_constant, row
from regrad.core.registry import OPS, gradient, not_differentiable
from regrad.core.rule import no_gradient
from regrad.core.tensor import Tensor
from regrad.ops.casting import conj, real
from regrad.ops.creation_like import zeros_like

# -- one tensor --------------------------------------------------------------------------------


@row("Abs", lambda dy, x: dy * sign(x), holomorphic=False)
def abs(x):
    """Return the absolute value. The gradient at 0 is 0.

    >>> rg.abs([-2.0, 3.0])
    Tensor([2., 3.], dtype=float32)
    """


@row("Neg", lambda dy: -dy)
def negative(x):
    """Return `-x`.

    >>> rg.negative([1.0, -2.0])
    Tensor([-1.,  2.], dtype=float32)
    """


@row("Sign", holomorphic=False)
def sign(x):
    """Return the sign, -1, 0 or 1; `x / abs(x)` for complex x.

    The gradient of real x is 0.

    >>> rg.sign([-2.0, 0.0, 3.0])
    Tensor([-1.,  0.,  1.], dtype=float32)
    """


@row("Square", lambda dy, x: dy * (2 * x))
def square(x):
    """Return `x * x`.

    >>> rg.square([2.0, -3.0])
    Tensor([4., 9.], dtype=float32)
    """


@row("Sqrt", lambda dy, y: dy / (2 * y), to_float=True)
def sqrt(x):
    """Return the square root; NaN for negative real x. The gradient at 0 is infinite.

    >>> rg.sqrt([4.0, 9.0])
    Tensor([2., 3.], dtype=float32)
    """


@row(
    "Rsqrt",
    lambda dy, y: dy * (-0.5 * y * square(y)),
    kernel=lambda xp, x: 1 / xp.sqrt(x),
    to_float=True,
)
def rsqrt(x):
    """Return `1 / sqrt(x)`.

    >>> rg.rsqrt([4.0, 16.0])
    Tensor([0.5 , 0.25], dtype=float32)
    """


@row("Reciprocal", lambda dy, y: -dy * square(y), kernel=lambda xp, x: 1 / x, to_float=True)
def reciprocal(x):
    """Return `1 / x`.

    >>> rg.reciprocal([2.0, -4.0])
    Tensor([ 0.5 , -0.25], dtype=float32)
    """


@row("Exp", lambda dy, y: dy * y, to_float=True)
def exp(x):
    """Return e to the power x.

    >>> rg.exp([0.0, 1.0])
    Tensor([1.      , 2.718282], dtype=float32)
    """


def _expm1(xp: Namespace, x: Array) -> Any:
    y = xp.expm1(x)
    if not backends.is_complex(x):
        return y
    # for x that is not finite, the libraries lose parts that the standard defines
    y = xp.where(xp.isfinite(x), y, xp.exp(x) - 1)
    size, any_angle = xp.real(x), ~xp.isfinite(xp.imag(x))
    y = xp.where((size == -math.inf) & any_angle, xp.full_like(x, -1), y)
    return xp.where((size == math.inf) & any_angle, xp.full_like(x, complex("inf+nanj")), y)


@row("Expm1", lambda dy, y: dy * (y + 1), kernel=_expm1, to_float=True)
def expm1(x):
    """Return `exp(x) - 1`, accurate near 0.

    >>> rg.expm1([0.0, 1e-6])
    Tensor([0.0000000e+00, 1.0000005e-06], dtype=float32)
    """


@row("Log", lambda dy, x: dy / x, to_float=True)
def log(x):
    """Return the natural logarithm; -inf at 0, NaN for negative real x.

    >>> rg.log([1.0, 10.0])
    Tensor([0.       , 2.3025851], dtype=float32)
    """


@row("Log1p", lambda dy, x: dy / (1 + x), to_float=True)
def log1p(x):
    """Return `log(1 + x)`, accurate near 0.

    >>> rg.log1p([0.0, 1e-6])
    Tensor([0.000000e+00, 9.999995e-07], dtype=float32)
    """


@row("Log2", lambda dy, x: dy / (math.log(2) * x), to_float=True)
def log2(x):
    """Return the logarithm to base 2.

    >>> rg.log2([1.0, 8.0])
    Tensor([0., 3.], dtype=float32)
    """


@row("Log10", lambda dy, x: dy / (math.log(10) * x), to_float=True)
def log10(x):
    """Return the logarithm to base 10.

    >>> rg.log10([1.0, 10.0])
    Tensor([0., 1.], dtype=float32)
    """


@row("Sin", lambda dy, x: dy * cos(x), to_float=True)  # pyright: ignore[reportGeneralTypeIssues]
def sin(x):
    """Return the sine of x, in radians.

    >>> rg.sin([0.0, 1.0])
    Tensor([0.      , 0.841471], dtype=float32)
    """


@row("Cos", lambda dy, x: -dy * sin(x), to_float=True)
def cos(x):
    """Return the cosine of x, in radians.

    >>> rg.cos([0.0, 1.0])
    Tensor([1.       , 0.5403023], dtype=float32)
    """


@row("Tan", lambda dy, y: dy * (1 + square(y)), to_float=True)
def tan(x):
    """Return the tangent of x, in radians.

    >>> rg.tan([0.0, 1.0])
    Tensor([0.       , 1.5574077], dtype=float32)
    """


@row("Asin", lambda dy, x: dy / sqrt((1 - x) * (1 + x)), to_float=True)
def asin(x):
    """Return the inverse sine in radians, in [-π/2, π/2]; NaN for real x outside [-1, 1].

    >>> rg.asin([0.0, 1.0])
    Tensor([0.       , 1.5707964], dtype=float32)
    """


@row("Acos", lambda dy, x: -dy / sqrt((1 - x) * (1 + x)), to_float=True)
def acos(x):
    """Return the inverse cosine in radians, in [0, π]; NaN for real x outside [-1, 1].

    >>> rg.acos([0.0, 1.0])
    Tensor([1.5707964, 0.       ], dtype=float32)
    """


@row("Atan", lambda dy, x: dy / (1 + square(x)), to_float=True)
def atan(x):
    """Return the inverse tangent in radians, in [-π/2, π/2].

    >>> rg.atan([0.0, 1.0])
    Tensor([0.       , 0.7853982], dtype=float32)
    """


@row("Sinh", lambda dy, x: dy * cosh(x), to_float=True)  # pyright: ignore[reportGeneralTypeIssues]
def sinh(x):
    """Return the hyperbolic sine.

    >>> rg.sinh([0.0, 1.0])
    Tensor([0.       , 1.1752012], dtype=float32)
    """


@row("Cosh", lambda dy, x: dy * sinh(x), to_float=True)
def cosh(x):
    """Return the hyperbolic cosine.

    >>> rg.cosh([0.0, 1.0])
    Tensor([1.       , 1.5430807], dtype=float32)
    """


@row("Tanh", lambda dy, y: dy * (1 - square(y)), to_float=True)
def tanh(x):
    """Return the hyperbolic tangent.

    >>> rg.tanh([0.0, 1.0])
    Tensor([0.       , 0.7615942], dtype=float32)
    """


@row("Asinh", lambda dy, x: dy / sqrt(1 + square(x)), to_float=True)
def asinh(x):
    """Return the inverse hyperbolic sine.

    >>> rg.asinh([0.0, 1.0])
    Tensor([0.       , 0.8813736], dtype=float32)
    """


@row("Acosh", lambda dy, x: dy / (sqrt(x - 1) * sqrt(x + 1)), to_float=True)
def acosh(x):
    """Return the inverse hyperbolic cosine, at least 0; NaN for real x below 1.

    >>> rg.acosh([1.0, 2.0])
    Tensor([0.      , 1.316958], dtype=float32)
    """


@row("Atanh", lambda dy, x: dy / ((1 - x) * (1 + x)), to_float=True)
def atanh(x):
    """Return the inverse hyperbolic tangent; NaN for real x outside [-1, 1].

    >>> rg.atanh([0.0, 0.5])
    Tensor([0.        , 0.54930615], dtype=float32)
    """


@row(
    "Erf",
    lambda dy, x: dy * (2 / math.sqrt(math.pi) * exp(-square(x))),
    kernel=lambda xp, x: special(xp).erf(x),
    to_float=True,
)
def erf(x):
    """Return the error function, `2 / sqrt(π)` times the integral of `exp(-t²)` from 0 to x.

    >>> rg.erf([0.0, 1.0])
    Tensor([0.       , 0.8427008], dtype=float32)
    """


@row(
    "Erfc",
    lambda dy, x: dy * (-2 / math.sqrt(math.pi) * exp(-square(x))),
    kernel=lambda xp, x: special(xp).erfc(x),
    to_float=True,
)
def erfc(x):
    """Return `1 - erf(x)`, accurate where `erf(x)` is close to 1.

    >>> rg.erfc([0.0, 3.0])
    Tensor([1.0000000e+00, 2.2090497e-05], dtype=float32)
    """


@row(
    "Erfinv",
    lambda dy, y: dy * (math.sqrt(math.pi) / 2 * exp(square(y))),
    kernel=lambda xp, x: special(xp).erfinv(x),
    to_float=True,
)
def erfinv(x):
    """Return the inverse of `erf`; infinite at -1 and 1, NaN beyond.

    >>> rg.erfinv([0.0, 0.5])
    Tensor([0.        , 0.47693628], dtype=float32)
    """


@row(
    "Lgamma",
    lambda dy, x: dy * digamma(x),
    kernel=lambda xp, x: special(xp).gammaln(x),
    to_float=True,
)
def lgamma(x):
    """Return the logarithm of the absolute value of the gamma function.

    >>> rg.lgamma([1.0, 5.0])
    Tensor([0.       , 3.1780539], dtype=float32)
    """


@row(
    "Digamma",
    lambda dy, x: dy * polygamma(x, 1),
    kernel=lambda xp, x: (
        special(xp).psi(x) if hasattr(special(xp), "psi") else special(xp).digamma(x)
    ),
    to_float=True,
)
def digamma(x):
    """Return the derivative of `lgamma`.

    >>> rg.digamma([1.0, 5.0])
    Tensor([-0.5772157,  1.5061177], dtype=float32)
    """


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


@row("Ceil", real=True)
def ceil(x):
    """Return the smallest integer that is not less than x. The gradient is 0.

    >>> rg.ceil([1.2, -1.2])
    Tensor([ 2., -1.], dtype=float32)
    """


@row("Floor", real=True)
def floor(x):
    """Return the largest integer that is not greater than x. The gradient is 0.

    >>> rg.floor([1.2, -1.2])
    Tensor([ 1., -2.], dtype=float32)
    """


@row("Round")
def round(x):
    """Return the nearest integer; ties go to the even one.

    The gradient is 0.

    >>> rg.round([0.5, 1.5, 1.7])
    Tensor([0., 2., 2.], dtype=float32)
    """


@row("Trunc", real=True)
def trunc(x):
    """Return x without its fractional part. The gradient is 0.

    >>> rg.trunc([1.7, -1.7])
    Tensor([ 1., -1.], dtype=float32)
    """


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


@row("IsNan", boolean=True)
def isnan(x):
    """Return True where x is NaN.

    >>> rg.isnan([1.0, float("nan")])
    Tensor([False,  True], dtype=bool)
    """


@row("IsInf", boolean=True)
def isinf(x):
    """Return True where x is infinite, of either sign.

    >>> rg.isinf([1.0, float("-inf")])
    Tensor([False,  True], dtype=bool)
    """


@row("IsFinite", boolean=True)
def isfinite(x):
    """Return True where x is neither infinite nor NaN.

    >>> rg.isfinite([1.0, float("inf")])
    Tensor([ True, False], dtype=bool)
    """


@row("SignBit", real=True, boolean=True)
def signbit(x):
    """Return True where x is negative, -0 included.

    >>> rg.signbit([1.0, -0.0])
    Tensor([False,  True], dtype=bool)
    """


@row("LogicalNot", boolean=True)
def logical_not(x):
    """Return True where x is 0 or False.

    >>> rg.logical_not([True, False])
    Tensor([False,  True], dtype=bool)
    """


@row("Invert")
def bitwise_invert(x):
    """Return `~x`: every bit of an integer inverted, or `not x` for bools.

    >>> rg.bitwise_invert(rg.asarray([0, 5]))
    Tensor([-1, -6], dtype=int64)
    """


not_differentiable("IsNan", "IsInf", "IsFinite", "SignBit", "LogicalNot", "Invert")
