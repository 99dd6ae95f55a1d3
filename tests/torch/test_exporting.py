"""`torch.export` in a scope: a program has no gradient, so that a rule would be lost."""

import pytest
import torch
from torch import nn

import regrad as rg
import regrad.torch

override = regrad.torch.gradient_override_map
X = (torch.ones(1, 2),)


def model():
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("key", ["Relu", rg.at("1"), nn.functional.relu])
def test_a_rule_is_refused(key, strict):
    net = model()
    error = pytest.raises(Exception, match="export writes forward programs")
    with error, override({key: lambda dy, builtin: builtin(dy)}, model=net):
        torch.export.export(net, X, strict=strict)


@pytest.mark.parametrize("strict", [False, True])
def test_others_are_exported(strict):
    net = model()
    with override({"Tanh": rg.rules.optional(lambda dy: dy)}):
        program = torch.export.export(net, X, strict=strict)
    torch.testing.assert_close(program.module()(*X), net(*X))
