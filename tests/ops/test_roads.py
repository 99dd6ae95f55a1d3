"""The samples of the op table on some of the roads on which users reach a gradient."""

import numpy as np
import pytest

import regrad as rg
from tests.helpers import sample_runs as runs
from tests.helpers.sample_runs import NEEDS_VALUES
from tests.roads import ROADS, roads_for

ROWS = [
    row
    for row in runs.ROWS
    if "jax" in row.backends and str(row) not in NEEDS_VALUES and row.order
    and all(a.dtype.kind == "f" for a in runs.floats_of(row, list(row.inputs)))
]  # fmt: skip


def check(row, road):
    given = runs.inputs_of(row, "numpy")
    xs = [rg.asarray(x) for x in runs.floats_of(row, given)]
    g = runs.scalar(row, given, 0)
    due = rg.grads(g, unconnected="zero")(xs)
    found = road.gradients(g, xs)
    for dx, expected in zip(found, due, strict=True):
        expected = road.factor * expected.numpy()
        scale = max(np.abs(expected[np.isfinite(expected)]).max(initial=0), 1e-3)
        np.testing.assert_allclose(dx.numpy(), expected, 1e-7, 1e-9 * scale, err_msg=str(road))


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_sample_on_its_roads(row):
    for road in roads_for(str(row)):
        with runs.case_named(road):
            check(row, road)


def test_each_part_of_a_road_is_taken():
    taken = [road for row in ROWS for road in roads_for(str(row))]
    for part in range(3):
        assert {road[part] for road in taken} == {road[part] for road in ROADS}
