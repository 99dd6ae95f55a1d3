"""Functions with a derivative of their own keep it, unless they are to be opened.

The expected gradients are JAX's own: of the plain function, or of that without its own derivative.
"""

from __future__ import annotations

import re

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.scipy.special as special
import numpy as np
import optax
import pytest
from jax.experimental.ode import odeint
from numpy.testing import assert_allclose, assert_array_equal

import regrad as rg
from regrad.errors import ArgumentError, NotFiredError, PassedOverError, UnusedOverrideWarning
from tests.helpers.jax_model import own_slope, own_vjp, seven, slopes, times
from tests.helpers.jax_places import AROUND
from tests.helpers.rows import refused

override = rg.jax.override
X = jnp.array([0.0, 1.0, -2.0, 0.5])
SEVEN = {"Exp": lambda op, dy: [7 * dy for _ in op.inputs]}
PLACES = AROUND | {"jit vmap jit": lambda f: jax.jit(jax.vmap(jax.jit(f)))}
unused_is_fine = pytest.mark.filterwarnings("ignore::regrad.errors.UnusedOverrideWarning")


def rows(table):
    return [row[:2] for row in table.rows]


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
OPS = {
    "Exp": jnp.exp, "Log": jnp.log, "Log1p": jnp.log1p, "Sub": lambda x: x - 2.0,
    "AddV2": lambda x: x + 2.0, "Maximum": lambda x: jnp.maximum(x, -9.0),
    "Minimum": lambda x: jnp.minimum(x, 9.0), "Neg": lambda x: -x, "Mul": lambda x: x * 2.0,
}  # fmt: skip


@pytest.mark.slow(but=1)
@unused_is_fine
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["relu", "softplus", "bce", "xlogy"])
def test_functions_of_jax_keep_their_derivative_in_every_place(name, place):
    f = PLACES[place](JAXS[name])
    for key in ("Exp", "Log1p", "Maximum", "Log"):
        assert_array_equal(slopes(override(f, {key: seven}), X), slopes(f, X))


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(("name", "called", "key"), [
    ("relu", "relu", "Maximum"),
    ("relu6", "relu6", "Minimum"),
    ("softplus", "logaddexp", "Log1p"),
    ("logaddexp", "logaddexp", "Log1p"),
    ("xlogy", "xlogy", "Log"),
])  # fmt: skip
def test_functions_of_jax_are_named_where_the_key_occurs_nowhere_else(name, called, key):
    f = JAXS[name]
    ours = override(lambda x: f(x), {key: seven})
    with pytest.warns(UnusedOverrideWarning, match=rf"{called} \(.*open=\['{called}'\]"):
        slopes(ours, X)
    with pytest.raises(NotFiredError, match=rf"only where it cannot.*open=\['{called}'\]"):
        ours.assert_fired(key)
    assert (called, f"closed over {key}") in rows(ours.table())
    assert called in [row[0] for row in ours.untouched().rows]
    both = override(lambda x: f(x) + OPS[key](x + 3.0), {key: seven})
    assert_allclose(slopes(both, X), slopes(f, X) + 7)  # no warning: the key is there
    both.assert_fired()


@pytest.mark.slow(but=1)
@unused_is_fine
@pytest.mark.parametrize("key", OPS)
@pytest.mark.parametrize("name", JAXS)
def test_a_rule_that_is_the_built_in_one_changes_nothing(name, key):
    f = lambda x: JAXS[name](x).sum()  # noqa: E731
    for options in ({}, {"open": ["logaddexp", "relu", "relu6", "xlogy", "entr", "log_ndtr"]}):
        ours = override(f, {key: key}, **options)
        for run in (jax.grad, jax.hessian, jax.jacfwd):
            assert_array_equal(run(ours)(X), run(f)(X))


# -- other people's --------------------------------------------------------------------------------


@own_vjp(lambda dy, x: (dy,))
def rounded(x):
    return jnp.round(jnp.exp(x))


@own_slope(jnp.ones_like)
def floored(x):
    return jnp.floor(jnp.exp(x))


THEIRS = {"rounded": rounded, "floored": floored}


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", THEIRS)
def test_a_straight_through_estimator_keeps_its_gradient(name, place):
    f = PLACES[place](THEIRS[name])
    both = lambda x: f(x).sum() + jnp.exp(x).sum()  # noqa: E731
    ours = override(both, SEVEN)
    for run in (ours, jax.grad(ours), jax.jit(ours)):
        with pytest.raises(PassedOverError, match=rf"{name} \(.*keep=\['{name}'\]"):
            run(X)
    for keep in ([name], [THEIRS[name]]):
        kept = override(both, SEVEN, keep=keep)
        assert_allclose(jax.grad(kept)(X), slopes(f, X) + 7)
    assert (name, "closed over Exp") in rows(kept.table())
    assert name in [row[0] for row in kept.untouched().rows]


@unused_is_fine
@pytest.mark.parametrize("place", ["plain", "jit", "checkpoint"])
@pytest.mark.parametrize("name", THEIRS)
def test_opened_functions_are_differentiated_op_by_op(name, place):
    f = PLACES[place](THEIRS[name])
    for opened in ([name], [THEIRS[name]], ("nothing", THEIRS[name])):
        either = rg.rules.optional(times(3))
        ours = override(lambda x: f(x), {"Round": either, "Floor": either, **SEVEN}, open=opened)
        assert_allclose(slopes(ours, X), np.full(4, 21.0))
        assert (name, "opened") in rows(ours.table())
    native = override(lambda x: f(x), {"Exp": "Exp"}, open=[name])
    assert_array_equal(slopes(native, X), slopes(f, X))


@own_slope(lambda x: 100.0)
def outer(x):
    return rounded(x) * 2


def test_functions_inside_functions_are_opened_one_by_one():
    run = lambda x: outer(x) + jnp.exp(x)  # noqa: E731
    refused(lambda: override(run, SEVEN)(X), PassedOverError, "outer")
    assert_allclose(slopes(override(run, SEVEN, keep=[outer]), X), np.full(4, 107.0))
    rules = {**SEVEN, "Mul": lambda dy: [3 * dy, None]}
    refused(lambda: override(run, rules, open=[outer])(X), PassedOverError, r"rounded \(")
    ours = override(run, rules, open=[outer], keep=[rounded])
    assert_allclose(slopes(ours, X), np.full(4, 10.0))


def decay(x):
    return odeint(lambda y, t: -jnp.tanh(y), x, jnp.linspace(0.0, 1.0, 3))[-1].sum()


def looped(x):
    step = lambda c: (c[0] + 1, jnp.tanh(c[1]))  # noqa: E731
    loop = {"kind": "checkpointed", "max_steps": 5}
    return eqxi.while_loop(lambda c: c[0] < 3, step, (0, x), **loop)[1].sum()


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("f", [decay, looped])
def test_a_function_of_a_library_that_runs_functions_of_others_is_named(f):
    run = lambda x: f(x) + jnp.tanh(x).sum()  # noqa: E731
    for each in (run, jax.jit(run)):
        with pytest.raises(PassedOverError, match="'Tanh'") as refused:
            override(each, {"Tanh": times(7)})(X)
    (name,) = re.findall(r"keep=\['(.*?)'\]", str(refused.value))
    assert name == "_odeint" or f is looped
    kept = override(run, {"Tanh": times(7), "AddV2": "AddV2"}, keep=[name])
    assert_allclose(jax.grad(kept)(X), jax.grad(f)(X) + 7, rtol=1e-6)
    if f is decay:  # the solver's own sums keep JAX's derivative
        inside = override(run, {"AddV2": lambda dy: (7 * dy, 7 * dy)})
        assert_allclose(jax.grad(inside)(X), 7 * jax.grad(run)(X), rtol=1e-6)


def test_a_derivative_taken_inside_a_closed_function_does_no_harm():
    penalty = lambda x: slopes(jax.nn.softplus, x)  # noqa: E731
    ours = override(lambda x: penalty(x) + jnp.log1p(x + 3), {"Log1p": times(7)})
    assert_allclose(slopes(ours, X), slopes(penalty, X) + 7)


def test_a_rule_that_mixes_examples_is_no_fault_in_a_closed_function():
    f = lambda x: jax.vmap(jax.nn.softplus)(x) + jnp.log1p(x + 3)  # noqa: E731
    ours = override(f, {"Log1p": lambda dy: dy[::-1]})
    assert_allclose(slopes(ours, X), jax.nn.sigmoid(X) + 1)


@own_slope(jnp.ones_like)
def around(x):
    return rounded(x) + 1


def test_functions_as_keys_inside_a_closed_function():
    f, rules = lambda x: around(x) + rounded(x), {rounded: times(7)}
    refused(lambda: override(f, rules)(X), PassedOverError, r"around.*'rounded'")
    assert_allclose(slopes(override(f, rules, keep=[around]), X), np.full(4, 8.0))


@pytest.mark.parametrize(("options", "words"), [
    ({"open": "relu"}, r"expected open= to be a list .*write open=\['relu'\]"),
    ({"keep": rounded}, "expected keep= to be a list"),
    ({"open": [3]}, "expected open= to contain names or functions, got 3"),
    ({"keep": [None]}, "expected keep= to contain names or functions, got None"),
    ({"open": [lambda x: x]}, "pass its name as a string"),
    ({"open": [rounded], "keep": [rounded]}, "in open= and in keep="),
    ({"open": ["relu"], "keep": ["relu"]}, "in open= and in keep="),
])  # fmt: skip
def test_what_open_and_keep_take(options, words):
    refused(lambda: override(lambda x: x, {"Exp": seven}, **options), ArgumentError, words)


def test_the_warning_names_keep():
    act = own_slope(lambda x: 2.0)(lambda x: jnp.exp(x))
    ours = override(lambda x: act(x), {"Exp": times(1)}, keep=["<lambda>"])
    with pytest.warns(UnusedOverrideWarning, match="which keep= leaves unchanged"):
        slopes(ours, X)
