"""Domain-adversarial training by a reversed gradient (DANN) on two moons, one pair turned by 35°.

Labels are known for the source domain only. A hidden layer feeds a label classifier and a domain
classifier; between it and the latter stands `reverse_gradient`, so that the hidden layer learns
what tells the labels apart and unlearns what tells the domains apart. One ordinary descent step
trains all three.

Run:     python examples/gradient_reversal.py [--quick]
Prints:  accuracy on both domains without (λ = 0) and with (λ = 6) reversal, and how far the
         parameters are from the paper's Algorithm 1, written by hand in NumPy, after the same
         draws. Draws out/gradient_reversal.png.
Source:  Ganin et al., "Domain-Adversarial Training of Neural Networks", 2015, arXiv 1505.07818,
         Algorithm 1 (shallow network).
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import make_moons

import regrad as rg

HIDDEN, RATE = 15, 0.05


def moons(n: int, degrees: float, seed: int):
    points, labels = make_moons(n, noise=0.05, random_state=seed)
    points -= [0.5, 0.25]
    angle = np.deg2rad(degrees)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    return points @ turn.T, labels.astype(float)


def start(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    w, v, u = rng.normal(size=(2, HIDDEN)), rng.normal(size=HIDDEN), rng.normal(size=HIDDEN)
    return {"w": w, "b": np.zeros(HIDDEN), "v": v, "c": np.zeros(()), "u": u, "d": np.zeros(())}


# -- with regrad ---------------------------------------------------------------------------------


def hidden(p, x):
    return rg.nn.sigmoid(x @ p["w"] + p["b"])


def logit(h, weights, bias):
    return rg.sum(h * weights, axis=-1) + bias


def loss(p, source, label, target, strength):
    h = hidden(p, source)
    total = cross_entropy(label, logit(h, p["v"], p["c"]))
    for features, domain in ((h, 1.0), (hidden(p, target), 0.0)):
        features = rg.rules.reverse_gradient(features, strength)
        total = total + cross_entropy(domain, logit(features, p["u"], p["d"]))
    return total


def cross_entropy(label, z):
    return rg.sum(rg.nn.softplus(z) - label * z)


def train(p, draws, strength):
    p = {name: rg.tensor(value) for name, value in p.items()}
    for source, label, target in draws:
        source, target = rg.tensor(source[None]), rg.tensor(target[None])
        g = rg.grad(lambda p: loss(p, source, float(label), target, strength))(p)  # noqa: B023
        p = {name: p[name] - RATE * g[name] for name in p}
    return p

def draws(source, labels, target, steps, seed):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        i, j = rng.integers(len(source)), rng.integers(len(target))
        yield source[i], labels[i], target[j]


# -- the same by hand ------------------------------------------------------------------------------


def sigm(z):
    return 1 / (1 + np.exp(-z))


def train_by_hand(p, draws, strength, weighted):
    """Algorithm 1 (with the domain classifier's own steps not scaled by λ)."""
    w, b, v, c, u, d = (value.copy() for value in p.values())
    for source, label, target in draws:
        h = sigm(source @ w + b)
        error = sigm(h @ v + c) - label  # the label logit's gradient
        dh = error * v
        dv, dc, du, dd = error * h, error, 0, 0
        dw, db = np.outer(source, dh * h * (1 - h)), dh * h * (1 - h)
        for x, domain in ((source, 1), (target, 0)):
            h = sigm(x @ w + b)
            error = sigm(h @ u + d) - domain
            du, dd = du + error * h, dd + error
            dz = -strength * error * u * h * (1 - h)
            dw, db = dw + np.outer(x, dz), db + dz
        if weighted: du, dd = strength * du, strength * dd
        w, b, v, c = w - RATE * dw, b - RATE * db, v - RATE * dv, c - RATE * dc
        u, d = u - RATE * du, d - RATE * dd
    return {"w": w, "b": b, "v": v, "c": c, "u": u, "d": d}
