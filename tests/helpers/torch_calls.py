"""A function of torch, with rules and without: what both give."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

import regrad.torch

override = regrad.torch.gradient_override_map
D = torch.float64


def both(f: Callable[..., Any], x: Any, rules: dict[str, Any]) -> tuple[Any, ...]:
    """Value and gradient as torch has them, and under rules."""
    found = []
    for scope in (nullcontext(), override(rules)):
        leaf = x.detach().clone().requires_grad_()
        with scope:
            y = f(leaf)
        (dx,) = torch.autograd.grad(y, leaf, y.detach().cos())
        found += [y.detach(), dx]
    return tuple(found)


IMAGE = torch.linspace(0.1, 2.3, 2 * 2 * 5 * 4, dtype=D).sin().reshape(2, 2, 5, 4)
X = IMAGE[0, 0, :3] + 0.01 * torch.arange(12, dtype=D).reshape(3, 4)
