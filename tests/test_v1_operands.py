"""What TensorFlow's math and array functions make of operands: shapes, dtypes, names, mistakes."""

from __future__ import annotations

import numpy as np
import pytest

import regrad.v1 as tf
from regrad.v1 import arrays
from tests.helpers.v1_math_rows import (
    CUBE,
    F32,
    MATRIX,
    ints,
)
from tests.helpers.v1_session import run

pytestmark = pytest.mark.usefixtures("graph")


# -- what is known of shapes ---------------------------------------------------------------------

N = None
PARTLY = [
    ("x + tf.ones([3])", [N, 3]),
    ("tf.matmul(x, tf.zeros([3, 4]))", [N, 4]),
    ("tf.reduce_sum(x, 1)", [N]),
    ("tf.reduce_max(x, 0, keepdims=True)", [1, 3]),
    ("tf.reshape(x, [-1, 3, 1])", [N, 3, 1]),
    ("tf.reshape(x, [tf.shape(x)[0], 1, 3])", [N, 1, 3]),
    ("tf.reshape(x, tf.concat([tf.shape(x)[:1], [1, 3]], 0))", [N, 1, 3]),
    ("tf.reshape(x, [x.shape[0], 3])", [N, 3]),
    ("tf.transpose(x)", [3, N]),
    ("tf.concat([x, x], 1)", [N, 6]),
    ("tf.concat([x, x], 0)", [N, 3]),
    ("tf.stack([x, x])", [2, N, 3]),
    ("tf.unstack(x, axis=1)[0]", [N]),
    ("tf.split(x, 3, 1)[0]", [N, 1]),
    ("tf.split(x, [1, 2], 1)[1]", [N, 2]),
    ("tf.expand_dims(x, 1)", [N, 1, 3]),
    ("tf.tile(x, [1, 2])", [N, 6]),
    ("tf.pad(x, [[0, 0], [1, 1]])", [N, 5]),
    ("tf.gather(x, [0, 1], axis=1)", [N, 2]),
    ("tf.slice(x, [0, 1], [-1, 2])", [N, 2]),
    ("tf.one_hot(tf.argmax(x, 1), 3)", [N, 3]),
    ("tf.boolean_mask(x, x[:, 0] > 0.0)", [N, 3]),
    ("tf.where(x)", [N, 2]),
    ("x[:, 0]", [N]),
    ("x[0]", [3]),
    ("x[:, 1:]", [N, 2]),
    ("x[:, None]", [N, 1, 3]),
    ("x[tf.shape(x)[0] - 1]", [3]),
    ("tf.zeros([tf.shape(x)[0], 2])", [N, 2]),
    ("tf.range(tf.shape(x)[0])", [N]),
    ("tf.shape(x)", [2]),
    ("tf.clip_by_norm(x, 1.0)", [N, 3]),
    ("tf.tensordot(x, tf.ones([3, 2]), 1)", [N, 2]),
    ("tf.cumsum(x, 1)", [N, 3]),
    ("tf.where(x > 0.0, x, -x)", [N, 3]),
    ("tf.where(x[:, 0] > 0.0, x, -x)", [N, 3]),
    ("tf.norm(x, axis=1)", [N]),
]


@pytest.mark.parametrize(("expression", "sizes"), PARTLY)
def test_static_shapes(expression, sizes):
    y = eval(expression, {"tf": tf, "x": tf.placeholder(tf.float32, [None, 3])})
    assert y.shape.as_list() == sizes
    assert run(y, {"Placeholder:0": MATRIX}).ndim == len(sizes)


def test_sizes_that_are_the_same_stay_so():
    x = tf.placeholder(tf.float32, [None, 3])
    rows = tf.shape(x)[0]
    assert tf.zeros([rows]).shape[0] == tf.range(rows).shape[0] == x.shape[0]


def test_a_size_becomes_a_tensor():
    x = tf.placeholder(tf.float32, [None, 3])
    n = arrays.dimension_tensor(2 * x.shape[0] + 1)
    assert (n.dtype, n.shape.as_list()) == (tf.int32, [])
    assert run([n, tf.range(x.shape[0])], {x: MATRIX})[0] == 5
    assert run(arrays.dimension_tensor(7)) == 7


def test_constants_of_integers_are_known():
    x = tf.constant(CUBE)
    assert run(tf.reduce_sum(x, tf.range(1, 3))).shape == (2,)
    assert run(tf.reduce_sum(x, range(1, 3))).shape == (2,)
    assert tf.reshape(x, tf.stack([tf.size(x), 1])).shape.as_list() == [12, 1]
    with pytest.raises(ValueError):
        tf.reduce_sum(x, tf.placeholder(tf.int32, []))


# -- dtypes --------------------------------------------------------------------------------------

REFUSED = [
    "f + i", "f + d", "i + 1.5", "f * i", "i < f", "f // d", "f ** i", "f @ i", "f & f", "f % i",
    "f == i", "tf.add(f, i)", "tf.maximum(f, d)", "tf.sqrt(i)",
    "tf.exp(i)", "tf.sigmoid(i)", "tf.floor(i)", "tf.is_nan(i)", "tf.logical_not(f)",
    "tf.logical_and(b, i)", "tf.reduce_any(f)", "tf.reduce_sum(b)", "tf.reduce_max(b)",
    "tf.add_n([f, i])", "tf.concat([f, i], 0)", "tf.stack([f, i])", "tf.where(f, f, f)",
    "tf.where(b, f, i)", "tf.clip_by_value(f, i, i)", "tf.linspace(0, 1, 3)", "tf.norm(i)",
    "tf.matrix_inverse([[1]])", "tf.negative(b)", "tf.gather(f, f)", "tf.conj(b)", "i | b",
    "tf.one_hot(f, 3)", "tf.complex(f, d)", "tf.atan2(f, d)", "~f", "tf.reduce_logsumexp(i)",
]  # fmt: skip


@pytest.mark.parametrize("expression", REFUSED)
def test_dtypes_are_not_mixed(expression):
    scope = {
        "tf": tf, "f": tf.constant([1.0]), "d": tf.constant([1.0], tf.float64),
        "i": tf.constant([1]), "b": tf.constant([True]),
    }  # fmt: skip
    with pytest.raises(TypeError):
        eval(expression, scope)


def test_the_message_tells_both_dtypes():
    with pytest.raises(TypeError, match=r"float32.*int32.*tf\.cast"):
        tf.constant(1.0) + tf.constant(1)
    with pytest.raises(TypeError, match="Sqrt takes floats, got int32"):
        tf.sqrt(tf.constant(1))


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64, tf.uint8, tf.int16])
def test_integers_stay_what_they_are(dtype):
    x = tf.constant([[1, 2], [4, 7]], dtype)
    ys = [
        tf.reduce_sum(x), tf.reduce_mean(x, 1), tf.reduce_prod(x, [0], True), tf.reduce_max(x),
        tf.cumsum(x, 1), tf.cumprod(x), tf.square(x), x + 1, x // 2, x % 3, tf.trace(x),
        tf.clip_by_value(x, 2, 3), tf.matmul(x, x), tf.tensordot(x, x, 1),
    ]  # fmt: skip
    assert {y.dtype for y in ys} == {dtype}
    assert [y.dtype == dtype for y in run(ys)] == [True] * len(ys)
    assert run(ys[:3])[0] == 14
    assert run(ys[1]).tolist() == [1, 5]


def test_the_mean_of_integers_is_rounded_towards_zero():
    assert run([tf.reduce_mean([-1, -2]), tf.reduce_mean([1, 2])]) == [-1, 1]


def test_integers_have_a_quotient():
    assert (tf.constant(1, tf.int8) / 2).dtype == tf.float32
    assert (tf.constant(1, tf.int64) / 2).dtype == tf.float64
    assert run(tf.constant([1, 3]) / 2).tolist() == [0.5, 1.5]


def test_dtypes_by_default():
    x = tf.placeholder(tf.float32, [None, 3])
    assert [tf.argmax(x).dtype, tf.shape(x).dtype, tf.size(x).dtype] == [tf.int64] + [tf.int32] * 2
    assert [tf.one_hot([1], 2).dtype, tf.zeros([1]).dtype] == [tf.float32, tf.float32]
    assert [tf.range(3).dtype, tf.range(3.0).dtype] == [tf.int32, tf.float32]
    assert tf.range(tf.constant(3, tf.int64), delta=2).dtype == tf.int64
    assert tf.range(3, dtype=tf.float64).dtype == tf.float64


def test_what_changes_nothing_returns_its_input():
    x = tf.constant([1.5])
    for y in (tf.cast(x, "float32"), tf.to_float(x), tf.real(x), tf.conj(x), tf.add_n([x])):
        assert y is x
    assert run(tf.imag(x)).tolist() == [0]
    assert tf.add_n([x], name="n").op.name == "n"


# -- operators, names ----------------------------------------------------------------------------

OPERATORS = [
    ("x + 2", "AddV2", "add", ["add/y"]),
    ("2 - x", "Sub", "sub", ["sub/x"]),
    ("x * x", "Mul", "mul", []),
    ("1 / x", "RealDiv", "truediv", ["truediv/x"]),
    ("i / 2", "RealDiv", "truediv", ["truediv/y", "truediv/Cast", "truediv/Cast_1"]),
    ("x // 2.0", "FloorDiv", "floordiv", ["floordiv/y"]),
    ("5 % i", "FloorMod", "mod", ["mod/x"]),
    ("x ** 2", "Pow", "pow", ["pow/y"]),
    ("2.0 ** x", "Pow", "pow", ["pow/x"]),
    ("m @ m", "MatMul", "matmul", []),
    ("[[1.0, 2.0]] @ m", "MatMul", "matmul", ["matmul/x"]),
    ("-x", "Neg", "Neg", []),
    ("abs(x)", "Abs", "Abs", []),
    ("x < 1.0", "Less", "Less", ["Less/y"]),
    ("1.0 <= x", "GreaterEqual", "GreaterEqual", ["GreaterEqual/y"]),
    ("x == 1.0", "Equal", "Equal", ["Equal/y"]),
    ("x != x", "NotEqual", "NotEqual", []),
    ("b & b", "LogicalAnd", "and", []),
    ("b | [True, False]", "LogicalOr", "or", ["or/y"]),
    ("b ^ b", "LogicalXor", "xor", []),
    ("~b", "LogicalNot", "LogicalNot", []),
    ("i & 3", "BitwiseAnd", "and", ["and/y"]),
    ("~i", "Invert", "Invert", []),
    ("np.float32([1, 2]) * x", "Mul", "mul", ["mul/x"]),
]


@pytest.mark.parametrize(("expression", "op_type", "name", "others"), OPERATORS)
def test_operators(expression, op_type, name, others, graph):
    given = {
        "x": np.array([1.5, 2.0], F32), "i": ints(7, 2), "m": np.eye(2, dtype=F32),
        "b": np.array([True, False]),
    }  # fmt: skip
    tensors = {k: tf.constant(v, name=k) for k, v in given.items()}
    y = eval(expression, {"np": np, **tensors})
    assert (y.op.type, y.op.name) == (op_type, name)
    assert {op.name for op in graph.get_operations()} == {*given, *others, name}
    np.testing.assert_allclose(run(y), eval(expression, {"np": np, **given}), rtol=1e-6)


def test_no_tensor_is_none():
    x = tf.constant(1.0)
    assert (x == None) is False  # noqa: E711
    assert (x != None) is True  # noqa: E711


def test_variables_are_operands():
    v, i = tf.Variable([1.0, 2.0]), tf.Variable(1)
    ys = [v + 1.0, 2.0 * v, -v, v[i], v**2, v > 1.0, tf.exp(v)]
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        found = session.run(ys)
    due = [[2, 3], [2, 4], [-1, -2], 2, [1, 4], [False, True], np.exp([1, 2])]
    for got, expected in zip(found, due, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    with pytest.raises(TypeError):
        v + i


def test_names_are_taken_in_scopes():
    x = tf.constant([1.0], name="x")
    with tf.name_scope("s"):
        assert tf.add(x, 1.0).op.name == "s/Add"
        assert (x + 1.0).op.name == "s/add_1"
        assert tf.reduce_sum(x, name="total").op.name == "s/total"
    assert tf.exp(x, name="s/").op.name == "s"


def test_compositions_stay_in_their_scope(graph):
    x = tf.constant([3.0, 4.0], name="x")
    tf.clip_by_norm(x, 1.0)
    tf.norm(x)
    scopes = {op.name.partition("/")[0] for op in graph.get_operations()}
    assert scopes == {"x", "clip_by_norm", "norm"}


# -- mistakes ------------------------------------------------------------------------------------

MISTAKES = [
    "x + tf.ones([4])", "tf.matmul(x, tf.ones([2, 4]))", "tf.matmul(x, tf.ones([3]))",
    "tf.reshape(tf.ones([2, 3]), [4])", "tf.concat([tf.ones([2, 3]), tf.ones([2, 4])], 0)",
    "tf.stack([tf.ones([2]), tf.ones([3])])", "tf.add_n([])", "tf.expand_dims(x)",
    "tf.reduce_sum(x, 5)", "tf.squeeze(tf.ones([2]), [0])", "tf.split(tf.ones([5]), 2)",
    "tf.split(tf.ones([5]), [2, 2])", "tf.transpose(x, [0])", "tf.tile(x, [2])",
    "tf.pad(tf.ones([2]), [[1, 1]], 'EDGE')", "tf.where(x > 0.0, x)", "tf.norm(x, ord='nuc')",
    "tf.unstack(x)", "tf.unstack(tf.ones([2]), num=3)", "tf.scalar_mul([1.0, 2.0], x)",
    "tf.matmul(x, x, transpose_a=True, adjoint_a=True)", "tf.zeros([None, 2])",
    "tf.boolean_mask(tf.ones([3]), [True])", "tf.boolean_mask(x, tf.placeholder(tf.bool))",
    "tf.matrix_inverse(tf.ones([2, 3]))", "tf.reduce_sum(x, 0, reduction_indices=0)",
    "tf.batch_gather(x, tf.placeholder(tf.int32))", "tf.expand_dims(x, 0, dim=1)",
]  # fmt: skip


@pytest.mark.parametrize("expression", MISTAKES)
def test_mistakes_are_found_when_the_graph_is_built(expression):
    with pytest.raises(ValueError):
        eval(expression, {"tf": tf, "x": tf.placeholder(tf.float32, [None, 3])})


@pytest.mark.parametrize("use", [
    lambda x: tf.split(x, 2), lambda x: tf.slice(x, [1], [3]), lambda x: x[3],
    lambda x: tf.unstack(x, num=2), lambda x: x + tf.ones([2]), lambda x: tf.gather(x, [7]),
])  # fmt: skip
def test_mistakes_are_found_in_the_run(use):
    ys = use(tf.placeholder(tf.float32, [None]))
    with pytest.raises(tf.errors.InvalidArgumentError):
        run(ys, {"Placeholder:0": [1.0, 2.0, 3.0]})


def test_old_names_of_arguments():
    x = tf.constant(MATRIX)
    ys = [
        tf.reduce_sum(x, reduction_indices=[1], keep_dims=True), tf.argmax(x, dimension=1),
        tf.squeeze(x[:1], squeeze_dims=[0]), tf.norm(x, axis=1, keep_dims=True),
        tf.count_nonzero(x, reduction_indices=0),
    ]  # fmt: skip
    assert [y.shape.as_list() for y in ys] == [[2, 1], [2], [3], [2, 1], [3]]


# -- lists, constants ----------------------------------------------------------------------------


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


def test_clip_by_global_norm_shows_infinities():
    clipped, _ = tf.clip_by_global_norm([tf.constant([np.inf]), tf.constant([1.0])], 1.0)
    assert np.isnan(run(clipped)).all()


def test_small_constants_are_written_out():
    assert [tf.zeros([2]).op.type, tf.ones([2]).op.type, tf.eye(2).op.type] == ["Const"] * 3
    assert tf.zeros([100, 100]).op.type == "BroadcastTo"
    assert run(tf.zeros([100, 100])).shape == (100, 100)
    assert [tf.zeros([2]).name, tf.ones([2], name="n").name] == ["zeros_3:0", "n:0"]


def test_the_shape_of_a_known_tensor_is_a_constant():
    x = tf.zeros([2, 3])
    assert {f(x).op.type for f in (tf.shape, tf.rank, tf.size)} == {"Const"}


def test_broadcast_static_shape():
    assert tf.broadcast_static_shape([2, 1], [None, 3]).as_list() == [2, 3]
    with pytest.raises(ValueError):
        tf.broadcast_static_shape([2], [3])


def test_indexed_slices_become_rows():
    rows = tf.IndexedSlices(tf.constant([[1.0], [2.0], [3.0]]), tf.constant([2, 0, 2]), [3, 1])
    assert run(tf.add(rows, tf.zeros([3, 1]))).tolist() == [[2], [0], [4]]
    assert tf.convert_to_tensor_or_indexed_slices(rows) is rows
