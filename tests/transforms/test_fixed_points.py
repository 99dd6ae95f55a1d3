"""`rg.fixed_point`: solutions, and implicit gradients of every order."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import torch
from numpy.testing import assert_allclose

import regrad as rg
import regrad.torch
from regrad.errors import ArgumentError, DTypeError, GradientError, InvalidValueError, ShapeError
from regrad.testing import check_gradients
from tests.helpers.quick import MODES, nothing_is_left_open
from tests.helpers.rows import refused

pytestmark = pytest.mark.usefixtures(nothing_is_left_open.__name__)
rng = np.random.default_rng(0)
MATRIX = rng.normal(size=(4, 4))
MATRIX *= 0.8 / np.linalg.norm(MATRIX, 2)
RIGHT = rng.normal(size=4)
A, B = rg.tensor(MATRIX), rg.tensor(RIGHT)
AT = rg.tensor(0.7, dtype="float64")


def cosine(a):
    return rg.fixed_point(lambda x, a: rg.cos(a * x), 1.0, a)


def cosine_by_scipy(a):
    return scipy.optimize.brentq(lambda x: x - np.cos(a * x), 0, 1, xtol=1e-15, rtol=1e-15)


def linear(a, b):
    return rg.fixed_point(lambda x, a, b: a @ x + b, rg.zeros(4), a, b)


def damped(a):
    return rg.fixed_point(lambda x, a: 0.5 * rg.sin(x) + a, rg.zeros_like(a), a)


def by_linalg(matrix, right):
    return np.linalg.solve(np.eye(4) - matrix, right)


# -- values and gradients --------------------------------------------------------------------------


@MODES
def test_a_cosine_has_its_closed_forms(mode):
    a, x = 0.7, cosine_by_scipy(0.7)
    sine, cos = np.sin(a * x), np.cos(a * x)
    slope = -x * sine / (1 + a * sine)
    inner = x + a * slope  # the derivative of a x
    second = -(2 * slope * sine + inner * inner * cos) / (1 + a * sine)
    for f, expected in (
        (cosine, x), (rg.grad(cosine), slope), (rg.grad(rg.grad(cosine)), second)
    ):  # fmt: skip
        assert_allclose(mode(f)(AT).item(), expected, rtol=1e-9)


@MODES
def test_a_linear_fixed_point_is_a_solve(mode):
    x = by_linalg(MATRIX, RIGHT)
    assert_allclose(mode(linear)(A, B).numpy(), x, rtol=1e-9)
    da, db = mode(rg.grads(lambda a, b: (linear(a, b) ** 2).sum()))([A, B])
    u = np.linalg.solve(np.eye(4) - MATRIX.T, 2 * x)
    assert_allclose(db.numpy(), u, rtol=1e-9)
    assert_allclose(da.numpy(), np.outer(u, x), rtol=1e-9)


@MODES
def test_hessians(mode):
    inverse = np.linalg.inv(np.eye(4) - MATRIX)
    of_b = mode(rg.hessian(lambda b: (linear(A, b) ** 2).sum()))(B)
    assert_allclose(of_b.numpy(), 2 * inverse.T @ inverse, rtol=1e-9)
    of_a = mode(rg.hessian(lambda s: (linear(s * A, B) ** 2).sum()))(rg.scalar(1.0, "float64"))
    steps = 1e-30j  # the gradient by s, at a complex step
    x = by_linalg((1 + steps) * MATRIX, RIGHT)
    slope = 2 * x @ np.linalg.solve(np.eye(4) - (1 + steps) * MATRIX, MATRIX @ x)
    assert_allclose(of_a.item(), slope.imag / 1e-30, rtol=1e-9)


def test_differences_of_every_order():
    check_gradients(damped, [AT], order=3)
    check_gradients(lambda a, b: linear(a, b)[:2].sum() ** 2, [A, B], order=2)


@MODES
def test_containers_and_other_arguments(mode):
    def step(x, p, k, name):
        assert (k, name) == (0.2, "text")
        return {"u": 0.3 * rg.tanh(x["v"]) * p["w"] + k, "v": k * x["u"] + p["c"][0]}

    def f(w, c):
        start = {"u": 0.0, "v": rg.zeros(2)}
        x = rg.fixed_point(step, start, {"w": w, "c": [c]}, 0.2, "text")
        return (x["u"] * x["v"]).sum()

    check_gradients(mode(f), [np.array([1.0, 2.0]), np.array([0.3, 0.1])], order=2)


@pytest.mark.parametrize("wrap", [lambda f: f, rg.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("array", [np.asarray, jnp.asarray], ids=["NumPy", "JAX"])
def test_vmap(wrap, array):
    rights = rng.normal(size=(3, 4))
    batch = rg.tensor(array(rights))
    y = wrap(rg.vmap(linear, in_axes=(None, 0)))(A, batch)
    assert_allclose(y.numpy(), [by_linalg(MATRIX, b) for b in rights], rtol=1e-8)
    dbs = wrap(rg.vmap(rg.grad(lambda b: (linear(A, b) ** 2).sum())))(batch)
    inverse = np.linalg.inv(np.eye(4) - MATRIX)
    assert_allclose(dbs.numpy(), 2 * rights @ inverse.T @ inverse, rtol=1e-8)
    da = wrap(rg.grad(lambda a: rg.vmap(linear, in_axes=(None, 0))(a, batch).sum()))(A)
    u = np.linalg.solve(np.eye(4) - MATRIX.T, np.ones(4))
    assert_allclose(da.numpy(), sum(np.outer(u, x) for x in y.numpy()), rtol=1e-8)


def test_a_small_gradient_is_as_exact_as_a_large_one():
    f = lambda scale: rg.grad(lambda b: scale * linear(A, b).sum())(B).numpy() / scale  # noqa: E731
    assert_allclose(f(1e-20), f(1.0), rtol=1e-9)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_lower_precision(dtype):
    a = rg.tensor(0.7, dtype=dtype)
    x, dx = rg.value_and_grad(damped)(a)
    exact = rg.value_and_grad(damped)(AT)
    tolerance = {"float16": 1e-2, "float32": 1e-5}[dtype]
    assert (x.dtype, dx.dtype) == (a.dtype, a.dtype)
    assert_allclose([x.item(), dx.item()], [y.item() for y in exact], rtol=tolerance)


def test_complex_numbers():
    f = lambda a: rg.fixed_point(lambda x, a: 0.5j * x + a, 0.0, a)  # noqa: E731
    a = rg.tensor(0.7 + 1j, dtype="complex128")
    assert_allclose(f(a).numpy(), (0.7 + 1j) / (1 - 0.5j), rtol=1e-10)
    check_gradients(lambda a: rg.abs(f(a)) ** 2, [a])


def test_tolerances():
    rough = rg.fixed_point(lambda x: rg.cos(x), 1.0, rtol=0.0, atol=0.1).item()
    exact = cosine_by_scipy(1.0)
    assert 1e-3 < abs(rough - exact) < 0.1


@MODES
def test_the_start_has_no_gradient(mode):
    f = lambda x0, a: rg.fixed_point(lambda x, a: 0.5 * x + a, x0, a)  # noqa: E731
    both = mode(lambda x0, a: rg.vjp(f, x0, a)[1](rg.ones_like(a)))(AT, AT)
    assert [g.item() for g in both] == pytest.approx([0.0, 2.0])
    assert mode(rg.grad(lambda a: rg.fixed_point(lambda x, a: a, a, a) * a))(AT).item() == 1.4


def test_tapes_keep_no_iteration():
    kept = [rg.saved_bytes(lambda b, n=n: rg.fixed_point(
        lambda x, b: 0.9 * x + b, 0.0, b, rtol=n, atol=0.0))(B).total
        for n in (1e-2, 1e-12)]  # fmt: skip
    assert kept[0] == kept[1]


# -- overrides -------------------------------------------------------------------------------------


def halved(dy, x):
    return dy * 0.5 * rg.cos(x)


@MODES
def test_overrides_apply_in_the_implicit_gradient(mode):
    x = damped(AT).item()
    slope = 1 / (1 - 0.25 * np.cos(x))
    with rg.gradient_override_map({"Sin": halved}) as used:
        assert_allclose(mode(rg.grad(damped))(AT).item(), slope, rtol=1e-9)
        second = mode(rg.grad(rg.grad(damped)))(AT).item()
    used.assert_fired()
    # The derivative of the slope is true, and the derivative of x in it is by the rule.
    assert_allclose(second, slope**2 * -0.25 * np.sin(x) * slope, rtol=1e-9)
    assert_allclose(mode(rg.grad(damped))(AT).item(), 1 / (1 - 0.5 * np.cos(x)), rtol=1e-9)


@MODES
def test_overrides_do_not_apply_to_the_iteration_itself(mode):
    rules = {"AddV2": lambda dy: [3 * dy, 3 * dy], "Abs": rg.rules.optional(lambda dy: 100 * dy)}
    with rg.gradient_override_map(rules):
        found = mode(rg.grad(damped))(AT).item()
    assert_allclose(found, 3 / (1 - 1.5 * np.cos(damped(AT).item())), rtol=1e-9)


# -- torch -----------------------------------------------------------------------------------------


def test_torch():
    f = rg.torch.from_regrad(lambda b: linear(A, b)[0] ** 2)
    assert torch.autograd.gradcheck(f, torch.tensor(RIGHT, requires_grad=True))
    a = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(rg.torch.from_regrad(damped), a)
    with rg.gradient_override_map({"Sin": halved}):
        rg.torch.from_regrad(damped)(a).backward()
    assert_allclose(a.grad.item(), 1 / (1 - 0.25 * np.cos(damped(AT).item())), rtol=1e-9)


# -- errors ----------------------------------------------------------------------------------------


def growing(a, start=0.0, **options):
    return rg.fixed_point(lambda x, a: a * x + 0.1 * a, start, a, max_steps=20, **options)


def test_no_convergence():
    two = rg.tensor(2.0)
    words = r"fixed_point: .*_points\.py:\d+ did not converge in 20 steps: .* is 1\.05e\+05"
    refused(lambda: growing(two), InvalidValueError, words)
    assert np.isnan(rg.jit(growing)(two).item())
    refused(
        lambda: rg.fixed_point(lambda x: x * np.nan, 0.0, max_steps=3),
        InvalidValueError, "did not converge in 3 steps: .* is nan",
    )  # fmt: skip
    refused(
        lambda: rg.fixed_point(lambda x: x + np.inf, 0.0, max_steps=1),
        InvalidValueError,
        "did not converge",
    )


def test_no_convergence_of_the_adjoint():
    with rg.gradient_override_map({"Sin": lambda dy: 5 * dy}):
        words = "the solve of the adjoint equation of its gradient did not converge"
        with np.errstate(all="ignore"):
            refused(lambda: rg.grad(damped)(AT), InvalidValueError, words)
        assert np.isnan(rg.jit(rg.grad(damped))(AT).item())


CALLS = {
    "structure": (lambda: rg.fixed_point(lambda x: (x, x), 1.0), ArgumentError,
                  "must keep the structure of x0"),
    "shape": (lambda: rg.fixed_point(lambda x: rg.stack([x, x]), AT), ShapeError,
              r"float64 \(2,\), and returned float64 \(2, 2\)"),
    "integers": (lambda: rg.fixed_point(lambda x: rg.asarray(3), 1.0), DTypeError,
                 "must return floats, got Tensor"),
    "no function": (lambda: rg.fixed_point(3, 1.0), ArgumentError, "must be a function, got int"),
    "max_steps": (lambda: rg.fixed_point(rg.cos, 1.0, max_steps=2.5), ArgumentError, "max_steps"),
    "closes over": (lambda: rg.grad(lambda a: rg.fixed_point(lambda x: 0.5 * x + a, 0.0))(AT),
                    GradientError, "closes over Tensor.* Pass it as a separate input"),
    "jvp": (lambda: rg.jvp(damped, [AT], [AT]), GradientError, "forward mode"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), CALLS.values(), ids=CALLS)
def test_wrong_calls(call, error, words):
    refused(call, error, words)
