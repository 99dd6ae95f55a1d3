"""Functions that are written out as source: run once, and shown by tracebacks and debuggers."""

from __future__ import annotations

import itertools
import linecache
import weakref
from collections.abc import Callable
from typing import Any

from regrad.core.callers import PACKAGE

_NUMBERS = itertools.count(1)


def define(name: str, source: str, scope: dict[str, Any]) -> Callable[..., Any]:
    """Run source that defines a function, and return that.

    Its file name lies in the package's folder, so that hits and warnings name the line of the
    caller. `linecache` knows the source for as long as the function lives.
    """
    file = f"{PACKAGE}<{name} {next(_NUMBERS)}>"
    exec(compile(source, file, "exec"), scope)
    function = scope[name]
    lines = source.splitlines(keepends=True)
    linecache.cache[file] = (len(source), None, lines, file)
    weakref.finalize(function, linecache.cache.pop, file, None).atexit = False
    return function
