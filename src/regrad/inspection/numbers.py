"""Summary statistics of an array: a trace keeps these instead of the gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from regrad.core.reports import shape_text


@dataclass(frozen=True, slots=True)
class Numbers:
    """Summary statistics of one array.

    `norm` is the Euclidean norm and `largest` the largest magnitude over all elements: NaN if one
    element is NaN. `zeros`, `nans` and `infs` count elements.
    """

    shape: tuple[int, ...]
    dtype: str
    norm: float
    largest: float
    zeros: int
    nans: int = 0
    infs: int = 0

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def finite(self) -> bool:
        """True if no element is NaN or infinite."""
        return not (self.nans or self.infs)

    @property
    def zero_share(self) -> float:
        """The share of elements that are exactly 0, from 0 to 1."""
        return self.zeros / self.size if self.size else 0.0

    @property
    def is_zero(self) -> bool:
        """True if there are elements, and all of them are 0."""
        return self.zeros == self.size > 0

    @property
    def shape_text(self) -> str:
        """Return the shape as text for a table: `64×10`."""
        return shape_text(self.shape)

    @property
    def bad(self) -> list[str]:
        """Return the counts of non-finite elements, as text: `2 NaN`."""
        return [f"{n} {what}" for n, what in ((self.nans, "NaN"), (self.infs, "inf")) if n]

    def __str__(self) -> str:
        zeros = f", {self.zero_share:.0%} zeros" if self.zeros else ""
        return f"norm {self.norm:.3g}{zeros}" + "".join(f", {text}" for text in self.bad)


def wide(array: Any) -> np.ndarray:
    """Return an array in double precision."""
    a = np.asarray(array)
    return a.astype(np.complex128 if a.dtype.kind == "c" else np.float64)


def numbers_of(array: Any) -> Numbers:
    """Return the statistics of an array that NumPy can read."""
    a = np.asarray(array)
    # (NumPy has no kind for bfloat16 and similar dtypes.)
    values = a if a.dtype.kind in "fc" and a.dtype.itemsize > 2 else a.astype(np.float32)
    flat = values.ravel("K")  # (in any order, so that a transposed array is not copied)
    with np.errstate(all="ignore"):
        if flat.dtype.kind == "c":
            largest = float(np.abs(flat).max(initial=0))
        else:  # (`abs` would make another array)
            largest = float(max(flat.max(initial=0), -flat.min(initial=0)))
        norm = _norm(flat, largest)
    nans = infs = 0
    if not math.isfinite(largest):
        nans, infs = int(np.isnan(flat).sum()), int(np.isinf(flat).sum())
    zeros = int(np.count_nonzero(flat == 0))
    return Numbers(a.shape, str(a.dtype), norm, largest, zeros, nans, infs)


def _norm(flat: np.ndarray, largest: float) -> float:
    """Return the Euclidean norm, scaled only if the squares would overflow or underflow."""
    squares = float(np.vdot(flat, flat).real)
    if 1e-30 < squares < 1e30 or not largest:
        return math.sqrt(squares)
    if not math.isfinite(largest):
        return largest
    scaled = flat / flat.dtype.type(largest)
    return largest * math.sqrt(float(np.vdot(scaled, scaled).real))


def together(parts: Iterable[Numbers | None]) -> Numbers | None:
    """Return the statistics of several arrays as if they were one; None if there are none."""
    given = [part for part in parts if part is not None]
    if len(given) <= 1:
        return given[0] if given else None
    counts = zip(*[(part.size, part.zeros, part.nans, part.infs) for part in given], strict=True)
    size, *others = map(sum, counts)
    norm = math.hypot(*[part.norm for part in given])
    largest = float(np.max([part.largest for part in given]))  # (NaN if one is NaN)
    return Numbers((size,), given[0].dtype, norm, largest, *others)
