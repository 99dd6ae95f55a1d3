"""The one table of samples: every op, with inputs, a second implementation and its traps.

Each family file holds a list `SAMPLES`. `tests/ops/test_ops.py` drives every row through every
library, dtype and order; an op type that no row covers fails the build. `rules` holds rules of
overrides instead, which `tests/core/test_rules_on_hosts.py` puts in force on every host.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.helpers.optional import is_installed

ALL = tuple(name for name in ("numpy", "jax", "torch") if is_installed(name))


@dataclass(frozen=True)
class Sample:
    """One row: a function of regrad ops, and what is due."""

    name: str
    f: Callable[..., Any]
    inputs: tuple[np.ndarray, ...]
    covers: tuple[str, ...]
    reference: Callable[..., Any] | None
    order: int
    backends: tuple[str, ...]
    reason: str
    rtol: float
    family: str = ""

    def __str__(self) -> str:
        return f"{self.family}: {self.name}"


def sample(
    name: str,
    f: Callable[..., Any],
    inputs: Any,
    *,
    covers: str | Sequence[str] = (),
    reference: Callable[..., Any] | None = None,
    order: int = 3,
    backends: Sequence[str] = ALL,
    reason: str = "",
    rtol: float = 1e-6,
) -> Sample:
    """A row of the table.

    Args:
        name: What the row shows, in a few words.
        f: A function of regrad ops that returns a Tensor, or a tuple of Tensors.
        inputs: One array or a tuple of them; floats are differentiated (as float64), integers
            and bools are passed on as Tensors. Everything else f closes over.
        covers: The op types that f must create.
        reference: A second implementation on NumPy arrays, never the formula under test.
        order: The highest order checked against differences; 0 for no gradient. A reason is
            due below 3.
        backends: The libraries on which f works; a reason is due if not all.
        reason: Why order or backends are restricted.
        rtol: The tolerance against differences, relative to the largest gradient.
    """
    arrays = inputs if isinstance(inputs, tuple) else (inputs,)
    arrays = tuple(np.asarray(a) for a in arrays)
    if (order < 3 or tuple(backends) != ALL) and not reason:
        raise ValueError(f"the sample {name!r} is restricted without a reason")
    covers = (covers,) if isinstance(covers, str) else tuple(covers)
    return Sample(name, f, arrays, covers, reference, order, tuple(backends), reason, rtol)


def spread(*shape: int, low: float = -2.0, high: float = 2.0, seed: int = 0) -> np.ndarray:
    """Distinct values in [low, high], evenly spaced and shuffled: no ties, no luck needed."""
    size = int(np.prod(shape))
    step = (high - low) / max(size, 1)
    values = low + step * (np.arange(size) + 0.37)
    return np.random.default_rng(seed).permutation(values).reshape(shape)


def away(*shape: int, low: float = 0.3, high: float = 2.0, seed: int = 0) -> np.ndarray:
    """Distinct values of both signs whose size is in [low, high]: away from the kink at 0."""
    values = spread(*shape, low=low, high=high, seed=seed)
    signs = np.where(np.arange(values.size) % 2, -1.0, 1.0).reshape(shape)
    return values * signs


def all_samples() -> list[Sample]:
    """Every row of every family."""
    rows = []
    for module in pkgutil.iter_modules(__path__):
        if module.name == "rules":
            continue
        family = importlib.import_module(f"{__name__}.{module.name}")
        rows += [Sample(**{**vars(row), "family": module.name}) for row in family.SAMPLES]
    return rows
