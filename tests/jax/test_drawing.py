"""`regrad.jax.draw`: the equations of a program, in their scopes, and whose rules they have."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen

import regrad as rg
from regrad.errors import ArgumentError
from tests.helpers.jax_model import own_vjp


def ends(drawing):
    return {(a.source, a.target) for a in drawing.arrows}


def kinds(drawing):
    return {b.name: b.kind for b in drawing.boxes}


def test_equations_and_arrows():
    found = rg.jax.draw(lambda x, y: jnp.sin(x) * y, 1.0, jnp.ones(3))
    assert [b.name for b in found.boxes] == ["args[0]", "args[1]", "sin", "mul"]
    assert ends(found) == {("args[0]", "sin"), ("sin", "mul"), ("args[1]", "mul")}
    assert found.boxes[1].lines == ("args[1]", f"{jnp.ones(3).dtype} 3")


@pytest.mark.slow
def test_parameters_lie_where_they_are_used():
    net = linen.Sequential([linen.Dense(4), linen.relu, linen.Dense(1)])
    params = net.init(jax.random.key(0), jnp.ones((1, 2)))
    found = rg.jax.draw(net.apply, params, jnp.ones((1, 2)))
    scopes = {b.name: b.scope for b in found.boxes}
    assert scopes["args[0]['params']['layers_0']['kernel']"] == ("Sequential", "layers_0")
    assert scopes["args[1]"] == ()
    assert any(b.scope == ("Sequential", "layers_2") for b in found.boxes)


def test_loops_branches_and_jitted_functions_are_scopes():
    def inner(x):
        return jnp.cos(x)

    def f(x):
        x, _ = jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=3)
        x = jax.lax.cond(x > 0, lambda x: jnp.exp(x), lambda x: x, x)
        return jax.jit(inner)(x)

    found = rg.jax.draw(f, 1.0)
    scopes = {b.name: b.scope for b in found.boxes}
    assert scopes["sin"] == ("scan",) and scopes["exp"] == ("cond",)
    assert scopes["cos"] == ("inner",)
    assert ("args[0]", "sin") in ends(found) and ("exp", "cos") in ends(found)


def test_rules_stand_out():
    clipped = own_vjp(lambda dy, x: (jnp.clip(dy, -1, 1),))(lambda x: x * 1.0)
    f = rg.jax.override(lambda x: clipped(jax.nn.relu(x)).sum(), {"Relu": rg.rules.guided_relu})
    found = rg.jax.draw(f, jnp.ones(3))
    assert sorted(kinds(found).values()) == ["custom", "input", "op", "override"]
    (box,) = [b for b in found.boxes if b.kind == "override"]
    assert "guided_relu" in box.details["rule"]


def test_the_gradient_on_request():
    found = rg.jax.draw(lambda x: jnp.sin(x).sum(), jnp.ones(3), gradients=True)
    assert "cos" in kinds(found) and "sin" in kinds(found)


def test_shapes_are_enough_and_bad_input_is_refused():
    found = rg.jax.draw(jnp.sin, jax.ShapeDtypeStruct((2, 3), jnp.float32))
    assert found.boxes[0].lines == ("args[0]", "float32 2×3")
    with pytest.raises(ArgumentError, match="must be a function"):
        rg.jax.draw(3)
