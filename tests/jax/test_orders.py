"""`order=1`: the derivative of a gradient that rules have made, against differences of it.

And rules with parameters that learn, against jax.custom_vjp functions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import regrad as rg
from regrad.errors import ArgumentError, GradientError, RuleError
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


# -- parameters that learn -------------------------------------------------------------------------

ROWS = np.random.default_rng(0).normal(size=(4, 5)) * 4
learns = rg.rules.learns


def lsq(dy, x, step):  # the step size of a quantizer, Esser et al. (2020)
    inside = (jnp.abs(x) <= 3).astype(dy.dtype)
    return dy * inside / step, {"step": 0.1 * jnp.sum(dy * (jnp.round(x) - x * inside / step))}


def slope(dy, x, beta):  # a surrogate whose steepness is learned
    s = 1 - jnp.tanh(beta * x) ** 2
    return dy * beta * s, {"beta": jnp.sum(dy * x * s)}


def by_hand(value, rule, name):
    """A function of x and a parameter, whose own derivative counts at every order."""

    def backward(dy, x, p):
        dx, found = rule(dy, x, p)
        return dx, found[name]

    return own_vjp(backward)(lambda x, p: value(x))


def twice(f, x):
    return jnp.sum(f(x * 2) ** 2) + jnp.sum(jnp.sin(f(jnp.cos(x))))


def to_second_order(loss, x, p):
    first = jax.grad(loss, (0, 1))

    def squares(x, p):
        dx, dp = first(x, p)
        return jnp.sum(dx**2) + dp**2

    return [*first(x, p), *jax.grad(squares, (0, 1))(x, p)]


def check(found, expected, rtol=1e-12):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


def test_a_parameter_of_a_batch_and_of_one_example():
    x, p = jnp.asarray(ROWS), jnp.asarray(1.3)
    hand = by_hand(jnp.sign, slope, "beta")
    expected = jax.grad(lambda x, p: twice(lambda z: hand(z, p), x), (0, 1))(x, p)

    def ours(x, p):
        return override(lambda x: twice(jnp.sign, x), {"Sign": learns(slope, beta=p)})(x)

    many, ps = jnp.stack([x, x / 2]), jnp.stack([p, p + 0.1])
    for axes, given in (((0, 0), ps), ((0, None), p)):
        each = jax.vmap(jax.grad(ours, (0, 1)), axes)(many, given)
        check([part[0] for part in each], expected)


def looped(x, sign):
    return jnp.sum(lax.scan(lambda c, t: (sign(c) + c * x * t, c), x, jnp.arange(3.0))[0])


def branched(x, sign):
    return jnp.sum(lax.cond(jnp.sum(x) > 0, lambda x: sign(2 * x), lambda x: x + 1, x))


def batched(x, sign):
    step = lambda c, r: lax.scan(lambda c, _: (jax.jit(sign)(c) + c * r, None), c, length=2)[0]  # noqa: E731
    return jnp.sum(jax.vmap(lambda r: step(r, r))(x))


def kept(x, sign):
    return jnp.sum(jax.checkpoint(lambda x: sign(x) * x)(x))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("f", [looped, branched, batched, kept])
def test_in_programs_within(f):
    x, p = jnp.asarray(ROWS / 8), jnp.asarray(1.3)
    hand = by_hand(jnp.sign, slope, "beta")
    expected = to_second_order(lambda x, p: f(x, lambda z: hand(z, p)), x, p)

    def ours(x, p):
        return override(lambda x: f(x, jnp.sign), {"Sign": learns(slope, beta=p)})(x)

    check(jax.jit(lambda x, p: to_second_order(ours, x, p))(x, p), expected, 1e-11)
    check(jax.grad(ours, (0, 1))(x, p), expected[:2], 1e-11)


def test_a_loop_without_a_gradient():
    def f(x):
        return lax.while_loop(lambda c: jnp.sum(jnp.sign(c) + c) < 100, lambda c: 2 * c + 1, x)

    ours = override(f, {"Sign": learns(slope, beta=jnp.asarray(1.0))})
    check([ours(jnp.ones(3))], [f(jnp.ones(3))])


@pytest.mark.slow
def test_matrices_and_builtin():
    a, b, p = jnp.asarray(ROWS), jnp.asarray(ROWS[:2].T), jnp.asarray(2.0)

    def rule(dy, builtin, a, b, gain):
        return *(builtin(dy) * gain), {"gain": jnp.sum(dy * (a @ b))}

    def ours(a, b, p):
        return jnp.sum(override(jnp.matmul, {"MatMul": learns(rule, gain=p)})(a, b))

    ones = np.ones((4, 2))
    expected = [2 * ones @ b.T, 2 * a.T @ ones, np.sum(ROWS @ ROWS[:2].T)]
    check(jax.grad(ours, (0, 1, 2))(a, b, p), expected)
    check(jax.jit(jax.grad(ours, (0, 1, 2)))(a, b, p), expected)


# -- refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [2.0, np.ones(2), jnp.arange(2), rg.tensor(1.0)])
def test_what_is_not_an_array_of_floats(value):
    with pytest.raises(ArgumentError, match="step expected a JAX array of floats"):
        override(jnp.round, {"Round": learns(lsq, step=value)})


def test_answers_without_the_parameter():
    ours = override(jnp.round, {"Round": learns(lambda dy, step: dy, step=jnp.asarray(1.0))})
    with pytest.raises(
        RuleError, match="has the parameters step, but did not return their gradients by name"
    ):
        jax.grad(lambda x: jnp.sum(ours(x)))(jnp.ones(2))
    with pytest.raises(ArgumentError, match="order=1 uses the ops' own"):
        override(jnp.round, {"Round": learns(lsq, step=jnp.asarray(1.0))}, order=1)


def test_where_a_parameter_cannot_be_handed():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")
    f = jax.shard_map(jnp.round, mesh=mesh, in_specs=spec, out_specs=spec)
    ours = override(f, {"Round": learns(lsq, step=jnp.asarray(1.0))})
    with pytest.raises(GradientError, match=r"inside shard_map .*, into which regrad cannot pass"):
        ours(jnp.ones(2))


def test_a_rule_that_closes_over_an_argument_is_told_to_learn_it():
    def loss(p, x, make):
        return jnp.sum(p * override(jnp.tanh, {"tanh": make(p)})(x))

    p, x = jnp.float32(2.0), jnp.array([0.3, 0.5])
    by_both = jax.grad(loss, argnums=(0, 1))
    with pytest.raises(GradientError, match=r"closes over an array .*learns\(rule, name=array\)"):
        by_both(p, x, lambda p: lambda dy: dy * p)
    parameter = lambda p: learns(lambda dy, p: (dy * p, {"p": 0 * p}), p=p)  # noqa: E731
    constant = lambda p, q=jax.lax.stop_gradient: (lambda q: lambda dy: dy * q)(q(p))  # noqa: E731
    for make in (parameter, constant):
        by_p, by_x = by_both(p, x, make)
        np.testing.assert_allclose(by_p, np.tanh(x).sum(), 1e-6)
        np.testing.assert_allclose(by_x, [4.0, 4.0])
