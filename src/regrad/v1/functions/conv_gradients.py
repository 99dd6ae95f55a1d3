"""The gradients of convolutions as functions of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import regrad as rg
from regrad.core.tensor import Tensor, TensorLike
from regrad.errors import GraphError
from regrad.v1.functions.convolution import (
    Padding,
    channels_last,
    conv2d_transpose,
    padding_of,
    spatial,
)
from regrad.v1.graph.conversion import as_sizes
from regrad.v1.graph.forms import one_op
from regrad.v1.graph.kinds import FLOATS

__all__ = ["conv2d_backprop_filter", "conv2d_backprop_input"]


def conv2d_backprop_input(
    input_sizes: TensorLike, filter: TensorLike, out_backprop: TensorLike,
    strides: Sequence[int], padding: Padding, use_cudnn_on_gpu: bool = True,
    data_format: str = "NHWC", dilations: Sequence[int] = (1, 1, 1, 1), name: str | None = None,
) -> Any:  # fmt: skip
    """Return the gradient of `conv2d` with respect to the images; see `conv2d_transpose`.

    Args:
        input_sizes: The shape of the images, a tensor of integers or a list.
        filter: The filter of the convolution, (height, width, in, out).
        out_backprop: The gradient of the result.
        strides, padding, data_format, dilations: The arguments of the convolution.
        use_cudnn_on_gpu: Without effect.

    Returns:
        A tensor of the shape `input_sizes`.

    Op type: `Conv2DBackpropInput`. Source: `tf.nn.conv2d_backprop_input`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default():
    ...     dy, w = tf.zeros([1, 4, 4, 5]), tf.zeros([3, 3, 2, 5])
    ...     print(tf.nn.conv2d_backprop_input([1, 4, 4, 2], w, dy, [1, 1, 1, 1], "SAME").shape)
    (1, 4, 4, 2)
    """
    name = name or "Conv2DBackpropInput"
    return conv2d_transpose(
        out_backprop, filter, input_sizes, strides, padding, data_format, name, dilations=dilations
    )


def conv2d_backprop_filter(
    input: TensorLike, filter_sizes: TensorLike, out_backprop: TensorLike,
    strides: Sequence[int], padding: Padding, use_cudnn_on_gpu: bool = True,
    data_format: str = "NHWC", dilations: Sequence[int] = (1, 1, 1, 1), name: str | None = None,
) -> Any:  # fmt: skip
    """Return the gradient of `conv2d` with respect to the filter.

    Args:
        input: The images of the convolution.
        filter_sizes: The shape of the filter, a tensor of integers or a list.
        out_backprop: The gradient of the result.
        strides, padding, dilations: The arguments of the convolution.
        data_format: "NHWC".
        use_cudnn_on_gpu: Without effect.

    Returns:
        A tensor of the shape `filter_sizes`.

    Raises:
        GraphError: the data format is not supported. The error is a ValueError.

    Op type: `Conv2DBackpropFilter`. Source: `tf.nn.conv2d_backprop_filter`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default():
    ...     x, dy = tf.zeros([1, 4, 4, 2]), tf.zeros([1, 4, 4, 5])
    ...     print(tf.nn.conv2d_backprop_filter(x, [3, 3, 2, 5], dy, [1, 1, 1, 1], "SAME").shape)
    (3, 3, 2, 5)
    """
    if not channels_last(data_format, 2):
        raise GraphError("conv2d_backprop_filter: data_format must be 'NHWC'")
    return one_op(
        "Conv2DBackpropFilter", name or "Conv2DBackpropFilter", _by_filter, input, out_backprop,
        kinds=FLOATS, shape=as_sizes(filter_sizes), strides=spatial(strides, 2, True, "strides"),
        dilations=spatial(dilations, 2, True, "dilations"), pad=padding_of(padding, 2, True),
    )  # fmt: skip


def _by_filter(x: Tensor, dy: Tensor, shape: Any, strides: Any, pad: Any, dilations: Any) -> Any:
    return rg.find_op("Conv2DBackpropFilter").function(x, dy, shape, strides, pad, dilations)
