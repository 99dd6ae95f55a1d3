"""tf.train: optimizers against their update rules, minimize and its parts, schedules, averages.

The numbers come from the rules that TensorFlow 1 documents, in NumPy, and for Adadelta from
PyTorch.
"""

import numpy as np
import pytest

import regrad.v1 as tf
from regrad.errors import GraphError
from tests.helpers.rows import refused
from tests.helpers.v1_session import initialized

pytestmark = pytest.mark.usefixtures("graph")
train = tf.train


# -- the update rules, in NumPy ------------------------------------------------------------------


def gradient_descent(g, s, lr):
    return lr * g


def momentum(g, s, lr, mu, nesterov=False):
    s["a"] = a = mu * s.get("a", 0) + g
    return lr * (g + mu * a) if nesterov else lr * a


def adam(g, s, lr=0.001, b1=0.9, b2=0.999, epsilon=1e-8):
    t = s["t"] = s.get("t", 0) + 1
    s["m"] = m = b1 * s.get("m", 0) + (1 - b1) * g
    s["v"] = v = b2 * s.get("v", 0) + (1 - b2) * g * g
    return lr * np.sqrt(1 - b2**t) / (1 - b1**t) * m / (np.sqrt(v) + epsilon)


def rmsprop(g, s, lr, decay=0.9, mu=0.0, epsilon=1e-10, centered=False):
    s["square"] = square = decay * s.get("square", 1) + (1 - decay) * g * g
    s["mean"] = mean = decay * s.get("mean", 0) + (1 - decay) * g if centered else 0
    s["step"] = mu * s.get("step", 0) + lr * g / np.sqrt(square - mean * mean + epsilon)
    return s["step"]


def adagrad(g, s, lr, initial=0.1):
    s["a"] = a = s.get("a", initial) + g * g
    return lr * g / np.sqrt(a)


def ftrl(g, s, lr, power, l1, l2, shrinkage):
    """Algorithm 1 of McMahan et al., with beta = 0."""
    w, n = s["w"], s.get("n", 0.1)
    s["n"] = grown = n + g**2
    s["z"] = z = s.get("z", 0) + g + 2 * shrinkage * w - (grown**-power - n**-power) / lr * w
    scale = grown**-power / lr + 2 * l2
    return w - np.where(abs(z) <= l1, 0, (np.sign(z) * l1 - z) / scale)


def adadelta(g, s, lr, rho, epsilon):
    import torch

    w = s.setdefault("parameter", torch.tensor(s["w"], requires_grad=True))
    optimizer = s.setdefault("o", torch.optim.Adadelta([w], lr=lr, rho=rho, eps=epsilon))
    w.grad = torch.tensor(g)
    optimizer.step()
    return s["w"] - w.detach().numpy()


def regularized(lr, power, l1, l2, shrinkage):
    options = {"l2_shrinkage_regularization_strength": shrinkage}
    return train.FtrlOptimizer(lr, power, 0.1, l1, l2, **options)


START, TARGET, SCALE = np.array([[1.0, -2.0], [3.0, 1.0]]), 0.5, [1.0, 5.0]
NESTEROV, CENTERED = train.MomentumOptimizer, train.RMSPropOptimizer
OPTIMIZERS = {  # the optimizer, its update rule, and the arguments of both
    "descent": (train.GradientDescentOptimizer, gradient_descent, (0.1,)),
    "momentum": (train.MomentumOptimizer, momentum, (0.02, 0.9)),
    "nesterov": (lambda *a: NESTEROV(*a[:2], use_nesterov=a[2]), momentum, (0.02, 0.9, True)),
    "adam": (train.AdamOptimizer, adam, ()),
    "adam with options": (train.AdamOptimizer, adam, (0.1, 0.8, 0.99, 0.1)),
    "rmsprop": (train.RMSPropOptimizer, rmsprop, (0.05,)),
    "rmsprop with momentum": (train.RMSPropOptimizer, rmsprop, (0.05, 0.8, 0.5, 0.01)),
    "rmsprop, centered": (
        lambda *a: CENTERED(*a[:4], centered=a[4]), rmsprop, (0.05, 0.9, 0.0, 1e-3, True)),
    "adagrad": (train.AdagradOptimizer, adagrad, (0.5,)),
    "adagrad with a start": (train.AdagradOptimizer, adagrad, (0.5, 1.0)),
    "adadelta": (train.AdadeltaOptimizer, adadelta, (0.5, 0.9, 1e-6)),
    **{f"ftrl {power} {strengths}": (regularized, ftrl, (0.5, power, *strengths))
       for power in (-0.5, -0.3) for strengths in ((0, 0, 0), (0.4, 0.2, 0), (0.1, 0, 0.3))},
}  # fmt: skip


MODES = [("float32", False), ("float64", False), ("float32", True)]  # (lr is float32 in TF)


@pytest.mark.parametrize(("dtype", "jit"), MODES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates(name, dtype, jit):
    make, rule, arguments = OPTIMIZERS[name]
    w, count = tf.Variable(START.astype(dtype)), tf.Variable(0, trainable=False)
    loss = tf.reduce_sum(tf.square(w - np.array(TARGET, dtype)) * np.array(SCALE, dtype))
    step = make(*arguments).minimize(loss, global_step=count)
    exact = (1e-6, 1e-8) if name.startswith(("adadelta", "ftrl")) else (1e-7, 1e-7)
    rtol, atol = (1e-5, 1e-5) if dtype == "float32" else exact
    with tf.Session(jit=jit) as session:
        initialized(session)
        state = {"w": START}
        for _ in range(6):
            session.run(step)
            gradient = 2 * (state["w"] - TARGET) * SCALE
            state["w"] = state["w"] - rule(gradient, state, *arguments)
            np.testing.assert_allclose(session.run(w), state["w"], rtol=rtol, atol=atol)
        assert session.run(count) == 6


def test_state_of_optimizers(session):
    w = tf.Variable(1.0, name="w")
    step = train.MomentumOptimizer(0.1, 0.9).minimize(w * w)
    assert tf.trainable_variables() == [w]
    assert [v.op.name for v in tf.global_variables()] == ["w", "w/Momentum"]
    session.run(w.initializer)
    refused(lambda: session.run(step), tf.errors.FailedPreconditionError, "w/Momentum")
    seen = []
    for _ in range(2):
        initialized(session)  # again
        seen.append([session.run(step) for _ in range(3)] + [session.run(w)])
    assert seen[0] == seen[1]


# -- minimize and its parts ----------------------------------------------------------------------


def descent(rate=0.1):
    return train.GradientDescentOptimizer(rate)


def test_minimize_returns_one_op(session):
    w, count = tf.Variable(1.0), tf.Variable(0, trainable=False)
    step = descent().minimize(w * w)
    assert (step.name, step.type) == (descent().get_name(), "NoOp") == ("GradientDescent", "NoOp")
    step = descent().minimize(w * w, global_step=count, name="s")
    initialized(session)
    assert [session.run(step) for _ in range(3)] == [None] * 3
    assert (session.run(count), step.name.split("/")[0]) == (3, "s")


def test_gradients_come_in_order_and_may_be_changed(session):
    a, b = tf.Variable(1.0), tf.Variable(2.0)
    tf.Variable(3.0, trainable=False)
    c = tf.Variable(4.0)
    pairs = descent().compute_gradients(c * a * a * 50.0)
    assert [v for _, v in pairs] == [a, b, c]
    assert [g is None for g, _ in pairs] == [False, True, False]
    clipped = [(g if g is None else tf.clip_by_value(g, -1.0, 1.0), v) for g, v in pairs]
    initialized(session).run(descent().apply_gradients(clipped))
    np.testing.assert_allclose(session.run([a, b, c]), [0.9, 2.0, 3.9], rtol=1e-6)


VAR_LISTS = {
    "a list": lambda d: [*d.values()], "a dict": dict, "values": dict.values,
    "an iterator": lambda d: iter(d.values()), "a set": lambda d: {*d.values()},
    "a tuple": lambda d: (*d.values(),),
}  # fmt: skip


@pytest.mark.parametrize("kind", VAR_LISTS)
def test_var_list_chooses_and_is_any_iterable(session, kind):
    a, b = tf.Variable(2.0), tf.Variable(3.0, trainable=False)
    step = descent().minimize(a * b, var_list=VAR_LISTS[kind]({"a": a, "b": b}))
    initialized(session).run(step)
    np.testing.assert_allclose(session.run([a, b]), [1.7, 2.8], rtol=1e-6)
    with pytest.raises(GraphError, match="No variables to optimize"):
        descent().minimize(a, var_list=VAR_LISTS[kind]({}))


@pytest.mark.parametrize("kind", ["placeholder", "variable"])
def test_the_learning_rate_may_be_a_tensor(session, kind):
    w, other = tf.Variable(1.0), tf.Variable(7.0)
    rate = tf.placeholder(tf.float32, []) if kind == "placeholder" else tf.Variable(0.25)
    step = descent(rate).minimize(w * w * other, var_list=w)
    feed = {rate: 0.25} if kind == "placeholder" else {}
    initialized(session).run(step, {other: 1.0, **feed})
    assert session.run([w, other]) == [0.5, 7.0]


def in_another_graph():
    with tf.Graph().as_default():
        descent().minimize(tf.constant(1.0))


def applied(gradient):
    return lambda w: descent().apply_gradients([(gradient and gradient(), w)])


REFUSED = {  # what is asked of a variable w of two elements, the error, and its words
    "no variables": (lambda w: in_another_graph(), ValueError, "No variables to optimize"),
    "no path": (lambda w: descent().minimize(tf.constant(1.0)), ValueError, "No gradients pro.*w"),
    "no gradients": (applied(None), ValueError, "No gradients provided"),
    "nothing": (lambda w: descent().apply_gradients([]), ValueError, "No variables provided"),
    "integers": (lambda w: descent().minimize(tf.Variable(3) * 2), ValueError, "int32"),
    "a shape": (applied(lambda: tf.zeros([3])), ValueError, r"'w:0' has the shape \(3,\)"),
    "a number": (applied(lambda: 1.0), TypeError, "Gradient must be a Tensor"),
    "a dtype": (applied(lambda: tf.zeros([2], tf.float64)), TypeError, "float64"),
    "no rule": (
        lambda w: train.Optimizer(False, "mine").minimize(w * w), NotImplementedError,
        "_apply_dense"),
    "no name": (lambda w: train.Optimizer(), ValueError, "the optimizer name"),
    "a gate": (
        lambda w: descent().compute_gradients(w * w, gate_gradients=3), ValueError, "GATE_OP.* 3"),
    "an integer gradient": (
        lambda w: descent().minimize(w[0], grad_loss=tf.constant(1)), ValueError, "int32.*floats"),
    "adagrad's start": (lambda w: train.AdagradOptimizer(0.1, 0.0), ValueError, "positive: 0.0"),
    "ftrl's power": (lambda w: train.FtrlOptimizer(0.1, 0.5), ValueError, "power must not .* -0.5"),
    "a fraction of a step": (lambda w: train.assert_global_step(w), TypeError, "scalar of int"),
    "no step": (lambda w: decay(0.1, None, 1, 0.5), ValueError, "global_step is required for expo"),
    "an integer rate": (lambda w: decay(1, 0, 1, 0.5), TypeError, "rate is a float"),
    "pieces": (lambda w: train.piecewise_constant(0, [1], [1.0]), ValueError, "1 less.* 1 and 1"),
    "debiased averages": (
        lambda w: train.ExponentialMovingAverage(0.5, zero_debias=True), TypeError, "zero_debias"),
    "averages of integers": (
        lambda w: train.ExponentialMovingAverage(0.5).apply([tf.constant(1)]), TypeError, "float"),
    "averages of unknown shapes": (
        lambda w: train.ExponentialMovingAverage(0.5).apply([tf.placeholder(tf.float32, [None])]),
        ValueError, "must be known for its moving average"),
    "a step": (lambda w: [train.create_global_step() for _ in "ab"], GraphError, "already exists"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    build, error, words = REFUSED[name]
    w = tf.Variable([1.0, 2.0], name="w")
    refused(lambda: build(w), error, words)


def test_gradients_of_another_shape_are_refused_in_the_run(session):
    w, g = tf.Variable([1.0, 2.0], name="w"), tf.placeholder(tf.float32)
    step = descent().apply_gradients([(g, w)])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"gradient for 'w'.*\(3,\)"):
        initialized(session).run(step, {g: [1.0, 2.0, 3.0]})
    assert session.run(w).tolist() == [1.0, 2.0]


# -- rows ----------------------------------------------------------------------------------------

LEFT_ALONE = {
    "descent": train.GradientDescentOptimizer,
    "momentum": lambda rate: train.MomentumOptimizer(rate, 0.9), "adagrad": train.AdagradOptimizer,
    "adadelta": train.AdadeltaOptimizer,
    "rmsprop": lambda rate: train.RMSPropOptimizer(rate, momentum=0.5),
    "rmsprop, centered": lambda rate: train.RMSPropOptimizer(rate, centered=True),
    "ftrl": train.FtrlOptimizer,
}  # fmt: skip


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", LEFT_ALONE)
def test_rows_that_were_not_gathered_stay(name, jit):
    w = tf.Variable(np.ones((4, 2), np.float32))
    i, j = tf.placeholder(tf.int32, [None]), tf.placeholder(tf.int32, [None])
    loss = 2.0 * tf.reduce_sum(tf.gather(w, i)) + tf.reduce_sum(tf.gather(w, j))
    step = LEFT_ALONE[name](0.1).minimize(loss)
    with tf.Session(jit=jit) as session:
        before = first = initialized(session).run(w)
        for rows, touched in (([[0, 0], [1]], [0, 1]), ([[3, 3], []], [3])):
            session.run(step, dict(zip((i, j), rows, strict=True)))
            after = session.run(w)
            still = [r for r in range(4) if r not in touched]
            assert (after[touched] < before[touched]).all()
            assert (after[still] == before[still]).all()
            first, before = (after[0], after) if touched == [0, 1] else (first, after)
        assert (after[3] == first).all()  # which had the same gradient


def test_a_gradient_with_a_broadcast_row_changes_all_rows(session):
    w = tf.Variable(np.ones((3, 2), np.float32))
    (row,) = tf.gradients(tf.reduce_sum(tf.gather(w, [0])), w)
    everywhere = tf.unsorted_segment_sum(tf.ones([1, 2]), [0], 1)
    step = train.MomentumOptimizer(0.1, 0.9).apply_gradients([(row + everywhere, w)])
    initialized(session).run(step)
    np.testing.assert_allclose(session.run(w)[:, 0], [0.8, 0.9, 0.9], rtol=1e-6)


@pytest.mark.parametrize("jit", [False, True])
def test_adam_moves_all_rows_on(jit):
    w, row = tf.Variable(np.ones((3, 1), np.float32)), tf.placeholder(tf.int32, [1])
    step = train.AdamOptimizer(0.1).minimize(tf.reduce_sum(tf.gather(w, row)))
    with tf.Session(jit=jit) as session:
        initialized(session).run(step, {row: [0]})
        before = session.run(w)
        session.run(step, {row: [1]})
        after = session.run(w)
    assert after[0] < before[0] < after[2] == before[2] == 1.0


# -- optimizers of one's own, constraints ----------------------------------------------------------


class SignDescent(train.Optimizer):
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


def test_a_constraint_holds_after_each_step(session):
    w = tf.Variable([1.0, -1.0], constraint=lambda w: tf.maximum(w, 0.0))
    initialized(session).run(descent(0.25).minimize(tf.reduce_sum(w * w)))
    assert session.run(w).tolist() == [0.5, 0.0]


def test_slots_have_tensorflows_names():
    w = tf.Variable([1.0], name="s/w")
    train.AdamOptimizer().minimize(w * w)
    optimizer = train.RMSPropOptimizer(0.1, centered=True)
    optimizer.minimize(w * w)
    due = "s/w beta1_power beta2_power s/w/Adam s/w/Adam_1 s/w/RMSProp s/w/RMSProp_1 s/w/RMSProp_2"
    assert [v.op.name for v in tf.global_variables()] == due.split()
    assert optimizer.get_slot_names() == ["mg", "momentum", "rms"]
    assert optimizer.get_slot(w, "rms").op.name == "s/w/RMSProp_1"
    assert optimizer.get_slot(w, "nothing") is None


def test_a_variable_of_optimizers_that_is_no_slot():
    w, optimizer = tf.Variable([1.0]), train.AdamOptimizer()
    assert optimizer._get_non_slot_variable("beta1_power") is None
    optimizer.minimize(w * w)
    power = optimizer._get_non_slot_variable("beta1_power", tf.get_default_graph())
    assert power in optimizer.variables() and power.op.name == "beta1_power"


def test_a_slot_of_a_variable_whose_size_is_not_known(session):
    value = tf.placeholder_with_default(np.float32([1.0, np.inf]), [None])
    w = tf.Variable(value, validate_shape=False)
    step = train.AdagradOptimizer(2.0, 7.0).minimize(3.0 * w)  # 7 and the square of 3 are 16
    average = train.ExponentialMovingAverage(0.75)
    update = average.apply([w])
    initialized(session).run(step)
    moved = 1 - 2 * 3 / 16**0.5
    np.testing.assert_allclose(session.run(w), [moved, np.inf])
    session.run(update)
    np.testing.assert_allclose(session.run(average.average(w))[0], 0.75 + 0.25 * moved)


@pytest.mark.parametrize("jit", [False, True])
def test_variables_of_any_shape_train_like_others(graph, jit):
    begin = np.float32([1.0, 2.0])
    u = tf.Variable(tf.placeholder_with_default(begin, None), validate_shape=False)
    v = tf.Variable(begin)
    with tf.Session(jit=jit) as session:
        steps = [
            make().minimize(tf.reduce_sum(w**3), var_list=[w])
            for make in (train.AdamOptimizer, lambda: train.MomentumOptimizer(0.1, 0.9))
            for w in (u, v)
        ]
        second = tf.gradients(tf.gradients(u**3, u), u)
        initialized(session)
        for _ in range(3):
            session.run(steps)
        assert session.run(u).tolist() == session.run(v).tolist() != begin.tolist()
        session.run(tf.assign(u, [[1.0], [2.0]], validate_shape=False))
        np.testing.assert_allclose(session.run(second), [[[6.0], [12.0]]], rtol=1e-6)


def test_the_gradient_of_the_loss_may_be_passed(session):
    w = tf.Variable([1.0, 2.0])
    step = descent(0.5).minimize(w * w, grad_loss=[1.0, 3.0])
    initialized(session).run(step)
    np.testing.assert_allclose(session.run(w), [1 - 0.5 * 2 * 1, 2 - 0.5 * 3 * 4])


def test_one_optimizer_in_two_graphs():
    optimizer = train.AdamOptimizer(0.1)
    for _ in range(2):
        with tf.Graph().as_default(), tf.Session() as session:
            w = tf.Variable([1.0], name="w")
            step = optimizer.minimize(w * w)
            initialized(session).run(step)
            np.testing.assert_allclose(session.run(w), [0.9], rtol=1e-6)
            assert len(optimizer.variables()) == 4


# -- schedules, steps, averages --------------------------------------------------------------------

decay = train.exponential_decay
SCHEDULES = {  # of the step n, and in NumPy
    "exponential": (lambda n: decay(0.1, n, 10, 0.5), lambda n: 0.1 * 0.5 ** (n / 10)),
    "stairs": (lambda n: decay(0.1, n, 10, 0.5, staircase=True), lambda n: 0.1 * 0.5 ** (n // 10)),
    "natural": (
        lambda n: train.natural_exp_decay(0.1, n, 10, 0.5), lambda n: 0.1 * np.exp(-0.5 * n / 10)),
    "inverse time": (
        lambda n: train.inverse_time_decay(0.1, n, 10, 0.5, staircase=True),
        lambda n: 0.1 / (1 + 0.5 * (n // 10))),
    "polynomial": (
        lambda n: train.polynomial_decay(0.1, n, 10, 0.01, power=2.0),
        lambda n: 0.09 * (1 - min(n, 10) / 10) ** 2 + 0.01),
    "polynomial, in cycles": (
        lambda n: train.polynomial_decay(0.1, n, 10, 0.01, cycle=True),
        lambda n: 0.09 * (1 - n / (10 * max(1, -(-n // 10)))) + 0.01),
    "cosine": (
        lambda n: train.cosine_decay(0.1, n, 10, alpha=0.2),
        lambda n: 0.1 * (0.2 + 0.8 * (1 + np.cos(np.pi * min(n, 10) / 10)) / 2)),
    "pieces": (
        lambda n: train.piecewise_constant(n, [5, 10], [1.0, 0.5, 0.1]),
        lambda n: 1.0 if n <= 5 else 0.5 if n <= 10 else 0.1),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(session, name, dtype):
    schedule, due = SCHEDULES[name]
    n = tf.placeholder(dtype, [])
    rate = schedule(n)
    assert rate.dtype == tf.float32
    for step in (0, 1, 5, 6, 10, 11, 25):
        np.testing.assert_allclose(session.run(rate, {n: step}), due(step), rtol=1e-5, err_msg=step)


def test_the_global_step(session, graph):
    assert train.get_global_step() is None
    step = train.get_or_create_global_step()
    assert train.get_or_create_global_step(graph) is train.get_global_step() is step
    assert (step.op.name, step.dtype.base_dtype, step.trainable) == ("global_step", tf.int64, False)
    assert train.global_step(initialized(session), step) == 0
    tf.add_to_collection(tf.GraphKeys.GLOBAL_STEP, tf.Variable(0))
    refused(train.get_global_step, ValueError, "2 variables are in the collection 'global_step'")


def test_moving_averages(session):
    v, count = tf.Variable(1.0, name="v"), tf.Variable(0, trainable=False, name="count")
    average, rate = train.ExponentialMovingAverage(0.9, count), decay(0.5, count, 2, 0.5, True)
    with tf.control_dependencies([descent(rate).minimize(0.5 * v * v, global_step=count)]):
        update = average.apply()
    initialized(session)
    value = mean = 1.0
    for n in range(1, 4):
        session.run(update)
        value *= 0.5 if n < 3 else 0.75  # the rate falls with the steps
        mean -= (1 - min(0.9, (1 + n) / (10 + n))) * (mean - value)
        np.testing.assert_allclose(session.run([v, average.average(v)]), [value, mean], rtol=1e-6)
    assert set(average.variables_to_restore()) == {"v/ExponentialMovingAverage", "count"}
    refused(lambda: average.apply([v]), ValueError, "already computed")


def test_moving_averages_of_tensors_and_with_counts_of_updates(session):
    v, x = tf.Variable(1.0, name="v"), tf.placeholder(tf.float32, [2], name="x")
    average = train.ExponentialMovingAverage(0.9, num_updates=tf.constant(2), name="mean")
    update = average.apply([x])  # the decay is 3 / 12, which is less than 0.9
    initialized(session).run(update, {x: [4.0, 8.0]})
    np.testing.assert_allclose(session.run(average.average(x)), [3.0, 6.0])
    assert (average.name, average.average(x).op.name) == ("mean", "x/mean")
    assert average.average(v) is None and average.average_name(v) == "v/mean"
    assert set(average.variables_to_restore(iter([v]))) == {"v/mean", "x/mean"}
