"""Joining and splitting Tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from regrad.core import dims, dispatch
from regrad.core.op import TensorLike, op
from regrad.core.registry import gradient
from regrad.core.shapes import normalized_axis, part_sizes
from regrad.core.tensor import Tensor
from regrad.errors import ArgumentError, ShapeError, kind
from regrad.graph.deferred import deferrable
from regrad.ops.array import reshape

# -- joining and splitting -----------------------------------------------------------------------


@op("ConcatV2", promotes=True)
def _concat(xp, xs: Sequence[TensorLike], /, *, axis: int) -> Tensor:
    rests = {(*x.shape[:axis], *x.shape[axis + 1 :]) for x in xs}
    if len(rests) > 1:
        raise ShapeError(
            f"concat: the shapes must agree except along axis {axis}, got "
            f"{', '.join(str(tuple(x.shape)) for x in xs)}"
        )
    return xp.concat(xs, axis=axis)


@gradient("ConcatV2", "xs")
def _(dy, xs_shape, axis):
    return split(dy, [shape[axis] for shape in xs_shape], axis=axis)


@deferrable
def concat(arrays: Sequence[Any], /, *, axis: int | None = 0) -> Tensor:
    """Return Tensors joined along an existing axis.

    Args:
        arrays: A list of Tensors or arrays whose shapes agree except along `axis`.
        axis: The axis. None joins the flattened arrays.

    Returns:
        A Tensor of the dtype to which the arrays promote.

    Raises:
        ArgumentError: `arrays` is not a list, or is empty.
        ShapeError: the ranks differ or are 0, or the sizes differ along another axis.
        AxisError: the arrays have no such axis.

    Op type: `ConcatV2`. Source: the Array API standard.

    >>> rg.concat([rg.tensor([1.0, 2.0]), rg.tensor([3.0])])
    Tensor([1., 2., 3.], dtype=float32)
    """
    xs = _lift_all("concat", arrays)
    if axis is None:
        return _concat([reshape(x, (-1,)) for x in xs], axis=0)
    if axis >= 0 and _are_unranked(xs):  # the kernel checks the ranks
        return _concat(xs, axis=axis)
    if len({x.ndim for x in xs}) > 1 or xs[0].ndim == 0:
        raise ShapeError(
            "concat: expected tensors of the same rank, 1 or more, got "
            f"{', '.join(str(x.shape) for x in xs)}. To join along a new axis use stack."
        )
    return _concat(xs, axis=normalized_axis(axis, xs[0].ndim))


def _lift_all(name: str, arrays: Sequence[TensorLike]) -> list[Tensor]:
    if not isinstance(arrays, list | tuple) or not arrays:
        raise ArgumentError(f"{name} expects a list of at least one Tensor, got {kind(arrays)}")
    return [dispatch.lift(a) for a in arrays]


def _are_unranked(xs: Sequence[Tensor]) -> bool:
    """Return whether a rank is known only in the run."""
    return any(isinstance(x._data.shape, dims.UnknownRank) for x in xs)


@op("Split")
def _split(xp, x: TensorLike, /, *, sizes: tuple[int, ...], axis: int) -> tuple[Tensor, ...]:
    axis = normalized_axis(axis, x.ndim)
    before, parts, start = (slice(None),) * axis, [], 0
    for size in sizes:
        parts.append(x[(*before, slice(start, start + size))])
        start += size
    if start != x.shape[axis]:
        raise ShapeError(
            f"split: the sizes {sizes} do not add up to the size {x.shape[axis]} of axis {axis}"
        )
    return tuple(parts)


gradient("Split")(lambda dy, axis: concat(dy, axis=axis))


@deferrable
def split(
    x: TensorLike, sections_or_sizes: int | tuple[int, ...] | list[int], /, axis: int = 0
) -> tuple[Tensor, ...]:
    """Return x split along an axis.

    Args:
        sections_or_sizes: The number of equal parts, or the sizes of the parts. One size may be -1;
            it is inferred from the others.
        axis: The axis.

    Returns:
        A tuple of Tensors of x's dtype.

    Raises:
        ShapeError: the parts are not equal, or the sizes do not add up to the size of the axis.

    Op type: `Split`. Source: `tf.split`.

    >>> [part.tolist() for part in rg.split(rg.tensor([1, 2, 3, 4]), [1, -1])]
    [[1.0], [2.0, 3.0, 4.0]]
    """
    x = dispatch.lift(x)
    if _are_unranked([x]):  # the number of parts is known regardless
        length: Any = dims.size_of(x._data, axis)
        return _split(x, sizes=part_sizes(sections_or_sizes, length), axis=axis)
    axis = normalized_axis(axis, x.ndim)
    return _split(x, sizes=part_sizes(sections_or_sizes, x.shape[axis]), axis=axis)


@op("Pack", promotes=True)
def _stack(xp, xs: Sequence[TensorLike], /, *, axis: int) -> Tensor:
    return xp.stack(xs, axis=axis)


gradient("Pack", "xs")(lambda dy, axis: unstack(dy, axis=axis))


@deferrable
def stack(arrays: Sequence[Any], /, *, axis: int = 0) -> Tensor:
    """Return Tensors of the same shape joined along a new axis.

    Args:
        arrays: A list of Tensors, arrays or numbers.
        axis: The position of the new axis in the result.

    Returns:
        A Tensor with one additional axis, of the dtype to which the arrays promote.

    Raises:
        ArgumentError: `arrays` is not a list, or is empty.
        ShapeError: the shapes differ.
        AxisError: `axis` is not a position in the result.

    Op type: `Pack`. Source: the Array API standard.

    >>> rg.stack([[1.0, 2.0], [3.0, 4.0]], axis=1).tolist()
    [[1.0, 3.0], [2.0, 4.0]]
    """
    xs = _lift_all("stack", arrays)
    if _are_unranked(xs):  # the kernel checks the shapes
        return _stack(xs, axis=axis)
    if any(dims.differ(x.shape, xs[0].shape) for x in xs):
        raise ShapeError(
            f"stack: all tensors must have one shape, got {', '.join(str(x.shape) for x in xs)}"
        )
    return _stack(xs, axis=normalized_axis(axis, xs[0].ndim + 1))


@op("Unpack")
def unstack(xp, x: TensorLike, /, *, axis: int = 0) -> tuple[Tensor, ...]:
    """Return the slices of x along an axis, without the axis.

    Returns:
        A tuple of Tensors of x's dtype.

    Source: the Array API standard.

    >>> [part.tolist() for part in rg.unstack(rg.tensor([[1, 2], [3, 4]]))]
    [[1.0, 2.0], [3.0, 4.0]]
    """
    axis = normalized_axis(axis, x.ndim)
    before = (slice(None),) * axis
    return tuple(x[(*before, i)] for i in range(x.shape[axis]))


gradient("Unpack")(lambda dy, axis: stack(dy, axis=axis))
