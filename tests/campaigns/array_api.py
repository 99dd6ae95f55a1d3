"""The Array API standard's own tests, against regrad and against NumPy.

    python -m tests.campaigns.array_api --suite CHECKOUT --revision COMMIT [--examples 50]

CHECKOUT is data-apis/array-api-tests with its submodule; the suite needs `pip install hypothesis
ndindex pytest-json-report`. The outcome is recorded in `results/array_api.json`, and
`docs/array_api.md` is made of it. Fails if a test fails for regrad and not for NumPy.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.helpers.paths import ROOT

STANDARD = "2024.12"
RECORD = Path(__file__).parent / "results" / "array_api.json"
PAGE = ROOT / "docs" / "array_api.md"
PROSE = Path(__file__).parent / "results" / "array_api_prose.md"
IMMUTABLE = "it writes into the array (`x[i] = v`), but Tensors are immutable; the standard allows"
SKIPS = {  # by id: why it cannot pass
    "test_array_object.py::test_setitem": f"{IMMUTABLE} this, as in JAX: use `at_set`",
    "test_array_object.py::test_setitem_masking": f"{IMMUTABLE} this, as in JAX: use `where`",
    "test_creation_functions.py::test_asarray_arrays": f"{IMMUTABLE} this; the test "
    "checks `copy` by writing",
    "test_dlpack.py::test_dunder_dlpack": "it exports memory with `copy=False` and no "
    "`max_version`, where DLPack cannot flag it as read-only: a BufferError, because Tensors are "
    "immutable",
    "test_data_type_functions.py::test_can_cast": "it looks dtypes up in a table and compares "
    "a missing entry, None, with float64; regrad uses NumPy's dtypes, and "
    "`np.dtype('float64') == None` is true in NumPy",
}


def run(module: str, suite: Path, examples: int, skips: bool) -> dict[str, list[str]]:
    """Run the suite for a module; the tests by outcome."""
    with tempfile.TemporaryDirectory() as folder:
        listed, report = Path(folder, "skips.txt"), Path(folder, "report.json")
        listed.write_text("\n".join(f"array_api_tests/{name}" for name in SKIPS if skips))
        command = [
            sys.executable, "-m", "pytest", "array_api_tests", "-q", "--tb=no",
            f"--max-examples={examples}", "--hypothesis-seed=0", "--hypothesis-disable-deadline",
            "--continue-on-collection-errors", "-p", "no:cacheprovider", "-p", "no:jaxtyping",
            f"--skips-file={listed}", "--json-report", f"--json-report-file={report}",
        ]  # fmt: skip
        named = {"ARRAY_API_TESTS_MODULE": module, "ARRAY_API_TESTS_VERSION": STANDARD}
        subprocess.run(command, cwd=suite, env={**os.environ, **named}, check=False)
        return by_outcome(json.loads(report.read_text(encoding="utf-8")))


def by_outcome(report: dict[str, Any]) -> dict[str, list[str]]:
    """The tests of a report, and the modules that could not be collected, by outcome."""
    found: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    for test in report["tests"]:
        outcome = "failed" if test["outcome"] == "error" else test["outcome"]
        found[outcome].append(test["nodeid"].removeprefix("array_api_tests/"))
    found["failed"] += [c["nodeid"] for c in report["collectors"] if c["outcome"] == "failed"]
    return {outcome: sorted(names) for outcome, names in found.items()}


def excess(record: dict[str, Any]) -> list[str]:
    """What fails for regrad and not for NumPy."""
    return sorted(set(record["regrad"]["failed"]) - set(record["numpy"]["failed"]))


def page(record: dict[str, Any]) -> str:
    """The page of the docs, of what is recorded."""
    ours, theirs = record["regrad"], record["numpy"]
    rows = [
        f"| {name} | {len(found['passed'])} | {len(found['failed'])} | {len(found['skipped'])} |"
        for name, found in ((f"regrad {record['versions']['regrad']}", ours),
                            (f"NumPy {record['versions']['numpy']}", theirs))
    ]  # fmt: skip
    beyond = [name for name in ours["skipped"] if name not in theirs["skipped"]]
    lines = [
        PROSE.read_text(encoding="utf-8").rstrip(),
        "", "## The standard's tests", "",
        f"`data-apis/array-api-tests` {record['suite'][:7]} for {STANDARD}, "
        f"{record['examples']} examples per test, {record['date']}:",
        "", "| | passed | failed | skipped |", "|---|---|---|---|", *rows, "",
        "`python -m tests.campaigns.array_api --suite CHECKOUT --revision COMMIT` runs the suite "
        "and writes this page.", "",
        "These tests are skipped for regrad, in addition to the tests that are skipped for NumPy "
        "(tests of later standards):", "",
        *[f"* `{name}`: {SKIPS[name]}." for name in beyond], "",
        f"All {len(ours['failed'])} failing tests also fail for NumPy:", "",
        *[f"* `{name}`" for name in ours["failed"]], "",
    ]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    """Run the suite twice, record what it says, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", type=Path, required=True, help="a checkout of array-api-tests")
    parser.add_argument("--revision", required=True, help="the commit that is checked out")
    parser.add_argument("--examples", type=int, default=50)
    options = parser.parse_args()
    record = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "suite": options.revision,
        "examples": options.examples,
        "versions": {name: version(name) for name in ("regrad", "numpy", "hypothesis")},
        "numpy": run("numpy", options.suite, options.examples, skips=False),
        "regrad": run("regrad", options.suite, options.examples, skips=True),
    }
    if excess(record):
        sys.exit("fails for regrad alone:\n" + "\n".join(excess(record)))
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(record), encoding="utf-8")


if __name__ == "__main__":
    main()
