"""tf.layers: values, the names of variables, sharing, training."""

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from tests.helpers.rows import refused
from tests.helpers.v1_rows import IMAGES, ROWS, normal
from tests.helpers.v1_session import initialized

pytestmark = pytest.mark.usefixtures("graph")


def names(variables=None):
    return [v.name for v in variables or tf.global_variables()]


def near(x, y):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


# -- variables and their names -------------------------------------------------------------------


def rows():
    return tf.placeholder(tf.float32, [None, 3])


def images():
    return tf.placeholder(tf.float32, [None, 6, 5, 3])


def of(*sizes):
    return tf.placeholder(tf.float32, [None, *sizes])


MOVING = {"gamma": [3], "beta": [3], "moving_mean": [3], "moving_variance": [3]}
LAYERS = {  # a layer, its variables or the shape of its kernel, and the shape of its result
    "dense": (lambda: tf.layers.dense(rows(), 2), [3, 2], [2]),
    "conv1d": (lambda: tf.layers.conv1d(of(7, 3), 4, 3), [3, 3, 4], [5, 4]),
    "conv2d": (lambda: tf.layers.conv2d(images(), 4, [3, 2], 2, "same"), [3, 2, 3, 4], [3, 3, 4]),
    "conv3d": (lambda: tf.layers.conv3d(of(4, 4, 4, 2), 3, 2), [2, 2, 2, 2, 3], [3, 3, 3, 3]),
    "conv2d_transpose": (lambda: tf.layers.conv2d_transpose(images(), 4, 3, (2, 2)), [3, 3, 4, 3],
                         [13, 11, 4]),
    "batch_normalization": (lambda: tf.layers.batch_normalization(images()), MOVING, [6, 5, 3]),
}  # fmt: skip


@pytest.mark.parametrize("layer", LAYERS)
def test_variables(layer, session):
    build, kernel, shape = LAYERS[layer]
    variables = kernel if kernel is MOVING else {"kernel": kernel, "bias": shape[-1:]}
    y, again = build(), build()
    assert y.shape.as_list() == [None, *shape]
    assert y.op.name.startswith(f"{layer}/")
    assert again.op.name.startswith(f"{layer}_1/")
    due = [f"{scope}/{name}:0" for scope in (layer, f"{layer}_1") for name in variables]
    assert names() == due
    assert [v.shape.as_list() for v in tf.global_variables()] == [*variables.values()] * 2
    trainable = [n for n in due if "moving" not in n]
    assert names(tf.trainable_variables()) == trainable
    values = initialized(session).run(tf.global_variables())
    for name, value in zip(due, values, strict=True):
        if "kernel" not in name:
            assert (value == ("gamma" in name or "variance" in name)).all()


def test_no_bias_no_scale_no_center_and_not_trainable():
    tf.layers.dense(rows(), 2, use_bias=False, trainable=False)
    tf.layers.conv2d(images(), 2, 1, use_bias=False, name="c")
    tf.layers.batch_normalization(rows(), center=False, scale=False, name="b")
    assert names() == ["dense/kernel:0", "c/kernel:0", "b/moving_mean:0", "b/moving_variance:0"]
    assert names(tf.trainable_variables()) == ["c/kernel:0"]


@pytest.mark.parametrize("second", [True, tf.AUTO_REUSE])
def test_two_networks_share_variables(second, session):
    x, outputs = rows(), []
    for reuse in (None if second is True else second, second):
        with tf.variable_scope("net", reuse=reuse):
            h = tf.layers.dense(x, 4, tf.nn.relu)
            outputs.append(tf.layers.dense(h, 2, name="out"))
    ws = tf.trainable_variables()
    scopes = ["net/dense", "net/out"]
    assert names(ws) == [f"{s}/{name}:0" for s in scopes for name in ("kernel", "bias")]
    assert names(tf.trainable_variables("net/dense")) == names(ws[:2])
    assert [y.op.name for y in outputs] == ["net/out/BiasAdd", "net_1/out/BiasAdd"]
    grads = [tf.gradients(ys, ws) for ys in (outputs, outputs[0])]
    (a, b), both, once = initialized(session).run([outputs, *grads], {x: ROWS})
    np.testing.assert_array_equal(a, b)
    for c, d in zip(both, once, strict=True):
        near(c, 2 * d)


def test_a_layer_shares_by_name(session):
    x = rows()
    y = tf.layers.dense(x, 2, name="a")
    z = tf.layers.dense(x, 2, name="a", reuse=True)
    np.testing.assert_array_equal(*initialized(session).run([y, z], {x: ROWS}))
    for name, reuse, words in (("a", None, "already exists"), ("b", True, "does not exist")):
        with pytest.raises(ValueError, match=words):
            tf.layers.dense(x, 2, name=name, reuse=reuse)


# -- what layers compute -------------------------------------------------------------------------


def first(layer):
    """The layer of images whose channels come first, with its result turned back."""
    return lambda x: tf.transpose(layer(tf.transpose(x, [0, 3, 1, 2])), [0, 2, 3, 1])


WEIGHTS, BIAS, FILTER, DEEP = normal(3, 2), normal(2), normal(3, 3, 3, 2), normal(4, 5, 3)
KERNEL = {"kernel_initializer": tf.constant_initializer(FILTER)}
DENSE = {"kernel_initializer": tf.constant_initializer(WEIGHTS),
         "bias_initializer": tf.constant_initializer(BIAS)}  # fmt: skip
CONVOLVED = np.maximum(rg.nn.conv2d(IMAGES, FILTER, 2, "same").numpy(), 0)
BLOCKS = IMAGES[:, :, :4].reshape(2, 3, 2, 2, 2, 3)
MEAN, VARIANCE = ROWS.mean(0), ROWS.var(0)
VALUES = {  # a layer, its input, and its values
    "dense": (
        lambda x: tf.layers.dense(x, 2, tf.nn.tanh, **DENSE), DEEP, np.tanh(DEEP @ WEIGHTS + BIAS)),
    "conv2d": (lambda x: tf.layers.conv2d(x, 2, 3, 2, "same", activation=tf.nn.relu, **KERNEL),
               IMAGES, CONVOLVED),
    "conv2d, channels first": (
        lambda x: tf.nn.relu(first(lambda y: tf.layers.conv2d(
            y, 2, 3, 2, "same", "channels_first", **KERNEL))(x)), IMAGES, CONVOLVED),
    "max_pooling2d": (lambda x: tf.layers.max_pooling2d(x, 2, 2), IMAGES, BLOCKS.max((2, 4))),
    "average_pooling2d": (
        lambda x: tf.layers.average_pooling2d(x, [2, 2], [2, 2], "same")[:, :, :2], IMAGES,
        BLOCKS.mean((2, 4))),
    "batch_normalization": (lambda x: tf.layers.batch_normalization(x, training=True), ROWS,
                            (ROWS - MEAN) / np.sqrt(VARIANCE + 1e-3)),
    "batch_normalization, axis": (
        first(lambda y: tf.layers.batch_normalization(y, axis=1, training=True)), IMAGES,
        (IMAGES - IMAGES.mean((0, 1, 2))) / np.sqrt(IMAGES.var((0, 1, 2)) + 1e-3)),
    "dropout": (lambda x: tf.layers.dropout(x, 0.2), ROWS, ROWS),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_values(session, name):
    layer, value, due = VALUES[name]
    x = of(*value.shape[1:])
    y = layer(x)
    assert y.shape.as_list() == [None, *due.shape[1:]]
    near(initialized(session).run(y, {x: value}), due)


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
def test_a_transposed_convolution_undoes_the_shape_of_a_convolution(session, padding, data_format):
    x = of(7, 7, 3) if data_format == "channels_last" else of(3, 7, 7)
    h = tf.layers.conv2d(x, 4, 3, 2, padding, data_format)
    y = tf.layers.conv2d_transpose(h, 3, 3, 2, padding, data_format)
    value = np.zeros([2, *x.shape.as_list()[1:]], np.float32)
    size = 8 if padding == "same" else 7
    due = [size, size, 3] if data_format == "channels_last" else [3, size, size]
    assert y.shape.as_list() == [None, *due]
    assert list(initialized(session).run(y, {x: value}).shape) == [2, *due]


@pytest.mark.parametrize(("shape", "static"), [
    ([None, 6, 5, 3], [None, 90]), ([2, 6, 5, 3], [2, 90]), ([None, None, 5, 3], None),
    (None, None),
])  # fmt: skip
def test_flatten(session, shape, static):
    x = tf.placeholder(tf.float32, shape)
    y = tf.layers.flatten(x)
    assert static is None or y.shape.as_list() == static
    near(session.run(y, {x: IMAGES}), IMAGES.reshape(2, 90))
    near(session.run(tf.gradients(y * y, x)[0], {x: IMAGES}), 2 * IMAGES)


def test_float64(session):
    x = tf.constant(ROWS.astype(np.float64))
    y = tf.layers.batch_normalization(tf.layers.dense(x, 2), training=True)
    assert y.dtype == tf.float64
    assert {v.dtype.base_dtype for v in tf.global_variables()} == {tf.float64}


# -- batch normalisation -------------------------------------------------------------------------


def updates():
    return tf.get_collection(tf.GraphKeys.UPDATE_OPS)


def flagged(kind, value):
    """The flag of training, and what is to be fed for it."""
    flag = value if kind == "bool" else tf.placeholder(tf.bool, [])
    return flag, {} if kind == "bool" else {flag: value}


@pytest.mark.parametrize("kind", ["bool", "fed"])
@pytest.mark.parametrize(("value", "unbiased"), [(ROWS, 0), (IMAGES, 1)])
def test_batch_normalization_in_training(session, kind, value, unbiased):
    x, (training, feed) = of(*value.shape[1:]), flagged(kind, True)
    y = tf.layers.batch_normalization(x, momentum=0.9, training=training)
    assert len(updates()) == 2
    flat = value.reshape(-1, 3)
    got, _ = initialized(session).run([y, updates()], {x: value, **feed})
    near(got, (value - flat.mean(0)) / np.sqrt(flat.var(0) + 1e-3))
    mean, variance = session.run(tf.global_variables()[2:])
    near(mean, 0.1 * flat.mean(0))
    near(variance, 0.9 + 0.1 * flat.var(0, ddof=unbiased))


@pytest.mark.parametrize("kind", ["bool", "fed"])
def test_batch_normalization_in_inference(session, kind):
    x, (training, feed) = rows(), flagged(kind, False)
    y = tf.layers.batch_normalization(x, training=training)
    moving = tf.global_variables()[2:]
    mean, variance = [1.0] * 3, [4.0] * 3
    initialized(session).run([tf.assign(moving[0], mean), tf.assign(moving[1], variance)])
    got, _ = session.run([y, updates()], {x: ROWS, **feed})
    near(got, (ROWS - 1) / np.sqrt(4.001))
    assert [v.tolist() for v in session.run(moving)] == [mean, variance]
    assert kind == "fed" or updates() == []


def test_the_gradient_flows_through_the_batchs_moments(session):
    x = rows()
    y = tf.layers.batch_normalization(x, training=True)
    (dx,) = tf.gradients(y * y, x)
    near(initialized(session).run(dx, {x: ROWS}).sum(0), [0, 0, 0])
    assert tf.gradients(y, tf.global_variables()[2:]) == [None, None]


# -- regularizers, flags -------------------------------------------------------------------------


def test_regularizers(session):
    x = tf.constant(ROWS)
    halved = lambda t: 0.5 * tf.reduce_sum(t)  # noqa: E731
    with tf.variable_scope("s", reuse=tf.AUTO_REUSE):
        for _ in range(2):
            y = tf.layers.dense(
                x, 2, kernel_initializer=tf.ones_initializer(), kernel_regularizer=halved,
                bias_regularizer=halved, activity_regularizer=halved, name="d",
            )  # fmt: skip
    losses = tf.losses.get_regularization_losses()
    assert len(losses) == 4  # one for each variable, one for each output
    got, total = initialized(session).run([y, tf.losses.get_regularization_loss()])
    near(total, 3.0 + got.sum())


@pytest.mark.parametrize("flag", [
    lambda: tf.placeholder(tf.bool), lambda: tf.placeholder(tf.bool, None),
    lambda: tf.placeholder_with_default(False, None), lambda: tf.placeholder(tf.bool, []),
])  # fmt: skip
def test_a_flag_without_a_shape_keeps_the_shapes(session, flag):
    """TensorFlow's flag is the predicate of a `cond`, and so one bool."""
    training, x = flag(), tf.placeholder(tf.float32, [None, 3])
    dropped = tf.layers.dropout(x, 0.5, training=training)
    normal = tf.layers.batch_normalization(x, training=training)
    for y in (dropped, normal):
        assert y.shape.as_list() == [None, 3]
        assert tf.layers.dense(y, 2).shape.as_list() == [None, 2]
    initialized(session)
    feed = {x: [[1.0, 2.0, 3.0], [3.0, 4.0, 5.0]]}
    y, z = session.run([dropped, normal], {**feed, training: False})
    np.testing.assert_allclose([y, z * np.sqrt(1.001)], [feed[x]] * 2, rtol=1e-6)
    y, z = session.run([dropped, normal], {**feed, training: True})
    assert set((y / feed[x]).ravel()) <= {0, 2}
    np.testing.assert_allclose(z, [[-1] * 3, [1] * 3], rtol=1e-3)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="shape"):
        session.run(dropped, {**feed, training: [True, False, True]})
    with pytest.raises(ValueError, match=r"expected the shape \(\), got \(3,\)"):
        tf.layers.dropout(x, 0.5, training=tf.placeholder(tf.bool, [3]))


NO_LAYERS = {  # a layer of images of 4 times 4 pixels, the error, and its words
    "a depth": (lambda x: tf.layers.dense(tf.placeholder(tf.float32, [2, None]), 3), ValueError,
                "The last dimension of the inputs to `dense`"),
    "a rank": (lambda x: tf.layers.dense(tf.placeholder(tf.float32), 3), ValueError, "Found `N"),
    "channels": (
        lambda x: tf.layers.conv2d(tf.placeholder(tf.float32, [2, None, 4, 4]), 3, 3,
                                   data_format="channels_first"), ValueError, "Dimension 1"),
    "a layout": (lambda x: tf.layers.conv2d(x, 3, 3, data_format="NHWC"), ValueError,
                 "channels_last or channels_first, got 'NHWC'"),
    "a window": (lambda x: tf.layers.conv2d(x, 3, [3, 3, 3]), ValueError, "kernel_size .* or 2 of"),
    "two axes": (lambda x: tf.layers.batch_normalization(x, [2, 3]), ValueError,
                 "batch_normalization: axis is an integer or 1 of them"),
    "no axis": (lambda x: tf.layers.batch_normalization(x, 4), ValueError, "there is no axis 4"),
    "renorm": (lambda x: tf.layers.batch_normalization(x, renorm=True), TypeError, "renorm"),
    "a scalar": (lambda x: tf.layers.flatten(1.0), ValueError, "one axis or more"),
    "an attribute": (lambda x: tf.layers.Dense(3).kernel, AttributeError, "Its first call makes"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_LAYERS)
def test_layers_refuse_what_makes_no_sense(name):
    call, error, words = NO_LAYERS[name]
    refused(lambda: call(tf.zeros([2, 4, 4, 1])), error, words)


def test_layers_as_objects_list_their_variables():
    layer = tf.layers.Conv2D(3, 2, use_bias=False)
    assert layer.variables == layer.trainable_weights == []
    layer(tf.zeros([2, 4, 4, 1]))
    assert layer.weights == layer.trainable_variables == [layer.kernel]
    refused(lambda: layer.bias, AttributeError, "has no 'bias'")
