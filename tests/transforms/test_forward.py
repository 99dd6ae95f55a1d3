"""Forward mode through loops, branches and compiled programs."""

import numpy as np
import pytest

import regrad as rg
from regrad.errors import GradientError

jax = pytest.importorskip("jax")
jnp = jax.numpy

X, V = rg.scalar(0.7), rg.scalar(1.3)


def halved(x):
    """As many steps as the value asks for."""
    return rg.while_loop(lambda c: c[0] > 0.1, lambda c: (c[0] / 2, rg.sin(c[1]) + c[0]), (x, x))[1]


def summed(x):
    def step(c, k):
        t, y = c
        return (t + 1.0, rg.sin(y) * k + t), y * x

    (_, y), ys = rg.scan(step, (rg.scalar(0.0), x), rg.tensor([1.0, 0.5, 2.0]), reverse=True)
    return y + ys.sum()


def scanned_over(x):
    _, ys = rg.scan(lambda c, k: (c + k, c * k), rg.ones_like(x), x * rg.tensor([1.0, 2.0, 3.0]))
    return ys


def bounded(x):
    return rg.while_loop(lambda c: c > 0.1, lambda c: rg.sin(c) / 2, x, max_steps=20)


def chosen(x):
    return rg.cond(x > 0.5, lambda: rg.exp(x), lambda: x * x) * x


def compiled(x):
    return rg.jit(lambda z: (z * z, rg.sin(z) + x))(x * 2)[1] * x


def many(x):
    return rg.vmap(lambda k: rg.sin(k * x))(rg.tensor([1.0, 2.0])).sum()


def again(x):
    return rg.checkpoint(lambda z: rg.sin(z) * x)(x * x)


def nested(x):
    def step(c, _):
        return rg.while_loop(lambda z: z > 0.2, lambda z: z * rg.cos(x), c + 1.0), c

    last, ys = rg.scan(step, x, None, length=3)
    return last * ys.sum()


def descended(x):
    """Newton's method for cos(z) = x z, where each step has a gradient of its own."""

    def step(c):
        n, z = c
        error = lambda z: rg.cos(z) - x * z  # noqa: E731
        return n + 1, z - error(z) / rg.grad(error)(z)

    return rg.while_loop(lambda c: c[0] < 4, step, (0, rg.ones_like(x)))[1]


FUNCTIONS = [
    halved, summed, scanned_over, bounded, chosen, compiled, many, again, nested, descended,
]  # fmt: skip


def moved(f, x, v):
    return rg.jvp(f, [x], [v])[1].numpy()


def difference(f, x, v, h=1e-4):
    x = rg.asarray(x.numpy().astype(np.float64))
    return (f(x + h * v.item()).numpy() - f(x - h * v.item()).numpy()) / (2 * h)


@pytest.mark.parametrize("f", FUNCTIONS)
def test_against_differences(f):
    expected = difference(f, X, V)
    np.testing.assert_allclose(moved(f, X, V), expected, rtol=2e-3)
    np.testing.assert_allclose(moved(rg.jit(f), X, V), expected, rtol=2e-3)
    compiled = rg.jit(lambda x, v: rg.jvp(f, [x], [v]))(X, V)
    np.testing.assert_allclose(compiled[1].numpy(), expected, rtol=2e-3)
    np.testing.assert_allclose(compiled[0].numpy(), f(X).numpy(), rtol=1e-5)


@pytest.mark.parametrize("f", FUNCTIONS)
def test_twice(f):
    """The derivative of the derivative, forward both times, eager against compiled."""

    def twice(x):
        return rg.jvp(lambda x: rg.jvp(f, [x], [V])[1], [x], [V])[1]

    expected = twice(X).numpy()
    assert np.any(expected != 0)
    np.testing.assert_allclose(rg.jit(twice)(X).numpy(), expected, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("f", [summed, bounded, chosen, compiled, many, again])
def test_forward_over_reverse_and_back(f):
    over = lambda x: rg.jvp(rg.grad(f), [x], [V])[1]  # noqa: E731
    back = lambda x: rg.grad(lambda x: rg.jvp(f, [x], [V])[1])(x)  # noqa: E731
    expected = (rg.grad(rg.grad(f))(X) * V).numpy()
    for g in (over, back):
        np.testing.assert_allclose(g(X).numpy(), expected, rtol=1e-4)
        np.testing.assert_allclose(rg.jit(g)(X).numpy(), expected, rtol=1e-4)


def test_the_gradient_of_it_through_a_loop_of_unknown_length_is_refused():
    with pytest.raises(
        GradientError, match="while_loop: under jit a loop of unknown length has no gradient"
    ):
        rg.jit(rg.grad(lambda x: rg.jvp(halved, [x], [V])[1]))(X)
    with pytest.raises(
        GradientError, match="while_loop: under jit a loop of unknown length has no gradient"
    ):
        rg.grad(rg.jit(halved))(X)
    rg.jvp(rg.jit(halved), [X], [V])  # and it is none of forward mode's


@pytest.mark.parametrize("f", FUNCTIONS)
def test_rules_in_force_count(f):
    rules = {"Sin": lambda dy: 3 * dy, "Mul": lambda dy, a, b: (dy, dy)}
    with rg.gradient_override_map({k: rg.rules.optional(rule) for k, rule in rules.items()}):
        eager, traced = moved(f, X, V), rg.jit(lambda x: rg.jvp(f, [x], [V])[1])(X).numpy()
    np.testing.assert_allclose(traced, eager, rtol=1e-4)


def test_a_rule_that_is_not_linear_is_refused_inside():
    with (
        pytest.raises(GradientError, match="forward mode: the backward pass is not linear"),
        rg.gradient_override_map({"Sin": lambda dy: rg.nn.relu(dy)}),
    ):
        rg.jit(lambda x: rg.jvp(halved, [x], [V])[1])(X)


def test_a_rule_that_makes_something_of_nothing_gives_nan_inside():
    with rg.gradient_override_map({"Sin": lambda dy: dy + 1}):
        assert np.isnan(rg.jit(lambda x: rg.jvp(halved, [x], [V])[1])(X).item())
        with pytest.raises(GradientError, match="even where none arrives"):
            rg.jvp(halved, [X], [V])


def test_outputs_that_do_not_move():
    def f(x):
        def body(c):
            return c[0] + 1, c[1] * 0.5, c[2] * x

        return rg.while_loop(lambda c: c[0] < 3, body, (0, rg.scalar(1.0), x))

    for g in (f, rg.jit(f)):
        count, constant, y = rg.jvp(g, [X], [V])[1]
        assert count.item() == 0
        assert constant.item() == 0
        assert y.item() == pytest.approx(4 * 0.7**3 * 1.3, rel=1e-5)


def test_variables_assigned_in_the_loop():
    def f(x):
        v = rg.Variable(1.0)

        def g(x):
            v.assign(1.0)

            def body(c):
                v.assign(v * x)
                return c + 1

            rg.while_loop(lambda c: c < 3, body, 0)
            return v * x

        return rg.jit(lambda x: rg.jvp(g, [x], [V])[1])(x)

    assert f(X).item() == pytest.approx(4 * 0.7**3 * 1.3, rel=1e-5)


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
# A region over another input, and the same in JAX; c is the sum of the sines.
OVER_ANOTHER = {
    "scan": (
        lambda c, x: rg.scan(lambda c, r: (c * r, c), c, x)[1],
        lambda c, x: jax.lax.scan(lambda c, r: (c * r, c), c, x)[1],
    ),
    "vmap": (
        lambda c, x: rg.vmap(lambda r: r * c * r)(x),
        lambda c, x: jax.vmap(lambda r: r * c * r)(x),
    ),
    "cond": (
        lambda c, x: rg.cond(x[0] > 0, lambda: x * x * c, lambda: x),
        lambda c, x: jax.lax.cond(x[0] > 0, lambda: x * x * c, lambda: x),
    ),
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
        return rg.sum(t) * rg.sum(t) + rg.sum(OVER_ANOTHER[region][0](rg.sum(t), x))

    def by_jax(x, w):
        t = jnp.sin(w)
        return jnp.sum(t) ** 2 + jnp.sum(OVER_ANOTHER[region][1](jnp.sum(t), x))

    due = DERIVATIVES[name](jax, by_jax)
    for f in (rg.jit(g), rg.jit(lambda x, w: rg.jit(g)(x, w))):
        found = DERIVATIVES[name](rg, f)
        np.testing.assert_allclose(found.numpy(), due, 1e-5, 1e-6)
        if name == "jvp of grad":
            np.testing.assert_allclose(rg.hvp(f, [P, Q], [P * 0, P])[1].numpy(), due, 1e-5)


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
AROUND = {
    "plain": lambda f: f,
    "scan": lambda f: lambda x: rg.scan(lambda c, _: (f(c), None), x, None, 2)[0],
    "cond": lambda f: lambda x: rg.cond(x.sum() > 0, f, lambda x: x, x),
    "vmap": lambda f: lambda x: rg.vmap(f)(rg.expand_dims(x, axis=0)),
}


@pytest.mark.parametrize("size", [2, 100])  # constants of more than 64 elements are traced
@pytest.mark.parametrize("way", FORWARD)
@pytest.mark.parametrize("name", FIXED)
def test_under_jit_a_rule_that_ignores_dy_is_refused(name, way, size):
    rule, is_zero = FIXED[name]
    x = rg.tensor(np.linspace(0.5, 2, size), dtype="float32")

    def overridden(x):
        with rg.gradient_override_map({"Sin": rule}):
            return rg.sin(x * x)

    def custom(x):
        f = rg.custom_grad(lambda x, save: (rg.sin(x), lambda dy: rule(dy, x)))
        return f(x * x)

    around = AROUND if way == "jvp" else {"plain": AROUND["plain"]}
    forms = [wrapped(f) for wrapped in around.values() for f in (overridden, custom)]
    for f in forms:
        call = rg.jit(lambda x, f=f: FORWARD[way](f, x))
        if is_zero:
            assert not call(x).numpy().any()
        else:
            with pytest.raises(GradientError, match="even where none arrives"):
                call(x)


def test_under_jit_a_rule_that_is_affine_in_dy_gives_nan():
    def f(x):
        with rg.gradient_override_map({"Sin": lambda dy, x: 0 * dy + x}):
            return rg.sin(x)

    assert np.isnan(rg.jit(lambda x: rg.jvp(f, [x], [x])[1])([0.5, 2.0]).numpy()).all()
