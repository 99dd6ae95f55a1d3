"""Signals that wait: Ctrl-C must not strike while values are in nobody's hands.

A program that writes over the arrays of Variables has taken the old values as soon as it runs, and
the new ones are the Variables' only after it has returned. The handler of a signal runs between any
two instructions of Python; a KeyboardInterrupt there would lose both, and the weights with them.
So in a `Deferred` block handlers only note that their signal came. They run as the block ends.

That goes for each signal that has a handler in Python. Python has no way to ask for all of them but
one by one, which takes a fifth of the time of a small compiled call; so all are asked again only
after `FRESH` seconds, and the `USUAL` ones, with those that had a handler then, at each block.
"""

from __future__ import annotations

import os
import signal
import threading
from itertools import compress
from threading import get_ident
from time import monotonic
from types import FrameType
from typing import Any

from regrad.core.state import in_state

try:  # the functions in C; those of `signal` make enums of everything, in twelve times the time
    from _signal import getsignal  # pyright: ignore[reportMissingImports]
    from _signal import signal as set_handler  # pyright: ignore[reportMissingImports]
except ImportError:
    from signal import getsignal
    from signal import signal as set_handler

FRESH = 2e-4  # seconds
_NOT_OF_PYTHON = (signal.SIG_DFL, signal.SIG_IGN, None)
NAMES = ("SIGINT", "SIGTERM", "SIGALRM", "SIGBREAK")
USUAL = [int(getattr(signal, name)) for name in NAMES if hasattr(signal, name)]
OTHERS = sorted({int(number) for number in signal.valid_signals()} - set(USUAL))

_stale = 0.0  # the time from which all are to be asked again
_handled = USUAL  # those that may have a handler

_open: list[Deferred] = []  # of the main thread, innermost last
_main: list[int | None] = [threading.main_thread().ident]  # Python runs handlers there only

if hasattr(os, "register_at_fork"):  # a child's main thread is the one that forked

    def _forked() -> None:
        _main[0] = threading.main_thread().ident

    os.register_at_fork(after_in_child=_forked)


def _ask_all(now: float) -> None:
    global _handled, _stale
    others = compress(OTHERS, map(callable, map(getsignal, OTHERS)))
    _handled, _stale = [*USUAL, *others], now + FRESH


class Deferred:
    """A block in which the handlers of signals wait; they run when it ends.

    Inside it, `at_once` is a block in which they do not.
    """

    __slots__ = ("again", "handlers", "pending", "waits")

    def __init__(self) -> None:
        self.handlers: list[tuple[int, Any]] = []  # those that were in force
        self.pending: list[tuple[int, Any]] = []
        self.waits: bool = True
        self.again: bool = False  # whether handlers may have been set since it began

    def __enter__(self) -> None:
        if get_ident() in _main:
            self.defer()
            _open.append(self)

    def __exit__(self, *raised: object) -> None:
        if get_ident() in _main:
            _open.pop()
            self._restore()

    def defer(self) -> None:
        try:
            if (now := monotonic()) > _stale:
                _ask_all(now)
            note, handlers = self._note, self.handlers
            for number in _handled:
                handler = getsignal(number)
                if handler not in _NOT_OF_PYTHON and not (self.again and handler == note):
                    handlers.append((number, handler))
                    set_handler(number, note)
        except BaseException:  # a handler that was still in force has raised
            self._restore()
            raise

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.waits:
            self.pending.append((number, frame))
        else:  # the trace is not the handler's: it sees Variables as they are outside of it
            with in_state(None):
                next(h for n, h in reversed(self.handlers) if n == number)(number, frame)

    def _restore(self) -> None:
        """Put the handlers back and run those called; each may raise, and none is lost."""
        try:
            handlers = self.handlers
            while handlers:  # SIGINT comes last: once it is back, Ctrl-C may strike here
                number, handler = handlers[-1]
                if not self.again or getsignal(number) == self._note:
                    set_handler(number, handler)
                del handlers[-1]
        finally:
            if self.handlers:  # one that was back has raised
                self.again = True
                self._restore()
            elif self.pending:
                self.run_pending()

    def run_pending(self) -> None:
        if self.pending:
            try:
                number, frame = self.pending.pop(0)
                handler: Any = getsignal(number)
                handler(number, frame)
            finally:
                self.run_pending()


def are_deferred() -> bool:
    """Return whether a block is open in which handlers wait, or run apart."""
    return bool(_open)


class at_once:
    """A block, in a `Deferred` one, in which handlers run at once, apart from what is traced."""

    __slots__ = ("within",)

    def __init__(self) -> None:
        self.within: Deferred | None = None

    def __enter__(self) -> None:
        if get_ident() in _main and _open and _open[-1].waits:
            self.within = _open[-1]
            self.within.waits = False
            self.within.run_pending()

    def __exit__(self, *raised: object) -> None:
        if self.within is not None:
            self.within.waits = self.within.again = True
            self.within.defer()
