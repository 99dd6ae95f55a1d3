"""Rules that close over an argument of a compiled function, for ops in regions made elsewhere.

The region (a scan, a branch, …) is in a function that does not know of the argument. What it takes
from outside is found by its forward pass, the argument only by the rule in the backward pass. Each
answer is that of eager mode, which has no regions.
"""

from __future__ import annotations

import numpy as np
import pytest

import regrad as rg

NUMBERS = np.random.default_rng(0)
XS = rg.tensor(NUMBERS.normal(size=(3, 2)), dtype=np.float32)
W = rg.tensor(NUMBERS.normal(size=2), dtype=np.float32)
B = rg.tensor(3.0)
SCALE = rg.Variable(1.5, name="scale")


def in_scan(w):
    step = lambda c, x: (c + rg.sum(rg.sin(x @ w) * c), c)  # noqa: E731
    return rg.sum(rg.scan(step, rg.tensor(1.0), XS)[0])


def in_cond(w):
    taken = lambda w: rg.sum(rg.sin(XS @ w) * SCALE.value)  # noqa: E731
    return rg.cond(rg.sum(XS) > -10, taken, lambda w: rg.sum(rg.sin(-XS @ w)), w)


def in_while(w):
    step = lambda c: (c[0] + rg.sum(rg.sin(XS[0] @ w) * c[0]), c[1] + 1)  # noqa: E731
    return rg.while_loop(lambda c: c[1] < 3, step, (rg.tensor(1.0), rg.tensor(0)), max_steps=5)[0]


def in_vmap(w):
    return rg.sum(rg.vmap(lambda x: rg.sin(x @ w) * rg.sum(w))(XS))


def in_checkpoint(w):
    return rg.checkpoint(lambda w: rg.sum(rg.sin(XS @ w) * rg.sum(w)))(w)


def in_jit(w):
    return rg.jit(lambda w: rg.sum(rg.sin(XS @ w) * rg.sum(w)))(w)


def in_two_scans(w):
    def step(c, x):
        inner = lambda d, y: (d + rg.sin(y * rg.sum(x * w)), None)  # noqa: E731
        return c + rg.scan(inner, c, XS[:, 0])[0], None

    return rg.scan(step, rg.tensor(1.0), XS)[0]


def gradient_of(loss, *, computed, second):
    """The gradient of a loss under a rule that closes over b, or over what is made of it."""

    def f(w, b):
        c = b * 2.0 + SCALE.value if computed else b
        with rg.gradient_override_map({"Sin": lambda dy, x: dy * c * x}):
            g = rg.grad(loss)
            return rg.grad(lambda w: rg.sum(g(w) ** 2))(w) if second else g(w)

    return f


def in_a_scan(f):
    return lambda w, b: rg.scan(lambda c, _: (c, f(w, b)), rg.tensor(0.0), length=2)[1][1]


WAYS = {
    "jit": rg.jit,
    "jit of jit": lambda f: rg.jit(lambda w, b: rg.jit(f)(w, b)),
    "jit of vmap": lambda f: rg.jit(lambda w, b: rg.vmap(f, in_axes=(0, None))(w[None], b)[0]),
    "jit of scan": lambda f: rg.jit(in_a_scan(f)),
    "jit of checkpoint": lambda f: rg.jit(rg.checkpoint(f)),
}


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize(
    "loss", [in_scan, in_cond, in_while, in_vmap, in_checkpoint, in_jit, in_two_scans]
)
def test_the_rule_sees_the_argument_of_now(loss, computed, second):
    f = gradient_of(loss, computed=computed, second=second)
    expected = [(b, f(W, b).numpy()) for b in (B, B + 1)]
    for name, way in WAYS.items():
        g = way(f)
        for b, values in expected:  # the second call is by the program of the first
            np.testing.assert_allclose(g(W, b).numpy(), values, 1e-4, 1e-5, err_msg=name)
    by_b = lambda f: rg.grad(lambda b: rg.sum(f(W, b) * W))  # noqa: E731
    due = by_b(f)(B).numpy()
    for g in (by_b(rg.jit(f)), rg.jit(by_b(f))):
        np.testing.assert_allclose(g(B).numpy(), due, 1e-4, 1e-5)


@pytest.mark.parametrize(
    "loss", [in_scan, in_cond, in_while, in_vmap, in_checkpoint, in_jit, in_two_scans]
)
def test_gradients_of_gradients_of_a_compiled_function(loss):
    """By programs of programs, which replay the region, and the region in its gradient."""

    def f(w, b):
        with rg.gradient_override_map({"Sin": lambda dy, x: dy * b * b * x}):
            return loss(w)

    def derivatives(f):
        by_w = lambda w, b: rg.grad(lambda w: f(w, b))(w)  # noqa: E731
        by_w_b = lambda w, b: rg.grad(lambda b: rg.sum(by_w(w, b) * W))(b)  # noqa: E731
        yield by_w_b(W, B)
        yield rg.grad(lambda w: by_w_b(w, B))(W)
        yield rg.grad(lambda b: by_w_b(W, b))(B)

    for got, expected in zip(derivatives(rg.jit(f)), derivatives(f), strict=True):
        np.testing.assert_allclose(got.numpy(), expected.numpy(), 1e-4, 1e-5)
