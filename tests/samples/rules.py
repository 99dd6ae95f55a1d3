"""Rules of overrides that mean the same on every host: the expected gradients are formulas by hand.

`tests/core/test_rules_on_hosts.py` runs each row in regrad, in a graph of TensorFlow 1, in PyTorch
and in JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

import regrad as rg
from regrad.errors import ArgumentError

REGRAD, GRAPH, TORCH, JAX = ("regrad", "regrad, jit"), ("v1",), ("torch",), ("jax", "jax, jit")
ALL = REGRAD + GRAPH + TORCH + JAX
PARTS = np.arange(1.0, 5)
X, Y = np.array([-1.5, 0.3, 2.0]), np.array([0.7, -0.4, 1.2])
A = np.array([[0.5, -1.0, 2.0], [1.5, 0.25, -0.75]])
B = np.array([[1.0, -2.0], [0.5, 1.5], [-0.25, 3.0]])


class Row(NamedTuple):
    """A rule in force for a program, and the gradients expected."""

    name: str
    program: tuple[Any, Callable[..., Any]]  # a key; a function of the host's functions and of xs
    rule: Any
    due: Any  # of the gradients that arrive and the inputs; or an error, or words of one
    xs: tuple[np.ndarray, ...] = (X,)
    second: Any = None  # the gradient of the sum of what is due; or a tuple, to more orders
    hosts: tuple[str, ...] = ALL
    options: Mapping[str, Any] = MappingProxyType({})  # of the scope
    value: Callable[..., Any] | None = None  # where the rule replaces it
    learns: bool = False  # whether it has the last of xs as its parameter


class by:
    """A rule that is made of a host's functions, and of the inputs if it learns."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make

    def __call__(self, o: Any, *xs: Any) -> Any:
        return self.make(o, *xs)


def scoped(o, x):
    with o.name_scope("head"):
        y = o.tanh(x)
    return y + 3 * o.tanh(2 * x)


def sevenfold(op, grad):
    return 7 * grad


rg.RegisterGradient("RowsOfRulesSeven")(sevenfold)
rg.RegisterGradient("RowsOfRulesThree")(lambda dy, x: 3 * dy * x)
r = rg.rules
SIGN, TANH = ("Sign", lambda o, x: o.sign(x)), ("Tanh", lambda o, x: o.tanh(x))
EXP, ROUND = ("Exp", lambda o, x: o.exp(x)), ("Round", lambda o, x: o.round(x))
RELU, SPLIT = ("Relu", lambda o, a, b: o.relu(a) * b), ("Split", lambda o, x: o.split(x, 2))
MUL, MATMUL = ("Mul", lambda o, a, b: a * b), ("MatMul", lambda o, a, b: o.matmul(a, b))
slope = lambda x: 1 - np.tanh(x) ** 2  # noqa: E731
sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
positive = lambda x: np.maximum(x, 0)  # noqa: E731
bell = lambda x: sigmoid(x) * sigmoid(-x)  # noqa: E731
negative = lambda x: np.minimum(x, 0)  # noqa: E731


def along(dy, a, b):
    """The gradients of `a @ b`."""
    return dy @ b.T, a.T @ dy


def shared(contributions: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """The gradients expected of a rule of relevance for `a @ b`: parts of the relevance, over a."""

    def due(dy, a, b):
        parts = contributions(a[:, :, None], b[None])  # of each input to each output
        total = parts.sum(1, keepdims=True)
        relevance = parts / (total + (total == 0)) * (dy * (a @ b))[:, None]
        return relevance.sum(2) / a, 0 * b

    return due


HALF_OF_TANH = {"due": lambda dy, x: 0.5 * dy * slope(x),
                "second": lambda dy, x: -0.5 * dy * np.tanh(x) * slope(x)}  # fmt: skip
FORMS = [
    Row("a factor", SIGN, lambda dy: 7 * dy, lambda dy, x: 7 * dy),
    Row("input and output by name", TANH, lambda dy, x, y: dy * (x + 9 * y),
        lambda dy, x: dy * (x + 9 * np.tanh(x))),
    Row("TensorFlow's form", SIGN, sevenfold, lambda dy, x: 7 * dy),
    Row("op.inputs", SIGN, lambda op, grad: grad * op.inputs[0] * 2, lambda dy, x: 2 * dy * x),
    Row("op.outputs", TANH, lambda op, grad: [grad * op.outputs[0]], lambda dy, x: dy * np.tanh(x)),
    Row("a registered name", SIGN, "RowsOfRulesSeven", lambda dy, x: 7 * dy),
    Row("a registered name, new form", SIGN, "RowsOfRulesThree", lambda dy, x: 3 * dy * x),
    Row("the rule of another op type", SIGN, "Identity", lambda dy, x: dy),
    Row("another op type's, of y", TANH, "Exp", lambda dy, x: dy * np.tanh(x)),
    Row("its own, by name", TANH, "Tanh", lambda dy, x: dy * slope(x)),
    Row("written with regrad", SIGN, lambda dy, x: dy * rg.exp(x), lambda dy, x: dy * np.exp(x)),
    Row("a function as the key", (lambda o: o.relu, lambda o, x: o.relu(x)), lambda dy: 7 * dy,
        lambda dy, x: 7 * dy, hosts=TORCH + JAX),
    Row("forward", TANH, lambda dy, x, forward: dy * forward(x + 1),
        lambda dy, x: dy * np.tanh(x + 1)),
    Row("builtin", TANH, lambda dy, builtin: 3 * builtin(dy), lambda dy, x: 3 * dy * slope(x)),
    Row("builtin of more", TANH, lambda dy, x, builtin: builtin(dy * x),
        lambda dy, x: dy * x * slope(x)),
    Row("rules.builtin", TANH, r.builtin("Tanh"), lambda dy, x: dy * slope(x),
        second=lambda dy, x: -2 * dy * np.tanh(x) * slope(x)),
    Row("rules.builtin, called", TANH, lambda dy, **names: 0.5 * r.builtin("Tanh")(dy, **names),
        **HALF_OF_TANH),
    Row("rules.builtin, by name", TANH, lambda dy, y: 0.5 * r.builtin("Tanh")(dy, y=y),
        **HALF_OF_TANH),
    Row("rules.builtin, TensorFlow's form", TANH, lambda op, dy: 0.5 * r.builtin("Tanh").of(op, dy),
        **HALF_OF_TANH),
    Row("builtin of another", SIGN, r.builtin("Tanh"), lambda dy, x: dy * (1 - np.sign(x) ** 2)),
    Row("optional", SIGN, r.optional(lambda dy: 7 * dy), lambda dy, x: 7 * dy),
    Row("no_gradient", TANH, r.no_gradient, lambda dy, x: 0 * x),
    Row("[None]", TANH, lambda dy: [None], lambda dy, x: 0 * x),
    Row("None in TensorFlow's form", TANH, lambda op, grad: None, lambda dy, x: 0 * x),
    Row("vjp_of", SIGN, r.vjp_of(lambda x: x * x * x), lambda dy, x: 3 * dy * x**2,
        second=lambda dy, x: 6 * dy * x),
    Row("a rule is differentiated", SIGN, lambda dy, x: dy * x * x, lambda dy, x: dy * x**2,
        second=lambda dy, x: 2 * dy * x),
    Row("y leads to the rule again", TANH, lambda dy, y: dy * y, lambda dy, x: dy * np.tanh(x),
        second=lambda dy, x: dy * np.tanh(x)),
    Row("builtin leads to the rule again", EXP, lambda dy, builtin: 3 * builtin(dy),
        lambda dy, x: 3 * dy * np.exp(x), second=lambda dy, x: 9 * dy * np.exp(x),
        hosts=REGRAD + GRAPH),
    Row("builtin is the host's own at second order", EXP, lambda dy, builtin: 3 * builtin(dy),
        lambda dy, x: 3 * dy * np.exp(x), second=lambda dy, x: 3 * dy * np.exp(x),
        hosts=TORCH + JAX),
]  # fmt: skip
INPUTS_AND_OUTPUTS = [
    Row("two inputs", MUL, lambda dy, a, b: (2 * dy * b, 3 * dy * a),
        lambda dy, a, b: (2 * dy * b, 3 * dy * a), (X, Y)),
    Row("two inputs, TensorFlow's form", MUL, lambda op, dy: (dy * op.inputs[1], -dy),
        lambda dy, a, b: (dy * b, -dy), (X, Y)),
    Row("None for one input", MUL, lambda dy, a, b: (dy * b, None),
        lambda dy, a, b: (dy * b, 0 * b), (X, Y)),
    Row("one tensor twice", ("Mul", lambda o, x: x * x), lambda dy: (2 * dy, 3 * dy),
        lambda dy, x: 5 * dy),
    Row("an input that is broadcast", MUL, lambda dy: (dy, 5 * dy),
        lambda dy, a, b: (dy, 5 * dy.sum(0)), (A, Y)),
    Row("the other name of an op type", ("Add", lambda o, a, b: a + b), lambda dy: (2 * dy, 3 * dy),
        lambda dy, a, b: (2 * dy, 3 * dy), (X, Y)),
    Row("a product of matrices", MATMUL, lambda dy, a, b: (dy @ (2 * b).T, None),
        lambda dy, a, b: (2 * dy @ b.T, 0 * b), (A, B)),
    Row("builtin of two inputs", MATMUL, lambda dy, builtin: 3 * builtin(dy),
        lambda dy, a, b: along(3 * dy, a, b), (A, B)),
    Row("vjp_of two inputs", MUL, r.vjp_of(lambda a, b: a * a * b),
        lambda dy, a, b: (2 * dy * a * b, dy * a**2), (X, Y),
        lambda dy, a, b: (2 * dy * (b + a), 2 * dy * a)),
    Row("vjp_of one of two", MUL, r.vjp_of(lambda a: a * a),
        lambda dy, a, b: (2 * dy * a, 0 * b), (X, Y)),
    Row("attributes", ("Sum", lambda o, x: o.sum(x, axis=1)),
        lambda dy, x, axis: rg.expand_dims(dy, axis) * x, lambda dy, x: dy[:, None] * x, (A,)),
    Row("several outputs", SPLIT, lambda dy, x: rg.concat([2 * dy[0], 3 * dy[1]], axis=0) * x,
        lambda dy, x: np.concatenate([2 * dy[0], 3 * dy[1]]) * x, (PARTS,), hosts=REGRAD + GRAPH),
    Row("one of several outputs", ("Split", lambda o, x: o.split(x, 2)[0]),
        lambda dy: rg.concat([2 * dy[0], dy[1] + 7], axis=0),
        lambda dy, x: np.concatenate([2 * dy, 7 + 0 * dy]), (PARTS,), hosts=REGRAD + GRAPH),
    Row("a scope", (rg.at("head", "Tanh"), scoped), r.scale(7.0),
        lambda dy, x: 7 * dy * slope(x) + 6 * dy * slope(2 * x), hosts=REGRAD + GRAPH + JAX),
    Row("a map for a scope", (rg.at("head"), scoped), {"Tanh": r.scale(7.0)},
        lambda dy, x: 7 * dy * slope(x) + 6 * dy * slope(2 * x), hosts=REGRAD + GRAPH + JAX),
    Row("the second call", (rg.at("", "Tanh", nth=1), scoped), lambda dy: 7 * dy,
        lambda dy, x: dy * slope(x) + 42 * dy, hosts=REGRAD + GRAPH + JAX),
]  # fmt: skip


def favoured(a, b):
    """Contributions of the sign of the output count 1.25 times."""
    contributions = a * b
    sign = np.sign(contributions.sum(1, keepdims=True))
    return contributions + 0.25 * sign * positive(sign * contributions)


PLUS = shared(lambda a, b: positive(a * b))
MINUS = shared(lambda a, b: negative(a * b))
READY = [
    Row("straight_through", ROUND, r.straight_through, lambda dy, x: dy),
    Row("clipped_straight_through", SIGN, r.clipped_straight_through,
        lambda dy, x: dy * (abs(x) <= 1)),
    Row("superspike", SIGN, r.superspike(3.0), lambda dy, x: dy / (1 + 3 * abs(x)) ** 2),
    Row("sigmoid_surrogate", SIGN, r.sigmoid_surrogate(2.0),
        lambda dy, x: 4 * dy * sigmoid(2 * x) * sigmoid(-2 * x)),
    Row("triangle", SIGN, r.triangle(1.7, 0.3),
        lambda dy, x: 0.3 * dy * positive(1 - abs(x) / 1.7)),
    Row("rectangle", SIGN, r.rectangle(3.2), lambda dy, x: dy * (abs(x) < 1.6) / 3.2),
    Row("arctan_surrogate", SIGN, r.arctan_surrogate(3.0),
        lambda dy, x: dy * 1.5 / (1 + (1.5 * np.pi * x) ** 2)),
    Row("gaussian", SIGN, r.gaussian(0.7),
        lambda dy, x: dy * np.exp(-(x**2) / 0.98) / (0.7 * np.sqrt(2 * np.pi))),
    Row("reverse", TANH, r.reverse(2.0), lambda dy, x: -2 * dy * slope(x)),
    Row("scale", TANH, r.scale(3.0), lambda dy, x: 3 * dy * slope(x)),
    Row("clip", TANH, r.clip(0.1, 0.5), lambda dy, x: np.clip(dy * slope(x), 0.1, 0.5)),
    Row("clip_norm", EXP, r.clip_norm(2.0),
        lambda dy, x: 2 * dy * np.exp(x) / np.linalg.norm(dy * np.exp(x))),
    Row("guided_relu", RELU, r.guided_relu,
        lambda dy, a, b: (positive(dy * b) * (a > 0), dy * positive(a)), (X, Y)),
    Row("deconvnet_relu", RELU, r.deconvnet_relu,
        lambda dy, a, b: (positive(dy * b), dy * positive(a)), (X, Y)),
    Row("lrp.epsilon", MATMUL, r.lrp.epsilon(0.5),
        lambda dy, a, b: along(dy * (a @ b) / (a @ b + 0.5 * np.sign(a @ b)), a, b), (A, B)),
    Row("lrp.gamma", MATMUL, r.lrp.gamma(0.25, 1e-12), shared(favoured), (A, B)),
    Row("lrp.z_plus", MATMUL, r.lrp.z_plus(1e-12), PLUS, (A, B)),
    Row("lrp.alpha_beta", MATMUL, r.lrp.alpha_beta(2.0, 1.0, 1e-12),
        lambda *xs: (2 * PLUS(*xs)[0] - MINUS(*xs)[0], 0 * B), (A, B)),
    Row("lrp.w_square", MATMUL, r.lrp.w_square(1e-12), shared(lambda a, b: b**2 + 0 * a), (A, B)),
    Row("lrp.flat", MATMUL, r.lrp.flat(1e-12), shared(lambda a, b: 1 + 0 * a * b), (A, B)),
    Row("lrp.z_box", MATMUL, r.lrp.z_box(-3, 4, 1e-12),
        shared(lambda a, b: a * b + 3 * positive(b) - 4 * negative(b)), (A, B)),
    Row("lrp.pass_", TANH, r.lrp.pass_, lambda dy, x: dy * np.tanh(x) / x),
    Row("lrp.uniform", MATMUL, r.lrp.uniform, lambda dy, a, b: along(dy / 2, a, b), (A, B)),
]  # fmt: skip

SQUARED = ("Tanh", lambda o, x: o.tanh(x) ** 2)
BY_SIGMOID = {
    "due": lambda dy, x: dy * bell(x),
    "second": lambda dy, x: dy * bell(x) * (1 - 2 * sigmoid(x)),
}
OTHERS = [
    Row("vjp_of a function of the host", SIGN, by(lambda o: r.vjp_of(o.sigmoid)), **BY_SIGMOID,
        hosts=REGRAD + TORCH + JAX),
    Row("vjp_of the host's functions", SIGN, by(lambda o: r.vjp_of(lambda x: o.sigmoid(x))),
        **BY_SIGMOID, hosts=REGRAD + TORCH + JAX),
    Row("vjp_of a function of regrad", SIGN, r.vjp_of(rg.nn.sigmoid), **BY_SIGMOID),
    Row("vjp_of regrad's functions", SIGN, r.vjp_of(lambda x: rg.nn.sigmoid(x)), **BY_SIGMOID),
    Row("vjp_of operators", SIGN, r.vjp_of(lambda x: 1 / (1 + np.e ** (-x))), **BY_SIGMOID),
    Row("reverse of a product", MATMUL, r.reverse(), lambda dy, a, b: along(-dy, a, b), (A, B)),
    Row("clip_norm of a product", MATMUL, r.clip_norm(0.5), lambda dy, a, b: [
        dx * 0.5 / np.linalg.norm(dx) for dx in along(dy, a, b)], (A, B)),
    Row("clip_norm, larger", MATMUL, r.clip_norm(300.0), along, (A, B)),
    Row("order=1", SQUARED, lambda dy, y: dy * y, lambda dy, x: 2 * dy * np.tanh(x) ** 2,
        second=(lambda dy, x: 4 * dy * np.tanh(x) * slope(x),
                lambda dy, x: dy * (4 - 12 * np.tanh(x) ** 2) * slope(x)),
        hosts=REGRAD + TORCH + JAX, options={"order": 1}),
    Row("order=None", SQUARED, lambda dy, y: dy * y, lambda dy, x: 2 * dy * np.tanh(x) ** 2,
        second=(lambda dy, x: 4 * dy * np.tanh(x) ** 2, lambda dy, x: 8 * dy * np.tanh(x) ** 2),
        options={"order": None}),
]  # fmt: skip

VALUES = {"options": {"values": True}}
bend = lambda x: np.where(x > 0, x**2, x)  # noqa: E731
REPLACED = [
    Row("a value, and a rule of y, which follows it too", TANH,
        rg.replace(lambda x: rg.where(x > 0, x * x, x), lambda dy, x, y: dy * y * x),
        lambda dy, x: dy * bend(x) * x, value=bend,
        second=lambda dy, x: dy * (bend(x) * x**2 + bend(x)), **VALUES),
    Row("a value with a stop_gradient", TANH, rg.replace(
            lambda x: rg.sin(x) + rg.stop_gradient(rg.pow(x, 3) - rg.sin(x))),
        lambda dy, x: dy * np.cos(x), value=lambda x: x**3, second=lambda dy, x: -dy * np.sin(x),
        **VALUES),
    Row("a value by names", TANH, rg.replace(lambda x, y, forward: y + forward(2 * x)),
        lambda dy, x: dy * (slope(x) + 2 * slope(2 * x)),
        value=lambda x: np.tanh(x) + np.tanh(2 * x), **VALUES),
    Row("the builtin of a value is that of its function", TANH,
        rg.replace(lambda x: x**3, r.scale(0.5)), lambda dy, x: 1.5 * dy * x**2,
        value=lambda x: x**3, **VALUES),
    Row("a value with operators", TANH, rg.replace(lambda x: x * x * x),
        lambda dy, x: 3 * dy * x**2, value=lambda x: x**3, second=lambda dy, x: 6 * dy * x,
        **VALUES),
    Row("a value of two inputs", MATMUL, rg.replace(
            lambda a, b, forward: forward(2 * a, b), lambda dy, a, b: (dy @ b.T, None)),
        lambda dy, a, b: (dy @ b.T, 0 * b), (A, B), value=lambda a, b: 2 * a @ b, **VALUES),
]  # fmt: skip


# -- parameters that learn: a step size, the clip of an activation, the steepness of a surrogate ---


def lsq(o):  # Esser et al. (2020)
    def rule(dy, x, step):
        by_x = o.where(abs(x) <= 1, dy / step, 0 * dy)
        return by_x, {"step": 0.1 * o.sum(dy * o.round(x) - by_x * x)}

    return rule


def pact(o):  # Choi et al. (2018)
    def rule(dy, x, alpha):
        within = o.where((x > 0) & (x < alpha), dy, 0 * dy)
        return within, {"alpha": o.sum(o.where(x >= alpha, dy, 0 * dy))}

    return rule


def steepness(o):
    def rule(dy, x, beta):
        s = 1 - o.tanh(beta * x) ** 2
        return dy * beta * s, {"beta": o.sum(dy * x * s)}

    return rule


def lsq_whole(o):  # equations 1 to 3
    def rule(dy, x, step):
        v = x / step
        inside = (v > -4) & (v < 3)
        by_step = o.where(inside, o.round(v) - v, o.clip(v, -4, 3))
        return o.where(inside, dy, 0 * dy), {"step": o.sum(dy * by_step)}

    return rule


def steep(dy, x, p):
    """The derivatives by x and p of the sum of the gradients that `steepness` returns."""
    t, s = np.tanh(p * x), 1 - np.tanh(p * x) ** 2
    return dy * s * (1 - 2 * t * p * (p + x)), np.sum(dy * s * (1 - 2 * t * x * (p + x)))


def of_gained(dy, x, p):
    """The gradients of p tanh(p x)."""
    t = np.tanh(p * x)
    return dy * p**2 * (1 - t**2), np.sum(dy * (t + p * x * (1 - t**2)))


def of_gained_twice(dy, x, p):
    t, s = np.tanh(p * x), dy * (1 - np.tanh(p * x) ** 2)
    by_p = s * (2 * p + 2 * x - 2 * p**2 * x * t - 2 * p * x**2 * t)
    return s * (2 * p - 2 * p**3 * t - 2 * p**2 * x * t), np.sum(by_p)


within = lambda x, p: abs(x / p + 0.5) < 3.5  # noqa: E731
OF_STEEPNESS = {
    "due": lambda dy, x, p: (dy * p * (1 - np.tanh(p * x) ** 2),
                             np.sum(dy * x * (1 - np.tanh(p * x) ** 2))),
    "second": steep, "xs": (X, np.array(1.3)), "hosts": REGRAD + TORCH + JAX, "learns": True,
}  # fmt: skip
SIGN_OF = ("Sign", lambda o, x, p: o.sign(x))
LEARNING = [
    Row("lsq", ("Round", lambda o, x, p: o.round(x)),
        by(lambda o, x, p: r.learns(lsq(o), step=p)),
        lambda dy, x, p: (dy * (abs(x) <= 1) / p,
                          0.1 * np.sum(dy * (np.round(x) - x * (abs(x) <= 1) / p))),
        (X, np.array(0.7)),
        lambda dy, x, p: (-0.1 * dy * (abs(x) <= 1) / p,
                          np.sum(dy * (abs(x) <= 1) * (0.1 * x - 1) / p**2)),
        hosts=REGRAD + TORCH + JAX, learns=True),
    Row("pact", ("Relu", lambda o, x, p: o.relu(x)),
        by(lambda o, x, p: r.learns(pact(o), alpha=p)),
        lambda dy, x, p: (dy * ((x > 0) & (x < p)), np.sum(dy * (x >= p))), (X, np.array(1.5)),
        lambda dy, x, p: (0 * x, 0 * p), hosts=REGRAD + TORCH + JAX, learns=True),
    Row("a slope", SIGN_OF, by(lambda o, x, p: r.learns(steepness(o), beta=p)), **OF_STEEPNESS),
    Row("a slope by regrad", SIGN_OF, by(lambda o, x, p: r.learns(steepness(rg), beta=p)),
        **OF_STEEPNESS),
    Row("a slope by vjp_of", SIGN_OF, by(lambda o, x, p: r.learns(
            r.vjp_of(lambda x, beta: o.tanh(beta * x)), beta=p)), **OF_STEEPNESS),
    Row("a value with a parameter", ("Tanh", lambda o, x, p: o.tanh(x)),
        by(lambda o, x, p: rg.replace(lambda x, gain, forward: gain * forward(gain * x), gain=p)),
        of_gained, (X, np.array(0.7)), of_gained_twice, value=lambda x, p: p * np.tanh(p * x),
        hosts=REGRAD + TORCH + JAX, learns=True, options={"values": True}),
    Row("lsq, with its value", ("Tanh", lambda o, x, p: o.tanh(x)),
        by(lambda o, x, p: rg.replace(lambda x, step: o.clip(o.round(x / step), -4, 3) * step,
                                      r.learns(lsq_whole(o), step=p))),
        lambda dy, x, p: (dy * within(x, p), np.sum(dy * np.where(
            within(x, p), np.round(x / p) - x / p, np.clip(x / p, -4, 3)))), (X, np.array(0.35)),
        lambda dy, x, p: (-dy * within(x, p) / p, np.sum(dy * within(x, p) * x / p**2)),
        value=lambda x, p: np.clip(np.round(x / p), -4, 3) * p, hosts=REGRAD + TORCH + JAX,
        learns=True, **VALUES),
]  # fmt: skip

RESULTS = (r"returned the shape \(\) and the dtype \S*float64, expected those of the "
           r"op's own result, the shape \(3,\) and the dtype \S*float64")  # fmt: skip


def value_refused(name, forward, words):
    return Row(f"a value: {name}", TANH, rg.replace(forward), words, **VALUES)


REFUSED = [
    value_refused("shape", lambda x: x.sum(), RESULTS),
    value_refused("shape, by regrad", lambda x: rg.sum(x), RESULTS),
    value_refused("dtype", lambda x: rg.astype(x, "float32"), r"float32, expected .*float64"),
    value_refused("None", lambda x: None, "returned None, expected one tensor"),
    value_refused("two", lambda x: [x, x], "returned list, expected one tensor"),
    value_refused("a name", lambda z: z,
                  r"takes \(z\), and the op type 'Tanh' has no 'z'.* It may name x, y"),
    value_refused("builtin", lambda x, builtin: x, "has no 'builtin'"),
    value_refused("no names", lambda *xs: xs, "must name its parameters"),
    Row("values that are not announced", TANH, r.optional(rg.replace(rg.sin)),
        ArgumentError(r"values of 'Tanh' .*values="), hosts=REGRAD + TORCH + JAX),
    Row("values under order=1", TANH, rg.replace(rg.sin), ArgumentError("order=1 uses the ops"),
        options={"values": True, "order": 1}, hosts=REGRAD + TORCH + JAX),
    *[Row(f"order={order!r}", TANH, "Sigmoid", ArgumentError(r"order is None .* or 1 .*, got"),
          options={"order": order}, hosts=("regrad", "torch", "jax"))
      for order in (0, 2, True, 1.0, "1")],
    Row("None", SIGN, lambda dy: None, "returned None, expected a Tensor",
        hosts=REGRAD + TORCH + JAX),
    Row("another shape", SIGN, lambda dy: dy[:2], r"\(2,\).*\(3,\)"),
    Row("another dtype", SIGN, lambda dy: rg.astype(dy, "float32"), "float32"),
    Row("two gradients", SIGN, lambda dy: [dy, dy], "returned 2 gradients"),
    Row("a string", SIGN, lambda dy: "no", "expected a Tensor, got str"),
    Row("an unknown name", SIGN, lambda dy, z: dy, "'z'"),
    Row("one gradient for two", MUL, lambda dy: dy, "2 inputs", (X, Y)),
    Row("another rule's names", SIGN, "MatMul", "'MatMul' is for the inputs a, b"),
]  # fmt: skip

ROWS = [*FORMS, *INPUTS_AND_OUTPUTS, *READY, *OTHERS, *REPLACED, *LEARNING, *REFUSED]
