"""Softmax cross entropy of logits with integer class labels."""

from __future__ import annotations

from regrad.core import dispatch
from regrad.core.backends import Array, Namespace, in_single, is_inexact
from regrad.core.op import Indices, TensorLike, op
from regrad.core.registry import gradient
from regrad.core.signatures import public
from regrad.core.tensor import Tensor
from regrad.errors import DTypeError
from regrad.ops.activation import softmax
from regrad.ops.array import expand_dims
from regrad.ops.indexing import scatter_along_axis
from regrad.ops.rows import _in_range, _pick, _sums, _tops, _zeros
from regrad.shapes.arrays import examples


@op("SparseSoftmaxCrossEntropyWithLogits", promotes=("logits",), to_float=True)
def _sparse_softmax_cross_entropy_with_logits(xp, logits: TensorLike, labels: Indices, /) -> Tensor:
    examples(tuple(logits.shape), tuple(labels.shape))
    if 0 in logits.shape:
        _in_range(xp, labels, logits.shape[-1])
        return _zeros(xp, labels.shape, logits)
    top = _tops(xp, logits, (-1,))
    # picked from the logits, because XLA would have to store `logits - top`
    at_label = _pick(xp, logits, labels[..., None], -1) - top
    return in_single(_log_sums, xp, logits - top) - at_label[..., 0]


def _log_sums(xp: Namespace, below: Array) -> Array:
    return xp.log(_sums(xp, xp.exp(below), (-1,), False))


@gradient("SparseSoftmaxCrossEntropyWithLogits", "logits")
def _(dy, logits, labels):
    dy, labels = expand_dims(dy, -1), expand_dims(labels, -1)
    # (faster than `dy * (softmax(logits) - one_hot)` in NumPy and in XLA)
    return dy * softmax(logits) - scatter_along_axis(dy, labels, logits.shape, axis=-1)


@public
def sparse_softmax_cross_entropy_with_logits(labels: TensorLike, logits: TensorLike) -> Tensor:
    """Return `-log_softmax(logits)` at the label (class number) of each example.

    The labels have no gradient. Negative labels count from the end, like indices. Compiled JAX code
    cannot raise, so it clamps a label that is out of range to the nearest class. To weight and
    reduce the losses, call `losses.sparse_softmax_cross_entropy`.

    Args:
        labels: Integers in `[0, classes)`, shape `(...)`.
        logits: Numbers, shape `(..., classes)`. The softmax runs along the last axis.

    Returns:
        A Tensor of the labels' shape and the logits' dtype: one loss for each example.

    Raises ShapeError if the labels' shape is not the logits' shape without the last axis,
    DTypeError if the labels are not integers, IndexRangeError if one is out of range (on NumPy
    and PyTorch).

    Op type: `SparseSoftmaxCrossEntropyWithLogits`, with the inputs `logits` and `labels`.
    Source: `tf.nn.sparse_softmax_cross_entropy_with_logits`.

    >>> import regrad as rg
    >>> logits = rg.tensor([[5.0, 5.0], [1000.0, 0.0]])
    >>> rg.nn.sparse_softmax_cross_entropy_with_logits([1, 0], logits).print()
    Tensor
        [0.6931472, 0]
    """
    labels = dispatch.lift(labels, integers=True)
    if is_inexact(labels.dtype):
        raise DTypeError(
            "sparse_softmax_cross_entropy_with_logits: labels must be integers (class "
            f"numbers), got {labels.dtype}; for probabilities call losses.softmax_cross_entropy"
        )
    return _sparse_softmax_cross_entropy_with_logits(logits, labels)
