"""Samples of the shape ops."""

from __future__ import annotations

import numpy as np

import regrad as rg
from regrad.ops import array, joining
from tests.samples import sample, spread

VECTOR = spread(5)
MATRIX = spread(2, 3)
CUBE = spread(2, 3, 2)
EMPTY = np.zeros((0, 3))
SCALAR = np.array(0.7)
COMPLEX = spread(2, 2, seed=1) + 1j * spread(2, 2, seed=2)


def cubed(f):
    """Shape ops are linear; their cube has derivatives to check at every order."""
    return lambda *xs: [y * y * y for y in outputs(f(*xs))]


def outputs(y):
    return y if isinstance(y, tuple | list) else [y]


def shaped(name, f, inputs, covers, reference):
    """A row for a linear op: f cubed, so that second and third order are not zero."""
    return sample(
        name,
        cubed(f),
        inputs,
        covers=covers,
        reference=lambda *xs: [y**3 for y in outputs(reference(*xs))],
    )


def tiled(repetitions):
    return lambda x: np.tile(x, repetitions)


def band(x, shape, offset):
    """A vector on a diagonal, element by element."""
    y = np.zeros((*x.shape[:-1], *shape), x.dtype)
    for i in range(x.shape[-1]):
        y[..., i + max(-offset, 0), i + max(offset, 0)] = x[..., i]
    return y


SAMPLES = [
    sample("a tensor where it lies", lambda x: rg.find_op("ToDevice").function(
               x, device=x.device, source=x.device), spread(2, 3), covers="ToDevice",
           reference=lambda x: x),
    # reshaping
    shaped("reshape", lambda x: array.reshape(x, (3, 2)), MATRIX, "Reshape",
           lambda x: x.reshape(3, 2)),
    shaped("reshape with -1", lambda x: array.reshape(x, (3, -1)), CUBE, "Reshape",
           lambda x: x.reshape(3, -1)),
    shaped("reshape to rank 0", lambda x: array.reshape(x, ()), np.array([0.7]), "Reshape",
           lambda x: x.reshape(())),
    shaped("reshape of no elements", lambda x: array.reshape(x, (3, 0, 2)), EMPTY, "Reshape",
           lambda x: x.reshape(3, 0, 2)),
    shaped("expand_dims", lambda x: array.expand_dims(x, axis=-1), MATRIX, "ExpandDims",
           lambda x: x[..., None]),
    shaped("expand_dims, two axes", lambda x: array.expand_dims(x, (0, -2)), MATRIX, "ExpandDims",
           lambda x: np.expand_dims(x, (0, -2))),
    shaped("squeeze", lambda x: array.squeeze(x, (0, -1)), spread(1, 3, 1), "Squeeze",
           lambda x: np.squeeze(x, (0, -1))),
    shaped("squeeze all", array.squeeze, spread(1, 3, 1), "Squeeze", np.squeeze),
    # broadcasting
    shaped("broadcast_to", lambda x: array.broadcast_to(x, (2, 2, 3)), spread(2, 1), "BroadcastTo",
           lambda x: np.broadcast_to(x, (2, 2, 3))),
    shaped("broadcast_to from rank 0", lambda x: array.broadcast_to(x, (2,)), SCALAR,
           "BroadcastTo", lambda x: np.broadcast_to(x, (2,))),
    shaped("broadcast_to no elements", lambda x: array.broadcast_to(x, (0, 3)), spread(3),
           "BroadcastTo", lambda x: np.broadcast_to(x, (0, 3))),
    shaped("sum_to", lambda x: array.sum_to(x, (3, 1)), CUBE, "SumTo",
           lambda x: x.sum((0, 2))[:, None]),
    shaped("sum_to rank 0", lambda x: array.sum_to(x, ()), MATRIX, "SumTo", np.sum),
    shaped("broadcast_arrays", array.broadcast_arrays, (spread(2, 1), spread(3, seed=1)),
           "BroadcastTo", np.broadcast_arrays),
    shaped("meshgrid", array.meshgrid, (spread(2), spread(3, seed=1), spread(2, seed=2)),
           ("Reshape", "BroadcastTo"), np.meshgrid),
    shaped("meshgrid ij", lambda a, b: array.meshgrid(a, b, indexing="ij"),
           (spread(2), spread(3, seed=1)), ("Reshape", "BroadcastTo"),
           lambda a, b: np.meshgrid(a, b, indexing="ij")),
    shaped("meshgrid of rank 0", array.meshgrid, (SCALAR, VECTOR), ("Reshape", "BroadcastTo"),
           np.meshgrid),
    # repeating
    shaped("tile", lambda x: array.tile(x, (2, 2)), MATRIX, "Tile", tiled((2, 2))),
    shaped("tile, fewer repetitions", lambda x: array.tile(x, (2,)), MATRIX, "Tile", tiled((2,))),
    shaped("tile, more repetitions", lambda x: array.tile(x, (2, 1, 3)), spread(2), "Tile",
           tiled((2, 1, 3))),
    shaped("tile rank 0", lambda x: array.tile(x, (3,)), SCALAR, "Tile", tiled((3,))),
    shaped("tile no times", lambda x: array.tile(x, (0, 2)), MATRIX, "Tile", tiled((0, 2))),
    # moving axes
    shaped("permute_dims", lambda x: array.permute_dims(x, (1, 2, 0)), CUBE, "Transpose",
           lambda x: x.transpose(1, 2, 0)),
    shaped("permute_dims, negative", lambda x: array.permute_dims(x, (-1, 0, -2)), CUBE,
           "Transpose", lambda x: x.transpose(-1, 0, -2)),
    shaped("permute_dims reversed", array.permute_dims, CUBE, "Transpose", np.transpose),
    shaped("matrix_transpose", array.matrix_transpose, CUBE, "Transpose",
           lambda x: x.swapaxes(-1, -2)),
    shaped("swapaxes", lambda x: array.swapaxes(x, 0, -1), CUBE, "Transpose",
           lambda x: x.swapaxes(0, -1)),
    shaped("moveaxis", lambda x: array.moveaxis(x, (0, 1), (-1, 0)), CUBE, "Transpose",
           lambda x: np.moveaxis(x, (0, 1), (-1, 0))),
    shaped("flip", array.flip, CUBE, "ReverseV2", np.flip),
    shaped("flip one axis", lambda x: array.flip(x, axis=-2), CUBE, "ReverseV2",
           lambda x: np.flip(x, -2)),
    shaped("flip two axes", lambda x: array.flip(x, axis=(0, 2)), CUBE, "ReverseV2",
           lambda x: np.flip(x, (0, 2))),
    shaped("flip rank 0", array.flip, SCALAR, "ReverseV2", np.flip),
    shaped("roll", lambda x: array.roll(x, 2), MATRIX, "Roll", lambda x: np.roll(x, 2)),
    shaped("roll along an axis", lambda x: array.roll(x, -4, axis=1), MATRIX, "Roll",
           lambda x: np.roll(x, -4, axis=1)),
    shaped("roll along axes", lambda x: array.roll(x, (1, 2), axis=(0, -1)), MATRIX, "Roll",
           lambda x: np.roll(x, (1, 2), axis=(0, -1))),
    shaped("roll no elements", lambda x: array.roll(x, 1, axis=0), EMPTY, "Roll",
           lambda x: np.roll(x, 1, axis=0)),
    # joining and splitting
    shaped("concat", lambda a, b: joining.concat([a, b]), (spread(1, 3), spread(2, 3, seed=1)),
           "ConcatV2", lambda a, b: np.concatenate([a, b])),
    shaped("concat along the last axis", lambda a, b: joining.concat([a, b], axis=-1),
           (MATRIX, spread(2, 1, seed=1)), "ConcatV2", lambda a, b: np.concatenate([a, b], -1)),
    shaped("concat flat", lambda a, b: joining.concat([a, b], axis=None), (MATRIX, SCALAR),
           "ConcatV2", lambda a, b: np.concatenate([a, b], None)),
    shaped("concat with nothing", lambda a, b: joining.concat([a, b]), (EMPTY, MATRIX), "ConcatV2",
           lambda a, b: np.concatenate([a, b])),
    shaped("concat of one tensor twice", lambda x: joining.concat([x, x * x, x]), spread(3),
           "ConcatV2", lambda x: np.concatenate([x, x * x, x])),
    shaped("stack", lambda a, b: joining.stack([a, b]), (MATRIX, spread(2, 3, seed=1)), "Pack",
           lambda a, b: np.stack([a, b])),
    shaped("stack along the last axis", lambda a, b: joining.stack([a, b], axis=-1),
           (MATRIX, spread(2, 3, seed=1)), "Pack", lambda a, b: np.stack([a, b], -1)),
    shaped("stack of rank 0", lambda a, b: joining.stack([a, b]), (SCALAR, np.array(-0.4)), "Pack",
           lambda a, b: np.stack([a, b])),
    shaped("unstack", joining.unstack, MATRIX, "Unpack", list),
    shaped("unstack the last axis", lambda x: joining.unstack(x, axis=-1), MATRIX, "Unpack",
           lambda x: list(x.T)),
    shaped("unstack, one part used", lambda x: joining.unstack(x)[1], MATRIX, "Unpack",
           lambda x: x[1]),
    shaped("split into equal parts", lambda x: joining.split(x, 3, axis=-1), MATRIX, "Split",
           lambda x: np.split(x, 3, axis=-1)),
    shaped("split into sizes", lambda x: joining.split(x, (1, 3, 1)), VECTOR, "Split",
           lambda x: np.split(x, (1, 4))),
    shaped("split, the rest and nothing", lambda x: joining.split(x, [0, -1, 2]), VECTOR, "Split",
           lambda x: [x[:0], x[:3], x[3:]]),
    shaped("split, one part used", lambda x: joining.split(x, 2, axis=0)[0], MATRIX, "Split",
           lambda x: x[:1]),
    # triangles and diagonals
    *[
        shaped(f"{f.__name__} from diagonal {k}", lambda x, f=f, k=k: f(x, k=k), spread(3, 4),
               t, lambda x, g=g, k=k: g(x, k))
        for t, f, g in [("Tril", array.tril, np.tril), ("Triu", array.triu, np.triu)]
        for k in (0, 1, -1)
    ],
    shaped("tril of a batch", array.tril, CUBE, "Tril", np.tril),
    *[
        shaped(f"diagonal {k}", lambda x, k=k: array.diagonal(x, offset=k), spread(3, 4),
               "MatrixDiagPart", lambda x, k=k: np.diagonal(x, k))
        for k in (0, 2, -1, 4)
    ],
    shaped("diagonal of a batch", array.diagonal, CUBE, "MatrixDiagPart",
           lambda x: np.diagonal(x, 0, -2, -1)),
    *[
        shaped(f"diag {k}", lambda x, k=k: array.diag(x, offset=k), spread(3), "MatrixDiag",
               lambda x, k=k: np.diag(x, k))
        for k in (0, 1, -2)
    ],
    shaped("diag of a batch", array.diag, MATRIX, "MatrixDiag", lambda x: band(x, (3, 3), 0)),
    shaped("diag of a given shape", lambda x: array.diag(x, offset=-1, shape=(4, 5)), spread(3),
           "MatrixDiag", lambda x: band(x, (4, 5), -1)),
    shaped("trace", lambda x: rg.linalg.trace(x, offset=1), spread(3, 4), ("MatrixDiagPart", "Sum"),
           lambda x: np.trace(x, 1)),
    shaped("trace of a batch", rg.linalg.trace, CUBE, ("MatrixDiagPart", "Sum"),
           lambda x: np.trace(x, axis1=-2, axis2=-1)),
    # complex numbers
    *[
        sample(f"{f.__name__} of complex numbers", lambda x, f=f: f(x), COMPLEX, covers=t,
               reference=r)
        for t, f, r in [
            ("Transpose", array.permute_dims, np.transpose), ("Tril", array.tril, np.tril),
            ("ReverseV2", array.flip, np.flip), ("Unpack", joining.unstack, list),
            ("MatrixDiagPart", array.diagonal, np.diagonal),
            ("MatrixDiag", array.diag, lambda x: band(x, (2, 2), 0)),
        ]
    ],
    sample("concat of real and complex", lambda a, b: joining.concat([a, b]),
           (spread(1, 2), COMPLEX), covers="ConcatV2",
           reference=lambda a, b: np.concatenate([a, b])),
    sample("stack times its tensor", lambda x: joining.stack([x, rg.sin(x)]) * x, spread(3),
           covers="Pack", reference=lambda x: np.stack([x, np.sin(x)]) * x),
]  # fmt: skip
