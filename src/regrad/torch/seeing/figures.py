"""Figures of gradients, taken as they pass: few passes over each, and no waiting for a GPU."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from regrad.inspection.numbers import Numbers, numbers_of
from regrad.torch.host import DisableTorchFunction, is_transformed, version_of
from regrad.torch.seeing.arrays import as_array

RECENT = 256  # gradients whose figures are remembered: one leaves an op and arrives at the next


def figures_of(g: torch.Tensor) -> Numbers | Callable[[], Numbers]:
    """The figures of a gradient; of one on a device, a function that waits for them."""
    shape, dtype = tuple(g.shape), str(g.dtype).removeprefix("torch.")
    if g.layout is not torch.strided:
        g = g.coalesce().values() if g.layout is torch.sparse_coo else g.values()
    wrapped = is_transformed()  # (by torch.func: NumPy cannot read it)
    if not g.numel() or (g.is_cpu and not wrapped):
        found = numbers_of(as_array(g))
        zeros = math.prod(shape) - found.size + found.zeros  # (those that are not stored, too)
        return replace(found, shape=shape, dtype=dtype, zeros=zeros)
    half = g.dtype in (torch.float16, torch.bfloat16)
    norm = torch.linalg.vector_norm(g, dtype=torch.float32 if half else None)
    bad = torch.isnan(g).sum(), torch.isinf(g).sum()
    parts = norm, g.abs().max(), torch.count_nonzero(g), *bad

    def settled() -> Numbers:
        norm, largest, nonzero, nans, infs = [part.item() for part in parts]
        zeros = math.prod(shape) - int(nonzero)
        return Numbers(shape, dtype, norm, largest, zeros, int(nans), int(infs))

    return settled() if wrapped else settled


class Measures:
    """Takes figures, and remembers those of the last gradients without keeping these."""

    def __init__(self) -> None:
        self.recent: dict[int, tuple[Any, int, Any]] = {}

    def of(self, g: Any) -> Numbers | Callable[[], Numbers] | None:
        """The figures of a gradient; None for none."""
        if not isinstance(g, torch.Tensor) or g.is_nested:
            return None
        known = self.recent.get(id(g))
        if known is not None and known[0]() is g and known[1] == version_of(g):
            return known[2]
        with torch.no_grad(), DisableTorchFunction():
            figures = figures_of(g)
        if len(self.recent) >= RECENT:
            self.recent.clear()
        self.recent[id(g)] = weakref.ref(g), version_of(g), figures
        return figures
