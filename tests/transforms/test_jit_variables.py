"""Variables in compiled functions: they are read and assigned as in eager mode."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import regrad as rg
from regrad.errors import ShapeError
from tests.helpers.quick import nothing_is_left_open

pytestmark = pytest.mark.usefixtures(nothing_is_left_open.__name__)


def training(mode):
    """Ten steps of gradient descent with momentum; the losses and weights."""
    rng = np.random.default_rng(0)
    w, b = rg.Variable(rng.normal(size=(3, 2)), name="w"), rg.Variable(np.zeros(2), name="b")
    m = rg.Variable(np.zeros((3, 2)), trainable=False, name="m")
    steps = rg.Variable(0, trainable=False, dtype="int32")

    @mode
    def step(x, y):
        loss, grads = rg.variable_grads(lambda: (rg.tanh(x @ w + b) - y).square().mean())
        m.assign(m * 0.9 + grads["w"])
        w.assign_sub(0.5 * m)
        b.assign_sub(0.5 * grads["b"])
        steps.assign_add(1)
        return loss

    losses = [step(rng.normal(size=(4, 3)), rng.normal(size=(4, 2))) for _ in range(10)]
    return [rg.stack(losses).numpy(), *[v.numpy() for v in (w, b, m, steps)]]


def test_training_is_what_it_is_in_eager_mode():
    for a, b in zip(training(rg.jit), training(lambda f: f), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-15)


def test_what_was_read_stays_readable_after_later_steps():
    v = rg.Variable(np.arange(4.0))
    step, blind = rg.jit(lambda: (v.assign_add(1.0), v.value)[1]), rg.jit(lambda: v.assign_add(1.0))
    blind()
    kept = [(1, v.value, v.numpy())]
    for i in range(2, 6):
        y = step()
        kept += [(i, y, y.numpy()), (i, v.value, v.numpy())]
    for _ in range(3):
        blind()
    for i, value, view in kept:
        np.testing.assert_array_equal(value.numpy(), np.arange(4.0) + i)
        np.testing.assert_array_equal(view, np.arange(4.0) + i)


def test_values_that_are_assigned_as_they_are():
    """One value for two Variables, an argument, two Variables that are swapped."""
    a, b, x = (rg.Variable(np.zeros(2)), rg.Variable(np.zeros(2)), rg.asarray(jnp.ones(2)))
    first = rg.jit(lambda: a.assign_add(10.0))
    given = rg.jit(lambda x: a.assign(x))

    @rg.jit
    def both(x):
        y = x + 1
        a.assign(y)
        b.assign(y)
        return y

    @rg.jit
    def swap():
        x, y = a.value, b.value
        a.assign(y)
        b.assign(x)

    y = both(np.ones(2))
    first(), first()
    assert (y.tolist(), a.tolist(), b.tolist()) == ([2, 2], [22, 22], [2, 2])
    for i in range(4):
        swap()
        assert (a.tolist(), b.tolist()) == (([2, 2], [22, 22]), ([22, 22], [2, 2]))[i % 2]
    given(x)
    first(), first()
    assert (x.tolist(), a.tolist()) == ([1.0, 1.0], [21.0, 21.0])
    for k in 1.0, 3.0:  # a value that is not read
        given(np.ones(2) * k)
        assert a.tolist() == [k, k]


def test_assigned_outside_between_calls():
    v = rg.Variable(1.0)
    g = rg.jit(lambda x: x * v)
    for n in (1.0, 3.0, 4.0):
        v.assign(n)
        assert g(rg.scalar(2.0)).item() == 2 * n
    assert g.cache_info().programs == 1


def test_variables_in_a_list_that_grows():
    layers = [rg.Variable(2.0)]
    f = rg.jit(lambda x: functools.reduce(lambda y, v: y * v, layers, x))
    assert f(rg.scalar(1.0)).item() == 2.0
    layers.append(rg.Variable(5.0))
    assert f(rg.scalar(1.0)).item() == 10.0
    layers[0] = rg.Variable(3.0)
    assert f(rg.scalar(1.0)).item() == 15.0


def test_an_exception_leaves_variables_as_they_were():
    v, w = rg.Variable(1.0), rg.Variable(2.0)

    @rg.jit
    def f(x):
        v.assign(x)
        w.assign_add(v)
        if x.shape == (2,):
            raise KeyError("stop")

    with pytest.raises((KeyError, ShapeError)):
        f(rg.ones((2,)))
    assert (v.item(), w.item()) == (1.0, 2.0)
    f(rg.scalar(5.0))
    assert (v.item(), w.item()) == (5.0, 7.0)
