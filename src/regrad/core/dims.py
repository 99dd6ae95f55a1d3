"""Sizes that are known only when a graph runs, and the shapes made of them.

A `Dim` is arithmetic over unknown sizes. A program can pass it on (to `reshape`, to an attribute of
an op) and compute with it, and it is equal to itself. Only the run can decide other comparisons
(is it 1? is it larger than 3?): a `Dim` raises UnknownShapeError for these, and never guesses.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

from regrad.core.backends import Array
from regrad.errors import ArgumentError, RegradError, UnknownShapeError, brief


class ErrorTerms(NamedTuple):
    """Expressions that error messages recommend to the author of a graph."""

    size: str = "the shape as a tensor"
    choice: str = "cond or where"
    constant: str = "constants"


class SizeSource:
    """The source of a size: a symbol of a graph, or a placeholder during shape inference."""

    __slots__ = ("id",)

    id: int
    words: ErrorTerms = ErrorTerms()

    def __init__(self, id: int = 0) -> None:
        self.id = id


@lru_cache(maxsize=1 << 16)
def _numbered(key: tuple[object, ...]) -> int:
    """Return one number for each key. (A key that was evicted safely gets a new number.)"""
    return next(_numbers)


_numbers = itertools.count()


def _operator(compute: Callable[..., Any], sign: str) -> Callable[..., Any]:
    """Return the method of an operator of Dims."""
    return lambda self, other: _arithmetic(compute, sign, self, other)


def _exchanged(compute: Callable[..., Any], sign: str) -> Callable[..., Any]:
    """Return the method of an operator whose second operand is a Dim."""
    return lambda self, other: _arithmetic(compute, sign, other, self)


class Dim:
    """A size that is known only when the graph runs: a leaf, or arithmetic on other sizes."""

    __slots__ = ("args", "compute", "key")

    def __init__(
        self, compute: Callable[..., int], args: tuple[Any, ...], key: tuple[object, ...]
    ) -> None:
        self.compute: Callable[..., Any] = compute
        self.args: tuple[Any, ...] = args  # Dims, ints, and (in a leaf) the symbol
        # Two Dims with one key are equal in every run. The key of arithmetic is its kind and a
        # number, so that keys do not grow with the expression.
        made = any(isinstance(arg, Dim) for arg in args)
        self.key: tuple[Any, ...] = (key[0], _numbered(key)) if made else key

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Dim) and self.key == other.key:
            return True
        if isinstance(other, Dim | int):
            self._ask(f"whether it is {other}")
        return False

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.key)

    def _ask(self, what: str = "its value") -> NoReturn:
        words = next(_leaves_of(self)).words
        raise UnknownShapeError(
            f"{what} is known only when the graph runs: {self}. Use {words.size} for "
            "computations, or give the placeholder a shape."
        )

    __bool__: Callable[..., Any] = _ask
    __int__: Callable[..., Any] = _ask
    __index__: Callable[..., Any] = _ask
    __float__: Callable[..., Any] = _ask

    def _compare(self, other: object) -> Any:
        self._ask(f"how it compares to {other}")

    __lt__: Callable[..., Any] = _compare
    __le__: Callable[..., Any] = _compare
    __gt__: Callable[..., Any] = _compare
    __ge__: Callable[..., Any] = _compare

    __add__: Callable[..., Any] = _operator(operator.add, "+")
    __radd__: Callable[..., Any] = _exchanged(operator.add, "+")
    __sub__: Callable[..., Any] = _operator(operator.sub, "-")
    __rsub__: Callable[..., Any] = _exchanged(operator.sub, "-")
    __mul__: Callable[..., Any] = _operator(operator.mul, "*")
    __rmul__: Callable[..., Any] = _exchanged(operator.mul, "*")
    __floordiv__: Callable[..., Any] = _operator(operator.floordiv, "//")
    __rfloordiv__: Callable[..., Any] = _exchanged(operator.floordiv, "//")
    __truediv__: Callable[..., Any] = _operator(operator.truediv, "/")
    __rtruediv__: Callable[..., Any] = _exchanged(operator.truediv, "/")
    __mod__: Callable[..., Any] = _operator(operator.mod, "%")

    def __neg__(self) -> Any:
        return 0 - self

    @property
    def value(self) -> None:
        """None, because the size is not known yet."""
        return None

    def __repr__(self) -> str:
        return "?"


OPEN: tuple[type, ...] = (Dim,)  # the types of sizes that are not numbers yet


def add_open(kind: type) -> None:
    """Accept another library's symbolic sizes wherever a Dim is valid, as for jax.export."""
    global OPEN
    if kind not in OPEN:
        OPEN = (*OPEN, kind)


SIGNS = ("+", "-", "*", "//", "%")
NEUTRAL = {("+", 0), ("-", 0), ("*", 1), ("//", 1)}


def _arithmetic(
    compute: Callable[[int, int], int], sign: str, a: Dim | float, b: Dim | float
) -> Any:
    """Return `a sign b`. Neutral elements are dropped, so that equal sizes stay recognizable."""
    if sign == "/" or not isinstance(a, Dim | int) or not isinstance(b, Dim | int):
        return _fraction(sign, a, b)
    if isinstance(b, int) and (sign, b) in NEUTRAL:
        return a
    if isinstance(a, int) and sign in "+*" and (sign, a) in NEUTRAL:
        return b
    if sign == "-" and isinstance(b, int):
        return a + -b
    if sign == "+" and isinstance(a, Dim) and isinstance(b, int) and a.key[0] == "+":
        first, second = a.args
        if isinstance(second, int):  # (n + 2) - 2 is n
            return first + (second + b)
    if sign == "*" and any(isinstance(n, int) and n == 0 for n in (a, b)):
        return 0
    return Dim(compute, (a, b), (sign, _key(a), _key(b)))


def _fraction(sign: str, a: Dim | float, b: Dim | float) -> Any:
    """Raise for numbers, because sizes have no fractions; return NotImplemented for other types."""
    if isinstance(a, Dim | int | float) and isinstance(b, Dim | int | float):
        raise UnknownShapeError(f"a fraction of a size known only in the run: {a} {sign} {b}")
    return NotImplemented


def _key(x: Dim | int | None) -> Any:
    return x.key if isinstance(x, Dim) else x


class UnknownRank:
    """The shape of a symbol whose rank is unknown, too."""

    __slots__ = ("source",)

    def __init__(self, source: SizeSource) -> None:
        self.source: SizeSource = source

    def _ask(self, *others: object) -> Any:
        raise UnknownShapeError(
            f"the rank of {self.source} is known only when the graph runs. Give the placeholder a "
            "shape (None for the sizes that vary), or call set_shape."
        )

    __iter__: Callable[..., Any] = _ask
    __len__: Callable[..., Any] = _ask
    __getitem__: Callable[..., Any] = _ask
    __contains__: Callable[..., Any] = _ask
    __bool__: Callable[..., Any] = _ask
    __add__: Callable[..., Any] = _ask
    __radd__: Callable[..., Any] = _ask

    def __eq__(self, other: object) -> bool:
        if isinstance(other, UnknownRank):
            if self.source is other.source:
                return True
            self._ask()
        return NotImplemented

    def __hash__(self) -> int:
        return hash(id(self.source))

    def __repr__(self) -> str:
        return "<unknown>"


Shape = tuple[Any, ...] | UnknownRank  # of ints and Dims


def size_of(source: SizeSource, axis: int) -> Dim:
    """Return the size of an axis of a symbol."""
    return Dim(lambda array: array.shape[axis], (source,), ("size", source.id, axis))


def entry_of(source: SizeSource, place: int | None) -> Dim:
    """Return an element of an integer symbol of rank 1, or of rank 0 if `place` is None."""

    def compute(array: Array) -> int:
        return int(array if place is None else array[place])

    return Dim(compute, (source,), ("entry", source.id, place))


def same(a: Shape, b: Shape) -> bool | None:
    """Return whether two shapes are equal; None if only the run can decide."""
    if isinstance(a, UnknownRank) or isinstance(b, UnknownRank):
        return True if a is b or (type(a) is type(b) and a.source is b.source) else None  # pyright: ignore
    if len(a) != len(b):
        return False
    answer: bool | None = True
    for m, n in zip(a, b, strict=True):
        if isinstance(m, Dim) or isinstance(n, Dim):
            if _key(m) != _key(n):
                answer = None
        elif m != n:
            return False
    return answer


def differ(a: Any, b: Any) -> bool:
    """Return whether two sizes (or shapes) are certainly different.

    Args:
        a, b: Sizes or shapes; sizes of a graph may be unknown until it runs.

    Raises:
        TypeError: an argument is neither a size nor a shape.

    >>> from regrad.extend import differ
    >>> differ(2, 3), differ((2, 3), (2, 3))
    (True, False)
    """
    if type(a) is int is type(b):
        return a != b
    pair = (a, b) if isinstance(a, tuple | UnknownRank) else ((a,), (b,))
    return same(*pair) is False


def at_least(size: Dim | int, low: int) -> Any:
    """Return the maximum of a size and a number."""
    if isinstance(size, Dim):
        return Dim(max, (size, low), ("max", size.key, low))
    return max(size, low)


def merged(a: Shape, b: Shape) -> tuple[Any, ...] | None:
    """Return the shape that follows from two shapes of one tensor; None if the rank is unknown."""
    if isinstance(a, UnknownRank) or isinstance(b, UnknownRank):
        known = b if isinstance(a, UnknownRank) else a
        return None if isinstance(known, UnknownRank) else known
    return tuple(m if isinstance(m, int) else n for m, n in zip(a, b, strict=True))


def is_known(shape: Shape) -> bool:
    """Return whether the rank and all sizes are known numbers."""
    return not isinstance(shape, UnknownRank) and not any(isinstance(n, OPEN) for n in shape)


# -- in attributes -------------------------------------------------------------------------------


def leaves(value: Any) -> Iterator[Any]:
    """Yield the symbols on which an attribute depends."""
    for part in parts(value):
        if isinstance(part, Dim):
            yield from _leaves_of(part)
        else:
            yield part.source


def parts(value: Any) -> Iterator[Dim | UnknownRank]:
    """Yield the sizes and shapes in an attribute that are known only in the run."""
    if isinstance(value, Dim | UnknownRank):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from parts(item)
    elif isinstance(value, slice):
        yield from parts((value.start, value.stop, value.step))


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return an attribute with each of its `parts` replaced."""
    if isinstance(value, Dim | UnknownRank):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)([mapped(item, change) for item in value])
    if isinstance(value, slice):
        return slice(*[mapped(part, change) for part in (value.start, value.stop, value.step)])
    return value


def _leaves_of(dim: Dim) -> Iterator[SizeSource]:
    seen: set[int] = set()
    stack: list[Any] = [dim]
    while stack:
        here = stack.pop()
        if isinstance(here, Dim):
            if id(here) not in seen:
                seen.add(id(here))
                stack += reversed(here.args)
        elif not isinstance(here, int):
            yield here


def _computed(dim: Dim, arrays: Callable[[SizeSource], Array]) -> int:
    """Return the size in a run. Each part of the arithmetic is computed once."""
    known: dict[int, int] = {}
    stack = [dim]
    while stack:
        here = stack[-1]
        missing = [a for a in here.args if isinstance(a, Dim) and id(a) not in known]
        if missing:
            stack += missing
            continue
        stack.pop()
        known[id(here)] = here.compute(
            *[known[id(a)] if isinstance(a, Dim) else _given(a, arrays) for a in here.args]
        )
    return known[id(dim)]


def _given(arg: SizeSource | int, arrays: Callable[[SizeSource], Array]) -> Any:
    return arg if isinstance(arg, int) else arrays(arg)


def resolved(value: Any, arrays: Callable[[SizeSource], Array]) -> Any:
    """Return an attribute in which each Dim and unknown shape has its value in this run."""

    def in_run(part: Dim | UnknownRank) -> Any:
        known = isinstance(part, Dim)
        return _computed(part, arrays) if known else tuple(arrays(part.source).shape)

    return mapped(value, in_run)


def moved(value: Any, to: Callable[[Any], Any]) -> Any:
    """Return an attribute with the same arithmetic on other symbols."""

    def there(part: Dim | UnknownRank) -> Any:
        if isinstance(part, UnknownRank):
            return to(part.source).shape
        if any(isinstance(a, Dim) for a in part.args):
            args = mapped(part.args, there)
            sign = part.key[0]
            plain = (sign,) if sign in SIGNS else part.key  # (other keys hold further parts)
            return Dim(part.compute, args, (*plain, *map(_key, args)))
        source = to(part.args[0])
        return Dim(part.compute, (source,), (part.key[0], source.id, *part.key[2:]))

    return mapped(value, there)


def sources(values: Iterable[Any]) -> list[Any]:
    """Return the symbols on which attributes depend, each once, in order."""
    return list({id(s): s for value in values for s in leaves(value)}.values())


KINDS = frozenset({int, Dim, type(None)})  # the types of sizes in an inferred shape


def as_sizes(shape: Iterable[Dim | int | None], what: str) -> tuple[Any, ...]:
    """Return sizes as Python ints; Dim and None stay. `what` begins the error message."""
    try:
        return tuple([n if isinstance(n, Dim | None) else operator.index(n) for n in shape])
    except RegradError:
        raise
    except Exception:  # usually a TypeError, but a class of the caller's may raise anything
        raise ArgumentError(f"{what}, got {brief(shape)}") from None
