"""Neural network functions: conventions at kinks, extremes, dtypes, errors, overrides inside."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
import torch
from torch.nn import functional

import regrad as rg
from regrad import nn
from regrad.errors import ArgumentError

ACTIVATIONS = [
    nn.relu, nn.relu6, nn.leaky_relu, nn.elu, nn.selu, nn.sigmoid, nn.log_sigmoid, nn.softplus,
    nn.softsign, nn.silu, nn.gelu, nn.mish, nn.hard_sigmoid, nn.hard_tanh, nn.softmax,
    nn.log_softmax,
]  # fmt: skip
SELU_AT_0 = 1.7580993408473768


def names(f):
    return getattr(f, "__name__", None)


# -- activations ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("f", "x", "slope"), [
    (nn.relu, 0.0, 0.0), (nn.relu, -0.0, 0.0), (nn.relu6, 0.0, 0.0), (nn.relu6, 6.0, 1.0),
    (nn.leaky_relu, 0.0, 0.2), (nn.elu, 0.0, 1.0), (nn.selu, 0.0, SELU_AT_0),
    (nn.softsign, 0.0, 1.0), (nn.hard_tanh, -1.0, 1.0), (nn.hard_tanh, 1.0, 1.0),
    (nn.hard_sigmoid, -3.0, 0.0), (nn.sigmoid, 0.0, 0.25), (nn.softplus, 0.0, 0.5),
], ids=names)  # fmt: skip
def test_gradient_at_the_kink(f, x, slope):
    assert float(rg.grad(f)(rg.scalar(x, dtype=np.float64))) == pytest.approx(slope, abs=1e-15)


TWO, KNOWN = rg.tensor([-1.0, 2.0]), rg.tensor([math.nan, 1.0, -1.0])
PRELU, EXCLUDED = [np.array([0.0, 2.0]), np.array([0.3, 0.4])], rg.tensor([0.0, -math.inf, 0.0])
FAR = np.array([10000.0, 10001.0, 10002.0], np.float32)
VALUES = {
    "prelu at 0 by x": (lambda: rg.grads(nn.prelu)(PRELU)[0], [0.3, 1.0]),
    "prelu at 0 by alpha": (lambda: rg.grads(nn.prelu)(PRELU)[1], [0, 0]),
    "relu of NaN": (lambda: nn.relu(KNOWN), [math.nan, 1, 0]),
    "the gradient of relu at NaN": (lambda: rg.grad(nn.relu)(KNOWN), [math.nan, 1, 0]),
    "relu before an infinite gradient": (
        lambda: rg.grad(nn.relu)(TWO, rg.tensor([math.inf, math.inf])), [0, math.inf]),
    "relu, twice": (lambda: rg.grad(lambda x: rg.grad(nn.relu)(x) * x)(TWO), [0, 1]),
    "log_softmax where softmax is 0": (lambda: nn.log_softmax([0.0, 1000.0]), [-1000, 0]),
    "softmax with excluded classes": (lambda: nn.softmax(EXCLUDED), [0.5, 0, 0.5]),
    "the gradient of softmax with excluded classes": (
        lambda: rg.grad(nn.softmax)(EXCLUDED, dy=[1.0, 0.0, 0.0]), [0.25, 0, -0.25]),
    "batch_norm far from 0": (
        lambda: nn.batch_norm(FAR, np.float32(10001), np.float32(1), epsilon=0.0), [-1, 0, 1]),
    "batch_norm of numbers": (
        lambda: nn.batch_norm([1.0, 3.0], 2.0, 4.0, scale=2.0, epsilon=0.0), [-1, 1]),
    "l2_normalize of 0": (lambda: nn.l2_normalize(rg.zeros((3,))), [0, 0, 0]),
    "the gradient of l2_normalize at 0 is finite": (
        lambda: np.isfinite(rg.grad(nn.l2_normalize)(rg.zeros((3,))).numpy()), [True] * 3),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_values(name):
    call, due = VALUES[name]
    np.testing.assert_array_equal(np.asarray(call()), due)


def test_relu_returns_the_zero_of_the_library_that_holds_the_data():
    zeros = np.array([-0.0, 0.0], np.float32)
    for data, theirs in [
        (zeros, np.maximum(zeros, 0)),
        (jax.numpy.asarray(zeros), jax.nn.relu(zeros)),
        (torch.from_numpy(zeros), torch.relu(torch.from_numpy(zeros))),
    ]:
        assert str(nn.relu(rg.asarray(data)).tolist()) == str(theirs.tolist())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("f", ACTIVATIONS, ids=names)
def test_large_inputs_give_finite_values_and_gradients(f, dtype):
    x = rg.tensor([-1000.0, -100.0, -20.0, 0.0, 20.0, 100.0, 1000.0], dtype=dtype)

    first = lambda x: rg.grad(f)(x)  # noqa: E731

    second = lambda x: rg.grad(first, unconnected="zero")(x)  # noqa: E731

    for g in (f, first, second):
        y = g(x)
        assert y.dtype == dtype
        assert np.isfinite(y.numpy()).all(), g


@pytest.mark.parametrize("f", ACTIVATIONS, ids=names)
def test_integers_become_floats_where_the_values_do(f):
    y = f(np.array([-3, 0, 7]))
    kept = f in (nn.relu, nn.relu6, nn.hard_tanh)
    assert y.dtype == (np.int64 if kept else np.float32)


@pytest.mark.parametrize("f", ACTIVATIONS, ids=names)
def test_nothing_comes_back_as_nothing(f):
    assert f(rg.zeros((0, 3))).shape == (0, 3)
    assert rg.grad(f)(rg.zeros((0, 3))).shape == (0, 3)


def test_small_values_keep_their_digits():
    x = np.array([-30.0, -1e-10, 1e-10])
    np.testing.assert_allclose(nn.softplus(x).numpy()[0], math.log1p(math.exp(-30)), rtol=1e-14)
    np.testing.assert_allclose(nn.sigmoid(x).numpy()[0], math.exp(-30), rtol=1e-12)
    np.testing.assert_allclose(nn.elu(x).numpy()[1], -1e-10, rtol=1e-9)
    np.testing.assert_allclose(nn.gelu(-10.0).numpy(), -7.61985302416e-23, rtol=1e-5)


# -- normalisation -------------------------------------------------------------------------------


def test_layer_norm_in_training_has_mean_0_and_variance_1():
    x = np.arange(12.0).reshape(2, 6)
    y = nn.layer_norm(x, epsilon=0.0).numpy()
    np.testing.assert_allclose(y.mean(-1), 0, atol=1e-12)
    np.testing.assert_allclose(y.std(-1), 1, rtol=1e-12)


# -- dropout and embeddings ----------------------------------------------------------------------


def test_dropout_keeps_the_mean_and_masks_the_gradient():
    x = rg.ones((10000,))
    y = nn.dropout(x, 0.25, 0)
    assert set(y.tolist()) == {0.0, float(np.float32(1) / np.float32(0.75))}
    assert abs(y.numpy().mean() - 1) < 0.02
    dx = rg.grad(lambda x: nn.dropout(x, 0.25, 0))(x)
    np.testing.assert_array_equal(dx.numpy(), y.numpy())


def test_dropout_draws_anew_from_a_generator_only():
    x, generator, key = rg.ones((50,)), np.random.default_rng(0), jax.random.key(0)
    assert nn.dropout(x, 0.5, generator).tolist() != nn.dropout(x, 0.5, generator).tolist()
    assert nn.dropout(x, 0.5, key).tolist() == nn.dropout(x, 0.5, key).tolist()


def test_dropout_of_whole_channels():
    y = nn.dropout(rg.ones((2, 5, 3)), 0.5, 1, noise_shape=(2, 1, 3)).numpy()
    assert (y == y[:, :1]).all()


def test_dropout_of_rate_0_is_x_and_of_rate_1_an_error():
    x = rg.ones((3,))
    assert nn.dropout(x, 0.0, 0).tolist() == [1, 1, 1]
    for rate in (1.0, -0.1, rg.scalar(0.5)):
        with pytest.raises(ArgumentError, match=r"rate must be a number in \[0, 1\)"):
            nn.dropout(x, rate, 0)


def test_dropout_under_jit_refuses_a_generator():

    with pytest.raises(ArgumentError, match="cannot be used under jit"):
        jax.jit(lambda x: nn.dropout(x, 0.5, np.random.default_rng(0))._data)(np.ones(3))


def test_embedding_adds_the_gradients_of_repeated_ids():
    table = np.arange(6.0).reshape(3, 2)
    ids = np.array([[0, 2], [2, 2]])
    assert nn.embedding(table, ids).shape == (2, 2, 2)
    dx = rg.grad(lambda table: nn.embedding(table, ids))(table)
    assert dx.tolist() == [[1, 1], [0, 0], [3, 3]]
    assert nn.embedding(table, [1, 0]).tolist() == [[2, 3], [0, 1]]


# -- attention -----------------------------------------------------------------------------------


def qkv(*shape):
    random = np.random.default_rng(0)
    return [random.standard_normal(shape) for _ in range(3)]


def test_a_query_that_sees_no_key_gets_zeros_and_no_gradient():
    mask = np.array([[False, False, False], [True, True, False], [True, True, True]])
    arrays = qkv(2, 3, 4)

    f = lambda q, k, v: nn.scaled_dot_product_attention(q, k, v, mask)  # noqa: E731

    tensors = [torch.asarray(a).requires_grad_() for a in arrays]
    due = functional.scaled_dot_product_attention(*tensors, attn_mask=torch.asarray(mask))
    due.sum().backward()
    y = f(*arrays)
    assert (y.numpy()[:, 0] == 0).all()
    np.testing.assert_allclose(y.numpy(), due.detach().numpy(), atol=1e-12)
    for dx, t in zip(rg.grads(f)(arrays), tensors, strict=True):
        np.testing.assert_allclose(dx.numpy(), t.grad.numpy(), atol=1e-12)


def test_a_mask_and_causality_both_hold():
    q, k, v = qkv(1, 3, 4)
    mask = np.array([[False, True, True], [True, True, True], [False, True, True]])
    y = nn.scaled_dot_product_attention(q, k, v, mask, is_causal=True)
    due = nn.scaled_dot_product_attention(q, k, v, mask & np.tri(3, dtype=bool))
    np.testing.assert_array_equal(y.numpy(), due.numpy())
    assert (y.numpy()[:, 0] == 0).all()


def test_attention_in_half_precision_gives_no_warning():
    arrays = [a.astype(np.float16) for a in qkv(2, 3, 4)]
    y = nn.scaled_dot_product_attention(*arrays, is_causal=True)
    assert y.dtype == np.float16
    assert np.isfinite(y.numpy()).all()


def test_softmax_can_be_overridden_inside_attention():
    q, k, v = (rg.tensor(a) for a in qkv(1, 2, 3))
    with rg.gradient_override_map({"Softmax": lambda dy: rg.zeros_like(dy)}) as used:
        dq, _, dv = rg.grads(nn.scaled_dot_product_attention)([q, k, v])
    used.assert_fired()
    assert not dq.numpy().any()
    assert dv.numpy().any()
