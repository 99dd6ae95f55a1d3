"""Checks and conversions of arguments for `tf.nn`, `tf.layers` and `tf.losses`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np

from regrad.core import dims
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


Check = Callable[..., Any]


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
        raise ShapeError(f"{what}: expected a tensor of rank {rank}, got the shape {x.shape}")
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


def _check_whole(type: str, is_wrong: Callable[[Any], Any], why: str) -> Callable[..., Any]:
    """Return a function that returns a tensor, or raises if its value is wrong."""

    def kernel(xp: Any, x: Any, what: str) -> Any:
        if is_wrong(x):
            raise ShapeError(f"{what}: {why}, got {x}")
        return x

    op = graph_op(type, kernel, "x", "what", name=type.lstrip("_"))

    def check(what: str, x: Any) -> Any:
        if is_symbolic(x):
            return defer(op, (x,), {"what": what}, specs=[x._data.spec])
        kernel(np, x.numpy(), what)
        return x

    return check


permutation: Check = _check_whole(
    "_Permutation", lambda x: (np.sort(x) != np.arange(x.size)).any(),
    "expected the numbers from 0 on, in any order",
)  # fmt: skip
at_most_one: Check = _check_whole(
    "_Exclusive", lambda x: x.sum() > 1, "exclusive=True, but several predicates are true"
)


def _check(
    type: str, is_wrong: Callable[[Any], Any], error: Callable[[str], Exception], why: str
) -> Callable[[str, TensorLike], Any]:
    """Return a function of integers that returns them if none is wrong, and otherwise raises.

    A private op checks integers that are known only in the run.
    """

    def kernel(xp: Any, x: Any, what: str) -> Any:
        if np.any(is_wrong(x)):
            raise error(f"{what}: {why.format(np.min(x))}")
        return x

    op = graph_op(type, kernel, "x", "what", name=type.lstrip("_"))

    def check(what: str, x: TensorLike) -> Any:
        if not is_symbolic(x) or x._data.dtype.kind not in "iu":
            return x
        content = x._data.content
        if content is not None and all(
            isinstance(n, int) and not is_wrong(n) for n in content.flat
        ):
            return x
        y = defer(op, (x,), {"what": what}, specs=[x._data.spec])
        y._data.content = content
        return y

    return check


# Indices must not be negative (regrad counts negative ones from the end), divisors not zero.
indices_from_zero: Check = _check(
    "_Indices", lambda n: n < 0, IndexRangeError, "the index {} is negative"
)
whole_divisor: Check = _check("_Divisor", lambda n: n == 0, ShapeError, "Integer division by zero")


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
