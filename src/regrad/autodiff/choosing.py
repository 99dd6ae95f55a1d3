"""The arguments by which a gradient function differentiates: `argnums`, `has_aux`, `dy`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from regrad.core.containers import replaced
from regrad.core.signatures import check_passed, declared
from regrad.errors import ArgumentError, kind

Argnums: TypeAlias = int | Sequence[int]


class ArgumentSelection:
    """The arguments by which `grad(f, argnums=…, has_aux=…)` differentiates, and whether f has aux.

    Args:
        f: The function.
        api: The name of the gradient function, for messages.
        argnums: The positions to differentiate by; None means the first.
        has_aux: f returns `(y, aux)`, and only y is differentiated.
    """

    closes_over: tuple[str, ...] = ("f",)

    def __init__(
        self, f: Callable[..., Any], api: str, argnums: Argnums | None, has_aux: bool = False
    ) -> None:
        self.f = f
        self.api = api
        self.given: bool = argnums is not None
        self.single: bool = argnums is None or not isinstance(argnums, Sequence)
        self.argnums: tuple[int, ...] = (0,) if argnums is None else _positions(argnums, api)
        if not isinstance(has_aux, bool):
            raise ArgumentError(f"{api}: has_aux is True or False, got {kind(has_aux)}")
        self.has_aux = has_aux

    def call(self, args: Sequence[Any], options: Mapping[str, Any]) -> ChosenCall:
        """Return the call of f with these arguments, as a function of the chosen ones."""
        count = len(args)
        places = []
        for number in self.argnums:
            if not -count <= number < count:
                raise ArgumentError(
                    f"{self.api}(f): argnums={number}, but f is called with {count} positional "
                    f"argument{'s' if count != 1 else ''}. argnums counts these from 0; keyword "
                    "arguments are constants."
                )
            places.append(number % count)
        if len(set(places)) < len(places):
            raise ArgumentError(
                f"{self.api}(f): argnums={self.argnums} names one of {count} arguments twice"
            )
        return ChosenCall(self, args, options, places)


@dataclass(eq=False)
class ChosenCall:
    """One call of f as a function of the chosen arguments alone. It keeps the aux of f."""

    choice: ArgumentSelection
    args: Sequence[Any]
    options: Mapping[str, Any]
    places: Sequence[int]
    aux: Any = None

    @property
    def inputs(self) -> list[Any]:
        """The arguments to differentiate by."""
        return [self.args[i] for i in self.places]

    def __call__(self, *inputs: Any) -> Any:
        """Return the result of f, without its aux, with these inputs in their places."""
        args, choice = replaced(self.args, self.places, inputs), self.choice
        try:
            y = choice.f(*args, **self.options)
        except TypeError:
            check_passed(choice.f, args, choice.api, self.options)
            raise
        if choice.has_aux:
            y, self.aux = pair(y, choice.api)
        return y

    def parts(self, found: Sequence[Any]) -> Any:
        """Return the entries for the inputs as the caller requested them: one, or a tuple."""
        return found[0] if self.choice.single else tuple(found)

    def with_aux(self, answer: Any) -> Any:
        """Return `(answer, aux)` if f has aux, else the answer."""
        return (answer, self.aux) if self.choice.has_aux else answer


def pair(y: Any, api: str) -> tuple[Any, Any]:
    """Return the two parts of the result of a function with aux."""
    if not isinstance(y, tuple | list) or len(y) != 2:
        raise ArgumentError(
            f"{api}(f): with has_aux=True f must return a pair (y, aux), got "
            + (f"{len(y)} values" if isinstance(y, tuple | list) else kind(y))
        )
    return y[0], y[1]


def _positions(argnums: Any, api: str) -> tuple[int, ...]:
    numbers = argnums if isinstance(argnums, Sequence) else (argnums,)
    try:
        if isinstance(argnums, str) or any(isinstance(n, bool) for n in numbers):
            raise TypeError
        positions = tuple(map(operator.index, numbers))
    except TypeError:
        raise ArgumentError(
            f"{api}(f, argnums=…): argnums is an int or a sequence of ints, got {argnums!r:.60}"
        ) from None
    if not positions:
        raise ArgumentError(f"{api}(f, argnums=()): there is nothing to differentiate by")
    return positions


def weight(f: Callable[..., Any], more: Sequence[Any], dy: Any, api: str) -> Any:
    """Return the `dy` of `grad(f)(x, dy)`, which is a second positional argument.

    Raises ArgumentError if the argument could also be f's own.
    """
    if len(more) > 1 or dy is not None:
        raise ArgumentError(
            f"{api}(f) returns a function of x and dy, got {1 + len(more)} positional arguments"
            f"{' and dy' if dy is not None else ''}. {_ways(api)}"
        )
    if takes_second(f):
        raise ArgumentError(
            f"{api}(f)(x, …): f takes a second positional argument, so it is ambiguous whether "
            f"the second value is f's argument or the dy that weights f(x). {_ways(api)}"
        )
    return more[0]


def _ways(api: str) -> str:
    return (
        f"Write {api}(f)(x, dy=dy) for the gradient weighted by dy, {api}(f, argnums=0)(x, a) for "
        f"f(x, a), and {api}s(f)([x, a]) for the gradients by both."
    )


def takes_second(f: Callable[..., Any]) -> bool:
    """Return whether a second positional argument could be f's own.

    The `save` of a `custom_grad` function is not in its signature, and the `dy` of a gradient
    function is a keyword there, so these do not count. A function without a signature is assumed
    to take one argument.
    """
    parameters = declared(f) or ()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return True
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters) > 1
