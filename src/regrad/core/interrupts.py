"""Deferred signals: Ctrl-C must not interrupt while no Variable holds the values.

A program that overwrites the arrays of Variables consumes the old values as soon as it runs. The
Variables get the new ones only after it has returned. A signal handler runs between any two Python
instructions. A KeyboardInterrupt there would lose both, and with them the weights. So in a
`Deferred` block, handlers only record that their signal came. They run when the block ends.

This applies to every signal that has a handler in Python. Python can only read handlers one by one,
which takes a fifth of the time of a small compiled call. So regrad reads all of them only after
`FRESH` seconds. At each block it reads the `USUAL` signals, and all signals that had a handler.
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

try:  # the C functions; `signal.signal` and others make enums, and take twelve times longer
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

_stale = 0.0  # the time after which all handlers have to be read again
_handled = USUAL  # the signals that may have a handler

_open: list[Deferred] = []  # the blocks of the main thread, innermost last
_main: list[int | None] = [threading.main_thread().ident]  # Python runs handlers only there

if hasattr(os, "register_at_fork"):  # in a child, the thread that forked is the main thread

    def _forked() -> None:
        _main[0] = threading.main_thread().ident

    os.register_at_fork(after_in_child=_forked)


def _ask_all(now: float) -> None:
    global _handled, _stale
    others = compress(OTHERS, map(callable, map(getsignal, OTHERS)))
    _handled, _stale = [*USUAL, *others], now + FRESH


class Deferred:
    """A block that defers the handlers of signals. They run when it ends.

    Inside it, an `at_once` block runs handlers immediately.
    """

    __slots__ = ("again", "handlers", "pending", "waits")

    def __init__(self) -> None:
        self.handlers: list[tuple[int, Any]] = []  # the handlers that were active
        self.pending: list[tuple[int, Any]] = []
        self.waits: bool = True
        self.again: bool = False  # whether handlers may have been set during the block

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
        except BaseException:  # a handler that was still active has raised
            self._restore()
            raise

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.waits:
            self.pending.append((number, frame))
        else:  # the handler must not see Variables as the open trace does, but their outer values
            with in_state(None):
                next(h for n, h in reversed(self.handlers) if n == number)(number, frame)

    def _restore(self) -> None:
        """Restore the handlers and run the pending ones. Each may raise, and each one runs."""
        try:
            handlers = self.handlers
            while handlers:  # SIGINT comes last: once it is restored, Ctrl-C may interrupt here
                number, handler = handlers[-1]
                if not self.again or getsignal(number) == self._note:
                    set_handler(number, handler)
                del handlers[-1]
        finally:
            if self.handlers:  # a restored handler has raised
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
    """Return whether a block is open that defers handlers, or runs them outside of the trace."""
    return bool(_open)


class at_once:
    """A block inside a `Deferred` one in which handlers run at once, outside of the open trace."""

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
