"""Graphs to look at: a table, a picture, and its source in Graphviz's language."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from regrad.core.files import replace_file
from regrad.core.overrides import CountedRule
from regrad.core.rule import Missing, NoGradient
from regrad.errors import ArgumentError, RegradError, printable
from regrad.graph.graph import CONST, Graph, Node, Symbol
from regrad.graph.plan import needed
from regrad.v1.graph.static_shapes import TensorShape

if TYPE_CHECKING:
    import os


# -- what there is to tell -----------------------------------------------------------------------


def is_overridden(node: Node) -> bool:
    """Return whether a `gradient_override_map` put an op's rule in force."""
    return isinstance(node.rule, CountedRule)


def rule_name(node: Node) -> str:
    """Return the name of the rule in force, `built in`, or `none` for ops without a gradient."""
    rule = node.rule
    if isinstance(rule, NoGradient):
        return "none"
    if isinstance(rule, Missing):
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


def _select(graph: Graph, of: Sequence[Node] | None) -> list[Node]:
    """Return all ops of a graph, or only those that some of them need."""
    return graph.nodes if of is None else needed(of, set())


# -- the table -----------------------------------------------------------------------------------

HEADER = ("name", "type", "output", "rule")


def summary(graph: Graph, limit: int | None = None, of: Sequence[Node] | None = None) -> str:
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

LOOK = {
    "node": 'shape=box, style="rounded,filled", fillcolor="#f5f7fa", color="#9aa5b1", '
    'fontname="Helvetica", fontsize=10, margin="0.12,0.06"',
    "edge": 'color="#52606d", fontname="Helvetica", fontsize=8, arrowsize=0.6',
}
CLUSTER = 'style="rounded"; color="#cbd2d9"; fontname="Helvetica"; fontsize=9; labeljust=l'
OVERRIDDEN = ', fillcolor="#ffe3cc", color="#d9480f", penwidth=1.6'
TYPES = {
    "Placeholder": ', fillcolor="#d9f2e3"',
    "VariableV2": ', fillcolor="#dce8fb"',
    "Const": ', fillcolor="#ffffff"',
}
DIRECTIONS = ("TB", "BT", "LR", "RL")


def to_dot(graph: Graph, of: Sequence[Node] | None = None, rankdir: str = "TB") -> str:
    """The source of a picture of the graph, for the program `dot`.

    Args:
        of: Tensors or ops; only what these need is drawn (by default all).
        rankdir: Where edges run: `"TB"` down, `"BT"` up, `"LR"` to the right, `"RL"` to the left.

    Name scopes are boxes. An op shows its name, its type (unless that is its name), and the dtype
    and shape of its output; constants of one element show it. An op that a
    `gradient_override_map` bound is orange, and names its rule. Edges show shapes;
    control dependencies are dashed.
    """
    if rankdir not in DIRECTIONS:
        raise ArgumentError(
            f"to_dot: rankdir is one of {', '.join(DIRECTIONS)}, got {rankdir!r:.60}"
        )
    nodes = _select(graph, of)
    lines = [
        "digraph {",
        f"  rankdir={rankdir};",
        *[f"  {kind} [{look}];" for kind, look in LOOK.items()],
        *_clusters(nodes),
        *_edges(nodes),
        "}",
    ]
    return "\n".join(lines) + "\n"


def quote(text: str) -> str:
    """Return a string of Graphviz's language; line breaks stay, control characters show."""
    lines = [printable(line).replace("\\", "\\\\") for line in text.split("\n")]
    escaped = "\\n".join(lines).replace('"', '\\"')
    return f'"{escaped}"'


def _clusters(nodes: Sequence[Node]) -> Iterator[str]:
    """The ops, in boxes within boxes for their name scopes."""
    scopes = {scope for node in nodes for scope in _scopes_of(node.name)}
    tree: dict[str, list[Any]] = {"": []}
    for scope in sorted(scopes):
        tree[scope] = []
        tree[scope.rpartition("/")[0]].append(scope)
    for node in nodes:
        # a variable's op belongs to the scope that has its name
        scope = node.name if node.name in scopes else node.name.rpartition("/")[0]
        tree[scope].append(node)
    return _scope_lines(tree, "", "  ")


def _scopes_of(name: str) -> Iterator[str]:
    """The scopes of an op's name: `a` and `a/b` for `a/b/c`."""
    parts = name.split("/")
    return ("/".join(parts[:i]) for i in range(1, len(parts)))


def _scope_lines(tree: dict[str, list[Node | str]], scope: str, indent: str) -> Iterator[str]:
    for item in tree[scope]:
        if isinstance(item, Node):
            yield f"{indent}{_node_line(item)}"
            continue
        yield f"{indent}subgraph {quote('cluster_' + item)} {{"
        yield f"{indent}  label={quote(item.rpartition('/')[2])}; {CLUSTER};"
        yield from _scope_lines(tree, item, indent + "  ")
        yield f"{indent}}}"


def _node_line(node: Node) -> str:
    lines = dict.fromkeys([node.name.rpartition("/")[2], _type(node), _outputs(node), _value(node)])
    look = TYPES.get(node.op.type, "")
    if is_overridden(node):
        lines[f"rule: {rule_name(node)}"] = None
        look = OVERRIDDEN
    label = quote("\n".join(line for line in lines if line))
    return f"{quote(node.name)} [label={label}, tooltip={quote(node.name)}{look}];"


def _value(node: Node) -> str:
    """The value of a constant of one element."""
    if node.op is not CONST or node.attrs["value"].size != 1:
        return ""
    return f"= {node.attrs['value'].item()!r:.30}"


def _edges(nodes: Iterable[Node]) -> Iterator[str]:
    for node in nodes:
        target = quote(node.name)
        for symbol in node.sources():
            label = quote(f" {_shape(symbol)} ")
            yield f"  {quote(symbol.node.name)} -> {target} [label={label}];"
        for before in node.control:
            yield f"  {quote(before.name)} -> {target} [style=dashed];"


class MissingProgramError(RegradError, ImportError):
    """Something that is not installed."""


def to_svg(
    graph: Graph, path: str | os.PathLike[str] | None = None, of: Sequence[Node] | None = None,
    rankdir: str = "TB",
) -> str:  # fmt: skip
    """The picture of `to_dot` as SVG, written to `path`, whole or not at all, if one is given.

    Raises ImportError, with what to install, if the package `graphviz` or the program `dot` is
    missing.
    """
    try:
        import graphviz  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise _not_installed("the Python package graphviz") from None
    try:
        svg = graphviz.Source(to_dot(graph, of, rankdir)).pipe(format="svg", encoding="utf-8")
    except graphviz.ExecutableNotFound:
        raise _not_installed("the program dot") from None
    if path is not None:
        replace_file(path, lambda file: file.write(svg.encode()))
    return svg


def _not_installed(what: str) -> MissingProgramError:
    return MissingProgramError(
        f"to_svg: {what} is not installed. Drawing needs the package (pip install 'regrad[viz]') "
        "and the program dot (apt-get install graphviz, brew install graphviz, or "
        "https://graphviz.org/download); to_dot() needs neither."
    )
