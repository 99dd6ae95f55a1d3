"""TensorFlow's math and array functions: values, shapes, names, dtypes, gradients.

Each row of a table is run in a session with its shapes known, with the sizes hidden and with
even the rank hidden, and in regrad's eager mode; the second implementation is NumPy's.
"""

from __future__ import annotations

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from tests.helpers.v1_math_rows import (
    F32,
    MATRIX,
    PICKED,
    ROWS,
    SHAPES,
    listed,
)
from tests.helpers.v1_session import run

pytestmark = pytest.mark.usefixtures("graph")


# With nothing known of the shape, what even TensorFlow cannot build, or has to be told.
NEED_RANK = {
    "rank hidden": {
        "boolean_mask", "boolean_mask of columns", "x[mask]", "unique", "slice by tensors",
        "segment_mean",
    },
    "sizes hidden": {"slice by tensors"},
}  # fmt: skip


def due(row):
    with np.errstate(all="ignore"):
        return [np.asarray(y) for y in listed(row.reference(*row.arrays))]


def check(got, expected):
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("hidden", SHAPES)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_values(row, hidden):
    if row.label in NEED_RANK.get(hidden, {}):
        return
    xs = [tf.placeholder(a.dtype, SHAPES[hidden](a)) for a in row.arrays]
    ys = listed(row.f(*xs))
    found = run(ys, dict(zip(xs, row.arrays, strict=True)))
    for y, got, expected in zip(ys, found, due(row), strict=True):
        check(np.asarray(got), expected)
        assert y.dtype == expected.dtype
        assert y.shape.is_compatible_with(expected.shape)
        assert hidden != "static" or y.shape.is_fully_defined() or row.label in OPEN


OPEN = {
    "boolean_mask",
    "boolean_mask of a constant",
    "boolean_mask of columns",
    "confusion_matrix",
    "range",
    "range backwards",
    "range of floats",
    "segment_mean",
    "segment_sum",
    "sequence_mask",
    "unique",
    "where tells places",
    "x[mask]",
    "x[i:] of a tensor",
    "slice by tensors",
}  # how large the result is, values decide


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_eager(row, graph):
    ys = listed(row.f(*[rg.asarray(a) for a in row.arrays]))
    for y, expected in zip(ys, due(row), strict=True):
        assert isinstance(y, rg.Tensor)
        check(y.numpy(), expected)


@pytest.mark.parametrize("row", [r for r in ROWS if r.op_type], ids=str)
def test_types_and_names_of_ops(row):
    xs = [tf.placeholder(a.dtype, a.shape) for a in row.arrays]
    op = listed(row.f(*xs))[0].op
    assert (op.type, op.name) == (row.op_type, row.name)


@pytest.mark.parametrize("hidden", ["sizes hidden", "rank hidden"])
@pytest.mark.parametrize("row", [r for r in ROWS if r.op_type], ids=str)
def test_ops_are_there_for_overrides_whatever_is_known(row, hidden, graph):
    if row.label in NEED_RANK[hidden] or row.label in WAITING[hidden]:
        return
    row.f(*[tf.placeholder(a.dtype, SHAPES[hidden](a)) for a in row.arrays])
    assert row.op_type in {op.type for op in graph.get_operations()}


# What asks for sizes to choose its ops; it waits for the run.
WAITING = {
    "sizes hidden": {"einsum", "irfft", "rfft of a length"},
    "rank hidden": {
        "einsum",
        "irfft",
        "rfft",
        "rfft of a length",
        "matrix_transpose",
        "concat along the last axis",
        "space_to_batch_nd",
        "strided_slice",
        "unstack",
        *[row.label for row in PICKED if row.label.startswith("x[")],
    },
}


# -- gradients -----------------------------------------------------------------------------------

W = np.array([[0.5, -1.0], [2.0, 0.25], [1.0, 1.5]], F32)
DIFFERENTIATED = {
    "matmul": lambda x: tf.matmul(x, W),
    "exp of a sum": lambda x: tf.exp(tf.reduce_sum(x, 1) * 0.1),
    "softmax by hand": lambda x: tf.exp(x) / tf.reduce_sum(tf.exp(x), 1, keepdims=True),
    "logsumexp": lambda x: tf.reduce_logsumexp(x, 1),
    "concat and split": lambda x: tf.split(tf.concat([x, x * x], 1), 2, axis=1)[1],
    "gather": lambda x: tf.gather(x * x, [1, 0, 1]),
    "strided slice": lambda x: x[:, ::2] ** 2.0,
    "slice": lambda x: tf.slice(x * x, [0, 1], [-1, 2]),
    "pad and transpose": lambda x: tf.transpose(tf.pad(x, [[1, 0], [0, 1]])) ** 3.0,
    "where": lambda x: tf.where(x > 0.0, x * x, -x),
    "clip_by_norm": lambda x: tf.clip_by_norm(x, 1.0, axes=[1]),
    "norm": lambda x: tf.norm(x, axis=0),
    "stack and unstack": lambda x: tf.unstack(tf.stack([x, x**2.0]), num=2)[1],
    "boolean_mask": lambda x: tf.boolean_mask(x * x, [True, False]),
    "einsum": lambda x: tf.einsum("ij,jk->ik", x, tf.constant(W)) ** 2.0,
    "cumsum": lambda x: tf.cumsum(x, 1, exclusive=True) ** 2.0,
    "reduce_mean": lambda x: tf.reduce_mean(x * x, 0),
    "reduce_max": lambda x: tf.reduce_max(x, 1),
    "squared_difference": lambda x: tf.squared_difference(x, tf.reduce_mean(x, 1, True)),
    "tile and reshape": lambda x: tf.reshape(tf.tile(x, [1, 2]), [-1]) ** 2.0,
}


@pytest.mark.parametrize("hidden", SHAPES)
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients(name, hidden):
    f = DIFFERENTIATED[name]
    x = tf.placeholder(tf.float32, SHAPES[hidden](MATRIX))
    (dx,) = tf.gradients(f(x), x)
    expected = differences(f, MATRIX)
    np.testing.assert_allclose(run(dx, {x: MATRIX}), expected, rtol=2e-2, atol=2e-2)


def differences(f, at, step=1e-2):
    """The gradient of the sum of f by central differences."""
    x = tf.placeholder(tf.float32, at.shape)
    total = tf.reduce_sum(f(x))
    slope = np.zeros_like(at)
    with tf.Session() as session:
        for i in np.ndindex(at.shape):
            moved = np.zeros_like(at)
            moved[i] = step
            values = [session.run(total, {x: at + sign * moved}) for sign in (1, -1)]
            slope[i] = (values[0] - values[1]) / (2 * step)
    return slope


@pytest.mark.parametrize("f", [
    tf.argmax, tf.round, tf.zeros_like, tf.stop_gradient, lambda x: tf.range(x[0, 0]),
    lambda x: tf.unique(tf.reshape(x, [-1])).y, lambda x: tf.lin_space(x[0, 0], 1.0, 3),
])  # fmt: skip
def test_no_gradient_passes(f):
    x = tf.constant(MATRIX + 3)
    assert tf.gradients(f(x), x) == [None]


@pytest.mark.parametrize("f", [
    lambda x: tf.reduce_sum(x * x), lambda x: tf.reshape(x, [2, 1]) * 2,
    lambda x: tf.concat([x, x], 0) * 3, lambda x: x[:1] - 2 * x[1:],
])  # fmt: skip
def test_gradients_of_integers_are_integers(f):
    x = tf.constant([2, 5])
    (dx,) = tf.gradients(f(x), x)
    assert dx.dtype == tf.int32
    y = tf.placeholder(tf.float64, [2])
    (dy,) = tf.gradients(f(tf.cast(y, tf.float64)), y)
    assert run([dx, dy], {y: [2, 5]})[0].tolist() == run(dy, {y: [2, 5]}).tolist()


def test_a_rule_of_tf_functions_serves_in_eager_mode():
    def clipped(op, grad):
        x = op.inputs[0]
        return tf.where(tf.abs(x) <= 1.0, grad, tf.zeros(tf.shape(grad)))

    with rg.gradient_override_map({"Sign": clipped}):
        dx = rg.grad(lambda x: rg.sum(rg.sign(x)))(rg.tensor([-2.0, 0.5]))
    assert dx.tolist() == [0, 1]


OVERRIDDEN = {
    "Select": lambda x: tf.where(x > 0.0, x, x),
    "Slice": lambda x: tf.slice(x, [0, 0], [1, 2]),
    "ConcatV2": lambda x: tf.concat([x, x], 1),
    "Gather": lambda x: tf.gather(x, [0]),
    "Pad": lambda x: tf.pad(x, [[1, 1], [0, 0]]),
    "Cumsum": tf.cumsum,
    "SplitV": lambda x: tf.split(x, [1, 2], 1)[0],
    "StridedSlice": lambda x: x[:, 0],
    "MatMul": lambda x: tf.matmul(x, W),
}


CASES = [(t, hidden) for t in OVERRIDDEN for hidden in SHAPES]
CASES.remove(("StridedSlice", "rank hidden"))  # such an index waits for the run


@pytest.mark.parametrize(("op_type", "hidden"), CASES)
def test_rules_in_force_fire(op_type, hidden, graph):
    x = tf.placeholder(tf.float32, SHAPES[hidden](MATRIX))

    def sevens(op, *grads):
        return [tf.ones_like(i) * 7.0 if i is not None and i.dtype == tf.float32 else None
                for i in op.inputs]  # fmt: skip

    with graph.gradient_override_map({op_type: sevens}) as used:
        y = OVERRIDDEN[op_type](x)
    (dx,) = tf.gradients(y, x)
    used.assert_fired()
    assert (run(dx, {x: MATRIX}) % 7 == 0).all()
