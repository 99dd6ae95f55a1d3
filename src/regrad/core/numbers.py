"""Python numbers, and lists of them, as arrays of a requested dtype."""

from __future__ import annotations

from typing import Any

import numpy as np

from regrad.core.tensor import Readable, Tensor
from regrad.errors import ArgumentError, DTypeError, NumberRangeError, RegradError, ShapeError

PLAIN = frozenset({bool, int, float, complex, list, tuple})


def is_tensor(value: object) -> bool:
    """Return whether a value is a Tensor, or a class of Tensor-like values."""
    return isinstance(value, Tensor | Readable)


HOLDS_TENSORS = (
    "a list that holds Tensors is not a list of numbers: join them with stack([a, b, ...]) or "
    "concat([a, b, ...]), which have a gradient"
)


def listed(values: Any, exact: bool = True) -> np.ndarray:
    """Return Python numbers as NumPy reads them: bools, integers, floats or complex numbers.

    Integers that only Python can hold become an array of objects. (NumPy converts them to floats
    if there are smaller ones too, as in `[2**63, 1]`. With `exact=False` they stay floats.)
    """
    if (
        isinstance(values, list | tuple)
        and not PLAIN.issuperset(map(type, values))
        and any(map(is_tensor, values))
    ):
        raise ArgumentError(HOLDS_TENSORS)
    try:
        array = np.array(values)
    except RegradError:  # from a Tensor in one of the rows, whose values cannot be read
        raise ArgumentError(HOLDS_TENSORS) from None
    except ValueError:
        raise ShapeError(
            "a list of unequal rows is not a Tensor. Pad them to one length, or keep a list of "
            "Tensors."
        ) from None
    if (exact or array.dtype.kind == "O") and (whole := integers(array, values)) is not None:
        return whole
    if array.dtype.kind not in "biufc":
        raise DTypeError(
            f"a Tensor holds numbers or bools, got the list {values!r:.80}. For a missing number "
            "use rg.nan."
        )
    return array


def integers(array: np.ndarray, values: Any) -> np.ndarray | None:
    """Return the values as Python integers if they are integers that NumPy has converted."""
    if array.dtype.kind not in "fO":
        return None
    if array.dtype.kind == "f" and not (np.abs(array) >= 2.0**63).any():
        return None
    exact = np.array(values, object)
    whole = array.size > 0 and all(isinstance(v, int | np.integer) for v in exact.flat)
    return exact if whole else None


def under(values: Any, dtype: np.dtype) -> np.ndarray:
    """Return Python numbers as an array of a dtype. Each number is converted on its own, directly.

    An integer dtype truncates fractions. A real dtype takes the real part. Raises NumberRangeError
    for numbers that the dtype cannot hold.
    """
    array = listed(values, exact=dtype.kind in "iu")
    if array.dtype.kind == "c" and dtype.kind != "c":
        array = np.real(array)
    if dtype.kind in "iu":
        check_range(array, dtype)
        return array.astype(dtype)
    try:
        return array.astype(dtype, copy=False)
    except OverflowError:
        raise out_of_range(values, dtype) from None


def check_range(array: np.ndarray, dtype: np.dtype) -> None:
    """Raise for numbers that an integer dtype cannot hold, also for infinities and NaN."""
    limits = np.iinfo(dtype)
    if array.dtype.kind in "biu" and np.can_cast(array.dtype, dtype):
        return
    fits = (array > limits.min - 1) & (array < limits.max + 1)
    if not np.all(fits):
        raise out_of_range(array[~fits.astype(bool)].flat[0], dtype)


def out_of_range(value: Any, dtype: np.dtype) -> NumberRangeError:
    """Return the error for a number that a dtype cannot hold."""
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return NumberRangeError(
            f"the number {value} does not fit the dtype {dtype}, which holds integers from "
            f"{limits.min} to {limits.max}. Use a wider dtype, or convert the other operand of the "
            "number with astype."
        )
    return NumberRangeError(
        f"the number {f'{value!s:.20}…'} is too large for {dtype}, as for every float"
    )
