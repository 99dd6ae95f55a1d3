"""Names, op types and what printing shows, as in TensorFlow 1."""

import re

import numpy as np
import pytest

import regrad.v1 as tf
from tests.helpers.rows import refused
from tests.helpers.v1_session import run

pytestmark = pytest.mark.usefixtures("graph")


def const(name):
    return tf.constant(1.0, name=name).op.name


# -- unique names --------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "given"), [
    ("a a a", "a a_1 a_2"), ("a a_1 a", "a a_1 a_2"), ("a a a_1", "a a_1 a_1_1"),
    ("a a a A", "a a_1 a_2 A_3"), ("A a", "A a_1"), ("a/b a/b", "a/b a/b_1"),
])  # fmt: skip
def test_names_are_made_unique_in_a_graph(asked, given):
    assert [const(name) for name in asked.split()] == given.split()
    with tf.Graph().as_default():
        assert const("a") == "a"


def test_a_graph_that_is_open_cannot_be_reset(graph):
    refused(tf.reset_default_graph, AssertionError, "nested graphs")
    assert tf.get_default_graph() is graph


@pytest.mark.parametrize("name", ["a:0", "_a", "-a", "ä", "a b/c"])
def test_names_of_other_characters_are_refused(name):
    refused(lambda: tf.constant(1.0, name=name), ValueError)


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
    with tf.name_scope("other"), tf.name_scope(s):  # again, by its full name
        names += [const("a")]
    with tf.name_scope(None, "layer", [tf.constant(1.0)]) as default:
        names += [default]
    with tf.name_scope("mine", "layer") as mine:
        names += [mine]
    due = "s/ s/t/ s/t/a s/t/a_1 s/t_1/ s/t_1/a  a s/a layer/ mine/"
    assert names == due.split(" ")


def test_a_scope_is_left_by_an_exception():
    with pytest.raises(ZeroDivisionError), tf.name_scope("s"):
        raise ZeroDivisionError
    assert const("a") == "a"


# -- the graph by name ---------------------------------------------------------------------------


def test_the_graph_finds_what_it_has(graph):
    x = tf.constant(1.0, name="x")
    y = tf.negative(x, name="y")
    assert graph.get_tensor_by_name("y:0") is graph.as_graph_element("y:0") is y
    assert graph.get_operation_by_name("y") is y.op
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
        v, w = tf.Variable(1.0), tf.Variable(1.0, name="w")
    ops = {op.name.partition("s/Variable")[2]: op.type for op in graph.get_operations()[:4]}
    assert ops == {"/initial_value": "Const", "": "VariableV2", "/Assign": "Assign",
                   "/read": "Identity"}  # fmt: skip
    assert (v.name, w.name, v.op.name) == ("s/Variable:0", "s/w:0", "s/Variable")


# -- printing ------------------------------------------------------------------------------------


def printed():
    x = tf.constant([1.0, 2.0], name="x")
    with tf.control_dependencies([tf.no_op(name="first")]):
        sign = tf.sign(x, name="s")
    return {
        "x": x, "s": sign, "op": sign.op, "first": sign.op.control_inputs[0],
        "Variable": tf.Variable(1.0), "i": tf.Variable([1], name="i"),
        "gradients": tf.gradients(sign * 2.0, x), "none": tf.gradients(tf.constant(1.0), x),
        "known": tf.constant([[1.0, 2.0]]).shape, "partly": tf.TensorShape([None, 3]),
        "unknown": tf.placeholder(tf.float32).shape, "one": x.shape,
    }  # fmt: skip


DEFINITION = re.escape('name: "s"\nop: "Sign"\ninput: "x"\ninput: "^first"\n')
PRINTED = {  # patterns of str and repr
    "first": (re.escape('name: "first"\nop: "NoOp"\n'), "<tf.Operation 'first' type=NoOp>"),
    "op": (rf'{DEFINITION}[^ÿ]*key: "T"[^ÿ]*', "<tf.Operation 's' type=Sign>"),
    "Variable": (r"<tf.Variable 'Variable:0' shape=\(\) dtype=float32_ref>",) * 2,
    "i": (r"<tf.Variable 'i:0' shape=\(1,\) dtype=int32_ref>",) * 2,
    "gradients": (r"\[<tf.Tensor 'gradients/[^']*:0' shape=\(2,\) dtype=float32>\]",) * 2,
    "none": (r"\[None\]",) * 2, "known": (r"\(1, 2\)", ".*"), "partly": (r"\(\?, 3\)", ".*"),
    "unknown": ("<unknown>", ".*"), "one": (r"\(2,\)", ".*"),
}  # fmt: skip


@pytest.mark.parametrize("name", PRINTED)
def test_what_printing_shows(name):
    value, (as_text, as_repr) = printed()[name], PRINTED[name]
    assert re.fullmatch(as_text, str(value))
    assert re.fullmatch(as_repr, repr(value))


# -- dtypes and shapes ---------------------------------------------------------------------------

DTYPES = "float16 float32 float64 int8 int32 int64 uint8 bool complex64"


@pytest.mark.parametrize("name", DTYPES.split())
def test_dtypes(name):
    dtype, kind = getattr(tf, name), np.dtype(name).type
    assert (repr(dtype), str(dtype)) == (f"tf.{name}", f"<dtype: '{name}'>")
    assert (dtype.name, dtype.base_dtype) == (name, dtype)
    assert dtype.is_floating == name.startswith("float")
    assert dtype.is_integer == ("int" in name)
    assert dtype == kind
    assert dtype != tf.string
    assert dtype.as_numpy_dtype is kind
    assert tf.as_dtype(name) is tf.as_dtype(np.dtype(name)) is dtype
    assert {dtype: 1}[dtype] == 1


def test_tensors_and_variables_tell_their_dtype():
    x, v = tf.constant(1.0), tf.Variable(1.0)
    assert x.dtype is v.dtype.base_dtype is tf.float32
    assert v.dtype.name == "float32_ref"
    assert (tf.constant("a").dtype, tf.constant(True).dtype) == (tf.string, tf.bool)


def test_shapes_and_sizes():
    known = tf.constant([[1.0, 2.0]]).shape
    partly, unknown = tf.placeholder(tf.float32, [None, 2]).get_shape(), tf.TensorShape(None)
    assert [s.ndims for s in (known, partly, unknown)] == [2, 2, None]
    assert (known.as_list(), partly.as_list()) == ([1, 2], [None, 2])
    assert known == [1, 2]
    refused(unknown.as_list, ValueError)
    assert (partly[0].value, partly[1].value, int(partly[1])) == (None, 2, 2)
    assert tf.zeros([partly[1], 3]).shape.as_list() == [2, 3]


# -- tensors as Python objects -------------------------------------------------------------------


def test_equality_is_elementwise_here():
    # TensorFlow 1 compares by identity; regrad's tensors compare by element in every mode
    x, y = tf.constant([1.0, 2.0]), tf.constant([1.0, 3.0])
    found = run([x == y, x != y, x == 1.0])
    assert [a.tolist() for a in found] == [[True, False], [False, True], [True, False]]
    assert (x == y).dtype == (x != y).dtype == tf.bool


def test_tensors_are_keys():
    x, y, v = tf.constant([1.0]), tf.constant([1.0]), tf.Variable(1.0)
    names = {x: "x", y: "y", v: "v", x.op: "op"}
    assert [names[key] for key in (x, y, v, x.op)] == ["x", "y", "v", "op"]
    assert len({x, y, x}) == 2


@pytest.mark.parametrize("use", [bool, len, iter, list, float, int, np.asarray,
                                 lambda x: 0.0 < x < 2.0], ids=lambda f: f.__name__)  # fmt: skip
def test_a_tensor_has_no_value_before_it_is_run(use):
    refused(lambda: use(tf.constant([1.0])), TypeError)
