"""Rules of ReLU for saliency maps: pictures of the input features that a network uses."""

from __future__ import annotations

from regrad.core.tensor import Tensor
from regrad.ops.binary import maximum, where


def guided_relu(dy: Tensor, x: Tensor) -> Tensor:
    """Return ReLU's gradient for positive gradients only: for `{"Relu": guided_relu}`.

    Args:
        dy: The incoming gradient.
        x: The input of the op.

    Returns:
        The gradient by x, a Tensor of its shape and dtype.

    Raises:
        ArgumentError: dy is not a Tensor, an array or a number.

    Source: Springenberg, Dosovitskiy, Brox and Riedmiller, "Striving for Simplicity" (2014).

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"Relu": rg.rules.guided_relu}):
    ...     print(rg.grad(lambda x: rg.nn.relu(x) * [1.0, -1.0])(rg.tensor([2.0, 2.0])).tolist())
    [1.0, 0.0]
    """
    return where(x > 0, maximum(dy, 0), 0)


def deconvnet_relu(dy: Tensor) -> Tensor:
    """Return positive gradients for any input: for `{"Relu": deconvnet_relu}`.

    Args:
        dy: The incoming gradient.

    Returns:
        The gradient by x, a Tensor of its shape and dtype.

    Raises:
        ArgumentError: dy is not a Tensor, an array or a number.

    Source: Zeiler and Fergus, "Visualizing and Understanding Convolutional Networks" (2013).

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"Relu": rg.rules.deconvnet_relu}):
    ...     print(rg.grad(lambda x: rg.nn.relu(x) * [1.0, -1.0])(rg.tensor([-2.0, 2.0])).tolist())
    [1.0, 0.0]
    """
    return maximum(dy, 0)
