"""A network of binary weights and activations, trained by five gradients of one unedited model.

The gradient of the sign function is 0 wherever it exists, so a network of signs does not train.
BinaryNet trains anyway, by a different gradient for sign. Here the model just calls `rg.sign`, and
`gradient_override_map` selects the gradient from outside.

    float             no signs: float weights, tanh
    true gradient     sign's own gradient, 0: only the last layer trains
    straight-through  sign's gradient is Identity's                  (Hinton 2012)
    clipped           the same where |x| <= 1, 0 outside             (Hubara et al. 2016)
    approx_sign       a rule written in this file: 2 - 2|x| there    (Liu et al. 2018)

Run:     python examples/binarized_digits.py [--jit] [--quick]      (some minutes)
Prints:  accuracy on 450 test digits (the median of three seeds, lowest and highest), and how often
         the rule ran. The learning rate is the best of three, all evaluated on the same test
         digits. Draws out/binarized_digits.png. With --jit (which needs jax) the training steps
         are compiled under the same overrides, and one of the methods is timed in turns with the
         eager step. XLA adds floats in another order, and where a sum is almost 0 its sign may
         differ. So after some epochs the two runs of one seed differ by as much as the runs of two
         seeds do.
Source:  Hubara, Courbariaux, Soudry, El-Yaniv and Bengio, "Binarized Neural Networks", 2016,
         arXiv 1602.02830. Liu et al., "Bi-Real Net", 2018, arXiv 1808.00278.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import regrad as rg


class Network:
    """64-256-256-10 with batch normalization. The last layer's weights are floats."""

    def __init__(self, quantise, activate, seed):
        rng = np.random.default_rng(seed)
        self.quantise, self.activate = quantise, activate
        self.hidden = [variable(rng, 64, 256), variable(rng, 256, 256)]
        self.last = variable(rng, 256, 10)
        self.offsets = [rg.Variable(rg.zeros(n)) for n in (256, 256, 10)]

    def __call__(self, x, statistics=None):
        """Return the logits, and the (mean, variance) of each layer, to pass again for a test."""
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
    """Return the slope of a parabola on each side of 0."""
    return dy * rg.maximum(2 - 2 * abs(x), 0)


SIGN, FLOAT = (rg.sign, rg.sign), (rg.identity, rg.tanh)
WAYS = {
    "float": (FLOAT, {}),
    "true gradient": (SIGN, {"Sign": "Sign"}),  # the default rule; naming it counts its runs
    "straight-through": (SIGN, {"Sign": "Identity"}),
    "clipped": (SIGN, {"Sign": rg.rules.clipped_straight_through}),
    "approx_sign": (SIGN, {"Sign": approx_sign}),
}


# -- training --------------------------------------------------------------------------------------


class Adam:
    """Adam (Kingma and Ba 2014). Latent weights stay in [-1, 1] (Courbariaux et al. 2015).

    Its state is in Variables, which a compiled step updates.
    """

    def __init__(self, network):
        self.variables = [*network.hidden, network.last, *network.offsets]
        self.latent = network.hidden
        self.steps = rg.Variable(0.0)
        self.means = [rg.Variable(rg.zeros_like(v)) for v in self.variables]
        self.squares = [rg.Variable(rg.zeros_like(v)) for v in self.variables]

    def step(self, gradients, rate):
        self.steps.assign_add(1.0)
        rate = rate * rg.sqrt(1 - 0.999**self.steps) / (1 - 0.9**self.steps)
        for v, m, s in zip(self.variables, self.means, self.squares, strict=True):
            dv = gradients[v.name]
            m.assign(0.9 * m + 0.1 * dv)
            s.assign(0.999 * s + 0.001 * rg.square(dv))
            new = v - rate * m / (rg.sqrt(s) + 1e-8)
            v.assign(rg.clip(new, -1.0, 1.0) if v in self.latent else new)


def digits():
    """Return training and test images (minus the mean image) and labels."""
    data = load_digits()
    split = train_test_split(
        (data.data / 16).astype(np.float32),
        data.target,
        test_size=450,
        random_state=0,
        stratify=data.target,
    )
    mean = split[0].mean(axis=0)
    return split[0] - mean, split[1] - mean, split[2], split[3]


class Trainer:
    """A network and its optimizer. The code is the same with and without compilation."""

    def __init__(self, way: str, seed: int, jit: bool = False):
        self.network = Network(*WAYS[way][0], seed)
        self.adam, self.rng = Adam(self.network), np.random.default_rng(seed)
        compiled = rg.jit if jit else lambda f: f
        self.step, self.logits = compiled(self._step), compiled(self._logits)

    def _step(self, images, labels, rate):
        def loss():
            logits, _ = self.network(images)
            return rg.losses.sparse_softmax_cross_entropy(labels, logits)

        self.adam.step(rg.variable_grads(loss).grads, rate)

    def _logits(self, x, x_test):
        """Return logits of test digits, normalized by the statistics of the whole training set."""
        _, statistics = self.network(x)
        return self.network(x_test, statistics)[0]

    def epoch(self, data, rate, batch: int = 64) -> float:
        """Run one epoch without the last, smaller batch. Return the seconds per step."""
        x, _, labels, _ = data
        batches = self.rng.permutation(len(x))[: len(x) // batch * batch].reshape(-1, batch)
        start = time.perf_counter()
        for rows in batches:
            self.step(rg.tensor(x[rows]), rg.tensor(labels[rows]), rate)
        float(self.adam.steps)  # waits for the result, because JAX returns earlier
        return (time.perf_counter() - start) / len(batches)

    def accuracy(self, data) -> float:
        x, x_test, _, labels_test = data
        logits = self.logits(rg.tensor(x), rg.tensor(x_test))
        return float(np.mean(logits.numpy().argmax(axis=1) == labels_test))


def train(way: str, data, epochs: int, seed: int, jit: bool, advance) -> tuple[list[float], int]:
    """Return the test accuracy after each epoch, and the number of runs of the rule."""
    trainer, curve = Trainer(way, seed, jit), []
    with rg.gradient_override_map(WAYS[way][1]) as used:
        for n in range(epochs):
            trainer.epoch(data, 0.003 * (1 - n / epochs))
            curve.append(trainer.accuracy(data))
            advance()
    used.assert_fired()
    return curve, sum(hit.ran for hit in used.hits)


def speed(way: str, data, epochs: int = 5) -> str:
    """Return the time per step, eager and compiled: medians of epochs in turns, when compiled."""
    both = Trainer(way, 0), Trainer(way, 0, jit=True)
    with rg.gradient_override_map(WAYS[way][1]):
        both[1].epoch(data, 0.003)
        seconds = [[trainer.epoch(data, 0.003) for trainer in both] for _ in range(epochs)]
    eager, compiled = 1000 * np.median(seconds, axis=0)
    return (
        f"{way}: {eager:.2f} ms per step of 64 digits, {compiled:.2f} ms compiled "
        f"({eager / compiled:.1f} times as fast, with whatever else this machine was doing)"
    )


# -- the report ------------------------------------------------------------------------------------


def rule_as_function(way: str, x: np.ndarray) -> np.ndarray:
    """Return the gradient of the activation at x, under the same override."""
    (_, activate), rules = WAYS[way]
    with rg.gradient_override_map(rules):
        return rg.grad(activate)(x).numpy()


def draw(curves: dict[str, np.ndarray], path: Path) -> None:
    import matplotlib.pyplot as plt

    plt.switch_backend("Agg")
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    x = np.linspace(-2, 2, 802)
    for i, (way, runs) in enumerate(curves.items()):
        epochs = np.arange(1, runs.shape[1] + 1)
        color, width = f"C{i}", 3.5 - 0.5 * i  # all curves stay visible where they coincide
        left.plot(epochs, 100 * np.median(runs, axis=0), color=color, label=way)
        left.fill_between(epochs, *100 * np.quantile(runs, [0, 1], axis=0), color=color, alpha=0.15)
        right.plot(x, rule_as_function(way, x), color=color, lw=width)
    left.set(xlabel="epoch", ylabel="test accuracy, % (median, range)", ylim=(75, 100))
    right.set(xlabel="x", ylabel="gradient of the activation at x")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(loc="lower right")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)


def main(quick: bool = False, jit: bool = False, ways=tuple(WAYS)) -> dict[str, float]:
    """Train with all methods, print the table, draw; return the median test accuracies."""
    data, epochs, seeds = digits(), 6 if quick else 40, 1 if quick else 3
    table = Table("gradient", "test accuracy", "lowest", "highest", "rule ran", "seconds")
    curves = {}
    with Progress() as progress:
        for way in ways:
            task = progress.add_task(way, total=epochs * seeds)
            start = time.perf_counter()
            advance = partial(progress.advance, task)
            runs = [train(way, data, epochs, seed, jit, advance) for seed in range(seeds)]
            seconds = time.perf_counter() - start
            curves[way] = np.array([curve for curve, _ in runs])
            last = curves[way][:, -1]
            numbers = [f"{v:.1%}" for v in (np.median(last), last.min(), last.max())]
            table.add_row(way, *numbers, f"{sum(ran for _, ran in runs):,}", f"{seconds:.1f}")
    Console().print(table)
    if jit:
        print(speed("clipped", data))
    drawn = Path("out/binarized_digits.png")
    draw(curves, drawn)
    kind = "one seed each" if quick else "the median of three seeds, the lowest and the highest"
    print(f"Accuracy on 450 test digits ({kind}), and how often the rule ran. Drawn: {drawn}")
    return {way: float(np.median(runs[:, -1])) for way, runs in curves.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="6 epochs of one seed, not 40 of 3")
    parser.add_argument("--jit", action="store_true", help="compile the training steps (with jax)")
    main(**vars(parser.parse_args()))
