"""TensorFlow's functions: values, gradients, shapes, op types and names, overrides, eager mode.

Each call of the table is run in a session with its shapes known, with the sizes hidden and with
even the rank hidden, and in regrad's eager mode; the other implementation is NumPy's, or for the
functions of `tf.nn` and `tf.image` eager regrad's.
"""

from __future__ import annotations

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from tests.helpers.v1_rows import CALLS, F32, kinds, listed, placeholders
from tests.helpers.v1_session import run

pytestmark = pytest.mark.usefixtures("graph")


# With nothing known of the shape, what even TensorFlow cannot build, or has to be told.
NEED_RANK = {"boolean_mask", "boolean_mask: columns", "boolean_mask: of two axes", "batch_gather",
             "x[mask]", "x[n] of a size", "unique", "slice: by tensors", "segment_mean",
             "nn.convolution"}  # fmt: skip
PAIRS = [
    (row, hidden)
    for row in CALLS
    for hidden in kinds(row)
    if not (hidden == "rank hidden" and row.label in NEED_RANK)
    and (row.label, hidden) != ("slice: by tensors", "sizes hidden")
]
NO_GRADIENT = {"matrix_set_diag"}  # a diagonal that is set has no gradient in a graph
OPEN = (  # how large the result is, values decide
    "boolean_mask", "confusion_matrix", "range", "segment_", "sequence_mask", "unique",
    "where: places", "x[mask]", "x[i:]", "slice: by tensors",
)  # fmt: skip
# What asks for sizes to choose its ops; it waits for the run.
WAITING = {
    "static": (), "sizes hidden": ("einsum", "signal.irfft", "spectral.rfft: of a length"),
    "batch hidden": (),
    "rank hidden": ("einsum", "signal.irfft", "spectral.rfft", "matrix_transpose", "linalg.adj",
                    "concat: along the last axis", "space_to_batch_nd", "strided_slice", "unstack",
                    "x[", "nn.conv", "nn.depthwise", "nn.max_pool", "nn.avg_pool", "nn.lrn",
                    "nn.embedding", "image."),
}  # fmt: skip


def due(row):
    """The values, and the tolerance: more if both implementations compute in float32."""
    if callable(row.due):
        values = [row.due(*map(rg.tensor, row.arrays)).numpy()]
        return values, {"rtol": 2e-4, "atol": 2e-5}
    return [np.asarray(y) for y in listed(row.due)], {"rtol": 1e-5, "atol": 1e-6}


def squares(ys):
    """The sum of the squares of all floats among the results."""
    return sum(rg.sum(rg.square(y)) for y in listed(ys) if y.dtype in (np.float32, np.float64))


def check(found, expected, tolerance):
    for got, y in zip(found, expected, strict=True):
        assert got.dtype == y.dtype
        assert got.shape == y.shape
        np.testing.assert_allclose(got, y, **tolerance)


@pytest.mark.parametrize(("row", "hidden"), PAIRS, ids=str)
def test_values_and_gradients(row, hidden):
    xs = placeholders(row, hidden)
    ys, feed = listed(row.f(*xs)), dict(zip(xs, row.arrays, strict=True))
    values, tolerance = due(row)
    check([np.asarray(y) for y in run(ys, feed)], values, tolerance)
    for y, expected in zip(ys, values, strict=True):
        assert y.dtype == expected.dtype
        assert y.shape.is_compatible_with(expected.shape)
        assert hidden != "static" or y.shape.is_fully_defined() or row.label.startswith(OPEN)
    floats = [i for i, a in enumerate(row.arrays) if a.dtype.kind == "f"]
    if floats and any(y.dtype.kind == "f" for y in values) and row.label not in NO_GRADIENT:
        eager = row.due if callable(row.due) else row.f

        def f(*given):
            arrays = dict(zip(floats, given, strict=True))
            return squares(eager(*[arrays.get(i, a) for i, a in enumerate(row.arrays)]))

        by = [xs[i] for i in floats]
        found = tf.gradients(squares(ys), by, unconnected_gradients="zero")
        expected = rg.grads(f, unconnected="zero")([rg.asarray(row.arrays[i]) for i in floats])
        check(run(found, feed), [g.numpy() for g in expected], {"rtol": 2e-4, "atol": 2e-5})


@pytest.mark.parametrize("row", CALLS, ids=str)
def test_eager_tensors_are_computed_at_once(row):
    ys = listed(row.f(*map(rg.asarray, row.arrays)))
    assert {type(y) for y in ys} == {rg.Tensor}
    values, tolerance = due(row)
    check([y.numpy() for y in ys], values, tolerance)


def test_a_list_beside_an_eager_tensor_divides():
    x = rg.tensor([7.0, -3.0])
    assert tf.div_no_nan(x, [2.0, 0.0]).tolist() == [3.5, 0.0]


@pytest.mark.parametrize("row", [r for r in CALLS if r.op], ids=str)
def test_types_and_names_of_ops(row):
    op = listed(row.f(*placeholders(row, "static")))[0].op
    assert (op.type, op.name) == (row.op, row.name)


def sevens(op, *grads):
    """A rule that answers with 7 for each input of floats."""
    is_float = [i is not None and i.dtype.is_floating for i in op.inputs]
    return [tf.ones_like(i) * 7.0 if f else None for i, f in zip(op.inputs, is_float, strict=True)]


OLDER = {"SelectV2": "Select", "GatherV2": "Gather", "PadV2": "Pad", "ConcatV2": "Concat"}


@pytest.mark.parametrize(("row", "hidden"), [p for p in PAIRS if p[0].op], ids=str)
def test_rules_of_ops_fire_whatever_is_known(row, hidden, graph):
    if row.label.startswith(WAITING[hidden]):
        return
    xs = placeholders(row, hidden)
    key = OLDER.get(row.op, row.op) if hidden == "static" else row.op
    with graph.gradient_override_map({key: sevens}) as used:
        ys = listed(row.f(*xs))
    assert row.op in {op.type for op in graph.get_operations()}
    by = [x for x in xs if x.dtype.is_floating]
    if by and ys[0].dtype.is_floating:
        tf.gradients(squares(ys), by)
        used.assert_fired()


# -- gradients -----------------------------------------------------------------------------------

W = F32([[0.5, -1.0], [2.0, 0.25], [1.0, 1.5]])


@pytest.mark.parametrize("f", [
    lambda x: tf.reduce_sum(x * x), lambda x: tf.reshape(x, [2, 1]) * 2,
    lambda x: tf.concat([x, x], 0) * 3, lambda x: x[:1] - 2 * x[1:],
])  # fmt: skip
def test_gradients_of_integers_are_integers(f):
    x, y = tf.constant([2, 5]), tf.constant([2.0, 5.0], tf.float64)
    (dx,), (dy,) = tf.gradients(f(x), x), tf.gradients(f(y), y)
    assert dx.dtype == tf.int32
    assert run(dx).tolist() == run(dy).tolist()


def test_a_rule_of_tf_functions_serves_in_eager_mode():
    def clipped(op, grad):
        return tf.where(tf.abs(op.inputs[0]) <= 1.0, grad, tf.zeros(tf.shape(grad)))

    with rg.gradient_override_map({"Sign": clipped}):
        dx = rg.grad(lambda x: rg.sum(rg.sign(x)))(rg.tensor([-2.0, 0.5]))
    assert dx.tolist() == [0, 1]


FIRED = {
    "LogSoftmax": lambda x: tf.nn.softmax_cross_entropy_with_logits(labels=IMAGE, logits=x),
    "MatMul": lambda x: tf.layers.dense(x, 2), "Conv2D": lambda x: tf.layers.conv2d(x, 2, 3),
    "SplitV": lambda x: tf.split(x, [1, 2], 3)[0],
}  # fmt: skip
IMAGE = np.ones([1, 6, 5, 3], F32)


@pytest.mark.parametrize("op_type", FIRED)
def test_rules_of_ops_within_functions_fire(op_type, graph):
    x = tf.placeholder(tf.float32, [None, 6, 5, 3])
    with graph.gradient_override_map({op_type: sevens}) as used:
        y = FIRED[op_type](x)
    (dx,) = tf.gradients(y, x)
    used.assert_fired()
    found = run(dx, {x: IMAGE})
    assert found.any()
    assert (found % 7 == 0).all()
