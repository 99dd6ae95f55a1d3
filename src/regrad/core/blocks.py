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

from regrad.errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class _Ended(io.IOBase, Generic[T]):
    """The context manager of a generator; `IOBase.__exit__` is C code that calls `close`."""

    __slots__ = ("close", "steps")
    closed = True  # pyright: ignore (the finalizer has nothing to close)

    def __init__(self, steps: Generator[T]) -> None:
        self.steps = steps
        self.close = _not_open  # pyright: ignore (until the block is entered)

    def __enter__(self) -> T:  # pyright: ignore[reportIncompatibleMethodOverride]
        steps = self.steps
        close = partial(next, steps, None)
        try:
            value = next(steps)
        except BaseException:
            steps.close()
            raise
        self.close = close  # pyright: ignore (with no call between this and the block)
        return value


def _not_open() -> None:
    raise ArgumentError(
        "this block is not open: it was never entered, or it was left already. Use it with `with`."
    )


class _Exit:
    """`__exit__` of a `Block`: that of its generator's own context manager."""

    def __get__(self, block: Any, owner: type | None = None) -> Callable[..., Any]:
        return _leave if block is None else _ended(block).__exit__


def _leave(block: Any, *raised: Any) -> None:  # (contextlib.ExitStack asks the class for it)
    _ended(block).__exit__(*raised)


def _ended(block: Block) -> _Ended[Any]:
    """The context manager of an object: a new one, or that whose block is open."""
    ended = block.__dict__.get("_ended")
    if ended is None or ended.steps.gi_frame is None:
        ended = block.__dict__["_ended"] = _Ended(block._steps())
    return ended


class Block:
    """A context manager by a generator, `_steps`, which yields once: in a `try` with a `finally`.

    The generator is not told of an exception of the block (see `sys.exc_info`). One object is one
    block at a time; `_twice` says what to do instead.
    """

    _twice = "make a new one for an inner scope"

    def _steps(self) -> Generator[Any]:
        raise NotImplementedError

    def __enter__(self) -> Any:
        ended = _ended(self)
        if ended.steps.gi_suspended:  # pyright: ignore[reportAttributeAccessIssue]
            raise ArgumentError(f"this {type(self).__name__} is open already; {self._twice}")
        return ended.__enter__()

    __exit__: _Exit = _Exit()


def block(steps: Callable[P, Generator[T]]) -> Callable[P, _Ended[T]]:
    """Make a context manager of a generator function, as `contextlib.contextmanager` does.

    The generator must undo in a `finally`, and gets no exception of the block.

    >>> from regrad.core.blocks import block
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

    def made(*args: P.args, **options: P.kwargs) -> _Ended[T]:
        return _Ended(steps(*args, **options))

    return update_wrapper(made, steps)  # pyright: ignore[reportReturnType]


def inside(
    manager: Callable[..., _Ended[Any]], *args: Any
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function: each call runs in a block of its own, `with manager(*args)`."""

    def decorated(f: Callable[P, R]) -> Callable[P, R]:
        @wraps(f)
        def call(*given: P.args, **options: P.kwargs) -> R:
            with manager(*args):
                return f(*given, **options)

        return call

    return decorated
