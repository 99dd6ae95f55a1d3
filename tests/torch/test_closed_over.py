"""What a replaced value, or the function of a `vjp_of`, closes over or writes into."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import regrad as rg
import regrad.torch
from regrad.errors import ArgumentError, GradientError, PassedOverError, RuleError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
override = regrad.torch.gradient_override_map
D = torch.float64


def numbers(*shape):
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(0))


def close(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, step):
        ctx.save_for_backward(x, step)
        return (x / step).round() * step

    @staticmethod
    def backward(ctx, dy):
        x, step = ctx.saved_tensors
        return dy, (dy * ((x / step).round() - x / step)).sum()


class Stepped(nn.Module):
    """Somebody's quantiser, with a step that learns (Esser 2020)."""

    def __init__(self, by_function=False):
        super().__init__()
        self.step = nn.Parameter(torch.tensor(0.3, dtype=D))
        self.by_function = by_function

    def forward(self, x):
        if self.by_function:
            return Rounded.apply(x, self.step)
        v = x / self.step
        return (v + (v.round() - v).detach()) * self.step


class Net(nn.Module):
    """A layer, and the quantiser that a rule for it closes over."""

    def __init__(self, quantise):
        super().__init__()
        torch.manual_seed(0)
        self.quantise, self.layer = quantise, nn.Linear(4, 3).double()

    def forward(self, x):
        return torch.tanh(self.layer(x)).square().sum()


class Surrogate(torch.autograd.Function):
    """The value of one, and the gradient of another."""

    @staticmethod
    def forward(ctx, value, other):
        return value.clone()

    @staticmethod
    def backward(ctx, dy):
        return None, dy


def replacing(q, x, w, bias):
    return F.linear(q(x), q(w), bias)


def closing_over(kind, q):
    """The rules of a kind, and the same by hand."""
    if kind == "replace":
        rules = {F.linear: rg.replace(lambda x, w, bias: replacing(q, x, w, bias))}
        return rules, lambda m, x: torch.tanh(replacing(q, x, m.weight, m.bias)).square().sum()
    rules = {"Tanh": rg.rules.vjp_of(lambda x: torch.sigmoid(q(x)))}
    return (
        rules,
        lambda m, x: Surrogate.apply(m(x).detach().tanh(), torch.sigmoid(q(m(x)))).square().sum(),
    )


@pytest.mark.parametrize("by_function", [False, True])
@pytest.mark.parametrize("kind", ["replace", "vjp_of"])
def test_what_the_function_closes_over_has_its_gradient(kind, by_function):
    q = Stepped(by_function)
    net, x = Net(q), numbers(5, 4)
    rules, by_hand = closing_over(kind, q)
    leaves = [q.step, *net.layer.parameters()]
    first = torch.autograd.grad(by_hand(net.layer, x), leaves, create_graph=True)
    second = torch.autograd.grad(sum(dx.square().sum() for dx in first), leaves)
    seen = []
    q.step.register_hook(seen.append)
    with override(rules, values=True) as used:
        found = torch.autograd.grad(net(x), leaves, create_graph=True)
        close(torch.autograd.grad(sum(dx.square().sum() for dx in found), leaves), second)
        close(found, first)
        seen.clear()
        for run in (
            net,
            lambda x: checkpoint(net, x, use_reentrant=False),
            lambda x: checkpoint(net, x.requires_grad_(), use_reentrant=True),
        ):
            net.zero_grad()
            run(x.clone()).backward()
            close([p.grad for p in leaves], first)
        if not by_function:  # (which has no setup_context)
            loss = torch.func.grad(lambda p: torch.func.functional_call(net, p, (x,)))
            close([loss(dict(net.named_parameters()))["quantise.step"]], first[:1])
        with torch.no_grad():
            close([net(x)], [by_hand(net.layer, x)])
    assert [dx.item() for dx in seen[:3]] == pytest.approx([first[0].item()] * 3)
    used.assert_fired()
    assert any(hit.ran for hit in used.hits)


def test_a_tensor_that_is_no_leaf_and_a_leaf_in_two_places():
    p, x = torch.tensor(2.0, dtype=D, requires_grad=True), numbers(3)  # (x needs no gradient)
    scale = p * p
    both = {
        "Relu": rg.rules.vjp_of(lambda x: x * scale + p),
        "Tanh": rg.replace(lambda x: x * scale + p),
    }
    with override(both, values=True):
        (by_surrogate,) = torch.autograd.grad(torch.relu(x).sum(), p, retain_graph=True)
        torch.tanh(x).sum().backward()
    expected = (4 * x + 1).sum()  # d(x p^2 + p)/dp at 2
    close([by_surrogate, p.grad], [expected, expected])


def scaled(scale, x):
    return x * scale


@pytest.mark.parametrize("make", [rg.replace, rg.rules.vjp_of])
def test_a_parameter_in_a_partial_and_in_functions_of_regrad(make):
    p, x = torch.tensor(2.0, dtype=D, requires_grad=True), numbers(3).requires_grad_()
    held = {"p": p}
    for f in (partial(scaled, p), lambda x: x * held["p"]):
        with override({"Relu": make(f)}, values=True):
            close(
                torch.autograd.grad(torch.relu(x).sum(), [p, x]), [x.sum(), torch.full_like(x, 2)]
            )
    for f in (lambda x: rg.multiply(x, p), lambda x: rg.multiply(x, held["p"])):
        with override({"Relu": make(f)}, values=True):
            for _ in range(2):
                with pytest.raises(
                    GradientError, match="which regrad's functions take for a const"
                ):
                    torch.relu(x)


def test_data_parallel(tmp_path):
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        q = Stepped()
        net, x = Net(q), numbers(5, 4)
        rules, by_hand = closing_over("replace", q)
        expected = torch.autograd.grad(by_hand(net.layer, x), q.step)
        parallel = nn.parallel.DistributedDataParallel(net)
        with override(rules, values=True):
            for _ in range(2):
                net.zero_grad()
                parallel(x).backward()
                close([q.step.grad], expected)
    finally:
        dist.destroy_process_group()


def straight(dy, x, w, bias):
    return dy @ w, dy.mT @ x, dy.sum(0)


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x / 2

    @staticmethod
    def backward(ctx, dy):
        return dy / 2


def test_where_there_is_no_room_for_its_gradient():
    q, layer = Stepped(), nn.Linear(4, 3).double()
    x, forward = numbers(5, 4).requires_grad_(), lambda x, w, bias: replacing(q, x, w, bias)
    for rule in (straight, lambda dy, builtin: builtin(2 * dy)):
        with (
            override({F.linear: rg.replace(forward, rule)}, values=True),
            pytest.raises(GradientError, match=r"closes over 'q.step', which .*rules\.learns\("),
        ):
            layer(x)
        with override({F.linear: rg.replace(forward, rule)}, values=True), torch.no_grad():
            layer(x)
    for rule in (rg.replace(lambda x: q(x)), rg.rules.vjp_of(lambda x: q(x))):
        with (
            pytest.raises(
                ArgumentError, match=r"closes over parameters .* the node of Half, an auto"
            ),
            override({Half: rule}, values=True),
        ):
            pass
    torch.compiler.reset()
    for rule in (rg.replace(lambda x: q(x)), rg.rules.vjp_of(lambda x: q(x))):
        with (
            override({"Tanh": rg.rules.optional(rule)}, values=True),
            pytest.raises(
                PassedOverError, match=r"closes over some, which a program of torch\.comp"
            ),
        ):
            torch.compile(torch.tanh, backend="aot_eager")(x)


def doubled(x):
    return x.mul_(2)


def test_a_forward_that_writes_into_its_input():
    x = numbers(3).requires_grad_()
    with override({"Tanh": rg.replace(doubled)}, values=True):
        y = torch.tanh(x * 1)
        close([y, *torch.autograd.grad(y.sum(), x)], [2 * x, torch.full_like(x, 2)])
    for rule in (lambda dy, x: dy * x, lambda dy, builtin: builtin(dy)):
        with (
            override({"Tanh": rg.replace(doubled, rule)}, values=True),
            pytest.raises(RuleError, match=r"replace: the forward of .* wrote into an input"),
        ):
            torch.tanh(x * 1)
