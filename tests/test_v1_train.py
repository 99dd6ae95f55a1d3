"""Optimizers against the update rules that TensorFlow 1 documents, and Saver."""

import itertools

import numpy as np
import pytest

import regrad.v1 as tf
from tests.helpers.v1_session import initialized

pytestmark = pytest.mark.usefixtures("graph")


# -- the update rules, in NumPy ------------------------------------------------------------------


def gradient_descent(w, gradient, lr):
    while True:
        w = w - lr * gradient(w)
        yield w


def momentum(w, gradient, lr, mu, nesterov=False):
    accumulated = np.zeros_like(w)
    while True:
        g = gradient(w)
        accumulated = mu * accumulated + g
        w = w - (lr * g + lr * mu * accumulated if nesterov else lr * accumulated)
        yield w


def adam(w, gradient, lr=0.001, b1=0.9, b2=0.999, epsilon=1e-8):
    m = v = np.zeros_like(w)
    for t in itertools.count(1):
        g = gradient(w)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        w = w - lr * np.sqrt(1 - b2**t) / (1 - b1**t) * m / (np.sqrt(v) + epsilon)
        yield w


def rmsprop(w, gradient, lr, decay=0.9, mu=0.0, epsilon=1e-10, centered=False):
    square, mean, step = np.ones_like(w), np.zeros_like(w), np.zeros_like(w)
    while True:
        g = gradient(w)
        square = decay * square + (1 - decay) * g * g
        mean = decay * mean + (1 - decay) * g if centered else mean
        step = mu * step + lr * g / np.sqrt(square - mean * mean + epsilon)
        w = w - step
        yield w


def adagrad(w, gradient, lr, initial=0.1):
    accumulated = np.full_like(w, initial)
    while True:
        g = gradient(w)
        accumulated = accumulated + g * g
        w = w - lr * g / np.sqrt(accumulated)
        yield w


START, TARGET, SCALE = np.array([[1.0, -2.0], [3.0, 1.0]]), 0.5, [1.0, 5.0]
OPTIMIZERS = {
    "gradient descent": (
        lambda: tf.train.GradientDescentOptimizer(0.1),
        lambda w, g: gradient_descent(w, g, 0.1),
    ),
    "momentum": (
        lambda: tf.train.MomentumOptimizer(0.02, 0.9),
        lambda w, g: momentum(w, g, 0.02, 0.9),
    ),
    "nesterov": (
        lambda: tf.train.MomentumOptimizer(0.02, 0.9, use_nesterov=True),
        lambda w, g: momentum(w, g, 0.02, 0.9, nesterov=True),
    ),
    "adam": (lambda: tf.train.AdamOptimizer(), adam),
    "adam with options": (
        lambda: tf.train.AdamOptimizer(0.1, beta1=0.8, beta2=0.99, epsilon=0.1),
        lambda w, g: adam(w, g, 0.1, 0.8, 0.99, 0.1),
    ),
    "rmsprop": (lambda: tf.train.RMSPropOptimizer(0.05), lambda w, g: rmsprop(w, g, 0.05)),
    "rmsprop with momentum": (
        lambda: tf.train.RMSPropOptimizer(0.05, decay=0.8, momentum=0.5, epsilon=0.01),
        lambda w, g: rmsprop(w, g, 0.05, 0.8, 0.5, 0.01),
    ),
    "rmsprop, centered": (
        lambda: tf.train.RMSPropOptimizer(0.05, epsilon=1e-3, centered=True),
        lambda w, g: rmsprop(w, g, 0.05, epsilon=1e-3, centered=True),
    ),
    "adagrad": (lambda: tf.train.AdagradOptimizer(0.5), lambda w, g: adagrad(w, g, 0.5)),
    "adagrad with a start": (
        lambda: tf.train.AdagradOptimizer(0.5, initial_accumulator_value=1.0),
        lambda w, g: adagrad(w, g, 0.5, 1.0),
    ),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates(session, name, dtype):
    optimizer, reference = OPTIMIZERS[name]
    w, scale = tf.Variable(START.astype(dtype)), np.asarray(SCALE, dtype)
    step = optimizer().minimize(tf.reduce_sum(tf.square(w - dtype(TARGET)) * scale))
    initialized(session)
    due = reference(START, lambda w: 2 * (w - TARGET) * SCALE)
    for expected in itertools.islice(due, 6):
        session.run(step)
        tolerance = 1e-5 if dtype == np.float32 else 1e-7  # epsilon and lr are float32 in TF
        np.testing.assert_allclose(session.run(w), expected, rtol=tolerance, atol=tolerance)


def test_state_of_optimizers_is_no_trainable_variable():
    w = tf.Variable(1.0)
    tf.train.AdamOptimizer().minimize(w * w)
    assert tf.trainable_variables() == [w]
    assert len(tf.global_variables()) > 1


def test_state_belongs_to_the_session_and_is_initialised_again(session):
    w = tf.Variable(1.0)
    step = tf.train.MomentumOptimizer(0.1, 0.9).minimize(w * w)
    seen = []
    for _ in range(2):
        initialized(session)
        for _ in range(3):
            session.run(step)
        seen.append(session.run(w))
    assert seen[0] == seen[1]


# -- minimize and its parts ----------------------------------------------------------------------


def test_minimize_returns_one_op(session):
    w = tf.Variable(1.0)
    step = tf.train.GradientDescentOptimizer(0.1).minimize(w * w)
    assert (step.name, step.type) == ("GradientDescent", "NoOp")
    assert initialized(session).run(step) is None


def test_global_step_is_counted(session):
    w, count = tf.Variable(1.0), tf.Variable(0, trainable=False)
    step = tf.train.GradientDescentOptimizer(0.1).minimize(w * w, global_step=count, name="s")
    initialized(session)
    assert [session.run(step) for _ in range(3)] == [None] * 3
    assert (session.run(count), step.name.split("/")[0]) == (3, "s")


def test_gradients_come_in_order_and_may_be_none():
    a, b = tf.Variable(1.0), tf.Variable(2.0)
    tf.Variable(3.0, trainable=False)
    c = tf.Variable(4.0)
    pairs = tf.train.GradientDescentOptimizer(0.1).compute_gradients(c * a)
    assert [v for _, v in pairs] == [a, b, c]
    assert [g is None for g, _ in pairs] == [False, True, False]


def test_gradients_may_be_changed_before_they_are_applied(session):
    a, b = tf.Variable(1.0), tf.Variable(2.0)
    optimizer = tf.train.GradientDescentOptimizer(0.1)
    pairs = optimizer.compute_gradients(a * a * 50.0)
    clipped = [(g if g is None else tf.clip_by_value(g, -1.0, 1.0), v) for g, v in pairs]
    initialized(session).run(optimizer.apply_gradients(clipped))
    np.testing.assert_allclose(session.run([a, b]), [0.9, 2.0], rtol=1e-6)


def test_var_list_chooses(session):
    a, b = tf.Variable(1.0), tf.Variable(1.0, trainable=False)
    step = tf.train.GradientDescentOptimizer(0.25).minimize(a * a + b * b, var_list=[b])
    initialized(session).run(step)
    assert session.run([a, b]) == [1.0, 0.5]


@pytest.mark.parametrize("kind", ["placeholder", "variable"])
def test_the_learning_rate_may_be_a_tensor(session, kind):
    w = tf.Variable(1.0)
    rate = tf.placeholder(tf.float32, []) if kind == "placeholder" else tf.Variable(0.25)
    step = tf.train.GradientDescentOptimizer(rate).minimize(w * w, var_list=[w])
    initialized(session).run(step, {rate: 0.25} if kind == "placeholder" else None)
    assert session.run(w) == 0.5


def test_the_learning_rate_may_fall_with_the_steps(session):
    w, count = tf.Variable(0.0), tf.Variable(0, trainable=False)
    rate = tf.train.exponential_decay(1.0, count, 2, 0.5, staircase=True)
    step = tf.train.GradientDescentOptimizer(rate).minimize(-w, global_step=count, var_list=[w])
    initialized(session)
    for _ in range(4):
        session.run(step)
    assert session.run(w) == 3.0


@pytest.mark.parametrize("optimizer", [tf.train.MomentumOptimizer, tf.train.AdagradOptimizer])
def test_gathered_rows_alone_are_updated(session, optimizer):
    w, row = tf.Variable([[1.0], [1.0]]), tf.placeholder(tf.int32, [1])
    options = {"momentum": 0.9} if optimizer is tf.train.MomentumOptimizer else {}
    step = optimizer(0.1, **options).minimize(tf.reduce_sum(tf.gather(w, row)))
    initialized(session).run(step, {row: [0]})
    first = session.run(w)
    session.run(step, {row: [1]})
    second = session.run(w)
    assert first[1] == 1.0
    assert second[0] == first[0] != 1.0
    assert second[1] == first[0]


def test_a_rule_in_force_trains_binary_weights(session, graph):
    w = tf.Variable([0.3, -0.2])
    with graph.gradient_override_map({"Sign": "Identity"}) as used:
        loss = tf.reduce_sum(tf.square(tf.sign(w) - [-1.0, -1.0]))
    step = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
    used.assert_fired()
    initialized(session)
    for _ in range(3):
        session.run(step)
    assert session.run(tf.sign(w)).tolist() == [-1.0, -1.0]


# -- errors --------------------------------------------------------------------------------------


def descent():
    return tf.train.GradientDescentOptimizer(0.1)


def test_a_loss_without_variables():
    with pytest.raises(ValueError, match="No variables to optimize"):
        descent().minimize(tf.constant(1.0))


def test_a_loss_that_no_variable_reaches():
    v = tf.Variable(1.0, name="untouched")
    with pytest.raises(ValueError, match=r"No gradients provided.*untouched"):
        descent().minimize(tf.constant(1.0))
    with pytest.raises(ValueError, match="No gradients provided"):
        descent().apply_gradients([(None, v)])
    with pytest.raises(ValueError, match="No variables provided"):
        descent().apply_gradients([])


def test_integers_are_not_trained():
    v = tf.Variable(3)
    with pytest.raises(ValueError, match="int32"):
        descent().minimize(v * v)


# -- Saver ---------------------------------------------------------------------------------------


def test_what_was_saved_is_restored_without_initialising(session, tmp_path):
    v, w = tf.Variable([1.0, 2.0], name="v"), tf.Variable(3, name="w")
    saver = tf.train.Saver()
    initialized(session)
    path = saver.save(session, str(tmp_path / "model.ckpt"))
    assert path == str(tmp_path / "model.ckpt")
    session.run([v.assign([0.0, 0.0]), w.assign(0)])
    with tf.Session() as other:
        for target in (session, other):
            saver.restore(target, path)
            assert [a.tolist() for a in target.run([v, w])] == [[1.0, 2.0], 3]
    assert tf.train.latest_checkpoint(str(tmp_path)) == path


def test_another_graph_restores_by_name(session, tmp_path):
    tf.Variable([1.0, 2.0], name="v")
    path = tf.train.Saver().save(initialized(session), str(tmp_path / "model"), global_step=7)
    assert path.endswith("model-7")
    with tf.Graph().as_default(), tf.Session() as other:
        u = tf.Variable([0.0, 0.0], name="u")
        tf.train.Saver({"v": u}).restore(other, path)
        assert other.run(u).tolist() == [1.0, 2.0]
        with pytest.raises(tf.errors.NotFoundError, match="'u'"):
            tf.train.Saver([u]).restore(other, path)


def test_only_the_listed_variables_are_saved(session, tmp_path):
    v, w = tf.Variable(1.0), tf.Variable(2.0)
    saver = tf.train.Saver([v])
    path = saver.save(initialized(session), str(tmp_path / "model"))
    session.run([v.assign(0.0), w.assign(0.0)])
    saver.restore(session, path)
    assert session.run([v, w]) == [1.0, 0.0]


def test_training_goes_on_where_it_was_saved(session, tmp_path):
    w = tf.Variable([1.0, -2.0])
    step = tf.train.AdamOptimizer(0.1).minimize(tf.reduce_sum(w * w))
    saver = tf.train.Saver()
    initialized(session).run(step)
    path = saver.save(session, str(tmp_path / "model"))
    session.run(step)
    due = session.run(w)
    with tf.Session() as other:
        saver.restore(other, path)
        other.run(step)
        assert other.run(w).tolist() == due.tolist()


def test_a_saver_needs_variables_and_a_checkpoint(session, tmp_path):
    with pytest.raises(ValueError):
        tf.train.Saver()
    v = tf.Variable(1.0)
    saver = tf.train.Saver([v])
    with pytest.raises((ValueError, tf.errors.NotFoundError)):
        saver.restore(session, str(tmp_path / "nothing"))
    assert tf.train.latest_checkpoint(str(tmp_path)) is None
