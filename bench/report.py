"""Rows of figures, and their text: a line on the screen, a table in Markdown."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import packages_distributions, version
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.timing import AGAIN, Effort, Ratio, ratio

HEADER = ("measure", "regrad", "against", "", "ratio (quartiles)", "peer : peer", "bound", "met")
WIDTHS = (40, 8, 15, 8, 22, 22, 9, 8)
STEADY = 0.05  # the largest deviation of a peer from itself that allows a verdict
UNSTEADY = "unsteady"
LIBRARIES = ("regrad", "numpy", "autograd", "torch", "tensorflow", "jax")


class Row(NamedTuple):
    """One comparison, or one figure with its bound."""

    title: str
    ours: str
    peer: str
    theirs: str
    ratio: str
    bound: str
    met: bool | None  # None: no bound, or an unsteady peer
    again: str = ""  # the ratio of the peer to itself


Measure = Callable[[Effort], Iterator[Row]]


def compared(
    title: str, samples: Mapping[str, list[float]], bounds: Mapping[str, float | None]
) -> Iterator[Row]:
    """Yield one row per peer: the median of each, and the median of the ratios.

    A row has a verdict only if the peer, measured twice in each round, agrees with itself.
    """
    ours = samples["regrad"]
    for peer, bound in bounds.items():
        r: Ratio = ratio(ours, samples[peer])
        twice: Ratio = ratio(samples[peer + AGAIN], samples[peer])
        steady = abs(twice.median - 1) <= STEADY
        yield Row(
            title,
            time(median(ours)),
            peer,
            time(median(samples[peer])),
            quartiles(r),
            "" if bound is None else f"≤ {times(bound)}",
            r.median <= bound if bound is not None and steady else None,
            quartiles(twice),
        )


def cells(row: Row) -> Sequence[str]:
    unknown = UNSTEADY if row.again and row.bound else ""
    verdict = {True: "yes", False: "NO", None: unknown}[row.met]
    return (*row[:5], row.again, row.bound, verdict)


def line(texts: Sequence[str]) -> str:
    """Return the line for a row on the screen."""
    padded = (text.ljust(width) for text, width in zip(texts, WIDTHS, strict=True))
    return "  ".join(padded).rstrip()


def summary(rows: Sequence[Row]) -> str:
    verdicts = [row.met for row in rows if row.met is not None]
    unsteady = sum(cells(row)[-1] == UNSTEADY for row in rows)
    more = f" No verdict for {unsteady} with an unsteady peer." if unsteady else ""
    return f"{sum(verdicts)} of {len(verdicts)} bounds are met.{more}"


def markdown(suites: Mapping[str, Sequence[Row]], load: float) -> str:
    """Return the whole report, with the rows by suite. `results.py` reads it."""
    command = " ".join(["python -m bench", *sys.argv[1:]])
    return "\n".join(
        [
            f"# Benchmark of {today()}",
            "",
            f"- Command: `{command}` (one thread, load average {load:.1f} at the start)",
            f"- Machine: {described()}",
            f"- Versions: Python {platform.python_version()}, "
            + ", ".join(versions())
            + f"; regrad at commit {commit()}",
            "",
            *(f"## {suite}\n\n{table(rows)}\n" for suite, rows in suites.items()),
            summary([row for rows in suites.values() for row in rows]),
            "How to read this: [bench/README.md](../README.md).",
            "",
        ]
    )


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table in Markdown."""
    rule = ["---", "--:", "---", "--:", "--:", "--:", "--:", "---"]
    return "\n".join(map(table_line, [HEADER, rule, *map(cells, rows)]))


def table_line(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"


MARK = re.compile(r"^\[\[(\w+)\]\]$", re.MULTILINE)


def marks(prose: str) -> list[str]:
    """Return the names of the tables that a page's prose has marks for, in order."""
    return MARK.findall(prose)


def filled(prose: str, blocks: Mapping[str, str]) -> str:
    """Return the prose of a page with a block in place of each line `[[name]]`."""
    return MARK.sub(lambda mark: blocks[mark[1]], prose)


def versions() -> Iterator[str]:
    """Return the versions of the libraries that were loaded."""
    packages = packages_distributions()  # (TensorFlow has several distribution names)
    for name in LIBRARIES:
        if name in sys.modules:
            package = packages.get(name, [name])[0]
            number = getattr(sys.modules[name], "__version__", None) or version(package)
            yield f"{package} {number}"


# -- the machine -----------------------------------------------------------------------------


def cpu() -> str:
    """Return the processor's model, but not the name of the machine."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.processor() or "unknown processor"


def cores() -> str:
    count = os.cpu_count() or 1
    return f"{count} core{'s' if count > 1 else ''}"


def gpus() -> list[str]:
    """Return the model of the GPU, if torch or JAX is loaded and has one."""
    if (torch := sys.modules.get("torch")) and torch.cuda.is_available():
        return [torch.cuda.get_device_name()]
    if (jax := sys.modules.get("jax")) and jax.default_backend() == "gpu":
        return [jax.devices()[0].device_kind]
    return []


def described() -> str:
    """Return a description of the machine."""
    return ", ".join([cpu(), cores(), *gpus(), f"{platform.system()} {platform.machine()}"])


def commit() -> str:
    """Return the measured commit. `-dirty` marks a source with uncommitted changes."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def today() -> str:
    return datetime.date.today().isoformat()


def slug() -> str:
    """Return the machine in a form for file names: `amd-epyc-2-cores`."""
    words = " ".join([cpu(), cores(), *gpus()])
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


# -- figures ---------------------------------------------------------------------------------


def time(seconds: float) -> str:
    """Format a time with three digits in a suitable unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def quartiles(r: Ratio) -> str:
    return f"{times(r.median)} ({r.low:.2f} to {r.high:.2f})"


def times(factor: float) -> str:
    return f"{factor:.2f} ×"


def megabytes(count: int) -> str:
    return f"{count / 1e6:.2f} MB"
