"""Samples of the special functions. References: SciPy's, NumPy's, and a series."""

from __future__ import annotations

import math

import numpy as np
import scipy.special

import regrad as rg
from regrad.ops import special
from tests.samples import away, sample, spread

FACTOR, POSITIVE = away(2, 3), spread(2, 3, low=0.4, high=3.0, seed=1)
COMPLEX = spread(2, 2, seed=1) + 1j * spread(2, 2, seed=2)
EVERYWHERE = np.array([0.0, 1e-9, 1e-4, 0.3, -0.95, 1.0, 1.3, -1.6, 2.4, -7.3])
KINK = "by convention the gradients are 0 where the first factor is"


def sinc_derivative(x: np.ndarray, n: int) -> np.ndarray:
    """Differentiate `sum((-1)**k (πx)**(2k) / (2k + 1)!)` term by term."""
    total = np.zeros_like(x)
    for k in range(60):
        falling = math.prod(range(2 * k - n + 1, 2 * k + 1))
        if falling:
            factor = falling / math.factorial(2 * k + 1) * math.pi ** (2 * k)
            total = total + (-1) ** k * factor * x ** (2 * k - n)
    return total


SAMPLES = [
    *[
        sample(f"{type}, {what}", f, (a, b), covers=type, reference=reference)
        for type, f, reference in [
            ("Xlogy", rg.xlogy, lambda a, b: a * np.log(b)),
            ("Xdivy", rg.xdivy, lambda a, b: a / b),
        ]
        for what, a, b in [
            ("positive", FACTOR, POSITIVE),
            ("a column with a row", FACTOR[:, :1], POSITIVE[0]),
            ("a scalar with a matrix", FACTOR[0, 0], POSITIVE),
            ("complex", COMPLEX, COMPLEX[::-1] + 3),
        ]
    ],
    sample("Xlogy: zeros", rg.xlogy, (FACTOR * [0, 1, 1], POSITIVE * [0, 1, 1]), covers="Xlogy",
           reference=scipy.special.xlogy, order=0, reason=KINK),
    sample("Xdivy: zeros", rg.xdivy, (FACTOR * [0, 1, 1], POSITIVE * [0, 1, 1]), covers="Xdivy",
           reference=lambda a, b: np.divide(a, b, out=np.zeros_like(a), where=a != 0), order=0,
           reason=KINK),
    sample("Sinc", rg.sinc, EVERYWHERE, covers="Sinc", reference=np.sinc),
    sample("Sinc of complex numbers", rg.sinc, COMPLEX, covers="Sinc", reference=np.sinc),
    *[
        sample(f"SincDerivative, order {n}", lambda x, n=n: special._sinc_derivative(x, n=n),
               EVERYWHERE[:-1], covers="SincDerivative",
               reference=lambda x, n=n: sinc_derivative(x, n))
        for n in (1, 2, 3, 4)
    ],
    sample("NanToNum", rg.nan_to_num, FACTOR, covers="NanToNum", reference=np.nan_to_num),
    sample("NanToNum: nothing finite", lambda x: rg.nan_to_num(x, nan=1, posinf=2, neginf=3),
           np.array([np.nan, np.inf, -np.inf, 0.5]), covers="NanToNum", order=0,
           reason="differences cannot see across infinity",
           reference=lambda x: np.nan_to_num(x, nan=1, posinf=2, neginf=3)),
    sample("NanToNum of complex numbers", rg.nan_to_num, COMPLEX, covers="NanToNum",
           reference=np.nan_to_num),
    *[
        sample(f"multigammaln, dimension {d}", lambda x, d=d: rg.multigammaln(x, d),
               spread(2, 3, low=1.7, high=4.0), covers="Lgamma",
               reference=lambda x, d=d: scipy.special.multigammaln(x, d))
        for d in (1, 2, 4)
    ],
]  # fmt: skip
