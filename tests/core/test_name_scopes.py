"""`name_scope` and `default_dtype`: reach, end, threads, and compiled functions that follow."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.core.name_scopes import PATH
from regrad.core.state import current
from regrad.errors import ArgumentError, DTypeError
from tests.helpers.rows import in_thread, refused


def path():
    return ".".join(PATH.get())


def test_scopes_nest_and_end():
    before = current()
    with rg.name_scope("net") as outer:
        assert outer == path() == "net"
        with rg.name_scope("block1.conv") as inner, rg.name_scope("a/b"):
            assert (inner, path()) == ("net.block1.conv", "net.block1.conv.a.b")
        assert path() == "net"
        assert current() is before  # names do not change the state of ops
    with pytest.raises(KeyError), rg.name_scope("a"):
        raise KeyError
    assert path() == ""


def test_a_decorator_is_open_during_each_call():
    @rg.name_scope("a")
    def f(n):
        """The docs of f."""
        return path() if n == 0 else f(n - 1)

    assert (f.__name__, f.__doc__) == ("f", "The docs of f.")
    assert (f(0), f(2), path()) == ("a", "a.a.a", "")


def test_one_object_is_one_block_at_a_time():
    scope = rg.name_scope("a")
    with scope:
        refused(lambda: scope.__enter__(), ArgumentError, "is open already; name_scope")
    with scope:
        assert path() == "a"


@pytest.mark.parametrize("name", ["", "a b", "*", "a..b", "a/", "/a", "_a", "a*", None, 3])
def test_names_are_checked(name):
    refused(lambda: rg.name_scope(name), ArgumentError, "name_scope: expected a name of letters")


def test_a_thread_has_a_path_of_its_own_and_a_task_a_copy():
    async def task():
        with rg.name_scope("inner"):
            await asyncio.sleep(0)
            return path()

    async def both():
        return await asyncio.gather(task(), task())

    with rg.name_scope("a"):
        assert (in_thread(path), asyncio.run(both())) == ("", ["a.inner", "a.inner"])


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
        with tf.variable_scope("v"):
            assert path() == "v"
            assert tf.get_variable("w", [2]).op.name == "v/w"
    assert names == ["x", "a/Tanh", "a/s/Tanh", "a/last", "Tanh"]


# -- default_dtype ---------------------------------------------------------------------------------


def defaults():
    return rg.__array_namespace_info__().default_dtypes()


WITHOUT_A_DTYPE = {
    "scalar": lambda: rg.scalar(0.1), "tensor of integers": lambda: rg.tensor([1, 2]),
    "zeros": lambda: rg.zeros(3), "eye": lambda: rg.eye(2),
    "linspace": lambda: rg.linspace(0, 1, 3), "one_hot": lambda: rg.one_hot([1], 3),
    "asarray": lambda: rg.asarray(0.5), "Variable": lambda: rg.Variable(0.5),
    "normal": lambda: rg.random.normal(np.random.default_rng(0), (2,)),
    "fftfreq": lambda: rg.fft.fftfreq(4), "integers times a float": lambda: rg.arange(3) * 2.0,
    "integers divided": lambda: rg.arange(3) / 2, "exp of integers": lambda: rg.exp(rg.arange(3)),
    "mean of integers": lambda: rg.mean(rg.arange(3)), "a function of a number": lambda: rg.sqrt(2),
    "two numbers": lambda: rg.pow(2, 0.5),
    "a gradient by a number": lambda: rg.grad(lambda x: x * x)(0.3),
    "losses of integers": lambda: rg.losses.mean_squared_error([1, 0], [0, 1]),
    "a complex number": lambda: rg.real(rg.scalar(1j)),
    "integers times a complex number": lambda: rg.imag(rg.arange(2) * 1j),
    "complex ends": lambda: rg.real(rg.linspace(0, 1j, 3)),
    "the namespace": lambda: np.empty(0, defaults()["real floating"]),
    "the namespace, complex": lambda: np.empty(0, defaults()["complex floating"]).real,
}  # fmt: skip


@pytest.fixture
def default():
    """The function that sets the default of the process, which is put back."""
    yield rg.set_default_dtype
    rg.set_default_dtype("float32")


@pytest.mark.parametrize("name", WITHOUT_A_DTYPE)
def test_what_has_no_dtype_takes_the_default(name, default):
    found = [WITHOUT_A_DTYPE[name]()]
    with rg.default_dtype("float64"):
        found.append(WITHOUT_A_DTYPE[name]())
    found.append(WITHOUT_A_DTYPE[name]())
    default("float64")
    found.append(WITHOUT_A_DTYPE[name]())
    assert [x.dtype for x in found] == [rg.float32, rg.float64, rg.float32, rg.float64]


def test_numbers_keep_their_digits_and_data_its_dtype():
    single = np.ones(2, np.float32)
    with rg.default_dtype("float64"):
        assert float(rg.scalar(0.1)) == float(rg.grad(lambda x: 0.1 * x)(1.0)) == 0.1
        for x in (rg.tensor(single), rg.tensor(single) * 0.1, rg.zeros_like(rg.tensor(single))):
            assert x.dtype == rg.float32
        assert rg.asarray([1, 2]).dtype == rg.int64


def default_of(n=0):
    return default_of(n - 1) if n else rg.scalar(1).dtype


def test_scopes_nest_and_win_over_the_process(default):
    default(rg.float64)
    with rg.default_dtype("float16"):
        with rg.default_dtype("float32"):
            assert default_of() == rg.float32
        assert default_of() == rg.float16
        assert in_thread(default_of) == rg.float64  # a scope is its thread's alone
    assert default_of() == rg.get_default_dtype() == rg.float64


def test_it_decorates_and_ends_with_an_error():
    decorated = rg.default_dtype("float64")(default_of)
    assert (decorated(2), default_of()) == (rg.float64, rg.float32)
    assert decorated.__name__ == "default_of"
    with pytest.raises(ZeroDivisionError), rg.default_dtype("float64"):
        raise ZeroDivisionError
    assert rg.get_default_dtype() == rg.float32


@pytest.mark.parametrize("wrong", ["int32", None, complex, int, "floaty", "complex64", bool])
def test_only_real_floats_are_taken(wrong, default):
    refused(lambda: default(wrong), DTypeError, r"expected a .*dtype such as")
    refused(lambda: rg.default_dtype(wrong).__enter__(), DTypeError)
    assert rg.get_default_dtype() == rg.float32


def test_v1_keeps_to_tensorflows_dtypes(default):
    default("float64")
    with tf.Graph().as_default():
        made = [tf.constant(0.1), tf.zeros([2]), tf.one_hot([1], 2), tf.random_normal([2])]
        assert {t.dtype for t in made} == {tf.float32}


def test_a_compiled_function_follows():
    f = rg.jit(lambda x: x + rg.scalar(0.1) + rg.zeros(2))
    g = rg.jit(lambda p: rg.scalar(p) * 1.0)
    for _ in range(3):  # the third call is a quick one
        assert (f(rg.arange(2)).dtype, float(g(0.1))) == (rg.float32, np.float32(0.1))
        with rg.default_dtype("float64"):
            assert (f(rg.arange(2)).dtype, f(rg.arange(2)).numpy()[0]) == (rg.float64, 0.1)
            assert float(g(0.1)) == 0.1
    assert f.cache_info().traces == 2


def test_64_bits_that_jax_does_not_have_are_refused():
    import jax

    f = rg.jit(lambda x: x * rg.scalar(0.1))
    with jax.enable_x64(False), rg.default_dtype("float64"):
        refused(lambda: f(rg.tensor(np.float32(2.0))), DTypeError, "jax_enable_x64")


def test_the_gradient_of_a_compiled_function_follows():
    steep = rg.custom_grad(lambda x: (x, lambda dy: dy * (rg.scalar(0.1) + rg.zeros_like(dy))))
    df = rg.grad(rg.jit(lambda x: rg.astype(rg.sum(steep(x)), "float64")))
    assert df(np.ones(2)).numpy()[0] == np.float32(0.1)
    with rg.default_dtype("float64"):
        assert df(np.ones(2)).numpy()[0] == 0.1
