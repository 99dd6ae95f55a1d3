"""Rules for whole calls of modules in JAX, against functions with a custom_vjp."""

import pytest

import regrad as rg
from regrad.errors import (
    ArgumentError,
    GradientError,
    NotFiredError,
    PassedOverError,
    RuleError,
    UnusedOverrideWarning,
)

jax = pytest.importorskip("jax")
eqx = pytest.importorskip("equinox")
nnx = pytest.importorskip("flax.nnx")
linen = pytest.importorskip("flax.linen")
pytest.importorskip("regrad.jax")
jnp = jax.numpy
at = rg.at


class Block(eqx.Module):
    w: jax.Array

    def __call__(self, x):
        return jnp.tanh(x @ self.w)


class Net(eqx.Module):
    layers: list
    head: Block

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class NnxBlock(nnx.Module):
    def __init__(self, w):
        self.w = nnx.Param(w)

    def __call__(self, x):
        return jnp.tanh(x @ self.w[...])


class NnxNet(nnx.Module):
    def __init__(self, ws):
        self.layers = nnx.List([NnxBlock(w) for w in ws[:2]])
        self.head = NnxBlock(ws[2])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


KEYS = jax.random.split(jax.random.key(0), 4)
SHAPES = [(3, 4), (4, 3), (3, 2)]
WS = [jax.random.normal(k, shape) for k, shape in zip(KEYS, SHAPES, strict=False)]
NET = Net([Block(w) for w in WS[:2]], Block(WS[2]))
X = jax.random.normal(KEYS[3], (5, 3))


def loss(net, x):
    return jnp.sum(net(x) ** 2)


def bent(dy):
    return 2 * jnp.sin(dy)


def pre(dy, builtin):
    return builtin(bent(dy))


def post(dy, builtin):
    return bent(builtin(dy))


def same(dy):
    return dy


def by_hand(before=same, after=same):
    """A block with a gradient that is bent as it arrives, or as it leaves."""

    @jax.custom_vjp
    def block(w, x):
        return jnp.tanh(x @ w)

    def pull(kept, dy):
        w, x = kept
        slope = before(dy) * (1 - jnp.tanh(x @ w) ** 2)
        return x.T @ slope, after(slope @ w.T)

    block.defvjp(lambda w, x: (block(w, x), (w, x)), pull)
    return block


def reference(paths, **bends):
    """The loss where the blocks of these paths have other gradients."""
    names = ["layers.0", "layers.1", "head"]
    blocks = [by_hand(**bends) if name in paths else by_hand() for name in names]

    def f(net, x):
        for block, module in zip(blocks, [*net.layers, net.head], strict=True):
            x = block(module.w, x)
        return jnp.sum(x**2)

    return f


def check(found, expected):
    jax.tree.map(lambda a, b: jnp.allclose(a, b, rtol=1e-4, atol=1e-4) or pytest.fail(f"{a} {b}"),
                 found, expected)  # fmt: skip


SELECTORS = {
    "path": (at("head"), ["head"]),
    "pattern": (at("layers.*"), ["layers.0", "layers.1"]),
    "class": (at(Block), ["layers.0", "layers.1", "head"]),
    "tuple": (at(("head", "layers.1")), ["head", "layers.1"]),
    "predicate": (at(lambda site: site.path == "layers.0"), ["layers.0"]),
    "first": (at(Block, nth=0), ["layers.0"]),
    "last": (at(Block, nth=-1), ["head"]),
}


@pytest.mark.parametrize("selector", SELECTORS)
def test_every_kind_of_place(selector):
    key, paths = SELECTORS[selector]
    ours = rg.jax.override(loss, {key: pre}, model=NET)
    expected = jax.grad(reference(paths, before=bent))(NET, X)
    check(jax.grad(ours)(NET, X), expected)
    ours.assert_fired()
    assert {hit.path for hit in ours.hits} == set(paths)
    check(jax.jit(jax.grad(ours))(NET, X), expected)
    rows = jax.vmap(jax.grad(ours), (None, 0))(NET, X[:, None])
    check(jax.tree.map(lambda row: row.sum(0), rows), expected)


def test_what_leaves_and_second_order():
    ours = rg.jax.override(loss, {at("head"): post}, model=NET)
    f = reference(["head"], after=bent)
    check(jax.grad(ours)(NET, X), jax.grad(f)(NET, X))
    check(jax.grad(ours, argnums=1)(NET, X), jax.grad(f, argnums=1)(NET, X))

    def second(f):
        def norm(net):
            return sum(jnp.sum(dw**2) for dw in jax.tree.leaves(jax.grad(f)(net, X)))

        return jax.grad(norm)(NET)

    check(second(ours), second(f))
    ours = rg.jax.override(loss, {at("head"): pre}, model=NET)
    check(second(ours), second(reference(["head"], before=bent)))


def test_nnx():
    net = NnxNet(WS)
    rules = {at("layers.1"): pre, at("head"): rg.rules.reverse()}
    ours = rg.jax.override(loss, rules, model=net)

    def f(net, x):
        first, second, head = by_hand(), by_hand(before=bent), by_hand(after=lambda dy: -dy)
        x = second(net.layers[1].w, first(net.layers[0].w, x))
        return jnp.sum(head(net.head.w, x) ** 2)

    check(jax.tree.leaves(nnx.grad(ours)(net, X)), jax.tree.leaves(
        [jax.grad(f)(NET, X).head, jax.grad(f)(NET, X).layers]))  # fmt: skip
    ours.assert_fired()


def test_a_module_without_parameters():
    class Act(eqx.Module):
        def __call__(self, x, *, power=2):
            return x**power

    class Both(eqx.Module):
        block: Block
        act: Act

        def __call__(self, x):
            return self.act(self.block(x))

    net = Both(NET.head, Act())
    ours = rg.jax.override(loss, {at("act"): lambda dy, x: 7 * dy * x}, model=net)
    dy = 2 * net(X)
    expected = jax.vjp(net.block, X)[1](7 * dy * net.block(X))[0]
    check(jax.grad(ours, argnums=1)(net, X), expected)


def test_what_is_refused():
    for f, model in [(loss, None), (lambda p, x: x, linen.Dense(2))]:
        with pytest.raises(ArgumentError, match="Equinox or Flax's nnx leave a boundary"):
            rg.jax.override(f, {at("head"): pre}, model=model)
    with pytest.raises(ArgumentError, match=r"keep: rg.at\('head'\) is not a key"):
        rg.jax.override(loss, {at("layers.0"): pre}, model=NET, keep=[at("head")])
    with pytest.raises(RuleError, match="did not call builtin, so nobody knows"):
        jax.grad(rg.jax.override(loss, {at("head"): lambda dy, x: x}, model=NET))(NET, X)
    ours = rg.jax.override(loss, {at("head"): pre}, model=NET)
    with pytest.raises(GradientError, match="not linear"):
        jax.jvp(lambda x: ours(NET, x), (X,), (X,))


def test_keys_inside_are_passed_over():
    rules = {at("head"): pre, "Tanh": lambda dy, y: dy * (1 - y**2)}
    with pytest.raises(PassedOverError, match="'Tanh' occurs inside of a call that has a rule"):
        rg.jax.override(loss, rules, model=NET)(NET, X)
    ours = rg.jax.override(loss, rules, model=NET, keep=[at("head")])
    check(jax.grad(ours)(NET, X), jax.grad(reference(["head"], before=bent))(NET, X))
    assert {hit.path for hit in ours.hits if hit.op_type == "Tanh"} == {"layers.0", "layers.1"}


def test_modules_that_never_run():
    class Skips(eqx.Module):
        a: Block
        b: Block

        def __call__(self, x):
            return self.a(x)

    net = Skips(Block(WS[0]), Block(WS[0]))
    ours = rg.jax.override(lambda net, x: jnp.sum(net(x)), {at("*"): pre}, model=net)
    with pytest.warns(UnusedOverrideWarning, match="names 'b', which was never called"):
        jax.grad(ours)(net, X)
    with pytest.raises(NotFiredError, match="'b'"):
        ours.assert_fired()


def test_keywords_in_another_order_than_the_signature():
    class Pair(eqx.Module):
        def __call__(self, second, first):
            return 2 * second + 3 * first

    pair, x = Pair(), jnp.ones(2)

    def called(second, first):
        return pair(first=first, second=second).sum()

    rules = {at(""): lambda dy, second, first: (5 * dy, 7 * dy)}
    found = jax.grad(rg.jax.override(called, rules, model=pair), (0, 1))(x, x)
    assert [dx.tolist() for dx in found] == [[5.0] * 2, [7.0] * 2]
