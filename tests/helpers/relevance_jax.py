"""The networks of the tests of relevance in JAX: each in PyTorch, Flax and Equinox."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from regrad.rules import lrp
from tests.helpers.jax_networks import same

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

WIDE = {"param_dtype": jnp.float64}


def close(got, expected, tolerance=1e-10):
    got, expected = np.asarray(got), np.asarray(expected)
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def array(x):
    return jnp.asarray(x.detach().numpy())


def both(of, model, x, composite, given=(), base=None, turn=same, layers=((), ()), **options):
    """The relevance for class 1 in PyTorch and in JAX, where the layers may have other names."""
    make, (theirs, ours) = getattr(lrp, composite), layers
    target = options.pop("target", 1)
    expected = lrp.relevance(of, x, target, make(*given), theirs, reference=base)
    base = None if base is None else turn(array(base))
    rules = make(*given, library="jax")
    found = lrp.relevance(model, turn(array(x)), target, rules, ours, reference=base, **options)
    assert abs(expected.inputs).max() > 1e-3
    return found, expected


# -- dense layers and a layer norm, in three libraries ---------------------------------------------


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.n, self.b = nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 4)
        self.c = nn.Linear(4, 3, bias=False)

    def forward(self, x):
        return self.c(nn.functional.gelu(self.b(self.n(torch.relu(self.a(x)))), approximate="tanh"))


class NnxMlp(nnx.Module):
    def __init__(self, of):
        r = nnx.Rngs(0)
        self.a, self.b = nnx.Linear(6, 5, rngs=r, **WIDE), nnx.Linear(5, 4, rngs=r, **WIDE)
        self.n = nnx.LayerNorm(5, rngs=r, epsilon=1e-5, **WIDE)
        self.c = nnx.Linear(4, 3, use_bias=False, rngs=r, **WIDE)
        for mine, theirs in ((self.a, of.a), (self.b, of.b), (self.c, of.c)):
            mine.kernel[...] = array(theirs.weight).T
            if theirs.bias is not None:
                mine.bias[...] = array(theirs.bias)
        self.n.scale[...], self.n.bias[...] = array(of.n.weight), array(of.n.bias)

    def __call__(self, x):
        return self.c(jax.nn.gelu(self.b(self.n(jax.nn.relu(self.a(x))))))


class EqxMlp(eqx.Module):
    a: eqx.nn.Linear
    n: eqx.nn.LayerNorm
    b: eqx.nn.Linear
    c: eqx.nn.Linear

    def __call__(self, x):
        return jax.vmap(lambda x: self.c(jax.nn.gelu(self.b(self.n(jax.nn.relu(self.a(x)))))))(x)


def eqx_mlp(of):
    key = jax.random.key(0)
    made = EqxMlp(eqx.nn.Linear(6, 5, key=key), eqx.nn.LayerNorm(5), eqx.nn.Linear(5, 4, key=key),
                  eqx.nn.Linear(4, 3, use_bias=False, key=key))  # fmt: skip
    where = lambda m: (  # noqa: E731
        m.a.weight, m.a.bias, m.n.weight, m.n.bias, m.b.weight, m.b.bias, m.c.weight,
    )  # fmt: skip
    return eqx.tree_at(where, made, tuple(map(array, of.parameters())))


class LinenMlp(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.relu(linen.Dense(5, **WIDE)(x))
        x = linen.LayerNorm(epsilon=1e-5, **WIDE)(x)
        x = linen.gelu(linen.Dense(4, **WIDE)(x))
        return linen.Dense(3, use_bias=False, **WIDE)(x)


def linen_variables(of):
    a, b, n, m, c, d, e = map(array, of.parameters())
    return {"params": {
        "Dense_0": {"kernel": a.T, "bias": b}, "LayerNorm_0": {"scale": n, "bias": m},
        "Dense_1": {"kernel": c.T, "bias": d}, "Dense_2": {"kernel": e.T},
    }}  # fmt: skip


MLPS = {
    "nnx": NnxMlp, "equinox": eqx_mlp,
    "linen, bound": lambda of: LinenMlp().bind(linen_variables(of)),
    "linen, a function": lambda of: lambda x: LinenMlp().apply(linen_variables(of), x),
    "linen, compiled": lambda of: jax.jit(lambda x: LinenMlp().apply(linen_variables(of), x)),
}  # fmt: skip


# -- convolutions, batch norm and a residual sum ---------------------------------------------------


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.n = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
        self.b = nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=2)
        self.c, self.d = nn.ConvTranspose2d(4, 2, 2, 2), nn.Linear(2 * 4 * 4, 3)

    def forward(self, x):
        x = torch.relu(self.n(self.a(x)))
        x = nn.functional.max_pool2d(torch.relu(self.b(x) + x), 3)
        return self.d(torch.relu(self.c(x)).permute(0, 2, 3, 1).flatten(1))


class NnxCnn(nnx.Module):
    def __init__(self, of):
        r, no = nnx.Rngs(0), {"padding": "VALID"}
        self.a = nnx.Conv(2, 4, (3, 3), rngs=r, **no, **WIDE)
        self.n = nnx.BatchNorm(4, use_running_average=True, epsilon=1e-5, rngs=r, **WIDE)
        self.b = nnx.Conv(
            4, 4, (3, 3), padding=2, kernel_dilation=2, feature_group_count=2, rngs=r, **WIDE
        )
        self.c = nnx.ConvTranspose(
            4, 2, (2, 2), (2, 2), transpose_kernel=True, rngs=r, **no, **WIDE
        )
        self.d = nnx.Linear(32, 3, rngs=r, **WIDE)
        for mine, theirs in ((self.a, of.a), (self.b, of.b), (self.c, of.c)):
            mine.kernel[...] = array(theirs.weight).transpose(2, 3, 1, 0)
            mine.bias[...] = array(theirs.bias)
        self.d.kernel[...], self.d.bias[...] = array(of.d.weight).T, array(of.d.bias)
        self.n.scale[...], self.n.bias[...] = array(of.n.weight), array(of.n.bias)
        self.n.mean = nnx.BatchStat(array(of.n.running_mean))
        self.n.var = nnx.BatchStat(array(of.n.running_var))

    def __call__(self, x):
        x = jax.nn.relu(self.n(self.a(x)))
        x = nnx.max_pool(jax.nn.relu(self.b(x) + x), (3, 3), (3, 3))
        return self.d(jax.nn.relu(self.c(x)).reshape(len(x), -1))


def with_weights(layer, of, turned=False):
    w = array(of.weight)
    w = w.transpose(1, 0, 2, 3)[:, :, ::-1, ::-1] if turned else w
    both = w, array(of.bias).reshape(layer.bias.shape)
    return eqx.tree_at(lambda m: (m.weight, m.bias), layer, both)


class EqxCnn(eqx.Module):
    a: eqx.nn.Conv2d
    b: eqx.nn.Conv2d
    c: eqx.nn.ConvTranspose2d
    d: eqx.nn.Linear
    n: nnx.Module

    def __init__(self, of):
        key, wide = jax.random.key(0), {"padding": 2, "dilation": 2, "groups": 2}
        self.a = with_weights(eqx.nn.Conv2d(2, 4, 3, key=key), of.a)
        self.b = with_weights(eqx.nn.Conv2d(4, 4, 3, **wide, key=key), of.b)
        self.c = with_weights(eqx.nn.ConvTranspose2d(4, 2, 2, 2, key=key), of.c, turned=True)
        self.d, self.n = with_weights(eqx.nn.Linear(32, 3, key=key), of.d), NnxCnn(of).n

    def __call__(self, x):
        x = jax.vmap(self.a)(x)
        x = jax.nn.relu(self.n(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2))
        x = jax.nn.relu(jax.vmap(self.b)(x) + x)
        x = jax.vmap(eqx.nn.MaxPool2d(3, 3))(x)
        x = jax.nn.relu(jax.vmap(self.c)(x)).transpose(0, 2, 3, 1)
        return jax.vmap(self.d)(x.reshape(len(x), -1))
