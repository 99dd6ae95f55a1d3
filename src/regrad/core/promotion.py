"""The dtypes of results: type promotion, and the default dtype.

Python numbers have the default dtype, and so do Tensors that are created without a dtype. It is
float32, as in TensorFlow.js. The user can change it: for the process by `set_default_dtype`, for a
block of one thread or task by `default_dtype`. A number next to a Tensor takes the Tensor's dtype,
whatever the default is.

regrad reads the default when a number becomes a Tensor. A compiled function has one program for
each default under which it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextvars import ContextVar
from typing import Any, TypeVar

import numpy as np

from regrad.core.backends import FLOAT, Array, DTypeLike, check_dtype, is_inexact, numpy_dtype
from regrad.core.blocks import Block, CCall, inside, stay
from regrad.core.callers import find_opener, warn_of_open_scope
from regrad.core.scopes import check_decorated
from regrad.core.signatures import helpful, public
from regrad.core.tensor import Tensor
from regrad.errors import DTypeError

F = TypeVar("F", bound=Callable[..., Any])

SCOPED: ContextVar[np.dtype | None] = ContextVar("regrad_default_dtype", default=None)
PROCESS: list[np.dtype] = [FLOAT]
# Followers, as in `state`. They get the scope's default dtype, or with True the process's.
FOLLOWERS: list[Callable[[np.dtype | None, bool], CCall]] = []


def get_default_dtype() -> np.dtype:
    """Return the dtype of Python numbers, and of Tensors that are created without a dtype.

    Returns:
        A real floating dtype: float32 unless `set_default_dtype` or `default_dtype` changed it.

    Source: `torch.get_default_dtype`.

    >>> import regrad as rg
    >>> rg.get_default_dtype()
    dtype('float32')
    """
    scoped = SCOPED.get()
    return PROCESS[0] if scoped is None else scoped


def complex_dtype() -> np.dtype:
    """Return the dtype of Python's complex numbers: as wide as the default dtype."""
    return np.dtype(np.complex128 if get_default_dtype() == np.float64 else np.complex64)


@public
def set_default_dtype(dtype: DTypeLike) -> None:
    """Set the dtype of Python numbers, and of Tensors created without a dtype, for the process.

    The default applies to Python floats and integers without a Tensor next to them (`scalar(0.1)`,
    `tensor([1, 2])`), to `zeros`, `ones`, `eye`, `linspace`, `one_hot` and random numbers, to
    integers that become floats (`arange(3) * 0.5`, `mean` of integers), and, if it is float64, to
    Python's complex numbers. Arrays and Tensors keep their dtypes, and a number next to a Tensor of
    floats takes the Tensor's dtype. Graphs of `regrad.v1` keep TensorFlow 1's dtypes.

    Args:
        dtype: A real floating dtype, such as `"float64"`.

    Raises:
        DTypeError: dtype is not a real floating dtype.

    Source: `torch.set_default_dtype`.

    >>> import regrad as rg
    >>> rg.set_default_dtype("float64")
    >>> rg.scalar(0.1).dtype
    dtype('float64')
    >>> rg.set_default_dtype("float32")
    """
    PROCESS[0] = _real("set_default_dtype", dtype)
    for tell in FOLLOWERS:
        tell(PROCESS[0], True)()


class default_dtype(Block):
    """Set the default dtype for a block.

    Python numbers and Tensors that are created without a dtype have the default dtype (see
    `set_default_dtype` for the full list). The scope applies to its own thread or task, and wins
    over `set_default_dtype`.

    Args:
        dtype: A real floating dtype, such as `"float64"`.

    As a decorator, `@default_dtype("float64")`, it opens a scope for each call of the function.

    Raises:
        ArgumentError: it decorates a function that runs after its call (a generator, a coroutine).
        DTypeError: dtype is not a real floating dtype.

    >>> import regrad as rg
    >>> with rg.default_dtype("float64"):
    ...     print(rg.scalar(0.1).dtype, (rg.arange(3) * 0.5).dtype)
    float64 float64
    """

    @helpful("default_dtype")
    def __init__(self, dtype: DTypeLike) -> None:
        self._dtype = _real("default_dtype", dtype)

    def _steps(self) -> Generator[None]:
        return _scope(self._dtype)  # without a reference to the object, which is then freed at once

    def __call__(self, f: F) -> F:
        """Decorate a function: the scope is open during each of its calls."""
        check_decorated("default_dtype", f)
        manager: Any = default_dtype
        return inside(manager, self._dtype)(f)  # pyright: ignore[reportReturnType]


def _scope(dtype: np.dtype) -> Generator[None]:
    opener = find_opener()
    try:
        yield from stay(None, SCOPED, dtype, _telling)
    except GeneratorExit:
        warn_of_open_scope("default_dtype", opener)
        raise


def _telling(scoped: np.dtype | None) -> list[CCall]:
    return [tell(scoped, False) for tell in FOLLOWERS]


def _real(function: str, dtype: DTypeLike) -> np.dtype:
    try:
        found = np.dtype(dtype)  # pyright: ignore[reportArgumentType, reportCallIssue]
    except TypeError:
        found = numpy_dtype(dtype)
    if dtype is not None and found.kind in "fV":
        check_dtype(found)
        return found
    raise DTypeError(
        f"{function}: expected a real floating dtype such as 'float64' or rg.float32, got {dtype!r}"
    )


def number_dtype(value: complex, integers: bool = False) -> np.dtype:
    """Return the dtype of a Python number on its own: the default, as in TensorFlow.js.

    Bools stay bools. With `integers`, integers also stay integers.
    """
    if type(value) is bool:
        return np.dtype(bool)
    if type(value) is complex:
        return complex_dtype()
    return np.dtype(np.int64) if integers and type(value) is int else get_default_dtype()


def promote(dtypes: list[np.dtype]) -> np.dtype:
    """Return the common dtype: the standard's, or the float dtype for integers with floats.

    (NumPy alone would promote int32 and float32 to float64.)
    """
    inexact = [d for d in dtypes if is_inexact(d)]
    first, *rest = inexact or dtypes
    for dtype in rest:
        first = first if dtype == first else np.promote_types(first, dtype)
    return first


def widest(xs: Iterable[Tensor | Array]) -> np.dtype:
    """Return the widest dtype of the real floats among these, or else the default dtype."""
    dtypes = [x.dtype for x in xs]
    floats = [d for d in dtypes if getattr(d, "kind", "") in ("f", "V")]
    return promote(floats or [get_default_dtype()])


def gradient_dtype(x: Array, wide: np.dtype) -> np.dtype:
    """Return the dtype of a gradient of x: x's own dtype, or `wide` if x has integers.

    An integer has a gradient if a rule returned one, of any float dtype. A program needs the dtype
    before the gradient exists, and two branches must agree. So regrad uses the widest float dtype.
    """
    return x.dtype if is_inexact(x.dtype) else wide


def weak(value: complex, dtype: np.dtype) -> np.dtype:
    """Return the dtype of a Python number next to a tensor of `dtype`, which it never widens."""
    if type(value) is complex and dtype.kind != "c":
        return np.dtype(np.complex128) if dtype == np.float64 else complex_dtype()
    if type(value) is float and not is_inexact(dtype):
        return get_default_dtype()
    if type(value) is int and dtype.kind == "b":
        return np.dtype("int64")
    return dtype
