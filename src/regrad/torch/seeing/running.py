"""The ends of a run under a Looker: the loss, and all that it may be differentiated by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from regrad.errors import ArgumentError, GradientError, kind
from regrad.torch.nodes import tensors
from regrad.torch.seeing.modules import argument_paths
from regrad.torch.seeing.watching import Looker


def sources(
    looker: Looker, args: Sequence[Any], given: Sequence[torch.Tensor]
) -> list[tuple[str, torch.Tensor]]:
    """All that a gradient goes to, reached or not: arguments, parameters, other leaves."""
    named = [*argument_paths(args), *looker.held.items()]
    names = looker.paths.parameters() | {id(x): name for name, x in reversed(named)}
    outside = [x for x in looker.held.values() if isinstance(x, torch.Tensor)]
    parameters = [p for module in looker.paths.seen for p in module.parameters()]
    every = {id(x): x for x in (*given, *outside, *parameters, *looker.leaves.values())}
    return [
        (names.get(key, f"a tensor of shape {tuple(x.shape)}"), x)
        for key, x in every.items()
        if x.requires_grad
    ]


def check_callable(f: Any, api: str) -> None:
    """Raise unless a tool was given a function or a module."""
    if not callable(f) or (isinstance(f, type) and issubclass(f, torch.nn.Module)):
        got = f"the class {f.__name__}" if isinstance(f, type) else kind(f)
        raise ArgumentError(f"{api} takes a function or a module of torch tensors, got {got}")


def find_loss(value: Any, api: str) -> torch.Tensor:
    """The tensor in what f returned whose gradient is taken."""
    if isinstance(value, torch.Tensor):
        return _differentiable(value, api)
    named = value.get("loss") if isinstance(value, dict) else getattr(value, "loss", None)
    if isinstance(named, torch.Tensor):
        return _differentiable(named, api)
    found = [y for y in tensors((value,)) if y.requires_grad and y.grad_fn is not None]
    scalars = [y for y in found if y.numel() == 1]
    if len(scalars) == 1 or len(found) == 1:
        return (scalars if len(scalars) == 1 else found)[0]
    raise GradientError(
        f"{api}: f returned {kind(value)}, in which there are {len(scalars)} losses (tensors of "
        "one number that require grad). Return the loss, name it 'loss', or call backward() in f."
    )


def _differentiable(y: torch.Tensor, api: str) -> torch.Tensor:
    if not y.requires_grad:
        raise GradientError(
            f"{api}: the result of f does not require grad: nothing that leads to it does. Is it "
            "computed under no_grad, or detached?"
        )
    return y
