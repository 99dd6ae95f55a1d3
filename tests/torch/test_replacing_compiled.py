"""Values that are replaced in programs of torch.compile."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, vmap

import regrad as rg
from tests.torch.common import close, numbers, override
from tests.torch.placed import refused
from tests.torch.test_replacing import QUANTISED, by_hand, gumbel, model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def compiled(f):
    return torch.compile(f, backend="aot_eager", fullgraph=True)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("rules", ["F.linear", "MatMul", "forward", "regrad"])
def test_a_quantised_layer(rules):
    net, x = model(), numbers(5, 4).requires_grad_()
    leaves = [x, *net.parameters()]
    program = compiled(net)
    with override(QUANTISED[rules], values=True) as used:
        y = program(x)
        found = torch.autograd.grad(y.square().sum(), leaves)
        with torch.no_grad():
            without = program(x)
    expected = by_hand(net, x)
    close([y, without], [expected, expected])
    close(found, torch.autograd.grad(expected.square().sum(), leaves))
    used.assert_fired()
    close([program(x)], [net(x)])


@pytest.mark.parametrize("block", [torch.enable_grad, torch.no_grad])
def test_one_program_under_several_scopes(block):
    program, x = compiled(lambda x: torch.tanh(x) + 1), numbers(4)
    doubled, tripled = ({"Tanh": rg.replace(lambda x, k=k: k * x)} for k in (2, 3))
    with block():
        for _ in range(2):
            for rules, expected in ((doubled, 2 * x), (tripled, 3 * x), ({}, x.tanh())):
                with override(rules, values=True):
                    close([program(x)], [expected + 1])
            close([program(x)], [x.tanh() + 1])


@pytest.mark.parametrize("gradient", [None, lambda dy, y: dy * y])
def test_a_function_that_reads_what_changes(gradient):
    """It runs when the program does: a number, a list and vectors that it reads may change."""
    scale, codes = [2.0], numbers(7, 3, seed=1)
    x = numbers(5, 3).requires_grad_()
    program = compiled(lambda x: torch.tanh(x) * 3)

    def forward(x):
        return torch.sin(x) * scale[0] + codes[0]

    for factor in (2.0, 5.0):
        scale[0] = factor
        codes.add_(1)
        with override({"Tanh": rg.replace(forward, gradient)}, values=True):
            y = program(x)
            (dx,) = torch.autograd.grad(y.sum(), x)
            with torch.no_grad():
                without = program(x)
        expected = x.sin() * factor + codes[0]
        close([y, without], [3 * expected, 3 * expected])
        close([dx], [3 * (x.cos() * factor if gradient is None else expected)])


@pytest.mark.slow
def test_gumbel_and_losses():
    x, target = numbers(4, 3).requires_grad_(), torch.tensor([0, 1, 2, 0])
    with override({"Softmax": rg.replace(gumbel)}, values=True):
        y = compiled(lambda x: F.softmax(x, -1))(x)
        (dx,) = torch.autograd.grad(y[:, 0].sum(), x)
    assert set(y.detach().round(decimals=9).unique().tolist()) == {0, 1}
    assert dx.abs().sum() > 0
    for block in (torch.enable_grad, torch.no_grad):  # (torch.compile asks no mode about its parts)
        with override({"LogSoftmax": rg.replace(lambda x: 2 * x)}, values=True), block():
            loss = compiled(lambda x: nn.CrossEntropyLoss()(x, target))(x)
        close([loss], [F.nll_loss(2 * x, target)])


@pytest.mark.slow
def test_torch_func_inside():
    x = numbers(4)
    with override({"Tanh": rg.replace(lambda x: x**3)}, values=True):
        close([compiled(lambda x: vmap(grad(torch.tanh))(x))(x)], [3 * x**2])


@torch.compiler.allow_in_graph
def untraced(x):
    return torch.tanh(x) * 1


REFUSED = {
    "foreach": (lambda x: torch._foreach_tanh([x])[0], "computes 'Tanh' inside, whose value is re"),
    "untraced": (lambda x: untraced(x), "untraced computes 'Tanh' inside, whose value is replaced"),
    "in place": (lambda x: torch.tanh_(x * 1), "works in place here"),
    "out=": (lambda x: torch.tanh(x, out=torch.empty_like(x)), "given as out="),
    "shape": (lambda x: torch.tanh(x[:2]), r"returned the shape \(3,\)"),
}


@pytest.mark.parametrize("block", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, block):
    f, message = REFUSED[case]
    rules = {"Tanh": rg.rules.optional(rg.replace(lambda x: x.new_zeros(3)))}
    refused(message, rules, lambda: block()(compiled(f))(numbers(3)), Exception, values=True)
