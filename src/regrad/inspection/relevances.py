"""The answer of a run that shares an output among inputs, and where shares were lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from regrad.core.reports import Table


class Loss(NamedTuple):
    """An op that did not pass on all relevance: a row of `Relevance.losses`.

    Attributes:
        path: The module that it ran in.
        op: Its op type, torch's function, or JAX's primitive.
        line: The line of the user's code.
        arrived: The relevance of its outputs.
        left: That of its inputs.
    """

    path: str
    op: str
    line: str
    arrived: float
    left: float

    @property
    def lost(self) -> float:
        """The relevance that was lost; below 0 if more left than arrived."""
        return self.arrived - self.left


@dataclass(frozen=True)
class Relevance:
    """The answer of `rules.lrp.relevance`.

    Attributes:
        inputs: The relevance of the inputs, as they were given: a tensor, a tuple or a dict. That
            of a token is the sum over its embedding. None for what is not differentiated.
        layers: That of the outputs of modules, by path.
        total: What there was to share: the explained output, for each example where it has one
            element for each, else one number. With a reference, the difference from that.
        missing: The total less the relevance of all inputs: what biases, constants and rules kept.
        losses: With `check="ops"`, the ops by how much they lost, the most first.
        used: The scope of overrides, with its `table()` and `untouched()`.
    """

    inputs: Any
    layers: dict[str, Any]
    total: Any
    missing: Any
    losses: tuple[Loss, ...] = ()
    used: Any = field(default=None, repr=False)

    def table(self) -> Table:
        """The losses as a table: module, op, relevance that arrived and that left, line."""
        rows = [
            (r.path, r.op, f"{r.arrived:.4g}", f"{r.left:.4g}", f"{r.lost:+.3g}", r.line)
            for r in self.losses
        ]
        return Table(("module", "op", "arrived", "left", "lost", "source line"), rows)


@dataclass(frozen=True)
class Attribution(Relevance):
    """The answer of `rules.attribution.attribute`: a `Relevance`, and these.

    Attributes:
        heads: The share of each head, by the path of the module that reads the heads.
        gradients: The gradients by the inputs (by the embeddings of tokens), averaged over the
            path.
        layer_gradients: The gradients at the outputs of the layers, by path, averaged over the
            path of inputs.
        layer_values: The outputs of the layers for `inputs`, by path.
    """

    heads: dict[str, Any] = field(default_factory=dict)
    gradients: Any = None
    layer_gradients: dict[str, Any] = field(default_factory=dict)
    layer_values: dict[str, Any] = field(default_factory=dict)
