"""A slice of the campaign over torch's own samples (F13); and faults that are put in are found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from regrad.torch import call_cache, calls, nodes
from regrad.torch.rulesets import coverage_of
from tests.campaigns import torch_ops
from tests.campaigns.verdicts import DELIVERED, REFUSED, SILENT

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

SLICE = """
abs add addmm clamp cumsum float_power hstack kron ldexp linalg_inv matmul max_binary mean
true_divide nn_functional_gelu nn_functional_hardswish nn_functional_linear nn_functional_mish rsub
nn_functional_relu6 nn_functional_silu outer pow sigmoid softmax sub sum tanh vdot where
"""


@pytest.mark.slow
@pytest.mark.versions
def test_a_slice_of_the_campaign():
    found = [v for name in SLICE.split() for v in torch_ops.run(name, quick=True)]
    assert {v.outcome for v in found} == {DELIVERED, REFUSED}, wrong(found)
    assert {v.detail for v in found if v.outcome == DELIVERED} == {
        torch_ops.FIRED,
        torch_ops.UNTOUCHED,
    }
    ways = {v.case.partition(":")[0].rpartition(", ")[0] for v in found}
    assert ways == {f"{way}{rule}" for way in ("eager", *torch_ops.CHEAP) for rule in RULES}


RULES = ("", ", writing")


def wrong(found: Sequence[Any]) -> dict[str, str]:
    return {v.case: v.detail for v in found if v.outcome not in (DELIVERED, REFUSED)}


@pytest.mark.slow
def test_an_op_that_is_passed_over_is_found(monkeypatch):
    monkeypatch.setattr(nodes, "types_of", lambda name: ())
    coverage_of.cache_clear()
    found = wrong(torch_ops.run("kron", quick=True))
    coverage_of.cache_clear()  # (equal scopes share what they have found to be harmless)
    assert found["eager, Mul: kron:op 0"] == "autograd recorded an op of the type"


@pytest.mark.slow
@pytest.mark.versions
def test_a_way_that_loses_the_rules_is_found(monkeypatch):
    def lost(f: Any, xs: Any) -> Any:
        def run(*xs: Any) -> Any:
            with torch._C.DisableTorchFunction():
                return f(*xs)

        return run

    monkeypatch.setitem(torch_ops.WAYS, "thread", torch_ops.by_autograd(lost))
    found = wrong(torch_ops.run("sigmoid", quick=True))
    assert found == {
        f"thread{rule}, Sigmoid: sigmoid:{kind} 0": "torch's own"
        for kind in ("op", "inplace_variant")
        for rule in RULES
    }


def test_a_value_that_changes_is_found(monkeypatch):
    (case, *_) = torch_ops.cases(torch_ops.load()["sigmoid"], 1)
    monkeypatch.setattr(calls.Overridden, "forward", lambda call, *xs: call.forward(*xs) + 1e-7)
    monkeypatch.setattr(call_cache, "is_grad_enabled", lambda: False)  # (the general road)
    known = torch_ops.plain(case)
    assert known is not None
    assert torch_ops.eager(case, known, "Sigmoid") == (SILENT, "the value is another")


def test_special_values_are_those_of_the_table():
    (case, *_) = torch_ops.cases(torch_ops.load()["mul"], 1)
    given = torch_ops.special(case, (math.inf, None), torch.float16)
    assert given.given[0].dtype == torch.float16
    assert given.given[0].flatten()[::2].isinf().all()
    assert torch.equal(given.given[0].flatten()[1::2], case.given[0].flatten()[1::2].half())
