"""Graphs as a table, as a picture, and as a source in Graphviz's language."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

from regrad.core.bindings import CountedRule
from regrad.core.rule import NoGradient, NoRule, place
from regrad.core.tensor import TensorLike
from regrad.errors import printable
from regrad.graph.graph import CONST, Node, OpGraph, Symbol
from regrad.graph.plan import needed
from regrad.inspection.drawings import Arrow, Box, BoxKind, Drawing
from regrad.v1.graph.static_shapes import TensorShape
from regrad.v1.graph.tensors import node_of

# -- texts of ops --------------------------------------------------------------------------------


def is_overridden(node: Node) -> bool:
    """Return whether a `gradient_override_map` set the rule of an op."""
    return isinstance(node.rule, CountedRule)


def rule_name(node: Node) -> str:
    """Return the name of an op's rule, `built in`, or `none` for ops without a gradient."""
    rule = node.rule
    if isinstance(rule, NoGradient):
        return "none"
    if isinstance(rule, NoRule):
        return "missing"
    if rule is node.op.rule:
        return "built in"
    return rule.name or "none"


def _shape(symbol: Symbol) -> str:
    return str(TensorShape(symbol.shape))


def _dtype(symbol: Symbol) -> str:
    return "string" if symbol.dtype.kind == "O" else symbol.dtype.name


def _outputs(node: Node) -> str:
    return ", ".join(f"{_dtype(s)} {_shape(s)}" for s in node.symbols)


def _select(graph: OpGraph, of: TensorLike) -> list[Node]:
    """Return all ops of a graph, or only the ops that `of` needs."""
    listed = of if isinstance(of, list | tuple) else [of]
    return graph.nodes if of is None else needed(map(node_of, listed), set())


# -- the table -----------------------------------------------------------------------------------

HEADER = ("name", "type", "output", "rule")


def summary(graph: OpGraph, of: TensorLike = None) -> str:
    """Return a table of the ops: name, type, dtype and shape of the output, and rule.

    Args:
        of: Tensors or ops. Only the ops that they need are listed.

    Rules that a `gradient_override_map` set are marked with `*`. Control characters in names are
    escaped.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default() as g:
    ...     x = tf.placeholder(tf.float32, [None, 2], name="x")
    ...     with g.gradient_override_map({"Sign": "Identity"}):
    ...         y = tf.sign(x)
    >>> print(g.summary())
    name  type         output          rule
    x     Placeholder  float32 (?, 2)  none
    Sign  Sign         float32 (?, 2)  * Identity
    2 ops, 1 overridden (*)
    """
    nodes = _select(graph, of)
    rows = [HEADER, *map(_row, nodes)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    count = sum(map(is_overridden, nodes))
    lines.append(f"{len(nodes)} ops, {count} overridden (*)")
    return "\n".join(lines)


def _row(node: Node) -> tuple[str, str, str, str]:
    mark = "* " if is_overridden(node) else ""
    return node.name, printable(_type(node)), _outputs(node), mark + printable(rule_name(node))


def _type(node: Node) -> str:
    return node.op.type.lstrip("_")


# -- the picture ---------------------------------------------------------------------------------

KINDS: dict[str, BoxKind] = {"Placeholder": "input", "VariableV2": "variable", "Const": "constant"}


def draw(graph: OpGraph, of: TensorLike = None, initializers: bool = False) -> Drawing:
    """Return the graph as a `Drawing`, with `svg` (by Graphviz) and `html` (an interactive page).

    Args:
        of: Tensors or ops. Only the ops that they need are drawn, by default all ops.
        initializers: Whether to draw the ops that only initialize Variables, too.

    Name scopes are boxes. As many boxes are open as keep the picture legible. An op shows its name,
    its type (if it differs from the name), and the dtype and shape of its output. Constants of one
    element show the element. An op that a `gradient_override_map` bound is orange and shows the
    name of its rule.
    """
    nodes = _select(graph, of)
    if of is None and not initializers:
        nodes = _without_initializers(nodes)
    scopes = {scope for node in nodes for scope in _scopes_of(node.name)}
    names = {node.name for node in nodes}
    return Drawing(
        tuple(_box(node, scopes) for node in nodes),
        tuple(arrow for arrow in _arrows(nodes) if arrow.source in names),
        "graph",
    )


def to_dot(graph: OpGraph, of: TensorLike = None) -> str:
    """Return the source of a picture of the graph for the program `dot`, with all scopes open.

    Args:
        of: Tensors or ops. Only the ops that they need are drawn, by default all ops.

    See `draw` for the contents. Control dependencies are dashed.
    """
    return draw(graph, of, initializers=True).dot()


def to_svg(
    graph: OpGraph, path: str | os.PathLike[str] | None = None, of: TensorLike = None
) -> str:
    """Return the picture of `draw` as SVG, and write it to `path` if the caller passes one.

    Args:
        path: A file to write. The file is replaced atomically.
        of: Tensors or ops. Only the ops that they need are drawn, by default all but initializers.

    Raises ImportError, which names the package to install, if the package `graphviz` or the program
    `dot` is missing.
    """
    return draw(graph, of).svg(path)


def _without_initializers(nodes: Sequence[Node]) -> list[Node]:
    """Return the ops without the ops that only initialize Variables."""
    takers: dict[Node, list[Node]] = {node: [] for node in nodes}
    for node in nodes:
        for source in _sources(node):
            takers.setdefault(source, []).append(node)
    hidden = {
        node for node in nodes
        if node.op.type == "Assign" and node.name == f"{_sources(node)[0].name}/Assign"
    }  # fmt: skip
    for node in reversed(nodes):  # (an op comes after its inputs)
        used = takers[node]
        if used and hidden.issuperset(used) and node.op.type not in ("VariableV2", "Placeholder"):
            hidden.add(node)
    for node in nodes:  # ops that run all initializers
        sources = _sources(node)
        if node.op.type == "NoOp" and sources and hidden.issuperset(sources):
            hidden.add(node)
    return [node for node in nodes if node not in hidden]


def _sources(node: Node) -> list[Node]:
    return [*[symbol.node for symbol in node.sources()], *node.control]


def _box(node: Node, scopes: set[str]) -> Box:
    lines = dict.fromkeys([node.name.rpartition("/")[2], _type(node), _outputs(node), _value(node)])
    kind = KINDS.get(node.op.type, "op")
    if is_overridden(node):
        lines[f"rule: {rule_name(node)}"] = None
        kind = "override"
    # The op of a variable belongs to the scope of the same name.
    scope = node.name if node.name in scopes else node.name.rpartition("/")[0]
    details = {"type": _type(node), "output": _outputs(node), "rule": rule_name(node)}
    if node.rule.function is not None and kind == "override":
        details["source"] = place(node.rule.function)
    return Box(node.name, tuple(lines), tuple(scope.split("/")) if scope else (), kind, details)


def _scopes_of(name: str) -> Iterator[str]:
    """Return the scopes of an op's name, such as `a` and `a/b` for `a/b/c`."""
    parts = name.split("/")
    return ("/".join(parts[:i]) for i in range(1, len(parts)))


def _value(node: Node) -> str:
    """Return the text of the value of a constant of one element."""
    if node.op is not CONST or node.attrs["value"].size != 1:
        return ""
    return f"= {node.attrs['value'].item()!r:.30}"


def _arrows(nodes: Iterable[Node]) -> Iterator[Arrow]:
    for node in nodes:
        for symbol in node.sources():
            yield Arrow(symbol.node.name, node.name, _shape(symbol))
        for before in node.control:
            yield Arrow(before.name, node.name, dashed=True)
