"""The answer of a run that shares an output among inputs, and where shares were lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from regrad.core.reports import Table
from regrad.errors import ArgumentError


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


def by_name(inputs: Any) -> dict[Any, Any]:
    """Return inputs by the names of arguments, or by their places."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    return dict(enumerate(inputs if isinstance(inputs, tuple) else (inputs,)))


def halves(half: Any) -> list[Callable[[Any], Any]]:
    """Return two functions of an array of the batch: the part of the inputs, of the references."""

    def cut(part: slice, x: Any) -> Any:
        return x[part] if getattr(x, "shape", ())[:1] == (2 * half,) else x

    return [partial(cut, slice(half)), partial(cut, slice(half, None))]


def check_halves(total: Any, apart: Sequence[Any], eps: float) -> None:
    """Refuse a model for which inputs and references in one batch are not what they are apart."""
    alone, scale = apart[0] - apart[1], max(abs(x).max() for x in apart)
    if alone.shape != total.shape or (abs(alone - total) > eps**0.5 * scale).any():
        raise ArgumentError(
            "relevance: inputs and references run in one batch. There the target differs by "
            f"{total.tolist()!s:.50}, and by {alone.tolist()!s:.50} where they run apart. With "
            "reference=, the batch must be the first axis of each input and of what the target "
            "reads, and no example may depend on another one. Move the batch to the first axis; "
            "call model.eval() if the model is in training mode"
        )


def balance(total: Any, shares: Sequence[Any]) -> tuple[Any, Any]:
    """Return the relevance to share, for each example where it can be, and what is missing."""
    alike = total.ndim == 1 and all(r.shape[:1] == total.shape for r in shares)
    total = total if alike else total.sum()
    return total, total - sum(r.reshape(*total.shape, -1).sum(-1) for r in shares)


def most_first(rows: Iterable[Loss], missing: float) -> tuple[Loss, ...]:
    """Return ops by how much they lost, and with them what is missing and none of them lost."""
    rows = list(rows)
    rest = missing - sum(row.lost for row in rows)
    rows.append(Loss("", "what is not seen (in place)", "", rest, 0.0))
    return tuple(sorted(rows, key=lambda row: -abs(row.lost)))


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
