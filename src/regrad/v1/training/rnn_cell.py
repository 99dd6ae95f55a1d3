"""`tf.nn.rnn_cell`: the cells of recurrent networks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from zlib import crc32

from regrad.core import containers
from regrad.core.tensor import TensorLike
from regrad.errors import ArgumentError, GraphError
from regrad.v1 import dtypes
from regrad.v1.functions import arrays, creation, linalg, math, nn, random_ops
from regrad.v1.functions.loops import leaves_of, over
from regrad.v1.graph.conversion import convert_to_tensor
from regrad.v1.graph.static_shapes import TensorShape
from regrad.v1.graph.tensors import Tensor
from regrad.v1.graph.variables import Variable
from regrad.v1.training.initializers import Initial, Ones, Zeros
from regrad.v1.training.variable_scopes import Scoped, VariableScope, get_variable, variable_scope

Function = Callable[[Any], Any] | None
Activation = Function | str  # or its name in `tf.nn`
DType = dtypes.DTypeLike | None


class LSTMStateTuple(NamedTuple):
    """The state of an LSTM cell: the memory `c` and the output `h`.

    Source: `tf.nn.rnn_cell.LSTMStateTuple`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default():
    ...     print(tf.nn.rnn_cell.LSTMCell(3).state_size)
    LSTMStateTuple(c=3, h=3)
    """

    c: Any
    h: Any

    @property
    def dtype(self) -> dtypes.DType:
        """The dtype of both tensors."""
        return self.c.dtype


class RNNCell(Scoped):
    """A cell, which maps an input and a state to an output and the next state.

    Derived classes define `state_size`, `output_size`, and either `call(inputs, state)` or
    `__call__(inputs, state, scope=None)`. They may make variables in `build(inputs_shape)` with
    `add_variable`, or in `call` with `tf.get_variable`. The variables are in the scope `name`, by
    default the name of the class in lower case (`my_cell`), and a cell has the same variables at
    each call.

    Args:
        trainable: Whether optimizers change the variables.
        name: The name of the cell's variable scope.
        dtype: The dtype of the variables, by default the dtype of the first input.

    Source: `tf.nn.rnn_cell.RNNCell`.

    >>> import regrad.v1 as tf
    >>> class Sum(tf.nn.rnn_cell.RNNCell):
    ...     state_size = output_size = 2
    ...     def call(self, inputs, state):
    ...         return inputs + state, inputs + state
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     y, last = tf.nn.dynamic_rnn(Sum(), tf.ones([1, 3, 2]), dtype=tf.float32)
    ...     print(sess.run(last))
    [[3. 3.]]
    """

    trainable: bool = True
    built: bool = False
    dtype: Any = None
    _name: str | None = None
    _reuse: Any = None

    def __init__(
        self, trainable: bool = True, name: str | None = None, dtype: DType = None,
        _reuse: bool | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.trainable, self._name, self.dtype, self._reuse = trainable, name, dtype, _reuse

    @property
    def name(self) -> str:
        """The name of the cell's variable scope."""
        words = re.sub("(.)([A-Z][a-z0-9]+)", r"\1_\2", type(self).__name__.lstrip("_"))
        return self._name or re.sub("([a-z])([A-Z])", r"\1_\2", words).lower()

    @property
    def state_size(self) -> Any:
        """The size of the state, or a container of sizes."""
        raise NotImplementedError("a cell must define state_size and output_size")

    @property
    def output_size(self) -> Any:
        """The size of the output, or a container of sizes."""
        raise NotImplementedError("a cell must define state_size and output_size")

    def __call__(
        self, inputs: Any, state: Any, scope: str | VariableScope | None = None, **options: Any
    ) -> tuple[Any, Any]:
        inputs, reuse = over(convert_to_tensor, inputs), True if self.built else self._reuse
        named = self._scope or scope or (self.name if reuse else None)
        with variable_scope(named, self.name, reuse=reuse) as opened:
            self._scope = self._scope or opened
            if not self.built:
                self.dtype = self.dtype or leaves_of(inputs)[0].dtype
                self.build(over(lambda x: x.shape, inputs))
            found = self.call(inputs, state, **options)
            self.built = True
        return found

    def build(self, inputs_shape: Any) -> None:
        """Make the variables, for inputs of this shape. By default there are none."""

    def call(self, inputs: Any, state: Any) -> tuple[Any, Any]:
        """Return the output and the next state."""
        raise NotImplementedError("a cell must define call(inputs, state)")

    def add_variable(
        self, name: str, shape: Any, dtype: DType = None, initializer: Initial = None,
        trainable: bool | None = None, **options: Any,
    ) -> Variable:  # fmt: skip
        """Return a variable of the cell."""
        trained = self.trainable if trainable is None else trainable
        return get_variable(name, shape, dtype or self.dtype, initializer, trainable=trained)

    add_weight = add_variable

    def zero_state(self, batch_size: TensorLike, dtype: dtypes.DTypeLike) -> Any:
        """Return a state of zeros for a batch."""

        def zero(size: Any) -> Tensor:
            sizes = [size] if isinstance(size, int) else TensorShape(size).as_list()
            return creation.zeros([batch_size, *sizes], dtype)

        return over(zero, self.state_size)


class _Linear(RNNCell):
    """A cell with kernels and biases."""

    def __init__(
        self, num_units: int, activation: Activation = None, reuse: bool | None = None,
        name: str | None = None, dtype: DType = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(name=name, dtype=dtype, _reuse=reuse, **options)
        self._num_units = num_units
        own = getattr(nn, activation) if isinstance(activation, str) else activation
        self._activation: Any = own or nn.tanh

    state_size: Any = property(lambda self: self._num_units)
    output_size: Any = property(lambda self: self._num_units)

    def _weigh(
        self, xs: list[Any], size: int, scope: str = "", kernel: Initial = None,
        bias: Initial = None,
    ) -> Tensor:  # fmt: skip
        """Return the kernel times the joined tensors, plus the bias."""
        joined = arrays.concat(xs, 1)
        weights = self.add_variable(f"{scope}kernel", [joined.shape[-1], size], None, kernel)
        added = self.add_variable(f"{scope}bias", [size], None, bias or Zeros())
        return nn.bias_add(linalg.matmul(joined, weights), added)


class BasicRNNCell(_Linear):
    """A cell whose output and state are `activation(kernel [inputs, state] + bias)`.

    Args:
        num_units: The size of the output and of the state.
        activation: A function, by default tanh.
        reuse: Whether the variables exist already.
        name: The name of the variable scope, by default `basic_rnn_cell`.
        dtype: The dtype of the variables.

    Source: `tf.nn.rnn_cell.BasicRNNCell`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default():
    ...     y, h = tf.nn.rnn_cell.BasicRNNCell(3)(tf.ones([2, 4]), tf.zeros([2, 3]))
    ...     print(y.shape, [v.name for v in tf.trainable_variables()])
    (2, 3) ['basic_rnn_cell/kernel:0', 'basic_rnn_cell/bias:0']
    """

    def call(self, inputs: Any, state: Any) -> tuple[Any, Any]:
        y = self._activation(self._weigh([inputs, state], self._num_units))
        return y, y


class GRUCell(_Linear):
    """A gated recurrent unit: `h' = u h + (1 - u) activation(kernel [inputs, r h] + bias)`.

    The gates r and u are sigmoids of `kernel [inputs, h] + bias`.

    Args:
        num_units: The size of the output and of the state.
        activation: A function, by default tanh.
        reuse: Whether the variables exist already.
        kernel_initializer: The initializer of the kernels.
        bias_initializer: The initializer of the biases, by default 1 for the gates and 0 for the
            candidate.
        name: The name of the variable scope, by default `gru_cell`.
        dtype: The dtype of the variables.

    Source: Cho et al. 2014; `tf.nn.rnn_cell.GRUCell`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default():
    ...     y, h = tf.nn.rnn_cell.GRUCell(3)(tf.ones([2, 4]), tf.zeros([2, 3]))
    ...     print([v.name for v in tf.trainable_variables()][1::2])
    ['gru_cell/gates/bias:0', 'gru_cell/candidate/bias:0']
    """

    def __init__(
        self, num_units: int, activation: Activation = None, reuse: bool | None = None,
        kernel_initializer: Initial = None, bias_initializer: Initial = None,
        name: str | None = None, dtype: DType = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(num_units, activation, reuse, name, dtype, **options)
        self._initial = kernel_initializer, bias_initializer

    def call(self, inputs: Any, state: Any) -> tuple[Any, Any]:
        n, (kernel, bias) = self._num_units, self._initial
        first: Any = bias or Ones()
        gates = math.sigmoid(self._weigh([inputs, state], 2 * n, "gates/", kernel, first))
        r, u = arrays.split(gates, 2, 1)
        c = self._activation(self._weigh([inputs, r * state], n, "candidate/", kernel, bias))
        h = u * state + (1 - u) * c
        return h, h


class LSTMCell(_Linear):
    """A long short-term memory: `c' = f c + i j` and `h' = o activation(c')`.

    The gates i, f and o are sigmoids, and j has the activation, of `kernel [inputs, h] + bias`.
    The columns of the kernel are in the order i, j, f, o.

    Args:
        num_units: The size of the memory.
        use_peepholes: Whether the gates also see c, by the variables `w_f_diag`, `w_i_diag` and
            `w_o_diag`.
        cell_clip: A bound for the absolute values of c.
        initializer: The initializer of the kernels and the peepholes.
        num_proj: The size of the output, if a kernel projects it.
        proj_clip: A bound for the absolute values of the projected output.
        num_unit_shards, num_proj_shards: Without effect.
        forget_bias: A number added to the argument of f.
        state_is_tuple: Whether the state is an LSTMStateTuple. If not, c and h are one tensor.
        activation: A function, by default tanh.
        reuse: Whether the variables exist already.
        name: The name of the variable scope, by default `lstm_cell`.
        dtype: The dtype of the variables.

    Source: Hochreiter & Schmidhuber 1997; `tf.nn.rnn_cell.LSTMCell`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default():
    ...     cell = tf.nn.rnn_cell.LSTMCell(3)
    ...     y, state = cell(tf.ones([2, 4]), cell.zero_state(2, tf.float32))
    ...     print([(v.name, v.shape.as_list()) for v in cell.variables])
    [('lstm_cell/kernel:0', [7, 12]), ('lstm_cell/bias:0', [12])]
    """

    def __init__(
        self, num_units: int, use_peepholes: bool = False, cell_clip: float | None = None,
        initializer: Initial = None, num_proj: int | None = None, proj_clip: float | None = None,
        num_unit_shards: int | None = None, num_proj_shards: int | None = None,
        forget_bias: float = 1.0, state_is_tuple: bool = True, activation: Activation = None,
        reuse: bool | None = None, name: str | None = None, dtype: DType = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(num_units, activation, reuse, name, dtype, **options)
        self._peepholes, self._initial, self._num_proj = use_peepholes, initializer, num_proj
        self._clips, self._forget_bias = (cell_clip, proj_clip), forget_bias
        self._is_tuple = state_is_tuple

    output_size: Any = property(lambda self: self._num_proj or self._num_units)

    @property
    def state_size(self) -> Any:
        """The sizes of c and h, or their sum if the state is one tensor."""
        sizes = LSTMStateTuple(self._num_units, self.output_size)
        return sizes if self._is_tuple else sum(sizes)

    def call(self, inputs: Any, state: Any) -> tuple[Any, Any]:
        n, sizes = self._num_units, [self._num_units, self.output_size]
        c, h = state if self._is_tuple else arrays.split(state, sizes, 1)
        gates = self._weigh([inputs, h], 4 * n, "", self._initial)
        i, j, f, o = arrays.split(gates, 4, 1)

        def look(x: Any, gate: str, c: Any) -> Any:
            if not self._peepholes:
                return x
            return x + c * self.add_variable(f"w_{gate}_diag", [n], None, self._initial)

        forget, enter = math.sigmoid(look(f + self._forget_bias, "f", c)), look(i, "i", c)
        c = forget * c + math.sigmoid(enter) * self._activation(j)
        c = _clipped(c, self._clips[0])
        h = math.sigmoid(look(o, "o", c)) * self._activation(c)
        if self._num_proj is not None:
            shape = [n, self._num_proj]
            h = linalg.matmul(h, self.add_variable("projection/kernel", shape, None, self._initial))
            h = _clipped(h, self._clips[1])
        return h, LSTMStateTuple(c, h) if self._is_tuple else arrays.concat([c, h], 1)


def _clipped(x: Tensor, bound: float | None) -> Tensor:
    return x if bound is None else math.clip_by_value(x, -bound, bound)


class BasicLSTMCell(LSTMCell):
    """An LSTM cell without clipping, projection and peepholes.

    Args:
        num_units: The size of the memory and of the output.
        forget_bias: A number added to the argument of the forget gate.
        state_is_tuple: Whether the state is an LSTMStateTuple. If not, c and h are one tensor.
        activation: A function, by default tanh.
        reuse: Whether the variables exist already.
        name: The name of the variable scope, by default `basic_lstm_cell`.
        dtype: The dtype of the variables.

    Source: Zaremba et al. 2014; `tf.nn.rnn_cell.BasicLSTMCell`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default():
    ...     x = tf.placeholder(tf.float32, [None, 5, 4])
    ...     y, state = tf.nn.dynamic_rnn(tf.nn.rnn_cell.BasicLSTMCell(3), x, dtype=tf.float32)
    ...     print(y.shape, tf.trainable_variables()[0].name)
    (?, 5, 3) rnn/basic_lstm_cell/kernel:0
    """

    def __init__(
        self, num_units: int, forget_bias: float = 1.0, state_is_tuple: bool = True,
        activation: Activation = None, reuse: bool | None = None, name: str | None = None,
        dtype: DType = None, **options: Any,
    ) -> None:  # fmt: skip
        options |= {"activation": activation, "reuse": reuse, "name": name, "dtype": dtype}
        own = {"forget_bias": forget_bias, "state_is_tuple": state_is_tuple}
        super().__init__(num_units, **own, **options)


class MultiRNNCell(RNNCell):
    """Several cells, of which each has the output of the cell before as its input.

    Args:
        cells: The cells, in order.
        state_is_tuple: Whether the state is a tuple. If not, the states are one tensor.

    Raises:
        GraphError: there are no cells.
        ArgumentError: cells is not a list or tuple.

    Source: `tf.nn.rnn_cell.MultiRNNCell`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default():
    ...     cells = [tf.nn.rnn_cell.BasicRNNCell(n) for n in (3, 2)]
    ...     y, states = tf.nn.dynamic_rnn(
    ...         tf.nn.rnn_cell.MultiRNNCell(cells), tf.ones([1, 5, 4]), dtype=tf.float32)
    ...     print(y.shape, tf.trainable_variables()[2].name)
    (1, 5, 2) rnn/multi_rnn_cell/cell_1/basic_rnn_cell/kernel:0
    """

    def __init__(self, cells: Sequence[RNNCell], state_is_tuple: bool = True) -> None:
        if not isinstance(cells, list | tuple):
            raise ArgumentError(f"cells must be a list or tuple, but saw: {cells!r:.60}")
        if not cells:
            raise GraphError("Must specify at least one cell for MultiRNNCell.")
        super().__init__()
        self._cells, self._is_tuple = cells, state_is_tuple

    output_size: Any = property(lambda self: self._cells[-1].output_size)

    @property
    def state_size(self) -> Any:
        """The sizes of the states of the cells."""
        sizes = tuple([cell.state_size for cell in self._cells])
        return sizes if self._is_tuple else sum(sizes)

    def call(self, inputs: Any, state: Any) -> tuple[Any, Any]:
        sizes = [cell.state_size for cell in self._cells]
        states, after = state if self._is_tuple else arrays.split(state, sizes, 1), []
        for i, (cell, own) in enumerate(zip(self._cells, states, strict=True)):
            with variable_scope(f"cell_{i}"):
                inputs, found = cell(inputs, own)
            after.append(found)
        return inputs, tuple(after) if self._is_tuple else arrays.concat(after, 1)


class DropoutWrapper(RNNCell):
    """A cell with dropout of its inputs, its outputs and its state.

    Args:
        cell: The cell.
        input_keep_prob, output_keep_prob, state_keep_prob: The probabilities to keep an element, as
            numbers or tensors. The dropout of the state does not apply to the `c` of an LSTM.
        variational_recurrent: Whether all steps of a run drop the same elements.
        input_size: The sizes of the inputs, which variational dropout of inputs needs.
        dtype: The dtype, which variational dropout needs.
        seed: The seed of the random numbers.
        dropout_state_filter_visitor: A function of a part of the state. It returns True if dropout
            applies, or a bool for each component of the part.

    Raises:
        GraphError: a probability is not in (0, 1], or variational dropout lacks `dtype` or
            `input_size`.

    Source: Gal & Ghahramani 2016; `tf.nn.rnn_cell.DropoutWrapper`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     inner = tf.nn.rnn_cell.BasicRNNCell(3)
    ...     cell = tf.nn.rnn_cell.DropoutWrapper(inner, output_keep_prob=0.5, seed=1)
    ...     y, h = cell(tf.ones([2, 4]), tf.zeros([2, 3]))
    ...     print(y.shape, [v.name for v in tf.trainable_variables()])
    (2, 3) ['basic_rnn_cell/kernel:0', 'basic_rnn_cell/bias:0']
    """

    def __init__(
        self, cell: RNNCell, input_keep_prob: TensorLike = 1.0, output_keep_prob: TensorLike = 1.0,
        state_keep_prob: TensorLike = 1.0, variational_recurrent: bool = False,
        input_size: Any = None, dtype: DType = None, seed: int | None = None,
        dropout_state_filter_visitor: Callable[[Any], Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(dtype=dtype)
        self._cell, self._seed, self._varies = cell, seed, not variational_recurrent
        self._filter = dropout_state_filter_visitor or _spares_memory
        kept = input_keep_prob, output_keep_prob, state_keep_prob
        self._keep: dict[str, Any] = dict(zip(("input", "output", "state"), kept, strict=True))
        for name, keep in self._keep.items():
            if isinstance(keep, int | float) and not 0 < keep <= 1:
                raise GraphError(f"Parameter {name}_keep_prob must be in (0, 1], got {keep}")
        if variational_recurrent:
            if dtype is None or (input_size is None and input_keep_prob != 1.0):
                raise GraphError("variational_recurrent=True needs dtype and input_size")
            sizes = {"input": input_size, "output": cell.output_size, "state": cell.state_size}
            self._noise: dict[str, Any] = {
                key: [random_ops.random_uniform([1, n], dtype=dtype, seed=self._salted(key, i))
                      for i, n in enumerate(leaves_of(size))]
                for key, size in sizes.items() if size is not None
            }  # fmt: skip

    state_size: Any = property(lambda self: self._cell.state_size)
    output_size: Any = property(lambda self: self._cell.output_size)
    _scope: Any = property(lambda self: self._cell._scope)

    def __call__(
        self, inputs: Any, state: Any, scope: str | VariableScope | None = None, **options: Any
    ) -> tuple[Any, Any]:
        dropped = self._dropped("input", over(convert_to_tensor, inputs))
        y, after = self._cell(dropped, state, scope=scope, **options)
        flags = _flags(self._filter, after)
        return self._dropped("output", y), self._dropped("state", after, flags)

    def _dropped(self, which: str, value: Any, flags: list[bool] | None = None) -> Any:
        keep: Any = self._keep[which]
        if isinstance(keep, int | float) and keep >= 1:
            return value

        leaves, close = containers.flatten(value)
        for i, x in enumerate(leaves):
            if flags is None or flags[i]:
                if self._varies:
                    leaves[i] = nn.dropout(x, keep, seed=self._salted(which, i))
                else:
                    leaves[i] = x / keep * math.floor(self._noise[which][i] + keep)
        return close(leaves)

    def _salted(self, which: str, index: int) -> int | None:
        return None if self._seed is None else crc32(f"{self._seed}{which}{index}".encode()) >> 1


def _spares_memory(state: Any) -> Any:
    """Return True, and for the state of an LSTM True for `h` alone."""
    return LSTMStateTuple(c=False, h=True) if isinstance(state, LSTMStateTuple) else True


def _flags(visit: Callable[[Any], Any], state: Any) -> list[bool]:
    """Return for each tensor of a state whether dropout applies to it."""
    found = visit(state)
    if not isinstance(state, list | tuple):
        return [bool(found)]
    each = [found] * len(state) if isinstance(found, bool) else list(found)
    parts = [_flags(visit, part) if on else [False] * len(leaves_of(part))
             for part, on in zip(state, each, strict=True)]  # fmt: skip
    return [flag for part in parts for flag in part]
