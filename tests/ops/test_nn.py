"""Neural network functions, losses and random numbers: kinks, extremes, dtypes, weights, keys."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import torch
from torch.nn import functional

import regrad as rg
from regrad import losses, nn, random
from regrad.errors import ArgumentError, ShapeError, UnusedOverrideWarning
from tests.helpers.op_rows import alike, firing, outcomes, slope
from tests.helpers.rows import refused

ACTIVATIONS = [
    nn.relu, nn.relu6, nn.leaky_relu, nn.elu, nn.selu, nn.sigmoid, nn.log_sigmoid, nn.softplus,
    nn.softsign, nn.silu, nn.gelu, nn.mish, nn.hard_sigmoid, nn.hard_tanh, nn.softmax,
    nn.log_softmax,
]  # fmt: skip
SELU_AT_0, NAN, INF = 1.7580993408473768, math.nan, math.inf
sparse = nn.sparse_softmax_cross_entropy_with_logits


def names(f):
    return getattr(f, "__name__", None)


def at(x, f, **options):
    """The gradient of a loss by its prediction, or of a function, at a number."""
    return lambda: slope(lambda x: f(x, **options))(rg.scalar(x, dtype=np.float64))


def of_loss(loss, label, x, **options):
    return lambda: slope(lambda p: loss([label], p, **options))(rg.asarray(np.array([x])))


def curvature(loss, label):
    return lambda: slope(slope(lambda x: loss(label, x)))(rg.asarray(np.array(0.0)))


# -- values and gradients --------------------------------------------------------------------------

TWO, KNOWN = rg.tensor([-1.0, 2.0]), rg.tensor([NAN, 1.0, -1.0])
PRELU, EXCLUDED = [np.array([0.0, 2.0]), np.array([0.3, 0.4])], rg.tensor([0.0, -INF, 0.0])
FAR, UNIT = np.array([10000.0, 10001.0, 10002.0], np.float32), rg.zeros((3,))
TABLE, IDS = np.arange(6.0).reshape(3, 2), np.array([[0, 2], [2, 2]])
BYTES = np.array([1, 2], "u1"), np.array([3, 250], "u1")
LABELS, LOGITS = np.array([[0.3, 0.7]]), np.array([[1.0, 2.0]])
X, HALVES = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[0.0], [2.0]], np.float32)
FLOATS = X.astype(np.float32)
KINKS = [
    (nn.relu, 0.0, 0.0), (nn.relu, -0.0, 0.0), (nn.relu6, 0.0, 0.0), (nn.relu6, 6.0, 1.0),
    (nn.leaky_relu, 0.0, 0.2), (nn.elu, 0.0, 1.0), (nn.selu, 0.0, SELU_AT_0),
    (nn.softsign, 0.0, 1.0), (nn.hard_tanh, -1.0, 1.0), (nn.hard_tanh, 1.0, 1.0),
    (nn.hard_sigmoid, -3.0, 0.0), (nn.sigmoid, 0.0, 0.25), (nn.softplus, 0.0, 0.5),
]  # fmt: skip
REDUCED = [  # weights, a reduction, and what TensorFlow.js gives
    (None, "sum_by_nonzero_weights", 2.5), (None, "mean", 2.5), (None, "sum", 10),
    (None, "none", [[1, 2], [3, 4]]), (0.5, "sum_by_nonzero_weights", 1.25), (0.5, "mean", 2.5),
    (0.5, "sum", 5), ([[0.0], [2.0]], "sum_by_nonzero_weights", 7), ([[0.0], [2.0]], "mean", 3.5),
    ([[0.0], [2.0]], "sum", 14), ([[0.0], [2.0]], "none", [[0, 0], [6, 8]]),
    ([0.0, 2.0], "sum_by_nonzero_weights", 6),
    ([[0.0, 1.0], [1.0, 2.0]], "sum_by_nonzero_weights", 13 / 3),
    ([[0.0, 1.0], [1.0, 2.0]], "mean", 13 / 4),
    ([[True, False], [True, True]], "sum_by_nonzero_weights", 8 / 3),
]  # fmt: skip
test_values = outcomes({
    **{f"{f.__name__} at {x}": (at(x, f), due) for f, x, due in KINKS},
    "prelu at 0 by x": (lambda: rg.grads(nn.prelu)(PRELU)[0], [0.3, 1.0]),
    "prelu at 0 by alpha": (lambda: rg.grads(nn.prelu)(PRELU)[1], [0, 0]),
    "relu of NaN": (lambda: nn.relu(KNOWN), [NAN, 1, 0]),
    "the gradient of relu at NaN": (lambda: rg.grad(nn.relu)(KNOWN), [NAN, 1, 0]),
    "relu before an infinite gradient": (
        lambda: rg.grad(nn.relu)(TWO, rg.tensor([INF, INF])), [0, INF]),
    "relu, twice": (lambda: slope(lambda x: rg.grad(nn.relu)(x) * x)(TWO), [0, 1]),
    "log_softmax where softmax is 0": (lambda: nn.log_softmax([0.0, 1000.0]), [-1000, 0]),
    "softmax with excluded classes": (lambda: nn.softmax(EXCLUDED), [0.5, 0, 0.5]),
    "the gradient of softmax with excluded classes": (
        lambda: rg.grad(nn.softmax)(EXCLUDED, dy=[1.0, 0.0, 0.0]), [0.25, 0, -0.25]),
    "batch_norm far from 0": (
        lambda: nn.batch_norm(FAR, np.float32(10001), np.float32(1), epsilon=0.0), [-1, 0, 1]),
    "batch_norm of numbers": (
        lambda: nn.batch_norm([1.0, 3.0], 2.0, 4.0, scale=2.0, epsilon=0.0), [-1, 1]),
    "l2_normalize of 0": (lambda: nn.l2_normalize(UNIT), [0, 0, 0]),
    "the gradient of l2_normalize at 0 is finite": (
        lambda: np.isfinite(rg.grad(nn.l2_normalize)(UNIT).numpy()), [True] * 3),
    "embedding": (lambda: nn.embedding(TABLE, [1, 0]), [[2, 3], [0, 1]]),
    "embedding of rows": (lambda: nn.embedding(TABLE, IDS).shape, (2, 2, 2)),
    "repeated ids": (lambda: slope(lambda t: nn.embedding(t, IDS))(TABLE),
                     [[1, 1], [0, 0], [3, 3]]),
    "dropout of rate 0": (lambda: nn.dropout(rg.ones((3,)), 0.0, 0), [1, 1, 1]),
    # losses
    **{f"{how} of weights {w}": (
        lambda w=w, how=how: [y := losses.compute_weighted_loss(X, w, how), y.dtype],
        [due, "float64"]) for w, how, due in REDUCED},
    "a weight of 0": (lambda: slope(lambda w: losses.compute_weighted_loss(FLOATS, w))(HALVES),
                      [[1.5], [3.5]]),
    "small integers do not wrap": (lambda: losses.absolute_difference(*BYTES), 125),
    "squares of small integers": (lambda: losses.mean_squared_error(*BYTES).dtype, "float32"),
    **{f"{loss.__name__} of {label}, {x} {options}": (of_loss(loss, label, x, **options), [due])
       for loss, label, x, options, due in [
           (losses.absolute_difference, 1.0, 1.0, {}, 0), (losses.hinge_loss, 1.0, 1.0, {}, 0),
           (losses.huber_loss, 1.0, 1.0, {}, 0), (losses.huber_loss, 1.0, 3.0, {"delta": 2.0}, 2),
           (losses.huber_loss, 3.0, 1.0, {"delta": 2.0}, -2),
           (losses.sigmoid_cross_entropy, 1.0, 0.0, {}, -0.5)]},
    "the curvature of huber_loss": (curvature(losses.huber_loss, 0.0), 1),
    "of cross entropy": (curvature(losses.sigmoid_cross_entropy, 1.0), 0.25),
    "the gradient by labels": (
        lambda: slope(lambda y: losses.softmax_cross_entropy(y, LOGITS))(LABELS),
        -(LOGITS - np.log(np.exp(LOGITS).sum()))),
    "a confident sigmoid": (
        lambda: losses.sigmoid_cross_entropy([1.0, 0.0], np.array([40.0, -40.0]), reduction="none"),
        [np.exp(-40.0)] * 2),
    "a confident softmax": (
        lambda: losses.softmax_cross_entropy([[0.0, 1.0]], np.array([[0.0, 1000.0]])), 0),
    **{f"integer logits, {kind.__name__}": (
        lambda kind=kind: sparse([1, 2], kind([[1, 2, 3], [4, 5, 6]])).dtype, "float32")
       for kind in (list, np.array)},
    # random numbers
    "shapes of parameters": (
        lambda: random.normal(0, None, np.zeros((2, 1)), np.ones(3)).shape, (2, 3)),
    "dtypes of parameters": (lambda: random.normal(0, None, np.zeros((2, 1))).dtype, "float64"),
    "a dtype of one's own": (
        lambda: random.normal(0, None, rg.zeros((2,)), dtype=np.float64).dtype, "float64"),
    "certain draws": (lambda: random.bernoulli(0, None, [0.0, 1.0]), [False, True]),
    "draws of a dtype": (lambda: random.bernoulli(0, (3,), 1.0, dtype=rg.float32), [1, 1, 1]),
}, rtol=1e-12, atol=1e-15)  # fmt: skip


def attended(q):
    return nn.scaled_dot_product_attention(q, *qkv(1, 2, 3)[1:])


def qkv(*shape):
    draw = np.random.default_rng(0)
    return [draw.standard_normal(shape) for _ in range(3)]


ONE_HOT = np.array([[0.0, 1.0]])
test_overrides_fire_inside = firing({
    "attention": ("Softmax", attended, qkv(1, 2, 3)[0]),
    "cross entropy": ("LogSoftmax", lambda x: losses.softmax_cross_entropy(ONE_HOT, x), LOGITS),
})  # fmt: skip


# -- activations -----------------------------------------------------------------------------------


def test_relu_returns_the_zero_of_the_library_that_holds_the_data():
    zeros = np.array([-0.0, 0.0], np.float32)
    for data, theirs in [
        (zeros, np.maximum(zeros, 0)),
        (jnp.asarray(zeros), jax.nn.relu(zeros)),
        (torch.from_numpy(zeros), torch.relu(torch.from_numpy(zeros))),
    ]:
        assert str(nn.relu(rg.asarray(data)).tolist()) == str(theirs.tolist())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("f", ACTIVATIONS, ids=names)
def test_large_inputs_give_finite_values_and_gradients(f, dtype):
    x = rg.tensor([-1000.0, -100.0, -20.0, 0.0, 20.0, 100.0, 1000.0], dtype=dtype)
    for g in (f, slope(f), slope(slope(f))):
        y = g(x)
        assert y.dtype == dtype
        assert np.isfinite(y.numpy()).all(), g


@pytest.mark.parametrize("f", ACTIVATIONS, ids=names)
def test_integers_become_floats_where_the_values_do_and_nothing_stays_nothing(f):
    kept = f in (nn.relu, nn.relu6, nn.hard_tanh)
    assert f(np.array([-3, 0, 7])).dtype == (np.int64 if kept else np.float32)
    assert f(rg.zeros((0, 3))).shape == slope(f)(rg.zeros((0, 3))).shape == (0, 3)


def test_small_values_keep_their_digits():
    x = np.array([-30.0, -1e-10, 1e-10])
    np.testing.assert_allclose(nn.softplus(x).numpy()[0], math.log1p(math.exp(-30)), rtol=1e-14)
    np.testing.assert_allclose(nn.sigmoid(x).numpy()[0], math.exp(-30), rtol=1e-12)
    np.testing.assert_allclose(nn.elu(x).numpy()[1], -1e-10, rtol=1e-9)
    np.testing.assert_allclose(nn.gelu(-10.0).numpy(), -7.61985302416e-23, rtol=1e-5)


def test_layer_norm_in_training_has_mean_0_and_variance_1():
    y = nn.layer_norm(np.arange(12.0).reshape(2, 6), epsilon=0.0).numpy()
    alike([y.mean(-1), y.std(-1)], [[0, 0], [1, 1]], atol=1e-12)


# -- dropout ---------------------------------------------------------------------------------------


def test_dropout_keeps_the_mean_and_masks_the_gradient():
    x = rg.ones((10000,))
    y = nn.dropout(x, 0.25, 0)
    assert set(y.tolist()) == {0.0, float(np.float32(1) / np.float32(0.75))}
    assert abs(y.numpy().mean() - 1) < 0.02
    alike(slope(lambda x: nn.dropout(x, 0.25, 0))(x), y.numpy())
    channels = nn.dropout(rg.ones((2, 5, 3)), 0.5, 1, noise_shape=(2, 1, 3)).numpy()
    assert (channels == channels[:, :1]).all()


def test_dropout_of_rate_1_is_an_error():
    for rate in (1.0, -0.1, rg.scalar(0.5)):
        call = lambda rate=rate: nn.dropout(rg.ones((3,)), rate, 0)  # noqa: E731
        refused(call, ArgumentError, r"rate must be a number in \[0, 1\)")


# -- attention -------------------------------------------------------------------------------------


def test_a_query_that_sees_no_key_gets_zeros_and_no_gradient():
    mask = np.array([[False, False, False], [True, True, False], [True, True, True]])
    arrays = qkv(2, 3, 4)
    f = lambda q, k, v: nn.scaled_dot_product_attention(q, k, v, mask)  # noqa: E731
    tensors = [torch.asarray(a).requires_grad_() for a in arrays]
    due = functional.scaled_dot_product_attention(*tensors, attn_mask=torch.asarray(mask))
    due.sum().backward()
    y = f(*arrays)
    assert (y.numpy()[:, 0] == 0).all()
    alike([y, *rg.grads(f)(arrays)], [due.detach().numpy(), *[t.grad.numpy() for t in tensors]],
          atol=1e-12)  # fmt: skip


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


# -- losses ----------------------------------------------------------------------------------------

PAIRED = pytest.mark.parametrize("loss", [
    losses.absolute_difference, losses.mean_squared_error, losses.huber_loss, losses.hinge_loss,
    losses.log_loss, losses.sigmoid_cross_entropy, losses.softmax_cross_entropy,
], ids=names)  # fmt: skip


def test_an_unknown_reduction_is_refused_with_the_list():
    error = refused(lambda: losses.mean_squared_error([1.0], [2.0], None, "sums"), ArgumentError)
    assert str(error) == (
        "mean_squared_error: there is no reduction 'sums'. Did you mean 'sum'? The reductions are "
        "'sum_by_nonzero_weights', 'mean', 'sum', 'none'."
    )
    refused(lambda: losses.huber_loss([1.0], [2.0], None, 1.0), ArgumentError,
            r"there is no reduction 1\.0")  # fmt: skip


@PAIRED
def test_labels_and_predictions_must_have_one_shape(loss):
    error = refused(lambda: loss(np.ones((2, 3)), np.ones((3,))), ShapeError)
    assert str(error) == (
        f"{loss.__name__}: labels and predictions must have one shape, got labels (2, 3) and "
        "predictions (3,)"
    )


@PAIRED
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_integer_labels_take_the_dtype_of_the_predictions(loss, dtype):
    labels = np.array([[0, 1], [1, 0]], dtype=np.uint8)
    predictions = np.array([[0.2, 0.7], [0.6, 0.4]], dtype=dtype)
    y = loss(labels, predictions)
    assert y.dtype == dtype
    assert y.tolist() == loss(labels.astype(dtype), predictions).tolist()


ROWS = np.array([[1.0, 2.0, 0.5], [0.1, -1.0, 3.0]])


def test_sparse_labels():
    ids = np.array([1, 2], dtype=np.int32)
    for how in losses.REDUCTIONS:
        found = losses.sparse_softmax_cross_entropy(ids, ROWS, reduction=how)
        due = losses.softmax_cross_entropy(np.eye(3)[ids], ROWS, reduction=how)
        alike(found, due.numpy(), rtol=1e-7)


def test_sparse_cross_entropy_is_one_op():
    labels, logits = [1], rg.tensor([[1.0, 2.0]])
    loss = rg.grad(lambda x: losses.sparse_softmax_cross_entropy(labels, x))

    def rule(dy, logits, labels):
        return rg.expand_dims(dy * rg.astype(labels, dy.dtype), -1) * logits, None

    with rg.gradient_override_map({"SparseSoftmaxCrossEntropyWithLogits": rule}) as used:
        assert loss(logits).tolist() == rg.jit(loss)(logits).tolist() == [[1, 2]]
    used.assert_fired()
    with (
        pytest.warns(UnusedOverrideWarning, match="matched nothing"),
        rg.gradient_override_map({"LogSoftmax": lambda dy: 10 * dy}),
    ):
        loss(logits)


@pytest.mark.slow
def test_jax_takes_the_nearest_class():
    x = rg.asarray(jnp.asarray(ROWS.astype(np.float32)))
    far, near = rg.asarray(jnp.asarray([-9, 7])), rg.asarray(jnp.asarray([0, 2]))
    for f in (sparse, lambda y, x: rg.grad(lambda x: sparse(y, x).sum())(x)):
        assert f(far, x).tolist() == rg.jit(f)(far, x).tolist() == f(near, x).tolist()
    assert sparse(far, x[:, :0]).tolist() == [0, 0]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite(value):
    """The other rows are not touched; a class that is impossible has the gradient 0."""
    x = np.array([[1.0, value, 2.0], [1.0, 2.0, 3.0]])
    with np.errstate(invalid="ignore"):
        found = rg.value_and_grad(lambda x: sparse([0, 2], x))(x, np.ones(2))
    due = torch.tensor(x, requires_grad=True)
    loss = functional.cross_entropy(due, torch.tensor([0, 2]), reduction="none")
    (d,) = torch.autograd.grad(loss.sum(), due)
    alike(found, [loss.detach().numpy(), d.numpy()], rtol=1e-7, atol=1e-15)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_dtype_of_the_logits_stays(dtype):
    y, dx = rg.value_and_grad(lambda x: sparse([1, 2], x).sum())(ROWS.astype(dtype))
    assert y.dtype == dx.dtype == dtype


# -- random numbers --------------------------------------------------------------------------------

DRAWS = {  # a function, the same distribution by SciPy, and both with the parameters 3 and 2
    "normal": (scipy.stats.norm(), lambda k, n, a, b: random.normal(k, n, a, b),
               scipy.stats.norm(3, 2)),
    "truncated_normal": (scipy.stats.truncnorm(-2, 2),
                         lambda k, n, a, b: random.truncated_normal(k, n, a, b),
                         scipy.stats.truncnorm(-2, 2, loc=3, scale=2)),
    "uniform": (scipy.stats.uniform(), lambda k, n, a, b: random.uniform(k, n, a, a + b),
                scipy.stats.uniform(3, 2)),
    "exponential": (scipy.stats.expon(), lambda k, n, a, b: random.exponential(k, n, b),
                    scipy.stats.expon(scale=2)),
    "gumbel": (scipy.stats.gumbel_r(), lambda k, n, a, b: random.gumbel(k, n, a, b),
               scipy.stats.gumbel_r(3, 2)),
}  # fmt: skip
KEYS = {  # of each kind
    "Generator": lambda: np.random.default_rng(0), "int": lambda: 0, "int64": lambda: np.int64(7),
    "key": lambda: jax.random.key(0), "PRNGKey": lambda: jax.random.PRNGKey(1),
}  # fmt: skip
by_key = pytest.mark.parametrize("key", [0, jax.random.key(0)], ids=["numpy", "jax"])


def fits(y, distribution):
    return scipy.stats.kstest(np.asarray(y._values()), distribution.cdf).pvalue > 1e-4


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", DRAWS)
def test_distribution(name, key):
    due, scaled, due_scaled = DRAWS[name]
    y = getattr(random, name)(KEYS[key](), (5000,))
    assert (y.shape, y.dtype) == ((5000,), np.float32)
    assert fits(y, due) and fits(scaled(0, (5000,), 3.0, 2.0), due_scaled)


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("name", DRAWS)
@by_key
def test_dtypes_and_shapes(name, key):
    draw = getattr(random, name)
    for dtype in ("float16", "float32", "float64"):
        assert draw(key, (2, 3), dtype=dtype).dtype == dtype
    shapes = [draw(key).shape, draw(key, ()).shape, draw(key, 4).shape, draw(key, (0, 2)).shape]
    assert shapes == [(), (), (4,), (0, 2)]


def test_a_generator_advances_and_a_seed_and_a_key_do_not():
    x, generator, key = rg.ones((50,)), np.random.default_rng(0), jax.random.key(0)
    for draw in (lambda k: random.normal(k, (3,)), lambda k: nn.dropout(x, 0.5, k)):
        assert draw(generator).tolist() != draw(generator).tolist()
        assert draw(5).tolist() == draw(5).tolist()
        assert draw(key).tolist() == draw(key).tolist()
        compiled = jax.jit(lambda k, draw=draw: draw(k)._data)
        assert compiled(key).tolist() != compiled(jax.random.key(1)).tolist()
        call = lambda draw=draw: jax.jit(lambda x: draw(generator)._data + x)(1.0)  # noqa: E731
        refused(call, ArgumentError, "cannot be used under jit")


def test_bernoulli():
    y = random.bernoulli(0, (4000,), 0.25)
    assert y.dtype == np.bool_
    assert abs(y.numpy().mean() - 0.25) < 0.03
    draws = lambda p: random.bernoulli(0, (4,), p, dtype=rg.float32)  # noqa: E731
    p = rg.tensor([0.1, 0.4, 0.6, 0.9])  # it has a gradient under an override only
    with rg.gradient_override_map({"Less": lambda dy, a, b: (None, rg.astype(dy, b.dtype))}):
        assert rg.grad(draws)(p).tolist() == [1, 1, 1, 1]
    assert slope(draws)(p).tolist() == [0, 0, 0, 0]


@by_key
def test_randint(key):
    y = random.randint(key, (1000,), -2, 3)
    assert sorted(set(y.tolist())) == [-2, -1, 0, 1, 2]
    assert y.dtype == np.int64
    assert random.randint(key, (2,), 0, 9, dtype=np.int32).dtype == np.int32
    words = r"low must be less than high, got \[5, 5\)"
    refused(lambda: random.randint(key, (2,), 5, 5), ArgumentError, words)


@pytest.mark.slow(but=1)
@by_key
def test_permutation(key):
    assert sorted(random.permutation(key, 6).tolist()) == [0, 1, 2, 3, 4, 5]
    x = rg.reshape(rg.arange(12, dtype=rg.float32), (4, 3))
    assert sorted(random.permutation(key, x).tolist()) == x.tolist()
    columns = random.permutation(key, x, axis=1)
    assert sorted(rg.matrix_transpose(columns).tolist()) == rg.matrix_transpose(x).tolist()
    dx = slope(lambda y: random.permutation(key, y) * x)(x)
    assert random.permutation(key, dx).tolist() == x.tolist()


def test_differentiable_in_the_parameters():
    loss = lambda mean, stddev: (random.normal(0, (4, 3), mean, stddev) ** 3).sum()  # noqa: E731
    mean, stddev = rg.tensor([0.1, 0.2, 0.3]), rg.tensor([[1.0], [2.0], [0.5], [1.5]])
    noise = random.normal(0, (4, 3)).numpy()
    y = mean.numpy() + stddev.numpy() * noise
    due = [(3 * y**2).sum(0), (3 * y**2 * noise).sum(1, keepdims=True)]
    alike(rg.grads(loss)([mean, stddev]), due, rtol=1e-5)
    u = random.uniform(0, (3,)).numpy()
    by_bounds = rg.grads(lambda low, high: random.uniform(0, (3,), low, high).sum())([1.0, 4.0])
    alike(by_bounds, [(1 - u).sum(), u.sum()], rtol=1e-5)
