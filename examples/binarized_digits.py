"""A network of binary weights and activations, trained by five gradients of one unedited model.

The sign function has the gradient 0 wherever it has one, so a network of signs does not learn.
BinaryNet learns all the same, by passing sign another gradient. Here the model just calls
`rg.sign`; which gradient that has is decided from outside, by `gradient_override_map`.

    float             no signs: float weights, tanh
    true gradient     sign's own gradient, 0: only the last layer learns
    straight-through  sign's gradient is Identity's                  (Hinton 2012)
    clipped           the same where |x| <= 1, 0 outside              (Hubara et al. 2016)
    approx_sign       a rule written in this file: 2 - 2|x| there     (Liu et al. 2018)

Run:     python examples/binarized_digits.py [--quick]
Prints:  accuracy on 450 test digits (the median of three seeds, lowest and highest), and how often
         the rule ran. Draws out/binarized_digits.png.
Source:  Hubara, Courbariaux, Soudry, El-Yaniv and Bengio, "Binarized Neural Networks", 2016,
         arXiv 1602.02830. Liu et al., "Bi-Real Net", 2018, arXiv 1808.00278.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import regrad as rg


class Network:
    """64-256-256-10 with batch normalisation; the last layer's weights are floats."""

    def __init__(self, quantise, activate, seed):
        rng = np.random.default_rng(seed)
        self.quantise, self.activate = quantise, activate
        self.hidden = [variable(rng, 64, 256), variable(rng, 256, 256)]
        self.last = variable(rng, 256, 10)
        self.offsets = [rg.Variable(rg.zeros(n)) for n in (256, 256, 10)]

    def __call__(self, x, statistics=None):
        """The logits, and the (mean, variance) of each layer; give these again for a test."""
        used = []

        def normalised(x, offset):
            used.append(statistics[len(used)] if statistics else rg.nn.moments(x, 0))
            return rg.nn.batch_norm(x, *used[-1], offset)

        for w, offset in zip(self.hidden, self.offsets, strict=False):
            x = self.activate(normalised(x @ self.quantise(w), offset))
        return normalised(x @ self.last, self.offsets[-1]), used


def variable(rng, m: int, n: int) -> rg.Variable:
    limit = np.sqrt(6 / (m + n))
    return rg.Variable(rng.uniform(-limit, limit, (m, n)), dtype="float32")


def approx_sign(dy, x):
    """The slope of a parabola on each side of 0."""
    return dy * rg.maximum(2 - 2 * abs(x), 0)


SIGN, FLOAT = (rg.sign, rg.sign), (rg.identity, rg.tanh)
WAYS = {
    "float": (FLOAT, {}),
    "true gradient": (SIGN, {}),
    "straight-through": (SIGN, {"Sign": "Identity"}),
    "clipped": (SIGN, {"Sign": rg.rules.clipped_straight_through}),
    "approx_sign": (SIGN, {"Sign": approx_sign}),
}


# -- training --------------------------------------------------------------------------------------


class Adam:
    """Adam (Kingma and Ba 2014); latent weights stay in [-1, 1] (Courbariaux et al. 2015)."""

    def __init__(self, latent, rate):
        self.latent = {v.name for v in latent}
        self.rate, self.steps, self.means = rate, 0, {}

    def step(self, variables, gradients):
        self.steps += 1
        rate = self.rate * np.sqrt(1 - 0.999**self.steps) / (1 - 0.9**self.steps)
        for v in variables:
            dv = gradients[v.name]
            m, s = self.means.get(v.name, (0.0, 0.0))
            m, s = 0.9 * m + 0.1 * dv, 0.999 * s + 0.001 * rg.square(dv)
            self.means[v.name] = m, s
            new = v - float(rate) * m / (rg.sqrt(s) + 1e-8)
            v.assign(rg.clip(new, -1.0, 1.0) if v.name in self.latent else new)
