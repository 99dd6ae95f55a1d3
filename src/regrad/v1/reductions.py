"""Reductions, scans, sorting and segments under TensorFlow's names.

Integers stay what they are, as in TensorFlow: the sum of int32 is int32, and so is the mean,
rounded towards zero. (regrad's own functions give int64 and float32.) Axes must be known when the
graph is built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import regrad as rg
from regrad.deferral import deferrable
from regrad.dims import Dim
from regrad.errors import ArgumentError
from regrad.static_values import static_content
from regrad.tensors import Tensor
from regrad.v1 import dtypes
from regrad.v1.forms import (
    BOOLS,
    INEXACT,
    NUMBERS,
    REALS,
    as_sizes,
    axes_of,
    dtype_of,
    is_eager,
    one_op,
    rank_of,
    renamed,
    scope,
    tensor,
)
from regrad.v1.math import add, cast, to_double
from regrad.v1.tensors import rg_read

# -- reductions ------------------------------------------------------------------------------------


def _reduction(
    op_type: str | None,
    name: str,
    function: Any,
    kinds: str,
    default: str = "",
    integers: Callable[[Any], Any] | None = None,
) -> Any:
    """One row of the table of reductions.

    `integers` brings integers to the dtype in which they are computed, where that is another than
    the result's.
    """

    def reduce(
        input_tensor: Any,
        axis: Any = None,
        keepdims: bool | None = None,
        name: str | None = None,
        reduction_indices: Any = None,
        keep_dims: bool | None = None,
    ) -> Any:
        axis = axes_of(renamed("axis", axis, "reduction_indices", reduction_indices))
        keep = bool(renamed("keepdims", keepdims, "keep_dims", keep_dims))
        attrs = {"axis": axis, "keepdims": keep}
        name, x = name or default or op_type or "", tensor(input_tensor)
        if integers is None or not _changes(x, function):
            return one_op(op_type, name, function, x, kinds=kinds, **attrs)
        with scope(name, x) as whole:
            y = one_op(op_type, op_type or name, function, integers(x), **attrs)
            return cast(y, dtype_of(x), name=whole)

    reduce.__name__ = reduce.__qualname__ = name
    reduce.__doc__ = (
        f"{function.__doc__.partition(chr(10))[0]}\n\n"
        f"    `axis` and `keepdims` have old names, `reduction_indices` and `keep_dims`.\n\n"
        f"    Source: `tf.{name}`."
    )
    return reduce


def _changes(x: Any, function: Any) -> bool:
    """Whether a reduction of regrad's changes the dtype of these integers."""
    dtype = dtype_of(x)
    return dtype.kind in "iu" and (function is rg.mean or dtype.itemsize < 8)


def _same(x: Any) -> Any:
    return x


reduce_sum = _reduction("Sum", "reduce_sum", rg.sum, NUMBERS, integers=_same)
reduce_mean = _reduction("Mean", "reduce_mean", rg.mean, NUMBERS, integers=to_double)
reduce_prod = _reduction("Prod", "reduce_prod", rg.prod, NUMBERS, integers=_same)
reduce_max = _reduction("Max", "reduce_max", rg.max, REALS)
reduce_min = _reduction("Min", "reduce_min", rg.min, REALS)
reduce_any = _reduction("Any", "reduce_any", rg.any, BOOLS)
reduce_all = _reduction("All", "reduce_all", rg.all, BOOLS)
reduce_logsumexp = _reduction(
    None, "reduce_logsumexp", rg.logsumexp, INEXACT, default="ReduceLogSumExp"
)
reduce_variance = _reduction(None, "reduce_variance", rg.var, INEXACT, default="reduce_variance")
reduce_std = _reduction(None, "reduce_std", rg.std, INEXACT, default="reduce_std")


def count_nonzero(
    input_tensor: Any,
    axis: Any = None,
    keepdims: bool | None = None,
    dtype: Any = dtypes.int64,
    name: str | None = None,
    reduction_indices: Any = None,
    keep_dims: bool | None = None,
) -> Any:
    """How many elements over `axis` are not zero."""
    axis = axes_of(renamed("axis", axis, "reduction_indices", reduction_indices))
    keep = bool(renamed("keepdims", keepdims, "keep_dims", keep_dims))
    with scope(name or "count_nonzero", input_tensor):
        x = tensor(input_tensor)
        count = one_op("CountNonzero", "Sum", rg.count_nonzero, x, axis=axis, keepdims=keep)
        return cast(count, dtype)


def _place(op_type: str, name: str, function: Any, extreme: str) -> Any:
    def place(
        input: Any,
        axis: Any = None,
        name: str | None = None,
        dimension: Any = None,
        output_type: Any = dtypes.int64,
    ) -> Any:
        axis = axes_of(renamed("axis", axis, "dimension", dimension)) or 0
        name, due = name or op_type, dtypes.to_numpy(output_type)
        if due == np.int64:
            return one_op(op_type, name, function, input, kinds=REALS, axis=axis)
        with scope(name, input) as whole:
            found = one_op(op_type, op_type, function, input, kinds=REALS, axis=axis)
            return cast(found, due, name=whole)

    place.__name__ = place.__qualname__ = name
    place.__doc__ = (
        f"The index of the (first) {extreme} element along `axis` (by default the first axis).\n\n"
        f"    Op type: `{op_type}`. Source: `tf.{name}`."
    )
    return place


argmax = _place("ArgMax", "argmax", rg.argmax, "largest")
argmin = _place("ArgMin", "argmin", rg.argmin, "smallest")


# -- scans -----------------------------------------------------------------------------------------


def _scan(op_type: str, name: str, function: Any, what: str) -> Any:
    def scan(
        x: Any,
        axis: Any = 0,
        exclusive: bool = False,
        reverse: bool = False,
        name: str | None = None,
    ) -> Any:
        x, name = tensor(x), name or op_type
        attrs = {"axis": axes_of(axis), "exclusive": exclusive, "reverse": reverse}
        if not _changes(x, function):
            return one_op(op_type, name, function, x, kinds=NUMBERS, **attrs)
        with scope(name, x) as whole:
            y = one_op(op_type, op_type, function, x, **attrs)
            return cast(y, dtype_of(x), name=whole)

    scan.__name__ = scan.__qualname__ = name
    scan.__doc__ = (
        f"The {what} of the elements so far along `axis`.\n\n"
        f"    Op type: `{op_type}`. Source: `tf.{name}`."
    )
    return scan


def _cumulative(function: Any, op_type: str) -> Any:
    """regrad's function, or its op where the rank is unknown and need not be asked for."""

    def scanned(x: Any, axis: int, **attrs: Any) -> Any:
        direct = axis >= 0 and rank_of(x) is None
        return (rg.find_op(op_type).function if direct else function)(x, axis=axis, **attrs)

    return scanned


cumsum = _scan("Cumsum", "cumsum", _cumulative(rg.cumulative_sum, "Cumsum"), "sums")
cumprod = _scan("Cumprod", "cumprod", _cumulative(rg.cumulative_prod, "Cumprod"), "products")


# -- sorting ---------------------------------------------------------------------------------------


def sort(values: Any, axis: int = -1, direction: str = "ASCENDING", name: str | None = None) -> Any:
    """The values in order along `axis`; `direction` may be "DESCENDING"."""
    attrs = {"axis": axes_of(axis), "descending": _descends(direction)}
    return one_op("Sort", name or "sort", rg.sort, values, kinds=REALS, **attrs)


def argsort(
    values: Any,
    axis: int = -1,
    direction: str = "ASCENDING",
    stable: bool = False,
    name: str | None = None,
) -> Any:
    """The indices (int32) that put the values in order along `axis`; equal ones keep theirs."""
    attrs = {"axis": axes_of(axis), "descending": _descends(direction)}
    return _argsort(values, name or "argsort", dtypes.int32, **attrs)


def _argsort(values: Any, name: str, dtype: Any, **attrs: Any) -> Any:
    with scope(name, values) as whole:
        places = one_op("ArgSort", "places", rg.argsort, values, kinds=REALS, **attrs)
        return cast(places, dtype, name=whole)


def _descends(direction: str) -> bool:
    if direction not in ("ASCENDING", "DESCENDING"):
        raise ArgumentError(f"direction is 'ASCENDING' or 'DESCENDING', got {direction!r}")
    return direction == "DESCENDING"


def invert_permutation(x: Any, name: str | None = None) -> Any:
    """The y with `y[x[i]] = i`."""
    x = tensor(x)
    return _argsort(x, name or "InvertPermutation", dtype_of(x), axis=-1)


# -- segments --------------------------------------------------------------------------------------


def unsorted_segment_sum(
    data: Any, segment_ids: Any, num_segments: Any, name: str | None = None
) -> Any:
    """The sums of the slices of `data` that share an id; negative ids count nowhere."""
    count, op_type = as_sizes(num_segments), "UnsortedSegmentSum"
    inputs = {"same": False, "kinds": NUMBERS, "num_segments": count}
    return one_op(op_type, name or op_type, rg.segment_sum, data, segment_ids, **inputs)


def unsorted_segment_mean(
    data: Any, segment_ids: Any, num_segments: Any, name: str | None = None
) -> Any:
    """The means of the slices of `data` that share an id; 0 where there are none."""
    inputs = {"same": False, "kinds": NUMBERS, "num_segments": as_sizes(num_segments)}
    return one_op(None, name or "UnsortedSegmentMean", _means, data, segment_ids, **inputs)


@deferrable
def _means(x: Any, ids: Any, num_segments: Any) -> Tensor:
    ones = rg.ones_like(ids, dtype=x.dtype)
    counts = rg.maximum(rg.segment_sum(ones, ids, num_segments), 1)
    counts = rg.expand_dims(counts, tuple(range(1, 1 + x.ndim - ids.ndim)))
    return rg.segment_sum(x, ids, num_segments) / counts


def segment_sum(data: Any, segment_ids: Any, name: str | None = None) -> Any:
    """The sums of the slices of `data` that share an id; there are as many as the largest says.

    (The ids need not be sorted.)
    """
    with scope(name or "SegmentSum", data) as whole:
        ids = tensor(segment_ids, name="segment_ids")
        return unsorted_segment_sum(data, ids, _segments(ids), name=whole)


def segment_mean(data: Any, segment_ids: Any, name: str | None = None) -> Any:
    """The means of the slices of `data` that share an id; see `segment_sum`."""
    with scope(name or "SegmentMean", data) as whole:
        ids = tensor(segment_ids, name="segment_ids")
        return unsorted_segment_mean(data, ids, _segments(ids), name=whole)


def _segments(ids: Any) -> Any:
    """One more than the largest id."""
    known = ids.numpy() if is_eager(ids) else static_content(rg_read(ids))
    if known is None or any(isinstance(n, Dim) for n in known.flat):
        return add(reduce_max(ids), 1)
    return int(max(known.flat, default=-1)) + 1
