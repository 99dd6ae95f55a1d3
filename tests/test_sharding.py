"""Several devices and several processes. JAX must start anew for these, so they run in children."""

from __future__ import annotations

import regrad as rg


def test_a_compiled_function_keeps_no_old_value_of_a_variable():
    v = rg.Variable([1.0, 2.0])
    f = rg.jit(lambda x: x * v)
    f(rg.tensor([1.0, 1.0]))
    (program,) = f.programs.values()
    assert program.sources == [v]
