"""A wrong answer of a rule names the rule, with its line, and the op, with that of its call."""

import re
from pathlib import Path

import numpy as np
import pytest

import regrad as rg
from regrad.errors import RuleError
from tests.helpers.optional import optional

jax, torch = optional("jax"), optional("torch")


def truncating(dy, x):
    return dy[:1]


def of_two(dy, x):
    return dy, dy


def of_one(dy, a, b):
    return [dy]


def of_integers(dy, x):
    return rg.astype(dy, "int64")


def of_text(dy, x):
    return "dy"


ANSWERS = {
    truncating: r"input 'x', returned the shape \(1,\), expected \(3,\)",
    of_two: "input 'x', returned 2 gradients for one input, expected a Tensor",
    of_integers: "input 'x', returned the dtype int64, expected float64",
    of_text: "input 'x', returned 'dy', expected a Tensor, got str",
}


def by_regrad(rule):
    with rg.gradient_override_map({"Sign": rule}):
        rg.grad(lambda x: rg.sum(rg.sign(x)))(rg.tensor(np.ones(3)))  # regrad's


def by_torch(rule):
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with rg.torch.gradient_override_map({"Sign": rule}):
        y = torch.sign(x)  # torch's
    y.sum().backward()


def by_jax(rule):
    def f(x):
        return jax.numpy.sign(x).sum()  # jax's

    with jax.enable_x64(True):
        jax.grad(rg.jax.override(f, {"Sign": rule}))(jax.numpy.ones(3))


HOSTS = {by_regrad: "regrad's", by_torch: "torch's", by_jax: "jax's"}


def line_of(marker):
    lines = Path(__file__).read_text("utf-8").splitlines()
    (number,) = [i for i, text in enumerate(lines, 1) if text.endswith(f"# {marker}")]
    return f"{__file__}:{number}"


@pytest.mark.parametrize("rule", ANSWERS)
@pytest.mark.parametrize("run", HOSTS)
def test_a_wrong_answer_names_the_rule_and_the_op(run, rule):
    with pytest.raises(RuleError, match=ANSWERS[rule]) as caught:
        run(rule)
    name, place = rule.__name__, f"{__file__}:{rule.__code__.co_firstlineno}"
    says = f"the rule '{name}' ({name}, {place}) for the op type 'Sign' at {line_of(HOSTS[run])}"
    assert says in str(caught.value)


def test_a_wrong_number_of_gradients_names_the_rule_and_the_op():
    def f(x):
        return rg.sum(x * x)  # product

    with (
        rg.gradient_override_map({"Mul": of_one}),
        pytest.raises(RuleError, match=r"returned 1, and the op has 2 inputs") as caught,
    ):
        rg.grad(f)(rg.ones((3,)))
    assert f"of_one, {__file__}:" in str(caught.value)
    assert f"for the op type 'Mul' at {line_of('product')}" in str(caught.value)


def test_the_function_for_the_input_is_named_of_a_rule_that_has_several():
    @rg.op("TestsTwoFunctions")
    def two(xp, a: rg.Tensor, b: rg.Tensor) -> rg.Tensor:
        return a + b

    @rg.gradient("TestsTwoFunctions", "a")
    def by_a(dy):
        return dy

    @rg.gradient("TestsTwoFunctions", "b")
    def by_b(dy):
        return dy[:1]

    with pytest.raises(RuleError, match=re.escape(f"(by_b, {__file__}:")):
        rg.grad(lambda b: rg.sum(two(rg.ones((3,)), b)))(rg.ones((3,)))


def test_the_gradient_function_of_a_custom_function_is_named():
    @rg.custom_grad
    def halved(x):
        def answers(dy):
            return dy[:1]

        return x * 0.5, answers

    with pytest.raises(RuleError, match=re.escape(f"'halved' (answers, {__file__}:")):
        rg.grad(lambda x: rg.sum(halved(x)))(rg.ones((3,)))


@pytest.mark.parametrize("answer", [lambda dy: dy[:1], lambda dy: dy.astype("int64"), lambda dy: 1])
def test_custom_gradients_in_other_libraries_are_named_with_their_line(answer):
    @rg.jax.custom_grad
    def in_jax(x):
        return x * 2, answer

    with pytest.raises(RuleError, match=re.escape(f"in_jax (in_jax, {__file__}:")):
        jax.grad(lambda x: in_jax(x).sum())(jax.numpy.ones(3))


def test_what_a_rule_raises_is_noted_with_its_lines():
    def failing(dy):
        raise OSError("no")

    with rg.gradient_override_map({"Sign": failing}), pytest.raises(OSError, match="no") as caught:
        rg.grad(rg.sign)(1.0)
    (note,) = caught.value.__notes__
    assert re.fullmatch(
        rf"in the rule 'failing' \(failing, {re.escape(__file__)}:\d+\) for the op type 'Sign' at "
        rf"{re.escape(__file__)}:\d+", note,
    )  # fmt: skip


def of_none(dy):
    pass


@pytest.mark.parametrize("rule", [*ANSWERS, of_none])
def test_a_wrong_answer_of_the_rule_of_an_op_itself_is_refused(rule, monkeypatch):
    for name in ("rule", "replaced"):
        monkeypatch.setattr(rg.find_op("Sign"), name, getattr(rg.find_op("Sign"), name))
    rg.gradient("Sign", "x", overwrite=True)(rule)
    message = ANSWERS.get(rule, "input 'x', returned None, expected a Tensor. Did it forget")
    with pytest.raises(RuleError, match=message):
        rg.grad(lambda x: rg.sum(rg.sign(x)))(rg.tensor(np.ones(3)))
