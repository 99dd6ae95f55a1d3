"""Op definitions in TensorFlow 1's text format."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class NodeDef(NamedTuple):
    """The definition of an op, which prints in TensorFlow's text format."""

    name: str
    op: str  # the op type
    input: list[str]  # names of inputs and control inputs
    attr: dict[str, Any]
    device: str = ""

    def __str__(self) -> str:
        lines = [f'name: "{self.name}"', f'op: "{self.op}"']
        lines += [f'input: "{name}"' for name in self.input]
        for key, value in sorted(self.attr.items()):
            shown = "\n".join(f"    {line}" for line in _attr_lines(value))
            lines += ["attr {", f'  key: "{key}"', "  value {", shown, "  }", "}"]
        return "\n".join(lines) + "\n"

    __repr__ = __str__


def _attr_lines(value: Any) -> list[str]:
    """Return the lines that TensorFlow prints for the value of an attribute."""
    if isinstance(value, list | tuple):
        return ["list {", *[f"  {line}" for item in value for line in _attr_lines(item)], "}"]
    if isinstance(value, np.dtype):
        return [f"type: {_DT.get(value.name, f'DT_{value.name.upper()}')}"]
    if isinstance(value, bytes):
        return [f's: "{value.decode(errors="backslashreplace")}"']
    shown = str(value).lower() if isinstance(value, bool) else str(value)
    return [f"{_KINDS.get(type(value), 'value')}: {shown}"]


_KINDS = {bool: "b", int: "i", float: "f"}
_DT = {"float32": "DT_FLOAT", "float64": "DT_DOUBLE", "float16": "DT_HALF", "object": "DT_STRING"}
