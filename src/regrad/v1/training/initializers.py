"""Initializers of variables, which are callables of (shape, dtype), for `tf.get_variable`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np

import regrad as rg
from regrad.core.tensor import TensorLike
from regrad.errors import GraphError, ShapeError
from regrad.v1 import dtypes
from regrad.v1.functions import random_ops
from regrad.v1.graph.conversion import build
from regrad.v1.graph.conversion import constant as as_constant
from regrad.v1.graph.row_docs import fill_in
from regrad.v1.graph.rows import constructor
from regrad.v1.graph.static_shapes import ShapeLike, TensorShape
from regrad.v1.graph.tensors import Tensor

# The standard deviation of a standard normal variable that is truncated to [-2, 2].
TRUNCATED_STDDEV = 0.87962566103423978
_Shape = tuple[int, ...]
_FLOAT = dtypes.float32
# An initializer or its class, a function that returns the value, or the value.
Initial = Callable[..., Any] | TensorLike | None
DISTRIBUTIONS = ("normal", "truncated_normal", "untruncated_normal", "uniform")


class Initializer:
    """The base class of initializers, which are called with a shape and a dtype.

    A subclass overrides `values(shape, dtype)`.

    Args:
        dtype: The dtype of the values, unless the call passes one.

    Source: `tf.keras.initializers.Initializer`.

    >>> import regrad.v1 as tf
    >>> class Sevens(tf.initializers.Initializer):
    ...     def values(self, shape, dtype):
    ...         return tf.constant(7, dtype, shape)
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(Sevens()([2])))
    [7. 7.]
    """

    def __init__(self, dtype: dtypes.DTypeLike = _FLOAT) -> None:
        self._take(dtype=dtype)

    def _take(self, dtype: dtypes.DTypeLike, **settings: Any) -> None:
        self.dtype: dtypes.DType = dtypes.as_dtype(dtype)
        self.__dict__.update(settings)
        self._settings = settings

    def __call__(
        self, shape: ShapeLike, dtype: dtypes.DTypeLike | None = None, partition_info: None = None
    ) -> Tensor:
        """Return the initial values as a tensor."""
        sizes: Any = TensorShape(shape)
        if not sizes.is_fully_defined():
            raise ShapeError(f"an initial value needs a fully defined shape, got {sizes}")
        dtype = dtypes.as_dtype(self.dtype if dtype is None else dtype)
        return self.values(tuple(sizes.as_list()), dtype)

    def values(self, shape: _Shape, dtype: dtypes.DType) -> Tensor:
        """Return the initial values as a tensor. Subclasses override this method."""
        raise NotImplementedError


def _as_class(declared: Callable[..., Any]) -> Any:
    """Make an initializer from a function of a shape and the arguments of the constructor."""
    _, *listed = inspect.signature(declared).parameters.values()
    arguments = [str(p.replace(annotation=p.empty)) for p in listed]

    class Made(Initializer):
        __init__: Any = constructor(", ".join(arguments), __name__, tf=dtypes)

        def values(self, shape: _Shape, dtype: Any) -> Tensor:
            return declared(shape, dtype=dtype, **self._settings)

    Made.__doc__ = declared.__doc__
    return fill_in(Made, declared.__name__)


@_as_class
def Zeros(shape, dtype=_FLOAT):
    """Zeros.

    Args:
        dtype: The dtype of the values, unless the call passes one.

    Source: `tf.zeros_initializer`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.zeros_initializer()([2])))
    [0. 0.]
    """
    return as_constant(np.zeros(shape, dtype.as_numpy_dtype), name="zeros")


@_as_class
def Ones(shape, dtype=_FLOAT):
    """Ones.

    Args:
        dtype: The dtype of the values, unless the call passes one.

    Source: `tf.ones_initializer`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.ones_initializer()([2])))
    [1. 1.]
    """
    return as_constant(np.ones(shape, dtype.as_numpy_dtype), name="ones")


@_as_class
def Constant(shape, value: TensorLike = 0, dtype=_FLOAT, verify_shape=False):
    """A constant value, or a list of values in order. The last value of the list is repeated.

    Args:
        value: A number, or a list or array of numbers.
        dtype: The dtype of the values, unless the call passes one.
        verify_shape: Raise unless the value itself has the requested shape.

    Source: `tf.constant_initializer`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.constant_initializer([1, 2])([3])))
    [1. 2. 2.]
    """
    return as_constant(value, dtype, shape, verify_shape=verify_shape)


@_as_class
def RandomUniform(shape, minval: TensorLike = 0, maxval=None, seed=None, dtype=_FLOAT):
    """Uniform numbers from `[minval, maxval)`.

    Args:
        minval: The lower bound.
        maxval: The upper bound, by default 1 for floats.
        seed: The seed of the op; see `set_random_seed`.
        dtype: The dtype of the values, unless the call passes one.

    Source: `tf.random_uniform_initializer`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     x = sess.run(tf.random_uniform_initializer(2.0, 3.0)([100]))
    >>> bool(x.min() >= 2.0 and x.max() < 3.0)
    True
    """
    return random_ops.random_uniform(shape, minval, maxval, dtype, seed=seed)


@_as_class
def RandomNormal(shape, mean: TensorLike = 0.0, stddev: TensorLike = 1.0, seed=None, dtype=_FLOAT):
    """Normal numbers.

    Args:
        mean: The mean.
        stddev: The standard deviation.
        seed: The seed of the op; see `set_random_seed`.
        dtype: The dtype of the values, unless the call passes one.

    Source: `tf.random_normal_initializer`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.random_normal_initializer(5.0, 0.0)([2])))
    [5. 5.]
    """
    return random_ops.random_normal(shape, mean, stddev, dtype, seed=seed)


@_as_class
def TruncatedNormal(
    shape, mean: TensorLike = 0.0, stddev: TensorLike = 1.0, seed=None, dtype=_FLOAT
):
    """Normal numbers, at most two standard deviations from the mean.

    Args:
        mean: The mean.
        stddev: The standard deviation before truncation.
        seed: The seed of the op; see `set_random_seed`.
        dtype: The dtype of the values, unless the call passes one.

    Source: `tf.truncated_normal_initializer`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     x = sess.run(tf.truncated_normal_initializer(stddev=0.5)([100]))
    >>> bool(abs(x).max() <= 1.0)
    True
    """
    return random_ops.truncated_normal(shape, mean, stddev, dtype, seed=seed)


@_as_class
def VarianceScaling(
    shape, scale=1.0, mode="fan_in", distribution="truncated_normal", seed=None, dtype=_FLOAT
):
    """Random numbers with the variance `scale / n`, where n is a number of units of the layer.

    Args:
        scale: The factor.
        mode: The units to count: `"fan_in"`, `"fan_out"` or `"fan_avg"`.
        distribution: `"truncated_normal"` (also called `"normal"`), `"untruncated_normal"` or
            `"uniform"`.
        seed: The seed of the op; see `set_random_seed`.
        dtype: The dtype of the values, unless the call passes one.

    Raises:
        GraphError: the scale is not positive, or mode or distribution is unknown.

    Source: `tf.variance_scaling_initializer`; He et al. (2015) take `scale=2`.

    >>> import regrad.v1 as tf
    >>> he = tf.variance_scaling_initializer(scale=2.0)
    >>> with tf.Graph().as_default():
    ...     print(he([3, 3, 16, 32]).shape)
    (3, 3, 16, 32)
    """
    fan_in, fan_out = fans(shape)
    units = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}
    variance = scale / max(1.0, units[mode])
    if distribution == "uniform":
        limit = math.sqrt(3 * variance)
        return random_ops.random_uniform(shape, -limit, limit, dtype, seed=seed)
    if distribution == "untruncated_normal":
        return random_ops.random_normal(shape, 0.0, math.sqrt(variance), dtype, seed=seed)
    stddev = math.sqrt(variance) / TRUNCATED_STDDEV
    return random_ops.truncated_normal(shape, 0.0, stddev, dtype, seed=seed)


def _check_scaling(self: Any, **settings: Any) -> None:
    if settings["scale"] <= 0:
        raise GraphError(f"`scale` must be positive float, got {settings['scale']!r}")
    for name, known in ("mode", ("fan_in", "fan_out", "fan_avg")), ("distribution", DISTRIBUTIONS):
        if settings[name] not in known:
            raise GraphError(f"Invalid `{name}` argument: {settings[name]!r}")
    Initializer._take(self, **settings)


VarianceScaling._take = _check_scaling


def fans(shape: _Shape) -> tuple[float, float]:
    """Return the numbers of inputs and outputs of a layer's units, from the kernel's shape."""
    if len(shape) < 2:
        n = shape[0] if shape else 1
        return n, n
    receptive = math.prod(shape[:-2])
    return receptive * shape[-2], receptive * shape[-1]


# The source, the scale and the mode of each scheme.
SOURCES = {
    "Glorot": ("Glorot and Bengio (2010)", 1.0, "fan_avg"),
    "He": ("He et al. (2015)", 2.0, "fan_in"),
    "Lecun": ("LeCun et al. (1998)", 1.0, "fan_in"),
}


def _scaling(scheme: str, kind: str) -> Any:
    """Make a subclass of VarianceScaling with fixed settings. Its arguments are (seed, dtype)."""
    source, scale, mode = SOURCES[scheme]
    distribution = "uniform" if kind == "Uniform" else "truncated_normal"

    class Scaling(VarianceScaling):
        """The {shown} initializer of {source}, of variance `{scale:g} / {mode}`.

        Args:
            seed: The seed of the op; see `set_random_seed`.
            dtype: The dtype of the values, unless the call passes one.

        Source: `tf.{path}`.

        >>> import regrad.v1 as tf
        >>> with tf.Graph().as_default():
        ...     print(tf.{path}(seed=1)([20, 30]).shape)
        (20, 30)
        """

        def __init__(self, seed: int | None = None, dtype: dtypes.DTypeLike = _FLOAT) -> None:
            super().__init__(scale, mode, distribution, seed, dtype)

    shown = {"source": source, "scale": scale, "mode": mode, "shown": kind.lower()}
    return fill_in(Scaling, scheme + kind, path=f"initializers.{scheme}_{kind}".lower(), **shown)


# GlorotUniform is the default of get_variable.
GlorotUniform = glorot_uniform = glorot_uniform_initializer = _scaling("Glorot", "Uniform")
GlorotNormal = glorot_normal = glorot_normal_initializer = _scaling("Glorot", "Normal")
HeUniform = he_uniform = _scaling("He", "Uniform")
HeNormal = he_normal = _scaling("He", "Normal")
LecunUniform = lecun_uniform = _scaling("Lecun", "Uniform")
LecunNormal = lecun_normal = _scaling("Lecun", "Normal")


@_as_class
def UniformUnitScaling(shape, factor=1.0, seed=None, dtype=_FLOAT):
    """Uniform numbers that preserve the scale of the input.

    Args:
        factor: A factor that multiplies the numbers.
        seed: The seed of the op; see `set_random_seed`.
        dtype: The dtype of the values, unless the call passes one.

    Source: `tf.uniform_unit_scaling_initializer`; Sussillo and Abbott (2014).

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     x = sess.run(tf.uniform_unit_scaling_initializer()([12, 5]))
    >>> bool(abs(x).max() <= 0.5)  # the root of 3 / 12
    True
    """
    limit = math.sqrt(3 / max(1, math.prod(shape[:-1]))) * factor
    return random_ops.random_uniform(shape, -limit, limit, dtype, seed=seed)


@_as_class
def Orthogonal(shape, gain=1.0, seed=None, dtype=_FLOAT):
    """A matrix with orthonormal rows or columns, times `gain`. All axes but the last are merged.

    Args:
        gain: The factor.
        seed: The seed of the op; see `set_random_seed`.
        dtype: The dtype of the values, unless the call passes one.

    Source: `tf.orthogonal_initializer`; Saxe et al. (2013).

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     q = sess.run(tf.orthogonal_initializer()([3, 2]))
    >>> (q.T @ q).round(4).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    if len(shape) < 2:
        raise ShapeError(f"an orthogonal matrix has two axes or more, got the shape {shape}")
    rows, columns = math.prod(shape[:-1]), shape[-1]
    tall = max(rows, columns), min(rows, columns)
    noise = random_ops.random_normal(tall, dtype=dtype, seed=seed)
    options = {"shape": shape, "turned": rows < columns, "gain": gain}
    return build("Reshape", None, _orthonormal, noise, **options)


def _orthonormal(noise: rg.Tensor, *, shape: tuple[int, ...], turned: bool, gain: float) -> Any:
    q, r = rg.linalg.qr(noise)
    q = q * rg.sign(rg.linalg.diagonal(r))  # makes the distribution uniform
    return gain * rg.reshape(rg.matrix_transpose(q) if turned else q, shape)


@_as_class
def Identity(shape, gain=1.0, dtype: Any = _FLOAT):
    """The identity matrix, times `gain`.

    Args:
        gain: The factor.
        dtype: The dtype of the values, unless the call passes one.

    Source: `tf.initializers.identity`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.initializers.identity(2.0)([2, 2])).tolist())
    [[2.0, 0.0], [0.0, 2.0]]
    """
    if len(shape) != 2:
        raise ShapeError(f"Identity matrix initializer can only be used for 2D matrices, {shape}")
    return as_constant(gain * np.eye(*shape, dtype=dtype.as_numpy_dtype))


# The names in `tf` and in `tf.initializers`.
zeros_initializer = zeros = Zeros
ones_initializer = ones = Ones
constant_initializer = constant = Constant
random_uniform_initializer = random_uniform = RandomUniform
random_normal_initializer = random_normal = RandomNormal
truncated_normal_initializer = truncated_normal = TruncatedNormal
variance_scaling_initializer = variance_scaling = VarianceScaling
uniform_unit_scaling_initializer = uniform_unit_scaling = UniformUnitScaling
orthogonal_initializer = orthogonal = Orthogonal
identity_initializer = identity = Identity
__all__ = [
    name for name in dir() if name.endswith("_initializer") and name != "identity_initializer"
]
