"""What the samples of linear algebra cannot say: errors, ties, singular and empty matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import regrad as rg
from regrad import linalg
from regrad.errors import ArgumentError, GradientError
from regrad.ops.matmul import einsum
from regrad.testing import check_gradients
from tests.helpers.op_rows import alike, firing, in_libraries, libraries, on, outcomes, slope
from tests.helpers.rows import refused
from tests.samples import spread

SQUARE = spread(3, 3, seed=3)
FUNCTIONS = {
    "inv": linalg.inv, "det": linalg.det, "slogdet": linalg.slogdet, "cholesky": linalg.cholesky,
    "qr": linalg.qr, "eigh": linalg.eigh, "eigvalsh": linalg.eigvalsh,
    "svd": lambda x: linalg.svd(x, full_matrices=False), "svdvals": linalg.svdvals,
    "pinv": linalg.pinv, "solve": lambda x: linalg.solve(x, x),
    "triangular_solve": lambda x: linalg.triangular_solve(x, x),
}  # fmt: skip
ANY_SHAPE = ("qr", "svd", "svdvals", "pinv")


def listed(y: Any) -> list[Any]:
    return list(y) if isinstance(y, tuple) else [y]


# -- values ----------------------------------------------------------------------------------------

A, B, C = rg.tensor(spread(2, 3)), rg.tensor(spread(3, 4)), rg.tensor(spread(4, 2))
BYTES, FLAT, DEEP = np.ones(3, "i1"), rg.zeros((3, 2), dtype="float64"), np.diag([1.0, 1e-3])
RANK_1, LARGE = rg.tensor([[1.0, 2.0], [2.0, 4.0]]), np.random.default_rng(0).normal(size=(30, 30))
VECTORS = (lambda x: linalg.eigh(x).eigenvectors, lambda x: linalg.svd(x).U)
AT_0 = (lambda x: linalg.svd(x, full_matrices=False).S, lambda x: linalg.matrix_norm(x, ord="nuc"))
NAMED = (linalg.qr, linalg.svd, linalg.eigh, linalg.slogdet)
test_values = outcomes({
    "matmul of integers": (lambda: linalg.matmul(np.array([[1, 2]]), np.array([[3], [4]])), [[11]]),
    "its dtype": (lambda: linalg.matmul(np.array([[1]]), np.array([[3]])).dtype, "int64"),
    "vecdot of small integers": (lambda: linalg.vecdot(BYTES, BYTES).dtype, "int8"),
    "only wanted gradients": (lambda: slope(lambda b: einsum("ij,jk,kl->", A, b, C))(B).shape,
                              (3, 4)),
    "eigenvectors have no gradient where eigenvalues coincide": (
        lambda: [slope(lambda x, f=f: f(x) * SQUARE)(rg.tensor(np.eye(3))) * 0 for f in VECTORS],
        [np.nan] * 2),
    "singular values of zero": (lambda: [slope(f)(FLAT) * 0 for f in AT_0], [0, 0]),
    "the norm of zero": (lambda: slope(linalg.matrix_norm)(FLAT), [[0, 0]] * 3),
    "names of results": (lambda: [f(SQUARE + SQUARE.T)._fields for f in NAMED],
                         [("Q", "R"), ("U", "S", "Vh"), ("eigenvalues", "eigenvectors"),
                          ("sign", "logabsdet")]),
    "the rank": (lambda: [linalg.matrix_rank(RANK_1), linalg.matrix_rank(RANK_1, rtol=0.0) >= 1,
                          linalg.matrix_rank(np.zeros((0, 2)))], [1, True, 0]),
    "the rank is an integer": (
        lambda: slope(lambda x: x * int(linalg.matrix_rank(x).numpy()))(RANK_1), [[1, 1], [1, 1]]),
    "pinv of small singular values": (lambda: linalg.pinv(DEEP, rtol=1e-2), np.diag([1.0, 0.0])),
    "pinv": (lambda: linalg.pinv(DEEP), np.diag([1.0, 1e3])),
}, rtol=1e-7, atol=1e-12)  # fmt: skip

STACK, RIGHT = spread(3, 3, 3) + 4 * np.eye(3), spread(3, 3, seed=1)
SINGULAR, EYE = np.diag([2.0, 3.0, 0.0]), np.eye(3)
EIGEN = (lambda x: linalg.eigh(x).eigenvalues, linalg.eigvalsh, linalg.svdvals,
         lambda x: linalg.svd(x).S)  # fmt: skip
test_in_each_library = in_libraries({
    "solve of a matrix beside a stack": (linalg.solve, STACK, RIGHT,
                                         np.linalg.solve(STACK, RIGHT[None])),
    # d det / dx is the matrix of cofactors, a polynomial
    "det of a singular matrix": (slope(linalg.det), SINGULAR, np.diag([0, 0, 6.0])),
    "det of zero": (slope(linalg.det), np.zeros((3, 3)), 0),
    "det, second": (slope(lambda x: slope(linalg.det)(x)[0, 0]), SINGULAR, np.diag([0, 0, 3.0])),
    "eigenvalues that coincide": (lambda x: [slope(f)(x) for f in EIGEN], EYE, [EYE] * 4),
    "their tangents": (lambda x: rg.jvp(linalg.eigvalsh, [x], [EYE])[1], EYE, 1),
    **{f"{name} of integers": (lambda x, f=f: {y.dtype.name for y in listed(f(x))} == {"float32"},
                               [[2, 1], [1, 3]], True) for name, f in FUNCTIONS.items()},
}, rtol=1e-7, atol=1e-12)  # fmt: skip

X = rg.tensor(SQUARE)
test_overrides_of_matmul_fire_inside = firing({
    "matmul": ("MatMul", lambda x: linalg.matmul(x, x), X),
    "matrix and vector": ("MatMul", lambda x: linalg.matmul(x, x[0]), X),
    "tensordot": ("MatMul", lambda x: linalg.tensordot(x, x, axes=1), X),
    "matrix_power": ("MatMul", lambda x: linalg.matrix_power(x, 3), X),
})  # fmt: skip


def test_einsum_multiplies_in_steps_of_two() -> None:
    with rg.gradient_override_map({"Einsum": lambda op, dy: [None] * len(op.inputs)}) as used:
        einsum("ij,jk,kl->il", A, B, C)
    assert "2 created" in str(used)


@pytest.mark.parametrize("subscripts", ["bij,bjk->bik", "bij,bkj->ik", "bij,bij->", "bii,bjk->bj"])
def test_einsum_of_arrays_large_enough_for_blas(subscripts: str) -> None:
    a, b = spread(2, 20, 20), spread(2, 20, 20, seed=1)
    y = einsum(subscripts, a, b)
    np.testing.assert_allclose(y.numpy(), np.einsum(subscripts, a, b), atol=1e-10)
    check_gradients(lambda a, b: einsum(subscripts, a, b), [a, b], order=2)


# -- decompositions ------------------------------------------------------------------------------


@pytest.mark.slow(but=24)
@libraries
@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, shape) for name in FUNCTIONS for shape in ((0, 0), (0, 2, 2))]
    + [(name, shape) for name in ANY_SHAPE for shape in ((2, 0), (0, 2))],
    ids=str,
)
def test_empty_matrices(name: str, library: str, shape: tuple[int, ...]) -> None:
    total = lambda x: sum((t.sum() for t in listed(FUNCTIONS[name](x))), rg.scalar(0.0))  # noqa: E731
    assert rg.grad(total)(on(library, np.zeros(shape))).shape == shape


def test_the_gradient_of_det_is_accurate_for_larger_matrices() -> None:
    alike(slope(linalg.det)(LARGE), np.linalg.det(LARGE) * np.linalg.inv(LARGE).T, rtol=1e-7)


def test_arbitrary_vectors_have_no_gradient() -> None:
    x, complete = rg.tensor(spread(3, 2)), lambda x: linalg.qr(x, mode="complete")
    assert linalg.svd(x).U.shape == complete(x).Q.shape == (3, 3)
    refused(lambda: rg.grad(lambda x: linalg.svd(x).S)(x), GradientError, "full_matrices=False")
    refused(lambda: rg.grad(lambda x: complete(x).R)(x), GradientError, "mode='reduced'")
    check_gradients(lambda x: complete(x).R, [SQUARE])
    call = lambda: linalg.qr(x, mode="raw")  # pyright: ignore[reportArgumentType]  # noqa: E731
    refused(call, ArgumentError, "'reduced' or 'complete'")


def test_cholesky_and_eigh_symmetrise_and_leave_symmetric_matrices_as_they_are() -> None:
    x = SQUARE @ SQUARE.T + np.eye(3)
    skew = np.triu(SQUARE, 1) - np.triu(SQUARE, 1).T
    for f, theirs in (
        (linalg.cholesky, np.linalg.cholesky), (linalg.eigvalsh, np.linalg.eigvalsh)
    ):  # fmt: skip
        alike(f(x + skew), f(x).numpy())
        dx = slope(f)(x).numpy()
        np.testing.assert_allclose(dx, dx.T, rtol=1e-9)
        np.testing.assert_array_equal(f(x).numpy(), theirs(x))


def test_forward_mode_passes_every_decomposition() -> None:
    x, direction, h = SQUARE @ SQUARE.T + np.eye(3), spread(3, 3, seed=5), 1e-6
    for f in FUNCTIONS.values():
        _, dy = rg.jvp(f, [x], [direction])
        above, below = (listed(f(x + k * direction)) for k in (h, -h))
        for d, high, low in zip(listed(dy), above, below, strict=True):
            due = (high.numpy() - low.numpy()) / (2 * h)
            np.testing.assert_allclose(d.numpy(), due, rtol=1e-5, atol=1e-6)
