"""Every sample compiled, recomputed and batched: values and gradients are those of eager NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import regrad as rg
from regrad.errors import RegradError
from tests.helpers import sample_runs as runs
from tests.samples import Sample

Function = Callable[..., Any]

# Samples in which a value decides a shape. Only eager mode has it; compiled, they are refused.
NEEDS_VALUES = {
    "indexing: x[a mask]": "the values of the mask decide how many there are",
    "indexing: at_set, a mask, a tensor": "what is set has as many entries as the mask says",
    "indexing: at_add, a mask, a tensor": "what is added has as many entries as the mask says",
    "indexing: nonzero": "the values decide how many there are",
    "indexing: unique_values": "the values decide how many there are",
}
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


def compiled(f: Function, xs: Sequence[rg.Tensor]) -> Any:
    return rg.jit(f)(*xs)


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


@over(COMPILED)
def test_compiled(row: Sample) -> None:
    xs = tensors(row)
    got = compiled(lambda *xs: ladder(row, row.f, xs, row.order), xs)
    assert_same(got, ladder(row, row.f, xs, row.order), "jit")


THIRD = {str(row) for row in COMPILED[::3]}  # for what is done to all in eager mode, and is slow


@over(COMPILED)
def test_recomputed(row: Sample) -> None:
    xs, f = tensors(row), rg.checkpoint(row.f)
    due = ladder(row, row.f, xs, row.order)
    assert_same(ladder(row, f, xs, row.order), due, "checkpoint")
    if str(row) in THIRD:
        order = min(row.order, 1)
        got = compiled(lambda *xs: ladder(row, f, xs, order), xs)
        assert_same(got, due[: order + 1], "checkpoint under jit")


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


@over([row for row in COMPILED if row.inputs])
def test_batched(row: Sample) -> None:
    xs, order = batches(row), min(row.order, 1)
    f = rg.vmap(lambda *xs: runs.outputs(row.f(*xs)))
    due = ladder(row, looped(row.f), xs, order)
    assert_same(ladder(row, f, xs, order), due, "vmap")
    if str(row) in THIRD:
        got = compiled(lambda *xs: ladder(row, f, xs, order), xs)
        assert_same(got, due, "vmap under jit")


@over([row for row in runs.ROWS if str(row) in NEEDS_VALUES])
def test_what_a_value_decides_is_refused(row: Sample) -> None:
    with pytest.raises(RegradError):
        compiled(row.f, tensors(row))


def test_every_exception_is_a_sample() -> None:
    assert NEEDS_VALUES.keys() - {str(row) for row in runs.ROWS} == set()
