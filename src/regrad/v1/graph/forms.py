"""Calls of regrad functions in a name scope of the op's name, the form of most `tf` functions.

Numbers and arrays among the arguments become constants in that scope (`add/y`). If all tensors are
eager Tensors, the regrad function is called directly. So code that is written with `tf` functions,
such as a rule, works in eager mode too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np

import regrad as rg
from regrad.core import numbers
from regrad.core.dims import UnknownRank
from regrad.core.tensor import TensorLike
from regrad.errors import ArgumentError
from regrad.v1 import dtypes
from regrad.v1.graph.conversion import (
    build,
    convert_to_tensor,
    is_eager,
    same_dtype,
    static_value,
)
from regrad.v1.graph.graphs import current_graph
from regrad.v1.graph.kinds import ANY, check_kinds
from regrad.v1.graph.tensors import Tensor, face, rg_read


def scope(name: str, *values: TensorLike) -> Any:
    """Return a name scope for an op of these values. `as` binds the name for the op itself."""
    return nullcontext(name) if is_eager(*values) else current_graph().name_scope(name)


def tensor(
    value: TensorLike, dtype: dtypes.DTypeLike | None = None, name: str | None = None,
    like: TensorLike = None,
) -> Any:  # fmt: skip
    """Return a value as a tensor. An eager Tensor is returned unchanged.

    Other values become eager Tensors too if `like` is an eager Tensor.
    """
    if is_eager(value) or not is_eager(value, like):
        return value if is_eager(value) else convert_to_tensor(value, dtype, name)
    if dtype is not None:
        value = numbers.under(np.asarray(value), dtypes.to_numpy(dtype))
    return rg.asarray(value)


def dtype_of(x: TensorLike) -> np.dtype:
    """Return the NumPy dtype of a tensor, eager or not."""
    return rg_read(x).dtype


def shape_of(x: TensorLike) -> Any:
    """Return the shape of a tensor, eager or not: ints and Dims, or an UnknownRank."""
    return rg_read(x)._data.shape


def rank_of(x: TensorLike) -> int | None:
    """Return the rank of a tensor, or None if it is unknown."""
    shape = shape_of(x)
    return None if isinstance(shape, UnknownRank) else len(shape)


def one_op(
    op_type: str | None, name: str | None, function: Callable[..., Any], *values: TensorLike,
    kinds: str = ANY, same: bool = True, **attrs: Any,
) -> Any:  # fmt: skip
    """Call a regrad function on values as tensors, and name the op of type `op_type` it makes.

    With `same`, all values get one dtype, and tensors of different dtypes raise. The default name
    is the op type. For a composition `op_type` is None, and the name is only the name of the scope.
    """
    name = name or op_type
    if len(values) == 1 and type(values[0]) is Tensor and not attrs:
        short = _short(op_type, name, function, values[0], kinds)
        if short is not None:
            return short
    if is_eager(*values):
        if same and op_type is None:  # (a composition may read dtypes and shapes of its inputs)
            values = tuple(
                [rg.asarray(v) if isinstance(v, list | tuple | np.ndarray) else v for v in values]
            )
        return function(*values, **attrs)
    with current_graph().name_scope(name) as whole:
        said, xs = str(op_type or name), values
        if not same:
            xs = [v if v is None else tensor(v) for v in values]
        elif not _agree(values):
            xs = same_dtype(said, *values)
        check_kinds(said, kinds, *xs)
        return build(op_type or "", whole if op_type else None, function, *xs, **attrs)


def _short(
    op_type: str | None, name: str | None, function: Callable[..., Any], x: Tensor, kinds: str
) -> Any:
    """Do the work of `one_op` for one tensor of the graph and the default name, else nothing."""
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
    """Return whether the values are already tensors of the graph, of one dtype."""
    if any(type(v) is not Tensor for v in values):
        return False
    first = values[0]._symbol.dtype
    return all(v._symbol.dtype == first for v in values)


def axes_of(axis: TensorLike, what: str = "axis") -> Any:
    """Return an axis or a tuple of axes in any of TensorFlow's forms. None stays None."""
    return static_value(list(axis) if isinstance(axis, range) else axis, what)


def renamed(new_name: str, new: Any, old_name: str, old: Any) -> Any:
    """Return the value of an argument with two names. Raises ValueError if both are passed."""
    if new is not None and old is not None:
        raise BothNamesError(f"Cannot specify both {new_name!r} and {old_name!r}: they are one.")
    return old if new is None else new


class BothNamesError(ArgumentError, ValueError):
    """An argument was passed twice, under its old and its new name."""
