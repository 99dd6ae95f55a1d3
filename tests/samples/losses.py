"""Samples of the losses: every loss, and every reduction with weights of several shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.special

from regrad import losses, nn
from tests.helpers.optional import optional
from tests.samples import away, sample, spread
from tests.samples.activation import by_torch

torch = optional("torch")
functional = optional("torch.nn.functional")

LABELS, PREDICTIONS = spread(2, 3, seed=1), spread(2, 3, seed=2) + 0.05
PROBABILITIES = spread(2, 3, low=0.1, high=0.9, seed=3)
CHANCES = spread(2, 3, low=0.15, high=0.85, seed=4)  # what a model says
LOGITS = spread(2, 3, low=-3.0, high=3.0, seed=5)
LARGE = np.array([[-1000.0, 0.0, 1000.0], [700.0, 700.0, -700.0]])
MARGINS = 1 - away(2, 3)  # predictions for the label 1, away from the kink at 1
WEIGHTS = {
    "per element": spread(2, 3, low=0.2, high=1.5, seed=6),
    "per example": spread(2, 1, low=0.2, high=1.5, seed=6),
    "per column": spread(3, low=0.2, high=1.5, seed=6),
    "of rank 0": np.array(0.7),
}


SPARSE = "SparseSoftmaxCrossEntropyWithLogits"


def each_by_torch(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The cross entropy of each example; torch wants the classes ahead of other axes."""
    ahead = logits.movedim(-1, min(1, logits.ndim - 1))
    return functional.cross_entropy(ahead, labels.long(), reduction="none")


def averaged(x: np.ndarray, weights: Any, reduction: str) -> np.ndarray:
    """The reductions as np.average has them."""
    full = np.broadcast_to(weights, x.shape)
    if reduction == "sum_by_nonzero_weights":
        return np.asarray((x * full)[full != 0].sum() / np.count_nonzero(full))
    if reduction == "mean":
        return np.average(x, weights=full)
    return np.einsum("ij,ij->" if reduction == "sum" else "ij,ij->ij", x, full)


def reduction_rows() -> list[Any]:
    return [
        sample(f"{reduction}, weights {name}",
               lambda x, w, r=reduction: losses.compute_weighted_loss(x, w, r),
               (LABELS, weights), reference=lambda x, w, r=reduction: averaged(x, w, r))
        for reduction in losses.REDUCTIONS
        for name, weights in WEIGHTS.items()
    ]  # fmt: skip


def smoothed(labels: np.ndarray, amount: float, classes: int) -> np.ndarray:
    return (1 - amount) * labels + np.full_like(labels, amount / classes)


def softmax_cross_entropy(labels: np.ndarray, logits: np.ndarray) -> np.ndarray:
    return -(labels * scipy.special.log_softmax(logits, axis=-1)).sum(-1).mean()


def binary_cross_entropy(a: np.ndarray, b: np.ndarray, epsilon: float) -> np.ndarray:
    odds = scipy.special.xlogy(a, b + epsilon) + scipy.special.xlogy(1 - a, 1 + epsilon - b)
    return -odds.mean()


SAMPLES = [
    *reduction_rows(),
    sample("sum_by_nonzero_weights, some weights are 0",
           lambda x: losses.compute_weighted_loss(x, [[0.0], [0.5]]), LABELS,
           reference=lambda x: x[1].mean() / 2),
    sample("a loss of rank 0", lambda x: losses.compute_weighted_loss(x, 0.5), np.array(3.0),
           reference=lambda x: np.asarray(x / 2)),
    sample("absolute_difference", losses.absolute_difference, (LABELS, PREDICTIONS),
           covers="Abs", reference=by_torch(functional.l1_loss)),
    sample("absolute_difference, weighted mean",
           lambda a, b, w: losses.absolute_difference(a, b, w, "mean"),
           (LABELS, PREDICTIONS, WEIGHTS["per example"]),
           reference=lambda a, b, w: np.average(np.abs(a - b).mean(1), weights=w[:, 0])),
    sample("mean_squared_error", losses.mean_squared_error, (LABELS, PREDICTIONS),
           covers="SquaredDifference", reference=by_torch(functional.mse_loss)),
    sample("mean_squared_error, none", lambda a, b: losses.mean_squared_error(a, b, None, "none"),
           (LABELS, PREDICTIONS), reference=lambda a, b: (a - b) ** 2),
    sample("huber_loss", losses.huber_loss, (LABELS, PREDICTIONS),
           reference=by_torch(lambda a, b: functional.huber_loss(b, a))),
    sample("huber_loss, another delta", lambda a, b: losses.huber_loss(a, b, delta=2.3),
           (LABELS, PREDICTIONS),
           reference=by_torch(lambda a, b: functional.huber_loss(b, a, delta=2.3))),
    sample("huber_loss without an error", losses.huber_loss, (LABELS, LABELS),
           reference=lambda a, b: np.asarray(0.0)),
    sample("hinge_loss", losses.hinge_loss, (np.ones((2, 3)), MARGINS), covers="Relu",
           reference=lambda a, b: np.maximum(0, 1 - b).mean()),
    sample("hinge_loss of the label 0",
           lambda b: losses.hinge_loss(np.zeros((2, 3), int), b), -MARGINS, covers="Relu",
           reference=lambda b: np.maximum(0, 1 + b).mean()),
    sample("log_loss", losses.log_loss, (PROBABILITIES, CHANCES), covers="Log",
           reference=lambda a, b: binary_cross_entropy(a, b, 1e-7)),
    sample("log_loss, another epsilon", lambda a, b: losses.log_loss(a, b, epsilon=0.1),
           (PROBABILITIES, CHANCES),
           reference=lambda a, b: binary_cross_entropy(a, b, 0.1)),
    sample("cosine_distance", lambda a, b: losses.cosine_distance(a, b, axis=1),
           (LABELS, PREDICTIONS), reference=lambda a, b: 1 - np.vecdot(a, b).mean()),
    sample("cosine_distance over axis 0, none",
           lambda a, b: losses.cosine_distance(a, b, reduction="none", axis=0),
           (LABELS, PREDICTIONS), reference=lambda a, b: 1 - np.vecdot(a, b, axis=0)[None]),
    sample("sigmoid_cross_entropy", losses.sigmoid_cross_entropy, (PROBABILITIES, LOGITS),
           covers="LogSigmoid",
           reference=by_torch(
               lambda a, b: functional.binary_cross_entropy_with_logits(b, a))),
    sample("sigmoid_cross_entropy of ±1000", losses.sigmoid_cross_entropy,
           (PROBABILITIES, LARGE),
           reference=by_torch(
               lambda a, b: functional.binary_cross_entropy_with_logits(b, a))),
    sample("sigmoid_cross_entropy, smooth labels",
           lambda a, b: losses.sigmoid_cross_entropy(a, b, label_smoothing=0.3),
           (PROBABILITIES, LOGITS),
           reference=lambda a, b: functional.binary_cross_entropy_with_logits(
               torch.asarray(b), torch.asarray(smoothed(a, 0.3, 2))).numpy()),
    sample("softmax_cross_entropy", losses.softmax_cross_entropy, (PROBABILITIES, LOGITS),
           covers="LogSoftmax",
           reference=by_torch(lambda a, b: functional.cross_entropy(b, a))),
    sample("softmax_cross_entropy of ±1000", losses.softmax_cross_entropy,
           (PROBABILITIES, LARGE),
           reference=by_torch(lambda a, b: functional.cross_entropy(b, a))),
    sample("softmax_cross_entropy, smooth labels, a weight per example",
           lambda a, b, w: losses.softmax_cross_entropy(a, b, w, "sum", label_smoothing=0.3),
           (PROBABILITIES, LOGITS, np.array([0.5, 0.5])),
           reference=lambda a, b, w: softmax_cross_entropy(smoothed(a, 0.3, 3), b)),
    sample("sparse_softmax_cross_entropy",
           lambda b: losses.sparse_softmax_cross_entropy([2, 0], b), LOGITS,
           covers=SPARSE,
           reference=by_torch(lambda b: functional.cross_entropy(b, torch.asarray([2, 0])))),
    sample("sparse_softmax_cross_entropy, weighted mean",
           lambda b, w: losses.sparse_softmax_cross_entropy([2, 0], b, w, "mean"),
           (LOGITS, np.array([0.4, 1.1])),
           reference=lambda b, w: np.average(
               -scipy.special.log_softmax(b, -1)[[0, 1], [2, 0]], weights=w)),
    *[
        sample(f"sparse_softmax_cross_entropy_with_logits{what}",
               nn.sparse_softmax_cross_entropy_with_logits, (labels, logits), covers=SPARSE,
               reference=by_torch(each_by_torch))
        for what, labels, logits in [
            ("", np.array([2, 0]), LOGITS),
            (" of ±1000", np.array([0, 2]), LARGE),
            (" of ±1000, one way", np.array([2, 0]), LARGE),
            (", two axes of examples", np.array([[1, 0], [0, 1], [1, 1]]), spread(3, 2, 2)),
            (", one example", np.array(1), LOGITS[0]),
            (", one class", np.array([0, 0]), LOGITS[:, :1]),
            (", no examples", np.zeros(0, np.int64), np.zeros((0, 3))),
        ]
    ],
    sample("sparse_softmax_cross_entropy_with_logits, labels from the end",
           nn.sparse_softmax_cross_entropy_with_logits, (np.array([-1, -3]), LOGITS),
           covers=SPARSE, reference=lambda a, b: by_torch(each_by_torch)(a % 3, b)),
    sample("sparse_softmax_cross_entropy_with_logits, uint8 labels",
           nn.sparse_softmax_cross_entropy_with_logits, (np.array([2, 0], np.uint8), LOGITS),
           covers=SPARSE, reference=by_torch(each_by_torch)),
]  # fmt: skip
