"""What `regrad.jax.override` refuses, and with which words."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.experimental import pallas as pl

import regrad as rg
from regrad.errors import ArgumentError, GradientError, RuleError, UnknownOpError
from tests.helpers.jax_model import model, relu, seven
from tests.helpers.jax_places import X
from tests.helpers.rows import refused
from tests.jax.test_keys import clipid

override = rg.jax.override


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
    (model, {"Add": seven, "AddV2": seven}, ArgumentError, r"two keys .*stand for"),
    (model, {"Relu": seven, jax.nn.relu: seven}, ArgumentError, "stand for"),
    (model, {"Maximum": seven, "max": seven}, ArgumentError, "stand for"),
    (clipid, {clipid: seven, "clipid": seven}, ArgumentError, "stand for the same thing"),
    (clipid, {"clipid": seven, clipid: seven}, ArgumentError, "stand for the same thing"),
    (clipid, {"clipidd": seven}, UnknownOpError, "no function of that name .*mean 'clipid'"),
    (clipid, {"tahn": seven}, UnknownOpError, "'tanh'"),
    (clipid, {"softmax": seven}, UnknownOpError, "Did you mean 'Softmax'"),
    (clipid, {"relu": seven}, UnknownOpError, "calls no function"),
    (model, {"Tanh": lambda dy, z: dy}, RuleError, "'z'"),
    (model, "Relu", ArgumentError, "takes a dict"),
    (3, {"Relu": seven}, ArgumentError, r"callable|function"),
    (jax.jit(Odd()), {"Relu": seven}, GradientError, "does not say where it was written"),
    (of_pallas, {"Tanh": seven}, GradientError, "pallas_call"),
    (imported, {"Tanh": seven}, GradientError, "exported"),
]
CALLS = [
    (lambda: override({"Relu": seven}), ArgumentError, r"function first\..*ours = rg.jax.override"),
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
