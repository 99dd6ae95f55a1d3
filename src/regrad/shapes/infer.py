"""Shapes and dtypes of what an op will return, while a graph is built.

For most op types a form knows: the modules of `regrad.shapes` fill a table of them. Elsewhere
the kernel itself is tried on small arrays, in which numbers stand for the sizes that are unknown.

For example, what does an op "Outer" without a form return for x of the unknown sizes (n, m)? Its
kernel runs on zeros and ones of three shapes:

    n, m = 5, 6    the result is (5, 6, 6)      sizes that rise
    n, m = 9, 8    the result is (9, 8, 8)      sizes that fall
    n, m = 1, 1    the result is (1, 1, 1)      1 is special: it broadcasts

The first size was what n was in all three trials, the others what m was, so the shape is (n, m, m):
as `Dim`s, which are known in the run and can be computed with until then. A size that was the same
number in all trials is that number. A size that fits nothing is None: unknown.

Invariants:

* An answer is never a guess that could be wrong. A size is a number or a Dim only if all trials
  agree on it, and if no other Dim was the same in all of them.
* A mistake that follows from what is known is an error now, with the message of eager mode. One
  that may come from the numbers of a trial is not: the run will tell.
* Trials are small and remembered: neither large arrays nor graphs of many equal ops make them slow.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import numpy as np

from regrad.core import dims
from regrad.core.backends import is_inexact
from regrad.core.dims import Dim, SizeSource, UnknownRank
from regrad.core.promotion import get_default_dtype
from regrad.core.registry import Op
from regrad.core.signatures import is_of_caller
from regrad.errors import (
    ArgumentError,
    IndexRangeError,
    NumberRangeError,
    RegradError,
    ShapeError,
    UnknownShapeError,
    refusal,
)
from regrad.shapes import arrays as arrays
from regrad.shapes import images as images
from regrad.shapes import matrices as matrices
from regrad.shapes.sizes import Clash, StandIn, broadcast
from regrad.shapes.table import Arguments, Attrs, Form, form_of, quiet
from regrad.shapes.table import Spec as Spec
from regrad.shapes.table import shape_of as shape_of

RANKS = (2, 1, 3, 4, 0, 5)  # in which an unknown rank is tried: the usual ones first
FEW = 3  # inputs of unknown rank, of which all combinations are tried
MISTAKES = (ShapeError, TypeError, IndexRangeError, NumberRangeError)  # DTypeErrors are TypeErrors
PLAIN = (int, float, complex, bool, str, type(None), np.dtype, type)
SMALL, LARGE = 5, 2**16  # a size in a trial; the elements of an array that is tried as it is
LARGE_SIZES = SizeSource()
COUNT = itertools.count()

Number = Callable[[Any], int]  # what stands for a size in a trial
Known = Sequence[tuple[Dim, list[int]]]  # a size, and what it was in each trial


def infer(op: Op, arguments: Arguments, attrs: Attrs) -> list[Spec]:
    """The specs of the results of an op.

    Args:
        op: The op.
        arguments: A Spec for each parameter of the op, promoted as for its kernel: a list of
            them for a sequence, None for an absent one. Sizes are ints and Dims; the shape is
            None if the rank is unknown.
        attrs: All attributes. They may hold Dims, and UnknownRanks for shapes.

    Returns one Spec for each result; a size or shape of which nothing is known is None. Raises
    what the op would raise, if that follows from what is known; UnknownShapeError if not even the
    number of results is known.
    """
    form = form_of(op)
    found = None
    if form is not None:
        try:
            found = _answer(op, form, arguments, attrs)
        except UnknownShapeError:  # it asked what only the run can tell
            found = None
        except Exception as error:
            # A form may stumble over an unknown rank, which says nothing about the call.
            if not _is_unranked(arguments, attrs):
                raise explain_trial(error, op, arguments, attrs) from error.__cause__
    return probe(op, arguments, attrs) if found is None else found


def _answer(op: Op, form: Form, arguments: Arguments, attrs: Attrs) -> list[Spec] | None:
    """Return the specs of the results by a form; None if it leaves the case to a trial."""
    answer = form.function(arguments, attrs)
    kind = type(answer)
    if kind is not tuple and answer is not None:  # (most forms return a tuple: they end here)
        if kind is Spec:
            return [answer]
        if kind is list and all(type(spec) is Spec for spec in answer):
            return answer
        if answer is NotImplemented:
            return None
        if kind is not UnknownRank:
            raise ArgumentError(
                f"the shape function of the op type {op.type!r} must return a tuple of sizes, a "
                f"Spec or a list of them, got {answer!r}"
            )
        answer = None
    dtype = form.dtype
    if dtype is None:
        first = arguments[0]
        dtype = (first[0] if isinstance(first, list) else first).dtype
    elif callable(dtype):
        dtype = dtype(op, arguments, attrs)
    return [Spec(answer, dtype)]


def explain_trial(error: Exception, op: Op, arguments: Arguments, attrs: Attrs) -> Exception:
    """Return an error that names the op and its inputs, as eager mode does."""
    specs = list(_leaves(arguments))
    inputs = " and ".join(f"{x.dtype} {'<unknown>' if x.shape is None else x.shape}" for x in specs)
    if op.broadcasts and (type(error) is Clash or (type(error) is ValueError and _clash(specs))):
        return ShapeError(
            f"{op.type}: operands could not be broadcast together, regrad.{op.name} got {inputs}. "
            "From the last axis on, sizes have to be equal, or one of them 1."
        )
    if is_of_caller(error) or isinstance(error, RegradError):
        error.add_note(f"in the op type {op.type!r} (regrad.{op.name}) of {inputs}")
        return error
    return refusal(error, f"{op.type}: regrad.{op.name} of {inputs}", attrs)


def _clash(specs: Sequence[Spec]) -> bool:
    try:
        broadcast(*[x.shape for x in specs])
    except Clash:
        return True
    return False


def _leaves(arguments: Arguments) -> Iterator[Spec]:
    for x in arguments:
        if type(x) is Spec:
            yield x
        elif x is not None:
            yield from x


# -- trying the kernel -----------------------------------------------------------------------------


def probe(op: Op, arguments: Arguments, attrs: Attrs) -> list[Spec]:
    """Return the specs of the kernel's results for small arrays (see `infer`)."""
    if op.stateful:  # a trial would read or write a variable
        return _guess(op, arguments)
    if _is_unranked(arguments, attrs):
        return _of_some_rank(op, arguments, attrs)
    small = _small(arguments)
    known = not _dims_of([*_leaves(small), *attrs.values()])
    try:
        return _try(op, small, attrs) if known else _compare(op, small, attrs)
    except UnknownShapeError:
        raise
    except Exception as error:
        found = explain_trial(error, op, arguments, attrs)
        # With all sizes known, an error about shapes or types is the user's. A ValueError may come
        # of the values of the trial (a matrix that is singular), so it is left to the run.
        if known and (isinstance(error, MISTAKES) or isinstance(found, ShapeError)):
            raise found from error.__cause__
        return _guess(op, arguments)


def _guess(op: Op, arguments: Arguments) -> list[Spec]:
    """Return an unknown shape, and the dtype that nearly all kernels keep."""
    if op.several:
        raise UnknownShapeError(
            f"{op.type}: how many results there are, and of which shapes, cannot be told before "
            "the run. Say so in a function of your own, under @shape_of."
        )
    dtypes = [x.dtype for x in _leaves(arguments)]
    other = dtypes[0] if dtypes else get_default_dtype()
    return [Spec(None, next(filter(is_inexact, dtypes), other))]


def _try(op: Op, arguments: Arguments, attrs: Attrs) -> list[Spec]:
    """Return the specs of the results where all sizes are known; remembered, if that can be."""
    specs = tuple([tuple(x) if isinstance(x, list) else x for x in arguments])
    # with the type of each value: 1, 1.0 and True would be one key of the cache
    items = tuple([(name, type(value), value) for name, value in attrs.items()])
    try_ = _trial if _is_plain(tuple(attrs.values())) else _trial.__wrapped__
    return list(try_(op, specs, items))


def _is_plain(value: object) -> bool:
    """Return whether a value may be kept: it is compared by what it is, and holds nothing alive."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN)


@lru_cache(maxsize=4096)
def _trial(op: Op, specs: tuple[Any, ...], items: tuple[Any, ...]) -> tuple[Spec, ...]:
    """Return the specs of the results for arrays of these specs; `items` are the attributes."""
    arrays = [_each(x, _array) for x in specs]
    with quiet():
        results = op.kernels[np.ndarray](*arrays, **{name: value for name, _, value in items})
    several = results if isinstance(results, tuple | list) else (results,)
    return tuple([Spec(tuple(y.shape), y.dtype) for y in several])


def _array(x: Spec) -> np.ndarray:
    """Zeros for what may be an index; else ones, with a diagonal that makes matrices regular."""
    shape: Any = x.shape
    if x.dtype.kind in "iu":
        return np.zeros(shape, x.dtype)
    y = np.ones(shape, x.dtype)
    if y.ndim > 1 and x.dtype.kind in "fc":
        i = np.arange(min(shape[-2:]))
        y[..., i, i] = 2
    return y


def _each(x: Any, change: Callable[[Spec], Any]) -> Any:
    """Return a parameter's specs, changed."""
    if x is None or type(x) is Spec:
        return x and change(x)
    return [change(spec) for spec in x]


def _small(arguments: Arguments) -> Arguments:
    """Return the same with Dims for the large sizes of large arrays, so that a trial is quick."""
    large = {n for x in _leaves(arguments) if _elements(x) > LARGE for n in _numbers(x)}
    # by number, wherever it occurs: equal sizes (of matrices to be multiplied) stay equal
    large.difference_update(range(SMALL + 1))
    if not large:
        return arguments

    stand_ins = {n: _large(n) for n in large}

    def change(x: Spec) -> Spec:
        sizes = [stand_ins.get(n, n) if isinstance(n, int) else n for n in x.shape or ()]
        return Spec(tuple(sizes), x.dtype)

    return [_each(x, change) for x in arguments]


def _large(n: int) -> Dim:
    return Dim(lambda numbers: numbers[n], (LARGE_SIZES,), ("number", n))


def _numbers(x: Spec) -> list[int]:
    """Return the sizes that are known."""
    return [n for n in x.shape or () if isinstance(n, int)]


def _elements(x: Spec) -> int:
    return math.prod(_numbers(x))


# -- sizes that are unknown ------------------------------------------------------------------------


def _dims_of(value: Any) -> list[Dim]:
    """Return the Dims in the shapes of specs and in attributes."""
    return [part for part in dims.parts(value) if isinstance(part, Dim)]


def _compare(op: Op, arguments: Arguments, attrs: Attrs) -> list[Spec]:
    """Return the specs that trials with other numbers for the unknown sizes have in common.

    The numbers rise from size to size in one trial and fall in the other, so that no size can
    be mistaken for one computed from another. Where that fails, some sizes may have to be equal;
    but a trial in which all are tells the rank and no more.
    """
    places: dict[Any, int] = {}

    def rising(place: Any) -> int:
        return SMALL + places.setdefault(place, len(places))

    def falling(place: Any) -> int:
        return SMALL + 2 * len(places) - places[place]

    try:
        return _common(op, arguments, attrs, rising, falling)
    except UnknownShapeError:
        raise
    except Exception:
        alike = _common(op, arguments, attrs, lambda place: SMALL)
        return [Spec(x.shape and (None,) * len(x.shape), x.dtype) for x in alike]


def _common(op: Op, arguments: Arguments, attrs: Attrs, *numbers: Number) -> list[Spec]:
    """Return the specs that trials with different sizes, and with sizes of 1, have in common."""
    # sizes of the result can only be sizes that the op was given, not what it computed of them
    candidates = {n.key: n for n in _dims_of([*_leaves(arguments), *attrs.values()])}
    trials = [_try_filled(op, arguments, attrs, number) for number in numbers]
    stood = [[_fill(n, number) for number in (*numbers, _one)] for n in candidates.values()]
    with suppress(Exception):  # 1 is special: it broadcasts, and can be left out
        trials.append(_try_filled(op, arguments, attrs, _one))
    if len(set(map(len, trials))) > 1:
        raise UnknownShapeError(
            f"{op.type}: how many results there are depends on a size that only the run can tell"
        )
    known = list(zip(candidates.values(), stood, strict=True))
    return [
        Spec(_common_shape([x.shape for x in results], known), results[0].dtype)
        for results in zip(*trials, strict=True)
    ]


def _one(place: Any) -> int:
    return 1 if place[0] != id(LARGE_SIZES) else SMALL


def _try_filled(op: Op, arguments: Arguments, attrs: Attrs, number: Number) -> list[Spec]:
    specs = [_each(x, partial(_fill_spec, number=number)) for x in arguments]
    return _try(op, specs, {name: _fill(value, number) for name, value in attrs.items()})


def _common_shape(shapes: Sequence[Any], known: Known) -> Any:
    """Return the shape of which the trials returned these examples."""
    if len(set(map(len, shapes))) > 1:
        return None
    return tuple([_common_size(sizes, known) for sizes in zip(*shapes, strict=True)])


def _common_size(sizes: Sequence[int], known: Known) -> Any:
    """Return the number that a size always was, or the only Dim that always was the same."""
    if len(set(sizes)) == 1:
        return sizes[0]
    found = [size for size, stood in known if stood[: len(sizes)] == list(sizes)]
    if len(found) != 1:
        return None
    return found[0].key[1] if found[0].args[0] is LARGE_SIZES else found[0]


def _fill(value: Any, number: Number) -> Any:
    if not _dims_of(value):
        return value
    return dims.resolved(value, lambda source: StandIn(source, number))


def _fill_spec(x: Spec, number: Number) -> Spec:
    return Spec(_fill(x.shape, number), x.dtype)


# -- ranks that are unknown ------------------------------------------------------------------------


def _is_unranked(arguments: Arguments, attrs: Attrs) -> bool:
    unranked = [part for part in dims.parts([*attrs.values()]) if isinstance(part, UnknownRank)]
    return bool(unranked) or any(x.shape is None for x in _leaves(arguments))


def _of_some_rank(op: Op, arguments: Arguments, attrs: Attrs) -> list[Spec]:
    """Return the dtypes of the results, from the first rank that the op accepts."""
    asked = None  # the error of a rank that the op accepts, but of which it asks too much
    for first, *rest in _ranks(sum(x.shape is None for x in _leaves(arguments))):
        ranks = iter((first, *rest))
        specs = [_each(x, partial(_give_rank, ranks=ranks)) for x in arguments]
        shaped = partial(_shaped, rank=first)
        try:
            found = _at_rank(op, specs, {k: dims.mapped(v, shaped) for k, v in attrs.items()})
        except UnknownShapeError as error:
            asked = error
        except Exception:  # the op is not for this rank
            continue
        else:
            return [Spec(None, x.dtype) for x in found]
    if asked is not None:
        raise asked
    return _guess(op, arguments)


def _at_rank(op: Op, arguments: Arguments, attrs: Attrs) -> list[Spec]:
    form, found = form_of(op), None
    if form is not None:
        with suppress(UnknownShapeError):  # as in `infer`
            found = _answer(op, form, arguments, attrs)
    return _compare(op, arguments, attrs) if found is None else found


def _ranks(count: int) -> Iterator[tuple[int, ...]]:
    """Yield ranks for so many shapes: the same for all; then, of a few, all combinations."""
    yield from [(rank,) * max(count, 1) for rank in RANKS]
    if count <= FEW:
        yield from (r for r in itertools.product(RANKS, repeat=count) if len(set(r)) > 1)


def _give_rank(x: Spec, ranks: Iterator[int]) -> Spec:
    return Spec(_some_shape(next(ranks)), x.dtype) if x.shape is None else x


def _shaped(part: Dim | UnknownRank, rank: int) -> Any:
    """Return some shape of this rank for one that is unknown."""
    return _some_shape(rank) if isinstance(part, UnknownRank) else part


def _some_shape(rank: int) -> tuple[Dim, ...]:
    source = SizeSource(next(COUNT))
    return tuple([dims.size_of(source, axis) for axis in range(rank)])
