"""Plans: what runs, what is kept, whose memory it is, and that results are never overwritten."""

import gc
import threading
import tracemalloc
import weakref

import numpy as np
import pytest

import regrad.v1 as tf

pytestmark = pytest.mark.usefixtures("graph")

LARGE = 8192  # elements; plans keep memory of their own for arrays as large as this


def mixed(x, depth=6):
    for _ in range(depth):
        x = tf.tanh(x * 1.01) + tf.sin(x) * 0.5
    return x


CHAINS = {
    "one op": lambda x: tf.tanh(x), "an op over an operand": lambda x: tf.tanh(x * 1.01),
    "several readers": lambda x: tf.square(x * 2.0) + tf.exp(x * 2.0),
    "a view of a result": lambda x: tf.reshape(tf.tanh(x * 1.01), [2, -1]),
    "an identity of a result": lambda x: tf.identity(tf.tanh(x * 1.01)), "a long one": mixed,
}  # fmt: skip


@pytest.mark.parametrize("build", CHAINS.values(), ids=CHAINS)
@pytest.mark.parametrize("shape", [[LARGE], [None], None], ids=str)
def test_a_later_run_leaves_earlier_results_alone(build, shape):
    x = tf.placeholder(tf.float32, shape)
    y = build(x)
    (dx,) = tf.gradients(y, x)
    with tf.Session() as session:
        fed = [np.linspace(-1, 1, LARGE, dtype=np.float32), np.zeros(LARGE, np.float32)]
        first = session.run([y, dx], {x: fed[0]})
        copies = [a.copy() for a in first]
        second = session.run([y, dx], {x: fed[1]})
        for a, copy in zip(first, copies, strict=True):
            np.testing.assert_array_equal(a, copy)
        again = session.run([y, dx], {x: fed[0]})
        for a, copy in zip(again, copies, strict=True):
            np.testing.assert_array_equal(a, copy)
        assert not np.array_equal(second[0], again[0])


def test_a_later_run_leaves_variables_alone():
    x = tf.placeholder(tf.float32, [LARGE])
    v, w = tf.Variable(tf.zeros([LARGE])), tf.Variable(tf.zeros([LARGE]))
    step, keep = tf.assign(v, tf.tanh(x * 1.01)), tf.assign(w, v)
    with tf.Session() as session:
        session.run(step, {x: np.ones(LARGE)})
        session.run(keep)
        session.run(step, {x: np.zeros(LARGE)})
        assert session.run(w)[0] == np.tanh(np.float32(1.01))


def test_what_a_caller_does_to_results_and_feeds_stays_outside():
    x = tf.placeholder(tf.float32, [LARGE])
    c, v = tf.constant(np.ones(LARGE, np.float32)), tf.Variable(np.ones(LARGE, np.float32))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        fed = np.ones(LARGE, np.float32)
        session.run(tf.assign(v, x), {x: fed})
        fed[:] = 7
        for fetch in (c, v, tf.identity(v), tf.reshape(c, [-1])):
            session.run(fetch)[:] = 5
        assert session.run(v)[0] == 1 == session.run(c)[0]


def test_feeds_are_not_written_to():
    x = tf.placeholder(tf.float32, [LARGE])
    y = tf.tanh(tf.negative(x) * 2.0)
    fed = np.ones(LARGE, np.float32)
    with tf.Session() as session:
        session.run(y, {x: fed})
    assert (fed == 1).all()


def test_threads_share_a_session():
    x = tf.placeholder(tf.float32, [LARGE])
    y = mixed(x)
    wrong = []
    with tf.Session() as session:
        due = {k: session.run(y, {x: np.full(LARGE, k)}) for k in (0.0, 0.5, 1.0)}

        def work(k):
            for _ in range(20):
                if not np.array_equal(session.run(y, {x: np.full(LARGE, k)}), due[k]):
                    wrong.append(k)

        threads = [threading.Thread(target=work, args=(k,)) for k in due]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_a_chain_needs_few_arrays():
    x = tf.placeholder(tf.float32, [2**18])  # 1 MiB
    y = x
    for i in range(100):
        y = tf.tanh(y) if i % 2 else y * 1.01
    fed = np.ones(2**18, np.float32)
    with tf.Session() as session:
        tracemalloc.start()
        try:
            session.run(y, {x: fed})
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 4 * 2**20


def test_values_go_when_their_last_reader_has_run():
    alive = []

    class Watched(np.ndarray):
        pass

    def made():
        value = np.ones(4, np.float32).view(Watched)
        alive.append(weakref.ref(value))
        return value

    def look(_):
        gc.collect()
        return np.float32(alive[0]() is not None)

    a = tf.py_func(made, [], tf.float32)
    b = tf.reduce_sum(a)
    with tf.Session() as session:
        assert session.run([b, tf.py_func(look, [b], tf.float32)]) == [4.0, 0.0]


def test_a_run_that_fails_changes_nothing():
    v = tf.Variable(1.0)
    x = tf.placeholder(tf.float32, [None])
    with tf.control_dependencies([tf.assign_add(v, 1.0)]):
        late = tf.identity(x) + tf.constant([1.0, 2.0])
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        with pytest.raises(tf.errors.InvalidArgumentError, match="add"):
            session.run(late, {x: [1.0, 2.0, 3.0]})
        assert session.run(v) == 1.0
