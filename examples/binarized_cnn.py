"""A convolutional network of binary weights and activations, each training step compiled.

The model calls `rg.sign`, whose own gradient is 0. With this gradient only offsets train, and the
weights keep their initial values. An override replaces the gradient of sign by the identity's where
|x| <= 1, and by 0 outside. It also applies to the compiled step. The state that survives a step
(latent weights, running means, Adam's moments) is in Variables, which `rg.jit` passes in and out of
the program.

Run:     python examples/binarized_cnn.py [--quick]      (about a minute)
Prints:  for sign's own gradient and for the clipped one, the accuracy on 450 test digits, the
         part of the weights' signs that changed, and the time per step of 64 images. The digits
         are scikit-learn's, 8 x 8, enlarged to 28 x 28: MNIST's size, without a download.
Needs:   jax, optax.
Source:  Hubara, Courbariaux, Soudry, El-Yaniv and Bengio, "Binarized Neural Networks", 2016,
         arXiv 1602.02830.
"""

from __future__ import annotations

import sys
import time
from functools import partial

import numpy as np
import optax
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import regrad as rg

BATCH = 64
WAYS = {"true gradient": "Sign", "clipped": rg.rules.clipped_straight_through}


class Normalised:
    """Batch normalization. Running averages of mean and variance are used for the test."""

    def __init__(self, channels: int):
        self.offset = rg.Variable(rg.zeros(channels))
        self.mean = rg.Variable(rg.zeros(channels), trainable=False)
        self.variance = rg.Variable(rg.ones(channels), trainable=False)

    def __call__(self, x, training: bool):
        if not training:
            return rg.nn.batch_norm(x, self.mean, self.variance, self.offset)
        mean, variance = rg.nn.moments(x, tuple(range(x.ndim - 1)))
        self.mean.assign(0.9 * self.mean + 0.1 * mean)
        self.variance.assign(0.9 * self.variance + 0.1 * variance)
        return rg.nn.batch_norm(x, mean, variance, self.offset)


class Network:
    """Two convolutions, 1 -> 32 -> 64, each with a 2 x 2 pool, and a dense layer; all binary."""

    def __init__(self, seed: int):
        rng = np.random.default_rng(seed)
        shapes = (3, 3, 1, 32), (3, 3, 32, 64), (7 * 7 * 64, 10)
        self.weights = [variable(rng, *shape) for shape in shapes]
        self.normalised = [Normalised(n) for n in (32, 64, 10)]
        self.trained = [*self.weights, *[n.offset for n in self.normalised]]

    def __call__(self, x, training: bool = False):
        *filters, dense = [rg.sign(w) for w in self.weights]
        for w, normalised in zip(filters, self.normalised, strict=False):
            x = rg.nn.max_pool(rg.nn.conv2d(x, w, 1, "same"), 2, 2, "valid")
            x = rg.sign(normalised(x, training))
        return self.normalised[-1](x.reshape((len(x), -1)) @ dense, training)


def variable(rng, *shape: int) -> rg.Variable:
    limit = np.sqrt(6 / (np.prod(shape[:-1]) + np.prod(shape[:-2]) * shape[-1]))
    return rg.Variable(rng.uniform(-limit, limit, shape), dtype="float32")


def digits():
    """Return training and test images, (n, 28, 28, 1) in [-1, 1], and labels."""
    data = load_digits()
    images = rg.tensor((data.images / 8 - 1).astype(np.float32)[..., None])
    images = rg.nn.resize_bilinear(images, (28, 28), half_pixel_centers=True).numpy()
    return train_test_split(
        images, data.target, test_size=450, random_state=0, stratify=data.target
    )


def training_step(network: Network):
    """Return a compiled step of Adam. The latent weights stay in [-1, 1]."""
    adam = rg.train.Optimizer(optax.adam(0.003))
    adam.init(network.trained)  # the state must exist before the step is compiled

    @rg.jit
    def step(batch):
        images, labels = batch

        def loss():
            logits = network(images, training=True)
            return rg.losses.sparse_softmax_cross_entropy(labels, logits)

        value = adam.minimize(loss, network.trained)
        for w in network.weights:
            w.assign(rg.clip(w, -1.0, 1.0))
        return value

    return step


def shuffled(rng, x, labels):
    """Yield the batches of one epoch, all of the same size, as the compiled step requires."""
    for rows in rng.permutation(len(x))[: len(x) // BATCH * BATCH].reshape(-1, BATCH):
        yield x[rows], labels[rows]


def accuracy(network: Network, x, labels) -> float:
    predict = rg.jit(network)
    return float(np.mean(predict(rg.tensor(x)).numpy().argmax(axis=1) == labels))


def train(rule, data, epochs: int) -> dict[str, float]:
    x, x_test, labels, labels_test = data
    network, rng = Network(seed=0), np.random.default_rng(0)
    before = [np.sign(w.numpy()) for w in network.weights]
    step, batches = training_step(network), partial(shuffled, rng, x, labels)
    with rg.gradient_override_map({"Sign": rule}) as used:
        start = time.perf_counter()
        rg.train.fit(step, batches, 1)
        compiled = time.perf_counter()
        rg.train.fit(step, batches, epochs - 1)
        seconds = (time.perf_counter() - compiled) / (epochs - 1)
    used.assert_fired()
    changed = [np.sign(w.numpy()) != b for w, b in zip(network.weights, before, strict=True)]
    return {
        "accuracy": accuracy(network, x_test, labels_test),
        "changed": float(np.mean(np.concatenate([c.ravel() for c in changed]))),
        "ran": sum(hit.ran for hit in used.hits),
        "milliseconds": 1000 * seconds / (len(x) // BATCH),
        "compilation": compiled - start - seconds,
    }


def main(quick: bool = False) -> dict[str, dict[str, float]]:
    data, rows = digits(), {}
    table = Table("gradient", "accuracy", "signs changed", "rule ran", "ms/step", "compiling")
    for way, rule in WAYS.items():
        r = rows[way] = train(rule, data, epochs=2 if quick else 12)
        numbers = f"{r['accuracy']:.1%}", f"{r['changed']:.1%}", f"{r['ran']:,}"
        table.add_row(way, *numbers, f"{r['milliseconds']:.0f}", f"{r['compilation']:.1f} s")
    Console().print(table)
    return rows


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
