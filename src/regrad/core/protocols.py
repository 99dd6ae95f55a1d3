"""Protocols: the methods that core calls on objects of later packages.

`regrad.autodiff` makes guards, `regrad.transforms` regions, and `regrad.graph` nodes. `core` uses
only the attributes in this module. So none of its imports points to a later package, not even an
import for type checkers alone. This module imports nothing of regrad, and so is in no import cycle.
Tensors, ops and tapes are `Any`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol


class OpLike(Protocol):
    """The declaration of an op (`core.registry.Op`), as far as its docstring needs it."""

    type: str
    inputs: Any
    elementwise: bool
    to_float: bool
    real: bool


class Overriding(Protocol):
    """The rule that a scope applies (`core.overrides.OpBinding`)."""

    depth: int
    once: bool  # whether the rule is for the first derivative alone

    def bind(self, op: Any, xs: Sequence[Any]) -> Any:
        """Return the rule for a new op on `xs`, and count it."""


class GuardLike(Protocol):
    """Checks a custom function while it runs (`autodiff.guards.Guard`)."""

    tapes: Any  # the tapes that are suspended meanwhile
    outer: Any  # the guard of the enclosing custom function

    def check(self, op: Any, xs: Iterable[Any]) -> None:
        """Raise for inputs of an op that are not arguments of the function."""


class RegionLike(Protocol):
    """One run of a compiled or repeated body (`transforms.region.Region`)."""

    kind: str
    around: Any  # the state outside
    tapes: Any  # the inner counterparts of the outer tapes
    traced: bool

    def enter(self, x: Any) -> Any:
        """Return the inner value for an outer Tensor."""

    def array(self, value: Any) -> Any:
        """Return the inner value for an array."""

    def did(self, *step: Any) -> None:
        """Record an op: its type, rule, inputs, attributes, result, and layout."""

    def refuse_read(self, x: Any) -> None:
        """Raise if the values of an outer Tensor would become a part of a program."""


class NodeLike(Protocol):
    """An op in a graph (`graph.graph.Node`)."""

    op: Any
    attrs: Any
    xs: Any
    layout: Any  # the positions in `xs` of each parameter's inputs
    symbols: Any  # the outputs
    sized: Any

    def sources(self) -> Iterable[SymbolLike]:
        """Return the symbols that the op reads."""
        ...


class SymbolLike(Protocol):
    """An output of an op in a graph (`graph.graph.Symbol`)."""

    node: Any
    dtype: Any
    carries: bool
    content: Any
    relied: bool


class VariableLike(Protocol):
    """A variable of `variable_grads` (`autodiff.variables.Variable`)."""

    trainable: bool
