"""Graphs as a table and as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from regrad.core.bindings import CountedRule
from regrad.core.rule import NoGradient, NoRule, place
from regrad.core.tensor import TensorLike
from regrad.errors import printable
from regrad.graph.graph import CONST, Node, OpGraph
from regrad.graph.plan import needed
from regrad.inspection.drawings import Arrow, Box, BoxKind, Drawing
from regrad.v1 import dtypes
from regrad.v1.graph.static_shapes import TensorShape
from regrad.v1.graph.tensors import node_of

KINDS: dict[str, BoxKind] = {"Placeholder": "input", "VariableV2": "variable", "Const": "constant"}


def is_overridden(node: Node) -> bool:
    """Return whether a `gradient_override_map` set the rule of an op."""
    return isinstance(node.rule, CountedRule)


def cells(node: Node) -> tuple[str, str, str, str]:
    """Return the name, the type, the outputs and the rule of an op, as in the table.

    The rule is `built in` for the op's own rule, and `none` for ops without a gradient.
    """
    rule = node.rule
    built_in = rule is node.op.rule and not isinstance(rule, NoGradient | NoRule)
    outputs = [f"{dtypes.of(s.dtype).name} {TensorShape(s.shape)}" for s in node.symbols]
    rule_name = "built in" if built_in else rule.name or "none"
    return node.name, node.op.type.lstrip("_"), ", ".join(outputs), rule_name


def _select(graph: OpGraph, of: TensorLike) -> list[Node]:
    """Return all ops of a graph, or only the ops that `of` needs."""
    listed = of if isinstance(of, list | tuple) else [of]
    return graph.nodes if of is None else needed(map(node_of, listed), set())


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
    rows: list[tuple[str, ...]] = [("name", "type", "output", "rule")]
    nodes = _select(graph, of)
    for node in nodes:
        *others, rule = map(printable, cells(node))
        rows.append((*others, f"* {rule}" if is_overridden(node) else rule))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    count = sum(map(is_overridden, nodes))
    return "\n".join([*lines, f"{len(nodes)} ops, {count} overridden (*)"])


def draw(graph: OpGraph, of: TensorLike = None) -> Drawing:
    """Return the graph as a `Drawing`, with `svg` (by Graphviz) and `html` (an interactive page).

    Args:
        of: Tensors or ops. Only the ops that they need are drawn, by default all ops.

    Name scopes are boxes. As many boxes are open as keep the picture legible. An op shows its name,
    its type (if it differs from the name), and the dtype and shape of its output. Constants of one
    element show the element. An op that a `gradient_override_map` bound is orange and shows the
    name of its rule. Control dependencies are dashed.
    """
    nodes = _select(graph, of)
    paths = [node.name.split("/")[:-1] for node in nodes]
    scopes = {scope for path in paths for scope in accumulate(path, "{}/{}".format)}
    return Drawing(
        tuple(_box(node, scopes) for node in nodes),
        tuple(arrow for node in nodes for arrow in _arrows(node)),
        "graph",
    )


def _box(node: Node, scopes: set[str]) -> Box:
    name, op_type, output, rule = cells(node)
    lines = dict.fromkeys([name.rpartition("/")[2], op_type, output])
    if node.op is CONST and node.attrs["value"].size == 1:
        lines[f"= {node.attrs['value'].item()!r:.30}"] = None
    kind = KINDS.get(node.op.type, "op")
    details = {"type": op_type, "output": output, "rule": rule}
    if is_overridden(node):
        lines[f"rule: {rule}"] = None
        kind = "override"
        if node.rule.function is not None:
            details["source"] = place(node.rule.function)
    # The op of a variable belongs to the scope of the same name.
    scope = name if name in scopes else name.rpartition("/")[0]
    return Box(name, tuple(lines), tuple(scope.split("/")) if scope else (), kind, details)


def _arrows(node: Node) -> Iterator[Arrow]:
    for symbol in node.sources():
        yield Arrow(symbol.node.name, node.name, str(TensorShape(symbol.shape)))
    for before in node.control:
        yield Arrow(before.name, node.name, dashed=True)
