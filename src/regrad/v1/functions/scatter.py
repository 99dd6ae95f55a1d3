"""Updates of some rows of a Variable: `tf.scatter_update`, `tf.scatter_add`, `tf.scatter_sub`."""

from __future__ import annotations

from typing import Any

from regrad.core.registry import OPS
from regrad.core.tensor import Readable, TensorLike
from regrad.graph.graph import NO_RULE
from regrad.graph.plan import PlanRun
from regrad.v1.functions.arrays import expand_dims, shape
from regrad.v1.functions.indexing import scatter_nd
from regrad.v1.graph.conversion import convert_to_tensor
from regrad.v1.graph.graphs import add_op
from regrad.v1.graph.tensors import face
from regrad.v1.graph.variables import read_state, state_op, variable_of

__all__ = ["scatter_add", "scatter_sub", "scatter_update"]


def _set_rows(run: PlanRun, ref: Any, indices: Any, updates: Any, key: str) -> Any:
    old = read_state(run, ref, key)
    kernel = OPS["TensorScatterUpdate"].kernels[type(old)]
    return run.write(key, kernel(old, indices, updates))


SCATTER = state_op("ScatterUpdate", _set_rows, "ref indices updates", "key")


def scatter_update(
    ref: Readable, indices: TensorLike, updates: TensorLike, use_locking: bool = True,
    name: str | None = None,
) -> Any:  # fmt: skip
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
    xs = [v._variable._tensor, expand_dims(indices, -1)._tensor, rows._tensor]
    spec = v._variable._symbol.spec
    return face(add_op(SCATTER, name or "ScatterUpdate", xs, {"key": v._key}, [spec], NO_RULE))


def scatter_add(
    ref: Readable, indices: TensorLike, updates: TensorLike, use_locking: bool = False,
    name: str | None = None,
) -> Any:  # fmt: skip
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


def scatter_sub(
    ref: Readable, indices: TensorLike, updates: TensorLike, use_locking: bool = False,
    name: str | None = None,
) -> Any:  # fmt: skip
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
    return scatter_nd(expand_dims(indices, -1), rows, shape(v))
