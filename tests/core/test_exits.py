"""Scopes of every kind that are left in the wrong place, or never."""

import asyncio
import contextlib
import gc
import itertools
import linecache
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, copy_context
from functools import partial

import pytest
import torch

import regrad as rg
import regrad.torch
import regrad.v1 as tf
from regrad.core.state import current
from regrad.errors import ArgumentError, OpenScopeWarning
from regrad.torch import open_scopes
from tests.helpers.rows import in_thread, refused

X = rg.tensor([-2.0, 0.5])
SIGN = {"Sign": lambda dy: dy * 3}
OTHER_GRAPH = tf.Graph()


def slope():
    return rg.grad(rg.sign)(X).tolist()[0]


def slope_in_torch():
    x = torch.tensor([-2.0], requires_grad=True)
    return torch.autograd.grad(torch.sign(x).sum(), x)[0].item()


def slope_in_graph():
    with tf.Session() as session:
        x = tf.constant([-2.0])
        return session.run(tf.gradients(tf.sign(x), x)[0])[0]


def default_session():
    session = tf.get_default_session()
    return session is not None and session.run(tf.constant(2.0)) == 2.0


def variable_scope():
    return tf.get_variable_scope().name


# Each kind: a scope, a sight of it, and the results of that inside and outside.
KINDS = {
    "core": (lambda: rg.gradient_override_map(SIGN), slope, 3, 0),
    "torch": (lambda: regrad.torch.gradient_override_map(SIGN), slope_in_torch, 3, 0),
    "graph": (lambda: tf.get_default_graph().gradient_override_map(SIGN), slope_in_graph, 3, 0),
    "default_dtype": (lambda: rg.default_dtype("float64"), lambda: rg.scalar(1).dtype.itemsize,
                      8, 4),
    "name_scope": (lambda: tf.name_scope("a/"), lambda: tf.no_op().name.rpartition("/")[0],
                   "a", ""),
    "variable_scope": (lambda: tf.variable_scope("v"), variable_scope, "v", ""),
    "variable_op_scope": (lambda: tf.variable_op_scope([], "v"), variable_scope, "v", ""),
    "control_dependencies": (lambda: tf.control_dependencies([tf.no_op()]),
                             lambda: len(tf.no_op().control_inputs), 1, 0),
    "session": (tf.Session, default_session, True, False),
    "default graph": (OTHER_GRAPH.as_default, lambda: tf.get_default_graph() is OTHER_GRAPH,
                      True, False),
}  # fmt: skip


def soon(holds):
    """Whether something holds after a while: torch frees what a thread had after its end."""
    end = time.monotonic() + 30
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
        gc.collect()
    return holds()


@pytest.fixture(autouse=True)
def graph():
    with tf.Graph().as_default() as graph:
        yield graph
    assert current() is None
    assert open_scopes.SCOPES.get() == ()
    assert soon(lambda: threading.Thread.start.__module__ == "threading")


def leave(scope):
    scope.__exit__(None, None, None)


def in_a_pool(call):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


async def awaited(call):
    call()


WRONG = {
    "a thread": in_thread, "a pool": in_a_pool,
    "a thread with the context": lambda call: in_thread(partial(copy_context().run, call)),
    "to_thread": lambda call: asyncio.run(asyncio.to_thread(call)),
    "a copied context": lambda call: copy_context().run(call),
    "an empty context": lambda call: Context().run(call),
    "a task": lambda call: asyncio.run(awaited(call)),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(("make", "see", "inside", "outside"), KINDS.values(), ids=KINDS)
def test_a_wrong_exit_raises_and_changes_nothing(make, see, inside, outside, wrong):
    assert see() == outside
    scope = make()
    scope.__enter__()
    assert see() == inside
    for _ in range(2):
        refused(lambda: WRONG[wrong](partial(leave, scope)), ArgumentError,
                "exited in a different thread or context.* still open")  # fmt: skip
        assert see() == inside
    leave(scope)
    assert see() == outside


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_call_of_a_saved_exit_changes_nothing(kind):
    """Also if another scope, or the scope itself, is open then."""
    make, see, inside, outside = KINDS[kind]
    scope = make()
    scope.__enter__()
    assert see() == inside
    end = scope.__exit__
    end(None, None, None)
    reopened = [scope] if kind in ("core", "torch", "default_dtype") else []
    for again in (None, make(), *reopened):
        if again is not None:
            again.__enter__()
        before = see()
        assert before == (outside if again is None else inside)
        with contextlib.suppress(ArgumentError):
            end(None, None, None)
        assert see() == before
        if again is not None:
            leave(again)
        assert see() == outside


@pytest.mark.parametrize("kind", ["name_scope", "variable_scope", "default graph"])
def test_a_block_is_entered_once(kind):
    """A second `with` changes nothing, neither inside of the block nor after its end."""
    make, see, inside, outside = KINDS[kind]
    block = make()
    with block:
        refused(lambda: block.__enter__(), ArgumentError, "open, or has ended. Make a new")
        assert see() == inside
    refused(lambda: block.__enter__(), ArgumentError, "open, or has ended. Make a new")
    assert see() == outside


@pytest.mark.parametrize("kind", ["core", "graph", "default_dtype"])
def test_a_scope_that_is_never_left_says_where_it_was_opened(kind):
    make, see, _, outside = KINDS[kind]
    scope = make()
    scope.__enter__()
    see()
    with pytest.warns(OpenScopeWarning, match=r"(test_exits.py:\d+|dtype: .*) was never") as caught:
        del scope
        gc.collect()
    (one,) = caught
    assert one.filename == __file__
    assert "__enter__()" in linecache.getline(__file__, one.lineno)
    assert see() == outside


def test_a_scope_of_torch_is_open_as_long_as_its_thread():
    make, see, inside, outside = KINDS["torch"]
    pool = ThreadPoolExecutor(1)
    assert pool.submit(lambda: (make().__enter__(), see())[1]).result() == inside
    gc.collect()
    assert pool.submit(see).result() == inside
    with pytest.warns(OpenScopeWarning, match=r"test_exits.py:\d+ was never exited") as caught:
        pool.shutdown()
        assert soon(lambda: len(caught) > 0)
    assert see() == outside


def test_the_line_is_that_of_the_user_behind_an_exit_stack():
    with pytest.warns(OpenScopeWarning) as caught:
        stack = contextlib.ExitStack()
        stack.enter_context(rg.gradient_override_map(SIGN))
        slope()
        stack.pop_all()
        gc.collect()
    assert caught[0].filename == __file__


def holding(make, see):
    with make():
        see()
        yield


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("alive", [False, True], ids=["thread ended", "thread goes on"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_scope_that_is_finalised_elsewhere_is_in_force_nowhere_else(kind, alive, graph):
    """A generator that holds it was begun in one thread, and is collected in another."""
    make, see, _, outside = KINDS[kind]
    held = []

    def begin():
        with graph.as_default():
            held.append(holding(make, see))
            next(held[0])

    with ThreadPoolExecutor(1) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore", OpenScopeWarning)
        pool.submit(begin).result()
        if not alive:
            pool.shutdown()
        held.clear()
        gc.collect()
        assert see() == outside
        assert slope() == 0.0
        with rg.gradient_override_map(SIGN):
            assert slope() == 3.0
        if alive and kind == "core":  # nobody can leave it there: it has ended
            assert pool.submit(see).result() == outside
        pool.shutdown()
        gc.collect()
    assert rg.grad(lambda x: rg.sum(x * x))(X).tolist() == [-4.0, 1.0]


def test_a_scope_that_is_collected_out_of_turn_leaves_the_inner_one():
    outer = rg.gradient_override_map({"Sign": lambda dy: dy * 5, "Sin": "Identity"})
    outer.__enter__()
    rg.sin(1.0)
    with rg.gradient_override_map(SIGN):
        with pytest.warns(OpenScopeWarning):
            del outer
            gc.collect()
        assert slope() == 3.0
    assert slope() == 0.0


both = pytest.mark.parametrize(("scope", "see"), [
    (rg.gradient_override_map, slope), (regrad.torch.gradient_override_map, slope_in_torch),
], ids=["core", "torch"])  # fmt: skip


@both
def test_scopes_left_out_of_turn_are_an_error(scope, see):
    a = holding(lambda: scope(SIGN), see)
    b = holding(lambda: scope({"Relu": "Identity"}), see)
    next(a), next(b)
    refused(lambda: next(a), ArgumentError, "exited out of order")
    with pytest.warns(UserWarning, match="matched nothing"):
        next(b, None)
    assert see() == 0.0
    again = scope({"Sign": rg.rules.optional(SIGN["Sign"])})
    with again:
        refused(lambda: again.__enter__(), ArgumentError, "open already")


@both
@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_scopes_of_tasks_close_in_any_order(scope, see, order):
    """Each task keeps its rule until it leaves its own scope, whichever scope was opened last."""
    found = []

    async def under(factor, turns, events):
        with scope({"Sign": lambda dy: dy * factor}):
            for turn in turns:
                await events[turn].wait()
                found.append(see())
                events[turn + 1].set()
        assert see() == 0.0

    async def together():
        events = [asyncio.Event() for _ in range(7)]
        events[0].set()
        turns = [(k, 3 + order.index(k)) for k in range(3)]
        await asyncio.gather(*[under(float(k), turns[k], events) for k in range(3)])

    asyncio.run(together())
    assert found == [0.0, 1.0, 2.0, *map(float, order)]
