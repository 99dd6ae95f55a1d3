"""Rules of regrad's ops with parameters that learn, against custom functions that take them."""

from __future__ import annotations

import re

import jax
import numpy as np
import optax
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.errors import ArgumentError, GradientError, GraphError, RuleError

X = np.random.default_rng(0).normal(size=(4, 5)) * 4
override = rg.gradient_override_map


@pytest.fixture(autouse=True)
def doubles():
    with jax.enable_x64(True):
        yield


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


CASES = {
    "lsq": ("Round", rg.round, lsq, "step", 0.7),
    "pact": ("Relu", rg.nn.relu, pact, "alpha", 2.5),
    "slope": ("Sign", rg.sign, slope, "beta", 1.3),
    "the gradient of a function": (
        "Sign", rg.sign, rg.rules.vjp_of(lambda x, beta: rg.tanh(beta * x)), "beta", 1.3,
    ),
}  # fmt: skip


def by_hand(value, rule, name):
    """A function of x and a parameter."""

    @rg.custom_grad
    def hand(x, p, save):
        save([x, p])

        def gradients(dy, saved):
            dx, found = rule(dy, *saved)
            return dx, found[name]

        return value(x), gradients

    return hand


def twice(f, x):
    return rg.sum(f(x * 2) ** 2) + rg.sum(rg.sin(f(rg.cos(x))))


def to_second_order(loss, x, p):
    first = rg.grad(loss, argnums=(0, 1))

    def squares(x, p):
        dx, dp = first(x, p)
        return rg.sum(dx**2) + dp**2

    return [*first(x, p), *rg.grad(squares, argnums=(0, 1), unconnected="zero")(x, p)]


def check(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-12, atol=1e-12)


WAYS = {
    "eager": lambda f: f,
    "jit": rg.jit,
    "checkpoint": rg.checkpoint,
    "jit of checkpoint": lambda f: rg.jit(rg.checkpoint(f)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_exact_to_second_order(case, way):
    key, function, rule, name, start = CASES[case]
    x, p = rg.tensor(X), rg.tensor(np.float64(start))
    hand = by_hand(function, slope if name == "beta" else rule, name)
    expected = to_second_order(lambda x, p: twice(lambda z: hand(z, p), x), x, p)

    def loss(x, p):
        with override({key: rg.rules.learns(rule, **{name: p})}) as used:
            y = twice(function, x)
        assert [hit.op_type for hit in used.hits] == [key]
        return y

    for _ in range(2):
        check(to_second_order(WAYS[way](loss), x, p), expected)
    check(rg.jit(lambda x, p: to_second_order(WAYS[way](loss), x, p))(x, p), expected)


@pytest.mark.parametrize("way", WAYS)
def test_variables_in_a_scope_around(way):
    """The compiled function knows nothing of the Variables that rules read, and follows them."""
    x, f = rg.tensor(X), WAYS[way](lambda x: twice(rg.round, x))
    hand = by_hand(rg.round, lsq, "step")
    for start in (0.7, 0.7, 1.1):
        p = rg.Variable(np.float64(start), name="step")
        for _ in range(2):
            expected = rg.grad(lambda p: twice(lambda z: hand(z, p), x))(p.value)
            with override({"Round": rg.rules.learns(lsq, step=p)}) as used:
                check(rg.variable_grads(lambda: f(x)).grads.values(), [expected])
            used.assert_fired()
            p.assign_sub(0.1)


def test_training():
    clip = rg.Variable(np.float64(2.0), name="alpha")
    x, minimize = rg.tensor(20 * X), rg.train.Optimizer(optax.sgd(0.01)).minimize
    for _ in range(2):
        before = clip.numpy()
        due = (before <= 20 * X).sum()
        with override({"Relu": rg.rules.learns(pact, alpha=clip)}):
            minimize(lambda: -rg.sum(rg.nn.relu(x)))
        np.testing.assert_allclose(clip.numpy() - before, 0.01 * due, rtol=1e-12)
    idle = rg.Variable(np.float64(1.0), name="idle")
    with override({"Tanh": rg.rules.optional(rg.rules.learns(pact, alpha=idle))}):
        found = rg.variable_grads(lambda: rg.sum(rg.nn.relu(x)) * clip.value)
    assert list(found.grads) == ["alpha"]  # as for any Variable that is not used


def looped(x, sign):
    return rg.sum(rg.scan(lambda c, _: (sign(c) + c * x, None), x, length=3)[0])


def branched(x, sign):
    return rg.sum(rg.cond(rg.sum(x) > 0, lambda x: sign(2 * x), lambda x: sign(x), x))


def repeated(x, sign):
    step = lambda s: (s[0] + 1, sign(s[1]) + s[1] * x)  # noqa: E731
    return rg.sum(rg.while_loop(lambda s: s[0] < 3, step, (0, x), max_steps=4)[1])


def batched(x, sign):
    return rg.sum(rg.vmap(lambda row: sign(row) * rg.sum(row))(x))


@pytest.mark.parametrize("f", [looped, branched, repeated, batched])
def test_loops_branches_and_vmap(f):
    x, p = rg.tensor(X / 16), rg.tensor(np.float64(1.3))
    hand = by_hand(rg.sign, slope, "beta")

    def ours(x, p):
        with override({"Sign": rg.rules.learns(slope, beta=p)}):
            return f(x, rg.sign)

    expected = to_second_order(lambda x, p: f(x, lambda z: hand(z, p)), x, p)
    for g in (ours, rg.jit(ours)):
        check(to_second_order(g, x, p), expected)
    check(rg.jit(lambda x, p: to_second_order(ours, x, p))(x, p), expected)


def test_a_graph():
    with tf.Graph().as_default():
        x, step = tf.placeholder(tf.float64, [None, 5]), tf.Variable(np.float64(0.7))
        with override({"Round": rg.rules.learns(lsq, step=step)}) as used:
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
    hand = by_hand(rg.round, lsq, "step")
    p = rg.tensor(np.float64(0.7))
    expected = to_second_order(lambda x, p: rg.sum(hand(x * 2, p) ** 2), rg.tensor(X), p)
    check(found, expected)
    check([after], [0.7 - 0.001 * expected[1]])


def test_against_differences():
    """Where the rule is the derivative of `alpha * tanh(x / alpha)`, its own values show it."""
    value = lambda x, alpha: alpha * rg.tanh(x / alpha)  # noqa: E731
    x, p, h = rg.tensor(X), 2.0, 1e-6

    def ours(p):
        learning = rg.rules.learns(rg.rules.vjp_of(value), alpha=p)
        closed = lambda x: value(x, p)  # noqa: E731
        for forward in (value, closed):
            with override({"Tanh": rg.replace(forward, learning)}, values=True):
                y = rg.sum(rg.tanh(x) ** 2)
        return y

    found = rg.grad(ours)(rg.tensor(np.float64(p)))
    up, down = (ours(rg.tensor(np.float64(q))) for q in (p + h, p - h))
    rise = (up - down) / (2 * h)
    np.testing.assert_allclose(found.numpy(), rise.numpy(), rtol=1e-8)


@pytest.mark.parametrize("way", WAYS)
def test_lsq_whole(way):
    """The value is quantised as well (Esser et al., 2020, equations 1 to 3)."""
    low, high = -4, 3

    def quantise(x, step):
        return rg.clip(rg.round(x / step), low, high) * step

    def rule(dy, x, step):
        v = x / step
        inside = (v > low) & (v < high)
        dstep = rg.where(inside, rg.round(v) - v, rg.clip(v, low, high))
        return rg.where(inside, dy, rg.zeros_like(dy)), {"step": rg.sum(dy * dstep)}

    @rg.custom_grad
    def by_hand(x, step, save):
        save([x, step])

        def gradients(dy, saved):
            dx, found = rule(dy, *saved)
            return dx, found["step"]

        return quantise(x, step), gradients

    def ours(x, step):
        learning = rg.replace(quantise, rg.rules.learns(rule, step=step))
        with override({"Identity": learning}, values=True):
            return twice(rg.identity, x)

    x, step = rg.tensor(X), rg.tensor(np.float64(0.3))
    theirs = lambda x, step: twice(lambda z: by_hand(z, step), x)  # noqa: E731
    check([ours(x, step)], [theirs(x, step)])
    check(to_second_order(WAYS[way](ours), x, step), to_second_order(theirs, x, step))


def test_builtin_and_forward_of_a_replaced_value():
    """Both are those of the function: x * step, whose derivative is the step."""

    def rule(dy, builtin, forward, x, step):
        return builtin(dy), {"step": rg.sum(dy * forward(2 * x))}

    step = rg.Variable(np.float64(3.0), name="step")
    learning = rg.replace(lambda x, step: x * step, rg.rules.learns(rule, step=step))
    with override({"Tanh": learning}, values=True):
        dx = rg.grad(lambda x: rg.sum(rg.tanh(x)))(rg.tensor(X))
        found = rg.variable_grads(lambda: rg.sum(rg.tanh(rg.tensor(X)))).grads
    check([dx, found["step"]], [np.full(X.shape, 3.0), np.sum(6 * X)])


def test_several_inputs_builtin_and_broadcasting():
    a, b = rg.tensor(X), rg.tensor(X[0])
    p, q = rg.Variable(np.float64(2.0), name="gain"), rg.Variable(np.ones(5), name="shift")

    def rule(dy, builtin, forward, a, b, gain, shift):
        by_a, by_b = builtin(dy) * gain
        return by_a, by_b, {"gain": rg.sum(dy * forward(a, b)), "shift": dy}

    rules = {"Mul": rg.rules.learns(rule, gain=p, shift=q)}
    with override(rules):
        found = rg.variable_grads(lambda: rg.sum(a * b)).grads
        dxs = rg.grad(lambda a, b: rg.sum(a * b), argnums=(0, 1))(a, b)
    check(dxs, [2 * np.broadcast_to(X[0], X.shape), 2 * X.sum(0)])
    check([found["gain"], found["shift"]], [np.sum(X * X[0]), np.full(5, 4.0)])

    def many(dy, xs, gain):
        return [gain * part for part in rg.split(dy, len(xs))], {"gain": rg.sum(dy)}

    with override({"ConcatV2": rg.rules.learns(many, gain=p)}):
        assert rg.grad(lambda x: rg.sum(rg.concat([x, x])))(b).tolist() == [4.0] * 5
        assert rg.variable_grads(lambda: rg.sum(rg.concat([b, b]))).grads["gain"].item() == 10


def test_at_a_place():
    p = rg.Variable(np.float64(2.0), name="alpha")
    x = rg.tensor(X)
    with override({rg.at("head", "Relu"): rg.rules.learns(pact, alpha=p)}):

        def loss():
            with rg.name_scope("head"):
                y = rg.nn.relu(x)
            return rg.sum(y) + rg.sum(rg.nn.relu(x))

        assert rg.variable_grads(loss).grads["alpha"].item() == np.sum(X >= 2)


# -- refused ---------------------------------------------------------------------------------------


def test_a_custom_function_around():
    """Its ops are not differentiated one by one, so the parameter would learn nothing."""
    p = rg.Variable(np.float64(2.0), name="alpha")

    @rg.custom_grad
    def around(x, save):
        with override({"Relu": rg.rules.learns(pact, alpha=p)}):
            return rg.nn.relu(x), lambda dy, saved: dy

    with pytest.raises(GradientError, match=r"around .* closes over the Variable 'alpha'"):
        rg.variable_grads(lambda: rg.sum(around(rg.tensor(X))) * p.value)


def test_what_is_refused():
    p = rg.Variable(2.0, name="step")
    for value in (2.0, np.ones(3)):
        with (
            pytest.raises(ArgumentError, match="step expected a Variable or a Tensor of regrad's"),
            override({"Round": rg.rules.learns(lsq, step=value)}),
        ):
            pass
    with (
        pytest.raises(GradientError, match="lsq: step is int32, and only floats"),
        override({"Round": rg.rules.learns(lsq, step=rg.tensor(1, dtype=np.int32))}),
    ):
        rg.round(rg.tensor(X))
    with (
        pytest.raises(RuleError, match="'Split' returns several results"),
        override({"Split": rg.rules.learns(lambda dy, step: dy, step=p)}),
    ):
        pass
    with (
        pytest.raises(RuleError, match=r"'lsq'.* asks for 'x'"),
        override({"MatMul": rg.rules.learns(lsq, step=p)}),
    ):
        pass
    with (
        pytest.raises(ArgumentError, match=r"learns\(lsq, step\) is for a whole call here"),
        override({rg.at("head"): rg.rules.learns(lsq, step=p)}),
    ):
        pass
    with (
        pytest.raises(GraphError, match="nor its rule learn"),
        override({"Identity": rg.rules.learns(lsq, step=p)}),
        tf.Graph().as_default(),
    ):
        tf.Variable(1.0).read_value()
    with pytest.raises(ArgumentError, match="order=1 asks"):
        override({"Round": rg.rules.learns(lsq, step=p)}, order=1)


@pytest.mark.parametrize(
    "answer", [lambda dy: dy, lambda dy: (dy, {}), lambda dy: (dy, {"st": dy})]
)
def test_answers_without_the_parameter(answer):
    p = rg.Variable(2.0, name="step")
    with (
        override({"Relu": rg.rules.learns(lambda dy, step: answer(dy), step=p)}),
        pytest.raises(RuleError, match="learns step, and did not return gradients by name"),
    ):
        rg.variable_grads(lambda: rg.sum(rg.nn.relu(rg.ones(2)) * p.value))


def test_a_gradient_of_another_shape():
    p = rg.Variable(2.0, name="step")
    with (
        override({"Cumsum": rg.rules.learns(lambda dy, step: (dy, {"step": dy}), step=p)}),
        pytest.raises(RuleError, match=r"input 'step', returned the shape \(2,\), expected"),
    ):
        rg.variable_grads(lambda: rg.sum(rg.cumulative_sum(rg.ones(2))))


def surrogate(x, no, alpha, more):
    return x


@pytest.mark.parametrize("learned", [False, True])
def test_a_rule_that_does_not_fit_is_placed_at_the_users_function(learned):
    rule = rg.rules.vjp_of(surrogate)
    rule = rg.rules.learns(rule, alpha=rg.Variable(2.0)) if learned else rule
    place = re.escape(f"(surrogate, {__file__}:{surrogate.__code__.co_firstlineno}) asks for 'no")
    with pytest.raises(RuleError, match=place), rg.gradient_override_map({"Relu": rule}):
        rg.grad(rg.nn.relu)(rg.tensor(1.0))
