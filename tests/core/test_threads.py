"""Threads: what one differentiates is refused in another; what they share loses nothing."""

import contextvars
import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.autodiff import variables
from regrad.core.registry import OPS as OPS_OF
from regrad.core.rule import NoGradient
from regrad.core.state import BESIDE, OPEN
from regrad.errors import GradientError
from regrad.graph.graph import OpGraph
from tests.helpers.rows import in_thread, refused, together, under

ANOTHER = GradientError, "another thread is differentiating", r"copy_context\(\)\.run"
OPS = {"unary": rg.sin, "binary": lambda x: x * x, "long": rg.sum, "mixed": lambda x: 2.0 * x + 1.0}
COS = {"Cos": lambda dy: dy}
# An op of a tensor: alone, in a scope, under tapes, in a custom function.
PLACES = {
    "plain": lambda op, x: op(x),
    "a scope": lambda op, x: under(COS, lambda: (rg.cos(1.0), op(x))[1]),
    "a tape": lambda op, x: rg.grad(lambda w: w * op(x).sum())(2.0),
    "two tapes": lambda op, x: rg.grad(rg.grad(lambda w: w * w * op(x).sum()))(2.0),
    "a custom function": lambda op, x: rg.grad(
        rg.custom_grad(lambda w: (w * op(x).sum(), lambda dy: dy))
    )(2.0),
}
ops = pytest.mark.parametrize("op", OPS.values(), ids=OPS)


@pytest.fixture(autouse=True)
def nothing_is_left_open():
    yield
    assert not OPEN and not BESIDE


@ops
@pytest.mark.parametrize("place", PLACES)
def test_another_threads_tensor_is_refused(place, op):
    def f(x):
        refused(lambda: in_thread(lambda: PLACES[place](op, x)), *ANOTHER)
        return x * 3.0

    assert rg.grad(f)(2.0).item() == 3.0


@ops
@pytest.mark.parametrize("place", [*PLACES][2:])
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
        refused(other.result, *ANOTHER)
        return x * 3.0

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(PLACES[place], late, None)
        assert began.wait(60)
        assert rg.grad(f)(2.0).item() == 3.0


@ops
@pytest.mark.parametrize("place", [*PLACES][:-1])
def test_a_thread_in_the_same_context_sees_the_tape(place, op):
    run = PLACES[place]

    def f(x):
        return x * in_thread(partial(contextvars.copy_context().run, run, op, x)).sum()

    assert rg.grad(f)(2.0).item() != run(op, rg.scalar(2.0)).item()


@pytest.mark.parametrize("place", PLACES)
def test_threads_that_share_nothing_are_not_refused(place):
    """Each differentiates its own, all at once."""
    sine = lambda k: PLACES[place](rg.sin, rg.scalar(k)).sum()  # noqa: E731

    def work(k):
        for _ in range(50):
            y = rg.value_and_grad(lambda x: x * sine(k))(1.0)
        return y.value.item()

    expected = [sine(k).item() for k in range(4)]
    assert together([partial(work, k) for k in range(4)]) == pytest.approx(expected)


# -- what threads share ----------------------------------------------------------------------------
#
# Threads that are switched at every chance find a window of a few instructions in seconds.


@pytest.fixture
def restless():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def optimizing(w):
    import optax

    sgd = rg.train.Optimizer(optax.sgd(1.0))
    sgd.init([w])
    return lambda: sgd.apply_gradients({w.name: rg.scalar(-1.0)}, [w])


UPDATES = {
    "add": lambda w: lambda: w.assign_add(1.0), "subtract": lambda w: lambda: w.assign_sub(-1.0),
    "compiled": lambda w: rg.jit(lambda: w.assign_add(1.0)),
    "compiled anew": lambda w: lambda: rg.jit(lambda: w.assign_add(1.0))(), "optimizer": optimizing,
}  # fmt: skip
MIXES = [("add", 100), ("add, subtract", 100), ("add, compiled", 100),
         ("add, subtract, compiled, optimizer", 20), ("add, compiled anew", 1)]  # fmt: skip


@pytest.mark.parametrize(("updates", "count"), MIXES)
@pytest.mark.usefixtures("restless")
def test_no_update_is_lost(updates, count):
    w = rg.Variable(0.0)
    shared = [UPDATES[name](w) for name in updates.split(", ")]

    def work(k):
        for _ in range(count):
            shared[k % len(shared)]()

    together([partial(work, k) for k in range(16)])
    assert w.item() == 16 * count


def read(w, i):
    x = w.value
    first = x.numpy().copy()
    assert len(set(first.tolist())) == 1
    np.testing.assert_array_equal(x.numpy(), first)


def assign(w, i):
    mine = rg.full(100, 1000.0 * i)
    w.assign(mine)
    assert set(mine.tolist()) == {1000.0 * i}


# What is done beside two threads with steps: by how many, how often, and the bounds of the sum.
BESIDE_STEPS = [(read, 4, 400, (801, 801)), (assign, 1, 100, (100_000, 100_200))]


@pytest.mark.parametrize(("job", "threads", "count", "bounds"), BESIDE_STEPS)
@pytest.mark.usefixtures("restless")
def test_reads_and_assignments_beside_programs_that_write(job, threads, count, bounds):
    """A program writes over no memory that is read; no step undoes an assignment."""
    w = rg.Variable(np.zeros(100, np.float32))
    step = rg.jit(lambda: w.assign_add(rg.ones(100)))
    step()

    def work(k):
        for i in range(1, count + 1):
            step() if k < 2 else job(w, i)

    together([partial(work, k) for k in range(2 + threads)])
    assert bounds[0] <= w.tolist()[0] <= bounds[1] and len(set(w.tolist())) == 1


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


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_can_assign():
    command = [sys.executable, "-c", FORKED]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
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
    wrong = []

    def f(x):
        contexts = [contextvars.copy_context() for _ in range(40)]

        def work(k):
            try:
                return contexts[k].run((right, closing)[k % 2], x)
            except GradientError as error:
                wrong.append((k, str(error)))

        with ThreadPoolExecutor(8) as pool:
            ys = list(pool.map(work, range(40)))
        return sum(y for y in ys if y is not None)

    assert rg.grad(f)(3.0).item() == 20 * 4 * 3.0  # of 20 times 2 x²
    assert sorted(k for k, _ in wrong) == [k for k in range(40) if k % 2]
    assert all("closes over" in text for _, text in wrong)


@ops
def test_a_context_that_outlives_its_custom_function_loses_nothing(op):
    """It was copied while the function ran; what is computed in it later is on no tape."""
    contexts = []

    @rg.custom_grad
    def doubled(w, save):
        contexts.append(contextvars.copy_context())
        return w * 2.0, lambda dy: dy * 2.0

    def late(x):
        y = doubled(x)
        refused(lambda: contexts[0].run(op, x), GradientError, "would be lost")
        again = doubled(y)  # which may take over the state of the first call
        refused(lambda: contexts[1].run(op, y), GradientError, "would be lost")
        return again

    assert rg.grad(late)(3.0).item() == 4.0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::regrad.errors.RetraceWarning")
@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("sine", [rg.sin, rg.jit(rg.sin)], ids=["eager", "jit"])
def test_scopes_are_of_one_thread(sine):
    def work(k):
        rng, found = random.Random(k), set()
        for _ in range(60):
            with rg.gradient_override_map({"Sin": lambda dy: dy * float(k)}):
                one = rg.grad(sine)(rng.random()).item()
                with rg.gradient_override_map({"Sin": lambda dy: dy * -float(k)}):
                    two = rg.grad(lambda x: rg.cos(0.0) * sine(x))(rng.random()).item()
            found.add((one, two, rg.grad(sine)(0.0).item()))
        return found

    assert together([partial(work, k) for k in range(8)]) == [{(k, -k, 1.0)} for k in range(8)]


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
                    ys.append((y, tf.gradients(y, x)[0] if i % 20 == 0 else y))
        return ys

    built = together([partial(work, k) for k in range(8)])
    nodes = graph.get_operations()
    assert len({op.name for op in nodes}) == len(nodes)
    assert [op._node.number for op in nodes] == list(range(len(nodes)))
    assert all(graph.get_operation_by_name(op.name) is op for op in nodes)
    with tf.Session(graph=graph) as session:
        for k, ys in enumerate(built):
            for i, found in enumerate(session.run(ys, {x: 3.0})):
                assert found == (3.0 * k + 1, k if i % 20 == 0 else 3.0 * k + 1)


def test_another_thread_adds_an_op_in_between(monkeypatch):
    """Between an op and what follows in its thread, other threads may add theirs."""
    add = OpGraph.add

    def interrupted(self, *args, **options):
        y = add(self, *args, **options)
        in_thread(lambda: add(self, OPS_OF["Neg"], NoGradient(), (late,), {}))
        return y

    def elsewhere(self, *args, **options):
        y = add(self, *args, **options)
        if args[0].type == "Mul":
            monkeypatch.setattr(OpGraph, "add", add)
            in_thread(lambda: w._new_read(w._ref(), self))
        return y

    with tf.Graph().as_default(), tf.Session() as session:
        x = tf.placeholder(tf.float32, (), name="x")
        late = x._symbol.node.symbolic[0]
        v, w = tf.Variable(2.0), tf.Variable(5.0)
        session.run(tf.global_variables_initializer())

        @tf.custom_gradient
        def scaled(a):
            b = v.value()
            return a * b, lambda dy, variables: (dy * 7.0, [dy * 11.0 for _ in variables])

        monkeypatch.setattr(OpGraph, "add", interrupted)
        y = 3.0 * v * x
        checks = [tf.no_op("a"), tf.Assert(x > 0.0, [x]), tf.py_func(print, [x], [])]
        monkeypatch.setattr(OpGraph, "add", elsewhere)
        z = scaled(x)
        monkeypatch.setattr(OpGraph, "add", add)
        assert [op.type for op in checks] == ["NoOp", "Assert", "PyFunc"]
        found = session.run([tf.gradients(y, [x, v]), tf.gradients(z, [x, v])], {x: 3.0})
        assert found == [[6.0, 9.0], [7.0, 11.0]]


def test_an_assignment_waits_while_a_program_updates_variables():
    v = rg.Variable(1.0)
    with ThreadPoolExecutor(1) as pool:
        with variables.UPDATES:
            assigned = pool.submit(v.assign, 2.0)
            with pytest.raises(TimeoutError):
                assigned.result(timeout=0.2)
            assert v.item() == 1
        assigned.result()
    assert v.item() == 2
