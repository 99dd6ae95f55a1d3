"""Compiled functions under overrides, and differentiated from outside."""

from __future__ import annotations

import numpy as np
import pytest

import regrad as rg
from regrad.errors import (
    GradientError,
)
from tests.helpers.quick import nothing_is_left_open

pytestmark = pytest.mark.usefixtures(nothing_is_left_open.__name__)


# -- overrides -------------------------------------------------------------------------------------


def test_rules_whose_closure_changes():
    k = 2.0
    f = rg.jit(rg.grad(rg.sign))
    g = rg.grad(rg.jit(rg.sign))
    for k in (2.0, 5.0, 2.0):
        with rg.gradient_override_map({"Sign": lambda dy: dy * k}):  # noqa: B023 (what is tested)
            assert (f(rg.scalar(1.0)).item(), g(rg.scalar(1.0)).item()) == (k, k)
    with rg.gradient_override_map({"Sign": lambda dy: dy * k}):
        for k in (3.0, 4.0):
            assert (f(rg.scalar(1.0)).item(), g(rg.scalar(1.0)).item()) == (k, k)
    assert f(rg.scalar(1.0)).item() == 0.0


def test_rules_that_close_over_tensors_variables_and_arrays():
    t, v, a = rg.scalar(2.0), rg.Variable(3.0), np.array(4.0, np.float32)
    f, g = rg.jit(rg.grad(rg.sign)), rg.grad(rg.jit(rg.sign))
    with rg.gradient_override_map({"Sign": lambda dy: dy * t * v * a}):
        assert (f(rg.scalar(1.0)).item(), g(rg.scalar(1.0)).item()) == (24.0, 24.0)
        t = rg.scalar(1.0)
        assert (f(rg.scalar(1.0)).item(), g(rg.scalar(1.0)).item()) == (12.0, 12.0)
        v.assign(1.0)
        assert (f(rg.scalar(1.0)).item(), g(rg.scalar(1.0)).item()) == (4.0, 4.0)
        a[...] = 7.0
        assert (f(rg.scalar(1.0)).item(), g(rg.scalar(1.0)).item()) == (7.0, 7.0)


def test_rules_registered_again():
    @rg.op("TestsJitStep")
    def step(xp, x: rg.Tensor, /) -> rg.Tensor:
        return xp.sign(x)

    @rg.gradient("TestsJitStep")
    def _(dy):
        return dy * 2

    f, g = rg.jit(rg.grad(step)), rg.grad(rg.jit(step))
    assert (f(rg.scalar(1.0)).item(), g(rg.scalar(1.0)).item()) == (2.0, 2.0)

    @rg.gradient("TestsJitStep", overwrite=True)
    def _(dy):
        return dy * 3

    assert (f(rg.scalar(1.0)).item(), g(rg.scalar(1.0)).item()) == (3.0, 3.0)


def test_hits_of_cached_calls():
    f, g = rg.jit(rg.grad(rg.sign)), rg.grad(rg.jit(rg.sign))
    h = rg.grad(lambda x: rg.jit(rg.sign)(x) + rg.sign(x))
    for call in (f, g, f, g):
        with rg.gradient_override_map({"Sign": "Identity"}) as used:
            call(rg.scalar(1.0))
            used.assert_fired()
            assert [(hit.count, hit.ran) for hit in used.hits] == [(1, 1)]
            call(rg.scalar(1.0))
        assert [(hit.count, hit.ran) for hit in used.hits] == [(2, 2)]
    with rg.gradient_override_map({"Sign": "Identity"}) as used:
        h(rg.scalar(1.0))
    assert sum(hit.count for hit in used.hits) == sum(hit.ran for hit in used.hits) == 2


def test_a_rule_that_does_not_run_has_not_fired():
    f = rg.jit(lambda x: rg.sign(x) * 2)
    with rg.gradient_override_map({"Sign": "Identity"}) as used:
        f(rg.scalar(1.0))
        f(rg.scalar(1.0))
    assert [(hit.count, hit.ran) for hit in used.hits] == [(2, 0)]
    with pytest.raises(rg.errors.NotFiredError, match="no gradient passed"):
        used.assert_fired()


def test_a_rule_that_is_wrong_says_so_under_jit():
    f = rg.jit(rg.grad(lambda x: rg.sign(x).sum()))
    with (
        pytest.raises(rg.errors.RuleError, match=r"shape \(7,\), expected \(2,\)"),
        rg.gradient_override_map({"Sign": lambda dy: rg.ones((7,))}),
    ):
        f(rg.ones((2,)))


# -- differentiation from outside ------------------------------------------------------------------


def cubed(x, w):
    return (rg.sin(x) * w * x * x).sum()


X, W = np.array([0.3, -1.2, 2.0]), np.array([1.5, 0.5, -1.0])


def close(a, b):
    np.testing.assert_allclose(np.asarray(a._values()), np.asarray(b._values()), rtol=1e-11)


def test_gradients_of_a_compiled_function():
    f = rg.jit(cubed)
    for a, b in zip(rg.grads(f)([X, W]), rg.grads(cubed)([X, W]), strict=True):
        close(a, b)
    value, dx = rg.value_and_grad(lambda x: f(x, W))(X)
    close(value, cubed(rg.asarray(X), W))
    close(dx, rg.grad(lambda x: cubed(x, W))(X))
    (y, back), (due, due_back) = rg.vjp(f, X, W), rg.vjp(cubed, X, W)
    close(y, due)
    for a, b in zip(back(2.0), due_back(2.0), strict=True):
        close(a, b)
    for a, b in zip(rg.jvp(f, [X, W], [W, X]), rg.jvp(cubed, [X, W], [W, X]), strict=True):
        close(a, b)


@pytest.mark.parametrize("where", ["inside", "outside", "between", "twice"])
def test_orders_to_three(where):
    def total(g):
        return lambda x: (rg.grad(g)(x) * W).sum()

    f = lambda x: cubed(x, W)  # noqa: E731
    due = rg.grad(total(total(f)))(X)
    g = {
        "inside": lambda: rg.jit(rg.grad(total(total(f)))),
        "outside": lambda: rg.grad(total(total(rg.jit(f)))),
        "between": lambda: rg.grad(total(rg.jit(total(f)))),
        "twice": lambda: rg.grad(rg.jit(total(rg.jit(total(f))))),
    }[where]()
    close(g(X), due)
    close(g(X), due)


@pytest.mark.parametrize("api", [rg.jacobian, rg.hessian])
def test_jacobians_and_hessians(api):
    f = (lambda x: cubed(x, W)) if api is rg.hessian else (lambda x: rg.sin(x) * x.sum())
    due = api(f)(X)
    close(api(rg.jit(f))(X), due)
    close(rg.jit(api(f))(X), due)
    close(rg.jit(api(rg.jit(f)))(X), due)


def test_what_is_closed_over_is_differentiated():
    def f(w, x):
        return rg.jit(lambda x: x * w * w)(x).sum()

    assert rg.grads(f)([rg.scalar(3.0), rg.scalar(2.0)])[0].item() == 12.0
    second = rg.grad(lambda w: rg.grad(lambda w: f(w, rg.scalar(2.0)))(w))
    assert second(rg.scalar(3.0)).item() == 4.0
    v = rg.Variable(3.0)
    g = rg.jit(lambda x: x * v * v)
    assert rg.variable_grads(lambda: g(rg.scalar(2.0))).grads[v.name].item() == 12.0
    by_v = lambda: rg.variable_grads(lambda: g(rg.scalar(2.0))).grads[v.name]  # noqa: E731
    assert rg.variable_grads(by_v).grads[v.name].item() == 4.0


def test_variables_assigned_in_a_compiled_function_keep_their_history():
    v, x = rg.Variable(2.0), rg.scalar(3.0)
    f = rg.jit(lambda x: v.assign(v * x))

    def loss(x):
        f(x)
        f(x)
        return v * 1

    assert rg.grad(loss)(x).item() == 12.0
    v.assign(2.0)
    assert rg.variable_grads(lambda: loss(x)).grads[v.name].item() == 9.0


def test_wrt_some_variables_only():
    a, b = rg.Variable(2.0, name="a"), rg.Variable(5.0, name="b", trainable=False)
    f = rg.jit(lambda: a * b * b)
    assert {k: g.item() for k, g in rg.variable_grads(f).grads.items()} == {"a": 25.0}
    both = rg.variable_grads(f, [a, b]).grads
    assert (both["a"].item(), both["b"]) == (25.0, None)
    c = rg.Variable(1.0, name="c")
    with pytest.raises(GradientError):
        rg.variable_grads(f, [c])


def test_no_path_is_an_error_as_in_eager_mode():
    for f in (lambda x, y: y * 2, lambda x, y: rg.stop_gradient(x) * y, lambda x, y: y + (x > 0)):
        with pytest.raises(GradientError) as eager:
            rg.grads(f)([rg.scalar(1.0), rg.scalar(2.0)])
        for g in (
            rg.grads(rg.jit(f)),
            lambda xs, f=f: rg.jit(lambda *xs: rg.grads(f)(list(xs)))(*xs),
        ):
            with pytest.raises(GradientError) as compiled:
                g([rg.scalar(1.0), rg.scalar(2.0)])
            assert str(compiled.value) == str(eager.value)
        zeros = rg.grads(rg.jit(f), unconnected="zero")([rg.scalar(1.0), rg.scalar(2.0)])
        assert zeros[0].item() == 0.0


def test_outputs_that_are_not_connected():
    f = rg.jit(lambda x, y: (x * 2, y * 3, rg.sign(x)))
    assert rg.grad(lambda x: f(x, rg.scalar(1.0))[0])(rg.scalar(1.0)).item() == 2.0
    with pytest.raises(GradientError):
        rg.grad(lambda x: f(x, rg.scalar(1.0))[1])(rg.scalar(1.0))
    np.asarray(rg.grad(lambda x: f(x, rg.scalar(1.0))[0])(rg.scalar(1.0)))


def test_forward_mode_is_refused_for_rules_that_are_not_linear():
    f = rg.jit(rg.sign)
    with (
        rg.gradient_override_map({"Sign": lambda dy: rg.where(dy > 0, dy, 0.0)}),
        pytest.raises(GradientError, match="forward mode"),
    ):
        rg.jvp(f, [rg.scalar(1.0)], [rg.scalar(1.0)])


def test_custom_gradients_around_and_inside():
    halved = rg.custom_grad(lambda x: (rg.sin(x), lambda dy: dy * 0.5))
    assert rg.grad(rg.jit(halved))(rg.scalar(1.0)).item() == 0.5
    assert rg.jit(rg.grad(halved))(rg.scalar(1.0)).item() == 0.5
    inner = rg.jit(lambda x: x * x)
    around = rg.custom_grad(lambda x: (inner(x), lambda dy: dy * 7))
    assert rg.grad(around)(rg.scalar(3.0)).item() == 7.0
    assert rg.grad(rg.jit(around))(rg.scalar(3.0)).item() == 7.0


def test_a_custom_function_around_a_closure_is_refused():
    def f(w):
        inner = rg.jit(lambda x: x * w)
        return rg.custom_grad(lambda x: (inner(x), lambda dy: dy))(w * 1.0)

    for g in (rg.grad(f), rg.jit(rg.grad(f)), rg.grad(rg.jit(f))):
        with pytest.raises(GradientError, match="closes over"):
            g(rg.scalar(2.0))
    v = rg.Variable(2.0)
    inner = rg.jit(lambda x: x * v)
    custom = rg.custom_grad(lambda x: (inner(x), lambda dy: dy))
    with pytest.raises(GradientError, match=r"closes over|Variable"):
        rg.variable_grads(lambda: custom(rg.scalar(1.0)) * v)


def test_one_tensor_as_two_arguments():
    f = rg.jit(lambda a, b: a * a * b)
    da, db = rg.grads(f)([rg.scalar(3.0), rg.scalar(3.0)])
    assert (da.item(), db.item()) == (18.0, 9.0)
    x = rg.scalar(3.0)
    assert rg.grad(lambda x: f(x, x))(x).item() == 27.0


def test_no_perturbation_confusion():
    f = rg.jit(lambda x, y: x * y)
    g = lambda x: x * rg.grad(lambda y: f(x, y))(rg.scalar(2.0))  # noqa: E731
    assert rg.grad(g)(rg.scalar(3.0)).item() == 6.0 - 0.0
    assert rg.jit(rg.grad(g))(rg.scalar(3.0)).item() == 6.0
