"""Calls that do not fit what is called: refused, with what to write instead."""

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
    """Give a function that messages call `name` an answer to whatever it cannot take."""
    return lambda function: wraps(function)(answering(function, name))  # pyright: ignore[reportReturnType]


def public(function: F) -> F:
    """Return a function whose errors name it, its arguments and what to write instead.

    Args:
        function: A function of the library or of an extension, made of ops.

    Raises:
        ArgumentError: (when called) the arguments are not those of its signature.

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
    """The names of the parameters to which keywords bind, in order; none where f is not a function.

    The signature that a decorated function shows is the signature of the original, and the
    decorator may see the order of the keywords that it is given. So only code counts.
    """
    while (inner := f.func if isinstance(f, partial) else getattr(f, "__func__", None)) is not None:
        f = inner
    code = getattr(f, "__code__", None)
    if type(code) is not CodeType:
        return ()
    return code.co_varnames[code.co_posonlyargcount : code.co_argcount + code.co_kwonlyargcount]


def answer_in(module: ModuleType, texts: Texts = TENSORS) -> None:
    """Make all functions of a module `public`, with what is said of arguments there."""
    for name, value in list(vars(module).items()):
        if type(value) is FunctionType and name[0] != "_" and not hasattr(value, "__wrapped__"):
            known = ANSWERING.get((name, value))
            if known is None:
                known = ANSWERING[name, value] = helpful(name)(complete_public(value, texts))
            setattr(module, name, known)


# By name and function: a function of several modules (`tf.sin`, `tf.math.sin`) is one object.
ANSWERING: dict[tuple[str, FunctionType], Callable[..., Any]] = {}


def answering(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """As `helpful`, for functions that are made at each call and need no docstring."""

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
    """An error of a call as the caller is to see it.

    What the caller's own code raised stays as it is, and so does what another function of the
    library is told: only the one that the user has called speaks.
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


PASSING_ON = ("regrad.ops.methods", "regrad.core.made")  # what the user wrote
OWN = {
    "regrad", "numpy", "scipy", "jax", "jaxlib", "torch", "optree", "opt_einsum", "ml_dtypes",
    "array_api_compat", "safetensors", *sys.stdlib_module_names,
}  # fmt: skip


def is_of_caller(error: Exception) -> bool:
    """Return whether an error passed through code that is not ours nor a dependency's."""
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
    """The arguments of a call by the names of their parameters."""
    try:
        bound = inspect.signature(function).bind(*args, **options)
    except (TypeError, ValueError):
        return {**{str(i): value for i, value in enumerate(args)}, **options}
    return {key: value for key, value in bound.arguments.items() if key != "self"}


def check_call(
    function: Callable[..., Any], name: str, args: Sequence[Any], options: Mapping[str, Any]
) -> None:
    """Refuse arguments that a function of ours does not take."""
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
    """Why a function cannot take these arguments; None if it can, or if nobody can tell."""
    try:
        inspect.signature(function, follow_wrapped=False).bind(*args, **options)
    except TypeError as error:
        return str(error)
    except ValueError:  # a builtin that does not say what it takes
        pass
    return None


def declared(function: object) -> list[inspect.Parameter] | None:
    """Return the parameters of a function; None if it does not say what it takes."""
    try:
        return [*inspect.signature(function).parameters.values()]  # pyright: ignore
    except (TypeError, ValueError):  # not a function, or a builtin
        return None


def named(
    f: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
) -> list[tuple[str, Any]]:
    """Return the arguments of a call with their names, keywords in the order of the function.

    Arguments in `*args` have names by place (`args1`). Unknown keywords come last.
    """
    parameters = inspect.signature(f).parameters
    places = [n for n, p in parameters.items() if p.kind <= p.POSITIONAL_OR_KEYWORD]
    places += [f"args{i}" for i in range(len(places), len(args))]
    order = [*parameters, *options]
    by_name = sorted(options.items(), key=lambda item: order.index(item[0]))
    return [*zip(places, args, strict=False), *by_name]


def plain_code(function: object) -> CodeType | None:
    """Return the code of a function that says itself what it takes.

    None for other callables, and where a decorator has another signature shown (`__wrapped__`,
    `__signature__`): `inspect.signature` knows about these, and takes fifty times as long.
    """
    if type(function) is not FunctionType or hasattr(function, "__wrapped__"):
        return None
    return None if hasattr(function, "__signature__") else function.__code__


def parameters_of(function: Callable[..., Any]) -> str:
    """Return the parameters of a function, for a message: `(dy, x)`."""
    try:
        found = inspect.signature(function)
    except ValueError:
        return "what it does not say"
    plain = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    return str(inspect.Signature(plain))


def check_passed(
    f: Callable[..., Any], args: Sequence[Any], api: str, options: Mapping[str, Any] | None = None
) -> None:
    """Refuse the f passed to a gradient function if it does not take what it is given."""
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
