"""A model in blocks, the ways to run it, and its gradients where hooks of autograd bend some."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from regrad.errors import PassedOverError
from tests.torch.common import numbers, override

X = numbers(6, 4, seed=1)


class Block(nn.Module):
    def __init__(self, act: Any = nn.ReLU) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(4, 5), act(), nn.Linear(5, 4)

    def forward(self, x: Any) -> Any:
        return self.last(self.act(self.first(x)))


class Net(nn.Module):
    """Blocks with these activations, run as they are or in another way."""

    def __init__(self, acts: Sequence[Any], run: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Block(act) for act in acts])
        self.head = nn.Linear(4, 2)
        self.run = run or (lambda layer, x: layer(x))
        self.double()

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = self.run(layer, x)
        return self.head(x)


def gradients(model: Any, f: Any = None, x: Any = X) -> list[Any]:
    """Return the gradients of a sum of squares by the parameters."""
    model.zero_grad()
    (model if f is None else f)(x).pow(2).sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def hooked(model: Any, bend: Any, before: Any = (), after: Any = (), x: Any = X) -> list[Any]:
    """Return the gradients where hooks bend those that arrive at some modules, or leave them."""

    def arriving(module: Any, args: Any, y: Any) -> None:
        y.register_hook(bend)

    def leaving(module: Any, args: Any) -> Any:
        x = args[0] * 1
        x.register_hook(bend)
        return (x,)

    held = [model.get_submodule(p).register_forward_hook(arriving) for p in before]
    held += [model.get_submodule(p).register_forward_pre_hook(leaving) for p in after]
    found = gradients(model, x=x)
    for each in held:
        each.remove()
    return found


def by_itself(make: Any) -> Any:
    return (model := make()), model


def checkpointed(use_reentrant: bool) -> Callable[[Any], Any]:
    def run(layer: Any, x: Any) -> Any:
        x = x.clone().requires_grad_() if use_reentrant and not x.requires_grad else x
        return checkpoint(layer, x, use_reentrant=use_reentrant)

    return lambda make: by_itself(lambda: make(run))


def functional(make: Any) -> Any:
    model = make()
    return model, lambda x: torch.func.functional_call(model, dict(model.named_parameters()), (x,))


def in_thread(make: Any) -> Any:
    model = make()

    def run(x: Any) -> Any:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(model, x).result()

    return model, run


# Functions of `make`, which return a model and a function that runs it.
WAYS = {
    "eager": by_itself, "checkpoint": checkpointed(False), "reentrant": checkpointed(True),
    "functional_call": functional, "thread": in_thread,
}  # fmt: skip


def refused(words: str, rules: Any, run: Any = lambda: None, error: Any = PassedOverError,
            **options: Any) -> None:  # fmt: skip
    """Run in a scope, which raises an error with these words at the latest in the run."""
    with pytest.raises(error, match=words), override(rules, **options):
        run()


class Made(nn.Module):
    """A module of a function `forward(module, *inputs)` and of its parts."""

    def __init__(self, forward: Any, **parts: Any) -> None:
        super().__init__()
        self.own = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.own(self, *args, **options)
