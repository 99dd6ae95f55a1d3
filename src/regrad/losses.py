"""Loss functions, with TensorFlow.js's weights and reductions.

Each loss compares `labels` and `predictions` of the same shape elementwise, and reduces:

* `weights` multiplies the losses and broadcasts to their shape. For example, one weight per
  example has the shape `(batch, 1)`. A weight of 0 excludes an element.
* `reduction` is `"sum_by_nonzero_weights"` (the default: the sum, divided by the number of
  elements whose weight is not 0), `"mean"` (the sum, divided by the sum of the weights),
  `"sum"`, or `"none"` (one loss per element).

The losses are differentiable to any order with respect to labels (except for class numbers),
predictions and weights. They are compositions of public ops, so overrides fire inside them.
`softmax_cross_entropy` consists of `LogSoftmax` and other ops. `sparse_softmax_cross_entropy`
consists of the single op `SparseSoftmaxCrossEntropyWithLogits`, so a rule for `LogSoftmax` does not
fire in it.
"""

from __future__ import annotations

from regrad.core.backends import is_inexact
from regrad.core.dims import at_least, differ, same
from regrad.core.dispatch import lift
from regrad.core.hints import hint_in as _hint_in
from regrad.core.promotion import get_default_dtype
from regrad.core.tensor import Tensor, TensorLike
from regrad.errors import ArgumentError, ShapeError, near
from regrad.graph.deferred import deferrable
from regrad.graph.size_ops import of_shape
from regrad.nn import (
    log_sigmoid,
    log_softmax,
    relu,
    sparse_softmax_cross_entropy_with_logits,
)
from regrad.ops.binary import clip, not_equal, squared_difference
from regrad.ops.casting import astype
from regrad.ops.elementwise import abs, log
from regrad.ops.reduction import sum, widened

BY_NONZERO = "sum_by_nonzero_weights"
REDUCTIONS = (BY_NONZERO, "mean", "sum", "none")


# -- weights and reductions ----------------------------------------------------------------------


@deferrable
def compute_weighted_loss(
    losses: TensorLike, weights: TensorLike | None = None, reduction: str = BY_NONZERO
) -> Tensor:
    """Return weighted and reduced losses. All losses of this module end with this function.

    If all weights are 0, the two averages are 0/0, i.e. NaN.

    Args:
        losses: One loss per element.
        weights: Factors of the losses, which broadcast to them; see the module.
        reduction: "sum_by_nonzero_weights", "mean", "sum" or "none".

    Returns:
        A Tensor of rank 0; with the reduction "none", a Tensor of the losses' shape.

    Raises:
        ShapeError: the weights do not broadcast to the losses.
        ArgumentError: `reduction` is unknown.

    Source: `tf.losses.computeWeightedLoss` of TensorFlow.js.

    >>> rg.losses.compute_weighted_loss(rg.tensor([1.0, 2.0, 3.0]), [0.0, 1.0, 3.0]).print()
    Tensor
        5.5
    """
    _check_reduction(reduction)
    losses = lift(losses)
    losses = _float(losses, like=losses)
    if weights is not None:
        weights = lift(weights)
        _check_weights(losses, weights)
        weighted = losses * weights
    else:
        weighted = losses
    if reduction == "none":
        return weighted
    total = sum(widened(weighted))
    if reduction != "sum":
        total = total / _divisor(losses, weights, reduction)
    return astype(total, weighted.dtype)


def _divisor(losses: Tensor, weights: Tensor | None, reduction: str) -> Tensor | int:
    """Return the divisor of the sum of the losses: a sum over the broadcast weights."""
    if weights is None:
        return losses.size
    if reduction == BY_NONZERO:
        weights = astype(not_equal(weights, 0), losses.dtype)
    return sum(widened(weights)) * (losses.size // at_least(weights.size, 1))


def _check_reduction(reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ArgumentError(
            f"there is no reduction {reduction!r}.{near(str(reduction), REDUCTIONS)} "
            f"The reductions are {', '.join(map(repr, REDUCTIONS))}."
        )


def _check_weights(losses: Tensor, weights: Tensor) -> None:
    new = losses.ndim - weights.ndim
    tail = losses.shape[max(new, 0) :]
    if new < 0 or any(
        differ(w, 1) and differ(w, n) for w, n in zip(weights.shape, tail, strict=True)
    ):
        raise ShapeError(
            f"weights of the shape {weights.shape} do not broadcast to the losses' shape "
            f"{losses.shape}; one weight per example needs an axis of size 1 for each other axis"
        )


def _pair(loss: str, labels: TensorLike, predictions: TensorLike) -> tuple[Tensor, Tensor]:
    """Return labels and predictions as Tensors of the same shape. Integers become floats."""
    labels, predictions = lift(labels), lift(predictions)
    if differ(labels.shape, predictions.shape):
        raise ShapeError(
            f"{loss}: labels and predictions must have one shape, got labels {labels.shape} and "
            f"predictions {predictions.shape}"
        )
    if not same(labels.shape, predictions.shape):  # only the run can compare the shapes
        labels = of_shape(labels, predictions.shape, f"{loss}: the labels are not as predictions:")
    predictions = _float(predictions, like=labels)
    return _float(labels, like=predictions), predictions


def _float(x: Tensor, like: Tensor) -> Tensor:
    if is_inexact(x.dtype):
        return x
    return astype(x, like.dtype if is_inexact(like.dtype) else get_default_dtype())


# -- losses of predictions -----------------------------------------------------------------------


@deferrable
def absolute_difference(
    labels: TensorLike, predictions: TensorLike, weights: TensorLike | None = None,
    reduction: str = BY_NONZERO,
) -> Tensor:  # fmt: skip
    """Return the loss `abs(labels - predictions)`. The gradient is 0 where both are equal.

    Args:
        labels: The true values, in the shape of the predictions.
        predictions: The predicted values.
        weights: Factors of the losses, which broadcast to them; see the module.
        reduction: "sum_by_nonzero_weights", "mean", "sum" or "none".

    Returns:
        A Tensor of rank 0; with the reduction "none", a Tensor of the labels' shape.

    Raises:
        ShapeError: the shapes differ, or the weights do not broadcast.
        ArgumentError: `reduction` is unknown.

    Source: `tf.losses.absoluteDifference` of TensorFlow.js.

    >>> rg.losses.absolute_difference([1.0, 2.0], [1.0, 4.0])
    Tensor(1., dtype=float32)
    """
    labels, predictions = _pair("absolute_difference", labels, predictions)
    return compute_weighted_loss(abs(labels - predictions), weights, reduction)


@deferrable
def mean_squared_error(
    labels: TensorLike, predictions: TensorLike, weights: TensorLike | None = None,
    reduction: str = BY_NONZERO,
) -> Tensor:  # fmt: skip
    """Return the loss `(labels - predictions)²`.

    Args:
        labels: The true values, in the shape of the predictions.
        predictions: The predicted values.
        weights: Factors of the losses, which broadcast to them; see the module.
        reduction: "sum_by_nonzero_weights", "mean", "sum" or "none".

    Returns:
        A Tensor of rank 0; with the reduction "none", a Tensor of the labels' shape.

    Raises:
        ShapeError: the shapes differ, or the weights do not broadcast.
        ArgumentError: `reduction` is unknown.

    Source: `tf.losses.meanSquaredError` of TensorFlow.js.

    >>> rg.losses.mean_squared_error([1.0, 2.0], [1.0, 4.0]).print()
    Tensor
        2
    """
    labels, predictions = _pair("mean_squared_error", labels, predictions)
    return compute_weighted_loss(squared_difference(labels, predictions), weights, reduction)


@deferrable
def huber_loss(
    labels: TensorLike, predictions: TensorLike, weights: TensorLike | None = None,
    reduction: str = BY_NONZERO, *, delta: float = 1.0,
) -> Tensor:  # fmt: skip
    """Return half the squared error up to an error of `delta`, and a linear loss above it.

    Args:
        labels: The true values, in the shape of the predictions.
        predictions: The predicted values.
        weights: Factors of the losses, which broadcast to them; see the module.
        reduction: "sum_by_nonzero_weights", "mean", "sum" or "none".
        delta: The error above which the loss is linear.

    Returns:
        A Tensor of rank 0; with the reduction "none", a Tensor of the labels' shape.

    Raises:
        ShapeError: the shapes differ, or the weights do not broadcast.
        ArgumentError: `reduction` is unknown.

    Source: `tf.losses.huberLoss` of TensorFlow.js.

    >>> rg.losses.huber_loss([1.0, 2.0], [1.0, 4.0])
    Tensor(0.75, dtype=float32)
    """
    labels, predictions = _pair("huber_loss", labels, predictions)
    error = predictions - labels
    # uses the clipped error, because the second derivative of abs(error) is wrong at 0
    quadratic = clip(error, -delta, delta)
    return compute_weighted_loss(quadratic * (error - 0.5 * quadratic), weights, reduction)


@deferrable
def hinge_loss(
    labels: TensorLike, predictions: TensorLike, weights: TensorLike | None = None,
    reduction: str = BY_NONZERO,
) -> Tensor:  # fmt: skip
    """Return `relu(1 - s * predictions)`, where s is -1 for the label 0 and 1 for the label 1.

    Args:
        labels: The classes, 0 or 1, in the shape of the predictions.
        predictions: The predicted values.
        weights: Factors of the losses, which broadcast to them; see the module.
        reduction: "sum_by_nonzero_weights", "mean", "sum" or "none".

    Returns:
        A Tensor of rank 0; with the reduction "none", a Tensor of the labels' shape.

    Raises:
        ShapeError: the shapes differ, or the weights do not broadcast.
        ArgumentError: `reduction` is unknown.

    Source: `tf.losses.hingeLoss` of TensorFlow.js.

    >>> rg.losses.hinge_loss([0.0, 1.0], [0.5, 2.0])
    Tensor(0.75, dtype=float32)
    """
    labels, predictions = _pair("hinge_loss", labels, predictions)
    return compute_weighted_loss(relu(1 - (2 * labels - 1) * predictions), weights, reduction)


@deferrable
def log_loss(
    labels: TensorLike, predictions: TensorLike, weights: TensorLike | None = None,
    reduction: str = BY_NONZERO, *, epsilon: float = 1e-7,
) -> Tensor:  # fmt: skip
    """Return `-labels * log(p + epsilon) - (1 - labels) * log(1 - p + epsilon)`.

    For logits use `sigmoid_cross_entropy`, which needs no epsilon.

    Args:
        labels: The true probabilities, in the shape of the predictions.
        predictions: The predicted probabilities p.
        weights: Factors of the losses, which broadcast to them; see the module.
        reduction: "sum_by_nonzero_weights", "mean", "sum" or "none".
        epsilon: Added to the arguments of the logarithms to keep them finite.

    Returns:
        A Tensor of rank 0; with the reduction "none", a Tensor of the labels' shape.

    Raises:
        ShapeError: the shapes differ, or the weights do not broadcast.
        ArgumentError: `reduction` is unknown.

    Source: `tf.losses.logLoss` of TensorFlow.js.

    >>> rg.losses.log_loss([1.0, 0.0], [0.5, 0.5])
    Tensor(0.69314694, dtype=float32)
    """
    labels, predictions = _pair("log_loss", labels, predictions)
    yes = labels * log(predictions + epsilon)
    no = (1 - labels) * log(1 - predictions + epsilon)
    return compute_weighted_loss(-yes - no, weights, reduction)


@deferrable
def cosine_distance(
    labels: TensorLike, predictions: TensorLike, weights: TensorLike | None = None,
    reduction: str = BY_NONZERO, *, axis: int,
) -> Tensor:  # fmt: skip
    """Return `1 - sum(labels * predictions)` along `axis`, which is kept with size 1.

    The vectors along `axis` must already have norm 1; see `nn.l2_normalize`.

    Args:
        labels: The true values, in the shape of the predictions.
        predictions: The predicted values.
        weights: Factors of the losses, which broadcast to them; see the module.
        reduction: "sum_by_nonzero_weights", "mean", "sum" or "none".
        axis: The axis of the vectors.

    Returns:
        A Tensor of rank 0; with the reduction "none", a Tensor of the labels' shape, with size 1
        along the axis.

    Raises:
        ShapeError: the shapes differ, or the weights do not broadcast.
        ArgumentError: `reduction` is unknown.

    Source: `tf.losses.cosineDistance` of TensorFlow.js.

    >>> rg.losses.cosine_distance([[1.0, 0.0]], [[0.0, 1.0]], axis=1)
    Tensor(1., dtype=float32)
    """
    labels, predictions = _pair("cosine_distance", labels, predictions)
    distance = 1 - sum(labels * predictions, axis=axis, keepdims=True)
    return compute_weighted_loss(distance, weights, reduction)


# -- losses of logits ----------------------------------------------------------------------------


@deferrable
def sigmoid_cross_entropy(
    labels: TensorLike, logits: TensorLike, weights: TensorLike | None = None,
    reduction: str = BY_NONZERO, *, label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """Return the elementwise cross entropy of probabilities `labels` and `sigmoid(logits)`.

    Args:
        labels: The true values, in the shape of the logits.
        logits: The predicted values, before the sigmoid.
        weights: Factors of the losses, which broadcast to them; see the module.
        reduction: "sum_by_nonzero_weights", "mean", "sum" or "none".
        label_smoothing: The fraction by which labels are moved toward 1/2, in [0, 1].

    Returns:
        A Tensor of rank 0; with the reduction "none", a Tensor of the labels' shape.

    Raises:
        ShapeError: the shapes differ, or the weights do not broadcast.
        ArgumentError: `reduction` is unknown.

    Source: `tf.losses.sigmoidCrossEntropy` of TensorFlow.js.

    >>> rg.losses.sigmoid_cross_entropy([1.0, 0.0], [0.0, 0.0])
    Tensor(0.6931472, dtype=float32)
    """
    labels, logits = _pair("sigmoid_cross_entropy", labels, logits)
    labels = _smooth(labels, label_smoothing, 2)
    losses = -labels * log_sigmoid(logits) - (1 - labels) * log_sigmoid(-logits)
    return compute_weighted_loss(losses, weights, reduction)


@deferrable
def softmax_cross_entropy(
    labels: TensorLike, logits: TensorLike, weights: TensorLike | None = None,
    reduction: str = BY_NONZERO, *, label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """Return the cross entropy of distributions `labels` and `softmax(logits)` along the last axis.

    There is one loss, and one weight, per example. The gradient of the labels is the derivative
    `-log_softmax(logits)`. TensorFlow.js uses another formula.

    Args:
        labels: The true values, in the shape of the logits.
        logits: The predicted values, before the softmax.
        weights: Factors of the losses, which broadcast to them; see the module.
        reduction: "sum_by_nonzero_weights", "mean", "sum" or "none".
        label_smoothing: The fraction by which labels move toward equal probabilities, in [0, 1].

    Returns:
        A Tensor of rank 0; with the reduction "none", a Tensor of the labels' shape without the
        last axis.

    Raises:
        ShapeError: the shapes differ, or the weights do not broadcast.
        ArgumentError: `reduction` is unknown.

    Source: `tf.losses.softmaxCrossEntropy` of TensorFlow.js.

    >>> rg.losses.softmax_cross_entropy([[0.0, 1.0]], [[5.0, 5.0]])
    Tensor(0.6931472, dtype=float32)
    """
    labels, logits = _pair("softmax_cross_entropy", labels, logits)
    labels = _smooth(labels, label_smoothing, labels.shape[-1] if labels.ndim else 1)
    losses = -sum(labels * log_softmax(logits), axis=-1)
    return compute_weighted_loss(losses, weights, reduction)


@deferrable
def sparse_softmax_cross_entropy(
    labels: TensorLike, logits: TensorLike, weights: TensorLike | None = None,
    reduction: str = BY_NONZERO,
) -> Tensor:  # fmt: skip
    """Return the softmax cross entropy of integer class labels.

    The losses come from `nn.sparse_softmax_cross_entropy_with_logits`, which is a single op.
    Override its op type to change the gradient.

    Args:
        labels: Integers in `[0, classes)`, of shape `logits.shape[:-1]`.
        logits: The predicted values, before the softmax.
        weights: Factors of the losses, which broadcast to them; see the module.
        reduction: "sum_by_nonzero_weights", "mean", "sum" or "none".

    Returns:
        A Tensor of rank 0; with the reduction "none", a Tensor of the labels' shape.

    Raises:
        ShapeError: the shapes do not fit, or the weights do not broadcast.
        ArgumentError: `reduction` is unknown.
        DTypeError: the labels are not integers.

    Source: `tf.losses.sparse_softmax_cross_entropy` of TensorFlow.

    >>> rg.losses.sparse_softmax_cross_entropy([1], [[5.0, 5.0]])
    Tensor(0.6931472, dtype=float32)
    """
    losses = sparse_softmax_cross_entropy_with_logits(labels, logits)
    return compute_weighted_loss(losses, weights, reduction)


def _smooth(labels: Tensor, amount: float, classes: int) -> Tensor:
    """Move labels toward equal probabilities for all classes."""
    return labels * (1 - amount) + amount / classes if amount else labels


_hint_in(__name__)
