"""Compiled functions under overrides, differentiated from outside, and with Variables."""

import functools

import jax.numpy as jnp
import numpy as np
import optree
import pytest

import regrad as rg
from regrad.errors import GradientError, NotFiredError, RuleError
from tests.helpers.quick import nothing_is_left_open
from tests.helpers.rows import refused, under

pytestmark = pytest.mark.usefixtures(nothing_is_left_open.__name__)
ONE, TWO, THREE = rg.scalar(1.0), rg.scalar(2.0), rg.scalar(3.0)


# -- overrides -------------------------------------------------------------------------------------


def test_rules_registered_again():
    @rg.op("TestsJitStep")
    def step(xp, x: rg.Tensor, /) -> rg.Tensor:
        return xp.sign(x)

    f, g = rg.jit(rg.grad(step)), rg.grad(rg.jit(step))
    for factor in (2.0, 3.0):
        rg.gradient("TestsJitStep", overwrite=factor > 2)(lambda dy, k=factor: dy * k)
        assert (f(ONE).item(), g(ONE).item()) == (factor, factor)


def test_hits_of_cached_calls():
    f, g = rg.jit(rg.grad(rg.sign)), rg.grad(rg.jit(rg.sign))
    h = rg.grad(lambda x: rg.jit(rg.sign)(x) + rg.sign(x))
    for call in (f, g, f, g):
        with rg.gradient_override_map({"Sign": "Identity"}) as used:
            call(ONE)
            used.assert_fired()
            assert [(hit.count, hit.ran) for hit in used.hits] == [(1, 1)]
            call(ONE)
        assert [(hit.count, hit.ran) for hit in used.hits] == [(2, 2)]
    with rg.gradient_override_map({"Sign": "Identity"}) as used:
        h(ONE)
    assert sum(hit.count for hit in used.hits) == sum(hit.ran for hit in used.hits) == 2
    forward = rg.jit(lambda x: rg.sign(x) * 2)
    with rg.gradient_override_map({"Sign": "Identity"}) as used:
        forward(ONE), forward(ONE)
    assert [(hit.count, hit.ran) for hit in used.hits] == [(2, 0)]
    refused(used.assert_fired, NotFiredError, "no gradient passed")


def test_a_rule_that_is_wrong_says_so_under_jit():
    f = rg.jit(rg.grad(lambda x: rg.sign(x).sum()))
    call = lambda: under({"Sign": lambda dy: rg.ones((7,))}, f, rg.ones((2,)))  # noqa: E731
    refused(call, RuleError, r"shape \(7,\), expected \(2,\)")


# -- differentiation from outside ------------------------------------------------------------------


X, W = np.array([0.3, -1.2, 2.0]), np.array([1.5, 0.5, -1.0])


def cubed(x, w):
    return (rg.sin(x) * w * x * x).sum()


def flat(ys):
    """All numbers of a result, one after another."""
    return np.hstack([np.ravel(np.asarray(y._values())) for y in optree.tree_leaves(ys)])


APIS = {
    "grads": lambda f: rg.grads(f)([X, W]),
    "value_and_grad": lambda f: tuple(rg.value_and_grad(lambda x: f(x, W))(X)),
    "vjp": lambda f: rg.vjp(f, X, W)[1](2.0), "jvp": lambda f: rg.jvp(f, [X, W], [W, X]),
    "hessian": lambda f: rg.hessian(lambda x: f(x, W))(X),
    "jacobian": lambda f: rg.jacobian(lambda x: f(x, W) * x)(X),
    "third order": lambda f: rg.grad(total(total(lambda x: f(x, W))))(X),
}  # fmt: skip


def total(g):
    return lambda x: (rg.grad(g)(x) * W).sum()


@pytest.mark.parametrize("api", APIS)
def test_derivatives_of_a_compiled_function(api):
    due, f, derived = flat(APIS[api](cubed)), rg.jit(cubed), APIS[api]
    for g in (lambda: derived(f), rg.jit(lambda: derived(cubed)), rg.jit(lambda: derived(f))):
        for _ in range(2):
            np.testing.assert_allclose(flat(g()), due, rtol=1e-11)


def test_derivatives_by_variables():
    v = rg.Variable(3.0)
    g = rg.jit(lambda x: x * v * v)
    by_v = lambda f: lambda: rg.variable_grads(f).grads[v.name]  # noqa: E731
    assert by_v(lambda: g(TWO))().item() == 12.0
    assert by_v(by_v(lambda: g(TWO)))().item() == 4.0
    h = rg.jit(lambda x: x * v)
    assert (h(v).item(), by_v(lambda: h(v))().item()) == (9.0, 6.0)


def test_variables_assigned_in_a_compiled_function_keep_their_history():
    v = rg.Variable(2.0)
    f = rg.jit(lambda x: v.assign(v * x))
    loss = lambda x: (f(x), f(x), v * 1)[2]  # noqa: E731
    assert rg.grad(loss)(THREE).item() == 12.0
    v.assign(2.0)
    assert rg.variable_grads(lambda: loss(THREE)).grads[v.name].item() == 9.0


def test_wrt_some_variables_only():
    a, b = rg.Variable(2.0, name="a"), rg.Variable(5.0, name="b", trainable=False)
    f = rg.jit(lambda: a * b * b)
    assert {k: g.item() for k, g in rg.variable_grads(f).grads.items()} == {"a": 25.0}
    both = rg.variable_grads(f, [a, b]).grads
    assert (both["a"].item(), both["b"]) == (25.0, None)
    refused(lambda: rg.variable_grads(f, [rg.Variable(1.0, name="c")]), GradientError)


@pytest.mark.parametrize(
    "f",
    [lambda x, y: y * 2, lambda x, y: rg.stop_gradient(x) * y, lambda x, y: y + (x > 0),
     lambda x, y: (y * 3, x * 2, rg.sign(x))[0]],
)  # fmt: skip
def test_no_path_is_an_error_as_in_eager_mode(f):
    with pytest.raises(GradientError) as eager:
        rg.grads(f)([ONE, TWO])
    for g in rg.grads(rg.jit(f)), lambda xs: rg.jit(lambda *xs: rg.grads(f)(list(xs)))(*xs):
        with pytest.raises(GradientError) as compiled:
            g([ONE, TWO])
        assert str(compiled.value) == str(eager.value)
    assert rg.grads(rg.jit(f), unconnected="zero")([ONE, TWO])[0].item() == 0.0


def test_one_result_of_several():
    f = rg.jit(lambda x, y: (x * 2, y * 3, rg.sign(x)))
    assert rg.grad(lambda x: f(x, ONE)[0])(ONE).item() == 2.0
    refused(lambda: rg.grad(lambda x: f(x, ONE)[1])(ONE), GradientError)


def test_custom_gradients_around_and_inside():
    halved = rg.custom_grad(lambda x: (rg.sin(x), lambda dy: dy * 0.5))
    inner = rg.jit(lambda x: x * x)
    around = rg.custom_grad(lambda x: (inner(x), lambda dy: dy * 7))
    for f, due in (halved, 0.5), (around, 7.0):
        for g in rg.grad(rg.jit(f)), rg.jit(rg.grad(f)), rg.grad(f):
            assert g(THREE).item() == due


def test_a_custom_function_around_a_closure_is_refused():
    closing = lambda w: rg.jit(lambda x: x * w)  # noqa: E731
    f = lambda w: rg.custom_grad(lambda x: (closing(w)(x), lambda dy: dy))(w * 1.0)  # noqa: E731
    for g in (rg.grad(f), rg.jit(rg.grad(f)), rg.grad(rg.jit(f))):
        with pytest.raises(GradientError, match="closes over"):
            g(TWO)
    v = rg.Variable(2.0)
    custom = rg.custom_grad(lambda x: (closing(v)(x), lambda dy: dy))
    with pytest.raises(GradientError, match=r"closes over|Variable"):
        rg.variable_grads(lambda: custom(ONE) * v)


# -- Variables -------------------------------------------------------------------------------------


def training(mode):
    """Ten steps of gradient descent with momentum; the losses and weights."""
    rng = np.random.default_rng(0)
    w, b = rg.Variable(rng.normal(size=(3, 2)), name="w"), rg.Variable(np.zeros(2), name="b")
    m = rg.Variable(np.zeros((3, 2)), trainable=False, name="m")
    steps = rg.Variable(0, trainable=False, dtype="int32")

    @mode
    def step(x, y):
        loss, grads = rg.variable_grads(lambda: (rg.tanh(x @ w + b) - y).square().mean())
        m.assign(m * 0.9 + grads["w"])
        w.assign_sub(0.5 * m)
        b.assign_sub(0.5 * grads["b"])
        steps.assign_add(1)
        return loss

    losses = [step(rng.normal(size=(4, 3)), rng.normal(size=(4, 2))) for _ in range(10)]
    return [rg.stack(losses).numpy(), *[v.numpy() for v in (w, b, m, steps)]]


def test_training_is_what_it_is_in_eager_mode():
    for a, b in zip(training(rg.jit), training(lambda f: f), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-15)


def test_what_was_read_stays_readable_after_later_steps():
    v = rg.Variable(np.arange(4.0))
    step, blind = rg.jit(lambda: (v.assign_add(1.0), v.value)[1]), rg.jit(lambda: v.assign_add(1.0))
    blind()
    kept = [(1, v.value, v.numpy())]
    for i in range(2, 6):
        y = step()
        kept += [(i, y, y.numpy()), (i, v.value, v.numpy())]
    for _ in range(3):
        blind()
    for i, value, view in kept:
        np.testing.assert_array_equal(value.numpy(), np.arange(4.0) + i)
        np.testing.assert_array_equal(view, np.arange(4.0) + i)


def test_values_that_are_assigned_as_they_are():
    """One value for two Variables, an argument, two Variables that are swapped."""
    a, b, x = (rg.Variable(np.zeros(2)), rg.Variable(np.zeros(2)), rg.asarray(jnp.ones(2)))
    first = rg.jit(lambda: a.assign_add(10.0))
    given = rg.jit(lambda x: a.assign(x))

    @rg.jit
    def both(x):
        y = x + 1
        a.assign(y)
        b.assign(y)
        return y

    @rg.jit
    def swap():
        x, y = a.value, b.value
        a.assign(y)
        b.assign(x)

    y = both(np.ones(2))
    first(), first()
    assert (y.tolist(), a.tolist(), b.tolist()) == ([2, 2], [22, 22], [2, 2])
    for i in range(4):
        swap()
        assert (a.tolist(), b.tolist()) == (([2, 2], [22, 22]), ([22, 22], [2, 2]))[i % 2]
    given(x)
    first(), first()
    assert (x.tolist(), a.tolist()) == ([1.0, 1.0], [21.0, 21.0])
    for k in 1.0, 3.0:  # a value that is not read
        given(np.ones(2) * k)
        assert a.tolist() == [k, k]


def test_variables_in_a_list_that_grows():
    layers = [rg.Variable(2.0)]
    f = rg.jit(lambda x: functools.reduce(lambda y, v: y * v, layers, x))
    assert f(rg.scalar(1.0)).item() == 2.0
    layers.append(rg.Variable(5.0))
    assert f(rg.scalar(1.0)).item() == 10.0
    layers[0] = rg.Variable(3.0)
    assert f(rg.scalar(1.0)).item() == 15.0
