"""Rules of torch run once for each gradient that arrives, also where they write into what they get.

The gradient that arrives is shared with another path, and what is kept are the user's tensors.
"""

import random

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import regrad as rg
import regrad.torch as rt
from regrad.errors import RuleError

X = torch.tensor([0.5, -1.0, 2.0])
W = torch.tensor([1.0, 2.0, 4.0])
RAN = []


def into_dy(dy, x):
    RAN.append(1)
    return dy.mul_(3 * x)


def into_x(dy, x):
    RAN.append(1)
    return x.mul_(3).mul_(dy)


def into_y(dy, x, y):
    RAN.append(1)
    y.add_(3)
    return dy * 3 * x


def by_item(dy, x):
    RAN.append(1)
    dy[...] = dy * 3 * x
    return dy


def by_operator(dy, x):
    RAN.append(1)
    dy *= 3 * x
    return dy


def by_data(dy, x):
    RAN.append(1)
    dy.data.mul_(3 * x.detach())
    return dy


def by_numpy(dy, x):
    RAN.append(1)
    dy.numpy()[...] *= 3 * x.numpy()
    return dy


class Callable:
    """What can be called, and takes names."""

    def __call__(self, dy, x):
        RAN.append(1)
        return dy.mul_(3 * x)


def written_with_regrad(dy, x):
    RAN.append(1)
    return rg.multiply(dy, 3 * x)


def by_methods_of_regrad(dy, x):
    RAN.append(1)
    return dy.mul(x).mul(rg.tensor(3.0))


def pure(dy, x):
    RAN.append(1)
    return dy * 3 * x


HIDDEN = [by_data, by_numpy]  # torch has not all ways for these
RULES = [
    into_dy, into_x, into_y, by_item, by_operator, Callable(), written_with_regrad,
    by_methods_of_regrad, pure, *HIDDEN,
]  # fmt: skip


def loss(x):
    h = x * 1.0
    return ((torch.sign(h) + h) * W).sum()  # one gradient arrives at both


def eager(f, x):
    return torch.autograd.grad(f(x), x)[0]


def given_a_gradient(f, x):
    dy = W.clone()
    (dx,) = torch.autograd.grad(torch.sign(x * 1.0), x, dy)
    assert torch.equal(dy, W)  # it is the caller's
    return dx + W


def checkpointed(f, x):
    return torch.autograd.grad(checkpoint(f, x, use_reentrant=False), x)[0]


def compiled(f, x):
    torch._dynamo.reset()
    return torch.autograd.grad(torch.compile(f, backend="aot_eager")(x), x)[0]


def transformed(f, x):
    return torch.func.grad(f)(x.detach())


def batched(f, x):
    return torch.func.vmap(torch.func.grad(f))(torch.stack([x.detach()] * 2))[1]


def of_second_order(f, x):
    (dx,) = torch.autograd.grad(f(x), x, create_graph=True)
    assert len(RAN) == 1
    (ddx,) = torch.autograd.grad((dx * W).sum(), x, retain_graph=True)
    torch.testing.assert_close(ddx, 3 * W * W)
    del RAN[1:]
    return dx.detach()


WAYS = [
    eager, given_a_gradient, checkpointed, compiled, transformed, batched, of_second_order,
]  # fmt: skip


CASES = [(rule, way) for rule in RULES if rule not in HIDDEN for way in WAYS]
CASES += [(by_data, way) for way in WAYS[:-1]]
CASES += [(by_numpy, way) for way in (eager, given_a_gradient, checkpointed)]


@pytest.mark.versions
@pytest.mark.parametrize(("rule", "way"), CASES)
def test_a_rule_runs_once_and_its_writes_reach_nobody(rule, way):
    with rt.gradient_override_map({"Sign": rule}) as used:
        for turn in range(1, 4):
            RAN.clear()
            x = X.clone().requires_grad_()
            dx = way(loss, x)
            torch.testing.assert_close(dx, W * 3 * X + W)
            assert torch.equal(x.detach(), X)
            assert RAN == [1]
            if way is eager:
                assert sum(hit.ran for hit in used.hits) == turn


def test_a_weight_stays_as_it_is_where_a_rule_writes_into_what_it_is_given():
    weight = torch.nn.Parameter(torch.ones(2, 2))

    def rule(dy, a, b):
        return dy @ b.mul_(2).mT, a.zero_().mT @ dy

    a = torch.ones(1, 2, requires_grad=True)
    with rt.gradient_override_map({"MatMul": rule}):
        for _ in range(2):
            y = a @ weight
            dxs = torch.autograd.grad(y.sum(), [a, weight])
            assert dxs[0].tolist() == [[4.0, 4.0]] and not dxs[1].any()
            assert (weight == 1).all() and (a == 1).all()


def test_random_numbers_of_a_rule_are_drawn_once():
    def rule(dy, x):
        return dy * torch.rand(3) * np.random.rand() * random.random()

    def seed():
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)

    x = X.clone().requires_grad_()
    seed()
    due = torch.rand(3) * np.random.rand() * random.random()
    with rt.gradient_override_map({"Sign": rule}):
        for _ in range(2):
            seed()
            (dx,) = torch.autograd.grad(torch.sign(x).sum(), x)
            torch.testing.assert_close(dx, due.float())


def test_a_rule_that_begins_to_write_later_is_refused_by_name():
    begun = []

    def later(dy):
        return dy.mul_(2) if begun else dy * 2

    x = X.clone().requires_grad_()
    with rt.gradient_override_map({"Sign": later}):
        torch.autograd.grad(torch.sign(x).sum(), x)
        begun.append(1)
        dy = torch.ones(3)
        with pytest.raises(RuleError) as caught:
            torch.autograd.grad(torch.sign(x), x, dy)
        says = str(caught.value)
        assert f"the rule 'later' (later, {__file__}:" in says
        assert "for the op type 'Sign' at" in says
        assert "wrote into a tensor that it was given" in says and "dy * 2, not dy.mul_(2)" in says
        dy = torch.ones(3)
        (dx,) = torch.autograd.grad(torch.sign(x), x, dy)  # from now on it gets copies
        assert dx.tolist() == [2.0] * 3 and dy.tolist() == [1.0] * 3


@pytest.mark.versions
def test_custom_gradients_may_write_too():
    @rt.custom_grad
    def tripled(x, save):
        save([x])

        def backward(dy, saved):
            saved[0].zero_()
            return dy.mul_(3)

        return x * 1.0, backward

    for _ in range(2):
        x = X.clone().requires_grad_()
        h = x * 1.0
        ((tripled(h) + h) * W).sum().backward()
        torch.testing.assert_close(x.grad, 4 * W)
        assert torch.equal(x.detach(), X)


def test_a_rule_of_an_autograd_function_may_write_too():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            return dy * 2

    with rt.gradient_override_map({Twice: lambda dy, x: dy.mul_(3)}):
        for _ in range(2):
            x = X.clone().requires_grad_()
            h = x * 1.0
            ((Twice.apply(h) + h) * W).sum().backward()
            torch.testing.assert_close(x.grad, 4 * W)


# -- the other hosts -------------------------------------------------------------------------------


def test_in_regrad_a_rule_cannot_write_into_what_it_gets():
    def into_array(dy):
        np.asarray(dy)[...] = 0
        return dy

    def by_item(dy):
        dy[0] = 0
        return dy

    def by_operator(dy):
        dy *= 3
        return dy

    def f(x):
        return rg.sum((rg.sign(x) + x) * W.numpy())

    x = rg.tensor(X.numpy())
    for rule, words in ((into_array, "read-only"), (by_item, "Tensors do not change")):
        with rg.gradient_override_map({"Sign": rule}):
            for _ in range(2):
                with pytest.raises((ValueError, TypeError), match=words) as caught:
                    rg.grad(f)(x)
                assert f"the rule '{rule.__name__}'" in " ".join(caught.value.__notes__)
    with rg.gradient_override_map({"Sign": by_operator}):
        assert rg.grad(f)(x).tolist() == (4 * W).tolist()


# -- errors of rules -------------------------------------------------------------------------------


def test_a_rule_of_torch_shows_its_own_error_and_goes_on():
    ran = []

    def rule(dy, a, b):
        ran.append(1)
        return torch.cos(a) * dy, torch.cos(b) * dy

    x = X.clone().requires_grad_()
    with rt.gradient_override_map({"Mul": rule}):
        for _ in range(2):
            y = x * 3.0
            with pytest.raises(TypeError, match="must be Tensor, not float"):
                y.sum().backward()
        assert ran == [1, 1]
        (x * x).sum().backward()  # which it can do
        torch.testing.assert_close(x.grad, 2 * torch.cos(X))


def test_a_rule_that_nobody_s_functions_are_named_in_shows_its_first_error():
    def rule(dy, a, b):
        return dy * b.nowhere, None

    x = X.clone().requires_grad_()
    with rt.gradient_override_map({"Mul": rule}):
        y = x * 3.0
        with pytest.raises(AttributeError, match="'float' object has no attribute 'nowhere'"):
            y.sum().backward()
