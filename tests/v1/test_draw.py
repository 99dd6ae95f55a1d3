"""The table and the picture of a graph."""

import html
import os
import re
import shutil
import sys
import xml.etree.ElementTree

import numpy as np
import pytest

import regrad.v1 as tf
from regrad.errors import ArgumentError
from regrad.inspection import drawings
from regrad.v1.graph import draw
from tests.helpers.rows import refused


def clipped(dy, x):
    return tf.where(tf.abs(x) <= 1.0, dy, tf.zeros_like(dy))


@pytest.fixture
def net(graph):
    x = tf.placeholder(tf.float32, [None, 4], name="x")
    for name, size in (("hidden", 3), ("logits", 2)):
        with tf.name_scope(name):
            w = tf.Variable(np.ones((x.shape[1], size), np.float32), name="w")
            x = tf.matmul(x, w)
            with graph.gradient_override_map({"Sign": clipped}):
                x = tf.sign(x)
    return x


def rows(text):
    """The cells of a table: two spaces or more part them."""
    return [re.split(r" {2,}", line) for line in text.splitlines()]


@pytest.fixture
def more(graph, net):
    """The net, and ops of other kinds."""
    tf.square(net, name="squared")
    tf.constant(2.5, name="c")
    x = tf.constant([1.0, 2.0], name="d")
    tf.split(x, 2, name="halves")
    with tf.control_dependencies([net]):
        tf.no_op(name="after")
    with graph.gradient_override_map({"Round": "Identity"}):
        tf.round(x)


# -- the table -----------------------------------------------------------------------------------


def test_a_row_tells_name_type_output_and_rule(graph, more):
    found = {row[0]: row[1:] for row in rows(draw.summary(graph))}
    assert found["x"] == ["Placeholder", "float32 (?, 4)", "none"]
    assert found["hidden/MatMul"] == ["MatMul", "float32 (?, 3)", "built in"]
    assert found["logits/Sign"] == ["Sign", "float32 (?, 2)", "* clipped"]
    assert found["halves"] == ["Split", "float32 (1,), float32 (1,)", "built in"]
    assert found["after"] == ["NoOp", "none"]
    assert found["Round"] == ["Round", "float32 (2,)", "* Identity"]
    assert draw.summary(graph).splitlines()[-1].endswith(" ops, 3 overridden (*)")


def test_columns_are_aligned(graph, net):
    *table, _ = draw.summary(graph).splitlines()
    starts = {re.search(r"(?<=  )(none|built in|\* clipped|rule)$", line).start() for line in table}
    assert len(starts) == 1
    assert all(line == line.rstrip() for line in table)


def test_an_empty_and_a_long_graph(graph):
    assert draw.summary(graph).splitlines()[-1] == "0 ops, 0 overridden (*)"
    assert graph.to_dot().startswith("digraph {")
    for _ in range(20):
        tf.constant(1.0)
    lines = draw.summary(graph).splitlines()
    assert len(lines) == 1 + 20 + 1
    assert lines[-1] == "20 ops, 0 overridden (*)"


def test_only_what_a_tensor_needs(graph, net):
    names = {row[0] for row in rows(graph.summary(of=net))}
    assert "logits/Sign" in names
    assert "hidden/w/Assign" not in names
    assert "hidden/w/Assign" not in graph.to_dot(of=[net])


# -- the picture ---------------------------------------------------------------------------------


STATEMENTS = {  # what the line that draws an op has, and what it has not
    "hidden/MatMul": ([r'label="MatMul\nfloat32 (?, 3)"', 'tooltip="hidden/MatMul"'], ["rule:"]),
    "hidden/Sign": ([r'\nrule: clipped"', drawings.KINDS["override"]], []),
    "squared": ([r'label="squared\nSquare\nfloat32 (?, 2)"'], ["rule:"]),
    "c": ([r'label="c\nConst\nfloat32 ()\n= 2.5"'], []),
    "d": ([r'label="d\nConst\nfloat32 (2,)"'], []),
}


def test_an_op_shows_its_name_type_output_value_and_rule(graph, more):
    lines = [line.strip() for line in graph.to_dot().splitlines()]
    for name, (words, others) in STATEMENTS.items():
        (line,) = [line for line in lines if line.startswith(f'"{name}" [')]
        for word in words:
            assert word in line
        for word in others:
            assert word not in line


def test_scopes_are_boxes_within_boxes(graph, net):
    dot = graph.to_dot()
    assert dot.count("subgraph") == 4  # two layers, and the variable of each
    assert dot.index('"cluster_hidden"') < dot.index('"cluster_hidden/w"')
    inner = dot[dot.index('"cluster_hidden/w"') :]
    assert inner.index('"hidden/w" [') < inner.index("}")  # the variable is in its own box


def test_edges_have_shapes_and_control_edges_are_dashed(graph, more):
    dot = graph.to_dot()
    assert '"x" -> "hidden/MatMul" [label=" (?, 4) "];' in dot
    assert '"logits/Sign" -> "after" [style=dashed];' in dot


def test_a_name_with_backslashes_is_escaped(graph):
    a = tf.constant(1.0, name="a\\b>c")
    tf.identity(a, name="d")
    dot = graph.to_dot()
    assert '"a\\\\b>c" -> "d"' in dot
    assert drawings.quote('a "b"\n\\') == r'"a \"b\"\n\\"'


HOSTILE = ["bell\a", "\x1b[31mred", "line\nbreak", "\0", "\u202eback", "\ufffe", "\udc80", '"]; }']


@pytest.mark.parametrize("name", HOSTILE)
def test_control_characters_in_a_rules_name_are_shown(graph, name):
    rule = lambda dy: dy  # noqa: E731

    rule.__name__ = name
    with graph.gradient_override_map({"Sign": rule}) as used:
        tf.sign(tf.constant(1.0))
    table, source = draw.summary(graph), graph.to_dot()
    for text in (table, source, str(used), str(used.table())):
        assert all(c.isprintable() for c in text.replace("\n", ""))
    assert len(table.splitlines()) == 4  # no row is broken
    assert source.count("\n") == 8  # nor is a statement
    xml.etree.ElementTree.fromstring(f"<svg>{html.escape(source)}</svg>")


def test_directions(graph):
    for rankdir in ("TB", "BT", "LR", "RL"):
        assert f"  rankdir={rankdir};" in graph.draw().dot(rankdir=rankdir)
    for rankdir in ("tb", "", "TB; evil [shape=none]", None, 3):
        with pytest.raises(ArgumentError, match="rankdir must be one of TB, BT, LR, RL, got"):
            graph.draw().dot(rankdir=rankdir)


# -- drawing -------------------------------------------------------------------------------------


def test_without_package_or_program_the_error_says_what_to_install(graph, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    refused(lambda: graph.to_svg(), ImportError, "apt-get install graphviz")
    monkeypatch.setitem(sys.modules, "graphviz", None)
    refused(lambda: graph.to_svg(), ImportError, r"pip install '\.\[viz\]'.*dot")


@pytest.fixture
def dot(tmp_path, monkeypatch):
    """The program `dot`: the real one, or where it is not installed one that checks little."""
    if shutil.which("dot"):
        return
    program = tmp_path / "dot"
    program.write_text(f"""#!{sys.executable}
import sys
source = sys.stdin.read()
assert source.startswith('digraph {{') and source.count('{{') == source.count('}}')
print('<svg>' + source + '</svg>')
""")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


def test_a_picture_is_drawn_and_written(graph, net, dot, tmp_path):
    tf.identity(tf.constant(1.0, name="a\\"), name="b.c-d>e")  # every source
    svg = graph.to_svg(tmp_path / "net.svg")
    assert "<svg" in svg
    assert "hidden/Sign" in svg
    assert (tmp_path / "net.svg").read_text(encoding="utf-8") == svg
