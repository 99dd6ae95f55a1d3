"""Arithmetic of sizes that only a run can tell."""

import numpy as np
import pytest

import regrad.v1 as tf
from regrad.core import dims
from regrad.errors import UnknownShapeError
from tests.helpers.rows import refused

X, Y = dims.SizeSource(-1), dims.SizeSource(-2)
N, M = dims.size_of(X, 0), dims.size_of(Y, 1)
RUN = {-1: np.zeros((5, 2)), -2: np.zeros((3, 4))}


def value(size):
    return dims.resolved(size, lambda source: RUN[source.id])


SIZES = [
    (N + 1, 6), (1 + N, 6), (N - 2, 3), (9 - N, 4), (N * M, 20), (2 * N, 10), (N // 2, 2),
    (11 // N, 2), (N % 3, 2), (-N, -5), ((N + 2) * (M - 1) // 7, 3), (dims.at_least(N, 9), 9),
]  # fmt: skip
EQUAL = [
    (N, dims.size_of(X, 0)), (N * 1, N), (N + 0, N), (N // 1, N), (N + 2 - 2, N),
    (N + 1 + 1, N + 2), (N - 1 - 1, N - 2), (N * M, N * M), (0 * N, 0),
]  # fmt: skip


@pytest.mark.parametrize(("size", "expected"), SIZES)
def test_the_run_computes(size, expected):
    assert value(size) == expected


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_equal_sizes_are_recognised(one, other):
    assert one == other
    assert dims.same((one,), (other,))


def test_what_only_the_run_can_tell_is_asked_in_vain():
    for ask in (lambda: N == M, lambda: N == 3, lambda: N < 3, lambda: bool(N), lambda: range(N)):
        refused(ask, UnknownShapeError)
    assert dims.same((N, 3), (M, 3)) is None
    assert dims.same((N, 3), (N, 4)) is False
    assert dims.differ(3, 4) and not dims.differ(N, 4)


def test_deep_and_entangled_arithmetic_is_cheap():
    long, wide = N, N
    for _ in range(2000):
        long = long * 2 - long
    for _ in range(60):
        wide = wide + wide * 0 + wide // wide - 1 + 0
    assert value(long) == 5
    assert len(dims.sources([(long, wide)])) == 1
    assert len({long, wide}) == 2  # (where parts are computed twice this takes for ever)


def test_parts_of_an_axis_are_told_apart_inside_a_branch():
    with tf.Graph().as_default(), tf.Session() as session:
        x, p = tf.placeholder(tf.float32, [None]), tf.placeholder(tf.bool, [])
        n = tf.shape(x)[0]
        y = tf.cond(p, lambda: tf.reduce_sum(x[1:n] * x[: n - 1]), lambda: tf.reduce_sum(x[2:]))
        (dx,) = tf.gradients(y, x)
        feed = {x: [1.0, 2.0, 3.0, 4.0]}
        assert session.run(dx, {p: True, **feed}).tolist() == [2.0, 4.0, 6.0, 3.0]
        assert session.run(dx, {p: False, **feed}).tolist() == [0.0, 0.0, 1.0, 1.0]
