"""With-blocks that undo what they did however they end, by Ctrl-C too.

A signal handler (the one behind Ctrl-C, say) runs between two instructions of Python, and may
raise there. `contextlib.contextmanager` has two such places where its `finally` does not run in
time: after the generator has yielded to `__enter__`, while the block is not entered yet; and at the
first instruction of `__exit__`. What was set (a tape, an override) would stay in force.

Two facts help. No handler runs between an instruction and the C function that it calls. And what is
raised at the moment at which a generator goes on is raised at its `yield`, inside its `try`. So
the end of a block is C code all the way down to the generator.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Generator
from functools import partial, update_wrapper, wraps
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class _End(io.IOBase):
    """Calls its attribute `close` when a with-block ends: `IOBase.__exit__` is written in C."""

    closed = True  # pyright: ignore (the finalizer has nothing to close)


class _Exit:
    """`__exit__` of a block: looked up as the block is entered, and then a function in C."""

    def __get__(self, block: Any, owner: Any = None) -> Callable[..., Any]:
        if block is None:  # by contextlib.ExitStack, which passes the block
            return _leave
        return _end_of(block).__exit__


def _leave(block: Any, *raised: Any) -> None:
    _end_of(block).close()


def _end_of(block: Any) -> _End:
    held = block.__dict__
    if "_end" not in held:
        held["_end"] = _End()
    return held["_end"]


class Block:
    """A context manager by a generator, `_steps`, which yields once: in a `try` with a `finally`.

    The generator is not told of an exception of the block (see `sys.exception`).
    """

    def _steps(self) -> Generator[Any, None, None]:
        raise NotImplementedError

    def __enter__(self) -> Any:
        end, steps = _end_of(self), self._steps()
        close = partial(next, steps, None)
        try:
            value = next(steps)
        except BaseException:
            steps.close()
            raise
        end.close = close
        return value

    __exit__ = _Exit()


class _Steps(Block, Generic[T]):
    def __init__(self, steps: Callable[[], Generator[T, None, None]]) -> None:
        self._steps = steps  # pyright: ignore[reportAttributeAccessIssue]

    def __enter__(self) -> T:
        return super().__enter__()

    def __call__(self, f: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function: each call is a block of its own."""

        @wraps(f)
        def inside(*args: P.args, **options: P.kwargs) -> R:
            with _Steps(self._steps):
                return f(*args, **options)

        return inside


def block(steps: Callable[P, Generator[T, None, None]]) -> Callable[P, _Steps[T]]:
    """Make a context manager of a generator function, as `contextlib.contextmanager` does.

    The generator must undo in a `finally`, and gets no exception of the block.

    >>> from regrad.blocks import block
    >>> @block
    ... def appended(xs, x):
    ...     try:
    ...         xs.append(x)
    ...         yield xs
    ...     finally:
    ...         xs.remove(x)
    >>> with appended([1, 2], 3) as xs:
    ...     print(xs)
    [1, 2, 3]
    >>> xs
    [1, 2]
    """

    def made(*args: P.args, **options: P.kwargs) -> _Steps[T]:
        return _Steps(partial(steps, *args, **options))

    return update_wrapper(made, steps)  # pyright: ignore[reportReturnType]
