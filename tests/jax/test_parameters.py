"""Rules for parameters of JAX programs, against the rule applied by hand to the gradient."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import regrad as rg
from regrad.errors import (
    ArgumentError,
    GradientError,
    NotFiredError,
    RuleError,
    UnusedOverrideWarning,
)

at, override = rg.at, rg.jax.override
D = jnp.float64


@pytest.fixture(autouse=True)
def _wide():
    with jax.enable_x64(True):
        yield


def numbers(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def params():
    return {"enc": {"w": numbers(3, 3), "b": numbers(3, seed=1)}, "head": [numbers(3, 2, seed=2)]}


def data():
    return numbers(4, 3, seed=3)


def loss(p, x):
    for _ in range(2):
        x = jnp.tanh(x @ p["enc"]["w"] + p["enc"]["b"])
    return ((x @ p["head"][0]) ** 3).sum()


def clip(dy):
    return dy / (1 + jnp.sqrt((dy**2).sum()))


def check(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), found, expected)


WAYS = {
    "grad": jax.grad,
    "jit outside": lambda f: jax.jit(jax.grad(f)),
    "jit inside": lambda f: jax.grad(jax.jit(f)),
    "vjp": lambda f: lambda p, x: jax.vjp(f, p, x)[1](jnp.ones(()))[0],
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_rule_gets_the_sum(way):
    p = params()
    ours = override(loss, {at(parameter=("enc.w", "head.*")): clip}, model=p)
    found, expected = WAYS[way](ours)(p, data()), jax.grad(loss)(p, data())
    expected["enc"]["w"] = clip(expected["enc"]["w"])
    expected["head"][0] = clip(expected["head"][0])
    check(found, expected)
    ours.assert_fired()
    assert {hit.path for hit in ours.hits} == {"enc.w", "head.0"}
    assert ours(p, data()) == loss(p, data())


def test_common_rules():
    p, x = params(), data()
    plain = jax.grad(loss)(p, x)["head"][0]
    w = p["head"][0]
    rules = [
        (lambda dy: 0.1 * dy, plain / 10),
        (lambda dy, x: dy + 0.01 * x, plain + w / 100),
        (lambda dy, builtin: 3 * builtin(dy), 3 * plain),
        (lambda dy: rg.clip(dy, -1, 1), plain.clip(-1, 1)),
        (rg.rules.no_gradient, 0 * plain),
    ]
    for rule, expected in rules:
        for key in ("head.*", w):
            found = jax.grad(override(loss, {at(parameter=key): rule}, model=p))(p, x)
            np.testing.assert_allclose(found["head"][0], expected, rtol=1e-12)


def test_with_rules_for_ops():
    p, x = params(), data()
    tanh = {"Tanh": lambda dy, y: dy}
    ours = override(loss, {at(parameter="enc.w"): clip, **tanh}, model=p)
    expected = jax.grad(override(loss, tanh))(p, x)
    expected["enc"]["w"] = clip(expected["enc"]["w"])
    check(jax.grad(ours)(p, x), expected)
    ours.assert_fired()


@pytest.mark.parametrize("stacked", [True, False])
def test_scans(stacked):
    p = {"w": numbers(5, 3, 3) if stacked else numbers(3, 3)}

    def run(p, x):
        step = lambda h, w: (jnp.tanh(h @ (p["w"] if w is None else w)), None)  # noqa: E731
        return jax.lax.scan(step, x, p["w"] if stacked else None, length=5)[0].sum()

    ours = override(run, {at(parameter="w"): clip}, model=p)
    check(jax.grad(ours)(p, data())["w"], clip(jax.grad(run)(p, data())["w"]))


def bend(dy, x):
    return dy * jnp.sin(x) * jnp.sqrt((dy**2).sum())


def test_second_order():
    p, factors = {"w": jnp.array([0.3, 0.5, 0.7])}, jnp.arange(1.0, 4)
    f = lambda p: (p["w"] ** 3).sum() + p["w"].prod()  # noqa: E731
    ours = override(f, {at(parameter="w"): bend}, model=p, order=1)
    found = jax.grad(lambda p: (jax.grad(ours)(p)["w"] * factors).sum())(p)["w"]

    def gradient(w):
        return (bend(jax.grad(f)({"w": w})["w"], w) * factors).sum()

    steps = jnp.eye(3) * 1e-5
    expected = [(gradient(p["w"] + e) - gradient(p["w"] - e)) / 2e-5 for e in steps]
    np.testing.assert_allclose(found, expected, rtol=1e-8)

    @jax.custom_vjp
    def op(x):
        return x

    op.defvjp(lambda x: (op(x), x), lambda x, dy: (bend(dy, x),))
    ours = override(f, {at(parameter="w"): bend}, model=p)
    found = jax.grad(lambda p: (jax.grad(ours)(p)["w"] * factors).sum())(p)["w"]
    by_hand = jax.grad(lambda w: f({"w": op(w)}))
    expected = jax.grad(lambda w: (by_hand(w) * factors).sum())(p["w"])
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_gradients_of_examples():
    p, x = params(), data()[:, None]
    ours = override(loss, {at(parameter="enc.w"): clip}, model=p)
    found = jax.vmap(jax.grad(ours), (None, 0))(p, x)["enc"]["w"]
    each = jax.vmap(jax.grad(loss), (None, 0))(p, x)["enc"]["w"]
    np.testing.assert_allclose(found, jax.vmap(clip)(each), rtol=1e-12)


def test_equinox():
    net = eqx.nn.MLP(3, 2, 4, 2, key=jax.random.key(0), dtype=D)
    run = lambda net, x: (jax.vmap(net)(x) ** 2).sum()  # noqa: E731
    plain = eqx.filter_grad(run)(net, data())
    ours = override(run, {at(parameter="layers.*.weight"): clip}, model=net)
    for found in (eqx.filter_grad(ours), eqx.filter_jit(eqx.filter_grad(ours))):
        for a, b in zip(found(net, data()).layers, plain.layers, strict=True):
            np.testing.assert_allclose(a.weight, clip(b.weight), rtol=1e-12)
            np.testing.assert_allclose(a.bias, b.bias, rtol=1e-12)
    one = {
        at(parameter=net.layers[1].weight): clip,
        at("layers.0", "MatMul"): lambda dy, builtin: builtin(2 * dy),
    }
    ours = override(run, one, model=net)
    found = eqx.filter_grad(ours)(net, data())
    np.testing.assert_allclose(found.layers[1].weight, clip(plain.layers[1].weight))
    np.testing.assert_allclose(found.layers[0].weight, 2 * plain.layers[0].weight)
    ours.assert_fired()


class Shared(nnx.Module):
    def __init__(self):
        make = lambda: nnx.Linear(3, 3, rngs=nnx.Rngs(0), param_dtype=D)  # noqa: E731
        self.layers = nnx.List([make(), make()])
        self.last = self.layers[0]

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.last(x)


def test_nnx():
    net = Shared()
    run = lambda net, x: (net(x) ** 2).sum()  # noqa: E731
    plain = nnx.grad(run)(net, data())
    ours = override(run, {at(parameter="layers.*.kernel"): clip}, model=net)
    for way in (nnx.grad(ours), nnx.jit(nnx.grad(ours))):
        found = way(net, data())
        pairs = [(found["last"], plain["last"]), (found["layers"][1], plain["layers"][1])]
        for a, b in pairs:  # (the first layer is the last one, too)
            np.testing.assert_allclose(a["kernel"][...], clip(b["kernel"][...]), rtol=1e-12)
            np.testing.assert_allclose(a["bias"][...], b["bias"][...], rtol=1e-12)
    ours.assert_fired()
    ours = override(run, {at(parameter=net.layers[1].kernel): clip}, model=net)
    found, plain = nnx.grad(ours)(net, data())["layers"][1], plain["layers"][1]
    np.testing.assert_allclose(found["kernel"][...], clip(plain["kernel"][...]), rtol=1e-12)


def test_linen():
    net = linen.Dense(2, param_dtype=D)
    p = net.init(jax.random.key(0), data())
    run = lambda p, x: (net.apply(p, x) ** 2).sum()  # noqa: E731
    ours = override(run, {at(parameter="params.kernel"): clip}, model=p)
    found, plain = (jax.grad(f)(p, data())["params"] for f in (ours, run))
    np.testing.assert_allclose(found["kernel"], clip(plain["kernel"]), rtol=1e-12)
    np.testing.assert_allclose(found["bias"], plain["bias"], rtol=1e-12)


# -- overridden functions that call each other -----------------------------------------------------


def other(p, x):
    return jnp.sin(x @ p["enc"]["w"] - p["enc"]["b"]).sum()


def flip(dy):
    return -3 * dy


def both(inner):
    return lambda p, x: inner(p, x) + other(p, x)


def each(f):
    """The sum over examples, in a loop."""
    return lambda p, x: jax.lax.scan(lambda c, a: (c + f(p, a[None]), None), 0.0, x)[0]


NESTS = {
    "call": both,
    "jit": lambda inner: both(jax.jit(inner)),
    "in jit": lambda inner: jax.jit(both(inner)),
    "jit in jit": lambda inner: jax.jit(both(jax.jit(inner))),
    "checkpoint": lambda inner: jax.checkpoint(both(inner)),
    "scan": lambda inner: each(both(inner)),
    "vmap": lambda inner: lambda p, x: jax.vmap(both(inner), (None, 0))(p, x[:, None]).sum(),
    "cond": lambda inner: lambda p, x: jax.lax.cond(x[0, 0] > -9, both(inner), other, p, x),
}
# JAX 0.11 and later write a checkpoint in Python, and regrad cannot pass parameters into it.
IS_CLOSED = "hi_primitive" in str(jax.make_jaxpr(jax.checkpoint(jnp.sin))(1.0).eqns[0].primitive)
REVERSE = {"jit outside": jax.jit, "grad": lambda f: f}


@pytest.mark.parametrize("nest", [*NESTS])
@pytest.mark.parametrize("way", [*REVERSE])
def test_the_inner_override_wins(nest, way):
    """Inside, the parameter has the rule of the inner override; elsewhere the other rule."""
    p, x = params(), data()
    inner = override(loss, {at(parameter="enc.w"): flip}, model=p)
    ours = override(NESTS[nest](inner), {at(parameter="enc.*"): clip}, model=p)
    if nest == "checkpoint" and IS_CLOSED:
        with pytest.raises(GradientError, match="two overrides is inside"):
            ours(p, x)
        return
    inside, outside = (each(f) if nest in ("scan", "vmap") else f for f in (loss, other))
    a, b = jax.grad(inside)(p, x), jax.grad(outside)(p, x)
    found = REVERSE[way](jax.grad(ours))(p, x)
    expected = {"w": flip(a["enc"]["w"]) + clip(b["enc"]["w"])}
    expected["b"] = clip(a["enc"]["b"] + b["enc"]["b"])
    check(found, {"enc": expected, "head": a["head"]})
    ours.assert_fired()


def test_forward_mode_in_a_loop():
    """The transposed rules, in both programs of a `while`."""

    def loop(f):
        def run(p, x):
            step = lambda c: (c[0] + f(p, x) ** 2, c[1] + other(p, x), c[2] + 1)  # noqa: E731
            start = (jnp.zeros(()), jnp.zeros(()), 0)
            return sum(jax.lax.while_loop(lambda c: c[2] + 0 * f(p, x) < 2, step, start)[:2])

        return run

    p, x, five = params(), data(), lambda dy: 5 * dy
    inner = override(loss, {at(parameter="enc.w"): flip}, model=p)
    ours = override(loop(inner), {at(parameter="enc.w"): five}, model=p)
    dot = numbers(3, 3, seed=4)
    turn = lambda w: jax.jvp(lambda w: ours({**p, "enc": {**p["enc"], "w": w}}, x), (w,), (dot,))  # noqa: E731
    plain = lambda f: (jax.grad(f)(p, x)["enc"]["w"] * dot).sum()  # noqa: E731
    expected = 2 * (-3 * plain(lambda p, x: loss(p, x) ** 2) + 5 * plain(other))
    np.testing.assert_allclose(turn(p["enc"]["w"])[1], expected, rtol=1e-12)


def test_three_overrides():
    p, x = params(), data()
    inner = override(loss, {at(parameter="enc.w"): flip}, model=p)
    middle = override(both(jax.jit(inner)), {at(parameter="enc.w"): lambda dy: 5 * dy}, model=p)
    ours = override(jax.jit(both(middle)), {at(parameter="enc.w"): clip}, model=p)
    a, b = (jax.grad(f)(p, x)["enc"]["w"] for f in (loss, other))
    found = jax.grad(ours)(p, x)["enc"]["w"]
    np.testing.assert_allclose(found, flip(a) + 5 * b + clip(b), rtol=1e-12)


def test_an_inner_override_alone():
    p, x = params(), data()
    inner = override(loss, {at(parameter="enc.w"): flip}, model=p)
    ours = override(jax.jit(inner), {at(parameter="enc.*"): clip}, model=p)
    found, plain = jax.grad(ours)(p, x)["enc"], jax.grad(loss)(p, x)["enc"]
    np.testing.assert_allclose(found["w"], flip(plain["w"]), rtol=1e-12)
    np.testing.assert_allclose(found["b"], clip(plain["b"]), rtol=1e-12)
    ours.assert_fired()
    assert {hit.path for hit in ours.hits} == {"enc.b"}


def test_the_gradient_of_an_inner_override():
    """An inner step of gradient descent: the derivative of the gradient has the inner rule."""

    def operation(rule):
        @jax.custom_vjp
        def op(x):
            return x

        op.defvjp(lambda x: (op(x), None), lambda _, dy: (rule(dy),))
        return op

    def step(f):
        def after(p, x):
            return other(jax.tree.map(lambda a, b: a - 0.1 * b, p, jax.grad(f)(p, x)), x)

        return after

    def by_hand(p, x):
        inner, outer = operation(flip), operation(clip)
        w, b, head = p["enc"]["w"], outer(p["enc"]["b"]), p["head"]
        f = lambda p, x: loss({**p, "enc": {**p["enc"], "w": inner(p["enc"]["w"])}}, x)  # noqa: E731
        d = jax.grad(f)({"enc": {"w": w, "b": b}, "head": head}, x)["enc"]
        return other({"enc": {"w": outer(w) - 0.1 * d["w"], "b": b - 0.1 * d["b"]}}, x)

    p, x = params(), data()
    inner = override(loss, {at(parameter="enc.w"): flip}, model=p)
    ours = override(step(inner), {at(parameter="enc.*"): clip}, model=p)
    check(jax.grad(ours)(p, x)["enc"], jax.grad(by_hand)(p, x)["enc"])


def test_an_inner_override_in_shard_map():
    p, x = params(), data()
    inner, mesh = (
        override(loss, {at(parameter="enc.w"): flip}, model=p),
        jax.make_mesh((1,), ("a",)),
    )
    spec = jax.sharding.PartitionSpec()
    run = jax.shard_map(inner, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    with pytest.raises(GradientError, match="two overrides is inside shard_map"):
        override(run, {at(parameter="enc.w"): clip}, model=p)(p, x)


# -- messages --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "model", "match"),
    [
        ({at(parameter="enc.W"): clip}, params, "Did you mean 'enc.w'"),
        ({at(parameter="enc.w"): clip}, lambda: None, "model= has to hold arrays"),
        ({at(parameter="kernel"): clip}, lambda: linen.Dense(2), "model= has to hold arrays"),
        ({at(parameter="enc.*"): clip, at(parameter="*.w"): bend}, params, "different rules"),
        ({at(parameter="enc.w"): lambda dy, y, z: dy}, params, "takes 'z'"),
    ],
)
def test_bad_keys(rules, model, match):
    with pytest.raises((ArgumentError, RuleError), match=match):
        override(loss, rules, model=model())


def test_the_argument():
    p = params()
    ours = override(loss, {at(parameter="enc.w"): clip}, model=p)
    with pytest.raises(GradientError, match="no argument is like model="):
        jax.grad(ours)({"enc": p["enc"], "head": [numbers(3, 5)]}, data())
    double = lambda p, q: loss(p, data()) + loss(q, data())  # noqa: E731
    ours = override(double, {at(parameter="enc.w"): clip}, model=p)
    with pytest.raises(GradientError, match="several arguments are like model="):
        ours(jax.tree.map(lambda a: 2 * a, p), jax.tree.map(lambda a: 3 * a, p))
    dp = jax.grad(ours, 1)(p, jax.tree.map(lambda a: 3 * a, p))  # (the first is model= itself)
    check(dp, jax.grad(double, 1)(p, jax.tree.map(lambda a: 3 * a, p)))


def test_bad_answers():
    p = params()
    ours = override(loss, {at(parameter="enc.w"): lambda dy: dy[0]}, model=p)
    with pytest.raises(RuleError, match=r"for the op type 'Parameter'.* the shape"):
        jax.grad(ours)(p, data())


def test_parameters_without_a_gradient():
    p = params()
    ours = override(lambda p: (p["enc"]["w"] ** 2).sum(), {at(parameter="enc.*"): clip}, model=p)
    with pytest.raises(NotFiredError, match="no gradient passed"):
        ours(p)
        ours.assert_fired()
    jax.grad(ours)(p)
    with pytest.warns(UnusedOverrideWarning, match=r"names 'enc\.b', which got no gradient"):
        jax.grad(ours)(p)
    with pytest.raises(NotFiredError, match=r"names 'enc\.b', which got no gradient"):
        ours.assert_fired()
