"""Loops, branches and regions: values and derivatives in eager mode, under jit, and from outside.

Each row is a program and the same function in plain NumPy, whose differences are the derivatives.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optree
import pytest

import regrad as rg
from tests.transforms.regions import REGIONS

Function = Callable[..., Any]


class Program(NamedTuple):
    """A function of x, points for it, and the sum of its results (if not: by eager mode).

    A loop of unknown length has no `reverse` mode where it is traced.
    """

    f: Function
    xs: list[Any]
    plain: Function | None = None
    reverse: bool = True


def halved(x):
    """As many steps as the value asks for."""
    return rg.while_loop(lambda c: c[0] > 0.1, lambda c: (c[0] / 2, rg.sin(c[1]) + c[0]), (x, x))[1]


def summed(x):
    step = lambda c, k: ((c[0] + 1.0, rg.sin(c[1]) * k + c[0]), c[1] * x)  # noqa: E731
    (_, y), ys = rg.scan(step, (x * 0, x), np.array([1.0, 0.5, 2.0]), reverse=True)
    return y, ys


def nested(x):
    step = lambda c, _: (rg.while_loop(lambda z: z > 0.2, lambda z: z * rg.cos(x), c + 1.0), c)  # noqa: E731
    last, ys = rg.scan(step, x, None, length=3)
    return last * rg.sum(ys)


def descended(x):
    """Newton's method for cos(z) = x z, where each step has a gradient of its own."""

    def step(c):
        n, z = c
        error = lambda z: rg.cos(z) - x * z  # noqa: E731
        return n + 1, z - error(z) / rg.grad(error)(z)

    return rg.while_loop(lambda c: c[0] < 4, step, (0, rg.ones_like(x)))[1]


def around_a_loop(x):
    """The loop moves a point by steps that x does not reach, and carries a value that x reaches."""
    start, more = rg.tensor(1.0, dtype="float64"), lambda c: c[0] > 0.01
    return rg.while_loop(more, lambda c: (c[0] / 2, c[0] * x), (start, start * x))[0] * x + x


def branches_in_a_loop(x):
    start = rg.tensor(1.0, dtype="float64")

    def body(c):
        point, value = c
        return rg.cond(point > 0.5, lambda: (point / 2, point * x), lambda: (point / 3, value))

    return rg.while_loop(lambda c: c[0] > 0.01, body, (start, x))[0] * x


def decaying(x):
    """Carries that x does not reach decide about weights of one that it reaches."""

    def step(c, _):
        t, decay, y = c
        return (t + 0.1, decay * 0.9, y + rg.sin(x * t) * decay), y * x

    (t, decay, y), ys = rg.scan(step, (x * 0, rg.ones_like(x), x * 0), None, length=5)
    return y * t + rg.sum(ys) * decay


def reached_late(x):
    """From x to a, from a to b, from b to c: each by another step."""
    step = lambda c, _: ((x * 1.0, rg.sin(c[0]), c[1] * c[1], c[3] * 0.5), None)  # noqa: E731
    last, _ = rg.scan(step, (rg.ones_like(x),) * 4, None, length=4)
    return last[2] * last[3]


def in_a_batch(x):
    t = rg.jit(lambda p: p * x)(x)
    return rg.vmap(lambda r: rg.vmap(lambda q: q * r * rg.sum(t))(x))(t)


def nest(x):
    """A loop over a branch over a loop."""

    def body(c, i):
        inner = lambda c, i: (rg.sin(c) * x + c * 0.5, c)  # noqa: E731
        after = rg.cond(c > 0, lambda: rg.scan(inner, c, length=2)[0], lambda: rg.sin(c) * c)
        return after - 0.1 * x, after

    return rg.scan(body, x, length=3)


def powered(a, b):
    return rg.jit(lambda a, b: a * a * b)(a, b)


def by_grad(x):
    return rg.jit(lambda x: rg.grad(rg.jit(lambda x: rg.sum(rg.sin(x) * x)))(x))(x)


def containers(reverse, checkpoint):
    """A scan with containers on both sides of its step."""

    def step(c, e):
        total, power = c["total"] + e["a"] * c["power"], c["power"] * e["b"]
        return {"total": total, "power": power}, (total * power, None)

    def f(x):
        xs, first = {"a": A * x, "b": B}, {"total": x, "power": 1.5 * x}
        last, (ys, _) = rg.scan(step, first, xs, reverse=reverse, checkpoint=checkpoint)
        return ys * ys, rg.sin(last["total"]) * last["power"]

    return f


def containers_by_hand(x, reverse):
    total, power, found = x, 1.5 * x, 0.0
    for a, b in list(zip(A, B, strict=True))[:: -1 if reverse else 1]:
        total, power = total + a * x * power, power * b
        found += (total * power) ** 2
    return found + np.sin(total) * power


A, B = np.array([0.5, -1.0, 2.0]), np.array([0.7, 1.2, -0.4])
P, PAIR, TRIPLE = Program, [[0.3, -1.2]], [[0.6, 1.0, -0.3]]
# Bodies that return what they close over; x and the sum of its squares are of no other use.
RETURNED = {
    "checkpoint": lambda w: rg.checkpoint(lambda: w)(),
    "cond": lambda w: rg.cond(rg.sum(w) > 0, lambda: w, lambda: -w),
    "nested cond": lambda w: rg.cond(
        rg.sum(w) > 0, lambda: rg.cond(rg.sum(w) > 0.5, lambda: w, lambda: -w), lambda: -w
    ),
    "scan, carry": lambda w: rg.scan(lambda c, _: (w, c), w * 0, None, 2)[0],
    "scan, passed on": lambda w: rg.scan(lambda c, _: (c, None), w, None, 2)[0],
    "scan, ys": lambda w: rg.scan(lambda c, _: (c, w), 0.0, None, 1)[1][0],
    "while_loop": lambda w: rg.while_loop(lambda c: c.sum() <= 0, lambda c: w, 0 * w, max_steps=3),
    "fori_loop": lambda w: rg.fori_loop(0, 1, lambda i, c: w, w * 0),
    "map": lambda w: rg.map(lambda _: w, np.zeros(1))[0],
    "vmap": lambda w: rg.vmap(lambda _: w)(np.zeros(1))[0],
    "jit": lambda w: rg.jit(lambda: {"a": [w]})()["a"][0],
    "cond in scan": lambda w: rg.scan(
        lambda c, _: (rg.cond(rg.sum(c) < 9, lambda: w, lambda: c), None), w * 0, None, length=1
    )[0],
}  # fmt: skip
PROGRAMS = {
    **{name: P(region(lambda x: rg.sin(x) * x * x), PAIR, lambda x: np.sum(np.sin(x) * x * x))
       for name, region in REGIONS.items()},
    **{f"{name} returns": P(lambda x, f=f: f(x * x) + x, TRIPLE, lambda x: np.sum(x * x + x))
       for name, f in RETURNED.items()},
    **{f"checkpoint of {name}": P(
        lambda x, f=RETURNED[name]: (lambda w: rg.checkpoint(lambda: f(w))() + x)(x * x),
        TRIPLE, lambda x: np.sum(x * x + x),
    ) for name in ("scan, passed on", "scan, carry", "fori_loop", "while_loop")},
    "jit of a gradient by what it closes over": P(
        lambda x: rg.jit(lambda: rg.grad(lambda q: rg.sum(x * q * q))(x))(), PAIR,
        lambda x: np.sum(2 * x * x),
    ),
    "closed over": P(lambda w: rg.jit(lambda x: x * w * w)(2.0), [3.0], lambda w: 2 * w**2),
    "twice": P(lambda x: powered(x, x), [3.0], lambda x: x**3),
    "confusion": P(lambda x: x * rg.grad(lambda y: powered(y, x))(2.0), [3.0], lambda x: 4 * x**2),
    "grad of jit in jit": P(by_grad, PAIR, lambda x: np.sum(np.sin(x) + x * np.cos(x))),
    "vjp": P(lambda x: rg.vjp(lambda z: z * z * z, x)[1](1.0)[0], [2.0], lambda x: 3 * x**2),
    "jvp": P(lambda x: rg.jvp(rg.sin, [x], [x])[1], [0.5], lambda x: np.cos(x) * x),
    "scan, no entries": P(lambda x: rg.scan(lambda c, _: (c * 2, c), x, None, 3), [1.0],
                          lambda x: 15 * x),
    "scan, no steps": P(lambda x: rg.scan(lambda c, v: (c + v, v * 2), rg.sum(x), x[:0]), PAIR,
                        np.sum),
    "scan, length 0": P(lambda x: rg.scan(lambda c, _: (c, c), x, length=0), [2.0], lambda x: x),
    "scan, closure": P(lambda w: rg.scan(lambda c, x: (c * w * w + x * 3, c * w), w * 0 + 1,
                                         np.array([1.0, 2.0])), [2.0],
                       lambda w: w**4 + 3 * w**2 + 6 + w + w * (w**2 + 3)),
    "scan, ys over a closure": P(
        lambda x: rg.scan(lambda c, k: (c + k, c * k), rg.ones_like(x), x * np.arange(1.0, 4))[1],
        [0.7], lambda x: x + (1 + x) * 2 * x + (1 + 3 * x) * 3 * x,
    ),
    "scan, reverse": P(summed, [0.7]), "scan, a carry that x does not reach": P(decaying, [0.3]),
    "scan, a carry that x reaches late": P(reached_late, [0.3], lambda x: np.sin(x) ** 2 / 16),
    **{f"scan, containers, {reverse}, {again}": P(
        containers(reverse, again), [0.7], lambda x, r=reverse: containers_by_hand(x, r))
       for reverse in (False, True) for again in (False, True)},
    "nest": P(nest, [0.7, -0.4]),
    "cond, both ways": P(lambda x: rg.cond(x > 0, lambda x: x * x * x, lambda x: -x, x),
                         [3.0, -3.0], lambda x: x**3 if x > 0 else -x),
    "cond, log": P(lambda x: rg.cond(x > 0, rg.log, lambda x: x * 0 + 1, x), [-1.0], lambda x: 1.0),
    "cond, closure": P(lambda x: rg.cond(x > 0, lambda: x * 5, lambda: x * x), [2.0, -2.0],
                       lambda x: x * 5 if x > 0 else x * x),
    "cond, numbers": P(
        lambda w: rg.multiply(*rg.cond(w > 0, lambda w: (2 * w, 3.0), lambda w: (w * w, 5.0), w)),
        [2.0, -2.0], lambda w: 6 * w if w > 0 else 5 * w**2,
    ),
    "cond, a number": P(lambda w: rg.add(rg.cond(w > 0, lambda: w * w * w, lambda: 0.0), 0),
                        [2.0, -2.0], lambda w: max(w, 0) ** 3),
    "while_loop, halves": P(
        lambda x: rg.while_loop(lambda x: x > 1, lambda x: x / 2, x, max_steps=10), [6.0, 0.5],
        lambda x: x / 8 if x > 1 else x,
    ),
    "while_loop, dict": P(
        lambda x: rg.while_loop(
            lambda c: c["i"] < 2, lambda c: {"i": c["i"] + 1, "x": c["x"] * c["x"]},
            {"i": 0, "x": x}, max_steps=4,
        ), [3.0], lambda x: x**4,
    ),
    "while_loop, sine": P(
        lambda x: rg.while_loop(lambda c: c > 0.1, lambda c: rg.sin(c) / 2, x, max_steps=20), [0.7],
    ),
    "while_loop, no end": P(halved, [0.7], reverse=False),
    "while_loop in scan": P(nested, [0.5], reverse=False),
    "while_loop, grad": P(descended, [0.7], reverse=False),
    "around a loop": P(around_a_loop, [0.3], lambda x: x * (1 + 2**-7)),
    "cond in while_loop": P(branches_in_a_loop, [0.3], lambda x: x / 162),
    "fori_loop, index": P(lambda x: rg.fori_loop(1, 4, lambda i, x: x * (i + 1), x), [1.0],
                          lambda x: 24 * x),
    "fori_loop, empty": P(lambda x: rg.fori_loop(4, 1, lambda i, x: x * i, x), [3.0], lambda x: x),
    "vmap over a constant": P(lambda x: rg.vmap(lambda k: rg.sin(k * x))(np.array([1.0, 2.0])),
                              [0.7], lambda x: np.sin(x) + np.sin(2 * x)),
    "checkpoint, closure": P(lambda x: rg.checkpoint(lambda z: rg.sin(z) * x)(x * x), [0.7],
                             lambda x: np.sin(x * x) * x),
    "jit, closure": P(lambda x: rg.jit(lambda z: (z * z, rg.sin(z) + x))(x * 2)[1] * x, [0.7],
                      lambda x: (np.sin(2 * x) + x) * x),
    "jit, then vmap": P(in_a_batch, TRIPLE, lambda x: np.sum(x * x) ** 2 * np.sum(x)),
    "checkpoint of jit and vmap": P(rg.checkpoint(in_a_batch), TRIPLE,
                                    lambda x: np.sum(x * x) ** 2 * np.sum(x)),
}  # fmt: skip


def total(f):
    """The sum of all floats in a result."""

    return lambda x: sum((rg.sum(y) for y in optree.tree_leaves(f(x)) if y.dtype.kind == "f"), 0)


def differences(f, h):
    """The gradient of a scalar function of NumPy arrays."""

    def gradient(x):
        steps = h * np.eye(x.size).reshape(x.size, *x.shape)
        slopes = [(f(x + step) - f(x - step)) / (2 * h) for step in steps]
        return np.reshape(slopes, x.shape)

    return gradient


def derivatives(f):
    """The value, and derivatives to second order; sums of rows are by the direction of ones."""
    gradient = rg.grad(f, unconnected="zero")
    moved = lambda f: lambda x: rg.jvp(f, [x], [rg.ones_like(x)])[1]  # noqa: E731
    return {
        "value": f, "jvp": moved(f), "jvp of jvp": moved(moved(f)), "grad": gradient,
        "grad of grad": rg.grad(lambda x: rg.sum(gradient(x)), unconnected="zero"),
        "jvp of grad": moved(gradient), "grad of jvp": rg.grad(moved(f), unconnected="zero"),
    }  # fmt: skip


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_derivatives(name):
    f, xs, plain, reverse = PROGRAMS[name]
    f = total(f)
    plain = plain or (lambda x: f(x).item())
    inside = [k for k in derivatives(f) if reverse or "grad" not in k]
    outside = [k for k in inside if k not in ("jvp of jvp", "grad of jvp")]
    once, g = rg.jit(lambda x: {k: derivatives(f)[k](x) for k in inside}), rg.jit(f)
    for x in np.asarray(xs):
        first = differences(plain, 1e-4)(x)
        second = differences(lambda x: differences(plain, 1e-4)(x).sum(), 1e-3)(x)
        due = {"value": plain(x), "jvp": first.sum(), "jvp of jvp": second.sum(), "grad": first}
        tensor, early = rg.asarray(jnp.asarray(x)), ["value", "grad", "jvp"]
        for where, found in {
            "eager": {k: d(rg.asarray(x)) for k, d in derivatives(f).items()},
            "JAX": {k: derivatives(f)[k](tensor) for k in early},
            "inside": once(x),
            "outside": {k: derivatives(g)[k](tensor) for k in outside},
        }.items():
            for k, y in found.items():
                expected, what = due.get(k, second), f"{k}, {where}"
                np.testing.assert_allclose(y.numpy(), expected, 2e-4, 2e-5, err_msg=what)


@pytest.mark.parametrize("name", RETURNED)
@pytest.mark.parametrize("to", [np.asarray, jnp.asarray])
def test_a_rule_for_what_was_returned_from_outside(name, to):
    f, x = RETURNED[name], np.array([1.0, 2.0])
    with rg.gradient_override_map({"Identity": lambda dy: dy * 100}) as used:
        dx = rg.grad(lambda w: rg.sum(rg.identity(f(w * w)) + w))(to(x))
    np.testing.assert_allclose(dx.numpy(), 200 * x + 1)
    used.assert_fired()


ENDS = "no end", "in scan", "grad", "sine", "closure", "reverse", "ways"


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name.endswith(ENDS)])
def test_rules_in_force_count_in_forward_mode(name):
    """And what they return, whatever the form."""
    f, xs, *_ = PROGRAMS[name]
    moved = lambda x: rg.jvp(total(f), [x], [rg.ones_like(x)])[1]  # noqa: E731
    x, optional = rg.asarray(np.asarray(xs[0])), rg.rules.optional
    rules = {"Sin": optional(lambda dy: 3 * dy), "Mul": optional(lambda dy, a, b: (dy, dy))}
    with rg.gradient_override_map(rules):
        eager, traced = moved(x).numpy(), rg.jit(moved)(x).numpy()
    np.testing.assert_allclose(traced, eager, rtol=1e-4)
