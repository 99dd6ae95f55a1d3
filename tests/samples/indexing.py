"""Samples of the indexing ops."""

from __future__ import annotations

from builtins import slice as cut

import numpy as np

import regrad as rg
from regrad.ops import indexing, slicing
from regrad.ops.getitem import getitem
from tests.samples import sample, spread
from tests.samples.array import COMPLEX, CUBE, EMPTY, MATRIX, SCALAR, VECTOR, shaped

GRID = spread(3, 4)
NONE = "no gradient: the result is of bools or integers"


def indexed(name, index, covers, x=GRID):
    """A row for `x[index]`, for the gradient of repeated elements too."""
    return shaped(f"x[{name}]", lambda x: getitem(x, index), x, covers, lambda x: x[index])


def changed(name, index, covers, y, x=GRID):
    """Rows for `at_set` and `at_add`."""

    def set_to(x, y):
        x = x.copy()
        x[index] = y
        return x

    def add_to(x, y):
        x = x.copy()
        np.add.at(x, index, y)
        return x

    added = {"TensorScatterUpdate": "ScatterNd", "TensorStridedSliceUpdate": "StridedSliceGrad"}
    return [
        shaped(f"at_set, {name}", lambda x, y: rg.at_set(x, index, y), (x, y), covers,
               set_to),
        shaped(f"at_add, {name}", lambda x, y: rg.at_add(x, index, y), (x, y),
               added.get(covers, covers), add_to),
    ]  # fmt: skip


def gathered_in_batches(x, indices):
    return np.stack([a[i] for a, i in zip(x, indices, strict=True)])


def scattered(indices, updates, shape):
    y = np.zeros(shape, updates.dtype)
    np.add.at(y, tuple(np.moveaxis(np.asarray(indices), -1, 0)), updates)
    return y


def added_along(x, indices, shape, axis):
    """Element by element."""
    y = np.zeros(shape)
    for place in np.ndindex(x.shape):
        there = list(place)
        there[axis] = indices[place]
        y[tuple(there)] += x[place]
    return y


def summed(x, ids, n):
    return np.stack([x[np.asarray(ids) == k].sum(0) for k in range(n)])


PICKS = np.array([[2, 0, 2], [1, -1, 1]])
POINTS = np.array([[0, 1], [2, -1], [0, 1]])

SAMPLES = [
    # along one axis, each line by its own indices
    shaped("take_along_axis", lambda x: rg.take_along_axis(x, PICKS), MATRIX,
           "TakeAlongAxis", lambda x: np.take_along_axis(x, PICKS, -1)),
    shaped("take_along_axis 0", lambda x: rg.take_along_axis(x, PICKS % 2, axis=0), MATRIX,
           "TakeAlongAxis", lambda x: np.take_along_axis(x, PICKS % 2, 0)),
    shaped("take_along_axis, indices broadcast",
           lambda x: rg.take_along_axis(x, [[2, 2]], axis=-1), MATRIX, "TakeAlongAxis",
           lambda x: x[:, [2, 2]]),
    shaped("take_along_axis, x broadcasts", lambda x: rg.take_along_axis(x, PICKS),
           spread(1, 3), ("BroadcastTo", "TakeAlongAxis"),
           lambda x: np.take_along_axis(np.repeat(x, 2, 0), PICKS, -1)),
    shaped("take_along_axis of no elements",
           lambda x: rg.take_along_axis(x, np.zeros((2, 0), int)), MATRIX, "TakeAlongAxis",
           lambda x: x[:, :0]),
    shaped("scatter_along_axis", lambda x: indexing.scatter_along_axis(x, PICKS, (2, 4), axis=1),
           MATRIX, "ScatterAlongAxis", lambda x: added_along(x, PICKS, (2, 4), 1)),
    shaped("scatter_along_axis 0", lambda x: indexing.scatter_along_axis(x, PICKS, (3, 3), axis=0),
           MATRIX, "ScatterAlongAxis", lambda x: added_along(x, PICKS, (3, 3), 0)),
    # take
    shaped("take", lambda x: rg.take(x, [2, 0, 2, -1], axis=1), MATRIX, "GatherV2",
           lambda x: np.take(x, [2, 0, 2, -1], 1)),
    sample("take, indices a tensor", lambda x, i: rg.take(x, i) ** 3,
           (VECTOR, np.array([3, 3, 0], np.int8)), covers="GatherV2",
           reference=lambda x, i: x[i] ** 3),
    shaped("take one", lambda x: rg.take(x, -1, axis=0), MATRIX, "GatherV2", lambda x: x[-1]),
    shaped("take with indices of rank 2", lambda x: rg.take(x, PICKS, axis=1), CUBE,
           "GatherV2", lambda x: np.take(x, PICKS, 1)),
    shaped("take none", lambda x: rg.take(x, [], axis=0), MATRIX, "GatherV2", lambda x: x[:0]),
    shaped("take from no elements", lambda x: rg.take(x, [0, 2], axis=1), EMPTY, "GatherV2",
           lambda x: x[:, [0, 2]]),
    shaped("take in batches", lambda x: rg.take(x, PICKS, axis=1, batch_dims=1), CUBE,
           "GatherV2", lambda x: gathered_in_batches(x, PICKS)),
    shaped("take in batches, a later axis",
           lambda x: rg.take(x, PICKS % 2, axis=2, batch_dims=1), CUBE, "GatherV2",
           lambda x: np.stack([a[:, i] for a, i in zip(x, PICKS % 2, strict=True)])),
    shaped("take in two batches", lambda x: rg.take(x, PICKS % 2, axis=2, batch_dims=2), CUBE,
           "GatherV2", lambda x: np.take_along_axis(x, (PICKS % 2)[..., None], 2)[..., 0]),
    shaped("the adjoint of take", lambda x: indexing._scatter_add(
               x, [1, 0, 1], shape=(2, 2), axis=1, batch_dims=0), MATRIX, "ScatterAdd",
           lambda x: np.stack([x[:, 1], x[:, 0] + x[:, 2]], 1)),
    shaped("repeat", lambda x: rg.repeat(x, 2, axis=1), MATRIX, "BroadcastTo",
           lambda x: np.repeat(x, 2, 1)),
    shaped("repeat flat", lambda x: rg.repeat(x, 2), MATRIX, "BroadcastTo",
           lambda x: np.repeat(x, 2)),
    shaped("repeat by numbers", lambda x: rg.repeat(x, [2, 0, 3], axis=-1), MATRIX,
           "GatherV2", lambda x: np.repeat(x, [2, 0, 3], -1)),
    # by index vectors
    shaped("gather_nd", lambda x: rg.gather_nd(x, POINTS), GRID, "GatherNd",
           lambda x: x[tuple(POINTS.T)]),
    shaped("gather_nd of rows", lambda x: rg.gather_nd(x, [[[1], [1]], [[0], [-1]]]), GRID,
           "GatherNd", lambda x: x[[[1, 1], [0, -1]]]),
    shaped("gather_nd of everything", lambda x: rg.gather_nd(x, np.zeros((2, 0), int)),
           MATRIX, "GatherNd", lambda x: np.stack([x, x])),
    shaped("scatter_nd", lambda u: rg.scatter_nd(POINTS, u, (3, 4)), spread(3), "ScatterNd",
           lambda u: scattered(POINTS, u, (3, 4))),
    shaped("scatter_nd of rows", lambda u: rg.scatter_nd([[2], [0], [2]], u, (4, 2)),
           spread(3, 2), "ScatterNd", lambda u: scattered([[2], [0], [2]], u, (4, 2))),
    shaped("scatter_nd everywhere", lambda u: rg.scatter_nd(np.zeros((2, 0), int), u, (3,)),
           spread(2, 3), "ScatterNd", lambda u: u.sum(0)),
    shaped("scatter_nd of nothing", lambda u: rg.scatter_nd(np.zeros((0, 1), int), u, (3,)),
           np.zeros(0), "ScatterNd", lambda u: np.zeros(3)),
    sample("which entry comes last", lambda i: indexing._last_writer(i, (4,)),
           np.array([[2], [0], [2]]), covers="LastWriter",
           reference=lambda i: np.array([1, -1, 2, -1]), order=0, reason=NONE),
    # segments
    shaped("segment_sum", lambda x: rg.segment_sum(x, [1, 3, 1], 4), spread(3, 2),
           "UnsortedSegmentSum", lambda x: summed(x, [1, 3, 1], 4)),
    shaped("segment_sum leaves out negative ids",
           lambda x: rg.segment_sum(x, [1, -1, 0, -5, 1], 2), VECTOR, "UnsortedSegmentSum",
           lambda x: summed(x, [1, -1, 0, -5, 1], 2)),
    shaped("segment_sum with ids of rank 2",
           lambda x: rg.segment_sum(x, [[0, 1, 1], [2, 2, 0]], 3), MATRIX,
           "UnsortedSegmentSum", lambda x: summed(x, [[0, 1, 1], [2, 2, 0]], 3)),
    # slices
    shaped("slice", lambda x: rg.slice(x, (1, 0), (-1, 2)), GRID, "Slice", lambda x: x[1:, :2]),
    shaped("slice, begin for one axis", lambda x: rg.slice(x, 1, 1), GRID, "Slice",
           lambda x: x[1:2]),
    shaped("slice of nothing", lambda x: rg.slice(x, (3, 1), (0, 2)), GRID, "Slice",
           lambda x: x[3:, 1:3]),
    indexed("1", 1, "StridedSlice"),
    indexed("-1, 2", (-1, 2), "StridedSlice"),
    indexed("1:3", cut(1, 3), "StridedSlice"),
    indexed("::2, 3:0:-2", (cut(None, None, 2), cut(3, 0, -2)), "StridedSlice"),
    indexed("::-1", cut(None, None, -1), "StridedSlice"),
    indexed("5:", cut(5, None), "StridedSlice"),
    indexed("None, ..., None, 1", (None, ..., None, 1), "StridedSlice"),
    indexed("1, ::-3, None", (1, cut(None, None, -3), None), "StridedSlice"),
    indexed("None of rank 0", None, "StridedSlice", SCALAR),
    indexed(":, 1:1 of no elements", (cut(None), cut(1, 1)), "StridedSlice", EMPTY),
    shaped("the adjoint of x[1, ::-2]", lambda x: slicing._strided_slice_grad(
               x, shape=(2, 5), index=(1, (4, 3, -2))), spread(3), "StridedSliceGrad",
           lambda x: np.array([np.zeros(5), [x[2], 0, x[1], 0, x[0]]])),
    # arrays
    indexed("a list", [2, 0, 2], "GatherV2"),
    indexed("an array of rank 2", PICKS, "GatherV2"),
    indexed("an array of rank 0", np.array(-1), "GatherV2"),
    indexed("an empty list", [], "GatherV2"),
    indexed(":, an array", (cut(None), np.array([-1, 0, -1], np.int16)), "GatherV2"),
    indexed("1, an array", (1, [0, 0, 3]), ("StridedSlice", "GatherV2")),
    indexed("two arrays", ([0, 2, 0], [1, -1, 1]), "GatherNd"),
    indexed("two arrays that broadcast", ([[0], [2]], [1, -1, 1]), "GatherNd"),
    indexed("two arrays around a slice", ([0, 1, 0], cut(None, None, -1), [1, 0, 1]), "GatherNd",
            CUBE),
    indexed("two arrays after a slice", (cut(1, None), [0, 2, 0], [1, 0, 1]),
            ("StridedSlice", "GatherNd"), CUBE),
    indexed("0, :, an array", (0, cut(None), [1, 1, 0]), ("StridedSlice", "GatherV2"), CUBE),
    indexed("an array, None, an array", ([0, 1], None, [2, 2]), ("StridedSlice", "GatherNd"), CUBE),
    sample("x[i, j], tensors", lambda x, i, j: getitem(x, (i, j)) ** 3,
           (GRID, np.array([0, 0, 2], np.int32), np.array([3, 3, 0], np.uint8)),
           covers="GatherNd", reference=lambda x, i, j: x[i, j] ** 3),
    # masks
    indexed("a mask", np.arange(12).reshape(3, 4) % 3 == 1, "GatherNd"),
    indexed("a mask of rows", np.array([True, False, True]), "GatherV2"),
    indexed("a mask of columns", (cut(None), [True, False, False, True]), "GatherV2"),
    indexed("a mask and an array", ([True, False, True], [3, 3]), "GatherNd"),
    indexed("a mask of rank 0", np.array(True), ("StridedSlice", "GatherV2")),
    indexed("nothing by a mask", np.zeros((3, 4), bool), "GatherNd"),
    # x[...] = y
    *changed("a row", 1, "TensorStridedSliceUpdate", spread(4, seed=1)),
    *changed("a row, broadcast", (cut(None), cut(None, None, -2)), "TensorStridedSliceUpdate",
             spread(3, 1, seed=1)),
    *changed("an element", (-1, 2), "TensorStridedSliceUpdate", np.array(0.3)),
    *changed("rows", [2, 0], "TensorScatterUpdate", spread(2, 4, seed=1)),
    *changed("rows, some repeated", [2, 0, 2], "TensorScatterUpdate", spread(3, 4, seed=1)),
    *changed("columns, broadcast", (cut(None), [3, 1, 3]), "TensorScatterUpdate",
             spread(3, seed=1)),
    *changed("points", ([0, 2, 0], [1, 3, 1]), "TensorScatterUpdate", spread(3, seed=1)),
    *changed("part of a row", (1, [0, 0, 3]), "TensorScatterUpdate", spread(3, seed=1)),
    *changed("around a slice", ([0, 1], cut(2, 0, -1), [1, 0]), "TensorScatterUpdate",
             spread(2, 2, seed=1), CUBE),
    *changed("a mask, a tensor", np.arange(12).reshape(3, 4) % 3 == 1, "TensorScatterUpdate",
             spread(4, seed=1)),
    *changed("a mask, a number", np.arange(12).reshape(3, 4) % 3 == 1, "SelectV2",
             np.array(0.3)),
    *changed("rows by a mask, a number", np.array([True, False, True]), "SelectV2",
             np.array(0.3)),
    *changed("nothing", [], "TensorScatterUpdate", spread(4, seed=1)),
    # padding
    shaped("pad", lambda x: rg.pad(x, [(1, 0), (2, 1)]), MATRIX, "PadV2",
           lambda x: np.pad(x, [(1, 0), (2, 1)])),
    shaped("pad with a value", lambda x: rg.pad(x, 1, constant_value=-1.5), MATRIX, "PadV2",
           lambda x: np.pad(x, 1, constant_values=-1.5)),
    shaped("pad no elements", lambda x: rg.pad(x, [(1, 1), (0, 0)]), EMPTY, "PadV2",
           lambda x: np.pad(x, [(1, 1), (0, 0)])),
    shaped("pad rank 0", lambda x: rg.pad(x, []), SCALAR, "PadV2", np.array),
    *[
        shaped(f"pad, {mode}, {paddings}", lambda x, m=mode, p=paddings: rg.pad(x, p, m), x,
               "MirrorPad", lambda x, m=mode, p=paddings: np.pad(x, p, m))
        for mode in ("reflect", "symmetric", "edge")
        for paddings, x in [
            ([(2, 1)], spread(4)), ([(1, 1), (0, 2)], spread(2, 3)), ([(5, 4)], spread(2)),
            ([(0, 0), (2, 0)], spread(2, 1)),
        ]
    ],
    shaped("the adjoint of a mirrored pad", lambda x: slicing._mirror_pad_grad(
               x, shape=(3,), paddings=((2, 1),), mode="reflect"), spread(6), "MirrorPadGrad",
           lambda x: np.array([x[2], x[1] + x[3] + x[5], x[0] + x[4]])),
    # results of integers and bools
    sample("one_hot", lambda i: rg.one_hot(i, 3), np.array([[2, 0], [-1, 3]]), covers="OneHot",
           reference=lambda i: (i[..., None] == np.arange(3)) * 1.0, order=0, reason=NONE),
    sample("one_hot along axis 0", lambda i: rg.one_hot(i, 3, on_value=5, off_value=-1, axis=0),
           np.array([2, 0, 2], np.uint8), covers="OneHot",
           reference=lambda i: np.where(np.arange(3)[:, None] == i, 5.0, -1.0), order=0,
           reason=NONE),
    sample("nonzero", lambda x: rg.nonzero(x), np.array([[0.0, 2.0], [-1.0, 0.0]]),
           covers="Where", reference=np.nonzero, order=0, reason=NONE),
    sample("unique_values", lambda x: rg.unique_values(x), np.array([3, 1, 3, -2]),
           covers="UniqueValues", reference=np.unique, order=0, reason=NONE),
    sample("unique_all", lambda x: tuple(rg.unique_all(x)), np.array([[3, 1], [3, -2], [1, 3]]),
           covers="Unique", reference=lambda x: (
               *np.unique(x, return_index=True), *np.unique(x, return_inverse=True)[1:],
               np.unique(x, return_counts=True)[1]), order=0, reason=NONE),
    # complex numbers
    sample("x[...] of complex numbers", lambda x: getitem(x, ([0, 1, 0], [1, 1, 1])),
           COMPLEX, covers="GatherNd", reference=lambda x: x[[0, 1, 0], [1, 1, 1]]),
    sample("a slice of complex numbers", lambda x: getitem(x, (cut(None, None, -1), 1)),
           COMPLEX, covers="StridedSlice", reference=lambda x: x[::-1, 1]),
    sample("pad of complex numbers", lambda x: rg.pad(x, 2, "symmetric"), COMPLEX,
           covers="MirrorPad", reference=lambda x: np.pad(x, 2, "symmetric")),
    sample("at_set of complex numbers", lambda x, y: rg.at_set(x, [1], y), (COMPLEX, spread(2)),
           covers="TensorScatterUpdate", reference=lambda x, y: np.stack([x[0], y])),
    # an embedding
    sample("an embedding squared",
           lambda w: rg.sum(rg.square(rg.take(w, [[0, 2], [2, 1]], axis=0))), spread(3, 2),
           covers="GatherV2", reference=lambda w: np.sum(w[[[0, 2], [2, 1]]] ** 2)),
]  # fmt: skip
