"""An `autograd.Function` or a custom op as a key, in every form in which one can be written.

The gradients expected are those of Functions that are written with the rule as their backward pass.
"""

import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import regrad as rg
import regrad.torch
from regrad.errors import GradientError, PassedOverError, RuleError, UnusedOverrideWarning

override = regrad.torch.gradient_override_map


class Spike(torch.autograd.Function):
    """A surrogate as libraries of spiking networks write it."""

    @staticmethod
    def forward(ctx, x, slope=25.0):
        ctx.save_for_backward(x)
        ctx.slope = slope
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return dy / (ctx.slope * x.abs() + 1) ** 2, None


class Newer(torch.autograd.Function):
    @staticmethod
    def forward(x, slope):
        return (x > 0).to(x.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.slope = inputs[1]

    backward = Spike.backward


class Silent(Spike):
    """It wants no zeros for gradients that do not arrive."""

    @staticmethod
    def forward(ctx, x, slope=25.0):
        ctx.set_materialize_grads(False)
        return Spike.forward(ctx, x, slope)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scale, a, b):
        return scale * a * b, a + b

    @staticmethod
    def backward(ctx, dy, dz):
        return None, dy, dz


class Within(torch.autograd.Function):
    """It computes an op that might be a key as well."""

    @staticmethod
    def forward(ctx, x):
        return torch.relu(x)

    @staticmethod
    def backward(ctx, dy):
        return dy


held = Spike.apply  # as code that was imported before any scope


def triangle(dy, x):
    return dy * torch.clamp(1 - x.abs(), min=0)


def triangle_in_regrad(dy, x):
    return dy * rg.maximum(1 - abs(x), 0.0)


def leaf():
    return torch.tensor([-2.0, -0.25, 0.5], dtype=torch.float64, requires_grad=True)


EXPECTED = torch.tensor([0.0, 0.75, 0.5], dtype=torch.float64)
CALLS = {
    "apply": (Spike, lambda x: Spike.apply(x)),
    "held": (Spike, lambda x: held(x, 10.0)),
    "setup_context": (Newer, lambda x: Newer.apply(x, 10.0)),
    "no zeros": (Silent, lambda x: Silent.apply(x)),
    "checkpoint": (Spike, lambda x: checkpoint(held, x, use_reentrant=False)),
    "reentrant": (Spike, lambda x: checkpoint(held, x, use_reentrant=True)),
}


@pytest.mark.parametrize("rule", [triangle, triangle_in_regrad])
@pytest.mark.parametrize(("key", "call"), CALLS.values(), ids=CALLS)
def test_a_function_as_a_key(key, call, rule):
    x, own = leaf(), leaf()
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
    a, b = leaf(), leaf()
    with override({Product: lambda dy, a, b: (dy[0] * b, dy[1] * 3)}):
        y, z = Product.apply(2.0, a, b)
    (y.sum() + 5 * z.sum()).backward()
    assert torch.equal(a.grad, b.detach()) and torch.equal(b.grad, torch.full_like(b, 15))


def test_second_derivatives_are_those_of_the_rule():
    x = leaf()
    with override({Spike: lambda dy, x: dy * x**3}):
        y = held(x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.allclose(second, 3 * x.detach() ** 2)


def test_the_rule_is_confined():
    """To the scope, the thread, and the class itself."""
    x, elsewhere = leaf(), leaf()
    gradient = torch.autograd.grad(held(x).sum(), x)[0]
    with override({Spike: triangle}):
        thread = threading.Thread(target=lambda: held(elsewhere).sum().backward())
        with override({}):  # inner scopes go along
            assert torch.equal(torch.autograd.grad(held(x).sum(), x)[0], EXPECTED)
        with pytest.warns(UnusedOverrideWarning), override({Product: lambda dy: None}):
            pass
        assert torch.equal(torch.autograd.grad(Silent.apply(x).sum(), x)[0], gradient)
        inner = lambda dy, x: dy * 2  # noqa: E731
        with override({Spike: inner}):
            assert torch.autograd.grad(held(x).sum(), x)[0].tolist() == [2, 2, 2]
        assert torch.equal(torch.autograd.grad(held(x).sum(), x)[0], EXPECTED)
    thread.start()
    thread.join()
    assert torch.equal(elsewhere.grad, gradient)
    assert torch.equal(torch.autograd.grad(held(x).sum(), x)[0], gradient)


def test_ops_inside_are_covered_by_its_rule():
    x = leaf()
    with override({Within: lambda dy: 7 * dy, "Relu": lambda dy: 3 * dy}):
        y = Within.apply(x) + torch.relu(x)
    y.sum().backward()
    assert x.grad.tolist() == [10, 10, 10]


def test_wrong_answers_are_refused():
    x = leaf()
    with override({Spike: lambda dy: dy[:1]}):
        y = held(x)
    with pytest.raises(RuleError, match="shape"):
        y.sum().backward()


@pytest.mark.versions
def test_what_cannot_be_reached_is_refused():
    with override({Newer: triangle, Spike: triangle}):
        with pytest.raises(PassedOverError, match=r"Newer.*torch\.func"):
            torch.func.grad(lambda x: Newer.apply(x, 1.0).sum())(leaf().detach())
        with (
            torch.autograd.forward_ad.dual_level(),
            pytest.raises(GradientError, match="forward mode"),
        ):
            held(torch.autograd.forward_ad.make_dual(leaf(), torch.ones(3, dtype=torch.float64)))


@torch.library.custom_op("regrad_tests::spike", mutates_args=())
def spike(x: torch.Tensor, slope: float) -> torch.Tensor:
    return (x > 0).to(x.dtype)


spike.register_autograd(
    lambda ctx, dy: (dy * 11, None), setup_context=lambda ctx, inputs, output: None
)
spike.register_fake(lambda x, slope: torch.empty_like(x))
OP = torch.ops.regrad_tests.spike
OPS = {"defined": spike, "packet": OP, "overload": OP.default}


@pytest.mark.parametrize("rule", [triangle, triangle_in_regrad])
@pytest.mark.parametrize("call", OPS.values(), ids=OPS)
@pytest.mark.parametrize("key", OPS.values(), ids=OPS)
def test_a_custom_op_as_a_key(key, call, rule):
    x = leaf()
    with override({key: rule}) as used:
        y = call(x, 2.0)
    y.sum().backward()
    assert torch.equal(x.grad, EXPECTED)
    used.assert_fired(key)
    assert torch.autograd.grad(call(x, 2.0).sum(), x)[0].tolist() == [11, 11, 11]


# -- several tensors, by the names of the forward pass ---------------------------------------------


class SuperSpike(torch.autograd.Function):
    """As norse has it: its slope is a tensor, too."""

    @staticmethod
    def forward(ctx, input_tensor, alpha):
        return (input_tensor > 0).to(input_tensor.dtype)

    @staticmethod
    def backward(ctx, dy):
        return dy, None


class Weighted(torch.autograd.Function):
    """In the newer form, with a number between, and a name that means something else."""

    @staticmethod
    def forward(a, k, forward):
        return a * k + forward

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, dy):
        return dy, None, dy


V = torch.tensor([-0.5, 0.25], dtype=torch.float64)
TEN = torch.tensor(10.0, dtype=torch.float64)


def ruled(rule, function, *args):
    """The gradients by those of the arguments that require one."""
    with regrad.torch.gradient_override_map({function: rule}) as used:
        y = function.apply(*args)
    xs = [x for x in args if isinstance(x, torch.Tensor) and x.requires_grad]
    found = torch.autograd.grad(y.sum(), xs, allow_unused=True)
    used.assert_fired()
    return [None if dx is None else dx.tolist() for dx in found]


@pytest.mark.versions
@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (regrad.rules.triangle(), [0.5, 0.75]),
        (regrad.rules.straight_through, [1.0, 1.0]),
        (lambda dy, input_tensor, alpha: dy * input_tensor * alpha, [-5.0, 2.5]),
        (lambda dy, input_tensor, alpha: (dy * alpha, None), [10.0, 10.0]),
        (lambda dy, a, b: [dy * b, None], [10.0, 10.0]),
        (lambda dy, xs: [dy * xs[1], None], [10.0, 10.0]),
        (lambda op, grad: [grad * op.inputs[1], None], [10.0, 10.0]),
        (lambda dy, alpha, builtin: alpha * builtin(dy)[0], [10.0, 10.0]),
    ],
)
def test_a_function_that_is_differentiated_by_one_tensor(rule, expected):
    assert ruled(rule, SuperSpike, V.clone().requires_grad_(), TEN) == [expected]


def test_several_differentiated_tensors_and_numbers_by_name():
    x, w = V.clone().requires_grad_(), (2 * V).requires_grad_()
    rule = lambda dy, a, k, forward_, forward: (dy * k, dy * forward_)  # noqa: E731
    assert ruled(rule, Weighted, x, 3.0, w) == [[3.0, 3.0], [-1.0, 0.5]]
    moved = lambda dy, a, forward, forward_: (forward(a, forward_), None)  # noqa: E731
    assert ruled(moved, Weighted, x, 3.0, w) == [[-2.5, 1.25], None]


def test_a_number_where_a_tensor_may_stand():
    rule = lambda dy, input_tensor, alpha: dy * alpha  # noqa: E731
    assert ruled(rule, SuperSpike, V.clone().requires_grad_(), 4.0) == [[4.0, 4.0]]


def test_names_that_it_does_not_have_are_refused_when_the_scope_opens():
    scope = regrad.torch.gradient_override_map({SuperSpike: lambda dy, alfa: dy})
    with pytest.raises(RuleError, match=r"asks for 'alfa'.* Did you mean 'alpha'"), scope:
        pass
    both = [V.clone().requires_grad_(), TEN.clone().requires_grad_()]
    with pytest.raises(RuleError, match=r"asks for 'x'.*it may name input_tensor, alpha"):
        ruled(lambda dy, x: dy, SuperSpike, *both)


def test_untouched_says_where_a_function_is():
    rules = {"Tanh": regrad.rules.optional(lambda dy: dy)}
    with regrad.torch.gradient_override_map(rules) as used:
        SuperSpike.apply(V.clone().requires_grad_(), TEN) * 2
    assert f"{__name__}.SuperSpike (autograd.Function)" in [r[0] for r in used.untouched().rows]


class Clipped(torch.autograd.Function):
    """It works in place, and says so."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.clamp_(min=0)

    @staticmethod
    def backward(ctx, dy):
        return dy


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (lambda dy: 7 * dy, [7, 7]),
        (lambda dy, y: dy * y, [1, 0]),
        (lambda dy, builtin: 3 * builtin(dy), [3, 3]),
        (lambda dy, x: dy * x, None),
        (lambda dy, x: rg.multiply(dy, x), None),
        (rg.rules.vjp_of(torch.sigmoid), None),
    ],
)
def test_an_input_that_the_function_changes_in_place(rule, expected):
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    with override({Clipped: rule}):
        for _ in range(3):  # (the later calls are known ones)
            if expected is None:
                with pytest.raises(PassedOverError, match=r"Clipped changes its input .* for y,"):
                    Clipped.apply(x * 1)
            else:
                (dx,) = torch.autograd.grad(Clipped.apply(x * 1).sum(), x)
                assert dx.tolist() == expected
