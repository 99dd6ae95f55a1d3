"""Gradients where a factor overflows, vanishes or is infinite."""

from __future__ import annotations

import numpy as np
import pytest

import regrad as rg
from regrad.errors import MatrixError
from tests.helpers.sample_runs import arrays_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities
LIBRARIES = ["numpy", "jax", "torch"]
libraries = pytest.mark.parametrize("library", LIBRARIES)


def gradients(f, library, *values):
    xs = [rg.asarray(arrays_of(library, np.asarray(v, np.float64))) for v in values]
    return [dx.numpy() for dx in rg.grads(lambda *xs: rg.sum(f(*xs)))(xs)]


@libraries
@pytest.mark.parametrize("power", [0.0, 1.0, 2.0, -1.0, 0.5])
def test_the_mixed_second_derivative_of_a_power(library, power):
    """d/db of `b * a ** (b - 1)`, at b = 0 as elsewhere."""
    a = np.array([0.5, 2.0, 3.0])
    (db,) = gradients(
        lambda b: rg.grad(lambda a: rg.sum(a**b))(rg.asarray(arrays_of(library, a))),
        library,
        np.full(3, power),
    )
    np.testing.assert_allclose(db, a ** (power - 1) * (1 + power * np.log(a)))


@libraries
def test_the_power_zero_is_a_constant(library):
    a = [0.0, -0.0, np.inf, -np.inf, 2.0, -2.0]
    np.testing.assert_array_equal(gradients(rg.pow, library, a, np.zeros(6))[0], 0)
    (da,) = gradients(lambda a: rg.grad(lambda a: rg.sum(a**0.0))(a), library, a)
    np.testing.assert_array_equal(da, 0)


@pytest.mark.parametrize("power", [0, 1, 2, 3, -1, 0.5])
def test_the_gradient_of_a_power_by_a_number_is_that_of_jax(power):
    import jax

    a = np.array([0.0, -0.0, 1e-300, 2.5, -2.5, np.inf, -np.inf, np.nan])
    ours, theirs = lambda a: a**power, lambda a: a**power
    with jax.enable_x64(True):
        for _ in range(3):
            ours, theirs = rg.grad(ours), jax.grad(theirs)
            found = ours(rg.asarray(a)).numpy()
            expected = np.array([theirs(value) for value in a])
            np.testing.assert_allclose(found, expected, rtol=1e-12)


@libraries
def test_logaddexp_of_infinity(library):
    a, b = [np.inf, 0.0, -np.inf, 800.0, 1.0], [0.0, np.inf, 0.0, -800.0, 1.0]
    da, db = gradients(rg.logaddexp, library, a, b)
    np.testing.assert_allclose(da, [1, 0, 0, 1, 0.5])
    np.testing.assert_allclose(db, [0, 1, 1, 0, 0.5])
    (second,) = gradients(lambda a: rg.grad(lambda a: rg.sum(rg.logaddexp(a, rg.asarray(b))))(a),
                          "numpy", a)  # fmt: skip
    np.testing.assert_allclose(second, [0, 0, 0, 0, 0.25])


@libraries
def test_the_remainder_of_a_division_by_infinity(library):
    a, b = [-1.0, 1.0, 1.0, -1.0], [np.inf, -np.inf, np.inf, -np.inf]
    np.testing.assert_allclose(gradients(rg.remainder, library, a, b)[1], [1, 1, 0, 0])


@pytest.mark.parametrize("approximate", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_gelu_is_straight_far_away_in_every_dtype(approximate, dtype):
    x = rg.tensor([-np.finfo(dtype).max, -1000.0, -50.0, 50.0, 1000.0], dtype=dtype)
    f = lambda x: rg.sum(rg.nn.gelu(x, approximate=approximate))  # noqa: E731
    np.testing.assert_array_equal(rg.grad(f)(x).numpy(), [0, 0, 0, 1, 1])
    second = lambda x: rg.sum(rg.grad(f)(x))  # noqa: E731
    np.testing.assert_array_equal(rg.grad(second)(x).numpy(), 0)
    third = lambda x: rg.sum(rg.grad(second)(x))  # noqa: E731
    np.testing.assert_array_equal(rg.grad(third)(x).numpy(), 0)
    assert np.isnan(rg.grad(f)(rg.tensor([np.nan])).numpy())


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("columns", [(3,), (3, 2)])
def test_a_singular_matrix_is_called_so(library, columns):
    a, b = [rg.asarray(arrays_of(library, x)) for x in (np.ones((3, 3)), np.ones(columns))]
    with pytest.raises(MatrixError, match=r"(?i)singular"):
        rg.linalg.solve(a, b)
