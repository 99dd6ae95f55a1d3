"""Gradients of vector quantizers against explicit matrices, on each host, to second order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import regrad as rg
import regrad.jax
import regrad.torch
from regrad.errors import ArgumentError
from regrad.rules import vq
from tests.helpers import differences

RNG = np.random.default_rng(3)
CODES = RNG.normal(size=(5, 4))
E = RNG.normal(size=(6, 4))
W = RNG.normal(size=(6, 4))  # (none like another)
Q = CODES[np.argmin(((E[:, None] - CODES) ** 2).sum(-1), -1)]


def matrix(e, q):
    """λ R, as the paper has it: a reflection at the middle, and one at q."""
    e_hat, q_hat = e / np.linalg.norm(e), q / np.linalg.norm(q)
    r = (e_hat + q_hat) / np.linalg.norm(e_hat + q_hat)
    turn = np.eye(len(e)) - 2 * np.outer(r, r) + 2 * np.outer(q_hat, e_hat)
    return np.linalg.norm(q) / np.linalg.norm(e) * turn


MATRICES = np.stack([matrix(e, q) for e, q in zip(E, Q, strict=True)])


def test_the_matrices_turn_the_inputs_to_the_codes():
    np.testing.assert_allclose(np.einsum("nij,nj->ni", MATRICES, E), Q, atol=1e-12)
    turns = MATRICES / (np.linalg.norm(Q, axis=1) / np.linalg.norm(E, axis=1))[:, None, None]
    np.testing.assert_allclose(turns @ turns.transpose(0, 2, 1), [np.eye(4)] * 6, atol=1e-12)
    np.testing.assert_allclose(np.linalg.det(turns), 1.0)


def nearest(e, o):
    codes = o.asarray(CODES)
    return codes[o.argmin(((e[:, None] - codes) ** 2).sum(-1), -1)]


def by_regrad(f):
    def loss(e):
        q = f(e, rg.tensor(Q))
        return rg.sum(q * q * q * rg.tensor(W)), q

    e = rg.tensor(E)
    first = rg.grad(lambda e: loss(e)[0])
    return loss(e)[1].numpy(), first(e).numpy(), rg.grad(lambda e: rg.sum(first(e)))(e).numpy()


def by_torch(f, compiled=False):
    e = torch.tensor(E, requires_grad=True)
    made = torch.compile(f, backend="aot_eager", fullgraph=True) if compiled else f
    q = made(e, torch.tensor(Q))
    (first,) = torch.autograd.grad((q**3 * torch.tensor(W)).sum(), e, create_graph=not compiled)
    second = None if compiled else torch.autograd.grad(first.sum(), e)[0].numpy()
    return q.detach().numpy(), first.detach().numpy(), second


def by_jax(f, jit=False):
    with jax.enable_x64(True):
        loss = lambda e: (f(e, jnp.array(Q)) ** 3 * W).sum()  # noqa: E731
        first = jax.grad(loss)
        second = jax.grad(lambda e: first(e).sum())
        if jit:
            first, second = jax.jit(first), jax.jit(second)
        e = jnp.array(E)
        return f(e, jnp.array(Q)), first(e), second(e)


HOSTS = {
    "regrad": by_regrad, "torch": by_torch, "jax": by_jax,
    "regrad, jit": lambda f: by_regrad(rg.jit(f)), "jax, jit": lambda f: by_jax(f, jit=True),
    "torch, compiled": lambda f: by_torch(f, compiled=True),
}  # fmt: skip
FUNCTIONS = {"rotation": (vq.rotation, MATRICES), "straight_through": (
    vq.straight_through, np.stack([np.eye(4)] * 6))}  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_against_matrices(name, host):
    f, matrices = FUNCTIONS[name]
    with jax.enable_x64(True):
        value, first, second = HOSTS[host](f)
    np.testing.assert_array_equal(value, Q)
    np.testing.assert_allclose(first, np.einsum("nij,ni->nj", matrices, 3 * Q**2 * W), atol=1e-12)
    bent = np.einsum("nij,ni,nik->njk", matrices, 6 * Q * W, matrices)
    if second is not None:
        np.testing.assert_allclose(second, bent.sum(-1), atol=1e-11)


def test_against_differences_of_the_turned_input():
    """The gradient is the derivative of what the matrices do, with the matrices held."""
    f = lambda e: (np.einsum("nij,nj->ni", MATRICES, e) ** 3 * W).sum()  # noqa: E731
    expected = differences.jacobian(f, E)
    np.testing.assert_allclose(by_regrad(vq.rotation)[1], expected, rtol=1e-7)


# -- the rule, in programs that are not edited -----------------------------------------------------


class Quantizer(torch.nn.Module):
    """Somebody's, with a straight-through estimator of its own."""

    def forward(self, e):
        q = nearest(e, torch)
        return e + (q - e).detach()


def in_torch():
    net = torch.nn.Sequential(torch.nn.Identity(), Quantizer())
    e = torch.tensor(E, requires_grad=True)
    rules = {rg.at("1"): vq.rotation_rule()}
    with regrad.torch.gradient_override_map(rules, model=net) as used:
        y = net(e)
    (dx,) = torch.autograd.grad((y**3 * torch.tensor(W)).sum(), e)
    used.assert_fired()
    return dx


@jax.jit
def quantizer_of_jax(e):
    q = nearest(e, jnp)
    return e + jax.lax.stop_gradient(q - e)


def in_jax():
    with jax.enable_x64(True):
        f = rg.jax.override(quantizer_of_jax, {quantizer_of_jax: vq.rotation_rule()})
        return jax.jit(jax.grad(lambda e: (f(e) ** 3 * W).sum()))(jnp.array(E))


def in_regrad():
    """As a value: the tanh of a model is quantized instead."""
    quantized = rg.replace(lambda x: rg.tensor(Q) + 0 * x, vq.rotation_rule())
    with rg.gradient_override_map({"Tanh": quantized}, values=True):
        return rg.grad(lambda e: rg.sum(rg.tanh(e) ** 3 * rg.tensor(W)))(rg.tensor(E)).numpy()


@pytest.mark.parametrize("run", [in_torch, in_jax, in_regrad])
def test_the_rule_in_models(run):
    expected = np.einsum("nij,ni->nj", MATRICES, 3 * Q**2 * W)
    np.testing.assert_allclose(run(), expected, atol=1e-12)


# -- special vectors, axes, misuse -----------------------------------------------------------------


def gradient(e, q, dy, axis=-1):
    f = lambda e: rg.sum(vq.rotation(e, rg.tensor(q), axis) * rg.tensor(dy))  # noqa: E731
    return rg.grad(f)(rg.tensor(np.array(e))).numpy()


def test_vectors_without_a_direction():
    dy = np.array([3.0, 5.0])
    for q in ([1.0, 2.0], [0.0, 0.0]):
        np.testing.assert_allclose(gradient([0.0, 0.0], np.array(q), dy), dy)
    np.testing.assert_allclose(gradient([1.0, 2.0], np.zeros(2), dy), 0.0)
    # opposite: any plane will do; the length and the value are right
    opposite = gradient([1.0, 0.0], np.array([-2.0, 0.0]), dy)
    np.testing.assert_allclose(abs(opposite), [6.0, 10.0])


def test_another_axis():
    dy = W.T.copy()
    found = gradient(E.T.copy(), Q.T.copy(), dy, axis=0)
    np.testing.assert_allclose(found.T, np.einsum("nij,ni->nj", MATRICES, W), atol=1e-12)


def test_bfloat16_in_torch():
    e = torch.tensor(E, dtype=torch.bfloat16, requires_grad=True)
    y = vq.rotation(e, torch.tensor(Q, dtype=torch.bfloat16))
    (dx,) = torch.autograd.grad(y.sum(), e)
    assert dx.dtype == torch.bfloat16
    expected = np.einsum("nij,ni->nj", MATRICES, np.ones((6, 4)))
    np.testing.assert_allclose(dx.float(), expected, atol=0.1)


@pytest.mark.parametrize(("call", "words"), [
    (lambda: vq.rotation(rg.zeros(3), rg.zeros(2)),
     r"rotation: expected vectors of one shape, got \(3,\) and \(2,\)"),
    (lambda: vq.straight_through(rg.zeros(3), rg.zeros((1, 3))),
     "straight_through: expected vectors of one shape"),
    (lambda: vq.rotation(rg.zeros(3), rg.zeros(3), 1),
     "rotation: axis is the number of an axis of an array of 1, got 1"),
    (lambda: vq.rotation_rule("last"), "rotation_rule: axis is the number of an axis, got 'last'"),
    (lambda: vq.rotation(rg.zeros(3)), "rotation: missing a required argument: 'q'"),
])  # fmt: skip
def test_bad_arguments_are_refused(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


def test_a_rule_on_an_op_of_another_shape():
    words = "rotation_rule: expected vectors of one shape"
    with (
        rg.gradient_override_map({"Sum": vq.rotation_rule()}),
        pytest.raises(ArgumentError, match=words),
    ):
        rg.grad(rg.sum)(rg.ones(3))
