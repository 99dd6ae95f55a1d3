"""`rules.reverse`, `scale`, `clip`, `clip_norm`: an op's own gradient changed, in each library."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import regrad as rg
import regrad.torch
from regrad.errors import ArgumentError

A, B = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[5.0, 6.0], [7.0, 8.0]])
OWN = [np.ones((2, 2)) @ B.T, A.T @ np.ones((2, 2))]
RULES = {
    "reverse": (rg.rules.reverse(0.5), lambda g: -0.5 * g),
    "reverse, as it is": (rg.rules.reverse(), lambda g: -g),
    "scale": (rg.rules.scale(-3.0), lambda g: -3 * g),
    "clip": (rg.rules.clip(5.0, 12), lambda g: np.clip(g, 5, 12)),
    "clip_norm": (rg.rules.clip_norm(3.0), lambda g: g * 3 / np.linalg.norm(g)),
    "a large norm": (rg.rules.clip_norm(300.0), lambda g: g),
}


@pytest.mark.parametrize("name", RULES)
def test_of_a_product(name):
    rule, changed = RULES[name]
    expected = [changed(g) for g in OWN]

    def ours(a, b):
        with rg.gradient_override_map({"MatMul": rule}):
            return (a @ b).sum()

    for f in (rg.grads(ours), rg.jit(rg.grads(ours))):
        for got, dx in zip(f([rg.asarray(A), rg.asarray(B)]), expected, strict=True):
            np.testing.assert_allclose(got.numpy(), dx, rtol=1e-6)
    a, b = (torch.tensor(x, requires_grad=True) for x in (A, B))
    with regrad.torch.gradient_override_map({"MatMul": rule}) as used:
        y = (a @ b).sum()
    for got, dx in zip(torch.autograd.grad(y, [a, b]), expected, strict=True):
        np.testing.assert_allclose(got, dx, rtol=1e-12)
    assert used.hits[0].rule == name.partition(",")[0].replace("a large norm", "clip_norm")
    with jax.enable_x64(True):
        f = rg.jax.override(jnp.matmul, {"MatMul": rule})
        found = jax.grad(lambda a, b: f(a, b).sum(), (0, 1))(A, B)
        for got, dx in zip(found, expected, strict=True):
            np.testing.assert_allclose(got, dx, rtol=1e-12)


def test_a_gradient_of_zero_has_a_norm_and_a_second_derivative():
    x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    with regrad.torch.gradient_override_map({"Pow": rg.rules.clip_norm(1.0)}):
        y = (x**2).sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.sum(), x)
    assert dx.tolist() == [0.0] * 3 and ddx.tolist() == [2.0] * 3


def test_bad_bounds_are_refused():
    with pytest.raises(ArgumentError, match=r"clip: min \(2\) must not be greater than max \(1\)"):
        rg.rules.clip(2, 1)
    with pytest.raises(ArgumentError, match="clip_norm: expected a max_norm above 0, got 0"):
        rg.rules.clip_norm(0)
