"""The op sheet and the registry: every op is complete, and mistakes are refused."""

import inspect
import traceback

import pytest

import regrad as rg
from regrad.core.registry import OPS
from regrad.core.rule import NoGradient, NoRule
from regrad.errors import ArgumentError, MissingRuleError, RuleError
from tests.helpers.rows import refusals, refused, results, under

OWN = [t for t in rg.op_types() if OPS[t].function.__module__.startswith("regrad.")]


@pytest.mark.parametrize("op_type", OWN)
def test_every_op_and_every_differentiable_input_has_a_rule(op_type):
    op = OPS[op_type]
    assert not isinstance(op.rule, NoRule)
    if not isinstance(op.rule, NoGradient) and op.rule.pulls is not None:
        lacking = {i.name for n, i in enumerate(op.inputs) if n not in op.rule.parts}
        known = {"condition", "indices", "ids", "mask", "argmax"}  # integers and bools
        assert lacking <= known | {i.name for i in op.inputs if i.integers}


@rg.op("TestsCube")
def cube(xp, x: rg.Tensor, /, *, scale: float = 1.0) -> rg.Tensor:
    """`scale * x³`."""
    return scale * x * x * x


@rg.op("TestsHalfRule")
def half(xp, a: rg.Tensor, b: rg.Tensor, /) -> rg.Tensor:
    return a * b


@rg.op("TestsNoRule")
def no_rule(xp, x: rg.Tensor, /) -> rg.Tensor:
    return x + 1


@rg.op("TestsTrace")
def fails(xp, x: rg.Tensor, /) -> rg.Tensor:
    return x


@rg.op("TestsNumber")
def number(xp, x: rg.Tensor, /) -> rg.Tensor:
    return 1.0


@rg.op("TestsWeighted", promotes=True)
def weighted(xp, xs: list[rg.Tensor], w: rg.Tensor | None = None) -> rg.Tensor:
    total = sum(xs[1:], xs[0])
    return total if w is None else total * w


rg.gradient("TestsCube")(lambda dy, x, scale: dy * (3 * scale) * x * x)
rg.gradient("TestsHalfRule", "a")(lambda dy, b: dy * b)
rg.gradient("TestsWeighted", "w")(lambda dy, xs: (dy * sum(xs[1:], xs[0])).sum())


@rg.gradient("TestsTrace")
def _(dy):
    return 1 / 0


@rg.gradient("TestsWeighted", "xs")
def _(dy, xs_shape, w):
    return [dy if w is None else dy * w for _ in xs_shape]


SHORT = {"TestsWeighted": lambda dy, xs: ([dy], None)}
VALUES = {
    "an op": (lambda: cube(2.0, scale=2.0), 16.0),
    "its rule": (lambda: rg.grad(rg.grad(lambda x: cube(x, scale=2.0)))(2.0), 24.0),
    "off the path": (lambda: rg.grad(lambda x: x + rg.stop_gradient(no_rule(x)))(1.0), 1.0),
    "half a rule": (lambda: rg.grad(lambda a: half(a, 3.0))(1.0), 3.0),
    "a sequence and an optional input": (
        lambda: rg.grads(lambda a, b, w: weighted([a, b], w))([1.0, 2.0, 5.0]), [5.0, 5.0, 3.0]),
    "without it": (lambda: rg.grad(lambda a: weighted([a, a]))(1.0), 2.0),
}  # fmt: skip
test_ops_of_users = results(VALUES)
ERRORS = [
    (lambda: cube(1.0, sale=2.0), TypeError, "unexpected keyword argument 'sale'"),
    (lambda: cube(1.0, scale=rg.scalar(2.0)), ArgumentError, "scale is an attribute"),
    (lambda: rg.grad(no_rule)(1.0), MissingRuleError,
     r"'TestsNoRule' is on the path.*@gradient\('Tests"),
    (lambda: rg.grad(lambda b: half(3.0, b))(1.0), MissingRuleError, "by its input 'b'"),
    (lambda: rg.gradient("TestsNoRule")(lambda dy, ax: dy), RuleError, "takes 'ax'"),
    (lambda: rg.gradient("TestsCube", overwrite=True)(lambda dy, scal: dy), RuleError,
     "takes 'scal'.*Did you mean 'scale'.*x, y, scale"),
    (lambda: rg.gradient("TestsNoRule", "z")(lambda dy: dy), RuleError, "no input 'z'"),
    (lambda: rg.op("TestsNoXp")(lambda x: x), ArgumentError, "must take the array namespace `xp`"),
    (lambda: number(2.0), ArgumentError, "must return arrays"),
    (lambda: under(SHORT, rg.grad(lambda a: weighted([a, a])), 1.0), RuleError,
     r"input 'xs\[0\]'.*a sequence of 2"),
]  # fmt: skip


test_mistakes_are_refused = refusals(ERRORS)


def test_ops_and_rules_are_shown():
    assert list(inspect.signature(cube).parameters) == ["x", "scale"]
    assert "Op type: `TestsCube`" in cube.__doc__
    error = refused(lambda: rg.grad(fails)(1.0), ZeroDivisionError)
    assert "dTestsTrace" in "".join(traceback.format_tb(error.__traceback__))
