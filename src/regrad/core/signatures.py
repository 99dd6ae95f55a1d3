"""Errors for calls that do not fit a function's signature, with the call to write instead."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

from regrad.core.docstrings import TENSORS, Texts, complete_public
from regrad.core.hints import of_arguments, of_keyword, of_passed
from regrad.core.tracebacks import fold
from regrad.errors import ArgumentError, RegradError, refusal

F = TypeVar("F", bound=Callable[..., Any])


def helpful(name: str) -> Callable[[F], F]:
    """Return a decorator: the function, `name` in messages, then raises errors with hints."""
    return lambda function: wraps(function)(answering(function, name))  # pyright: ignore[reportReturnType]


def public(function: F) -> F:
    """Return a function whose errors name it, its arguments and the call to write instead.

    Args:
        function: A function of the library or of an extension, made of ops.

    Raises:
        ArgumentError: (when called) the arguments do not fit its signature.

    >>> from regrad.extend import public
    >>> @public
    ... def double(x):
    ...     return 2 * x
    >>> double()
    Traceback (most recent call last):
    regrad.errors.ArgumentError: double: missing a required argument: 'x'. It takes x.
    """
    return helpful(function.__name__)(complete_public(function))


def keywords(f: Callable[..., Any]) -> Sequence[str]:
    """Return the names of a function's keyword parameters, in order; empty for other callables.

    A decorated function shows the signature of the original, but the decorator may depend on the
    order in which it gets its keywords. So only the code counts.
    """
    while (inner := f.func if isinstance(f, partial) else getattr(f, "__func__", None)) is not None:
        f = inner
    code = getattr(f, "__code__", None)
    if type(code) is not CodeType:
        return ()
    return code.co_varnames[code.co_posonlyargcount : code.co_argcount + code.co_kwonlyargcount]


def answer_in(module: ModuleType, texts: Texts = TENSORS) -> None:
    """Make all functions of a module `public`, with these texts about their arguments."""
    for name, value in list(vars(module).items()):
        if type(value) is FunctionType and name[0] != "_" and not hasattr(value, "__wrapped__"):
            known = ANSWERING.get((name, value))
            if known is None:
                known = ANSWERING[name, value] = helpful(name)(complete_public(value, texts))
            setattr(module, name, known)


# By name and function: a function of several modules (`tf.sin`, `tf.math.sin`) is one object.
ANSWERING: dict[tuple[str, FunctionType], Callable[..., Any]] = {}


def answering(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Like `helpful`, for functions that are made at each call and need no docstring."""

    def call(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except Exception as error:
            answer = answered(error, function, args, options, name)
            if answer is not error:
                raise answer from error
            fold(error)
            raise

    return call


def answered(
    error: Exception,
    function: Callable[..., Any],
    args: Sequence[Any],
    options: Mapping[str, Any],
    name: str = "",
) -> Exception:
    """Return an error of a call in the form for the caller.

    Errors of the caller's own code stay unchanged, as do errors of calls between functions of the
    library: only the function that the user has called changes an error.
    """
    caller = sys._getframe(2).f_globals.get("__name__", "")
    if caller.startswith("regrad.") and caller not in PASSING_ON:
        return error
    name = name or function.__name__
    if isinstance(error, TypeError) and not isinstance(error, RegradError):
        check_call(function, name, args, options)
    if is_of_caller(error):
        return error
    return refusal(error, name, given(function, args, options))


PASSING_ON = ("regrad.ops.methods", "regrad.core.made")  # their callers are the user's code
OWN = {
    "regrad", "numpy", "scipy", "jax", "jaxlib", "torch", "optree", "opt_einsum", "ml_dtypes",
    "array_api_compat", "safetensors", *sys.stdlib_module_names,
}  # fmt: skip


def is_of_caller(error: Exception) -> bool:
    """Return whether an error passed through code of neither regrad nor its dependencies."""
    frame = error.__traceback__
    while frame is not None:
        module = frame.tb_frame.f_globals.get("__name__", "regrad")
        if module.partition(".")[0] not in OWN:
            return True
        frame = frame.tb_next
    return False


def given(
    function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by the names of their parameters."""
    try:
        bound = inspect.signature(function).bind(*args, **options)
    except (TypeError, ValueError):
        return {**{str(i): value for i, value in enumerate(args)}, **options}
    return {key: value for key, value in bound.arguments.items() if key != "self"}


def check_call(
    function: Callable[..., Any], name: str, args: Sequence[Any], options: Mapping[str, Any]
) -> None:
    """Raise ArgumentError for arguments that a function of regrad does not take."""
    fault = misfit(function, args, options)
    if fault is None:
        return
    parameters = [*inspect.signature(function, follow_wrapped=False).parameters.values()]
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    known = [p.name for p in parameters if p.kind not in several and p.name != "self"]
    parameters = [p for p in parameters if p.name != "self"]
    unknown = next((key for key in options if key not in known), None)
    if unknown is not None:
        fault = f"got an unexpected keyword argument {unknown!r}"
        hint = of_keyword(name, unknown, known, bool(args))
    else:
        is_more = fault.startswith("too many")
        hint = of_arguments(name, parameters) if is_more else f"It takes {', '.join(known)}."
    raise ArgumentError(f"{name}: {fault}. {hint}") from None


def misfit(
    function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
) -> str | None:
    """Return why a function cannot take these arguments; None if it can, or if this is unknown."""
    try:
        inspect.signature(function, follow_wrapped=False).bind(*args, **options)
    except TypeError as error:
        return str(error)
    except ValueError:  # a builtin without a signature
        pass
    return None


def declared(function: object) -> list[inspect.Parameter] | None:
    """Return the parameters of a function; None if it has no signature."""
    try:
        return [*inspect.signature(function).parameters.values()]  # pyright: ignore
    except (TypeError, ValueError):  # not a function, or a builtin
        return None


def named(
    f: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
) -> list[tuple[str, Any]]:
    """Return the arguments of a call with their names, keywords in the order of the function.

    Arguments in `*args` have names by position (`args1`). Unknown keywords come last.
    """
    parameters = inspect.signature(f).parameters
    places = [n for n, p in parameters.items() if p.kind <= p.POSITIONAL_OR_KEYWORD]
    places += [f"args{i}" for i in range(len(places), len(args))]
    order = [*parameters, *options]
    by_name = sorted(options.items(), key=lambda item: order.index(item[0]))
    return [*zip(places, args, strict=False), *by_name]


def plain_code(function: object) -> CodeType | None:
    """Return the code of a plain function, whose code has its real signature.

    Return None for other callables, and for a function that shows another signature
    (`__wrapped__`, `__signature__`). `inspect.signature` handles these, and takes fifty times as
    long.
    """
    if type(function) is not FunctionType or hasattr(function, "__wrapped__"):
        return None
    return None if hasattr(function, "__signature__") else function.__code__


def parameters_of(function: Callable[..., Any]) -> str:
    """Return the parameters of a function, for a message: `(dy, x)`."""
    try:
        found = inspect.signature(function)
    except ValueError:
        return "unknown parameters"
    plain = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    return str(inspect.Signature(plain))


def check_passed(
    f: Callable[..., Any], args: Sequence[Any], api: str, options: Mapping[str, Any] | None = None
) -> None:
    """Raise if the f passed to a gradient function does not fit the arguments of its call."""
    options = options or {}
    if misfit(f, args, options) is None:
        return
    count = f"{len(args)} argument{'s' if len(args) != 1 else ''}" if args else "no argument"
    if options:
        count += f" and the keyword{'s' if len(options) != 1 else ''} {', '.join(options)}"
    raise ArgumentError(
        f"the f passed in {api} takes {parameters_of(f)}, and is called "
        f"with {count}. {of_passed(api)}"
    ) from None
