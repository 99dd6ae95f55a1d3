"""Ops that the user's code runs in a backward pass are under the rules of the scope."""

import _thread
import threading

import pytest
import torch
from torch import nn

import regrad as rg
import regrad.torch
from regrad.errors import PassedOverError
from regrad.torch import modes

override = regrad.torch.gradient_override_map
RULES = {"Relu": lambda dy: 7 * dy}
OTHER = {"Tanh": rg.rules.optional(lambda dy: dy)}


class ByHand(torch.autograd.Function):
    """A checkpoint, as people write it by hand."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.relu(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = torch.relu(x)
        torch.autograd.backward(y, dy)
        return x.grad


class HalfSquare(torch.autograd.Function):
    """Its derivative is a ReLU."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x / 2

    @staticmethod
    def backward(ctx, dy):
        return dy * torch.relu(*ctx.saved_tensors)


def by_tensor_hook(x):
    y = x * 1
    y.register_hook(torch.relu)
    return (y * y).sum()


def by_node_hook(x):
    y = x * 1
    y.grad_fn.register_hook(lambda dxs, dys: (torch.relu(dxs[0]), *dxs[1:]))
    return (y * y).sum()


def by_prehook(x):
    y = x * 1
    y.grad_fn.register_prehook(lambda dys: (torch.relu(dys[0]),))
    return (y * y).sum()


def by_module_hook(x):
    module = nn.Identity()
    module.register_full_backward_hook(lambda module, dxs, dys: (torch.relu(dxs[0]),))
    return (module(x * 1) ** 2).sum()


def by_function(x):
    return HalfSquare.apply(x).sum()


# The second derivative at 1, with ReLUs of gradients in it; each is 7 times as large by the rule.
SECOND = {
    by_tensor_hook: 2, by_node_hook: 2, by_prehook: 2, by_module_hook: 2, by_function: 1,
}  # fmt: skip


def grad(y, x, **options):
    return torch.autograd.grad(y, x, **options)[0]


def backward(y, x, **options):
    x.grad = None
    y.backward(**options)
    return x.grad


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("f", SECOND, ids=lambda f: f.__name__)
@pytest.mark.parametrize("road", [grad, backward])
@pytest.mark.parametrize("scopes", [1, 2])
def test_second_derivatives(f, road, scopes):
    x = torch.ones(1, requires_grad=True)
    plain = road(road(f(x), x, create_graph=True).sum(), x)
    assert plain.item() == SECOND[f]
    with override(RULES) as used, override(OTHER if scopes == 2 else {}):
        dx = road(f(x), x, create_graph=True)
    found = road(dx.sum(), x)
    assert found.item() == 7 * SECOND[f]
    used.assert_fired("Relu")


@pytest.mark.parametrize("road", [grad, backward])
def test_a_checkpoint_by_hand(road):
    x = torch.ones(1, requires_grad=True)
    with pytest.raises(PassedOverError, match=r"keep=\[ByHand\]"), override(RULES):
        ByHand.apply(x)
    with override(RULES, keep=[ByHand]) as used:
        assert road(ByHand.apply(x).sum(), x).item() == 7
    used.assert_fired("Relu")


def test_values_are_replaced_in_hooks():
    x = torch.ones(1, requires_grad=True)
    with override({"Relu": rg.replace(lambda x: 5 * x)}, values=True):
        assert grad(by_tensor_hook(x), x).item() == 10


def test_a_pass_after_the_scope_has_no_rule():
    x = torch.ones(1, requires_grad=True)
    with override({"Relu": rg.rules.optional(RULES["Relu"])}):
        y = by_tensor_hook(x)
    assert grad(grad(y, x, create_graph=True), x).item() == 2


def test_a_thread_of_the_engine(monkeypatch):
    """On a GPU the engine has threads, to which torch carries modes but no context."""
    x, found = torch.ones(1, requires_grad=True), []

    def elsewhere(mode):
        with mode:
            y = torch.relu(x)
        found.append(grad(y, x).item())

    def hook(dy):
        done = threading.Event()
        (mode,) = torch.overrides._get_current_function_mode_stack()
        _thread.start_new_thread(lambda: (elsewhere(mode), done.set()), ())
        assert done.wait(60)

    y = x * 1
    y.register_hook(hook)
    monkeypatch.setattr(modes, "current_pass", lambda: 0)
    with override(RULES):
        grad(y, x)
    assert found == [7]
