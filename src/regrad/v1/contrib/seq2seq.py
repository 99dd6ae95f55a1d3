"""`tf.contrib.seq2seq`: the loss of sequences."""

from __future__ import annotations

from typing import Any

from regrad.core.tensor import TensorLike
from regrad.v1.functions.nn import sparse_softmax_cross_entropy_with_logits
from regrad.v1.functions.reductions import reduce_sum
from regrad.v1.graph.conversion import convert_to_tensor
from regrad.v1.graph.graphs import name_scope

__all__ = ["sequence_loss"]


def sequence_loss(
    logits: TensorLike, targets: TensorLike, weights: TensorLike,
    average_across_timesteps: bool = True, average_across_batch: bool = True,
    softmax_loss_function: Any = None, name: str | None = None,
) -> Any:  # fmt: skip
    """Return the weighted cross entropy of sequences of classes.

    Args:
        logits: A tensor of the shape (batch, time, classes).
        targets: The classes, integers of the shape (batch, time).
        weights: A weight for each entry, of the shape (batch, time).
        average_across_timesteps: Whether to average over time.
        average_across_batch: Whether to average over the batch.
        softmax_loss_function: A function of `labels` and `logits` that returns the losses.

    Returns:
        A tensor without the averaged axes. An average divides by the sum of the weights.

    Source: `tf.contrib.seq2seq.sequence_loss`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     loss = tf.contrib.seq2seq.sequence_loss(tf.zeros([1, 2, 2]), [[0, 1]], tf.ones([1, 2]))
    ...     print(sess.run(loss))
    0.6931472
    """
    with name_scope(name, "sequence_loss"):
        function = softmax_loss_function or sparse_softmax_cross_entropy_with_logits
        w = convert_to_tensor(weights)
        losses = function(labels=targets, logits=logits) * w
        axes = [0] * average_across_batch + [1] * average_across_timesteps
        return reduce_sum(losses, axes) / (reduce_sum(w, axes) + 1e-12) if axes else losses
