"""With-blocks that undo what they did however they end, by Ctrl-C too.

A signal handler (the one behind Ctrl-C, say) runs between two instructions of Python, and may
raise there. `contextlib.contextmanager` has two such places where its `finally` does not run in
time: after the generator has yielded to `__enter__`, while the block is not entered yet; and at the
first instruction of `__exit__`. What was set (a tape, an override) would stay in force.

Two facts help. No handler runs between an instruction and the C function that it calls. And what is
raised at the moment at which a generator goes on is raised at its `yield`, inside its `try`. So
both ends of a block are C code all the way down to the generator. It is begun by `next`. It is
ended by `any`, which asks what the generator yields for its truth: one that is not to end here
yields a `Refusal`, and goes on waiting.
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

CCall: TypeAlias = Callable[[], object]  # in C: no signal handler runs between two in a `map`


class _Enter:
    """`__enter__` of a context manager whose generator is begun by `next`."""

    def __get__(self, manager: Any, owner: type | None = None) -> Callable[..., Any]:
        return _enter if manager is None else manager._begin()


def _enter(manager: Any) -> Any:  # (contextlib.ExitStack asks the class for it)
    return manager.__enter__()


class _Ended(io.IOBase, Generic[T]):
    """The context manager of a generator; `IOBase.__exit__` is C code that calls `close`."""

    __slots__ = ("close", "steps")
    closed = True  # pyright: ignore (the finalizer has nothing to close)

    def __init__(self, steps: Generator[T]) -> None:
        self.steps = steps
        self.close = _not_open  # pyright: ignore (until the block is entered)

    def _begin(self) -> Callable[[], T]:
        # (a generator that was not begun takes no True: Python raises)
        self.close = partial(any, map(self.steps.send, repeat(True)))  # pyright: ignore
        return MethodType(next, self.steps)

    if TYPE_CHECKING:

        def __enter__(self) -> T: ...  # pyright: ignore[reportIncompatibleMethodOverride]

    else:
        __enter__ = _Enter()


def _not_open() -> None:
    raise ArgumentError(
        "this block is not open: it was never entered, or it was left already. Use it with `with`."
    )


class Refusal:
    """Yielded by the steps of a block that must not end here: who tries to is told."""

    def __bool__(self) -> bool:
        raise ArgumentError(
            "a scope was left in another thread or context than that in which it was entered. "
            "Nothing was changed: it is still open there. Leave it in the thread and the asyncio "
            "task that entered it; jobs and threads take its rules along by themselves."
        )


HERE: ContextVar[None] = ContextVar("regrad_here", default=None)


def stay(
    value: Any, variable: ContextVar[Any] = HERE, to: Any = None,
    telling: Callable[[Any], Sequence[CCall]] = lambda value: (),
) -> Generator[Any]:  # fmt: skip
    """Steps of a block that is left in the context in which it was entered, and refuses elsewhere.

    Within the block the variable has another value, which stays if a block inside is still open.
    If the steps are never ended (they are collected then), the context may be out of reach: no
    other one is changed.

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
    except BaseException:  # a signal, or nobody has left it
        if token is None:
            variable.set(before)
        else:
            _put_back(variable, token, to, telling(before))
        raise


def _put_back(variable: ContextVar[Any], token: Token[Any], to: Any, end: Sequence[CCall]) -> bool:
    """Give a variable its former value; False, and no change, in another context."""
    found = variable.get()
    more = end if found is to else [partial(variable.set, found)]
    try:
        list(map(call, [partial(variable.reset, token), *more]))
    except ValueError:
        return False
    except RuntimeError:  # it was put back, and then a signal came
        return True
    return True


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


NOT_COPIED = ("_ended", "_idle", "_around", "_opener")  # what an object has while it is open


class Block:
    """A context manager by a generator, `_steps`, which yields once: in a `try` with a `finally`.

    The generator is not told of an exception of the block (see `sys.exc_info`). One object is one
    block at a time; `_twice` says what to do instead.
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
    manager: Callable[..., AbstractContextManager[Any]], *args: Any
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function: each call runs in a block of its own, `with manager(*args)`."""

    def decorated(f: Callable[P, R]) -> Callable[P, R]:
        @wraps(f)
        def opened(*given: P.args, **options: P.kwargs) -> R:
            with manager(*args):
                return f(*given, **options)

        return opened

    return decorated
