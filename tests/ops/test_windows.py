"""Convolution, pooling and image ops: what the samples cannot say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import regrad as rg
from regrad.errors import ArgumentError
from regrad.ops import convolution as cv
from regrad.ops import image, pooling, windows
from tests.helpers.op_rows import firing, in_libraries, libraries, on, outcomes, slope
from tests.helpers.rows import refused
from tests.samples import spread

X = spread(1, 4, 4, 2)
W = spread(3, 3, 2, 3, seed=1)
NAN, INF = np.nan, np.inf


def values(t: Any) -> list[float]:
    return t.numpy().reshape(-1).tolist()


def image_of(*numbers: Any) -> np.ndarray:
    """Rows of numbers as an image of one channel."""
    return np.array(numbers, np.float64).reshape(1, len(numbers), -1, 1)


# -- geometry ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 12))
@pytest.mark.parametrize("size", (1, 2, 3, 5))
@pytest.mark.parametrize("stride", (1, 2, 3))
@pytest.mark.parametrize("dilation", (1, 2))
def test_same_covers_the_data_with_the_smaller_half_first(
    n: int, size: int, stride: int, dilation: int
) -> None:
    win = windows.windows("test", (n, n), (size, 1), (stride, 1), "same", (dilation, 1))
    (before, after), other = win.padding
    assert win.outputs == (-(-n // stride), n)
    assert before + after == max(0, (win.outputs[0] - 1) * stride + (size - 1) * dilation + 1 - n)
    assert after - before in (0, 1)
    assert other == (0, 0)


@pytest.mark.parametrize(("pad", "due"), [
    ("same", "same"), ("VALID", "valid"), (0, ((0, 0), (0, 0))), (np.int64(2), ((2, 2), (2, 2))),
    ([[1, 2], [3, 4]], ((1, 2), (3, 4))), (np.array([[1, 2], [3, 4]]), ((1, 2), (3, 4))),
    ([[0, 0], [1, 0], [0, 1], [0, 0]], ((1, 0), (0, 1))),
])  # fmt: skip
def test_padding_as_users_write_it(pad: Any, due: Any) -> None:
    assert windows.as_padding(pad, 2, "test") == due


@pytest.mark.parametrize("pad", [
    "full", None, 1.5, -1, [1, 1], [[0, 0]], [[0, 0], [0, -1]], [[0, 0], [1.5, 0]],
    [[1, 0], [0, 0], [0, 0], [0, 0]], rg.asarray(1),
])  # fmt: skip
def test_unknown_padding_is_an_error(pad: Any) -> None:
    refused(lambda: cv.conv2d(X, W, 1, pad), ArgumentError, r"conv2d: pad")


@pytest.mark.parametrize("strides", [0, -1, 1.5, (1, 2, 3), (1,), True, None, rg.asarray(1)])
def test_unknown_strides_are_an_error(strides: Any) -> None:
    refused(lambda: cv.conv2d(X, W, strides, "same"), ArgumentError, "conv2d: strides")
    refused(lambda: pooling.max_pool(X, strides, 1, "same"), ArgumentError, "max_pool: filter_size")


def test_lists_may_change_after_the_call() -> None:
    pad = [[1, 1], [1, 1]]

    def f(x: Any) -> Any:
        y = cv.conv2d(x, W, [1, 1], pad)
        pad[0][0] = 9
        return y

    np.testing.assert_allclose(rg.grad(f)(X), rg.grad(lambda x: cv.conv2d(x, W, 1, 1))(X))


# -- values and dtypes -----------------------------------------------------------------------------

INTS, TAPS = np.arange(16).reshape(1, 4, 4, 1), np.ones((2, 2, 1, 1), np.int32)
FLAGS, FALLING = (np.array([[0, 0, 1], [0, 0, 0]], bool).reshape(1, 2, 3, 1),
                  image_of([-1, -2], [-3, -4]))  # fmt: skip
INFINITE, MOVED, ROWS = image_of([INF], [1], [2], [3]), spread(2, 3, 4, 2), image_of([1, 1], [1, 1])
BLOCKS = [2, 3], [[1, 0], [0, 2]]
HALVES = {t: (X.astype(t), W.astype(t)) for t in ("float16", "float32", "float64")}
PAIR = np.zeros((2, 2, 1))
TIED = image_of([0, 1, 1], [1, 1, 0])


def flat(f: Any) -> Any:
    return lambda *xs: np.ravel(np.asarray(f(*xs)._values()))


def pooled(x: Any) -> Any:
    return pooling.max_pool(x, 2, 2, "valid")


def pooled_by_1(x: Any) -> Any:
    return pooling.max_pool(x, 2, 1, "valid")


def halves(x: Any, w: Any) -> Any:
    y = pooling.max_pool(cv.conv2d(x, w, 1, "same"), 2, 2, "same")
    return pooling.avg_pool(y, 2, 2, "same").dtype


test_values = outcomes({
    "dtypes": (lambda: [cv.conv2d(INTS, TAPS, 1, "same").dtype,
                        cv.conv2d(INTS, TAPS.astype(float), 1, "same").dtype,
                        pooling.avg_pool(INTS, 2, 2, "same").dtype,
                        pooling.max_pool(INTS, 2, 2, "same").dtype,
                        image.resize_nearest(INTS, (2, 2)).dtype,
                        image.resize_bilinear(INTS, (2, 2)).dtype],
               ["float32", "float64", "float32", "int64", "int64", "float32"]),
    "gradients of two dtypes": (
        lambda: [dx.dtype for dx in rg.grads(lambda x, w: cv.conv2d(x, w, 1, "same"))(
            [X, W.astype(np.float32)])], ["float64", "float32"]),
    **{f"max_pool of {t}": (lambda t=t: flat(pooling.max_pool)(FLAGS.astype(t), 2, 1, "same"),
                            [0, 1, 1, 0, 0, 0]) for t in ("bool", "u1")},
    **{f"{t} stays": (lambda xw=xw: halves(*xw), t) for t, xw in HALVES.items()},
    "padding is no maximum": (lambda: flat(pooling.max_pool)(FALLING, 3, 2, "same"), [-1]),
    "nor in dilation2d": (lambda: flat(image.dilation2d)(FALLING, np.zeros((3, 3, 1)), 2, "same"),
                          [-1]),
    "avg_pool of ones": (lambda: flat(pooling.avg_pool)(ROWS, 2, 1, "same"), [1, 1, 1, 1]),
    # TensorFlow.js divides the gradient by the whole window
    "avg_pool divides by what lies in the image": (
        lambda: flat(slope(lambda x: pooling.avg_pool(x, 2, 1, "same")))(ROWS),
        [0.25, 0.75, 0.75, 2.25]),
    "max_pool, second": (lambda: slope(slope(pooled))(X), 0),
    "an infinite pixel": (lambda: flat(image.resize_nearest)(INFINITE, (8, 1))[2:],
                          [1, 1, 2, 2, 3, 3]),
    "an infinite gradient": (
        lambda: flat(rg.grad(lambda x: image.resize_nearest(x, (8, 1))))(
            INFINITE, np.repeat(INFINITE, 2, axis=1)), [INF, 2, 4, 6]),
    "batch_to_space is the inverse": (
        lambda: image.batch_to_space(image.space_to_batch(MOVED, *BLOCKS), *BLOCKS), MOVED),
    "space_to_batch": (lambda: image.space_to_batch(MOVED, *BLOCKS).shape, (12, 2, 2, 2)),
})  # fmt: skip

test_the_first_maximum_takes_the_gradient = in_libraries({
    "max_pool": (flat(rg.grad(pooled_by_1)), TIED, [[[[2.0], [3.0]]]], [0, 5, 0, 0, 0, 0]),
    **{f"dilation2d by {i}": (flat(slope(lambda x, w: image.dilation2d(x, w, 1, "valid"), i)),
                              TIED, PAIR, due)
       for i, due in enumerate(([0, 2, 0, 0, 0, 0], [1, 1, 0, 0]))},
    "NaN": (flat(pooled), image_of([5, NAN], [NAN, 7]), [NAN]),
    "the gradient of NaN": (flat(slope(pooled)), image_of([5, NAN], [NAN, 7]), [0, 1, 0, 0]),
    "an infinite gradient": (flat(slope(lambda x: rg.sqrt(pooled(x)))), image_of([0, -1], [-2, -3]),
                             [INF, 0, 0, 0]),
})  # fmt: skip


def test_nearest_does_not_round_below_whole_numbers() -> None:
    # 41 * (49 / 49) is 41, but 49 * (1 / 49) is 0.9999999999999999
    for old in range(1, 60):
        x = np.arange(float(old)).reshape(1, old, 1, 1)
        assert values(image.resize_nearest(x, (old, 1))) == list(range(old))
        assert values(image.resize_nearest(x, (3 * old, 1))) == [i // 3 for i in range(3 * old)]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("convolve", "images", "filter", "strides"), [
    (cv.conv2d, (6, 40, 40, 16), (3, 3, 16, 4), 1),  # some images at a time
    (cv.conv2d, (5, 30, 31, 8), (3, 2, 8, 4), 2),
    (cv.conv2d, (2, 20, 20, 2), (12, 12, 2, 3), 1),  # more taps than are spelt out
    (cv.depthwise_conv2d, (3, 9, 10, 4), (3, 3, 4, 2), 2),
    (cv.depthwise_conv2d, (3, 9, 10, 4), (4, 3, 4, 1), 1),
])  # fmt: skip
def test_convolutions_agree_on_jax_and_numpy(
    convolve: Any, images: tuple[int, ...], filter: tuple[int, ...], strides: int
) -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=s).astype(np.float32) for s in (images, filter))
    f = rg.value_and_grads(lambda x, w: rg.sum(rg.sin(convolve(x, w, strides, "same"))))
    expected = f([x, w])
    found = f([on("jax", x), on("jax", w)])
    for a, b in zip((found.value, *found.grads), (expected.value, *expected.grads), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-3, atol=1e-3)


def test_half_floats_are_added_up_in_float32_on_jax() -> None:
    x, w = (on("jax", np.ones(s, np.float16)) for s in ((1, 64, 64, 1), (3, 3, 1, 1)))
    dw = rg.grad(lambda w: rg.sum(cv.conv2d(x, w, 1, "same")))(w)
    assert values(dw)[4] == 4096  # in float16 a sum of ones stops at 2048


@pytest.mark.slow(but=3)
@libraries
@pytest.mark.parametrize("pool", [pooling.max_pool, pooling.avg_pool])
@pytest.mark.parametrize("pad", ["valid", "same", 1])
def test_tiles_have_the_gradient_of_windows(library: str, pool: Any, pad: Any) -> None:
    """Windows that do not overlap, on data that they do not cover: each element has its own."""
    x = np.random.default_rng(0).integers(0, 3, (2, 7, 8, 2)).astype(np.float64)
    shape = pool(x, 3, 3, pad).shape
    dy = np.arange(1.0, 1 + math.prod(shape)).reshape(shape)
    dx = rg.grad(lambda x: pool(x, 3, 3, pad))(on(library, x), on(library, dy))
    by_differences = differences(lambda x: values(pool(x, 3, 3, pad)) @ dy.ravel(), x, pool)
    np.testing.assert_allclose(dx.numpy(), by_differences, atol=1e-6)


def differences(f: Callable[[np.ndarray], float], x: np.ndarray, pool: Any) -> np.ndarray:
    """The slopes of f; a tie is broken for the first in the order of memory."""
    x = x - 1e-3 * np.arange(x.size).reshape(x.shape) / x.size if pool is pooling.max_pool else x
    steps = 1e-6 * np.eye(x.size).reshape(x.size, *x.shape)
    return np.array([(f(x + h) - f(x - h)) / 2e-6 for h in steps]).reshape(x.shape)


# -- nothing to sum ------------------------------------------------------------------------------


@libraries
@pytest.mark.parametrize(("x", "w"), [
    ((0, 4, 4, 2), (3, 3, 2, 3)), ((1, 4, 4, 0), (3, 3, 0, 3)), ((1, 4, 4, 2), (3, 3, 2, 0)),
    ((1, 0, 4, 2), (3, 3, 2, 3)),
])  # fmt: skip
def test_empty_convolutions(library: str, x: Any, w: Any) -> None:
    def f(x: Any, w: Any) -> Any:
        y = cv.conv2d(x, w, 1, "same")
        assert y.shape == (*x.shape[:3], w.shape[3])
        assert not np.any(y._values())
        return y

    inputs = [on(library, np.ones(s)) for s in (x, w)]
    dx, dw = rg.grads(f)(inputs)
    assert (dx.shape, dw.shape) == (x, w)
    assert not np.any(dx.numpy())
    assert not np.any(dw.numpy())


@pytest.mark.parametrize("shape", [(0, 4, 4, 2), (1, 4, 4, 0), (1, 0, 4, 2)])
def test_empty_pools(shape: Any) -> None:
    for pool in (pooling.max_pool, pooling.avg_pool):
        y = pool(np.ones(shape), 2, 2, "same")
        assert y.shape == (shape[0], -(-shape[1] // 2), 2, shape[3])
        dx = rg.grad(lambda x, pool=pool: pool(x, 2, 2, "same"))(np.ones(shape))
        assert dx.shape == shape


# -- overrides, and large batches ----------------------------------------------------------------

SEPARABLE = W[:, :, :, :1], spread(1, 1, 2, 1)
test_overrides_of_conv2d_fire_inside = firing({
    "conv1d": ("Conv2D", lambda x: cv.conv1d(x, W[0], 1, "same"), X[0]),
    "separable_conv2d": ("Conv2D", lambda x: cv.separable_conv2d(x, *SEPARABLE, 1, "same"), X),
})  # fmt: skip


def test_a_large_batch_is_computed_in_blocks() -> None:
    # several blocks, the last one smaller, for both layouts of the matrix of windows
    for channels in (1, 9):
        x = np.random.default_rng(0).normal(size=(70, 30, 30, channels))
        w = spread(5, 5, channels, 2, seed=1)
        whole = cv.conv2d(x, w, 1, "same").numpy()
        single = [cv.conv2d(image, w, 1, "same").numpy() for image in x[[0, 35, 69]]]
        np.testing.assert_allclose(whole[[0, 35, 69]], single)
        dw = rg.grad(lambda w, x=x: cv.conv2d(x, w, 1, "same"))(w)
        parts = [rg.grad(lambda w, i=i: cv.conv2d(i, w, 1, "same"))(w).numpy() for i in x]
        np.testing.assert_allclose(dw, sum(parts))

        def by_x(x: Any, w: Any = w) -> Any:
            return rg.grad(lambda x: cv.conv2d(x, w, 1, "same"))(x).numpy()

        np.testing.assert_allclose(by_x(x)[35], by_x(x[35]))
