"""What is in force in the current thread and task: open tapes and override scopes.

The state is an immutable value in a context variable, so a thread starts with none and
an asyncio task with a copy. `LIVE` answers, without a context lookup, the question that
the eager road asks at each op: is a tape or a scope open *anywhere*? It holds the ids of
the states that exist; a state leaves it when the last context that knows it is gone, so
the answer stays right for tasks that outlive the scope in which they were made.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regrad.overrides import Binding
    from regrad.tape import Tape

LIVE: set[int] = set()

next_id = itertools.count(1).__next__  # never reused, unlike id(); 0 means "on no tape"


class State:
    """The tapes that record (outermost first), the overrides in force, the guard, the region.

    The guard watches over what a custom function closes over; the region (see `regions`) knows
    what a compiled or repeated body takes from outside.
    `tape` is the common case in one word: the only tape, where nothing else is in force.
    `inner` is kept for the calls of custom functions under this state (see `guarded`).
    """

    __slots__ = ("__weakref__", "guard", "inner", "left", "overrides", "region", "tape", "tapes")

    def __init__(
        self,
        tapes: tuple[Tape, ...] = (),
        overrides: Mapping[Any, Binding] | None = None,
        guard: Any = None,
        region: Any = None,
    ) -> None:
        self.tapes = tapes
        self.overrides = overrides
        self.guard = guard
        self.region = region
        self.inner: State | None = None
        self.left: tuple[State | None] | None = None  # of a scope left out of turn: what was before
        if len(tapes) == 1 and overrides is None and guard is None and tapes[0].plain:
            self.tape = tapes[0]
        else:
            self.tape = None
        LIVE.add(id(self))

    def taping(self, *tapes: Tape) -> State:
        """The same state with more tapes, which are the innermost."""
        return State((*self.tapes, *tapes), self.overrides, self.guard, self.region)

    def overriding(self, overrides: Mapping[Any, Binding] | None) -> State:
        """The same state with other overrides."""
        return State(self.tapes, overrides, self.guard, self.region)

    def guarded(self, outer: tuple[Tape, ...], guard: Any) -> State:
        """The state in which a custom function runs: fewer tapes, and a guard.

        It is made once for all calls under this state. They follow each other, and calls
        inside calls run under states of their own; `guard` is theirs in turn.
        """
        inner = self.inner
        if inner is None or inner.tapes is not outer:
            inner = self.inner = State(outer, self.overrides, guard, self.region)
        inner.guard = guard
        return inner

    @property
    def inspected(self) -> bool:
        """Whether a tape is to see every op: what else is one record then runs op by op."""
        return self.tape is None and any(tape.keeps_all for tape in self.tapes)

    def __del__(self, discard=LIVE.discard) -> None:
        discard(id(self))


STATE: ContextVar[State | None] = ContextVar("regrad_state", default=None)
current = STATE.get


@contextmanager
def in_state(state: State | None) -> Iterator[None]:
    """Run a block under `state`, and put the former one back however the block ends."""
    token = STATE.set(state)
    try:
        yield
    finally:
        STATE.reset(token)


@contextmanager
def masked() -> Iterator[None]:
    """Run a block without overrides: what the library does for itself is not the user's op."""
    state = current()
    if state is None or state.overrides is None:
        yield
    else:
        with in_state(state.overriding(None)):
            yield


def watchers(tensor_id: int) -> list[Tape]:
    """The open tapes of this context that watch the tensor with this id."""
    state = current()
    return [] if state is None else [t for t in state.tapes if tensor_id in t.watched]
