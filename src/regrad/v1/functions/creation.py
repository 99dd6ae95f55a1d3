"""Functions that create tensors, such as `tf.zeros`, `tf.range` and `tf.one_hot`."""

from __future__ import annotations

from typing import Any

import numpy as np

import regrad as rg
from regrad.core.dims import Dim, is_known
from regrad.core.numbers import under
from regrad.core.tensor import Tensor, TensorLike
from regrad.errors import DTypeError, ShapeError
from regrad.graph.graph import defer, graph_op
from regrad.shapes.infer import Spec
from regrad.v1 import dtypes
from regrad.v1.functions import arrays, math, reductions
from regrad.v1.graph import forms
from regrad.v1.graph.conversion import as_array, as_sizes, constant
from regrad.v1.graph.kinds import FLOATS
from regrad.v1.graph.rows import listed, row, written
from regrad.v1.graph.tensors import CONVERSIONS, AllAxes, is_tensor, rg_read
from regrad.v1.graph.values import constant_value

# -- one value -------------------------------------------------------------------------------------

LARGE = 1000  # from this number of elements on, a broadcast replaces the constant


def fill(dims: TensorLike, value: TensorLike, name: str | None = None) -> Any:
    """Return a tensor filled with a value.

    Args:
        dims: The shape: numbers, or a tensor of integers.
        value: A number, or a tensor of rank 0.

    Returns:
        A tensor of this shape, of the value's dtype.

    Raises:
        ShapeError: the value does not have rank 0.

    Op type: `BroadcastTo`. Source: `tf.fill`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.fill([3], 7)))
    [7 7 7]
    """
    if forms.rank_of(value) if is_tensor(value) else np.ndim(value):
        raise ShapeError(f"fill: expected a value of rank 0, got {value}")
    return arrays.broadcast_to(value, dims, name or "Fill")


@written("tf")
def zeros(shape, dtype=dtypes.float32, name=None):
    """Return zeros of a shape.

    Args:
        shape: Numbers, or a tensor of integers.

    Returns:
        A tensor of this shape and dtype.

    Op type: `Const`, or `BroadcastTo` from 1000 elements on. Source: `tf.zeros`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.zeros([2], tf.int32)))
    [0 0]
    """
    return _full(0, shape, dtype, name or "zeros")


@written("tf")
def ones(shape, dtype=dtypes.float32, name=None):
    """Return ones of a shape.

    Args:
        shape: Numbers, or a tensor of integers.

    Returns:
        A tensor of this shape and dtype.

    Op type: `Const`, or `BroadcastTo` from 1000 elements on. Source: `tf.ones`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.ones([2])))
    [1. 1.]
    """
    return _full(1, shape, dtype, name or "ones")


def _full(value: int, shape: TensorLike, dtype: dtypes.DTypeLike, name: str) -> Any:
    number, found = np.asarray(value, dtypes.to_numpy(dtype)), as_sizes(shape)
    sizes = (found,) if isinstance(found, int | Dim) else found
    if forms.is_eager(*shape) if isinstance(shape, list | tuple) else forms.is_eager(shape):
        return rg.asarray(np.full(sizes, number))
    if is_known(sizes) and np.prod(np.asarray(sizes, int)) < LARGE:
        return constant(np.full(sizes, number), name=name)
    return arrays.broadcast_to(number, sizes, name)


def _dtype(dtype: dtypes.DTypeLike | None) -> np.dtype | None:
    return None if dtype is None else dtypes.to_numpy(dtype)


@row("tf", "ZerosLike: * | T", rg.zeros_like, scope="zeros_like", dtype=_dtype, optimize=None)
def zeros_like(tensor, dtype=None, name=None, optimize=True):
    """Return zeros with the shape of a tensor, by default also with its dtype.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.zeros_like(rg.asarray([1.5, 2.5]))
    Tensor([0., 0.], dtype=float32)
    """


@row("tf", "OnesLike: * | T", rg.ones_like, scope="ones_like", dtype=_dtype, optimize=None)
def ones_like(tensor, dtype=None, name=None, optimize=True):
    """Return ones with the shape of a tensor, by default also with its dtype.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.ones_like(rg.asarray([1.5, 2.5]))
    Tensor([1., 1.], dtype=float32)
    """


# -- sequences -------------------------------------------------------------------------------------


def _count_up(xp: Any, start: Any, limit: Any, delta: Any) -> Any:
    if delta == 0 or (limit - start) * delta < 0:
        raise ShapeError(f"range: cannot count from {start} to {limit} in steps of {delta}")
    return np.arange(start, limit, delta, dtype=start.dtype)


def _spread(xp: Any, start: Any, stop: Any, num: int) -> Any:
    return xp.linspace(start, stop, num, dtype=start.dtype)


RANGE = graph_op("Range", _count_up, "start limit delta")
LIN_SPACE = graph_op("LinSpace", _spread, "start stop", "num")
WIDTHS = [np.dtype(d) for d in (np.int32, np.int64, np.float32, np.float64)]


@written("tf", "Range: * | Tidx=T")
def range(start, limit=None, delta: TensorLike = 1, dtype=None, name="range"):
    """Return the numbers from `start` up to, but not including, `limit`.

    The dtype is the widest of int32, int64, float32 and float64 among the arguments.

    Args:
        start: The first number. A single argument is the limit, and the first number is 0.
        limit: The end.
        delta: The step, which may be negative.

    Returns:
        A tensor of rank 1.

    Raises:
        ShapeError: the steps are 0, or lead away from the limit. In the run the error is an
            InvalidArgumentError.

    Op type: `Range`. Source: `tf.range`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.range(3)), sess.run(tf.range(1.0, 2.0, 0.5)))
    [0 1 2] [1.  1.5]
    """
    start, limit = (0, start) if limit is None else (start, limit)
    given = [arrays.dimension_tensor(v) if isinstance(v, Dim) else v for v in (start, limit, delta)]
    out_dtype = _dtype(dtype) or max(map(_dtype_of, given), key=WIDTHS.index)
    if forms.is_eager(*given):
        numbers: list[Any] = [rg_read(v).item() if is_tensor(v) else v for v in given]
        return rg.arange(*numbers, dtype=out_dtype)
    with forms.scope(name) as whole:
        xs = [
            math.cast(v, out_dtype) if is_tensor(v) else constant(under(v, out_dtype), name=n)
            for v, n in zip(given, ("start", "limit", "delta"), strict=True)
        ]
        return forms.one_op("Range", whole, _range, *xs)


def _dtype_of(value: TensorLike) -> np.dtype:
    return forms.dtype_of(value) if is_tensor(value) else as_array(value).dtype


def _range(start: Tensor, limit: Tensor, delta: Tensor) -> Any:
    xs = start, limit, delta
    known = [constant_value(x) if x._data.content is None else x._data.content.item() for x in xs]
    if any(n is None or isinstance(n, Dim) for n in known):
        # `range(size)` has `size` elements, since a size is not negative
        is_size = known[::2] == [0, 1] and isinstance(known[1], Dim) and known[1].key[0] == "size"
        content, count = None, known[1] if is_size else None
    else:
        content = _count_up(np, *[np.asarray(n) for n in known])
        count = len(content)
    y = defer(RANGE, xs, {}, specs=(Spec((count,), start.dtype),))
    if content is not None and content.dtype.kind == "i" and content.size <= 64:
        y._data.content = content.astype(object)
    return y


@row("tf", "LinSpace: * num | T Tidx", kinds=FLOATS, num=as_sizes)
def lin_space(start: Tensor, stop: Tensor, num: Any) -> Tensor:
    """Return evenly spaced numbers from `start` to `stop`, including both.

    Args:
        num: The number of numbers.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.lin_space(rg.asarray(0.0), rg.asarray(1.0), num=3)
    Tensor([0. , 0.5, 1. ], dtype=float32)
    """
    if forms.is_eager(start, stop):
        dtype = forms.dtype_of(start if is_tensor(start) else stop)
        return rg.linspace(float(start), float(stop), num, dtype=dtype)
    return defer(LIN_SPACE, (start, stop), {"num": num}, specs=(Spec((num,), start.dtype),))


linspace = lin_space


# -- matrices, masks -------------------------------------------------------------------------------


@written("tf")
def eye(num_rows, num_columns=None, batch_shape=None, dtype=dtypes.float32, name=None):
    """Return a matrix, or a batch of them, with ones on the diagonal.

    Args:
        num_rows: The number of rows, a number or a tensor of rank 0.
        num_columns: The number of columns, by default `num_rows`.
        batch_shape: The sizes of the leading axes.

    Returns:
        A tensor of the shape `(*batch_shape, num_rows, num_columns)`.

    Source: `tf.eye`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.eye(2, 3)))
    [[1. 0. 0.]
     [0. 1. 0.]]
    """
    rows, columns = as_sizes(num_rows), as_sizes(num_rows if num_columns is None else num_columns)
    eager = forms.is_eager(num_rows, num_columns)
    with forms.scope(name or "eye", num_rows, num_columns) as whole:
        if isinstance(rows, int) and isinstance(columns, int):
            matrix = np.eye(rows, columns, dtype=dtypes.to_numpy(dtype))
        else:
            on = math.equal(arrays.expand_dims(range(rows), 1), range(columns))
            matrix = math.cast(on, dtype, name=whole if batch_shape is None else "matrix")
        matrix = rg.asarray(matrix) if eager else forms.tensor(matrix, name=whole)
        if batch_shape is None:
            return matrix
        return arrays.broadcast_to(matrix, (*as_sizes(batch_shape), rows, columns), name=whole)


@written("tf")
def sequence_mask(lengths, maxlen=None, dtype=dtypes.bool, name=None):
    """Return, for each length n, a row with n Trues, then Falses up to `maxlen`.

    Args:
        lengths: A tensor or array of integers.
        maxlen: The length of the rows, by default the largest length.

    Returns:
        A tensor of the shape `(*lengths.shape, maxlen)`.

    A composition. Source: `tf.sequence_mask`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.sequence_mask([1, 3], dtype=tf.int32)))
    [[1 0 0]
     [1 1 1]]
    """
    with forms.scope(name or "SequenceMask", lengths) as whole:
        lengths = forms.tensor(lengths, name="lengths")
        last = reductions.reduce_max(lengths) if maxlen is None else maxlen
        row = range(forms.tensor(last, like=lengths), dtype=forms.dtype_of(lengths))
        return math.cast(math.less(row, arrays.expand_dims(lengths, -1)), dtype, name=whole)


@written("tf", "OneHot: * depth on_value off_value | T=dtype TI axis")
def one_hot(indices, depth, on_value=None, off_value=None, axis=None, dtype=None, name=None):
    """Return `on_value` at the index, `off_value` elsewhere, along a new axis.

    Args:
        indices: A tensor or array of integers. An index out of range makes a row of `off_value`.
        depth: The size of the new axis.
        on_value, off_value: Numbers, or tensors of rank 0, by default 1 and 0.
        axis: The index of the new axis, by default the last.
        dtype: The dtype of the result. By default the dtype of the values, or float32.

    Returns:
        A tensor with one more axis than the indices.

    Raises:
        DTypeError: on_value and off_value have different dtypes, and there is no `dtype`.

    Op type: `OneHot`. Source: `tf.one_hot`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.one_hot([1, 0], 3)))
    [[0. 1. 0.]
     [1. 0. 0.]]
    """
    on, off = 1 if on_value is None else on_value, 0 if off_value is None else off_value
    values = [v for v in (on_value, off_value) if v is not None and dtype is None]
    given = [_dtype_of(v) for v in values]
    out_dtype = _dtype(dtype) or [*given, np.dtype(np.float32)][0]
    if len(set(given)) > 1:
        raise DTypeError(f"one_hot: on_value and off_value have different dtypes: {given}")
    attrs = {"depth": as_sizes(depth), "axis": -1 if axis is None else axis}
    if not is_tensor(on) and not is_tensor(off):
        attrs |= {"on_value": on, "off_value": off, "dtype": out_dtype}
        return forms.one_op("OneHot", name or "one_hot", rg.one_hot, indices, **attrs)
    with forms.scope(name or "one_hot", indices, on, off) as whole:
        indices = forms.tensor(indices, name="indices", like=on if is_tensor(on) else off)
        hot = forms.one_op("OneHot", "hot", rg.one_hot, indices, dtype=np.dtype(bool), **attrs)
        on, off = [forms.tensor(v, out_dtype, like=indices) for v in (on, off)]
        return math.where(hot, on, off, name=whole)


def _count_axes(axes: AllAxes, dtype: dtypes.DTypeLike | None, name: str | None) -> Any:
    """Return the indices of all axes."""
    return range(0, arrays.rank(axes.x), name=name or "range")


CONVERSIONS[AllAxes] = _count_axes
__all__ = listed(__name__, "fill linspace")
