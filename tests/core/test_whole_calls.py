"""Rules for whole calls of functions that a name_scope decorates, against custom gradients."""

import numpy as np
import pytest

import regrad as rg
from regrad.errors import (
    ArgumentError,
    GradientError,
    PassedOverError,
    RuleError,
    UnusedOverrideWarning,
)

at = rg.at
X = rg.tensor([0.3, -0.7, 1.1], dtype="float64")
W = rg.Variable(np.array([1.5, 2.0, -0.5]), name="w")


@rg.name_scope("block")
def block(x):
    return rg.tanh(x * W)


def f(x, part=block):
    return rg.sum(rg.square(part(rg.sin(x))))


def bent(dy):
    return 2 * rg.sin(dy)


def pre(dy, builtin):
    return builtin(bent(dy))


def post(dy, builtin):
    return bent(builtin(dy))


def by_hand(before, after):
    """The block with a gradient that is bent as it arrives, or as it leaves."""

    @rg.custom_grad
    def function(x, w, save):
        save([x, w])

        def gradient(dy, saved):
            x, w = saved
            slope = before(dy) * (1 - rg.square(rg.tanh(x * w)))
            return [after(slope * w), slope * x]

        return rg.tanh(x * w), gradient

    return lambda x: function(x, W)


def same(dy):
    return dy


arriving, leaving = by_hand(bent, same), by_hand(same, bent)


def gradients(part):
    dx = rg.grad(lambda x: f(x, part))(X)
    dw = rg.variable_grads(lambda: f(X, part)).grads["w"]
    second = rg.grad(lambda x: rg.sum(rg.square(rg.grad(lambda x: f(x, part))(x))))(X)
    return [np.asarray(dx), np.asarray(dw), np.asarray(second)]


def check(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "where", ["block", "*", ("other", "block"), lambda site: site.path == "block"]
)
@pytest.mark.parametrize(("rule", "part"), [(pre, arriving), (post, leaving)])
def test_rules_that_ask_for_builtin(where, rule, part):
    expected = gradients(part)
    with rg.gradient_override_map({at(where): rule}) as used:
        check(gradients(block), expected)
    used.assert_fired()
    used.assert_fired(at(where))
    assert {(hit.op_type, hit.path) for hit in used.hits} == {("Call", "block")}
    check(gradients(block), gradients(lambda x: rg.tanh(x * W)))


def test_reversal():
    plain, _, _ = gradients(block)
    dw = rg.variable_grads(lambda: f(X)).grads["w"]
    with rg.gradient_override_map({at("block"): rg.rules.reverse(0.5)}):
        found = rg.grad(f)(X), rg.variable_grads(lambda: f(X)).grads["w"]
    check(map(np.asarray, found), [-0.5 * plain, np.asarray(dw)])


def test_parameters_by_name():
    def rule(dy, x, w):
        return dy * x, {"w": dy * w * 3}

    with rg.gradient_override_map({at("block"): rule}):
        dx = rg.grad(f)(X)
        dw = rg.variable_grads(lambda: f(X)).grads["w"]
    h, w, x = np.sin(np.asarray(X)), np.array([1.5, 2.0, -0.5]), np.asarray(X)
    dy = 2 * np.tanh(h * w)
    check([np.asarray(dx), np.asarray(dw)], [dy * h * np.cos(x), dy * w * 3])


def test_outputs_and_nested_paths():
    @rg.name_scope("two")
    def two(a, k, b):
        return {"sum": a * k + b, "product": a * b}

    def g(a, b):
        with rg.name_scope("model"):
            y = two(a, 3.0, b)
        return rg.sum(y["sum"]) + rg.sum(rg.square(y["product"]))

    def rule(dy, a, k, b):
        by_product, by_sum = dy
        return by_sum * k + by_product * b, by_sum + by_product * a

    b = rg.tensor([1.0, 2.0, 3.0], dtype="float64")
    expected = rg.grads(g)([X, b])
    for each in (rule, lambda dy, builtin: builtin(dy)):
        with rg.gradient_override_map({at("model.two"): each}) as used:
            check(map(np.asarray, rg.grads(g)([X, b])), map(np.asarray, expected))
        used.assert_fired()


def test_transforms():
    pytest.importorskip("jax")
    x, w = rg.astype(X, "float32"), rg.Variable(rg.tensor([1.5, 2.0, -0.5]), name="w")

    @rg.name_scope("block")
    def small(x):
        return rg.tanh(x * w)

    @rg.name_scope("block")
    def batched(x, w):
        return rg.tanh(x * w)

    def g(x):
        return f(x, small)

    with rg.gradient_override_map({at("block"): pre}) as used:
        expected = np.asarray(rg.grad(g)(x))
        for each in (rg.jit(rg.grad(g)), rg.grad(rg.jit(g)), rg.grad(rg.checkpoint(g))):
            np.testing.assert_allclose(np.asarray(each(x)), expected, rtol=1e-5)
        rows = rg.vmap(rg.grad(lambda x, w: rg.sum(rg.square(batched(x, w))), argnums=0))
        found = rows(x, rg.tensor([1.5, 2.0, -0.5]))
    y = np.tanh(np.asarray(x) * [1.5, 2.0, -0.5])
    slopes = np.array([1.5, 2.0, -0.5]) * (1 - y**2)
    np.testing.assert_allclose(np.asarray(found), 2 * np.sin(2 * y) * slopes, rtol=1e-5)
    assert not np.allclose(expected, np.asarray(rg.grad(g)(x)))
    assert sum(hit.ran for hit in used.hits) >= 4


def test_what_is_refused():
    for where in (block, rg.Module, rg.Module()):
        with (
            pytest.raises(ArgumentError, match="functions that a name_scope decorates"),
            rg.gradient_override_map({at(where): pre}),
        ):
            pass

    def blocked(x):
        with rg.name_scope("block"):
            return rg.tanh(x)

    key = {at("block"): rg.rules.optional(pre)}
    with (
        rg.gradient_override_map(key),
        pytest.raises(ArgumentError, match=r"'block' is a block\. Write it above a function"),
    ):
        rg.grad(lambda x: f(x, blocked))(X)
    with (
        pytest.raises(PassedOverError, match="'Tanh' ran inside of the call of 'block'"),
        rg.gradient_override_map({**key, "Tanh": lambda dy: dy}),
    ):
        f(X)
    with (
        pytest.raises(RuleError, match="did not call builtin, so nobody knows the gradient of 'w'"),
        rg.gradient_override_map({at("block"): lambda dy, x: dy * x}),
    ):
        rg.variable_grads(lambda: f(X))
    with (
        rg.gradient_override_map({at("block"): pre}),
        pytest.raises(GradientError, match="forward mode"),
    ):
        rg.jvp(f, [X], [X])
    with (
        pytest.warns(UnusedOverrideWarning, match="other"),
        rg.gradient_override_map({at("other"): pre}),
    ):
        f(X)


def test_keywords_in_another_order_than_the_signature():
    @rg.name_scope("pair")
    def pair(second, first):
        return 2 * second + 3 * first

    def called(second, first):
        return rg.sum(pair(first=first, second=second))

    with rg.gradient_override_map({at("pair"): lambda dy, second, first: (5 * dy, 7 * dy)}):
        assert [dx.tolist() for dx in rg.grads(called)([X, X])] == [[5.0] * 3, [7.0] * 3]
    with rg.gradient_override_map({at("pair"): lambda dy, builtin: builtin(7 * dy)}):
        assert [dx.tolist() for dx in rg.grads(called)([X, X])] == [[14.0] * 3, [21.0] * 3]
