"""What waits for the run, because it asks for sizes that only the run can tell."""

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.errors import UnknownShapeError, UnusedOverrideWarning
from tests.helpers.v1_session import run

pytestmark = pytest.mark.usefixtures("graph")


def types(graph):
    return [op.type for op in graph.get_operations()]


def test_an_override_fires_in_what_waits(graph):
    x = tf.placeholder(tf.float32)
    with graph.gradient_override_map(
        {"StridedSlice": lambda op, dy: tf.ones_like(op.inputs[0]) * 7.0}
    ) as used:
        y = x[0]
    assert "Deferred" in types(graph)
    (dx,) = tf.gradients(y, x)
    assert run(dx, {x: [1.0, 2.0]}).tolist() == [7.0, 7.0]
    used.assert_fired()


def test_the_innermost_override_fires_in_what_waits(graph):
    x = tf.placeholder(tf.float32)
    three, five = (lambda dy, k=k: dy * k for k in (3.0, 5.0))
    var = lambda x: rg.var(x, correction=1.5)  # noqa: E731
    with (
        pytest.warns(UnusedOverrideWarning),
        rg.gradient_override_map({"Square": three}) as outer,
        graph.gradient_override_map({"Square": five}),
    ):
        y = var(rg.asarray(x))
    (dx,) = tf.gradients(y, x)
    with rg.gradient_override_map({"Square": five}):
        due = rg.grad(var)(rg.tensor([1.0, 4.0, 2.0]))
    np.testing.assert_allclose(run(dx, {x: [1.0, 4.0, 2.0]}), due.numpy(), rtol=1e-6)
    assert outer.hits == []


def test_a_rule_that_asks_for_a_size_waits(graph):
    x = tf.placeholder(tf.float32, [None, 2])

    mean_like = lambda dy, x: dy / float(x.shape[0] + 0.0 * x.shape[0])  # noqa: E731

    with graph.gradient_override_map({"Identity": mean_like}) as used:
        y = tf.identity(x)
    (dx,) = tf.gradients(y, x)
    assert dx.shape.as_list() == [None, 2]
    assert run(dx, {x: np.ones((4, 2))}).tolist() == [[0.25, 0.25]] * 4
    used.assert_fired()


def test_a_rule_in_tensorflows_form_may_ask_too(graph):
    x = tf.placeholder(tf.float32, [None])
    with graph.gradient_override_map({"Identity": lambda op, dy: dy / int(op.inputs[0].shape[0])}):
        y = tf.identity(x)
    (dx,) = tf.gradients(y, x)
    assert run(dx, {x: [1.0, 1.0]}).tolist() == [0.5, 0.5]


def test_higher_orders_of_what_waits():
    x = tf.placeholder(tf.float64)
    y = tf.reduce_sum(rg.prod(rg.asarray(x), axis=0) ** 2)
    (dx,) = tf.gradients(y, x)
    (ddx,) = tf.gradients(tf.reduce_sum(dx), x)
    value = np.array([[1.0, 2.0], [3.0, 0.5]])
    f = lambda x: rg.sum(rg.prod(x, axis=0) ** 2)  # noqa: E731
    due = rg.grad(lambda x: rg.sum(rg.grad(f)(x)))(value)
    np.testing.assert_allclose(run(ddx, {x: value}), due.numpy(), rtol=1e-12)


def test_the_number_of_results_must_be_known():
    x = rg.asarray(tf.placeholder(tf.float32))
    with pytest.raises(UnknownShapeError, match="how many results"):
        rg.unstack(x)
