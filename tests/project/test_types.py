"""The types of the package as a user's checker sees them, and that the stubs are current."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import mypy  # noqa: F401 (without the checkers there is nothing to run)
import pyright  # noqa: F401
import pytest
import ruff  # noqa: F401

from tests.helpers import stubs, typed_program
from tests.helpers.paths import ROOT

MISTAKES = ROOT / "tests" / "helpers" / "typed_mistakes.py"

CHECKERS = {
    "mypy": ["mypy", "--strict", "--no-error-summary", "--cache-dir"],
    "pyright": ["pyright", "--pythonpath", sys.executable],
}


def run(name, directory, *arguments):
    """The lines that a checker prints, run where the project's settings are not in force."""
    command = [sys.executable, "-m", *CHECKERS[name]]
    if name == "mypy":
        command.append(str(directory / "cache"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [*command, *arguments], cwd=directory, env=environment, capture_output=True, text=True
    )
    return done.stdout.splitlines()


def errors(name, directory, file):
    """The numbers of the lines in which a checker finds errors, with what it says."""
    (directory / "user.py").write_text(Path(file).read_text())
    lines = run(name, directory, "user.py")
    found = [re.search(r"user\.py:(\d+)\b.*\berror: (.*)", line) for line in lines]
    return {int(m[1]): m[2] for m in found if m}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Where checkers run; mypy keeps there what it has learned of the package."""
    return tmp_path_factory.mktemp("types")


@pytest.mark.slow
@pytest.mark.parametrize("checker", CHECKERS)
def test_a_program_is_clean(checker, directory):
    assert errors(checker, directory, typed_program.__file__) == {}


def test_the_program_runs():
    assert typed_program.main() > 0


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("checker", CHECKERS)
def test_mistakes_are_errors(checker, directory):
    lines = MISTAKES.read_text().splitlines()
    marked = {n for n, line in enumerate(lines, 1) if "# error: " in line}
    assert errors(checker, directory, MISTAKES).keys() == marked != set()


@pytest.mark.slow
def test_the_types_of_the_package_are_known(directory):
    report = json.loads("\n".join(
        run("pyright", directory, "--verifytypes", "regrad", "--ignoreexternal", "--outputjson")
    ))["typeCompleteness"]  # fmt: skip
    assert report["completenessScore"] >= 0.99
    unknown = {s["name"] for s in report["symbols"] if s["isExported"] and not s["isTypeKnown"]}
    assert [name for name in unknown if re.fullmatch(r"regrad\.\w+", name)] == []


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("module", stubs.MODULES)
def test_stubs_are_current(module):
    written = stubs.path_of(module).read_text()
    assert written == stubs.stub(module), "run python -m tests.helpers.stubs"
