"""What `Session(jit=True)` cannot compile: an error that names the op and what to do."""

from __future__ import annotations

import numpy as np
import pytest

import regrad.v1 as tf
from tests.helpers.v1_session import jit_session, powers

pytestmark = pytest.mark.usefixtures("graph")
session = jit_session


def growing(n):
    shapes = [tf.TensorShape([]), tf.TensorShape([None])]
    turn = lambda i, y: (i + 1, tf.concat([y, y], 0))  # noqa: E731
    return tf.while_loop(lambda i, y: i < n, turn, (tf.constant(0), tf.ones([1])), shapes)


def asserted(x):
    with tf.control_dependencies([tf.Assert(x > 0.0, [x], name="culprit")]):
        return tf.identity(x)


VECTOR, NUMBER, WHOLE = (tf.float32, [2]), (tf.float32, []), (tf.int32, [])
REFUSED = {  # a function of what is fed
    "a Python function": (lambda x: tf.py_func(np.sin, [x], tf.float32, name="culprit"), NUMBER),
    "unique values": (lambda x: tf.unique(x, name="culprit")[0], VECTOR),
    "a mask": (lambda x: tf.boolean_mask(x, x > 0.0, name="culprit"), VECTOR),
    "a size from values": (lambda n: tf.range(n, name="culprit"), WHOLE),
    "branches of two shapes": (
        lambda x: tf.cond(x > 0.0, lambda: tf.zeros([2]), lambda: tf.zeros([3])), NUMBER),
    "a growing loop": (growing, WHOLE),
    "a gradient of an endless loop": (
        lambda n: tf.gradients(powers(x := tf.ones([2]), n), x, name="culprit"), WHOLE),
    "an assertion in a branch": (
        lambda x: tf.cond(x > 0.0, lambda: asserted(x), lambda: x), NUMBER),
    "text": (lambda x: tf.constant("abc", name="culprit"), NUMBER),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compiled_is_named(name, session):
    build, (dtype, shape) = REFUSED[name]
    x = tf.placeholder(dtype, shape)
    with tf.name_scope("culprit"):
        y = build(x)
    feed = {x: np.full(shape, 3)}
    with pytest.raises(tf.errors.UnimplementedError, match=r"culprit.*without jit") as caught:
        session.run(y, feed)
    assert caught.value.op is not None
    assert "endless" not in name or "maximum_iterations" in str(caught.value)
    with tf.Session() as plain:
        plain.run(y, feed)
