"""Arithmetic of partially known sizes and shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any

from regrad.core import dims
from regrad.core.dims import Dim, UnknownRank
from regrad.errors import ShapeError

Size = int | Dim | None  # None is an unknown size
Shape = tuple[Size, ...] | None  # None is an unknown rank


class Clash(ShapeError):
    """Known sizes that do not fit together."""


def equal(m: Size, n: Size) -> bool:
    """Return whether two sizes are certainly equal."""
    if isinstance(m, Dim) or isinstance(n, Dim):
        return isinstance(m, Dim) and isinstance(n, Dim) and m.key == n.key
    return m is not None and m == n


def differ(m: Size, n: Size) -> bool:
    """Return whether two sizes are known and not equal."""
    return type(m) is int and type(n) is int and m != n


def unlike(a: Sequence[Size], b: Sequence[Size]) -> bool:
    """Return whether two shapes are certainly different."""
    return len(a) != len(b) or any(map(differ, a, b))


def smaller(m: Size, n: Size) -> Size:
    """Return the smaller size, or None if it is unknown which one is smaller."""
    if type(m) is int and type(n) is int:
        return min(m, n)
    return m if equal(m, n) else None


def merge(shapes: Iterable[Sequence[Size]]) -> tuple[Size, ...]:
    """Merge shapes that must be equal. A size is known if it is known in any shape."""
    first, *others = shapes
    for other in others:
        if unlike(first, other):
            raise Clash(f"the shapes {first} and {other} must be equal")
        first = [n if type(n) is int or m is None else m for m, n in pairs(first, other)]
    return tuple(first)


def broadcast(*shapes: Shape) -> Shape:
    """Return the shape to which these shapes broadcast, as far as it is known."""
    return reduce(_broadcast, shapes)


def _broadcast(a: Shape, b: Shape) -> Shape:
    if a is None or b is None or a is b:
        return None if b is None else a
    new = len(a) - len(b)
    if new < 0:
        a, b, new = b, a, -new
    return (*a[:new], *map(_wider, a[new:], b))


def _wider(m: Size, n: Size) -> Size:
    """Return the size to which two sizes broadcast.

    An unknown size next to a number above 1 is either 1 or that number.
    """
    if m is n:
        return m
    if type(m) is not int:
        m, n = n, m
    if type(m) is not int:
        return m if equal(m, n) else None
    if m == 1:
        return n
    if type(n) is int and n != 1 and m != n:
        raise Clash(f"the sizes {m} and {n} cannot be broadcast together")
    return m


def pairs(a: Sequence[Any], b: Sequence[Any]) -> Iterable[tuple[Any, Any]]:
    """Pair the entries of two sequences of the same length."""
    return zip(a, b, strict=True)


def shorten(shape: Sequence[Size], depth: int = 4) -> Shape:
    """Replace sizes with long expressions by None, to keep expressions short."""
    return tuple([None if _is_deep(n, depth) else n for n in shape])


def _is_deep(n: Size, depth: int) -> bool:
    return isinstance(n, Dim) and (not depth or any(_is_deep(a, depth - 1) for a in n.args))


def as_sizes(shape: Any) -> Shape:
    """Return a shape attribute as a Shape."""
    if isinstance(shape, UnknownRank):
        return None
    entries = shape if isinstance(shape, tuple | list) else (shape,)
    return dims.as_sizes(entries, "expected a shape of integers")


def listing(shapes: Iterable[Any]) -> str:
    """Format shapes for a message."""
    return " and ".join(map(str, shapes))


class StandIn:
    """A symbol in a trial. Each of its sizes (and elements) is the result of `number`."""

    def __init__(self, source: Any, number: Callable[[Any], int]) -> None:
        self.source = source
        self.number = number
        self.shape = self

    def __getitem__(self, place: int | None) -> int:
        return self.number((id(self.source), place))

    def __int__(self) -> int:
        return self[None]
