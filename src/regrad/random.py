"""Random tensors from explicit sources of randomness. There is no global seed.

The first argument of every function is `key`, one of

* a NumPy `Generator` (`np.random.default_rng(0)`). It advances, so each call draws new numbers.
* an int, a seed. It is short for `np.random.default_rng(seed)`, so equal seeds return equal
  numbers.
* a JAX key (`jax.random.key(0)`). It never changes, so the same key always draws the same numbers.
  Make new keys with `jax.random.split`. Under jit only a JAX key draws new numbers at each call;
  a Generator raises an error there.

The result is an array of the source's library, NumPy or JAX. The parameters of a distribution may
be Tensors. They broadcast to `shape`, whose default is the shape of the parameters. The result is
differentiable with respect to the parameters: `normal` is `mean + stddev * noise`.
"""

from __future__ import annotations

import operator
import sys
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from regrad.core.backends import BACKENDS, FLOAT, Array, DTypeLike, is_array
from regrad.core.dispatch import lift
from regrad.core.hints import hint_in as _hint_in
from regrad.core.promotion import get_default_dtype, promote
from regrad.core.shapes import Shape, as_shape, normalized_axis
from regrad.core.signatures import public
from regrad.core.state import current
from regrad.core.tensor import Tensor, TensorLike, wrap
from regrad.errors import ArgumentError, DTypeError, ShapeError, kind
from regrad.ops.binary import less
from regrad.ops.casting import astype
from regrad.ops.creation import as_numpy_dtype
from regrad.ops.indexing import take
from regrad.transforms.traces import find_jax

if TYPE_CHECKING:
    from regrad.core.backends import Backend


__all__ = [
    "bernoulli", "exponential", "fold_in", "gumbel", "key", "normal", "permutation", "randint",
    "split", "truncated_normal", "uniform",
]  # fmt: skip

# A key of JAX is an array. (As a string, because NumPy loads its random module on first access.)
Key: TypeAlias = "int | np.random.Generator | Array"

# -- distributions -------------------------------------------------------------------------------


@public
def normal(
    key: Key,
    shape: Shape | None = None,
    mean: TensorLike = 0.0,
    stddev: TensorLike = 1.0,
    dtype: DTypeLike | None = None,
) -> Tensor:
    """Return normally distributed (Gaussian) numbers.

    Args:
        key: The source of randomness: a NumPy Generator, an int seed or a JAX key.
        shape: The shape of the result; by default the shape of the parameters.
        mean: The mean, which broadcasts to the shape.
        stddev: The standard deviation, which broadcasts to the shape.
        dtype: A float dtype; by default the dtype of the parameters.

    Raises:
        ArgumentError: `key` is not a source of randomness.
        ShapeError: the parameters do not broadcast to the shape.
        DTypeError: `dtype` is not a float dtype.

    Source: `tf.randomNormal` of TensorFlow.js.

    >>> import numpy as np
    >>> import regrad as rg
    >>> rg.random.normal(np.random.default_rng(0), (2, 3)).shape
    (2, 3)
    >>> noisy = lambda mean, stddev: rg.random.normal(0, (4,), mean, stddev)
    >>> rg.grad(lambda mean: noisy(mean, 2.0))(rg.scalar(1.0)).print()
    Tensor
        4
    """
    (mean, stddev), shape, dtype = _parameters("normal", (mean, stddev), shape, dtype)
    return _affine(source(key).draw("normal", shape, dtype), mean, stddev)


@public
def truncated_normal(
    key: Key,
    shape: Shape | None = None,
    mean: TensorLike = 0.0,
    stddev: TensorLike = 1.0,
    dtype: DTypeLike | None = None,
) -> Tensor:
    """Return normally distributed numbers within two standard deviations of the mean.

    Args:
        key: The source of randomness: a NumPy Generator, an int seed or a JAX key.
        shape: The shape of the result; by default the shape of the parameters.
        mean: The mean, which broadcasts to the shape.
        stddev: The standard deviation before truncation, which broadcasts to the shape.
        dtype: A float dtype; by default the dtype of the parameters.

    Raises:
        ArgumentError: `key` is not a source of randomness.
        ShapeError: the parameters do not broadcast to the shape.
        DTypeError: `dtype` is not a float dtype.

    Source: `tf.truncatedNormal` of TensorFlow.js.

    >>> import regrad as rg
    >>> bool(rg.all(rg.abs(rg.random.truncated_normal(0, (100,))) <= 2))
    True
    """
    (mean, stddev), shape, dtype = _parameters("truncated_normal", (mean, stddev), shape, dtype)
    return _affine(source(key).draw("truncated_normal", shape, dtype), mean, stddev)


@public
def uniform(
    key: Key,
    shape: Shape | None = None,
    low: TensorLike = 0.0,
    high: TensorLike = 1.0,
    dtype: DTypeLike | None = None,
) -> Tensor:
    """Return uniformly distributed numbers in `[low, high)`.

    Args:
        key: The source of randomness: a NumPy Generator, an int seed or a JAX key.
        shape: The shape of the result; by default the shape of the parameters.
        low: The lower bound, which broadcasts to the shape.
        high: The upper bound, which broadcasts to the shape.
        dtype: A float dtype; by default the dtype of the parameters.

    Raises:
        ArgumentError: `key` is not a source of randomness.
        ShapeError: the parameters do not broadcast to the shape.
        DTypeError: `dtype` is not a float dtype.

    Source: `tf.randomUniform` of TensorFlow.js.

    >>> import regrad as rg
    >>> bool(rg.all(rg.random.uniform(0, (100,)) < 1))
    True
    """
    (low, high), shape, dtype = _parameters("uniform", (low, high), shape, dtype)
    return _affine(source(key).draw("uniform", shape, dtype), low, high - low)


@public
def exponential(
    key: Key, shape: Shape | None = None, scale: TensorLike = 1.0, dtype: DTypeLike | None = None
) -> Tensor:
    """Return exponentially distributed numbers with mean `scale`.

    Args:
        key: The source of randomness: a NumPy Generator, an int seed or a JAX key.
        shape: The shape of the result; by default the shape of the parameters.
        scale: The mean, which broadcasts to the shape.
        dtype: A float dtype; by default the dtype of the parameters.

    Raises:
        ArgumentError: `key` is not a source of randomness.
        ShapeError: the parameters do not broadcast to the shape.
        DTypeError: `dtype` is not a float dtype.

    Source: `numpy.random.Generator.exponential`.

    >>> import regrad as rg
    >>> rg.random.exponential(0, (2, 3)).shape
    (2, 3)
    """
    (scale,), shape, dtype = _parameters("exponential", (scale,), shape, dtype)
    return _affine(source(key).draw("exponential", shape, dtype), 0.0, scale)


@public
def gumbel(
    key: Key,
    shape: Shape | None = None,
    loc: TensorLike = 0.0,
    scale: TensorLike = 1.0,
    dtype: DTypeLike | None = None,
) -> Tensor:
    """Return Gumbel numbers. `argmax(logits + gumbel)` is a sample of `softmax(logits)`.

    Args:
        key: The source of randomness: a NumPy Generator, an int seed or a JAX key.
        shape: The shape of the result; by default the shape of the parameters.
        loc: The mode, which broadcasts to the shape.
        scale: The scale, which broadcasts to the shape.
        dtype: A float dtype; by default the dtype of the parameters.

    Raises:
        ArgumentError: `key` is not a source of randomness.
        ShapeError: the parameters do not broadcast to the shape.
        DTypeError: `dtype` is not a float dtype.

    Source: `numpy.random.Generator.gumbel`.

    >>> import regrad as rg
    >>> rg.random.gumbel(0, (2, 3)).shape
    (2, 3)
    """
    (loc, scale), shape, dtype = _parameters("gumbel", (loc, scale), shape, dtype)
    return _affine(source(key).draw("gumbel", shape, dtype), loc, scale)


@public
def bernoulli(
    key: Key, shape: Shape | None = None, p: TensorLike = 0.5, dtype: DTypeLike = bool
) -> Tensor:
    """Return True with probability `p`.

    `p` has no gradient, unless a rule is active for the op type `Less`.

    Args:
        key: The source of randomness: a NumPy Generator, an int seed or a JAX key.
        shape: The shape of the result; by default the shape of `p`.
        p: The probability, which broadcasts to the shape.
        dtype: The dtype of the result; bool by default.

    Raises:
        ArgumentError: `key` is not a source of randomness.
        ShapeError: the parameters do not broadcast to the shape.

    Source: `jax.random.bernoulli`.

    >>> import regrad as rg
    >>> rg.random.bernoulli(0, (3,), 1.0)
    Tensor([ True,  True,  True], dtype=bool)
    """
    (p,), shape, noise_dtype = _parameters("bernoulli", (p,), shape, None)
    return astype(less(wrap(source(key).draw("uniform", shape, noise_dtype)), p), dtype)


@public
def randint(key: Key, shape: Shape, low: int, high: int, dtype: DTypeLike | None = None) -> Tensor:
    """Return uniformly distributed integers in `[low, high)`.

    Args:
        key: The source of randomness: a NumPy Generator, an int seed or a JAX key.
        shape: The shape of the result.
        low: The smallest integer.
        high: The upper bound, which is excluded.
        dtype: An integer dtype; by default int64, or JAX's default integers.

    Raises:
        ArgumentError: the range is empty, or `key` is not a source of randomness.
        DTypeError: JAX cannot represent the dtype.

    Source: `jax.random.randint`.

    >>> import regrad as rg
    >>> rg.random.randint(0, (3,), 5, 6)
    Tensor([5, 5, 5], dtype=int64)
    """
    low, high = operator.index(low), operator.index(high)
    if low >= high:
        raise ArgumentError(f"randint: low must be less than high, got [{low}, {high})")
    dtype = None if dtype is None else as_numpy_dtype(dtype)
    return wrap(source(key).integers(as_shape(shape), low, high, dtype))


@public
def permutation(key: Key, x: TensorLike, axis: int = 0) -> Tensor:
    """Return integers in random order, or the slices of a Tensor in random order.

    Args:
        key: The source of randomness: a NumPy Generator, an int seed or a JAX key.
        x: An int n, for the integers from 0 to n - 1; or a Tensor or array.
        axis: The axis of a Tensor along which to permute its slices.

    Returns:
        A Tensor of shape `(n,)` and int64 (JAX's default integers), or of x's shape and dtype.

    Source: `jax.random.permutation`.

    >>> sorted(rg.random.permutation(0, 4).tolist())
    [0, 1, 2, 3]
    """
    if isinstance(x, int | np.integer):
        return wrap(source(key).permutation(int(x)))
    x = lift(x)
    axis = normalized_axis(axis, x.ndim)
    return take(x, wrap(source(key).permutation(x.shape[axis])), axis=axis)


# -- keys ----------------------------------------------------------------------------------------


@public
def key(seed: int) -> Any:
    """Return a key of JAX, the source of randomness to use under `jit`.

    A key never changes. Pass it as an argument, and make new keys with `split` or `fold_in`.

    Args:
        seed: An int. Equal seeds make equal keys.

    Raises:
        MissingPackageError: JAX is not installed.

    Source: `jax.random.key`.

    >>> import regrad as rg
    >>> rg.random.normal(rg.random.key(0), (2, 3)).shape
    (2, 3)
    """
    return _jax_random().key(operator.index(seed))


@public
def split(key: Key, num: int = 2) -> Any:
    """Return new keys derived from a key. Do not use the original key again.

    Args:
        key: A key of JAX.
        num: The number of new keys.

    Returns:
        An array of `num` keys.

    Raises:
        ArgumentError: `key` is not a key of JAX.

    Source: `jax.random.split`.

    >>> import regrad as rg
    >>> key, noise = rg.random.split(rg.random.key(0))
    >>> rg.random.normal(noise, (2, 3)).shape
    (2, 3)
    """
    return _jax_random().split(_jax_key(key), num)


@public
def fold_in(key: Key, data: Any) -> Any:
    """Return a new key derived from a key and an integer.

    Args:
        key: A key of JAX.
        data: The integer, e.g. the number of a step. It may be a Tensor.

    Raises:
        ArgumentError: `key` is not a key of JAX.

    Source: `jax.random.fold_in`.

    >>> import regrad as rg
    >>> step_key = rg.random.fold_in(rg.random.key(0), 7)
    >>> rg.random.normal(step_key, (2, 3)).shape
    (2, 3)
    """
    return _jax_random().fold_in(_jax_key(key), data._data if isinstance(data, Tensor) else data)


def _jax_key(key: Key) -> Any:
    found = source(key)
    if not isinstance(found, JaxSource):
        raise ArgumentError(
            f"expected a key of JAX, regrad.random.key(0), got {kind(key)}; a NumPy Generator "
            "needs no splitting, because it advances"
        )
    return found.key


def _jax_random() -> Any:
    return find_jax("a key of rg.random").random


# -- parameters ----------------------------------------------------------------------------------


def _parameters(
    name: str, values: tuple[Any, ...], shape: Shape | None, dtype: DTypeLike | None
) -> tuple[list[Any], tuple[int, ...], np.dtype]:
    """Return the parameters of a distribution in one dtype, and the result's shape and dtype."""
    values = tuple(v if type(v) in (int, float) else lift(v) for v in values)
    tensors = [v for v in values if isinstance(v, Tensor)]
    if dtype is None:
        dtype = promote([t.dtype for t in tensors if t.dtype.kind == "f"] or [get_default_dtype()])
    dtype = as_numpy_dtype(dtype)
    if dtype.kind not in "fV":
        raise DTypeError(f"{name}: the dtype must be a float dtype, got {dtype}")
    shapes = [t.shape for t in tensors]
    shape = np.broadcast_shapes(*shapes) if shape is None else as_shape(shape)
    if shapes and not _fits(shape, shapes):
        raise ShapeError(
            f"{name}: parameters of the shapes {', '.join(map(str, shapes))} do not broadcast to "
            f"the shape {shape}"
        )
    return [astype(v, dtype) if isinstance(v, Tensor) else v for v in values], shape, dtype


def _fits(shape: tuple[int, ...], shapes: list[tuple[int, ...]]) -> bool:
    try:
        return np.broadcast_shapes(shape, *shapes) == shape
    except ValueError:
        return False


def _affine(noise: Array, offset: TensorLike, scale: TensorLike) -> Tensor:
    """Return `offset + scale * noise`, without operations that have no effect."""
    y = wrap(noise)
    if isinstance(scale, Tensor) or scale != 1:
        y = y * scale
    return y + offset if isinstance(offset, Tensor) or offset != 0 else y


# -- sources -------------------------------------------------------------------------------------


class NumpySource:
    """Noise from a NumPy Generator, which advances.

    Args:
        generator: The Generator.

    >>> import regrad as rg
    >>> type(rg.random.source(0)).__name__
    'NumpySource'
    """

    closes_over: tuple[str, ...] = ("generator",)

    def __init__(self, generator: np.random.Generator) -> None:
        self.generator = generator

    def draw(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return numbers from the standard form of the distribution `name`."""
        if name == "truncated_normal":
            from scipy.special import ndtr, ndtri

            noise = ndtri(self.generator.uniform(ndtr(-2.0), ndtr(2.0), shape))
            return np.clip(noise, -2.0, 2.0).astype(dtype)
        if name == "gumbel":
            return np.asarray(self.generator.gumbel(size=shape)).astype(dtype)
        method = {"uniform": "random"}.get(name, f"standard_{name}")
        exact = dtype if dtype in (np.float32, np.float64) else FLOAT  # a Generator's dtypes
        noise = getattr(self.generator, method)(shape, dtype=exact)
        return np.asarray(noise).astype(dtype, copy=False)

    def integers(
        self, shape: tuple[int, ...], low: int, high: int, dtype: np.dtype | None
    ) -> np.ndarray:
        """Return integers in `[low, high)`."""
        return np.asarray(self.generator.integers(low, high, shape, dtype or np.int64))

    def permutation(self, n: int) -> np.ndarray:
        """Return the integers below n in random order."""
        return self.generator.permutation(n)


class JaxSource:
    """Noise from a JAX key, which never changes.

    Args:
        key: The key.

    >>> import regrad as rg
    >>> type(rg.random.source(rg.random.key(0))).__name__
    'JaxSource'
    """

    closes_over: tuple[str, ...] = ("key",)

    def __init__(self, key: Array) -> None:
        self.key = key
        self.backend: Backend = BACKENDS[type(key)]

    def draw(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return numbers from the standard form of the distribution `name`."""
        import jax

        bounds = (-2.0, 2.0) if name == "truncated_normal" else ()
        dtype = self.backend.native_dtype(dtype)
        return getattr(jax.random, name)(self.key, *bounds, shape=shape, dtype=dtype)

    def integers(self, shape: tuple[int, ...], low: int, high: int, dtype: np.dtype | None) -> Any:
        """Return integers in `[low, high)`."""
        import jax

        default = jax.numpy.arange(0).dtype  # int64 in x64 mode, else int32
        if dtype in (np.int64, np.uint64) and default != np.int64:
            raise DTypeError(
                f"JAX cannot represent {dtype} while its x64 mode is off; use int32, or enable x64 "
                "with jax.config.update('jax_enable_x64', True)"
            )
        return jax.random.randint(self.key, shape, low, high, dtype or default)

    def permutation(self, n: int) -> Any:
        """Return the integers below n in random order."""
        import jax

        return jax.random.permutation(self.key, n)


@public
def source(key: Key) -> NumpySource | JaxSource:
    """Return the source of randomness for a key.

    Args:
        key: The source of randomness: a NumPy Generator, an int seed or a JAX key.

    Raises:
        ArgumentError: `key` is none of these, or is a Generator under JAX's jit.

    >>> import numpy as np
    >>> import regrad as rg
    >>> rg.random.source(np.random.default_rng(0)).permutation(1).tolist()
    [0]
    """
    if isinstance(key, Tensor):
        key = key._data
    if isinstance(key, np.random.Generator):
        state = current()
        if state is not None and state.region is not None:
            state.region.generator(key)
        _check_not_traced()
        return NumpySource(key)
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        return NumpySource(np.random.default_rng(key))
    if is_array(key) and BACKENDS[type(key)].name == "jax":
        return JaxSource(key)
    raise ArgumentError(
        "the key must be a NumPy Generator (np.random.default_rng(0)), an int seed, or a JAX key "
        f"(jax.random.key(0)), got {kind(key)}: {key!r:.60}"
    )


def _check_not_traced() -> None:
    """Raise under JAX's jit, where a Generator would draw only once, at trace time."""
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(jax.numpy.asarray(0.0), jax.core.Tracer):
        raise ArgumentError(
            "a NumPy Generator cannot be used under jit: its numbers would be drawn once, and "
            "every call would return the same ones. Pass a JAX key (jax.random.key(0)) as an "
            "argument of the compiled function, and split it for each draw."
        )


_hint_in(__name__)
