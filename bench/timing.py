"""Times, measured in turns: one sample of each contestant per round, for several rounds."""

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
    """The amount of measurement."""

    rounds: int
    seconds: float  # the minimal duration of one sample
    calls: int  # for measures that count instead of timing


class Ratio(NamedTuple):
    """A median with its quartiles."""

    low: float
    median: float
    high: float


def interleaved(samplers: Mapping[str, Sampler], rounds: int) -> dict[str, list[float]]:
    """Take samples A B C A B C …, so that disturbances of the machine affect all alike.

    Each peer is sampled twice in a round. Its ratio to itself shows the precision of a ratio.
    """
    peers = {name + AGAIN: sample for name, sample in samplers.items() if name != "regrad"}
    turns = {**samplers, **peers}
    samples: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, sample in turns.items():
            gc.collect()  # so that no sample pays for the garbage of another
            samples[name].append(sample())
    return samples


def sampler(call: Call, seconds: float, per: int = 1) -> Sampler:
    """Return the time per call (divided by `per`), over enough calls to fill the duration."""
    call()
    number = 1
    while (took := timed(call, number)) < seconds:
        number = max(2 * number, round(number * seconds / max(took, 1e-9)))
    return lambda: timed(call, number) / number / per


def timed(call: Call, number: int) -> float:
    """Return the seconds for `number` calls. The garbage collector is on, as in user code."""
    start = perf_counter()
    for _ in repeat(None, number):
        call()
    return perf_counter() - start


def ratio(ours: list[float], theirs: list[float]) -> Ratio:
    """Return the ratios of two contestants by round, because adjacent samples compare best."""
    return Ratio(*statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4))
