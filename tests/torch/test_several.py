"""Several gradients: inputs that stand twice, inputs that broadcast, and ops of several outputs."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import regrad as rg
from regrad.errors import RuleError
from regrad.torch.host import HOST
from tests.torch.common import D, override, under
from tests.torch.placed import Made


def numbers(*shape):
    return torch.linspace(0.3, 1.7, torch.Size(shape).numel(), dtype=D).reshape(shape)


def by_backward(y, leaves):
    y.backward()
    return [x.grad for x in leaves]


ROADS = {"backward": by_backward, "grad": torch.autograd.grad}
road = pytest.mark.parametrize("road", ROADS.values(), ids=ROADS)


def of(values):
    """Return the arguments of a parametrization by the values of a table, under its names."""
    return {"argvalues": values.values(), "ids": values}


# -- one op of autograd's, whose inputs are one tensor, or broadcast -------------------------------

TWICE = {
    "mul": lambda x: x * x,
    "add": lambda x: x + x,
    "sub": lambda x: x - x,
    "pow": lambda x: x**x,
    "stack": lambda x: torch.stack([x, x]).sum(0),
    "cat": lambda x: torch.cat([x, x])[:4],
    "maximum": lambda x: torch.maximum(x, x),
    "addcmul": lambda x: torch.addcmul(x, x, x),
    "lerp": lambda x: torch.lerp(x, x, x),
    "atan2": lambda x: torch.atan2(x, x),
}


def module(f, *parameters):
    return Made(lambda m, x: f(x, *m.weights), weights=nn.ParameterList(parameters))


@road
@pytest.mark.parametrize("f", **of(TWICE))
@pytest.mark.parametrize("form", ["vjp_of", "replace", "whole call"])
def test_an_input_that_stands_twice(road, f, form):
    x = numbers(4).requires_grad_()
    (due,) = torch.autograd.grad(f(x).sum(), x)
    model = nn.Sequential(module(f) if form == "whole call" else nn.ReLU())
    scope = {
        "whole call": lambda: override({rg.at("0"): rg.rules.reverse()}, model=model),
        "replace": lambda: override({"Relu": rg.replace(f)}, values=True),
        "vjp_of": lambda: override({"Relu": rg.rules.vjp_of(f)}),
    }[form]
    with scope():
        y = model(x).sum()
    torch.testing.assert_close(road(y, [x])[0], -due if form == "whole call" else due)


BROADCAST = {
    "scale": lambda x, p: x * p,
    "position": lambda x, p: x + p,
    "difference": lambda x, p: p - x,
    "quotient": lambda x, p: x / p,
}
RULES = {
    "reverse": (rg.rules.reverse(), -1),
    "scale": (rg.rules.scale(3.0), 3),
    "builtin": (lambda dy, builtin: builtin(2 * dy), 2),
}


@road
@pytest.mark.parametrize("f", **of(BROADCAST))
@pytest.mark.parametrize("shape", [(3,), (1,), (), (2, 1, 3), (1, 1, 1)])
@pytest.mark.parametrize("rule", RULES)
def test_a_parameter_that_broadcasts(road, f, shape, rule):
    value, factor = RULES[rule]
    x, p = numbers(2, 4, 3).requires_grad_(), nn.Parameter(numbers(*shape))
    weights = numbers(2, 4, 3)
    due = torch.autograd.grad((f(x, p) * weights).sum(), [x, p])
    model = nn.Sequential(module(f, p))
    y = under({rg.at("0"): value}, lambda: (model(x) * weights).sum(), model=model)
    dx, dp = road(y, [x, p])
    torch.testing.assert_close(dx, factor * due[0])
    torch.testing.assert_close(dp, due[1] * (2 if rule == "builtin" else 1))


def hooked(x):
    y = x.exp()
    y.register_hook(lambda dy: 5 * dy)
    return y


@road
def test_frozen_weights_and_hooks_inside_of_a_call(road):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), module(hooked))
    model[1].weight.requires_grad_(False)
    with override({rg.at("1"): rg.rules.reverse()}, model=model):
        y = model[:2](torch.ones(4, 3)).sum()
    assert road(y, [model[1].bias])[0].tolist() == [4.0] * 3
    x = numbers(4).requires_grad_()
    y = under({rg.at("2"): rg.rules.reverse()}, lambda: model[2](x).sum(), model=model)
    torch.testing.assert_close(road(y, [x])[0], -5 * x.exp().detach())


# -- several outputs -------------------------------------------------------------------------------

SEVERAL = {
    torch.sort: lambda x: torch.sort(x, dim=0),
    torch.topk: lambda x: torch.topk(x, 2, dim=0),
    torch.linalg.qr: torch.linalg.qr,
    torch.linalg.eigh: lambda x: torch.linalg.eigh(x @ x.T + torch.diag(numbers(4))),
    torch.std_mean: lambda x: torch.std_mean(x, 0),
    torch.unbind: torch.unbind,
    torch.split: lambda x: torch.split(x, 2),
    torch.frexp: torch.frexp,
    rg.at("0"): nn.Sequential(nn.LSTM(4, 4, dtype=D)),
}
if HOST.release >= (2, 12):  # (before, torch had no gradient of it)
    SEVERAL[torch.aminmax] = lambda x: torch.aminmax(x, dim=0)
TIMES = {
    "builtin(2 dy)": lambda dy, builtin: builtin(2 * dy),
    "builtin(dy + dy)": lambda dy, builtin: builtin(dy + dy),
    "2 builtin(dy)": lambda dy, builtin: 2 * builtin(dy),
    "each": lambda dy, builtin: builtin([2 * d for d in dy]),
}


def name(key):
    return getattr(key, "__name__", None) or str(key)


def matrix():
    x = numbers(4, 4).cos() + torch.diag(numbers(4) * 3)
    return x.requires_grad_()


def first(y):
    y = y[0]
    return (y * torch.linspace(1, 2, y.numel(), dtype=D).reshape(y.shape)).sum()


def scope_of(key, rule):
    return override({key: rule}, model=SEVERAL[key] if isinstance(key, rg.at) else None)


@road
@pytest.mark.parametrize("key", SEVERAL, ids=name)
@pytest.mark.parametrize("rule", **of(TIMES))
def test_the_gradients_of_several_outputs_scale_and_add(road, key, rule):
    x, f = matrix(), SEVERAL[key]
    (due,) = torch.autograd.grad(first(f(x)), x)
    with scope_of(key, rule):
        y = first(f(x))
    torch.testing.assert_close(road(y, [x])[0], 2 * due)


@pytest.mark.parametrize("rule", [lambda dy, builtin: builtin(dy), rg.rules.vjp_of(torch.sin)])
@pytest.mark.parametrize("key", [key for key in SEVERAL if callable(key)], ids=name)
def test_results_keep_their_type(key, rule):
    x, f = matrix(), SEVERAL[key]
    plain = f(x)
    with scope_of(key, rule):
        y = f(x)
    assert type(y) is type(plain) and len(y) == len(plain)


@pytest.mark.parametrize(("key", "rule", "call", "factor"), [
    (torch.split, lambda dy, builtin: builtin(2 * dy), lambda x: torch.split(x, 8), 2),
    (torch.sort, lambda dy, builtin: builtin((3 * dy[0], None)), lambda x: torch.sort(x, dim=0), 3),
], ids=["a tuple of one", "none for an output"])  # fmt: skip
def test_gradients_of_some_outputs(key, rule, call, factor):
    x = matrix()
    y = under({key: rule}, lambda: call(x)[0].sum())
    assert torch.autograd.grad(y, x)[0].tolist() == [[float(factor)] * 4] * 4


@road
@pytest.mark.parametrize("key", SEVERAL, ids=name)
@pytest.mark.parametrize("wrong", [lambda dy: [*dy, *dy], lambda dy: dy[0], lambda dy: dy[:1]])
def test_a_wrong_number_of_gradients_is_refused(road, key, wrong):
    x = matrix()
    with scope_of(key, lambda dy, builtin: builtin(wrong(dy))):
        y = first(SEVERAL[key](x))
    with pytest.raises(
        RuleError, match=r"passed (1 \w+t|\d \w+s), and the op has (1 \w+t|\d \w+s)\."
    ):
        road(y, [x])


# -- outputs that nothing uses ---------------------------------------------------------------------


def two():
    a, b = nn.Linear(3, 2, dtype=D), nn.Linear(3, 2, dtype=D)
    return nn.Sequential(Made(lambda m, x: (m.a(x), m.b(x)), a=a, b=b))


@pytest.mark.parametrize("rule", [*TIMES.values()][:3], ids=[*TIMES][:3])
@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize("used", [0, 1])
def test_parameters_behind_an_unused_output(rule, materialize, used):
    model, x = two(), numbers(4, 3).requires_grad_()
    due = torch.autograd.grad(model(x)[used].sum(), [x, *model.parameters()], allow_unused=True)
    with override({rg.at("0"): rule}, model=model, materialize=materialize):
        y = model(x)[used].sum()
    y.backward()
    torch.testing.assert_close(x.grad, 2 * due[0])
    for p, expected in zip(model.parameters(), due[1:], strict=True):
        if expected is not None:
            assert p.grad is not None and p.grad.ne(0).all()
        elif materialize:
            assert p.grad.eq(0).all()
        else:
            assert p.grad is None


def by_torch(dy, xs):
    return [torch.zeros_like(xs[0]) + (3 if dy[0] is None else 4)]


def by_regrad(dy, xs):  # (regrad's functions get zeros)
    return [rg.zeros_like(xs[0]) + dy[0] + 3 * dy[1]]


@pytest.mark.parametrize("rule", [by_torch, by_regrad])
def test_the_gradient_of_an_unused_output_of_an_op(rule):
    x = matrix()
    y = under({torch.std_mean: rule}, lambda: torch.std_mean(x)[1], materialize=False)
    assert torch.autograd.grad(y, x)[0].tolist() == [[3.0] * 4] * 4


def test_none_in_a_checkpoint():
    model, x = two(), numbers(4, 3).requires_grad_()
    with override({rg.at("0"): TIMES["2 builtin(dy)"]}, model=model, materialize=False):
        y = checkpoint(model, x, use_reentrant=False)[0].sum()
    y.backward()
    assert [p.grad is None for p in model.parameters()] == [False, False, True, True]
