"""Matrix products and linear algebra: `tf.matmul`, `tf.matrix_inverse`, … and `tf.linalg`.

The last two axes of a tensor are matrices. Earlier axes are batch axes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

import regrad as rg
from regrad.core.op import TensorLike
from regrad.errors import GraphError, ShapeError
from regrad.graph.deferred import deferrable
from regrad.v1.functions.math import cast
from regrad.v1.graph.conversion import as_sizes
from regrad.v1.graph.forms import axes_of, dtype_of, one_op, rank_of, scope, tensor
from regrad.v1.graph.kinds import INEXACT, NUMBERS
from regrad.v1.graph.rows import define, listed, row, written
from regrad.v1.graph.tensors import is_tensor

# -- products --------------------------------------------------------------------------------------


@row("tf", "MatMul", kinds=NUMBERS, a_is_sparse=None, b_is_sparse=None)
def matmul(
    a, b, transpose_a=False, transpose_b=False, adjoint_a=False, adjoint_b=False,
    a_is_sparse=False, b_is_sparse=False, name=None,
):  # fmt: skip
    """Return the product of matrices, optionally transposed first.

    Batch axes broadcast. (TensorFlow 1 requires equal batch axes.)

    Args:
        a: A tensor or array of numbers, of rank 2 or more.
        b: A tensor or array of the same dtype, of rank 2 or more.
        transpose_a: Transpose `a` first.
        transpose_b: Transpose `b` first.
        adjoint_a: Transpose and conjugate `a` first.
        adjoint_b: Transpose and conjugate `b` first.

    Returns:
        A tensor of the arguments' dtype.

    Raises:
        ShapeError: an argument is a vector, or the sizes do not fit.
        GraphError: transpose and adjoint are both true for one matrix.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.matmul([[1.0, 2.0]], [[3.0, 4.0]], transpose_b=True)))
    [[11.]]
    """
    for which, both in ("a", transpose_a and adjoint_a), ("b", transpose_b and adjoint_b):
        if both:
            raise GraphError(f"Only one of transpose_{which} and adjoint_{which} can be True.")
    _check_matrices("matmul", a, b)
    a, b = rg.conj(a) if adjoint_a else a, rg.conj(b) if adjoint_b else b
    product = rg.find_op("MatMul").function
    return product(a, b, transpose_a or adjoint_a, transpose_b or adjoint_b)


def _check_matrices(name: str, *xs: TensorLike) -> None:
    """Raise ShapeError for vectors, which TensorFlow's functions do not accept."""
    for x in xs:
        if is_tensor(x) and rank_of(x) in (0, 1):
            raise ShapeError(
                f"{name}: Shape must be at least rank 2, got {x.shape}. For vectors use "
                "tf.tensordot, or tf.expand_dims first."
            )


def _axes(axes: TensorLike) -> Any:
    axes = axes_of(axes, "axes")
    return axes if isinstance(axes, int) else [(a,) if isinstance(a, int) else a for a in axes]


@row("tf", None, rg.tensordot, NUMBERS, scope="Tensordot", axes=_axes)
def tensordot(a, b, axes):
    """Return the contraction of two tensors over axes of both.

    Args:
        axes: The number of last axes of a and first axes of b, or a pair of lists of axes.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.tensordot(rg.asarray([1.0, 2.0]), rg.asarray([3.0, 4.0]), axes=1)
    Tensor(11., dtype=float32)
    """


@written("tf", "Einsum: * | N T equation")
def einsum(equation: str, *inputs: TensorLike, name: str | None = None) -> Any:
    """Return an Einstein sum: the product of tensors, summed over the axes not in the result.

    Args:
        equation: The axes of each tensor and of the result, as in `"ij,jk->ik"`.
        *inputs: Tensors or arrays of numbers, of one dtype.

    Returns:
        A tensor of the arguments' dtype.

    Raises:
        ShapeError: the tensors do not fit the equation.

    Op type: `Einsum`. Source: `tf.einsum`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.einsum("i,i->", [1.0, 2.0], [3.0, 4.0])))
    11.0
    """
    return one_op("Einsum", name or "einsum", lambda *xs: rg.einsum(equation, *xs), *inputs)


@row("tf", "Cross: * | T", lambda a, b: rg.find_op("Cross").function(a, b, axis=-1), NUMBERS)
def cross(a, b):
    """Return the cross product of vectors of three elements along the last axis.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.cross(rg.asarray([1, 0, 0]), rg.asarray([0, 1, 0]))
    Tensor([0, 0, 1], dtype=int64)
    """


# -- diagonals and triangles -----------------------------------------------------------------------


def matrix_transpose(a: TensorLike, name: str = "matrix_transpose", conjugate: bool = False) -> Any:
    """Return the tensor with its last two axes swapped.

    Args:
        a: A tensor or array of rank 2 or more.
        conjugate: Conjugate the elements too.

    Returns:
        A tensor of the same dtype.

    Raises:
        ShapeError: the rank is less than 2.

    Op type: `Transpose`. Source: `tf.matrix_transpose`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.matrix_transpose([[1, 2], [3, 4]])))
    [[1 3]
     [2 4]]
    """
    return one_op("Transpose", name, _adjoint if conjugate else rg.matrix_transpose, a)


def adjoint(matrix: TensorLike, name: str | None = None) -> Any:
    """Return the complex conjugate of the transpose.

    Args:
        matrix: A tensor or array of rank 2 or more.

    Returns:
        A tensor of the same dtype.

    Op type: `Transpose`. Source: `tf.linalg.adjoint`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.linalg.adjoint([[1.0, 2.0]])).tolist())
    [[1.0], [2.0]]
    """
    return matrix_transpose(matrix, name or "adjoint", conjugate=True)


def _adjoint(x: rg.Tensor) -> Any:
    return rg.conj(rg.matrix_transpose(x))


@row("tf", "MatrixDiag: * | T", rg.linalg.diag)
def matrix_diag(diagonal):
    """Return matrices with the input on the diagonal and zeros elsewhere.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.matrix_diag(rg.asarray([1, 2]))
    Tensor([[1, 0],
            [0, 2]], dtype=int64)
    """


diag = matrix_diag


@row("tf", "MatrixDiagPart: * | T", rg.linalg.diagonal)
def matrix_diag_part(input):
    """Return the diagonals of matrices.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.matrix_diag_part(rg.asarray([[1, 2], [3, 4]]))
    Tensor([1, 4], dtype=int64)
    """


diag_part = matrix_diag_part


@row("tf", None, scope="MatrixSetDiag", deferred=True)
def matrix_set_diag(input: rg.Tensor, diagonal: rg.Tensor) -> rg.Tensor:
    """Return matrices with their diagonals replaced.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.matrix_set_diag(rg.asarray([[1, 2], [3, 4]]), rg.asarray([5, 6]))
    Tensor([[5, 2],
            [3, 6]], dtype=int64)
    """
    shape: Any = input.shape[-2:]
    on = rg.linalg.diag(rg.ones_like(diagonal, dtype=np.bool_), shape=shape)
    return rg.where(on, rg.linalg.diag(diagonal, shape=shape), input)


set_diag = matrix_set_diag


@row("tf.linalg", "MatrixDiag", scope="Diag", deferred=True)
def tensor_diag(diagonal: rg.Tensor) -> rg.Tensor:
    """Return a tensor of twice the rank with the values on its diagonal and zeros elsewhere.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.linalg.tensor_diag(rg.asarray([1, 2]))
    Tensor([[1, 0],
            [0, 2]], dtype=int64)
    """
    return rg.reshape(rg.linalg.diag(rg.reshape(diagonal, (-1,))), 2 * diagonal.shape)


@row("tf.linalg", "MatrixDiagPart", scope="DiagPart", deferred=True)
def tensor_diag_part(input: rg.Tensor) -> rg.Tensor:
    """Return the diagonal of a tensor of shape `s + s`. This is the inverse of `tf.diag`.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.linalg.tensor_diag_part(rg.asarray([[1, 2], [3, 4]]))
    Tensor([1, 4], dtype=int64)
    """
    half = input.shape[: input.ndim // 2]
    size = math.prod(half)
    return rg.reshape(rg.linalg.diagonal(rg.reshape(input, (size, size))), half)


@row("tf", None, scope="MatrixBandPart", num_lower=as_sizes, num_upper=as_sizes, deferred=True)
def matrix_band_part(input: rg.Tensor, num_lower: int, num_upper: int) -> rg.Tensor:
    """Return matrices with zeros outside a band of diagonals around the main one.

    Args:
        num_lower: The number of diagonals to keep below. A negative number keeps all.
        num_upper: The number of diagonals to keep above. A negative number keeps all.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.matrix_band_part(rg.asarray([[1, 2], [3, 4]]), num_lower=0, num_upper=-1)
    Tensor([[1, 2],
            [0, 4]], dtype=int64)
    """
    input = input if num_lower < 0 else rg.triu(input, k=-num_lower)
    return input if num_upper < 0 else rg.tril(input, k=num_upper)


band_part = matrix_band_part


def trace(x: TensorLike, name: str | None = None) -> Any:
    """Return the sums of the diagonals of matrices.

    Args:
        x: A tensor or array of numbers, of rank 2 or more.

    Returns:
        A tensor of x's dtype, without the last two axes.

    Raises:
        ShapeError: the rank is less than 2.

    Op type: `Sum`. Source: `tf.trace`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.trace([[1, 2], [3, 4]])))
    5
    """
    with scope(name or "trace", x):
        x = tensor(x)
        return cast(one_op("Sum", "Sum", rg.linalg.trace, x, kinds=NUMBERS), dtype_of(x))


# -- norms -----------------------------------------------------------------------------------------


@row("tf", None, kinds=INEXACT)
def norm(tensor, ord: Any = "euclidean", axis=None, keepdims=None, name=None, keep_dims=None):
    """Return the norm of vectors (of one axis or all elements) or matrices (of two axes).

    The gradient at 0 is 0.

    Args:
        tensor: A tensor or array of floats.
        ord: "euclidean" or "fro" (the root of the sum of squares), 1, 2, any positive number, or
            `np.inf`. For matrices, 1 and `np.inf` mean the largest sum of a column or a row, and
            2 means the largest singular value.
        axis: An axis, a pair of axes, or None for all elements.
        keepdims: Keep the reduced axes, with size 1.

    Returns:
        A tensor of the same dtype, of real floats.

    Raises:
        GraphError: the norm `ord` is not supported for these axes.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.norm([3.0, 4.0])))
    5.0
    """
    matrices = isinstance(axis, tuple) and len(axis) == 2
    if ord in ("euclidean", "fro"):
        ord = 2
    elif matrices and ord in (1, 2, np.inf):
        return _matrix_norm(tensor, axis, keepdims, ord)
    elif matrices or not isinstance(ord, int | float) or ord <= 0:
        raise GraphError(f"'ord' must be a supported norm, got {ord!r} for axis={axis}")
    return rg.linalg.vector_norm(tensor, axis=axis, keepdims=bool(keepdims), ord=ord)


@deferrable
def _matrix_norm(x: rg.Tensor, axis: Any, keepdims: Any, ord: Any) -> rg.Tensor:
    axes = tuple([a % x.ndim for a in axis])
    y = rg.linalg.matrix_norm(rg.moveaxis(x, axes, (-2, -1)), ord=ord)
    return rg.expand_dims(y, axes) if keepdims else y


# -- determinants, inverses, solvers ---------------------------------------------------------------


@row("tf", "MatrixDeterminant", rg.linalg.det, INEXACT)
def matrix_determinant(input):
    """Return the determinant of square matrices.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.matrix_determinant(rg.asarray([[1.0, 2.0], [3.0, 4.0]]))
    Tensor(-2., dtype=float32)
    """


det = matrix_determinant


class SignAndLog(NamedTuple):
    """The sign (or phase) of a determinant, and the logarithm of its absolute value.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.linalg.slogdet(rg.asarray([[-1.0, 0.0], [0.0, 1.0]])).sign.item()
    -1.0
    """

    sign: Any
    log_abs_determinant: Any


def _slogdet(x: rg.Tensor) -> SignAndLog:
    """Return the signs of the determinants, and the logarithms of their absolute values.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> sign, log = tf.linalg.slogdet(rg.asarray([[-1.0, 0.0], [0.0, 1.0]]))
    >>> sign.item(), log.item()
    (-1.0, 0.0)
    """
    return SignAndLog(*rg.linalg.slogdet(x))


def _triangular_solve(a: rg.Tensor, b: rg.Tensor, lower: bool, adjoint: bool) -> rg.Tensor:
    """Return the y with `matrix @ y = rhs`, reading only one triangle of the matrix."""
    _check_matrices("matrix_triangular_solve", a, b)
    a, op = rg.conj(a) if adjoint else a, rg.find_op("MatrixTriangularSolve")
    return op.function(a, b, lower=lower, transpose=adjoint)


slogdet = define("tf.linalg.slogdet(input)", "LogMatrixDeterminant", _slogdet, INEXACT)


@row("tf.linalg", None, kinds=INEXACT)
def logdet(matrix: rg.Tensor) -> rg.Tensor:
    """Return the logarithms of the determinants of positive definite matrices.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.linalg.logdet(rg.asarray([[2.0, 0.0], [0.0, 3.0]]))
    Tensor(1.7917595, dtype=float32)
    """
    return 2 * rg.sum(rg.log(rg.real(rg.linalg.diagonal(rg.linalg.cholesky(matrix)))), axis=-1)


@row("tf", "MatrixInverse: * | T adjoint=no", kinds=INEXACT, adjoint=bool)
def matrix_inverse(input: rg.Tensor, adjoint: bool = False) -> rg.Tensor:
    """Return the inverses of matrices, or of their adjoints.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.matrix_inverse(rg.asarray([[2.0, 0.0], [0.0, 4.0]]))
    Tensor([[0.5 , 0.  ],
            [0.  , 0.25]], dtype=float32)
    """
    return rg.linalg.inv(_adjoint(input) if adjoint else input)


inv = matrix_inverse


@row("tf.linalg", "MatrixExponential", rg.linalg.expm, INEXACT, scope="matrix_exponential")
def expm(input):
    """Return the exponential of square matrices, `I + x + x @ x / 2 + …`.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.linalg.expm(rg.asarray([[0.0, 1.0], [0.0, 0.0]]))
    Tensor([[1., 1.],
            [0., 1.]], dtype=float32)
    """


@row("tf", "MatrixSolve: * | T adjoint=transpose", kinds=INEXACT, adjoint=bool)
def matrix_solve(matrix: rg.Tensor, rhs: rg.Tensor, adjoint: bool = False) -> rg.Tensor:
    """Return the y with `matrix @ y = rhs`, or with the adjoint of the matrix.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.matrix_solve(rg.asarray([[2.0, 0.0], [0.0, 4.0]]), rg.asarray([[2.0], [8.0]]))
    Tensor([[1.],
            [2.]], dtype=float32)
    """
    _check_matrices("matrix_solve", matrix, rhs)
    matrix = rg.conj(matrix) if adjoint else matrix
    return rg.find_op("MatrixSolve").function(matrix, rhs, transpose=adjoint)


solve = matrix_solve


SOLVE = "MatrixTriangularSolve: * | T lower adjoint=transpose"


@row("tf", SOLVE, _triangular_solve, INEXACT, lower=bool, adjoint=bool)
def matrix_triangular_solve(matrix, rhs, lower=True, adjoint=False):
    """Return the y with `matrix @ y = rhs`, reading only one triangle of the matrix.

    Args:
        lower: Read the lower triangle, otherwise the upper one.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.matrix_triangular_solve(rg.asarray([[2.0, 0.0], [1.0, 1.0]]), rg.asarray([[2.0], [3.0]]))
    Tensor([[1.],
            [2.]], dtype=float32)
    """


triangular_solve = matrix_triangular_solve


@row("tf", "Cholesky", rg.linalg.cholesky, INEXACT)
def cholesky(input):
    """Return the lower triangular y with `y @ adjoint(y)` equal to a Hermitian matrix.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.cholesky(rg.asarray([[4.0, 0.0], [0.0, 9.0]]))
    Tensor([[2., 0.],
            [0., 3.]], dtype=float32)
    """


@row("tf", None, kinds=INEXACT)
def cholesky_solve(chol: rg.Tensor, rhs: rg.Tensor) -> rg.Tensor:
    """Return the y with `A @ y = rhs`, given the Cholesky factor of A.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.cholesky_solve(rg.asarray([[2.0, 0.0], [0.0, 1.0]]), rg.asarray([[4.0], [3.0]]))
    Tensor([[1.],
            [3.]], dtype=float32)
    """
    y = _triangular_solve(chol, rhs, lower=True, adjoint=False)
    return _triangular_solve(chol, y, lower=True, adjoint=True)


# -- decompositions --------------------------------------------------------------------------------


class Qr(NamedTuple):
    """A matrix with orthonormal columns, and an upper triangular matrix.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.qr(rg.asarray([[2.0, 0.0], [0.0, 1.0]])).r.shape
    (2, 2)
    """

    q: Any
    r: Any


def _qr(x: rg.Tensor, full_matrices: bool) -> Qr:
    """Return Q, with orthonormal columns, and an upper triangular R with `Q @ R = input`.

    Args:
        full_matrices: Complete the orthonormal columns to square matrices.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> x = rg.asarray([[3.0, 1.0], [4.0, 2.0]])
    >>> q, r = tf.qr(x)
    >>> (q @ r).numpy().round(4).tolist()
    [[3.0, 1.0], [4.0, 2.0]]
    """
    return Qr(*rg.linalg.qr(x, mode="complete" if full_matrices else "reduced"))


def _eigh(x: rg.Tensor) -> tuple[rg.Tensor, ...]:
    """Return the eigenvalues (ascending) and eigenvectors (columns) of Hermitian matrices.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> values, vectors = tf.self_adjoint_eig(rg.asarray([[2.0, 0.0], [0.0, 1.0]]))
    >>> values.tolist(), abs(vectors).tolist()
    ([1.0, 2.0], [[0.0, 1.0], [1.0, 0.0]])
    """
    return tuple(rg.linalg.eigh(x))


def _svd(x: rg.Tensor, full_matrices: bool) -> tuple[rg.Tensor, rg.Tensor, rg.Tensor]:
    u, s, vh = rg.linalg.svd(x, full_matrices=full_matrices)
    return s, u, _adjoint(vh)


@written("tf", "Svd: * | T compute_uv=yes full_matrices")
def svd(tensor, full_matrices=False, compute_uv=True, name=None):
    """Return the singular values (descending) and the left and right singular vectors (columns).

    Args:
        tensor: A tensor or array of floats, of rank 2 or more.
        full_matrices: Complete the orthonormal columns to square matrices.
        compute_uv: Whether to return the vectors too.

    Returns:
        The tuple `(s, u, v)`, or s alone without `compute_uv`. The singular values s are real.
        The vectors u and v have the dtype of the tensor.

    Raises:
        ShapeError: the rank is less than 2.

    Op types: `Svd`, `SingularValues`. Source: `tf.svd`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.svd([[0.0, 2.0], [1.0, 0.0]], compute_uv=False)))
    [2. 1.]
    """
    if not compute_uv:
        return one_op("SingularValues", name or "Svd", rg.linalg.svdvals, tensor, kinds=INEXACT)
    return one_op("Svd", name, _svd, tensor, kinds=INEXACT, full_matrices=bool(full_matrices))


QR, EIGH = "Qr: * | T full_matrices=is_complete", "SelfAdjointEigV2: * | T compute_v=yes"
qr = define("tf.qr(input, full_matrices=False)", QR, _qr, INEXACT)
self_adjoint_eig = eigh = define("tf.self_adjoint_eig(tensor)", EIGH, _eigh, INEXACT)


@row("tf", "SelfAdjointEigvals", rg.linalg.eigvalsh, INEXACT)
def self_adjoint_eigvals(tensor):
    """Return the eigenvalues of Hermitian matrices, in ascending order (see `eigh`).

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.self_adjoint_eigvals(rg.asarray([[2.0, 0.0], [0.0, 1.0]]))
    Tensor([1., 2.], dtype=float32)
    """


eigvalsh = self_adjoint_eigvals
__all__ = listed(__name__, "matrix_transpose trace")
