"""Faults that are put into the source: each is a change, and a fault that matters is found."""

import ast
import os
import subprocess
import sys
from copy import copy

import numpy as np
import pytest

from tests.campaigns import mutant_sources as sources
from tests.campaigns import mutants
from tests.campaigns.past_faults import PAST


def is_a_change(mutant):
    own = compile(mutant.path.read_text(encoding="utf-8"), mutant.path, "exec", dont_inherit=True)
    return mutant.code() != own


@pytest.mark.slow  # (every file of the package is parsed, which takes seconds)
def test_there_are_mutants_of_all_parts():
    found = mutants.mutants()
    parts = [mutants.part_of(m.file) for m in found]
    assert len(found) >= 150 and len({m.name for m in found}) == len(found)
    assert all(parts.count(part) >= 10 for part in (*mutants.PARTS, "others"))
    assert all(map(is_a_change, found[::20]))


@pytest.mark.parametrize("mutant", PAST, ids=lambda m: m.name)
def test_a_past_fault_is_a_change(mutant):
    assert is_a_change(mutant)


CASES = {
    "guard": ("def f(x):\n if x: return 1\n return 2", 0, [2, 1]),
    "check": ("def f(x):\n if x < 0: raise ValueError\n return 1", -1, [ValueError, 1]),
    "state": ("def f(x):\n return x.ndim or x.dtype", np.zeros(()),
              [np.float64, 0]),
    "comparison": ("def f(x):\n return x < 1", 1, [False, True]),
    "half": ("def f(x):\n return x and 3", 0, [0, 3]),
    "arithmetic": ("def f(x):\n return x + 1", 1, [2, 0]),
    "number": ("def f(x):\n return 0", 1, [0, 1]),
    "key": ("def f(x):\n key = x, 2\n return key", 1, [(1, 2), (None, 2)]),
    "undone": ("def f(x):\n x.clear()\n return x", [1], [[], [1]]),
    "unset": ("def f(x):\n x[0] = 2\n return x", [1], [[2], [1]]),
    "argument": ("def f(x):\n return dict(a=x)", 1, [{"a": 1}, {}]),
    "nothing": ("def f(x):\n return x", 1, [1, None]),
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_what_a_kind_of_fault_does(kind):
    text, x, expected = CASES[kind]
    tree = ast.parse(text)
    old, change = next((n, c) for _, k, _, n, c in sources.sites(tree) if k == kind)
    found = []
    for each in (ast.parse(text), sources._Change(old, change).visit(tree)):
        names = {}
        exec(compile(ast.fix_missing_locations(each), "f", "exec"), names)
        try:
            found.append(names["f"](copy(x)))
        except ValueError as error:
            found.append(type(error))
    assert found == expected


@pytest.mark.slow
def test_a_process_runs_the_code_that_was_made_for_it(tmp_path):
    """Other modules stay as they are, and the line numbers of the changed one, too."""
    (mutant,) = [m for m in PAST if m.title == "True is 1 in a key"]
    env = mutants.environment({"regrad.core.pytrees": mutant.code()}, tmp_path)
    program = "from regrad.core.pytrees import exactly; print(exactly(True) == exactly(1))"
    for environment, expected in ((env, "True"), ({**os.environ}, "False")):
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True
        )
        assert done.stdout.strip() == expected, done.stderr
