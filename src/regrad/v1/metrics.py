"""`tf.metrics`: measures that accumulate over the batches of several runs."""

from __future__ import annotations

from typing import Any

from regrad.core.tensor import TensorLike
from regrad.v1 import dtypes
from regrad.v1.functions import creation, math
from regrad.v1.functions.reductions import reduce_sum
from regrad.v1.graph.conversion import convert_to_tensor
from regrad.v1.graph.graphs import GraphKeys, get_default_graph
from regrad.v1.graph.variables import Variable
from regrad.v1.training.variable_scopes import variable_scope

__all__ = ["accuracy", "mean"]

KEYS = [GraphKeys.LOCAL_VARIABLES, GraphKeys.METRIC_VARIABLES]


def mean(
    values: TensorLike, weights: TensorLike = None, metrics_collections: Any = None,
    updates_collections: Any = None, name: str | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Return the weighted mean of all values so far, and the op that adds a batch to it.

    The local variables `total` and `count` keep the sums. Initialize them with
    `tf.local_variables_initializer`.

    Args:
        values: A tensor of numbers.
        weights: A weight for each value, by default 1. Their shape broadcasts to the values'.
        metrics_collections: Collections to which the mean is added.
        updates_collections: Collections to which the update is added.
        name: The name of the scope, by default 'mean' (numbered).

    Returns:
        The mean, and a tensor that adds the batch and has the new mean.

    Source: `tf.metrics.mean`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     x = tf.placeholder(tf.float32, [None])
    ...     value, update = tf.metrics.mean(x)
    ...     sess.run(tf.local_variables_initializer())
    ...     print(sess.run(update, {x: [1.0, 2.0]}), sess.run(update, {x: [6.0]}), sess.run(value))
    1.5 3.0 3.0
    """
    with variable_scope(name, "mean"):
        x = math.cast(values, dtypes.float32)
        ones = creation.ones_like(x)
        w = ones if weights is None else math.cast(weights, dtypes.float32) * ones
        total, count = (Variable(0.0, False, KEYS, name=part) for part in ("total", "count"))
        value = math.div_no_nan(total.value(), count.value(), name="value")
        sums = [v.assign_add(reduce_sum(y)) for v, y in ((total, x * w), (count, w))]
        update = math.div_no_nan(*sums, name="update_op")
    graph = get_default_graph()
    graph.add_to_collections(metrics_collections, value)
    graph.add_to_collections(updates_collections, update)
    return value, update


def accuracy(
    labels: TensorLike, predictions: TensorLike, weights: TensorLike = None,
    metrics_collections: Any = None, updates_collections: Any = None, name: str | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Return the part of all predictions so far that equal the labels, and the op that adds more.

    See `tf.metrics.mean`.

    Args:
        labels: A tensor.
        predictions: A tensor of the labels' shape.
        weights: A weight for each prediction, by default 1.
        metrics_collections: Collections to which the accuracy is added.
        updates_collections: Collections to which the update is added.
        name: The name of the scope, by default 'accuracy' (numbered).

    Returns:
        The accuracy, and a tensor that adds the batch and has the new accuracy.

    Source: `tf.metrics.accuracy`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     value, update = tf.metrics.accuracy(tf.constant([1, 2]), tf.constant([1, 3]))
    ...     sess.run(tf.local_variables_initializer())
    ...     print(sess.run(update), [v.op.name for v in tf.local_variables()])
    0.5 ['accuracy/total', 'accuracy/count']
    """
    found = convert_to_tensor(predictions)
    hits = math.equal(found, math.cast(labels, found.dtype))
    return mean(hits, weights, metrics_collections, updates_collections, name or "accuracy")
