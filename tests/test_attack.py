"""Programs of a hostile expert: whatever the way, a gradient is right or there is an error.

Each program comes with numbers from a calculation by hand, or with the words of its error.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from tests.quick import nothing_is_left_open

pytestmark = pytest.mark.usefixtures(nothing_is_left_open.__name__)
X = np.array([0.5, 1.2])
E = np.exp(X)


def derivative(f, order):
    """The derivative of a function of vectors that goes element by element."""
    if order == 0:
        return f
    return derivative(rg.grad(lambda x: rg.sum(f(x)), unconnected="zero"), order - 1)


# -- what f of a custom_grad makes of its own result -----------------------------------------------
#
# The Tensor that f returns becomes the output: where grad_func uses it, it is differentiated by the
# custom rule. What f computed from it before is f's own, and keeps the history that it has.


def kept(x):
    y = rg.exp(x)
    s = y * x
    return y, lambda dy: dy * s * 10


def saved(x, save):
    y = rg.exp(x)
    save([y * x, y])
    return y, lambda dy, saved: dy * saved[0] * saved[1]


def by_vjp(x):
    y, back = rg.vjp(lambda u: u * rg.exp(u), x)
    return y, lambda dy: back(dy)[0] * 5


def by_vjp_of_nothing(x):
    y, back = rg.vjp(lambda u: u, x)
    return y, lambda dy: back(dy)[0] * 5 * x


def by_vjp_of_several(x):
    ys, back = rg.vjp(lambda u: {"a": u, "b": u * u, "c": u}, x)
    return ys, lambda dy: back(dy)[0] * 5


def by_value_and_grad(x):
    y, dx = rg.value_and_grad(lambda u: u * u * u)(x)
    return y, lambda dy: dy * dx * 7


def two_outputs(x):
    y = rg.exp(x)
    z = y * y
    return (y, z), lambda dy: dy[0] * z + dy[1] * y


def twice_the_same(x):
    y = rg.exp(x)
    return (y, y), lambda dy: dy[0] * 2 * y + dy[1] * 3 * x


def around_another(x):
    inner = rg.custom_grad(kept)
    return inner(x) * 2, lambda dy: rg.grad(lambda u: rg.sum(inner(u)))(x) * dy


def called(f, use=lambda y, x: y):
    return lambda x: use(rg.custom_grad(f)(x), x)


# A function, and its derivatives. Of `saved`: s = x eˣ by its own history and y' = s y, so that
# (s y)' = s' y + s² y. Of `two_outputs`: y' = z and z' = y. Of `twice_the_same`: a' = 2a, b' = 3x.
CUSTOM = {
    "kept": (called(kept), [10 * X * E, 10 * (1 + X) * E, 10 * (2 + X) * E]),
    "saved": (
        called(saved),
        [
            X * E**2,
            (1 + X) * E**2 + X**2 * E**3,
            (2 + X) * E**2 + 3 * X * (1 + X) * E**3 + X**3 * E**4,
        ],
    ),
    "vjp": (called(by_vjp), [5 * (1 + X) * E, 5 * (2 + X) * E, 5 * (3 + X) * E]),
    "vjp of nothing": (called(by_vjp_of_nothing), [5 * X, 5 + 0 * X, 0 * X]),
    "vjp of several": (
        called(by_vjp_of_several, lambda ys, x: ys["a"] + 2 * ys["b"] + 3 * ys["c"]),
        [5 * (4 + 4 * X), 20 + 0 * X, 0 * X],
    ),
    "value_and_grad": (called(by_value_and_grad), [21 * X**2, 42 * X, 42 + 0 * X]),
    "two outputs": (
        called(two_outputs, lambda ys, x: ys[0] * x + ys[1]),
        [2 * E + X * E**2, 3 * E**2 + X * E, 4 * E + X * E**2],
    ),
    "one of two": (called(two_outputs, lambda ys, x: ys[1]), [E, E**2, E]),
    "the same twice": (
        called(twice_the_same, lambda ys, x: ys[0] * ys[1]),
        [
            2 * E**2 + 3 * X * E,
            4 * E**2 + (3 + 12 * X) * E,
            8 * E**2 + (18 + 36 * X) * E,
        ],
    ),
    "around another": (
        called(around_another),
        [10 * X * E, 10 * (1 + X) * E, 10 * (2 + X) * E],
    ),
}
TRACED = {
    "alone": lambda f: f,
    "checkpoint": rg.checkpoint,
    "vmap": rg.vmap,
    "map": lambda f: lambda x: rg.map(f, x),
    "cond": lambda f: lambda x: rg.cond(rg.sum(x) > 0, f, rg.zeros_like, x),
    "scan": lambda f: lambda x: rg.scan(lambda c, v: (c, f(v)), 0.0, x)[1],
    "while": lambda f: (
        lambda x: rg.while_loop(
            lambda c: c[0] < 1, lambda c: (c[0] + 1, f(c[1])), (0, x), max_steps=2
        )[1]
    ),
}


@pytest.mark.parametrize("name", CUSTOM)
@pytest.mark.parametrize("place", TRACED)
def test_custom_gradients_at_every_order(name, place):
    f, due = CUSTOM[name]
    f = TRACED[place](f)
    for order in 1, 2, 3:
        np.testing.assert_allclose(derivative(f, order)(X).numpy(), due[order - 1])
    np.testing.assert_allclose(rg.jit(derivative(f, 2))(X).numpy(), due[1])
    np.testing.assert_allclose(derivative(rg.jit(f), 2)(X).numpy(), due[1])


@pytest.mark.parametrize("name", ["kept", "saved", "vjp", "the same twice"])
def test_custom_gradients_at_the_third_order_of_what_is_traced(name):
    f, due = CUSTOM[name]
    third = rg.jit(derivative(TRACED["cond"](f), 3))
    np.testing.assert_allclose(third(X).numpy(), due[2])
    np.testing.assert_allclose(derivative(rg.vmap(f), 3)(jnp.asarray(X)).numpy(), due[2])


IN_GRAPHS = {
    "alone": lambda f: f,
    "checkpoint": rg.checkpoint,
    "vmap": rg.vmap,
    "tf.cond": lambda f: lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: f(x), lambda: x * 1),
    "tf.while_loop": lambda f: (
        lambda x: tf.while_loop(lambda i, v: i < 1, lambda i, v: (i + 1, f(v)), [0, x])[1]
    ),
}


@pytest.mark.parametrize("name", CUSTOM)
@pytest.mark.parametrize("place", IN_GRAPHS)
def test_custom_gradients_in_graphs(name, place):
    f, due = CUSTOM[name]
    orders = 1 if place == "tf.while_loop" else 3
    with tf.Graph().as_default(), tf.Session() as session:
        x = tf.placeholder(tf.float64, shape=(2,))
        ys = [IN_GRAPHS[place](f)(x)]
        for _ in range(orders):
            (dx,) = tf.gradients(ys[-1], x)
            ys.append(tf.zeros_like(x) if dx is None else dx)
        found = session.run(ys[1:], {x: X})
    np.testing.assert_allclose(found, due[:orders])
