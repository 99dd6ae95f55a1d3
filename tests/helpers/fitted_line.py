"""A line that optimizers fit, on arrays of any library."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import regrad as rg

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
Y = (X @ [1.0, -2.0, 0.5] + 0.3).astype(np.float32)


def as_numpy(values):
    return np.asarray(values, np.float32)


def as_jax(values):
    return jnp.asarray(values, jnp.float32)


def as_torch(values):
    import torch

    return torch.tensor(values, dtype=torch.float32)


def model(make=as_numpy):
    return [rg.Variable(make([0.5, 0.5, 0.5]), name="w"), rg.Variable(make(0.0), name="b")]


def loss_of(w, b, make=as_numpy):
    return lambda: rg.mean(rg.square(rg.matmul(make(X), w) + b - make(Y)))


def values(variables):
    return {v.name: np.asarray(v.value.numpy()) for v in variables}


def same_bits(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert a[name].tobytes() == b[name].tobytes(), name


WAYS = {
    "sgd": lambda: optax.sgd(0.1), "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.05),
    "adamw": lambda: optax.adamw(optax.cosine_decay_schedule(0.05, 20), weight_decay=0.1),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.05)),
    "rmsprop": lambda: optax.rmsprop(0.01, centered=True),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.05),
    "noisy": lambda: optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(3)), optax.sgd(0.1)),
    "accumulated": lambda: optax.MultiSteps(optax.adam(0.05), every_k_schedule=3),
    "plateau": lambda: optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)),
}  # fmt: skip
