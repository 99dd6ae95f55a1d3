"""`Session(jit=True)`: what a plain session gives, compiled by XLA; and what it refuses."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.errors import DTypeError, MissingPackageError
from regrad.extend import deferrable
from tests.helpers import graph_sample_runs as graphs
from tests.helpers import sample_runs as runs
from tests.helpers import v1_session as v1s
from tests.helpers.choices import choose
from tests.helpers.rows import refused
from tests.samples import Sample

pytestmark = pytest.mark.usefixtures("graph")
session, either, all_compiled = v1s.jit_session, v1s.any_session, v1s.all_compiled


# -- samples of every family -----------------------------------------------------------------------

SIZED_BY_VALUES = {"indexing: unique_values", "indexing: unique_all"}  # cannot be compiled
REFUSED = SIZED_BY_VALUES | graphs.UNSTACKED.keys()
SLICE = [row for row in runs.ROWS if "jax" in row.backends and str(row) not in REFUSED][::9]


@pytest.mark.slow(but=40)
@pytest.mark.usefixtures("all_compiled")
@pytest.mark.parametrize("row", SLICE, ids=str)
def test_samples_give_what_eager_mode_gives(row: Sample) -> None:
    due, xs = graphs.eager_values(row), runs.inputs_of(row, "numpy")
    for hidden in choose(row, ["static", "sizes hidden"]):
        built = graphs.SampleGraph(row, hidden)
        for got, expected in zip(built.run(built.ys), due, strict=True):
            assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
            np.testing.assert_allclose(got, expected, 1e-9, 1e-9, err_msg=hidden)
        expected = runs.gradients(row, xs, 1) if row.order else []
        found = built.gradients(due, 1) if row.order else []
        for a, b in zip(found, expected, strict=True):
            atol = 1e-7 * (1 + np.abs(b).max(initial=0))
            np.testing.assert_allclose(a, b, 1e-6, atol, err_msg=hidden)


# -- what a plain session gives --------------------------------------------------------------------


def sized(x):
    rows = tf.shape(x)[0]
    counted = tf.tile(tf.expand_dims(tf.range(rows * 2), 1), [1, rows])
    y = tf.reshape(x, [rows // 2, -1])
    return [y, counted, *tf.gradients(y * y, x), tf.ones([rows, 2])]


def under_rules(x):
    rules = {"Sign": "Identity", "Relu": lambda op, dy: dy * 5.0}
    y = v1s.overridden(rules, lambda: tf.sign(x) * tf.nn.relu(x))
    return [*tf.gradients(y, x), *tf.gradients(tf.sign(x) * 1.0 + x, x)]


def under_own_rules(x):
    clip = lambda dy: tf.clip_by_value(dy, -0.1, 0.1)  # noqa: E731
    clipped = tf.custom_gradient(lambda x: (tf.identity(x) ** 2, clip))
    tripled = rg.custom_grad(lambda x, save: {"value": x * x, "grad_func": lambda dy: dy * 3.0})
    halved = {"Exp": lambda op, dy: dy * 0.5 * op.outputs[0]}
    y = v1s.overridden(halved, tf.exp, clipped(x)) + rg.identity(tripled(x))
    (dx,) = tf.gradients(y, x)
    return [y, dx, *tf.gradients(dx, x)]


def awaited(x):
    y = v1s.overridden({"Square": lambda op, dy: dy * 7.0}, lambda: rg.var(tf.square(x), axis=0))
    return [y, *tf.gradients(y, x)]


def written_in_a_branch(x):
    v = tf.Variable(4.0)
    y = tf.cond(x > 0.0, lambda: tf.assign_add(v, x), lambda: tf.constant(0.0))
    with tf.control_dependencies([y]):
        return [y, v.read_value()]


def by_rows(x):
    w, count = tf.Variable(np.eye(3, dtype=np.float32) * 0.5), tf.shape(x)[0]

    body = lambda i, h: (i + 1, tf.tanh(tf.matmul(h, w) + tf.gather(x, i)[None]))  # noqa: E731
    _, h = tf.while_loop(lambda i, h: i < count, body, (0, tf.zeros([1, 3])))
    return [h, *tf.gradients(h, [x, w])]


ALIKE = {  # fetches of x, a shape, and values of x
    "kinds": (
        lambda x: [x, tf.reduce_sum(x), tf.argmax(x), tf.shape(x), x > 1.0, tf.constant(True),
                   tf.cast(x, tf.int32), tf.complex(x, x), tf.cast(x, tf.float16)],
        [None], [[1.0, 3.0]]),
    "sizes": (sized, [None, 3], [np.ones([4, 3])]),
    "rules": (under_rules, [3], [[-2.0, 0.5, 3.0]]),
    "rules of one's own": (under_own_rules, [None], [[0.5, -0.25]]),
    "a rule where the run is awaited": (awaited, None, [np.arange(6.0).reshape(3, 2)]),
    "a branch that writes": (written_in_a_branch, [], [-3.0, 2.0]),
    "a loop over rows": (by_rows, [None, 3], [np.linspace(-1, 1, 12).reshape(4, 3)]),
}  # fmt: skip


@pytest.mark.parametrize("name", ALIKE)
def test_fetches_are_those_of_a_plain_session(name):
    build, shape, fed = ALIKE[name]
    x = tf.placeholder(tf.float32, shape)
    fetches = build(x)
    for value in fed:
        with tf.Session() as plain, tf.Session(jit=True) as compiled:
            a, b = (
                v1s.initialized(session).run(fetches, {x: value}) for session in (plain, compiled)
            )
        for due, got in zip(a, b, strict=True):
            assert type(got) is type(due)
            assert got.dtype == due.dtype
            np.testing.assert_allclose(got, due, rtol=1e-5, atol=1e-6)


# -- values as they are handed out -----------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 8192])  # (plans keep memory of their own for large arrays)
def test_arrays_belong_to_the_caller(either, size):
    x, v = tf.placeholder(tf.float32, [size]), tf.Variable(tf.zeros([size]))
    c, y = tf.constant(np.ones(size, np.float32)), tf.tanh(tf.negative(x) * 2.0)
    set_v, fed = v.assign(x), np.ones(size, np.float32)
    either.run(y, {x: fed})
    assert (fed == 1).all()
    a, b = either.run([tf.identity(x), set_v], {x: fed})
    a[:] = b[:] = fed[:] = 7
    for fetch in (c, v, tf.identity(v), tf.reshape(c, [-1])):
        either.run(fetch)[:] = 5
    d, e = either.run([v, v])
    d[:] = 9
    assert (e == 1).all() and (either.run(v) == 1).all() and (either.run(c) == 1).all()
    f, g = either.run([tf.sin(x)] * 2, {x: fed})
    f[:] = 9
    assert (g != 9).all()


def test_other_shapes_are_traced_anew(session):
    x = tf.placeholder(tf.float32, None)
    y = tf.reduce_sum(x * x) + tf.cast(tf.size(x), tf.float32)
    dx = tf.gradients(y, x)[0]
    for shape in [(), (2,), (3, 2), (2,), (0,)]:
        value, gradient = session.run([y, dx], {x: np.full(shape, 2.0)})
        assert value == 5 * np.prod(shape)
        np.testing.assert_array_equal(gradient, np.full(shape, 4.0))
    assert session._plan.cache_info().currsize == 1


# -- variables -------------------------------------------------------------------------------------


def test_variables_stay_arrays_of_jax_and_change_all_together(session):
    v, w = tf.Variable([1.0, 2.0]), tf.Variable(0)
    session.run(tf.global_variables_initializer())
    up = tf.assign_add(v, [1.0, 1.0])
    with tf.control_dependencies([up]):
        count = tf.assign_add(w, 1)
        later = v.read_value() * 10.0
    assert session.run([v, up, later, count])[0].tolist() == [1.0, 2.0]
    assert all(isinstance(value, jax.Array) for value in session._variables.values())
    found = session.run([later, count, w])
    assert (found[0].tolist(), found[1:]) == ([30.0, 40.0], [2, 1])


def test_memory_of_variables_is_used_again(session):
    v = tf.Variable(tf.zeros([1000]))
    session.run(v.initializer)
    (old,) = session._variables.values()
    session.run(tf.assign_add(v, tf.ones([1000])))
    assert old.is_deleted()
    assert session.run(v)[0] == 1.0


def test_variables_that_get_one_value_do_not_share_memory(session):
    v, w = tf.Variable([1.0]), tf.Variable([2.0])
    same = tf.group(tf.assign(w, v))
    swap = tf.group(tf.assign(v, w), tf.assign(w, v * 3.0))
    up = tf.group(tf.assign_add(v, [1.0]), tf.assign_add(w, [10.0]))
    found = []
    for each in (session, tf.Session()):
        v1s.initialized(each)
        for op in (same, up, up, swap, up, same, up):
            each.run(op)
        found.append(each.run([v, w]))
    assert found[0] == found[1]


def test_variables_are_fed_loaded_and_change_shape(session):
    v = tf.Variable([1.0, 2.0], validate_shape=False)
    session.run(v.initializer)
    total = tf.reduce_sum(v)
    assert session.run(total, {v: [5.0, 5.0]}) == 10.0
    assert session.run(total) == 3.0
    session.run(tf.assign(v, [1.0, 1.0, 1.0], validate_shape=False))
    assert session.run(total) == 3.0
    v.load([4.0, 5.0], session)
    assert session.run(total) == 9.0


def test_a_failed_run_changes_nothing(either):
    v, x = tf.Variable([1.0, 2.0]), tf.placeholder(tf.float32, None)
    either.run(v.initializer)
    with tf.control_dependencies([tf.assign_add(v, [1.0, 1.0])]):
        y = v.read_value() + x
        checked = tf.Assert(tf.reduce_all(x > 0.0), [x, y])
    with pytest.raises(tf.errors.InvalidArgumentError, match="Incompatible shapes"):
        either.run(y, {x: [1.0, 2.0, 3.0]})
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"assertion failed: \[-1\]"):
        either.run(checked, {x: -1.0})
    assert either.run(v).tolist() == [1.0, 2.0]
    either.run(checked, {x: 1.0})
    assert either.run(v).tolist() == [2.0, 3.0]


def test_an_assert_shows_text_constants_and_feeds(either):
    x, seven = tf.placeholder(tf.float32, []), tf.constant(7)
    checked = tf.Assert(x > 0.0, ["x is", x, seven, tf.constant(np.float64(0.1))])
    for feed, shown in (({}, 7), ({seven: 9}, 9)):
        words = rf"assertion failed: \[x is\] \[-1\] \[{shown}\] \[0.1\]"
        call = lambda feed=feed: either.run(checked, {x: -1.0, **feed})  # noqa: E731
        refused(call, tf.errors.InvalidArgumentError, words)
    assert either.run(checked, {x: 1.0}) is None


def test_values_that_constants_determine_are_checked(either):
    whole = lambda *values: tf.cast(tf.constant(values), tf.int32)  # noqa: E731
    assert either.run(tf.gather([1.0, 2.0], whole(1.5, 0.5))).tolist() == [2.0, 1.0]
    for y, words in (
        (tf.gather([1.0, 2.0], whole(1.5, -1.0)), "negative"),
        (tf.constant([3]) // whole(0.5), "division by zero"),
    ):
        refused(lambda y=y: either.run(y), tf.errors.InvalidArgumentError, words)


def test_an_error_inside_a_branch_stays_as_it_is(either):
    @deferrable
    def short(x):
        if x.shape[0] == 100:
            raise TypeError("too long")
        return x * 2.0

    x, on = tf.placeholder(tf.float32, [None]), tf.placeholder(tf.bool, [])
    y = tf.cond(on, lambda: tf.identity(short(x)), lambda: x)
    assert either.run(y, {x: [1.0], on: True}).tolist() == [2.0]
    refused(lambda: either.run(y, {x: [1.0] * 100, on: True}), TypeError, "too long")


def test_constants_and_a_maximum_bound_a_loop(either):
    x = tf.constant(2.0)
    y = v1s.powers(x, 5, maximum_iterations=3)
    assert either.run([y, *tf.gradients(y, x)]) == [8.0, 12.0]


def test_threads_share_a_session(either):
    v, x = tf.Variable(0), tf.placeholder(tf.float32, [8192])
    y, up = tf.tanh(tf.tanh(x * 1.01) + tf.sin(x) * 0.5), tf.assign_add(v, 1)
    either.run(v.initializer)
    due = [either.run(y, {x: np.full(8192, k)}) for k in range(4)]

    def work(k):
        found = [either.run([y, up], {x: np.full(8192, k)})[0] for _ in range(30)]
        return all(np.array_equal(z, due[k]) for z in found)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    assert either.run(v) == 120


def test_loops_write_to_variables(either):
    v, n = tf.Variable(1.0), tf.placeholder(tf.int32, [])
    body = lambda i: tf.cast(tf.assign_add(v, 1.0), tf.int32) * 0 + i + 1  # noqa: E731
    i = tf.while_loop(lambda i: i < n, body, [0])
    assert v1s.initialized(either).run(i, {n: 3}) == 3
    assert either.run(v) == 4.0


# -- dtypes ----------------------------------------------------------------------------------------


@pytest.fixture
def x64_off():
    with jax.enable_x64(False):
        yield


DOUBLES = {
    "a feed": lambda: tf.placeholder(tf.float64, [2], name="wide"),
    "a constant": lambda: tf.constant(np.array([1.0, 2.0]), name="wide"),
    "a cast": lambda: tf.cast(tf.placeholder(tf.float32, [2]), tf.float64, name="wide"),
    "a variable": lambda: tf.Variable(np.array([1.0, 2.0]), name="wide").initializer,
    "random numbers": lambda: tf.random_normal([2], dtype=tf.float64, name="wide"),
    "complex numbers": lambda: tf.constant(np.array([1j]), name="wide"),
}


@pytest.mark.parametrize("make", DOUBLES.values(), ids=DOUBLES)
def test_float64_needs_the_mode(make, x64_off, session):
    y = make()
    ops = tf.get_default_graph().get_operations()
    feed = {op.outputs[0]: [1.0, 2.0] for op in ops if op.type == "Placeholder"}
    words = "jax_enable_x64", "in the graph's op 'wide"
    refused(lambda: session.run(y, feed), DTypeError, *words)


def test_whole_numbers_of_64_bits_are_exact_in_any_mode(x64_off, session):
    x = tf.placeholder(tf.int64, [2])
    best = tf.argmax(tf.constant([[1.0, 3.0]]) * tf.cast(x, tf.float32), 1)
    found = session.run([x * 3, best, tf.reduce_sum(x)], {x: [2**40 + 1, 5]})
    assert [y.tolist() for y in found] == [[3 * 2**40 + 3, 15], [0], 2**40 + 6]
    assert {y.dtype for y in found} == {np.dtype(np.int64)}


# -- errors, printing, ways in ---------------------------------------------------------------------


def test_jax_is_asked_for_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(MissingPackageError, match=r"Session\(jit=True\) needs jax"):
        tf.Session(jit=True)
    tf.Session()


# -- what cannot be compiled ----------------------------------------------------------------------


def growing(n):
    shapes = [tf.TensorShape([]), tf.TensorShape([None])]
    turn = lambda i, y: (i + 1, tf.concat([y, y], 0))  # noqa: E731
    return tf.while_loop(lambda i, y: i < n, turn, (tf.constant(0), tf.ones([1])), shapes)


def asserted(x):
    with tf.control_dependencies([tf.Assert(x > 0.0, [x], name="culprit")]):
        return tf.identity(x)


VECTOR, NUMBER, WHOLE = (tf.float32, [2]), (tf.float32, []), (tf.int32, [])
UNCOMPILED = {  # a function of what is fed
    "a Python function": (lambda x: tf.py_func(np.sin, [x], tf.float32, name="culprit"), NUMBER),
    "unique values": (lambda x: tf.unique(x, name="culprit")[0], VECTOR),
    "a mask": (lambda x: tf.boolean_mask(x, x > 0.0, name="culprit"), VECTOR),
    "a size from values": (lambda n: tf.range(n, name="culprit"), WHOLE),
    "branches of two shapes": (
        lambda x: tf.cond(x > 0.0, lambda: tf.zeros([2]), lambda: tf.zeros([3])), NUMBER),
    "a growing loop": (growing, WHOLE),
    "a gradient of an endless loop": (
        lambda n: tf.gradients(v1s.powers(x := tf.ones([2]), n), x, name="culprit"), WHOLE),
    "an assertion in a branch": (
        lambda x: tf.cond(x > 0.0, lambda: asserted(x), lambda: x), NUMBER),
    "text": (lambda x: tf.constant("abc", name="culprit"), NUMBER),
}  # fmt: skip


@pytest.mark.parametrize("name", UNCOMPILED)
def test_what_cannot_be_compiled_is_named(name, session):
    build, (dtype, shape) = UNCOMPILED[name]
    x = tf.placeholder(dtype, shape)
    with tf.name_scope("culprit"):
        y = build(x)
    feed = {x: np.full(shape, 3)}
    words = r"culprit.*without jit", "maximum_iterations" if "endless" in name else "."
    error = refused(lambda: session.run(y, feed), tf.errors.UnimplementedError, *words)
    assert error.op is not None
    with tf.Session() as plain:
        plain.run(y, feed)
