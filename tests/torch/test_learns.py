"""Rules with parameters that learn, against Functions of autograd that take them as inputs."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import regrad as rg
from regrad.errors import ArgumentError, PassedOverError, RuleError
from regrad.rules import learns, optional, vjp_of
from tests.torch.common import D, close, function, leaf, numbers, override

X = numbers(4, 5) * 4


def parameter(value):
    return nn.Parameter(torch.tensor(value, dtype=D))


def by_hand(value, rule):
    """A Function of x and a parameter, with the gradients of a rule."""

    def gradients(dy, x, p):
        dx, by_name = rule(dy, x, p)
        return dx, *by_name.values()

    return function(value, gradients).apply


def lsq(dy, x, step):  # the step size of a quantizer, Esser et al. (2020)
    inside = (x.abs() <= 3).to(dy.dtype)
    return dy * inside / step, {"step": (dy * (x.round() - x * inside / step)).sum() * 0.1}


def pact(dy, x, alpha):  # the clip of an activation, Choi et al. (2018)
    return dy * ((x > 0) & (x < alpha)), {"alpha": (dy * (x >= alpha)).sum()}


def slope(dy, x, beta):  # a surrogate whose steepness is learned
    s = 1 - torch.tanh(beta * x) ** 2
    return dy * beta * s, {"beta": (dy * x * s).sum()}


smooth = vjp_of(lambda x, beta: torch.tanh(beta * x))
CASES = {
    "lsq": ("Round", torch.round, lsq, lsq, "step", 0.7),
    "pact": (F.relu6, F.relu6, pact, pact, "alpha", 6.0),
    "slope": ("Sign", torch.sign, slope, slope, "beta", 1.3),
    "in place": ("Relu", lambda x: x.clone().relu_(), pact, pact, "alpha", 2.5),
    "the gradient of another function": ("Sign", torch.sign, smooth, slope, "beta", 1.3),
}


def twice(f, x):
    return (f(x * 2) ** 2).sum() + f(x.cos()).sin().sum()


def to_second_order(y, *xs):
    dxs = torch.autograd.grad(y, xs, create_graph=True)
    total = sum((dx**2).sum() for dx in dxs)
    return [*dxs, *torch.autograd.grad(total, xs, allow_unused=True)]


@pytest.mark.parametrize("case", CASES)
def test_exact_to_second_order(case):
    key, f, rule, right, name, start = CASES[case]
    x, p = X.clone().requires_grad_(), parameter(start)
    hand = by_hand(lambda x, p: f(x), right)
    expected = to_second_order(twice(lambda x: hand(x, p), x), x, p)
    rules = {key: learns(rule, **{name: p})}
    with override(rules) as used:
        close(to_second_order(twice(f, x), x, p), expected)
    used.assert_fired()
    for use_reentrant in (False, True):
        options = {"use_reentrant": use_reentrant}
        with override(rules):
            y = twice(lambda x, options=options: checkpoint(f, x, **options), x)
        p.grad = x.grad = None
        y.backward()
        close([x.grad, p.grad], expected[:2])


def test_hooks_and_training():
    p, seen = parameter(2.0), []
    p.register_hook(seen.append)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU6(), nn.Linear(5, 5), nn.ReLU6()).to(D)
    optimizer = torch.optim.SGD([p], 0.1)
    for n in (1, 2):
        with override({F.relu6: learns(pact, alpha=p)}):
            (-model(20 * X).sum()).backward()  # (much of it is beyond the clip)
        assert len(seen) == n
        optimizer.step()
        optimizer.zero_grad()
    assert p.item() > 2.0


def test_several_inputs_and_builtin():
    a, b = numbers(3, 4).requires_grad_(), numbers(4, 2).requires_grad_()
    p, q = parameter(2.0), parameter(3.0)

    def rule(dy, builtin, gain, shift):
        by_a, by_b = gain * builtin(dy)
        return by_a, by_b + shift, {"gain": dy.sum(), "shift": None}

    with override({"MatMul": learns(rule, gain=p, shift=q)}):
        (a @ b).sum().backward()
    ones = torch.ones(3, 2, dtype=D)
    close([a.grad, b.grad, p.grad], [2 * ones @ b.mT, 2 * a.mT @ ones + 3, ones.sum()])
    assert q.grad is None


def test_whole_calls_and_places():
    layer, p, x = nn.Linear(5, 2).to(D), parameter(2.0), X.clone().requires_grad_()
    rule = lambda dy, builtin, gain: (builtin(dy * gain), {"gain": dy.sum()})  # noqa: E731
    inputs = [x, layer.weight, layer.bias]
    expected = torch.autograd.grad(layer(x).sum() * 2, inputs)
    with override({rg.at(layer): learns(rule, gain=p)}):
        found = torch.autograd.grad(layer(x).sum(), [*inputs, p])
    close(found, [*expected, torch.tensor(8.0, dtype=D)])
    net = nn.Sequential(nn.ReLU(), nn.ReLU())
    with override({rg.at("1", "Relu"): learns(pact, alpha=p)}, model=net):
        found = torch.autograd.grad(net(x).sum(), [x, p])
    close(found, [((x > 0) & (x < 2)).to(D), (x >= 2).sum().to(D)])


def test_torch_func():
    def loss(p):
        with override({"Relu": learns(pact, alpha=p * 1)}):
            return torch.relu(X).sum()

    assert torch.func.grad(loss)(torch.tensor(2.0, dtype=D)) == (X >= 2).sum()


# -- refusals --------------------------------------------------------------------------------------

P = parameter(2.0)
Half = function(lambda x: x / 2, lambda dy, x: dy / 2, "Half")


def by_step(dy, step):
    return dy, {"step": step}


def opened(key, rule, scope=override):
    with scope({key: rule}):
        return torch.relu(leaf(1, 1)).sum()


def compiled():
    torch.compiler.reset()
    with override({"Relu": optional(learns(by_step, step=P))}):
        torch.compile(torch.relu, backend="aot_eager")(leaf(1, 1))


def answer(rule):
    y = opened("Relu", learns(rule, step=P))
    y.backward()


def surrogate(x, no, alpha, more):
    return x


WHERE = re.escape(f"(surrogate, {__file__}:{surrogate.__code__.co_firstlineno}) asks for 'no")
NOT_A_LEAF = "step expected a tensor of PyTorch that requires"
UNNAMED = "learns step, and did not return gradients by name"
REFUSED = {
    "no parameter": (lambda: learns(lambda dy: dy), ArgumentError, "learns names no parameter"),
    "no rule": (lambda: learns(3, step=P), ArgumentError, "learns expected a rule, got"),
    "a rule without it": (lambda: learns(lambda dy, x: dy, step=P), RuleError,
                          "does not ask for its parameter 'step'"),
    "a float": (lambda: opened("Relu", learns(by_step, step=2.0)), ArgumentError, NOT_A_LEAF),
    "detached": (lambda: opened("Relu", learns(by_step, step=P.detach())), ArgumentError,
                 NOT_A_LEAF),
    "a Function": (lambda: opened(Half, learns(by_step, step=P)), ArgumentError,
                   r"Half is an autograd\.Function, whose node has no room"),
    "a call": (lambda: learns(by_step, step=P)(P), RuleError, "cannot be called"),
    "regrad's own": (
        lambda: opened("Relu", learns(by_step, step=P), rg.gradient_override_map),
        ArgumentError, "expected a Variable or a Tensor of regrad's, got Par"),
    "compiled": (compiled, PassedOverError, "has parameters that learn"),
    "an answer without": (lambda: answer(lambda dy, step: dy), RuleError, UNNAMED),
    "an answer of no names": (lambda: answer(lambda dy, step: (dy, {})), RuleError, UNNAMED),
    "another name": (lambda: answer(lambda dy, step: (dy, {"st": dy})), RuleError, UNNAMED),
    "a surrogate": (lambda: opened("Relu", vjp_of(surrogate)), RuleError, WHERE),
    "one that learns": (lambda: opened("Relu", learns(vjp_of(surrogate), alpha=P)), RuleError,
                        WHERE),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name):
    call, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        call()


def test_a_layer_is_quantised_by_a_step_that_learns():
    """LSQ whole: the value is replaced, and the step has a gradient (Esser 2020)."""

    def value(x, step):
        return torch.round(x / step).clamp(-4, 3) * step

    def rule(dy, x, step):
        v = x / step
        inside = (v > -4) & (v < 3)
        by_step = (dy * torch.where(inside, v.round() - v, v.clamp(-4, 3))).sum()
        return dy * inside, {"step": by_step}

    quantise = by_hand(value, rule)
    ours, theirs = parameter(0.3), parameter(0.3)
    x = torch.linspace(-2, 2, 9, dtype=D)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    for _ in range(2):
        with override({"Tanh": rg.replace(value, learns(rule, step=ours))}, values=True):
            y = torch.tanh(a)
        z = quantise(b, theirs)
        for each in (y, z):
            each.square().sum().backward()
        close([y, a.grad, ours.grad], [z, b.grad, theirs.grad])
        with torch.no_grad():
            for step in (ours, theirs):
                step -= 0.01 * step.grad
