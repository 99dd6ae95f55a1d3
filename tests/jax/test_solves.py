"""Rules in linear solves: JAX differentiates the map that is inverted, and nothing else of them.

What is due is written by hand: of A x = b it is λ = A⁻ᵀ dy, which goes to b, and -λ xᵀ to A, times
what the rule says; or it comes from the interpreter of `tests.campaigns.jax_api`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import regrad as rg
import regrad.jax
from regrad.errors import GradientError, PassedOverError
from tests.campaigns import jax_api
from tests.campaigns.verdicts import DELIVERED

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


def _forth(a, b):
    x = by_hand(a, b)
    return x, (a, x)


by_hand.defvjp(_forth, _back)


@pytest.mark.versions
@pytest.mark.parametrize("place", ["plain", "jit", "checkpoint", "scan", "cond", "vmap"])
def test_the_gradient_is_that_by_hand(place):
    around = {
        "plain": lambda f: f,
        "jit": jax.jit,
        "checkpoint": jax.checkpoint,
        "scan": lambda f: lambda a: lax.scan(lambda c, _: (f(a), None), f(a), None, length=2)[0],
        "cond": lambda f: lambda a: lax.cond(a[0, 0] > 0, f, lambda a: B, a),
        "vmap": lambda f: lambda a: jax.vmap(f)(a[None])[0],
    }[place]
    f = around(lambda a: jnp.linalg.solve(a, B))
    due = around(lambda a: by_hand(a, B))
    loss = lambda f: lambda a: jnp.sum(jnp.sin(f(a)))  # noqa: E731
    ours = rg.jax.override(loss(f), {"MatMul": product})
    np.testing.assert_allclose(ours(A), loss(f)(A), rtol=1e-12)
    for run in (lambda f: f, jax.jit):
        np.testing.assert_allclose(run(jax.grad(ours))(A), jax.grad(loss(due))(A), rtol=1e-9)
    ours.assert_fired()
    twice = lambda f: jax.grad(lambda a: jnp.sum(jax.grad(f)(a) * jnp.cos(a)))  # noqa: E731
    np.testing.assert_allclose(twice(ours)(A), twice(loss(due))(A), rtol=1e-9, atol=1e-12)


def test_the_inverse_and_a_right_hand_side():
    loss = lambda f: lambda a: jnp.sum(jnp.sin(f(a)))  # noqa: E731
    ours = rg.jax.override(loss(jnp.linalg.inv), {"MatMul": product})
    due = loss(lambda a: by_hand(a, jnp.eye(4)))
    np.testing.assert_allclose(jax.grad(ours)(A), jax.grad(due)(A), rtol=1e-9)
    f = rg.jax.override(lambda b: jnp.linalg.solve(A, b).sum(), {"MatMul": product})
    np.testing.assert_allclose(jax.grad(f)(B), np.linalg.inv(A).T @ np.ones((4, 2)), rtol=1e-9)


FUNCTIONS = ("solve", "solve many", "solve batch", "linalg.inv", "expm", "cg", "cg matvec", "gmres",
             "bicgstab", "cho_solve", "lu_solve", "lstsq", "linalg.eigh", "tensorsolve",
             "custom_linear_solve", "vmap of solve", "multivariate_normal")  # fmt: skip


@pytest.mark.versions
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_that_solves(name):
    found = list(jax_api.cases([name], count=4, modes=("grad", "jvp")))
    assert [verdict for verdict in found if verdict.outcome != DELIVERED] == []


@pytest.mark.parametrize("mode", ["jit", "vmap"])
def test_compiled_and_batched(mode):
    for name in ("solve", "cg matvec"):
        f = jax_api.functions()[name]
        eqns = jax_api.keys(jax.make_jaxpr(f)(jax_api.M))
        key = "dot_general"
        assert jax_api.verdict(name, f, key, eqns[key], mode, True).outcome == DELIVERED


def test_determinants_keep_a_derivative_that_is_jaxs():
    """They are functions with a derivative of their own; what is around them is under the rule."""
    for det in (jnp.linalg.det, lambda a: jnp.linalg.slogdet(a)[1]):
        f = lambda a, det=det: det(a @ a)  # noqa: E731
        ours = rg.jax.override(f, {"MatMul": product})
        np.testing.assert_allclose(jax.grad(ours)(A), 3 * jax.grad(f)(A), rtol=1e-9)


def test_what_only_finds_the_solution_is_under_no_rule():
    def f(x):
        solve = lambda _, b: b / jnp.tanh(jnp.arctanh(x))  # noqa: E731
        return lax.custom_linear_solve(lambda v: v * x, jnp.ones(3), solve, solve)

    x = jnp.array([0.2, 0.4, 0.6])
    ours = rg.jax.override(lambda x: jnp.sum(f(x) + jnp.tanh(x)), {"Tanh": lambda dy: 7 * dy})
    np.testing.assert_allclose(jax.grad(ours)(x), -1 / x**2 + 7, rtol=1e-9)
    assert sum(hit.count for hit in ours.hits) == 1


def test_a_comparison_takes_the_rules_out_of_a_solve():
    ours = rg.jax.override(lambda a: jnp.linalg.solve(a, B).sum(), {"MatMul": product})
    (row,) = rg.jax.compare_gradients(ours)(A).rows[:1]
    assert row.ratio == pytest.approx(3)


def test_a_rule_that_solves_works_forward():
    def rule(dy):
        return jnp.linalg.solve(A, dy)

    ours = rg.jax.override(jnp.sin, {"Sin": rule})
    due = np.linalg.inv(A).T @ B
    np.testing.assert_allclose(jax.jvp(ours, (B,), (B,))[1], due, rtol=1e-9)


# -- roots -----------------------------------------------------------------------------------------


def root(x):
    return lax.custom_root(
        lambda y: jnp.exp(y) - x.sum(), 1.0, lambda g, y: jnp.log(x.sum()), lambda g, y: y / g(1.0)
    )


X = jnp.array([0.5, 1.0, 2.0])
EXP = {"Exp": lambda dy, x: 3 * dy * jnp.exp(x)}
WRAPPED = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (c + f(x), None), 0.0, None, length=1)[0],
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None]).sum(),
}


@pytest.mark.versions
@pytest.mark.parametrize("place", WRAPPED)
def test_a_root_with_a_gradient_of_its_own(place):
    """As the refusal advises."""
    with pytest.raises(GradientError, match=r"custom_root .*with rg\.jax\.custom_grad"):
        rg.jax.override(lambda x: root(x) + jnp.exp(x).sum(), EXP)(X)
    whole = rg.jax.custom_grad(lambda x: (root(x), lambda dy: 5 * dy * jnp.ones(3)))
    f = WRAPPED[place](lambda x: whole(x) + jnp.exp(x).sum())
    ours = rg.jax.override(f, EXP)
    np.testing.assert_allclose(ours(X), f(X))
    for run in (lambda f: f, jax.jit):
        np.testing.assert_allclose(run(jax.grad(ours))(X), 5 + 3 * np.exp(X), rtol=1e-9)
    np.testing.assert_allclose(jax.jvp(ours, (X,), (X,))[1], (5 + 3 * np.exp(X)) @ X, rtol=1e-9)


def test_a_root_in_a_function_with_a_derivative_of_its_own():
    @jax.custom_vjp
    def implicit(x):
        return root(x) + jnp.tanh(x).sum()

    implicit.defvjp(lambda x: (implicit(x), None), lambda _, dy: (5 * dy * jnp.ones(3),))
    f = lambda x: implicit(x) * jnp.sin(x).sum()  # noqa: E731
    with pytest.raises((PassedOverError, GradientError), match=r"implicit|custom_root"):
        rg.jax.override(f, {"Tanh": lambda dy: 7 * dy})(X)
