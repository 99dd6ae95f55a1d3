"""What a rule `(op, grad, ...)` sees in a graph, and what becomes of what it answers."""

import numpy as np
import pytest

import regrad.v1 as tf
from regrad.errors import UnusedOverrideWarning
from tests.helpers.v1_session import run, values

pytestmark = pytest.mark.usefixtures("graph")


def overridden(op_type, rule, build):
    with tf.get_default_graph().gradient_override_map({op_type: rule}):
        return build()


class Recorder:
    """A rule in TensorFlow's form that keeps what it was called with."""

    def __init__(self, answer=lambda op, *grads: grads[0]):
        self.calls = []
        self.answer = answer

    def __call__(self, op, *grads):
        self.calls.append((op, grads))
        return self.answer(op, *grads)

    @property
    def names(self):
        return [op.name for op, _ in self.calls]


# -- what op has ---------------------------------------------------------------------------------


def test_op_is_the_operation_itself(graph):
    rule, x = Recorder(), tf.constant([1.0, 2.0])
    y = overridden("Sign", rule, lambda: tf.sign(x, name="my_sign"))
    tf.gradients(y, x)
    ((op, (grad,)),) = rule.calls
    assert (op.type, op.name) == ("Sign", "my_sign")
    assert op.inputs[0] is x
    assert op.outputs[0] is y
    assert op.graph is graph
    assert grad.shape.as_list() == [2]
    assert grad.dtype == tf.float32


def test_a_placeholder_with_a_default_is_no_identity():
    x = tf.constant([1.0, 2.0])
    build = lambda: tf.placeholder_with_default(x, [None])  # noqa: E731
    with pytest.warns(UnusedOverrideWarning, match="no op of type 'Identity'"):
        y = overridden("Identity", lambda op, grad: -grad, build)
    assert run(tf.gradients(y, x)[0]).tolist() == [1, 1]
    y = overridden("PlaceholderWithDefault", lambda op, grad: -grad, build)
    assert run(tf.gradients(y, x)[0]).tolist() == [-1, -1]


def test_inputs_can_be_counted_unpacked_and_indexed():
    a, b = tf.constant(2.0), tf.constant(3.0)
    rule = Recorder(lambda op, grad: [grad, grad])
    tf.gradients(overridden("Mul", rule, lambda: a * b), [a, b])
    op = rule.calls[0][0]
    first, second = op.inputs
    assert (first is a, second is b, op.inputs[-1] is b) == (True, True, True)
    assert (len(op.inputs), len(op.outputs)) == (2, 1)


def test_an_operation_tells_its_place():
    before = tf.no_op()
    with tf.control_dependencies([before]):
        op = tf.identity(1.0, name="me").op
    assert op.control_inputs == [before]
    assert "me" in str(op.node_def)
    assert op.device == ""


X, W = np.ones((1, 4, 4, 1), np.float32), np.ones((2, 2, 1, 1), np.float32)


@pytest.mark.parametrize(
    ("build", "attr", "due"),
    [
        (lambda: tf.reduce_sum([[1.0]], 1, keepdims=True), "keep_dims", True),
        (lambda: tf.reduce_mean([[1.0]], 1), "keep_dims", False),
        (lambda: tf.reduce_max([[1.0]], 1, keepdims=True), "keep_dims", True),
        (lambda: tf.cast(1.0, tf.int32), "SrcT", tf.float32),
        (lambda: tf.cast(1.0, tf.int32), "DstT", tf.int32),
        (lambda: tf.constant([1.0]) * 2.0, "T", tf.float32),
        (lambda: tf.matmul([[1.0]], [[1.0]], transpose_b=True), "transpose_b", True),
        (lambda: tf.nn.conv2d(X, W, [1, 1, 1, 1], "SAME"), "padding", b"SAME"),
        (lambda: tf.nn.max_pool(X, [1, 2, 2, 1], [1, 2, 2, 1], "VALID"), "padding", b"VALID"),
    ],
)
def test_attributes_have_tensorflows_names_and_kinds(build, attr, due):
    got = build().op.get_attr(attr)
    assert got == due
    assert type(got) is type(due)


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (lambda x: x * 2.0, ["x:0", "mul/y:0"]),
        (lambda x: x**2.0, ["x:0", "pow/y:0"]),
        (lambda x: 2.0 - x, ["sub/x:0", "x:0"]),
        (lambda x: x + 1, ["x:0", "add/y:0"]),
    ],
    ids=["mul", "pow", "sub", "add"],
)
def test_constants_in_expressions_are_inputs(build, names):
    x = tf.constant([1.0, 2.0], name="x")
    assert [t.name for t in build(x).op.inputs] == names


@pytest.mark.parametrize(
    ("op_type", "build", "place", "due"),
    [
        ("Sum", lambda x: tf.reduce_sum(x, 1), 1, 1),
        ("Mean", lambda x: tf.reduce_mean(x, [0, 1]), 1, [0, 1]),
        ("Max", lambda x: tf.reduce_max(x), 1, [0, 1]),
        ("Split", lambda x: tf.split(x, 2, axis=1)[0], 0, 1),
    ],
)
def test_an_axis_is_an_input(op_type, build, place, due):
    x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    op = build(x).op
    assert op.type == op_type
    assert op.inputs[1 - place] is x
    assert run(op.inputs[place]).tolist() == due


def test_a_rule_answers_for_the_axis_with_none():
    x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    last = overridden("Mean", lambda op, g: (x * 5.0, None), lambda: tf.reduce_mean(x, 1))
    first = overridden("Split", lambda op, *g: (None, x * 5.0), lambda: tf.split(x, 2)[0])
    assert values(tf.gradients([last, first], x)) == [[[10.0, 20.0], [30.0, 40.0]]]


# -- when it is called ---------------------------------------------------------------------------


def test_gradients_arrive_summed_and_once():
    x, w = tf.constant(2.0), tf.constant([1.0, 10.0])
    rule = Recorder()
    h = overridden("Identity", rule, lambda: tf.identity(x))
    assert values(tf.gradients([h * 3.0, h * 4.0, tf.reduce_sum(h * w)], x)) == [18.0]
    assert len(rule.calls) == 1


def test_a_rule_off_the_path_is_not_called():
    x, z, rule = tf.constant(2.0), tf.constant(3.0), Recorder()
    y = overridden("Identity", rule, lambda: tf.identity(x) * z)
    tf.gradients(y, z)
    tf.gradients(x * 1.0, x)
    assert rule.calls == []


def test_a_rule_at_which_no_gradient_arrives_is_not_called():
    x, rule = tf.constant(2.0), Recorder()
    h = overridden("Identity", rule, lambda: tf.identity(x))
    y = overridden("Sign", lambda op, grad: None, lambda: tf.sign(h))
    assert tf.gradients(y, x) == [None]
    assert rule.calls == []


def test_consumers_come_before_producers():
    x, rule = tf.constant(2.0), Recorder()
    with tf.get_default_graph().gradient_override_map({"Identity": rule}):
        root = tf.identity(x, name="root")
        left = tf.identity(root, name="left")
        far = tf.identity(tf.identity(root, name="near"), name="far")
        y = left + far
    tf.gradients(y, x)
    names = rule.names
    assert sorted(names) == ["far", "left", "near", "root"]
    assert names.index("far") < names.index("near") < names.index("root")
    assert names.index("left") < names.index("root")


def test_unused_outputs_arrive_as_zeros():
    x = tf.constant([1.0, 2.0, 3.0, 4.0])
    rule = Recorder(lambda op, a, b: (None, tf.concat([a * 2.0, b + 7.0], 0)))
    first, _ = overridden("Split", rule, lambda: tf.split(x, 2))
    assert values(tf.gradients(first, x)) == [[2.0, 2.0, 7.0, 7.0]]
    zeros = rule.calls[0][1][1]
    assert (zeros.shape.as_list(), zeros.dtype) == ([2], tf.float32)


def test_unused_integer_outputs_arrive_as_none():
    x = tf.constant([1.0, 3.0, 2.0])
    rule = Recorder(lambda op, dy, indices: (x * 0.0 + tf.reduce_sum(dy), None))
    top, _ = overridden("TopKV2", rule, lambda: tf.nn.top_k(x, 2))
    assert values(tf.gradients(top, x)) == [[2.0, 2.0, 2.0]]
    assert rule.calls[0][1][1] is None


# -- what it answers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap",
    [lambda t: t, lambda t: [t], lambda t: (t,)],
    ids=["tensor", "list", "tuple"],
)
def test_a_tensor_or_a_sequence_of_one(wrap):
    x = tf.constant([1.0, 2.0])
    y = overridden("Sign", lambda op, grad: wrap(grad * 2.0), lambda: tf.sign(x))
    assert values(tf.gradients(y, x)) == [[2.0, 2.0]]


@pytest.mark.parametrize("answer", [None, [None], (None,)])
def test_none_is_no_gradient_by_this_path(answer):
    x = tf.constant([1.0, 2.0])
    y = overridden("Sign", lambda op, grad: answer, lambda: tf.sign(x))
    assert tf.gradients(y, x) == [None]
    assert values(tf.gradients([y, x * 3.0], x)) == [[3.0, 3.0]]


def test_both_answers_count_if_both_inputs_are_one_tensor():
    x = tf.constant(5.0)
    y = overridden("Mul", lambda op, grad: (grad * 2.0, grad * 3.0), lambda: x * x)
    assert values(tf.gradients(y, x)) == [5.0]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda g: [], "0.* 1 input"),
        (lambda g: [g, g], "2.* 1 input"),
        (lambda g: (g, None, g), "3.* 1 input"),
    ],
)
def test_a_wrong_number_of_gradients(answer, words):
    x = tf.constant([1.0, 2.0])
    y = overridden("Sign", lambda op, grad: answer(grad), lambda: tf.sign(x))
    with pytest.raises(ValueError, match=words):
        tf.gradients(y, x)


def test_one_gradient_for_two_inputs():
    a, b = tf.constant(1.0), tf.constant(2.0)
    y = overridden("Mul", lambda op, grad: grad, lambda: a * b)
    with pytest.raises(ValueError, match=r"1.* 2 inputs"):
        tf.gradients(y, [a, b])


@pytest.mark.parametrize(
    ("answer", "got"),
    [(0, "int"), (0.0, "float"), ("zero", "str"), (np.ones(2), "ndarray"), ([[1.0]], "list")],
    ids=str,
)
def test_only_tensors_are_gradients(answer, got):
    x = tf.constant([1.0, 2.0])
    y = overridden("Sign", lambda op, grad: answer, lambda: tf.sign(x))
    with pytest.raises((TypeError, ValueError), match=f"expected a Tensor, got {got}"):
        tf.gradients(y, x)


@pytest.mark.parametrize("shape", [[], [2], [1, 3], [3, 1]], ids=str)
def test_a_shape_that_cannot_be_the_inputs(shape):
    x = tf.constant([1.0, 2.0, 3.0])

    def my_rule(op, grad):
        return tf.zeros(shape)

    y = overridden("Sign", my_rule, lambda: tf.sign(x, name="my_sign"))
    with pytest.raises(ValueError) as caught:
        tf.gradients(y, x)
    for word in ("my_rule", "'Sign'", "'x'", str(tuple(shape)), "(3,)"):
        assert word in str(caught.value)


@pytest.mark.parametrize("shape", [[None], None], ids=str)
def test_a_shape_that_may_be_the_inputs_is_accepted(shape):
    answer, x = tf.placeholder(tf.float32, shape), tf.constant([1.0, 2.0, 3.0])
    y = overridden("Sign", lambda op, grad: answer, lambda: tf.sign(x))
    (dx,) = tf.gradients(y, x)
    assert dx.shape.as_list() == [3]
    assert run(dx, {answer: [7.0, 8.0, 9.0]}).tolist() == [7.0, 8.0, 9.0]


@pytest.mark.parametrize("shape", [[None], None], ids=str)
def test_the_inputs_unknown_shape_is_filled_in_from_the_answer(shape):
    x = tf.placeholder(tf.float32, shape)
    y = overridden("Sign", lambda op, grad: tf.ones([3]), lambda: tf.sign(x))
    (dx,) = tf.gradients(y, x)
    assert dx.shape.as_list() == [3]
    assert run(dx, {x: [7.0, 8.0, 9.0]}).tolist() == [1.0, 1.0, 1.0]


def test_broadcasting_is_undone_by_the_rule_or_by_the_library():
    # TensorFlow asks the rule to sum; an answer that the op spread is summed here
    x, b = tf.ones([2, 3]), tf.ones([3])
    y = overridden("Mul", lambda op, g: (g, tf.reduce_sum(g, 0) * 5.0), lambda: x * b)
    z = overridden("Mul", lambda dy: (dy, dy * 5.0), lambda: x * b)
    assert values(tf.gradients(y, b)) == values(tf.gradients(z, b)) == [[10.0, 10.0, 10.0]]


# -- what it builds ------------------------------------------------------------------------------


def test_ops_of_a_rule_are_named_after_the_op(graph):
    x = tf.constant(2.0)
    with tf.name_scope("net"):
        y = overridden("Sign", lambda op, grad: tf.exp(grad), lambda: tf.sign(x, name="s"))
    names = [tf.gradients(y, x)[0].name for _ in range(2)]
    with tf.name_scope("outer"):
        names.append(tf.gradients(y, x)[0].name)
    assert names == [
        "gradients/net/s_grad/Exp:0",
        "gradients_1/net/s_grad/Exp:0",
        "outer/gradients/net/s_grad/Exp:0",
    ]


def test_higher_orders_follow_what_the_rule_built():
    x = tf.constant(3.0)
    y = overridden("Sign", lambda op, grad: grad * op.inputs[0] ** 3.0, lambda: tf.sign(x))
    found = []
    for _ in range(4):
        (y,) = tf.gradients(y, x)
        found.append(run(y).item())
    assert found == [27.0, 27.0, 18.0, 6.0]


def test_higher_orders_through_the_output_meet_the_rule_again():
    x, rule = tf.constant(3.0), Recorder(lambda op, grad: grad * op.outputs[0] * 2.0)
    y = overridden("Identity", rule, lambda: tf.identity(x))
    (first,) = tf.gradients(y, x)
    (second,) = tf.gradients(first, x)
    assert run([first, second]) == [6.0, 12.0]
    assert len(rule.calls) == 2


def test_a_rule_may_use_what_else_the_graph_has():
    x, scale = tf.constant([1.0, 2.0]), tf.placeholder(tf.float32, [])
    y = overridden("Sign", lambda op, grad: grad * scale, lambda: tf.sign(x))
    (dx,) = tf.gradients(y, x)
    assert run(dx, {scale: 4.0}).tolist() == [4.0, 4.0]
    assert values(tf.gradients(dx, scale), {scale: 4.0}) == [2.0]


def test_an_exception_in_a_rule_leaves_the_graph_usable():
    x = tf.constant(2.0)
    y = overridden("Sign", lambda op, grad: 1 / 0, lambda: tf.sign(x))
    with pytest.raises(ZeroDivisionError):
        tf.gradients(y, x)
    z = x * x
    assert z.op.name == "mul"
    assert values(tf.gradients(z, x)) == [4.0]
