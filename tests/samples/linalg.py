"""Samples of linear systems, determinants, decompositions and norms."""

from __future__ import annotations

import numpy as np
import scipy.linalg

import regrad as rg
from regrad import linalg
from regrad.ops import decompositions, spectral
from tests.samples import away, sample, spread

SQUARE = spread(3, 3, seed=3)
STACK = spread(2, 2, 2, seed=1) + 2.5 * np.eye(2)
SYMMETRIC = SQUARE + SQUARE.T
POSITIVE = SQUARE @ SQUARE.T + np.eye(3)
TALL, WIDE = spread(4, 2, seed=5), spread(2, 3, seed=6)
TRIANGLE = np.tril(SQUARE) + 2 * np.eye(3)
COMPLEX = spread(2, 2, seed=5) + 1j * spread(2, 2, seed=6)
COMPLEX_TALL = spread(3, 2, seed=7) + 1j * spread(3, 2, seed=8)
COMPLEX_WIDE = spread(2, 3, seed=7) + 1j * spread(2, 3, seed=8)
HERMITIAN = COMPLEX @ COMPLEX.conj().T + np.eye(2)
VECTOR = spread(3, seed=4)
UNEVEN = np.exp(spread(2, 3, 2, seed=9))
SINGULAR = np.outer(spread(3, seed=1), spread(3, seed=2)) + np.outer(VECTOR, spread(3, seed=8))
BELOW_RANK = np.outer(spread(3, seed=1), spread(3, seed=2))


def triangular(a, b, lower=True, adjoint=False):
    a = np.tril(a) if lower else np.triu(a)
    return np.linalg.solve(np.conj(np.swapaxes(a, -1, -2)) if adjoint else a, b)


def cofactors(x):
    return np.linalg.det(x) * np.linalg.inv(x).T


def cofactors_change(a, x):
    h = 0.01  # the cofactors of matrices of this size are of degree 2 at most
    return (cofactors(x + h * a) - cofactors(x - h * a)) / (2 * h)


def eigh_free_of_signs(x):
    w, v = linalg.eigh(x)
    damped = v * rg.exp(-0.1 * rg.square(w))
    return w, v * rg.conj(v), linalg.matmul(damped, rg.conj(v), False, True)


def numpy_eigh_free_of_signs(x):
    w, v = np.linalg.eigh(x)
    return w, v * v.conj(), (v * np.exp(-0.1 * w**2)) @ v.conj().T


def svd_free_of_signs(x):
    u, s, vh = linalg.svd(x, full_matrices=False)
    return s, u * rg.conj(u), vh * rg.conj(vh), linalg.matmul(u * rg.sin(s), vh)


def numpy_svd_free_of_signs(x):
    u, s, vh = np.linalg.svd(x, full_matrices=False)
    return s, u * u.conj(), vh * vh.conj(), (u * np.sin(s)) @ vh


def from_eigh(a, x):
    return spectral._eigenvalues_grad(a, rg.stop_gradient(linalg.eigh(x)[1]), x)


def from_svd(a, x):
    u, _, vh = map(rg.stop_gradient, linalg.svd(x, full_matrices=False))
    return spectral._singular_values_grad(a, u, vh, x)


def with_eigenvectors(a, x):
    _, v = np.linalg.eigh(x)
    return v @ (a[..., None] * np.conj(np.swapaxes(v, -1, -2)))


def with_singular_vectors(a, x):
    u, _, vh = np.linalg.svd(x, full_matrices=False)
    return u @ (a[..., None] * vh)


def qr_row(name, x):
    return sample(f"Qr: {name}", lambda x: tuple(linalg.qr(x)), x, covers="Qr",
                  reference=lambda x: tuple(np.linalg.qr(x)))  # fmt: skip


def triangular_row(name, a, b, **options):
    return sample(f"MatrixTriangularSolve: {name}",
                  lambda a, b: linalg.triangular_solve(a, b, **options), (a, b),
                  covers="MatrixTriangularSolve",
                  reference=lambda a, b: triangular(a, b, **options))  # fmt: skip


def norm_row(ord, x=TALL):
    return sample(f"matrix_norm {ord!r} of {x.shape}", lambda x: linalg.matrix_norm(x, ord=ord), x,
                  reference=lambda x: np.linalg.matrix_norm(x, ord=ord))  # fmt: skip


def unary(name, f, reference, inputs, **options):
    return sample(name, f, inputs, reference=reference, covers=name.split(":")[0], **options)


NONE = {"order": 0, "reason": "no gradient: the result is an integer"}

SAMPLES = [
    unary("MatrixInverse", linalg.inv, np.linalg.inv, SQUARE),
    unary("MatrixInverse: a stack", linalg.inv, np.linalg.inv, STACK),
    unary("MatrixInverse: complex", linalg.inv, np.linalg.inv, COMPLEX),
    unary("MatrixSolve: a vector", linalg.solve, np.linalg.solve, (SQUARE, VECTOR)),
    unary("MatrixSolve: columns", linalg.solve, np.linalg.solve, (SQUARE, TALL[:3])),
    unary("MatrixSolve: stacks that broadcast", linalg.solve, np.linalg.solve,
          (STACK[:, None], spread(3, 2, 1))),
    unary("MatrixSolve: a stack and one matrix", linalg.solve, np.linalg.solve,
          (STACK, spread(2, 2))),
    unary("MatrixSolve: a stack and a vector", linalg.solve, np.linalg.solve, (STACK, spread(2))),
    unary("MatrixSolve: complex", linalg.solve, np.linalg.solve, (COMPLEX, COMPLEX.T + 1)),
    triangular_row("lower", TRIANGLE, TALL[:3]),
    triangular_row("the other triangle is not read", SQUARE + 3 * np.eye(3), TALL[:3]),
    triangular_row("upper", TRIANGLE.T.copy(), TALL[:3], lower=False),
    triangular_row("lower, adjoint", TRIANGLE, TALL[:3], adjoint=True),
    triangular_row("upper, adjoint, a vector", TRIANGLE.T.copy(), VECTOR, lower=False,
                   adjoint=True),
    triangular_row("stacks that broadcast", STACK, spread(2, 1)),
    triangular_row("complex, adjoint", COMPLEX + 3 * np.eye(2), COMPLEX, adjoint=True),
    unary("MatrixDeterminant", linalg.det, np.linalg.det, SQUARE),
    unary("MatrixDeterminant: a stack", linalg.det, np.linalg.det, STACK),
    unary("MatrixDeterminant: 1 x 1", linalg.det, np.linalg.det, np.array([[1.7]]) ),
    unary("MatrixDeterminant: complex", linalg.det, np.linalg.det, COMPLEX),
    unary("MatrixDeterminant: singular", linalg.det, np.linalg.det, SINGULAR, order=2,
          reason="the third derivative uses the inverse"),
    unary("MatrixDeterminant: two ranks below", linalg.det, np.linalg.det, BELOW_RANK, order=2,
          reason="the third derivative uses the inverse"),
    unary("MatrixCofactors", decompositions._cofactors, cofactors, SQUARE),
    unary("MatrixCofactors: complex", decompositions._cofactors, cofactors, COMPLEX),
    unary("MatrixCofactorsChange", decompositions._cofactors_change, cofactors_change,
          (POSITIVE, SQUARE)),
    unary("MatrixCofactorsChange: complex", decompositions._cofactors_change, cofactors_change,
          (HERMITIAN, COMPLEX)),
    unary("QuotientOrZero", decompositions._quotient, np.divide, (spread(2, 3), away(3))),
    unary("QuotientOrZero: zeros above", decompositions._quotient, np.divide,
          (np.zeros(3), away(3))),
    unary("MatrixExponential", linalg.expm, scipy.linalg.expm, SQUARE),
    unary("MatrixExponential: a stack", linalg.expm, scipy.linalg.expm, STACK),
    unary("MatrixExponential: scaled", linalg.expm, scipy.linalg.expm, 4 * (SQUARE - SQUARE.T)),
    unary("MatrixExponential: nilpotent", linalg.expm, lambda x: np.eye(3) + x + x @ x / 2,
          np.triu(SQUARE, 1)),
    unary("MatrixExponential: complex", linalg.expm, scipy.linalg.expm, COMPLEX),
    *[
        unary(f"MatrixExponentialChange: {what}", decompositions._expm_change,
              lambda a, x: np.stack([
                  scipy.linalg.expm_frechet(v, u, compute_expm=False)
                  for u, v in zip(a.reshape(-1, 2, 2), x.reshape(-1, 2, 2), strict=True)
              ]).reshape(x.shape), (a, x))
        for what, a, x in [("real", SQUARE[:2, :2], SQUARE[1:, 1:]), ("a stack", STACK + 1, STACK),
                           ("complex", COMPLEX.T, COMPLEX)]
    ],
    *[
        sample(f"lstsq, {what}", lambda a, b: tuple(linalg.lstsq(a, b)), (a, b),
               reference=lambda a, b: (
                   np.linalg.lstsq(a, b)[0],
                   np.atleast_1d((np.abs(b - a @ np.linalg.lstsq(a, b)[0]) ** 2).sum(0)),
                   *np.linalg.lstsq(a, b)[2:]))
        for what, a, b in [
            ("a vector", TALL, spread(4, seed=2)),
            ("columns", TALL, spread(4, 3, seed=2)),
            ("more unknowns than rows", WIDE, spread(2, seed=2)),
            ("complex", COMPLEX_TALL, spread(3, seed=2)),
        ]
    ],
    sample("lstsq, stacks that broadcast", lambda a, b: linalg.lstsq(a, b).solution,
           (STACK, spread(2, 1, seed=2)), covers="MatrixPseudoInverse",
           reference=np.linalg.solve),
    unary("LogMatrixDeterminant", lambda x: tuple(linalg.slogdet(x)), np.linalg.slogdet, SQUARE),
    unary("LogMatrixDeterminant: a stack", lambda x: tuple(linalg.slogdet(x)), np.linalg.slogdet,
          STACK),
    unary("LogMatrixDeterminant: complex", lambda x: tuple(linalg.slogdet(x)), np.linalg.slogdet,
          COMPLEX),
    unary("Cholesky", linalg.cholesky, np.linalg.cholesky, POSITIVE),
    unary("Cholesky: a stack", linalg.cholesky, np.linalg.cholesky,
          STACK @ np.swapaxes(STACK, 1, 2)),
    unary("Cholesky: upper", lambda x: linalg.cholesky(x, upper=True),
          lambda x: scipy.linalg.cholesky(x), POSITIVE),
    unary("Cholesky: complex", linalg.cholesky, np.linalg.cholesky, HERMITIAN),
    qr_row("square", SQUARE),
    qr_row("tall", TALL),
    qr_row("wide", WIDE),
    qr_row("a stack", STACK),
    qr_row("complex", COMPLEX),
    qr_row("complex, tall", COMPLEX_TALL),
    qr_row("complex, wide", COMPLEX_WIDE),
    unary("SelfAdjointEigV2", eigh_free_of_signs, numpy_eigh_free_of_signs, SYMMETRIC),
    unary("SelfAdjointEigV2: complex", eigh_free_of_signs, numpy_eigh_free_of_signs, HERMITIAN),
    unary("SelfAdjointEigvals", linalg.eigvalsh, np.linalg.eigvalsh, SYMMETRIC),
    unary("SelfAdjointEigvals: a stack", linalg.eigvalsh, np.linalg.eigvalsh,
          STACK + np.swapaxes(STACK, 1, 2)),
    unary("SelfAdjointEigvals: complex", linalg.eigvalsh, np.linalg.eigvalsh, HERMITIAN),
    unary("Svd: square", svd_free_of_signs, numpy_svd_free_of_signs, SQUARE),
    unary("Svd: tall", svd_free_of_signs, numpy_svd_free_of_signs, TALL),
    unary("Svd: wide", svd_free_of_signs, numpy_svd_free_of_signs, WIDE),
    unary("Svd: complex", svd_free_of_signs, numpy_svd_free_of_signs, COMPLEX),
    unary("Svd: complex, tall", svd_free_of_signs, numpy_svd_free_of_signs, COMPLEX_TALL),
    unary("Svd: complex, wide", svd_free_of_signs, numpy_svd_free_of_signs, COMPLEX_WIDE),
    unary("SingularValues", linalg.svdvals, np.linalg.svdvals, SQUARE),
    unary("SingularValues: tall", linalg.svdvals, np.linalg.svdvals, TALL),
    unary("SingularValues: complex, wide", linalg.svdvals, np.linalg.svdvals, COMPLEX_WIDE),
    unary("NanWhere: nothing is unknown", spectral._nan_where,
          lambda x, mask: np.zeros_like(x), (SQUARE, np.eye(3) < 0)),
    unary("NanWhere", spectral._nan_where, lambda x, mask: np.where(mask & (x != 0), np.nan, 0.0),
          (SQUARE * np.eye(3), np.eye(3) > -1), order=0, reason="its derivatives are NaN"),
    unary("SelfAdjointEigvalsGrad", from_eigh, with_eigenvectors,
          (VECTOR, SYMMETRIC)),
    unary("SelfAdjointEigvalsGrad: complex", from_eigh, with_eigenvectors,
          (spread(2), HERMITIAN)),
    unary("SelfAdjointEigvalsGrad: a stack", from_eigh, with_eigenvectors,
          (spread(2, 2), STACK + np.swapaxes(STACK, 1, 2))),
    *[
        unary(f"SingularValuesGrad: {name}", from_svd, with_singular_vectors,
              (spread(min(x.shape)), x))
        for name, x in (("square", SQUARE), ("tall", TALL), ("wide", WIDE), ("complex", COMPLEX),
                        ("complex, tall", COMPLEX_TALL), ("complex, wide", COMPLEX_WIDE))
    ],
    unary("MatrixPseudoInverse: square", linalg.pinv, np.linalg.pinv, SQUARE),
    unary("MatrixPseudoInverse: tall", linalg.pinv, np.linalg.pinv, TALL),
    unary("MatrixPseudoInverse: wide", linalg.pinv, np.linalg.pinv, WIDE),
    unary("MatrixPseudoInverse: complex, tall", linalg.pinv, np.linalg.pinv, COMPLEX_TALL),
    unary("MatrixRank", linalg.matrix_rank, np.linalg.matrix_rank, BELOW_RANK, **NONE),
    unary("MatrixRank: tall", linalg.matrix_rank, np.linalg.matrix_rank, TALL, **NONE),
    *[norm_row(ord) for ord in ("fro", "nuc", 1, -1, 2, -2, np.inf, -np.inf)],
    norm_row("fro", COMPLEX_WIDE),
    norm_row(2, STACK),
    sample("matrix_norm, keepdims", lambda x: linalg.matrix_norm(x, ord=1, keepdims=True), UNEVEN,
           reference=lambda x: np.linalg.matrix_norm(x, ord=1, keepdims=True)),
    *[
        sample(f"matrix_power {n}", lambda x, n=n: linalg.matrix_power(x, n), STACK,
               reference=lambda x, n=n: np.linalg.matrix_power(x, n))
        for n in (-2, -1, 0, 1, 2, 3, 5)
    ],
]  # fmt: skip
