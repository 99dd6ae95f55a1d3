"""The oracle of the campaign with public models agrees with right rules, and sees wrong ones."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regrad.torch
from tests.campaigns import public_jax, public_models, public_oracle, public_table, records
from tests.campaigns.public_table import Built, Row
from tests.campaigns.verdicts import BROKEN, DELIVERED, REFUSED, SILENT


class Small(nn.Module):
    """Every op type of the table, in a few lines."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.q, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2).clone()
        x = F.gelu(x) * torch.sigmoid(x) + torch.tanh(F.silu(x))
        x = x.reshape(2, 4, 16).mT
        weights = torch.softmax(self.q(x.contiguous()) @ x.mT, -1)
        return F.log_softmax(self.last((weights @ x).mean(1)), -1)


def subject():
    return public_models.Subject(Row("small", lambda: Built(Small(), (torch.rand(2, 1, 8, 8),))))


@pytest.mark.parametrize("op_type", sorted(set(public_table.OP_TYPES) - {"Identity", "Reshape"}))
def test_rules_agree_with_hooks_on_the_record(op_type):
    small = subject()
    ops = small.record.ops(op_type)
    assert ops
    verdict = public_models.verdict_of(small, "case", op_type, ops)
    assert verdict.outcome == DELIVERED, verdict


@pytest.mark.parametrize("op_type", public_table.OP_TYPES)
def test_an_op_that_is_passed_over_is_seen(op_type, monkeypatch):
    small = subject()
    ops = small.record.ops(op_type)

    class Nothing:
        hits = ()

        def __init__(self, rules, model=None):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

    monkeypatch.setattr(regrad.torch, "gradient_override_map", Nothing)
    verdict = public_models.verdict_of(small, "case", op_type, ops)
    assert verdict.outcome == SILENT
    assert "as in the plain model: 0 bound" in verdict.detail


def test_other_values_are_seen(monkeypatch):
    small = subject()
    ops = small.record.ops("Relu")
    small.ys = [y + 1e-15 for y in small.ys]
    verdict = public_models.verdict_of(small, "case", "Relu", ops)
    assert verdict.outcome == SILENT
    assert "values differ" in verdict.detail


def test_errors_are_told_apart(monkeypatch):
    small = subject()
    ops = small.record.ops("Relu")
    for problem, outcome in (
        (regrad.errors.PassedOverError("no"), REFUSED),
        (TypeError("no"), BROKEN),
    ):
        monkeypatch.setattr(
            small, "call", lambda model, problem=problem: (_ for _ in ()).throw(problem)
        )
        assert public_models.verdict_of(small, "case", "Relu", ops).outcome == outcome


def test_the_table_is_frozen():
    names = [row.name for row in public_table.rows()]
    assert Counter(name.partition("/")[0] for name in names) == {
        "torchvision": 26, "timm": 33, "transformers": 50, "diffusers": 6, "torch_geometric": 4,
    }  # fmt: skip
    assert len(public_jax.rows()) == 26
    assert len(set(names)) == len(names)


def test_a_package_that_lacks_is_named():
    assert records.missing(["torch", "no_such_package"]) == ["no_such_package"]
    assert public_oracle.K != public_oracle.L
