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
from tests.torch.common import function, override

X = torch.tensor([0.5, -1.0, 2.0])
W = torch.tensor([1.0, 2.0, 4.0])
RAN = []


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
    """An object that can be called, and takes names."""

    def __call__(self, dy, x):
        RAN.append(1)
        return dy.mul_(3 * x)


RULES = {
    "into dy": lambda dy, x: RAN.append(1) or dy.mul_(3 * x),
    "into x": lambda dy, x: RAN.append(1) or x.mul_(3).mul_(dy),
    "into y": into_y, "by item": by_item, "by operator": by_operator, "object": Callable(),
    "written with regrad": lambda dy, x: RAN.append(1) or rg.multiply(dy, 3 * x),
    "by methods of regrad": lambda dy, x: RAN.append(1) or dy.mul(x).mul(rg.tensor(3.0)),
    "pure": lambda dy, x: RAN.append(1) or dy * 3 * x,
    "by data": by_data, "by numpy": by_numpy,
}  # fmt: skip


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


def of_second_order(f, x):
    (dx,) = torch.autograd.grad(f(x), x, create_graph=True)
    assert len(RAN) == 1
    (ddx,) = torch.autograd.grad((dx * W).sum(), x, retain_graph=True)
    torch.testing.assert_close(ddx, 3 * W * W)
    del RAN[1:]
    return dx.detach()


def compiled(f, x):
    torch._dynamo.reset()
    return eager(torch.compile(f, backend="aot_eager"), x)


WAYS = {
    "eager": eager,
    "given a gradient": given_a_gradient,
    "checkpoint": lambda f, x: eager(lambda x: checkpoint(f, x, use_reentrant=False), x),
    "compiled": compiled,
    "torch.func": lambda f, x: torch.func.grad(f)(x.detach()),
    "vmap": lambda f, x: torch.func.vmap(torch.func.grad(f))(torch.stack([x.detach()] * 2))[1],
    "second order": of_second_order,
}
HIDDEN = {  # torch has not all ways for these
    "by data": [way for way in WAYS if way != "second order"],
    "by numpy": ["eager", "given a gradient", "checkpoint"],
}


@pytest.mark.versions
@pytest.mark.parametrize(
    ("rule", "way"), [(rule, way) for rule in RULES for way in HIDDEN.get(rule, WAYS)]
)
def test_a_rule_runs_once_and_its_writes_reach_nobody(rule, way):
    with override({"Sign": RULES[rule]}) as used:
        for turn in range(1, 4):
            RAN.clear()
            x = X.clone().requires_grad_()
            dx = WAYS[way](loss, x)
            torch.testing.assert_close(dx, W * 3 * X + W)
            assert torch.equal(x.detach(), X)
            assert RAN == [1]
            if way == "eager":
                assert sum(hit.ran for hit in used.hits) == turn


def test_a_weight_stays_as_it_is_where_a_rule_writes_into_what_it_is_given():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    a = torch.ones(1, 2, requires_grad=True)
    with override({"MatMul": lambda dy, a, b: (dy @ b.mul_(2).mT, a.zero_().mT @ dy)}):
        for _ in range(2):
            y = a @ weight
            dxs = torch.autograd.grad(y.sum(), [a, weight])
            assert dxs[0].tolist() == [[4.0, 4.0]] and not dxs[1].any()
            assert (weight == 1).all() and (a == 1).all()


def test_random_numbers_of_a_rule_are_drawn_once():
    def drawn():
        return torch.rand(3) * np.random.rand() * random.random()

    def seed():
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)

    x = X.clone().requires_grad_()
    seed()
    due = drawn()
    with override({"Sign": lambda dy, x: dy * drawn()}):
        for _ in range(2):
            seed()
            (dx,) = torch.autograd.grad(torch.sign(x).sum(), x)
            torch.testing.assert_close(dx, due.float())


def test_a_rule_that_begins_to_write_later_is_refused_by_name():
    begun = []

    def later(dy):
        return dy.mul_(2) if begun else dy * 2

    x = X.clone().requires_grad_()
    with override({"Sign": later}):
        torch.autograd.grad(torch.sign(x).sum(), x)
        begun.append(1)
        with pytest.raises(RuleError) as caught:
            torch.autograd.grad(torch.sign(x), x, torch.ones(3))
        says = str(caught.value)
        assert f"the rule 'later' (later, {__file__}:" in says
        assert "for the op type 'Sign' at" in says
        assert "wrote into one of its arguments" in says and "dy * 2, not dy.mul_(2)" in says
        dy = torch.ones(3)
        (dx,) = torch.autograd.grad(torch.sign(x), x, dy)  # from now on it gets copies
        assert dx.tolist() == [2.0] * 3 and dy.tolist() == [1.0] * 3


@rt.custom_grad
def tripled(x, save):
    save([x])

    def backward(dy, saved):
        saved[0].zero_()
        return dy.mul_(3)

    return x * 1.0, backward


Twice = function(lambda x: x * 2, lambda dy, x: dy * 2, "Twice")


@pytest.mark.versions
@pytest.mark.parametrize(("f", "rules"), [
    (tripled, {}), (Twice.apply, {Twice: lambda dy, x: dy.mul_(3)}),
], ids=["custom_grad", "Function"])  # fmt: skip
def test_custom_gradients_and_rules_of_functions_may_write_too(f, rules):
    with override(rules):
        for _ in range(2):
            x = X.clone().requires_grad_()
            h = x * 1.0
            ((f(h) + h) * W).sum().backward()
            torch.testing.assert_close(x.grad, 4 * W)
            assert torch.equal(x.detach(), X)


# -- the other hosts -------------------------------------------------------------------------------


def into_array(dy):
    np.asarray(dy)[...] = 0
    return dy


def into_item(dy):
    dy[0] = 0
    return dy


def tripling(dy):
    dy *= 3
    return dy


@pytest.mark.parametrize(("rule", "words"), [
    (into_array, "read-only"), (into_item, "Tensors do not change"), (tripling, None),
])  # fmt: skip
def test_in_regrad_a_rule_cannot_write_into_what_it_gets(rule, words):
    def f(x):
        return rg.sum((rg.sign(x) + x) * W.numpy())

    x = rg.tensor(X.numpy())
    with rg.gradient_override_map({"Sign": rule}):
        if words is None:
            assert rg.grad(f)(x).tolist() == (4 * W).tolist()
            return
        for _ in range(2):
            with pytest.raises((ValueError, TypeError), match=words) as caught:
                rg.grad(f)(x)
            assert f"the rule '{rule.__name__}'" in " ".join(caught.value.__notes__)


# -- errors of rules -------------------------------------------------------------------------------


def test_a_rule_of_torch_shows_its_own_error_and_goes_on():
    ran = []

    def rule(dy, a, b):
        ran.append(1)
        return torch.cos(a) * dy, torch.cos(b) * dy

    x = X.clone().requires_grad_()
    with override({"Mul": rule}):
        for _ in range(2):
            y = x * 3.0
            with pytest.raises(TypeError, match="must be Tensor, not float"):
                y.sum().backward()
        assert ran == [1, 1]
        (x * x).sum().backward()  # which it can do
    torch.testing.assert_close(x.grad, 2 * torch.cos(X))


def test_a_rule_that_names_no_functions_shows_its_first_error():
    x = X.clone().requires_grad_()
    with override({"Mul": lambda dy, a, b: (dy * b.nowhere, None)}):
        y = x * 3.0
        with pytest.raises(AttributeError, match="'float' object has no attribute 'nowhere'"):
            y.sum().backward()
