"""Variables, assignments, control dependencies, collections, variable scopes, initializers."""

import numpy as np
import pytest

import regrad.v1 as tf
from tests.helpers.v1_session import initialized

pytestmark = pytest.mark.usefixtures("graph")


# -- Variable ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "dtype", "due", "shape"),
    [
        (1, None, "int32", []),
        (1.5, None, "float32", []),
        ([[1.0, 2.0]], None, "float32", [1, 2]),
        (np.ones(3), None, "float64", [3]),
        (1, tf.float32, "float32", []),
        (True, None, "bool", []),
    ],
    ids=str,
)
def test_a_variable_has_the_dtype_and_shape_of_its_value(session, value, dtype, due, shape):
    v = tf.Variable(value, dtype=dtype)
    assert v.dtype.base_dtype.name == due
    assert (v.shape.as_list(), v.get_shape().as_list()) == (shape, shape)
    assert initialized(session).run(v).tolist() == np.asarray(value).tolist()


def test_the_value_may_be_a_tensor_or_a_function(session):
    v = tf.Variable(tf.ones([2]) * 3.0)
    w = tf.Variable(lambda: tf.constant(4.0))
    u = tf.Variable(v.initialized_value() * 2.0)
    got = initialized(session).run([v, w, u])
    assert [a.tolist() for a in got] == [[3.0, 3.0], 4.0, [6.0, 6.0]]


@pytest.mark.parametrize("jit", [False, True])
def test_a_copy_has_the_value_that_there_is(graph, jit):
    """As in TensorFlow: that of the variable, and the initial value only as long as it has none."""
    v = tf.Variable(tf.random_normal([3]))
    with tf.control_dependencies([tf.placeholder(tf.float32)]):  # (not fed: it does not wait)
        begin = v.initialized_value()
    copy = tf.Variable(begin)
    assert copy.shape.as_list() == [3]
    with tf.Session(jit=jit) as session:
        initialized(session)
        first = session.run([v, copy])
        np.testing.assert_array_equal(*first)
        session.run(copy.initializer)  # not drawn anew
        np.testing.assert_array_equal(session.run(copy), first[0])
        session.run(v.assign([1.0, 2.0, 3.0]))
        session.run(copy.initializer)
        assert session.run(copy).tolist() == [1, 2, 3]
        session.run([v.initializer, copy.initializer])
        np.testing.assert_array_equal(*session.run([v, copy]))
    with tf.Session(jit=jit) as session:  # v has no value here
        session.run(copy.initializer)
        assert np.isfinite(session.run(copy)).all()
        assert not session.run(tf.is_variable_initialized(v))


def test_the_ways_to_read(session):
    v = tf.Variable(2.0)
    initialized(session)
    assert session.run([v, v.value(), v.read_value(), v.initial_value]) == [2.0] * 4
    assert (v.eval(), v.op.type, v.graph) == (2.0, "VariableV2", tf.get_default_graph())
    assert v.value() is v.value()
    assert tf.convert_to_tensor(v) is v.value()


def test_one_variable_is_initialised_by_its_own_op(session):
    v, w, u = tf.Variable(1.0), tf.Variable(2.0), tf.Variable(3.0)
    session.run(v.initializer)
    session.run(tf.variables_initializer([w]))
    assert session.run([v, w]) == [1.0, 2.0]
    assert session.run([tf.is_variable_initialized(x) for x in (w, u)]) == [True, False]
    with pytest.raises(tf.errors.FailedPreconditionError):
        session.run(u)


OPERATORS = {
    "v + 1.0": [2.0, 3.0],
    "1.0 - v": [0.0, -1.0],
    "v * v": [1.0, 4.0],
    "2.0 / v": [2.0, 1.0],
    "-v": [-1.0, -2.0],
    "v ** 2.0": [1.0, 4.0],
    "v[1]": 2.0,
    "v > 1.0": [False, True],
    "abs(v)": [1.0, 2.0],
    "tf.reduce_sum(v)": 3.0,
}


@pytest.mark.parametrize("expression", OPERATORS)
def test_a_variable_computes_as_a_tensor_does(session, expression):
    y = eval(expression, {"tf": tf, "v": tf.Variable([1.0, 2.0])})
    assert isinstance(y, tf.Tensor)
    assert initialized(session).run(y).tolist() == OPERATORS[expression]


# -- assignments ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "due"),
    [
        (lambda v: tf.assign(v, [5.0, 6.0]), [5.0, 6.0]),
        (lambda v: tf.assign_add(v, [1.0, 1.0]), [2.0, 3.0]),
        (lambda v: tf.assign_sub(v, [1.0, 1.0]), [0.0, 1.0]),
        (lambda v: v.assign([5.0, 6.0]), [5.0, 6.0]),
        (lambda v: v.assign_add([1.0, 1.0]), [2.0, 3.0]),
        (lambda v: v.assign_sub([1.0, 1.0]), [0.0, 1.0]),
        (lambda v: v.assign(v * tf.constant(3.0)), [3.0, 6.0]),
    ],
)
def test_assignments_give_the_new_value(session, build, due):
    v = tf.Variable([1.0, 2.0])
    assignment = build(v)
    doubled = assignment * 2.0
    initialized(session)
    assert session.run(assignment).tolist() == due
    initialized(session)
    assert session.run(doubled).tolist() == [2.0 * x for x in due]
    assert session.run(v).tolist() == due
    initialized(session)
    assert session.run(assignment.op) is None
    assert session.run(v).tolist() == due


def test_assignments_are_checked():
    v = tf.Variable([1.0, 2.0])
    with pytest.raises(ValueError):
        tf.assign(v, [1.0, 2.0, 3.0])
    for wrong in (tf.constant([1, 2]), tf.constant([1.0, 2.0], tf.float64)):
        with pytest.raises((TypeError, ValueError)):
            tf.assign(v, wrong)


def test_a_shape_changes_only_on_request(session):
    v = tf.Variable([1.0, 2.0], validate_shape=False)
    longer = tf.assign(v, [1.0, 2.0, 3.0], validate_shape=False)
    assert initialized(session).run(longer).tolist() == [1.0, 2.0, 3.0]
    assert session.run(v.value()).tolist() == [1.0, 2.0, 3.0]


def test_an_assignment_has_no_gradient():
    v, x = tf.Variable(1.0), tf.constant(2.0)
    assert tf.gradients(tf.assign(v, x * x), [x]) == [None]


def test_an_assigned_value_is_what_was_computed_before_it_changed(session):
    a, b = tf.Variable(1.0), tf.Variable(2.0)
    x, y = tf.identity(a), tf.identity(b)
    with tf.control_dependencies([x, y]):
        swap = tf.group(a.assign(y), b.assign(x))
    initialized(session).run(swap)
    assert session.run([a, b]) == [2.0, 1.0]


# -- control dependencies ------------------------------------------------------------------------


def test_what_was_made_before_does_not_wait(session):
    v = tf.Variable(1.0)
    before = v * 10.0
    with tf.control_dependencies([v.assign_add(1.0)]):
        after = tf.identity(v.read_value()) * 10.0
        same = before
    initialized(session)
    assert session.run(same) == 10.0
    assert session.run(after) == 20.0
    assert session.run(v) == 2.0


def test_dependencies_add_up_and_can_be_cleared():
    a, b = tf.no_op(name="a"), tf.constant(1.0, name="b")
    with tf.control_dependencies([a]):
        with tf.control_dependencies([b]):
            both = tf.no_op()
        with tf.control_dependencies(None):
            none = tf.no_op()
    assert {op.name for op in both.control_inputs} == {"a", "b"}
    assert list(none.control_inputs) == []


def test_groups_run_everything(session):
    v, w = tf.Variable(1.0), tf.Variable(1.0)
    both = tf.group(v.assign(5.0), w.assign(6.0))
    assert both.type == "NoOp"
    assert initialized(session).run([both, tf.no_op()]) == [None, None]
    assert session.run([v, w]) == [5.0, 6.0]


def test_dependencies_on_what_is_not_in_the_graph():
    with tf.Graph().as_default():
        other = tf.constant(1.0)
    with pytest.raises((TypeError, ValueError)), tf.control_dependencies([other]):
        tf.no_op()
    with pytest.raises(TypeError), tf.control_dependencies([3]):
        pass


# -- collections ---------------------------------------------------------------------------------


def test_collections_hold_variables_in_order():
    a, b = tf.Variable(1.0), tf.Variable(1.0, trainable=False)
    c = tf.get_variable("c", [])
    assert [v.op.name for v in tf.global_variables()] == [v.op.name for v in (a, b, c)]
    assert tf.trainable_variables() == [a, c]
    assert tf.GraphKeys.TRAINABLE_VARIABLES == "trainable_variables"
    assert tf.GraphKeys.GLOBAL_VARIABLES == "variables"


def test_a_collection_comes_as_a_copy(graph):
    tf.add_to_collection("mine", 1)
    tf.get_collection("mine").append(2)
    assert tf.get_collection("mine") == graph.get_collection("mine") == [1]
    tf.get_collection_ref("mine").append(3)
    assert tf.get_collection("mine") == [1, 3]
    with tf.Graph().as_default():
        assert tf.get_collection("mine") == []


def test_variables_can_be_put_into_other_collections():
    v = tf.Variable(1.0, collections=["mine"])
    assert tf.get_collection("mine") == [v]
    assert tf.global_variables() == []


# -- get_variable, variable_scope ----------------------------------------------------------------


def test_the_older_scope_takes_a_default_name():
    with tf.variable_op_scope([], None, "net") as scope:
        assert scope.name == "net"


def test_a_scope_has_the_constraint_of_its_variables():
    def at_most_one(v):
        return tf.clip_by_value(v, -1.0, 1.0)

    with tf.Session() as sess, tf.variable_scope("s", constraint=at_most_one):
        v = tf.get_variable("v", [], initializer=tf.zeros_initializer())
        own = tf.get_variable("own", [], constraint=tf.negative)
        assert own.constraint is tf.negative
        step = tf.train.GradientDescentOptimizer(1.0).minimize(tf.square(v - 10.0), var_list=[v])
        sess.run(tf.global_variables_initializer())
        sess.run(step)
        assert sess.run(v) == 1.0


def test_get_variable_makes_and_shares():
    with tf.variable_scope("s"):
        v = tf.get_variable("v", [2])
    with tf.variable_scope("s", reuse=True):
        assert tf.get_variable("v", [2]) is v
        assert tf.get_variable("v") is v
    with tf.variable_scope("s") as scope:
        scope.reuse_variables()
        assert tf.get_variable("v") is v
    with tf.variable_scope(scope, reuse=True):
        assert tf.get_variable("v") is v
    assert v.name == "s/v:0"


def test_get_variable_refuses_what_was_not_meant():
    with tf.variable_scope("s"):
        tf.get_variable("v", [2])
        with pytest.raises(ValueError, match="s/v"):
            tf.get_variable("v", [2])
        with pytest.raises(ValueError):
            tf.get_variable("no_shape")
    with tf.variable_scope("s", reuse=True):
        with pytest.raises(ValueError, match="s/w"):
            tf.get_variable("w", [2])
        with pytest.raises(ValueError):
            tf.get_variable("v", [3])
        with pytest.raises(ValueError):
            tf.get_variable("v", [2], tf.int32)


def test_auto_reuse_makes_or_shares():
    def layer():
        with tf.variable_scope("layer", reuse=tf.AUTO_REUSE):
            return tf.get_variable("w", [2])

    assert layer() is layer()
    assert len(tf.global_variables()) == 1


def test_variable_scopes_nest_and_open_name_scopes():
    with tf.variable_scope("a"), tf.variable_scope("b") as scope:
        v = tf.get_variable("v", [])
        x = tf.constant(1.0, name="x")
    with tf.variable_scope("a"):
        y = tf.constant(1.0, name="y")
    with tf.name_scope("n"):
        w = tf.get_variable("w", [])
    assert (scope.name, v.name, x.name) == ("a/b", "a/b/v:0", "a/b/x:0")
    assert (y.name, w.name) == ("a_1/y:0", "w:0")
    assert tf.get_variable_scope().name == ""


def test_a_scope_has_a_default_initializer(session):
    with tf.variable_scope("s", initializer=tf.constant_initializer(3.0)):
        v = tf.get_variable("v", [2])
        w = tf.get_variable("w", initializer=tf.constant([7.0]), trainable=False)
        u = tf.get_variable("u", initializer=np.float32(8.0))
    got = initialized(session).run([v, w, u])
    assert [a.tolist() for a in got] == [[3.0, 3.0], [7.0], 8.0]
    assert tf.trainable_variables() == [v, u]


# -- initializers --------------------------------------------------------------------------------


SHAPE = [40, 60]
LIMIT = np.sqrt(6.0 / 100.0)


@pytest.mark.parametrize(
    ("initializer", "low", "high", "mean", "deviation"),
    [
        (lambda: tf.zeros_initializer(), 0.0, 0.0, 0.0, 0.0),
        (lambda: tf.ones_initializer(), 1.0, 1.0, 1.0, 0.0),
        (lambda: tf.constant_initializer(2.5), 2.5, 2.5, 2.5, 0.0),
        (lambda: tf.random_uniform_initializer(-1.0, 3.0), -1.0, 3.0, 1.0, 4 / 12**0.5),
        (lambda: tf.random_normal_initializer(2.0, 0.5), -1.0, 5.0, 2.0, 0.5),
        (lambda: tf.truncated_normal_initializer(0.0, 0.1), -0.2, 0.2, 0.0, 0.088),
        (lambda: tf.glorot_uniform_initializer(), -LIMIT, LIMIT, 0.0, LIMIT / 3**0.5),
        (lambda: None, -LIMIT, LIMIT, 0.0, LIMIT / 3**0.5),
    ],
    ids=["zeros", "ones", "constant", "uniform", "normal", "truncated", "glorot", "default"],
)
def test_initializers(session, initializer, low, high, mean, deviation):
    tf.set_random_seed(0)
    v = tf.get_variable("v", SHAPE, initializer=initializer())
    got = initialized(session).run(v)
    assert (got.shape, got.dtype) == (tuple(SHAPE), np.float32)
    assert got.min() >= low
    assert got.max() <= high
    np.testing.assert_allclose(got.mean(), mean, atol=0.1 * deviation)
    np.testing.assert_allclose(got.std(), deviation, rtol=0.05)


def test_a_seed_repeats_the_values():
    def values(graph_seed, seed=None):
        with tf.Graph().as_default(), tf.Session() as session:
            tf.set_random_seed(graph_seed)
            v = tf.Variable(tf.random_normal([5], seed=seed))
            return initialized(session).run(v).tolist()

    assert values(1) == values(1) != values(2)
    assert values(1, 3) == values(1, 3) != values(1, 4)
