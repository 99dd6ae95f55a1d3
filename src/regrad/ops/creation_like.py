"""Zeros, ones and other values with the shape, dtype, library and device of a Tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from regrad.core import backends, numbers, sharding
from regrad.core.backends import Array, DTypeLike, Namespace, is_inexact
from regrad.core.op import TensorLike, op
from regrad.core.registry import OPS, gradient
from regrad.core.rule import no_gradient
from regrad.core.signatures import public
from regrad.core.tensor import Tensor
from regrad.ops.creation import as_numpy_dtype

# -- ops: they follow the data of their input --------------------------------------------------


@op("ZerosLike")
def zeros_like(
    xp, x: TensorLike, /, *, dtype: DTypeLike | None = None, device: Any = None
) -> Tensor:
    """Return zeros of x's shape, as data of x's library.

    Args:
        dtype: The dtype of the result; x's by default.
        device: The device of the result; by default x's device.

    Source: the Array API standard.

    >>> rg.zeros_like([1.0, 2.0])
    Tensor([0., 0.], dtype=float32)
    """
    return _filled_like(xp, x, 0, dtype, device)


@op("OnesLike")
def ones_like(
    xp, x: TensorLike, /, *, dtype: DTypeLike | None = None, device: Any = None
) -> Tensor:
    """Return ones of x's shape, as data of x's library.

    Args:
        dtype: The dtype of the result; x's by default.
        device: The device of the result; by default x's device.

    Source: the Array API standard.

    >>> rg.ones_like([3.0, 2.0])
    Tensor([1., 1.], dtype=float32)
    """
    return _filled_like(xp, x, 1, dtype, device)


@op("FullLike")
def full_like(
    xp, x: TensorLike, /, fill_value: complex, *, dtype: DTypeLike | None = None, device: Any = None
) -> Tensor:
    """Return a Tensor of x's shape filled with one value, as data of x's library.

    Args:
        fill_value: The value, a number.
        dtype: The dtype of the result; x's by default.
        device: The device of the result; by default x's device.

    Source: the Array API standard.

    >>> rg.full_like([1.0, 2.0], 7)
    Tensor([7., 7.], dtype=float32)
    """
    return _filled_like(xp, x, fill_value, dtype, device)


@public
def empty_like(x: TensorLike, /, *, dtype: DTypeLike | None = None, device: Any = None) -> Tensor:
    """Return a Tensor of x's shape. Its values are zeros, but programs should not rely on them.

    Args:
        dtype: The dtype of the result; x's by default.
        device: The device of the result; by default x's device.

    Op type: `ZerosLike`. Source: the Array API standard.

    >>> rg.empty_like([1.0, 2.0]).shape
    (2,)
    """
    return zeros_like(x, dtype=dtype, device=device)


def _filled_like(
    xp: Namespace, x: TensorLike, value: complex, dtype: DTypeLike | None, device: Any
) -> Array:
    dtype = backends.numpy_dtype(x.dtype) if dtype is None else as_numpy_dtype(dtype)
    value, dtype = fitting(value, dtype), backends.native_dtype(xp, dtype)
    if xp.__name__ == "jax.numpy":
        y = xp.full_like(x, value, dtype=dtype)  # on x's device
    else:
        y = xp.full(tuple(x.shape), value, dtype=dtype, **backends.placed_like(x))
    return y if device is None else sharding.place(y, sharding.resolve(device, y))


def fitting(value: complex, dtype: np.dtype) -> complex:
    """Return the number that a kernel passes to its library for a dtype. Integers are checked."""
    whole = dtype.kind in "biu" or isinstance(value, int)
    return numbers.under(value, dtype).item() if whole else value


def _to_integers(attrs: dict[str, Any], xs: Sequence[Tensor]) -> bool:
    dtype = attrs["dtype"]
    if dtype is None or not is_inexact(xs[0].dtype):
        return False
    return not is_inexact(as_numpy_dtype(dtype))


for _type in ("ZerosLike", "OnesLike", "FullLike"):
    gradient(_type)(no_gradient)
    OPS[_type].rule.constant = True
    OPS[_type].rule.unless = _to_integers  # pyright: ignore[reportAttributeAccessIssue]
