"""Every sample on NumPy, and in the libraries, dtypes and forms that a hash of its name chooses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import regrad as rg
from regrad.core.registry import not_yet
from regrad.testing import gradient_report
from tests.campaigns import numerics
from tests.campaigns.verdicts import DELIVERED, EXPLAINED
from tests.helpers import sample_runs as runs
from tests.helpers.choices import choose
from tests.samples import Sample

# On JAX each shape of each op is compiled when it runs alone. So op by op JAX has the first row of
# each op type, and those that cannot be compiled; `test_jit_samples` has every row on JAX.
FIRST = {str(row) for row in {t: row for row in reversed(runs.ROWS) for t in row.covers}.values()}
FIRST |= runs.NEEDS_VALUES.keys()


def over(rows: list[Sample]) -> Any:
    return pytest.mark.parametrize("row", rows, ids=str)


def check_values(row: Sample, xs: list[Any], due: list[np.ndarray]) -> None:
    ys = runs.outputs(row.f(*[rg.asarray(x) for x in xs]))
    assert len(ys) == len(due)
    for y, expected in zip(ys, due, strict=True):
        assert isinstance(y, rg.Tensor)
        assert y.shape == expected.shape
        np.testing.assert_allclose(y._values(), expected, rtol=1e-9, atol=1e-9)
    for x, original in zip(xs, row.inputs, strict=True):
        np.testing.assert_array_equal(np.asarray(x), original)


def check_covers(row: Sample) -> None:
    """The sample creates the ops that it covers."""
    rules = {t: lambda op, *grads: None for t in row.covers}
    with rg.gradient_override_map(rules) as used:
        row.f(*[rg.asarray(a) for a in row.inputs])
    assert {hit.op_type for hit in used.hits} == {rg.find_op(t).type for t in row.covers}


def check_gradients(row: Sample, f: Any, order: int) -> None:
    """Compare gradients with differences; only where there are no elements is nothing compared."""
    report = gradient_report(f, [rg.asarray(a) for a in row.inputs], order=order, rtol=row.rtol)
    assert report.ok, report
    assert report.comparisons or any(a.size == 0 for a in row.inputs)


def check_order(row: Sample) -> None:
    check_gradients(row, row.f, row.order)


def check_arriving(row: Sample) -> None:
    """The second order of a linear op is all in the gradient that arrives at it."""
    check_gradients(row, runs.squared(row), min(row.order, 2))


def check_alone(row: Sample) -> None:
    """Rules see which gradients are wanted, and may compute each in a way of its own."""
    for one in [*runs.alone(row)] or [row]:
        with runs.case_named(one.name):
            check_gradients(one, one.f, min(row.order, 2))


@over(runs.ROWS)
def test_on_numpy(row: Sample) -> None:
    """Values are those of the reference, and gradients those of differences."""
    xs = runs.inputs_of(row, "numpy")
    due = runs.numbers(row.f(*map(rg.asarray, xs)))
    if row.reference is not None:
        found = row.reference(*row.inputs)
        due = [np.asarray(d) for d in (found if isinstance(found, tuple | list) else [found])]
    with runs.case_named("values"):
        check_values(row, xs, due)
    if row.covers:
        with runs.case_named("the ops that it covers"):
            check_covers(row)
    if row.order:
        check_gradients(row, row.f, min(row.order, 2))
        for check in choose(f"{row}: differences", [check_order, check_arriving, check_alone]):
            with runs.case_named(check.__name__):
                check(row)


# -- other libraries, dtypes and devices -----------------------------------------------------------


def check_library(row: Sample, library: str) -> None:
    """Values, and gradients of two orders (on JAX of one), are those of NumPy."""
    xs, given = runs.inputs_of(row, library), runs.inputs_of(row, "numpy")
    check_values(row, xs, runs.numbers(row.f(*map(rg.asarray, given))))
    for order in range(1, min(row.order, 1 if library == "jax" else 2) + 1):
        due = runs.gradients(row, given, order)
        for a, b in zip(runs.gradients(row, xs, order), due, strict=True):
            atol = 1e-7 * (1 + np.abs(b).max(initial=0))
            np.testing.assert_allclose(a, b, rtol=1e-7, atol=atol, err_msg=f"order {order}")


def check_float32(row: Sample, library: str) -> None:
    """Neither values nor gradients have become float64, and the gradients are right."""
    xs = runs.inputs_of(row, library, single=True)
    for y in runs.outputs(row.f(*map(rg.asarray, xs))):
        assert y.dtype not in (np.float64, np.complex128), y.dtype
    if row.order and (library != "jax" or str(row) in runs.NEEDS_VALUES):
        due = runs.gradients(row, runs.inputs_of(row, "numpy"), 1)
        for dx, expected in zip(runs.numbers(runs.gradient_tensors(row, xs, 1)), due, strict=True):
            assert dx.dtype in (np.float32, np.complex64)
            scale = 1 + np.abs(expected).max(initial=0)
            np.testing.assert_allclose(dx, expected, rtol=2e-3, atol=2e-3 * scale)


def check_float16(row: Sample, library: str) -> None:
    """Gradients are those of float64, unless a rounding decides or the range ends."""
    (found,) = numerics.compared(replace(row, order=1), "float16", library, False)
    assert found.outcome in (DELIVERED, EXPLAINED), found


def check_meta(row: Sample, library: str) -> None:
    """Tensors of the device "meta" have no values, and refuse to meet those of another device."""
    xs = [x.to("meta") for x in runs.inputs_of(row, library)]
    calls = [lambda: row.f(*map(rg.asarray, xs)), lambda: runs.gradients(row, xs, 1)]
    for run in calls[: 1 + bool(row.order)]:
        try:
            run()
        except Exception as error:  # by an op that must look at values
            assert "expected device" not in str(error), error


HALF = {str(row) for row in numerics.ROWS if "float16" in numerics.dtypes_of(row)}


def others(row: Sample) -> list[tuple[Any, str]]:
    """Checks of a row in other libraries and dtypes, of which it takes some."""
    libraries = [b for b in ("numpy", "torch") if b in row.backends]
    checks = [(check_float32, b) for b in libraries]
    checks += [(check_float16, b) for b in libraries if str(row) in HALF]
    return checks + [(check_meta, b) for b in libraries if b == "torch"]


@pytest.mark.slow(but=560)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, where the range of float16 ends
@over(runs.ROWS)
def test_in_other_dtypes(row: Sample) -> None:
    if "torch" in row.backends:
        with runs.case_named("torch"):
            check_library(row, "torch")
    for check, library in choose(f"{row}: dtype", others(row)):
        with runs.case_named(f"{check.__name__}, {library}"):
            check(row, library)


@pytest.mark.slow
@over([row for row in runs.ROWS if "jax" in row.backends and str(row) in FIRST])
def test_on_jax_op_by_op(row: Sample) -> None:
    for check in choose(f"{row}: JAX", [check_library, check_float32]):
        with runs.case_named(check.__name__):
            check(row, "jax")


def test_every_op_type_has_a_sample() -> None:
    covered = {rg.find_op(t).type for row in runs.ROWS for t in row.covers}
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


LARGE = np.linspace(-2.0, 2.0, 10_000).reshape(100, 100)
CHOICES = {
    "two arrays": (LARGE, LARGE.T), "a number": (LARGE, 0.0), "a number first": (-0.0, LARGE),
    "a row": (LARGE, LARGE[0]),
    "special values": (np.where(LARGE > 1, np.nan, -np.inf), np.where(LARGE > 0, -0.0, np.inf)),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["numpy", "jax", "torch"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("name", CHOICES)
def test_where_of_large_arrays_keeps_every_bit(name: str, dtype: str, backend: str) -> None:
    a, b = [np.asarray(x).astype(dtype) for x in CHOICES[name]]
    mask = np.random.default_rng(0).random(LARGE.shape) > 0.5
    y = rg.where(*[rg.asarray(runs.arrays_of(backend, x)) for x in (mask, a, b)])
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
