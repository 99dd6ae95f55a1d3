"""What the samples cannot say of reductions: errors, kinks, ties, dtypes, overrides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import regrad as rg
from regrad.errors import ArgumentError, ShapeError
from regrad.ops.reduction import moments, vector_norm
from tests.helpers.rows import refused

REDUCTIONS = [
    rg.sum, rg.mean, rg.prod, rg.max, rg.min, rg.var, rg.std, rg.logsumexp, vector_norm,
    rg.any, rg.all, rg.count_nonzero,
]  # fmt: skip


def gradient(f: Any, x: Any) -> np.ndarray:
    return rg.grad(f)(rg.asarray(np.array(x, np.float64))).numpy()


# -- arguments and errors ------------------------------------------------------------------------


@pytest.mark.parametrize("f", REDUCTIONS, ids=lambda f: f.__name__)
def test_axes_may_be_lists_and_must_exist(f: Any) -> None:
    x = rg.ones((2, 3, 4))
    assert f(x, axis=[0, -1]).shape == (3,)
    refused(lambda: f(x, axis=3), ShapeError, "axis 3 is out of range")
    refused(lambda: f(x, axis=(0, -3)), ArgumentError, "twice")


@pytest.mark.parametrize("f", [rg.max, rg.min, rg.argmax, rg.argmin], ids=lambda f: f.__name__)
@pytest.mark.parametrize("as_array", [np.asarray, torch.asarray])
def test_nothing_has_no_largest_element(f: Any, as_array: Any) -> None:
    x = rg.asarray(as_array(np.zeros((0, 3))))
    for options in ({}, {"axis": 0}):
        with pytest.raises(ShapeError, match=rf"{f.__name__}.*no elements.*\(0, 3\)"):
            f(x, **options)
    assert f(x, axis=1).shape == (0,)


@pytest.mark.filterwarnings("error")
def test_nothing_sums_to_the_neutral_element() -> None:
    x = rg.zeros((0, 2))
    assert rg.sum(x).item() == 0 and rg.prod(x).item() == 1
    assert np.isnan(rg.mean(x, axis=0).numpy()).all()
    assert np.isnan(rg.std(x).item())
    assert rg.logsumexp(x, axis=0).numpy().tolist() == [-np.inf, -np.inf]
    assert vector_norm(x, ord=2).item() == 0
    assert not rg.any(x).item() and rg.all(x).item()


# -- dtypes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int8", "int32", "bool"])
def test_integers(dtype: str) -> None:
    x = rg.asarray(np.array([1, 0, 1], dtype))
    assert rg.sum(x).dtype == rg.prod(x).dtype == np.int64
    for f in (rg.mean, rg.var, rg.std, rg.logsumexp, vector_norm):
        assert f(x).dtype == np.float32
    assert rg.max(x).dtype == x.dtype
    assert rg.count_nonzero(x).dtype == rg.argmax(x).dtype == np.int64
    assert rg.any(x).dtype == bool


def test_integers_in_moments() -> None:
    mean, variance = moments(rg.asarray([1, 3]))
    assert (mean.item(), variance.item()) == (2.0, 1.0)


@pytest.mark.parametrize("f", [rg.sum, rg.prod])
def test_the_gradient_has_the_dtype_of_x_when_another_is_asked_for(f: Any) -> None:
    x = rg.tensor([1.0, 2.0])
    assert f(x, dtype=rg.float64).dtype == np.float64
    assert f(rg.asarray([1, 2]), dtype="float32").dtype == np.float32
    assert rg.grad(lambda x: f(x, dtype=rg.float64))(x).dtype == np.float32


# -- ties and kinks ------------------------------------------------------------------------------


@pytest.mark.parametrize("f", [rg.max, lambda x, **o: -rg.min(-x, **o)])
def test_ties_share_equally(f: Any) -> None:
    x = [[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]
    np.testing.assert_allclose(gradient(f, x), [[0, 0.5, 0.5], [0, 0, 0]])
    rows = gradient(lambda x: f(x, axis=1).sum(), x)
    np.testing.assert_allclose(rows, [[0, 0.5, 0.5], [1 / 3] * 3])


def test_the_gradient_of_a_nan_goes_to_the_nan() -> None:
    np.testing.assert_array_equal(gradient(rg.max, [1.0, np.nan, 3.0]), [0, 1, 0])


@pytest.mark.parametrize("ord", [2, 1, np.inf, -np.inf, 3, 1.5, 0.5, -1])
@pytest.mark.filterwarnings("error")
def test_norm_of_zeros(ord: float) -> None:
    f = lambda x: vector_norm(x, ord=ord)  # noqa: E731

    assert f(rg.zeros(3)).item() == 0
    np.testing.assert_array_equal(gradient(f, np.zeros(3)), 0)
    second = gradient(lambda x: rg.grad(f)(x).sum(), np.zeros(3))
    np.testing.assert_array_equal(second, 0)


@pytest.mark.parametrize("ord", [2, 1, 3, 0.5, -1, np.inf])
def test_a_zero_among_others_gives_a_finite_norm_gradient(ord: float) -> None:
    assert np.isfinite(gradient(lambda x: vector_norm(x, ord=ord), [0.0, 1.0, -2.0])).all()


def test_std_of_equal_numbers() -> None:
    np.testing.assert_array_equal(gradient(rg.std, [2.0, 2.0]), 0)


@pytest.mark.filterwarnings("error")
def test_more_correction_than_elements() -> None:
    assert np.isnan(rg.var(rg.tensor([1.0]), correction=1).item())


@pytest.mark.filterwarnings("error")
def test_logsumexp_of_infinities() -> None:
    inf = np.inf
    x = rg.asarray(np.array([[-inf, -inf], [0.0, -inf], [inf, 1.0]]))
    np.testing.assert_array_equal(rg.logsumexp(x, axis=1).numpy(), [-inf, 0, inf])
    dx = gradient(lambda x: rg.logsumexp(x, axis=1).sum(), [[-inf, -inf], [0.0, -inf]])
    np.testing.assert_array_equal(dx, [[0, 0], [1, 0]])
    assert np.isnan(rg.logsumexp(rg.tensor([np.nan, 1.0])).item())


def test_gradients_of_nothing() -> None:
    for f in (rg.sum, rg.prod, rg.logsumexp, vector_norm, lambda x: rg.max(x, axis=1).sum()):
        assert gradient(f, np.zeros((0, 2))).shape == (0, 2)


# -- overrides fire inside compositions ----------------------------------------------------------


@pytest.mark.parametrize(("op_type", "f"), [
    ("Sqrt", rg.std), ("Sqrt", vector_norm), ("Mean", rg.var), ("Square", rg.std),
    ("Exp", rg.logsumexp), ("Max", lambda x: vector_norm(x, ord=np.inf)),
])  # fmt: skip
def test_overrides_fire_inside(op_type: str, f: Any) -> None:
    x = rg.tensor([1.0, 2.0, 4.0])
    with rg.gradient_override_map({op_type: lambda op, dy: rg.zeros_like(op.inputs[0])}) as used:
        dx = rg.grad(f)(x)
    used.assert_fired()
    assert not np.array_equal(dx.numpy(), rg.grad(f)(x).numpy())


# -- what a record keeps ---------------------------------------------------------------------------


def test_sum_and_mean_keep_nothing() -> None:
    for op_type in ("Sum", "Mean", "Unreduce", "UnreduceMean", "Cumsum"):
        assert rg.find_op(op_type).rule.keeps(frozenset({0})) == (frozenset(), False)
