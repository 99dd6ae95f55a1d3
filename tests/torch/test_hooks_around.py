"""Hooks of a module run around its whole call under a rule, as they do in plain PyTorch."""

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import prune
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils import weight_norm as old_weight_norm

import regrad as rg
import regrad.torch

override = regrad.torch.gradient_override_map
RULE = {rg.at("1"): lambda dy, builtin: 7 * builtin(dy)}
D = torch.float64


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).to(D)


def numbers():
    return torch.linspace(-1, 1, 12, dtype=D).reshape(4, 3).requires_grad_()


def note(found):
    def hook(module, xs, y):
        found.update(module=module, x=xs[0], y=y)

    return hook


def with_keywords(found):
    return lambda module, xs, options, y: found.update(module=module, x=xs[0], y=y)


WAYS = {
    "hook": lambda m, found: m.register_forward_hook(note(found)),
    "always": lambda m, found: m.register_forward_hook(note(found), always_call=True),
    "keywords": lambda m, found: m.register_forward_hook(with_keywords(found), with_kwargs=True),
    "global": lambda m, found: torch_module.register_module_forward_hook(
        lambda module, xs, y: note(found)(module, xs, y) if module is m else None
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("road", ["grad", "backward"])
def test_an_output_that_a_forward_hook_takes_out_has_the_rule_behind_it(way, road):
    net, x, found = model(), numbers(), {}
    handle = WAYS[way](net[1], found)
    try:
        net(x)
        (due,) = torch.autograd.grad(found["y"].sum(), x)
        with override(RULE, model=net) as used:
            net(x)
    finally:
        handle.remove()
    assert found["module"] is net[1]
    if road == "grad":
        (dx,) = torch.autograd.grad(found["y"].sum(), x)
    else:
        found["y"].sum().backward()
        dx = x.grad
    torch.testing.assert_close(dx, 7 * due)
    used.assert_fired()


def test_the_input_that_hooks_see_is_on_the_way():
    net, x, found = model(), numbers(), {}
    net[1].register_forward_pre_hook(lambda module, xs: found.update(x=xs[0]))
    (due,) = torch.autograd.grad(net(x).sum(), found["x"])
    with override(RULE, model=net):
        y = net(x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), found["x"])[0], 7 * due)


@pytest.mark.parametrize("add", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_see_what_enters_and_leaves_the_call(add):
    net, x, found = model(), numbers(), []
    getattr(net[1], add)(lambda module, *grads: found.append((module, *grads)))
    net(x).sum().backward()
    with override(RULE, model=net):
        net(x).sum().backward()
    (_, *plain), (module, *ruled) = found
    assert module is net[1]
    torch.testing.assert_close(ruled[-1], plain[-1])  # the gradients of outputs
    for dx, due in zip(ruled[:-1], plain[:-1], strict=True):
        torch.testing.assert_close(dx[0], 7 * due[0])


def test_hooks_change_inputs_outputs_and_gradients():
    net, x = model(), numbers()
    net[1].register_forward_pre_hook(lambda module, xs: (2 * xs[0],))
    net[1].register_forward_hook(lambda module, xs, y: 3 * y)
    net[1].register_full_backward_hook(lambda module, dxs, dys: (5 * dxs[0],))
    plain = net(x)
    (due,) = torch.autograd.grad(plain.sum(), x)
    with override(RULE, model=net):
        y = net(x)
    torch.testing.assert_close(y, plain)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], 7 * due)


def masked(layer):
    prune.random_unstructured(layer, "weight", 0.3)
    return layer


NORMS = {
    "weight_norm": old_weight_norm,
    "spectral_norm": old_spectral_norm,
    "prune": masked,
    "parametrized weight_norm": nn.utils.parametrizations.weight_norm,
    "parametrized spectral_norm": nn.utils.parametrizations.spectral_norm,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("reads", [False, True])
def test_what_hooks_put_on_the_module_is_an_input(norm, reads):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), NORMS[norm](nn.Linear(3, 3))).to(D)
    x = numbers()
    net(x)
    net.eval()  # (a spectral norm goes on with its iteration in training)
    leaves = [x, *net.parameters()]
    due = torch.autograd.grad(net(x).square().sum(), leaves)
    rule = lambda dy, builtin: builtin(2 * dy)  # noqa: E731
    if reads and not norm.startswith("param"):
        rule = lambda dy, x, weight, builtin: (  # noqa: E731
            2 * dy @ weight,
            {"weight": 2 * dy.mT @ x, **dict.fromkeys(others), "bias": 2 * dy.sum(0)},
        )  # fmt: skip
        others = [name for name, _ in net[1].named_parameters()]
    with override({rg.at("1"): rule}, model=net):
        y = net(x).square().sum()
    found = torch.autograd.grad(y, leaves)
    torch.testing.assert_close(found, tuple(2 * dx for dx in due))


class Asks(nn.Module):
    def forward(self, q, k=None, *, v=None):
        return q * 2 if q is k and (v is None or v is q) else q * 3 * (k if v is None else v)


@pytest.mark.parametrize("call", [
    lambda m, x: m(x, x), lambda m, x: m(x, k=x), lambda m, x: m(x, x, v=x),
    lambda m, x: m(x, x * 1), lambda m, x: m(x, x, v=x * 1),
])  # fmt: skip
def test_two_arguments_that_are_one_tensor_stay_one(call):
    net = nn.Sequential(Asks())
    x = numbers()
    plain = call(net[0], x)
    (due,) = torch.autograd.grad(plain.sum(), x)
    with override({rg.at("0"): rg.rules.reverse()}, model=net):
        y = call(net[0], x)
    torch.testing.assert_close(y, plain)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], -due)


class AsksItsOwn(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([3.0], dtype=D))

    def forward(self, x):
        return 2 * x * self.w if x is self.w else x * self.w


def test_a_parameter_that_is_an_argument():
    net = nn.Sequential(AsksItsOwn())
    plain = net[0](net[0].w)
    (due,) = torch.autograd.grad(plain, net[0].w)
    with override({rg.at("0"): lambda dy, builtin: builtin(5 * dy)}, model=net):
        y = net[0](net[0].w)
    assert y.item() == plain.item()
    assert torch.autograd.grad(y, net[0].w)[0].item() == 5 * due.item()
