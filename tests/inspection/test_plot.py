"""Pictures by matplotlib: what is drawn, and with which numbers."""

import json
import re
from collections import Counter

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.errors import ArgumentError, UnknownOpError
from regrad.inspection.drawings import Arrow, Box, Drawing, Sketch
from tests.helpers.rows import refused

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
pytest.importorskip("matplotlib.pyplot")


@pytest.fixture(autouse=True)
def closed():
    yield
    matplotlib.pyplot.close("all")


def lines(ax):
    return {line.get_label(): line.get_xydata() for line in ax.get_lines()}


def test_a_rule_over_a_range():
    options = {"low": -2, "high": 2, "points": 401}
    found = lines(rg.plot.rule("Sign", rg.rules.clipped_straight_through, **options))
    x, rule = found["rule: clipped_straight_through"].T
    np.testing.assert_array_equal(rule, (np.abs(x) <= 1).astype(float))
    true = found["true derivative"][:, 1]
    assert np.isnan(true[200]) and np.nanmax(np.abs(true)) == 0
    np.testing.assert_array_equal(found["Sign"][:, 1], np.sign(x))


def test_a_function_with_its_own_gradient():
    @rg.custom_grad
    def doubled(x):
        return rg.sin(x), lambda dy: 2 * dy * rg.cos(x)

    found = lines(rg.plot.rule(doubled))
    x, rule = found["its own rule"].T
    np.testing.assert_allclose(rule, 2 * np.cos(x))
    np.testing.assert_allclose(found["true derivative"][:, 1], np.cos(x), atol=1e-6)


def test_kinks_are_no_jumps():
    true = lines(rg.plot.rule("Relu", points=11))["true derivative"][:, 1]
    np.testing.assert_allclose(true, [0] * 5 + [0.5] + [1] * 5)


def test_bad_input_of_rule():
    refused(lambda: rg.plot.rule(rg.sign, lambda dy: dy), ArgumentError, "to an op type")
    refused(lambda: rg.plot.rule("Sign", low=1, high=1), ArgumentError, "expected low < high")
    refused(lambda: rg.plot.rule("Sgin"), UnknownOpError)


def test_histograms_layer_by_layer():
    plain = {"a": np.array([0.0, 1.0, 10.0]), "b": rg.tensor([1e-3, 1.0])}
    axes = rg.plot.histograms(
        plain, {"a": np.zeros(3), "b": np.ones(2)}, labels=("with", "without")
    )
    assert len(axes) == 2
    assert axes[0].get_title("right").endswith("with: 33% zeros   without: 100% zeros")
    assert sum(patch.get_height() for patch in axes[1].containers[0]) == 2
    refused(lambda: rg.plot.histograms({}), ArgumentError, "no gradients")
    refused(lambda: rg.plot.histograms(plain, {"a": np.zeros(3)}), ArgumentError, "the same names")


def test_saliency():
    image = np.linspace(0, 1, 48).reshape(4, 4, 3)
    axes = rg.plot.saliency(image, {"plain": image, "guided": np.zeros_like(image)})
    assert [ax.get_title() for ax in axes] == ["image", "plain", "guided"]
    np.testing.assert_allclose(axes[1].get_images()[0].get_array(), image.max(-1))
    with pytest.raises(ArgumentError, match="expected the gradient 'plain' in the image's shape"):
        rg.plot.saliency(image, {"plain": image[0]})
    refused(lambda: rg.plot.saliency(image[0, 0], {}), ArgumentError, "an image of rank 2 or 3")


def test_a_trace():

    ax = rg.plot.trace(rg.trace_gradients(lambda x: (rg.nn.relu(x - 9.0) * x).sum())(np.ones(3)))
    assert [label.get_text() for label in ax.get_xticklabels()] == ["Sum", "Mul", "Relu", "Sub"]
    assert ax.get_yscale() == "log"
    assert "died" in [text.get_text() for text in ax.get_legend().get_texts()]


def test_a_comparison():
    f = lambda p: (rg.sign(p["a"]) * p["b"]).sum() + (p["a"] * p["c"]).sum()  # noqa: E731

    args = {"a": np.array([0.5, -2.0]), "b": np.ones(2), "c": np.array([2.0, 1.0])}
    with rg.gradient_override_map({"Sign": "Identity"}):
        found = rg.compare_gradients(f, surrogates=["Sign"])(args)
    ax = rg.plot.comparison(found)
    strips = ax.images[0].get_array()
    assert strips.shape == (3, len(found.rows))
    names = [label.get_text() for label in ax.get_xticklabels()]
    assert names == ["args[0]['a']", "args[0]['b']", "args[0]['c']", "Sign by x"]
    for i, row in enumerate(found.rows):
        if np.isfinite(row.cosine):
            assert strips[0, i] == pytest.approx(row.cosine)
        colour = ax.get_xticklabels()[i].get_color()
        assert (colour == "black") == (not row.differs())
    same = rg.compare_gradients(f)(args).plot()
    assert all(label.get_color() == "black" for label in same.get_xticklabels())


def test_relevance_of_images():
    relevance = np.zeros((2, 5, 6))
    relevance[:, 0, 0], relevance[0, 4, 5] = 1.0, -2.0
    for given in (relevance, relevance[None], relevance.transpose(1, 2, 0), relevance.sum(0)):
        (drawn,) = rg.plot.relevance(given).get_images()
        red, _, blue, _ = np.moveaxis(drawn.get_array(), -1, 0)
        assert red.shape == (5, 6) and np.isclose(red[1, 1], blue[1, 1], atol=0.01)
        assert red[0, 0] > 2 * blue[0, 0] and red[4, 5] < blue[4, 5] / 2
    below, above = rg.plot.relevance(relevance, image=np.ones((3, 5, 6))).get_images()
    assert below.get_array().shape == (5, 6)
    assert np.allclose(above.get_array()[..., 3], np.sqrt(np.abs(relevance.sum(0)) / 2))
    with pytest.raises(ArgumentError, match=r"image of the size of the relevance, \(5, 6\), got"):
        rg.plot.relevance(relevance, image=np.ones((3, 3)))
    refused(lambda: rg.plot.relevance(np.ones(3)), ArgumentError, "a text needs tokens=")
    with pytest.raises(ArgumentError, match="is one of up to four channels"):
        rg.plot.relevance(np.ones((5, 6, 7)))
    with pytest.raises(ArgumentError, match="expected finite relevance"):
        rg.plot.relevance(np.full((2, 2), np.nan))


def test_relevance_of_tokens():
    tokens = ["not", "$a$", "\n"] * 9
    ax = rg.plot.relevance(np.linspace(-1, 1, 27)[None], tokens=tokens)
    assert [text.get_text() for text in ax.texts] == ["not", "$a$", "\\n"] * 9
    first, *_, last = ax.patches
    assert first.get_facecolor()[2] > first.get_facecolor()[0]
    assert last.get_facecolor()[0] > last.get_facecolor()[2]
    assert len({text.get_position()[1] for text in ax.texts}) == 2  # lines
    assert rg.plot.relevance(np.zeros(2), tokens=["a", "b"]).texts[0].get_color() == "black"
    with pytest.raises(ArgumentError, match="expected 2 tokens, one for each value, got 1"):
        rg.plot.relevance(np.zeros(2), tokens=["a"])
    with pytest.raises(ArgumentError, match=r"relevance of one text.*got shape \(2, 2\)"):
        rg.plot.relevance(np.zeros((2, 2)), tokens=["a", "b"])


def test_relevance_of_layers():
    layers = {"a": np.array([[1.0, -3.0]]), "b": rg.tensor([2.0])}
    ax = rg.plot.relevance(layers)
    assert [bar.get_width() for bar in ax.patches] == [1.0, 2.0, -3.0, 0.0]
    assert list(ax.get_lines()[0].get_xdata()) == [-2.0, 2.0]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]
    refused(lambda: rg.plot.relevance({}), ArgumentError, "there are no layers")


# -- pictures: boxes and arrows, scopes, SVG and pages ---------------------------------------------


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
    assert re.search(r"test_plot\.py:\d+$", box(drawing, "MatMul").details["line"])


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


def test_a_graph_is_drawn_whole_or_as_far_as_a_tensor_needs():
    graph = training_graph()
    whole = {b.name for b in graph.draw().boxes}
    assert {"dense/kernel/Assign", "dense/kernel/Initializer/random_uniform"} <= whole
    assert whole == {op.name for op in graph.get_operations()}
    assert len(graph.draw().legible().boxes) <= 40
    shown = {b.name for b in graph.draw(graph.get_tensor_by_name("Sign:0")).boxes}
    assert {"x", "dense/MatMul", "dense/kernel/read", "Sign"} <= shown
    assert not any(name.endswith("/Assign") or "random_uniform" in name for name in shown)


def test_rg_draw_takes_a_graph():
    graph = training_graph()
    assert rg.draw(graph) == graph.draw()
    assert box(rg.draw(graph), "Sign").kind == "override"
