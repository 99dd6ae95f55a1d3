"""Recurrent networks: `tf.nn.dynamic_rnn`, `tf.nn.static_rnn`, and both in two directions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from regrad.core import containers
from regrad.core.tensor import TensorLike
from regrad.errors import ArgumentError, GraphError, ShapeError
from regrad.v1 import dtypes
from regrad.v1.functions import arrays, creation, math
from regrad.v1.functions.loops import leaves_of, over
from regrad.v1.graph.control import loop_node
from regrad.v1.graph.conversion import convert_to_tensor
from regrad.v1.graph.regions import spec_of
from regrad.v1.graph.tensors import Tensor
from regrad.v1.training.rnn_cell import RNNCell
from regrad.v1.training.variable_scopes import VariableScope, get_variable_scope, variable_scope

__all__ = [
    "bidirectional_dynamic_rnn", "dynamic_rnn", "static_bidirectional_rnn", "static_rnn",
]  # fmt: skip

DType = dtypes.DTypeLike | None
Scope = str | VariableScope | None


def dynamic_rnn(
    cell: RNNCell, inputs: Any, sequence_length: TensorLike = None, initial_state: Any = None,
    dtype: DType = None, parallel_iterations: int | None = None, swap_memory: bool = False,
    time_major: bool = False, scope: Scope = None,
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
    (2, ?, 3) (?, 3)
    """
    with variable_scope(scope or "rnn"):
        return _loop(cell, initial_state, inputs, dtype, sequence_length, time_major)


def static_rnn(
    cell: RNNCell, inputs: Any, initial_state: Any = None, dtype: DType = None,
    sequence_length: TensorLike = None, scope: Scope = None,
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
    with variable_scope(scope or "rnn"):
        return _unroll(cell, initial_state, inputs, dtype, sequence_length)


def bidirectional_dynamic_rnn(
    cell_fw: RNNCell, cell_bw: RNNCell, inputs: Any, sequence_length: TensorLike = None,
    initial_state_fw: Any = None, initial_state_bw: Any = None, dtype: DType = None,
    parallel_iterations: int | None = None, swap_memory: bool = False, time_major: bool = False,
    scope: Scope = None,
) -> tuple[tuple[Any, Any], tuple[Any, Any]]:  # fmt: skip
    """Run a cell over time and another cell backward over time, in loops of the graph.

    Args:
        cell_fw, cell_bw: The cells. The second cell starts at the end of each sequence.
        inputs: A tensor of shape `(batch, time, ...)`, or a container of them. The sizes after
            time must be known.
        sequence_length: The length of each sequence in the batch. After its end the outputs are 0.
        initial_state_fw, initial_state_bw: The first states, by default zeros.
        dtype: The dtype of the zeros.
        time_major: Whether inputs and outputs have the shape `(time, batch, ...)`.
        scope: The variable scope, by default `bidirectional_rnn`. The cells are in `fw` and `bw`.
        parallel_iterations, swap_memory: Without effect.

    Returns:
        The outputs of both cells, in the order of the inputs, and the last states of both cells.

    Raises:
        ArgumentError: a cell is not a cell.
        GraphError: a first state and `dtype` are missing, or a size of the inputs is unknown, or
            a cell changes the structure of the state.
        ShapeError: sequence_length is not a vector.

    Source: Schuster & Paliwal 1997; `tf.nn.bidirectional_dynamic_rnn`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default():
    ...     cells = [tf.nn.rnn_cell.BasicRNNCell(3) for _ in range(2)]
    ...     (y, z), last = tf.nn.bidirectional_dynamic_rnn(
    ...         *cells, tf.ones([2, 5, 4]), dtype=tf.float32)
    ...     print(z.shape, tf.trainable_variables()[2].name)
    (2, 5, 3) bidirectional_rnn/bw/basic_rnn_cell/kernel:0
    """
    loop = partial(_loop, inputs=inputs, dtype=dtype, length=sequence_length, time_major=time_major)
    first, second = (cell_fw, initial_state_fw), (cell_bw, initial_state_bw)
    (y, last), (z, last_bw) = _both_ways(scope, loop, first, second)
    return (y, z), (last, last_bw)


def static_bidirectional_rnn(
    cell_fw: RNNCell, cell_bw: RNNCell, inputs: Any, initial_state_fw: Any = None,
    initial_state_bw: Any = None, dtype: DType = None, sequence_length: TensorLike = None,
    scope: Scope = None,
) -> tuple[list[Any], Any, Any]:  # fmt: skip
    """Run a cell over a list of inputs and another cell backward over the list, as separate ops.

    Args:
        cell_fw, cell_bw: The cells. The second cell starts at the end of each sequence.
        inputs: A list of tensors of shape `(batch, ...)`, or of containers of them.
        initial_state_fw, initial_state_bw: The first states, by default zeros.
        dtype: The dtype of the zeros.
        sequence_length: The length of each sequence in the batch. After its end the outputs are 0.
        scope: The variable scope, by default `bidirectional_rnn`. The cells are in `fw` and `bw`.

    Returns:
        The list of the outputs of both cells, joined along the axis 1, and the last states.

    Raises:
        ArgumentError: a cell is not a cell, or inputs is not a list.
        GraphError: inputs is empty, a first state and `dtype` are missing, or a cell changes the
            structure of the state.
        ShapeError: sequence_length is not a vector.

    Source: Schuster & Paliwal 1997; `tf.nn.static_bidirectional_rnn`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default():
    ...     xs = tf.unstack(tf.ones([2, 5, 4]), axis=1)
    ...     cells = [tf.nn.rnn_cell.BasicRNNCell(3) for _ in range(2)]
    ...     ys, *last = tf.nn.static_bidirectional_rnn(*cells, xs, dtype=tf.float32)
    ...     print(len(ys), ys[0].shape)
    5 (2, 6)
    """
    unroll = partial(_unroll, inputs=inputs, dtype=dtype, length=sequence_length)
    first, second = (cell_fw, initial_state_fw), (cell_bw, initial_state_bw)
    (y, last), (z, last_bw) = _both_ways(scope, unroll, first, second)
    both = [over(lambda *ab: arrays.concat(ab, 1), *pair) for pair in zip(y, z, strict=True)]
    return both, last, last_bw


def _both_ways(scope: Scope, run: Callable[..., Any], first: Any, second: Any) -> Any:
    """Return the results of `run` of two cells, of which the second goes backward."""
    with variable_scope(scope or "bidirectional_rnn"):
        with variable_scope("fw"):
            forward = run(*first)
        with variable_scope("bw"):
            return forward, run(*second, backward=True)


def _loop(
    cell: RNNCell, state: Any, inputs: Any, dtype: DType, length: Any, time_major: bool,
    backward: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """Return the outputs and the last state of a loop of the graph."""
    leaves, close = containers.flatten(over(convert_to_tensor, inputs))
    xs = leaves if time_major else [_turned(x) for x in leaves]
    for x in xs:
        if x.shape.ndims is None or None in x.shape.as_list()[2:]:
            raise GraphError(f"Input size (depth of inputs) must be known, but saw {x}")
    state, length = _start(cell, xs[0], 1, state, dtype, length)
    start, again = containers.flatten(state)

    def body(carries: Any, entries: Any) -> Any:
        time, *rows = entries
        y, after = _step(cell, close(rows), again(carries), time, length)
        ys, close_ys = containers.flatten(y)
        return [*leaves_of(after), *ys], close_ys

    ordered = (lambda x: arrays.reverse(x, [0])) if backward else (lambda x: x)
    along = [ordered(x) for x in (creation.range(arrays.shape(xs[0])[0]), *xs)]
    specs = [spec_of(x._read()) for x in start]
    found, close_ys = loop_node("while", None, body, start, specs, along)
    ys = [ordered(y) for y in found[len(start) :]]
    return close_ys(ys if time_major else map(_turned, ys)), again(found[: len(start)])


def _unroll(
    cell: RNNCell, state: Any, inputs: Any, dtype: DType, length: Any, backward: bool = False
) -> tuple[list[Any], Any]:
    """Return the outputs and the last state of steps as separate ops."""
    if not isinstance(inputs, list | tuple):
        raise ArgumentError(f"inputs must be a sequence, got {inputs!r:.60}")
    if not inputs:
        raise GraphError("inputs must not be empty")
    first, ys = convert_to_tensor(leaves_of(inputs[0])[0]), [None] * len(inputs)
    state, length = _start(cell, first, 0, state, dtype, length)
    for time in range(len(inputs))[:: -1 if backward else 1]:
        ys[time], state = _step(cell, inputs[time], state, time, length)
        get_variable_scope().reuse_variables()
    return ys, state


def _start(
    cell: Any, x: Tensor, axis: int, state: Any, dtype: DType, length: Any
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
    return cell.zero_state(arrays.shape(x)[axis] if known is None else known, dtype), length


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
    return arrays.transpose(x, [1, 0, *range(2, x.shape.ndims or 2)])
