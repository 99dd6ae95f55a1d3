"""Python numbers on their way to a dtype, and what numbers of rare dtypes do."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.errors import NumberRangeError

INTEGERS = [np.dtype(f"{u}int{n}") for u in ("", "u") for n in (8, 16, 32, 64)]
FLOATS = [np.dtype(f"float{n}") for n in (16, 32, 64)]
OTHERS = [np.dtype(d) for d in ("bool", "complex64", "complex128")]

EDGES = [0, 1, -1, 127, 128, -128, -129, 255, 256, 32767, 32768, 65535, 65536, 2**24 + 1,
         123456789, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**32 - 1, 2**32, 2**53 + 1,
         2**63 - 1, 2**63, -(2**63), 2**64 - 1, 2**64, -(2**70)]  # fmt: skip
MIXED = [True, False, 1.7, -1.7, 0.1, 3e9, -0.5, 255.9, math.inf, math.nan]


def run(fetch: Any) -> np.ndarray:
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        return session.run(fetch)


def in_graph(build: Any) -> Any:
    def made(value: Any, dtype: Any) -> np.ndarray:
        with tf.Graph().as_default():
            return run(build(value, dtype))

    return made


def assigned(value: Any, dtype: Any) -> np.ndarray:
    v = rg.Variable(np.zeros(1, dtype))
    v.assign([value])
    return v.numpy()


# Each makes one element of the dtype of the number.
CONSTRUCTORS = {
    "scalar": lambda v, d: rg.scalar(v, d),
    "tensor of a list": lambda v, d: rg.tensor([v], dtype=d),
    "tensor of nested lists": lambda v, d: rg.tensor([[v], [v]], dtype=d)[0],
    "tensor1d": lambda v, d: rg.tensor1d([v], d),
    "asarray": lambda v, d: rg.asarray(v, dtype=d),
    "asarray of a list": lambda v, d: rg.asarray([v], dtype=d),
    "Variable": lambda v, d: rg.Variable(v, dtype=d).value,
    "assign": assigned,
    "full": lambda v, d: rg.full((1,), v, dtype=d),
    "full_like": lambda v, d: rg.full_like(np.zeros(1, d), v),
    "full_like, dtype": lambda v, d: rg.full_like(np.zeros(1), v, dtype=d),
    "one_hot, on": lambda v, d: rg.one_hot([0], 1, on_value=v, dtype=d),
    "one_hot, off": lambda v, d: rg.one_hot([1], 1, off_value=v, dtype=d),
    "astype": lambda v, d: rg.astype(v, d),
    "astype of a list": lambda v, d: rg.astype([v], d),
}
WHOLE_ONLY = {
    "arange": lambda v, d: rg.arange(v, v + 1, dtype=d),
    "at_set": lambda v, d: rg.at_set(np.zeros(1, d), 0, v),
    "at_set of a list": lambda v, d: rg.at_set(np.zeros(1, d), [0], [v]),
    "pad": lambda v, d: rg.pad(np.zeros(1, d), 1, constant_value=v)[:1],
    "add": lambda v, d: np.zeros(1, d) + rg.asarray(0, dtype=d) + v,
    "maximum": lambda v, d: rg.maximum(np.zeros(1, d), v) + rg.minimum(np.zeros(1, d), v),
    "where": lambda v, d: rg.where([True], v, np.zeros(1, d)),
    "tf.constant": in_graph(lambda v, d: tf.constant(v, d)),
    "tf.constant of a list": in_graph(lambda v, d: tf.constant([v], d)),
    "tf.Variable": in_graph(lambda v, d: tf.Variable(v, dtype=d)),
    "tf.convert_to_tensor": in_graph(lambda v, d: tf.convert_to_tensor(v, d)),
    "tf.fill": in_graph(lambda v, d: tf.fill([1], tf.constant(v, d))),
    "tf.range": in_graph(lambda v, d: tf.range(v, v + 1, dtype=d)),
    "tf.one_hot": in_graph(lambda v, d: tf.one_hot([0], 1, v, dtype=d)),
    "tf.add": in_graph(lambda v, d: tf.add(tf.constant([0], d), v)),
}


def due(value: Any, dtype: np.dtype) -> np.ndarray | None:
    """NumPy's element, exactly converted; None for what an integer dtype cannot hold."""
    if dtype.kind not in "iu":
        return np.array([value]).astype(object).astype(dtype)
    if not math.isfinite(value):
        return None
    limits = np.iinfo(dtype)
    whole = math.trunc(value)
    return np.array([whole], dtype) if limits.min <= whole <= limits.max else None


def check(make: Any, value: Any, dtype: np.dtype) -> None:
    expected = due(value, dtype)
    if expected is None:
        with pytest.raises(OverflowError, match=str(dtype)) as caught:
            make(value, dtype)
        assert isinstance(caught.value, NumberRangeError)
        assert "holds integers from" in str(caught.value)
        return
    found = make(value, dtype)
    found = found.numpy() if isinstance(found, rg.Tensor) else found
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.reshape(-1), expected)


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_numbers_take_the_dtype_at_once(name: str) -> None:
    for dtype in INTEGERS + FLOATS + OTHERS:
        for value in EDGES + MIXED:
            check(CONSTRUCTORS[name], value, dtype)


@pytest.mark.parametrize("name", WHOLE_ONLY)
def test_integers_reach_an_integer_dtype_unchanged(name: str) -> None:
    for dtype in INTEGERS:
        for value in EDGES:
            if name == "tf.range" and value == np.iinfo(dtype).max:
                continue  # the limit, one further, does not fit
            check(WHOLE_ONLY[name], value, dtype)


FILLS = {
    "full_like": lambda x, v: rg.full_like(x, v),
    "one_hot": lambda x, v: rg.one_hot(x, 2, on_value=v, dtype="uint8"),
    "add": lambda x, v: x + v,
    "pad": lambda x, v: rg.pad(x, 1, constant_value=v),
    "at_set": lambda x, v: rg.at_set(x, 0, v),
}


@pytest.mark.parametrize("name", FILLS)
@pytest.mark.parametrize("library", ["jax.numpy", "torch"])
def test_fills_refuse_what_does_not_fit_in_every_library(library: str, name: str) -> None:
    xp = pytest.importorskip(library)
    x = rg.asarray(xp.asarray(np.zeros(2, "uint8")))
    for value in (256, -1):
        with pytest.raises(NumberRangeError, match=f"{value} does not fit the dtype uint8"):
            FILLS[name](x, value)
    assert rg.full_like(x, 255).tolist() == [255, 255]


def test_integers_beside_each_other_in_a_list_stay_exact() -> None:
    for values in ([2**63, 1], [2**63 + 1, 0], [2**64 - 1, 5]):  # floats, as NumPy reads them
        assert rg.tensor(values, dtype="uint64").tolist() == values
        assert rg.asarray(values).tolist() == values
    with pytest.raises(NumberRangeError, match="-1 does not fit the dtype uint64"):
        rg.asarray([2**63, -1])
    assert rg.tensor([np.int64(3), True, 2], dtype="int8").tolist() == [3, 1, 2]
    with pytest.raises(NumberRangeError, match="300 does not fit"):
        rg.tensor([np.int64(300)], dtype="uint8")
    with pytest.raises(NumberRangeError, match="too large"):
        rg.scalar(10**400)


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_arrays_are_cast_as_numpy_casts_them() -> None:
    x = np.array([300, -1, 2**31])
    for dtype in ("uint8", "int32", "float16"):
        np.testing.assert_array_equal(rg.tensor(x, dtype=dtype).numpy(), x.astype(dtype))


def test_indices_are_exact() -> None:
    with pytest.raises(IndexError, match=str(2**53 + 1)):
        rg.take(rg.asarray([1, 2]), [2**53 + 1])
    assert rg.one_hot([2**53 + 1], 1).tolist() == [[0.0]]
    assert rg.searchsorted(np.array([2**53, 2**53 + 2]), 2**53 + 1).item() == 1


def test_gradients_that_are_given_take_the_dtype_at_once() -> None:
    x = np.ones(1)
    assert rg.grad(lambda x: x * 1.0)(x, [0.1]).tolist() == [0.1]
    assert rg.vjp(lambda x: x * 1.0, x)[1]([0.1])[0].tolist() == [0.1]
    assert rg.jvp(lambda x: x * 1.0, [x], [[0.1]])[1].tolist() == [0.1]


def test_a_feed_names_the_number_that_does_not_fit() -> None:
    with tf.Graph().as_default(), tf.Session() as session:
        x = tf.placeholder(tf.int32, [1])
        with pytest.raises(NumberRangeError, match="2147483648 does not fit the dtype int32"):
            session.run(x, {x: [2**31]})


def test_full_spreads_a_tensor_and_has_its_gradient() -> None:
    y, back = rg.vjp(lambda t: rg.full((2, 3), t), rg.scalar(4.0))
    assert y.tolist() == [[4.0] * 3] * 2
    assert back(rg.ones((2, 3)))[0].item() == 6.0
    assert rg.full(2, np.array([1, 2], "int8"), dtype="int32").tolist() == [1, 2]
    with pytest.raises(ValueError, match="broadcast"):
        rg.full((2,), rg.ones(3))
