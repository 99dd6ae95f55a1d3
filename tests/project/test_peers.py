"""Grids of other libraries do what they say; the pages of both are made of what was recorded."""

import re
import subprocess
import sys

import pytest
import torch

from tests.campaigns import (
    layer_cases,
    more_cases,
    peers,
    records,
    relevance_cases,
    relevance_models,
    relevance_peers,
)
from tests.campaigns.peer_programs import ERROR, LIBRARIES, Place, Way
from tests.campaigns.peers import FIRES, RAISES, SILENT, WARNS
from tests.campaigns.relevance_peers import AGREES, BOUND, KEPT
from tests.campaigns.relevance_peers import RAISES as FAILS
from tests.campaigns.relevance_peers import SILENT as WRONG
from tests.helpers.paths import DOCS

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


@pytest.mark.slow
@pytest.mark.parametrize(("library", "way"), [
    ("PyTorch", "regrad.torch"), ("JAX", "regrad.jax"), ("regrad", "map"), ("regrad", "custom"),
])  # fmt: skip
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
    assert peers.ran(library, way, wrong, "Tanh") == (SILENT, "[0.0, 0.0, 0.0] instead of an error")
    raising = Place("", "raise ValueError('no')", ERROR)
    assert peers.ran(library, way, raising, "Tanh") == (RAISES, "ValueError: no")


def test_what_a_program_replaced_is_put_back():
    import autograd.numpy as anp
    import jax.numpy as jnp
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


# -- relevance -------------------------------------------------------------------------------------

RELEVANCE = records.read(relevance_peers.PATH)
AGAIN = "run python -m tests.campaigns.relevance_peers page"


def test_the_page_is_made_of_the_results():
    text = relevance_peers.PAGE.read_text(encoding="utf-8")
    assert relevance_peers.page(RELEVANCE) == text, AGAIN


def test_every_case_was_run_and_ours_is_right():
    wanted = [(c.model, c.name, c.peer) for c in relevance_cases.cases()]
    assert [(e["model"], e["rule"], e["peer"]) for e in RELEVANCE["cases"]] == wanted
    for e in RELEVANCE["cases"]:
        assert e["outcome"] in (AGREES, WRONG, FAILS), e
        assert e["ours"] is None or e["ours"] <= BOUND, e
        assert e["outcome"] == FAILS or e["ours"] is not None, e


@pytest.mark.parametrize(
    ("path", "of"),
    [(relevance_peers.OF_LAYERS, layer_cases), (relevance_peers.MORE, more_cases)],
)
def test_every_case_of_layers_was_run_and_ours_is_right(path, of):
    found = records.read(path)["cases"]
    wanted = [(c.model, c.name, c.peer) for c in of.cases()]
    assert [(e["model"], e["rule"], e["peer"]) for e in found] == wanted
    for e in found:
        assert e["outcome"] in (AGREES, WRONG, FAILS), e
        assert e["ours"] <= relevance_peers.BOUNDS.get(e["peer"], BOUND), e
        assert "ratio" not in e or e["outcome"] == AGREES, e


def test_the_guide_to_maps_has_the_recorded_differences():
    record = relevance_peers.PAGE.read_text(encoding="utf-8")
    guide = (DOCS / "howto/cam.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `.*` \| `(\w+CAM\w*)` \| (.*) \| (.*) \| (.*) \|$", guide, re.M)
    assert len(rows) == 4
    for name, residual, *in_place in rows:
        assert f"\n| ResNet-18 | {name} | grad-cam | {residual} |" in record
        found = re.search(rf"\n\| VGG \| {name} \| grad-cam \| \D+ \| (\S+) \| (\S+) \|", record)
        assert found and [*found.groups()] == in_place


def test_relevance_is_kept_in_models_of_each_kind():
    assert [e["model"] for e in RELEVANCE["kept"]] == list(KEPT)
    assert all(e["missing"] <= 1e-5 for e in RELEVANCE["kept"])


def test_what_is_apart_is_seen():
    due = torch.tensor([[1.0, -4.0]])
    assert relevance_peers.apart(due + torch.tensor([[0.0, 2.0]]), due) == 0.5
    assert relevance_peers.per_cent(due, torch.tensor([-1.5])) == 2.0


@pytest.mark.parametrize("name", ["a layer that runs twice", "attention, written out"])
def test_a_twin_is_the_same_function(name):
    x = relevance_models.inputs(name)
    models = [relevance_models.built(name, twin=twin) for twin in (False, True)]
    ys = [model(x) for model in models]
    torch.testing.assert_close(*ys)


def test_what_a_program_patched_is_put_back():
    before = torch.nn.LayerNorm.forward
    with relevance_cases.unpatched({}):
        torch.nn.LayerNorm.forward = lambda self, x: x
        torch.nn.GELU.original_forward = None
    assert torch.nn.LayerNorm.forward is before
    assert not hasattr(torch.nn.GELU, "original_forward")
