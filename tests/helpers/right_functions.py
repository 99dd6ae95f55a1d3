"""Functions whose gradients are right where differences have a hard time: no check may complain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import regrad as rg
from regrad import linalg

HILBERT = 1 / (1 + np.arange(6.0)[:, None] + np.arange(6.0))
NEARLY_SINGULAR = np.ones((3, 3)) + 1e-6 * np.arange(9.0).reshape(3, 3) ** 2
NORMAL = np.random.default_rng(1).normal(size=(7, 20))
ROUNDED = np.random.default_rng(2).normal(size=(50, 4)).round(1)  # with ties
GAPS = [1.0, 1.0005, 0.9995, 2.0]


def guarded_log(x):
    return rg.where(x > 0, rg.log(rg.where(x > 0, x, 1.0)), 0.0)


def far_terms(a, b):
    return 1e8 * rg.sin(a) + 1e-6 * rg.cos(b)


FUNCTIONS: dict[str, tuple[Callable[..., Any], Sequence[Any]]] = {
    "x * x at 1e8": (lambda x: x * x, [[1e8, 3e8]]), "log at 1e-3": (rg.log, [[1e-3, 1e-5, 2.0]]),
    "1 / x near 0": (lambda x: 1 / x, [[1e-4, -1e-6]]), "sqrt near 0": (rg.sqrt, [[1e-8, 1e-4]]),
    "relu at 5e-4": (rg.nn.relu, [[5e-4, -5e-4, 1.0]]), "abs at 1e-4": (rg.abs, [[1e-4, -1e-6]]),
    "sort with gaps of 5e-4": (lambda x: rg.sort(x) * np.arange(4.0), [GAPS]),
    "max with gaps of 5e-4": (lambda x: rg.max(x * x), [GAPS]),
    "sin(1000 x)": (lambda x: rg.sin(1000 * x), [[0.5, 1.7]]),
    "inv of the Hilbert matrix": (linalg.inv, [HILBERT]),
    "an offset of 1e9": (lambda x: rg.sin(x) + 1e9, [[0.5, 1.7]]),
    "maximum near ties": (rg.maximum, [[1.0, 2.0], [1 + 1e-9, 2 - 1e-7]]),
    "maximum at ties": (rg.maximum, [[1.0, 2.0], [1.0, 3.0]]),
    "max at ties": (rg.max, [[1.0, 1.0, 0.5]]), "relu at 0": (rg.nn.relu, [[0.0, 1.0]]),
    "abs at 0": (rg.abs, [[0.0, 1.0]]), "sqrt at 0": (rg.sqrt, [[0.0, 1.0]]),
    "clip at its bounds": (lambda x: rg.clip(x, 0.0, 1.0), [[0.0, 1.0, 0.5, 1e-9]]),
    "a norm at 0": (lambda x: linalg.vector_norm(x), [[0.0, 0.0]]),
    "saturated sigmoid": (rg.nn.sigmoid, [[40.0, -40.0, 700.0]]),
    "saturated tanh": (rg.tanh, [[20.0, -20.0]]), "exp of -300": (rg.exp, [[-50.0, -300.0]]),
    "exp of 700": (rg.exp, [[700.0, 1.0]]),
    "a tiny term beside a huge one": (far_terms, [[0.5, 0.7], [0.3, 0.9]]),
    "the sum of a softmax": (lambda x: rg.sum(rg.nn.softmax(x)), [[0.4, -1.3, 0.9]]),
    "a cancelled offset": (lambda x: (x + 1e9) - 1e9, [[0.5, 1.5]]),
    "log1p near 0": (rg.log1p, [[1e-12, 1e-300]]),
    "x^7 over six decades": (lambda x: x**7, [[1e-3, 1e3, 0.0]]),
    "x * x at 1e-200": (lambda x: x * x, [[1e-150, 1e-200]]),
    "x * x at 1e150": (lambda x: x * x, [[1e150, 1.0]]),
    "atan2 of sizes apart": (rg.atan2, [[1e-6, 2.0], [1e6, -1e-6]]),
    "det, nearly singular": (linalg.det, [NEARLY_SINGULAR]),
    "solve with the Hilbert matrix": (linalg.solve, [HILBERT, np.arange(6.0)]),
    "complex, near 0": (lambda z: rg.abs(z) * rg.real(z * z), [np.array([1 + 2j, 1e-3 - 1e-3j])]),
    "logsumexp at 1e5": (rg.logsumexp, [[1e5, 1e5 + 1, 3.0]]),
    "the variance of large numbers": (rg.var, [[1e6, 1e6 + 1, 1e6 + 3]]),
    "where, guarded": (guarded_log, [[-1.0, 2.0, 1e-5]]),
    "floor near its steps": (lambda x: rg.floor(x) + x, [[0.4, 1.0001, 2.9999]]),
    "cumulative products with 0": (rg.cumulative_prod, [[1e-5, 3.0, 0.0, 1e5]]),
    "tan near its pole": (rg.tan, [[1.5707, -1.57]]),
    "asin near 1": (rg.asin, [[1 - 1e-6, -0.99999]]),
    "softplus, far out": (rg.nn.softplus, [[1e-8, 50.0, -50.0]]),
    "a layer": (lambda x: rg.nn.relu(rg.matmul(x, rg.asarray(NORMAL.T))), [NORMAL]),
    "the largest of many, with ties": (lambda x: rg.max(x, axis=0), [ROUNDED]),
    "a constant": (lambda x: x * 0.0 + 1.0, [[1.0, 2.0]]),
}  # fmt: skip
