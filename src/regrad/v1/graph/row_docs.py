"""Docstrings of rows, with the sections that are the same for many functions.

The docstring of a row describes the computation and any special arguments. `complete` adds the
arguments that mean the same everywhere, the result of elementwise ops, the errors and the source.
A section in the row's docstring takes precedence. In the section `Args:`, each argument that the
docstring describes takes precedence.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from regrad.core.docstrings import Texts, importing
from regrad.core.registry import OPS

INDENT = " " * 4
SECTION = re.compile(r"^(Args|Returns|Raises):\n((?: {4}.*(?:\n|$))+)", re.M)
HOLDS = {
    "b": "bools", "iu": "integers", "f": "real floats", "iuf": "real numbers",
    "fc": "real or complex floats", "iufc": "real or complex numbers",
}  # fmt: skip


class Names(dict[str, str]):
    """Texts by name, or by a suffix of names such as `_initializer`."""

    def get(self, key: str, default: str = "") -> str:  # pyright: ignore
        name = key.partition(":")[0]  # without the annotation
        return super().get(name) or super().get(f"_{name.rpartition('_')[2]}", default)


# Descriptions of arguments by name, for functions that do not describe the argument themselves.
TEXTS = Names({
    "axis": "The axis. It must be known when the graph is built.",
    "keepdims": "Keep the reduced axes, with size 1.",
    "dtype": "The dtype of the result.",
    "output_type": "The dtype of the result.",
    "output_dtype": "The dtype of the result.",
    "exclusive": "Leave out the element itself. The first result is 0 for sums, 1 for products.",
    "reverse": "Start at the end of the axis.",
    "direction": '"ASCENDING" or "DESCENDING".',
    "adjoint": "Use the adjoints of the matrices.",
    "full_matrices": "Complete the orthonormal columns to square matrices.",
    "lower": "Read the lower triangle, otherwise the upper one.",
    "seed": "The seed of the op; see `set_random_seed`.",
    "shape": "The sizes: numbers, or a tensor of integers.",
    "num_segments": "The number of segments, the first size of the result.",
    "data_format": 'The order of axes: channels last ("NHWC", …) or first ("NCHW", …).',
    "ksize": "The window sizes: a number, or one for each axis, with 1 for batch and channels.",
    "strides": "The steps: a number, or one for each axis, with 1 for batch and channels.",
    "stride": "The step, a number.",
    "dilations": "The distances between elements of the filter, in the form of `strides`.",
    "rate": "The distance between elements of the filter, a number.",
    "padding": '"SAME", "VALID", or a pair (before, after) for each axis.',
    "output_shape": "The shape of the result: a tensor, or a list of numbers and tensors.",
    "fft_length": "The sizes to transform, by default the whole axes.",
    "axes": "The axes, or None for all.",
    "epsilon": "A small number that prevents a division by zero.",
    "size": "The new height and width.",
    "align_corners": "Align the centers of the corner pixels of both images.",
    "half_pixel_centers": "Treat pixels as squares with their centers at 1/2.",
    "k": "How many.",
    "name": "The name of the op in the graph.",
    "weights": "A weight for each loss: a number, or a tensor of the rank of the losses.",
    "loss_collection": "The collection to add the result to, or None.",
    "reduction": "How losses are reduced; see `tf.losses.Reduction`.",
    "scope": "The name scope.",
    "label_smoothing": "How far to move labels towards equal probabilities, 0 to 1.",
    "activation": "A function to apply to the result, or its name in `tf.nn`.",
    "use_bias": "Whether the layer adds a bias.",
    "activation_fn": "A function of the result, or None.",
    "normalizer_fn": "A function such as `batch_norm`, or None.",
    "normalizer_params": "Keyword arguments of the normalizer, a dict.",
    "weights_initializer": "The initial weights, by default Glorot's.",
    "biases_initializer": "The initial biases, or None for a layer without biases.",
    "variables_collections": "Further collections of the variables, a list or a dict.",
    "outputs_collections": "A collection to which the result is added.",
    "_initializer": "The initial values; see `tf.get_variable`.",
    "_regularizer": "A function of the variable. Its result is added to REGULARIZATION_LOSSES.",
    "_constraint": "A function of the variable that optimizers apply after an update.",
    "trainable": "Whether optimizers change the variables.",
    "reuse": "Whether to use the variables of an earlier call.",
    "learning_rate": "The initial rate: a float, or a tensor of floats.",
    "global_step": "The number of completed steps: a number, tensor or Variable.",
    "staircase": "Round `global_step / decay_steps` down, so that the rate changes in steps.",
})  # fmt: skip
# The same for functions without a row (see `core.docstrings`). Their docstrings describe the
# tensors.
WRITTEN_OUT = Texts(TEXTS, "", "DTypeError: an argument cannot become a tensor.")
# Elementwise op types whose results are bools.
TESTS = {
    "Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual", "IsNan", "IsInf",
    "IsFinite", "LogicalNot", "LogicalAnd", "LogicalOr", "LogicalXor",
}  # fmt: skip


class RowParts(NamedTuple):
    """The parts of a row from which its docstring is made."""

    path: str  # such as "tf.math.sqrt"
    op_type: str | None
    default: str  # the name of its op
    parameters: list[str]
    tensors: list[str]
    renamed: dict[str, str]  # old name → new name
    idle: set[str]  # parameters without effect
    kinds: str
    one_dtype: bool  # whether the tensors are converted to one dtype
    plain: bool  # whether the op's result is the function's result, without casts
    shows: tuple[str, ...] = ()  # the arrays and keywords of the example, and its result


def fill_in(made: Any, name: str, **shown: Any) -> Any:
    """Name a generated function or class, complete its docstring, and return it."""
    made.__name__ = made.__qualname__ = name
    made.__doc__ = inspect.cleandoc(made.__doc__ or "").format(name=name, **shown)
    return made


def borrow(function: Callable[..., Any], path: str, names: Sequence[str]) -> str:
    """Return the first line and the example of regrad's function, for a row with other names."""
    first, _, rest = inspect.cleandoc(function.__doc__ or "").partition("\n")
    for own, name in zip(inspect.signature(function).parameters, names, strict=True):
        first = re.sub(rf"\b{own}\b", name, first)
    given, result = re.findall(r">>> rg\.[\w.]+\((.*)\)\n(Tensor.*)", rest)[0]
    given = re.sub(r"(?<!asarray\()\[.*?\]", r"rg.asarray(\g<0>)", given)
    return f"{first}\n\n>>> {path}({given})\n{result}"


def complete(doc: str, row: RowParts) -> str:
    """Return the docstring of a row with all its sections."""
    doc = inspect.cleandoc(doc)
    prose, mark, example = (doc + _example(row)).partition("\n>>> ")
    sections = {title: text.rstrip("\n") for title, text in SECTION.findall(prose)}
    prose, _, more = re.sub(r"\n{3,}", "\n\n", SECTION.sub("", prose)).partition("\n\nSource: ")
    sections["Args"] = _arguments(row, sections.get("Args", ""))
    sections.setdefault("Returns", _results(row))
    sections.setdefault("Raises", _errors(row))
    kind = f"Op type: `{row.op_type}`." if row.op_type else "A composition."
    titles = [t for t in ("Args", "Returns", "Raises") if sections[t]]
    source = f"{kind} Source: `{row.path}`" + (f";\n{more.strip()}" if more else ".")
    parts = [prose.strip(), *(f"{t}:\n{sections[t]}" for t in titles), source]
    text = importing("\n\n".join([*parts, mark.strip("\n") + example] if mark else parts))
    return text.replace("\n", f"\n{INDENT}").replace(f"\n{INDENT}\n", "\n\n")


def _arguments(row: RowParts, own: str) -> str:
    """Return the section of arguments, in the order of the call."""
    said = dict(re.findall(r"^ {4}(\w+): ((?:.*\n?)(?: {5,}.*\n?)*)", own, re.M))
    together = len(row.tensors) > 1 and row.one_dtype and not said.keys() & set(row.tensors)
    lines = []
    for name in row.parameters:
        if name in said:
            lines.append(f"{name}: {said[name].rstrip()}")
        elif name == "name":
            lines.append(f"name: The name of the op in the graph, by default {row.default!r}.")
        elif name in row.tensors and name in TEXTS:
            lines.append(f"{name}: {TEXTS[name]}")
        elif name in row.tensors and not together:
            lines.append(f"{name}: A tensor or array{_holding(row)}, or a {_single(row)}.")
        elif name in row.tensors:
            if name == row.tensors[0]:
                text = f"Tensors or arrays{_holding(row)}, or {_single(row)}s, of one dtype."
                lines.append(f"{', '.join(row.tensors)}: {text}{_broadcasting(row)}")
        elif name in row.renamed:
            lines.append(f"{name}: The old name of `{row.renamed[name]}`.")
        elif name in row.idle:
            lines.append(f"{name}: Without effect.")
        elif text := TEXTS.get(name):
            lines.append(f"{name}: {text}")
    return "\n".join(INDENT + line for line in lines)


def _holding(row: RowParts) -> str:
    held = HOLDS.get(row.kinds)
    return f" of {held}" if held else ""


def _single(row: RowParts) -> str:
    return "bool" if row.kinds == "b" else "number"


def _example(row: RowParts) -> str:
    """Return the example of a row in eager mode."""
    if not row.shows:
        return ""
    *given, result = row.shows
    keyword = re.compile(r"\w+=")
    passed = ", ".join(g if keyword.match(g) else f"rg.asarray({g})" for g in given)
    imports = ">>> import regrad as rg\n>>> import regrad.v1 as tf"
    result = result if "Tensor" in result else f"Tensor({result}, dtype={_dtype_shown(result)})"
    return f"\n\n{imports}\n>>> {row.path}({passed})\n{result}"


def _dtype_shown(elements: str) -> str:
    """Return the dtype of a result, judged by its printed elements."""
    marks = {"e": "bool", "j": "complex64", ".": "float32"}  # of False and True, …
    return next((dtype for mark, dtype in marks.items() if mark in elements), "int64")


def _elementwise(row: RowParts) -> bool:
    op = OPS.get(row.op_type)
    return row.plain and op is not None and op.elementwise


def _broadcasting(row: RowParts) -> str:
    return " Shapes broadcast." if _elementwise(row) else ""


def _results(row: RowParts) -> str:
    """Return the section Returns of an elementwise op. Other rows must write it themselves."""
    if not _elementwise(row):
        return ""
    one = len(row.tensors) == 1
    shape = f"{row.tensors[0]}'s shape" if one else "the shape to which the arguments broadcast"
    if row.op_type in TESTS:
        text = f"A tensor of bools, of {shape};"
    else:
        text = f"A tensor of {shape} and {'' if one else 'their '}dtype;"
    return f"{INDENT}{text}\n{INDENT}an eager Tensor if the tensors are eager."


def _errors(row: RowParts) -> str:
    if not row.tensors:
        return ""
    several = len(row.tensors) > 1
    held = HOLDS.get(row.kinds)
    first = "an argument" if several else f"`{row.tensors[0]}`"
    text = f"{first} does not hold {held}" if held else f"{first} cannot become a tensor"
    differ = ", or the dtypes differ" if several and row.one_dtype else ""
    lines = [f"DTypeError: when a graph is built, {text}{differ}."]
    if several and _elementwise(row):
        lines.append("ShapeError: the shapes do not broadcast.")
    return "\n".join(INDENT + line for line in lines)
