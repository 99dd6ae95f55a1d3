"""TensorFlow 1's static shapes."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from regrad.core.dims import Dim, UnknownRank
from regrad.errors import ArgumentError, ShapeError
from regrad.shapes.sizes import merge, unlike

__all__ = ["Dimension", "TensorShape"]


class Dimension(int):
    """A known size: an int with TensorFlow's attribute `value`.

    An unknown size is a `Dim`, or an `UnknownDimension`, whose `value` is None.

    Source: `tf.Dimension`.

    >>> import regrad.v1 as tf
    >>> size = tf.TensorShape([2, None])[0]
    >>> size, size.value, size * 3
    (Dimension(2), 2, 6)
    """

    @property
    def value(self) -> int:
        """The size."""
        return int(self)

    def __repr__(self) -> str:
        return f"Dimension({int(self)})"

    def __str__(self) -> str:
        return int.__repr__(self)


class TensorShape:
    """A static shape. Sizes may be unknown, and so may the rank.

    Args:
        sizes: Ints and Nones, another TensorShape, or None for an unknown rank.

    Raises:
        ShapeError: a size is negative.
        ArgumentError: a size is not an int.

    Source: `tf.TensorShape`.

    >>> import regrad.v1 as tf
    >>> tf.TensorShape([None, 3]), tf.TensorShape([None, 3]).as_list(), tf.TensorShape(None).ndims
    (TensorShape([Dimension(None), Dimension(3)]), [None, 3], None)
    """

    __slots__ = ("_sizes",)

    def __init__(self, sizes: ShapeLike) -> None:
        if isinstance(sizes, TensorShape | UnknownRank):
            sizes = sizes._sizes if isinstance(sizes, TensorShape) else None
        listed = [sizes] if isinstance(sizes, int | Dim) else sizes
        self._sizes: Any = None if listed is None else tuple([_size(n) for n in listed])

    @property
    def ndims(self) -> int | None:
        """The rank, None if it is unknown."""
        return None if self._sizes is None else len(self._sizes)

    rank = ndims

    @property
    def dims(self) -> list[Any] | None:
        """The sizes as Dimensions, None if the rank is unknown."""
        return None if self._sizes is None else [_dimension(n) for n in self._sizes]

    def _known(self) -> tuple[Any, ...]:
        """Return the sizes. Raises ValueError if the rank is unknown."""
        if self._sizes is None:
            raise ShapeError("the rank of the TensorShape is unknown: it has no list of sizes")
        return self._sizes

    def as_list(self) -> list[int | None]:
        """Return the sizes, None for unknown sizes. Raises ValueError if the rank is unknown."""
        return [n if isinstance(n, int) else None for n in self._known()]

    def is_fully_defined(self) -> bool:
        """Return whether the rank and all sizes are known."""
        return self._sizes is not None and None not in self.as_list()

    def num_elements(self) -> int | None:
        """Return the number of elements, None if it is not known."""
        return math.prod(self._known()) if self.is_fully_defined() else None

    def is_compatible_with(self, other: ShapeLike) -> bool:
        """Return whether a tensor can have both shapes."""
        a, b = self._sizes, TensorShape(other)._sizes
        return a is None or b is None or not unlike(a, b)

    def assert_is_compatible_with(self, other: ShapeLike) -> None:
        """Raise ValueError unless a tensor can have both shapes."""
        if not self.is_compatible_with(other):
            raise ShapeError(f"Shapes {self} and {TensorShape(other)} are incompatible")

    def merge_with(self, other: ShapeLike) -> TensorShape:
        """Return the shape that combines the known sizes. Raises ValueError if they differ."""
        other = TensorShape(other)
        self.assert_is_compatible_with(other)
        if self._sizes is None or other._sizes is None:
            return other if self._sizes is None else self
        return TensorShape(merge([self._sizes, other._sizes]))

    def concatenate(self, other: ShapeLike) -> TensorShape:
        """Return this shape followed by another."""
        other = TensorShape(other)
        if self._sizes is None or other._sizes is None:
            return TensorShape(None)
        return TensorShape(self._sizes + other._sizes)

    def with_rank(self, rank: int) -> TensorShape:
        """Return the shape with this rank. Raises ValueError if the shape has another rank."""
        return self.merge_with([None] * rank)

    def __iter__(self) -> Iterator[Any]:
        return map(_dimension, self._known())

    def __len__(self) -> int:
        return len(self._known())

    def __bool__(self) -> bool:
        return self._sizes is not None

    def __getitem__(self, key: Any) -> Any:
        if self._sizes is None:
            return TensorShape(None) if isinstance(key, slice) else UnknownDimension()
        found = self._sizes[key]
        return TensorShape(found) if isinstance(key, slice) else _dimension(found)

    __add__ = concatenate

    def __radd__(self, other: ShapeLike) -> TensorShape:
        return TensorShape(other).concatenate(self)

    def __eq__(self, other: Any) -> bool:
        try:
            return repr(self) == repr(TensorShape(other))
        except TypeError:
            return NotImplemented

    def __hash__(self) -> int:
        return hash(repr(self))

    def __str__(self) -> str:
        if self._sizes is None:
            return "<unknown>"
        sizes = ["?" if n is None else str(n) for n in self.as_list()]
        return f"({sizes[0]},)" if len(sizes) == 1 else f"({', '.join(sizes)})"

    def __repr__(self) -> str:
        sizes = None if self._sizes is None else [*map(_dimension, self.as_list())]
        return f"TensorShape({sizes})"


def _size(n: Size) -> Any:
    """Return a size as an int. None and sizes known only in the run are returned unchanged."""
    if n is None or isinstance(n, Dim | UnknownDimension):
        return n if isinstance(n, Dim) else None
    try:
        size = operator.index(n)
    except TypeError:
        raise ArgumentError(f"a shape is made of ints and None, got {n!r}") from None
    if size < 0:
        raise ShapeError(f"Dimension {size} must be >= 0; write None for a size that varies")
    return size


class UnknownDimension:
    """An unknown size: `Dimension(None)`."""

    value = None

    def __repr__(self) -> str:
        return "Dimension(None)"

    def __str__(self) -> str:
        return "?"


# A size, or None if it is unknown; and any value that TensorShape accepts as a shape.
Size: TypeAlias = int | Dim | UnknownDimension | None
ShapeLike: TypeAlias = TensorShape | Iterable[Size] | UnknownRank | int | Dim | None


def _dimension(size: int | Dim | None) -> Any:
    if isinstance(size, Dim):
        return size
    return UnknownDimension() if size is None else Dimension(size)
