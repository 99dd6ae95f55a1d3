"""Run the measures and record the results: `python -m bench [SUITE] [--quick] [--only NAME]`.

`python -m bench page` rewrites docs/benchmarks.md from the records.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys

from bench import page, report
from bench.report import Measure, Row
from bench.results import RESULTS
from bench.timing import Effort

SUITES = {
    "tape": "bench.measures",
    "graph": "bench.graph",
    "formulations": "bench.formulations",
    "jit": "bench.jit",
    "calls": "bench.calls",
    "torch": "bench.foreign_torch",
    "compiled": "bench.compiled_torch",
    "jax": "bench.foreign_jax",
    "applied": "bench.applied",  # runs only by name, because it needs an extra
}
FULL = Effort(rounds=31, seconds=0.02, calls=10_000)
QUICK = Effort(rounds=7, seconds=0.005, calls=1_000)


def main() -> None:
    options = arguments()
    if options.suite == "page":
        page.write()
        return
    os.environ["REGRAD_BENCH_DEVICE"] = options.device
    suites = chosen(options.suite, options.only)
    load = os.getloadavg()[0]
    gc.freeze()  # collections during a measure must not scan the peers' own objects
    rows = run(suites, QUICK if options.quick else FULL)
    print(report.summary([row for found in rows.values() for row in found]))
    if options.quick or options.only:
        print("A part or a quick run is not recorded; `python -m bench` records a run.")
        return
    part = f"-{options.suite}" if options.suite else ""
    part += f"-{options.device}" if options.device != "cpu" else ""
    path = RESULTS / f"{report.today()}-{report.slug()}{part}.md"
    path.parent.mkdir(exist_ok=True)
    path.write_text(report.markdown(rows, load), encoding="utf-8")
    page.write()
    print(f"Written to bench/results/{path.name}; docs/benchmarks.md is updated")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("suite", nargs="?", choices=[*SUITES, "page"], help="this part only (all)")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--device", default="cpu", help="where torch's tensors lie: cpu, cuda")
    parser.add_argument("--only", metavar="NAME", action="append", help="a measure; repeatable")
    return parser.parse_args()


def chosen(suite: str | None, names: list[str] | None) -> dict[str, list[Measure]]:
    """Return the measures with these names, or all, of one suite or of all suites, by suite."""
    asked = [suite] if suite else [name for name in SUITES if name != "applied"]
    found = {s: importlib.import_module(SUITES[s]).MEASURES for s in asked}
    known = [name for measures in found.values() for name in measures]
    unknown = [n for n in names or () if n not in known]
    if unknown:
        sys.exit(f"unknown measures {', '.join(unknown)}; known are {', '.join(known)}")
    return {s: [m for n, m in ms.items() if not names or n in names] for s, ms in found.items()}


def run(suites: dict[str, list[Measure]], effort: Effort) -> dict[str, list[Row]]:
    """Run all measures and return their rows by suite. Rows are printed as they finish."""
    print(report.line(report.HEADER))
    rows: dict[str, list[Row]] = {}
    for suite, measures in suites.items():
        for measure in measures:
            for row in measure(effort):
                print(report.line(report.cells(row)), flush=True)
                rows.setdefault(suite, []).append(row)
    return rows


if __name__ == "__main__":
    main()
