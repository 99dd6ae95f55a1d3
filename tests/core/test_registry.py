"""The op sheet and the registry: every op is complete, and mistakes are refused."""

import inspect
import traceback

import pytest

import regrad as rg
from regrad.core.registry import OPS
from regrad.core.rule import NoGradient, NoRule
from regrad.errors import ArgumentError, MissingRuleError, RuleError

OWN = [t for t in rg.op_types() if OPS[t].function.__module__.startswith("regrad.")]


@pytest.mark.parametrize("op_type", OWN)
def test_every_op_has_a_rule_or_says_that_it_has_none(op_type):
    assert not isinstance(OPS[op_type].rule, NoRule)


@pytest.mark.parametrize("op_type", OWN)
def test_every_differentiable_input_has_a_rule(op_type):
    op = OPS[op_type]
    if isinstance(op.rule, NoGradient) or op.rule.pulls is None:
        return
    lacking = {i.name for n, i in enumerate(op.inputs) if n not in op.rule.parts}
    known = {"condition", "indices", "ids", "mask", "argmax"}  # integers and bools
    assert lacking <= known | {i.name for i in op.inputs if i.integers}


def test_an_op_in_one_block():
    @rg.op("TestsCube")
    def cube(xp, x: rg.Tensor, /, *, scale: float = 1.0) -> rg.Tensor:
        """`scale * x³`."""
        return scale * x * x * x

    @rg.gradient("TestsCube")
    def _(dy, x, scale):
        return dy * (3 * scale) * x * x

    assert cube(rg.scalar(2.0), scale=2.0).item() == 16.0
    assert rg.grad(rg.grad(lambda x: cube(x, scale=2.0)))(2.0).item() == 24.0
    assert list(inspect.signature(cube).parameters) == ["x", "scale"]
    assert "Op type: `TestsCube`" in cube.__doc__
    with pytest.raises(TypeError, match="unexpected keyword argument 'sale'"):
        cube(rg.scalar(1.0), sale=2.0)
    with pytest.raises(ArgumentError, match="scale is an attribute"):
        cube(rg.scalar(1.0), scale=rg.scalar(2.0))


def test_missing_rules():
    @rg.op("TestsNoRule")
    def no_rule(xp, x: rg.Tensor, /) -> rg.Tensor:
        return x + 1

    with pytest.raises(MissingRuleError, match=r"'TestsNoRule' is on the path.*@gradient\('Tests"):
        rg.grad(no_rule)(1.0)
    assert rg.grad(lambda x: x + rg.stop_gradient(no_rule(x)))(1.0).item() == 1.0

    @rg.op("TestsHalfRule")
    def half(xp, a: rg.Tensor, b: rg.Tensor, /) -> rg.Tensor:
        return a * b

    @rg.gradient("TestsHalfRule", "a")
    def _(dy, b):
        return dy * b

    assert rg.grad(lambda a: half(a, rg.scalar(3.0)))(1.0).item() == 3.0
    with pytest.raises(MissingRuleError, match="by its input 'b'"):
        rg.grad(lambda b: half(rg.scalar(3.0), b))(1.0)


def test_unknown_names_are_refused_at_registration():
    @rg.op("TestsNames")
    def names(xp, x: rg.Tensor, /, *, axis: int = 0) -> rg.Tensor:
        return x

    with pytest.raises(RuleError, match=r"asks for 'axes'.*Did you mean 'axis'.*x, y, axis"):
        rg.gradient("TestsNames")(lambda dy, axes: dy)
    with pytest.raises(RuleError, match="no input 'z'"):
        rg.gradient("TestsNames", "z")(lambda dy: dy)
    with pytest.raises(ArgumentError, match="must take the array namespace `xp` first"):
        rg.op("TestsNoXp")(lambda x: x)


def test_rules_are_named_in_tracebacks():
    @rg.op("TestsTrace")
    def trace(xp, x: rg.Tensor, /) -> rg.Tensor:
        return x

    @rg.gradient("TestsTrace")
    def _(dy):
        raise RuntimeError("here")

    with pytest.raises(RuntimeError) as caught:
        rg.grad(trace)(1.0)
    assert "dTestsTrace" in "".join(traceback.format_tb(caught.tb))


def test_sequence_and_optional_inputs():
    @rg.op("TestsWeighted", promotes=True)
    def weighted(xp, xs: list[rg.Tensor], w: rg.Tensor | None = None) -> rg.Tensor:
        total = sum(xs[1:], xs[0])
        return total if w is None else total * w

    @rg.gradient("TestsWeighted", "xs")
    def _(dy, xs_shape, w):
        return [dy if w is None else dy * w for _ in xs_shape]

    @rg.gradient("TestsWeighted", "w")
    def _(dy, xs):
        return (dy * sum(xs[1:], xs[0])).sum()

    da, db, dw = rg.grads(lambda a, b, w: weighted([a, b], w))([1.0, 2.0, 5.0])
    assert (da.item(), db.item(), dw.item()) == (5.0, 5.0, 3.0)
    assert rg.grad(lambda a: weighted([a, a]))(1.0).item() == 2.0

    with (
        rg.gradient_override_map({"TestsWeighted": lambda dy, xs: ([dy], None)}),
        pytest.raises(RuleError, match=r"input 'xs\[0\]'.*a sequence of 2"),
    ):
        rg.grad(lambda a: weighted([a, a]))(1.0)
