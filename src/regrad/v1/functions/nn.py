"""`tf.nn`: TensorFlow 1's names, argument orders and defaults on `regrad.nn`.

If TensorFlow computes a function with one op and regrad has this op type, the function makes one
op. Otherwise it makes a composition of public ops.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

import regrad as rg
from regrad.core.op import TensorLike, op
from regrad.core.registry import gradient
from regrad.errors import ArgumentError, GraphError, ShapeError
from regrad.graph.deferred import deferrable
from regrad.shapes.sizes import differ
from regrad.shapes.table import shape_of as shape_form
from regrad.v1.functions import random_ops
from regrad.v1.functions.convolution import *
from regrad.v1.functions.convolution import channels_last, to_first, to_last
from regrad.v1.functions.math import sigmoid as sigmoid
from regrad.v1.functions.math import tanh as tanh
from regrad.v1.graph.conversion import as_sizes, build, convert_to_tensor, static_value
from regrad.v1.graph.forms import axes_of, one_op, renamed, scope, shape_of, tensor
from regrad.v1.graph.graphs import current_graph
from regrad.v1.graph.kinds import ANY, FLOATS, INEXACT, REALS, check_kinds
from regrad.v1.graph.rows import TENSOR, define, elementwise, listed, row, written
from regrad.v1.graph.tensors import is_tensor
from regrad.v1.graph.values import alike, constant_value, ensure, floats, indices_from_zero, of_rank

# -- activations ---------------------------------------------------------------------------------

relu, relu6 = elementwise(REALS, rg.nn.relu, rg.nn.relu6, place="tf.nn", names="features")
elu, selu, softplus, softsign, swish = elementwise(
    FLOATS, rg.nn.elu, rg.nn.selu, rg.nn.softplus, rg.nn.softsign, swish=rg.nn.silu,
    place="tf.nn", names="features",
)  # fmt: skip


def leaky_relu(features: TensorLike, alpha: TensorLike = 0.2, name: str | None = None) -> Any:
    """Return x where x > 0, `alpha * x` elsewhere.

    Args:
        features: A tensor or array of real floats, or a number.
        alpha: The slope for negative numbers, a number or a tensor.

    Returns:
        A tensor of the same shape and dtype.

    Op type: `LeakyRelu`, or `Prelu` if alpha is a tensor. Source: `tf.nn.leaky_relu`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.nn.leaky_relu([-1.0, 2.0])))
    [-0.2  2. ]
    """
    name = name or "LeakyRelu"
    if is_tensor(alpha):
        return one_op("Prelu", name, rg.nn.prelu, features, alpha, kinds=FLOATS)
    return one_op("LeakyRelu", name, rg.nn.leaky_relu, features, kinds=FLOATS, alpha=alpha)


def _last_by_default(axis: TensorLike) -> int:
    return -1 if axis is None else axes_of(axis)


@row("tf.nn", "ConcatV2", kinds=FLOATS, scope="CRelu")
def crelu(features, name=None, axis=-1):
    """Return `relu` of x and of -x, concatenated along `axis`.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.nn.crelu(rg.asarray([-1.0, 2.0]))
    Tensor([0., 2., 1., 0.], dtype=float32)
    """
    return rg.nn.relu(rg.concat([features, -features], axis=axis))


@row("tf.nn", "Softmax: * | T", rg.nn.softmax, FLOATS, axis=_last_by_default)
def softmax(logits, axis=None, name=None, dim=None):
    """Return `exp(x) / sum(exp(x))` along `axis`, the last by default.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.nn.softmax(rg.asarray([1.0, 1.0]))
    Tensor([0.5, 0.5], dtype=float32)
    """


@row("tf.nn", "LogSoftmax: * | T", rg.nn.log_softmax, FLOATS, axis=_last_by_default)
def log_softmax(logits, axis=None, name=None, dim=None):
    """Return `log(softmax(x))` along `axis`, the last by default.

    The result is accurate even where the softmax rounds to 0 or 1.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.nn.log_softmax(rg.asarray([1.0, 1.0]))
    Tensor([-0.6931472, -0.6931472], dtype=float32)
    """


# -- losses of logits ----------------------------------------------------------------------------


def _check_named(function: str, sentinel: None, labels: TensorLike, logits: TensorLike) -> None:
    """Raise unless labels and logits are passed by name. Their order is easy to confuse."""
    if sentinel is not None:
        raise GraphError(
            f"Only call `{function}` with named arguments (labels=..., logits=..., ...)"
        )
    if labels is None or logits is None:
        raise GraphError("Both labels and logits must be provided.")


@written("tf.nn")
def softmax_cross_entropy_with_logits(
    _sentinel=None, labels=None, logits=None, dim=-1, name=None, axis=None
):
    """Return `-sum(labels * log_softmax(logits))` along an axis. The labels get no gradient.

    Pass the arguments by name.

    Args:
        labels: Probabilities, of the shape of the logits.
        logits: A tensor or array of real floats.
        dim: The old name of `axis`.
        axis: The axis of classes, by default the last.

    Returns:
        A tensor of the losses, of the shape of the logits without that axis.

    Raises:
        GraphError: labels or logits are missing, or passed by position.
        ShapeError: the shapes differ.

    Op types: `StopGradient`, `LogSoftmax`, `Mul`, `Sum`, `Neg`.
    Source: `tf.nn.softmax_cross_entropy_with_logits`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     labels, logits = [[0.0, 1.0]], [[5.0, 5.0]]
    ...     loss = tf.nn.softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    ...     print(sess.run(loss))
    [0.6931472]
    """
    _check_named("softmax_cross_entropy_with_logits", _sentinel, labels, logits)
    (logits,) = floats("softmax_cross_entropy_with_logits", logits)
    attrs = {"axis": axes_of(dim if axis is None else axis), "fixed": True}
    name = name or "softmax_cross_entropy_with_logits_sg"
    return one_op(None, name, _cross_entropy, labels, logits, same=False, **attrs)


@written("tf.nn")
def softmax_cross_entropy_with_logits_v2(labels, logits, axis=None, name=None, dim=None):
    """Return `-sum(labels * log_softmax(logits))` along `axis`. The labels get a gradient too.

    Args:
        labels: Probabilities, of the shape of the logits.
        logits: A tensor or array of real floats.
        axis: The axis of classes, by default the last.
        dim: The old name of `axis`.

    Returns:
        A tensor of the losses, of the shape of the logits without that axis.

    Raises:
        ShapeError: the shapes differ.

    Source: `tf.nn.softmax_cross_entropy_with_logits_v2`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     labels, logits = [[0.0, 1.0]], [[5.0, 5.0]]
    ...     print(sess.run(tf.nn.softmax_cross_entropy_with_logits_v2(labels, logits)))
    [0.6931472]
    """
    _check_named("softmax_cross_entropy_with_logits_v2", None, labels, logits)
    (logits,) = floats("softmax_cross_entropy_with_logits", logits)
    attrs = {"axis": _last_by_default(renamed("axis", axis, "dim", dim)), "fixed": False}
    name = name or "softmax_cross_entropy_with_logits"
    return one_op(None, name, _cross_entropy, labels, logits, same=False, **attrs)


@deferrable
def _cross_entropy(labels: TensorLike, logits: rg.Tensor, axis: int, fixed: bool) -> Any:
    labels = rg.asarray(labels)  # (labels next to eager logits may be a list)
    if labels.dtype != logits.dtype:
        labels = rg.astype(labels, logits.dtype)
    if fixed:
        labels = rg.stop_gradient(labels)
    if labels.ndim != logits.ndim:  # TensorFlow flattens the axes of examples
        labels = rg.reshape(labels, logits.shape)
    labels, logits = alike("softmax_cross_entropy_with_logits", labels, logits)
    if axis != -1:
        labels, logits = rg.moveaxis(labels, axis, -1), rg.moveaxis(logits, axis, -1)
    return rg.losses.softmax_cross_entropy(labels, logits, None, "none")


@written("tf.nn", "SparseSoftmaxCrossEntropyWithLogits: * | T Tlabels")
def sparse_softmax_cross_entropy_with_logits(_sentinel=None, labels=None, logits=None, name=None):
    """Return `-log_softmax(logits)` at the class of each example.

    Pass the arguments by name.

    Args:
        labels: A tensor or array of integers, the class indices.
        logits: A tensor or array of real floats, with the classes along the last axis.

    Returns:
        A tensor of the losses, of the shape of the labels.

    Raises:
        GraphError: labels or logits are missing, or passed by position.
        InvalidArgumentError: in the run, a label is out of range.

    Op type: `SparseSoftmaxCrossEntropyWithLogits`. Its only output is the losses.
    Source: `tf.nn.sparse_softmax_cross_entropy_with_logits`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=[1], logits=[[5.0, 5.0]])
    ...     print(sess.run(loss))
    [0.6931472]
    """
    what = "sparse_softmax_cross_entropy_with_logits"
    op_type = "SparseSoftmaxCrossEntropyWithLogits"
    _check_named(what, _sentinel, labels, logits)
    (logits,) = floats(what, logits)
    with scope(name or op_type, labels, logits):  # as in TensorFlow, scope and op have one name
        return one_op(op_type, name, sparse_cross_entropy, labels, logits, same=False)


def sparse_cross_entropy(labels: rg.Tensor, logits: rg.Tensor) -> Any:
    """Return `-log_softmax(logits)` at the labels, which must not be negative."""
    labels = indices_from_zero("sparse_softmax_cross_entropy_with_logits", labels)
    return rg.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)


@written("tf.nn")
def sigmoid_cross_entropy_with_logits(_sentinel=None, labels=None, logits=None, name=None):
    """Return the elementwise cross entropy of probabilities `labels` and `sigmoid(logits)`.

    Pass the arguments by name.

    Args:
        labels: Probabilities, of the shape of the logits.
        logits: A tensor or array of real floats.

    Returns:
        A tensor of the losses, of the shape of the logits.

    Raises:
        GraphError: labels or logits are missing, or passed by position.
        ShapeError: the shapes differ.

    A composition. Source: `tf.nn.sigmoid_cross_entropy_with_logits`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     loss = tf.nn.sigmoid_cross_entropy_with_logits(labels=[1.0], logits=[0.0])
    ...     print(sess.run(loss))
    [0.6931472]
    """
    _check_named("sigmoid_cross_entropy_with_logits", _sentinel, labels, logits)
    name = name or "logistic_loss"
    return one_op(None, name, _sigmoid_cross_entropy, labels, logits, kinds=FLOATS)


@deferrable
def _sigmoid_cross_entropy(labels: rg.Tensor, logits: rg.Tensor) -> Any:
    labels, logits = alike("sigmoid_cross_entropy_with_logits", labels, logits)
    return rg.losses.sigmoid_cross_entropy(labels, logits, None, "none")


@row(
    "tf.nn", None, kinds=FLOATS, deferred=True, scope="logistic_loss", labels=TENSOR, logits=TENSOR,
    pos_weight=TENSOR, targets="labels",
)  # fmt: skip
def weighted_cross_entropy_with_logits(
    labels: Any = None, logits: Any = None, pos_weight=None, name=None, targets=None
):
    """Return `sigmoid_cross_entropy_with_logits`, with positive examples times `pos_weight`.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> labels, logits = rg.asarray([1.0, 0.0]), rg.asarray([0.0, 0.0])
    >>> tf.nn.weighted_cross_entropy_with_logits(labels, logits, 2.0)
    Tensor([1.3862944, 0.6931472], dtype=float32)
    """
    labels, logits = alike("weighted_cross_entropy_with_logits", labels, logits)
    yes = pos_weight * labels * rg.nn.log_sigmoid(logits)
    return (labels - 1) * rg.nn.log_sigmoid(-logits) - yes


@row("tf.nn", None, kinds=FLOATS, deferred=True)
def log_poisson_loss(targets, log_input, compute_full_loss=False):
    """Return `exp(c) - z * c` for targets z and log-rates c, optionally plus Stirling's term.

    Args:
        compute_full_loss: Add Stirling's term. It does not affect the gradient with respect to c.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.nn.log_poisson_loss(rg.asarray([1.0]), rg.asarray([0.0]))
    Tensor([1.], dtype=float32)
    """
    targets, log_input = alike("log_poisson_loss", targets, log_input)
    y = rg.exp(log_input) - targets * log_input
    if not compute_full_loss:
        return y
    some = rg.greater(targets, 1)
    n = rg.where(some, targets, 1)
    stirling = n * rg.log(n) - n + 0.5 * rg.log(2 * math.pi * n)
    return y + rg.where(some, stirling, 0)


@row("tf.nn", "RealDiv", kinds=FLOATS, scope="L2Loss")
def l2_loss(t: rg.Tensor) -> rg.Tensor:
    """Return `sum(x ** 2) / 2`, made of `Square`, `Sum` and `RealDiv` (TensorFlow: `L2Loss`).

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.nn.l2_loss(rg.asarray([3.0, 4.0]))
    Tensor(12.5, dtype=float32)
    """
    return rg.sum(rg.square(t)) / 2


# -- normalisation -------------------------------------------------------------------------------


@row("tf.nn", "Mul", rg.nn.l2_normalize, FLOATS, scope="l2_normalize")
def l2_normalize(x, axis=None, epsilon=1e-12, name=None, dim=None):
    """Return `x / sqrt(max(sum(x²), epsilon))`, summed along `axis` (by default all axes).

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.nn.l2_normalize(rg.asarray([3.0, 4.0]), axis=0)
    Tensor([0.6, 0.8], dtype=float32)
    """


@row("tf.nn", None, kinds=INEXACT, axes=axes_of, shift=None)
def moments(x, axes, shift=None, name=None, keep_dims=None, keepdims: Any = None):
    """Return the mean and the variance over `axes`.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> mean, variance = tf.nn.moments(rg.asarray([1.0, 3.0]), [0])
    >>> mean.item(), variance.item()
    (2.0, 1.0)
    """
    return rg.nn.moments(x, axes, keepdims)


@written("tf.nn")
def batch_normalization(x, mean, variance, offset, scale, variance_epsilon: float, name=None):
    """Return `(x - mean) / sqrt(variance + variance_epsilon) * scale + offset`.

    Args:
        x: A tensor or array of real floats.
        mean, variance: The moments, which broadcast to x.
        offset, scale: The summand and the factor, which broadcast to x. None omits them.
        variance_epsilon: A small number that prevents a division by zero.

    Returns:
        A tensor of x's shape and dtype.

    A composition. Source: `tf.nn.batch_normalization`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.nn.batch_normalization([1.0, 3.0], 2.0, 1.0, None, 10.0, 0.0)))
    [-10.  10.]
    """
    given = {"mean": mean, "variance": variance, "offset": offset, "scale": scale}
    present = {k: v for k, v in given.items() if v is not None}

    def normalize(x: rg.Tensor, *values: rg.Tensor) -> Any:
        tensors = dict(zip(present, values, strict=True))
        return rg.nn.batch_norm(x, **tensors, epsilon=variance_epsilon)

    return one_op(None, name or "batchnorm", normalize, x, *present.values(), kinds=FLOATS)


class FusedBatchNorm(NamedTuple):
    """The result of `fused_batch_norm`.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> images = rg.asarray([[[[1.0]], [[3.0]]]])
    >>> result = tf.nn.fused_batch_norm(images, rg.ones(1), rg.zeros(1))
    >>> result.batch_mean.tolist(), result.batch_var.tolist()
    ([2.0], [2.0])
    """

    y: Any
    batch_mean: Any
    batch_var: Any


@written("tf.nn")
def fused_batch_norm(
    x, scale, offset, mean: Any = None, variance: Any = None, epsilon=0.001, data_format="NHWC",
    is_training=True, name=None,
) -> FusedBatchNorm:  # fmt: skip
    """Return images normalized by their own or by given moments, and these moments.

    Args:
        x: Images in the order of `data_format`.
        scale, offset: One number for each channel.
        mean, variance: The moments to use if `is_training` is false.
        epsilon: A small number that prevents a division by zero.
        data_format: "NHWC" or "NCHW".
        is_training: Whether to use the images' own moments.

    Returns:
        The images `y`, `batch_mean` and `batch_var`. In training the variance is the unbiased
        estimate with the divisor n - 1, as in TensorFlow.

    A composition. Source: `tf.nn.fused_batch_norm`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     x = tf.constant([[[[1.0], [3.0]]]])
    ...     y, mean, variance = tf.nn.fused_batch_norm(x, [1.0], [0.0], epsilon=0.0)
    ...     print(sess.run(y).ravel(), sess.run([mean, variance]))
    [-1.  1.] [array([2.], dtype=float32), array([2.], dtype=float32)]
    """
    last = channels_last(data_format, 2)
    with scope(name or "FusedBatchNorm", x):
        x = x if last else build("Transpose", None, rg.permute_dims, x, axes=to_last(2))
        unbiased = variance
        if is_training:
            mean, variance = moments(x, (0, 1, 2))
            unbiased = variance * bessel(x, (0, 1, 2))
        y = batch_normalization(x, mean, variance, offset, scale, epsilon)
        y = y if last else build("Transpose", None, rg.permute_dims, y, axes=to_first(2))
    return FusedBatchNorm(y, mean, unbiased)


def bessel(x: TensorLike, axes: tuple[int, ...]) -> Any:
    """Return n / (n - 1) for the n elements along the axes, the factor of an unbiased variance."""

    def factor(x: rg.Tensor) -> Any:
        n = rg.sum(rg.ones_like(x), axis=axes)
        return n / rg.maximum(n - 1, 1)

    return one_op(None, "bessel", factor, x)


def _normalize_locally(x: rg.Tensor, **attrs: Any) -> rg.Tensor:
    return rg.nn.local_response_normalization(of_rank("lrn", x, 4), **attrs)


@row("tf.nn", "LRN", _normalize_locally, FLOATS)
def local_response_normalization(input, depth_radius=5, bias=1, alpha=1, beta=0.5):
    """Return the input divided by `(bias + alpha * sum(x ** 2)) ** beta` over nearby channels.

    Args:
        depth_radius: The largest distance of a nearby channel.
        bias: The offset.
        alpha: The factor of the sum.
        beta: The exponent.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.nn.local_response_normalization(rg.asarray([[[[0.0, 3.0]]]]))
    Tensor([[[[0.        , 0.94868326]]]], dtype=float32)
    """


lrn = local_response_normalization


def _zero_fraction(x: rg.Tensor) -> rg.Tensor:
    """Return the fraction of elements that are 0, as float32."""
    return rg.mean(rg.astype(rg.equal(x, 0), rg.float32))


zero_fraction = define("tf.nn.zero_fraction(value)", None, _zero_fraction, ANY, "[0.0, 3.0]", "0.5")


# -- affine --------------------------------------------------------------------------------------


def _biased(shape: Any, biases: Any, data_format: str) -> Any:
    """Return the shape of a value with biases, as far as they are known."""
    axis = 1 if data_format == "NCHW" else -1
    if biases is not None and len(biases) != 1:
        raise ShapeError(f"bias_add: Shape must be rank 1 but is rank {len(biases)}: {biases}")
    if shape is not None and len(shape) < 2:
        raise ShapeError(f"bias_add: expected a value of rank 2 or more, got the shape {shape}")
    if shape is not None and biases is not None and differ(shape[axis], biases[0]):
        raise ShapeError(f"bias_add: {biases[0]} biases for the channels of {shape}")
    return shape


@op("BiasAdd", broadcasts=True)
def _bias_add(xp, a: TensorLike, b: TensorLike, /, data_format: str = "NHWC") -> rg.Tensor:
    _biased(tuple(a.shape), tuple(b.shape), data_format)
    return a + (xp.reshape(b, (-1, *[1] * (a.ndim - 2))) if data_format == "NCHW" else b)


shape_form("BiasAdd")(lambda arguments, attrs: _biased(*[x.shape for x in arguments], **attrs))
gradient("BiasAdd", "a")(lambda dy: dy)


@gradient("BiasAdd", "b")
def _(dy: rg.Tensor, b_shape: Any, data_format: str) -> Any:
    return rg.sum_to(rg.moveaxis(dy, 1, -1), b_shape) if data_format == "NCHW" else dy


def _channel_order(data_format: str | None) -> str:
    if not (data_format or "NHWC").startswith("N"):
        raise GraphError(f"data_format must be 'NHWC' or 'NCHW' (N…C or NC…), got {data_format!r}")
    return "NCHW" if (data_format or "NHWC").startswith("NC") else "NHWC"


@row("tf.nn", "BiasAdd", _bias_add, data_format=_channel_order)
def bias_add(value, bias, data_format=None):
    """Return `value + bias`, with one number per channel.

    Args:
        value: A tensor or array of numbers.
        bias: A tensor or array of rank 1.
        data_format: The place of the channels: last ("NHWC", None) or second ("NCHW").

    Returns:
        A tensor of the value's shape and dtype.

    Raises:
        ShapeError: the value has a rank below 2, or the bias does not have rank 1 or does not
            fit the channels.
        GraphError: the data format is unknown.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.nn.bias_add([[1.0, 2.0]], [10.0, 20.0])))
    [[11. 22.]]
    """


def _affine(x: rg.Tensor, weights: rg.Tensor, biases: rg.Tensor) -> rg.Tensor:
    """Return `matmul(x, weights) + biases`."""
    return _bias_add(rg.matmul(x, weights), biases, data_format="NHWC")


@row("tf.nn", "BiasAdd", _affine, FLOATS, scope="xw_plus_b")
def xw_plus_b(x, weights, biases):
    """Return `matmul(x, weights) + biases`.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.nn.xw_plus_b(rg.asarray([[1.0, 2.0]]), rg.asarray([[3.0], [4.0]]), rg.asarray([5.0]))
    Tensor([[16.]], dtype=float32)
    """


@row("tf.nn", "Relu", kinds=FLOATS, scope="relu_layer")
def relu_layer(x: rg.Tensor, weights: rg.Tensor, biases: rg.Tensor) -> rg.Tensor:
    """Return `relu(matmul(x, weights) + biases)`.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.nn.relu_layer(rg.asarray([[1.0, 2.0]]), rg.asarray([[3.0], [4.0]]), rg.asarray([5.0]))
    Tensor([[16.]], dtype=float32)
    """
    return rg.nn.relu(_affine(x, weights, biases))


# -- dropout, lookups ----------------------------------------------------------------------------


@written("tf.nn")
def dropout(x, keep_prob=None, noise_shape=None, seed=None, name=None, rate=None):
    """Return x with elements set to 0 at random in each run, and the others scaled up.

    Args:
        x: The input, floats.
        keep_prob: The probability of keeping an element: a number, or a tensor such as a
            placeholder. If it is the constant 1, the result is x itself.
        noise_shape: A shape that broadcasts to x's shape, to drop elements together. An entry
            None means x's size.
        seed: See `tf.set_random_seed`.
        name: The name scope.
        rate: `1 - keep_prob`, an alternative to `keep_prob`.

    Returns:
        A tensor of x's shape and dtype.

    Raises:
        GraphError: the caller passes both or neither of keep_prob and rate, or a number is out of
            range.

    Source: `tf.nn.dropout`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sorted(set(sess.run(tf.nn.dropout(tf.ones([100]), 0.5)).tolist())))
    [0.0, 2.0]
    """
    (x,) = floats("dropout", tensor(x, name="x"))
    keep = _keep_probability(keep_prob, rate)
    if constant_value(keep) == 1:
        return x
    with scope(name or "dropout"):
        x = convert_to_tensor(x)
        keep = convert_to_tensor(keep, x.dtype.base_dtype, name="keep_prob")
        inner = current_graph().entering(x._read())  # x in the branch being built
        shape = inner._data.shape if noise_shape is None else noise_shape
        if isinstance(noise_shape, list | tuple):
            shape = [inner._data.shape[i] if n is None else n for i, n in enumerate(noise_shape)]
        noise = random_ops.noise(random_ops.UNIFORM, None, shape, x.dtype.base_dtype, seed)
        y = build("SelectV2", None, _drop, x, keep, noise)
        y.set_shape(x.shape)
        return y


def _drop(x: rg.Tensor, keep: rg.Tensor, noise: rg.Tensor) -> Any:
    return rg.where(rg.less(noise, keep), x / keep, 0)


def _keep_probability(keep_prob: TensorLike, rate: TensorLike) -> Any:
    if rate is not None and keep_prob is None:
        known = constant_value(rate)
        keep_prob = 1 - (rate if known is None else known)
    elif keep_prob is None or rate is not None:
        raise GraphError("dropout takes keep_prob, or rate, which is 1 - keep_prob")
    known = constant_value(keep_prob)
    if known is not None and not 0 < known <= 1:
        raise GraphError(
            f"keep_prob must be a scalar tensor or a float in the range (0, 1], got {known}"
        )
    return keep_prob


@written("tf.nn")
def embedding_lookup(
    params, ids, partition_strategy="mod", name=None, validate_indices=True, max_norm=None
):
    """Return the rows `ids` of a table.

    Args:
        params: A table, or a list of parts of one table. With "mod", row i is in part
            `i % len(params)`. With "div", the parts follow each other.
        ids: A tensor or array of integers.
        partition_strategy: "mod" or "div".
        validate_indices: Without effect: an id out of range always raises in the run.
        max_norm: Must be None.

    Returns:
        A tensor of the shape of the ids, followed by the shape of a row.

    Raises:
        ArgumentError: max_norm is not None.
        GraphError: the strategy is unknown.

    Op type: `GatherV2`. Source: `tf.nn.embedding_lookup`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     table = tf.constant([[1.0], [2.0], [3.0]])
    ...     print(sess.run(tf.nn.embedding_lookup(table, [2, 0])).tolist())
    [[3.0], [1.0]]
    """
    if max_norm is not None:
        raise ArgumentError("embedding_lookup: max_norm is not supported; call tf.clip_by_norm")
    if partition_strategy not in ("mod", "div"):
        raise GraphError(f"embedding_lookup: expected 'mod' or 'div', got {partition_strategy!r}")
    tables = params if isinstance(params, list | tuple) else [params]
    name = name or "embedding_lookup"
    if len(tables) == 1:
        return one_op("GatherV2", name, _embed, tables[0], ids, same=False)
    sizes = [static_value(shape_of(t)[0], "a table's size") for t in map(tensor, tables)]
    counts = np.asarray(sizes, np.int32)

    def look_up(ids: rg.Tensor, *tables: rg.Tensor) -> Any:
        ids = _dealt(rg.asarray(ids), counts) if partition_strategy == "mod" else ids
        return _embed(rg.concat(tables), ids)

    return one_op(None, name, look_up, ids, *tables, same=False)


def _embed(table: rg.Tensor, ids: rg.Tensor) -> Any:
    return rg.nn.embedding(table, indices_from_zero("embedding_lookup", ids))


def _dealt(ids: rg.Tensor, counts: np.ndarray) -> Any:
    """Return the rows of the joined parts for ids under the strategy "mod".

    For a row that its part does not have, the result is out of range.
    """
    part, row = ids % len(counts), rg.floor_divide(ids, len(counts))
    has = rg.logical_and(row >= 0, row < rg.take(counts, part))
    starts = np.cumsum(counts, dtype=counts.dtype) - counts
    return rg.where(has, rg.take(starts, part) + row, int(counts.sum()))


class TopKV2(NamedTuple):
    """The result of `top_k`.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.nn.top_k(rg.asarray([3, 9, 1]), 2).indices.tolist()
    [1, 0]
    """

    values: Any
    indices: Any


@row("tf.nn", "TopKV2: * k | T sorted=yes", kinds=REALS, k=as_sizes, sorted=None)
def top_k(input, k=1, sorted=True):
    """Return the k largest elements of each row, largest first, and their indices (int32).

    Args:
        k: How many.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> values, places = tf.nn.top_k(rg.asarray([3, 9, 1]), 2)
    >>> values.tolist(), places.tolist()
    ([9, 3], [1, 0])
    """
    values, indices = rg.top_k(input, k)
    return TopKV2(values, rg.astype(indices, rg.int32))


@row("tf.nn", None, same=False, deferred=True)
def in_top_k(predictions, targets, k):
    """Return, for each row, whether fewer than k predictions exceed the target's prediction.

    Args:
        predictions: A tensor or array of real floats, of the shape (rows, classes).
        targets: A tensor or array of integers, the class of each row.
        k: The number of top predictions that count as correct.

    Returns:
        A tensor with a bool for each row.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.nn.in_top_k([[0.1, 0.9], [0.8, 0.2]], [1, 1], 1)))
    [ True False]
    """
    check_kinds("in_top_k", INEXACT, predictions)
    targets = ensure("in_top_k", targets, predictions.shape[:-1])
    chosen = rg.take_along_axis(predictions, rg.expand_dims(targets, -1), axis=-1)
    above = rg.sum(rg.astype(rg.greater(predictions, chosen), rg.int32), axis=-1)
    return rg.logical_and(rg.less(above, k), rg.isfinite(rg.squeeze(chosen, axis=-1)))


__all__ = listed(__name__, "FusedBatchNorm TopKV2 leaky_relu lrn sigmoid tanh", "tf.nn")
