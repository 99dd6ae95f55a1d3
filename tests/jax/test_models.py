"""Models of Flax and Equinox with a state, unedited, under a rule that cannot be overlooked.

`test_where.py` has models without one.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import regrad as rg
from tests.helpers.jax_model import own_slope
from tests.helpers.jax_networks import close

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (4, 3)) + 0.5
RULES = {"Relu": lambda dy, x: dy * (x + 1000)}


relu = own_slope(lambda x: x + 1000)(lambda x: jnp.maximum(x, 0))
in_double_precision = pytest.mark.filterwarnings("ignore:scatter inputs:FutureWarning")  # nnx's


class NNX(nnx.Module):
    def __init__(self, act=nnx.relu):
        rngs = nnx.Rngs(0)
        self.first, self.act = nnx.Linear(3, 5, rngs=rngs), act
        self.norm, self.last = nnx.BatchNorm(5, rngs=rngs), nnx.Linear(5, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(self.norm(self.act(self.first(x))))


def loss(model, x):
    return jnp.sum((model(x) + x[:, :2]) ** 2)


@pytest.mark.slow
@in_double_precision
def test_nnx_and_its_state():
    model, by_hand = NNX(), NNX(relu)
    ours = rg.jax.override(loss, RULES)
    found, expected = nnx.grad(ours)(model, X), nnx.grad(loss)(by_hand, X)
    ours.assert_fired("Relu")
    close(found, expected, 1e-4, 1e-3)
    assert np.abs(found["first"]["kernel"][...]).max() > 100
    close(model.norm.mean[...], by_hand.norm.mean[...])
    assert np.abs(model.norm.mean[...]).max() > 0  # the call has moved it, as the model's own does


@pytest.mark.slow
@in_double_precision
def test_nnx_called_compiled_and_closed_over():
    model = NNX()
    close(rg.jax.override(model, RULES)(X), NNX()(X))

    @nnx.jit
    def step(model, x):
        return nnx.grad(rg.jax.override(loss, RULES))(model, x)["last"]["bias"][...]

    first = model.norm.mean[...]
    step(model, X)
    assert not np.array_equal(model.norm.mean[...], first)
    with pytest.raises(Exception, match=r"[Tt]race"):  # nnx's own words: no silent loss of state
        rg.jax.override(lambda x: model(x), RULES)(X)
    model.eval()
    ours = rg.jax.override(lambda x: loss(model, x), RULES)
    assert np.abs(jax.grad(ours)(X)).max() > 100
    ours.assert_fired()


@pytest.mark.slow
def test_a_module_of_equinox_is_a_function():
    model, by_hand = (eqx.nn.MLP(3, 2, 5, 1, act, key=KEY) for act in (jax.nn.relu, relu))
    ours = rg.jax.override(model, RULES)
    found, expected = (jax.grad(lambda x, m=m: loss(jax.vmap(m), x))(X) for m in (ours, by_hand))
    close(found, expected)
    assert np.abs(found).max() > 100


@pytest.mark.slow
def test_equinox_with_state():
    layers = [eqx.nn.Linear(3, 5, key=KEY), eqx.nn.BatchNorm(5, axis_name="b", mode="batch")]
    model, state = eqx.nn.make_with_state(eqx.nn.Sequential)([*layers, eqx.nn.Lambda(jax.nn.relu)])

    def run(model, state, x):
        batched = jax.vmap(model, axis_name="b", in_axes=(0, None), out_axes=(0, None))
        y, state = batched(x, state)
        return jnp.sum(y * y), state

    ours = rg.jax.override(run, RULES)
    (found, g), (expected, plain) = (
        eqx.filter_value_and_grad(f, has_aux=True)(model, state, X) for f in (ours, run)
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    ours.assert_fired()
    assert not np.allclose(g.layers[1].weight, plain.layers[1].weight)


# -- objects of nnx that a call changes ------------------------------------------------------------


def average(metric, x):
    metric.update(values=jnp.tanh(x))
    return jnp.tanh(x).sum()


def trained(optimizer, model, x):
    loss = lambda model: jnp.tanh(model(x)).sum()  # noqa: E731
    optimizer.update(model, nnx.grad(loss)(model))
    return optimizer.step[...] + model(x).sum()


def doubled(variable, x):
    variable[...] = variable[...] * 2
    return jnp.tanh(variable[...] * x).sum()


def model_and_optimizer():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    return nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), model


CHANGED = {
    "Rngs": (lambda: (nnx.Rngs(0),), lambda rngs, x: jnp.sin(nnx.Dropout(0.5)(x, rngs=rngs))),
    "stream": (lambda: (nnx.Rngs(0).dropout,), lambda rng, x: jax.random.normal(rng(), x.shape)),
    "Metric": (lambda: (nnx.metrics.Average(),), average),
    "Optimizer": (model_and_optimizer, trained),
    "Variable": (lambda: (nnx.Param(jnp.ones(3)),), doubled),
    "Dropout": (lambda: (nnx.Dropout(0.5, rngs=nnx.Rngs(0)),), lambda drop, x: jnp.sin(drop(x))),
}
WAYS = {
    "alone": (lambda f: f, lambda given: given),
    "dict": (lambda f: lambda given, x: f(*given["all"], x), lambda given: ({"all": given},)),
    "nested": (lambda f: lambda given, x: f(*given[1]["of"], x),
               lambda given: ((0, {"of": [*given]}),)),
    "nnx.Dict": (lambda f: lambda given, x: f(*given["of"], x),
                 lambda given: (nnx.Dict(of=nnx.List(given)),)),
}  # fmt: skip


def plain(x):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def state(given):
    return [*map(plain, jax.tree.leaves(nnx.state(list(given))))]


@pytest.mark.slow
@in_double_precision
@pytest.mark.filterwarnings("ignore::regrad.errors.UnusedOverrideWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CHANGED)
def test_objects_of_nnx_change_as_they_do_outside(name, way):
    make, f = CHANGED[name]
    wrap, hand_over = WAYS[way]
    ours = rg.jax.override(wrap(f), {"Exp": lambda dy: dy})
    given, same = make(), make()
    first = state(given)
    for _ in range(3):
        close(ours(*hand_over(given), X), f(*same, X))
        close(state(given), state(same))
    moved = zip(first, state(given), strict=True)
    assert any(not np.array_equal(a, b) for a, b in moved)


@pytest.mark.slow
def test_an_object_of_nnx_that_is_returned_is_the_one_given():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    ours = rg.jax.override(lambda m, x: {"model": m, "y": jnp.tanh(m(x))}, {"Tanh": "Tanh"})
    assert ours(model, X)["model"] is model
