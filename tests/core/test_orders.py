"""`order=1`: the derivative of a gradient that rules have made, against differences of it."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import regrad as rg
import regrad.torch
from regrad.errors import ArgumentError, GradientError
from tests.helpers.differences import error, jacobian

RNG = np.random.default_rng(0)
X = RNG.normal(size=(1, 1, 6))
W = RNG.normal(size=4)  # of a sum of gradients
FILTERS, DENSE = RNG.normal(size=(3, 1, 2)), RNG.normal(size=(8, 3))
RULES = {
    "MatMul": lambda dy, a, b: (a * ((dy / ((a @ b) ** 2 + 0.5)) @ b.T), None),
    "Tanh": lambda dy, x, y: dy * y * x,
    "Relu": lambda dy, x: dy * x * rg.nn.sigmoid(x),
}


def net(x):
    windows = rg.stack([x[0, 0, i : i + 4] for i in range(3)])  # a convolution, as a product
    h = rg.tanh(windows.T @ FILTERS[:, 0])
    h = rg.nn.relu(rg.reshape(h, (1, 8)) + 0.2) @ DENSE
    return rg.sum(rg.tanh(h) ** 2)


def under(f, order=1, rules=RULES):
    """The gradient of f, an explanation by the rules."""

    def explained(x):
        with rg.gradient_override_map(rules, order=order):
            return rg.grad(f)(x)

    return explained


def of_arrays(f):
    return lambda x: f(rg.tensor(x, dtype="float64")).numpy()


ROADS = {
    "eager": under(net),
    "of a compiled function": under(rg.jit(net)),
    "compiled": rg.jit(under(net)),
    "of a checkpoint": under(rg.checkpoint(net)),
    "a checkpoint": rg.checkpoint(under(net)),
    "compiled, of a checkpoint": rg.jit(under(rg.checkpoint(net))),
    "by vjp": lambda x: rg.vjp(under(net), x)[0],
}


@pytest.mark.parametrize("road", ROADS)
def test_to_third_order(road):
    x, g = rg.tensor(X, dtype="float64"), ROADS[road]
    along = lambda x: rg.grad(lambda x: rg.sum(g(x) * x * x))(x)  # noqa: E731
    assert error(rg.jacobian(g)(x).numpy(), jacobian(of_arrays(under(net)), X)) < 1e-6
    assert error(rg.jacobian(along)(x).numpy(), jacobian(of_arrays(along), X)) < 1e-6
    assert error(rg.jacobian(under(net, None))(x).numpy(), jacobian(of_arrays(g), X)) > 0.1


def test_forward_mode_over_reverse():
    x, dx = rg.tensor(X, dtype="float64"), np.cos(X)
    dg = rg.jvp(under(net), [x], [dx])[1].numpy()
    expected = (jacobian(of_arrays(under(net)), X) * dx).sum((-1, -2, -3))
    assert error(dg, expected) < 1e-6


def test_the_two_meanings_in_closed_form():
    t = np.tanh(0.5)
    for order, second, third in (
        (1, 4 * t * (1 - t * t), (4 - 12 * t * t) * (1 - t * t)),
        (None, 4 * t * t, 8 * t * t),  # in place of tanh' = 1 - t² there is t
    ):
        g = under(lambda x: rg.tanh(x) ** 2, order, {"Tanh": lambda dy, y: dy * y})
        x = rg.tensor(0.5, dtype="float64")
        assert np.isclose(g(x).item(), 2 * t * t)
        assert np.isclose(rg.grad(g)(x).item(), second)
        assert np.isclose(rg.grad(rg.grad(g))(x).item(), third)


def test_a_scope_around_all_of_it_and_a_decorator():
    t = np.tanh(0.5)
    x = rg.tensor(0.5, dtype="float64")
    f = lambda x: rg.tanh(x) ** 2  # noqa: E731
    scope = rg.gradient_override_map({"Tanh": lambda dy, y: dy * y}, order=1)
    assert np.isclose(scope(lambda x: rg.grad(rg.grad(f))(x))(x).item(), 4 * t * (1 - t * t))
    with rg.gradient_override_map({"Tanh": lambda dy, y: dy * y}, order=1) as used:
        # the value is differentiated for the first time, and the gradient is a gradient
        both = rg.grad(lambda x: f(x) + rg.grad(f)(x))(x)
    assert np.isclose(both.item(), 2 * t * t + 4 * t * (1 - t * t))
    used.assert_fired()


def test_an_op_that_the_explained_argument_does_not_reach():
    v = rg.variable(rg.tensor(DENSE, dtype="float64"))
    x = rg.tensor(X[0], dtype="float64")

    def relevance(x):
        return rg.sum(rg.tanh(x[:, :4] @ rg.tanh(v)[:4]) ** 2)

    def loss():
        rules = {key: RULES[key] for key in ("MatMul", "Tanh")}
        return rg.sum(under(relevance, 1, rules)(x) ** 2)

    def at(values):
        v.assign(rg.tensor(values, dtype="float64"))
        return loss().numpy()

    found = rg.variable_grads(loss)[1]
    assert error(next(iter(found.values())).numpy(), jacobian(at, DENSE)) < 1e-6


def test_custom_gradients_inside():
    @rg.custom_grad
    def scaled(x, save):
        t = rg.tanh(x)
        save([t, x])
        return t * x, lambda dy, saved: dy * (saved[0] + saved[1] * (1 - saved[0] ** 2))

    g = under(lambda x: rg.sum(scaled(rg.tanh(x)) ** 2), 1, {"Tanh": RULES["Tanh"]})
    found = rg.jacobian(g)(rg.tensor(X, dtype="float64")).numpy()
    assert error(found, jacobian(of_arrays(g), X)) < 1e-6


def test_a_compiled_function_keeps_the_orders_apart():
    f = rg.jit(lambda x: rg.grad(rg.grad(lambda x: rg.tanh(x) ** 2))(x))
    x, rule, t = rg.tensor(0.5, dtype="float64"), lambda dy, y: dy * y, np.tanh(0.5)
    for order in (1, None, 1):
        with rg.gradient_override_map({"Tanh": rule}, order=order):
            expected = 4 * t * (1 - t * t) if order else 4 * t * t
            assert np.isclose(f(x).item(), expected)


def test_keys_that_name_places_and_scopes_in_scopes():
    def f(x):
        with rg.name_scope("first"):
            h = rg.tanh(x)
        return rg.sum(rg.nn.sigmoid(rg.tanh(h)) ** 2)

    def g(x):
        key = rg.at("first", "Tanh")
        inner = rg.gradient_override_map({key: lambda dy, y: dy * y * y}, order=1)
        with rg.gradient_override_map({"Sigmoid": lambda dy, y: dy * y}, order=1), inner:
            return rg.grad(f)(x)

    found = rg.jacobian(g)(rg.tensor(X, dtype="float64")).numpy()
    assert error(found, jacobian(of_arrays(g), X)) < 1e-6


@pytest.mark.parametrize("kind", ["scan", "vmap"])
def test_bodies_of_compiled_loops_are_refused_under_two_gradients(kind):
    def f(x):
        if kind == "vmap":
            return rg.sum(rg.vmap(rg.tanh)(x) ** 2)
        return rg.sum(rg.scan(lambda c, _: (rg.tanh(c), None), x, length=1)[0] ** 2)

    t = np.tanh(1.0)
    g = rg.jit(under(f, 1, {"Tanh": lambda dy, y: dy * y}))
    assert np.allclose(g(rg.tensor(jnp.ones(3))).numpy(), 2 * t * t)
    with pytest.raises(
        GradientError, match=f"order=1: 'Tanh' .* body of a {kind}.* in Python, map"
    ):
        rg.jit(lambda x: rg.grad(lambda x: rg.sum(g(x)))(x))(rg.tensor(jnp.ones(3)))


def test_loops_in_python_and_examples_mapped_outside_of_the_gradients():
    def loop(x):
        return rg.sum(rg.scan(lambda c, _: (rg.tanh(c), None), x, length=3)[0] ** 2)

    rules = {"Tanh": lambda dy, y: dy * y}
    x, g = rg.tensor(X[0, 0], dtype="float64"), under(loop, 1, rules)
    assert error(rg.jacobian(g)(x).numpy(), jacobian(of_arrays(g), X[0, 0])) < 1e-6
    rows = rg.vmap(rg.jacobian(under(lambda x: rg.sum(rg.tanh(x) ** 2), 1, rules)))
    t = np.tanh(1.0)
    found = rows(rg.tensor(jnp.ones((2, 1)))).numpy()
    assert np.allclose(found, 4 * t * (1 - t * t))


def test_functions_for_other_libraries_are_refused():
    pairs = (rg.jax.from_regrad, jnp.ones(2)), (regrad.torch.from_regrad, torch.ones(2))
    with rg.gradient_override_map({"Tanh": rg.rules.optional(lambda dy: dy)}, order=1):
        for from_regrad, x in pairs:
            with pytest.raises(GradientError, match=r"from_regrad.*order=1 is in force"):
                from_regrad(rg.tanh)(x)


@pytest.mark.parametrize("order", [0, 2, True, 1.0, "1"])
def test_other_orders_are_refused(order):
    with pytest.raises(ArgumentError, match=r"order is None .* or 1 .*, got"):
        rg.gradient_override_map({"Tanh": "Sigmoid"}, order=order)
