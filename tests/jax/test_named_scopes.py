"""Rules in named scopes and in functions of a JAX program, their ranks and their report."""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import regrad as rg
from regrad.errors import ArgumentError, UnusedOverrideWarning
from tests.helpers.jax_model import WRAPS, slopes, times
from tests.helpers.jax_networks import KEY, SEVENFOLD, X, close, times7

override = rg.jax.override


def one(x):
    return jnp.tanh(x)


def scoped(x):
    with jax.named_scope("a"):
        y = one(x)
    with jax.named_scope("b.c"):
        y = y + 3 * jnp.tanh(2 * x)
    return jnp.sum(y + jax.jit(one)(x / 2))


SLOPES = [1 - np.tanh(X) ** 2, 6 * (1 - np.tanh(2 * X) ** 2), (1 - np.tanh(X / 2) ** 2) / 2]


def expected(*factors):
    return sum(k * slope for k, slope in zip(factors, SLOPES, strict=True))


KEYS = {
    "a": (rg.at("a", "Tanh"), [7, 1, 1]),
    "b": (rg.at("b", "Tanh"), [1, 7, 1]),
    "*.c": (rg.at("*.c", "Tanh"), [1, 7, 1]),
    "one": (rg.at(one, "Tanh"), [7, 1, 7]),
    "scoped": (rg.at(scoped, "Tanh"), [7, 7, 7]),
    "third": (rg.at(what="tanh", nth=2), [1, 1, 7]),
    "second of one": (rg.at(one, "Tanh", nth=1), [1, 1, 7]),
    "line": (rg.at(lambda site: site.line == one.__code__.co_firstlineno + 1, "Tanh"), [7, 1, 7]),
}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("wrap", WRAPS)
def test_named_scopes_and_functions(name, wrap):
    key, factors = KEYS[name]
    ours = override(WRAPS[wrap](scoped), {key: times7})
    close(jax.grad(ours)(X), expected(*factors))
    ours.assert_fired(key)
    close(ours(X), scoped(X))


FUNCTIONS = {"Softmax": jax.nn.softmax, "LogSumExp": jax.nn.logsumexp, "Gelu": jax.nn.gelu,
             "Mean": jnp.mean}  # fmt: skip


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("wrap", {**WRAPS, "vmap": jax.vmap}.items(), ids=lambda item: item[0])
@pytest.mark.parametrize("place", ["a", "b"])
@pytest.mark.parametrize("op_type", FUNCTIONS)
def test_functions_without_a_boundary_in_one_of_two_places(op_type, place, wrap):
    """Those of the other place keep their derivative, and the rule holds at the second order."""
    f, wrap = FUNCTIONS[op_type], wrap[1]

    def both(x):
        with jax.named_scope("a"):
            y = f(x)
        with jax.named_scope("b"):
            return jnp.sin(y * f(3 * x))

    tripled = jax.custom_jvp(lambda x: f(x))
    tripled.defjvp(lambda xs, dxs: (tripled(*xs), 3 * jax.jvp(f, xs, dxs)[1]))

    def by_hand(x):
        first, second = (tripled if place == at else f for at in "ab")
        return jnp.sin(first(x) * second(3 * x))

    ours = override(wrap(both), {rg.at(place, op_type): rg.rules.scale(3)})
    first = [lambda x, g=g: slopes(g, x) for g in (ours, wrap(by_hand))]
    second = [slopes(lambda x, g=g: g(x) ** 2, X) for g in first]
    close(first[0](X), first[1](X), 1e-4, 1e-5)
    close(second[0], second[1], 1e-4, 1e-5)
    assert {hit.path for hit in ours.hits} == {place}


def first(inner, x):
    return inner(x)


def test_the_caller_of_a_compiled_function_is_that_of_each_call():
    """JAX remembers the program of `inner` with the code that ran when it was traced first."""
    inner, rules = jax.jit(one), {rg.at(first, "Tanh"): times7}
    f = lambda x: inner(x)  # noqa: E731
    with pytest.raises(ArgumentError, match=r"at\(first\)"):
        override(lambda x: f(x) + 3 * inner(x), rules)(X)
    close(slopes(override(lambda x: first(inner, x) + 3 * inner(x), rules), X), 10 * SLOPES[0])

    def closing(x):
        return inner(x)

    with pytest.raises(ArgumentError, match="closes over values"):
        override(closing, {rg.at(closing, "Tanh"): times7})


@pytest.mark.slow
def test_haiku_names_count_as_they_are():
    def made(act):
        net = hk.transform(lambda x: hk.nets.MLP([4, 4], activation=act)(x))
        return hk.without_apply_rng(net)

    net, net7 = made(jnp.tanh), made(SEVENFOLD.act)
    params = net.init(KEY, X)
    f = lambda p, x: jnp.sum(jnp.tanh(net.apply(p, x)))  # noqa: E731
    slope = 1 - jnp.tanh(net.apply(params, X)) ** 2
    by_hand = lambda p, x: jnp.sum(slope * net7.apply(p, x))  # noqa: E731
    inside = override(f, {rg.at("mlp", "Tanh"): times7})
    close(jax.grad(inside)(params, X), jax.grad(by_hand)(params, X))
    with pytest.raises(ArgumentError, match=r"at\('mpl'\) names no module.* Did you mean 'mlp'"):
        override(f, {rg.at("mpl", "Tanh"): times7})(params, X)


def test_ranks():
    rules = {
        "Tanh": rg.rules.optional(times7),
        rg.at("b", "Tanh"): rg.rules.optional(times7),
        rg.at("b.c", "Tanh"): rg.rules.scale(11),
        rg.at(one, "Tanh"): rg.rules.scale(13),
    }
    close(jax.grad(override(scoped, rules))(X), expected(13, 11, 13))
    clash = {rg.at("a", "Tanh"): times7, rg.at("[a]", "Tanh"): times7}
    with pytest.raises(ArgumentError, match="select the same place 'a'"):
        override(scoped, clash)(X)


def test_a_map_for_a_place_and_a_rule_that_asks_for_the_site():
    seen = []

    def rule(dy, y, site):
        seen.append((site.path, site.op_type, site.nth, site.shapes))
        return times7(dy, y)

    close(jax.grad(override(scoped, {rg.at("b"): {"Tanh": rule}}))(X), expected(1, 7, 1))
    assert seen == [("b.c", "Tanh", 0, ((2, 4),))]
    jax.grad(override(scoped, {"Tanh": rule}))(X)
    assert sorted(path for path, *_ in seen[1:]) == ["", "a", "b.c"]


def test_reports_show_the_path():
    ours = override(scoped, {rg.at(("a", "b"), "Tanh"): times7})
    jax.grad(ours)(X)
    assert [(hit.path, hit.count, hit.ran) for hit in ours.hits] == [("a", 1, 1), ("b.c", 1, 1)]
    assert ours.table().headings[0] == "module"
    idle = override(scoped, {rg.at("a", "Tanh"): times7, rg.at("a", "Sin"): times7})
    with pytest.warns(UnusedOverrideWarning, match=r"rg.at\('a', 'Sin'\) applied to no op"):
        idle(X)


def test_nth_counts_the_calls_of_all_ops_of_a_key():
    ours = override(
        lambda x: jnp.sin(jnp.tanh(jnp.sin(x))), {rg.at(None, ("Tanh", "Sin"), nth=1): times(7)}
    )
    close(jax.grad(ours)(0.3), 7 * np.cos(0.3) * np.cos(np.tanh(np.sin(0.3))))
    assert [(hit.op_type, hit.count) for hit in ours.hits if hit.ran] == [("Tanh", 1)]


class DANN(linen.Module):
    def setup(self):
        self.trunk, self.domain = linen.Dense(4), linen.Dense(2)

    def __call__(self, x):
        return self.domain(jnp.tanh(self.trunk(x)))


@pytest.mark.slow
def test_a_linen_head_is_reversed_as_the_docs_write_it():
    """In docs/jax/places.md."""

    def reverse(dy, builtin):
        da, db = builtin(dy)
        return -0.7 * da, db

    net, x = DANN(), jnp.ones((3, 5)) * jnp.arange(5)
    params = net.init(KEY, x)["params"]
    loss = lambda params: (net.apply({"params": params}, x) ** 2).sum()  # noqa: E731
    ours = override(loss, {rg.at("DANN.domain", "MatMul"): reverse})
    found, own = jax.jit(jax.grad(ours))(params), jax.grad(loss)(params)
    close(
        found, {"trunk": jax.tree.map(lambda dx: -0.7 * dx, own["trunk"]), "domain": own["domain"]}
    )
