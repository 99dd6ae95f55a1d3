"""Recurrent networks: `tf.nn.dynamic_rnn` and `tf.nn.static_rnn`."""

from __future__ import annotations

from typing import Any

from regrad.core import containers
from regrad.core.tensor import TensorLike
from regrad.errors import ArgumentError, GraphError, ShapeError
from regrad.v1 import dtypes
from regrad.v1.functions import creation, math
from regrad.v1.functions.arrays import shape, transpose
from regrad.v1.functions.loops import leaves_of, over
from regrad.v1.graph.control import loop_node
from regrad.v1.graph.conversion import convert_to_tensor
from regrad.v1.graph.regions import spec_of
from regrad.v1.graph.tensors import Tensor
from regrad.v1.training.rnn_cell import RNNCell
from regrad.v1.training.variable_scopes import VariableScope, variable_scope

__all__ = ["dynamic_rnn", "static_rnn"]


def dynamic_rnn(
    cell: RNNCell, inputs: Any, sequence_length: TensorLike = None, initial_state: Any = None,
    dtype: dtypes.DTypeLike | None = None, parallel_iterations: int | None = None,
    swap_memory: bool = False, time_major: bool = False,
    scope: str | VariableScope | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Run a cell over time, in a loop of the graph.

    Args:
        cell: A cell.
        inputs: A tensor of shape `(batch, time, ...)`, or a container of them. The sizes after
            time must be known.
        sequence_length: The length of each sequence in the batch. After its end the output is 0
            and the state stays as it is.
        initial_state: The first state, by default zeros.
        dtype: The dtype of the zeros, if `initial_state` is None.
        time_major: Whether inputs and outputs have the shape `(time, batch, ...)`.
        scope: The variable scope, by default `rnn`.
        parallel_iterations, swap_memory: Without effect.

    Returns:
        The outputs, in the structure of the cell's output, and the last state.

    Raises:
        ArgumentError: cell is not a cell.
        GraphError: both `initial_state` and `dtype` are missing, or a size of the inputs is
            unknown, or the cell changes the structure of the state.
        ShapeError: sequence_length is not a vector.

    Source: `tf.nn.dynamic_rnn`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default():
    ...     x = tf.placeholder(tf.float32, [None, None, 4])
    ...     y, h = tf.nn.dynamic_rnn(tf.nn.rnn_cell.GRUCell(3), x, [5, 2], dtype=tf.float32)
    ...     print(y.shape, h.shape)
    (?, ?, 3) (?, 3)
    """
    with variable_scope(scope or "rnn"):
        leaves, close = containers.flatten(over(convert_to_tensor, inputs))
        xs = leaves if time_major else [_turned(x) for x in leaves]
        for x in xs:
            if x.shape.ndims is None or None in x.shape.as_list()[2:]:
                raise GraphError(f"Input size (depth of inputs) must be known, but saw {x}")
        state, length = _start(cell, xs[0], 1, initial_state, dtype, sequence_length)
        start, again = containers.flatten(state)

        def body(carries: Any, entries: Any) -> Any:
            time, *rows = entries
            y, after = _step(cell, close(rows), again(carries), time, length)
            ys, close_ys = containers.flatten(y)
            return [*leaves_of(after), *ys], close_ys

        along = [creation.range(shape(xs[0])[0]), *xs]
        specs = [spec_of(x._read()) for x in start]
        found, close_ys = loop_node("while", None, body, start, specs, along)
        ys = found[len(start) :]
        return close_ys(ys if time_major else map(_turned, ys)), again(found[: len(start)])


def static_rnn(
    cell: RNNCell, inputs: Any, initial_state: Any = None, dtype: dtypes.DTypeLike | None = None,
    sequence_length: TensorLike = None, scope: str | VariableScope | None = None,
) -> tuple[list[Any], Any]:  # fmt: skip
    """Run a cell over a list of inputs, one for each time step, as separate ops.

    Args:
        cell: A cell.
        inputs: A list of tensors of shape `(batch, ...)`, or of containers of them.
        initial_state: The first state, by default zeros.
        dtype: The dtype of the zeros, if `initial_state` is None.
        sequence_length: The length of each sequence in the batch. After its end the output is 0
            and the state stays as it is.
        scope: The variable scope, by default `rnn`.

    Returns:
        The list of outputs, and the last state.

    Raises:
        ArgumentError: cell is not a cell, or inputs is not a list.
        GraphError: inputs is empty, both `initial_state` and `dtype` are missing, or the cell
            changes the structure of the state.
        ShapeError: sequence_length is not a vector.

    Source: `tf.nn.static_rnn`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default():
    ...     xs = tf.unstack(tf.ones([2, 5, 4]), axis=1)
    ...     ys, h = tf.nn.static_rnn(tf.nn.rnn_cell.BasicRNNCell(3), xs, dtype=tf.float32)
    ...     print(len(ys), h.shape)
    5 (2, 3)
    """
    if not isinstance(inputs, list | tuple):
        raise ArgumentError(f"inputs must be a sequence, got {inputs!r:.60}")
    if not inputs:
        raise GraphError("inputs must not be empty")
    with variable_scope(scope or "rnn") as varscope:
        first, ys = convert_to_tensor(leaves_of(inputs[0])[0]), []
        state, length = _start(cell, first, 0, initial_state, dtype, sequence_length)
        for time, x in enumerate(inputs):
            y, state = _step(cell, x, state, time, length)
            ys.append(y)
            varscope.reuse_variables()
        return ys, state


def _start(
    cell: Any, x: Tensor, axis: int, state: Any, dtype: dtypes.DTypeLike | None, length: Any
) -> tuple[Any, Any]:
    """Return the first state, and the lengths of the sequences."""
    if not hasattr(cell, "state_size"):
        raise ArgumentError(f"cell must be an RNNCell, got {cell!r:.60}")
    if length is not None:
        length = math.to_int32(convert_to_tensor(length))
        if length.shape.ndims not in (1, None):
            raise ShapeError(f"sequence_length must be a vector of length batch_size, got {length}")
    if state is not None:
        return over(convert_to_tensor, state), length
    if dtype is None:
        raise GraphError("If there is no initial_state, you must give a dtype.")
    known = x.shape.as_list()[axis]
    return cell.zero_state(shape(x)[axis] if known is None else known, dtype), length


def _step(cell: RNNCell, x: Any, state: Any, time: Any, length: Tensor | None) -> tuple[Any, Any]:
    """Return the output and the next state, for the sequences that have not ended."""
    y, after = cell(x, state)
    before, found = containers.opened(state)[2], containers.opened(after)[2]
    if before != found:
        raise GraphError(f"the cell must keep the structure of its state {before}, got {found}")
    if length is None:
        return y, after
    over_now = length <= time
    blank = over(creation.zeros_like, y)
    choose = lambda old, new: new if new.shape.ndims == 0 else math.where(over_now, old, new)  # noqa: E731
    return over(choose, blank, y), over(choose, state, after)


def _turned(x: Tensor) -> Tensor:
    """Return a tensor with its first two axes exchanged."""
    return transpose(x, [1, 0, *range(2, x.shape.ndims or 2)])
