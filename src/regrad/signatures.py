"""Calls that do not fit what is called: refused, with what to write instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

from regrad.errors import ArgumentError

F = TypeVar("F", bound=Callable[..., Any])


def helpful(name: str) -> Callable[[F], F]:
    """Give a function that messages call `name` an answer to arguments that it does not have."""
    return lambda function: wraps(function)(answering(function, name))  # pyright: ignore[reportReturnType]


def answering(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """As `helpful`, for functions that are made at each call and need no docstring."""

    def call(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except TypeError:
            check_call(function, name, args, options)
            raise

    return call


def check_call(
    function: Callable[..., Any], name: str, args: Sequence[Any], options: Mapping[str, Any]
) -> None:
    """Refuse arguments that a function of ours does not take."""
    fault = misfit(function, args, options)
    if fault is None:
        return
    from regrad.hints import of_arguments, of_keyword

    known = list(inspect.signature(function, follow_wrapped=False).parameters)
    unknown = next((key for key in options if key not in known), None)
    if unknown is not None:
        fault = f"got an unexpected keyword argument {unknown!r}"
        hint = of_keyword(name, unknown, known)
    else:
        hint = (
            of_arguments(name) if fault.startswith("too many") else f"It takes {', '.join(known)}."
        )
    raise ArgumentError(f"{name}: {fault}. {hint}") from None


def misfit(
    function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
) -> str | None:
    """Why a function cannot take these arguments; None if it can, or if nobody can tell."""
    try:
        inspect.signature(function, follow_wrapped=False).bind(*args, **options)
    except TypeError as error:
        return str(error)
    except ValueError:  # a builtin that does not say what it takes
        pass
    return None


def parameters_of(function: Callable[..., Any]) -> str:
    """What a function takes, for a message: `(dy, x)`."""
    try:
        found = inspect.signature(function)
    except ValueError:
        return "what it does not say"
    plain = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    return str(inspect.Signature(plain))


def check_passed(f: Callable[..., Any], args: Sequence[Any], api: str) -> None:
    """Refuse the f passed to a gradient function if it does not take what it is given."""
    if misfit(f, args, {}) is None:
        return
    from regrad.hints import of_passed

    count = f"{len(args)} argument{'s' if len(args) != 1 else ''}" if args else "no argument"
    raise ArgumentError(
        f"the f passed in {api} takes {parameters_of(f)}, and is called "
        f"with {count}. {of_passed(api)}"
    ) from None
