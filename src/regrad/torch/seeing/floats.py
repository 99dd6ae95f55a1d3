"""A function of somebody's tensors, arguments and parameters, as one of a flat list of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from regrad.checking.check import Arrays, Function, Pull
from regrad.core import containers
from regrad.errors import ArgumentError, GradientError, RegradError
from regrad.torch.host import DisableTorchFunction
from regrad.torch.nodes import tensors
from regrad.torch.seeing.modules import Unseen, argument_paths, found_in
from regrad.torch.seeing.recording import as_array, at_rest, is_float, pulled

OfFloats = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


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

    def __init__(self, f: Callable[..., Any], args: Sequence[Any], api: str, seed: int = 0) -> None:
        self.f = f
        self.api = api
        self.seed = seed
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
        with at_rest(self.seed), torch.enable_grad():
            y = torch.func.functional_call(self.holder, swapped, (self.f, self.rebuild(leaves)))
        ys = [each for each in tensors((_opened(y),)) if is_float(each)]
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


def wide(x: torch.Tensor) -> torch.Tensor:
    """A tensor in double precision, if it holds floats."""
    if not is_float(x):
        return x
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def of_arrays(f: OfFloats, xs: Sequence[torch.Tensor], forward: bool = True) -> Function:
    """A function of tensors as one of NumPy arrays, with its gradients by autograd."""
    device = xs[0].device if xs else None

    def given(arrays: Arrays) -> list[torch.Tensor]:
        return [torch.tensor(a, device=device).requires_grad_() for a in arrays]

    def values(arrays: Arrays) -> list[Any]:
        return [as_array(y) for y in f(given(arrays))]

    def vjp(arrays: Arrays) -> Pull:
        xs = given(arrays)
        ys = f(xs)

        def pull(dys: Arrays) -> list[Any]:
            found = pulled(ys, xs, [torch.tensor(dy, device=device) for dy in dys])
            return [None if dx is None else as_array(dx) for dx in found]

        return pull

    def gradient(dys: Arrays) -> Function:
        weights = [torch.tensor(dy, device=device) for dy in dys]

        def g(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            count = len(tensors) - len(weights)
            xs, scales = tensors[:count], tensors[count:]
            with DisableTorchFunction():
                arriving = [scale * w for scale, w in zip(scales, weights, strict=True)]
            found = pulled(f(xs), xs, arriving, create_graph=True)
            pairs = zip(found, xs, strict=True)
            return [torch.zeros_like(x) if dx is None else dx for dx, x in pairs]

        return of_arrays(g, [*xs, *map(torch.ones_like, weights)], forward)

    def jvp(arrays: Arrays, dxs: Arrays) -> list[Any]:
        moves = [torch.tensor(dx, device=device) for dx in dxs]
        return [as_array(dy) for dy in pushed(f, given(arrays), moves)]

    has_forward = forward and _has_forward_mode(f, xs)
    return Function(values, vjp, gradient, jvp if has_forward else None)


def pushed(
    f: OfFloats, xs: Sequence[torch.Tensor], dxs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return how the results move along dxs, by forward mode."""
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, dx) for x, dx in zip(xs, dxs, strict=True)]
        found = [(y, forward_ad.unpack_dual(y).tangent) for y in f(duals)]
        return [torch.zeros_like(y) if dy is None else dy.clone() for y, dy in found]


def _has_forward_mode(f: OfFloats, xs: Sequence[torch.Tensor]) -> bool:
    """Return whether all that f runs has a forward mode."""
    try:
        with torch.enable_grad():
            given = [x.detach().clone().requires_grad_() for x in xs]
            pushed(f, given, [torch.zeros_like(x) for x in xs])
    except (RuntimeError, NotImplementedError, TypeError, RegradError, GradientError):
        return False
    return True
