"""Run the measures and write them down: `python -m bench [SUITE] [--quick] [--only NAME]`."""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
from pathlib import Path

from bench import report
from bench.report import Measure, Row
from bench.timing import Effort

SUITES = {
    "tape": "bench.measures",
    "graph": "bench.graph",
    "formulations": "bench.formulations",
    "jit": "bench.jit",
    "calls": "bench.calls",
    "torch": "bench.foreign_torch",
    "jax": "bench.foreign_jax",
}
RESULTS = Path(__file__).parent / "results"
FULL = Effort(rounds=31, seconds=0.02, calls=10_000)
QUICK = Effort(rounds=7, seconds=0.005, calls=1_000)


def main() -> None:
    options = arguments()
    os.environ["REGRAD_BENCH_DEVICE"] = options.device
    measures = chosen(options.suite, options.only)
    load = os.getloadavg()[0]
    gc.freeze()  # the peers' own objects are not to be looked through during a measure
    rows = run(measures, QUICK if options.quick else FULL)
    print(report.summary(rows))
    if options.quick or options.only:
        print("A part or a quick run is not written down; `python -m bench` writes one.")
        return
    part = f"-{options.suite}" if options.suite else ""
    part += f"-{options.device}" if options.device != "cpu" else ""
    path = RESULTS / f"{report.today()}-{report.slug()}{part}.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text(report.markdown(rows, load), encoding="utf-8")
    print(f"Written to bench/results/{path.name}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("suite", nargs="?", choices=SUITES, help="this part only (or else all)")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--device", default="cpu", help="where torch's tensors lie: cpu, cuda")
    parser.add_argument("--only", metavar="NAME", action="append", help="a measure; repeatable")
    return parser.parse_args()


def chosen(suite: str | None, names: list[str] | None) -> dict[str, Measure]:
    """The measures of these names, or all, of one suite or of all."""
    measures: dict[str, Measure] = {}
    for module in [SUITES[suite]] if suite else SUITES.values():
        measures |= importlib.import_module(module).MEASURES
    unknown = [n for n in names or () if n not in measures]
    if unknown:
        sys.exit(f"no measure is called {', '.join(unknown)}; there are {', '.join(measures)}")
    return {n: m for n, m in measures.items() if not names or n in names}


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
