"""Rules for the gradients of Variables: keys `rg.at(parameter=…)` around TensorFlow 1 code."""

from __future__ import annotations

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from tests.helpers.rows import refused
from tests.helpers.v1_session import any_session, initialized, run, unused_is_fine

pytestmark = pytest.mark.usefixtures("graph")
session = any_session
W = np.float32([3.0, 4.0])


def at_w(rule, **options):
    return rg.gradient_override_map({rg.at(parameter="w"): rule}, **options)


def shortened(dy):
    return dy / rg.maximum(1.0, rg.linalg.vector_norm(dy))


def used_three_times(w):
    """A loss with the gradient 2 w + 3, by two uses and a read."""
    return tf.reduce_sum(w * w) + tf.reduce_sum(3.0 * w.read_value())


DUE = (2 * W + 3) / np.linalg.norm(2 * W + 3)


def test_the_rule_gets_the_sum_of_all_uses_once(session):
    w = tf.Variable(W, name="w")
    with at_w(shortened) as used:
        loss = used_three_times(w)
        dw = tf.gradients(loss, w)[0]
    outside = tf.gradients(used_three_times(w), w)[0]
    found = initialized(session).run([dw, outside, loss])
    np.testing.assert_allclose(found[0], DUE, rtol=1e-6)
    np.testing.assert_allclose(found[1], 2 * W + 3)
    assert found[2] == 25 + 21
    used.assert_fired()
    (hit,) = used.hits
    assert (hit.count, hit.ran, hit.path) == (1, 1, "w")


def test_the_scope_of_the_uses_decides_and_not_the_scope_of_the_gradient(session):
    w = tf.Variable(W, name="w")
    with at_w(lambda dy: dy * 10.0):
        first = tf.reduce_sum(w * w)
    with at_w(lambda dy: dy * 1000.0):
        second = tf.reduce_sum(w)
    third = tf.reduce_sum(w)
    dw = tf.gradients(first + second + third, w)[0]
    with unused_is_fine(), at_w(lambda dy: dy * 0.0):
        late = tf.gradients(third, w)[0]
    found = initialized(session).run([dw, late])
    np.testing.assert_allclose(found[0], 20 * W + 1001)
    np.testing.assert_allclose(found[1], [1.0, 1.0])


def test_scopes_of_one_depth_that_follow_each_other_keep_their_rules():
    """The same, for the Variables of regrad."""
    w = rg.Variable([1.0, 2.0], name="w")

    def f():
        with at_w(lambda dy: dy * 10.0):
            first = (w * 1.0).sum()
        with at_w(lambda dy: dy * 1000.0):
            return first + (w * 1.0).sum()

    assert rg.variable_grads(f)[1]["w"].tolist() == [1010.0, 1010.0]


@pytest.mark.parametrize("rule", [
    lambda dy, x: dy * x, lambda op, dy: dy * op.inputs[0],
    lambda dy, x, builtin: builtin(dy) * x,
])  # fmt: skip
def test_the_input_of_the_rule_is_the_value_of_the_variable(session, rule):
    w = tf.Variable(W, name="w")
    with at_w(rule):
        dw = tf.gradients(tf.reduce_sum(w * w), w)[0]
    ddw = tf.gradients(dw, w)[0]  # by the value 2 w, and by the uses 2 w, with the rule once more
    found = initialized(session).run([dw, ddw])
    np.testing.assert_allclose(found, [2 * W * W, 2 * W + 2 * W * W])


@pytest.mark.parametrize("rule", [lambda dy, x: dy * x, lambda op, dy: dy * op.inputs[0]])
def test_the_input_of_a_rule_of_identity_is_the_value_of_the_variable_that_it_reads(session, rule):
    with rg.gradient_override_map({"Identity": rule}):
        w = tf.Variable(W, name="w")
    dw = tf.gradients(tf.reduce_sum(w * w), w)[0]
    np.testing.assert_allclose(initialized(session).run(dw), 2 * W * W)


def test_a_rule_of_the_first_derivative(session):
    w = tf.Variable(W, name="w")
    with at_w(lambda dy: 10.0 * dy, order=1):
        dw = tf.gradients(tf.reduce_sum(w * w * w), w)[0]
    ddw = tf.gradients(dw, w)[0]
    found = initialized(session).run([dw, ddw])
    np.testing.assert_allclose(found[0], 30 * W * W, rtol=1e-6)
    np.testing.assert_allclose(found[1], 60 * W, rtol=1e-6)


def test_keys_of_variables():
    v, w = tf.Variable(W, name="layer/v"), tf.Variable(W, name="w")
    for key, due in (("layer.*", [2, 1]), ("layer/v", [2, 1]), (v, [2, 1]), ("**", [2, 2]),
                     (("w", v), [2, 2]), (w, [1, 2]), ("w:0", [1, 2])):  # fmt: skip
        with rg.gradient_override_map({rg.at(parameter=key): lambda dy: dy * 2.0}):
            found = tf.gradients(tf.reduce_sum(v) + tf.reduce_sum(w), [v, w])
        assert [dx[0] for dx in run(found)] == due, key


def test_a_key_that_names_no_variable_warns():
    w = tf.Variable(W, name="w")
    with (
        pytest.warns(rg.errors.UnusedOverrideWarning, match="the Variables 'w:0' were read"),
        rg.gradient_override_map({rg.at(parameter="v"): shortened}),
    ):
        tf.gradients(tf.reduce_sum(w), w)


def test_a_scope_of_one_graph_has_rules_for_its_variables(graph):
    w = tf.Variable(W, name="w")
    tf.RegisterGradient("TenfoldForW")(lambda op, dy: dy * 10.0)
    with graph.gradient_override_map({rg.at(parameter="w"): "TenfoldForW"}):
        dw = tf.gradients(tf.reduce_sum(w), w)[0]
        with tf.Graph().as_default():
            other = tf.Variable(W, name="w")
            assert run(tf.gradients(tf.reduce_sum(other), other)[0]).tolist() == [1.0, 1.0]
    assert run(dw).tolist() == [10.0, 10.0]


# -- branches, loops, reads that wait, optimizers ------------------------------------------------


def test_uses_in_branches_and_loops_count(session):
    w = tf.Variable(W, name="w")
    yes = tf.placeholder(tf.bool, [])
    with at_w(shortened) as used:
        chosen = tf.cond(yes, lambda: w * w, lambda: w * 5.0)
        looped = tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, y + w), [0, w * 1.0])[1]
        dw = tf.gradients([tf.reduce_sum(chosen), tf.reduce_sum(looped)], w)[0]
    for value, total in ((True, 2 * W + 3), (False, np.full(2, 8.0))):
        found = initialized(session).run(dw, {yes: value})
        np.testing.assert_allclose(found, total / np.linalg.norm(total), rtol=1e-6)
    assert sum(hit.count for hit in used.hits) == 1


def test_gradients_inside_of_a_branch_are_refused():
    w = tf.Variable(W, name="w")
    with at_w(shortened):
        square = lambda: tf.gradients(tf.reduce_sum(w * w), w)[0]  # noqa: E731
        words = r"rg.at\(parameter='w'\)", "inside of a branch or loop"
        refused(lambda: tf.cond(tf.constant(True), square, square), ValueError, *words)


def test_reads_that_wait_belong_to_the_sum(session):
    w = tf.Variable(W, name="w")
    with at_w(shortened):
        before = tf.reduce_sum(w * w)
        with tf.control_dependencies([w.assign(W + 1.0)]):
            after = tf.reduce_sum(3.0 * w)
        dw = tf.gradients(before + after, w)[0]
    found = initialized(session).run([after, dw])
    assert found[0] == 3 * (W + 1).sum()
    np.testing.assert_allclose(found[1], DUE, rtol=1e-6)


def test_the_initial_value_may_be_read_in_the_scope(session):
    with at_w(shortened):
        w = tf.Variable(W, name="w")
        copy = tf.Variable(w.initialized_value(), name="copy")
    session.run(copy.initializer)
    np.testing.assert_array_equal(session.run(copy), W)


def test_optimizers_apply_the_gradient_of_the_rule(session):
    with at_w(shortened) as used:
        w = tf.Variable(W, name="w")
        step = tf.train.GradientDescentOptimizer(1.0).minimize(used_three_times(w))
    initialized(session).run(step)
    np.testing.assert_allclose(session.run(w), W - DUE, rtol=1e-6)
    used.assert_fired()


def test_custom_gradients_find_variables_with_a_rule(session):
    w, x = tf.Variable(W, name="w"), tf.constant(2.0)
    with at_w(lambda dy: dy * 10.0):
        f = tf.custom_gradient(
            lambda x: (x * w, lambda dy, variables: (tf.reduce_sum(dy * w), [dy * 7.0]))
        )
        dx, dw = tf.gradients(tf.reduce_sum(f(x)), [x, w])
    found = initialized(session).run([dx, dw])
    assert found[0] == W.sum()
    assert found[1].tolist() == [70.0, 70.0]


@pytest.mark.filterwarnings("ignore::regrad.errors.UnusedOverrideWarning")
def test_an_override_of_identity_leaves_the_value_of_a_variable_alone(session):
    w = tf.Variable(W, name="w")
    scope, around = at_w(lambda dy: 3.0 * dy), {"Identity": lambda dy: -dy}
    losses = []
    with rg.gradient_override_map(around):
        losses.append(tf.reduce_sum(w * w))
        with scope:
            losses.append(tf.reduce_sum(w * w))
            losses.append(tf.reduce_sum(w * w.read_value()))  # this read is made in the scope
    with scope:
        losses.append(tf.reduce_sum(w * w))
    found = initialized(session).run([tf.gradients(loss, w)[0] for loss in losses])
    np.testing.assert_allclose(found, [2 * W, 6 * W, 0 * W, 6 * W])
