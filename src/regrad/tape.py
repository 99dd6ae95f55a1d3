"""Records and the tapes that hold them: data only, no behaviour of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regrad.registry import Op, Rule

# Where a parameter's tensors lie among the leaves: one index, several, or nowhere (None).
Place = int | tuple[int, ...] | None


class Record:
    """One executed op: ids, shapes and dtypes, and just the values that its rule names.

    It never holds a Tensor that no rule asked for, so a chain of additions keeps nothing.
    `inputs` and `outputs` are ids; `specs` are `(shape, dtype)` of the inputs.
    """

    __slots__ = (
        "attrs",
        "inputs",
        "layout",
        "op",
        "output_specs",
        "outputs",
        "rule",
        "specs",
        "xs",
        "y",
    )

    def __init__(
        self,
        op: Op,
        rule: Rule,
        attrs: dict[str, Any],
        inputs: tuple[int, ...],
        specs: tuple[tuple[Any, Any], ...],
        xs: Sequence[Any],
        outputs: int | tuple[int, ...],
        y: Any,
        output_specs: tuple[tuple[Any, Any], ...] = (),
        layout: tuple[Place, ...] | None = None,
    ) -> None:
        self.op = op
        self.rule = rule
        self.attrs = attrs
        self.inputs = inputs
        self.specs = specs
        self.xs = xs
        self.outputs = outputs
        self.y = y
        self.output_specs = output_specs
        self.layout = layout

    def argument(self, leaves: Sequence[Any], parameter: int) -> Any:
        """What belongs to a parameter among `leaves`: one item, a list, or None."""
        if self.layout is None:
            return leaves[parameter]
        place = self.layout[parameter]
        if isinstance(place, tuple):
            return [leaves[i] for i in place]
        return None if place is None else leaves[place]

    def detail(self, parameter: int, which: int) -> Any:
        """The shape (0) or dtype (1) of a parameter; a list of them for a sequence."""
        spec = self.argument(self.specs, parameter)
        return [s[which] for s in spec] if isinstance(spec, list) else spec and spec[which]

    def leaves(self, parameter: int, gradient: Any) -> Iterator[tuple[int, Any]]:
        """A parameter's gradient as `(leaf, gradient)`."""
        place = parameter if self.layout is None else self.layout[parameter]
        if isinstance(place, tuple):
            yield from zip(place, gradient, strict=True)
        elif place is not None:
            yield place, gradient

    def by_parameter(self, gradients: Sequence[Any]) -> Iterable[tuple[int, Any]]:
        """One gradient per leaf, regrouped as `(parameter, gradient)`."""
        if self.layout is None:
            return enumerate(gradients)
        return ((p, self.argument(gradients, p)) for p in range(len(self.layout)))


class Tape:
    """The records that lead from what is watched, oldest first.

    A *linear* tape refuses a record that is not linear in what it watches: forward mode
    transposes the backward pass, and only a linear map has a transpose.
    """

    __slots__ = ("linear", "records", "watched")

    def __init__(self, watched: Iterable[int] = (), linear: Any = None) -> None:
        self.watched: set[int] = set(watched)
        self.records: list[Record] = []
        self.linear = linear

    def close(self) -> None:
        """Watch nothing from now on (an asyncio task may still hold a copy of the state)."""
        self.watched = set()

    def wants(self, variable: Any) -> bool:
        """Whether reads of this Variable are watched (only `variable_grads` does)."""
        return False
