"""`tf.contrib.layers` and `arg_scope`, layers as classes, checks, updates of rows, measures."""

import numpy as np
import pytest
import torch

import regrad.v1 as tf
from tests.helpers.rows import refused
from tests.helpers.v1_session import initialized

pytestmark = pytest.mark.usefixtures("graph")

layers, arg_scope = tf.contrib.layers, tf.contrib.framework.arg_scope
X = np.array([[1.0, -2.0, 0.5], [0.0, 3.0, -1.0]], np.float32)
IMAGE = np.random.default_rng(0).normal(size=(2, 5, 5, 3)).astype(np.float32)


def names(key="variables"):
    return [v.op.name for v in tf.get_collection(key)]


@pytest.fixture
def session():
    with tf.Session() as session:
        yield session


# -- layers ----------------------------------------------------------------------------------------

LAYERS = {  # names of TensorFlow 1.15: the layer, its variables, and the op of its result
    "dense": (lambda: layers.fully_connected(X, 4),
              ["fully_connected/weights", "fully_connected/biases"], "fully_connected/Relu"),
    "linear": (lambda: layers.linear(X, 4, scope="out"), ["out/weights", "out/biases"],
               "out/BiasAdd"),
    "conv": (lambda: layers.conv2d(IMAGE, 4, [3, 3]), ["Conv/weights", "Conv/biases"],
             "Conv/Relu"),
    "transposed": (lambda: layers.conv2d_transpose(IMAGE, 4, 3, 2, activation_fn=None),
                   ["Conv2d_transpose/weights", "Conv2d_transpose/biases"],
                   "Conv2d_transpose/BiasAdd"),
    "normalized": (lambda: layers.conv2d(IMAGE, 4, 3, normalizer_fn=layers.batch_norm),
                   ["Conv/weights", "Conv/BatchNorm/beta", "Conv/BatchNorm/moving_mean",
                    "Conv/BatchNorm/moving_variance"], "Conv/Relu"),
    "no biases": (lambda: layers.fully_connected(X, 4, None, biases_initializer=None),
                  ["fully_connected/weights"], "fully_connected/MatMul"),
    "norm": (lambda: layers.batch_norm(IMAGE, scale=True, scope="bn"),
             ["bn/gamma", "bn/beta", "bn/moving_mean", "bn/moving_variance"], None),
    "flatten": (lambda: layers.flatten(IMAGE), [], "Flatten/Reshape"),
    "max_pool": (lambda: layers.max_pool2d(IMAGE, 2), [], "MaxPool2D/MaxPool"),
    "avg_pool": (lambda: layers.avg_pool2d(IMAGE, 2), [], "AvgPool2D/AvgPool"),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_names_of_variables_and_ops(name):
    make, due, op = LAYERS[name]
    y = make()
    assert names() == names("model_variables") == due
    assert op in (None, y.op.name)


def test_scopes_are_numbered_and_reused(session):
    for _ in range(2):
        layers.fully_connected(X, 4)
    y, z = (layers.fully_connected(X, 4, scope="mine", reuse=again) for again in (None, True))
    assert names()[::2] == ["fully_connected/weights", "fully_connected_1/weights", "mine/weights"]
    initialized(session)
    assert (session.run(y) == session.run(z)).all()
    refused(lambda: layers.fully_connected(X, 4, scope="mine"), ValueError, "already exists")
    with tf.variable_scope("net"):
        layers.conv2d(IMAGE, 4, 3)
    assert names()[-2:] == ["net/Conv/weights", "net/Conv/biases"]


def test_values_of_a_dense_layer(session):
    start = tf.constant_initializer([[1.0, -1.0], [2.0, 0.0], [0.0, 1.0]])
    y = layers.fully_connected(
        X, 2, weights_initializer=start, biases_initializer=tf.constant_initializer([0.5, 0.5])
    )
    w = np.array([[1.0, -1.0], [2.0, 0.0], [0.0, 1.0]], np.float32)
    np.testing.assert_allclose(initialized(session).run(y), np.maximum(X @ w + 0.5, 0), rtol=1e-6)


@pytest.mark.parametrize(("stride", "padding", "rate"), [(1, "SAME", 1), (2, "VALID", 1),
                                                         (1, "VALID", 2)])  # fmt: skip
def test_values_of_a_convolution(session, stride, padding, rate):
    y = layers.conv2d(IMAGE, 4, 3, stride, padding, rate=rate, activation_fn=None)
    w = initialized(session).run(tf.trainable_variables()[0])
    due = torch.nn.functional.conv2d(
        torch.tensor(IMAGE).permute(0, 3, 1, 2), torch.tensor(w).permute(3, 2, 0, 1),
        stride=stride, dilation=rate, padding=1 if padding == "SAME" else 0,
    )  # fmt: skip
    np.testing.assert_allclose(session.run(y), due.permute(0, 2, 3, 1), atol=1e-5)


def test_collections_and_regularizers(session):
    y = layers.fully_connected(
        X, 4, weights_regularizer=layers.l2_regularizer(0.5), outputs_collections="results",
        biases_regularizer=layers.l1_regularizer(0.0), variables_collections={"weights": ["w"]},
        trainable=False,
    )  # fmt: skip
    assert (names("w"), names("trainable_variables")) == (["fully_connected/weights"], [])
    assert tf.get_collection("results") == [y]
    (loss,) = tf.losses.get_regularization_losses()
    w = initialized(session).run(tf.global_variables()[0])
    np.testing.assert_allclose(session.run(loss), 0.25 * (w**2).sum(), rtol=1e-6)
    l1 = session.run(layers.l1_regularizer(0.5)(tf.constant(w)))
    np.testing.assert_allclose(l1, 0.5 * abs(w).sum(), rtol=1e-6)


@pytest.mark.parametrize(("uniform", "factor"), [(True, 1.0), (False, 1.3)])
def test_xavier_has_the_variance_of_tensorflow(session, uniform, factor):
    found = session.run(layers.xavier_initializer(uniform, seed=3)([300, 200]))
    spread = 1.0 if uniform else 0.87962566  # of a normal variable that is cut at 2
    assert found.std() == pytest.approx(spread * np.sqrt(factor / 250), rel=0.02)


def test_batch_norm_waits_for_its_updates_on_request(session):
    y = layers.batch_norm(X, decay=0.9, updates_collections=None)
    assert tf.get_collection(tf.GraphKeys.UPDATE_OPS) == []
    found = initialized(session).run(y)
    np.testing.assert_allclose(found, (X - X.mean(0)) / np.sqrt(X.var(0) + 1e-3), rtol=1e-4)
    mean, variance = session.run(tf.global_variables()[1:])
    np.testing.assert_allclose(mean, 0.1 * X.mean(0), rtol=1e-5)
    np.testing.assert_allclose(variance, 0.9 + 0.1 * X.var(0, ddof=1), rtol=1e-5)  # unbiased
    z = layers.batch_norm(X, is_training=False, scope="other", updates_collections="later")
    np.testing.assert_allclose(initialized(session).run(z), X / np.sqrt(1.001), rtol=1e-5)
    layers.batch_norm(X, scope="third", updates_collections="later")
    assert len(tf.get_collection("later")) == 2
    refused(lambda: layers.batch_norm(X, renorm=True), TypeError, "renorm")


def test_dropout_in_training_only(session):
    assert session.run(layers.dropout(X, is_training=False)).tolist() == X.tolist()
    kept = session.run(layers.dropout(np.ones(1000, np.float32), 0.8))
    assert set(kept) == {0.0, np.float32(1.25)} and 0.7 < (kept > 0).mean() < 0.9


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: layers.conv2d(IMAGE, 4, 3, data_format="NCWH"), ValueError, "conv2d.*'NHWC'"),
    (lambda: layers.fully_connected(X), TypeError, "fully_connected: missing.*'num_outputs'"),
    (lambda: layers.max_pool2d(IMAGE, 2, strides=2), TypeError, "max_pool2d.*'strides'.*stride"),
])  # fmt: skip
def test_errors_name_the_layer(call, error, message):
    refused(call, error, message)


# -- arg_scope -------------------------------------------------------------------------------------


@tf.contrib.framework.add_arg_scope
def described(x, a=1, b=2):
    return x, a, b


def test_inner_scopes_add_to_outer_scopes():
    with arg_scope([described], a=3) as outer:
        with arg_scope([described, layers.conv2d], b=4):
            assert described(0) == (0, 3, 4)
            assert described(0, b=5) == (0, 3, 5)
        assert described(0) == (0, 3, 2)
    assert described(0) == (0, 1, 2)
    with arg_scope([described], a=9), arg_scope(outer):
        assert described(0) == (0, 3, 2)


def test_a_scope_for_layers():
    weighted, others = [layers.conv2d, layers.fully_connected], [layers.batch_norm, layers.dropout]
    with arg_scope(weighted, activation_fn=tf.nn.tanh), arg_scope(others, is_training=False):
        assert layers.conv2d(IMAGE, 2, 3).op.type == "Tanh"
        layers.batch_norm(X)
    assert tf.get_collection(tf.GraphKeys.UPDATE_OPS) == []
    refused(lambda: arg_scope([tf.nn.relu], a=1).__enter__(), ValueError, "add_arg_scope")


def test_variables_of_a_scope():
    with tf.variable_scope("net") as scope:
        layers.fully_connected(X, 4)
    layers.fully_connected(X, 4)
    found = tf.contrib.framework.get_variables(scope, "weights")
    assert [v.op.name for v in found] == ["net/fully_connected/weights"]


# -- layers as classes -----------------------------------------------------------------------------


def test_the_calls_of_a_layer_share_its_variables(session):
    dense = tf.layers.Dense(4, activation=tf.nn.relu, name="mine")
    assert dense.variables == []
    refused(lambda: dense.kernel, AttributeError, "first call")
    y, z = dense(tf.constant(X)), dense.apply(tf.constant(X))
    assert names() == ["mine/kernel", "mine/bias"]
    assert [dense.kernel, dense.bias] == dense.trainable_weights == dense.weights
    found = initialized(session).run([y, z])
    assert (found[0] == found[1]).all()
    first, second = tf.layers.Conv2D(2, 3), tf.layers.Conv2D(2, 3, trainable=False)
    assert [first(IMAGE).shape, second(IMAGE).shape] == [(2, 3, 3, 2)] * 2
    assert [first.kernel.op.name, second.kernel.op.name] == ["conv2d/kernel", "conv2d_1/kernel"]
    assert second.trainable_variables == []
    refused(lambda: dense.gamma, AttributeError, "'gamma'")


# -- checks ----------------------------------------------------------------------------------------

CHECKS = {  # calls that hold, and calls that do not
    "assert_equal": ([1, 2], [1, 3], [1, 2]), "assert_none_equal": ([1, 3], [1, 4], [2, 4]),
    "assert_less": ([0, 1], [0, 2], [1, 2]), "assert_less_equal": ([1, 2], [2, 2], [1, 2]),
    "assert_greater": ([2, 3], [2, 2], [1, 2]), "assert_greater_equal": ([1, 3], [0, 3], [1, 2]),
    "assert_positive": ([1, 2], [0, 1]), "assert_negative": ([-1, -2], [-1, 0]),
    "assert_non_negative": ([0, 1], [-1, 1]), "assert_non_positive": ([0, -1], [0, 1]),
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKS)
def test_checks_of_values(session, name):
    good, bad, *rest = CHECKS[name]
    x = tf.placeholder(tf.int32, [None])
    check = getattr(tf, name)(x, *rest, message="of mine")
    with tf.control_dependencies([check]):
        y = tf.identity(x)
    assert session.run(y, {x: good}).tolist() == good
    words = rf"of mine.*{name.removeprefix('assert_')}.*\[{bad[0]} {bad[1]}\]"
    refused(lambda: session.run(y, {x: bad}), tf.errors.InvalidArgumentError, words)


def test_checks_of_ranks(session):
    x = tf.placeholder(tf.float32)
    for check, bad in [(tf.assert_rank(x, 2), X[0]), (tf.assert_rank_at_least(x, 1), X[0, 0])]:
        session.run(check, {x: X})
        refused(lambda c=check, b=bad: session.run(c, {x: b}), tf.errors.InvalidArgumentError)
    tf.assert_rank(tf.constant(X), 2)
    tf.assert_rank_at_least(tf.constant(X), 1)
    refused(lambda: tf.assert_rank(tf.constant(X), 1, message="mine"), ValueError, "mine.*1")
    refused(lambda: tf.assert_rank_at_least(tf.constant(X), 3), ValueError, "at least 3")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numerics(session, bad):
    x = tf.placeholder(tf.float32, [2])
    y = tf.check_numerics(x, "a value")
    dx = tf.gradients(3.0 * y, x)[0]
    found = session.run([y, dx], {x: [1.0, 2.0]})
    assert [a.tolist() for a in found] == [[1.0, 2.0], [3.0, 3.0]]
    refused(lambda: session.run(y, {x: [1.0, bad]}), tf.errors.InvalidArgumentError, "a value : T")


# -- rows of variables, measures, blocks, gradients of convolutions --------------------------------


@pytest.mark.parametrize("jit", [False, True])
def test_rows_are_replaced_and_added(jit):
    v = tf.Variable(np.zeros((4, 2), np.float32))
    ids, rows = tf.placeholder(tf.int32, [None]), tf.placeholder(tf.float32, [None, 2])
    ops = [f(v, ids, rows) for f in (tf.scatter_update, tf.scatter_add, tf.scatter_sub)]
    with tf.control_dependencies([ops[0]]):
        both = tf.scatter_add(v, ids, rows)
    due = np.zeros((4, 2))
    i, x = [3, 1], np.array([[1.0, 2.0], [3.0, 4.0]])
    with tf.Session(jit=jit) as session:
        initialized(session)
        for op, change in zip(ops, (0.0, 1.0, -1.0), strict=True):
            due[i] = due[i] + change * x if change else x
            np.testing.assert_allclose(session.run(op, {ids: i, rows: x}), due)
        due[i] = 2 * x
        np.testing.assert_allclose(session.run(both, {ids: i, rows: x}), due)
        np.testing.assert_allclose(session.run(v), due)
        twice = {ids: [0, 0], rows: x}
        np.testing.assert_allclose(session.run(ops[1], twice)[0], due[0] + x.sum(0))
        if not jit:
            refused(
                lambda: session.run(ops[0], {ids: [4], rows: x[:1]}),
                tf.errors.InvalidArgumentError,
                "index 4 is out of range",
            )


def test_accuracy_over_several_batches(session):
    labels, found = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.int32, [None])
    weights = tf.placeholder(tf.float32, [None])
    value, update = tf.metrics.accuracy(labels, found, updates_collections="updates")
    _, weighted = tf.metrics.accuracy(labels, found, weights)
    assert names("local_variables")[:2] == ["accuracy/total", "accuracy/count"]
    assert names("metric_variables") == names("local_variables")
    assert tf.get_collection("updates") == [update]
    session.run(tf.local_variables_initializer())
    assert session.run(value) == 0.0
    assert session.run(update, {labels: [1, 2], found: [1, 3]}) == 0.5
    assert session.run(update, {labels: [1, 2, 3], found: [1, 2, 3]}) == np.float32(0.8)
    assert session.run(value) == np.float32(0.8)
    feed = {labels: [1, 2], found: [1, 3], weights: [3.0, 1.0]}
    assert session.run(weighted, feed) == 0.75


@pytest.mark.parametrize("known", [True, False])
def test_blocks_become_channels(session, known):
    image = np.arange(2 * 4 * 6 * 3, dtype=np.float32).reshape(2, 4, 6, 3)
    x = tf.placeholder(tf.float32, image.shape if known else [None, None, None, 3])
    y = tf.space_to_depth(x, 2)
    back = tf.depth_to_space(y, 2)
    due = np.concatenate([image[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], axis=-1)
    found = session.run([y, back, tf.gradients(y * due, x)[0]], {x: image})
    for a, b in zip(found, (due, image, image), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("strides", "padding"), [(1, "VALID"), (2, "VALID"), (2, "SAME")])
def test_gradients_of_convolutions_as_functions(session, strides, padding):
    rng = np.random.default_rng(1)
    w = rng.normal(size=(3, 3, 3, 4)).astype(np.float32)
    steps = [1, strides, strides, 1]
    pad = 1 if padding == "SAME" else 0
    x, filters = torch.tensor(IMAGE).permute(0, 3, 1, 2), torch.tensor(w).permute(3, 2, 0, 1)
    size = torch.nn.functional.conv2d(x, filters, stride=strides, padding=pad).shape
    dy = torch.tensor(rng.normal(size=size).astype(np.float32))
    grad = torch.nn.grad
    dx = grad.conv2d_input(x.shape, filters, dy, strides, pad).permute(0, 2, 3, 1)
    dw = grad.conv2d_weight(x, filters.shape, dy, strides, pad).permute(2, 3, 1, 0)
    last = dy.permute(0, 2, 3, 1).numpy()
    found = session.run([
        tf.nn.conv2d_backprop_input(IMAGE.shape, w, last, steps, padding),
        tf.nn.conv2d_backprop_filter(IMAGE, w.shape, last, steps, padding),
    ])  # fmt: skip
    for a, b in zip(found, (dx, dw), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    refused(
        lambda: tf.nn.conv2d_backprop_filter(
            IMAGE, w.shape, last, steps, padding, data_format="NCHW"
        ),
        ValueError,
        "NHWC",
    )


def test_older_names():
    x = tf.pack([tf.constant([1.0, 2.0]), tf.constant([3.0, 4.0])], axis=1)
    assert (x.op.type, x.shape, len(tf.unpack(x, axis=1))) == ("Pack", (2, 2), 2)


@pytest.mark.parametrize("time", [True, False])
@pytest.mark.parametrize("batch", [True, False])
def test_losses_of_sequences(session, time, batch):
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(2, 3, 4)).astype(np.float32)
    targets, weights = rng.integers(0, 4, (2, 3)), np.float32([[1, 2, 0], [1, 1, 3]])
    loss = tf.contrib.seq2seq.sequence_loss(logits, targets, weights, time, batch)
    x = torch.tensor(logits).permute(0, 2, 1)
    due = torch.nn.functional.cross_entropy(x, torch.tensor(targets), reduction="none")
    axes = tuple(axis for axis, averaged in enumerate((batch, time)) if averaged)
    due, total = due.numpy() * weights, weights
    if axes:
        due, total = due.sum(axes), weights.sum(axes)
    np.testing.assert_allclose(session.run(loss), due / total if axes else due, rtol=1e-5)
