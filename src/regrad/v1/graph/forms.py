"""The form that most of TensorFlow's functions have: one of regrad's, in a scope of the op's name.

Numbers and arrays among the arguments become constants in that scope (`add/y`). Where all
tensors are regrad's eager ones, its function is called as it is: so what is written with `tf.`
functions, a rule for example, works in eager mode too.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np

import regrad as rg
from regrad.core import numbers
from regrad.core.dims import UnknownRank
from regrad.core.registry import Op
from regrad.core.tensor import TensorLike
from regrad.errors import ArgumentError, DTypeError
from regrad.graph.graph import is_symbolic
from regrad.graph.size_ops import SHAPE
from regrad.v1 import dtypes
from regrad.v1.graph.graphs import current_graph
from regrad.v1.graph.row_docs import Row, complete
from regrad.v1.graph.tensors import (
    Tensor,
    build,
    convert_to_tensor,
    face,
    is_tensor,
    rg_read,
    same_dtype,
    sizes,
    static_value,
)

# Kinds of dtypes (as NumPy has them) that an op takes, as TensorFlow registers them.
ANY, BOOLS, INTEGERS, FLOATS, COMPLEX = "", "b", "iu", "f", "c"
REALS, INEXACT, NUMBERS = "iuf", "fc", "iufc"
SPELT = {
    "b": "bools", "iu": "integers", "f": "real floats", "c": "complex numbers",
    "iuf": "real numbers", "fc": "floats",
}  # fmt: skip


def is_eager(*values: TensorLike) -> bool:
    """Return whether there are tensors among the values, all of them regrad's eager ones."""
    known = [v for v in values if is_tensor(v)]
    return bool(known) and all(isinstance(v, rg.Tensor) and not is_symbolic(v) for v in known)


def scope(name: str, *values: TensorLike) -> Any:
    """A name scope for an op of these values; `as` binds the name that the op itself shall have."""
    return nullcontext(name) if is_eager(*values) else current_graph().name_scope(name)


def tensor(
    value: TensorLike, dtype: dtypes.DTypeLike | None = None, name: str | None = None,
    like: TensorLike = None,
) -> Any:  # fmt: skip
    """Return a value as a tensor; an eager Tensor of regrad comes back as it is.

    Other values become eager Tensors too if `like` is an eager Tensor.
    """
    if is_eager(value) or not is_eager(value, like):
        return value if is_eager(value) else convert_to_tensor(value, dtype, name)
    array = np.asarray(value)
    return rg.asarray(array if dtype is None else numbers.under(array, dtypes.to_numpy(dtype)))


def dtype_of(x: TensorLike) -> np.dtype:
    """NumPy's dtype of a tensor of either kind."""
    return rg_read(x).dtype


def shape_of(x: TensorLike) -> Any:
    """The shape of a tensor of either kind: ints and Dims, or an UnknownRank."""
    return rg_read(x)._data.shape


def rank_of(x: TensorLike) -> int | None:
    """The rank of a tensor, if it is known."""
    shape = shape_of(x)
    return None if isinstance(shape, UnknownRank) else len(shape)


def check_kinds(op_type: str, kinds: str, *xs: TensorLike) -> None:
    """Refuse tensors of dtypes that TensorFlow's op does not take."""
    for x in xs:
        dtype = dtype_of(x)
        if kinds and dtype.kind not in kinds:
            raise DTypeError(
                f"{op_type} takes {SPELT.get(kinds, 'numbers')}, got {dtypes.of(dtype).name}: {x}. "
                "Use tf.cast."
            )


def one_op(
    op_type: str | None,
    name: str,
    function: Callable[..., Any],
    *values: TensorLike,
    kinds: str = ANY,
    same: bool = True,
    **attrs: Any,
) -> Any:
    """Call one of regrad's functions on values as tensors; the op of this type gets the name.

    With `same` they are brought to one dtype, strictly. For compositions, where no op is the
    function's own, `op_type` is None, and the name is just that of the scope.
    """
    if len(values) == 1 and type(values[0]) is Tensor and not attrs:
        short = _short(op_type, name, function, values[0], kinds)
        if short is not None:
            return short
    if is_eager(*values):
        return function(*values, **attrs)
    with current_graph().name_scope(name) as whole:
        said, xs = op_type or name, values
        if not same:
            xs = [v if v is None else tensor(v) for v in values]
        elif not _agree(values):
            xs = same_dtype(said, *values)
        check_kinds(said, kinds, *xs)
        return build(op_type or "", whole if op_type else None, function, *xs, **attrs)


def _short(
    op_type: str | None, name: str, function: Callable[..., Any], x: Tensor, kinds: str
) -> Any:
    """The same for one tensor of the current graph and a default name, without the detours."""
    symbol = x._symbol
    graph = symbol.node.graph
    if (
        name != op_type
        or graph is not current_graph()
        or (kinds and symbol.dtype.kind not in kinds)
        or symbol.node.op.type == "VariableV2"
    ):
        return None
    return face(function(x._tensor))


def _agree(values: Any) -> bool:
    """Return whether the values are tensors of the graph already, and of one dtype."""
    if any(type(v) is not Tensor for v in values):
        return False
    first = values[0]._symbol.dtype
    return all(v._symbol.dtype == first for v in values)


def axes_of(axis: TensorLike, what: str = "axis") -> Any:
    """An axis, or a tuple of them, from what TensorFlow takes; None stays None."""
    return static_value(list(axis) if isinstance(axis, range) else axis, what)


def as_sizes(value: TensorLike) -> Any:
    """Sizes, from numbers and tensors, as an attribute: what only the run can tell is a Dim."""
    if is_eager(value):
        value = value.tolist()
    if isinstance(value, UnknownRank):
        return value
    if isinstance(value, list | tuple):
        return tuple([as_sizes(v) for v in value])
    if is_tensor(value):
        symbol = rg_read(tensor(value))._data
        if symbol.content is None and symbol.node.op is SHAPE:
            return symbol.node.xs[0]._data.shape  # of a tensor of unknown rank
    return sizes(value)


def renamed(new_name: str, new: Any, old_name: str, old: Any) -> Any:
    """The value of an argument that has an old name too; ValueError if both are given."""
    if new is not None and old is not None:
        raise BothNamesError(f"Cannot specify both {new_name!r} and {old_name!r}: they are one.")
    return old if new is None else new


class BothNamesError(ArgumentError, ValueError):
    """An argument given twice, under its old and its new name."""


# -- rows of TensorFlow's index of functions -------------------------------------------------------

MISSING = inspect.Parameter.empty
TENSOR = object()  # the role of a parameter that is a tensor though it has a default
Role = Callable[[Any], Any] | str | object | None


def plain_value(value: Any) -> Any:
    """The role of an attribute that is passed on as it is, though it has no default."""
    return value


# What parameters of these names are in all of TensorFlow, deprecated ones among them.
USUAL_ROLES: dict[str, Any] = {
    "value": TENSOR, "filter": TENSOR, "axis": axes_of, "keepdims": bool, "shape": as_sizes,
    "block_shape": as_sizes, "paddings": as_sizes, "crops": as_sizes, "num_segments": as_sizes,
    "strides": plain_value, "padding": plain_value, "use_cudnn_on_gpu": None,
    "reduction_indices": "axis", "dimension": "axis", "dim": "axis", "squeeze_dims": "axis",
    "keep_dims": "keepdims",
}  # fmt: skip


def define(
    declaration: str,
    op_type: str | None,
    function: Callable[..., Any] | Op,
    kinds: str = ANY,
    *shows: str,
    doc: str = "",
    scope: str = "",
    same: bool = True,
    call: Callable[..., Any] = one_op,
    **roles: Role,
) -> Callable[..., Any]:
    """Make one of TensorFlow's functions from its declaration: what `one_op` does, as a row.

        argmin = define(
            "tf.argmin(input, axis=None, name=None, dimension=None)",
            "ArgMin", rg.argmin, REALS, "[3, 9, 1]", "2",
        )

    Args:
        declaration: The call as TensorFlow's index has it. Parameters without a default are the
            tensors, in order; those with one are attributes, passed on by keyword. `name=None`
            is the last unless it is written elsewhere.
        op_type, function, kinds, same: See `one_op`.
        shows: An example: arrays and keywords that are passed, and the eager result, as its
            elements or as its repr.
        doc: The docstring; by default the first line of the function's. `complete` adds to it.
        scope: The default name: otherwise the declared one, the op type or the function's name.
        call: What takes the place of `one_op`.
        roles: What a parameter is otherwise: a function that makes the attribute of what is
            passed, the name of the parameter of which it is the old name, `TENSOR`, or None for
            one without effect. `USUAL_ROLES` need not be written.
    """
    path, signature = _parse(declaration)
    name, parameters = path.rpartition(".")[2], list(signature.parameters.values())
    places = {p.name: i for i, p in enumerate(parameters)}
    blank = [p.default for p in parameters]
    required, total, last = sum(value is MISSING for value in blank), len(places), places["name"]
    default = scope or blank[last] or op_type or name
    ordinary = {n: TENSOR if i < required else plain_value for n, i in places.items() if i != last}
    roles = {n: roles.get(n, USUAL_ROLES.get(n, role)) for n, role in ordinary.items()}
    tensors = [places[n] for n, role in roles.items() if role is TENSOR]
    older = [(n, role) for n, role in roles.items() if isinstance(role, str)]
    attrs = [(n, places[n], role) for n, role in roles.items() if callable(role)]
    fixed = {**({"kinds": kinds} if kinds else {}), **({} if same else {"same": False})}

    def attributes(values: list[Any]) -> dict[str, Any]:
        for old, new in older:
            if (value := values[places[old]]) is not None:
                values[places[new]] = renamed(new, values[places[new]], old, value)
        made = fixed.copy()
        for n, i, role in attrs:
            made[n] = role(values[i])
        return made

    usual = attributes(blank.copy()) if tensors == list(range(required)) else None

    def call_row(*args: Any, **options: Any) -> Any:
        count = len(args)
        if usual is not None and count == required:
            if not options:
                return call(op_type, default, function, *args, **usual)
            if len(options) == 1 and "name" in options:
                return call(op_type, options["name"] or default, function, *args, **usual)
        values = [*args, *blank[count:]]
        for n, value in options.items():
            if places.get(n, -1) < count:  # unknown, or passed by position as well
                signature.bind(*args, **options)  # raises the TypeError
            values[places[n]] = value
        if len(values) > total or (count < required and _lacks_any(values[count:required])):
            signature.bind(*args, **options)
        made = attributes(values)  # and the tensors that have old names
        xs = [values[i] for i in tensors]
        return call(op_type, values[last] or default, function, *xs, **made)

    given, idle = [parameters[i].name for i in tensors], {n for n in roles if roles[n] is None}
    settings = kinds, same, call is one_op, shows
    row = Row(path, op_type, default, list(places), given, dict(older), idle, *settings)
    shown = complete(doc or (function.__doc__ or "").partition("\n")[0], row)
    return _dress(call_row, name, signature, shown, sys._getframe(1).f_globals["__name__"])


def _lacks_any(values: list[Any]) -> bool:
    return any(value is MISSING for value in values)  # (`in` would compare tensors)


def _dress(
    function: Any, name: str, signature: inspect.Signature, doc: str, module: str
) -> Callable[..., Any]:
    """Show a function under a name, as one of a module, with a signature and a docstring."""
    function.__name__ = function.__qualname__ = name
    function.__signature__, function.__doc__, function.__module__ = signature, doc, module
    return function


def _parse(declaration: str) -> tuple[str, inspect.Signature]:
    """Read `tf.f(x, axis=None, dtype=tf.int64)`."""
    path, _, listed = declaration.removesuffix(")").partition("(")
    listed = listed if "name=" in listed else f"{listed}, name=None"
    expression = ast.parse(f"lambda {listed}: 0", mode="eval").body
    assert isinstance(expression, ast.Lambda)
    arguments = expression.args
    empty = [MISSING] * (len(arguments.args) - len(arguments.defaults))
    defaults = [
        getattr(dtypes, node.attr) if isinstance(node, ast.Attribute) else ast.literal_eval(node)
        for node in arguments.defaults
    ]
    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        inspect.Parameter(argument.arg, either, default=default)
        for argument, default in zip(arguments.args, empty + defaults, strict=True)
    ]
    return path, inspect.Signature(parameters)
