"""The table of forms.

A *form* is a function `(arguments, attrs)`. It receives a `Spec` for each parameter of the op (a
list for a sequence of tensors, None for an absent argument) and the attributes. It returns a shape,
a `Spec`, or a list of `Spec`s for several results. Sizes that are unknown before the run are
`Dim`s, which support arithmetic. If a form returns `NotImplemented`, or needs the value of a Dim,
regrad tries the kernel instead.
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

Arguments = Sequence[Any]  # for each parameter: a Spec, a list of Specs, or None
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
    """A form, and the dtype of the result where it differs from the first input's dtype."""

    function: Callable[[Arguments, Attrs], Any]
    dtype: ResultDType


FORMS: dict[str, Form] = {}


def form_of(op: Op) -> Form | None:
    """Return the form of an op, or None."""
    return FORMS.get(op.type, ELEMENTWISE if op.elementwise else None)


def shape_of(
    *op_types: str, dtype: str | type | np.dtype | None = None, overwrite: bool = False
) -> Callable[[F], F]:
    """Define the shape of an op's result as a function of its inputs and attributes.

    The function receives `(arguments, attrs)`, with a `Spec` (`shape`, `dtype`) for each
    parameter, and returns the shape. Sizes are numbers, or symbols for sizes that are unknown
    before the run of a graph. The function may compute with symbols and return them. None is an
    unknown size. Without such a function, regrad tries an op type on small arrays when it builds
    a graph.

    Args:
        op_types: The op types to which the function applies.
        dtype: The result's dtype; by default the first input's dtype. For several results, or a
            dtype that depends on the attributes, return a `Spec`, or a list with
            a `Spec` for each result.
        overwrite: Replace the existing function of an op type.

    Returns:
        A decorator that returns the function unchanged.

    Raises UnknownOpError for an op type that does not exist. Raises RegistrationError for an op
    type that already has a function, and for a function that does not take two arguments.

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
                f"the op type {op_type!r} already has a shape function; pass "
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
    """Register a form for regrad's own op types, which need not be defined yet."""

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
    """Suppress warnings, because the values of a trial have no meaning."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


def measure_dtype(op: Op, arguments: Arguments, attrs: Attrs) -> np.dtype:
    """Return the dtype of the kernel's result for arrays of one element."""
    dtypes = tuple([None if x is None else x.dtype for x in arguments])
    # (unknown sizes are 1)
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
    """Return the attribute `dtype`, or the input's dtype if the attribute is None."""
    dtype = attrs["dtype"] or arguments[0].dtype
    if isinstance(dtype, np.dtype):
        return dtype
    return find_op("ZerosLike").kernels[np.ndarray](np.zeros(1), dtype=dtype).dtype


def total_dtype(op: Op, arguments: Arguments, attrs: Attrs) -> np.dtype:
    """Return the dtype of a sum or product, the default integer for small integers and bools."""
    return _total(arguments[0].dtype)


@lru_cache
def _total(dtype: np.dtype) -> np.dtype:
    return np.sum(np.ones(1, dtype)).dtype


def quotient_dtype(op: Op, arguments: Arguments, attrs: Attrs) -> np.dtype:
    """Return the dtype of an input that is divided by a number."""
    dtype = arguments[0].dtype
    return np.dtype(np.float64) if dtype.kind in "biu" else dtype


def second_dtype(op: Op, arguments: Arguments, attrs: Attrs) -> np.dtype:
    """Return the dtype of the second input."""
    return arguments[1].dtype


def real_dtype(op: Op, arguments: Arguments, attrs: Attrs) -> np.dtype:
    """Return the real dtype for the first input, which may be complex."""
    return real_of(arguments[0].dtype)


def real_of(dtype: np.dtype) -> np.dtype:
    """Return the real dtype for a complex dtype."""
    return np.real(np.empty(0, dtype)).dtype if dtype.kind == "c" else dtype
