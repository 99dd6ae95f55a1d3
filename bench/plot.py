"""A picture of ratios. Each row is a dot with a bar from quartile to quartile, by suite."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from bench.report import Row
from bench.results import factor

COLOURS = {True: "#1a7f37", False: "#cf222e", None: "#6e7781"}  # by verdict
LOW, HIGH = 0.015, 12  # the limits of the axis; all ratios lie within
INCH = 0.165  # the height of a row


def draw(suites: Iterable[tuple[str, list[Row]]], path: Path, digest: str) -> None:
    """Write the picture. `digest` goes into its metadata, to identify the figures."""
    lines = [line for title, rows in suites for line in lines_of(title, rows)]
    with picture(path, (9.5, INCH * len(lines) + 0.9), digest) as axes:
        for y, (label, row) in enumerate(lines):
            mark(axes, y, label, row)
        dress(axes, len(lines))


@contextmanager
def picture(path: Path, size: tuple[float, float], digest: str) -> Iterator[Any]:
    """Yield the axes of a picture, which is written as SVG when the block ends.

    The file does not depend on the day or the machine, except through `digest`.
    """
    # (text stays text, which takes a tenth of the size of outlines and can be searched)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "regrad", "font.size": 8}):
        figure = Figure(figsize=size, layout="constrained")
        yield figure.subplots()
        figure.savefig(path, metadata={"Date": None, "Creator": None, "Description": digest})


def lines_of(title: str, rows: list[Row]) -> list[tuple[str, Row | None]]:
    """Draw an empty line, a heading, and the rows that have a ratio."""
    found = [(f"{row.title}, against {row.peer}", row) for row in rows if factor(row)]
    return [("", None), (title, None), *found]


def mark(axes: Any, y: int, label: str, row: Row | None) -> None:
    found = row and factor(row)
    if row is None or not found:
        axes.text(0, y, label, transform=axes.get_yaxis_transform(), va="center", weight="bold")
        return
    if found.bound is not None:
        axes.plot([found.bound] * 2, [y - 0.4, y + 0.4], color="black", lw=1.2)
    axes.plot([found.low, found.high], [y, y], color=COLOURS[row.met], lw=2, alpha=0.5)
    axes.plot(found.median, y, "o", color=COLOURS[row.met], ms=4)
    axes.annotate(label, (0, y), (-4, 0), axes.get_yaxis_transform(), "offset points",
                  ha="right", va="center")  # fmt: skip


def dress(axes: Any, count: int) -> None:
    """Draw the axis: logarithmic, with a line at the ratio 1."""
    axes.set_xscale("log")
    axes.set(xlim=(LOW, HIGH), ylim=(count - 0.3, 0.3), yticks=[])
    ticks = [0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10]
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    axes.grid(axis="x", color="#d0d7de", lw=0.5)
    axes.axvline(1, color="black", lw=0.8)
    axes.tick_params(labeltop=True, top=True)
    axes.set_xlabel("time of regrad / time of the peer")
    axes.spines[["left", "right"]].set_visible(False)
