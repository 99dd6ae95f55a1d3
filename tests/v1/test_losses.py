"""tf.losses against NumPy: weights, reductions, collections."""

import numpy as np
import pytest

import regrad.v1 as tf
from tests.helpers.v1_session import run

pytestmark = pytest.mark.usefixtures("graph")


def normal(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def shares(*shape):
    x = np.abs(normal(*shape)) + np.float32(0.1)
    return x / x.sum(axis=-1, keepdims=True)


def near(x, y):
    np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


ROWS = normal(4, 3)

# -- losses --------------------------------------------------------------------------------------

LABELS, PREDICTIONS = shares(4, 3), shares(4, 3)[::-1].copy()
SIGMOID = 1 / (1 + np.exp(-PREDICTIONS))
LOG_SOFTMAX = PREDICTIONS - np.log(np.exp(PREDICTIONS).sum(-1, keepdims=True))
ERROR = np.abs(PREDICTIONS - LABELS)
ELEMENTWISE = {
    "absolute_difference": (tf.losses.absolute_difference, ERROR),
    "mean_squared_error": (tf.losses.mean_squared_error, ERROR**2),
    "huber_loss": (
        lambda *a, **k: tf.losses.huber_loss(*a, delta=0.2, **k),
        np.where(ERROR < 0.2, ERROR**2 / 2, 0.2 * (ERROR - 0.1)),
    ),
    "hinge_loss": (tf.losses.hinge_loss, np.maximum(1 - (2 * LABELS - 1) * PREDICTIONS, 0)),
    "log_loss": (
        tf.losses.log_loss,
        -LABELS * np.log(PREDICTIONS + 1e-7) - (1 - LABELS) * np.log(1 - PREDICTIONS + 1e-7),
    ),
    "sigmoid_cross_entropy": (
        tf.losses.sigmoid_cross_entropy,
        -LABELS * np.log(SIGMOID) - (1 - LABELS) * np.log(1 - SIGMOID),
    ),
    "cosine_distance": (
        lambda x, y, *a, **k: tf.losses.cosine_distance(x, y, 1, *a, **k),
        1 - (LABELS * PREDICTIONS).sum(1, keepdims=True),
    ),
    "softmax_cross_entropy": (
        tf.losses.softmax_cross_entropy,
        -(LABELS * LOG_SOFTMAX).sum(-1),
    ),
}  # fmt: skip
WEIGHTS = np.float32([[0.0], [2.0], [1.0], [0.0]])
REDUCTIONS = {
    "weighted_sum": lambda loss, w: (loss * w).sum(),
    "weighted_mean": lambda loss, w: (loss * w).sum() / w.sum(),
    "weighted_sum_over_batch_size": lambda loss, w: (loss * w).mean(),
    "weighted_sum_by_nonzero_weights": lambda loss, w: (loss * w).sum() / (w != 0).sum(),
    "none": lambda loss, w: loss * w,
}


@pytest.mark.parametrize("fed", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("loss", ELEMENTWISE)
def test_losses(loss, reduction, fed):
    function, due = ELEMENTWISE[loss]
    arrays = LABELS, PREDICTIONS
    xs = [tf.placeholder(tf.float32, [None, 3]) for _ in arrays] if fed else arrays
    feed = dict(zip(xs, arrays, strict=True)) if fed else None
    weights = WEIGHTS if due.ndim == 2 else WEIGHTS[:, 0]
    got = run(
        [function(*xs, reduction=reduction), function(*xs, weights, reduction=reduction)], feed
    )
    near(got[0], REDUCTIONS[reduction](due, np.ones_like(due)))
    near(got[1], REDUCTIONS[reduction](due, np.broadcast_to(weights, due.shape)))
    assert got[0].dtype == np.float32


def test_a_mean_of_nothing_is_zero():
    x = tf.constant(ROWS)
    for reduction in ("weighted_mean", "weighted_sum_by_nonzero_weights"):
        loss = tf.losses.mean_squared_error(ROWS, x, 0.0, reduction=reduction)
        assert run(loss) == 0
        assert not run(tf.gradients(loss, x)[0]).any()


def test_losses_are_collected():
    with tf.name_scope("a"):
        a = tf.losses.mean_squared_error([1.0], [3.0])
    b = tf.losses.absolute_difference([1.0], [3.0])
    tf.losses.hinge_loss([1.0], [3.0], loss_collection=None)
    c = tf.constant(10.0)
    tf.losses.add_loss(c)
    tf.add_to_collection(tf.GraphKeys.REGULARIZATION_LOSSES, tf.constant(100.0))
    assert tf.losses.get_losses() == [a, b, c]
    assert tf.losses.get_losses("a/") == [a]
    assert tf.get_collection(tf.GraphKeys.LOSSES) == [a, b, c]
    total = tf.losses.get_total_loss()
    assert total.op.name == "total_loss"
    plain, rest = tf.losses.get_total_loss(False), tf.losses.get_regularization_loss()
    assert run([total, plain, rest]) == [116.0, 16.0, 100.0]


def test_no_regularization_loss_is_zero():
    assert run(tf.losses.get_regularization_loss()) == 0.0
    assert tf.losses.get_regularization_losses() == []


def test_losses_of_predictions_are_computed_in_float32():
    x = tf.constant(ROWS.astype(np.float64))
    assert tf.losses.mean_squared_error(x, x).dtype == tf.float32
    assert tf.losses.mean_squared_error([1, 2], [1, 4]).dtype == tf.float32
    assert tf.losses.softmax_cross_entropy(tf.nn.softmax(x), x).dtype == tf.float64


def test_label_smoothing():
    smooth = LABELS * 0.7 + 0.1
    loss = tf.losses.softmax_cross_entropy(LABELS, PREDICTIONS, label_smoothing=0.3)
    near(run(loss), -(smooth * LOG_SOFTMAX).sum(-1).mean())
    loss = tf.losses.sigmoid_cross_entropy(LABELS, PREDICTIONS, label_smoothing=0.3)
    smooth = LABELS * 0.7 + 0.15
    near(run(loss), (-smooth * np.log(SIGMOID) - (1 - smooth) * np.log(1 - SIGMOID)).mean())


@pytest.mark.parametrize("column", [False, True])
def test_sparse_softmax_cross_entropy(column):
    ids = np.array([0, 2, 1, 1])
    due = -LOG_SOFTMAX[np.arange(4), ids]
    weights = WEIGHTS if column else WEIGHTS[:, 0]
    labels = tf.placeholder(tf.int64, [None, 1] if column else [None])
    logits = tf.placeholder(tf.float32, [None, 3])
    feed = {labels: ids[:, None] if column else ids, logits: PREDICTIONS}
    near(run(tf.losses.sparse_softmax_cross_entropy(labels, logits), feed), due.mean())
    loss = tf.losses.sparse_softmax_cross_entropy(labels, logits, weights)
    near(run(loss, feed), (due * WEIGHTS[:, 0]).sum() / 2)


@pytest.mark.parametrize("labels", [[None], [None, 1], None])
def test_an_override_of_sparse_cross_entropy_fires(graph, labels):
    """The op has TensorFlow's type and inputs, but not its second output."""

    def sevens(op, grad):
        return tf.ones_like(op.inputs[0]) * 7.0, None

    x, ids = tf.placeholder(tf.float32, [None, 3]), tf.placeholder(tf.int32, labels)
    with graph.gradient_override_map({"SparseSoftmaxCrossEntropyWithLogits": sevens}) as used:
        if labels == [None]:
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=ids, logits=x)
            assert [x.op.type for x in loss.op.inputs] == ["Placeholder", "Indices"]
            assert len(loss.op.outputs) == 1
        else:
            loss = tf.losses.sparse_softmax_cross_entropy(ids, x)
    feed = {x: PREDICTIONS, ids: np.reshape([0, 2, 1, 1], [-1, 1] if labels == [None, 1] else [-1])}
    assert (run(tf.gradients(loss, x)[0], feed) == 7).all()
    used.assert_fired()


@pytest.mark.parametrize("labels", [[None], None])
@pytest.mark.parametrize("logits", [[None, 3], [None, None], None])
def test_shapes_of_sparse_cross_entropy(labels, logits):
    x, ids = tf.placeholder(tf.float32, logits), tf.placeholder(tf.int64, labels)
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=ids, logits=x)
    assert loss.op.type == "SparseSoftmaxCrossEntropyWithLogits"
    assert loss.shape.ndims == (None if labels is None and logits is None else 1)
    known = tf.placeholder(tf.float32, [4, 3])
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=ids, logits=known)
    assert loss.shape.as_list() == [4]


def test_mean_pairwise_squared_error():
    labels, predictions = normal(2, 3), normal(2, 4)[:, :3].copy()
    e = predictions - labels
    pairs = np.array(
        [[(r[i] - r[j]) ** 2 for i in range(3) for j in range(3) if i != j] for r in e]
    )
    near(run(tf.losses.mean_pairwise_squared_error(labels, predictions)), pairs.mean(1).sum())
    weights = np.float32([2.0, 0.0])
    loss = tf.losses.mean_pairwise_squared_error(labels, predictions, weights)
    near(run(loss), 2 * pairs[0].mean())
