"""Variables, assignments, control dependencies, collections, variable scopes, initializers."""

import numpy as np
import pytest

import regrad.v1 as tf
from tests.helpers.rows import refused
from tests.helpers.v1_session import any_session, initialized, run

pytestmark = pytest.mark.usefixtures("graph")
session = any_session


# -- Variable ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "dtype", "due", "shape"), [
    (1, None, "int32", []), (1.5, None, "float32", []), ([[1.0, 2.0]], None, "float32", [1, 2]),
    (np.ones(3), None, "float64", [3]), (1, tf.float32, "float32", []), (True, None, "bool", []),
], ids=str)  # fmt: skip
def test_a_variable_has_the_dtype_and_shape_of_its_value(value, dtype, due, shape):
    v = tf.Variable(value, dtype=dtype)
    assert v.dtype.base_dtype.name == due
    assert v.shape.as_list() == v.get_shape().as_list() == shape
    assert run(v).tolist() == np.asarray(value).tolist()


def test_the_value_may_be_a_tensor_or_a_function():
    v = tf.Variable(tf.ones([2]) * 3.0)
    w, u = tf.Variable(lambda: tf.constant(4.0)), tf.Variable(v.initialized_value() * 2.0)
    assert [a.tolist() for a in run([v, w, u])] == [[3.0, 3.0], 4.0, [6.0, 6.0]]


def test_a_copy_has_the_value_that_there_is(session):
    """As in TensorFlow: that of the variable, and the initial value only as long as it has none."""
    v = tf.Variable(tf.random_normal([3]))
    with tf.control_dependencies([tf.placeholder(tf.float32)]):  # (not fed: it does not wait)
        begin = v.initialized_value()
    copy = tf.Variable(begin)
    assert copy.shape.as_list() == [3]
    session.run(copy.initializer)  # v has no value here
    assert np.isfinite(session.run(copy)).all()
    assert not session.run(tf.is_variable_initialized(v))
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
    y = tf.cond(tf.is_variable_initialized(u), u.read_value, lambda: tf.constant(-1.0))
    assert session.run(y) == -1.0
    with pytest.raises(tf.errors.FailedPreconditionError, match="uninitialized value Variable_2"):
        session.run(u * 2.0)
    session.run(u.initializer)
    assert session.run(y) == 3.0


# -- assignments ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("build", "due"), [
    (lambda v: tf.assign(v, [5.0, 6.0]), [5.0, 6.0]), (lambda v: v.assign([5.0, 6.0]), [5.0, 6.0]),
    (lambda v: tf.assign_add(v, [1.0, 1.0]), [2.0, 3.0]),
    (lambda v: tf.assign_sub(v, [1.0, 1.0]), [0.0, 1.0]),
    (lambda v: v.assign_add([1.0, 1.0]), [2.0, 3.0]),
    (lambda v: v.assign_sub([1.0, 1.0]), [0.0, 1.0]),
    (lambda v: v.assign(v * tf.constant(3.0)), [3.0, 6.0]),
])  # fmt: skip
def test_assignments_give_the_new_value(session, build, due):
    v, x = tf.Variable([1.0, 2.0]), tf.constant(2.0)
    assignment = build(v)
    fetches = [(assignment, due), (assignment * x, [2.0 * y for y in due]), (assignment.op, None)]
    assert tf.gradients(assignment * 1.0, x) == [None]
    for fetch, expected in fetches:
        found = initialized(session).run(fetch)
        assert (found if expected is None else found.tolist()) == expected
        assert session.run(v).tolist() == due


def test_assignments_are_checked_and_have_no_gradient():
    v, x = tf.Variable([1.0, 2.0]), tf.constant([2.0, 2.0])
    with pytest.raises(ValueError):
        tf.assign(v, [1.0, 2.0, 3.0])
    for wrong in (tf.constant([1, 2]), tf.constant([1.0, 2.0], tf.float64)):
        with pytest.raises((TypeError, ValueError)):
            tf.assign(v, wrong)
    assert tf.gradients(tf.assign(v, x * x), [x]) == [None]


def test_a_shape_changes_only_on_request(session):
    v = tf.Variable([1.0, 2.0], validate_shape=False)
    longer = tf.assign(v, [1.0, 2.0, 3.0], validate_shape=False)
    assert initialized(session).run(longer).tolist() == [1.0, 2.0, 3.0]
    assert session.run(v.value()).tolist() == [1.0, 2.0, 3.0]


def test_an_assigned_value_is_what_was_computed_before_it_changed(session):
    a, b = tf.Variable(1.0), tf.Variable(2.0)
    x, y = tf.identity(a), tf.identity(b)
    with tf.control_dependencies([x, y]):
        swap = tf.group(a.assign(y), b.assign(x))
    assert swap.type == "NoOp"
    assert initialized(session).run([swap, tf.no_op()]) == [None, None]
    assert session.run([a, b]) == [2.0, 1.0]


# -- control dependencies ------------------------------------------------------------------------


def test_what_was_made_before_does_not_wait(session):
    v = tf.Variable(1.0)
    before = v * 10.0
    with tf.control_dependencies([v.assign_add(1.0)]):
        after, same = tf.identity(v.read_value()) * 10.0, before
    initialized(session)
    assert [session.run(y) for y in (same, after, v)] == [10.0, 20.0, 2.0]


def test_dependencies_add_up_and_can_be_cleared():
    a, b = tf.no_op(name="a"), tf.constant(1.0, name="b")
    with tf.control_dependencies([a]):
        with tf.control_dependencies([b]):
            both = tf.no_op()
        with tf.control_dependencies(None):
            none = tf.no_op()
    assert {op.name for op in both.control_inputs} == {"a", "b"}
    assert list(none.control_inputs) == []


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
    c, mine = tf.get_variable("c", []), tf.Variable(1.0, False, collections=["mine"])
    assert tf.global_variables() == [a, b, c]
    assert tf.trainable_variables() == [a, c]
    assert tf.get_collection("mine") == [mine]
    names = tf.GraphKeys.TRAINABLE_VARIABLES, tf.GraphKeys.GLOBAL_VARIABLES
    assert names == ("trainable_variables", "variables")


def test_a_collection_comes_as_a_copy(graph):
    tf.add_to_collection("mine", 1)
    tf.get_collection("mine").append(2)
    assert tf.get_collection("mine") == graph.get_collection("mine") == [1]
    tf.get_collection_ref("mine").append(3)
    assert tf.get_collection("mine") == [1, 3]
    with tf.Graph().as_default():
        assert tf.get_collection("mine") == []


# -- get_variable, variable_scope ----------------------------------------------------------------


def test_a_scope_has_the_constraint_of_its_variables(session):
    at_most_one = lambda v: tf.clip_by_value(v, -1.0, 1.0)  # noqa: E731
    with tf.variable_scope("s", constraint=at_most_one):
        v = tf.get_variable("v", [], initializer=tf.zeros_initializer())
        own = tf.get_variable("own", [], constraint=tf.negative)
    assert own.constraint is tf.negative
    step = tf.train.GradientDescentOptimizer(1.0).minimize(tf.square(v - 10.0), var_list=[v])
    initialized(session).run(step)
    assert session.run(v) == 1.0


def test_get_variable_makes_and_shares():
    def layer():
        with tf.variable_scope("s", reuse=tf.AUTO_REUSE):
            return tf.get_variable("v", [2])

    v = layer()
    assert layer() is v
    assert tf.global_variables() == [v]
    with tf.variable_scope("s", reuse=True):
        assert tf.get_variable("v", [2]) is v
        assert tf.get_variable("v") is v
    with tf.variable_scope("s") as scope:
        scope.reuse_variables()
        assert tf.get_variable("v") is v
    with tf.variable_scope(scope, reuse=True):
        assert tf.get_variable("v") is v
    assert v.name == "s/v:0"


@pytest.mark.parametrize(("reuse", "arguments", "words"), [
    (None, ("v", [2]), "s/v"), (None, ("no_shape",), "."), (True, ("w", [2]), "s/w"),
    (True, ("v", [3]), "."), (True, ("v", [2], tf.int32), "."),
])  # fmt: skip
def test_get_variable_refuses_what_was_not_meant(reuse, arguments, words):
    with tf.variable_scope("s"):
        tf.get_variable("v", [2])
    with tf.variable_scope("s", reuse=reuse), pytest.raises(ValueError, match=words):
        tf.get_variable(*arguments)


def test_values_of_variables_that_are_not_functions_of_a_shape(session):
    value = tf.get_variable("value", initializer=[1, 2])
    made = tf.get_variable("made", initializer=lambda: tf.ones([3]))
    double = tf.get_variable("double", dtype=tf.float64, initializer=np.float64(3.0))
    found = [v.tolist() for v in initialized(session).run([value, made, double])]
    assert found == [[1, 2], [1.0, 1.0, 1.0], 3.0]
    refused(lambda: tf.get_variable("both", [2], initializer=[1.0, 2.0]), ValueError, r"\(both\)")
    words = "share variable made, but specified shape .4,. and dtype float32, and found shape .3,. "
    with tf.variable_scope("", reuse=True):
        refused(lambda: tf.get_variable("made", [4]), ValueError, words)


def test_a_scope_lists_its_variables_and_takes_an_initializer():
    refused(lambda: tf.variable_scope(None).__enter__(), TypeError, "or a default_name")
    with tf.variable_scope("s", reuse=tf.AUTO_REUSE) as scope:
        scope.set_initializer(tf.ones_initializer())
        v, w = tf.get_variable("v", [2]), tf.get_variable("w", [2], trainable=False)
        assert scope.initializer.dtype == tf.float32
    assert (scope.global_variables(), scope.trainable_variables()) == ([v, w], [v])
    assert repr(scope) == "<VariableScope 's' reuse=AUTO_REUSE>"


def test_variable_scopes_nest_and_open_name_scopes():
    with tf.variable_scope("a"), tf.variable_scope("b") as scope:
        names = [scope, tf.get_variable("v", []), tf.constant(1.0, name="x")]
    with tf.variable_scope("a"):
        names += [tf.constant(1.0, name="y")]
    with tf.name_scope("n"):
        names += [tf.get_variable("w", [])]
    with tf.variable_op_scope([], None, "net") as older:
        names += [older]
    assert [x.name for x in names] == ["a/b", "a/b/v:0", "a/b/x:0", "a_1/y:0", "w:0", "net"]
    assert tf.get_variable_scope().name == ""


def test_a_scope_has_a_default_initializer():
    with tf.variable_scope("s", initializer=tf.constant_initializer(3.0)):
        v = tf.get_variable("v", [2])
        w = tf.get_variable("w", initializer=tf.constant([7.0]), trainable=False)
        u = tf.get_variable("u", initializer=np.float32(8.0))
    assert [a.tolist() for a in run([v, w, u])] == [[3.0, 3.0], [7.0], 8.0]
    assert tf.trainable_variables() == [v, u]


# -- initializers --------------------------------------------------------------------------------


LIMIT = np.sqrt(6.0 / 100.0)
INITIALIZERS = {  # and the least, the largest and the mean value, and the standard deviation
    "zeros": (tf.zeros_initializer, 0.0, 0.0, 0.0, 0.0),
    "ones": (tf.ones_initializer, 1.0, 1.0, 1.0, 0.0),
    "constant": (lambda: tf.constant_initializer(2.5), 2.5, 2.5, 2.5, 0.0),
    "uniform": (lambda: tf.random_uniform_initializer(-1.0, 3.0), -1.0, 3.0, 1.0, 4 / 12**0.5),
    "normal": (lambda: tf.random_normal_initializer(2.0, 0.5), -1.0, 5.0, 2.0, 0.5),
    "truncated": (lambda: tf.truncated_normal_initializer(0.0, 0.1), -0.2, 0.2, 0.0, 0.088),
    "glorot": (tf.glorot_uniform_initializer, -LIMIT, LIMIT, 0.0, LIMIT / 3**0.5),
    "default": (lambda: None, -LIMIT, LIMIT, 0.0, LIMIT / 3**0.5),
    "a class": (lambda: tf.zeros_initializer, 0.0, 0.0, 0.0, 0.0),
}


@pytest.mark.parametrize("name", INITIALIZERS)
def test_initializers(name):
    make, low, high, mean, deviation = INITIALIZERS[name]
    tf.set_random_seed(0)
    got = run(tf.get_variable("v", [40, 60], initializer=make()))
    assert (got.shape, got.dtype) == ((40, 60), np.float32)
    assert low <= got.min() <= got.max() <= high
    np.testing.assert_allclose(got.mean(), mean, atol=0.1 * deviation)
    np.testing.assert_allclose(got.std(), deviation, rtol=0.05)


FANS = {(40, 60): (40, 60), (3, 3, 20, 30): (180, 270)}


@pytest.mark.parametrize("shape", FANS)
@pytest.mark.parametrize(("make", "variance"), [
    (tf.glorot_uniform_initializer, lambda i, o: 2 / (i + o)),
    (tf.glorot_normal_initializer, lambda i, o: 2 / (i + o)),
    (tf.variance_scaling_initializer, lambda i, o: 1 / i),
    (lambda: tf.variance_scaling_initializer(3.0, "fan_out", "normal"), lambda i, o: 3 / o),
    (lambda: tf.variance_scaling_initializer(2.0, distribution="uniform"), lambda i, o: 2 / i),
    (tf.initializers.he_normal, lambda i, o: 2 / i),
    (tf.initializers.he_uniform, lambda i, o: 2 / i),
    (tf.initializers.lecun_normal, lambda i, o: 1 / i),
])  # fmt: skip
def test_scaled_initializers(make, variance, shape):
    got = run(make()(shape))
    assert (got.shape, got.dtype) == (shape, np.float32)
    due = np.sqrt(variance(*FANS[shape]))
    assert abs(got.std() / due - 1) < 0.06
    assert abs(got.mean()) < 0.1 * due


@pytest.mark.parametrize(("call", "error", "words"), [
    (lambda init: init.Zeros()([None]), ValueError, "fully defined"),
    (lambda init: init.Initializer()([2]), NotImplementedError, ""),
    (lambda init: init.VarianceScaling(0.0), ValueError, "`scale` must be positive"),
    (lambda init: init.VarianceScaling(mode="fans"), ValueError, "Invalid `mode` argument: 'fans'"),
    (lambda init: init.VarianceScaling(distribution="x"), ValueError, "Invalid `distribution`"),
    (lambda init: init.Orthogonal()([3]), ValueError, "two axes or more"),
    (lambda init: init.Identity()([2, 2, 2]), ValueError, "2D"),
])  # fmt: skip
def test_initializers_refuse_what_makes_no_sense(call, error, words):
    refused(lambda: call(tf.initializers), error, words)


def test_classes_of_initializers():
    known = tf.initializers
    assert tf.glorot_uniform_initializer is known.glorot_uniform is known.GlorotUniform
    assert (known.HeNormal.__name__, known.HeNormal(seed=3).seed) == ("HeNormal", 3)
    assert isinstance(known.lecun_uniform(), known.VarianceScaling)
    assert (known.LecunNormal().mode, known.LecunNormal().distribution) == (
        "fan_in", "truncated_normal")  # fmt: skip


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (2, 3, 4)])
def test_orthogonal(shape):
    q = run(tf.orthogonal_initializer(gain=2.0)(shape)).reshape(-1, shape[-1])
    square = q @ q.T if q.shape[0] < q.shape[1] else q.T @ q
    np.testing.assert_allclose(square, 4 * np.eye(len(square)), rtol=1e-4, atol=1e-5)


def test_constants():
    init = tf.constant_initializer([1, 2, 3])
    assert run(init([2, 2], tf.int32)).tolist() == [[1, 2], [3, 3]]
    assert run(tf.zeros_initializer()([2], tf.bool)).tolist() == [False, False]
    assert run(tf.ones_initializer(tf.float64)([2])).dtype == np.float64
    assert run(tf.initializers.identity(gain=3.0)([2, 2])).tolist() == [[3, 0], [0, 3]]


def test_a_seed_repeats_the_values():
    def values(graph_seed, seed=None):
        with tf.Graph().as_default():
            tf.set_random_seed(graph_seed)
            made = tf.glorot_uniform_initializer(seed)([5])
            return run([tf.Variable(tf.random_normal([5], seed=seed)), made])

    same = lambda a, b: [x.tolist() == y.tolist() for x, y in zip(a, b, strict=True)]  # noqa: E731

    assert same(values(1), values(1)) == same(values(1, 3), values(1, 3)) == [True, True]
    assert same(values(1), values(2)) == same(values(1, 3), values(1, 4)) == [False, False]
