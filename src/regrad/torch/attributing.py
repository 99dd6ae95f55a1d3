"""Attribution in a PyTorch model: runs at points between two inputs, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from regrad.errors import ArgumentError, kind
from regrad.inspection.relevances import Relevance
from regrad.rules.attribution import Path
from regrad.rules.runs import share
from regrad.torch.bridge import or_zeros
from regrad.torch.overriding import gradient_override_map
from regrad.torch.relevance import Ops, TorchRun, as_found, named


@dataclass(frozen=True)
class Attribution(Relevance):
    """The result of `rules.attribution.attribute`: a `Relevance` with two more attributes.

    Attributes:
        heads: The contribution of each head, by the path of the module that receives the heads.
        gradients: The averaged gradients of the inputs (of the embeddings of tokens).
    """

    heads: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: Any = None


def attributed(
    model: Any, inputs: Any, target: Any, rules: Any, layers: Any, heads: Any, reference: Any,
    along: Any,
) -> Attribution:  # fmt: skip
    """Return the shares of a model's parts in an output; see `rules.attribution.attribute`."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"attribute expected a torch.nn.Module, got {kind(model)}")
    if along is not None and not isinstance(along, Path):
        raise ArgumentError(
            f"attribute: along expected a Path such as integrated(), got {kind(along)}"
        )
    counts = _counts(heads, dict(model.named_modules()))
    with (
        as_found(model),
        gradient_override_map(rules, model=model) if rules else nullcontext() as used,
    ):

        def run(given: Any, move: Callable[[int, torch.Tensor], torch.Tensor]) -> Any:
            made = TorchRun(model, given, target, move=move)
            total, dxs = made.differentiated(Ops(model, False), layers, counts)
            return made, total, dxs

        contrasts = reference is not None or (along and set(along.places) != {1.0})
        clean, total, dxs = run(inputs, lambda n, x: x)
        xs = [point.value for point in clean.points]
        zs: list[Any] = [0.0] * len(xs)
        if contrasts:
            zero = reference is None
            other, rest, _ = run(inputs if zero else reference, lambda n, x: x * 0 if zero else x)
            zs = _alike(xs, [point.value for point in other.points])
            total = total - rest
        if along:
            runs = [run(inputs, move)[2] for move in _moves(along, zs)]
            dxs = [_mean(each, along.weights) for each in zip(*runs, strict=True)]
    shares = [share(x - z, dx) for x, z, dx in zip(xs, zs, dxs, strict=True)]
    found = iter([p.summed(share) for p, share in zip(clean.points, shares, strict=True)])
    at_inputs = clean.by_name([next(found) for _ in clean.leaves])
    by_layer = {name: next(found) for name in clean.layers}
    by_head = {name: _by_head(name, next(found), counts[name]) for name in clean.heads}
    gradients = [or_zeros(dx, x) for x, dx in zip(xs, dxs, strict=True)]
    of_inputs = clean.as_given(clean.by_name(gradients[: len(clean.leaves)]))
    answer = clean.answer(total, at_inputs, by_layer, None, used)
    return Attribution(**vars(answer), heads=by_head, gradients=of_inputs)


def _counts(heads: Any, modules: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of heads, by the path of the module that receives them."""
    if heads is not None and not isinstance(heads, Mapping):
        raise ArgumentError(
            "attribute: heads expected a dict from paths to numbers of heads, such as "
            f'{{"layers.*.attention.output": 12}}, got {kind(heads)}'
        )
    return {name: count for path, count in (heads or {}).items() for name in named(path, modules)}


def _by_head(name: str, share: torch.Tensor, count: int) -> torch.Tensor:
    """Return the sum over the width of each head."""
    if type(count) is not int or count < 1 or share.shape[-1] % count:
        raise ArgumentError(
            f"attribute: heads of {name!r} expected a number that divides its width of "
            f"{share.shape[-1]}, got {count!r:.40}"
        )
    return share.unflatten(-1, (count, -1)).sum(-1)


def _alike(xs: list[Any], zs: list[Any]) -> list[Any]:
    shapes = [[tuple(x.shape) for x in each] for each in (xs, zs)]
    if shapes[0] != shapes[1]:
        raise ArgumentError(
            "attribute: a reference must have the structure and the shapes of the inputs; got "
            f"values of shapes {shapes[0]} and {shapes[1]}"
        )
    return zs


def _moves(along: Any, zs: list[Any]) -> list[Callable[[int, torch.Tensor], torch.Tensor]]:
    """Return, for each run, the function that moves the inputs to the point of the run."""
    generator = torch.Generator().manual_seed(along.seed)

    def move(place: float) -> Callable[[int, torch.Tensor], torch.Tensor]:
        def moved(n: int, x: torch.Tensor) -> torch.Tensor:
            moved = zs[n] + place * (x - zs[n])
            if not along.noise:
                return moved
            noise = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
            return moved + along.noise * (x.max() - x.min()) * noise

        return moved

    return [move(place) for place in along.places]


def _mean(dxs: tuple[Any, ...], weights: tuple[float, ...]) -> Any:
    return sum(w * dx for w, dx in zip(weights, dxs, strict=True) if dx is not None)
