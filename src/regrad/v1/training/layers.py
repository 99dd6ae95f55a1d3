"""`tf.layers`: layers with their variables in variable scopes, as functions and as classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import regrad as rg
from regrad.core.dims import Dim
from regrad.core.tensor import TensorLike
from regrad.errors import ArgumentError, GraphError, ShapeError
from regrad.graph.deferred import deferrable
from regrad.v1.functions import nn
from regrad.v1.functions.convolution import LAYOUTS
from regrad.v1.graph.conversion import build, convert_to_tensor, static_value
from regrad.v1.graph.graphs import GraphKeys, add_to_collection
from regrad.v1.graph.row_docs import fill_in
from regrad.v1.graph.rows import listed, plain_value, row, written
from regrad.v1.graph.tensors import Tensor
from regrad.v1.graph.values import constant_value, ensure, floats
from regrad.v1.graph.variables import Variable
from regrad.v1.training import initializers
from regrad.v1.training.variable_scopes import Scoped, get_variable, variable_scope

Function = Callable[..., Any] | None
PARTS = "initializer", "regularizer", "constraint"
ZEROS, ONES = initializers.Zeros(), initializers.Ones()

# -- helpers of all layers -----------------------------------------------------------------------


def _size(x: Tensor, axis: int, layer: str, least: int = 1, most: int = 99) -> int:
    """Return a size that determines the shape of a variable. Raises if it is unknown.

    `least` and `most` are the ranks that the layer takes.
    """
    if x.shape.ndims is not None and not least <= x.shape.ndims <= most:
        raise ShapeError(f"{layer}: expected inputs of rank {least}, got {x}")
    size = x.shape[axis].value
    if size is None:
        which = "The last dimension" if axis == -1 else f"Dimension {axis}"
        raise GraphError(
            f"{which} of the inputs to `{layer}` should be defined. Found `None`: {x}. Give the "
            "placeholder a shape, or call set_shape."
        )
    return size


def _weighted(
    _: None, name: str | None, layer: Callable[..., Any], inputs: TensorLike, *, use_bias: bool,
    activation: Any, activity_regularizer: Function, trainable: bool, reuse: Any, **options: Any,
) -> Tensor:  # fmt: skip
    """Make the variables of a layer, and apply its linear part, bias, activation and regularizer.

    The layer returns the shape of its kernel, the number of units, the layout, and its linear part.
    """
    (x,) = floats(layer.__name__, convert_to_tensor(inputs))
    kernel, bias = ({k: options.pop(f"{v}_{k}") for k in PARTS} for v in ("kernel", "bias"))
    variable = partial(get_variable, dtype=x.dtype.base_dtype, trainable=trainable)
    with variable_scope(name, layer.__name__, reuse=reuse):
        shape, units, layout, linear = layer(x, **options)
        y = linear(x, variable("kernel", shape, **kernel))
        if use_bias:
            y = nn.bias_add(y, variable("bias", [units], **bias), layout)
        if activation is not None:
            y = (getattr(nn, activation) if isinstance(activation, str) else activation)(y)
        if activity_regularizer is not None:
            add_to_collection(GraphKeys.REGULARIZATION_LOSSES, activity_regularizer(y))
        return y


def _weights(
    activation=None, use_bias=True, kernel_initializer=None, bias_initializer=ZEROS,
    kernel_regularizer=None, bias_regularizer=None, activity_regularizer=None,
    kernel_constraint=None, bias_constraint=None, trainable=True, name=None, reuse=None,
) -> None:  # fmt: skip
    """Declare the last parameters of layers with weights.

    Args:
        activation: A function to apply to the result, or its name in `tf.nn`.
        use_bias: Whether the layer adds a bias.
    """


_layer = partial(row, "tf.layers", scope=None, returns="Tensor")
_weighted_layer = _layer(
    call=_weighted, then=_weights, units=plain_value, filters=plain_value, kernel_size=plain_value
)


def _layout(data_format: str, n: int) -> tuple[str, int]:
    """Return TensorFlow's name of a data format with n spatial axes, and the axis of channels."""
    if data_format not in ("channels_last", "channels_first"):
        raise GraphError(
            f"data_format must be channels_last or channels_first, got {data_format!r}"
        )
    first = data_format == "channels_first"
    return LAYOUTS[n][first], 1 if first else -1


def _repeat(value: TensorLike, n: int, what: str) -> list[int]:
    """Return n integers. A single integer is repeated n times."""
    found = static_value(value, what)
    found = found if isinstance(found, tuple) else (found,) * n
    if len(found) != n:
        raise GraphError(f"{what} is an integer or {n} of them, got {value!r}")
    return list(found)


# -- layers with weights -------------------------------------------------------------------------


@_weighted_layer
def dense(inputs: Any, units: int) -> Any:
    """Return `activation(inputs @ kernel + bias)`, along the last axis.

    The layer makes the variables `kernel` and `bias` in the scope `name`. With `reuse` it uses the
    existing variables.

    Args:
        inputs: A tensor of floats. Its last size must be known.
        units: The last size of the result.
        name: The name of the variable scope, by default 'dense', 'dense_1', ….

    Returns:
        A tensor with the inputs' dtype and their shape, except for the last size.

    Raises:
        GraphError: the last size is not known, or the variables exist and `reuse` is not set, or
            they have other shapes. The error is a ValueError.
        ShapeError: the inputs have a rank below 2.
        DTypeError: an argument cannot become a tensor, or the inputs are not floats.

    >>> with tf.Graph().as_default():
    ...     y = tf.layers.dense(tf.placeholder(tf.float32, [None, 3]), 2, tf.nn.relu)
    ...     print(y, [v.name for v in tf.trainable_variables()])
    Tensor("dense/Relu:0", shape=(?, 2), dtype=float32) ['dense/kernel:0', 'dense/bias:0']
    """
    linear = partial(build, "MatMul", None, rg.matmul)
    return [_size(inputs, -1, "dense", least=2), units], units, None, linear


def _conv_layer(layer_name: str, n: int) -> Callable[..., Tensor]:
    def conv(
        inputs: Any, filters: int, kernel_size: int | Sequence[int],
        strides: int | Sequence[int] = 1, padding="valid", data_format="channels_last",
        dilation_rate: int | Sequence[int] = 1,
    ) -> Any:  # fmt: skip
        """Return the inputs convolved along {n} spatial axes, then apply bias and activation.

        The layer makes the variables `kernel`, of the shape `(*window, in, filters)`, and `bias` in
        the scope `name`. With `reuse` it uses the existing variables.

        Args:
            inputs: A tensor of floats. Its number of channels must be known.
            filters: The number of channels of the result.
            kernel_size: The sizes of the window, an int or an int for each spatial axis.
            strides: The steps, an int or an int for each spatial axis.
            padding: "valid" or "same".
            data_format: "channels_last" or "channels_first".
            dilation_rate: The distances between elements of the window, in the form of `strides`.
            name: The name of the variable scope, by default '{name}', '{name}_1', ….

        Returns:
            A tensor of the inputs' dtype.

        Raises:
            ShapeError: the inputs do not have rank {n} + 2.
            GraphError: the number of channels is not known, the data format is unknown, or the
                variables exist and `reuse` is not set.

        >>> with tf.Graph().as_default():
        ...     print(tf.layers.{name}(tf.zeros({shape}), 8, 3, padding="same").shape)
        {result}
        """
        layout, axis = _layout(data_format, n)
        linear = lambda x, weights: nn.convolution(  # noqa: E731
            x, weights, padding.upper(), strides, dilation_rate, None, layout
        )
        window = _repeat(kernel_size, n, "kernel_size")
        channels = _size(inputs, axis, layer_name, n + 2, n + 2)
        return [*window, channels, filters], filters, layout, linear

    return _weighted_layer(
        fill_in(conv, layer_name, n=n, shape=[2, *[6] * n, 3], result=(2, *[6] * n, 8))
    )


conv1d, conv2d, conv3d = (_conv_layer(f"conv{n}d", n) for n in (1, 2, 3))


@_weighted_layer
def conv2d_transpose(
    inputs: Any, filters: int, kernel_size: int | Sequence[int],
    strides: int | Sequence[int] = (1, 1), padding="valid", data_format="channels_last",
) -> Any:  # fmt: skip
    """Return the adjoint of a convolution, which enlarges images, then apply bias and activation.

    Variables: `kernel` (height, width, filters, in) and `bias`.

    Args:
        inputs: Images, a tensor of floats of the shape (batch, height, width, channels).
        filters: The number of channels of the result.
        kernel_size: The size of the window, an int or an int for each axis.
        strides: The factors by which height and width grow, an int or an int for each axis.
        padding: `"same"`, or `"valid"`, which adds the overhang of the window to the sizes.
        data_format: `"channels_last"` or `"channels_first"`.
        name: The name of the variable scope, by default 'conv2d_transpose', 'conv2d_transpose_1',
            ….

    Returns:
        A tensor of the inputs' dtype, of the shape (batch, height, width, filters).

    Raises:
        GraphError: the number of channels is not known, an option is unknown, or the variables
            exist and `reuse` is not set. The error is a ValueError.
        ShapeError: the inputs do not have rank 4.
        DTypeError: an argument cannot become a tensor, or the inputs are not floats.

    >>> with tf.Graph().as_default():
    ...     y = tf.layers.conv2d_transpose(tf.zeros([1, 4, 4, 3]), 2, 3, strides=2, padding="same")
    ...     print(y.shape)
    (1, 8, 8, 2)
    """
    layout, axis = _layout(data_format, 2)
    window, steps = _repeat(kernel_size, 2, "kernel_size"), _repeat(strides, 2, "strides")
    channels, shape = _size(inputs, axis, "conv2d_transpose", 4, 4), list(inputs._symbol.shape)
    shape[axis] = filters
    for i, size, step in zip((2, 3) if axis == 1 else (1, 2), window, steps, strict=True):
        shape[i] = shape[i] * step + (max(size - step, 0) if padding.lower() == "valid" else 0)
    linear = lambda x, weights: nn.conv2d_transpose(  # noqa: E731
        x, weights, tuple(shape), steps, padding.upper(), layout
    )
    return [*window, filters, channels], filters, layout, linear


# -- normalisation -------------------------------------------------------------------------------


@written("tf.layers")
def batch_normalization(
    inputs, axis: Any = -1, momentum: TensorLike = 0.99, epsilon=1e-3, center=True, scale=True,
    beta_initializer=ZEROS, gamma_initializer=ONES, moving_mean_initializer=ZEROS,
    moving_variance_initializer=ONES, beta_regularizer=None, gamma_regularizer=None,
    beta_constraint=None, gamma_constraint=None, training: TensorLike = False, trainable=True,
    name=None, reuse=None, renorm=False, renorm_clipping=None, renorm_momentum=0.99, fused=None,
    virtual_batch_size=None, adjustment=None,
) -> Tensor:  # fmt: skip
    """Return inputs with mean 0 and variance 1 along all axes but `axis`, times gamma, plus beta.

    In training the layer uses the moments of the batch, otherwise their moving averages. Run the
    updates of the moving averages, which are in `GraphKeys.UPDATE_OPS`, with the train op:

        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            train_op = optimizer.minimize(loss)

    Variables: `gamma`, `beta`, and `moving_mean` and `moving_variance`, which are not trainable.

    Args:
        inputs: A tensor of floats. Its rank and its size along `axis` must be known.
        axis: The axis of the features, by default the last.
        momentum: The weight of the past in the moving averages.
        epsilon: A small number added to the variance.
        center: Whether to add `beta`.
        scale: Whether to multiply by `gamma`.
        training: A bool, or a tensor such as a placeholder.
        name: The name of the variable scope, by default 'batch_normalization' (numbered).
        renorm: Must be False. Other values are not supported.
        renorm_clipping: Without effect.
        renorm_momentum: Without effect.
        fused: Whether the moving variance is the unbiased estimate. By default it is for images
            (rank 4), as in TensorFlow.
        virtual_batch_size: Must be None. Other values are not supported.
        adjustment: Must be None. Other values are not supported.

    Returns:
        A tensor of the inputs' shape and dtype.

    Raises:
        GraphError: the axis does not exist, its size is not known, or the variables exist and
            `reuse` is not set. The error is a ValueError.
        ArgumentError: the value of an argument is not supported.
        DTypeError: an argument cannot become a tensor, or the inputs are not floats.

    Source: `tf.layers.batch_normalization`; Ioffe and Szegedy (2015), arXiv:1502.03167.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     x = tf.constant([[1.0], [3.0]])
    ...     y = tf.layers.batch_normalization(x, epsilon=0.0, training=True)
    ...     sess.run(tf.global_variables_initializer())
    ...     print(sess.run(y).tolist(), len(tf.get_collection(tf.GraphKeys.UPDATE_OPS)))
    [[-1.0], [1.0]] 2
    """
    if renorm or virtual_batch_size is not None or adjustment is not None:
        raise ArgumentError(
            "batch_normalization: renorm, virtual_batch_size and adjustment are not supported"
        )
    (x,) = floats("batch_normalization", convert_to_tensor(inputs))
    beta = dict(zip(PARTS, (beta_initializer, beta_regularizer, beta_constraint), strict=True))
    gamma = dict(zip(PARTS, (gamma_initializer, gamma_regularizer, gamma_constraint), strict=True))
    with variable_scope(name, "batch_normalization", reuse=reuse):
        (axis,), rank = _repeat(axis, 1, "batch_normalization: axis"), x.shape.ndims
        if rank is None or not -rank <= axis < rank:
            raise GraphError(f"batch_normalization: there is no axis {axis} in {x}")
        axis %= rank
        size = [_size(x, axis, "batch_normalization")]
        variable = partial(get_variable, shape=size, dtype=x.dtype.base_dtype)
        factor = variable("gamma", trainable=trainable, **gamma) if scale else None
        offset = variable("beta", trainable=trainable, **beta) if center else None
        moving = [
            variable("moving_mean", initializer=moving_mean_initializer, trainable=False),
            variable("moving_variance", initializer=moving_variance_initializer, trainable=False),
        ]
        fused = rank == 4 if fused is None else fused
        vectors = [*_moments(x, axis, moving, training, momentum, fused), offset, factor]
        if axis < rank - 1:
            shape = tuple([-1 if i == axis else 1 for i in range(rank)])
            reshape = partial(build, "Reshape", None, rg.reshape, shape=shape)
            vectors = [v if v is None else reshape(v) for v in vectors]
        return nn.batch_normalization(x, *vectors, variance_epsilon=epsilon)


def _moments(
    x: Tensor, axis: int, averages: list[Variable], training: TensorLike, momentum: TensorLike,
    unbiased: bool,
) -> list[Any]:  # fmt: skip
    """Return mean and variance to normalize by, and collect the updates of their averages."""
    known = constant_value(training)
    if known is not None and not known:
        return averages
    axes = tuple([i for i in range(len(x._symbol.shape)) if i != axis])
    found = list(nn.moments(x, axes))
    targets = [found[0], found[1] * nn.bessel(x, axes)] if unbiased else found
    if known is None:
        choose = partial(_select, training)
        found, targets = [*map(choose, found, averages)], [*map(choose, targets, averages)]
    for average, target in zip(averages, targets, strict=True):
        step = (average - target) * (1 - momentum)
        add_to_collection(GraphKeys.UPDATE_OPS, average.assign_sub(step, name="AssignMovingAvg"))
    return found


def _select(training: TensorLike, yes: TensorLike, no: TensorLike) -> Any:
    return build("SelectV2", None, _where, training, yes, no)


def _where(training: Any, yes: Any, no: Any) -> Any:
    return rg.where(ensure("training", training, ()), yes, no)  # a scalar bool, as in TensorFlow


# -- layers without weights ----------------------------------------------------------------------


@written("tf.layers")
def dropout(
    inputs, rate: Any = 0.5, noise_shape=None, seed=None, training: TensorLike = False, name=None
) -> Tensor:
    """Return the result of `tf.nn.dropout` in training, the inputs otherwise.

    Args:
        inputs: A tensor of floats.
        rate: The probability of dropping an element, at least 0 and below 1.
        noise_shape: A shape that broadcasts to the inputs' shape, to drop elements together.
        training: A bool, or a tensor such as a placeholder.
        name: The name of the scope, by default 'dropout' (numbered).

    Returns:
        A tensor of the inputs' shape and dtype. The kept elements are divided by `1 - rate`.

    Raises:
        DTypeError: an argument cannot become a tensor, or the inputs are not floats.
        GraphError: `rate` is out of range in training. The error is a ValueError.

    Source: `tf.layers.dropout`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     x = tf.constant([1.0, 2.0])
    ...     print(sess.run(tf.layers.dropout(x, 0.5)))
    ...     print(set(sess.run(tf.layers.dropout(tf.ones([99]), 0.5, training=True)).tolist()))
    [1. 2.]
    {0.0, 2.0}
    """
    (x,) = floats("dropout", convert_to_tensor(inputs))
    with variable_scope(name, "dropout"):
        known = constant_value(training)
        if known is not None and not known:
            return build("Identity", None, rg.identity, x)
        y = nn.dropout(x, None, noise_shape, seed, rate=rate)
        return y if known is not None else _select(training, y, x)


def flatten(inputs: TensorLike, name: str | None = None) -> Tensor:
    """Return each example as a vector.

    Args:
        inputs: A tensor of one axis or more. The first axis is the batch.
        name: The name of the scope, by default 'flatten' (numbered).

    Returns:
        A tensor of the inputs' dtype, of the shape (batch, elements of an example).

    Raises:
        ShapeError: the inputs are a scalar.

    Source: `tf.layers.flatten`.

    >>> with tf.Graph().as_default():
    ...     print(tf.layers.flatten(tf.placeholder(tf.float32, [None, 3, 4])).shape)
    (?, 12)
    """

    def reshape(x: rg.Tensor) -> rg.Tensor:
        if not x.ndim:
            raise ShapeError("flatten: expected a tensor of one axis or more, got a scalar")
        batch, *rest = x.shape
        known = not any(isinstance(n, Dim) for n in rest)
        return rg.reshape(x, (-1, math.prod(rest)) if known and 0 not in rest else (batch, -1))

    with variable_scope(name, "flatten"):
        return build("Reshape", None, deferrable(reshape), convert_to_tensor(inputs))


def _pooled(_: None, name: str | None, layer: Callable[..., Any], *xs: Any, **options: Any) -> Any:
    with variable_scope(name, layer.__name__):
        return layer(*xs, **options)


def _pooling_layer(layer_name: str, n: int, function: Callable[..., Any]) -> Callable[..., Tensor]:
    def pooling(
        inputs, pool_size: int | Sequence[int], strides: int | Sequence[int], padding="valid",
        data_format="channels_last",
    ):  # fmt: skip
        """Return the {what} of windows, like `tf.nn.{pool}` with sizes for spatial axes only.

        Args:
            inputs: A tensor of floats.
            pool_size: The sizes of the window, an int or an int for each spatial axis.
            strides: The steps, an int or an int for each spatial axis.
            padding: "valid" or "same".
            data_format: "channels_last" or "channels_first".
            name: The name of the op in the graph.

        Returns:
            A tensor of the inputs' dtype.

        Raises:
            GraphError: the data format is unknown.

        >>> with tf.Graph().as_default():
        ...     print(tf.layers.{name}(tf.zeros({shape}), 2, 2).shape)
        {result}
        """
        layout, _ = _layout(data_format, n)
        window, steps = _repeat(pool_size, n, "pool_size"), _repeat(strides, n, "strides")
        return function(inputs, window, steps, padding.upper(), layout)

    what = "largest elements" if layer_name.startswith("max") else "means"
    shown = {"shape": [2, *[6] * n, 3], "result": (2, *[3] * n, 3), "pool": function.__name__}
    made = fill_in(pooling, layer_name, what=what, **shown)
    return _layer(call=_pooled, pool_size=plain_value)(made)


max_pooling2d = _pooling_layer("max_pooling2d", 2, nn.max_pool)
average_pooling2d = _pooling_layer("average_pooling2d", 2, nn.avg_pool)
max_pooling3d = _pooling_layer("max_pooling3d", 3, nn.max_pool3d)
average_pooling3d = _pooling_layer("average_pooling3d", 3, nn.avg_pool3d)


# -- layers as classes, whose calls share their variables ----------------------------------------


class Layer(Scoped):
    """The base class of layers: a function of `tf.layers` with its arguments except the inputs.

    Args:
        args, options: The arguments of the function, without `inputs` and `reuse`.
        name: The name of the variable scope, as for the function.

    Source: `tf.layers.Layer`.

    >>> import regrad.v1 as tf
    >>> issubclass(tf.layers.Dense, tf.layers.Layer)
    True
    """

    function: Callable[..., Any]

    def __init__(self, *args: Any, name: str | None = None, **options: Any) -> None:
        self._args, self._options, self._name = args, options, name

    def __call__(self, inputs: TensorLike, *unused: Any, **without_effect: Any) -> Any:
        """Return the layer's result. The first call makes the variables."""
        reuse = None if self._scope is None else True
        if self._scope is None:
            default = self.function.__name__
            with variable_scope(self._name, default, auxiliary_name_scope=False) as scope:
                self._scope = scope
        options: dict[str, Any] = {**self._options, "name": self._scope, "reuse": reuse}
        return self.function(inputs, *self._args, **options)

    apply = __call__

    def __getattr__(self, name: str) -> Any:
        for variable in self.variables if name in ("kernel", "bias") else ():
            if variable.op.name.endswith(f"/{name}"):
                return variable
        raise AttributeError(f"the layer has no {name!r}. Its first call makes the variables.")


class Dense(Layer):
    """A layer that calls `tf.layers.dense`. Its calls share the variables `kernel` and `bias`.

    The attributes `kernel` and `bias` exist after the first call.

    Args:
        args, options: The arguments of the function, without `inputs` and `reuse`.
        name: The name of the variable scope, as for the function.

    Source: `tf.layers.Dense`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default():
    ...     layer = tf.layers.Dense(2, activation=tf.nn.relu)
    ...     y, z = layer(tf.zeros([4, 3])), layer(tf.ones([5, 3]))
    ...     print([v.op.name for v in tf.global_variables()], layer.kernel.shape)
    ['dense/kernel', 'dense/bias'] (3, 2)
    """

    function: Callable[..., Any] = staticmethod(dense)


class Conv2D(Layer):
    """A layer that calls `tf.layers.conv2d`; see `tf.layers.Dense`.

    Args:
        args, options: The arguments of the function, without `inputs` and `reuse`.
        name: The name of the variable scope, as for the function.

    Source: `tf.layers.Conv2D`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default():
    ...     layer = tf.layers.Conv2D(8, 3, padding="same", name="first")
    ...     print(layer(tf.zeros([2, 6, 6, 3])).shape, layer.kernel.op.name)
    (2, 6, 6, 8) first/kernel
    """

    function: Callable[..., Any] = staticmethod(conv2d)


__all__ = listed(__name__, "Conv2D Dense Layer flatten", "tf.layers")
