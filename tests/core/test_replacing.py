"""Rules that replace the values of regrad's ops: eager, compiled, in graphs, of higher order."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.errors import ArgumentError, GraphError, RuleError

rng = np.random.default_rng(0)
A, B, X = rng.normal(size=(3, 4)), rng.normal(size=(4, 2)), np.array([1.5, -2.0, 3.0])


@pytest.fixture(autouse=True)
def doubles():
    with jax.enable_x64(True):
        yield


def scope(forward, gradient=None, op_type="Tanh"):
    return rg.gradient_override_map({op_type: rg.replace(forward, gradient)}, values=True)


# -- an int8 linear layer --------------------------------------------------------------------------


def quantised(x):
    scale = abs(x).max() / 127
    return rg.clip(rg.round(x / scale), -128, 127) * scale


def quantised_by_numpy(x):
    scale = np.abs(x).max() / 127
    return np.clip(np.round(x / scale), -128, 127) * scale


def straight_through(dy, a, b):
    return dy @ rg.matrix_transpose(b), rg.matrix_transpose(a) @ dy


def layer(a):
    return (a @ rg.tensor(B)).square().sum()


def expected_layer():
    """The value, and the gradient by a, of a quantised product with a straight-through gradient."""
    y = quantised_by_numpy(A) @ quantised_by_numpy(B)
    return np.sum(y**2), 2 * y @ B.T


ways = {
    "eager": lambda f: f,
    "jit": rg.jit,
    "checkpoint": rg.checkpoint,
    "jit of checkpoint": lambda f: rg.jit(rg.checkpoint(f)),
}


@pytest.mark.parametrize("way", ways)
def test_a_quantised_layer(way):
    y, da = expected_layer()
    with scope(lambda a, b, forward: forward(quantised(a), quantised(b)), straight_through,
               "MatMul") as used:  # fmt: skip
        f = ways[way](layer)
        np.testing.assert_allclose(f(rg.tensor(A)).numpy(), y, rtol=1e-12)
        np.testing.assert_allclose(rg.grad(f)(rg.tensor(A)).numpy(), da, rtol=1e-12)
        np.testing.assert_allclose(rg.jit(rg.grad(f))(rg.tensor(A)).numpy(), da, rtol=1e-12)
    used.assert_fired()
    assert {hit.rule for hit in used.hits} == {"replace(<lambda>, straight_through)"}
    np.testing.assert_allclose(layer(rg.tensor(A)).numpy(), np.sum((A @ B) ** 2), rtol=1e-12)


def test_second_order_through_a_rule_of_y():
    """The derivative of `dy * y * x`, where y follows the rule as well: `y * x**2 + y`."""
    with scope(lambda x: rg.where(x > 0, x * x, x), lambda dy, x, y: dy * y * x):
        y = np.where(X > 0, X**2, X)
        f = lambda x: rg.tanh(x).sum()  # noqa: E731
        np.testing.assert_allclose(rg.tanh(rg.tensor(X)).numpy(), y)
        np.testing.assert_allclose(rg.grad(f)(rg.tensor(X)).numpy(), y * X)
        for hessian in (rg.hessian(f), rg.jit(rg.hessian(f)), rg.hessian(rg.jit(f))):
            found = hessian(rg.tensor(X)).numpy()
            np.testing.assert_allclose(found, np.diag(y * X**2 + y), rtol=1e-12)


def test_without_a_rule_it_is_the_derivative_of_the_function():
    """A stop_gradient in it counts: the value is x**3, the gradient that of sin."""

    def forward(x):
        return rg.sin(x) + rg.stop_gradient(x**3 - rg.sin(x))

    with scope(forward) as used:
        f = lambda x: rg.tanh(x).sum()  # noqa: E731
        np.testing.assert_allclose(f(rg.tensor(X)).numpy(), np.sum(X**3), rtol=1e-12)
        for way in (f, rg.jit(f)):
            np.testing.assert_allclose(rg.grad(way)(rg.tensor(X)).numpy(), np.cos(X), rtol=1e-12)
            found = rg.hessian(way)(rg.tensor(X)).numpy()
            np.testing.assert_allclose(found, -np.diag(np.sin(X)), rtol=1e-12)
    used.assert_fired()


def test_loops_branches_and_vmap():
    with scope(lambda x: x * x, lambda dy, x, y: dy * y):
        x = rg.tensor(X)
        looped = lambda x: rg.scan(lambda c, _: (rg.tanh(c) + 1, c), x, rg.zeros(2))[0].sum()  # noqa: E731
        np.testing.assert_allclose(looped(x).numpy(), np.sum((X**2 + 1) ** 2 + 1))
        np.testing.assert_allclose(rg.grad(looped)(x).numpy(), X**2 * (X**2 + 1) ** 2)
        found = rg.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, rg.tanh(s[1])), (0, x))[1]
        np.testing.assert_allclose(found.numpy(), X**4)
        branch = rg.cond(x.sum() > 0, rg.tanh, lambda x: x, x)
        np.testing.assert_allclose(branch.numpy(), X**2)
        each = rg.vmap(rg.grad(lambda x: rg.tanh(x)))
        np.testing.assert_allclose(each(x).numpy(), X**2)
        np.testing.assert_allclose(rg.jit(each)(x).numpy(), X**2)


def test_a_graph_has_the_value_too():
    with scope(lambda x, y: x * y, lambda dy, x: dy * x) as used, tf.Graph().as_default():
        x = tf.placeholder(tf.float64, [None])
        y = tf.tanh(x)
        (dx,) = tf.gradients(y, [x])
        with tf.Session() as session:
            found, gradient = session.run([y, dx], {x: X})
    np.testing.assert_allclose(found, X * np.tanh(X), rtol=1e-12)
    np.testing.assert_allclose(gradient, X, rtol=1e-12)
    used.assert_fired()


def test_what_a_forward_may_name():
    with scope(lambda x, y, forward, x_shape: y + forward(2 * x) * len(x_shape)):
        x = rg.tensor(X)
        np.testing.assert_allclose(rg.tanh(x).numpy(), np.tanh(X) + np.tanh(2 * X), rtol=1e-12)
        dx = rg.grad(lambda x: rg.tanh(x).sum())(x).numpy()
        np.testing.assert_allclose(dx, 3 - np.tanh(X) ** 2 - 2 * np.tanh(2 * X) ** 2, rtol=1e-9)
    with scope(lambda xs, axis, forward: forward([2 * x for x in xs]), None, "ConcatV2"):
        x = rg.tensor(X)
        assert rg.concat([x, x]).tolist() == [*(2 * X), *(2 * X)]
        assert rg.grad(lambda x: rg.concat([x, x]).sum())(x).tolist() == [4, 4, 4]
    with scope(lambda a, b: a + b, lambda dy, a, b: (10 * dy, 100 * dy), "Mul"):
        a, b = rg.tensor(np.ones((2, 3))), rg.tensor(X)
        assert (a * b).tolist() == [(1 + X).tolist()] * 2
        assert rg.grad(lambda b: (a * b).sum())(b).tolist() == [200, 200, 200]  # summed over rows
    with scope(lambda x: x**3, rg.rules.scale(0.5)):  # whose `builtin` is that of x**3
        dx = rg.grad(lambda x: rg.tanh(x).sum())(rg.tensor(X)).numpy()
        np.testing.assert_allclose(dx, 1.5 * X**2)


def test_in_one_place_with_its_site():
    seen = []

    def forward(x, site):
        seen.append(site.path)
        return -x

    rules = {rg.at("head", "Tanh"): rg.replace(forward)}
    with rg.gradient_override_map(rules, values=True) as used:
        x = rg.tensor(X)
        assert rg.tanh(x).tolist() == np.tanh(X).tolist()
        with rg.name_scope("head"):
            assert rg.tanh(x).tolist() == (-X).tolist()
    assert seen == ["head"]
    used.assert_fired()  # no gradient is needed for that: the value was replaced
    assert [hit.path for hit in used.hits] == ["head"]


def test_the_inner_scope_wins():
    x = rg.tensor(X)
    with scope(lambda x: 2 * x):
        with scope(lambda x: 3 * x):
            assert rg.tanh(x).tolist() == (3 * X).tolist()
        with rg.gradient_override_map({"Tanh": lambda dy: dy}):
            assert rg.tanh(x).tolist() == np.tanh(X).tolist()
        assert rg.tanh(x).tolist() == (2 * X).tolist()
    decorated = scope(lambda x: 4 * x)(lambda x: rg.tanh(x))
    assert decorated(x).tolist() == (4 * X).tolist()


def test_one_compiled_function_under_several_scopes():
    f, x = rg.jit(lambda x: rg.tanh(x)), rg.tensor(X)
    for _ in range(2):
        for factor in (2, 3):
            with scope(lambda x, k=factor: k * x):
                np.testing.assert_allclose(f(x).numpy(), factor * X)
        np.testing.assert_allclose(f(x).numpy(), np.tanh(X))


# -- refused ---------------------------------------------------------------------------------------


def test_a_scope_that_does_not_say_so():
    with pytest.raises(ArgumentError, match=r"values of 'Tanh' .* Write gradient_override_map\(ru"):
        rg.gradient_override_map({"Tanh": rg.rules.optional(rg.replace(rg.sin))})
    graph = tf.Graph()
    with pytest.raises(ArgumentError, match="values=True"):
        graph.gradient_override_map({"Tanh": rg.replace(rg.sin)})


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda x: x.sum(), r"returned the shape \(\) and the dtype float64, expected those of the "
         r"op's own result, the shape \(3,\) and the dtype float64"),
        (lambda x: rg.astype(x, rg.float32), r"the dtype float32, expected .* the dtype float64"),
        (lambda x: None, "returned None, expected one tensor"),
        (lambda x: [x, x], "returned list, expected one tensor"),
        (lambda z: z, r"takes \(z\), and the op type 'Tanh' has no 'z'.* It may name x, y"),
        (lambda x, builtin: x, "has no 'builtin'"),
        (lambda *xs: xs, "must name what it takes"),
    ],
)  # fmt: skip
def test_a_forward_that_does_not_fit(forward, message):
    with pytest.raises(RuleError, match=message), scope(forward):
        rg.tanh(rg.tensor(X))


def test_what_cannot_be_replaced():
    with pytest.raises(RuleError, match="'Split' returns several results"), scope(
        lambda x: x, None, "Split"
    ):  # fmt: skip
        pass
    with pytest.raises(GraphError, match="cannot be replaced as TensorFlow 1 makes it"), scope(
        lambda x: x, None, "Identity"
    ), tf.Graph().as_default():  # fmt: skip
        tf.Variable(1.0).read_value()


def test_arguments():
    with pytest.raises(ArgumentError, match=r"forward expected a function .* got int"):
        rg.replace(3)
    with pytest.raises(ArgumentError, match=r"gradient expected a rule .* got float"):
        rg.replace(rg.sin, 1.0)
    with pytest.raises(ArgumentError, match=r"gradient expected a rule"):
        rg.replace(rg.sin, rg.replace(rg.sin))


@pytest.mark.parametrize(
    ("rules", "options", "words"),
    [
        ({"Tanh": rg.replace(lambda x: 2 * x)}, {"values": True, "order": 1}, "order=1 asks"),
        ({rg.at("head"): rg.replace(lambda x: 2 * x)}, {"values": True}, "is for whole calls"),
        ({rg.at("head"): rg.rules.reverse()}, {"order": 1}, "order=1 asks"),
    ],
)
def test_what_does_not_go_together(rules, options, words):
    with pytest.raises(ArgumentError, match=words):
        rg.gradient_override_map(rules, **options)
