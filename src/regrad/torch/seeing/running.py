"""A run of somebody's function under a Looker: its result, and the gradients by all leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from regrad.core import containers
from regrad.errors import ArgumentError, GradientError, kind
from regrad.torch.nodes import tensors
from regrad.torch.seeing.modules import found_in
from regrad.torch.seeing.watching import Looker


class ModelRun:
    """One run of a function, and of its backward pass."""

    def __init__(
        self, f: Callable[..., Any], args: Sequence[Any], options: Any, looker: Looker, api: str
    ) -> None:
        self.api = api
        self.looker = looker
        self.args = args
        self.outside: dict[str, Any] = found_in(f, args, options)
        self.given: list[torch.Tensor] = [x for x in tensors((args, options)) if x.requires_grad]
        self.value: Any = f(*args, **options)
        self.loss: torch.Tensor | None = None
        if not looker.ran_backward:
            self.loss = find_loss(self.value, api)

    def walk(self) -> dict[int, torch.Tensor | None]:
        """Run the backward pass, if f did not; the gradients by leaves and arguments, by id."""
        if self.loss is None:
            return {}
        looker = self.looker
        looker.ended(self.loss)
        looker.adopt(self.loss.grad_fn)
        sources = {id(x): x for x in (*self.given, *looker.leaves.values())}
        if not sources:
            return {}
        seed = torch.ones_like(self.loss)
        with torch.enable_grad():
            found = torch.autograd.grad(self.loss, list(sources.values()), seed, allow_unused=True)
        return dict(zip(sources, found, strict=True))

    def names(self) -> dict[int, str]:
        """Return what all that may have a gradient is called, by id: arguments, then parameters."""
        named: dict[int, str] = {}
        paths = containers.paths(tuple(self.args), "args") if self.args else []
        leaves = containers.flatten(tuple(self.args))[0] if self.args else []
        for name, x in [*zip(paths, leaves, strict=True), *self.outside.items()]:
            if isinstance(x, torch.Tensor) and x.requires_grad:
                named.setdefault(id(x), name)
        for key, name in self.looker.paths.parameters().items():
            named.setdefault(key, name)
        return named

    def sources(self) -> dict[int, tuple[str, torch.Tensor]]:
        """All that a gradient goes to, reached or not: arguments, parameters, other leaves."""
        named = self.names()
        every: dict[int, torch.Tensor] = {id(x): x for x in self.given}
        for value in self.outside.values():
            if isinstance(value, torch.Tensor):
                every[id(value)] = value
        modules = [*self.looker.paths.modules.values(), *self.looker.paths.met.values()]
        for module in modules:
            every.update({id(p): p for p in module.parameters()})
        every.update(self.looker.leaves)
        return {
            key: (named.get(key, f"a tensor of shape {tuple(x.shape)}"), x)
            for key, x in every.items()
            if x.requires_grad
        }


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


def let_go(value: Any) -> Any:
    """Return what f returned, without the graph behind it."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if type(value) in (list, tuple):
        return type(value)(map(let_go, value))
    if type(value) is dict:
        return {key: let_go(each) for key, each in value.items()}
    return value
