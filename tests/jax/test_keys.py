"""What a key of an override means in a JAX program: an op type, a function, or nothing.

And what `regrad.jax.override` refuses, and with which words.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import export, lax
from jax.experimental import pallas as pl
from numpy.testing import assert_allclose, assert_array_equal

import regrad as rg
from regrad.errors import ArgumentError, GradientError, UnknownOpError, UnusedOverrideWarning
from tests.helpers.jax_model import WRAPS, model, own_slope, own_vjp, relu, seven, slopes, times
from tests.helpers.jax_places import X
from tests.helpers.rows import refused

override = rg.jax.override


@pytest.mark.slow
def test_a_function_of_that_name_is_another_function():
    f = override(lambda x: jax.jit(relu)(x), {jax.nn.relu: seven})
    with pytest.warns(UnusedOverrideWarning, match="no .relu. through which"):
        assert_array_equal(slopes(f, X), X > 0)
    assert "max" in str(f.untouched())
    assert [row[0] for row in f.untouched(only=("Maximum", "MatMul")).rows] == ["max"]


@own_vjp(lambda dy, x: (2 * dy,))
def doubled(x):
    return 2 * x


@pytest.mark.parametrize(("f", "only", "listed"), [
    (jax.nn.relu, "Relu", "relu"),
    (jax.nn.relu, jax.nn.relu, "relu"),
    (jax.nn.relu6, ("MatMul", "Relu6"), "relu6"),
    (doubled, doubled, "doubled"),
    (doubled, "doubled", "doubled"),
])  # fmt: skip
def test_untouched_lists_a_function_with_a_derivative_of_its_own(f, only, listed):
    f = override(lambda x, f=f: jnp.tanh(f(x)), {"Tanh": seven})
    f(X)
    assert [row[0] for row in f.untouched(only=only).rows] == [listed]
    assert not f.untouched(only="Exp").rows


@pytest.mark.parametrize("only", ["Gelu", "Softmax", "Mean", jax.nn.silu, ("Exp", "LeakyRelu")])
def test_untouched_refuses_a_function_of_which_the_parts_are_listed(only):
    f = override(lambda x: jnp.tanh(jax.nn.gelu(x)), {"Tanh": seven})
    f(X)
    with pytest.raises(ArgumentError, match="is a function in JAX without a custom derivative"):
        f.untouched(only=only)


def decorated(f):
    def wrapper(x):
        return f(x)

    return wrapper


@pytest.mark.parametrize("tells", [False, True])
def test_two_functions_of_one_decorator_are_distinguished_or_refused(tells):
    def made(f):
        return jax.jit(functools.wraps(f)(decorated(f)) if tells else decorated(f))

    def sine(x):
        return jnp.sin(x)

    def cosine(x):
        return jnp.cos(x)

    one, other = made(sine), made(cosine)
    assert_array_equal(slopes(override(lambda x: one(x), {one: times(7)}), X), 0 * X + 7)
    both = override(lambda x: one(x) + other(x), {one: times(7)})
    if tells:
        assert_allclose(slopes(both, X), 7 - jnp.sin(X))
    else:
        refused(lambda: both(X), GradientError, r"computes something else.*functools\.wraps")


def straight(_, dy):
    return (dy,)


def scaled_by(k):
    def scaled(x):
        return x * k

    return scaled


def made_vjp(k, backward=None):
    made = jax.custom_vjp(scaled_by(k))
    made.defvjp(lambda x: (made(x), None), backward or (lambda _, dy: (dy * k,)))
    return made


def made_jvps(k):
    made = jax.custom_jvp(scaled_by(k))
    made.defjvps(lambda dx, y, x: dx * k)
    return made


def made_jvp(k):
    made = jax.custom_jvp(scaled_by(k))
    made.defjvp(lambda xs, dxs: (made(*xs), dxs[0] * k))
    return made


def made_static(k):
    @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
    def scaled(x, n=1):
        return x * k * n

    scaled.defvjp(lambda x, n: (scaled(x, n), None), lambda n, _, dy: (dy * k,))
    return scaled


MAKE = {
    "vjp": made_vjp, "one backward": lambda k: made_vjp(k, straight), "jvps": made_jvps,
    "jvp": made_jvp, "static": made_static,
}  # fmt: skip
AROUND = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "vmap": jax.vmap,
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (c, f(c)), x, None, length=1)[1],
}


@pytest.mark.slow(but=6)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("make", MAKE)
def test_two_functions_of_one_factory_are_two_keys(make, around):
    one, other = MAKE[make](1.0), MAKE[make](2.0)
    f = AROUND[around](lambda x: one(x) + other(x))
    plain = slopes(AROUND[around](other), X)
    assert_array_equal(slopes(override(f, {one: times(7)}), X), 7 + plain)
    both = override(f, {one: times(7), other: times(5)})
    assert_array_equal(slopes(both, X), 0 * X + 12)
    both.assert_fired(one)
    both.assert_fired(other)
    assert {hit.op_type.split(">.")[1] for hit in both.hits} == {"scaled", "scaled (2)"}
    refused(lambda: both.assert_fired(MAKE[make](3.0)), ArgumentError, "does not override")
    with pytest.warns(UnusedOverrideWarning):
        override(lambda x: other(x), {one: times(7)})(X)


@pytest.mark.parametrize("values", [(1.0, 2.0), (X, X + 1)], ids=["numbers", "arrays"])
def test_two_compiled_functions_of_one_factory_are_refused(values):
    def make(k):
        @jax.jit
        def scaled(x):
            return jnp.sin(x) * k

        return scaled

    one, other = map(make, values)
    alone = override(lambda x: one(x) * one(x), {one: times(7)})
    assert_allclose(slopes(alone, X), 14 * one(X))
    for f in (other, lambda x: one(x) + other(x), jax.vmap(lambda x: one(x) + other(x))):
        with pytest.raises(GradientError, match=r"'scaled' .* computes something else"):
            override(f, {one: times(7)})(X if f is other else X[None])


# -- names -----------------------------------------------------------------------------------------


@own_vjp(lambda dy, x: (dy,))
def clipid(x):
    return jnp.clip(x, -1, 1)


@own_slope(jnp.ones_like)
def bent(x):
    return jnp.sin(x)


@jax.jit
def compiled(x):
    return jnp.cos(x) * x


NAMED = {"clipid": clipid, "bent": bent, "compiled": compiled, "relu": jax.nn.relu}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", NAMED)
def test_a_name_is_a_key(name, around):
    f = AROUND[around](NAMED[name])
    ours = override(lambda x: (f(x) + x * x).sum(), {name: lambda dy, x: 7 * dy * x})
    assert_allclose(jax.grad(ours)(X), 9 * X)
    assert_allclose(jax.jit(jax.grad(ours))(X), 9 * X)
    ours.assert_fired(name)
    ours.assert_fired(NAMED[name])
    assert [hit.op_type for hit in ours.hits] == [name]


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("name", NAMED)
def test_a_named_function_that_is_differentiated_inside_is_refused(name, wrap):
    key = NAMED[name]
    penalty = lambda x: slopes(WRAPS[wrap](key), x).sum() + key(x).sum()  # noqa: E731
    refused(lambda: override(penalty, {name: seven})(X), GradientError, "Put the override inside")


def other_clipid():
    @jax.jit
    def clipid(x):
        return jnp.tanh(x)

    return clipid


def test_a_name_of_two_functions_is_refused():
    other = other_clipid()
    words = r"'clipid' matches functions .*test_keys.py:\d+, .*itself"
    with pytest.raises(ArgumentError, match=words):
        override(lambda x: clipid(x) + other(x), {"clipid": seven})(X)
    chosen = override(lambda x: clipid(x) + other(x), {clipid: times(7)})
    assert_allclose(slopes(chosen, X), 8 - jnp.tanh(X) ** 2)
    which = override(lambda x, f: f(x), {"clipid": seven})
    which(X, clipid)
    with pytest.warns(UnusedOverrideWarning, match="'clipid'"):  # it is known from now on
        which(X, jnp.sin)
    refused(lambda: which(X, other), ArgumentError, "different places")


def test_several_outputs_and_arguments_that_are_static():
    @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
    def pair(x, n, k):
        return x * n * k, x + k

    pair.defvjp(lambda x, n, k: (pair(x, n, k), None), lambda n, _, dys: (dys[0], dys[1]))
    rule = lambda dy, x, k, y: [dy[0] * y[1], dy[1] * x]  # noqa: E731
    f = override(lambda x, k: pair(x, 3, k), {pair: rule})
    (a, b), pull = jax.vjp(f, X, 2 * X)
    dx, dk = pull((a, b))
    assert_allclose(dx, a * b)
    assert_allclose(dk, b * X)


# -- what is refused, and with which words ---------------------------------------------------------


class Odd:
    def __call__(self, x):
        return jnp.sin(x)

    def __repr__(self):
        return "<built-in function relu>"


def kernel(x_ref, o_ref):
    o_ref[...] = jnp.tanh(x_ref[...])


def of_pallas(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x)


def imported(x):
    return export.export(jax.jit(jnp.tanh))(jax.ShapeDtypeStruct((3,), X.dtype)).call(x)


def as_a_scope():
    with override(model, {}):
        pass


def by_a_rule_with_an_error():
    jax.grad(override(lambda x: jnp.sum(jnp.sign(x)), {"Sign": lambda dy: jnp.nothing_of(dy)}))(X)


KEYS = [  # f, rules, error, words
    (model, {"Einsum": seven}, UnknownOpError, "leaves no boundary"),
    (model, {"SparseSoftmaxCrossEntropyWithLogits": seven}, UnknownOpError, "leaves no boundary"),
    (model, {"Reluu": seven}, UnknownOpError, "Did you mean 'Relu'"),
    (model, {"Tahn": seven}, UnknownOpError, "Did you mean 'Tan'"),
    (model, {jax.nn.dot_product_attention: seven}, ArgumentError, "plain function.*jax.jit"),
    (model, {jnp.sin: seven}, ArgumentError, "inline=True"),
    (model, {relu: seven}, ArgumentError, "jax.jit"),
    (model, {jax.jit(lambda x: x): seven}, ArgumentError, "Write it with def"),
    (model, {3: seven}, ArgumentError, "got the key 3"),
    (model, {"Add": seven, "AddV2": seven}, ArgumentError, r"two keys .*have the same meaning"),
    (model, {"Relu": seven, jax.nn.relu: seven}, ArgumentError, "have the same meaning"),
    (model, {"Maximum": seven, "max": seven}, ArgumentError, "have the same meaning"),
    (clipid, {clipid: seven, "clipid": seven}, ArgumentError, "have the same meaning"),
    (clipid, {"clipid": seven, clipid: seven}, ArgumentError, "have the same meaning"),
    (clipid, {"clipidd": seven}, UnknownOpError, "no function of that name .*mean 'clipid'"),
    (clipid, {"tahn": seven}, UnknownOpError, "'tanh'"),
    (clipid, {"softmax": seven}, UnknownOpError, "Did you mean 'Softmax'"),
    (clipid, {"relu": seven}, UnknownOpError, "calls no function"),
    (model, {"Tanh": lambda dy, z: dy}, rg.errors.RuleError, "'z'"),
    (model, "Relu", ArgumentError, "takes a dict"),
    (3, {"Relu": seven}, ArgumentError, r"callable|function"),
    (jax.jit(Odd()), {"Relu": seven}, GradientError, "without its source location"),
    (of_pallas, {"Tanh": seven}, GradientError, "pallas_call"),
    (imported, {"Tanh": seven}, GradientError, "exported"),
]
CALLS = [
    (lambda: override({"Relu": seven}), ArgumentError,
     r"as its first argument\..*ours = rg.jax.override"),
    (as_a_scope, ArgumentError, r"not a scope.*ours"),
    (lambda: override(model), ArgumentError, "takes a dict"),
    (lambda: rg.jax.gradient_override_map({}), AttributeError, r"use rg\.jax\.override\(f"),
    (lambda: jax.linear_transpose(override(lambda x: x * 3, {"Mul": seven}), X)(X),
     GradientError, r"Use jax\.vjp"),
    (by_a_rule_with_an_error, AttributeError, "has no attribute 'nothing_of"),
]  # fmt: skip


@pytest.mark.parametrize(("f", "rules", "error", "words"), KEYS, ids=range(len(KEYS)))
def test_keys_and_rules_that_do_not_fit_are_refused(f, rules, error, words):
    refused(lambda: override(f, rules)(X), error, words)


@pytest.mark.parametrize(("call", "error", "words"), CALLS, ids=range(len(CALLS)))
def test_calls_are_refused(call, error, words):
    for _ in range(2):
        refused(lambda: call(), error, words)


@pytest.mark.slow
def test_other_bodies_that_jax_does_not_open_do_no_harm():
    with pytest.warns(rg.errors.UnusedOverrideWarning):
        override(of_pallas, {"Sin": seven})(X)


@pytest.mark.slow
def test_a_scope_of_regrads_is_none_of_jaxs():
    scope = rg.gradient_override_map({"Relu": lambda dy: dy})
    with pytest.warns(rg.errors.UnusedOverrideWarning, match=r"use rg\.jax\.override"), scope:
        jax.grad(model)(X)
