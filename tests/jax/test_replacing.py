"""Rules that replace the values of JAX's operations: in every transformation, or refused."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regrad as rg
from regrad.errors import ArgumentError, GradientError, PassedOverError
from tests.helpers.jax_model import own_vjp

override = rg.jax.override


def close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)


def numbers(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def replaced(f, key, *rule, **options):
    return override(f, {key: rg.replace(*rule)}, values=True, **options)


# -- an int8 layer, against a custom_vjp -----------------------------------------------------------


def int8(x):
    scale = jnp.abs(x).max() / 127
    return jnp.clip(jnp.round(x / scale), -128, 127) * scale


def ste(dy, a, b):
    return dy @ b.T, a.T @ dy


@own_vjp(ste)
def product(a, b):
    return int8(a) @ int8(b)


def network(multiply, parameters, x):
    for w, bias in parameters:
        x = jnp.tanh(multiply(x, w) + bias)
    return (x**2).sum()


model, by_hand = partial(network, jnp.matmul), partial(network, product)


def inputs():
    return [(numbers(4, 4, seed=n), numbers(4, seed=n + 5)) for n in range(2)], numbers(5, 4)


def int8_by_regrad(x):
    scale = rg.max(abs(x)) / 127
    return rg.clip(rg.round(x / scale), -128, 127) * scale


FORWARDS = {
    "by JAX": lambda a, b: int8(a) @ int8(b),
    "by the op": lambda a, b, forward: forward(int8(a), int8(b)),
    "by regrad": lambda a, b: rg.matmul(int8_by_regrad(a), int8_by_regrad(b)),
}


@pytest.mark.slow
@pytest.mark.parametrize("key", ["MatMul", "dot_general"])
@pytest.mark.parametrize("forward", FORWARDS)
def test_a_quantised_layer(key, forward):
    parameters, x = inputs()
    ours = replaced(model, key, FORWARDS[forward], ste)
    for way in (lambda f: f, jax.jit, jax.checkpoint):
        close(way(ours)(parameters, x), by_hand(parameters, x))
        close(way(jax.grad(ours))(parameters, x), jax.grad(by_hand)(parameters, x))
    each = [jax.vmap(jax.grad(lambda v, f=f: f(parameters, v[None])))(x) for f in (ours, by_hand)]
    close(*each)
    second = [jax.jacrev(jax.jacrev(lambda x, f=f: f(parameters, x)))(x) for f in (ours, by_hand)]
    close(*second)
    ours.assert_fired()
    assert {hit.rule for hit in ours.hits} == {"replace(<lambda>, ste)"}


@own_vjp(lambda dy, x: (dy * curve(x) * x,))
def curve(x):
    return x**2 - x


def everywhere(sin, x):
    y, _ = jax.lax.scan(lambda c, _: (sin(c) * x, None), x, None, length=3)
    y = jax.lax.fori_loop(0, 2, lambda _, y: sin(y) + 1, y)
    y = jax.lax.cond(y.sum() > 0, lambda y: sin(y), lambda y: y, y)
    y = jax.jit(lambda y: sin(y) - y)(y) + jax.checkpoint(lambda x: sin(x) * x)(x)
    return y + jax.vmap(sin)(x)


@pytest.mark.slow
@pytest.mark.parametrize("forward", [lambda x: x**2 - x, lambda x: rg.square(x) - x])
def test_loops_branches_and_batches(forward):
    x, hand = numbers(4) / 3, partial(everywhere, curve)
    ours = replaced(partial(everywhere, jnp.sin), "Sin", forward, lambda dy, x, y: dy * y * x)
    for way in (lambda f: f, jax.jit):
        close(way(ours)(x), hand(x))
        close(way(jax.jacrev(ours))(x), jax.jacrev(hand)(x))
    rows = numbers(3, 4) / 3
    close(jax.vmap(ours)(rows), jax.vmap(hand)(rows))


@pytest.mark.slow
def test_values_without_a_gradient():
    """Integers, where no rule counts; and calls that nobody differentiates."""
    whole = jnp.arange(-2, 3)
    close(replaced(jax.nn.relu, jax.nn.relu, lambda x: 5 * x)(whole), 5 * whole)
    squares = replaced(lambda a: jax.jit(jnp.matmul)(a, a), "MatMul", lambda a, b: a * b)
    close(squares(3 * jnp.eye(2, dtype=int)), 9 * jnp.eye(2))
    squares.assert_fired()


def test_places_and_their_sites():
    def scoped(x):
        with jax.named_scope("head"):
            y = jnp.sin(x)
        return y + jnp.sin(x)

    seen = []

    def forward(x, site, y):
        seen.append(site.path)
        return 10 * y

    close(replaced(scoped, rg.at("head", "Sin"), forward)(1.0), 11 * np.sin(1.0))
    assert seen == ["head"]


def test_one_override_and_what_it_reads():
    scale = [2.0]
    ours = replaced(jax.jit(jnp.sin), "Sin", lambda x: x * scale[0])
    close(ours(1.0), 2.0)
    scale[0] = 5.0
    close(ours(1.0), 5.0)
    inner = replaced(jnp.sin, "Sin", lambda x, forward: 2 * forward(x))
    close(replaced(inner, "Sin", lambda x: 7 * x)(1.0), 2 * np.sin(1.0))  # the inner one wins


# -- refused ---------------------------------------------------------------------------------------


def test_where_the_value_could_not_be_delivered():
    largest = partial(replaced, jax.nn.relu, "Maximum", lambda a, b: a)
    for x in (numbers(3), jnp.arange(3)):
        with pytest.raises(PassedOverError, match=r"relu .* computes 'Maximum'.* open=\['relu'\]"):
            largest()(x)
    close(largest(open=["relu"])(-jnp.ones(2)), -jnp.ones(2))
    mine = rg.jax.custom_grad(lambda x: (jnp.sin(x), lambda dy: dy))
    with pytest.raises(PassedOverError, match="of 'Sin' is replaced, and it occurs in custom"):
        replaced(mine, "Sin", lambda x: x**3)(numbers(3))

    def solved(b):
        return jax.lax.custom_linear_solve(
            lambda x: 2 * x + jnp.sin(x) * 0, b, lambda _, b: b / 2, symmetric=True
        )

    with pytest.raises(GradientError, match=r"replaced in the linear map of a solve"):
        replaced(solved, "Sin", lambda x: x**3)(numbers(3))

    def loss(w):
        return replaced(jnp.sin, "Sin", lambda x: x * w)(1.0)

    def smooth(w):
        return override(jnp.sin, {"Sin": rg.rules.vjp_of(lambda x: x * w)})(w)

    for f in (jax.grad(loss), jax.jit(loss), jax.grad(smooth), jax.grad(jax.jit(smooth))):
        with pytest.raises(GradientError, match=r"closes over an array .*rg\.rules\.learns\(rule"):
            f(2.0)


# -- arguments that are arrays of NumPy ------------------------------------------------------------

A, B, C = (np.random.default_rng(n).normal(size=s) for n, s in enumerate([(6, 5), (5, 7), (7, 3)]))


def scaled(a, b, s):
    return s * (a @ b)


def learning(s):
    return {"MatMul": rg.replace(scaled, rg.rules.learns(rg.rules.vjp_of(scaled), s=s))}


@pytest.mark.slow(but=5)
@pytest.mark.parametrize("call", [
    lambda f: f(lambda x, w, v: jax.nn.relu(x @ w) @ v, A, B, C),
    lambda f: f(lambda x, w, v: jax.nn.relu(x @ w) @ v, A, v=C, w=B),
    lambda f: f(lambda net: jax.nn.relu(net["x"] @ net["ws"][0]) @ net["ws"][1],
                {"x": A, "ws": [B, C]}),
    lambda f: f(lambda x, w, v: jax.nn.relu(x @ w) @ v, A, jnp.asarray(B), C),
], ids=["by place", "by name", "nested", "mixed"])  # fmt: skip
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_numpy_arguments_are_under_the_rules(call, compiled):
    def loss(s):
        return call(lambda f, *xs, **named:
                    (override(f, learning(s), values=True)(*xs, **named) ** 2).sum())  # fmt: skip

    due = 16 * ((np.maximum(A @ B, 0) @ C) ** 2).sum()  # s⁴ at s = 2; its derivative is 4 / s of it
    found = (jax.jit if compiled else lambda f: f)(jax.value_and_grad(loss))(jnp.asarray(2.0))
    np.testing.assert_allclose(found, (due, 2 * due), rtol=1e-12)


def test_a_numpy_product_is_replaced_where_nothing_learns():
    twice = {"MatMul": rg.replace(lambda a, b: 2 * (a @ b))}
    close(override(lambda a, b: a @ b, twice, values=True)(A, B), 2 * (A @ B))


def test_other_numpy_values_stay_values():
    seen = []

    def f(x, whole, number, w):
        seen.extend([whole, number])
        return jnp.tanh(x) * float(number) + range(whole[1])[0]

    ours = override(f, {"Tanh": rg.replace(lambda x: x)}, values=True)
    close(ours(A, np.arange(3), np.float64(2.0), w=np.array(1.0)), 2 * A)
    assert isinstance(seen[0], np.ndarray)
    assert isinstance(seen[1], np.float64)
    # in a map that replaces nothing all are values
    override(lambda x: jnp.tanh(x) * float(x[0]), {"Tanh": lambda dy: dy})(np.array([2.0]))


@pytest.mark.parametrize(("f", "due"), [
    (lambda x: jnp.tanh(x) if x[0] > 0 else x, [4, 6]),
    (lambda x: jnp.tanh(x) * float(x[0]), [8, 12]),
    (lambda x: jnp.tanh(np.asarray(x)), [4, 6]),
    (lambda x: jnp.tanh(x[x > 0]), [4, 6]),
], ids=["if", "float", "asarray", "mask"])  # fmt: skip
def test_a_numpy_argument_whose_value_is_read_is_refused(f, due):
    rules = {"Tanh": rg.replace(lambda x: 2 * x)}
    with pytest.raises(ArgumentError, match=r"reads the value.*jnp\.asarray\(x\).*close over"):
        override(f, rules, values=True)(np.array([2.0, 3.0]))
    x = np.array([2.0, 3.0])
    close(override(lambda: f(x), rules, values=True)(), np.array(due))
    with pytest.raises((TypeError, IndexError), match=r"(?s)^(?!.*reads the value)"):
        override(f, rules, values=True)(jnp.asarray(x))
