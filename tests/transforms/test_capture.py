"""Python that runs once, and what leaves or enters a body by ways of its own."""

from __future__ import annotations

import contextvars
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regrad as rg
from regrad.errors import ArgumentError, GradientError
from tests.helpers.quick import MODES, nothing_is_left_open

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
BODIES = {
    "alone": lambda f: f,
    "checkpoint": rg.checkpoint,
    "cond": lambda f: lambda x: rg.cond(x.sum() > 0, f, rg.zeros_like, x),
    "while": lambda f: (
        lambda x: rg.while_loop(
            lambda c: c[0] < 1, lambda c: (c[0] + 1, f(c[1])), (0, x), max_steps=3
        )[1]
    ),
    "scan": lambda f: lambda x: rg.scan(lambda c, _: (c + f(x), None), x, None, length=1)[0] - x,
    "scan, checkpoint": lambda f: (
        lambda x: rg.scan(lambda c, _: (c + f(x), None), x, None, length=1, checkpoint=True)[0] - x
    ),
    "vmap": lambda f: rg.vmap(f),
    "map": lambda f: lambda x: rg.map(f, x),
    "jit": rg.jit,
    "a Variable": lambda f: lambda x: f(x) * v,
    "custom": lambda f: rg.custom_grad(lambda x: (f(x), lambda dy: 2 * x * dy)),
    "vjp in custom": lambda f: rg.custom_grad(lambda x: _with_its_vjp(f, x)),
}


def _with_its_vjp(f, x):
    y, back = rg.vjp(f, x)
    return y, lambda dy: back(dy)[0]


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("order", [1, 2])
def test_traced_python_runs_once(name, order):
    layer = Layer()
    total = lambda x: BODIES[name](layer)(x).sum()  # noqa: E731
    first = lambda x: rg.grad(total)(x).sum()  # noqa: E731
    dx = rg.jit(rg.grad(total if order == 1 else first))(X)
    assert layer.calls == 1
    np.testing.assert_allclose(dx.numpy(), 2 * X if order == 1 else [2.0, 2.0])


@pytest.mark.parametrize("name", BODIES)
def test_derivatives_from_outside_are_those_of_what_was_traced(name):
    layer = Layer()
    f = rg.jit(lambda x: BODIES[name](layer)(x).sum())
    second = rg.grad(lambda x: rg.grad(f)(x).sum())(X)
    np.testing.assert_allclose(second.numpy(), [2.0, 2.0])
    assert layer.calls == 1


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


@pytest.mark.parametrize("library", ["numpy", "jax", "torch"])
def test_generators_under_vmap_are_refused(library):
    torch = pytest.importorskip("torch") if library == "torch" else None
    x = {"numpy": X, "jax": jnp.asarray(X), "torch": torch and torch.tensor(X)}[library]
    rng = np.random.default_rng(0)
    with pytest.raises(ArgumentError, match=r"Generator 'rng'"):
        rg.vmap(lambda row: row * rng.normal())(x)
    with pytest.raises(ArgumentError, match="NumPy Generator cannot be used under vmap"):
        rg.vmap(lambda row: row * rg.random.normal(rng, ()))(x)


# -- results that are closed over ------------------------------------------------------------------

RETURNING = {
    "checkpoint": lambda w: rg.checkpoint(lambda: w)(),
    "cond": lambda w: rg.cond(w.sum() > 0, lambda: w, lambda: -w),
    "scan, carry": lambda w: rg.scan(lambda c, _: (w, None), w * 0, None, length=1)[0],
    "scan, ys": lambda w: rg.scan(lambda c, _: (c, w), 0.0, None, length=1)[1][0],
    "while": lambda w: rg.while_loop(
        lambda c: c[0] < 1, lambda c: (c[0] + 1, w), (0, w * 0), max_steps=2
    )[1],
    "fori": lambda w: rg.fori_loop(0, 1, lambda i, c: w, w * 0),
    "map": lambda w: rg.map(lambda _: w, np.zeros(1))[0],
    "vmap": lambda w: rg.vmap(lambda _: w)(np.zeros(1))[0],
    "jit": lambda w: rg.jit(lambda: w)(),
    "cond in scan": lambda w: rg.scan(
        lambda c, _: (rg.cond(c.sum() < 9, lambda: w, lambda: c), None), w * 0, None, length=1
    )[0],
}


@pytest.mark.parametrize("name", RETURNING)
@pytest.mark.parametrize("library", [np, jnp])
def test_a_body_may_return_what_it_closes_over(name, library):
    f = lambda w: (RETURNING[name](w * w) + w).sum()  # noqa: E731
    x = library.asarray(X)
    for g in (rg.grad(f), rg.jit(rg.grad(f)), rg.grad(rg.jit(f))):
        np.testing.assert_allclose(g(x).numpy(), 2 * X + 1)
        with rg.gradient_override_map({"Identity": lambda dy: dy * 100}) as used:
            given = lambda w: (rg.identity(RETURNING[name](w * w)) + w).sum()  # noqa: E731
            np.testing.assert_allclose(rg.grad(given)(x).numpy(), 200 * X + 1)
        used.assert_fired()


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
