"""Forward mode through loops and compiled programs, where rules are not linear, and in replays."""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regrad as rg
from regrad.errors import GradientError
from tests.transforms.regions import REGIONS

X, V = rg.scalar(0.7), rg.scalar(1.3)


def sines(x):
    """As many steps as the value asks for."""
    return rg.while_loop(lambda c: c[0] > 0.1, lambda c: (c[0] / 2, rg.sin(c[1]) + c[0]), (x, x))[1]


def moved(f):
    return lambda x: rg.jvp(f, [x], [V])[1]


def test_rules_inside_a_loop_of_unknown_length():
    with (
        pytest.raises(GradientError, match="forward mode: the backward pass is not linear"),
        rg.gradient_override_map({"Sin": lambda dy: rg.nn.relu(dy)}),
    ):
        rg.jit(moved(sines))(X)
    with rg.gradient_override_map({"Sin": lambda dy: dy + 1}):
        assert np.isnan(rg.jit(moved(sines))(X).item())
        with pytest.raises(GradientError, match="even where none arrives"):
            moved(sines)(X)


def test_results_that_do_not_move():
    def f(x):
        body = lambda c: (c[0] + 1, c[1] * 0.5, c[2] * x)  # noqa: E731
        return rg.while_loop(lambda c: c[0] < 3, body, (0, rg.scalar(1.0), x))

    for g in (f, rg.jit(f)):
        count, constant, y = [dy.item() for dy in moved(g)(X)]
        assert (count, constant, y) == (0, 0, pytest.approx(4 * 0.7**3 * 1.3, rel=1e-5))


def test_variables_assigned_in_the_loop():
    v = rg.Variable(1.0)

    def g(x):
        v.assign(1.0)
        rg.while_loop(lambda c: c < 3, lambda c: (v.assign(v * x), c + 1)[1], 0)
        return v * x

    assert rg.jit(moved(g))(X).item() == pytest.approx(4 * 0.7**3 * 1.3, rel=1e-5)


# -- a gradient function that is transposed piece by piece -----------------------------------------
#
# What comes before a region is transposed for its inputs, and once more for what does not lead
# through it, so a gradient function runs twice: in the derivative of a compiled function, by a
# replay of a replay.


@rg.custom_grad
def kept_sin(x, save):
    save(x=x)
    return rg.sin(x), lambda dy, saved: dy * rg.cos(saved.x)


@rg.custom_grad
def closed_sin(x):
    return rg.sin(x), lambda dy: dy * rg.cos(x)


@rg.custom_grad
def sin_of_a_pair(pair, save):
    y = rg.sin(pair["x"])
    save(x=pair["x"], y=y)
    back = lambda dy, saved: {"x": dy[0] * rg.cos(saved.x) + dy[1] * saved.y, "of": None}  # noqa: E731
    return (y, -rg.cos(pair["x"])), back


SINES = {
    "saved": kept_sin,
    "closed over": closed_sin,
    "of a pair": lambda x: sin_of_a_pair({"x": x, "of": rg.tensor(1.0)})[0],
}
# A region over another input; c is the sum of the sines.
JAX = SimpleNamespace(scan=jax.lax.scan, vmap=jax.vmap, cond=jax.lax.cond)
OVER_ANOTHER = {
    "scan": lambda lib, c, x: lib.scan(lambda c, r: (c * r, c), c, x)[1],
    "vmap": lambda lib, c, x: lib.vmap(lambda r: r * c * r)(x),
    "cond": lambda lib, c, x: lib.cond(x[0] > 0, lambda: x * x * c, lambda: x),
}
DERIVATIVES = {
    "jvp": lambda lib, g: lib.jvp(g, (P, Q), (Q, P))[1],
    "linearize": lambda lib, g: lib.linearize(g, P, Q)[1](Q, P),
    "jvp of jvp": lambda lib, g: lib.jvp(
        lambda x, w: lib.jvp(g, (x, w), (w, x * w))[1], (P, Q), (Q, P)
    )[1],
    "grad of jvp": lambda lib, g: lib.grad(lambda x: lib.jvp(g, (x, P * 1.0), (x * x, x))[1])(Q),
    "jvp of grad": lambda lib, g: lib.jvp(lib.grad(lambda w: g(P * 1.0, w)), (Q,), (P,))[1],
}
P, Q = np.array([0.3, 0.2], np.float32), np.array([0.1, 0.4], np.float32)


@pytest.mark.parametrize("name", DERIVATIVES)
@pytest.mark.parametrize("region", OVER_ANOTHER)
@pytest.mark.parametrize("sine", SINES)
def test_a_gradient_function_that_runs_twice_in_a_replay(sine, region, name):
    def g(x, w):
        t = SINES[sine](w)
        return rg.sum(t) * rg.sum(t) + rg.sum(OVER_ANOTHER[region](rg, rg.sum(t), x))

    def by_jax(x, w):
        t = jnp.sin(w)
        return jnp.sum(t) ** 2 + jnp.sum(OVER_ANOTHER[region](JAX, jnp.sum(t), x))

    due = DERIVATIVES[name](jax, by_jax)
    for f in (rg.jit(g), rg.jit(lambda x, w: rg.jit(g)(x, w))):
        found = [DERIVATIVES[name](rg, f)]
        if name == "jvp of grad":
            found.append(rg.hvp(f, [P, Q], [P * 0, P])[1])
        for y in found:
            np.testing.assert_allclose(y.numpy(), due, 1e-5, 1e-6)


# Rules that return the same whatever arrives, and whether they return 0.
FIXED = {
    "x": (lambda dy, x: x, False),
    "ones": (lambda dy, x: rg.ones_like(dy), False),
    "a constant": (lambda dy, x: rg.full(dy.shape, 2.0, dtype=dy.dtype), False),
    "zeros like dy": (lambda dy, x: rg.zeros_like(dy), True),
    "zeros": (lambda dy, x: rg.zeros(x.shape, dtype=x.dtype), True),
    "no gradient": (lambda dy, x: rg.rules.no_gradient(dy), True),
}
FORWARD = {
    "jvp": lambda f, x: rg.jvp(f, [x], [x])[1],
    "jacfwd": lambda f, x: rg.jacfwd(f)(x).sum(),
    "linearize": lambda f, x: rg.linearize(f, x)[1](x),
}


@pytest.mark.parametrize("size", [2, 100])  # constants of more than 64 elements are traced
@pytest.mark.parametrize("way", FORWARD)
@pytest.mark.parametrize("name", FIXED)
def test_under_jit_a_rule_that_ignores_dy_is_refused(name, way, size):
    rule, is_zero = FIXED[name]
    x = rg.tensor(np.linspace(0.5, 2, size), dtype="float32")
    custom = rg.custom_grad(lambda x, save: (rg.sin(x), lambda dy: rule(dy, x)))

    def overridden(x):
        with rg.gradient_override_map({"Sin": rule}):
            return rg.sin(x * x)

    arounds = ("alone", "scan", "cond", "vmap") if way == "jvp" else ("alone",)
    for around, f in itertools.product(arounds, (overridden, lambda x: custom(x * x))):
        g = REGIONS[around](f)
        if is_zero:
            assert not rg.jit(lambda x: FORWARD[way](g, x))(x).numpy().any()  # noqa: B023
        else:
            with pytest.raises(GradientError, match="even where none arrives"):
                rg.jit(lambda x: FORWARD[way](g, x))(x)  # noqa: B023


def test_under_jit_a_rule_that_is_affine_in_dy_gives_nan():
    def f(x):
        with rg.gradient_override_map({"Sin": lambda dy, x: 0 * dy + x}):
            return rg.sin(x)

    assert np.isnan(rg.jit(lambda x: rg.jvp(f, [x], [x])[1])([0.5, 2.0]).numpy()).all()
