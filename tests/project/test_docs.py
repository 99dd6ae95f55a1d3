"""The README, the docstrings and the prose are executed."""

import doctest
import importlib
import os
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
from tests.helpers.optional import ABSENT
from tests.helpers.paths import ROOT
from tests.helpers.readme import installed_by, programs

pytestmark = pytest.mark.slow

ALL_PAGES = sorted((ROOT / "docs").rglob("*.md"))
README, SRC = ROOT / "README.md", str(ROOT / "src")
DEPRECATED = ["ignore:`torch.jit:DeprecationWarning", "ignore:`torch.jit:FutureWarning"]
# Each program of the README alone; those of another page build on each other.
RUNS = [(README, str(i)) for i in range(len(programs(README)))]
RUNS += [(page,) for page in ALL_PAGES if programs(page)]


@pytest.fixture(autouse=True)
def registered():
    """Forget the op types that a docstring registers: tables of other tests have all."""
    known, ufuncs = {*OPS}, {*UFUNCS}
    yield
    if new := {*OPS} - known:
        for op_type in new:
            del OPS[op_type]
        for ufunc in {*UFUNCS} - ufuncs:
            del UFUNCS[ufunc]
        clear()


@pytest.mark.parametrize("run", RUNS, ids=lambda run: "-".join([run[0].stem, *run[1:]]))
def test_programs_print_what_the_page_says(run, tmp_path):
    """In a process of their own: another test may have imported what a program forgot."""
    settings = {k: v for k, v in os.environ.items() if k != "JAX_ENABLE_X64"}  # a user has none
    warnings = [f"-W{w}" for w in ("error", *DEPRECATED)]
    command = [sys.executable, *warnings, ROOT / "tests/helpers/readme.py", *run]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True,
                          env={**settings, "MPLBACKEND": "agg", "PYTHONPATH": SRC})  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for name in re.findall("not run: No module named '(\\w+)", done.stdout):
        raise ModuleNotFoundError(name=name)  # the test is skipped if it is not installed


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "`pip install '.[torch]'` in a clone. It needs `pip install equinox`.",
            {"torch", "equinox"},
        ),
        ("pip install .   # or '.[jax]'", set()),
        ("pip install '.[export]'", {"jax", "optax", "flatbuffers"}),
    ],
)
def test_a_page_finds_what_the_text_above_installs(text, found):
    assert installed_by(text) - {"regrad"} == found


def test_programs_below_a_cell_with_tags_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```{code-cell}\n:tags: [remove-input]\nx = 1\n```\n\n```{code-cell}\nassert x == 2\n```\n"
    )
    drawing, after = programs(page)
    assert (drawing.code, after.code) == ("x = 1\n", "assert x == 2\n")
    assert "matplotlib" in drawing.installed and not after.installed


def test_a_program_does_not_find_what_the_text_above_does_not_install(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nimport numpy\nimport torch\n```\n")
    command = [sys.executable, ROOT / "tests/helpers/readme.py", page]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "No module named 'torch'" in done.stderr
    page.write_text("```python\nimport numpy\nprint(1)\n```\n\n```text\n2\n```\n")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "and the page says\n\n2" in done.stdout


PUBLIC = ["extend", "fft", "jax", "linalg", "losses", "nn", "plot", "random", "rules", "testing",
          "torch", "train", "v1"]  # fmt: skip


def test_the_public_modules_are_those():
    folder = ROOT / "src/regrad"
    found = {p.stem for p in folder.iterdir() if p.name[0] not in "_." and p.suffix in ("", ".py")}
    engine = {"autodiff", "checking", "core", "errors", "graph", "inspection", "ops", "shapes",
              "transforms"}  # fmt: skip
    assert found - engine == {*PUBLIC}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_module_needs_no_import(name):
    code = f"import regrad as rg; assert rg.{name}.__name__ == 'regrad.{name}'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 or name in ABSENT, done.stderr


NAMED = re.compile(r"`(\w+/test_\w+)\.py::(test_\w+)`")


def test_promises_of_reliability_have_their_tests():
    page = (ROOT / "docs/reliability.md").read_text()
    named = NAMED.findall(page)
    assert len(named) > 15
    for file, function in named:
        source = (ROOT / f"tests/{file}.py").read_text()
        assert f"def {function}(" in source, f"{file}.py::{function}"


def modules():
    found = pkgutil.walk_packages(regrad.__path__, "regrad.")
    return ["regrad", *sorted(m.name for m in found)]


@pytest.mark.parametrize(("want", "same"), [
    ("[1.57079, 2.]", True), ("[1.5709, 2.]", False), ("[1.57079, 2]", False),
    ("(1.57079, 2.)", False),
])  # fmt: skip
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


def links():
    front = [README, ROOT / "CONTRIBUTING.md"]
    for page in [*front, *ALL_PAGES]:
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        for target in re.findall(r"\]\(([^)#:]+)\)", prose):
            yield page, target


@pytest.mark.parametrize(("page", "target"), list(links()), ids=lambda v: getattr(v, "name", v))
def test_links_lead_somewhere(page, target):
    assert (page.parent / target).exists()
