"""Whole calls of functions that a name_scope decorates, whose value a rule replaces."""

import numpy as np
import pytest

import regrad as rg
from regrad.errors import ArgumentError, PassedOverError, RuleError
from tests.helpers.rows import close, under

at, override, replace = rg.at, rg.gradient_override_map, rg.replace
X = rg.tensor([0.3, -0.7, 1.1], dtype="float64")
W = rg.Variable(np.array([1.5, 2.0, -0.5]), name="w")


@rg.name_scope("block")
def block(x):
    return rg.tanh(x * W)


def gradients(part):
    """The value, the gradients by x and W, and the second one by x."""
    f = lambda x: rg.sum(rg.square(part(rg.sin(x))))  # noqa: E731
    df = rg.grad(f)
    dw = rg.variable_grads(lambda: f(X)).grads["w"]
    return [f(X), df(X), dw, rg.grad(lambda x: rg.sum(rg.square(df(x))))(X)]


def bent(x, w):
    return rg.sin(rg.exp(w) * x)


@rg.custom_grad
def stepped(x, w, save):
    save([x, w])
    return rg.round(x * w), lambda dy, saved: [dy * saved[1], 3 * dy * saved[0]]


CASES = {
    "a function": (replace(bent), lambda x: bent(x, W)),
    "its own function": (
        replace(lambda x, forward: 2 * forward(rg.sin(x)) + x),
        lambda x: 2 * rg.tanh(rg.sin(x) * W) + x,
    ),
    "its own value": (replace(lambda y: rg.exp(y)), lambda x: rg.exp(rg.tanh(x * W))),
    "straight through": (
        replace(lambda x, w: rg.round(x * w), lambda dy, x, w: (dy * w, {"w": 3 * dy * x})),
        lambda x: stepped(x, W),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    rule, hand = CASES[name]
    with override({at("block"): rule}, values=True) as used:
        close(gradients(block), gradients(hand))
    used.assert_fired()
    assert {(hit.op_type, hit.path) for hit in used.hits} == {("Call", "block")}


@rg.name_scope("two")
def two(a, k, b):
    return {"sum": a * k + b * W, "product": a * b}


def other(a, k, b, w):
    return {"sum": a * k * w + rg.cos(b), "product": a / b}


def test_several_inputs_and_outputs():
    def all_of(part):
        def f(a, b):
            y = part(a, 3.0, b)
            return rg.sum(rg.sin(y["sum"])) + rg.sum(rg.square(y["product"]))

        return [
            f(X, X + 1),
            *rg.grads(f)([X, X + 1]),
            rg.variable_grads(lambda: f(X, X + 1)).grads["w"],
        ]

    expected = all_of(lambda a, k, b: other(a, k, b, W))
    close(under({at("two"): replace(other)}, all_of, two, values=True), expected)


@pytest.mark.parametrize("wrap", [
    lambda f: rg.jit(rg.grad(f)), lambda f: rg.grad(rg.jit(f)), lambda f: rg.grad(rg.checkpoint(f)),
    lambda f: rg.vmap(rg.grad(f)),
], ids=["jit of grad", "grad of jit", "checkpoint", "vmap"])  # fmt: skip
def test_transforms(wrap):
    pytest.importorskip("jax")
    x, w = rg.astype(X, "float32"), rg.Variable(rg.tensor([1.5, 2.0, -0.5]), name="w")
    small = rg.name_scope("block")(lambda x: rg.tanh(x * w))
    f = lambda x: rg.sum(rg.square(small(rg.sin(x))))  # noqa: E731
    hand = lambda x: rg.sum(rg.square(bent(rg.sin(x), w)))  # noqa: E731
    close(under({at("block"): replace(bent)}, wrap(f), x, values=True), wrap(hand)(x), 1e-5)


@pytest.mark.parametrize(("rule", "error", "words"), [
    (replace(lambda x: rg.sum(x)), RuleError, r"returned the shape \(\).*the shape \(3,\)"),
    (replace(lambda q: q), RuleError, "has no 'q'. It may name x, w, y"),
    (replace(lambda x, s: x * s, s=W), ArgumentError, "the Variables that it reads"),
])  # fmt: skip
def test_what_is_refused(rule, error, words):
    with pytest.raises(error, match=words):
        under({at("block"): rg.rules.optional(rule)}, block, X, values=True)


def test_ops_inside():
    inside = {"Tanh": rg.rules.optional(lambda dy: dy)}
    with pytest.raises(PassedOverError, match="'Tanh' ran inside of the call of 'block'"):
        under({at("block"): replace(bent), **inside}, block, X, values=True)
    sin = {"Sin": rg.rules.optional(lambda dy: 7 * dy)}  # (in the function that replaces the call)
    expected = rg.grad(lambda x: rg.sum(bent(x, W)))(X)
    f = rg.grad(lambda x: rg.sum(block(x)))
    close(under({at("block"): replace(bent), **sin}, f, X, values=True), expected)
