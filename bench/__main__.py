"""Run the measures and write the figures down: `python -m bench [--quick] [--only NAME]`."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from pathlib import Path

from bench import report
from bench.measures import MEASURES, Measure
from bench.report import Row
from bench.timing import Effort

RESULTS = Path(__file__).parent / "results"
FULL = Effort(rounds=31, seconds=0.02, calls=10_000)
QUICK = Effort(rounds=7, seconds=0.005, calls=1_000)


def main() -> None:
    options = arguments()
    measures = chosen(options.only)
    load = os.getloadavg()[0]
    gc.freeze()  # the peers' own objects are not to be looked through during a measure
    rows = run(measures, QUICK if options.quick else FULL)
    print(report.summary(rows))
    if options.quick or options.only:
        print("A part or a quick run is not written down; `python -m bench` writes one.")
        return
    path = RESULTS / f"{report.today()}-{report.slug()}.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text(report.markdown(rows, load), encoding="utf-8")
    print(f"Written to bench/results/{path.name}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument(
        "--only", metavar="NAME", action="append", help=f"one of {', '.join(MEASURES)}; repeatable"
    )
    return parser.parse_args()


def chosen(names: list[str] | None) -> dict[str, Measure]:
    """The measures of these names, or all."""
    unknown = [n for n in names or () if n not in MEASURES]
    if unknown:
        sys.exit(f"no measure is called {', '.join(unknown)}; there are {', '.join(MEASURES)}")
    return {n: m for n, m in MEASURES.items() if not names or n in names}


def run(measures: dict[str, Measure], effort: Effort) -> list[Row]:
    """The rows of all measures, printed as they come."""
    print(report.line(report.HEADER))
    rows = []
    for measure in measures.values():
        for row in measure(effort):
            print(report.line(report.cells(row)), flush=True)
            rows.append(row)
    return rows


if __name__ == "__main__":
    main()
