"""With-blocks that undo their changes however the block ends, also after Ctrl-C.

A signal handler (Ctrl-C, for example) runs between two Python instructions, and may raise there.
`contextlib.contextmanager` has two such places where its `finally` does not run in time: after the
generator has yielded to `__enter__` but before the block is entered, and at the first instruction
of `__exit__`. The change (a tape, an override) would then stay active.

Two facts help. No handler runs between an instruction and the C function that it calls. And an
exception that is raised when a generator resumes is raised at its `yield`, inside its `try`. So
both ends of a block are C code all the way down to the generator. `next` starts the generator.
`any` ends it: `any` evaluates the truth value of each object that the generator yields. A generator
that must not end here yields a `Refusal`, and stays suspended.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from functools import partial, update_wrapper, wraps
from itertools import repeat
from operator import call
from types import MethodType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeAlias, TypeVar

from regrad.errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

CCall: TypeAlias = Callable[[], object]  # in C: no signal handler runs between two calls in a `map`


class _Enter:
    """The `__enter__` of a context manager, which starts the generator by `next`."""

    def __get__(self, manager: Any, owner: type | None = None) -> Callable[..., Any]:
        return _enter if manager is None else manager._begin()


def _enter(manager: Any) -> Any:  # (contextlib.ExitStack reads __enter__ from the class)
    return manager.__enter__()


class _Ended(io.IOBase, Generic[T]):
    """The context manager of a generator; `IOBase.__exit__` is C code that calls `close`."""

    __slots__ = ("close", "steps")
    closed = True  # pyright: ignore (the finalizer has nothing to close)

    def __init__(self, steps: Generator[T]) -> None:
        self.steps = steps
        self.close = _not_open  # pyright: ignore (until the block is entered)

    def _begin(self) -> Callable[[], T]:
        if self.steps.gi_suspended or self.steps.gi_frame is None:  # pyright: ignore
            raise ArgumentError("this block is open, or has ended. Make a new one.")
        # (`send(True)` raises if the generator was never started)
        self.close = partial(any, map(self.steps.send, repeat(True)))  # pyright: ignore
        return MethodType(next, self.steps)

    if TYPE_CHECKING:

        def __enter__(self) -> T: ...  # pyright: ignore[reportIncompatibleMethodOverride]

    else:
        __enter__ = _Enter()


def _not_open() -> None:
    raise ArgumentError(
        "this block is not open: it was never entered, or has already ended. Use it with `with`."
    )


class Refusal:
    """Raises when evaluated. The steps of a block that must not end here yield it."""

    def __bool__(self) -> bool:
        raise ArgumentError(
            "a scope was exited in a different thread or context. regrad changed nothing: the "
            "scope is still open where it was entered. Exit it in the thread and the asyncio task "
            "that entered it; jobs and threads inherit its rules automatically."
        )


HERE: ContextVar[None] = ContextVar("regrad_here", default=None)


def stay(
    value: Any, variable: ContextVar[Any] = HERE, to: Any = None,
    telling: Callable[[Any], Sequence[CCall]] = lambda value: (),
) -> Generator[Any]:  # fmt: skip
    """Steps of a block that must end in the context that entered it, and raise in any other.

    The variable has the value `value` within the block. The value stays if an inner block is still
    open. If the steps never end (the garbage collector ends them), the context may be out of
    reach. No other context is changed.

    `telling(v)` returns C functions that send the value v to JAX. They run in the same step as
    the change. (regrad calls `telling` at the end, too: JAX may have been imported in the block.)
    """
    token = None
    before = variable.get()
    try:
        token = variable.set(to)
        list(map(call, telling(to)))
        yield value
        while not _put_back(variable, token, to, telling(before)):
            yield Refusal()
    except BaseException:  # a signal, or the steps are collected without an exit
        if token is None:
            variable.set(before)
        else:
            _put_back(variable, token, to, telling(before))
        raise


def _put_back(variable: ContextVar[Any], token: Token[Any], to: Any, end: Sequence[CCall]) -> bool:
    """Restore a variable's former value. Return False, without a change, in another context."""
    found = variable.get()
    more = end if found is to else [partial(variable.set, found)]
    try:
        list(map(call, [partial(variable.reset, token), *more]))
    except ValueError:
        return False
    except RuntimeError:  # a signal came after the value was restored
        return True
    return True


class _Exit:
    """The `__exit__` of a `Block`: it calls the one of its generator's context manager."""

    def __get__(self, block: Any, owner: type | None = None) -> Callable[..., Any]:
        return _leave if block is None else _ended(block).__exit__


def _leave(block: Any, *raised: Any) -> None:  # (contextlib.ExitStack reads __exit__ of the class)
    _ended(block).__exit__(*raised)


def _ended(block: Block) -> _Ended[Any]:
    """Return the context manager of an object: the open one, or a new one."""
    ended = block.__dict__.get("_ended")
    if ended is None or ended.steps.gi_frame is None:
        ended = block.__dict__["_ended"] = _Ended(block._steps())
    return ended


NOT_COPIED = ("_ended", "_idle", "_around", "_opener")  # attributes of an open object


class Block:
    """A context manager whose generator, `_steps`, yields once, in a `try` with a `finally`.

    The generator does not receive an exception of the block (see `sys.exc_info`). One object is
    one block at a time. `_twice` names the alternative in the error message.
    """

    _twice = "make a new one for an inner scope"

    def _steps(self) -> Generator[Any]:
        raise NotImplementedError

    def _begin(self) -> Callable[[], Any]:
        ended = _ended(self)
        if ended.steps.gi_suspended:  # pyright: ignore[reportAttributeAccessIssue]
            raise ArgumentError(f"this {type(self).__name__} is open already; {self._twice}")
        return ended._begin()

    __enter__: _Enter = _Enter()
    __exit__: _Exit = _Exit()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which is not open."""
        return {k: v for k, v in self.__dict__.items() if k not in NOT_COPIED}


def block(steps: Callable[P, Generator[T]]) -> Callable[P, _Ended[T]]:
    """Make a context manager from a generator function, as `contextlib.contextmanager` does.

    The generator must undo its changes in a `finally`. It does not receive the block's exceptions.

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
    manager: Callable[..., AbstractContextManager[Any]], *args: Any
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator: each call of the function runs in its own `with manager(*args)` block."""

    def decorated(f: Callable[P, R]) -> Callable[P, R]:
        @wraps(f)
        def opened(*given: P.args, **options: P.kwargs) -> R:
            with manager(*args):
                return f(*given, **options)

        return opened

    return decorated
