"""Names, op types and what printing shows, as in TensorFlow 1."""

import re

import numpy as np
import pytest

import regrad.v1 as tf
from tests.helpers.v1_session import run

pytestmark = pytest.mark.usefixtures("graph")


def const(name):
    return tf.constant(1.0, name=name).op.name


# -- unique names --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ("a a a", "a a_1 a_2"),
        ("a a_1 a", "a a_1 a_2"),
        ("a a a_1", "a a_1 a_1_1"),
        ("a a a A", "a a_1 a_2 A_3"),
        ("A a", "A a_1"),
        ("a/b a/b", "a/b a/b_1"),
    ],
)
def test_names_are_made_unique(asked, given):
    assert [const(name) for name in asked.split()] == given.split()


def test_a_graph_that_is_open_cannot_be_reset(graph):
    with pytest.raises(AssertionError, match="nested graphs"):
        tf.reset_default_graph()
    assert tf.get_default_graph() is graph


def test_names_are_unique_per_graph():
    const("a")
    with tf.Graph().as_default():
        assert const("a") == "a"


@pytest.mark.parametrize("name", ["a:0", "_a", "-a", "ä", "a b/c"])
def test_names_of_other_characters_are_refused(name):
    with pytest.raises(ValueError):
        tf.constant(1.0, name=name)


@pytest.mark.parametrize("name", ["a.b", "a-b", "A_1", "a/b", "0a", ".a", "a\\b", "a>b"])
def test_names_of_these_characters_are_fine(name):
    assert const(name) == name


def test_scopes_nest_and_are_made_unique():
    with tf.name_scope("s") as s:
        with tf.name_scope("t") as t:
            names = [s, t, const("a"), const("a")]
        with tf.name_scope("t") as t:
            names += [t, const("a")]
        with tf.name_scope(None) as root:
            names += [root, const("a")]
    assert names == ["s/", "s/t/", "s/t/a", "s/t/a_1", "s/t_1/", "s/t_1/a", "", "a"]


def test_a_scope_is_entered_again_by_its_full_name():
    with tf.name_scope("s") as s:
        const("a")
    with tf.name_scope("other"), tf.name_scope(s):
        assert const("a") == "s/a_1"


def test_a_scope_takes_a_default_name():
    with tf.name_scope(None, "layer", [tf.constant(1.0)]) as s:
        assert s == "layer/"
    with tf.name_scope("mine", "layer") as s:
        assert s == "mine/"


def test_a_scope_is_left_by_an_exception():
    with pytest.raises(ZeroDivisionError), tf.name_scope("s"):
        raise ZeroDivisionError
    assert const("a") == "a"


# -- the graph by name ---------------------------------------------------------------------------


def test_the_graph_finds_what_it_has(graph):
    x = tf.constant(1.0, name="x")
    y = tf.negative(x, name="y")
    assert graph.get_tensor_by_name("y:0") is y
    assert graph.get_operation_by_name("y") is y.op
    assert graph.as_graph_element("y:0") is y
    assert [op.name for op in graph.get_operations()] == ["x", "y"]
    assert y.graph is graph
    for find, name in [(graph.get_tensor_by_name, "z:0"), (graph.get_operation_by_name, "z")]:
        with pytest.raises(KeyError):
            find(name)


def test_outputs_are_numbered():
    first, second = tf.split(tf.constant([1.0, 2.0]), 2, name="halves")
    assert (first.name, second.name) == ("halves:0", "halves:1")
    assert (first.value_index, second.value_index) == (0, 1)
    assert first.op is second.op


def test_a_variable_is_four_ops(graph):
    with tf.name_scope("s"):
        v = tf.Variable(1.0)
        w = tf.Variable(1.0, name="w")
    ops = {op.name: op.type for op in graph.get_operations()}
    assert ops["s/Variable/initial_value"] == "Const"
    assert ops["s/Variable"] == "VariableV2"
    assert ops["s/Variable/Assign"] == "Assign"
    assert ops["s/Variable/read"] == "Identity"
    assert (v.name, w.name, v.op.name) == ("s/Variable:0", "s/w:0", "s/Variable")


# -- op types ------------------------------------------------------------------------------------


def numbers():
    return tf.constant([1.0, 2.0], name="x")


OPERATORS = {
    "x + x": ("AddV2", "add"),
    "x - x": ("Sub", "sub"),
    "x * x": ("Mul", "mul"),
    "x / x": ("RealDiv", "truediv"),
    "x // x": ("FloorDiv", "floordiv"),
    "x % x": ("FloorMod", "mod"),
    "-x": ("Neg", "Neg"),
    "x ** x": ("Pow", "pow"),
    "abs(x)": ("Abs", "Abs"),
    "m @ m": ("MatMul", "matmul"),
    "x < x": ("Less", "Less"),
    "x <= x": ("LessEqual", "LessEqual"),
    "x > x": ("Greater", "Greater"),
    "x >= x": ("GreaterEqual", "GreaterEqual"),
    "b & b": ("LogicalAnd", None),
    "b | b": ("LogicalOr", None),
    "~b": ("LogicalNot", None),
    "x[0]": ("StridedSlice", "strided_slice"),
    "x[:, None]": ("StridedSlice", "strided_slice"),
    "1.0 + x": ("AddV2", "add"),
    "1.0 / x": ("RealDiv", "truediv"),
    "1.0 < x": ("Greater", "Greater"),
}


@pytest.mark.parametrize("expression", OPERATORS)
def test_operators(expression):
    x, m, b = numbers(), tf.constant([[1.0]]), tf.constant([True])
    op = eval(expression, {"x": x, "m": m, "b": b}).op
    op_type, name = OPERATORS[expression]
    assert op.type == op_type
    assert name in (None, op.name)


FUNCTIONS = {
    "tf.add(x, x)": ("AddV2", "Add"),
    "tf.subtract(x, x)": ("Sub", "Sub"),
    "tf.multiply(x, x)": ("Mul", "Mul"),
    "tf.divide(x, x)": ("RealDiv", "truediv"),
    "tf.truediv(x, x)": ("RealDiv", "truediv"),
    "tf.negative(x)": ("Neg", "Neg"),
    "tf.square(x)": ("Square", "Square"),
    "tf.reduce_sum(x)": ("Sum", "Sum"),
    "tf.reduce_mean(x)": ("Mean", "Mean"),
    "tf.reduce_max(x)": ("Max", "Max"),
    "tf.nn.sigmoid(x)": ("Sigmoid", "Sigmoid"),
    "tf.sigmoid(x)": ("Sigmoid", "Sigmoid"),
    "tf.matmul(m, m)": ("MatMul", "MatMul"),
    "tf.stack([x, x])": ("Pack", "stack"),
    "tf.concat([x, x], 0)": ("ConcatV2", "concat"),
    "tf.gather(x, [0])": ("GatherV2", None),
    "tf.cast(x, tf.int32)": ("Cast", "Cast"),
    "tf.zeros([2])": ("Const", "zeros"),
    "tf.ones([2])": ("Const", "ones"),
    "tf.py_func(len, [x], tf.int64)": ("PyFunc", "PyFunc"),
    "tf.placeholder(tf.float32)": ("Placeholder", "Placeholder"),
    "tf.constant(1.0)": ("Const", "Const"),
    "tf.identity(x)": ("Identity", "Identity"),
    "tf.stop_gradient(x)": ("StopGradient", "StopGradient"),
}


@pytest.mark.parametrize("expression", FUNCTIONS)
def test_functions(expression):
    scope = {"tf": tf, "x": numbers(), "m": tf.constant([[1.0]], name="m")}
    op = eval(expression, scope).op
    op_type, name = FUNCTIONS[expression]
    assert op.type == op_type
    assert name in (None, op.name)


def test_functions_that_have_nothing_to_do_return_their_input():
    x = numbers()
    assert tf.cast(x, tf.float32) is x
    assert tf.nn.dropout(x, 1.0) is x
    assert tf.convert_to_tensor(x) is x


def test_functions_take_a_name():
    x = numbers()
    named = [tf.add(x, x, name="n"), tf.reduce_sum(x, name="n"), tf.nn.relu(x, name="n")]
    assert [t.op.name for t in named] == ["n", "n_1", "n_2"]


# -- printing ------------------------------------------------------------------------------------


def test_operations_print_as_in_tensorflow():
    op = tf.no_op(name="n")
    assert repr(op) == "<tf.Operation 'n' type=NoOp>"
    assert str(op) == 'name: "n"\nop: "NoOp"\n'


def test_an_operation_prints_its_definition():
    x = numbers()
    with tf.control_dependencies([tf.no_op(name="first")]):
        text = str(tf.sign(x, name="s").op)
    assert text.startswith('name: "s"\nop: "Sign"\ninput: "x"\ninput: "^first"\n')
    assert 'key: "T"' in text


@pytest.mark.parametrize(
    ("build", "due"),
    [
        (lambda: tf.Variable(1.0), "<tf.Variable 'Variable:0' shape=() dtype=float32_ref>"),
        (lambda: tf.Variable([1], name="i"), "<tf.Variable 'i:0' shape=(1,) dtype=int32_ref>"),
    ],
)
def test_variables_print_as_in_tensorflow(build, due):
    v = build()
    assert (str(v), repr(v)) == (due, due)


def test_lists_of_gradients_print_what_they_hold():
    x = tf.constant([1.0, 2.0])
    text = str(tf.gradients(tf.sign(x) * 2.0, x))
    assert re.fullmatch(r"\[<tf.Tensor 'gradients/[^']*:0' shape=\(2,\) dtype=float32>\]", text)
    assert str(tf.gradients(tf.constant(1.0), x)) == "[None]"


@pytest.mark.parametrize(
    "name",
    ["float16", "float32", "float64", "int8", "int32", "int64", "uint8", "bool", "complex64"],
)
def test_dtypes(name):
    dtype = getattr(tf, name)
    assert repr(dtype) == f"tf.{name}"
    assert str(dtype) == f"<dtype: '{name}'>"
    assert (dtype.name, dtype.base_dtype) == (name, dtype)
    assert dtype.is_floating == name.startswith("float")
    assert dtype.is_integer == ("int" in name)
    assert dtype == np.dtype(name).type
    assert dtype != tf.string
    assert dtype.as_numpy_dtype is np.dtype(name).type
    assert tf.as_dtype(name) is tf.as_dtype(np.dtype(name)) is dtype
    assert {dtype: 1}[dtype] == 1


def test_tensors_and_variables_tell_their_dtype():
    x, v = tf.constant(1.0), tf.Variable(1.0)
    assert x.dtype is tf.float32
    assert v.dtype.base_dtype is tf.float32
    assert v.dtype.name == "float32_ref"
    assert (tf.constant("a").dtype, tf.constant(True).dtype) == (tf.string, tf.bool)


def test_shapes():
    known = tf.constant([[1.0, 2.0]]).shape
    partly = tf.placeholder(tf.float32, [None, 2]).get_shape()
    unknown = tf.placeholder(tf.float32).shape
    assert [str(s) for s in (known, partly, unknown)] == ["(1, 2)", "(?, 2)", "<unknown>"]
    assert [s.ndims for s in (known, partly, unknown)] == [2, 2, None]
    assert (known.as_list(), partly.as_list()) == ([1, 2], [None, 2])
    assert str(tf.constant([1.0]).shape) == "(1,)"
    assert str(tf.TensorShape([None, 3])) == "(?, 3)"
    with pytest.raises(ValueError):
        unknown.as_list()


def test_sizes():
    shape = tf.placeholder(tf.float32, [None, 2]).shape
    assert (shape[0].value, shape[1].value, int(shape[1])) == (None, 2, 2)
    assert tf.constant([[1.0, 2.0]]).shape == [1, 2]
    assert tf.zeros([shape[1], 3]).shape.as_list() == [2, 3]


# -- tensors as Python objects -------------------------------------------------------------------


def test_equality_is_elementwise_here():
    # TensorFlow 1 compares by identity; regrad's tensors compare by element in every mode
    x, y = tf.constant([1.0, 2.0]), tf.constant([1.0, 3.0])
    assert run([x == y, x != y, x == 1.0])[0].tolist() == [True, False]
    assert (x == y).dtype == (x != y).dtype == tf.bool


def test_tensors_are_keys():
    x, y = tf.constant([1.0]), tf.constant([1.0])
    v = tf.Variable(1.0)
    names = {x: "x", y: "y", v: "v"}
    assert (names[x], names[y], names[v], len({x, y, x})) == ("x", "y", "v", 2)


@pytest.mark.parametrize("use", [bool, len, iter, list, float, int], ids=lambda f: f.__name__)
def test_a_tensor_has_no_value_before_it_is_run(use):
    with pytest.raises(TypeError):
        use(tf.constant([1.0]))


def test_a_tensor_is_no_condition():
    x = tf.constant([1.0])
    with pytest.raises(TypeError):
        0.0 < x < 2.0  # noqa: B015
    with pytest.raises(TypeError):
        assert x
