"""tf.gradients: its arguments, what has no gradient, integers, kinks, depth."""

import itertools

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from tests.helpers.v1_session import run, values

pytestmark = pytest.mark.usefixtures("graph")

COUNT = itertools.count()


# -- ys and xs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("single", [lambda t: t, lambda t: [t], lambda t: (t,)])
def test_the_result_is_a_list_whatever_the_arguments_are(single):
    x = tf.constant(3.0)
    grads = tf.gradients(single(x * x), single(x))
    assert isinstance(grads, list)
    assert values(grads) == [6.0]


def test_variables_constants_and_tensors_within_are_all_xs():
    v, c = tf.Variable(2.0), tf.constant(3.0)
    h = v * c
    assert values(tf.gradients(h * h, [v, c, h])) == [36.0, 24.0, 12.0]


def test_several_ys_are_summed_and_repeated_ones_count_again():
    x = tf.constant([1.0, 2.0])
    y = x * x
    assert values(tf.gradients([y, x * 5.0], x)) == [[7.0, 9.0]]
    assert values(tf.gradients([y, y], x)) == [[4.0, 8.0]]


@pytest.mark.parametrize(("value", "one"), [(3.0, 1.0), (3, 1), ([2.0, 3.0], [1.0, 1.0])])
def test_y_by_itself_is_ones_of_its_dtype(value, one):
    x = tf.constant(value)
    (dx,) = tf.gradients(x, x)
    assert dx.dtype == x.dtype
    assert run(dx).tolist() == one


def test_empty_lists():
    x = tf.constant(3.0)
    assert tf.gradients([], [x]) == [None]
    assert tf.gradients(x, []) == []


def test_the_other_arguments_of_tensorflow_are_accepted():
    x = tf.constant(3.0)
    options = {"colocate_gradients_with_ops": True, "gate_gradients": True, "name": "g"}
    assert values(tf.gradients(x * x, x, aggregation_method=None, **options)) == [6.0]
    with pytest.raises(ValueError):
        tf.gradients(x * x + x, x, aggregation_method=77)


# -- no path -------------------------------------------------------------------------------------


NO_GRADIENT = {
    "another tensor": lambda x: tf.constant(2.0) * 3.0,
    "tf.round": tf.round,
    "tf.floor": tf.floor,
    "tf.ceil": tf.ceil,
    "tf.rint": tf.rint,
    "x // 2": lambda x: x // 2.0,
    "cast to int32": lambda x: tf.cast(x, tf.int32),
    "cast there and back": lambda x: tf.cast(tf.cast(x, tf.int32), tf.float32),
    "x > 0": lambda x: tf.cast(x > 0.0, tf.float32),
    "tf.equal": lambda x: tf.cast(tf.equal(x, x), tf.float32),
    "tf.argmax": lambda x: tf.cast(tf.argmax(x), tf.float32),
    "tf.range": lambda x: tf.range(x[1] * 2.0)[:2],
    "tf.unique": lambda x: tf.unique(x).y,
    "tf.lin_space": lambda x: tf.lin_space(x[0], 1.0, 2),
    "tf.zeros_like": tf.zeros_like,
    "tf.ones_like": tf.ones_like,
    "tf.shape": lambda x: tf.cast(tf.shape(x), tf.float32),
    "tf.stop_gradient": tf.stop_gradient,
}


@pytest.mark.parametrize("name", NO_GRADIENT)
def test_no_gradient_is_none(name):
    x = tf.constant([0.3, 1.7])
    y = NO_GRADIENT[name](x)
    assert tf.gradients(y, x) == [None]
    if y.dtype == tf.float32:
        assert values(tf.gradients(y * tf.constant(2.0) + x, x)) == [[1.0, 1.0]]


def test_unconnected_gradients_may_be_zeros():
    x, p = tf.constant([1.0, 2.0]), tf.placeholder(tf.float32, [None])
    y = tf.constant(3.0)
    for zero in ("zero", tf.UnconnectedGradients.ZERO):
        grads = tf.gradients(y, [x, p], unconnected_gradients=zero)
        assert values(grads, {p: [4.0, 5.0, 6.0]}) == [[0.0, 0.0], [0.0, 0.0, 0.0]]
    for none in ("none", tf.UnconnectedGradients.NONE):
        assert tf.gradients(y, [x, p], unconnected_gradients=none) == [None, None]
    with pytest.raises(ValueError):
        tf.gradients(y, x, unconnected_gradients="zeros")


def test_an_op_type_without_a_rule_is_named_with_its_op():
    op_type = f"TestsV1NoRule{next(COUNT)}"

    @rg.op(op_type)
    def without_rule(xp, x: rg.Tensor, /) -> rg.Tensor:
        return x

    x, z = tf.constant(2.0), tf.constant(3.0)
    y = without_rule(x) * z
    assert values(tf.gradients(y, z)) == [2.0]
    with pytest.raises(LookupError, match=op_type):
        tf.gradients(y, x)


# -- grad_ys -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grad_ys", "due"),
    [
        (lambda: tf.constant([10.0, 20.0]), [20.0, 80.0]),
        (lambda: [tf.constant([10.0, 20.0])], [20.0, 80.0]),
        (lambda: [np.array([10.0, 20.0], np.float32)], [20.0, 80.0]),
        (lambda: [[10.0, 20.0]], [20.0, 80.0]),
        (lambda: [None], [2.0, 4.0]),
        (lambda: [3.0], [6.0, 12.0]),
    ],
    ids=["tensor", "list", "array", "nested list", "none", "number"],
)
def test_forms_of_grad_ys(grad_ys, due):
    x = tf.constant([1.0, 2.0])
    assert values(tf.gradients(x * x, x, grad_ys=grad_ys())) == [due]


def test_grad_ys_go_with_ys():
    x = tf.constant(2.0)
    assert values(tf.gradients([x * x, x * 3.0], x, grad_ys=[tf.constant(10.0), None])) == [43.0]
    with pytest.raises(ValueError, match=r"2 .*1"):
        tf.gradients(x * x, x, grad_ys=[1.0, 2.0])


@pytest.mark.parametrize("bad", [True, "a"], ids=str)
def test_grad_ys_of_another_kind(bad):
    x = tf.constant(2.0)
    with pytest.raises((TypeError, ValueError)):
        tf.gradients(x * x, x, grad_ys=[tf.constant(bad)])


def test_ys_that_are_no_real_numbers():
    x = tf.constant(1.0 + 2.0j)
    with pytest.raises(TypeError):
        tf.gradients(x * x, x)
    (dx,) = tf.gradients(x * x, x, grad_ys=tf.constant(1.0 + 0.0j))
    assert run(dx) == 2.0 - 4.0j
    with pytest.raises(TypeError):
        tf.gradients(tf.constant("a"), x)


# -- stop_gradients, second order ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("stopped", "due"), [("", [3.0, 1.0]), ("a", [3.0, 1.0]), ("b", [1.0, 1.0]), ("ab", [1.0, 1.0])]
)
def test_stop_gradients_stops_what_made_the_tensor(stopped, due):
    a = tf.constant(5.0)
    b = a * 2.0
    stop = [{"a": a, "b": b}[name] for name in stopped]
    assert values(tf.gradients(a + b, [a, b], stop_gradients=stop)) == due


def test_stop_gradients_holds_for_one_call():
    a = tf.constant(5.0)
    b = a * 2.0
    tf.gradients(a + b, a, stop_gradients=b)
    assert values(tf.gradients(a + b, a)) == [3.0]


def test_second_and_third_derivatives():
    x = tf.placeholder(tf.float32, [None])
    y, found = x**3.0, []
    for _ in range(4):
        (y,) = tf.gradients(y, x)
        found.append(None if y is None else run(y, {x: [1.0, 2.0]}).tolist())
        if y is None:
            break
    assert found[:3] == [[3.0, 12.0], [6.0, 12.0], [6.0, 6.0]]


def test_hessians():
    x, z = tf.constant([1.0, 2.0, 3.0]), tf.constant([1.0, 2.0])
    y = tf.reduce_sum(x) ** 2.0 * x[0] + tf.reduce_sum(z**3.0)
    hx, hz = tf.hessians(y, [x, z])
    rest = [[14.0, 14.0], [2.0, 2.0], [2.0, 2.0]]
    assert run(hx).tolist() == [[26.0, *rest[0]], [14.0, *rest[1]], [14.0, *rest[2]]]
    assert run(hz).tolist() == [[6.0, 0.0], [0.0, 12.0]]


def test_gathered_rows_are_added():
    x = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    (dx,) = tf.gradients(tf.gather(x, [2, 0, 2]) * 2.0, x)
    assert run(tf.convert_to_tensor(dx)).tolist() == [[2.0, 2.0], [0.0, 0.0], [4.0, 4.0]]


# -- integers, as TensorFlow 1.8 -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("f", "due"),
    [
        (lambda x: x * 3, 3),
        (lambda x: x * x, 14),
        (lambda x: x + 5, 1),
        (lambda x: -x, -1),
        (lambda x: x - 2, 1),
        (lambda x: 10 - x, -1),
        (lambda x: x // 2, None),
        (lambda x: x / 2, None),
        (lambda x: tf.cast(x, tf.float32) * 2.0, None),
    ],
    ids=["x*3", "x*x", "x+5", "-x", "x-2", "10-x", "x//2", "x/2", "cast"],
)
@pytest.mark.parametrize("kind", [tf.Variable, tf.constant])
def test_integers_have_gradients(f, due, kind):
    x = kind(7)
    (dx,) = tf.gradients(f(x), x)
    assert (dx if dx is None else run(dx)) == due
    assert dx is None or dx.dtype == tf.int32


@pytest.mark.parametrize(
    ("f", "due"),
    [
        (tf.reduce_sum, [1, 1, 1]),
        (tf.reduce_max, [0, 1, 0]),
        (tf.cumsum, [3, 2, 1]),
        (lambda x: tf.gather(x, [1, 1]), [0, 2, 0]),
        (lambda x: tf.where(x > 4, x * x, x), [1, 14, 10]),
        (lambda x: tf.reshape(x, [3, 1]) * 2, [2, 2, 2]),
        (lambda x: tf.concat([x, x[:2]], 0), [2, 2, 1]),
    ],
    ids=["reduce_sum", "reduce_max", "cumsum", "gather", "where", "reshape", "concat"],
)
def test_integer_gradients_keep_their_dtype(f, due):
    x = tf.constant([3, 7, 5])
    y = f(x)
    (dx,) = tf.gradients(y, x)
    assert (y.dtype, dx.dtype) == (tf.int32, tf.int32)
    assert run(dx).tolist() == due


INDEXED = {
    "gather": lambda a, i: tf.gather(a, i),
    "gather_nd": lambda a, i: tf.gather_nd(a, tf.expand_dims(i, 1)),
    "scatter_nd": lambda a, i: tf.scatter_nd(tf.expand_dims(i, 1), a, [3]),
    "unsorted_segment_sum": lambda a, i: tf.unsorted_segment_sum(a, i, 3),
    "one_hot": lambda a, i: tf.one_hot(i, 3) * tf.reshape(a, [-1, 1]),
    "index": lambda a, i: a[i[1]],
    "take_along_axis": lambda a, i: rg.take_along_axis(a, i),
}


@pytest.mark.parametrize("name", INDEXED)
def test_indices_have_no_gradient(name):
    a, i = tf.constant([1.0, 2.0]), tf.constant([0, 1])
    y = INDEXED[name](a, i * 1)
    assert tf.gradients(y, i) == [None]
    assert tf.gradients(y, [a, i])[0] is not None


def test_top_k_at_second_order():
    # the places come from x too, by an output that has no gradient
    x = tf.constant([1.0, 3.0, 2.0])
    top, places = tf.nn.top_k(x, 2)
    (first,) = tf.gradients(top**3.0 * tf.gather(x, places), x)
    (second,) = tf.gradients(first, x)
    assert run(first).tolist() == [0.0, 108.0, 32.0]
    assert run(second).tolist() == [0.0, 108.0, 48.0]


def test_an_integer_variable_by_itself():
    x = tf.Variable(7)
    assert values(tf.gradients(x, x)) == [1]


def test_a_cast_to_integers_is_passed_under_a_rule(graph):
    x = tf.constant([1.2, 3.4])
    with graph.gradient_override_map({"Cast": lambda op, grad: grad}):
        y = tf.cast(tf.cast(x, tf.int32), tf.float32) * 3.0
    assert values(tf.gradients(y, x)) == [[3.0, 3.0]]


def test_a_rule_of_a_comparison_is_called(graph):
    def compared(rule):
        with graph.gradient_override_map({"Greater": rule, "Cast": lambda op, grad: grad}):
            return tf.cast(x > 0.0, tf.float32) * 3.0

    x = tf.constant([1.2, -3.4])
    assert values(tf.gradients(compared(lambda op, grad: (grad, None)), x)) == [[3.0, 3.0]]
    with pytest.raises(ValueError, match="Greater"):
        tf.gradients(compared("Identity"), x)


# -- kinks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("f", "x", "due"),
    [
        (tf.abs, [-1.0, 0.0, 1.0], [-1.0, 0.0, 1.0]),
        (tf.nn.relu, [-1.0, 0.0, 1.0], [0.0, 0.0, 1.0]),
        (lambda x: tf.clip_by_value(x, -1.0, 1.0), [-2.0, -1.0, 1.0, 2.0], [0.0, 1.0, 1.0, 0.0]),
        (tf.reduce_max, [1.0, 3.0, 3.0], [0.0, 0.5, 0.5]),
        (tf.reduce_min, [1.0, 1.0, 3.0], [0.5, 0.5, 0.0]),
        (lambda y: tf.constant([-2.0, 0.0, 1.0]) ** y, [2.0, 2.0, 2.0], [0.0, 0.0, 0.0]),
        (lambda x: tf.where(x > 0.0, x, x * 5.0), [-1.0, 0.0, 1.0], [5.0, 5.0, 1.0]),
    ],
    ids=["abs", "relu", "clip_by_value", "reduce_max", "reduce_min", "pow", "where"],
)
def test_kinks(f, x, due):
    x = tf.constant(x)
    assert values(tf.gradients(f(x), x)) == [due]


@pytest.mark.parametrize("f", [tf.maximum, tf.minimum])
def test_ties_go_to_the_first_argument(f):
    a, b = tf.constant(2.0), tf.constant(2.0)
    assert values(tf.gradients(f(a, b), [a, b])) == [1.0, 0.0]


# -- depth ---------------------------------------------------------------------------------------


def chain(x, n):
    for _ in range(n):
        x = tf.identity(x)
    return x


def test_a_chain_of_5000_ops_at_second_order():
    x = tf.constant(3.0)
    y = tf.square(chain(x, 5000))
    (first,) = tf.gradients(y, x)
    (second,) = tf.gradients(first, x)
    assert run([y, first, second]) == [9.0, 6.0, 2.0]


def test_a_chain_of_100000_ops():
    x = tf.constant(3.0)
    y = tf.square(chain(x, 100_000))
    (dx,) = tf.gradients(y, x)
    assert run([y, dx]) == [9.0, 6.0]
