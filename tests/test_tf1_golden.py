"""What TensorFlow 1 itself answered, replayed: programs, their results and their exceptions.

The cases in `golden/tf1_cases.json` are programs that were run under real TensorFlow 2.21
(`tensorflow.compat.v1`, v2 behaviour disabled), 1.15.0 and 1.8.0; `old` tells what the older
ones answered where they differ. Here `tf` is regrad.v1 and nothing else changes. The types of
exceptions matter, their wording does not. A case with `prefer` follows the older version.
No case opens a scope that matches nothing, so none expects an UnusedOverrideWarning.
"""

from __future__ import annotations

import builtins
import json
import math
from typing import Any

import numpy as np
import pytest

import regrad.v1 as tf
from regrad import errors
from regrad.errors import RuleError, UnknownOpError
from regrad.registry import RULES
from tests.helpers.paths import GOLDEN

FILE = json.loads((GOLDEN / "tf1_cases.json").read_text())
CASES = {case["id"]: case for case in FILE["cases"]}
TOLERANCE = FILE["meta"]["default_tol"]

# Case → why regrad answers otherwise, and the error that it raises.
DIFFERENT: dict[str, tuple[str, type[Exception]]] = {
    "scope_unknown_key_ignored": (
        "a key that names no op type overrides nothing; TensorFlow says nothing, regrad refuses it",
        UnknownOpError,
    ),
    "fn_wrong_dtype_accepted": (
        "a float64 gradient of a float32 input is a mistake of the rule; TensorFlow passes it on",
        RuleError,
    ),
}


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Registered names last as long as the process; here as long as the case."""
    names = dict(RULES)
    tf.reset_default_graph()
    yield
    RULES.clear()
    RULES.update(names)


def run(case: dict[str, Any]) -> Any:
    scope: dict[str, Any] = {"tf": tf, "np": np}
    code = compile(case["code"], f"<{case['id']}>", "exec")
    with np.errstate(all="ignore"):  # some cases are about infinities
        exec(code, scope)
    return scope.get("result")


def plain(value: Any) -> Any:
    """A result as JSON has it: lists for arrays and tuples, text for bytes."""
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value.decode() if isinstance(value, bytes) else value


def same(got: Any, due: Any) -> bool:
    """Equal in structure, text and kind; numbers within the tolerance, -0.0 is not 0.0."""
    if isinstance(due, list):
        return isinstance(got, list) and len(got) == len(due) and all(map(same, got, due))
    if isinstance(got, float) and (isinstance(due, float) or due in NOT_FINITE):
        due = float(due)
        signs = got != 0 or due != 0 or math.copysign(1, got) == math.copysign(1, due)
        return signs and np.isclose(got, due, **TOLERANCE, equal_nan=True).item()
    return type(got) is type(due) and (got == due or names_a_kind_of(got, due))


NOT_FINITE = ("NaN", "Infinity", "-Infinity")


def names_a_kind_of(got: Any, due: Any) -> bool:
    """Whether `got` is the name of an error of regrad that derives from the one named `due`."""
    error = getattr(errors, got, None) if isinstance(got, str) else None
    return isinstance(error, type) and due in {base.__name__ for base in error.__mro__}


def due(case: dict[str, Any]) -> Any:
    version = case.get("prefer")
    return case["old"][version]["result"] if version else case["expected"]


def exceptions(case: dict[str, Any]) -> tuple[type[Exception], ...]:
    """The exception that was recorded, and others that do as well."""
    names = [case["expected_exception"]["type"], *case.get("accept", ())]
    return tuple(getattr(builtins, n, None) or getattr(tf.errors, n) for n in names)


def over(kind: str) -> Any:
    ids = [i for i, case in CASES.items() if kind in case and i not in DIFFERENT]
    return pytest.mark.parametrize("case", [CASES[i] for i in ids], ids=ids)


@over("expected")
def test_answers_as_tensorflow_1_did(case: dict[str, Any]) -> None:
    result = plain(run(case))
    assert same(result, due(case)), f"got {result}, due {due(case)}"


@over("expected_exception")
def test_raises_as_tensorflow_1_did(case: dict[str, Any]) -> None:
    with pytest.raises(exceptions(case)):
        run(case)


@pytest.mark.parametrize("name", DIFFERENT)
def test_differs_as_decided(name: str) -> None:
    with pytest.raises(DIFFERENT[name][1]):
        run(CASES[name])


def test_every_case_is_replayed() -> None:
    assert len(CASES) == len(FILE["cases"])
    assert all("expected" in case or "expected_exception" in case for case in CASES.values())
    assert DIFFERENT.keys() <= CASES.keys()


@pytest.mark.parametrize(
    ("got", "due"),
    [
        ([1.0], [1]),
        ([1], [1.0]),
        ([True], [1]),
        ([1.0], [1.0, 1.0]),
        (1.0, [1.0]),
        (1.001, 1.0),
        (0.0, -0.0),
        (float("nan"), 1.0),
        (float("inf"), "-Infinity"),
        (None, 0.0),
        ("a", "b"),
        ("RuleError", "KeyError"),
    ],
)
def test_the_comparison_can_fail(got: Any, due: Any) -> None:
    assert not same(got, due)


@pytest.mark.parametrize(
    ("got", "due"),
    [
        (np.float32(1.5), 1.5),
        ((np.ones(2), None), [[1.0, 1.0], None]),
        (np.array([np.nan, np.inf, -np.inf]), ["NaN", "Infinity", "-Infinity"]),
        (-0.0, -0.0),
        (b"text", "text"),
        (np.int32(3), 3),
        ("RegistrationError", "KeyError"),
    ],
)
def test_the_comparison_can_succeed(got: Any, due: Any) -> None:
    assert same(plain(got), due)
