"""Slices, gathers, scatters and masks under TensorFlow's names; `tensor[…]`; rows of variables."""

from __future__ import annotations

import builtins
from typing import Any, NamedTuple

import numpy as np

import regrad as rg
from regrad.core.dims import Dim, is_known
from regrad.core.registry import OPS
from regrad.core.tensor import Readable, Tensor, TensorLike
from regrad.errors import ArgumentError, GraphError, IndexRangeError, ShapeError
from regrad.graph.graph import NO_RULE
from regrad.graph.plan import PlanRun
from regrad.v1 import dtypes
from regrad.v1.functions import arrays, creation, math, reductions
from regrad.v1.graph import forms
from regrad.v1.graph.conversion import as_sizes, convert_to_tensor
from regrad.v1.graph.graphs import add_op
from regrad.v1.graph.rows import listed, row, written
from regrad.v1.graph.static_shapes import TensorShape
from regrad.v1.graph.tensors import face, is_tensor, rg_read
from regrad.v1.graph.tf_names import SLICES, declare
from regrad.v1.graph.values import indices_from_zero, of_rank
from regrad.v1.graph.variables import read_state, state_op, variable_of

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
    return forms.one_op("StridedSlice", name, _item, x, index=entries)


def _item(x: Tensor, index: Any) -> Any:
    return x[index]


def _is_mask(index: Any) -> bool:
    if is_tensor(index):
        return forms.dtype_of(index).kind == "b"
    return isinstance(index, np.ndarray) and index.dtype.kind == "b"


def _entry(e: Any) -> Any:
    """Return an entry of an index in a form that regrad accepts."""
    if isinstance(e, builtins.slice):
        return builtins.slice(*[b if b is None else _bound(b) for b in (e.start, e.stop, e.step)])
    if isinstance(e, Dim):
        return rg_read(arrays.dimension_tensor(e))
    if _is_mask(e):
        raise ArgumentError("a mask must be the only index: use tf.boolean_mask(x, mask, axis=...)")
    if not is_tensor(e):
        return e
    known = _bound(e) if forms.rank_of(e) == 0 else None
    return known if isinstance(known, int) else rg_read(forms.tensor(e))


def _bound(b: Any) -> Any:
    """Return an end of a slice as an int or a Dim."""
    return as_sizes(arrays.reshape(b, []) if is_tensor(b) and forms.rank_of(b) is None else b)


def _is_open(size: int | Dim) -> bool:
    """Return whether a block goes to the end of the axis."""
    return isinstance(size, int) and size == -1


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
    if len(begin) != len(size) or forms.rank_of(input_) not in (None, len(begin)):
        raise ShapeError(
            f"slice: expected one entry per axis of {input_}, got begin={begin} and size={size}"
        )
    input_ = of_rank("slice", input_, len(begin))
    shape = input_.shape
    if is_known((*shape, *begin, *size)):
        return rg.slice(input_, begin, size)
    places = list(zip(shape, begin, size, strict=True))
    if any(is_known((n, b, s)) and not 0 <= b <= b + max(s, 0) <= n for n, b, s in places):
        raise IndexRangeError(f"slice: the block from {begin} of size {size} exceeds {shape}")
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
        ends = None if begin_mask >> i & 1 else b, None if end_mask >> i & 1 else e
        masks = (ellipsis_mask, ...), (new_axis_mask, None), (shrink_axis_mask, b)
        chosen = [entry for mask, entry in masks if mask >> i & 1]  # the first has precedence
        index.append(chosen[0] if chosen else builtins.slice(*ends, step))
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
    axis = batch_dims if axis is None else forms.axes_of(axis)
    attrs = {"same": False, "axis": axis, "batch_dims": batch_dims}
    return forms.one_op("GatherV2", name, _take, params, indices, **attrs)


def _take(x: Tensor, indices: Tensor, axis: int, batch_dims: int) -> Any:
    indices = indices_from_zero("gather", indices)
    unasked = axis >= 0 and not is_known(forms.shape_of(x))
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
    batch = forms.rank_of(forms.tensor(indices))
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
    with forms.scope(name, tensor, mask):
        x, first = forms.tensor(tensor), forms.axes_of(axis) or 0
        mask = forms.tensor(mask, dtypes.bool, like=x)
        count = forms.rank_of(mask) or 0
        if not count:
            raise GraphError(f"boolean_mask: expected a mask of known rank, 1 or more, got {mask}")
        sizes, last = forms.shape_of(x), first + count
        if count > 1 or forms.rank_of(x) is not None:
            TensorShape(sizes[first:last]).assert_is_compatible_with(forms.shape_of(mask))
        if count > 1:
            x = arrays.reshape(x, (*sizes[:first], -1, *sizes[last:]))
            mask = arrays.reshape(mask, [-1])
        return gather(x, arrays.squeeze(math.where(mask), axis=[1]), axis=first)


class Unique(NamedTuple):
    """Distinct values, and for each element the index of its value among them."""

    y: Any
    idx: Any


@written("tf")
def unique(x, out_idx=dtypes.int32, name=None) -> Unique:
    """Return the distinct values of a vector, in the order of their first occurrence.

    The values have no gradient.

    Args:
        x: A tensor or array of rank 1.
        out_idx: The dtype of the indices.

    Returns:
        The values `y`, and for each element of x the index `idx` of its value among them.

    Raises:
        ShapeError: x does not have rank 1.

    Op type: `Unique`. Source: `tf.unique`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     y, idx = sess.run(tf.unique([7, 3, 7]))
    >>> y.tolist(), idx.tolist()
    ([7, 3], [0, 1, 0])
    """
    with forms.scope(name or "Unique", x) as whole:
        y, idx = forms.one_op("Unique", whole, _by_occurrence, x)
        return Unique(y, math.cast(idx, out_idx))


def _by_occurrence(x: Tensor) -> tuple[Tensor, Tensor]:
    x = of_rank("unique", x, 1)
    values, places, inverse, _ = rg.unique_all(x)
    order = rg.argsort(places)
    return rg.take(values, order), rg.take(rg.argsort(order), inverse)


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
    with forms.scope(name or "confusion_matrix", labels, predictions):
        labels, predictions = math.to_int64(labels), math.to_int64(predictions)
        if num_classes is None:
            largest = map(reductions.reduce_max, (labels, predictions))
            num_classes = math.add(math.maximum(*largest), 1)
        count = as_sizes(num_classes)
        ones = creation.ones_like(labels) if weights is None else forms.tensor(weights)
        places = arrays.stack([labels, predictions], axis=1)
        return scatter_nd(places, math.cast(ones, dtype), [count, count])


# -- rows of variables -----------------------------------------------------------------------------


def _set_rows(run: PlanRun, ref: Any, indices: Any, updates: Any, key: str) -> Any:
    old = read_state(run, ref, key)
    kernel = OPS["TensorScatterUpdate"].kernels[type(old)]
    return run.write(key, kernel(old, indices, updates))


SCATTER = state_op("ScatterUpdate", _set_rows, "ref indices updates", "key")


@written("tf")
def scatter_update(ref: Readable, indices, updates, use_locking=True, name=None):
    """Return an op that replaces rows of a variable. Fetching it returns the new value.

    Args:
        ref: The variable.
        indices: The numbers of the rows, a tensor of integers.
        updates: The rows, of the shape `indices.shape + ref.shape[1:]`.
        use_locking: Without effect.

    Returns:
        A tensor, the variable after the update.

    Raises:
        InvalidArgumentError: in the run, an index is out of range.

    Op type: `ScatterUpdate`. Source: `tf.scatter_update`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     v = tf.Variable([1.0, 2.0, 3.0])
    ...     sess.run(tf.global_variables_initializer())
    ...     print(sess.run(tf.scatter_update(v, [2, 0], [5.0, 6.0])))
    [6. 2. 5.]
    """
    v = variable_of(ref)
    rows = convert_to_tensor(updates, v.dtype.base_dtype)
    xs = [v._variable._tensor, arrays.expand_dims(indices, -1)._tensor, rows._tensor]
    spec = v._variable._symbol.spec
    return face(add_op(SCATTER, name or "ScatterUpdate", xs, {"key": v._key}, [spec], NO_RULE))


@written("tf")
def scatter_add(ref: Readable, indices, updates, use_locking=False, name=None):
    """Return an op that adds to rows of a variable. Updates of the same row add up.

    See `tf.scatter_update`.

    Args:
        ref: The variable.
        indices: The numbers of the rows, a tensor of integers.
        updates: The rows, of the shape `indices.shape + ref.shape[1:]`.
        use_locking: Without effect.

    Returns:
        A tensor, the variable after the update.

    Op types: `ScatterNd`, `AssignAdd`. Source: `tf.scatter_add`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     v = tf.Variable([1.0, 2.0])
    ...     sess.run(tf.global_variables_initializer())
    ...     print(sess.run(tf.scatter_add(v, [1, 1], [5.0, 6.0])))
    [ 1. 13.]
    """
    v = variable_of(ref)
    return v.assign_add(_spread(v, indices, updates), name=name or "ScatterAdd")


@written("tf")
def scatter_sub(ref: Readable, indices, updates, use_locking=False, name=None):
    """Return an op that subtracts from rows of a variable; see `tf.scatter_add`.

    Args:
        ref: The variable.
        indices: The numbers of the rows, a tensor of integers.
        updates: The rows, of the shape `indices.shape + ref.shape[1:]`.
        use_locking: Without effect.

    Returns:
        A tensor, the variable after the update.

    Op types: `ScatterNd`, `AssignSub`. Source: `tf.scatter_sub`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     v = tf.Variable([1.0, 2.0])
    ...     sess.run(tf.global_variables_initializer())
    ...     print(sess.run(tf.scatter_sub(v, [0], [5.0])))
    [-4.  2.]
    """
    v = variable_of(ref)
    return v.assign_sub(_spread(v, indices, updates), name=name or "ScatterSub")


def _spread(v: Any, indices: TensorLike, updates: TensorLike) -> Any:
    """Return zeros of the variable's shape, with the updates added to the rows."""
    rows = convert_to_tensor(updates, v.dtype.base_dtype)
    return scatter_nd(arrays.expand_dims(indices, -1), rows, arrays.shape(v))


__all__ = listed(__name__, "batch_gather")
