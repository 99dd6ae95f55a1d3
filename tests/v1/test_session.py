"""Sessions: fetches, feeds, errors, what is known before a run, and what a run leaves behind."""

import collections
import gc
import tracemalloc
import weakref

import numpy as np
import pytest

import regrad.v1 as tf

pytestmark = pytest.mark.usefixtures("graph")

Pair = collections.namedtuple("Pair", "a b")


# -- fetches -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("structure", "due"),
    [
        (lambda x, y: x, 1.0),
        (lambda x, y: [x], [1.0]),
        (lambda x, y: (x, y), (1.0, 2.0)),
        (lambda x, y: {"a": x, "b": [y, x]}, {"a": 1.0, "b": [2.0, 1.0]}),
        (lambda x, y: Pair(x, (y,)), Pair(1.0, (2.0,))),
        (lambda x, y: collections.OrderedDict(b=x, a=y), collections.OrderedDict(b=1.0, a=2.0)),
        (lambda x, y: collections.defaultdict(int, b=x), collections.defaultdict(int, b=1.0)),
        (lambda x, y: [[], {}, ()], [[], {}, ()]),
        (lambda x, y: [], []),
        (lambda x, y: "x:0", 1.0),
        (lambda x, y: "x", None),
        (lambda x, y: [x.op, y], [None, 2.0]),
    ],
)
def test_results_have_the_structure_of_the_fetches(session, structure, due):
    x, y = tf.constant(1.0, name="x"), tf.constant(2.0)
    got = session.run(structure(x, y))
    assert got == due
    assert isinstance(due, float) or type(got) is type(due)


def test_variables_are_fetched(session):
    v = tf.Variable([1.0, 2.0])
    assert session.run([v.initializer, tf.global_variables_initializer()]) == [None, None]
    assert session.run({"v": v})["v"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("value", "kind", "shown"),
    [
        (-1, np.int32, "-1"),
        (-1.0, np.float32, "-1.0"),
        (0.1, np.float32, "0.1"),
        (np.float64(0.1), np.float64, "0.1"),
        (np.int64(7), np.int64, "7"),
        (float("nan"), np.float32, "nan"),
    ],
)
def test_scalars_are_numpy_scalars_and_print_plainly(session, value, kind, shown):
    got = session.run([tf.constant(value)])
    assert isinstance(got[0], kind)
    assert (str(got), str(got[0]), repr(got[0])) == (f"[{shown}]", shown, shown)


def test_bools_and_strings_are_fetched(session):
    assert session.run([tf.constant(True), tf.constant(False)]) == [True, False]
    assert session.run(tf.constant("abc")) == b"abc"
    assert session.run(tf.constant(["a", "bc"])).tolist() == [b"a", b"bc"]


def test_scalars_compute_as_numbers_do(session):
    one = session.run(tf.constant(1.5))
    assert (one + 1, one * 2, float(one), one == 1.5, -one) == (2.5, 3.0, 1.5, True, -1.5)
    assert (one + np.ones(2, np.float32)).dtype == np.float32
    assert {one: "a"}[1.5] == "a"


def test_arrays_have_the_tensors_dtype_and_belong_to_the_caller(session):
    x = tf.constant([[1, 2], [3, 4]], tf.int64)
    got = session.run(x)
    assert (type(got), got.dtype, got.shape) == (np.ndarray, np.int64, (2, 2))
    assert session.run(tf.zeros([0, 3])).shape == (0, 3)


def test_a_run_is_one_snapshot(session):
    r, v = tf.random_uniform([]), tf.Variable(1.0)
    up = tf.assign_add(v, 1.0)
    session.run(tf.global_variables_initializer())
    a, b, [c] = session.run([r, r, [r * 1.0]])
    assert a == b == c != session.run(r)
    assert session.run([up, up, up]) == [2.0, 2.0, 2.0]
    assert session.run(v) == 2.0


def test_only_what_is_needed_runs(session):
    calls = []
    x = tf.placeholder(tf.float32)
    y = tf.py_func(lambda: calls.append(1) or np.float32(1.0), [], tf.float32)
    assert session.run(tf.constant(2.0) * 3.0) == 6.0
    assert session.run(y * 2.0) == 2.0
    assert calls == [1]
    assert session.run(x * y, {x: 3.0, y: 5.0}) == 15.0
    assert calls == [1]


class Foreign:
    def __repr__(self):  # ids of tests must not vary
        return "a foreign object"


@pytest.mark.parametrize(
    ("fetch", "error"),
    [
        (None, TypeError),
        ([None], TypeError),
        ({"a": None}, TypeError),
        (1.5, TypeError),
        (Foreign(), TypeError),
        (np.ones(2), TypeError),
        ("nope", ValueError),
        ("nope:0", ValueError),
        ("x:1", ValueError),
    ],
    ids=str,
)
def test_what_cannot_be_fetched(session, fetch, error):
    tf.constant(1.0, name="x")
    with pytest.raises(error):
        session.run(fetch)


def test_a_tensor_of_another_graph_cannot_be_fetched(session):
    tf.constant(1.0)
    with tf.Graph().as_default():
        y = tf.constant(2.0, name="elsewhere")
    with pytest.raises(ValueError, match="elsewhere"):
        session.run(y)


# -- feeds ---------------------------------------------------------------------------------------


def test_any_tensor_can_be_fed(session):
    x, c = tf.placeholder(tf.float32, [2], name="p"), tf.constant([1.0, 1.0])
    h = x * c
    y = h * h
    (dx,) = tf.gradients(y, x)
    base = session.run([y, dx], {x: [1.0, 2.0]})
    assert [a.tolist() for a in base] == [[1.0, 4.0], [2.0, 4.0]]
    assert session.run(y, {"p:0": (3.0, 0.0)}).tolist() == [9.0, 0.0]
    assert session.run(y, {x: np.array([1.0, 2.0]), c: [10.0, 1.0]}).tolist() == [100.0, 4.0]
    assert session.run(y, {h: [5.0, 6.0]}).tolist() == [25.0, 36.0]
    assert session.run(dx * 2.0, {dx: [1.0, 1.0]}).tolist() == [2.0, 2.0]


def test_a_placeholder_with_a_default(session):
    x = tf.constant([1.0, 2.0])
    y = tf.placeholder_with_default(x, [None])
    assert (y.op.type, y.name, y.shape.as_list()) == (
        "PlaceholderWithDefault", "PlaceholderWithDefault:0", [None],
    )  # fmt: skip
    assert y.op.get_attr("dtype") == tf.float32 and y.op.inputs[0] is x
    assert tf.get_static_value(y) is None
    dx = tf.gradients(y * y, x)[0]
    assert session.run([y, dx])[1].tolist() == [2, 4]
    assert session.run(y, {y: [3.0]}).tolist() == [3]


def test_a_fed_variable_keeps_its_value(session):
    v, unset = tf.Variable(1.0), tf.Variable(2.0)
    session.run(v.initializer)
    assert session.run(v * unset, {v: 10.0, unset: 3.0}) == 30.0
    assert session.run(v) == 1.0


@pytest.mark.parametrize(
    ("dtype", "value", "due"),
    [
        (tf.int32, 1.7, 1),
        (tf.float32, True, 1.0),
        (tf.float64, 3, 3.0),
        (tf.float32, np.float64(0.1), np.float32(0.1)),
        (tf.bool, True, True),
    ],
)
def test_fed_values_take_the_tensors_dtype(session, dtype, value, due):
    p = tf.placeholder(dtype, [])
    got = session.run(tf.identity(p), {p: value})
    assert (got, got.dtype) == (due, dtype.as_numpy_dtype)


def test_none_in_a_float_feed_is_nan(session):
    p = tf.placeholder(tf.float32, [2])
    assert np.isnan(session.run(tf.identity(p), {p: [None, 1.0]})).tolist() == [True, False]


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ([1.0, 2.0, 3.0], ValueError, r"\(3,\).*p:0.*\(2,\)"),
        (1.0, ValueError, r"\(\).*p:0.*\(2,\)"),
        ("text", ValueError, "p:0"),
        (["a", "b"], ValueError, "could not convert"),
    ],
)
def test_values_that_cannot_be_fed(session, value, error, words):
    p = tf.placeholder(tf.float32, [2], name="p")
    with pytest.raises(error, match=words):
        session.run(tf.identity(p), {p: value})


def test_a_partly_known_shape_is_checked(session):
    p = tf.placeholder(tf.float32, [None, 2])
    assert session.run(tf.identity(p), {p: np.ones((3, 2))}).shape == (3, 2)
    with pytest.raises(ValueError, match=r"\(3, 1\)"):
        session.run(tf.identity(p), {p: np.ones((3, 1))})


@pytest.mark.parametrize("key", [3, None, "nope:0", Foreign()], ids=str)
def test_keys_that_cannot_be_fed(session, key):
    x = tf.constant(1.0)
    with pytest.raises(TypeError):
        session.run(x, {key: 1.0})


# -- errors of a run -----------------------------------------------------------------------------


def test_a_missing_feed_names_the_placeholder(session):
    p = tf.placeholder(tf.float32, [2], name="pp")
    with pytest.raises(tf.errors.InvalidArgumentError, match="'pp'") as caught:
        session.run(p * 2.0)
    assert isinstance(caught.value, tf.errors.OpError)
    assert "[2]" in str(caught.value)


def test_shapes_that_clash_in_the_run(session):
    a, b = tf.placeholder(tf.float32), tf.placeholder(tf.float32)
    with pytest.raises(tf.errors.InvalidArgumentError, match="Incompatible shapes"):
        session.run(a + b, {a: [1.0, 2.0, 3.0], b: [1.0, 2.0]})


def test_an_uninitialised_variable_is_named(session):
    v = tf.Variable(1.0, name="vv")
    with pytest.raises(tf.errors.FailedPreconditionError, match="vv"):
        session.run(v + 1.0)


def test_a_closed_session(graph):
    x = tf.constant(1.0)
    with tf.Session() as session:
        assert session.run(x) == 1.0
    with pytest.raises(RuntimeError, match="closed"):
        session.run(x)


# -- which session, which graph ------------------------------------------------------------------


def test_state_belongs_to_the_session():
    v = tf.Variable(1.0)
    up, init = v.assign_add(1.0), tf.global_variables_initializer()
    with tf.Session() as a, tf.Session() as b:
        a.run(init)
        b.run(init)
        a.run(up)
        assert (a.run(v), b.run(v)) == (2.0, 1.0)
        a.run(init)
        assert a.run(v) == 1.0


def test_a_session_sees_ops_that_are_added_later(session):
    x = tf.constant(2.0)
    assert session.run(x) == 2.0
    assert session.run(x * 3.0) == 6.0


def test_with_sets_the_default_session_and_graph(graph):
    other = tf.Graph()
    with tf.Session(graph=other) as session:
        assert session.graph is other
        assert tf.get_default_graph() is other
        assert tf.get_default_session() is session
        assert tf.constant(2.0).eval() == 2.0
    assert tf.get_default_graph() is graph
    assert tf.get_default_session() is None


def test_eval_and_run_as_methods(graph):
    p, v = tf.placeholder(tf.float32), tf.Variable(5.0)
    with pytest.raises(ValueError, match="default session"):
        tf.constant(1.0).eval()
    with pytest.raises(ValueError, match="default session"):
        v.initializer.run()
    session = tf.Session()
    v.initializer.run(session=session)
    assert v.eval(session=session) == 5.0
    assert (p * 2.0).eval(feed_dict={p: 3.0}, session=session) == 6.0
    with session.as_default():
        assert (p * v).eval({p: 3.0}) == 15.0
    session.close()


def test_an_interactive_session_is_the_default_until_it_is_closed():
    session = tf.InteractiveSession()
    try:
        assert tf.constant(2.0).eval() == 2.0
    finally:
        session.close()
    assert tf.get_default_session() is None


def test_the_levels_of_traces(session):
    """The numbers of TensorFlow's enum `RunOptions.TraceLevel`."""
    levels = "NO_TRACE", "SOFTWARE_TRACE", "HARDWARE_TRACE", "FULL_TRACE"
    assert [getattr(tf.RunOptions, name) for name in levels] == [0, 1, 2, 3]
    options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
    assert (options.trace_level, options.NO_TRACE) == (3, 0)
    assert session.run(tf.constant(1.0), options=options, run_metadata=tf.RunMetadata()) == 1


def test_make_callable(session):
    x, y = tf.placeholder(tf.float32), tf.placeholder(tf.float32)
    f = session.make_callable([x + y, x * y], feed_list=[x, y])
    assert f(2.0, 3.0) == [5.0, 6.0]


def test_a_finalized_graph_does_not_change(graph):
    x = tf.constant(1.0)
    graph.finalize()
    with pytest.raises(RuntimeError, match="finalized"):
        tf.constant(2.0)
    with tf.Session() as session:
        assert session.run(x) == 1.0


# -- what is known before a run ------------------------------------------------------------------


def p(shape=None, dtype=None):
    return tf.placeholder(dtype or tf.float32, shape)


@pytest.mark.parametrize(
    ("build", "error"),
    [
        (lambda: tf.constant(1.0) + tf.constant(1), (TypeError, ValueError)),
        (lambda: tf.constant(1.0) * tf.constant(1.0, tf.float64), (TypeError, ValueError)),
        (lambda: tf.constant(1) * 2.5, (TypeError, ValueError)),
        (lambda: tf.constant([1.0, 2.0]) + tf.constant([1.0, 2.0, 3.0]), ValueError),
        (lambda: tf.matmul(tf.ones([2, 3]), tf.ones([2, 3])), ValueError),
        (lambda: tf.reshape(tf.ones([4]), [3]), ValueError),
        (lambda: tf.constant(1.0, dtype="nope"), TypeError),
        (lambda: tf.concat([tf.ones([2, 2]), tf.ones([3, 3])], 0), ValueError),
        (lambda: p([2]).set_shape([3]), ValueError),
    ],
)
def test_mistakes_that_are_found_when_building(build, error):
    with pytest.raises(error):
        build()


def test_tensors_of_two_graphs_do_not_mix():
    x = tf.constant(1.0)
    with tf.Graph().as_default(), pytest.raises(ValueError, match="same graph"):
        tf.constant(2.0) + x


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1, tf.int32),
        (1.0, tf.float32),
        (True, tf.bool),
        ("a", tf.string),
        (1j, tf.complex128),
        ([1, 2], tf.int32),
        ([1, 2.5], tf.float32),
        (np.float64(1), tf.float64),
        (np.int64(1), tf.int64),
        (np.ones(2, np.uint8), tf.uint8),
        ([np.float32(1), np.float32(2)], tf.float32),
    ],
    ids=str,
)
def test_dtypes_of_constants(value, dtype):
    assert tf.constant(value).dtype == dtype
    assert tf.convert_to_tensor(value).dtype == dtype


def test_constants_are_filled_to_a_shape(session):
    assert session.run(tf.constant(2.0, shape=[2, 2])).tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert session.run(tf.constant([1.0, 2.0], shape=[2, 1])).tolist() == [[1.0], [2.0]]
    assert tf.constant(1, tf.float32).dtype == tf.float32


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: p([None, 3]) * p([3]), [None, 3]),
        (lambda: p([None, 1]) + p([4]), [None, 4]),
        (lambda: p() + p([3]), None),
        (lambda: tf.transpose(p([None, 3])), [3, None]),
        (lambda: tf.reshape(p([None, 3]), [-1]), [None]),
        (lambda: tf.reshape(p([2, 3]), [3, -1]), [3, 2]),
        (lambda: tf.reshape(p([None, 3]), [-1, 6]), [None, 6]),
        (lambda: tf.concat([p([None, 3]), p([None, 4])], 1), [None, 7]),
        (lambda: tf.expand_dims(p([None]), 0), [1, None]),
        (lambda: tf.squeeze(p([1, None, 1]), [0]), [None, 1]),
        (lambda: p([None, 3])[0], [3]),
        (lambda: p([None, 3])[:, 1:], [None, 2]),
        (lambda: tf.reduce_sum(p([None, 3]), 0), [3]),
        (lambda: tf.reduce_sum(p(), 0), None),
        (lambda: tf.matmul(p([2, None]), p([None, 5])), [2, 5]),
        (lambda: tf.shape(p([None, 3])), [2]),
        (lambda: tf.shape(p()), [None]),
        (lambda: tf.stack([p([None]), p([3])]), [2, 3]),
        (lambda: tf.gather(p([None, 3]), [0, 0]), [2, 3]),
        (lambda: tf.tile(p([None, 3]), [1, 2]), [None, 6]),
        (lambda: tf.where(p([2], tf.bool), p([2]), p([None])), [2]),
    ],
)
def test_static_shapes(build, shape):
    y = build()
    assert (y.shape.as_list() if y.shape.ndims is not None else None) == shape


@pytest.mark.parametrize(
    ("build", "dtype"),
    [
        (lambda: p() > 1.0, tf.bool),
        (lambda: tf.argmax(p([3])), tf.int64),
        (lambda: tf.shape(p()), tf.int32),
        (lambda: tf.size(p()), tf.int32),
        (lambda: p(dtype=tf.int32) / 2, tf.float64),
        (lambda: p(dtype=tf.int32) // 2, tf.int32),
        (lambda: tf.cast(p(), tf.float64), tf.float64),
        (lambda: tf.to_float(p(dtype=tf.int32)), tf.float32),
        (lambda: tf.range(3), tf.int32),
        (lambda: tf.one_hot(p([2], tf.int32), 3), tf.float32),
    ],
)
def test_static_dtypes(build, dtype):
    assert build().dtype == dtype


def test_set_shape_adds_what_is_known(session):
    x = p()
    y = x * 1.0
    y.set_shape([None, 3])
    assert y.shape.as_list() == [None, 3]
    y.set_shape([2, None])
    assert y.shape.as_list() == [2, 3]
    assert session.run(y, {x: np.ones((2, 3))}).shape == (2, 3)


# -- what a run keeps ----------------------------------------------------------------------------


def test_values_are_freed_as_the_run_goes_on(session):
    x = tf.placeholder(tf.float32, [250_000])
    y = x
    for _ in range(50):
        y = y + 1.0
    y = tf.reduce_sum(y)
    megabyte = np.zeros(250_000, np.float32)
    session.run(y, {x: megabyte})
    tracemalloc.start()
    try:
        session.run(y, {x: megabyte})
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6e6
    assert kept < 1e5


def test_a_graph_and_its_sessions_are_freed():
    graph = tf.Graph()
    with graph.as_default(), tf.Session() as session:
        v = tf.Variable(1.0)
        (dv,) = tf.gradients(v * v, v)
        session.run(tf.global_variables_initializer())
        session.run(dv)
    gone = [weakref.ref(graph), weakref.ref(session)]
    del graph, session, v, dv
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
