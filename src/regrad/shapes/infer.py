"""Shapes and dtypes of an op's results, while a graph is built.

Most op types have a form in the table that the modules of `regrad.shapes` fill. For the others,
regrad tries the kernel on small arrays, with numbers in place of the unknown sizes.

For example, let an op "Outer" have no form, and let x have the unknown sizes (n, m). regrad runs
the kernel on zeros and ones of three shapes:

    n, m = 5, 6    the result is (5, 6, 6)      sizes that rise
    n, m = 9, 8    the result is (9, 8, 8)      sizes that fall
    n, m = 1, 1    the result is (1, 1, 1)      1 is special: it broadcasts

The first size equals n in all three trials, and the other sizes equal m. So the shape is (n, m, m),
as `Dim`s. A `Dim` becomes a number in the run; until then it supports arithmetic. A size that is
the same number in all trials is a constant. A size that matches nothing is None, i.e. unknown.

Invariants:

* A result is never a guess that could be wrong. A size is a number or a Dim only if all trials
  agree on it, and if no other Dim was the same in all trials.
* A mistake that follows from the known sizes raises now, with the message of eager mode. A
  mistake that may come from the numbers of a trial does not raise; it may raise in the run.
* Trials are small and cached, so neither large arrays nor graphs of many equal ops are slow.
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

RANKS = (2, 1, 3, 4, 0, 5)  # ranks to try for an unknown rank, the most common ones first
FEW = 3  # the most inputs of unknown rank for which all combinations are tried
MISTAKES = (ShapeError, TypeError, IndexRangeError, NumberRangeError)  # DTypeErrors are TypeErrors
PLAIN = (int, float, complex, bool, str, type(None), np.dtype, type)
SMALL, LARGE = 5, 2**16  # a size in a trial; the most elements of an array that is tried unchanged
LARGE_SIZES = SizeSource()
COUNT = itertools.count()

Number = Callable[[Any], int]  # returns the number for a size in a trial
Known = Sequence[tuple[Dim, list[int]]]  # a size, and its number in each trial


def infer(op: Op, arguments: Arguments, attrs: Attrs) -> list[Spec]:
    """Return the specs of the results of an op.

    Args:
        op: The op.
        arguments: A Spec for each parameter of the op, promoted as for its kernel; a list of Specs
            for a sequence, None for an absent argument. Sizes are ints and Dims. The shape is
            None if the rank is unknown.
        attrs: All attributes. They may contain Dims, and UnknownRanks for shapes.

    Returns one Spec per result. An unknown size or shape is None. Raises the errors of the op, if
    they follow from the known sizes, and UnknownShapeError if even the number of results is
    unknown.
    """
    form = form_of(op)
    found = None
    if form is not None:
        try:
            found = _answer(op, form, arguments, attrs)
        except UnknownShapeError:  # the form needs a size that only the run determines
            found = None
        except Exception as error:
            # A form may fail for an unknown rank, which does not mean that the call is wrong.
            if not _is_unranked(arguments, attrs):
                raise explain_trial(error, op, arguments, attrs) from error.__cause__
    return probe(op, arguments, attrs) if found is None else found


def _answer(op: Op, form: Form, arguments: Arguments, attrs: Attrs) -> list[Spec] | None:
    """Return the specs of the results by a form; None if the form defers to a trial."""
    answer = form.function(arguments, attrs)
    kind = type(answer)
    if kind is not tuple and answer is not None:  # (most forms return a tuple and end here)
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
    """Return an error that names the op and its inputs, like in eager mode."""
    specs = list(_leaves(arguments))
    inputs = " and ".join(f"{x.dtype} {'<unknown>' if x.shape is None else x.shape}" for x in specs)
    if op.broadcasts and (type(error) is Clash or (type(error) is ValueError and _clash(specs))):
        return ShapeError(
            f"{op.type}: operands could not be broadcast together, regrad.{op.name} got {inputs}. "
            "From the last axis on, sizes must be equal, or one of them must be 1."
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
        # from the values of the trial (e.g. a singular matrix), so only the run can raise it.
        if known and (isinstance(error, MISTAKES) or isinstance(found, ShapeError)):
            raise found from error.__cause__
        return _guess(op, arguments)


def _guess(op: Op, arguments: Arguments) -> list[Spec]:
    """Return an unknown shape, and the dtype that nearly all kernels keep."""
    if op.several:
        raise UnknownShapeError(
            f"{op.type}: the number of results and their shapes are unknown before the run. "
            "Define them in a function decorated with @shape_of."
        )
    dtypes = [x.dtype for x in _leaves(arguments)]
    other = dtypes[0] if dtypes else get_default_dtype()
    return [Spec(None, next(filter(is_inexact, dtypes), other))]


def _try(op: Op, arguments: Arguments, attrs: Attrs) -> list[Spec]:
    """Return the specs of the results where all sizes are known. They are cached if possible."""
    specs = tuple([tuple(x) if isinstance(x, list) else x for x in arguments])
    # with the type of each value, because 1, 1.0 and True are the same key of a cache
    items = tuple([(name, type(value), value) for name, value in attrs.items()])
    try_ = _trial if _is_plain(tuple(attrs.values())) else _trial.__wrapped__
    return list(try_(op, specs, items))


def _is_plain(value: object) -> bool:
    """Return whether a value may be cached: it compares by value and keeps no object alive."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN)


@lru_cache(maxsize=4096)
def _trial(op: Op, specs: tuple[Any, ...], items: tuple[Any, ...]) -> tuple[Spec, ...]:
    """Return the specs of the results for arrays of these specs. `items` are the attributes."""
    arrays = [_each(x, _array) for x in specs]
    with quiet():
        results = op.kernels[np.ndarray](*arrays, **{name: value for name, _, value in items})
    several = results if isinstance(results, tuple | list) else (results,)
    return tuple([Spec(tuple(y.shape), y.dtype) for y in several])


def _array(x: Spec) -> np.ndarray:
    """Return zeros for integers, which may be indices; else ones plus an identity matrix."""
    shape: Any = x.shape
    if x.dtype.kind in "iu":
        return np.zeros(shape, x.dtype)
    y = np.ones(shape, x.dtype)
    if y.ndim > 1 and x.dtype.kind in "fc":
        i = np.arange(min(shape[-2:]))
        y[..., i, i] = 2
    return y


def _each(x: Any, change: Callable[[Spec], Any]) -> Any:
    """Apply a function to the specs of a parameter."""
    if x is None or type(x) is Spec:
        return x and change(x)
    return [change(spec) for spec in x]


def _small(arguments: Arguments) -> Arguments:
    """Replace the large sizes of large arrays by Dims, so that a trial is fast."""
    large = {n for x in _leaves(arguments) if _elements(x) > LARGE for n in _numbers(x)}
    # by number, in all positions, so that equal sizes (of matrices to multiply) stay equal
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
    """Return the known sizes."""
    return [n for n in x.shape or () if isinstance(n, int)]


def _elements(x: Spec) -> int:
    return math.prod(_numbers(x))


# -- sizes that are unknown ------------------------------------------------------------------------


def _dims_of(value: Any) -> list[Dim]:
    """Return the Dims in the shapes of specs and in attributes."""
    return [part for part in dims.parts(value) if isinstance(part, Dim)]


def _compare(op: Op, arguments: Arguments, attrs: Attrs) -> list[Spec]:
    """Return what trials with different numbers for the unknown sizes have in common.

    The numbers rise from size to size in one trial and fall in the other, so that no size can
    be mistaken for one computed from another. If a trial fails, some sizes may have to be equal. A
    trial in which all sizes are equal then determines the rank, but no size.
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
    """Return what trials with different sizes, and with sizes of 1, have in common."""
    # sizes of the result can only be sizes of the arguments, not numbers computed from them
    candidates = {n.key: n for n in _dims_of([*_leaves(arguments), *attrs.values()])}
    trials = [_try_filled(op, arguments, attrs, number) for number in numbers]
    stood = [[_fill(n, number) for number in (*numbers, _one)] for n in candidates.values()]
    with suppress(Exception):  # 1 is special, because it broadcasts; the trial is optional
        trials.append(_try_filled(op, arguments, attrs, _one))
    if len(set(map(len, trials))) > 1:
        raise UnknownShapeError(
            f"{op.type}: the number of results depends on a size that is unknown before the run"
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
    """Return the shape whose examples in the trials are these shapes."""
    if len(set(map(len, shapes))) > 1:
        return None
    return tuple([_common_size(sizes, known) for sizes in zip(*shapes, strict=True)])


def _common_size(sizes: Sequence[int], known: Known) -> Any:
    """Return the number if a size was constant, else the only Dim with the same numbers."""
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
    asked = None  # the error of a rank that the op accepts, but at which it needs a known size
    for first, *rest in _ranks(sum(x.shape is None for x in _leaves(arguments))):
        ranks = iter((first, *rest))
        specs = [_each(x, partial(_give_rank, ranks=ranks)) for x in arguments]
        shaped = partial(_shaped, rank=first)
        try:
            found = _at_rank(op, specs, {k: dims.mapped(v, shaped) for k, v in attrs.items()})
        except UnknownShapeError as error:
            asked = error
        except Exception:  # the op does not accept this rank
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
    """Yield ranks for `count` shapes: equal ranks, then, for a few shapes, all combinations."""
    yield from [(rank,) * max(count, 1) for rank in RANKS]
    if count <= FEW:
        yield from (r for r in itertools.product(RANKS, repeat=count) if len(set(r)) > 1)


def _give_rank(x: Spec, ranks: Iterator[int]) -> Spec:
    return Spec(_some_shape(next(ranks)), x.dtype) if x.shape is None else x


def _shaped(part: Dim | UnknownRank, rank: int) -> Any:
    """Return a shape of this rank in place of an unknown shape."""
    return _some_shape(rank) if isinstance(part, UnknownRank) else part


def _some_shape(rank: int) -> tuple[Dim, ...]:
    source = SizeSource(next(COUNT))
    return tuple([dims.size_of(source, axis) for axis in range(rank)])
