"""The overrides rebuilt in docs/how_torch_overrides_work.py run, and agree with regrad.torch."""

from __future__ import annotations

import runpy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import regrad as rg
from tests.helpers.paths import DOCS

SCRIPT = DOCS / "how_torch_overrides_work.py"


@pytest.fixture
def core():
    """The script's names; its own assertions hold if this does not raise."""
    return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def test_stays_short():
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    assert sum(bool(line) for line in lines) <= 180


def squared(dy, x):
    return dy * x * x


MODELS = {
    "function": F.relu,
    "method": lambda x: x.relu(),
    "in place": lambda x: (2 * x).relu_(),
    "argument": lambda x: F.relu(2 * x, inplace=True),
    "module": torch.nn.ReLU(),
    "twice": lambda x: F.relu(F.relu(x) - 1) * torch.relu(-x + 3),
    "a view in place": lambda x: (2 * x).view(3).relu_(),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("order", [1, 2])
def test_a_rule_counts_wherever_the_op_is_called(core, model, order):
    found = []
    for scope in (core.Override, rg.torch.gradient_override_map):
        x = torch.tensor([-1.0, 0.5, 2.0], dtype=torch.float64, requires_grad=True)
        with scope({"Relu": squared}) as used:
            y = model(x)
        for _ in range(order):
            (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        used.assert_fired()
        found.append(y.tolist())
    assert found[0] == pytest.approx(found[1])


def test_the_value_and_other_ops_stay(core):
    x = torch.tensor([-1.0, 2.0], requires_grad=True)
    for scope in (core.Override, rg.torch.gradient_override_map):
        with scope({"Sign": lambda dy: dy}):
            y = torch.sign(x) + torch.relu(x)
        assert y.tolist() == [-1.0, 3.0]
        assert torch.autograd.grad(y.sum(), x)[0].tolist() == [1.0, 2.0]


def test_nothing_is_skipped_in_silence(core):
    def cell():
        inputs = [torch.ones(1, 1) for _ in range(4)]
        return torch.rnn_relu_cell(inputs[0], inputs[1].requires_grad_(), *inputs[2:])

    with pytest.raises(core.PassedOver, match="rnn_relu_cell"), core.Override({"Relu": squared}):
        cell()
    try:  # regrad takes the cell apart, or refuses it
        with rg.torch.gradient_override_map({"Relu": squared}) as used:
            cell().sum().backward()
        used.assert_fired()
    except rg.errors.PassedOverError:
        pass


def test_a_rule_that_matched_nothing_is_reported(core):
    with core.Override({"Sign": squared}) as used:
        F.relu(torch.ones(1))
    with pytest.raises(AssertionError, match="Sign"):
        used.assert_fired()
