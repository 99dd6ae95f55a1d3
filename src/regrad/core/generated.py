"""Functions that are written out as source: run once, and shown by tracebacks and debuggers."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable
from typing import Any

from regrad.core.callers import PACKAGE

_NUMBERS = itertools.count(1)


class Source:
    """The source of one function, as Python's `linecache` asks the loader of a module for it.

    Tracebacks ask it, with the globals of the function, which are the only ones to know it: so the
    source goes with its function.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def get_source(self, name: str) -> str:
        return self.text


def define(
    name: str, source: str, scope: dict[str, Any], *, lasting: bool = False
) -> Callable[..., Any]:
    """Run source that defines a function, and return that; `scope` becomes its globals.

    Its file name lies in the package's folder, so that hits and warnings name the line of the
    caller. The source of a function that is `lasting` is known to `inspect` as well, for good.
    """
    file = f"{PACKAGE}<{name} {next(_NUMBERS)}>"
    scope.setdefault("__name__", __name__)
    scope["__loader__"] = Source(source)
    exec(compile(source, file, "exec"), scope)
    if lasting:
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    return scope[name]
