"""A small JAX program with a function of JAX's and one of a user's own, and a rule for any op."""

from __future__ import annotations

import jax
import jax.numpy as jnp

M = jnp.arange(6.0).reshape(2, 3) / 7 + 0.1


def relu(x):
    """A user's own function of that name."""
    return jnp.maximum(x, 0)


def model(x):
    return jnp.sum(jax.nn.relu(x) ** 2 + jnp.tanh(jnp.maximum(x, 0)))


def seven(op, dy):
    """A rule that nothing could be mistaken for: seven for each input."""
    return [None if x.dtype == bool else x * 0 + 7 for x in op.inputs]
