"""Containers of tensors: lists, tuples, dicts and whatever optree knows, opened and closed.

A list of plain numbers is one tensor; any other container is a container.
"""

from __future__ import annotations

from collections import UserDict, UserList
from collections.abc import Callable, ItemsView, Iterator, KeysView, Sequence, ValuesView
from types import FunctionType, ModuleType
from typing import Any

from regrad.dispatch import NUMBERS, is_tensor
from regrad.errors import ArgumentError, kind
from regrad.namespaces import is_array
from regrad.tensor import Tensor

Rebuild = Callable[[Sequence[Any]], Any]


def is_number_list(value: Any) -> bool:
    """Whether `value` is a (nested) list of plain numbers; an empty list is an empty container."""
    if not isinstance(value, list) or not value:
        return False
    return all(type(v) in NUMBERS or is_number_list(v) for v in value)


def only(leaves: Sequence[Any]) -> Any:
    """Closes the container that a single leaf is."""
    return leaves[0]


def flatten(value: Any) -> tuple[list[Any], Rebuild]:
    """The leaves of a container, and the function that puts others in their places."""
    return ([value], only) if type(value) is Tensor else opened(value)[:2]


def opened(
    value: Any, is_leaf: Callable[[Any], bool] | None = is_number_list
) -> tuple[list[Any], Rebuild, Any]:
    """As `flatten`, with the structure, which can be compared and hashed."""
    import optree

    leaves, spec = optree.tree_flatten(value, is_leaf=is_leaf)
    return leaves, lambda new: optree.tree_unflatten(spec, new), spec


def refuse_closed(value: Any, name: str, api: str) -> None:
    """Refuse objects that hold Tensors where only containers are opened."""
    if isinstance(value, Tensor):
        return
    for i, leaf in enumerate(opened(value)[0]):
        if is_closed(leaf):
            raise ArgumentError(f"{api}: {paths(value, name)[i]} is {kind(leaf)}, {CLOSED}")


CLOSED = (
    "which is not opened as a container, so the Tensors in it would not be seen. Pass them in a "
    "list, tuple, dict or named tuple, register the class by optree.register_pytree_node, or let f "
    "reach the object by its closure."
)


def is_closed(value: Any, depth: int = 3) -> bool:
    """Whether Tensors or arrays lie in an object that is no container here, or may come from it."""
    if is_tensor(value) or is_array(value) or isinstance(value, type | FunctionType | ModuleType):
        return False
    if isinstance(value, Iterator | KeysView | ValuesView | ItemsView):
        return True
    if isinstance(value, dict | UserDict):
        parts = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset | UserList):
        parts = list(value)
    else:
        parts = list(getattr(value, "__dict__", {}).values())
        parts += [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
    leaves = [leaf for part in parts for leaf in opened(part)[0]]
    return any(
        is_tensor(leaf) or is_array(leaf) or (depth > 0 and is_closed(leaf, depth - 1))
        for leaf in leaves
    )


def paths(value: Any, name: str) -> list[str]:
    """A name for each leaf: `x`, `x['w']`, `x[0].bias`."""
    import optree

    accessors = optree.tree_accessors(value, is_leaf=is_number_list)
    return [accessor.codify(name) for accessor in accessors]


def matched(values: Any, like: Any) -> list[Any]:
    """The parts of `values` that stand where `like` has leaves; ValueError if they do not fit.

    What a list of numbers is depends on `like`: two leaves, or one tensor of two elements.
    """
    if isinstance(like, Tensor):
        return [values]
    import optree

    spec = optree.tree_structure(like)
    return spec.flatten_up_to(values)
