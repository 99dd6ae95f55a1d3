"""Which gradients a rule owes, which it may leave out (`needs`), and where its errors point."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import regrad as rg
import regrad.torch
import regrad.v1 as tf
from regrad.errors import ArgumentError, RuleError
from regrad.v1.graph.tensors import face
from tests.helpers.rows import plain, refused, under

X, W = 2.0, 3.0


def number(x):
    return rg.tensor(np.float64(x))


# -- roads: the gradient of a function of one Tensor, in every mode --------------------------------


def in_graph(f, x, jit=False):
    with tf.Graph().as_default(), tf.Session(jit=jit) as session:
        x = tf.constant(x.item(), tf.float64)
        return session.run(tf.gradients(face(f(x._read())), x)[0])


ROADS = {
    "eager": lambda f, x: rg.grad(f)(x), "jit": lambda f, x: rg.jit(rg.grad(f))(x),
    "graph": in_graph, "grad of jit": lambda f, x: rg.grad(rg.jit(f))(x),
    "checkpoint": lambda f, x: rg.grad(rg.checkpoint(f))(x),
    "scan": lambda f, x: rg.grad(
        lambda x: rg.scan(lambda c, _: (f(x) + 0 * c, None), 0 * x, None, length=2)[0]
    )(x),
    "cond": lambda f, x: rg.jit(rg.grad(lambda x: rg.cond(x > 0, f, lambda x: x, x)))(x),
    "vmap": lambda f, x: rg.grad(lambda x: rg.vmap(f)(rg.stack([x, 0 * x]))[0])(x),
    "jvp": lambda f, x: rg.jvp(f, [x], [rg.ones_like(x)])[1],
    "graph, jit": lambda f, x: in_graph(f, x, jit=True),
}  # fmt: skip
roads = pytest.mark.parametrize("road", ROADS)


def by(road, f, x):
    return float(ROADS[road](f, number(x)))


# -- how many gradients ----------------------------------------------------------------------------

ANSWERS = {
    "numbers and tensors": lambda dx, dk: [dx, None], "any for k": lambda dx, dk: [dx, dk],
    "all": lambda dx, dk: [None, dx, dk],
    "all and the default": lambda dx, dk: [None, dx, dk, None],
    "without the mode": lambda dx, dk: [dx, dk, None],
}  # fmt: skip


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("k", [3, 3.0, number(3.0)], ids=["int", "float", "Tensor"])
def test_an_argument_may_be_a_number_or_a_tensor(answer, k):
    """`x ** k` of a mode `kind`, a Tensor or number x and k, and the optional rest."""

    @rg.custom_grad
    def power(kind, x, k, scale=1.0):
        dx = lambda dy: dy * scale * k * x ** (k - 1)  # noqa: E731
        return scale * x**k, lambda dy: ANSWERS[answer](dx(dy), dy * 5)

    for road in ("eager", "jit", "graph"):
        assert by(road, lambda x: power("power", x, k), X) == 12.0


@pytest.mark.parametrize("k", [3.0, number(3.0)], ids=["number", "Tensor"])
def test_keywords_defaults_and_numbers_in_containers(k):
    @rg.custom_grad
    def f(x, k=3):
        return x**k, lambda dy: [dy * k * x ** (k - 1), None]

    @rg.custom_grad
    def g(p, q):
        x, k = p["x"], p["k"]
        return x**k, lambda dy: [{"x": dy * k * x ** (k - 1), "k": dy}, [dy, dy]]

    calls = [lambda x: f(x, k=k), f, lambda x: f(x, k), lambda x: g({"x": x, "k": k}, [1.0, 2.0])]
    assert [rg.grad(call)(number(X)).item() for call in calls] == [12.0] * 4


def by_jax(f, x):
    return float(jax.grad(f)(jnp.asarray(x)))


def by_torch(f, x):
    x = torch.tensor(x, requires_grad=True)
    return torch.autograd.grad(f(x), x)[0].item()


LIBRARIES = [(rg.jax.custom_grad, by_jax), (regrad.torch.custom_grad, by_torch)]


@pytest.mark.parametrize(("custom", "grad"), LIBRARIES)
def test_numbers_in_other_libraries(custom, grad):
    f = custom(lambda x, w, mode="power": (x * w, lambda dy: [dy * w, dy * x]))
    assert grad(lambda w: f(X, w), W) == X
    assert grad(lambda x: f(x, W), X) == grad(lambda x: f(x, W, "power"), X) == W


@rg.custom_grad
def pair_and_number(pair, k):
    return pair[0] * pair[1] * k, lambda dy: [None, dy * pair[0] * k]


def of_count(answer):
    f = rg.custom_grad(lambda mode, x, k: (x * k, answer))
    return lambda x: f("mode", x, 3.0)


WRONG = r"wrong structure .* by x\. Of 3 arguments, 1 holds tensors in this call\."
COUNTS = {
    # One list can be the entry of the only argument, or have an entry for each of two.
    "two meanings": (lambda w: pair_and_number([number(X), w], 2.0), "ambiguous structure of "
                     "gradients: .*Of 2 arguments, 1 holds tensors in this call"),
    "four": (of_count(lambda dx: [dx] * 4), WRONG), "none": (of_count(lambda dx: []), WRONG),
    "text": (of_count(lambda dx: ["no", dx, dx]), WRONG),
}  # fmt: skip


@pytest.mark.parametrize(("f", "words"), COUNTS.values(), ids=COUNTS)
def test_other_counts_are_refused(f, words):
    refused(lambda: rg.grad(f)(number(X)), RuleError, words)


# -- needs -----------------------------------------------------------------------------------------


class Product:
    """`x * p["w"]`, by a rule that notes `needs` and computes only the wanted gradients."""

    def __init__(self):
        self.seen = []

    def __call__(self, x, w):
        @rg.custom_grad
        def f(x, p, k=2.0):
            def grad_func(dy, needs):
                self.seen.append(needs)
                dx = dy * p["w"] if needs[0] else None
                dw = dy * x if needs[1]["w"] else None
                return [dx, {"w": dw, "k": None}, None]

            return x * p["w"], grad_func

        return f(x, {"w": w, "k": 1})

    def rule(self, dy, a, b, needs):
        """The same for the op type Mul."""
        self.seen.append(needs)
        return dy * b if needs[0] else None, dy * a if needs[1] else None


@roads
def test_custom_grad_is_told_what_is_needed(road):
    f = Product()
    assert by(road, lambda x: f(x, number(W)), X) == W
    assert all(needs == (True, {"w": False, "k": False}, False) for needs in f.seen) and f.seen
    f.seen.clear()
    assert by(road, lambda w: f(number(X), w), W) == X
    assert all(needs == (False, {"w": True, "k": False}, False) for needs in f.seen)
    assert by(road, lambda x: f(x, x), W) == 2 * W


@roads
def test_a_rule_is_told_what_is_needed(road):
    """(Each road multiplies nothing else by a factor that is differentiated on both sides.)"""
    product = Product()
    f = lambda x, w: rg.minimum(rg.maximum(x, -9), 9) * w  # noqa: E731
    with rg.gradient_override_map({"Mul": product.rule}) as used:
        assert by(road, lambda x: f(x, number(W)), X) == W
        assert (True, False) in product.seen
        assert by(road, lambda w: f(number(X), w), W) == X
    assert (False, True) in product.seen
    used.assert_fired()


def test_a_replay_and_the_second_order_may_need_something_else():
    """One compiled body, whose gradient is taken by one input and then by both."""
    f, x, w = Product(), number(X), number(W)
    body = rg.jit(lambda x, w: f(x, w))
    assert rg.grad(lambda x: body(x, w))(x).item() == W
    assert plain(rg.grads(body)([x, w])) == [W, X]
    outer = rg.jit(lambda x, w: (rg.grad(lambda x: f(x, w))(x), *rg.grads(f)([x, w])))
    assert plain(outer(x, w)) == (W, W, X)
    second = rg.grad(rg.grad(lambda x: f(x, x)))
    assert second(x).item() == rg.jit(second)(x).item() == 2.0


def test_sequences_have_a_list():
    seen = []

    def rule(dy, xs, needs):
        seen.append(needs)
        return [dy[i : i + 1] if need else None for i, need in enumerate(needs[0])]

    f = lambda x: rg.concat([rg.ones(1), x, rg.ones(1)]) @ rg.tensor([1.0, 5.0, 7.0])  # noqa: E731
    assert under({"ConcatV2": rule}, rg.grad(f), rg.tensor([X])).tolist() == [5.0]
    assert seen == [([False, True, False],)]


def test_ops_of_users_are_told():
    seen = []

    @rg.extend.op("NeedsProduct", elementwise=True)
    def product(xp, a: rg.Tensor, b: rg.Tensor, /) -> rg.Tensor:
        """`a * b`."""
        return a * b

    rg.extend.gradient("NeedsProduct", "a")(lambda dy, b, needs: (seen.append(needs), dy * b)[1])
    rg.extend.gradient("NeedsProduct", "b")(lambda dy, a, needs: (seen.append(needs), dy * a)[1])
    assert rg.grad(lambda x: product(x, number(W)))(number(X)).item() == W
    assert plain(rg.grads(product)([number(X), number(W)])) == [W, X]
    assert seen == [(True, False), (True, True), (True, True)]


@pytest.mark.parametrize("answer", [7.0, rg.ones(5)], ids=["float", "Tensor"])
def test_an_answer_that_is_not_needed_is_ignored(answer):
    rules = {"Mul": lambda dy, a, b, needs: (dy * b, answer)}
    assert under(rules, rg.grad(lambda x: x * number(W)), number(X)).item() == W


@rg.name_scope("whole_call")
def whole(a, b):
    return a * b


def custom_of_torch(rule):
    @regrad.torch.custom_grad
    def f(a, b):
        return a * b, lambda dy, needs: rule(dy, a, b, needs)

    return f


# The gradient of a product by its first factor, under this rule for Mul.
HOSTS = {
    "torch": lambda rule: by_torch(regrad.torch.gradient_override_map({"Mul": rule})(
        lambda x: x * torch.tensor(W)), X),
    "jax": lambda rule: by_jax(rg.jax.override(lambda x: x * jnp.asarray(W), {"Mul": rule}), X),
    "custom torch": lambda rule: by_torch(lambda x: custom_of_torch(rule)(x, torch.tensor(W)), X),
    "whole call": lambda rule: under(
        {rg.at("whole_call"): rule}, rg.grad(lambda x: whole(x, number(W))), number(X)).item(),
}  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
def test_other_hosts(host):
    product = Product()
    assert HOSTS[host](product.rule) == W
    assert product.seen == [(True, False)]


def test_jax_computes_only_what_is_needed():
    """A traced gradient function needs all; JAX removes the unused ones."""
    seen, ran = [], []

    @rg.jax.custom_grad
    def f(x, w, save):
        def grad_func(dy, needs):
            seen.append(needs)
            jax.debug.callback(lambda: ran.append(1))
            slow = jax.pure_callback(lambda dy: ran.append(2) or dy, dy, dy * x)
            return [dy * w, slow]

        return x * w, grad_func

    assert by_jax(lambda x: f(x, jnp.asarray(W)), X) == W
    jax.effects_barrier()
    assert seen == [(True, True)]
    assert 2 not in ran


def test_needs_stands_last():
    f = rg.custom_grad(lambda x, save: (x * 1, lambda dy, needs, saved: dy))
    refused(lambda: rg.grad(f)(X), ArgumentError, "optionally followed by needs")
    gradient = lambda dy, saved, needs: dy * saved[0] * needs[0]  # noqa: E731
    assert rg.grad(rg.custom_grad(lambda x, save: (save([x]), (x * 1, gradient))[1]))(X).item() == X


# -- where errors point ----------------------------------------------------------------------------


def wrong_gradient(dy):
    return rg.ones(7)


LINE = re.escape(f"wrong_gradient, {__file__}:{wrong_gradient.__code__.co_firstlineno})")


@roads
def test_errors_name_the_gradient_function_and_the_rule(road):
    custom = rg.custom_grad(lambda x: (x * 1, wrong_gradient))
    refused(lambda: by(road, custom, X), RuleError, LINE)
    rules = {"Sin": rg.rules.optional(wrong_gradient)}
    refused(lambda: under(rules, by, road, rg.sin, X), RuleError, LINE)


WRONG_ANSWERS = [(wrong_gradient, LINE), (lambda dy: [], "Num gradients 0.*<lambda>")]


@pytest.mark.parametrize(("answer", "words"), WRONG_ANSWERS)
def test_errors_of_tensorflows_custom_gradient(answer, words):
    with tf.Graph().as_default():
        x = tf.constant(X)
        f = tf.custom_gradient(lambda x: (x * 1.0, answer))
        refused(lambda: tf.gradients(f(x), x), RuleError, words)
