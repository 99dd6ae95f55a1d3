"""Docstrings of rows, with the sections that are the same for many functions.

The docstring of a row describes the computation and any special arguments. `complete` adds the
arguments that mean the same everywhere, the result of elementwise ops, the errors and the source.
A section in the row's docstring takes precedence. In the section `Args:`, each argument that the
docstring describes takes precedence.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from regrad.core.docstrings import Texts, importing, indented, parted, section, with_sections
from regrad.core.registry import OPS
from regrad.v1.graph.kinds import SPELT


class Names(dict[str, str]):
    """Texts by name, or by a suffix of names such as `_initializer`."""

    def get(self, key: str, default: str = "") -> str:  # pyright: ignore
        name = key.partition(":")[0]  # without the annotation
        return super().get(name) or super().get(f"_{name.rpartition('_')[2]}", default)


# Descriptions of arguments by name, for functions that do not describe the argument themselves.
TEXTS = Names({
    "axis": "The axis. It must be known when the graph is built.",
    "keepdims": "Keep the reduced axes, with size 1.",
    **dict.fromkeys(("dtype", "output_type"), "The dtype of the result."),
    "exclusive": "Leave out the element itself. The first result is 0 for sums, 1 for products.",
    "reverse": "Start at the end of the axis.",
    "direction": '"ASCENDING" or "DESCENDING".',
    "adjoint": "Use the adjoints of the matrices.",
    "seed": "The seed of the op; see `set_random_seed`.",
    "shape": "The sizes: numbers, or a tensor of integers.",
    "num_segments": "The number of segments, the first size of the result.",
    "data_format": 'The order of axes: channels last ("NHWC", …) or first ("NCHW", …).',
    "ksize": "The window sizes: a number, or one for each axis, with 1 for batch and channels.",
    "strides": "The steps: a number, or one for each axis, with 1 for batch and channels.",
    "dilations": "The distances between elements of the filter, in the form of `strides`.",
    "padding": '"SAME", "VALID", or a pair (before, after) for each axis.',
    "output_shape": "The shape of the result: a tensor, or a list of numbers and tensors.",
    "fft_length": "The sizes to transform, by default the whole axes.",
    "axes": "The axes, or None for all.",
    "epsilon": "A small number that prevents a division by zero.",
    "name": "The name of the op in the graph.",
    "weights": "A weight for each loss: a number, or a tensor of the rank of the losses.",
    "loss_collection": "The collection to add the result to, or None.",
    "reduction": "How losses are reduced; see `tf.losses.Reduction`.",
    "scope": "The name scope.",
    "label_smoothing": "How far to move labels towards equal probabilities, 0 to 1.",
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
    if sys.flags.optimize > 1:  # Python has removed the docstrings
        return ""
    first, _, rest = inspect.cleandoc(function.__doc__ or "").partition("\n")
    for own, name in zip(inspect.signature(function).parameters, names, strict=True):
        first = re.sub(rf"\b{own}\b", name, first)
    given, result = re.findall(r">>> rg\.[\w.]+\((.*)\)\n(Tensor.*)", rest)[0]
    given = re.sub(r"(?<!asarray\()\[.*?\]", r"rg.asarray(\g<0>)", given)
    return f"{first}\n\n>>> {path}({given})\n{result}"


def complete(doc: str, row: RowParts, shared: str = "") -> str:
    """Return the docstring of a row with all its sections.

    `shared` is another docstring with descriptions of arguments.
    """
    doc = inspect.cleandoc(doc) + _example(row)
    results = "" if "\nReturns:\n" in doc else _results(row)
    errors = [] if "\nRaises:\n" in doc else _errors(row)
    texts, names = Texts(_texts(row, shared), "", ""), dict.fromkeys(row.parameters, "")
    head, rest = parted(with_sections(doc, texts, names, results, errors))
    more, mark, example = f"{rest}\n".partition(">>> ")
    more = more.removeprefix("Source: ").strip()
    kind = f"Op type: `{row.op_type}`." if row.op_type else "A composition."
    source = f"{kind} Source: `{row.path}`" + (f";\n{more}" if more else ".")
    return indented(importing("\n\n".join([head, source, mark + example]).rstrip()))


def _texts(row: RowParts, shared: str) -> Names:
    """Return the descriptions of arguments that the row itself need not describe."""
    held = f" of {SPELT[row.kinds]}" if row.kinds else ""
    tensor = f"A tensor or array{held}, or a {'bool' if row.kinds == 'b' else 'number'}."
    return Names({
        **TEXTS,
        **dict.fromkeys(row.idle, "Without effect."),
        **{old: f"The old name of `{new}`." for old, new in row.renamed.items()},
        **{name: TEXTS.get(name, tensor) for name in row.tensors},
        "name": f"The name of the op in the graph, by default {row.default!r}.",
        **dict(re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", inspect.cleandoc(shared), re.M)),
    })  # fmt: skip


def _example(row: RowParts) -> str:
    """Return the example of a row in eager mode. The printed elements show the dtype."""
    if not row.shows:
        return ""
    *given, result = row.shows
    keyword = re.compile(r"\w+=")
    passed = ", ".join(g if keyword.match(g) else f"rg.asarray({g})" for g in given)
    imports = ">>> import regrad as rg\n>>> import regrad.v1 as tf"
    marks = {"e": "bool", "j": "complex64", ".": "float32", "": "int64"}  # "e" of False and True
    dtype = next(dtype for mark, dtype in marks.items() if mark in result)
    result = result if "Tensor" in result else f"Tensor({result}, dtype={dtype})"
    return f"\n\n{imports}\n>>> {row.path}({passed})\n{result}"


def _elementwise(row: RowParts) -> bool:
    op = OPS.get(row.op_type)
    return row.plain and op is not None and op.elementwise


def _results(row: RowParts) -> str:
    """Return the section Returns of an elementwise op. Other rows must write it themselves."""
    if not _elementwise(row):
        return ""
    one = len(row.tensors) == 1
    shape = f"{row.tensors[0]}'s shape" if one else "the shape to which the arguments broadcast"
    dtype = "dtype" if one else "their dtype"
    bools = "A Tensor of bools" in (OPS[str(row.op_type)].function.__doc__ or "")
    held = f"bools, of {shape}" if bools else f"{shape} and {dtype}"
    return section("Returns", f"A tensor of {held};", "an eager Tensor if the tensors are eager.")


def _errors(row: RowParts) -> list[str]:
    if not row.tensors:
        return []
    several = len(row.tensors) > 1
    first = "an argument" if several else f"`{row.tensors[0]}`"
    fault = f"does not hold {SPELT[row.kinds]}" if row.kinds else "cannot become a tensor"
    differ = ", or the dtypes differ" if several and row.one_dtype else ""
    shapes = ["ShapeError: the shapes do not broadcast."] * (several and _elementwise(row))
    return [f"DTypeError: when a graph is built, {first} {fault}{differ}.", *shapes]
