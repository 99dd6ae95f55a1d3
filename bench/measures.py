"""The table of measures. A measure is called with an `Effort` and yields rows of figures."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

import regrad as rg
from bench import contestants
from bench.contestants import (
    Contestants,
    Function,
    chain,
    in_autograd,
    in_regrad,
    regrad_square,
)
from bench.report import Measure, Row, compared, megabytes
from bench.timing import Call, Effort, Sampler, interleaved, sampler

LAZY = ("jax", "torch", "matplotlib", "optax", "scipy.special")  # not for `import regrad`


@dataclass(frozen=True)
class Speed:
    """The time of regrad against the times of its peers."""

    title: str
    contestants: Callable[[], Contestants]
    bounds: Mapping[str, float]  # by peer: the largest allowed ratio to its time
    per: Mapping[str, int] = field(default_factory=dict)  # the number of ops per call
    rounds: int | None = None  # fewer rounds for slow calls

    def __call__(self, effort: Effort) -> Iterator[Row]:
        samplers = {
            name: sampler(call, effort.seconds, self.per.get(name, 1))
            for name, call in self.contestants().items()
        }
        rounds = min(self.rounds or effort.rounds, effort.rounds)
        yield from compared(self.title, interleaved(samplers, rounds), self.bounds)


# -- memory ----------------------------------------------------------------------------------


def memory(effort: Effort) -> Iterator[Row]:
    """The memory that a tape keeps for 100 additions of 1 MB, and the peak memory."""
    ours, our_peak = traced(in_regrad)
    theirs, their_peak = traced(in_autograd)
    figures = megabytes(ours), "autograd", megabytes(theirs)
    yield Row("kept by 100 adds of 1 MB", *figures, "", "≤ 3 MB", ours <= 3e6)
    figures = megabytes(our_peak), "autograd", megabytes(their_peak)
    yield Row("peak, with the backward pass", *figures, "", "", None)


def traced(library: Callable[[Function, np.ndarray], Call]) -> tuple[int, int]:
    """Return the bytes held after the forward pass, with the tape alive, and the call's peak.

    The input existed before. Every addition makes a new array, so a tape that holds inputs or
    outputs would hold 100 MB. The result of the last addition counts, which is 1 MB.
    """
    readings = []

    def f(x):
        y = chain(lambda x: x + x)(x)
        readings.append(tracemalloc.get_traced_memory()[0])
        return y

    call = library(f, np.ones(125_000))
    call()  # objects that are made once and cached do not count
    gc.collect()
    tracemalloc.start()
    try:
        call()
        return readings[-1], tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# -- import ----------------------------------------------------------------------------------


def importing(effort: Effort) -> Iterator[Row]:
    """The time of `import regrad` in a new process, and the optional packages that it loads."""
    with tempfile.TemporaryDirectory() as cache:
        samplers = {"regrad": import_of("regrad", cache), "import numpy": import_of("numpy", cache)}
        for sample in samplers.values():
            sample()  # writes byte code, which both then read, as for an installed package
        samples = interleaved(samplers, min(effort.rounds, 15))
        yield from compared("import regrad", samples, {"import numpy": 1.45})
        loaded = fresh(
            f"import regrad, sys; print(*[m for m in {LAZY} if m in sys.modules])", cache
        )
    yield Row("optional packages that it loads", loaded or "none", "", "", "", "none", not loaded)


def import_of(module: str, cache: str) -> Sampler:
    code = (
        "from time import perf_counter; start = perf_counter(); "
        f"import {module}; print(perf_counter() - start)"
    )
    return lambda: float(fresh(code, cache))


def fresh(code: str, cache: str) -> str:
    """Return the output of a new interpreter for this code. Byte code goes to `cache`."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPYCACHEPREFIX"] = cache
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, env=env
    ).stdout.strip()


# -- leaks -----------------------------------------------------------------------------------


def objects(effort: Effort) -> Iterator[Row]:
    """The number of additional objects that are alive after many calls, compared with few."""
    for what, work in (("gradient calls", gradient_calls), ("override scopes", override_scopes)):
        grown = growth(work, effort.calls)
        title = f"objects alive after {effort.calls:,} {what}"
        yield Row(title, f"{grown:+,}", "", "", "", "no growth", grown <= 0)


def growth(work: Callable[[int], None], calls: int) -> int:
    """Return the increase of objects that the garbage collector tracks over `calls` calls."""
    work(200)
    before = alive()
    work(calls)
    return alive() - before


def alive() -> int:
    gc.collect()
    return len(gc.get_objects())


def gradient_calls(count: int) -> None:
    """Use new functions and new tensors each time, which no cache may hold."""
    for i in range(count):
        rg.grad(lambda x: regrad_square(x) * x)(rg.tensor([float(i)]))


def override_scopes(count: int) -> None:
    for i in range(count):
        with rg.gradient_override_map({"Sign": lambda dy, x: dy * x}):
            rg.grad(rg.sign)(rg.tensor([float(i)]))


def by_builtin() -> Contestants:
    """The same rule through the op's own gradient (`builtin`), and as a formula."""

    def under(rule: object) -> Call:
        f, x = rg.grad(lambda x: rg.sum(chain(rg.sin, 20)(x))), rg.tensor(contestants.SMALL)
        return rg.gradient_override_map({"Sin": rule})(lambda: f(x))

    return {
        "regrad": under(lambda dy, builtin: 0.5 * builtin(dy)),
        "formula": under(lambda dy, x: 0.5 * (dy * rg.cos(x))),
    }


# -- the table -------------------------------------------------------------------------------

MEASURES: dict[str, Measure] = {
    "program-7": Speed(
        "program 7: a custom op of 4 elements",
        contestants.program_7,
        {"autograd": 0.9, "torch": 0.5},
    ),
    "custom-chain": Speed(
        "100 custom ops", contestants.custom_chain, {"autograd": 0.9, "torch": 0.5}
    ),
    "sin-chain": Speed("100 sin", contestants.sin_chain, {"autograd": 0.45, "torch": 0.65}),
    "multiply-chain": Speed(
        "100 x * x", contestants.multiply_chain, {"autograd": 0.4, "torch": 0.8}
    ),
    "cubes": Speed("x**3 of 50 elements", contestants.cubes, {"autograd": 0.65, "torch": 1.0}),
    "no-tape": Speed(
        "x * x of 4 elements, no tape",
        contestants.no_tape,
        {"numpy.multiply": 2.5},
        per={"regrad": 1000, "numpy.multiply": 1000},
    ),
    "deep-chain": Speed(
        "per op at 100,000 sin",
        contestants.deep_chain,
        {"regrad at 1,000": 1.25},
        per={"regrad": 100_000, "regrad at 1,000": 1000},
        rounds=9,
    ),
    "builtin": Speed("20 sin, rule by builtin", by_builtin, {"formula": 1.2}),
    "memory": memory,
    "import": importing,
    "objects": objects,
}
