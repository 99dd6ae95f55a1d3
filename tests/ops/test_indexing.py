"""Indexing: what the samples table cannot say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import regrad as rg
from regrad.errors import ArgumentError, DTypeError, ShapeError
from regrad.ops import indexing
from regrad.ops.getitem import getitem
from tests.helpers.op_rows import in_libraries, outcomes, slope
from tests.helpers.rows import refused, under

ROWS = np.arange(12.0).reshape(3, 4)
LIBRARIES = [np.asarray, jnp.asarray, torch.asarray]
RAISING = [np.asarray, torch.asarray]


def rows(library=np.asarray):
    return rg.asarray(library(ROWS))


# -- against NumPy -----------------------------------------------------------------------------


def random_slice(rng, n):
    start, stop = (None if rng.random() < 0.3 else int(rng.integers(-n - 2, n + 3)) for _ in "ab")
    return slice(start, stop, int(rng.choice([1, 1, 2, -1, -2, 3])))


def random_index(rng, shape):
    """Ints, slices, None, `...`, arrays and at most one mask, in any order."""
    entries, axis, common = [], 0, [(2,), (2, 1), (), (1,)][rng.integers(4)]
    may_mask = rng.random() < 0.3
    while axis < rng.integers(len(shape) + 1):
        n, r = shape[axis], rng.random()
        if r < 0.25 and n:
            entries.append(int(rng.integers(-n, n)))
        elif r < 0.5:
            entries.append(random_slice(rng, n))
        elif r < 0.6:
            entries.append(None)
            continue
        elif r < 0.65:
            return (*entries, ...)
        elif r < 0.9 and n:
            entries.append(rng.integers(-n, n, common).astype(rng.choice(["i1", "i4", "i8"])))
        elif may_mask:
            may_mask, spanned = False, int(rng.integers(0, min(3, len(shape) - axis) + 1))
            entries.append(np.asarray(rng.random(shape[axis : axis + spanned]) < 0.5))
            axis += spanned - 1
        else:
            continue
        axis += 1
    return tuple(entries)


@pytest.mark.slow(but=30)
@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("library", LIBRARIES)
def test_any_index_means_what_it_means_in_numpy(library, seed):
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.integers(1 - (seed % 7 == 0), 4, rng.integers(5)))
    values = np.arange(1.0, np.prod(shape) + 1).reshape(shape)
    index = random_index(rng, shape)
    try:
        due = values[index]
    except IndexError:  # arrays that do not broadcast, a mask among them
        refused(lambda: getitem(rg.asarray(values), index), (IndexError, ShapeError))
        return
    x = rg.asarray(library(values))
    np.testing.assert_array_equal(getitem(x, index)._values(), due)

    weights = np.cos(np.arange(due.size)).reshape(due.shape)
    dx = rg.grad(lambda x: (x[index] * library(weights)).sum(), unconnected="zero")(x)
    added = np.zeros(shape)
    np.add.at(added, index, weights)
    np.testing.assert_allclose(dx._values(), added, atol=1e-12)

    changed = values.copy()
    changed[index] = weights
    y = rg.at_set(x, index, rg.asarray(library(weights)))
    np.testing.assert_array_equal(y._values(), changed)
    y = rg.at_add(x, index, rg.asarray(library(weights)))
    np.testing.assert_allclose(y._values(), values + added)
    np.testing.assert_array_equal(x._values(), values)


# -- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("index", "error", "words"), [
    (3, IndexError, "index 3 is out of range for axis 0"),
    ((0, -5), IndexError, "index -5 is out of range for axis 1"),
    ((0, 0, 0), IndexError, "too many indices"), ((..., ...), IndexError, "one '...'"),
    (1.0, DTypeError, "float32"), ([1.0], DTypeError, "astype"),
    (np.array([0.5]), DTypeError, "integers, slices and masks"), ("x", ArgumentError, "'x'"),
    (slice(None, None, 0), ArgumentError, "step"),
    (np.array([True, False]), IndexError, "mask of shape"),
    (([0, 1], [0, 1, 2]), ShapeError, "broadcast"), ([0, 3], IndexError, "out of"),
    (([0, -4], [1, 1]), IndexError, "out of"),
])  # fmt: skip
@pytest.mark.parametrize("library", RAISING)
def test_index_errors(library, index, error, words):
    x = rows(library)
    refused(lambda: getitem(x, index), error, words)
    refused(lambda: rg.at_set(x, index, 0.0), error, words)


@pytest.mark.parametrize("library", RAISING)
@pytest.mark.parametrize("call", [
    lambda x: rg.take(x, [3], axis=0),
    lambda x: rg.take(x, np.array([[0], [4], [0]]), axis=1, batch_dims=1),
    lambda x: rg.take_along_axis(x, [[4]], axis=1),
    lambda x: indexing.scatter_along_axis(x, np.full((3, 4), 9), (3, 5), axis=1),
    lambda x: rg.gather_nd(x, [[0, 4]]), lambda x: rg.scatter_nd([[0], [1], [2]], x, (2, 4)),
    lambda x: rg.segment_sum(x, [0, 1, 2], 2), lambda x: rg.at_set(x, [5], 0.0),
    lambda x: rg.at_add(x, [-4], 0.0),
])  # fmt: skip
def test_indices_out_of_range_raise(library, call):
    refused(lambda: call(rows(library)), IndexError, "out of")


# -- conventions ---------------------------------------------------------------------------------

WHOLE, THREE, MIRRORED = rg.asarray(np.arange(3)), [1.0, 2.0, 3.0], [(5, 0)]
SINGLE, DOUBLE = rg.asarray(np.ones(3, "f4")), rg.asarray(np.ones(2, "f8"))
TALL, BYTES = rg.asarray(np.arange(1000.0).reshape(500, 2)), np.array([[100, 1], [-1, 0]], np.int8)
JAX, FAR, NONE = rg.asarray(jnp.asarray(ROWS)), [0, 5, 0], [-1, -1]
test_values = outcomes({
    "integers into integers": (lambda: rg.at_set(WHOLE, 0, 7), [7, 1, 2]),
    "their dtype": (lambda: rg.at_set(WHOLE, [0, 1], [8, 9]).dtype, "int64"),
    **{f"dtypes of {f.__name__}": (
        lambda f=f: [f(SINGLE, [0, 2], DOUBLE).dtype, f(SINGLE, slice(2), DOUBLE).dtype,
                     *[slope(lambda x, y: f(x, [0, 2], y), i)(SINGLE, DOUBLE).dtype
                       for i in (0, 1)]],
        ["float32", "float32", "float32", "float64"]) for f in (rg.at_set, rg.at_add)},
    # a mask, no product: infinite and NaN gradients stop where they were overwritten
    **{f"overwritten at {i}": (
        lambda i=i: slope(lambda x: rg.at_set(rg.sqrt(x), i, 1.0))(rg.tensor([0.0, 4.0]))[1], 0.25)
       for i in (0, [0], [True, False])},
    "beside NaN": (lambda: slope(lambda x: x[1:] * 2)(rg.asarray([np.nan, np.inf, 1.0])),
                   [0, 2, 2]),
    "small index dtypes": (lambda: rg.gather_nd(TALL, BYTES), [201, 998]),
    "small dtypes of places": (
        lambda: rg.scatter_nd(BYTES, rg.tensor([1.0, 2.0]), (500, 2))[100, 1], 1),
    "iteration": (lambda: list(rows()), ROWS),
    "a pad reflects again": (lambda: rg.pad(rg.tensor(THREE), MIRRORED, "reflect"),
                             np.pad(THREE, (5, 0), "reflect")),
    # TensorFlow.js drops the reflected parts
    "its gradient": (lambda: slope(lambda x: rg.pad(x, [(2, 1)], "reflect"))(rg.tensor(THREE)),
                     [1, 3, 2]),
    "no segments": (lambda: rg.segment_sum(np.ones((2, 3)), NONE, 0).shape, (0, 3)),
    "their gradient": (lambda: slope(lambda x: rg.segment_sum(x, NONE, 0))(np.ones((2, 3))),
                       np.zeros((2, 3))),
    # JAX takes the nearest element, forward and backward
    "JAX, take": (lambda: rg.take(JAX, [7, -9], axis=1), ROWS[:, [3, 0]]),
    "JAX, an index": (lambda: JAX[[7], [9]], [11]),
    "JAX, the gradient of take": (lambda: slope(lambda x: rg.take(x, [7, -9], axis=1))(JAX),
                                  [[1, 0, 0, 1]] * 3),
    "JAX, segment_sum": (lambda: rg.segment_sum(JAX, FAR, 2), [ROWS[0] + ROWS[2], [0] * 4]),
    "JAX, its gradient": (lambda: slope(lambda x: rg.segment_sum(x, FAR, 2))(JAX),
                          [[1] * 4, [0] * 4, [1] * 4]),
})  # fmt: skip
AGAIN, ZEROS = [0, 2, 0], np.zeros(3)
test_repeated_indices = in_libraries({
    "at_set, the last wins": (lambda x, y: rg.at_set(x, AGAIN, y), ZEROS, THREE, [3, 0, 2]),
    **{f"at_set by {i}": (slope(lambda x, y: rg.at_set(x, AGAIN, y), i), ZEROS, THREE, due)
       for i, due in enumerate(([0, 1, 0], [0, 1, 1]))},
    "at_add": (lambda x, y: rg.at_add(x, AGAIN, y), ZEROS, THREE, [4, 0, 2]),
})  # fmt: skip


@pytest.mark.parametrize("index", [0, slice(None), slice(None, None, -1), ..., (None, 0)])
def test_a_write_to_all_of_a_tensor_is_not_a_scatter(index):
    # XLA ends the process over a `reverse` of a scatter at an empty index
    f = rg.jit(lambda x: rg.flip(rg.at_set(x, index, rg.sum(x))))
    x = rg.tensor([[1.0, 2.0, 4.0]])
    assert "scatter" not in f.lower(x).as_text()
    assert f(x).tolist() == [[7, 7, 7]]
    assert rg.jit(rg.grad(f))(x).tolist() == [[3, 3, 3]]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_indices_of_any_integer_dtype(library, dtype):
    x, ids = rows(library), np.array([2, 0], dtype)
    assert x[ids].tolist() == ROWS[[2, 0]].tolist()
    assert x[ids, ids].tolist() == ROWS[[2, 0], [2, 0]].tolist()
    assert rg.take_along_axis(x, ids[None], axis=1).tolist() == ROWS[:, [2, 0]].tolist()
    dx = rg.grad(lambda x: rg.take(x, ids, axis=0).sum())(x)
    assert dx.tolist() == [[1.0] * 4, [0.0] * 4, [1.0] * 4]
    assert rg.one_hot(ids, 3).tolist() == [[0, 0, 1], [1, 0, 0]]


def test_an_index_tensor_is_an_input():
    x, i = rows(), rg.asarray(np.array([0, 2]))
    with rg.gradient_override_map({"GatherV2": lambda op, grad: (None, None)}) as used:
        x[i]
    assert [hit.op_type for hit in used.hits] == ["GatherV2"]
    assert rg.asarray(np.arange(3.0))[rg.asarray(1)].item() == 1.0
    assert x[rg.asarray(0) : rg.asarray(2)].shape == (2, 4)


def test_everything_taken_is_the_tensor_itself():
    x = rows()
    for index in (..., (), slice(None), (slice(None), ...), (slice(0, 9), slice(0, None, 1))):
        assert x[index] is x


def test_wide_rows_add_up():
    """The sparse product that takes over for wide rows on NumPy."""
    rng = np.random.default_rng(0)
    updates, ids = rng.standard_normal((400, 64)), rng.integers(0, 7, 400)
    due = np.zeros((7, 64))
    np.add.at(due, ids, updates)
    for dtype, rtol in (("f8", 1e-12), ("f4", 1e-4)):
        y = rg.segment_sum(rg.asarray(updates.astype(dtype)), ids, 7)
        assert y.dtype == dtype
        np.testing.assert_allclose(y.numpy(), due, rtol=rtol, atol=rtol * 10)
    y = rg.segment_sum(rg.asarray((updates * 9).astype("i8")), ids, 7)
    assert y.dtype == np.int64


def test_results_can_be_written_to_by_nobody():
    """at_set and its kin never touch their input, and an update of nothing is x."""
    x = rows()
    for index in (0, [0, 1], [], (slice(0, 0),), [False] * 3):
        rg.at_set(x, index, 5.0)
        rg.at_add(x, index, 5.0)
    assert x.tolist() == ROWS.tolist()


# -- under jax.jit ---------------------------------------------------------------------------------


def traced(f, *arrays):
    return jax.jit(lambda *a: f(*map(rg.asarray, a))._data)(*map(jnp.asarray, arrays))


@pytest.mark.parametrize("f", [
    lambda x, i: x[i], lambda x, i: x[:, i, None], lambda x, i: x[i, i[::-1]],
    lambda x, i: x[1, ::-2], lambda x, i: rg.at_set(x, i, x[:2]),
    lambda x, i: rg.at_set(x, x > 3, 0.0), lambda x, i: rg.at_add(x, (slice(None), i), 1.0),
    lambda x, i: rg.segment_sum(x[:2], i - 1, 2),
    lambda x, i: rg.take(x, i[None] * rg.asarray([[1], [0], [1]]), axis=1, batch_dims=1),
    lambda x, i: rg.grad(lambda x: (rg.take_along_axis(x, i[None], axis=1) ** 2).sum())(x),
    lambda x, i: rg.grad(lambda x: (rg.pad(x, 1, "reflect") ** 2).sum())(x),
    lambda x, i: rg.one_hot(i, 3),
])  # fmt: skip
def test_traced_by_jax(f):
    ids = np.array([2, 0])
    due = f(rg.asarray(ROWS), rg.asarray(ids))
    np.testing.assert_allclose(traced(f, ROWS, ids), due._values())


def test_a_mask_under_jit_names_where():
    refused(lambda: traced(lambda x: x[x > 3], ROWS), ArgumentError, "where")


def test_a_mask_from_an_overridden_comparison_raises():
    """The comparison's rule could not fire through x[mask], so it must not be skipped."""
    masked = rg.grad(lambda x: x[x > 3].sum())
    call = lambda: under({"Greater": lambda dy, a, b: (dy, None)}, masked, rows())  # noqa: E731
    refused(call, rg.errors.GradientError, "being differentiated")


@pytest.mark.filterwarnings("error")
def test_int32_jax_without_x64_warns_of_nothing():
    f = lambda x: (getitem(x, ([0, 1], [1, -1])).sum() + getitem(x, np.array([1, 1])).sum()  # noqa: E731
                   + rg.at_set(x, [0, 0], 1.0).sum() + rg.segment_sum(x, [1, -1], 2).sum()
                   + rg.take_along_axis(x, [[1], [2]], axis=1).sum())  # fmt: skip
    with jax.enable_x64(False):
        x = rg.asarray(jnp.arange(6, dtype=jnp.float32).reshape(2, 3))
        assert rg.grad(f)(x).tolist() == [[1.0, 3.0, 1.0], [3.0, 3.0, 5.0]]
        assert rg.one_hot(jnp.asarray([1]), 2).dtype == np.float32
