"""Rules that people reuse, each with its paper.

Rules for `gradient_override_map` come first: a function `(dy, …)`, or a function that makes one
from its parameters (and names it, for reports). Then functions of a tensor whose value
is the tensor and whose gradient is changed.

>>> import regrad as rg
>>> with rg.gradient_override_map({"Sign": rg.rules.clipped_straight_through}):
...     rg.grad(rg.sign)(rg.tensor([-2.0, 0.5])).print()
Tensor
    [0, 1]
"""

from __future__ import annotations

import math
from collections.abc import Callable

from regrad.autodiff.custom import custom_grad
from regrad.core.builtin import builtin as builtin
from regrad.core.tensor import Tensor, TensorLike
from regrad.errors import ArgumentError
from regrad.ops.activation import sigmoid
from regrad.ops.binary import clip, maximum, where
from regrad.ops.elementwise import abs as absolute
from regrad.ops.elementwise import exp, identity, square
from regrad.ops.reduction import vector_norm

Rule = Callable[..., Tensor]

# -- straight-through estimators -----------------------------------------------------------------


def straight_through(dy: Tensor) -> Tensor:
    """The gradient as if the op were the identity.

    Source: Hinton, Neural Networks for Machine Learning, lecture 15b (2012); Bengio, Léonard and
    Courville, "Estimating or Propagating Gradients Through Stochastic Neurons" (2013).
    """
    return dy


def clipped_straight_through(dy: Tensor, x: Tensor) -> Tensor:
    """The identity's gradient where `|x| <= 1`, and 0 outside: hard tanh's.

    Source: Hubara, Courbariaux, Soudry, El-Yaniv and Bengio, "Binarized Neural Networks" (2016).
    """
    return where(absolute(x) <= 1, dy, 0)


# -- saliency --------------------------------------------------------------------------------------


def guided_relu(dy: Tensor, x: Tensor) -> Tensor:
    """ReLU's gradient, of positive gradients only: for `{"Relu": guided_relu}`.

    Source: Springenberg, Dosovitskiy, Brox and Riedmiller, "Striving for Simplicity" (2014).
    """
    return where(x > 0, maximum(dy, 0), 0)


def deconvnet_relu(dy: Tensor) -> Tensor:
    """Positive gradients pass, whatever the input was: for `{"Relu": deconvnet_relu}`.

    Source: Zeiler and Fergus, "Visualizing and Understanding Convolutional Networks" (2013).
    """
    return maximum(dy, 0)


# -- surrogates for the spike (the op type "Step") ---------------------------------------------


def superspike(beta: float = 10.0) -> Rule:
    """A fast sigmoid's slope, `dy / (1 + beta * |x|)²`.

    Source: Zenke and Ganguli, "SuperSpike" (2018).
    """

    def superspike(dy: Tensor, x: Tensor) -> Tensor:
        return dy / square(1 + beta * absolute(x))

    return superspike


def sigmoid_surrogate(beta: float = 10.0) -> Rule:
    """The slope of `sigmoid(beta * x)`, scaled to 1 at 0.

    Source: Zenke and Vogels, "The Remarkable Robustness of Surrogate Gradient Learning" (2021).
    """

    def sigmoid_surrogate(dy: Tensor, x: Tensor) -> Tensor:
        y = sigmoid(beta * x)
        return dy * (4 * y * (1 - y))

    return sigmoid_surrogate


def triangle(width: float = 1.0, height: float = 1.0) -> Rule:
    """A triangle, `dy * height * max(0, 1 - |x| / width)`.

    Source: Esser et al., "Convolutional Networks for Fast, Energy-Efficient Neuromorphic
    Computing" (2016); Bellec et al., "Long Short-Term Memory and Learning-to-Learn in Networks of
    Spiking Neurons" (2018), with height 0.3.
    """

    def triangle(dy: Tensor, x: Tensor) -> Tensor:
        return dy * (height * maximum(1 - absolute(x) / width, 0))

    return triangle


def rectangle(width: float = 1.0) -> Rule:
    """A box of the given width around 0 and of area 1.

    Source: Wu, Deng, Li, Zhu and Shi, "Spatio-Temporal Backpropagation for Training
    High-Performance Spiking Neural Networks" (2018).
    """

    def rectangle(dy: Tensor, x: Tensor) -> Tensor:
        return where(absolute(x) < width / 2, dy / width, 0)

    return rectangle


def arctan_surrogate(alpha: float = 2.0) -> Rule:
    """The slope of `arctan(π/2 * alpha * x) / π`.

    Source: Fang et al., "Incorporating Learnable Membrane Time Constant to Enhance Learning of
    Spiking Neural Networks" (2021).
    """

    def arctan_surrogate(dy: Tensor, x: Tensor) -> Tensor:
        return dy * (alpha / 2) / (1 + square(math.pi / 2 * alpha * x))

    return arctan_surrogate


def gaussian(sigma: float = 0.5) -> Rule:
    """The density of a normal distribution around 0.

    Source: Yin, Corradi and Bohté, "Accurate and efficient time-domain classification with
    adaptive spiking recurrent neural networks" (2021).
    """
    scale = 1 / (sigma * math.sqrt(2 * math.pi))

    def gaussian(dy: Tensor, x: Tensor) -> Tensor:
        return dy * (scale * exp(square(x / sigma) * -0.5))

    return gaussian


# -- the identity with another gradient ----------------------------------------------------------


def _with_gradient(x: TensorLike, rule: Rule) -> Tensor:
    return custom_grad(lambda x: (identity(x), rule))(x)


def reverse_gradient(x: TensorLike, scale: float = 1.0) -> Tensor:
    """x, with the gradient turned round: `-scale * dy`.

    Source: Ganin and Lempitsky, "Unsupervised Domain Adaptation by Backpropagation" (2015).

    >>> import regrad as rg
    >>> rg.grad(lambda x: rg.rules.reverse_gradient(x, 0.5))(rg.scalar(3.0)).print()
    Tensor
        -0.5
    """
    return _with_gradient(x, lambda dy: dy * -scale)


def scale_gradient(x: TensorLike, scale: float) -> Tensor:
    """x, with the gradient times `scale`."""
    return _with_gradient(x, lambda dy: dy * scale)


def clip_gradient(x: TensorLike, min: float, max: float) -> Tensor:
    """x, with each element of the gradient brought into `[min, max]`.

    The rule is not linear in the gradient, so forward mode refuses it.

    Source: Graves, "Generating Sequences With Recurrent Neural Networks" (2013).
    """
    if min > max:
        raise ArgumentError(f"clip_gradient: min ({min}) must not be greater than max ({max})")
    return _with_gradient(x, lambda dy: clip(dy, min, max))


def clip_gradient_norm(x: TensorLike, max_norm: float) -> Tensor:
    """x, with a gradient whose Euclidean norm is at most `max_norm`.

    Source: Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural
    networks" (2013).
    """

    def rule(dy: Tensor) -> Tensor:
        norm = vector_norm(dy)
        return dy * (max_norm / maximum(norm, max_norm))

    return _with_gradient(x, rule)
