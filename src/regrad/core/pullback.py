"""Run a function under a tape, and propagate gradients back through its records."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from regrad.core import jobs
from regrad.core.dispatch import alias, as_dtype
from regrad.core.registry import OPS
from regrad.core.state import BESIDE, OPEN, STATE, State, current, note_beside
from regrad.core.tape import Tape
from regrad.core.tensor import Tensor
from regrad.core.walk import Grads, drain, seed, walk, walk_from


def run_taped(tape: Tape, f: Callable[..., Any], args: Sequence[Any] = ()) -> Any:
    """Run `f` with `tape` as the innermost tape. The tape is off afterwards in every case."""
    state = current()
    try:
        OPEN[tape] = None
        if jobs.INHERITS:
            jobs.settle()
        if len(OPEN) > 1 and (state is None or not state.tapes):
            note_beside(tape, state)
        STATE.set(State((tape,)) if state is None else state.taping(tape))
        return f(*args)
    finally:
        # A signal handler (Ctrl-C) may raise after any call, so the essential steps come first.
        if tape in OPEN:
            del OPEN[tape]
        if tape in BESIDE:
            del BESIDE[tape]
        STATE.set(state)
        if jobs.INHERITS:
            jobs.settle()


def pull_back(
    tape: Tape, y: Tensor, dy: Tensor | None, watched: set[int], *, again: bool = False
) -> Grads:
    """Return the gradients of `sum(y * dy)` for all values that the tape watches, by id."""
    if y._id not in watched:
        return {}
    records = reversed(tape.entries) if again else drain(tape.entries)
    return walk(records, {y._id: seed(y, dy)}, watched)


def pull_through(tape: Tape, ys: Sequence[Tensor], dys: Sequence[Tensor]) -> Grads:
    """Return the gradients of `sum(y * dy)` over all ys, for all values that the tape watches."""
    watched = tape.close()
    return walk_from(reversed(tape.entries), [y._id for y in ys], dys, watched)


def run_watched(
    tape: Tape, f: Callable[[list[Tensor]], Any], xs: Sequence[Tensor], wanted: Sequence[int]
) -> tuple[list[Tensor], Any]:
    """Return f's inputs and results, while a tape watches the inputs at the positions `wanted`.

    f gets aliases of these inputs, so that only this use of an input counts.
    """
    xs = list(xs)
    for i in wanted:
        xs[i] = alias(xs[i])
        tape.watched.add(xs[i]._id)
    return xs, run_taped(tape, f, (xs,))


def pulled(
    f: Callable[[list[Tensor]], Sequence[Tensor]], xs: Sequence[Tensor], wanted: Sequence[int],
    dys: Sequence[Tensor] | Callable[[Any], Any], reached: Sequence[int] | None = None,
) -> tuple[Sequence[Tensor], list[Tensor | None]]:  # fmt: skip
    """Return the results of f, and its gradients for the inputs at the positions `wanted`.

    The dys belong to the outputs at the positions `reached` (None: all), or are a function of the
    results. A gradient is None where nothing is connected.
    """
    tape = Tape()
    xs, ys = run_watched(tape, f, xs, wanted)
    seeds: Any = dys(ys) if callable(dys) else dys
    found = pull_through(tape, ys if reached is None else [ys[i] for i in reached], seeds)
    return ys, [found.get(xs[i]._id) for i in wanted]


def or_zeros(dx: Tensor | None, x: Tensor, dtype: np.dtype | None = None) -> Tensor:
    """Return a computed gradient, or zeros of x's shape, in x's dtype or in `dtype`."""
    if dx is None:
        return OPS["ZerosLike"].function(x, dtype=dtype)
    return dx if dtype is None or dx.dtype == dtype else as_dtype(dx, dtype)


Parts = Sequence[Any]  # Tensors, or arrays
# `run(step, state, entries)` repeats a step, from the last entry to the first: `(state, entry)` to
# the state and dxs. It returns the last state, and the dxs of all steps.
Run = Callable[[Callable[[Any, Any], Any], Any, Any], tuple[Any, Any]]


def pull_loop(
    pull: Callable[[Parts, Any], Parts], dcarry: Parts, shared: int, entries: Any, run: Run,
    sums: Parts | None = None, add: Callable[[Any, Any], Any] = operator.add,
) -> tuple[Parts, Parts | None, Any]:  # fmt: skip
    """Run the backward pass of a loop.

    Returns the gradients of the first carry, the gradients of the shared values, and the dxs.

    `pull(dcarry, entry)` returns the gradients of the loop's body: first for the carry, which pass
    to the previous step; then for the inputs of this step alone, the dxs; and last for the values
    that all steps share, which are summed. `shared` is the number of shared values. `sums` is None
    if there are no sums yet. Every loop uses this function for its backward pass, whether JAX, the
    engine, Python, or a session's program repeats the body.
    """

    def back(state: tuple[Parts, Parts | None], entry: Any) -> tuple[tuple[Parts, Parts], Parts]:
        dcarry, sums = state
        found = pull(dcarry, entry)
        n, k = len(dcarry), len(found) - shared
        more = found[k:] if sums is None else list(map(add, sums, found[k:]))
        return (found[:n], more), found[n:k]

    (dcarry, sums), dxs = run(back, (dcarry, sums), entries)
    return dcarry, sums, dxs
