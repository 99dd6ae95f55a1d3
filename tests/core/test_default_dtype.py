"""The default dtype: what it concerns, where it ends, and that compiled functions follow it."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import regrad as rg
from regrad.errors import DTypeError

WITHOUT_A_DTYPE = {
    "scalar": lambda: rg.scalar(0.1),
    "tensor of integers": lambda: rg.tensor([1, 2]),
    "zeros": lambda: rg.zeros(3),
    "eye": lambda: rg.eye(2),
    "linspace": lambda: rg.linspace(0, 1, 3),
    "one_hot": lambda: rg.one_hot([1], 3),
    "asarray": lambda: rg.asarray(0.5),
    "Variable": lambda: rg.Variable(0.5),
    "normal": lambda: rg.random.normal(np.random.default_rng(0), (2,)),
    "fftfreq": lambda: rg.fft.fftfreq(4),
    "integers times a float": lambda: rg.arange(3) * 2.0,
    "integers divided": lambda: rg.arange(3) / 2,
    "exp of integers": lambda: rg.exp(rg.arange(3)),
    "mean of integers": lambda: rg.mean(rg.arange(3)),
    "a function of a number": lambda: rg.sqrt(2),
    "two numbers": lambda: rg.pow(2, 0.5),
    "a gradient by a number": lambda: rg.grad(lambda x: x * x)(0.3),
    "losses of integers": lambda: rg.losses.mean_squared_error([1, 0], [0, 1]),
}


@pytest.fixture
def default():
    """The function that sets the default of the process, which is put back."""
    yield rg.set_default_dtype
    rg.set_default_dtype("float32")


@pytest.mark.parametrize("make", WITHOUT_A_DTYPE.values(), ids=WITHOUT_A_DTYPE)
def test_what_has_no_dtype_takes_the_default(make):
    assert make().dtype == rg.float32
    with rg.default_dtype("float64"):
        assert make().dtype == rg.float64
    assert make().dtype == rg.float32


def test_numbers_keep_their_digits():
    with rg.default_dtype("float64"):
        assert float(rg.scalar(0.1)) == 0.1
        assert float(rg.grad(lambda x: 0.1 * x)(1.0)) == 0.1


def test_complex_numbers_are_as_wide():
    assert rg.scalar(1j).dtype == rg.complex64
    with rg.default_dtype("float64"):
        assert rg.scalar(1j).dtype == (rg.arange(2) * 1j).dtype == rg.complex128


def test_data_and_what_meets_it_keep_their_dtypes():
    single = np.ones(2, np.float32)
    with rg.default_dtype("float64"):
        for x in (rg.tensor(single), rg.tensor(single) * 0.1, rg.zeros_like(rg.tensor(single))):
            assert x.dtype == rg.float32
        assert rg.asarray([1, 2]).dtype == rg.int64


def test_scopes_nest_and_win_over_the_process(default):
    default(rg.float64)
    assert rg.get_default_dtype() == rg.float64
    with rg.default_dtype("float16"):
        with rg.default_dtype("float32"):
            assert rg.scalar(1).dtype == rg.float32
        assert rg.scalar(1).dtype == rg.float16
    assert rg.scalar(1).dtype == rg.float64


def test_a_scope_is_its_threads_and_the_switch_the_processs(default):
    found = []

    def look():
        found.append(rg.scalar(1).dtype)

    def in_a_thread():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    with rg.default_dtype("float64"):
        in_a_thread()
    default("float64")
    in_a_thread()
    assert found == [rg.float32, rg.float64]


def test_a_scope_ends_with_an_error():
    with pytest.raises(ZeroDivisionError), rg.default_dtype("float64"):
        raise ZeroDivisionError
    assert rg.get_default_dtype() == rg.float32


@pytest.mark.parametrize("wrong", ["int32", None, complex, int, "floaty", "complex64", bool])
def test_only_real_floats_are_taken(wrong, default):
    with pytest.raises(DTypeError, match=r"expected a .*dtype such as"):
        default(wrong)
    with pytest.raises(DTypeError), rg.default_dtype(wrong):
        pass
    assert rg.get_default_dtype() == rg.float32


def test_the_namespace_says_so(default):
    default("float64")
    found = rg.__array_namespace_info__().default_dtypes()
    assert (found["real floating"], found["complex floating"]) == (rg.float64, rg.complex128)


def test_v1_keeps_to_tensorflows_dtypes(default):
    import regrad.v1 as tf

    default("float64")
    with tf.Graph().as_default():
        made = [tf.constant(0.1), tf.zeros([2]), tf.one_hot([1], 2), tf.random_normal([2])]
        assert {t.dtype for t in made} == {tf.float32}


def test_a_compiled_function_follows():
    f = rg.jit(lambda x: x + rg.scalar(0.1) + rg.zeros(2))
    x = rg.arange(2)
    for _ in range(3):  # the third call is a quick one
        assert f(x).dtype == rg.float32
        with rg.default_dtype("float64"):
            y = f(x)
        assert y.dtype == rg.float64
        assert y.numpy()[0] == 0.1
    assert f.cache_info().traces == 2


def test_a_number_given_to_a_compiled_function_keeps_its_digits():
    f = rg.jit(lambda p: rg.scalar(p) * 1.0)
    assert float(f(0.1)) != 0.1
    for _ in range(2):
        with rg.default_dtype("float64"):
            assert float(f(0.1)) == 0.1


def test_64_bits_that_jax_does_not_have_are_refused():
    import jax

    f = rg.jit(lambda x: x * rg.scalar(0.1))
    with (
        jax.enable_x64(False),
        rg.default_dtype("float64"),
        pytest.raises(DTypeError, match="jax_enable_x64"),
    ):
        f(rg.tensor(np.float32(2.0)))


def test_the_gradient_of_a_compiled_function_follows():
    steep = rg.custom_grad(lambda x: (x, lambda dy: dy * (rg.scalar(0.1) + rg.zeros_like(dy))))
    f = rg.jit(lambda x: rg.astype(rg.sum(steep(x)), "float64"))
    x = rg.tensor(np.ones(2))
    by_default = rg.grad(f)(x).numpy()[0]
    with rg.default_dtype("float64"):
        exact = rg.grad(f)(x).numpy()[0]
    assert (by_default == np.float32(0.1), exact == 0.1) == (True, True)


def test_complex_ends_make_complex_values():
    assert rg.linspace(0, 1j, 3).tolist() == [0, 0.5j, 1j]
    assert rg.linspace(0, 1j, 3).dtype == rg.complex64
    with rg.default_dtype("float64"):
        assert rg.linspace(0, 1j, 3).dtype == rg.complex128
