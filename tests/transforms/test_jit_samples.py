"""Every sample compiled, recomputed and batched: values and gradients are those of eager NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

import regrad as rg
from regrad.errors import RegradError
from tests.helpers import sample_runs as runs
from tests.helpers.choices import choose
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


RTOL = {"float64": 1e-9, "float32": 2e-3}  # (XLA fuses and reorders, so the last bits differ)


def assert_same(got: Sequence[Any], due: Sequence[Any], what: str, single: bool = False) -> None:
    assert len(got) == len(due)
    rtol = RTOL["float32" if single else "float64"]
    for order, (a, b) in enumerate(zip(got, due, strict=True)):
        for y, expected in zip(runs.numbers(list(a)), runs.numbers(list(b)), strict=True):
            assert y.dtype == (runs.float_dtype(expected, True) if single else expected.dtype)
            finite = np.abs(expected[np.isfinite(expected)])
            atol = rtol * (1 + finite.max(initial=0))
            np.testing.assert_allclose(y, expected, rtol, atol, err_msg=f"{what}, order {order}")


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


class Case(NamedTuple):
    """A row as it is, recomputed or batched, to some order."""

    row: Sample
    how: str
    single: bool
    order: int

    def __str__(self) -> str:
        return f"{self.row}, {self.how}, {'float32' if self.single else 'float64'}"

    def inputs(self) -> list[rg.Tensor]:
        return batches(self.row) if self.how == "vmap" else tensors(self.row)

    def given(self) -> list[rg.Tensor]:
        """The same in the precision of the case."""
        xs = [x.numpy() for x in self.inputs()]
        return [rg.asarray(x.astype(runs.float_dtype(x, self.single))) for x in xs]

    def due(self) -> list[list[Any]]:
        """What NumPy has, op by op, in double precision."""
        f = looped(self.row.f) if self.how == "vmap" else self.row.f
        return ladder(self.row, f, self.inputs(), self.order)

    def found(self, *xs: rg.Tensor) -> list[list[Any]]:
        f = {"plain": lambda f: f, "checkpoint": rg.checkpoint, "vmap": vmapped}[self.how]
        with case_named(self):
            return ladder(self.row, f(self.row.f), xs, self.order)


def vmapped(f: Function) -> Function:
    return rg.vmap(lambda *xs: runs.outputs(f(*xs)))


def cases(row: Sample, options: Sequence[tuple[str, bool, int]], what: str) -> list[Case]:
    hows = [Case(row, how, single, min(order, row.order)) for how, single, order in options]
    return choose(f"{row}: {what}", [c for c in hows if row.inputs or c.how != "vmap"])


EAGER = [("checkpoint", False, 3), ("vmap", False, 1)]
COMPILED_AS = [
    ("plain", False, 1), ("plain", True, 1), ("checkpoint", False, 1), ("vmap", False, 1),
]  # fmt: skip


@over(COMPILED)
def test_recomputed_or_batched(row: Sample) -> None:
    for case in cases(row, EAGER, "eager"):
        assert_same(case.found(*case.given()), case.due(), str(case))


TOGETHER = 10  # rows in one program: compiled alone, each would take a third longer
GROUPS = [COMPILED[i : i + TOGETHER] for i in range(0, len(COMPILED), TOGETHER)]


over_groups = pytest.mark.parametrize("rows", GROUPS, ids=lambda rows: f"{rows[0]} and others")


@pytest.mark.slow(but=12)
@over_groups
def test_compiled(rows: Sequence[Sample]) -> None:
    """Ten rows in one program, each in a form that its name chooses."""
    check_compiled([case for row in rows for case in cases(row, COMPILED_AS, "compiled")])


@pytest.mark.slow
@over_groups
def test_compiled_to_the_full_order(rows: Sequence[Sample]) -> None:
    check_compiled([Case(row, "plain", False, row.order) for row in rows])


def check_compiled(group: Sequence[Case]) -> None:
    program = rg.jit(lambda *xss: [c.found(*xs) for c, xs in zip(group, xss, strict=True)])
    found = program(*[case.given() for case in group])
    for case, got in zip(group, found, strict=True):
        assert_same(got, case.due(), f"{case}, under jit", case.single)


@over([row for row in runs.ROWS if str(row) in NEEDS_VALUES])
def test_what_a_value_decides_is_refused(row: Sample) -> None:
    with pytest.raises(RegradError):
        rg.jit(row.f)(*tensors(row))


def test_every_exception_is_a_sample() -> None:
    assert NEEDS_VALUES.keys() - {str(row) for row in runs.ROWS} == set()
