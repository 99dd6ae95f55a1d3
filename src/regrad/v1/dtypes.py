"""TensorFlow's dtypes: NumPy's, with TensorFlow's names, questions and printing."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np

__all__ = [
    "DType", "as_dtype", "bool", "complex64", "complex128", "double", "float16", "float32",
    "float64", "half", "int8", "int16", "int32", "int64", "string", "uint8", "uint16", "uint32",
    "uint64",
]  # fmt: skip


class DType:
    """A dtype of TensorFlow 1, equal to NumPy's of the same name.

    Tensors of a Variable have a reference dtype (`float32_ref`); `base_dtype` is without it.

    >>> import numpy as np
    >>> import regrad.v1 as tf
    >>> tf.float32, tf.float32 == np.float32, tf.float32.is_floating
    (tf.float32, True, True)
    """

    __slots__ = ("_dtype", "_ref")

    def __init__(self, dtype: Any, ref: builtins.bool = False) -> None:
        self._dtype = np.dtype(dtype)
        self._ref = ref

    @property
    def name(self) -> str:
        """`float32`, `string`, `float32_ref`, …"""
        base = "string" if self._dtype.kind == "O" else self._dtype.name
        return base + "_ref" if self._ref else base

    @property
    def as_numpy_dtype(self) -> Any:
        """NumPy's scalar type."""
        return self._dtype.type

    @property
    def base_dtype(self) -> DType:
        """The dtype without `_ref`."""
        return of(self._dtype)

    @property
    def real_dtype(self) -> DType:
        """Of complex numbers the dtype of their parts."""
        return of(np.real(np.zeros((), self._dtype)).dtype)

    @property
    def is_floating(self) -> builtins.bool:
        """Whether it is a dtype of real floats."""
        return self._dtype.kind == "f"

    @property
    def is_integer(self) -> builtins.bool:
        """Whether it is a dtype of integers (bool is not)."""
        return self._dtype.kind in "iu"

    @property
    def is_unsigned(self) -> builtins.bool:
        """Whether it is a dtype of unsigned integers."""
        return self._dtype.kind == "u"

    @property
    def is_complex(self) -> builtins.bool:
        """Whether it is a dtype of complex numbers."""
        return self._dtype.kind == "c"

    @property
    def is_bool(self) -> builtins.bool:
        """Whether it is bool."""
        return self._dtype.kind == "b"

    @property
    def is_numpy_compatible(self) -> builtins.bool:
        """Always: the values are NumPy's."""
        return True

    @property
    def min(self) -> Any:
        """The smallest number."""
        return self._limits().min

    @property
    def max(self) -> Any:
        """The largest number."""
        return self._limits().max

    def _limits(self) -> Any:
        return np.finfo(self._dtype) if self.is_floating else np.iinfo(self._dtype)

    @property
    def size(self) -> int:
        """Bytes per element."""
        return self._dtype.itemsize

    def is_compatible_with(self, other: Any) -> builtins.bool:
        """Whether a tensor of `other` can stand where this one is due."""
        return self._dtype == as_dtype(other)._dtype

    def __eq__(self, other: object) -> builtins.bool:
        if other is None:
            return False
        try:
            other = as_dtype(other)
        except TypeError:
            return False
        return self._dtype == other._dtype and self._ref == other._ref

    def __hash__(self) -> int:
        return hash(self._dtype)

    def __repr__(self) -> str:
        return f"tf.{self.name}"

    def __str__(self) -> str:
        return f"<dtype: {self.name!r}>"

    def __reduce__(self) -> Any:
        return DType, (self._dtype, self._ref)


bool = DType(np.bool_)
int8, int16, int32, int64 = (DType(f"int{n}") for n in (8, 16, 32, 64))
uint8, uint16, uint32, uint64 = (DType(f"uint{n}") for n in (8, 16, 32, 64))
float16, float32, float64 = (DType(f"float{n}") for n in (16, 32, 64))
half, double = float16, float64
complex64, complex128 = DType("complex64"), DType("complex128")
string = DType(object)

_KNOWN = {
    d._dtype: d
    for d in (
        bool, int8, int16, int32, int64, uint8, uint16, uint32, uint64, float16, float32, float64,
        complex64, complex128, string,
    )
}  # fmt: skip


def of(dtype: np.dtype) -> DType:
    """TensorFlow's dtype for NumPy's."""
    return _KNOWN.get(dtype) or DType(dtype)


def as_dtype(value: Any) -> DType:
    """Anything that names a dtype as a DType: `tf.float32`, `np.float32`, `"float32"`, `float`.

    Raises TypeError for what names none.
    """
    if isinstance(value, DType):
        return value
    if value is str or value is bytes or value == "string":
        return string
    if value is float or (isinstance(value, str) and value == "float"):
        return float32
    if isinstance(value, str) and value == "int":
        raise TypeError("'int' is no dtype of TensorFlow; say 'int32' or 'int64'")
    try:
        dtype = np.dtype(value)
    except TypeError:
        raise TypeError(f"{value!r} is no dtype") from None
    return string if dtype.kind in "OSU" else of(dtype)


def to_numpy(value: Any) -> np.dtype:
    """NumPy's dtype for anything that names one."""
    return as_dtype(value)._dtype
