"""Threads: what one differentiates is refused in another; what they share loses nothing."""

import contextvars
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.core.registry import OPS as OPS_OF
from regrad.core.rule import NoGradient
from regrad.core.state import BESIDE, OPEN
from regrad.errors import GradientError
from regrad.graph.graph import Graph

OPS = {"unary": rg.sin, "binary": lambda x: x * x, "long": rg.sum, "mixed": lambda x: 2.0 * x + 1.0}


def plainly(op, x):
    return op(x)


def in_a_scope(op, x):
    with rg.gradient_override_map({"Cos": lambda dy: dy}):
        rg.cos(1.0)
        return op(x)


def under_a_tape(op, x):
    return rg.grad(lambda w: w * op(x).sum())(2.0)


def under_two_tapes(op, x):
    return rg.grad(rg.grad(lambda w: w * w * op(x).sum()))(2.0)


def in_a_custom_function(op, x):
    @rg.custom_grad
    def f(w):
        return w * op(x).sum(), lambda dy: dy

    return rg.grad(f)(2.0)


PLACES = [plainly, in_a_scope, under_a_tape, under_two_tapes, in_a_custom_function]


class Other(threading.Thread):
    """A thread that keeps what its function answers, or raises."""

    def __init__(self, run, *args):
        super().__init__()
        self.work = run, args
        self.error = self.answer = None
        self.start()

    def run(self):
        run, args = self.work
        try:
            self.answer = run(*args)
        except GradientError as error:
            self.error = error


@pytest.fixture(autouse=True)
def nothing_is_left_open():
    yield
    assert not OPEN and not BESIDE


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("place", PLACES)
def test_another_threads_tensor_is_refused(place, op):
    def f(x):
        other = Other(place, op, x)
        other.join()
        assert "another thread is differentiating" in str(other.error)
        return x * 3.0

    assert rg.grad(f)(2.0).item() == 3.0


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("place", PLACES[2:])
def test_also_by_a_tape_that_is_older(place, op):
    """The other thread's tape was open before this one's."""
    began, shared, given = threading.Event(), threading.Event(), []

    def late(x):
        began.set()
        assert shared.wait(60)
        return op(given[0])

    def f(x):
        given.append(x)
        shared.set()
        other.join()
        assert "another thread is differentiating" in str(other.error)
        return x * 3.0

    other = Other(place, late, None)
    assert began.wait(60)
    assert rg.grad(f)(2.0).item() == 3.0


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("place", PLACES[:-1])
def test_a_thread_in_the_same_context_sees_the_tape(place, op):
    def f(x):
        other = Other(contextvars.copy_context().run, place, op, x)
        other.join()
        assert other.error is None
        return x * other.answer.sum()

    assert rg.grad(f)(2.0).item() != place(op, rg.scalar(2.0)).item()


@pytest.mark.parametrize("place", PLACES)
def test_threads_that_share_nothing_are_not_refused(place):
    """Each differentiates its own, all at once."""
    due = [place(rg.sin, rg.scalar(k)).item() for k in range(4)]
    together = threading.Barrier(4)

    def work(k):
        together.wait(60)
        for _ in range(50):
            y = rg.value_and_grad(lambda x: x * place(rg.sin, rg.scalar(k)).sum())(1.0)
        return y.value.item()

    others = [Other(work, k) for k in range(4)]
    for other in others:
        other.join()
    assert [other.error for other in others] == [None] * 4
    assert [other.answer for other in others] == pytest.approx(due)


# -- what threads share ----------------------------------------------------------------------------
#
# Threads that are switched at every chance find a window of a few instructions in seconds.


@pytest.fixture
def restless():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(n, work):
    """What `work` answers to 0, 1, …, each in a thread, all at once."""
    together = threading.Barrier(n)

    def begin(k):
        together.wait(60)
        return work(k)

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(begin, range(n)))


def adding(w):
    return lambda: w.assign_add(1.0)


def subtracting(w):
    return lambda: w.assign_sub(-1.0)


def compiled(w):
    return rg.jit(lambda: w.assign_add(1.0))


def compiled_anew(w):
    return lambda: rg.jit(lambda: w.assign_add(1.0))()


def optimizing(w):
    import optax

    sgd = rg.train.Optimizer(optax.sgd(1.0))
    sgd.init([w])
    return lambda: sgd.apply_gradients({w.name: rg.scalar(-1.0)}, [w])


@pytest.mark.parametrize(
    ("updates", "count"),
    [
        ([adding], 100),
        ([adding, subtracting], 100),
        ([adding, compiled], 100),
        ([adding, subtracting, compiled, optimizing], 20),
        ([adding, compiled_anew], 1),
    ],
)
@pytest.mark.usefixtures("restless")
def test_no_update_is_lost(updates, count):
    w = rg.Variable(0.0)
    shared = [update(w) for update in updates]

    def work(k):
        for _ in range(count):
            shared[k % len(shared)]()

    in_threads(16, work)
    assert w.item() == 16 * count


@pytest.mark.usefixtures("restless")
def test_what_is_read_while_programs_write_stays():
    """A program writes over the memory of a Variable, but not where somebody reads it."""
    w = rg.Variable(np.zeros(100, np.float32))
    step = rg.jit(lambda: w.assign_add(rg.ones(100)))
    step()

    def work(k):
        for _ in range(400):
            if k < 2:
                step()
            else:
                x = w.value
                first = x.numpy().copy()
                assert len(set(first.tolist())) == 1
                np.testing.assert_array_equal(x.numpy(), first)

    in_threads(6, work)
    assert set(w.tolist()) == {801.0}


@pytest.mark.usefixtures("restless")
def test_what_is_assigned_while_programs_write_stays():
    """An assignment comes before a step or after it: no step undoes it."""
    w = rg.Variable(np.zeros(100, np.float32))
    step = rg.jit(lambda: w.assign_add(rg.ones(100)))
    step()

    def work(k):
        for i in range(100):
            if k:
                step()
            else:
                mine = rg.full(100, 1000.0 * (i + 1))
                w.assign(mine)
                assert set(mine.tolist()) == {1000.0 * (i + 1)}

    in_threads(3, work)
    assert 100_000 <= w.tolist()[0] <= 100_200


FORKED = """
import os, threading, time
import regrad as rg

w = rg.Variable(0.0)
threading.Thread(target=lambda: [w.assign_add(1.0) for _ in range(300_000)], daemon=True).start()
for _ in range(50):
    child = os.fork()
    if child == 0:
        w.assign_add(1.0)
        os._exit(0)
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.001)
print("all came back")
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="there is no fork")
def test_a_forked_process_can_assign():
    ran = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout == "all came back\n"


def closing(x):
    """A custom function that takes a tensor from outside, past its gradient function."""
    return rg.custom_grad(lambda w: (w * x, lambda dy: dy))(2.0 * x)


def right(x):
    return rg.custom_grad(lambda w, v: (w * v, lambda dy: (dy * v, dy * w)))(2.0 * x, x)


@pytest.mark.parametrize("trial", range(5))
@pytest.mark.usefixtures("restless")
def test_custom_functions_in_copied_contexts(trial):
    """Those that close over x are refused, each of them, and no other is."""
    refused = []

    def f(x):
        contexts = [contextvars.copy_context() for _ in range(40)]

        def work(k):
            try:
                return contexts[k].run((right, closing)[k % 2], x)
            except GradientError as error:
                refused.append((k, str(error)))

        with ThreadPoolExecutor(8) as pool:
            ys = list(pool.map(work, range(40)))
        return sum(y for y in ys if y is not None)

    assert rg.grad(f)(3.0).item() == 20 * 4 * 3.0  # of 20 times 2 x²
    assert sorted(k for k, _ in refused) == [k for k in range(40) if k % 2]
    assert all("closes over" in text for _, text in refused)


@pytest.mark.parametrize("op", OPS)
def test_a_context_that_outlives_its_custom_function_loses_nothing(op):
    """It was copied while the function ran; what is computed in it later is on no tape."""
    contexts = []

    @rg.custom_grad
    def doubled(w, save):
        contexts.append(contextvars.copy_context())
        return w * 2.0, lambda dy: dy * 2.0

    def late(x):
        y = doubled(x)
        with pytest.raises(GradientError, match="would be lost"):
            contexts[0].run(OPS[op], x)
        again = doubled(y)  # which may take over the state of the first call
        with pytest.raises(GradientError, match="would be lost"):
            contexts[1].run(OPS[op], y)
        return again

    assert rg.grad(late)(3.0).item() == 4.0


@pytest.mark.usefixtures("restless")
def test_scopes_are_of_one_thread():
    def work(k):
        rng, found = random.Random(k), []
        for _ in range(60):
            with rg.gradient_override_map({"Sin": lambda dy: dy * float(k)}):
                one = rg.grad(rg.sin)(rng.random()).item()
                with rg.gradient_override_map({"Sin": lambda dy: dy * -float(k)}):
                    two = rg.grad(lambda x: rg.cos(0.0) * rg.sin(x))(rng.random()).item()
            found.append((one, two, rg.grad(rg.sin)(0.0).item()))
        return set(found)

    assert in_threads(8, work) == [{(k, -k, 1.0)} for k in range(8)]


@pytest.mark.usefixtures("restless")
def test_one_graph_built_by_several_threads():
    graph = tf.Graph()
    with graph.as_default():
        x = tf.placeholder(tf.float32, name="x")

    def work(k):
        ys = []
        with graph.as_default():
            for i in range(60):
                with tf.name_scope("part"), tf.name_scope(f"of_{i % 3}"):
                    y = tf.multiply(x, tf.constant(float(k), name="k"), name="y") + 1.0
                    dy = tf.gradients(y, x)[0] if i % 20 == 0 else y
                ys.append((y, dy))
        return ys

    built = in_threads(8, work)
    ops = graph.get_operations()
    assert len({op.name for op in ops}) == len(ops)
    assert [op._node.number for op in ops] == list(range(len(ops)))
    assert all(graph.get_operation_by_name(op.name) is op for op in ops)
    with tf.Session(graph=graph) as session:
        for k, ys in enumerate(built):
            for i, (y, dy) in enumerate(session.run(ys, {x: 3.0})):
                assert (y, dy) == (3.0 * k + 1, k if i % 20 == 0 else 3.0 * k + 1)


def test_another_thread_adds_an_op_in_between(monkeypatch):
    """Between an op and what follows in its thread, other threads may add theirs."""
    add = Graph.add

    def interrupted(self, *args, **options):
        y = add(self, *args, **options)
        other = threading.Thread(target=add, args=(self, OPS_OF["Neg"], NoGradient(), (late,), {}))
        other.start()
        other.join()
        return y

    graph = tf.Graph()
    with graph.as_default(), tf.Session() as session:
        x = tf.placeholder(tf.float32, (), name="x")
        late = x._symbol.node.symbolic[0]
        v = tf.Variable(2.0)
        w = tf.Variable(5.0)
        session.run(tf.global_variables_initializer())

        @tf.custom_gradient
        def scaled(a):
            b = v.value()
            return a * b, lambda dy, variables: (dy * 7.0, [dy * 11.0 for _ in variables])

        def elsewhere(self, *args, **options):
            y = add(self, *args, **options)
            reading = threading.Thread(target=w._new_read, args=("late", self))
            if args[0].type == "Mul":
                monkeypatch.setattr(Graph, "add", add)
                reading.start()
                reading.join()
            return y

        monkeypatch.setattr(Graph, "add", interrupted)
        y = 3.0 * v * x
        checks = [tf.no_op("a"), tf.Assert(x > 0.0, [x]), tf.py_func(print, [x], [])]
        monkeypatch.setattr(Graph, "add", elsewhere)
        z = scaled(x)
        monkeypatch.setattr(Graph, "add", add)
        assert [op.type for op in checks] == ["NoOp", "Assert", "PyFunc"]
        found = session.run([tf.gradients(y, [x, v]), tf.gradients(z, [x, v])], {x: 3.0})
        assert found == [[6.0, 9.0], [7.0, 11.0]]
