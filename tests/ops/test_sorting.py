"""What the samples cannot say of scans and sorting: errors, ties, dtypes, NaNs, size."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import regrad as rg
from regrad import (
    argsort,
    cumulative_max,
    cumulative_min,
    cumulative_prod,
    cumulative_sum,
    linear_recurrence,
    searchsorted,
    sort,
    top_k,
)
from regrad.ops.reduction import prod

LIBRARIES = [np.asarray, jnp.asarray, torch.asarray]


def gradient(f: Any, x: Any, as_array: Any = np.asarray) -> np.ndarray:
    return np.asarray(rg.grad(f)(rg.asarray(as_array(np.array(x, np.float64))))._values())


SCANS = [cumulative_sum, cumulative_prod, cumulative_max, cumulative_min]


@pytest.mark.parametrize("f", [cumulative_sum, cumulative_prod])
def test_dtypes_of_scans(f: Any) -> None:
    x = rg.asarray(np.array([1, 2], np.int8))
    assert f(x).dtype == np.int64
    assert f(x, include_initial=True).numpy().tolist()[1:] == f(x).numpy().tolist()
    assert f(x, dtype="float32").dtype == np.float32
    floats = rg.tensor([1.0, 2.0])
    assert rg.grad(lambda x: f(x, dtype=rg.float64).sum())(floats).dtype == np.float32
    assert cumulative_max(x).dtype == np.int8


@pytest.mark.parametrize("as_array", LIBRARIES)
def test_the_first_maximum_keeps_the_gradient(as_array: Any) -> None:
    x = [1.0, 3.0, 3.0, 2.0, 3.0, 4.0]
    dx = gradient(lambda x: cumulative_max(x).sum(), x, as_array)
    np.testing.assert_array_equal(dx, [1, 4, 0, 0, 0, 1])
    dx = gradient(lambda x: cumulative_min(-x).sum(), x, as_array)
    np.testing.assert_array_equal(dx, [-1, -4, 0, 0, 0, -1])


def test_a_nan_owns_what_follows_it() -> None:
    dx = gradient(lambda x: cumulative_max(x).sum(), [1.0, np.nan, 5.0])
    np.testing.assert_array_equal(dx, [1, 2, 0])


@pytest.mark.parametrize("as_array", LIBRARIES)
@pytest.mark.parametrize("descending", [False, True])
def test_ties_keep_their_order(as_array: Any, descending: bool) -> None:
    x = rg.asarray(as_array(np.array([2.0, 1.0, 2.0, 1.0, 2.0])))
    due = [0, 2, 4, 1, 3] if descending else [1, 3, 0, 2, 4]
    assert argsort(x, descending=descending).tolist() == due
    weights = np.arange(5.0)
    dx = gradient(lambda x: (sort(x, descending=descending) * weights).sum(), x._values(), as_array)
    np.testing.assert_array_equal(dx[due], weights)


@pytest.mark.parametrize("as_array", LIBRARIES)
def test_nan_is_largest(as_array: Any) -> None:
    x = rg.asarray(as_array(np.array([1.0, np.nan, 3.0])))
    np.testing.assert_array_equal(sort(x)._values(), [1, 3, np.nan])
    np.testing.assert_array_equal(sort(x, descending=True)._values(), [np.nan, 3, 1])
    assert top_k(x, 2)[1].tolist() == [1, 2]


@pytest.mark.parametrize("as_array", LIBRARIES)
def test_sorting_bools_and_integers(as_array: Any) -> None:
    flags = rg.asarray(as_array(np.array([True, False, True])))
    assert sort(flags, descending=True).tolist() == [True, True, False]
    whole = rg.asarray(as_array(np.array([3, 1, 2], np.uint8)))
    assert argsort(whole, descending=True).tolist() == [0, 2, 1]
    assert argsort(whole).dtype == np.int64
    assert top_k(whole, 1)[1].dtype == searchsorted(whole, whole).dtype == np.int64


@pytest.mark.parametrize("axis", [0, 1])
def test_top_k_of_many(axis: int) -> None:
    rng = np.random.default_rng(0)
    for x in (
        rng.permutation(2500).reshape(50, 50).astype(float),
        rng.integers(0, 9, (50, 50)),  # ties
        np.where(rng.random((50, 50)) < 0.1, np.nan, rng.random((50, 50))),
    ):
        due = argsort(x, axis=axis, descending=True).numpy().take(range(5), axis)
        values, indices = top_k(x, 5, axis=axis)
        np.testing.assert_array_equal(indices.numpy(), due)
        np.testing.assert_array_equal(values.numpy(), np.take_along_axis(x, due, axis))


def test_top_k_whose_values_are_not_used() -> None:
    indices = top_k(rg.tensor([1.0, 3.0, 2.0]), 2)[1]
    dx = gradient(lambda x: (x[indices] * x[indices]).sum(), [1.0, 3.0, 2.0])
    np.testing.assert_array_equal(dx, [0, 6, 4])


def test_indices_are_free_of_the_tape() -> None:
    def f(x: Any) -> Any:
        assert np.asarray(argsort(x)).tolist() == [1, 0]
        assert np.asarray(top_k(x, 1)[1]).tolist() == [0]
        return x.sum()

    np.testing.assert_array_equal(gradient(f, [2.0, 1.0]), 1)


def test_a_long_recurrence_agrees_with_a_loop() -> None:
    rng = np.random.default_rng(0)
    x, decay = rng.normal(size=1000), rng.uniform(-1, 1, 1000)
    due = np.array(x)
    for k in range(1, 1000):
        due[k] += decay[k] * due[k - 1]
    np.testing.assert_allclose(linear_recurrence(x, decay).numpy(), due, rtol=1e-10, atol=1e-12)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("reverse", [False, True])
def test_wide_recurrences_agree_between_libraries(axis: int, reverse: bool) -> None:
    rng = np.random.default_rng(0)
    x, decay = rng.normal(size=(2, 300, 300)), rng.uniform(-1, 1, (2, 300, 300))
    x, decay = (np.moveaxis(a[:, :7], 1, axis) for a in (x, decay))
    ours = linear_recurrence(x, decay, axis=axis, reverse=reverse)
    theirs = linear_recurrence(jnp.asarray(x), jnp.asarray(decay), axis=axis, reverse=reverse)
    np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("f", [cumulative_prod, prod])
def test_second_order_of_products_agrees_with_jax(f: Any) -> None:
    theirs = {cumulative_prod: jnp.cumprod, prod: jnp.prod}[f]
    x = np.array([1.2, 0.0, -0.7, 0.0, 1.5, 0.9])
    weights = np.cos(np.arange(6.0))

    scalar = lambda x, f=f: (f(x * x + x) * weights).sum()  # noqa: E731

    ours = gradient(lambda x: (rg.grad(scalar)(x) * weights).sum(), x)
    inner = jax.grad(lambda x: scalar(x, theirs))
    np.testing.assert_allclose(ours, jax.grad(lambda x: (inner(x) * weights).sum())(x), atol=1e-12)


@pytest.mark.slow
def test_scans_under_jax_jit() -> None:
    def f(x: Any) -> Any:
        def loss(t: Any) -> Any:
            return (sort(t) * cumulative_prod(t) * cumulative_max(t) * top_k(t, 3)[0]).sum()

        return rg.grad(loss)(rg.asarray(x))._data

    x = jnp.asarray([0.5, 2.0, 1.0])
    np.testing.assert_allclose(jax.jit(f)(x), f(x), rtol=1e-12)
