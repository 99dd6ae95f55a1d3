"""Python that runs once, and what leaves or enters a body by ways of its own."""

from __future__ import annotations

import contextvars
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regrad as rg
from regrad.errors import GradientError
from tests.helpers.quick import MODES, nothing_is_left_open
from tests.transforms.regions import REGIONS

pytestmark = pytest.mark.usefixtures(nothing_is_left_open.__name__)
X = np.array([1.0, 2.0])


class Layer:
    """Multiplies by the number of its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return x * x * float(self.calls)


v = rg.Variable(np.array(1.0), name="v")
BODIES = REGIONS | {
    "a Variable": lambda f: lambda x: f(x) * v,
    "custom": lambda f: rg.custom_grad(lambda x: (f(x), lambda dy: 2 * x * dy)),
    "vjp in custom": lambda f: rg.custom_grad(lambda x: _with_its_vjp(f, x)),
}


def _with_its_vjp(f, x):
    y, back = rg.vjp(f, x)
    return y, lambda dy: back(dy)[0]


@pytest.mark.parametrize("name", BODIES)
def test_traced_python_runs_once(name):
    """In one program to second order, and in the derivatives of a compiled function."""
    inside, outside = Layer(), Layer()
    total = lambda x: BODIES[name](inside)(x).sum()  # noqa: E731
    first = lambda f: lambda x: rg.grad(f)(x).sum()  # noqa: E731
    f = rg.jit(lambda x: BODIES[name](outside)(x).sum())
    np.testing.assert_allclose(rg.jit(rg.grad(first(total)))(X).numpy(), [2.0, 2.0])
    np.testing.assert_allclose(rg.grad(first(f))(X).numpy(), [2.0, 2.0])
    assert inside.calls == outside.calls == 1


def test_vmap_on_jax_data_runs_once():
    layer = Layer()
    dx = rg.grad(lambda x: rg.vmap(layer)(x).sum())(jnp.asarray(X))
    np.testing.assert_allclose(dx.numpy(), 2 * X)
    assert layer.calls == 1


@pytest.mark.parametrize("split", [jax.random.split, rg.random.split])
@pytest.mark.parametrize("name", ["alone", "checkpoint", "cond", "scan"])
def test_keys_that_are_split_inside(split, name):
    def noisy(key):
        first, second = split(key)
        draw = lambda k: rg.random.normal(k, (2,), dtype="float64")  # noqa: E731
        return lambda x: x**3 * draw(first) * draw(second)

    def loss(key, x):
        return BODIES[name](lambda x: noisy(key)(x))(x).sum()

    key = jax.random.key(3)
    weight = noisy(key)(rg.asarray(np.ones(2))).numpy()
    dx = rg.jit(lambda key, x: rg.grad(lambda x: loss(key, x))(x))(key, X)
    np.testing.assert_allclose(dx.numpy(), 3 * X**2 * weight)
    f = rg.jit(loss)
    second = rg.grad(lambda x: rg.grad(lambda x: f(key, x))(x).sum())(X)
    np.testing.assert_allclose(second.numpy(), 6 * X * weight)


def test_an_eager_checkpoint_that_does_something_else_is_refused():
    with pytest.raises(GradientError, match=r"first difference is the op 'Mul'"):
        rg.grad(lambda x: rg.checkpoint(Layer())(x).sum())(X)


def test_generators_that_a_checkpoint_reaches_draw_the_same_again():
    rng = np.random.default_rng(0)
    f = rg.checkpoint(lambda x: (x * rng.normal(size=2)).sum())
    due = np.random.default_rng(0).normal(size=2)
    np.testing.assert_array_equal(rg.grad(f)(X).numpy(), due)


# -- custom gradients ------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("how", ["grad", "vjp", "checkpoint"])
def test_a_gradient_function_differentiates_under_the_scopes_of_the_call(mode, how):
    model = lambda x: rg.sign(x) + x  # noqa: E731

    def back(x, dy):
        if how == "vjp":
            return rg.vjp(model, x)[1](dy)[0]
        return rg.grad(rg.checkpoint(model) if how == "checkpoint" else model)(x, dy)

    f = rg.custom_grad(lambda x: (model(x), lambda dy: back(x, rg.sign(dy) * dy)))
    with rg.gradient_override_map({"Sign": lambda dy: dy * 3.0}) as used:
        np.testing.assert_allclose(mode(rg.grad(lambda x: f(x).sum()))(X).numpy(), [4.0, 4.0])
    used.assert_fired()
    with rg.gradient_override_map({"Sign": lambda dy: dy * 3.0}):
        value, pull = rg.vjp(f, X)
    np.testing.assert_allclose(pull(rg.ones_like(value))[0].numpy(), [4.0, 4.0])
    np.testing.assert_allclose(rg.grad(lambda x: f(x).sum())(X).numpy(), [1.0, 1.0])


@MODES
def test_a_value_that_leaves_by_a_variable_is_refused(mode):
    w = rg.Variable(np.zeros(2))

    @rg.custom_grad
    def f(x):
        w.assign(x * 2)
        return x * x, lambda dy: dy

    with pytest.raises(GradientError, match="assigned to inside a custom_grad function"):
        mode(rg.grad(lambda x: (f(x) + w * x).sum()))(X)
    assert rg.grad(lambda x: f(x).sum())(X).tolist() == [1.0, 1.0]
    assert (f(rg.asarray(X)) + w).tolist() == [3.0, 8.0]


# -- threads ---------------------------------------------------------------------------------------


def test_threads():
    with ThreadPoolExecutor(4) as pool:

        def f(x, run=lambda g, *args: g(*args)):
            part = pool.submit(run, lambda: rg.sign(x) * 2).result()
            return (part + x).sum()

        with pytest.raises(GradientError, match=r"copy_context\(\)\.run"):
            rg.grad(f)(X)
        with rg.gradient_override_map({"Sign": lambda dy: dy * 3.0}) as used:
            dx = rg.grad(lambda x: f(x, contextvars.copy_context().run))(X)
        assert dx.tolist() == [7.0, 7.0]
        used.assert_fired()
        found = list(pool.map(lambda k: rg.grad(lambda x: (x * k).sum())(X).tolist(), range(40)))
        assert found == [[float(k)] * 2 for k in range(40)]
