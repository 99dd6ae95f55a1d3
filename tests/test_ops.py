"""Every sample through every library, dtype and order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import regrad as rg
from regrad.registry import not_yet
from regrad.testing import check_gradients
from tests.helpers.sample_runs import ROWS, arrays_of, gradients, inputs_of, numbers, outputs
from tests.samples import Sample

# On JAX each shape of each op is compiled when it runs alone, which takes most of the time of all
# tests. Gradients of these rows are computed op by op there: the first of each op type, and every
# third. `test_jit_samples` has every row on JAX, compiled as a whole, to its full order.
FIRST = {op_type: row for row in reversed(ROWS) for op_type in row.covers}
OP_BY_OP = {*map(str, FIRST.values()), *map(str, ROWS[::3])}


def over(rows: list[Sample]) -> Any:
    return pytest.mark.parametrize("row", rows, ids=str)


def pairs(rows: list[Sample], *backends: str) -> Any:
    chosen = [(r, b) for r in rows for b in backends if b in r.backends]
    return pytest.mark.parametrize(("row", "backend"), chosen, ids=str)


@pairs(ROWS, "numpy", "jax", "torch")
def test_values(row: Sample, backend: str) -> None:
    xs = inputs_of(row, backend)
    ys = outputs(row.f(*[rg.asarray(x) for x in xs]))
    if row.reference is not None:
        due = row.reference(*row.inputs)
        due = [np.asarray(d) for d in (due if isinstance(due, tuple | list) else [due])]
    else:
        due = numbers(row.f(*[rg.asarray(a) for a in inputs_of(row, "numpy")]))
    assert len(ys) == len(due)
    for y, expected in zip(ys, due, strict=True):
        assert isinstance(y, rg.Tensor)
        assert y.shape == expected.shape
        np.testing.assert_allclose(y._values(), expected, rtol=1e-9, atol=1e-9)
    for x, original in zip(xs, row.inputs, strict=True):
        np.testing.assert_array_equal(np.asarray(x), original)


@over([r for r in ROWS if r.order])
def test_gradients_against_differences(row: Sample) -> None:
    check_gradients(row.f, [rg.asarray(a) for a in row.inputs], order=row.order, rtol=row.rtol)


@pytest.mark.parametrize(
    ("row", "backend"),
    [
        (r, b)
        for r in ROWS
        for b in ("jax", "torch")
        if r.order and b in r.backends and (b == "torch" or str(r) in OP_BY_OP)
    ],
    ids=str,
)
def test_gradients_agree_between_libraries(row: Sample, backend: str) -> None:
    for order in range(1, min(row.order, 2 if backend == "torch" else 1) + 1):
        due = gradients(row, inputs_of(row, "numpy"), order)
        got = gradients(row, inputs_of(row, backend), order)
        for a, b in zip(got, due, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-7 * (1 + np.abs(b).max(initial=0)))


@pairs(ROWS, "numpy", "jax", "torch")
def test_float32_stays_float32(row: Sample, backend: str) -> None:
    xs = inputs_of(row, backend, single=True)
    for y in outputs(row.f(*[rg.asarray(x) for x in xs])):
        assert y.dtype not in (np.float64, np.complex128), y.dtype
    if row.order and (backend != "jax" or str(row) in OP_BY_OP):
        due = gradients(row, inputs_of(row, "numpy"), 1)
        for dx, expected in zip(gradients(row, xs, 1), due, strict=True):
            assert dx.dtype in (np.float32, np.complex64)
            scale = 1 + np.abs(expected).max(initial=0)
            np.testing.assert_allclose(dx, expected, rtol=2e-3, atol=2e-3 * scale)


@over([r for r in ROWS if r.covers])
def test_creates_the_ops_that_it_covers(row: Sample) -> None:
    rules = {t: lambda op, *grads: None for t in row.covers}
    with rg.gradient_override_map(rules) as used:
        row.f(*[rg.asarray(a) for a in row.inputs])
    assert {hit.op_type for hit in used.hits} == {rg.find_op(t).type for t in row.covers}


def test_every_op_type_has_a_sample() -> None:
    covered = {rg.find_op(t).type for row in ROWS for t in row.covers}
    functions = {t: rg.find_op(t).function for t in rg.op_types()}
    # (ops that only graphs have, such as Placeholder, have no function of their own)
    own = {
        t for t, f in functions.items() if f is not not_yet and f.__module__.startswith("regrad.")
    }
    assert own - covered == set()


@pytest.mark.parametrize("constant", [0, np.float32(2), np.ones(3, np.float32), rg.tensor([1.0])])
def test_constants_are_made_where_the_data_lie(constant: Any) -> None:
    import torch

    x = rg.asarray(torch.ones(3, device="meta"))  # it refuses data of another device, as a GPU does
    assert rg.where(x > 0, x, constant).device.type == "meta"
    assert rg.maximum(x * constant, constant).device.type == "meta"


@over([r for r in ROWS if "torch" in r.backends])
def test_new_arrays_lie_where_the_data_lie(row: Sample) -> None:
    """Tensors of the device "meta" have no values, and refuse to meet those of another device."""
    xs = [x.to("meta") for x in inputs_of(row, "torch")]
    runs = [lambda: row.f(*map(rg.asarray, xs)), lambda: gradients(row, xs, 1)]
    for run in runs[: 1 + bool(row.order)]:
        try:
            run()
        except Exception as error:  # by an op that must look at values
            assert "expected device" not in str(error), error


LARGE = np.linspace(-2.0, 2.0, 10_000).reshape(100, 100)
CHOICES = {
    "two arrays": (LARGE, LARGE.T),
    "a number": (LARGE, 0.0),
    "a number first": (-0.0, LARGE),
    "a row": (LARGE, LARGE[0]),
    "special values": (np.where(LARGE > 1, np.nan, -np.inf), np.where(LARGE > 0, -0.0, np.inf)),
}


@pytest.mark.parametrize("backend", ["numpy", "jax", "torch"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("name", CHOICES)
def test_where_of_large_arrays_keeps_every_bit(name: str, dtype: str, backend: str) -> None:
    a, b = [np.asarray(x).astype(dtype) for x in CHOICES[name]]
    mask = np.random.default_rng(0).random(LARGE.shape) > 0.5
    y = rg.where(*[rg.asarray(arrays_of(backend, x)) for x in (mask, a, b)])
    due = np.where(mask, a, b)
    assert y.dtype == due.dtype
    assert (np.isnan(y._values()) == np.isnan(due)).all()
    kept = ~np.isnan(due)
    assert np.ascontiguousarray(y._values()[kept]).tobytes() == due[kept].tobytes()


def test_where_of_a_conjugate() -> None:
    import torch

    z = torch.complex(torch.zeros(100, 100), torch.ones(100, 100)).conj().imag  # a bit says so
    assert z.is_neg()
    y = rg.where(rg.asarray(torch.ones(100, 100, dtype=torch.bool)), rg.asarray(z), 0)
    np.testing.assert_array_equal(y.numpy(), -1.0)
