"""Normalisation. These are compositions of public ops, so overrides fire inside them."""

from __future__ import annotations

from typing import Any

from regrad.dispatch import lift
from regrad.errors import ShapeError
from regrad.ops.elementwise import maximum, rsqrt, square
from regrad.ops.reduction import sum
from regrad.shapes import Axis
from regrad.tensor import Tensor


def batch_norm(
    x: Any,
    mean: Any,
    variance: Any,
    offset: Any = None,
    scale: Any = None,
    epsilon: float = 0.001,
) -> Tensor:
    """`(x - mean) / sqrt(variance + epsilon) * scale + offset`.

    Args:
        x: The input, any shape.
        mean: The mean, of a shape that broadcasts to x's: one value per channel, say.
        variance: The variance, likewise.
        offset: What is added at the end, likewise; nothing by default.
        scale: What the normalised input is multiplied by, likewise; nothing by default.
        epsilon: Keeps the root away from 0.

    Mean and variance are inputs like any other. In training they come from
    `mean, variance = nn.moments(x, (0, 1, 2))` and the gradient flows through them as well.

    Raises ShapeError if a parameter does not broadcast to x.

    Source: `tf.batchNorm` of TensorFlow.js.

    >>> import regrad as rg
    >>> rg.nn.batch_norm(rg.tensor([1.0, 3.0]), 2.0, 4.0, epsilon=0.0).print()
    Tensor
        [-0.5, 0.5]
    """
    x = lift(x)
    parameters = {"mean": mean, "variance": variance, "offset": offset, "scale": scale}
    lifted = {k: None if v is None else lift(v) for k, v in parameters.items()}
    for name, value in lifted.items():
        if value is not None:
            _check_broadcasts("batch_norm", name, value, x)
    return _normalized(x, **lifted, epsilon=epsilon)


def _check_broadcasts(function: str, name: str, value: Tensor, x: Tensor) -> None:
    new = x.ndim - value.ndim
    if new < 0 or any(s not in (1, n) for s, n in zip(value.shape, x.shape[new:], strict=True)):
        raise ShapeError(
            f"{function}: {name} must broadcast to the shape of x, {x.shape}; got {value.shape}"
        )


def _normalized(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    offset: Tensor | None,
    scale: Tensor | None,
    epsilon: float,
) -> Tensor:
    # x - mean comes first: x * slope - mean * slope would cancel where mean² ≫ variance
    slope = rsqrt(variance + epsilon)
    if scale is not None:
        slope = slope * scale
    y = (x - mean) * slope
    return y if offset is None else y + offset


def l2_normalize(x: Any, axis: Axis = None, epsilon: float = 1e-12) -> Tensor:
    """`x / sqrt(max(sum(x²), epsilon))`: x with norm 1 along `axis` (all axes by default).

    Where the norm is 0 the result is 0, with a finite gradient.

    Source: `tf.math.l2_normalize`.

    >>> import regrad as rg
    >>> rg.nn.l2_normalize(rg.tensor([3.0, 4.0])).print()
    Tensor
        [0.6, 0.8]
    """
    x = lift(x)
    return x * rsqrt(maximum(sum(square(x), axis=axis, keepdims=True), epsilon))
