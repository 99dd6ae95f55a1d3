"""Custom functions in a graph: one node with a gradient of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from regrad.core.registry import Input, Op
from regrad.core.rule import Rule
from regrad.core.tape import Record
from regrad.core.tensor import Tensor
from regrad.errors import GradientError
from regrad.graph.graph import PLACEHOLDER, Symbol, home, put_down

# The values go in with the inputs, so that the op runs after what computes them; the gradient
# goes by the inputs alone.
IN_GRAPH = Op(
    "IdentityN",
    "identity_n",
    lambda xp, ys, xs: tuple(ys),
    [Input("ys", "many"), Input("xs", "many")],
    several=True,
)


class InGraph(Rule):
    """The rule of a custom op in a graph."""

    def __init__(
        self,
        name: str,
        answer: Callable[[tuple[Tensor, ...], Sequence[Any]], Sequence[Tensor | None]],
        closed: list[Symbol],
        input_name: Callable[[int], str],
        function: Callable[..., Any],
        asks_needs: bool,
    ) -> None:
        self.name = name
        self.function: Any = function
        self.asks_needs = asks_needs
        self.answer = answer
        self.closed = closed  # what f used without taking it as an input
        self.names = input_name

    def linear_in(self, wanted: frozenset[int]) -> bool:
        return False  # nobody can know

    def input_name(self, leaf: int) -> str:
        return self.names(leaf)

    def sources(self, node: Any) -> list[Symbol]:
        """Return the inputs that the gradient depends on, and values that must stay constant."""
        places = node.layout[1]
        return [node.xs[i]._data for i in places] + self.closed

    def check_path(self, node: Any, watched: set[int]) -> None:
        """Refuse to differentiate by what f closes over (its gradient would be lost)."""
        for symbol in self.closed:
            if symbol.id in watched:
                raise GradientError(
                    f"custom gradient: {self.name} (the op {node.name!r}) closes over "
                    f"{symbol.name!r}, which is being differentiated; its gradient would be lost. "
                    "Pass it as an input of its own, for which the gradient function returns a "
                    "gradient too, or use stop_gradient on it."
                )

    def pull(self, record: Record, dy: Any, wanted: Sequence[int]) -> Iterable[tuple[int, Any]]:
        (_, wanted) = record.by_parameter(record.inputs)
        return [(0, None), (1, list(self.answer(dy, wanted[1])))]


def custom_node(
    name: str,
    ys: Sequence[Tensor],
    xs: Sequence[Tensor],
    answer: Callable[[tuple[Tensor, ...], Sequence[Any]], Sequence[Tensor | None]],
    mark: int,
    input_name: Callable[[int], str],
    function: Callable[..., Any],
    *,
    taped: bool = False,
    asks_needs: bool = False,
) -> tuple[Tensor, ...]:
    """Values computed from inputs, as outputs of one node with a gradient of its own.

    What has an id above `mark` was made by the function itself. `input_name` returns the name of
    an input for messages, which name the gradient function, too. `answer` takes what arrives, and
    (with `asks_needs`) something true for each input whose gradient is wanted. With `taped` the
    node goes on the open tapes too.
    """
    graph = home([*ys, *xs])
    leaves = tuple([graph.entering(x) for x in (*ys, *xs)])
    given = leaves[len(ys) :]
    count = len(ys)
    closed = _closed_over(leaves[:count], given, mark)
    named = lambda leaf: input_name(leaf - count)  # noqa: E731
    rule = InGraph(name, answer, closed, named, function, asks_needs)
    specs = [y._data.spec for y in leaves[: len(ys)]]
    layout = tuple(range(len(ys))), tuple(range(len(ys), len(leaves)))
    if taped:
        return put_down(graph, IN_GRAPH, rule, leaves, {}, layout, specs)
    return graph.add(IN_GRAPH, rule, leaves, {}, layout, specs)


def _closed_over(ys: Sequence[Tensor], xs: Sequence[Tensor], mark: int) -> list[Symbol]:
    """The symbols that the function used, but neither made nor was given."""
    given = {x._data.id for x in xs}
    found: dict[int, Symbol] = {}
    seen: set[int] = set()
    stack: list[Symbol] = [y._data for y in ys]
    while stack:
        symbol = stack.pop()
        if symbol.id in seen or symbol.id in given:
            continue
        seen.add(symbol.id)
        if symbol.id > mark and symbol.node.op is not PLACEHOLDER:
            stack += symbol.node.sources()
        else:
            found[symbol.id] = symbol
    return list(found.values())
