"""Keys that ask for the class of a module, where the function is not given the model."""

from __future__ import annotations

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import regrad as rg
from regrad.errors import ArgumentError

X = jnp.asarray([0.3, -0.7])


class Inner(nnx.Module):
    def __call__(self, x):
        return jnp.tanh(x)


class Heir(Inner):
    def __call__(self, x):
        return super().__call__(x)


class Outer(nnx.Module):
    def __init__(self, kind=Inner):
        self.w, self.inner = nnx.Param(jnp.ones(2)), kind()

    def __call__(self, x):
        with jax.named_scope("head"):
            y = jnp.tanh(x)
        return self.inner(x) + 10 * y + 100 * jnp.tanh(x) * self.w[...]


class EqxInner(eqx.Module):
    def __call__(self, x):
        return jnp.tanh(x)


class EqxOuter(eqx.Module):
    inner: EqxInner
    w: jax.Array

    def __call__(self, x):
        with jax.named_scope("head"):
            y = jnp.tanh(x)
        return self.inner(x) + 10 * y + 100 * jnp.tanh(x) * self.w


class LinenInner(nn.Module):
    def __call__(self, x):
        return jnp.tanh(x)


class LinenOuter(nn.Module):
    @nn.compact
    def __call__(self, x):
        with jax.named_scope("head"):
            y = jnp.tanh(x)
        return LinenInner(name="other")(x) + 10 * y + 100 * jnp.tanh(x)


def equinox():
    return EqxOuter(EqxInner(), jnp.ones(2))


def called(model):
    return lambda x: model(x)


FUNCTIONS = {
    "nnx": lambda: called(Outer()),
    "nnx, a class of another": lambda: called(Outer(Heir)),
    "nnx.jit": lambda: nnx.jit(Outer()),
    "jax.jit": lambda: jax.jit(called(Outer())),
    "checkpoint": lambda: jax.checkpoint(called(Outer())),
    "vmap": lambda: lambda x: jax.vmap(called(Outer()))(x[None])[0],
    "equinox": lambda: called(equinox()),
    "filter_jit": lambda: eqx.filter_jit(equinox()),
    "filter_vmap": lambda: lambda x: eqx.filter_vmap(equinox())(x[None])[0],
    "linen": lambda: lambda x: LinenOuter().apply({}, x),
    "linen, jit": lambda: jax.jit(lambda x: LinenOuter().apply({}, x)),
}


def in_inner(site):
    return site.module_class is not None and site.module_class.__name__ in INNER


INNER = ("Inner", "Heir", "EqxInner", "LinenInner")
KEYS = {
    "a predicate": ((in_inner, in_inner, in_inner), 7 + 10 + 100),
    "a class": ((Inner, EqxInner, LinenInner), 7 + 10 + 100),
    "the class around": ((Outer, EqxOuter, LinenOuter), 7 * (1 + 10 + 100)),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("key", KEYS)
def test_a_class_is_known_without_the_model(key, function):
    (of_nnx, of_equinox, of_linen), factor = KEYS[key]
    where = of_linen if "linen" in function else of_nnx
    where = of_equinox if function in ("equinox", "filter_jit", "filter_vmap") else where
    f = FUNCTIONS[function]()
    before = f(X)
    ours = rg.jax.override(f, {rg.at(where, "Tanh"): lambda dy, y: 7 * dy * (1 - y * y)})
    np.testing.assert_allclose(ours(X), before, rtol=1e-6)
    due = factor * (1 - np.tanh(np.asarray(X)) ** 2)
    np.testing.assert_allclose(jax.grad(lambda x: ours(x).sum())(X), due, rtol=1e-5)
    ours.assert_fired()
    true = (1 + 10 + 100) * (1 - np.tanh(np.asarray(X)) ** 2)  # and the function is as it was
    np.testing.assert_allclose(jax.grad(lambda x: f(x).sum())(X), true, rtol=1e-5)


@pytest.mark.parametrize("function", ["nnx", "nnx.jit", "equinox"])
def test_scopes_keep_their_names(function):
    rules = {
        rg.at("head", "Tanh"): lambda dy, y: 3 * dy * (1 - y * y),
        rg.at(in_inner, "Tanh"): lambda dy, y: 7 * dy * (1 - y * y),
    }
    ours = rg.jax.override(FUNCTIONS[function](), rules)
    due = (7 + 30 + 100) * (1 - np.tanh(np.asarray(X)) ** 2)
    np.testing.assert_allclose(jax.grad(lambda x: ours(x).sum())(X), due, rtol=1e-5)


def test_classes_are_put_back_and_others_are_missed():
    calls = {kind: vars(kind)["__call__"] for kind in (Inner, Heir, EqxInner, nnx.Linear)}
    ours = rg.jax.override(called(Outer()), {rg.at(in_inner, "Tanh"): lambda dy: dy})
    ours(X)
    assert all(vars(kind)["__call__"] is call for kind, call in calls.items())
    missed = rg.jax.override(called(Outer()), {rg.at(EqxInner, "Tanh"): lambda dy: dy})
    with pytest.raises(ArgumentError, match="no module of the model is of that class"):
        missed(X)


def test_traces_say_the_class():
    ours = rg.jax.override(called(Outer()), {rg.at(in_inner, "Tanh"): lambda dy: dy})
    found = rg.jax.trace_gradients(ours)(X)
    paths = [step.path for step in found.steps if step.op_type == "tanh"]
    assert sorted(paths) == ["Outer", "Outer/Inner", "Outer/head"]
    model = Outer()
    ours = rg.jax.override(model, {rg.at("inner", "Tanh"): lambda dy: dy}, model=model)
    found = rg.jax.trace_gradients(ours)(X)
    paths = [step.path for step in found.steps if step.op_type == "tanh"]
    assert sorted(paths) == ["", "head", "inner"]
