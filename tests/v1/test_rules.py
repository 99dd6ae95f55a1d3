"""What a rule `(op, grad, ...)` sees in a graph, and what becomes of what it answers."""

import functools
import re

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.errors import UnusedOverrideWarning
from tests.helpers.rows import refused
from tests.helpers.v1_session import overridden, run, slope, values

pytestmark = pytest.mark.usefixtures("graph")


class Recorder:
    """A rule in TensorFlow's form that keeps what it was called with."""

    def __init__(self, answer=lambda op, *grads: grads[0]):
        self.calls = []
        self.answer = answer

    def __call__(self, op, *grads):
        self.calls.append((op, grads))
        return self.answer(op, *grads)

    def __repr__(self):
        return "Recorder"

    def method(self, op, grad):
        return grad * 3.0


# -- what op has ---------------------------------------------------------------------------------


def test_op_is_the_operation_itself(graph):
    a, b, before = tf.constant([2.0, 1.0]), tf.constant([3.0, 1.0]), tf.no_op()
    rule = Recorder(lambda op, grad: [grad, grad])
    with tf.control_dependencies([before]):
        y = overridden({"Mul": rule}, lambda: tf.multiply(a, b, name="me"))
    tf.gradients(y, [a, b])
    ((op, (grad,)),) = rule.calls
    assert (op.type, op.name, op.graph, op.device) == ("Mul", "me", graph, "")
    first, second = op.inputs
    assert (first is a, second is b, op.inputs[-1] is b, op.outputs[0] is y) == (True,) * 4
    assert (len(op.inputs), len(op.outputs), op.control_inputs) == (2, 1, [before])
    assert (grad.shape.as_list(), grad.dtype) == ([2], tf.float32)
    assert "me" in str(op.node_def)


X, W = np.ones((1, 4, 4, 1), np.float32), np.ones((2, 2, 1, 1), np.float32)


@pytest.mark.parametrize(("build", "attr", "due"), [
    (lambda: tf.reduce_sum([[1.0]], 1, keepdims=True), "keep_dims", True),
    (lambda: tf.reduce_mean([[1.0]], 1), "keep_dims", False),
    (lambda: tf.reduce_max([[1.0]], 1, keepdims=True), "keep_dims", True),
    (lambda: tf.cast(1.0, tf.int32), "SrcT", tf.float32),
    (lambda: tf.cast(1.0, tf.int32), "DstT", tf.int32),
    (lambda: tf.constant([1.0]) * 2.0, "T", tf.float32),
    (lambda: tf.matmul([[1.0]], [[1.0]], transpose_b=True), "transpose_b", True),
    (lambda: tf.nn.conv2d(X, W, [1, 1, 1, 1], "SAME"), "padding", b"SAME"),
    (lambda: tf.nn.max_pool(X, [1, 2, 2, 1], [1, 2, 2, 1], "VALID"), "padding", b"VALID"),
    (lambda: tf.nn.bias_add(X, [1.0]), "data_format", b"NHWC"),
    (lambda: tf.nn.bias_add(X, [1.0] * 4, "NCHW"), "data_format", b"NCHW"),
    (lambda: tf.real(tf.constant(1j, tf.complex64)), "Tout", tf.float32),
    (lambda: tf.fft(tf.constant([1j], tf.complex64)), "Tcomplex", tf.complex64),
])  # fmt: skip
def test_attributes_have_tensorflows_names_and_kinds(build, attr, due):
    got = build().op.get_attr(attr)
    assert got == due
    assert type(got) is type(due)


@pytest.mark.parametrize(("build", "names"), [
    (lambda x: x * 2.0, "x:0 mul/y:0"), (lambda x: x**2.0, "x:0 pow/y:0"),
    (lambda x: 2.0 - x, "sub/x:0 x:0"), (lambda x: x + 1, "x:0 add/y:0"),
], ids=["mul", "pow", "sub", "add"])  # fmt: skip
def test_constants_in_expressions_are_inputs(build, names):
    x = tf.constant([1.0, 2.0], name="x")
    assert [t.name for t in build(x).op.inputs] == names.split()


@pytest.mark.parametrize(("op_type", "build", "place", "due"), [
    ("Sum", lambda x: tf.reduce_sum(x, 1), 1, 1), ("Max", tf.reduce_max, 1, [0, 1]),
    ("Mean", lambda x: tf.reduce_mean(x, [0, 1]), 1, [0, 1]),
    ("Split", lambda x: tf.split(x, 2, axis=1)[0], 0, 1),
])  # fmt: skip
def test_an_axis_is_an_input(op_type, build, place, due):
    x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    op = build(x).op
    assert op.type == op_type
    assert op.inputs[1 - place] is x
    assert run(op.inputs[place]).tolist() == due


# -- when it is called ---------------------------------------------------------------------------


def test_gradients_arrive_summed_and_once():
    x, w, rule = tf.constant(2.0), tf.constant([1.0, 10.0]), Recorder()
    h = overridden({"Identity": rule}, tf.identity, x)
    assert slope([h * 3.0, h * 4.0, tf.reduce_sum(h * w)], x) == 18.0
    assert len(rule.calls) == 1


def test_a_rule_off_the_path_is_not_called():
    x, z, rule = tf.constant(2.0), tf.constant(3.0), Recorder()
    h = overridden({"Identity": rule}, tf.identity, x)
    tf.gradients(h * z, z)
    tf.gradients(x * 1.0, x)
    no_gradient_arrives = overridden({"Sign": lambda op, grad: None}, tf.sign, h)
    assert tf.gradients(no_gradient_arrives, x) == [None]
    assert rule.calls == []


def test_consumers_come_before_producers():
    x, rule = tf.constant(2.0), Recorder()
    with tf.get_default_graph().gradient_override_map({"Identity": rule}):
        root = tf.identity(x, name="root")
        left = tf.identity(root, name="left")
        far = tf.identity(tf.identity(root, name="near"), name="far")
        y = left + far
    tf.gradients(y, x)
    names = [op.name for op, _ in rule.calls]
    assert sorted(names) == ["far", "left", "near", "root"]
    assert names.index("far") < names.index("near") < names.index("root")
    assert names.index("left") < names.index("root")


def test_unused_outputs_arrive_as_zeros_and_integers_as_none():
    x = tf.constant([1.0, 2.0, 3.0, 4.0])
    rule = Recorder(lambda op, a, b: (None, tf.concat([a * 2.0, b + 7.0], 0)))
    first, _ = overridden({"Split": rule}, tf.split, x, 2)
    assert slope(first, x) == [2.0, 2.0, 7.0, 7.0]
    zeros = rule.calls[0][1][1]
    assert (zeros.shape.as_list(), zeros.dtype) == ([2], tf.float32)
    rule = Recorder(lambda op, dy, indices: (x * 0.0 + tf.reduce_sum(dy), None))
    top, _ = overridden({"TopKV2": rule}, tf.nn.top_k, x, 2)
    assert slope(top, x) == [2.0, 2.0, 2.0, 2.0]
    assert rule.calls[0][1][1] is None


# -- what it answers -----------------------------------------------------------------------------


def scaled(k, op, grad):
    return grad * k


def add(a, b):
    return a + b


def multiply(a, b):
    return a * b


def positive(x):
    return tf.cast(x > 0.0, tf.float32) * 3.0


def position(x):
    return tf.cast(tf.argmax(x), tf.float32) * 3.0


def cast_there_and_back(x):
    return tf.cast(tf.cast(x, tf.int32), tf.float32) * 3.0


def cond_of_two(chosen):
    return lambda x: tf.cond(tf.constant(chosen), lambda: tf.identity(x), lambda: tf.square(x))


RIGHT = {"Cast": lambda op, grad: grad, "Greater": lambda op, grad: (grad, None)}
SEVEN = {"Identity": lambda op, grad: grad * 7.0}
BOTH = {"Mul": lambda op, grad: (grad * 2.0, grad * 3.0)}
KEYS, PAIR = ("Add", "AddV2"), (lambda op, grad: (grad * 3.0, grad * 4.0))
X2, X3, SQUARE = ([1.0, 2.0],), ([-2.0, 0.0, 2.0],), ([[1.0, 2.0], [3.0, 4.0]],)
ANSWERS = {  # rules, a function, the inputs, and the gradients by them
    "a method": ({"Sign": Recorder().method}, tf.sign, X2, [[3.0, 3.0]]),
    "an object": ({"Sign": Recorder()}, tf.sign, X2, [[1.0, 1.0]]),
    "a partial": ({"Sign": functools.partial(scaled, 3.0)}, tf.sign, X2, [[3.0, 3.0]]),
    "other names": ({"Sign": lambda unused_op, g: [g * 3.0]}, tf.sign, X2, [[3.0, 3.0]]),
    "a star": ({"Sign": lambda op, *grads: grads[0] * 3.0}, tf.sign, X2, [[3.0, 3.0]]),
    "dy, x": ({"Sign": lambda dy, x: dy * x}, tf.sign, X2, [[1.0, 2.0]]),
    "dy, y": ({"Sign": lambda dy, y: dy * y * 3.0}, tf.sign, X2, [[3.0, 3.0]]),
    "op, grad": ({"Sign": lambda op, grad: grad * op.inputs[0]}, tf.sign, X2, [[1.0, 2.0]]),
    "a list": ({"Sign": lambda op, grad: [grad * 2.0]}, tf.sign, X2, [[2.0, 2.0]]),
    "a tuple": ({"Sign": lambda op, grad: (grad * 2.0,)}, tf.sign, X2, [[2.0, 2.0]]),
    "none": ({"Sign": lambda op, grad: None}, tf.sign, X2, [None]),
    "a list of none": ({"Sign": lambda op, grad: [None]}, tf.sign, X2, [None]),
    "none by a path": ({"Sign": lambda op, g: (None,)}, lambda x: tf.sign(x) + x, X2, [[1.0, 1.0]]),
    "one tensor twice": (BOTH, lambda x: x * x, (5.0,), [5.0]),
    "none by an axis": ({"Mean": lambda op, g: (op.inputs[0] * 5.0, None)},
                        lambda x: tf.reduce_mean(x, 1), SQUARE, [[[5.0, 10.0], [15.0, 20.0]]]),
    "none by a size": ({"Split": lambda op, *g: (None, op.inputs[1] * 5.0)},
                       lambda x: tf.split(x, 2)[0], SQUARE, [[[5.0, 10.0], [15.0, 20.0]]]),
    "summed by the rule": ({"Mul": lambda op, g: (g, tf.reduce_sum(g, 0) * 5.0)}, multiply,
                           ([[1.0] * 3] * 2, [1.0] * 3), [[[1.0] * 3] * 2, [10.0] * 3]),
    "summed by regrad": ({"Mul": lambda dy: (dy, dy * 5.0)}, multiply,
                         ([[1.0] * 3] * 2, [1.0] * 3), [[[1.0] * 3] * 2, [10.0] * 3]),
    "Identity for ArgMax": ({"ArgMax": "Identity"}, tf.argmax, X3, [None]),
    "Identity for a cast ArgMax": ({"ArgMax": "Identity"}, position, X3, [None]),
    "Identity for ArgMin": ({"ArgMin": "Identity"}, tf.argmin, X3, [None]),
    "a rule for ArgMax": ({"ArgMax": lambda dy, x: rg.ones_like(x) * rg.astype(dy, x.dtype)},
                          position, X3, [[3.0, 3.0, 3.0]]),
    "Identity for Sign": ({"Sign": "Identity"}, tf.sign, X3, [[1.0, 1.0, 1.0]]),
    "Identity for Round": ({"Round": "Identity"}, tf.round, X3, [[1.0, 1.0, 1.0]]),
    "Relu for Sign": ({"Sign": "Relu"}, tf.sign, X3, [[0.0, 0.0, 1.0]]),
    "Identity for StopGradient": ({"StopGradient": "Identity"}, tf.stop_gradient, X3, [[1.0] * 3]),
    "Neg for Square": ({"Square": "Neg"}, tf.square, X3, [[-1.0, -1.0, -1.0]]),
    "Square for Identity": ({"Identity": "Square"}, tf.identity, X3, [[-4.0, 0.0, 4.0]]),
    **{f"{key} is {f.__name__}": ({key: PAIR}, f, (1.0, 2.0), [3.0, 4.0])
       for key in KEYS for f in (add, tf.add)},
    "a packed list": (SEVEN, lambda a, b: tf.identity([a, b]), (1.0, 2.0), [7.0, 7.0]),
    "in a branch": (SEVEN, cond_of_two(True), (2.0,), [7.0]),
    "in the other branch": (SEVEN, cond_of_two(False), (2.0,), [4.0]),
    "a cast to integers": ({"Cast": lambda op, grad: grad}, cast_there_and_back, X2, [[3.0, 3.0]]),
    "a comparison": (RIGHT, positive, X2, [[3.0, 3.0]]),
    "a default": ({"PlaceholderWithDefault": lambda op, grad: -grad},
                  lambda x: tf.placeholder_with_default(x, [None]), X2, [[-1.0, -1.0]]),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_of_rules(name):
    rules, f, inputs, due = ANSWERS[name]
    xs = [tf.constant(x) for x in inputs]
    assert values(tf.gradients(overridden(rules, f, *xs), xs)) == due


def answering(answer):
    return {"Sign": lambda op, grad: answer}


REFUSED = {  # rules, a function, the inputs, the words of a TypeError or ValueError
    "none at all": ({"Sign": lambda op, g: []}, tf.sign, X2, "0.* 1 input"),
    "two": ({"Sign": lambda op, g: [g, g]}, tf.sign, X2, "2.* 1 input"),
    "three": ({"Sign": lambda op, g: (g, None, g)}, tf.sign, X2, "3.* 1 input"),
    "one for two inputs": ({"Mul": lambda op, g: g}, multiply, (1.0, 2.0), r"1.* 2 inputs"),
    "an int": (answering(0), tf.sign, X2, "expected a Tensor, got int"),
    "a float": (answering(0.0), tf.sign, X2, "expected a Tensor, got float"),
    "text": (answering("zero"), tf.sign, X2, "expected a Tensor, got str"),
    "an array": (answering(np.ones(2)), tf.sign, X2, "expected a Tensor, got ndarray"),
    "a list of lists": (answering([[1.0]]), tf.sign, X2, "expected a Tensor, got list"),
    "MatMul for Sign": ({"Sign": "MatMul"}, tf.sign, ([[1.0]],), "."),
    "Identity for Greater": ({**RIGHT, "Greater": "Identity"}, positive, X2, "Greater"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_answers_that_are_refused(name):
    rules, f, inputs, words = REFUSED[name]
    xs = [tf.constant(x) for x in inputs]
    y = overridden(rules, f, *xs)
    refused(lambda: tf.gradients(y, xs), (TypeError, ValueError), words)


@pytest.mark.parametrize("shape", [[], [2], [1, 3], [3, 1]], ids=str)
def test_a_shape_that_cannot_be_the_inputs(shape):
    def my_rule(op, grad):
        return tf.zeros(shape)

    x = tf.constant([1.0, 2.0, 3.0])
    y = overridden({"Sign": my_rule}, lambda: tf.sign(x, name="my_sign"))
    words = "my_rule", "'Sign'", "'x'", re.escape(str(tuple(shape))), r"\(3,\)"
    refused(lambda: tf.gradients(y, x), ValueError, *words)


@pytest.mark.parametrize("shape", [[None], None], ids=str)
def test_unknown_shapes_are_filled_in(shape):
    fed, x = tf.placeholder(tf.float32, shape), tf.constant([1.0, 2.0, 3.0])
    by_input = tf.gradients(overridden({"Sign": lambda op, g: fed}, tf.sign, x), x)
    by_answer = tf.gradients(overridden({"Sign": lambda op, g: tf.ones([3])}, tf.sign, fed), fed)
    for (dx,), due in ((by_input, [7.0, 8.0, 9.0]), (by_answer, [1.0, 1.0, 1.0])):
        assert dx.shape.as_list() == [3]
        assert run(dx, {fed: [7.0, 8.0, 9.0]}).tolist() == due


def test_a_placeholder_with_a_default_is_no_identity():
    x = tf.constant([1.0, 2.0])
    with pytest.warns(UnusedOverrideWarning, match="no op of type 'Identity'"):
        y = overridden({"Identity": lambda op, g: -g}, tf.placeholder_with_default, x, [None])
    assert slope(y, x) == [1, 1]


def test_regrads_own_scope_works_in_graphs():
    x = tf.constant(3.0)
    with rg.gradient_override_map({"Sign": lambda dy, x: dy * x}) as used:
        y = tf.sign(x)
    assert slope(y, x) == 3.0
    used.assert_fired()


# -- what it builds ------------------------------------------------------------------------------


def test_ops_of_a_rule_are_named_after_the_op(graph):
    x = tf.constant(2.0)
    with tf.name_scope("net"):
        y = overridden({"Sign": lambda op, grad: tf.exp(grad)}, lambda: tf.sign(x, name="s"))
    names = [tf.gradients(y, x)[0].name for _ in range(2)]
    with tf.name_scope("outer"):
        names.append(tf.gradients(y, x)[0].name)
    scopes = ["gradients", "gradients_1", "outer/gradients"]
    assert names == [f"{scope}/net/s_grad/Exp:0" for scope in scopes]


def test_higher_orders_follow_what_the_rule_built():
    x = tf.constant(3.0)
    y = overridden({"Sign": lambda op, grad: grad * op.inputs[0] ** 3.0}, tf.sign, x)
    found = []
    for _ in range(4):
        (y,) = tf.gradients(y, x)
        found.append(run(y).item())
    assert found == [27.0, 27.0, 18.0, 6.0]


def test_higher_orders_through_the_output_meet_the_rule_again():
    x, rule = tf.constant(3.0), Recorder(lambda op, grad: grad * op.outputs[0] * 2.0)
    (first,) = tf.gradients(overridden({"Identity": rule}, tf.identity, x), x)
    (second,) = tf.gradients(first, x)
    assert run([first, second]) == [6.0, 12.0]
    assert len(rule.calls) == 2


def test_a_rule_may_use_what_else_the_graph_has():
    x, scale = tf.constant([1.0, 2.0]), tf.placeholder(tf.float32, [])
    (dx,) = tf.gradients(overridden({"Sign": lambda op, grad: grad * scale}, tf.sign, x), x)
    assert values([dx, *tf.gradients(dx, scale)], {scale: 4.0}) == [[4.0, 4.0], 2.0]


def test_an_exception_in_a_rule_leaves_the_graph_usable():
    x = tf.constant(2.0)
    y = overridden({"Sign": lambda op, grad: 1 / 0}, tf.sign, x)
    refused(lambda: tf.gradients(y, x), ZeroDivisionError)
    z = x * x
    assert z.op.name == "mul"
    assert slope(z, x) == 4.0
