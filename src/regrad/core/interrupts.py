"""Signals that wait: Ctrl-C must not strike while values are in nobody's hands.

A program that writes over the arrays of Variables has taken the old values as soon as it runs, and
the new ones are the Variables' only after it has returned. The handler of a signal runs between any
two instructions of Python; a KeyboardInterrupt there would lose both, and the weights with them.
So in a `Deferred` block handlers only note that their signal came. They run as the block ends.
"""

from __future__ import annotations

import os
import signal
import threading
from threading import get_ident
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

try:  # the functions in C; those of `signal` make enums of everything, in twelve times the time
    from _signal import getsignal  # pyright: ignore[reportMissingImports]
    from _signal import signal as set_handler  # pyright: ignore[reportMissingImports]
except ImportError:
    from signal import getsignal
    from signal import signal as set_handler

_NAMES = ("SIGINT", "SIGTERM", "SIGALRM", "SIGBREAK")
SIGNALS = [int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name)]

_open: list[Deferred] = []  # of the main thread, innermost last
_main: list[int | None] = [threading.main_thread().ident]  # Python runs handlers there only

if hasattr(os, "register_at_fork"):  # a child's main thread is the one that forked

    def _forked() -> None:
        _main[0] = threading.main_thread().ident

    os.register_at_fork(after_in_child=_forked)


class Deferred:
    """A block in which the handlers of signals wait; they run when it ends.

    Inside it, `at_once` is a block in which they run as ever.
    """

    __slots__ = ("due", "handlers")

    def __init__(self) -> None:
        self.handlers: dict[int, Any] = {}  # those that were in force
        self.due: list[tuple[int, Any]] | None = None

    def __enter__(self) -> None:
        if get_ident() in _main:
            self.defer()
            _open.append(self)

    def __exit__(self, *raised: object) -> None:
        if get_ident() in _main:
            _open.pop()
            self.restore()

    def defer(self) -> None:
        try:
            for number in SIGNALS:
                handler = getsignal(number)
                if callable(handler):
                    self.handlers[number] = handler
                    set_handler(number, self._note)
        except BaseException:  # a handler that was still in force has raised
            self.restore()
            raise

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.due = [*(self.due or ()), (number, frame)]

    def restore(self) -> None:
        try:
            while self.handlers:  # SIGINT comes last: once it is back, Ctrl-C may strike here
                set_handler(*self.handlers.popitem())
        finally:
            if self.due:
                self._run_due(self.due)

    def _run_due(self, due: list[tuple[int, Any]]) -> None:
        number, frame = due.pop(0)
        try:
            handler: Any = getsignal(number)
            handler(number, frame)
        finally:
            if due:
                self._run_due(due)


class at_once:
    """A block in which no handler waits, in a block in which they do: nothing is lost here."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting: Deferred | None = None

    def __enter__(self) -> None:
        if _open and get_ident() in _main and _open[-1].handlers:
            self.waiting = _open[-1]
            self.waiting.restore()

    def __exit__(self, *raised: object) -> None:
        if self.waiting is not None:
            self.waiting.defer()
