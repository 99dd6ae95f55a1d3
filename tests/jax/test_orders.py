"""`order=1`: the derivative of a gradient that rules have made, against differences of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regrad as rg
from regrad.errors import GradientError
from tests.helpers.differences import error, jacobian
from tests.helpers.jax_model import own_vjp

override = rg.jax.override
RNG = np.random.default_rng(0)
X, W1, W2 = RNG.normal(size=4), RNG.normal(size=(4, 5)), RNG.normal(size=(5, 3))
KERNEL = RNG.normal(size=(1, 1, 3))
RULES = {
    "MatMul": lambda dy, a, b: (a * ((dy / ((a @ b) ** 2 + 0.5)) @ b.T), None),
    "Tanh": lambda dy, x, y: dy * y * x,
    "Relu": lambda dy, x: dy * x * jax.nn.sigmoid(x),
}


def net(x, w=W1):
    h = jax.lax.conv_general_dilated(x.reshape(1, 1, 4), KERNEL, (1,), "SAME").reshape(1, 4)
    h = jax.nn.relu(jnp.tanh(h @ w) + 0.3)
    return jnp.sum(jnp.tanh(h @ W2) ** 2)


def scanned(x):
    def step(c, w):
        return jnp.tanh(c * w), c.sum()

    last, ys = jax.lax.scan(step, x, jnp.arange(1.0, 3.0))
    return net(last) + ys.sum()


FUNCTIONS = {
    "plain": net,
    "jit": jax.jit(net),
    "scan": scanned,
    "checkpoint": jax.checkpoint(net),
    "cond": lambda x: jax.lax.cond(x[0] < 100, net, jnp.sum, x),
    "loop": lambda x: net(jax.lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c * 1.2), x)),
    "vmap": lambda x: jax.vmap(net)(jnp.stack([x, 2 * x])).sum(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_to_third_order(name):
    f, x = FUNCTIONS[name], jnp.asarray(X)
    g = jax.grad(override(f, RULES, order=1))
    expected = jacobian(lambda x: g(jnp.asarray(x)), X, 2e-4)
    for found in (
        jax.jacrev(g)(x),
        jax.jacfwd(g)(x),
        jax.jit(jax.jacrev(g))(x),
        jax.jacrev(jax.jit(jax.grad(jax.jit(override(f, RULES, order=1)))))(x),
        jax.vmap(jax.jacrev(g))(jnp.stack([x, 2 * x]))[0],
    ):
        assert error(found, expected) < 1e-6
    assert error(jax.jacrev(jax.grad(override(f, RULES)))(x), expected) > 0.1
    along = jax.grad(lambda x: (g(x) * x).sum())
    expected = jacobian(lambda x: along(jnp.asarray(x)), X, 2e-4)
    assert error(jax.jacrev(along)(x), expected) < 1e-6
    assert error(jax.jit(jax.jacrev(along))(x), expected) < 1e-6


@pytest.mark.slow
def test_ops_that_the_explained_argument_does_not_reach():
    def by_weights(x, w):
        return jnp.sum(jnp.tanh(jnp.tanh(x) * w) ** 2)

    def of_weights(w):
        return (
            jax.grad(override(lambda x, w: net(x, jnp.tanh(w)), RULES, order=1))(X, w) ** 2
        ).sum()

    def closing_over(w):
        return (jax.grad(override(lambda x: net(x, jnp.tanh(w)), RULES, order=1))(X) ** 2).sum()

    expected = jacobian(lambda w: of_weights(jnp.asarray(w)), W1)
    for f in (of_weights, closing_over, jax.jit(of_weights), jax.jit(closing_over)):
        assert error(jax.grad(f)(jnp.asarray(W1)), expected) < 1e-6
    ours = override(by_weights, {"Tanh": RULES["Tanh"]}, order=1)
    for way in (ours, jax.jit(ours)):
        g = jax.grad(way, 1)
        expected = jacobian(lambda x, g=g: g(jnp.asarray(x), jnp.asarray(X)), X)
        assert error(jax.jacrev(g)(jnp.asarray(X), jnp.asarray(X)), expected) < 1e-6
        assert error(jax.jacfwd(jax.jit(g))(jnp.asarray(X), jnp.asarray(X)), expected) < 1e-6
    rows = jax.vmap(jax.grad(ours), (0, None))(jnp.stack([X, 2 * X]), jnp.asarray(X))
    assert np.allclose(rows[0], jax.grad(ours)(jnp.asarray(X), jnp.asarray(X)))


def test_what_ties_the_arguments_is_in_no_report():
    ours = override(lambda x, w: jnp.sum(jnp.tanh(x * w)), {"Tanh": lambda dy, y: dy * y}, order=1)
    shown = str(rg.jax.trace_gradients(ours)(jnp.asarray(X), jnp.asarray(X)))
    assert "tanh" in shown and "tie" not in shown
    outer = override(ours, {"Mul": "Mul"})
    jax.grad(jax.jit(outer), (0, 1))(jnp.asarray(X), jnp.asarray(X))
    assert "tie" not in str(outer.untouched())


@pytest.mark.slow
def test_functions_with_derivatives_of_their_own():
    @own_vjp(lambda dy, x: (dy * 3 * x * x,))
    def cube(x):
        return x**3

    def f(x):
        return jnp.sum(cube(jnp.tanh(cube(jnp.tanh(x)))) ** 2)

    for rules in (
        {cube: lambda dy, x: dy * x, "Tanh": lambda dy, x, y: dy * y * x},
        {"Tanh": lambda dy, x, builtin: builtin(dy) * rg.sin(x)},
    ):
        g = jax.grad(override(f, rules, order=1))
        expected = jacobian(lambda x, g=g: g(jnp.asarray(x)), X)
        assert error(jax.jacrev(g)(jnp.asarray(X)), expected) < 1e-6


@pytest.mark.slow
def test_the_map_of_a_linear_solve_is_refused():
    def f(x):
        return jnp.sum(jnp.linalg.solve(3 * jnp.eye(4) + jnp.outer(x, x), jnp.tanh(x)))

    x, rule = jnp.asarray(X), {"dot_general": lambda dy, a, b: (jnp.outer(dy, b), a.T @ dy)}
    assert jax.grad(override(f, rule))(x).shape == (4,)
    with pytest.raises(GradientError, match=r"'dot_general' occurs in a linear solve .*order=1"):
        override(f, rule, order=1)(x)
    g = jax.grad(override(f, {"Tanh": lambda dy, y: dy * y}, order=1))
    assert error(jax.jacrev(g)(x), jacobian(lambda x: g(jnp.asarray(x)), X)) < 1e-6
