"""Figures of cost in prose: one source, the newest record of a suite in `results/`.

Pages of the site write {ratio}`suite; measure; peer` for a ratio, and {since}`suite; commit` for
the number of commits that have changed the measured code since a run (docs/_ext/costs.py).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import NamedTuple

from bench.results import Result, factor

ROOT = Path(__file__).parents[1]
# The parts of src/regrad that a suite measures.
MEASURED = {
    "tape": ("autodiff", "core", "ops"),
    "graph": ("core", "graph", "ops", "v1"),
    "formulations": ("ops",),
    "jit": ("autodiff", "core", "ops", "transforms"),
    "calls": ("core", "transforms"),
    "torch": ("core", "rules", "torch"),
    "applied": ("core", "rules", "torch"),
    "compiled": ("core", "torch"),
    "jax": ("core", "jax"),
}


class Cost(NamedTuple):
    """A ratio as prose has it, and the run that it is from."""

    text: str
    date: str
    place: str


def cost(reference: str, found: Mapping[str, list[Result]]) -> Cost:
    """Return the ratio that `suite; measure; peer` names, from the newest run of the suite.

    The measure is a pattern: if several measures match `compiled call: *`, the ratio is a range.
    `torch @ *H100*` is the newest run on such a machine. ` / ` separates several ratios of one
    suite, and a later one leaves out the fields in front that are the same.
    """
    fields: list[str] = []
    texts = []
    for part in reference.split(" / "):
        given = [field.strip() for field in part.split(";")]
        fields = [*fields[: 3 - len(given)], *given]
        result = result_of(fields[0], found)
        texts.append(median(result, *fields[1:]))
    return Cost(" / ".join(texts), result.date, result.place)


def result_of(suite: str, found: Mapping[str, list[Result]]) -> Result:
    """Return the newest run of a suite, on a machine if `suite @ machine` names one."""
    name, _, place = (part.strip() for part in suite.partition("@"))
    runs = [run for run in found[name] if fnmatchcase(run.place, place or "*")]
    if not runs:
        raise ValueError(f"no record of {name} is from a machine {place!r}")
    return runs[0]


def median(result: Result, title: str, peer: str) -> str:
    """Return the median of the rows of a record that match, or the range of their medians."""
    rows = [row for row in result.rows if fnmatchcase(row.title, title) and row.peer == peer]
    ratios = [ratio.median for row in rows if (ratio := factor(row)) is not None]
    if not ratios:
        raise ValueError(f"{result.file} has no ratio of {title!r} against {peer!r}")
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return low if low == high else f"{low} to {high}"


def commit_of(result: Result) -> str:
    """Return the commit that a run measured."""
    found = re.search(r"commit ([0-9a-f]+)", result.versions)
    return found[1] if found else "unknown"


@cache
def since(suite: str, commit: str) -> str:
    """Return how many commits have changed the measured code since a commit: `3 commits`."""
    files = [f"src/regrad/{part}" for part in MEASURED[suite]]
    command = ["git", "rev-list", "--count", f"{commit}..HEAD", "--", *files]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return "an unknown number of commits"
    if done.returncode:  # a commit that was never published, or a checkout without history
        return "an unknown number of commits"
    count = int(done.stdout)
    return "1 commit" if count == 1 else f"{count or 'no'} commits"
