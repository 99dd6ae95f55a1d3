"""Eigenvalues and singular values, with and without vectors.

Let w be the eigenvalues of x. The gradient of f(w) is `V @ diag(a) @ adjoint(V)` with a = df/dw.
As x changes, V rotates, and the entry (i, j) changes by `(a_j - a_i) / (w_j - w_i)`. For equal
eigenvalues the quotient is 0/0, and its limit depends on how a changes with w, which is unknown to
the op. The limit is 0 if a does not change at all, and it is not needed where the direction does
not mix the two eigenvectors. In all other cases the second derivative is NaN here. For singular
values there is a second quotient, `(a_i + a_j) / (s_i + s_j)`, which is 0/0 where both are 0.
Source: Lewis and Sendov (2001), "Twice differentiable spectral functions", and (2005),
"Nonsmooth analysis of singular values".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from regrad.core import backends
from regrad.core.op import TensorLike, entwined, op
from regrad.core.registry import gradient
from regrad.core.tensor import Tensor
from regrad.errors import GradientError
from regrad.ops.array import diag, diagonal, expand_dims
from regrad.ops.binary import logical_and, where
from regrad.ops.casting import astype, conj, imag, real
from regrad.ops.creation_like import ones_like
from regrad.ops.decompositions import _adjoint, _hermitian, _quotient, _symmetrized
from regrad.ops.elementwise import abs
from regrad.ops.matmul import matmul
from regrad.ops.reduction import sum

# -- eigenvalues -----------------------------------------------------------------------------------


@op("SelfAdjointEigV2", to_float=True, holomorphic=False)
def eigh(xp, x: TensorLike, /) -> tuple[Tensor, Tensor]:
    """Return eigenvalues (ascending) and eigenvectors of the Hermitian part of x."""
    return tuple(xp.linalg.eigh(_symmetrized(xp, x)))


@gradient("SelfAdjointEigV2")
def _(dy, x, y):
    (w, v), (dw, dv) = y, dy
    turn = _turn(matmul(conj(v), dv, True))
    inner = _quotient(0.5 * turn, _as_known(_gaps(w), w) + diag(ones_like(w)))
    dx = matmul(matmul(v, inner), conj(v), False, True)
    return _eigenvalues_grad(dw, v, x) + _hermitian(dx)


def _turn(x: Tensor) -> Tensor:
    """Return the part of a gradient that rotates vectors into each other, without the phases."""
    turn = x - _adjoint(x)
    return turn - diag(diagonal(turn)) if x.dtype.kind == "c" else turn


@op("SelfAdjointEigvals", to_float=True, holomorphic=False)
def eigvalsh(xp, x: TensorLike, /) -> Tensor:
    """Return the eigenvalues of Hermitian matrices, in ascending order (see `eigh`).

    Where eigenvalues coincide, second derivatives are NaN, unless they are determined by the
    computed eigenvectors.

    Returns:
        A real Tensor of shape `(..., n)` for x of shape `(..., n, n)`.

    Raises:
        ShapeError: the matrices are not square.

    Source: the Array API standard.

    >>> rg.linalg.eigvalsh([[3.0, 0.0], [0.0, 2.0]])
    Tensor([2., 3.], dtype=float32)
    """
    return xp.linalg.eigvalsh(_symmetrized(xp, x))


gradient("SelfAdjointEigvals")(lambda dy, x: _eigenvalues_grad(dy, eigh(x)[1], x))


# -- singular values -------------------------------------------------------------------------------


@op("Svd", to_float=True, holomorphic=False)
def svd(xp, x: TensorLike, /, *, full_matrices: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return left singular vectors, singular values (descending), and right singular vectors."""
    return tuple(xp.linalg.svd(x, full_matrices=full_matrices))


@gradient("Svd")
def _(dy, x, y):
    (u, s, vh), (du, ds, dvh) = y, dy
    m, k, n = u.shape[-2], s.shape[-1], vh.shape[-1]
    if max(u.shape[-1], vh.shape[-2]) > k:
        raise GradientError(
            f"svd with full_matrices=True of matrices of shape {(m, n)} has no gradient: the "
            "last vectors are arbitrary. Use full_matrices=False, or svdvals."
        )
    dx = _singular_values_grad(ds, u, vh, x) + matmul(matmul(u, _svd_inner(y, dy)), vh)
    known = _as_known(s, s)
    if m > k:
        rest = _quotient(du, expand_dims(known, -2))
        dx = dx + matmul(rest - matmul(u, matmul(conj(u), rest, True)), vh)
    if n > k:
        rest = _quotient(dvh, expand_dims(known, -1))
        dx = dx + matmul(u, rest - matmul(matmul(rest, conj(vh), False, True), vh))
    return dx


def _svd_inner(y: Sequence[Tensor], dy: Sequence[Tensor]) -> Tensor:
    """Return the part of the gradient within the span of the singular vectors."""
    (u, s, vh), (du, _, dvh) = y, dy
    by_u, by_v = matmul(conj(u), du, True), matmul(vh, conj(dvh), False, True)
    turn_u, turn_v, on_diagonal = _turn(by_u), _turn(by_v), diag(ones_like(s))
    inner = 0.5 * _quotient(turn_u + turn_v, _as_known(_gaps(s), s) + on_diagonal)
    inner = inner + 0.5 * _quotient(turn_u - turn_v, _as_known(_sums(s), s) + on_diagonal)
    if u.dtype.kind == "c":  # the phases of pairs of vectors
        inner = inner + diag(_quotient(1j * imag(diagonal(by_u)), _as_known(s, s)))
    return inner


@op("SingularValues", to_float=True, holomorphic=False)
def svdvals(xp, x: TensorLike, /) -> Tensor:
    """Return the singular values of matrices, in descending order (see `svd`).

    Where singular values coincide or are 0, second derivatives are NaN, unless they are determined
    by the computed singular vectors.

    Returns:
        A real Tensor of shape `(..., min(m, n))` for x of shape `(..., m, n)`.

    Raises:
        MatrixError: x has fewer than two axes.

    Source: the Array API standard.

    >>> rg.linalg.svdvals([[3.0, 0.0], [0.0, 4.0]])
    Tensor([4., 3.], dtype=float32)
    """
    return xp.linalg.svdvals(x)


@gradient("SingularValues")
def _(dy, x):
    u, _, vh = svd(x, full_matrices=False)
    return _singular_values_grad(dy, u, vh, x)


# -- gradients of eigenvalues and singular values --------------------------------------------------


@op("SelfAdjointEigvalsGrad", holomorphic=False)
def _eigenvalues_grad(xp, a: TensorLike, v: TensorLike, x: TensorLike, /) -> Tensor:
    """Return the matrix with the eigenvalues a and x's eigenvectors v."""
    vh = xp.matrix_transpose(v)
    return (v * a[..., None, :]) @ (xp.conj(vh) if backends.is_complex(v) else vh)


@op("SingularValuesGrad", holomorphic=False)
def _singular_values_grad(
    xp, a: TensorLike, u: TensorLike, vh: TensorLike, x: TensorLike, /
) -> Tensor:
    """Return the matrix with the singular values a and x's singular vectors u and vh."""
    return (u * a[..., None, :]) @ vh


@op("NanWhere", elementwise=True, promotes=("x",), holomorphic=False)
def _nan_where(xp, x: TensorLike, mask: TensorLike, /) -> Tensor:
    """Return NaN where the mask is set and x is not 0; 0 elsewhere. The dtype is real."""
    x = xp.abs(x)  # (real also for complex x)
    return xp.where(mask & (x != 0), xp.nan * xp.ones_like(x), xp.zeros_like(x))


@gradient("NanWhere", "x")
def _(dy, mask, x_dtype):
    return astype(_nan_where(dy, mask), backends.numpy_dtype(x_dtype))


# -- the second derivatives of functions of eigenvalues --------------------------------------------


def _eigvalsh_by_a(dy, x):
    _, v = eigh(x)
    return real(diagonal(_among(v, dy, v)))


def _eigvalsh_by_a_of_x(dy, x):
    w, v = eigh(x)
    seen = _hermitian(_among(v, dy, v))
    unknown = _nan_where(seen, _equal_pairs(w))
    return real(diagonal(seen)) + sum(unknown, axis=-1)


def _eigvalsh_by_x(dy, a, x):
    w, v = eigh(x)
    turn = _hermitian(_among(v, dy, v)) * _slopes(a, w)
    return _hermitian(matmul(matmul(v, turn), conj(v), False, True))


# -- the second derivatives of functions of singular values ----------------------------------------


def _svdvals_by_a(dy, x):
    u, _, vh = svd(x, full_matrices=False)
    return real(diagonal(_among(u, dy, _adjoint(vh))))


def _svdvals_by_a_of_x(dy, x):
    u, s, vh = svd(x, full_matrices=False)
    seen = _among(u, dy, _adjoint(vh))
    even, odd = _hermitian(seen), 0.5 * (seen - _adjoint(seen))
    vanish, pairs = _negligible(s, s), _negligible(_sums(s), s)
    if x.dtype.kind != "c":
        pairs = logical_and(pairs, diag(ones_like(s)) == 0)  # `odd` has no diagonal
    unknown = sum(_nan_where(even, _equal_pairs(s)) + _nan_where(odd, pairs), axis=-1)
    if u.shape[-2] > s.shape[-1]:
        lost = _nan_where(_beyond_u(dy, u, vh), expand_dims(vanish, -2))
        unknown = unknown + sum(lost, axis=-2)
    if vh.shape[-1] > s.shape[-1]:
        lost = _nan_where(_beyond_v(dy, u, vh), expand_dims(vanish, -1))
        unknown = unknown + sum(lost, axis=-1)
    return real(diagonal(seen)) + unknown


def _svdvals_by_x(dy, a, x):
    u, s, vh = svd(x, full_matrices=False)
    seen = _among(u, dy, _adjoint(vh))
    even, odd = _hermitian(seen), 0.5 * (seen - _adjoint(seen))
    sums = _as_known(_sums(s), s)
    if x.dtype.kind != "c":
        sums = sums + diag(ones_like(s))  # `odd` is 0 there
    turn = even * _slopes(a, s) + odd * _quotient(_sums(a), sums)
    dx = matmul(matmul(u, turn), vh)
    shares = _quotient(a, _as_known(s, s))
    if u.shape[-2] > s.shape[-1]:
        dx = dx + matmul(_beyond_u(dy, u, vh) * expand_dims(shares, -2), vh)
    if vh.shape[-1] > s.shape[-1]:
        dx = dx + matmul(u, _beyond_v(dy, u, vh) * expand_dims(shares, -1))
    return dx


def _beyond_u(x: Tensor, u: Tensor, vh: Tensor) -> Tensor:
    """Return the product of x with the right vectors, without the part along the left ones."""
    y = matmul(x, _adjoint(vh))
    return y - matmul(u, matmul(conj(u), y, True))


def _beyond_v(x: Tensor, u: Tensor, vh: Tensor) -> Tensor:
    """Return the product of the left vectors with x, without the part along the right ones."""
    y = matmul(conj(u), x, True)
    return y - matmul(matmul(y, _adjoint(vh)), vh)


# -- helpers ---------------------------------------------------------------------------------------


def _among(u: Tensor, x: Tensor, v: Tensor) -> Tensor:
    """Return a matrix in the basis of these vectors: `adjoint(u) @ x @ v`."""
    return matmul(matmul(conj(u), x, True), v)


def _equal_pairs(w: Tensor) -> Tensor:
    """Return where w_i equals w_j and i differs from j."""
    return logical_and(_negligible(_gaps(w), w), diag(ones_like(w)) == 0)


def _gaps(w: Tensor) -> Tensor:
    return expand_dims(w, -2) - expand_dims(w, -1)


def _sums(w: Tensor) -> Tensor:
    return expand_dims(w, -2) + expand_dims(w, -1)


def _negligible(x: Tensor, w: Tensor) -> Tensor:
    """Return where a difference of eigenvalues (or singular values) w is 0 up to rounding."""
    limit = 4 * float(np.finfo(w.dtype).eps) * sum(abs(w), axis=-1, keepdims=True)
    return abs(x) <= (limit if x.ndim == w.ndim else expand_dims(limit, -1))


def _as_known(b: Tensor, w: Tensor) -> Tensor:
    """Set a divisor to 0 where it is 0 up to rounding."""
    return where(_negligible(b, w), 0, b)


def _slopes(a: Tensor, w: Tensor) -> Tensor:
    """Return `(a_j - a_i) / (w_j - w_i)` at (i, j); 0 for 0 / 0 and on the diagonal."""
    return _quotient(_gaps(a), _as_known(_gaps(w), w) + diag(ones_like(w)))


def _by_vectors(dy):
    return None  # the gradient propagates only through x


entwined(
    "SelfAdjointEigvalsGrad", _eigvalsh_by_a, _by_vectors, _eigvalsh_by_x,
    together=_eigvalsh_by_a_of_x,
)  # fmt: skip
entwined(
    "SingularValuesGrad", _svdvals_by_a, _by_vectors, _by_vectors, _svdvals_by_x,
    together=_svdvals_by_a_of_x,
)  # fmt: skip
