"""TensorFlow's dtypes: NumPy dtypes with TensorFlow's names, predicates and printing."""

from __future__ import annotations

import builtins
from typing import Any, TypeAlias

import numpy as np

from regrad.errors import DTypeError

__all__ = [
    "DType", "as_dtype", "bool", "complex64", "complex128", "double", "float16", "float32",
    "float64", "half", "int8", "int16", "int32", "int64", "string", "uint8", "uint16", "uint32",
    "uint64",
]  # fmt: skip


def _of_kind(kinds: str, doc: str) -> property:
    """Make a property that is True for dtypes of these NumPy kinds."""
    return property(lambda dtype: dtype._dtype.kind in kinds, doc=doc)


class DType:
    """A dtype of TensorFlow 1. It equals the NumPy dtype of the same name.

    A Variable has a reference dtype (`float32_ref`). `base_dtype` drops the `_ref`.

    Args:
        dtype: Any value that `np.dtype` accepts.
        ref: Whether it is a reference dtype.

    Source: `tf.DType`.

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
        """The name, such as `float32`, `string` or `float32_ref`."""
        base = "string" if self._dtype.kind == "O" else self._dtype.name
        return base + "_ref" if self._ref else base

    @property
    def as_numpy_dtype(self) -> Any:
        """The NumPy scalar type."""
        return self._dtype.type

    @property
    def base_dtype(self) -> DType:
        """The dtype without `_ref`."""
        return of(self._dtype)

    @property
    def real_dtype(self) -> DType:
        """The dtype of the real and imaginary parts; the dtype itself if it is not complex."""
        return of(np.real(np.zeros((), self._dtype)).dtype)

    is_floating: property = _of_kind("f", "Whether it is a dtype of real floats.")
    is_integer: property = _of_kind("iu", "Whether it is a dtype of integers (bool is not).")
    is_unsigned: property = _of_kind("u", "Whether it is a dtype of unsigned integers.")
    is_complex: property = _of_kind("c", "Whether it is a dtype of complex numbers.")
    is_bool: property = _of_kind("b", "Whether it is bool.")
    is_numpy_compatible = True  # the values are NumPy's

    min: property = property(lambda self: self._limits().min, doc="The smallest number.")
    max: property = property(lambda self: self._limits().max, doc="The largest number.")

    def _limits(self) -> np.finfo | np.iinfo:
        return np.finfo(self._dtype) if self.is_floating else np.iinfo(self._dtype)

    @property
    def size(self) -> int:
        """Bytes per element."""
        return self._dtype.itemsize

    def is_compatible_with(self, other: DTypeLike) -> builtins.bool:
        """Return whether a tensor of `other` can be used where this dtype is expected."""
        return self._dtype == as_dtype(other)._dtype

    def __eq__(self, other: Any) -> builtins.bool:
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


# Values that `as_dtype` accepts, such as `tf.float32`, `np.dtype("float32")`, `np.float32`,
# `float` and `"float32"`.
DTypeLike: TypeAlias = DType | np.dtype | type | str

bool: DType = DType(np.bool_)
int8: DType = DType("int8")
int16: DType = DType("int16")
int32: DType = DType("int32")
int64: DType = DType("int64")
uint8: DType = DType("uint8")
uint16: DType = DType("uint16")
uint32: DType = DType("uint32")
uint64: DType = DType("uint64")
float16: DType = DType("float16")
float32: DType = DType("float32")
float64: DType = DType("float64")
half: DType = float16
double: DType = float64
complex64: DType = DType("complex64")
complex128: DType = DType("complex128")
string: DType = DType(object)

_KNOWN = {dtype._dtype: dtype for dtype in list(globals().values()) if isinstance(dtype, DType)}


def of(dtype: np.dtype) -> DType:
    """Return the TensorFlow dtype for a NumPy dtype."""
    return _KNOWN.get(dtype) or DType(dtype)


def as_dtype(value: DTypeLike) -> DType:
    """Return the DType for `tf.float32`, `np.float32`, `"float32"`, `float` and the like.

    Args:
        value: A DType, a NumPy dtype, a Python or NumPy type, or a name.

    Returns:
        The DType.

    Raises:
        DTypeError: the value does not name a dtype.

    Source: `tf.as_dtype`.

    >>> tf.as_dtype("int64"), tf.as_dtype(float)
    (tf.int64, tf.float32)
    """
    if isinstance(value, DType):
        return value
    if value is str or value is bytes or value == "string":
        return string
    if value is float or (isinstance(value, str) and value == "float"):
        return float32
    if value is None or (isinstance(value, str) and value == "int"):  # (NumPy takes them)
        raise DTypeError(f"{value!r} is not a dtype of TensorFlow, such as 'int32' or 'int64'")
    try:
        dtype = np.dtype(value)
    except TypeError:
        raise DTypeError(f"{value!r} is not a dtype") from None
    return string if dtype.kind in "OSU" else of(dtype)


def to_numpy(value: DTypeLike) -> np.dtype:
    """Return the NumPy dtype for any value that names a dtype."""
    return as_dtype(value)._dtype
