"""The page of surrogates is made of the record, in which all agree with the peers."""

import numpy as np
import pytest

from tests.campaigns import records, spike_cases, spike_peers

RECORD = records.read(spike_peers.PATH)


def test_the_page_is_made_of_the_results():
    text = spike_peers.PAGE.read_text(encoding="utf-8")
    again = "run python -m tests.campaigns.spike_peers page"
    assert spike_peers.page(RECORD) == text, again


def test_all_that_was_recorded_agrees():
    cases, nets = RECORD["cases"], RECORD["networks"]
    assert {e["package"] for e in cases} == {*spike_cases.ALL}
    assert {e["package"] for e in nets} == {*spike_peers.NETS}
    assert all(map(spike_peers.agrees, cases)) and all(map(spike_peers.is_near, nets))
    assert all(e["spikes"][0] > 0.1 for e in nets)
    for e in cases:
        if e["off"]:
            assert "raises" in e or e["apart"]["float64"]["first"] > 0.01
        if e["second"]:
            assert e["apart"]["float64"]["second"] > 0.01


def test_the_record_has_the_cases():
    known = [(c.package, c.name, c.ours, c.factor) for c in spike_cases.cases()]
    assert known == [(e["package"], e["name"], e["ours"], e["factor"]) for e in RECORD["cases"]]


@pytest.mark.parametrize("case", [*spike_cases.cases("lava")], ids=lambda case: case.name)
def test_surrogates_are_those_of_lava(case):
    found = spike_peers.judged(case)
    assert spike_peers.agrees(found) and found["apart"]["float64"]["first"] is not None, found


@pytest.mark.parametrize("case", [*spike_cases.cases("rockpool")], ids=lambda case: case.name)
def test_surrogates_are_those_of_rockpool(case):
    found = spike_peers.judged(case)
    assert spike_peers.agrees(found), found


def test_a_difference_is_seen():
    ones = np.ones(3)
    assert spike_peers.apart(ones, ones) == 0
    assert spike_peers.apart(ones * [1, 1, 0.5], ones) == 0.5
    assert spike_peers.apart(None, ones) == 1 and spike_peers.apart(ones, None) is None
    assert spike_peers.apart(ones, np.array([1, np.nan, 1])) == 0
    case = spike_cases.Case("Lava", "Spike(1.0, 1.0, False)", "spike.piecewise_exp(2.0)")
    found = spike_peers.judged(case)
    assert not spike_peers.agrees(found) and found["apart"]["float32"]["first"] > 0.1
