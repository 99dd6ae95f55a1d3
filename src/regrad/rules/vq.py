"""Gradients of vector quantizers: from the nearest vector of a codebook to the input.

`straight_through(e, q)` and `rotation(e, q)` return the value of q and differentiate by e. They
take Tensors and arrays of PyTorch and JAX, for code of your own. `rotation_rule()` is the same
gradient as a rule: for a quantizer in a model that you do not edit (`rg.at("quantizer")`, a
function of PyTorch or JAX), and for `rg.replace`.

>>> import regrad as rg
>>> codes = rg.tensor([[0.0, 2.0], [1.0, 0.0]])
>>> def quantized(e):
...     nearest = rg.argmin(rg.sum((e[:, None] - codes) ** 2, axis=-1), axis=-1)
...     return rg.rules.vq.rotation(e, rg.take(codes, nearest, axis=0))
>>> e = rg.tensor([[2.0, 0.0], [0.0, 1.0]])
>>> quantized(e).tolist()
[[1.0, 0.0], [0.0, 2.0]]
>>> rg.grad(lambda e: quantized(e)[:, 0].sum())(e).tolist()
[[0.5, 0.0], [2.0, 0.0]]
"""

from __future__ import annotations

from typing import Any

from regrad.core.backends import BACKENDS, is_array
from regrad.core.dispatch import lift
from regrad.core.made import remade
from regrad.core.signatures import helpful
from regrad.core.tensor import Tensor
from regrad.errors import ArgumentError, brief
from regrad.rules.making import Rule
from regrad.rules.quantize.rounding import Arithmetic, ste, stop


@helpful("straight_through")
def straight_through(e: Any, q: Any) -> Any:
    """Return q, with the gradient of e: the gradient that arrives passes to e unchanged.

    The codebook, from which q comes, has no gradient by this path. Train it by a loss of its own.

    Args:
        e: The input of the quantizer, a Tensor or an array of PyTorch or JAX.
        q: The quantized input, of the same shape.

    Returns:
        A Tensor or an array like e, with the value of q.

    Raises:
        ArgumentError: e and q differ in shape.

    Source: van den Oord, Vinyals and Kavukcuoglu, "Neural Discrete Representation Learning" (2017).

    >>> import regrad as rg
    >>> f = lambda e: (rg.rules.vq.straight_through(e, rg.tensor([1.0, 0.0])) * [3.0, 5.0]).sum()
    >>> rg.grad(f)(rg.tensor([0.8, 0.1])).tolist()
    [3.0, 5.0]
    """
    e, q = _pair("straight_through", e, q)
    return ste(q, e)


@helpful("rotation")
def rotation(e: Any, q: Any, axis: int = -1) -> Any:
    """Return q, as a rotation and rescaling of e that is constant under the gradient.

    q is `λ R e`, with `λ = |q| / |e|` and the rotation `R = I - 2 r rᵀ + 2 q̂ êᵀ`, where ê and q̂
    are the directions of e and q, and r is the direction of `ê + q̂`. The gradient by e is
    `λ Rᵀ dy`: it keeps the angle between the gradient and the vector. The codebook has no gradient
    by this path. For a vector e of zeros, which has no direction, the gradient is `dy`.

    Args:
        e: The input of the quantizer, a Tensor or an array of PyTorch or JAX.
        q: The quantized input, of the same shape.
        axis: The axis of the vectors.

    Returns:
        A Tensor or an array like e, with the value of q.

    Raises:
        ArgumentError: e and q differ in shape, or have no such axis.

    Source: Fifty et al., "Restructuring Vector Quantization with the Rotation Trick" (2024).

    >>> import regrad as rg
    >>> f = lambda e: (rg.rules.vq.rotation(e, rg.tensor([0.0, 2.0])) * [3.0, 5.0]).sum()
    >>> rg.round(rg.grad(f)(rg.tensor([1.0, 0.0]))).tolist()
    [10.0, -6.0]
    """
    e, q = _pair("rotation", e, q)
    plane = _Plane(stop(e), stop(q), _checked("rotation", axis, e))
    return ste(q, plane.turned(e, plane.start, plane.end))


@remade
@helpful("rotation_rule")
def rotation_rule(axis: int = -1) -> Rule:
    """Return the gradient of the rotation trick as a rule, for a quantizer of x with the value y.

    For the whole call of a quantizer that returns the vectors alone. It is the gradient of
    `rotation(x, y)`, and any gradient that the quantizer has of its own (a straight-through
    estimator written with `detach`) is replaced.

    Args:
        axis: The axis of the vectors.

    Returns:
        A rule `(dy, x, y)` for `gradient_override_map`, `rg.jax.override` and `rg.replace`.

    Raises:
        ArgumentError: axis is not an integer; when the rule runs, x and y differ in shape, or have
            no such axis.

    Source: Fifty et al., "Restructuring Vector Quantization with the Rotation Trick" (2024).

    >>> import regrad as rg
    >>> rule = rg.rules.vq.rotation_rule()
    >>> dy, x, y = (rg.tensor(v) for v in ([3.0, 5.0], [1.0, 0.0], [0.0, 2.0]))
    >>> rg.round(rule(dy, x, y)).tolist()
    [10.0, -6.0]
    """
    _checked("rotation_rule", axis)

    def rotation_rule(dy: Any, x: Any, y: Any) -> Any:
        e, q = _pair("rotation_rule", x, y)
        plane = _Plane(stop(e), stop(q), _checked("rotation_rule", axis, e))
        return plane.turned(dy, plane.end, plane.start)  # (back: R is transposed)

    return rotation_rule


class _Plane:
    """The rotation of the direction of e to the direction of q, and the ratio of their lengths."""

    def __init__(self, e: Any, q: Any, axis: int) -> None:
        self.axis = axis
        self.where: Any = Arithmetic(e).xp.where
        size, length = self.length(e), self.length(q)
        start, end = self.unit(e, size), self.unit(q, length)
        self.start: Any = self.where(size > 0, start, end)  # (zeros have no direction)
        self.end: Any = self.where(length > 0, end, start)
        middle = self.start + self.end
        self.middle: Any = self.unit(middle, self.length(middle))
        self.ratio: Any = self.where(size > 0, length / self.where(size > 0, size, 1.0), 1.0)

    def dot(self, v: Any, w: Any) -> Any:
        return (v * w).sum(self.axis, keepdims=True)

    def length(self, v: Any) -> Any:
        return self.dot(v, v) ** 0.5

    def unit(self, v: Any, length: Any) -> Any:
        return v / self.where(length > 0, length, 1.0)

    def turned(self, v: Any, start: Any, end: Any) -> Any:
        """Return vectors, scaled and rotated from one direction to another."""
        turned = v - 2 * self.middle * self.dot(self.middle, v) + 2 * end * self.dot(start, v)
        return self.ratio * turned


def _pair(name: str, e: Any, q: Any) -> tuple[Any, Any]:
    """Return two arrays of one library and shape."""
    e, q = (x if _is_of_host(x) else lift(x) for x in (e, q))
    if isinstance(e, Tensor) or isinstance(q, Tensor):
        e, q = lift(e), lift(q)
    if tuple(e.shape) != tuple(q.shape):
        shapes = f"{tuple(e.shape)} and {tuple(q.shape)}"
        raise ArgumentError(f"{name}: expected vectors of one shape, got {shapes}")
    return e, q


def _is_of_host(x: Any) -> bool:
    return is_array(x) and BACKENDS[type(x)].name != "numpy"


def _checked(name: str, axis: Any, e: Any = None) -> int:
    n = None if e is None else len(e.shape)
    if type(axis) is not int or (n is not None and not -n <= axis < n):
        of = "" if n is None else f" of an array of {n}"
        raise ArgumentError(f"{name}: axis is the number of an axis{of}, got {brief(axis)}")
    return axis
