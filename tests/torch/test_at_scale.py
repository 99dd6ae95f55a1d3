"""Overrides where several processes train, and where data comes from other processes.

What needs two processes is in `parallel_checks.py`; each child runs all checks of some kinds.
"""

import pytest
import torch.multiprocessing

from regrad.errors import PassedOverError
from tests.helpers.children import failures, free_port, run_children
from tests.helpers.networks import RELU
from tests.helpers.optional import ABSENT
from tests.helpers.paths import ROOT
from tests.torch.common import bare_function, grad, leaf, override

HELPERS = ROOT / "tests/helpers"
FIT = {"torch": "torch_fit_in_a_scope", "jax": "jax_fit_of_an_overridden_loss"}


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.parametrize(
    "kinds", [["ddp_", "hits_", "workers_"], ["fsdp_"], ["tensor_"], ["pipeline_"]]
)
def test_two_processes(kinds, tmp_path):
    port = free_port()
    ranks = [[rank, port, *kinds] for rank in ("0", "1")]
    reports = run_children(HELPERS / "parallel_checks.py", tmp_path, *ranks)
    assert failures(reports) == ""
    assert reports[0] == reports[1]
    assert {name.partition("_")[0] + "_" for name in reports[0]} == {*kinds}
    assert len(reports[0]) >= 4


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.skipif("keras" in ABSENT, reason="needs keras")
@pytest.mark.parametrize("backend", [each for each in FIT if each not in ABSENT])
def test_a_model_of_keras(backend, tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", backend)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))  # where it writes its settings
    (report,) = run_children(HELPERS / "keras_checks.py", tmp_path, [])
    assert [*report] == [FIT[backend]]


# -- Functions as those of which FSDP2 is made ----------------------------------------------------


# It returns its input, of which torch then makes a view.
Reversal = bare_function("Reversal", lambda ctx, x: x, lambda ctx, dy: -dy)
Pair = bare_function(
    "Pair", lambda x, y: (x, y), lambda ctx, dx, dy: (-dx, -dy),
    setup_context=lambda ctx, inputs, output: None,
)  # fmt: skip


@pytest.mark.versions
@pytest.mark.parametrize("function", [Reversal.apply, lambda x: Pair.apply(x, 2 * x)[0]])
@pytest.mark.parametrize(("key", "op"), [("Relu", torch.relu), ("Reshape", torch.flatten)])
def test_functions_that_return_what_they_were_given(function, key, op):
    x = leaf(1, 2)
    with override({key: lambda dy: 7 * dy}) as used:
        y = op(function(x))
    assert grad(y, x).tolist() == [-7.0, -7.0]
    assert [(hit.count, hit.ran) for hit in used.hits] == [(1, 1)]  # torch's view is not the user's


def late(x, y):
    with override({"Reshape": lambda dy: dy}):
        Reversal.apply(y)
        return x.view_as(x), y


def test_a_view_in_a_function_is_still_refused():
    hiding = bare_function("Hiding", lambda ctx, x: x.view_as(x), lambda ctx, dy: -dy)
    refused = pytest.raises(PassedOverError, match="Reshape ran in the forward pass")
    with refused, override({"Reshape": lambda dy: dy}):
        hiding.apply(leaf(1))
    begun = bare_function("Late", late, Pair.backward, setup_context=Pair.setup_context)
    with pytest.raises(PassedOverError, match="began before the scope opened"):
        begun.apply(leaf(1), leaf(2))


def test_hits_of_other_processes_need_a_group():
    with override(RELU) as used:
        torch.relu(leaf(1)).backward()
    with pytest.raises(ValueError, match="process group"):
        used.gather()
