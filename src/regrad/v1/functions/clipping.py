"""Clipping by norms, as compositions: `tf.clip_by_norm`, `tf.clip_by_global_norm`, …"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from regrad.core.tensor import TensorLike
from regrad.errors import ArgumentError
from regrad.v1.functions import arrays, linalg, math, reductions
from regrad.v1.graph.forms import scope, tensor
from regrad.v1.graph.tensors import is_tensor

__all__ = ["clip_by_average_norm", "clip_by_global_norm", "clip_by_norm", "global_norm"]


def clip_by_norm(
    t: TensorLike, clip_norm: TensorLike, axes: TensorLike = None, name: str | None = None
) -> Any:
    """Return t, scaled down where its norm (over `axes`, by default all) exceeds `clip_norm`.

    Args:
        t: A tensor or array of floats.
        clip_norm: The largest norm, a positive number.
        axes: The axes of a norm: a number, or a list of numbers. By default all axes.

    Returns:
        A tensor of t's shape and dtype.

    A composition. Source: `tf.clip_by_norm`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.clip_by_norm(tf.constant([3.0, 4.0]), 1.0)))
    [0.6 0.8]
    """
    with scope(name or "clip_by_norm", t) as whole:
        t = tensor(t, name="t")
        return _clipped(t, clip_norm, linalg.norm(t, axis=axes, keepdims=True), whole)


def _clipped(t: TensorLike, clip_norm: TensorLike, length: TensorLike, name: str) -> Any:
    return math.divide(math.multiply(t, clip_norm), math.maximum(length, clip_norm), name=name)


def clip_by_average_norm(t: TensorLike, clip_norm: TensorLike, name: str | None = None) -> Any:
    """Return t, scaled down if its norm, divided by its number of elements, exceeds `clip_norm`.

    Args:
        t: A tensor or array of floats.
        clip_norm: The largest average, a positive number.

    Returns:
        A tensor of t's shape and dtype.

    A composition. Source: `tf.clip_by_average_norm`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.clip_by_average_norm(tf.constant([3.0, 4.0]), 0.5)))
    [0.6 0.8]
    """
    with scope(name or "clip_by_average_norm", t) as whole:
        t = tensor(t, name="t")
        average = math.divide(linalg.norm(t, keepdims=True), math.cast(arrays.size(t), t.dtype))
        return _clipped(t, clip_norm, average, whole)


def global_norm(t_list: Sequence[TensorLike], name: str | None = None) -> Any:
    """Return the norm of all tensors together.

    Args:
        t_list: Tensors or arrays of floats. Entries that are None are ignored.

    Returns:
        A tensor of rank 0.

    Raises:
        ArgumentError: t_list is not a list or tuple.

    A composition. Source: `tf.global_norm`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.global_norm([[3.0], None, [4.0]])))
    5.0
    """
    known = _known(t_list)
    like = next(filter(is_tensor, known), None)
    with scope(name or "global_norm", *known) as whole:
        sums = [reductions.reduce_sum(math.square(tensor(t, like=like))) for t in known]
        return math.sqrt(math.add_n(sums), name=whole)


def clip_by_global_norm(
    t_list: Sequence[TensorLike], clip_norm: TensorLike, use_norm: TensorLike = None,
    name: str | None = None,
) -> tuple[list[Any], Any]:  # fmt: skip
    """Return tensors, scaled down together if their `global_norm` exceeds `clip_norm`.

    If the norm is infinite or NaN, all tensors become NaN, so that the fault is visible.

    Args:
        t_list: Tensors or arrays of floats. Entries that are None stay None.
        clip_norm: The largest norm, a positive number.
        use_norm: The norm of the tensors, if it is already computed.

    Returns:
        The list of scaled tensors, and the norm before scaling.

    Raises:
        ArgumentError: t_list is not a list or tuple.

    A composition. Source: `tf.clip_by_global_norm`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     clipped, norm = tf.clip_by_global_norm([tf.constant([3.0]), tf.constant([4.0])], 1.0)
    ...     print(*sess.run(clipped), sess.run(norm))
    [0.6] [0.8] 5.0
    """
    known = _known(t_list)
    with scope(name or "clip_by_global_norm", *known):
        length = global_norm(known) if use_norm is None else tensor(use_norm)
        factor = math.divide(clip_norm, math.maximum(length, clip_norm))
        factor = math.add(factor, math.subtract(length, length))  # NaN where the norm is infinite
        return [None if t is None else math.multiply(t, factor) for t in t_list], length


def _known(tensors: Sequence[TensorLike]) -> list[Any]:
    """Return the entries of a list that are not None."""
    if not isinstance(tensors, list | tuple):
        raise ArgumentError(f"t_list should be a sequence, got {tensors!r:.60}")
    return [t for t in tensors if t is not None]
