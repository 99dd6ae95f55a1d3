"""Normalization. These functions are compositions of public ops, so overrides fire inside them."""

from __future__ import annotations

from regrad.core import dims
from regrad.core.dispatch import lift
from regrad.core.shapes import Axis
from regrad.core.signatures import public
from regrad.core.tensor import Tensor, TensorLike
from regrad.errors import ShapeError
from regrad.graph.deferred import deferrable
from regrad.ops.binary import maximum
from regrad.ops.elementwise import rsqrt, square
from regrad.ops.reduction import moments, sum


@deferrable
def batch_norm(
    x: TensorLike,
    mean: TensorLike,
    variance: TensorLike,
    offset: TensorLike | None = None,
    scale: TensorLike | None = None,
    epsilon: float = 0.001,
) -> Tensor:
    """Return `(x - mean) / sqrt(variance + epsilon) * scale + offset`.

    Mean and variance are ordinary inputs. In training they come from
    `mean, variance = nn.moments(x, (0, 1, 2))`, and the gradient propagates through them as well.

    Args:
        x: The input, any shape.
        mean: The mean, which broadcasts to x's shape, e.g. one value per channel.
        variance: The variance, which broadcasts to x's shape.
        offset: Added at the end; broadcasts to x's shape. None adds nothing.
        scale: Multiplies the normalized input; broadcasts to x's shape. None omits it.
        epsilon: Added to the variance to avoid division by zero.

    Returns:
        A Tensor of x's shape, with the dtype to which the arguments promote.

    Raises ShapeError if a parameter does not broadcast to x.

    A composition of `Rsqrt` and arithmetic. Source: `tf.batchNorm` of TensorFlow.js.

    >>> import regrad as rg
    >>> rg.nn.batch_norm(rg.tensor([1.0, 3.0]), 2.0, 4.0, epsilon=0.0).print()
    Tensor
        [-0.5, 0.5]
    """
    x = lift(x)
    given = {"mean": mean, "variance": variance, "offset": offset, "scale": scale}
    fitting = {k: _fit(k, v, x) for k, v in given.items() if v is not None}
    slope = rsqrt(fitting["variance"] + epsilon)
    if scale is not None:
        slope = slope * fitting["scale"]
    # x - mean is computed first, because x * slope - mean * slope cancels where mean² ≫ variance
    y = (x - fitting["mean"]) * slope
    return y if offset is None else y + fitting["offset"]


def _fit(name: str, value: TensorLike, x: Tensor) -> Tensor:
    """Return a parameter as a Tensor if it broadcasts to the shape of x."""
    value = lift(value)
    new = x.ndim - value.ndim
    if new < 0 or any(
        dims.differ(s, 1) and dims.differ(s, n)
        for s, n in zip(value.shape, x.shape[new:], strict=True)
    ):
        raise ShapeError(
            f"batch_norm: {name} must broadcast to the shape of x, {x.shape}; got {value.shape}"
        )
    return value


@deferrable
def layer_norm(
    x: TensorLike,
    *,
    axis: int | tuple[int, ...] = -1,
    offset: TensorLike | None = None,
    scale: TensorLike | None = None,
    epsilon: float = 1e-5,
) -> Tensor:
    """Return x normalized along `axis` to mean 0 and variance 1, times `scale`, plus `offset`.

    Args:
        x: The input, any shape.
        axis: The axis, or axes, of the features of one example.
        offset: Added at the end; broadcasts to x's shape.
        scale: Multiplies the normalized input; broadcasts to x's shape.
        epsilon: Added to the variance to avoid division by zero.

    Returns:
        A Tensor of x's shape. Integers become the default dtype.

    Raises ShapeError if offset or scale do not broadcast to x.

    Source: Ba et al., Layer Normalization (2016).

    >>> import regrad as rg
    >>> rg.nn.layer_norm(rg.tensor([[1.0, 3.0]]), offset=10.0, epsilon=0.0).print()
    Tensor
         [[9, 11],]
    """
    x = lift(x)
    mean, variance = moments(x, axis, keepdims=True)
    return batch_norm(x, mean, variance, offset, scale, epsilon)


@public
def l2_normalize(x: TensorLike, axis: Axis = None, epsilon: float = 1e-12) -> Tensor:
    """Return `x / sqrt(max(sum(x²), epsilon))`: x with norm 1 along `axis` (all axes by default).

    Where the norm is 0 the result is 0, with a finite gradient.

    Args:
        epsilon: The lower bound of the squared norm in the denominator.

    Returns:
        A Tensor of x's shape. Integers become the default dtype.

    A composition. Source: `tf.math.l2_normalize`.

    >>> rg.nn.l2_normalize(rg.tensor([3.0, 4.0])).print()
    Tensor
        [0.6, 0.8]
    """
    x = lift(x)
    return x * rsqrt(maximum(sum(square(x), axis=axis, keepdims=True), epsilon))
