"""Sessions: fetches, feeds, errors, which graph, and what a run leaves behind."""

import collections
import gc
import weakref

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from tests.helpers.rows import refused
from tests.helpers.v1_session import any_session

pytestmark = pytest.mark.usefixtures("graph")
session = any_session

Pair = collections.namedtuple("Pair", "a b")


# -- fetches -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("structure", "due"), [
    (lambda x, y: x, 1.0), (lambda x, y: [x], [1.0]), (lambda x, y: (x, y), (1.0, 2.0)),
    (lambda x, y: {"a": x, "b": [y, x]}, {"a": 1.0, "b": [2.0, 1.0]}),
    (lambda x, y: Pair(x, (y,)), Pair(1.0, (2.0,))),
    (lambda x, y: collections.OrderedDict(b=x, a=y), collections.OrderedDict(b=1.0, a=2.0)),
    (lambda x, y: collections.defaultdict(int, b=x), collections.defaultdict(int, b=1.0)),
    (lambda x, y: [[], {}, ()], [[], {}, ()]), (lambda x, y: [], []), (lambda x, y: "x:0", 1.0),
    (lambda x, y: "x", None), (lambda x, y: [x.op, y], [None, 2.0]),
    (lambda x, y: [tf.constant(True), tf.constant(False)], [True, False]),
])  # fmt: skip
def test_results_have_the_structure_of_the_fetches(session, structure, due):
    x, y = tf.constant(1.0, name="x"), tf.constant(2.0)
    got = session.run(structure(x, y))
    assert got == due
    assert isinstance(due, float) or type(got) is type(due)


CONSTANTS = [  # a value, its dtype, and what printing it shows if it is a number
    (-1, "int32", "-1"), (-1.0, "float32", "-1.0"), (0.1, "float32", "0.1"),
    (np.float64(0.1), "float64", "0.1"), (np.int64(7), "int64", "7"),
    (float("nan"), "float32", "nan"), (True, "bool", None),
    (1j, "complex128", None), ([1, 2], "int32", None), ([1, 2.5], "float32", None),
    (np.ones(2, np.uint8), "uint8", None), ([np.float32(1), np.float32(2)], "float32", None),
]  # fmt: skip


@pytest.mark.parametrize(("value", "dtype", "shown"), CONSTANTS, ids=str)
def test_constants_have_dtypes_and_print_plainly(session, value, dtype, shown):
    x = tf.constant(value)
    assert x.dtype.name == tf.convert_to_tensor(value).dtype.name == dtype
    (got,) = found = session.run([x])
    if shown is not None:
        assert isinstance(got, np.dtype(dtype).type)
        assert (str(found), str(got), repr(got)) == (f"[{shown}]", shown, shown)


def test_constants_are_filled_to_a_shape(session):
    assert session.run(tf.constant(2.0, shape=[2, 2])).tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert session.run(tf.constant([1.0, 2.0], shape=[2, 1])).tolist() == [[1.0], [2.0]]
    assert tf.constant(1, tf.float32).dtype == tf.float32


def test_results_are_numbers_and_arrays_of_the_tensors_dtype(session):
    one = session.run(tf.constant(1.5))
    assert (one + 1, one * 2, float(one), one == 1.5, -one) == (2.5, 3.0, 1.5, True, -1.5)
    assert (one + np.ones(2, np.float32)).dtype == np.float32
    assert {one: "a"}[1.5] == "a"
    got = session.run(tf.constant([[1, 2], [3, 4]], tf.int64))
    assert (type(got), got.dtype, got.shape) == (np.ndarray, np.int64, (2, 2))
    assert session.run(tf.zeros([0, 3])).shape == (0, 3)


def test_text_is_bytes():
    with tf.Session() as plain:
        assert tf.constant("abc").dtype == tf.convert_to_tensor("abc").dtype == tf.string
        assert plain.run(tf.constant("abc")) == b"abc"
        assert plain.run(tf.constant(["a", "bc"])).tolist() == [b"a", b"bc"]


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
    assert session.run(x * y, {x: 3.0, y: 5.0}) == 15.0
    assert calls == []
    with tf.Session() as plain:
        assert plain.run(y * 2.0) == 2.0
    assert calls == [1]


# -- feeds ---------------------------------------------------------------------------------------


def test_any_tensor_can_be_fed(session):
    x, c = tf.placeholder(tf.float32, [2], name="p"), tf.constant([1.0, 1.0])
    h = x * c
    y = h * h
    (dx,) = tf.gradients(y, x)
    for fetch, feed, due in [
        (y, {x: [1.0, 2.0]}, [1.0, 4.0]),
        (dx, {x: [1.0, 2.0]}, [2.0, 4.0]),
        (y, {"p:0": (3.0, 0.0)}, [9.0, 0.0]),
        (y, {x: np.array([1.0, 2.0]), c: [10.0, 1.0]}, [100.0, 4.0]),
        (y, {h: [5.0, 6.0]}, [25.0, 36.0]),
        (dx * 2.0, {dx: [1.0, 1.0]}, [2.0, 2.0]),
    ]:
        assert session.run(fetch, feed).tolist() == due
    v, unset = tf.Variable(1.0), tf.Variable(2.0)
    session.run(v.initializer)
    assert session.run(v * unset, {v: 10.0, unset: 3.0}) == 30.0
    assert session.run(v) == 1.0


def test_a_placeholder_with_a_default(session):
    x = tf.constant([1.0, 2.0])
    y = tf.placeholder_with_default(x, [None])
    assert (y.op.type, y.op.name) == ("PlaceholderWithDefault",) * 2
    assert y.shape.as_list() == [None]
    assert y.op.get_attr("dtype") == tf.float32 and y.op.inputs[0] is x
    assert tf.get_static_value(y) is None
    assert session.run(tf.gradients(y * y, x)[0]).tolist() == [2, 4]
    assert session.run(y, {y: [3.0]}).tolist() == [3]


@pytest.mark.parametrize(("dtype", "value", "due"), [
    (tf.int32, 1.7, 1), (tf.float32, True, 1.0), (tf.float64, 3, 3.0), (tf.bool, True, True),
    (tf.float32, np.float64(0.1), np.float32(0.1)), (tf.float32, [None, 1], [np.nan, 1]),
])  # fmt: skip
def test_fed_values_take_the_tensors_dtype(session, dtype, value, due):
    p = tf.placeholder(dtype, np.shape(value))
    got = session.run(tf.identity(p), {p: value})
    np.testing.assert_equal(got, due)
    assert got.dtype == dtype.as_numpy_dtype


def test_tensors_of_regrad_are_fetched_and_are_values_of_feeds(session):
    x = tf.placeholder(tf.float32, [2])
    y = rg.sin(x)
    assert isinstance(y, rg.Tensor)
    assert session.run([y, x], {x: rg.tensor([0.0, 0.0])})[0].tolist() == [0.0, 0.0]


def test_several_keys_are_fed_from_several_values(session):
    x, y = tf.placeholder(tf.float32, []), tf.placeholder(tf.float32, [])
    assert session.run(x - y, {(x, y): (3.0, 1.0)}) == 2.0


def test_text_is_fed():
    p = tf.placeholder(tf.string, [None])
    with tf.Session() as plain:
        assert plain.run(p, {p: ["a", b"bc"]}).tolist() == [b"a", b"bc"]


# -- errors --------------------------------------------------------------------------------------


class Foreign:
    def __repr__(self):  # ids of tests must not vary
        return "a foreign object"


def elsewhere():
    with tf.Graph().as_default():
        return tf.constant(2.0, name="elsewhere")


def x_fed(value):
    return lambda p: (p * 1.0, {p: value})


def inner_tensor(p):
    made = []
    tf.cond(p[0, 0] > 0.0, lambda: made.append(p * 2.0) or p, lambda: p)
    return made[0]


ERRORS = tf.errors
REFUSED = {  # fetches and feed, and the error
    "None": (lambda p: (None, None), TypeError, "."),
    "a list of None": (lambda p: ([None], None), TypeError, "."),
    "a dict of None": (lambda p: ({"a": None}, None), TypeError, "."),
    "a number": (lambda p: (1.5, None), TypeError, "."),
    "a foreign object": (lambda p: (Foreign(), None), TypeError, "."),
    "an array": (lambda p: (np.ones(2), None), TypeError, "."),
    "an unknown op": (lambda p: ("nope", None), ValueError, "nope"),
    "an unknown tensor": (lambda p: ("nope:0", None), ValueError, "nope"),
    "an unknown output": (lambda p: ("p:1", None), ValueError, "p"),
    "of another graph": (lambda p: (elsewhere(), None), ValueError, "elsewhere"),
    "of a branch": (lambda p: (inner_tensor(p), None), ValueError, "inside a branch"),
    "feed: a list": (lambda p: (p, [1.0]), TypeError, "feed_dict is a dict"),
    "feed: None": (x_fed(None), TypeError, "p:0 is fed with None"),
    "feed: a tensor": (lambda p: (p, {p: tf.zeros([1, 2])}), TypeError, "cannot be a tf.Tensor"),
    "feed: an op": (lambda p: (p, {p: p.op}), TypeError, "cannot be a tf.Tensor"),
    "feed: tensors": (lambda p: (p, {p: [p[0], p[0]]}), TypeError, "or contain one"),
    "feed: a large number": (
        lambda p: (i := tf.placeholder(tf.int32, [], name="i"), {i: 2**31}), OverflowError,
        "i:0 is fed as int32.*2147483648"),
    "feed: a size in use": (
        lambda p: (tf.ones([n := tf.constant(2, name="n"), 1]), {n: 3}), TypeError,
        "'n:0' cannot be fed.*static shapes"),
    "feed: too long": (x_fed([[1.0]]), ValueError, r"\(1, 1\).*p:0.*\(\?, 2\)"),
    "feed: a number": (x_fed(1.0), ValueError, r"\(\).*p:0.*\(\?, 2\)"),
    "feed: other sizes": (x_fed(np.ones([3, 1])), ValueError, r"\(3, 1\)"),
    "feed: text": (x_fed("text"), ValueError, "p:0"),
    "feed: texts": (x_fed(["a", "b"]), ValueError, "could not convert"),
    **{f"key: {key}": (lambda p, key=key: (p, {key: 1.0}), TypeError, ".")
       for key in (3, None, "nope:0", Foreign())},
    "no feed": (lambda p: (tf.placeholder(tf.float32, [2], name="pp") * 2.0, None),
                ERRORS.InvalidArgumentError, r"'pp'.*\[2\]"),
    "shapes that clash": (lambda p: (p[:, 0] + tf.ones([2]), {p: np.ones([3, 2])}),
                          ERRORS.InvalidArgumentError, "Incompatible shapes"),
    "no value": (lambda p: (tf.Variable(1.0, name="vv") + 1.0, None),
                 ERRORS.FailedPreconditionError, "vv"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_runs_that_are_refused(session, name):
    build, error, words = REFUSED[name]
    fetches, feed = build(tf.placeholder(tf.float32, [None, 2], name="p"))
    found = refused(lambda: session.run(fetches, feed), error, words)
    builtin = (TypeError, ValueError, OverflowError)
    assert error in builtin or isinstance(found, ERRORS.OpError)


def test_a_closed_session_and_a_finalized_graph(graph):
    x = tf.constant(1.0)
    graph.finalize()
    refused(lambda: tf.constant(2.0), RuntimeError, "finalized")
    with tf.Session() as session:
        assert session.run(x) == 1.0
    refused(lambda: session.run(x), RuntimeError, "closed")
    with tf.Graph().as_default(), pytest.raises(ValueError, match="same graph"):
        tf.constant(2.0) + x


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
    refused(tf.constant(1.0).eval, ValueError, "default session")
    refused(v.initializer.run, ValueError, "default session")
    session = tf.Session()
    v.initializer.run(session=session)
    assert v.eval(session=session) == 5.0
    assert (p * 2.0).eval(feed_dict={p: 3.0}, session=session) == 6.0
    with session.as_default():
        assert (p * v).eval({p: 3.0}) == 15.0
    session.close()


@pytest.mark.parametrize("jit", [False, True])
def test_an_interactive_session_is_the_default_until_it_is_closed(jit):
    session = tf.InteractiveSession(jit=jit)
    try:
        v = tf.Variable(2.0)
        v.initializer.run()
        assert (v * 2.0).eval() == 4.0
        kind = type(session._variables["Variable"])
        assert kind.__module__.startswith("jax" if jit else "numpy")
    finally:
        session.close()
    assert tf.get_default_session() is None


def test_a_block_of_an_interactive_session_closes_it():
    graph = tf.Graph()
    with tf.InteractiveSession(graph=graph) as session:
        assert tf.get_default_session() is session
        assert tf.get_default_graph() is graph
        x = tf.constant(2.0)
        assert x.eval() == 2.0
    assert tf.get_default_session() is None
    refused(lambda: session.run(x), RuntimeError, "closed")


def test_what_a_session_is_made_of():
    refused(lambda: tf.Session("grpc://host"), TypeError, "target must be ''.*grpc")
    refused(lambda: tf.Session(graph=tf.constant(1.0)), TypeError, "must be a tf.Graph")
    config = tf.ConfigProto(allow_soft_placement=True)
    config.gpu_options.allow_growth = True
    assert (config.allow_soft_placement, config.gpu_options.allow_growth) == (True, True)
    own = tf.ConfigProto(gpu_options=tf.GPUOptions(visible_device_list="0"))
    assert own.gpu_options.visible_device_list == "0"


def test_trace_gradients_runs_in_the_session():
    x, w = tf.placeholder(tf.float32, [2], name="x"), tf.Variable([3.0, 4.0], name="w")
    with tf.name_scope("layer"):
        y = tf.sin(x) * w
    refused(lambda: tf.trace_gradients(y, x), TypeError, "pass a session")
    with tf.Session() as session:
        session.run(w.initializer)
        trace = tf.trace_gradients(y, [x, w, tf.constant(1.0)], {x: [0.0, 0.0]})
    assert [step.path for step in trace.steps] == ["layer/mul", "layer/Sin", "w/read"]
    assert [name for name, _ in trace.inputs] == ["x:0", "w:0", "Const:0"]
    assert [None if dx is None else dx.norm for _, dx in trace.inputs] == [5.0, 0.0, None]


def test_the_levels_of_traces(session):
    """The numbers of TensorFlow's enum `RunOptions.TraceLevel`."""
    levels = "NO_TRACE", "SOFTWARE_TRACE", "HARDWARE_TRACE", "FULL_TRACE"
    options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
    assert [getattr(options, name) for name in levels] == [0, 1, 2, 3]
    assert options.trace_level == 3
    assert session.run(tf.constant(1.0), options=options, run_metadata=tf.RunMetadata()) == 1


def test_make_callable(session):
    x, y = tf.placeholder(tf.float32), tf.placeholder(tf.float32)
    z = x + y
    f = session.make_callable([z, x * y], feed_list=[x, y])
    assert f(2.0, 3.0) == [5.0, 6.0]
    assert session.make_callable(z + 1.0, [z])(2.0) == 3.0


def test_set_shape_adds_what_is_known(session):
    x = tf.placeholder(tf.float32)
    y = x * 1.0
    y.set_shape([None, 3])
    assert y.shape.as_list() == [None, 3]
    y.set_shape([2, None])
    assert y.shape.as_list() == [2, 3]
    assert session.run(y, {x: np.ones((2, 3))}).shape == (2, 3)


# -- what a run keeps ----------------------------------------------------------------------------


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


@pytest.mark.parametrize("jit", [False, True])
def test_a_feed_has_the_sizes_of_the_placeholder_behind_it(graph, jit):
    """TensorFlow programs feed `tf.placeholder(...) / 255`, and other ops read its sizes."""
    x = tf.placeholder(tf.float32, [None, 4])
    scaled = x / 2.0
    y = tf.reshape(scaled, [-1, 2, 2])
    dx = tf.gradients(tf.reduce_sum(y * y) / tf.cast(tf.shape(y)[0], tf.float32), scaled)[0]
    with tf.Session(jit=jit) as session:
        for n in (3, 5):
            rows = np.arange(4.0 * n).reshape(n, 4)
            shown = session.run([y, dx], {scaled: rows})
            np.testing.assert_array_equal(shown[0], rows.reshape(-1, 2, 2))
            np.testing.assert_allclose(shown[1], 2 * rows / n, rtol=1e-6)
        refused(lambda: session.run([y, x], {scaled: rows}), tf.errors.InvalidArgumentError)
