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
from tests.samples import spread

SQUARE = spread(3, 3, seed=3)


def arrays(backend: str, array: np.ndarray) -> Any:
    if backend == "jax":
        import jax.numpy as jnp

        return jnp.asarray(array)
    if backend == "torch":
        import torch

        return torch.asarray(array.copy())
    return array


def total(y: Any) -> rg.Tensor:
    y = y if isinstance(y, tuple) else (y,)
    return sum((t.sum() for t in y), rg.scalar(0.0))


over_libraries = pytest.mark.parametrize("backend", ["numpy", "jax", "torch"])

FUNCTIONS = {
    "inv": linalg.inv, "det": linalg.det, "slogdet": linalg.slogdet, "cholesky": linalg.cholesky,
    "qr": linalg.qr, "eigh": linalg.eigh, "eigvalsh": linalg.eigvalsh,
    "svd": lambda x: linalg.svd(x, full_matrices=False), "svdvals": linalg.svdvals,
    "pinv": linalg.pinv, "solve": lambda x: linalg.solve(x, x),
    "triangular_solve": lambda x: linalg.triangular_solve(x, x),
}  # fmt: skip
ANY_SHAPE = ("qr", "svd", "svdvals", "pinv")
every_function = pytest.mark.parametrize("name", FUNCTIONS)


# -- matmul, einsum and what is made of them -----------------------------------------------------


def test_matmul_of_integers_stays_integer() -> None:
    y = linalg.matmul(np.array([[1, 2]]), np.array([[3], [4]]))
    assert y.dtype == np.int64
    assert y.tolist() == [[11]]


def test_an_override_of_matmul_fires_in_all_that_is_made_of_it() -> None:
    x = rg.tensor(SQUARE)
    products = (
        lambda x: linalg.matmul(x, x),
        lambda x: linalg.matmul(x, x[0]),
        lambda x: linalg.tensordot(x, x, axes=1),
        lambda x: linalg.matrix_power(x, 3),
    )
    for product in products:
        with rg.gradient_override_map({"MatMul": lambda dy, a, b: (None, None)}) as used:
            rg.grad(product)(x)
        used.assert_fired()


def test_vecdot_of_small_integers_keeps_their_dtype() -> None:
    assert linalg.vecdot(np.ones(3, "int8"), np.ones(3, "int8")).dtype == np.int8


def test_einsum_multiplies_in_steps_of_two_and_only_wanted_gradients_run() -> None:
    a, b, c = rg.tensor(spread(2, 3)), rg.tensor(spread(3, 4)), rg.tensor(spread(4, 2))
    with rg.gradient_override_map({"Einsum": lambda op, dy: [None] * len(op.inputs)}) as used:
        einsum("ij,jk,kl->il", a, b, c)
    assert "2 created" in str(used)
    assert rg.grad(lambda b: einsum("ij,jk,kl->", a, b, c))(b).shape == (3, 4)


@pytest.mark.parametrize("subscripts", ["bij,bjk->bik", "bij,bkj->ik", "bij,bij->", "bii,bjk->bj"])
def test_einsum_of_arrays_large_enough_for_blas(subscripts: str) -> None:
    a, b = spread(2, 20, 20), spread(2, 20, 20, seed=1)
    y = einsum(subscripts, a, b)
    np.testing.assert_allclose(y.numpy(), np.einsum(subscripts, a, b), atol=1e-10)
    check_gradients(lambda a, b: einsum(subscripts, a, b), [a, b], order=2)


# -- decompositions ------------------------------------------------------------------------------


@over_libraries
@every_function
def test_integers_become_float32(name: str, backend: str) -> None:
    y = FUNCTIONS[name](arrays(backend, np.array([[2, 1], [1, 3]])))
    assert {t.dtype for t in (y if isinstance(y, tuple) else (y,))} == {np.dtype("float32")}


@pytest.mark.slow(but=24)
@over_libraries
@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, shape) for name in FUNCTIONS for shape in ((0, 0), (0, 2, 2))]
    + [(name, shape) for name in ANY_SHAPE for shape in ((2, 0), (0, 2))],
    ids=str,
)
def test_empty_matrices(name: str, backend: str, shape: tuple[int, ...]) -> None:
    x = rg.asarray(arrays(backend, np.zeros(shape)))
    dx = rg.grad(lambda x: total(FUNCTIONS[name](x)))(x)
    assert dx.shape == shape


@over_libraries
def test_solve_takes_a_matrix_beside_a_stack_for_a_matrix(backend: str) -> None:
    a, b = spread(3, 3, 3) + 4 * np.eye(3), spread(3, 3, seed=1)
    y = linalg.solve(arrays(backend, a), arrays(backend, b))
    np.testing.assert_allclose(y._values(), np.linalg.solve(a, b[None]), atol=1e-12)


@pytest.mark.slow(but=2)
@over_libraries
def test_det_of_singular_matrices_has_first_and_second_derivatives(backend: str) -> None:
    # d det / dx is the matrix of cofactors, a polynomial
    x = rg.asarray(arrays(backend, np.diag([2.0, 3.0, 0.0])))
    np.testing.assert_allclose(rg.grad(linalg.det)(x)._values(), np.diag([0, 0, 6.0]), atol=1e-12)
    zero = rg.asarray(arrays(backend, np.zeros((3, 3))))
    np.testing.assert_allclose(rg.grad(linalg.det)(zero)._values(), 0, atol=1e-12)
    change = rg.grad(lambda x: rg.grad(linalg.det)(x)[0, 0])(x)
    np.testing.assert_allclose(change._values(), np.diag([0, 0, 3.0]), atol=1e-12)


def test_the_gradient_of_det_is_accurate_for_larger_matrices() -> None:
    x = np.random.default_rng(0).normal(size=(30, 30))
    due = np.linalg.det(x) * np.linalg.inv(x).T
    np.testing.assert_allclose(rg.grad(linalg.det)(x)._values(), due, rtol=1e-7)


@over_libraries
def test_eigenvalues_alone_have_finite_gradients_where_they_coincide(backend: str) -> None:
    x = rg.asarray(arrays(backend, np.eye(3)))
    for f in (lambda x: linalg.eigh(x).eigenvalues, linalg.eigvalsh, linalg.svdvals,
              lambda x: linalg.svd(x).S):  # fmt: skip
        np.testing.assert_allclose(rg.grad(f)(x)._values(), np.eye(3), atol=1e-12)
    _, slope = rg.jvp(linalg.eigvalsh, [x], [np.eye(3)])
    np.testing.assert_allclose(slope._values(), 1, atol=1e-12)


def test_eigenvectors_have_no_finite_gradient_where_eigenvalues_coincide() -> None:
    weights = rg.tensor(SQUARE)
    for f in (lambda x: linalg.eigh(x).eigenvectors, lambda x: linalg.svd(x).U):
        dx = rg.grad(lambda x, f=f: f(x) * weights)(rg.tensor(np.eye(3)))
        assert not np.isfinite(dx.numpy()).any()


def test_singular_values_of_zero_have_finite_gradients() -> None:
    x = rg.zeros((3, 2), dtype="float64")
    assert np.isfinite(rg.grad(lambda x: linalg.svd(x, full_matrices=False).S)(x).numpy()).all()
    assert np.isfinite(rg.grad(lambda x: linalg.matrix_norm(x, ord="nuc"))(x).numpy()).all()
    assert rg.grad(linalg.matrix_norm)(x).tolist() == [[0, 0], [0, 0], [0, 0]]


def test_arbitrary_vectors_have_no_gradient() -> None:
    x = rg.tensor(spread(3, 2))
    assert linalg.svd(x).U.shape == (3, 3)
    with pytest.raises(GradientError, match="full_matrices=False"):
        rg.grad(lambda x: linalg.svd(x).S)(x)
    assert linalg.qr(x, mode="complete").Q.shape == (3, 3)
    with pytest.raises(GradientError, match="mode='reduced'"):
        rg.grad(lambda x: linalg.qr(x, mode="complete").R)(x)
    check_gradients(lambda x: linalg.qr(x, mode="complete").R, [SQUARE])
    with pytest.raises(ArgumentError, match="'reduced' or 'complete'"):
        linalg.qr(x, mode="raw")  # pyright: ignore[reportArgumentType]


def test_cholesky_and_eigh_symmetrise_and_leave_symmetric_matrices_as_they_are() -> None:
    x = SQUARE @ SQUARE.T + np.eye(3)
    skew = np.triu(SQUARE, 1) - np.triu(SQUARE, 1).T
    for f in (linalg.cholesky, linalg.eigvalsh):
        np.testing.assert_allclose(f(x + skew).numpy(), f(x).numpy(), rtol=1e-12)
        dx = rg.grad(f)(x).numpy()
        np.testing.assert_allclose(dx, dx.T, rtol=1e-9)
    np.testing.assert_array_equal(linalg.cholesky(x).numpy(), np.linalg.cholesky(x))
    np.testing.assert_array_equal(linalg.eigvalsh(x).numpy(), np.linalg.eigvalsh(x))


def test_results_are_named() -> None:
    assert linalg.qr(SQUARE)._fields == ("Q", "R")
    assert linalg.svd(SQUARE)._fields == ("U", "S", "Vh")
    assert linalg.eigh(SQUARE + SQUARE.T)._fields == ("eigenvalues", "eigenvectors")
    assert linalg.slogdet(SQUARE)._fields == ("sign", "logabsdet")


def test_the_rank_is_an_integer_without_gradient() -> None:
    x = rg.tensor([[1.0, 2.0], [2.0, 4.0]])
    assert linalg.matrix_rank(x).item() == 1
    assert linalg.matrix_rank(x, rtol=0.0).item() >= 1
    assert linalg.matrix_rank(np.zeros((0, 2))).item() == 0
    rg.grad(lambda x: x * int(linalg.matrix_rank(x).numpy()))(x)


def test_pinv_counts_small_singular_values_as_zero() -> None:
    x = np.diag([1.0, 1e-3])
    np.testing.assert_allclose(linalg.pinv(x, rtol=1e-2).numpy(), np.diag([1.0, 0.0]), atol=1e-12)
    np.testing.assert_allclose(linalg.pinv(x).numpy(), np.diag([1.0, 1e3]))


def test_forward_mode_passes_every_decomposition() -> None:
    x = SQUARE @ SQUARE.T + np.eye(3)
    direction = spread(3, 3, seed=5)
    for f in FUNCTIONS.values():
        y, dy = rg.jvp(f, [x], [direction])
        h = 1e-6
        above, below = (f(x + h * direction), f(x - h * direction))
        for k, d in enumerate(dy if isinstance(y, tuple) else [dy]):
            high, low = (z[k] if isinstance(y, tuple) else z for z in (above, below))
            due = (high.numpy() - low.numpy()) / (2 * h)
            np.testing.assert_allclose(d.numpy(), due, rtol=1e-5, atol=1e-6)
