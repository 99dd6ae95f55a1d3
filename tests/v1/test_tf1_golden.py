"""What TensorFlow 1 itself answered, replayed: programs, their results and their exceptions.

The cases in `golden/tf1_cases.json` are programs that were run under real TensorFlow 2.21
(`tensorflow.compat.v1`, v2 behaviour disabled), 1.15.0 and 1.8.0; `old` tells what the older
ones answered where they differ. Here `tf` is regrad.v1 and nothing else changes. The types of
exceptions matter, their wording does not. A case with `prefer` follows the older version.
No case opens a scope that matches nothing, so none expects an UnusedOverrideWarning.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.helpers import tf1_cases
from tests.helpers.quick import full_effort
from tests.helpers.rows import refused
from tests.helpers.tf1_cases import CASES, DIFFERENT, nothing_is_left, over, plain, run, same
from tests.helpers.v1_session import all_compiled

pytestmark = pytest.mark.usefixtures(nothing_is_left.__name__)


@over("expected")
def test_answers_as_tensorflow_1_did(case: dict[str, Any]) -> None:
    result = plain(run(case))
    assert same(result, tf1_cases.due(case)), f"got {result}, due {tf1_cases.due(case)}"


@over("expected_exception")
def test_raises_as_tensorflow_1_did(case: dict[str, Any]) -> None:
    refused(lambda: run(case), tf1_cases.exceptions(case))


@pytest.mark.slow(but=17)
@pytest.mark.usefixtures(all_compiled.__name__, full_effort.__name__)
@over("expected")
def test_compiled_sessions_answer_as_tensorflow_1_did(case: dict[str, Any]) -> None:
    test_answers_as_tensorflow_1_did(case)


@pytest.mark.usefixtures(all_compiled.__name__, full_effort.__name__)
@over("expected_exception")
def test_compiled_sessions_raise_as_tensorflow_1_did(case: dict[str, Any]) -> None:
    test_raises_as_tensorflow_1_did(case)


@pytest.mark.parametrize("name", DIFFERENT)
def test_differs_as_decided(name: str) -> None:
    refused(lambda: run(CASES[name]), DIFFERENT[name][1])


def test_every_case_is_replayed() -> None:
    assert len(CASES) == len(tf1_cases.FILE["cases"])
    assert all("expected" in case or "expected_exception" in case for case in CASES.values())
    assert DIFFERENT.keys() <= CASES.keys()


@pytest.mark.parametrize(("got", "due"), [
    ([1.0], [1]), ([1], [1.0]), ([True], [1]), ([1.0], [1.0, 1.0]), (1.0, [1.0]), (1.001, 1.0),
    (0.0, -0.0), (float("nan"), 1.0), (float("inf"), "-Infinity"), (None, 0.0), ("a", "b"),
    ("RuleError", "KeyError"),
])  # fmt: skip
def test_the_comparison_can_fail(got: Any, due: Any) -> None:
    assert not same(got, due)


@pytest.mark.parametrize(("got", "due"), [
    (np.float32(1.5), 1.5), ((np.ones(2), None), [[1.0, 1.0], None]), (-0.0, -0.0),
    (np.array([np.nan, np.inf, -np.inf]), ["NaN", "Infinity", "-Infinity"]), (b"text", "text"),
    (np.int32(3), 3), ("RegistrationError", "KeyError"),
])  # fmt: skip
def test_the_comparison_can_succeed(got: Any, due: Any) -> None:
    assert same(plain(got), due)
