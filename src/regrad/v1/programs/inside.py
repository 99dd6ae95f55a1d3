"""Functions of modules inside TensorFlow that programs import."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import regrad as rg
from regrad.core.tensor import TensorLike
from regrad.v1.functions.arrays import identity
from regrad.v1.functions.creation import zeros
from regrad.v1.functions.math import cast
from regrad.v1.graph.control import cond
from regrad.v1.graph.graphs import control_dependencies, current_graph
from regrad.v1.graph.rows import row
from regrad.v1.graph.values import constant_value
from regrad.v1.graph.variables import Variable
from regrad.v1.training.variable_scopes import get_variable, variable_scope

RefVariable = Variable  # its name in `tensorflow.python.ops.variables`


@row("gen_nn_ops", scope="ReluGrad")
def relu_grad(gradients: rg.Tensor, features: rg.Tensor) -> rg.Tensor:
    """Return the gradients where the features are positive, 0 elsewhere.

    >>> import regrad as rg
    >>> from regrad.v1.programs.inside import relu_grad
    >>> relu_grad(rg.asarray([5.0, 6.0]), rg.asarray([-1.0, 2.0]))
    Tensor([0., 6.], dtype=float32)
    """
    return rg.where(features > 0, gradients, rg.zeros_like(gradients))


def with_dependencies(
    dependencies: Sequence[Any], output_tensor: TensorLike, name: str | None = None
) -> Any:
    """Return a tensor that runs after other ops (`control_flow_ops.with_dependencies`).

    >>> import regrad.v1 as tf
    >>> from regrad.v1.programs.inside import with_dependencies
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(with_dependencies([tf.no_op()], tf.constant(1.0))))
    1.0
    """
    with control_dependencies(dependencies):
        return identity(output_tensor, name=name)


def smart_cond(
    pred: TensorLike, fn1: Callable[[], Any], fn2: Callable[[], Any], name: str | None = None
) -> Any:
    """Return `tf.cond`, or the result of one function if `pred` is known (`layers.utils`).

    >>> from regrad.v1.programs.inside import smart_cond
    >>> smart_cond(True, lambda: "yes", lambda: "no")
    'yes'
    """
    known = constant_value(pred)
    return cond(pred, fn1, fn2, name=name) if known is None else (fn1 if known else fn2)()


def assign_moving_average(
    variable: Variable, value: TensorLike, decay: TensorLike, zero_debias: bool = True,
    name: str | None = None,
) -> Any:  # fmt: skip
    """Return an op that moves a variable toward a value, by `1 - decay` of their difference.

    With `zero_debias` the variable becomes `b / (1 - decay**n)`. Here n is the number of updates,
    and b is the moving average that starts at 0. The variables `biased` and `local_step` contain b
    and n (`moving_averages`).

    >>> import regrad.v1 as tf
    >>> from regrad.v1.programs.inside import assign_moving_average
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     v = tf.Variable(0.0)
    ...     update = assign_moving_average(v, 8.0, 0.75, zero_debias=False)
    ...     sess.run(tf.global_variables_initializer())
    ...     print(sess.run(update))
    2.0
    """
    with current_graph().name_scope(name or "AssignMovingAvg") as scope:
        dtype = variable.dtype.base_dtype
        # As in TensorFlow, a decay that is a Python float is rounded to float32.
        rate: Any = cast(1.0 - decay, dtype)  # pyright: ignore[reportOperatorIssue]
        delta: Any = (variable - value) * rate
        if zero_debias:
            with variable_scope(variable.op.name):
                start, none = zeros(variable.shape.as_list(), dtype), zeros([], dtype)
                biased: Any = get_variable("biased", initializer=start, trainable=False)
                count: Any = get_variable("local_step", initializer=none, trainable=False)
            updates = [biased.assign_sub((biased - value) * rate), count.assign_add(1.0)]
            with control_dependencies(updates):
                delta = variable - biased.read_value() / (1.0 - (1.0 - rate) ** count.read_value())
        return variable.assign_sub(delta, name=scope)
