"""How modules are called: by torch's function, by one that was compiled, by one of their own."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from regrad import at
from regrad.errors import PassedOverError
from regrad.rules import optional
from tests.torch.common import leaf, override
from tests.torch.placed import seldom


class Inner(nn.Sequential):
    pass


KEYS = {
    "path": lambda model: at("1", "Relu"),
    "path inside": lambda model: at("1.0", "Relu"),
    "class": lambda model: at(Inner, "Relu"),
    "instance": lambda model: at(model[1], "Relu"),
    "whole call": lambda model: at("1"),
}


@pytest.mark.versions
@pytest.mark.parametrize("when", ["before", "inside", "in a scope before"])
@pytest.mark.parametrize("key", seldom(KEYS))
def test_modules_that_were_compiled_in_place_are_followed(key, when):
    torch.compiler.reset()
    model = nn.Sequential(nn.Identity(), Inner(nn.ReLU(), nn.Identity()), nn.ReLU())
    compiled = model[1][0] if key == "path inside" else model[1]
    rules = {KEYS[key](model): lambda dy: 7 * dy}

    def gradient():
        x = leaf(1.0, 1.0)
        return torch.autograd.grad(model(x).sum(), x)[0].tolist()

    if when == "before":
        compiled.compile(backend="aot_eager")
        assert gradient() == [1.0, 1.0]
    elif when == "in a scope before":
        with override({each: optional(rule) for each, rule in rules.items()}, model=model):
            compiled.compile(backend="aot_eager")
    for _ in range(2):
        with override(rules, model=model):
            if compiled._compiled_call_impl is None:
                compiled.compile(backend="aot_eager")
            assert gradient() == [7.0, 7.0]
        assert gradient() == [1.0, 1.0]
    assert "_compiled_call_impl" in vars(compiled)
    assert nn.Module._compiled_call_impl is None


class OwnCall(Inner):
    def _call_impl(self, x):
        return self.forward(x)


class AroundCall(Inner):
    def _call_impl(self, x):
        return super()._call_impl(torch.relu(x))


def called_by_its_own(inner):
    inner._call_impl = inner.forward
    return inner


OWN = {
    "class": (OwnCall, 7.0),
    "class, around torch's": (AroundCall, 49.0),
    "instance": (lambda *parts: called_by_its_own(Inner(*parts)), 7.0),
}


@pytest.mark.versions
@pytest.mark.parametrize("compiled", ["", "in place", "around"])
@pytest.mark.parametrize("key", seldom(["path", "class", "instance", "whole call"]))
@pytest.mark.parametrize("own", OWN)
def test_modules_with_a_call_of_their_own_are_followed(own, key, compiled):
    make, expected = OWN[own]
    torch.compiler.reset()
    model = nn.Sequential(nn.Identity(), make(nn.ReLU()), nn.ReLU())
    if compiled == "in place":
        model[1].compile(backend="aot_eager")
    f = torch.compile(model, backend="aot_eager") if compiled == "around" else model

    def gradient():
        x = leaf(1.0, 1.0)
        return torch.autograd.grad(f(x).sum(), x)[0].tolist()

    refused = key == "whole call" and compiled == "around"
    error = pytest.raises(PassedOverError, match="a call of its own")
    for _ in range(2):
        scope = override({KEYS[key](model): lambda dy: 7 * dy}, model=model)
        with error if refused else nullcontext(), scope:
            assert gradient() == [7.0 if key == "whole call" else expected] * 2
        assert gradient() == [1.0, 1.0]


def test_what_compiled_a_module_is_written_and_deleted_as_outside_of_a_scope():
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
