"""An `autograd.Function` as a key in programs of torch.compile: as in eager mode."""

import pytest
import torch
from torch import nn

import regrad as rg
from regrad.errors import RuleError
from tests.torch.common import D, override

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::UserWarning",
        "ignore::FutureWarning",
        "ignore:.*should not be instantiated:DeprecationWarning",  # PyTorch 2.13, in Dynamo
    ),
    pytest.mark.usefixtures("fresh"),
]
V = torch.tensor([-0.5, 0.2, 0.3], dtype=D)


@pytest.fixture
def fresh():
    torch.compiler.reset()


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v, slope=25.0):
        ctx.save_for_backward(v)
        ctx.slope = slope
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.slope * ctx.saved_tensors[0], None


class SetUp(torch.autograd.Function):
    @staticmethod
    def forward(v, w):
        return (v > 0).to(v.dtype) * w, v * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dy, dz):
        v, w = ctx.saved_tensors
        return dy * w + dz * w, dz * v


def gradients(run, rules, parameters=(), way="aot_eager", **options):
    v = V.clone().requires_grad_()
    compiled = torch.compile(run, backend=way, fullgraph=True)
    with override(rules, **options) as used:
        y = compiled(v)
        found = torch.autograd.grad(y.sum(), [v, *parameters])
    used.assert_fired()
    return [y.detach(), *found]


def same(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


STEP = (V > 0).to(D)


def triangle_at(x):
    return (1 - x.abs()).clamp(min=0)


@pytest.mark.parametrize("way", ["aot_eager", "eager"])
@pytest.mark.parametrize(("rule", "expected"), [
    (lambda dy: 3 * dy, torch.full((3,), 9.0, dtype=D)),
    (rg.rules.triangle(), triangle_at(V) + 2 * triangle_at(2 * V)),
    (lambda dy, v, slope: dy * v * slope, 25 * V + 2 * 3 * 2 * V),
    (lambda dy, builtin: 2 * builtin(dy), 2 * (25 * V + 2 * 3 * 2 * V)),
], ids=["native", "regrad", "named", "builtin"])  # fmt: skip
def test_a_function_has_the_rule(way, rule, expected):
    def run(v):
        return Spike.apply(v) + Spike.apply(2 * v, 3.0)

    same(gradients(run, {Spike: rule}, way=way), [2 * STEP, expected])


def test_several_tensors_and_results():
    w = torch.tensor([1.0, 2.0, 3.0], dtype=D, requires_grad=True)

    def run(v):
        y, z = SetUp.apply(v, w)
        return y + 10 * z

    def rule(dy, v, w):
        return dy[0] * v, dy[1] * w

    y, by_v, by_w = gradients(run, {SetUp: rule}, [w])
    same([y, by_v, by_w], [STEP * w.detach() + 10 * V * w.detach(), V, 10 * w.detach()])


def test_a_rule_learns():
    slope = nn.Parameter(torch.tensor(2.0, dtype=D))

    def rule(dy, v, s):
        return dy * s * v, {"s": (dy * v).sum()}

    for used in (lambda run, *rest: gradients(run, *rest), eager):
        found = used(
            lambda v: Spike.apply(v, 1.0), {Spike: rg.rules.learns(rule, s=slope)}, [slope]
        )
        same(found, [STEP, 2 * V, V.sum()])


def eager(run, rules, parameters):
    v = V.clone().requires_grad_()
    with override(rules):
        y = run(v)
        return [y.detach(), *torch.autograd.grad(y.sum(), [v, *parameters])]


def test_a_value_is_replaced():
    y, by_v = gradients(
        lambda v: Spike.apply(v), {Spike: rg.replace(lambda v: torch.tanh(v))}, values=True
    )
    same([y, by_v], [V.tanh(), 1 - V.tanh() ** 2])


def test_keys_choose_by_place():
    class Layer(nn.Module):
        def forward(self, v):
            return Spike.apply(v, 1.0)

    net = nn.Sequential(Layer(), nn.Identity(), Layer())
    rules = {rg.at("2", Spike): lambda dy: 5 * dy}
    y, by_v = gradients(net, rules, model=net)
    same([y, by_v], [STEP, 5 * V])  # the first layer keeps its own gradient


def test_an_inner_scope_decides():
    run = torch.compile(lambda v: Spike.apply(v), backend="aot_eager", fullgraph=True)
    v = V.clone().requires_grad_()
    with override({Spike: lambda dy: 3 * dy}), override({"Tanh": rg.rules.optional("Tanh")}):
        run(v).sum().backward()
    same([v.grad], [torch.full((3,), 3.0, dtype=D)])
    run(v.detach().requires_grad_())  # outside, the Function has its own gradient again
    u = V.clone().requires_grad_()
    run(u).sum().backward()
    same([u.grad], [25 * V])


def test_a_wrong_answer_raises():
    run = torch.compile(lambda v: Spike.apply(v), backend="aot_eager", fullgraph=True)
    with override({Spike: lambda dy: dy[:2]}), pytest.raises(RuleError, match=r"Spike.*shape"):
        run(V.clone().requires_grad_()).sum().backward()
