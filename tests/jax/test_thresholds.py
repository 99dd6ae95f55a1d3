"""Spikes that JAX programs write as a comparison and a cast: the key "Threshold"."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regrad as rg
from regrad.errors import GradientError, PassedOverError, UnusedOverrideWarning
from tests.helpers.choices import choose

override = rg.jax.override
TRIANGLE = rg.rules.triangle(1.0)
V = jnp.array([-0.4, 0.1, 0.3, 0.9, 2.0])
WEIGHTS = jnp.arange(1.0, 6.0)


def where(v, a):
    return jnp.where(v > a, 1.0, 0.0)


SPELLINGS = {
    "astype": lambda v, a: (v > a).astype(v.dtype),
    "float32": lambda v, a: jnp.float32(v > a),
    "bfloat16": lambda v, a: (v > a).astype(jnp.bfloat16),
    "asarray": lambda v, a: jnp.asarray(v > a, v.dtype),
    "convert": lambda v, a: jax.lax.convert_element_type(jax.lax.gt(v, a), v.dtype),
    "greater_equal": lambda v, a: jnp.greater_equal(v, a).astype(float),
    "less": lambda v, a: (a < v).astype(float),
    "less_equal": lambda v, a: jnp.less_equal(a, v).astype(float),
    "product": lambda v, a: 1.0 * (v > a),
    "where": where,
    "where_of_integers": lambda v, a: jnp.where(v > a, 1, 0).astype(v.dtype),
    "where_turned": lambda v, a: jnp.where(v <= a, 0.0, 1.0),
    "where_like": lambda v, a: jnp.where(v > a, jnp.ones_like(v), jnp.zeros_like(v)),
    "select": lambda v, a: jax.lax.select(v > a, jnp.ones_like(v), jnp.zeros_like(v)),
    "by_integers": lambda v, a: (v > a).astype(int).astype(v.dtype),
    "jit_of_the_cast": lambda v, a: jax.jit(lambda mask: mask.astype(float))(v > a),
}
WAYS = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": lambda f: jax.vmap(f, in_axes=(0, None)),
    "scan": lambda f: lambda v, a: jax.lax.scan(lambda c, x: (c, f(x, a)), 0.0, v)[1],
    "cond": lambda f: lambda v, a: jax.lax.cond(a > -1, f, lambda v, a: 0 * f(v, a), v, a),
    "jitted_gradient": lambda f: f,
}


def close(found, expected, tolerance=1e-12):
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


def triangle_at(x):
    return np.maximum(1 - np.abs(x), 0)


def check(f, way, scale=1.0):
    changed = WAYS[way](f) if way in WAYS else f
    ours = override(changed, {"Threshold": TRIANGLE})
    gradient = jax.grad(lambda v, a: (ours(v, a).astype(float) * WEIGHTS).sum(), (0, 1))
    by_v, by_a = (jax.jit(gradient) if way == "jitted_gradient" else gradient)(V, jnp.array(0.3))
    slope = scale * np.asarray(WEIGHTS) * triangle_at(V - 0.3)
    close(by_v, slope)
    close(by_a, -slope.sum())
    y, own = ours(V, jnp.array(0.3)), f(V, jnp.array(0.3))
    assert y.dtype == own.dtype
    assert (y == own).all()


@pytest.mark.parametrize("name", SPELLINGS)
def test_each_spelling_has_the_rule(name):
    for way in ("plain", *choose(name, WAYS)):
        check(SPELLINGS[name], way)


def test_two_numbers_scale_the_gradient():
    check(lambda v, a: jnp.where(v > a, 2.5, -0.5), "plain", 3.0)
    check(lambda v, a: jnp.where(v > a, 0.3, 0.1), "plain", 0.2)


def test_thresholds_broadcast():
    f = override(lambda v, a: (v > a).astype(float).sum(), {"Threshold": TRIANGLE})
    v, a = jnp.stack([V, V]), jnp.array([[0.1], [0.5]])
    by_v, by_a = jax.grad(f, (0, 1))(v, a)
    close(by_v, triangle_at(v - a))
    close(by_a, -triangle_at(v - a).sum(1, keepdims=True))


def test_second_order_differentiates_the_rule():
    f = override(
        lambda v: ((v > 0.1).astype(float) ** 2 * v).sum(),
        {"Threshold": lambda dy, x: dy * jnp.exp(-x)},
    )
    v = jnp.array([-0.4, 0.2, 0.7])
    x = v - 0.1
    y, slope = (x > 0).astype(float), jnp.exp(-x)
    close(jax.grad(f)(v), y**2 + 2 * y * v * slope)
    expected = 4 * y * slope + 2 * v * slope**2 - 2 * y * v * slope
    close(jax.hessian(f)(v), np.diag(expected))


def test_a_rule_learns_its_slope():
    def rule(dy, x, slope):
        return dy * slope * x, {"slope": (dy * x).sum()}

    def loss(slope):
        rules = {"Threshold": rg.rules.learns(rule, slope=slope)}
        return override(lambda v: (v > 0.3).astype(float).sum(), rules)(V)

    close(jax.grad(loss)(jnp.array(2.0)), (V - 0.3).sum())


def test_a_value_is_replaced():
    f = override(
        lambda v: jnp.where(v > 0.3, 0.3, 0.1).sum(),
        {"Threshold": rg.replace(lambda x: jax.nn.sigmoid(x))},
        values=True,
    )
    s = 1 / (1 + np.exp(-(np.asarray(V) - 0.3)))
    close(f(V), (0.1 + 0.2 * s).sum())
    close(jax.grad(f)(V), 0.2 * s * (1 - s))


def test_a_key_with_a_place_chooses_a_spike():
    def f(v):
        with jax.named_scope("first"):
            y = (v > 0.3).astype(float)
        return (y + 10 * (v > 0.3).astype(float)).sum()

    ours = override(f, {rg.at("first", "Threshold"): TRIANGLE})
    close(jax.grad(ours)(V), triangle_at(V - 0.3))


@pytest.mark.parametrize("spike", [
    lambda v: v * (v > 0.3) * 0 + ((v > 0.3) & (v < 1)).astype(float),
    lambda v: v + (~(v > 0.3)).astype(float),
    lambda v: v[1:] + (v > 0.3)[1:].astype(float),
    lambda v: v + (v > 0.3).reshape(5, 1).astype(float).sum(),
    lambda v: jnp.where(v > 0.3, v, 0.0),
    lambda v: v + jnp.where(v > 0.3, 0.0, -jnp.inf),
], ids=["and", "not", "index", "view", "select", "infinite"])  # fmt: skip
def test_what_is_done_to_the_booleans_ends_the_spike(spike):
    ours = override(lambda v: spike(v).sum(), {"Threshold": rg.rules.optional(TRIANGLE)})
    jax.grad(ours)(V)
    rows = [row for row in ours.untouched().rows if row[0] == "gt (Threshold, not cast)"]
    assert [row[1] for row in rows] == ["1"]
    assert "test_thresholds.py" in rows[0][2]


def test_a_map_with_step_alone_names_the_line():
    ours = override(lambda v: (v + (v > 0.3).astype(float)).sum(), {"Step": TRIANGLE})
    with pytest.warns(UnusedOverrideWarning, match=r"at \S+:\d+, is the key 'Threshold'"):
        close(jax.grad(ours)(V), np.ones(5))


def test_heaviside_is_a_step():
    close(jax.grad(override(lambda v: jnp.heaviside(v, 0.5).sum(), {"Step": TRIANGLE}))(V),
          triangle_at(V))  # fmt: skip
    named = {"Step": lambda dy, x1, x2: dy * x1 * x2}
    close(jax.grad(override(lambda v: jnp.heaviside(v, 0.5).sum(), named))(V), 0.5 * V)


def test_a_spike_in_a_closed_function_is_refused():
    @jax.custom_vjp
    def own(v):
        return (v > 0.3).astype(float)

    own.defvjp(lambda v: (own(v), None), lambda _, dy: (7 * dy,))
    with pytest.raises(PassedOverError, match="Threshold"):
        jax.grad(override(lambda v: own(v).sum(), {"Threshold": TRIANGLE}))(V)
    kept = override(lambda v: own(v).sum(), {"Threshold": TRIANGLE}, keep=[own])
    with pytest.warns(UnusedOverrideWarning):
        close(jax.grad(kept)(V), np.full(5, 7.0))
    opened = override(lambda v: own(v).sum(), {"Threshold": TRIANGLE}, open=[own])
    close(jax.grad(opened)(V), triangle_at(V - 0.3))


def test_a_spike_that_was_differentiated_before_is_refused():
    def f(v):
        return jax.grad(lambda u: ((u > 0.3).astype(float) * u).sum())(v).sum()

    with pytest.raises(GradientError, match="'Threshold' occurs where the function"):
        override(f, {"Threshold": TRIANGLE})(V)
