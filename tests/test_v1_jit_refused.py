"""What `Session(jit=True)` cannot compile: an error that names the op and what to do."""

from __future__ import annotations

import numpy as np
import pytest

import regrad.v1 as tf
from tests.helpers.v1_session import jit_session, powers

pytestmark = pytest.mark.usefixtures("graph")
session = jit_session


def fed(dtype=tf.float32, shape=()):
    return tf.placeholder(dtype, shape, name="fed")


def python_function():
    return tf.py_func(lambda: np.float32(1.0), [], tf.float32, name="culprit")


def unique_values():
    return tf.unique(fed(shape=[2]), name="culprit")[0]


def masked():
    x = fed(shape=[2])
    return tf.boolean_mask(x, x > 0.0, name="culprit")


def a_size_from_values():
    return tf.range(fed(tf.int32), name="culprit")


def branches_of_two_shapes():
    x = fed()
    with tf.name_scope("culprit"):
        return tf.cond(x > 0.0, lambda: tf.zeros([2]), lambda: tf.zeros([3]))


def a_growing_loop():
    n, shapes = fed(tf.int32), [tf.TensorShape([]), tf.TensorShape([None])]
    with tf.name_scope("culprit"):
        return tf.while_loop(
            lambda i, y: i < n, lambda i, y: (i + 1, tf.concat([y, y], 0)),
            (tf.constant(0), tf.ones([1])), shape_invariants=shapes,
        )  # fmt: skip


def a_gradient_of_an_endless_loop():
    x = tf.ones([2])
    return tf.gradients(powers(x, fed(tf.int32)), x, name="culprit")


def an_assertion_in_a_branch():
    x = fed()

    def branch():
        with tf.control_dependencies([tf.Assert(x > 0.0, [x], name="culprit")]):
            return tf.identity(x)

    return tf.cond(x > 0.0, branch, lambda: x)


def some_text():
    return tf.constant("abc", name="culprit")


REFUSED = [
    python_function, unique_values, masked, a_size_from_values, branches_of_two_shapes,
    a_growing_loop, a_gradient_of_an_endless_loop, an_assertion_in_a_branch, some_text,
]  # fmt: skip


@pytest.mark.parametrize("make", REFUSED, ids=lambda f: f.__name__)
def test_what_cannot_be_compiled_is_named(make, session):
    y = make()
    names = {op.name for op in tf.get_default_graph().get_operations()}
    feed = {"fed:0": np.full((2,) if make in (unique_values, masked) else (), 3)}
    feed = feed if "fed" in names else None
    with pytest.raises(tf.errors.UnimplementedError, match=r"culprit.*without jit") as caught:
        session.run(y, feed)
    assert caught.value.op is not None
    with tf.Session() as plain:
        plain.run(y, feed)


def test_the_gradient_of_a_loop_without_a_bound_says_what_to_do(session):
    dx = a_gradient_of_an_endless_loop()
    with pytest.raises(tf.errors.UnimplementedError, match="maximum_iterations"):
        session.run(dx, {"fed:0": 3})
