"""The surrogates of snntorch, spikingjelly, norse, sinabs, spyx, Lava and Rockpool, and ours.

The calls are texts, so that the page shows the programs that ran.
"""

import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

import regrad as rg
from regrad.rules import spike

PACKAGES = ("torch", "snntorch", "spikingjelly", "norse", "sinabs", "jax", "spyx")
OURS = {**vars(rg.rules), "spike": spike, "math": math, "np": np}


class Case(NamedTuple):
    """A surrogate of a peer, and ours.

    Args:
        package: The peer.
        name: The peer's call, without the x.
        ours: Our call.
        factor: The peer's gradient, divided by ours.
        note: The peer's convention, in words.
        off: Where the peer's gradient is another one: a text for the page, else "".
        second: Where its second order is another one: a text, else "".
        is_single: Whether the peer computes in float32, also for inputs in float64.
        default: Whether the parameters are the peer's defaults.
    """

    package: str
    name: str
    ours: str
    factor: float = 1.0
    note: str = ""
    off: str = ""
    second: str = ""
    is_single: bool = False
    default: bool = True

    def rule(self) -> Any:
        """Return our rule, multiplied by the factor."""
        made = eval(self.ours, dict(OURS))
        return made if self.factor == 1 else lambda dy, x: self.factor * made(dy, x)


# -- the peers -------------------------------------------------------------------------------------


class Peer(NamedTuple):
    """A library of surrogates.

    Args:
        spikes: A function of the text of a call that returns a function of x, which spikes.
        at_zero: The value of a spike at the threshold.
        functions: The module that has its Functions of autograd.
        moved: The threshold that its Functions take away themselves.
    """

    spikes: Callable[[str], Callable[[Any], Any]]
    at_zero: float
    functions: Any = None
    moved: float = 0.0


def peer(package: str) -> Peer:
    """Return a peer, whose package is imported."""
    return globals()[f"{package.lower()}_peer"]()


def snntorch_peer() -> Peer:
    from snntorch import surrogate

    return Peer(lambda name: eval(name, dict(vars(surrogate))), 0.0, surrogate)


def spikingjelly_peer() -> Peer:
    from spikingjelly.activation_based import surrogate

    return Peer(lambda name: eval(name, dict(vars(surrogate))), 1.0, surrogate)


def norse_peer() -> Peer:
    from norse.torch.functional import superspike, threshold

    method = "threshold(x, {})".format
    scope = dict(vars(threshold))
    module: Any = type(sys)("norse_functions")
    vars(module).update(scope, SuperSpike=superspike.SuperSpike)
    return Peer(lambda name: eval(f"lambda x: {method(name)}", scope), 0.0, module)


def sinabs_peer() -> Peer:
    from sinabs import activation

    def spikes(name: str) -> Callable[[Any], Any]:
        function = eval(name, dict(vars(activation)))
        kind = "MultiSpike" if "Periodic" in name else "SingleSpike"
        return lambda x: getattr(activation, kind).apply(x + 1.0, 1.0, function)

    return Peer(spikes, 1.0, activation, moved=1.0)


def lava_peer() -> Peer:
    """Lava's surrogates by the formulas of its public source (its package needs CUDA builds)."""

    class Spike(torch.autograd.Function):
        """The formulas of lava/lib/dl/slayer/spike/spike.py, for a threshold of 1."""

        @staticmethod
        def forward(ctx: Any, x: Any, tau: float, scale: float, graded: bool) -> Any:
            ctx.save_for_backward(x)
            ctx.options = tau, scale, graded
            return (x >= 0).to(x.dtype) * (x + 1.0 if graded else 1.0)

        @staticmethod
        def backward(ctx: Any, *dys: Any) -> Any:
            (x,), (tau, scale, graded) = ctx.saved_tensors, ctx.options
            # (`clamp(x, max=0)` there, whose slope at 0 itself is another one in PyTorch 2.15)
            far = torch.where(x > 0, 0 * x, x) if graded else -torch.abs(x)
            return dys[0] * scale / (1 if graded else 2 * tau) * torch.exp(far / tau), *[None] * 3

    scope = {"Spike": lambda *options: lambda x: Spike.apply(x, *options)}
    module: Any = type(sys)("lava_formulas")
    module.Spike = Spike
    return Peer(lambda name: eval(name, dict(scope)), 1.0, module)


def rockpool_peer() -> Peer:
    """Rockpool's surrogates by the formulas of its public source."""

    class Counts(torch.autograd.Function):
        """The formulas of rockpool/nn/modules/torch/lif_torch.py, for a threshold of 1."""

        @staticmethod
        def forward(ctx: Any, v: Any, name: str, window: float) -> Any:
            ctx.save_for_backward(v)
            ctx.options = name, window
            return (v >= 1) * torch.floor(v)

        @staticmethod
        def backward(ctx: Any, *dys: Any) -> Any:
            (v,), (name, window) = ctx.saved_tensors, ctx.options
            if name == "StepPWL":
                return dys[0] * (v >= 1 - window), None, None
            shifted = v - 0.5
            periodic = torch.where(v < 1, shifted, shifted - torch.floor(shifted))
            return dys[0] * torch.exp(-torch.abs(periodic - 0.5) / window), None, None

    def spikes(name: str) -> Callable[[Any], Any]:
        kind, _, window = name.removesuffix(")").partition("(")
        return lambda x: Counts.apply(x + 1.0, kind, float(window))

    module: Any = type(sys)("rockpool_formulas")
    module.Counts = Counts
    return Peer(spikes, 1.0, module, moved=1.0)


def spyx_axn() -> Any:
    """Return spyx's module of activations, without the packages that other modules of spyx need."""
    folder = importlib.util.find_spec("spyx").submodule_search_locations[0]  # pyright: ignore
    spec: Any = importlib.util.spec_from_file_location("spyx_axn", f"{folder}/axn.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def spyx_peer() -> Peer:
    return Peer(lambda name: eval(name, dict(vars(spyx_axn()))), 0.0)


# -- the cases -------------------------------------------------------------------------------------


AGAIN = "it differentiates the spikes that it has saved"
EDGE = "its slope at the bounds is 0; ours is the slope inside"
SNNTORCH = [
    ("straight_through_estimator()", "straight_through"),
    ("fast_sigmoid(25)", "superspike(25.0)"),
    ("fast_sigmoid(4)", "superspike(4.0)", {"default": False}),
    ("atan(2.0)", "arctan_surrogate(2.0)"),
    ("atan(5.0)", "arctan_surrogate(5.0)", {"default": False}),
    ("sigmoid(25)", "sigmoid_surrogate(25.0)", {
        "factor": 25 / 4, "note": "k / 4 at 0; ours is 1"}),
    ("sigmoid(2)", "sigmoid_surrogate(2.0)", {
        "factor": 2 / 4, "default": False, "note": "k / 4 at 0; ours is 1"}),
    ("heaviside()", "spike.leaky_k_relu(closed=False)", {
        "note": "0 at the threshold itself", "second": AGAIN}),
    ("spike_rate_escape(1, 25)", "spike.rate_escape(25.0, rate=1.0)", {
        "note": "centered at x = 1, the threshold added twice"}),
    ("spike_rate_escape(2, 0.5)", "spike.rate_escape(0.5, rate=2.0)", {"default": False}),
    ("SFS(25, 1)", "spike.sparse_fast_sigmoid(25.0, width=1.0, above=True)", {
        "note": "where x > B; the paper has |x| < B"}),
    ("SFS(2, 0.5)", "spike.sparse_fast_sigmoid(2.0, width=0.5, above=True)", {"default": False}),
    ("SSO(1, 0)", "spike.leaky_k_relu(0.0, closed=False)", {
        "default": False, "note": "a variance of 0; otherwise noise below the threshold",
        "second": AGAIN}),
    ("triangular(1)", "triangle()", {
        "off": "no triangle: `threshold` below 0, and `-threshold` from 0 on"}),
    ("LSO(0.1)", "spike.leaky_k_relu(0.1, closed=False)", {
        "off": "raises: `LSO` calls the stochastic operator, with one argument too few"}),
]  # fmt: skip
SPIKINGJELLY = [
    ("PiecewiseQuadratic(1.0)", "triangle(1.0, 1.0)"),
    ("PiecewiseQuadratic(2.0)", "triangle(1 / 2, 2.0)", {"default": False}),
    ("PiecewiseExp(1.0)", "spike.piecewise_exp(1.0)"),
    ("PiecewiseExp(3.0)", "spike.piecewise_exp(3.0)", {"default": False}),
    ("Sigmoid(4.0)", "sigmoid_surrogate(4.0)", {"note": "alpha / 4 at 0: equal at 4"}),
    ("Sigmoid(10.0)", "sigmoid_surrogate(10.0)", {
        "factor": 10 / 4, "default": False, "note": "alpha / 4 at 0; ours is 1"}),
    ("SoftSign(2.0)", "superspike(2.0)", {"note": "alpha / 2 at 0: equal at 2"}),
    ("SoftSign(4.0)", "superspike(4.0)", {
        "factor": 2.0, "default": False, "note": "alpha / 2 at 0; ours is 1"}),
    ("SuperSpike(1.0)", "superspike(1.0)", {"note": "alpha is a height: equal at 1"}),
    ("SuperSpike(3.0)", "superspike(1.0)", {
        "factor": 3.0, "default": False, "note": "alpha is a height, and the slope is 1"}),
    ("ATan(2.0)", "arctan_surrogate(2.0)"),
    ("ATan(5.0)", "arctan_surrogate(5.0)", {"default": False}),
    ("NonzeroSignLogAbs(1.0)", "spike.nonzero_sign_log_abs(1.0)"),
    ("NonzeroSignLogAbs(4.0)", "spike.nonzero_sign_log_abs(4.0)", {"default": False}),
    ("Erf(2.0)", "gaussian(1 / (2 * math.sqrt(2)))"),
    ("Erf(1.0)", "gaussian(1 / math.sqrt(2))", {"default": False}),
    ("PiecewiseLeakyReLU(1.0, 0.01)", "spike.piecewise_leaky_relu(1.0, leak=0.01)"),
    ("PiecewiseLeakyReLU(0.5, 0.1)", "spike.piecewise_leaky_relu(0.5, leak=0.1)", {
        "default": False}),
    ("SquarewaveFourierSeries(2, 8)", "spike.fourier(1, width=8.0)", {
        "note": "n - 1 terms"}),
    ("SquarewaveFourierSeries(4, 4)", "spike.fourier(3, width=4.0)", {
        "default": False, "note": "n - 1 terms"}),
    ("S2NN(4.0, 1.0)", "spike.s2nn(4.0)"),
    ("S2NN(2.0, 0.5)", "spike.s2nn(2.0, height=0.5)", {"default": False}),
    ("QPseudoSpike(2.0)", "spike.q_pseudo_spike(2.0)"),
    ("QPseudoSpike(3.0)", "spike.q_pseudo_spike(3.0)", {"default": False}),
    ("LeakyKReLU(0.0, 1.0)", "spike.leaky_k_relu()"),
    ("LeakyKReLU(0.1, 2.0)", "spike.leaky_k_relu(0.1, 2.0)", {"default": False}),
    ("FakeNumericalGradient(0.3)", "spike.fake_numerical(0.3)"),
    ("FakeNumericalGradient(2.0)", "spike.fake_numerical(2.0)", {
        "default": False, "second": "its slope at the bounds is the slope outside; ours is 0"}),
    ("LogTailedReLU(0.0)", "spike.log_tailed_relu()"),
    ("LogTailedReLU(0.2)", "spike.log_tailed_relu(0.2)", {"default": False}),
    ("DeterministicPass()", "straight_through"),
    ("Rect(1.0)", "rectangle(1.0)"),
    ("Rect(4.0)", "rectangle(1 / 4)", {"default": False}),
]  # fmt: skip
NORSE = [
    ('"super", 100.0', "superspike(1.0)", {"note": "alpha has no effect: the slope is 1"}),
    ('"triangle", 0.3', "triangle(1.0, 0.3)", {"second": EDGE}),
    ('"triangle", 2.0', "triangle(1.0, 2.0)", {"default": False, "second": EDGE}),
    ('"tanh", 100.0', "sigmoid_surrogate(200.0)", {"note": "a slope of 2 k"}),
    ('"tanh", 1.5', "sigmoid_surrogate(3.0)", {"default": False, "note": "a slope of 2 k"}),
    ('"circ", 1.0', "spike.circ(1.0)", {"default": False}),
    ('"circ", 2.0', "spike.circ(2.0)", {"default": False}),
    ('"heavi_erfc", 1.0', "gaussian(1 / math.sqrt(2))", {
        "default": False, "factor": 2.0, "is_single": True,
        "note": "2 / k times the density, with π in float32"}),
    ('"heavi_erfc", 2.0', "gaussian(1 / (2 * math.sqrt(2)))", {
        "default": False, "is_single": True,
        "note": "2 / k times the density: equal at 2; π in float32"}),
]  # fmt: skip
TWICE = "above the threshold it takes twice the distance to the nearest multiple"
SINABS = [
    ("Heaviside(1.0)", "spike.leaky_k_relu(shift=-1.0)"),
    ("Heaviside(0.5)", "spike.leaky_k_relu(shift=-0.5)", {"default": False}),
    ("Gaussian()", "gaussian(0.5)"),
    ("Gaussian(sigma=1.0, grad_scale=2.0)", "gaussian(1.0)", {"factor": 2.0, "default": False}),
    ("MultiGaussian()", "spike.multi_gaussian()"),
    ("MultiGaussian(sigma=1.0, h=0.3, s=2)", "spike.multi_gaussian(1.0, height=0.3, ratio=2.0)", {
        "default": False}),
    ("SingleExponential()", "spike.piecewise_exp(2.0, area=2.0)", {
        "note": "an integral of 2: 1 / w at 0"}),
    ("SingleExponential(0.25)", "spike.piecewise_exp(4.0, area=2.0)", {
        "default": False, "note": "an integral of 2: 1 / w at 0"}),
    ("PeriodicExponential()", "spike.periodic_exponential(0.5)", {
        "note": "the value is a count of spikes", "off": TWICE}),
    ("PeriodicExponential(0.25, 2.0)", "spike.periodic_exponential(0.25, area=2.0)", {
        "default": False, "note": "the value is a count of spikes", "off": TWICE}),
]  # fmt: skip
LAVA = [
    ("Spike(1.0, 1.0, False)", "spike.piecewise_exp(1.0)"),
    ("Spike(0.25, 2.0, False)", "spike.piecewise_exp(4.0, area=2.0)", {"default": False}),
    ("Spike(1.0, 1.0, True)", "spike.graded()", {"note": "a graded spike: its value is x + 1"}),
    ("Spike(0.25, 2.0, True)", "spike.graded(4.0, height=2.0)", {
        "default": False, "note": "a graded spike: its value is x + 1"}),
]  # fmt: skip
RIGHT = "its slope at 0 is the slope on the right, as in `jnp.abs`; ours is 0"
COUNT = "the value is a count of spikes"
ROCKPOOL = [
    ("StepPWL(0.5)", "spike.leaky_k_relu(shift=-0.5)", {"note": COUNT}),
    ("PeriodicExponential(0.5)", "spike.periodic_exponential(0.5)", {"note": COUNT}),
    ("PeriodicExponential(0.25)", "spike.periodic_exponential(0.25)", {
        "default": False, "note": COUNT}),
]  # fmt: skip
SPYX = [
    ("superspike(25)", "superspike(25.0)", {"second": RIGHT}),
    ("superspike(4)", "superspike(4.0)", {"default": False, "second": RIGHT}),
    ("tanh(1)", "sigmoid_surrogate(2.0)", {"note": "a slope of 2 k"}),
    ("tanh(2)", "sigmoid_surrogate(4.0)", {"default": False, "note": "a slope of 2 k"}),
    ("triangular(2)", "triangle(1 / 2)", {"second": RIGHT}),
    ("triangular(0.5)", "triangle(2.0)", {"default": False, "second": RIGHT}),
    ("boxcar(2, 0.5)", "rectangle(2.0)"),
    ("boxcar(1, 2.0)", "rectangle(1.0)", {"factor": 2.0, "default": False}),
    ("arctan(2)", "arctan_surrogate(4.0)", {
        "factor": 1 / (2 * math.pi), "note": "a slope of 2 k, and 1 / π at 0; ours is k"}),
    ("arctan(1)", "arctan_surrogate(2.0)", {
        "factor": 1 / math.pi, "default": False,
        "note": "a slope of 2 k, and 1 / π at 0; ours is k"}),
    ("custom(lambda x: 1.0)", "straight_through"),
]  # fmt: skip
ALL = {"snntorch": SNNTORCH, "spikingjelly": SPIKINGJELLY, "norse": NORSE, "sinabs": SINABS,
       "Lava": LAVA, "Rockpool": ROCKPOOL, "spyx": SPYX}  # fmt: skip


def cases(only: str = "") -> Iterator[Case]:
    for package, rows in ALL.items():
        if package.lower().startswith(only.lower()):
            for name, ours, *options in rows:
                given: dict[str, Any] = {"is_single": package in ("snntorch", "sinabs")}
                yield Case(package, name, ours, **given | (options[0] if options else {}))
