"""`tf.contrib.layers`: the layers of `tf.layers` with other names, defaults and variables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from regrad.core.signatures import helpful
from regrad.core.tensor import TensorLike
from regrad.v1 import dtypes
from regrad.v1.contrib.framework import add_arg_scope
from regrad.v1.functions import nn, reductions
from regrad.v1.functions.arrays import identity
from regrad.v1.functions.convolution import channels_last
from regrad.v1.graph.control import group
from regrad.v1.graph.conversion import convert_to_tensor
from regrad.v1.graph.graphs import GraphKeys, control_dependencies, get_default_graph, name_scope
from regrad.v1.graph.rows import listed, plain_value, row
from regrad.v1.graph.tensors import Tensor
from regrad.v1.training import initializers, layers
from regrad.v1.training.variable_scopes import VariableScope, variable_scope

Layer = Callable[..., Any]
# Arguments and variables here, and in `tf.layers`.
NAMES = {
    "weights_initializer": "kernel_initializer", "weights_regularizer": "kernel_regularizer",
    "biases_initializer": "bias_initializer", "biases_regularizer": "bias_regularizer",
    "stride": "strides", "rate": "dilation_rate", "keep_prob": "rate", "is_training": "training",
    "decay": "momentum",
}  # fmt: skip
VARIABLES = {"kernel": "weights", "bias": "biases"}


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


def l1_regularizer(scale: float, scope: str | None = None) -> Callable[[TensorLike], Any]:
    """Return a function of weights: `scale * sum(abs(w))`, or None if the scale is 0.

    Args:
        scale: The factor.
        scope: The name scope of the ops.

    Returns:
        A function, for the regularizer arguments of layers and of `tf.get_variable`.

    Raises:
        ArgumentError: the scale is missing.

    Source: `tf.contrib.layers.l1_regularizer`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.contrib.layers.l1_regularizer(0.5)(tf.constant([1.0, -3.0]))))
    2.0
    """
    return _regularizer("l1_regularizer", lambda w: reductions.reduce_sum(abs(w)), scale, scope)


def l2_regularizer(scale: float, scope: str | None = None) -> Callable[[TensorLike], Any]:
    """Return a function of weights: `scale * sum(w**2) / 2`, or None if the scale is 0.

    Args:
        scale: The factor.
        scope: The name scope of the ops.

    Returns:
        A function, for the regularizer arguments of layers and of `tf.get_variable`.

    Raises:
        ArgumentError: the scale is missing.

    Source: `tf.contrib.layers.l2_regularizer`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.contrib.layers.l2_regularizer(0.5)(tf.constant([1.0, -3.0]))))
    2.5
    """
    return _regularizer("l2_regularizer", nn.l2_loss, scale, scope)


def _regularizer(name: str, loss: Layer, scale: float, scope: str | None) -> Layer:
    def regularize(weights: TensorLike) -> Any:
        with name_scope(scope, name):
            return convert_to_tensor(loss(weights) * scale) if scale else None

    return regularize


# -- calls of `tf.layers` --------------------------------------------------------------------------


def _get_renamed(
    more: Any, getter: Callable[..., Any], name: str, collections: Any, **options: Any
) -> Any:
    """Make a variable of `tf.layers` under its name in `tf.contrib.layers`."""
    place, slash, last = name.rpartition("/")
    last = VARIABLES.get(last, last)
    more = more.get(last) if isinstance(more, Mapping) else more
    keys = [GraphKeys.GLOBAL_VARIABLES, GraphKeys.MODEL_VARIABLES, *(more or ())]
    return getter(place + slash + last, collections=keys, **options)


def _call(
    default: str, _: None, scope: str | VariableScope | None, layer: Layer, *inputs: Any,
    outputs_collections: str | Iterable[str] | None, reuse: Any = None,
    variables_collections: Any = None, activation_fn: Layer | None = None,
    normalizer_fn: Layer | None = None, normalizer_params: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:  # fmt: skip
    """Call a layer of `tf.layers`, then the normalizer and the activation in its name scope."""
    getter = partial(_get_renamed, variables_collections)
    if normalizer_fn is not None or options.get("biases_initializer", 0) is None:
        options["use_bias"] = False
    # The layer of `tf.layers` opens the name scope.
    with variable_scope(
        scope, default, reuse=reuse, custom_getter=getter, auxiliary_name_scope=False
    ) as opened:
        y = layer(*inputs, **{NAMES.get(k, k): v for k, v in options.items()}, name=opened)
        with _scope_of(y):
            if normalizer_fn is not None:
                y = normalizer_fn(y, **(normalizer_params or {}))
            if activation_fn is not None:
                y = activation_fn(y)
    get_default_graph().add_to_collections(outputs_collections, y)
    return y


def _scope_of(y: Tensor) -> Any:
    """Return the name scope in which a tensor was made."""
    return name_scope(y.op.name.rpartition("/")[0] + "/")


def _layout(data_format: str | None) -> str:
    return "channels_last" if channels_last(data_format, 2) else "channels_first"


def _layer(default: str, layer: Layer, **settings: Any) -> Callable[[Layer], Layer]:
    """Make a layer from a layer of `tf.layers`. Its variable scope is by default `default`."""
    settings = {"scope": None, "data_format": _layout, **settings}
    make = row("tf.contrib.layers", None, layer, call=partial(_call, default), **settings)
    return lambda declared: helpful(declared.__name__)(add_arg_scope(make(declared)))


# -- layers with weights ---------------------------------------------------------------------------

XAVIER, ZEROS = xavier_initializer(), initializers.Zeros()


def _weights(
    activation_fn=nn.relu, normalizer_fn=None, normalizer_params=None, weights_initializer=XAVIER,
    weights_regularizer=None, biases_initializer=ZEROS, biases_regularizer=None, reuse=None,
    variables_collections=None, outputs_collections=None, trainable=True, scope=None,
) -> None:  # fmt: skip
    """Declare the last parameters of layers with weights.

    Args:
        activation_fn: A function of the result, or None.
        normalizer_fn: A function such as `batch_norm`, or None.
        normalizer_params: Keyword arguments of the normalizer, a dict.
        weights_initializer: The initial weights, by default Glorot's.
        biases_initializer: The initial biases, or None for a layer without biases.
        variables_collections: Further collections of the variables, a list or a dict.
        outputs_collections: A collection to which the result is added.
    """


@_layer("fully_connected", layers.dense, then=_weights)
def fully_connected(inputs, num_outputs: int):
    """Return a linear function of the inputs, then the bias or the normalizer, and the activation.

    The layer makes the variables `fully_connected/weights` and `fully_connected/biases`. With a
    `normalizer_fn` it has no biases.

    Args:
        inputs: A tensor of floats. Its number of channels must be known.
        num_outputs: The number of channels of the result.
        scope: The name of the variable scope, by default 'fully_connected', 'fully_connected_1', ….

    Returns:
        A tensor of the inputs' dtype.

    Raises:
        GraphError: the number of channels is not known, or the variables exist and `reuse` is
            not set. The error is a ValueError.

    >>> with tf.Graph().as_default():
    ...     y = tf.contrib.layers.fully_connected(tf.zeros([2, 3]), 4)
    ...     print(y.shape, [v.op.name for v in tf.global_variables()])
    (2, 4) ['fully_connected/weights', 'fully_connected/biases']
    """


@_layer("fully_connected", layers.dense, then=_weights)
def linear(inputs, num_outputs: int, activation_fn=None):
    """Return a linear function of the inputs, then the bias or the normalizer, and the activation.

    See `fully_connected`, which differs in the default of `activation_fn`.

    Args:
        inputs: A tensor of floats. Its number of channels must be known.
        num_outputs: The number of channels of the result.
        scope: The name of the variable scope, by default 'fully_connected', 'fully_connected_1', ….

    Returns:
        A tensor of the inputs' dtype.

    Raises:
        GraphError: the number of channels is not known, or the variables exist and `reuse` is
            not set. The error is a ValueError.

    >>> with tf.Graph().as_default():
    ...     y = tf.contrib.layers.linear(tf.zeros([2, 3]), 4)
    ...     print(y.shape, [v.op.name for v in tf.global_variables()])
    (2, 4) ['fully_connected/weights', 'fully_connected/biases']
    """


@_layer("Conv", layers.conv2d, then=_weights)
def conv2d(
    inputs, num_outputs: int, kernel_size, stride=1, padding="SAME", data_format=None, rate=1
):
    """Return a convolution of the inputs, then the bias or the normalizer, and the activation.

    The layer makes the variables `Conv/weights` and `Conv/biases`. With a `normalizer_fn` it has no
    biases.

    Args:
        inputs: A tensor of floats. Its number of channels must be known.
        num_outputs: The number of channels of the result.
        kernel_size: The sizes of the window, an int or two.
        stride: The steps, an int or two.
        padding: "SAME" or "VALID".
        data_format: "NHWC" or "NCHW".
        rate: The distances between elements of the window.
        scope: The name of the variable scope, by default 'Conv', 'Conv_1', ….

    Returns:
        A tensor of the inputs' dtype.

    Raises:
        GraphError: the number of channels is not known, or the variables exist and `reuse` is
            not set. The error is a ValueError.

    >>> with tf.Graph().as_default():
    ...     y = tf.contrib.layers.conv2d(tf.zeros([2, 6, 6, 3]), 4, 3)
    ...     print(y.shape, [v.op.name for v in tf.global_variables()])
    (2, 6, 6, 4) ['Conv/weights', 'Conv/biases']
    """


@_layer("Conv2d_transpose", layers.conv2d_transpose, then=_weights)
def conv2d_transpose(
    inputs, num_outputs: int, kernel_size, stride=1, padding="SAME", data_format="NHWC"
):
    """Return the adjoint of a convolution, then the bias or the normalizer, and the activation.

    The layer makes the variables `Conv2d_transpose/weights` and `Conv2d_transpose/biases`. With a
    `normalizer_fn` it has no biases.

    Args:
        inputs: A tensor of floats. Its number of channels must be known.
        num_outputs: The number of channels of the result.
        kernel_size: The sizes of the window, an int or two.
        stride: The factors by which height and width grow, an int or two.
        padding: "SAME" or "VALID".
        data_format: "NHWC" or "NCHW".
        scope: The name of the variable scope, by default 'Conv2d_transpose' (numbered).

    Returns:
        A tensor of the inputs' dtype.

    Raises:
        GraphError: the number of channels is not known, or the variables exist and `reuse` is
            not set. The error is a ValueError.

    >>> with tf.Graph().as_default():
    ...     y = tf.contrib.layers.conv2d_transpose(tf.zeros([2, 6, 6, 3]), 4, 3, 2)
    ...     print(y.shape, [v.op.name for v in tf.global_variables()])
    (2, 12, 12, 4) ['Conv2d_transpose/weights', 'Conv2d_transpose/biases']
    """


# -- other layers ----------------------------------------------------------------------------------


def _normalize(
    inputs: TensorLike, *, updates_collections: str | None, param_initializers: Any,
    param_regularizers: Any, fused: bool | None, data_format: str, renorm: bool,
    zero_debias_moving_mean: bool, adjustment: Any, batch_weights: Any, **options: Any,
) -> Any:  # fmt: skip
    """Call the layer of `tf.layers`, and move its updates to their collection."""
    x = convert_to_tensor(inputs)
    for kind, given in ("initializer", param_initializers), ("regularizer", param_regularizers):
        options |= {f"{part}_{kind}": value for part, value in (given or {}).items()}
    pending = x.graph.get_collection_ref(GraphKeys.UPDATE_OPS)
    before = len(pending)
    y = layers.batch_normalization(
        x, 1 if data_format == "NCHW" else -1, **options,
        fused=fused in (None, True) and x.shape.ndims in (2, 4),
        renorm=renorm or zero_debias_moving_mean, adjustment=adjustment or batch_weights,
    )  # fmt: skip
    updates = pending[before:]
    del pending[before:]
    for update in updates:
        x.graph.add_to_collections(updates_collections, update)
    if updates_collections is None and updates:
        with _scope_of(y), control_dependencies([group(*updates)]):
            return identity(y)
    return y


@_layer("BatchNorm", _normalize, data_format=plain_value, renorm_clipping=None, renorm_decay=None)
def batch_norm(
    inputs, decay=0.999, center=True, scale=False, epsilon=0.001, activation_fn=None,
    param_initializers=None, param_regularizers=None, updates_collections=GraphKeys.UPDATE_OPS,
    is_training=True, reuse=None, variables_collections=None, outputs_collections=None,
    trainable=True, batch_weights=None, fused=None, data_format="NHWC",
    zero_debias_moving_mean=False, scope=None, renorm=False, renorm_clipping=None,
    renorm_decay=0.99, adjustment=None,
):  # fmt: skip
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
        variables_collections: Further collections of the variables, a list or a dict.
        outputs_collections: A collection to which the result is added.
        trainable: Whether optimizers change `beta` and `gamma`.
        batch_weights: Must be None. Other values are not supported.
        fused: Whether the moving variance is the unbiased estimate. By default it is for ranks 2
            and 4, as in TensorFlow.
        data_format: "NHWC" or "NCHW".
        zero_debias_moving_mean: Must be False. Other values are not supported.
        scope: The name of the variable scope, by default 'BatchNorm', 'BatchNorm_1', ….
        renorm: Must be False. Other values are not supported.
        adjustment: Must be None. Other values are not supported.

    Returns:
        A tensor of the inputs' shape and dtype.

    Raises:
        GraphError: the number of channels is not known, or the variables exist and `reuse` is not
            set. The error is a ValueError.
        ArgumentError: the value of an argument is not supported.

    Source: Ioffe and Szegedy (2015), arXiv:1502.03167.

    >>> with tf.Graph().as_default():
    ...     y = tf.contrib.layers.batch_norm(tf.zeros([2, 3]))
    ...     print([v.op.name for v in tf.global_variables()])
    ['BatchNorm/beta', 'BatchNorm/moving_mean', 'BatchNorm/moving_variance']
    """


@_layer("Dropout", layers.dropout, keep_prob=lambda keep: 1 - keep)
def dropout(
    inputs, keep_prob=0.5, noise_shape=None, is_training=True, outputs_collections=None,
    scope=None, seed=None,
):  # fmt: skip
    """Return the result of `tf.nn.dropout` in training, the inputs otherwise.

    Args:
        inputs: A tensor of floats.
        keep_prob: The probability of keeping an element.
        noise_shape: A shape that broadcasts to the inputs' shape, to drop elements together.
        is_training: A bool, or a tensor such as a placeholder.
        outputs_collections: A collection to which the result is added.
        scope: The name of the scope, by default 'Dropout' (numbered).

    Returns:
        A tensor of the inputs' shape and dtype. The kept elements are divided by `keep_prob`.

    Raises:
        GraphError: `keep_prob` is out of range in training. The error is a ValueError.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.contrib.layers.dropout(tf.ones([2]), 0.5, is_training=False)))
    [1. 1.]
    """


@_layer("Flatten", layers.flatten)
def flatten(inputs, outputs_collections=None, scope=None):
    """Return each example as a vector.

    Args:
        inputs: A tensor of one axis or more. The first axis is the batch.
        outputs_collections: A collection to which the result is added.
        scope: The name of the scope, by default 'Flatten' (numbered).

    Returns:
        A tensor of the shape (batch, elements of an example).

    Raises:
        ShapeError: the inputs are a scalar.

    >>> with tf.Graph().as_default():
    ...     print(tf.contrib.layers.flatten(tf.placeholder(tf.float32, [None, 3, 4])).shape)
    (?, 12)
    """


def _windows(
    inputs, kernel_size, stride=2, padding="VALID", data_format="NHWC", outputs_collections=None,
    scope=None,
) -> None:  # fmt: skip
    """Declare the parameters of pooling layers.

    Args:
        inputs: A tensor of floats.
        kernel_size: The sizes of the window, an int or two.
        stride: The steps, an int or two.
        padding: "VALID" or "SAME".
        data_format: "NHWC" or "NCHW".
        outputs_collections: A collection to which the result is added.
    """


@_layer("MaxPool2D", layers.max_pooling2d, then=_windows)
def max_pool2d():
    """Return the largest elements of windows of images.

    Args:
        scope: The name of the scope, by default 'MaxPool2D' (numbered).

    Returns:
        A tensor of the inputs' dtype.

    Raises:
        ShapeError: the inputs are not images.

    >>> with tf.Graph().as_default():
    ...     print(tf.contrib.layers.max_pool2d(tf.zeros([2, 6, 6, 3]), 2).shape)
    (2, 3, 3, 3)
    """


@_layer("AvgPool2D", layers.average_pooling2d, then=_windows)
def avg_pool2d():
    """Return the means of windows of images.

    Args:
        scope: The name of the scope, by default 'AvgPool2D' (numbered).

    Returns:
        A tensor of the inputs' dtype.

    Raises:
        ShapeError: the inputs are not images.

    >>> with tf.Graph().as_default():
    ...     print(tf.contrib.layers.avg_pool2d(tf.zeros([2, 6, 6, 3]), 2).shape)
    (2, 3, 3, 3)
    """


relu: Layer = fully_connected
convolution2d: Layer = conv2d
__all__ = listed(
    __name__, "convolution2d l1_regularizer l2_regularizer relu variance_scaling_initializer "
    "xavier_initializer xavier_initializer_conv2d", "tf.contrib.layers",
)  # fmt: skip
