"""A slice of the campaign over JAX's public API: see `tests.campaigns.jax_api`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.campaigns import jax_api
from tests.campaigns.verdicts import DELIVERED, REFUSED, SILENT

SLICE = {
    2: ("interp", "mean dtype", "corrcoef", "linalg.norm", "linalg.qr", "solve_triangular", "fft",
        "nn.gelu", "nn.standardize", "stats.t.logpdf", "at multiply", "scan", "cond", "stack",
        "piecewise", "dot_product_attention", "cumlogsumexp", "reduce_window max", "ragged_dot"),
    4: ("solve", "solve many", "solve batch", "linalg.inv", "expm", "cg", "cg matvec", "gmres",
        "bicgstab", "cho_solve", "lu_solve", "lstsq", "linalg.eigh", "tensorsolve",
        "custom_linear_solve", "vmap of solve", "multivariate_normal"),
}  # fmt: skip


@pytest.mark.slow(but=1)
@pytest.mark.versions
@pytest.mark.parametrize(
    ("name", "count"), [(name, count) for count, names in SLICE.items() for name in names]
)
def test_functions_of_the_api(name, count):
    found = list(jax_api.cases([name], count=count, modes=("grad", "jvp")))
    assert found
    assert [verdict for verdict in found if verdict.outcome != DELIVERED] == []


@pytest.mark.parametrize("mode", ["jit", "vmap"])
@pytest.mark.parametrize("name", ["solve", "cg matvec"])
def test_solves_that_are_compiled_and_batched(name, mode):
    f, key = jax_api.functions()[name], "dot_general"
    eqns = jax_api.keys(jax.make_jaxpr(f)(jax_api.M))[key]
    assert jax_api.verdict(name, f, key, eqns, mode, True).outcome == DELIVERED


@pytest.mark.parametrize(
    ("name", "key", "f", "xs"),
    [("reduce", "sin", jnp.sin, [1.0]), ("reduce_window mul", "mul", jnp.multiply, [1.0, 2.0])],
)
def test_bodies_that_rules_cannot_be_put_into_are_refused(name, key, f, xs):
    eqns = list(jax.make_jaxpr(f)(*xs).eqns)
    found = jax_api.verdict(name, jax_api.functions()[name], key, eqns, "jvp", False)
    assert found.outcome == REFUSED
    assert f"'{key}' occurs inside {name.split()[0]}" in found.detail


def test_the_interpreter_can_tell(monkeypatch):
    program = jax.make_jaxpr(jnp.sin)(jax_api.M)
    found = jax.grad(lambda x: jax_api.run(program, [x], lambda eqn: True)[0].sum())(jax_api.M)
    np.testing.assert_allclose(found, 3 * np.cos(jax_api.M))
    monkeypatch.setattr(jax_api, "tripled", lambda eqns: lambda op, dy: dy * 2)
    wrong = jax_api.verdict("sin", jnp.sin, "sin", list(program.eqns), "grad", False)
    assert wrong.outcome == SILENT
