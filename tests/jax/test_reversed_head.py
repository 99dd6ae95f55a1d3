"""The reversed head of a Linen model, as docs/jax/places.md writes it."""

import jax
import jax.numpy as jnp
import pytest

import regrad as rg


def test_a_linen_head_is_reversed_as_the_docs_write_it():
    linen = pytest.importorskip("flax.linen")

    class DANN(linen.Module):
        def setup(self):
            self.trunk, self.domain = linen.Dense(4), linen.Dense(2)

        def __call__(self, x):
            return self.domain(jnp.tanh(self.trunk(x)))

    def reverse(dy, builtin):
        da, db = builtin(dy)
        return -0.7 * da, db

    net, x = DANN(), jnp.ones((3, 5)) * jnp.arange(5)
    params = net.init(jax.random.key(0), x)["params"]

    def loss(params):
        return (net.apply({"params": params}, x) ** 2).sum()

    ours = rg.jax.override(loss, {rg.at("DANN.domain", "MatMul"): reverse})
    found, own = jax.jit(jax.grad(ours))(params), jax.grad(loss)(params)
    for part, scale in (("trunk", -0.7), ("domain", 1.0)):
        for name, dx in found[part].items():
            assert jnp.allclose(dx, scale * own[part][name], rtol=1e-5, atol=1e-6)
