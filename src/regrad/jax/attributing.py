"""Attribution in a function of JAX: the runs, and the shares of layers."""

from __future__ import annotations

from typing import Any

import jax

from regrad.errors import ArgumentError
from regrad.inspection.relevances import Attribution
from regrad.jax.relevance import JaxRun, by_path, differentiated, paths_of
from regrad.rules import runs
from regrad.rules.along import Move, Ran, follow


@jax.custom_vjp
def _cut(y: Any) -> Any:
    """Return a value without a gradient: zeros, because rules look for a dependence on inputs."""
    return y


_cut.defvjp(lambda y: (y, None), lambda _, dy: (jax.numpy.zeros_like(dy),))


def attributed(
    model: Any, inputs: Any, rules: Any, layers: Any, heads: Any, along: Any, at: Any, through: Any,
    batch_axis: int, create_graph: bool, target: Any, reference: Any,
) -> Attribution:  # fmt: skip
    """Return the shares of parts of a model in an output; see `rules.attribution.attribute`."""
    of_torch = {"heads": heads, "through": through, "create_graph": create_graph}
    if given := [name for name, value in of_torch.items() if value]:
        raise ArgumentError(
            f"attribute: {given[0]} is for PyTorch models. In JAX, name modules of a model of Flax "
            "or Equinox by layers= or at=, and differentiate attribute by jax.grad"
        )
    places = paths_of(at)
    used: Any = None

    def run(given: Any, move: Move) -> Ran:
        nonlocal used
        made = JaxRun(model, given, target, batch_axis=batch_axis)
        numbers: dict[str, int] = {}

        def tap(path: str, y: Any) -> Any:
            if not any(runs.names(place, path) for place in places):
                return y
            return move(numbers.setdefault(path, len(numbers)), _cut(y))

        xs = made.floats
        if not places:
            xs = {name: move(n, x) for n, (name, x) in enumerate(xs.items())}
        total, dxs, ops, used = differentiated(
            made, xs, rules, [*places, *paths_of(layers)], False, tap
        )
        found = by_path([*places, *paths_of(layers)], ops)
        found = {name: found[name] for name in (*numbers, *found)}  # (the moved ones come first)
        names = [] if places else [*xs]
        values = [*[xs[name] for name in names], *[y for y, _ in found.values()]]
        gradients = [*dxs[: len(names)], *[dy for _, dy in found.values()]]
        return Ran(values, gradients, total, (made, names, [*found], [*numbers]))

    answer = follow(run, inputs, along, reference, batch_axis)
    clean, names, layered, moved = answer.clean.made
    count = len(names)
    by_layer = dict(zip(layered, answer.shares[count:], strict=True))
    at_inputs = [*zip(names, answer.shares, strict=False)]
    shared = at_inputs or [(None, by_layer[path]) for path in moved]
    relevance = clean.answer(answer.total, shared, by_layer, None, used)
    return Attribution(
        **vars(relevance),
        gradients=clean.as_given(zip(names, answer.gradients, strict=False)),
        layer_gradients=dict(zip(layered, answer.gradients[count:], strict=True)),
        layer_values=dict(zip(layered, answer.clean.values[count:], strict=True)),
    )
