"""Figures of gradients, taken as they pass: few passes over each, and no waiting for a GPU."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch

from regrad.inspection.numbers import Numbers
from regrad.torch.host import DisableTorchFunction, version_of

_HALF = (torch.float16, torch.bfloat16)
RECENT = 256  # gradients whose figures are remembered: one leaves an op and arrives at the next


class Figures:
    """Figures of one gradient, as tensors of one number each until somebody asks."""

    __slots__ = ("dtype", "parts", "shape")

    def __init__(self, g: torch.Tensor) -> None:
        self.shape: tuple[int, ...] = tuple(g.shape)
        self.dtype: str = str(g.dtype).removeprefix("torch.")
        self.parts: tuple[Any, ...] = _measure(g)

    def __call__(self) -> Numbers:
        """The figures as numbers."""
        norm, largest, nonzero, nans, infs = [
            part.item() if isinstance(part, torch.Tensor) else part for part in self.parts
        ]
        size = math.prod(self.shape)
        return Numbers(
            self.shape, self.dtype, norm, largest, size - int(nonzero), int(nans), int(infs)
        )


def _measure(g: torch.Tensor) -> tuple[Any, ...]:
    """Norm, largest magnitude, and how many are not zero, NaN, infinite."""
    if g.layout is not torch.strided:
        g = g.coalesce().values() if g.layout is torch.sparse_coo else g.values()
    if not g.numel():
        return 0.0, 0.0, 0, 0, 0
    if g.is_complex():
        largest = g.abs().max()
    else:
        low, high = torch.aminmax(g)
        largest = torch.maximum(-low, high)
    nonzero = torch.count_nonzero(g)
    norm = torch.linalg.vector_norm(g, dtype=torch.float32 if g.dtype in _HALF else None)
    if not g.is_cpu:  # (to branch on a number would wait for the device)
        return norm, largest, nonzero, torch.isnan(g).sum(), torch.isinf(g).sum()
    top, norm = largest.item(), norm.item()
    if not math.isfinite(top):
        return norm, top, nonzero, torch.isnan(g).sum(), torch.isinf(g).sum()
    if not 1e-18 < norm < 1e18 and top:  # the squares may not fit
        wide = torch.complex128 if g.is_complex() else torch.float64
        norm = torch.linalg.vector_norm(g, dtype=wide).item()
    return norm, top, nonzero, 0, 0


class Measures:
    """Takes figures, and remembers those of the last gradients without keeping these."""

    def __init__(self) -> None:
        self.recent: dict[int, tuple[Any, int, Figures]] = {}

    def of(self, g: Any) -> Figures | None:
        """The figures of a gradient; None for none."""
        if not isinstance(g, torch.Tensor) or g.is_nested:
            return None
        known = self.recent.get(id(g))
        if known is not None and known[0]() is g and known[1] == version_of(g):
            return known[2]
        with torch.no_grad(), DisableTorchFunction():
            figures = Figures(g)
        self.remember(g, figures)
        return figures

    def same(self, dx: torch.Tensor, dy: torch.Tensor) -> None:
        """Note that a gradient only has another layout than one whose figures are known."""
        known = self.recent.get(id(dy))
        if known is not None and known[0]() is dy and dx.numel() == dy.numel():
            made = Figures.__new__(Figures)
            made.shape, made.dtype, made.parts = tuple(dx.shape), known[2].dtype, known[2].parts
            self.remember(dx, made)

    def remember(self, g: torch.Tensor, figures: Figures) -> None:
        """Keep the figures of a gradient for the op at which it arrives next."""
        if len(self.recent) >= RECENT:
            self.recent.clear()
        self.recent[id(g)] = weakref.ref(g), version_of(g), figures
