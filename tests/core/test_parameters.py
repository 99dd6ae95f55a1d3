"""Rules for Variables of regrad, against the rule applied by hand to the gradient."""

import numpy as np
import pytest

import regrad as rg
from regrad.errors import ArgumentError, NotFiredError, RuleError, UnusedOverrideWarning

at, override = rg.at, rg.gradient_override_map


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


class Net:
    def __init__(self):
        self.w = rg.Variable(numbers(3, 3), name="net/w")
        self.b = rg.Variable(numbers(3, seed=1), name="net/b")
        self.x = rg.tensor(numbers(4, 3, seed=2))

    def loss(self):
        h = self.x
        for _ in range(2):
            h = rg.tanh(h @ self.w + self.b)
        return (h**3).sum()

    def grads(self, run=None):
        return arrays(rg.variable_grads(run or self.loss)[1])


def arrays(found):
    return {name: np.asarray(dx.numpy()) for name, dx in found.items()}


def clip(dy):
    return dy / (1 + rg.sqrt((dy * dy).sum()))


def clipped(dy):
    return dy / (1 + np.sqrt((dy**2).sum()))


def check(found, expected):
    assert found.keys() == expected.keys()
    for name, dx in expected.items():
        np.testing.assert_allclose(found[name], dx, rtol=1e-9)


WAYS = {
    "eager": lambda net: net.loss,
    "jit": lambda net: rg.jit(net.loss),
    "checkpoint": lambda net: lambda: rg.checkpoint(net.loss)(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("key", ["net.w", "net/w", "**.w", "variable"])
def test_the_rule_gets_the_sum(way, key):
    net = Net()
    plain, run = net.grads(), WAYS[way](net)
    with override({at(parameter=net.w if key == "variable" else key): clip}) as used:
        found = net.grads(run)
    check(found, plain | {"net/w": clipped(plain["net/w"])})
    used.assert_fired()
    assert [(hit.path, hit.count, hit.ran) for hit in used.hits] == [("net/w", 1, 1)]
    check(net.grads(run), plain)


def test_a_compiled_step():
    net = Net()
    plain, step = net.grads(), rg.jit(lambda: rg.variable_grads(net.loss)[1])
    with override({at(parameter="net.*"): clip}) as used:
        for _ in range(3):
            found = arrays(step())
    check(found, {name: clipped(dx) for name, dx in plain.items()})
    assert [(hit.path, hit.ran) for hit in used.hits] == [("net/w", 3), ("net/b", 3)]
    check(arrays(step()), plain)

    @rg.jit
    def inside():
        with override({at(parameter="net.w"): clip}):
            return rg.variable_grads(net.loss)[1]

    check(arrays(inside()), plain | {"net/w": clipped(plain["net/w"])})


def test_common_rules():
    net = Net()
    plain, w = net.grads()["net/w"], net.w.numpy()
    mask = (numbers(3, 3, seed=5) > 0).astype(float)
    for rule, expected in [
        (lambda dy: 0.1 * dy, plain / 10),
        (lambda dy: dy * mask, plain * mask),
        (lambda dy, x: dy + 0.01 * x, plain + w / 100),
        (lambda dy, builtin: 3 * builtin(dy), 3 * plain),
    ]:
        with override({at(parameter="net.w"): rule}):
            np.testing.assert_allclose(net.grads()["net/w"], expected, rtol=1e-9)


def test_uses_in_the_scope_alone():
    net = Net()

    def run():
        with override({at(parameter="net.w"): lambda dy: 10 * dy}):
            inside = net.loss() + (net.w * net.w).sum()
        return net.loss() + inside

    plain = net.grads()
    found = net.grads(run)
    np.testing.assert_allclose(found["net/w"], 11 * plain["net/w"] + 20 * net.w.numpy())
    np.testing.assert_allclose(found["net/b"], 2 * plain["net/b"])


def test_the_inner_scope_wins():
    net = Net()
    plain = net.grads()
    with (
        override({at(parameter="net.*"): lambda dy: 2 * dy}),
        override({at(parameter="net.w"): lambda dy: 3 * dy, "Tanh": "Tanh"}),
    ):
        found = net.grads()
    check(found, {"net/w": 3 * plain["net/w"], "net/b": 2 * plain["net/b"]})


def test_steps_in_one_scope():
    v, by_hand = rg.Variable([2.0, 3.0], name="v"), np.array([2.0, 3.0])
    with override({at(parameter="v"): clip}) as used:
        for _ in range(5):
            v.assign_sub(0.1 * rg.variable_grads(lambda: (v**3).sum())[1]["v"])
            by_hand = by_hand - 0.1 * clipped(3 * by_hand**2)
    np.testing.assert_allclose(v.numpy(), by_hand, rtol=1e-5)
    assert [(hit.count, hit.ran) for hit in used.hits] == [(5, 5)]


def bend(dy, x):
    return dy * rg.sin(x) * rg.sqrt((dy * dy).sum())


def test_second_order():
    net, factors = Net(), numbers(3, 3, seed=6)

    def product():
        return (rg.variable_grads(net.loss)[1]["net/w"] * factors).sum()

    with override({at(parameter="net.w"): bend}, order=1):
        found = net.grads(product)["net/w"]
    w, expected = net.w.numpy().copy(), np.zeros((3, 3))
    for place in np.ndindex(3, 3):
        values = []
        for step in (1e-5, -1e-5):
            moved = w.copy()
            moved[place] += step
            net.w.assign(moved)
            with override({at(parameter="net.w"): bend}):
                values.append(product().item())
        expected[place] = (values[0] - values[1]) / 2e-5
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


def test_each_tape_sees_the_sum_once():
    """Also if an inner gradient and the outer function both read the Variable."""
    net = Net()

    def inner():
        return (rg.variable_grads(net.loss)[1]["net/w"]).sum()

    plain = net.grads(net.loss)["net/w"], net.grads(inner)["net/w"]
    with override({at(parameter="net.w"): lambda dy: 2 * dy}):
        found = net.grads(lambda: inner() + net.loss())["net/w"]
    np.testing.assert_allclose(found, 2 * (2 * plain[1] + plain[0]), rtol=1e-9)


def test_messages():
    net = Net()
    with (
        pytest.warns(UnusedOverrideWarning, match="the Variables 'net/w', 'net/b' were read"),
        override({at(parameter="net.W"): clip}) as used,
    ):
        net.grads()
    with pytest.raises(NotFiredError, match="names no Variable that a gradient function reads"):
        used.assert_fired()
    with (
        pytest.raises(ArgumentError, match="two keys with different rules"),
        override({at(parameter="net.w"): clip, at(parameter="net.*"): bend}),
    ):
        net.grads()
    with (
        pytest.raises(RuleError, match=r"for the op type 'Parameter'.* the shape"),
        override({at(parameter="net.w"): lambda dy: dy[0]}),
    ):
        net.grads()
    with override({at(parameter="net.W"): rg.rules.optional(clip)}):
        net.grads()


def test_keys():
    a, b = numbers(2), numbers(2)
    assert at(parameter=a) == at(parameter=a)
    assert at(parameter=a) != at(parameter=b)
    assert at(parameter="w") != at("w")
    assert repr(at(parameter=("a.*", "b"))) == "rg.at(parameter=('a.*', 'b'))"
    with pytest.raises(ArgumentError, match="a key for parameters has no other argument"):
        at("net", parameter="w")
    with pytest.raises(ArgumentError, match="names no place and no op"):
        at()
