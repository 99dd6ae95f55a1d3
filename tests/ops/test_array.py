"""Shape ops: what the samples table cannot say."""

from __future__ import annotations

import numpy as np
import pytest

import regrad as rg
from regrad.core.shapes import as_slice, ascending, window
from regrad.ops import array, joining


@pytest.mark.parametrize(("dtypes", "due"), [
    (("int32", "float32"), "float32"), (("int64", "float32"), "float32"),
    (("float32", "float64"), "float64"), (("bool", "int8"), "int8"), (("uint8", "int8"), "int16"),
])  # fmt: skip
@pytest.mark.parametrize("join", [joining.concat, joining.stack])
def test_joining_promotes(join, dtypes, due):
    xs = [rg.asarray(np.ones(2, dtype)) for dtype in dtypes]
    assert join(xs).dtype == due


def test_joining_numbers_and_lists():
    assert joining.stack([rg.asarray(np.float64(2.0)), 1]).dtype == np.float64
    assert joining.stack([1, 2]).tolist() == [1.0, 2.0]
    assert joining.concat([rg.tensor([1.0]), [2, 3]]).tolist() == [1.0, 2.0, 3.0]


def test_gradients_through_promotion_keep_their_dtype():
    a, b = rg.asarray(np.ones(2, "f4")), rg.asarray(np.ones(2, "f8"))
    da, db = rg.grads(lambda a, b: joining.concat([a, b]).sum())([a, b])
    assert (da.dtype, db.dtype) == (np.float32, np.float64)


def test_integers_and_bools_are_moved_as_they_are():
    x = rg.asarray(np.array([[True, False], [False, False]]))
    for f in (array.flip, array.tril, array.diagonal, array.permute_dims, array.diag):
        assert f(x).dtype == bool
    assert array.tile(rg.asarray([1, 2]), (2,)).tolist() == [1, 2, 1, 2]


def test_one_tensor_in_several_places():
    x = rg.tensor([1.0, 2.0])
    assert rg.grad(lambda x: joining.stack([x, x, 3 * x]).sum())(x).tolist() == [5.0, 5.0]
    assert rg.grad(lambda x: joining.concat([x, x]).sum())(x).tolist() == [2.0, 2.0]


def test_unstack_of_no_elements():
    assert joining.unstack(rg.zeros((0, 3))) == ()
    assert len(joining.unstack(rg.zeros((2, 0)))) == 2


def test_windows_are_slices():
    for n in range(5):
        values = list(range(n))
        for start in (None, -6, -2, 0, 1, 3, 6):
            for stop in (None, -6, -2, 0, 1, 3, 6):
                for step in (None, -3, -1, 1, 2):
                    chosen = values[start:stop:step]
                    w = window(slice(start, stop, step), n)
                    assert w[1] == len(chosen)
                    assert values[as_slice(ascending(w))] == sorted(chosen)
                    if chosen:
                        assert w[0] == chosen[0]


def test_rules_keep_no_tensor():
    """Shape ops are linear: their records hold shapes and attributes only."""
    for f in (
        lambda x: joining.concat([x, x]),
        lambda x: array.tile(x, (2, 1)),
        array.flip,
        array.diagonal,
        lambda x: joining.split(x, 2)[0],
    ):
        _, jx = rg.jvp(f, [rg.ones((2, 2))], [rg.ones((2, 2))])  # refused unless linear
        assert jx.tolist() == f(rg.ones((2, 2))).tolist()
