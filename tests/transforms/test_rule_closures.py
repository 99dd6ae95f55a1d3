"""Rules that close over an argument of a compiled function, for ops in regions made elsewhere.

The region (a scan, a branch, …) is in a function that does not know of the argument. What it takes
from outside is found by its forward pass, the argument only by the rule in the backward pass. Each
answer is that of eager mode, which has no regions.
"""

from __future__ import annotations

import numpy as np
import pytest

import regrad as rg
from tests.transforms.regions import REGIONS

XS = rg.tensor(np.random.default_rng(0).normal(size=3), dtype=np.float32)
W, B = rg.tensor([0.5, -0.3]), rg.tensor(3.0)
SCALE = rg.Variable(1.5, name="scale")


def loss_in(region):
    def loss(w):
        body = lambda x: rg.sin(x * rg.sum(w * w)) * rg.sum(w) * SCALE.value  # noqa: E731
        return rg.sum(region(body)(XS))

    return loss


def in_two_scans(w):
    def step(c, x):
        inner = lambda d, y: (d + rg.sin(y * rg.sum(x * w)), None)  # noqa: E731
        return c + rg.scan(inner, c, XS)[0], None

    return rg.scan(step, rg.tensor(1.0), rg.stack([XS[:2], XS[1:]]))[0]


CHOSEN = "jit", "checkpoint", "cond", "scan", "while_loop", "vmap"
LOSSES = {name: loss_in(REGIONS[name]) for name in CHOSEN}
LOSSES["two scans"] = in_two_scans
over_losses = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


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
    "jit": lambda f: f,
    "jit of jit": rg.jit,
    "jit of vmap": lambda f: lambda w, b: rg.vmap(f, in_axes=(0, None))(w[None], b)[0],
    "jit of scan": in_a_scan,
    "jit of checkpoint": rg.checkpoint,
    "by b": lambda f: lambda w, b: rg.grad(lambda b: rg.sum(f(w, b) * w))(b),
}


@pytest.mark.parametrize(("computed", "second"), [(False, False), (True, True)])
@over_losses
def test_the_rule_sees_the_argument_of_now(loss, computed, second):
    f = gradient_of(loss, computed=computed, second=second)
    g = rg.jit(lambda w, b: {name: way(f)(w, b) for name, way in WAYS.items()})
    by_b = WAYS["by b"]
    for b in (B, B + 1):  # the second call is by the program of the first
        due, due_by_b = f(W, b).numpy(), by_b(f)(W, b).numpy()
        for name, y in (g(W, b) | {"by b, outside": by_b(rg.jit(f))(W, b)}).items():
            expected = due_by_b if name.startswith("by b") else due
            np.testing.assert_allclose(y.numpy(), expected, 1e-4, 1e-5, err_msg=name)


@over_losses
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
