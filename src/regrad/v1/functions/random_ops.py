"""Random tensors, such as `tf.random_normal`, which draw new numbers in each run.

Each op has its own generator in a session. With a seed (of the graph, of the op, or both) every
new session repeats the same numbers. Without a seed the numbers differ between sessions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import regrad as rg
from regrad.core.backends import BACKENDS
from regrad.core.dims import Shape, UnknownRank
from regrad.core.registry import Op, bind
from regrad.core.shapes import as_count
from regrad.core.state import next_id
from regrad.core.tensor import TensorLike
from regrad.errors import ArgumentError, DTypeError, GraphError, MissingRuleError, brief
from regrad.graph.deferred import spec_of_record
from regrad.graph.graph import chain, defer, graph_op
from regrad.graph.plan import PlanRun
from regrad.random import JaxSource, NumpySource
from regrad.shapes.infer import Spec
from regrad.v1 import dtypes
from regrad.v1.errors import InvalidArgumentError
from regrad.v1.functions import arrays, indexing, math
from regrad.v1.graph.conversion import as_sizes, build, convert_to_tensor
from regrad.v1.graph.graphs import current_graph, get_default_graph
from regrad.v1.graph.rows import listed, plain_value, row, written
from regrad.v1.graph.tensors import Tensor, face
from regrad.v1.graph.tf_names import declare

# -- seeds ---------------------------------------------------------------------------------------

DEFAULT_GRAPH_SEED = 87654321
_Source = NumpySource | JaxSource


def set_random_seed(seed: int | None) -> None:
    """Set the seed of the default graph, for random ops made after the call.

    Args:
        seed: An integer, or None for new numbers in each session.

    Raises:
        ArgumentError: the seed is not an integer.

    Source: `tf.set_random_seed`.

    >>> import regrad.v1 as tf
    >>> def draw():
    ...     with tf.Graph().as_default(), tf.Session() as sess:
    ...         tf.set_random_seed(1)
    ...         return sess.run(tf.random_uniform([2])).tolist()
    >>> draw() == draw()
    True
    """
    get_default_graph().seed = _as_seed(seed)


def get_seed(op_seed: int | None) -> tuple[int | None, int | None]:
    """Return the graph's seed and the op's seed for a new op. Without any seed both are None.

    Two zeros would mean that there is no seed, so the op's seed becomes the largest int32.
    """
    graph_seed, op_seed = get_default_graph().seed, _as_seed(op_seed)
    if graph_seed is None:
        return (None, None) if op_seed is None else (DEFAULT_GRAPH_SEED, op_seed)
    if op_seed is None:  # the number of ops, so that ops of one graph differ
        op_seed = sum(len(graph.nodes) for graph in chain(current_graph()))
    return graph_seed, op_seed if graph_seed or op_seed else 2**31 - 1


def _as_seed(seed: int | None) -> int | None:
    try:
        return None if seed is None else operator.index(seed)
    except TypeError:
        raise ArgumentError(f"seed: expected an integer or None, got {brief(seed)}") from None


def _source(run: Any, seed: int, seed2: int, stream: int, region: bool) -> _Source:
    """Return an op's source of numbers in a session: a generator, or a key in a traced plan.

    The gradient of a region (a branch or a loop's body) runs the region again. The second run
    draws the same numbers as the first.
    """
    if run.xp is not np:
        return JaxSource(run.key(stream))
    place = stream, run.path
    if place in run.drawn:
        again = np.random.PCG64()
        again.state = run.drawn[place]
        return NumpySource(np.random.Generator(again))
    found = run.others.get(stream)
    if found is None:
        seeds = (seed % 2**64, seed2 % 2**64) if seed or seed2 else None
        found = run.others[stream] = NumpySource(np.random.Generator(np.random.PCG64(seeds)))
    if region:
        run.drawn[place] = found.generator.bit_generator.state
    return found


# -- the ops -------------------------------------------------------------------------------------

KNOWN = np.ndarray, np.generic  # arrays of other types belong to a traced plan


def _random_op(type: str, kernel: Callable[..., Any], inputs: str, attrs: str = "") -> Op:
    """Make an op from its declaration. Its kernel gets the session's generator first."""

    def draw(
        run: PlanRun, *arrays: Any, seed: int, seed2: int, stream: int, region: bool, **options: Any
    ) -> np.ndarray:
        return kernel(_source(run, seed, seed2, stream, region), *arrays, **options)

    attrs += " seed seed2 stream region"
    return graph_op(str(declare(f"{type} seed seed2")), draw, inputs, attrs, stateful=True)


def _noise(type: str, distribution: str) -> Op:
    kernel = lambda source, shape, dtype: source.draw(distribution, shape, dtype)  # noqa: E731
    return _random_op(f"{type}: shape | dtype T=Tidx", kernel, "", "shape dtype")


def _integers(source: Any, low: Any, high: Any, shape: Shape, dtype: np.dtype) -> np.ndarray:
    if isinstance(low, KNOWN) and isinstance(high, KNOWN):
        if bool(np.greater_equal(low, high)):
            raise InvalidArgumentError(f"Need minval < maxval, got {low} >= {high}")
        low, high = int(low), int(high)
    return source.integers(shape, low, high, dtype)


def _shuffle(source: _Source, value: np.ndarray) -> np.ndarray:
    order = source.permutation(len(value))
    return BACKENDS[type(order)].xp.take(value, order, axis=0)


def _classes(source: _Source, logits: np.ndarray, count: int, dtype: np.dtype) -> np.ndarray:
    batch, classes = logits.shape
    noise = source.draw("gumbel", (batch, count, classes), logits.dtype)
    return (logits[:, None, :] + noise).argmax(axis=-1).astype(dtype)


NORMAL = _noise("RandomStandardNormal", "normal")
TRUNCATED = _noise("TruncatedNormal", "truncated_normal")
UNIFORM = _noise("RandomUniform", "uniform")
_UNIFORM_INT = "RandomUniformInt: shape * | Tout=dtype T=Tidx"
INTEGERS = _random_op(_UNIFORM_INT, _integers, "minval maxval", "shape dtype")
SHUFFLE = _random_op("RandomShuffle: * | T", _shuffle, "value")
_MULTINOMIAL = "Multinomial: * num_samples=count | T output_dtype"
MULTINOMIAL = _random_op(_MULTINOMIAL, _classes, "logits", "count dtype")


def _not_through_a_shuffle(dy: rg.Tensor) -> Any:
    raise MissingRuleError(
        "tf.random_shuffle has no gradient, as in TensorFlow; shuffle the row numbers: "
        "tf.gather(x, tf.random_shuffle(tf.range(n)))"
    )


SHUFFLE.rule = bind(_not_through_a_shuffle, SHUFFLE, "RandomShuffle")


def draw(
    op: Op, name: str | None, spec: Spec, seed: int | None, *inputs: Tensor, **attrs: Any
) -> Tensor:
    """Add a random op to the graph that is being built, and return its output."""
    graph, (first, second) = current_graph(), get_seed(seed)
    seeds = {"seed": first or 0, "seed2": second or 0}  # two zeros: no seed
    attrs |= {**seeds, "stream": next_id(), "region": graph.outer is not None}
    xs = tuple([x._read() for x in inputs])
    with graph.naming(op.type, name):
        if xs:
            return face(defer(op, xs, attrs, specs=[spec]))
        return face(graph.add(op, op.rule, (), attrs, specs=[spec]))


def noise(
    op: Op, name: str | None, shape: TensorLike, dtype: dtypes.DTypeLike, seed: int | None,
    *bounds: Tensor,
) -> Tensor:  # fmt: skip
    """Return numbers from a standard distribution, or integers between bounds.

    The shape may be a tensor of sizes. One number as a shape raises ValueError.
    """
    dtype, sizes = dtypes.to_numpy(dtype), as_sizes(shape)
    if dtype.kind != "f" and not bounds:
        raise DTypeError(f"{op.type} draws floats (or ints, by tf.random_uniform), got {dtype}")
    if not isinstance(sizes, tuple | UnknownRank):
        raise GraphError(f"Shape must be rank 1 but is rank 0: pass [{sizes}], not {sizes}")
    return draw(op, name, spec_of_record(sizes, dtype), seed, *bounds, shape=sizes, dtype=dtype)


# -- public functions ----------------------------------------------------------------------------


def _normal(
    _: str, name: str, op: Op, *, shape: Any, mean: Any, stddev: Any, dtype: Any, seed: Any
) -> Tensor:
    with current_graph().name_scope(name) as scope:
        mean = convert_to_tensor(mean, dtype, name="mean")
        stddev = convert_to_tensor(stddev, dtype, name="stddev")
        return _scale_and_shift(scope, noise(op, None, shape, dtype, seed), stddev, mean)


def _scale_and_shift(scope: str, y: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    scaled = build("Mul", "mul", rg.multiply, y, scale)
    return build("AddV2", scope, rg.add, scaled, offset)


_normal_row = partial(row, "tf", "AddV2", call=_normal, returns="Tensor", shape=plain_value)


@_normal_row(NORMAL, scope="random_normal")
def random_normal(shape, mean=0.0, stddev=1.0, dtype=dtypes.float32, seed=None):
    """Return normal (Gaussian) numbers.

    Args:
        mean: The mean, which may be a tensor and has a gradient.
        stddev: The standard deviation, which may be a tensor and has a gradient.

    Raises:
        DTypeError: the dtype is not a float dtype.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.random_normal([2], mean=5.0, stddev=0.0)))
    [5. 5.]
    """


@_normal_row(TRUNCATED, scope="truncated_normal")
def truncated_normal(shape, mean=0.0, stddev=1.0, dtype=dtypes.float32, seed=None):
    """Return normal numbers that are at most two standard deviations away from the mean.

    Args:
        mean: The mean, which may be a tensor and has a gradient.
        stddev: The standard deviation before truncation, which may be a tensor and has a gradient.

    Raises:
        DTypeError: the dtype is not a float dtype.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.truncated_normal([2], mean=5.0, stddev=0.0)))
    [5. 5.]
    """


@written("tf")
def random_uniform(
    shape, minval: TensorLike = 0, maxval=None, dtype=dtypes.float32, seed=None, name=None
) -> Tensor:
    """Return uniformly distributed numbers from `[minval, maxval)`.

    Args:
        shape: The sizes: numbers, or a tensor of integers.
        minval: The lower bound.
        maxval: The upper bound, by default 1 for floats.
        dtype: The dtype of the result, a float or integer dtype.

    Returns:
        A tensor of this shape and dtype.

    Raises:
        GraphError: the dtype is an integer dtype, and maxval is missing.

    Source: `tf.random_uniform`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     x = sess.run(tf.random_uniform([100], 2.0, 3.0))
    >>> bool(x.min() >= 2.0 and x.max() < 3.0)
    True
    """
    dtype = dtypes.as_dtype(dtype)
    if maxval is None and dtype.is_integer:
        raise GraphError(f"Must specify maxval for integer dtype {dtype!r}")
    with current_graph().name_scope(name or "random_uniform") as scope:
        low = convert_to_tensor(minval, dtype, name="min")
        high = convert_to_tensor(1 if maxval is None else maxval, dtype, name="max")
        if dtype.is_integer:
            return noise(INTEGERS, scope, shape, dtype, seed, low, high)
        y = noise(UNIFORM, None, shape, dtype, seed)
        return _scale_and_shift(scope, y, build("Sub", "sub", rg.subtract, high, low), low)


@written("tf")
def random_shuffle(value: TensorLike, seed: int | None = None, name: str | None = None) -> Tensor:
    """Return the rows of a tensor in random order. As in TensorFlow, the op has no gradient.

    To get a gradient, shuffle the row numbers: `tf.gather(x, tf.random_shuffle(tf.range(n)))`.

    Args:
        value: A tensor or array.

    Returns:
        A tensor of the same shape and dtype.

    Op type: `RandomShuffle`. Source: `tf.random_shuffle`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sorted(sess.run(tf.random_shuffle([1, 2, 3])).tolist()))
    [1, 2, 3]
    """
    value = convert_to_tensor(value)
    return draw(SHUFFLE, name, value._symbol.spec, seed, value)


def _categorical(
    _: str, name: str, op: Op, logits: TensorLike, num_samples: Any, *, seed: Any,
    dtype: Any = None, output_dtype: Any = None,
) -> Tensor:  # fmt: skip
    with current_graph().name_scope(name):
        logits = convert_to_tensor(logits, name="logits")
        count = as_count(as_sizes(num_samples), "num_samples")
        out_dtype = dtypes.to_numpy(dtype or output_dtype or "int64")
        shape = logits._symbol.shape
        spec = Spec((None if isinstance(shape, UnknownRank) else shape[0], count), out_dtype)
        return draw(op, None, spec, seed, logits, count=count, dtype=out_dtype)


_classes_row = partial(
    row, op_type="Multinomial", function=MULTINOMIAL, call=_categorical, returns="Tensor"
)


@_classes_row("tf", scope="multinomial")
def multinomial(logits, num_samples, seed=None, name=None, output_dtype=None):
    """Return, for each row of logits, classes drawn from `softmax(logits)`.

    Args:
        logits: A tensor or array of the shape (rows, classes).
        num_samples: The number of classes to draw for each row.
        output_dtype: The dtype of the result.

    Returns:
        A tensor of integers (int64), of the shape (rows, num_samples).

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.multinomial([[0.0, 100.0]], 3)))
    [[1 1 1]]
    """


@_classes_row("tf.random", scope="categorical")
def categorical(logits, num_samples, dtype=None, seed=None):
    """Return classes for each row of logits, drawn from `softmax(logits)` like `multinomial`.

    Args:
        logits: A tensor or array of the shape (rows, classes).
        num_samples: The number of classes to draw for each row.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.random.categorical([[0.0, 100.0]], 3)))
    [[1 1 1]]
    """


@written("tf")
def random_crop(value, size, seed=None, name=None) -> Tensor:
    """Return a block of this size from a random position in a tensor.

    Args:
        value: A tensor or array.
        size: The sizes of the block, one for each axis.

    Returns:
        A tensor of this shape, of the value's dtype.

    A composition. Source: `tf.random_crop`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.random_crop(tf.range(10), [3])).shape)
    (3,)
    """
    with current_graph().name_scope(name or "random_crop"):
        value = convert_to_tensor(value, name="value")
        size = convert_to_tensor(size, dtypes.int32, name="size")
        rank = [len(value._symbol.shape)]
        anywhere = random_uniform(rank, maxval=dtypes.int32.max, dtype=dtypes.int32, seed=seed)
        offset = math.mod(anywhere, arrays.shape(value) - size + 1, name="mod")
        return indexing.slice(value, offset, size)


__all__ = listed(__name__, "set_random_seed")
