"""The open tapes and override scopes of the current thread and task.

The state is an immutable value in a context variable, so a thread starts without a state and an
asyncio task with a copy. `LIVE` shows without a context lookup whether a tape or a scope is open
*anywhere*, which eager mode checks at each op. It holds the existing states. A state leaves `LIVE`
when the last context that holds it is gone. So this also works for tasks that outlive the scope in
which they were made.

A thread starts without tapes, so no tape records its computations. `refuse_elsewhere` detects
Tensors that a tape of another context watches, because their gradient would be lost there.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from operator import call
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from regrad.core.blocks import CCall, block
from regrad.errors import GradientError

if TYPE_CHECKING:
    from regrad.core.protocols import GuardLike, RegionLike
    from regrad.core.registry import Op
    from regrad.core.tape import Tape
    from regrad.core.tensor import Tensor

T = TypeVar("T")

Overrides: TypeAlias = Mapping[Any, Any] | None  # as in `core.overrides`, with keys only here

LIVE: set[Any] = set()  # weak references to all existing states

# The tapes under which a function is running, in all contexts; and the subset that began while
# another context had a tape. (They are dicts because `del` is not a call: a signal handler may
# raise after any call.)
OPEN: dict[Tape, None] = {}
BESIDE: dict[Tape, None] = {}

# never reused, unlike id(); 0 means "on no tape"
next_id: Callable[[], int] = itertools.count(1).__next__


class Recorder(Protocol):
    """Records the plain ops of watched inputs: a tape, or the guard of a custom function."""

    watched: set[int]

    def write_unary(self, op: Op, x: Tensor, y: Tensor) -> None:
        """Record `y = op(x)`, where x is watched."""

    def write_binary(self, op: Op, a: Tensor, b: Tensor, y: Tensor) -> None:
        """Record `y = op(a, b)`, where a or b is watched."""


class State:
    """The tapes that record (outermost first), the active overrides, the guard, the region.

    The guard checks the closures of a custom function. The region, of `regrad.transforms`, tracks
    the values that a compiled or repeated body takes from outside. Overrides do not apply to the
    ops of a gradient function. The overrides for the functions that it differentiates are held
    back, under their own keys (see `held`).

    `plain` means that all tapes admit any record and keep the values that the rules name. Two
    attributes serve the common cases. `tape` is the only tape, if nothing else is active.
    `recorder` records the ops whose inputs it watches, on the fast path. (It is the only tape, or
    the guard in its place. None sends all ops to the general path.)
    """

    __slots__ = (
        "__weakref__", "guard", "left", "overrides", "plain", "recorder", "region", "tape", "tapes",
    )  # fmt: skip

    def __init__(
        self,
        tapes: tuple[Tape, ...] = (),
        overrides: Overrides = None,
        guard: GuardLike | None = None,
        region: RegionLike | None = None,
    ) -> None:
        self.tapes: tuple[Tape, ...] = tapes
        self.overrides: Overrides = overrides
        self.guard: Any = guard
        self.region: Any = region  # (Any: later packages call more of a guard or region)
        self.left: tuple[State | None] | None = None  # the state before, for an exit out of order
        self.tape: Tape | None = None
        self.recorder: Recorder | None = None
        if len(tapes) == 1:
            self.plain = tapes[0].plain
            if self.plain and guard is None:
                self.recorder = tapes[0]
                if overrides is None and region is None:
                    self.tape = tapes[0]
        else:
            self.plain: bool = not tapes or all(tape.plain for tape in tapes)
        # A state that only has a guard lives no longer than its enclosing state, which is in LIVE.
        # (`discard` runs when the state is freed, without a Python instruction at which a signal
        # handler could raise. An exception in `__del__` would be lost.)
        if tapes or overrides is not None or region is not None:
            LIVE.add(weakref.ref(self, LIVE.discard))

    def taping(self, *tapes: Tape) -> State:
        """Return the state for a differentiated function: with more tapes, as the innermost."""
        return State((*self.tapes, *tapes), self.scopes, self.guard, self.region)

    def overriding(self, overrides: Overrides) -> State:
        """Return the same state with other overrides."""
        return State(self.tapes, overrides, self.guard, self.region)

    @property
    def scopes(self) -> Overrides:
        """The overrides for a function that is differentiated here."""
        if not self.overrides:
            return self.overrides
        own = {key: b for key, b in self.overrides.items() if not is_held(key)}
        if len(own) == len(self.overrides):
            return self.overrides
        return {key[1]: b for key, b in self.overrides.items() if is_held(key)} | own

    @property
    def inspected(self) -> bool:
        """True if a tape has to record every op. Calls with one record then run op by op.

        This is also the case if the tapes need different records of an op (see `tape.put`).
        """
        if self.overrides and len(open_tapes(self)) > 1:
            return any(binding.once for binding in self.overrides.values())
        return not self.plain and any(tape.opens for tape in self.tapes)


# Followers of this thread's active overrides. `regrad.jax` is one, because JAX caches traces by
# these messages. A follower returns two C functions. The first sends the overrides, and the second
# sends the former message again.
FOLLOWERS: list[Callable[[Overrides], tuple[CCall, CCall]]] = []

STATE: ContextVar[State | None] = ContextVar("regrad_state", default=None)
current: Callable[[], State | None] = STATE.get


def telling(state: State | None) -> list[CCall]:
    """Return the C functions that send the overrides of a state to the followers."""
    overrides = None if state is None else state.overrides
    return [tell(overrides)[0] for tell in FOLLOWERS]


def open_tapes(state: State) -> tuple[Tape, ...]:
    """Return the tapes under which a function runs, the innermost last.

    The tapes that a custom function suspends are included, because they are still open.
    """
    tapes, guard = state.tapes, state.guard
    while guard is not None and not (tapes and tapes[-1] not in guard.tapes):
        tapes, guard = guard.tapes, guard.outer
    return tapes


@block
def in_state(state: State | None) -> Generator[None]:
    """Run a block under `state`, and restore the former state however the block ends.

    Each change is one call of `list`, on C functions in a `map`. So no signal handler runs between
    two of them.
    """
    before, followers = current(), len(FOLLOWERS)
    told: list[tuple[CCall, CCall]] = []
    if FOLLOWERS and (state and state.overrides) is not (before and before.overrides):
        told = [tell(state and state.overrides) for tell in FOLLOWERS]
    begin = map(call, (partial(STATE.set, state), *[tell for tell, _ in told]))
    end = map(call, (partial(STATE.set, before), *[take_back for _, take_back in told]))
    try:
        list(begin)
        yield
    finally:
        list(end)
        if len(FOLLOWERS) > followers:  # JAX was first used in the block, and has its overrides
            list(map(call, telling(before)))


@block
def unfollowed() -> Generator[None]:
    """Run a block in which the followers have no overrides, until a state inside has some."""
    told = [tell(None) for tell in FOLLOWERS]
    try:
        list(map(call, [tell for tell, _ in told]))
        yield
    finally:
        list(map(call, [take_back for _, take_back in told]))


HELD = "held"


def held(overrides: Overrides) -> Overrides:
    """Return overrides for a gradient function that was made under them.

    They apply only to the functions that it differentiates, not to its own ops: no op is looked
    up under their keys.
    """
    return overrides and {(HELD, key): binding for key, binding in overrides.items()}


def run_held(scopes: Overrides, f: Callable[..., T], *args: Any) -> T:
    """Run a gradient function that was made under these overrides, which are held back."""
    state = current()
    if scopes is None and (state is None or state.overrides is None):
        return f(*args)
    with in_state((state or State()).overriding(held(scopes))):
        return f(*args)


def is_held(key: object) -> bool:
    """Return whether this is the key of an override that is held back."""
    return type(key) is tuple and key[0] is HELD


def masked() -> AbstractContextManager[None]:
    """Run a block without overrides, as regrad's internal ops are not the user's ops."""
    state = current()
    return in_state(state if state is None or state.overrides is None else state.overriding(None))


def watchers(tensor_id: int) -> list[Tape]:
    """Return the open tapes of this context that watch the tensor with this id."""
    state = current()
    own = () if state is None else state.tapes
    found = [t for t in own if tensor_id in t.watched]
    return [*found, *elsewhere(tensor_id)] if state is None or BESIDE else found


# -- other contexts ------------------------------------------------------------------------------


def note_beside(tape: Tape, before: State | None) -> None:
    """Record a tape that was opened, in this state, while another context had a tape."""
    if not OPEN.keys() <= {tape, *_own_tapes(before)}:
        BESIDE[tape] = None


def elsewhere(tensor_id: int) -> list[Tape]:
    """Return the open tapes of other contexts that watch the tensor with this id."""
    if tensor_id <= 0:
        return []
    others = {tape for tape in list(OPEN) if tensor_id in tape.watched}
    return [*others.difference(_own_tapes(current()))] if others else []


def _own_tapes(state: State | None) -> Iterator[Tape]:
    """Yield the tapes of a context, also tapes that a custom function or a region suspends."""
    while state is not None:
        yield from state.tapes
        guard = state.guard
        while guard is not None:
            yield from guard.tapes
            guard = guard.outer
        state = None if state.region is None else state.region.around


def refuse_elsewhere(op_type: str, xs: Iterable[Tensor]) -> None:
    """Raise GradientError if another context is differentiating an input of an op, or of a call."""
    if OPEN and any(elsewhere(x._id) for x in xs):
        raise GradientError(
            f"{op_type}: another thread is differentiating an input of this call. Its gradient and "
            "its overrides would be lost here, because a thread starts without them. Pass the "
            "context on, with a copy for each call: pool.submit(contextvars.copy_context().run, f, "
            "x), or pass a constant, stop_gradient(x)."
        )
