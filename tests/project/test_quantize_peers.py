"""Quantizers agree with PyTorch's own, and the page of all peers is made of what was recorded."""

import warnings

import pytest
import torch

from regrad.rules import quantize as Q
from tests.campaigns import quantize_cases, quantize_models, quantize_peers, records

RECORD = records.read(quantize_peers.PATH)


def test_the_page_is_made_of_the_results():
    text = quantize_peers.PAGE.read_text(encoding="utf-8")
    again = "run python -m tests.campaigns.quantize_peers page"
    assert quantize_peers.page(RECORD) == text, again


def test_all_that_was_recorded_agrees():
    assert {e["package"].partition(".")[0] for e in RECORD["cases"]} == {*quantize_peers.PACKAGES}
    assert all(map(quantize_peers.agrees, RECORD["cases"]))
    kept = [e for e in RECORD["cases"] if e["off"]]
    assert all(max(e["apart"][part] for part in e["off"]) > 0.01 for e in kept)


def torch_cases():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # (torch.ao is said to leave PyTorch)
        return quantize_cases.torch_cases()


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("case", torch_cases(), ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore")
def test_quantizers_are_those_of_torch(case):
    found = quantize_peers.judged(case._replace(models=("MLP",)))
    assert quantize_peers.agrees(found), found
    if "usual" in found:
        assert max(found["usual apart"].values()) > 0.1


def test_what_is_apart_is_seen():
    part = {"value": {}, "inputs": {}, "weights": {"w": torch.tensor([1.0, -4.0])},
            "learned": {"a": torch.tensor(2.0), "b": torch.tensor([0.5])}}  # fmt: skip
    other = {**part, "weights": {"w": torch.tensor([1.0, -3.0])},
             "learned": {"a": torch.tensor(2.0), "b": torch.tensor([0.0])}}  # fmt: skip
    assert quantize_peers.apart(part, part) == {"weights": 0, "learned": 0}
    assert quantize_peers.apart(other, part) == {"weights": 0.25, "learned": 0.25}
    entry = {"dtype": "float64", "off": ["inputs"], "apart": {"value": 1e-7, "inputs": 1.0},
             "runs": 9, "moved": 1}  # fmt: skip
    assert quantize_peers.agrees(entry) and not quantize_peers.agrees({**entry, "moved": 2})
    assert not quantize_peers.agrees({**entry, "apart": {"value": 1e-5}})


@pytest.mark.parametrize(("per", "side"), [("tensor", 127.5), ("channel", 7.5), (32, 7.5)])
def test_even_weights_have_powers_of_two_as_scales(per, side):
    model, _ = quantize_models.built("MLP", torch.float32, (per, side))
    bits = {127.5: 8, 7.5: 4}[side]
    coded = Q.affine(bits, per=per, largest="tie").coded(model.a.weight.detach())
    assert torch.equal(coded.scale, coded.scale.log2().round().exp2())
