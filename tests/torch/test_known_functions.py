"""Functions as keys whose calls are known: the short road gives what the general one gives."""

import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import regrad as rg
import regrad.torch as rt
from regrad.torch import call_cache, functions
from tests.torch.test_call_cache import gradients, of_torch, warmed


class Step(torch.autograd.Function):
    """A spike with a surrogate, as libraries of spiking networks write it."""

    @staticmethod
    def forward(ctx, x, slope=25.0, how=None):
        ctx.save_for_backward(x)
        ctx.slope = slope
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return dy / (ctx.slope * x.abs() + 1) ** 2, None, None


class NewerStep(torch.autograd.Function):
    @staticmethod
    def forward(x, slope=25.0, how=None):
        return (x > 0).to(x.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.slope = inputs[1]

    backward = Step.backward


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, bits, x, scale):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, scale)
        return (x / scale).round() * scale

    @staticmethod
    def backward(ctx, dy):
        x, scale = ctx.saved_tensors
        return None, dy, (dy * x).sum().reshape(scale.shape)


class Doubled(torch.autograd.Function):
    """It changes its input in place."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, dy):
        return dy * 2


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, dy):
        return dy


def by_slope(dy, x, slope):
    return dy / (1 + slope * x.abs())


def by_slope_in_regrad(dy, x, slope):
    return dy / (1 + slope * rg.abs(x))


def by_value(dy, y):
    return dy * (y + 2)


def of_scale(dy, x, scale, bits):
    return dy * bits, (dy * x.cos()).sum().reshape(scale.shape)


SCALE_OF = torch.tensor([0.5], dtype=torch.float64)
FUNCTIONS = {
    "torch": (Step, by_slope, lambda x: Step.apply(x, 3.0)),
    "regrad": (Step, by_slope_in_regrad, lambda x: Step.apply(x, 3.0)),
    "value": (Step, by_value, lambda x: Step.apply(x, 3.0, "up")),
    "newer": (NewerStep, by_slope, lambda x: NewerStep.apply(x, 3.0)),
    "in place": (Doubled, lambda dy, y: dy * y, lambda x: Doubled.apply(x * 1)),
    "its input": (Same, of_torch, Same.apply),
    "two tensors": (Scaled, of_scale, lambda x: Scaled.apply(4, x, SCALE_OF * 1)),
    "both move": (Scaled, of_scale, lambda x: Scaled.apply(4, x, x[:1, :1].sum(0))),
}


@pytest.fixture
def known(monkeypatch):
    """Return how many calls of Functions were known, and a way to have none known."""
    found = []
    old = call_cache.KnownCall.keep

    def keep(self, ctx, *args):
        found.append(type(ctx).__name__)
        old(self, ctx, *args)

    monkeypatch.setattr(call_cache.KnownCall, "keep", keep)
    return found


@pytest.mark.parametrize("name", FUNCTIONS)
def test_both_roads_of_a_function_agree(name, known, monkeypatch):
    function, rule, call = FUNCTIONS[name]
    short, hits = gradients(call, {function: rule})
    assert len(known) >= 2
    del known[:]
    monkeypatch.setattr(functions, "kinds_of", lambda *args: None)
    general, expected = gradients(call, {function: rule})
    assert not known
    assert hits == expected
    for a, b in zip(short, general, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_number_given_to_a_function_is_part_of_its_kind(known):
    x = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    with rt.gradient_override_map({Step: by_slope}):
        for slope in (1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 1.0):
            (g,) = torch.autograd.grad(Step.apply(x, slope), x)
            assert g.tolist() == [1 / (1 + slope * 2)]
    assert len(known) >= 3


@pytest.mark.parametrize("rule", [lambda dy, x: dy * x**3, lambda dy, x: rg.multiply(dy, x**3)])
def test_third_order_of_a_function(rule, known):
    x = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    with warmed({Step: rule}, Step.apply):
        del known[:]
        (g,) = torch.autograd.grad(Step.apply(x).sum(), x, create_graph=True)
        (h,) = torch.autograd.grad(g.sum(), x, create_graph=True)
        (k,) = torch.autograd.grad(h.sum(), x)
    assert known
    torch.testing.assert_close(g, x**3)
    torch.testing.assert_close(h, 3 * x**2)
    torch.testing.assert_close(k, 6 * x)


def test_a_known_function_in_checkpoints_threads_and_subclasses(known):
    class Named(torch.Tensor):
        pass

    x = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)
    expected = 1 / (1 + 3 * x.detach())
    call = lambda x: Step.apply(x, 3.0)  # noqa: E731
    with warmed({Step: by_slope}, call):
        del known[:]
        for reentrant in (False, True):
            x.grad = None
            checkpoint(call, x, use_reentrant=reentrant).sum().backward()
            torch.testing.assert_close(x.grad, expected)
        x.grad = None
        runs = [threading.Thread(target=lambda: call(x).sum().backward()) for _ in range(3)]
        for run in runs:
            run.start()
            run.join()
        torch.testing.assert_close(x.grad, 3 * expected)
        (g,) = torch.autograd.grad(call(x), x, torch.eye(2).double(), is_grads_batched=True)
        torch.testing.assert_close(g, torch.diag(expected))
        assert known
        y = x.detach().as_subclass(Named).requires_grad_()
        call(y).sum().backward()
        torch.testing.assert_close(y.grad.as_subclass(torch.Tensor), expected)


def test_a_function_that_returns_something_else_for_arguments_of_a_kind():
    class Either(torch.autograd.Function):
        several = False

        @staticmethod
        def forward(ctx, x):
            return (x * 2, x > 0) if Either.several else x * 2

        @staticmethod
        def backward(ctx, *dys):
            return dys[0]

    x = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    with rt.gradient_override_map({Either: lambda dy, x: (dy[0] if Either.several else dy) * 3}):
        for _ in range(4):
            assert torch.autograd.grad(Either.apply(x), x)[0].tolist() == [3.0]
        Either.several = True
        y, _ = Either.apply(x)
        assert torch.autograd.grad(y, x)[0].tolist() == [3.0]


def test_a_gradient_that_does_not_arrive_is_zero_for_a_known_function(known):
    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, dy):
            return None

    class Quiet(Step):
        @staticmethod
        def forward(ctx, x):
            ctx.set_materialize_grads(False)
            return x * 1

    x = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    with warmed({Quiet: lambda dy, x: dy * 3 + 1}, Quiet.apply):
        del known[:]
        Cut.apply(Quiet.apply(x)).sum().backward()
    assert known
    assert x.grad.tolist() == [1.0]
