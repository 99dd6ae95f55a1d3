"""An `autograd.Function` or a custom op as a key, in every form in which one can be written.

The gradients expected are those of Functions that are written with the rule as their backward pass.
"""

import threading

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.utils.checkpoint import checkpoint

import regrad as rg
from regrad.errors import GradientError, PassedOverError, RuleError, UnusedOverrideWarning
from regrad.rules import optional, straight_through, vjp_of
from tests.torch.common import D, bare_function, function, grad, leaf, override

# A surrogate as libraries of spiking networks write it.
Spike = function(lambda x, slope=25.0: (x > 0).to(x.dtype),
                 lambda dy, x, slope=25.0: dy / (slope * x.abs() + 1) ** 2, "Spike")  # fmt: skip


class Silent(Spike):
    """It wants no zeros for gradients that do not arrive."""

    @staticmethod
    def forward(ctx, x, slope=25.0):
        y = Spike.forward(ctx, x, slope)
        ctx.set_materialize_grads(False)
        return y


Newer = function(lambda x, slope: (x > 0).to(x.dtype), lambda dy, x, slope: dy / 2, "Newer",
                 newer=True)  # fmt: skip
Product = bare_function("Product", lambda ctx, scale, a, b: (scale * a * b, a + b),
                        lambda ctx, dy, dz: (None, dy, dz))  # fmt: skip
# It computes an op that might be a key as well.
Within = bare_function("Within", lambda ctx, x: torch.relu(x), lambda ctx, dy: dy)
# As norse has it: its slope is a tensor, too.
SuperSpike = function(lambda input_tensor, alpha: (input_tensor > 0).to(input_tensor.dtype),
                      lambda dy, x, alpha: dy, "SuperSpike")  # fmt: skip
# In the newer form, with a number between, and a name that means something else.
Weighted = function(lambda a, k, forward: a * k + forward, lambda dy, a, k, b: (dy, None, dy),
                    newer=True)  # fmt: skip
Clipped = function(lambda x: x.clamp_(min=0), lambda dy, x: dy, "Clipped", in_place=True)
held = Spike.apply  # as code that was imported before any scope


def triangle(dy, x):
    return dy * torch.clamp(1 - x.abs(), min=0)


def triangle_in_regrad(dy, x):
    return dy * rg.maximum(1 - abs(x), 0.0)


START = (-2.0, -0.25, 0.5)
EXPECTED = torch.tensor([0.0, 0.75, 0.5], dtype=D)
either = pytest.mark.parametrize("rule", [triangle, triangle_in_regrad])
CALLS = {
    "apply": (Spike, lambda x: Spike.apply(x)),
    "held": (Spike, lambda x: held(x, 10.0)),
    "setup_context": (Newer, lambda x: Newer.apply(x, 10.0)),
    "no zeros": (Silent, lambda x: Silent.apply(x)),
    "checkpoint": (Spike, lambda x: checkpoint(held, x, use_reentrant=False)),
    "reentrant": (Spike, lambda x: checkpoint(held, x, use_reentrant=True)),
}


@either
@pytest.mark.parametrize(("key", "call"), CALLS.values(), ids=CALLS)
def test_a_function_as_a_key(key, call, rule):
    x, own = leaf(*START), leaf(*START)
    before = vars(key).copy()
    value = call(own)
    with override({key: rule}) as used:
        y = call(x)
    assert torch.equal(y, value) and vars(key) == before
    y.sum().backward()
    assert torch.equal(x.grad, EXPECTED)
    used.assert_fired(key)
    assert [hit.count for hit in used.hits if "test_functions" in hit.where]
    value.sum().backward()  # which was made outside
    assert not torch.equal(own.grad, EXPECTED)


def test_several_inputs_and_outputs():
    a, b = leaf(*START), leaf(*START)
    with override({Product: lambda dy, a, b: (dy[0] * b, dy[1] * 3)}):
        y, z = Product.apply(2.0, a, b)
    (y.sum() + 5 * z.sum()).backward()
    assert torch.equal(a.grad, b.detach()) and torch.equal(b.grad, torch.full_like(b, 15))


def test_the_rule_is_confined():
    """To the scope, the thread, and the class itself."""
    x, elsewhere = leaf(*START), leaf(*START)
    gradient = grad(held(x), x)
    with override({Spike: triangle}):
        thread = threading.Thread(target=lambda: held(elsewhere).sum().backward())
        with override({}):  # inner scopes go along
            assert torch.equal(grad(held(x), x), EXPECTED)
        with pytest.warns(UnusedOverrideWarning), override({Product: lambda dy: None}):
            pass
        assert torch.equal(grad(Silent.apply(x), x), gradient)
        with override({Spike: lambda dy, x: dy * 2}):
            assert grad(held(x), x).tolist() == [2, 2, 2]
        assert torch.equal(grad(held(x), x), EXPECTED)
    thread.start()
    thread.join()
    assert torch.equal(elsewhere.grad, gradient)
    assert torch.equal(grad(held(x), x), gradient)


def test_ops_inside_are_covered_by_its_rule():
    x = leaf(*START)
    with override({Within: lambda dy: 7 * dy, "Relu": lambda dy: 3 * dy}):
        y = Within.apply(x) + torch.relu(x)
    assert grad(y, x).tolist() == [10, 10, 10]


def test_wrong_answers_are_refused():
    x = leaf(*START)
    with pytest.raises(RuleError, match="shape"), override({Spike: lambda dy: dy[:1]}):
        held(x).sum().backward()


@pytest.mark.versions
def test_what_cannot_be_reached_is_refused():
    with override({Newer: triangle, Spike: triangle}):
        with pytest.raises(PassedOverError, match=r"Newer.*torch\.func"):
            torch.func.grad(lambda x: Newer.apply(x, 1.0).sum())(EXPECTED)
        refused = pytest.raises(GradientError, match="forward mode")
        with forward_ad.dual_level(), refused:
            held(forward_ad.make_dual(leaf(*START), torch.ones(3, dtype=D)))


@torch.library.custom_op("regrad_tests::spike", mutates_args=())
def spike(x: torch.Tensor, slope: float) -> torch.Tensor:
    return (x > 0).to(x.dtype)


spike.register_autograd(lambda ctx, dy: (dy * 11, None), setup_context=lambda *_, **given: None)
spike.register_fake(lambda x, slope: torch.empty_like(x))
OP = torch.ops.regrad_tests.spike
OPS = {"defined": spike, "packet": OP, "overload": OP.default}


@either
@pytest.mark.parametrize("call", OPS.values(), ids=OPS)
@pytest.mark.parametrize("key", OPS.values(), ids=OPS)
def test_a_custom_op_as_a_key(key, call, rule):
    x = leaf(*START)
    with override({key: rule}) as used:
        y = call(x, 2.0)
    assert torch.equal(grad(y, x), EXPECTED)
    used.assert_fired(key)
    assert grad(call(x, 2.0), x).tolist() == [11, 11, 11]


# -- several tensors, by the names of the forward pass ---------------------------------------------


def ruled(rule, function, *args):
    """The gradients by those of the arguments that require one."""
    with override({function: rule}) as used:
        y = function.apply(*args)
    xs = [x for x in args if isinstance(x, torch.Tensor) and x.requires_grad]
    found = torch.autograd.grad(y.sum(), xs, allow_unused=True)
    used.assert_fired()
    return [None if dx is None else dx.tolist() for dx in found]


V, TEN = (-0.5, 0.25), torch.tensor(10.0, dtype=D)
ANSWERS = {
    "triangle": (rg.rules.triangle(), TEN, [0.5, 0.75]),
    "straight_through": (straight_through, TEN, [1.0, 1.0]),
    "by name": (lambda dy, input_tensor, alpha: dy * input_tensor * alpha, TEN, [-5.0, 2.5]),
    "a tuple": (lambda dy, input_tensor, alpha: (dy * alpha, None), TEN, [10.0, 10.0]),
    "by place": (lambda dy, a, b: [dy * b, None], TEN, [10.0, 10.0]),
    "xs": (lambda dy, xs: [dy * xs[1], None], TEN, [10.0, 10.0]),
    "op, grad": (lambda op, grad: [grad * op.inputs[1], None], TEN, [10.0, 10.0]),
    "builtin": (lambda dy, alpha, builtin: alpha * builtin(dy)[0], TEN, [10.0, 10.0]),
    "a number": (lambda dy, input_tensor, alpha: dy * alpha, 4.0, [4.0, 4.0]),
}


@pytest.mark.versions
@pytest.mark.parametrize("name", ANSWERS)
def test_a_function_that_is_differentiated_by_one_tensor(name):
    rule, alpha, expected = ANSWERS[name]
    assert ruled(rule, SuperSpike, leaf(*V), alpha) == [expected]


def test_several_differentiated_tensors_and_numbers_by_name():
    x, w = leaf(*V), leaf(-1.0, 0.5)
    rule = lambda dy, a, k, forward_, forward: (dy * k, dy * forward_)  # noqa: E731
    assert ruled(rule, Weighted, x, 3.0, w) == [[3.0, 3.0], [-1.0, 0.5]]
    moved = lambda dy, a, forward, forward_: (forward(a, forward_), None)  # noqa: E731
    assert ruled(moved, Weighted, x, 3.0, w) == [[-2.5, 1.25], None]


def test_names_that_it_does_not_have_are_refused_when_the_scope_opens():
    scope = override({SuperSpike: lambda dy, alfa: dy})
    with pytest.raises(RuleError, match=r"takes 'alfa'.* Did you mean 'alpha'"), scope:
        pass
    with pytest.raises(RuleError, match=r"takes 'x'.*it may name input_tensor, alpha"):
        ruled(lambda dy, x: dy, SuperSpike, leaf(*V), leaf(10))


def test_untouched_says_where_a_function_is():
    with override({"Tanh": optional(lambda dy: dy)}, watch=True) as used:
        SuperSpike.apply(leaf(*V), TEN) * 2
    assert f"{__name__}.SuperSpike (autograd.Function)" in [r[0] for r in used.untouched().rows]


IN_PLACE = {
    "dy": (lambda dy: 7 * dy, [7, 7]),
    "y": (lambda dy, y: dy * y, [1, 0]),
    "builtin": (lambda dy, builtin: 3 * builtin(dy), [3, 3]),
    "x": (lambda dy, x: dy * x, None),
    "x, regrad": (lambda dy, x: rg.multiply(dy, x), None),
    "vjp_of": (vjp_of(torch.sigmoid), None),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_an_input_that_the_function_changes_in_place(name):
    rule, expected = IN_PLACE[name]
    x = leaf(1, -2)
    with override({Clipped: rule}):
        for _ in range(3):  # (the later calls are known ones)
            if expected is None:
                with pytest.raises(PassedOverError, match=r"Clipped changes its input .* with y,"):
                    Clipped.apply(x * 1)
            else:
                assert grad(Clipped.apply(x * 1), x).tolist() == expected
