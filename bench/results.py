"""Records of runs: reads the tables in `results/` as rows.

`report.py` writes a file per run in Markdown: the date, the facts of the run, and for each suite a
heading with its table. Other text in a file, written by hand, is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench.report import HEADER, UNSTEADY, Row

RESULTS = Path(__file__).parent / "results"
VERDICTS = {"yes": True, "NO": False, "": None, UNSTEADY: None}


class Result(NamedTuple):
    """The rows of one suite, and the facts of their run."""

    suite: str
    date: str
    command: str  # including the load
    machine: str
    versions: str
    file: str
    alone: bool  # whether the run measured only this suite
    rows: list[Row]

    @property
    def place(self) -> str:
        """The machine, and the device if the command names one."""
        device = re.search(r"--device (\w+)", self.command)
        return f"{self.machine}, torch on {device[1]}" if device else self.machine

    @property
    def verdict(self) -> str:
        verdicts = [row.met for row in self.rows if row.met is not None]
        return f"{sum(verdicts)} of {len(verdicts)} bounds are met"


def read(path: Path) -> Iterator[Result]:
    """Return the suites of one file."""
    text = path.read_text(encoding="utf-8")
    head, *parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    facts = dict(re.findall(r"^- (\w+): (.+)$", head, re.MULTILINE))
    tables = {suite: rows_of(body) for suite, body in zip(parts[::2], parts[1::2], strict=True)}
    found = {suite: rows for suite, rows in tables.items() if rows}
    date = head.split()[3]
    for suite, rows in found.items():
        run = facts["Command"], facts["Machine"], facts["Versions"]
        yield Result(suite, date, *run, path.name, len(found) == 1, rows)


def rows_of(body: str) -> list[Row]:
    """Return the rows of the tables of figures in a text."""
    lines = [line for line in body.splitlines() if line.startswith("|")]
    split = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    # (tables from before the 26th of November 2026 lack the ratio of the peer to itself)
    whole = [c if len(c) == len(HEADER) else [*c[:5], "", *c[5:]] for c in split if len(c) > 6]
    figures = [cells for cells in whole if len(cells) == len(HEADER) and cells[-1] in VERDICTS]
    return named([Row(*c[:5], bound=c[6], met=VERDICTS[c[7]], again=c[5]) for c in figures])


def named(rows: list[Row]) -> list[Row]:
    """Return the rows with full titles: `its gradient` refers to the row before."""
    subject, found = "", []
    for row in rows:
        if row.title.startswith(("its ", "the same")):
            found.append(row._replace(title=f"{subject}: {row.title}"))
        else:
            subject = row.title.partition(",")[0]
            found.append(row)
    return found


def newest() -> dict[str, list[Result]]:
    """Return the last result of each suite in each place, the newest first.

    Of two results of the same day, a run of the suite alone counts, because it was run on purpose.
    """
    every = [result for path in RESULTS.glob("*.md") for result in read(path)]
    kept: dict[str, dict[str, Result]] = {}
    for result in sorted(every, key=lambda r: (r.date, r.alone, r.file), reverse=True):
        kept.setdefault(result.suite, {}).setdefault(result.place, result)
    return {suite: list(places.values()) for suite, places in kept.items()}


class Factor(NamedTuple):
    """A ratio with its quartiles, and its bound, if any."""

    median: float
    low: float
    high: float
    bound: float | None


def factor(row: Row) -> Factor | None:
    """Return the ratio of a row as numbers, or None if the row has no ratio."""
    found = [float(n) for n in re.findall(r"\d+\.\d+", row.ratio)]
    if not found:
        return None
    bound = re.fullmatch(r"≤ (\d+\.\d+) ×", row.bound)
    low, high = found[1:] or (found[0], found[0])
    return Factor(found[0], low, high, float(bound[1]) if bound else None)
