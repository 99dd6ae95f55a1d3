"""A slice of the campaign over JAX's public API: see `tests.campaigns.jax_api`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.campaigns import jax_api
from tests.campaigns.verdicts import DELIVERED, REFUSED, SILENT

SLICE = (
    "interp", "mean dtype", "corrcoef", "linalg.norm", "linalg.qr", "solve_triangular", "fft",
    "nn.gelu", "nn.standardize", "stats.t.logpdf", "at multiply", "scan", "cond", "stack",
    "piecewise", "dot_product_attention", "cumlogsumexp", "reduce_window max", "ragged_dot",
)  # fmt: skip


@pytest.mark.versions
@pytest.mark.parametrize("name", SLICE)
def test_functions_of_the_api(name):
    found = list(jax_api.cases([name], count=2, modes=("grad", "jvp")))
    assert found
    assert [verdict for verdict in found if verdict.outcome != DELIVERED] == []


@pytest.mark.parametrize("name", ["reduce", "reduce_window mul"])
def test_bodies_that_rules_cannot_be_put_into_are_refused(name):
    f = jax_api.functions()[name]
    key = "sin" if name == "reduce" else "mul"
    eqns = list(jax.make_jaxpr(jnp.sin)(1.0).eqns)
    if key == "mul":
        eqns = list(jax.make_jaxpr(jnp.multiply)(1.0, 2.0).eqns)
    found = jax_api.verdict(name, f, key, eqns, "jvp", False)
    assert found.outcome == REFUSED
    assert f"'{key}' occurs inside {name.split()[0]}" in found.detail


def test_the_interpreter_can_tell():
    f = jnp.sin
    program = jax.make_jaxpr(f)(jax_api.M)
    due = jax.grad(lambda x: jax_api.run(program, [x], lambda eqn: True)[0].sum())(jax_api.M)
    np.testing.assert_allclose(due, 3 * np.cos(jax_api.M))
    (eqn,) = program.eqns
    other = lambda op, dy: dy * 2  # noqa: E731
    wrong = pytest.MonkeyPatch()
    with wrong.context() as patched:
        patched.setattr(jax_api, "tripled", lambda eqns: other)
        assert jax_api.verdict("sin", f, "sin", [eqn], "grad", False).outcome == SILENT
