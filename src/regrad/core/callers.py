"""Find the caller: the innermost line that runs outside of regrad's own folder."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import sysconfig
import warnings
from collections import defaultdict
from types import CodeType
from typing import Any
from weakref import ref

import regrad
from regrad.errors import OpenScopeWarning

PACKAGE = regrad.__path__[0] + os.sep  # the file names of regrad's own code begin with it
CARRIERS = (PACKAGE, contextlib.__file__)  # code that enters scopes for its callers
_OF_PYTHON = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep
_SITES = ("site-packages", "dist-packages")


# By file: `warnings` records here the lines at which it has warned.
REGISTRIES: defaultdict[str, dict[Any, Any]] = defaultdict(dict)


def warn_caller(
    message: str, category: type[Warning], ours: str | tuple[str, ...] = PACKAGE
) -> None:
    """Warn at the innermost line that runs outside of these folders."""
    file, _, line = find_caller(ours).rpartition(":")
    warnings.warn_explicit(message, category, file, int(line), registry=REGISTRIES[file])


@functools.lru_cache(maxsize=4096)
def is_library_file(path: str) -> bool:
    """Return whether a file belongs to regrad, to Python, or to an installed package.

    Packages may be in several folders: of a virtual environment, of the Python under it, of the
    user. These folders have the same name.
    """
    if path.startswith("<"):  # code without a file
        return False
    path = os.path.realpath(path)
    installed = not {*_SITES}.isdisjoint(path.split(os.sep))
    return path.startswith((PACKAGE, _OF_PYTHON)) or installed


class _KnownFiles(dict[str, bool]):
    """Maps file names to whether they are in some folders. The same few files come up often."""

    def __init__(self, folders: str | tuple[str, ...]) -> None:
        self.folders = folders

    def __missing__(self, file: str) -> bool:
        self[file] = found = file.startswith(self.folders)
        return found


_known_files = functools.cache(_KnownFiles)


# Lines by code and instruction. The key has the code's id; a weak reference keeps no code alive.
_LINES: dict[tuple[int, int], tuple[Any, str]] = {}
KEPT = 4096  # (a line of generated code may never come up again)
_NOTHING = (lambda: None), ""


def find_caller(ours: str | tuple[str, ...] = PACKAGE, above: int = 0) -> str:
    """Return the innermost line that runs outside of these folders: `model.py:12`.

    Args:
        ours: The folders.
        above: The number of callers of this function's caller that are known to be in them.
    """
    within, frame = _known_files(ours), sys._getframe(1 + above)
    code = frame.f_code
    while within[code.co_filename] and (around := frame.f_back) is not None:
        frame, code = around, around.f_code
    key = id(code), frame.f_lasti
    held, line = _LINES.get(key, _NOTHING)
    if held() is not code:
        if len(_LINES) >= KEPT:
            _LINES.clear()
        line = f"{code.co_filename}:{frame.f_lineno}"
        _LINES[key] = ref(code), line
    return line


def find_opener() -> tuple[CodeType, int]:
    """Return the code and the instruction that enters a scope, for `warn_of_open_scope`."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(CARRIERS):
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


def warn_of_open_scope(name: str, opener: tuple[CodeType, int]) -> None:
    """Warn at the line that entered a scope, if the scope is collected before its exit."""
    if sys.is_finalizing():
        return
    code, at = opener
    lines = code.co_lines()
    line = next((n for first, end, n in lines if first <= at < end and n), code.co_firstlineno)
    warnings.warn_explicit(
        f"{name}: the scope that was entered at {code.co_filename}:{line} was never exited. It "
        "ended when it was collected. Enter it with `with`, or keep it and call its __exit__.",
        OpenScopeWarning, code.co_filename, line,
    )  # fmt: skip
