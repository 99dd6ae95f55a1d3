"""`rules.vjp_of`: the gradient of another function as a rule, in regrad, PyTorch and JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import regrad as rg
import regrad.torch
import regrad.v1 as tf
from regrad.errors import ArgumentError, RuleError
from regrad.rules import vjp_of

X = np.array([-1.0, 0.3, 2.0])
S = 1 / (1 + np.exp(-X))
FIRST, SECOND = S * (1 - S), S * (1 - S) * (1 - 2 * S)  # of the sigmoid, by hand


@pytest.fixture(autouse=True)
def doubles():
    with jax.enable_x64(True):
        yield


def close(got, expected):
    np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-12, atol=1e-12)


def test_in_regrad():
    def f(x):
        with rg.gradient_override_map({"Step": vjp_of(rg.nn.sigmoid)}):
            return rg.step(x)

    x = rg.asarray(X)
    close(rg.grad(f)(x).numpy(), FIRST)
    close(rg.grad(lambda x: rg.grad(f)(x).sum())(x).numpy(), SECOND)
    close(rg.jit(rg.grad(f))(x).numpy(), FIRST)
    close(rg.vmap(rg.grad(f))(x).numpy(), FIRST)


def test_in_a_graph():
    with tf.Graph().as_default() as graph, tf.Session() as session:
        x = tf.placeholder(tf.float64, [None])
        with graph.gradient_override_map({"Sign": vjp_of(rg.nn.sigmoid)}):
            y = tf.sign(x)
        close(session.run(tf.gradients(y, x)[0], {x: X}), FIRST)


WRITTEN = {
    "torch's function": torch.sigmoid,
    "with torch": lambda x: torch.sigmoid(x),
    "regrad's function": rg.nn.sigmoid,
    "with regrad": lambda x: rg.nn.sigmoid(x),
    "with operators": lambda x: 1 / (1 + np.e ** (-x)),
}


@pytest.mark.versions
@pytest.mark.parametrize("name", WRITTEN)
def test_in_torch(name):
    rule = vjp_of(WRITTEN[name])
    torch._dynamo.reset()
    for way in (torch.sign, torch.compile(torch.sign, backend="aot_eager", fullgraph=True)):
        x = torch.tensor(X, requires_grad=True)
        with regrad.torch.gradient_override_map({"Sign": rule}) as used:
            y = way(x)
        (dx,) = torch.autograd.grad(y.sum(), x, create_graph=way is torch.sign)
        used.assert_fired()
        close(dx.detach(), FIRST)
        if way is torch.sign:
            close(torch.autograd.grad(dx.sum(), x)[0], SECOND)
            close(torch.func.vmap(torch.func.grad(torch.sigmoid))(x.detach()), FIRST)
    with regrad.torch.gradient_override_map({"Sign": rule}):
        close(torch.func.vmap(torch.func.grad(torch.sign))(torch.tensor(X)), FIRST)


@pytest.mark.parametrize("g", [jax.nn.sigmoid, lambda x: jax.nn.sigmoid(x), rg.nn.sigmoid])
def test_in_jax(g):
    ours = rg.jax.override(jnp.sign, {"Sign": vjp_of(g)})
    first = jax.grad(lambda x: ours(x).sum())
    close(first(X), FIRST)
    close(jax.grad(lambda x: first(x).sum())(X), SECOND)
    close(jax.jit(first)(X), FIRST)
    close(jax.vmap(jax.grad(ours))(jnp.asarray(X)), FIRST)


# -- several inputs, by name and by place ----------------------------------------------------------


def numbers(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator, requires_grad=True)


def check(key, g, f, expected, xs):
    with regrad.torch.gradient_override_map({key: vjp_of(g)}):
        y = f(*xs)
    due = torch.autograd.grad(expected(*xs).square().sum(), xs)
    weights = 2 * expected(*xs).detach()
    for a, b in zip(torch.autograd.grad((y * weights).sum(), xs), due, strict=True):
        close(a, b)


def test_the_positive_part_of_a_product():
    def positive(a, b):
        return a.clamp(min=0) @ b.clamp(min=0)

    check("MatMul", positive, torch.matmul, positive, [numbers(2, 3), numbers(3, 4)])
    by_place = lambda left, right: positive(left, right)  # noqa: E731
    check("MatMul", by_place, torch.matmul, positive, [numbers(2, 3), numbers(3, 4)])


def test_a_convolution_by_its_names():
    xs = [numbers(1, 2, 5, 5), numbers(3, 2, 2, 2), numbers(3)]

    def g(x, w, bias, strides, pad, dilations):
        return F.conv2d(x, w.clamp(min=0), bias.abs(), strides, pad, dilations)

    f = lambda x, w, b: F.conv2d(x, w, b, 2, 1)  # noqa: E731
    check("Conv2D", g, f, lambda x, w, b: g(x, w, b, 2, 1, 1), xs)


@pytest.mark.versions
def test_a_product_of_float32_is_not_of_bfloat16():
    a, b = (numbers(*s).detach().float().requires_grad_() for s in [(4, 64), (64, 4)])
    with regrad.torch.gradient_override_map({"MatMul": vjp_of(lambda a, b: a @ b)}):
        y = a @ b
    da, db = torch.autograd.grad(y.sum(), [a, b])
    due = [b.detach().double().sum(1).expand(4, 64), a.detach().double().sum(0)[:, None]]
    np.testing.assert_allclose(da, due[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(db, due[1].expand(64, 4), rtol=1e-5, atol=1e-5)


def test_an_input_that_is_not_named_has_no_gradient():
    def f(a, b):
        with rg.gradient_override_map({"Mul": vjp_of(lambda a: a * a)}):
            return a * b

    assert rg.grads(f, unconnected="zero")([3.0, 5.0])[0].item() == 6.0
    assert rg.grads(f, unconnected="zero")([3.0, 5.0])[1].item() == 0.0


def test_a_sequence():
    a, b = numbers(2), numbers(3)
    with regrad.torch.gradient_override_map(
        {"ConcatV2": vjp_of(lambda xs: torch.cat([x**2 for x in xs]))}
    ):
        y = torch.cat([a, b])
    da, db = torch.autograd.grad(y.sum(), [a, b])
    close(da, 2 * a.detach())
    close(db, 2 * b.detach())


# -- refused ---------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused():
    with pytest.raises(ArgumentError, match="vjp_of expected a function, got int"):
        vjp_of(3)
    with pytest.raises(RuleError, match="asks for 'q', which the op type 'Sign' does not have"):
        rg.gradient_override_map({"Sign": vjp_of(lambda q, z: q)}).__enter__()
    with pytest.raises(RuleError, match="cannot be called"):
        vjp_of(rg.nn.sigmoid)(1.0)


@pytest.mark.parametrize(
    ("g", "words"),
    [
        (lambda x: x.sum(), r"returned the shape \(\), expected that of the op's result, \(3,\)"),
        (lambda x: (x, x), "expected one result, like the op's, got tuple"),
    ],
)
def test_results_that_do_not_fit_are_refused(g, words):
    x = torch.tensor(X, requires_grad=True)
    with regrad.torch.gradient_override_map({"Sign": vjp_of(g)}):
        y = torch.sign(x)
    with pytest.raises(RuleError, match=words):
        y.sum().backward()


def test_one_function_is_one_rule():
    assert vjp_of(rg.nn.sigmoid) == vjp_of(rg.nn.sigmoid) != vjp_of(rg.tanh)
    assert len({vjp_of(lambda x: x) for _ in range(3)}) == 1
