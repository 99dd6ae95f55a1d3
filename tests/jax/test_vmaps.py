"""Rules under a vmap inside the overridden function see single examples.

What is due comes from functions with a `jax.custom_vjp` written by hand in the op's place.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import regrad as rg
from regrad.errors import GradientError

X = jax.random.normal(jax.random.key(0), (5, 3, 4))
W = jax.random.normal(jax.random.key(1), (4, 4))


def normed(dy):
    """A gradient that mixes all elements of an example."""
    return dy / (1 + jnp.linalg.norm(dy)) * jnp.arange(1.0, 1 + dy.size).reshape(dy.shape)


def by_hand(f, backward):
    """The function with another gradient: `backward(dy, *xs)`, one for each input."""
    g = jax.custom_vjp(f)
    g.defvjp(lambda *xs: (g(*xs), xs), lambda xs, dy: tuple(backward(dy, *xs)))
    return g


def one(dy, x):
    return (normed((dy if dy.shape == x.shape else dy.sum()) * jnp.ones(x.shape)) + x,)


def product(dy, a, b):
    return normed(dy @ jnp.swapaxes(b, -1, -2)), normed(jnp.swapaxes(a, -1, -2) @ dy)


def softmax(x):
    return jax.nn.softmax(x, axis=-1)


def pool(x):
    window, strides = (1, 2, 2, 1), (1, 1, 1, 1)
    return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, "VALID")


def convolved(x):
    ones = jnp.ones((2, 2, 1, 1))
    return lax.conv_general_dilated(
        x, ones, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def image(op):
    return lambda x: op(x.reshape(1, *x.shape, 1)).sum()


# The key, its op, a model of single examples by way of that op, and the op's gradient.
OPS = {
    "Softmax": (softmax, lambda op: lambda x: op(x @ W @ x.T) @ x, one),
    "LogSoftmax": (lambda x: jax.nn.log_softmax(x), lambda op: lambda x: op(x) * x, one),
    "MatMul": (jnp.matmul, lambda op: lambda x: op(op(x, W), jnp.sin(x).T), product),
    "Relu": (jax.nn.relu, lambda op: lambda x: op(x) * x, one),
    "Gelu": (lambda x: jax.nn.gelu(x), lambda op: lambda x: op(x) * x, one),
    "Tanh": (jnp.tanh, lambda op: lambda x: op(x) * x, one),
    "Mean": (lambda x: jnp.mean(x, axis=0), lambda op: lambda x: op(jnp.sin(x)) * x, one),
    "Sum": (lambda x: jnp.sum(x, axis=-1), lambda op: lambda x: op(jnp.sin(x)) + 1, one),
    "MaxPool": (pool, image, one),
    "Conv2D": (convolved, image, one),
}
RULES = {
    "MatMul": product,
    "Conv2D": lambda dy, x, w: (*one(dy, x), None),
}


def rule_for(key):
    return RULES.get(key, lambda dy, x: one(dy, x)[0])


VMAPS = {
    "vmap": jax.vmap,
    "last axis": lambda f: lambda x: jax.vmap(f, in_axes=-1)(jnp.moveaxis(x, 0, -1)),
    "out axis": lambda f: lambda x: jnp.moveaxis(
        jax.vmap(lambda x: jnp.atleast_1d(f(x)), out_axes=1)(x), 1, 0),
    "vmap of vmap": lambda f: lambda x: jax.vmap(jax.vmap(f))(jnp.stack([x, 2 * x])),
    "jit of vmap": lambda f: jax.jit(jax.vmap(f)),
    "vmap of jit": lambda f: jax.vmap(jax.jit(f)),
    "scan of vmap": lambda f: lambda x: lax.scan(
        lambda c, _: (c * 0.5, jax.vmap(f)(c)), x, None, length=2)[1],
    "vmap of scan": lambda f: jax.vmap(
        lambda x: lax.scan(lambda c, _: (c * 0.5, f(c)), x, None, length=2)[1]),
    "vmap of cond": lambda f: jax.vmap(
        lambda x: lax.cond(x[0, 0] > 0, f, lambda x: 2 * f(x), x)),
    "cond of vmap": lambda f: lambda x: lax.cond(
        x.sum() < 1e9, jax.vmap(f), lambda x: 0 * jax.vmap(f)(x), x),
    "checkpoint of vmap": lambda f: jax.checkpoint(jax.vmap(f)),
    "vmap of checkpoint": lambda f: jax.vmap(jax.checkpoint(f)),
    "closed over": lambda f: lambda x: jax.vmap(lambda i: f(x[i] * x[0, 0, 0]))(jnp.arange(len(x))),
    "one of two": lambda f: lambda x: jax.vmap(lambda a, b: f(a) + f(b).sum(), (0, None))(x, x[0]),
    "equinox": lambda f: eqx.filter_jit(eqx.filter_vmap(f)),
    "named axis": lambda f: jax.vmap(lambda x: lax.psum(f(x), "batch"), axis_name="batch"),
    "vectorize": lambda f: lambda x: jnp.vectorize(
        lambda x: f(x).sum(), signature="(m,n)->()")(x),
    "batches": lambda f: lambda x: lax.map(f, x, batch_size=2),
}  # fmt: skip


def total(f):
    return lambda x: jnp.sum(jnp.sin(f(x)))


def same(got, due):
    np.testing.assert_allclose(got, due, rtol=2e-4, atol=2e-5)


FEW = ["vmap", "vmap of scan", "jit of vmap"]
MOST = ("Softmax", "MatMul")
GRID = [(key, way) for key in OPS for way in (VMAPS if key in MOST else FEW)]


@pytest.mark.parametrize(("key", "way"), GRID)
def test_rules_see_single_examples(key, way):
    op, model, backward = OPS[key]
    f, hand = VMAPS[way](model(op)), VMAPS[way](model(by_hand(op, backward)))
    ours = rg.jax.override(f, {key: rule_for(key)})
    run = jax.jit(jax.grad(total(ours)))
    same(run(X), jax.jit(jax.grad(total(hand)))(X))
    ours.assert_fired(key)
    np.testing.assert_array_equal(jax.jit(ours)(X), jax.jit(f)(X))


@pytest.mark.parametrize("key", OPS)
def test_their_own_rule_changes_nothing(key):
    f = jax.vmap(OPS[key][1](OPS[key][0]))
    native = rg.jax.override(f, {key: key})
    due = jax.jit(jax.value_and_grad(total(f)))(X)
    for a, b in zip(jax.jit(jax.value_and_grad(total(native)))(X), due, strict=True):
        np.testing.assert_array_equal(a, b)
    native.assert_fired()


@pytest.mark.parametrize("key", ["Softmax", "MatMul", "Relu"])
def test_values_are_the_same_to_the_last_bit(key):
    f = jax.vmap(OPS[key][1](OPS[key][0]), in_axes=1, out_axes=2)
    ours = rg.jax.override(f, {key: rule_for(key)})
    np.testing.assert_array_equal(ours(X), f(X))
    np.testing.assert_array_equal(jax.vjp(ours, X)[0], f(X))


TRANSFORMS = {
    "eager": jax.grad,
    "grad of grad": lambda f: jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2))),
    "vmap(grad)": lambda f: jax.jit(jax.vmap(jax.grad(f))),
    "grad of checkpoint": lambda f: jax.jit(jax.grad(jax.checkpoint(f))),
}


@pytest.mark.parametrize("way", TRANSFORMS)
@pytest.mark.parametrize("key", ["Softmax", "MatMul", "Tanh"])
def test_what_is_done_with_it(key, way):
    op, model, backward = OPS[key]
    f, hand = jax.vmap(model(op)), jax.vmap(model(by_hand(op, backward)))
    x = X[None] if way == "vmap(grad)" else X
    ours = rg.jax.override(f, {key: rule_for(key)})
    same(TRANSFORMS[way](total(ours))(x), TRANSFORMS[way](total(hand))(x))


def test_forward_mode():
    doubled = rg.jax.override(jax.vmap(lambda x: jnp.tanh(x) + x), {"Tanh": lambda dy: 2 * dy})
    same(jax.jvp(doubled, (X,), (X,))[1], 3 * X)
    with pytest.raises(GradientError, match="not linear"):
        jax.jvp(rg.jax.override(jax.vmap(jnp.tanh), {"Tanh": normed}), (X,), (X,))


def test_an_override_inside_an_override():
    inner = rg.jax.override(jax.vmap(lambda x: jnp.tanh(x) * softmax(x)), {"Tanh": normed})
    ours = rg.jax.override(
        lambda x: inner(x) + jax.vmap(softmax)(x), {"Softmax": lambda dy: normed(dy)}
    )
    tanh, soft = (
        by_hand(jnp.tanh, lambda dy, x: (normed(dy),)),
        by_hand(softmax, lambda dy, x: (normed(dy),)),
    )
    hand = lambda x: jax.vmap(lambda x: tanh(x) * soft(x) + soft(x))(x)  # noqa: E731
    same(jax.grad(total(ours))(X), jax.grad(total(hand))(X))
    ours.assert_fired()


def test_functions_that_are_compiled_elsewhere_are_left_alone():
    attend = jax.jit(jax.vmap(lambda x: softmax(x) * x))
    plain, text = attend(X), str(jax.make_jaxpr(attend)(X))
    ours = rg.jax.override(lambda x: attend(x), {"Softmax": normed})
    jax.grad(total(ours))(X)
    fresh = jax.jit(jax.vmap(lambda x: softmax(x) * x))
    rg.jax.override(lambda x: fresh(x), {"Softmax": normed})(X)
    assert str(jax.make_jaxpr(attend)(X)) == text
    assert "regrad" not in str(jax.make_jaxpr(fresh)(X))
    np.testing.assert_array_equal(attend(X), plain)


@jax.custom_batching.custom_vmap
def own_batching(x):
    return jnp.tanh(x)


@own_batching.def_vmap
def _(axis_size, in_batched, x):
    return jnp.tanh(x), True


def test_what_was_batched_before_is_refused_by_name():
    batched = jax.make_jaxpr(jax.vmap(softmax))(X)
    pooled = jax.make_jaxpr(jax.vmap(lambda x: pool(x[None, :, :, None])))(X)
    for key, f in {
        "Softmax": jaxpr_as_fun(batched),
        "MaxPool": jaxpr_as_fun(pooled),
        "Tanh": jax.vmap(own_batching),
        "Relu": jax.vmap(jax.nn.relu, spmd_axis_name="x"),
    }.items():
        with pytest.raises(GradientError, match="Put the vmap outside"):
            rg.jax.override(f, {key: seven})(X)
    with pytest.raises(GradientError, match="Put the override inside"):
        inner = jax.vmap(jax.grad(lambda x: softmax(x).sum()))
        rg.jax.override(inner, {"Softmax": seven})(X)


def seven(op, dy):
    return [7 * dy for _ in op.inputs]
