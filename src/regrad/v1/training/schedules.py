"""The global step, learning rate schedules, and moving averages of variables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

import regrad as rg
from regrad.core.tensor import Readable, TensorLike
from regrad.errors import ArgumentError, DTypeError, GraphError
from regrad.v1 import dtypes
from regrad.v1.functions import creation, reductions
from regrad.v1.functions import math as tf_math
from regrad.v1.graph.control import group
from regrad.v1.graph.conversion import build, constant, convert_to_tensor
from regrad.v1.graph.graphs import Graph, GraphKeys, current_graph, get_default_graph
from regrad.v1.graph.rows import TENSOR, listed, row, written
from regrad.v1.graph.tensors import Operation, Runs, Tensor, is_tensor
from regrad.v1.graph.variables import Variable, global_variables, trainable_variables
from regrad.v1.training.variable_scopes import get_variable

Number = float | np.ndarray | Readable

# -- the global step ------------------------------------------------------------------------------


def get_global_step(graph: Graph | None = None) -> Any:
    """Return the variable that counts the steps of a graph, or None.

    Args:
        graph: The graph, by default the default graph.

    Returns:
        The Variable in the collection GLOBAL_STEP, else the Variable named `global_step`, else
        None.

    Raises:
        GraphError: several variables are in the collection.

    Source: `tf.train.get_global_step`.

    >>> with tf.Graph().as_default():
    ...     print(tf.train.get_global_step())
    None
    """
    graph = graph or get_default_graph()
    found = graph.get_collection(GraphKeys.GLOBAL_STEP)
    if len(found) > 1:
        raise GraphError(f"{len(found)} variables are in the collection {GraphKeys.GLOBAL_STEP!r}")
    if found:
        return found[0]
    node = graph.by_name.get("global_step")
    return None if node is None else graph.view_of(node).variable


def create_global_step(graph: Graph | None = None) -> Variable:
    """Return a new int64 variable `global_step`, which starts at 0.

    Args:
        graph: The graph, by default the default graph.

    Returns:
        A Variable, in the collections GLOBAL_VARIABLES and GLOBAL_STEP. It is not trainable.

    Raises:
        GraphError: the graph already has a global step. The error is a ValueError.

    Source: `tf.train.create_global_step`.

    >>> with tf.Graph().as_default():
    ...     print(tf.train.create_global_step() is tf.train.get_global_step())
    True
    """
    graph = graph or get_default_graph()
    if get_global_step(graph) is not None:
        raise GraphError('"global_step" already exists.')
    with graph.as_default(), graph.name_scope(None):
        name, keys = GraphKeys.GLOBAL_STEP, [GraphKeys.GLOBAL_VARIABLES, GraphKeys.GLOBAL_STEP]
        return get_variable(name, None, dtypes.int64, 0, trainable=False, collections=keys)


def get_or_create_global_step(graph: Graph | None = None) -> Any:
    """Return the variable that counts the steps, and make it if needed.

    Args:
        graph: The graph, by default the default graph.

    Returns:
        The Variable; see `create_global_step`.

    Raises:
        GraphError: several variables are in the collection GLOBAL_STEP.

    Source: `tf.train.get_or_create_global_step`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     step = tf.train.get_or_create_global_step()
    ...     w = tf.Variable(1.0)
    ...     train = tf.train.GradientDescentOptimizer(0.1).minimize(w * w, global_step=step)
    ...     sess.run(tf.global_variables_initializer())
    ...     sess.run(train)
    ...     print(tf.train.global_step(sess, step))
    1
    """
    found = get_global_step(graph)
    return create_global_step(graph) if found is None else found


def global_step(sess: Runs, global_step_tensor: TensorLike) -> int:
    """Return the value of a global step in a session.

    Args:
        sess: The session.
        global_step_tensor: The Variable, or a tensor.

    Returns:
        An int.

    Raises:
        tf.errors.FailedPreconditionError: the variable is not initialized.

    Source: `tf.train.global_step`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     step = tf.train.create_global_step()
    ...     sess.run(step.initializer)
    ...     print(tf.train.global_step(sess, step))
    0
    """
    return int(sess.run(global_step_tensor))


def assert_global_step(global_step_tensor: TensorLike) -> None:
    """Raise TypeError unless this is a scalar of integers.

    Args:
        global_step_tensor: The Variable, or a tensor.

    Raises:
        ArgumentError: the tensor has another dtype or rank. The error is a TypeError.

    Source: `tf.train.assert_global_step`.

    >>> with tf.Graph().as_default():
    ...     tf.train.assert_global_step(tf.constant(0))
    """
    step = convert_to_tensor(global_step_tensor)
    if not step.dtype.is_integer or step.shape.ndims not in (0, None):
        raise ArgumentError(f"a global step is a scalar of integers, got {step}")


# -- learning rate schedules ----------------------------------------------------------------------


def _decay(_: None, name: str, formula: Any, rate: Any, *steps: Any, **options: Any) -> Tensor:
    """Call a formula of tensors of the rate's dtype. Its last op has the name of the scope."""
    if steps[0] is None:
        raise GraphError(f"global_step is required for {formula.__name__}.")
    with current_graph().name_scope(name) as scope:
        rate = convert_to_tensor(rate, name="learning_rate")
        dtype = rate.dtype.base_dtype
        if not dtype.is_floating:
            raise DTypeError(f"{formula.__name__}: the learning rate is a float, got {rate}")
        last, *xs = formula(rate, *[_as_number(x, dtype) for x in steps], **options)
        return last(*xs, name=scope)


def _as_number(value: Number, dtype: dtypes.DType) -> Any:
    return tf_math.cast(value, dtype) if is_tensor(value) else constant(value, dtype)


def _periods(step: TensorLike, steps: TensorLike, staircase: bool) -> Any:
    return tf_math.floor(step / steps) if staircase else step / steps


_schedule = partial(row, "tf.train", call=_decay, returns="Tensor")


@_schedule(scope="ExponentialDecay")
def exponential_decay(learning_rate, global_step, decay_steps, decay_rate: Any, staircase=False):
    """Return `learning_rate * decay_rate ** (global_step / decay_steps)`.

    Args:
        decay_steps: The number of steps after which the rate is multiplied by `decay_rate`.
        decay_rate: The factor.

    Returns:
        A tensor of the dtype of the learning rate.

    Raises:
        DTypeError: the learning rate is not a float.
        GraphError: `global_step` is None.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     step = tf.placeholder(tf.int32, [])
    ...     rate = tf.train.exponential_decay(1.0, step, 10, 0.5)
    ...     print([sess.run(rate, {step: n}) for n in (0, 10, 20)])
    [1.0, 0.5, 0.25]
    """
    power = decay_rate ** _periods(global_step, decay_steps, staircase)
    return tf_math.multiply, learning_rate, power


@_schedule(scope="NaturalExpDecay")
def natural_exp_decay(learning_rate, global_step, decay_steps, decay_rate: Any, staircase=False):
    """Return `learning_rate * exp(-decay_rate * global_step / decay_steps)`.

    Args:
        decay_steps: The number of steps that form one unit of decay.
        decay_rate: The exponent per `decay_steps`.

    Returns:
        A tensor of the dtype of the learning rate.

    Raises:
        DTypeError: the learning rate is not a float.
        GraphError: `global_step` is None.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     rate = tf.train.natural_exp_decay(1.0, 19, 10, 2.0, staircase=True)
    ...     print(f"{sess.run(rate):.4f}")  # exp(-2)
    0.1353
    """
    exponent = -decay_rate * _periods(global_step, decay_steps, staircase)
    return tf_math.multiply, learning_rate, tf_math.exp(exponent)


@_schedule(scope="InverseTimeDecay")
def inverse_time_decay(learning_rate, global_step, decay_steps, decay_rate: Any, staircase=False):
    """Return `learning_rate / (1 + decay_rate * global_step / decay_steps)`.

    Args:
        decay_steps: The number of steps that form one unit of decay.
        decay_rate: The increase of the denominator per `decay_steps`.

    Returns:
        A tensor of the dtype of the learning rate.

    Raises:
        DTypeError: the learning rate is not a float.
        GraphError: `global_step` is None.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     step = tf.placeholder(tf.int32, [])
    ...     rate = tf.train.inverse_time_decay(1.0, step, 10, 1.0)
    ...     print([sess.run(rate, {step: n}) for n in (0, 10, 30)])
    [1.0, 0.5, 0.25]
    """
    grown = 1.0 + decay_rate * _periods(global_step, decay_steps, staircase)
    return tf_math.divide, learning_rate, grown


@_schedule(scope="PolynomialDecay", end_learning_rate=TENSOR, power=TENSOR)
def polynomial_decay(
    learning_rate: Any, global_step: Any, decay_steps: Any, end_learning_rate=0.0001, power=1.0,
    cycle=False,
):  # fmt: skip
    """Return a rate that falls from `learning_rate` to `end_learning_rate` in `decay_steps`.

    The rate is `(learning_rate - end) * (1 - global_step / decay_steps) ** power + end`, and `end`
    after `decay_steps`.

    Args:
        decay_steps: The number of steps to the end.
        end_learning_rate: The rate at the end.
        power: The exponent. 1 is a straight line.
        cycle: Raise the rate again after `decay_steps`, by extending `decay_steps` to the next
            multiple of it above `global_step`.

    Returns:
        A tensor of the dtype of the learning rate.

    Raises:
        DTypeError: the learning rate is not a float.
        GraphError: `global_step` is None.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     step = tf.placeholder(tf.int32, [])
    ...     rate = tf.train.polynomial_decay(1.0, step, 10, 0.5)
    ...     print([sess.run(rate, {step: n}) for n in (0, 5, 10, 15)])
    [1.0, 0.75, 0.5, 0.5]
    """
    step, steps, end = global_step, decay_steps, end_learning_rate
    if cycle:  # the maximum makes step 0 a part of the first cycle
        steps = steps * tf_math.maximum(tf_math.ceil(step / steps), 1.0)
    else:
        step = tf_math.minimum(step, steps)
    return tf_math.add, (learning_rate - end) * (1.0 - step / steps) ** power, end


@_schedule(scope="CosineDecay", alpha=TENSOR)
def cosine_decay(learning_rate, global_step, decay_steps, alpha=0.0):
    """Return a rate that falls along half a cosine wave, to `alpha * learning_rate`.

    Args:
        decay_steps: The number of steps to the end. After them the rate is constant.
        alpha: The final rate as a fraction of the initial rate.

    Returns:
        A tensor of the dtype of the learning rate.

    Raises:
        DTypeError: the learning rate is not a float.
        GraphError: `global_step` is None.

    Source: Loshchilov and Hutter, "SGDR: stochastic gradient descent
    with warm restarts", 2016 (arXiv:1608.03983).

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     step = tf.placeholder(tf.int32, [])
    ...     rate = tf.train.cosine_decay(1.0, step, 10)
    ...     print([f"{sess.run(rate, {step: n}):.2f}" for n in (0, 5, 10)])
    ['1.00', '0.50', '0.00']
    """
    done = tf_math.minimum(global_step, decay_steps) / decay_steps
    wave = 0.5 * (1.0 + tf_math.cos(math.pi * done))
    return tf_math.multiply, learning_rate, (1.0 - alpha) * wave + alpha


@written("tf.train")
def piecewise_constant(x, boundaries, values, name=None) -> Tensor:
    """Return the value of the piece that contains x.

    Args:
        x: The number of completed steps: a tensor, Variable or number.
        boundaries: The last x of each piece but the last, in increasing order. They are numbers or
            tensors of x's dtype.
        values: The values of the pieces, one more than boundaries. They are numbers or tensors of
            one dtype.

    Returns:
        A tensor of the dtype of the values.

    Raises:
        GraphError: the number of values is not the number of boundaries plus one. The error is a
            ValueError.
        DTypeError: an argument cannot become a tensor, or a boundary has another dtype than x.

    Source: `tf.train.piecewise_constant`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     step = tf.placeholder(tf.int32, [])
    ...     rate = tf.train.piecewise_constant(step, [10, 20], [1.0, 0.5, 0.1])
    ...     print([sess.run(rate, {step: n}) for n in (10, 11, 21)])
    [1.0, 0.5, 0.1]
    """
    if len(boundaries) != len(values) - 1:
        wrong = f"{len(boundaries)} and {len(values)}"
        raise GraphError(f"boundaries should have 1 less than values, got {wrong}")
    with current_graph().name_scope(name or "PiecewiseConstant") as scope:
        x = convert_to_tensor(x)
        rates: Any = convert_to_tensor(list(values), name="values")
        if not boundaries:
            return rates[0]
        limits = convert_to_tensor(list(boundaries), x.dtype.base_dtype, name="boundaries")
        passed = reductions.reduce_sum(tf_math.cast(tf_math.greater(x, limits), dtypes.int32))
        return build("GatherV2", scope, lambda rates, i: rg.take(rates, i, axis=0), rates, passed)


# -- moving averages ------------------------------------------------------------------------------


class ExponentialMovingAverage:
    """Moving averages of variables with exponential decay.

    Each update is `average -= (1 - decay) * (average - variable)`.

    Args:
        decay: The weight of the past, a number or a tensor.
        num_updates: A step count. With it the decay is at most
            `(1 + num_updates) / (10 + num_updates)`, so that averages move faster at first.
        zero_debias: Must be False. True raises ArgumentError, which names an alternative.
        name: The name of the scope. The name of an average is its variable's name and this name.

    Source: `tf.train.ExponentialMovingAverage`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     v = tf.Variable(0.0)
    ...     ema = tf.train.ExponentialMovingAverage(0.75)
    ...     update = ema.apply([v])
    ...     sess.run(tf.global_variables_initializer())
    ...     v.load(8.0, sess)
    ...     sess.run(update)
    ...     print(sess.run(ema.average(v)), ema.average(v).op.name)
    2.0 Variable/ExponentialMovingAverage
    """

    name: str  # of the scope. The names of averages end with it.

    def __init__(
        self, decay: Number, num_updates: Number | None = None, zero_debias: bool = False,
        name: str = "ExponentialMovingAverage",
    ) -> None:  # fmt: skip
        if zero_debias:
            raise ArgumentError(
                "zero_debias=True is not supported: divide an average by 1 - decay ** updates"
            )
        self._decay = decay
        self._num_updates = num_updates
        self.name = name
        self._averages: dict[Any, Variable] = {}

    def apply(self, var_list: Sequence[TensorLike] | None = None) -> Operation:
        """Return an op that updates the averages of variables or tensors.

        The default is all trainable variables. The average of a variable starts at the variable's
        initial value. The average of a tensor starts at 0.
        """
        listed = trainable_variables() if var_list is None else list(var_list)
        for v in listed:
            if not convert_to_tensor(v).dtype.base_dtype.is_floating:
                raise ArgumentError(f"The variables must be half, float, or double: {v}")
            if v in self._averages:
                raise GraphError(f"Moving average already computed for: {v}")
            self._averages[v] = self._new(v)
        with current_graph().name_scope(self.name) as scope:
            return group(*[self._update(v) for v in listed], name=scope)

    def _new(self, v: Any) -> Variable:
        """Make the average of a variable or tensor, which is a variable."""
        graph, x = get_default_graph(), convert_to_tensor(v)
        owned = isinstance(v, Variable)
        if owned:
            graph.add_to_collections([GraphKeys.MOVING_AVERAGE_VARIABLES], v)
        elif not x.shape.is_fully_defined():
            raise GraphError(f"the shape of {x} must be known for its moving average")
        with graph.name_scope(None), graph.control_dependencies(None):
            begin = v.initialized_value() if owned else creation.zeros(x.shape, x.dtype)
            known = convert_to_tensor(v).shape.is_fully_defined()
            name = self.average_name(v)
            return Variable(begin, trainable=False, validate_shape=known, name=name)

    def _update(self, v: Any) -> Tensor:
        average: Any = self._averages[v]
        now: Any = convert_to_tensor(v)
        dtype = now.dtype.base_dtype
        decay = _as_number(self._decay, dtype)
        if self._num_updates is not None:
            n = _as_number(self._num_updates, dtype)
            decay = tf_math.minimum(decay, (1.0 + n) / (10.0 + n))
        return average.assign_sub((average - now) * (1.0 - decay))

    def average(self, var: Readable) -> Variable | None:
        """Return the variable with the average of another variable, or None."""
        return self._averages.get(var)

    def average_name(self, var: Any) -> str:
        """Return the name of the average of a variable, even before the average exists."""
        return f"{var.op.name}/{self.name}"

    def variables_to_restore(
        self, moving_avg_variables: Iterable[Variable] | None = None
    ) -> dict[str, Variable]:
        """Return a dict for `Saver` that restores averaged variables from their averages.

        The keys are the names of the averages, and the variables' own names for other variables.
        """
        averaged = list(moving_avg_variables or ())
        if moving_avg_variables is None:
            kept = get_default_graph().get_collection(GraphKeys.MOVING_AVERAGE_VARIABLES)
            averaged = [*trainable_variables(), *kept]
        names = {v.op.name for v in averaged}
        others = {v.op.name: v for v in global_variables() if v.op.name not in names}
        return others | {self.average_name(v): v for v in averaged}


OTHERS = (
    "assert_global_step create_global_step get_global_step get_or_create_global_step global_step"
)
__all__ = listed(__name__, f"{OTHERS} ExponentialMovingAverage", "tf.train")
