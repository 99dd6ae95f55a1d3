"""What a key of an override means in a JAX program: an op type, a function, or nothing."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import regrad as rg
from regrad.errors import (
    ArgumentError,
    GradientError,
    RuleError,
    UnknownOpError,
    UnusedOverrideWarning,
)
from tests.helpers.jax_model import model, relu, seven
from tests.helpers.jax_places import X


def test_a_function_of_that_name_is_another_function():
    f = rg.jax.override(lambda x: jax.jit(relu)(x).sum(), {jax.nn.relu: seven})
    with pytest.warns(UnusedOverrideWarning, match="no .relu. through which"):
        np.testing.assert_array_equal(jax.grad(f)(X), X > 0)
    assert "max" in str(f.untouched())
    assert [row[0] for row in f.untouched(only=("Maximum", "MatMul")).rows] == ["max"]


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, dy: (2 * dy,))


@pytest.mark.parametrize(
    ("f", "only", "listed"),
    [
        (jax.nn.relu, "Relu", "relu"),
        (jax.nn.relu, jax.nn.relu, "relu"),
        (jax.nn.relu6, ("MatMul", "Relu6"), "relu6"),
        (doubled, doubled, "doubled"),
        (doubled, "doubled", "doubled"),
    ],
)
def test_untouched_lists_a_function_with_a_derivative_of_its_own(f, only, listed):
    f = rg.jax.override(lambda x, f=f: jnp.tanh(f(x)), {"Tanh": seven})
    f(X)
    assert [row[0] for row in f.untouched(only=only).rows] == [listed]
    assert not f.untouched(only="Exp").rows


@pytest.mark.parametrize("only", ["Gelu", "Softmax", "Mean", jax.nn.silu, ("Exp", "LeakyRelu")])
def test_untouched_refuses_a_function_of_which_the_parts_are_listed(only):
    f = rg.jax.override(lambda x: jnp.tanh(jax.nn.gelu(x)), {"Tanh": seven})
    f(X)
    with pytest.raises(ArgumentError, match="is a function in JAX, without a derivative of its"):
        f.untouched(only=only)


def test_two_functions_of_one_decorator_are_told_apart_or_refused():
    def plain(f):
        return jax.jit(lambda_named(f))

    def lambda_named(f):
        def wrapper(x):
            return f(x)

        return wrapper

    def telling(f):
        return jax.jit(functools.wraps(f)(lambda_named(f)))

    def sine(x):
        return jnp.sin(x)

    def cosine(x):
        return jnp.cos(x)

    for made in (plain, telling):
        one, other = made(sine), made(cosine)
        alone = rg.jax.override(lambda x, f=one: f(x).sum(), {one: lambda dy: 7 * dy})
        np.testing.assert_array_equal(jax.grad(alone)(X), np.full(3, 7))
        both = rg.jax.override(
            lambda x, f=one, g=other: (f(x) + g(x)).sum(), {one: lambda dy: 7 * dy}
        )
        if made is plain:
            with pytest.raises(GradientError, match=r"computes something else.*functools\.wraps"):
                both(X)
        else:
            np.testing.assert_allclose(jax.grad(both)(X), 7 - np.sin(X))


def straight(_, dy):
    return (dy,)


def made_vjp(k):
    @jax.custom_vjp
    def scaled(x):
        return x * k

    scaled.defvjp(lambda x: (scaled(x), None), lambda _, dy: (dy * k,))
    return scaled


def made_with_one_backward(k):
    @jax.custom_vjp
    def scaled(x):
        return x * k

    scaled.defvjp(lambda x: (scaled(x), None), straight)
    return scaled


def made_jvps(k):
    @jax.custom_jvp
    def scaled(x):
        return x * k

    scaled.defjvps(lambda dx, y, x: dx * k)
    return scaled


def made_jvp(k):
    @jax.custom_jvp
    def scaled(x):
        return x * k

    @scaled.defjvp
    def _(primals, tangents):
        return scaled(*primals), tangents[0] * k

    return scaled


def made_static(k):
    @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
    def scaled(x, n=1):
        return x * k * n

    scaled.defvjp(lambda x, n: (scaled(x, n), None), lambda n, _, dy: (dy * k,))
    return scaled


AROUND = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "vmap": jax.vmap,
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (c, f(c)), x, None, length=1)[1],
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize(
    "make", [made_vjp, made_with_one_backward, made_jvps, made_jvp, made_static]
)
def test_two_functions_of_one_factory_are_two_keys(make, around):
    one, other = make(1.0), make(2.0)
    f = AROUND[around](lambda x: one(x) + other(x))
    plain = jax.grad(lambda x: AROUND[around](other)(x).sum())(X)
    ours = rg.jax.override(f, {one: lambda dy: 7 * dy})
    np.testing.assert_array_equal(jax.grad(lambda x: ours(x).sum())(X), 7 + plain)
    both = rg.jax.override(f, {one: lambda dy: 7 * dy, other: lambda dy: 5 * dy})
    np.testing.assert_array_equal(jax.grad(lambda x: both(x).sum())(X), np.full(3, 12))
    both.assert_fired(one)
    both.assert_fired(other)
    assert {hit.op_type.split(">.")[1] for hit in both.hits} == {"scaled", "scaled (2)"}
    with pytest.raises(ArgumentError, match="does not override"):
        both.assert_fired(make(3.0))
    with pytest.warns(UnusedOverrideWarning):
        rg.jax.override(lambda x: other(x), {one: lambda dy: 7 * dy})(X)


@pytest.mark.parametrize("values", [(1.0, 2.0), (X, X + 1)], ids=["numbers", "arrays"])
def test_two_compiled_functions_of_one_factory_are_refused(values):
    def make(k):
        @jax.jit
        def scaled(x):
            return jnp.sin(x) * k

        return scaled

    one, other = map(make, values)
    alone = rg.jax.override(lambda x: one(x) * one(x), {one: lambda dy: 7 * dy})
    np.testing.assert_allclose(jax.grad(lambda x: alone(x).sum())(X), 14 * one(X))
    for f in (other, lambda x: one(x) + other(x), jax.vmap(lambda x: one(x) + other(x))):
        x = X[None] if f is not other else X
        with pytest.raises(GradientError, match=r"'scaled' .* computes something else"):
            rg.jax.override(f, {one: lambda dy: 7 * dy})(x)


def test_a_call_that_does_not_say_where_it_was_written_is_refused():
    class Odd:
        def __call__(self, x):
            return jnp.sin(x)

        def __repr__(self):
            return "<built-in function relu>"

    f = rg.jax.override(lambda x: jax.jit(Odd())(x).sum(), {"Relu": seven})
    with pytest.raises(GradientError, match="does not say where it was written"):
        f(X)


@pytest.mark.parametrize(
    ("key", "error", "words"),
    [
        ("Einsum", UnknownOpError, "leaves no boundary"),
        ("SparseSoftmaxCrossEntropyWithLogits", UnknownOpError, "leaves no boundary"),
        ("Reluu", UnknownOpError, "Did you mean 'Relu'"),
        ("Tahn", UnknownOpError, "Did you mean 'Tan'"),
        (jax.nn.dot_product_attention, ArgumentError, "plain function.*jax.jit"),
        (jnp.sin, ArgumentError, "inline=True"),
        (relu, ArgumentError, "jax.jit"),
        (jax.jit(lambda x: x), ArgumentError, "Write it with def"),
        (3, ArgumentError, "got the key 3"),
    ],
)
def test_keys_that_cannot_be_found_are_refused(key, error, words):
    with pytest.raises(error, match=words):
        rg.jax.override(model, {key: seven})


# -- names -----------------------------------------------------------------------------------------


@jax.custom_vjp
def clipid(x):
    return jnp.clip(x, -1, 1)


clipid.defvjp(lambda x: (jnp.clip(x, -1, 1), None), lambda _, dy: (dy,))


@jax.custom_jvp
def bent(x):
    return jnp.sin(x)


bent.defjvps(lambda dx, y, x: dx)


@jax.jit
def compiled(x):
    return jnp.cos(x) * x


NAMED = {"clipid": clipid, "bent": bent, "compiled": compiled, "relu": jax.nn.relu}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", NAMED)
def test_a_name_is_a_key(name, around):
    key = NAMED[name]
    f = AROUND[around](key)
    ours = rg.jax.override(lambda x: (f(x) + x * x).sum(), {name: lambda dy, x: 7 * dy * x})
    np.testing.assert_allclose(jax.grad(ours)(X), 9 * X)
    np.testing.assert_allclose(jax.jit(jax.grad(ours))(X), 9 * X)
    ours.assert_fired(name)
    ours.assert_fired(key)
    assert [hit.op_type for hit in ours.hits] == [name]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
@pytest.mark.parametrize("name", NAMED)
def test_a_named_function_that_is_differentiated_inside_is_refused(name, wrap):
    key = NAMED[name]
    penalty = lambda x: jax.grad(wrap(lambda x: key(x).sum()))(x).sum() + key(x).sum()  # noqa: E731
    with pytest.raises(GradientError, match="Put the override inside"):
        rg.jax.override(penalty, {name: seven})(X)


def test_a_name_that_stands_for_nothing_or_for_two_functions_is_refused():
    for key, words in (
        ("clipidd", r"the program calls no function of that name .*Did you mean 'clipid'"),
        ("tahn", "'tanh'"),
        ("softmax", "Did you mean 'Softmax'"),
        ("relu", "calls no function"),
    ):
        with pytest.raises(UnknownOpError, match=words):
            rg.jax.override(lambda x: clipid(x), {key: seven})(X)

    def other():
        @jax.jit
        def clipid(x):
            return jnp.tanh(x)

        return clipid

    other = other()
    with pytest.raises(ArgumentError, match=r"'clipid' stands for .*test_keys.py:\d+, .*itself"):
        rg.jax.override(lambda x: clipid(x) + other(x), {"clipid": seven})(X)
    chosen = rg.jax.override(lambda x: clipid(x) + other(x), {clipid: lambda dy: 7 * dy})
    np.testing.assert_allclose(jax.grad(lambda x: chosen(x).sum())(X), 8 - np.tanh(X) ** 2)
    for pair in ({clipid: seven, "clipid": seven}, {"clipid": seven, clipid: seven}):
        with pytest.raises(ArgumentError, match="stand for the same thing"):
            rg.jax.override(clipid, pair)
    which = rg.jax.override(lambda x, f: f(x), {"clipid": seven})
    which(X, clipid)
    with pytest.warns(UnusedOverrideWarning, match="'clipid'"):  # it is known from now on
        which(X, jnp.sin)
    with pytest.raises(ArgumentError, match="different places"):
        which(X, other)


def test_an_override_is_not_a_scope():
    with pytest.raises(ArgumentError, match=r"takes the function first\..*ours = rg.jax.override"):
        rg.jax.override({"Relu": seven})
    with pytest.raises(ArgumentError, match=r"not a scope.*ours"), rg.jax.override(model, {}):
        pass
    with pytest.raises(ArgumentError, match="takes a dict"):
        rg.jax.override(model)
    with pytest.raises(AttributeError, match=r"use rg\.jax\.override\(f"):
        rg.jax.gradient_override_map({"Relu": seven})
    with (
        pytest.warns(UnusedOverrideWarning, match=r"For JAX programs use rg\.jax\.override"),
        rg.gradient_override_map({"Relu": lambda dy: dy}),
    ):
        jax.grad(model)(X)


def test_other_mistakes():
    with pytest.raises(ArgumentError, match="takes a dict"):
        rg.jax.override(model, "Relu")
    with pytest.raises(ArgumentError, match=r"two keys .*stand for"):
        rg.jax.override(model, {"Add": seven, "AddV2": seven})
    with pytest.raises(ArgumentError, match=r"callable|function"):
        rg.jax.override(3, {"Relu": seven})
    with pytest.raises(RuleError, match="'z'"):
        rg.jax.override(model, {"Tanh": lambda dy, z: dy})
    for rule, words in (
        (lambda dy: dy[:2], "shape"),
        (lambda dy: dy.astype(jnp.float32), "float32"),
        (lambda dy: [dy, dy], "wrong number|expected a Tensor"),
        (lambda dy: "no", "expected a Tensor"),
    ):
        with pytest.raises(RuleError, match=words):
            jax.grad(rg.jax.override(model, {"Tanh": rule}))(X)


def test_a_key_and_the_function_it_stands_for_are_one_thing():
    with pytest.raises(ArgumentError, match="stand for"):
        rg.jax.override(model, {"Relu": seven, jax.nn.relu: seven})
    with pytest.raises(ArgumentError, match="stand for"):
        rg.jax.override(model, {"Maximum": seven, "max": seven})


def test_several_outputs_and_arguments_that_are_static():
    @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
    def pair(x, n, k):
        return x * n * k, x + k

    pair.defvjp(lambda x, n, k: (pair(x, n, k), None), lambda n, _, dys: (dys[0], dys[1]))
    rule = lambda dy, x, k, y: [dy[0] * y[1], dy[1] * x]  # noqa: E731
    f = rg.jax.override(lambda x, k: pair(x, 3, k), {pair: rule})
    (a, b), pull = jax.vjp(f, X, 2 * X)
    dx, dk = pull((a, b))
    np.testing.assert_allclose(dx, a * b)
    np.testing.assert_allclose(dk, b * X)
