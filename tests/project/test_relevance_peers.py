"""The page of relevance next to its peers is made of what was recorded, which keeps its bounds."""

import pytest
import torch

from tests.campaigns import records, relevance_cases, relevance_models, relevance_peers
from tests.campaigns.relevance_peers import AGREES, BOUND, KEPT, RAISES, SILENT

FOUND = records.read(relevance_peers.PATH)
AGAIN = "run python -m tests.campaigns.relevance_peers page"


def test_the_page_is_made_of_the_results():
    text = relevance_peers.PAGE.read_text(encoding="utf-8")
    assert relevance_peers.page(FOUND) == text, AGAIN


def test_every_case_was_run_and_ours_is_right():
    wanted = [(c.model, c.name, c.peer) for c in relevance_cases.cases()]
    assert [(e["model"], e["rule"], e["peer"]) for e in FOUND["cases"]] == wanted
    for e in FOUND["cases"]:
        assert e["outcome"] in (AGREES, SILENT, RAISES), e
        assert e["ours"] is None or e["ours"] <= BOUND, e
        assert e["outcome"] == RAISES or e["ours"] is not None, e


def test_relevance_is_kept_in_models_of_each_kind():
    assert [e["model"] for e in FOUND["kept"]] == list(KEPT)
    assert all(e["missing"] <= 1e-5 for e in FOUND["kept"])


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
    from torch import nn

    before = nn.LayerNorm.forward
    with relevance_cases.unpatched({}):
        nn.LayerNorm.forward = lambda self, x: x
        nn.GELU.original_forward = None
    assert nn.LayerNorm.forward is before
    assert not hasattr(nn.GELU, "original_forward")
