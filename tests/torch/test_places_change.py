"""Modules that change their place or class in a scope, and rules whose code changes."""

import copy
import pickle

import pytest
import torch
from torch import nn

import regrad as rg
import regrad.torch
from regrad.errors import ArgumentError, PassedOverError

override = regrad.torch.gradient_override_map
SEVEN = {rg.at("enc.0", "Relu"): lambda dy: 7 * dy}


class OtherReLU(nn.ReLU):
    pass


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.ReLU(), nn.Tanh())
        self.dec = nn.Sequential(nn.ReLU())
        self.blocks = nn.ModuleList([nn.Sequential(nn.ReLU()), nn.Sequential(nn.Tanh())])

    def forward(self, x):
        x = self.dec(self.enc(x))
        for block in self.blocks:
            x = block(x)
        return x


def swapped(m):
    m.enc, m.dec = m.dec, m.enc


def swapped_inside(m):
    m.enc[0], m.enc[1] = m.enc[1], m.enc[0]


def swapped_in_a_list(m):
    m.blocks[0], m.blocks[1] = m.blocks[1], m.blocks[0]


def shared(m):
    m.dec = m.enc


def of_another_class(m):
    m.enc[0].__class__ = OtherReLU


def added(m):
    m.enc.append(nn.ReLU())


def replaced(m):
    m.enc[0] = nn.ReLU()


def deep_copy(m):
    return copy.deepcopy(m)


def pickled(m):
    return pickle.loads(pickle.dumps(m))


CHANGES = [swapped, swapped_inside, swapped_in_a_list, shared, of_another_class, added, replaced,
           deep_copy, pickled]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("backend", [None, "eager"])
def test_a_change_is_refused(change, ran, backend):
    torch._dynamo.reset()
    model, x = Model(), torch.ones(2, requires_grad=True)
    run = lambda m, x: m(x)  # noqa: E731
    run = run if backend is None else torch.compile(run, backend=backend)
    with (
        pytest.raises(PassedOverError, match=r"scope opened|a copy"),
        override({key: rg.rules.optional(rule) for key, rule in SEVEN.items()}, model=model),
    ):
        if ran:
            run(model, x)
        run(change(model) or model, x)


def test_parts_of_a_model_that_run_by_themselves_are_seen():
    model, x = Model(), torch.ones(2, requires_grad=True)
    error = pytest.raises(PassedOverError, match=r"'enc.1' \(Tanh\) was put")
    with error, override(SEVEN, model=model):
        model.enc(x)
        swapped_inside(model)
        model.enc(x)


def run_parts(model, x):
    return model.dec(model.enc(x))


class Lists(nn.Module):
    """Containers that are never called hold the modules that are."""

    def __init__(self):
        super().__init__()
        self.a = nn.ModuleList([nn.Sequential(nn.ReLU())])
        self.b = nn.ModuleDict({"0": nn.Sequential(nn.ReLU(), nn.Tanh())})


def swapped_lists(m):
    m.a, m.b = m.b, m.a


@pytest.mark.parametrize(("make", "key", "run", "change"), [
    (Model, "enc.0", run_parts, swapped), (Model, "dec", run_parts, swapped),
    (Lists, "a.0", lambda m, x: m.a[0](x) if isinstance(m.a, nn.ModuleList) else m.b[0](x),
     swapped_lists),
])  # fmt: skip
def test_parts_change_places_where_the_module_around_them_is_not_called(make, key, run, change):
    model, x = make(), torch.ones(2, requires_grad=True)
    with (
        pytest.raises(PassedOverError, match=r"any more|was put"),
        override({rg.at(key, "Relu"): lambda dy: 7 * dy}, model=model),
    ):
        run(model, x)
        change(model)
        run(model, x)


def test_a_class_without_a_model():
    module, x = nn.ReLU(), torch.ones(1, requires_grad=True)
    with override({rg.at(OtherReLU, "Relu"): lambda dy: 10 * dy}):
        assert torch.autograd.grad(module(x), x)[0].item() == 1
        module.__class__ = OtherReLU
        assert torch.autograd.grad(module(x), x)[0].item() == 10


def slope(rule):
    x = torch.ones(1, requires_grad=True)
    with override({"Relu": rule}):
        y = torch.relu(x)
    return torch.autograd.grad(y, x)[0].item()


def test_changed_defaults_make_another_rule():
    def make(k):
        return lambda dy, x, k=k: dy * k

    two = 2.0
    f = make(two)
    assert slope(f) == 2
    f.__defaults__ = (3.0,)
    assert [slope(make(two)), slope(f)] == [2, 3]


def by_seven(dy, x):
    return rg.where(x > -9, dy * 7, 0)


def by_default(dy, x, k=2.0):
    return rg.where(x > -9, dy * k, 0)


def test_code_and_defaults_that_change_in_an_open_scope():
    def run():
        x = torch.ones(1, requires_grad=True)
        torch.relu(x).backward()
        return x.grad.item()

    def rule(dy, x):
        return rg.where(x > -9, dy * 2, 0)

    with override({"Relu": rule}):
        assert [run(), run(), run()] == [2, 2, 2]
        rule.__code__ = by_seven.__code__
        assert [run(), run(), run()] == [7, 7, 7]
    with override({"Relu": by_default}):
        assert [run(), run(), run()] == [2, 2, 2]
        by_default.__defaults__ = (5.0,)
        assert [run(), run(), run()] == [5, 5, 5]


@pytest.mark.parametrize(("key", "words"), [
    (lambda: rg.at(lambda m: isinstance(m, nn.ReLU), "Relu"), "has one parameter, `site`"),
    (lambda: rg.at(1, "Relu"), r"got 1. The n-th call is rg.at\(where, what, nth=n\)"),
    (lambda: rg.at("Relu", "1"), r"is it rg.at\('1', 'Relu'\)"),
])  # fmt: skip
def test_wrong_places(key, words):
    with pytest.raises(ArgumentError, match=words):
        override({key(): lambda dy: dy}, model=nn.Sequential(nn.Tanh(), nn.ReLU()))
