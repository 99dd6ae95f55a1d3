"""How a torch call's arguments fill the parameters of an op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from regrad.errors import PassedOverError
from regrad.tape import Place
from regrad.torch.optypes import SYNONYMS, Family

MISSING: Any = object()


class Filled(NamedTuple):
    """A call's arguments, by the op's parameters.

    `values` are what its tensor parameters were given, leaf by leaf, and `layout` which leaves
    belong to which (None: one each). `rebuilt(tensors)` are the arguments of the torch call with
    other tensors in their places.
    """

    values: list[Any]
    layout: tuple[Place, ...] | None
    attrs: dict[str, Any]
    rebuilt: Callable[[Sequence[torch.Tensor]], tuple[list[Any], dict[str, Any]]]


def fill(family: Family, args: Sequence[Any], options: Mapping[str, Any]) -> Filled:
    """Sort the arguments of a torch call; a tensor that no parameter takes is refused."""
    if not family.parameters:
        return _every_tensor(args, options)
    keys = _keys(family, args, options)
    by_name = {ours: keys[theirs] for theirs, ours in family.parameters if ours and theirs in keys}

    def read(key: Any) -> Any:
        return args[key] if isinstance(key, int) else options[key]

    groups: list[tuple[Any, ...]] = [
        (by_name[i.name],) if i.name in by_name else () for i in family.op.inputs
    ]
    values: list[Any] = []
    layout: list[Place] = []
    paths: list[tuple[Any, int | None]] = []
    for entry, key in zip(family.op.inputs, groups, strict=True):
        given: Any = read(key[0]) if key else None
        if entry.kind == "many":
            layout.append(tuple(range(len(values), len(values) + len(given))))
            paths += [(key[0], i) for i in range(len(given))]
            values += given
        else:
            layout.append(None if given is None and entry.kind == "optional" else len(values))
            if layout[-1] is not None:
                paths.append((key[0] if key else None, None))
                values.append(given)
    _refuse_others(family, args, options, {path[0] for path in paths})
    attrs = family.attributes({n: read(by_name[n]) for n in family.op.attrs if n in by_name})
    flat = all(place == i for i, place in enumerate(layout))
    tensors = [path for path, v in zip(paths, values, strict=True) if isinstance(v, torch.Tensor)]
    return Filled(values, None if flat else tuple(layout), attrs, Rebuilt(args, options, tensors))


def _every_tensor(args: Sequence[Any], options: Mapping[str, Any]) -> Filled:
    """The arguments of a callable that is no op type: its tensors are its inputs, in order."""
    paths: list[tuple[Any, int | None]] = []
    values: list[Any] = []
    for key, value in (*enumerate(args), *options.items()):
        several = enumerate(value) if isinstance(value, list | tuple) else [(None, value)]
        found = [(i, v) for i, v in several if _is_tensor(v)]
        paths += [(key, i) for i, _ in found]
        values += [v for _, v in found]
    layout: tuple[Place, ...] = (tuple(range(len(values))),)
    return Filled(values, layout, {}, Rebuilt(args, options, paths))


class Rebuilt:
    """The arguments of a torch call with other tensors in their places."""

    def __init__(self, args: Sequence[Any], options: Mapping[str, Any], paths: Sequence[Any]):
        self.paths = paths
        taken = {key for key, _ in paths}
        self.args = [None if i in taken and _is_tensor(a) else a for i, a in enumerate(args)]
        self.options = {k: None if k in taken and _is_tensor(v) else v for k, v in options.items()}

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
    """Where each of torch's parameters stands: a position, or a keyword."""
    names = [theirs for theirs, _ in family.parameters]
    keys: dict[str, Any] = dict(zip(names, range(len(args)), strict=False))
    for key in options:
        name = SYNONYMS.get(key, key)
        if name in names:
            keys[name] = key
    return keys


def _refuse_others(
    family: Family, args: Sequence[Any], options: Mapping[str, Any], known: set[Any]
) -> None:
    for key, value in (*enumerate(args), *options.items()):
        if key not in known and isinstance(value, torch.Tensor) and value.requires_grad:
            raise PassedOverError(
                f"{family.type} is overridden, and was called with a differentiable tensor as its "
                f"argument {key!r}, for which the op type has no input, so that no rule covers it"
            )
