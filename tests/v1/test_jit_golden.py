"""What TensorFlow 1 answered, replayed through `Session(jit=True)`."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import regrad.v1 as tf
from tests.helpers import tf1_cases as golden
from tests.helpers.quick import full_effort
from tests.helpers.tf1_cases import nothing_is_left

pytestmark = pytest.mark.usefixtures(full_effort.__name__, nothing_is_left.__name__)


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """All sessions are compiled."""
    monkeypatch.setattr(tf, "Session", functools.partial(tf.Session, jit=True))


@pytest.mark.slow(but=17)
@golden.over("expected")
def test_answers_as_tensorflow_1_did(case: dict[str, Any]) -> None:
    result = golden.plain(golden.run(case))
    assert golden.same(result, golden.due(case)), f"got {result}, due {golden.due(case)}"


@golden.over("expected_exception")
def test_raises_as_tensorflow_1_did(case: dict[str, Any]) -> None:
    with pytest.raises(golden.exceptions(case)):
        golden.run(case)
