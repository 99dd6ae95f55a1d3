"""What TensorFlow's functions make of operands: shapes, dtypes, names, constants, refusals."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import regrad.v1 as tf
from regrad.v1.functions import arrays
from tests.helpers.rows import refused
from tests.helpers.v1_rows import F32, IMAGES, ROWS, C, M, W, ints
from tests.helpers.v1_session import run

pytestmark = pytest.mark.usefixtures("graph")


def evaluated(expression, **more):
    """The value of an expression in tensors of several dtypes; x has an unknown number of rows."""
    scope = {
        "tf": tf, "np": np, "x": tf.placeholder(tf.float32, [None, 3]), "ROWS": ROWS, "W": W,
        "IMAGES": IMAGES, "f": tf.constant([1.0]), "d": tf.constant([1.0], tf.float64),
        "i": tf.constant([1]), "b": tf.constant([True]), "u": tf.placeholder(tf.float32),
    }  # fmt: skip
    return eval(expression, scope | more)


# -- what is known of shapes ---------------------------------------------------------------------

N = None
PARTLY = {
    "x + tf.ones([3])": [N, 3], "tf.matmul(x, tf.zeros([3, 4]))": [N, 4],
    "tf.reduce_sum(x, 1)": [N], "tf.reduce_max(x, 0, keepdims=True)": [1, 3],
    "tf.reduce_sum(x, 0)": [3], "tf.reshape(x, [-1])": [N], "tf.reshape(x, [-1, 6])": [N, 6],
    "tf.reshape(x, [-1, 3, 1])": [N, 3, 1], "tf.reshape(x, [tf.shape(x)[0], 1, 3])": [N, 1, 3],
    "tf.reshape(x, tf.concat([tf.shape(x)[:1], [1, 3]], 0))": [N, 1, 3],
    "tf.reshape(x, [x.shape[0], 3])": [N, 3], "tf.transpose(x)": [3, N],
    "tf.concat([x, x], 1)": [N, 6], "tf.concat([x, x], 0)": [N, 3], "tf.stack([x, x])": [2, N, 3],
    "tf.unstack(x, axis=1)[0]": [N], "tf.split(x, 3, 1)[0]": [N, 1],
    "tf.split(x, [1, 2], 1)[1]": [N, 2], "tf.expand_dims(x, 1)": [N, 1, 3],
    "tf.squeeze(x[None], [0])": [N, 3], "tf.tile(x, [1, 2])": [N, 6],
    "tf.pad(x, [[0, 0], [1, 1]])": [N, 5], "tf.gather(x, [0, 1], axis=1)": [N, 2],
    "tf.gather(x, [0, 0])": [2, 3], "tf.slice(x, [0, 1], [-1, 2])": [N, 2],
    "tf.one_hot(tf.argmax(x, 1), 3)": [N, 3], "tf.boolean_mask(x, x[:, 0] > 0.0)": [N, 3],
    "tf.where(x)": [N, 2], "x[:, 0]": [N], "x[0]": [3], "x[:, 1:]": [N, 2], "x[:, None]": [N, 1, 3],
    "x[tf.shape(x)[0] - 1]": [3], "tf.zeros([tf.shape(x)[0], 2])": [N, 2],
    "tf.range(tf.shape(x)[0])": [N], "tf.shape(x)": [2], "tf.clip_by_norm(x, 1.0)": [N, 3],
    "tf.tensordot(x, tf.ones([3, 2]), 1)": [N, 2], "tf.cumsum(x, 1)": [N, 3],
    "tf.where(x > 0.0, x, -x)": [N, 3], "tf.where(x[:, 0] > 0.0, x, -x)": [N, 3],
    "tf.norm(x, axis=1)": [N], "x[:, :1] + tf.ones([4])": [N, 4],
    "tf.stack([x[:, 0], tf.ones([2])])": [2, 2], "tf.matmul(tf.ones([4, 2]), x)": [4, 3],
    "tf.reduce_sum(x, reduction_indices=[1], keep_dims=True)": [N, 1],  # (old names of arguments)
    "tf.argmax(x, dimension=1)": [N], "tf.squeeze(x[:1], squeeze_dims=[0])": [3],
    "tf.norm(x, axis=1, keep_dims=True)": [N, 1], "tf.count_nonzero(x, reduction_indices=0)": [3],
    "u + x[0]": None, "tf.reduce_sum(u, 0)": None, "u * u": None, "tf.shape(u)": [N],
}  # fmt: skip


@pytest.mark.parametrize("expression", PARTLY)
def test_static_shapes(expression):
    x, u = tf.placeholder(tf.float32, [None, 3]), tf.placeholder(tf.float32)
    y, sizes = evaluated(expression, x=x, u=u), PARTLY[expression]
    assert (y.shape.as_list() if y.shape.ndims is not None else None) == sizes
    shape = run(y, {x: M, u: M}).shape
    assert sizes is None or [n and s for s, n in zip(shape, sizes, strict=True)] == sizes


def test_sizes_that_are_the_same_stay_so():
    x = tf.placeholder(tf.float32, [None, 3])
    rows = tf.shape(x)[0]
    assert tf.zeros([rows]).shape[0] == tf.range(rows).shape[0] == x.shape[0]
    n = arrays.dimension_tensor(2 * x.shape[0] + 1)
    assert (n.dtype, n.shape.as_list()) == (tf.int32, [])
    assert run([n, tf.range(x.shape[0])], {x: M})[0] == 5
    assert run(arrays.dimension_tensor(7)) == 7


@pytest.mark.parametrize("dtype", [None, tf.int32, tf.int64, tf.float32])
def test_an_unknown_size_becomes_a_tensor_of_any_dtype(dtype):
    x = tf.placeholder(tf.float32, [None, 3])
    n = tf.convert_to_tensor(x.shape[0], dtype)
    assert n.dtype == (dtype or tf.int32)
    assert run([n, tf.stack([n, x.shape[0]])[1]], {x: np.ones([4, 3])}) == [4, 4]


def test_ops_have_inputs_for_sizes_known_in_the_run():
    ids = tf.placeholder(tf.int32, [None])
    *_, count = tf.segment_sum(tf.ones([3]), ids).op.inputs
    assert run(count, {ids: [0, 4, 4]}) == 5


def test_constants_of_integers_are_known():
    x = tf.constant(C)
    assert run(tf.reduce_sum(x, tf.range(1, 3))).shape == (2,)
    assert run(tf.reduce_sum(x, range(1, 3))).shape == (2,)
    assert tf.reshape(x, tf.stack([tf.size(x), 1])).shape.as_list() == [12, 1]


def test_small_constants_are_written_out():
    assert [tf.zeros([2]).op.type, tf.ones([2]).op.type, tf.eye(2).op.type] == ["Const"] * 3
    assert tf.zeros([100, 100]).op.type == "BroadcastTo"
    assert run(tf.zeros([100, 100])).shape == (100, 100)
    assert [tf.zeros([2]).name, tf.ones([2], name="n").name] == ["zeros_3:0", "n:0"]
    assert {f(tf.zeros([2])).op.type for f in (tf.shape, tf.rank, tf.size)} == {"Const"}


def test_broadcast_static_shape():
    assert tf.broadcast_static_shape([2, 1], [None, 3]).as_list() == [2, 3]


# -- dtypes --------------------------------------------------------------------------------------

DTYPES = {
    "tf.argmax(x)": tf.int64, "tf.shape(x)": tf.int32, "tf.size(x)": tf.int32, "x > 1.0": tf.bool,
    "tf.one_hot([1], 2)": tf.float32, "tf.zeros([1])": tf.float32, "tf.range(3)": tf.int32,
    "tf.range(3.0)": tf.float32, "tf.range(tf.constant(3, tf.int64), delta=2)": tf.int64,
    "tf.range(3, dtype=tf.float64)": tf.float64, "tf.constant(1, tf.int8) / 2": tf.float32,
    "tf.constant(1, tf.int64) / 2": tf.float64, "i / 2": tf.float64, "i // 2": tf.int32,
}  # fmt: skip


@pytest.mark.parametrize("expression", DTYPES)
def test_dtypes_by_default(expression):
    assert evaluated(expression).dtype == DTYPES[expression]


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64, tf.uint8, tf.int16])
def test_integers_stay_what_they_are(dtype):
    x = tf.constant([[1, 2], [4, 7]], dtype)
    ys = [
        tf.reduce_sum(x), tf.reduce_mean(x, 1), tf.reduce_prod(x, [0], True), tf.reduce_max(x),
        tf.cumsum(x, 1), tf.cumprod(x), tf.square(x), x + 1, x // 2, x % 3, tf.trace(x),
        tf.clip_by_value(x, 2, 3), tf.matmul(x, x), tf.tensordot(x, x, 1), tf.nn.relu(x),
    ]  # fmt: skip
    assert {y.dtype for y in ys} == {dtype}
    found = run(ys)
    assert [y.dtype == dtype for y in found] == [True] * len(ys)
    assert found[0] == 14
    assert found[1].tolist() == [1, 5]


def test_integers_are_divided_and_averaged():
    assert run([tf.reduce_mean([-1, -2]), tf.reduce_mean([1, 2])]) == [-1, 1]
    assert run(tf.constant([1, 3]) / 2).tolist() == [0.5, 1.5]
    assert run(tf.nn.relu(tf.constant([-1, 2]))).tolist() == [0, 2]


def test_what_changes_nothing_returns_its_input():
    x = tf.constant([1.5])
    for y in (tf.cast(x, "float32"), tf.to_float(x), tf.real(x), tf.conj(x), tf.add_n([x]),
              tf.nn.dropout(x, 1.0), tf.nn.dropout(x, rate=0.0), tf.convert_to_tensor(x),
              tf.nn.dropout(x, tf.constant(1.0))):  # fmt: skip
        assert y is x
    assert run(tf.imag(x)).tolist() == [0]
    assert tf.add_n([x], name="n").op.name == "n"


# -- operators, names ----------------------------------------------------------------------------

OPERATORS = {  # type, name, and the other ops that are built
    "x + 2": "AddV2 add add/y", "2 - x": "Sub sub sub/x", "x * x": "Mul mul",
    "1 / x": "RealDiv truediv truediv/x",
    "i / 2": "RealDiv truediv truediv/y truediv/Cast truediv/Cast_1",
    "x // 2.0": "FloorDiv floordiv floordiv/y", "5 % i": "FloorMod mod mod/x",
    "x ** 2": "Pow pow pow/y", "2.0 ** x": "Pow pow pow/x", "m @ m": "MatMul matmul",
    "[[1.0, 2.0]] @ m": "MatMul matmul matmul/x", "-x": "Neg Neg", "abs(x)": "Abs Abs",
    "x < 1.0": "Less Less Less/y", "x <= 1.0": "LessEqual LessEqual LessEqual/y",
    "x > x": "Greater Greater", "1.0 < x": "Greater Greater Greater/y",
    "1.0 <= x": "GreaterEqual GreaterEqual GreaterEqual/y", "x == 1.0": "Equal Equal Equal/y",
    "x != x": "NotEqual NotEqual", "b & b": "LogicalAnd and",
    "b | [True, False]": "LogicalOr or or/y", "b ^ b": "LogicalXor xor",
    "~b": "LogicalNot LogicalNot", "i & 3": "BitwiseAnd and and/y", "~i": "Invert Invert",
    "np.float32([1, 2]) * x": "Mul mul mul/x",
}  # fmt: skip


@pytest.mark.parametrize("expression", OPERATORS)
def test_operators(expression, graph):
    given = {"x": np.array([1.5, 2.0], F32), "i": ints(7, 2), "m": np.eye(2, dtype=F32),
             "b": np.array([True, False])}  # fmt: skip
    tensors = {k: tf.constant(v, name=k) for k, v in given.items()}
    y = eval(expression, {"np": np, **tensors})
    op_type, name, *others = OPERATORS[expression].split()
    assert (y.op.type, y.op.name) == (op_type, name)
    assert {op.name for op in graph.get_operations()} == {*given, *others, name}
    np.testing.assert_allclose(run(y), eval(expression, {"np": np, **given}), rtol=1e-6)


XENT = "SparseSoftmaxCrossEntropyWithLogits"
SPARSE = "tf.nn.sparse_softmax_cross_entropy_with_logits(labels=[0, 1, 2, 0], logits=ROWS"
NAMES = {  # of functions that have no row in tests/helpers/v1_rows.py; * where the name is open
    f"{SPARSE})": f"{XENT} {XENT}/{XENT}", f"{SPARSE}, name='xent')": f"{XENT} xent/xent",
    "tf.random_normal([2])": "AddV2 random_normal", "tf.zeros([2])": "Const zeros",
    "tf.random_uniform([2])": "AddV2 random_uniform",
    "tf.random_uniform([2], 0, 5, tf.int32)": "RandomUniformInt random_uniform",
    "tf.truncated_normal([2])": "AddV2 truncated_normal",
    "tf.random_shuffle(x)": "RandomShuffle RandomShuffle", "tf.ones([2])": "Const ones",
    "tf.losses.mean_squared_error(x, x)": "* mean_squared_error/value",
    "tf.py_func(len, [x], tf.int64)": "PyFunc PyFunc",
    "tf.nn.relu(x, name='a')": "Relu a", "tf.nn.bias_add(x, ROWS[0], name='b')": "BiasAdd b",
    "tf.nn.conv2d(IMAGES, W, 1, 'SAME', name='c')": "Conv2D c", "tf.add(f, f, name='n')": "AddV2 n",
    "tf.random_normal([2], name='r')": "AddV2 r", "tf.reduce_sum(f, name='n')": "Sum n",
    "tf.nn.dropout(f, 0.5, name='d')": "SelectV2 d/SelectV2",
}  # fmt: skip


@pytest.mark.parametrize("expression", NAMES)
def test_op_types_and_names_of_functions(expression):
    op_type, name = NAMES[expression].split()
    op = evaluated(expression).op
    assert op_type in ("*", op.type)
    assert op.name == name


def test_no_tensor_is_none():
    x = tf.constant(1.0)
    assert (x == None) is False  # noqa: E711
    assert (x != None) is True  # noqa: E711


def test_variables_are_operands():
    v, i = tf.Variable([1.0, 2.0]), tf.Variable(1)
    rows = [
        (v + 1.0, [2, 3]), (1.0 - v, [0, -1]), (2.0 * v, [2, 4]), (2.0 / v, [2, 1]), (-v, [-1, -2]),
        (v[i], 2), (v[1], 2), (v**2, [1, 4]), (v > 1.0, [False, True]), (tf.exp(v), np.exp([1, 2])),
        (abs(v), [1, 2]), (v * v, [1, 4]), (tf.reduce_sum(v), 3),
    ]  # fmt: skip
    assert {type(y) for y, _ in rows} == {tf.Tensor}
    for got, due in zip(run([y for y, _ in rows]), [due for _, due in rows], strict=True):
        np.testing.assert_allclose(got, due, rtol=1e-6)
    refused(lambda: v + i, TypeError)


def test_names_are_taken_in_scopes(graph):
    x = tf.constant([1.0], name="x")
    with tf.name_scope("s"):
        assert tf.add(x, 1.0).op.name == "s/Add"
        assert (x + 1.0).op.name == "s/add_1"
        assert tf.reduce_sum(x, name="total").op.name == "s/total"
    assert tf.exp(x, name="s/").op.name == "s"
    tf.clip_by_norm(x, 1.0)
    tf.norm(x)
    scopes = {op.name.partition("/")[0] for op in graph.get_operations()}
    assert scopes == {"x", "s", "clip_by_norm", "norm"}


# -- refusals ------------------------------------------------------------------------------------

DTYPE_ERRORS = [
    "f + i", "f + d", "i + 1.5", "f * i", "i < f", "f // d", "f ** i", "f @ i", "f & f", "f % i",
    "f == i", "tf.add(f, i)", "tf.maximum(f, d)", "tf.sqrt(i)", "tf.constant(1) * 2.5",
    "tf.exp(i)", "tf.sigmoid(i)", "tf.floor(i)", "tf.is_nan(i)", "tf.logical_not(f)",
    "tf.logical_and(b, i)", "tf.reduce_any(f)", "tf.reduce_sum(b)", "tf.reduce_max(b)",
    "tf.add_n([f, i])", "tf.concat([f, i], 0)", "tf.stack([f, i])", "tf.where(f, f, f)",
    "tf.where(b, f, i)", "tf.clip_by_value(f, i, i)", "tf.linspace(0, 1, 3)", "tf.norm(i)",
    "tf.matrix_inverse([[1]])", "tf.negative(b)", "tf.gather(f, f)", "tf.conj(b)", "i | b",
    "tf.one_hot(f, 3)", "tf.complex(f, d)", "tf.atan2(f, d)", "~f", "tf.reduce_logsumexp(i)",
    "tf.nn.sigmoid(i)", "tf.nn.softmax(i)", "tf.nn.elu(i)", "tf.random_normal([2], dtype=tf.int32)",
    "tf.nn.conv2d(tf.ones([1, 4, 4, 3]), tf.zeros([1, 1, 3, 2], d.dtype), 1, 'SAME')",
    "tf.nn.bias_add(f, i)", "tf.constant(1.0, dtype='nope')",
    "tf.nn.sigmoid_cross_entropy_with_logits(labels=i, logits=f)", "tf.layers.dense([[1, 2]], 2)",
]  # fmt: skip
REFUSED = {  # words of the ValueError that tells so when the graph is built
    "tf.nn.softmax_cross_entropy_with_logits(x, x)": "named arguments",
    "tf.nn.softmax_cross_entropy_with_logits(logits=x)": "must be provided",
    "tf.nn.sparse_softmax_cross_entropy_with_logits([1], x)": "named arguments",
    "tf.nn.sigmoid_cross_entropy_with_logits(x, x)": "named arguments",
    "tf.nn.softmax_cross_entropy_with_logits_v2(labels=x[:, :2], logits=x)": "must have one shape",
    "tf.nn.sparse_softmax_cross_entropy_with_logits(labels=[1, 2], logits=ROWS)": "the shape",
    "tf.nn.softmax(x, axis=0, dim=0)": "both",
    "tf.nn.conv2d(IMAGES, W, [2, 1, 1, 1], 'SAME')": "batch and the channels",
    "tf.nn.conv2d(IMAGES, W, [1, 1, 1, 1], 'HALF')": "padding",
    "tf.nn.conv2d(IMAGES, W, 1, 'SAME', data_format='NHCW')": "data_format",
    "tf.nn.conv2d(IMAGES, W[:, :, :2], 1, 'SAME')": "channels",
    "tf.nn.convolution(IMAGES, W[0, 0], 'SAME')": "rank 3, 4 or 5",
    "tf.nn.max_pool(IMAGES, [1, 9, 9, 1], 1, 'VALID')": "window",
    "tf.nn.bias_add(x, [1.0])": "channels",
    "tf.nn.bias_add(x, ROWS)": "rank 1",
    "tf.nn.bias_add(x, ROWS[0], 'CNHW')": "data_format",
    "tf.nn.embedding_lookup(x, [0], 'hash')": "'mod' or 'div', got 'hash'",
    "tf.concat(0, [x, x])": r"tf\.concat\(\[a, b\], 1\)",
    "tf.nn.dropout(x, 0.0)": "keep_prob",
    "tf.nn.dropout(x, 2.0)": "keep_prob",
    "tf.nn.dropout(x)": "keep_prob",
    "tf.random_uniform([2], dtype=tf.int32)": "maxval",
    "tf.random_normal(5)": "rank 1",
    "tf.losses.mean_squared_error(x, x[:, :2])": "one shape",
    "tf.losses.mean_squared_error(ROWS, ROWS, [1.0, 2.0])": "broadcast",
    "tf.losses.mean_squared_error(x, x, reduction='mean')": "Reduction",
    "tf.losses.mean_squared_error(None, x)": "None",
    "tf.losses.get_total_loss()": "no loss",
    "tf.losses.cosine_distance(x, x)": "axis",
    "tf.layers.dense(tf.placeholder(tf.float32, [None, None]), 2)": "last dimension",
    "tf.layers.conv2d(u, 2, 3)": "last dimension",
    "tf.layers.flatten(tf.constant(1.0))": "flatten: expected a tensor of one axis or more",
    "tf.image.resize_images(IMAGES, [3, 3], tf.image.ResizeMethod.AREA)": "methods",
    "tf.train.exponential_decay(0.1, None, 10, 0.5)": "global_step is required",
    "tf.train.piecewise_constant(0, [1, 2], [1.0, 2.0])": "1 less",
    "tf.convert_to_tensor(tf.IndexedSlices(x, [0]))": "dense_shape",
    "tf.unique(x)": "unique: expected a tensor of rank 1, got the shape (.*3.)",
    "tf.slice(x, [0, 0, 0], [1, 1, 1])": "one entry per axis",
    "tf.argmax([1.0], 0, dimension=0)": "Cannot specify both 'axis' and 'dimension'",
    **dict.fromkeys([
        "x + tf.ones([4])", "tf.matmul(x, tf.ones([2, 4]))", "tf.matmul(x, tf.ones([3]))",
        "tf.reshape(tf.ones([2, 3]), [4])", "tf.concat([tf.ones([2, 3]), tf.ones([2, 4])], 0)",
        "tf.stack([tf.ones([2]), tf.ones([3])])", "tf.add_n([])", "tf.expand_dims(x)",
        "tf.reduce_sum(x, 5)", "tf.squeeze(tf.ones([2]), [0])", "tf.split(tf.ones([5]), 2)",
        "tf.split(tf.ones([5]), [2, 2])", "tf.transpose(x, [0])", "tf.tile(x, [2])",
        "tf.pad(tf.ones([2]), [[1, 1]], 'EDGE')", "tf.where(x > 0.0, x)", "tf.norm(x, ord='nuc')",
        "tf.unstack(x)", "tf.unstack(tf.ones([2]), num=3)", "tf.scalar_mul([1.0, 2.0], x)",
        "tf.matmul(x, x, transpose_a=True, adjoint_a=True)", "tf.zeros([None, 2])",
        "tf.boolean_mask(x, tf.ones([2, 2], tf.bool))", "tf.boolean_mask(tf.ones([3]), [True])",
        "tf.boolean_mask(x, tf.placeholder(tf.bool))",
        "tf.matrix_inverse(tf.ones([2, 3]))", "tf.reduce_sum(x, 0, reduction_indices=0)",
        "tf.batch_gather(x, tf.placeholder(tf.int32))", "tf.expand_dims(x, 0, dim=1)",
        "tf.reduce_sum(x, tf.placeholder(tf.int32, []))", "x.set_shape([None, 4])",
        "tf.broadcast_static_shape([2], [3])", "tf.variance_scaling_initializer(-1.0)",
        "tf.variance_scaling_initializer(mode='fan')", "tf.orthogonal_initializer()([3])",
        "tf.variance_scaling_initializer(distribution='cauchy')", "tf.zeros_initializer()([None])",
        "tf.initializers.identity()([3])", "tf.train.Saver()",
        "tf.constant_initializer([1, 2], verify_shape=True)([3])",
    ], "."),
}  # fmt: skip
CALL_ERRORS = {  # of arguments that do not fit, and what says which dtypes do not
    "tf.add(1.0)": "add: missing a required argument: 'y'",
    "tf.add(1.0, 2.0, None, 3.0)": "add: too many positional arguments",
    "tf.add(1.0, 2.0, x=3.0)": "add: multiple values for argument 'x'",
    "tf.add(1.0, 2.0, z=3.0)": "add: got an unexpected keyword argument 'z'",
    "tf.constant(1.0) + tf.constant(1)": r"float32.*int32.*tf\.cast",
    "tf.layers.batch_normalization(x, renorm=True)": "renorm",
    "tf.nn.embedding_lookup(x, [0], max_norm=1.0)": r"max_norm.*tf\.clip_by_norm",
    "x[:, x[0] > 0.0]": "a mask must be the only index",
    "tf.global_norm(x)": "t_list should be a sequence",
    "tf.clip_by_global_norm(x, 1.0)": "t_list should be a sequence",
    "tf.sort(x, direction='DOWN')": "direction is 'ASCENDING' or 'DESCENDING', got 'DOWN'",
    "tf.invert_permutation(x)": "takes integers",
    "tf.sqrt(tf.constant(1))": "Sqrt takes floats, got int32",
}
ERRORS = [
    *[(e, TypeError, ".") for e in DTYPE_ERRORS],
    *[(e, ValueError, words) for e, words in REFUSED.items()],
    *[(e, TypeError, words) for e, words in CALL_ERRORS.items()],
    ("tf.slice(x, [0, 1], [1, 5])", IndexError, "the block from .0, 1. of size .1, 5. exceeds"),
]


@pytest.mark.parametrize(("expression", "error", "words"), ERRORS)
def test_mistakes_are_found_when_the_graph_is_built(expression, error, words):
    refused(lambda: evaluated(expression), error, words)


@pytest.mark.parametrize("expression", [
    "tf.split(v, 2)", "tf.slice(v, [1], [3])", "v[3]", "tf.unstack(v, num=2)", "v + tf.ones([2])",
    "tf.gather(v, [7])", "tf.random_uniform([2], n, 3, tf.int32)",
    "tf.nn.softmax_cross_entropy_with_logits(labels=x, logits=x[:1])",
    "tf.nn.sparse_softmax_cross_entropy_with_logits(labels=[0, n], logits=x)",
    "tf.nn.sparse_softmax_cross_entropy_with_logits(labels=tf.range(n), logits=x)",
])  # fmt: skip
def test_mistakes_are_found_in_the_run(expression):
    v, n = tf.placeholder(tf.float32, [None]), tf.placeholder(tf.int32, [])
    x = tf.placeholder(tf.float32, [None, 3])
    y = evaluated(expression, v=v, n=n, x=x)
    refused(lambda: run(y, {v: [1.0, 2.0, 3.0], n: 3, x: M}), tf.errors.InvalidArgumentError)


@pytest.mark.parametrize(("function", "signature"), [
    (tf.exp, "(x, name=None)"), (tf.nn.softmax, "(logits, axis=None, name=None, dim=None)"),
    (tf.argmax, "(input, axis=None, name=None, dimension=None, output_type=tf.int64)"),
])  # fmt: skip
def test_functions_show_the_signatures_of_tensorflow(function, signature):
    assert str(inspect.signature(function)) == signature


def test_tensors_may_be_passed_by_name():
    x, y = tf.constant(3.0), tf.constant(1.0)
    assert list(tf.subtract(y=y, x=x, name="d").op.inputs) == [x, y]


# -- lists ---------------------------------------------------------------------------------------


def test_clip_by_global_norm():
    a, b = tf.constant([3.0, 0.0]), tf.constant([[4.0]])
    clipped, norm = tf.clip_by_global_norm([a, None, b], 1.0)
    assert run(norm) == 5
    assert clipped[1] is None
    np.testing.assert_allclose(run(clipped[0]), [0.6, 0], rtol=1e-6)
    np.testing.assert_allclose(run(clipped[2]), [[0.8]], rtol=1e-6)
    kept, _ = tf.clip_by_global_norm([a, b], 10.0, use_norm=norm)
    assert [v.tolist() for v in run(kept)] == [[3, 0], [[4]]]
    assert run(tf.global_norm([a, None])) == 3
    clipped, _ = tf.clip_by_global_norm([tf.constant([np.inf]), tf.constant([1.0])], 1.0)
    assert np.isnan(run(clipped)).all()


def test_indexed_slices_become_rows():
    rows = tf.IndexedSlices(tf.constant([[1.0], [2.0], [3.0]]), tf.constant([2, 0, 2]), [3, 1])
    assert run(tf.add(rows, tf.zeros([3, 1]))).tolist() == [[2], [0], [4]]
    assert tf.convert_to_tensor_or_indexed_slices(rows) is rows


def test_a_registered_rule_returns_indexed_slices(graph):
    def last_row(op, grad):
        return tf.IndexedSlices(grad[1:], tf.constant([1]), tf.constant([2]))

    x = tf.constant([1.0, -2.0])
    rules = {"Sign": last_row, "Mul": lambda op, dy: [tf.reduce_sum(dy), last_row(op, dy)]}
    with graph.gradient_override_map(rules):
        ys = tf.sign(x), tf.multiply(3.0, x)
    assert [run(tf.gradients(y, x)[0]).tolist() for y in ys] == [[0, 1], [0, 1]]
