"""Plans: what runs, what is kept, whose memory it is, and that results are never overwritten."""

import gc
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
