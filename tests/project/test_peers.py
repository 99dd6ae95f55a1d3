"""The grid on other libraries: its programs do what they say; a slice of it holds for regrad."""

import subprocess
import sys

import pytest

from tests.campaigns import peers, records
from tests.campaigns.peer_programs import ERROR, LIBRARIES, Place, Way
from tests.campaigns.peers import FIRES, RAISES, SILENT, WARNS

BY_NAME = {library.name: library for library in LIBRARIES}
DIRECT = "called directly"


def way_of(library, name):
    return next(way for way in BY_NAME[library].ways if name in way.name)


def place_of(library, name):
    return next(place for place in BY_NAME[library].places if name in place.name)


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_every_mechanism_fires_where_it_is_called_directly(library):
    for way in library.ways:
        counts = peers.cell(library, way, place_of(library.name, DIRECT), ["Tanh", "Acosh"])
        assert counts["counts"] == {FIRES: 2}, way.name


@pytest.mark.parametrize(
    ("library", "way"),
    [("PyTorch", "regrad.torch"), ("JAX", "regrad.jax"), ("regrad", "map"), ("regrad", "custom")],
)
def test_no_mechanism_of_regrad_is_silent(library, way):
    for place in BY_NAME[library].places:
        found = peers.cell(BY_NAME[library], way_of(library, way), place, ["Tanh", "Abs"])
        assert SILENT not in found["counts"], place.name


def test_what_is_recorded_of_regrad_is_not_silent():
    ours = [e for e in records.read(peers.PATH)["cells"] if "regrad" in e["library"] + e["way"]]
    assert len(ours) > 80
    assert not [e for e in ours if SILENT in e["counts"]]
    assert [e["place"] for e in ours if WARNS in e["counts"]] == ["in another thread"]


def test_every_silent_cell_has_a_note():
    silent = [e for e in records.read(peers.PATH)["cells"] if SILENT in e["counts"]]
    assert silent and all(peers.note(e) for e in silent)


def test_a_rule_that_is_lost_is_silent():
    lost = Way("lost", "f = own", replaces=True)
    for name, library in BY_NAME.items():
        assert peers.ran(library, lost, place_of(name, DIRECT), "Tanh")[0] == SILENT


def test_only_an_error_is_right_for_a_wrong_answer():
    library, way = BY_NAME["regrad"], way_of("regrad", "custom")
    wrong = Place("", "got = rg.zeros(3)", ERROR)
    assert peers.ran(library, way, wrong, "Tanh") == (
        SILENT,
        "[0.0, 0.0, 0.0] instead of an error",
    )
    raising = Place("", "raise ValueError('no')", ERROR)
    assert peers.ran(library, way, raising, "Tanh") == (RAISES, "ValueError: no")


def test_what_a_program_replaced_is_put_back():
    import autograd.numpy as anp
    import jax.numpy as jnp
    import torch
    from autograd.core import primitive_vjps

    before = torch.tanh, jnp.tanh, primitive_vjps[anp.tanh]
    for library in LIBRARIES:
        for way in library.ways:
            if way.replaces:
                peers.ran(library, way, Place("", "raise ValueError"), "Tanh")
    assert before == (torch.tanh, jnp.tanh, primitive_vjps[anp.tanh])


def test_silent_programs_run_by_themselves():
    pytest.importorskip("autograd")
    first = next(peers.silent_programs("HIPS"))
    done = subprocess.run(
        [sys.executable, "-c", first], capture_output=True, text=True, timeout=120
    )
    due = first.partition(": ")[2].partition(" instead of")[0].rpartition(": ")[2]
    assert done.stdout.split() == due.replace(",", "").split()
