"""Rules in other people's JAX programs: every op in every place under every transformation.

What is due comes from the same program written with a hand-made `jax.custom_jvp`. Each cell is
delivered or refused; a rule that is skipped silently would give another number.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import regrad as rg
from regrad.errors import GradientError
from tests.helpers.jax_places import PLACES, TRANSFORMS, X, by_hand, unrolled, unrolled_scan


def slope(x):
    return 3 + x * x


@jax.custom_jvp
def cubic(x):
    return x * x * x


cubic.defjvps(lambda dx, y, x: dx * 3 * x * x)


@jax.custom_vjp
def quartic(x):
    return x * x * x * x


quartic.defvjp(lambda x: (quartic(x), x), lambda x, dy: (dy * 4 * x * x * x,))


@jax.jit
def compiled(x):
    return jnp.cos(x) * x


OPS = {
    "Relu": jax.nn.relu,
    "Round": jnp.round,
    "Sign": jnp.sign,
    "Tanh": jnp.tanh,
    "Silu": jax.nn.silu,
    "logistic": jax.nn.sigmoid,
    cubic: cubic,
    quartic: quartic,
    compiled: compiled,
}
OPENED = ("custom_jvp", "custom_vjp")  # what is due is the program without their own derivatives
DUE = PLACES | dict.fromkeys(OPENED, PLACES["plain"])
# JAX itself mistakes second derivatives of a custom_jvp in scan (and custom_vjp has no forward
# mode), so there what is due comes from the loop written out.
DUE |= {"scan": unrolled_scan, "fori": unrolled, "while": unrolled}
DUE["map"] = lambda op: lambda x: op(x) * x


def named(key):
    return getattr(key, "__name__", key)


def outcome(got, due):
    """`delivered`, `refused` or `silent`; an error of JAX that the original has too is due."""
    try:
        due = due()
    except (ValueError, TypeError) as error:  # reverse mode of while
        with pytest.raises(type(error)):
            got()
        return "refused"
    try:
        got = got()
    except GradientError:
        return "refused"
    return "delivered" if np.allclose(got, due, rtol=1e-6) else f"silent: {got}, due {due}"


def cell(key, place, transform, rule=lambda dy, x: dy * slope(x)):
    op = OPS[key]
    f = rg.jax.override(PLACES[place](op), {key: rule}, open=["<lambda>"])
    due = DUE[place](by_hand(op, slope)) if place != "while" else None
    run = TRANSFORMS[transform]
    forward = ("jvp", "jacfwd", "linearize")
    if place == "while" and transform not in forward:
        due = PLACES[place](op)  # which JAX refuses
    return outcome(lambda: run(f)(X), lambda: run(due or DUE[place](by_hand(op, slope)))(X))


OFTEN = ("grad", "grad of grad", "jvp", "vmap(grad)", "hessian")


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("key", ["Relu", quartic], ids=named)
def test_every_transformation(key, transform):
    assert cell(key, "plain", transform) == "delivered"


@pytest.mark.parametrize("transform", OFTEN)
@pytest.mark.parametrize("key", OPS, ids=named)
def test_every_op(key, transform):
    assert cell(key, "plain", transform) == "delivered"


REFUSED = {("while", t) for t in TRANSFORMS if t not in ("jvp", "jacfwd", "linearize")}


@pytest.mark.parametrize("transform", OFTEN)
@pytest.mark.parametrize("place", [p for p in PLACES if p != "associative_scan"])
def test_every_place(place, transform):
    due = "refused" if (place, transform) in REFUSED else "delivered"
    assert cell("Relu", place, transform) == due


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("key", ["Tanh", quartic], ids=named)
def test_every_op_in_every_place(key, place):
    assert cell(key, place, "jvp" if place == "while" else "grad") == "delivered"


def test_a_rule_in_regrads_words_in_a_scan():
    ours = lambda dy, x: dy * (3 + rg.square(x))  # noqa: E731
    assert {cell("Relu", "scan", t, ours) for t in OFTEN} == {"delivered"}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_rule_in_regrads_words(transform):
    ours = lambda dy, x: dy * (3 + rg.square(x))  # noqa: E731
    assert cell("Relu", "plain", transform, ours) == "delivered"


@pytest.mark.parametrize("transform", ["jvp", "jacfwd", "hessian", "linearize"])
def test_a_rule_that_is_not_linear_is_refused_forward(transform):
    for rule in (
        lambda dy: jnp.maximum(dy, 0),
        lambda dy: dy + 1,
        jnp.ones_like,
        lambda dy: dy * dy,
        lambda dy: jnp.where(dy > 0, dy, 0),
        lax.stop_gradient,
        rg.rules.guided_relu,
    ):
        named = rule if rule is rg.rules.guided_relu else (lambda dy, rule=rule: rule(dy))
        assert cell("Relu", "plain", transform, named) == "refused"


def test_the_grid_can_fail():
    assert cell("Relu", "plain", "grad", lambda dy, x: dy * 2).startswith("silent")
    plain = PLACES["plain"](jax.nn.relu)
    due = PLACES["plain"](by_hand(jax.nn.relu, slope))
    for run in TRANSFORMS.values():
        assert outcome(lambda run=run: run(plain)(X), lambda run=run: run(due)(X)) != "delivered"
