"""Rules of regrad's ops with parameters that learn, against custom functions that take them."""

from __future__ import annotations

import numpy as np
import optax
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.errors import ArgumentError, GradientError, GraphError, RuleError
from tests.helpers.rows import WAYS, close, refusals

X = np.random.default_rng(0).normal(size=(4, 5)) * 4
T = rg.tensor(X)
override, learns = rg.gradient_override_map, rg.rules.learns
ways = pytest.mark.parametrize("way", WAYS)


def double(x, name=None):
    return rg.tensor(np.float64(x)) if name is None else rg.Variable(np.float64(x), name=name)


def lsq(dy, x, step):  # the step size of a quantizer, Esser et al. (2020)
    inside = rg.astype(abs(x) <= 3, dy.dtype)
    return dy * inside / step, {"step": 0.1 * rg.sum(dy * (rg.round(x) - x * inside / step))}


def pact(dy, x, alpha):  # the clip of an activation, Choi et al. (2018)
    zero = rg.zeros_like(dy)
    dx = rg.where((x > 0) & (x < alpha), dy, zero)
    return dx, {"alpha": rg.sum(rg.where(x >= alpha, dy, zero))}


def slope(dy, x, beta):  # a surrogate whose steepness is learned
    s = 1 - rg.tanh(beta * x) ** 2
    return dy * beta * s, {"beta": rg.sum(dy * x * s)}


def by_hand(value, rule, name):
    """A function of x and a parameter."""

    @rg.custom_grad
    def hand(x, p, save):
        save([x, p])

        def gradients(dy, saved):
            dx, found = rule(dy, *saved)
            return dx, found[name]

        return value(x, p), gradients

    return hand


def twice(f, x):
    return rg.sum(f(x * 2) ** 2) + rg.sum(rg.sin(f(rg.cos(x))))


def to_second_order(loss, x, p):
    first = rg.grad(loss, argnums=(0, 1))

    def squares(x, p):
        dx, dp = first(x, p)
        return rg.sum(dx**2) + dp**2

    return [*first(x, p), *rg.grad(squares, argnums=(0, 1), unconnected="zero")(x, p)]


@pytest.mark.slow(but=3)
@ways
def test_variables_in_a_scope_around(way):
    """The compiled function knows nothing of the Variables that rules read, and follows them."""
    f = WAYS[way](lambda x: twice(rg.round, x))
    hand = by_hand(lambda x, p: rg.round(x), lsq, "step")
    for start in (0.7, 0.7, 1.1):
        p = double(start, "step")
        for _ in range(2):
            expected = rg.grad(lambda p: twice(lambda z: hand(z, p), T))(p.value)
            with override({"Round": learns(lsq, step=p)}) as used:
                close(rg.variable_grads(lambda: f(T)).grads["step"], expected)
            used.assert_fired()
            p.assign_sub(0.1)


def test_training():
    clip, idle = double(2.0, "alpha"), double(1.0, "idle")
    x, minimize = rg.tensor(20 * X), rg.train.Optimizer(optax.sgd(0.01)).minimize
    for _ in range(2):
        before = clip.numpy()
        with override({"Relu": learns(pact, alpha=clip)}):
            minimize(lambda: -rg.sum(rg.nn.relu(x)))
        close(clip.numpy() - before, 0.01 * (before <= 20 * X).sum())
    with override({"Tanh": rg.rules.optional(learns(pact, alpha=idle))}):
        found = rg.variable_grads(lambda: rg.sum(rg.nn.relu(x)) * clip.value)
    assert list(found.grads) == ["alpha"]  # as for any Variable that is not used


LOOPS = {
    "scan": lambda x, sign: rg.scan(lambda c, _: (sign(c) + c * x, None), x, length=3)[0],
    "cond": lambda x, sign: rg.cond(rg.sum(x) > 0, lambda x: sign(2 * x), lambda x: sign(x), x),
    "while": lambda x, sign: rg.while_loop(
        lambda s: s[0] < 3, lambda s: (s[0] + 1, sign(s[1]) + s[1] * x), (0, x), max_steps=4)[1],
    "vmap": lambda x, sign: rg.vmap(lambda row: sign(row) * rg.sum(row))(x),
}  # fmt: skip


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", LOOPS)
def test_loops_branches_and_vmap(name):
    x, p, hand = rg.tensor(X / 16), double(1.3), by_hand(lambda x, p: rg.sign(x), slope, "beta")
    f = lambda x, sign: rg.sum(LOOPS[name](x, sign))  # noqa: E731

    def ours(x, p):
        with override({"Sign": learns(slope, beta=p)}):
            return f(x, rg.sign)

    expected = to_second_order(lambda x, p: f(x, lambda z: hand(z, p)), x, p)
    for g in (ours, rg.jit(ours)):
        close(to_second_order(g, x, p), expected)
    close(rg.jit(lambda x, p: to_second_order(ours, x, p))(x, p), expected)


def test_a_graph():
    with tf.Graph().as_default():
        x, step = tf.placeholder(tf.float64, [None, 5]), tf.Variable(np.float64(0.7))
        with override({"Round": learns(lsq, step=step)}) as used:
            loss = tf.reduce_sum(tf.round(x * 2) ** 2)
        dx, dstep = tf.gradients(loss, [x, step])
        more = tf.gradients(tf.reduce_sum(dx**2) + dstep**2, [x, step])
        train = tf.train.GradientDescentOptimizer(0.001).minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            found = session.run([dx, dstep, *more], {x: X})
            session.run(train, {x: X})
            after = session.run(step)
    used.assert_fired()
    hand = by_hand(lambda x, p: rg.round(x), lsq, "step")
    expected = to_second_order(lambda x, p: rg.sum(hand(x * 2, p) ** 2), T, double(0.7))
    close([*found, after], [*expected, 0.7 - 0.001 * expected[1].numpy()])


def test_builtin_and_forward_of_a_replaced_value():
    """Both are those of the function: x * step, whose derivative is the step."""

    def rule(dy, builtin, forward, x, step):
        return builtin(dy), {"step": rg.sum(dy * forward(2 * x))}

    learning = rg.replace(lambda x, step: x * step, learns(rule, step=double(3.0, "step")))
    with override({"Tanh": learning}, values=True):
        dx = rg.grad(lambda x: rg.sum(rg.tanh(x)))(T)
        found = rg.variable_grads(lambda: rg.sum(rg.tanh(T))).grads
    close([dx, found["step"]], [np.full(X.shape, 3.0), np.sum(6 * X)])


def test_several_inputs_builtin_and_broadcasting():
    b, p, q = rg.tensor(X[0]), double(2.0, "gain"), rg.Variable(np.ones(5), name="shift")

    def rule(dy, builtin, forward, a, b, gain, shift):
        by_a, by_b = builtin(dy) * gain
        return by_a, by_b, {"gain": rg.sum(dy * forward(a, b)), "shift": dy}

    with override({"Mul": learns(rule, gain=p, shift=q)}):
        found = rg.variable_grads(lambda: rg.sum(T * b)).grads
        dxs = rg.grad(lambda a, b: rg.sum(a * b), argnums=(0, 1))(T, b)
    close(dxs, [2 * np.broadcast_to(X[0], X.shape), 2 * X.sum(0)])
    close([found["gain"], found["shift"]], [np.sum(X * X[0]), np.full(5, 4.0)])

    def many(dy, xs, gain):
        return [gain * part for part in rg.split(dy, len(xs))], {"gain": rg.sum(dy)}

    with override({"ConcatV2": learns(many, gain=p)}):
        assert rg.grad(lambda x: rg.sum(rg.concat([x, x])))(b).tolist() == [4.0] * 5
        assert rg.variable_grads(lambda: rg.sum(rg.concat([b, b]))).grads["gain"].item() == 10


def test_at_a_place():
    def loss():
        with rg.name_scope("head"):
            y = rg.nn.relu(T)
        return rg.sum(y) + rg.sum(rg.nn.relu(T))

    with override({rg.at("head", "Relu"): learns(pact, alpha=double(2.0, "alpha"))}):
        assert rg.variable_grads(loss).grads["alpha"].item() == np.sum(X >= 2)


# -- refused ---------------------------------------------------------------------------------------

P = double(2.0, "alpha")
STEP = rg.Variable(2.0, name="step")


@rg.custom_grad
def around(x, save):
    with override({"Relu": learns(pact, alpha=P)}):
        return rg.nn.relu(x), lambda dy, saved: dy


def entered(key, rule, f=None, **options):
    """Run f in a scope of a rule with a parameter, the gradients by Variables of its sum."""
    with override({key: rule}, **options):
        return f and rg.variable_grads(lambda: rg.sum(f(rg.ones(2))) * STEP)


def answering(answer):
    return lambda: entered("Relu", learns(lambda dy, step: answer(dy), step=STEP), rg.nn.relu)


def read_in_a_graph(x):
    with tf.Graph().as_default():
        tf.Variable(1.0).read_value()


OURS = "step expected a Variable or a Tensor of regrad"
NAMELESS = "has the parameters step, but did not return their gradients by name"
REFUSED = [
    # Ops of a custom function are not differentiated one by one: the parameter would learn nothing.
    (lambda: rg.variable_grads(lambda: rg.sum(around(T)) * P), GradientError,
     "around .* closes over the Variable 'alpha'"),
    (lambda: entered("Round", learns(lsq, step=2.0)), ArgumentError, OURS),
    (lambda: entered("Round", learns(lsq, step=np.ones(3))), ArgumentError, OURS),
    (lambda: entered("Round", learns(lsq, step=rg.tensor(1, dtype=np.int32)), rg.round),
     GradientError, "lsq: step is int32, and only floats"),
    (lambda: entered("Split", learns(lambda dy, step: dy, step=STEP)), RuleError,
     "'Split' returns several results"),
    (lambda: entered("MatMul", learns(lsq, step=STEP)), RuleError, "'lsq'.* takes 'x'"),
    (lambda: entered(rg.at("head"), learns(lsq, step=STEP)), ArgumentError,
     r"learns\(lsq, step\) is for a whole call here"),
    (lambda: entered("Identity", learns(lsq, step=STEP), read_in_a_graph), GraphError,
     "nor its rule learn"),
    (lambda: entered("Round", learns(lsq, step=STEP), order=1), ArgumentError, "order=1 uses"),
    (answering(lambda dy: dy), RuleError, NAMELESS),
    (answering(lambda dy: (dy, {})), RuleError, NAMELESS),
    (answering(lambda dy: (dy, {"st": dy})), RuleError, NAMELESS),
    (lambda: entered("Cumsum", learns(lambda dy, step: (dy, {"step": dy}), step=STEP),
                     rg.cumulative_sum), RuleError,
     r"input 'step', returned the shape \(2,\), expected"),
]  # fmt: skip
test_what_is_refused = refusals(REFUSED)
