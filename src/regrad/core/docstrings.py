"""Docstrings of ops: what follows from the declaration of an op is written here, once for all.

The docstring of a row says what the op computes, its units, range and kinks. Its arguments, the
shape and dtype of the result, and the errors follow from the declaration: `complete` puts them
between the prose and the example, unless the docstring has such a section of its own.
"""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regrad.core.registry import Op

INDENT = " " * 4
END = re.compile(r"^(Source:|Op types?:|>>> )", re.M)  # where the prose of a docstring ends


def complete(doc: str, op: Op, *, boolean: bool = False) -> str:
    """Return the docstring of an op with the sections that follow from its declaration.

    `boolean` says that the results of an elementwise op are bools.
    """
    doc = inspect.cleandoc(doc)
    found = END.search(doc)
    end = found.start() if found else len(doc)
    parts = [doc[:end].strip()]
    if op.elementwise and "\nArgs:" not in doc and not op.attrs:
        parts += [_arguments(op), _results(op, boolean), _errors(op)]
    rest = doc[end:].strip()
    named = f"Op type: `{op.type}`."
    if rest.startswith("Source:"):
        parts.append(f"{named} {rest}")
    else:
        parts += [rest] if rest.startswith("Op type") else [named, rest]
    text = "\n\n".join(filter(None, parts))
    return text.replace("\n", f"\n{INDENT}").replace(f"\n{INDENT}\n", "\n\n")


def _arguments(op: Op) -> str:
    names = ", ".join(i.name for i in op.inputs)
    numbers = "real numbers" if op.real else "real or complex numbers"
    text = f"{names}: A Tensor or array of {numbers}, or a number."
    return _section("Args", text + " Shapes broadcast." * (len(op.inputs) > 1))


def _results(op: Op, boolean: bool) -> str:
    name, *others = [i.name for i in op.inputs]
    shape = "the shape to which the arguments broadcast" if others else f"{name}'s shape"
    dtype = "of the dtype to which they promote" if others else "dtype"
    if boolean:
        return _section("Returns", f"A Tensor of bools, of {shape}.")
    text = f"A Tensor of {shape}{', ' if others else ' and '}{dtype}."
    if op.to_float:
        return _section("Returns", text, "Integers and bools give the default dtype.")
    return _section("Returns", text)


def _errors(op: Op) -> str:
    lines = ["ArgumentError: an argument is not a Tensor, an array or a number."]
    if op.real:
        lines.append("DTypeError: an argument is complex.")
    if len(op.inputs) > 1:
        lines.append("ShapeError: the shapes do not broadcast.")
    return _section("Raises", *lines)


def _section(title: str, *lines: str) -> str:
    return "\n".join([f"{title}:", *[INDENT + line for line in lines]])
