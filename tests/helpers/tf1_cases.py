"""Programs that were run under TensorFlow 1, and what came of them."""

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


@pytest.fixture
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
