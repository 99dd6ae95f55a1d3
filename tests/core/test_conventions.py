"""The lines of docs/conventions.md that are about single values."""

import importlib

import numpy as np
import pytest

import regrad as rg
from tests.helpers.rows import refused

WINDOW = np.array([[1.0, 3.0], [3.0, 2.0]]).reshape(1, 2, 2, 1)
stop, TIE = rg.stop_gradient, np.array([1.0, 2.0])
KINKS = {
    "abs at 0": (rg.abs, [0.0], [0.0]), "relu at 0": (rg.nn.relu, [0.0], [0.0]),
    "relu6 at 0 and 6": (rg.nn.relu6, [0.0, 6.0], [0.0, 1.0]),
    "leaky_relu at 0": (lambda x: rg.nn.leaky_relu(x, 0.3), [0.0], [0.3]),
    "prelu at 0": (lambda x: rg.nn.prelu(x, 0.3), [0.0], [0.3]),
    "elu at 0": (rg.nn.elu, [0.0], [1.0]),
    "clip at both bounds": (lambda x: rg.clip(x, -1, 1), [-2.0, -1.0, 1.0, 2.0], [0, 1, 1, 0]),
    "clip by its lower bound, at a tie": (lambda m: rg.clip(TIE, m, 5.0), TIE, [0.0, 0.0]),
    "clip by its upper bound, at a tie": (lambda m: rg.clip(TIE, 0.0, m), TIE, [0.0, 0.0]),
    "max of ties": (rg.max, [3.0, 1.0, 3.0], [0.5, 0.0, 0.5]),
    "min of ties": (rg.min, [1.0, 1.0, 3.0], [0.5, 0.5, 0.0]),
    "maximum, first of a tie": (lambda x: rg.maximum(x, x + 0.0 * stop(x)), [2.0], [1]),
    "maximum, second of a tie": (lambda x: rg.maximum(stop(x), x), [2.0], [0.0]),
    "minimum, first of a tie": (lambda x: rg.minimum(x, stop(x)), [2.0], [1.0]),
    "minimum, second of a tie": (lambda x: rg.minimum(stop(x), x), [2.0], [0.0]),
    "max_pool of ties": (lambda x: rg.nn.max_pool(x, 2, 2, "valid"), WINDOW,
                         np.array([[0.0, 1.0], [0.0, 0.0]]).reshape(1, 2, 2, 1)),
    "where, NaN not taken": (lambda x: rg.where(x > 0, x * 2, x + np.nan), [1.0], [2.0]),
    "power by b, a <= 0": (lambda b: rg.pow(np.array([-1.0, 0.0]), b), [2.0, 2.0], [0.0, 0.0]),
    "power by a, b = 0": (lambda a: rg.pow(a, np.array([0.0, 0.0])), [0.0, 2.0], [0.0, 0.0]),
    "xlogy by a, a = 0": (lambda a: rg.xlogy(a, np.array([2.0, 0.0])), [0.0, 0.0], [0.0, 0.0]),
    "xdivy by b, a = 0": (lambda b: rg.xdivy(np.zeros(2), b), [2.0, 0.0], [0.0, 0.0]),
    "sqrt at 0": (rg.sqrt, [0.0], [np.inf]),
    "norm at 0": (rg.linalg.vector_norm, [0.0, 0.0], [0.0, 0.0]),
    "hypot at 0": (lambda x: rg.hypot(x, 0.0 * x), [0.0], [0.0]),
    "floor_divide": (lambda x: rg.floor_divide(x, 2.0), [0.4, -1.7], [0.0, 0.0]),
    **{f.__name__: (f, [0.4, -1.7], [0.0, 0.0])
       for f in (rg.sign, rg.step, rg.round, rg.floor, rg.ceil, rg.trunc)},
}  # fmt: skip


@pytest.mark.parametrize(("f", "x", "expected"), KINKS.values(), ids=KINKS)
def test_gradients_at_kinks(f, x, expected):
    np.testing.assert_array_equal(rg.grad(f)(np.asarray(x, float)).numpy(), expected)


def test_second_derivatives_at_a_kink_are_those_of_the_branch_taken():
    second = rg.grad(lambda x: rg.grad(rg.nn.elu)(x).sum(), unconnected="zero")
    assert second([0.0, 1.0]).tolist() == [0.0, 0.0]
    assert second([-1.0]).tolist() == pytest.approx([np.exp(-1.0)])


def test_smooth_functions_of_kinks_have_no_wrong_second_derivative():
    for f in (rg.linalg.vector_norm, lambda x: rg.hypot(x[0], x[1]), rg.std):
        assert np.isnan(rg.hessian(lambda x, f=f: f(x) ** 2)(np.zeros(2)).numpy()).all()
        assert rg.hessian(f)(np.zeros(2)).tolist() == [[0, 0], [0, 0]]
    assert rg.hessian(lambda x: (rg.abs(x) ** 2).sum())(np.zeros(1)).tolist() == [[0]]
    log_det = rg.hessian(lambda x: rg.sum(rg.log(rg.linalg.eigvalsh(x))))(np.eye(2))
    assert np.isnan(log_det.numpy()[0, 1]).all()
    assert not rg.hessian(lambda x: rg.sum(rg.linalg.eigvalsh(x)))(np.eye(2)).numpy().any()


ORDERED = [
    rg.nn.relu, rg.nn.relu6, rg.nn.leaky_relu, rg.nn.elu, rg.nn.selu, rg.step, rg.nn.softplus,
    rg.nn.log_sigmoid, rg.nn.mish, rg.argmax, rg.argmin, rg.floor, rg.ceil, rg.trunc, rg.signbit,
    lambda z: rg.maximum(z, 1.0), lambda z: rg.minimum(z, z), lambda z: rg.clip(z, -1, 1),
    lambda z: z < z, lambda z: z >= 0, lambda z: rg.nn.prelu(z, 0.2), lambda z: z // 2,
    lambda z: z % 2, lambda z: rg.atan2(z, z), lambda z: rg.copysign(z, z),
    lambda z: rg.nextafter(z, z),
]  # fmt: skip


@pytest.mark.parametrize("f", ORDERED)
@pytest.mark.parametrize("library", ["numpy", "jax.numpy", "torch"])
def test_complex_numbers_have_no_order(f, library):
    z = rg.asarray(importlib.import_module(library).asarray([1 + 2j, 3j]))
    refused(lambda: f(z), rg.errors.DTypeError, "have no order")


def test_float64_on_jax_without_x64_raises():
    jax = pytest.importorskip("jax")
    with jax.enable_x64(False):
        x = rg.asarray(jax.numpy.ones(2))
        for call in (lambda: x * np.ones(2), lambda: rg.astype(x, rg.float64)):
            refused(call, rg.errors.DTypeError, "x64 mode")
        assert (x * rg.asarray([1, 2])).dtype == rg.float32
