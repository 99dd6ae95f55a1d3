"""How modules are called: by torch's function, by one that was compiled, by one of their own."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from regrad import at
from regrad.errors import PassedOverError
from regrad.rules import optional
from tests.torch.common import grad, leaf, override


class Inner(nn.Sequential):
    pass


KEYS = {
    "path": lambda model: at("1", "Relu"),
    "path inside": lambda model: at("1.0", "Relu"),
    "class": lambda model: at(Inner, "Relu"),
    "instance": lambda model: at(model[1], "Relu"),
    "whole call": lambda model: at("1"),
}


def slope(f):
    x = leaf(1.0, 1.0)
    first, second = grad(f(x), x).tolist()
    assert first == second
    return first


@pytest.mark.slow(but=1)
@pytest.mark.versions
@pytest.mark.parametrize("when", ["before", "inside", "in a scope before"])
@pytest.mark.parametrize("key", KEYS)
def test_modules_that_were_compiled_in_place_are_followed(key, when):
    torch.compiler.reset()
    model = nn.Sequential(nn.Identity(), Inner(nn.ReLU(), nn.Identity()), nn.ReLU())
    compiled, where = model[1][0] if key == "path inside" else model[1], KEYS[key](model)
    if when == "before":
        compiled.compile(backend="aot_eager")
        assert slope(model) == 1
    elif when == "in a scope before":
        with override({where: optional(lambda dy: 7 * dy)}, model=model):
            compiled.compile(backend="aot_eager")
    for _ in range(2):
        with override({where: lambda dy: 7 * dy}, model=model):
            if compiled._compiled_call_impl is None:
                compiled.compile(backend="aot_eager")
            assert slope(model) == 7
        assert slope(model) == 1
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
    torch.compiler.reset()
    model = nn.Sequential(nn.Identity(), make(nn.ReLU()), nn.ReLU())
    if compiled == "in place":
        model[1].compile(backend="aot_eager")
    f = torch.compile(model, backend="aot_eager") if compiled == "around" else model
    refused = key == "whole call" and compiled == "around"
    error = pytest.raises(PassedOverError, match="a call of its own")
    for _ in range(2):
        scope = override({KEYS[key](model): lambda dy: 7 * dy}, model=model)
        with error if refused else nullcontext(), scope:
            assert slope(f) == (7 if key == "whole call" else expected)
        assert slope(f) == 1


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
