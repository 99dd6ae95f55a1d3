"""Loops along the first axis of tensors: `tf.map_fn`, `tf.scan`, `tf.foldl` and `tf.foldr`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from regrad.core import containers
from regrad.errors import ArgumentError, GraphError
from regrad.graph.graph import NO_RULE
from regrad.v1 import dtypes
from regrad.v1.functions.arrays import concat, reverse
from regrad.v1.graph.control import loop_node
from regrad.v1.graph.conversion import convert_to_tensor
from regrad.v1.graph.regions import spec_of
from regrad.v1.graph.tensors import Tensor

__all__ = ["foldl", "foldr", "map_fn", "scan"]


def map_fn(
    fn: Callable[..., Any], elems: Any, dtype: Any = None, parallel_iterations: int | None = None,
    back_prop: bool = True, swap_memory: bool = False, infer_shape: bool = True,
    name: str | None = None,
) -> Any:  # fmt: skip
    """Return `fn` of each entry along the first axis of `elems`, stacked.

    Args:
        fn: A function of one entry that returns tensors or containers of them.
        elems: A tensor, or a container of tensors of equal length.
        dtype: The dtypes of the results, in their structure. By default the results have the
            structure and the dtypes of `elems`.
        back_prop: Whether gradients pass through the loop.
        name: The name of the op in the graph.
        parallel_iterations, swap_memory, infer_shape: Without effect.

    Returns:
        The stacked results, in the structure that `fn` returns.

    Raises:
        ArgumentError: fn is not callable.
        GraphError: an elem is a scalar, or the results do not have the structure of `dtype`.
        DTypeError: a result does not have its dtype.

    Source: `tf.map_fn`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     x = tf.constant([1.0, 2.0, 3.0])
    ...     y = tf.map_fn(lambda v: (v * v, v < 2.0), x, dtype=(tf.float32, tf.bool))
    ...     print(sess.run(y[0]), sess.run(y[1]), sess.run(tf.gradients(y[0], x)[0]))
    [1. 4. 9.] [ True False False] [2. 4. 6.]
    """
    leaves, close, structure = _opened("map_fn", fn, elems)
    wanted = [x.dtype for x in leaves]
    if dtype is not None:
        wanted, _, structure = containers.opened(dtype)

    def body(_: Any, entries: Any) -> Any:
        return _closed("map_fn", fn(close(entries)), wanted, structure)

    found, again = loop_node(name or "map", None, body, [], [], leaves)
    return again(_without_gradient(found, back_prop))


def scan(
    fn: Callable[[Any, Any], Any], elems: Any, initializer: Any = None,
    parallel_iterations: int = 10, back_prop: bool = True, swap_memory: bool = False,
    infer_shape: bool = True, reverse: bool = False, name: str | None = None,
) -> Any:  # fmt: skip
    """Return all values of `a = fn(a, x)`, for each entry x along the first axis of `elems`.

    Args:
        fn: A function of the last value and an entry that returns the next value.
        elems: A tensor, or a container of tensors of equal length.
        initializer: The first `a`, which is not in the result. By default the first entry, which
            is the first entry of the result.
        back_prop: Whether gradients pass through the loop.
        reverse: Whether to go from the last entry to the first. The result has the order of elems.
        name: The name of the op in the graph.
        parallel_iterations, swap_memory, infer_shape: Without effect.

    Returns:
        The stacked values, in the structure of `initializer` (or of `elems`).

    Raises:
        ArgumentError: fn is not callable.
        GraphError: an elem is a scalar, or fn returns another structure.
        DTypeError, ShapeError: a value changes its dtype or its static shape.

    Source: `tf.scan`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     x = tf.constant([1.0, 2.0, 3.0])
    ...     y = tf.scan(lambda a, v: a * v, x)
    ...     print(sess.run(y), sess.run(tf.gradients(y[2], x)[0]))
    [1. 2. 6.] [6. 3. 2.]
    """
    return _fold(name or "scan", fn, elems, initializer, back_prop, reverse, True)


def foldl(
    fn: Callable[[Any, Any], Any], elems: Any, initializer: Any = None,
    parallel_iterations: int = 10, back_prop: bool = True, swap_memory: bool = False,
    name: str | None = None,
) -> Any:  # fmt: skip
    """Return the last value of `a = fn(a, x)`, for each entry x along the first axis of `elems`.

    Args:
        fn: A function of the last value and an entry that returns the next value.
        elems: A tensor, or a container of tensors of equal length.
        initializer: The first `a`, by default the first entry.
        back_prop: Whether gradients pass through the loop.
        name: The name of the op in the graph.
        parallel_iterations, swap_memory: Without effect.

    Returns:
        The last value, in the structure of `initializer` (or of `elems`).

    Raises:
        ArgumentError: fn is not callable.
        GraphError: an elem is a scalar, or fn returns another structure.
        DTypeError, ShapeError: a value changes its dtype or its static shape.

    Source: `tf.foldl`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.foldl(lambda a, x: a - x, tf.constant([1.0, 2.0, 4.0]))))
    -5.0
    """
    return _fold(name or "foldl", fn, elems, initializer, back_prop, False, False)


def foldr(
    fn: Callable[[Any, Any], Any], elems: Any, initializer: Any = None,
    parallel_iterations: int = 10, back_prop: bool = True, swap_memory: bool = False,
    name: str | None = None,
) -> Any:  # fmt: skip
    """Return the last value of `a = fn(a, x)`, for each entry x from the last to the first.

    Args:
        fn: A function of the last value and an entry that returns the next value.
        elems: A tensor, or a container of tensors of equal length.
        initializer: The first `a`, by default the last entry.
        back_prop: Whether gradients pass through the loop.
        name: The name of the op in the graph.
        parallel_iterations, swap_memory: Without effect.

    Returns:
        The last value, in the structure of `initializer` (or of `elems`).

    Raises:
        ArgumentError: fn is not callable.
        GraphError: an elem is a scalar, or fn returns another structure.
        DTypeError, ShapeError: a value changes its dtype or its static shape.

    Source: `tf.foldr`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.foldr(lambda a, x: a - x, tf.constant([1.0, 2.0, 4.0]))))
    1.0
    """
    return _fold(name or "foldr", fn, elems, initializer, back_prop, True, False)


def _fold(
    name: str, fn: Callable[..., Any], elems: Any, initializer: Any, back_prop: bool,
    backward: bool, every: bool,
) -> Any:  # fmt: skip
    """Return the last value, or with `every` the stacked values, of the loop of a fold."""
    leaves, close, structure = _opened(name, fn, elems)
    turned: list[Any] = [reverse(x, [0]) for x in leaves] if backward else leaves
    if initializer is None:
        given, again, turned = [x[0] for x in turned], close, [x[1:] for x in turned]
    else:
        given, again, structure = containers.opened(initializer)
    start: list[Any] = list(map(convert_to_tensor, given))

    def body(carries: Any, entries: Any) -> Any:
        answer = fn(again(carries), close(entries))
        ys, _ = _closed(name, answer, [x.dtype for x in start], structure)
        return (ys * 2 if every else ys), None

    found, _ = loop_node(name, None, body, start, [spec_of(x._read()) for x in start], turned)
    found = _without_gradient(found, back_prop)
    found = found[len(start) :] if every else found
    if every and initializer is None:
        found = [concat([x[None], y], 0) for x, y in zip(start, found, strict=True)]
    return again([reverse(y, [0]) for y in found] if every and backward else found)


def _opened(what: str, fn: Callable[..., Any], elems: Any) -> tuple[list[Any], Any, Any]:
    if not callable(fn):
        raise ArgumentError(f"{what}: fn must be callable, got {fn!r:.60}")
    leaves, close, structure = containers.opened(elems)
    tensors = list(map(convert_to_tensor, leaves))
    for x in tensors:
        if x.shape.ndims == 0:
            raise GraphError(f"{what}: elems must have at least one axis, got {x}")
    return tensors, close, structure


def _closed(what: str, answer: Any, wanted: list[Any], structure: Any) -> tuple[list[Tensor], Any]:
    """Return the results of fn as tensors of the wanted dtypes, and how to rebuild them."""
    leaves, close, found = containers.opened(answer)
    if found != structure:
        raise GraphError(
            f"{what}: fn must return the structure {structure}, got {found}. (map_fn takes the "
            "dtypes of another structure as dtype.)"
        )
    pairs = zip(leaves, wanted, strict=True)
    return [convert_to_tensor(y, dtypes.as_dtype(dtype).base_dtype) for y, dtype in pairs], close


def _without_gradient(found: list[Tensor], back_prop: bool) -> list[Tensor]:
    if not back_prop:
        found[0]._symbol.node.rule = NO_RULE
    return found


over: Callable[..., Any] = containers.tree_map


def leaves_of(value: Any) -> list[Any]:
    """Return the leaves of a container."""
    return containers.opened(value, None)[0]
