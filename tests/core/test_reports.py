"""What an override tells of itself: tables as text, as data and in rich."""

import copy
import io

import pytest
import torch
from rich.console import Console

import regrad as rg
import regrad.torch
import regrad.v1 as tf
from regrad.core.reports import Table, Untouched
from regrad.errors import ArgumentError
from tests.helpers.rows import refused

RULES = {"Sign": rg.rules.straight_through}


def test_the_table_has_rule_calls_line_and_shapes():
    with rg.gradient_override_map(RULES) as used:
        for shape in [(2, 3), (4,), (4,), (), (5, 1)]:
            rg.grad(lambda x: rg.sign(x).sum())(rg.ones(shape))
    table = used.table()
    ((*start, line, shapes),) = table.rows
    assert start == ["Sign", "straight_through", "5", "5"]
    assert "test_reports.py:" in line
    assert shapes == "2×3, 4, scalar, and 1 more"
    headings, rule, row = str(table).splitlines()
    assert headings.startswith("op type  rule")
    assert set(rule) == {"-", " "}
    assert row.index("straight_through") == headings.index("rule")
    assert repr(table) == str(table)
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    text = console.file.getvalue()
    assert "straight_through" in text and "┃ op type" in text


def test_untouched_counts_by_name_and_line():
    untouched = Untouched()
    for name in ("tanh", "Relu", "tanh"):
        untouched.note(name, "model.py:3")
    assert untouched.table().rows == [("Relu", "1", "model.py:3"), ("tanh", "2", "model.py:3")]
    assert len(Table(["a"], [])) == 0


def test_compiled_calls_report_their_shapes():
    f = rg.jit(rg.grad(lambda x: rg.sign(x).sum()))
    for _ in range(2):
        with rg.gradient_override_map(RULES) as used:
            f(rg.ones((2, 2)))
        assert used.table().rows[0][-1] == "2×2"


def graph_sine():
    """A sine, and what differentiates it."""
    x = tf.constant([0.5])
    y = tf.sin(x)
    return lambda: tf.Session().run(tf.gradients(y, x))


def torch_sine():
    y = torch.sin(torch.ones(2, requires_grad=True)).sum()
    return lambda: y.backward(retain_graph=True)


SINES = {
    "eager": (rg.gradient_override_map, lambda: lambda: rg.grad(rg.sin)(1.0)),
    "graph": (lambda rules: tf.get_default_graph().gradient_override_map(rules), graph_sine),
    "torch": (regrad.torch.gradient_override_map, torch_sine),
}


@pytest.mark.parametrize("kind", SINES)
def test_a_deep_copy_keeps_the_hits_of_its_time(kind):
    scope, sine = SINES[kind]
    with tf.Graph().as_default():
        with scope({"Sin": lambda dy, x: dy * 3.0}) as used:
            differentiate = sine()
            differentiate()
            now = copy.deepcopy(used)
            refused(lambda: now.__exit__(None, None, None), ArgumentError, "not open")
            differentiate()
        left = copy.deepcopy({"report": used})["report"]
        assert [now.hits[0].ran, left.hits[0].ran] == [1, 2]
        assert str(left.table()) == str(used.table())
        left.assert_fired("Sin")
        if kind != "graph":  # whose scopes are entered once
            with left:
                sine()()
            assert [left.hits[0].ran, used.hits[0].ran] == [1, 2]


def test_in_torch_the_missed_relu6_is_seen():
    model = torch.nn.Sequential(torch.nn.ReLU6(), torch.nn.ReLU())
    with regrad.torch.gradient_override_map({"Relu": "Identity"}) as used:
        model(torch.ones(2, requires_grad=True)).sum().backward()
    assert [row[:2] for row in used.untouched().rows] == [("hardtanh (Relu6)", "1"), ("Sum", "1")]
    refused(lambda: used.assert_fired("Relu6"), ArgumentError, "does not override 'Relu6'")
    used.assert_fired("Relu")
    used.assert_fired(torch.relu)
