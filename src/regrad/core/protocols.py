"""Protocols: what modules call of objects that later modules hand to them.

A guard is made in `regrad.autodiff`, a region in `regrad.transforms`, a node in `regrad.graph`.
`core` knows no more of them than what stands here, so that none of its imports points to a later
package, not even one for type checkers alone. Nothing is imported here, and so is in no circle:
Tensors, ops and tapes are `Any`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol


class OpLike(Protocol):
    """The declaration of an op (`core.registry.Op`), as far as its docstring tells it."""

    type: str
    inputs: Any
    elementwise: bool
    to_float: bool
    real: bool


class Overriding(Protocol):
    """The rule that a scope puts in force (`core.overrides.OpBinding`)."""

    depth: int
    once: bool  # whether the rule is for the first derivative alone

    def bind(self, op: Any, xs: Sequence[Any]) -> Any:
        """Return the rule for an op of `xs` that is being created, and count it."""


class GuardLike(Protocol):
    """Who watches over a custom function while it runs (`autodiff.guards.Guard`)."""

    tapes: Any  # those that are suspended meanwhile
    outer: Any  # the guard of the function inside which this one is called

    def check(self, op: Any, xs: Iterable[Any]) -> None:
        """Refuse inputs of an op that the function was not given."""


class RegionLike(Protocol):
    """One run of a compiled or repeated body (`transforms.region.Region`)."""

    kind: str
    around: Any  # the state outside
    tapes: Any  # what stands inside for the tapes outside
    traced: bool

    def enter(self, x: Any) -> Any:
        """Return the value that stands inside for a Tensor."""

    def array(self, value: Any) -> Any:
        """Return the value that stands inside for an array."""

    def did(self, *step: Any) -> None:
        """Take note of an op: its type, rule, inputs, attributes, result, and layout."""

    def refuse_read(self, x: Any) -> None:
        """Raise if the values of a Tensor from outside would become a part of a program."""


class NodeLike(Protocol):
    """An op in a graph (`graph.graph.Node`)."""

    op: Any
    attrs: Any
    xs: Any
    layout: Any  # where the inputs of each parameter lie among `xs`
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
    """A value that `variable_grads` may differentiate by (`autodiff.variables.Variable`)."""

    trainable: bool
