"""A spiking network, trained with a surrogate gradient of the spike through 30 time steps.

Pixels spike at random; the darker, the more often. 128 hidden neurons sum their inputs, leak, and
spike at a threshold: `rg.step`, whose gradient is 0. An override of its op type, "Step", replaces
the gradient by the slope of a fast sigmoid. `rg.scan` runs along time: a Python loop in eager mode,
one XLA loop in a compiled step. The backward pass needs three arrays per time step: the spikes, 1
minus the spikes, and the potentials minus the threshold. With `checkpoint=True` the tape keeps only
the carry, i.e. the potentials at the beginning of a step, and computes the rest again.

Run:     python examples/spiking.py [--quick]      (about a minute)
Prints:  (1) the bytes that an eager tape keeps for a gradient of 64 digits, with and without
         checkpoints; the values and gradients are bit-identical.
         (2) for compiled training, with and without: the accuracy on 450 test digits, the number
         of hidden neurons that spike per digit, and the time per step.
         Draws out/spiking.png: one test digit in the trained network.
Needs:   jax, optax.
Source:  Neftci, Mostafa and Zenke, "Surrogate Gradient Learning in Spiking Neural Networks",
         2019, arXiv 1901.09948. Zenke and Ganguli, "SuperSpike", 2018, arXiv 1705.11146.
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np
import optax
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import regrad as rg

STEPS, HIDDEN, BATCH = 30, 128, 64
SURROGATE = {"Step": rg.rules.superspike(5.0)}


class Network:
    """64-128-10: leaky integrate-and-fire neurons, and outputs that sum without spiking."""

    def __init__(self, seed: int):
        rng = np.random.default_rng(seed)
        self.hidden = rg.Variable(rng.normal(0, 0.12, (64, HIDDEN)), dtype="float32", name="hidden")
        self.last = rg.Variable(rng.normal(0, 0.1, (HIDDEN, 10)), dtype="float32", name="last")

    def __call__(self, spikes, checkpoint: bool = False):
        """Map spikes (time, batch, 64) to outputs (time, batch, 10) and hidden spikes."""

        def tick(carry, arriving):
            v, out = carry
            v = 0.9 * v + arriving @ self.hidden
            z = rg.step(v - 1.0)
            out = 0.95 * out + z @ self.last
            after = v * (1 - rg.stop_gradient(z))  # a neuron restarts at 0 after a spike
            return (after, out), (out, z)

        batch = spikes.shape[1]
        start = rg.zeros((batch, HIDDEN)), rg.zeros((batch, 10))
        return rg.scan(tick, start, spikes, checkpoint=checkpoint)[1]


def loss(network: Network, checkpoint: bool, spikes, labels):
    """Return the cross entropy of each output's highest potential."""
    outputs, _ = network(spikes, checkpoint)
    return rg.losses.sparse_softmax_cross_entropy(labels, rg.max(outputs, axis=0))


def as_spikes(images: np.ndarray, rng, steps: int = STEPS) -> np.ndarray:
    """Return spikes (time, batch, 64) of images (batch, 64). Black spikes half the time."""
    return (rng.random((steps, *images.shape)) < images / 2).astype(np.float32)


def digits():
    data = load_digits()
    images = (data.data / 16).astype(np.float32)
    return train_test_split(
        images, data.target, test_size=450, random_state=0, stratify=data.target
    )


# -- memory of the tape --------------------------------------------------------------------------


def gradient_and_kept(images, labels, steps: int, checkpoint: bool):
    """Return the loss, its gradients, and the bytes of new arrays after the forward pass."""
    spikes = rg.tensor(as_spikes(images, np.random.default_rng(0), steps))
    network = Network(seed=0)
    arrays, kept = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain), []

    def measured():
        tracemalloc.start()
        value = loss(network, checkpoint, spikes, labels)
        traces = tracemalloc.take_snapshot().filter_traces([arrays]).traces
        kept.append(sum(trace.size for trace in traces))
        tracemalloc.stop()
        return value

    with rg.gradient_override_map(SURROGATE) as used:
        value, gradients = rg.variable_grads(measured)
    used.assert_fired()
    return [value, *gradients.values()], kept[0]


def compare_memory(data) -> list[dict[str, float]]:
    table, rows = Table("time steps", "KiB kept", "with checkpoints", "largest difference"), []
    for steps in (10, 20, 40):
        ways = [
            gradient_and_kept(data[0][:BATCH], data[2][:BATCH], steps, c) for c in (False, True)
        ]
        (plain, kept), (again, kept_again) = ways
        off = max(float(abs(a - b).max()) for a, b in zip(plain, again, strict=True))
        rows.append({"kept": kept, "checkpoint": kept_again, "difference": off})
        table.add_row(f"{steps}", f"{kept / 1024:,.0f}", f"{kept_again / 1024:,.0f}", f"{off}")
    Console().print(table)
    return rows


# -- training --------------------------------------------------------------------------------------


def train(data, epochs: int, checkpoint: bool) -> tuple[Network, dict[str, float]]:
    x, x_test, labels, labels_test = data
    network, rng = Network(seed=0), np.random.default_rng(0)
    adam = rg.train.Optimizer(optax.adam(2e-3))
    adam.init([network.hidden, network.last])

    @rg.jit
    def step(batch):
        return adam.minimize(partial(loss, network, checkpoint, *batch))

    def batches():
        for rows in rng.permutation(len(x))[: len(x) // BATCH * BATCH].reshape(-1, BATCH):
            yield as_spikes(x[rows], rng), labels[rows]

    with rg.gradient_override_map(SURROGATE) as used:
        rg.train.fit(step, batches, 1)  # compiles
        start = time.perf_counter()
        losses = rg.train.fit(step, batches, epochs - 1)["loss"]
        seconds = time.perf_counter() - start
    used.assert_fired()

    outputs, hidden = (y.numpy() for y in rg.jit(network)(as_spikes(x_test, rng)))
    return network, {
        "loss": losses[-1],
        "accuracy": float(np.mean(outputs.max(axis=0).argmax(axis=1) == labels_test)),
        "spikes": float(hidden.sum(axis=(0, 2)).mean()),
        "milliseconds": 1000 * seconds / (epochs - 1) / (len(x) // BATCH),
    }


def draw(network: Network, image: np.ndarray, label: int, path: Path) -> None:
    import matplotlib.pyplot as plt

    plt.switch_backend("Agg")
    spikes = as_spikes(image[None], np.random.default_rng(0))
    outputs, hidden = (y.numpy()[:, 0] for y in network(rg.tensor(spikes)))
    figure, axes = plt.subplots(
        1, 4, figsize=(13, 3.4), layout="constrained", width_ratios=[1, 2, 2, 2]
    )
    axes[0].imshow(image.reshape(8, 8), cmap="gray_r")
    for panel, z in zip(axes[1:], (spikes[:, 0], hidden), strict=False):
        panel.plot(*np.nonzero(z), "k|", markersize=4)
    for digit, potential in enumerate(outputs.T):
        right = digit == label
        axes[3].plot(
            potential, color="C3" if right else "0.7", lw=2 if right else 1, zorder=1 + right
        )
    axes[0].set(title="a test digit", xticks=[], yticks=[])
    axes[1].set(title="input spikes", ylabel="pixel")
    axes[2].set(title="hidden spikes", ylabel="neuron")
    axes[3].set(title=f"outputs ({label} in red)", ylabel="potential")
    for panel in axes[1:]:
        panel.set(xlabel="time step", xlim=(-1, STEPS))
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)


def main(quick: bool = False) -> dict[str, list[dict[str, float]]]:
    data = digits()
    memory = compare_memory(data)
    table = Table("scan", "last loss", "test accuracy", "hidden spikes per digit", "ms/step")
    rows = []
    for checkpoint in (False, True):
        network, r = train(data, 4 if quick else 20, checkpoint)
        rows.append(r)
        numbers = f"{r['loss']:.6f}", f"{r['accuracy']:.1%}", f"{r['spikes']:.1f}"
        table.add_row(f"{checkpoint=}", *numbers, f"{r['milliseconds']:.1f}")
    Console().print(table)
    draw(network, data[1][0], data[3][0], Path("out/spiking.png"))
    return {"memory": memory, "training": rows}


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
