"""Classification of wrong gradients: tests for common mistakes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from regrad.checking import differences
from regrad.checking.check import Arrays, Function
from regrad.checking.findings import Finding

LARGEST = 256  # maximum number of elements in an input whose whole gradient is measured
SLICES = 16  # maximum number of slices along an axis that are checked for a missing sum
CLOSE = 1e-4


def telling(function: Function, xs: Arrays, names: Sequence[str], finding: Finding) -> Finding:
    """Return a finding, with a more specific kind if one fits."""
    if finding.kind in ("not finite", "missing") or finding.input not in names:
        return finding
    if finding.order > 1 or finding.mode != "reverse":
        return finding
    i = list(names).index(finding.input)
    if xs[i].size > LARGEST or np.iscomplexobj(xs[i]):
        return finding
    with np.errstate(all="ignore"):
        return replace(finding, kind=next(_kinds(function, xs, i, names), finding.kind))


def _kinds(function: Function, xs: Arrays, i: int, names: Sequence[str]) -> Iterator[str]:
    """Yield the kinds of error that fit a wrong gradient by the i-th input."""
    ys = [np.asarray(y) for y in function.f(xs)]
    rng = np.random.default_rng(0)
    dys = [rng.uniform(0.5, 1.5, y.shape) * rng.choice([-1.0, 1.0], y.shape) for y in ys]
    found = function.vjp(xs)(dys)
    given = found[i]
    if given is None:
        yield "missing"
        return
    given, expected = np.asarray(given), measured(function, xs, i, dys)
    if not given.any():
        yield "zero"
    yield from _scaled(given, expected, ys)
    if expected.ndim >= 2 and _same(given.ravel(), expected.T.ravel()):
        yield "transposed"
    for j, name in enumerate(names):
        if j != i and xs[j].shape == xs[i].shape and _same(given, measured(function, xs, j, dys)):
            yield f"the gradient by {name!r}"
    if any(_lacks_sum(function, xs, i, dys, axis) for axis in range(dys[0].ndim)):
        yield "a missing sum"


def _scaled(given: np.ndarray, expected: np.ndarray, ys: Sequence[np.ndarray]) -> Iterator[str]:
    """Yield a factor, and its possible cause."""
    used = np.abs(expected) > CLOSE * np.abs(expected).max(initial=0.0)
    if not used.any():
        return
    ratio = float(np.median(given[used] / expected[used]))
    if not ratio or not _same(given, ratio * expected):
        return
    if abs(ratio + 1) < CLOSE:
        yield "wrong sign"
        return
    sizes = {n for y in ys for n in (*y.shape, y.size) if n > 1}
    sizes |= {n for n in expected.shape if n > 1}
    why = ""
    if any(abs(ratio * n - 1) < CLOSE for n in sizes if n > 2):
        why = ", a mean instead of a sum?"
    elif any(abs(ratio / n - 1) < CLOSE for n in sizes if n > 2):
        why = ", a sum instead of a mean?"
    if np.count_nonzero(used) > 1:  # (one number is a multiple of any other number)
        yield f"scaled by {ratio:.4g}{why}"


def measured(function: Function, xs: Arrays, i: int, dys: Arrays) -> np.ndarray:
    """Return the gradient by an input, by differences."""

    def weighed(moved: Arrays) -> list[np.ndarray]:
        ys = function.f([*xs[:i], *moved, *xs[i + 1 :]])
        return [np.asarray(np.vdot(dy, y)) for dy, y in zip(dys, ys, strict=True)]

    return differences.gradients(weighed, [np.asarray(xs[i], dtype=np.float64)])[0]


def _lacks_sum(function: Function, xs: Arrays, i: int, dys: Arrays, axis: int) -> bool:
    """Return whether only one slice of the incoming gradient counts although all should."""
    size = dys[0].shape[axis]
    if not 2 <= size <= SLICES:
        return False
    counts = []
    for k in range(size):
        alone = np.zeros_like(dys[0])
        where = (slice(None),) * axis + (k,)
        alone[where] = dys[0][where]
        slices = [alone, *[np.zeros_like(dy) for dy in dys[1:]]]
        found = function.vjp(xs)(slices)[i]
        if not measured(function, xs, i, slices).any():
            return False  # the sum has no effect
        counts.append(found is not None and bool(np.any(found)))
    return sum(counts) == 1


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    scale = max(np.abs(b).max(initial=0.0), 1e-300)
    return a.shape == b.shape and bool((np.abs(a - b) <= CLOSE * scale).all())
