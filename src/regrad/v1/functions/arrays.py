"""Shapes of tensors, reshaping, joining, splitting and blocks, under TensorFlow's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import regrad as rg
from regrad.core import numbers
from regrad.core.dims import Dim, is_known
from regrad.core.op import TensorLike
from regrad.errors import AxisError, GraphError, ShapeError
from regrad.graph.size_ops import shape_tensor
from regrad.shapes.infer import shape_of as shape_form
from regrad.shapes.sizes import broadcast
from regrad.v1 import dtypes
from regrad.v1.functions.math import cast
from regrad.v1.functions.reductions import reduce_prod
from regrad.v1.graph.conversion import as_sizes, constant, convert_to_tensor
from regrad.v1.graph.forms import axes_of, dtype_of, is_eager, one_op, rank_of, scope, shape_of
from regrad.v1.graph.forms import tensor as as_tensor
from regrad.v1.graph.graphs import current_graph
from regrad.v1.graph.kinds import ANY
from regrad.v1.graph.rows import define, listed, row, written
from regrad.v1.graph.static_shapes import ShapeLike, TensorShape
from regrad.v1.graph.tensors import CONVERSIONS, IndexedSlices, is_tensor
from regrad.v1.graph.values import mirrored, of_rank

# -- identity --------------------------------------------------------------------------------------


identity = define("tf.identity(input)", "Identity", rg.identity, ANY, "[1.0, 2.0]", "[1., 2.]")


@row("tf", "Identity: * | T", rg.identity, scope="GuaranteeConst")
def guarantee_const(input):
    """Return x unchanged, as an op whose gradient can be overridden.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.guarantee_const(rg.asarray([1.0, 2.0]))
    Tensor([1., 2.], dtype=float32)
    """


@row("tf", "StopGradient", rg.stop_gradient)
def stop_gradient(input):
    """Return x as a constant: no gradient flows back through it.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.stop_gradient(rg.asarray([1.0, 2.0]))
    Tensor([1., 2.], dtype=float32)
    """


@rg.op("IdentityN")
def _identities(xp: Any, xs: Sequence[rg.Tensor], /) -> tuple[rg.Tensor, ...]:
    """Return the tensors unchanged."""
    return tuple(xs)


rg.gradient("IdentityN", "xs")(lambda dy: list(dy))
shape_form("IdentityN")(lambda arguments, attrs: list(arguments[0]))


@written("tf", "IdentityN: * | T=Tin")
def identity_n(input: Sequence[TensorLike], name: str | None = None) -> list[Any]:
    """Return a list of tensors unchanged, as the outputs of one op.

    Args:
        input: Tensors or arrays.

    Returns:
        A list of tensors of the same shapes and dtypes.

    Raises:
        DTypeError: an entry cannot become a tensor.

    Op type: `IdentityN`. Source: `tf.identity_n`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.identity_n([tf.constant(1.0), tf.constant(2)])))
    [1.0, 2]
    """
    return list(one_op("IdentityN", name, lambda *xs: _identities(xs), *input, same=False))


@written("tf")
def convert_to_tensor_or_indexed_slices(value, dtype=None, name=None):
    """Return a value as a tensor. IndexedSlices are returned unchanged.

    Args:
        value: Any argument of `tf.convert_to_tensor`, or IndexedSlices.

    Returns:
        A tensor or IndexedSlices.

    Source: `tf.convert_to_tensor_or_indexed_slices`.

    >>> with tf.Graph().as_default():
    ...     rows = tf.IndexedSlices(tf.constant([[1.0]]), tf.constant([0]))
    ...     print(tf.convert_to_tensor_or_indexed_slices(rows) is rows)
    True
    """
    return value if isinstance(value, IndexedSlices) else as_tensor(value, dtype, name)


# -- shapes ----------------------------------------------------------------------------------------


@written("tf", "Shape: * | T out_type")
def shape(input, name=None, out_type=dtypes.int32):
    """Return the shape as a vector of integers. A static shape becomes a constant.

    Args:
        input: A tensor or array, or a number.
        out_type: The dtype of the result.

    Returns:
        A tensor of rank 1.

    Op type: `Shape`. Source: `tf.shape`.

    >>> with tf.Graph().as_default():
    ...     known = tf.shape(tf.zeros([2, 3]))
    ...     late = tf.shape(tf.placeholder(tf.float32, [None, 3]))
    >>> known.op.type, late.op.type
    ('Const', 'Shape')
    """
    x, out_dtype, name = as_tensor(input), dtypes.to_numpy(out_type), name or "Shape"
    if is_known(known := shape_of(x)):
        return _constant(np.asarray(known, out_dtype), name, x)
    if out_dtype == np.int32:
        return one_op("Shape", name, shape_tensor, x)
    with scope(name) as whole:
        return cast(one_op("Shape", "Shape", shape_tensor, x), out_dtype, name=whole)


def _constant(value: np.ndarray, name: str, like: TensorLike) -> Any:
    """Return a value as a constant of the graph, or as an eager Tensor if `like` is one."""
    return rg.asarray(value) if is_eager(like) else constant(value, name=name)


def rank(input: TensorLike, name: str | None = None) -> Any:
    """Return the number of axes.

    Args:
        input: A tensor or array, or a number.

    Returns:
        An int32 tensor of rank 0, which is a constant if the rank is known in the graph.

    Source: `tf.rank`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.rank(tf.zeros([2, 3]))))
    2
    """
    x, name = as_tensor(input), name or "Rank"
    if (known := rank_of(x)) is not None:
        return _constant(np.asarray(known, np.int32), name, x)
    with scope(name) as whole:
        return reshape(shape(shape(x)), [], name=whole)


@written("tf")
def size(input, name=None, out_type=dtypes.int32):
    """Return the number of elements.

    Args:
        input: A tensor or array, or a number.
        out_type: The dtype of the result.

    Returns:
        A tensor of rank 0, which is a constant if the shape is known in the graph.

    Source: `tf.size`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.size(tf.zeros([2, 3]))))
    6
    """
    x, name = as_tensor(input), name or "Size"
    if is_known(known := shape_of(x)):
        return _constant(np.asarray(np.prod(known, dtype=int), dtypes.to_numpy(out_type)), name, x)
    with scope(name) as whole:
        return reduce_prod(shape(x, out_type=out_type), name=whole)


def dimension_tensor(size: int | Dim, name: str = "dimension") -> Any:
    """Return a size, even one known only in the run, as an int32 tensor of rank 0."""
    if not isinstance(size, Dim):
        return constant(int(size), dtypes.int32, name=name)
    with current_graph().name_scope(name) as whole:
        lined = one_op("BroadcastTo", "line", rg.broadcast_to, np.int32(0), shape=(size,))
        return reshape(shape(lined), [], name=whole)


def broadcast_static_shape(shape_x: ShapeLike, shape_y: ShapeLike) -> TensorShape:
    """Return the static shape to which two shapes broadcast.

    Args:
        shape_x, shape_y: TensorShapes, or lists of sizes.

    Returns:
        A TensorShape.

    Raises:
        ShapeError: the shapes do not broadcast.

    Source: `tf.broadcast_static_shape`.

    >>> print(tf.broadcast_static_shape([2, 1], [3]))
    (2, 3)
    """
    return TensorShape(broadcast(TensorShape(shape_x)._sizes, TensorShape(shape_y)._sizes))


# -- reshaping -------------------------------------------------------------------------------------


@row("tf", "Reshape: * shape | T Tshape", rg.reshape)
def reshape(tensor, shape):
    """Return x with another shape of the same size.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.reshape(rg.asarray([[1, 2], [3, 4]]), shape=[-1])
    Tensor([1, 2, 3, 4], dtype=int64)
    """


@row("tf", "ExpandDims: * dim=axis | T Tdim")
def expand_dims(input, axis=None, name=None, dim=None):
    """Return the input with a new axis of size 1.

    Args:
        axis: The index of the new axis. A negative index counts from the end.

    Returns:
        A tensor of the same elements, with one more axis.

    Raises:
        GraphError: the axis is missing.
        AxisError: the axis is out of range.

    >>> with tf.Graph().as_default():
    ...     print(tf.expand_dims(tf.zeros([2, 3]), 1).shape)
    (2, 1, 3)
    """
    if axis is None:
        raise GraphError("Must specify an axis argument to tf.expand_dims()")
    return rg.expand_dims(input, axis)


def _squeezed(axis: TensorLike) -> Any:
    return None if (axes := axes_of(axis)) == () else axes


@row("tf", "Squeeze: * | T squeeze_dims", rg.squeeze, axis=_squeezed)
def squeeze(input, axis=None, name=None, squeeze_dims=None):
    """Return the input without its axes of size 1, or without the axes in `axis`.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.squeeze(rg.asarray([[1.0], [2.0]]))
    Tensor([1., 2.], dtype=float32)
    """


@row("tf", "Transpose: * perm | T Tperm", scope="transpose", perm=axes_of)
def transpose(a, perm=None, name=None, conjugate=False):
    """Return the tensor with its axes in the order `perm`, by default reversed.

    Args:
        perm: The axes in their new order.
        conjugate: Conjugate the elements too.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.transpose(rg.asarray([[1, 2], [3, 4]]))
    Tensor([[1, 3],
            [2, 4]], dtype=int64)
    """
    return rg.permute_dims(rg.conj(a) if conjugate else a, perm)


@row("tf", "BroadcastTo: * shape | T Tidx", rg.broadcast_to)
def broadcast_to(input, shape):
    """Return x repeated along axes of size 1 and new leading axes.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.broadcast_to(rg.asarray([1, 2]), shape=[2, 2])
    Tensor([[1, 2],
            [1, 2]], dtype=int64)
    """


@row("tf", "Tile: * multiples=repetitions | T Tmultiples", multiples=as_sizes)
def tile(input, multiples):
    """Return the input repeated along each axis.

    Args:
        input: A tensor or array.
        multiples: The number of repetitions, one number for each axis.

    Returns:
        A tensor of the input's rank and dtype.

    Raises:
        ShapeError: `multiples` does not have one number per axis.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.tile([1, 2], [2])))
    [1 2 1 2]
    """
    if not isinstance(multiples, tuple) or rank_of(input) not in (None, len(multiples)):
        raise ShapeError(f"tile: expected one multiple per axis of {input}, got {multiples}")
    return rg.tile(of_rank("tile", input, len(multiples)), multiples)


@row("tf", "ReverseV2: * axis=all_axes | T Tidx", rg.flip)
def reverse(tensor, axis):
    """Return the tensor with its elements reversed along a list of axes.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.reverse(rg.asarray([1, 2, 3]), axis=[0])
    Tensor([3, 2, 1], dtype=int64)
    """


reverse_v2 = reverse


@row("tf", "Roll: * shift axis | T Tshift Taxis", rg.roll, shift=as_sizes)
def roll(input, shift, axis):
    """Return the input with its elements shifted along axes.

    Elements that leave at one end enter at the other end.

    Args:
        shift: The number of places, or a list with a number for each axis.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.roll(rg.asarray([1, 2, 3]), shift=1, axis=0)
    Tensor([3, 1, 2], dtype=int64)
    """


@written("tf", "MirrorPad: * paddings | T mode Tpaddings")
def pad(tensor, paddings, mode="CONSTANT", name=None, constant_values: TensorLike = 0):
    """Return the tensor with elements added along each axis.

    Args:
        tensor: A tensor or array.
        paddings: Pairs (before, after), one for each axis.
        mode: "CONSTANT", "REFLECT" (mirrors without the edge) or "SYMMETRIC" (mirrors with it).
        constant_values: The number that "CONSTANT" adds.

    Returns:
        A tensor of the same rank and dtype.

    Raises:
        GraphError: the mode is unknown.
        ShapeError: the paddings do not fit the shape.

    Op types: `PadV2`, `MirrorPad`. Source: `tf.pad`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     y, mirrored = tf.pad([1, 2, 3], [[1, 1]]), tf.pad([1, 2, 3], [[1, 1]], "REFLECT")
    ...     print(sess.run(y), sess.run(mirrored))
    [0 1 2 3 0] [2 1 2 3 2]
    """
    if mode.upper() not in ("CONSTANT", "REFLECT", "SYMMETRIC"):
        raise GraphError(f"Unknown padding mode: {mode}")
    x, op_type = as_tensor(tensor), "PadV2" if mode.upper() == "CONSTANT" else "MirrorPad"
    value, pairs = numbers.under(constant_values, dtype_of(x)).item(), as_sizes(paddings)
    if not all(map(_is_padding, pairs)) or rank_of(x) not in (None, len(pairs)):
        raise ShapeError(
            f"pad: expected a pair (before, after) of 0 or more per axis of {x}, got {paddings}"
        )
    attrs = {"paddings": pairs, "mode": mode.lower(), "constant_value": value}
    return one_op(op_type, name or op_type.removesuffix("V2"), _pad, x, **attrs)


def _is_padding(pair: Any) -> bool:
    if not isinstance(pair, tuple) or len(pair) != 2:
        return False
    return not any(isinstance(n, int) and n < 0 for n in pair)


def _pad(x: TensorLike, paddings: Any, mode: str, constant_value: Any) -> Any:
    x = of_rank("pad", x, len(paddings))
    x = x if mode == "constant" else mirrored(x, paddings, mode)
    return rg.pad(x, paddings, mode, constant_value)


# -- joining and splitting -------------------------------------------------------------------------


@written("tf", "ConcatV2: * axis | N T Tidx")
def concat(values: TensorLike, axis: TensorLike, name: str = "concat") -> Any:
    """Return tensors of one dtype joined along an existing axis.

    Args:
        values: Tensors or arrays. Their shapes may differ only in the size of that axis.
        axis: The axis. It must be known when the graph is built.

    Returns:
        A tensor of their rank and dtype.

    Raises:
        ShapeError: the shapes do not fit, or the arguments are in the wrong order.

    Op type: `ConcatV2`. Source: `tf.concat`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.concat([[1, 2], [3]], 0)))
    [1 2 3]
    """
    if isinstance(axis, list | tuple):
        raise ShapeError("concat takes the tensors first and then the axis: tf.concat([a, b], 1)")
    values = values if isinstance(values, list | tuple) else [values]
    if not values:
        raise ShapeError("concat: expected at least one tensor, got an empty list")
    if len(values) == 1:
        return identity(values[0], name=name)
    return one_op("ConcatV2", name, lambda *xs: rg.concat(xs, axis=axes_of(axis)), *values)


@written("tf", "Pack: * | N T axis")
def stack(values: TensorLike, axis: int = 0, name: str = "stack") -> Any:
    """Return tensors of one shape and dtype joined along a new axis.

    Args:
        values: Tensors or arrays. A single tensor, not in a list, is returned unchanged.
        axis: The index of the new axis.

    Returns:
        A tensor with one more axis.

    Raises:
        ShapeError: the shapes differ.

    Op type: `Pack`. Source: `tf.stack`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.stack([[1, 2], [3, 4]], axis=1)))
    [[1 3]
     [2 4]]
    """
    if axis == 0 and (is_tensor(values) or not len(values)):
        return as_tensor(values, name=name)
    return one_op("Pack", name, lambda *xs: rg.stack(xs, axis=axes_of(axis)), *values)


@row("tf", "Unpack: * | num T axis")
def unstack(value, num=None, axis=0, name="unstack"):
    """Return the slices along an axis as a list. The slices do not have this axis.

    Args:
        num: The size of the axis, needed only if the size is unknown.

    Raises:
        ShapeError: the size is not `num`, or the axis does not exist.
        GraphError: the size is unknown, and `num` is None.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.unstack(rg.asarray([1, 2]))
    [Tensor(1, dtype=int64), Tensor(2, dtype=int64)]
    """
    if num is not None and rank_of(value) is None:
        return [rg.squeeze(part, axis) for part in rg.split(value, (1,) * num, axis)]
    sizes = list(value.shape)
    if not -len(sizes) <= axis < len(sizes):
        raise AxisError(f"unstack: axis {axis} is out of range for the shape {value.shape}")
    if num is not None and isinstance(sizes[axis], Dim):
        sizes[axis] = num
        value = rg.reshape(value, tuple(sizes))
    if num not in (None, sizes[axis]):
        raise ShapeError(f"unstack: num is {num}, but axis {axis} has the size {sizes[axis]}")
    return list(rg.unstack(value, axis=axis))


@row("tf", "Split", num_or_size_splits=as_sizes, num=None)
def split(value, num_or_size_splits, axis=0, num=None, name="split"):
    """Return the parts of a tensor along an axis, as a list.

    Args:
        num_or_size_splits: The number of equal parts, or a list of sizes. One size may be -1.

    Raises:
        ShapeError: the size of the axis is not the sum of the parts.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.split(rg.asarray([1, 2, 3]), num_or_size_splits=[1, -1])
    [Tensor([1], dtype=int64), Tensor([2, 3], dtype=int64)]
    """
    return list(rg.split(value, num_or_size_splits, axis=axis))


def meshgrid(*args: TensorLike, indexing: str = "xy", name: str = "meshgrid") -> list[Any]:
    """Return the coordinate tensors of the grid that the vectors span.

    Args:
        *args: Tensors or arrays of rank 1.
        indexing: "xy" (with the first two axes swapped) or "ij".

    Returns:
        A list of tensors of the grid's shape, one for each vector.

    Raises:
        DTypeError: the dtypes differ.

    A composition. Source: `tf.meshgrid`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print([x.tolist() for x in sess.run(tf.meshgrid([1, 2], [3, 4]))])
    [[[1, 2], [1, 2]], [[3, 3], [4, 4]]]
    """
    return list(one_op(None, name, rg.meshgrid, *args, indexing=indexing))


# -- blocks ----------------------------------------------------------------------------------------


TO_BATCH = "SpaceToBatchND: * block_shape paddings | T Tblock_shape Tpaddings"


@row("tf", TO_BATCH, rg.nn.space_to_batch)
def space_to_batch_nd(input, block_shape, paddings):
    """Move blocks of the axes after the first to the batch axis, and return the tensor.

    Args:
        block_shape: The sizes of a block, one for each axis to cut.
        paddings: Pairs (before, after) of zeros to add to these axes first.

    Returns:
        A tensor whose batch size is the input's batch size times the number of elements of a
        block.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.space_to_batch_nd(rg.asarray([[1, 2, 3, 4]]), block_shape=[2], paddings=[[0, 0]])
    Tensor([[1, 3],
            [2, 4]], dtype=int64)
    """


@row("tf", "BatchToSpaceND: * block_shape crops | T Tblock_shape Tcrops", rg.nn.batch_to_space)
def batch_to_space_nd(input, block_shape, crops):
    """Move parts of the batch axis to blocks of the axes after it, and return the tensor.

    Args:
        block_shape: The sizes of a block, one for each axis that grows.
        crops: Pairs (before, after) of elements to cut off these axes last.

    Returns:
        A tensor whose batch size is the input's batch size divided by the number of elements of a
        block.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.batch_to_space_nd(rg.asarray([[1, 3], [2, 4]]), block_shape=[2], crops=[[0, 0]])
    Tensor([[1, 2, 3, 4]], dtype=int64)
    """


@written("tf")
def space_to_batch(input, paddings, block_size: int, name=None):
    """Move square blocks of images to the batch axis, like `space_to_batch_nd`.

    Args:
        input: A tensor of the shape (batch, height, width, channels).
        paddings: Two pairs (before, after) of zeros, for height and width.
        block_size: The height and width of a block.

    Returns:
        A tensor whose batch size is multiplied by the square of the block size.

    Op type: `SpaceToBatchND`. Source: `tf.space_to_batch`.

    >>> with tf.Graph().as_default():
    ...     print(tf.space_to_batch(tf.zeros([1, 4, 6, 3]), [[0, 0], [0, 0]], 2).shape)
    (4, 2, 3, 3)
    """
    return space_to_batch_nd(input, [block_size] * 2, paddings, name or "SpaceToBatch")


@written("tf")
def batch_to_space(input, crops, block_size: int, name=None):
    """Move the batch axis back to square blocks of images, like `batch_to_space_nd`.

    Args:
        input: A tensor of the shape (batch, height, width, channels).
        crops: Two pairs (before, after) of elements to cut off, for height and width.
        block_size: The height and width of a block.

    Returns:
        A tensor whose batch size is divided by the square of the block size.

    Op type: `BatchToSpaceND`. Source: `tf.batch_to_space`.

    >>> with tf.Graph().as_default():
    ...     print(tf.batch_to_space(tf.zeros([4, 2, 3, 3]), [[0, 0], [0, 0]], 2).shape)
    (1, 4, 6, 3)
    """
    return batch_to_space_nd(input, [block_size] * 2, crops, name or "BatchToSpace")


@row("tf", None, block_size=int, data_format=None, deferred=True)
def space_to_depth(input, block_size, name=None, data_format="NHWC"):
    """Move square blocks of images to the channels.

    Args:
        input: A tensor of the shape (batch, height, width, channels).
        block_size: The height and width of a block, which divide the sizes of the image.

    Returns:
        A tensor with the square of the block size as many channels.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.space_to_depth(rg.asarray([[[[1], [2]], [[3], [4]]]]), 2)
    Tensor([[[[1, 2, 3, 4]]]], dtype=int64)
    """
    n, height, width, channels = input.shape
    k = block_size
    x = rg.reshape(input, (n, height // k, k, width // k, k, channels))
    x = rg.permute_dims(x, (0, 1, 3, 2, 4, 5))
    return rg.reshape(x, (n, height // k, width // k, k * k * channels))


@row("tf", None, block_size=int, data_format=None, deferred=True)
def depth_to_space(input, block_size, name=None, data_format="NHWC"):
    """Move channels of images to square blocks, the inverse of `space_to_depth`.

    Args:
        input: A tensor of the shape (batch, height, width, channels).
        block_size: The height and width of a block. Its square divides the number of channels.

    Returns:
        A tensor with the block size times the height and the width.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.depth_to_space(rg.asarray([[[[1, 2, 3, 4]]]]), 2)
    Tensor([[[[1],
              [2]],
    <BLANKLINE>
             [[3],
              [4]]]], dtype=int64)
    """
    n, height, width, channels = input.shape
    k = block_size
    x = rg.reshape(input, (n, height, width, k, k, channels // (k * k)))
    x = rg.permute_dims(x, (0, 1, 3, 2, 4, 5))
    return rg.reshape(x, (n, height * k, width * k, channels // (k * k)))


# -- conversions to tensors that need ops --------------------------------------------------------


def _pack(values: Sequence[TensorLike], dtype: dtypes.DTypeLike | None, name: str | None) -> Any:
    """Stack a list that contains tensors into one tensor."""
    known = [v for v in values if is_tensor(v)]
    if dtype is None and known:
        dtype = convert_to_tensor(known[0]).dtype.base_dtype
    return stack([convert_to_tensor(v, dtype) for v in values], name=name or "packed")


def _size_tensor(size: Dim, dtype: dtypes.DTypeLike | None, name: str | None) -> Any:
    made = dimension_tensor(size, name or "dimension")
    return made if dtype is None else cast(made, dtype)


CONVERSIONS.update({Sequence: _pack, Dim: _size_tensor})
__all__ = listed(__name__, "broadcast_static_shape meshgrid rank reverse_v2")
