"""`tf.contrib.layers`: the layers of `tf.layers` with other names, defaults and variables."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import Any

from regrad.core.generated import define
from regrad.core.tensor import TensorLike
from regrad.v1 import dtypes
from regrad.v1.contrib.framework import add_arg_scope
from regrad.v1.functions import nn, reductions
from regrad.v1.functions.arrays import identity
from regrad.v1.graph.control import group
from regrad.v1.graph.conversion import convert_to_tensor
from regrad.v1.graph.graphs import (
    GraphKeys,
    control_dependencies,
    current_graph,
    get_collection_ref,
    get_default_graph,
    name_scope,
)
from regrad.v1.graph.row_docs import fill_in
from regrad.v1.graph.tensors import Tensor
from regrad.v1.training import initializers, layers
from regrad.v1.training.variable_scopes import Initial, VariableScope, variable_scope

__all__ = [
    "avg_pool2d", "batch_norm", "conv2d", "conv2d_transpose", "convolution2d", "dropout",
    "flatten", "fully_connected", "l1_regularizer", "l2_regularizer", "linear", "max_pool2d",
    "relu", "variance_scaling_initializer", "xavier_initializer",
    "xavier_initializer_conv2d",
]  # fmt: skip

Collections = str | Iterable[str] | None
Scope = str | VariableScope | None
Layer = Callable[..., Any]
ZEROS = initializers.Zeros()
RENAMED = {"kernel": "weights", "bias": "biases"}  # variables of `tf.layers`


# -- initializers and regularizers -----------------------------------------------------------------


def variance_scaling_initializer(
    factor: float = 2.0, mode: str = "FAN_IN", uniform: bool = False, seed: int | None = None,
    dtype: dtypes.DTypeLike = dtypes.float32,
) -> initializers.VarianceScaling:  # fmt: skip
    """Return an initializer of random numbers with a variance of about `factor / n`.

    Args:
        factor: The factor.
        mode: The units that n counts: "FAN_IN", "FAN_OUT" or "FAN_AVG".
        uniform: Whether the distribution is uniform. Otherwise it is normal, truncated at two
            standard deviations, of the variance `1.3 * factor / n` before the truncation.
        dtype: The dtype of the values.

    Returns:
        An initializer, for `tf.get_variable` and for layers.

    Raises:
        GraphError: the factor is not positive, or the mode is unknown.

    Source: `tf.contrib.layers.variance_scaling_initializer`; He et al. (2015).

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default():
    ...     print(tf.contrib.layers.variance_scaling_initializer()([3, 4]).shape)
    (3, 4)
    """
    scale = factor if uniform else 1.3 * factor * initializers.TRUNCATED_STDDEV**2
    shape = "uniform" if uniform else "truncated_normal"
    return initializers.VarianceScaling(scale, mode.lower(), shape, seed, dtype)


def xavier_initializer(
    uniform: bool = True, seed: int | None = None, dtype: dtypes.DTypeLike = dtypes.float32
) -> initializers.VarianceScaling:
    """Return Glorot's initializer, whose variance is 1 over the mean of inputs and outputs.

    Args:
        uniform: Whether the distribution is uniform. Otherwise it is a truncated normal one.
        dtype: The dtype of the values.

    Returns:
        An initializer, for `tf.get_variable` and for layers.

    Raises:
        ArgumentError: `dtype` is not a dtype.

    Source: `tf.contrib.layers.xavier_initializer`; Glorot and Bengio (2010).

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     w = sess.run(tf.contrib.layers.xavier_initializer(seed=1)([3, 3]))
    >>> bool(abs(w).max() <= 1.0)  # the root of 6 / (3 + 3)
    True
    """
    return variance_scaling_initializer(1.0, "FAN_AVG", uniform, seed, dtype)


xavier_initializer_conv2d = xavier_initializer


def _regularizer(name: str, loss: Callable[[Any], Any], formula: str, shown: str) -> Layer:
    def make(scale: float, scope: str | None = None) -> Layer:
        """Return a function of weights: {formula}, or None if the scale is 0.

        Args:
            scale: The factor.
            scope: The name scope of the ops.

        Returns:
            A function, for the regularizer arguments of layers and of `tf.get_variable`.

        Raises:
            ArgumentError: the scale is missing.

        Source: `tf.contrib.layers.{name}`.

        >>> import regrad.v1 as tf
        >>> with tf.Graph().as_default(), tf.Session() as sess:
        ...     print(sess.run(tf.contrib.layers.{name}(0.5)(tf.constant([1.0, -3.0]))))
        {shown}
        """

        def regularize(weights: TensorLike) -> Any:
            with name_scope(scope, name):
                return convert_to_tensor(loss(weights) * scale) if scale else None

        return regularize

    return fill_in(make, name, formula=formula, shown=shown)


l1_regularizer: Layer
l1_regularizer = _regularizer(
    "l1_regularizer", lambda w: reductions.reduce_sum(abs(w)), "`scale * sum(abs(w))`", "2.0"
)
l2_regularizer: Layer
l2_regularizer = _regularizer("l2_regularizer", nn.l2_loss, "`scale * sum(w**2) / 2`", "2.5")


# -- layers with weights ---------------------------------------------------------------------------


def _get_renamed(
    more: Any, getter: Callable[..., Any], name: str, collections: Any, **options: Any
) -> Any:
    """Make a variable of `tf.layers` under its name in `tf.contrib.layers`."""
    place, slash, last = name.rpartition("/")
    last = RENAMED.get(last, last)
    more = more.get(last) if isinstance(more, Mapping) else more
    keys = [GraphKeys.GLOBAL_VARIABLES, GraphKeys.MODEL_VARIABLES, *(more or ())]
    return getter(place + slash + last, collections=keys, **options)


def _open(scope: Scope, default: str, reuse: Any, collections: Any) -> AbstractContextManager[Any]:
    """Open the variable scope of a layer. `tf.layers` opens its name scope."""
    getter = partial(_get_renamed, collections)
    return variable_scope(
        scope, default, reuse=reuse, custom_getter=getter, auxiliary_name_scope=False
    )


def _finish(y: Tensor, outputs_collections: Collections, *steps: Layer | None) -> Any:
    """Apply the normalizer and the activation in the layer's name scope, and collect the result."""
    with current_graph().name_scope(y.op.name.rpartition("/")[0] + "/"):
        for step in steps:
            y = y if step is None else step(y)
    get_default_graph().add_to_collections(outputs_collections, y)
    return y


COMMON = (
    "activation_fn={}, normalizer_fn=None, normalizer_params=None, weights_initializer=XAVIER, "
    "weights_regularizer=None, biases_initializer=ZEROS, biases_regularizer=None, reuse=None, "
    "variables_collections=None, outputs_collections=None, trainable=True, scope=None"
)
WINDOW_TEXT = """\
    kernel_size: The sizes of the window, an int or two.
    stride: The steps, an int or two.
    padding: "SAME" or "VALID".
    data_format: "NHWC" or "NCHW".
    rate: The distances between elements of the window (only `conv2d`).
"""
WINDOW = "kernel_size, stride=1, padding='SAME', data_format=None, "
FORMATS = {None: "channels_last", "NHWC": "channels_last", "NCHW": "channels_first"}


def _weighted(
    name: str, default: str, own: str, linear: Callable[..., Tensor], activation: str = "RELU"
) -> Layer:
    """Make a layer from a layer of `tf.layers`, which computes the linear part."""
    known = {"RELU": nn.relu, "XAVIER": xavier_initializer(), "ZEROS": ZEROS}
    listed = f"inputs, num_outputs, {own}{COMMON.format(activation)}"
    signature = inspect.signature(define(name, f"def {name}({listed}): ...", known))

    def layer(*args: Any, **options: Any) -> Any:
        """Return {what} of the inputs, then the bias or the normalizer, then the activation.

        The layer makes the variables `{default}/weights` and `{default}/biases`. With a
        `normalizer_fn` it has no biases.

        Args:
            inputs: A tensor of floats. Its number of channels must be known.
            num_outputs: The number of channels of the result.
        {window}    activation_fn: A function of the result, or None.
            normalizer_fn: A function such as `batch_norm`, or None.
            normalizer_params: Keyword arguments of the normalizer, a dict.
            weights_initializer: The initial weights, by default Glorot's.
            biases_initializer: The initial biases, or None for a layer without biases.
            weights_regularizer: A function of the weights, for REGULARIZATION_LOSSES.
            biases_regularizer: A function of the biases, for REGULARIZATION_LOSSES.
            reuse: Whether to use the variables of an earlier call.
            variables_collections: Further collections of the variables, a list or a dict.
            outputs_collections: A collection to which the result is added.
            trainable: Whether optimizers change the variables.
            scope: The name of the variable scope, by default '{default}', '{default}_1', ….

        Returns:
            A tensor of the inputs' dtype.

        Raises:
            GraphError: the number of channels is not known, or the variables exist and `reuse` is
                not set. The error is a ValueError.

        Source: `tf.contrib.layers.{name}`.

        >>> import regrad.v1 as tf
        >>> with tf.Graph().as_default():
        ...     y = tf.contrib.layers.{name}({example})
        ...     print(y.shape, [v.op.name for v in tf.global_variables()])
        {shown}
        """
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        g = SimpleNamespace(**bound.arguments)
        normalizer = g.normalizer_fn and partial(g.normalizer_fn, **(g.normalizer_params or {}))
        with _open(g.scope, default, g.reuse, g.variables_collections) as scope:
            y = linear(
                g, use_bias=not normalizer and g.biases_initializer is not None, name=scope,
                kernel_initializer=g.weights_initializer, trainable=g.trainable,
                bias_initializer=g.biases_initializer, kernel_regularizer=g.weights_regularizer,
                bias_regularizer=g.biases_regularizer,
            )  # fmt: skip
            return _finish(y, g.outputs_collections, normalizer, g.activation_fn)

    dense = "connected" in name or name == "linear"
    result = (2, 4) if dense else (2, 6, 6, 4) if name == "conv2d" else (2, 12, 12, 4)
    fill_in(
        layer, name, default=default, window="" if dense else WINDOW_TEXT,
        what="a linear function" if dense else "a convolution",
        example="tf.zeros([2, 3]), 4" if dense else
        f"tf.zeros([2, 6, 6, 3]), 4, 3{', 2' if 'transpose' in name else ''}",
        shown=f"{result} ['{default}/weights', '{default}/biases']",
    )  # fmt: skip
    made = add_arg_scope(layer)
    made.__signature__ = signature  # type: ignore[attr-defined]
    return made


def _convolve(function: Callable[..., Tensor], g: Any, **options: Any) -> Tensor:
    if getattr(g, "rate", 1) != 1:
        options["dilation_rate"] = g.rate
    window = g.kernel_size, g.stride, g.padding, FORMATS[g.data_format]
    return function(g.inputs, g.num_outputs, *window, **options)


def _connect(g: Any, **options: Any) -> Tensor:
    return layers.dense(g.inputs, g.num_outputs, **options)


fully_connected: Layer = _weighted("fully_connected", "fully_connected", "", _connect)
linear: Layer = _weighted("linear", "fully_connected", "", _connect, "None")
conv2d: Layer
conv2d = _weighted("conv2d", "Conv", WINDOW + "rate=1, ", partial(_convolve, layers.conv2d))
conv2d_transpose: Layer = _weighted(
    "conv2d_transpose", "Conv2d_transpose", WINDOW.replace("None", "'NHWC'"),
    partial(_convolve, layers.conv2d_transpose),
)  # fmt: skip
relu: Layer = fully_connected
convolution2d: Layer = conv2d


# -- other layers ----------------------------------------------------------------------------------


@add_arg_scope
def batch_norm(
    inputs: TensorLike, decay: float = 0.999, center: bool = True, scale: bool = False,
    epsilon: float = 0.001, activation_fn: Layer | None = None,
    param_initializers: Mapping[str, Initial] | None = None,
    param_regularizers: Mapping[str, Any] | None = None,
    updates_collections: str | None = GraphKeys.UPDATE_OPS, is_training: TensorLike = True,
    reuse: Any = None, variables_collections: Any = None, outputs_collections: Collections = None,
    trainable: bool = True, batch_weights: None = None, fused: bool | None = None,
    data_format: str = "NHWC", zero_debias_moving_mean: bool = False, scope: Scope = None,
    renorm: bool = False, renorm_clipping: None = None, renorm_decay: float = 0.99,
    adjustment: None = None,
) -> Any:  # fmt: skip
    """Return inputs with mean 0 and variance 1 per channel, plus beta, and times gamma on request.

    See `tf.layers.batch_normalization`. Variables: `BatchNorm/beta`, `gamma` if `scale` is true,
    and `moving_mean` and `moving_variance`.

    Args:
        inputs: A tensor of floats. Its rank and its number of channels must be known.
        decay: The weight of the past in the moving averages.
        center: Whether to add `beta`.
        scale: Whether to multiply by `gamma`.
        epsilon: A small number added to the variance.
        activation_fn: A function of the result, or None.
        param_initializers: Initial values by name: "beta", "gamma", "moving_mean" and
            "moving_variance".
        param_regularizers: Regularizers by name: "beta" and "gamma".
        updates_collections: The collection of the updates of the moving averages. With None, the
            result waits for the updates.
        is_training: Whether to use the moments of the batch, a bool or a tensor.
        trainable: Whether optimizers change `beta` and `gamma`.
        reuse: Whether to use the variables of an earlier call.
        variables_collections: Further collections of the variables, a list or a dict.
        outputs_collections: A collection to which the result is added.
        fused: Whether the moving variance is the unbiased estimate. By default it is for ranks 2
            and 4, as in TensorFlow.
        data_format: "NHWC" or "NCHW".
        scope: The name of the variable scope, by default 'BatchNorm', 'BatchNorm_1', ….
        batch_weights, zero_debias_moving_mean, renorm, adjustment: Other values than the defaults
            are not supported.
        renorm_clipping, renorm_decay: Without effect.

    Returns:
        A tensor of the inputs' shape and dtype.

    Raises:
        GraphError: the number of channels is not known, or the variables exist and `reuse` is not
            set. The error is a ValueError.
        ArgumentError: the value of an argument is not supported.

    Source: `tf.contrib.layers.batch_norm`; Ioffe and Szegedy (2015), arXiv:1502.03167.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default():
    ...     y = tf.contrib.layers.batch_norm(tf.zeros([2, 3]))
    ...     print([v.op.name for v in tf.global_variables()])
    ['BatchNorm/beta', 'BatchNorm/moving_mean', 'BatchNorm/moving_variance']
    """
    x = convert_to_tensor(inputs)
    parts: dict[str, Any] = {
        f"{part}_initializer": f for part, f in (param_initializers or {}).items()
    }
    parts |= {f"{part}_regularizer": f for part, f in (param_regularizers or {}).items()}
    pending = get_collection_ref(GraphKeys.UPDATE_OPS)
    before = len(pending)
    with _open(scope, "BatchNorm", reuse, variables_collections) as opened:
        y = layers.batch_normalization(
            x, 1 if data_format == "NCHW" else -1, decay, epsilon, center, scale,
            training=is_training, trainable=trainable, name=opened, **parts,
            fused=fused in (None, True) and x.shape.ndims in (2, 4),
            renorm=renorm or zero_debias_moving_mean, adjustment=adjustment or batch_weights,
        )  # fmt: skip
        updates = pending[before:]
        if updates_collections != GraphKeys.UPDATE_OPS:
            del pending[before:]
            for update in updates:
                get_default_graph().add_to_collections(updates_collections, update)
        wait = None
        if updates_collections is None and updates:
            wait = partial(_after, updates)
        return _finish(y, outputs_collections, wait, activation_fn)


def _after(updates: Sequence[Any], y: Tensor) -> Any:
    with control_dependencies([group(*updates)]):
        return identity(y)


@add_arg_scope
def dropout(
    inputs: TensorLike, keep_prob: TensorLike = 0.5, noise_shape: TensorLike = None,
    is_training: TensorLike = True, outputs_collections: Collections = None,
    scope: str | None = None, seed: int | None = None,
) -> Any:  # fmt: skip
    """Return the result of `tf.nn.dropout` in training, the inputs otherwise.

    Args:
        inputs: A tensor of floats.
        keep_prob: The probability of keeping an element.
        noise_shape: A shape that broadcasts to the inputs' shape, to drop elements together.
        is_training: A bool, or a tensor such as a placeholder.
        outputs_collections: A collection to which the result is added.
        scope: The name of the scope, by default 'Dropout' (numbered).
        seed: The seed of the op; see `set_random_seed`.

    Returns:
        A tensor of the inputs' shape and dtype. The kept elements are divided by `keep_prob`.

    Raises:
        GraphError: `keep_prob` is out of range in training. The error is a ValueError.

    Source: `tf.contrib.layers.dropout`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.contrib.layers.dropout(tf.ones([2]), 0.5, is_training=False)))
    [1. 1.]
    """
    with _open(scope, "Dropout", None, None) as opened:
        y = layers.dropout(inputs, 1 - keep_prob, noise_shape, seed, is_training, opened)
        return _finish(y, outputs_collections)


@add_arg_scope
def flatten(
    inputs: TensorLike, outputs_collections: Collections = None, scope: str | None = None
) -> Any:
    """Return each example as a vector.

    Args:
        inputs: A tensor of one axis or more. The first axis is the batch.
        outputs_collections: A collection to which the result is added.
        scope: The name of the scope, by default 'Flatten' (numbered).

    Returns:
        A tensor of the shape (batch, elements of an example).

    Raises:
        ShapeError: the inputs are a scalar.

    Source: `tf.contrib.layers.flatten`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default():
    ...     print(tf.contrib.layers.flatten(tf.placeholder(tf.float32, [None, 3, 4])).shape)
    (?, 12)
    """
    with _open(scope, "Flatten", None, None) as opened:
        return _finish(layers.flatten(inputs, opened), outputs_collections)


def _pool(name: str, default: str, function: Callable[..., Any], what: str) -> Layer:
    def pool(
        inputs: TensorLike, kernel_size: int | Sequence[int], stride: int | Sequence[int] = 2,
        padding: str = "VALID", data_format: str = "NHWC", outputs_collections: Collections = None,
        scope: str | None = None,
    ) -> Any:  # fmt: skip
        """Return the {what} of windows of images.

        Args:
            inputs: A tensor of floats.
            kernel_size: The sizes of the window, an int or two.
            stride: The steps, an int or two.
            padding: "VALID" or "SAME".
            data_format: "NHWC" or "NCHW".
            outputs_collections: A collection to which the result is added.
            scope: The name of the scope, by default '{default}' (numbered).

        Returns:
            A tensor of the inputs' dtype.

        Raises:
            ShapeError: the inputs are not images.

        Source: `tf.contrib.layers.{name}`.

        >>> import regrad.v1 as tf
        >>> with tf.Graph().as_default():
        ...     print(tf.contrib.layers.{name}(tf.zeros([2, 6, 6, 3]), 2).shape)
        (2, 3, 3, 3)
        """
        with _open(scope, default, None, None) as opened:
            y = function(inputs, kernel_size, stride, padding, FORMATS[data_format], opened)
            return _finish(y, outputs_collections)

    return add_arg_scope(fill_in(pool, name, what=what, default=default))


max_pool2d: Layer
max_pool2d = _pool("max_pool2d", "MaxPool2D", layers.max_pooling2d, "largest elements")
avg_pool2d: Layer = _pool("avg_pool2d", "AvgPool2D", layers.average_pooling2d, "means")
