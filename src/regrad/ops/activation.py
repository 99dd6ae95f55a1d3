"""Activation functions and softmax. Every kernel is stable for large inputs of either sign."""

from __future__ import annotations

import math

from regrad.core import dispatch
from regrad.core.backends import Array, Namespace, in_single, special
from regrad.core.op import TensorLike, op, row
from regrad.core.registry import gradient
from regrad.core.shapes import Axis, normalized_axes
from regrad.core.signatures import public
from regrad.core.tensor import Tensor
from regrad.errors import InvalidValueError
from regrad.ops.binary import clip, logical_and, where
from regrad.ops.elementwise import abs, erfc, exp, square, tanh
from regrad.ops.reduction import sum
from regrad.ops.rows import _sums, _tops

# -- rectifiers ----------------------------------------------------------------------------------


@row(
    "Relu", lambda dy, y: where(y > 0, dy, 0 * y), kernel=lambda xp, x: xp.maximum(x, 0), real=True
)
def relu(x):
    """Return `max(x, 0)`. The gradient at 0 is 0.

    >>> rg.nn.relu([-1.0, 2.0])
    Tensor([0., 2.], dtype=float32)
    """


@row(
    "Relu6",
    lambda dy, x: where(logical_and(x > 0, x <= 6), dy, 0),
    kernel=lambda xp, x: xp.minimum(xp.maximum(x, 0), 6),
    real=True,
)
def relu6(x):
    """Return `min(max(x, 0), 6)`. The gradient is 0 at 0 and 1 at 6.

    >>> rg.nn.relu6([-1.0, 2.0, 7.0])
    Tensor([0., 2., 6.], dtype=float32)
    """


@op("LeakyRelu", elementwise=True, to_float=True, real=True)
def leaky_relu(xp, x: TensorLike, /, alpha: float = 0.2) -> Tensor:
    """Return x where x > 0, and `alpha * x` elsewhere. The gradient at 0 is `alpha`.

    Args:
        alpha: The slope below 0, a number.

    Returns:
        A Tensor of x's shape and dtype. Integers and bools become the default dtype.

    Source: `tf.leakyRelu` of TensorFlow.js.

    >>> rg.nn.leaky_relu([-1.0, 2.0])
    Tensor([-0.2,  2. ], dtype=float32)
    """
    return xp.where(x > 0, x, alpha * x)


gradient("LeakyRelu")(lambda dy, x, alpha: where(x > 0, dy, alpha * dy))


@row(
    "Prelu",
    lambda dy, x, alpha: where(x > 0, dy, alpha * dy),
    lambda dy, x: where(x > 0, 0, dy * x),
    kernel=lambda xp, x, alpha: xp.where(x > 0, x, alpha * x),
    to_float=True,
    real=True,
)
def prelu(x, alpha):
    """Return x where x > 0, and `alpha * x` elsewhere. `alpha` is a parameter with a gradient.

    The gradient with respect to x at 0 is `alpha`.

    Source: `tf.prelu` of TensorFlow.js; He et al. (2015).

    >>> rg.nn.prelu([-1.0, 2.0], [0.1, 0.1])
    Tensor([-0.1,  2. ], dtype=float32)
    """


# -- exponential units ---------------------------------------------------------------------------

# Klambauer et al., Self-Normalizing Neural Networks (2017)
SELU_SCALE = 1.0507009873554805
SELU_SCALE_ALPHA = 1.7580993408473768


def _elu(xp: Namespace, x: Array) -> Array:
    return xp.where(x > 0, x, xp.expm1(xp.minimum(x, 0)))


def _selu(xp: Namespace, x: Array) -> Array:
    return xp.where(x > 0, SELU_SCALE * x, SELU_SCALE_ALPHA * xp.expm1(xp.minimum(x, 0)))


@row("Elu", lambda dy, y: where(y >= 0, dy, dy * (y + 1)), kernel=_elu, to_float=True, real=True)
def elu(x):
    """Return x where x > 0, and `exp(x) - 1` elsewhere. The gradient at 0 is 1.

    Source: Clevert et al. (2015).

    >>> rg.nn.elu([-1.0, 2.0])
    Tensor([-0.63212055,  2.        ], dtype=float32)
    """


@row(
    "Selu",
    lambda dy, y: where(y > 0, SELU_SCALE * dy, dy * (y + SELU_SCALE_ALPHA)),
    kernel=_selu,
    to_float=True,
    real=True,
)
def selu(x):
    """Return the scaled exponential linear unit, which keeps mean 0 and variance 1.

    The gradient at 0 is 1.7580993408473768, the limit from below.

    Source: Klambauer et al., Self-Normalizing Neural Networks (2017).

    >>> rg.nn.selu([-1.0, 2.0])
    Tensor([-1.1113307,  2.101402 ], dtype=float32)
    """


# -- sigmoids ------------------------------------------------------------------------------------


def _softplus(xp: Namespace, x: Array) -> Array:
    return xp.maximum(x, 0) + xp.log1p(xp.exp(-xp.abs(x)))


@row(
    "Sigmoid",
    lambda dy, y: dy * (y * (1 - y)),
    kernel=lambda xp, x: special(xp).expit(x),
    to_float=True,
)
def sigmoid(x):
    """Return `1 / (1 + exp(-x))`.

    >>> rg.nn.sigmoid([0.0, 2.0])
    Tensor([0.5     , 0.880797], dtype=float32)
    """


@row(
    "LogSigmoid",
    lambda dy, x: dy * sigmoid(-x),
    kernel=lambda xp, x: -_softplus(xp, -x),
    to_float=True,
    real=True,
)
def log_sigmoid(x):
    """Return `log(sigmoid(x))`, without overflow.

    >>> rg.nn.log_sigmoid([0.0, 2.0])
    Tensor([-0.6931472, -0.126928 ], dtype=float32)
    """


@row("Softplus", lambda dy, x: dy * sigmoid(x), kernel=_softplus, to_float=True, real=True)
def softplus(x):
    """Return `log(1 + exp(x))`, without overflow.

    >>> rg.nn.softplus([0.0, 2.0])
    Tensor([0.6931472, 2.126928 ], dtype=float32)
    """


@row(
    "Softsign",
    lambda dy, x: dy / square(1 + abs(x)),
    kernel=lambda xp, x: x / (1 + xp.abs(x)),
    to_float=True,
)
def softsign(x):
    """Return `x / (1 + abs(x))`.

    >>> rg.nn.softsign([-1.0, 3.0])
    Tensor([-0.5 ,  0.75], dtype=float32)
    """


@public
def hard_sigmoid(x: TensorLike, /) -> Tensor:
    """Return `relu6(x + 3) / 6`, the definition of JAX, PyTorch and Keras 3.

    The layers of TensorFlow.js and Keras 2 use `clip(0.2 * x + 0.5, 0, 1)` under the same name.

    Returns:
        A Tensor of x's shape and dtype. Integers and bools become the default dtype.

    Raises:
        DTypeError: x is complex.

    A composition of `Relu6` and arithmetic. Source: `jax.nn.hard_sigmoid`.

    >>> rg.nn.hard_sigmoid([-4.0, 0.0, 4.0])
    Tensor([0. , 0.5, 1. ], dtype=float32)
    """
    return relu6(dispatch.lift(x) + 3) / 6


@public
def hard_tanh(x: TensorLike, /) -> Tensor:
    """Return x limited to [-1, 1]. The gradient passes at both bounds.

    Returns:
        A Tensor of x's shape and dtype.

    Raises:
        DTypeError: x is complex.

    Op type: `ClipByValue`. Source: `jax.nn.hard_tanh`.

    >>> rg.nn.hard_tanh([-2.0, 0.5])
    Tensor([-1. ,  0.5], dtype=float32)
    """
    return clip(x, -1, 1)


# -- x times a gate ------------------------------------------------------------------------------


def _silu(dy, x):
    s = sigmoid(x)
    return dy * (s * (1 + x * (1 - s)))


@row("Silu", _silu, kernel=lambda xp, x: x * special(xp).expit(x), to_float=True)
def silu(x):
    """Return `x * sigmoid(x)`, also called swish.

    Source: Ramachandran et al. (2017).

    >>> rg.nn.silu([0.0, 2.0])
    Tensor([0.      , 1.761594], dtype=float32)
    """


@public
def mish(x: TensorLike, /) -> Tensor:
    """Return `x * tanh(softplus(x))`.

    Returns:
        A Tensor of x's shape and dtype. Integers and bools become the default dtype.

    Raises:
        DTypeError: x is complex.

    A composition of `Mul`, `Tanh` and `Softplus`. Source: Misra (2019).

    >>> rg.nn.mish([0.0, 2.0])
    Tensor([0.       , 1.9439589], dtype=float32)
    """
    x = dispatch.lift(x)
    return x * tanh(softplus(x))


@op("Gelu", elementwise=True, to_float=True)
def gelu(xp, x: TensorLike, /, approximate: bool = False) -> Tensor:
    """Return x times the probability that a standard normal variable is below x.

    Args:
        approximate: Whether to approximate the probability by
            `sigmoid(2 * sqrt(2 / π) * (x + 0.044715 * x³))`. Older models were trained with this
            approximation. Its usual form, written with `tanh`, is the same function.

    Returns:
        A Tensor of x's shape and dtype. Integers and bools become the default dtype.

    Raises:
        InvalidValueError: `approximate` is not True or False.

    Source: Hendrycks and Gimpel (2016).

    >>> rg.nn.gelu([0.0, 2.0])
    Tensor([0.       , 1.9544997], dtype=float32)
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


# Beyond this bound the density is 0 in every dtype. Its cube overflows in no dtype.
GELU_ENDS = 40
SQRT_HALF = math.sqrt(0.5)
TANH_SLOPE = 2 * math.sqrt(2 / math.pi)
TANH_CUBIC = 0.044715


# -- softmax -------------------------------------------------------------------------------------


def _below_max(xp: Namespace, x: Array, axis: tuple[int, ...]) -> Array:
    """Subtract from x its largest element along `axis`, so that `exp` cannot overflow."""
    return x - _tops(xp, x, axis) if 0 not in x.shape else x


@op("Softmax", to_float=True)
def softmax(xp, x: TensorLike, /, axis: Axis = -1) -> Tensor:
    """Return `exp(x) / sum(exp(x))` along `axis`, without overflow.

    Args:
        axis: The axis or axes; the last by default, None for all.

    Returns:
        A Tensor of x's shape and dtype. Integers and bools become the default dtype.

    Source: `tf.softmax`.

    >>> rg.nn.softmax(rg.tensor([0.0, 0.0, 1000.0])).print()
    Tensor
        [0, 0, 1]
    """
    axes = normalized_axes(axis, x.ndim)
    return in_single(_shares, xp, x, axes)


def _shares(xp: Namespace, x: Array, axes: tuple[int, ...]) -> Array:
    y = xp.exp(_below_max(xp, x, axes))
    return y / _sums(xp, y, axes, True)


gradient("Softmax")(lambda dy, y, axis: y * (dy - sum(dy * y, axis=axis, keepdims=True)))


@op("LogSoftmax", to_float=True)
def log_softmax(xp, x: TensorLike, /, axis: Axis = -1) -> Tensor:
    """Return `log(softmax(x, axis))`, also accurate where the softmax is close to 0 or 1.

    Args:
        axis: The axis or axes; the last by default, None for all.

    Returns:
        A Tensor of x's shape and dtype. Integers and bools become the default dtype.

    Source: `tf.logSoftmax` of TensorFlow.js.

    >>> rg.nn.log_softmax([0.0, 0.0])
    Tensor([-0.6931472, -0.6931472], dtype=float32)
    """
    axes = normalized_axes(axis, x.ndim)
    return in_single(_log_shares, xp, x, axes)


def _log_shares(xp: Namespace, x: Array, axes: tuple[int, ...]) -> Array:
    below = _below_max(xp, x, axes)
    return below - xp.log(_sums(xp, xp.exp(below), axes, True))


gradient("LogSoftmax")(lambda dy, y, axis: dy - exp(y) * sum(dy, axis=axis, keepdims=True))
