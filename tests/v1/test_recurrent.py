"""map_fn, scan, folds and recurrent networks: values and gradients of loops in Python and torch."""

import numpy as np
import pytest
import torch

import regrad.v1 as tf
from regrad.errors import ArgumentError, DTypeError, GraphError, ShapeError
from tests.helpers.rows import refused
from tests.helpers.v1_session import initialized, overridden, run

pytestmark = pytest.mark.usefixtures("graph")
CELLS = tf.nn.rnn_cell


@pytest.fixture(params=[False, True], ids=["plain", "jit"])
def either(graph, request):
    with tf.Session(jit=request.param) as session:
        yield session


# -- along the first axis --------------------------------------------------------------------------

X = np.array([[0.3, -0.5], [1.2, 0.4], [-0.7, 0.9]])
LOOPS = {  # a function of x and w; and the same in Python, of rows
    "map": (lambda x, w: tf.map_fn(lambda v: tf.sin(v) * w, x),
            lambda x, w: tf.stack([tf.sin(v) * w for v in x])),
    "map of a tuple": (
        lambda x, w: tf.map_fn(lambda a: a[0] * a[1]["k"] * w, (x, {"k": x + 1.0}), tf.float64),
        lambda x, w: tf.stack([v * (v + 1.0) * w for v in x])),
    "map to a tuple": (
        lambda x, w: tf.map_fn(lambda v: (v * w, v[0]), x, dtype=(tf.float64, tf.float64))[0],
        lambda x, w: tf.stack([v * w for v in x])),
    "map of integers": (
        lambda x, w: tf.map_fn(lambda i: x[i] * w, tf.range(tf.shape(x)[0]), dtype=tf.float64),
        lambda x, w: tf.stack([v * w for v in x])),
    "map in map": (
        lambda x, w: tf.map_fn(lambda v: tf.map_fn(lambda u: tf.exp(u) * w, v), x),
        lambda x, w: tf.stack([tf.exp(v) * w for v in x])),
    "map of a branch": (
        lambda x, w: tf.map_fn(lambda v: tf.cond(v[0] > 0.0, lambda: v * w, lambda: tf.sin(v)), x),
        lambda x, w: tf.stack([x[0] * w, x[1] * w, tf.sin(x[2])])),
    "scan": (lambda x, w: tf.scan(lambda a, v: tf.tanh(a * w) + v, x),
             lambda x, w: tf.stack(folded(x[0], x[1:], w))),
    "scan, initializer": (
        lambda x, w: tf.scan(lambda a, v: tf.tanh(a * w) + v, x, initializer=w * x[0]),
        lambda x, w: tf.stack(folded(w * x[0], x, w)[1:])),
    "scan, reverse": (
        lambda x, w: tf.scan(lambda a, v: tf.tanh(a * w) + v, x, reverse=True),
        lambda x, w: tf.stack(folded(x[2], [x[1], x[0]], w)[::-1])),
    "scan, reverse, initializer": (
        lambda x, w: tf.scan(lambda a, v: tf.tanh(a * w) + v, x, tf.zeros_like(x[0]), reverse=True),
        lambda x, w: tf.stack(folded(x[0] * 0.0, x[::-1], w)[:0:-1])),
    "scan of a tuple": (
        lambda x, w: tf.scan(lambda a, v: (a[1] * w, a[0] + v), x, (x[0], x[1]))[1],
        lambda x, w: pairs(x, w)),
    "foldl": (lambda x, w: tf.foldl(lambda a, v: tf.tanh(a * w) + v, x),
              lambda x, w: folded(x[0], x[1:], w)[-1]),
    "foldl, initializer": (lambda x, w: tf.foldl(lambda a, v: tf.tanh(a * w) + v, x, x[2]),
                           lambda x, w: folded(x[2], x, w)[-1]),
    "foldr": (lambda x, w: tf.foldr(lambda a, v: tf.tanh(a * w) + v, x),
              lambda x, w: folded(x[2], [x[1], x[0]], w)[-1]),
}  # fmt: skip


def folded(a, rows, w):
    found = [a]
    for v in rows:
        found.append(tf.tanh(found[-1] * w) + v)
    return found


def pairs(x, w):
    a, b, found = x[0], x[1], []
    for v in x:
        a, b = b * w, a + v
        found.append(b)
    return tf.stack(found)


@pytest.mark.slow(but=30)
@pytest.mark.parametrize("shape", [[3, 2], [None, 2], None], ids=str)
@pytest.mark.parametrize("name", LOOPS)
def test_values_and_derivatives_are_those_of_a_loop_in_python(name, shape, either):
    if shape is None and name not in ("map", "scan", "foldl, initializer"):
        shape = [3, None]
    f, in_python = LOOPS[name]
    x, w, found = tf.placeholder(tf.float64, shape), tf.Variable(0.7, dtype=tf.float64), []
    rows = [tf.reshape(x, [3, 2])[i] for i in range(3)]
    for y in (f(x, w), in_python(rows, w)):
        first = tf.gradients(y * y, [x, w])
        second = tf.gradients(first, [x, w])
        found.append([y, *first, *second])
    a, b = initialized(either).run(found, {x: X})
    for got, due in zip(a, b, strict=True):
        np.testing.assert_allclose(got, due, rtol=1e-12, atol=1e-14)


def test_static_shapes_dtypes_and_structures():
    x = tf.placeholder(tf.float32, [None, 2])
    y = tf.map_fn(lambda v: {"a": v[0] > 0.0, "b": (tf.cast(v, tf.int32),)}, x,
                  dtype={"a": tf.bool, "b": (tf.int32,)})  # fmt: skip
    assert (y["a"].shape.as_list(), y["a"].dtype) == ([None], tf.bool)
    assert (y["b"][0].shape.as_list(), y["b"][0].dtype) == ([None, 2], tf.int32)
    assert tf.scan(lambda a, v: a + v, tf.ones([4, 2])).shape.as_list() == [4, 2]
    assert run(y, {x: [[1.5, -2.5]]})["b"][0].tolist() == [[1, -2]]


def test_no_entries(either):
    x, w = tf.placeholder(tf.float32, [None, 2]), tf.Variable(2.0)
    y = tf.map_fn(lambda v: v * w, x)
    z = tf.scan(lambda a, v: a + v, x, initializer=tf.ones([2]))
    last = tf.foldl(lambda a, v: a + v * w, x, initializer=tf.ones([2]))
    fetches = [y, z, last, *tf.gradients(y, [x, w]), *tf.gradients(last, [x, w])]
    found = initialized(either).run(fetches, {x: np.zeros((0, 2))})
    empty = [np.shape(a) for a in (found[0], found[1], found[3], found[5])]
    assert (empty, found[2].tolist(), found[4], found[6]) == ([(0, 2)] * 4, [1.0, 1.0], 0.0, 0.0)


def test_without_back_prop_there_is_no_gradient():
    x = tf.constant([1.0, 2.0])
    for y in (
        tf.map_fn(lambda v: v * v, x, back_prop=False),
        tf.scan(lambda a, v: a * v, x, tf.constant(1.0), back_prop=False),
        tf.foldl(lambda a, v: a * v, x, tf.constant(1.0), back_prop=False),
    ):
        assert tf.gradients(y, x) == [None]


def test_random_numbers_differ_between_entries_and_repeat_in_the_gradient(either):
    x = tf.ones([4])
    y = tf.map_fn(lambda v: v * tf.random_uniform([], 1.0, 2.0), x)
    found, dx = either.run([y, tf.gradients(y, x)[0]])
    assert len(set(found.tolist())) == 4
    np.testing.assert_allclose(found, dx)


def ones(*sizes):
    return tf.ones(sizes)


class Forgetful(CELLS.RNNCell):
    state_size = output_size = 2

    def call(self, inputs, state):
        return state[0], state[0]


MISTAKES = {
    "fn": (lambda: tf.map_fn(3, ones(2)), ArgumentError, "callable"),
    "a scalar": (lambda: tf.map_fn(lambda v: v, ones()), ValueError, "at least one axis"),
    "another structure": (lambda: tf.map_fn(lambda v: (v, v), ones(2)), ValueError, "dtype"),
    "another dtype": (lambda: tf.map_fn(lambda v: v > 0.0, ones(2)), TypeError, "float32"),
    "a carry's dtype": (lambda: tf.scan(lambda a, v: tf.cast(a, tf.int32), ones(2)), DTypeError,
                        "float32"),
    "a carry's shape": (lambda: tf.foldl(lambda a, v: ones(3), ones(2, 2)), ShapeError, "shape"),
    "a fold's structure": (lambda: tf.foldl(lambda a, v: (a, v), ones(2)), GraphError, "structure"),
    "lengths": (lambda: run(tf.map_fn(lambda p: p[0] * p[1], (ones(2), ones(3)), tf.float32)),
                ValueError, "same number of entries"),
    "no dtype": (lambda: tf.nn.dynamic_rnn(CELLS.GRUCell(2), ones(1, 2, 3)), ValueError, "dtype"),
    "no cell": (lambda: tf.nn.dynamic_rnn(3, ones(1, 2, 3)), TypeError, "RNNCell"),
    "an unknown depth": (
        lambda: tf.nn.dynamic_rnn(CELLS.GRUCell(2), tf.placeholder(tf.float32, [1, 2, None]),
                                  dtype=tf.float32), ValueError, "must be known"),
    "a matrix of lengths": (
        lambda: tf.nn.dynamic_rnn(CELLS.GRUCell(2), ones(1, 2, 3), [[1]], dtype=tf.float32),
        ValueError, "vector"),
    "no list": (lambda: tf.nn.static_rnn(CELLS.GRUCell(2), ones(1, 2), dtype=tf.float32), TypeError,
                "sequence"),
    "an empty list": (lambda: tf.nn.static_rnn(CELLS.GRUCell(2), [], dtype=tf.float32), ValueError,
                      "empty"),
    "no cells": (lambda: CELLS.MultiRNNCell([]), ValueError, "at least one cell"),
    "one cell": (lambda: CELLS.MultiRNNCell(CELLS.GRUCell(2)), TypeError, "list or tuple"),
    "a probability": (lambda: CELLS.DropoutWrapper(CELLS.GRUCell(2), 1.5), ValueError, "input"),
    "no size": (lambda: CELLS.DropoutWrapper(CELLS.GRUCell(2), 0.5, variational_recurrent=True),
                ValueError, "input_size"),
    "an unknown depth of a cell": (
        lambda: CELLS.LSTMCell(2)(tf.placeholder(tf.float32, [1, None]), (ones(1, 2),) * 2),
        ValueError, r"lstm_cell/kernel\) must be fully defined, not \(\?, 8\)"),
    "another depth": (
        lambda: tf.nn.static_rnn(CELLS.BasicRNNCell(2), [ones(1, 3), ones(1, 4)],
                                 dtype=tf.float32),
        ValueError, r"kernel, but specified shape \(6, 2\).*found shape \(5, 2\)"),
    "a state's structure": (
        lambda: tf.nn.static_rnn(Forgetful(), [ones(1, 3)], (ones(1, 2), ones(1, 2))),
        ValueError, "must keep the structure of its state"),
    "a second cell of a name": (
        lambda: [CELLS.GRUCell(2, name="a")(ones(1, 3), ones(1, 2), scope="a") for _ in range(2)],
        ValueError, "already exists"),
    "an abstract state": (lambda: CELLS.RNNCell().zero_state(1, tf.float32), NotImplementedError,
                          "state_size"),
    "an abstract output": (lambda: CELLS.RNNCell().output_size, NotImplementedError, "output_size"),
    "an abstract cell": (lambda: CELLS.RNNCell()(ones(1, 3), ones(1, 2)), NotImplementedError,
                         "call"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_raise(name):
    call, error, words = MISTAKES[name]
    refused(call, error, words)


# -- recurrent networks ----------------------------------------------------------------------------

BATCH, TIME, DEPTH, UNITS = 3, 4, 5, 2
SEQUENCES = np.random.default_rng(0).normal(size=(BATCH, TIME, DEPTH))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def basic(v, x, h):
    y = np.tanh(np.concatenate([x, h], 1) @ v["kernel"] + v["bias"])
    return y, y


def gru(v, x, h):
    gates = sigmoid(np.concatenate([x, h], 1) @ v["gates/kernel"] + v["gates/bias"])
    r, u = gates[:, :UNITS], gates[:, UNITS:]
    c = np.tanh(np.concatenate([x, r * h], 1) @ v["candidate/kernel"] + v["candidate/bias"])
    h = u * h + (1 - u) * c
    return h, h


def lstm(v, x, state, forget=1.0, clip=np.inf, proj_clip=np.inf):
    c, h = state
    parts = np.split(np.concatenate([x, h], 1) @ v["kernel"] + v["bias"], 4, 1)
    i, j, f, o = parts
    look = lambda gate, c: v.get(f"w_{gate}_diag", 0.0) * c  # noqa: E731
    c = sigmoid(f + forget + look("f", c)) * c + sigmoid(i + look("i", c)) * np.tanh(j)
    c = np.clip(c, -clip, clip)
    h = sigmoid(o + look("o", c)) * np.tanh(c)
    if "projection/kernel" in v:
        h = np.clip(h @ v["projection/kernel"], -proj_clip, proj_clip)
    return h, (c, h)


def in_python(step, variables, xs, state, lengths=None):
    """A network written out: outputs by batch and time, and the last state."""
    ys = []
    for t in range(xs.shape[1]):
        y, after = step(variables, xs[:, t], state)
        if lengths is not None:
            on = (t < np.array(lengths))[:, None]
            y = np.where(on, y, 0.0)
            pairs = zip(after, state, strict=True) if isinstance(state, tuple) else [(after, state)]
            kept = [np.where(on, a, b) for a, b in pairs]
            after = tuple(kept) if isinstance(state, tuple) else kept[0]
        ys.append(y)
        state = after
    return np.stack(ys, 1), state


ZEROS = np.zeros((BATCH, UNITS))
KINDS = {  # a cell, the same in NumPy, and its first state
    "basic_rnn_cell": (lambda: CELLS.BasicRNNCell(UNITS, "tanh"), basic, ZEROS),
    "gru_cell": (lambda: CELLS.GRUCell(UNITS), gru, ZEROS),
    "basic_lstm_cell": (lambda: CELLS.BasicLSTMCell(UNITS), lstm, (ZEROS, ZEROS)),
    "lstm_cell": (
        lambda: CELLS.LSTMCell(UNITS, use_peepholes=True, num_proj=3, cell_clip=0.4, proj_clip=0.2,
                               forget_bias=0.5),
        lambda v, x, s: lstm(v, x, s, 0.5, 0.4, 0.2), (ZEROS, np.zeros((BATCH, 3)))),
}  # fmt: skip


def by_name(session, scope):
    prefix = f"{scope}/"
    found = {v.name: v for v in tf.trainable_variables() if v.name.startswith(prefix)}
    return {k.removeprefix(prefix).removesuffix(":0"): session.run(v) for k, v in found.items()}


@pytest.mark.parametrize("lengths", [None, [4, 0, 2]], ids=["whole", "lengths"])
@pytest.mark.parametrize("kind", KINDS)
def test_dynamic_rnn_is_a_loop_in_numpy(kind, lengths, either):
    make, step, start = KINDS[kind]
    x = tf.placeholder(tf.float64, [None, None, DEPTH])
    y, last = tf.nn.dynamic_rnn(make(), x, lengths, dtype=tf.float64)
    loss = tf.reduce_sum(tf.sin(y)) + sum(tf.reduce_sum(s * s) for s in tuple_of(last)) * 0.5
    dx, *dw = tf.gradients(loss, [x, *tf.trainable_variables()])
    initialized(either)
    scatter(either)
    values = by_name(either, f"rnn/{kind}")
    due, state = in_python(step, values, SEQUENCES, start, lengths)
    found = either.run([y, last], {x: SEQUENCES})
    np.testing.assert_allclose(found[0], due, rtol=1e-10, atol=1e-12)
    for a, b in zip(tuple_of(found[1]), tuple_of(state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10)

    def value(xs, weights):
        y, last = in_python(step, weights, xs, start, lengths)
        return np.sin(y).sum() + 0.5 * sum((s * s).sum() for s in tuple_of(last))

    slopes = either.run([dx, *dw], {x: SEQUENCES})
    check(slopes[0], SEQUENCES, lambda xs: value(xs, values))
    for (name, w), slope in zip(values.items(), slopes[1:], strict=True):
        check(slope, w, lambda w, name=name: value(SEQUENCES, {**values, name: w}))


def tuple_of(state):
    return state if isinstance(state, tuple) else (state,)


def scatter(session):
    """Give each variable random values, biases too."""
    rng = np.random.default_rng(1)
    for v in tf.trainable_variables():
        v.load(rng.normal(size=v.shape.as_list()) * 0.6, session)


def check(slope, x, value, h=1e-6):
    """Compare some elements of a gradient with differences."""
    places = np.random.default_rng(2).choice(x.size, min(x.size, 6), replace=False)
    for place in places:
        step = np.zeros(x.size)
        step[place] = h
        step = step.reshape(x.shape)
        due = (value(x + step) - value(x - step)) / (2 * h)
        np.testing.assert_allclose(slope.reshape(-1)[place], due, rtol=1e-5, atol=1e-8)


def test_the_dtype_of_a_state():
    assert CELLS.LSTMCell(2).zero_state(3, tf.float64).dtype == tf.float64


def test_an_lstm_is_the_lstm_of_torch(either):
    x = tf.placeholder(tf.float64, [BATCH, TIME, DEPTH])
    cell = CELLS.BasicLSTMCell(UNITS, forget_bias=0.0)
    y, last = tf.nn.dynamic_rnn(cell, x, dtype=tf.float64)
    kernel, bias = cell.variables
    fetches = [y, last.c, *tf.gradients(tf.sin(y), [x, kernel, bias])]
    initialized(either)
    scatter(either)
    found = either.run(fetches, {x: SEQUENCES})
    net = torch.nn.LSTM(DEPTH, UNITS, batch_first=True, dtype=torch.float64)

    def turned(w):  # from the order i, j, f, o of TensorFlow to i, f, j, o
        return np.concatenate([np.split(w, 4, -1)[k] for k in (0, 2, 1, 3)], -1).T

    weights, offset = [torch.tensor(turned(w)) for w in either.run([kernel, bias])]
    with torch.no_grad():
        net.weight_ih_l0.copy_(weights[:, :DEPTH])
        net.weight_hh_l0.copy_(weights[:, DEPTH:])
        net.bias_ih_l0.copy_(offset)
        net.bias_hh_l0.zero_()
    xs = torch.tensor(SEQUENCES, requires_grad=True)
    ys, (_, memory) = net(xs)
    torch.sin(ys).sum().backward()
    slopes = torch.cat([net.weight_ih_l0.grad, net.weight_hh_l0.grad], 1)
    due = [ys, memory[0], xs.grad, slopes, net.bias_ih_l0.grad]
    got = [*found[:3], turned(found[3]), turned(found[4])]
    for a, b in zip(got, due, strict=True):
        np.testing.assert_allclose(a, b.detach().numpy(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("build", ["static", "dynamic", "time major"])
@pytest.mark.parametrize("lengths", [None, [4, 0, 2]], ids=["whole", "lengths"])
@pytest.mark.parametrize("kind", ["gru_cell", "lstm_cell"])
def test_two_directions_are_two_runs_of_which_one_has_reversed_sequences(
    kind, lengths, build, either
):
    make = KINDS[kind][0]
    x, turned = (tf.placeholder(tf.float64, [BATCH, TIME, DEPTH]) for _ in range(2))
    options, swap = {"sequence_length": lengths, "dtype": tf.float64}, [1, 0, 2]
    if build == "static":
        listed = tf.nn.static_bidirectional_rnn(make(), make(), tf.unstack(x, axis=1), **options)
        both, last = tf.stack(listed[0], 1), listed[1:]
    else:
        xs = tf.transpose(x, swap) if build == "time major" else x
        pair, last = tf.nn.bidirectional_dynamic_rnn(
            make(), make(), xs, time_major=xs is not x, **options
        )
        both = tf.concat(pair, 2)
        both = both if xs is x else tf.transpose(both, swap)
    with tf.variable_scope("bidirectional_rnn", reuse=True):
        y, first = tf.nn.dynamic_rnn(make(), x, scope="fw", **options)
        z, second = tf.nn.dynamic_rnn(make(), turned, scope="bw", **options)
    ws = [v for v in tf.trainable_variables() if "/bw/" in v.name]
    half = both[..., both.shape[2].value // 2 :]
    found, due = ([*tf.gradients(tf.sin(out), [at, *ws])] for out, at in ((half, x), (z, turned)))
    initialized(either)
    scatter(either)

    def reverse(rows):
        ends = lengths or [TIME] * BATCH
        return np.stack([[*a[:n][::-1], *a[n:]] for a, n in zip(rows, ends, strict=True)])

    feed = {x: SEQUENCES, turned: reverse(SEQUENCES)}
    a, b, *more = either.run([both, y, z, last, (first, second), found, due], feed)
    np.testing.assert_allclose(a, np.concatenate([b, reverse(more[0])], 2), rtol=1e-12)
    for a, b in zip(more[1], more[2], strict=True):
        for p, q in zip(tuple_of(a), tuple_of(b), strict=True):
            np.testing.assert_allclose(p, q, rtol=1e-12)
    more[4][0] = reverse(more[4][0])
    for a, b in zip(more[3], more[4], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_static_rnn_and_time_major_are_the_same_network(kind, either):
    make = KINDS[kind][0]
    x, lengths = tf.placeholder(tf.float64, [BATCH, TIME, DEPTH]), [1, 4, 3]
    with tf.variable_scope("net", reuse=tf.AUTO_REUSE):
        batch, first = tf.nn.dynamic_rnn(make(), x, lengths, dtype=tf.float64)
    with tf.variable_scope("net", reuse=True):
        turned = tf.transpose(x, [1, 0, 2])
        time, second = tf.nn.dynamic_rnn(make(), turned, lengths, first, time_major=True)
        third = tf.nn.dynamic_rnn(make(), turned, lengths, dtype=tf.float64, time_major=True)[0]
    with tf.variable_scope("net", reuse=True):
        rows = tf.unstack(x, axis=1)
        listed, last = tf.nn.static_rnn(make(), rows, None, tf.float64, lengths)
        later, _ = tf.nn.static_rnn(make(), rows, last, sequence_length=lengths)
    ws = tf.trainable_variables()
    slopes = [tf.gradients(tf.sin(y), [x, *ws]) for y in (batch, third, tf.stack(listed, 1))]
    found = initialized(either).run(
        [batch, tf.transpose(third, [1, 0, 2]), tf.stack(listed, 1), first, last,
         tf.transpose(time, [1, 0, 2]), tf.stack(later, 1), slopes], {x: SEQUENCES})  # fmt: skip
    for a, b in ((0, 1), (0, 2), (3, 4), (5, 6)):
        for x, y in zip(tuple_of(found[a]), tuple_of(found[b]), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-12)
    for other in found[7][1:]:
        for a, b in zip(found[7][0], other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    assert {v.name.split("/")[2] for v in ws} == {kind}
    assert second is not None


def test_several_layers_of_one_state():
    x, sizes = tf.placeholder(tf.float32, [2, 3, DEPTH]), (3, 2)
    cells = lambda tuples: CELLS.MultiRNNCell(  # noqa: E731
        [CELLS.LSTMCell(n, state_is_tuple=tuples) for n in sizes], state_is_tuple=tuples
    )
    with tf.variable_scope("a", reuse=tf.AUTO_REUSE):
        stacked = cells(True)
        y, states = tf.nn.dynamic_rnn(stacked, x, dtype=tf.float32)
    with tf.variable_scope("a", reuse=True):
        z, joined = tf.nn.dynamic_rnn(cells(False), x, dtype=tf.float32)
    assert [v.name for v in stacked.trainable_variables] == [
        f"a/rnn/multi_rnn_cell/cell_{i}/lstm_cell/{name}:0" for i in range(2)
        for name in ("kernel", "bias")
    ]  # fmt: skip
    assert (stacked.state_size, cells(False).state_size) == (((3, 3), (2, 2)), 10)
    found = run([y, z, states, joined], {x: np.ones((2, 3, DEPTH))})
    np.testing.assert_allclose(found[0], found[1])
    np.testing.assert_allclose(np.hstack([np.hstack(s) for s in found[2]]), found[3])


class Doubled(CELLS.RNNCell):
    """A user's cell with variables of `get_variable` and a nested state."""

    state_size = (2, 1)
    output_size = (2, 1)

    def __init__(self):
        pass  # (without the constructor of the base)

    def call(self, inputs, state):
        w = tf.get_variable("w", [DEPTH, 2], tf.float64, tf.ones_initializer())
        h = tf.tanh(tf.matmul(inputs["x"], w) + state[0])
        return (h, state[1]), (h, state[1] + 1.0)


class Older(CELLS.RNNCell):
    """A user's cell in the older form, with its own scope."""

    state_size = output_size = 2

    def __call__(self, inputs, state, scope=None):
        with tf.variable_scope(scope or type(self).__name__):
            h = tf.layers.dense(inputs, 2, name="inner") + state
        return h, h


def test_cells_of_users(either):
    x = tf.placeholder(tf.float64, [2, 3, DEPTH])
    y, last = tf.nn.dynamic_rnn(Doubled(), {"x": x}, [3, 2], dtype=tf.float64)
    ys, _ = tf.nn.static_rnn(Older(), tf.unstack(x, axis=1), dtype=tf.float64, scope="old")
    z, _ = tf.nn.dynamic_rnn(Older(), x, dtype=tf.float64, scope="new")
    w = tf.trainable_variables()[0]
    assert [v.name for v in tf.trainable_variables()] == [
        "rnn/doubled/w:0", "old/Older/inner/kernel:0", "old/Older/inner/bias:0",
        "new/Older/inner/kernel:0", "new/Older/inner/bias:0",
    ]  # fmt: skip
    found = initialized(either).run([y, last, *tf.gradients(y[0], w)], {x: SEQUENCES[:2, :3]})
    assert found[0][1][..., 0].tolist() == [[0.0, 1.0, 2.0], [0.0, 1.0, 0.0]]
    assert found[1][1].tolist() == [[3.0], [2.0]]
    assert ys[0].shape.as_list() == [2, 2] and z.shape.as_list() == [2, 3, 2]

    def value(w):
        total, h = 0.0, np.zeros((2, 2))
        for t in range(3):
            after = np.tanh(SEQUENCES[:2, t] @ w + h)
            on = np.array([[True], [t < 2]])
            total, h = total + np.where(on, after, 0.0).sum(), np.where(on, after, h)
        return total

    check(found[2], np.ones((DEPTH, 2)), value)


@pytest.mark.parametrize("build", [tf.nn.dynamic_rnn, tf.nn.static_rnn], ids=["dynamic", "static"])
def test_overrides_reach_the_ops_of_a_cell(build, either):
    x = tf.placeholder(tf.float64, [2, 3, 1])
    xs = x if build is tf.nn.dynamic_rnn else tf.unstack(x, axis=1)
    cell = CELLS.BasicRNNCell(1)
    rules = {"Tanh": lambda op, dy: dy * 3.0}
    _, last = overridden(rules, lambda: build(cell, xs, dtype=tf.float64))
    w = cell.variables[0]
    dx = tf.gradients(last, x)[0]
    initialized(either)
    w.load([[2.0], [0.5]], either)
    slopes = either.run(dx, {x: SEQUENCES[:2, :3, :1]})
    np.testing.assert_allclose(slopes[..., 0], [[6.0 * 1.5**2, 6.0 * 1.5, 6.0]] * 2)


def test_networks_learn_and_are_saved(either, tmp_path):
    x, y = tf.placeholder(tf.float32, [8, 6, 1]), tf.placeholder(tf.float32, [8, 1])
    outputs, _ = tf.nn.dynamic_rnn(CELLS.GRUCell(8), x, dtype=tf.float32)
    loss = tf.reduce_mean((tf.layers.dense(outputs[:, -1], 1) - y) ** 2.0)
    step = tf.train.AdamOptimizer(0.02).minimize(loss)
    saver = tf.train.Saver()
    data = np.random.default_rng(3).normal(size=(8, 6, 1))
    feed = {x: data, y: data.sum(1)}
    initialized(either)
    first = either.run(loss, feed)
    for _ in range(60):
        either.run(step, feed)
    last = either.run(loss, feed)
    assert last < 0.3 * first
    path = saver.save(either, str(tmp_path / "net"))
    names = [name for name, _ in tf.train.list_variables(path)]
    assert {"rnn/gru_cell/gates/kernel", "rnn/gru_cell/candidate/bias"} <= set(names)
    with tf.Session() as other:
        saver.restore(other, path)
        np.testing.assert_allclose(other.run(loss, feed), last, rtol=1e-4)


# -- dropout ---------------------------------------------------------------------------------------


class Sums(CELLS.RNNCell):
    """A cell whose output is its input, and whose state counts."""

    state_size = output_size = 200

    def call(self, inputs, state):
        return inputs, state + 1.0


@pytest.mark.parametrize("varies", [True, False], ids=["each step", "variational"])
def test_dropout_of_inputs_outputs_and_states(varies, either):
    def built(*keep):
        cell = CELLS.DropoutWrapper(Sums(), *keep, not varies, 200, tf.float32, 5)
        return tf.nn.dynamic_rnn(cell, tf.ones([1, 3, 200]), dtype=tf.float32)

    ones, fed = tf.placeholder_with_default(1.0, []), tf.placeholder_with_default(0.5, [])
    found = either.run([built(0.5, 1.0, 1.0)[0], built(ones, fed, 1.0)[0], built(1.0, 1.0, 0.5)[1]])
    for y in found[:2]:
        assert set(np.unique(y)) == {0.0, 2.0}
        assert 60 < (y[0, 0] > 0).sum() < 140
        assert (y[0, 0] == y[0, 1]).all() != varies
    assert set(np.unique(found[2])) == ({0.0, 2.0, 6.0, 14.0} if varies else {0.0, 14.0})


FILTERS = {
    "by default": (None, [[False, True], True]), "all": (lambda state: True, [[True, True], True]),
    "none": (lambda state: False, [[False, False], False]),
    "the second": (lambda s: (False, True) if type(s) is tuple else True, [[False, False], True]),
}  # fmt: skip


@pytest.mark.parametrize("name", FILTERS)
def test_dropout_of_states_spares_the_memory_of_an_lstm_or_follows_a_filter(name):
    visit, due = FILTERS[name]
    cells = CELLS.MultiRNNCell([CELLS.LSTMCell(100), CELLS.GRUCell(100)])
    cell = CELLS.DropoutWrapper(
        cells, state_keep_prob=0.5, dropout_state_filter_visitor=visit
    )  # fmt: skip
    (c, h), last = run(tf.nn.dynamic_rnn(cell, tf.ones([1, 1, 4]), dtype=tf.float32)[1])
    zeros = [[bool((part == 0).any()) for part in (c, h)], bool((last == 0).any())]
    assert zeros == due


def test_the_gradient_of_dropout_repeats_the_mask(either):
    x = tf.ones([2, 3, 50])
    cell = CELLS.DropoutWrapper(CELLS.BasicRNNCell(50), output_keep_prob=0.5)
    y, _ = tf.nn.dynamic_rnn(cell, x, dtype=tf.float32)
    summed = tf.gradients(y, cell.variables[1])
    found = initialized(either).run([y, *summed])
    assert (found[0] == 0).any() and np.isfinite(found[1]).all()
    assert cell.trainable_variables == cell.variables
