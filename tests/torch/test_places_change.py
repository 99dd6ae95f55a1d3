"""Modules that change their place, class or call, and rules whose code changes.

Modules are called by torch's function, by one that was compiled, or by one of their own.
"""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import regrad as rg
from regrad import at
from regrad.errors import ArgumentError, PassedOverError
from regrad.rules import optional
from tests.torch.common import grad, leaf, override
from tests.torch.placed import refused


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


class Lists(nn.Module):
    """Containers that are never called hold the modules that are."""

    def __init__(self):
        super().__init__()
        self.a = nn.ModuleList([nn.Sequential(nn.ReLU())])
        self.b = nn.ModuleDict({"0": nn.Sequential(nn.ReLU(), nn.Tanh())})


def swap(get, a, b):
    """Return a change of a model: two parts of it, or of a container in it, change places."""

    def change(m):
        held = get(m)
        if isinstance(a, int):
            held[a], held[b] = held[b], held[a]
        else:
            first, second = getattr(held, a), getattr(held, b)
            setattr(held, a, second)
            setattr(held, b, first)

    return change


swapped, swapped_inside = swap(lambda m: m, "enc", "dec"), swap(lambda m: m.enc, 0, 1)
CHANGES = {
    "swapped": swapped,
    "swapped inside": swapped_inside,
    "swapped in a list": swap(lambda m: m.blocks, 0, 1),
    "shared": lambda m: setattr(m, "dec", m.enc),
    "of another class": lambda m: setattr(m.enc[0], "__class__", OtherReLU),
    "added": lambda m: m.enc.append(nn.ReLU()) and None,
    "replaced": lambda m: m.enc.__setitem__(0, nn.ReLU()),
    "deep copy": copy.deepcopy,
    "pickled": lambda m: pickle.loads(pickle.dumps(m)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("backend", [None, "eager"])
def test_a_change_is_refused(change, ran, backend):
    model, x = Model(), leaf(1.0, 1.0)
    call = lambda m, x: m(x)  # noqa: E731
    call = call if backend is None else torch.compile(call, backend=backend)

    def run():
        if ran:
            call(model, x)
        call(CHANGES[change](model) or model, x)

    rules = {rg.at("enc.0", "Relu"): rg.rules.optional(lambda dy: 7 * dy)}
    refused("scope opened|a copy", rules, run, model=model)


def lists(m):
    return lambda x: m.a[0](x) if isinstance(m.a, nn.ModuleList) else m.b[0](x)


@pytest.mark.parametrize(("make", "key", "part", "change", "words"), [
    (Model, "enc.0", lambda m: m.enc, swapped_inside, r"'enc.1' \(Tanh\) was put"),
    (Model, "enc.0", lambda m: lambda x: m.dec(m.enc(x)), swapped, "anymore|was put"),
    (Model, "dec", lambda m: lambda x: m.dec(m.enc(x)), swapped, "anymore|was put"),
    (Lists, "a.0", lists, swap(lambda m: m, "a", "b"), "anymore|was put"),
])  # fmt: skip
def test_parts_change_places_where_the_module_around_them_is_not_called(
    make, key, part, change, words
):
    model, x = make(), leaf(1.0, 1.0)

    def run():
        part(model)(x)
        change(model)
        part(model)(x)

    refused(words, {rg.at(key, "Relu"): lambda dy: 7 * dy}, run, model=model)


def slope(f):
    x = leaf(1.0)
    return torch.autograd.grad(f(x), x)[0].item()


def test_a_class_without_a_model():
    module = nn.ReLU()
    with override({rg.at(OtherReLU, "Relu"): lambda dy: 10 * dy}):
        assert slope(module) == 1
        module.__class__ = OtherReLU
        assert slope(module) == 10


def test_changed_defaults_make_another_rule():
    def make(k):
        return lambda dy, x, k=k: dy * k

    def slope_under(rule):
        with override({"Relu": rule}):
            return slope(torch.relu)

    two = 2.0
    f = make(two)
    assert slope_under(f) == 2
    f.__defaults__ = (3.0,)
    assert [slope_under(make(two)), slope_under(f)] == [2, 3]


def by_two(dy, x):
    return rg.where(x > -9, dy * 2, 0)


def by_seven(dy, x):
    return rg.where(x > -9, dy * 7, 0)


def by_default(dy, x, k=2.0):
    return rg.where(x > -9, dy * k, 0)


@pytest.mark.parametrize(("rule", "name", "value", "factor"), [
    (by_two, "__code__", by_seven.__code__, 7),
    (by_default, "__defaults__", (5.0,), 5),
], ids=["code", "defaults"])  # fmt: skip
def test_code_and_defaults_that_change_in_an_open_scope(rule, name, value, factor, monkeypatch):
    with override({"Relu": rule}):
        assert [slope(torch.relu) for _ in range(3)] == [2, 2, 2]
        monkeypatch.setattr(rule, name, value)
        assert [slope(torch.relu) for _ in range(3)] == [factor] * 3


@pytest.mark.parametrize(("key", "words"), [
    (lambda: rg.at(lambda m: isinstance(m, nn.ReLU), "Relu"), "has one parameter, `site`"),
    (lambda: rg.at(1, "Relu"), r"got 1. The n-th call is rg.at\(where, what, nth=n\)"),
    (lambda: rg.at("Relu", "1"), r"did you mean rg.at\('1', 'Relu'\)"),
])  # fmt: skip
def test_wrong_places(key, words):
    with pytest.raises(ArgumentError, match=words):
        override({key(): lambda dy: dy}, model=nn.Sequential(nn.Tanh(), nn.ReLU()))


# -- how modules are called ------------------------------------------------------------------------


class Inner(nn.Sequential):
    pass


KEYS = {
    "path": lambda model: at("1", "Relu"),
    "path inside": lambda model: at("1.0", "Relu"),
    "class": lambda model: at(Inner, "Relu"),
    "instance": lambda model: at(model[1], "Relu"),
    "whole call": lambda model: at("1"),
}


def slope_of(f):
    x = leaf(1.0, 1.0)
    first, second = grad(f(x), x).tolist()
    assert first == second
    return first


@pytest.mark.slow(but=1)
@pytest.mark.versions
@pytest.mark.parametrize("when", ["before", "inside", "in a scope before"])
@pytest.mark.parametrize("key", KEYS)
def test_modules_that_were_compiled_in_place_are_followed(key, when):
    model = nn.Sequential(nn.Identity(), Inner(nn.ReLU(), nn.Identity()), nn.ReLU())
    compiled, where = model[1][0] if key == "path inside" else model[1], KEYS[key](model)
    if when == "before":
        compiled.compile(backend="aot_eager")
        assert slope_of(model) == 1
    elif when == "in a scope before":
        with override({where: optional(lambda dy: 7 * dy)}, model=model):
            compiled.compile(backend="aot_eager")
    for _ in range(2):
        with override({where: lambda dy: 7 * dy}, model=model):
            if compiled._compiled_call_impl is None:
                compiled.compile(backend="aot_eager")
            assert slope_of(model) == 7
        assert slope_of(model) == 1
    assert "_compiled_call_impl" in vars(compiled)
    assert nn.Module._compiled_call_impl is None


class OwnCall(Inner):
    def _call_impl(self, x):
        return self.forward(x)


class AroundCall(Inner):
    def _call_impl(self, x):
        return super()._call_impl(torch.relu(x))


def called_by_its_own(*parts):
    inner = Inner(*parts)
    inner._call_impl = inner.forward
    return inner


OWN = {
    "class": (OwnCall, 7), "class, around torch's": (AroundCall, 49),
    "instance": (called_by_its_own, 7),
}  # fmt: skip


@pytest.mark.slow(but=3)
@pytest.mark.versions
@pytest.mark.parametrize("compiled", ["", "in place", "around"])
@pytest.mark.parametrize("key", ["path", "class", "instance", "whole call"])
@pytest.mark.parametrize("own", OWN)
def test_modules_with_a_call_of_their_own_are_followed(own, key, compiled):
    make, expected = OWN[own]
    model = nn.Sequential(nn.Identity(), make(nn.ReLU()), nn.ReLU())
    if compiled == "in place":
        model[1].compile(backend="aot_eager")
    f = torch.compile(model, backend="aot_eager") if compiled == "around" else model
    refused = key == "whole call" and compiled == "around"
    error = pytest.raises(PassedOverError, match="defines its own call")
    for _ in range(2):
        scope = override({KEYS[key](model): lambda dy: 7 * dy}, model=model)
        with error if refused else nullcontext(), scope:
            assert slope_of(f) == (7 if key == "whole call" else expected)
        assert slope_of(f) == 1


def test_the_compiled_call_of_a_module_is_written_and_deleted_as_outside_of_a_scope():
    model = nn.Sequential(nn.Identity(), Inner(nn.ReLU()))
    model[1].compile(backend="eager")
    made = model[1]._compiled_call_impl
    rules = {at("1", "Relu"): optional(lambda dy: 7 * dy)}
    with override(rules, model=model):
        held = model[1]._compiled_call_impl
        model[1]._compiled_call_impl = None
        model[1]._compiled_call_impl = held
    assert model[1]._compiled_call_impl is made
    with override(rules, model=model):
        del model[1]._compiled_call_impl
        with pytest.raises(AttributeError, match="_compiled_call_impl"):
            del model[1]._compiled_call_impl
    assert model[1]._compiled_call_impl is None
