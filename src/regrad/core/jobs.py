"""Jobs and threads take along the scopes of the place where they are handed in or started.

A thread starts without context, and the threads of a pool run jobs of anybody. So while a scope is
open, in whatever thread, the entrances of the standard library are replaced: what is handed in
there runs under the scopes that are open there and then, and under no tape. When the last scope is
left they are as before.

Where threads inherit the context of who starts them (an option of Python 3.14), they inherit tapes
as well, and the threads of a pool what was open when it grew: there the entrances are replaced
while a tape is open, too.
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

SCOPES: dict[Any, None] = {}  # those that are open in any thread (a dict, as `state.OPEN` is)
_LOCK = threading.RLock()  # (a signal's handler or a finalizer may open and close scopes, too)


def settle() -> None:
    """Replace the entrances, or put them back, as there are scopes open or not."""
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


# How to find what is open here, and to open it elsewhere (None: nothing): core's, `regrad.torch`'s.
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
    """Return whether a thread is one of a pool's, which runs jobs of anybody, or tqdm's monitor.

    The monitor starts with the first progress bar, runs none of the program, and never ends.
    """
    code = getattr(thread, "_target", None) or type(thread)
    return str(code.__module__).partition(".")[0] in ("concurrent", "multiprocessing", "tqdm")


def _takes_job(old: Callable[..., Any]) -> Any:
    def submit(self: Any, func: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        context = getattr(getattr(func, "func", None), "__self__", None)
        if isinstance(context, Context):  # the copy that asyncio.to_thread makes, tapes included
            context.run(STATE.set, _held())
        return old(self, carry(func), *args, **options)

    return submit


def _takes_task(old: Callable[..., Any]) -> Any:
    def apply_async(self: Any, func: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return old(self, carry(func) if _has_threads(self) else func, *args, **options)

    return apply_async


def _takes_tasks(old: Callable[..., Any]) -> Any:
    """Of all the others (`map`, `imap`, …), which hand in a function and what it is called with."""

    def generate(self: Any, job: Any, func: Callable[..., Any], calls: Any) -> Any:
        return old(self, job, carry(func) if _has_threads(self) else func, calls)

    return generate


def _takes_item(old: Callable[..., Any]) -> Any:
    """Of a queue, by which threads get a context and what to run in it (AnyIO's do)."""

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
    from concurrent.futures import ThreadPoolExecutor  # (here: they take long to import)
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
