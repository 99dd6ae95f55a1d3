"""Containers of tensors, opened and closed: lists, tuples, dicts, and what optree or JAX knows.

A list of plain numbers is one tensor; any other container is a container.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from regrad.dispatch import NUMBERS
from regrad.pytrees import NAMESPACE, adopted
from regrad.tensor import Tensor

Rebuild = Callable[[Sequence[Any]], Any]


def is_number_list(value: Any) -> bool:
    """Whether `value` is a (nested) list of plain numbers."""
    if not isinstance(value, list):
        return False
    return all(type(v) in NUMBERS or is_number_list(v) for v in value)


def only(leaves: Sequence[Any]) -> Any:
    """Closes the container that a single leaf is."""
    return leaves[0]


def flatten(value: Any) -> tuple[list[Any], Rebuild]:
    """The leaves of a container, and the function that puts others in their places."""
    return ([value], only) if type(value) is Tensor else opened(value)[:2]


def opened(value: Any) -> tuple[list[Any], Rebuild, Any]:
    """As `flatten`, with the structure, which can be compared and hashed."""
    import optree

    leaves, spec = optree.tree_flatten(value, is_leaf=is_number_list, namespace=NAMESPACE)
    if adopted(leaves):
        return opened(value)
    return leaves, lambda new: optree.tree_unflatten(spec, new), spec


def paths(value: Any, name: str) -> list[str]:
    """A name for each leaf: `x`, `x['w']`, `x[0].bias`."""
    import optree

    accessors = optree.tree_accessors(value, is_leaf=is_number_list, namespace=NAMESPACE)
    return [accessor.codify(name) for accessor in accessors]


def matched(values: Any, like: Any) -> list[Any]:
    """The parts of `values` that stand where `like` has leaves; ValueError if they do not fit.

    What a list of numbers is depends on `like`: two leaves, or one tensor of two elements.
    """
    if isinstance(like, Tensor):
        return [values]
    import optree

    spec = optree.tree_structure(like, namespace=NAMESPACE)
    return spec.flatten_up_to(values)
