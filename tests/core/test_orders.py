"""`order=1`: the derivative of a gradient that rules have made, against differences of it."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import regrad as rg
import regrad.torch
from regrad.errors import GradientError
from tests.helpers.differences import error, jacobian
from tests.helpers.rows import close, refused, under

RNG = np.random.default_rng(0)
X = RNG.normal(size=(1, 1, 6))
FILTERS, DENSE = RNG.normal(size=(3, 1, 2)), RNG.normal(size=(8, 3))
T, HALF = rg.tensor(X, dtype="float64"), rg.tensor(0.5, dtype="float64")
RULES = {
    "MatMul": lambda dy, a, b: (a * ((dy / ((a @ b) ** 2 + 0.5)) @ b.T), None),
    "Tanh": lambda dy, x, y: dy * y * x,
    "Relu": lambda dy, x: dy * x * rg.nn.sigmoid(x),
}
BY_Y = {"Tanh": lambda dy, y: dy * y}


def net(x):
    windows = rg.stack([x[0, 0, i : i + 4] for i in range(3)])  # a convolution, as a product
    h = rg.tanh(windows.T @ FILTERS[:, 0])
    h = rg.nn.relu(rg.reshape(h, (1, 8)) + 0.2) @ DENSE
    return rg.sum(rg.tanh(h) ** 2)


def explained(f, order=1, rules=RULES):
    """The gradient of f by the rules, an explanation."""
    return lambda x: under(rules, rg.grad(f), x, order=order)


def off(g, x=X, expected=None):
    """The error of the jacobian of g by differences, of another function if it is given."""
    by_differences = jacobian(lambda x: (expected or g)(rg.tensor(x, dtype="float64")).numpy(), x)
    return error(rg.jacobian(g)(rg.tensor(x, dtype="float64")).numpy(), by_differences)


ROADS = {
    "eager": explained(net),
    "of a compiled function": explained(rg.jit(net)),
    "compiled": rg.jit(explained(net)),
    "of a checkpoint": explained(rg.checkpoint(net)),
    "a checkpoint": rg.checkpoint(explained(net)),
    "compiled, of a checkpoint": rg.jit(explained(rg.checkpoint(net))),
    "by vjp": lambda x: rg.vjp(explained(net), x)[0],
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("road", ROADS)
def test_to_third_order(road):
    g = ROADS[road]
    assert off(g, expected=ROADS["eager"]) < 1e-6
    assert off(lambda x: rg.grad(lambda x: rg.sum(g(x) * x * x))(x)) < 1e-6
    assert off(explained(net, None), expected=g) > 0.1


@rg.custom_grad
def scaled(x, save):
    t = rg.tanh(x)
    save([t, x])
    return t * x, lambda dy, saved: dy * (saved[0] + saved[1] * (1 - saved[0] ** 2))


def placed(x):
    with rg.name_scope("first"):
        h = rg.tanh(x)
    return rg.sum(rg.nn.sigmoid(rg.tanh(h)) ** 2)


def in_scopes(x):
    rules = {rg.at("first", "Tanh"): lambda dy, y: dy * y * y}
    inner = lambda x: under(rules, rg.grad(placed), x, order=1)  # noqa: E731
    return under({"Sigmoid": lambda dy, y: dy * y}, inner, x, order=1)


def loop(x):
    return rg.sum(rg.scan(lambda c, _: (rg.tanh(c), None), x, length=3)[0] ** 2)


EXACT = {
    "custom gradients": explained(lambda x: rg.sum(scaled(rg.tanh(x)) ** 2),
         rules={"Tanh": RULES["Tanh"]}),
    "places, scopes in scopes": in_scopes,
    "a loop in Python": explained(loop, rules=BY_Y),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_the_derivative_is_exact(name):
    assert off(EXACT[name], X[0, 0]) < 1e-6


def test_forward_mode_over_reverse():
    g, dx = explained(net), np.cos(X)
    expected = (jacobian(lambda x: g(rg.tensor(x)).numpy(), X) * dx).sum((-1, -2, -3))
    assert error(rg.jvp(g, [T], [dx])[1].numpy(), expected) < 1e-6


SQUARE = lambda x: rg.tanh(x) ** 2  # noqa: E731
TANH = np.tanh(0.5)
SLOPE = 4 * TANH * (1 - TANH**2)  # of the gradient 2 * tanh² by the rule


def test_a_scope_around_all_of_it_a_decorator_and_a_compiled_function():
    second = rg.grad(rg.grad(SQUARE))
    scope, f = rg.gradient_override_map(BY_Y, order=1), rg.jit(second)
    close(scope(second)(HALF), SLOPE)
    with rg.gradient_override_map(BY_Y, order=1) as used:
        # the value is differentiated for the first time, and the gradient is a gradient
        both = rg.grad(lambda x: SQUARE(x) + rg.grad(SQUARE)(x))(HALF)
    close(both, 2 * TANH**2 + SLOPE)
    used.assert_fired()
    for order in (1, None, 1):
        close(under(BY_Y, f, HALF, order=order), SLOPE if order else 4 * TANH**2, 1e-5)


def test_an_op_that_the_explained_argument_does_not_reach():
    v, x = rg.variable(rg.tensor(DENSE, dtype="float64")), rg.tensor(X[0], dtype="float64")
    relevance = lambda x: rg.sum(rg.tanh(x[:, :4] @ rg.tanh(v)[:4]) ** 2)  # noqa: E731
    g = explained(relevance, rules={key: RULES[key] for key in ("MatMul", "Tanh")})
    loss = lambda: rg.sum(g(x) ** 2)  # noqa: E731

    def at(values):
        v.assign(rg.tensor(values, dtype="float64"))
        return loss().numpy()

    (found,) = rg.variable_grads(loss)[1].values()
    assert error(found.numpy(), jacobian(at, DENSE)) < 1e-6


def test_examples_are_mapped_outside_of_the_gradients():
    rows = rg.vmap(rg.jacobian(explained(lambda x: rg.sum(SQUARE(x)), rules=BY_Y)))
    close(rows(rg.tensor(jnp.full((2, 1), 0.5))).numpy().ravel(), [SLOPE] * 2, 1e-5)


BODIES = {
    "vmap": lambda x: rg.sum(rg.vmap(rg.tanh)(x) ** 2),
    "scan": lambda x: rg.sum(rg.scan(lambda c, _: (rg.tanh(c), None), x, length=1)[0] ** 2),
}


@pytest.mark.parametrize("kind", BODIES)
def test_bodies_of_compiled_loops_are_refused_under_two_gradients(kind):
    x, g = rg.tensor(jnp.full(3, 0.5)), rg.jit(explained(BODIES[kind], rules=BY_Y))
    close(g(x), np.full(3, 2 * TANH**2), 1e-5)
    second = rg.jit(lambda x: rg.grad(lambda x: rg.sum(g(x)))(x))
    refused(lambda: second(x), GradientError, f"'Tanh' .* body of a {kind}.* in Python, map")


@pytest.mark.parametrize(
    ("from_regrad", "x"),
    [(rg.jax.from_regrad, jnp.ones(2)), (regrad.torch.from_regrad, torch.ones(2))],
)
def test_functions_for_other_libraries_are_refused(from_regrad, x):
    rules = {"Tanh": rg.rules.optional(lambda dy: dy)}
    run = lambda: under(rules, from_regrad(rg.tanh), x, order=1)  # noqa: E731
    refused(run, GradientError, r"from_regrad.*order=1 is active")
