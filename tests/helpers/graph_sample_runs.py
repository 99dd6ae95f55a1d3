"""A sample as a graph, and what comes of it in a session."""

from __future__ import annotations

from typing import Any

import numpy as np

import regrad as rg
import regrad.v1 as tf
from tests.helpers import sample_runs as runs
from tests.samples import Sample

SHAPES = {  # how much of an input's shape the graph is told
    "static": lambda array: list(array.shape),
    "sizes hidden": lambda array: [None] * array.ndim,
    "rank hidden": lambda array: None,
}

# Samples that need to know what is hidden, and why. Each raises an UnknownShapeError.
COUNTED = "the length of the axis says how many tensors there are"
UNSTACKED = {
    "array: unstack": COUNTED, "array: unstack the last axis": COUNTED,
    "array: unstack, one part used": COUNTED, "array: unstack of complex numbers": COUNTED,
}  # fmt: skip


class SampleGraph:
    """A sample as a graph, and the arrays to feed."""

    def __init__(self, row: Sample, hidden: str) -> None:
        self.arrays = runs.inputs_of(row, "numpy")
        self.xs = [tf.placeholder(a.dtype, SHAPES[hidden](a)) for a in self.arrays]
        self.feed = dict(zip(self.xs, self.arrays, strict=True))
        self.ys = runs.outputs(row.f(*[rg.asarray(x) for x in self.xs]))

    def run(self, tensors: list[Any]) -> list[np.ndarray]:
        with tf.Session() as session:
            return [np.asarray(y) for y in session.run(list(tensors), self.feed)]

    def gradients(self, values: list[Any], order: int) -> list[np.ndarray]:
        """As `sample_runs.gradients`: `values` are what `ys` are when they run."""
        floats = [x for x, a in zip(self.xs, self.arrays, strict=True) if runs.is_float(a)]
        ys, kept = self.ys, values
        for _ in range(order):
            parts, weights = weighted_parts(ys, kept)
            ys = tf.gradients(parts, floats, grad_ys=weights, unconnected_gradients="zero")
            kept = [a for a in self.arrays if runs.is_float(a)]
        return self.run(ys)


def weighted_parts(ys: list[Any], values: list[Any]) -> tuple[list[Any], list[np.ndarray]]:
    """The real parts of the outputs, and the weights that `sample_runs.weighted_sum` gives them."""
    parts, weights = [], []
    for y, value in zip(ys, values, strict=True):
        if value.dtype.kind == "f":
            parts.append(y)
            weights.append(np.cos(np.arange(value.size, dtype=value.dtype)).reshape(value.shape))
        elif value.dtype.kind == "c":
            real = value.real.dtype
            parts += [rg.real(y), rg.imag(y)]
            weights += [np.full(value.shape, 0.7, real), np.full(value.shape, 0.3, real)]
    return parts, weights


def eager_values(row: Sample) -> list[np.ndarray]:
    return runs.numbers(row.f(*[rg.asarray(a) for a in runs.inputs_of(row, "numpy")]))
