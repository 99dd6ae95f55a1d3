"""Linear algebra: the `linalg` extension of the Array API standard, and TensorFlow's solvers.

Matrices lie in the last two axes, and earlier axes form a stack of matrices. This module has the
public functions with several results or checks. The ops and their rules are in `regrad.ops`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple

from regrad.core import dispatch
from regrad.core.hints import hint_in as _hint_in
from regrad.core.signatures import public
from regrad.core.tensor import Tensor, TensorLike
from regrad.errors import ArgumentError, ShapeError, kind
from regrad.graph.deferred import deferrable
from regrad.ops import decompositions, reduction, spectral
from regrad.ops.array import diag, diagonal, expand_dims, matrix_transpose, reshape
from regrad.ops.casting import conj
from regrad.ops.creation_like import ones_like
from regrad.ops.decompositions import det, expm, inv, matrix_rank, pinv
from regrad.ops.elementwise import abs as elementwise_abs
from regrad.ops.joining import concat, split
from regrad.ops.matmul import cross, kron, matmul, outer, tensordot, vecdot
from regrad.ops.reduction import trace, vector_norm
from regrad.ops.spectral import eigvalsh, svdvals

__all__ = [
    "EighResult", "LstsqResult", "QRResult", "SVDResult", "SlogdetResult", "cholesky", "cross",
    "det", "diag", "diagonal", "eigh", "eigvalsh", "expm", "inv", "kron", "lstsq", "matmul",
    "matrix_norm", "matrix_power", "matrix_rank", "matrix_transpose", "outer", "pinv", "qr",
    "slogdet", "solve", "svd", "svdvals", "tensordot", "trace", "triangular_solve", "vecdot",
    "vector_norm",
]  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Callable


class SlogdetResult(NamedTuple):
    """The sign (or phase) of a determinant and the logarithm of its absolute value.

    Args:
        sign: -1, 0 or 1; a number of absolute value 1 for complex matrices.
        logabsdet: The logarithm of the absolute value, -inf for 0.

    >>> import regrad as rg
    >>> rg.linalg.slogdet(rg.tensor([[2.0, 0.0], [0.0, -0.5]])).sign
    Tensor(-1., dtype=float32)
    """

    sign: Tensor
    logabsdet: Tensor


@public
def slogdet(x: TensorLike, /) -> SlogdetResult:
    """Return the sign (or phase) of the determinant and the logarithm of its absolute value.

    Returns:
        `sign` and `logabsdet`, of x's shape without the last two axes.

    Raises:
        ShapeError: the matrices are not square.

    Op type: `LogMatrixDeterminant`. Source: the Array API standard.

    >>> rg.linalg.slogdet(rg.tensor([[2.0, 0.0], [0.0, -0.5]])).sign.print()
    Tensor
        -1
    """
    return SlogdetResult(*decompositions.slogdet(x))


@deferrable
def solve(a: TensorLike, b: TensorLike, /) -> Tensor:
    """Return the y with `a @ y = b`, for square matrices a.

    Args:
        a: Matrices over the last two axes. Stacks of a and b broadcast.
        b: Matrices of columns, or a vector (rank 1).

    Returns:
        A Tensor of b's shape, up to broadcasting, with the dtype to which a and b promote.

    Raises:
        ShapeError: the matrices a are not square, or the sizes differ.
        MatrixError: a matrix is singular (on NumPy and PyTorch; JAX returns infinities or NaN).

    Op type: `MatrixSolve`. Source: the Array API standard.

    >>> rg.linalg.solve([[2.0, 0.0], [0.0, 4.0]], [2.0, 2.0])
    Tensor([1. , 0.5], dtype=float32)
    """
    return _solve("solve", decompositions.solve, a, b)


@deferrable
def triangular_solve(
    a: TensorLike, b: TensorLike, /, *, lower: bool = True, adjoint: bool = False
) -> Tensor:
    """Return the y with `a @ y = b`, where a is the lower (or upper) triangle of a matrix.

    Args:
        a: Square matrices over the last two axes. Stacks of a and b broadcast.
        b: Matrices of columns, or a vector (rank 1).
        lower: Whether to read the lower triangle.
        adjoint: Whether to use the conjugate transpose of the triangle.

    Returns:
        A Tensor of b's shape, up to broadcasting, with the dtype to which a and b promote.

    Raises:
        ShapeError: the matrices a are not square, or the sizes differ.
        ArgumentError: a flag is not True or False.

    Op type: `MatrixTriangularSolve`. Source: `tf.linalg.triangular_solve`.

    >>> rg.linalg.triangular_solve([[2.0, 9.0], [2.0, 1.0]], [2.0, 3.0])
    Tensor([1., 1.], dtype=float32)
    """

    for name, flag in (("lower", lower), ("adjoint", adjoint)):
        if not isinstance(flag, bool):
            raise ArgumentError(f"triangular_solve: {name} must be True or False, got {kind(flag)}")

    def solver(a: Tensor, b: Tensor) -> Tensor:
        a = conj(a) if adjoint else a
        return decompositions.triangular_solve(a, b, lower=lower, transpose=adjoint)

    return _solve("triangular_solve", solver, a, b)


def _solve(name: str, solver: Callable[..., Tensor], a: TensorLike, b: TensorLike) -> Tensor:
    a, b = dispatch.lift(a), dispatch.lift(b)
    rows = b.shape[-1 if b.ndim == 1 else -2] if b.ndim else None
    if a.ndim < 2 or a.shape[-2:] != (rows, rows):
        raise ShapeError(
            f"{name} takes square matrices and the same number of rows on the right (or a "
            f"vector of rank 1), got {a.shape} and {b.shape}"
        )
    if b.ndim > 1:
        return solver(a, b)
    y = solver(a, expand_dims(b, 1))
    return reshape(y, y.shape[:-1])


@deferrable
def cholesky(x: TensorLike, /, *, upper: bool = False) -> Tensor:
    """Return the lower triangular y with `y @ adjoint(y) = x`.

    regrad symmetrizes x first, `(x + adjoint(x)) / 2`, like JAX. So the gradient is symmetric,
    like in TensorFlow and PyTorch, and correct for every change of x.

    Args:
        x: Hermitian (symmetric, if real), positive definite matrices over the last two axes.
        upper: Whether to return the adjoint of y.

    Returns:
        A Tensor of x's shape and dtype. Integers and bools become the default dtype.

    Raises:
        ShapeError: the matrices are not square.
        MatrixError: a matrix is not positive definite (on NumPy and PyTorch).

    Op type: `Cholesky`. Source: the Array API standard.

    >>> rg.linalg.cholesky([[4.0, 0.0], [0.0, 9.0]]).tolist()
    [[2.0, 0.0], [0.0, 3.0]]
    """
    y = decompositions.cholesky(x)
    return conj(matrix_transpose(y)) if upper else y


class QRResult(NamedTuple):
    """Orthonormal columns and an upper triangle.

    Args:
        Q: The columns.
        R: The triangle.

    >>> import regrad as rg
    >>> rg.linalg.qr(rg.ones((3, 2))).R.shape
    (2, 2)
    """

    Q: Tensor
    R: Tensor


@deferrable
def qr(x: TensorLike, /, *, mode: Literal["reduced", "complete"] = "reduced") -> QRResult:
    """Return Q with orthonormal columns and an upper triangular R, with `Q @ R = x`.

    The gradient requires linearly independent columns (for wide matrices: the first columns).
    `mode="complete"` of a tall matrix has no gradient.

    Args:
        x: Matrices of shape `(..., m, n)`.
        mode: "reduced" (Q has min(m, n) columns) or "complete" (m columns).

    Returns:
        `Q` and `R`, of x's dtype.

    Raises:
        ArgumentError: `mode` is unknown.
        MatrixError: x has fewer than two axes.

    Op type: `Qr`. Source: the Array API standard.

    >>> q, r = rg.linalg.qr(rg.ones((3, 2)))
    >>> q.shape, r.shape
    ((3, 2), (2, 2))
    """
    if mode not in ("reduced", "complete"):
        raise ArgumentError(f"qr: mode must be 'reduced' or 'complete', got {mode!r}")
    x = dispatch.lift(x)
    if x.ndim < 2 or x.shape[-2] >= x.shape[-1]:
        return QRResult(*decompositions.qr(x, mode=mode))
    m, n = x.shape[-2:]
    left, right = split(x, (m, n - m), axis=-1)
    q, r = decompositions.qr(left, mode=mode)
    return QRResult(q, concat([r, matmul(conj(q), right, True)], axis=-1))


class EighResult(NamedTuple):
    """Eigenvalues in ascending order, and eigenvectors as columns.

    Args:
        eigenvalues: Real numbers, of shape `(..., n)`.
        eigenvectors: Matrices of shape `(..., n, n)`.

    >>> import regrad as rg
    >>> rg.linalg.eigh([[3.0, 0.0], [0.0, 2.0]]).eigenvectors.shape
    (2, 2)
    """

    eigenvalues: Tensor
    eigenvectors: Tensor


@public
def eigh(x: TensorLike, /) -> EighResult:
    """Return eigenvalues (ascending) and orthonormal eigenvectors of Hermitian matrices.

    regrad symmetrizes x first, `(x + adjoint(x)) / 2`, like JAX, so the gradient is symmetric and
    correct for every change of x. The sign (phase) of an eigenvector is arbitrary, so only
    functions that do not depend on it are well defined. Where eigenvalues coincide, the gradient of
    the eigenvectors does not exist and is infinite or NaN. The gradient of the eigenvalues alone
    stays finite.

    Returns:
        `eigenvalues`, real, `(..., n)`, and `eigenvectors`, of x's shape `(..., n, n)`.

    Raises:
        ShapeError: the matrices are not square.

    Op type: `SelfAdjointEigV2`. Source: the Array API standard.

    >>> rg.linalg.eigh([[3.0, 0.0], [0.0, 2.0]]).eigenvalues
    Tensor([2., 3.], dtype=float32)
    """
    return EighResult(*spectral.eigh(x))


class SVDResult(NamedTuple):
    """Left vectors as columns, singular values in descending order, and right vectors as rows.

    Args:
        U: The left vectors.
        S: The singular values, real.
        Vh: The right vectors, conjugated.

    >>> import regrad as rg
    >>> rg.linalg.svd(rg.ones((3, 2))).U.shape
    (3, 3)
    """

    U: Tensor
    S: Tensor
    Vh: Tensor


@public
def svd(x: TensorLike, /, *, full_matrices: bool = True) -> SVDResult:
    """Return singular values (descending) and vectors: `x = U @ diag(S) @ Vh`.

    The gradient requires `full_matrices=False`, unless the matrices are square. The signs (phases)
    of the vectors are arbitrary, so only functions that do not depend on them are well defined.
    Where singular values coincide or are 0, the gradient of the vectors does not exist and is
    infinite or NaN. The gradient of the singular values alone stays finite.

    Args:
        x: Matrices of shape `(..., m, n)`.
        full_matrices: Whether U is (m, m) and Vh is (n, n). Otherwise they have min(m, n) vectors.

    Returns:
        `U`, `S` of shape `(..., min(m, n))`, and `Vh`.

    Raises:
        MatrixError: x has fewer than two axes.

    Op type: `Svd`. Source: the Array API standard.

    >>> u, s, vh = rg.linalg.svd(rg.ones((3, 2)), full_matrices=False)
    >>> u.shape, s.shape, vh.shape
    ((3, 2), (2,), (2, 2))
    """
    return SVDResult(*spectral.svd(x, full_matrices=full_matrices))


class LstsqResult(NamedTuple):
    """A least-squares solution and its quality.

    Args:
        solution: The shortest y that minimizes the length of `a @ y - b`.
        residuals: The squared length of `a @ y - b` for each column.
        rank: The rank of a.
        singular_values: The singular values of a.

    >>> import regrad as rg
    >>> rg.linalg.lstsq(rg.tensor([[1.0], [1.0]]), [1.0, 3.0]).rank
    Tensor(1, dtype=int64)
    """

    solution: Tensor
    residuals: Tensor
    rank: Tensor
    singular_values: Tensor


@deferrable
def lstsq(a: TensorLike, b: TensorLike, /, *, rcond: float | None = None) -> LstsqResult:
    """Return the shortest y that minimizes the length of `a @ y - b`.

    Args:
        a: Matrices of shape (…, m, n). They may be tall or wide, and rows may be dependent.
        b: Matrices of columns, (…, m, k), or a vector of size m.
        rcond: Singular values of a up to `rcond` times the largest are treated as 0. The default is
            the larger of m and n, times the dtype's epsilon.

    Returns the `solution`, (…, n, k) or (…, n); the `residuals`, (…, k) or (…, 1), which are the
    squared length of `a @ y - b` for each column; the `rank` of a; and its `singular_values`. The
    residuals are computed for any a, like in JAX. (NumPy omits them unless a has full rank and
    more rows than columns.) The gradient of the solution is valid where the rank does not change.

    Raises ShapeError if a does not consist of matrices, or b has a different number of rows.

    A composition of `MatrixPseudoInverse`, `MatMul` and `SingularValues`.
    Source: `numpy.linalg.lstsq`.

    >>> import regrad as rg
    >>> line = rg.linalg.lstsq(rg.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]]), [1.0, 3.0, 5.0])
    >>> [round(v, 5) for v in line.solution.tolist()]
    [1.0, 2.0]
    """
    a, b = dispatch.lift(a), dispatch.lift(b)
    rows = b.shape[-1 if b.ndim == 1 else -2] if b.ndim else None
    if a.ndim < 2 or a.shape[-2] != rows:
        raise ShapeError(
            "lstsq: expected matrices, and the same number of rows in b (or a vector of rank 1), "
            f"got {a.shape} and {b.shape}"
        )
    columns = expand_dims(b, 1) if b.ndim == 1 else b
    y = matmul(pinv(a, rtol=rcond), columns)
    residuals = reduction.sum(reduction._squared_size(matmul(a, y) - columns), axis=-2)
    solution = reshape(y, y.shape[:-1]) if b.ndim == 1 else y
    return LstsqResult(solution, residuals, matrix_rank(a, rtol=rcond), svdvals(a))


# -- norms and powers ----------------------------------------------------------------------------


@deferrable
def matrix_norm(
    x: TensorLike, /, *, keepdims: bool = False, ord: float | Literal["fro", "nuc"] | None = "fro"
) -> Tensor:
    """Return a norm of matrices.

    Args:
        x: Matrices over the last two axes.
        ord: "fro" (the root of the sum of squares), "nuc" (the sum of the singular values), 1 or -1
            (the largest or smallest absolute column sum), inf or -inf (the largest or smallest
            absolute row sum), 2 or -2 (the largest or smallest singular value).

    Returns:
        A real Tensor of x's shape without the last two axes.

    Raises:
        ShapeError: x has fewer than two axes.
        ArgumentError: `ord` is unknown.

    A composition. Source: the Array API standard.

    >>> rg.linalg.matrix_norm([[3.0, 0.0], [0.0, 4.0]])
    Tensor(5., dtype=float32)
    """
    x = dispatch.lift(x)
    if x.ndim < 2:
        raise ShapeError(f"matrix_norm takes matrices (over the last two axes), got {x.shape}")
    if ord in ("fro", None):
        return reduction.vector_norm(x, axis=(-2, -1), keepdims=keepdims)
    extreme = reduction.min if ord in (-1, -2, -math.inf) else reduction.max
    if ord in (1, -1, math.inf, -math.inf):
        axis = -2 if abs(ord) == 1 else -1
        y = extreme(reduction.sum(elementwise_abs(x), axis=axis, keepdims=True), axis=(-2, -1))
    elif ord in ("nuc", 2, -2):
        y = (reduction.sum if ord == "nuc" else extreme)(svdvals(x), axis=-1)
    else:
        raise ArgumentError(
            f"matrix_norm: ord must be 'fro', 'nuc', 1, -1, 2, -2, inf or -inf, got {ord!r}"
        )
    return expand_dims(y, (-2, -1)) if keepdims else y


@deferrable
def matrix_power(x: TensorLike, n: int, /) -> Tensor:
    """Return the n-th power of square matrices; of their inverses, if n is negative.

    Args:
        n: The exponent, an int. 0 returns identity matrices.

    Returns:
        A Tensor of x's shape and dtype.

    Raises:
        ShapeError: the matrices are not square.
        ArgumentError: `n` is not an int.

    A composition of `MatMul`. Source: the Array API standard.

    >>> rg.linalg.matrix_power([[2.0, 0.0], [0.0, 3.0]], 2).tolist()
    [[4.0, 0.0], [0.0, 9.0]]
    """
    x = dispatch.lift(x)
    if x.ndim < 2 or x.shape[-1] != x.shape[-2]:
        raise ShapeError(f"matrix_power expects square matrices, got {x.shape}")
    if not isinstance(n, int):
        raise ArgumentError(f"matrix_power: the exponent must be an int, got {n!r}")
    if n < 0:
        x, n = inv(x), -n
    y = None
    while n:  # square and multiply
        y = (x if y is None else matmul(y, x)) if n % 2 else y
        x, n = matmul(x, x) if n > 1 else x, n // 2
    return diag(ones_like(diagonal(x))) if y is None else y


_hint_in(__name__)
