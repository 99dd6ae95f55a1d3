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

X, W = 2.0, 3.0


def number(x):
    return rg.tensor(np.float64(x))


# -- roads: the gradient of a function of one Tensor, in every mode --------------------------------


def in_graph(f, x, jit=False):
    with tf.Graph().as_default(), tf.Session(jit=jit) as session:
        x = tf.constant(x, tf.float64)
        return session.run(tf.gradients(face(f(x._read())), x)[0])


ROADS = {
    "eager": lambda f, x: rg.grad(f)(x),
    "jit": lambda f, x: rg.jit(rg.grad(f))(x),
    "grad of jit": lambda f, x: rg.grad(rg.jit(f))(x),
    "checkpoint": lambda f, x: rg.grad(rg.checkpoint(f))(x),
    "scan": lambda f, x: rg.grad(
        lambda x: rg.scan(lambda c, _: (f(x) + 0 * c, None), 0 * x, None, length=2)[0]
    )(x),
    "cond": lambda f, x: rg.jit(rg.grad(lambda x: rg.cond(x > 0, f, lambda x: x, x)))(x),
    "vmap": lambda f, x: rg.grad(lambda x: rg.vmap(f)(rg.stack([x, 0 * x]))[0])(x),
    "jvp": lambda f, x: rg.jvp(f, [x], [rg.ones_like(x)])[1],
    "graph": in_graph,
    "graph, jit": lambda f, x: in_graph(f, x, jit=True),
}
roads = pytest.mark.parametrize("road", ROADS.values(), ids=ROADS)


def by_road(road, f, x):
    return float(road(f, x if road in (ROADS["graph"], ROADS["graph, jit"]) else number(x)))


# -- how many gradients ----------------------------------------------------------------------------


def power(answer):
    """`x ** k` of a mode `kind`, a Tensor or number x and k, and the optional rest."""

    @rg.custom_grad
    def f(kind, x, k, scale=1.0):
        return scale * x**k, lambda dy: answer(dy * scale * k * x ** (k - 1), dy * 5)

    return f


ANSWERS = {
    "numbers and tensors": lambda dx, dk: [dx, None],
    "any for k": lambda dx, dk: [dx, dk],
    "all": lambda dx, dk: [None, dx, dk],
    "all and the default": lambda dx, dk: [None, dx, dk, None],
    "without the mode": lambda dx, dk: [dx, dk, None],
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
@pytest.mark.parametrize(
    "k", [3, 3.0, rg.tensor(3.0, dtype="float64")], ids=lambda k: type(k).__name__
)
def test_an_argument_may_be_a_number_or_a_tensor(answer, k):
    f = power(answer)
    for road in (ROADS["eager"], ROADS["jit"], ROADS["graph"]):
        assert by_road(road, lambda x: f("power", x, k), X) == 12.0


@pytest.mark.parametrize("k", [3, rg.tensor(3.0)], ids=["int", "Tensor"])
def test_a_keyword_and_a_default_count_as_arguments(k):
    @rg.custom_grad
    def f(x, k=3):
        return x**k, lambda dy: [dy * k * x ** (k - 1), None]

    calls = [lambda x: f(x, k=k), f, lambda x: f(x, k)]
    assert [rg.grad(call)(X).item() for call in calls] == [12.0] * 3


def test_numbers_in_containers():
    @rg.custom_grad
    def f(p, q):
        x, k = p["x"], p["k"]
        return x**k, lambda dy: [{"x": dy * k * x ** (k - 1), "k": dy}, [dy, dy]]

    for k in (3.0, rg.tensor(3.0)):
        assert rg.grad(lambda x, k=k: f({"x": x, "k": k}, [1.0, 2.0]))(X).item() == 12.0


def by_jax(f, x):
    return float(jax.grad(f)(jnp.asarray(x)))


def by_torch(f, x):
    x = torch.tensor(x, requires_grad=True)
    return torch.autograd.grad(f(x), x)[0].item()


@pytest.mark.parametrize(
    ("custom", "grad"), [(rg.jax.custom_grad, by_jax), (regrad.torch.custom_grad, by_torch)]
)
def test_numbers_in_other_libraries(custom, grad):
    @custom
    def f(x, w, mode="power"):
        return x * w, lambda dy: [dy * w, dy * x]

    assert grad(lambda w: f(X, w), W) == X
    assert grad(lambda x: f(x, W), X) == W
    assert grad(lambda x: f(x, W, "power"), X) == W


def test_two_meanings_are_refused():
    """One list can be the entry of the only argument, or have an entry for each of two."""

    @rg.custom_grad
    def f(pair, k):
        return pair[0] * pair[1] * k, lambda dy: [None, dy * pair[0] * k]

    words = r"ambiguous structure of gradients: f .*Of 2 arguments, 1 holds tensors in this call"
    with pytest.raises(RuleError, match=words):
        rg.grad(lambda w: f([number(X), w], 2.0))(number(W))


@pytest.mark.parametrize("answer", [lambda dx: [dx] * 4, lambda dx: [], lambda dx: ["no", dx, dx]])
def test_other_counts_are_refused(answer):
    @rg.custom_grad
    def f(mode, x, k):
        return x * k, lambda dy: answer(dy)

    words = r"wrong structure .* by x\. Of 3 arguments, 1 holds tensors in this call\."
    with pytest.raises(RuleError, match=words):
        rg.grad(lambda x: f("mode", x, 3.0))(X)


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
    assert by_road(road, lambda x: f(x, number(W)), X) == W
    assert f.seen[0] == (True, {"w": False, "k": False}, False)
    assert all(needs == f.seen[0] for needs in f.seen)
    f.seen.clear()
    assert by_road(road, lambda w: f(number(X), w), W) == X
    assert all(needs == (False, {"w": True, "k": False}, False) for needs in f.seen)
    assert by_road(road, lambda x: f(x, x), W) == 2 * W


@roads
def test_a_rule_is_told_what_is_needed(road):
    """(Each road multiplies nothing else by a factor that is differentiated on both sides.)"""
    product = Product()
    f = lambda x, w: rg.minimum(rg.maximum(x, -9), 9) * w  # noqa: E731
    with rg.gradient_override_map({"Mul": product.rule}) as used:
        assert by_road(road, lambda x: f(x, number(W)), X) == W
        assert (True, False) in product.seen
        assert by_road(road, lambda w: f(number(X), w), W) == X
    assert (False, True) in product.seen
    used.assert_fired()


def test_second_order_is_that_of_what_was_computed():
    f = Product()
    square = lambda x: f(x, x)  # noqa: E731
    for wrap in (lambda g: g, rg.jit):
        assert wrap(rg.grad(rg.grad(square)))(number(X)).item() == 2.0


def test_a_replay_may_need_something_else():
    """One compiled body, whose gradient is taken by one input and then by both."""
    f = Product()
    body = rg.jit(lambda x, w: f(x, w))
    assert rg.grad(lambda x: body(x, number(W)))(number(X)).item() == W
    assert [g.item() for g in rg.grads(body)([number(X), number(W)])] == [W, X]
    outer = rg.jit(lambda x, w: (rg.grad(lambda x: f(x, w))(x), *rg.grads(f)([x, w])))
    assert [y.item() for y in outer(number(X), number(W))] == [W, W, X]


def test_sequences_have_a_list():
    seen = []

    def rule(dy, xs, needs):
        seen.append(needs)
        return [dy[i : i + 1] if need else None for i, need in enumerate(needs[0])]

    with rg.gradient_override_map({"ConcatV2": rule}):
        f = lambda x: rg.concat([rg.ones(1), x, rg.ones(1)]) @ rg.tensor([1.0, 5.0, 7.0])  # noqa: E731
        assert rg.grad(f)(rg.tensor([X])).tolist() == [5.0]
    assert seen == [([False, True, False],)]


def test_ops_of_users_are_told():
    seen = []

    @rg.extend.op("NeedsProduct", elementwise=True)
    def product(xp, a: rg.Tensor, b: rg.Tensor, /) -> rg.Tensor:
        """`a * b`."""
        return a * b

    @rg.extend.gradient("NeedsProduct", "a")
    def _(dy, b, needs):
        seen.append(needs)
        return dy * b

    @rg.extend.gradient("NeedsProduct", "b")
    def _(dy, a, needs):
        seen.append(needs)
        return dy * a

    assert rg.grad(lambda x: product(x, number(W)))(number(X)).item() == W
    assert [g.item() for g in rg.grads(product)([number(X), number(W)])] == [W, X]
    assert seen == [(True, False), (True, True), (True, True)]


def test_an_answer_that_is_not_needed_is_ignored():
    for answer in (7.0, rg.ones(5)):
        with rg.gradient_override_map({"Mul": lambda dy, a, b, needs, c=answer: (dy * b, c)}):
            assert rg.grad(lambda x: x * number(W))(number(X)).item() == W


@rg.name_scope("whole_call")
def whole(a, b):
    return a * b


@pytest.mark.parametrize("host", ["torch", "jax", "custom torch", "whole call"])
def test_other_hosts(host):
    product = Product()
    if host == "torch":
        with regrad.torch.gradient_override_map({"Mul": product.rule}):
            assert by_torch(lambda x: x * torch.tensor(W), X) == W
    elif host == "jax":
        f = rg.jax.override(lambda x: x * jnp.asarray(W), {"Mul": product.rule})
        assert by_jax(f, X) == W
    elif host == "custom torch":

        @regrad.torch.custom_grad
        def f(a, b):
            return a * b, lambda dy, needs: product.rule(dy, a, b, needs)

        assert by_torch(lambda x: f(x, torch.tensor(W)), X) == W
    else:
        with rg.gradient_override_map({rg.at("whole_call"): product.rule}):
            assert rg.grad(lambda x: whole(x, number(W)))(number(X)).item() == W
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
    with pytest.raises(ArgumentError, match="with needs last if it asks for that"):
        rg.grad(f)(X)
    saved = rg.custom_grad(
        lambda x, save: (save([x]), (x * 1, lambda dy, saved, needs: dy * saved[0] * needs[0]))[1]
    )
    assert rg.grad(saved)(X).item() == X


# -- where errors point ----------------------------------------------------------------------------


def wrong_gradient(dy):
    return rg.ones(7)


LINE = re.escape(f"wrong_gradient, {__file__}:{wrong_gradient.__code__.co_firstlineno})")


@roads
def test_errors_name_the_gradient_function(road):
    f = rg.custom_grad(lambda x: (x * 1, wrong_gradient))
    with pytest.raises(RuleError, match=LINE):
        by_road(road, f, X)


@roads
def test_errors_name_the_rule(road):
    with (
        rg.gradient_override_map({"Sin": rg.rules.optional(wrong_gradient)}),
        pytest.raises(RuleError, match=LINE),
    ):
        by_road(road, rg.sin, X)


def test_errors_of_tensorflows_custom_gradient():
    with tf.Graph().as_default():
        x = tf.constant(X)
        for answer, words in ((wrong_gradient, LINE), (lambda dy: [], "Num gradients 0.*<lambda>")):
            f = tf.custom_gradient(lambda x, answer=answer: (x * 1.0, answer))
            with pytest.raises(RuleError, match=words):
                tf.gradients(f(x), x)
