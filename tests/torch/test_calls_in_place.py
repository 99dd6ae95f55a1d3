"""Calls in place that are understood once, and the key by which calls are kept."""

import pytest
import torch
import torch.nn.functional as F

import regrad as rg
from regrad.torch import call_cache, rulesets
from tests.torch.common import D, close, override


def of_regrad(dy, x):
    return rg.where(x > 0, dy * rg.cos(x), 0)


def beside_a_view(x, f):
    y = x * 1
    view = y[:2]
    f(y)
    return view * 2


def in_part(x, f):
    y = x * 1
    f(y[0])
    return y


IN_PLACE = {
    "a result": lambda x, f: f(x * 1),
    "a view": lambda x, f: f((x * 1)[1:])[0] * x,
    "what has a view": beside_a_view,
    "part of a result": in_part,
    "twice": lambda x, f: f(f(x * 1) * 1),
}


@pytest.mark.parametrize("rule", [lambda dy, x: dy * x**3, lambda dy, y: dy * y.exp(), of_regrad])
@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_is_as_out_of_place_to_second_order(name, rule):
    def second_order(f):
        def run(x):
            (dx,) = torch.autograd.grad((IN_PLACE[name](x, f) ** 2).sum(), x, create_graph=True)
            return dx, *torch.autograd.grad(dx.pow(2).sum(), x)

        return run

    def copied(y):  # of the same values: what is written goes to all views
        return y.copy_(torch.sigmoid(y.clone()))

    x = torch.linspace(-1, 1, 12, dtype=D).reshape(3, 4).requires_grad_()
    with override({"Sigmoid": rule}):
        for _ in range(3):
            due, found = second_order(copied)(x), second_order(torch.sigmoid_)(x)
            close(found, due, 1e-12)


def test_a_leaf_that_is_written_to_keeps_its_values():
    x = torch.ones(3, requires_grad=True)
    with override({"Sigmoid": lambda dy, x: dy * torch.cos(x)}):
        for _ in range(3):
            torch.sigmoid_(x * 1)
            with pytest.raises(RuntimeError, match="leaf"):
                torch.sigmoid_(x)
    assert x.tolist() == [1.0] * 3


def test_what_autograd_has_saved_and_is_written_to_is_refused():
    x = torch.ones(3, requires_grad=True)
    with override({"Sigmoid": lambda dy, y: dy * rg.exp(y)}):
        for _ in range(3):
            y = (x * 1).exp()
            torch.sigmoid_(y)  # (exp has saved its result)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()


# -- the key of what is kept -----------------------------------------------------------------------


def in_place(x):
    y = x * 1
    F.relu(y, inplace=True)
    return y


PARTS = {  # a part of the key, a rule, and two calls that this part alone tells apart
    "axes": (0, {"Softmax": lambda dy, y, axis: dy * y * (axis + 2)},
             lambda x: F.softmax(x), lambda x: F.softmax(x[None])[0]),
    "number": (0.1.hex(), {"LeakyRelu": lambda dy, alpha: dy * alpha},
               lambda x: F.leaky_relu(x, 0.1), lambda x: F.leaky_relu(x, 0.5)),
    "keyword": (0.1.hex(), {"LeakyRelu": lambda dy, alpha: dy * alpha},
                lambda x: F.leaky_relu(x, negative_slope=0.1),
                lambda x: F.leaky_relu(x, negative_slope=0.5)),
    "in place": (True, {"Relu": lambda dy, y: dy * y}, lambda x: F.relu(x * 1), in_place),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Implicit dimension:UserWarning")
@pytest.mark.parametrize("part", PARTS)
def test_each_part_of_the_key_is_needed(part, monkeypatch):
    like, rules, first, second = PARTS[part]
    kinds_of = call_cache.kinds_of

    def without(kinds):
        if type(kinds) is tuple:
            return tuple(map(without, kinds))
        return type(like) if type(kinds) is type(like) else kinds

    def last():
        x = torch.linspace(-1, 1, 12, dtype=D).reshape(3, 4).requires_grad_()
        with override(rules):
            for f in (first, first, first, second):
                y = f(x)
                (dx,) = torch.autograd.grad((y * x.detach()).sum(), x)
        return y, dx

    due = last()
    with monkeypatch.context() as patch:
        patch.setattr(call_cache, "is_grad_enabled", lambda: False)  # (the general road)
        close(last(), due, 0)
    monkeypatch.setattr(call_cache, "kinds_of", lambda *args: without(kinds_of(*args)))
    rulesets._SETS.clear()
    with pytest.raises(AssertionError):
        close(last(), due, 0)
    rulesets._SETS.clear()


def test_a_set_of_rules_is_found_by_key_and_not_by_order():
    """Two functions that change places, and then codes, mean what they meant before."""

    def double(dy, x):
        return dy * 2

    def triple(dy, x):
        return dy * 3

    def slopes(rules):
        x = torch.ones((), requires_grad=True)
        with override(rules):
            (dx,) = torch.autograd.grad(torch.sin(x), x)
            (dz,) = torch.autograd.grad(torch.tanh(x), x)
        return dx.item(), dz.item()

    assert slopes({"Sin": double, "Tanh": triple}) == (2, 3)
    double.__code__, triple.__code__ = triple.__code__, double.__code__
    assert slopes({"Tanh": double, "Sin": triple}) == (2, 3)
    assert slopes({"Sin": double, "Tanh": triple}) == (3, 2)
