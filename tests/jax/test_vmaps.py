"""Rules under a vmap inside the overridden function see single examples.

The expected gradients are those of functions with a `jax.custom_vjp` by hand in the op's place.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from numpy.testing import assert_allclose, assert_array_equal

import regrad as rg
from regrad.errors import GradientError
from tests.helpers.jax_model import own_vjp, seven, times

override = rg.jax.override
X = jax.random.normal(jax.random.key(0), (5, 3, 4))
W = jax.random.normal(jax.random.key(1), (4, 4))


def normed(dy):
    """A gradient that mixes all elements of an example."""
    return dy / (1 + jnp.linalg.norm(dy)) * jnp.arange(1.0, 1 + dy.size).reshape(dy.shape)


def one(dy, x):
    return (normed((dy if dy.shape == x.shape else dy.sum()) * jnp.ones(x.shape)) + x,)


def product(dy, a, b):
    return normed(dy @ jnp.swapaxes(b, -1, -2)), normed(jnp.swapaxes(a, -1, -2) @ dy)


def softmax(x):
    return jax.nn.softmax(x, axis=-1)


def pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "VALID")


def convolved(x):
    layout = ("NHWC", "HWIO", "NHWC")
    kernel = jnp.ones((2, 2, 1, 1))
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout)


def image(op):
    return lambda x: op(x.reshape(1, *x.shape, 1)).sum()


def itself(op):
    return lambda x: op(x) * x


# The key, its op, a model of single examples by way of that op, and the op's gradient.
OPS = {
    "Softmax": (softmax, lambda op: lambda x: op(x @ W @ x.T) @ x, one),
    "LogSoftmax": (lambda x: jax.nn.log_softmax(x), itself, one),
    "MatMul": (jnp.matmul, lambda op: lambda x: op(op(x, W), jnp.sin(x).T), product),
    "Relu": (jax.nn.relu, itself, one),
    "Gelu": (lambda x: jax.nn.gelu(x), itself, one),
    "Tanh": (jnp.tanh, itself, one),
    "Mean": (lambda x: jnp.mean(x, axis=0), lambda op: lambda x: op(jnp.sin(x)) * x, one),
    "Sum": (lambda x: jnp.sum(x, axis=-1), lambda op: lambda x: op(jnp.sin(x)) + 1, one),
    "MaxPool": (pool, image, one),
    "Conv2D": (convolved, image, one),
}
RULES = dict.fromkeys(OPS, lambda dy, x: one(dy, x)[0])
RULES |= {"MatMul": product, "Conv2D": lambda dy, x, w: (*one(dy, x), None)}


def scanned(f):
    return lambda x: lax.scan(lambda c, _: (c * 0.5, f(c)), x, None, length=2)[1]


VMAPS = {
    "vmap": jax.vmap,
    "last axis": lambda f: lambda x: jax.vmap(f, in_axes=-1)(jnp.moveaxis(x, 0, -1)),
    "out axis": lambda f: lambda x: jnp.moveaxis(
        jax.vmap(lambda x: jnp.atleast_1d(f(x)), out_axes=1)(x), 1, 0),
    "vmap of vmap": lambda f: lambda x: jax.vmap(jax.vmap(f))(jnp.stack([x, 2 * x])),
    "jit of vmap": lambda f: jax.jit(jax.vmap(f)),
    "vmap of jit": lambda f: jax.vmap(jax.jit(f)),
    "scan of vmap": lambda f: scanned(jax.vmap(f)),
    "vmap of scan": lambda f: jax.vmap(scanned(f)),
    "vmap of cond": lambda f: jax.vmap(lambda x: lax.cond(x[0, 0] > 0, f, lambda x: 2 * f(x), x)),
    "cond of vmap": lambda f: lambda x: lax.cond(
        x.sum() < 1e9, jax.vmap(f), lambda x: 0 * jax.vmap(f)(x), x),
    "checkpoint of vmap": lambda f: jax.checkpoint(jax.vmap(f)),
    "vmap of checkpoint": lambda f: jax.vmap(jax.checkpoint(f)),
    "closed over": lambda f: lambda x: jax.vmap(lambda i: f(x[i] * x[0, 0, 0]))(jnp.arange(len(x))),
    "one of two": lambda f: lambda x: jax.vmap(lambda a, b: f(a) + f(b).sum(), (0, None))(x, x[0]),
    "equinox": lambda f: eqx.filter_jit(eqx.filter_vmap(f)),
    "named axis": lambda f: jax.vmap(lambda x: lax.psum(f(x), "batch"), axis_name="batch"),
    "vectorize": lambda f: lambda x: jnp.vectorize(lambda x: f(x).sum(), signature="(m,n)->()")(x),
    "batches": lambda f: lambda x: lax.map(f, x, batch_size=2),
}  # fmt: skip


def total(f):
    return lambda x: jnp.sum(jnp.sin(f(x)))


def same(got, expected):
    assert_allclose(got, expected, rtol=2e-4, atol=2e-5)


FEW = ["vmap", "vmap of scan", "jit of vmap"]
GRID = [(k, way) for k in OPS for way in (VMAPS if k in ("Softmax", "MatMul") else FEW)]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("key", "way"), GRID)
def test_rules_see_single_examples(key, way):
    op, model, backward = OPS[key]
    f, hand = VMAPS[way](model(op)), VMAPS[way](model(own_vjp(backward)(op)))
    ours = override(f, {key: RULES[key]})
    same(jax.jit(jax.grad(total(ours)))(X), jax.jit(jax.grad(total(hand)))(X))
    ours.assert_fired(key)
    assert_array_equal(jax.jit(ours)(X), jax.jit(f)(X))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("key", OPS)
def test_their_own_rule_changes_nothing(key):
    f = jax.vmap(OPS[key][1](OPS[key][0]))
    native = override(f, {key: key})
    found, expected = (jax.jit(jax.value_and_grad(total(g)))(X) for g in (native, f))
    jax.tree.map(assert_array_equal, found, expected)
    native.assert_fired()


@pytest.mark.slow
@pytest.mark.parametrize("key", ["Softmax", "MatMul", "Relu"])
def test_values_are_the_same_to_the_last_bit(key):
    f = jax.vmap(OPS[key][1](OPS[key][0]), in_axes=1, out_axes=2)
    ours = override(f, {key: RULES[key]})
    assert_array_equal(ours(X), f(X))
    assert_array_equal(jax.vjp(ours, X)[0], f(X))


TRANSFORMS = {
    "eager": jax.grad,
    "grad of grad": lambda f: jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2))),
    "vmap(grad)": lambda f: lambda x: jax.jit(jax.vmap(jax.grad(f)))(x[None]),
    "grad of checkpoint": lambda f: jax.jit(jax.grad(jax.checkpoint(f))),
}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("way", TRANSFORMS)
@pytest.mark.parametrize("key", ["Softmax", "MatMul", "Tanh"])
def test_transformations_of_it(key, way):
    op, model, backward = OPS[key]
    ours, hand = override(jax.vmap(model(op)), {key: RULES[key]}), model(own_vjp(backward)(op))
    same(TRANSFORMS[way](total(ours))(X), TRANSFORMS[way](total(jax.vmap(hand)))(X))


def test_forward_mode():
    doubled = override(jax.vmap(lambda x: jnp.tanh(x) + x), {"Tanh": times(2)})
    same(jax.jvp(doubled, (X,), (X,))[1], 3 * X)
    with pytest.raises(GradientError, match="not linear"):
        jax.jvp(override(jax.vmap(jnp.tanh), {"Tanh": normed}), (X,), (X,))


@pytest.mark.slow
def test_an_override_inside_an_override():
    inner = override(jax.vmap(lambda x: jnp.tanh(x) * softmax(x)), {"Tanh": normed})
    ours = override(lambda x: inner(x) + jax.vmap(softmax)(x), {"Softmax": normed})
    tanh, soft = (own_vjp(lambda dy, x: (normed(dy),))(f) for f in (jnp.tanh, softmax))
    hand = jax.vmap(lambda x: tanh(x) * soft(x) + soft(x))
    same(jax.grad(total(ours))(X), jax.grad(total(hand))(X))
    ours.assert_fired()


@pytest.mark.slow
def test_functions_that_are_compiled_elsewhere_are_left_alone():
    attend, fresh = (jax.jit(jax.vmap(lambda x, n=n: softmax(x) * x)) for n in range(2))
    plain, text = attend(X), str(jax.make_jaxpr(attend)(X))
    jax.grad(total(override(lambda x: attend(x), {"Softmax": normed})))(X)
    override(lambda x: fresh(x), {"Softmax": normed})(X)
    assert str(jax.make_jaxpr(attend)(X)) == text
    assert "regrad" not in str(jax.make_jaxpr(fresh)(X))
    assert_array_equal(attend(X), plain)


@jax.custom_batching.custom_vmap
def own_batching(x):
    return jnp.tanh(x)


own_batching.def_vmap(lambda axis_size, in_batched, x: (jnp.tanh(x), True))
OUTSIDE, INSIDE = "Put the vmap outside", "Put the override inside"


@pytest.mark.parametrize(("key", "make", "words"), [
    ("Softmax", lambda: jaxpr_as_fun(jax.make_jaxpr(jax.vmap(softmax))(X)), OUTSIDE),
    ("MaxPool", lambda: jaxpr_as_fun(jax.make_jaxpr(jax.vmap(
        lambda x: pool(x[None, :, :, None])))(X)), OUTSIDE),
    ("Tanh", lambda: jax.vmap(own_batching), OUTSIDE),
    ("Relu", lambda: jax.vmap(jax.nn.relu, spmd_axis_name="x"), OUTSIDE),
    ("Softmax", lambda: jax.vmap(jax.grad(lambda x: softmax(x).sum())), INSIDE),
], ids=["Softmax", "MaxPool", "Tanh", "Relu", "gradient"])  # fmt: skip
def test_batches_from_before_are_refused_by_name(key, make, words):
    with pytest.raises(GradientError, match=words):
        override(make(), {key: seven})(X)
