"""Tracebacks without regrad's own frames: they show the user's code and the message.

An error passes through many of regrad's frames on its way from a rule or a check to the caller. The
outermost function of regrad, which the user's code called, removes these frames. An error inside of
regrad, which the user's code did not cause, keeps every frame.

`REGRAD_TRACEBACKS=full` in the environment keeps all frames (after JAX's
`JAX_TRACEBACK_FILTERING=off`).
"""

from __future__ import annotations

import os
import sys
from types import TracebackType

from regrad.core.callers import PACKAGE
from regrad.errors import RegradError

SETTING = "REGRAD_TRACEBACKS"
# Frames of these packages are removed if they lie between two of regrad's frames.
BETWEEN = {"numpy", "jax", "jaxlib", "optree", "contextlib", "functools"}


def fold(error: Exception) -> None:
    """Remove regrad's frames from the traceback of an error that is about to leave the library.

    Call it in the `except` block of a function that users call, before a bare `raise`.
    """
    if os.environ.get(SETTING) == "full" or _is_within():
        return
    entries = _entries(error.__traceback__)
    last = max((i for i, e in enumerate(entries) if _is_ours(e)), default=-1)
    theirs_follows = last + 1 < len(entries) and not _lies_between(entries[-1])
    if not (isinstance(error, RegradError) or theirs_follows):
        return
    error.__traceback__ = _chained(
        [e for i, e in enumerate(entries) if i > last or not (_is_ours(e) or _lies_between(e))]
    )


def _is_within() -> bool:
    """Return whether regrad called the caller's code, which is then a rule or a body."""
    frame, outside = sys._getframe(2), False
    while frame is not None:
        ours = frame.f_code.co_filename.startswith(PACKAGE)
        if ours and outside:
            return True
        outside = outside or not ours
        frame = frame.f_back
    return False


def _entries(trace: TracebackType | None) -> list[TracebackType]:
    found: list[TracebackType] = []
    while trace is not None:
        found.append(trace)
        trace = trace.tb_next
    return found


def _is_ours(entry: TracebackType) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith(PACKAGE)


def _lies_between(entry: TracebackType) -> bool:
    module = entry.tb_frame.f_globals.get("__name__", "")
    return module.partition(".")[0] in BETWEEN


def _chained(entries: list[TracebackType]) -> TracebackType | None:
    trace: TracebackType | None = None
    for entry in reversed(entries):
        trace = TracebackType(trace, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return trace
