"""Variables in compiled functions: they are read and assigned as in eager mode."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import regrad as rg
from regrad.errors import (
    ShapeError,
)
from tests.helpers.quick import Counting, nothing_is_left_open

pytestmark = pytest.mark.usefixtures(nothing_is_left_open.__name__)


def training(compile_it, optimizer_state=False):
    """Ten steps of gradient descent with momentum; the losses and weights."""
    rng = np.random.default_rng(0)
    w = rg.Variable(rng.normal(size=(3, 2)), name="w")
    b = rg.Variable(np.zeros(2), name="b")
    m = rg.Variable(np.zeros((3, 2)), trainable=False, name="m")
    steps = rg.Variable(0, trainable=False, dtype="int32")

    def step(x, y):
        loss, grads = rg.variable_grads(lambda: (rg.tanh(x @ w + b) - y).square().mean())
        m.assign(m * 0.9 + grads["w"])
        w.assign_sub(0.5 * m)
        b.assign_sub(0.5 * grads["b"])
        steps.assign_add(1)
        return loss

    run = rg.jit(step) if compile_it else step
    losses = [run(rng.normal(size=(4, 3)), rng.normal(size=(4, 2))) for _ in range(10)]
    return [loss.item() for loss in losses], [v.numpy() for v in (w, b, m, steps)]


def test_training_is_what_it_is_in_eager_mode():
    losses, values = training(True)
    due_losses, due = training(False)
    np.testing.assert_allclose(losses, due_losses, rtol=1e-13)
    for a, b in zip(values, due, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-15)
    assert values[-1] == 10


def test_what_is_returned_stays_readable_after_later_steps():
    v = rg.Variable(np.arange(4.0))
    step = rg.jit(lambda: (v.assign_add(1.0), v.value)[1])
    kept, views, reads = [], [], []
    for _ in range(4):
        kept.append(step())
        views.append(kept[-1].numpy())
        reads.append((v.value, v.numpy()))
    for i in range(4):
        due = np.arange(4.0) + i + 1
        for y in (kept[i].numpy(), views[i], reads[i][0].numpy(), reads[i][1]):
            np.testing.assert_array_equal(y, due)


def test_a_view_taken_before_a_step_stays():
    v = rg.Variable(np.zeros(3))
    step = rg.jit(lambda: v.assign_add(1.0))
    step()
    before = v.numpy()
    value = v.value
    for _ in range(3):
        step()
    assert before.tolist() == value.tolist() == [1.0] * 3
    assert v.numpy().tolist() == [4.0] * 3


def test_a_variable_that_is_assigned_and_not_read():
    v = rg.Variable(np.zeros(2))
    f = rg.jit(lambda x: v.assign(x * 2))
    f(np.ones(2))
    assert v.tolist() == [2.0, 2.0]
    f(np.ones(2) * 3)
    assert v.tolist() == [6.0, 6.0]


def test_two_variables_swapped():
    a, b = rg.Variable(np.array([1.0])), rg.Variable(np.array([2.0]))

    @rg.jit
    def swap():
        x, y = a.value, b.value
        a.assign(y)
        b.assign(x)

    for i in range(4):
        swap()
        assert (a.item(), b.item()) == ((2.0, 1.0) if i % 2 == 0 else (1.0, 2.0))


def test_one_value_for_two_variables():
    a, b = rg.Variable(np.zeros(2)), rg.Variable(np.zeros(2))

    @rg.jit
    def both(x):
        y = x + 1
        a.assign(y)
        b.assign(y)
        return y

    @rg.jit
    def first():
        a.assign_add(10.0)

    y = both(np.ones(2))
    first()
    first()
    assert (y.tolist(), a.tolist(), b.tolist()) == ([2, 2], [22, 22], [2, 2])


def test_an_argument_assigned_as_it_is():
    v = rg.Variable(np.zeros(2))
    f = rg.jit(lambda x: v.assign(x))
    x = rg.asarray(jnp.ones(2))
    f(x)
    step = rg.jit(lambda: v.assign_add(1.0))
    step()
    step()
    assert (x.tolist(), v.tolist()) == ([1.0, 1.0], [3.0, 3.0])


def test_assigned_outside_between_calls():
    v = rg.Variable(1.0)
    f = Counting(lambda x: x * v)
    g = rg.jit(f)
    g(rg.scalar(2.0))
    for n in (3.0, 4.0):
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


def test_a_variable_given_and_closed_over():
    v = rg.Variable(3.0)
    f = rg.jit(lambda x: x * v)
    assert f(v).item() == 9.0
    _, grads = rg.variable_grads(lambda: f(v))
    assert grads[v.name].item() == 6.0


def test_an_exception_leaves_variables_as_they_were():
    v, w = rg.Variable(1.0), rg.Variable(2.0)

    @rg.jit
    def f(x):
        v.assign(x)
        w.assign_add(v)
        if x.shape == (2,):
            raise KeyError("stop")
        return rg.scalar(0.0)

    with pytest.raises((KeyError, ShapeError)):
        f(rg.ones((2,)))
    assert (v.item(), w.item()) == (1.0, 2.0)
    f(rg.scalar(5.0))
    assert (v.item(), w.item()) == (5.0, 7.0)
