"""tf.custom_gradient and tf.py_func, and regrad's own functions inside a TensorFlow 1 graph."""

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.errors import GradientError, RuleError
from tests.helpers.v1_session import run, values

pytestmark = pytest.mark.usefixtures("graph")


# -- custom_gradient -----------------------------------------------------------------------------


def test_arguments_become_tensors():
    seen = []

    @tf.custom_gradient
    def f(a, b, c):
        seen.extend([a, b, c])
        return a + b * c, lambda dy: (dy * 1.0, dy * 2.0, dy * 3.0)

    v = tf.Variable(2.0)
    y = f(1.0, v, np.float32(3.0))
    assert all(isinstance(x, tf.Tensor) for x in seen)
    assert run(y) == 7.0
    assert values(tf.gradients(y, v)) == [2.0]


def test_the_output_is_one_identity_of_everything():
    x = tf.constant(2.0)
    y = tf.custom_gradient(lambda x: (x * 3.0, lambda dy: dy))(x)
    assert y.op.type == "IdentityN"


@pytest.mark.parametrize("container", [list, tuple])
def test_containers_of_results_come_back(container):
    @tf.custom_gradient
    def f(x):
        return container([x * 2.0, x * 3.0]), lambda a, b: a * 10.0 + b * 100.0

    x = tf.constant(2.0)
    y = f(x)
    assert isinstance(y, list | tuple)
    assert run(list(y)) == [4.0, 6.0]
    assert values(tf.gradients(list(y), x)) == [110.0]


@pytest.mark.parametrize("answer", [None, [None]])
def test_none_is_no_gradient(answer):
    x = tf.constant(2.0)
    y = tf.custom_gradient(lambda x: (x * 1.0, lambda dy: answer))(x)
    assert tf.gradients(y, x) == [None]


def test_some_arguments_may_have_none():
    a, b = tf.constant(2.0), tf.constant(3.0)
    y = tf.custom_gradient(lambda a, b: (a * b, lambda dy: (dy * 5.0, None)))(a, b)
    assert values(tf.gradients(y, [a, b])) == [5.0, None]


def test_gradients_of_the_ops_inside_do_not_count(graph):
    def f(x):
        with graph.gradient_override_map({"Square": lambda op, grad: 1 / 0}):
            return tf.square(x), lambda dy: dy * 5.0

    x = tf.constant(2.0)
    y = tf.custom_gradient(f)(x)
    assert run(y) == 4.0
    assert values(tf.gradients(y, x)) == [5.0]


def test_the_outer_of_two_hides_the_inner():
    inner = tf.custom_gradient(lambda x: (x * 2.0, lambda dy: 1 / 0))
    outer = tf.custom_gradient(lambda x: (inner(x), lambda dy: dy * 7.0))
    x = tf.constant(2.0)
    assert values(tf.gradients(outer(x), x)) == [7.0]


def test_an_override_of_identities_does_not_reach_it(graph):
    x = tf.constant(2.0)
    rules = {"IdentityN": lambda op, *grads: grads, "Identity": lambda op, grad: grad * 9.0}
    with graph.gradient_override_map(rules):
        y = tf.custom_gradient(lambda x: (x * 1.0, lambda dy: dy * 5.0))(x)
        z = tf.identity(x)
    assert values(tf.gradients(y, x) + tf.gradients(z, x)) == [5.0, 9.0]


def test_the_second_order_follows_what_grad_built():
    @tf.custom_gradient
    def log1pexp(x):
        e = tf.exp(x)
        return tf.log(1.0 + e), lambda dy: dy * (1.0 - 1.0 / (1.0 + e))

    x = tf.constant(1.0)
    (first,) = tf.gradients(log1pexp(x), x)
    (second,) = tf.gradients(first, x)
    s = 1 / (1 + np.exp(-1.0))
    np.testing.assert_allclose(run([first, second]), [s, s * (1 - s)], rtol=1e-6)


def test_a_gradient_that_uses_only_dy_has_no_second_order():
    x = tf.constant(2.0)
    y = tf.custom_gradient(lambda x: (x * x, lambda dy: dy * 3.0))(x)
    (first,) = tf.gradients(y, x)
    assert tf.gradients(first, x) == [None]


@pytest.mark.parametrize("answer", [lambda x: x * 1.0, lambda x: (x * 1.0, None)])
def test_a_pair_of_value_and_function_is_due(answer):
    x = tf.constant(2.0)
    with pytest.raises(TypeError):
        tf.gradients(tf.custom_gradient(answer)(x), x)


def test_too_many_gradients():
    x = tf.constant(2.0)
    y = tf.custom_gradient(lambda x: (x * 1.0, lambda dy: (dy, dy)))(x)
    with pytest.raises(ValueError):
        tf.gradients(y, x)


def test_variables_used_inside_get_gradients_of_their_own():
    x, v = tf.constant(2.0), tf.Variable(3.0)
    seen = []

    @tf.custom_gradient
    def f(x):
        def grad(dy, variables=None):
            seen.extend(variables)
            return dy * 10.0, [dy * 100.0]

        return x * v, grad

    assert values(tf.gradients(f(x), [x, v])) == [10.0, 100.0]
    assert len(seen) == 1
    assert seen[0] is v


def test_a_grad_that_cannot_take_the_variables():
    x, v = tf.constant(2.0), tf.Variable(3.0)
    with pytest.raises(TypeError, match="variables"):
        y = tf.custom_gradient(lambda x: (x * v, lambda dy: dy))(x)
        tf.gradients(y, [x, v])


def test_one_gradient_per_variable_is_due():
    x, v = tf.constant(2.0), tf.Variable(3.0)

    def f(x):
        return x * v, lambda dy, variables=None: (dy, [dy, dy])

    with pytest.raises(ValueError):
        tf.gradients(tf.custom_gradient(f)(x), [x, v])


@pytest.mark.parametrize("f", [tf.sign, tf.round, lambda x: x * x])
def test_grad_pass_through(f):
    x = tf.constant([-1.7, 0.4])
    y = tf.grad_pass_through(f)(x)
    assert run(y).tolist() == run(f(x)).tolist()
    assert values(tf.gradients(y * 3.0, x)) == [[3.0, 3.0]]


# -- py_func -------------------------------------------------------------------------------------


def test_py_func_calls_python_with_arrays():
    seen = []

    def f(a, b):
        seen.append((type(a), a.dtype, a.shape))
        return a * 2 + b

    y = tf.py_func(f, [tf.constant([1.0, 2.0]), 10.0], tf.float32)
    assert (y.op.type, y.shape.ndims, y.dtype) == ("PyFunc", None, tf.float32)
    assert run(y).tolist() == [12.0, 14.0]
    assert seen == [(np.ndarray, np.float32, (2,))]


def test_py_func_of_several_results():
    x = tf.constant([3.0, 1.0])
    ys = tf.py_func(lambda x: (x.max(), x.argmin()), [x], [tf.float32, tf.int64])
    assert isinstance(ys, list)
    assert run(ys) == [3.0, 1]
    (one,) = tf.py_func(lambda: np.float32(1.0), [], [tf.float32])
    assert run(one) == 1.0


def test_py_func_without_state_has_another_type():
    y = tf.py_func(np.sum, [tf.constant([1.0])], tf.float32, stateful=False)
    assert y.op.type == "PyFuncStateless"
    assert run(y) == 1.0


def test_py_func_has_a_gradient_only_by_a_rule(graph):
    x = tf.constant([1.0, 2.0])
    assert tf.gradients(tf.py_func(np.square, [x], tf.float32), x) == [None]
    with graph.gradient_override_map({"PyFunc": lambda op, grad: grad * 2.0 * op.inputs[0]}):
        y = tf.py_func(np.square, [x], tf.float32)
    y.set_shape([2])
    assert values(tf.gradients(y * 10.0, x)) == [[20.0, 40.0]]


def test_an_exception_in_py_func_surfaces():
    y = tf.py_func(lambda: {}["missing key"], [], tf.float32)
    with pytest.raises(tf.errors.UnknownError, match="missing key"):
        run(y)


def test_another_dtype_from_py_func():
    y = tf.py_func(lambda: np.int64(1), [], tf.float32)
    with pytest.raises(tf.errors.InvalidArgumentError):
        run(y)


# -- regrad's own functions ----------------------------------------------------------------------


def test_regrads_functions_build_ops():
    x = tf.placeholder(tf.float32, [None])
    y = rg.sign(x) * rg.tensor([1.0, 2.0]) + rg.sum(x)
    assert tf.convert_to_tensor(rg.sign(x)).op.type == "Sign"
    assert run(y, {x: [-1.0, 3.0]}).tolist() == [1.0, 4.0]
    assert values(tf.gradients(rg.square(x), x), {x: [3.0]}) == [[6.0]]


def test_custom_grad_in_a_graph():
    @rg.custom_grad
    def f(x, save):
        save([x])
        return x.square(), lambda dy, saved: dy * saved[0].abs()

    x = tf.placeholder(tf.float32, [None])
    (dx,) = tf.gradients(f(x), x)
    (ddx,) = tf.gradients(dx, x)
    feed = {x: [-2.0, 3.0]}
    assert run(f(x), feed).tolist() == [4.0, 9.0]
    assert values([dx, ddx], feed) == [[2.0, 3.0], [-1.0, 1.0]]


def test_what_custom_grad_closes_over_is_found_in_gradients():
    x, w = tf.constant(2.0), tf.constant(3.0)
    y = rg.custom_grad(lambda a: (a * w, lambda dy: dy * 5.0))(x)
    assert values(tf.gradients(y, x)) == [5.0]
    with pytest.raises(GradientError, match="closes over"):
        tf.gradients(y, [x, w])


def test_grad_in_a_graph():
    x = tf.placeholder(tf.float32, [])
    dx, ddx = rg.grad(lambda x: x**3)(x), rg.grad(rg.grad(lambda x: x**3))(x)
    feed = {x: 2.0}
    assert run([dx, ddx], feed) == [12.0, 12.0]
    assert values(tf.gradients(dx, x), feed) == [12.0]


def test_grads_and_value_and_grad_in_a_graph():
    a, b = tf.constant(2.0), tf.constant([3.0, 4.0])
    da, db = rg.grads(lambda a, b: rg.sum(a * b))([a, b])
    value, dv = rg.value_and_grad(lambda b: rg.sum(b * b * a))(b)
    assert values([da, db, value, dv]) == [7.0, [2.0, 2.0], 50.0, [12.0, 16.0]]


def test_grad_takes_dy_in_a_graph():
    x, dy = tf.constant([1.0, 2.0]), tf.placeholder(tf.float32, [2])
    assert run(rg.grad(rg.square)(x, dy), {dy: [10.0, 1.0]}).tolist() == [20.0, 4.0]


def test_jacobian_and_hessian_in_a_graph():
    x = tf.constant([1.0, 2.0])
    assert run(rg.jacobian(lambda x: x * x * x)(x)).tolist() == [[3.0, 0.0], [0.0, 12.0]]
    assert run(rg.hessian(lambda x: rg.sum(x * x * x))(x)).tolist() == [[6.0, 0.0], [0.0, 12.0]]


def test_grad_inside_a_scope_of_the_graph(graph):
    x = tf.constant(0.5)
    with graph.gradient_override_map({"Sign": lambda dy, x: dy * x}) as used:
        dx = rg.grad(lambda x: rg.sign(x) * 2.0)(x)
    assert run(dx) == 1.0
    used.assert_fired()


def test_stop_gradient_is_one_function():
    x = tf.constant(3.0)
    assert values(tf.gradients(rg.stop_gradient(x) * x, x)) == [3.0]
    assert run(rg.grad(lambda x: tf.stop_gradient(x) * x)(x)) == 3.0


def test_a_graphs_tensor_outside_its_graph_is_refused():
    x = tf.constant(3.0)
    with tf.Graph().as_default(), pytest.raises(ValueError):
        rg.sin(tf.constant(1.0)) + rg.sin(x)
    with pytest.raises((TypeError, ValueError)):
        np.asarray(x)


def test_a_wrong_number_of_gradients_names_the_function():
    @tf.custom_gradient
    def halved(a, b):
        return a * b, lambda dy: dy

    a, b = tf.constant(2.0), tf.constant(3.0)
    with pytest.raises(RuleError, match="Num gradients 1 generated by grad_fn of halved do not"):
        tf.gradients(halved(a, b), [a, b])
