"""Checks and conversions of arguments for `tf.nn`, `tf.layers` and `tf.losses`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np

from regrad.core import dims
from regrad.core.registry import Op
from regrad.core.tensor import Tensor, TensorLike
from regrad.errors import IndexRangeError, ShapeError
from regrad.graph.graph import CONST, defer, graph_op, is_symbolic
from regrad.shapes.infer import Spec
from regrad.shapes.sizes import merge
from regrad.v1.graph.conversion import convert_to_tensor, same_dtype
from regrad.v1.graph.kinds import INEXACT, check_kinds
from regrad.v1.graph.tensors import is_tensor


def floats(what: str, *values: TensorLike) -> list[Any]:
    """Return values as tensors of one dtype, which must be a float dtype."""
    tensors = same_dtype(what, *values)
    check_kinds(what, INEXACT, tensors[0])
    return tensors


def constant_value(value: TensorLike) -> Any:
    """Return a Python number or the value of a constant; None if it is known only in the run."""
    if not is_tensor(value):
        return value
    node = convert_to_tensor(value)._symbol.node
    return node.attrs["value"].item() if node.op is CONST and not node.attrs["value"].ndim else None


# -- shapes that must agree ------------------------------------------------------------------------


def _check_shape(xp: Any, x: Any, shape: tuple[int, ...]) -> Any:
    if tuple(x.shape) != tuple(shape):
        raise ShapeError(f"expected the shape {tuple(shape)}, got {tuple(x.shape)}")
    return x


ENSURE_SHAPE = graph_op("EnsureShape", _check_shape, "x", "shape", name="ensure_shape", rule=None)


def ensure(what: str, x: Tensor, shape: dims.Shape) -> Tensor:
    """Return x if it has the shape. If the shape is not known, return an op that checks it."""
    found = x._data.shape
    answer = dims.same(found, shape)
    if answer is False:
        raise ShapeError(f"{what}: expected the shape {shape}, got {found}")
    if answer:
        return x
    known = None if isinstance(shape, dims.UnknownRank) else shape
    return defer(ENSURE_SHAPE, (x,), {"shape": shape}, specs=[Spec(known, x.dtype)])


def _check_rank(xp: Any, x: Any, what: str, rank: int) -> Any:
    if x.ndim != rank:
        raise ShapeError(f"{what}: expected a tensor of rank {rank}, got {x.shape}")
    return x


RANKED = graph_op("_Ranked", _check_rank, "x", "what rank", name="Ranked", rule=None)


def of_rank(what: str, x: Any, rank: int) -> Any:
    """Return a tensor. If its rank is unknown, it is checked in the run."""
    if not is_symbolic(x) or not isinstance(x._data.shape, dims.UnknownRank):
        return _check_rank(None, x, what, rank)
    shape = tuple([dims.size_of(x._data, i) for i in range(rank)])
    return defer(RANKED, (x,), {"what": what, "rank": rank}, specs=[Spec(shape, x.dtype)])


def _check_mirrored(xp: Any, x: Any, paddings: Any, edge: int) -> Any:
    for n, pair in zip(x.shape, paddings, strict=True):
        if max(pair) > n - edge:
            raise ShapeError(f"pad: the paddings {pair} of an axis of size {n} exceed {n - edge}")
    return x


MIRRORED = graph_op("_Mirrored", _check_mirrored, "x", "paddings edge", name="Mirrored", rule=None)


def mirrored(x: Any, paddings: Any, mode: str) -> Any:
    """Return a tensor, checked to be as large as the mirrored elements that `pad` adds."""
    attrs = {"paddings": paddings, "edge": int(mode == "reflect")}
    if is_symbolic(x) and not dims.is_known((*x._data.shape, *chain(*paddings))):
        return defer(MIRRORED, (x,), attrs, specs=[x._data.spec])
    return _check_mirrored(None, x, **attrs)


def _check_indices(xp: Any, x: Any, what: str) -> Any:
    if x.size and x.min() < 0:
        raise IndexRangeError(f"{what}: the index {x.min()} is negative")
    return x


def _check_divisor(xp: Any, x: Any, what: str) -> Any:
    if not x.all():
        raise ShapeError(f"{what}: Integer division by zero")
    return x


def _check(type: str, kernel: Callable[..., Any]) -> Op:
    """Make a private op that returns its input if the check passes."""
    return graph_op(type, kernel, "x", "what", name=type.lstrip("_"))


def _check_permutation(xp: Any, x: Any, what: str) -> Any:
    if x.ndim != 1 or not xp.all(xp.sort(x) == xp.arange(x.size)):
        raise ShapeError(f"{what}: expected the numbers from 0 to {x.size - 1} in any order")
    return x


def _check_exclusive(xp: Any, x: Any, what: str) -> Any:
    if x.sum() > 1:
        raise ShapeError(f"{what}: exclusive=True, and {x.sum()} predicates are true")
    return x


INDICES, DIVISOR = _check("_Indices", _check_indices), _check("_Divisor", _check_divisor)
PERMUTATION = _check("_Permutation", _check_permutation)
EXCLUSIVE = _check("_Exclusive", _check_exclusive)


def indices_from_zero(what: str, x: TensorLike) -> Any:
    """Return indices, checked to be nonnegative. (regrad counts negative ones from the end.)"""
    if not is_symbolic(x):
        return x
    content = x._data.content
    if content is not None and all(isinstance(n, int) and n >= 0 for n in content.flat):
        return x
    y = defer(INDICES, (x,), {"what": what}, specs=[x._data.spec])
    y._data.content = content
    return y


def permutation(what: str, x: Any) -> Any:
    """Return integers, checked to be a permutation."""
    return _checked(PERMUTATION, what, x)


def at_most_one(what: str, x: Any) -> Any:
    """Return bools, checked to have at most one that is true."""
    return _checked(EXCLUSIVE, what, x)


def _checked(op: Op, what: str, x: Any) -> Any:
    if is_symbolic(x):
        return defer(op, (x,), {"what": what}, specs=[x._data.spec])
    op.kernels[np.ndarray](x.numpy(), what)
    return x


def whole_divisor(what: str, x: TensorLike) -> Any:
    """Return a divisor, checked to be nonzero if it is an integer."""
    if not is_symbolic(x) or x._data.dtype.kind not in "iu":
        return x
    content = x._data.content
    if content is not None and all(isinstance(n, int) and n for n in content.flat):
        return x
    return defer(DIVISOR, (x,), {"what": what}, specs=[x._data.spec])


def alike(what: str, labels: Tensor, predictions: Tensor) -> tuple[Tensor, Tensor]:
    """Return labels and predictions, checked to have the same shape."""
    shape, expected = labels._data.shape, predictions._data.shape
    if dims.same(shape, expected) is False:
        raise ShapeError(
            f"{what}: labels and predictions must have one shape, got {shape} and {expected}"
        )
    if isinstance(expected, dims.UnknownRank):
        expected = shape
    elif not isinstance(shape, dims.UnknownRank):
        expected = merge([expected, shape])
    return ensure(what, labels, expected), ensure(what, predictions, expected)
