"""Random tensors from explicit sources of randomness; there is no global seed.

The first argument of every function is `key`, one of

* a NumPy `Generator` (`np.random.default_rng(0)`): it advances, so each call draws new numbers;
* an int, a seed: short for `np.random.default_rng(seed)`, so equal seeds give equal numbers;
* a JAX key (`jax.random.key(0)`): it never changes, so the same key draws the same numbers each
  time. Make new keys with `jax.random.split`. Under jit only a JAX key draws new numbers at each
  call, and a Generator is refused there.

The result lives in the library of its source: NumPy, or JAX. The parameters of a distribution
may be Tensors; they broadcast to `shape` (by default the shape is theirs), and the result is
differentiable in them: `normal` is `mean + stddev * noise`.
"""

from __future__ import annotations

import operator
import sys
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from regrad.core.backends import BACKENDS, FLOAT, Array, DTypeLike, is_array
from regrad.core.dispatch import lift
from regrad.core.promotion import get_default_dtype, promote
from regrad.core.shapes import Shape, as_shape, normalized_axis
from regrad.core.signatures import public
from regrad.core.state import current
from regrad.core.tensor import Tensor, TensorLike, wrap
from regrad.errors import ArgumentError, DTypeError, ShapeError, kind
from regrad.ops.creation import as_numpy_dtype
from regrad.ops.elementwise import astype, less
from regrad.ops.indexing import take
from regrad.transforms.traces import find_jax

if TYPE_CHECKING:
    from regrad.core.backends import Backend


__all__ = [
    "bernoulli", "exponential", "fold_in", "gumbel", "key", "normal", "permutation", "randint",
    "split", "truncated_normal", "uniform",
]  # fmt: skip

# An array is a key of JAX. (As text: NumPy loads its random numbers when they are first named.)
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
    """Normal (Gaussian) numbers.

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
    """Normal numbers that are at most two standard deviations away from the mean."""
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
    """Numbers from `[low, high)`, all equally likely."""
    (low, high), shape, dtype = _parameters("uniform", (low, high), shape, dtype)
    return _affine(source(key).draw("uniform", shape, dtype), low, high - low)


@public
def exponential(
    key: Key, shape: Shape | None = None, scale: TensorLike = 1.0, dtype: DTypeLike | None = None
) -> Tensor:
    """Exponentially distributed numbers of mean `scale`."""
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
    """Gumbel numbers; `argmax(logits + gumbel)` is a draw from `softmax(logits)`."""
    (loc, scale), shape, dtype = _parameters("gumbel", (loc, scale), shape, dtype)
    return _affine(source(key).draw("gumbel", shape, dtype), loc, scale)


@public
def bernoulli(
    key: Key, shape: Shape | None = None, p: TensorLike = 0.5, dtype: DTypeLike = bool
) -> Tensor:
    """True with probability `p`, as bools unless `dtype` says otherwise.

    There is no gradient by `p`, unless a rule is put in force for the op type `Less`.
    """
    (p,), shape, noise_dtype = _parameters("bernoulli", (p,), shape, None)
    return astype(less(wrap(source(key).draw("uniform", shape, noise_dtype)), p), dtype)


@public
def randint(key: Key, shape: Shape, low: int, high: int, dtype: DTypeLike | None = None) -> Tensor:
    """Integers from `[low, high)`, all equally likely: int64, or JAX's default integers.

    Raises ArgumentError if the range is empty.
    """
    low, high = operator.index(low), operator.index(high)
    if low >= high:
        raise ArgumentError(f"randint: low must be less than high, got [{low}, {high})")
    dtype = None if dtype is None else as_numpy_dtype(dtype)
    return wrap(source(key).integers(as_shape(shape), low, high, dtype))


@public
def permutation(key: Key, x: TensorLike, axis: int = 0) -> Tensor:
    """The integers below `x` in random order, or a Tensor `x` with its entries along `axis` so.

    >>> import regrad as rg
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
    """A key of JAX's, the source of randomness to use under `jit`.

    A key never changes: pass it as an argument, and make new ones of it by `split` or `fold_in`.

    Source: `jax.random.key`.
    """
    return _jax_random().key(operator.index(seed))


@public
def split(key: Key, num: int = 2) -> Any:
    """`num` new keys from one, which is not to be used again.

    Source: `jax.random.split`.

    >>> import regrad as rg
    >>> key, noise = rg.random.split(rg.random.key(0))
    >>> rg.random.normal(noise, (2, 3)).shape
    (2, 3)
    """
    return _jax_random().split(_jax_key(key), num)


@public
def fold_in(key: Key, data: Any) -> Any:
    """A new key from a key and an integer (the number of a step, say), which may be a Tensor.

    Source: `jax.random.fold_in`.
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
    return find_jax().random


# -- parameters ----------------------------------------------------------------------------------


def _parameters(
    name: str, values: tuple[Any, ...], shape: Shape | None, dtype: DTypeLike | None
) -> tuple[list[Any], tuple[int, ...], np.dtype]:
    """The parameters of a distribution under one dtype, and the shape and dtype of the result."""
    values = tuple(v if type(v) in (int, float) else lift(v) for v in values)
    tensors = [v for v in values if isinstance(v, Tensor)]
    if dtype is None:
        dtype = promote([t.dtype for t in tensors if t.dtype.kind == "f"] or [get_default_dtype()])
    dtype = as_numpy_dtype(dtype)
    if dtype.kind not in "fV":
        raise DTypeError(f"{name}: the dtype must be one of floats, got {dtype}")
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
    """`offset + scale * noise`, without the steps that would do nothing."""
    y = wrap(noise)
    if isinstance(scale, Tensor) or scale != 1:
        y = y * scale
    return y + offset if isinstance(offset, Tensor) or offset != 0 else y


# -- sources -------------------------------------------------------------------------------------


class NumpySource:
    """Noise from a NumPy Generator, which advances."""

    def __init__(self, generator: np.random.Generator) -> None:
        self.generator = generator

    def draw(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Numbers from the standard form of the distribution `name`."""
        if name == "truncated_normal":
            from scipy.special import ndtr, ndtri

            noise = ndtri(self.generator.uniform(ndtr(-2.0), ndtr(2.0), shape))
            return np.clip(noise, -2.0, 2.0).astype(dtype)
        if name == "gumbel":
            return np.asarray(self.generator.gumbel(size=shape)).astype(dtype)
        method = {"uniform": "random"}.get(name, f"standard_{name}")
        exact = dtype if dtype in (np.float32, np.float64) else FLOAT  # what a Generator has
        noise = getattr(self.generator, method)(shape, dtype=exact)
        return np.asarray(noise).astype(dtype, copy=False)

    def integers(
        self, shape: tuple[int, ...], low: int, high: int, dtype: np.dtype | None
    ) -> np.ndarray:
        """Integers from `[low, high)`."""
        return np.asarray(self.generator.integers(low, high, shape, dtype or np.int64))

    def permutation(self, n: int) -> np.ndarray:
        """The integers below n in random order."""
        return self.generator.permutation(n)


class JaxSource:
    """Noise from a JAX key, which never changes."""

    def __init__(self, key: Array) -> None:
        self.key = key
        self.backend: Backend = BACKENDS[type(key)]

    def draw(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Numbers from the standard form of the distribution `name`."""
        import jax

        bounds = (-2.0, 2.0) if name == "truncated_normal" else ()
        dtype = self.backend.native_dtype(dtype)
        return getattr(jax.random, name)(self.key, *bounds, shape=shape, dtype=dtype)

    def integers(self, shape: tuple[int, ...], low: int, high: int, dtype: np.dtype | None) -> Any:
        """Integers from `[low, high)`."""
        import jax

        default = jax.numpy.arange(0).dtype  # int64 in x64 mode, else int32
        if dtype in (np.int64, np.uint64) and default != np.int64:
            raise DTypeError(
                f"JAX cannot hold {dtype} while its x64 mode is off; take int32, or switch it on "
                "with jax.config.update('jax_enable_x64', True)"
            )
        return jax.random.randint(self.key, shape, low, high, dtype or default)

    def permutation(self, n: int) -> Any:
        """The integers below n in random order."""
        import jax

        return jax.random.permutation(self.key, n)


@public
def source(key: Key) -> NumpySource | JaxSource:
    """The source of randomness that a key stands for; ArgumentError for anything else."""
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
    """A Generator under JAX's jit would draw once, and the numbers would be baked in."""
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(jax.numpy.asarray(0.0), jax.core.Tracer):
        raise ArgumentError(
            "a NumPy Generator cannot be used under jit: its numbers would be drawn once, and "
            "every call would see the same ones. Pass a JAX key (jax.random.key(0)) as an "
            "argument of the compiled function, and split it for each draw."
        )
