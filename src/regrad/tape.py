"""Records and the tapes that hold them: data only, no behaviour of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from regrad.registry import OPS
from regrad.ruleforms import OpView
from regrad.tensors import wrap

if TYPE_CHECKING:
    from regrad.registry import Op
    from regrad.ruleforms import Rule
    from regrad.tensors import Tensor

# Where a parameter's tensors lie among the leaves: one index, several, or nowhere (None).
Place = int | tuple[int, ...] | None


class Record:
    """One executed op: ids, shapes and dtypes, and just the values that its rule names.

    It never holds a Tensor that no rule asked for, so a chain of additions keeps nothing.
    `inputs` are ids, `outputs` one id or (for several outputs) a tuple of them; `specs` are
    `(shape, dtype)` of the inputs.
    """

    __slots__ = ("attrs", "inputs", "op", "outputs", "rule", "specs", "xs", "y")

    plain = True  # one output, and one tensor per parameter

    def __init__(
        self,
        op: Op,
        rule: Rule,
        attrs: dict[str, Any],
        inputs: tuple[int, ...],
        specs: Sequence[tuple[Any, Any]],
        xs: Sequence[Any],
        outputs: Any,
        y: Any,
    ) -> None:
        self.op = op
        self.rule = rule
        self.attrs = attrs
        self.inputs = inputs
        self.specs = specs
        self.xs = xs
        self.outputs = outputs
        self.y = y

    def argument(self, leaves: Sequence[Any], parameter: int) -> Any:
        """What belongs to a parameter among `leaves`: one item, a list, or None."""
        return leaves[parameter]

    def detail(self, parameter: int, which: int) -> Any:
        """The shape (0) or dtype (1) of a parameter; a list of them for a sequence."""
        return self.specs[parameter][which]

    def replace(self, x: Tensor, other: Tensor) -> None:
        """Keep another Tensor for the rule wherever x is kept."""
        self.xs = [other if kept is x else kept for kept in self.xs]
        if isinstance(self.y, tuple):
            self.y = tuple([other if kept is x else kept for kept in self.y])
        elif self.y is x:
            self.y = other

    def view(self) -> OpView:
        """What a rule in TensorFlow's form sees."""
        return OpView(self)

    def wanted(self, watched: set[int]) -> list[int]:
        """The parameters through which a watched input is reached."""
        return [p for p, i in enumerate(self.inputs) if i in watched]

    def by_parameter(self, gradients: Sequence[Any]) -> Iterable[tuple[int, Any]]:
        """One gradient per leaf, regrouped as `(parameter, gradient)`."""
        return enumerate(gradients)


class GroupedRecord(Record):
    """A record of an op with several outputs, or with sequences or optional tensors as inputs."""

    __slots__ = ("layout", "output_specs", "symbolic")

    plain = False

    layout: tuple[Place, ...]
    output_specs: Sequence[tuple[Any, Any]]
    symbolic: Sequence[Any] | None  # the outputs, of a graph

    def argument(self, leaves: Sequence[Any], parameter: int) -> Any:
        return placed(leaves, self.layout[parameter])

    def detail(self, parameter: int, which: int) -> Any:
        spec = self.argument(self.specs, parameter)
        return [s[which] for s in spec] if isinstance(spec, list) else spec and spec[which]

    def unused(self, index: int) -> Any:
        """The gradient that arrives at an output which nobody used: zeros."""
        if self.symbolic is not None:
            return OPS["ZerosLike"].function(self.symbolic[index])
        return wrap(np.zeros(*self.output_specs[index]))

    def wanted(self, watched: set[int]) -> list[int]:
        return [
            p
            for p, place in enumerate(self.layout)
            if any(self.inputs[i] in watched for i in positions(place))
        ]

    def by_parameter(self, gradients: Sequence[Any]) -> Iterable[tuple[int, Any]]:
        return [(p, self.argument(gradients, p)) for p in range(len(self.layout))]


def positions(place: Place) -> tuple[int, ...]:
    """The leaves at a place."""
    if isinstance(place, tuple):
        return place
    return () if place is None else (place,)


def placed(leaves: Sequence[Any], place: Place) -> Any:
    """What of the leaves one parameter gets: one, a list of them, or None."""
    if isinstance(place, tuple):
        return [leaves[i] for i in place]
    return None if place is None else leaves[place]


class Tape:
    """The records that lead from what is watched, oldest first."""

    __slots__ = ("lost", "records", "watched")

    plain = True  # admits any record and keeps what the rules name
    keeps_all = False  # its records keep all inputs and outputs, for inspection

    def __init__(self, watched: Iterable[int] = ()) -> None:
        self.watched: set[int] = set(watched)
        self.records: list[Record] = []
        self.lost: set[int] | None = None  # ids of what left a custom function by a Variable

    def close(self) -> set[int]:
        """Watch nothing from now on (an asyncio task may still hold a copy of the state).

        What was watched so far is returned, for the walk.
        """
        watched, self.watched = self.watched, set()
        return watched

    def admit(self, op: Op, rule: Rule, wanted: frozenset[int]) -> bool:
        """Whether to record an op; an error refuses one that this tape cannot do with."""
        return True

    def read_plainly(self) -> None:
        """A watched tensor was read as a plain number (`float(x)`, `x.item()`, `bool(x)`)."""

    def wants(self, variable: Any) -> bool:
        """Whether reads of this Variable are watched (only `variable_grads` does)."""
        return False
