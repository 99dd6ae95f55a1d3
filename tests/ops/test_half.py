"""Reductions of more elements than a half can count, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regrad as rg

COUNT = 70_000  # float16 ends at 65,504; bfloat16 rounds numbers above 256
NUMBERS = np.random.default_rng(0).normal(size=COUNT)
ONES, ZEROS = np.ones(COUNT), np.zeros(COUNT)


def pooled(x, pad="valid", size=280):
    return rg.nn.avg_pool(x.reshape(1, 280, 250, 1), (size, 250), (size, 250), pad).sum()


CASES = {
    "mean": (rg.mean, ONES),
    "mean over an axis": (lambda x: rg.mean(x.reshape(COUNT, 1), axis=0).sum(), ONES),
    "var": (rg.var, NUMBERS), "var, unbiased": (lambda x: rg.var(x, correction=1), NUMBERS),
    "std": (rg.std, NUMBERS), "moments": (lambda x: rg.nn.moments(x)[1], NUMBERS),
    "max of ties": (rg.max, ONES), "min of ties": (rg.min, ONES), "avg_pool": (pooled, ONES),
    "avg_pool at an edge": (lambda x: pooled(x, "same", 270), ONES),
    "mean loss": (lambda x: rg.losses.mean_squared_error(0 * x, x), NUMBERS),
    "weighted loss": (lambda x: rg.losses.compute_weighted_loss(x, ONES, "mean"), NUMBERS + 1),
    "logsumexp": (rg.logsumexp, ZEROS),
    "softmax": (lambda x: (rg.nn.softmax(x) * (x + 1)).sum(), ZEROS),
    "log_softmax": (lambda x: rg.nn.log_softmax(x)[0], ZEROS),
}  # fmt: skip


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("library", ["numpy", "jax"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_many_elements(name, dtype, library):
    f, x = CASES[name]
    half = np.asarray(jnp.asarray(x, dtype))
    exact, slopes = rg.value_and_grad(f)(rg.tensor(half.astype("float64")))
    given = rg.asarray(jnp.asarray(half)) if library == "jax" else rg.tensor(half)
    value, found = rg.value_and_grad(f)(given)
    # (a float16 of 1e-5 has about 7 bits, a bfloat16 8 bits always)
    np.testing.assert_allclose(float(value), float(exact), rtol=0.02, atol=0.01)
    found, slopes = found.numpy().astype("float64"), slopes.numpy()
    np.testing.assert_allclose(found, slopes, rtol=0.02, atol=0.02 * np.abs(slopes).max())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_halves_are_those_of_jax(dtype):
    x = jnp.asarray(np.full(3000, 0.37), dtype)
    assert float(rg.sum(rg.tensor(np.asarray(x)))) == float(jax.numpy.sum(x))
    assert float(rg.mean(rg.tensor(np.asarray(x)))) == float(jax.numpy.mean(x))
