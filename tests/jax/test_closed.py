"""Functions with a derivative of their own keep it, unless they are to be opened.

What is due comes from JAX itself: the plain function, or the function without its own derivative.
"""

from __future__ import annotations

import re
import warnings

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.scipy.special as special
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental.ode import odeint

import regrad as rg
from regrad.errors import ArgumentError, NotFiredError, PassedOverError, UnusedOverrideWarning

X = jnp.array([0.0, 1.0, -2.0, 0.5])


def seven(op, dy):
    return [7 * dy for _ in op.inputs]


# -- JAX's own -------------------------------------------------------------------------------------

JAXS = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "softplus": jax.nn.softplus,
    "log_sigmoid": jax.nn.log_sigmoid,
    "mish": jax.nn.mish,
    "logaddexp": lambda x: jnp.logaddexp(x, 2 * x),
    "xlogy": lambda x: special.xlogy(x * x, x * x),
    "entr": lambda x: special.entr(abs(x)),
    "log_ndtr": special.log_ndtr,
    "bce": lambda x: optax.sigmoid_binary_cross_entropy(x, 0.25),
    "log_cosh": lambda x: optax.log_cosh(x),
}
KEYS = ["Exp", "Log", "Log1p", "Sub", "AddV2", "Maximum", "Minimum", "Neg", "Mul"]
PLACES = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "vmap": jax.vmap,
    "jit vmap jit": lambda f: jax.jit(jax.vmap(jax.jit(f))),
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (c * 0.5, f(c)), x, None, length=2)[1],
    "cond": lambda f: lambda x: lax.cond(x[0] < 1, f, lambda x: x, x),
    "checkpoint": jax.checkpoint,
}


def watched(key, f):
    """The function, and an op of the key beside it."""
    op = {"Sub": lambda x: x - 2.0, "AddV2": lambda x: x + 2.0, "Mul": lambda x: x * 2.0}
    op |= {"Maximum": lambda x: jnp.maximum(x, -9.0), "Minimum": lambda x: jnp.minimum(x, 9.0)}
    op |= {"Neg": lambda x: -x, "Exp": jnp.exp, "Log": jnp.log, "Log1p": jnp.log1p}
    return lambda x: (f(x).sum(), op[key](x + 3.0).sum())


def quiet(f, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnusedOverrideWarning)
        return f(*args)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["relu", "softplus", "bce", "xlogy"])
def test_functions_of_jax_keep_their_derivative_in_every_place(name, place):
    f = PLACES[place](JAXS[name])
    due = jax.grad(lambda x: f(x).sum())(X)
    for key in ("Exp", "Log1p", "Maximum", "Log"):
        ours = rg.jax.override(lambda x, f=f: f(x).sum(), {key: seven})
        np.testing.assert_array_equal(quiet(jax.grad(ours), X), due)


@pytest.mark.parametrize("name", ["relu", "relu6", "softplus", "logaddexp", "xlogy"])
def test_functions_of_jax_are_named_where_the_key_occurs_nowhere_else(name):
    keys = {"relu": "Maximum", "relu6": "Minimum", "xlogy": "Log"}
    key = keys.get(name, "Log1p")
    called = "logaddexp" if name == "softplus" else name
    ours = rg.jax.override(lambda x: JAXS[name](x).sum(), {key: seven})
    with pytest.warns(UnusedOverrideWarning, match=rf"{called} \(.*open=\['{called}'\]"):
        jax.grad(ours)(X)
    with pytest.raises(NotFiredError, match=rf"only where it cannot.*open=\['{called}'\]"):
        ours.assert_fired(key)
    assert (called, f"closed over {key}") in [row[:2] for row in ours.table().rows]
    assert called in [row[0] for row in ours.untouched().rows]
    beside = rg.jax.override(lambda x: sum(watched(key, JAXS[name])(x)), {key: seven})
    got = jax.grad(beside)(X)  # no warning: the key is there, and JAX's function is as it was
    np.testing.assert_allclose(got, jax.grad(lambda x: JAXS[name](x).sum())(X) + 7)
    beside.assert_fired()


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", JAXS)
def test_a_rule_that_is_the_built_in_one_changes_nothing(name, key):
    f = lambda x: JAXS[name](x).sum()  # noqa: E731
    for options in ({}, {"open": ["logaddexp", "relu", "relu6", "xlogy", "entr", "log_ndtr"]}):
        ours = rg.jax.override(f, {key: key}, **options)
        np.testing.assert_array_equal(quiet(jax.grad(ours), X), jax.grad(f)(X))
        for run in (jax.hessian, jax.jacfwd):
            np.testing.assert_array_equal(quiet(run(ours), X), run(f)(X))


def test_zero_initialised_weights_train():
    data, labels = jnp.array([[1.0, 2.0], [-1.0, 0.5]]), jnp.array([1.0, 0.0])

    def loss(w):
        return optax.sigmoid_binary_cross_entropy(data @ w, labels).mean() + jnp.exp(w * 0).sum()

    ours = rg.jax.override(loss, {"Exp": lambda dy, y: dy * y})
    np.testing.assert_allclose(jax.grad(ours)(jnp.zeros(2)), jax.grad(loss)(jnp.zeros(2)))
    ours.assert_fired()


# -- other people's --------------------------------------------------------------------------------


@jax.custom_vjp
def rounded(x):
    return jnp.round(jnp.exp(x))


rounded.defvjp(lambda x: (rounded(x), None), lambda _, dy: (dy,))


@jax.custom_jvp
def floored(x):
    return jnp.floor(jnp.exp(x))


floored.defjvps(lambda dx, y, x: dx)
THEIRS = {"custom_vjp": rounded, "custom_jvp": floored}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", THEIRS)
def test_a_straight_through_estimator_keeps_its_gradient(kind, place):
    f = PLACES[place](THEIRS[kind])
    name = THEIRS[kind].__name__
    due = jax.grad(lambda x: f(x).sum())(X) + 7

    def both(x):
        return f(x).sum() + jnp.exp(x).sum()

    ours = rg.jax.override(both, {"Exp": seven})
    for run in (ours, jax.grad(ours), jax.jit(ours)):
        with pytest.raises(PassedOverError, match=rf"{name} \(.*keep=\['{name}'\]"):
            run(X)
    for keep in ([name], [THEIRS[kind]]):
        kept = rg.jax.override(both, {"Exp": seven}, keep=keep)
        np.testing.assert_allclose(jax.grad(kept)(X), due)
    assert (name, "closed over Exp") in [row[:2] for row in kept.table().rows]
    assert name in [row[0] for row in kept.untouched().rows]


@pytest.mark.parametrize("place", ["plain", "jit", "checkpoint"])
@pytest.mark.parametrize("kind", THEIRS)
def test_what_is_opened_is_differentiated_op_by_op(kind, place):
    f, name = PLACES[place](THEIRS[kind]), THEIRS[kind].__name__
    for opened in ([name], [THEIRS[kind]], ("nothing", THEIRS[kind])):
        either = rg.rules.optional(lambda dy: 3 * dy)
        rules = {"Round": either, "Floor": either, "Exp": seven}
        ours = rg.jax.override(lambda x: f(x).sum(), rules, open=opened)
        np.testing.assert_allclose(jax.grad(ours)(X), np.full(4, 21.0))
        assert (name, "opened") in [row[:2] for row in ours.table().rows]
    native = rg.jax.override(lambda x: f(x).sum(), {"Exp": "Exp"}, open=[name])
    np.testing.assert_array_equal(quiet(jax.grad(native), X), jax.grad(lambda x: f(x).sum())(X))


def test_functions_inside_functions_are_opened_one_by_one():
    @jax.custom_jvp
    def outer(x):
        return rounded(x) * 2

    outer.defjvps(lambda dx, y, x: dx * 100)
    run = lambda x: outer(x).sum() + jnp.exp(x).sum()  # noqa: E731
    with pytest.raises(PassedOverError, match="outer"):
        rg.jax.override(run, {"Exp": seven})(X)
    ours = rg.jax.override(run, {"Exp": seven}, keep=[outer])
    np.testing.assert_allclose(jax.grad(ours)(X), np.full(4, 107.0))
    rules = {"Exp": seven, "Mul": lambda dy: [3 * dy, None]}
    with pytest.raises(PassedOverError, match=r"rounded \("):
        rg.jax.override(run, rules, open=[outer])(X)
    ours = rg.jax.override(run, rules, open=[outer], keep=[rounded])
    np.testing.assert_allclose(jax.grad(ours)(X), np.full(4, 10.0))


def test_a_function_of_jax_that_runs_functions_of_others_is_named():
    def decay(x):
        return odeint(lambda y, t: -jnp.tanh(y), x, jnp.linspace(0.0, 1.0, 3))[-1].sum()

    run = lambda x: decay(x) + jnp.tanh(x).sum()  # noqa: E731
    for f in (run, jax.jit(run)):
        ours = rg.jax.override(f, {"Tanh": seven})
        with pytest.raises(PassedOverError, match=r"_odeint.*'Tanh'"):
            ours(X)
    kept = rg.jax.override(run, {"Tanh": seven, "AddV2": "AddV2"}, keep=["_odeint"])
    np.testing.assert_allclose(jax.grad(kept)(X), jax.grad(decay)(X) + 7, rtol=1e-6)
    inside = rg.jax.override(run, {"AddV2": seven})  # the solver's own sums are JAX's affair
    np.testing.assert_allclose(jax.grad(inside)(X), 7 * jax.grad(run)(X), rtol=1e-6)


def test_loops_that_are_differentiated_by_hand_stay_closed():
    def looped(x):
        step = lambda c: (c[0] + 1, jnp.tanh(c[1]))  # noqa: E731
        end = eqxi.while_loop(lambda c: c[0] < 3, step, (0, x), kind="checkpointed", max_steps=5)
        return end[1].sum()

    f = lambda x: looped(x) + jnp.tanh(x).sum()  # noqa: E731
    with pytest.raises(PassedOverError, match="'Tanh'") as refused:
        rg.jax.override(f, {"Tanh": seven})(X)
    (name,) = re.findall(r"keep=\['(.*?)'\]", str(refused.value))
    kept = rg.jax.override(f, {"Tanh": seven}, keep=[name])
    np.testing.assert_allclose(jax.grad(kept)(X), jax.grad(looped)(X) + 7, rtol=1e-6)


def test_a_derivative_taken_inside_of_what_stays_closed_does_no_harm():
    def penalty(x):
        return jax.grad(lambda x: jax.nn.softplus(x).sum())(x).sum() + jnp.log1p(x + 3).sum()

    due = jax.grad(lambda x: jax.grad(lambda x: jax.nn.softplus(x).sum())(x).sum())(X) + 7
    ours = rg.jax.override(penalty, {"Log1p": seven})
    np.testing.assert_allclose(jax.grad(ours)(X), due)


def test_a_rule_that_mixes_examples_is_no_fault_in_what_stays_closed():
    f = lambda x: jax.vmap(jax.nn.softplus)(x).sum() + jnp.log1p(x + 3).sum()  # noqa: E731
    ours = rg.jax.override(f, {"Log1p": lambda dy: dy[::-1]})
    np.testing.assert_allclose(jax.grad(ours)(X), jax.nn.sigmoid(X) + 1)


def test_functions_as_keys_inside_what_is_closed():
    @jax.custom_jvp
    def around(x):
        return rounded(x) + 1

    around.defjvps(lambda dx, y, x: dx)
    f, rules = lambda x: (around(x) + rounded(x)).sum(), {rounded: lambda dy: 7 * dy}
    with pytest.raises(PassedOverError, match=r"around.*'rounded'"):
        rg.jax.override(f, rules)(X)
    kept = rg.jax.override(f, rules, keep=[around])
    np.testing.assert_allclose(jax.grad(kept)(X), np.full(4, 8.0))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"open": "relu"}, r"open= expected a list .*write open=\['relu'\]"),
        ({"keep": rounded}, "keep= expected a list"),
        ({"open": [3]}, "open= expected names or functions, got 3"),
        ({"keep": [None]}, "keep= expected names or functions, got None"),
        ({"open": [lambda x: x]}, "pass its name as a string"),
        ({"open": [rounded], "keep": [rounded]}, "in open= and in keep="),
        ({"open": ["relu"], "keep": ["relu"]}, "in open= and in keep="),
    ],
)
def test_what_open_and_keep_take(options, words):
    with pytest.raises(ArgumentError, match=words):
        rg.jax.override(lambda x: x, {"Exp": seven}, **options)


def test_the_warning_says_that_keep_was_given():
    @jax.custom_jvp
    def act(x):
        return jnp.exp(x)

    act.defjvp(lambda xs, dxs: (act(*xs), 2 * dxs[0]))
    f = rg.jax.override(lambda x: act(x).sum(), {"Exp": lambda dy, y: dy}, keep=[act])
    with pytest.warns(UnusedOverrideWarning, match="which keep= leaves as it is"):
        jax.grad(f)(jnp.ones(2))
