"""Several devices and several processes. JAX must start anew for these, so they run in children.

What is checked is in `sharded_checks.py`; a child runs all of it that belongs to one setup.
"""

from __future__ import annotations

from functools import partial

import jax  # noqa: F401 (without which the children fail)
import pytest

import regrad as rg
from tests.helpers import children
from tests.helpers.children import failures, free_port
from tests.helpers.paths import ROOT

pytestmark = pytest.mark.slow

run_children = partial(children.run_children, ROOT / "tests/helpers/sharded_checks.py")


def test_eight_devices_in_one_process(tmp_path):
    assert failures(run_children(tmp_path, ["one"])) == ""


def test_four_devices_in_each_of_two_processes(tmp_path):
    port = free_port()
    assert failures(run_children(tmp_path, ["two", "0", port], ["two", "1", port])) == ""


def test_a_compiled_function_keeps_no_old_value_of_a_variable():
    v = rg.Variable([1.0, 2.0])
    f = rg.jit(lambda x: x * v)
    f(rg.tensor([1.0, 1.0]))
    (program,) = f.programs.values()
    assert program.sources == [v]
