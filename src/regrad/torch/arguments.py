"""How a torch call's arguments fill the parameters of an op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from regrad.core.foreign import lender, takes_all
from regrad.core.tape import Place
from regrad.errors import PassedOverError, RuleError
from regrad.torch.optypes import CHANNELS_LAST, LACKS, SYNONYMS, Family

MISSING: Any = object()


class Filled(NamedTuple):
    """A call's arguments, by the op's parameters.

    `values` are what its tensor parameters were given, leaf by leaf, and `layout` which leaves
    belong to which (None: one each). `rebuild(tensors)` are the arguments of the torch call with
    other tensors in their places.
    """

    values: list[Any]
    layout: tuple[Place, ...] | None
    attrs: dict[str, Any]
    rebuild: Callable[[Sequence[torch.Tensor]], tuple[list[Any], dict[str, Any]]]

    def bind(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of tensors that calls another one with the arguments so rebuilt."""
        if self.rebuild is _as_arguments:
            return function

        def call(*tensors: torch.Tensor) -> Any:
            args, options = self.rebuild(tensors)
            return function(*args, **options)

        return call


def fill(family: Family, args: Sequence[Any], options: Mapping[str, Any]) -> Filled:
    """Sort the arguments of a torch call; a tensor that no parameter takes is refused."""
    if len(args) == 1 and not options and family.op.single:
        return Filled([*args], None, family.attributes({}), _as_arguments)
    if not family.parameters:
        return fill_by_place(args, options)
    keys = _keys(family, args, options)
    by_name = {ours: keys[theirs] for theirs, ours in family.parameters if ours and theirs in keys}
    given = {name: args[k] if isinstance(k, int) else options[k] for name, k in by_name.items()}
    leaves: list[tuple[Any, tuple[Any, int | None]]] = []  # a value, and where it stands
    layout: list[Place] = []
    for entry in family.op.inputs:
        key, value = by_name.get(entry.name), given.get(entry.name)
        if entry.kind == "many":
            layout.append(tuple(range(len(leaves), len(leaves) + len(value or ()))))
            leaves += [(v, (key, i)) for i, v in enumerate(value or ())]
        elif value is None and entry.kind == "optional":
            layout.append(None)
        else:
            layout.append(len(leaves))
            leaves.append((value, (key, None)))
    paths = [path for value, path in leaves if isinstance(value, torch.Tensor)]
    _refuse_others(family, args, options, {key for _, (key, _) in leaves})
    attrs = family.attributes({name: given[name] for name in family.op.attrs if name in given})
    flat = all(place == i for i, place in enumerate(layout))
    return Filled(
        [value for value, _ in leaves], None if flat else tuple(layout), attrs,
        ArgumentRebuilder(args, options, paths),
    )  # fmt: skip


def _as_arguments(tensors: Sequence[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
    return [*tensors], {}


def fill_by_place(args: Sequence[Any], options: Mapping[str, Any]) -> Filled:
    """Take all tensors among the arguments as inputs, in order: one sequence, or one each."""
    leaves: list[tuple[torch.Tensor, tuple[Any, int | None]]] = []
    for key, value in (*enumerate(args), *options.items()):
        if isinstance(value, torch.Tensor):
            leaves.append((value, (key, None)))
        elif isinstance(value, list | tuple):
            leaves += [(v, (key, i)) for i, v in enumerate(value) if isinstance(v, torch.Tensor)]
    layout = (tuple(range(len(leaves))),)
    rebuild = ArgumentRebuilder(args, options, [path for _, path in leaves])
    return Filled([value for value, _ in leaves], layout, {}, rebuild)


class ArgumentRebuilder:
    """The arguments of a torch call with other tensors in their places."""

    def __init__(self, args: Sequence[Any], options: Mapping[str, Any], paths: Sequence[Any]):
        self.paths = paths
        taken = {key for key, _ in paths}
        self.args: list[Any | None] = [
            None if i in taken and _is_tensor(a) else a for i, a in enumerate(args)
        ]
        self.options: dict[str, Any | None] = {
            k: None if k in taken and _is_tensor(v) else v for k, v in options.items()
        }

    def __call__(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        args, options = list(self.args), dict(self.options)
        for (key, index), tensor in zip(self.paths, tensors, strict=True):
            holder: Any = args if isinstance(key, int) else options
            if index is None:
                holder[key] = tensor
            else:
                holder[key] = [*holder[key]]
                holder[key][index] = tensor
        return args, options


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _keys(family: Family, args: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return where each of torch's parameters stands: a position, or a keyword."""
    names = [theirs for theirs, _ in family.parameters]
    keys: dict[str, Any] = dict(zip(names, range(len(args)), strict=False))
    for key in options:
        name = SYNONYMS.get(key, key)
        if name in names:
            keys[name] = key
    return keys


def refuse_layout(value: Any, op_type: str) -> None:
    """Refuse the rule of an op of ours whose images are laid out in another way than torch's."""
    own = lender(value) or (op_type if takes_all(value) else None)
    if own in CHANNELS_LAST:
        raise RuleError(
            f"the rule of {own!r} is for images whose channels come last, "
            "and torch's come first. Write the rule with torch's functions, as in torch.nn.grad, "
            "and name what it needs."
        )


def refuse_unknown(family: Family, args: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Refuse the rule of one of our ops where a call says more than the op knows: `elu(x, 2.0)`."""
    keys = _keys(family, args, options)
    for name, default in LACKS.get(family.type, {}).items():
        key = keys.get(name)
        value = default if key is None else args[key] if isinstance(key, int) else options[key]
        if value != default:
            raise RuleError(
                f"the rule of {family.type!r} is that of regrad's op, which has no {name!r}; this "
                f"call passes {value!r:.40}. Write a rule that knows it, as a function."
            )


def _refuse_others(
    family: Family, args: Sequence[Any], options: Mapping[str, Any], known: set[Any]
) -> None:
    for key, value in (*enumerate(args), *options.items()):
        if key not in known and isinstance(value, torch.Tensor) and value.requires_grad:
            raise PassedOverError(
                f"{family.type} is overridden, and was called with a differentiable tensor as its "
                f"argument {key!r}, for which the op type has no input, so that no rule covers it"
            )
