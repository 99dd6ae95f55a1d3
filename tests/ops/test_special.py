"""Special functions at special places: zeros, infinities and NaN, and bad arguments."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import torch

import regrad as rg
from regrad.testing import check_gradients
from tests.helpers.sample_runs import arrays_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities
libraries = pytest.mark.parametrize("library", ["numpy", "jax", "torch"])
NAN, INF = np.nan, np.inf
BESIDE_ZERO = np.array([0.0, -2.0, NAN, INF, -INF, 3.0])


def on(library, x):
    return rg.asarray(arrays_of(library, np.asarray(x)))


def gradients(f, *xs):
    dxs = rg.grads(lambda *xs: rg.sum(f(*xs)), unconnected="zero")(list(xs))
    return [dx.numpy() for dx in dxs]


# -- xlogy and xdivy -------------------------------------------------------------------------------


@libraries
@pytest.mark.parametrize("f", [rg.xlogy, rg.xdivy])
def test_zero_beats_everything(library, f):
    """TensorFlow's convention, in the value and in all derivatives."""
    a, b = on(library, np.zeros(6)), on(library, BESIDE_ZERO)
    np.testing.assert_array_equal(f(a, b).numpy(), 0)
    for dx in gradients(f, a, b):
        np.testing.assert_array_equal(dx, 0)
    for i in range(2):
        for dx in gradients(lambda a, b, i=i: rg.grads(f)([a, b])[i], a, b):
            np.testing.assert_array_equal(dx, 0)


@libraries
def test_other_factors_see_what_there_is(library):
    a, b = on(library, [1.0, 2.0, -1.0, NAN, 2.0]), on(library, [0.0, NAN, INF, 1.0, -1.0])
    np.testing.assert_array_equal(rg.xlogy(a, b).numpy(), [-INF, NAN, -INF, NAN, NAN])
    np.testing.assert_array_equal(rg.xdivy(a, b).numpy(), [INF, NAN, -0.0, NAN, -2.0])


def test_the_entropy_of_a_certain_event():
    p = rg.asarray([0.0, 1.0, 0.5])
    np.testing.assert_allclose(gradients(lambda p: rg.xlogy(p, p), p)[0],
                               [0, 1, 1 + np.log(0.5)], rtol=1e-6)  # fmt: skip


def test_small_divisors_do_not_overflow_in_the_gradient():
    a, b = np.float32(1e-30), np.float32(1e-25)
    np.testing.assert_allclose(
        gradients(rg.xdivy, rg.asarray(a), rg.asarray(b))[1], -1e20, rtol=1e-5
    )


def test_integers_become_floats():
    assert rg.xlogy(rg.asarray([0, 2]), rg.asarray([0, 1])).dtype == np.float32
    assert rg.xdivy(rg.asarray([0, 2]), rg.asarray([0, 4])).tolist() == [0.0, 0.5]


# -- sinc ------------------------------------------------------------------------------------------


@libraries
def test_derivatives_of_sinc_at_zero(library):
    x = on(library, 0.0)
    d1 = rg.grad(rg.sinc)
    d2, d3 = rg.grad(d1), rg.grad(rg.grad(d1))
    assert [d1(x).item(), d3(x).item()] == [0, 0]
    np.testing.assert_allclose(d2(x).item(), -(np.pi**2) / 3, rtol=1e-14)
    np.testing.assert_allclose(rg.grad(d3)(x).item(), np.pi**4 / 5, rtol=1e-14)


@libraries
@pytest.mark.parametrize("x", [1e-12, 1e-7, -1e-4, 1e-3])
def test_the_slope_of_sinc_near_zero_has_all_its_digits(library, x):
    due = -(np.pi**2) * x / 3 * (1 - np.pi**2 * x**2 / 10)
    np.testing.assert_allclose(rg.grad(rg.sinc)(on(library, x)).item(), due, rtol=1e-11)


def test_the_two_ways_of_sinc_agree_where_they_meet():
    for n in range(1, 8):
        x = (n + 2) / np.pi * np.array([1 - 1e-12, 1 + 1e-12])
        a, b = rg.find_op("SincDerivative").function(rg.asarray(x), n=n).tolist()
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10 * np.pi**n)


# -- NaN and infinities ----------------------------------------------------------------------------


@libraries
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_nan_to_num_as_numpy_has_it(library, dtype):
    x = np.array([1.5, NAN, INF, -INF, -0.0], dtype)
    for options in ({}, {"nan": 3.0}, {"posinf": 4.0, "neginf": -5.0}):
        y = rg.nan_to_num(on(library, x), **options)
        np.testing.assert_array_equal(y.numpy(), np.nan_to_num(x, **options))
        assert y.dtype == dtype


@libraries
def test_the_gradient_of_nan_to_num_is_masked(library):
    x = on(library, [1.5, NAN, INF, -INF])
    np.testing.assert_array_equal(gradients(rg.nan_to_num, x)[0], [1, 0, 0, 0])
    z = np.array([1.5 + 1j, complex(NAN, 2), complex(1, INF)])
    np.testing.assert_array_equal(rg.nan_to_num(on(library, z)).numpy(), np.nan_to_num(z))
    f = lambda z: rg.real(rg.nan_to_num(z)) + 2 * rg.imag(rg.nan_to_num(z))  # noqa: E731
    np.testing.assert_array_equal(gradients(f, on(library, z))[0], [1 + 2j, 2j, 1])


def test_nan_to_num_leaves_integers():
    assert rg.nan_to_num(rg.asarray([1, 2])).dtype == np.int64


@pytest.mark.slow(but=2)
@libraries
def test_complex_expm1_where_something_is_not_finite(library):
    """The Array API standard's special cases."""
    unknown = complex(NAN, NAN)
    cases = {
        complex(INF, 0): complex(INF, 0), complex(INF, 2): complex(-INF, INF),
        complex(-INF, 0): -1, complex(-INF, 2): -1, complex(-INF, INF): -1, complex(-INF, NAN): -1,
        complex(NAN, 0): complex(NAN, 0), complex(NAN, 2): unknown, complex(NAN, NAN): unknown,
        complex(0, INF): unknown, complex(2, NAN): unknown, 0: 0, 1e-9 + 1e-9j: 1e-9 + 1e-9j,
    }  # fmt: skip
    y = rg.expm1(on(library, np.array([*cases], complex))).numpy()
    np.testing.assert_allclose(y, np.array([*cases.values()], complex), rtol=1e-8)
    for x in (complex(INF, INF), complex(INF, NAN)):
        y = rg.expm1(on(library, np.array(x))).item()
        assert np.isinf(y.real) and np.isnan(y.imag)


# -- isclose and allclose --------------------------------------------------------------------------


@libraries
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float32", "complex64"])
def test_isclose_of_every_kind(library, dtype):
    a, b = np.array([0, 1, 3, 200]).astype(dtype), np.array([1, 1, 5, 199]).astype(dtype)
    for options in ({}, {"rtol": 0.01}, {"atol": 2}):
        due = np.isclose(a, b, **options)
        np.testing.assert_array_equal(rg.isclose(on(library, a), on(library, b), **options), due)
        assert bool(rg.allclose(on(library, a), on(library, b), **options)) == due.all()


@libraries
def test_isclose_of_complex_infinities(library):
    a = np.array([complex(INF, 1), complex(1, NAN), 1 + 1j])
    for equal_nan in (False, True):
        y = rg.isclose(on(library, a), on(library, a), equal_nan=equal_nan)
        np.testing.assert_array_equal(y, np.isclose(a, a, equal_nan=equal_nan))


# -- quantiles -------------------------------------------------------------------------------------

X = np.random.default_rng(0).normal(size=(3, 4, 2))
METHODS = ["linear", "lower", "higher", "midpoint", "nearest"]


@pytest.mark.slow(but=2)
@libraries
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("axis", [None, 0, -1, (0, 2), (-1, 1), ()])
def test_quantiles_as_numpy_has_them(library, method, axis):
    for q in (0.3, 1, [0.0, 0.5, 1.0], np.array([[0.1, 0.2], [0.5, 0.75]])):
        for keepdims in (False, True):
            options = {"axis": axis, "keepdims": keepdims, "method": method}
            y = rg.quantile(on(library, X), q, **options)
            np.testing.assert_allclose(y.numpy(), np.quantile(X, q, **options), rtol=1e-12)


@pytest.mark.slow(but=2)
@libraries
def test_infinities_and_nans_among_the_values(library):
    for x in ([1.0, 2.0, INF], [-INF, INF, INF, INF], [NAN, 1.0, 2.0], [INF] * 3, [-INF, 0.0, 1.0]):
        np.testing.assert_array_equal(rg.median(on(library, x)).numpy(), np.median(x))
    dx = gradients(rg.median, on(library, [1.0, NAN, 2.0, 3.0]))[0]
    np.testing.assert_array_equal(dx, [0, 1, 0, 0])  # the one that decides
    assert gradients(rg.median, on(library, [INF, 1.0, 2.0]))[0].tolist() == [0, 0, 1]


@pytest.mark.slow
def test_a_long_axis_is_not_blurred_by_single_precision():
    x = np.arange(2**24, dtype=np.float32)
    assert rg.quantile(rg.asarray(x), 0.3, method="lower").item() == np.quantile(
        x, 0.3, method="lower"
    )


def test_shares_that_are_tensors():
    x = rg.asarray([1.0, 2.0, 4.0])
    assert np.isnan(rg.quantile(x, rg.asarray([-0.1, 1.5])).numpy()).all()
    jitted = rg.jit(rg.quantile)
    assert jitted(x, rg.asarray(0.75)).item() == 3
    assert gradients(lambda q: rg.quantile(x, q), rg.asarray([0.25, 0.75]))[0].tolist() == [2, 4]


def test_quantiles_agree_with_jax_and_torch():
    q = [0.2, 0.7]
    np.testing.assert_allclose(rg.quantile(rg.asarray(X), q, axis=1).numpy(),
                               jnp.quantile(X, jnp.array(q), axis=1), rtol=1e-6)  # fmt: skip
    lower = rg.quantile(rg.asarray(X), 0.5, axis=1, method="lower")
    np.testing.assert_array_equal(lower.numpy(), torch.tensor(X).median(1).values.numpy())


# -- compositions ----------------------------------------------------------------------------------


def test_multigammaln_has_no_value_below_its_domain():
    y = rg.multigammaln(rg.asarray([0.9, 1.0, 1.1]), 3).numpy()
    assert np.isnan(y).tolist() == [True, True, False]
    np.testing.assert_allclose(y[2], scipy.special.multigammaln(1.1, 3), rtol=1e-5)


@libraries
def test_large_and_half_precision_exponentials(library):
    x = np.array([[0.0, -60.0], [60.0, 0.0]])
    due = [[np.cos(60), -np.sin(60)], [np.sin(60), np.cos(60)]]
    np.testing.assert_allclose(rg.linalg.expm(on(library, x)).numpy(), due, atol=1e-12)
    half = rg.linalg.expm(on(library, np.eye(2, dtype=np.float16)))
    assert half.dtype == np.float16
    np.testing.assert_allclose(half.numpy(), np.e * np.eye(2), rtol=1e-3)


def test_lstsq_of_dependent_columns():
    a = np.array([[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]])
    ours, theirs = rg.linalg.lstsq(rg.asarray(a), [1.0, 0.0, 2.0]), np.linalg.lstsq(a, [1, 0, 2])
    np.testing.assert_allclose(ours.solution.numpy(), theirs[0])
    assert ours.rank.item() == theirs[2] == 1
    check_gradients(lambda b: rg.linalg.lstsq(rg.asarray(a), b).solution, [np.ones(3)], order=2)
    nearly = a + np.array([[0, 1e-6], [0, 0], [0, 0]])
    assert rg.linalg.lstsq(rg.asarray(nearly), np.ones(3), rcond=1e-3).rank.item() == 1
    assert rg.linalg.lstsq(rg.asarray(nearly), np.ones(3)).rank.item() == 2


def test_methods():
    x = rg.asarray([4.0, 1.0, 3.0])
    assert [x.median().item(), x.quantile(0.0).item(), x.quantile([1.0], axis=0).tolist()] == [
        3, 1, [4],
    ]  # fmt: skip
    assert x.isclose(x + 1e-7).all().item() and not x.allclose([4.0, 1.0, 3.1]).item()
    np.testing.assert_allclose(x.xlogy(2.0).numpy(), scipy.special.xlogy([4, 1, 3], 2), rtol=1e-6)
    np.testing.assert_allclose((x / 8).sinc().numpy(), np.sinc([0.5, 0.125, 0.375]), rtol=1e-6)
    assert rg.asarray([NAN, 1.0]).nan_to_num(nan=2.0).tolist() == [2, 1]
