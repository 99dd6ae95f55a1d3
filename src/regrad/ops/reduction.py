"""Reductions. Each takes `axis` (None for all, an int or a tuple) and `keepdims`."""

from __future__ import annotations

import builtins
import math
from typing import Any

import numpy as np

from regrad.core import backends, dispatch
from regrad.core.backends import Array, DTypeLike, Namespace, is_inexact
from regrad.core.op import TensorLike, op
from regrad.core.promotion import get_default_dtype
from regrad.core.registry import gradient, not_differentiable
from regrad.core.shapes import Axis, normalized_axes, normalized_axis
from regrad.core.signatures import public
from regrad.core.tensor import Tensor
from regrad.errors import ArgumentError, DTypeError, ShapeError, kind
from regrad.graph.deferred import deferrable
from regrad.ops.array import diagonal, squeeze
from regrad.ops.binary import isclose, logical_or, or_zero, pow, where
from regrad.ops.casting import astype, conj, real, stop_gradient
from regrad.ops.creation import as_numpy_dtype, convert
from regrad.ops.elementwise import abs, exp, isfinite, isnan, log, sign, sqrt, square
from regrad.ops.rows import _sums
from regrad.ops.scan import cumulative_prod


def _as_floating(x: TensorLike) -> Any:
    """Return x as a Tensor of floats. Integers and bools get the default dtype."""
    x = dispatch.lift(x)
    return x if is_inexact(x.dtype) else astype(x, get_default_dtype())


def widened(x: Tensor) -> Tensor:
    """Return x, with halves cast to single precision, which represents large sums and counts."""
    return astype(x, backends.FLOAT) if backends.is_half(x.dtype) else x


def _of_dtype(x: TensorLike, dtype: DTypeLike | None) -> Any:
    return x if dtype is None else convert(dispatch.lift(x), as_numpy_dtype(dtype))


def _count(shape: tuple[int, ...], axis: Axis) -> int:
    """Return the number of elements that a reduction combines into one."""
    return math.prod(shape[i] for i in normalized_axes(axis, len(shape)))


# -- sum, mean and their adjoints ----------------------------------------------------------------


@op("Sum")
def _sum(xp, x: TensorLike, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    return _sums(xp, x, normalized_axes(axis, x.ndim), keepdims)


gradient("Sum")(lambda dy, x_shape, axis, keepdims: unreduce(dy, x_shape, axis, keepdims))


@op("Unreduce")
def unreduce(xp, x: TensorLike, /, shape: tuple[int, ...], axis: Axis, keepdims: bool) -> Tensor:
    """Broadcast a reduced tensor back over the reduced axes: the adjoint of `sum`."""
    return _spread_back(xp, x, shape, axis, keepdims)


gradient("Unreduce")(lambda dy, axis, keepdims: _sum(dy, axis=axis, keepdims=keepdims))


def _spread_back(
    xp: Namespace, x: Array, shape: tuple[int, ...], axis: Axis, keepdims: bool
) -> Array:
    shape = tuple(shape)
    if not keepdims:
        reduced = normalized_axes(axis, len(shape))
        x = xp.reshape(x, tuple([1 if i in reduced else n for i, n in enumerate(shape)]))
    return xp.broadcast_to(x, shape)


@public
def sum(
    x: TensorLike, /, *, axis: Axis = None, dtype: DTypeLike | None = None, keepdims: bool = False
) -> Tensor:
    """Return the sum over `axis` (all axes by default); 0 for no elements.

    Small integers and bools are summed as the default integer, as the standard requires. With
    `dtype`, x is cast first.

    Returns:
        A Tensor of x's shape without the reduced axes. Floats keep x's dtype.

    Op type: `Sum`. Source: the Array API standard.

    >>> rg.sum([[1.0, 2.0], [3.0, 4.0]], axis=0)
    Tensor([4., 6.], dtype=float32)
    """
    return _of_dtype(_sum(_of_dtype(x, dtype), axis=axis, keepdims=keepdims), dtype)


@op("Mean", to_float=True)
def mean(xp, x: TensorLike, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the mean over `axis` (all axes by default); NaN for no elements.

    Returns:
        A Tensor of x's shape without the reduced axes, and of x's dtype.
        Integers and bools become the default dtype.

    Source: the Array API standard.

    >>> rg.mean([[1.0, 2.0], [3.0, 4.0]], axis=0)
    Tensor([2., 3.], dtype=float32)
    """
    axes = normalized_axes(axis, x.ndim)
    count = _count(tuple(x.shape), axes)
    if count and xp is np:
        return backends.in_single(_means, xp, x, axes, keepdims, count)
    if count:
        return xp.mean(x, axis=axes, keepdims=keepdims)
    return xp.full_like(xp.sum(x, axis=axes, keepdims=keepdims), math.nan)


def _means(xp: Namespace, x: Array, axes: tuple[int, ...], keepdims: bool, count: int) -> Array:
    return _sums(xp, x, axes, keepdims) / count


gradient("Mean")(lambda dy, x_shape, axis, keepdims: unreduce_mean(dy, x_shape, axis, keepdims))


@op("UnreduceMean")
def unreduce_mean(
    xp, x: TensorLike, /, shape: tuple[int, ...], axis: Axis, keepdims: bool
) -> Tensor:
    """Spread a mean back in equal shares over the reduced axes: the adjoint of `mean`."""
    count = builtins.max(_count(shape, axis), 1)
    share = backends.in_single(lambda xp, x: x / count, xp, x)
    return _spread_back(xp, share, shape, axis, keepdims)


gradient("UnreduceMean")(lambda dy, axis, keepdims: mean(dy, axis=axis, keepdims=keepdims))


# -- product -------------------------------------------------------------------------------------


@op("Prod")
def _prod(xp, x: TensorLike, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    return xp.prod(x, axis=normalized_axes(axis, x.ndim), keepdims=keepdims)


@gradient("Prod")
def _(dy, x, axis, keepdims):
    dx = unreduce(dy, x.shape, axis, keepdims)
    for i in normalized_axes(axis, x.ndim):  # the product of all other elements, axis by axis
        before = cumulative_prod(x, axis=i, exclusive=True)
        after = cumulative_prod(x, axis=i, exclusive=True, reverse=True)
        dx = dx * (before * after)
        x = _prod(x, axis=i, keepdims=True)
    return dx


@public
def prod(
    x: TensorLike, /, *, axis: Axis = None, dtype: DTypeLike | None = None, keepdims: bool = False
) -> Tensor:
    """Return the product over `axis` (all axes by default); 1 for no elements.

    The gradient is the product of the other elements. It is also correct where elements are 0, at
    any order. With `dtype`, x is cast first.

    Returns:
        A Tensor of x's shape without the reduced axes. Floats keep x's dtype.

    Op type: `Prod`. Source: the Array API standard.

    >>> rg.grad(rg.prod)(rg.tensor([2.0, 0.0, 3.0])).print()
    Tensor
        [0, 6, 0]
    """
    return _of_dtype(_prod(_of_dtype(x, dtype), axis=axis, keepdims=keepdims), dtype)


# -- largest and smallest ------------------------------------------------------------------------


def _extremum(xp: Namespace, name: str, x: Array, axis: Axis, keepdims: bool) -> Array:
    axes = normalized_axes(axis, x.ndim)
    if backends.numpy_dtype(x.dtype).kind == "c":
        raise DTypeError(f"{name}: complex numbers have no order. Take abs(x) or real(x) first.")
    if not _count(tuple(x.shape), axes):
        raise ShapeError(
            f"{name}: undefined for no elements; x has the shape {tuple(x.shape)} and the "
            f"axis is {axis}. Pad x, or handle the empty case separately."
        )
    return getattr(xp, name)(x, axis=axes, keepdims=keepdims)


@op("Max")
def max(xp, x: TensorLike, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the largest element over `axis` (all axes by default).

    Ties share the gradient equally.

    Returns:
        A Tensor of x's shape without the reduced axes, and of x's dtype.

    Raises:
        ShapeError: there are no elements.
        DTypeError: x is complex.

    Source: the Array API standard.

    >>> rg.max([[1.0, 5.0], [3.0, 4.0]], axis=0)
    Tensor([3., 5.], dtype=float32)
    """
    return _extremum(xp, "max", x, axis, keepdims)


@op("Min")
def min(xp, x: TensorLike, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the smallest element over `axis` (all axes by default).

    Ties share the gradient equally.

    Returns:
        A Tensor of x's shape without the reduced axes, and of x's dtype.

    Raises:
        ShapeError: there are no elements.
        DTypeError: x is complex.

    Source: the Array API standard.

    >>> rg.min([[1.0, 5.0], [3.0, 4.0]], axis=0)
    Tensor([1., 4.], dtype=float32)
    """
    return _extremum(xp, "min", x, axis, keepdims)


def _to_ties(dy, x, y, axis, keepdims):
    # NaN makes the result NaN. The gradient then goes to the NaN, so that it stays visible
    tied = logical_or(x == unreduce(y, x.shape, axis, keepdims), isnan(x))
    count = _sum(tied, axis=axis, keepdims=keepdims)
    share = astype(widened(dy) / count, dy.dtype) if backends.is_half(dy.dtype) else dy / count
    return where(tied, unreduce(share, x.shape, axis, keepdims), 0)


gradient("Max")(_to_ties)
gradient("Min")(_to_ties)


# -- bools, counts, indices ----------------------------------------------------------------------


def _truth(xp: Namespace, x: Array) -> Array:
    """Return which elements are not 0. (`jnp.any` reads only the real part of complex numbers.)"""
    return x if x.dtype == xp.bool else x != 0


@op("Any")
def any(xp, x: TensorLike, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return whether any element over `axis` is true (not 0); False for no elements.

    Returns:
        A Tensor of bools, of x's shape without the reduced axes. The result has no gradient.

    Source: the Array API standard.

    >>> rg.any([[True, False], [False, False]], axis=1)
    Tensor([ True, False], dtype=bool)
    """
    return xp.any(_truth(xp, x), axis=normalized_axes(axis, x.ndim), keepdims=keepdims)


@op("All")
def all(xp, x: TensorLike, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return whether all elements over `axis` are true (not 0); True for no elements.

    Returns:
        A Tensor of bools, of x's shape without the reduced axes. The result has no gradient.

    Source: the Array API standard.

    >>> rg.all([[True, True], [True, False]], axis=1)
    Tensor([ True, False], dtype=bool)
    """
    return xp.all(_truth(xp, x), axis=normalized_axes(axis, x.ndim), keepdims=keepdims)


@op("CountNonzero")
def count_nonzero(xp, x: TensorLike, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return the number of elements over `axis` that are not 0.

    Returns:
        A Tensor of integers, of x's shape without the reduced axes. The result has no gradient.

    Source: the Array API standard.

    >>> rg.count_nonzero([[1.0, 0.0], [2.0, 3.0]], axis=1)
    Tensor([1, 2], dtype=int64)
    """
    return xp.sum(x != 0, axis=normalized_axes(axis, x.ndim), keepdims=keepdims)


def _place(xp: Namespace, name: str, x: Array, axis: int | None, keepdims: bool) -> Array:
    shape = tuple(x.shape)
    axis = axis if axis is None else normalized_axis(axis, x.ndim)
    if 0 in (shape if axis is None else (shape[axis],)):
        raise ShapeError(
            f"{name}: undefined for no elements; x has the shape {shape} and the axis is {axis}"
        )
    if x.dtype == xp.bool:
        x = backends.cast(xp, x, np.uint8)
    return getattr(xp, name)(x, axis=axis, keepdims=keepdims)


@op("ArgMax", real=True)
def argmax(xp, x: TensorLike, /, *, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Return the index of the largest element along `axis`; for ties, the first index.

    Args:
        axis: The axis. None returns the index into the flattened x.

    Returns:
        A Tensor of integers (int64, or JAX's default integers), of x's shape without the axis.
        The result has no gradient.

    Raises:
        ShapeError: there are no elements.
        DTypeError: x is complex.

    Source: the Array API standard.

    >>> rg.argmax([[1.0, 5.0], [4.0, 3.0]], axis=1)
    Tensor([1, 0], dtype=int64)
    """
    return _place(xp, "argmax", x, axis, keepdims)


@op("ArgMin", real=True)
def argmin(xp, x: TensorLike, /, *, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Return the index of the smallest element along `axis`; for ties, the first index.

    Args:
        axis: The axis. None returns the index into the flattened x.

    Returns:
        A Tensor of integers (int64, or JAX's default integers), of x's shape without the axis.
        The result has no gradient.

    Raises:
        ShapeError: there are no elements.
        DTypeError: x is complex.

    Source: the Array API standard.

    >>> rg.argmin([[1.0, 5.0], [4.0, 3.0]], axis=1)
    Tensor([0, 1], dtype=int64)
    """
    return _place(xp, "argmin", x, axis, keepdims)


not_differentiable("Any", "All", "CountNonzero", "ArgMax", "ArgMin")


@public
def allclose(
    a: TensorLike, b: TensorLike, /, *, rtol: float = 1e-5, atol: float = 1e-8,
    equal_nan: bool = False,
) -> Tensor:  # fmt: skip
    """Return whether all elements of a and b are close (see `isclose`).

    Args:
        rtol: The tolerance relative to b.
        atol: The absolute tolerance.
        equal_nan: Whether NaN is close to NaN.

    Returns:
        A Tensor with a single bool, for use with `if` and `bool`. The result has no gradient.

    A composition of `IsClose` and `All`. Source: `numpy.allclose`.

    >>> bool(rg.allclose(rg.tensor([1.0, 2.0]), [1.0, 2.0]))
    True
    """
    return all(isclose(a, b, rtol=rtol, atol=atol, equal_nan=equal_nan))


# -- compositions --------------------------------------------------------------------------------


def _squared_deviations(x: Tensor, centre: Tensor) -> Tensor:
    return _squared_size(x - centre)


def _squared_size(x: Tensor) -> Tensor:
    return real(x * conj(x)) if x.dtype.kind == "c" else square(x)


def _sqrt_or_zero(x: Tensor) -> Tensor:
    """Return the square root with gradient 0 at 0, for lengths and deviations."""
    return or_zero(sqrt(where(x == 0, 1, x)), x)


@deferrable
def var(
    x: TensorLike, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False
) -> Tensor:
    """Return the variance over `axis` (all axes by default).

    The sum of squared deviations from the mean is divided by `n - correction`. With
    `correction=1`, the result is the unbiased estimate from a sample. The result is NaN unless n
    is greater than `correction`.

    Args:
        correction: Subtracted from the number of elements.

    Returns:
        A Tensor of x's shape without the reduced axes, and of x's dtype; real for complex x.
        Integers and bools become the default dtype.

    A composition of `Mean`, `Square` and others. Source: the Array API standard.

    >>> rg.var(rg.tensor([1.0, 3.0]), correction=1)
    Tensor(2., dtype=float32)
    """
    x = _as_floating(x)
    squares = _squared_deviations(x, mean(x, axis=axis, keepdims=True))
    if not correction:
        return mean(squares, axis=axis, keepdims=keepdims)
    left = _count(x.shape, axis) - correction
    total = sum(widened(squares), axis=axis, keepdims=keepdims)
    return astype(total / left if left > 0 else total * math.nan, squares.dtype)


@deferrable
def std(
    x: TensorLike, /, *, axis: Axis = None, correction: float = 0.0, keepdims: bool = False
) -> Tensor:
    """Return the standard deviation over `axis` (all axes by default), the square root of `var`.

    The gradient is 0 where the result is 0.

    Args:
        correction: Subtracted from the number of elements; see `var`.

    Returns:
        A Tensor of x's shape without the reduced axes, and of x's dtype; real for complex x.
        Integers and bools become the default dtype.

    A composition in which `Sqrt` can be overridden. Source: the Array API standard.

    >>> rg.std([[1.0, 3.0], [5.0, 5.0]], axis=1)
    Tensor([1., 0.], dtype=float32)
    """
    return _sqrt_or_zero(var(x, axis=axis, correction=correction, keepdims=keepdims))


@deferrable
def moments(x: TensorLike, axis: Axis = None, keepdims: bool = False) -> tuple[Tensor, Tensor]:
    """Return the mean and the variance over `axis` (all axes by default).

    Returns:
        Two Tensors of x's shape without the reduced axes, and of x's dtype. The variance of
        complex numbers is real. Integers and bools become the default dtype.

    A composition of `Mean`, `Square` and others. Source: `tf.moments` of TensorFlow.js.

    >>> mean, variance = rg.nn.moments(rg.tensor([1.0, 3.0]))
    >>> mean.item(), variance.item()
    (2.0, 1.0)
    """
    x = _as_floating(x)
    centre = mean(x, axis=axis, keepdims=True)
    variance = mean(_squared_deviations(x, centre), axis=axis, keepdims=keepdims)
    return (centre if keepdims else _without(centre, axis)), variance


def _without(x: Tensor, axis: Axis) -> Tensor:
    """Return x without its reduced axes."""
    return squeeze(x, normalized_axes(axis, x.ndim))


@deferrable
def logsumexp(x: TensorLike, /, *, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Return `log(sum(exp(x)))` over `axis` (all axes by default), without overflow.

    Elements of -inf contribute to neither the value nor the gradient. If all elements are -inf,
    the result is -inf.

    Returns:
        A Tensor of x's shape without the reduced axes, and of x's dtype.
        Integers and bools become the default dtype.

    A composition of `Exp`, `Sum`, `Log` and others. Source: `scipy.special.logsumexp`.

    >>> rg.logsumexp(rg.tensor([1000.0, 1000.0])).print()
    Tensor
        1000.6931762695312
    """
    x = _as_floating(x)
    top = _finite_top(x, axis)
    total = sum(exp(widened(x - top)), axis=axis, keepdims=True)
    nothing = total == 0
    y = astype(where(nothing, -math.inf, log(where(nothing, 1, total))), x.dtype) + top
    return y if keepdims else _without(y, axis)


def _finite_top(x: Tensor, axis: Axis) -> Any:
    """Return the largest elements as constants; 0 where they are infinite or do not exist."""
    if builtins.any(type(n) is int and n == 0 for n in x.shape):
        return 0.0
    top = max(stop_gradient(x), axis=axis, keepdims=True)
    return where(isfinite(top), top, 0)


@deferrable
def vector_norm(
    x: TensorLike, /, *, axis: Axis = None, keepdims: bool = False, ord: float = 2
) -> Tensor:
    """Return the `ord`-norm of vectors along `axis` (by default, of all elements).

    The gradient at a vector of zeros is 0.

    Args:
        ord: 2 (the length), 1, any other number p for `sum(abs(x)**p)**(1/p)`, `inf` or `-inf` for
            the largest or smallest absolute value, or 0 for the number of nonzero elements.

    Returns:
        A Tensor of x's shape without the reduced axes, and of x's dtype; real for complex x.
        Integers and bools become the default dtype.

    Raises:
        ArgumentError: `ord` is not a number.

    A composition. Source: the Array API standard's `linalg.vector_norm`.

    >>> rg.linalg.vector_norm(rg.tensor([3.0, 4.0]))
    Tensor(5., dtype=float32)
    """
    if not isinstance(ord, int | float):
        raise ArgumentError(f"vector_norm: ord is a number, inf or -inf, got {kind(ord)}: {ord!r}")
    x = _as_floating(x)
    if ord == 2:
        return _sqrt_or_zero(sum(_squared_size(x), axis=axis, keepdims=keepdims))
    sizes = abs(x)
    if math.isinf(ord):
        return (max if ord > 0 else min)(sizes, axis=axis, keepdims=keepdims)
    if ord in (0, 1):
        terms = sizes if ord else sign(where(sizes != sizes, 1, sizes))  # NaN is not 0
        return sum(terms, axis=axis, keepdims=keepdims)
    return _power_norm(sizes, axis, keepdims, ord)


def _power_norm(sizes: Tensor, axis: Axis, keepdims: bool, p: float) -> Tensor:
    """Return `sum(sizes**p)**(1/p)`. Both powers have a kink at 0, where the gradient is 0."""
    at_zero = 0.0 if p > 0 else math.inf
    zero = sizes == 0
    total = sum(where(zero, at_zero, pow(where(zero, 1, sizes), p)), axis=axis, keepdims=keepdims)
    zero = total == at_zero
    x = where(zero, 0, where(total == 0, 1, total))  # (for p < 0, infinite sizes have the total 0)
    return or_zero(pow(where(zero, 1, total), 1 / p), x)


@public
def trace(x: TensorLike, /, *, offset: int = 0, dtype: DTypeLike | None = None) -> Tensor:
    """Return the sums of the diagonals of matrices.

    Args:
        offset: The diagonal: 0 for the main one, positive above it, negative below.

    Returns:
        A Tensor of x's shape without the last two axes. Floats keep x's dtype.

    Raises:
        ShapeError: x has fewer than two axes.

    A composition of `MatrixDiagPart` and `Sum`. Source: the Array API standard.

    >>> rg.linalg.trace([[1.0, 2.0], [3.0, 4.0]])
    Tensor(5., dtype=float32)
    """
    return sum(diagonal(x, offset=offset), axis=-1, dtype=dtype)
