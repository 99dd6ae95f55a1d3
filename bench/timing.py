"""Times, taken in turns: one sample of each contestant, and again, for some rounds."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping
from itertools import repeat
from time import perf_counter
from typing import NamedTuple

Call = Callable[[], object]
Sampler = Callable[[], float]  # takes one sample, in seconds

AGAIN = ", again"


class Effort(NamedTuple):
    """How much to measure."""

    rounds: int
    seconds: float  # how long one sample should take, at least
    calls: int  # for what is counted and not timed


class Ratio(NamedTuple):
    """A median with its quartiles."""

    low: float
    median: float
    high: float


def interleaved(samplers: Mapping[str, Sampler], rounds: int) -> dict[str, list[float]]:
    """Samples A B C A B C …, so that what disturbs the machine disturbs all alike.

    Each peer is sampled twice in a round: against itself it tells what such a ratio is worth.
    """
    peers = {name + AGAIN: sample for name, sample in samplers.items() if name != "regrad"}
    turns = {**samplers, **peers}
    samples: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, sample in turns.items():
            gc.collect()  # nobody pays for another's garbage
            samples[name].append(sample())
    return samples


def sampler(call: Call, seconds: float, per: int = 1) -> Sampler:
    """Time per call (divided by `per`), over as many calls as fill the time."""
    call()
    number = 1
    while (took := timed(call, number)) < seconds:
        number = max(2 * number, round(number * seconds / max(took, 1e-9)))
    return lambda: timed(call, number) / number / per


def timed(call: Call, number: int) -> float:
    """Seconds for `number` calls. The garbage collector is on, as it is for users."""
    start = perf_counter()
    for _ in repeat(None, number):
        call()
    return perf_counter() - start


def ratio(ours: list[float], theirs: list[float]) -> Ratio:
    """Ours to theirs, round by round: neighbours in time have the machine in common."""
    return Ratio(*statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4))
