"""Docstrings of ops: this module adds the sections that follow from a function's declaration.

The docstring of an op describes what the op computes, its units, range and kinks, and the
arguments that only this op has. This module adds the texts of shared arguments (`axis`, `keepdims`,
`device`, the tensors), the result of an elementwise op, and the errors for wrong arguments. They
come in the order Args, Returns, Raises, before the source and the example. For example,

    @op("Sort")
    def sort(xp, x: Tensor, /, *, axis: int = -1) -> Tensor:
        "Return x sorted along `axis`."

gets a docstring with `Args:` for x and axis, and with `Raises:`. Text that a docstring already has
is never replaced.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from regrad.core.protocols import OpLike

F = TypeVar("F", bound=Callable[..., Any])

INDENT = " " * 4
# All patterns run when regrad is imported. A pattern that begins with a line break is fast.
END = re.compile(r"\n(?=Source:|Op types?:|A composition|>>> )")  # where the prose ends
ENTRY = re.compile(r"\n(?= {4}[\w*])")  # before an argument's line
ARGS = re.compile(r"\nArgs:\n((?: {4}.*\n?|\n(?= {4}))+)")
RESULT = re.compile(r"\n(?=(?:Returns|Yields|Raises)\b)")
RAISES = re.compile(r"\nRaises \w")  # errors in prose
NAMES = re.compile(r"[\w*]+")
EXAMPLE = re.compile(r"\n(?:>>>|\.\.\.) .*")
IMPORTS = {  # of examples
    re.compile(r"\brg\."): "import regrad as rg", re.compile(r"\btf\."): "import regrad.v1 as tf",
}  # fmt: skip


class Texts(NamedTuple):
    """The texts that the functions of a module share."""

    shared: Mapping[str, str]  # for arguments, by name and annotation
    numbers: str  # for tensors
    error: str  # for values that cannot become a tensor


SHARED = {
    "axis: Axis": "The axis or axes; None for all.",
    "axis: int": "The axis; negative ones count from the end.",
    "keepdims: bool": "Whether the reduced axes stay, with size 1.",
    "dtype: DTypeLike | None": "The dtype of the result.",
    "device: Any": 'Where the result lies: "cpu" (NumPy data), or a device of JAX or PyTorch.',
}
NUMBERS = "A Tensor or array of numbers, or a number."
NO_TENSOR = "ArgumentError: an argument is not a Tensor, an array or a number."
TENSORS = Texts(SHARED, NUMBERS, NO_TENSOR)
NO_AXIS = "AxisError: there is no such axis."


def complete(doc: str, op: OpLike, annotations: Mapping[str, Any], *, boolean: bool = False) -> str:
    """Return the docstring of an op with the sections that follow from its declaration.

    With `boolean`, the results of an elementwise op are bools.
    """
    doc = inspect.cleandoc(doc)
    if op.elementwise:
        errors = _errors(op)
        results = "" if RESULT.search(f"\n{doc}") else _results(op, boolean)
        texts = TENSORS._replace(numbers=_numbers(op))
        doc = with_sections(doc, texts, annotations, results, errors)
    else:
        doc = with_sections(doc, TENSORS, annotations, "", _expected(annotations, TENSORS))
    head, rest = parted(doc)
    named = f"Op type: `{op.type}`."
    if rest.startswith("Source:"):
        parts = [head, f"{named} {rest}"]
    else:
        parts = [head, rest] if rest.startswith("Op type") else [head, named, rest]
    return indented(importing("\n\n".join(filter(None, parts))))


def ordered(annotations: Mapping[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """Return annotations in the order of a function's parameters, which may be another order."""
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return {name: annotations[name] for name in names if name in annotations}


def complete_public(function: F, texts: Texts = TENSORS) -> F:
    """Complete the docstring of a public function of tensors; return the function."""
    if function.__doc__ is None or "__signature__" in vars(function):  # (rows of v1 are complete)
        return function
    annotations = ordered(function.__annotations__, function)
    doc = inspect.cleandoc(function.__doc__)
    doc = with_sections(doc, texts, annotations, "", _expected(annotations, texts))
    function.__doc__ = indented(importing(doc))
    return function


def with_sections(
    doc: str, texts: Texts, annotations: Mapping[str, Any], results: str, errors: list[str]
) -> str:
    """Return a docstring with its missing arguments, results and errors."""
    head, rest = parted(doc)
    head = _with_arguments(head, texts, annotations)
    if results:
        head = f"{head}\n\n{results}"
    return f"{_with_errors(head, errors)}\n\n{rest}".strip()


def importing(doc: str) -> str:
    """Return a docstring whose example begins with the imports of regrad."""
    prose, mark, _ = f"\n{doc}".partition("\n>>> ")
    example = "".join(EXAMPLE.findall(doc, len(prose) - 1)) if mark else ""
    lines = [line for name, line in IMPORTS.items() if name.search(example)]
    if not lines or "import regrad" in example:
        return doc
    head = "".join(f">>> {line}\n" for line in lines)
    return f"{doc[: len(prose)]}{head}{doc[len(prose) :]}"


def parted(doc: str) -> tuple[str, str]:
    """Return a docstring in two parts: prose and sections; and op type, source and example."""
    found = END.search(f"\n{doc}")
    end = found.start() if found else len(doc)
    return doc[:end].strip(), doc[end:].strip()


def _with_arguments(head: str, texts: Texts, annotations: Mapping[str, Any]) -> str:
    section = ARGS.search(head)
    written = ENTRY.split("\n" + section[1].rstrip())[1:] if section else []
    told = [NAMES.findall(line.partition(":")[0]) for line in written]
    entries = {names[0]: line for names, line in zip(told, written, strict=True)}
    known = {name.lstrip("*") for names in told for name in names}
    names = [name for name in annotations if name not in ("xp", "return")]
    numbers = texts.numbers
    missing = {name: _shared(name, annotations[name], texts) for name in names}
    missing = {name: text for name, text in missing.items() if text and name not in known}
    tensors = [name for name, text in missing.items() if text == numbers]
    if len(tensors) > 1 and len(tensors) == len(missing) and not written:
        missing = {", ".join(tensors): numbers}
    lines = {name: f"{INDENT}{name}: {text}" for name, text in missing.items()}
    order = [*names, *missing, *entries]
    found = sorted((entries | lines).items(), key=lambda item: order.index(item[0]))
    if not found:
        return head
    text = "\n".join(["Args:", *[line for _, line in found]])
    if section:
        return f"{head[: section.start()]}\n{text}\n{head[section.end() :]}".strip()
    result = RESULT.search(head)
    place = result.start() if result else len(head)
    return f"{head[:place].strip()}\n\n{text}\n\n{head[place:].strip()}".strip()


def _shared(name: str, annotation: Any, texts: Texts) -> str:
    """Return the text of an argument that many functions have; empty for other arguments."""
    text = texts.shared.get(f"{name}: {annotation}", "")
    return text or (texts.numbers if annotation in ("TensorLike", "Tensor") else "")


def _with_errors(head: str, errors: list[str]) -> str:
    if not errors or RAISES.search(head):
        return head
    if "\nRaises:\n" not in head:
        return f"{head}\n\n{section('Raises', *errors)}"
    said = head.partition("\nRaises:\n")[2]
    more = [INDENT + line for line in errors if line.rstrip(".") not in said]  # or a longer line
    return "\n".join([head, *more])


def _expected(annotations: Mapping[str, Any], texts: Texts) -> list[str]:
    """Return the errors for arguments that a function of Tensors cannot take."""
    tensors = {"TensorLike", "Tensor", "TensorLike | None"} & set(map(str, annotations.values()))
    axis = {"axis: Axis", "axis: int", "axis: int | None"}
    has_axis = f"axis: {annotations.get('axis')}" in axis
    return [texts.error] * bool(tensors) + [NO_AXIS] * has_axis


def _numbers(op: OpLike) -> str:
    numbers = "real numbers" if op.real else "real or complex numbers"
    text = f"A Tensor or array of {numbers}, or a number."
    return text + " Shapes broadcast." * (len(op.inputs) > 1)


def _results(op: OpLike, boolean: bool) -> str:
    name, *others = [i.name for i in op.inputs]
    shape = "the shape to which the arguments broadcast" if others else f"{name}'s shape"
    dtype = "of the dtype to which they promote" if others else "dtype"
    if boolean:
        return section("Returns", f"A Tensor of bools, of {shape}.")
    text = f"A Tensor of {shape}{', ' if others else ' and '}{dtype}."
    if op.to_float:
        return section("Returns", text, "Integers and bools become the default dtype.")
    return section("Returns", text)


def _errors(op: OpLike) -> list[str]:
    real = ["DTypeError: an argument is complex."] * op.real
    shapes = ["ShapeError: the shapes do not broadcast."] * (len(op.inputs) > 1)
    return [NO_TENSOR, *real, *shapes]


def section(title: str, *lines: str) -> str:
    """Return a section of a docstring."""
    return "\n".join([f"{title}:", *[INDENT + line for line in lines]])


def indented(text: str) -> str:
    """Return a docstring as in the source of a function."""
    return text.replace("\n", f"\n{INDENT}").replace(f"\n{INDENT}\n", "\n\n")
