"""Jobs and threads inherit the scopes that are active where they are submitted or started.

A thread starts without a context, and the threads of a pool run jobs for any caller. So while a
scope is open in any thread, regrad replaces the standard library's methods that start threads and
submit jobs. The job or thread then runs under the scopes that are open where it was submitted or
started, and under no tape. When the last scope ends, regrad restores the methods.

Threads may inherit the context of the thread that starts them (an option of Python 3.14). Then they
inherit tapes as well, and a pool's thread inherits what was open when the pool started it. With
this option the methods are also replaced while a tape is open.
"""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import Context
from functools import wraps
from typing import Any

from regrad.core.replacements import Entrance, Replacements
from regrad.core.state import OPEN, STATE, State, current, in_state

INHERITS = bool(getattr(sys.flags, "thread_inherit_context", False))

SCOPES: dict[Any, None] = {}  # the open scopes of all threads (a dict, like `state.OPEN`)
_LOCK = threading.RLock()  # (a signal's handler or a finalizer may open and close scopes, too)


def settle() -> None:
    """Replace the methods if a scope is open, or restore them."""
    with _LOCK:
        if SCOPES or (INHERITS and OPEN):
            _REPLACED.make()
        else:
            _REPLACED.undo()


def _held() -> State | None:
    """Return the scopes that are open here, as a state without tapes."""
    state = current()
    if state is None or not state.overrides:
        return None
    settled = {key: binding.settled() for key, binding in state.overrides.items()}
    same = all(map(operator.is_, settled.values(), state.overrides.values()))
    return State(overrides=state.overrides if same else settled)


# Pairs of functions that return the open scopes (None: none) and open them: core's, regrad.torch's.
CARRIERS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [(_held, in_state)]


def carry(function: Callable[..., Any], *, empty: bool = False) -> Callable[..., Any]:
    """Return a function that will run under the scopes that are open now, or under none."""
    held = [(enter, None if empty else find()) for find, enter in CARRIERS]
    if not INHERITS and not any(them for _, them in held):
        return function

    @wraps(function)
    def under_scopes(*args: Any, **options: Any) -> Any:
        with ExitStack() as stack:
            for enter, them in held:
                stack.enter_context(enter(them))
            return function(*args, **options)

    return under_scopes


def _starts(old: Callable[..., Any]) -> Any:
    def start(self: threading.Thread) -> None:
        run = self.run
        carried = carry(run, empty=_is_worker(self))
        if carried is not run:
            self.run = carried
        old(self)

    return start


def _is_worker(thread: Any) -> bool:
    """Return whether a thread is a pool's thread, which runs any caller's jobs, or tqdm's monitor.

    The monitor starts with the first progress bar, runs no code of the program, and never ends.
    """
    code = getattr(thread, "_target", None) or type(thread)
    return str(code.__module__).partition(".")[0] in ("concurrent", "multiprocessing", "tqdm")


def _takes_job(old: Callable[..., Any]) -> Any:
    def submit(self: Any, func: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        context = getattr(getattr(func, "func", None), "__self__", None)
        if isinstance(context, Context):  # asyncio.to_thread's copy, which has the tapes, too
            context.run(STATE.set, _held())
        return old(self, carry(func), *args, **options)

    return submit


def _takes_task(old: Callable[..., Any]) -> Any:
    def apply_async(self: Any, func: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return old(self, carry(func) if _has_threads(self) else func, *args, **options)

    return apply_async


def _takes_tasks(old: Callable[..., Any]) -> Any:
    """Replace the method behind `map`, `imap`, …, which take a function and its arguments."""

    def generate(self: Any, job: Any, func: Callable[..., Any], calls: Any) -> Any:
        return old(self, job, carry(func) if _has_threads(self) else func, calls)

    return generate


def _takes_item(old: Callable[..., Any]) -> Any:
    """Replace `put` of queues: AnyIO sends its threads a context and a function by a queue."""

    def put(self: Any, item: Any, *args: Any, **options: Any) -> None:
        if type(item) is tuple and any(isinstance(part, Context) for part in item):
            item = tuple([carry(part) if callable(part) else part for part in item])
        old(self, item, *args, **options)

    return put


def _has_threads(pool: Any) -> bool:
    from multiprocessing.pool import ThreadPool

    return isinstance(pool, ThreadPool)


def _entrances() -> list[Entrance]:
    """Return the methods to replace."""
    from concurrent.futures import ThreadPoolExecutor  # (here, because these imports are slow)
    from multiprocessing.pool import Pool
    from queue import Queue

    return [
        (threading.Thread, "start", _starts),
        (ThreadPoolExecutor, "submit", _takes_job),
        (Pool, "apply_async", _takes_task),
        (Pool, "_guarded_task_generation", _takes_tasks),
        (Queue, "put", _takes_item),
    ]


_REPLACED = Replacements(_entrances)
