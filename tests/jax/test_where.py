"""Rules in one place of a JAX program, against models that have the factor written into them."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import regrad as rg
from regrad.errors import (
    ArgumentError,
    GradientError,
    NotFiredError,
    PassedOverError,
    UnusedOverrideWarning,
)

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (2, 4))


def times7(dy, y):
    return 7 * dy * (1 - y * y)


@jax.custom_jvp
def tanh7(x):
    return jnp.tanh(x)


tanh7.defjvps(lambda dx, y, x: 7 * dx * (1 - y * y))

TANH = jnp.tanh
SITES = ("layers.0", "layers.1", "head", "")  # of the four calls of tanh
NONE: frozenset[str] = frozenset()


def act(at, path):
    """The activation of a module: of the models with the factor in them, at these paths."""
    return tanh7 if path in at else TANH


class EqxBlock(eqx.Module):
    lin: eqx.nn.Linear
    act: Callable = eqx.field(static=True)

    def __init__(self, key, act):
        self.lin, self.act = eqx.nn.Linear(4, 4, key=key), act

    def __call__(self, x):
        return self.act(self.lin(x))


class EqxNet(eqx.Module):
    layers: list
    head: EqxBlock
    act: Callable = eqx.field(static=True)

    def __init__(self, at=NONE):
        keys = jax.random.split(KEY, 3)
        self.layers = [EqxBlock(keys[i], act(at, f"layers.{i}")) for i in (0, 1)]
        self.head, self.act = EqxBlock(keys[2], act(at, "head")), act(at, "")

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.act(self.head(x))


class NnxBlock(nnx.Module):
    def __init__(self, rngs, act):
        self.lin, self.act = nnx.Linear(4, 4, rngs=rngs), act

    def __call__(self, x):
        return self.act(self.lin(x))


class NnxNet(nnx.Module):
    def __init__(self, at=NONE):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([NnxBlock(rngs, act(at, f"layers.{i}")) for i in (0, 1)])
        self.head, self.act = NnxBlock(rngs, act(at, "head")), act(at, "")

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.act(self.head(x))


class LinenBlock(nn.Module):
    act: Callable

    @nn.compact
    def __call__(self, x):
        return self.act(nn.Dense(4)(x))


class LinenNet(nn.Module):
    at: frozenset = NONE

    def setup(self):
        self.layers = [LinenBlock(act(self.at, f"layers.{i}")) for i in (0, 1)]
        self.head = LinenBlock(act(self.at, "head"))

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return act(self.at, "")(self.head(x))


PARAMS = LinenNet().init(KEY, X)


def eqx_loss(model, x):
    return jnp.sum(jax.vmap(model)(x) ** 2)


def loss(model, x):
    return jnp.sum(model(x) ** 2)


def linen_loss(model):
    return lambda params, x: jnp.sum(model.apply(params, x) ** 2)


class Case:
    """A library: a model, its loss as a function of something and X, how to differentiate it."""

    def __init__(self, make, f, given, grad=jax.grad):
        self.make, self.f, self.given, self.grad = make, f, given, grad

    def slopes(self, key, at=None, wrap=lambda f: f, **options):
        """The gradients under an override, or (`at`) of the model with the factor in it."""
        model = self.make(at or NONE)
        f = wrap(self.f(model))
        if at is None:
            options.setdefault("model", model)
            f = rg.jax.override(f, {key: times7}, **options)
        slopes = jax.tree.leaves(self.grad(f)(self.given(model), X))
        if at is None:
            f.assert_fired()
        return slopes


CASES = {
    "Equinox": Case(EqxNet, lambda m: eqx_loss, lambda m: m),
    "Equinox, closed over": Case(
        EqxNet, lambda m: lambda x, _: jnp.sum(jax.vmap(m)(x) ** 2), lambda m: X
    ),
    "Equinox, updated": Case(
        EqxNet, lambda m: eqx_loss, lambda m: jax.tree.map(lambda a: 2 * a, m)
    ),
    "NNX": Case(NnxNet, lambda m: loss, lambda m: m, nnx.grad),
    "NNX, closed over": Case(NnxNet, lambda m: lambda x, _: loss(m, x), lambda m: X),
    "Linen": Case(LinenNet, linen_loss, lambda m: PARAMS),
}
WHERES = {
    "path": (rg.at("layers.1", "Tanh"), {"layers.1"}),
    "pattern": (rg.at("layers.*", "Tanh"), {"layers.0", "layers.1"}),
    "root": (rg.at("", "Tanh"), {*SITES}),
    "class": (rg.at((EqxBlock, NnxBlock, LinenBlock), "Tanh"), {*SITES[:3]}),
    "predicate": (rg.at(lambda site: site.path == "head", "Tanh"), {"head"}),
    "nth": (rg.at(what="Tanh", nth=3), {""}),
    "nth of a path": (rg.at("layers.*", "Tanh", nth=1), {"layers.1"}),
    "tuple": (rg.at(("head", "layers.0"), ("Tanh", "Sin")), {"head", "layers.0"}),
}


def linen_names(key):
    """The same key for Linen, which calls `layers[0]` `layers_0`."""
    where = (
        eval(repr(key.where).replace("layers.", "layers_")) if "layers" in repr(key) else key.where
    )
    return rg.at(where, key.what, key.nth)


def check(case, where, **options):
    key, sites = WHERES[where]
    own = {"Equinox": EqxBlock, "NNX": NnxBlock, "Linen": LinenBlock}[case.split(",")[0]]
    key = rg.at(own, "Tanh") if where == "class" else key
    key = linen_names(key) if case == "Linen" else key
    found = CASES[case].slopes(key, **options)
    options.pop("open", None)
    expected = CASES[case].slopes(key, frozenset(sites), **options)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    none = CASES[case].slopes(key, frozenset({"nowhere"}), **options)
    assert any(not np.allclose(a, b, rtol=1e-3) for a, b in zip(found, none, strict=True))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("where", WHERES)
def test_a_rule_holds_in_its_place_and_nowhere_else(case, where):
    check(case, where)


WRAPS = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": lambda f: lambda m, x: jnp.sum(jax.vmap(lambda x: f(m, x[None]))(x)),
    "cond": lambda f: lambda m, x: jax.lax.cond(jnp.sum(x) > -99, f, lambda m, x: 0.0, m, x),
}


def _custom(f):
    """f with a derivative of its own, which `open` has us ignore."""
    g = jax.custom_vjp(f)
    g.defvjp(lambda *xs: (f(*xs), xs), lambda xs, dy: jax.tree.map(jnp.zeros_like, xs))
    return g


@pytest.mark.parametrize("where", ["path", "predicate", "class"])
@pytest.mark.parametrize("wrap", ["jit", "checkpoint", "vmap", "cond"])
@pytest.mark.parametrize("case", ["Equinox", "Linen"])
def test_through_transformations(case, where, wrap):
    check(case, where, wrap=WRAPS[wrap])


@pytest.mark.parametrize("way", [nnx.jit, nnx.remat])
@pytest.mark.parametrize("where", ["path", "pattern", "class"])
def test_through_transformations_of_nnx(way, where):
    check("NNX", where, wrap=way)


def test_a_function_with_a_derivative_of_its_own():
    def whole(params, x):
        return linen_loss(LinenNet())(params, x)

    f, rules = _custom(whole), {rg.at("head", "Tanh"): times7}
    ours = rg.jax.override(f, rules, model=LinenNet(), open=["whole"])
    expected = CASES["Linen"].slopes(None, frozenset({"head"}))
    for a, b in zip(jax.tree.leaves(jax.grad(ours)(PARAMS, X)), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    with pytest.raises(PassedOverError, match="has a derivative of its own"):
        rg.jax.override(f, rules, model=LinenNet())(PARAMS, X)


def test_a_compiled_function_is_of_one_choice():
    """One model under selectors A, B, none, A, whose inner function JAX remembers."""
    net = EqxNet()
    inner = eqx.filter_jit(lambda m, x: jax.vmap(m)(x))
    f = lambda m, x: jnp.sum(inner(m, x) ** 2)  # noqa: E731

    def slopes(*sites):
        rules = {rg.at(site, "Tanh"): times7 for site in sites}
        ours = jax.jit(rg.jax.override(f, rules, model=net)) if sites else f
        return jax.tree.leaves(eqx.filter_grad(lambda m: ours(m, X))(net))

    for sites in (("layers.0",), ("head",), (), ("layers.0",), ("head", "layers.1")):
        expected = CASES["Equinox"].slopes(None, frozenset({*sites, "nowhere"}))
        for a, b in zip(slopes(*sites), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


# -- loops over layers -----------------------------------------------------------------------------


class EqxLoop(eqx.Module):
    layers: EqxBlock

    def __init__(self):
        keys = jax.random.split(KEY, 3)
        self.layers = eqx.filter_vmap(lambda key: EqxBlock(key, TANH))(keys)

    def __call__(self, x):
        arrays, rest = eqx.partition(self.layers, eqx.is_array)
        return jax.lax.scan(lambda x, a: (eqx.combine(a, rest)(x), None), x, arrays)[0]


class LinenStep(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return jnp.tanh(nn.Dense(4)(x)), None


class LinenLoop(nn.Module):
    @nn.compact
    def __call__(self, x):
        options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}
        return nn.scan(nn.remat(LinenStep), **options)(name="layers")(x, None)[0]


def test_a_scan_over_layers_has_one_path():
    eqx_net, linen_net = EqxLoop(), LinenLoop()
    params = linen_net.init(KEY, X)
    for f, given, model in [
        (eqx_loss, eqx_net, eqx_net), (linen_loss(linen_net), params, linen_net),
    ]:  # fmt: skip
        ours = rg.jax.override(f, {rg.at("layers", "Tanh"): times7}, model=model)
        everywhere = rg.jax.override(f, {"Tanh": times7})
        for a, b in zip(
            jax.tree.leaves(jax.grad(ours)(given, X)),
            jax.tree.leaves(jax.grad(everywhere)(given, X)),
            strict=True,
        ):
            np.testing.assert_allclose(a, b, rtol=1e-5)
        assert [(hit.path, hit.count) for hit in ours.hits] == [("layers", 1)]
        counted = rg.jax.override(f, {rg.at("layers", "Tanh", nth=1): times7}, model=model)
        with pytest.raises(GradientError, match="cannot be done in the body of a scan"):
            counted(given, X)


# -- what cannot be told ---------------------------------------------------------------------------


def test_copies_that_keys_tell_apart_are_refused():
    net = EqxNet()

    def f(net, x):
        for layer in net.layers:
            x = eqx.filter_checkpoint(layer)(x)
        return jnp.sum(net.head(x))

    with pytest.raises(ArgumentError, match="names no module"):
        rg.jax.override(f, {rg.at("layers.2", "Tanh"): times7}, model=net)
    one = rg.jax.override(f, {rg.at("layers.1", "Tanh"): times7}, model=net)
    with pytest.raises(GradientError, match=r"whether it is 'layers\.0' or 'layers\.1'"):
        one(net, X[0])
    every = rg.jax.override(f, {rg.at(EqxBlock, "Tanh"): times7}, model=net)
    expected = jax.grad(rg.jax.override(f, {"Tanh": times7}))(net, X[0])
    found = jax.grad(every)(net, X[0])
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_two_models_of_one_kind_are_told_apart_or_refused():
    student, teacher = EqxNet(), jax.tree.map(lambda a: a + 0.1, EqxNet())

    def f(student, teacher, x):
        return jnp.sum((jax.vmap(student)(x) - jax.vmap(teacher)(x)) ** 2)

    rules = {rg.at("head", "Tanh"): times7}
    both = rg.jax.override(f, rules, model=student)
    with pytest.raises(GradientError, match="2 arguments are like model="):
        jax.grad(both)(student, teacher, X)
    arrays, form = jax.tree.flatten(teacher)
    merged = rg.jax.override(lambda m, a, x: f(m, form.unflatten(a), x), rules, model=student)
    with pytest.raises(GradientError, match=r"two modules are called that are like '' of model="):
        jax.grad(merged)(student, arrays, X)
    inner = eqx.filter_jit(lambda m, x: jax.vmap(m)(x))
    for call in (lambda x: jax.vmap(teacher)(x), lambda x: inner(teacher, x)):
        one = lambda m, x, call=call: jnp.sum((jax.vmap(m)(x) - call(x)) ** 2)  # noqa: E731
        ours = rg.jax.override(one, rules, model=student)
        by_hand = lambda m, x, call=call: jnp.sum(  # noqa: E731
            (jax.vmap(_with_factor(m))(x) - call(x)) ** 2
        )
        found, expected = jax.grad(ours)(student, X), jax.grad(by_hand)(student, X)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_a_copy_in_another_precision_is_the_model():
    def f(net, x):
        net = jax.tree.map(lambda a: a.astype("float16").astype("float32"), net)
        return eqx_loss(net, x)

    net = EqxNet()
    ours = rg.jax.override(f, {rg.at("head", "Tanh"): times7}, model=net)
    found, expected = jax.grad(ours)(net, X), jax.grad(f)(EqxNet({"head"}), X)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_a_program_that_jax_has_from_before_is_not_taken():
    net = EqxNet()
    inner = eqx.filter_jit(lambda m, x: jax.vmap(m)(x))
    f = lambda m, x: jnp.sum(inner(m, x) ** 2)  # noqa: E731
    jax.grad(f)(net, X)
    found = jax.grad(rg.jax.override(f, {rg.at("head", "Tanh"): times7}, model=net))(net, X)
    expected = CASES["Equinox"].slopes(None, frozenset({"head"}))
    for a, b in zip(jax.tree.leaves(found), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def _with_factor(net):
    """The same net with the factor in its head."""
    leaves = jax.tree.leaves(net)
    return jax.tree.unflatten(jax.tree.structure(EqxNet({"head"})), leaves)


def test_modules_under_nn_jit_are_refused():
    compiled = nn.jit(LinenBlock)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return compiled(TANH, name="b")(compiled(TANH, name="a")(x))

    params = Net().init(KEY, X)
    for model, path in ((Net(), "b"), (None, "Net.b")):
        ours = rg.jax.override(linen_loss(Net()), {rg.at(path, "Tanh"): times7}, model=model)
        with pytest.raises(GradientError, match=r"under nn\.jit of Flax's"):
            ours(params, X)


def test_a_model_is_a_module_and_whole_calls_need_one():
    with pytest.raises(ArgumentError, match=r"model= expected a module of Flax"):
        rg.jax.override(loss, {"Tanh": times7}, model=lambda x: x)
    with pytest.raises(ArgumentError, match="whole calls as one op"):
        rg.jax.override(loss, {rg.at("head"): times7})


def test_modules_that_never_ran_are_named():
    def f(net, x):
        return jnp.sum(net(x))

    class Net(nnx.Module):
        def __init__(self):
            self.a, self.b = NnxBlock(nnx.Rngs(0), TANH), NnxBlock(nnx.Rngs(0), TANH)

        def __call__(self, x):
            return self.a(x) + jnp.tanh(self.b.lin(x))  # (b is not called, but what is in it)

    net = Net()
    ours = rg.jax.override(f, {rg.at("*", "Tanh"): times7}, model=net)
    with pytest.warns(UnusedOverrideWarning, match=r"names 'b', which was never called"):
        nnx.grad(ours)(net, X)
    with pytest.raises(NotFiredError, match="names 'b'"):
        ours.assert_fired()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nnx.grad(ours)(net, X)  # it was told


def test_classes_are_as_they_were():
    class Fails(eqx.Module):
        def __call__(self, x):
            raise KeyError

    before = vars(Fails)["__call__"], vars(EqxBlock)["__call__"]
    ours = rg.jax.override(lambda m, x: m(x), {rg.at("", "Tanh"): times7}, model=Fails())
    with pytest.raises(KeyError):
        ours(Fails(), X)
    check("Equinox", "path")
    assert before == (vars(Fails)["__call__"], vars(EqxBlock)["__call__"])


# -- scopes, functions, reports --------------------------------------------------------------------


def one(x):
    return jnp.tanh(x)


def scoped(x):
    with jax.named_scope("a"):
        y = one(x)
    with jax.named_scope("b.c"):
        y = y + 3 * jnp.tanh(2 * x)
    return jnp.sum(y + jax.jit(one)(x / 2))


SLOPES = [1 - np.tanh(X) ** 2, 6 * (1 - np.tanh(2 * X) ** 2), (1 - np.tanh(X / 2) ** 2) / 2]


@pytest.mark.parametrize(
    "key, factors",
    [
        (rg.at("a", "Tanh"), [7, 1, 1]),
        (rg.at("b", "Tanh"), [1, 7, 1]),
        (rg.at("*.c", "Tanh"), [1, 7, 1]),
        (rg.at(one, "Tanh"), [7, 1, 7]),
        (rg.at(scoped, "Tanh"), [7, 7, 7]),
        (rg.at(what="tanh", nth=2), [1, 1, 7]),
        (rg.at(one, "Tanh", nth=1), [1, 1, 7]),
        (rg.at(lambda site: site.line == one.__code__.co_firstlineno + 1, "Tanh"), [7, 1, 7]),
    ],
)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_named_scopes_and_functions(key, factors, wrap):
    ours = rg.jax.override(wrap(scoped), {key: times7})
    expected = sum(k * slope for k, slope in zip(factors, SLOPES, strict=True))
    np.testing.assert_allclose(jax.grad(ours)(X), expected, rtol=1e-5)
    ours.assert_fired(key)
    np.testing.assert_allclose(ours(X), scoped(X), rtol=1e-6)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint, jax.vmap])
@pytest.mark.parametrize("place", ["a", "b"])
@pytest.mark.parametrize("op_type", ["Softmax", "LogSumExp", "Gelu", "Mean"])
def test_functions_without_a_boundary_in_one_of_two_places(op_type, place, wrap):
    """Those of the other place keep their derivative, and the rule holds at the second order."""
    name = {"LogSumExp": "logsumexp"}.get(op_type, op_type.lower())
    f = jnp.mean if op_type == "Mean" else getattr(jax.nn, name)

    def both(x):
        with jax.named_scope("a"):
            y = f(x)
        with jax.named_scope("b"):
            return jnp.sin(y * f(3 * x))

    @jax.custom_jvp
    def tripled(x):
        return f(x)

    tripled.defjvp(lambda xs, dxs: (tripled(*xs), 3 * jax.jvp(f, xs, dxs)[1]))

    def by_hand(x):
        first, second = (tripled if place == at else f for at in "ab")
        return jnp.sin(first(x) * second(3 * x))

    ours = rg.jax.override(wrap(both), {rg.at(place, op_type): lambda dy, builtin: 3 * builtin(dy)})
    slope, expected = (jax.grad(lambda x, g=g: jnp.sum(g(x))) for g in (ours, wrap(by_hand)))
    np.testing.assert_allclose(slope(X), expected(X), rtol=1e-4, atol=1e-5)
    second, expected = (jax.grad(lambda x, g=g: jnp.sum(g(x) ** 2)) for g in (slope, expected))
    np.testing.assert_allclose(second(X), expected(X), rtol=1e-4, atol=1e-5)
    assert {hit.path for hit in ours.hits} == {place}


def test_the_caller_of_a_compiled_function_is_that_of_each_call():
    """JAX remembers the program of `inner` with the code that ran when it was traced first."""
    inner = jax.jit(one)

    def f(x):
        return inner(x)

    ours = rg.jax.override(lambda x: jnp.sum(f(x) + 3 * inner(x)), {rg.at(_first, "Tanh"): times7})
    with pytest.raises(ArgumentError, match=r"at\(_first\)"):
        ours(X)
    ours = rg.jax.override(lambda x: jnp.sum(_first(inner, x) + 3 * inner(x)),
                           {rg.at(_first, "Tanh"): times7})  # fmt: skip
    np.testing.assert_allclose(jax.grad(ours)(X), 10 * SLOPES[0], rtol=1e-5)
    with pytest.raises(ArgumentError, match="closes over values"):
        rg.jax.override(f, {rg.at(f, "Tanh"): times7})


def _first(inner, x):
    return inner(x)


def test_haiku_names_count_as_they_are():
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([4, 4], activation=TANH)(x)))
    params = net.init(KEY, X)
    f = lambda p, x: jnp.sum(jnp.tanh(net.apply(p, x)))  # noqa: E731
    inside = rg.jax.override(f, {rg.at("mlp", "Tanh"): times7})
    y = net.apply(params, X)
    by_hand = lambda p, x: jnp.sum((1 - jnp.tanh(y) ** 2) * net7.apply(p, x))  # noqa: E731
    net7 = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([4, 4], activation=tanh7)(x)))
    found, expected = jax.grad(inside)(params, X), jax.grad(by_hand)(params, X)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    with pytest.raises(ArgumentError, match=r"at\('mpl'\) names no module.* Did you mean 'mlp'"):
        rg.jax.override(f, {rg.at("mpl", "Tanh"): times7})(params, X)


def test_linen_without_a_model_has_the_names_of_its_program():
    f = linen_loss(LinenNet())
    with pytest.raises(ArgumentError, match=r"mean 'LinenNet\.layers_0'"):
        rg.jax.override(f, {rg.at("layers_0", "Tanh"): times7})(PARAMS, X)
    ours = rg.jax.override(f, {rg.at("LinenNet.layers_1", "Tanh"): times7})
    expected = CASES["Linen"].slopes(None, frozenset({"layers.1"}))
    for a, b in zip(jax.tree.leaves(jax.grad(ours)(PARAMS, X)), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_ranks():
    rules = {
        "Tanh": rg.rules.optional(times7),
        rg.at("b", "Tanh"): rg.rules.optional(times7),
        rg.at("b.c", "Tanh"): lambda dy, y: times7(dy, y) * 11 / 7,
        rg.at(one, "Tanh"): lambda dy, y: times7(dy, y) * 13 / 7,
    }
    found = jax.grad(rg.jax.override(scoped, rules))(X)
    np.testing.assert_allclose(found, 13 * SLOPES[0] + 11 * SLOPES[1] + 13 * SLOPES[2], rtol=1e-5)
    clash = {rg.at("a", "Tanh"): times7, rg.at("[a]", "Tanh"): times7}
    with pytest.raises(ArgumentError, match="select the same place 'a'"):
        rg.jax.override(scoped, clash)(X)


def test_a_map_for_a_place_and_a_rule_that_asks_for_the_site():
    seen = []

    def rule(dy, y, site):
        seen.append((site.path, site.op_type, site.nth, site.shapes))
        return times7(dy, y)

    ours = rg.jax.override(scoped, {rg.at("b"): {"Tanh": rule}})
    np.testing.assert_allclose(jax.grad(ours)(X), SLOPES[0] + 7 * SLOPES[1] + SLOPES[2], rtol=1e-5)
    assert seen == [("b.c", "Tanh", 0, ((2, 4),))]
    everywhere = rg.jax.override(scoped, {"Tanh": rule})
    jax.grad(everywhere)(X)
    assert sorted(path for path, *_ in seen[1:]) == ["", "a", "b.c"]


def test_reports_show_the_path():
    ours = rg.jax.override(scoped, {rg.at(("a", "b"), "Tanh"): times7})
    jax.grad(ours)(X)
    assert [(hit.path, hit.count, hit.ran) for hit in ours.hits] == [("a", 1, 1), ("b.c", 1, 1)]
    assert ours.table().headings[0] == "module"
    idle = rg.jax.override(scoped, {rg.at("a", "Tanh"): times7, rg.at("a", "Sin"): times7})
    with pytest.warns(UnusedOverrideWarning, match=r"rg.at\('a', 'Sin'\) held for no op"):
        idle(X)
