"""Samples of scans and sorting. References: NumPy, and loops."""

from __future__ import annotations

from typing import Any

import numpy as np

import regrad as rg
from tests.samples import sample, spread

X = spread(2, 4)
CUBE = spread(2, 3, 2)
ZEROS = np.array([[1.5, 0.0, -0.5, 2.0], [0.0, 0.7, 0.0, 1.2]])
TIES = np.array([[1.0, 3.0, 3.0, 2.0, 4.0, 4.0], [2.0, 2.0, 1.0, 2.0, 5.0, 0.0]])
NONE = "no gradient: the result is of integers"


def given(f: Any, **options: Any) -> Any:
    return lambda *xs: f(*xs, **options)


def raw(type: str) -> Any:
    """The function of an op that is no public function."""
    return rg.find_op(type).function


def scanned(start: float, combine: Any) -> Any:
    """A scan written as a loop over the places."""

    def scan(
        x: np.ndarray,
        axis: int = 0,
        exclusive: bool = False,
        reverse: bool = False,
        include_initial: bool = False,
    ) -> np.ndarray:
        places = list(np.moveaxis(x, axis, 0))
        state, found = np.full_like(places[0], start), []
        for place in places[::-1] if reverse else places:
            new = combine(state, place)
            found.append(state if exclusive or include_initial else new)
            state = new
        found += [state] if include_initial else []
        return np.moveaxis(np.array(found[::-1] if reverse else found), 0, axis)

    return scan


SUMS, PRODUCTS = scanned(0.0, np.add), scanned(1.0, np.multiply)


def recurrence(x: np.ndarray, decay: np.ndarray, axis: int, reverse: bool) -> np.ndarray:
    """`linear_recurrence` as a loop."""
    x, decay = np.broadcast_arrays(x, decay)
    x, decay = np.moveaxis(x, axis, 0), np.moveaxis(decay, axis, 0)
    y = np.array(x)
    for k in range(len(x) - 1):
        if reverse:
            y[-2 - k] = x[-2 - k] + decay[-1 - k] * y[-1 - k]
        else:
            y[k + 1] = x[k + 1] + decay[k + 1] * y[k]
    return np.moveaxis(y, 0, axis)


MODES = [
    ("plain", {}),
    ("exclusive", {"exclusive": True}),
    ("reverse", {"reverse": True}),
    ("exclusive and reverse", {"exclusive": True, "reverse": True}),
    ("from the initial value", {"include_initial": True}),
    ("from the initial value, reverse", {"include_initial": True, "reverse": True}),
]

SAMPLES = [
    # sums and products so far
    *[
        sample(f"{f.__name__}, {mode}, axis {axis}", given(f, axis=axis, **options), x, covers=type,
               reference=given(loop, axis=axis, **options))
        for type, f, loop in [
            ("Cumsum", rg.cumulative_sum, SUMS),
            ("Cumprod", rg.cumulative_prod, PRODUCTS),
        ]
        for mode, options in MODES
        for x, axis in [(X, 0), (CUBE, -2)]
    ],
    *[
        sample(f"Cumprod with zeros, {mode}", given(rg.cumulative_prod, axis=-1, **options),
               ZEROS, covers="Cumprod", reference=given(PRODUCTS, axis=-1, **options))
        for mode, options in MODES
    ],
    *[
        sample(f"{f.__name__} of a vector without an axis", f, spread(3), covers=type,
               reference=reference)
        for type, f, reference in [
            ("Cumsum", rg.cumulative_sum, np.cumsum),
            ("Cumprod", rg.cumulative_prod, np.cumprod),
            ("CumulativeMax", rg.cumulative_max, np.maximum.accumulate),
        ]
    ],
    *[
        sample(f"{f.__name__} of no elements", given(f, axis=0), np.zeros((0, 2)), covers=type,
               reference=np.array)
        for type, f in [
            ("Cumsum", rg.cumulative_sum),
            ("Cumprod", rg.cumulative_prod),
            ("CumulativeMax", rg.cumulative_max),
        ]
    ],
    sample("Cumprod of no elements, exclusive",
           given(rg.cumulative_prod, axis=1, exclusive=True), np.zeros((2, 0)),
           covers="Cumprod", reference=np.array),
    sample("Cumprod of complex numbers", given(rg.cumulative_prod, axis=1),
           X[:, :3] + 1j * X[:, 1:], covers="Cumprod", reference=given(PRODUCTS, axis=1)),
    *[
        sample(f"Shift, forward={forward}", given(raw("Shift"), axis=-1, forward=forward), X,
               covers="Shift",
               reference=lambda x, forward=forward: (
                   np.pad(x, [(0, 0), (1, 0)])[:, :-1] if forward
                   else np.pad(x, [(0, 0), (0, 1)])[:, 1:]))
        for forward in (True, False)
    ],
    *[
        sample(f"LinearRecurrence, {what}, reverse={reverse}",
               given(rg.linear_recurrence, axis=axis, reverse=reverse), (x, decay),
               covers="LinearRecurrence",
               reference=given(recurrence, axis=axis, reverse=reverse))
        for reverse in (False, True)
        for what, x, decay, axis in [
            ("a vector", spread(5), spread(5, seed=1), 0),
            ("a middle axis", CUBE, spread(2, 3, 2, seed=1), -2),
            ("zeros among the links", X, ZEROS, 1),
            ("one decay for all", X, np.array(0.7), 1),
            ("a decay for each place", X, spread(4, seed=1), 1),
            ("one place", spread(2, 1), spread(2, 1, seed=1), 1),
        ]
    ],
    # largest so far
    *[
        sample(f"{f.__name__}, {what}", given(f, axis=axis), x, covers=type,
               reference=given(reference.accumulate, axis=axis))
        for type, f, reference in [
            ("CumulativeMax", rg.cumulative_max, np.maximum),
            ("CumulativeMin", rg.cumulative_min, np.minimum),
        ]
        for what, x, axis in [("the last axis", X, -1), ("a middle axis", CUBE, 1)]
    ],
    sample("RunStarts", given(raw("RunStarts"), axis=1), TIES, covers="RunStarts", order=0,
           reason=NONE, reference=lambda x: np.array([[0, 1, 1, 3, 4, 4], [0, 0, 2, 3, 4, 5]])),
    # sorting
    *[
        sample(f"Sort, {what}, descending={descending}",
               given(rg.sort, axis=axis, descending=descending), x, covers="Sort",
               reference=lambda x, axis=axis, descending=descending: (
                   -np.sort(-x, axis) if descending else np.sort(x, axis)))
        for descending in (False, True)
        for what, x, axis in [("the last axis", X, -1), ("a middle axis", CUBE, 1),
                              ("no elements", np.zeros((2, 0)), 1)]
    ],
    *[
        sample(f"ArgSort, {what}, descending={descending}",
               given(rg.argsort, axis=axis, descending=descending), x, covers="ArgSort",
               order=0, reason=NONE,
               reference=lambda x, axis=axis, descending=descending: (
                   np.argsort(-x if descending else x, axis, stable=True)))
        for descending in (False, True)
        for what, x, axis in [("ties", TIES, -1), ("integers", TIES.astype(int), 0)]
    ],
    *[
        sample(f"TopKV2, {what}", given(rg.top_k, k=k, axis=axis), x, covers="TopKV2",
               reference=lambda x, k=k, axis=axis: (
                   -np.sort(-x, axis).take(range(k), axis),
                   np.argsort(-x, axis).take(range(k), axis)))
        for what, x, k, axis in [("the last axis", X, 2, -1), ("a middle axis", CUBE, 2, 1),
                                 ("none", X, 0, -1), ("all", X, 4, -1)]
    ],
    sample("TopKV2 with ties", given(rg.top_k, k=3), TIES, covers="TopKV2", order=0,
           reason="kinks", reference=lambda x: (np.array([[4.0, 4, 3], [5, 2, 2]]),
                                                np.array([[4, 5, 1], [4, 0, 1]]))),
    *[
        sample(f"SearchSorted, {side}", lambda a, b, side=side: rg.searchsorted(
                   a, b, side=side),
               (np.array([1.0, 2.0, 2.0, 4.0]), np.array([[2.0, 0.5], [5.0, 3.0]])),
               covers="SearchSorted", order=0, reason=NONE,
               reference=lambda a, b, side=side: np.searchsorted(a, b, side))
        for side in ("left", "right")
    ],
    sample("SearchSorted with a sorter",
           lambda a, b, order: rg.searchsorted(a, b, sorter=order),
           (np.array([4.0, 1.0, 2.0]), np.array([1.5, 9.0]), np.array([1, 2, 0])),
           covers="SearchSorted", order=0, reason=NONE, reference=lambda *_: np.array([1, 3])),
    # quantiles
    *[
        sample(f"quantile, {what}", given(rg.quantile, **options), x, covers="Sort",
               reference=given(np.quantile, **options))
        for what, x, options in [
            ("one", X, {"q": 0.3}),
            ("at an element", X, {"q": 0.0, "axis": -1}),
            ("several", CUBE, {"q": [0.1, 0.55, 1.0], "axis": 1}),
            ("a matrix of them", CUBE, {"q": [[0.1, 0.9], [0.5, 0.3]], "axis": (0, -1)}),
            ("axes kept", CUBE, {"q": [0.1, 0.8], "axis": (2, 0), "keepdims": True}),
            *[(method, X, {"q": [0.2, 0.6], "axis": 0, "method": method})
              for method in ("lower", "higher", "midpoint", "nearest")],
            ("rank 0", np.array(1.3), {"q": 0.4}),
        ]
    ],
    sample("quantile by the share as well", lambda x, q: rg.quantile(x, q, axis=1),
           (X, np.array([0.23, 0.71])), reference=lambda x, q: np.quantile(x, q, axis=1)),
    *[
        sample(f"median, {what}", given(rg.median, **options), x, covers="Sort",
               reference=given(np.median, **options))
        for what, x, options in [
            ("of all", X, {}),
            ("an odd number", CUBE, {"axis": 1}),
            ("axes kept", CUBE, {"axis": (0, 2), "keepdims": True}),
        ]
    ],
    # differences
    *[
        sample(f"diff, {what}", given(rg.diff, **options), x,
               reference=given(np.diff, **options))
        for what, x, options in [
            ("plain", X, {}),
            ("twice along a middle axis", CUBE, {"axis": -2, "n": 2}),
            ("none", X, {"n": 0}),
        ]
    ],
    sample("diff with ends", lambda x, a, b: rg.diff(x, prepend=a, append=b),
           (X, spread(2, 1, seed=1), spread(2, 2, seed=2)),
           reference=lambda x, a, b: np.diff(x, prepend=a, append=b)),
]  # fmt: skip
