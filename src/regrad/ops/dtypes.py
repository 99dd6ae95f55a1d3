"""Dtypes and constants, and the Array API standard's functions that inspect dtypes."""

from __future__ import annotations

import builtins
import math
from typing import Any, NamedTuple

import numpy as np

from regrad.core import dispatch
from regrad.core.backends import DTypeLike
from regrad.core.promotion import promote
from regrad.core.signatures import public
from regrad.core.tensor import TensorLike
from regrad.errors import ArgumentError
from regrad.ops.creation import as_numpy_dtype

bool: np.dtype = np.dtype("bool")
int8: np.dtype
int16: np.dtype
int32: np.dtype
int64: np.dtype
int8, int16, int32, int64 = (np.dtype(f"int{n}") for n in (8, 16, 32, 64))
uint8: np.dtype
uint16: np.dtype
uint32: np.dtype
uint64: np.dtype
uint8, uint16, uint32, uint64 = (np.dtype(f"uint{n}") for n in (8, 16, 32, 64))
float16: np.dtype
float32: np.dtype
float64: np.dtype
float16, float32, float64 = (np.dtype(f"float{n}") for n in (16, 32, 64))
complex64: np.dtype = np.dtype("complex64")
complex128: np.dtype = np.dtype("complex128")

e: float = math.e
pi: float = math.pi
inf: float = math.inf
nan: float = math.nan
newaxis: None = None

_KINDS = {
    "bool": "b",
    "signed integer": "i",
    "unsigned integer": "u",
    "integral": "iu",
    "real floating": "fV",
    "complex floating": "c",
    "numeric": "iufcV",
}


class FloatLimits(NamedTuple):
    """The limits of a float dtype, as Python floats."""

    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: np.dtype


@public
def finfo(type: TensorLike | DTypeLike, /) -> FloatLimits:
    """Return the limits of a float dtype: `eps`, `max`, `min`, `smallest_normal`, `bits`, `dtype`.

    Args:
        type: A dtype or a Tensor. A complex dtype has the limits of its parts.

    Raises:
        InvalidValueError: `type` is not a float dtype.

    Source: the Array API standard.

    >>> import regrad as rg
    >>> rg.finfo(rg.float32).bits
    32
    """
    of = np.finfo(_dtype_of(type))
    eps, most, least, normal = map(float, (of.eps, of.max, of.min, of.smallest_normal))
    return FloatLimits(of.bits, eps, most, least, normal, np.dtype(of.dtype))


@public
def iinfo(type: TensorLike | DTypeLike, /) -> np.iinfo:
    """Return the limits of an integer dtype: `max`, `min`, `bits`, `dtype`.

    Args:
        type: A dtype or a Tensor.

    Raises:
        InvalidValueError: `type` is not an integer dtype.

    Source: the Array API standard.

    >>> import regrad as rg
    >>> rg.iinfo(rg.int8).max
    127
    """
    return np.iinfo(_dtype_of(type))


@public
def isdtype(dtype: DTypeLike, kind: DTypeLike | tuple[DTypeLike, ...]) -> builtins.bool:
    """Return whether a dtype is of a kind.

    Args:
        dtype: The dtype.
        kind: "bool", "signed integer", "unsigned integer", "integral", "real floating",
            "complex floating" or "numeric"; a dtype; or a tuple of these.

    Raises:
        ArgumentError: `kind` is not one of these.

    Source: the Array API standard.

    >>> import regrad as rg
    >>> rg.isdtype(rg.float32, "real floating")
    True
    """
    if isinstance(kind, tuple):
        return any(isdtype(dtype, k) for k in kind)
    if isinstance(kind, str):
        return as_numpy_dtype(dtype).kind in codes_of(kind, "isdtype")
    return as_numpy_dtype(dtype) == as_numpy_dtype(kind)


def codes_of(kind: Any, api: str) -> str:
    """Return NumPy's codes of the dtypes of a kind."""
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ArgumentError(f"{api}: kind {kind!r} is not one of {', '.join(_KINDS)}")
    return _KINDS[kind]


@public
def result_type(*arrays_and_dtypes: TensorLike | DTypeLike) -> np.dtype:
    """Return the dtype of an expression of Tensors, dtypes and Python numbers.

    Python numbers are weakly typed.

    Args:
        *arrays_and_dtypes: Tensors, arrays, dtypes and numbers.

    Raises:
        DTypeError: an argument is not a Tensor, an array, a dtype or a number.

    Source: the Array API standard.

    >>> import regrad as rg
    >>> rg.result_type(rg.float32, rg.float64)
    dtype('float64')
    """
    numbers: list[Any] = [x for x in arrays_and_dtypes if type(x) in dispatch.NUMBERS]
    dtypes = [_dtype_of(x) for x in arrays_and_dtypes if type(x) not in dispatch.NUMBERS]
    return dispatch.common(dtypes, numbers)


@public
def can_cast(from_: TensorLike | DTypeLike, to: DTypeLike, /) -> builtins.bool:
    """Return whether the standard's promotion rules allow a cast from one dtype to another.

    Args:
        from_: A dtype or a Tensor.
        to: A dtype.

    Raises:
        DTypeError: an argument is not a dtype.

    Source: the Array API standard.

    >>> import regrad as rg
    >>> rg.can_cast(rg.float32, rg.float64)
    True
    """
    to = as_numpy_dtype(to)
    return promote([_dtype_of(from_), to]) == to


def _dtype_of(x: Any) -> np.dtype:
    return x.dtype if hasattr(x, "dtype") and not isinstance(x, type) else as_numpy_dtype(x)
