"""The mapping from a torch call's arguments to the parameters of an op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from regrad.core.foreign import lender, takes_all
from regrad.core.rule import free
from regrad.core.tape import Place
from regrad.errors import PassedOverError, RuleError
from regrad.torch.host import without_base
from regrad.torch.host.running import forms_of
from regrad.torch.optypes import CHANNELS_LAST, LACKS, SYNONYMS, Family

MISSING: Any = object()


class Filled(NamedTuple):
    """A call's arguments, by the op's parameters.

    `values` has the arguments of tensor parameters, leaf by leaf. `layout` has the leaves of each
    parameter (None: one leaf each). `rebuild(tensors)` returns the arguments of the torch call with
    other tensors in place of its tensors.
    """

    values: list[Any]
    layout: tuple[Place, ...] | None
    attrs: dict[str, Any]
    rebuild: Callable[[Sequence[torch.Tensor]], tuple[list[Any], dict[str, Any]]]
    names: Sequence[str | None] = ()  # the names of leaves, if the family has no parameters

    def bind(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of tensors that calls `function` with rebuilt arguments."""
        if self.rebuild is _as_arguments:
            return function

        def call(*tensors: torch.Tensor) -> Any:
            args, options = self.rebuild(tensors)
            y = function(*args, **options)
            return without_base(y, tensors) if self.names else y

        return call


def fill(family: Family, function: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Filled:
    """Sort the arguments of a torch call; raise for a tensor without a parameter."""
    if len(args) == 1 and not options and family.op.single:
        return Filled([*args], None, family.attributes({}), _as_arguments)
    if not family.parameters:
        return fill_by_place(args, options, function)
    held, keys = _by_key(args, options), _keys(family, args, options)
    by_name = {ours: keys[theirs] for theirs, ours in family.parameters if ours and theirs in keys}
    given = {name: held[k] for name, k in by_name.items()}
    leaves: list[tuple[Any, tuple[Any, int | None]]] = []  # a value, and its position
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
    _refuse_others(family, held, {key for _, (key, _) in leaves})
    attrs = family.attributes({name: given[name] for name in family.op.attrs if name in given})
    flat = all(place == i for i, place in enumerate(layout))
    rebuild = ArgumentRebuilder(held, len(args), paths)
    return Filled([value for value, _ in leaves], None if flat else tuple(layout), attrs, rebuild)


def _as_arguments(tensors: Sequence[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
    return [*tensors], {}


def fill_by_place(args: Sequence[Any], options: Mapping[str, Any], function: Any = None) -> Filled:
    """Use all tensors among the arguments as inputs, in order, also inside sequences.

    If a torch function is given, the order is the order of its parameters.
    """
    leaves: list[tuple[torch.Tensor, tuple[Any, int | None]]] = []
    held = _by_key(args, options)
    form, names = ({}, {}) if function is None else _form_of(function, held)
    held = {key: held[key] for key in names} if names else held
    for key, value in held.items():
        if isinstance(value, torch.Tensor):
            leaves.append((value, (key, None)))
        elif isinstance(value, list | tuple):
            leaves += [(v, (key, i)) for i, v in enumerate(value) if isinstance(v, torch.Tensor)]
    layout, paths = (tuple(range(len(leaves))),), [path for _, path in leaves]
    rebuild, values = ArgumentRebuilder(held, len(args), paths), [value for value, _ in leaves]
    if not names:
        return Filled(values, layout, {}, rebuild, [None] * len(values))
    known = [names[key] if i is None else None for key, i in paths]
    every, taken = form | {names[key]: held[key] for key in names}, {names[key] for key, _ in paths}
    attrs = {free(name): x for name, x in every.items() if name not in taken}
    return Filled(values, layout, attrs, rebuild, known)


def _form_of(function: Any, held: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[Any, str]]:
    """Return a function's parameters with their defaults, and the parameter of each argument."""
    for form in forms_of(function):
        at, order = dict(enumerate(form)), [*form]
        names: Any = {k: at.get(k, k if k in form else SYNONYMS.get(k)) for k in held}
        if {*names.values()} <= form.keys():
            return form, dict(sorted(names.items(), key=lambda item: order.index(item[1])))
    if sum(isinstance(k, str) and isinstance(x, torch.Tensor) for k, x in held.items()) > 1:
        raise PassedOverError(
            f"{function.__name__} has a rule, and regrad does not know the order of the keywords "
            "in this call. Pass the tensors by position."
        )
    return {}, {}


class ArgumentRebuilder:
    """Rebuilds the arguments of a torch call with other tensors."""

    def __init__(self, held: Mapping[Any, Any], count: int, paths: Sequence[Any]):
        self.count = count
        self.paths = paths
        self.held: dict[Any, Any] = dict(held)
        for key, _ in paths:
            if isinstance(held[key], torch.Tensor):
                self.held[key] = None

    def __call__(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        held = dict(self.held)
        for (key, index), tensor in zip(self.paths, tensors, strict=True):
            if index is None:
                held[key] = tensor
            else:
                held[key] = [*held[key]]
                held[key][index] = tensor
        return [held.pop(i) for i in range(self.count)], held


def _by_key(args: Sequence[Any], options: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the arguments of a call by position or keyword."""
    return {**dict(enumerate(args)), **options}


def _keys(family: Family, args: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the position or keyword of each of torch's parameters."""
    names = [theirs for theirs, _ in family.parameters]
    keys: dict[str, Any] = dict(zip(names, range(len(args)), strict=False))
    for key in options:
        name = key if key in names else SYNONYMS.get(key, key)
        if name in names:
            keys[name] = key
    return keys


def refuse_layout(value: Any, op_type: str) -> None:
    """Raise for the rule of a regrad op whose images have another layout than torch's."""
    own = lender(value) or (op_type if takes_all(value) else None)
    if own in CHANNELS_LAST:
        raise RuleError(
            f"the rule of {own!r} is for images with the channels last, but torch has them first. "
            "Write the rule with torch's functions, as in torch.nn.grad, and name the values that "
            "it needs."
        )


def refuse_unknown(family: Family, args: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Raise for the rule of a regrad op if the call has a parameter without one: `elu(x, 2.0)`."""
    held, keys = _by_key(args, options), _keys(family, args, options)
    for name, default in LACKS.get(family.type, {}).items():
        key = keys.get(name)
        value = default if key is None else held[key]
        if value != default:
            raise RuleError(
                f"the rule of {family.type!r} is for regrad's op, which has no {name!r}, but this "
                f"call passes {value!r:.40}. Write a function as the rule, which uses it."
            )


def _refuse_others(family: Family, held: Mapping[Any, Any], known: set[Any]) -> None:
    for key, value in held.items():
        if key not in known and isinstance(value, torch.Tensor) and value.requires_grad:
            raise PassedOverError(
                f"{family.type} is overridden and was called with a differentiable tensor as its "
                f"argument {key!r}. The op type has no input for it, so no rule covers it"
            )
