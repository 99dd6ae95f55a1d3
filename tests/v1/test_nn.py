"""tf.nn (and the ops of tf.image), against eager regrad and against NumPy."""

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from tests.helpers.v1_session import run

pytestmark = pytest.mark.usefixtures("graph")


def normal(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def positive(*shape):
    return np.abs(normal(*shape)) + np.float32(0.1)


def shares(*shape):
    x = positive(*shape)
    return x / x.sum(axis=-1, keepdims=True)


def near(x, y):
    np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


# -- values and gradients, against eager regrad --------------------------------------------------

ROWS = normal(4, 3)
IMAGES = normal(2, 6, 5, 3)
VOLUMES = normal(2, 3, 4, 3, 2)
FIRST = IMAGES.transpose(0, 3, 1, 2)
CHANNELS = normal(3)
STEPS = [1, 2, 1, 1]


def last(x):
    return rg.permute_dims(x, (0, 2, 3, 1))


def first(x):
    return rg.permute_dims(x, (0, 3, 1, 2))


def cross_entropy(labels, logits):
    return rg.losses.softmax_cross_entropy(labels, logits, None, "none")


# what: (with tf, with rg, the inputs by which it is differentiated)
CASES = {
    "relu": (tf.nn.relu, rg.nn.relu, [ROWS]),
    "relu6": (tf.nn.relu6, rg.nn.relu6, [6 * ROWS]),
    "elu": (tf.nn.elu, rg.nn.elu, [ROWS]),
    "selu": (tf.nn.selu, rg.nn.selu, [ROWS]),
    "swish": (tf.nn.swish, rg.nn.silu, [ROWS]),
    "leaky_relu": (tf.nn.leaky_relu, rg.nn.leaky_relu, [ROWS]),
    "leaky_relu alpha": (
        lambda x: tf.nn.leaky_relu(x, 0.5),
        lambda x: rg.nn.leaky_relu(x, 0.5),
        [ROWS],
    ),
    "leaky_relu tensor": (tf.nn.leaky_relu, rg.nn.prelu, [ROWS, np.float32(0.3)]),
    "crelu": (tf.nn.crelu, lambda x: rg.nn.relu(rg.concat([x, -x], axis=-1)), [ROWS]),
    "sigmoid": (tf.nn.sigmoid, rg.nn.sigmoid, [ROWS]),
    "tanh": (tf.nn.tanh, rg.tanh, [ROWS]),
    "softplus": (tf.nn.softplus, rg.nn.softplus, [ROWS]),
    "softsign": (tf.nn.softsign, rg.nn.softsign, [ROWS]),
    "softmax": (tf.nn.softmax, rg.nn.softmax, [ROWS]),
    "softmax axis": (lambda x: tf.nn.softmax(x, 0), lambda x: rg.nn.softmax(x, 0), [ROWS]),
    "softmax dim": (lambda x: tf.nn.softmax(x, dim=0), lambda x: rg.nn.softmax(x, 0), [ROWS]),
    "log_softmax": (tf.nn.log_softmax, rg.nn.log_softmax, [ROWS]),
    "cross entropy": (
        lambda x, y: tf.nn.softmax_cross_entropy_with_logits_v2(labels=x, logits=y),
        cross_entropy,
        [shares(4, 3), ROWS],
    ),
    "cross entropy axis": (
        lambda x, y: tf.nn.softmax_cross_entropy_with_logits_v2(labels=x, logits=y, axis=0),
        lambda x, y: cross_entropy(rg.matrix_transpose(x), rg.matrix_transpose(y)),
        [shares(4, 3), ROWS],
    ),
    "sigmoid cross entropy": (
        lambda x, y: tf.nn.sigmoid_cross_entropy_with_logits(labels=x, logits=y),
        lambda x, y: rg.losses.sigmoid_cross_entropy(x, y, None, "none"),
        [shares(4, 3), 20 * ROWS],
    ),
    "weighted cross entropy": (
        lambda x, y: tf.nn.weighted_cross_entropy_with_logits(x, y, 3.0),
        lambda x, y: (1 - x) * y + (1 + 2 * x) * rg.nn.softplus(-y),
        [shares(4, 3), ROWS],
    ),
    "l2_loss": (tf.nn.l2_loss, lambda x: rg.sum(x * x) / 2, [ROWS]),
    "l2_normalize": (
        lambda x: tf.nn.l2_normalize(x, 1),
        lambda x: rg.nn.l2_normalize(x, 1),
        [ROWS],
    ),
    "bias_add": (tf.nn.bias_add, rg.add, [ROWS, CHANNELS]),
    "bias_add NCHW": (
        lambda x, b: tf.nn.bias_add(x, b, "NCHW"),
        lambda x, b: x + rg.reshape(b, (3, 1, 1)),
        [FIRST, CHANNELS],
    ),
    "xw_plus_b": (tf.nn.xw_plus_b, lambda x, w, b: x @ w + b, [ROWS, normal(3, 2), normal(2)]),
    "relu_layer": (
        tf.nn.relu_layer,
        lambda x, w, b: rg.nn.relu(x @ w + b),
        [ROWS, normal(3, 2), normal(2)],
    ),
    "conv1d": (
        lambda x, w: tf.nn.conv1d(x, w, 2, "SAME"),
        lambda x, w: rg.nn.conv1d(x, w, 2, "same"),
        [normal(2, 7, 3), normal(3, 3, 4)],
    ),
    "conv2d": (
        lambda x, w: tf.nn.conv2d(x, w, STEPS, "SAME"),
        lambda x, w: rg.nn.conv2d(x, w, (2, 1), "same"),
        [IMAGES, normal(3, 3, 3, 2)],
    ),
    "conv2d valid": (
        lambda x, w: tf.nn.conv2d(x, filters=w, strides=2, padding="VALID"),
        lambda x, w: rg.nn.conv2d(x, w, 2, "valid"),
        [IMAGES, normal(3, 3, 3, 2)],
    ),
    "conv2d dilated": (
        lambda x, w: tf.nn.conv2d(x, w, [1, 1, 1, 1], "SAME", dilations=[1, 2, 2, 1]),
        lambda x, w: rg.nn.conv2d(x, w, 1, "same", 2),
        [IMAGES, normal(3, 3, 3, 2)],
    ),
    "conv2d pairs": (
        lambda x, w: tf.nn.conv2d(x, w, [1, 1, 1, 1], [[0, 0], [1, 0], [0, 2], [0, 0]]),
        lambda x, w: rg.nn.conv2d(x, w, 1, ((1, 0), (0, 2))),
        [IMAGES, normal(3, 3, 3, 2)],
    ),
    "conv2d NCHW": (
        lambda x, w: tf.nn.conv2d(x, w, [1, 1, 2, 1], "SAME", data_format="NCHW"),
        lambda x, w: first(rg.nn.conv2d(last(x), w, (2, 1), "same")),
        [FIRST, normal(3, 3, 3, 2)],
    ),
    "conv3d": (
        lambda x, w: tf.nn.conv3d(x, w, [1, 1, 2, 1, 1], "SAME"),
        lambda x, w: rg.nn.conv3d(x, w, (1, 2, 1), "same"),
        [VOLUMES, normal(2, 2, 2, 2, 3)],
    ),
    "convolution": (
        lambda x, w: tf.nn.convolution(x, w, "VALID", dilation_rate=[2, 1]),
        lambda x, w: rg.nn.conv2d(x, w, 1, "valid", (2, 1)),
        [IMAGES, normal(2, 2, 3, 2)],
    ),
    "atrous_conv2d": (
        lambda x, w: tf.nn.atrous_conv2d(x, w, 2, "SAME"),
        lambda x, w: rg.nn.conv2d(x, w, 1, "same", 2),
        [IMAGES, normal(2, 2, 3, 2)],
    ),
    "depthwise_conv2d": (
        lambda x, w: tf.nn.depthwise_conv2d(x, w, [1, 1, 1, 1], "SAME"),
        lambda x, w: rg.nn.depthwise_conv2d(x, w, 1, "same"),
        [IMAGES, normal(3, 3, 3, 2)],
    ),
    "separable_conv2d": (
        lambda x, w, p: tf.nn.separable_conv2d(x, w, p, [1, 1, 1, 1], "VALID"),
        lambda x, w, p: rg.nn.separable_conv2d(x, w, p, 1, "valid"),
        [IMAGES, normal(3, 3, 3, 2), normal(1, 1, 6, 2)],
    ),
    "conv2d_transpose": (
        lambda x, w: tf.nn.conv2d_transpose(x, w, [2, 12, 10, 2], [1, 2, 2, 1]),
        lambda x, w: rg.nn.conv2d_transpose(x, w, (2, 12, 10, 2), 2, "same"),
        [IMAGES, normal(3, 3, 2, 3)],
    ),
    "max_pool": (
        lambda x: tf.nn.max_pool(x, [1, 2, 3, 1], [1, 2, 1, 1], "SAME"),
        lambda x: rg.nn.max_pool(x, (2, 3), (2, 1), "same"),
        [IMAGES],
    ),
    "max_pool NCHW": (
        lambda x: tf.nn.max_pool(x, [1, 1, 2, 3], [1, 1, 2, 1], "VALID", "NCHW"),
        lambda x: first(rg.nn.max_pool(last(x), (2, 3), (2, 1), "valid")),
        [FIRST],
    ),
    "avg_pool": (
        lambda x: tf.nn.avg_pool(x, [1, 2, 2, 1], STEPS, "SAME"),
        lambda x: rg.nn.avg_pool(x, 2, (2, 1), "same"),
        [IMAGES],
    ),
    "max_pool3d": (
        lambda x: tf.nn.max_pool3d(x, [1, 2, 2, 2, 1], [1, 1, 1, 1, 1], "VALID"),
        lambda x: rg.nn.max_pool3d(x, 2, 1, "valid"),
        [VOLUMES],
    ),
    "avg_pool3d": (
        lambda x: tf.nn.avg_pool3d(x, 2, 1, "VALID"),
        lambda x: rg.nn.avg_pool3d(x, 2, 1, "valid"),
        [VOLUMES],
    ),
    "batch_normalization": (
        lambda x, m, v, b, g: tf.nn.batch_normalization(x, m, v, b, g, 1e-3),
        lambda x, m, v, b, g: rg.nn.batch_norm(x, m, v, b, g, 1e-3),
        [ROWS, CHANNELS, positive(3), CHANNELS, positive(3)],
    ),
    "batch_normalization bare": (
        lambda x, m, v: tf.nn.batch_normalization(x, m, v, None, None, 1e-3),
        lambda x, m, v: rg.nn.batch_norm(x, m, v),
        [ROWS, CHANNELS, positive(3)],
    ),
    "moments": (
        lambda x: tf.concat(tf.nn.moments(x, [0]), 0),
        lambda x: rg.concat(rg.nn.moments(x, 0), axis=0),
        [ROWS],
    ),
    "moments keep_dims": (
        lambda x: tf.concat(tf.nn.moments(x, [0, 1, 2], keep_dims=True), 0),
        lambda x: rg.concat(rg.nn.moments(x, (0, 1, 2), True), axis=0),
        [IMAGES],
    ),
    "lrn": (
        lambda x: tf.nn.lrn(x, 1, 2.0, 0.5, 0.75),
        lambda x: rg.nn.local_response_normalization(x, 1, 2.0, 0.5, 0.75),
        [IMAGES],
    ),
    "embedding_lookup": (
        lambda x: tf.nn.embedding_lookup(x, [[2, 0], [3, 3]]),
        lambda x: rg.take(x, [[2, 0], [3, 3]], axis=0),
        [ROWS],
    ),
    "top_k": (lambda x: tf.nn.top_k(x, 2).values, lambda x: rg.top_k(x, 2)[0], [ROWS]),
    "log_poisson_loss": (
        lambda z, c: tf.nn.log_poisson_loss(z, c),
        lambda z, c: rg.exp(c) - z * c,
        [positive(4, 3), ROWS],
    ),
    "resize_bilinear": (
        lambda x: tf.image.resize_bilinear(x, [4, 7]),
        lambda x: rg.nn.resize_bilinear(x, (4, 7)),
        [IMAGES],
    ),
    "resize_nearest_neighbor": (
        lambda x: tf.image.resize_nearest_neighbor(x, [4, 7], align_corners=True),
        lambda x: rg.nn.resize_nearest(x, (4, 7), True),
        [IMAGES],
    ),
    "flip_left_right": (tf.image.flip_left_right, lambda x: rg.flip(x, axis=2), [IMAGES]),
    "flip_up_down": (tf.image.flip_up_down, lambda x: rg.flip(x, axis=1), [IMAGES]),
}  # fmt: skip


KINDS = ["constants", "unknown batch", "unknown rank"]
PAIRS = [(c, k) for c in CASES for k in KINDS]
PAIRS.remove(("convolution", "unknown rank"))  # the filter's rank decides which convolution it is


@pytest.mark.parametrize(("case", "kind"), PAIRS)
def test_values_and_gradients(case, kind):
    with_tf, with_rg, arrays = CASES[case]
    due = with_rg(*map(rg.tensor, arrays))
    gradients = rg.grads(lambda *xs: rg.sum(rg.square(with_rg(*xs))))(list(arrays))
    if kind == "constants":
        xs, feed = [tf.constant(a) for a in arrays], None
    else:
        shapes = [None if kind == "unknown rank" else [None, *a.shape[1:]] for a in arrays]
        shapes = [[] if a.ndim == 0 else s for a, s in zip(arrays, shapes, strict=True)]
        xs = [tf.placeholder(tf.float32, shape) for shape in shapes]
        feed = dict(zip(xs, arrays, strict=True))
    y = with_tf(*xs)
    assert y.dtype == tf.float32
    assert y.shape.is_compatible_with(due.shape)
    assert kind != "constants" or y.shape == due.shape
    got, *found = run([y, *tf.gradients(tf.reduce_sum(tf.square(y)), xs)], feed)
    near(got, due.numpy())
    for a, b in zip(found, gradients, strict=True):
        near(a, b.numpy())


@pytest.mark.parametrize("case", ["relu", "softmax", "conv2d", "max_pool", "bias_add", "moments"])
def test_eager_tensors_are_computed_at_once(case):
    with_tf, with_rg, arrays = CASES[case]
    if case == "moments":
        with_tf, with_rg = lambda x: tf.nn.moments(x, [0])[1], lambda x: rg.nn.moments(x, 0)[1]
    y = with_tf(*map(rg.tensor, arrays))
    assert isinstance(y, rg.Tensor)
    near(y.numpy(), with_rg(*map(rg.tensor, arrays)).numpy())


# -- names, op types, overrides ------------------------------------------------------------------

W = normal(3, 3, 3, 2)
NAMES = {
    "tf.nn.relu(x)": ("Relu", "Relu"),
    "tf.nn.relu6(x)": ("Relu6", "Relu6"),
    "tf.nn.elu(x)": ("Elu", "Elu"),
    "tf.nn.leaky_relu(x)": ("LeakyRelu", "LeakyRelu"),
    "tf.nn.crelu(x)": ("Relu", "CRelu/Relu"),
    "tf.nn.sigmoid(x)": ("Sigmoid", "Sigmoid"),
    "tf.nn.softplus(x)": ("Softplus", "Softplus"),
    "tf.nn.softmax(x)": ("Softmax", "Softmax"),
    "tf.nn.log_softmax(x)": ("LogSoftmax", "LogSoftmax"),
    "tf.nn.sparse_softmax_cross_entropy_with_logits(labels=[0, 1, 2, 0], logits=x)": (
        "SparseSoftmaxCrossEntropyWithLogits",
        "SparseSoftmaxCrossEntropyWithLogits/SparseSoftmaxCrossEntropyWithLogits",
    ),
    "tf.nn.sparse_softmax_cross_entropy_with_logits(labels=[0, 1, 2, 0], logits=x, name='xent')": (
        "SparseSoftmaxCrossEntropyWithLogits",
        "xent/xent",
    ),
    "tf.nn.l2_normalize(x, 1)": ("Mul", "l2_normalize"),
    "tf.nn.bias_add(x, b)": ("BiasAdd", "BiasAdd"),
    "tf.nn.xw_plus_b(x, k, b)": ("BiasAdd", "xw_plus_b"),
    "tf.nn.relu_layer(x, k, b)": ("Relu", "relu_layer"),
    "tf.nn.conv2d(im, w, 1, 'SAME')": ("Conv2D", "Conv2D"),
    "tf.nn.conv1d(tf.ones([2, 5, 3]), tf.ones([2, 3, 4]), 1, 'SAME')": ("Squeeze", None),
    "tf.nn.depthwise_conv2d(im, w, [1, 1, 1, 1], 'SAME')": ("DepthwiseConv2dNative", "depthwise"),
    "tf.nn.conv2d_transpose(im, w2, [2, 6, 5, 2], 1)": ("Conv2DBackpropInput", "conv2d_transpose"),
    "tf.nn.max_pool(im, 2, 2, 'SAME')": ("MaxPool", "MaxPool"),
    "tf.nn.avg_pool(im, 2, 2, 'SAME')": ("AvgPool", "AvgPool"),
    "tf.nn.lrn(im)": ("LRN", "LRN"),
    "tf.nn.top_k(x)[0]": ("TopKV2", "TopKV2"),
    "tf.nn.embedding_lookup(x, [1])": ("GatherV2", "embedding_lookup"),
    "tf.random_normal([2])": ("AddV2", "random_normal"),
    "tf.random_uniform([2])": ("AddV2", "random_uniform"),
    "tf.random_uniform([2], 0, 5, tf.int32)": ("RandomUniformInt", "random_uniform"),
    "tf.truncated_normal([2])": ("AddV2", "truncated_normal"),
    "tf.random_shuffle(x)": ("RandomShuffle", "RandomShuffle"),
    "tf.losses.mean_squared_error(x, x)": (None, "mean_squared_error/value"),
    "tf.image.resize_bilinear(im, [2, 2])": ("ResizeBilinear", "ResizeBilinear"),
}


@pytest.mark.parametrize("expression", NAMES)
def test_op_types_and_default_names(expression):
    scope = {"tf": tf, "x": tf.constant(ROWS, name="x"), "b": tf.constant(CHANNELS, name="b")}
    scope |= {"im": tf.constant(IMAGES, name="im"), "w": tf.constant(W, name="w")}
    scope |= {"k": tf.constant(normal(3, 3)), "w2": tf.constant(normal(3, 3, 2, 3), name="w2")}
    op = eval(expression, scope).op
    op_type, name = NAMES[expression]
    assert op_type in (None, op.type)
    assert name in (None, op.name)


def test_a_name_is_the_ops():
    x = tf.constant(ROWS)
    assert tf.nn.relu(x, name="a").name == "a:0"
    assert tf.nn.bias_add(x, CHANNELS, name="b").name == "b:0"
    assert tf.nn.conv2d(IMAGES, W, 1, "SAME", name="c").name == "c:0"
    assert tf.nn.dropout(x, 0.5, name="d").name.startswith("d/")
    assert tf.random_normal([2], name="r").name == "r:0"


@pytest.mark.parametrize(
    ("op_type", "build"),
    [
        ("Relu", lambda x, w: tf.nn.relu(x)),
        ("Conv2D", lambda x, w: tf.nn.conv2d(x, w, [1, 1, 1, 1], "SAME")),
        ("Conv2D", lambda x, w: tf.layers.conv2d(x, 2, 3)),
        ("MaxPool", lambda x, w: tf.nn.max_pool(x, [1, 2, 2, 1], [1, 2, 2, 1], "SAME")),
        ("AvgPool", lambda x, w: tf.nn.avg_pool(x, [1, 2, 2, 1], [1, 2, 2, 1], "SAME")),
        ("Softmax", lambda x, w: tf.nn.softmax(x)),
        ("LogSoftmax", lambda x, w: tf.nn.softmax_cross_entropy_with_logits(labels=x, logits=x)),
        ("BiasAdd", lambda x, w: tf.nn.bias_add(x, CHANNELS)),
        ("MatMul", lambda x, w: tf.layers.dense(x, 2)),
    ],
)
def test_ops_can_be_overridden(graph, op_type, build):
    def rule(op, grad):
        zeros = [tf.zeros_like(op.inputs[0]) for _ in op.inputs]
        return [zeros[0] + 7.0, *[None] * (len(zeros) - 1)]

    x, w = tf.placeholder(tf.float32, [None, 6, 5, 3]), tf.constant(W)
    with graph.gradient_override_map({op_type: rule}) as used:
        y = build(x, w)
    assert run(tf.gradients(y, x)[0], {x: IMAGES}).ravel()[0] == 7.0
    used.assert_fired()


# -- dtypes and arguments ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build",
    [
        lambda: tf.nn.sigmoid(tf.constant([1])),
        lambda: tf.nn.softmax(tf.constant([1, 2])),
        lambda: tf.nn.elu(tf.constant([1])),
        lambda: tf.nn.conv2d(tf.constant(IMAGES), tf.constant(W.astype(np.float64)), 1, "SAME"),
        lambda: tf.nn.bias_add(tf.constant(ROWS), tf.constant([1, 2, 3])),
        lambda: tf.nn.sigmoid_cross_entropy_with_logits(
            labels=tf.constant([1]), logits=ROWS[0, :1]
        ),
        lambda: tf.random_normal([2], dtype=tf.int32),
    ],
)
def test_dtypes_are_strict(build):
    with pytest.raises(TypeError):
        build()


def test_relu_of_integers():
    assert run(tf.nn.relu(tf.constant([-1, 2]))).tolist() == [0, 2]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: tf.nn.softmax_cross_entropy_with_logits(ROWS, ROWS), "named arguments"),
        (lambda: tf.nn.softmax_cross_entropy_with_logits(logits=ROWS), "must be provided"),
        (lambda: tf.nn.sparse_softmax_cross_entropy_with_logits([1], ROWS), "named arguments"),
        (lambda: tf.nn.sigmoid_cross_entropy_with_logits(ROWS, ROWS), "named arguments"),
        (
            lambda: tf.nn.softmax_cross_entropy_with_logits_v2(labels=ROWS[:, :2], logits=ROWS),
            "must have one shape",
        ),
        (
            lambda: tf.nn.sparse_softmax_cross_entropy_with_logits(labels=[1, 2], logits=ROWS),
            "the shape",
        ),
        (lambda: tf.nn.softmax(ROWS, axis=0, dim=0), "both"),
        (lambda: tf.nn.conv2d(IMAGES, W, [2, 1, 1, 1], "SAME"), "batch and the channels"),
        (lambda: tf.nn.conv2d(IMAGES, W, [1, 1, 1, 1], "HALF"), "padding"),
        (lambda: tf.nn.conv2d(IMAGES, W, 1, "SAME", data_format="NHCW"), "data_format"),
        (lambda: tf.nn.conv2d(IMAGES, W[:, :, :2], 1, "SAME"), "channels"),
        (lambda: tf.nn.max_pool(IMAGES, [1, 9, 9, 1], 1, "VALID"), "window"),
        (lambda: tf.nn.bias_add(ROWS, [1.0]), "channels"),
        (lambda: tf.nn.bias_add(ROWS, ROWS), "rank 1"),
        (lambda: tf.nn.dropout(ROWS, 0.0), "keep_prob"),
        (lambda: tf.nn.dropout(ROWS, 2.0), "keep_prob"),
        (lambda: tf.nn.dropout(ROWS), "keep_prob"),
        (lambda: tf.random_uniform([2], dtype=tf.int32), "maxval"),
        (lambda: tf.random_normal(5), "rank 1"),
        (lambda: tf.losses.mean_squared_error(ROWS, ROWS[:, :2]), "one shape"),
        (lambda: tf.losses.mean_squared_error(ROWS, ROWS, [1.0, 2.0]), "broadcast"),
        (lambda: tf.losses.mean_squared_error(ROWS, ROWS, reduction="mean"), "Reduction"),
        (lambda: tf.losses.mean_squared_error(None, ROWS), "None"),
        (lambda: tf.losses.get_total_loss(), "no loss"),
        (lambda: tf.losses.cosine_distance(ROWS, ROWS), "axis"),
    ],
)
def test_mistakes(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def test_mistakes_that_only_the_run_can_see():
    x = tf.placeholder(tf.float32, [None, 3])
    y = tf.placeholder(tf.float32, [None, 3])
    ids = tf.placeholder(tf.int32, [None])
    loss = tf.nn.softmax_cross_entropy_with_logits(labels=y, logits=x)
    sparse = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=ids, logits=x)
    low = tf.placeholder(tf.int32, [])
    for fetch, feed in [
        (loss, {x: ROWS, y: ROWS[:1]}),
        (sparse, {x: ROWS, ids: [0, 1, 2]}),
        (sparse, {x: ROWS, ids: [0, 1, 2, 3]}),
        (tf.random_uniform([2], low, 3, tf.int32), {low: 3}),
    ]:
        with pytest.raises(tf.errors.InvalidArgumentError):
            run(fetch, feed)


# -- what else they compute ----------------------------------------------------------------------


def test_cross_entropy_has_no_gradient_by_labels_unless_v2():
    labels, logits = tf.constant(shares(4, 3)), tf.constant(ROWS)
    loss = tf.nn.softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    assert tf.gradients(loss, labels) == [None]
    (by_logits,) = tf.gradients(loss, logits)
    near(run(by_logits), run(tf.nn.softmax(logits) - labels))


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
@pytest.mark.parametrize("shape", [[None], None])
def test_sparse_cross_entropy(dtype, shape):
    x, ids = tf.placeholder(tf.float32, [None, 3]), tf.placeholder(dtype, shape)
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=ids, logits=x)
    feed = {x: ROWS, ids: [0, 2, 1, 1]}
    onehot = np.eye(3, dtype=np.float32)[[0, 2, 1, 1]]
    dense = tf.nn.softmax_cross_entropy_with_logits(labels=onehot, logits=x)
    for y in (loss, tf.gradients(loss, x)[0]):
        due = dense if y is loss else tf.gradients(dense, x)[0]
        near(*run([y, due], feed))


def test_labels_and_logits_tell_each_others_shapes():
    known, rows = tf.constant(ROWS), tf.placeholder(tf.float32, [None, 3])
    for x, y in [(known, rows), (rows, known), (known, tf.placeholder(tf.float32))]:
        loss = tf.nn.sigmoid_cross_entropy_with_logits(labels=x, logits=y)
        assert loss.shape.as_list() == [4, 3]


def test_integer_labels_take_the_dtype_of_the_logits():
    loss = tf.nn.softmax_cross_entropy_with_logits(labels=[[0, 1]], logits=[[5.0, 5.0]])
    near(run(loss), [np.log(2.0)])


def test_sigmoid_cross_entropy_is_stable():
    loss = tf.nn.sigmoid_cross_entropy_with_logits(
        labels=[0.0, 1.0, 1.0], logits=[-100.0, 100.0, 30.0]
    )
    near(run(loss), [0.0, 0.0, np.exp(-30.0)])
    assert run(loss)[2] > 0


def test_log_poisson_loss_in_full():
    z, c = np.float32([0.5, 1.0, 3.0]), np.float32([0.1, 0.2, 0.3])
    stirling = z * np.log(z) - z + 0.5 * np.log(2 * np.pi * z)
    due = np.exp(c) - z * c + np.where(z > 1, stirling, 0)
    near(run(tf.nn.log_poisson_loss(z, c, compute_full_loss=True)), due)


def test_zero_fraction():
    assert run(tf.nn.zero_fraction(tf.constant([0, 1, 0, 2]))) == 0.5


def test_transposed_convolution_of_an_unknown_batch():
    x, w = tf.placeholder(tf.float32, [None, 3, 3, 2]), normal(3, 3, 4, 2)
    batch = tf.shape(x)[0]
    y = tf.nn.conv2d_transpose(x, w, tf.stack([batch, 6, 6, 4]), [1, 2, 2, 1])
    z = tf.nn.conv2d_transpose(x, w, [batch, 6, 6, 4], [1, 2, 2, 1], "SAME")
    assert y.shape.as_list() == z.shape.as_list() == [None, 6, 6, 4]
    values = normal(2, 3, 3, 2)
    due = rg.nn.conv2d_transpose(values, w, (2, 6, 6, 4), 2, "same").numpy()
    near(run(y, {x: values}), due)
    near(run(z, {x: values}), due)
    first = tf.transpose(x, [0, 3, 1, 2])
    w = tf.nn.conv2d_transpose(first, w, [batch, 4, 6, 6], [1, 1, 2, 2], data_format="NCHW")
    near(run(w, {x: values}), due.transpose(0, 3, 1, 2))


def test_static_shapes_of_an_unknown_batch():
    x = tf.placeholder(tf.float32, [None, 28, 28, 1])
    h = tf.nn.conv2d(x, normal(5, 5, 1, 8), [1, 1, 1, 1], "VALID")
    assert h.shape.as_list() == [None, 24, 24, 8]
    h = tf.nn.max_pool(h, [1, 2, 2, 1], [1, 2, 2, 1], "VALID")
    assert h.shape.as_list() == [None, 12, 12, 8]
    assert tf.layers.flatten(h).shape.as_list() == [None, 1152]
    assert tf.nn.top_k(tf.placeholder(tf.float32, [None, 5]), 2).indices.shape.as_list() == [
        None,
        2,
    ]


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


@pytest.mark.parametrize("strategy", ["mod", "div"])
def test_embedding_in_several_tables(strategy):
    whole = normal(7, 2)
    tables = [whole[i::3] for i in range(3)] if strategy == "mod" else np.split(whole, [3, 5])
    ids = np.array([[0, 6], [3, 4]])
    found = tf.nn.embedding_lookup([tf.constant(t) for t in tables], ids, strategy)
    near(run(found), whole[ids])


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
