"""The promises in graph mode: ways in which a gradient could be wrong without a word."""

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.errors import GradientError, UnknownShapeError, UnusedOverrideWarning
from tests.helpers.rows import refused
from tests.helpers.v1_session import computed, initialized, overridden, run

pytestmark = pytest.mark.usefixtures("graph")


def py_square(x):
    y = overridden({"PyFunc": lambda op, dy: 2 * dy * op.inputs[0]}, tf.py_func, np.square, [x],
                   tf.float32)  # fmt: skip
    y.set_shape([])
    return y


def cubed(x):
    return tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * x), [0, tf.constant(1.0)])[1]


THROUGH = {
    "cond": (lambda x: tf.cond(tf.constant(True), lambda: x * x, lambda: x), 6.0),
    "while_loop": (cubed, 27.0), "Print": (lambda x: tf.Print(x * 4.0, []), 4.0),
    "custom_gradient": (tf.custom_gradient(lambda x: (x * x, lambda dy: dy * 100.0)), 100.0),
    "py_func": (py_square, 6.0), "a variable's product": (lambda x: x * tf.Variable(5.0), 5.0),
}  # fmt: skip


@pytest.mark.parametrize("name", THROUGH)
def test_tapes_see_every_kind_of_node(session, name):
    f, slope = THROUGH[name]
    x = tf.placeholder(tf.float32, [])
    with_another_path = lambda x: f(x) + x  # noqa: E731
    by_tape = rg.grad(with_another_path)(x)
    (by_graph,) = tf.gradients(with_another_path(x), x)
    _, dx = rg.value_and_grad(f)(x)
    due = [slope + 1, slope + 1, slope]
    assert initialized(session).run([by_tape, by_graph, dx], {x: 3.0}) == due


# -- refused as the graph is built, or in the run -------------------------------------------------

CLOSURES = {
    "the tensor": lambda z: (z, z),
    "what it is computed from": lambda w: (w * 2.0, w),
}


@pytest.mark.parametrize("name", CLOSURES)
@pytest.mark.parametrize("by", ["z alone", "both"])
def test_what_a_custom_gradient_closes_over_is_refused(name, by):
    x, w = tf.placeholder(tf.float32, []), tf.placeholder(tf.float32, [])
    z, source = CLOSURES[name](w)
    custom = tf.custom_gradient(lambda x: (x * z, lambda dy: dy))
    for f in (
        custom,
        rg.custom_grad(lambda x: (x * z, lambda dy: dy)),
        rg.custom_grad(lambda x: (tf.cond(x > 0.0, lambda: x * z, lambda: x), lambda dy: dy)),
        lambda x: tf.cond(x > 0.0, lambda: custom(x), lambda: x),
    ):
        xs, y = [source] if by == "z alone" else [x, source], f(x) + rg.asarray(z)
        refused(lambda xs=xs, y=y: tf.gradients(y, xs), GradientError, "closes over")


def written_by_each_turn(x):
    v = tf.Variable(0.0)

    def body(i, a):
        with tf.control_dependencies([v.assign_add(1.0)]):
            return i + 1, a * v.read_value()

    return tf.while_loop(lambda i, a: i < 3, body, [0, x])[1]


def doubled(i, a):
    return i + 1, tf.concat([a, a], 0)


def in_body(body):
    return lambda x: rg.grad(lambda z: rg.sum(body(lambda p: p * z)(rg.tensor([1.0, 2.0]))))(x)


BY_A_CLOSURE = "uses 'x:0', a tensor of a graph, through its closure"
FIRST = lambda i, a: i < 1  # noqa: E731
REFUSED = {  # a function of a vector of unknown length, the error, and its words
    "a gradient that writes again": (
        lambda x: tf.gradients(written_by_each_turn(x), x), GradientError, "AssignAdd"),
    "a variable that grows": (lambda x: tf.while_loop(FIRST, doubled, [0, tf.ones([2])]),
                              ValueError, "shape_invariants"),
    "a variable of unknown size": (
        lambda x: tf.while_loop(FIRST, lambda i, a: (i + 1, a[: tf.size(x)]), [0, tf.ones([2])]),
        ValueError, "shape_invariants"),
    "an old order": (lambda x: tf.concat(1, [x, x]), ValueError, "first and then the axis"),
    "an old size": (lambda x: tf.placeholder(tf.float32, [-1, 3]), ValueError,
                    "None for a size that varies"),
    "an old dtype": (lambda x: tf.placeholder("int", [2]), TypeError, "int32"),
    "a checkpoint's closure": (in_body(rg.checkpoint), ValueError, BY_A_CLOSURE),
    "a compiled function's closure": (in_body(rg.jit), ValueError, BY_A_CLOSURE),
    "an unknown number of results": (lambda x: rg.unstack(rg.asarray(x)), UnknownShapeError,
                                     "number of results"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    build, error, words = REFUSED[name]
    x = tf.placeholder(tf.float32, [None], name="x")
    refused(lambda: build(x), error, words)


def labels(i):
    logits = tf.ones([1, 3])
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=i, logits=logits)


def waiting_rule(i):
    x, k = tf.cast(i, tf.float32), rg.asarray(tf.constant(3.0))
    x = tf.placeholder_with_default(x, [None])
    rule = lambda dy, x: dy * k if x.shape[0] > 0 else dy  # noqa: E731
    return tf.gradients(overridden({"Sin": rule}, tf.sin, x), x)


INVALID, IN_THE_RUN = tf.errors.InvalidArgumentError, {  # of -1: NumPy would answer
    "a label below 0": labels, "gather": lambda i: tf.gather(tf.ones([3]), i),
    "embedding_lookup": lambda i: tf.nn.embedding_lookup(tf.ones([3, 2]), i),
    "gather_nd": lambda i: tf.gather_nd(tf.ones([3]), tf.expand_dims(i, 0)),
    "scatter_nd": lambda i: tf.scatter_nd(tf.expand_dims(i, 0), tf.ones([1]), [3]),
    "a quotient": lambda i: 5 // (i + 1), "a remainder": lambda i: 5 % (i + 1),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_THE_RUN)
def test_the_run_refuses(session, name):
    i = tf.placeholder(tf.int32, [1])
    y = IN_THE_RUN[name](i)
    refused(lambda: session.run(y, {i: [-1]}), INVALID, "negative|division by zero")
    session.run(y, {i: [1]})


def test_a_rule_that_waits_and_uses_the_graph_says_so(session):
    dx = waiting_rule(i := tf.placeholder(tf.int32, [None]))
    refused(lambda: session.run(dx, {i: [1, 2]}), ValueError, "waits for the run")


def test_an_error_in_a_rule_names_the_rule_and_the_op():
    def boom(op, dy):
        raise KeyError("boom")

    x = tf.constant(1.0)
    y = overridden({"Sin": boom}, lambda: tf.sin(x, name="wave"))
    error = refused(lambda: tf.gradients(y, x), KeyError)
    (note,) = error.__notes__
    assert f"'boom' (boom, {__file__}:" in note and "for the op type 'Sin' (the op 'wave')" in note


def test_what_belongs_elsewhere_is_refused(session):
    x, leaked = tf.placeholder(tf.float32, []), []

    def inside():
        leaked.append(x * 2.0)
        return leaked[0] + 1.0

    tf.cond(x > 0.0, inside, lambda: x)
    tf.Variable(1.0, name="v")
    initialized(session)
    with tf.Graph().as_default():
        w = tf.Variable(2.0, name="v")
    refused(lambda: session.run(w), ValueError, "not an element of this graph")
    for use in (lambda: leaked[0] + x, lambda: tf.tanh(leaked[0]),
                lambda: session.run(leaked[0], {x: 1.0})):  # fmt: skip
        refused(use, ValueError, "inside a branch or loop")


# -- values ----------------------------------------------------------------------------------------


def grown(x):
    shapes = [tf.TensorShape([]), tf.TensorShape([None])]
    y = tf.while_loop(FIRST, doubled, [0, x], shapes)[1]
    assert y.shape.as_list() == [None]
    return [*tf.gradients(y + x, x), tf.shape(y)]


def wrapped():
    n = tf.cast(tf.constant(300), tf.uint8)
    return [n, tf.shape(tf.zeros(tf.stack([tf.cast(n, tf.int32)])))]


def after_an_assignment():
    v, w = tf.Variable(1.0), tf.Variable(1.0)
    assigned = w.assign(7.0)
    with tf.control_dependencies([v.assign(5.0)]):
        y = tf.cond(tf.constant(True), lambda: v + 0.0, lambda: v * 2.0)

    def inside():
        with tf.control_dependencies([assigned]):
            return tf.identity(w.read_value())

    return [y, tf.cond(tf.constant(True), inside, lambda: w + 0.0)]


def gradients_inside(x):
    v = tf.Variable(3.0)
    by_x = tf.cond(x > 0.0, lambda: tf.gradients(x * x * x, x)[0], lambda: x)
    by_v = tf.cond(x > 0.0, lambda: tf.gradients(x * v * v, v)[0], lambda: x)
    return [by_x, by_v, *tf.gradients(by_x, x)]


def no_turns(x):
    inf = tf.constant(np.inf, tf.float32)
    y = tf.while_loop(lambda i, a: i < 0, lambda i, a: (i + 1, a * inf), [0, x])[1]
    return tf.gradients(y, [x, inf])


def average(x):
    mean, _ = tf.nn.moments(x, [0])
    averages = tf.train.ExponentialMovingAverage(0.5)
    with tf.control_dependencies([averages.apply([mean])]):
        return averages.average(mean).read_value()


def by_attributes():
    x, w = tf.ones([1, 4, 4, 1]), tf.ones([2, 2, 1, 3])

    def rule(op, dy):
        args = op.get_attr("strides"), op.get_attr("padding")
        return tf.nn.conv2d_transpose(dy, op.inputs[1], tf.shape(op.inputs[0]), *args), None

    convolve = lambda: tf.nn.conv2d(x, w, [1, 1, 1, 1], "SAME")  # noqa: E731
    found, due = (
        tf.gradients(y, x)[0] for y in (overridden({"Conv2D": rule}, convolve), convolve())
    )
    return tf.reduce_all(tf.equal(found, due))


def resized(x):
    y, z = (tf.image.resize_bilinear(x, size) for size in ([6, 6], tf.shape(x)[1:3] * 2))
    assert y.shape.as_list() == [None, 6, 6, 3]
    return [tf.shape(y), tf.shape(z)]


def biased():
    x, b = tf.ones([2, 3]), tf.zeros([3])
    rules = {"BiasAdd": lambda op, dy: (dy, -tf.reduce_sum(dy, 0))}
    return tf.gradients(overridden(rules, tf.nn.bias_add, x, b), b)


def sign_in_a_checkpoint(x):
    f = lambda x: rg.sum(overridden({"Sign": lambda dy: dy * 5.0}, rg.checkpoint(rg.sign), x))  # noqa: E731
    return [rg.grad(f)(x), *tf.gradients(f(x), x)]


def second_by_tape(x):
    f = lambda x: rg.asarray(tf.cond(x > 0.0, lambda: x * x * x, lambda: x))  # noqa: E731
    return rg.grad(rg.grad(f))(x)


test_values = computed({  # of what is fed, with its shape
    "a loop that grows": (grown, [[4.0], [2]], ([None], [1.0])),
    "known values that wrap": (wrapped, [44, [44]]),
    "assignments before branches": (after_an_assignment, [5.0, 7.0]),
    "gradients inside branches": (gradients_inside, [12.0, 12.0, 12.0], ([], 2.0)),
    "a loop without iterations": (no_turns, [1.0, 0.0], ([], 2.0)),
    "sizes of parts": (lambda x: tf.split(x, [1, tf.shape(x)[0] - 1], 0), [[1.0], [2.0, 3.0]],
                       ([None], [1.0, 2.0, 3.0])),
    "an average starts without it": (average, [1.0, 2.0], ([None, 2], [[2.0, 4.0]])),
    "attributes in functions": (by_attributes, True), "a rule for BiasAdd": (biased, [[-2.0] * 3]),
    "images of unknown size": (resized, [[1, 6, 6, 3], [1, 4, 8, 3]],
                               ([None] * 3 + [3], np.ones((1, 2, 4, 3)))),
    "a checkpoint obeys": (sign_in_a_checkpoint, [[5.0] * 3] * 2, ([3], [0.5, -1.0, 2.0])),
    "second order by tape, a branch": (second_by_tape, 12.0, ([], 2.0)),
    "an old name of a dtype": (lambda x: tf.cast(x, "float"), [2.0], ([1], [2])),
})  # fmt: skip


@pytest.mark.parametrize(("op_type", "f", "due"), [
    ("ConcatV2", lambda x: rg.concat([x, 2 * x], axis=0), [1, 2, 2, 4]),
    ("Pack", lambda x: rg.stack([x, 2 * x], axis=1), [[1, 2], [2, 4]]),
    ("Pack", lambda x: rg.stack([x, 2 * x], axis=-1), [[1, 2], [2, 4]]),
    ("PadV2", lambda x: rg.pad(x, [(1, 0)], constant_value=7), [7, 1, 2]),
    ("PadV2", lambda x: tf.pad(x, [(0, tf.size(x))]), [1, 2, 0, 0]),
    ("MirrorPad", lambda x: rg.pad(x, [(1, 0)], "reflect"), [2, 1, 2]),
    ("Split", lambda x: rg.split(x, 2)[1], [2]),
])  # fmt: skip
def test_an_unknown_rank_hides_no_op(op_type, f, due, session):
    x = tf.placeholder(tf.float32)
    y = overridden({op_type: lambda op, *dys: tuple(0 * x for x in op.inputs)}, f, x)
    assert op_type in {op.type for op in tf.get_default_graph().get_operations()}
    assert session.run(tf.gradients(y, x), {x: [1.0, 2.0]})[0].tolist() == [0.0, 0.0]
    assert session.run(y, {x: [1.0, 2.0]}).tolist() == due


@pytest.mark.parametrize("f", [
    lambda x: rg.concat([x, x], axis=1), lambda x: rg.stack([x, x], axis=2),
    lambda x: rg.pad(x, [(1, 0), (0, 1)]), lambda x: rg.pad(x, [(1, 0), (0, 1)], "reflect"),
])  # fmt: skip
def test_the_run_refuses_a_wrong_rank(f, session):
    x = tf.placeholder(tf.float32)
    refused(lambda: session.run(f(x), {x: [1.0, 2.0]}), ValueError)


def test_what_shapes_were_made_of_cannot_be_fed(session):
    x, c = tf.placeholder(tf.float32, [6]), tf.constant([2, 3])
    p = tf.placeholder_with_default([2, 3], [2])
    y, z, due = tf.reshape(x, c), tf.reshape(x, p), np.arange(6.0).reshape(2, 3).tolist()
    refused(lambda: session.run(y, {x: range(6), c: [3, 2]}), TypeError, "cannot be fed")
    assert [a.tolist() for a in session.run([y, z], {x: range(6)})] == [due] * 2
    assert session.run(z, {x: range(6), p: [3, 2]}).shape == (3, 2)


def test_python_functions_share_no_memory(session):
    mine = np.ones(3, np.float32)

    def writes(x):
        x += 1
        return mine

    c, v = tf.constant(np.zeros(3, np.float32)), tf.Variable(np.zeros(3, np.float32))
    session.run(v.assign(tf.py_func(writes, [c], tf.float32)))
    mine[:] = 99
    assert [a.tolist() for a in session.run([v, c])] == [[1.0] * 3, [0.0] * 3]


def test_an_update_keeps_the_shape(session):
    v, d = tf.Variable([1.0]), tf.placeholder(tf.float32, [None])
    step = tf.assign_add(v, d)
    initialized(session)
    refused(lambda: session.run(step, {d: [1.0, 2.0, 3.0]}), INVALID)
    assert session.run(v).tolist() == [1.0]


# -- what waits for the run: it asks for sizes that only the run can tell -------------------------


def test_the_innermost_override_fires_in_what_waits(graph):
    x = tf.placeholder(tf.float32)
    three, five = (lambda dy, k=k: dy * k for k in (3.0, 5.0))
    var = lambda x: rg.var(x, correction=1.5)  # noqa: E731
    with (
        pytest.warns(UnusedOverrideWarning),
        rg.gradient_override_map({"Square": three}) as outer,
        graph.gradient_override_map({"Square": five}),
    ):
        y = var(rg.asarray(x))
    assert "Deferred" in [op.type for op in graph.get_operations()]
    (dx,) = tf.gradients(y, x)
    with rg.gradient_override_map({"Square": five}):
        due = rg.grad(var)(rg.tensor([1.0, 4.0, 2.0]))
    np.testing.assert_allclose(run(dx, {x: [1.0, 4.0, 2.0]}), due.numpy(), rtol=1e-6)
    assert outer.hits == []


def mean_like(dy, x):
    return dy / float(x.shape[0] + 0.0 * x.shape[0])


@pytest.mark.parametrize(("op_type", "rule", "f", "shape", "value", "due"), [
    ("StridedSlice", lambda op, dy: tf.ones_like(op.inputs[0]) * 7.0, lambda x: x[0], None,
     [1.0, 2.0], [7.0, 7.0]),
    ("Identity", mean_like, tf.identity, [None, 2], np.ones((4, 2)), [[0.25, 0.25]] * 4),
    ("Identity", lambda op, dy: dy / int(op.inputs[0].shape[0]), tf.identity, [None], [1.0, 1.0],
     [0.5, 0.5]),
], ids=["an override", "a rule that asks for a size", "in TensorFlow's form"])  # fmt: skip
def test_rules_that_wait(graph, op_type, rule, f, shape, value, due):
    x = tf.placeholder(tf.float32, shape)
    with graph.gradient_override_map({op_type: rule}) as used:
        y = f(x)
    (dx,) = tf.gradients(y, x)
    assert dx.shape.as_list() == shape if shape else dx.shape.ndims is None
    assert run(dx, {x: value}).tolist() == due
    used.assert_fired()


def turned(x):
    shapes = [tf.TensorShape([]), tf.TensorShape([None])]
    turn = lambda i, a: (i + 1, tf.concat([a[1:], a[:1]], 0) * a)  # noqa: E731
    return tf.reduce_sum(tf.while_loop(lambda i, a: i < 2, turn, [0, x], shapes)[1])


def turned_eagerly(a):
    for _ in range(2):
        a = rg.concat([a[1:], a[:1]]) * a
    return rg.sum(a)


def squared_product(x):
    return rg.sum(rg.prod(rg.asarray(x), axis=0) ** 2)


@pytest.mark.parametrize(("f", "eager", "shape", "value"), [
    (squared_product, squared_product, None, [[1.0, 2.0], [3.0, 0.5]]),
    (turned, turned_eagerly, [None], [1.0, 2.0, 0.5]),
])  # fmt: skip
def test_second_derivatives_of_what_waits(f, eager, shape, value):
    x = tf.placeholder(tf.float64, shape)
    (dx,) = tf.gradients(f(x), x)
    (ddx,) = tf.gradients(tf.reduce_sum(dx), x)
    due = rg.grad(lambda x: rg.sum(rg.grad(eager)(x)))(np.array(value))
    np.testing.assert_allclose(run(ddx, {x: value}), due.numpy(), rtol=1e-12)


# -- functions that are one record in eager mode, of a graph's tensors ----------------------------

BODIES = {
    "checkpoint": rg.checkpoint, "jit": rg.jit, "vmap": rg.vmap,
    "scan": lambda f: lambda x: rg.scan(lambda c, e: (c, f(e)), None, x)[1],
    "scan(checkpoint=True)": lambda f: (
        lambda x: rg.scan(lambda c, e: (c, f(e)), None, x, checkpoint=True)[1]),
}  # fmt: skip
ARGUMENTS = {
    "a Tensor": rg.asarray, "TensorFlow's view of one": tf.identity,
    "a Variable beside it": lambda x: x * tf.Variable([1.0, 1.0, 1.0], dtype=tf.float64),
}  # fmt: skip
VALUE = np.array([0.5, -1.0, 2.0])


@pytest.mark.parametrize("given", ARGUMENTS)
@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("by", ["a tape", "tf.gradients"])
def test_bodies_of_symbolic_tensors(session, name, given, by):
    f = lambda x: rg.sum(rg.sin(BODIES[name](lambda p: p * p * p)(ARGUMENTS[given](x))))  # noqa: E731
    x = tf.placeholder(tf.float64, [3])
    if by == "a tape":
        orders = [f(x), rg.grad(f)(x), rg.grad(lambda x: rg.sum(rg.grad(f)(x)))(x)]
    else:
        (dx,) = tf.gradients(f(x), x)
        orders = [f(x), dx, tf.gradients(dx, x)[0]]
    y, dx, ddx = initialized(session).run(orders, {x: VALUE})
    h = 1e-4
    ahead, here, behind = (np.sin((VALUE + d) ** 3) for d in (h, 0, -h))
    np.testing.assert_allclose(y, here.sum())
    np.testing.assert_allclose(dx, (ahead - behind) / (2 * h), rtol=1e-5)
    np.testing.assert_allclose(ddx, (ahead - 2 * here + behind) / h**2, rtol=1e-4)
