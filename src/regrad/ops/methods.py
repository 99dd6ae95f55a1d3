"""The methods of Tensor and Variable: Python's operators, and TensorFlow.js's names."""

from __future__ import annotations

from typing import Any

from regrad import printing
from regrad.ops import array, elementwise, reduction


class Methods:
    """Operators and methods that call the ops; nothing is computed here."""

    __slots__ = ()

    # -- Python's operators ----------------------------------------------------------------

    __add__ = elementwise.add
    __sub__ = elementwise.subtract
    __mul__ = elementwise.multiply
    __truediv__ = elementwise.divide
    __floordiv__ = elementwise.floor_divide
    __mod__ = elementwise.remainder
    __pow__ = elementwise.pow
    __and__ = elementwise.bitwise_and
    __or__ = elementwise.bitwise_or
    __xor__ = elementwise.bitwise_xor
    __lshift__ = elementwise.bitwise_left_shift
    __rshift__ = elementwise.bitwise_right_shift
    __lt__ = elementwise.less
    __le__ = elementwise.less_equal
    __gt__ = elementwise.greater
    __ge__ = elementwise.greater_equal
    __eq__ = elementwise.equal
    __ne__ = elementwise.not_equal
    __neg__ = elementwise.negative
    __abs__ = elementwise.abs
    __invert__ = elementwise.bitwise_invert

    def __pos__(self) -> Any:
        return self

    def __radd__(self, other: Any) -> Any:
        return elementwise.add(other, self)

    def __rsub__(self, other: Any) -> Any:
        return elementwise.subtract(other, self)

    def __rmul__(self, other: Any) -> Any:
        return elementwise.multiply(other, self)

    def __rtruediv__(self, other: Any) -> Any:
        return elementwise.divide(other, self)

    def __rfloordiv__(self, other: Any) -> Any:
        return elementwise.floor_divide(other, self)

    def __rmod__(self, other: Any) -> Any:
        return elementwise.remainder(other, self)

    def __rpow__(self, other: Any) -> Any:
        return elementwise.pow(other, self)

    # -- as text ---------------------------------------------------------------------------

    def to_string(self, verbose: bool = False) -> str:
        """The values as TensorFlow.js prints them; `verbose` adds dtype, rank and shape."""
        return printing.to_string(self, verbose)

    def print(self, verbose: bool = False) -> None:
        """Print the values as TensorFlow.js does."""
        print(printing.to_string(self, verbose))

    __str__ = printing.to_string

    def __repr__(self) -> str:
        return printing.repr_of(self)

    # -- TensorFlow.js's methods: one tensor --------------------------------------------------

    abs = elementwise.abs
    square = elementwise.square
    sign = elementwise.sign
    exp = elementwise.exp
    log = elementwise.log
    sin = elementwise.sin
    mul = elementwise.multiply
    add = elementwise.add
    sub = elementwise.subtract
    div = elementwise.divide
    pow = elementwise.pow
    greater = elementwise.greater
    reshape = array.reshape

    def sum(self, axis: Any = None, keepdims: bool = False) -> Any:
        """The sum over `axis`; see `regrad.sum`."""
        return reduction.sum(self, axis=axis, keepdims=keepdims)
