"""Attribution in a PyTorch model: the runs, and the shares of heads and layers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from regrad.core.containers import flatten
from regrad.errors import ArgumentError, kind
from regrad.inspection.relevances import Attribution
from regrad.rules.along import Move, Ran, follow
from regrad.rules.runs import copied_target
from regrad.torch.overriding import gradient_override_map
from regrad.torch.relevance import Ops, TorchRun, as_found, check_dense, named


def attributed(
    model: Any, inputs: Any, rules: Any, layers: Any, heads: Any, along: Any, at: Any, through: Any,
    batch_axis: int, create_graph: bool, target: Any, reference: Any,
) -> Attribution:  # fmt: skip
    """Return the shares of a model's parts in an output; see `rules.attribution.attribute`."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"attribute expected a torch.nn.Module, got {kind(model)}")
    counts = _counts(heads, dict(model.named_modules()))
    if reference is not None or (along and along.references is not None):
        check_dense(flatten(inputs)[0])
    order = 1 if create_graph else None
    scope = gradient_override_map(rules, model=model, order=order) if rules else nullcontext()
    with as_found(model, create_graph), scope as used:

        def run(given: Any, move: Move, copies: int = 1) -> Ran:
            places = {"move": move, "at": at, "through": through}
            wanted = copied_target(target, copies)
            made = TorchRun(model, given, wanted, None, batch_axis, create_graph, **places)
            total, dxs = made.differentiated(Ops(model, False, create_graph), layers, counts)
            return Ran([point.value for point in made.points], dxs, total, made)

        answer = follow(run, inputs, along, reference, batch_axis)
    clean, points = answer.clean.made, answer.clean.made.points
    found = iter([p.summed(share) for p, share in zip(points, answer.shares, strict=True)])
    at_inputs = clean.by_name([next(found) for _ in clean.leaves])
    by_layer = {name: next(found) for name in clean.layers}
    by_head = {name: _by_head(name, next(found), counts[name]) for name in clean.heads}
    first, last = len(clean.leaves), len(clean.leaves) + len(clean.layers)
    shared = at_inputs or [(None, by_layer[name]) for name in clean.placed]
    relevance = clean.answer(answer.total, shared, by_layer, None, used)
    return Attribution(
        **vars(relevance),
        heads=by_head,
        gradients=clean.as_given(clean.by_name(answer.gradients[:first])),
        layer_gradients=dict(zip(clean.layers, answer.gradients[first:last], strict=True)),
        layer_values={name: point.value for name, point in clean.layers.items()},
    )


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
