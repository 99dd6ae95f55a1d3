"""tf.gradients: its arguments, what has no gradient, integers, kinks, depth."""

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.errors import ArgumentError, GraphError
from tests.helpers.differences import error, jacobian
from tests.helpers.rows import refused
from tests.helpers.v1_session import run, slope, values

pytestmark = pytest.mark.usefixtures("graph")


# -- ys and xs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("single", [lambda t: t, lambda t: [t], lambda t: (t,)])
def test_the_result_is_a_list_whatever_the_arguments_are(single):
    x = tf.constant(3.0)
    options = {"colocate_gradients_with_ops": True, "gate_gradients": True, "name": "g"}
    for more in ({}, {"aggregation_method": None, **options}):
        grads = tf.gradients(single(x * x), single(x), **more)
        assert isinstance(grads, list)
        assert values(grads) == [6.0]


def test_variables_constants_and_tensors_within_are_all_xs():
    v, c, i = tf.Variable(2.0), tf.constant(3.0), tf.Variable(7)
    h = v * c
    assert values(tf.gradients(h * h, [v, c, h])) == [36.0, 24.0, 12.0]
    assert tf.gradients([], [c]) == [None]
    assert tf.gradients(c, []) == []
    for x, one in ((c, 1.0), (tf.constant([2.0, 3.0]), [1.0, 1.0]), (i, 1)):
        assert slope(x, x) == one
        assert tf.gradients(x, x)[0].dtype == x.dtype.base_dtype


def test_ys_and_xs_of_two_graphs_are_refused():
    x, v = tf.constant(3.0), tf.Variable(1.0)
    with tf.Graph().as_default():
        y = tf.constant(2.0) * 3.0
        for of in (x, v):
            refused(lambda of=of: tf.gradients(y, of), GraphError, "same graph")
    assert values(tf.gradients(x * v, [x, v])) == [1.0, 3.0]


X = [1.0, 2.0]
FORMS = {  # ys and grad_ys for x = [1, 2], and the gradient
    "several ys": (lambda x: [x * x, x * 5.0], None, [7.0, 9.0]),
    "ys twice": (lambda x: [x * x, x * x], None, [4.0, 8.0]),
    "a tensor": (lambda x: x * x, lambda: tf.constant([10.0, 20.0]), [20.0, 80.0]),
    "a list": (lambda x: x * x, lambda: [tf.constant([10.0, 20.0])], [20.0, 80.0]),
    "an array": (lambda x: x * x, lambda: [np.float32([10.0, 20.0])], [20.0, 80.0]),
    "a nested list": (lambda x: x * x, lambda: [[10.0, 20.0]], [20.0, 80.0]),
    "none": (lambda x: x * x, lambda: [None], [2.0, 4.0]),
    "a number": (lambda x: x * x, lambda: [3.0], [6.0, 12.0]),
    "one of two": (lambda x: [x * x, x * 3.0], lambda: [[10.0, 1.0], None], [23.0, 7.0]),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_ys_and_grad_ys(name):
    ys, grad_ys, due = FORMS[name]
    x = tf.constant(X)
    assert values(tf.gradients(ys(x), x, grad_ys=grad_ys and grad_ys())) == [due]


@pytest.mark.parametrize(("ys", "options", "error", "words"), [
    (lambda x: x * x, {"aggregation_method": 77}, ValueError, "aggregation_method"),
    (lambda x: x * x, {"unconnected_gradients": "zeros"}, ValueError, "unconnected_gradients"),
    (lambda x: x * x, {"grad_ys": [1.0, 2.0]}, ValueError, r"2 .*1"),
    (lambda x: x * x, {"grad_ys": [True]}, (TypeError, ValueError), "."),
    (lambda x: x * x, {"grad_ys": ["a"]}, (TypeError, ValueError), "."),
    (lambda x: tf.complex(x, x), {}, TypeError, "complex"),
    (lambda x: tf.constant("a"), {}, TypeError, "string|str"),
])  # fmt: skip
def test_arguments_that_are_refused(ys, options, error, words):
    x = tf.constant(X)
    refused(lambda: tf.gradients(ys(x), x, **options), error, words)


def test_complex_ys_need_grad_ys():
    x = tf.constant(1.0 + 2.0j)
    (dx,) = tf.gradients(x * x, x, grad_ys=tf.constant(1.0 + 0.0j))
    assert run(dx) == 2.0 - 4.0j


# -- no path -------------------------------------------------------------------------------------


NO_GRADIENT = {
    "another tensor": lambda x: tf.constant(2.0) * 3.0, "tf.round": tf.round, "tf.floor": tf.floor,
    "tf.ceil": tf.ceil, "tf.rint": tf.rint, "x // 2": lambda x: x // 2.0,
    "cast to int32": lambda x: tf.cast(x, tf.int32),
    "cast there and back": lambda x: tf.cast(tf.cast(x, tf.int32), tf.float32),
    "x > 0": lambda x: tf.cast(x > 0.0, tf.float32),
    "tf.equal": lambda x: tf.cast(tf.equal(x, x), tf.float32),
    "tf.argmax": lambda x: tf.cast(tf.argmax(x), tf.float32),
    "tf.range": lambda x: tf.range(x[1] * 2.0)[:2], "tf.unique": lambda x: tf.unique(x).y,
    "tf.lin_space": lambda x: tf.lin_space(x[0], 1.0, 2), "tf.zeros_like": tf.zeros_like,
    "tf.ones_like": tf.ones_like, "tf.shape": lambda x: tf.cast(tf.shape(x), tf.float32),
    "tf.stop_gradient": tf.stop_gradient,
}  # fmt: skip


@pytest.mark.parametrize("name", NO_GRADIENT)
def test_no_gradient_is_none(name):
    x = tf.constant([0.3, 1.7])
    y = NO_GRADIENT[name](x)
    assert tf.gradients(y, x) == [None]
    if y.dtype == tf.float32:
        assert values(tf.gradients(y * tf.constant(2.0) + x, x)) == [[1.0, 1.0]]


INDEXED = {
    "gather": lambda a, i: tf.gather(a, i),
    "gather_nd": lambda a, i: tf.gather_nd(a, tf.expand_dims(i, 1)),
    "scatter_nd": lambda a, i: tf.scatter_nd(tf.expand_dims(i, 1), a, [3]),
    "unsorted_segment_sum": lambda a, i: tf.unsorted_segment_sum(a, i, 3),
    "one_hot": lambda a, i: tf.one_hot(i, 3) * tf.reshape(a, [-1, 1]),
    "index": lambda a, i: a[i[1]], "take_along_axis": lambda a, i: rg.take_along_axis(a, i),
}  # fmt: skip


@pytest.mark.parametrize("name", INDEXED)
def test_indices_have_no_gradient(name):
    a, i = tf.constant([1.0, 2.0]), tf.constant([0, 1])
    y = INDEXED[name](a, i * 1)
    assert tf.gradients(y, i) == [None]
    assert tf.gradients(y, [a, i])[0] is not None


def test_unconnected_gradients_may_be_zeros():
    x, p, y = tf.constant([1.0, 2.0]), tf.placeholder(tf.float32, [None]), tf.constant(3.0)
    for zero in ("zero", tf.UnconnectedGradients.ZERO):
        grads = tf.gradients(y, [x, p], unconnected_gradients=zero)
        assert values(grads, {p: [4.0, 5.0, 6.0]}) == [[0.0, 0.0], [0.0, 0.0, 0.0]]
    for none in ("none", tf.UnconnectedGradients.NONE):
        assert tf.gradients(y, [x, p], unconnected_gradients=none) == [None, None]


def test_an_op_type_without_a_rule_is_named_with_its_op():
    @rg.op("TestsV1NoRule")
    def without_rule(xp, x: rg.Tensor, /) -> rg.Tensor:
        return x

    x, z = tf.constant(2.0), tf.constant(3.0)
    y = without_rule(x) * z
    assert values(tf.gradients(y, z)) == [2.0]
    refused(lambda: tf.gradients(y, x), LookupError, "TestsV1NoRule")


# -- stop_gradients, second order ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("stopped", "due"), [("", [3.0, 1.0]), ("a", [3.0, 1.0]), ("b", [1.0, 1.0]), ("ab", [1.0, 1.0])]
)
def test_stop_gradients_stops_what_made_the_tensor_in_one_call(stopped, due):
    a = tf.constant(5.0)
    b = a * 2.0
    stop = [{"a": a, "b": b}[name] for name in stopped]
    assert values(tf.gradients(a + b, [a, b], stop_gradients=stop)) == due
    assert values(tf.gradients(a + b, a)) == [3.0]


def test_hessians():
    x, z = tf.constant([1.0, 2.0, 3.0]), tf.constant(X)
    y = tf.reduce_sum(x) ** 2.0 * x[0] + tf.reduce_sum(z**3.0)
    hx, hz = tf.hessians(y, [x, z])
    assert run(hx).tolist() == [[26.0, 14.0, 14.0], [14.0, 2.0, 2.0], [14.0, 2.0, 2.0]]
    assert run(hz).tolist() == [[6.0, 0.0], [0.0, 12.0]]


# -- integers, as TensorFlow 1.8; kinks ------------------------------------------------------------

CALCULATED = [  # y of x = 7, and the gradient
    (lambda x: x * 3, 3), (lambda x: x * x, 14), (lambda x: x + 5, 1), (lambda x: -x, -1),
    (lambda x: x - 2, 1), (lambda x: 10 - x, -1), (lambda x: x // 2, None),
    (lambda x: x / 2, None), (lambda x: tf.cast(x, tf.float32) * 2.0, None),
]  # fmt: skip


@pytest.mark.parametrize("kind", [tf.Variable, tf.constant])
@pytest.mark.parametrize(("f", "due"), CALCULATED)
def test_integers_have_gradients(f, due, kind):
    x = kind(7)
    (dx,) = tf.gradients(f(x), x)
    assert (dx if dx is None else run(dx)) == due
    assert dx is None or dx.dtype == tf.int32


WHOLE = [3, 7, 5]
SLOPES = {
    "reduce_sum": (tf.reduce_sum, WHOLE, [1, 1, 1]),
    "reduce_max": (tf.reduce_max, WHOLE, [0, 1, 0]), "cumsum": (tf.cumsum, WHOLE, [3, 2, 1]),
    "gather": (lambda x: tf.gather(x, [1, 1]), WHOLE, [0, 2, 0]),
    "where": (lambda x: tf.where(x > 4, x * x, x), WHOLE, [1, 14, 10]),
    "reshape": (lambda x: tf.reshape(x, [3, 1]) * 2, WHOLE, [2, 2, 2]),
    "concat": (lambda x: tf.concat([x, x[:2]], 0), WHOLE, [2, 2, 1]),
    "where at 0": (lambda x: tf.where(x > 0.0, x, x * 5.0), [-1.0, 0.0, 1.0], [5.0, 5.0, 1.0]),
    "gathered rows": (lambda x: tf.gather(x, [2, 0, 2]) * 2.0, [1.0, 2.0, 3.0], [2.0, 0.0, 4.0]),
}  # fmt: skip


@pytest.mark.parametrize("name", SLOPES)
def test_gradients_at_kinks_and_of_integers(name):
    f, x, due = SLOPES[name]
    x = tf.constant(x)
    y = f(x)
    (dx,) = tf.gradients(y, x)
    assert y.dtype == dx.dtype == x.dtype
    assert run(dx).tolist() == due


# -- depth ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("length", "orders"), [(5000, [9.0, 6.0, 2.0]), (100_000, [9.0, 6.0])])
def test_a_long_chain_of_ops(length, orders):
    x = y = tf.constant(3.0)
    for _ in range(length):
        y = tf.identity(y)
    found = [tf.square(y)]
    for _ in orders[1:]:
        found += tf.gradients(found[-1], x)
    assert run(found) == orders


# -- order=1: gradients of gradients, against differences ------------------------------------------

RNG = np.random.default_rng(0)
POINT, W1, W2 = RNG.normal(size=4), RNG.normal(size=(4, 5)), RNG.normal(size=(5, 3))
C = np.arange(1.0, 5.0)
RULES = {
    "MatMul": lambda dy, a, b: (a * ((dy / ((a @ b) ** 2 + 0.5)) @ b.T), None),
    "Tanh": lambda dy, x, y: dy * y * x,
}


def net(x):
    h = tf.tanh(tf.matmul(tf.reshape(x, (1, 4)), W1))
    return tf.reduce_sum(tf.tanh(tf.matmul(tf.nn.softmax(h), W2)) ** 2)


def waiting(x):  # for the evaluate, which tells its shape
    return tf.reduce_sum(tf.tanh(tf.reverse(tf.tanh(x), [0])) ** 2)


@pytest.mark.parametrize("shape", [[4], None])
@pytest.mark.parametrize(("order", "f"), [(1, net), (None, net), (1, waiting)])
def test_to_third_order(graph, session, order, f, shape):
    x = tf.placeholder(tf.float64, shape)
    with graph.gradient_override_map(RULES if f is net else {"Tanh": RULES["Tanh"]}, order=order):
        y = f(x)
    (first,) = tf.gradients(y, x)
    (second,) = tf.gradients(tf.reduce_sum(first * C), x)
    (third,) = tf.gradients(tf.reduce_sum(second * C), x)
    (both,) = tf.gradients(tf.reduce_sum(first * C) + y, x)
    evaluate = lambda t: lambda value: session.run(t, {x: value})  # noqa: E731
    second_error = error(evaluate(second)(POINT), C @ jacobian(evaluate(first), POINT))
    third_error = error(evaluate(third)(POINT), C @ jacobian(evaluate(second), POINT))
    # past the gradient the ops have their own, too
    both_error = error(
        evaluate(both)(POINT), C @ jacobian(evaluate(first), POINT) + jacobian(evaluate(y), POINT)
    )
    if order is None:
        assert second_error > 0.1
    else:
        assert max(second_error, third_error, both_error) < 1e-6


def test_loops_and_branches_and_other_orders_are_refused(graph):
    x = tf.placeholder(tf.float64, [4])
    with graph.gradient_override_map({"Tanh": lambda dy, y: dy * y}, order=1):
        with pytest.raises(GraphError, match=r"order=1: 'Tanh' .* branch or loop"):
            tf.cond(tf.constant(True), lambda: tf.tanh(x), lambda: x)
        with pytest.raises(GraphError, match=r"order=1: 'Tanh' .* branch or loop"):
            tf.while_loop(lambda c: tf.constant(False), tf.tanh, [x])
    with pytest.raises(ArgumentError, match=r"order is None .* or 1 .*, got 2"):
        graph.gradient_override_map({"Tanh": "Sigmoid"}, order=2)
