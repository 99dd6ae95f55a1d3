"""Losses: TensorFlow.js's numbers, weights, conventions at kinks, and errors."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

import regrad as rg
from regrad import losses
from regrad.errors import ArgumentError, ShapeError, UnusedOverrideWarning

PAIRED = [
    losses.absolute_difference, losses.mean_squared_error, losses.huber_loss, losses.hinge_loss,
    losses.log_loss, losses.sigmoid_cross_entropy, losses.softmax_cross_entropy,
]  # fmt: skip


# -- reductions ----------------------------------------------------------------------------------

X = np.array([[1.0, 2.0], [3.0, 4.0]])


@pytest.mark.parametrize(("weights", "reduction", "due"), [
    # what TensorFlow.js gives
    (None, "sum_by_nonzero_weights", 2.5), (None, "mean", 2.5), (None, "sum", 10),
    (None, "none", [[1, 2], [3, 4]]), (0.5, "sum_by_nonzero_weights", 1.25), (0.5, "mean", 2.5),
    (0.5, "sum", 5), ([[0.0], [2.0]], "sum_by_nonzero_weights", 7), ([[0.0], [2.0]], "mean", 3.5),
    ([[0.0], [2.0]], "sum", 14), ([[0.0], [2.0]], "none", [[0, 0], [6, 8]]),
    ([0.0, 2.0], "sum_by_nonzero_weights", 6),
    ([[0.0, 1.0], [1.0, 2.0]], "sum_by_nonzero_weights", 13 / 3),
    ([[0.0, 1.0], [1.0, 2.0]], "mean", 13 / 4),
    ([[True, False], [True, True]], "sum_by_nonzero_weights", 8 / 3),
])  # fmt: skip
def test_reductions(weights, reduction, due):
    y = losses.compute_weighted_loss(X, weights, reduction)
    assert y.dtype == np.float64
    np.testing.assert_allclose(y.numpy(), due, rtol=1e-6)


def test_a_weight_of_0_has_a_gradient_all_the_same():
    weights = rg.tensor([[0.0], [2.0]])
    dw = rg.grad(lambda w: losses.compute_weighted_loss(X.astype(np.float32), w))(weights)
    assert dw.tolist() == [[1.5], [3.5]]


def test_an_unknown_reduction_is_refused_with_the_list():
    with pytest.raises(ArgumentError) as error:
        losses.mean_squared_error([1.0], [2.0], None, "sums")
    assert str(error.value) == (
        "mean_squared_error: there is no reduction 'sums'. Did you mean 'sum'? The reductions are "
        "'sum_by_nonzero_weights', 'mean', 'sum', 'none'."
    )
    with pytest.raises(ArgumentError, match=r"there is no reduction 1\.0"):
        losses.huber_loss([1.0], [2.0], None, 1.0)


# -- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", PAIRED, ids=lambda f: f.__name__)
def test_labels_and_predictions_must_have_one_shape(loss):
    with pytest.raises(ShapeError) as error:
        loss(np.ones((2, 3)), np.ones((3,)))
    assert str(error.value) == (
        f"{loss.__name__}: labels and predictions must have one shape, got labels (2, 3) and "
        "predictions (3,)"
    )


@pytest.mark.parametrize("loss", PAIRED, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_integer_labels_take_the_dtype_of_the_predictions(loss, dtype):
    labels = np.array([[0, 1], [1, 0]], dtype=np.uint8)
    predictions = np.array([[0.2, 0.7], [0.6, 0.4]], dtype=dtype)
    y = loss(labels, predictions)
    assert y.dtype == dtype
    assert y.tolist() == loss(labels.astype(dtype), predictions).tolist()


def test_small_integers_do_not_wrap_around():
    a, b = np.array([1, 2], dtype=np.uint8), np.array([3, 250], dtype=np.uint8)
    assert losses.absolute_difference(a, b).tolist() == 125
    assert losses.mean_squared_error(a, b).dtype == np.float32


def test_sparse_labels():
    logits = np.array([[1.0, 2.0, 0.5], [0.1, -1.0, 3.0]])
    ids = np.array([1, 2], dtype=np.int32)
    one_hot = np.eye(3)[ids]
    for reduction in losses.REDUCTIONS:
        np.testing.assert_allclose(
            losses.sparse_softmax_cross_entropy(ids, logits, reduction=reduction).numpy(),
            losses.softmax_cross_entropy(one_hot, logits, reduction=reduction).numpy(),
        )


# -- conventions ---------------------------------------------------------------------------------


def test_gradients_at_kinks():
    def slope(loss, label, prediction, **options):
        return float(rg.grad(lambda p: loss([label], p, **options))(np.array([prediction])).item())

    assert slope(losses.absolute_difference, 1.0, 1.0) == 0
    assert slope(losses.hinge_loss, 1.0, 1.0) == 0
    assert slope(losses.huber_loss, 1.0, 1.0) == 0
    assert slope(losses.huber_loss, 1.0, 3.0, delta=2.0) == 2
    assert slope(losses.huber_loss, 3.0, 1.0, delta=2.0) == -2
    assert slope(losses.sigmoid_cross_entropy, 1.0, 0.0) == -0.5


def test_curvature_of_huber_loss_at_0_and_of_cross_entropy_at_0():
    curvature = lambda f: float(rg.grad(lambda x: rg.grad(f)(x))(np.array(0.0)))  # noqa: E731

    assert curvature(lambda x: losses.huber_loss(0.0, x)) == 1
    assert curvature(lambda x: losses.sigmoid_cross_entropy(1.0, x)) == 0.25


def test_the_gradient_by_labels_is_the_derivative():
    labels, logits = np.array([[0.3, 0.7]]), np.array([[1.0, 2.0]])
    due = -(logits - np.log(np.exp(logits).sum()))
    got = rg.grad(lambda labels: losses.softmax_cross_entropy(labels, logits))(labels)
    np.testing.assert_allclose(got.numpy(), due)


def test_confident_logits_keep_their_digits():
    y = losses.sigmoid_cross_entropy([1.0, 0.0], np.array([40.0, -40.0]), reduction="none")
    np.testing.assert_allclose(y.numpy(), np.exp(-40.0), rtol=1e-12)
    y = losses.softmax_cross_entropy([[0.0, 1.0]], np.array([[0.0, 1000.0]]))
    assert y.item() == 0


def test_overrides_fire_inside():
    labels, logits = np.array([[0.0, 1.0]]), rg.tensor([[1.0, 2.0]])
    with rg.gradient_override_map({"LogSoftmax": lambda dy: 10 * dy}) as used:
        dx = rg.grad(lambda x: losses.softmax_cross_entropy(labels, x))(logits)
    used.assert_fired()
    assert dx.tolist() == [[0, -10]]


def test_sparse_cross_entropy_is_one_op():
    labels, logits = [1], rg.tensor([[1.0, 2.0]])
    loss = rg.grad(lambda x: losses.sparse_softmax_cross_entropy(labels, x))

    def rule(dy, logits, labels):
        return rg.expand_dims(dy * rg.astype(labels, dy.dtype), -1) * logits, None

    with rg.gradient_override_map({"SparseSoftmaxCrossEntropyWithLogits": rule}) as used:
        assert loss(logits).tolist() == [[1, 2]]
        assert rg.jit(loss)(logits).tolist() == [[1, 2]]
    used.assert_fired()
    with (
        pytest.warns(UnusedOverrideWarning, match="matched nothing"),
        rg.gradient_override_map({"LogSoftmax": lambda dy: 10 * dy}),
    ):
        loss(logits)


# -- numbers of classes --------------------------------------------------------------------------

sparse = rg.nn.sparse_softmax_cross_entropy_with_logits
ROWS = np.array([[1.0, 2.0, 0.5], [0.1, -1.0, 3.0]])


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
        y, dx = rg.value_and_grad(lambda x: sparse([0, 2], x))(x, np.ones(2))
    due = torch.tensor(x, requires_grad=True)
    loss = functional.cross_entropy(due, torch.tensor([0, 2]), reduction="none")
    (d,) = torch.autograd.grad(loss.sum(), due)
    np.testing.assert_allclose(y.numpy(), loss.detach().numpy())
    np.testing.assert_allclose(dx.numpy(), d.numpy(), atol=1e-15)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_dtype_of_the_logits_stays(dtype):
    y, dx = rg.value_and_grad(lambda x: sparse([1, 2], x).sum())(ROWS.astype(dtype))
    assert y.dtype == dx.dtype == dtype
    assert sparse([1, 2], [[1, 2, 3], [4, 5, 6]]).dtype == np.float32
    assert sparse([1, 2], np.array([[1, 2, 3], [4, 5, 6]])).dtype == np.float32
