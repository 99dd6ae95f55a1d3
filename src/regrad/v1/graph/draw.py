"""Graphs to look at: a table, a picture, and its source in Graphviz's language."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

from regrad.core.bindings import CountedRule
from regrad.core.rule import NoGradient, NoRule, place
from regrad.errors import printable
from regrad.graph.graph import CONST, Node, OpGraph, Symbol
from regrad.graph.plan import needed
from regrad.inspection.drawings import Arrow, Box, BoxKind, Drawing
from regrad.v1.graph.static_shapes import TensorShape

# -- texts of ops --------------------------------------------------------------------------------


def is_overridden(node: Node) -> bool:
    """Return whether a `gradient_override_map` put an op's rule in force."""
    return isinstance(node.rule, CountedRule)


def rule_name(node: Node) -> str:
    """Return the name of the rule in force, `built in`, or `none` for ops without a gradient."""
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


def _select(graph: OpGraph, of: Sequence[Node] | None) -> list[Node]:
    """Return all ops of a graph, or only those that some of them need."""
    return graph.nodes if of is None else needed(of, set())


# -- the table -----------------------------------------------------------------------------------

HEADER = ("name", "type", "output", "rule")


def summary(graph: OpGraph, limit: int | None = None, of: Sequence[Node] | None = None) -> str:
    """A table of the ops: name, type, dtype and shape of the output, and the rule in force.

    Args:
        limit: How many ops to list (all by default).
        of: Tensors or ops; only what these need is listed.

    Rules that a `gradient_override_map` put in force are marked with `*`; control characters in
    names are escaped.

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
    listed = nodes if limit is None else nodes[:limit]
    rows = [HEADER, *map(_row, listed)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    if len(nodes) > len(listed):
        lines.append(f"… {len(nodes) - len(listed)} more")
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


def draw(graph: OpGraph, of: Sequence[Node] | None = None, initializers: bool = False) -> Drawing:
    """The graph as a `Drawing`: `svg` draws it with Graphviz, `html` is a page to look around in.

    Args:
        of: Tensors or ops; only what these need is drawn (by default all).
        initializers: Whether to draw the ops that only initialize Variables, too.

    Name scopes are boxes, of which as many are open as leave the picture legible. An op shows its
    name, its type (unless that is its name), and the dtype and shape of its output; constants of
    one element show it. An op that a `gradient_override_map` bound is orange, and names its rule.
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


def to_dot(graph: OpGraph, of: Sequence[Node] | None = None, rankdir: str = "TB") -> str:
    """The source of a picture of the graph, with all scopes open, for the program `dot`.

    Args:
        of: Tensors or ops; only what these need is drawn (by default all).
        rankdir: Where edges run: `"TB"` down, `"BT"` up, `"LR"` to the right, `"RL"` to the left.

    See `draw` for what is shown; control dependencies are dashed.
    """
    return draw(graph, of, initializers=True).dot(rankdir)


def to_svg(
    graph: OpGraph, path: str | os.PathLike[str] | None = None, of: Sequence[Node] | None = None,
    rankdir: str = "TB", depth: int | None = None,
) -> str:  # fmt: skip
    """The picture of `draw` as SVG, written to `path`, whole or not at all, if one is given.

    Args:
        path: A file to write.
        of: Tensors or ops; only what these need is drawn (by default all but initializers).
        rankdir: As for `to_dot`.
        depth: How many levels of scopes are open; by default as many as leave it legible.

    Raises ImportError, with what to install, if the package `graphviz` or the program `dot` is
    missing.
    """
    return draw(graph, of).svg(path, depth=depth, rankdir=rankdir)


def _without_initializers(nodes: Sequence[Node]) -> list[Node]:
    """The ops but those that only initialize Variables."""
    takers: dict[Node, list[Node]] = {node: [] for node in nodes}
    for node in nodes:
        for source in _sources(node):
            takers.setdefault(source, []).append(node)
    hidden = {
        node for node in nodes
        if node.op.type == "Assign" and node.name == f"{_sources(node)[0].name}/Assign"
    }  # fmt: skip
    for node in reversed(nodes):  # (an op comes after what it takes)
        used = takers[node]
        if used and hidden.issuperset(used) and node.op.type not in ("VariableV2", "Placeholder"):
            hidden.add(node)
    for node in nodes:  # what runs them all together
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
    # a variable's op belongs to the scope that has its name
    scope = node.name if node.name in scopes else node.name.rpartition("/")[0]
    details = {"type": _type(node), "output": _outputs(node), "rule": rule_name(node)}
    if node.rule.function is not None and kind == "override":
        details["source"] = place(node.rule.function)
    return Box(node.name, tuple(lines), tuple(scope.split("/")) if scope else (), kind, details)


def _scopes_of(name: str) -> Iterator[str]:
    """The scopes of an op's name: `a` and `a/b` for `a/b/c`."""
    parts = name.split("/")
    return ("/".join(parts[:i]) for i in range(1, len(parts)))


def _value(node: Node) -> str:
    """The value of a constant of one element."""
    if node.op is not CONST or node.attrs["value"].size != 1:
        return ""
    return f"= {node.attrs['value'].item()!r:.30}"


def _arrows(nodes: Iterable[Node]) -> Iterator[Arrow]:
    for node in nodes:
        for symbol in node.sources():
            yield Arrow(symbol.node.name, node.name, _shape(symbol))
        for before in node.control:
            yield Arrow(before.name, node.name, dashed=True)
