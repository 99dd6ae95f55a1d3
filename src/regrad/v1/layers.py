"""`tf.layers`: layers as functions, whose variables live in variable scopes of their own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import regrad as rg
from regrad.deferral import deferrable
from regrad.dims import Dim, UnknownRank
from regrad.errors import ArgumentError, GraphError
from regrad.v1 import initializers, nn
from regrad.v1.convolution import LAYOUTS
from regrad.v1.graphs import GraphKeys, add_to_collection
from regrad.v1.tensors import Tensor, build, convert_to_tensor, static_value
from regrad.v1.values import constant_value, floats
from regrad.v1.variable_scopes import get_variable, variable_scope

Function = Callable[..., Any] | None
ZEROS, ONES = initializers.Zeros(), initializers.Ones()

# -- what layers share ---------------------------------------------------------------------------


def _input(what: str, inputs: Any) -> Tensor:
    """The input as a tensor of floats."""
    return floats(what, convert_to_tensor(inputs))[0]


def _size(x: Tensor, axis: int, layer: str) -> int:
    """A size on which the shape of a variable depends."""
    shape = x._symbol.shape
    size = None if isinstance(shape, UnknownRank) else shape[axis]
    if size is None or isinstance(size, Dim):
        which = "The last dimension" if axis == -1 else f"Dimension {axis}"
        raise GraphError(
            f"{which} of the inputs to `{layer}` should be defined. Found `None`: {x}. Give the "
            "placeholder a shape, or call set_shape."
        )
    return size


def _finished(
    y: Any,
    units: int,
    data_format: str | None,
    bias: dict[str, Any] | None,
    activation: Function,
    activity_regularizer: Function,
) -> Any:
    """What comes after the linear part of a layer: bias, activation, regularizer."""
    if bias is not None:
        variable = get_variable("bias", [units], y.dtype.base_dtype, **bias)
        y = nn.bias_add(y, variable, data_format)
    if activation is not None:
        y = (getattr(nn, activation) if isinstance(activation, str) else activation)(y)
    if activity_regularizer is not None:
        add_to_collection(GraphKeys.REGULARIZATION_LOSSES, activity_regularizer(y))
    return y


def _options(
    initializer: Any, regularizer: Function, constraint: Function, trainable: bool
) -> dict[str, Any]:
    return {
        "initializer": initializer,
        "regularizer": regularizer,
        "constraint": constraint,
        "trainable": trainable,
    }


def _layout(data_format: str, n: int) -> str:
    found = {"channels_last": LAYOUTS[n][0], "channels_first": LAYOUTS[n][1]}.get(data_format)
    if found is None:
        raise GraphError(
            f"data_format must be 'channels_last' or 'channels_first', got {data_format!r}"
        )
    return found


def _spread(value: Any, n: int, what: str) -> tuple[int, ...]:
    found = static_value(value, what)
    found = found if isinstance(found, tuple) else (found,) * n
    if len(found) != n:
        raise GraphError(f"{what} is an integer or {n} of them, got {value!r}")
    return found


# -- layers with weights -------------------------------------------------------------------------


def dense(
    inputs: Any,
    units: int,
    activation: Function = None,
    use_bias: bool = True,
    kernel_initializer: Any = None,
    bias_initializer: Any = ZEROS,
    kernel_regularizer: Function = None,
    bias_regularizer: Function = None,
    activity_regularizer: Function = None,
    kernel_constraint: Function = None,
    bias_constraint: Function = None,
    trainable: bool = True,
    name: str | None = None,
    reuse: Any = None,
) -> Any:
    """`activation(inputs @ kernel + bias)`, along the last axis.

    Makes, or with `reuse` finds, the variables `kernel` and `bias` in the scope `name` (`dense`,
    `dense_1`, …).

    Source: `tf.layers.dense`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default():
    ...     y = tf.layers.dense(tf.placeholder(tf.float32, [None, 3]), 2, tf.nn.relu)
    ...     print(y, [v.name for v in tf.trainable_variables()])
    Tensor("dense/Relu:0", shape=(?, 2), dtype=float32) ['dense/kernel:0', 'dense/bias:0']
    """
    x = _input("dense", inputs)
    kernel = _options(kernel_initializer, kernel_regularizer, kernel_constraint, trainable)
    bias = _options(bias_initializer, bias_regularizer, bias_constraint, trainable)
    with variable_scope(name, "dense", reuse=reuse):
        shape = [_size(x, -1, "dense"), units]
        weights = get_variable("kernel", shape, x.dtype.base_dtype, **kernel)
        y = build("MatMul", None, rg.matmul, x, weights)
        bias = bias if use_bias else None
        return _finished(y, units, None, bias, activation, activity_regularizer)


def _conv_layer(name: str, n: int, function: Callable[..., Any]) -> Callable[..., Any]:
    layer_name = name

    def conv(
        inputs: Any,
        filters: int,
        kernel_size: Any,
        strides: Any = 1,
        padding: str = "valid",
        data_format: str = "channels_last",
        dilation_rate: Any = 1,
        activation: Function = None,
        use_bias: bool = True,
        kernel_initializer: Any = None,
        bias_initializer: Any = ZEROS,
        kernel_regularizer: Function = None,
        bias_regularizer: Function = None,
        activity_regularizer: Function = None,
        kernel_constraint: Function = None,
        bias_constraint: Function = None,
        trainable: bool = True,
        name: str | None = None,
        reuse: Any = None,
    ) -> Any:
        x = _input(layer_name, inputs)
        layout = _layout(data_format, n)
        kernel = _options(kernel_initializer, kernel_regularizer, kernel_constraint, trainable)
        bias = _options(bias_initializer, bias_regularizer, bias_constraint, trainable)
        with variable_scope(name, layer_name, reuse=reuse):
            channels = _size(x, -1 if data_format == "channels_last" else 1, layer_name)
            shape = [*_spread(kernel_size, n, "kernel_size"), channels, filters]
            weights = get_variable("kernel", shape, x.dtype.base_dtype, **kernel)
            y = function(x, weights, padding.upper(), strides, dilation_rate, None, layout)
            bias = bias if use_bias else None
            return _finished(y, filters, layout, bias, activation, activity_regularizer)

    conv.__name__ = conv.__qualname__ = name
    conv.__doc__ = (
        f"A convolution with {n} spatial axes, then bias and activation.\n\n"
        "    Variables: `kernel` (window, in, filters) and `bias`; see `dense`. Data is\n"
        '    `"channels_last"` or `"channels_first"`.\n\n'
        f"    Source: `tf.layers.{name}`."
    )
    return conv


conv1d = _conv_layer("conv1d", 1, nn.convolution)
conv2d = _conv_layer("conv2d", 2, nn.convolution)
conv3d = _conv_layer("conv3d", 3, nn.convolution)


def conv2d_transpose(
    inputs: Any,
    filters: int,
    kernel_size: Any,
    strides: Any = (1, 1),
    padding: str = "valid",
    data_format: str = "channels_last",
    activation: Function = None,
    use_bias: bool = True,
    kernel_initializer: Any = None,
    bias_initializer: Any = ZEROS,
    kernel_regularizer: Function = None,
    bias_regularizer: Function = None,
    activity_regularizer: Function = None,
    kernel_constraint: Function = None,
    bias_constraint: Function = None,
    trainable: bool = True,
    name: str | None = None,
    reuse: Any = None,
) -> Any:
    """The adjoint of a convolution, which makes images larger, then bias and activation.

    Variables: `kernel` (height, width, filters, in) and `bias`; see `dense`.

    Source: `tf.layers.conv2d_transpose`.
    """
    x = _input("conv2d_transpose", inputs)
    layout = _layout(data_format, 2)
    size, steps = _spread(kernel_size, 2, "kernel_size"), _spread(strides, 2, "strides")
    kernel = _options(kernel_initializer, kernel_regularizer, kernel_constraint, trainable)
    bias = _options(bias_initializer, bias_regularizer, bias_constraint, trainable)
    with variable_scope(name, "conv2d_transpose", reuse=reuse):
        channels = _size(x, -1 if data_format == "channels_last" else 1, "conv2d_transpose")
        weights = get_variable("kernel", [*size, filters, channels], x.dtype.base_dtype, **kernel)
        batch, *axes = x._symbol.shape
        small = axes[:2] if data_format == "channels_last" else axes[1:]
        large = [_enlarged(*each, padding) for each in zip(small, size, steps, strict=True)]
        last = data_format == "channels_last"
        shape = (batch, *large, filters) if last else (batch, filters, *large)
        y = nn.conv2d_transpose(x, weights, shape, list(steps), padding.upper(), layout)
        bias = bias if use_bias else None
        return _finished(y, filters, layout, bias, activation, activity_regularizer)


def _enlarged(n: Any, size: int, stride: int, padding: str) -> Any:
    """The size of which a convolution would make n."""
    return n * stride + (max(size - stride, 0) if padding.lower() == "valid" else 0)


# -- normalisation -------------------------------------------------------------------------------


def batch_normalization(
    inputs: Any,
    axis: Any = -1,
    momentum: Any = 0.99,
    epsilon: float = 1e-3,
    center: bool = True,
    scale: bool = True,
    beta_initializer: Any = ZEROS,
    gamma_initializer: Any = ONES,
    moving_mean_initializer: Any = ZEROS,
    moving_variance_initializer: Any = ONES,
    beta_regularizer: Function = None,
    gamma_regularizer: Function = None,
    beta_constraint: Function = None,
    gamma_constraint: Function = None,
    training: Any = False,
    trainable: bool = True,
    name: str | None = None,
    reuse: Any = None,
    renorm: bool = False,
    renorm_clipping: Any = None,
    renorm_momentum: float = 0.99,
    fused: bool | None = None,
    virtual_batch_size: int | None = None,
    adjustment: Function = None,
) -> Any:
    """Inputs with mean 0 and variance 1 along all axes but `axis`, times gamma, plus beta.

    While training the moments are those of the batch, else moving averages. Their updates are
    in `GraphKeys.UPDATE_OPS`, and have to be run with the train op:

        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            train_op = optimizer.minimize(loss)

    Args:
        training: A bool, or a tensor such as a placeholder.
        fused: Whether the moving variance is the unbiased estimate, as TensorFlow has it by
            default for images (rank 4).
        momentum, epsilon, …: As in TensorFlow; renorm, virtual batches and adjustment are not
            offered.

    Variables: `gamma`, `beta`, `moving_mean`, `moving_variance` (the last two not trainable).

    Source: `tf.layers.batch_normalization`.
    """
    if renorm or virtual_batch_size is not None or adjustment is not None:
        raise ArgumentError(
            "batch_normalization: renorm, virtual_batch_size and adjustment are not offered"
        )
    x = _input("batch_normalization", inputs)
    beta = _options(beta_initializer, beta_regularizer, beta_constraint, trainable)
    gamma = _options(gamma_initializer, gamma_regularizer, gamma_constraint, trainable)
    averages = moving_mean_initializer, moving_variance_initializer
    with variable_scope(name, "batch_normalization", reuse=reuse):
        axis = _feature_axis(x, axis)
        kind = [_size(x, axis, "batch_normalization")], x.dtype.base_dtype
        factor = get_variable("gamma", *kind, **gamma) if scale else None
        offset = get_variable("beta", *kind, **beta) if center else None
        moving = [
            get_variable(what, *kind, initializer=initializer, trainable=False)
            for what, initializer in zip(("moving_mean", "moving_variance"), averages, strict=True)
        ]
        fused = x.shape.ndims == 4 if fused is None else fused
        used = _moments(x, axis, moving, training, momentum, fused)
        return _normalized(x, axis, [*used, offset, factor], epsilon)


def _normalized(x: Tensor, axis: int, tensors: list[Any], epsilon: float) -> Any:
    rank = len(x._symbol.shape)
    shape = tuple([-1 if i == axis else 1 for i in range(rank)])
    shaped = [_shaped(v, shape, axis == rank - 1) for v in tensors]
    return nn.batch_normalization(x, *shaped, variance_epsilon=epsilon)


def _feature_axis(x: Tensor, axis: Any) -> int:
    axis = static_value(axis, "axis")
    if isinstance(axis, tuple):
        if len(axis) != 1:
            raise GraphError(f"batch_normalization: one axis is due, got {axis}")
        (axis,) = axis
    rank = x.shape.ndims
    if rank is None or not -rank <= axis < rank:
        raise GraphError(f"batch_normalization: there is no axis {axis} in {x}")
    return axis % rank


def _shaped(value: Any, shape: tuple[int, ...], last: bool) -> Any:
    """A vector along the axis of the features."""
    if value is None or last:
        return value
    return build("Reshape", None, rg.reshape, value, shape=shape)


def _moments(
    x: Tensor, axis: int, averages: list[Any], training: Any, momentum: Any, unbiased: bool
) -> list[Any]:
    """The mean and the variance to normalise by; the updates of the averages are collected."""
    known = constant_value(training)
    if known is not None and not known:
        return averages
    axes = tuple([i for i in range(len(x._symbol.shape)) if i != axis])
    found = list(nn.moments(x, axes))
    targets = [found[0], found[1] * nn.bessel(x, axes)] if unbiased else found
    if known is None:
        found = [_chosen(training, new, old) for new, old in zip(found, averages, strict=True)]
        targets = [_chosen(training, new, old) for new, old in zip(targets, averages, strict=True)]
    for average, target in zip(averages, targets, strict=True):
        step = (average - target) * (1 - momentum)
        update = average.assign_sub(step, name="AssignMovingAvg")
        add_to_collection(GraphKeys.UPDATE_OPS, update)
    return found


def _chosen(training: Any, yes: Any, no: Any) -> Any:
    return build("SelectV2", None, rg.where, training, yes, no)


# -- layers without weights ----------------------------------------------------------------------


def dropout(
    inputs: Any,
    rate: Any = 0.5,
    noise_shape: Any = None,
    seed: int | None = None,
    training: Any = False,
    name: str | None = None,
) -> Any:
    """`tf.nn.dropout` while training (a bool or a tensor), the inputs otherwise.

    Source: `tf.layers.dropout`.
    """
    x = _input("dropout", inputs)
    with variable_scope(name, "dropout"):
        known = constant_value(training)
        if known is not None and not known:
            return build("Identity", None, rg.identity, x)
        y = nn.dropout(x, None, noise_shape, seed, rate=rate)
        return y if known is not None else _chosen(training, y, x)


def flatten(inputs: Any, name: str | None = None) -> Any:
    """Each example as a vector: the shape (batch, everything else). Source: `tf.layers.flatten`."""

    def flat(x: Any) -> Any:
        batch, *rest = x.shape
        known = not any(isinstance(n, Dim) for n in rest)
        return rg.reshape(x, (-1, math.prod(rest)) if known and 0 not in rest else (batch, -1))

    with variable_scope(name, "flatten"):
        return build("Reshape", None, deferrable(flat), convert_to_tensor(inputs))


def _pooling_layer(name: str, n: int, function: Callable[..., Any]) -> Callable[..., Any]:
    layer_name = name

    def pooling(
        inputs: Any,
        pool_size: Any,
        strides: Any,
        padding: str = "valid",
        data_format: str = "channels_last",
        name: str | None = None,
    ) -> Any:
        layout = _layout(data_format, n)
        sizes = [
            list(_spread(v, n, w)) for v, w in ((pool_size, "pool_size"), (strides, "strides"))
        ]
        with variable_scope(name, layer_name):
            return function(inputs, *sizes, padding.upper(), layout)

    pooling.__name__ = pooling.__qualname__ = name
    pooling.__doc__ = (
        f"`tf.nn.{function.__name__}` with window and strides for the spatial axes.\n\n"
        f"    Source: `tf.layers.{name}`."
    )
    return pooling


max_pooling2d = _pooling_layer("max_pooling2d", 2, nn.max_pool)
average_pooling2d = _pooling_layer("average_pooling2d", 2, nn.avg_pool)
max_pooling3d = _pooling_layer("max_pooling3d", 3, nn.max_pool3d)
average_pooling3d = _pooling_layer("average_pooling3d", 3, nn.avg_pool3d)
