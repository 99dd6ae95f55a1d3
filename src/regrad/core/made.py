"""Functions that functions return, in a form that can be pickled and copied.

Python pickles a function by its name. A function that `grad(f)` or `superspike(1.0)` returns has
no name in a module. So it is pickled as the call that made it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from operator import attrgetter
from types import MethodType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])


class Made(partial[Any]):
    """A function that is pickled by its own name, or as the call that made it."""

    made_by: tuple[Any, ...]

    def __getattr__(self, name: str) -> Any:  # the function's name, code, signature
        return getattr(self.func, name)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __reduce__(self) -> Any:
        _, _, args, options = self.made_by
        first = next((x for x in (*args, *options.values()) if callable(x)), self)
        return own_name(self, first) or own_name(self) or (_make, self.made_by)


def remade(maker: F) -> F:
    """Let a function of a module return functions that can be pickled, if its arguments can be."""

    @wraps(maker)
    def make(*args: Any, **options: Any) -> Any:
        function = maker(*args, **options)
        made = Made(function)
        made.__module__, made.__doc__ = function.__module__, function.__doc__
        made.made_by = maker.__module__, maker.__name__, args, options
        return made

    make.__signature__ = inspect.signature(maker)  # pyright: ignore[reportAttributeAccessIssue]
    return make  # pyright: ignore[reportReturnType]


def _make(module: str, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return getattr(import_module(module), name)(*args, **options)


def own_name(made: Any, function: Any = None) -> tuple[Any, ...] | None:
    """Return how to find this object by its name, or by the name of its function.

    Return None if no module has it under that name.
    """
    named = made if function is None else function
    module, name = getattr(named, "__module__", None) or "", getattr(named, "__qualname__", "")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not made or (module == "__main__" and _goes_by_value()):
        return None
    return _find, (module, name)


def _find(module: str, name: str) -> Any:
    return attrgetter(name)(import_module(module))


def _goes_by_value() -> bool:
    """Return whether cloudpickle is the caller: it sends `__main__` to processes that lack it."""
    caller: Any = sys._getframe(3)  # the caller of `__reduce__`
    return "cloudpickle" in caller.f_globals.get("__name__", "")
