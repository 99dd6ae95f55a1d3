"""Errors name the rule and the op with their lines; tracebacks show the caller's code alone."""

import gc
import inspect
import linecache
import re
import traceback

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.core import walk
from regrad.core.generated import define
from regrad.core.tracebacks import SETTING
from regrad.errors import ArgumentError, GradientError, RuleError, ShapeError
from tests.helpers.marks import marked_lines
from tests.helpers.optional import optional
from tests.helpers.rows import refusals, refused, under

jax, torch = optional("jax"), optional("torch")
HERE = re.escape(__file__)


# Rules, each on a line of its own, and the words for their answers.
ANSWERS = {
    "another shape": (lambda dy, x: dy[:1],
                      r"input 'x', returned the shape \(1,\), expected \(3,\)"),
    "two gradients": (lambda dy, x: (dy, dy),
                      "input 'x', returned 2 gradients for one input, expected a Tensor"),
    "integers": (lambda dy, x: rg.astype(dy, "int64"),
                 "input 'x', returned the dtype int64, expected float64"),
    "text": (lambda dy, x: "dy", "input 'x', returned 'dy', expected a Tensor, got str"),
}  # fmt: skip
NONE = {"None": (lambda dy: None, "input 'x', returned None, expected a Tensor. Did it forget")}


def by_regrad(rule):
    with rg.gradient_override_map({"Sign": rule}):
        rg.grad(lambda x: rg.sum(rg.sign(x)))(rg.tensor(np.ones(3)))  # here: by_regrad


def by_torch(rule):
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with rg.torch.gradient_override_map({"Sign": rule}):
        y = torch.sign(x)  # here: by_torch
    y.sum().backward()


def by_jax(rule):
    f = lambda x: jax.numpy.sign(x).sum()  # noqa: E731 # here: by_jax
    jax.grad(rg.jax.override(f, {"Sign": rule}))(jax.numpy.ones(3))


def product(x):
    return rg.sum(x * x)  # here: product


LINES = marked_lines(__file__)


@pytest.mark.parametrize(("rule", "words"), ANSWERS.values(), ids=ANSWERS)
@pytest.mark.parametrize("run", [by_regrad, by_torch, by_jax])
def test_a_wrong_answer_names_the_rule_and_the_op(run, rule, words):
    rule.__name__ = "wrong"
    place = f"(wrong, {__file__}:{rule.__code__.co_firstlineno})"
    says = f"the rule 'wrong' {place} for the op type 'Sign' at {LINES[run.__name__]}"
    refused(lambda: run(rule), RuleError, words, re.escape(says))


@rg.op("TestsTwoFunctions")
def two(xp, a: rg.Tensor, b: rg.Tensor) -> rg.Tensor:
    return a + b


rg.gradient("TestsTwoFunctions", "a")(lambda dy: dy)


@rg.gradient("TestsTwoFunctions", "b")
def by_b(dy):
    return dy[:1]


def answers(dy):
    return dy[:1]


def of_one(dy, a, b):
    return [dy]


halved = rg.custom_grad(lambda x: (x * 0.5, answers))
ONES = rg.ones((3,))
PLACES = {
    "a wrong number": (lambda: under({"Mul": of_one}, rg.grad(product), ONES), f"of_one, {HERE}:.* "
                       f"for the op type 'Mul' at {re.escape(LINES['product'])}.*returned 1, and "
                       "the op has 2 inputs"),
    "one of several functions": (lambda: rg.grad(lambda b: rg.sum(two(ONES, b)))(ONES),
                                 rf"\(by_b, {HERE}:"),
    "a gradient function": (lambda: rg.grad(lambda x: rg.sum(halved(x)))(ONES),
                            rf"'<lambda>' \(answers, {HERE}:"),
}  # fmt: skip
test_the_function_is_named = refusals(PLACES, RuleError)


@pytest.mark.parametrize("answer", [lambda dy: dy[:1], lambda dy: dy.astype("int64"), lambda dy: 1])
def test_custom_gradients_in_other_libraries_are_named_with_their_line(answer):
    @rg.jax.custom_grad
    def in_jax(x):
        return x * 2, answer

    gradient = jax.grad(lambda x: in_jax(x).sum())
    refused(lambda: gradient(jax.numpy.ones(3)), RuleError, rf"in_jax \(in_jax, {HERE}:")


@pytest.mark.parametrize(("rule", "words"), (ANSWERS | NONE).values(), ids=ANSWERS | NONE)
def test_a_wrong_answer_of_the_rule_of_an_op_itself_is_refused(rule, words, monkeypatch):
    for name in ("rule", "replaced"):
        monkeypatch.setattr(rg.find_op("Sign"), name, getattr(rg.find_op("Sign"), name))
    rg.gradient("Sign", "x", overwrite=True)(rule)
    refused(lambda: rg.grad(lambda x: rg.sum(rg.sign(x)))(np.ones(3)), RuleError, words)


def surrogate(x, no, alpha, more):
    return x


PARAMETERS = {
    by_regrad: lambda: rg.Variable(2.0), by_jax: lambda: jax.numpy.ones(()),
    by_torch: lambda: torch.nn.Parameter(torch.ones(())),
}  # fmt: skip


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("run", PARAMETERS)
def test_a_rule_that_does_not_fit_is_placed_at_the_users_function(run, learned):
    rule = rg.rules.vjp_of(surrogate)
    rule = rg.rules.learns(rule, alpha=PARAMETERS[run]()) if learned else rule
    words = rf"\(surrogate, {HERE}:{surrogate.__code__.co_firstlineno}\) takes 'no"
    refused(lambda: run(rule), RuleError, words)


# -- tracebacks ------------------------------------------------------------------------------------


def wrong_rule(dy):
    raise ValueError("mine")


def model(x):
    return rg.sin(x)


def misshapen(x):
    return rg.reshape(x, (7,))


def outer(x):
    return rg.sum(misshapen(x))


def run_of_a_graph():
    with tf.Graph().as_default(), tf.Session() as session:
        x = tf.placeholder(tf.float32, [None])
        y = tf.reshape(x, [2, 2])
        session.run(y, {x: [1.0, 2.0, 3.0]})


def frames(error):
    """The names of the functions in a traceback, below the call of the test."""
    names = [entry.name for entry in traceback.extract_tb(error.__traceback__)]
    return names[1 + (names[0] == "refused") :]


def by_wrong_rule():
    with rg.gradient_override_map({"Sin": wrong_rule}):
        rg.grad(model)(1.0)


SQUARE = rg.zeros((3, 3))
# Of each call, the functions in the traceback of its error.
SHOWN = {
    "a rule": (by_wrong_rule, ValueError, ["wrong_rule"]),
    "an op": (lambda: misshapen(ONES), ShapeError, ["misshapen", "reshape"]),
    **{wrap.__name__: (lambda wrap=wrap: wrap(outer)(SQUARE), ShapeError,
                       ["outer", "misshapen"])
       for wrap in (rg.jit, rg.grad, rg.vmap, rg.hessian)},
    "a refusal": (lambda: rg.grad(lambda x: rg.zeros(()))(1.0), GradientError, []),
    "a graph": (run_of_a_graph, tf.errors.InvalidArgumentError, []),
}  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "expected"), SHOWN.values(), ids=SHOWN)
def test_tracebacks_show_the_callers_code(call, kind, expected):
    assert frames(refused(call, kind)) == expected


def test_what_a_rule_raises_is_noted_with_its_lines():
    (note,) = refused(by_wrong_rule, ValueError, "mine").__notes__
    assert re.fullmatch(rf"in the rule 'wrong_rule' \(wrong_rule, {HERE}:\d+\) for the op type "
                        rf"'Sin' at {HERE}:\d+", note)  # fmt: skip


def test_what_breaks_in_the_library_keeps_every_frame(monkeypatch):
    broken = define("broken", "def broken(*args):\n    raise KeyError('broken')\n", {})
    monkeypatch.setattr(walk, "_walk", broken)
    error = refused(lambda: rg.grad(model)(1.0), ArgumentError)
    assert frames(error.__cause__)[-2:] == ["walk", "broken"]


def test_all_frames_are_there_on_demand(monkeypatch):
    monkeypatch.setenv(SETTING, "full")
    assert "_walk" in frames(refused(by_wrong_rule, ValueError, "mine"))


# -- functions that are written out as source ------------------------------------------------------


def test_each_function_has_its_own_source():
    twice = define("twice", "def twice(x):\n    return 2 * x", {})
    thrice = define("twice", "def twice(x):\n    return 3 * x", {})
    assert (twice(4), thrice(4)) == (8, 12)
    assert twice.__code__.co_filename != thrice.__code__.co_filename
    line = linecache.getline(twice.__code__.co_filename, 2, twice.__globals__)
    assert line == "    return 2 * x\n"
    assert inspect.getsource(rg.expand_dims).startswith("def expand_dims(")
    found = traceback.extract_tb(refused(rg.expand_dims, TypeError).__traceback__)
    assert any("misfit_" in (entry.line or "") for entry in found)


def test_nothing_is_left_of_a_function_that_nobody_looked_at():
    function = define("twice", "def twice(x):\n    return 2 * x", {})
    file = function.__code__.co_filename
    del function
    gc.collect()
    assert file not in linecache.cache
    assert linecache.getline(file, 2) == ""
