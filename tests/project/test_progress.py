"""`make test` says how far it is, repeats what fails, and chooses by name what it leaves out."""

import os
import subprocess
from types import SimpleNamespace

import pytest

from tests import conftest
from tests.helpers import choices, progress


@pytest.fixture
def level(monkeypatch):
    return lambda name: monkeypatch.setattr(choices, "level", name)


def test_a_choice_is_one_option_two_or_all(level):
    options = ["numpy", "jax", "torch"]
    found = {}
    for name in choices.OPTIONS:
        level(name)
        found[name] = [choices.choose(f"row {i}", options) for i in range(300)]
    for one, two, every in zip(*found.values(), strict=True):
        assert (len(one), len(two), sorted(every)) == (1, 2, sorted(options))
        assert one == two[:1] == every[:1]
    counts = [sum(one == [x] for one in found["test"]) for x in options]
    assert min(counts) > 70, counts
    assert choices.choose("row", []) == []


def test_a_choice_is_the_same_in_every_process(level):
    level("test")
    assert choices.choose("a name", range(1000)) == [672]


class Item:
    """A test as pytest collects it."""

    def __init__(self, nodeid, *marks):
        self.nodeid, self.marks = nodeid, {mark.name: mark for mark in marks}

    def get_closest_marker(self, name):
        return self.marks.get(name)


FAST = Item("a.py::test_a")
SLOW = Item("a.py::test_b", pytest.mark.slow.mark)
CASES = [Item(f"a.py::test_c[{i}]", pytest.mark.slow(but=2).mark) for i in range(9)]


@pytest.mark.parametrize(("name", "mark", "args", "count"), [
    ("test", "", ["tests"], 3),
    ("test", "slow", ["tests"], 11),
    ("test", "", ["tests/test_a.py::test_b"], 11),
    ("test-all", "", ["tests"], 11),
    ("proof", "", ["tests"], 11),
])  # fmt: skip
def test_slow_tests_run_where_they_are_asked_for(level, name, mark, args, count):
    level(name)
    items, left_out = [FAST, SLOW, *CASES], []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    config = SimpleNamespace(option=SimpleNamespace(markexpr=mark), args=args, hook=hook)
    conftest.pytest_collection_modifyitems(config, items)
    assert len(items) == count and {*items, *left_out} == {FAST, SLOW, *CASES}
    assert FAST in items and (SLOW in items) == (count == 11)


def test_names_with_addresses_are_refused():
    items = [FAST, Item("a.py::test_d[<function f at 0x7f70>]")]
    with pytest.raises(pytest.UsageError, match=r"has an address: a.py::test_d"):
        conftest.pytest_collection_modifyitems(None, items)


def report(when, outcome="passed", **more):
    return SimpleNamespace(
        when=when, passed=outcome == "passed", failed=outcome == "failed", sections=[], **more
    )


def test_a_line_says_how_far_it_is(monkeypatch):
    lines, now = [], [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    terminal = SimpleNamespace(verbosity=0, ensure_newline=lambda: None, write_line=lines.append)
    plugin = progress.Progress(SimpleNamespace(testscollected=4000), terminal)
    for i in range(1000):
        now[0] += 0.03
        plugin.pytest_runtest_logreport(report("call", "failed" if i == 3 else "passed"))
        plugin.pytest_runtest_logreport(report("teardown"))
    assert lines == [
        "12 %: 499 of 4,000 tests, 1 failed, 0:15 min so far, about 1:45 min left",
        "24 %: 999 of 4,000 tests, 1 failed, 0:30 min so far, about 1:30 min left",
    ]
    early = progress.line(39, 4000, 0, 40.0, 1.0)
    assert early == "0 %: 39 of 4,000 tests, 0 failed, 0:40 min so far"
    assert plugin.pytest_report_teststatus(report("call")) == ("passed", "", "")
    for other in (report("call", "failed"), report("setup"), report("call", wasxfail="no")):
        assert plugin.pytest_report_teststatus(other) is None


@pytest.mark.parametrize(("name", "due"), [("test", []), ("test-all", []), ("proof", ["--proof"])])
@pytest.mark.parametrize("node", ["test_a[two words]", 'test_a[it\'s 3$ or \\u03c3, "so"]'])
def test_a_failure_names_the_command_that_repeats_it(level, tmp_path, name, due, node):
    level(name)
    (tmp_path / "Makefile").write_text("test test-all:\n\t@printf '%s\\n' $@ $(ARGS)\n")
    # (not the environment of a `make` that runs this test)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(
        progress.repeat(node), shell=True, cwd=tmp_path, env=env, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [name if not due else "test", *due, node]


@pytest.mark.parametrize(("params", "properties", "due"), [
    ({}, [], []), ({"seed": 7}, [], ["seed 7"]), ({"x": 1}, [("seed", 8)], ["seed 8"]),
])  # fmt: skip
def test_a_failure_names_the_seed(level, params, properties, due):
    level("test")
    item = SimpleNamespace(
        nodeid="a.py::test_b", callspec=SimpleNamespace(params=params), user_properties=properties
    )
    failed = report("call", "failed")
    progress.describe(item, failed)
    said = ("to repeat it", "\n".join([*due, "make test ARGS='\"a.py::test_b\"'"]))
    assert failed.sections == [said]
