"""The graphs rebuilt in docs/how_graphs_work.py run, are self-contained, and agree with regrad."""

from __future__ import annotations

import ast
import runpy
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import regrad.v1 as tf
from tests.helpers.paths import DOCS

SCRIPT = DOCS / "how_graphs_work.py"


@pytest.fixture
def core():
    """The script's names; its own assertions hold if this does not raise."""
    return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


@pytest.fixture(autouse=True)
def graph():
    with tf.Graph().as_default() as graph:
        yield graph


def test_imports_only_numpy_and_the_standard_library():
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"))
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert {n.partition(".")[0] for n in names} - sys.stdlib_module_names == {"numpy"}


def test_stays_short():
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    assert sum(bool(line) for line in lines) <= 260


def test_names_are_unique_in_their_scopes(core):
    with core.GRAPH.scope("block"):
        mine = [core.constant(1.0).name, core.constant(2.0).name, core.constant(3.0, "c").name]
    with tf.name_scope("block"):
        theirs = [tf.constant(1.0), tf.constant(2.0), tf.constant(3.0, name="c")]
    assert mine == [t.op.name for t in theirs]


@pytest.mark.parametrize("order", [1, 2, 3])
def test_gradients_of_any_order_and_shape(core, order):
    row = np.array([[1.0, 2.0, 3.0]])
    x, a = core.placeholder(), tf.placeholder(tf.float64)
    y, b = core.sin(x * row) * x, tf.sin(a * row) * a
    for _ in range(order):
        (y,), (b,) = core.gradients(y, [x]), tf.gradients(b, a)
    with tf.Session() as session:
        for value in (np.float64(0.3), np.array([[0.5], [0.7]])):
            mine = core.Session().run([y], {x: value})[0]
            np.testing.assert_allclose(mine, session.run(b, {a: value}))


def test_a_rule_is_bound_when_its_node_is_created(core, graph):
    core.register_gradient("MyTenfold")(lambda op, grad: [grad * 10.0])
    tf.RegisterGradient("MyTenfold")(lambda op, grad: grad * 10.0)
    x, a = core.placeholder(), tf.placeholder(tf.float64)
    y, b = core.sin(x), tf.sin(a)
    with core.GRAPH.gradient_override_map({"Sin": "MyTenfold"}):
        y = y + core.sin(x)
    with graph.gradient_override_map({"Sin": "MyTenfold"}):
        b = b + tf.sin(a)
    (dy,), (db,) = core.gradients(y, [x]), tf.gradients(b, a)
    with tf.Session() as session:
        found = core.Session().run([dy], {x: 0.5})[0]
        np.testing.assert_allclose(found, session.run(db, {a: 0.5}))
    np.testing.assert_allclose(found, np.cos(0.5) + 10)


def test_no_path_is_none(core):
    assert core.gradients(core.sin(core.placeholder()), [core.placeholder()]) == [None]
    assert tf.gradients(tf.sin(tf.placeholder(tf.float32)), tf.placeholder(tf.float32)) == [None]


def test_what_is_not_fed_is_an_error(core):
    x = core.placeholder("unfed")
    with pytest.raises(ValueError, match="unfed"):
        core.Session().run([core.sin(x)])
    a = tf.placeholder(tf.float32, name="unfed")
    with tf.Session() as session, pytest.raises(tf.errors.InvalidArgumentError, match="unfed"):
        session.run(tf.sin(a))


def test_any_tensor_can_be_fed(core):
    x, a = core.placeholder(), tf.placeholder(tf.float64)
    inner, theirs = core.sin(x), tf.sin(a)
    with tf.Session() as session:
        mine = core.Session().run([inner * 2.0], {inner: 5.0})
        assert mine[0] == session.run(theirs * 2.0, {theirs: 5.0}) == 10.0


def test_a_run_is_a_snapshot_and_control_dependencies_are_waited_for(core):
    w, v = core.Variable(1.0), tf.Variable(np.float64(1.0))
    before, theirs = w.read(), v.read_value()
    step, update = w.assign(before * 5.0), v.assign(theirs * 5.0)
    with core.control_dependencies([step]):
        after = w.read()
    with tf.control_dependencies([update]):
        later = v.read_value()
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for expected in (1.0, 5.0), (5.0, 25.0):
            mine = core.Session().run([before, after])
            assert tuple(map(float, mine)) == tuple(session.run([theirs, later])) == expected


def test_a_run_that_fails_changes_no_variable(core):
    w = core.Variable(1.0)
    step = w.assign(2.0)
    with pytest.raises(ValueError, match="feed it"):
        core.Session().run([step, core.sin(core.placeholder())])
    assert w.value == 1.0
