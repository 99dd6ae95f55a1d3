"""Classes that users have registered as containers, with optree or with JAX.

optree opens the classes in its global namespace and in the namespace "regrad". A class that is
registered with JAX is registered with optree when regrad gets the first object of the class.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from regrad.core.tensor import Tensor
from regrad.errors import ArgumentError

NAMESPACE = "regrad"
# the types of most leaves
LEAVES: set[type[Any]] = {Tensor, np.ndarray, bool, int, float, complex, str, list}


def adopted(leaves: Iterable[Any]) -> bool:
    """Register the classes that JAX opens; return whether any of these objects has such a class."""
    strange = [x for x in leaves if type(x) not in LEAVES and not isinstance(x, Tensor)]
    jax = sys.modules.get("jax") if strange else None
    registry = getattr(getattr(jax, "tree_util", None), "default_registry", None)
    if registry is None:
        return False
    import optree

    new: Any = {type(x) for x in strange if registry.flatten_one_level(x) is not None}
    by = {"path_entry_type": optree.GetAttrEntry, "namespace": NAMESPACE}
    for kind in new:
        optree.register_pytree_node(kind, _open, _close, **by)
    return bool(new)


def _open(value: Any) -> Any:
    import jax

    pairs, treedef = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda x: x is not value)
    names = [str(getattr(keys[0], "name", getattr(keys[0], "key", keys[0]))) for keys, _ in pairs]
    return [child for _, child in pairs], Frame(treedef), names


def _close(frame: Any, children: Any) -> Any:
    return frame.treedef.unflatten(children)


class Frame:
    """An object without its children: its class, and its static fields."""

    def __init__(self, treedef: Any) -> None:
        self.treedef = treedef

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frame) and self._key() == other._key()

    def __hash__(self) -> int:
        try:
            return hash(self._key())
        except TypeError as error:
            raise ArgumentError(
                f"the static fields of {self.treedef} are part of the cache key of a compiled "
                f"program, so they must be hashable: {error}"
            ) from None

    def __repr__(self) -> str:
        return repr(self.treedef)

    def _key(self) -> Any:
        return self.treedef, exactly(self.treedef.node_data())


def exactly(value: Any) -> Any:
    """Return a static value as part of a key: by type and exact value, at all levels.

    `1` differs from `True`, and `0.0` from `-0.0`. NaN equals itself. Dicts of different order
    differ.
    """
    if isinstance(value, tuple | frozenset):
        parts = map(exactly, value)
        return type(value), (frozenset if isinstance(value, frozenset) else tuple)(parts)
    if isinstance(value, dict):  # (of a hashable class; its order is part of the value)
        return type(value), value, tuple([(exactly(k), exactly(v)) for k, v in value.items()])
    if isinstance(value, float | complex | np.inexact):
        return type(value), repr(value)
    return type(value), value
