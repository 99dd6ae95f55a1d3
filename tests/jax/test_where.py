"""Rules in one place of a JAX program, against models that have the factor written into them.

And rules for whole calls of modules.
"""

from __future__ import annotations

import warnings

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import regrad as rg
from regrad.errors import ArgumentError, GradientError, RuleError, UnusedOverrideWarning
from tests.helpers import jax_networks as nets
from tests.helpers.jax_networks import (
    EqxBlock,
    EqxNet,
    NnxBlock,
    X,
    bent,
    close,
    eqx_loss,
    loss,
    times7,
)
from tests.helpers.rows import refused

override = rg.jax.override
HEAD = {rg.at("head", "Tanh"): times7}


class Case:
    """A library: a model, its loss as a function of something and X, how to differentiate it."""

    def __init__(self, make, f, argument, grad=jax.grad):
        self.make, self.f, self.argument, self.grad = make, f, argument, grad

    def slopes(self, key, at=None, wrap=lambda f: f, **options):
        """The gradients under an override, or (`at`) of the model with the factor in it."""
        model = self.make(at or nets.NONE)
        f = wrap(self.f(model))
        if at is None:
            f = override(f, {key: times7}, **{"model": model} | options)
        slopes = jax.tree.leaves(self.grad(f)(self.argument(model), X))
        if at is None:
            f.assert_fired()
        return slopes


def twice(model):
    return jax.tree.map(lambda a: 2 * a, model)


CASES = {
    "Equinox": Case(EqxNet, lambda m: eqx_loss, lambda m: m),
    "Equinox, closed over": Case(EqxNet, lambda m: lambda x, _: eqx_loss(m, x), lambda m: X),
    "Equinox, updated": Case(EqxNet, lambda m: eqx_loss, twice),
    "NNX": Case(nets.NnxNet, lambda m: nets.loss, lambda m: m, nnx.grad),
    "NNX, closed over": Case(nets.NnxNet, lambda m: lambda x, _: nets.loss(m, x), lambda m: X),
    "Linen": Case(nets.LinenNet, nets.linen_loss, lambda m: nets.PARAMS),
}  # fmt: skip
LIBRARIES = {"Equinox": (EqxBlock, EqxNet), "NNX": (NnxBlock, nets.NnxNet),
             "Linen": (nets.LinenBlock, nets.LinenNet)}  # fmt: skip
WHERES = {  # the place of a key, what follows it, and the calls of tanh that it selects
    "path": ("layers.1", {}, {"layers.1"}),
    "pattern": ("layers.*", {}, {"layers.0", "layers.1"}),
    "root": ("", {}, {*nets.SITES}),
    "class": (0, {}, {*nets.SITES[:3]}),
    "class around": (1, {}, {*nets.SITES}),
    "predicate": (lambda site: site.path == "head", {}, {"head"}),
    "class in a predicate": (lambda site: site.module_class in CLASSES, {}, {*nets.SITES[:3]}),
    "nth": (None, {"nth": 3}, {""}),
    "nth of a path": ("layers.*", {"nth": 1}, {"layers.1"}),
    "tuple": (("head", "layers.0"), {"what": ("Tanh", "Sin")}, {"head", "layers.0"}),
}
CLASSES = (EqxBlock, NnxBlock, nets.LinenBlock)


def linen_names(where):
    """Linen calls `layers[0]` `layers_0`."""
    if isinstance(where, tuple):
        return tuple(map(linen_names, where))
    return where.replace("layers.", "layers_") if isinstance(where, str) else where


def check(case, where, **options):
    place, counted, sites = WHERES[where]
    if isinstance(place, int):
        place = LIBRARIES[case.split(",")[0]][place]
    place = linen_names(place) if case == "Linen" else place
    key = rg.at(place, **{"what": "Tanh"} | counted)
    found = CASES[case].slopes(key, **options)
    options.pop("model", None)
    close(found, CASES[case].slopes(key, frozenset(sites), **options))
    none = CASES[case].slopes(key, frozenset({"nowhere"}), **options)
    assert any(not np.allclose(a, b, rtol=1e-3) for a, b in zip(found, none, strict=True))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("where", WHERES)
def test_a_rule_holds_in_its_place_and_nowhere_else(case, where):
    check(case, where)


WRAPS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": lambda f: lambda m, x: jnp.sum(jax.vmap(lambda x: f(m, x[None]))(x)),
    "cond": lambda f: lambda m, x: jax.lax.cond(jnp.sum(x) > -99, f, lambda m, x: 0.0, m, x),
    "nnx.jit": nnx.jit,
    "nnx.remat": nnx.remat,
    "filter_jit": eqx.filter_jit,
    "filter_vmap": lambda f: lambda m, x: jnp.sum(eqx.filter_vmap(lambda x: f(m, x[None]))(x)),
}
THROUGH = [(c, w) for c in ("Equinox", "Linen") for w in ("jit", "checkpoint", "vmap", "cond")]
THROUGH += [("NNX", "nnx.jit"), ("NNX", "nnx.remat")]
WITHOUT = [*THROUGH, *[(c, "plain") for c in CASES], ("Equinox", "filter_jit")]
WITHOUT += [("Equinox", "filter_vmap")]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("where", ["path", "predicate", "class"])
@pytest.mark.parametrize(("case", "wrap"), THROUGH)
def test_through_transformations(case, wrap, where):
    check(case, where, wrap=WRAPS[wrap])


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("where", ["class", "class around", "class in a predicate"])
@pytest.mark.parametrize(("case", "wrap"), WITHOUT)
def test_a_class_is_known_without_the_model(case, wrap, where):
    check(case, where, wrap=WRAPS[wrap], model=None)


class Heir(NnxBlock):
    def __call__(self, x):
        return super().__call__(x)


@pytest.mark.slow
def test_classes_without_the_model():
    calls = {kind: vars(kind)["__call__"] for kind in (NnxBlock, Heir, EqxBlock, nnx.Linear)}
    net, rules = Heir(nnx.Rngs(0)), {rg.at(NnxBlock, "Tanh"): times7}
    ours = override(lambda x: net(x), rules)
    close(jax.jacrev(ours)(X), 7 * jax.jacrev(net)(X))
    assert all(vars(kind)["__call__"] is call for kind, call in calls.items())
    with pytest.raises(ArgumentError, match="no module of the model is of that class"):
        override(lambda x: net(x), {rg.at(EqxBlock, "Tanh"): times7})(X)
    paths = [step.path for step in rg.jax.trace_gradients(ours)(X).steps if step.op_type == "tanh"]
    assert paths == ["Heir"]


def test_scopes_and_classes_in_one_map():
    net = nets.NnxNet()

    def f(x):
        with jax.named_scope("tail"):
            y = jnp.tanh(x)
        return net(x) + 10 * y

    rules = {rg.at("tail", "Tanh"): lambda dy, y: 3 * dy * (1 - y * y),
             rg.at(lambda site: site.module_class is NnxBlock, "Tanh"): times7}  # fmt: skip
    by_hand, total = nets.NnxNet({*nets.SITES[:3]}), lambda f: jax.grad(lambda x: f(x).sum())(X)
    close(total(override(f, rules)), total(by_hand) + 30 * (1 - jnp.tanh(X) ** 2))
    ours = override(net, {rg.at("head", "Tanh"): times7}, model=net)
    steps = [step for step in rg.jax.trace_gradients(ours)(X).steps if step.op_type == "tanh"]
    assert sorted(step.path for step in steps) == ["", "head", "layers.0", "layers.1"]


def test_a_function_with_a_derivative_of_its_own():
    def whole(params, x):
        return nets.linen_loss(nets.LinenNet())(params, x)

    f = jax.custom_vjp(whole)  # `open` ignores its derivative
    f.defvjp(lambda *xs: (f(*xs), xs), lambda xs, dy: jax.tree.map(jnp.zeros_like, xs))
    ours = override(f, HEAD, model=nets.LinenNet(), open=["whole"])
    close(jax.grad(ours)(nets.PARAMS, X), CASES["Linen"].slopes(None, {"head"}))
    with pytest.raises(rg.errors.PassedOverError, match="has a custom derivative"):
        override(f, HEAD, model=nets.LinenNet())(nets.PARAMS, X)


@eqx.filter_jit
def inner(m, x):
    return jax.vmap(m)(x)


def compiled_inside(m, x):
    return jnp.sum(inner(m, x) ** 2)


@pytest.mark.slow
def test_a_compiled_function_is_of_one_choice():
    """One model under selectors A, B, none, A, whose inner function JAX remembers."""
    net = EqxNet()
    jax.grad(compiled_inside)(net, X)
    for sites in (("layers.0",), ("head",), (), ("layers.0",), ("head", "layers.1")):
        rules = {rg.at(site, "Tanh"): times7 for site in sites}
        ours = override(compiled_inside, rules, model=net) if sites else compiled_inside
        expected = CASES["Equinox"].slopes(None, frozenset({*sites, "nowhere"}))
        close(jax.grad(ours)(net, X), expected)
        close(eqx.filter_grad(lambda m, ours=ours: jax.jit(ours)(m, X))(net), expected)


# -- loops over layers -----------------------------------------------------------------------------


class EqxLoop(eqx.Module):
    layers: EqxBlock

    def __init__(self):
        make = lambda key: EqxBlock(eqx.nn.Linear(4, 4, key=key), nets.PLAIN)  # noqa: E731
        self.layers = eqx.filter_vmap(make)(jax.random.split(nets.KEY, 3))

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


@pytest.mark.slow
def test_a_scan_over_layers_has_one_path():
    net, linen = EqxLoop(), LinenLoop()
    for f, given, model in (
        (eqx_loss, net, net), (nets.linen_loss(linen), linen.init(nets.KEY, X), linen),
    ):  # fmt: skip
        ours = override(f, {rg.at("layers", "Tanh"): times7}, model=model)
        close(jax.grad(ours)(given, X), jax.grad(override(f, {"Tanh": times7}))(given, X))
        assert [(hit.path, hit.count) for hit in ours.hits] == [("layers", 1)]
        counted = override(f, {rg.at("layers", "Tanh", nth=1): times7}, model=model)
        with pytest.raises(GradientError, match="is impossible in the body of a scan"):
            counted(given, X)


# -- what cannot be told ---------------------------------------------------------------------------


def test_copies_that_keys_distinguish_are_refused():
    net, x = EqxNet(), X[0]

    def f(net, x):
        for layer in net.layers:
            x = eqx.filter_checkpoint(layer)(x)
        return jnp.sum(net.head(x))

    with pytest.raises(ArgumentError, match="names no module"):
        override(f, {rg.at("layers.2", "Tanh"): times7}, model=net)
    one = override(f, {rg.at("layers.1", "Tanh"): times7}, model=net)
    refused(lambda: one(net, x), GradientError, r"whether it is 'layers\.0' or 'layers\.1'")
    every = override(f, {rg.at(EqxBlock, "Tanh"): times7}, model=net)
    close(jax.grad(every)(net, x), jax.grad(override(f, {"Tanh": times7}))(net, x))


def with_factor(net):
    """The same net with the factor in its head."""
    return jax.tree.unflatten(jax.tree.structure(EqxNet({"head"})), jax.tree.leaves(net))


@pytest.mark.slow
def test_two_models_of_one_kind_are_distinguished_or_refused():
    student, teacher = EqxNet(), jax.tree.map(lambda a: a + 0.1, EqxNet())

    def f(student, teacher, x):
        return jnp.sum((jax.vmap(student)(x) - jax.vmap(teacher)(x)) ** 2)

    with pytest.raises(GradientError, match="2 arguments match model="):
        jax.grad(override(f, HEAD, model=student))(student, teacher, X)
    arrays, form = jax.tree.flatten(teacher)
    merged = override(lambda m, a, x: f(m, form.unflatten(a), x), HEAD, model=student)
    with pytest.raises(GradientError, match=r"calls two modules that match '' of model="):
        jax.grad(merged)(student, arrays, X)
    for call in (lambda x: jax.vmap(teacher)(x), lambda x: inner(teacher, x)):
        one = lambda m, x, call=call: jnp.sum((jax.vmap(m)(x) - call(x)) ** 2)  # noqa: E731
        by_hand = lambda m, x, one=one: one(with_factor(m), x)  # noqa: E731
        found = jax.grad(override(one, HEAD, model=student))(student, X)
        close(found, jax.grad(by_hand)(student, X))


@pytest.mark.slow
def test_a_copy_in_another_precision_is_the_model():
    def f(net, x):
        return eqx_loss(jax.tree.map(lambda a: a.astype("float16").astype("float32"), net), x)

    net = EqxNet()
    found = jax.grad(override(f, HEAD, model=net))(net, X)
    close(found, jax.grad(f)(EqxNet({"head"}), X))


def test_modules_under_nn_jit_are_refused():
    compiled = nn.jit(nets.LinenBlock)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return compiled(name="b")(compiled(name="a")(x))

    params = Net().init(nets.KEY, X)
    for model, path in ((Net(), "b"), (None, "Net.b")):
        ours = override(nets.linen_loss(Net()), {rg.at(path, "Tanh"): times7}, model=model)
        with pytest.raises(GradientError, match=r"under Flax's nn\.jit"):
            ours(params, X)


def test_a_model_is_a_module_and_whole_calls_need_one():
    with pytest.raises(ArgumentError, match=r"expected model= to be a module of Flax"):
        override(nets.loss, {"Tanh": times7}, model=lambda x: x)
    with pytest.raises(ArgumentError, match="whole calls as one op"):
        override(nets.loss, {rg.at("head"): times7})


class Pair(nnx.Module):
    def __init__(self):
        self.a, self.b = NnxBlock(nnx.Rngs(0)), NnxBlock(nnx.Rngs(0))

    def __call__(self, x):
        return self.a(x) + jnp.tanh(self.b.lin(x))  # (b is not called, but what is in it)


def test_modules_that_never_ran_are_named():
    net = Pair()
    ours = override(nets.loss, {rg.at("*", "Tanh"): times7}, model=net)
    with pytest.warns(UnusedOverrideWarning, match=r"names 'b', which was never called"):
        nnx.grad(ours)(net, X)
    refused(lambda: ours.assert_fired(), rg.errors.NotFiredError, "names 'b'")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nnx.grad(ours)(net, X)  # it was told


class Fails(eqx.Module):
    def __call__(self, x):
        raise KeyError


def test_classes_are_as_they_were():
    before = vars(Fails)["__call__"], vars(EqxBlock)["__call__"]
    with pytest.raises(KeyError):
        override(lambda m, x: m(x), {rg.at("", "Tanh"): times7}, model=Fails())(Fails(), X)
    check("Equinox", "path")
    assert before == (vars(Fails)["__call__"], vars(EqxBlock)["__call__"])


def test_linen_without_a_model_has_the_names_of_its_program():
    f = nets.linen_loss(nets.LinenNet())
    with pytest.raises(ArgumentError, match=r"mean 'LinenNet\.layers_0'"):
        override(f, {rg.at("layers_0", "Tanh"): times7})(nets.PARAMS, X)
    ours = override(f, {rg.at("LinenNet.layers_1", "Tanh"): times7})
    close(jax.grad(ours)(nets.PARAMS, X), CASES["Linen"].slopes(None, {"layers.1"}))


# -- whole calls of modules ------------------------------------------------------------------------

at, NET, ROW = rg.at, EqxNet(), X[0]


def arriving(dy, builtin):
    return builtin(bent(dy))


def leaving(dy, builtin):
    return bent(builtin(dy))


SELECTORS = {
    "path": (at("head"), {"head"}),
    "pattern": (at("layers.*"), {"layers.0", "layers.1"}),
    "class": (at(EqxBlock), {*nets.SITES[:3]}),
    "tuple": (at(("head", "layers.1")), {"head", "layers.1"}),
    "predicate": (at(lambda site: site.path == "layers.0"), {"layers.0"}),
    "first": (at(EqxBlock, nth=0), {"layers.0"}),
    "last": (at(EqxBlock, nth=-1), {"head"}),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("selector", SELECTORS)
def test_every_kind_of_place(selector):
    key, paths = SELECTORS[selector]
    ours = override(loss, {key: arriving}, model=NET)
    by_hand = EqxNet(paths, nets.BENT_ON_ARRIVAL)
    close(jax.grad(ours)(NET, ROW), jax.grad(loss)(by_hand, ROW))
    ours.assert_fired()
    assert {hit.path for hit in ours.hits} == paths
    close(jax.jit(jax.grad(ours))(NET, ROW), jax.grad(loss)(by_hand, ROW))
    rows = jax.vmap(jax.grad(ours), (None, 0))(NET, X)
    close(rows, jax.vmap(jax.grad(loss), (None, 0))(by_hand, X))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "change"), [(arriving, nets.BENT_ON_ARRIVAL), (leaving, nets.BENT_ON_LEAVING)]
)
def test_by_all_arguments_and_at_second_order(rule, change):
    ours = override(loss, {at("head"): rule}, model=NET)
    by_hand = EqxNet({"head"}, change)
    found, expected = (jax.grad(f, (0, 1))(m, ROW) for f, m in ((ours, NET), (loss, by_hand)))
    close(found, expected)

    def squares(f):
        return lambda net: sum(jnp.sum(dw**2) for dw in jax.tree.leaves(jax.grad(f)(net, ROW)))

    close(jax.grad(squares(ours))(NET), jax.grad(squares(loss))(by_hand))


@pytest.mark.slow
def test_nnx():
    net, by_hand = nets.NnxNet(), nets.NnxNet()
    by_hand.layers[1].change, by_hand.head.change = nets.BENT_ON_ARRIVAL, nets.REVERSED
    ours = override(loss, {at("layers.1"): arriving, at("head"): rg.rules.reverse()}, model=net)
    close(nnx.grad(ours)(net, X), nnx.grad(loss)(by_hand, X))
    ours.assert_fired()


class Power(eqx.Module):
    def __call__(self, x, *, power=2):
        return x**power


class Both(eqx.Module):
    block: EqxBlock
    act: Power

    def __call__(self, x):
        return self.act(self.block(x))


def test_a_module_without_parameters():
    net = Both(NET.head, Power())
    ours = override(loss, {at("act"): lambda dy, x: 7 * dy * x}, model=net)
    y, back = jax.vjp(net.block, ROW)
    close(jax.grad(ours, argnums=1)(net, ROW), back(7 * 2 * y**2 * y)[0])


def test_what_is_refused():
    for f, model in [(loss, None), (lambda p, x: x, linen.Dense(2))]:
        with pytest.raises(ArgumentError, match="Equinox or Flax's nnx leave a boundary"):
            override(f, {at("head"): arriving}, model=model)
    with pytest.raises(ArgumentError, match=r"rg.at\('head'\) in keep= is not a key"):
        override(loss, {at("layers.0"): arriving}, model=NET, keep=[at("head")])
    with pytest.raises(RuleError, match="did not call builtin, so the gradient of"):
        jax.grad(override(loss, {at("head"): lambda dy, x: x}, model=NET))(NET, ROW)
    ours = override(loss, {at("head"): arriving}, model=NET)
    refused(lambda: jax.jvp(lambda x: ours(NET, x), (ROW,), (ROW,)), GradientError, "not linear")


def test_keys_inside_are_passed_over():
    rules = {at("head"): arriving, "Tanh": lambda dy, y: dy * (1 - y**2)}
    with pytest.raises(rg.errors.PassedOverError, match="'Tanh' occurs inside of a call that has"):
        override(loss, rules, model=NET)(NET, ROW)
    ours = override(loss, rules, model=NET, keep=[at("head")])
    close(jax.grad(ours)(NET, ROW), jax.grad(loss)(EqxNet({"head"}, nets.BENT_ON_ARRIVAL), ROW))
    paths = {hit.path for hit in ours.hits if hit.op_type == "Tanh"}
    assert paths == {"layers.0", "layers.1", ""}


class Skips(eqx.Module):
    a: EqxBlock
    b: EqxBlock

    def __call__(self, x):
        return self.a(x)


def test_modules_that_never_run():
    net = Skips(NET.head, NET.layers[0])
    ours = override(loss, {at("*"): arriving}, model=net)
    with pytest.warns(rg.errors.UnusedOverrideWarning, match="names 'b', which was never called"):
        jax.grad(ours)(net, ROW)
    refused(lambda: ours.assert_fired(), rg.errors.NotFiredError, "'b'")


class Swapped(eqx.Module):
    def __call__(self, second, first):
        return 2 * second + 3 * first


def test_keywords_in_another_order_than_the_signature():
    pair = Swapped()
    called = lambda second, first: pair(first=first, second=second).sum()  # noqa: E731
    rules = {at(""): lambda dy, second, first: (5 * dy, 7 * dy)}
    found = jax.grad(override(called, rules, model=pair), (0, 1))(ROW, ROW)
    assert [dx.tolist() for dx in found] == [[5.0] * 4, [7.0] * 4]


class Product(eqx.Module):
    def __call__(self, q, k):
        return q * jnp.sin(k)


@pytest.mark.parametrize(("rule", "expected"), [
    (lambda dy, builtin: builtin(dy), jnp.sin(ROW) + ROW * jnp.cos(ROW)),
    (lambda dy, k: (5 * dy, dy * k), 5 + ROW),
])  # fmt: skip
def test_an_array_that_is_given_twice_is_two_arguments(rule, expected):
    net = Product()
    ours = override(lambda net, x: jnp.sum(net(x, x)), {at(""): rule}, model=net)
    close(jax.grad(ours, argnums=1)(net, ROW), expected)


def test_a_rule_that_learns_leaves_the_parameters_of_the_module_to_builtin():
    def rule(dy, builtin, gain):
        return builtin(dy), {"gain": jnp.sum(dy) * gain}

    def loss(given):
        net, gain = given
        rules = {at("head"): rg.rules.learns(rule, gain=gain)}
        return override(eqx_loss, rules, model=net)(net, X)

    dnet, dgain = eqx.filter_grad(loss)((NET, jnp.asarray(2.0)))
    close(dnet, eqx.filter_grad(eqx_loss)(NET, X))
    heads = jax.vmap(lambda x: NET.head(NET.layers[1](NET.layers[0](x))))(X)
    close(dgain, 2 * jnp.sum(jax.grad(lambda y: jnp.sum(NET.act(y) ** 2))(heads)))
