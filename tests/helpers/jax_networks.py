"""One network in Equinox, in Flax's NNX and in Linen, with changes written into some blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.helpers.jax_model import own_slope, own_vjp

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (2, 4))
SITES = ("layers.0", "layers.1", "head", "")  # of the four calls of tanh
NONE: frozenset[str] = frozenset()


def same(x):
    return x


class Change(NamedTuple):
    """Functions of a block: of its argument, the activation, and of its result."""

    argument: Callable[[Any], Any] = same
    act: Callable[[Any], Any] = jnp.tanh
    result: Callable[[Any], Any] = same

    def __call__(self, layer, x):
        return self.result(self.act(layer(self.argument(x))))


def bent(dy):
    return 2 * jnp.sin(dy)


bending = own_vjp(lambda dy, x: (bent(dy),))(same)
PLAIN, SEVENFOLD = Change(), Change(act=own_slope(lambda x: 7 * (1 - jnp.tanh(x) ** 2))(jnp.tanh))
BENT_ON_ARRIVAL = Change(result=bending)


def leaving(dy, layer, x):
    dlayer, dx = jax.vjp(PLAIN, layer, x)[1](dy)
    return dlayer, bent(dx)


BENT_ON_LEAVING = own_vjp(leaving)(lambda layer, x: PLAIN(layer, x))
REVERSED = Change(argument=own_vjp(lambda dy, x: (-dy,))(same))


def times7(dy, y):
    return 7 * dy * (1 - y * y)


class EqxBlock(eqx.Module):
    lin: eqx.nn.Linear
    change: Change = eqx.field(static=True)

    def __call__(self, x):
        return self.change(self.lin, x)


class EqxNet(eqx.Module):
    layers: list
    head: EqxBlock
    act: Callable = eqx.field(static=True)

    def __init__(self, at=NONE, change=SEVENFOLD):
        each, keys = [change if path in at else PLAIN for path in SITES], jax.random.split(KEY, 3)
        layers = [
            EqxBlock(eqx.nn.Linear(4, 4, key=key), c) for key, c in zip(keys, each[:3], strict=True)
        ]
        self.layers, self.head, self.act = layers[:2], layers[2], each[3].act

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.act(self.head(x))


class NnxBlock(nnx.Module):
    def __init__(self, rngs, change=PLAIN):
        self.lin, self.change = nnx.Linear(4, 4, rngs=rngs), change

    def __call__(self, x):
        return self.change(self.lin, x)


class NnxNet(nnx.Module):
    def __init__(self, at=NONE, change=SEVENFOLD):
        rngs, each = nnx.Rngs(0), [change if path in at else PLAIN for path in SITES]
        *layers, self.head = [NnxBlock(rngs, c) for c in each[:3]]
        self.layers, self.act = nnx.List(layers), each[-1].act

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.act(self.head(x))


class LinenBlock(nn.Module):
    change: Change = PLAIN

    @nn.compact
    def __call__(self, x):
        return self.change(nn.Dense(4), x)


class LinenNet(nn.Module):
    at: frozenset = NONE
    change: Change = SEVENFOLD

    def setup(self):
        each = [self.change if path in self.at else PLAIN for path in SITES]
        *self.layers, self.head = [LinenBlock(c) for c in each[:3]]
        self.act = each[-1].act

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.act(self.head(x))


PARAMS = LinenNet().init(KEY, X)


def eqx_loss(model, x):
    return jnp.sum(jax.vmap(model)(x) ** 2)


def loss(model, x):
    return jnp.sum(model(x) ** 2)


def linen_loss(model):
    return lambda params, x: jnp.sum(model.apply(params, x) ** 2)


def close(found, expected, rtol=2e-5, atol=1e-6):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)
