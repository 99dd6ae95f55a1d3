"""The branches of a traced `cond`: this module brings their results into one form.

The program chooses the branch at run time, so both branches must return Tensors of the same shapes
and dtypes. In eager mode a branch may return Python numbers as well; in a trace, numbers that
differ between the branches become Tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from regrad.core import containers, dispatch
from regrad.core.backends import is_array
from regrad.core.tensor import Tensor, wrap
from regrad.errors import ArgumentError, kind
from regrad.transforms.arguments import (
    ARRAY,
    TENSOR,
    OpenedArguments,
    ResultStructure,
    is_place,
    place_of_number,
    returned,
)
from regrad.transforms.conditionals import conditional
from regrad.transforms.replay import Captured

if TYPE_CHECKING:
    import numpy as np

    from regrad.core.tensor import TensorLike


def branched(pred: Tensor, functions: Sequence[Callable[..., Any]], operands: Any) -> Any:
    """Return the result of the first function if `pred` is true, else the second's."""
    given = OpenedArguments(operands, {})
    form = CommonForm()
    bodies = [Branch(f, given, form, k) for k, f in enumerate(functions)]
    while True:
        try:
            return form.closed(conditional(pred, bodies, given.tensors))
        except RetryTrace:
            continue


class RetryTrace(Exception):
    """Raised when the second branch changes the form of the results; both are replayed then."""


class Branch:
    """One of the two functions; it returns Tensors in the common form."""

    note: Any = None

    def __init__(
        self, function: Callable[..., Any], given: OpenedArguments, form: CommonForm, k: int
    ) -> None:
        self.function = function
        self.given = given
        self.form = form
        self.k = k
        self.flat: Captured = Captured(self._run, "cond")

    def _run(self, xs: Sequence[Tensor]) -> Sequence[Tensor]:
        args, kwargs = self.given.close(xs)
        ys, self.note = returned(self.function(*args, **kwargs), numbers="weak")
        return ys

    def __call__(self, xs: Sequence[Tensor]) -> Sequence[Tensor]:
        ys = self.flat(xs)
        return self.form.tensors(self.k, self.note(ys))


class CommonForm:
    """The common form of the results: Tensors with their dtypes, and shared plain values."""

    def __init__(self) -> None:
        self.returned: dict[int, tuple[list[Any], containers.Rebuild, Any]] = {}
        self.places: list[Any] | None = None  # as in a ResultStructure
        self.dtypes: list[Any] = []  # the dtype, where a number becomes a Tensor

    def tensors(self, k: int, result: Any) -> list[Tensor]:
        """Return the Tensors in the result of one of the branches."""
        self.returned[k] = leaves, _, _ = containers.opened(result, None)
        if self.places is None and len(self.returned) == 2:
            self._settle()
            if any(dtype is not None for dtype in self.dtypes):
                raise RetryTrace
        if self.places is None:
            return [_tensor(x, None) for x in leaves if _has_dtype(x)]
        rows = zip(leaves, self.places, self.dtypes, strict=True)
        return [_tensor(x, dtype) for x, place, dtype in rows if is_place(place)]

    def closed(self, ys: Sequence[Tensor]) -> Any:
        """Return the results, with these Tensors in their places."""
        assert self.places is not None
        return ResultStructure(self.places, self.returned[0][1])(ys)

    def _settle(self) -> None:
        (a, _, structure), (b, _, other) = self.returned[0], self.returned[1]
        if structure != other:
            raise self._differ()
        rows = [self._together(x, y) for x, y in zip(a, b, strict=True)]
        self.places = [place for place, _ in rows]
        self.dtypes = [dtype for _, dtype in rows]

    def _together(self, x: Any, y: Any) -> tuple[Any, Any]:
        """Return the place of two leaves in the results, and the dtype of a new Tensor."""
        if _has_dtype(x) and _has_dtype(y):
            return (ARRAY if is_array(x) and is_array(y) else TENSOR), None
        if _is_same(x, y):
            return x, None
        arrays = [_tensor(v, None) for v in (x, y) if _has_dtype(v)]
        numbers = [n for v in (x, y) if (n := _number(v)) is not None]
        if len(arrays) + len(numbers) < 2:
            raise self._differ()
        if arrays:
            return TENSOR, dispatch.common([arrays[0].dtype], numbers)
        return place_of_number(max(numbers, key=lambda n: dispatch.NUMBERS.index(type(n))))

    def _differ(self) -> ArgumentError:
        first, second = (
            rebuild([_Words(kind(x) if isinstance(x, Tensor) else repr(x)) for x in leaves])
            for leaves, rebuild, _ in (self.returned[0], self.returned[1])
        )
        return ArgumentError(
            "cond: under jit both functions must return the same structure of Tensors and "
            f"numbers, and equal values everywhere else; they returned {first!r} and {second!r}"
        )


class _Words(str):
    """The text of a leaf in a message, without quotes."""

    __repr__ = str.__str__


def _has_dtype(leaf: object) -> bool:
    return is_array(leaf) or (dispatch.is_tensor(leaf) and type(leaf) is not dispatch.WeakScalar)


def _is_same(x: object, y: object) -> bool:
    """Return whether two leaves are the same value and need no choice (0.0 is not -0.0)."""
    if isinstance(x, Tensor) or type(x) is not type(y):
        return False
    return x is y or (bool(x == y) and repr(x) == repr(y))


def _number(leaf: Any) -> complex | None:
    """Return a Python number, or the example of a traced number."""
    if type(leaf) is dispatch.WeakScalar:
        return leaf.example
    return leaf if type(leaf) in dispatch.NUMBERS else None


def _tensor(leaf: TensorLike, dtype: np.dtype | None) -> Tensor:
    """Return a Tensor, array or number as a Tensor, of this dtype unless it is None."""
    if is_array(leaf):
        leaf = wrap(leaf)
    elif type(leaf) not in dispatch.WEAKEST:
        leaf = dispatch.lift(leaf)
    return leaf if dtype is None else dispatch.as_dtype(leaf, dtype)
