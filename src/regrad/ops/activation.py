"""Activation functions and softmax. Every kernel is stable for large inputs of either sign."""

from __future__ import annotations

import math

from regrad.core import dispatch
from regrad.core.backends import Array, Namespace, special
from regrad.core.op import TensorLike, elementwise, op
from regrad.core.registry import gradient
from regrad.core.shapes import Axis, normalized_axes
from regrad.core.signatures import public
from regrad.core.tensor import Tensor
from regrad.errors import InvalidValueError
from regrad.ops.elementwise import abs, clip, erfc, exp, logical_and, square, tanh, where
from regrad.ops.reduction import sum
from regrad.ops.rows import _sums, _tops

# -- rectifiers ----------------------------------------------------------------------------------

relu = elementwise(
    "Relu", "relu", lambda xp, x: xp.maximum(x, 0), "`max(x, 0)`. Gradient at 0: 0.",
    # where y > 0 fails, y is 0 or NaN, and a NaN stays visible
    lambda dy, y: where(y > 0, dy, 0 * y), real=True,
)  # fmt: skip

relu6 = elementwise(
    "Relu6", "relu6", lambda xp, x: xp.minimum(xp.maximum(x, 0), 6),
    "`min(max(x, 0), 6)`. Gradient at 0: 0, at 6: 1.",
    lambda dy, x: where(logical_and(x > 0, x <= 6), dy, 0), real=True,
)  # fmt: skip


@op("LeakyRelu", elementwise=True, to_float=True, real=True)
def leaky_relu(xp, x: TensorLike, /, alpha: float = 0.2) -> Tensor:
    """x where x > 0, `alpha * x` elsewhere. Gradient at 0: `alpha`."""
    return xp.where(x > 0, x, alpha * x)


@gradient("LeakyRelu")
def _(dy, x, alpha):
    return where(x > 0, dy, alpha * dy)


prelu = elementwise(
    "Prelu", "prelu", lambda xp, x, alpha: xp.where(x > 0, x, alpha * x),
    "x where x > 0, `alpha * x` elsewhere; `alpha` is learned, and broadcasts.\n\n"
    "    Gradient by x at 0: `alpha`.",
    lambda dy, x, alpha: where(x > 0, dy, alpha * dy),
    lambda dy, x: where(x > 0, 0, dy * x),
    to_float=True, inputs="x alpha", real=True,
)  # fmt: skip


# -- exponential units ---------------------------------------------------------------------------

# Klambauer et al., Self-Normalizing Neural Networks (2017)
SELU_SCALE = 1.0507009873554805
SELU_SCALE_ALPHA = 1.7580993408473768


def _elu(xp: Namespace, x: Array) -> Array:
    return xp.where(x > 0, x, xp.expm1(xp.minimum(x, 0)))


def _selu(xp: Namespace, x: Array) -> Array:
    return xp.where(x > 0, SELU_SCALE * x, SELU_SCALE_ALPHA * xp.expm1(xp.minimum(x, 0)))


elu = elementwise(
    "Elu", "elu", _elu, "x where x > 0, `exp(x) - 1` elsewhere. Gradient at 0: 1.",
    lambda dy, y: where(y >= 0, dy, dy * (y + 1)), to_float=True, real=True,
)  # fmt: skip

selu = elementwise(
    "Selu", "selu", _selu,
    "The scaled exponential linear unit, which keeps mean 0 and variance 1.\n\n"
    "    Gradient at 0: 1.7580993408473768, the limit from below.",
    lambda dy, y: where(y > 0, SELU_SCALE * dy, dy * (y + SELU_SCALE_ALPHA)),
    to_float=True, real=True,
)  # fmt: skip


# -- sigmoids ------------------------------------------------------------------------------------


def _softplus(xp: Namespace, x: Array) -> Array:
    return xp.maximum(x, 0) + xp.log1p(xp.exp(-xp.abs(x)))


sigmoid = elementwise(
    "Sigmoid", "sigmoid", lambda xp, x: special(xp).expit(x), "`1 / (1 + exp(-x))`.",
    lambda dy, y: dy * (y * (1 - y)), to_float=True,
)  # fmt: skip

log_sigmoid = elementwise(
    "LogSigmoid", "log_sigmoid", lambda xp, x: -_softplus(xp, -x), "`log(sigmoid(x))`, stable.",
    lambda dy, x: dy * sigmoid(-x), to_float=True, real=True,
)  # fmt: skip

softplus = elementwise(
    "Softplus", "softplus", _softplus, "`log(1 + exp(x))`, stable.",
    lambda dy, x: dy * sigmoid(x), to_float=True, real=True,
)  # fmt: skip

softsign = elementwise(
    "Softsign", "softsign", lambda xp, x: x / (1 + xp.abs(x)), "`x / (1 + abs(x))`.",
    lambda dy, x: dy / square(1 + abs(x)), to_float=True,
)  # fmt: skip


@public
def hard_sigmoid(x: TensorLike, /) -> Tensor:
    """`relu6(x + 3) / 6`, as JAX, PyTorch and Keras 3 have it.

    TensorFlow.js's layers and Keras 2 use `clip(0.2 * x + 0.5, 0, 1)` under this name.
    """
    return relu6(dispatch.lift(x) + 3) / 6


@public
def hard_tanh(x: TensorLike, /) -> Tensor:
    """x, brought into [-1, 1]; the gradient passes at both bounds."""
    return clip(x, -1, 1)


# -- x times a gate ------------------------------------------------------------------------------


def _silu(dy, x):
    s = sigmoid(x)
    return dy * (s * (1 + x * (1 - s)))


silu = elementwise(
    "Silu", "silu", lambda xp, x: x * special(xp).expit(x),
    "`x * sigmoid(x)`, also called swish.", _silu, to_float=True,
)  # fmt: skip


@public
def mish(x: TensorLike, /) -> Tensor:
    """`x * tanh(softplus(x))`."""
    x = dispatch.lift(x)
    return x * tanh(softplus(x))


@op("Gelu", elementwise=True, to_float=True)
def gelu(xp, x: TensorLike, /, approximate: bool = False) -> Tensor:
    """x times the probability that a standard normal variable is below x.

    With `approximate=True` that probability is `sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x³))`
    instead, which older models were trained with (the form with `tanh` is the same function).
    """
    if approximate not in (True, False):
        raise InvalidValueError(
            f"gelu: approximate must be True (the form with tanh) or False, got {approximate!r:.40}"
        )
    if approximate:
        return x * special(xp).expit(TANH_SLOPE * (x + TANH_CUBIC * x * x * x))
    return 0.5 * x * special(xp).erfc(-SQRT_HALF * x)


@gradient("Gelu")
def _(dy, x, approximate):
    x = clip(x, -GELU_ENDS, GELU_ENDS)
    if approximate:
        s = sigmoid(TANH_SLOPE * (x + TANH_CUBIC * x * square(x)))
        return dy * (s + x * (s * (1 - s)) * (TANH_SLOPE * (1 + 3 * TANH_CUBIC * square(x))))
    density = exp(-0.5 * square(x)) / math.sqrt(2 * math.pi)
    return dy * (0.5 * erfc(-SQRT_HALF * x) + x * density)


# Beyond it the density is 0 in every dtype, and the cube of x overflows in none.
GELU_ENDS = 40
SQRT_HALF = math.sqrt(0.5)
TANH_SLOPE = 2 * math.sqrt(2 / math.pi)
TANH_CUBIC = 0.044715


# -- softmax -------------------------------------------------------------------------------------


def _below_max(xp: Namespace, x: Array, axis: tuple[int, ...]) -> Array:
    """x minus its largest element along `axis`, so that `exp` cannot overflow."""
    return x - _tops(xp, x, axis) if 0 not in x.shape else x


@op("Softmax", to_float=True)
def softmax(xp, x: TensorLike, /, axis: Axis = -1) -> Tensor:
    """`exp(x) / sum(exp(x))` along `axis` (an axis, several, or None for all).

    >>> import regrad as rg
    >>> rg.nn.softmax(rg.tensor([0.0, 0.0, 1000.0])).print()
    Tensor
        [0, 0, 1]
    """
    axes = normalized_axes(axis, x.ndim)
    y = xp.exp(_below_max(xp, x, axes))
    return y / _sums(xp, y, axes, True)


@gradient("Softmax")
def _(dy, y, axis):
    return y * (dy - sum(dy * y, axis=axis, keepdims=True))


@op("LogSoftmax", to_float=True)
def log_softmax(xp, x: TensorLike, /, axis: Axis = -1) -> Tensor:
    """`log(softmax(x, axis))`, accurate also where the softmax is 0 or 1 to the last digit."""
    axes = normalized_axes(axis, x.ndim)
    below = _below_max(xp, x, axes)
    return below - xp.log(_sums(xp, xp.exp(below), axes, True))


@gradient("LogSoftmax")
def _(dy, y, axis):
    return dy - exp(y) * sum(dy, axis=axis, keepdims=True)
