"""Record what TensorFlow makes of the calls in `tests/golden/tf1_calls.json`.

    python -m tests.campaigns.tf1_calls

The command needs TensorFlow (`pip install tensorflow-cpu tf_keras`), which the project itself does
not. It runs each cell of the file in `tensorflow.compat.v1` and writes its record. To add a cell,
add a line `["the expression", "x:F23 y:I3", "static", "", {}]` to the file first. The static shapes
of the placeholders are `static`, `partial` (None for the first size) or `unknown`. The fourth entry
names the parts of the record to leave out, where regrad differs on purpose: `names fires`.
"""

from __future__ import annotations

import importlib
import json
import os
from typing import Any

from tests.helpers.paths import GOLDEN
from tests.helpers.tf1_calls import Cell, fires, run

FILE = GOLDEN / "tf1_calls.json"
NO_RULES = {"Const", "Placeholder", "NoOp", "Assign", "VariableV2"}


def tensorflow() -> Any:
    """TensorFlow 1's interface, in graph mode."""
    os.environ["TF_USE_LEGACY_KERAS"] = "1"  # `tf.layers` needs it
    tf = importlib.import_module("tensorflow.compat.v1")
    tf.disable_v2_behavior()
    tf.logging.set_verbosity("FATAL")
    return tf


def record(tf: Any, *cell: str, without: str) -> dict[str, Any]:
    """The record of a cell, with the number of runs of an override of each of its op types."""
    found = run(tf, *cell)
    if isinstance(found, Exception):
        return {"error": type(found).__name__}
    if found["gradients"] and "fires" not in without:
        Cell(tf, *cell).build()
        types = {op.type for op in tf.get_default_graph().get_operations()} - NO_RULES
        counts = {op_type: fires(tf, op_type, *cell) for op_type in sorted(types)}
        found["fires"] = {op_type: n for op_type, n in counts.items() if n}
    return {key: part for key, part in found.items() if key not in without.split()}


def main() -> None:
    tf = tensorflow()
    cells = json.loads(FILE.read_text(encoding="utf-8"))["cells"]
    lines = [json.dumps([*cell, w, record(tf, *cell, without=w)]) for *cell, w, _ in cells]
    body = ",\n".join(lines)
    head = json.dumps({"tensorflow": tf.__version__, "interface": "compat.v1, graph mode"})
    FILE.write_text(f'{{"meta": {head}, "cells": [\n{body}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
