"""The table of forms.

A *form* is a function `(arguments, attrs)`: it is given a `Spec` for each parameter of the op (a
list for a sequence of tensors, None for an absent one) and the attributes, and returns a shape,
or a `Spec`, or a list of them for several results. Sizes that are known only in the run are
`Dim`s, with which it may compute. `NotImplemented` leaves the case to a trial of the kernel, and
so does a question that a Dim cannot answer.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from regrad.core import dims
from regrad.core.registry import Attrs, Op, find_op
from regrad.errors import RegistrationError
from regrad.shapes.sizes import Shape, StandIn, broadcast

Arguments = Sequence[Any]  # a Spec, a list of them or None for each parameter
F = TypeVar("F", bound=Callable[[Arguments, Attrs], Any])

ResultDType = np.dtype | Callable[[Op, Arguments, Attrs], np.dtype] | None

BOOL, INDEX = np.dtype(bool), np.dtype(np.intp)


class Spec(NamedTuple):
    """The shape and the dtype of a tensor.

    >>> import regrad as rg
    >>> from regrad.extend import Spec
    >>> Spec((2, 3), rg.float32).shape
    (2, 3)
    """

    shape: Shape
    dtype: np.dtype


class Form(NamedTuple):
    """A form, and the dtype of the result where it is not that of the first input."""

    function: Callable[[Arguments, Attrs], Any]
    dtype: ResultDType


FORMS: dict[str, Form] = {}


def form_of(op: Op) -> Form | None:
    """Return the form of an op, if there is one."""
    return FORMS.get(op.type, ELEMENTWISE if op.elementwise else None)


def shape_of(
    *op_types: str, dtype: str | type | np.dtype | None = None, overwrite: bool = False
) -> Callable[[F], F]:
    """Say how the shape of an op's result follows from its inputs and attributes.

    The function is given `(arguments, attrs)`, with a `Spec` (`shape`, `dtype`) for each
    parameter, and returns the shape. Sizes may be numbers, or stand for what only the run of a
    graph can tell; those can be computed with and returned, and None says that nothing is known.
    An op type without such a function is tried on small arrays when a graph is built.

    Args:
        op_types: The op types for which the function speaks.
        dtype: The result's dtype; by default that of the first input. For several results, or
            a dtype that depends on the attributes, return a `Spec` or a list of them.
        overwrite: Replace the function that an op type has already.

    Returns:
        A decorator, which returns the function as it is.

    Raises UnknownOpError for an op type that does not exist, RegistrationError for one that has
    such a function, or for a function that does not take two arguments.

    >>> import regrad as rg
    >>> from regrad.shapes.infer import Spec, infer, shape_of
    >>> @rg.op("Doubled")
    ... def doubled(xp, x: rg.Tensor, /) -> rg.Tensor:
    ...     "x, twice over."
    ...     return xp.concat([x, x], axis=0)
    >>> @shape_of("Doubled")
    ... def _(arguments, attrs):
    ...     n, *rest = arguments[0].shape
    ...     return (2 * n, *rest)
    >>> infer(rg.find_op("Doubled"), [Spec((3, 4), rg.float32)], {})[0].shape
    (6, 4)
    """
    names = [find_op(t).type for t in op_types]
    for op_type in names:
        if op_type in FORMS and not overwrite:
            raise RegistrationError(
                f"how the shape of the op type {op_type!r} follows is known already; pass "
                "overwrite=True to replace the function"
            )
    register = form(*names, dtype=None if dtype is None else np.dtype(dtype))

    def checked(function: F) -> F:
        try:
            inspect.signature(function).bind((), {})
        except TypeError:
            raise RegistrationError(
                f"shape_of({', '.join(map(repr, op_types))}): expected a function of (arguments, "
                f"attrs), got {function.__name__}{inspect.signature(function)}"
            ) from None
        return register(function)

    return checked


def form(*op_types: str, dtype: ResultDType = None) -> Callable[[F], F]:
    """The same for the library's own op types, which need not be defined yet."""

    def register(function: F) -> F:
        FORMS.update(dict.fromkeys(op_types, Form(function, dtype)))
        return function

    return register


def broadcasting(arguments: Arguments, attrs: Attrs) -> Shape:
    """Return the shape to which all inputs broadcast."""
    return broadcast(*[x.shape for x in arguments if x is not None])


# -- dtypes --------------------------------------------------------------------------------------


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings: in a trial, values mean nothing."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


def measure_dtype(op: Op, arguments: Arguments, attrs: Attrs) -> np.dtype:
    """The dtype of what the kernel returns for arrays of one element."""
    dtypes = tuple([None if x is None else x.dtype for x in arguments])
    # (with 1 for each unknown size)
    items = [(name, dims.resolved(value, _ones)) for name, value in attrs.items()]
    return _measure(op, dtypes, tuple(items))


def _ones(source: Any) -> StandIn:
    return StandIn(source, lambda place: 1)


@lru_cache(maxsize=4096)
def _measure(op: Op, dtypes: tuple[Any, ...], attrs: tuple[tuple[str, Any], ...]) -> np.dtype:
    with quiet():
        arrays = [None if dtype is None else np.ones(1, dtype) for dtype in dtypes]
        return op.kernels[np.ndarray](*arrays, **dict(attrs)).dtype


ELEMENTWISE = Form(broadcasting, measure_dtype)


def dtype_attribute(op: Op, arguments: Arguments, attrs: Attrs) -> np.dtype:
    """The attribute `dtype`; the input's where that is None."""
    dtype = attrs["dtype"] or arguments[0].dtype
    if isinstance(dtype, np.dtype):
        return dtype
    return find_op("ZerosLike").kernels[np.ndarray](np.zeros(1), dtype=dtype).dtype


def total_dtype(op: Op, arguments: Arguments, attrs: Attrs) -> np.dtype:
    """Sums and products of small integers and bools are of the default integer."""
    return _total(arguments[0].dtype)


@lru_cache
def _total(dtype: np.dtype) -> np.dtype:
    return np.sum(np.ones(1, dtype)).dtype


def quotient_dtype(op: Op, arguments: Arguments, attrs: Attrs) -> np.dtype:
    """The dtype of an input that was divided by a number."""
    dtype = arguments[0].dtype
    return np.dtype(np.float64) if dtype.kind in "biu" else dtype


def second_dtype(op: Op, arguments: Arguments, attrs: Attrs) -> np.dtype:
    """The dtype of the second input."""
    return arguments[1].dtype


def real_dtype(op: Op, arguments: Arguments, attrs: Attrs) -> np.dtype:
    """The dtype of sizes and parts of the first input, which may be complex."""
    return real_of(arguments[0].dtype)


def real_of(dtype: np.dtype) -> np.dtype:
    """The real dtype that goes with a complex one."""
    return np.real(np.empty(0, dtype)).dtype if dtype.kind == "c" else dtype
