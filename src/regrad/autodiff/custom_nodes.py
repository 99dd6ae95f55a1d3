"""Custom functions in a graph: one node with a custom gradient."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from heapq import heappop, heappush
from typing import Any

from regrad.core.registry import Input, Op
from regrad.core.rule import Rule
from regrad.core.tape import Record, cuts
from regrad.core.tensor import Tensor
from regrad.errors import GradientError
from regrad.graph.graph import PLACEHOLDER, Node, Symbol, home, put_down

# The values are inputs as well, so that the op runs after their computation. The gradient goes
# only to the other inputs.
IN_GRAPH = Op(
    "IdentityN",
    "identity_n",
    lambda xp, ys, xs: tuple(ys),
    [Input("ys", "many"), Input("xs", "many")],
    several=True,
)


class PathRule(Rule):
    """A rule that decides which outputs of its node depend on which inputs."""

    def linear_in(self, wanted: frozenset[int]) -> bool:
        return False  # (unknown before the run)

    def sources(self, node: Node, used: Container[int]) -> Iterable[Symbol]:
        """Return the inputs on which the used outputs (given by id) depend."""
        raise NotImplementedError

    def reached(self, node: Node, used: Container[int], watched: set[int]) -> Iterable[int]:
        """Return the ids of the used outputs that depend on a watched input."""
        raise NotImplementedError


def reaching(
    ys: Iterable[Symbol], ends: Callable[[Symbol], bool] = lambda symbol: False,
    seen_as: Callable[[Node], Node] = lambda node: node,
) -> tuple[list[Node], dict[int, Symbol]]:  # fmt: skip
    """Return the nodes on a gradient path to ys, in order, and the symbols on these paths.

    A path ends at a node that no gradient passes through, and at a symbol for which `ends` is true.
    """
    used: dict[int, Symbol] = {}
    nodes: dict[int, Node] = {}
    heap: list[int] = []  # negated numbers of nodes: all readers of a node come before it

    def use(symbols: Iterable[Symbol]) -> None:
        for symbol in symbols:
            used[symbol.id] = symbol
            node = symbol.node
            if node.number not in nodes and not ends(symbol):
                nodes[node.number] = node
                heappush(heap, -node.number)

    use(ys)
    while heap:
        node = seen_as(nodes[-heappop(heap)])
        rule = node.rule
        if isinstance(rule, PathRule):
            use(rule.sources(node, used))
        elif not cuts(rule, node.attrs, node.xs):
            use(node.sources())
    return [nodes[number] for number in sorted(nodes)], used


class InGraph(PathRule):
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
        self.closed = closed  # the symbols that f used, but did not take as inputs
        self.names = input_name

    def input_name(self, leaf: int) -> str:
        return self.names(leaf)

    def sources(self, node: Node, used: Container[int]) -> list[Symbol]:
        """Return the inputs that the gradient depends on, and values that must stay constant."""
        places: Any = node.layout[1]
        return [node.xs[i]._data for i in places] + self.closed

    def reached(self, node: Node, used: Container[int], watched: set[int]) -> Iterable[int]:
        """Raise if f closes over a watched symbol, because its gradient would be lost."""
        for symbol in self.closed:
            if symbol.id in watched:
                raise GradientError(
                    f"custom gradient: {self.name} (the op {node.name!r}) closes over "
                    f"{symbol.name!r}, which is being differentiated; its gradient would be lost. "
                    "Pass it as a separate input, for which the gradient function also returns a "
                    "gradient, or use stop_gradient on it."
                )
        return [] if watched.isdisjoint(node.inputs) else [s.id for s in node.symbols]

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
    """Return computed values as outputs of one node with a custom gradient.

    The function itself made the values with an id above `mark`. `input_name` returns the name of
    an input for messages, which also name the gradient function. `answer` takes the incoming
    gradients, and (with `asks_needs`) a true value for each input whose gradient is needed. With
    `taped` the node goes on the open tapes, too.
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
    """Return the symbols that the function used, but that it neither made nor took as inputs."""
    given = {x._data.id for x in xs}

    def is_outside(symbol: Symbol) -> bool:
        return symbol.id <= mark or symbol.node.op is PLACEHOLDER

    _, used = reaching([y._data for y in ys], lambda s: s.id in given or is_outside(s))
    return [s for s in used.values() if s.id not in given and is_outside(s)]
