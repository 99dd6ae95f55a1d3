"""Surrogates of spikes against formulas by hand, on each host, to second order."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regrad as rg
import regrad.jax
from regrad.errors import ArgumentError
from regrad.rules import spike
from tests.helpers import differences
from tests.helpers.hosts import HOSTS, weights

# (with the thresholds at which formulas change; differences are taken away from these)
X = np.array([-2.3, -1.0, -0.31, 0.0, 0.27, 1.0, 1.0625, 3.4])
EDGES = {-1.0, 0.0, 1.0}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def normal(x, mean, deviation):
    return np.exp(-0.5 * ((x - mean) / deviation) ** 2) / (deviation * math.sqrt(2 * math.pi))


def of_s2nn(x, a, b):
    return np.where(x < 0, a * sigmoid(a * x) * (1 - sigmoid(a * x)), b / (np.abs(x) + 1))


def of_multi_gaussian(x, w, h, r):
    sides = normal(x, w, r * w) + normal(x, -w, r * w)
    return (1 + h) * normal(x, 0, w) - h * sides


def of_periodic(x, w, t):
    nearest = np.where(x < 0, 0.0, np.floor(x / t + 0.5) * t)
    return np.exp(-np.abs(x - nearest) / w) / t


ROWS = {
    "piecewise_exp": (spike.piecewise_exp(), lambda x: np.exp(-abs(x)) / 2),
    "piecewise_exp 3": (spike.piecewise_exp(3.0, area=2.0), lambda x: 3 * np.exp(-3 * abs(x))),
    "multi_gaussian": (spike.multi_gaussian(), lambda x: of_multi_gaussian(x, 0.5, 0.15, 6.0)),
    "multi_gaussian 1": (spike.multi_gaussian(1.0, height=0.3, ratio=2.0),
                         lambda x: of_multi_gaussian(x, 1.0, 0.3, 2.0)),
    "s2nn": (spike.s2nn(), lambda x: of_s2nn(x, 4.0, 1.0)),
    "s2nn 2": (spike.s2nn(2.0, height=0.5), lambda x: of_s2nn(x, 2.0, 0.5)),
    "q_pseudo_spike": (spike.q_pseudo_spike(), lambda x: (1 + 2 * abs(x)) ** -2.0),
    "q_pseudo_spike 3": (spike.q_pseudo_spike(3.0, height=2.0), lambda x: 2 * (1 + abs(x)) ** -3.0),
    "nonzero_sign_log_abs": (spike.nonzero_sign_log_abs(2.0), lambda x: 1 / (0.5 + abs(x))),
    "leaky_k_relu": (spike.leaky_k_relu(0.1, 0.7), lambda x: np.where(x >= 0, 0.7, 0.1)),
    "StepPWL": (spike.leaky_k_relu(shift=-0.5), lambda x: np.where(x >= -0.5, 1.0, 0.0)),
    "piecewise_leaky_relu": (spike.piecewise_leaky_relu(2.0, leak=0.05),
                             lambda x: np.where(abs(x) < 2, 0.25, 0.05)),
    "fake_numerical": (spike.fake_numerical(), lambda x: np.minimum(
        1 / np.maximum(abs(x), 1e-9), 0.3)),
    "log_tailed_relu": (spike.log_tailed_relu(0.1), lambda x: np.where(
        x > 1, 1 / np.maximum(x, 1), np.where(x <= 0, 0.1, 1.0))),
    "fourier": (spike.fourier(), lambda x: np.cos(math.pi * x / 4) / 2),
    "fourier 2": (spike.fourier(2, width=4.0), lambda x: np.cos(math.pi * x / 2)
                  + np.cos(3 * math.pi * x / 2)),
    "circ": (spike.circ(2.0), lambda x: (1 + x**2 / 4) ** -1.5),
    "sparse_fast_sigmoid": (spike.sparse_fast_sigmoid(5.0, width=2.0), lambda x: np.where(
        abs(x) < 2, (1 + 5 * abs(x)) ** -2.0, 0.0)),
    "snntorch's SFS": (spike.sparse_fast_sigmoid(above=True), lambda x: np.where(
        x > 1, (1 + 25 * abs(x)) ** -2.0, 0.0)),
    "rate_escape": (spike.rate_escape(5.0, rate=2.0), lambda x: 5 * np.exp(-2 * abs(x - 1))),
    "periodic_exponential": (spike.periodic_exponential(), lambda x: of_periodic(x, 0.5, 1.0)),
    "periodic_exponential 2": (spike.periodic_exponential(1.0, period=2.0),
                               lambda x: of_periodic(x, 1.0, 2.0)),
}  # fmt: skip
RUNS = [(name, host) for name in ROWS for host in HOSTS if host not in ("v1", "jax", "jax, jit")]


def test_each_surrogate_has_a_row():
    known = {n for n, f in vars(spike).items() if getattr(f, "__module__", "") == spike.__name__}
    made = {name for name in known if name.islower() and not name.startswith("_")}
    assert made == {name.split()[0] for name in ROWS} - {"StepPWL", "snntorch's"}


@pytest.mark.slow(but=40)
@pytest.mark.parametrize(("name", "host"), RUNS)
def test_a_surrogate_is_its_formula(name, host):
    rule, formula = ROWS[name]
    step = ("step", "heaviside")["torch" in host]
    more = {"torch": lambda o, x: o.heaviside(x, x.new_zeros(()))}
    program = more.get(host, lambda o, x: getattr(o, step)(x))
    _, (dx,), used = HOSTS[host](program, lambda o: {"Step": rule}, (X,))
    np.testing.assert_allclose(dx, weights([X])[0] * formula(X), rtol=1e-12, atol=1e-14)
    assert np.asarray(dx).dtype == np.float64
    used.assert_fired()
    _, (found,), _ = HOSTS[host](program, lambda o: {"Step": rule}, (X,), 2)
    inner = np.array([x not in EDGES for x in X])
    due = np.diagonal(differences.jacobian(formula, X, 1e-4)) * weights([X])[0]
    np.testing.assert_allclose(np.asarray(found)[inner], due[inner], rtol=1e-6, atol=1e-7)


def test_a_slope_that_is_annealed_is_an_array():
    traces = []

    @jax.jit
    def gradient(slope, x):
        traces.append(0)
        rules = {"Sign": spike.piecewise_exp(slope)}
        return jax.grad(lambda x: rg.jax.override(jnp.sign, rules)(x).sum())(x)

    for slope in (1.0, 2.0, 4.0):
        found = gradient(slope, jnp.array([0.0, 0.5]))
        np.testing.assert_allclose(found, slope / 2 * np.exp([0, -slope / 2]), rtol=1e-6)
    assert len(traces) == 1


@pytest.mark.parametrize(("call", "words"), [
    (lambda: spike.circ(-1.0), "circ: width is a number of 0 or more, got -1.0"),
    (lambda: spike.circ("2"), "width is a number of 0 or more"),
    (lambda: spike.circ(wdth=1.0), "unexpected keyword argument 'wdth'.*mean 'width'"),
])  # fmt: skip
def test_bad_parameters_are_refused(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
