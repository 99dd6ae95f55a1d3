"""Rules for whole calls of functions that a name_scope decorates, against custom gradients."""

import numpy as np
import pytest

import regrad as rg
from regrad.errors import ArgumentError, GradientError, RuleError
from tests.helpers.rows import close, plain, refusals, under

at, override = rg.at, rg.gradient_override_map
X = rg.tensor([0.3, -0.7, 1.1], dtype="float64")
W = rg.Variable(np.array([1.5, 2.0, -0.5]), name="w")


@rg.name_scope("block")
def block(x):
    return rg.tanh(x * W)


def f(x, part=block):
    return rg.sum(rg.square(part(rg.sin(x))))


def bent(dy):
    return 2 * rg.sin(dy)


def pre(dy, builtin):
    return builtin(bent(dy))


def post(dy, builtin):
    return bent(builtin(dy))


def by_hand(before=lambda dy: dy, after=lambda dy: dy):
    """The block with a gradient that is bent as it arrives, or as it leaves."""

    @rg.custom_grad
    def function(x, w, save):
        save([x, w])

        def gradient(dy, saved):
            x, w = saved
            slope = before(dy) * (1 - rg.square(rg.tanh(x * w)))
            return [after(slope * w), slope * x]

        return rg.tanh(x * w), gradient

    return lambda x: function(x, W)


def gradients(part=block):
    """The gradients by x and W, and the second one by x."""
    df = rg.grad(lambda x: f(x, part))
    dw = rg.variable_grads(lambda: f(X, part)).grads["w"]
    return [df(X), dw, rg.grad(lambda x: rg.sum(rg.square(df(x))))(X)]


WHERES = ["block", "*", ("other", "block"), lambda site: site.path == "block"]


@pytest.mark.parametrize("where", WHERES)
@pytest.mark.parametrize(("rule", "hand"), [(pre, by_hand(bent)), (post, by_hand(after=bent))])
def test_rules_that_ask_for_builtin(where, rule, hand):
    with override({at(where): rule}) as used:
        close(gradients(), gradients(hand))
    used.assert_fired()
    used.assert_fired(at(where))
    assert {(hit.op_type, hit.path) for hit in used.hits} == {("Call", "block")}
    close(gradients(), gradients(lambda x: rg.tanh(x * W)))


def test_reversal_and_parameters_by_name():
    dx, dw, _ = gradients()
    close(under({at("block"): rg.rules.reverse(0.5)}, gradients)[:2], [-0.5 * dx, dw])
    h, w, x = np.sin(X.numpy()), W.numpy(), X.numpy()
    dy = 2 * np.tanh(h * w)
    rules = {at("block"): lambda dy, x, w: (dy * x, {"w": dy * w * 3})}
    close(under(rules, gradients)[:2], [dy * h * np.cos(x), dy * w * 3])


@rg.name_scope("two")
def two(a, k, b):
    return {"sum": a * k + b, "product": a * b}


def in_a_model(a, b):
    with rg.name_scope("model"):
        y = two(a, 3.0, b)
    return rg.sum(y["sum"]) + rg.sum(rg.square(y["product"]))


def of_two(dy, a, k, b):
    by_product, by_sum = dy
    return by_sum * k + by_product * b, by_sum + by_product * a


@pytest.mark.parametrize("rule", [of_two, lambda dy, builtin: builtin(dy)])
def test_outputs_and_nested_paths(rule):
    expected = rg.grads(in_a_model)([X, X + 1])
    with override({at("model.two"): rule}) as used:
        close(rg.grads(in_a_model)([X, X + 1]), expected)
    used.assert_fired()


def test_a_rule_for_any_number_of_inputs_calls_the_function_for_others():
    seen = []

    def rule(dy, xs, forward, builtin):
        seen.append(forward([2 * x for x in xs]))
        return builtin(dy)

    with override({at("pair"): rule}):
        rg.grads(lambda a, b: rg.sum(pair(a, b)))([X, X + 1])
    close(seen, [2 * pair(X, X + 1)])


@rg.name_scope("pair")
def pair(second, first):
    return 2 * second + 3 * first


@pytest.mark.parametrize(("rule", "expected"), [
    (lambda dy, second, first: (5 * dy, 7 * dy), [[5.0] * 3, [7.0] * 3]),
    (lambda dy, builtin: builtin(7 * dy), [[14.0] * 3, [21.0] * 3]),
])  # fmt: skip
def test_keywords_in_another_order_than_the_signature(rule, expected):
    called = lambda second, first: rg.sum(pair(first=first, second=second))  # noqa: E731
    assert plain(under({at("pair"): rule}, rg.grads(called), [X, X])) == expected


def test_transforms():
    pytest.importorskip("jax")
    x, weights = rg.astype(X, "float32"), [1.5, 2.0, -0.5]
    w = rg.Variable(rg.tensor(weights), name="w")
    small = rg.name_scope("block")(lambda x: rg.tanh(x * w))
    batched = rg.name_scope("block")(lambda x, w: rg.tanh(x * w))
    g = lambda x: f(x, small)  # noqa: E731
    with override({at("block"): pre}) as used:
        expected = rg.grad(g)(x)
        for each in (rg.jit(rg.grad(g)), rg.grad(rg.jit(g)), rg.grad(rg.checkpoint(g))):
            close(each(x), expected, 1e-5)
        rows = rg.vmap(rg.grad(lambda x, w: rg.sum(rg.square(batched(x, w))), argnums=0))
        found = rows(x, rg.tensor(weights))
    y = np.tanh(x.numpy() * weights)
    close(found, 2 * np.sin(2 * y) * weights * (1 - y**2), 1e-5)
    assert not np.allclose(expected.numpy(), rg.grad(g)(x).numpy())
    assert sum(hit.ran for hit in used.hits) >= 4


def blocked(x):
    with rg.name_scope("block"):
        return rg.tanh(x)


KEY = {at("block"): rg.rules.optional(pre)}
DECORATED = ArgumentError, "functions that a name_scope decorates"
REFUSED = [
    (lambda: under({at(block): pre}, f, X), *DECORATED),
    (lambda: under({at(rg.Module): pre}, f, X), *DECORATED),
    (lambda: under({at(rg.Module()): pre}, f, X), *DECORATED),
    (lambda: under(KEY, rg.grad(lambda x: f(x, blocked)), X), ArgumentError,
     r"'block' is a block\. Decorate a function with it"),
    (lambda: under({**KEY, "Tanh": lambda dy: dy}, f, X), rg.errors.PassedOverError,
     "'Tanh' ran inside of the call of 'block'"),
    (lambda: under({at("block"): lambda dy, x: dy * x}, rg.variable_grads, lambda: f(X)), RuleError,
     "did not call builtin, so the gradient of 'w' is unknown"),
    (lambda: under(KEY, rg.jvp, f, [X], [X]), GradientError, "forward mode"),
    (lambda: under({at("other"): pre}, f, X), rg.errors.UnusedOverrideWarning, "other"),
]  # fmt: skip
warnings_raise = pytest.mark.filterwarnings("error::regrad.errors.UnusedOverrideWarning")
test_what_is_refused = warnings_raise(refusals(REFUSED))
