"""Slices, gathers, scatters and masks under TensorFlow's names; `tensor[…]`."""

from __future__ import annotations

import builtins
from typing import Any, NamedTuple

import numpy as np

import regrad as rg
from regrad.core.dims import Dim, is_known
from regrad.core.op import TensorLike
from regrad.core.tensor import Tensor
from regrad.errors import ArgumentError, GraphError, IndexRangeError, ShapeError
from regrad.v1 import dtypes
from regrad.v1.functions.arrays import concat, dimension_tensor, reshape, squeeze, stack
from regrad.v1.functions.creation import ones_like
from regrad.v1.functions.math import add, cast, maximum, not_equal, subtract, to_int64, where
from regrad.v1.functions.reductions import argsort, cumsum, reduce_max, sort
from regrad.v1.graph.conversion import as_sizes
from regrad.v1.graph.forms import axes_of, dtype_of, one_op, rank_of, scope, shape_of
from regrad.v1.graph.forms import tensor as as_tensor
from regrad.v1.graph.rows import listed, row, written
from regrad.v1.graph.static_shapes import TensorShape
from regrad.v1.graph.tensors import is_tensor, rg_read
from regrad.v1.graph.tf_names import SLICES, declare
from regrad.v1.graph.values import indices_from_zero, of_rank

# -- tensor[…] -------------------------------------------------------------------------------------


declare(f"StridedSlice: * begin=first end=last strides=steps | T {SLICES}")


def getitem(x: TensorLike, index: Any, name: str = "strided_slice") -> Any:
    """Return `x[index]` for ints, slices, None, `...`, scalar int tensors, or one bool mask.

    Ints and slices make one `StridedSlice` op. A scalar tensor makes a `GatherV2`, which has the
    same gradient. The ends of slices may be known only in the run.
    """
    if _is_mask(index):
        return boolean_mask(x, index)
    entries = tuple([_entry(e) for e in (index if isinstance(index, tuple) else (index,))])
    return one_op("StridedSlice", name, _item, x, index=entries)


def _item(x: Tensor, index: Any) -> Any:
    return x[index]


def _is_mask(index: Any) -> bool:
    if is_tensor(index):
        return dtype_of(index).kind == "b"
    return isinstance(index, np.ndarray) and index.dtype.kind == "b"


def _entry(e: Any) -> Any:
    """Return an entry of an index in a form that regrad accepts."""
    if isinstance(e, builtins.slice):
        return builtins.slice(*[b if b is None else _bound(b) for b in (e.start, e.stop, e.step)])
    if isinstance(e, Dim):
        return rg_read(dimension_tensor(e))
    if _is_mask(e):
        raise ArgumentError(
            "a mask cannot be combined with other indices: use tf.boolean_mask(x, mask, axis=...)"
        )
    if not is_tensor(e):
        return e
    known = _bound(e) if rank_of(e) == 0 else None
    return known if isinstance(known, int) else rg_read(as_tensor(e))


def _bound(b: Any) -> Any:
    """Return an end of a slice as an int or a Dim."""
    return as_sizes(reshape(b, []) if is_tensor(b) and rank_of(b) is None else b)


def _is_open(size: int | Dim) -> bool:
    """Return whether a block goes to the end of the axis."""
    return isinstance(size, int) and size == -1


def _is_within(n: Any, begin: Any, size: Any) -> bool:
    return 0 <= begin <= begin + max(size, 0) <= n


@row("tf", "Slice: * begin size | T Index", begin=as_sizes, size=as_sizes)
def slice(input_: Tensor, begin: Any, size: Any) -> Any:
    """Return the block that starts at `begin` and has the shape `size`.

    Args:
        begin: The first index, one number for each axis.
        size: The sizes, one for each axis. The size -1 extends to the end of the axis.

    Raises:
        IndexRangeError: the block is not within the tensor.
        ShapeError: begin or size does not have one number for each axis.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.slice(rg.asarray([1, 2, 3]), begin=[1], size=[-1])
    Tensor([2, 3], dtype=int64)
    """
    input_ = of_rank("slice", input_, len(begin))
    if len(begin) != len(size):
        raise ShapeError(f"slice: begin is {begin}, and size has another length: {size}")
    shape = input_.shape
    if is_known(shape) and is_known((*begin, *size)):
        return rg.slice(input_, begin, size)
    places = list(zip(shape, begin, size, strict=True))
    if any(is_known(place) and not _is_within(*place) for place in places):
        raise IndexRangeError(f"slice: {begin} to {size} elements on is not within {shape}")
    sizes = tuple([n - b if _is_open(s) else s for n, b, s in places])
    y = rg.find_op("Slice").function(input_, begin=begin, size=sizes)
    checked = all(_is_open(place[2]) or is_known(place) for place in places)
    return y if checked else rg.reshape(y, sizes)  # raises in the run if it is too large


@written("tf")
def strided_slice(
    input_, begin, end, strides=None, begin_mask=0, end_mask=0, ellipsis_mask=0, new_axis_mask=0,
    shrink_axis_mask=0, var=None, name=None,
):  # fmt: skip
    """Return the elements that `input_[begin:end:strides]` selects, axis by axis.

    Bit i of a mask refers to entry i.

    Args:
        input_: A tensor or array.
        begin, end, strides: Numbers, one for each entry. The strides are 1 by default.
        begin_mask, end_mask: Entries without a beginning, or without an end.
        ellipsis_mask: The entry that means all other axes.
        new_axis_mask: Entries that add a new axis.
        shrink_axis_mask: Entries that are an index. The result does not have their axes.
        var: Without effect.

    Returns:
        A tensor of the same dtype.

    Raises:
        IndexRangeError: an index is out of range.

    Op type: `StridedSlice`. Source: `tf.strided_slice`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.strided_slice([1, 2, 3, 4], [0], [4], [2])))
    [1 3]
    """
    first, last = as_sizes(begin), as_sizes(end)
    steps = (1,) * len(first) if strides is None else as_sizes(strides)
    index = []
    for i, (b, e, step) in enumerate(zip(first, last, steps, strict=True)):
        if ellipsis_mask >> i & 1:
            index.append(...)
        elif new_axis_mask >> i & 1:
            index.append(None)
        elif shrink_axis_mask >> i & 1:
            index.append(b)
        else:
            ends = None if begin_mask >> i & 1 else b, None if end_mask >> i & 1 else e
            index.append(builtins.slice(*ends, step))
    return getitem(input_, tuple(index), name=name or "StridedSlice")


# -- gathers and scatters --------------------------------------------------------------------------


@written("tf", "GatherV2: * axis | Tparams Tindices Taxis batch_dims")
def gather(params, indices, validate_indices=None, name=None, axis=None, batch_dims=0):
    """Return slices of `params` along an axis.

    Args:
        params: A tensor or array.
        indices: A tensor or array of integers.
        validate_indices: Without effect: an index out of range always raises in the run.
        axis: The axis, by default the first axis after `batch_dims`.
        batch_dims: The number of leading axes that params and indices share.

    Returns:
        A tensor in which the axes of the indices replace the axis.

    Raises:
        DTypeError: the indices are not integers.

    Op type: `GatherV2`. Source: `tf.gather`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.gather([10, 20, 30], [2, 0])))
    [30 10]
    """
    axis = batch_dims if axis is None else axes_of(axis)
    attrs = {"same": False, "axis": axis, "batch_dims": batch_dims}
    return one_op("GatherV2", name, _take, params, indices, **attrs)


def _take(x: Tensor, indices: Tensor, axis: int, batch_dims: int) -> Any:
    indices = indices_from_zero("gather", indices)
    unasked = axis >= 0 and not is_known(shape_of(x))
    take = rg.find_op("GatherV2").function if unasked else rg.take
    return take(x, indices, axis=axis, batch_dims=batch_dims)


def batch_gather(params: TensorLike, indices: TensorLike, name: str | None = None) -> Any:
    """Return, for each vector of indices, the elements of the matching slice of `params`.

    Args:
        params: A tensor or array.
        indices: A tensor or array of integers, of known rank, 1 or more.

    Returns:
        A tensor of the shape of the indices, followed by the remaining axes of params.

    Raises:
        GraphError: the rank of the indices is 0 or unknown.

    Op type: `GatherV2`. Source: `tf.batch_gather`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.batch_gather([[1, 2], [3, 4]], [[1], [0]])))
    [[2]
     [3]]
    """
    batch = rank_of(as_tensor(indices))
    if not batch:
        raise GraphError(f"batch_gather: expected indices of known rank, 1 or more, got {indices}")
    return gather(params, indices, name=name or "BatchGather", batch_dims=batch - 1)


@row("tf", "GatherNd: * | Tparams Tindices", same=False)
def gather_nd(params: Tensor, indices: Tensor) -> Tensor:
    """Return slices of `params` at index vectors along the last axis of `indices`.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.gather_nd(rg.asarray([[1, 2], [3, 4]]), rg.asarray([[0, 1], [1, 0]]))
    Tensor([2, 3], dtype=int64)
    """
    return rg.gather_nd(params, indices_from_zero("gather_nd", indices))


@row("tf", "ScatterNd: * shape | T=Tindices Tindices=T", same=False)
def scatter_nd(indices: Tensor, updates: Tensor, shape: Any) -> Tensor:
    """Return zeros of a shape, with `updates` added at index vectors.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.scatter_nd(rg.asarray([[2], [0]]), rg.asarray([5, 6]), shape=[3])
    Tensor([6, 0, 5], dtype=int64)
    """
    return rg.scatter_nd(indices_from_zero("scatter_nd", indices), updates, shape)


@row("tf", "TensorScatterUpdate", rg.find_op("TensorScatterUpdate").function, same=False)
def tensor_scatter_update(tensor, indices, updates):
    """Return the tensor with its elements at index vectors replaced by `updates`.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.tensor_scatter_update(rg.asarray([1, 2, 3]), rg.asarray([[1]]), rg.asarray([9]))
    Tensor([1, 9, 3], dtype=int64)
    """


# -- functions whose result's shape depends on values ----------------------------------------------


@written("tf")
def boolean_mask(tensor, mask, name="boolean_mask", axis=None):
    """Return the slices of a tensor where a mask of the axes from `axis` on is true.

    The number of slices is known only in the run.

    Args:
        tensor: A tensor or array.
        mask: A tensor or array of bools, of known rank, 1 or more.
        axis: The first axis of the mask, by default 0.

    Returns:
        A tensor in which one axis replaces the axes of the mask.

    Raises:
        GraphError: the rank of the mask is 0 or unknown.
        ShapeError: the mask does not fit the axes.

    A composition. Source: `tf.boolean_mask`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.boolean_mask([1, 2, 3], [True, False, True])))
    [1 3]
    """
    with scope(name, tensor, mask):
        x, first = as_tensor(tensor), axes_of(axis) or 0
        mask = as_tensor(mask, dtypes.bool, like=x)
        count = rank_of(mask) or 0
        if not count:
            raise GraphError(
                "Number of mask dimensions must be specified, even if some dimensions are None, "
                f"and be 1 or more: {mask}"
            )
        if count > 1:
            sizes, last = shape_of(x), first + count
            TensorShape(sizes[first:last]).assert_is_compatible_with(shape_of(mask))
            x = reshape(x, (*sizes[:first], -1, *sizes[last:]))
            mask = reshape(mask, [-1])
        elif rank_of(x) is not None:
            TensorShape(shape_of(x)[first]).assert_is_compatible_with(shape_of(mask))
        return gather(x, squeeze(where(mask), axis=[1]), axis=first)


class Unique(NamedTuple):
    """Distinct values, and for each element the index of its value among them."""

    y: Any
    idx: Any


def _vector(x: Tensor) -> Any:
    return rg.stop_gradient(of_rank("unique", x, 1))


@written("tf")
def unique(x, out_idx=dtypes.int32, name=None) -> Unique:
    """Return the distinct values of a vector, in the order of their first occurrence.

    The values have no gradient.

    Args:
        x: A tensor or array of rank 1.
        out_idx: The dtype of the indices.

    Returns:
        The values `y`, and for each element of x the index `idx` of its value among them.

    A composition of sorts. Source: `tf.unique`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     y, idx = sess.run(tf.unique([7, 3, 7]))
    >>> y.tolist(), idx.tolist()
    ([7, 3], [0, 1, 0])
    """
    with scope(name or "Unique", x):
        x = one_op("StopGradient", None, _vector, x)
        order = argsort(x, stable=True)
        ordered = gather(x, order)
        first = ones_like(ordered[:1], dtypes.bool)
        new = concat([first, not_equal(ordered[1:], ordered[:-1])], axis=0)
        firsts = boolean_mask(order, new)  # first index of each value, in the order of values
        group = subtract(cumsum(cast(new, dtypes.int32)), 1)
        place = argsort(argsort(firsts))  # the argsort of a permutation inverts it
        idx = gather(gather(place, group), argsort(order))
        return Unique(gather(x, sort(firsts)), cast(idx, out_idx))


@written("tf")
def confusion_matrix(
    labels, predictions, num_classes=None, dtype=dtypes.int32, name=None, weights=None
):
    """Return the count, or sum of weights, of each pair of a label (row) and prediction (column).

    Args:
        labels, predictions: Tensors or arrays of integers, of rank 1.
        num_classes: The number of classes, by default one more than the largest class.
        weights: A weight for each pair, by default 1.

    Returns:
        A tensor of the shape `(num_classes, num_classes)`.

    A composition. Source: `tf.confusion_matrix`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.confusion_matrix([0, 1, 1], [0, 1, 0])))
    [[1 0]
     [1 1]]
    """
    with scope(name or "confusion_matrix", labels, predictions):
        labels, predictions = to_int64(labels), to_int64(predictions)
        if num_classes is None:
            num_classes = add(maximum(reduce_max(labels), reduce_max(predictions)), 1)
        count = as_sizes(num_classes)
        ones = ones_like(labels) if weights is None else as_tensor(weights)
        places = stack([labels, predictions], axis=1)
        return scatter_nd(places, cast(ones, dtype), [count, count])


__all__ = listed(__name__, "batch_gather")
