"""Random tensors: keys, shapes, dtypes, and gradients by the parameters."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import scipy.stats

import regrad as rg
from regrad import random
from regrad.errors import ArgumentError

DRAWS = [
    # function, the same distribution by SciPy
    (random.normal, scipy.stats.norm()), (random.truncated_normal, scipy.stats.truncnorm(-2, 2)),
    (random.uniform, scipy.stats.uniform()), (random.exponential, scipy.stats.expon()),
    (random.gumbel, scipy.stats.gumbel_r()),
]  # fmt: skip
SCALED = [
    (lambda k, n, a, b: random.normal(k, n, a, b), scipy.stats.norm(3, 2)),
    (lambda k, n, a, b: random.truncated_normal(k, n, a, b),
     scipy.stats.truncnorm(-2, 2, loc=3, scale=2)),
    (lambda k, n, a, b: random.uniform(k, n, a, a + b), scipy.stats.uniform(3, 2)),
    (lambda k, n, a, b: random.exponential(k, n, b), scipy.stats.expon(scale=2)),
    (lambda k, n, a, b: random.gumbel(k, n, a, b), scipy.stats.gumbel_r(3, 2)),
]  # fmt: skip


def keys():
    return [np.random.default_rng(0), 0, np.int64(7), jax.random.key(0), jax.random.PRNGKey(1)]


@pytest.mark.parametrize("key", keys(), ids=lambda k: type(k).__name__)
@pytest.mark.parametrize(("draw", "due"), DRAWS, ids=lambda f: getattr(f, "__name__", ""))
def test_distribution(draw, due, key):
    y = draw(key, (5000,))
    assert y.shape == (5000,)
    assert y.dtype == np.float32
    assert scipy.stats.kstest(np.asarray(y._values()), due.cdf).pvalue > 1e-4


@pytest.mark.parametrize(("draw", "due"), SCALED)
def test_distribution_with_parameters(draw, due):
    y = draw(0, (5000,), 3.0, 2.0)
    assert scipy.stats.kstest(y.numpy(), due.cdf).pvalue > 1e-4


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("draw", [d for d, _ in DRAWS])
@pytest.mark.parametrize("key", [0, jax.random.key(0)], ids=["numpy", "jax"])
def test_dtypes_and_shapes(draw, key):
    for dtype in (np.float16, np.float32, np.float64):
        assert draw(key, (2, 3), dtype=dtype).dtype == dtype
    assert draw(key).shape == draw(key, ()).shape == ()
    assert draw(key, 4).shape == (4,)
    assert draw(key, (0, 2)).shape == (0, 2)


def test_a_generator_advances_and_a_seed_and_a_key_do_not():
    generator, key = np.random.default_rng(0), jax.random.key(0)
    assert random.normal(generator, (3,)).tolist() != random.normal(generator, (3,)).tolist()
    assert random.normal(5, (3,)).tolist() == random.normal(5, (3,)).tolist()
    assert random.normal(key, (3,)).tolist() == random.normal(key, (3,)).tolist()


def test_bernoulli():
    y = random.bernoulli(0, (4000,), 0.25)
    assert y.dtype == np.bool_
    assert abs(y.numpy().mean() - 0.25) < 0.03
    assert random.bernoulli(0, None, [0.0, 1.0]).tolist() == [False, True]
    assert random.bernoulli(0, (3,), 1.0, dtype=rg.float32).tolist() == [1, 1, 1]


def test_bernoulli_has_a_gradient_under_an_override_only():
    draws = lambda p: random.bernoulli(0, (4,), p, dtype=rg.float32)  # noqa: E731

    p = rg.tensor([0.1, 0.4, 0.6, 0.9])
    with rg.gradient_override_map({"Less": lambda dy, a, b: (None, rg.astype(dy, b.dtype))}):
        assert rg.grad(draws)(p).tolist() == [1, 1, 1, 1]
    assert rg.grad(draws, unconnected="zero")(p).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("key", [0, jax.random.key(0)], ids=["numpy", "jax"])
def test_randint(key):
    y = random.randint(key, (1000,), -2, 3)
    assert sorted(set(y.tolist())) == [-2, -1, 0, 1, 2]
    assert y.dtype == np.int64
    assert random.randint(key, (2,), 0, 9, dtype=np.int32).dtype == np.int32
    with pytest.raises(ArgumentError, match=r"low must be less than high, got \[5, 5\)"):
        random.randint(key, (2,), 5, 5)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("key", [0, jax.random.key(0)], ids=["numpy", "jax"])
def test_permutation(key):
    assert sorted(random.permutation(key, 6).tolist()) == [0, 1, 2, 3, 4, 5]
    x = rg.reshape(rg.arange(12, dtype=rg.float32), (4, 3))
    y = random.permutation(key, x)
    assert sorted(y.tolist()) == x.tolist()
    columns = random.permutation(key, x, axis=1)
    assert sorted(rg.matrix_transpose(columns).tolist()) == rg.matrix_transpose(x).tolist()
    weights = rg.astype(rg.arange(12), rg.float32).reshape((4, 3))
    dx = rg.grad(lambda x: random.permutation(key, x) * weights)(x)
    assert random.permutation(key, dx).tolist() == weights.tolist()


def test_differentiable_in_the_parameters():
    loss = lambda mean, stddev: (random.normal(0, (4, 3), mean, stddev) ** 3).sum()  # noqa: E731

    mean, stddev = rg.tensor([0.1, 0.2, 0.3]), rg.tensor([[1.0], [2.0], [0.5], [1.5]])
    noise = random.normal(0, (4, 3)).numpy()
    y = mean.numpy() + stddev.numpy() * noise
    d_mean, d_stddev = rg.grads(loss)([mean, stddev])
    np.testing.assert_allclose(d_mean.numpy(), (3 * y**2).sum(0), rtol=1e-5)
    np.testing.assert_allclose(
        d_stddev.numpy(), (3 * y**2 * noise).sum(1, keepdims=True), rtol=1e-5
    )


def test_uniform_is_differentiable_in_its_bounds():
    u = random.uniform(0, (3,)).numpy()
    low, high = rg.grads(lambda low, high: random.uniform(0, (3,), low, high).sum())([1.0, 4.0])
    np.testing.assert_allclose([low.numpy(), high.numpy()], [(1 - u).sum(), u.sum()], rtol=1e-5)


def test_the_shape_is_that_of_the_parameters_by_default():
    assert random.normal(0, None, np.zeros((2, 1)), np.ones(3)).shape == (2, 3)
    assert random.normal(0, None, np.zeros((2, 1))).dtype == np.float64
    assert random.normal(0, None, rg.zeros((2,)), dtype=np.float64).dtype == np.float64


def test_under_jit_a_key_works_and_a_generator_is_refused():
    draw = lambda key: random.normal(key, (2,))._data  # noqa: E731

    compiled = jax.jit(draw)
    assert compiled(jax.random.key(0)).tolist() != compiled(jax.random.key(1)).tolist()
    generator = np.random.default_rng(0)
    with pytest.raises(ArgumentError, match="cannot be used under jit"):
        jax.jit(lambda x: draw(generator) + x)(1.0)
