"""Rules for whole calls of modules in JAX, against models with the change written into them."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

import regrad as rg
from regrad.errors import ArgumentError, GradientError, RuleError
from tests.helpers import jax_networks as nets
from tests.helpers.jax_networks import EqxBlock, EqxNet, X, bent, close, loss
from tests.helpers.rows import refused

at, override, NET, ROW = rg.at, rg.jax.override, EqxNet(), X[0]


def arriving(dy, builtin):
    return builtin(bent(dy))


def leaving(dy, builtin):
    return bent(builtin(dy))


SELECTORS = {
    "path": (at("head"), {"head"}),
    "pattern": (at("layers.*"), {"layers.0", "layers.1"}),
    "class": (at(EqxBlock), {*nets.SITES[:3]}),
    "tuple": (at(("head", "layers.1")), {"head", "layers.1"}),
    "predicate": (at(lambda site: site.path == "layers.0"), {"layers.0"}),
    "first": (at(EqxBlock, nth=0), {"layers.0"}),
    "last": (at(EqxBlock, nth=-1), {"head"}),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("selector", SELECTORS)
def test_every_kind_of_place(selector):
    key, paths = SELECTORS[selector]
    ours = override(loss, {key: arriving}, model=NET)
    by_hand = EqxNet(paths, nets.BENT_ON_ARRIVAL)
    close(jax.grad(ours)(NET, ROW), jax.grad(loss)(by_hand, ROW))
    ours.assert_fired()
    assert {hit.path for hit in ours.hits} == paths
    close(jax.jit(jax.grad(ours))(NET, ROW), jax.grad(loss)(by_hand, ROW))
    rows = jax.vmap(jax.grad(ours), (None, 0))(NET, X)
    close(rows, jax.vmap(jax.grad(loss), (None, 0))(by_hand, X))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "change"), [(arriving, nets.BENT_ON_ARRIVAL), (leaving, nets.BENT_ON_LEAVING)]
)
def test_by_all_arguments_and_at_second_order(rule, change):
    ours = override(loss, {at("head"): rule}, model=NET)
    by_hand = EqxNet({"head"}, change)
    found, expected = (jax.grad(f, (0, 1))(m, ROW) for f, m in ((ours, NET), (loss, by_hand)))
    close(found, expected)

    def squares(f):
        return lambda net: sum(jnp.sum(dw**2) for dw in jax.tree.leaves(jax.grad(f)(net, ROW)))

    close(jax.grad(squares(ours))(NET), jax.grad(squares(loss))(by_hand))


@pytest.mark.slow
def test_nnx():
    net, by_hand = nets.NnxNet(), nets.NnxNet()
    by_hand.layers[1].change, by_hand.head.change = nets.BENT_ON_ARRIVAL, nets.REVERSED
    ours = override(loss, {at("layers.1"): arriving, at("head"): rg.rules.reverse()}, model=net)
    close(nnx.grad(ours)(net, X), nnx.grad(loss)(by_hand, X))
    ours.assert_fired()


class Power(eqx.Module):
    def __call__(self, x, *, power=2):
        return x**power


class Both(eqx.Module):
    block: EqxBlock
    act: Power

    def __call__(self, x):
        return self.act(self.block(x))


def test_a_module_without_parameters():
    net = Both(NET.head, Power())
    ours = override(loss, {at("act"): lambda dy, x: 7 * dy * x}, model=net)
    y, back = jax.vjp(net.block, ROW)
    close(jax.grad(ours, argnums=1)(net, ROW), back(7 * 2 * y**2 * y)[0])


def test_what_is_refused():
    for f, model in [(loss, None), (lambda p, x: x, linen.Dense(2))]:
        with pytest.raises(ArgumentError, match="Equinox or Flax's nnx leave a boundary"):
            override(f, {at("head"): arriving}, model=model)
    with pytest.raises(ArgumentError, match=r"keep: rg.at\('head'\) is not a key"):
        override(loss, {at("layers.0"): arriving}, model=NET, keep=[at("head")])
    with pytest.raises(RuleError, match="did not call builtin, so nobody knows"):
        jax.grad(override(loss, {at("head"): lambda dy, x: x}, model=NET))(NET, ROW)
    ours = override(loss, {at("head"): arriving}, model=NET)
    refused(lambda: jax.jvp(lambda x: ours(NET, x), (ROW,), (ROW,)), GradientError, "not linear")


def test_keys_inside_are_passed_over():
    rules = {at("head"): arriving, "Tanh": lambda dy, y: dy * (1 - y**2)}
    with pytest.raises(rg.errors.PassedOverError, match="'Tanh' occurs inside of a call that has"):
        override(loss, rules, model=NET)(NET, ROW)
    ours = override(loss, rules, model=NET, keep=[at("head")])
    close(jax.grad(ours)(NET, ROW), jax.grad(loss)(EqxNet({"head"}, nets.BENT_ON_ARRIVAL), ROW))
    paths = {hit.path for hit in ours.hits if hit.op_type == "Tanh"}
    assert paths == {"layers.0", "layers.1", ""}


class Skips(eqx.Module):
    a: EqxBlock
    b: EqxBlock

    def __call__(self, x):
        return self.a(x)


def test_modules_that_never_run():
    net = Skips(NET.head, NET.layers[0])
    ours = override(loss, {at("*"): arriving}, model=net)
    with pytest.warns(rg.errors.UnusedOverrideWarning, match="names 'b', which was never called"):
        jax.grad(ours)(net, ROW)
    refused(lambda: ours.assert_fired(), rg.errors.NotFiredError, "'b'")


class Pair(eqx.Module):
    def __call__(self, second, first):
        return 2 * second + 3 * first


def test_keywords_in_another_order_than_the_signature():
    pair = Pair()
    called = lambda second, first: pair(first=first, second=second).sum()  # noqa: E731
    rules = {at(""): lambda dy, second, first: (5 * dy, 7 * dy)}
    found = jax.grad(override(called, rules, model=pair), (0, 1))(ROW, ROW)
    assert [dx.tolist() for dx in found] == [[5.0] * 4, [7.0] * 4]
