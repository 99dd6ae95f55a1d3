"""Functions of elements at special places: overflow, zeros, infinities, NaN, large and small."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import torch

import regrad as rg
from regrad.errors import MatrixError
from regrad.testing import check_gradients
from tests.helpers.op_rows import alike, in_libraries, libraries, on, outcomes, slope
from tests.helpers.rows import refused

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinities
NAN, INF, PI = np.nan, np.inf, np.pi

# -- in each library -------------------------------------------------------------------------------

BASE, ZEROS = np.array([0.5, 2.0, 3.0]), np.zeros(6)
SIGNED, BESIDE_ZERO = [0.0, -0.0, INF, -INF, 2.0, -2.0], [0.0, -2.0, NAN, INF, -INF, 3.0]
FAR, FARTHER = [INF, 0.0, -INF, 800.0, 1.0], [0.0, INF, 0.0, -800.0, 1.0]
OVER, UNDER = [-1.0, 1.0, 1.0, -1.0], [INF, -INF, INF, -INF]
FACTORS, OTHERS = [1.0, 2.0, -1.0, NAN, 2.0], [0.0, NAN, INF, 1.0, -1.0]
COMPLEX = np.array([1.5 + 1j, complex(NAN, 2), complex(1, INF)])
MIXED = np.array([complex(INF, 1), complex(1, NAN), 1 + 1j])
ROTATION = [[np.cos(60), -np.sin(60)], [np.sin(60), np.cos(60)]]
MEDIANS = [1.0, 2.0, INF], [-INF, INF, INF, INF], [NAN, 1.0, 2.0], [INF] * 3, [-INF, 0.0, 1.0]


def parts(z):
    return rg.real(rg.nan_to_num(z)) + 2 * rg.imag(rg.nan_to_num(z))


def sinc(order):
    return functools.reduce(lambda f, _: rg.grad(f), range(order), rg.sinc)


test_values = in_libraries({
    **{f"a ** {p}, mixed": (lambda a, b: slope(slope(rg.pow), 1)(a, b), BASE, np.full(3, p),
                            BASE ** (p - 1) * (1 + p * np.log(BASE)))
       for p in (0.0, 1.0, 2.0, -1.0, 0.5)},
    "the power 0 by a": (slope(rg.pow), SIGNED, ZEROS, 0),
    "a ** 0, second": (slope(slope(lambda a: a**0.0)), SIGNED, 0),
    "logaddexp by a": (slope(rg.logaddexp), FAR, FARTHER, [1, 0, 0, 1, 0.5]),
    "logaddexp by b": (slope(rg.logaddexp, 1), FAR, FARTHER, [0, 1, 1, 0, 0.5]),
    "logaddexp, second": (slope(slope(rg.logaddexp)), FAR, FARTHER, [0, 0, 0, 0, 0.25]),
    "remainder by infinity": (slope(rg.remainder, 1), OVER, UNDER, [1, 1, 0, 0]),
    # zero beats everything: TensorFlow's convention, in the value and in all derivatives
    **{f"{f.__name__} of 0, {place}": (g, ZEROS, BESIDE_ZERO, 0)
       for f in (rg.xlogy, rg.xdivy) for place, g in [
           ("value", f), *[(f"by {i}", slope(f, i)) for i in range(2)],
           *[(f"by {i} and {k}", slope(slope(f, i), k)) for i in range(2) for k in range(2)]]},
    "xlogy of others": (rg.xlogy, FACTORS, OTHERS, [-INF, NAN, -INF, NAN, NAN]),
    "xdivy of others": (rg.xdivy, FACTORS, OTHERS, [INF, NAN, -0.0, NAN, -2.0]),
    "the slope of nan_to_num": (slope(rg.nan_to_num), [1.5, NAN, INF, -INF], [1, 0, 0, 0]),
    "nan_to_num of complex numbers": (rg.nan_to_num, COMPLEX, np.nan_to_num(COMPLEX)),
    "the slope of its parts": (slope(parts), COMPLEX, [1 + 2j, 2j, 1]),
    **{f"nan_to_num of {d.__name__}, {options}": (
        lambda x, o=options: [rg.nan_to_num(x, **o), rg.nan_to_num(x, **o).dtype],
        x := np.array([1.5, NAN, INF, -INF, -0.0], d), [np.nan_to_num(x, **options), d.__name__])
       for d in (np.float16, np.float32, np.float64)
       for options in ({}, {"nan": 3.0}, {"posinf": 4.0, "neginf": -5.0})},
    **{f"isclose of complex infinities, {equal}": (
        lambda a, b, equal=equal: rg.isclose(a, b, equal_nan=equal), MIXED, MIXED,
        np.isclose(MIXED, MIXED, equal_nan=equal)) for equal in (False, True)},
    **{f"median of {x}": (rg.median, x, np.median(x)) for x in MEDIANS},
    "the slope of a median of NaN": (slope(rg.median), [1.0, NAN, 2.0, 3.0], [0, 1, 0, 0]),
    "the slope of an infinite median": (slope(rg.median), [INF, 1.0, 2.0], [0, 0, 1]),
    **{f"sinc at 0, order {n}": (sinc(n), 0.0, due)
       for n, due in enumerate([0, -(PI**2) / 3, 0, PI**4 / 5], 1)},
    **{f"the slope of sinc at {x}": (sinc(1), x, -(PI**2) * x / 3 * (1 - PI**2 * x**2 / 10))
       for x in (1e-12, 1e-7, -1e-4, 1e-3)},
}, rtol=1e-11, atol=1e-12)  # fmt: skip


@libraries
def test_large_and_half_precision_exponentials(library):
    large = rg.linalg.expm(on(library, [[0.0, -60.0], [60.0, 0.0]]))
    np.testing.assert_allclose(large.numpy(), ROTATION, atol=1e-12)
    half = rg.linalg.expm(on(library, np.eye(2, dtype=np.float16)))
    assert half.dtype == np.float16
    np.testing.assert_allclose(half.numpy(), np.e * np.eye(2), rtol=1e-3)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("columns", [(3,), (3, 2)])
def test_a_singular_matrix_is_called_so(library, columns):
    a, b = on(library, np.ones((3, 3))), on(library, np.ones(columns))
    refused(lambda: rg.linalg.solve(a, b), MatrixError, r"(?i)singular")


@pytest.mark.parametrize("power", [0, 1, 2, 3, -1, 0.5])
def test_the_gradient_of_a_power_by_a_number_is_that_of_jax(power):
    a = np.array([0.0, -0.0, 1e-300, 2.5, -2.5, INF, -INF, NAN])
    ours, theirs = lambda a: a**power, lambda a: a**power
    with jax.enable_x64(True):
        for _ in range(3):
            ours, theirs = rg.grad(ours), jax.grad(theirs)
            alike(ours(rg.asarray(a)), np.array([theirs(value) for value in a]))


@pytest.mark.parametrize("approximate", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_gelu_is_straight_far_away_in_every_dtype(approximate, dtype):
    x = rg.tensor([-np.finfo(dtype).max, -1000.0, -50.0, 50.0, 1000.0], dtype=dtype)
    first = slope(lambda x: rg.nn.gelu(x, approximate=approximate))
    alike(first(x), [0, 0, 0, 1, 1])
    alike([slope(first)(x), slope(slope(first))(x)], [0, 0])
    assert np.isnan(first(rg.tensor([NAN])).numpy())


def test_the_two_ways_of_sinc_agree_where_they_meet():
    for n in range(1, 8):
        x = (n + 2) / PI * np.array([1 - 1e-12, 1 + 1e-12])
        a, b = rg.find_op("SincDerivative").function(rg.asarray(x), n=n).tolist()
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10 * PI**n)


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


@libraries
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float32", "complex64"])
def test_isclose_of_every_kind(library, dtype):
    a, b = np.array([0, 1, 3, 200]).astype(dtype), np.array([1, 1, 5, 199]).astype(dtype)
    x, y = on(library, a), on(library, b)
    for options in ({}, {"rtol": 0.01}, {"atol": 2}):
        due = np.isclose(a, b, **options)
        alike([rg.isclose(x, y, **options), rg.allclose(x, y, **options)], [due, due.all()])


@pytest.mark.parametrize("like", [
    lambda x: rg.ones_like(x, dtype=bool), lambda x: rg.full_like(x, 3, dtype="int32") > 2,
    lambda x: ~rg.zeros_like(x, dtype="bool"),
])  # fmt: skip
def test_a_mask_of_the_shape_of_x_is_not_on_the_path_of_the_gradient(like):
    def f(x):
        return rg.sum(rg.where(like(x), x * x, x))

    for transform in (lambda f: f, rg.jit):
        assert rg.grad(transform(f))(rg.asarray([3.0, -1.0])).tolist() == [6.0, -2.0]


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
            alike(rg.quantile(on(library, X), q, **options), np.quantile(X, q, **options))


@pytest.mark.slow
def test_a_long_axis_is_not_blurred_by_single_precision():
    x = np.arange(2**24, dtype=np.float32)
    found = rg.quantile(rg.asarray(x), 0.3, method="lower").item()
    assert found == np.quantile(x, 0.3, method="lower")


def test_quantiles_agree_with_jax_and_torch():
    q, x = [0.2, 0.7], rg.asarray(X)
    alike(rg.quantile(x, q, axis=1), jnp.quantile(X, jnp.array(q), axis=1), rtol=1e-6)
    lower = rg.quantile(x, 0.5, axis=1, method="lower")
    alike(lower, torch.tensor(X).median(1).values.numpy())


# -- single values ---------------------------------------------------------------------------------

P, SHARES, THREE = (rg.asarray(x) for x in ([0.0, 1.0, 0.5], [0.25, 0.75], [1.0, 2.0, 4.0]))
FOURTH, DEEP = rg.asarray([4.0, 1.0, 3.0]), rg.asarray([0.9, 1.0, 1.1])
SMALL = rg.asarray(np.float32(1e-30)), rg.asarray(np.float32(1e-25))
test_single_values = outcomes({
    "the entropy of a certain event": (lambda: slope(lambda p: rg.xlogy(p, p))(P),
                                       [0, 1, 1 + np.log(0.5)]),
    "small divisors do not overflow": (lambda: slope(rg.xdivy, 1)(*SMALL), -1e20),
    "xlogy of integers": (lambda: rg.xlogy(rg.asarray([0, 2]), rg.asarray([0, 1])).dtype,
                          "float32"),
    "xdivy of integers": (lambda: rg.xdivy(rg.asarray([0, 2]), rg.asarray([0, 4])), [0.0, 0.5]),
    "nan_to_num of integers": (lambda: rg.nan_to_num(rg.asarray([1, 2])).dtype, "int64"),
    "shares out of range": (lambda: rg.quantile(THREE, rg.asarray([-0.1, 1.5])), [NAN, NAN]),
    "a share under jit": (lambda: rg.jit(rg.quantile)(THREE, rg.asarray(0.75)), 3),
    "the slope by shares": (lambda: slope(lambda q: rg.quantile(THREE, q))(SHARES), [2, 4]),
    "multigammaln below its domain": (lambda: rg.multigammaln(DEEP, 3),
                                      [NAN, NAN, scipy.special.multigammaln(1.1, 3)]),
    "methods": (lambda: [FOURTH.median(), FOURTH.quantile(0.0), FOURTH.quantile([1.0], axis=0),
                         FOURTH.isclose(FOURTH + 1e-7).all(), FOURTH.allclose([4.0, 1.0, 3.1])],
                [3, 1, [4], True, False]),
    "xlogy, a method": (lambda: FOURTH.xlogy(2.0), scipy.special.xlogy([4, 1, 3], 2)),
    "sinc, a method": (lambda: (FOURTH / 8).sinc(), np.sinc([0.5, 0.125, 0.375])),
    "nan_to_num, a method": (lambda: rg.asarray([NAN, 1.0]).nan_to_num(nan=2.0), [2, 1]),
}, rtol=1e-6)  # fmt: skip


def test_lstsq_of_dependent_columns():
    a = np.array([[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]])
    ours, theirs = rg.linalg.lstsq(rg.asarray(a), [1.0, 0.0, 2.0]), np.linalg.lstsq(a, [1, 0, 2])
    np.testing.assert_allclose(ours.solution.numpy(), theirs[0])
    assert ours.rank.item() == theirs[2] == 1
    check_gradients(lambda b: rg.linalg.lstsq(rg.asarray(a), b).solution, [np.ones(3)], order=2)
    nearly = rg.asarray(a + np.array([[0, 1e-6], [0, 0], [0, 0]]))
    assert rg.linalg.lstsq(nearly, np.ones(3), rcond=1e-3).rank.item() == 1
    assert rg.linalg.lstsq(nearly, np.ones(3)).rank.item() == 2
