"""Calls of `tf` functions make what TensorFlow made of them: values, gradients, names, overrides.

`golden/tf1_calls.json` is a record of TensorFlow 2.21 (`tensorflow.compat.v1`);
`tests/campaigns/tf1_calls.py` writes it. Each call runs with full, partial or unknown static
shapes. The types of errors matter, their wording and the time (build or run) do not.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import regrad.v1 as tf
from tests.helpers.paths import GOLDEN
from tests.helpers.tf1_calls import fires, run
from tests.helpers.tf1_cases import nothing_is_left

pytestmark = pytest.mark.usefixtures(nothing_is_left.__name__)

FILE = json.loads((GOLDEN / "tf1_calls.json").read_text(encoding="utf-8"))
CELLS = {f"{call} of {specs or 'nothing'}, {shapes}": (call, specs, shapes, record)
         for call, specs, shapes, _, record in FILE["cells"]}  # fmt: skip
OVERRIDES = [(name, fired) for name, cell in CELLS.items() for fired in cell[3].get("fires", ())]


def same(got: Any, due: Any) -> bool:
    """Equal in structure and text; numbers within 1e-5, relative to the largest."""
    if isinstance(due, list) and isinstance(got, list) and len(got) == len(due):
        if any(isinstance(d, list | str | None) for d in due):
            return all(map(same, got, due))
        largest = max([1, *np.abs(due)[np.isfinite(due)]])
        return np.allclose(got, due, rtol=1e-5, atol=1e-5 * largest, equal_nan=True)
    return got == due or (isinstance(due, float) and np.isclose(got, due, 1e-5, 1e-5).item())


def kinds(error: Any) -> set[str]:
    """The names of the classes of an error. A ValueError is also TensorFlow's error of a run."""
    names = {base.__name__ for base in type(error).__mro__}
    return names | ({"InvalidArgumentError"} if isinstance(error, ValueError) else set())


@pytest.mark.parametrize("name", CELLS)
def test_a_call_makes_what_tensorflow_made(name: str) -> None:
    *cell, due = CELLS[name]
    got = run(tf, *cell)
    if "error" in due:
        assert due["error"] in kinds(got), got
    else:
        assert isinstance(got, dict), got
        wrong = {key: (got.get(key), due[key]) for key in due.keys() - {"fires"}
                 if not same(got.get(key), due[key])}  # fmt: skip
        assert not wrong, wrong


@pytest.mark.parametrize(("name", "op_type"), OVERRIDES)
def test_an_override_fires_as_often_as_in_tensorflow(name: str, op_type: str) -> None:
    *cell, due = CELLS[name]
    assert fires(tf, op_type, *cell) == due["fires"][op_type]
