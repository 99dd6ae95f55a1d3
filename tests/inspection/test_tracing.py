"""`trace_gradients` and `saved_bytes` of regrad: the data, and where it comes from."""

import gc
import math
import re
import weakref

import numpy as np
import pytest

import regrad as rg
from regrad.errors import ArgumentError, GradientError
from regrad.inspection.numbers import numbers_of, together
from tests.helpers.marks import marked_lines
from tests.helpers.rows import refused

LINES = marked_lines(__file__)


@rg.custom_grad
def clipped(x):
    return x * 1.0, lambda dy: rg.clip(dy, -0.1, 0.1)


W = rg.Variable(np.full((3, 2), 0.5), name="w")


def net(x):
    h = rg.matmul(x, W)  # here: matmul
    h = clipped(h)  # here: clipped
    return rg.sin(h).sum()  # here: sin


@pytest.fixture
def trace():
    with rg.gradient_override_map({"Sin": lambda dy: 4 * dy}):
        return rg.trace_gradients(net)(np.ones((2, 3)))


def test_the_steps_in_the_order_of_the_backward_pass(trace):
    assert [step.op_type for step in trace.steps] == ["Sum", "Sin", "clipped", "MatMul"]
    assert [step.kind for step in trace.steps] == ["built-in", "override", "custom", "built-in"]
    assert [step.line for step in trace.steps] == [
        LINES[marker] for marker in ("sin", "sin", "clipped", "matmul")
    ]
    assert trace.steps[1].rule.startswith("<lambda>, ")
    assert re.fullmatch(r"clipped, .*test_tracing\.py:\d+", trace.steps[2].rule)
    assert len(trace) == 4


def test_figures_are_those_of_the_gradients(trace):
    total, sin, custom, matmul = trace.steps
    assert total.arrived.norm == 1 and total.arrived.shape == ()
    assert sin.arrived.norm == 2 and sin.growth == 4
    assert dict(custom.left)["x"].norm == pytest.approx(0.2)
    assert custom.growth == pytest.approx(0.2 / 8)
    names = dict(matmul.left)
    assert names["a"].shape == (2, 3) and names["b"].shape == (3, 2)
    inputs = dict(trace.inputs)
    assert inputs["args[0]"].norm == pytest.approx(np.linalg.norm(np.full((2, 3), 0.1)))
    assert inputs["w"].norm == pytest.approx(np.linalg.norm(np.full((3, 2), 0.2)))
    assert trace.value.item() == pytest.approx(4 * math.sin(1.5))


def test_the_gradients_are_those_without_a_trace():
    x = np.linspace(-1, 1, 6).reshape(2, 3)
    found = dict(rg.trace_gradients(net)(x).inputs)["args[0]"]
    expected = rg.grad(net)(rg.asarray(x)).numpy()
    assert found.norm == pytest.approx(np.linalg.norm(expected))
    assert found.largest == pytest.approx(np.abs(expected).max())


def test_table_text_and_html(trace):
    table = trace.table()
    assert len(table) == 4 and table.rows[0][0] == "Sum"
    assert "override: <lambda>" in str(trace)
    assert "<td>clipped</td>" in trace._repr_html_()


def test_what_is_worst():
    def f(x):
        dead = rg.nn.relu(x - 100.0)  # here: dead
        return (dead * x + rg.sin(x) * 1e-7).sum()

    with rg.gradient_override_map({"Sin": lambda dy: dy * 1e9}):
        worst = rg.trace_gradients(f)(np.ones(3)).worst()
    assert [symptom.kind for symptom in worst] == ["dead", "grows", "decays"]
    dead, grows, decays = worst
    assert dead.step.line == LINES["dead"] and "Relu" in str(dead)
    assert grows.step.op_type == "Sin" and "1e+09" in str(grows)
    assert decays.step.op_type == "Mul"


def test_a_gradient_that_breaks_comes_first():
    def f(x):
        return rg.where(x > 0, rg.sqrt(x), 0.0).sum()  # here: broken

    worst = rg.trace_gradients(f)(np.array([1.0, 0.0])).worst()
    assert worst[0].kind == "not finite"
    assert worst[0].step.op_type == "Sqrt" and worst[0].step.line == LINES["broken"]


def test_where_nothing_is_wrong_nothing_is_said():
    assert rg.trace_gradients(rg.sin)(1.0).worst() == []


def test_what_jit_and_checkpoint_run_is_seen_op_by_op():
    pytest.importorskip("jax")
    f = rg.jit(lambda x: rg.checkpoint(lambda z: rg.sin(rg.cos(z)))(x))
    assert [s.op_type for s in rg.trace_gradients(f)(1.0).steps] == ["Sin", "Cos"]


def test_no_path_is_an_empty_trace():
    trace = rg.trace_gradients(lambda x: rg.scalar(2.0))(1.0)
    assert len(trace) == 0 and trace.inputs == (("args[0]", None),)


def test_it_keeps_no_tensor_of_the_run():
    kept = []

    def f(x):
        y = rg.sin(x)
        kept.append(weakref.ref(y._data if not isinstance(y._data, np.ndarray) else y))
        return rg.cos(y).sum()

    trace = rg.trace_gradients(f)(np.ones(1000))
    gc.collect()
    assert kept[0]() is None and len(trace) == 3


@pytest.mark.parametrize("tool", [rg.trace_gradients, rg.find_nan, rg.saved_bytes])
def test_bad_input(tool):
    refused(lambda: tool(3)(1.0), ArgumentError, "must be a function, got int")
    refused(lambda: tool(rg.sin)(rg.tensor([1, 2], dtype="int32")), GradientError)
    if tool is not rg.saved_bytes:
        refused(lambda: tool(lambda x: None)(1.0), ArgumentError, "must return a Tensor, got None")


# -- saved_bytes ---------------------------------------------------------------------------------


def test_bytes_by_op_and_line():
    def f(x):
        y = rg.sin(x)  # here: saves
        return (y + 1.0).sum()

    saved = rg.saved_bytes(f)(np.ones(100))
    assert saved.total == 800
    assert [(r.op_type, r.line, r.size, r.count) for r in saved.rows] == [
        ("Sin", LINES["saves"], 800, 1)
    ]
    assert saved.by_op_type() == {"Sin": 800}
    assert "800 B in all" in str(saved) and "100%" in saved._repr_html_()


def test_keywords_reach_the_function():
    def f(x, scale=1.0, times=0):
        for _ in range(times):
            x = rg.sin(x)
        return (scale * x).sum()

    x, given = np.ones(3), {"scale": 2.0, "times": 2}
    trace = rg.trace_gradients(f)(x, **given)
    assert [step.op_type for step in trace.steps] == ["Sum", "Mul", "Sin", "Sin"]
    assert trace.value.numpy() == rg.sin(rg.sin(x)).sum().numpy() * 2
    assert len(rg.gradient_path(f, "args[0]")(x, **given)) == 4
    assert rg.saved_bytes(f)(x, **given).by_op_type()["Sin"] == 48
    assert rg.find_nan(f)(x, scale=math.inf, times=1).op_type == "Mul"
    for other in ("true", "differences", lambda x, **given: f(x, **given)):
        assert rg.compare_gradients(f, other)(x, **given).ok
    assert not rg.compare_gradients(f, lambda x, **given: f(x))(x, **given).ok


def test_an_array_that_several_ops_keep_counts_once():
    assert rg.saved_bytes(lambda x: (rg.sin(x) + rg.cos(x)).sum())(np.ones(100)).total == 800


def test_what_a_custom_function_saves():
    @rg.custom_grad
    def scaled(x, save):
        save([x * 2.0])
        return x * 2.0, lambda dy, saved: dy * saved[0]

    saved = rg.saved_bytes(lambda x: scaled(x).sum())(np.ones(100))
    assert saved.by_op_type() == {"scaled": 800}


# -- figures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64"])
def test_figures_of_arrays(dtype):
    a = np.array([[3.0, 0.0], [-4.0, 0.0]], dtype)
    n = numbers_of(a)
    assert (n.norm, n.largest, n.zeros, n.shape, n.dtype) == (5, 4, 2, (2, 2), dtype)
    assert n.finite and n.zero_share == 0.5 and not n.is_zero


def test_figures_of_the_extremes():
    n = numbers_of(np.array([np.nan, np.inf, 1.0, 0.0]))
    assert (n.nans, n.infs, n.zeros) == (1, 1, 1) and math.isnan(n.norm) and not n.finite
    assert numbers_of(np.full(4, 1e200)).norm == pytest.approx(2e200)
    assert numbers_of(np.full(4, 1e-200)).norm == pytest.approx(2e-200)
    assert numbers_of(np.full(4, 3e30, np.float32)).norm == pytest.approx(6e30)
    empty = numbers_of(np.zeros((0, 3)))
    assert (empty.norm, empty.size, empty.is_zero) == (0, 0, False)
    assert numbers_of(np.zeros(3)).is_zero


def test_figures_together():
    parts = [numbers_of(np.array([3.0])), None, numbers_of(np.array([4.0, 0.0]))]
    both = together(parts)
    assert (both.norm, both.size, both.zeros, both.largest) == (5, 3, 1, 4)
    assert together([None]) is None


# -- graphs --------------------------------------------------------------------------------------


def test_a_graph_by_name_scopes():
    tf = pytest.importorskip("regrad.v1")
    with tf.Graph().as_default() as graph, tf.Session() as session:
        x = tf.placeholder(tf.float32, [None, 2], name="x")
        with tf.name_scope("layer"), graph.gradient_override_map({"Sign": "Identity"}):
            h = tf.sign(x * 2.0)
        w = tf.Variable([3.0, 4.0], name="w")
        session.run(tf.global_variables_initializer())
        trace = tf.trace_gradients(tf.reduce_sum(h * w), [x, w], {x: [[1.0, -1.0]]})
        names = [step.path for step in trace.steps]
        assert names == ["Sum", "mul", "w/read", "layer/Sign", "layer/mul"]
        sign = trace.steps[3]
        assert (sign.kind, sign.op_type, sign.arrived.norm, sign.sent.norm) == (
            "override", "Sign", 5, 5,
        )  # fmt: skip
        assert [(name, figures.norm) for name, figures in trace.inputs] == [
            ("x:0", 10), ("w:0", pytest.approx(math.sqrt(2)))
        ]  # fmt: skip
    with tf.Graph().as_default(), pytest.raises(ArgumentError, match="pass a session"):
        x = tf.constant(1.0)
        tf.trace_gradients(x * x, x)
