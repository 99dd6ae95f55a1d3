"""Surrogates of spikes against formulas by hand, on each host, to second order."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regrad as rg
import regrad.jax
import regrad.torch
from regrad.errors import RegradError
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
    "leaky_k_relu open": (spike.leaky_k_relu(0.1, closed=False), lambda x: np.where(
        x > 0, 1.0, 0.1)),
    "StepPWL": (spike.leaky_k_relu(shift=-0.5), lambda x: np.where(x >= -0.5, 1.0, 0.0)),
    "graded": (spike.graded(), lambda x: np.exp(np.minimum(x, 0))),
    "graded 3": (spike.graded(3.0, height=2.0), lambda x: 2 * np.exp(3 * np.minimum(x, 0))),
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


@pytest.mark.parametrize("make", [rg.rules.superspike, rg.rules.gaussian, spike.circ])
def test_a_slope_that_is_annealed_is_a_variable(make):
    width = rg.Variable(1.0, trainable=False)

    @rg.jit
    def gradient(x):
        with rg.gradient_override_map({"Step": make(width)}):
            return rg.grad(rg.step)(x)

    for value in (1.0, 2.0, 4.0):
        width.assign(value)
        found = gradient(rg.tensor([0.0, 0.5]))
        np.testing.assert_allclose(found, make(value)(1.0, rg.tensor([0.0, 0.5])), rtol=1e-6)
    assert gradient.cache_info().traces == 1


# -- points, dtypes and parameters at the edge -----------------------------------------------------

MADE = {name: getattr(spike, name)() for name in sorted({n.split()[0] for n in ROWS} - {"StepPWL",
        "snntorch's"})}  # fmt: skip
MADE |= {
    name: getattr(rg.rules, name)()
    for name in (
        "superspike",
        "sigmoid_surrogate",
        "triangle",
        "rectangle",
        "arctan_surrogate",
        "gaussian",
    )
}
MADE |= {"sparse above": spike.sparse_fast_sigmoid(above=True)}  # fmt: skip
FAR = np.array([-np.inf, -6e4, -300.0, 0.0, 300.0, 6e4, np.inf])
# (these do not fall at all, or on one side, or as slowly as 1 / x)
LASTING = {"leaky_k_relu", "graded", "piecewise_leaky_relu"}
WAVES = {"fourier", "periodic_exponential"}  # which have no limit at inf


def both_orders(f, x):
    """Return the first and second derivatives of an elementwise function of regrad's."""
    first = rg.grad(lambda x: rg.sum(f(x)))
    return first(x), rg.grads(lambda x: rg.sum(first(x)), unconnected="zero")([x])[0]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", MADE)
def test_far_points_and_halves(name, dtype):
    with np.errstate(all="raise", under="ignore"), rg.gradient_override_map({"Step": MADE[name]}):
        found = both_orders(rg.step, rg.tensor(FAR, dtype=dtype))
        exact = both_orders(rg.step, rg.tensor(FAR.astype(dtype), dtype="float64"))
    for dx, due in zip(found, exact, strict=True):
        assert dx.dtype == dtype and np.isfinite(dx).all()
        coarse = {"float16": 1e-3, "float32": 1e-6, "float64": 0.0}[dtype]
        at = slice(1, -1) if name in WAVES else slice(None)
        wide = 1e-2 if name == "fourier" else 1e-3 * coarse  # (the cosine of a large angle)
        np.testing.assert_allclose(dx.numpy()[at], due.numpy()[at], rtol=coarse, atol=wide)
    if name not in LASTING | WAVES:
        assert abs(np.float64(found[0])[[0, -1]]).max() < 1e-14


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("road", ["jax", "jax, jit", "torch", "torch, aot_eager"])
def test_halves_on_hosts(road, dtype):
    names = ["superspike", "arctan_surrogate", "gaussian", "multi_gaussian", "q_pseudo_spike"]
    for name in names if "aot" not in road else names[:2]:
        run = first_by_torch if "torch" in road else first_by_jax
        found = run(MADE[name], dtype, road)
        assert np.isfinite(found).all()
        with rg.gradient_override_map({"Step": MADE[name]}):
            due = rg.grad(rg.step)(rg.tensor(FAR))
        np.testing.assert_allclose(found[3], due.numpy()[3], rtol=4e-3)
        np.testing.assert_allclose(found, due, rtol=0.05, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("given", ["array", "float64", "own"])
def test_arrays_as_parameters_in_torch(given, dtype):
    torch = pytest.importorskip("torch")
    slopes = torch.tensor([0.5, 2.0], dtype=torch.float64)
    one = {"array": slopes.numpy(), "float64": slopes, "own": slopes.to(getattr(torch, dtype))}
    x = torch.tensor([1.0, -1.0], dtype=getattr(torch, dtype), requires_grad=True)
    with regrad.torch.gradient_override_map({"Step": rg.rules.superspike(one[given])}):
        y = torch.heaviside(x, x.new_zeros(()))
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (found,) = torch.autograd.grad(dx.sum(), x)
    assert dx.dtype == found.dtype == x.dtype
    np.testing.assert_allclose(dx.detach().float(), [1 / 1.5**2, 1 / 9], rtol=5e-3)
    np.testing.assert_allclose(found.float(), [-1 / 1.5**3, 4 / 27], rtol=5e-3)


def first_by_torch(rule, dtype, road):
    torch = pytest.importorskip("torch")
    x = torch.tensor(FAR, dtype=getattr(torch, dtype), requires_grad=True)
    f = lambda x: torch.heaviside(x, x.new_zeros(()))  # noqa: E731
    if "aot" in road:
        torch.compiler.reset()
        f = torch.compile(f, backend="aot_eager")
    with regrad.torch.gradient_override_map({"Step": rule}) as used:
        (dx,) = torch.autograd.grad(f(x).sum(), x)
    used.assert_fired()
    assert dx.dtype == x.dtype
    return dx.double().numpy()


def first_by_jax(rule, dtype, road):
    f = rg.jax.override(lambda x: jnp.sign(x), {"Sign": rule})
    gradient = jax.grad(lambda x: f(x).sum())
    dx = (jax.jit(gradient) if "jit" in road else gradient)(jnp.array(FAR, dtype))
    assert dx.dtype == dtype
    return np.asarray(dx, "float64")


@pytest.mark.parametrize("name", ["superspike", "gaussian", "circ", "graded"])
def test_scalars_and_arrays_as_parameters(name):
    make = getattr(rg.rules, name, None) or getattr(spike, name)
    x, slopes = np.array([[0.0, 0.5, -1.5]], "float32"), np.array([0.5, 1.0, 2.0])  # (in float64)
    each = [make(s)(1.0, rg.tensor(v)).item() for s, v in zip(slopes, x[0], strict=True)]
    for given in (slopes, rg.tensor(slopes)):
        with rg.gradient_override_map({"Step": make(given)}):
            dx = rg.grad(rg.step)(rg.tensor(x))
        assert dx.shape == (1, 3) and dx.dtype == "float32"
        np.testing.assert_allclose(dx.numpy()[0], each, rtol=1e-6)
    with rg.gradient_override_map({"Step": make(rg.tensor(2.0))}):
        assert rg.grad(rg.step)(rg.tensor(-1.5)).item() == pytest.approx(each[-1])


def test_noise_below_the_threshold():
    noise = np.array([0.05, -0.1, 0.02, 0.1])  # the stochastic spike operator, with its noise
    with rg.gradient_override_map({"Step": spike.leaky_k_relu(noise, closed=False)}):
        dx = rg.grad(rg.step)(rg.tensor([-1.0, 0.0, 2.0, -3.0], dtype="float64"))
    assert dx.tolist() == [0.05, -0.1, 1.0, 0.1]


def test_graded_spikes_replace_the_value():
    def magnitude(x):
        return rg.where(x >= 0, x + 1.0, 0.0)

    rules = {"Step": rg.replace(magnitude, spike.graded(2.0))}
    with rg.gradient_override_map(rules, values=True) as used:
        y, dx = rg.value_and_grad(lambda x: rg.sum(rg.step(x) * [1, 2, 4]))([-0.5, 0.0, 3.0])
    used.assert_fired()
    assert y == 2 + 16
    np.testing.assert_allclose(dx, [math.exp(-1), 2, 4], rtol=1e-6)


# -- messages --------------------------------------------------------------------------------------


def open_with(rule, key="Step", f=rg.step, x=(0.5, -0.5)):
    with rg.gradient_override_map({key: rule}) as used:
        rg.grad(lambda x: rg.sum(f(x)))(rg.tensor(x))
    used.assert_fired()


@pytest.mark.parametrize(("call", "words"), [
    (lambda: spike.circ(-1.0), "circ: width is a number above 0, a Tensor or an array .default "
                               "1.0., got -1.0"),
    (lambda: spike.circ("2"), "circ: width is a number above 0, .*got '2'"),
    (lambda: spike.circ(None), "circ: width is a number above 0, .*got None"),
    (lambda: spike.circ(0.0), "circ: width is a number above 0, .*got 0.0"),
    (lambda: spike.circ(shift="left"), "circ: shift is a number, a Tensor .*got 'left'"),
    (lambda: spike.circ(wdth=1.0), "unexpected keyword argument 'wdth'.*mean 'width'"),
    (lambda: spike.circ(1.0, 2.0), "circ: too many positional arguments.*circ.width, shift"),
    (lambda: spike.q_pseudo_spike(1.0), "q_pseudo_spike: slope is a number above 1, .*got 1.0"),
    (lambda: spike.fourier(0), "fourier: terms is a whole number above 0 .default 1., got 0"),
    (lambda: spike.fourier(1.5), "terms is a whole number above 0 .*got 1.5"),
    (lambda: spike.sparse_fast_sigmoid(above="yes"), "above is True or False .*got 'yes'"),
    (lambda: rg.rules.gaussian(0.0), "gaussian: sigma is a number above 0, .*got 0.0"),
    (lambda: rg.rules.superspike(math.nan), "superspike: beta is a number of 0 or more.*got nan"),
    (lambda: rg.rules.superspike([1.0, 2.0]), r"beta is a number .*a Tensor or an array.*got \["),
    (lambda: rg.rules.superspike(slope=3.0), "superspike: got an unexp.*'slope'. It takes beta"),
    (lambda: spike.cric, "no attribute 'cric'. Did you mean 'circ'"),
    (lambda: open_with(spike.circ), r"'circ' takes .width.*If it makes rules, call it: circ"),
    (lambda: open_with(spike.circ(np.ones(3))),
     r"circ: width has the shape .3,., expected a shape that broadcasts to the shape of x, .2,."),
    (lambda: open_with(spike.circ(np.ones((1, 2)))), r"has the shape .1, 2., expected a"),
    (lambda: open_with(spike.circ(), "Mul", lambda x: x * x),
     "the rule 'circ' .*takes 'x', which the op type 'Mul' does not have.*it may name a, b"),
    (lambda: open_with(spike.circ(), f=rg.square), "'circ' for the op type 'Step' never ran"),
    (lambda: open_with(spike.circ(), "Stepp"), "no op type 'Stepp'. Did you mean 'Step'"),
    (lambda: open_with("circ"), "no rule is registered as 'circ'.*or pass the function itself"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::regrad.errors.UnusedOverrideWarning")
def test_misuse_is_refused(call, words):
    with pytest.raises((RegradError, AttributeError), match=words):
        call()
