"""Every sample of the op table on every road on which users reach a gradient (`tests/roads.py`).

    python -m tests.campaigns.roads            all samples, all roads (hours); `make proof` runs it
    python -m tests.campaigns.roads --quick    some samples on their own roads (a minute)

A whole run writes `tests/campaigns/results/roads.json`. The exit status is 1 if a road gave
something else than the plain eager gradient.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.campaigns import records
from tests.roads import ROADS, roads_for

PATH = records.RESULTS / "roads.json"
QUICK = 24  # every so many samples are taken in a quick run


def faults(name: str, quick: bool) -> tuple[int, list[str]]:
    """Return how many roads a sample was taken on, and a line for each that went wrong."""
    from tests.ops.test_roads import ROWS, check

    row = next(row for row in ROWS if str(row) == name)
    roads = roads_for(name) if quick else ROADS
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for road in roads:
            try:
                check(row, road)
            except Exception as error:  # (whatever it is, the road did not lead to the gradient)
                found.append(f"{name}: {road}: {type(error).__name__}: {error}"[:300])
    return len(roads), found


def names(quick: bool) -> list[str]:
    from tests.ops.test_roads import ROWS

    return [str(row) for row in ROWS][:: QUICK if quick else 1]


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    options, _ = parser.parse_known_args(args)  # (`make proof` also passes its own)
    start = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, context) as pool:
        found = list(pool.map(partial(faults, quick=options.quick), names(options.quick)))
    wrong = [line for _, lines in found for line in lines]
    counts = Counter(runs=sum(count for count, _ in found), wrong=len(wrong))
    print("\n".join([*wrong, f"roads: {counts['runs']} runs, {len(wrong)} wrong"]))
    if not options.quick:
        seconds = round(time.perf_counter() - start)
        facts = records.facts("tests.campaigns.roads")
        records.write(PATH, {**facts, "seconds": seconds, "counts": counts, "wrong": wrong})
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
