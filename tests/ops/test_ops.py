"""Every sample through every library, dtype and order."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import regrad as rg
from regrad.core.registry import not_yet
from regrad.testing import gradient_report
from tests.campaigns import numerics
from tests.campaigns.verdicts import DELIVERED, EXPLAINED
from tests.helpers.sample_runs import (
    NEEDS_VALUES,
    ROWS,
    alone,
    arrays_of,
    case_named,
    gradient_tensors,
    gradients,
    inputs_of,
    numbers,
    outputs,
    squared,
)
from tests.samples import Sample

# On JAX each shape of each op is compiled when it runs alone, which takes most of the time of all
# tests. Op by op JAX has the first row of each op type, and those that cannot be compiled; values
# are computed so in every third row, too. `test_jit_samples` has every row on JAX, compiled as a
# whole, to its full order.
FIRST = {str(row) for row in {t: row for row in reversed(ROWS) for t in row.covers}.values()}
FIRST |= NEEDS_VALUES.keys()
THIRD = {*map(str, ROWS[::3])}
TOGETHER = 10  # rows in one compiled program: its own time is that of two or three rows


def over(rows: list[Sample]) -> Any:
    return pytest.mark.parametrize("row", rows, ids=str)


def libraries(row: Sample, on_jax: Container[str]) -> list[str]:
    """NumPy first, and the others in which a row runs op by op."""
    return [b for b in row.backends if b != "jax" or str(row) in on_jax]


@over(ROWS)
def test_values(row: Sample) -> None:
    if row.reference is not None:
        due = row.reference(*row.inputs)
        due = [np.asarray(d) for d in (due if isinstance(due, tuple | list) else [due])]
    else:
        due = numbers(row.f(*[rg.asarray(a) for a in inputs_of(row, "numpy")]))
    for backend in libraries(row, {*FIRST, *THIRD}):
        with case_named(backend):
            check_values(row, inputs_of(row, backend), due)


def check_values(row: Sample, xs: list[Any], due: list[np.ndarray]) -> None:
    ys = outputs(row.f(*[rg.asarray(x) for x in xs]))
    assert len(ys) == len(due)
    for y, expected in zip(ys, due, strict=True):
        assert isinstance(y, rg.Tensor)
        assert y.shape == expected.shape
        np.testing.assert_allclose(y._values(), expected, rtol=1e-9, atol=1e-9)
    for x, original in zip(xs, row.inputs, strict=True):
        np.testing.assert_array_equal(np.asarray(x), original)


def check_gradients(row: Sample, f: Any, order: int) -> None:
    """Compare gradients with differences; only where there are no elements is nothing compared."""
    report = gradient_report(f, [rg.asarray(a) for a in row.inputs], order=order, rtol=row.rtol)
    assert report.ok, report
    assert report.comparisons or any(a.size == 0 for a in row.inputs)


@over([r for r in ROWS if r.order])
def test_gradients_against_differences(row: Sample) -> None:
    check_gradients(row, row.f, row.order)


@over([r for r in ROWS if r.order])
def test_gradients_go_on_through_what_arrives(row: Sample) -> None:
    """The second order of a linear op is all in the gradient that arrives at it."""
    check_gradients(row, squared(row), min(row.order, 2))


@over([r for r in ROWS if r.order and len(r.inputs) > 1])
def test_gradients_by_one_input_alone(row: Sample) -> None:
    """Rules see which gradients are wanted, and may compute each in a way of its own."""
    for one in alone(row):
        with case_named(one.name):
            check_gradients(one, one.f, min(row.order, 2))


@over([r for r in ROWS if r.order])
def test_gradients_agree_between_libraries(row: Sample) -> None:
    for order in range(1, min(row.order, 2) + 1):
        due = gradients(row, inputs_of(row, "numpy"), order)
        for backend in libraries(row, FIRST if order == 1 else ())[1:]:
            with case_named(f"{backend}, order {order}"):
                got = gradients(row, inputs_of(row, backend), order)
                for a, b in zip(got, due, strict=True):
                    atol = 1e-7 * (1 + np.abs(b).max(initial=0))
                    np.testing.assert_allclose(a, b, rtol=1e-7, atol=atol)


def check_float32(row: Sample, ys: list[Any], dxs: list[Any] | None = None) -> None:
    """Neither values nor gradients have become float64, and the gradients are right."""
    for y in ys:
        assert y.dtype not in (np.float64, np.complex128), y.dtype
    if dxs is None:
        return
    due = gradients(row, inputs_of(row, "numpy"), 1)
    for dx, expected in zip(numbers(dxs), due, strict=True):
        assert dx.dtype in (np.float32, np.complex64)
        scale = 1 + np.abs(expected).max(initial=0)
        np.testing.assert_allclose(dx, expected, rtol=2e-3, atol=2e-3 * scale)


def run_in_float32(row: Sample, xs: list[Any]) -> tuple[list[Any], list[Any] | None]:
    """Results and, if there are any, gradients."""
    ys = outputs(row.f(*[rg.asarray(x) for x in xs]))
    return ys, gradient_tensors(row, xs, 1) if row.order else None


@over(ROWS)
def test_float32_stays_float32(row: Sample) -> None:
    for backend in libraries(row, NEEDS_VALUES):
        with case_named(backend):
            check_float32(row, *run_in_float32(row, inputs_of(row, backend, single=True)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, where the range ends
@over([r for r in numerics.ROWS if "float16" in numerics.dtypes_of(r)])
def test_gradients_of_half_floats(row: Sample) -> None:
    """They are those of float64, unless a rounding decides or the range ends."""
    once = replace(row, order=1)
    for library in ("numpy", "torch"):
        if numerics.there(row, "float16", library):
            (found,) = numerics.compared(once, "float16", library, False)
            assert found.outcome in (DELIVERED, EXPLAINED), found


@over([r for r in ROWS if str(r) in FIRST])
def test_values_of_float32_stay_so_on_jax_op_by_op(row: Sample) -> None:
    xs = inputs_of(row, "jax", single=True)
    check_float32(row, outputs(row.f(*[rg.asarray(x) for x in xs])))


COMPILED = [r for r in ROWS if "jax" in r.backends and str(r) not in NEEDS_VALUES]


@pytest.mark.parametrize("first", range(0, len(COMPILED), TOGETHER), ids=lambda i: str(COMPILED[i]))
def test_float32_stays_float32_on_jax(first: int) -> None:
    rows = COMPILED[first : first + TOGETHER]

    @rg.jit
    def program(*inputs: Any) -> list[Any]:
        return [run_in_float32(row, list(xs)) for row, xs in zip(rows, inputs, strict=True)]

    found = program(*[tuple(inputs_of(row, "jax", single=True)) for row in rows])
    for row, (ys, dxs) in zip(rows, found, strict=True):
        with case_named(row):
            check_float32(row, ys, dxs)


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
