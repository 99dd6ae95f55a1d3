"""Every sample through graph mode: with static shapes, with sizes hidden, or the rank hidden.

What a graph computes is what eager NumPy computes: values, gradients, second derivatives.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.errors import UnknownShapeError
from tests.helpers import sample_runs as runs
from tests.helpers.choices import choose
from tests.helpers.graph_sample_runs import SHAPES, UNSTACKED, SampleGraph, eager_values
from tests.helpers.sample_runs import case_named
from tests.samples import Sample

pytestmark = pytest.mark.usefixtures("graph")

NEEDS: dict[str, dict[str, str]] = {
    "static": {}, "sizes hidden": UNSTACKED, "rank hidden": UNSTACKED,
}  # fmt: skip


def over(rows: list[Sample]) -> Any:
    return pytest.mark.parametrize("row", rows, ids=str)


@over(runs.ROWS)
def test_values_and_gradients_are_those_of_eager_mode(row: Sample) -> None:
    """In graphs that are told less and less of the shapes."""
    due = eager_values(row)
    for hidden in choose(row, [h for h in SHAPES if str(row) not in NEEDS[h]]):
        with tf.Graph().as_default(), case_named(hidden):
            built = SampleGraph(row, hidden)
            check_values(built, due)
            for order in range(1, min(row.order, 2) + 1):
                expected = runs.gradients(row, runs.inputs_of(row, "numpy"), order)
                for a, b in zip(built.gradients(due, order), expected, strict=True):
                    atol = 1e-7 * (1 + np.abs(b).max(initial=0))
                    np.testing.assert_allclose(a, b, 1e-7, atol, err_msg=f"order {order}")


def check_values(built: SampleGraph, due: list[np.ndarray]) -> None:
    assert len(built.ys) == len(due)
    for y, got, expected in zip(built.ys, built.run(built.ys), due, strict=True):
        assert isinstance(y, rg.Tensor)
        assert got.shape == expected.shape
        assert y.dtype == got.dtype == expected.dtype
        assert tf.convert_to_tensor(y).shape.is_compatible_with(expected.shape)
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("row", "hidden"),
    [(r, hidden) for hidden, names in NEEDS.items() for r in runs.ROWS if str(r) in names],
    ids=str,
)
def test_what_must_be_known_is_asked_for(row: Sample, hidden: str) -> None:
    with pytest.raises(UnknownShapeError, match="run"):
        built = SampleGraph(row, hidden)
        if row.order:
            built.gradients(eager_values(row), min(row.order, 2))


def test_every_exception_is_a_sample() -> None:
    known = {str(row) for row in runs.ROWS}
    assert [name for names in NEEDS.values() for name in names if name not in known] == []


# -- rules in force for ops whose results are integers or bools -----------------------------------


def threes(op: Any, *dys: Any) -> list[Any]:
    """A rule for any op: 3 by each of the floats that go in."""
    xs = [rg.asarray(x) for x in op.inputs]
    return [rg.full_like(x, 3.0) if x.dtype.kind in "fc" else None for x in xs]


def overridden(op_type: str, row: Sample, xs: list[Any]) -> tuple[list[Any], Any]:
    """The results of a sample under that rule, and the sum of their elements and of the inputs."""
    with rg.gradient_override_map({op_type: threes}):
        ys = runs.outputs(row.f(*xs))
    floats = [x for x in xs if x.dtype.kind in "fc"]
    return ys, sum(rg.sum(rg.astype(rg.real(t), rg.float64)) for t in (*ys, *floats))


def gives_integers(row: Sample, op_type: str) -> bool:
    if not any(map(runs.is_float, row.inputs)):
        return False
    ys, _ = overridden(op_type, row, [rg.asarray(a) for a in runs.inputs_of(row, "numpy")])
    return any(y.dtype.kind in "biu" for y in ys)


WHOLE = [(row, t) for row in runs.ROWS for t in row.covers if gives_integers(row, t)]


def test_there_are_samples_of_such_ops() -> None:
    assert len({op_type for _, op_type in WHOLE}) > 20


@pytest.mark.parametrize(("row", "op_type"), WHOLE, ids=str)
def test_a_rule_for_an_op_of_integers_fires(row: Sample, op_type: str) -> None:
    options = [(hidden, by) for hidden in SHAPES for by in ("tf.gradients", "a tape")]
    for hidden, by in choose(f"{row}: {op_type}", options):
        with tf.Graph().as_default(), case_named(f"{hidden}, {by}"):
            check_fires(row, op_type, hidden, by)


def check_fires(row: Sample, op_type: str, hidden: str, by: str) -> None:
    arrays = runs.inputs_of(row, "numpy")
    places = [i for i, a in enumerate(arrays) if runs.is_float(a)]
    xs = [tf.placeholder(arrays[i].dtype, SHAPES[hidden](arrays[i])) for i in places]

    def f(*floats: Any) -> Any:
        given = [rg.asarray(a) for a in arrays]
        for i, x in zip(places, floats, strict=True):
            given[i] = rg.asarray(x)
        return overridden(op_type, row, given)[1]

    found = tf.gradients(f(*xs), xs) if by == "tf.gradients" else rg.grads(f)(xs)
    with tf.Session() as session:
        slopes = session.run(found, {x: arrays[i] for x, i in zip(xs, places, strict=True)})
    for i, slope in zip(places, slopes, strict=True):  # 3 by the rule, and 1 by the sum of x
        np.testing.assert_array_equal(slope, np.full(arrays[i].shape, 4.0))
