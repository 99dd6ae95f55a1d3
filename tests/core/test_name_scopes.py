"""`name_scope`: paths, and what they cost."""

import asyncio
import threading

import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.core.name_scopes import PATH
from regrad.core.state import current
from regrad.errors import ArgumentError


def path():
    return ".".join(PATH.get())


def test_scopes_nest_and_end():
    with rg.name_scope("net") as outer:
        assert outer == path() == "net"
        with rg.name_scope("block1.conv") as inner, rg.name_scope("a/b"):
            assert (inner, path()) == ("net.block1.conv", "net.block1.conv.a.b")
        assert path() == "net"
    assert path() == ""


def test_it_ends_however_the_block_ends():
    with pytest.raises(KeyError), rg.name_scope("a"):
        raise KeyError
    assert path() == ""


def test_a_decorator_is_open_during_each_call():
    @rg.name_scope("a")
    def f(n):
        """What f does."""
        return path() if n == 0 else f(n - 1)

    assert (f.__name__, f.__doc__) == ("f", "What f does.")
    assert (f(0), f(2), path()) == ("a", "a.a.a", "")


def test_one_object_is_one_block_at_a_time():
    scope = rg.name_scope("a")
    with scope, pytest.raises(ArgumentError, match="is open already; name_scope"):
        scope.__enter__()
    with scope:
        assert path() == "a"


@pytest.mark.parametrize("name", ["", "a b", "*", "a..b", "a/", "/a", "_a", "a*", None, 3])
def test_names_are_checked(name):
    with pytest.raises(ArgumentError, match="name_scope: expected a name of letters"):
        rg.name_scope(name)


def test_what_runs_after_its_call_is_refused():
    async def later():
        pass

    with pytest.raises(ArgumentError, match="name_scope decorates functions; this is a coroutine"):
        rg.name_scope("a")(later)


def test_a_thread_has_a_path_of_its_own_and_a_task_a_copy():
    found = []

    async def task():
        with rg.name_scope("inner"):
            await asyncio.sleep(0)
            found.append(path())

    async def both():
        await asyncio.gather(task(), task())

    with rg.name_scope("a"):
        thread = threading.Thread(target=lambda: found.append(path()))
        thread.start()
        thread.join()
        asyncio.run(both())
    assert found == ["", "a.inner", "a.inner"]


def test_a_name_is_no_state_that_an_op_asks_for():
    before = current()
    with rg.name_scope("a"):
        assert current() is before


def test_nodes_are_named_after_the_scope():
    with tf.Graph().as_default() as graph:
        x = tf.constant(1.0, name="x")
        with rg.name_scope("a"):
            tf.tanh(x)
            with tf.name_scope("s") as scope:
                tf.tanh(x)
            tf.tanh(x, name="last")
        with rg.name_scope("a"), tf.name_scope("s"):
            assert path() == "a.s_1"
            with tf.name_scope(None):
                assert path() == ""
                tf.tanh(x)
            with tf.name_scope(scope):
                assert path() == "a.s"
            with tf.Graph().as_default():
                assert tf.constant(2.0).op.name == "Const"
        names = [op.name for op in graph.get_operations()]
    assert names == ["x", "a/Tanh", "a/s/Tanh", "a/last", "Tanh"]


def test_a_variable_scope_is_one():
    with tf.Graph().as_default(), tf.variable_scope("v"):
        assert path() == "v"
        assert tf.get_variable("w", [2]).op.name == "v/w"
