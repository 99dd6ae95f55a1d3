"""The result of a run that shares an output among inputs, and the ops that lost shares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from regrad.core.reports import Table


class Loss(NamedTuple):
    """An op that did not pass on all relevance: a row of `Relevance.losses`.

    Attributes:
        path: The module in which it ran.
        op: Its op type, PyTorch function, or JAX primitive.
        line: The line of the user's code.
        arrived: The relevance of its outputs.
        left: The relevance of its inputs.
    """

    path: str
    op: str
    line: str
    arrived: float
    left: float

    @property
    def lost(self) -> float:
        """The relevance that was lost; negative if more left than arrived."""
        return self.arrived - self.left


@dataclass(frozen=True)
class Relevance:
    """The result of `rules.lrp.relevance`.

    Attributes:
        inputs: The relevance of the inputs, in their original form: a tensor, a tuple or a dict.
            The relevance of a token is the sum over its embedding. None for inputs that are not
            differentiated.
        layers: The relevance of the outputs of modules, by path.
        total: The relevance to share: the explained output, per example if the output has one
            element per example, else one number. With a reference, the difference from the
            reference's output.
        missing: The total minus the relevance of all inputs: the part that biases, constants and
            rules kept.
        losses: With `check="ops"`, the ops sorted by their loss of relevance, largest first.
        used: The scope of overrides, with its `table()` and `untouched()`.
    """

    inputs: Any
    layers: dict[str, Any]
    total: Any
    missing: Any
    losses: tuple[Loss, ...] = ()
    used: Any = field(default=None, repr=False)

    def table(self) -> Table:
        """Return the losses as a table: module, op, relevance that arrived and that left, line."""
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
