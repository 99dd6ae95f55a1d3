"""Several gradients: `builtin(dy)` for an op of several inputs, and `dy` for several outputs."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any


class Gradients(tuple[Any, ...]):
    """Gradients of several inputs or outputs, in order. `3 * g`, `-g` and `g + h` apply to each.

    None stays None. It marks an input or output that has no gradient.
    """

    __array_ufunc__ = None  # (so that NumPy's arrays leave `k * g` to `__rmul__`)

    def __mul__(self, factor: Any) -> Any:
        return each(operator.mul, self, factor)

    def __rmul__(self, factor: Any) -> Any:
        return each(operator.mul, factor, self)

    def __truediv__(self, divisor: Any) -> Any:
        return each(operator.truediv, self, divisor)

    def __neg__(self) -> Any:
        return to_each(operator.neg, self)

    def __add__(self, other: Any) -> Any:
        return each(operator.add, self, _paired(other))

    def __radd__(self, other: Any) -> Any:
        return each(operator.add, _paired(other), self)

    def __sub__(self, other: Any) -> Any:
        return each(operator.sub, self, _paired(other))

    def __rsub__(self, other: Any) -> Any:
        return each(operator.sub, _paired(other), self)


def _paired(other: Any) -> Any:
    return Gradients(other) if isinstance(other, list | tuple) else other


def each(function: Callable[[Any, Any], Any], a: Any, b: Any) -> Gradients:
    """Apply a function to each of `Gradients`, with one shared operand or with its own one."""
    n = len(a if isinstance(a, Gradients) else b)
    rows = zip(*[x if isinstance(x, Gradients) else [x] * n for x in (a, b)], strict=True)
    return Gradients([None if x is None or y is None else function(x, y) for x, y in rows])


def to_each(function: Callable[[Any], Any], dx: Any) -> Any:
    """Apply a function to a gradient, or to each of `Gradients`. None stays None."""
    if isinstance(dx, Gradients):
        return Gradients([to_each(function, part) for part in dx])
    return None if dx is None else function(dx)
