"""Marks: how the result of a compiled program says which of its traces it belongs to."""

from __future__ import annotations

import operator
import weakref
from typing import TYPE_CHECKING, Any

from regrad.errors import ArgumentError

if TYPE_CHECKING:
    from regrad.transforms.program import Trace


class Mark:
    """Stands before the results of a program, and says to which trace they belong.

    To JAX it is a container of nothing, which is a part of every call. So it is not made anew, but
    found, in one step of C: its structure is a dict that has it under `()`, the empty contents.
    JAX keeps the structure for good. A reference must not keep the user's function with it.
    """

    __slots__ = ("structure", "trace")

    def __init__(self, trace: Trace) -> None:
        self.trace = weakref.ref(trace)
        self.structure = _Structure({(): self})

    def open(self) -> tuple[tuple[()], _Structure]:
        return (), self.structure


class _Structure(dict[tuple[()], Mark]):
    """The structure of one mark, and of no other."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return id(self)


def find_jax() -> Any:
    """JAX itself, or an error that says how to get it."""
    try:
        import jax
    except ImportError:
        raise ArgumentError(
            "compiling needs JAX, which is not installed: pip install 'regrad[jax]'. Without it "
            "the same function runs eagerly, on NumPy."
        ) from None
    if not _KNOWN:
        jax.tree_util.register_pytree_node(Mark, Mark.open, operator.getitem)
        _KNOWN.append(True)
    return jax


_KNOWN: list[bool] = []
