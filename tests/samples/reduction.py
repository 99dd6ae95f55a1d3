"""Samples of the reductions. References: NumPy and SciPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.special

import regrad as rg
from regrad.ops import reduction
from tests.samples import away, sample, spread

X = spread(2, 3)
CUBE = spread(2, 3, 2)
ZEROS = np.array([[0.0, 1.5, -0.5], [2.0, 0.0, 0.7]])
ONE_ZERO = np.array([1.5, 0.0, -0.5, 2.0])
FLAGS = np.array([[True, False, True], [False, False, True]])
COMPLEX = spread(2, 3, seed=1) + 1j * spread(2, 3, seed=2)
NONE = "no gradient: the result is of bools or integers"
FLAT = "its gradient is zero"

AXES = [
    # what, x, keyword arguments
    ("all axes", X, {}), ("all axes, kept", X, {"keepdims": True}), ("an axis", X, {"axis": 0}),
    ("a negative axis", X, {"axis": -1}),
    ("a negative axis, kept", X, {"axis": -2, "keepdims": True}),
    ("two axes", CUBE, {"axis": (0, 2)}),
    ("two negative axes, out of order", CUBE, {"axis": (-1, -3)}),
    ("two axes, kept", CUBE, {"axis": (2, 1), "keepdims": True}), ("no axis", X, {"axis": ()}),
    ("rank 0", np.array(1.3), {}),
]  # fmt: skip

REDUCTIONS = [
    ("Sum", rg.sum, np.sum),
    ("Mean", rg.mean, np.mean),
    ("Prod", rg.prod, np.prod),
    ("Max", rg.max, np.max),
    ("Min", rg.min, np.min),
    (("Mean", "Square"), rg.var, np.var),
    ("Exp", rg.logsumexp, lambda x, axis=None, keepdims=False: scipy.special.logsumexp(
        x, axis=axis, keepdims=keepdims)),
]  # fmt: skip


def given(f: Any, **options: Any) -> Any:
    return lambda x: f(x, **options)


def norm(**options: Any) -> Any:
    return given(reduction.vector_norm, **options)


def numpy_norm(**options: Any) -> Any:
    return given(np.linalg.vector_norm, **options)


def of_size(*shape: int) -> np.ndarray:
    """Distinct absolute values, of both signs, away from 0."""
    return away(*shape, low=0.4, high=2.0)


SAMPLES = [
    *[
        sample(f"{f.__name__}, {what}", given(f, **options), x, covers=type,
               reference=given(reference, **options))
        for type, f, reference in REDUCTIONS
        for what, x, options in AXES
    ],
    *[
        sample(f"{f.__name__} of no elements", given(f, axis=0), np.zeros((0, 2)), covers=type,
               reference=given(reference, axis=0))
        for type, f, reference in REDUCTIONS[:1] + REDUCTIONS[2:3]
    ],
    *[
        sample(f"{f.__name__} of an empty tensor along a full axis", given(f, axis=1),
               np.zeros((0, 2)), covers=type, reference=given(reference, axis=1))
        for type, f, reference in REDUCTIONS
    ],
    *[
        sample(f"{f.__name__} of complex numbers", given(f, axis=1), COMPLEX, covers=type,
               reference=given(reference, axis=1))
        for type, f, reference in REDUCTIONS[:3]
    ],
    sample("Var of complex numbers", given(rg.var, axis=1), COMPLEX, covers="Real",
           reference=given(np.var, axis=1)),
    # the adjoints
    sample("Unreduce", lambda x: reduction.unreduce(x, (2, 3, 2), (0, -1), False), spread(3),
           covers="Unreduce",
           reference=lambda x: np.broadcast_to(x[None, :, None], (2, 3, 2))),
    sample("UnreduceMean", lambda x: reduction.unreduce_mean(x, (2, 3), 1, True), spread(2, 1),
           covers="UnreduceMean", reference=lambda x: np.broadcast_to(x / 3, (2, 3))),
    # zeros among the factors
    sample("Prod with one zero", rg.prod, ONE_ZERO, covers="Prod", reference=np.prod),
    sample("Prod with two zeros", rg.prod, ONE_ZERO * [1, 1, 0, 1], covers="Prod",
           reference=np.prod),
    sample("Prod with a zero in each row", given(rg.prod, axis=-1), ZEROS, covers="Prod",
           reference=given(np.prod, axis=-1)),
    sample("Prod with zeros, two axes", given(rg.prod, axis=(-2, 0)),
           spread(2, 2, 2) * ZEROS[0, :2], covers="Prod",
           reference=given(np.prod, axis=(-2, 0))),
    # compositions
    *[
        sample(f"std, {what}", given(rg.std, **options), x, covers="Sqrt",
               reference=given(np.std, **options))
        for what, x, options in AXES[1:6]
    ],
    sample("var with a correction", given(rg.var, axis=1, correction=1), X, covers="Sum",
           reference=given(np.var, axis=1, ddof=1)),
    sample("std with a correction", given(rg.std, axis=(0, 2), correction=0.5), CUBE,
           covers="Sqrt", reference=given(np.std, axis=(0, 2), ddof=0.5)),
    sample("moments", given(reduction.moments, axis=-1), X, covers=("Mean", "Square"),
           reference=lambda x: (x.mean(-1), x.var(-1))),
    sample("moments, kept", given(reduction.moments, axis=(0, 2), keepdims=True), CUBE,
           covers="Mean",
           reference=lambda x: (x.mean((0, 2), keepdims=True), x.var((0, 2), keepdims=True))),
    sample("logsumexp with ties", given(rg.logsumexp, axis=1), np.array([[1.0, 1, 0], [2, 2, 2]]),
           covers=("Exp", "Log"), reference=given(scipy.special.logsumexp, axis=1)),
    sample("logsumexp of large numbers", rg.logsumexp, 1000.0 + X,
           reference=scipy.special.logsumexp),
    sample("logsumexp with -inf",
           lambda x: rg.logsumexp(rg.where([True, False, True], x, -np.inf), axis=-1), X,
           reference=lambda x: scipy.special.logsumexp(x[:, ::2], axis=-1)),
    *[
        sample(f"vector_norm, ord {ord}", norm(axis=-1, ord=ord), of_size(2, 3),
               reference=numpy_norm(axis=-1, ord=ord))
        for ord in (2, 1, np.inf, -np.inf, 3, 2.5, 0.5, -1, -2)
    ],
    sample("vector_norm, ord 0", norm(axis=0, ord=0), ZEROS, covers="Sign", order=1, reason=FLAT,
           reference=numpy_norm(axis=0, ord=0)),
    sample("vector_norm of all elements", norm(), CUBE, reference=numpy_norm()),
    sample("vector_norm, two axes, kept", norm(axis=(0, -1), keepdims=True, ord=3),
           of_size(2, 3, 2), reference=numpy_norm(axis=(0, -1), keepdims=True, ord=3)),
    sample("vector_norm with a zero element", norm(axis=1), ZEROS, reference=numpy_norm(axis=1)),
    sample("vector_norm of complex numbers", norm(axis=1), COMPLEX, reference=numpy_norm(axis=1)),
    sample("vector_norm of complex numbers, ord 3", norm(axis=1, ord=3), COMPLEX,
           reference=numpy_norm(axis=1, ord=3)),
    # without gradients
    *[
        sample(f"{f.__name__}, {what}", given(f, **options), x, covers=type, order=0, reason=NONE,
               reference=given(reference, **options))
        for type, f, reference in [
            ("Any", rg.any, np.any),
            ("All", rg.all, np.all),
            ("CountNonzero", rg.count_nonzero, np.count_nonzero),
        ]
        for what, x, options in [
            ("bools", FLAGS, {"axis": -1}),
            ("bools, kept", FLAGS, {"keepdims": True}),
            ("numbers", ZEROS, {"axis": (0, 1)}),
            ("no elements", np.zeros((0, 2)), {"axis": 0}),
            ("rank 0", np.array(0.0), {}),
        ]
    ],
    *[
        sample(f"{f.__name__}, {what}", given(f, **options), x, covers=type, order=0, reason=NONE,
               reference=given(reference, **options))
        for type, f, reference in [
            ("ArgMax", rg.argmax, np.argmax),
            ("ArgMin", rg.argmin, np.argmin),
        ]
        for what, x, options in [
            ("flat", CUBE, {}),
            ("flat, kept", CUBE, {"keepdims": True}),
            ("a negative axis", CUBE, {"axis": -2}),
            ("an axis, kept", CUBE, {"axis": 1, "keepdims": True}),
            ("ties", np.array([1.0, 3, 3, 1, 0, 0]), {"axis": 0}),
            ("bools", FLAGS, {"axis": 1}),
            ("integers", np.array([3, 1, 5]), {}),
        ]
    ],
]  # fmt: skip
