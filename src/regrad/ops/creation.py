"""Constructors: the `tensor` family of TensorFlow.js, and the Array API standard's functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from regrad.core import backends, dims, dispatch, numbers, sharding
from regrad.core.backends import DTypeLike
from regrad.core.op import TensorLike, op
from regrad.core.promotion import complex_dtype, get_default_dtype
from regrad.core.registry import OPS, gradient
from regrad.core.shapes import Shape, as_count, as_ints, as_shape
from regrad.core.signatures import public
from regrad.core.tensor import OURS, Tensor, wrap
from regrad.errors import ArgumentError, DTypeError, InvalidValueError, ShapeError, kind

UNSIGNED = np.dtype(np.uint64)


@public
def as_numpy_dtype(dtype: DTypeLike | None) -> np.dtype:
    """Return the NumPy dtype for `rg.float32`, `"float32"`, `np.float32` or `torch.float32`.

    Python's `float` and `"float"` are float64; `complex` and `"complex"` are complex128. The
    default dtype does not apply to a dtype that the caller names.
    """
    if isinstance(dtype, np.dtype):
        backends.check_dtype(dtype)
        return dtype
    if dtype is None:  # NumPy would read None as float64
        raise DTypeError("expected a dtype such as regrad.float32 or 'float32', got None")
    try:
        found = np.dtype(dtype)  # pyright: ignore[reportArgumentType, reportCallIssue]
    except TypeError:
        found = backends.numpy_dtype(dtype)
    backends.check_dtype(found)
    return found


# -- TensorFlow.js ---------------------------------------------------------------------------


@public
def tensor(
    values: TensorLike, shape: Sequence[int] | None = None, dtype: DTypeLike | None = None
) -> Tensor:
    """Return a Tensor with a copy of the values.

    Args:
        values: A number, a (nested) list of numbers or bools, an array, or a Tensor.
        shape: The shape, if it differs from the shape of the values. The sizes must agree.
        dtype: The dtype. By default Python numbers become float32, bools stay bools, and arrays
            keep their dtype.

    Raises ShapeError if the values do not fit the shape.

    Source: `tf.tensor` of TensorFlow.js.

    >>> import regrad as rg
    >>> rg.tensor([1, 2, 3, 4], (2, 2)).print()
    Tensor
        [[1, 2],
         [3, 4]]
    """
    if isinstance(shape, str | np.dtype | type):
        raise ArgumentError(
            f"tensor: {shape!r} is not a shape. Pass a dtype by keyword, dtype={shape!r}"
        )
    t = _with_dtype(values, dtype)
    if shape is None:
        return t
    shape = as_ints(shape)
    if isinstance(values, list | tuple) and t.ndim > 1 and t.shape != shape:
        raise ShapeError(
            f"tensor: the nested values have the shape {t.shape}, but the shape argument is "
            f"{shape}. To reshape the values, use reshape(tensor(values), {shape})."
        )
    if math.prod(shape) != t.size:
        raise ShapeError(
            f"tensor: the shape {shape} holds {math.prod(shape)} values, got {t.size} values"
        )
    return OPS["Reshape"].function(t, shape)


def _with_dtype(values: TensorLike, dtype: DTypeLike | None) -> Tensor:
    """Return values under a dtype. Python numbers are converted directly, not through float32."""
    if dtype is None:
        return _own(dispatch.lift(values))
    dtype = as_numpy_dtype(dtype)
    if dispatch.is_plain(values):
        return wrap(numbers.under(values, dtype))
    return _own(convert(dispatch.lift(values), dtype))


def _own(t: Tensor) -> Tensor:
    """Return a new Tensor for the caller. A compiled function that closes over it must find it."""
    return wrap(t._data) if t._id == OURS else t


def convert(t: Tensor, dtype: np.dtype) -> Tensor:
    """Return t under a dtype; t itself if it already has the dtype."""
    if t.dtype == dtype:
        return t
    return OPS["Cast"].function(t, dtype=dtype)


@public
def scalar(value: TensorLike, dtype: DTypeLike | None = None) -> Tensor:
    """Return a Tensor of rank 0 from a number or bool.

    Args:
        value: A number, a bool, or an array or Tensor of rank 0.
        dtype: The dtype; the same default as `tensor`.

    Raises:
        ArgumentError: `value` is not a single number or bool.

    Source: `tf.scalar` of TensorFlow.js.

    >>> rg.scalar(3).print()
    Tensor
        3
    """
    if isinstance(value, list | tuple) or getattr(value, "shape", ()) != ():
        raise ArgumentError(f"scalar takes a single number or bool, got {kind(value)}")
    return tensor(value, dtype=dtype)


def _of_rank(
    values: TensorLike, shape: Sequence[int] | None, dtype: DTypeLike | None, rank: int
) -> Tensor:
    if shape is not None and len(shape) != rank:
        raise ShapeError(f"tensor{rank}d: the shape must have {rank} sizes, got {tuple(shape)}")
    t = tensor(values, shape, dtype)
    if t.ndim != rank:
        raise ShapeError(f"tensor{rank}d: expected values of rank {rank}, got the shape {t.shape}")
    return t


@public
def tensor1d(values: TensorLike, dtype: DTypeLike | None = None) -> Tensor:
    """Return a Tensor of rank 1; see `tensor`.

    Args:
        values: A list of numbers or bools, an array, or a Tensor.
        dtype: The dtype; the same default as `tensor`.

    Raises:
        ShapeError: the values do not have rank 1.

    Source: `tf.tensor1d` of TensorFlow.js.

    >>> rg.tensor1d([1, 2])
    Tensor([1., 2.], dtype=float32)
    """
    return _of_rank(values, None, dtype, 1)


@public
def tensor2d(
    values: TensorLike, shape: Sequence[int] | None = None, dtype: DTypeLike | None = None
) -> Tensor:
    """Return a Tensor of rank 2; see `tensor`.

    Args:
        values: A (nested) list of numbers or bools, an array, or a Tensor.
        shape: The two sizes, if they differ from the shape of the values.
        dtype: The dtype; the same default as `tensor`.

    Raises:
        ShapeError: the values do not have rank 2, or do not fit the shape.

    Source: `tf.tensor2d` of TensorFlow.js.

    >>> rg.tensor2d([1, 2, 3, 4], (2, 2)).shape
    (2, 2)
    """
    return _of_rank(values, shape, dtype, 2)


@public
def tensor3d(
    values: TensorLike, shape: Sequence[int] | None = None, dtype: DTypeLike | None = None
) -> Tensor:
    """Return a Tensor of rank 3; see `tensor`.

    Args:
        values: A (nested) list of numbers or bools, an array, or a Tensor.
        shape: The three sizes, if they differ from the shape of the values.
        dtype: The dtype; the same default as `tensor`.

    Raises:
        ShapeError: the values do not have rank 3, or do not fit the shape.

    Source: `tf.tensor3d` of TensorFlow.js.

    >>> rg.tensor3d([1, 2, 3, 4], (2, 2, 1)).shape
    (2, 2, 1)
    """
    return _of_rank(values, shape, dtype, 3)


@public
def tensor4d(
    values: TensorLike, shape: Sequence[int] | None = None, dtype: DTypeLike | None = None
) -> Tensor:
    """Return a Tensor of rank 4; see `tensor`.

    Args:
        values: A (nested) list of numbers or bools, an array, or a Tensor.
        shape: The four sizes, if they differ from the shape of the values.
        dtype: The dtype; the same default as `tensor`.

    Raises:
        ShapeError: the values do not have rank 4, or do not fit the shape.

    Source: `tf.tensor4d` of TensorFlow.js.

    >>> rg.tensor4d([1, 2, 3, 4], (1, 2, 2, 1)).shape
    (1, 2, 2, 1)
    """
    return _of_rank(values, shape, dtype, 4)


# -- the Array API standard --------------------------------------------------------------------


@public
def asarray(
    obj: TensorLike,
    /,
    *,
    dtype: DTypeLike | None = None,
    device: Any = None,
    copy: bool | None = None,
) -> Tensor:
    """Return a Tensor by the Array API standard's rules. Python ints become integers.

    Args:
        obj: A number, a (nested) list of numbers or bools, an array, or a Tensor.
        dtype: The dtype; by default the dtype of the values.
        device: The device of the result: "cpu" (NumPy data), a device of JAX or PyTorch, or None
            (the device of obj).
        copy: False shares the memory of an array instead of copying it; do not write to the
            array afterwards. None and True copy arrays.

    Raises:
        ArgumentError: the values are not numbers, or `copy` is False and a copy is needed.

    Source: the Array API standard.

    >>> import regrad as rg
    >>> rg.asarray([1, 2])
    Tensor([1, 2], dtype=int64)
    """
    plain = dtype is not None and dispatch.is_plain(obj)
    t = _with_dtype(obj, dtype) if plain else _take_over(obj, copy)
    if copy is False and device is not None and device != t.device:
        raise ArgumentError(f"asarray: copy=False, but {t.device} to {device} needs a copy")
    t = on_device(t, device)
    if dtype is None or t.dtype == as_numpy_dtype(dtype):
        return t
    if copy is False:
        raise ArgumentError(f"asarray: copy=False, but {t.dtype} to {dtype} needs a copy")
    return convert(t, as_numpy_dtype(dtype))


def _take_over(obj: TensorLike, copy: bool | None) -> Tensor:
    if dispatch.is_tensor(obj):
        return _own(dispatch.lift(obj))
    if backends.is_array(obj) and not isinstance(obj, np.generic):
        backend = backends.BACKENDS[type(obj)]
        if copy is not False:
            return wrap(backend.own(obj))
        backend.check(obj)
        return wrap(obj)
    if copy is False:
        raise ArgumentError(f"asarray: copy=False, but {kind(obj)} cannot be shared")
    if not dispatch.is_plain(obj):
        return dispatch.lift(obj)
    found = numbers.listed(obj)
    dtypes = {"f": get_default_dtype(), "c": complex_dtype(), "O": UNSIGNED}
    return wrap(numbers.under(obj, dtypes.get(found.dtype.kind, found.dtype)))


@public
def zeros(shape: Shape, *, dtype: DTypeLike | None = None, device: Any = None) -> Tensor:
    """Return a Tensor of zeros.

    Args:
        shape: The shape, an int or ints.
        dtype: The dtype of the result; the default dtype by default.
        device: The device of the result: "cpu" (NumPy data), or a device of JAX or PyTorch.

    Raises:
        ArgumentError: `shape` does not consist of ints.

    Source: the Array API standard.

    >>> import regrad as rg
    >>> rg.zeros((2, 2)).tolist()
    [[0.0, 0.0], [0.0, 0.0]]
    """
    return on_device(_filled("zeros", as_shape(shape), _default(dtype)), device)


@public
def ones(shape: Shape, *, dtype: DTypeLike | None = None, device: Any = None) -> Tensor:
    """Return a Tensor of ones.

    Args:
        shape: The shape, an int or ints.
        dtype: The dtype of the result; the default dtype by default.
        device: The device of the result: "cpu" (NumPy data), or a device of JAX or PyTorch.

    Raises:
        ArgumentError: `shape` does not consist of ints.

    Source: the Array API standard.

    >>> import regrad as rg
    >>> rg.ones((2, 2)).tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """
    return on_device(_filled("ones", as_shape(shape), _default(dtype)), device)


def _filled(function: str, shape: tuple[int, ...], dtype: np.dtype) -> Tensor:
    y = dispatch.made_in_trace(function, (shape,), dtype, math.prod(shape))
    return wrap(getattr(np, function)(shape, dtype)) if y is None else y


@public
def empty(shape: Shape, *, dtype: DTypeLike | None = None, device: Any = None) -> Tensor:
    """Return a Tensor of a shape. Its values are zeros, but programs should not rely on them.

    Args:
        shape: The shape, an int or ints.
        dtype: The dtype of the result; the default dtype by default.
        device: The device of the result: "cpu" (NumPy data), or a device of JAX or PyTorch.

    Raises:
        ArgumentError: `shape` does not consist of ints.

    Source: the Array API standard.

    >>> import regrad as rg
    >>> rg.empty((2, 3)).shape
    (2, 3)
    """
    return zeros(shape, dtype=dtype, device=device)


@public
def full(
    shape: Shape, fill_value: TensorLike, *, dtype: DTypeLike | None = None, device: Any = None
) -> Tensor:
    """Return a Tensor filled with one value.

    Args:
        shape: The shape, an int or ints.
        fill_value: The value: a number, or a Tensor or array that broadcasts to the shape.
        dtype: The dtype of the result; by default the dtype of `asarray(fill_value)`: int64 for
            an int and the default dtype for a float.
        device: The device of the result: "cpu" (NumPy data), or a device of JAX or PyTorch.

    Raises:
        ArgumentError: `shape` does not consist of ints, or `fill_value` is not a number.
        InvalidValueError: an array does not broadcast to the shape.

    Source: the Array API standard.

    >>> import regrad as rg
    >>> rg.full((2, 2), 7.0).tolist()
    [[7.0, 7.0], [7.0, 7.0]]
    """
    shape, value = as_shape(shape), asarray(fill_value, dtype=dtype)
    if dispatch.is_plain(fill_value) and dims.is_known(shape):
        return on_device(wrap(np.full(shape, value._data)), device)
    return on_device(OPS["BroadcastTo"].function(value, shape), device)


@public
def arange(
    start: float,
    /,
    stop: float | None = None,
    step: float = 1,
    *,
    dtype: DTypeLike | None = None,
    device: Any = None,
) -> Tensor:
    """Return evenly spaced values in `[start, stop)`.

    Args:
        start: The first value. With a single argument, the argument is `stop` and `start` is 0.
        stop: The end of the range, which is excluded.
        step: The distance between values, which may be negative.
        dtype: The dtype of the result; by default int64 if all arguments are ints, else the
            default dtype.
        device: The device of the result: "cpu" (NumPy data), or a device of JAX or PyTorch.

    Returns:
        A Tensor of rank 1.

    Raises:
        InvalidValueError: `step` is 0.

    Source: the Array API standard.

    >>> import regrad as rg
    >>> rg.arange(1, 7, 2)
    Tensor([1, 3, 5], dtype=int64)
    """
    return on_device(_arange(start, stop, step, dtype), device)


def _arange(start: float, stop: float | None, step: float, dtype: DTypeLike | None) -> Tensor:
    start, stop = (0, start) if stop is None else (start, stop)
    if isinstance(step, int | float) and step == 0:
        raise InvalidValueError("arange: step is 0, expected a number other than 0")
    if any(isinstance(v, dims.OPEN) for v in (start, stop, step)):
        kind = np.dtype(int) if dtype is None else as_numpy_dtype(dtype)
        count: Any = stop - start
        y = dispatch.made_in_trace("arange", (start, stop, step), kind, count)
        assert y is not None  # symbols of JAX occur only within a trace
        return y
    if all(isinstance(v, int | np.integer) for v in (start, stop, step)):
        values = range(int(start), int(stop), int(step))
        y = None
        if values and max(map(abs, (values[0], values[-1]))) < 2**31:  # JAX always holds these
            under = _count(values[:1], dtype).dtype  # (raises for values outside of the dtype)
            _count(values[-1:], dtype)
            args = values.start, values.stop, values.step
            y = dispatch.made_in_trace("arange", args, under, len(values))
        return wrap(_count(values, dtype)) if y is None else y
    return wrap(numbers.under(np.arange(start, stop, step), _default(dtype)))


def _count(values: range, dtype: DTypeLike | None) -> np.ndarray:
    """Return a range under a dtype, integers by default."""
    dtype = np.dtype(int) if dtype is None else as_numpy_dtype(dtype)
    if not values or numbers.listed([values.start, values.stop]).dtype == np.int64:
        return numbers.under(np.arange(values.start, values.stop, values.step), dtype)
    return numbers.under(list(values), dtype)


@public
def linspace(
    start: complex,
    stop: complex,
    /,
    num: int,
    *,
    dtype: DTypeLike | None = None,
    device: Any = None,
    endpoint: bool = True,
) -> Tensor:
    """Return evenly spaced values from `start` to `stop`.

    Args:
        start: The first value.
        stop: The last value, or with `endpoint=False` the excluded end.
        num: The number of values.
        dtype: The dtype of the result; the default dtype by default.
        device: The device of the result: "cpu" (NumPy data), or a device of JAX or PyTorch.
        endpoint: Whether `stop` is the last value.

    Returns:
        A Tensor of the shape `(num,)`.

    Raises:
        ArgumentError: `num` is not an int.
        InvalidValueError: `num` is negative, or above 2**48.

    Source: the Array API standard.

    >>> import regrad as rg
    >>> rg.linspace(0, 1, 3)
    Tensor([0. , 0.5, 1. ], dtype=float32)
    """
    y, num = None, as_count(num, "num")
    if all(type(v) in (int, float) for v in (start, stop)):
        args = start, stop, num, endpoint
        y = dispatch.made_in_trace("linspace", args, _default(dtype), num)
    if y is None:
        values = np.linspace(start, stop, num, endpoint=endpoint)
        if dtype is None and values.dtype.kind == "c":
            dtype = complex_dtype()
        y = wrap(numbers.under(values, _default(dtype)))
    return on_device(y, device)


@public
def eye(
    n_rows: int,
    n_cols: int | None = None,
    /,
    *,
    k: int = 0,
    dtype: DTypeLike | None = None,
    device: Any = None,
) -> Tensor:
    """Return a matrix with ones on a diagonal and zeros elsewhere.

    Args:
        n_rows: The number of rows.
        n_cols: The number of columns; by default `n_rows`.
        k: The diagonal: 0 for the main one, positive above it, negative below.
        dtype: The dtype of the result; the default dtype by default.
        device: The device of the result: "cpu" (NumPy data), or a device of JAX or PyTorch.

    Returns:
        A Tensor of the shape `(n_rows, n_cols)`.

    Raises:
        ArgumentError: a size is not an int.
        ShapeError: a size is negative, or the matrix would have more than 2**48 elements.

    Source: the Array API standard.

    >>> import regrad as rg
    >>> rg.eye(2).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    rows, columns = as_shape((n_rows, n_rows if n_cols is None else n_cols))
    y = dispatch.made_in_trace("eye", (rows, columns, k), _default(dtype), rows * columns)
    y = wrap(np.eye(rows, columns, k=k, dtype=_default(dtype))) if y is None else y
    return on_device(y, device)


def _default(dtype: DTypeLike | None) -> np.dtype:
    return get_default_dtype() if dtype is None else as_numpy_dtype(dtype)


@public
def from_dlpack(x: TensorLike, /, *, device: Any = None, copy: bool | None = None) -> Tensor:
    """Return a Tensor that shares the memory of an array with `__dlpack__`.

    Args:
        x: An array of any library that implements the protocol.
        device: The device of the result: "cpu" (NumPy data), or a device of JAX or PyTorch.
        copy: True copies the array; False raises where a copy is needed.

    Returns:
        A Tensor of x's shape and dtype.

    Raises:
        ArgumentError: `copy` is False and a copy is needed.

    Source: the Array API standard.

    >>> import numpy as np
    >>> import regrad as rg
    >>> rg.from_dlpack(np.array([1.0, 2.0]))
    Tensor([1., 2.], dtype=float64)
    """
    if isinstance(x, Tensor):
        return on_device(x, device)
    array = x if backends.is_array(x) else np.from_dlpack(x)
    t = asarray(array, copy=copy if copy else False)
    if copy is False and device is not None and device != t.device:
        raise ArgumentError(f"from_dlpack: copy=False, but {t.device} to {device} needs a copy")
    return on_device(t, device)


# -- devices -----------------------------------------------------------------------------------


@op("ToDevice")
def _to_device(xp, x: TensorLike, /, *, device: Any, source: Any) -> Tensor:
    return sharding.place(x, device)


gradient("ToDevice")(lambda dy, device, source: _to_device(dy, device=source, source=device))


def on_device(t: Tensor, device: Any) -> Tensor:
    """Return a Tensor on a device; the same Tensor if it lies there or `device` is None."""
    if device is None or device == t.device:
        return t
    device = sharding.resolve(device, t._data) if backends.is_array(t._data) else device
    return t if device == t.device else _to_device(t, device=device, source=t.device)
