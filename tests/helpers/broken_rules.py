"""Rules that are wrong, with what a check is to say of each: which op, which input, what order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import regrad as rg

X = np.array([0.4, -1.3, 0.9])
Y = np.array([0.7, 0.2, -0.6])
POSITIVE = np.array([0.3, 1.1, 2.5])
SQUARE = np.array([[0.5, -1.2, 0.3], [0.8, 0.1, -0.7], [1.4, -0.4, 0.6]])
CUBE = np.arange(8.0).reshape(2, 2, 2) / 5 - 0.7
LARGE = np.random.default_rng(0).normal(size=(30, 40))


class Broken(NamedTuple):
    """A function with a wrong rule in it."""

    name: str
    f: Callable[..., Any]
    args: Sequence[Any]
    rules: dict[str, Any]  # the overrides in force
    culprit: str  # an op type, or the name of a custom function
    inputs: set[str]
    order: int = 1


def flipped(dy, x):
    return -dy * rg.cos(x)


def first_order_only(dy, x):
    return dy * rg.stop_gradient(rg.cos(x))


def without_history(dy, x):
    return rg.stop_gradient(dy) * rg.cos(x)


def wave(x):
    return rg.sin(x) * x


# -- overrides, by kind of error ------------------------------------------------------------------

OF_SIN = {
    "a flipped sign": flipped, "a missing factor": lambda dy: dy,
    "a factor of 2": lambda dy, x: 2 * dy * rg.cos(x),
    "a factor of 1.001": lambda dy, x: 1.001 * dy * rg.cos(x),
    "a factor of 1.00001": lambda dy, x: 1.00001 * dy * rg.cos(x), "zero": lambda dy: dy * 0,
    "None": rg.rules.no_gradient, "NaN": lambda dy, x: dy * rg.log(-rg.abs(x)),
    "infinity": lambda dy: dy / 0.0,
    "one element": lambda dy, x: dy * rg.cos(x) + dy * np.array([0.0, 0.1, 0.0]),
    "a constant added": lambda dy, x: dy * rg.cos(x) + 0.1,
    "dy squared": lambda dy, x: dy * dy * rg.cos(x),
}  # fmt: skip
SINES: list[tuple[str, Any, Any, Any, str, int]] = [  # fault, function, x, rule, inputs, order
    *[(f"Sin: {name}", wave, X, rule, "x", 1) for name, rule in OF_SIN.items()],
    ("Sin: second order only", wave, X, first_order_only, "x", 2),
    ("Sin: dy without history", rg.sin, X, without_history, "dy", 2),
    ("Sin: dy without history, then Mul", wave, X, without_history, "dy", 2),
    ("Sin: dy without history at third order", rg.sin, X, lambda dy, x: rg.custom_grad(
        lambda dy, x, save: (
            save([dy, x]) or dy * rg.cos(x),
            lambda dz, s: (dz * rg.cos(s[1]), -rg.stop_gradient(dz) * s[0] * rg.sin(s[1]))))(dy, x),
     "dy2", 3),
    ("Sin: third order only", rg.sin, X, lambda dy, x: dy * rg.custom_grad(
        lambda x: (rg.cos(x), lambda dz: -dz * rg.stop_gradient(rg.sin(x))))(x), "x", 3),
    ("in a large array", lambda x: rg.nn.relu(rg.sin(x)), LARGE, flipped, "x", 1),
    ("one element of a large array", lambda x: rg.sin(x) * 2.0, LARGE,
     lambda dy, x: dy * rg.cos(x) * (1 + np.eye(30, 40)), "x", 1),
    # where it is hard to see
    ("behind 1e-9", lambda x: 1e-9 * rg.sin(x) * x, X, flipped, "x", 1),
    ("behind 1e-9, plus 1", lambda x: 1 + 1e-9 * rg.sin(x), X, flipped, "x", 1),
    ("behind 1e-30", lambda x: 1e-30 * rg.sin(x), X, flipped, "x", 1),
    ("beside another input's 1e8", lambda a, b: 1e8 * a + rg.sin(b), (X, Y), flipped, "x", 1),
    ("beside another output's 1e8", lambda x: (1e8 * x, rg.sin(x)), X, flipped, "x", 1),
    ("beside another element's 1e8", lambda x: rg.sin(x) * [1.0, 1e8, 1e-4], X, flipped, "x", 1),
    ("beside 1e8, in large arrays", lambda a, b: 1e8 * rg.square(a) + rg.sin(b),
     (LARGE, LARGE + 1.0), flipped, "x", 1),
    ("on an offset of 1e9", lambda x: rg.sin(x) + 1e9, X, flipped, "x", 1),
    ("beside a kink", lambda x: rg.abs(x) * rg.sin(x + 1.0), np.array([0.0, 1.0]), flipped, "x", 1),
    ("a scalar argument", wave, 0.5, flipped, "x", 1),
    ("sin(1000 x)", lambda x: rg.sin(1000 * x), X, flipped, "x", 1),
]  # fmt: skip
OTHERS: list[tuple[str, str, Any, Any, Any, str]] = [  # op type, fault, function, x, rule, inputs
    ("Mul", "swapped", lambda a, b: a * b, (X, Y), lambda dy, a, b: (dy * a, dy * b), "a b"),
    ("Mul", "one input", lambda a, b: a * b, (X, Y), lambda dy, a, b: (dy * b, dy * a * 1.01), "b"),
    ("Sub", "no sign", lambda a, b: a - b, (X, Y), lambda dy: (dy, dy), "b"),
    ("RealDiv", "no square", lambda a, b: a / b, (X, POSITIVE),
     lambda dy, a, b: (dy / b, -dy * a / b), "b"),
    ("MatMul", "not transposed", lambda a, b: rg.matmul(a, b), (SQUARE, SQUARE + 1.0),
     lambda dy, a, b: (rg.matmul(dy, b), rg.matmul(rg.matrix_transpose(a), dy)), "a"),
    ("MatMul", "in the wrong order", lambda a, b: rg.matmul(a, b), (SQUARE, SQUARE + 1.0),
     lambda dy, a, b: (rg.matmul(dy, rg.matrix_transpose(b)),
                       rg.matmul(dy, rg.matrix_transpose(a))), "b"),
    ("Transpose", "not inverted", lambda x: rg.sin(rg.permute_dims(x, (1, 2, 0))), CUBE,
     lambda dy, axes: rg.permute_dims(dy, axes), "x"),
    ("Cumsum", "not reversed", rg.cumulative_sum, X, lambda dy: rg.cumulative_sum(dy), "x"),
    ("Sum", "a mean", lambda x: rg.sum(x, axis=0), SQUARE,
     lambda dy, x_shape: rg.broadcast_to(dy, x_shape) / 3, "x"),
    ("Sum", "the wrong axis", lambda x: rg.sum(x, axis=0), SQUARE,
     lambda dy, x_shape: rg.broadcast_to(rg.reshape(dy, (3, 1)), x_shape), "x"),
    ("Relu", "another bound", rg.nn.relu, X, lambda dy, x: rg.where(x > 0.5, dy, 0.0), "x"),
    ("Relu", "the mask inverted", rg.nn.relu, X, lambda dy, x: rg.where(x < 0, dy, 0.0), "x"),
    ("Relu", "no mask", rg.nn.relu, X, lambda dy: dy, "x"),
    ("Relu", "at a kink", rg.nn.relu, np.array([0.0]), lambda dy, x: rg.where(x >= 0, -dy, 0.0),
     "x"),
    ("Abs", "no sign", rg.abs, X, lambda dy: dy, "x"),
    ("Exp", "of the input", rg.exp, X, lambda dy, x: dy * x, "x"),
    ("Exp", "at -300", rg.exp, np.array([-300.0]), lambda dy, y: -dy * y, "x"),
    ("Log", "multiplied", rg.log, POSITIVE, lambda dy, x: dy * x, "x"),
    ("Sqrt", "multiplied", rg.sqrt, POSITIVE, lambda dy, y: dy * 0.5 * y, "x"),
    ("Tanh", "no square", rg.tanh, X, lambda dy, y: dy * (1 - y), "x"),
    ("Tanh", "at 25", rg.tanh, np.array([25.0, -25.0]), lambda dy, y: dy * (y * y - 1), "x"),
    ("Square", "no 2", rg.square, X, lambda dy, x: dy * x, "x"),
    ("Softmax", "the diagonal alone", rg.nn.softmax, X, lambda dy, y: dy * y, "x"),
    ("Max", "all elements", rg.max, X, lambda dy, x: dy + rg.zeros_like(x), "x"),
    ("Maximum", "the smaller", rg.maximum, (X, Y),
     lambda dy, a, b: (rg.where(a < b, dy, 0.0), rg.where(a < b, 0.0, dy)), "a b"),
    *[("Sigmoid", f"at {x}: {what}", rg.nn.sigmoid, np.array([x]), rule, "x")
      for x in (-40.0, -700.0, 12.0, 40.0) for what, rule in {
          "a sign": lambda dy, y: -dy * y * (1 - y), "a 2": lambda dy, y: 2 * dy * y * (1 - y)
      }.items()],
    ("Mul", "at 1e8", lambda x: x * x, np.array([1e8, 3e8]), lambda dy, a, b: (dy * b, -dy * a),
     "b"),
    ("RealDiv", "at 1e-8", lambda x: 1 / x, np.array([1e-8]),
     lambda dy, a, b: (dy / b, dy * a / b**2), "b"),
]  # fmt: skip

# -- inside what runs, or is compiled, as one -----------------------------------------------------


def scanned(x):
    return rg.scan(lambda c, x: (rg.sin(c + x), c * x), rg.sum(x) * 0.1, x)


def chosen(x):
    return rg.cond(rg.sum(x) > -10, wave, lambda x: x, x)


def looped(x):
    return rg.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, rg.sin(c[1]) + c[1]), (0.0, x))[1]


INSIDE = {
    "jit": rg.jit(wave), "jit in jit": rg.jit(lambda x: rg.jit(wave)(x) + x),
    "checkpoint": rg.checkpoint(wave), "jit of checkpoint": rg.jit(rg.checkpoint(wave)),
    "scan": scanned, "jit of scan": rg.jit(scanned), "cond": chosen, "jit of cond": rg.jit(chosen),
    "while_loop": looped, "vmap": rg.vmap(wave),
    "fori_loop": lambda x: rg.fori_loop(0, 3, lambda i, c: rg.sin(c) + c, x),
    "map": lambda x: rg.map(wave, x),
}  # fmt: skip
SINES += [(f"in {name}", f, X, flipped, "x", 1) for name, f in INSIDE.items()]
SINES += [(f"in {name}, second order only", INSIDE[name], X, first_order_only, "x", 2)
          for name in ("jit", "checkpoint", "scan")]  # fmt: skip

# -- custom gradients -----------------------------------------------------------------------------


def made(f: Callable[..., Any], gradient: Callable[..., Any]) -> Callable[..., Any]:
    """A custom function of any number of inputs, whose gradient is `gradient(dy, *inputs)`."""

    @rg.custom_grad
    def custom(*args):
        *inputs, save = args
        save(inputs)
        return f(*inputs), lambda dy, saved: gradient(dy, *saved)

    return custom


def one(gradient: Callable[..., Any], f: Callable[..., Any] = rg.sin) -> Callable[..., Any]:
    def custom(x, save):
        save([x])
        return f(x), lambda dy, saved: gradient(dy, saved[0])

    return rg.custom_grad(custom)


product = rg.custom_grad(lambda a, b: (a * b, lambda dy: [dy * a, dy * b]))
bias = rg.custom_grad(lambda x, b: (x + b, lambda dy: [dy, rg.mean(dy, axis=0)]))
product_of_matrices = rg.custom_grad(
    lambda a, b: (
        rg.matmul(a, b),
        lambda dy: [rg.matmul(dy, rg.matrix_transpose(b)), rg.matmul(a, dy)],
    )
)
power = rg.custom_grad(lambda x, n, scale=1.0: (scale * x**n, lambda dy: scale * dy * x ** (n - 1)))
both = rg.custom_grad(
    lambda pair: (pair["a"] * pair["b"], lambda dy: {"a": dy * pair["b"], "b": -dy * pair["a"]})
)
split = rg.custom_grad(
    lambda x: ((rg.sin(x), x * 3.0), lambda dys: dys[0] * 3.0 + dys[1] * rg.cos(x))
)
summed = rg.custom_grad(lambda x: (rg.sum(x, axis=1), lambda dy: rg.broadcast_to(dy, x.shape)))
OF_A_SINE = {
    "a flipped sign": flipped, "a missing factor": lambda dy, x: dy,
    "a factor of 2": lambda dy, x: 2 * dy * rg.cos(x),
    "a factor of 1.001": lambda dy, x: 1.001 * dy * rg.cos(x), "zero": lambda dy, x: dy * 0,
    "None": lambda dy, x: None, "NaN": lambda dy, x: dy * rg.log(-rg.abs(x)),
    "one element": lambda dy, x: dy * rg.cos(x) * np.array([1.0, 1.0, 3.0]),
}  # fmt: skip
NOT_A = made(lambda a, b: a * b, lambda dy, a, b: (dy * b, rg.stop_gradient(dy) * a))
CUSTOM: list[tuple[str, Any, Any, str, int]] = [  # the fault, a function, x, inputs and the order
    *[(name, lambda x, rule=rule: one(rule)(x) * x, X, "x", 1) for name, rule in OF_A_SINE.items()],
    ("second order only", one(first_order_only), X, "x", 2),
    ("dy without history", one(without_history), X, "dy", 2),
    ("dy without history in a scan of checkpoint",
     lambda x: rg.scan(lambda c, x: (rg.checkpoint(one(without_history))(c), c * x), x[0], x)[0],
     X, "dy", 2),
    ("one dy without history", NOT_A, (X, Y), "dy", 2),
    ("behind 1e-9", lambda x: 1e-9 * one(flipped)(x), X, "x", 1),
    ("beside 1e8", lambda a, b: 1e8 * a + one(flipped)(b), (X, Y), "x", 1),
    ("in jit", rg.jit(lambda x: one(flipped)(x) * x), X, "x", 1),
    ("in checkpoint", rg.checkpoint(lambda x: one(flipped)(x) * x), X, "x", 1),
    ("in scan", lambda x: rg.scan(lambda c, x: (one(flipped)(c), c * x), x[0], x)[0], X, "x", 1),
    ("swapped inputs", lambda a, b: product(a, b), (X, Y), "a b", 1),
    ("a mean for a sum", lambda x, b: bias(x, b), (SQUARE, X), "b", 1),
    ("not transposed", lambda a, b: product_of_matrices(a, b), (SQUARE, SQUARE + 1.0), "b", 1),
    ("with options", lambda x: power(x, 3, scale=2.0), X, "x", 1),
    ("in a container", lambda a, b: both({"a": a, "b": b}), (X, Y), "pair['b']", 1),
    ("outputs swapped", lambda x: split(x), X, "x", 1),
    ("the wrong axis", lambda x: summed(x), SQUARE, "x", 1),
    ("complex, not conjugated", one(lambda dy, x: dy * 2 * x, rg.square), np.array([1 + 2j]), "x",
     1),
]  # fmt: skip


def broken(name: str, f: Any, x: Any, rules: Any, culprit: str, inputs: str, order: int) -> Broken:
    """Return a row, of one argument or of several."""
    args = x if isinstance(x, tuple) else (x,)
    return Broken(name, f, args, rules, culprit, set(inputs.split()), order)


ROWS = [
    *[broken(name, f, x, {"Sin": rule}, "Sin", *more) for name, f, x, rule, *more in SINES],
    *[broken(f"{t}: {fault}", f, x, {t: rule}, t, i, 1) for t, fault, f, x, rule, i in OTHERS],
    *[broken(f"custom: {fault}", f, x, {}, "CustomGrad", *more) for fault, f, x, *more in CUSTOM],
]
