"""Tracebacks show the caller's code; the library's own frames are folded away."""

from __future__ import annotations

import traceback

import pytest

import regrad as rg
from regrad.core import walk
from regrad.core.generated import define
from regrad.core.tracebacks import SETTING
from regrad.errors import ArgumentError, GradientError, ShapeError


def functions(error):
    """The names of the functions in a traceback."""
    return [entry.name for entry in traceback.extract_tb(error.__traceback__)]


def wrong_rule(dy):
    raise ValueError("mine")


def model(x):
    return rg.sin(x)


def misshapen(x):
    return rg.reshape(x, (7,))


def test_an_error_in_a_rule_shows_the_call_and_the_rule():
    with (
        pytest.raises(ValueError, match="mine") as info,
        rg.gradient_override_map({"Sin": wrong_rule}),
    ):
        rg.grad(model)(1.0)
    assert functions(info.value)[1:] == ["wrong_rule"]


def test_an_error_at_an_op_shows_the_line_of_the_op():
    with pytest.raises(ShapeError) as info:
        misshapen(rg.zeros(3))
    assert functions(info.value)[1:] == ["misshapen", "reshape"]


@pytest.mark.parametrize("wrap", [rg.jit, rg.grad, rg.vmap, rg.hessian])
def test_an_error_within_a_function_of_functions_shows_the_functions_alone(wrap):
    def f(x):
        return rg.sum(misshapen(x))

    with pytest.raises(ShapeError) as info:
        wrap(f)(rg.zeros((3, 3)))
    ours = [e for e in traceback.extract_tb(info.value.__traceback__) if "regrad/src" in e.filename]
    assert not ours
    assert functions(info.value)[1:] == ["f", "misshapen"]


def test_a_refusal_shows_the_call_alone():
    with pytest.raises(GradientError) as info:
        rg.grad(lambda x: rg.zeros(()))(1.0)
    assert len(functions(info.value)) == 1


def test_a_graph_shows_the_run_alone():
    import regrad.v1 as tf

    with tf.Graph().as_default(), tf.Session() as session:
        x = tf.placeholder(tf.float32, [None])
        y = tf.reshape(x, [2, 2])
        with pytest.raises(tf.errors.InvalidArgumentError) as info:
            session.run(y, {x: [1.0, 2.0, 3.0]})
    assert len(functions(info.value)) == 1


def test_what_breaks_in_the_library_keeps_every_frame(monkeypatch):
    broken = define("broken", "def broken(*args):\n    raise KeyError('broken')\n", {})
    monkeypatch.setattr(walk, "_walk", broken)
    with pytest.raises(ArgumentError) as info:
        rg.grad(model)(1.0)
    assert functions(info.value.__cause__)[-2:] == ["walk", "broken"]


def test_all_frames_are_there_on_demand(monkeypatch):
    monkeypatch.setenv(SETTING, "full")
    with (
        pytest.raises(ValueError, match="mine") as info,
        rg.gradient_override_map({"Sin": wrong_rule}),
    ):
        rg.grad(model)(1.0)
    assert "_walk" in functions(info.value)
