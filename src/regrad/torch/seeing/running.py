"""The ends of a run under a Looker: the loss, and all that it may be differentiated by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from regrad.core import containers
from regrad.errors import ArgumentError, GradientError, kind
from regrad.inspection.recorder import Named
from regrad.torch.nodes import tensors
from regrad.torch.seeing.modules import argument_paths
from regrad.torch.seeing.notes import OpNote, named_tensors
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


# -- for tools that see what each function was given ---------------------------------------------

# Memory that nobody has written to yet may hold anything.
_UNWRITTEN = ("empty", "empty_like", "new_empty", "empty_strided", "resize_", "set_")


class Found(Exception):
    """The search is over."""


class Feeder(Looker):
    """Tells its tool what each function was given and returned, until that makes a NaN."""

    keeps_inputs = True

    def before(self, func: Any, args: Sequence[Any], options: Any) -> Any:
        """Keep what a function is given; what it will write over, as it is now."""
        named = list(named_tensors(func, args, options))
        name = getattr(func, "__name__", "")
        writes = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
        flagged = len(args) > 1 and args[1] is True  # (`inplace`, by position)
        if named and (writes or options.get("inplace") or flagged or "setitem" in name):
            named[0] = named[0][0], named[0][1].detach().clone()
        return named

    def after(self, func: Any, args: Any, options: Any, y: Any, was: Any, note: OpNote) -> None:
        """Tell of a torch function."""
        made = y if y is not None else (args[0] if args else None)
        unwritten = getattr(func, "__name__", "") in _UNWRITTEN
        self.feed(note, was, () if unwritten else made, _writes_infinity((args, options)))

    def ran(self, function: Any, args: Any, y: Any, note: OpNote, ctx: Any) -> None:
        """Tell of a Function."""
        given = [x for x in args if isinstance(x, torch.Tensor)]
        self.feed(note, list(zip(note.names, given, strict=False)), y, False)

    def feed(self, note: OpNote, was: Named, made: Any, writes: bool) -> None:
        """Tell the tool; stop if it has seen enough."""
        ys = list(tensors((made,)))
        self.tool.ran(note, [(name, x.detach()) for name, x in was], ys, writes)
        if self.tool.done:
            raise Found

    def ended(self, loss: torch.Tensor) -> None:
        """Keep the result."""
        self.losses.append(loss)


def _writes_infinity(value: Any) -> bool:
    """Return whether a number among the arguments of a function is infinite."""
    numbers = [x for x in containers.opened(value, None)[0] if isinstance(x, float)]
    return not all(map(math.isfinite, numbers))
