"""TensorFlow's functions: calls with arrays, what NumPy or eager regrad make of them, op names."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import optree
import scipy.linalg
import scipy.special

import regrad as rg
import regrad.v1 as tf

F32, F64, I32, I64, C64 = np.float32, np.float64, np.int32, np.int64, np.complex64


class Row(NamedTuple):
    """A function of tensors, their values, what is due, and what its op is called."""

    label: str
    f: Callable[..., Any]
    arrays: list[np.ndarray]
    due: Any  # the value or values, or a function of eager regrad
    op: str | None
    name: str | None

    def __str__(self) -> str:
        return self.label


def call(label, args, due, op=None, *, of=None, **options):
    """The call `tf.<label>(*args, **options)`, or that of `of`, with the arrays as tensors.

    What follows a colon in the label tells rows apart. `op` is the type and the name of the op
    that the call builds, or one word if they are the same.
    """
    function = of or attrgetter(label.partition(":")[0])(tf)
    leaves, form = optree.tree_flatten(args, none_is_leaf=True)

    def f(*xs):
        tensors = iter(xs)
        given = [next(tensors) if is_array(leaf) else leaf for leaf in leaves]
        return function(*optree.tree_unflatten(form, given), **options)

    op_type, _, name = (op or "").partition(" ")
    arrays = [leaf for leaf in leaves if is_array(leaf)]
    return Row(label, f, arrays, due, op_type or None, name or op_type or None)


def is_array(value):
    return isinstance(value, np.ndarray | np.generic)


def ints(*values):
    return np.array(values, I32)


def listed(values):
    return list(values) if isinstance(values, list | tuple) else [values]


def camel(name):
    """The type of the op that a function of this name builds, as a rule."""
    return "".join(part.capitalize() for part in name.rpartition(".")[2].split("_"))


def normal(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(F32)


def positive(*shape):
    return np.abs(normal(*shape)) + F32(0.1)


def shares(*shape):
    x = positive(*shape)
    return x / x.sum(axis=-1, keepdims=True)


# -- element by element --------------------------------------------------------------------------

special = scipy.special
V, P = F32([-1.5, -0.5, 0.25, 2.5]), F32([0.25, 0.5, 1.5, 3.0])
INSIDE, ABOVE, INFINITE = F32([-0.75, -0.25, 0.5]), F32([1.5, 2.0]), F32([np.nan, np.inf, 1.0])
M = np.arange(6, dtype=F32).reshape(2, 3) - F32(2.5)
C = np.linspace(-1, 2, 12, dtype=F32).reshape(2, 3, 2)
S = np.array([[4.0, 1.0], [1.0, 3.0]])
SS = np.stack([S, S @ S + 1])
Z = np.array([1 + 2j, -0.5j, -3.0], C64)
T, SOME = np.array([True, False]), np.array([True, False, True])
TWO = ints(7, -7), ints(2, 2)

NUMPYS = [  # functions that NumPy has, too, under the name after the =
    ((V,), "abs sign square reciprocal exp expm1 sin cos tan atan=arctan sinh cosh tanh"),
    ((V,), "asinh=arcsinh ceil floor round"),
    ((P,), "sqrt log log1p"),
    ((INSIDE,), "asin=arcsin acos=arccos atanh=arctanh"),
    ((ABOVE,), "acosh=arccosh"),
    ((Z,), "real imag conj"),
    ((INFINITE,), "is_nan=isnan is_inf=isinf is_finite=isfinite"),
    ((T,), "logical_not"),
    ((np.repeat(T, 2), np.tile(T, 2)), "logical_and logical_or logical_xor"),
    ((V, P), "atan2=arctan2"),
    ((P, V), "pow=power"),
    ((ints(2, -3), ints(3, 2)), "pow=power"),
    ((V, F32([0])), "maximum minimum"),
    ((ints(1, 2), ints(1, 3)), "equal not_equal"),
    ((V, F32([0.25])), "less less_equal greater greater_equal"),
    ((M, M[::-1]), "cross"),
]
BITS = "bitwise_and bitwise_or bitwise_xor left_shift right_shift"
ELEMENTWISE = [
    call(name, arrays, getattr(np, known or name)(*arrays), camel(name))
    for arrays, names in NUMPYS
    for name, _, known in (name.partition("=") for name in names.split())
] + [
    call(f"bitwise.{name}", (ints(6, 5), ints(3, 1)), getattr(np, name)(*ints([6, 5], [3, 1])),
         camel(name))
    for name in BITS.split()
] + [
    call("negative", (V,), -V, "Neg"), call("rsqrt", (P,), 1 / np.sqrt(P), "Rsqrt"),
    call("erf", (V,), special.erf(V), "Erf"), call("erfc", (V,), special.erfc(V), "Erfc"),
    call("lgamma", (P,), special.gammaln(P), "Lgamma"),
    call("digamma", (P,), special.digamma(P), "Digamma"),
    call("rint", (V,), np.round(V), "Round Rint"),
    call("sigmoid", (V,), special.expit(V), "Sigmoid"),
    call("log_sigmoid", (V,), special.log_expit(V), "LogSigmoid"), call("angle", (Z,), np.angle(Z)),
    call("identity", (V,), V, "Identity"), call("stop_gradient", (V,), V, "StopGradient"),
    call("zeros_like", (V,), 0 * V, "ZerosLike zeros_like"),
    call("ones_like", (V,), V**0, "OnesLike ones_like"),
    call("cast", (V, tf.int32), V.astype(I32), "Cast"),
    call("to_double", (V,), V.astype(F64), "Cast ToDouble"),
    call("to_int32", (V,), V.astype(I32), "Cast ToInt32"),
    call("to_int64", (V,), V.astype(I64), "Cast ToInt64"),
    call("to_float", (ints(1, 2),), F32([1, 2]), "Cast ToFloat"),
    call("add", (V, P), V + P, "AddV2 Add"), call("subtract", (V, P), V - P, "Sub"),
    call("multiply", (M, F32([2.0, 3.0, 0.5])), M * F32([2.0, 3.0, 0.5]), "Mul"),
    call("divide", (V, P), V / P, "RealDiv truediv"),
    call("truediv", (V, P), V / P, "RealDiv truediv"), call("realdiv", (V, P), V / P, "RealDiv"),
    call("div", (V, P), V / P, "RealDiv div"),
    call("div: integers", TWO, ints(3, -4), "FloorDiv div"),
    call("div_no_nan", (V, F32([0, 1, 2, 0])), F32([0, -0.5, 0.125, 0])),
    call("floordiv", (V, P), V // P, "FloorDiv floordiv"),
    call("floor_div", TWO, ints(3, -4), "FloorDiv"), call("floormod", (V, P), V % P, "FloorMod"),
    call("mod", (ints(7, -7), ints(3, 3)), ints(1, 2), "FloorMod"),
    call("truncatediv", TWO, ints(3, -3)), call("truncatemod", TWO, ints(1, -1)),
    call("squared_difference", (V, P), (V - P) ** 2, "SquaredDifference"),
    call("complex", (V, P), (V + 1j * P).astype(C64)),
    call("math.xlogy", (F32([0, 2, -1]), F32([0, 0.5, 3])), F32([0, np.log(0.25), -np.log(3)]),
         "Xlogy"),
    call("math.xdivy", (F32([0, 2, -1]), F32([0, 0.5, 4])), F32([0, 4, -0.25]), "Xdivy"),
    call("clip_by_value", (V, -1.0, 1.0), np.clip(V, -1, 1), "ClipByValue clip_by_value"),
    call("clip_by_norm", (V, 1.0), V / np.linalg.norm(V)),
    call("clip_by_norm: short rows", (M, 9.0), M, axes=[1]),
    call("clip_by_average_norm", (V, 0.5), V * F32(0.5) / max(np.linalg.norm(V) / 4, F32(0.5))),
    call("global_norm", ([V, [2.0, -1.0], None, P],), F32(np.sqrt(V @ V + 5 + P @ P)),
         "Sqrt global_norm"),
    call("add_n", ([V, P, V],), 2 * V + P, "AddN"),
    call("accumulate_n", ([V, P],), V + P, "AddN AccumulateNV2"),
    call("scalar_mul", (2, V), 2 * V, "Mul mul"),
    call("where", (V,), np.abs(V), "SelectV2 Select", of=lambda x: tf.where(x > 0.0, x, -x)),
    call("where: rows", (T, M, -M), np.stack([M[0], -M[1]])),
    call("where: places", (M > 0,), np.argwhere(M > 0), "Where"),
    call("saturate_cast", (F32([-5.0, 3.5, 1e9]), tf.uint8), np.array([0, 3, 255], np.uint8)),
    call("saturate_cast: int32", (F32([-1e20, 1e20]), tf.int32), ints(-(2**31), 2**31 - 128)),
]  # fmt: skip

# -- along axes ----------------------------------------------------------------------------------

AXES = ((None, {}), (1, {"axis": 1}), ((0, 1), {"axis": [0, 1]}), (-1, {"axis": -1}))
REDUCED = [
    call(f"math.{name}: {options}", (array,), reference(array, axis=axis, keepdims=axis == -1),
         op, **options, **{"keepdims": True} if axis == -1 else {})
    for name, reference, array, op in [
        ("reduce_sum", np.sum, M, "Sum"), ("reduce_mean", np.mean, M, "Mean"),
        ("reduce_prod", np.prod, M, "Prod"), ("reduce_max", np.max, M, "Max"),
        ("reduce_min", np.min, M, "Min"), ("reduce_any", np.any, M > 2, "Any"),
        ("reduce_all", np.all, M > -3, "All"), ("reduce_logsumexp", special.logsumexp, M, None),
        ("reduce_variance", np.var, M, None), ("reduce_std", np.std, M, None),
        ("count_nonzero", np.count_nonzero, ints([0, 1], [2, 0]), None),
    ]
    for axis, options in AXES
]  # fmt: skip

FLIPPED, SPECTRUM = (C + 1j * C[::-1]).astype(C64), (M + 1j * M[::-1]).astype(C64)
TRANSFORMED = [
    call("fft", (FLIPPED,), np.fft.fft(FLIPPED).astype(C64), "FFT"),
    call("ifft", (FLIPPED,), np.fft.ifft(FLIPPED).astype(C64), "IFFT"),
    call("signal.fft2d", (FLIPPED,), np.fft.fft2(FLIPPED).astype(C64), "FFT FFT2D"),
    call("ifft2d", (FLIPPED,), np.fft.ifft2(FLIPPED).astype(C64), "IFFT IFFT2D"),
    call("fft3d", (FLIPPED,), np.fft.fftn(FLIPPED).astype(C64), "FFT FFT3D"),
    call("spectral.ifft3d", (FLIPPED,), np.fft.ifftn(FLIPPED).astype(C64), "IFFT IFFT3D"),
    call("spectral.rfft", (M,), np.fft.rfft(M).astype(C64), "RFFT rfft"),
    call("spectral.rfft: of a length", (M, [4]), np.fft.rfft(M, 4).astype(C64), "RFFT rfft"),
    call("signal.irfft", (SPECTRUM,), np.fft.irfft(SPECTRUM).astype(F32), "IRFFT irfft"),
    call("spectral.irfft: of a length", (SPECTRUM,), np.fft.irfft(SPECTRUM, 3).astype(F32),
         fft_length=[3]),
    call("spectral.rfft2d", (C,), np.fft.rfft2(C).astype(C64)),
    call("spectral.irfft2d", (SPECTRUM, [2, 5]), np.fft.irfft2(SPECTRUM, (2, 5)).astype(F32)),
    call("spectral.rfft3d", (C,), np.fft.rfftn(C).astype(C64)),
    call("spectral.irfft3d", (C.astype(C64),), np.fft.irfftn(C).astype(F32)),
    call("signal.fftshift", (M,), np.fft.fftshift(M)),
    call("signal.ifftshift", (M,), np.fft.ifftshift(M, axes=1), axes=[1]),
    call("linalg.expm", (S.astype(F32),), scipy.linalg.expm(S).astype(F32),
         "MatrixExponential matrix_exponential"),
]  # fmt: skip

norm, NONE = np.linalg.norm, np.zeros(3, F32)
ALONG = [
    call("argmax", (M,), np.argmax(M, 0), "ArgMax"),
    call("argmin", (M, 1), np.argmin(M, 1), "ArgMin"),
    call("argmax: int32", (M, -1), ints(2, 2), "Cast ArgMax", output_type=tf.int32),
    call("cumsum", (M,), np.cumsum(M, 0), "Cumsum"),
    call("cumsum: int32", (ints(1, 2, 3),), ints(5, 3, 0), "Cast Cumsum", exclusive=True,
         reverse=True),
    call("cumprod", (M,), np.cumprod(M[:, ::-1], 1)[:, ::-1], "Cumprod", axis=1, reverse=True),
    call("sort", (M,), M[:, ::-1], "Sort sort", direction="DESCENDING"),
    call("argsort", (M,), np.argsort(M, 0).astype(I32), "Cast argsort", axis=0),
    call("invert_permutation", (ints(1, 2, 0),), ints(2, 0, 1), "Cast InvertPermutation"),
    call("norm", (M,), norm(M)),
    call("norm: rows", (M,), norm(M, axis=1, keepdims=True), axis=1, keepdims=True),
    call("norm: 1", (M,), np.abs(M).sum(), ord=1),
    call("norm: 3", (M,), norm(M, ord=3, axis=-1), ord=3, axis=-1),
    call("norm: fro", (C,), norm(C, axis=(0, 1)), ord="fro", axis=(0, 1)),
    *[call(f"norm: matrices {n}", (C,), norm(C, n, axis=(0, 1)), ord=n, axis=(0, 1))
      for n in (1, 2, np.inf)],
    call("unsorted_segment_sum", (M, ints(0, 2), 3), np.stack([M[0], NONE, M[1]]),
         "UnsortedSegmentSum"),
    call("math.unsorted_segment_mean", (M, ints(0, 0), 2), np.stack([M.mean(0), NONE])),
    call("segment_sum", (M.T, ints(0, 0, 2)), np.stack([M.T[0] + M.T[1], NONE[:2], M.T[2]])),
    call("segment_mean", (M.T, ints(0, 0, 1)), np.stack([(M.T[0] + M.T[1]) / 2, M.T[2]])),
    call("segment_sum: a list of ids", (M.T, [0, 0, 2]),
         np.stack([M.T[0] + M.T[1], NONE[:2], M.T[2]])),
    call("math.unsorted_segment_mean: a list of ids", (M.T, [0, 0, 1], 2),
         np.stack([(M.T[0] + M.T[1]) / 2, M.T[2]])),
]  # fmt: skip

# -- shapes --------------------------------------------------------------------------------------

IMAGE = np.arange(16, dtype=F32).reshape(1, 4, 4, 1)
BLOCKS = IMAGE[0].reshape(2, 2, 2, 2, 1).transpose(1, 3, 0, 2, 4).reshape(4, 2, 2, 1)
FLAT = [[0, 0], [0, 0]]
LENGTHS, PICKS = ints(1, 3, 0), ints(2, 0)
SHAPED = [
    call("shape", (M,), ints(2, 3)),
    call("shape: int64", (M,), np.array([2, 3]), out_type=tf.int64), call("rank", (M,), I32(2)),
    call("size", (M,), I32(6)), call("reshape", (M, [3, -1]), M.reshape(3, 2), "Reshape"),
    call("reshape: by a tensor", (M,), M, "Reshape", of=lambda x: tf.reshape(x, tf.shape(x))),
    call("expand_dims", (M, -1), M[..., None], "ExpandDims"),
    call("expand_dims: dim", (M,), M[None], "ExpandDims", dim=0),
    call("squeeze", (IMAGE,), IMAGE[0, :, :, 0], "Squeeze"),
    call("squeeze: an axis", (IMAGE, [0]), IMAGE[0], "Squeeze"),
    call("transpose", (C,), C.T, "Transpose transpose"),
    call("transpose: by a permutation", (C, [1, 0, 2]), np.swapaxes(C, 0, 1),
         "Transpose transpose"),
    call("transpose: conjugate", (Z,), Z.conj(), conjugate=True),
    call("matrix_transpose", (C,), np.swapaxes(C, 1, 2), "Transpose matrix_transpose"),
    call("linalg.adjoint", (C,), np.swapaxes(C, 1, 2), "Transpose adjoint"),
    call("broadcast_to", (V, [2, 4]), np.stack([V, V]), "BroadcastTo"),
    call("tile", (M, [2, 1]), np.tile(M, (2, 1)), "Tile"),
    call("reverse", (M, [1]), M[:, ::-1], "ReverseV2"),
    call("roll", (M, 1, 0), np.roll(M, 1, 0), "Roll"),
    call("pad", (M, [[1, 0], [0, 2]]), np.pad(M, [(1, 0), (0, 2)]), "PadV2 Pad"),
    call("pad: a value", (V, [[1, 1]]), np.pad(V, 1, constant_values=7), "PadV2 Pad",
         constant_values=7),
    call("pad: reflection", (V, [[1, 2]], "REFLECT"), np.pad(V, (1, 2), "reflect"), "MirrorPad"),
    call("pad: bools", (SOME, [[1, 0]]), np.pad(SOME, (1, 0))),
    call("concat", ([M, M[:1]], 0), np.concatenate([M, M[:1]]), "ConcatV2 concat"),
    call("concat: along the last axis", ([M, M],), np.concatenate([M, M], 1), "ConcatV2 concat",
         axis=-1),
    call("concat: one", ([M], 0), M, "Identity concat"),
    call("stack", ([V, P],), np.stack([V, P], 1), "Pack stack", axis=1),
    call("stack: numbers", ([F32(0.5), 2.0],), F32([0.5, 2]), "Pack stack"),
    call("unstack", (M,), list(M), "Unpack unstack", num=2),
    call("split: into parts", (M, 3), np.split(M, 3, 1), "Split split", axis=1),
    call("split: into sizes", (V, [1, -1]), [V[:1], V[1:]], "Split split"),
    call("identity_n", ([V, ints(1)],), [V, ints(1)], "IdentityN"),
    call("meshgrid", (V, ABOVE), np.meshgrid(V, ABOVE, indexing="ij"), indexing="ij"),
    call("space_to_batch_nd", (IMAGE, [2, 2], FLAT), BLOCKS, "SpaceToBatchND"),
    call("space_to_batch", (IMAGE, FLAT, 2), BLOCKS),
    call("batch_to_space", (BLOCKS, FLAT, 2), IMAGE),
    call("zeros", (M,), M, of=lambda x: x + tf.zeros(tf.shape(x))),
    call("zeros: unknown size", (V,), np.zeros((4, 2), I64),
         of=lambda x: tf.zeros([tf.shape(x)[0], 2], tf.int64)),
    call("ones_like: with a dtype", (V,), ints(1, 1, 1, 1), "OnesLike ones_like", dtype=tf.int32),
    call("fill", ([2, 2], F32(0.5)), np.full((2, 2), F32(0.5)), "BroadcastTo Fill"),
    call("range", (I32(4),), np.arange(4, dtype=I32), "Range range"),
    call("range: backwards", (I32(3), 0, -1), ints(3, 2, 1)),
    call("range: floats", (0.5, F32(2), 0.5), F32([0.5, 1, 1.5])),
    call("range: rows", (M,), ints(0, 1), of=lambda x: tf.range(tf.shape(x)[0])),
    call("lin_space", (0.0, F32(2), 5), F32([0, 0.5, 1, 1.5, 2]), "LinSpace"),
    call("eye", (M,), np.eye(2, 3, dtype=F32), of=lambda x: tf.eye(tf.shape(x)[0], 3)),
    call("eye: a batch", (M,), np.stack([np.eye(2, dtype=F32)] * 2),
         of=lambda x: tf.eye(tf.shape(x)[0], batch_shape=[2])),
    call("sequence_mask", (LENGTHS,), np.arange(3) < LENGTHS[:, None]),
    call("sequence_mask: of a length", (LENGTHS, 2, tf.float32), F32([[1, 0], [1, 1], [0, 0]])),
    call("one_hot", (PICKS, 3), np.eye(3, dtype=F32)[PICKS], "OneHot one_hot"),
    call("one_hot: values", (PICKS, 3), ints([-1, 5], [-1, -1], [5, -1]), on_value=5,
         off_value=-1, axis=0),
    call("one_hot: a tensor", (PICKS, 3, F32(0.5)), F32([[0, 0, 0.5], [0.5, 0, 0]])),
    call("one_hot: a list of indices", ([2, 0], 3, F32(0.5), F32(-1)),
         F32([[-1, -1, 0.5], [0.5, -1, -1]])),
]  # fmt: skip

# -- picking -------------------------------------------------------------------------------------

ALL = slice(None)
INDICES = {
    "0": 0, "-1": -1, "1, 2": (1, 2), ":, 1": (ALL, 1), "1:": slice(1, None),
    "..., :2": (..., slice(None, 2)), "::-1": slice(None, None, -1), ":, None": (ALL, None),
    "None, -1, 1:3": (None, -1, slice(1, 3)), ":-1": slice(None, -1),
}  # fmt: skip
PICKED = [
    call("gather", (M, ints(1, 0, 1)), M[[1, 0, 1]], "GatherV2"),
    call("gather: columns", (M, ints([1], [0])), M[:, [[1], [0]]], "GatherV2", axis=1),
    call("gather: by a list", (M, [1]), M[[1]]),
    call("gather: in a batch", (M, ints([1], [2])), F32([[M[0, 1]], [M[1, 2]]]), "GatherV2",
         batch_dims=1),
    call("batch_gather", (M, ints([1, 1], [2, 0])), np.take_along_axis(M, ints([1, 1], [2, 0]), 1),
         "GatherV2 BatchGather"),
    call("gather_nd", (M, ints([0, 2], [1, 1])), M[[0, 1], [2, 1]], "GatherNd"),
    call("scatter_nd", (ints([1], [3]), F32([2.5, 1]), [4]), F32([0, 2.5, 0, 1]), "ScatterNd"),
    call("tensor_scatter_update", (V, ints([0]), F32([9])), F32([9, *V[1:]]),
         "TensorScatterUpdate"),
    call("boolean_mask", (M, ~T), M[1:]),
    call("boolean_mask: columns", (M, SOME), M[:, SOME], axis=1),
    call("boolean_mask: of a constant", (M, [False, True]), M[1:]),
    call("boolean_mask: of two axes", (C, M > 0, "boolean_mask", 0), C[M > 0]),
    call("slice", (M, [0, 1], [-1, 2]), M[:, 1:3], "Slice"),
    call("slice: by tensors", (M, ints(1, 1)), M[1:, 1:],
         of=lambda x, b: tf.slice(x, b, tf.shape(x) - b)),
    call("strided_slice", (M, [0, 2], [2, 0], [1, -1]), M[0:2, 2:0:-1], "StridedSlice"),
    call("strided_slice: with masks", (M, [0, 1, 0], [0, 0, 0]), M[None, 1:, 0], end_mask=2,
         new_axis_mask=1, shrink_axis_mask=4),
    call("strided_slice: with an ellipsis", (C, [0, 1], [0, 2]), C[..., 1:2], ellipsis_mask=1),
    call("unique", (ints(7, 3, 7, 9),), [ints(7, 3, 9), ints(0, 1, 0, 2)]),
    call("confusion_matrix", (ints(0, 2, 2), ints(1, 2, 2)), ints([0, 1, 0], [0, 0, 0], [0, 0, 2])),
    *[call(f"x[{text}]", (M,), M[index], "StridedSlice strided_slice", of=lambda x, i=index: x[i])
      for text, index in INDICES.items()],
    call("x[i] of a tensor", (M, I32(1)), M[1], of=lambda x, i: x[i]),
    call("x[i, j] of tensors", (M, I32(1)), M[1, 1], of=lambda x, i: x[i, i]),
    call("x[i:] of a tensor", (M, I32(1)), M[1:], of=lambda x, i: x[i:]),
    call("x[:n] of a size", (M,), M[:-1], of=lambda x: x[: tf.shape(x)[0] - 1]),
    call("x[mask]", (V,), V[V > 0], of=lambda x: x[x > 0.0]),
    call("x[mask] of NumPy", (V,), V[V > 0], of=lambda x: x[V > 0]),
    call("x[n] of a size", (M,), M[-1], of=lambda x: x[x.shape[0] - 1]),
]  # fmt: skip

# -- matrices ------------------------------------------------------------------------------------

RIGHT = np.arange(8.0).reshape(2, 2, 2) - 3
TALL, WIDE, ADJOINT = M.T.astype(F64), M.astype(F64), np.array([[1j, 2], [0, 1 - 1j]])
BANDS = ints([1, 1, 0], [0, 1, 1])  # the diagonal and the one above


def signless(values):
    """Vectors are known up to their signs."""
    return [abs(x) for x in values]


U, SIGMA, VH = np.linalg.svd(WIDE, full_matrices=False)
MATRICES = [
    call("matmul", (M, M.T), M @ M.T, "MatMul"),
    call("matmul: transposed", (RIGHT, SS), RIGHT @ np.swapaxes(SS, 1, 2), "MatMul",
         transpose_b=True),
    call("matmul: adjoint", (ADJOINT, ADJOINT), ADJOINT.conj().T @ ADJOINT, adjoint_a=True),
    call("tensordot", (C, M[:, :2], 1), np.tensordot(C, M[:, :2], 1)),
    call("tensordot: over axes", (C, C, [[0, 1], [0, 1]]), np.tensordot(C, C, [[0, 1], [0, 1]])),
    call("einsum", ("bij,bjk->bik", RIGHT, SS), RIGHT @ SS, "Einsum einsum"),
    call("matrix_diag", (V,), np.diag(V), "MatrixDiag"),
    call("matrix_diag_part", (SS,), np.diagonal(SS, 0, 1, 2), "MatrixDiagPart"),
    call("matrix_set_diag", (S, np.array([7.0, 8.0])), np.array([[7.0, 1.0], [1.0, 8.0]])),
    call("linalg.tensor_diag", (V,), np.diag(V)),
    call("linalg.tensor_diag: of a matrix", (M,), np.diag(M.ravel()).reshape(2, 3, 2, 3)),
    call("linalg.tensor_diag_part", (np.diag(M.ravel()).reshape(2, 3, 2, 3),), M),
    call("matrix_band_part", (M, -1, 0), np.tril(M)),
    call("matrix_band_part: a band", (M, 0, 1), M * BANDS.astype(F32)),
    call("trace", (SS,), np.trace(SS, axis1=1, axis2=2)),
    call("matrix_determinant", (SS,), np.linalg.det(SS), "MatrixDeterminant"),
    call("linalg.slogdet", (SS,), list(np.linalg.slogdet(SS))),
    call("linalg.logdet", (SS,), np.log(np.linalg.det(SS))),
    call("matrix_inverse", (SS,), np.linalg.inv(SS), "MatrixInverse"),
    call("matrix_inverse: adjoint", (RIGHT,), np.linalg.inv(np.swapaxes(RIGHT, 1, 2)),
         adjoint=True),
    call("matrix_solve", (SS, RIGHT), np.linalg.solve(SS, RIGHT), "MatrixSolve"),
    call("matrix_triangular_solve", (SS, RIGHT), np.linalg.solve(np.tril(SS), RIGHT),
         "MatrixTriangularSolve"),
    call("cholesky", (SS,), np.linalg.cholesky(SS), "Cholesky"),
    call("cholesky_solve", (np.linalg.cholesky(SS), RIGHT), np.linalg.solve(SS, RIGHT)),
    call("svd", (WIDE,), signless([SIGMA, U, VH.T]), of=lambda x: signless(tf.svd(x))),
    call("svd: of values", (WIDE,), SIGMA, compute_uv=False),
    call("qr", (TALL,), signless(np.linalg.qr(TALL)), of=lambda x: signless(tf.qr(x))),
    call("self_adjoint_eig", (SS,), signless(np.linalg.eigh(SS)),
         of=lambda x: signless(tf.self_adjoint_eig(x))),
    call("self_adjoint_eigvals", (SS,), np.linalg.eigvalsh(SS)),
]  # fmt: skip

# -- tf.nn and tf.image, with values and gradients by eager regrad ---------------------------------

ROWS, IMAGES, VOLUMES = normal(4, 3), normal(2, 6, 5, 3), normal(2, 3, 4, 3, 2)
FIRST, CHANNELS, W = IMAGES.transpose(0, 3, 1, 2), normal(3), normal(3, 3, 3, 2)
DENSE, ONES = [ROWS, normal(3, 2), normal(2)], [1, 1, 1, 1]
PAIRED = [[0, 0], [1, 0], [0, 2], [0, 0]]


def last(x):
    return rg.permute_dims(x, (0, 2, 3, 1))


def first(x):
    return rg.permute_dims(x, (0, 3, 1, 2))


def cross_entropy(labels, logits):
    return rg.losses.softmax_cross_entropy(labels, logits, None, "none")


def named(function):
    """The function, whose tensors are the arguments `labels` and `logits`."""
    return lambda x, y, **options: function(labels=x, logits=y, **options)


COUNTS, RATES = F32([0.5, 1.0, 3.0]), F32([0.1, 0.2, 0.3])
STIRLING = COUNTS * np.log(COUNTS) - COUNTS + 0.5 * np.log(2 * np.pi * COUNTS)
FULL_LOSS = np.exp(RATES) - COUNTS * RATES + np.where(COUNTS > 1, STIRLING, 0)
V2, SIGMOID = "softmax_cross_entropy_with_logits_v2", "sigmoid_cross_entropy_with_logits"
UNARY = "relu elu selu leaky_relu sigmoid softplus softsign softmax log_softmax"
NN = [
    *[call(f"nn.{name}", (ROWS,), getattr(rg.nn, name), camel(name)) for name in UNARY.split()],
    call("nn.relu6", (6 * ROWS,), rg.nn.relu6, "Relu6"), call("nn.swish", (ROWS,), rg.nn.silu),
    call("nn.tanh", (ROWS,), rg.tanh, "Tanh"),
    call("nn.leaky_relu: alpha", (ROWS, 0.5), lambda x: rg.nn.leaky_relu(x, 0.5), "LeakyRelu"),
    call("nn.leaky_relu: a tensor", (ROWS, F32(0.3)), rg.nn.prelu),
    call("nn.crelu", (ROWS,), lambda x: rg.nn.relu(rg.concat([x, -x], axis=-1)), "Relu CRelu/Relu"),
    call("nn.softmax: axis", (ROWS, 0), lambda x: rg.nn.softmax(x, 0)),
    call("nn.softmax: dim", (ROWS,), lambda x: rg.nn.softmax(x, 0), dim=0),
    call(f"nn.{V2}", (shares(4, 3), ROWS), cross_entropy, of=named(getattr(tf.nn, V2))),
    call(f"nn.{V2}: axis", (shares(4, 3), ROWS), lambda x, y: cross_entropy(
        rg.matrix_transpose(x), rg.matrix_transpose(y)), of=named(getattr(tf.nn, V2)), axis=0),
    call(f"nn.{SIGMOID}", (shares(4, 3), 20 * ROWS), lambda x, y: rg.losses.sigmoid_cross_entropy(
        x, y, None, "none"), of=named(getattr(tf.nn, SIGMOID))),
    call("nn.weighted_cross_entropy_with_logits", (shares(4, 3), ROWS, 3.0),
         lambda x, y: (1 - x) * y + (1 + 2 * x) * rg.nn.softplus(-y)),
    call("nn.l2_loss", (ROWS,), lambda x: rg.sum(x * x) / 2),
    call("nn.l2_normalize", (ROWS, 1), lambda x: rg.nn.l2_normalize(x, 1), "Mul l2_normalize"),
    call("nn.bias_add", (ROWS, CHANNELS), rg.add, "BiasAdd"),
    call("nn.bias_add: NCHW", (FIRST, CHANNELS, "NCHW"), lambda x, b: x + rg.reshape(b, (3, 1, 1))),
    call("nn.xw_plus_b", (*DENSE,), lambda x, w, b: x @ w + b, "BiasAdd xw_plus_b"),
    call("nn.relu_layer", (*DENSE,), lambda x, w, b: rg.nn.relu(x @ w + b), "Relu relu_layer"),
    call("nn.conv1d", (normal(2, 7, 3), normal(3, 3, 4), 2, "SAME"),
         lambda x, w: rg.nn.conv1d(x, w, 2, "same"), "Squeeze conv1d/Squeeze"),
    call("nn.conv2d", (IMAGES, W, [1, 2, 1, 1], "SAME"),
         lambda x, w: rg.nn.conv2d(x, w, (2, 1), "same"), "Conv2D"),
    call("nn.conv2d: valid", (IMAGES,), lambda x: rg.nn.conv2d(x, W, 2, "valid"), "Conv2D",
         filters=W, strides=2, padding="VALID"),
    call("nn.conv2d: dilated", (IMAGES, W, ONES, "SAME"),
         lambda x, w: rg.nn.conv2d(x, w, 1, "same", 2), "Conv2D", dilations=[1, 2, 2, 1]),
    call("nn.conv2d: pairs", (IMAGES, W, ONES, PAIRED),
         lambda x, w: rg.nn.conv2d(x, w, 1, ((1, 0), (0, 2))), "Conv2D"),
    call("nn.conv2d: NCHW", (FIRST, W, [1, 1, 2, 1], "SAME"),
         lambda x, w: first(rg.nn.conv2d(last(x), w, (2, 1), "same")), data_format="NCHW"),
    call("nn.conv3d", (VOLUMES, normal(2, 2, 2, 2, 3), [1, 1, 2, 1, 1], "SAME"),
         lambda x, w: rg.nn.conv3d(x, w, (1, 2, 1), "same")),
    call("nn.convolution", (IMAGES, normal(2, 2, 3, 2), "VALID"),
         lambda x, w: rg.nn.conv2d(x, w, 1, "valid", (2, 1)), dilation_rate=[2, 1]),
    call("nn.atrous_conv2d", (IMAGES, normal(2, 2, 3, 2), 2, "SAME"),
         lambda x, w: rg.nn.conv2d(x, w, 1, "same", 2)),
    call("nn.depthwise_conv2d", (IMAGES, W, ONES, "SAME"),
         lambda x, w: rg.nn.depthwise_conv2d(x, w, 1, "same"), "DepthwiseConv2dNative depthwise"),
    call("nn.separable_conv2d", (IMAGES, W, normal(1, 1, 6, 2), ONES, "VALID"),
         lambda x, w, p: rg.nn.separable_conv2d(x, w, p, 1, "valid")),
    call("nn.conv2d_transpose", (IMAGES, normal(3, 3, 2, 3), [2, 12, 10, 2], [1, 2, 2, 1]),
         lambda x, w: rg.nn.conv2d_transpose(x, w, (2, 12, 10, 2), 2, "same"),
         "Conv2DBackpropInput conv2d_transpose"),
    call("nn.max_pool", (IMAGES, [1, 2, 3, 1], [1, 2, 1, 1], "SAME"),
         lambda x: rg.nn.max_pool(x, (2, 3), (2, 1), "same"), "MaxPool"),
    call("nn.max_pool: NCHW", (FIRST, [1, 1, 2, 3], [1, 1, 2, 1], "VALID", "NCHW"),
         lambda x: first(rg.nn.max_pool(last(x), (2, 3), (2, 1), "valid"))),
    call("nn.avg_pool", (IMAGES, [1, 2, 2, 1], [1, 2, 1, 1], "SAME"),
         lambda x: rg.nn.avg_pool(x, 2, (2, 1), "same"), "AvgPool"),
    call("nn.max_pool3d", (VOLUMES, [1, 2, 2, 2, 1], [1, 1, 1, 1, 1], "VALID"),
         lambda x: rg.nn.max_pool3d(x, 2, 1, "valid")),
    call("nn.avg_pool3d", (VOLUMES, 2, 1, "VALID"), lambda x: rg.nn.avg_pool3d(x, 2, 1, "valid")),
    call("nn.batch_normalization", (ROWS, CHANNELS, positive(3), CHANNELS, positive(3), 1e-3),
         lambda x, m, v, b, g: rg.nn.batch_norm(x, m, v, b, g, 1e-3)),
    call("nn.batch_normalization: bare", (ROWS, CHANNELS, positive(3), None, None, 1e-3),
         rg.nn.batch_norm),
    call("nn.moments", (ROWS, [0]), lambda x: rg.concat(rg.nn.moments(x, 0), axis=0),
         of=lambda *a: tf.concat(tf.nn.moments(*a), 0)),
    call("nn.moments: keep_dims", (IMAGES, [0, 1, 2]),
         lambda x: rg.concat(rg.nn.moments(x, (0, 1, 2), True), axis=0),
         of=lambda *a: tf.concat(tf.nn.moments(*a, keep_dims=True), 0)),
    call("nn.lrn", (IMAGES, 1, 2.0, 0.5, 0.75),
         lambda x: rg.nn.local_response_normalization(x, 1, 2.0, 0.5, 0.75), "LRN"),
    call("nn.embedding_lookup", (ROWS, [[2, 0], [3, 3]]),
         lambda x: rg.take(x, [[2, 0], [3, 3]], axis=0), "GatherV2 embedding_lookup"),
    call("nn.top_k", (ROWS, 2), lambda x: rg.top_k(x, 2)[0], "TopKV2",
         of=lambda *a: tf.nn.top_k(*a).values),
    call("nn.log_poisson_loss", (positive(4, 3), ROWS), lambda z, c: rg.exp(c) - z * c),
    call("nn.log_poisson_loss: in full", (COUNTS, RATES), FULL_LOSS.astype(F32),
         compute_full_loss=True),
    call("nn.zero_fraction", (ints(0, 1, 0, 2),), F32(0.5)),
    call("image.per_image_standardization", (C[:, :1] * 0 + 3,), C[:, :1] * 0),
    call("image.resize_bilinear", (IMAGES, [4, 7]), lambda x: rg.nn.resize_bilinear(x, (4, 7)),
         "ResizeBilinear"),
    call("image.resize_nearest_neighbor", (IMAGES, [4, 7]),
         lambda x: rg.nn.resize_nearest(x, (4, 7), True), align_corners=True),
    call("image.flip_left_right", (IMAGES,), lambda x: rg.flip(x, axis=2)),
    call("image.flip_up_down", (IMAGES,), lambda x: rg.flip(x, axis=1)),
]  # fmt: skip

# -- tf.losses, with values and gradients by eager regrad.losses -----------------------------------

LABELS, GUESSES, CLASSES = shares(4, 3), shares(4, 3)[::-1].copy(), ints(0, 2, 1, 1)
PER_ROW = positive(4, 1)


def softmax_loss(labels, logits, weights=None, **options):
    return rg.losses.softmax_cross_entropy(rg.stop_gradient(labels), logits, weights, **options)


def loss(label, *arrays, of=None, **options):
    name = label.partition(":")[0]
    due = of or getattr(rg.losses, name)
    return call(f"losses.{label}", arrays, lambda *xs: due(*xs, **options), **options)


LOSSES = [
    *[loss(name, LABELS, GUESSES, **options) for name, options in [
        ("absolute_difference", {}), ("mean_squared_error", {}), ("huber_loss", {"delta": 0.2}),
        ("hinge_loss", {}), ("log_loss", {}), ("sigmoid_cross_entropy", {}),
        ("sigmoid_cross_entropy: smooth", {"label_smoothing": 0.3}),
    ]],
    loss("mean_squared_error: weights", LABELS, GUESSES, PER_ROW),
    loss("softmax_cross_entropy", LABELS, ROWS, of=softmax_loss),
    loss("softmax_cross_entropy: smooth", LABELS, ROWS, of=softmax_loss, label_smoothing=0.3),
    loss("softmax_cross_entropy: weights", LABELS, ROWS, PER_ROW[:, 0], of=softmax_loss),
    loss("cosine_distance", LABELS, GUESSES, axis=1),
    loss("sparse_softmax_cross_entropy", CLASSES, ROWS, PER_ROW[:, 0]),
    call("losses.sparse_softmax_cross_entropy: column", (CLASSES[:, None], ROWS, PER_ROW),
         lambda i, x, w: rg.losses.sparse_softmax_cross_entropy(i[:, 0], x, w[:, 0])),
    call("losses.mean_pairwise_squared_error", (LABELS, GUESSES, PER_ROW), lambda x, y, w: rg.sum(
        rg.square((y - x)[:, :, None] - (y - x)[:, None]) / 6 * w[:, None])),
]  # fmt: skip

CALLS = [*ELEMENTWISE, *REDUCED, *TRANSFORMED, *ALONG, *SHAPED, *PICKED, *MATRICES, *NN, *LOSSES]
SHAPES = {
    "static": lambda a: a.shape, "sizes hidden": lambda a: [None] * a.ndim,
    "batch hidden": lambda a: [None, *a.shape[1:]][: a.ndim], "rank hidden": lambda a: None,
}  # fmt: skip


def placeholders(row, hidden):
    """Placeholders of the row's arrays, of which so much is known."""
    return [tf.placeholder(a.dtype, SHAPES[hidden](a)) for a in row.arrays]


def kinds(row):
    """How much of the shapes is hidden: the sizes, but only the batch where that is usual."""
    return ["static", "batch hidden" if callable(row.due) else "sizes hidden", "rank hidden"]
