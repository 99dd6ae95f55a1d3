"""Functions that functions have made, which other processes and `copy` make anew.

Python pickles a function by its name, and what `grad(f)` or `superspike(1.0)` returns has none.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from types import MethodType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])


class Made(partial[Any]):
    """A function, which travels by its own name or as the call that made it."""

    made_by: tuple[Any, ...]

    def __getattr__(self, name: str) -> Any:  # its name, code, signature
        return getattr(self.func, name)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __reduce__(self) -> Any:
        return own_name(self) or (_make, self.made_by)


def remade(maker: F) -> F:
    """Have a function of a module return functions that can be pickled, if what it takes can be."""

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


def own_name(function: Any) -> str | None:
    """The name under which a module has this very object, None if there is none."""
    found: Any = sys.modules.get(getattr(function, "__module__", None) or "")
    name = getattr(function, "__qualname__", "")
    for part in name.split("."):
        found = getattr(found, part, None)
    return name if found is function and function.__module__ != "__main__" else None
