"""Quantization-aware fine-tuning of a PyTorch model whose quantizer has no gradient.

The quantizer is an ordinary one: divide by a scale, `torch.round`, `torch.clamp`, multiply. The
derivative of `round` is 0, so no gradient passes through it. Quantizers for training contain a
straight-through estimator. Here the estimator comes from outside:
`gradient_override_map({"Round": straight_through})` wraps the training loop. The model and the
quantizer are not edited: weights are quantized by torch's own `parametrize`, activations by hooks.

Run:     python examples/foreign_quantized.py [--quick]      (needs torch and scikit-learn)
Prints:  test accuracy on handwritten digits of a network 64-128-128-10 in float32, with weights and
         hidden activations rounded to 2 bits, and after fine-tuning without and with the override;
         and how many of the weights moved in the fine-tuning. Mean and range of three seeds.
         Without the override only the last bias trains, because no `round` lies between it and
         the loss. "float32, trained on" had as many epochs as the fine-tuned networks.
Source:  Hinton, Neural Networks for Machine Learning, lecture 15b, 2012 (straight-through). Jacob
         et al., "Quantization and Training of Neural Networks for Efficient
         Integer-Arithmetic-Only Inference", 2017, arXiv 1712.05877 (fake quantization).
"""

from __future__ import annotations

import copy
import sys
from collections import defaultdict

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.utils import parametrize

import regrad as rg
import regrad.torch

# -- a third-party model, and a third-party quantizer ----------------------------------------------


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class FakeQuantize(nn.Module):
    """A symmetric quantizer, with one scale for the whole tensor."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.limit = 2 ** (bits - 1) - 1

    def forward(self, x: Tensor) -> Tensor:
        scale = 2 * x.detach().abs().mean() / self.limit**0.5
        return torch.clamp(torch.round(x / scale), -self.limit, self.limit) * scale


# -- fine-tuning -----------------------------------------------------------------------------------


def quantised(model: nn.Module, weights: int = 2, activations: int = 2) -> nn.Module:
    """Return a copy of the model with quantized weights and hidden activations."""
    model = copy.deepcopy(model)
    quantise = FakeQuantize(activations)
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    for layer in linear:
        parametrize.register_parametrization(layer, "weight", FakeQuantize(weights))
    for layer in linear[1:]:
        layer.register_forward_pre_hook(lambda _, args: (quantise(args[0]),))
    return model


def train(model: nn.Module, x: Tensor, labels: Tensor, epochs: int) -> None:
    adam = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            adam.zero_grad()
            F.cross_entropy(model(x[rows]), labels[rows]).backward()
            adam.step()


def accuracy(model: nn.Module, x: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return (model(x).argmax(1) == labels).float().mean().item()


def moved(before: nn.Module, after: nn.Module) -> float:
    """Return the fraction of weights that differ."""
    pairs = zip(before.parameters(), after.parameters(), strict=True)
    changed = [(a != b).flatten() for a, b in pairs if a.dim() > 1]
    return torch.cat(changed).float().mean().item()


def run(seed: int, epochs: int, split) -> dict[str, tuple[float, float]]:
    """Return the accuracy, and the fraction of weights that moved, for each method."""
    x, x_test, labels, labels_test = split
    torch.manual_seed(seed)
    model = Network()
    train(model, x, labels, epochs)
    rounded = quantised(model)
    longer, plain, overridden = map(copy.deepcopy, (model, rounded, rounded))
    train(longer, x, labels, epochs)
    train(plain, x, labels, epochs)
    with regrad.torch.gradient_override_map({"Round": rg.rules.straight_through}) as used:
        train(overridden, x, labels, epochs)
    used.assert_fired()
    if seed == 0:
        print(f"{used.table()}\n")
    return {
        name: (accuracy(after, x_test, labels_test), moved(before, after))
        for name, before, after in (
            ("float32", model, model),
            ("rounded", rounded, rounded),
            ("fine-tuned, torch's gradient", rounded, plain),
            ("fine-tuned, straight-through", rounded, overridden),
            ("float32, trained on", model, longer),
        )
    }


def main(quick: bool = False) -> dict[str, dict[str, float]]:
    """Train, round, and fine-tune with both methods; return mean accuracies and fractions moved."""
    digits = load_digits()
    x = (digits.data / 16).astype(np.float32)
    split = train_test_split(x, digits.target, random_state=0, stratify=digits.target)
    split = [torch.from_numpy(part) for part in split]
    found = defaultdict(list)
    for seed in range(1 if quick else 3):
        for way, pair in run(seed, 4 if quick else 12, split).items():
            found[way].append(pair)
    print(f"{'':30}{'accuracy':>9}{'range':>16}{'weights moved':>16}")
    rows = {}
    for way, pairs in found.items():
        accuracies, shares = np.array(pairs).T
        rows[way] = {"accuracy": accuracies.mean(), "moved": shares.mean()}
        spread = f"{accuracies.min():.1%}..{accuracies.max():.1%}"
        print(f"{way:30}{accuracies.mean():9.1%}{spread:>16}{shares.mean():16.1%}")
    return rows


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
