"""Special functions, and functions with defined values at 0, NaN and infinities."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from regrad.core import backends
from regrad.core.backends import Array, Namespace, is_inexact
from regrad.core.op import TensorLike, op
from regrad.core.registry import gradient
from regrad.core.signatures import public
from regrad.core.tensor import Tensor
from regrad.errors import ArgumentError, kind
from regrad.ops.binary import add_n, where
from regrad.ops.casting import astype, imag, real
from regrad.ops.elementwise import isfinite, lgamma

# -- products and quotients that are 0 where the first factor is 0 -------------------------------


@op("Xlogy", elementwise=True, to_float=True)
def xlogy(xp, a: TensorLike, b: TensorLike, /) -> Tensor:
    """Return `a * log(b)`, and 0 where a is 0, for any b (including NaN).

    The gradients follow the same convention: where a is 0, both gradients are 0. (In PyTorch and
    JAX, the gradient of a is log(b) there.) So `xlogy(p, p)` has a finite gradient where p is 0,
    unlike `p * log(p)`.

    Args:
        a: The factor.
        b: The argument of the logarithm.

    Returns a Tensor of the shape to which a and b broadcast, with their common dtype.

    Source: `tf.math.xlogy`.

    >>> import regrad as rg
    >>> rg.xlogy(rg.tensor([0.0, 2.0]), rg.tensor([0.0, 1.0])).print()
    Tensor
        [0, 0]
    >>> rg.grad(lambda p: rg.xlogy(p, p))(rg.tensor([0.0, 1.0])).print()
    Tensor
        [0, 1]
    """
    zero = a == 0
    return xp.where(zero, xp.zeros_like(a), a * xp.log(xp.where(zero, xp.ones_like(b), b)))


gradient("Xlogy", "a")(lambda dy, a, b: dy * xlogy(_nonzero(a), b))
gradient("Xlogy", "b")(lambda dy, a, b: dy * xdivy(a, b))


@op("Xdivy", elementwise=True, to_float=True)
def xdivy(xp, a: TensorLike, b: TensorLike, /) -> Tensor:
    """Return `a / b`, and 0 where a is 0, for any b (including 0 and NaN).

    The gradients follow the same convention: where a is 0, both gradients are 0.

    Args:
        a: The numerator.
        b: The denominator.

    Returns a Tensor of the shape to which a and b broadcast, with their common dtype.

    Source: `tf.math.xdivy`.

    >>> import regrad as rg
    >>> rg.xdivy(rg.tensor([0.0, 1.0]), rg.tensor([0.0, 4.0])).print()
    Tensor
        [0, 0.25]
    """
    zero = a == 0
    return xp.where(zero, xp.zeros_like(a), a / xp.where(zero, xp.ones_like(b), b))


gradient("Xdivy", "a")(lambda dy, a, b: dy * xdivy(_nonzero(a), b))
gradient("Xdivy", "b")(lambda dy, b, y: -dy * xdivy(y, b))


def _nonzero(x: Tensor) -> Tensor:
    """Return 1 where x is not 0, and 0 elsewhere."""
    return astype(x != 0, x.dtype)


# -- sinc ------------------------------------------------------------------------------------------


@op("Sinc", elementwise=True, to_float=True)
def sinc(xp, x: TensorLike, /) -> Tensor:
    """Return `sin(πx) / (πx)`, and 1 at 0. Derivatives of any order are exact, also at 0.

    Args:
        x: The argument, real or complex.

    Returns a Tensor of x's shape; integers become float32.

    Source: `numpy.sinc`.

    >>> import regrad as rg
    >>> rg.sinc(rg.tensor([0.0, 0.5])).print()
    Tensor
        [1, 0.6366197]
    """
    return xp.sinc(x)


gradient("Sinc")(lambda dy, x: dy * _sinc_derivative(x, n=1))


@op("SincDerivative", elementwise=True, to_float=True)
def _sinc_derivative(xp, x: TensorLike, /, n: int) -> Tensor:
    """Return the n-th derivative of `sinc`.

    With t = πx, it is πⁿ times the n-th derivative f of sin(t) / t. Far from 0, f follows from
    `t f⁽ᵏ⁾ + k f⁽ᵏ⁻¹⁾ = sin⁽ᵏ⁾(t)`. Near 0 rounding errors would dominate these quotients.
    There, f is computed as the integral of `sⁿ cos⁽ⁿ⁾(ts)` over s from 0 to 1.
    """
    t = math.pi * x
    near = xp.abs(t) < n + 2
    far = xp.where(near, xp.full_like(t, n + 2), t)
    return math.pi**n * xp.where(near, _integral(xp, t, n), _recurrence(xp, far, n))


gradient("SincDerivative")(lambda dy, x, n: dy * _sinc_derivative(x, n=n + 1))


def _integral(xp: Namespace, t: Array, n: int) -> Any:
    """Integrate by Gauss-Legendre, exact up to rounding for the few periods with `|t| < n + 2`."""
    nodes, weights = np.polynomial.legendre.leggauss(n + 12)
    total = xp.zeros_like(t)
    for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
        total = total + float(weight * node**n) * _turned(xp, n + 1, float(node) * t)
    return total


def _recurrence(xp: Namespace, t: Array, n: int) -> Any:
    y = xp.sin(t) / t
    for k in range(1, n + 1):
        y = (_turned(xp, k, t) - k * y) / t
    return y


def _turned(xp: Namespace, k: int, t: Array) -> Any:
    """Return the k-th derivative of the sine."""
    y = xp.cos(t) if k % 2 else xp.sin(t)
    return -y if k % 4 > 1 else y


# -- NaN and infinities ---------------------------------------------------------------------------


@op("NanToNum", elementwise=True, holomorphic=False)
def nan_to_num(
    xp, x: TensorLike, /, *, nan: float = 0.0, posinf: float | None = None,
    neginf: float | None = None,
) -> Tensor:  # fmt: skip
    """Return x with NaN and infinities replaced by numbers, which have gradient 0.

    Args:
        x: The values. Real and imaginary parts of complex numbers are replaced separately.
        nan: The replacement of NaN.
        posinf: The replacement of infinity; by default the largest number of x's dtype.
        neginf: The replacement of -infinity; by default the smallest number of x's dtype.

    Returns a Tensor of x's shape and dtype.

    Source: `numpy.nan_to_num`.

    >>> import regrad as rg
    >>> rg.nan_to_num(rg.tensor([1.0, float("nan"), float("inf")]), posinf=9.0).print()
    Tensor
        [1, 0, 9]
    """
    if not is_inexact(backends.numpy_dtype(x.dtype)):
        return x
    if backends.is_complex(x):
        parts = (_numbers(xp, part, nan, posinf, neginf) for part in (xp.real(x), xp.imag(x)))
        return next(parts) + 1j * next(parts)
    return _numbers(xp, x, nan, posinf, neginf)


def _numbers(
    xp: Namespace, x: Array, nan: float, posinf: float | None, neginf: float | None
) -> Any:
    limits = xp.finfo(x.dtype)
    high, low = (d if v is None else v for d, v in ((limits.max, posinf), (limits.min, neginf)))
    x = xp.where(x == math.inf, xp.full_like(x, high), x)
    x = xp.where(x == -math.inf, xp.full_like(x, low), x)
    return xp.where(x != x, xp.full_like(x, nan), x)


@gradient("NanToNum")
def _(dy, x):
    if x.dtype.kind != "c":
        return where(isfinite(x), dy, 0)
    parts = where(isfinite(real(x)), real(dy), 0), where(isfinite(imag(x)), imag(dy), 0)
    return parts[0] + 1j * parts[1]


# -- the multivariate gamma function -----------------------------------------------------------


@public
def multigammaln(x: TensorLike, d: int, /) -> Tensor:
    """Return the logarithm of the multivariate gamma function of dimension d.

    Args:
        x: The argument, above `(d - 1) / 2`. Elsewhere the result is NaN.
        d: The dimension, an int from 1 to 1000.

    Returns a Tensor of x's shape; integers become float32.

    Raises ArgumentError if d is not an int from 1 to 1000.

    A composition of `Lgamma`. Source: `scipy.special.multigammaln`.

    >>> import regrad as rg
    >>> rg.multigammaln(3.0, 1).print()
    Tensor
        0.6931471824645996
    """
    # (each dimension is a separate op, so a very large d would exhaust the memory)
    if not isinstance(d, int | np.integer) or isinstance(d, bool) or not 1 <= d <= 1000:
        raise ArgumentError(
            f"multigammaln: expected an int from 1 to 1000 for 'd', got {kind(d)}: {d!r:.40}"
        )
    terms = [lgamma(x) if j == 0 else lgamma(x - j / 2) for j in range(d)]
    total = add_n(terms) + d * (d - 1) / 4 * math.log(math.pi)
    return where(x > (d - 1) / 2, total, math.nan)
