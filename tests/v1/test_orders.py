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


@pytest.mark.parametrize("shape", [[4], None])
@pytest.mark.parametrize("order", [1, None])
def test_to_third_order(order, shape):
    with tf.Graph().as_default() as graph, tf.Session() as session:
        x = tf.placeholder(tf.float64, shape)
        with graph.gradient_override_map(RULES, order=order):
            h = tf.tanh(tf.matmul(tf.reshape(x, (1, 4)), W1))
            y = tf.reduce_sum(tf.tanh(tf.matmul(tf.nn.softmax(h), W2)) ** 2)
        (first,) = tf.gradients(y, x)
        (second,) = tf.gradients(tf.reduce_sum(first * C), x)
        (third,) = tf.gradients(tf.reduce_sum(second * C), x)
        (both,) = tf.gradients(tf.reduce_sum(first * C) + y, x)

        def run(t):
            return lambda value: session.run(t, {x: value})

        second_error = error(run(second)(X), C @ jacobian(run(first), X))
        third_error = error(run(third)(X), C @ jacobian(run(second), X))
        if order is None:
            assert second_error > 0.1
        else:
            assert max(second_error, third_error) < 1e-6
            # past the gradient the ops have their own, too
            expected = C @ jacobian(run(first), X) + jacobian(run(y), X)
            assert error(run(both)(X), expected) < 1e-6


def test_the_rule_of_a_function_that_waits_for_the_run():
    with tf.Graph().as_default() as graph, tf.Session() as session:
        x = tf.placeholder(tf.float64)
        with graph.gradient_override_map({"Tanh": lambda dy, y: dy * y}, order=1):
            y = tf.reduce_sum(tf.tanh(tf.reverse(tf.tanh(x), [0])) ** 2)
        (first,) = tf.gradients(y, x)
        (second,) = tf.gradients(first * C, x)
        run = lambda t, value: session.run(t, {x: value})  # noqa: E731
        assert error(run(second, X), C @ jacobian(lambda v: run(first, v), X)) < 1e-6


def test_loops_and_branches_and_other_orders_are_refused(graph):
    x = tf.placeholder(tf.float64, [4])
    with graph.gradient_override_map({"Tanh": lambda dy, y: dy * y}, order=1):
        with pytest.raises(GraphError, match=r"order=1: 'Tanh' .* branch or loop"):
            tf.cond(tf.constant(True), lambda: tf.tanh(x), lambda: x)
        with pytest.raises(GraphError, match=r"order=1: 'Tanh' .* branch or loop"):
            tf.while_loop(lambda c: tf.constant(False), tf.tanh, [x])
    with pytest.raises(ArgumentError, match=r"order is None .* or 1 .*, got 2"):
        graph.gradient_override_map({"Tanh": "Sigmoid"}, order=2)
