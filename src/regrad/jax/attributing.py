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
    _check(heads, create_graph)
    places, paths = paths_of(at), [*paths_of(at), *paths_of(layers)]
    unit = runs.unit_of(through, batch_axis) if through else None
    used: Any = None

    def run(given: Any, move: Move, copies: int = 1) -> Ran:
        nonlocal used
        made = JaxRun(model, given, runs.copied_target(target, copies), batch_axis=batch_axis)
        numbers: dict[str, int] = {}
        seen: dict[str, Any] = {}

        def tap(path: str, y: Any) -> Any:
            seen[path] = y
            if not any(runs.names(place, path) for place in places):
                return y
            return move(numbers.setdefault(path, len(numbers)), _cut(y))

        xs = made.floats
        if not places:
            xs = {name: move(n, x) for n, (name, x) in enumerate(xs.items())}
        total, dxs, ops, used = differentiated(
            made, xs, rules, [*paths, *(unit[:1] if unit else ())], False, tap
        )
        if unit:  # (the gradient at the unit, and then the gradient of the unit)
            name, weights = _unit(unit, ops)
            inner = JaxRun(model, given, lambda y: (seen[name] * weights).sum())
            _, dxs, ops, used = differentiated(inner, xs, rules, [*paths, name], False, tap)
        found = by_path(paths, ops)
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


def _check(heads: Any, create_graph: bool) -> None:
    """Raise for arguments that only PyTorch models have."""
    if heads:
        raise ArgumentError(
            "attribute: heads is for PyTorch models. In JAX, name by layers= a module whose output "
            "has the heads side by side, and sum over the width of each head: "
            "layers[path].reshape(*shape[:-1], heads, -1).sum(-1)"
        )
    if create_graph:
        raise ArgumentError(
            "attribute: create_graph is for PyTorch models. In JAX, differentiate attribute by "
            "jax.grad"
        )


def _unit(unit: tuple[str, Any], ops: Any) -> tuple[str, Any]:
    """Return the path of the module of a unit, and the gradient of the unit in its output."""
    found = {p: v for p, v in by_path(unit[:1], ops).items() if runs.names(unit[0], p)}
    if len(found) != 1:
        raise ArgumentError(f"attribute: through expected one module, got {[*found]}")
    ((name, (_, dy)),) = found.items()
    return name, dy * runs.mask_of(unit, dy.shape).astype(dy.dtype)
