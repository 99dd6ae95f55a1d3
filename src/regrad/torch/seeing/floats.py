"""A function of somebody's tensors, arguments and parameters, as one of a flat list of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from regrad.checking.check import Arrays
from regrad.core import containers
from regrad.errors import ArgumentError, GradientError, RegradError
from regrad.inspection.checks import Flat, Library
from regrad.torch.host import DisableTorchFunction
from regrad.torch.seeing.arrays import as_array, at_rest, floats, is_float, pulled, wide
from regrad.torch.seeing.modules import Unseen, argument_paths, found_in


class _Holder(Unseen):
    """Modules together, so that the parameters of all can be replaced for one call."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.held: nn.ModuleList = nn.ModuleList(modules)

    def forward(self, f: Callable[..., Any], args: Sequence[Any]) -> Any:
        return f(*args)


class Floats:
    """A function of tensors with the floats that it depends on, in double precision.

    These are the tensors among its arguments, and the parameters of the modules that it is, is
    given, or reads from outside. Nothing of the modules is changed: other tensors take the place
    of their parameters and buffers while the function runs.
    """

    def __init__(self, f: Callable[..., Any], args: Sequence[Any], api: str) -> None:
        self.f = f
        self.api = api
        self.leaves: list[Any]
        self.rebuild: Callable[..., Any]
        self.leaves, self.rebuild = containers.flatten(tuple(args))
        paths = [name for name, _ in argument_paths(args)]
        self.places: list[int] = [i for i, x in enumerate(self.leaves) if is_float(x)]
        self.outside: dict[str, Any] = found_in(f, args, {})
        modules = {n: m for n, m in self.outside.items() if isinstance(m, nn.Module)}
        for module in modules.values():
            _refuse_lazy(module, api)
        self.holder: _Holder = _Holder(list(modules.values()))
        prefixes = [f"{name}." if len(modules) > 1 else "" for name in modules]
        named = [(n, p) for n, p in self.holder.named_parameters() if p.requires_grad]
        self.keys: list[str] = [name for name, _ in named]
        self.names: list[str] = [paths[i] for i in self.places]
        self.names += [_shown(key, prefixes) for key in self.keys]
        every = [self.leaves[i] for i in self.places] + [p for _, p in named]
        self.xs: list[torch.Tensor] = [wide(x.detach()) for x in every]

    def __call__(self, xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The floats among the results, for these."""
        leaves = list(self.leaves)
        for i, x in zip(self.places, xs, strict=False):
            leaves[i] = x
        swapped = dict(zip(self.keys, xs[len(self.places) :], strict=True))
        fixed = [*self.holder.named_parameters(), *self.holder.named_buffers()]
        for name, x in fixed:
            if name not in swapped:
                swapped[name] = wide(x.detach()).clone()
        y = torch.func.functional_call(self.holder, swapped, (self.f, self.rebuild(leaves)))
        ys = floats(_opened(y))
        if not ys:
            raise ArgumentError(f"{self.api}: f returned no tensor of floats, so no gradient")
        return ys


def _refuse_lazy(module: nn.Module, api: str) -> None:
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ArgumentError(f"{api}: {name} has no value yet; call the module once before")


def _opened(y: Any) -> Any:
    """Return the result of a function as a container; an object becomes the dict of its fields."""
    if isinstance(y, torch.Tensor | list | tuple | dict):
        return y
    return dict(vars(y)) if hasattr(y, "__dict__") else y


def _shown(key: str, prefixes: Sequence[str]) -> str:
    """The name of a parameter: `held.0.layer.weight` without what the holder has put there."""
    _, number, name = key.split(".", 2)
    return prefixes[int(number)] + name


class TorchArrays(Library):
    """How torch differentiates functions of lists of tensors."""

    array = staticmethod(as_array)
    zeros = staticmethod(torch.zeros_like)
    unruled = DisableTorchFunction

    def __init__(self, seed: int) -> None:
        self.seed = seed  # of torch's generator in each run

    def compiled(self, f: Flat) -> Flat:
        def run(xs: Sequence[torch.Tensor]) -> list[Any]:
            with at_rest(self.seed), torch.enable_grad():
                return f(_watched(xs))

        return run

    def like(self, arrays: Arrays, xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.tensor(a, device=x.device) for a, x in zip(arrays, xs, strict=True)]

    def pull(self, f: Flat, xs: Sequence[torch.Tensor]) -> tuple[list[Any], Callable[..., Any]]:
        # (what requires grad already is part of a function that is to be differentiated in turn)
        again = any(x.requires_grad for x in xs)
        xs = _watched(xs)
        ys = f(xs)
        return ys, lambda dys: pulled(ys, xs, dys, create_graph=again)

    def push(self, f: Flat, xs: Sequence[torch.Tensor]) -> Callable[..., list[Any]] | None:
        def push(xs: Sequence[torch.Tensor], dxs: Sequence[torch.Tensor]) -> list[Any]:
            with forward_ad.dual_level():
                pairs = zip(xs, dxs, strict=True)
                duals = [forward_ad.make_dual(x.clone().requires_grad_(), dx) for x, dx in pairs]
                ys = self.compiled(f)(duals)
                found = [(y, forward_ad.unpack_dual(y).tangent) for y in ys]
                return [torch.zeros_like(y) if dy is None else dy.clone() for y, dy in found]

        try:
            push([x.detach() for x in xs], [torch.zeros_like(x) for x in xs])
        except (RuntimeError, NotImplementedError, TypeError, RegradError, GradientError):
            return None
        return push


def _watched(xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same tensors, of which all require grad."""
    return [x if x.requires_grad else x.detach().requires_grad_() for x in xs]
