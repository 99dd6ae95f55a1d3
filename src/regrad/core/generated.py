"""Functions that regrad generates as source code, which tracebacks and debuggers show."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable
from typing import Any

from regrad.core.callers import PACKAGE

_NUMBERS = itertools.count(1)


class Source:
    """The source of one function, as a module loader for Python's `linecache`.

    Tracebacks find the loader in the globals of the function and nowhere else. So the source lives
    as long as its function.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def get_source(self, name: str) -> str:
        return self.text


def define(
    name: str, source: str, scope: dict[str, Any], *, lasting: bool = False
) -> Callable[..., Any]:
    """Run source that defines a function, and return the function; `scope` becomes its globals.

    Its file name is in the package's folder, so that hits and warnings name the line of the
    caller. With `lasting`, `inspect` also finds the source, until the process ends.
    """
    file = f"{PACKAGE}<{name} {next(_NUMBERS)}>"
    scope.setdefault("__name__", __name__)
    scope["__loader__"] = Source(source)
    exec(compile(source, file, "exec"), scope)
    if lasting:
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    return scope[name]
