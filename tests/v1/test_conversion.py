"""Values that become tensors: their dtypes, strings, and the values that are refused."""

from __future__ import annotations

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.errors import DTypeError
from regrad.v1.graph import conversion
from tests.helpers.rows import refused
from tests.helpers.v1_session import run

pytestmark = pytest.mark.usefixtures("graph")

# -- strings -------------------------------------------------------------------------------------

STRINGS = {
    "a zero byte at the end": ([b"a\0", b"\0\0"], [b"a\0", b"\0\0"]),
    "one string": (b"a\0", b"a\0"),
    "text": ([["a\0", "é"]], [[b"a\0", "é".encode()]]),
    "text and bytes": (["a", b"b\0"], [b"a", b"b\0"]),
    "an array of text": (np.array(["a", "é"]), [b"a", "é".encode()]),
    "an array of objects": (np.array([b"a\0", "b"], object), [b"a\0", b"b"]),
    "NumPy's strings in a list": ([np.bytes_(b"a"), np.str_("b")], [b"a", b"b"]),
    "rows": ([np.array(["a", "b"]), ["c", "d"]], [[b"a", b"b"], [b"c", b"d"]]),
    "no string": ([], []),
}


@pytest.mark.parametrize("name", STRINGS)
def test_strings_are_bytes_and_keep_all_of_them(name):
    value, due = STRINGS[name]
    x, v = tf.constant(value, tf.string), tf.Variable(value, dtype=tf.string)
    fed = tf.placeholder(tf.string)
    made = tf.py_func(lambda: np.array(value, object), [], tf.string)
    for y in run([x, v, fed, made], {fed: value}):
        assert (y.tolist() if isinstance(y, np.ndarray) else y) == due
    assert x.dtype == v.dtype.base_dtype == tf.string


def test_a_python_function_may_return_strings():
    values = b"a\0", "é", np.array(["a"]), ["b\0"]
    first, second, third, fourth = run(
        [tf.py_func(lambda value=value: value, [], tf.string) for value in values]
    )
    assert (first, second, third.tolist(), fourth) == (b"a\0", "é".encode(), [b"a"], b"b\0")


# -- dtypes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "dtype", "due"), [
    (2**31 - 1, None, tf.int32), (2**31, None, tf.int64), (-(2**31) - 1, None, tf.int64),
    (range(2), None, tf.int32), ([], None, tf.float32), ([], tf.bool, tf.bool),
    ([], tf.string, tf.string), ([np.float64(1.0)], None, tf.float64), (3, tf.uint8, tf.uint8),
    ([[np.int64(1)]], None, tf.int64), ([np.zeros(0, np.int64)], None, tf.int64),
    (2**70, tf.float32, tf.float32), (np.int64(1), tf.int32, tf.int32), (1j, None, tf.complex128),
    (3, tf.complex64, tf.complex64), (np.float32(1.5), None, tf.float32),
], ids=str)  # fmt: skip
def test_the_dtype_of_a_constant(value, dtype, due):
    x = tf.constant(value, dtype)
    assert x.dtype == due
    assert np.asarray(run(x), object).tolist() == np.asarray(value, object).tolist()


@pytest.mark.parametrize(("value", "dtype", "words"), [
    (3, tf.string, "Expected string, got 3 of type 'int32'"),
    ("a", tf.float32, "Expected float32, got 'a' of type 'string'"),
    (1.5, tf.int32, "Expected int32, got 1.5 of type 'float32'"), (1, tf.bool, "Expected bool"),
    (True, tf.int32, "Expected int32, got True of type 'bool'"),
    (1j, tf.float32, "Expected float32"), (np.array([1.5]), tf.int32, "Expected int32"),
    (2**70, tf.string, "Expected string, got 11805"), (2**70, tf.bool, "Expected bool"),
    ([b"a", 1], None, "holds numbers, bools or strings"), ([None], None, "holds numbers"),
    ({1: 2}, None, "holds numbers"),
], ids=str)  # fmt: skip
def test_a_value_of_another_kind(value, dtype, words):
    refused(lambda: tf.constant(value, dtype), DTypeError, words)


def test_a_number_that_the_dtype_cannot_hold():
    refused(lambda: tf.constant(300, tf.uint8), OverflowError, "300 does not fit the dtype uint8")
    refused(lambda: tf.constant(2**70), OverflowError, "does not fit the dtype int64")
    refused(lambda: tf.constant([[1], [2, 3]]), ValueError, "unequal rows")


# -- convert_to_tensor ---------------------------------------------------------------------------


def test_values_that_become_tensors():
    v, x = tf.Variable(2.0, name="v"), tf.constant(3.0)
    assert tf.convert_to_tensor(x) is x
    ys = [
        tf.convert_to_tensor(value)
        for value in (v._ref(), tf.TensorShape([2, 3]), [x, v], [[x], [1.0]], rg.tensor(4.0))
    ]
    due = [2.0, [2, 3], [3.0, 2.0], [[3.0], [1.0]], 4.0]
    assert [y.tolist() for y in run(ys)] == due
    assert ys[1].dtype == tf.int32


def test_the_preferred_dtype_is_used_if_the_value_can_have_it():
    assert tf.convert_to_tensor(1, preferred_dtype=tf.float64).dtype == tf.float64
    assert tf.convert_to_tensor(1.5, preferred_dtype=tf.int32).dtype == tf.float32
    assert tf.convert_to_tensor(1, tf.int64, preferred_dtype=tf.float64).dtype == tf.int64


def test_what_has_no_value():
    op = tf.no_op(name="step")
    refused(lambda: tf.convert_to_tensor(op), TypeError, "Can't convert <tf.Operation 'step'")
    refused(lambda: tf.convert_to_tensor(len), TypeError, "Can't convert <built-in function len>")
    refused(lambda: tf.convert_to_tensor(None), ValueError, "None values not supported")
    x = tf.constant(1.0)
    refused(lambda: tf.convert_to_tensor(x, tf.int32), TypeError, "dtype int32", "Use tf.cast")


def test_operands_of_different_dtypes():
    x, i = tf.constant(1.0), tf.constant(1)
    words = "Input 1 of 'AddV2' has another dtype than float32", "dtype int32"
    refused(lambda: tf.add(x, i), TypeError, *words)
    refused(lambda: tf.add(1, 2.5), TypeError, "Input 1", "Expected int32, got 2.5")
    refused(lambda: tf.add("a", [object()]), TypeError, "Input 1.*holds numbers, bools or strings")
    refused(lambda: tf.add([object()], "a"), TypeError, "^(?!.*Input).*holds numbers, bools or")
    assert [c.name for c in tf.add(1.0, 2.0, name="sum").op.inputs] == ["sum/x:0", "sum/y:0"]


def test_eager_tensors_stay_eager_among_numbers():
    """As in a rule that is written with functions of `tf`."""
    y = tf.multiply(rg.tensor([1.0, 2.0]), 3.0)
    assert isinstance(y, rg.Tensor)
    assert y.tolist() == [3.0, 6.0]
    assert isinstance(
        tf.reshape(rg.tensor([1.0, 2.0]), rg.tensor([2, 1], dtype=rg.int32)), rg.Tensor
    )
    x = rg.tensor([1.0, 2.0])
    assert conversion.same_dtype("add", x, 3.0) == [x, 3.0]
    assert conversion.build("Mul", None, rg.multiply, x, 3.0).tolist() == [3.0, 6.0]
    assert run(tf.reshape(tf.ones([2]), tf.TensorShape([2, 1]))).shape == (2, 1)


def test_a_static_value_must_be_known():
    axis = tf.placeholder(tf.int32, [])
    refused(lambda: tf.argmax(tf.ones([2, 2]), axis), ValueError, "known only in the run")
    assert run(tf.argmax(tf.constant([1.0, 3.0]), np.int64(0))) == 1
    assert run(tf.reduce_sum(tf.ones([2, 3]), tf.constant(1))).tolist() == [3, 3]
