"""The promises in graph mode: ways in which a gradient could be wrong without a word."""

import threading

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.errors import GradientError
from tests.helpers.rows import refused

pytestmark = pytest.mark.usefixtures("graph")


def py_square(x):
    with tf.get_default_graph().gradient_override_map(
        {"PyFunc": lambda op, dy: 2 * dy * op.inputs[0]}
    ):
        y = tf.py_func(np.square, [x], tf.float32)
    y.set_shape([])
    return y


def cubed(x):
    return tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * x), [0, tf.constant(1.0)])[1]


THROUGH = {
    "cond": (lambda x: tf.cond(tf.constant(True), lambda: x * x, lambda: x), 6.0),
    "while_loop": (cubed, 27.0),
    "custom_gradient": (tf.custom_gradient(lambda x: (x * x, lambda dy: dy * 100.0)), 100.0),
    "Print": (lambda x: tf.Print(x * 4.0, []), 4.0),
    "py_func": (py_square, 6.0),
    "a variable's product": (lambda x: x * tf.Variable(5.0), 5.0),
}


@pytest.mark.parametrize("name", THROUGH)
def test_tapes_see_every_kind_of_node(session, name):
    f, slope = THROUGH[name]
    x = tf.placeholder(tf.float32, [])
    with_another_path = lambda x: f(x) + x  # noqa: E731
    by_tape = rg.grad(with_another_path)(x)
    (by_graph,) = tf.gradients(with_another_path(x), x)
    _, dx = rg.value_and_grad(f)(x)
    session.run(tf.global_variables_initializer())
    assert session.run([by_tape, by_graph, dx], {x: 3.0}) == [slope + 1, slope + 1, slope]


def test_second_order_by_tape_through_a_branch(session):
    x = tf.placeholder(tf.float32, [])
    f = lambda x: rg.asarray(tf.cond(x > 0.0, lambda: x * x * x, lambda: x))  # noqa: E731
    assert session.run(rg.grad(rg.grad(f))(x), {x: 2.0}) == 12.0


CLOSURES = {
    "the tensor": lambda z: (z, z),
    "what it is computed from": lambda w: (w * 2.0, w),
}


@pytest.mark.parametrize("name", CLOSURES)
@pytest.mark.parametrize("by", ["z alone", "both"])
def test_what_a_custom_gradient_closes_over_is_refused(name, by):
    x, w = tf.placeholder(tf.float32, []), tf.placeholder(tf.float32, [])
    z, source = CLOSURES[name](w)
    for f in (
        tf.custom_gradient(lambda x: (x * z, lambda dy: dy)),
        rg.custom_grad(lambda x: (x * z, lambda dy: dy)),
        rg.custom_grad(lambda x: (tf.cond(x > 0.0, lambda: x * z, lambda: x), lambda dy: dy)),
    ):
        y = f(x) + rg.asarray(z)
        with pytest.raises(GradientError, match="closes over"):
            tf.gradients(y, [source] if by == "z alone" else [x, source])


def test_a_closure_inside_a_branch_is_refused():
    x, z = tf.placeholder(tf.float32, []), tf.placeholder(tf.float32, [])
    custom = tf.custom_gradient(lambda x: (x * z, lambda dy: dy))
    y = tf.cond(x > 0.0, lambda: custom(x), lambda: x)
    refused(lambda: tf.gradients(y + z, [x, z]), GradientError, "closes over")


def test_a_gradient_never_writes_again():
    v, x = tf.Variable(0.0), tf.placeholder(tf.float32, [])

    def body(i, a):
        with tf.control_dependencies([v.assign_add(1.0)]):
            return i + 1, a * v.read_value()

    y = tf.while_loop(lambda i, a: i < 3, body, [0, x])[1]
    refused(lambda: tf.gradients(y, x), GradientError, "AssignAdd")


def test_a_loop_claims_no_more_of_a_shape_than_every_iteration_keeps(session):
    x = tf.placeholder(tf.float32, [None])
    turn = lambda i, a: (i + 1, tf.concat([a, a], 0))  # noqa: E731
    y = tf.while_loop(lambda i, a: i < 1, turn, [0, x])[1]
    assert y.shape.as_list() == [None]
    assert session.run(tf.gradients(y + x, x), {x: [1.0]})[0].tolist() == [4.0]
    assert session.run(tf.shape(y), {x: [1.0]}).tolist() == [2]
    with pytest.raises(ValueError, match="shape_invariants"):
        tf.while_loop(lambda i, a: i < 1, turn, [0, tf.ones([2])])
    n = tf.placeholder(tf.int32, [])
    with pytest.raises(ValueError, match="shape_invariants"):
        tf.while_loop(lambda i, a: i < 1, lambda i, a: (i + 1, a[:n]), [0, tf.ones([2])])


def test_what_shapes_were_made_of_cannot_be_fed(session):
    x, c = tf.placeholder(tf.float32, [6]), tf.constant([2, 3])
    y = tf.reshape(x, c)
    refused(lambda: session.run(y, {x: range(6), c: [3, 2]}), TypeError, "cannot be fed")
    assert session.run(y, {x: range(6)}).shape == (2, 3)
    p = tf.placeholder_with_default([2, 3], [2])
    z = tf.reshape(x, p)
    assert session.run(z, {x: range(6), p: [3, 2]}).shape == (3, 2)
    assert session.run(z, {x: range(6)}).shape == (2, 3)


def test_known_values_are_those_of_the_run(session):
    n = tf.cast(tf.constant(300), tf.uint8)
    y = tf.zeros(tf.stack([tf.cast(n, tf.int32)]))
    assert session.run([n, tf.shape(y)])[0] == 44
    assert session.run(y).shape == (44,)


def test_control_dependencies_hold_inside_branches(session):
    v, t = tf.Variable(1.0), tf.constant(True)
    with tf.control_dependencies([v.assign(5.0)]):
        y = tf.cond(t, lambda: v + 0.0, lambda: v * 2.0)
    session.run(tf.global_variables_initializer())
    assert session.run(y) == 5.0
    w = tf.Variable(1.0)
    assigned = w.assign(7.0)

    def inside():
        with tf.control_dependencies([assigned]):
            return tf.identity(w.read_value())

    z = tf.cond(t, inside, lambda: w + 0.0)
    session.run(w.initializer)
    session.run(z)
    assert session.run(w) == 7.0


def test_threads_lose_no_update(session):
    v = tf.Variable(0)
    step = tf.assign_add(v, 1)
    session.run(tf.global_variables_initializer())
    threads = [
        threading.Thread(target=lambda: [session.run(step) for _ in range(200)]) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert session.run(v) == 600


def test_python_functions_share_no_memory(session):
    mine = np.ones(3, np.float32)

    def writes(x):
        x += 1
        return mine

    c, v = tf.constant(np.zeros(3, np.float32)), tf.Variable(np.zeros(3, np.float32))
    step = v.assign(tf.py_func(writes, [c], tf.float32))
    session.run(step)
    mine[:] = 99
    assert session.run(v).tolist() == [1.0, 1.0, 1.0]
    assert session.run(c).tolist() == [0.0, 0.0, 0.0]


def test_an_update_keeps_the_shape(session):
    v, d = tf.Variable([1.0]), tf.placeholder(tf.float32, [None])
    step = tf.assign_add(v, d)
    session.run(tf.global_variables_initializer())
    refused(lambda: session.run(step, {d: [1.0, 2.0, 3.0]}), tf.errors.InvalidArgumentError)
    assert session.run(v).tolist() == [1.0]


def test_gradients_are_taken_inside_branches(session):
    x, v = tf.placeholder(tf.float32, []), tf.Variable(3.0)
    by_x = tf.cond(x > 0.0, lambda: tf.gradients(x * x * x, x)[0], lambda: x)
    by_v = tf.cond(x > 0.0, lambda: tf.gradients(x * v * v, v)[0], lambda: x)
    session.run(tf.global_variables_initializer())
    assert session.run([by_x, by_v], {x: 2.0}) == [12.0, 12.0]
    assert session.run(tf.gradients(by_x, x), {x: 2.0}) == [12.0]


def test_a_loop_without_iterations(session):
    x, inf = tf.placeholder(tf.float32, []), tf.constant(np.inf, tf.float32)
    y = tf.while_loop(lambda i, a: i < 0, lambda i, a: (i + 1, a * inf), [0, x])[1]
    assert session.run(tf.gradients(y, [x, inf]), {x: 2.0}) == [1.0, 0.0]


def test_second_derivatives_of_a_loop_over_what_waits(session):
    x = tf.placeholder(tf.float64, [None])
    turn = lambda i, a: (i + 1, tf.concat([a[1:], a[:1]], 0) * a)  # noqa: E731
    y = tf.while_loop(
        lambda i, a: i < 2, turn, [0, x], [tf.TensorShape([]), tf.TensorShape([None])]
    )
    (dx,) = tf.gradients(y[1], x)
    (ddx,) = tf.gradients(dx, x)

    def f(a):
        for _ in range(2):
            a = rg.concat([a[1:], a[:1]]) * a
        return rg.sum(a)

    value = np.array([1.0, 2.0, 0.5])
    due = rg.grad(lambda a: rg.sum(rg.grad(f)(a)))(value)
    np.testing.assert_allclose(session.run(ddx, {x: value}), due.numpy())


def test_a_rule_that_waits_and_uses_the_graph_says_so(graph, session):
    x, k = tf.placeholder(tf.float32, [None]), rg.asarray(tf.constant(3.0))
    with graph.gradient_override_map({"Sin": lambda dy, x: dy * k if x.shape[0] > 1 else dy}):
        y = tf.sin(x)
    (dx,) = tf.gradients(y, x)
    refused(lambda: session.run(dx, {x: [1.0, 2.0]}), ValueError, "waits for the run")


def test_an_error_in_a_rule_names_the_rule_and_the_op(graph):
    def boom(op, dy):
        raise KeyError("boom")

    x = tf.constant(1.0)
    with graph.gradient_override_map({"Sin": boom}):
        y = tf.sin(x, name="wave")
    with pytest.raises(KeyError) as caught:
        tf.gradients(y, x)
    (note,) = caught.value.__notes__
    assert f"'boom' (boom, {__file__}:" in note and "for the op type 'Sin' (the op 'wave')" in note


def test_sizes_of_parts_may_be_known_only_in_the_run(session):
    x = tf.placeholder(tf.float32, [None])
    a, b = tf.split(x, [1, tf.shape(x)[0] - 1], 0)
    assert [v.tolist() for v in session.run([a, b], {x: [1.0, 2.0, 3.0]})] == [[1.0], [2.0, 3.0]]


def test_the_same_fetch_twice_gives_two_arrays(session):
    x = tf.placeholder(tf.float32, [2])
    a, b = session.run([tf.sin(x)] * 2, {x: [1.0, 2.0]})
    a[0] = 9
    assert b[0] != 9


# -- where NumPy would answer and TensorFlow refuses ---------------------------------------------

REFUSED_IN_THE_RUN = {
    "a label below 0": lambda i: tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=i, logits=tf.ones([1, 3])
    ),
    "gather": lambda i: tf.gather(tf.ones([3]), i),
    "embedding_lookup": lambda i: tf.nn.embedding_lookup(tf.ones([3, 2]), i),
    "gather_nd": lambda i: tf.gather_nd(tf.ones([3]), tf.expand_dims(i, 0)),
    "scatter_nd": lambda i: tf.scatter_nd(tf.expand_dims(i, 0), tf.ones([1]), [3]),
    "a quotient": lambda i: 5 // (i + 1),
    "a remainder": lambda i: 5 % (i + 1),
}


@pytest.mark.parametrize("name", REFUSED_IN_THE_RUN)
def test_the_run_refuses(session, name):
    i = tf.placeholder(tf.int32, [1])
    y = REFUSED_IN_THE_RUN[name](i)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"negative|division by zero"):
        session.run(y, {i: [-1]})
    session.run(y, {i: [1]})


def test_a_variable_of_another_graph_is_refused(session):
    v = tf.Variable(1.0, name="v")
    session.run(v.initializer)
    with tf.Graph().as_default():
        w = tf.Variable(2.0, name="v")
    refused(lambda: session.run(w), ValueError, "not an element of this graph")


def test_an_old_order_of_arguments_is_refused():
    a = tf.ones([2, 2])
    refused(lambda: tf.concat(1, [a, a]), ValueError, "first and then the axis")
    refused(lambda: tf.placeholder(tf.float32, [-1, 3]), ValueError, "None for a size that varies")


def test_old_names_of_dtypes():
    assert tf.placeholder("float", [2]).dtype == tf.float32
    refused(lambda: tf.placeholder("int", [2]), TypeError, "int32")


def test_the_average_of_what_is_fed_starts_without_it(session):
    x = tf.placeholder(tf.float32, [None, 2])
    mean, _ = tf.nn.moments(x, [0])
    averages = tf.train.ExponentialMovingAverage(0.5)
    update = averages.apply([mean])
    session.run(tf.global_variables_initializer())
    session.run(update, {x: [[2.0, 4.0]]})
    assert session.run(averages.average(mean)).tolist() == [1.0, 2.0]


def test_attributes_go_back_into_functions(graph, session):
    x, w = tf.ones([1, 4, 4, 1]), tf.ones([2, 2, 1, 3])

    def rule(op, dy):
        args = op.get_attr("strides"), op.get_attr("padding")
        return tf.nn.conv2d_transpose(dy, op.inputs[1], tf.shape(op.inputs[0]), *args), None

    with graph.gradient_override_map({"Conv2D": rule}):
        y = tf.nn.conv2d(x, w, [1, 1, 1, 1], "SAME")
    due = tf.gradients(tf.nn.conv2d(x, w, [1, 1, 1, 1], "SAME"), x)[0]
    got, expected = session.run([tf.gradients(y, x)[0], due])
    np.testing.assert_allclose(got, expected)


def test_images_of_unknown_size_are_resized(session):
    x = tf.placeholder(tf.float32, [None, None, None, 3])
    y, z = (tf.image.resize_bilinear(x, size) for size in ([6, 6], tf.shape(x)[1:3] * 2))
    assert y.shape.as_list() == [None, 6, 6, 3]
    shapes = [v.shape for v in session.run([y, z], {x: np.ones((1, 2, 4, 3))})]
    assert shapes == [(1, 6, 6, 3), (1, 4, 8, 3)]


def test_bias_add_can_be_overridden(graph, session):
    x, b = tf.ones([2, 3]), tf.zeros([3])
    with graph.gradient_override_map({"BiasAdd": lambda op, dy: (dy, -tf.reduce_sum(dy, 0))}):
        y = tf.nn.bias_add(x, b)
    assert session.run(tf.gradients(y, b)[0]).tolist() == [-2.0] * 3


def test_what_is_made_inside_a_branch_stays_there(session):
    x, leaked = tf.placeholder(tf.float32, []), []

    def inside():
        leaked.append(x * 2.0)
        return leaked[0] + 1.0

    tf.cond(x > 0.0, inside, lambda: x)
    refused(lambda: leaked[0] + x, ValueError, "inside a branch or loop")
    refused(lambda: tf.tanh(leaked[0]), ValueError, "inside a branch or loop")
    refused(lambda: session.run(leaked[0], {x: 1.0}), ValueError, "inside a branch or loop")


# -- functions that are one record in eager mode, of a graph's tensors ----------------------------

BODIES = {
    "checkpoint": rg.checkpoint, "jit": rg.jit, "vmap": rg.vmap,
    "scan": lambda f: lambda x: rg.scan(lambda c, e: (c, f(e)), None, x)[1],
    "scan(checkpoint=True)": lambda f: (
        lambda x: rg.scan(lambda c, e: (c, f(e)), None, x, checkpoint=True)[1]
    ),
}  # fmt: skip
ARGUMENTS = {
    "a Tensor": rg.asarray,
    "TensorFlow's view of one": tf.identity,
    "a Variable beside it": lambda x: x * tf.Variable([1.0, 1.0, 1.0], dtype=tf.float64),
}
VALUE = np.array([0.5, -1.0, 2.0])


@pytest.mark.parametrize("given", ARGUMENTS)
@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("by", ["a tape", "tf.gradients"])
def test_bodies_of_symbolic_tensors(session, name, given, by):
    def f(x):
        return rg.sum(rg.sin(BODIES[name](lambda p: p * p * p)(ARGUMENTS[given](x))))

    x = tf.placeholder(tf.float64, [3])
    if by == "a tape":
        orders = [f(x), rg.grad(f)(x), rg.grad(lambda x: rg.sum(rg.grad(f)(x)))(x)]
    else:
        (dx,) = tf.gradients(f(x), x)
        orders = [f(x), dx, tf.gradients(dx, x)[0]]
    session.run(tf.global_variables_initializer())
    y, dx, ddx = session.run(orders, {x: VALUE})
    sines = lambda v: np.sin(v**3)  # noqa: E731
    h = 1e-4
    ahead, here, behind = sines(VALUE + h), sines(VALUE), sines(VALUE - h)
    np.testing.assert_allclose(y, here.sum())
    np.testing.assert_allclose(dx, (ahead - behind) / (2 * h), rtol=1e-5)
    np.testing.assert_allclose(ddx, (ahead - 2 * here + behind) / h**2, rtol=1e-4)


@pytest.mark.parametrize("body", [rg.checkpoint, rg.jit], ids=["checkpoint", "jit"])
def test_bodies_that_only_close_over_a_graph_say_so(body):
    x, c = tf.placeholder(tf.float32, [3], name="x"), rg.tensor([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="uses 'x:0', a tensor of a graph, by its closure"):
        rg.grad(lambda z: rg.sum(body(lambda p: p * z)(c)))(x)


def test_a_checkpoint_in_a_graph_obeys_overrides(graph, session):
    def f(x):
        with graph.gradient_override_map({"Sign": lambda dy: dy * 5.0}):
            return rg.sum(rg.checkpoint(rg.sign)(x))

    x = tf.placeholder(tf.float32, [3])
    slopes = session.run([rg.grad(f)(x), tf.gradients(f(x), x)[0]], {x: VALUE})
    assert [dx.tolist() for dx in slopes] == [[5.0] * 3] * 2
