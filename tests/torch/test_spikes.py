"""Rules for the Functions of spiking networks: surrogates, and slopes and widths that learn."""

import math

import pytest
import torch
from torch import nn

import regrad as rg
from regrad.errors import ArgumentError, RuleError
from regrad.rules import learns, spike, vjp_of
from tests.torch.common import D, close, override

STEPS = 6


class FastSigmoid(torch.autograd.Function):
    """A spike as in snntorch, with its slope as an argument of the forward pass."""

    @staticmethod
    def forward(ctx, input_, slope):
        ctx.save_for_backward(input_)
        ctx.slope = slope
        return (input_ > 0).to(input_)

    @staticmethod
    def backward(ctx, grad_output):
        (input_,) = ctx.saved_tensors
        return grad_output / (ctx.slope * torch.abs(input_) + 1.0) ** 2, None


class Leaky(nn.Module):
    """Leaky neurons whose spike is a function of the membrane."""

    def __init__(self, spikes):
        super().__init__()
        self.spikes = spikes

    def forward(self, currents):
        membrane, found = torch.zeros_like(currents[0]), []
        for current in currents:
            membrane = 0.8 * membrane + current
            found.append(self.spikes(membrane - 0.5))
            membrane = membrane - 0.5 * found[-1].detach()
        return torch.stack(found)


def network(spikes):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), Leaky(spikes), nn.Linear(7, 3), Leaky(spikes)).to(D)


def inputs():
    return torch.linspace(0, 3, STEPS * 2 * 5, dtype=D).sin().reshape(STEPS, 2, 5) * 2


def default(v):
    return FastSigmoid.apply(v, 25.0)


def gradients(net, *more):
    xs = inputs().requires_grad_()
    y = net(xs)
    assert 0.1 < y.detach().mean() < 0.9
    loss = (y * torch.linspace(1, 2, y.numel(), dtype=D).reshape(y.shape)).sum()
    return torch.autograd.grad(loss, [xs, *net.parameters(), *more])


def smooth_spike(smooth):
    """A spike with the gradient of another function, by `detach`."""

    def spikes(v):
        y = smooth(v)
        return y + ((v > 0).to(v) - y).detach()

    return spikes


@pytest.mark.parametrize("slope", [25.0, 4.0])
def test_a_surrogate_for_the_function_of_a_network(slope):
    due = gradients(network(lambda v: FastSigmoid.apply(v, slope)))
    for rule in (
        rg.rules.superspike(slope),
        lambda dy, input_: dy / (1 + slope * input_.abs()) ** 2,
    ):
        with override({FastSigmoid: rule}) as used:
            found = gradients(network(default))
        used.assert_fired()
        close(found, due)


SMOOTH = {  # with the rules of which they are the integrals
    "superspike": (lambda v, k: v / (1 + k * v.abs()), rg.rules.superspike),
    "sigmoid_surrogate": (lambda v, k: 4 / k * torch.sigmoid(k * v), rg.rules.sigmoid_surrogate),
    "arctan_surrogate": (
        lambda v, k: torch.atan(math.pi / 2 * k * v) / math.pi, rg.rules.arctan_surrogate),
    "gaussian": (lambda v, k: torch.erf(v / (k * math.sqrt(2))) / 2, rg.rules.gaussian),
    "circ": (lambda v, k: v / torch.sqrt(1 + (v / k) ** 2), spike.circ),
}  # fmt: skip


@pytest.mark.parametrize("name", SMOOTH)
def test_a_slope_learns_for_a_function(name):
    smooth, make = SMOOTH[name]
    p = nn.Parameter(torch.tensor(1.5, dtype=D))
    due = gradients(network(smooth_spike(lambda v: smooth(v, p))), p)
    with override({FastSigmoid: learns(vjp_of(lambda x, k: smooth(x, k)), k=p)}) as used:
        found = gradients(network(default), p)
    used.assert_fired()
    close(found, due)
    with override({FastSigmoid: make(1.5)}):  # the surrogate is the derivative
        close(gradients(network(default)), due[:-1])


def test_a_rule_with_a_dict_learns_for_a_function():
    def rule(dy, x, k):
        flat = 1 + k * x.abs()
        return dy / flat**2, {"k": (-dy * x * x.abs() / flat**2).sum()}

    smooth = SMOOTH["superspike"][0]
    p = nn.Parameter(torch.tensor(1.5, dtype=D))
    due = gradients(network(smooth_spike(lambda v: smooth(v, p))), p)
    with override({FastSigmoid: learns(rule, k=p)}):
        close(gradients(network(default), p), due)


def test_slopes_of_two_layers_learn_apart():
    net = network(default)
    first, second = (nn.Parameter(torch.tensor(v, dtype=D)) for v in (1.0, 3.0))
    smooth = SMOOTH["superspike"][0]
    rules = {
        rg.at("1", FastSigmoid): learns(vjp_of(lambda x, k: smooth(x, k)), k=first),
        rg.at("3", FastSigmoid): learns(vjp_of(lambda x, k: smooth(x, k)), k=second),
    }
    with override(rules, model=net):
        found = gradients(net, first, second)
    other = network(None)
    other[1].spikes = smooth_spike(lambda v: smooth(v, first))
    other[3].spikes = smooth_spike(lambda v: smooth(v, second))
    close(found, gradients(other, first, second))


def test_a_learned_slope_trains():
    net, p = network(default), nn.Parameter(torch.tensor(1.5, dtype=D))
    optimizer = torch.optim.SGD([*net.parameters(), p], 0.05)
    rules = {FastSigmoid: learns(vjp_of(lambda x, k: SMOOTH["superspike"][0](x, k)), k=p)}
    losses = []
    for _ in range(10):
        with override(rules):
            loss = ((net(inputs()).mean(0) - 0.5) ** 2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert p.item() != 1.5 and min(losses) < losses[0]


def test_the_function_has_a_parameter_of_that_name():
    p = nn.Parameter(torch.tensor(1.5, dtype=D))
    rule = learns(vjp_of(lambda x, slope: SMOOTH["superspike"][0](x, slope)), slope=p)
    words = "learns: 'FastSigmoid' has a 'slope' of its own, .*Rename the parameter: my_slope"
    with override({FastSigmoid: rule}), pytest.raises(RuleError, match=words):
        default(inputs().requires_grad_())


@pytest.mark.parametrize("rules", [{None: spike.circ()}, {None: spike.circ(), "Step": spike.circ()},
                                   {rg.at("1"): {None: spike.circ()}}])  # fmt: skip
def test_a_key_that_is_none_is_refused(rules):
    with pytest.raises(ArgumentError, match="the key None is neither an op type such as 'Relu'"):
        override(rules, model=network(default))
    with pytest.raises(ArgumentError, match="the key None"):
        rg.jax.override(lambda x: x, rules)


def test_a_surrogate_for_an_op_of_two_inputs():
    x = inputs().requires_grad_()
    words = "the rule 'circ' .*takes 'x', which the op type 'Mul' does not have"
    with pytest.raises(RuleError, match=words), override({"Mul": spike.circ()}):
        (x * x).sum()


@pytest.mark.slow
def test_a_surrogate_is_compiled():
    net = network(lambda v: torch.heaviside(v, v.new_zeros(())))
    rules = {"Step": rg.rules.arctan_surrogate()}
    with override(rules):
        due = gradients(net)
    torch.compiler.reset()
    with override(rules) as used:
        found = gradients(torch.compile(net, backend="aot_eager", fullgraph=True))
    used.assert_fired()
    close(found, due)
