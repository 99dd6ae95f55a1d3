"""Rules in other people's JAX programs: every op in every place under every transformation.

The expected gradients are those of the same program with a `jax.custom_jvp` by hand. Each cell is
delivered or refused; a rule that is skipped silently would have another number.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import regrad as rg
from regrad.errors import GradientError
from tests.helpers.jax_model import own_slope, own_vjp
from tests.helpers.jax_places import PLACES, TRANSFORMS, X, unrolled, unrolled_scan


def slope(x):
    return 3 + x * x


@own_slope(lambda x: 3 * x * x)
def cubic(x):
    return x * x * x


@own_vjp(lambda dy, x: (dy * 4 * x * x * x,))
def quartic(x):
    return x * x * x * x


@jax.jit
def compiled(x):
    return jnp.cos(x) * x


OPS = {
    "Relu": jax.nn.relu, "Round": jnp.round, "Sign": jnp.sign, "Tanh": jnp.tanh,
    "Silu": jax.nn.silu, "logistic": jax.nn.sigmoid, cubic: cubic, quartic: quartic,
    compiled: compiled,
}  # fmt: skip
OPENED = ("custom_jvp", "custom_vjp")  # compared with the program without their own derivatives
HAND = PLACES | dict.fromkeys(OPENED, PLACES["plain"])
# JAX itself mistakes second derivatives of a custom_jvp in scan (and custom_vjp has no forward
# mode), so there the comparison is with the loop written out.
HAND |= {"scan": unrolled_scan, "fori": unrolled, "while": unrolled}
HAND["map"] = lambda op: lambda x: op(x) * x
FORWARD = ("jvp", "jacfwd", "linearize")
OFTEN = ("grad", "grad of grad", "jvp", "vmap(grad)", "hessian")


def rule(dy, x):
    return dy * slope(x)


def rule_by_regrad(dy, x):
    return dy * (3 + rg.square(x))


def outcome(got, expected):
    """`delivered`, `refused` or `silent`; an error of JAX that the original has too is expected."""
    try:
        expected = expected()
    except (ValueError, TypeError) as error:  # reverse mode of while
        with pytest.raises(type(error)):
            got()
        return "refused"
    try:
        got = got()
    except GradientError:
        return "refused"
    return "delivered" if np.allclose(got, expected, rtol=1e-6) else f"silent: {got}, {expected}"


def cell(key, place, transform, rule=rule):
    op, run = OPS[key], TRANSFORMS[transform]
    f = rg.jax.override(PLACES[place](op), {key: rule}, open=["<lambda>"])
    hand = HAND[place](own_slope(slope)(lambda x: op(x)))
    if place == "while" and transform not in FORWARD:
        hand = PLACES[place](op)  # which JAX refuses
    return outcome(lambda: run(f)(X), lambda: run(hand)(X))


DELIVERED = [
    *[(key, "plain", t, rule) for key in ("Relu", quartic) for t in TRANSFORMS],
    *[(key, "plain", t, rule) for key in OPS for t in OFTEN],
    *[("Relu", p, t, rule) for p in PLACES for t in OFTEN
      if p not in ("associative_scan", "while")],
    *[(key, p, "grad", rule) for key in ("Tanh", quartic) for p in PLACES if p != "while"],
    *[(key, "while", "jvp", rule) for key in ("Tanh", "Relu", quartic)],
    *[("Relu", "scan", t, rule_by_regrad) for t in OFTEN],
    *[("Relu", "plain", t, rule_by_regrad) for t in TRANSFORMS],
]  # fmt: skip


def named(part):
    return getattr(part, "__name__", part)


@pytest.mark.slow(but=10)
@pytest.mark.parametrize(("key", "place", "transform", "rule"), dict.fromkeys(DELIVERED), ids=named)
def test_every_cell(key, place, transform, rule):
    assert cell(key, place, transform, rule) == "delivered"


@pytest.mark.parametrize("transform", [t for t in OFTEN if t != "jvp"])
def test_a_while_loop_has_no_reverse_mode(transform):
    assert cell("Relu", "while", transform) == "refused"


@pytest.mark.parametrize("transform", ["jvp", "jacfwd", "hessian", "linearize"])
def test_a_rule_that_is_not_linear_is_refused_forward(transform):
    for rule in (
        lambda dy: jnp.maximum(dy, 0),
        lambda dy: dy + 1,
        lambda dy: jnp.ones_like(dy),
        lambda dy: dy * dy,
        lambda dy: jnp.where(dy > 0, dy, 0),
        lambda dy: lax.stop_gradient(dy),
        rg.rules.guided_relu,
    ):
        assert cell("Relu", "plain", transform, rule) == "refused"


@pytest.mark.slow
def test_the_grid_can_fail():
    assert cell("Relu", "plain", "grad", lambda dy, x: dy * 2).startswith("silent")
    plain, hand = map(PLACES["plain"], (jax.nn.relu, own_slope(slope)(jax.nn.relu)))
    for run in TRANSFORMS.values():
        assert outcome(lambda run=run: run(plain)(X), lambda run=run: run(hand)(X)) != "delivered"
