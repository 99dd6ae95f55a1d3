"""`builtin` and `forward` in rules for JAX: three times JAX's own derivative, in every way.

`test_optypes.py` has them for every op type.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import regrad as rg
from regrad.errors import RuleError
from tests.helpers.jax_model import own_vjp, slopes
from tests.jax.test_optypes import SCALED, scaled, scaled_dy, weighted


def gradients(f, xs, order=1):
    for _ in range(order):
        one = jax.grad(weighted(f), tuple(range(len(xs))))
        f = lambda *xs, one=one: jnp.concatenate([dx.ravel() for dx in one(*xs)])  # noqa: E731
    return one(*xs)


def close(got, expected):
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def numbers(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


@own_vjp(lambda dy, v: (dy / (1 + abs(v)),))
def spike(v):
    return (v > 0).astype(v.dtype)


@jax.jit
def both(a, b):
    return a * jnp.sin(b)


def pooled(x):
    return lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4


A, B, SQUARE = numbers(3), numbers(3, seed=1), numbers(2, 3)
CASES = {
    "a primitive": ("sin", jnp.sin, [A]),
    "a product": ("Mul", jnp.multiply, [A, B]),
    "a number": ("Mul", lambda x: x * 2.0, [A]),
    "another form": ("MatMul", lambda a, b: jnp.einsum("ij,kj->ik", a, b), [SQUARE, SQUARE]),
    "several outputs": ("sort", lambda a, b: lax.sort((a, b))[1], [A, B]),
    "several inputs": ("concatenate", lambda a, b: jnp.concatenate([a, b]), [A, B]),
    "attributes": ("dynamic_slice", lambda x: lax.dynamic_slice(x, (1,), (2,)), [A]),
    "a derivative of its own": (spike, spike, [A]),
    "a compiled function": (both, both, [A, B]),
    "the rule's own scale": ("AvgPool", pooled, [numbers(1, 4, 4, 2)]),
}
SMOOTH = ("a primitive", "a product", "another form", "a compiled function")


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("rule", SCALED)
@pytest.mark.parametrize("name", CASES)
def test_three_times_jaxs_gradient(name, rule):
    key, f, xs = CASES[name]
    if rule is scaled_dy and name == "several outputs":
        rule = lambda dy, builtin: builtin([3 * d for d in dy])  # noqa: E731
    ours = rg.jax.override(f, {key: rule})
    expected = [3 * dx for dx in gradients(f, xs)]
    close(gradients(ours, xs), expected)
    close(jax.jit(lambda *xs: gradients(ours, xs))(*xs), expected)
    close(gradients(jax.checkpoint(ours), xs), expected)
    stacked = [jnp.stack([x, 2 * x]) for x in xs]
    close([dx[0] for dx in jax.vmap(lambda *xs: gradients(ours, xs))(*stacked)], expected)
    for order in (2, 3) if name in SMOOTH else ():
        tripled = lambda *xs: 3 * f(*xs) - lax.stop_gradient(2 * f(*xs))  # noqa: E731
        close(gradients(ours, xs, order), gradients(tripled, xs, order))


def test_forward_mode_transposes_it():
    ours = rg.jax.override(jnp.tanh, {"Tanh": scaled})
    got = jax.jvp(ours, (A,), (B,))[1]
    np.testing.assert_allclose(got, 3 * jax.jvp(jnp.tanh, (A,), (B,))[1], rtol=1e-12)


def test_forward_of_two_inputs_is_the_op():
    times = {"Mul": lambda dy, a, b, forward: (dy * forward(a, b + 1), None)}
    np.testing.assert_allclose(slopes(rg.jax.override(lambda x: x * 2.0, times), A), 3 * A, 1e-12)


def test_the_builtin_of_a_function_is_a_value():
    ours = rg.jax.override(spike, {spike: rg.rules.builtin(spike)})
    close(gradients(ours, [A]), gradients(spike, [A]))
    ours.assert_fired()
    with pytest.raises(RuleError, match=r"builtin\(spike\) is not the gradient of 'both'"):
        rg.jax.override(both, {both: rg.rules.builtin(spike)})
