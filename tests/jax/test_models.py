"""Models of Flax, Equinox and Haiku, unedited, under a rule that cannot be overlooked."""

from __future__ import annotations

import warnings

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import regrad as rg
from tests.helpers.children import run_children
from tests.helpers.optional import ABSENT
from tests.helpers.paths import ROOT

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (4, 3)) + 0.5
RULES = {"Relu": lambda dy, x: dy * (x + 1000)}


@jax.custom_jvp
def relu(x):
    return jnp.maximum(x, 0)


relu.defjvps(lambda dx, y, x: dx * (x + 1000))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(5)(x))
        return nn.Dense(2)(x)


class LinenLoop(nn.Module):
    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return nn.relu(nn.Dense(3)(x)), None

        loop = nn.scan(
            nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=2
        )
        return loop()(x, None)[0]


class NNX(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 5, rngs=rngs)
        self.norm = nnx.BatchNorm(5, rngs=rngs)
        self.last = nnx.Linear(5, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(self.norm(nnx.relu(self.first(x))))


def mlp(x, w1, b1, w2, b2):
    return relu(x @ w1 + b1) @ w2 + b2


def loss(y):
    return jnp.sum(y * y)


def compare(got, due):
    for a, b in zip(got, due, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-3)
    assert max(np.abs(a).max() for a in got) > 100


def test_linen():
    model = Linen()
    p = model.init(KEY, X)
    ours = rg.jax.override(model.apply, RULES)

    def weights(p):
        return [p["params"][f"Dense_{i}"][k] for i in (0, 1) for k in ("kernel", "bias")]

    due = jax.grad(lambda ws: loss(mlp(X, *ws)))(weights(p))
    compare(weights(jax.grad(lambda p: loss(ours(p, X)))(p)), due)
    compare(weights(jax.jit(jax.grad(lambda p: loss(ours(p, X))))(p)), due)
    np.testing.assert_array_equal(ours(p, X), model.apply(p, X))
    assert "test_models.py" in ours.hits[0].where


def test_linen_scan_and_remat():
    model = LinenLoop()
    p = model.init(KEY, X)
    ours = rg.jax.override(model.apply, RULES)
    (inner,) = p["params"].values()
    (dense,) = inner.values()

    def by_hand(kernel, bias):
        x = X
        for w, b in zip(kernel, bias, strict=True):
            x = relu(x @ w + b)
        return loss(x)

    due = jax.grad(by_hand, (0, 1))(dense["kernel"], dense["bias"])
    g = jax.tree_util.tree_leaves(jax.grad(lambda p: loss(ours(p, X)))(p))
    compare(g[::-1], due)


@pytest.mark.filterwarnings("ignore:scatter inputs:FutureWarning")  # nnx's, in double precision
def test_nnx_and_its_state():
    model, same = NNX(nnx.Rngs(0)), NNX(nnx.Rngs(0))
    plain = lambda model, x: loss(model(x) + x[:, :2])  # noqa: E731
    ours = rg.jax.override(plain, RULES)
    g = nnx.grad(ours)(model, X)
    ours.assert_fired("Relu")
    nnx.grad(plain)(same, X)
    np.testing.assert_allclose(model.norm.mean[...], same.norm.mean[...], rtol=1e-6)
    assert np.abs(model.norm.mean[...]).max() > 0  # the call has moved it, as the model's own does

    def by_hand(kernel, bias):
        first = relu(X @ kernel + bias)
        scaled = (first - first.mean(0)) / jnp.sqrt(first.var(0) + model.norm.epsilon)
        y = scaled * model.norm.scale[...] + model.norm.bias[...]
        return loss(y @ model.last.kernel[...] + model.last.bias[...] + X[:, :2])

    due = jax.grad(by_hand, (0, 1))(model.first.kernel[...], model.first.bias[...])
    got = g["first"]["kernel"][...], g["first"]["bias"][...]
    for a, b in zip(got, due, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)


@pytest.mark.filterwarnings("ignore:scatter inputs:FutureWarning")  # nnx's, in double precision
def test_nnx_called_compiled_and_closed_over():
    model, same = NNX(nnx.Rngs(0)), NNX(nnx.Rngs(0))
    np.testing.assert_allclose(rg.jax.override(model, RULES)(X), same(X), rtol=1e-12)

    @nnx.jit
    def step(model, x):
        ours = rg.jax.override(lambda model, x: loss(model(x)), RULES)
        return nnx.grad(ours)(model, x)["last"]["bias"][...]

    first = model.norm.mean[...]
    step(model, X)
    assert not np.array_equal(model.norm.mean[...], first)
    with pytest.raises(Exception, match=r"[Tt]race"):  # nnx's own words: no silent loss of state
        rg.jax.override(lambda x: model(x), RULES)(X)
    model.eval()
    ours = rg.jax.override(lambda x: loss(model(x)), RULES)
    assert np.abs(jax.grad(ours)(X)).max() > 100
    ours.assert_fired()


def test_equinox():
    model = eqx.nn.MLP(3, 2, 5, 1, key=KEY)
    ours = rg.jax.override(lambda model, x: loss(jax.vmap(model)(x)), RULES)

    def weights(model):
        return [w for layer in model.layers for w in (layer.weight.T, layer.bias)]

    due = jax.grad(lambda ws: loss(mlp(X, *ws)))(weights(model))
    compare(weights(eqx.filter_grad(ours)(model, X)), due)
    compare(weights(eqx.filter_jit(eqx.filter_grad(ours))(model, X)), due)
    single = rg.jax.override(model, RULES)
    due = jax.grad(lambda x: loss(mlp(x, *weights(model))))(X)
    compare([jax.grad(lambda x: loss(jax.vmap(single)(x)))(X)], [due])


def test_equinox_with_state():
    layers = [eqx.nn.Linear(3, 5, key=KEY), eqx.nn.BatchNorm(5, axis_name="b", mode="batch")]
    model, state = eqx.nn.make_with_state(eqx.nn.Sequential)([*layers, eqx.nn.Lambda(jax.nn.relu)])

    def run(model, state, x):
        y, state = jax.vmap(
            model, axis_name="b", in_axes=(0, None), out_axes=(0, None)
        )(x, state)  # fmt: skip
        return loss(y), state

    ours = rg.jax.override(run, RULES)
    (value, after), g = eqx.filter_value_and_grad(ours, has_aux=True)(model, state, X)
    (due, due_after), plain = eqx.filter_value_and_grad(run, has_aux=True)(model, state, X)
    assert value == due
    leaves = jax.tree_util.tree_leaves
    compare_states = zip(leaves(after), leaves(due_after), strict=True)
    assert all(np.array_equal(a, b) for a, b in compare_states)
    ours.assert_fired()
    assert not np.allclose(g.layers[1].weight, plain.layers[1].weight)


def test_haiku():
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([5, 2])(x)))
    p = model.init(KEY, X)
    ours = rg.jax.override(model.apply, RULES)

    def weights(p):
        return [p[f"mlp/~/linear_{i}"][k] for i in (0, 1) for k in ("w", "b")]

    due = jax.grad(lambda ws: loss(mlp(X, *ws)))(weights(p))
    compare(weights(jax.grad(lambda p: loss(ours(p, X)))(p)), due)


def test_these_tests_can_fail():
    model = Linen()
    p = model.init(KEY, X)
    g = jax.tree_util.tree_leaves(jax.grad(lambda p: loss(model.apply(p, X)))(p))
    with pytest.raises(AssertionError):
        compare(g, g)


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
    "nested": (
        lambda f: lambda given, x: f(*given[1]["of"], x),
        lambda given: ((0, {"of": [*given]}),),
    ),
    "nnx.Dict": (
        lambda f: lambda given, x: f(*given["of"], x),
        lambda given: (nnx.Dict(of=nnx.List(given)),),
    ),
}


def plain(x):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def state(given):
    return [*map(plain, jax.tree.leaves(nnx.state(list(given))))]


@pytest.mark.filterwarnings("ignore:scatter inputs:FutureWarning")  # nnx's, in double precision
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CHANGED)
def test_objects_of_nnx_change_as_they_do_outside(name, way):
    make, f = CHANGED[name]
    wrap, hand_over = WAYS[way]
    ours = rg.jax.override(wrap(f), {"Exp": lambda dy: dy})
    given, same = make(), make()
    first = state(given)
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", rg.errors.UnusedOverrideWarning)
            got = ours(*hand_over(given), X)
        np.testing.assert_allclose(got, f(*same, X), rtol=1e-6)
        for a, b in zip(state(given), state(same), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
    moved = zip(first, state(given), strict=True)
    assert any(not np.array_equal(a, b) for a, b in moved)


def test_an_object_of_nnx_that_is_returned_is_the_one_given():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    ours = rg.jax.override(lambda m, x: {"model": m, "y": jnp.tanh(m(x))}, {"Tanh": "Tanh"})
    assert ours(model, X)["model"] is model


@pytest.mark.versions
@pytest.mark.skipif("keras" in ABSENT, reason="needs keras")
def test_a_model_of_keras(tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))  # where it writes its settings
    (report,) = run_children(ROOT / "tests/helpers/keras_checks.py", tmp_path, [])
    assert [*report] == ["jax_fit_of_an_overridden_loss"]
