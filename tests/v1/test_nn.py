"""tf.nn, tf.image and tf.losses: what the table of `v1_rows` has no form for."""

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from tests.helpers.rows import refused
from tests.helpers.v1_rows import FIRST, IMAGES, ROWS, normal, positive, shares
from tests.helpers.v1_session import any_session, run

pytestmark = pytest.mark.usefixtures("graph")


def near(x, y):
    np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


def test_cross_entropy_has_no_gradient_by_labels_unless_v2():
    labels, logits = tf.constant(shares(4, 3)), tf.constant(ROWS)
    loss = tf.nn.softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    assert tf.gradients(loss, labels) == [None]
    (by_logits,) = tf.gradients(loss, logits)
    near(run(by_logits), run(tf.nn.softmax(logits) - labels))


def test_labels_of_cross_entropy_may_be_integers():
    labels, rows = np.eye(3, dtype=np.int64)[[0, 2, 1, 1]], tf.constant(ROWS)
    for loss in (
        tf.nn.softmax_cross_entropy_with_logits,
        tf.nn.softmax_cross_entropy_with_logits_v2,
    ):
        found = loss(labels=tf.constant(labels), logits=rows)
        near(run(found), -np.log(run(tf.nn.softmax(rows)))[labels == 1])


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
@pytest.mark.parametrize("shape", [[None], None])
def test_sparse_cross_entropy(dtype, shape):
    x, ids = tf.placeholder(tf.float32, [None, 3]), tf.placeholder(dtype, shape)
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=ids, logits=x)
    onehot = np.eye(3, dtype=np.float32)[[0, 2, 1, 1]]
    dense = tf.nn.softmax_cross_entropy_with_logits(labels=onehot, logits=x)
    for y, due in ((loss, dense), (tf.gradients(loss, x)[0], tf.gradients(dense, x)[0])):
        near(*run([y, due], {x: ROWS, ids: [0, 2, 1, 1]}))


def test_labels_and_logits_tell_each_others_shapes():
    known, rows = tf.constant(ROWS), tf.placeholder(tf.float32, [None, 3])
    for x, y in [(known, rows), (rows, known), (known, tf.placeholder(tf.float32))]:
        loss = tf.nn.sigmoid_cross_entropy_with_logits(labels=x, logits=y)
        assert loss.shape.as_list() == [4, 3]


@pytest.mark.parametrize("shape", [None, [None, None]])
@pytest.mark.parametrize("biases", [[1.0], [1.0, 2.0], [[1.0, 2.0, 3.0]]])
def test_biases_fit_the_channels_also_in_the_run(shape, biases):
    x, b = tf.placeholder(tf.float32, shape), tf.placeholder(tf.float32)
    y = tf.nn.bias_add(x, b)
    assert run(y, {x: [[1.0, 2.0, 3.0]], b: [1.0, 2.0, 3.0]}).tolist() == [[2.0, 4.0, 6.0]]
    refused(lambda: run(y, {x: [[1.0, 2.0, 3.0]], b: biases}), ValueError, "bias_add")
    eager = rg.tensor([[1.0, 2.0, 3.0]]), rg.tensor(biases)
    refused(lambda: tf.nn.bias_add(*eager), ValueError, "bias_add")


def test_transposed_convolution_of_an_unknown_batch():
    x, w = tf.placeholder(tf.float32, [None, 3, 3, 2]), normal(3, 3, 4, 2)
    batch = tf.shape(x)[0]
    y = tf.nn.conv2d_transpose(x, w, tf.stack([batch, 6, 6, 4]), [1, 2, 2, 1])
    z = tf.nn.conv2d_transpose(x, w, [batch, 6, 6, 4], [1, 2, 2, 1], "SAME")
    assert y.shape.as_list() == z.shape.as_list() == [None, 6, 6, 4]
    first, steps = tf.transpose(x, [0, 3, 1, 2]), [1, 1, 2, 2]
    turned = tf.nn.conv2d_transpose(first, w, [batch, 4, 6, 6], steps, data_format="NCHW")
    values = normal(2, 3, 3, 2)
    due = rg.nn.conv2d_transpose(values, w, (2, 6, 6, 4), 2, "same").numpy()
    found = run([y, z, tf.transpose(turned, [0, 2, 3, 1])], {x: values})
    near(found, [due] * 3)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_a_convolution_takes_the_attributes_of_an_op(padding):
    y = tf.nn.conv2d(IMAGES, normal(3, 3, 3, 2), [1, 2, 1, 1], padding)
    filters, attr = y.op.inputs[1], y.op.get_attr
    again = tf.nn.conv2d(IMAGES, filters, attr("strides"), attr("padding"))
    assert attr("padding") == padding.encode()
    assert np.array_equal(*run([y, again]))


def test_static_shapes_of_an_unknown_batch():
    x = tf.placeholder(tf.float32, [None, 28, 28, 1])
    h = tf.nn.conv2d(x, normal(5, 5, 1, 8), [1, 1, 1, 1], "VALID")
    pooled = tf.nn.max_pool(h, [1, 2, 2, 1], [1, 2, 2, 1], "VALID")
    top = tf.nn.top_k(tf.placeholder(tf.float32, [None, 5]), 2).indices
    for y, sizes in [(h, [24, 24, 8]), (pooled, [12, 12, 8]), (tf.layers.flatten(pooled), [1152]),
                     (top, [2])]:  # fmt: skip
        assert y.shape.as_list() == [None, *sizes]


def test_fused_batch_norm():
    scale, offset = positive(3), normal(3)
    y, mean, variance = run(tf.nn.fused_batch_norm(IMAGES, scale, offset, epsilon=1e-3))
    flat = IMAGES.reshape(-1, 3)
    near(mean, flat.mean(0))
    near(variance, flat.var(0, ddof=1))
    near(y, (IMAGES - flat.mean(0)) / np.sqrt(flat.var(0) + 1e-3) * scale + offset)
    fixed = tf.nn.fused_batch_norm(FIRST, scale, offset, mean, variance, 1e-3, "NCHW", False)
    due = (IMAGES - mean) / np.sqrt(variance + 1e-3) * scale + offset
    near(run(fixed.y), due.transpose(0, 3, 1, 2))


WHOLE, IDS = normal(7, 2), np.array([[0, 6], [3, 4]])
TABLES = {"mod": [WHOLE[i::3] for i in range(3)], "div": np.split(WHOLE, [3, 5])}


@pytest.mark.parametrize("strategy", TABLES)
def test_embedding_in_several_tables(strategy):
    tables = [tf.constant(table) for table in TABLES[strategy]]
    near(run(tf.nn.embedding_lookup(tables, IDS, strategy)), WHOLE[IDS])
    eager = [rg.asarray(table) for table in TABLES[strategy]]
    for ids in (IDS.tolist(), IDS, rg.asarray(IDS), tuple(IDS.tolist())):
        y = tf.nn.embedding_lookup(eager, ids, strategy)
        assert isinstance(y, rg.Tensor)
        near(y.numpy(), WHOLE[IDS])


@pytest.mark.parametrize("strategy", TABLES)
@pytest.mark.parametrize("id", [7, 8, 9, 12, 100, -1, -7])
def test_an_id_out_of_range_is_refused(strategy, id):
    tables, ids = [tf.constant(t) for t in TABLES[strategy]], tf.placeholder(tf.int32, [None])
    y = tf.nn.embedding_lookup(tables, ids, strategy)
    refused(
        lambda: run(y, {ids: [0, id]}), tf.errors.InvalidArgumentError, "out of bounds|negative"
    )


def test_top_k():
    x = tf.constant([[1.0, 4.0, 2.0], [3.0, 3.0, 5.0]])
    found = tf.nn.top_k(x, tf.constant(2))
    assert found.indices.dtype == tf.int32
    values, indices = run(found)
    assert values.tolist() == [[4.0, 2.0], [5.0, 3.0]]
    assert indices.tolist() == [[1, 2], [2, 0]]


def test_in_top_k():
    x, ids = tf.placeholder(tf.float32, [None, 3]), tf.placeholder(tf.int32, [None])
    found = tf.nn.in_top_k(x, ids, 1)
    rows = [[0.1, 0.8, 0.1], [0.5, 0.5, 0.0], [0.1, 0.2, 0.7], [np.inf, 0.0, 1.0]]
    assert found.shape.as_list() == [None]
    assert run(found, {x: rows, ids: [1, 1, 0, 0]}).tolist() == [True, True, False, False]


# -- tf.image ------------------------------------------------------------------------------------


def test_images_are_standardized_and_resized():
    got = run(tf.image.per_image_standardization(IMAGES))
    near([got.mean((1, 2, 3)), got.std((1, 2, 3))], [[0, 0], [1, 1]])
    x = tf.placeholder(tf.uint8, [None, 6, 5, 3])
    y = tf.image.resize_images(x, [3, 3])
    z = tf.image.resize_images(x, [3, 3], tf.image.ResizeMethod.NEAREST_NEIGHBOR)
    assert (y.dtype, z.dtype) == (tf.float32, tf.uint8)
    assert y.shape.as_list() == [None, 3, 3, 3]


def test_random_flips():
    x = tf.placeholder(tf.float32, [None, 1, 2, 1])
    values = np.tile(np.float32([0, 1]).reshape(1, 1, 2, 1), (100, 1, 1, 1))
    flipped = run(tf.image.random_flip_left_right(x, seed=1), {x: values})[:, 0, 0, 0]
    assert 20 < flipped.sum() < 80
    assert run(tf.image.random_flip_up_down(IMAGES[0])).shape == (6, 5, 3)


# -- tf.losses -----------------------------------------------------------------------------------

LABELS, PREDICTIONS = shares(4, 3), shares(4, 3)[::-1].copy()
SIGMOID = 1 / (1 + np.exp(-PREDICTIONS))
LOG_SOFTMAX = PREDICTIONS - np.log(np.exp(PREDICTIONS).sum(-1, keepdims=True))
ERROR = np.abs(PREDICTIONS - LABELS)
ELEMENTWISE = {
    "absolute_difference": ERROR, "mean_squared_error": ERROR**2,
    "huber_loss": np.where(ERROR < 0.2, ERROR**2 / 2, 0.2 * (ERROR - 0.1)),
    "hinge_loss": np.maximum(1 - (2 * LABELS - 1) * PREDICTIONS, 0),
    "log_loss": -LABELS * np.log(PREDICTIONS + 1e-7)
    - (1 - LABELS) * np.log(1 - PREDICTIONS + 1e-7),
    "sigmoid_cross_entropy": -LABELS * np.log(SIGMOID) - (1 - LABELS) * np.log(1 - SIGMOID),
    "cosine_distance": 1 - (LABELS * PREDICTIONS).sum(1, keepdims=True),
    "softmax_cross_entropy": -(LABELS * LOG_SOFTMAX).sum(-1),
}  # fmt: skip
OPTIONS = {"huber_loss": {"delta": 0.2}, "cosine_distance": {"axis": 1}}
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
    due, arrays = ELEMENTWISE[loss], (LABELS, PREDICTIONS)
    xs = [tf.placeholder(tf.float32, [None, 3]) for _ in arrays] if fed else arrays
    feed = dict(zip(xs, arrays, strict=True)) if fed else None
    for weights in (np.float32(1.0), WEIGHTS if due.ndim == 2 else WEIGHTS[:, 0]):
        options = OPTIONS.get(loss, {}) | ({"weights": weights} if weights.ndim else {})
        got = run(getattr(tf.losses, loss)(*xs, reduction=reduction, **options), feed)
        near(got, REDUCTIONS[reduction](due, np.broadcast_to(weights, due.shape)))
        assert got.dtype == np.float32


@pytest.mark.parametrize("reduction", ["weighted_mean", "weighted_sum_by_nonzero_weights"])
def test_a_mean_of_nothing_is_zero(reduction):
    x = tf.constant(ROWS)
    loss = tf.losses.mean_squared_error(ROWS, x, 0.0, reduction=reduction)
    assert run(loss) == 0
    assert not run(tf.gradients(loss, x)[0]).any()


def test_losses_are_collected():
    with tf.name_scope("a"):
        a = tf.losses.mean_squared_error([1.0], [3.0])
    b, c = tf.losses.absolute_difference([1.0], [3.0]), tf.constant(10.0)
    tf.losses.hinge_loss([1.0], [3.0], loss_collection=None)
    tf.losses.add_loss(c)
    assert tf.losses.get_regularization_losses() == []
    assert run(tf.losses.get_regularization_loss()) == 0.0
    tf.add_to_collection(tf.GraphKeys.REGULARIZATION_LOSSES, tf.constant(100.0))
    assert tf.losses.get_losses() == tf.get_collection(tf.GraphKeys.LOSSES) == [a, b, c]
    assert tf.losses.get_losses("a/") == [a]
    total = tf.losses.get_total_loss()
    assert total.op.name == "total_loss"
    plain, rest = tf.losses.get_total_loss(False), tf.losses.get_regularization_loss()
    assert run([total, plain, rest]) == [116.0, 16.0, 100.0]


def test_losses_of_eager_tensors_are_in_no_collection():
    labels, weights = rg.asarray(LABELS), rg.asarray(WEIGHTS)
    by_weights = rg.grad(lambda w: tf.losses.mean_squared_error(labels, PREDICTIONS, w))(weights)
    total, count = (ERROR**2 * WEIGHTS).sum(), 3 * (WEIGHTS != 0).sum()
    near(by_weights.numpy(), (ERROR**2).sum(1, keepdims=True) / count)
    near(tf.losses.mean_squared_error(LABELS, PREDICTIONS, weights).numpy(), total / count)
    tf.losses.add_loss(tf.losses.compute_weighted_loss(ERROR, weights))
    assert tf.losses.get_losses() == []


def test_losses_refuse_labels_and_logits_of_other_kinds():
    refused(lambda: tf.losses.sparse_softmax_cross_entropy([0.0, 1.0], ROWS[:2]), TypeError,
            "class indices")  # fmt: skip
    for loss in (tf.losses.softmax_cross_entropy, tf.losses.sparse_softmax_cross_entropy):
        refused(lambda loss=loss: loss([[1], [0]], [[1], [2]]), TypeError, "logits takes floats")


def test_losses_of_predictions_are_computed_in_float32():
    x = tf.constant(ROWS.astype(np.float64))
    assert tf.losses.mean_squared_error(x, x).dtype == tf.float32
    assert tf.losses.mean_squared_error([1, 2], [1, 4]).dtype == tf.float32
    assert tf.losses.softmax_cross_entropy(tf.nn.softmax(x), x).dtype == tf.float64


def test_label_smoothing():
    loss = tf.losses.softmax_cross_entropy(LABELS, PREDICTIONS, label_smoothing=0.3)
    near(run(loss), -((LABELS * 0.7 + 0.1) * LOG_SOFTMAX).sum(-1).mean())
    loss = tf.losses.sigmoid_cross_entropy(LABELS, PREDICTIONS, label_smoothing=0.3)
    smooth = LABELS * 0.7 + 0.15
    near(run(loss), -(smooth * np.log(SIGMOID) + (1 - smooth) * np.log(1 - SIGMOID)).mean())


@pytest.mark.parametrize("column", [False, True])
def test_sparse_softmax_cross_entropy(column):
    ids, shape = np.array([0, 2, 1, 1]), [None, 1] if column else [None]
    due, weights = -LOG_SOFTMAX[np.arange(4), ids], WEIGHTS if column else WEIGHTS[:, 0]
    labels, logits = tf.placeholder(tf.int64, shape), tf.placeholder(tf.float32, [None, 3])
    feed = {labels: ids[:, None] if column else ids, logits: PREDICTIONS}
    near(run(tf.losses.sparse_softmax_cross_entropy(labels, logits), feed), due.mean())
    loss = tf.losses.sparse_softmax_cross_entropy(labels, logits, weights)
    near(run(loss, feed), (due * WEIGHTS[:, 0]).sum() / 2)


@pytest.mark.parametrize("labels", [[None], [None, 1], None])
def test_an_override_of_sparse_cross_entropy_fires(graph, labels):
    """The op has TensorFlow's type and inputs, but not its second output."""

    sevens = lambda op, grad: (tf.ones_like(op.inputs[0]) * 7.0, None)  # noqa: E731

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
@pytest.mark.parametrize("logits", [[None, 3], [None, None], None, [4, 3]])
def test_shapes_of_sparse_cross_entropy(labels, logits):
    x, ids = tf.placeholder(tf.float32, logits), tf.placeholder(tf.int64, labels)
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=ids, logits=x)
    assert loss.op.type == "SparseSoftmaxCrossEntropyWithLogits"
    assert loss.shape.ndims == (None if labels is None and logits is None else 1)
    assert logits != [4, 3] or loss.shape.as_list() == [4]


def test_mean_pairwise_squared_error():
    labels, predictions = normal(2, 3), normal(2, 4)[:, :3].copy()
    rows = predictions - labels
    pairs = ((rows[:, :, None] - rows[:, None]) ** 2).sum((1, 2)) / 6  # of 3 * 2 pairs
    near(run(tf.losses.mean_pairwise_squared_error(labels, predictions)), pairs.sum())
    weights = np.float32([2.0, 0.0])
    loss = tf.losses.mean_pairwise_squared_error(labels, predictions, weights)
    near(run(loss), 2 * pairs[0])


# -- random numbers and dropout --------------------------------------------------------------------

session, I64 = any_session, tf.int64


# -- dropout -------------------------------------------------------------------------------------


def test_dropout_keeps_the_mean_and_is_drawn_anew(session):
    x = tf.ones([1000, 10])
    y = tf.nn.dropout(x, 0.8)
    (dx,) = tf.gradients(y, x)
    (a, gradient), b = session.run([y, dx]), session.run(y)
    assert set(np.unique(a).tolist()) == {0.0, 1.25}
    assert abs(a.mean() - 1) < 0.02
    assert (a != b).any()
    np.testing.assert_array_equal(a, gradient)


@pytest.mark.parametrize("shape", [[None, 10], [1000, 10], None])
def test_keep_prob_may_be_fed(shape):
    x, keep = tf.placeholder(tf.float32, shape), tf.placeholder(tf.float32)
    y = tf.nn.dropout(x, keep)
    assert y.shape == tf.TensorShape(shape)
    ones = np.ones([1000, 10], np.float32)
    assert (run(y, {x: ones, keep: 1.0}) == 1).all()
    got = run(y, {x: ones, keep: 0.5})
    assert abs(got.mean() - 1) < 0.05
    assert set(np.unique(got).tolist()) == {0.0, 2.0}


def test_dropout_of_whole_channels():
    x = tf.placeholder(tf.float32, [None, 4, 4, 3])
    y = run(tf.nn.dropout(x, 0.5, [None, 1, 1, 3]), {x: np.ones([50, 4, 4, 3])})
    assert (y == y[:, :1, :1]).all()
    assert {0.0, 2.0} == set(np.unique(y).tolist())
    size = tf.shape(x)
    for noise in ([size[0], 1, 1, 1], tf.stack([size[0], 1, 1, 1])):
        y = run(tf.nn.dropout(x, 0.5, noise), {x: np.ones([5, 4, 4, 3])})
        assert y.shape == (5, 4, 4, 3)
        assert {len(set(rows.ravel())) for rows in y} == {1}


def test_rate_is_one_minus_keep_prob_and_infinities_are_hidden():
    assert run(tf.nn.dropout(tf.ones([1000]), rate=0.2)).max() == np.float32(1.25)
    assert not np.isnan(run(tf.nn.dropout(tf.fill([100], np.float32(np.inf)), 0.5))).any()


# -- random ops ----------------------------------------------------------------------------------

DRAWS = {
    "random_normal": lambda seed: tf.random_normal([6], seed=seed),
    "truncated_normal": lambda seed: tf.truncated_normal([6], seed=seed),
    "random_uniform": lambda seed: tf.random_uniform([6], seed=seed),
    "integers": lambda seed: tf.random_uniform([6], 0, 1000, tf.int32, seed=seed),
    "random_shuffle": lambda seed: tf.random_shuffle(np.arange(50), seed=seed),
    "multinomial": lambda seed: tf.multinomial(np.zeros([2, 50], np.float32), 6, seed=seed),
    "dropout": lambda seed: tf.nn.dropout(np.ones(50, np.float32), 0.5, seed=seed),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("draw", "jit"), [*[(d, False) for d in DRAWS], ("random_normal", True)])
def test_seeds(draw, jit):
    def twice(graph_seed, op_seed):
        with tf.Graph().as_default():
            tf.set_random_seed(graph_seed)
            y = DRAWS[draw](op_seed)
            sessions = []
            for _ in range(2):
                with tf.Session(jit=jit) as session:
                    sessions.append([session.run(y).tolist() for _ in range(2)])
            return sessions

    for seeds in [(1, None), (None, 2), (1, 2), (0, 0), (-1, 2**40)]:
        (a, b), again = twice(*seeds)
        assert a != b
        assert [a, b] == again == twice(*seeds)[0]
    fresh, other = twice(None, None)
    assert fresh != other
    assert twice(1, None) != twice(2, None)


@pytest.mark.parametrize(("call", "words"), [
    (lambda: tf.set_random_seed(1.5), "seed: expected an integer or None, got 1.5"),
    (lambda: tf.random_normal([2], seed="a"), "seed: expected an integer or None, got 'a'"),
    (lambda: tf.random_normal([2], 0, 1, tf.int32), "draws floats"),
    (lambda: tf.random_uniform([2], 0, 1, tf.complex64), "draws floats"),
])  # fmt: skip
def test_seeds_are_integers_and_noise_is_of_floats(call, words):
    refused(call, TypeError, words)


def test_ops_of_one_seeded_graph_differ():
    tf.set_random_seed(1)
    a, b = tf.random_normal([6]), tf.random_normal([6])
    a, b, c = run([a, b, a])
    assert a.tolist() == c.tolist() != b.tolist()


@pytest.mark.parametrize(("draw", "low", "high", "mean", "deviation"), [
    (tf.random_normal, -6, 6, 0, 1), (lambda n: tf.random_normal(n, 3.0, 0.5), 0, 6, 3, 0.5),
    (tf.truncated_normal, -2, 2, 0, 0.8796), (tf.random_uniform, 0, 1, 0.5, 12**-0.5),
    (lambda n: tf.truncated_normal(n, 1.0, 2.0, tf.float64), -3, 5, 1, 1.7593),
    (lambda n: tf.random_uniform(n, -1, 3), -1, 3, 1, 4 * 12**-0.5),
    (lambda n: tf.random_uniform(n, tf.constant(2, I64), 5, I64), 2, 4, 3, (2 / 3) ** 0.5),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["known", "fed", "compiled"])
def test_distributions(draw, low, high, mean, deviation, kind):
    fed = kind == "fed"
    shape = tf.placeholder(tf.int32, [2]) if fed else [100, 200]
    y = draw(shape)
    assert y.shape.as_list() == ([None, None] if fed else [100, 200])
    with tf.Session(jit=kind == "compiled") as session:
        got = session.run(y, {shape: [100, 200]} if fed else None)
    assert (got.dtype, got.shape) == (y.dtype.as_numpy_dtype, (100, 200))
    assert low <= got.min() < got.max() <= high
    assert abs(got.mean() - mean) < 0.03 * max(deviation, 1)
    assert abs(got.std() - deviation) < 0.03 * deviation


def test_the_parameters_of_a_distribution_have_gradients():
    mean, stddev = tf.constant([1.0, 5.0]), tf.constant(2.0)
    y = tf.random_normal([3, 2], mean, stddev)
    value, by_mean, by_stddev = run([y, *tf.gradients(y, [mean, stddev])])
    assert by_mean.tolist() == [3.0, 3.0]
    near(by_stddev, ((value - [1.0, 5.0]) / 2).sum())


def test_shapes_that_are_known_in_the_run():
    x = tf.placeholder(tf.float32)
    y = x + tf.random_normal(tf.shape(x), stddev=0.01)
    near(run(y, {x: ROWS}) * 0, ROWS * 0)
    assert run(tf.random_normal(tf.shape(x)), {x: ROWS}).shape == ROWS.shape


def test_random_shuffle_permutes_rows_and_has_no_gradient(session):
    x = tf.constant(ROWS)
    y = tf.random_shuffle(x)
    assert sorted(session.run(y).tolist()) == sorted(ROWS.tolist())
    with pytest.raises(LookupError):
        tf.gradients(y, x)
    rows = tf.gather(x, tf.random_shuffle(tf.range(4)))
    assert (session.run(tf.gradients(rows, x)[0]) == 1).all()


@pytest.mark.parametrize("draw", [tf.multinomial, tf.random.categorical])
def test_categorical(session, draw):
    logits = tf.placeholder(tf.float32, [None, 3])
    got = session.run(draw(logits, 3000), {logits: np.log([[0.2, 0.3, 0.5], [1.0, 1e-30, 1e-30]])})
    assert (got.dtype, got.shape) == (np.int64, (2, 3000))
    assert np.abs(np.bincount(got[0]) / 3000 - [0.2, 0.3, 0.5]).max() < 0.05
    assert not got[1].any()


def test_random_crop():
    x = np.arange(60).reshape(5, 4, 3)
    blocks = [run(tf.random_crop(x, [2, 4, 3])) for _ in range(20)]
    starts = {int(b.flat[0]) for b in blocks}
    assert all(b.shape == (2, 4, 3) and (np.diff(b.ravel()) == 1).all() for b in blocks)
    assert starts <= {0, 12, 24, 36}
    assert len(starts) > 1


# -- in branches and loops -------------------------------------------------------------------------


def test_the_gradient_of_a_branch_sees_the_same_draw(session):
    x, p = tf.placeholder(tf.float32, [None, 6]), tf.placeholder(tf.bool, [])
    y = tf.cond(p, lambda: tf.nn.dropout(x, 0.5), lambda: x)
    (dx,) = tf.gradients(y, x)
    got = [session.run([y, dx], {x: np.ones([2, 6]), p: True}) for _ in range(10)]
    assert all((value == gradient).all() for value, gradient in got)
    assert len({value.tobytes() for value, _ in got}) > 5


def test_the_gradient_of_a_loop_sees_the_same_draws(session):
    x = tf.ones([6])

    def turn(i, y, draws):
        z = tf.random_uniform([6])
        return i + 1, y * z, tf.concat([draws, z], 0)

    shapes = [tf.TensorShape([]), tf.TensorShape([6]), tf.TensorShape([None])]
    start = [0, x * 1.0, tf.zeros([0])]
    _, y, draws = tf.while_loop(lambda i, y, draws: i < 4, turn, start, shapes)
    (dx,) = tf.gradients(y, x)
    got = [session.run([y, dx, draws]) for _ in range(5)]
    for value, gradient, _ in got:
        near(value, gradient)
    assert len(set(np.concatenate([draws for *_, draws in got]).tolist())) == 5 * 4 * 6


def test_losses_flatten_examples_of_another_rank(graph):
    labels, logits = np.eye(3, dtype=np.float32)[[0, 2]], [[1.0, 2.0, 4.0], [0.5, 0.0, -1.0]]
    function = tf.nn.softmax_cross_entropy_with_logits_v2
    found, due = (function(labels=x, logits=logits) for x in ([labels], labels))
    with tf.Session() as session:
        np.testing.assert_array_equal(*session.run([found, due]))


@pytest.mark.parametrize("code", [
    "tf.nn.softmax_cross_entropy_with_logits(labels=[0.0, 1.0, 0.0], logits=x)",
    "tf.nn.softmax_cross_entropy_with_logits_v2(labels=(0.0, 1.0, 0.0), logits=x)",
    "tf.nn.sigmoid_cross_entropy_with_logits(labels=[0.0, 1.0, 0.0], logits=x)",
    "tf.nn.weighted_cross_entropy_with_logits([0.0, 1.0, 0.0], x, 2.0)",
    "tf.nn.log_poisson_loss([0.0, 1.0, 3.0], x, True)",
    "tf.div_no_nan(x, [2.0, 0.0, 4.0])",
    "tf.squared_difference(np.float32([2.0, 0.0, 4.0]), x)",
])  # fmt: skip
def test_lists_beside_eager_tensors(code, session):
    data = np.float32([1.0, 2.0, -3.0])
    y, dx = rg.value_and_grad(lambda x: rg.sum(eval(code, {"tf": tf, "np": np, "x": x})))(data)
    x = tf.constant(data)
    due = tf.reduce_sum(eval(code, {"tf": tf, "np": np, "x": x}))
    values = session.run([due, tf.gradients(due, x)[0]])
    np.testing.assert_allclose([y, *np.ravel(dx)], np.hstack(values), rtol=1e-6)
