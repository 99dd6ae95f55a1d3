"""Neural network functions: layers, activations, normalization, attention, dropout.

Images are NHWC and filters HWIO, as in TensorFlow. No function of this module holds parameters.
"""

# isort: skip_file
from __future__ import annotations

import math

import numpy as np

from regrad.core.backends import is_inexact
from regrad.core.dispatch import lift
from regrad.core.hints import hint_in as _hint_in
from regrad.core.shapes import Shape
from regrad.core.tensor import Tensor, TensorLike
from regrad.errors import ArgumentError, DTypeError, ShapeError
from regrad.graph.deferred import deferrable
from regrad.ops.activation import (
    elu, gelu, hard_sigmoid, hard_tanh, leaky_relu, log_sigmoid, log_softmax, mish, prelu, relu,
    relu6, selu, sigmoid, silu, softmax, softplus, softsign,
)  # fmt: skip
from regrad.ops.array import tril
from regrad.ops.binary import logical_and, where
from regrad.ops.convolution import (
    conv1d, conv2d, conv2d_transpose, conv3d, conv3d_transpose, depthwise_conv2d, separable_conv2d,
)  # fmt: skip
from regrad.ops.creation import ones
from regrad.ops.cross_entropy import sparse_softmax_cross_entropy_with_logits
from regrad.ops.image import (
    batch_to_space, dilation2d, resize_bilinear, resize_nearest, space_to_batch,
)  # fmt: skip
from regrad.ops.indexing import take
from regrad.ops.matmul import matmul
from regrad.ops.normalization import batch_norm, l2_normalize, layer_norm
from regrad.ops.pooling import (
    avg_pool, avg_pool3d, local_response_normalization, max_pool, max_pool3d,
)  # fmt: skip
from regrad.ops.reduction import moments
from regrad.random import Key, bernoulli

__all__ = [
    "avg_pool", "avg_pool3d", "batch_norm", "batch_to_space", "conv1d", "conv2d",
    "conv2d_transpose", "conv3d", "conv3d_transpose", "depthwise_conv2d", "dilation2d", "dropout",
    "elu", "embedding", "gelu", "hard_sigmoid", "hard_tanh", "l2_normalize", "layer_norm",
    "leaky_relu", "local_response_normalization", "log_sigmoid", "log_softmax", "max_pool",
    "max_pool3d", "mish", "moments", "prelu", "relu", "relu6", "resize_bilinear", "resize_nearest",
    "scaled_dot_product_attention", "selu", "separable_conv2d", "sigmoid", "silu", "softmax",
    "softplus", "softsign", "space_to_batch", "sparse_softmax_cross_entropy_with_logits",
]  # fmt: skip


@deferrable
def dropout(x: TensorLike, rate: float, key: Key, noise_shape: Shape | None = None) -> Tensor:
    """Return x with random elements set to 0, and the others scaled up to preserve the mean.

    Args:
        x: The input.
        rate: The probability of dropping an element, at least 0 and below 1.
        key: The source of randomness, see `regrad.random`: a NumPy Generator (each call drops
            different elements), an int seed, or a JAX key.
        noise_shape: A shape that broadcasts to x's shape, to drop elements together:
            `(n, 1, 1, channels)` drops whole channels of images.

    Returns:
        A Tensor of x's shape and dtype. Integers become the default dtype.

    Raises:
        ArgumentError: `rate` is not a number in [0, 1), or `key` is not a source of randomness.

    A composition of `SelectV2` and `RealDiv`. Source: `tf.dropout` of TensorFlow.js; Srivastava et
    al. (2014).

    >>> sorted(set(rg.nn.dropout(rg.ones((100,)), 0.5, 0).tolist()))
    [0.0, 2.0]
    """
    x = lift(x)
    if isinstance(rate, Tensor) or not 0 <= rate < 1:
        raise ArgumentError(f"dropout: rate must be a number in [0, 1), got {rate!r}")
    if rate == 0:
        return x
    keep = bernoulli(key, x.shape if noise_shape is None else noise_shape, 1 - rate)
    return where(keep, x / (1 - rate), 0)


@deferrable
def embedding(table: TensorLike, ids: TensorLike) -> Tensor:
    """Return rows of a table.

    Args:
        table: The rows, along the first axis.
        ids: The row numbers, integers of any shape.

    Returns:
        A Tensor of the table's dtype. Its shape is the shape of ids, followed by a row's shape.

    Raises:
        IndexRangeError: a row number is out of range (on NumPy and PyTorch).

    Op type: `GatherV2`. Source: `tf.nn.embedding_lookup`.

    >>> rg.nn.embedding(rg.tensor([[1.0, 2.0], [3.0, 4.0]]), [1, 1]).tolist()
    [[3.0, 4.0], [3.0, 4.0]]
    """
    return take(table, ids, axis=0)


@deferrable
def scaled_dot_product_attention(
    q: TensorLike,
    k: TensorLike,
    v: TensorLike,
    mask: TensorLike | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return `softmax(q @ kᵀ * scale) @ v`: a weighted average of the values for each query.

    The function is a composition of public ops, so an active rule for `Softmax` or `MatMul` fires.

    Args:
        q: Queries, shape `(..., queries, features)`.
        k: Keys, shape `(..., keys, features)`.
        v: Values, shape `(..., keys, any)`.
        mask: Bools that mark the keys a query may attend to, or floats that are added to the
            scores. The shape broadcasts to `(..., queries, keys)`. A query without any key
            returns zeros.
        is_causal: Whether query i attends only to the keys 0 to i, in addition to `mask`.
        scale: The factor of the scores, by default `1 / sqrt(features)`.

    Returns:
        A Tensor of shape `(..., queries, any)`.

    Raises:
        ShapeError: the shapes do not fit.
        DTypeError: `mask` has an integer dtype.

    Source: Vaswani et al., Attention Is All You Need (2017).

    >>> q, k, v = rg.ones((1, 2)), rg.ones((2, 2)), rg.tensor([[1.0], [3.0]])
    >>> rg.nn.scaled_dot_product_attention(q, k, v).tolist()
    [[2.0]]
    """
    q, k, v = lift(q), lift(k), lift(v)
    _check_attention(q, k, v)
    scale = 1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale
    scores = matmul(q * scale, k, transpose_b=True)
    seen = tril(ones((q.shape[-2], k.shape[-2]), dtype=bool)) if is_causal else None
    if mask is not None:
        mask = lift(mask)
        if is_inexact(mask.dtype):
            scores = scores + mask
        else:
            seen = _bools(mask) if seen is None else logical_and(seen, _bools(mask))
    if seen is None:
        return matmul(softmax(scores), v)
    weights = softmax(where(seen, scores, _least(scores.dtype)))
    # a query without any key has equal weights at this point, but must return zeros
    return matmul(where(seen, weights, 0), v)


def _check_attention(q: Tensor, k: Tensor, v: Tensor) -> None:
    if min(q.ndim, k.ndim, v.ndim) < 2 or q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise ShapeError(
            "scaled_dot_product_attention: q, k and v must be (..., queries, features), "
            f"(..., keys, features) and (..., keys, any), got {q.shape}, {k.shape} and {v.shape}"
        )


def _bools(mask: Tensor) -> Tensor:
    if mask.dtype.kind != "b":
        raise DTypeError(
            "scaled_dot_product_attention: mask must be bools (the keys a query may attend to) or "
            f"floats (added to the scores), got {mask.dtype}; convert it: mask = mask != 0"
        )
    return mask


def _least(dtype: np.dtype) -> float:
    """Return a score with weight 0 from which any ordinary score can be subtracted."""
    return -3e4 if dtype == np.float16 else -1e30


_hint_in(__name__)
