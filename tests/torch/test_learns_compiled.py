"""Rules that learn parameters, in programs of torch.compile: as in eager mode."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import regrad as rg
from regrad.errors import PassedOverError
from regrad.rules import learns, vjp_of
from tests.torch.common import D, close, numbers, override

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("fresh"),
]
X = numbers(4, 5) * 4


@pytest.fixture
def fresh():
    torch.compiler.reset()


def compiled(run):
    return torch.compile(run, backend="aot_eager", fullgraph=True)


def parameter(value):
    return nn.Parameter(torch.tensor(value, dtype=D))


def pact(dy, x, alpha):
    return dy * ((x > 0) & (x < alpha)), {"alpha": (dy * (x >= alpha)).sum()}


def by_regrad(dy, x, alpha):
    dx = rg.where(rg.logical_and(x > 0, x < alpha), dy, rg.zeros_like(dy))
    return dx, {"alpha": rg.sum(rg.where(x >= alpha, dy, rg.zeros_like(dy)))}


def stepped(x, w, bias, step):
    return F.linear(x, w + ((w / step).round() * step - w).detach() + (step - step.detach()), bias)


def quantized(step):
    return rg.replace(stepped, learns(vjp_of(stepped), step=step))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(inplace=True)).to(D)


def gradients(run, net, rules, learned, x=X, again=False):
    x = x.clone().requires_grad_()
    with override(rules, model=net, values=True) as used:
        y = run(x).square().sum()
    found = torch.autograd.grad(y, [x, *learned, *net.parameters()])
    if not again:  # (programs that ran before do not report hits)
        used.assert_fired()
    return found


def both_ways(net, rules, learned, run=None):
    """Compare a compiled network with the same in eager mode."""
    run = run or net
    expected = gradients(run, net, rules, learned)
    program = compiled(run)
    close(gradients(program, net, rules, learned), expected)
    return program, expected


@pytest.mark.parametrize("rule", [pact, by_regrad])
def test_a_parameter_for_each_module(rule):
    net, (p, q) = network(), (parameter(0.5), parameter(1.5))
    rules = {
        rg.at("1", "Relu"): learns(rule, alpha=p),
        rg.at("3", "Relu"): learns(rule, alpha=q),
    }
    program, _ = both_ways(net, rules, [p, q])
    with torch.no_grad():
        p.mul_(0.2)
    found = gradients(program, net, rules, [p, q], again=True)
    close(found, gradients(net, net, rules, [p, q]))


def test_replaced_values_and_another_parameter_in_the_next_scope():
    net, p, q = network(), parameter(0.5), parameter(0.125)
    program, first = both_ways(net, {F.linear: quantized(p)}, [p])
    found = gradients(program, net, {F.linear: quantized(q)}, [q])
    close(found, gradients(net, net, {F.linear: quantized(q)}, [q]))
    assert abs(found[1] - first[1]) > 1e-3


def test_checkpoints_and_decomposed_functions():
    net, p = network(), parameter(0.7)
    inner = lambda x: checkpoint(net, x, use_reentrant=False)  # noqa: E731
    both_ways(net, {"Relu": learns(pact, alpha=p)}, [p], inner)
    rule = lambda dy, builtin, gain: (builtin(dy * gain), {"gain": dy.sum()})  # noqa: E731
    loss = lambda x: F.cross_entropy(net(x), torch.arange(4))  # noqa: E731
    both_ways(net, {"LogSoftmax": learns(rule, gain=p)}, [p], loss)


def test_a_scope_around_and_autocast():
    net, (p, q) = network().float(), (nn.Parameter(torch.tensor(v)) for v in (0.5, 0.25))
    with override({"Relu": learns(pact, alpha=p)}), torch.autocast("cpu", torch.bfloat16):
        found, expected = (
            gradients(run, net, {F.linear: quantized(q)}, [p, q], X.float())
            for run in (compiled(net), net)
        )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_a_function_that_torch_compile_puts_in_itself_has_no_parameters():
    rule = lambda dy, builtin, gain: (builtin(dy * gain), {"gain": dy.sum()})  # noqa: E731
    loss = lambda x: nn.CrossEntropyLoss()(x, torch.arange(4))  # noqa: E731
    with (
        override({"LogSoftmax": learns(rule, gain=parameter(0.7))}),
        pytest.raises(PassedOverError, match="would treat as constants"),
    ):
        compiled(loss)(numbers(4, 5).requires_grad_())
