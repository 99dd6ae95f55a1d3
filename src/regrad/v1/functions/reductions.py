"""Reductions, scans, sorting and segments under TensorFlow's names.

As in TensorFlow, integers keep their dtype. The sum of int32 is int32. The mean of int32 is int32
too, rounded towards zero. (regrad's own functions return int64 and float32.) Axes must be known
when the graph is built.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import regrad as rg
from regrad.core.dims import Dim
from regrad.core.tensor import Tensor, TensorLike
from regrad.errors import ArgumentError, GraphError
from regrad.v1 import dtypes
from regrad.v1.functions.math import add, cast, to_double
from regrad.v1.graph.conversion import convert_to_tensor
from regrad.v1.graph.forms import axes_of, dtype_of, is_eager, one_op, rank_of, scope, tensor
from regrad.v1.graph.kinds import BOOLS, INEXACT, INTEGERS, NUMBERS, REALS
from regrad.v1.graph.rows import define, listed, row
from regrad.v1.graph.tensors import CONVERSIONS, IndexedSlices, rg_read
from regrad.v1.graph.values import of_rank, permutation

# -- reductions ------------------------------------------------------------------------------------


def _keep_dtype(
    op_type: str | None, name: str, function: Callable[..., Any], x: TensorLike,
    prepare: Callable[[Any], Any] = lambda x: x, **options: Any,
) -> Any:  # fmt: skip
    """Call `one_op`, and cast the result for integers back to their dtype.

    `prepare` casts the integers to the dtype of the computation.
    """
    x = tensor(x)
    dtype = dtype_of(x)
    if dtype.kind not in "iu" or (function is not rg.mean and dtype.itemsize == 8):
        return one_op(op_type, name, function, x, **options)
    with scope(name, x) as whole:
        y = one_op(op_type, op_type or name, function, prepare(x), **options)
        return cast(y, dtype, name=whole)


def _reduction(
    names: str, function: Callable[..., Any], kinds: str, *shows: str, **settings: Any
) -> Callable[..., Any]:
    """Make a reduction. The names are its name and its op type, if it is one op."""
    name, _, op_type = names.partition(" ")
    view = f"{op_type}: {REDUCED} {'T' * (kinds != BOOLS)}"
    doc = str(function.__doc__).partition("\n")[0] + AXIS
    declared = f"tf.{name}(input_tensor, {AXES})"
    return define(declared, view, function, kinds, *shows, doc=doc, **settings)


REDUCED = "* reduction_indices=all_axes | keep_dims=keepdims Tidx"
AXIS = "\n\nArgs:\n    axis: An axis, a list of axes, or None for all."
AXES = "axis=None, keepdims=None, name=None, reduction_indices=None, keep_dims=None"
SQUARE = "[[1.0, 2.0], [3.0, 4.0]]"
reduce_sum = _reduction("reduce_sum Sum", rg.sum, NUMBERS, SQUARE, "10.", call=_keep_dtype)
MEAN = partial(_keep_dtype, prepare=to_double)
reduce_mean = _reduction("reduce_mean Mean", rg.mean, NUMBERS, SQUARE, "2.5", call=MEAN)
reduce_prod = _reduction("reduce_prod Prod", rg.prod, NUMBERS, SQUARE, "24.", call=_keep_dtype)
reduce_max = _reduction("reduce_max Max", rg.max, REALS, SQUARE, "4.")
reduce_min = _reduction("reduce_min Min", rg.min, REALS, SQUARE, "1.")
reduce_any = _reduction("reduce_any Any", rg.any, BOOLS, "[True, False]", "True")
reduce_all = _reduction("reduce_all All", rg.all, BOOLS, "[True, False]", "False")
LOG_SUM = "reduce_logsumexp", rg.logsumexp, INEXACT, SQUARE, "4.44019"
reduce_logsumexp = _reduction(*LOG_SUM, scope="ReduceLogSumExp")
reduce_variance = _reduction("math.reduce_variance", rg.var, INEXACT, SQUARE, "1.25")
reduce_std = _reduction("math.reduce_std", rg.std, INEXACT, SQUARE, "1.118034")


def _count(
    op_type: str, name: str, function: Callable[..., Any], x: TensorLike, dtype: dtypes.DTypeLike,
    **axes: Any,
) -> Any:  # fmt: skip
    with scope(name, x):
        return cast(one_op(op_type, "Sum", function, tensor(x), **axes), dtype)


@row("tf", "CountNonzero", rg.count_nonzero, scope="count_nonzero", call=_count)
def count_nonzero(
    input_tensor, axis=None, keepdims=None, dtype=dtypes.int64, name=None, reduction_indices=None,
    keep_dims=None,
):  # fmt: skip
    """Return the number of nonzero elements.

    Args:
        axis: An axis, a list of axes, or None for all.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.count_nonzero(rg.asarray([3, 9, 1]))
    Tensor(3, dtype=int64)
    """


def _position(
    op_type: str, name: str, function: Callable[..., Any], x: TensorLike,
    output_type: dtypes.DTypeLike, **options: Any,
) -> Any:  # fmt: skip
    out_dtype = dtypes.to_numpy(output_type)
    if out_dtype == np.int64:
        return one_op(op_type, name, function, x, **options)
    with scope(name, x) as whole:
        return cast(one_op(op_type, op_type, function, x, **options), out_dtype, name=whole)


PLACE = "* dimension=axis | T Tidx output_type"


def _first_by_default(axis: TensorLike) -> int:
    return axes_of(axis) or 0


@row("tf", f"ArgMax: {PLACE}", rg.argmax, REALS, call=_position, axis=_first_by_default)
def argmax(input, axis=None, name=None, dimension=None, output_type=dtypes.int64):
    """Return the index of the first largest element along `axis`, by default axis 0.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.argmax(rg.asarray([3, 9, 1]))
    Tensor(1, dtype=int64)
    """


@row("tf", f"ArgMin: {PLACE}", rg.argmin, REALS, call=_position, axis=_first_by_default)
def argmin(input, axis=None, name=None, dimension=None, output_type=dtypes.int64):
    """Return the index of the first smallest element along `axis`, by default axis 0.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.argmin(rg.asarray([3, 9, 1]))
    Tensor(2, dtype=int64)
    """


# -- scans -----------------------------------------------------------------------------------------


def _scan(op_type: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def scan(x: Tensor, axis: int, **attrs: Any) -> Tensor:
        # Call the op itself if the rank is unknown, since a nonnegative axis needs no rank.
        direct = axis >= 0 and rank_of(x) is None
        return (rg.find_op(op_type).function if direct else function)(x, axis=axis, **attrs)

    view = f"{op_type}: * axis | T exclusive reverse Tidx"
    return row("tf", view, scan, NUMBERS, call=_keep_dtype)


@_scan("Cumsum", rg.cumulative_sum)
def cumsum(x, axis=0, exclusive=False, reverse=False):
    """Return the running sums of the elements along `axis`.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.cumsum(rg.asarray([1.0, 2.0, 4.0]))
    Tensor([1., 3., 7.], dtype=float32)
    """


@_scan("Cumprod", rg.cumulative_prod)
def cumprod(x, axis=0, exclusive=False, reverse=False):
    """Return the running products of the elements along `axis`.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.cumprod(rg.asarray([1.0, 2.0, 4.0]))
    Tensor([1., 2., 8.], dtype=float32)
    """


# -- sorting ---------------------------------------------------------------------------------------


def _descends(direction: str) -> bool:
    if direction not in ("ASCENDING", "DESCENDING"):
        raise ArgumentError(f"direction is 'ASCENDING' or 'DESCENDING', got {direction!r}")
    return direction == "DESCENDING"


@row("tf", "Sort", kinds=REALS, scope="sort", direction=_descends)
def sort(values: Tensor, axis=-1, direction: Any = "ASCENDING"):
    """Return the values sorted along `axis`.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.sort(rg.asarray([3, 9, 1]))
    Tensor([1, 3, 9], dtype=int64)
    """
    return rg.sort(values, axis=axis, descending=direction)


_int32 = partial(_position, output_type=np.int32)


@row("tf", "ArgSort", None, REALS, scope="argsort", call=_int32, direction=_descends, stable=None)
def argsort(values: Tensor, axis=-1, direction: Any = "ASCENDING", stable=False):
    """Return the int32 indices that sort the values along `axis`. The sort is stable.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.argsort(rg.asarray([3, 9, 1]))
    Tensor([2, 0, 1], dtype=int32)
    """
    return rg.argsort(values, axis=axis, descending=direction)


@row("tf", "ArgSort", kinds=INTEGERS, scope="InvertPermutation", call=_keep_dtype)
def invert_permutation(x: Tensor) -> Tensor:
    """Return the inverse permutation y, with `y[x[i]] = i`.

    Args:
        x: A tensor or array of integers: the numbers from 0 to `len(x) - 1`, in any order.

    Returns:
        A tensor of x's shape and dtype.

    Raises:
        ShapeError: x does not have rank 1, or (eager) is not a permutation. In the run the error
            is an InvalidArgumentError.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.invert_permutation([2, 0, 1])))
    [1 2 0]
    """
    what = "invert_permutation"
    return rg.argsort(permutation(what, of_rank(what, x, 1)))


# -- segments --------------------------------------------------------------------------------------


SEGMENTS = "UnsortedSegmentSum: * num_segments | T Tindices Tnumsegments"


@row("tf", SEGMENTS, rg.segment_sum, NUMBERS, same=False)
def unsorted_segment_sum(data, segment_ids, num_segments):
    """Return the sums of the slices of `data` with the same id. Negative ids are dropped.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.unsorted_segment_sum(rg.asarray([1.0, 2.0, 4.0]), rg.asarray([1, 0, 1]), num_segments=2)
    Tensor([2., 5.], dtype=float32)
    """


def _segment_means(
    op_type: None, name: str, function: Callable[..., Any], data: TensorLike, ids: TensorLike,
    **options: Any,
) -> Any:  # fmt: skip
    """Call `one_op`. Integers become float64."""
    data = tensor(data, like=ids)
    data = to_double(data) if dtype_of(data).kind in "iu" else data
    return one_op(op_type, name, function, data, ids, **options)


@row(
    "tf.math", None, kinds=NUMBERS, scope="UnsortedSegmentMean", call=_segment_means, same=False,
    deferred=True,
)  # fmt: skip
def unsorted_segment_mean(data: Tensor, segment_ids: Tensor, num_segments: Any) -> Tensor:
    """Return the means of the slices of `data` with the same id, or 0 for unused ids.

    The means of integers are float64.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> data, ids = rg.asarray([1.0, 2.0, 4.0]), rg.asarray([1, 0, 1])
    >>> tf.math.unsorted_segment_mean(data, ids, num_segments=2)
    Tensor([2. , 2.5], dtype=float32)
    """
    data, ids = rg.asarray(data), rg.asarray(segment_ids)
    ones = rg.ones_like(ids, dtype=data.dtype)
    counts = rg.maximum(rg.segment_sum(ones, ids, num_segments), 1)
    counts = rg.expand_dims(counts, tuple(range(1, 1 + data.ndim - ids.ndim)))
    return rg.segment_sum(data, ids, num_segments) / counts


def _sum_all_segments(
    op_type: str, name: str, function: Callable[..., Any], data: TensorLike, segment_ids: TensorLike
) -> Any:
    with scope(name, data, segment_ids) as whole:
        ids = tensor(segment_ids, name="segment_ids", like=data)
        data = tensor(data, like=ids)
        if function is unsorted_segment_mean and dtype_of(data).kind in "iu":
            return cast(function(data, ids, _segments(ids)), dtype_of(data), name=whole)
        return function(data, ids, _segments(ids), name=whole)


@row("tf", "UnsortedSegmentSum", unsorted_segment_sum, scope="SegmentSum", call=_sum_all_segments)
def segment_sum(data, segment_ids):
    """Return the sums of the slices of `data` with the same id, for ids up to the largest.

    The ids need not be sorted.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.segment_sum(rg.asarray([1.0, 2.0, 4.0]), rg.asarray([0, 0, 1]))
    Tensor([3., 4.], dtype=float32)
    """


@row("tf", None, unsorted_segment_mean, scope="SegmentMean", call=_sum_all_segments)
def segment_mean(data, segment_ids):
    """Return the means of the slices of `data` with the same id; see `segment_sum`.

    The means of integers are integers, rounded towards zero.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.segment_mean(rg.asarray([1.0, 2.0, 4.0]), rg.asarray([0, 0, 1]))
    Tensor([1.5, 4. ], dtype=float32)
    """


def _segments(ids: TensorLike) -> Any:
    """Return the number of segments, one more than the largest id."""
    known = ids.numpy() if is_eager(ids) else rg_read(ids)._data.content
    if known is None or any(isinstance(n, Dim) for n in known.flat):
        return add(reduce_max(ids), 1)
    return int(max(known.flat, default=-1)) + 1


def _add_rows(slices: IndexedSlices, dtype: dtypes.DTypeLike | None, name: str | None) -> Any:
    """Return IndexedSlices as a dense tensor: zeros, with the rows added."""
    if slices.dense_shape is None:
        raise GraphError("IndexedSlices without a dense_shape cannot be made a tensor")
    rows = convert_to_tensor(slices.dense_shape)[0]  # pyright: ignore[reportIndexIssue]
    return convert_to_tensor(unsorted_segment_sum(slices.values, slices.indices, rows), dtype)


CONVERSIONS[IndexedSlices] = _add_rows
__all__ = listed(__name__)
