"""`rules.blackbox` against differences of its interpolation, `clamped_straight_through` by hand."""

from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import regrad as rg
import regrad.jax
import regrad.torch
from regrad.errors import ArgumentError, GradientError, RuleError
from regrad.rules import blackbox, clamped_straight_through
from tests.helpers import differences
from tests.helpers.hosts import HOSTS, weights

# -- an assignment of three workers to three jobs --------------------------------------------------

PLANS = np.array([np.eye(3)[list(p)].ravel() for p in permutations(range(3))])
COSTS = np.random.default_rng(1).normal(size=9)
DY = np.random.default_rng(2).normal(size=9)


ORDERS = ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))


def plans_of(xp, x):
    """Return the plans. (A kernel that reads a global array makes it an input of each program.)"""
    return xp.asarray(
        [[float(j == i) for i in p for j in (0, 1, 2)] for p in ORDERS], dtype=x.dtype
    )


@rg.extend.op("AssignmentOfTests")
def assignment(xp, x: rg.Tensor, /) -> rg.Tensor:
    plans = plans_of(xp, x)
    return plans[xp.argmin(plans @ x)]


class Assignment(torch.autograd.Function):
    @staticmethod
    def forward(ctx, costs):
        plans = torch.tensor(PLANS)
        return plans[torch.argmin(plans @ costs)]

    @staticmethod
    def backward(ctx, dy):
        return torch.zeros_like(dy)


@jax.jit
def assignment_of_jax(costs):
    return jnp.array(PLANS)[jnp.argmin(jnp.array(PLANS) @ costs)]


def by_regrad(rule, costs, dy):
    with rg.gradient_override_map({"AssignmentOfTests": rule}) as used:
        dx = rg.grad(lambda x: rg.sum(assignment(x) * rg.tensor(dy)))(rg.tensor(costs))
    used.assert_fired()
    return dx.numpy()


def by_torch(rule, costs, dy):
    x = torch.tensor(costs, requires_grad=True)
    with regrad.torch.gradient_override_map({Assignment: rule}) as used:
        y = Assignment.apply(x)
    (dx,) = torch.autograd.grad(y, x, torch.tensor(dy))
    used.assert_fired()
    return dx.numpy()


def by_jax(rule, costs, dy, jit=False):
    with jax.enable_x64(True):
        f = rg.jax.override(assignment_of_jax, {assignment_of_jax: rule})
        df = jax.grad(lambda x: (f(x) * dy).sum())
        return np.asarray((jax.jit(df) if jit else df)(jnp.array(costs)))


SOLVED = {"regrad": by_regrad, "torch": by_torch, "jax": by_jax,
          "jax, jit": lambda *given: by_jax(*given, jit=True)}  # fmt: skip


def interpolation(costs, dy, lam):
    """Equation 3 of the paper, for a loss that is linear: y is solved by trying all plans."""
    y = PLANS[np.argmin(PLANS @ costs)]
    other = PLANS[np.argmin(PLANS @ costs + lam * PLANS @ dy)]
    return other @ dy - (costs @ y - costs @ other) / lam


@pytest.mark.parametrize("lam", [0.5, 3.0])
@pytest.mark.parametrize("host", SOLVED)
def test_a_solver_against_its_interpolation(host, lam):
    expected = differences.jacobian(lambda x: interpolation(x, DY, lam), COSTS, 1e-5)
    assert lam < 1 or abs(expected).max() > 0  # (the second solution is another)
    found = SOLVED[host](blackbox(lam), COSTS, DY)
    np.testing.assert_allclose(found, expected, atol=1e-8)


def test_a_negative_number_is_for_values():
    """The plan of greatest value is the plan of least cost, of the negative values."""

    @rg.extend.op("BestOfTests")
    def best(xp, x: rg.Tensor, /) -> rg.Tensor:
        plans = plans_of(xp, x)
        return plans[xp.argmax(plans @ x)]

    with rg.gradient_override_map({"BestOfTests": blackbox(-3.0)}):
        dx = rg.grad(lambda x: rg.sum(best(x) * rg.tensor(DY)))(rg.tensor(-COSTS))
    expected = differences.jacobian(lambda x: interpolation(-x, DY, 3.0), -COSTS, 1e-5)
    np.testing.assert_allclose(dx.numpy(), expected, atol=1e-8)


def test_a_solver_learns():
    """Descent makes the plan that is wanted the cheapest."""
    x, wanted = COSTS, PLANS[4]
    for _ in range(200):
        y = PLANS[np.argmin(PLANS @ x)]
        x = x - 0.1 * by_regrad(blackbox(5.0), x, 2 * (y - wanted))
    assert PLANS[np.argmin(PLANS @ x)].tolist() == wanted.tolist()


def test_a_second_derivative_is_refused():
    with rg.gradient_override_map({"AssignmentOfTests": blackbox(3.0)}):
        f = lambda x: rg.sum(rg.square(assignment(x)))  # noqa: E731
        with pytest.raises(GradientError, match=r"blackbox.*is once_differentiable"):
            rg.grad(lambda x: rg.sum(rg.grad(f)(x)))(rg.tensor(COSTS))


@pytest.mark.parametrize("lam", [0, 0.0, np.nan, "1", None, True])
def test_bad_widths_are_refused(lam):
    with pytest.raises(ArgumentError, match="blackbox: lam is a number other than 0, got"):
        blackbox(lam)


# -- clamps ----------------------------------------------------------------------------------------

X = np.array([-2.0, -1.0, 0.0, 0.5, 1.0, 6.0, 7.0])
CLAMPS = {
    "clip": ("ClipByValue", lambda o, x: o.clip(x, -1, 1), -1, 1, ("regrad", "torch", "jax")),
    "clip, one bound": ("ClipByValue", lambda o, x: o.clip(x, None, 1), -np.inf, 1,
                        ("regrad", "torch", "jax")),
    "relu6": ("Relu6", lambda o, x: o.relu6(x), 0, 6, tuple(HOSTS)),
    "sign": ("Sign", lambda o, x: o.sign(x), -1, 1, tuple(HOSTS)),
    "round": ("Round", lambda o, x: o.round(x), -np.inf, np.inf, tuple(HOSTS)),
}  # fmt: skip


@pytest.mark.parametrize("inclusive", [True, False])
@pytest.mark.parametrize(("name", "host"), [(n, h) for n, row in CLAMPS.items() for h in row[4]])
def test_the_gradient_passes_in_the_range(name, host, inclusive):
    key, program, low, high, _ = CLAMPS[name]
    rules = {key: clamped_straight_through(inclusive)}
    inside = (low <= X) & (high >= X) if inclusive else (low < X) & (high > X)
    with jax.enable_x64(True):
        _, (dx,), used = HOSTS[host](program, lambda o: rules, (X,))
        second = 0
        if host != "v1":  # (whose second gradient is None: no path leads to x)
            _, (second,), _ = HOSTS[host](program, lambda o: rules, (X,), 2)
    np.testing.assert_allclose(dx, weights([X])[0] * inside)
    assert not np.asarray(second).any()
    used.assert_fired()


def test_bounds_that_learn_keep_their_gradients():
    with rg.gradient_override_map({"ClipByValue": clamped_straight_through(False)}):
        found = rg.grads(lambda x, a, b: rg.sum(rg.clip(x, a, b)))(
            [rg.tensor(X), rg.tensor(-1.0), rg.tensor(1.0)]
        )
    assert [dx.tolist() for dx in found] == [[0, 0, 1, 1, 0, 0, 0], 1, 2]


def test_calls_of_torch_in_place_and_by_other_names():
    for f in (lambda x: x.clone().clamp_(-1, 1), lambda x: torch.nn.functional.hardtanh(x),
              lambda x: torch.clamp(x, torch.tensor(-1.0), torch.tensor(1.0))):  # fmt: skip
        x = torch.tensor(X, requires_grad=True)
        rule = rg.rules.optional(clamped_straight_through())
        with regrad.torch.gradient_override_map(
            {"ClipByValue": rule, torch.nn.functional.hardtanh: rule}
        ):
            y = f(x)
        assert torch.autograd.grad(y.sum(), x)[0].tolist() == [0, 1, 1, 1, 1, 0, 0]


def test_compiled_by_torch():
    x = torch.tensor(X, requires_grad=True)
    f = torch.compile(lambda x: x.clamp(-1, 1), backend="aot_eager", fullgraph=True)
    with regrad.torch.gradient_override_map({"ClipByValue": clamped_straight_through(False)}):
        y = f(x)
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [0, 0, 1, 1, 0, 0, 0]


def test_bad_clamps_are_refused():
    with pytest.raises(ArgumentError, match="clamped_straight_through: inclusive is a bool, got 1"):
        clamped_straight_through(1)
    rules, words = {"AddV2": clamped_straight_through()}, "takes 'x', which .* does not have"
    with pytest.raises(RuleError, match=words), rg.gradient_override_map(rules):
        pass
