"""`tf.losses`: the losses of `regrad.losses`, with TensorFlow 1's weights and collections.

As in TensorFlow, losses of predictions are computed in float32. If all weights are 0, a mean is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import regrad as rg
from regrad.core.tensor import TensorLike
from regrad.errors import ArgumentError, GraphError, ShapeError, near
from regrad.graph.deferred import deferrable
from regrad.shapes.sizes import differ
from regrad.v1.functions.math import add_n
from regrad.v1.functions.nn import sparse_cross_entropy
from regrad.v1.graph import forms
from regrad.v1.graph.conversion import build, constant
from regrad.v1.graph.graphs import GraphKeys, add_to_collection, get_collection
from regrad.v1.graph.kinds import INEXACT, check_kinds
from regrad.v1.graph.rows import row, written
from regrad.v1.graph.tensors import Tensor
from regrad.v1.graph.values import alike


class Reduction:
    """The names of the reductions of losses.

    The default, `SUM_BY_NONZERO_WEIGHTS`, is the sum divided by the number of elements with a
    nonzero weight. `MEAN` divides by the sum of the weights.

    Source: `tf.losses.Reduction`.

    >>> import regrad.v1 as tf
    >>> tf.losses.Reduction.MEAN
    'weighted_mean'
    """

    NONE = "none"
    SUM = "weighted_sum"
    SUM_OVER_BATCH_SIZE = "weighted_sum_over_batch_size"
    MEAN = "weighted_mean"
    SUM_BY_NONZERO_WEIGHTS = "weighted_sum_by_nonzero_weights"
    SUM_OVER_NONZERO_WEIGHTS = SUM_BY_NONZERO_WEIGHTS

    @classmethod
    def all(cls) -> tuple[str, ...]:
        """Return all values."""
        return cls.NONE, cls.SUM, cls.MEAN, cls.SUM_OVER_BATCH_SIZE, cls.SUM_BY_NONZERO_WEIGHTS

    @classmethod
    def validate(cls, key: str) -> None:
        """Raise ValueError unless the key names a reduction."""
        if key not in cls.all():
            raise GraphError(f"Invalid Reduction Key {key!r}.{near(str(key), cls.all())}")


BY_NONZERO, LOSSES = Reduction.SUM_BY_NONZERO_WEIGHTS, GraphKeys.LOSSES
Name = str | None

# -- weights and reductions ----------------------------------------------------------------------


@written("tf.losses")
def compute_weighted_loss(
    losses, weights: TensorLike = 1.0, scope=None, loss_collection=LOSSES, reduction=BY_NONZERO
) -> Tensor:
    """Return losses multiplied by weights and reduced, and add the result to a collection.

    Args:
        losses: One loss per element.
        weights: A number, or a tensor of the rank of the losses. Each of its sizes is 1 or the
            size of the losses.
        scope: The name scope.
        loss_collection: The collection to add the result to, or None.
        reduction: See `Reduction`.

    Returns:
        A tensor of the dtype of the losses. It has rank 0, or the shape of the losses if
        `reduction` is `NONE`.

    Raises:
        ShapeError: the weights do not broadcast.
        GraphError: the reduction is unknown.

    Source: `tf.losses.compute_weighted_loss`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.losses.compute_weighted_loss([1.0, 2.0, 6.0], [1.0, 1.0, 0.0])))
    1.5
    """
    Reduction.validate(reduction)
    with forms.scope(scope or "weighted_loss", losses, weights):
        losses = forms.tensor(losses, like=weights)
        weights = forms.tensor(weights, name="weights", like=losses)
        single, weights = (build("Cast", None, _as_dtype, x) for x in (losses, weights))
        _check_weights(weights, single)
        loss = build("Mul", "Mul", rg.multiply, single, weights)
        if reduction != Reduction.NONE:
            loss = build("Sum", None, rg.sum, loss)
        if reduction in COUNTS:
            count = build("Sum", "num_present", COUNTS[reduction], single, weights)
            divisor = build("SelectV2", None, lambda n: rg.where(rg.equal(n, 0), 1, n), count)
            loss = build("SelectV2", "value", _quotient, loss, count, divisor)
        loss = build("Cast", None, _as_dtype, loss, dtype=forms.dtype_of(losses))
    add_loss(loss, loss_collection)
    return loss


def _as_dtype(x: rg.Tensor, dtype: np.dtype = rg.float32) -> rg.Tensor:
    return x if x.dtype == dtype else rg.astype(x, dtype)


def _quotient(total: rg.Tensor, count: rg.Tensor, divisor: rg.Tensor) -> Any:
    return rg.where(rg.equal(count, 0), 0, total / divisor)


def _check_weights(weights: Any, losses: Any) -> None:
    if not (rank := forms.rank_of(weights)) or forms.rank_of(losses) is None:
        return
    sizes, expected = forms.shape_of(weights), forms.shape_of(losses)
    pairs = zip(sizes, expected, strict=False)
    if rank != len(expected) or any(differ(w, 1) and differ(w, n) for w, n in pairs):
        raise ShapeError(
            f"weights can not be broadcast to values: the weights' shape is {sizes}, the losses' "
            f"{expected}; pass a number, or as many axes as the losses have, of their sizes or 1"
        )


# The divisor of the sum, by the reduction.
COUNTS: dict[str, Callable[..., rg.Tensor]] = {
    Reduction.MEAN: lambda losses, weights: rg.sum(rg.ones_like(losses) * weights),
    Reduction.SUM_OVER_BATCH_SIZE: lambda losses, weights: rg.sum(rg.ones_like(losses)),
    BY_NONZERO: lambda losses, weights: rg.sum(
        rg.ones_like(losses) * rg.astype(rg.not_equal(weights, 0), rg.float32)
    ),
}


# -- collections ---------------------------------------------------------------------------------


def add_loss(loss: TensorLike, loss_collection: Name = LOSSES) -> None:
    """Add a loss to a collection. As in TensorFlow, eager Tensors are not added.

    Args:
        loss: A tensor.
        loss_collection: The name of the collection. None adds the loss to no collection.

    Source: `tf.losses.add_loss`.

    >>> with tf.Graph().as_default():
    ...     tf.losses.add_loss(tf.constant(1.0))
    ...     print(len(tf.losses.get_losses()))
    1
    """
    if loss_collection and not forms.is_eager(loss):
        add_to_collection(loss_collection, loss)


def get_losses(scope: Name = None, loss_collection: str = LOSSES) -> list[Any]:
    """Return the losses in a collection.

    Args:
        scope: A regular expression. Only losses whose names begin with a match are listed.
        loss_collection: The name of the collection.

    Returns:
        A list of tensors.

    Raises:
        ArgumentError: there are too many arguments.

    Source: `tf.losses.get_losses`.

    >>> with tf.Graph().as_default():
    ...     tf.losses.add_loss(tf.constant(1.0))
    ...     print(len(tf.losses.get_losses()))
    1
    """
    return get_collection(loss_collection, scope)


def get_regularization_losses(scope: Name = None) -> list[Any]:
    """Return the losses that the regularizers of variables and layers made.

    Args:
        scope: A regular expression. Only losses whose names begin with a match are listed.

    Returns:
        A list of tensors.

    Raises:
        ArgumentError: there are too many arguments.

    Source: `tf.losses.get_regularization_losses`.

    >>> with tf.Graph().as_default():
    ...     w = tf.get_variable("w", [2], regularizer=tf.nn.l2_loss)
    ...     print(len(tf.losses.get_regularization_losses()))
    1
    """
    return get_collection(GraphKeys.REGULARIZATION_LOSSES, scope)


def get_regularization_loss(scope: Name = None, name: str = "total_regularization_loss") -> Tensor:
    """Return the sum of the regularization losses, or 0 without regularization losses.

    Args:
        scope: A regular expression. Only losses whose names begin with a match are added.

    Returns:
        A tensor of rank 0.

    Raises:
        ArgumentError: there are too many arguments.

    Source: `tf.losses.get_regularization_loss`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.losses.get_regularization_loss()))
    0.0
    """
    losses = get_regularization_losses(scope)
    return add_n(losses, name) if losses else constant(0.0)


def get_total_loss(
    add_regularization_losses: bool = True, name: str = "total_loss", scope: Name = None
) -> Tensor:
    """Return the sum of all losses in the collection LOSSES.

    Args:
        add_regularization_losses: Whether to include the losses of regularizers.
        scope: A regular expression. Only losses whose names begin with a match are added.

    Returns:
        A tensor of rank 0.

    Raises:
        GraphError: the collections are empty.

    Source: `tf.losses.get_total_loss`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     tf.losses.add_loss(tf.constant(1.0))
    ...     tf.losses.add_loss(tf.constant(2.0))
    ...     print(sess.run(tf.losses.get_total_loss()))
    3.0
    """
    losses = get_losses(scope)
    if add_regularization_losses:
        losses = [*losses, *get_regularization_losses(scope)]
    if not losses:
        raise GraphError("the graph has no losses; add one with tf.losses or tf.losses.add_loss")
    return add_n(losses, name)


# -- losses of predictions -----------------------------------------------------------------------


def _compute(
    _: None, name: str, formula: Callable[..., rg.Tensor], *pair: TensorLike, weights: Any,
    loss_collection: Name, reduction: str = Reduction.SUM, by_example: bool = False, **attrs: Any,
) -> Tensor:  # fmt: skip
    """Compute a loss of labels and predictions in a scope, then weight and reduce it."""
    if any(x is None for x in pair):
        raise GraphError(f"{name}: labels and predictions (or logits) must not be None.")
    if forms.is_eager(*pair, weights):
        pair, weights = tuple(map(rg.asarray, pair)), rg.asarray(weights)
    with forms.scope(name, *pair, weights) as whole:
        losses = build("", None, deferrable(formula), *pair, **attrs)
        if by_example and not isinstance(weights, float):
            weights = forms.tensor(weights, name="weights")
            weights = build("", None, deferrable(_without_last_axes), weights, losses)
        return compute_weighted_loss(losses, weights, whole, loss_collection, reduction)


def _without_last_axes(weights: rg.Tensor, losses: rg.Tensor) -> rg.Tensor:
    """Return the weights of examples without further axes, whose sizes are 1."""
    extra = weights.ndim and range(losses.ndim, weights.ndim)
    return rg.squeeze(weights, axis=tuple(extra)) if extra else weights


def _of_pairs(loss: Callable[..., Any], dtype: np.dtype | None = rg.float32) -> Callable[..., Any]:
    """Return a regrad loss as a function of pairs in a dtype, or in the dtype of the logits."""

    def formula(labels: rg.Tensor, predictions: rg.Tensor, **attrs: Any) -> rg.Tensor:
        if attrs.get("axis", 0) is None:
            raise GraphError("You must specify 'axis'.")
        if dtype is None:
            check_kinds("logits", INEXACT, predictions)
        if loss is rg.losses.softmax_cross_entropy:
            labels = rg.stop_gradient(labels)
        pair = [_as_dtype(x, dtype or predictions.dtype) for x in (labels, predictions)]
        return loss(*alike(loss.__name__, *pair), None, "none", **attrs)

    return formula


def _options(scope=None, loss_collection=LOSSES, reduction=BY_NONZERO) -> None:
    """Declare the last parameters of most losses."""


# op type None: compositions
_loss = partial(row, "tf.losses", None, call=_compute, then=_options, returns="Tensor")
_loss_by_example = partial(_loss, call=partial(_compute, by_example=True))


@_loss(_of_pairs(rg.losses.absolute_difference))
def absolute_difference(labels, predictions, weights=1.0):
    """Return `abs(predictions - labels)`, weighted and reduced.

    Args:
        labels: A tensor or array of numbers, the true values.
        predictions: A tensor or array of the same shape.

    Returns:
        A float32 tensor. It has rank 0, or the shape of the losses if `reduction` is `NONE`.

    Raises:
        ShapeError: the shapes differ, or the weights do not broadcast.
        GraphError: the reduction is unknown.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.losses.absolute_difference([1.0, 2.0], [1.0, 4.0])))
    1.0
    """


@_loss(_of_pairs(rg.losses.mean_squared_error))
def mean_squared_error(labels, predictions, weights=1.0):
    """Return `(predictions - labels) ** 2`, weighted and reduced.

    Args:
        labels: A tensor or array of numbers, the true values.
        predictions: A tensor or array of the same shape.

    Returns:
        A float32 tensor. It has rank 0, or the shape of the losses if `reduction` is `NONE`.

    Raises:
        ShapeError: the shapes differ, or the weights do not broadcast.
        GraphError: the reduction is unknown.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.losses.mean_squared_error([1.0, 2.0], [1.0, 4.0])))
    2.0
    """


@_loss(_of_pairs(rg.losses.huber_loss))
def huber_loss(labels, predictions, weights=1.0, delta=1.0):
    """Return half the squared error, linear beyond an error of `delta`, weighted and reduced.

    Args:
        labels: A tensor or array of numbers, the true values.
        predictions: A tensor or array of the same shape.
        delta: The error beyond which the loss is linear.

    Returns:
        A float32 tensor. It has rank 0, or the shape of the losses if `reduction` is `NONE`.

    Raises:
        ShapeError: the shapes differ, or the weights do not broadcast.
        GraphError: the reduction is unknown.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.losses.huber_loss([1.0, 2.0], [1.0, 4.0])))
    0.75
    """


@_loss(_of_pairs(rg.losses.hinge_loss))
def hinge_loss(labels, logits, weights=1.0):
    """Return `relu(1 - s * logits)`, weighted and reduced. s is `2 * labels - 1`.

    Args:
        labels: A tensor or array of the numbers 0 and 1.
        logits: A tensor or array of the same shape.

    Returns:
        A float32 tensor. It has rank 0, or the shape of the losses if `reduction` is `NONE`.

    Raises:
        ShapeError: the shapes differ, or the weights do not broadcast.
        GraphError: the reduction is unknown.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.losses.hinge_loss([0.0, 1.0], [0.5, 0.5])))
    1.0
    """


@_loss(_of_pairs(rg.losses.log_loss))
def log_loss(labels, predictions, weights=1.0, epsilon=1e-7):
    """Return the cross entropy of labels and probabilities, weighted and reduced.

    The loss is `-labels * log(p + epsilon) - (1 - labels) * log(1 - p + epsilon)`.

    Args:
        labels: A tensor or array of numbers, the true values.
        predictions: A tensor or array of the same shape.
        epsilon: A small number that keeps the logarithms finite.

    Returns:
        A float32 tensor. It has rank 0, or the shape of the losses if `reduction` is `NONE`.

    Raises:
        ShapeError: the shapes differ, or the weights do not broadcast.
        GraphError: the reduction is unknown.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.losses.log_loss([1.0, 0.0], [0.5, 0.5])))
    0.69314694
    """


@_loss(_of_pairs(rg.losses.cosine_distance), scope="cosine_distance_loss", then=None)
def cosine_distance(
    labels, predictions, axis=None, weights=1.0, scope=None, loss_collection=LOSSES,
    reduction=BY_NONZERO, dim=None,
):  # fmt: skip
    """Return `1 - sum(labels * predictions)` of vectors of norm 1, weighted and reduced.

    Args:
        labels: A tensor or array of numbers, the true values.
        predictions: A tensor or array of the same shape.
        axis: The axis of the vectors.

    Returns:
        A float32 tensor. It has rank 0, or the shape of the losses if `reduction` is `NONE`.

    Raises:
        ShapeError: the shapes differ, or the weights do not broadcast.
        GraphError: the reduction is unknown.
        GraphError: the axis is missing.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.losses.cosine_distance([[1.0, 0.0]], [[0.6, 0.8]], axis=1)))
    0.39999998
    """


@_loss_by_example(then=None)
def mean_pairwise_squared_error(
    labels: Any, predictions: Any, weights=1.0, scope=None, loss_collection=LOSSES
):
    """Return the sum of mean squared errors between differences of pairs of elements.

    Args:
        labels: A tensor or array of numbers, the true values.
        predictions: A tensor or array of the same shape.
        weights: A number, or a weight for each example, of the shape (batch,) or (batch, 1, …).

    Returns:
        A float32 tensor of rank 0, the sum over the examples.

    Raises:
        ShapeError: the shapes differ, or the weights do not broadcast.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.losses.mean_pairwise_squared_error([[0.0, 0.0]], [[1.0, 3.0]])))
    4.0
    """
    labels, predictions = alike("mean_pairwise_squared_error", labels, predictions)
    labels, predictions = rg.astype(labels, rg.float32), rg.astype(predictions, rg.float32)
    error = rg.reshape(predictions - labels, (labels.shape[0], -1))
    n = rg.sum(rg.ones_like(error), axis=1, keepdims=True)
    # The mean of (e_i - e_j)² over pairs i ≠ j is the variance times 2n / (n - 1).
    variance = rg.mean(rg.square(error - rg.mean(error, axis=1, keepdims=True)), axis=1)
    return 2 * variance * rg.squeeze(n / rg.maximum(n - 1, 1), axis=1)


# -- losses of logits ----------------------------------------------------------------------------


@_loss(_of_pairs(rg.losses.sigmoid_cross_entropy, None), scope="sigmoid_cross_entropy_loss")
def sigmoid_cross_entropy(multi_class_labels, logits, weights=1.0, label_smoothing=0):
    """Return the cross entropy of probabilities and `sigmoid(logits)`, weighted and reduced.

    Args:
        multi_class_labels: Probabilities, of the shape of the logits.
        logits: A tensor or array of real floats.

    Returns:
        A float32 tensor. It has rank 0, or the shape of the losses if `reduction` is `NONE`.

    Raises:
        ShapeError: the shapes do not fit, or the weights do not broadcast.
        GraphError: the reduction is unknown.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.losses.sigmoid_cross_entropy([[1.0]], [[0.0]])))
    0.6931472
    """


@_loss(_of_pairs(rg.losses.softmax_cross_entropy, None), scope="softmax_cross_entropy_loss")
def softmax_cross_entropy(onehot_labels, logits, weights=1.0, label_smoothing=0):
    """Return the cross entropy of distributions and `softmax(logits)`, weighted and reduced.

    The labels get no gradient.

    Args:
        onehot_labels: Probabilities, of the shape of the logits.
        logits: A tensor or array of real floats.

    Returns:
        A float32 tensor. It has rank 0, or the shape of the losses if `reduction` is `NONE`.

    Raises:
        ShapeError: the shapes do not fit, or the weights do not broadcast.
        GraphError: the reduction is unknown.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.losses.softmax_cross_entropy([[0.0, 1.0]], [[5.0, 5.0]])))
    0.6931472
    """


@_loss_by_example(scope="sparse_softmax_cross_entropy_loss")
def sparse_softmax_cross_entropy(labels: rg.Tensor, logits: rg.Tensor, weights=1.0):
    """Return the cross entropy of classes and `softmax(logits)`, weighted and reduced.

    Labels (and weights) may have an additional last axis of size 1.

    Args:
        labels: The class indices, integers.
        logits: A tensor or array of real floats.

    Returns:
        A float32 tensor. It has rank 0, or the shape of the losses if `reduction` is `NONE`.

    Raises:
        ShapeError: the shapes do not fit, or the weights do not broadcast.
        GraphError: the reduction is unknown.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.losses.sparse_softmax_cross_entropy([1], [[5.0, 5.0]])))
    0.6931472
    """
    check_kinds("logits", INEXACT, logits)
    if labels.dtype.kind not in "iu":
        raise ArgumentError(f"labels must be class indices (integers), got {labels.dtype}")
    column = labels.ndim == logits.ndim
    return sparse_cross_entropy(rg.squeeze(labels, axis=-1) if column else labels, logits)
