"""Pictures: which boxes and arrows there are, how scopes collapse, and what SVG and pages hold."""

import json
import re
from collections import Counter

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.errors import ArgumentError
from regrad.inspection.drawings import Arrow, Box, Drawing, Sketch


@rg.custom_grad
def clipped(x):
    return x * 1.0, lambda dy: rg.clip(dy, -1.0, 1.0)


W = rg.Variable(np.ones((4, 4)), name="w")


def block(x):
    return clipped(rg.nn.relu(rg.matmul(x, W))) + x


def net(x):
    for _ in range(3):
        x = block(x)
    return rg.sin(x).sum()


@pytest.fixture
def drawing():
    with rg.gradient_override_map({"Sin": lambda dy: dy}):
        return rg.draw(net, np.ones((2, 4)))


def box(drawing, name):
    (found,) = [b for b in drawing.boxes if b.name == name]
    return found


def ends(drawing):
    return {(a.source, a.target) for a in drawing.arrows}


def test_ops_inputs_and_variables_are_boxes(drawing):
    kinds = Counter(b.kind for b in drawing.boxes)
    assert kinds == {"input": 1, "variable": 1, "custom": 3, "override": 1, "op": 10}
    assert box(drawing, "args[0]").lines == ("args[0]", "float64 2×4")
    assert box(drawing, "Sin").lines == ("Sin", "rule: <lambda>")
    assert box(drawing, "clipped").details["rule"].startswith("custom: clipped, ")
    assert re.search(r"test_drawing\.py:\d+$", box(drawing, "MatMul").details["line"])


def test_arrows_follow_the_tensors(drawing):
    assert ends(drawing) >= {
        ("args[0]", "MatMul"), ("w", "MatMul"), ("MatMul", "Relu"), ("Relu", "clipped"),
        ("clipped", "AddV2"), ("args[0]", "AddV2"), ("AddV2", "MatMul_1"), ("Sin", "Sum"),
    }  # fmt: skip


def test_scopes_are_calls_of_the_users_functions(drawing):
    scopes = [b.scope for b in drawing.boxes if b.lines[0] == "MatMul"]
    assert scopes == [("block",), ("block_1",), ("block_2",)]
    assert box(drawing, "Sin").scope == ()


def test_closed_scopes_are_one_box_each(drawing):
    closed = drawing.collapsed(0)
    names = ["args[0]", "w", "block", "block_1", "block_2", "Sin", "Sum"]
    assert [b.name for b in closed.boxes] == names
    assert box(closed, "block").lines == ("block", "4 ops")
    assert box(closed, "block").kind == "custom"
    assert ("block", "block_1") in ends(closed) and ("w", "block_2") in ends(closed)
    assert len([a for a in closed.arrows if a.source == "block" and a.target == "block_1"]) == 1
    assert drawing.collapsed(1) == drawing


def test_as_many_scopes_are_open_as_leave_it_legible():
    def boxes(n, depth):
        return [Box(f"{depth}.{i}", ("x",), ("a", "b")[:depth]) for i in range(n)]

    assert len(Drawing((*boxes(3, 1), *boxes(3, 2)), ()).legible().boxes) == 6
    assert len(Drawing((*boxes(30, 1), *boxes(30, 2)), ()).legible().boxes) == 31
    assert len(Drawing((*boxes(100, 1),), ()).legible().boxes) == 1


def test_gradient_ops_on_request():
    both = rg.draw(lambda x: rg.sin(x) * x, rg.scalar(1.0), gradients=True)
    assert "Cos" in [b.lines[0] for b in both.boxes if b.scope == ("gradients",)]
    assert "Cos" not in [b.lines[0] for b in rg.draw(rg.sin, rg.scalar(1.0)).boxes]


def test_what_jit_runs_is_drawn_op_by_op():
    pytest.importorskip("jax")
    found = rg.draw(rg.jit(lambda x: rg.sin(rg.cos(x))), rg.scalar(1.0))
    assert [b.lines[0] for b in found.boxes] == ["args[0]", "Cos", "Sin"]


def test_what_is_no_function():
    with pytest.raises(ArgumentError, match=r"draw\(f\) must be a function, got int"):
        rg.draw(3)


def test_names_are_told_apart():
    sketch = Sketch()
    assert [sketch.add(name, ()) for name in "abaa"] == ["a", "b", "a_1", "a_2"]


# -- pages ---------------------------------------------------------------------------------------


def data_of(page):
    (text,) = re.findall(r"^const data = (.*);$", page, re.MULTILINE)
    return json.loads(text.replace("<\\/", "</"))


def test_a_page_holds_all_boxes_and_needs_nothing_else(drawing, tmp_path):
    page = drawing.html(tmp_path / "net.html")
    assert (tmp_path / "net.html").read_text(encoding="utf-8") == page
    data = data_of(page)
    assert data["title"] == "net"
    assert [b[0] for b in data["boxes"]] == [b.name for b in drawing.boxes]
    assert [a[:2] for a in data["arrows"]] == [[a.source, a.target] for a in drawing.arrows]
    assert not re.search(r'(src|href)="|https?://(?!www\.w3\.org)|@import', page)


def test_names_cannot_break_out_of_a_page():
    evil = "</script><script>alert(1)</script>"
    page = Drawing((Box(evil, (evil,), (evil,)),), (Arrow(evil, evil),), evil).html()
    assert evil not in page
    assert data_of(page)["boxes"][0][0] == evil


# -- graphs --------------------------------------------------------------------------------------


def training_graph():
    graph = tf.Graph()
    with graph.as_default():
        x = tf.placeholder(tf.float32, [None, 4], name="x")
        with graph.gradient_override_map({"Sign": "Identity"}):
            h = tf.sign(tf.layers.dense(x, 3, name="dense"))
        loss = tf.reduce_mean(tf.square(h))
        tf.train.AdamOptimizer(0.1).minimize(loss)
        tf.global_variables_initializer()
    return graph


def test_a_graph_hides_what_only_initializes():
    graph = training_graph()
    shown = {b.name for b in graph.draw().boxes}
    assert {"x", "dense/MatMul", "dense/kernel/read", "Sign", "dense/kernel/Adam"} <= shown
    assert not any(name.endswith("/Assign") and "dense" in name for name in shown)
    assert not any("random_uniform" in name for name in shown)
    assert "init" not in shown
    whole = {b.name for b in graph.draw(initializers=True).boxes}
    assert {"dense/kernel/Assign", "dense/kernel/random_uniform"} <= whole
    assert whole == {op.name for op in graph.get_operations()}
    assert len(graph.draw().legible().boxes) <= 40


def test_rg_draw_takes_a_graph():
    graph = training_graph()
    assert rg.draw(graph) == graph.draw()
    assert box(rg.draw(graph), "Sign").kind == "override"
