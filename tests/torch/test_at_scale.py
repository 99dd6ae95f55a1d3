"""Overrides where several processes train, and where data comes from other processes.

What needs two processes is in `parallel_checks.py`; each child runs all checks of some kinds.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch import nn

import regrad.torch
from regrad.errors import PassedOverError
from tests.helpers import children
from tests.helpers.children import failures, free_port
from tests.helpers.networks import (
    RELU,
    ResNet,
    assert_equal,
    images,
    resnet_by_hand,
    train,
)
from tests.helpers.optional import ABSENT
from tests.helpers.paths import ROOT

override = regrad.torch.gradient_override_map
run_children = partial(children.run_children, ROOT / "tests/helpers/parallel_checks.py")


@pytest.mark.versions
@pytest.mark.parametrize(
    "kinds", [["ddp_", "hits_", "workers_"], ["fsdp_", "tensor_", "pipeline_"]]
)
def test_two_processes(kinds, tmp_path):
    port = free_port()
    reports = run_children(tmp_path, *[[rank, port, *kinds] for rank in ("0", "1")])
    assert failures(reports) == ""
    assert reports[0] == reports[1]
    assert {name.partition("_")[0] + "_" for name in reports[0]} == {*kinds}
    assert len(reports[0]) >= 13


@pytest.mark.versions
@pytest.mark.skipif("keras" in ABSENT, reason="needs keras")
def test_a_model_of_keras(tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))  # where it writes its settings
    (report,) = children.run_children(ROOT / "tests/helpers/keras_checks.py", tmp_path, [])
    assert [*report] == ["torch_fit_in_a_scope"]


# -- Functions as those of which FSDP2 is made ----------------------------------------------------


class Reversal(torch.autograd.Function):
    """It returns what it was given, of which torch then makes a view."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        return -dy


class Pair(torch.autograd.Function):
    @staticmethod
    def forward(x: Any, y: Any) -> Any:
        return x, y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        return tuple(-dy for dy in dys)


@pytest.mark.versions
@pytest.mark.parametrize("function", [Reversal.apply, lambda x: Pair.apply(x, 2 * x)[0]])
@pytest.mark.parametrize(("key", "op"), [("Relu", torch.relu), ("Reshape", torch.flatten)])
def test_functions_that_return_what_they_were_given(function, key, op):
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with override({key: lambda dy: 7 * dy}) as used:
        y = op(function(x))
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx.tolist() == [-7.0, -7.0]
    assert [(hit.count, hit.ran) for hit in used.hits] == [(1, 1)]  # torch's view is not the user's


def test_a_view_in_a_function_is_still_refused():
    class Hiding(Reversal):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

    x = torch.tensor([1.0], requires_grad=True)
    with (
        pytest.raises(PassedOverError, match="Reshape ran in the forward pass"),
        override({"Reshape": lambda dy: dy}),
    ):
        Hiding.apply(x)


def test_a_view_in_a_function_that_began_before_the_scope_is_still_refused():
    class Late(Pair):
        @staticmethod
        def forward(x, y):
            with override({"Reshape": lambda dy: dy}):
                Reversal.apply(y)
                return x.view_as(x), y

    x = torch.tensor([1.0], requires_grad=True)
    with pytest.raises(PassedOverError, match="began before the scope was opened"):
        Late.apply(x, 2 * x)


# -- copies of a model, and hits ------------------------------------------------------------------


def test_data_parallel_of_one_process():
    with override(RELU) as used:
        found = train(nn.DataParallel(ResNet()), images())[1]
    used.assert_fired()
    assert_equal(found, train(resnet_by_hand(), images())[1])


def test_hits_of_other_processes_need_a_group():
    with override(RELU) as used:
        x = torch.ones(1, requires_grad=True)
        torch.relu(x).backward()
    with pytest.raises(ValueError, match="process group"):
        used.gather()
