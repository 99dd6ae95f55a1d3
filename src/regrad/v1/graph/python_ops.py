"""Ops that call Python: `tf.py_func`, `tf.Print` and `tf.Assert`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from regrad.core.tensor import TensorLike
from regrad.graph.graph import NO_RULE, graph_op
from regrad.shapes.infer import Spec
from regrad.v1 import dtypes, errors
from regrad.v1.graph.conversion import as_array, convert_to_tensor
from regrad.v1.graph.graphs import add_op, current_graph
from regrad.v1.graph.tensors import Operation, Tensor, face, operation

__all__ = ["Assert", "Print", "numpy_function", "py_func"]


# The dtype of one result, or the dtypes of several results.
DTypes = dtypes.DTypeLike | list[dtypes.DTypeLike] | tuple[dtypes.DTypeLike, ...]


# TensorFlow's errors for the errors of a Python function. Others are an UnknownError.
FAILURES: dict[type[Exception], type[errors.OpError]] = {
    ValueError: errors.InvalidArgumentError, TypeError: errors.InvalidArgumentError,
    StopIteration: errors.OutOfRangeError, NotImplementedError: errors.UnimplementedError,
}  # fmt: skip


def _call_python(xp: Any, xs: Sequence[Any], func: Callable[..., Any], Tout: Any) -> Any:
    try:
        answer = func(*[np.array(x) for x in xs])  # func may write to its arrays
    except Exception as error:
        kinds = [failure for kind, failure in FAILURES.items() if isinstance(error, kind)]
        raise [*kinds, errors.UnknownError][0](f"{type(error).__name__}: {error}") from error
    values = list(answer) if isinstance(answer, list | tuple) else [answer]
    if len(values) != len(Tout) and not (answer is None and not Tout):
        raise errors.InvalidArgumentError(
            f"py_func: expected {len(Tout)} values, {func!r:.60} returned {len(values)}"
        )
    return tuple(_returned(v, t, i) for i, (v, t) in enumerate(zip(values, Tout, strict=False)))


def _returned(value: Any, dtype: np.dtype, index: int) -> np.ndarray:
    array = np.asarray(value)
    if dtype.kind == "O" and array.dtype.kind in "OSU":
        array = as_array(value)
    plain = not isinstance(value, np.ndarray | np.generic)
    if array.dtype != dtype and not (plain and array.dtype.kind == dtype.kind):
        raise errors.InvalidArgumentError(
            f"py_func: the {index}-th value returned has the type {array.dtype}, expected {dtype}"
        )
    return array.astype(dtype)  # a copy, since func may keep its array


PY_FUNC, PY_FUNC_STATELESS = (
    graph_op(type, _call_python, "xs*", "func Tout", name="py_func", several=True)
    for type in ("PyFunc", "PyFuncStateless")
)


def py_func(
    func: Callable[..., Any], inp: Sequence[TensorLike], Tout: DTypes, stateful: bool = True,
    name: str | None = None,
) -> Any:  # fmt: skip
    """Return the result of a Python function of NumPy arrays, as an op.

    The static shapes of the results are unknown. The op has no gradient unless an override of the
    op type `PyFunc` sets one.

    Args:
        func: A function of NumPy arrays. It may write to the arrays.
        inp: The tensors whose values `func` receives.
        Tout: The dtype of the result, or a list of dtypes.
        stateful: If true the op type is `PyFunc`, otherwise `PyFuncStateless`.
        name: The name of the op in the graph.

    Returns:
        A tensor; a list of tensors if Tout is a list; the Operation if Tout is an empty list.

    Raises:
        DTypeError: an input cannot become a tensor.
        InvalidArgumentError: in the run, func raised a ValueError or a TypeError, or returned
            another dtype or number of results.
        OutOfRangeError: in the run, func raised StopIteration.
        UnimplementedError: in the run, func raised NotImplementedError.
        UnknownError: in the run, func raised another error.

    Op type: `PyFunc`. Source: `tf.py_func`.

    >>> import numpy as np
    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default() as g, tf.Session() as sess:
    ...     x = tf.constant([1.0, 4.0])
    ...     with g.gradient_override_map({"PyFunc": lambda op, dy: dy * 0.5 / op.outputs[0]}):
    ...         y = tf.py_func(np.sqrt, [x], tf.float32)
    ...     print(sess.run(tf.gradients(y, x)[0]))
    [0.5  0.25]
    """
    given = Tout if isinstance(Tout, list | tuple) else [Tout]
    out = tuple(dtypes.to_numpy(t) for t in given)
    xs, op = [convert_to_tensor(x)._read() for x in inp], PY_FUNC if stateful else PY_FUNC_STATELESS
    found = add_op(op, name, xs, {"func": func, "Tout": out}, [Spec(None, t) for t in out])
    if not out:
        return operation(current_graph().own_nodes[-1])
    ys = list(face(found))
    return ys if isinstance(Tout, list | tuple) else ys[0]


def numpy_function(
    func: Callable[..., Any], inp: Sequence[TensorLike], Tout: DTypes, name: str | None = None
) -> Any:
    """Return the result of a Python function of NumPy arrays. The newer name of `py_func`.

    Args:
        func, inp, Tout, name: As for `py_func`.

    Returns:
        A tensor; a list of tensors if Tout is a list.

    Raises:
        DTypeError: an input cannot become a tensor.

    Op type: `PyFunc`. Source: `tf.numpy_function`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.numpy_function(lambda x: x + 1, [tf.constant(2.0)], tf.float32)))
    3.0
    """
    return py_func(func, inp, Tout, name=name)


def _print(xp: Any, x: Any, data: Sequence[Any], message: str, first_n: int, summarize: int,
           printed: list[int]) -> Any:  # fmt: skip
    if first_n < 0 or printed[0] < first_n:
        printed[0] += 1
        parts = [_summary(np.asarray(d), summarize) for d in data]
        print(message + "".join(f"[{part}]" for part in parts), file=sys.stderr)
    return x


def _summary(array: np.ndarray, count: int) -> str:
    flat = array.reshape(-1)
    shown = " ".join(map(_text, flat[:count]))
    return shown + ("..." if flat.size > count else "")


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return f"{value:.8g}" if isinstance(value, np.floating) else str(value)


PRINT = graph_op("Print", _print, "x data*", "message first_n summarize printed", rule=None)


def Print(
    input_: TensorLike, data: Sequence[TensorLike], message: str | None = None,
    first_n: int | None = None, summarize: int | None = None, name: str | None = None,
) -> Tensor:  # fmt: skip
    """Return the input unchanged. When a run computes it, the values of `data` go to stderr.

    Args:
        input_: A tensor.
        data: Tensors to print.
        message: Text before the values.
        first_n: The number of runs that print. By default every run prints.
        summarize: The number of elements to print of each tensor, by default 3.
        name: The name of the op in the graph.

    Returns:
        A tensor of the input's shape and dtype.

    Raises:
        DTypeError: an input cannot become a tensor.

    Op type: `Print`. Source: `tf.Print`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     x = tf.constant([1.0, 2.0])
    ...     print(sess.run(tf.Print(x, [x], "x is ")))  # prints x is [1 2] on stderr
    [1. 2.]
    """
    xs = [convert_to_tensor(v)._read() for v in (input_, *data)]
    first, count = -1 if first_n is None else first_n, 3 if summarize is None else summarize
    attrs = {"message": message or "", "first_n": first, "summarize": count, "printed": [0]}
    return face(add_op(PRINT, name or "Print", xs, attrs, [xs[0]._data.spec]))


def _assert(xp: Any, condition: Any, data: Sequence[Any], summarize: int) -> Any:
    if not np.all(condition):
        shown = " ".join(f"[{_summary(np.asarray(d), summarize)}]" for d in data)
        raise errors.InvalidArgumentError(f"assertion failed: {shown}")
    return ()


ASSERT = graph_op("Assert", _assert, "condition data*", "summarize", several=True)


def Assert(
    condition: TensorLike, data: Sequence[TensorLike], summarize: int | None = None,
    name: str | None = None,
) -> Operation:  # fmt: skip
    """Return an op that raises in the run unless the condition holds. The error shows `data`.

    Make the ops that rely on the condition in `with tf.control_dependencies([tf.Assert(...)])`.

    Args:
        condition: A bool tensor. All of its elements must be true.
        data: Tensors that the error shows.
        summarize: The number of elements to show of each tensor, by default 3.
        name: The name of the op in the graph.

    Returns:
        The Operation.

    Raises:
        DTypeError: an input cannot become a tensor.
        InvalidArgumentError: in the run, the condition does not hold.

    Op type: `Assert`. Source: `tf.Assert`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     x = tf.constant(-1.0)
    ...     with tf.control_dependencies([tf.Assert(x > 0.0, [x])]):
    ...         root = tf.sqrt(x)
    ...     try:
    ...         sess.run(root)
    ...     except tf.errors.InvalidArgumentError as error:
    ...         print(error.message)
    assertion failed: [-1]
    """
    xs = [convert_to_tensor(v)._read() for v in (condition, *data)]
    add_op(ASSERT, name or "Assert", xs, {"summarize": summarize or 3}, [], NO_RULE)
    return operation(current_graph().own_nodes[-1])
