"""Linear systems, determinants and matrix decompositions, over the last two axes.

The ops behind `regrad.linalg`. Where possible, the rules use the *outputs* (L of Cholesky, Q and R,
U, S and V), so they cost products and triangular solves. The rules consist of ops that have correct
rules themselves, so derivatives of any order follow. Sources: Giles (2008), "Collected
matrix derivative results"; Murray (2016), "Differentiation of the Cholesky decomposition";
Walter and Lehmann (2018) for QR; Townsend (2016) for the SVD; Golub and Pereyra (1973) for
the pseudo-inverse.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from regrad.core import backends
from regrad.core.backends import Array, Namespace
from regrad.core.op import TensorLike, op
from regrad.core.registry import gradient, not_differentiable
from regrad.core.signatures import public
from regrad.core.tensor import Tensor
from regrad.errors import GradientError
from regrad.ops.array import diag, diagonal, expand_dims, matrix_transpose, tril, triu
from regrad.ops.casting import conj, imag
from regrad.ops.creation_like import zeros_like
from regrad.ops.joining import concat, split
from regrad.ops.matmul import matmul
from regrad.ops.reduction import trace
from regrad.shapes.matrices import matrices, squares

# -- small tools for rules and kernels -------------------------------------------------------------


def _adjoint(x: Tensor) -> Tensor:
    return conj(matrix_transpose(x))


def _hermitian(x: Tensor) -> Tensor:
    return 0.5 * (x + _adjoint(x))


def _symmetrized(xp: Namespace, x: Array) -> Array:
    """Return the Hermitian part of an array; exactly the array if it is Hermitian."""
    squares(tuple(x.shape))
    return (x + xp.conj(xp.matrix_transpose(x))) / 2


def _half_diagonal(x: Tensor) -> Tensor:
    """Halve the diagonal of x. A triangle of the result plus its adjoint is a Hermitian matrix."""
    return x - 0.5 * diag(diagonal(x))


def _matrix(x: Tensor) -> Tensor:
    """Reshape one number per matrix so that it multiplies the matrices."""
    return expand_dims(x, (-2, -1))


@op("QuotientOrZero", elementwise=True)
def _quotient(xp, a: TensorLike, b: TensorLike, /) -> Tensor:
    """Return `a / b`, and 0 where a is 0. Unlike `xdivy`, a has the gradient `1 / b` everywhere.

    Where eigenvalues coincide, the gradient of the eigenvectors does not exist and becomes
    infinite or NaN here. It stays 0 where no gradient arrives at the eigenvectors.
    """
    zero = a == 0
    return xp.where(zero, a, a / xp.where(zero, xp.ones_like(b), b))


gradient("QuotientOrZero", "a")(lambda dy, b: _quotient(dy, b))
gradient("QuotientOrZero", "b")(lambda dy, b, y: -_quotient(dy * y, b))


# -- linear systems --------------------------------------------------------------------------------


@op("MatrixInverse", to_float=True)
def inv(xp, x: TensorLike, /) -> Tensor:
    """Return the inverse of square matrices.

    For `inv(a) @ b` use `solve(a, b)`, which is faster and more accurate.

    Returns:
        A Tensor of x's shape and dtype. Integers and bools become the default dtype.

    Raises:
        ShapeError: the matrices are not square.
        MatrixError: a matrix is singular (on NumPy and PyTorch).

    Source: the Array API standard.

    >>> rg.linalg.inv([[2.0, 0.0], [0.0, 4.0]]).tolist()
    [[0.5, 0.0], [0.0, 0.25]]
    """
    squares(tuple(x.shape))
    return xp.linalg.inv(x)


gradient("MatrixInverse")(lambda dy, y: -matmul(y, matmul(dy, y, False, True), True))


@op("MatrixSolve", broadcasts=True, to_float=True)
def solve(xp, a: TensorLike, b: TensorLike, /, *, transpose: bool = False) -> Tensor:
    """Return the y with `a @ y = b` (or `matrix_transpose(a) @ y = b`)."""
    return xp.linalg.solve(xp.matrix_transpose(a) if transpose else a, b)


@gradient("MatrixSolve", "a")
def _(dy, a, y, transpose):
    db = solve(a, dy, transpose=not transpose)
    return -matmul(y, db, False, True) if transpose else -matmul(db, y, False, True)


gradient("MatrixSolve", "b")(lambda dy, a, transpose: solve(a, dy, transpose=not transpose))


@op("MatrixTriangularSolve", broadcasts=True, to_float=True)
def triangular_solve(
    xp, a: TensorLike, b: TensorLike, /, *, lower: bool = True, transpose: bool = False
) -> Tensor:
    """Solve like `solve`, but read only the lower (or upper) triangle of a."""
    if xp.__name__ == "jax.numpy":
        return _jax_triangular_solve(xp, a, b, lower, transpose)
    a, lower = (xp.matrix_transpose(a), not lower) if transpose else (a, lower)
    if xp is np:
        return _scipy_triangular_solve(a, b, lower)
    return xp.linalg.solve_triangular(a, b, upper=not lower)


def _scipy_triangular_solve(a: Array, b: Array, lower: bool) -> Any:
    if a.ndim > 2 or b.ndim > 2 or not b.size:  # SciPy only solves a single system
        return np.linalg.solve(np.tril(a) if lower else np.triu(a), b)
    import scipy.linalg

    y = scipy.linalg.solve_triangular(a, b, lower=lower, check_finite=False)
    return y.astype(b.dtype, copy=False)  # SciPy returns single precision for halves


def _jax_triangular_solve(xp: Namespace, a: Array, b: Array, lower: bool, transpose: bool) -> Array:
    from jax.lax.linalg import triangular_solve

    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (xp.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (a, b))
    return triangular_solve(a, b, left_side=True, lower=lower, transpose_a=transpose)


@gradient("MatrixTriangularSolve", "a")
def _(dy, a, y, lower, transpose):
    db = triangular_solve(a, dy, lower=lower, transpose=not transpose)
    da = -matmul(y, db, False, True) if transpose else -matmul(db, y, False, True)
    return tril(da) if lower else triu(da)


@gradient("MatrixTriangularSolve", "b")
def _(dy, a, lower, transpose):
    return triangular_solve(a, dy, lower=lower, transpose=not transpose)


# -- determinants ----------------------------------------------------------------------------------
# The determinant is a polynomial, but the usual rule, det(x) * inv(x).T, fails for singular
# matrices. The SVD yields the same matrix of cofactors for all matrices, and also the next
# derivative.


@op("MatrixDeterminant", to_float=True)
def det(xp, x: TensorLike, /) -> Tensor:
    """Return the determinant of square matrices.

    First and second derivatives are correct for every matrix, including singular ones. Higher
    derivatives need an inverse. Use `slogdet` for large matrices, whose determinants overflow.

    Returns:
        A Tensor of x's shape without the last two axes, and of x's dtype.
        Integers and bools become the default dtype.

    Raises:
        ShapeError: the matrices are not square.

    Source: the Array API standard.

    >>> rg.linalg.det([[2.0, 0.0], [0.0, 4.0]])
    Tensor(8., dtype=float32)
    """
    squares(tuple(x.shape))
    return xp.linalg.det(x)


gradient("MatrixDeterminant")(lambda dy, x: _matrix(dy) * _cofactors(x))


@op("MatrixCofactors")
def _cofactors(xp, x: TensorLike, /) -> Tensor:
    """Return the derivative of the determinant: `det(x) * inv(x).T` for regular matrices."""
    u, s, vh, sign = _svd_and_sign(xp, x)
    before, after = _products_around(xp, s)
    return sign * (u * (before * after)[..., None, :]) @ vh


gradient("MatrixCofactors")(lambda dy, x: _cofactors_change(dy, x))


@op("MatrixCofactorsChange")
def _cofactors_change(xp, a: TensorLike, x: TensorLike, /) -> Tensor:
    """Return the second derivative of the determinant, in the direction a."""
    u, s, vh, sign = _svd_and_sign(xp, x)
    a = xp.matrix_transpose(u) @ a @ xp.matrix_transpose(vh)
    others = _products_without_pairs(xp, s)
    y = -others * xp.matrix_transpose(a)
    on_diagonal = xp.tril(xp.triu(xp.ones_like(y)))
    traces = backends.cast(xp, others, y.dtype) @ xp.linalg.diagonal(a)[..., None]
    return sign * u @ (y + on_diagonal * traces) @ vh


@gradient("MatrixCofactorsChange", "a")
def _(dy, x):
    return _cofactors_change(dy, x)  # second derivatives are symmetric


@gradient("MatrixCofactorsChange", "x")
def _(dy, a, x):
    inverse = inv(x)
    p, q = matmul(inverse, a), matmul(inverse, dy)
    pq = matmul(p, q)
    trace_p, trace_q, trace_pq = (_matrix(trace(z)) for z in (p, q, pq))
    change = matmul(pq + matmul(q, p) - trace_q * p - trace_p * q, inverse)
    change = change + (trace_p * trace_q - trace_pq) * inverse
    return _matrix(det(x)) * matrix_transpose(change)


def _svd_and_sign(xp: Namespace, x: Array) -> Array:
    """Return conj(u), s and conj(vh) of the SVD, and the determinant of u @ vh."""
    u, s, vh = xp.linalg.svd(x, full_matrices=False)
    sign = xp.linalg.det(u) * xp.linalg.det(vh)
    return xp.conj(u), s, xp.conj(vh), sign[..., None, None]


def _products_around(xp: Namespace, s: Array) -> tuple[Any, Any]:
    """Return, for each number, the products of all numbers before it and of all after it."""

    def before(s: Array) -> Any:
        return xp.cumulative_prod(s, axis=-1, include_initial=True)[..., :-1]

    return before(s), xp.flip(before(xp.flip(s, axis=-1)), axis=-1)


def _products_without_pairs(xp: Namespace, s: Array) -> Array:
    """Return at (i, j) the product of all numbers but the i-th and the j-th; 0 if i equals j."""
    ones = xp.ones_like(s[..., None] * s[..., None, :])
    later = xp.triu(ones * s[..., None, :], k=1) + xp.tril(ones)
    before, after = _products_around(xp, s)
    between = _products_around(xp, later)[0]
    pairs = xp.triu(before[..., None] * between * after[..., None, :], k=1)
    return pairs + xp.matrix_transpose(pairs)


@op("LogMatrixDeterminant", to_float=True, holomorphic=False)
def slogdet(xp, x: TensorLike, /) -> tuple[Tensor, Tensor]:
    """Return the sign (phase) of the determinant and the logarithm of its absolute value."""
    squares(tuple(x.shape))
    return tuple(xp.linalg.slogdet(x))


@gradient("LogMatrixDeterminant")
def _(dy, x, y):
    dsign, dlog = dy
    if x.dtype.kind == "c":  # the phase is the imaginary part of log(det(x))
        dlog = dlog - 1j * imag(conj(dsign) * y[0])
    return _matrix(dlog) * _adjoint(inv(x))


# -- the exponential -------------------------------------------------------------------------------


@op("MatrixExponential", to_float=True)
def expm(xp, x: TensorLike, /) -> Tensor:
    """Return the exponential of square matrices, `I + x + x @ x / 2 + …`.

    The algorithm is scaling, Padé approximants and squaring, by SciPy, JAX or PyTorch for their
    arrays. The gradient is a block of the exponential of a matrix of twice the size, so
    derivatives of any order are as accurate as the value.

    Args:
        x: Matrices over the last two axes.

    Returns a Tensor of x's shape; integers become float32.

    Raises ShapeError if the matrices are not square.

    Source: `scipy.linalg.expm`; Al-Mohy and Higham (2009), "Computing the Fréchet derivative of
    the matrix exponential".

    >>> import regrad as rg
    >>> rg.linalg.expm(rg.tensor([[0.0, 1.0], [0.0, 0.0]])).print()
    Tensor
        [[1, 1],
         [0, 1]]
    """
    squares(tuple(x.shape))
    return _exponential(xp, x)


def _exponential(xp: Namespace, x: Array) -> Array:
    """Compute the exponential in at least single precision.

    SciPy does not support half precision, and PyTorch returns NaN for it.
    """
    wide = xp.astype(x, xp.float32) if x.dtype.itemsize == 2 else x
    if xp is np:
        import scipy.linalg

        y = scipy.linalg.expm(wide)
    elif xp.__name__ == "jax.numpy":
        from jax.scipy.linalg import expm as jax_expm

        y = jax_expm(wide)
    else:
        y = xp.linalg.matrix_exp(wide)
    return xp.astype(y, x.dtype)


gradient("MatrixExponential")(lambda dy, x: _expm_change(dy, matrix_transpose(x)))


@op("MatrixExponentialChange")
def _expm_change(xp, a: TensorLike, x: TensorLike, /) -> Tensor:
    """Return the Fréchet derivative of the exponential at x in the direction a."""
    n = x.shape[-1]
    rows = xp.concat([x, a], axis=-1), xp.concat([xp.zeros_like(a), x], axis=-1)
    return _exponential(xp, xp.concat(rows, axis=-2))[..., :n, n:]


gradient("MatrixExponentialChange", "a")(lambda dy, x: _expm_change(dy, matrix_transpose(x)))


@gradient("MatrixExponentialChange", "x")
def _(dy, a, x):
    n, zeros = x.shape[-1], zeros_like(x)
    block = _blocks(x, a, zeros, x)
    change = _expm_change(_blocks(zeros, dy, zeros, zeros), matrix_transpose(block))
    left, right = split(change, (n, n), axis=-1)
    return split(left, (n, n), axis=-2)[0] + split(right, (n, n), axis=-2)[1]


def _blocks(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return concat([concat([a, b], axis=-1), concat([c, d], axis=-1)], axis=-2)


# -- Cholesky, QR ----------------------------------------------------------------------------------


@op("Cholesky", to_float=True, holomorphic=False)
def cholesky(xp, x: TensorLike, /) -> Tensor:
    """Return the lower triangle y with `y @ adjoint(y)` equal to the Hermitian part of x."""
    return xp.linalg.cholesky(_symmetrized(xp, x))


@gradient("Cholesky")
def _(dy, y):
    inner = tril(_half_diagonal(matmul(conj(y), dy, True)))
    left = triangular_solve(conj(y), inner, transpose=True)
    return _hermitian(triangular_solve(conj(y), _adjoint(left), transpose=True))


@op("Qr", to_float=True, holomorphic=False)
def qr(xp, x: TensorLike, /, *, mode: str) -> tuple[Tensor, Tensor]:
    """Return orthonormal columns and an upper triangle."""
    matrices("qr", tuple(x.shape))
    return tuple(xp.linalg.qr(x, mode=mode))


@gradient("Qr")
def _(dy, y):
    (q, r), (dq, dr) = y, dy
    if q.shape[-1] > r.shape[-1]:
        raise GradientError(
            f"qr with mode='complete' of matrices of shape {(q.shape[-2], r.shape[-1])} has no "
            "gradient: the last columns of Q are arbitrary. Use mode='reduced'."
        )
    change = matmul(dr, conj(r), False, True) - matmul(conj(q), dq, True)
    inner = triu(_half_diagonal(change))
    outer = dq + matmul(q, inner + _adjoint(inner))
    return _adjoint(triangular_solve(r, _adjoint(outer), lower=False))


# -- pseudo-inverse, rank -------------------------------------------------------------------------


@op("MatrixPseudoInverse", to_float=True, holomorphic=False)
def _pinv(xp, x: TensorLike, rtol: TensorLike | None = None, /) -> Tensor:
    return xp.linalg.pinv(x, rtol=_default_rtol(x) if rtol is None else rtol)


@public
def pinv(x: TensorLike, /, *, rtol: TensorLike | None = None) -> Tensor:
    """Return the Moore-Penrose pseudo-inverse of matrices, by the SVD.

    The gradient is valid where the rank does not change.

    Args:
        rtol: Singular values up to `rtol` times the largest are treated as 0. The default is the
            larger side times the dtype's epsilon. A Tensor holds one value per matrix of a stack.

    Returns:
        A Tensor of x's dtype and of shape `(..., n, m)`, for x of shape `(..., m, n)`.

    Raises:
        MatrixError: x has fewer than two axes.

    Op type: `MatrixPseudoInverse`. Source: the Array API standard.

    >>> rg.linalg.pinv(rg.tensor([[2.0, 0.0], [0.0, 0.0]])).shape
    (2, 2)
    """
    return _pinv(x, rtol)


@gradient("MatrixPseudoInverse", "x")
def _(dy, x, y):
    dyh, yh = _adjoint(dy), _adjoint(y)
    left = matmul(dyh, matmul(y, yh))
    right = matmul(matmul(yh, y), dyh)
    left = left - matmul(x, matmul(y, left))
    right = right - matmul(matmul(right, y), x)
    return left + right - matmul(matmul(yh, dy), yh)


gradient("MatrixPseudoInverse", "rtol")(lambda dy: None)


@op("MatrixRank", to_float=True)
def _matrix_rank(xp, x: TensorLike, rtol: TensorLike | None = None, /) -> Tensor:
    s = xp.linalg.svdvals(x)
    limit = _default_rtol(x) if rtol is None else rtol[..., None]
    return xp.sum(s > limit * s[..., :1], axis=-1)


@public
def matrix_rank(x: TensorLike, /, *, rtol: TensorLike | None = None) -> Tensor:
    """Return the number of singular values above `rtol` times the largest one.

    Args:
        rtol: A number, or a Tensor with one number per matrix of a stack. The default is the larger
            side times the dtype's epsilon.

    Returns:
        A Tensor of integers, of x's shape without the last two axes. The result has no gradient.

    Raises:
        MatrixError: x has fewer than two axes.

    Op type: `MatrixRank`. Source: the Array API standard.

    >>> rg.linalg.matrix_rank([[1.0, 0.0], [0.0, 0.0]])
    Tensor(1, dtype=int64)
    """
    return _matrix_rank(x, rtol)


not_differentiable("MatrixRank")


def _default_rtol(x: Tensor) -> float:
    """Return the rounding error of a decomposition, relative to the largest singular value."""
    return max(x.shape[-2:]) * float(np.finfo(backends.numpy_dtype(x.dtype)).eps)
