"""Ops that keep the numbers: parts of complex numbers, other dtypes, and x itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from regrad.core import backends, dispatch
from regrad.core.backends import DTypeLike, is_inexact
from regrad.core.op import TensorLike, op, row
from regrad.core.registry import OPS, gradient, not_differentiable
from regrad.core.rule import no_gradient
from regrad.core.signatures import public
from regrad.core.tensor import Tensor
from regrad.ops.creation import as_numpy_dtype

# -- complex numbers ---------------------------------------------------------------------------
# Gradients follow TensorFlow's convention: for y = f(x) the gradient is dy * conj(f'(x)).


@op("Conj", elementwise=True, holomorphic=False)
def _conj(xp, x: TensorLike, /) -> Tensor:
    return xp.conj(x)


gradient("Conj")(lambda dy: conj(dy))


@public
def conj(x: TensorLike, /) -> Tensor:
    """Return the complex conjugate. A real Tensor is returned unchanged.

    Returns:
        A Tensor of x's shape and dtype.

    Op type: `Conj` (for complex numbers).

    >>> rg.conj([1 + 2j])
    Tensor([1.-2.j], dtype=complex64)
    """
    x = dispatch.lift(x)
    return _conj(x) if x.dtype.kind == "c" else x


@op("Real", elementwise=True, holomorphic=False)
def real(xp, x: TensorLike, /) -> Tensor:
    """Return the real part.

    Returns:
        A Tensor of x's shape: float32 for complex64 numbers, float64 for complex128.

    >>> rg.real([1 + 2j])
    Tensor([1.], dtype=float32)
    """
    return xp.real(x) if backends.is_complex(x) else x


gradient("Real")(lambda dy, x_dtype: dispatch.as_dtype(dy, backends.numpy_dtype(x_dtype)))


@op("Imag", elementwise=True, holomorphic=False)
def imag(xp, x: TensorLike, /) -> Tensor:
    """Return the imaginary part, or zeros for real numbers.

    Returns:
        A Tensor of x's shape: float32 for complex64 numbers, float64 for complex128.

    >>> rg.imag([1 + 2j])
    Tensor([2.], dtype=float32)
    """
    return xp.imag(x) if backends.is_complex(x) else xp.zeros_like(x)


@gradient("Imag")
def _(dy, x_dtype):
    return dy * 1j if backends.numpy_dtype(x_dtype).kind == "c" else no_gradient(dy)


# -- identity, casts ---------------------------------------------------------------------------


@row("Identity", lambda dy: dy, kernel=lambda xp, x: x)
def identity(x):
    """Return x itself. A rule can be attached to this op.

    >>> rg.identity([1.0, 2.0])
    Tensor([1., 2.], dtype=float32)
    """


@public
def positive(x: TensorLike, /) -> Tensor:
    """Return x itself, like `+x`.

    Returns:
        A Tensor of x's shape and dtype.

    Op type: `Identity`. Source: the Array API standard.

    >>> rg.positive([1.0, -2.0])
    Tensor([ 1., -2.], dtype=float32)
    """
    return identity(x)


@row("StopGradient", kernel=lambda xp, x: x)
def stop_gradient(x):
    """Return x as a constant: no gradient propagates through it.

    `g(x) + stop_gradient(f(x) - g(x))` has the value of f and the gradient of g.

    Source: `tf.stop_gradient`.

    >>> rg.grad(lambda x: x * rg.stop_gradient(x))(rg.scalar(3.0))
    Tensor(3., dtype=float32)
    """


not_differentiable("StopGradient")


@op("Cast", holomorphic=False)
def _cast(xp, x: TensorLike, /, *, dtype: DTypeLike) -> Tensor:
    return backends.cast(xp, x, dtype)


@gradient("Cast", "x")
def _(dy, x_dtype):
    dtype = backends.numpy_dtype(x_dtype)
    return dispatch.as_dtype(dy, dtype) if is_inexact(dtype) else dy


def _to_integers(attrs: dict[str, Any], xs: Sequence[Tensor]) -> bool:
    return is_inexact(xs[0].dtype) and not is_inexact(attrs["dtype"])


OPS["Cast"].rule.unless = _to_integers  # pyright: ignore[reportAttributeAccessIssue]


@public
def astype(x: TensorLike, dtype: DTypeLike, /, *, copy: bool = True, device: Any = None) -> Tensor:
    """Return x converted to another dtype.

    Between floats (and complex numbers) the gradient propagates and is cast back. A cast to
    integers or bools has no gradient, unless a rule is active for the op type. A cast of complex
    numbers to real ones takes the real part. A cast to bools is True where x is not 0.

    Args:
        dtype: The dtype of the result.
        copy: Has no effect, because Tensors are immutable. The Array API standard requires it.

    Returns:
        A Tensor of x's shape; x itself if it already has the dtype.

    Raises:
        DTypeError: `dtype` is not a dtype that Tensors have.

    Op type: `Cast`. Source: the Array API standard.

    >>> rg.astype([1.5, -1.5], rg.int32)
    Tensor([ 1, -1], dtype=int32)
    """
    dtype = as_numpy_dtype(dtype)
    x = dispatch.lift_as(x, dtype) if dispatch.is_plain(x) else dispatch.lift(x)
    return x if x.dtype == dtype else _cast(x, dtype=dtype)
