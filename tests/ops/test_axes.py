"""Shapes, reductions, scans and sorting: what the samples cannot say of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import regrad as rg
from regrad.core.shapes import as_slice, ascending, window
from regrad.errors import ArgumentError, ShapeError
from regrad.ops import array, joining
from regrad.ops.reduction import moments, vector_norm
from tests.helpers.op_rows import firing, in_libraries, outcomes, slope
from tests.helpers.rows import refused

NAN, INF = np.nan, np.inf
REDUCTIONS = [
    rg.sum, rg.mean, rg.prod, rg.max, rg.min, rg.var, rg.std, rg.logsumexp, vector_norm,
    rg.any, rg.all, rg.count_nonzero,
]  # fmt: skip


# -- arguments, and what is empty ------------------------------------------------------------------


@pytest.mark.parametrize("f", REDUCTIONS, ids=lambda f: f.__name__)
def test_axes_may_be_lists_and_must_exist(f: Any) -> None:
    x = rg.ones((2, 3, 4))
    assert f(x, axis=[0, -1]).shape == (3,)
    refused(lambda: f(x, axis=3), ShapeError, "axis 3 is out of range")
    refused(lambda: f(x, axis=(0, -3)), ArgumentError, "twice")


@pytest.mark.parametrize("f", [rg.max, rg.min, rg.argmax, rg.argmin], ids=lambda f: f.__name__)
@pytest.mark.parametrize("as_array", [np.asarray, torch.asarray])
def test_nothing_has_no_largest_element(f: Any, as_array: Any) -> None:
    x = rg.asarray(as_array(np.zeros((0, 3))))
    for options in ({}, {"axis": 0}):
        words = rf"{f.__name__}.*no elements.*\(0, 3\)"
        refused(lambda options=options: f(x, **options), ShapeError, words)
    assert f(x, axis=1).shape == (0,)


def test_windows_are_slices() -> None:
    for n in range(5):
        values = list(range(n))
        for start in (None, -6, -2, 0, 1, 3, 6):
            for stop in (None, -6, -2, 0, 1, 3, 6):
                for step in (None, -3, -1, 1, 2):
                    chosen = values[start:stop:step]
                    w = window(slice(start, stop, step), n)
                    assert w[1] == len(chosen)
                    assert values[as_slice(ascending(w))] == sorted(chosen)
                    assert not chosen or w[0] == chosen[0]


# -- values and dtypes -----------------------------------------------------------------------------

NOTHING, PAIR, SMALL = rg.zeros((0, 2)), rg.tensor([1.0, 2.0]), rg.asarray(np.array([1, 2], "i1"))
FLAGS = rg.asarray(np.array([[True, False], [False, False]]))
SINGLE, DOUBLE = rg.asarray(np.ones(2, "f4")), rg.asarray(np.ones(2, "f8"))
INFINITE, TWO = rg.asarray(np.array([[-INF, -INF], [0.0, -INF], [INF, 1.0]])), rg.ones((2, 2))
FLAT = (rg.mean, rg.var, rg.std, rg.logsumexp, vector_norm)
MOVED = (array.flip, array.tril, array.diagonal, array.permute_dims, array.diag)
LINEAR = (lambda x: joining.concat([x, x]), lambda x: array.tile(x, (2, 1)), array.flip,
          array.diagonal, lambda x: joining.split(x, 2)[0])  # fmt: skip
KEEP_NOTHING = ("Sum", "Mean", "Unreduce", "UnreduceMean", "Cumsum")
TOP = rg.top_k(rg.tensor([1.0, 3.0, 2.0]), 2)[1]
EMPTY = (rg.sum, rg.prod, rg.logsumexp, vector_norm, lambda x: rg.max(x, axis=1))


def joined(a: str, b: str) -> Any:
    xs = [rg.asarray(np.ones(2, dtype)) for dtype in (a, b)]
    return lambda: [joining.concat(xs).dtype, joining.stack(xs).dtype]


def of_integers(dtype: str) -> Any:
    x = rg.asarray(np.array([1, 0, 1], dtype))
    return lambda: [rg.sum(x).dtype, rg.prod(x).dtype, *[f(x).dtype for f in FLAT], rg.max(x).dtype,
                    rg.count_nonzero(x).dtype, rg.argmax(x).dtype, rg.any(x).dtype]  # fmt: skip


def scanned_dtypes(f: Any) -> Any:
    wide = lambda x: f(x, dtype=rg.float64)  # noqa: E731
    return lambda: [f(SMALL).dtype, f(SMALL, dtype="float32").dtype, rg.cumulative_max(SMALL).dtype,
                    f(SMALL, include_initial=True)[1:], slope(wide)(PAIR).dtype]  # fmt: skip


def by_dtype(f: Any) -> Any:
    wide = lambda x: f(x, dtype=rg.float64)  # noqa: E731
    return lambda: [wide(PAIR).dtype, f(SMALL, dtype="float32").dtype, slope(wide)(PAIR).dtype]


test_values = pytest.mark.filterwarnings("error")(outcomes({
    **{f"joined {a}, {b}": (joined(a, b), [due] * 2) for a, b, due in [
        ("int32", "float32", "float32"), ("int64", "float32", "float32"),
        ("float32", "float64", "float64"), ("bool", "int8", "int8"), ("uint8", "int8", "int16")]},
    "stack of a number": (lambda: joining.stack([rg.asarray(np.float64(2.0)), 1]).dtype, "float64"),
    "stack of numbers": (lambda: joining.stack([1, 2]), [1.0, 2.0]),
    "concat of a list": (lambda: joining.concat([rg.tensor([1.0]), [2, 3]]), [1.0, 2.0, 3.0]),
    "the gradients of a promotion": (
        lambda: [dx.dtype for dx in rg.grads(lambda a, b: rg.concat([a, b]))([SINGLE, DOUBLE])],
        ["float32", "float64"]),
    "bools are moved": (lambda: [f(FLAGS).dtype for f in MOVED], ["bool"] * 5),
    "integers are moved": (lambda: array.tile(rg.asarray([1, 2]), (2,)), [1, 2, 1, 2]),
    "one tensor, stacked": (lambda: slope(lambda x: rg.stack([x, x, 3 * x]))(PAIR), [5.0, 5.0]),
    "one tensor, joined": (lambda: slope(lambda x: joining.concat([x, x]))(PAIR), [2.0, 2.0]),
    "unstack of nothing": (lambda: len(joining.unstack(rg.zeros((0, 3)))), 0),
    "unstack of empty ones": (lambda: len(joining.unstack(rg.zeros((2, 0)))), 2),
    # refused unless linear: shape ops keep no tensor
    "forward mode of shape ops": (
        lambda: [rg.jvp(f, [TWO], [TWO])[1] for f in LINEAR], [f(TWO).numpy() for f in LINEAR]),
    "linear ops keep nothing": (
        lambda: all(rg.find_op(t).rule.keeps(frozenset({0})) == (frozenset(), False)
                    for t in KEEP_NOTHING), True),
    # of nothing, the neutral element
    "of nothing": (lambda: [rg.sum(NOTHING), rg.prod(NOTHING), vector_norm(NOTHING, ord=2),
                            rg.any(NOTHING), rg.all(NOTHING)], [0, 1, 0, False, True]),
    "means of nothing": (lambda: [rg.mean(NOTHING, axis=0), rg.std(NOTHING)], [[NAN] * 2, NAN]),
    "logsumexp of nothing": (lambda: rg.logsumexp(NOTHING, axis=0), [-INF, -INF]),
    "gradients of nothing": (lambda: [slope(f)(NOTHING).shape for f in EMPTY], [(0, 2)] * 5),
    **{f"of {dtype}": (of_integers(dtype), ["int64"] * 2 + ["float32"] * 5
                       + [dtype, "int64", "int64", "bool"]) for dtype in ("int8", "int32", "bool")},
    "moments of integers": (lambda: moments(rg.asarray([1, 3])), (2.0, 1.0)),
    **{f"dtypes of {f.__name__}": (by_dtype(f), ["float64", "float32", "float32"])
       for f in (rg.sum, rg.prod)},
    **{f"dtypes of {f.__name__}": (scanned_dtypes(f), ["int64", "float32", "int8", due, "float32"])
       for f, due in ((rg.cumulative_sum, [1, 3]), (rg.cumulative_prod, [1, 2]))},
    # ties, infinities and NaN
    "the gradient of a NaN": (lambda: slope(rg.max)(rg.tensor([1.0, NAN, 3.0])), [0, 1, 0]),
    "a NaN owns the rest": (lambda: slope(rg.cumulative_max)(rg.tensor([1.0, NAN, 5.0])),
                            [1, 2, 0]),
    "std of equal numbers": (lambda: slope(rg.std)(rg.tensor([2.0, 2.0])), [0, 0]),
    "more correction than elements": (lambda: rg.var(rg.tensor([1.0]), correction=1), NAN),
    "logsumexp of infinities": (lambda: rg.logsumexp(INFINITE, axis=1), [-INF, 0, INF]),
    "logsumexp of NaN": (lambda: rg.logsumexp(rg.tensor([NAN, 1.0])), NAN),
    "its gradient": (lambda: slope(lambda x: rg.logsumexp(x, axis=1))(INFINITE[:2]),
                     [[0, 0], [1, 0]]),
    **{f"norm {k} of zeros": (lambda f=lambda x, k=k: vector_norm(x, ord=k): [
        f(rg.zeros(3)), slope(f)(rg.zeros(3)), slope(slope(f))(rg.zeros(3))], [0, [0] * 3, [0] * 3])
       for k in (2, 1, INF, -INF, 3, 1.5, 0.5, -1)},
    **{f"norm {k} of a zero among others": (
        lambda k=k: np.isfinite(slope(lambda x: vector_norm(x, ord=k))(rg.tensor([0, 1.0, -2.0]))
                                .numpy()), [True] * 3) for k in (2, 1, 3, 0.5, -1, INF)},
    "top_k whose values are unused": (
        lambda: slope(lambda x: x[TOP] * x[TOP])(rg.tensor([1.0, 3.0, 2.0])), [0, 6, 4]),
    "indices are free of the tape": (
        lambda: slope(lambda x: x * (int(rg.argsort(x)[0]) + int(rg.top_k(x, 1)[1][0])))(
            rg.tensor([2.0, 1.0])), [1, 1]),
}))  # fmt: skip

TIES, STEPS = [[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]], [1.0, 3.0, 3.0, 2.0, 3.0, 4.0]
EQUAL, WEIGHTS = [2.0, 1.0, 2.0, 1.0, 2.0], np.arange(5.0)
GREATEST = {"max": rg.max, "-min": lambda x, **o: -rg.min(-x, **o)}
test_in_each_library = in_libraries({
    **{f"ties of {n}": (slope(f), TIES, [[0, 0.5, 0.5], [0, 0, 0]]) for n, f in GREATEST.items()},
    **{f"ties in rows of {n}": (slope(lambda x, f=f: f(x, axis=1)), TIES,
                                [[0, 0.5, 0.5], [1 / 3] * 3]) for n, f in GREATEST.items()},
    "the first maximum": (slope(rg.cumulative_max), STEPS, [1, 4, 0, 0, 0, 1]),
    "the first minimum": (slope(lambda x: rg.cumulative_min(-x)), STEPS, [-1, -4, 0, 0, 0, -1]),
    **{f"ties keep their order, {down}": (
        lambda x, down=down, due=due: [
            rg.argsort(x, descending=down),
            slope(lambda x: rg.sort(x, descending=down) * WEIGHTS)(x)[np.array(due)]],
        EQUAL, [due, WEIGHTS])
       for down, due in ((True, [0, 2, 4, 1, 3]), (False, [1, 3, 0, 2, 4]))},
    "NaN is largest": (lambda x: [rg.sort(x), rg.sort(x, descending=True), rg.top_k(x, 2)[1]],
                       [1.0, NAN, 3.0], [[1, 3, NAN], [NAN, 3, 1], [1, 2]]),
    "bools are sorted": (lambda x: rg.sort(x, descending=True), [True, False, True],
                         [True, True, False]),
    "integers are sorted": (
        lambda x: [rg.argsort(x, descending=True), rg.argsort(x).dtype, rg.top_k(x, 1)[1].dtype,
                   rg.searchsorted(x, x).dtype], np.array([3, 1, 2], "u1"),
        [[0, 2, 1], "int64", "int64", "int64"]),
})  # fmt: skip

test_overrides_fire_inside = firing({
    f"{op_type} in {name}": (op_type, f, [1.0, 2.0, 4.0]) for op_type, name, f in [
        ("Sqrt", "std", rg.std), ("Sqrt", "vector_norm", vector_norm), ("Mean", "var", rg.var),
        ("Square", "std", rg.std), ("Exp", "logsumexp", rg.logsumexp),
        ("Max", "the largest", lambda x: vector_norm(x, ord=INF))]
})  # fmt: skip


# -- many elements ---------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1])
def test_top_k_of_many(axis: int) -> None:
    rng = np.random.default_rng(0)
    for x in (
        rng.permutation(2500).reshape(50, 50).astype(float),
        rng.integers(0, 9, (50, 50)),  # ties
        np.where(rng.random((50, 50)) < 0.1, np.nan, rng.random((50, 50))),
    ):
        due = rg.argsort(x, axis=axis, descending=True).numpy().take(range(5), axis)
        values, indices = rg.top_k(x, 5, axis=axis)
        np.testing.assert_array_equal(indices.numpy(), due)
        np.testing.assert_array_equal(values.numpy(), np.take_along_axis(x, due, axis))


def test_a_long_recurrence_agrees_with_a_loop() -> None:
    rng = np.random.default_rng(0)
    x, decay = rng.normal(size=1000), rng.uniform(-1, 1, 1000)
    due = np.array(x)
    for k in range(1, 1000):
        due[k] += decay[k] * due[k - 1]
    np.testing.assert_allclose(rg.linear_recurrence(x, decay).numpy(), due, rtol=1e-10, atol=1e-12)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("reverse", [False, True])
def test_wide_recurrences_agree_between_libraries(axis: int, reverse: bool) -> None:
    rng = np.random.default_rng(0)
    x, decay = rng.normal(size=(2, 300, 300)), rng.uniform(-1, 1, (2, 300, 300))
    x, decay = (np.moveaxis(a[:, :7], 1, axis) for a in (x, decay))
    ours = rg.linear_recurrence(x, decay, axis=axis, reverse=reverse)
    theirs = rg.linear_recurrence(jnp.asarray(x), jnp.asarray(decay), axis=axis, reverse=reverse)
    np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("f", "theirs"), [(rg.cumulative_prod, jnp.cumprod), (rg.prod, jnp.prod)], ids=["scan", "all"]
)
def test_second_order_of_products_agrees_with_jax(f: Any, theirs: Any) -> None:
    x, weights = np.array([1.2, 0.0, -0.7, 0.0, 1.5, 0.9]), np.cos(np.arange(6.0))
    scalar = lambda x, f=f: (f(x * x + x) * weights).sum()  # noqa: E731
    ours = slope(lambda x: rg.grad(scalar)(x) * weights)(rg.asarray(x)).numpy()
    inner = jax.grad(lambda x: scalar(x, theirs))
    np.testing.assert_allclose(ours, jax.grad(lambda x: (inner(x) * weights).sum())(x), atol=1e-12)


@pytest.mark.slow
def test_scans_under_jax_jit() -> None:
    loss = lambda t: rg.sort(t) * rg.cumulative_prod(t) * rg.cumulative_max(t) * rg.top_k(t, 3)[0]  # noqa: E731
    f = lambda x: slope(loss)(rg.asarray(x))._data  # noqa: E731
    x = jnp.asarray([0.5, 2.0, 1.0])
    np.testing.assert_allclose(jax.jit(f)(x), f(x), rtol=1e-12)


# -- more elements than a half can count, against float64 ------------------------------------------

COUNT = 70_000  # float16 ends at 65,504; bfloat16 rounds numbers above 256
NUMBERS = np.random.default_rng(0).normal(size=COUNT)
ONES, ZEROS = np.ones(COUNT), np.zeros(COUNT)


def pooled(x, pad="valid", size=280):
    return rg.nn.avg_pool(x.reshape(1, 280, 250, 1), (size, 250), (size, 250), pad).sum()


CASES = {
    "mean": (rg.mean, ONES),
    "mean over an axis": (lambda x: rg.mean(x.reshape(COUNT, 1), axis=0).sum(), ONES),
    "var": (rg.var, NUMBERS), "var, unbiased": (lambda x: rg.var(x, correction=1), NUMBERS),
    "std": (rg.std, NUMBERS), "moments": (lambda x: rg.nn.moments(x)[1], NUMBERS),
    "max of ties": (rg.max, ONES), "min of ties": (rg.min, ONES), "avg_pool": (pooled, ONES),
    "avg_pool at an edge": (lambda x: pooled(x, "same", 270), ONES),
    "mean loss": (lambda x: rg.losses.mean_squared_error(0 * x, x), NUMBERS),
    "weighted loss": (lambda x: rg.losses.compute_weighted_loss(x, ONES, "mean"), NUMBERS + 1),
    "logsumexp": (rg.logsumexp, ZEROS),
    "softmax": (lambda x: (rg.nn.softmax(x) * (x + 1)).sum(), ZEROS),
    "log_softmax": (lambda x: rg.nn.log_softmax(x)[0], ZEROS),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("library", ["numpy", "jax"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_many_elements(name, dtype, library):
    f, x = CASES[name]
    half = np.asarray(jnp.asarray(x, dtype))
    exact, slopes = rg.value_and_grad(f)(rg.tensor(half.astype("float64")))
    given = rg.asarray(jnp.asarray(half)) if library == "jax" else rg.tensor(half)
    value, found = rg.value_and_grad(f)(given)
    # (a float16 of 1e-5 has about 7 bits, a bfloat16 8 bits always)
    np.testing.assert_allclose(float(value), float(exact), rtol=0.02, atol=0.01)
    found, slopes = found.numpy().astype("float64"), slopes.numpy()
    np.testing.assert_allclose(found, slopes, rtol=0.02, atol=0.02 * np.abs(slopes).max())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_halves_are_those_of_jax(dtype):
    x = jnp.asarray(np.full(3000, 0.37), dtype)
    assert float(rg.sum(rg.tensor(np.asarray(x)))) == float(jax.numpy.sum(x))
    assert float(rg.mean(rg.tensor(np.asarray(x)))) == float(jax.numpy.mean(x))
