"""Reusable gradient rules, each with its paper.

Rules for `gradient_override_map` come first: each is a function `(dy, …)`, or a function that makes
such a rule from its parameters (and names it, for reports). Then come functions that return their
tensor unchanged and change its gradient, for use in your own code: `reverse_gradient(x)`,
`scale_gradient`, `clip_gradient` and `clip_gradient_norm`. The rules `reverse`, `scale`, `clip` and
`clip_norm` do the same to the gradient of an op. Rules of layer-wise relevance propagation are in
`regrad.rules.lrp`, rules for transformers in `regrad.rules.attribution`, quantizers in
`regrad.rules.quantize`, and further spike surrogates in `regrad.rules.spike`.

>>> import regrad as rg
>>> with rg.gradient_override_map({"Sign": rg.rules.clipped_straight_through}):
...     rg.grad(rg.sign)(rg.tensor([-2.0, 0.5])).print()
Tensor
    [0, 1]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ParamSpec

from regrad.autodiff.custom import custom_grad
from regrad.autodiff.once import once_differentiable as once_differentiable
from regrad.core.builtin import builtin as builtin
from regrad.core.gradients import to_each
from regrad.core.hints import hint_in as _hint_in
from regrad.core.made import remade
from regrad.core.rule import no_gradient as no_gradient
from regrad.core.scopes import optional as optional
from regrad.core.signatures import helpful
from regrad.core.surrogates import learns as learns
from regrad.core.surrogates import vjp_of as vjp_of
from regrad.core.tensor import Tensor, TensorLike
from regrad.errors import ArgumentError, brief
from regrad.ops.activation import sigmoid
from regrad.ops.binary import clip as clip_to
from regrad.ops.binary import maximum, where
from regrad.ops.casting import identity
from regrad.ops.elementwise import abs as absolute
from regrad.ops.elementwise import exp, square
from regrad.ops.reduction import vector_norm
from regrad.rules import attribution as attribution
from regrad.rules import lrp as lrp
from regrad.rules import quantize as quantize
from regrad.rules import spike as spike
from regrad.rules import vq as vq
from regrad.rules.estimators import blackbox as blackbox
from regrad.rules.estimators import clamped_straight_through as clamped_straight_through
from regrad.rules.making import Above0, Rule, factory
from regrad.rules.saliency import deconvnet_relu as deconvnet_relu
from regrad.rules.saliency import guided_relu as guided_relu
from regrad.rules.singular import safe as safe

P = ParamSpec("P")

# -- straight-through estimators -----------------------------------------------------------------


def straight_through(dy: Tensor) -> Tensor:
    """Return the incoming gradient, as if the op were the identity.

    Args:
        dy: The incoming gradient.

    Returns:
        The gradient by x, a Tensor of its shape and dtype.

    Raises:
        ArgumentError: dy is not a Tensor, an array or a number.

    Source: Hinton, Neural Networks for Machine Learning, lecture 15b (2012); Bengio, Léonard and
    Courville, "Estimating or Propagating Gradients Through Stochastic Neurons" (2013).

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"Sign": rg.rules.straight_through}):
    ...     print(rg.grad(rg.sign)(rg.tensor([-2.0, 0.5])).tolist())
    [1.0, 1.0]
    """
    return dy


def clipped_straight_through(dy: Tensor, x: Tensor) -> Tensor:
    """Return the incoming gradient where `|x| <= 1`, and 0 elsewhere: hard tanh's gradient.

    Args:
        dy: The incoming gradient.
        x: The input of the op.

    Returns:
        The gradient by x, a Tensor of its shape and dtype.

    Raises:
        ArgumentError: dy is not a Tensor, an array or a number.

    Source: Hubara, Courbariaux, Soudry, El-Yaniv and Bengio, "Binarized Neural Networks" (2016).

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"Sign": rg.rules.clipped_straight_through}):
    ...     print(rg.grad(rg.sign)(rg.tensor([-2.0, 0.5])).tolist())
    [0.0, 1.0]
    """
    return where(absolute(x) <= 1, dy, 0)


# -- surrogates for the spike (the op type "Step") ---------------------------------------------


@factory
def superspike(beta: float = 10.0) -> Rule:
    """Return the slope of a fast sigmoid as a rule, `dy / (1 + beta * |x|)²`.

    Args:
        beta: The steepness. The gradient is 1 at 0, and 1/4 at `1 / beta`.

    Returns:
        A rule `(dy, x)` for the key "Step" or "Sign" of `gradient_override_map`.

    Raises:
        ArgumentError: a parameter is out of its range, or not a number, a Tensor or an array.

    Source: Zenke and Ganguli, "SuperSpike: Supervised Learning in Multilayer Spiking Neural
    Networks" (2018).

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"Step": rg.rules.superspike(1.0)}):
    ...     print(rg.grad(rg.step)(rg.tensor([0.0, 1.0])).tolist())
    [1.0, 0.25]
    """

    def superspike(dy: Tensor, x: Tensor) -> Tensor:
        return dy / square(1 + beta * absolute(x))

    return superspike


@factory
def sigmoid_surrogate(beta: float = 10.0) -> Rule:
    """Return the slope of `sigmoid(beta * x)` as a rule, scaled to 1 at 0.

    Args:
        beta: The steepness.

    Returns:
        A rule `(dy, x)` for the key "Step" or "Sign" of `gradient_override_map`.

    Raises:
        ArgumentError: a parameter is out of its range, or not a number, a Tensor or an array.

    Source: Zenke and Vogels, "The Remarkable Robustness of Surrogate Gradient Learning for
    Instilling Complex Function in Spiking Neural Networks" (2021).

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"Step": rg.rules.sigmoid_surrogate(2.0)}):
    ...     print(rg.grad(rg.step)(rg.tensor([0.0, 40.0])).tolist())
    [1.0, 0.0]
    """

    def sigmoid_surrogate(dy: Tensor, x: Tensor) -> Tensor:
        y = sigmoid(beta * x)
        return dy * (4 * y * (1 - y))

    return sigmoid_surrogate


@factory
def triangle(width: Above0 = 1.0, height: float = 1.0) -> Rule:
    """Return a triangle as a rule, `dy * height * max(0, 1 - |x| / width)`.

    Args:
        width: The distance from 0 at which the triangle ends, above 0.
        height: The value at 0.

    Returns:
        A rule `(dy, x)` for the key "Step" or "Sign" of `gradient_override_map`.

    Raises:
        ArgumentError: a parameter is out of its range, or not a number, a Tensor or an array.

    Source: Esser et al., "Convolutional Networks for Fast, Energy-Efficient Neuromorphic
    Computing" (2016); Bellec et al., "Long Short-Term Memory and Learning-to-Learn in Networks of
    Spiking Neurons" (2018), with height 0.3.

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"Step": rg.rules.triangle(2.0)}):
    ...     print(rg.grad(rg.step)(rg.tensor([0.0, 1.0, 2.0])).tolist())
    [1.0, 0.5, 0.0]
    """

    def triangle(dy: Tensor, x: Tensor) -> Tensor:
        return dy * (height * maximum(1 - absolute(x) / width, 0))

    return triangle


@factory
def rectangle(width: Above0 = 1.0) -> Rule:
    """Return a box around 0 of area 1 as a rule.

    Args:
        width: The width of the box, above 0. The value in the box is `1 / width`.

    Returns:
        A rule `(dy, x)` for the key "Step" or "Sign" of `gradient_override_map`.

    Raises:
        ArgumentError: a parameter is out of its range, or not a number, a Tensor or an array.

    Source: Wu, Deng, Li, Zhu and Shi, "Spatio-Temporal Backpropagation for Training
    High-Performance Spiking Neural Networks" (2018).

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"Step": rg.rules.rectangle(2.0)}):
    ...     print(rg.grad(rg.step)(rg.tensor([0.0, 0.5, 2.0])).tolist())
    [0.5, 0.5, 0.0]
    """

    def rectangle(dy: Tensor, x: Tensor) -> Tensor:
        return where(absolute(x) < width / 2, dy / width, 0)

    return rectangle


@factory
def arctan_surrogate(alpha: float = 2.0) -> Rule:
    """Return the slope of `arctan(π/2 * alpha * x) / π` as a rule.

    Args:
        alpha: The steepness. The value at 0 is `alpha / 2`.

    Returns:
        A rule `(dy, x)` for the key "Step" or "Sign" of `gradient_override_map`.

    Raises:
        ArgumentError: a parameter is out of its range, or not a number, a Tensor or an array.

    Source: Fang et al., "Incorporating Learnable Membrane Time Constant to Enhance Learning of
    Spiking Neural Networks" (2021).

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"Step": rg.rules.arctan_surrogate(2.0)}):
    ...     print(rg.grad(rg.step)(rg.tensor([0.0])).tolist())
    [1.0]
    """

    def arctan_surrogate(dy: Tensor, x: Tensor) -> Tensor:
        return dy * (alpha / 2) / (1 + square(math.pi / 2 * alpha * x))

    return arctan_surrogate


@factory
def gaussian(sigma: Above0 = 0.5) -> Rule:
    """Return the density of a normal distribution around 0 as a rule.

    Args:
        sigma: The standard deviation, above 0.

    Returns:
        A rule `(dy, x)` for the key "Step" or "Sign" of `gradient_override_map`.

    Raises:
        ArgumentError: a parameter is out of its range, or not a number, a Tensor or an array.

    Source: Yin, Corradi and Bohté, "Effective and Efficient Computation with Multiple-timescale
    Spiking Recurrent Neural Networks" (2020), whose program has a standard deviation of 0.5.

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"Step": rg.rules.gaussian(0.5)}):
    ...     print(rg.grad(rg.step)(rg.tensor([0.0, 9.0])).tolist())
    [0.7978845834732056, 0.0]
    """
    scale = 1 / (sigma * math.sqrt(2 * math.pi))

    def gaussian(dy: Tensor, x: Tensor) -> Tensor:
        return dy * (scale * exp(square(x / sigma) * -0.5))

    return gaussian


# -- changes of an op's own gradient ---------------------------------------------------------------


def _named(maker: Callable[P, Rule]) -> Callable[P, Rule]:
    return remade(helpful(maker.__name__)(maker))


@_named
def reverse(scale: float = 1.0) -> Rule:
    """Return a rule for any op: the op's own gradient, reversed, `-scale * builtin(dy)`.

    (`reverse_gradient(x)` does the same at a place in your own function.)

    Args:
        scale: The factor.

    Returns:
        A rule `(dy, builtin)` for `gradient_override_map` and `rg.jax.override`.

    Raises:
        MissingRuleError: (raised by the scope) The op type has no gradient.

    Source: Ganin and Lempitsky, "Unsupervised Domain Adaptation by Backpropagation" (2015).

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"Square": rg.rules.reverse(0.5)}):
    ...     print(rg.grad(rg.square)(rg.tensor([1.0, 3.0])).tolist())
    [-1.0, -3.0]
    """

    def reverse(dy: Tensor, builtin: Any) -> Any:
        return -scale * builtin(dy)

    return reverse


@_named
def scale(factor: float) -> Rule:
    """Return a rule for any op: the op's own gradient, multiplied by a factor.

    (`scale_gradient(x, factor)` does the same at a place in your own function.)

    Args:
        factor: The factor.

    Returns:
        A rule `(dy, builtin)` for `gradient_override_map` and `rg.jax.override`.

    Raises:
        MissingRuleError: (raised by the scope) The op type has no gradient.

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"Mul": rg.rules.scale(3.0)}):
    ...     print([dx.item() for dx in rg.grads(lambda a, b: a * b)([2.0, 5.0])])
    [15.0, 6.0]
    """

    def scale(dy: Tensor, builtin: Any) -> Any:
        return factor * builtin(dy)

    return scale


@_named
def clip(min: float, max: float) -> Rule:
    """Return a rule for any op: the op's own gradient, each element clipped to `[min, max]`.

    (`clip_gradient(x, min, max)` does the same at a place in your own function.)

    Args:
        min: The lower bound of the gradient.
        max: The upper bound of the gradient.

    Returns:
        A rule `(dy, builtin)` for `gradient_override_map` and `rg.jax.override`.

    Raises:
        ArgumentError: min is greater than max.
        MissingRuleError: (raised by the scope) The op type has no gradient.

    Source: Graves, "Generating Sequences With Recurrent Neural Networks" (2013).

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"Square": rg.rules.clip(-1, 1)}):
    ...     print(rg.grad(rg.square)(rg.tensor([0.25, 3.0])).tolist())
    [0.5, 1.0]
    """
    if min > max:
        raise ArgumentError(f"clip: min ({min}) must not be greater than max ({max})")

    def clip(dy: Tensor, builtin: Any) -> Any:
        return to_each(lambda dx: dx.clip(min, max), builtin(dy))

    return clip


@_named
def clip_norm(max_norm: float) -> Rule:
    """Return a rule for any op: the op's own gradient, with a norm of at most `max_norm`.

    The norm is the Euclidean norm. For an op with several inputs, the rule clips the norm of each
    gradient separately. (`clip_gradient_norm(x, max_norm)` does the same at a place in your own
    function.)

    Args:
        max_norm: The largest norm of a gradient, above 0.

    Returns:
        A rule `(dy, builtin)` for `gradient_override_map` and `rg.jax.override`.

    Raises:
        ArgumentError: max_norm is 0 or less.
        MissingRuleError: (raised by the scope) The op type has no gradient.

    Source: Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural
    networks" (2013).

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"Square": rg.rules.clip_norm(5.0)}):
    ...     print(rg.grad(rg.square)(rg.tensor([3.0, 4.0])).tolist())
    [3.0, 4.0]
    """
    if not max_norm > 0:
        raise ArgumentError(f"clip_norm: expected a max_norm above 0, got {brief(max_norm)}")

    # (Clip the square of the norm, because its root has no derivative at 0.)
    def clipped(dx: Any) -> Any:
        squares = (abs(dx) ** 2).sum().clip(max_norm**2, math.inf)
        return dx * (max_norm / squares**0.5)

    def clip_norm(dy: Tensor, builtin: Any) -> Any:
        return to_each(clipped, builtin(dy))

    return clip_norm


# -- the identity with another gradient ----------------------------------------------------------


def _with_gradient(x: TensorLike, rule: Rule) -> Tensor:
    return custom_grad(lambda x: (identity(x), rule))(x)


def reverse_gradient(x: TensorLike, scale: float = 1.0) -> Tensor:
    """Return x, with the gradient reversed: `-scale * dy`.

    Args:
        x: A Tensor, an array or a number.
        scale: The factor.

    Returns:
        A Tensor with the value, shape and dtype of x.

    Raises:
        ArgumentError: x is not a Tensor, an array or a number.

    Source: Ganin and Lempitsky, "Unsupervised Domain Adaptation by Backpropagation" (2015).

    >>> import regrad as rg
    >>> rg.grad(lambda x: rg.rules.reverse_gradient(x, 0.5))(rg.scalar(3.0)).item()
    -0.5
    """
    return _with_gradient(x, lambda dy: dy * -scale)


def scale_gradient(x: TensorLike, scale: float) -> Tensor:
    """Return x, with the gradient multiplied by `scale`.

    Args:
        x: A Tensor, an array or a number.
        scale: The factor.

    Returns:
        A Tensor with the value, shape and dtype of x.

    Raises:
        ArgumentError: x is not a Tensor, an array or a number.


    >>> import regrad as rg
    >>> rg.grad(lambda x: rg.rules.scale_gradient(x, 0.5))(rg.scalar(3.0)).item()
    0.5
    """
    return _with_gradient(x, lambda dy: dy * scale)


def clip_gradient(x: TensorLike, min: float, max: float) -> Tensor:
    """Return x, with each element of the gradient clipped to `[min, max]`.

    The rule is not linear in the gradient, so forward mode raises GradientError.

    Args:
        x: A Tensor, an array or a number.
        min: The lower bound of the gradient.
        max: The upper bound of the gradient.

    Returns:
        A Tensor with the value, shape and dtype of x.

    Raises:
        ArgumentError: min is greater than max, or x is not a Tensor, an array or a number.

    Source: Graves, "Generating Sequences With Recurrent Neural Networks" (2013).

    >>> import regrad as rg
    >>> rg.grad(lambda x: 5 * rg.rules.clip_gradient(5 * x, -1, 1))(rg.scalar(3.0)).item()
    5.0
    """
    if min > max:
        raise ArgumentError(f"clip_gradient: min ({min}) must not be greater than max ({max})")
    return _with_gradient(x, lambda dy: clip_to(dy, min, max))


def clip_gradient_norm(x: TensorLike, max_norm: float) -> Tensor:
    """Return x, with a gradient whose Euclidean norm is at most `max_norm`.

    Args:
        x: A Tensor, an array or a number.
        max_norm: The largest norm of the gradient.

    Returns:
        A Tensor with the value, shape and dtype of x.

    Raises:
        ArgumentError: x is not a Tensor, an array or a number.

    Source: Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural
    networks" (2013).

    >>> import regrad as rg
    >>> f = lambda x: (rg.rules.clip_gradient_norm(x, 1.0) * [3.0, 4.0]).sum()
    >>> rg.grad(f)(rg.zeros(2))
    Tensor([0.6, 0.8], dtype=float32)
    """

    def rule(dy: Tensor) -> Tensor:
        norm = vector_norm(dy)
        return dy * (max_norm / maximum(norm, max_norm))

    return _with_gradient(x, rule)


_hint_in(__name__)
