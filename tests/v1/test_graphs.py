"""Graphs and their elements: names, collections, static shapes, dtypes, ops, refusals."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.errors import ArgumentError, GraphError, ShapeError
from tests.helpers.rows import refused
from tests.helpers.v1_session import any_session, initialized, run

pytestmark = pytest.mark.usefixtures("graph")
session = any_session


# -- names ---------------------------------------------------------------------------------------


def test_unique_names(graph):
    """As documented: a name is unique in its scope, and case does not count."""
    assert [graph.unique_name("a") for _ in range(3)] == ["a", "a_1", "a_2"]
    assert graph.unique_name("A") == "A_3"
    assert [graph.unique_name("b", mark_as_used=False) for _ in range(2)] == ["b", "b"]
    assert tf.constant(1.0, name="b").op.name == "b"
    assert graph.unique_name("b", mark_as_used=False) == "b_1"
    with tf.name_scope("s"):
        assert graph.unique_name("a") == "s/a"
        assert tf.constant(1.0, name="a").op.name == "s/a_1"
        refused(lambda: graph.unique_name("ä", mark_as_used=False), ValueError)
        assert graph.unique_name("c", mark_as_used=False) == graph.unique_name("c") == "s/c"


def test_elements_by_name(graph):
    x, v = tf.constant(1.0, name="x"), tf.Variable(1.0, name="v")
    find = graph.as_graph_element
    assert find("x:0") is find(x) is x
    assert find("x") is find(x.op) is x.op
    assert find(v) is v._ref()
    refused(lambda: find(x, allow_tensor=False), TypeError, "Can not convert a Tensor into a Op")
    refused(lambda: find("x", allow_operation=False), TypeError, "a Operation into a Tensor")
    refused(lambda: find(3), TypeError, "a int into a Tensor or Operation")
    with tf.Graph().as_default():
        refused(lambda: find(tf.constant(1.0)), ValueError, "is not an element of this graph")


@pytest.mark.parametrize(("name", "error", "words"), [
    ("nox:0", KeyError, r"^The name 'nox' refers to an Operation not in the graph\.$"),
    ("x:1", KeyError, "^The name 'x:1' refers to a Tensor which does not exist.*only 1 outputs"),
    ("x", ValueError, "names an op, not a tensor"), (3, TypeError, "names are strings, not int"),
])  # fmt: skip
def test_tensors_that_a_graph_does_not_have(graph, name, error, words):
    tf.constant(1.0, name="x")
    refused(lambda: graph.get_tensor_by_name(name), error, words)


def test_the_version_grows_with_the_ops(graph):
    before = graph.version
    tf.constant(1.0)
    assert graph.version == before + 1


def test_devices_have_no_effect(graph):
    with graph.device("/gpu:0"), tf.device(lambda op: "/cpu:0"):
        x = tf.constant(1.0)
    assert (x.device, x.op.device) == ("", "")


def test_colocation_has_no_effect(graph):
    """As documented: None needs `ignore_existing`."""
    x = tf.constant(2.0)
    with graph.colocate_with(x), graph.colocate_with(x.op, ignore_existing=True):
        y = x * 3.0
    with graph.colocate_with(None, True):
        assert run(y) == 6.0
    refused(lambda: graph.colocate_with(None).__enter__(), ValueError, "ignore_existing=True")


# -- collections ---------------------------------------------------------------------------------


def test_collections_are_listed_and_cleared(graph):
    assert graph.get_all_collection_keys() == []
    tf.add_to_collection("a", 1)
    graph.add_to_collections(["b", "a", "b"], 2)
    graph.add_to_collections("c", 3)
    assert graph.get_all_collection_keys() == ["a", "b", "c"]
    graph.get_collection_ref("d")
    assert graph.get_all_collection_keys() == ["a", "b", "c", "d"]
    kept = graph.get_collection("a")
    graph.clear_collection("a")
    graph.clear_collection("never made")
    assert (kept, graph.get_collection("a")) == ([1, 2], [])
    assert graph.get_all_collection_keys() == ["b", "c", "d"]
    graph.add_to_collection(("a", "key"), 4)  # (keys of private collections are not listed)
    assert graph.get_collection(("a", "key")) == [4]
    assert graph.get_all_collection_keys() == ["b", "c", "d"]


def test_the_collections_of_a_variable():
    v = tf.Variable(1.0, collections=[])
    w = tf.Variable(1.0, collections=[], trainable=False)
    u = tf.Variable(1.0, collections=["mine", tf.GraphKeys.TRAINABLE_VARIABLES])
    assert tf.global_variables() == []
    assert tf.trainable_variables() == [v, u]
    assert tf.get_collection("mine") == [u]
    assert w.trainable is False


# -- static shapes -------------------------------------------------------------------------------

S = tf.TensorShape


@pytest.mark.parametrize(("shape", "text", "code", "count"), [
    (S([2, 3]), "(2, 3)", "TensorShape([Dimension(2), Dimension(3)])", 6),
    (S([None]), "(?,)", "TensorShape([Dimension(None)])", None),
    (S([]), "()", "TensorShape([])", 1), (S(None), "<unknown>", "TensorShape(None)", None),
    (S(4), "(4,)", "TensorShape([Dimension(4)])", 4),
    (S(S([2])[0]), "(2,)", "TensorShape([Dimension(2)])", 2),
    (S(iter([S([None])[0], 1])), "(?, 1)", "TensorShape([Dimension(None), Dimension(1)])", None),
], ids=str)  # fmt: skip
def test_shapes_print_and_count_elements(shape, text, code, count):
    assert (str(shape), repr(shape), shape.num_elements()) == (text, code, count)
    assert shape.is_fully_defined() == (count is not None)
    assert shape.rank == shape.ndims == (None if text == "<unknown>" else len(shape))
    assert bool(shape) == (shape.ndims is not None)


def test_dimensions():
    known, unknown = S([2, None])
    assert (known.value, unknown.value, known + 1, S([2, None]).dims[0]) == (2, None, 3, 2)
    assert (str(known), repr(known), str(unknown)) == ("2", "Dimension(2)", "?")
    assert S(None).dims is None


def test_shapes_are_joined_and_merged():
    a = S([2, None])
    assert a.merge_with([None, 3]).as_list() == [2, 3]
    assert a.merge_with(None) == S(None).merge_with(a) == a
    assert (a + S([4])).as_list() == a.concatenate([4]).as_list() == [2, None, 4]
    assert a.__radd__([4]).as_list() == [4, 2, None]
    assert (a + S(None)).ndims is None
    assert a.with_rank(2) == a
    assert S(None).with_rank(2).as_list() == [None, None]
    assert (a[0], a[1:].as_list(), a[-1].value) == (2, [None], None)
    assert (S(None)[0].value, S(None)[1:].ndims) == (None, None)
    words = r"Shapes \(2, \?\) and \(3, 3\) are incompatible"
    refused(lambda: a.merge_with([3, 3]), ShapeError, words)
    refused(lambda: a.assert_is_compatible_with([2]), ShapeError, "incompatible")
    refused(lambda: a.with_rank(3), ShapeError, "incompatible")
    assert a.is_compatible_with([2, 7]) and not a.is_compatible_with([2, 7, 1])


def test_shapes_are_equal_by_their_sizes():
    a, x = S([2, None]), tf.placeholder(tf.float32, [2, None])
    assert a == [2, None] and a == x.shape and a != [2, 3] and a != S(None) and a != "no shape"
    assert S(None) == S(None) and S([]) != S(None) and S([2]) != 3.5
    assert hash(a) == hash(x.shape) and len({a, x.shape, S([2, None])}) == 1


@pytest.mark.parametrize(("call", "error"), [
    (lambda: S([-1]), ShapeError), (lambda: S(-1), ShapeError), (lambda: S(["a"]), ArgumentError),
    (lambda: S(None).as_list(), ShapeError), (lambda: len(S(None)), ShapeError),
    (lambda: list(S(None)), ShapeError),
])  # fmt: skip
def test_sizes_that_no_shape_has(call, error):
    refused(call, error, "rank of the TensorShape is unknown|must be >= 0|made of ints and None")


# -- dtypes --------------------------------------------------------------------------------------


def test_properties_of_dtypes():
    assert (tf.float32.as_numpy_dtype, tf.string.name, tf.int16.size) == (np.float32, "string", 2)
    assert (tf.int8.min, tf.int8.max, tf.float16.max) == (-128, 127, 65504)
    assert (tf.complex64.real_dtype, tf.int32.real_dtype) == (tf.float32, tf.int32)
    ref = tf.Variable(1.0).dtype
    assert (ref.name, ref.base_dtype, ref == tf.float32) == ("float32_ref", tf.float32, False)
    assert ref.is_compatible_with(tf.float32) and not tf.int32.is_compatible_with(np.int64)
    assert [tf.uint8.is_unsigned, tf.bool.is_bool, tf.bool.is_integer] == [True, True, False]
    assert pickle.loads(pickle.dumps(ref)) == ref and repr(tf.string) == "tf.string"
    assert tf.float32 != None and tf.float32 != "no dtype" and tf.float32 == "float32"  # noqa: E711
    assert str(tf.int32) == "<dtype: 'int32'>" and hash(tf.int32) == hash(np.dtype("int32"))


def test_values_that_name_dtypes():
    names = [str, bytes, "string", np.dtype("S3"), float, "float", int, "int64", np.dtype("u1")]
    due = [tf.string] * 4 + [tf.float32] * 2 + [tf.int64] * 2 + [tf.uint8]
    assert [tf.as_dtype(name) for name in names] == due
    for wrong in ("int", None, "no dtype", object()):
        refused(lambda wrong=wrong: tf.as_dtype(wrong), rg.errors.DTypeError, "is not a dtype")


# -- ops and tensors -----------------------------------------------------------------------------


def test_ops_print_as_text():
    x = tf.placeholder(tf.float32, [2], name="x")
    with tf.control_dependencies([tf.no_op(name="first")]):
        y = tf.reduce_sum(x, 0, keepdims=True, name="y")
    text = str(y.op)
    assert text == repr(y.op.node_def)
    head = 'name: "y"\nop: "Sum"\ninput: "x"\ninput: "y/reduction_indices"\ninput: "^first"\n'
    assert text.startswith(head)
    assert 'key: "keep_dims"\n  value {\n    b: true\n  }\n}' in text
    assert 'key: "T"\n  value {\n    type: DT_FLOAT\n  }\n}' in text
    z = tf.Print(tf.constant(["a"]), [x], "it is ", summarize=4)
    shown = str(z.op.node_def)
    assert 's: "it is "' in shown and "i: 4" in shown and "type: DT_STRING" in shown
    assert "list {\n      type: DT_FLOAT\n    }" in shown
    assert "f: 0.5" in str(tf.nn.leaky_relu(x, 0.5).op.node_def)


def test_ops_know_their_inputs_and_readers(graph):
    x = tf.constant([1.0, 2.0], name="x")
    y, z = tf.negative(x), tf.square(x)
    assert x.consumers() == [y.op, z.op]
    assert y.op == graph.get_operation_by_name("Neg") and y.op != z.op and y.op != "Neg"
    assert (y.op.values(), y.value_index, y.op.graph) == ((y,), 0, graph)
    assert len({y.op, graph.get_operation_by_name("Neg")}) == 1
    assert x.op.get_attr("dtype") == tf.float32


def test_a_tensor_has_no_value_before_the_run():
    x = tf.placeholder(tf.float32, [2], name="x")
    words = r"the value of Tensor\(\"x:0\".* is known only when the graph runs; .*session.run\(x\)"
    for call in (float, int, np.asarray, lambda x: x.numpy(), lambda x: range(2)[x]):
        refused(lambda call=call: call(x), TypeError, words)
    refused(lambda: bool(x), TypeError, "Using a `tf.Tensor` as a Python `bool` is not allowed")
    refused(lambda: bool(tf.Variable(1.0)), TypeError, "as a Python `bool` is not allowed")
    refused(lambda: list(x), TypeError, "not iterable in a graph: use tf.unstack.*x:0")
    refused(lambda: list(tf.Variable([1.0])), TypeError, "'Variable' object is not iterable")
    refused(lambda: len(x), TypeError, "len is not defined for a symbolic Tensor.*x:0")


def test_shapes_are_refined():
    x, v = tf.placeholder(tf.float32, [None, 3]), tf.Variable([[1.0]], validate_shape=False)
    x.set_shape([2, None])
    v.set_shape([None, 1])
    assert (x.shape.as_list(), v.shape.as_list(), v.value().shape.as_list()) == (
        [2, 3], [None, 1], [None, 1],
    )  # fmt: skip
    x.set_shape(None)
    refused(lambda: x.set_shape([4, 3]), ValueError, "incompatible")


def test_properties_of_a_variable(graph):
    with tf.name_scope("s"):
        v = tf.Variable([1.0, 2.0], name="v")
    assert (v.name, v.op.name, v.op.type, v.graph, v.device) == (
        "s/v:0", "s/v", "VariableV2", graph, "",
    )  # fmt: skip
    assert (v.shape, v.get_shape(), v.dtype.name) == ([2], [2], "float32_ref")
    assert repr(v) == "<tf.Variable 's/v:0' shape=(2,) dtype=float32_ref>"
    assert v == v and v != tf.Variable([1.0, 2.0]) and {v: 1}[v] == 1
    assert run(v._ref() * 2.0).tolist() == [2.0, 4.0]  # (using the reference reads the variable)
    assert run(tf.convert_to_tensor(v._ref())).tolist() == [1.0, 2.0]


@pytest.mark.parametrize(("call", "error", "words"), [
    (lambda v: v.assign([1.0, 2.0, 3.0]), ValueError, r"Assign to 'v:0': .*validate_shape=False"),
    (lambda v: v.assign_add([1.0] * 3), ValueError, r"AssignAdd to 'v:0': its shape is \(2,\)"),
    (lambda v: v.assign_sub(tf.constant([1, 2])), TypeError, "AssignSub to 'v:0': Tensor conv"),
    (lambda v: tf.assign(tf.constant(1.0), 2.0), TypeError, "expected a Variable, got"),
    (lambda v: tf.Variable(), ValueError, "initial_value must be specified"),
    (lambda v: tf.cond(tf.constant(True), lambda: tf.Variable(1.0), lambda: 1.0), ValueError,
     "cannot be made inside a branch"),
])  # fmt: skip
def test_writes_that_are_refused(call, error, words):
    v = tf.Variable([1.0, 2.0], name="v")
    refused(lambda: call(v), error, words)


def test_a_shape_that_the_run_finds_out_is_checked(session):
    v, x = tf.Variable([1.0, 2.0], name="v"), tf.placeholder(tf.float32)
    initialized(session)
    for write in (v.assign(x), v.assign_add(x)):
        refused(lambda write=write: session.run(write, {x: [1.0, 2.0, 3.0]}), ValueError)
    assert tf.assign(v, [[1.0]], validate_shape=False).op.get_attr("validate_shape") is False
    assert tf.assign(v._ref(), [5.0, 6.0]).op.get_attr("validate_shape") is True


def test_integers_that_the_run_finds_out_are_checked():
    i, table = tf.placeholder(tf.int32), tf.constant([1.0, 2.0, 3.0])
    picked = tf.gather(table, i)
    assert run(picked, {i: [0, 2]}).tolist() == [1.0, 3.0]
    refused(lambda: run(picked, {i: [0, -2]}), ValueError, "the index -2 is negative")
    quotient = tf.constant([7, 8]) // i
    assert run(quotient, {i: [2, 3]}).tolist() == [3, 2]
    refused(lambda: run(quotient, {i: [2, 0]}), ValueError, "Integer division by zero")
    assert run(tf.constant([7.0]) // tf.constant([0.0]))[0] == np.inf


# -- overrides -----------------------------------------------------------------------------------


def test_a_scope_of_a_graph_checks_its_map(graph):
    for wrong in ([("Sign", "Identity")], {"Sign": 3}, {3: "Identity"}):
        scope = graph.gradient_override_map(wrong)
        refused(scope.__enter__, TypeError, "op_type_map must be a dictionary mapping strings")
    scope = graph.gradient_override_map({"Sign": "Identity"})
    with scope:
        tf.sign(1.0)
    refused(scope.__enter__, AttributeError, "can be entered only once; make a new one")


@pytest.mark.parametrize(("rule", "due"), [
    ("Identity", [5.0, 5.0]), ("Sigmoid", [0.0, -10.0]),  # (y (1 - y) of y = 1 and y = -1)
])  # fmt: skip
def test_names_of_rules_apply_on_tapes_and_in_forward_mode(graph, rule, due):
    x, t = tf.constant([1.0, -2.0]), tf.constant([5.0, 5.0])
    with graph.gradient_override_map({"Sign": rule}):
        by_tape = rg.grad(lambda x: rg.sum(rg.sign(x) * t))(x)
        forward = rg.jvp(rg.sign, [x], [t])[1]
    found = run([tf.convert_to_tensor(by_tape), tf.convert_to_tensor(forward)])
    assert [y.tolist() for y in found] == [due, due]


def test_rules_may_use_the_gradient_of_an_op_with_inputs_that_only_tensorflow_has(graph):
    x, own = tf.constant([1.0, -2.0]), rg.rules.builtin("Sum")
    with graph.gradient_override_map({"Sum": lambda op, dy: [3.0 * own.of(op, dy)[0], None]}):
        y = tf.reduce_sum(x)
    assert run(tf.gradients(y, x)[0]).tolist() == [3.0, 3.0]


def test_the_gradients_of_a_graph_are_traced(session):
    x = tf.constant([1.0, -2.0])
    trace = tf.trace_gradients(tf.reduce_sum(x * x), x)
    assert [(step.op_type, step.path) for step in trace.steps] == [("Sum", "Sum"), ("Mul", "mul")]


def test_summaries_of_a_part_of_a_graph(graph):
    x, v = tf.constant(1.0, name="x"), tf.Variable(1.0, name="v")
    y = tf.negative(x, name="y")
    assert graph.summary([y]).splitlines()[-1] == graph.summary(y.op).splitlines()[-1]
    assert graph.summary(y).splitlines()[-1].startswith("2 ops")
    assert graph.summary(v).splitlines()[-1].startswith("2 ops")
    assert graph.summary(y._tensor) == graph.summary(y)
    refused(lambda: graph.summary(3.0), TypeError, "expected a tensor or an op, got 3.0")
    refused(lambda: graph.summary(rg.Variable(1.0)), TypeError, "expected a tensor or an op")


# -- gradients -----------------------------------------------------------------------------------


def uses_v(x):
    return x * tf.get_variable("v", initializer=1.0, use_resource=True), lambda dy, variables: [dy]


@pytest.mark.parametrize(("call", "error", "words"), [
    (lambda x: tf.gradients(x, x, unconnected_gradients="?"), ValueError, "Unknown value for unc"),
    (lambda x: tf.gradients(x, x, aggregation_method=7), ValueError, "Invalid aggregation_method"),
    (lambda x: tf.gradients(x, x, [1.0, 2.0]), ValueError, "Length mismatch. Passed 2 grad_ys"),
    (lambda x: tf.gradients(x, x, [[1.0, 2.0, 3.0]]), ValueError, r"grad_ys\[0\] has the shape"),
    (lambda x: tf.gradients(tf.cast(x, tf.complex64), x), TypeError, "must set grad_ys"),
    (lambda x: tf.gradients(x, x, [1j]), TypeError, "has the dtype complex"),
    (lambda x: tf.gradients(tf.constant("a"), x), TypeError, "strings have no gradient"),
    (lambda x: tf.hessians(tf.constant(1.0), x), ValueError, "no path leads from ys to xs"),
    (lambda x: tf.hessians(tf.reduce_sum(u := tf.placeholder(tf.float32, [None])), u), GraphError,
     "must be known when the graph is built"),
    (lambda x: tf.custom_gradient(lambda x: (x, lambda dy: dy))(x=x), ValueError, "positional"),
    (lambda x: tf.custom_gradient(lambda x: ([], lambda dy: dy))(x), TypeError, "no tensors"),
    (lambda x: tf.custom_gradient(lambda x: x)(x), TypeError, "must return a pair"),
    (lambda x: tf.gradients(tf.custom_gradient(uses_v)(x), x), ValueError, "uses variables"),
    (lambda x: tf.RegisterGradient(3), TypeError, "needs a name"),
    (lambda x: tf.NotDifferentiable(3), TypeError, "op_type must be a string"),
    (lambda x: tf.NotDifferentiable("Sign"), KeyError, "taken already by an op type"),
    (lambda x: tf.custom_gradient(lambda x: (tf.Variable(1.0) * x, lambda dy: dy))(x), TypeError,
     "makes the variable 'Variable'"),
])  # fmt: skip
def test_gradients_that_are_refused(call, error, words):
    refused(lambda: call(tf.constant([1.0, 2.0])), error, words)


def test_values_that_are_no_tensors_have_weights_and_no_gradient():
    x = tf.constant([1.0, 2.0])
    assert tf.gradients(x * x, 3.0) == [None]
    assert run(tf.gradients(x * x, x, stop_gradients=[3.0, x * 1.0])[0]).tolist() == [2.0, 4.0]
    for weights in (np.float32([10, 20]), [[10.0, 20.0]], tf.constant([10.0, 20.0]), [[10, 20]]):
        assert run(tf.gradients(x * x, x, weights)[0]).tolist() == [20.0, 80.0]
    assert run(tf.gradients(x * x, x, 10)[0]).tolist() == [20.0, 40.0]


def test_gradients_by_a_variable_inside_of_a_branch(session):
    v, x = tf.Variable([1.0, 2.0]), tf.constant(3.0)
    yes = tf.placeholder(tf.bool, [])
    inside = lambda: tf.gradients(tf.reduce_sum(v * v) * x, [v, x])  # noqa: E731
    found = tf.cond(yes, inside, lambda: [v * 0.0, x * 0.0])
    for value, due in ((True, [[6.0, 12.0], 5.0]), (False, [[0.0, 0.0], 0.0])):
        assert [y.tolist() for y in initialized(session).run(found, {yes: value})] == due


def test_custom_gradients_take_numbers_slices_and_variables_made_inside():
    @tf.custom_gradient
    def f(x):
        v = tf.Variable(2.0, use_resource=True, name="inner")
        rows = tf.IndexedSlices([[5.0]], [1], [2, 1])
        return x * v, lambda dy, **options: (rows, [7.0 for _ in options["variables"]])

    x = tf.constant([[1.0], [2.0]])
    y = f(x)
    found = run([y, *tf.gradients(y, [x, tf.global_variables()[0]])])
    assert [a.tolist() for a in found] == [[[2.0], [4.0]], [[0.0], [5.0]], 7.0]


class Doubled:
    """A function without a name."""

    def __call__(self, x):
        return x * 2.0, lambda dy: dy * 3.0


def test_custom_gradients_of_callable_objects():
    x = tf.constant(1.0)
    assert run(tf.gradients(tf.custom_gradient(Doubled())(x), x)[0]) == 3.0
