"""A plugin of pytest for `mutants`: it runs the tests that are named, and notes what they execute.

REGRAD_HITS is a folder: for each test a line with its name, the probes that it executed and its
seconds is appended to a file there. REGRAD_TESTS is a file with the names of the tests to run.
"""

import builtins
import json
import os
import time
from pathlib import Path

import pytest

from tests.campaigns.mutant_sources import PROBE


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Note the probes of one test."""
    if not (folder := os.environ.get("REGRAD_HITS")):
        return (yield)
    hits = getattr(builtins, PROBE)
    hits.clear()
    start = time.perf_counter()
    result = yield
    line = json.dumps([item.nodeid, sorted(hits), round(time.perf_counter() - start, 4)])
    hits.clear()
    with Path(folder, f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    return result


def pytest_collection_modifyitems(config, items):
    """Keep the named tests, in the order of the names."""
    if wanted := os.environ.get("REGRAD_TESTS"):
        names = json.loads(Path(wanted).read_text(encoding="utf-8"))
        place = {name: i for i, name in enumerate(names)}
        items[:] = sorted(
            (item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid]
        )


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    """Note the test that fails."""
    if report.failed and (path := os.environ.get("REGRAD_FAILED")):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps([report.nodeid, report.longreprtext[-300:]]) + "\n")
