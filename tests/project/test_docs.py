"""The README, the docstrings and the prose are executed."""

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys

import pytest

import regrad
from regrad.core.registry import OPS
from regrad.ops.numpy_protocol import UFUNCS
from regrad.torch.optypes import clear
from tests.helpers.docstrings import Close
from tests.helpers.foreign_table import PAGE, with_tables
from tests.helpers.paths import ROOT
from tests.helpers.readme import BLOCK, printed_by

ALL_PAGES = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [
    page.relative_to(ROOT).as_posix()
    for page in [ROOT / "README.md", *ALL_PAGES]
    if BLOCK.search(page.read_text(encoding="utf-8"))
]


@pytest.fixture(autouse=True)
def registered():
    """Forget the op types that a page or docstring registers: tables of other tests have all."""
    known, ufuncs = {*OPS}, {*UFUNCS}
    yield
    if new := {*OPS} - known:
        for op_type in new:
            del OPS[op_type]
        for ufunc in {*UFUNCS} - ufuncs:
            del UFUNCS[ufunc]
        clear()


@pytest.mark.parametrize("page", PAGES)
def test_programs_print_what_the_page_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where they write files
    for printed, expected in printed_by(ROOT / page):
        assert printed == expected


def test_the_readme_holds_in_a_process_of_its_own():
    """Other tests have imported what a program may have forgotten to import."""
    command = [sys.executable, "tests/helpers/readme.py", "README.md"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


NAMED = re.compile(r"`(\w+/test_\w+)\.py::(test_\w+)`")


def test_promises_of_reliability_have_their_tests():
    page = (ROOT / "docs/reliability.md").read_text()
    named = NAMED.findall(page)
    assert len(named) > 15
    for file, function in named:
        source = (ROOT / f"tests/{file}.py").read_text()
        assert f"def {function}(" in source, f"{file}.py::{function}"


def test_tables_of_torch_callables_are_those_of_the_code():
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page) == page, "run python -m tests.helpers.foreign_table"


def modules():
    found = pkgutil.walk_packages(regrad.__path__, "regrad.")
    return ["regrad", *sorted(m.name for m in found)]


@pytest.mark.parametrize(
    ("want", "same"),
    [
        ("[1.57079, 2.]", True),
        ("[1.5709, 2.]", False),
        ("[1.57079, 2]", False),
        ("(1.57079, 2.)", False),
    ],
)
def test_examples_may_differ_in_the_last_digits(want, same):
    assert Close().check_output(want, "[1.5707964, 2.]", 0) is same


@pytest.mark.parametrize("name", modules())
def test_docstrings(name):
    module = importlib.import_module(name)
    finder = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(Close(), optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in finder.find(module, globs={}):
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


def public_functions():
    parts = ["nn", "losses", "linalg", "random", "train", "jax"]
    for name in ["regrad", *(f"regrad.{part}" for part in parts)]:
        for key, value in vars(importlib.import_module(name)).items():
            if callable(value) and not key.startswith("_"):
                yield pytest.param(value, id=f"{name}.{key}")


@pytest.mark.parametrize("function", list(public_functions()))
def test_public_functions_have_docstrings(function):
    assert function.__doc__


# Links that are read far from the repository's files, as those of README.md on a package index.
ABROAD = r"\]\(https://(?:github\.com|raw\.githubusercontent\.com)/regrad/regrad/(?:blob/)?main/([^)#]+)\)"


def links():
    front = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for page in [*front, *ALL_PAGES]:
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        for target in re.findall(r"\]\(([^)#:]+)\)", prose):
            yield page, target
        for target in re.findall(ABROAD, prose):
            yield ROOT / "README.md", target


@pytest.mark.parametrize(("page", "target"), list(links()), ids=lambda v: getattr(v, "name", v))
def test_links_lead_somewhere(page, target):
    assert (page.parent / target).exists()
