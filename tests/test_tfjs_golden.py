"""What TensorFlow.js itself answered, replayed: values, gradients and second derivatives.

The cases in `golden/tfjs_*.json` were recorded from the original (each file says how).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import regrad as rg
import regrad.linalg
import regrad.losses
import regrad.nn
from regrad.errors import GradientError
from tests.helpers.paths import DOCS
from tests.helpers.tfjs_cases import (
    cases,
    check,
    chosen,
    function_of,
    loss_of,
    tensor,
    variables_of,
)


@np.errstate(all="ignore")  # some cases are about infinities
def replay(case: dict[str, Any]) -> None:
    f, dy = function_of(case), tensor(case["dy"])
    xs = [tensor(case["inputs"][i]) for i in case["wrt"]]
    if not xs:
        check(f(), case["expected_value"], case)
    elif case.get("order") == 2 or "first_wrt" in case:
        replay_second_order(case, f, xs, dy)
    else:
        value, grads = rg.value_and_grads(f)(xs, dy)
        check(value, case["expected_value"], case)
        check_grads(grads, case)


def replay_second_order(case: dict[str, Any], f: Any, xs: Any, dy: Any) -> None:
    place = case["wrt"].index(case["first_wrt"])
    first, grads = rg.value_and_grads(lambda *xs: rg.grads(f)(list(xs))[place])(xs, dy)
    check(f(*xs), case["expected_value"], case)
    check(first, case["expected_first_grad"], case)
    check_grads(grads, case)


def check_grads(grads: Any, case: dict[str, Any]) -> None:
    for i, dx in zip(case["wrt"], grads, strict=True):
        check(dx, case["expected_grads"][i], case)


def replay_variables(case: dict[str, Any]) -> None:
    variables = variables_of(case)
    value, grads = rg.variable_grads(loss_of(case, variables), chosen(case, variables))
    check(value, case["expected_value"], case)
    assert list(grads) == list(case["expected_grads"])
    for name, due in case["expected_grads"].items():
        check(grads[name], due, case)


# -- where regrad answers otherwise (docs/tfjs_differences.md) -----------------------------------

NO_INTEGERS = "integers and bools have no gradient: an error says so before f runs"
NO_INTEGER_RESULT = "a cast to integers ends the path, and an integer result has no gradient"
SHARED = "max and min share the gradient of a tie equally"
ABS = "the gradient of |x| at 0 is 0"

# Case → why, and what regrad answers: an error, or the gradients by input.
DIFFERENT: dict[str, tuple[str, Any]] = {
    "op_081_cast": (NO_INTEGERS, GradientError),
    "op_082_abs": (ABS, {0: [-1, 0, 1]}),
    "op_101_square": (NO_INTEGERS, GradientError),
    "op_135_div": (NO_INTEGERS, GradientError),
    "op_142_pow": ("the gradient of 0**0 by the base is 0", {0: [0, np.inf, 1, 0]}),
    "op_161_mul": (NO_INTEGERS, GradientError),
    "op_186_sum": (NO_INTEGERS, GradientError),
    "op_187_mean": (NO_INTEGERS, GradientError),
    "op_193_max": (SHARED, {0: [0.5, 0, 0.5, 0]}),
    "op_194_max": (SHARED, {0: [-0.008, -0.008, 0, 0.5 / 3, 0.5 / 3, 0.5 / 3]}),
    "op_201_min": (SHARED, {0: [0, 0, 1.014, 1.325 / 3, 1.325 / 3, 1.325 / 3]}),
    "op_298_reshape": (NO_INTEGERS, GradientError),
    "op_359_oneHot": (NO_INTEGERS, GradientError),
    "op_406_absoluteDifference": (ABS, {0: [0, -0.5], 1: [0, 0.5]}),
    "custom_035_customGrad": (NO_INTEGER_RESULT, GradientError),
    "variable_015_variableGrads": (SHARED, {"a": [0.5, 0.5, 0]}),
}


def with_ours(case: dict[str, Any], ours: dict[Any, Any]) -> dict[str, Any]:
    """The case as regrad answers it."""
    due = case["expected_grads"]
    for key, values in ours.items():
        assert due[key]["values"] != values
    grads = due.copy()
    for key, values in ours.items():
        grads[key] = due[key] | {"values": values}
    return case | {"expected_grads": grads}


def parametrized(*kinds: str, different: bool = False) -> Any:
    rows = [row for row in cases(*kinds) if (row["id"] in DIFFERENT) is different]
    return pytest.mark.parametrize("case", rows, ids=lambda case: case["id"])


@parametrized("op", "second_order", "custom")
def test_agrees(case: dict[str, Any]) -> None:
    replay(case)


@parametrized("variable")
def test_variable_grads_agree(case: dict[str, Any]) -> None:
    replay_variables(case)


@parametrized("op", "second_order", "custom", "variable", different=True)
def test_differs_as_decided(case: dict[str, Any]) -> None:
    _, ours = DIFFERENT[case["id"]]
    run = replay_variables if "variables" in case else replay
    if isinstance(ours, type):
        with pytest.raises(ours):
            run(case)
    else:
        with pytest.raises(AssertionError):
            run(case)
        run(with_ours(case, ours))


def test_every_difference_is_documented() -> None:
    text = (DOCS / "tfjs_differences.md").read_text()
    known = {case["id"] for case in cases("op", "second_order", "custom", "variable")}
    assert DIFFERENT.keys() <= known
    assert [name for name in DIFFERENT if name not in text] == []
