"""Checks of values in a run: `tf.assert_equal`, `tf.check_numerics` and similar functions."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

from regrad.core.dims import UnknownRank
from regrad.core.tensor import TensorLike
from regrad.errors import ShapeError
from regrad.v1.functions import arrays, math
from regrad.v1.functions.reductions import reduce_all
from regrad.v1.graph.control import no_op
from regrad.v1.graph.conversion import convert_to_tensor, same_dtype
from regrad.v1.graph.graphs import control_dependencies, name_scope
from regrad.v1.graph.python_ops import Assert
from regrad.v1.graph.rows import define
from regrad.v1.graph.tensors import Operation

__all__ = [
    "assert_equal", "assert_greater", "assert_greater_equal", "assert_less", "assert_less_equal",
    "assert_negative", "assert_non_negative", "assert_non_positive", "assert_none_equal",
    "assert_positive", "assert_rank", "assert_rank_at_least", "check_numerics",
]  # fmt: skip


def _elements(
    label: str, _: str, name: str, holds: Callable[..., Any], x: Any, y: Any = 0, *,
    data: Any, summarize: int | None, message: str | None,
) -> Operation:  # fmt: skip
    """Return an op that raises in the run unless all elements of x {what}.

    Make the ops that rely on it in `with tf.control_dependencies([tf.{name}(…)])`. Shapes
    broadcast.

    Args:
        data: Tensors that the error shows, by default both sides of the comparison.
        summarize: The number of elements to show of each tensor, by default 3.
        message: The first words of the error.

    Returns:
        The Operation.

    Raises:
        DTypeError: the dtypes differ, or an argument cannot become a tensor.
        InvalidArgumentError: in the run, the condition does not hold.

    {prompt} with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.{name}({shown})))
    None
    """
    with name_scope(name):
        x, y = same_dtype(f"assert_{label}", x, y)
        words = f"Condition x {label} y did not hold:"
        return Assert(reduce_all(holds(x, y)), data or [message or "", words, x, y], summarize)


def _ranks(
    label: str, _: str, name: str, holds: Callable[..., Any], x: Any, rank: Any, **options: Any
) -> Operation:
    """Return an op that raises unless the number of axes of x {what}.

    Args:
        x: A tensor or array.
        rank: The number of axes.
        data: Tensors that the error shows.
        summarize: The number of elements to show of each tensor, by default 3.
        message: The first words of the error.

    Returns:
        The Operation.

    Raises:
        ShapeError: the static shape has another rank. The error is a ValueError.
        InvalidArgumentError: in the run, the rank differs.

    {prompt} with tf.Graph().as_default():
    ...     print(tf.{name}({shown}).type)
    NoOp
    """
    x = convert_to_tensor(x)
    shape, message = x._symbol.shape, options["message"] or "wrong rank"
    if isinstance(shape, UnknownRank):
        return _elements(label, "Assert", name, holds, arrays.rank(x), rank, **options)
    if not holds(len(shape), rank):
        expected = f"{label.replace('_', ' ')} {rank}"
        raise ShapeError(f"assert_{label}: {message}: expected {expected}, got {x}")
    return no_op(name)


def _check(
    label: str, holds: Callable[..., Any], what: str, shown: str, tensors: str = "x, y",
    check: Callable[..., Operation] = _elements,
) -> Any:  # fmt: skip
    """Make a check. Its docstring is the docstring of `check`, whose example has no prompt yet."""
    name, said = f"assert_{label}", inspect.cleandoc(check.__doc__ or "")
    doc = said.format(name=name, what=what, shown=shown, prompt=">>>")
    options: Any = {"scope": name, "doc": doc, "returns": "Operation"}
    declared = f"tf.{name}({tensors}, data=None, summarize=None, message=None)"
    return define(declared, "Assert", holds, call=partial(check, label), **options)


assert_equal: Any = _check("equal", math.equal, "equal y", "2, 2")
assert_none_equal: Any = _check("none_equal", math.not_equal, "differ from y", "1, 2")
assert_less: Any = _check("less", math.less, "are less than y", "1, 2")
assert_less_equal: Any = _check("less_equal", math.less_equal, "are at most y", "1, 2")
assert_greater: Any = _check("greater", math.greater, "are greater than y", "3, 2")
assert_greater_equal: Any = _check("greater_equal", math.greater_equal, "are at least y", "3, 2")
assert_positive: Any = _check("positive", math.greater, "are positive", "2", "x")
assert_negative: Any = _check("negative", math.less, "are negative", "-2", "x")
assert_non_negative: Any = _check("non_negative", math.greater_equal, "are at least 0", "2", "x")
assert_non_positive: Any = _check("non_positive", math.less_equal, "are at most 0", "-2", "x")
_RANK = "tf.zeros([2, 3]), 2", "x, rank", _ranks
assert_rank: Any = _check("rank", operator.eq, "equals `rank`", *_RANK)
assert_rank_at_least: Any = _check("rank_at_least", operator.ge, "is at least `rank`", *_RANK)


def check_numerics(tensor: TensorLike, message: str, name: str | None = None) -> Any:
    """Return a tensor unchanged, and raise in the run if it has a NaN or an infinity.

    Args:
        tensor: A tensor or array of floats.
        message: The first words of the error.

    Returns:
        A tensor of the same shape and dtype.

    Raises:
        InvalidArgumentError: in the run, an element is not finite.

    Op types: `Assert`, `Identity`. Source: `tf.check_numerics`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     try:
    ...         sess.run(tf.check_numerics(tf.log(tf.constant([1.0, 0.0])), "a log"))
    ...     except tf.errors.InvalidArgumentError as error:
    ...         print(error.message)
    assertion failed: [a log : Tensor had NaN or Inf values] [0 -inf]
    """
    with name_scope(name, "CheckNumerics"):
        x = convert_to_tensor(tensor)
        shown = [f"{message} : Tensor had NaN or Inf values", x]
        with control_dependencies([Assert(reduce_all(math.is_finite(x)), shown)]):
            return arrays.identity(x)
