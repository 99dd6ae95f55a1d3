"""Tensors in the form that the tools use: as NumPy arrays, and with statistics of gradients."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from regrad.core import containers
from regrad.inspection.numbers import Numbers, numbers_of
from regrad.torch.bridge import is_differentiable
from regrad.torch.host import DisableTorchFunction, is_transformed, version_of
from regrad.torch.nodes import tensors

RECENT = 256  # cached figures of gradients: a gradient leaves one op and arrives at the next


def is_float(x: Any) -> bool:
    """Return whether a value is a tensor that may have a gradient."""
    return isinstance(x, torch.Tensor) and is_differentiable(x)


def floats(values: Any) -> list[torch.Tensor]:
    """Return the tensors among some values that may have gradients."""
    return [x for x in tensors((values,)) if is_float(x)]


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return a float tensor in double precision; other tensors unchanged."""
    if not is_float(x):
        return x
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def without_history(value: Any) -> Any:
    """Return a value with all tensors detached from their graphs."""
    leaves, rebuild = containers.flatten(value)
    with DisableTorchFunction():
        return rebuild([x.detach() if isinstance(x, torch.Tensor) else x for x in leaves])


def as_array(x: torch.Tensor) -> np.ndarray:
    """Return a tensor as an array that NumPy can compute with."""
    with torch.no_grad(), DisableTorchFunction():
        x = x.detach().resolve_conj().resolve_neg().cpu()
        if x.dtype == torch.bfloat16 or (x.is_floating_point() and x.element_size() == 1):
            x = x.float()
        return x.numpy()


@contextmanager
def at_rest(seed: int) -> Generator[None]:
    """Use the same random numbers in each block, and restore torch's generator at the end."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


# -- figures -------------------------------------------------------------------------------------


def figures_of(g: torch.Tensor) -> Numbers | Callable[[], Numbers]:
    """Return the figures of a gradient; for a gradient on a device, a function that waits."""
    shape, dtype = tuple(g.shape), str(g.dtype).removeprefix("torch.")
    if g.layout is not torch.strided:
        g = g.coalesce().values() if g.layout is torch.sparse_coo else g.values()
    wrapped = is_transformed()  # (by torch.func: NumPy cannot read it)
    if not g.numel() or (g.is_cpu and not wrapped):
        found = numbers_of(as_array(g))
        zeros = math.prod(shape) - found.size + found.zeros  # (includes the zeros not stored)
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
    """Computes figures, and caches the figures of the last gradients without the gradients."""

    def __init__(self) -> None:
        self.recent: dict[int, tuple[Any, int, Any]] = {}

    def of(self, g: Any) -> Numbers | Callable[[], Numbers] | None:
        """Return the figures of a gradient; None for None."""
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
