"""`order=1` in graphs: `gradients` of what `gradients` returned, against differences."""

import numpy as np
import pytest

import regrad.v1 as tf
from regrad.errors import ArgumentError, GraphError
from tests.helpers.differences import error, jacobian

RNG = np.random.default_rng(0)
X, W1, W2 = RNG.normal(size=4), RNG.normal(size=(4, 5)), RNG.normal(size=(5, 3))
C = np.arange(1.0, 5.0)
RULES = {
    "MatMul": lambda dy, a, b: (a * ((dy / ((a @ b) ** 2 + 0.5)) @ b.T), None),
    "Tanh": lambda dy, x, y: dy * y * x,
}


def net(x):
    h = tf.tanh(tf.matmul(tf.reshape(x, (1, 4)), W1))
    return tf.reduce_sum(tf.tanh(tf.matmul(tf.nn.softmax(h), W2)) ** 2)


def waiting(x):  # for the run, which tells its shape
    return tf.reduce_sum(tf.tanh(tf.reverse(tf.tanh(x), [0])) ** 2)


@pytest.mark.parametrize("shape", [[4], None])
@pytest.mark.parametrize(("order", "f"), [(1, net), (None, net), (1, waiting)])
def test_to_third_order(graph, session, order, f, shape):
    x = tf.placeholder(tf.float64, shape)
    with graph.gradient_override_map(RULES if f is net else {"Tanh": RULES["Tanh"]}, order=order):
        y = f(x)
    (first,) = tf.gradients(y, x)
    (second,) = tf.gradients(tf.reduce_sum(first * C), x)
    (third,) = tf.gradients(tf.reduce_sum(second * C), x)
    (both,) = tf.gradients(tf.reduce_sum(first * C) + y, x)
    run = lambda t: lambda value: session.run(t, {x: value})  # noqa: E731
    second_error = error(run(second)(X), C @ jacobian(run(first), X))
    third_error = error(run(third)(X), C @ jacobian(run(second), X))
    # past the gradient the ops have their own, too
    both_error = error(run(both)(X), C @ jacobian(run(first), X) + jacobian(run(y), X))
    if order is None:
        assert second_error > 0.1
    else:
        assert max(second_error, third_error, both_error) < 1e-6


def test_loops_and_branches_and_other_orders_are_refused(graph):
    x = tf.placeholder(tf.float64, [4])
    with graph.gradient_override_map({"Tanh": lambda dy, y: dy * y}, order=1):
        with pytest.raises(GraphError, match=r"order=1: 'Tanh' .* branch or loop"):
            tf.cond(tf.constant(True), lambda: tf.tanh(x), lambda: x)
        with pytest.raises(GraphError, match=r"order=1: 'Tanh' .* branch or loop"):
            tf.while_loop(lambda c: tf.constant(False), tf.tanh, [x])
    with pytest.raises(ArgumentError, match=r"order is None .* or 1 .*, got 2"):
        graph.gradient_override_map({"Tanh": "Sigmoid"}, order=2)
