"""Every sample compiled, recomputed and batched: values and gradients are those of eager NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import regrad as rg
from regrad.errors import RegradError
from tests.helpers import sample_runs as runs
from tests.helpers.sample_runs import NEEDS_VALUES, case_named
from tests.samples import Sample

Function = Callable[..., Any]

COMPILED = [r for r in runs.ROWS if "jax" in r.backends and str(r) not in NEEDS_VALUES]


def over(rows: Sequence[Sample]) -> Any:
    return pytest.mark.parametrize("row", rows, ids=str)


def tensors(row: Sample) -> list[rg.Tensor]:
    return [rg.asarray(a) for a in runs.inputs_of(row, "numpy")]


def ladder(row: Sample, f: Function, xs: Sequence[rg.Tensor], order: int) -> list[list[Any]]:
    """The values of f, and the gradients of a weighed sum of these, of those, … by the floats.

    Each order is computed within the next, so the last one alone gives all.
    """
    places = [i for i, a in enumerate(row.inputs) if runs.is_float(a)]
    rungs: list[list[Any]] = []

    def value(*floats: Any) -> Any:
        given = dict(zip(places, floats, strict=True))
        rungs.append(runs.outputs(f(*[given.get(i, x) for i, x in enumerate(xs)])))
        return runs.weighted_sum(rungs[-1])

    def climbed(g: Function) -> Function:
        def gradient(*floats: Any) -> Any:
            rungs.append(rg.grads(g, unconnected="zero")(list(floats)))
            return runs.weighted_sum(rungs[-1])

        return gradient

    top: Function = value
    for _ in range(order):
        top = climbed(top)
    top(*[xs[i] for i in places])
    return rungs


TOGETHER = 10  # rows in one program: compiled alone, each would take a third longer


def over_groups(rows: Sequence[Sample]) -> Any:
    groups = [rows[i : i + TOGETHER] for i in range(0, len(rows), TOGETHER)]
    return pytest.mark.parametrize("rows", groups, ids=lambda rows: f"{rows[0]} and others")


def compiled(functions: Sequence[Function], inputs: Sequence[Sequence[rg.Tensor]]) -> list[Any]:
    """What functions of such inputs give, all in one program."""
    return rg.jit(lambda *xss: [f(*xs) for f, xs in zip(functions, xss, strict=True)])(*inputs)


def climbing(row: Sample, f: Function, order: int) -> Function:
    """The ladder of a row, whose errors say that it is this row's."""

    def run(*xs: Any) -> list[list[Any]]:
        with case_named(row):
            return ladder(row, f, xs, order)

    return run


RTOL = 1e-9  # XLA fuses and reorders, so the last bits differ


def assert_same(got: Sequence[Sequence[Any]], due: Sequence[Sequence[Any]], what: str) -> None:
    assert len(got) == len(due)
    for order, (a, b) in enumerate(zip(got, due, strict=True)):
        for y, expected in zip(runs.numbers(list(a)), runs.numbers(list(b)), strict=True):
            assert y.dtype == expected.dtype
            finite = np.abs(expected[np.isfinite(expected)])
            scale = 1 + finite.max(initial=0)
            np.testing.assert_allclose(
                y, expected, rtol=RTOL, atol=RTOL * scale, err_msg=f"{what}, order {order}"
            )


@over_groups(COMPILED)
def test_compiled(rows: Sequence[Sample]) -> None:
    inputs = [tensors(row) for row in rows]
    found = compiled([climbing(row, row.f, row.order) for row in rows], inputs)
    for row, xs, got in zip(rows, inputs, found, strict=True):
        assert_same(got, ladder(row, row.f, xs, row.order), f"{row} under jit")


THIRD = COMPILED[::3]  # for what is done to all in eager mode, and is slow


@over(COMPILED)
def test_recomputed(row: Sample) -> None:
    xs = tensors(row)
    due = ladder(row, row.f, xs, row.order)
    assert_same(ladder(row, rg.checkpoint(row.f), xs, row.order), due, "checkpoint")


@over_groups(THIRD)
def test_recomputed_and_compiled(rows: Sequence[Sample]) -> None:
    inputs, orders = [tensors(row) for row in rows], [min(row.order, 1) for row in rows]
    climbs = [climbing(r, rg.checkpoint(r.f), n) for r, n in zip(rows, orders, strict=True)]
    for row, n, xs, got in zip(rows, orders, inputs, compiled(climbs, inputs), strict=True):
        assert_same(got, ladder(row, row.f, xs, n), f"{row}, checkpoint under jit")


def batches(row: Sample) -> list[rg.Tensor]:
    """Two examples: the row's own inputs, and the floats among them a little smaller."""
    arrays = runs.inputs_of(row, "numpy")
    return [rg.asarray(np.stack([a, a * 0.97 if runs.is_float(a) else a])) for a in arrays]


def looped(f: Function) -> Function:
    """What vmap does, by hand."""

    def batched(*xs: Any) -> list[Any]:
        examples = [runs.outputs(f(*[x[i] for x in xs])) for i in range(2)]
        return [rg.stack(list(ys)) for ys in zip(*examples, strict=True)]

    return batched


def vmapped(row: Sample) -> Function:
    return rg.vmap(lambda *xs: runs.outputs(row.f(*xs)))


@over([row for row in COMPILED if row.inputs])
def test_batched(row: Sample) -> None:
    xs, order = batches(row), min(row.order, 1)
    due = ladder(row, looped(row.f), xs, order)
    assert_same(ladder(row, vmapped(row), xs, order), due, "vmap")


@over_groups([row for row in THIRD if row.inputs])
def test_batched_and_compiled(rows: Sequence[Sample]) -> None:
    inputs, orders = [batches(row) for row in rows], [min(row.order, 1) for row in rows]
    climbs = [climbing(r, vmapped(r), n) for r, n in zip(rows, orders, strict=True)]
    for row, n, xs, got in zip(rows, orders, inputs, compiled(climbs, inputs), strict=True):
        assert_same(got, ladder(row, looped(row.f), xs, n), f"{row}, vmap under jit")


@over([row for row in runs.ROWS if str(row) in NEEDS_VALUES])
def test_what_a_value_decides_is_refused(row: Sample) -> None:
    with pytest.raises(RegradError):
        rg.jit(row.f)(*tensors(row))


def test_every_exception_is_a_sample() -> None:
    assert NEEDS_VALUES.keys() - {str(row) for row in runs.ROWS} == set()
