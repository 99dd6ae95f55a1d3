"""More of `tf.train`: Adadelta, Ftrl, rows, optimizers of one's own, schedules and averages.

The numbers come from loops in NumPy, and for Adadelta from PyTorch.
"""

import numpy as np
import pytest

import regrad.v1 as tf
from regrad.errors import GraphError
from tests.helpers.v1_session import initialized

pytestmark = pytest.mark.usefixtures("graph")

RNG = np.random.default_rng(7)
START, GRADIENTS = RNG.normal(size=3), RNG.normal(size=(6, 3))


def trajectory(session, optimizer):
    """The values of a variable whose gradients are given."""
    w, gradient = tf.Variable(START), tf.placeholder(tf.float64, [3])
    step = optimizer.apply_gradients([(gradient, w)])
    initialized(session)
    seen = []
    for g in GRADIENTS:
        session.run(step, {gradient: g})
        seen.append(session.run(w))
    return seen


# -- formulas ------------------------------------------------------------------------------------


def test_adadelta_is_pytorchs(session):
    import torch

    w = torch.tensor(START, requires_grad=True)
    reference = torch.optim.Adadelta([w], lr=0.5, rho=0.9, eps=1e-6)
    due = []
    for g in GRADIENTS:
        w.grad = torch.tensor(g)
        reference.step()
        due.append(w.detach().numpy().copy())
    got = trajectory(session, tf.train.AdadeltaOptimizer(0.5, rho=0.9, epsilon=1e-6))
    np.testing.assert_allclose(got, due, rtol=1e-6)


def ftrl(lr, power, l1, l2, shrinkage):
    """Algorithm 1 of McMahan et al., coordinate by coordinate, with beta = 0."""
    n, z, w = np.full(3, 0.1), np.zeros(3), START.copy()
    for g in GRADIENTS:
        for i in range(3):
            grown = n[i] + g[i] ** 2
            sigma = (grown**-power - n[i] ** -power) / lr
            z[i] += g[i] + 2 * shrinkage * w[i] - sigma * w[i]
            n[i] = grown
            scale = grown**-power / lr + 2 * l2
            w[i] = 0 if abs(z[i]) <= l1 else (np.sign(z[i]) * l1 - z[i]) / scale
        yield w.copy()


@pytest.mark.parametrize("power", [-0.5, -0.3])
@pytest.mark.parametrize("strengths", [(0.0, 0.0, 0.0), (0.4, 0.2, 0.0), (0.1, 0.0, 0.3)])
def test_ftrl(session, power, strengths):
    l1, l2, shrinkage = strengths
    optimizer = tf.train.FtrlOptimizer(
        0.5, power, 0.1, l1, l2, l2_shrinkage_regularization_strength=shrinkage
    )
    due = list(ftrl(0.5, power, *strengths))
    np.testing.assert_allclose(trajectory(session, optimizer), due, rtol=1e-6, atol=1e-8)


# -- rows ----------------------------------------------------------------------------------------

LEFT_ALONE = [
    tf.train.GradientDescentOptimizer(0.1),
    tf.train.MomentumOptimizer(0.1, 0.9),
    tf.train.AdagradOptimizer(0.1),
    tf.train.AdadeltaOptimizer(0.1),
    tf.train.RMSPropOptimizer(0.1, momentum=0.5),
    tf.train.RMSPropOptimizer(0.1, centered=True),
    tf.train.FtrlOptimizer(0.1),
]


@pytest.mark.parametrize("optimizer", LEFT_ALONE, ids=lambda o: o.get_name())
def test_rows_that_were_not_gathered_stay(session, optimizer):
    w = tf.Variable(np.ones((4, 2), np.float32))
    i, j = tf.placeholder(tf.int32, [None]), tf.placeholder(tf.int32, [None])
    loss = 2.0 * tf.reduce_sum(tf.gather(w, i)) + tf.reduce_sum(tf.gather(w, j))
    step = optimizer.minimize(loss)
    initialized(session)
    before = session.run(w)
    for rows in ([[0, 0], [1]], [[3], [3]]):
        session.run(step, dict(zip((i, j), rows, strict=True)))
        after = session.run(w)
        touched = sorted({*rows[0], *rows[1]})
        still = [r for r in range(4) if r not in touched]
        assert (after[touched] < before[touched]).all()
        assert (after[still] == before[still]).all()
        before = after


def test_adam_moves_all_rows_on(session):
    w, row = tf.Variable(np.ones((2, 1), np.float32)), tf.placeholder(tf.int32, [1])
    step = tf.train.AdamOptimizer(0.1).minimize(tf.reduce_sum(tf.gather(w, row)))
    initialized(session).run(step, {row: [0]})
    before = session.run(w)
    session.run(step, {row: [1]})
    assert session.run(w)[0] < before[0]


# -- optimizers of one's own, constraints ----------------------------------------------------------


class SignDescent(tf.train.Optimizer):
    def __init__(self, rate, use_locking=False, name="SignDescent"):
        super().__init__(use_locking, name)
        self._rate = rate

    def _create_slots(self, var_list):
        for v in var_list:
            self._zeros_slot(v, "count", self._name)

    def _prepare(self):
        self._rate_tensor = tf.convert_to_tensor(self._rate, name="rate")

    def _apply_dense(self, grad, var):
        count = self.get_slot(var, "count")
        counted = tf.assign_add(count, tf.ones_like(count))
        return tf.group(tf.assign_sub(var, self._rate_tensor * tf.sign(grad)), counted)

    def _apply_sparse(self, grad, var):
        raise NotImplementedError("Sparse gradient updates are not supported.")


def test_an_optimizer_of_ones_own(session):
    w = tf.Variable([3.0, -1.0], name="w")
    optimizer = SignDescent(0.5)
    step = optimizer.minimize(tf.reduce_sum(w * w), var_list=w)
    initialized(session)
    for _ in range(2):
        session.run(step)
    assert session.run(w).tolist() == [2.0, 0.0]
    assert session.run(optimizer.get_slot(w, "count")).tolist() == [2.0, 2.0]
    assert (optimizer.get_slot_names(), step.name) == (["count"], "SignDescent")


def test_an_optimizer_without_a_rule():
    w = tf.Variable(1.0)
    with pytest.raises(NotImplementedError, match="_apply_dense"):
        tf.train.Optimizer(False, "mine").minimize(w * w)


def test_a_constraint_holds_after_each_step(session):
    w = tf.Variable([1.0, -1.0], constraint=lambda w: tf.maximum(w, 0.0))
    step = tf.train.GradientDescentOptimizer(0.25).minimize(tf.reduce_sum(w * w))
    initialized(session).run(step)
    assert session.run(w).tolist() == [0.5, 0.0]


def test_slots_have_tensorflows_names():
    w = tf.Variable([1.0], name="s/w")
    for optimizer in (
        tf.train.MomentumOptimizer(0.1, 0.9),
        tf.train.AdamOptimizer(),
        tf.train.RMSPropOptimizer(0.1, centered=True),
    ):
        optimizer.minimize(w * w)
    assert [v.op.name for v in tf.global_variables()] == [
        "s/w",
        "s/w/Momentum",
        "beta1_power",
        "beta2_power",
        "s/w/Adam",
        "s/w/Adam_1",
        "s/w/RMSProp",
        "s/w/RMSProp_1",
        "s/w/RMSProp_2",
    ]
    assert tf.trainable_variables() == [w]
    assert optimizer.get_slot_names() == ["mg", "momentum", "rms"]
    assert optimizer.get_slot(w, "rms").op.name == "s/w/RMSProp_1"
    assert optimizer.get_slot(w, "nothing") is None


def test_one_optimizer_in_two_graphs(session):
    optimizer = tf.train.AdamOptimizer(0.1)
    for _ in range(2):
        with tf.Graph().as_default(), tf.Session() as other:
            w = tf.Variable([1.0], name="w")
            step = optimizer.minimize(w * w)
            initialized(other).run(step)
            np.testing.assert_allclose(other.run(w), [0.9], rtol=1e-6)
            assert len(optimizer.variables()) == 4


def test_gradients_that_do_not_fit_are_refused(session):
    w, g = tf.Variable([1.0, 2.0], name="w"), tf.placeholder(tf.float32)
    optimizer = tf.train.GradientDescentOptimizer(0.1)
    with pytest.raises(ValueError, match=r"'w:0' has the shape \(3,\)"):
        optimizer.apply_gradients([(tf.zeros([3]), w)])
    with pytest.raises(TypeError, match="Gradient must be a Tensor"):
        optimizer.apply_gradients([(1.0, w)])
    with pytest.raises(TypeError, match="float64"):
        optimizer.apply_gradients([(tf.zeros([2], tf.float64), w)])
    step = optimizer.apply_gradients([(g, w)])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"gradient for 'w'.*\(3,\)"):
        initialized(session).run(step, {g: [1.0, 2.0, 3.0]})
    assert session.run(w).tolist() == [1.0, 2.0]


def test_state_without_a_value(session):
    w = tf.Variable(1.0, name="w")
    step = tf.train.MomentumOptimizer(0.1, 0.9).minimize(w * w)
    session.run(w.initializer)
    with pytest.raises(tf.errors.FailedPreconditionError, match="w/Momentum"):
        session.run(step)


# -- schedules -----------------------------------------------------------------------------------

SCHEDULES = {
    "exponential": (
        lambda n: tf.train.exponential_decay(0.1, n, 10, 0.5),
        lambda n: 0.1 * 0.5 ** (n / 10),
    ),
    "stairs": (
        lambda n: tf.train.exponential_decay(0.1, n, 10, 0.5, staircase=True),
        lambda n: 0.1 * 0.5 ** (n // 10),
    ),
    "natural": (
        lambda n: tf.train.natural_exp_decay(0.1, n, 10, 0.5),
        lambda n: 0.1 * np.exp(-0.5 * n / 10),
    ),
    "inverse time": (
        lambda n: tf.train.inverse_time_decay(0.1, n, 10, 0.5, staircase=True),
        lambda n: 0.1 / (1 + 0.5 * (n // 10)),
    ),
    "polynomial": (
        lambda n: tf.train.polynomial_decay(0.1, n, 10, 0.01, power=2.0),
        lambda n: 0.09 * (1 - min(n, 10) / 10) ** 2 + 0.01,
    ),
    "polynomial, in cycles": (
        lambda n: tf.train.polynomial_decay(0.1, n, 10, 0.01, cycle=True),
        lambda n: 0.09 * (1 - n / (10 * max(1, -(-n // 10)))) + 0.01,
    ),
    "cosine": (
        lambda n: tf.train.cosine_decay(0.1, n, 10, alpha=0.2),
        lambda n: 0.1 * (0.2 + 0.8 * (1 + np.cos(np.pi * min(n, 10) / 10)) / 2),
    ),
    "pieces": (
        lambda n: tf.train.piecewise_constant(n, [5, 10], [1.0, 0.5, 0.1]),
        lambda n: 1.0 if n <= 5 else 0.5 if n <= 10 else 0.1,
    ),
}


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(session, name, dtype):
    schedule, due = SCHEDULES[name]
    n = tf.placeholder(dtype, [])
    rate = schedule(n)
    assert rate.dtype == tf.float32
    for step in (0, 1, 5, 6, 10, 11, 25):
        np.testing.assert_allclose(session.run(rate, {n: step}), due(step), rtol=1e-5, err_msg=step)


def test_schedules_need_a_step_and_fitting_pieces():
    with pytest.raises(ValueError, match="global_step is required"):
        tf.train.exponential_decay(0.1, None, 10, 0.5)
    with pytest.raises(ValueError, match="1 less"):
        tf.train.piecewise_constant(0, [1, 2], [1.0, 2.0])


def test_the_global_step(session, graph):
    assert tf.train.get_global_step() is None
    step = tf.train.get_or_create_global_step()
    assert tf.train.get_or_create_global_step(graph) is tf.train.get_global_step() is step
    assert (step.op.name, step.dtype.base_dtype, step.trainable) == ("global_step", tf.int64, False)
    with pytest.raises(GraphError, match="already exists"):
        tf.train.create_global_step()
    assert tf.train.global_step(initialized(session), step) == 0


def test_moving_averages(session):
    v, count = tf.Variable(1.0, name="v"), tf.Variable(0, trainable=False, name="count")
    average = tf.train.ExponentialMovingAverage(0.9, count)
    step = tf.train.GradientDescentOptimizer(0.5).minimize(0.5 * v * v, global_step=count)
    with tf.control_dependencies([step]):
        update = average.apply()
    initialized(session)
    value = mean = 1.0
    for n in range(1, 4):
        session.run(update)
        value *= 0.5
        mean -= (1 - min(0.9, (1 + n) / (10 + n))) * (mean - value)
        np.testing.assert_allclose(session.run([v, average.average(v)]), [value, mean], rtol=1e-6)
    assert set(average.variables_to_restore()) == {"v/ExponentialMovingAverage", "count"}
    with pytest.raises(ValueError, match="already computed"):
        average.apply([v])


NAMED = {"dict": dict, "values": dict.values, "iterator": lambda d: iter(d.values()),
         "set": lambda d: {*d.values()}, "tuple": lambda d: (*d.values(),)}  # fmt: skip


@pytest.mark.parametrize("kind", NAMED)
def test_variables_are_any_iterable(kind):
    v = {"a": tf.Variable(2.0), "b": tf.Variable(3.0)}
    optimizer = tf.train.GradientDescentOptimizer(0.1)
    step = optimizer.minimize(v["a"] * v["b"], var_list=NAMED[kind](v))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(step)
        np.testing.assert_allclose(session.run([v["a"], v["b"]]), [1.7, 2.8], rtol=1e-6)
    with pytest.raises(GraphError, match="No variables to optimize"):
        optimizer.minimize(v["a"], var_list=NAMED[kind]({}))
