"""The compiler rebuilt in docs/how_jit_works.py runs, is self-contained, and agrees with regrad."""

from __future__ import annotations

import ast
import runpy
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import regrad as rg
from tests.helpers.paths import DOCS

SCRIPT = DOCS / "how_jit_works.py"


@pytest.fixture
def core():
    """The script's names; its own assertions hold if this does not raise."""
    return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def f64(x):
    return rg.tensor(np.float64(x))


def test_imports_only_numpy_and_the_standard_library():
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"))
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert {n.partition(".")[0] for n in names} - sys.stdlib_module_names == {"numpy"}


def test_stays_short():
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    assert sum(bool(line) for line in lines) <= 310


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_a_compiled_function_at_any_order(core, order):
    mine = core.jit(lambda x: core.sin(x * x) * x + 1.0)
    theirs = rg.jit(lambda x: rg.sin(x * x) * x + 1.0)
    for _ in range(order):
        mine, theirs = core.grad(mine), rg.grad(theirs)
    np.testing.assert_allclose(float(mine(0.7)), float(theirs(f64(0.7))))


@pytest.mark.parametrize("order", [1, 2])
def test_gradients_that_are_compiled(core, order):
    mine, theirs = core.sin, rg.sin
    for _ in range(order):
        mine, theirs = core.grad(mine), rg.grad(theirs)
    np.testing.assert_allclose(float(core.jit(mine)(0.7)), float(rg.jit(theirs)(f64(0.7))))


def test_a_rule_in_force_fires_and_has_a_program_of_its_own(core):
    def tenfold(dy, x):
        return [dy * 10.0]

    mine, theirs = core.jit(core.sin), rg.jit(rg.sin)
    for _ in range(2):
        found = [float(core.grad(mine)(0.5))], [float(rg.grad(theirs)(f64(0.5)))]
        with core.override("Sin", tenfold):
            found[0].append(float(core.grad(mine)(0.5)))
        with rg.gradient_override_map({"Sin": lambda dy: dy * 10.0}):
            found[1].append(float(rg.grad(theirs)(f64(0.5))))
        np.testing.assert_allclose(*found)
    assert len(mine.programs) == theirs.cache_info().programs == 2


def test_a_rule_counts_that_was_in_force_at_the_call(core):
    def doubled(dy, x):
        return [dy * 2.0]

    def mine(x):
        with core.override("Sin", doubled):
            return core.jit(core.sin)(x)

    def theirs(x):
        with rg.gradient_override_map({"Sin": lambda dy: dy * 2.0}):
            return rg.jit(rg.sin)(x)

    assert float(core.grad(mine)(0.5)) == float(rg.grad(theirs)(f64(0.5))) == 2.0


def test_a_value_of_the_closure_is_part_of_the_key(core):
    by = 2.0
    mine, theirs = core.jit(lambda x: x * by), rg.jit(lambda x: x * by)
    assert float(mine(3.0)) == float(theirs(f64(3.0))) == 6.0
    by = 5.0
    assert float(mine(3.0)) == float(theirs(f64(3.0))) == 15.0


def test_values_are_refused_in_a_trace(core):
    with pytest.raises(TypeError, match="being captured"):
        core.jit(lambda x: x * float(x))(1.0)
    with pytest.raises(rg.errors.TraceError):
        rg.jit(lambda x: x * float(x))(1.0)
    assert not core.TRACES
    assert not core.TAPES


def test_variables_are_inputs_and_outputs(core):
    mine, theirs = core.Variable(0.3), rg.Variable(np.float64(0.3))

    def my_step(x):
        mine.assign(mine.read() * x + 1.0)
        return core.sin(mine.read())

    def their_step(x):
        theirs.assign(theirs * x + 1.0)
        return rg.sin(theirs)

    compiled, others = core.compile_step(my_step), rg.jit(their_step)
    for _ in range(3):
        np.testing.assert_allclose(float(compiled(2.0)), float(others(f64(2.0))))
    np.testing.assert_allclose(float(mine.tensor), float(theirs.value))


def test_the_backward_program_takes_what_it_reads(core):
    program = core.capture(lambda x: core.sin(core.sin(x)) * 3.0, 1)
    forward, backward = core.derive(program)
    assert len(forward.outputs) == 1 + 3  # y, and as residuals x, sin(x) and the factor 3
    assert len(backward.inputs) == len(forward.outputs)
