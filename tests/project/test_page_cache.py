"""The outputs of pages are kept under a key: each part of the key is needed.

`docs/_ext/page_cache.py` writes the key in one function. Each test runs a page, changes one thing
that the output of the page depends on, and finds the old output if the key leaves that thing out.
"""

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.helpers.paths import DOCS

PARTS = ("sources", "libraries", "python", "settings")


def load():
    spec = importlib.util.spec_from_file_location("page_cache", DOCS / "_ext/page_cache.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


page_cache = load()
CONTENTS = {
    "sources": [("src/regrad/ops.py", b"def sin(x): ...")],
    "libraries": [("jax", "0.10.2"), ("torch", "2.15.0")],
    "python": "CPython 3.11.7 x86_64",
    "settings": {"JAX_ENABLE_X64": "1"},
}
CHANGED = {
    "sources": [
        [("src/regrad/ops.py", b"def sin(x): return x")],
        [("src/regrad/new.py", b"def sin(x): ...")],  # the same content in another file
        [*CONTENTS["sources"], ("src/regrad/new.py", b"")],
        [],
    ],
    "libraries": [[("jax", "0.10.3"), ("torch", "2.15.0")], [("jax", "0.10.2")]],
    "python": ["CPython 3.12.1 x86_64", "CPython 3.11.7 aarch64"],
    "settings": [{"JAX_ENABLE_X64": "0"}, {}],
}
CASES = [pytest.param(p, other, id=f"{p}{i}") for p in PARTS for i, other in enumerate(CHANGED[p])]


class Kept:
    """Outputs by key, as the folder keeps them; `without` is the part that a key leaves out."""

    def __init__(self, without=None):
        self.without, self.outputs, self.runs = without, {}, 0

    def output(self, contents):
        given = contents
        if self.without:
            given = {**contents, self.without: type(CONTENTS[self.without])()}
        key = page_cache.key(**given)
        if key not in self.outputs:
            self.runs += 1
            self.outputs[key] = repr(contents)  # the output of the page depends on everything
        return self.outputs[key]


@pytest.mark.parametrize(("part", "other"), CASES)
def test_a_change_of_each_part_runs_the_pages_again(part, other):
    kept, now = Kept(), {**CONTENTS, part: other}
    assert kept.output(CONTENTS) == repr(CONTENTS)
    assert kept.output(now) == repr(now)
    kept.output(CONTENTS), kept.output(now)
    assert kept.runs == 2  # and nothing else does


@pytest.mark.parametrize(("part", "other"), CASES)
def test_without_a_part_of_the_key_the_output_is_stale(part, other):
    kept, now = Kept(without=part), {**CONTENTS, part: other}
    kept.output(CONTENTS)
    assert kept.output(now) == repr(CONTENTS) != repr(now)


def test_the_order_of_files_and_libraries_does_not_count():
    backwards = {k: v[::-1] if isinstance(v, list) else v for k, v in CONTENTS.items()}
    assert page_cache.key(**backwards) == page_cache.key(**CONTENTS)


def test_names_and_contents_are_not_confused():
    one = {**CONTENTS, "sources": [("a", b"1\nb 1\n2")]}
    two = {**CONTENTS, "sources": [("a", b"1"), ("b", b"2")]}
    assert page_cache.key(**one) != page_cache.key(**two)


# -- what this checkout hands to the key -----------------------------------------------------------


def test_the_sources_are_those_that_a_program_imports(monkeypatch, tmp_path):
    names = {name for name, _ in page_cache.sources()}
    assert {"src/regrad/__init__.py", "src/regrad/py.typed"} <= names
    assert not [n for n in names if "__pycache__" in n]
    program = (
        "import sys, regrad as rg; from regrad import nn, rules, v1; rg.grad(rg.sin)(1.0);"
        "print(*[m.__file__ for m in sys.modules.values() if 'regrad' in m.__name__], sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    loaded = {os.path.relpath(f, page_cache.ROOT) for f in done.stdout.split()}
    assert len(loaded) > 50 and loaded <= names
    monkeypatch.setattr(page_cache, "ROOT", tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.py").write_text("1")
    before = page_cache.present_key()
    (tmp_path / "src/a.py").write_text("2")
    assert page_cache.present_key() != before


def test_the_libraries_are_all_that_are_installed():
    names = {name.lower() for name, _ in page_cache.libraries()}
    assert {"numpy", "scipy", "optree"} <= names and "regrad" not in names


def test_the_settings_are_variables_that_libraries_read():
    given = {"JAX_ENABLE_X64": "1", "OMP_NUM_THREADS": "1", "HOME": "/", "PYTHONPATH": "src"}
    assert page_cache.settings(given) == {"JAX_ENABLE_X64": "1", "OMP_NUM_THREADS": "1"}


def test_variables_that_a_library_sets_when_it_is_imported_do_not_count(monkeypatch):
    before = page_cache.present_key()
    monkeypatch.setenv("TORCH_SET_BY_AN_IMPORT", "1")
    assert page_cache.present_key() == before
    monkeypatch.setitem(page_cache.ENVIRONMENT, "TORCH_SET_BY_THE_USER", "1")
    assert page_cache.present_key() != before


def test_folders_of_older_keys_are_removed(tmp_path):
    for age, name in enumerate(["now", "before", "old", "older"]):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    chosen = page_cache.folder(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {chosen.name, "now", "before"}
    assert page_cache.folder(tmp_path) == chosen
