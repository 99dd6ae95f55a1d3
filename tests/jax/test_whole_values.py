"""Whole calls of modules under JAX: replaced values, parameters by name, objects, and Linen."""

import re
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import regrad as rg
from regrad.errors import ArgumentError, PassedOverError, RuleError

at, override, replace = rg.at, rg.jax.override, rg.replace
X = jnp.array(np.random.default_rng(0).normal(size=(5, 3)), "float32")
ROW = X[0]


def close(found, expected, tolerance=1e-5):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


class EqxNet(eqx.Module):
    first: eqx.nn.Linear
    head: eqx.nn.MLP

    def __init__(self):
        a, b = jax.random.split(jax.random.key(0))
        self.first, self.head = eqx.nn.Linear(3, 4, key=a), eqx.nn.MLP(4, 2, 5, 1, key=b)

    def __call__(self, x):
        return self.head(jnp.tanh(self.first(x)))


class NnxNet(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first, self.head = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(self.first(x)))


def loss(net, x):
    return jnp.sum(jnp.sin(net(x)))


def perceptron(x, layers_0_weight, layers_0_bias, layers_1_weight, layers_1_bias):
    h = jnp.sin(layers_0_weight @ x + layers_0_bias)
    return layers_1_weight**2 @ h + layers_1_bias


def by_hand(net, x):
    layers = net.head.layers
    held = [w for layer in layers for w in (layer.weight, layer.bias)]
    return jnp.sum(jnp.sin(perceptron(jnp.tanh(net.first(x)), *held)))


def rows(f):
    return lambda net, x: jnp.sum(jax.vmap(f, (None, 0))(net, x))


WAYS = {
    "plain": (lambda f: f, ROW), "jit": (eqx.filter_jit, ROW),
    "checkpoint": (eqx.filter_checkpoint, ROW), "vmap": (rows, X),
}  # fmt: skip


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("way", WAYS)
def test_equinox(way):
    wrap, x = WAYS[way]
    net, rules = EqxNet(), {at("head"): replace(perceptron)}
    inside = override(wrap(loss), rules, model=net, values=True)
    close(inside(net, x), wrap(by_hand)(net, x))
    close(eqx.filter_grad(inside)(net, x), eqx.filter_grad(wrap(by_hand))(net, x))
    inside.assert_fired()
    assert {hit.path for hit in inside.hits} == {"head"}
    outside = wrap(override(loss, rules, model=net, values=True))
    close(eqx.filter_grad(outside)(net, x), eqx.filter_grad(wrap(by_hand))(net, x))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("forward", "head"), [
    (lambda x, forward: 2 * forward(jnp.sin(x)), lambda net, x: 2 * net.head(jnp.sin(x))),
    (lambda y: jnp.exp(y), lambda net, x: jnp.exp(net.head(x))),
], ids=["its own function", "its own value"])  # fmt: skip
def test_its_own_function_at_second_order(forward, head):
    net = EqxNet()
    ours = override(loss, {at("head"): replace(forward)}, model=net, values=True)
    hand = lambda net, x: jnp.sum(jnp.sin(head(net, jnp.tanh(net.first(x)))))  # noqa: E731
    close(eqx.filter_grad(ours)(net, ROW), eqx.filter_grad(hand)(net, ROW))

    def squares(f):
        return lambda net: sum(jnp.sum(d**2) for d in jax.tree.leaves(eqx.filter_grad(f)(net, ROW)))

    close(eqx.filter_grad(squares(ours))(net), eqx.filter_grad(squares(hand))(net))


def rounded(x, kernel, bias):
    return jnp.round(4 * x) / 4 @ (jnp.round(8 * kernel) / 8) + bias


def straight_through(dy, x, kernel, bias):
    return dy @ kernel.T, {"kernel": x.T @ dy, "bias": 5 * dy.sum(0)}


@pytest.mark.parametrize("compiles", [False, True])
def test_nnx_straight_through(compiles):
    @jax.custom_vjp
    def hand(x, kernel, bias):
        return rounded(x, kernel, bias)

    hand.defvjp(
        lambda x, kernel, bias: (rounded(x, kernel, bias), (x, kernel)),
        lambda held, dy: (dy @ held[1].T, held[0].T @ dy, 5 * dy.sum(0)),
    )

    def expected(net, x):
        x = jnp.tanh(net.first(x))
        return jnp.sum(jnp.sin(hand(x, net.head.kernel[...], net.head.bias[...])))

    net = NnxNet()
    rules = {at("head"): replace(rounded, straight_through)}
    ours = override(loss, rules, model=net, values=True)
    take = nnx.jit if compiles else (lambda f: f)
    close(take(ours)(net, X), expected(net, X))
    close(take(nnx.grad(ours))(net, X), nnx.grad(expected)(net, X))


def test_parameters_by_name_without_a_new_value():
    net = NnxNet()

    def rule(dy, x, kernel, bias):
        return 2 * dy @ kernel.T, {"kernel": 3 * x.T @ dy, "bias": None}

    found = nnx.grad(override(loss, {at("head"): rule}, model=net))(net, X)
    plain = nnx.grad(loss)(net, X)
    close(found["head"]["kernel"], jax.tree.map(lambda d: 3 * d, plain["head"]["kernel"]))
    close(found["first"], jax.tree.map(lambda d: 2 * d, plain["first"]))
    assert not found["head"]["bias"][...].any()


def test_a_parameter_that_the_rule_learns():
    def scaled(x, kernel, bias, step):
        return x @ (kernel * step) + bias

    def ours(step):
        rules = {at("head"): replace(scaled, step=step)}
        return override(loss, rules, model=net, values=True)(net, X)

    def hand(step):
        x = jnp.tanh(net.first(X))
        return jnp.sum(jnp.sin(scaled(x, net.head.kernel[...], net.head.bias[...], step)))

    net, step = NnxNet(), jnp.array(0.5, "float32")
    close(jax.value_and_grad(ours)(step), jax.value_and_grad(hand)(step))


class Scaled(eqx.Module):
    b: jax.Array

    def __call__(self, x):
        return self.b * x


def test_a_parameter_with_the_name_of_an_input():
    net = Scaled(jnp.array(3.0, "float32"))
    ours = override(
        loss, {at(""): lambda dy, x, b: (dy * b, {"b": 7 * jnp.sum(dy * x)})}, model=net
    )
    found, plain = (eqx.filter_grad(f)(net, ROW) for f in (ours, loss))
    close(found.b, 7 * plain.b)


@dataclass
class Output:
    y: Any
    count: int = 3


class Closed:
    def __init__(self, y):
        self.y = y


class Returns(eqx.Module):
    w: jax.Array
    make: Any

    def __call__(self, given):
        return self.make(self.w * given.y)


class Around(eqx.Module):
    inner: Returns

    def __call__(self, x):
        return self.inner(Output(x)).y


@pytest.mark.parametrize("rule", [
    lambda dy, builtin: 2 * builtin(dy), replace(lambda x, w: Output(2 * w * x)),
])  # fmt: skip
def test_objects(rule):
    net = Around(Returns(jnp.array(3.0), lambda y: Output(y, 4)))
    ours = override(loss, {at("inner"): rule}, model=net, values=True)
    (y,) = {True: [2], False: [1]}[isinstance(rule, type(replace(jnp.sin)))]
    close(ours(net, ROW), jnp.sum(jnp.sin(y * 3 * ROW)))
    close(jax.grad(lambda x: ours(net, x))(ROW), 6 * jnp.cos(y * 3 * ROW))


def test_objects_that_are_refused():
    net = Around(Returns(jnp.array(3.0), Closed))
    ours = override(loss, {at("inner"): rg.rules.reverse()}, model=net)
    with pytest.raises(PassedOverError, match=r"returned Closed.*register the class with JAX"):
        ours(net, ROW)


class Normed(nnx.Module):
    def __init__(self):
        self.head = nnx.BatchNorm(3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.head(x)


def test_a_state_that_changes_in_the_call():
    net = Normed()
    ours = override(loss, {at("head"): rg.rules.scale(2.0)}, model=net)
    with pytest.raises(PassedOverError, match=r"the call of BatchNorm .* changes its state"):
        nnx.grad(ours)(net, X)
    net.eval()
    found, plain = (jax.grad(lambda x, f=f: f(net, x))(X) for f in (ours, loss))
    close(found, 2 * plain)


@pytest.mark.parametrize(("forward", "words"), [
    (lambda x: x, r"returned the shape \(4,\).*own result, the shape \(2,\)"),
    (lambda q: q, "has no 'q'.*It may name x, layers_0_weight"),
])  # fmt: skip
def test_replacements_that_are_refused(forward, words):
    net = EqxNet()
    with pytest.raises(RuleError, match=words):
        override(loss, {at("head"): replace(forward)}, model=net, values=True)(net, ROW)
    with pytest.raises(ArgumentError, match="needs values=True"):
        override(loss, {at("head"): replace(forward)}, model=net)


# -- Linen, by op and path -------------------------------------------------------------------------


class Dann(linen.Module):
    def setup(self):
        self.features = linen.Dense(4)
        self.domain = linen.Sequential([linen.Dense(5), linen.tanh, linen.Dense(1)])

    def __call__(self, x):
        return self.domain(jnp.tanh(self.features(x)))


def reverse(dy, builtin):
    da, db = builtin(dy)
    return -0.7 * da, db


def test_the_spelling_in_the_message_for_linen():
    model = Dann()
    params = jax.jit(model.init)(jax.random.key(0), X)
    f = lambda params: jnp.sum(model.apply(params, X) ** 2)  # noqa: E731
    with pytest.raises(ArgumentError) as caught:
        override(f, {at("domain"): reverse}, model=model)
    text = str(caught.value)
    (shown,) = re.findall(r"rg\.at\('domain', .*?\)", text)
    assert "da, db = builtin(dy); return -0.7 * da, db" in text
    key = eval(shown, {"rg": rg})
    plain = jax.grad(f)(params)["params"]
    found = jax.grad(override(f, {key: reverse}, model=model))(params)["params"]
    close(found["domain"], plain["domain"])
    close(found["features"], jax.tree.map(lambda d: -0.7 * d, plain["features"]))
