"""Tensors as tools look at them: as arrays of NumPy, and with their gradients."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from regrad.core import containers
from regrad.torch.host import DisableTorchFunction
from regrad.torch.nodes import tensors


def is_float(x: Any) -> bool:
    """Return whether a value is a tensor that may have a gradient."""
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


def floats(values: Any) -> list[torch.Tensor]:
    """The tensors among some values that may have gradients."""
    return [x for x in tensors((values,)) if is_float(x)]


def wide(x: torch.Tensor) -> torch.Tensor:
    """A tensor in double precision, if it holds floats."""
    if not is_float(x):
        return x
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def without_history(value: Any) -> Any:
    """The same with all tensors cut off from the graph behind them."""
    leaves, rebuild = containers.flatten(value)
    with DisableTorchFunction():
        return rebuild([x.detach() if isinstance(x, torch.Tensor) else x for x in leaves])


def as_array(x: torch.Tensor) -> np.ndarray:
    """A tensor as an array that NumPy can compute with."""
    with torch.no_grad(), DisableTorchFunction():
        x = x.detach().resolve_conj().resolve_neg().cpu()
        if x.dtype == torch.bfloat16 or (x.is_floating_point() and x.element_size() == 1):
            x = x.float()
        return x.numpy()


def pulled(
    ys: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], dys: Sequence[torch.Tensor],
    create_graph: bool = False,
) -> Sequence[torch.Tensor | None]:  # fmt: skip
    """The gradients by xs, None for no path."""
    pairs = [(y, dy) for y, dy in zip(ys, dys, strict=True) if y.requires_grad]
    if not pairs:
        return [None] * len(xs)
    return torch.autograd.grad(
        [y for y, _ in pairs], list(xs), [dy for _, dy in pairs],
        allow_unused=True, retain_graph=True, create_graph=create_graph,
    )  # fmt: skip


def or_zeros(dy: torch.Tensor | None, y: torch.Tensor) -> torch.Tensor:
    """A gradient, zeros for none."""
    return torch.zeros_like(y) if dy is None else dy


@contextmanager
def at_rest(seed: int) -> Generator[None]:
    """A block in which random numbers are the same each time, and torch's generator is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
