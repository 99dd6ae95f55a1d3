"""Products of matrices and linear algebra: `tf.matmul`, `tf.matrix_inverse`, … and `tf.linalg`.

Matrices lie in the last two axes; earlier axes are a stack of them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

import regrad as rg
from regrad.deferral import deferrable
from regrad.errors import GraphError, ShapeError
from regrad.tensors import Tensor
from regrad.v1.creation import eye as eye
from regrad.v1.forms import (
    INEXACT,
    NUMBERS,
    as_sizes,
    axes_of,
    dtype_of,
    one_op,
    rank_of,
    renamed,
    scope,
    tensor,
)
from regrad.v1.math import cast
from regrad.v1.tensors import is_tensor

__all__ = [
    "cholesky", "cholesky_solve", "cross", "einsum", "matmul", "matrix_band_part",
    "matrix_determinant", "matrix_diag", "matrix_diag_part", "matrix_inverse", "matrix_set_diag",
    "matrix_solve", "matrix_transpose", "matrix_triangular_solve", "norm", "qr", "self_adjoint_eig",
    "self_adjoint_eigvals", "svd", "tensordot", "trace",
]  # fmt: skip

# -- products --------------------------------------------------------------------------------------


def matmul(
    a: Any,
    b: Any,
    transpose_a: bool = False,
    transpose_b: bool = False,
    adjoint_a: bool = False,
    adjoint_b: bool = False,
    a_is_sparse: bool = False,
    b_is_sparse: bool = False,
    name: str | None = None,
) -> Any:
    """The product of matrices, which may be transposed first; `adjoint_*` conjugates as well.

    Stacks of matrices broadcast (TensorFlow 1 wants them equal). Raises ValueError for vectors.

    Op type: `MatMul`. Source: `tf.matmul`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.matmul([[1.0, 2.0]], [[3.0, 4.0]], transpose_b=True)))
    [[11.]]
    """
    for which, both in ("a", transpose_a and adjoint_a), ("b", transpose_b and adjoint_b):
        if both:
            raise GraphError(f"Only one of transpose_{which} and adjoint_{which} can be True.")
    attrs = {
        "transpose_a": transpose_a or adjoint_a, "transpose_b": transpose_b or adjoint_b,
        "conjugate_a": adjoint_a, "conjugate_b": adjoint_b,
    }  # fmt: skip
    return one_op("MatMul", name or "MatMul", _product, a, b, kinds=NUMBERS, **attrs)


def _product(
    a: Any, b: Any, transpose_a: bool, transpose_b: bool, conjugate_a: bool, conjugate_b: bool
) -> Any:
    _check_matrices("matmul", a, b)
    a, b = rg.conj(a) if conjugate_a else a, rg.conj(b) if conjugate_b else b
    return rg.find_op("MatMul").function(a, b, transpose_a, transpose_b)


def _check_matrices(name: str, *xs: Any) -> None:
    """Refuse vectors, where regrad's functions take them and TensorFlow's do not."""
    for x in xs:
        if is_tensor(x) and rank_of(x) in (0, 1):
            raise ShapeError(
                f"{name}: Shape must be at least rank 2, got {x.shape}. For vectors use "
                "tf.tensordot, or tf.expand_dims first."
            )


def tensordot(a: Any, b: Any, axes: Any, name: str | None = None) -> Any:
    """The sum of products over `axes`: the last of a with the first of b, or two lists of axes."""
    axes = axes_of(axes, "axes")
    if not isinstance(axes, int):
        axes = tuple([(axis,) if isinstance(axis, int) else axis for axis in axes])
    return one_op(None, name or "Tensordot", rg.tensordot, a, b, kinds=NUMBERS, axes=axes)


def einsum(equation: str, *inputs: Any, name: str | None = None) -> Any:
    """Einstein's sum: products of tensors, their axes named by letters, summed over the rest."""
    return one_op("Einsum", name or "einsum", _einsum, *inputs, equation=equation)


def _einsum(*xs: Any, equation: str) -> Any:
    return rg.einsum(equation, *xs)


def cross(a: Any, b: Any, name: str | None = None) -> Any:
    """The cross product of vectors of three elements along the last axis."""
    function, name = rg.find_op("Cross").function, name or "Cross"
    return one_op("Cross", name, function, a, b, kinds=NUMBERS, axis=-1)


# -- diagonals and triangles -----------------------------------------------------------------------


def matrix_transpose(a: Any, name: str = "matrix_transpose", conjugate: bool = False) -> Any:
    """The tensor with its last two axes exchanged; `conjugate` takes the conjugate as well."""
    return one_op("Transpose", name, _adjoint if conjugate else rg.matrix_transpose, a)


def adjoint(matrix: Any, name: str | None = None) -> Any:
    """The complex conjugate of the transpose."""
    return matrix_transpose(matrix, name or "adjoint", conjugate=True)


def _adjoint(x: Any) -> Any:
    return rg.conj(rg.matrix_transpose(x))


def matrix_diag(diagonal: Any, name: str | None = None) -> Any:
    """Matrices with the vectors of the last axis on their diagonals."""
    return one_op("MatrixDiag", name or "MatrixDiag", rg.linalg.diag, diagonal)


def matrix_diag_part(input: Any, name: str | None = None) -> Any:
    """The diagonals of matrices."""
    return one_op("MatrixDiagPart", name or "MatrixDiagPart", rg.linalg.diagonal, input)


def matrix_set_diag(input: Any, diagonal: Any, name: str | None = None) -> Any:
    """Matrices with other diagonals. A composition."""
    return one_op(None, name or "MatrixSetDiag", _with_diagonal, input, diagonal)


@deferrable
def _with_diagonal(x: Any, diagonal: Any) -> Tensor:
    shape = x.shape[-2:]
    on = rg.linalg.diag(rg.ones_like(diagonal, dtype=np.bool_), shape=shape)
    return rg.where(on, rg.linalg.diag(diagonal, shape=shape), x)


def tensor_diag(diagonal: Any, name: str | None = None) -> Any:
    """A tensor of twice the rank, with the values on its diagonal and zeros elsewhere.

    Source: `tf.diag`.
    """
    return one_op("MatrixDiag", name or "Diag", _on_diagonal, diagonal)


@deferrable
def _on_diagonal(x: Any) -> Tensor:
    return rg.reshape(rg.linalg.diag(rg.reshape(x, (-1,))), (*x.shape, *x.shape))


def tensor_diag_part(input: Any, name: str | None = None) -> Any:
    """The diagonal of a tensor of shape `s + s`: the inverse of `tf.diag`.

    Source: `tf.diag_part`.
    """
    return one_op("MatrixDiagPart", name or "DiagPart", _diagonal_of, input)


@deferrable
def _diagonal_of(x: Any) -> Tensor:
    half = x.shape[: x.ndim // 2]
    size = math.prod(half)
    return rg.reshape(rg.linalg.diagonal(rg.reshape(x, (size, size))), half)


def matrix_band_part(input: Any, num_lower: Any, num_upper: Any, name: str | None = None) -> Any:
    """Matrices with zeros outside a band of so many diagonals below and above the main one.

    A negative number keeps all of them.
    """
    attrs = {"lower": as_sizes(num_lower), "upper": as_sizes(num_upper)}
    return one_op(None, name or "MatrixBandPart", _band, input, **attrs)


@deferrable
def _band(x: Any, lower: int, upper: int) -> Tensor:
    x = x if lower < 0 else rg.triu(x, k=-lower)
    return x if upper < 0 else rg.tril(x, k=upper)


def trace(x: Any, name: str | None = None) -> Any:
    """The sums of the diagonals of matrices."""
    with scope(name or "trace", x):
        x = tensor(x)
        return cast(one_op("Sum", "Sum", rg.linalg.trace, x, kinds=NUMBERS), dtype_of(x))


# -- norms -----------------------------------------------------------------------------------------


def norm(
    tensor: Any,
    ord: Any = "euclidean",
    axis: Any = None,
    keepdims: bool | None = None,
    name: str | None = None,
    keep_dims: bool | None = None,
) -> Any:
    """The norm of vectors (along one axis, or of all elements) or of matrices (along two axes).

    `ord` is "euclidean" or "fro" (the root of the sum of squares), 1, 2, any positive number or
    `np.inf`; for matrices 1 and `np.inf` are the largest sum of a column or a row, 2 the largest
    singular value. The gradient at 0 is 0. A composition.
    """
    axis, keep = axes_of(axis), bool(renamed("keepdims", keepdims, "keep_dims", keep_dims))
    matrices = isinstance(axis, tuple) and len(axis) == 2
    if ord in ("euclidean", "fro"):
        function, ord = rg.linalg.vector_norm, 2
    elif matrices and ord in (1, 2, np.inf):
        function = _matrix_norm
    elif matrices or not isinstance(ord, int | float) or ord <= 0:
        raise GraphError(f"'ord' must be a supported norm, got {ord!r} for axis={axis}")
    else:
        function = rg.linalg.vector_norm
    attrs = {"axis": axis, "keepdims": keep, "ord": ord}
    return one_op(None, name or "norm", function, tensor, kinds=INEXACT, **attrs)


@deferrable
def _matrix_norm(x: Any, axis: tuple[int, int], keepdims: bool, ord: float) -> Tensor:
    axes = tuple([a % x.ndim for a in axis])
    y = rg.linalg.matrix_norm(rg.moveaxis(x, axes, (-2, -1)), ord=ord)
    return rg.expand_dims(y, axes) if keepdims else y


# -- determinants, inverses, solvers ---------------------------------------------------------------


def matrix_determinant(input: Any, name: str | None = None) -> Any:
    """The determinants of matrices."""
    name = name or "MatrixDeterminant"
    return one_op("MatrixDeterminant", name, rg.linalg.det, input, kinds=INEXACT)


class SignAndLog(NamedTuple):
    """The sign of a determinant (or its phase) and the logarithm of its size."""

    sign: Any
    log_abs_determinant: Any


def slogdet(input: Any, name: str | None = None) -> SignAndLog:
    """The signs of the determinants, and the logarithms of their sizes."""
    name = name or "LogMatrixDeterminant"
    return SignAndLog(
        *one_op("LogMatrixDeterminant", name, rg.linalg.slogdet, input, kinds=INEXACT)
    )


def logdet(matrix: Any, name: str | None = None) -> Any:
    """The logarithms of the determinants of positive definite matrices."""
    return one_op(None, name or "logdet", _logdet, matrix, kinds=INEXACT)


def _logdet(x: Any) -> Any:
    return 2 * rg.sum(rg.log(rg.real(rg.linalg.diagonal(rg.linalg.cholesky(x)))), axis=-1)


def matrix_inverse(input: Any, adjoint: bool = False, name: str | None = None) -> Any:
    """The inverses of matrices (of their adjoints)."""
    name, of_adjoint = name or "MatrixInverse", bool(adjoint)
    return one_op("MatrixInverse", name, _inverse, input, kinds=INEXACT, adjoint=of_adjoint)


def _inverse(x: Any, adjoint: bool) -> Any:
    return rg.linalg.inv(_adjoint(x) if adjoint else x)


def matrix_solve(matrix: Any, rhs: Any, adjoint: bool = False, name: str | None = None) -> Any:
    """The y with `matrix @ y = rhs` (or with the adjoint on the left)."""
    attrs = {"kinds": INEXACT, "adjoint": bool(adjoint)}
    return one_op("MatrixSolve", name or "MatrixSolve", _solution, matrix, rhs, **attrs)


def _solution(a: Any, b: Any, adjoint: bool) -> Any:
    _check_matrices("matrix_solve", a, b)
    a = rg.conj(a) if adjoint else a
    return rg.find_op("MatrixSolve").function(a, b, transpose=adjoint)


def matrix_triangular_solve(
    matrix: Any, rhs: Any, lower: bool = True, adjoint: bool = False, name: str | None = None
) -> Any:
    """As `tf.matrix_solve`; only one triangle of the matrix is read."""
    attrs: Any = {"kinds": INEXACT, "lower": bool(lower), "adjoint": bool(adjoint)}
    name = name or "MatrixTriangularSolve"
    return one_op("MatrixTriangularSolve", name, _triangular_solution, matrix, rhs, **attrs)


def _triangular_solution(a: Any, b: Any, lower: bool, adjoint: bool) -> Any:
    _check_matrices("matrix_triangular_solve", a, b)
    a, op = rg.conj(a) if adjoint else a, rg.find_op("MatrixTriangularSolve")
    return op.function(a, b, lower=lower, transpose=adjoint)


def cholesky(input: Any, name: str | None = None) -> Any:
    """The lower triangular y with `y @ adjoint(y)` equal to the (symmetric) matrix."""
    return one_op("Cholesky", name or "Cholesky", rg.linalg.cholesky, input, kinds=INEXACT)


def cholesky_solve(chol: Any, rhs: Any, name: str | None = None) -> Any:
    """The y with `A @ y = rhs`, given the Cholesky factor of A. A composition."""
    return one_op(None, name or "cholesky_solve", _two_solutions, chol, rhs, kinds=INEXACT)


def _two_solutions(factor: Any, b: Any) -> Any:
    y = _triangular_solution(factor, b, lower=True, adjoint=False)
    return _triangular_solution(factor, y, lower=True, adjoint=True)


# -- decompositions --------------------------------------------------------------------------------


class Qr(NamedTuple):
    """Orthonormal columns and an upper triangle."""

    q: Any
    r: Any


def qr(input: Any, full_matrices: bool = False, name: str | None = None) -> Qr:
    """Q with orthonormal columns and an upper triangular R, with `Q @ R` equal to the input."""
    attrs: Any = {"kinds": INEXACT, "mode": "complete" if full_matrices else "reduced"}
    return Qr(*one_op("Qr", name or "Qr", rg.linalg.qr, input, **attrs))


def svd(
    tensor: Any, full_matrices: bool = False, compute_uv: bool = True, name: str | None = None
) -> Any:
    """Singular values (descending), left and right vectors, both as columns: `(s, u, v)`.

    Without `compute_uv` the values alone.
    """
    if not compute_uv:
        return one_op("SingularValues", name or "Svd", rg.linalg.svdvals, tensor, kinds=INEXACT)
    attrs = {"kinds": INEXACT, "full_matrices": bool(full_matrices)}
    return one_op("Svd", name or "Svd", _svd, tensor, **attrs)


def _svd(x: Any, full_matrices: bool) -> Any:
    u, s, vh = rg.linalg.svd(x, full_matrices=full_matrices)
    return s, u, _adjoint(vh)


def self_adjoint_eig(tensor: Any, name: str | None = None) -> tuple[Any, Any]:
    """Eigenvalues (ascending) and eigenvectors, as columns, of symmetric matrices."""
    name = name or "SelfAdjointEigV2"
    values, vectors = one_op("SelfAdjointEigV2", name, rg.linalg.eigh, tensor, kinds=INEXACT)
    return values, vectors


def self_adjoint_eigvals(tensor: Any, name: str | None = None) -> Any:
    """The eigenvalues, in ascending order, of symmetric matrices."""
    name = name or "SelfAdjointEigvals"
    return one_op("SelfAdjointEigvals", name, rg.linalg.eigvalsh, tensor, kinds=INEXACT)


# -- the names in tf.linalg ------------------------------------------------------------------------

band_part = matrix_band_part
det = matrix_determinant
diag = matrix_diag
diag_part = matrix_diag_part
eigh = self_adjoint_eig
eigvalsh = self_adjoint_eigvals
inv = matrix_inverse
set_diag = matrix_set_diag
solve = matrix_solve
triangular_solve = matrix_triangular_solve
