"""Placeholders, and small namespaces of `tf` such as `tf.math`, `tf.linalg` and `tf.random`."""

from __future__ import annotations

import logging as python_logging
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from regrad.core.dims import Dim
from regrad.core.op import op
from regrad.core.registry import gradient
from regrad.core.tensor import Readable, TensorLike
from regrad.errors import GraphError
from regrad.shapes.infer import Spec
from regrad.v1 import dtypes
from regrad.v1.functions import clipping, creation, indexing, nn, random_ops, reductions
from regrad.v1.functions import linalg as _linalg
from regrad.v1.functions import math as _math
from regrad.v1.functions import spectral as _spectral
from regrad.v1.functions.spectral import fft, fft2d, fft3d, ifft, ifft2d, ifft3d
from regrad.v1.graph.conversion import convert_to_tensor
from regrad.v1.graph.forms import one_op
from regrad.v1.graph.graphs import current_graph
from regrad.v1.graph.static_shapes import ShapeLike, TensorShape
from regrad.v1.graph.tensors import Tensor, face

__all__ = [
    "disable_eager_execution", "disable_v2_behavior", "executing_eagerly", "fft", "fft2d",
    "fft3d", "get_static_value", "ifft", "ifft2d", "ifft3d", "linalg", "logging", "math",
    "placeholder", "placeholder_with_default", "random", "signal", "spectral",
]  # fmt: skip


def placeholder(
    dtype: dtypes.DTypeLike, shape: ShapeLike = None, name: str | None = None
) -> Tensor:
    """Return a tensor whose value is fed in each run.

    Args:
        dtype: The dtype.
        shape: The static shape, with None for sizes that vary. By default the rank may vary too.

    Returns:
        A tensor. A run that needs the tensor but does not feed it raises InvalidArgumentError.

    Raises:
        TypeError: `dtype` is not a dtype.
        GraphError: the placeholder is made inside a branch or loop.

    Op type: `Placeholder`. Source: `tf.placeholder`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     x = tf.placeholder(tf.float32, [None])
    ...     print(sess.run(x * 2.0, {x: [1.0, 2.0]}))
    [2. 4.]
    """
    if current_graph().outer is not None:
        raise GraphError(
            f"the placeholder {name or 'Placeholder'!r} cannot be fed inside a branch or loop. "
            "Make it before, and use it inside."
        )
    sizes = TensorShape(shape)
    known = None if sizes.ndims is None else tuple(sizes.as_list())
    spec = Spec(known, dtypes.to_numpy(dtype))
    return face(current_graph().placeholder(spec, name or "Placeholder"))


@op("PlaceholderWithDefault", elementwise=True)
def _with_default(xp, x: TensorLike, /) -> Any:
    """Return the default value, for a run that does not feed the tensor."""
    return x


gradient("PlaceholderWithDefault")(lambda dy: dy)


def placeholder_with_default(
    input: TensorLike, shape: ShapeLike, name: str | None = None
) -> Tensor:
    """Return a tensor whose value is `input` unless a run feeds another value.

    Args:
        input: A tensor or array, or a number.
        shape: The static shape, which may be looser than the input's.

    Returns:
        A tensor of the input's dtype.

    Raises:
        ShapeError: the input does not fit this shape.

    Op type: `PlaceholderWithDefault`. Source: `tf.placeholder_with_default`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     x = tf.placeholder_with_default([1.0], [None])
    ...     print(sess.run(x), sess.run(x, {x: [2.0, 3.0]}))
    [1.] [2. 3.]
    """
    given = convert_to_tensor(input)
    made = one_op("PlaceholderWithDefault", name or "PlaceholderWithDefault", _with_default, given)
    wanted = TensorShape(shape)
    wanted.assert_is_compatible_with(given.shape)
    made._symbol.loosen(None if wanted.ndims is None else wanted.as_list())
    return made


def get_static_value(tensor: TensorLike, partial: bool = False) -> np.ndarray | None:
    """Return the value of a tensor if it is known while the graph is built, else None.

    Args:
        tensor: A tensor, or a value.
        partial: Without effect: a partially known value is returned as None.

    Returns:
        A NumPy array, or None.

    Source: `tf.get_static_value` (`tf.contrib.util.constant_value`).

    >>> with tf.Graph().as_default():
    ...     x = tf.placeholder(tf.float32, [2, None])
    ...     print(tf.get_static_value(tf.constant(3)), tf.get_static_value(x))
    3 None
    """
    if not isinstance(tensor, Tensor):
        return None if isinstance(tensor, Readable) else np.asarray(tensor)
    symbol = tensor._symbol
    if symbol.node.op.type == "Const":
        return np.array(symbol.node.attrs["value"])
    content = symbol.content
    if content is None or any(isinstance(n, Dim) for n in content.flat):
        return None
    return content.astype(symbol.dtype)


class Namespace(ModuleType):
    """Functions of other modules, collected under one name."""

    def __init__(self, name: str, *modules: ModuleType, **more: Any) -> None:
        super().__init__(f"regrad.v1.{name}", f"The functions of `tf.{name}`.")
        for module in modules:
            self.__dict__.update({
                k: v for k, v in vars(module).items()
                if k[0] != "_" and getattr(v, "__module__", "") == module.__name__
            })  # fmt: skip
        self.__dict__.update(more)


math: Namespace = Namespace(
    "math", _math, reductions, clipping, confusion_matrix=indexing.confusion_matrix,
    l2_normalize=nn.l2_normalize, softplus=nn.softplus, softsign=nn.softsign,
    top_k=nn.top_k, in_top_k=nn.in_top_k, zero_fraction=nn.zero_fraction,
)  # fmt: skip
linalg: Namespace = Namespace(
    "linalg", _linalg, eye=creation.eye,
    l2_normalize=nn.l2_normalize, global_norm=clipping.global_norm,
)  # fmt: skip
random: Namespace = Namespace(
    "random", normal=random_ops.random_normal, uniform=random_ops.random_uniform,
    truncated_normal=random_ops.truncated_normal, shuffle=random_ops.random_shuffle,
    multinomial=random_ops.multinomial, categorical=random_ops.categorical,
    set_random_seed=random_ops.set_random_seed,
)  # fmt: skip

spectral: Namespace = Namespace("spectral", _spectral)
signal: Namespace = Namespace("signal", _spectral)
for _shift in ("fftshift", "ifftshift"):  # only tf.signal has these
    delattr(spectral, _shift)

_LOG = python_logging.getLogger("regrad.v1")
logging: SimpleNamespace = SimpleNamespace(
    DEBUG=10, INFO=20, WARN=30, ERROR=40, FATAL=50,
    set_verbosity=_LOG.setLevel, get_verbosity=_LOG.getEffectiveLevel,
    debug=_LOG.debug, info=_LOG.info, warn=_LOG.warning, warning=_LOG.warning,
    error=_LOG.error, fatal=_LOG.critical, log=_LOG.log,
)  # fmt: skip


def disable_v2_behavior() -> None:
    """Do nothing: `regrad.v1` is always in graph mode.

    Source: `tf.disable_v2_behavior`.

    >>> tf.disable_v2_behavior()
    """


def disable_eager_execution() -> None:
    """Do nothing: `regrad.v1` is always in graph mode.

    Source: `tf.disable_eager_execution`.

    >>> tf.disable_eager_execution()
    """


def executing_eagerly() -> bool:
    """Return False: `regrad.v1` is always in graph mode. `import regrad` is eager.

    Returns:
        False.

    Source: `tf.executing_eagerly`.

    >>> tf.executing_eagerly()
    False
    """
    return False
