"""DeepLIFT through norms, softmax and products of JAX programs, against PyTorch and by sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from regrad.rules import lrp
from tests.torch.placed import Made

A = np.sin(np.arange(64.0) * 3).reshape(8, 8)


def standardized(x):
    mean, var = x.mean(-1, keepdims=True), jnp.var(x, -1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + 1e-5)


def attention(x):
    k, v = (x @ A).reshape(-1, 2, 4), x.reshape(-1, 2, 4)
    return jax.nn.softmax(k @ v.swapaxes(1, 2), -1) @ v


EVERY = {
    "softmax": jax.nn.softmax, "log_softmax": jax.nn.log_softmax, "glu": jax.nn.glu,
    "swiglu": lambda x: jax.nn.silu(x @ A) * (x @ A.T), "layer norm": standardized,
    "standardize": jax.nn.standardize, "attention": attention, "logsumexp": jax.nn.logsumexp,
    "maximum": lambda x: jnp.maximum(x, x @ A), "max": lambda x: x.max(-1),
    "div": lambda x: x / (1 + jnp.square(x @ A)), "log_sigmoid": jax.nn.log_sigmoid,
    "pow": lambda x: x**3, "jit": jax.jit(standardized),
}  # fmt: skip


def weighted(y):
    y = y.reshape(len(y), -1)
    return y @ np.linspace(-1, 2.3, y.shape[1])


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("name", EVERY)
def test_the_differences_are_conserved(name):
    rng = np.random.default_rng(0)
    f = EVERY[name] if name != "logsumexp" else lambda x: jax.nn.logsumexp(x, -1)
    with jax.enable_x64(True):
        x, base = jnp.asarray(rng.normal(size=(2, 8))), jnp.asarray(rng.normal(size=(1, 8)))
        found = lrp.relevance(f, x, weighted, lrp.deep_lift("jax"), reference=base)
        np.testing.assert_allclose(found.total, weighted(f(x)) - weighted(f(base)), rtol=1e-9)
        assert abs(found.missing).max() <= 1e-9 * abs(found.total).max()


def test_softmax_has_the_shares_of_pytorch():
    rng = np.random.default_rng(1)
    x, base = rng.normal(size=(2, 8)), rng.normal(size=(1, 8))
    with jax.enable_x64(True):
        given = jnp.asarray(x), weighted, lrp.deep_lift("jax")
        found = lrp.relevance(jax.nn.softmax, *given, reference=jnp.asarray(base)).inputs
    model = Made(lambda m, x: x.softmax(-1))
    x, base = torch.tensor(x), torch.tensor(base)
    due = lrp.relevance(model, x, lambda y: y @ torch.linspace(-1, 2.3, 8).double(),
                        lrp.deep_lift(), reference=base).inputs  # fmt: skip
    np.testing.assert_allclose(found, due, atol=1e-6)
