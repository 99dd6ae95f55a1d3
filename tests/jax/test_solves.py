"""Rules in linear solves: JAX differentiates the map that is inverted, and nothing else of them.

The expected gradients are by hand: of A x = b it is λ = A⁻ᵀ dy for b, and -λ xᵀ for A, times what
the rule says.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numpy.testing import assert_allclose

import regrad as rg
import regrad.jax
from regrad.errors import GradientError, PassedOverError
from tests.campaigns import jax_api
from tests.campaigns.verdicts import DELIVERED, REFUSED, SILENT
from tests.helpers.jax_model import own_vjp, slopes, times
from tests.helpers.jax_places import AROUND

override = rg.jax.override
A = jax_api.M + 3 * jnp.eye(4)
B = jnp.cos(jnp.arange(8.0)).reshape(4, 2)


def product(dy, a, b):
    return [3 * dx for dx in jax.vjp(jnp.matmul, a, b)[1](dy)]


@jax.custom_vjp
def by_hand(a, b):
    return jnp.linalg.inv(a) @ b


def _back(kept, dy):
    a, x = kept
    back = jnp.linalg.inv(a).T @ dy
    return -3 * back @ x.T, back


by_hand.defvjp(lambda a, b: (by_hand(a, b), (a, by_hand(a, b))), _back)


def loss(f):
    return lambda a: jnp.sum(jnp.sin(f(a)))


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.parametrize("place", AROUND)
def test_the_gradient_is_that_by_hand(place):
    f = loss(AROUND[place](lambda a: jnp.linalg.solve(a, B)))
    hand = loss(AROUND[place](lambda a: by_hand(a, B)))
    ours = override(f, {"MatMul": product})
    assert_allclose(ours(A), f(A), rtol=1e-12)
    for run in (lambda f: f, jax.jit):
        assert_allclose(run(jax.grad(ours))(A), jax.grad(hand)(A), rtol=1e-9)
    ours.assert_fired()
    twice = lambda f: slopes(lambda a: jax.grad(f)(a) * jnp.cos(a), A)  # noqa: E731
    assert_allclose(twice(ours), twice(hand), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_the_inverse_and_a_right_hand_side():
    ours = override(loss(jnp.linalg.inv), {"MatMul": product})
    hand = loss(lambda a: by_hand(a, jnp.eye(4)))
    assert_allclose(jax.grad(ours)(A), jax.grad(hand)(A), rtol=1e-9)
    f = override(lambda b: jnp.linalg.solve(A, b), {"MatMul": product})
    assert_allclose(slopes(f, B), np.linalg.inv(A).T @ np.ones((4, 2)), rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("det", [jnp.linalg.det, lambda a: jnp.linalg.slogdet(a)[1]])
def test_determinants_keep_a_derivative_that_is_jaxs(det):
    """They are functions with a derivative of their own; what is around them is under the rule."""
    f = lambda a: det(a @ a)  # noqa: E731
    found = jax.grad(override(f, {"MatMul": product}))(A)
    assert_allclose(found, 3 * jax.grad(f)(A), rtol=1e-9)


def test_what_only_finds_the_solution_is_under_no_rule():
    def f(x):
        solve = lambda _, b: b / jnp.tanh(jnp.arctanh(x))  # noqa: E731
        return lax.custom_linear_solve(lambda v: v * x, jnp.ones(3), solve, solve) + jnp.tanh(x)

    x = jnp.array([0.2, 0.4, 0.6])
    ours = override(f, {"Tanh": times(7)})
    assert_allclose(slopes(ours, x), -1 / x**2 + 7, rtol=1e-9)
    assert sum(hit.count for hit in ours.hits) == 1


@pytest.mark.slow
def test_a_comparison_takes_the_rules_out_of_a_solve():
    ours = override(lambda a: jnp.linalg.solve(a, B).sum(), {"MatMul": product})
    (row,) = rg.jax.compare_gradients(ours)(A).rows[:1]
    assert row.ratio == pytest.approx(3)


def test_a_rule_that_solves_works_forward():
    ours = override(jnp.sin, {"Sin": lambda dy: jnp.linalg.solve(A, dy)})
    assert_allclose(jax.jvp(ours, (B,), (B,))[1], np.linalg.inv(A).T @ B, rtol=1e-9)


# -- roots -----------------------------------------------------------------------------------------


def root(x):
    return lax.custom_root(
        lambda y: jnp.exp(y) - x.sum(), 1.0, lambda g, y: jnp.log(x.sum()), lambda g, y: y / g(1.0)
    )


X = jnp.array([0.5, 1.0, 2.0])
EXP = {"Exp": lambda dy, x: 3 * dy * jnp.exp(x)}


@pytest.mark.slow(but=2)
@pytest.mark.versions
@pytest.mark.parametrize("place", AROUND)
def test_a_root_with_a_gradient_of_its_own(place):
    """As the refusal advises."""
    with pytest.raises(GradientError, match=r"custom_root .*with rg\.jax\.custom_grad"):
        override(lambda x: root(x) + jnp.exp(x).sum(), EXP)(X)
    whole = rg.jax.custom_grad(lambda x: (root(x), lambda dy: 5 * dy * jnp.ones(3)))
    f = AROUND[place](lambda x: whole(x) + jnp.exp(x).sum())
    ours, expected = override(f, EXP), 5 + 3 * np.exp(X)
    assert_allclose(ours(X), f(X))
    for run in (lambda f: f, jax.jit):
        assert_allclose(run(jax.grad(ours))(X), expected, rtol=1e-9)
    assert_allclose(jax.jvp(ours, (X,), (X,))[1], expected @ X, rtol=1e-9)


def test_a_root_in_a_function_with_a_derivative_of_its_own():
    @own_vjp(lambda dy, x: (5 * dy * jnp.ones(3),))
    def implicit(x):
        return root(x) + jnp.tanh(x).sum()

    with pytest.raises((PassedOverError, GradientError), match=r"implicit|custom_root"):
        override(lambda x: implicit(x) * jnp.sin(x).sum(), {"Tanh": times(7)})(X)


# -- a slice of the campaign over JAX's public API: see `tests.campaigns.jax_api` ------------------

SLICE = {
    2: ("interp", "mean dtype", "corrcoef", "linalg.norm", "linalg.qr", "solve_triangular", "fft",
        "nn.gelu", "nn.standardize", "stats.t.logpdf", "at multiply", "scan", "cond", "stack",
        "piecewise", "dot_product_attention", "cumlogsumexp", "reduce_window max", "ragged_dot"),
    4: ("solve", "solve many", "solve batch", "linalg.inv", "expm", "cg", "cg matvec", "gmres",
        "bicgstab", "cho_solve", "lu_solve", "lstsq", "linalg.eigh", "tensorsolve",
        "custom_linear_solve", "vmap of solve", "multivariate_normal"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.parametrize(
    ("name", "count"), [(name, count) for count, names in SLICE.items() for name in names]
)
def test_functions_of_the_api(name, count):
    found = list(jax_api.cases([name], count=count, modes=("grad", "jvp")))
    assert found
    assert [verdict for verdict in found if verdict.outcome != DELIVERED] == []


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("mode", ["jit", "vmap"])
@pytest.mark.parametrize("name", ["solve", "cg matvec"])
def test_solves_that_are_compiled_and_batched(name, mode):
    f, key = jax_api.functions()[name], "dot_general"
    eqns = jax_api.keys(jax.make_jaxpr(f)(jax_api.M))[key]
    assert jax_api.verdict(name, f, key, eqns, mode, True).outcome == DELIVERED


@pytest.mark.slow(but=1)
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
    assert_allclose(found, 3 * np.cos(jax_api.M))
    monkeypatch.setattr(jax_api, "tripled", lambda eqns: lambda op, dy: dy * 2)
    wrong = jax_api.verdict("sin", jnp.sin, "sin", list(program.eqns), "grad", False)
    assert wrong.outcome == SILENT
