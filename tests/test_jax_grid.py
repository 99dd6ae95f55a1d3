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

X = jnp.array([0.3, -1.2, 2.4])


def by_hand(f, slope):
    """`f` with the tangent `dx * slope(x)`: what a rule `dy * slope(x)` is due to give."""
    made = jax.custom_jvp(lambda x: f(x))
    made.defjvp(lambda xs, dxs: (made(*xs), dxs[0] * slope(xs[0])))
    return made


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


# -- where the op stands; each takes it and gives a function of a vector ---------------------------


def in_scan(op):
    return lambda x: lax.scan(lambda c, y: (op(c) * 0.5 + y, op(y)), x * 0, jnp.stack([x, x]))[0]


def in_while(op):
    def f(x):
        return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, op(c[1]) * 0.5), (0, x))[1]

    return f


def in_custom_jvp(op):
    f = jax.custom_jvp(lambda x: op(x) * x)
    f.defjvps(lambda dx, y, x: dx * 1e6)
    return f


def in_custom_vjp(op):
    f = jax.custom_vjp(lambda x: op(x) * x)
    f.defvjp(lambda x: (op(x) * x, None), lambda _, dy: (dy * 1e6,))
    return f


def in_solve(op):
    def f(x):
        return lax.custom_linear_solve(
            lambda v: v * (2 + op(x) ** 2), x, lambda _, b: b / (2 + op(x) ** 2), symmetric=True
        )

    return f


PLACES = {
    "plain": lambda op: lambda x: op(x) * x,
    "jit": lambda op: jax.jit(lambda x: op(x) * x),
    "jit in jit": lambda op: jax.jit(lambda x: jax.jit(op)(x) * x),
    "scan": in_scan,
    "fori": lambda op: lambda x: lax.fori_loop(0, 2, lambda i, c: op(c) * 0.5, x),
    "map": lambda op: lambda x: lax.map(op, x) * x,
    "while": in_while,
    "cond": lambda op: lambda x: lax.cond(x[0] > 0, op, jnp.sin, x),
    "switch": lambda op: lambda x: lax.switch(1, [jnp.sin, op, jnp.cos], x),
    "checkpoint": lambda op: jax.checkpoint(lambda x: op(x) * x),
    "vmap": lambda op: lambda x: jax.vmap(op)(x) * x,
    "vmap of jit": lambda op: lambda x: jax.vmap(jax.jit(op))(jnp.stack([x, 2 * x])).sum(0),
    "custom_jvp": in_custom_jvp,
    "custom_vjp": in_custom_vjp,
    "custom_linear_solve": in_solve,
    "associative_scan": lambda op: lambda x: lax.associative_scan(lambda a, b: op(a) + b, x),
}
OPENED = ("custom_jvp", "custom_vjp")  # what is due is the program without their own derivatives
DUE = PLACES | dict.fromkeys(OPENED, PLACES["plain"])
# JAX itself mistakes second derivatives of a custom_jvp in scan (and custom_vjp has no forward
# mode), so there what is due comes from the loop written out.


def unrolled_scan(op):
    def f(x):
        c = x * 0
        for _ in range(2):
            c = op(c) * 0.5 + x
        return c

    return f


def unrolled(op):
    return lambda x: op(op(x) * 0.5) * 0.5


DUE |= {"scan": unrolled_scan, "fori": unrolled, "while": unrolled}
DUE["map"] = lambda op: lambda x: op(x) * x


# -- what is done with it --------------------------------------------------------------------------


def total(f):
    return lambda x: jnp.sum(f(x) * jnp.arange(1.0, 4.0))


TRANSFORMS = {
    "grad": lambda f: jax.grad(total(f)),
    "grad of grad": lambda f: jax.grad(lambda x: jnp.sum(jax.grad(total(f))(x) ** 2)),
    "vjp": lambda f: lambda x: jax.vjp(f, x)[1](x)[0],
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,))[1],
    "vmap(grad)": lambda f: lambda x: jax.vmap(jax.grad(total(f)))(jnp.stack([x, -x])),
    "grad(vmap)": lambda f: jax.grad(lambda x: jnp.sum(jax.vmap(f)(jnp.stack([x, -x])) ** 2)),
    "jacrev": jax.jacrev,
    "jacfwd": jax.jacfwd,
    "hessian": lambda f: jax.hessian(total(f)),
    "jit(grad)": lambda f: jax.jit(jax.grad(total(f))),
    "grad(jit)": lambda f: jax.grad(jax.jit(total(f))),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(total(f))),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](x),
}


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
