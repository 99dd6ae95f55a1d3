"""The open tapes and override scopes that are in force in the current thread and task.

The state is an immutable value in a context variable, so a thread starts with none and
an asyncio task with a copy. `LIVE` answers, without a context lookup, the question that
the eager road asks at each op: is a tape or a scope open *anywhere*? It knows the states
that exist; a state leaves it when the last context that knows it is gone, so the answer
stays right for tasks that outlive the scope in which they were made.

A thread starts without tapes, and what it computes is on none. `refuse_elsewhere` finds Tensors
that a tape of another context watches: their gradient would be lost there.
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

Overrides: TypeAlias = Mapping[Any, Any] | None  # those of `core.overrides`: here, their keys

LIVE: set[Any] = set()  # weak references to the states there are

# The tapes under which a function is running, in all contexts, and those of them that began while
# another context had one. (They are dicts because `del` is not a call: a signal's handler may raise
# after any call.)
OPEN: dict[Tape, None] = {}
BESIDE: dict[Tape, None] = {}

# never reused, unlike id(); 0 means "on no tape"
next_id: Callable[[], int] = itertools.count(1).__next__


class Recorder(Protocol):
    """Who is told of the plain ops of watched inputs: a tape, or the guard of a custom function."""

    watched: set[int]

    def write_unary(self, op: Op, x: Tensor, y: Tensor) -> None:
        """Take note of `y = op(x)`, where x is watched."""

    def write_binary(self, op: Op, a: Tensor, b: Tensor, y: Tensor) -> None:
        """Take note of `y = op(a, b)`, where a or b is watched."""


class State:
    """The tapes that record (outermost first), the overrides in force, the guard, the region.

    The guard watches over what a custom function closes over; the region, of `regrad.transforms`,
    knows what a compiled or repeated body takes from outside. In a gradient function, whose ops no
    override concerns, the overrides for the functions that it differentiates are held back, under
    keys of their own (see `held`).
    `plain` says that all tapes admit any record and keep what the rules name.
    Two words for the common cases: `tape` is the only tape, where nothing else is in force;
    `recorder` is told of the ops whose inputs it watches, on the fast path. (It is the only tape,
    or the guard that stands in its place; None sends all ops down the general path.)
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
        self.region: Any = region  # (Any: who makes a guard or region calls more of it than `core`)
        self.left: tuple[State | None] | None = None  # of a scope left out of turn: what was before
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
        # A state that only has a guard is needed no longer than the state around it, which is here.
        # (`discard` runs when the state goes, without a step of Python in which a signal's handler
        # could raise: what is raised in `__del__` is lost)
        if tapes or overrides is not None or region is not None:
            LIVE.add(weakref.ref(self, LIVE.discard))

    def taping(self, *tapes: Tape) -> State:
        """The state for a function that is differentiated: more tapes, which are the innermost."""
        return State((*self.tapes, *tapes), self.scopes, self.guard, self.region)

    def overriding(self, overrides: Overrides) -> State:
        """The same state with other overrides."""
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
        """True if a tape is to see every op: what else is one record then runs op by op.

        So it is where the tapes are to have different records of it (see `tape.put`).
        """
        if self.overrides and len(open_tapes(self)) > 1:
            return any(binding.once for binding in self.overrides.values())
        return not self.plain and any(tape.opens for tape in self.tapes)


# Followers of the overrides in force in this thread: `regrad.jax`, since JAX keeps traces by these
# messages. A follower returns two functions in C. The first sends the overrides, and the second
# sends the former message again.
FOLLOWERS: list[Callable[[Overrides], tuple[CCall, CCall]]] = []

STATE: ContextVar[State | None] = ContextVar("regrad_state", default=None)
current: Callable[[], State | None] = STATE.get


def telling(state: State | None) -> list[CCall]:
    """Return the C functions that send the overrides of a state to the followers."""
    overrides = None if state is None else state.overrides
    return [tell(overrides)[0] for tell in FOLLOWERS]


def open_tapes(state: State) -> tuple[Tape, ...]:
    """The tapes under which a function runs, the innermost last.

    A custom function suspends some of them, and they are open all the same.
    """
    tapes, guard = state.tapes, state.guard
    while guard is not None and not (tapes and tapes[-1] not in guard.tapes):
        tapes, guard = guard.tapes, guard.outer
    return tapes


@block
def in_state(state: State | None) -> Generator[None]:
    """Run a block under `state`, and put the former one back however the block ends.

    Each change is one call of `list`, of C functions in a `map`: no handler of a signal runs
    between two of them.
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
        if len(FOLLOWERS) > followers:  # JAX was first used in the block, and knows its overrides
            list(map(call, telling(before)))


HELD = "held"


def held(overrides: Overrides) -> Overrides:
    """Overrides for a gradient function that was made under them.

    They concern no op of its own, only the functions that it differentiates: no op is looked
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
    """Run a block without overrides: what the library does for itself is not the user's op."""
    state = current()
    return in_state(state if state is None or state.overrides is None else state.overriding(None))


def watchers(tensor_id: int) -> list[Tape]:
    """The open tapes of this context that watch the tensor with this id."""
    state = current()
    own = () if state is None else state.tapes
    found = [t for t in own if tensor_id in t.watched]
    return [*found, *elsewhere(tensor_id)] if state is None or BESIDE else found


# -- other contexts ------------------------------------------------------------------------------


def note_beside(tape: Tape, before: State | None) -> None:
    """Note that a tape was opened, in this state, while another context had one, if it was."""
    if not OPEN.keys() <= {tape, *_own_tapes(before)}:
        BESIDE[tape] = None


def elsewhere(tensor_id: int) -> list[Tape]:
    """The open tapes of other contexts that watch the tensor with this id."""
    if tensor_id <= 0:
        return []
    others = {tape for tape in list(OPEN) if tensor_id in tape.watched}
    return [*others.difference(_own_tapes(current()))] if others else []


def _own_tapes(state: State | None) -> Iterator[Tape]:
    """The tapes of a context, those included that a custom function or a region suspends."""
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
            f"{op_type}: another thread is differentiating an input of this call, whose gradient "
            "and overrides would be lost here: a thread starts without them. Carry the context "
            "over, with a copy for each call: pool.submit(contextvars.copy_context().run, f, x), "
            "or hand over a constant, stop_gradient(x)."
        )
