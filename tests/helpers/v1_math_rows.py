"""TensorFlow's math and array functions: each with arguments, and what NumPy makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy.linalg
import scipy.special

import regrad.v1 as tf
from regrad.v1.functions import bitwise, linalg

F32, F64, I32, I64 = np.float32, np.float64, np.int32, np.int64


class Row(NamedTuple):
    """A function of tensors, what NumPy says, and what its op is called."""

    label: str
    f: Callable[..., Any]
    reference: Callable[..., Any]
    arrays: tuple[np.ndarray, ...]
    op_type: str | None = None
    name: str | None = None

    def __str__(self) -> str:
        return self.label


def row(label, f, reference, *arrays, op_type=None, name=None):
    arrays = tuple(as_float32(a) for a in arrays)
    return Row(label, f, reference, arrays, op_type, name or op_type)


def as_float32(value):
    array = np.asarray(value)
    return array.astype(F32) if isinstance(value, float | list) and array.dtype == F64 else array


def ints(*values):
    return np.array(values, I32)


def listed(values):
    return list(values) if isinstance(values, list | tuple) else [values]


# -- element by element --------------------------------------------------------------------------

V = [-1.5, -0.5, 0.25, 2.5]
POSITIVE = [0.25, 0.5, 1.5, 3.0]
INSIDE = [-0.75, -0.25, 0.5]
MATRIX = np.arange(6, dtype=F32).reshape(2, 3) - 2.5
CUBE = np.linspace(-1, 2, 12, dtype=F32).reshape(2, 3, 2)
SQUARE = np.array([[4.0, 1.0], [1.0, 3.0]])
SQUARES = np.stack([SQUARE, SQUARE @ SQUARE + 1])
COMPLEX = np.array([1 + 2j, -0.5j, -3.0], np.complex64)
INFINITE = [np.nan, np.inf, 1.0]

special = scipy.special
UNARY = [
    row(name, getattr(tf, name), reference, values, op_type=op_type, name=default)
    for name, reference, values, op_type, default in [
        ("abs", np.abs, V, "Abs", None),
        ("negative", np.negative, V, "Neg", None),
        ("sign", np.sign, V, "Sign", None),
        ("square", np.square, V, "Square", None),
        ("sqrt", np.sqrt, POSITIVE, "Sqrt", None),
        ("rsqrt", lambda x: 1 / np.sqrt(x), POSITIVE, "Rsqrt", None),
        ("reciprocal", np.reciprocal, V, "Reciprocal", None),
        ("exp", np.exp, V, "Exp", None),
        ("expm1", np.expm1, V, "Expm1", None),
        ("log", np.log, POSITIVE, "Log", None),
        ("log1p", np.log1p, POSITIVE, "Log1p", None),
        ("sin", np.sin, V, "Sin", None),
        ("cos", np.cos, V, "Cos", None),
        ("tan", np.tan, V, "Tan", None),
        ("asin", np.arcsin, INSIDE, "Asin", None),
        ("acos", np.arccos, INSIDE, "Acos", None),
        ("atan", np.arctan, V, "Atan", None),
        ("sinh", np.sinh, V, "Sinh", None),
        ("cosh", np.cosh, V, "Cosh", None),
        ("tanh", np.tanh, V, "Tanh", None),
        ("asinh", np.arcsinh, V, "Asinh", None),
        ("acosh", np.arccosh, [1.5, 2.0], "Acosh", None),
        ("atanh", np.arctanh, INSIDE, "Atanh", None),
        ("erf", special.erf, V, "Erf", None),
        ("erfc", special.erfc, V, "Erfc", None),
        ("lgamma", special.gammaln, POSITIVE, "Lgamma", None),
        ("digamma", special.digamma, POSITIVE, "Digamma", None),
        ("ceil", np.ceil, V, "Ceil", None),
        ("floor", np.floor, V, "Floor", None),
        ("round", np.round, V, "Round", None),
        ("rint", np.rint, V, "Round", "Rint"),
        ("sigmoid", special.expit, V, "Sigmoid", None),
        ("log_sigmoid", special.log_expit, V, "LogSigmoid", None),
        ("is_nan", np.isnan, INFINITE, "IsNan", None),
        ("is_inf", np.isinf, INFINITE, "IsInf", None),
        ("is_finite", np.isfinite, INFINITE, "IsFinite", None),
        ("logical_not", np.logical_not, np.array([True, False]), "LogicalNot", None),
        ("real", np.real, COMPLEX, "Real", None),
        ("imag", np.imag, COMPLEX, "Imag", None),
        ("conj", np.conj, COMPLEX, "Conj", None),
        ("angle", np.angle, COMPLEX, None, None),
        ("identity", np.array, V, "Identity", None),
        ("stop_gradient", np.array, V, "StopGradient", None),
        ("zeros_like", np.zeros_like, V, "ZerosLike", "zeros_like"),
        ("ones_like", np.ones_like, V, "OnesLike", "ones_like"),
        ("matrix_transpose", lambda x: np.swapaxes(x, -1, -2), CUBE, "Transpose",
         "matrix_transpose"),
        ("to_double", lambda x: x.astype(F64), V, "Cast", "ToDouble"),
        ("to_int32", lambda x: x.astype(I32), V, "Cast", "ToInt32"),
        ("to_int64", lambda x: x.astype(I64), V, "Cast", "ToInt64"),
        ("to_float", lambda x: x.astype(F32), ints(1, 2), "Cast", "ToFloat"),
    ]
]  # fmt: skip

BOOLS = np.array([True, True, False, False]), np.array([True, False, True, False])
BINARY = [
    row(name, getattr(tf, name), reference, *arrays, op_type=op_type, name=default)
    for name, reference, arrays, op_type, default in [
        ("add", np.add, (V, POSITIVE), "AddV2", "Add"),
        ("subtract", np.subtract, (V, POSITIVE), "Sub", None),
        ("multiply", np.multiply, (MATRIX, [2.0, 3.0, 0.5]), "Mul", None),
        ("divide", np.divide, (V, POSITIVE), "RealDiv", "truediv"),
        ("truediv", np.divide, (V, POSITIVE), "RealDiv", "truediv"),
        ("realdiv", np.divide, (V, POSITIVE), "RealDiv", None),
        ("div", np.divide, (V, POSITIVE), "RealDiv", "div"),
        ("div", np.floor_divide, (ints(7, -7), ints(2, 2)), "FloorDiv", "div"),
        ("div_no_nan", lambda a, b: np.where(b == 0, 0, a / np.where(b == 0, 1, b)),
         (V, [0.0, 1.0, 2.0, 0.0]), None, None),
        ("floordiv", np.floor_divide, (V, POSITIVE), "FloorDiv", "floordiv"),
        ("floor_div", np.floor_divide, (ints(7, -7), ints(2, 2)), "FloorDiv", None),
        ("floormod", np.remainder, (V, POSITIVE), "FloorMod", None),
        ("mod", np.remainder, (ints(7, -7), ints(3, 3)), "FloorMod", None),
        ("truncatediv", lambda a, b: np.trunc(a / b).astype(I32), (ints(7, -7), ints(2, 2)), None,
         None),
        ("truncatemod", np.fmod, (ints(7, -7), ints(2, 2)), None, None),
        ("pow", np.power, (POSITIVE, V), "Pow", None),
        ("pow", np.power, (ints(2, -3), ints(3, 2)), "Pow", None),
        ("maximum", np.maximum, (V, [0.0]), "Maximum", None),
        ("minimum", np.minimum, (V, [0.0]), "Minimum", None),
        ("squared_difference", lambda a, b: (a - b) ** 2, (V, POSITIVE), "SquaredDifference", None),
        ("atan2", np.arctan2, (V, POSITIVE), "Atan2", None),
        ("equal", np.equal, (ints(1, 2), ints(1, 3)), "Equal", None),
        ("not_equal", np.not_equal, (ints(1, 2), ints(1, 3)), "NotEqual", None),
        ("less", np.less, (V, [0.25]), "Less", None),
        ("less_equal", np.less_equal, (V, [0.25]), "LessEqual", None),
        ("greater", np.greater, (V, [0.25]), "Greater", None),
        ("greater_equal", np.greater_equal, (V, [0.25]), "GreaterEqual", None),
        ("logical_and", np.logical_and, BOOLS, "LogicalAnd", None),
        ("logical_or", np.logical_or, BOOLS, "LogicalOr", None),
        ("logical_xor", np.logical_xor, BOOLS, "LogicalXor", None),
        ("complex", lambda a, b: (a + 1j * b).astype(np.complex64), (V, POSITIVE), None, None),
        ("matmul", np.matmul, (MATRIX, MATRIX.T), "MatMul", None),
        ("cross", np.cross, (MATRIX, MATRIX[::-1]), "Cross", None),
        ("gather_nd", lambda x, i: x[i[:, 0], i[:, 1]], (MATRIX, ints([0, 2], [1, 1])), "GatherNd",
         None),
    ]
] + [
    row("xlogy", tf.math.xlogy, special.xlogy, [0.0, 2.0, -1.0], [0.0, 0.5, 3.0], op_type="Xlogy"),
    row("xdivy", tf.math.xdivy, lambda x, y: F32([0, 4, -0.25]), [0.0, 2.0, -1.0],
        [0.0, 0.5, 4.0], op_type="Xdivy"),
] + [
    row(f.__name__, f, reference, ints(6, 5), ints(3, 1), op_type=op_type)
    for f, reference, op_type in [
        (bitwise.bitwise_and, np.bitwise_and, "BitwiseAnd"),
        (bitwise.bitwise_or, np.bitwise_or, "BitwiseOr"),
        (bitwise.bitwise_xor, np.bitwise_xor, "BitwiseXor"),
        (bitwise.left_shift, np.left_shift, "LeftShift"),
        (bitwise.right_shift, np.right_shift, "RightShift"),
    ]
]  # fmt: skip


# -- along axes ----------------------------------------------------------------------------------

REDUCED = [
    row(f"{name} {options}", lambda x, n=name, o=options: getattr(tf.math, n)(x, **o),
        lambda x, r=reference, o=options: r(x, axis=as_axis(o), keepdims="keepdims" in o),
        array, op_type=op_type)
    for name, reference, array, op_type in [
        ("reduce_sum", np.sum, MATRIX, "Sum"),
        ("reduce_mean", np.mean, MATRIX, "Mean"),
        ("reduce_prod", np.prod, MATRIX, "Prod"),
        ("reduce_max", np.max, MATRIX, "Max"),
        ("reduce_min", np.min, MATRIX, "Min"),
        ("reduce_any", np.any, MATRIX > 2, "Any"),
        ("reduce_all", np.all, MATRIX > -3, "All"),
        ("reduce_logsumexp", special.logsumexp, MATRIX, None),
        ("reduce_variance", np.var, MATRIX, None),
        ("reduce_std", np.std, MATRIX, None),
        ("count_nonzero", np.count_nonzero, ints([0, 1], [2, 0]), None),
    ]
    for options in ({}, {"axis": 1}, {"axis": [0, 1]}, {"axis": -1, "keepdims": True})
]  # fmt: skip


SPECTRUM = MATRIX + 1j * MATRIX[::-1]
TRANSFORMED = [
    *[
        row(name, getattr(space, name), lambda x, f=reference: f(x).astype(np.complex64),
            (CUBE + 1j * CUBE[::-1]).astype(np.complex64), op_type=op_type, name=op_type + more)
        for space, name, reference, op_type, more in [
            (tf, "fft", np.fft.fft, "FFT", ""), (tf, "ifft", np.fft.ifft, "IFFT", ""),
            (tf.signal, "fft2d", np.fft.fft2, "FFT", "2D"),
            (tf, "ifft2d", np.fft.ifft2, "IFFT", "2D"),
            (tf, "fft3d", np.fft.fftn, "FFT", "3D"),
            (tf.spectral, "ifft3d", np.fft.ifftn, "IFFT", "3D"),
        ]
    ],
    row("rfft", tf.spectral.rfft, lambda x: np.fft.rfft(x).astype(np.complex64), MATRIX,
        op_type="RFFT", name="rfft"),
    row("rfft of a length", lambda x: tf.spectral.rfft(x, [4]),
        lambda x: np.fft.rfft(x, 4).astype(np.complex64), MATRIX, op_type="RFFT", name="rfft"),
    row("irfft", tf.signal.irfft, lambda x: np.fft.irfft(x).astype(F32),
        SPECTRUM.astype(np.complex64), op_type="IRFFT", name="irfft"),
    row("irfft of a length", lambda x: tf.spectral.irfft(x, fft_length=[3]),
        lambda x: np.fft.irfft(x, 3).astype(F32), SPECTRUM.astype(np.complex64)),
    row("rfft2d", tf.spectral.rfft2d, lambda x: np.fft.rfft2(x).astype(np.complex64), CUBE),
    row("irfft2d", lambda x: tf.spectral.irfft2d(x, [2, 5]),
        lambda x: np.fft.irfft2(x, (2, 5)).astype(F32), SPECTRUM.astype(np.complex64)),
    row("rfft3d", tf.spectral.rfft3d, lambda x: np.fft.rfftn(x).astype(np.complex64), CUBE),
    row("irfft3d", tf.spectral.irfft3d, lambda x: np.fft.irfftn(x).astype(F32),
        (CUBE + 0j).astype(np.complex64)),
    row("fftshift", tf.signal.fftshift, np.fft.fftshift, MATRIX),
    row("ifftshift", lambda x: tf.signal.ifftshift(x, axes=[1]),
        lambda x: np.fft.ifftshift(x, axes=1), MATRIX),
    row("expm", tf.linalg.expm, lambda x: scipy.linalg.expm(x).astype(F32),
        SQUARE.astype(F32), op_type="MatrixExponential", name="matrix_exponential"),
]  # fmt: skip


def as_axis(options):
    axis = options.get("axis")
    return tuple(axis) if isinstance(axis, list) else axis


ALONG = [
    row("argmax", tf.argmax, lambda x: np.argmax(x, 0), MATRIX, op_type="ArgMax"),
    row("argmin along 1", lambda x: tf.argmin(x, 1), lambda x: np.argmin(x, 1), MATRIX,
        op_type="ArgMin"),
    row("argmax as int32", lambda x: tf.argmax(x, -1, output_type=tf.int32),
        lambda x: np.argmax(x, -1).astype(I32), MATRIX, op_type="Cast", name="ArgMax"),
    row("cumsum", tf.cumsum, lambda x: np.cumsum(x, 0), MATRIX, op_type="Cumsum"),
    row("cumsum of int32", lambda x: tf.cumsum(x, exclusive=True, reverse=True),
        lambda x: np.array([5, 3, 0], I32), ints(1, 2, 3), op_type="Cast", name="Cumsum"),
    row("cumprod", lambda x: tf.cumprod(x, axis=1, reverse=True),
        lambda x: np.cumprod(x[:, ::-1], 1)[:, ::-1], MATRIX, op_type="Cumprod"),
    row("sort", lambda x: tf.sort(x, direction="DESCENDING"), lambda x: -np.sort(-x), MATRIX,
        op_type="Sort", name="sort"),
    row("argsort", lambda x: tf.argsort(x, axis=0), lambda x: np.argsort(x, 0).astype(I32), MATRIX,
        op_type="Cast", name="argsort"),
    row("invert_permutation", tf.invert_permutation, lambda x: ints(2, 0, 1), ints(1, 2, 0),
        op_type="Cast", name="InvertPermutation"),
    row("norm", tf.norm, np.linalg.norm, MATRIX),
    row("norm of rows", lambda x: tf.norm(x, axis=1, keepdims=True),
        lambda x: np.linalg.norm(x, axis=1, keepdims=True), MATRIX),
    row("1-norm", lambda x: tf.norm(x, ord=1), lambda x: np.abs(x).sum(), MATRIX),
    row("3-norm", lambda x: tf.norm(x, ord=3, axis=-1),
        lambda x: np.linalg.norm(x, ord=3, axis=-1), MATRIX),
    *[row(f"{ord}-norm of matrices", lambda x, o=ord: tf.norm(x, ord=o, axis=(0, 1)),
          lambda x, o=ord: np.linalg.norm(x, ord=None if o == "fro" else o, axis=(0, 1)), CUBE)
      for ord in ("fro", 1, 2, np.inf)],
    row("unsorted_segment_sum", lambda x, i: tf.unsorted_segment_sum(x, i, 3),
        lambda x, i: np.stack([x[0], np.zeros(3, F32), x[1]]), MATRIX, ints(0, 2),
        op_type="UnsortedSegmentSum"),
    row("unsorted_segment_mean", lambda x, i: tf.math.unsorted_segment_mean(x, i, 2),
        lambda x, i: np.stack([x.mean(0), np.zeros(3, F32)]), MATRIX, ints(0, 0)),
    row("segment_sum", tf.segment_sum, lambda x, i: np.stack([x[0] + x[1], 0 * x[0], x[2]]),
        MATRIX.T, ints(0, 0, 2)),
    row("segment_mean", tf.segment_mean, lambda x, i: np.stack([(x[0] + x[1]) / 2, x[2]]),
        MATRIX.T, ints(0, 0, 1)),
    row("clip_by_value", lambda x: tf.clip_by_value(x, -1.0, 1.0), lambda x: np.clip(x, -1, 1), V,
        op_type="ClipByValue", name="clip_by_value"),
    row("clip_by_norm", lambda x: tf.clip_by_norm(x, 1.0), lambda x: x / np.linalg.norm(x), V),
    row("clip_by_norm of short rows", lambda x: tf.clip_by_norm(x, 9.0, axes=[1]), np.array,
        MATRIX),
    row("clip_by_average_norm", lambda x: tf.clip_by_average_norm(x, 0.5),
        lambda x: x * 0.5 / max(np.linalg.norm(x) / 4, 0.5), V),
    row("add_n", lambda a, b: tf.add_n([a, b, a]), lambda a, b: 2 * a + b, V, POSITIVE,
        op_type="AddN"),
    row("accumulate_n", lambda a, b: tf.accumulate_n([a, b]), np.add, V, POSITIVE, op_type="AddN",
        name="AccumulateNV2"),
    row("scalar_mul", lambda x: tf.scalar_mul(2, x), lambda x: 2 * x, V, op_type="Mul", name="mul"),
    row("where", lambda x: tf.where(x > 0.0, x, -x), np.abs, V, op_type="SelectV2", name="Select"),
    row("where selects rows", lambda c, x: tf.where(c, x, -x),
        lambda c, x: np.stack([x[0], -x[1]]), np.array([True, False]), MATRIX),
    row("where tells places", tf.where, lambda x: np.argwhere(x), MATRIX > 0, op_type="Where"),
    row("saturate_cast", lambda x: tf.saturate_cast(x, tf.uint8),
        lambda x: np.array([0, 3, 255], np.uint8), [-5.0, 3.5, 1e9]),
    row("saturate_cast to int32", lambda x: tf.saturate_cast(x, tf.int32),
        lambda x: np.array([-(2**31), 2**31 - 128], I32), [-1e20, 1e20]),
]  # fmt: skip

# -- shapes --------------------------------------------------------------------------------------

IMAGE = np.arange(16, dtype=F32).reshape(1, 4, 4, 1)
SHAPED = [
    row("shape", tf.shape, lambda x: ints(2, 3), MATRIX),
    row("shape as int64", lambda x: tf.shape(x, out_type=tf.int64), lambda x: np.array([2, 3]),
        MATRIX),
    row("rank", tf.rank, lambda x: I32(2), MATRIX),
    row("size", tf.size, lambda x: I32(6), MATRIX),
    row("reshape", lambda x: tf.reshape(x, [3, -1]), lambda x: x.reshape(3, 2), MATRIX,
        op_type="Reshape"),
    row("reshape by a tensor", lambda x: tf.reshape(x, tf.shape(x)), np.array, MATRIX,
        op_type="Reshape"),
    row("expand_dims", lambda x: tf.expand_dims(x, -1), lambda x: x[..., None], MATRIX,
        op_type="ExpandDims"),
    row("expand_dims by its old name", lambda x: tf.expand_dims(x, dim=0), lambda x: x[None],
        MATRIX, op_type="ExpandDims"),
    row("squeeze", tf.squeeze, lambda x: x[0, :, :, 0], IMAGE, op_type="Squeeze"),
    row("squeeze an axis", lambda x: tf.squeeze(x, [0]), lambda x: x[0], IMAGE, op_type="Squeeze"),
    row("transpose", tf.transpose, np.transpose, CUBE, op_type="Transpose", name="transpose"),
    row("transpose by a permutation", lambda x: tf.transpose(x, [1, 0, 2]),
        lambda x: x.transpose(1, 0, 2), CUBE, op_type="Transpose", name="transpose"),
    row("transpose and conjugate", lambda x: tf.transpose(x, conjugate=True), np.conj, COMPLEX),
    row("broadcast_to", lambda x: tf.broadcast_to(x, [2, 4]), lambda x: np.stack([x, x]), V,
        op_type="BroadcastTo"),
    row("tile", lambda x: tf.tile(x, [2, 1]), lambda x: np.tile(x, (2, 1)), MATRIX, op_type="Tile"),
    row("reverse", lambda x: tf.reverse(x, [1]), lambda x: x[:, ::-1], MATRIX, op_type="ReverseV2"),
    row("roll", lambda x: tf.roll(x, 1, 0), lambda x: np.roll(x, 1, 0), MATRIX, op_type="Roll"),
    row("pad", lambda x: tf.pad(x, [[1, 0], [0, 2]]), lambda x: np.pad(x, [(1, 0), (0, 2)]), MATRIX,
        op_type="PadV2", name="Pad"),
    row("pad with a value", lambda x: tf.pad(x, [[1, 1]], constant_values=7),
        lambda x: np.pad(x, 1, constant_values=7), V, op_type="PadV2", name="Pad"),
    row("pad by reflection", lambda x: tf.pad(x, [[1, 2]], "REFLECT"),
        lambda x: np.pad(x, (1, 2), "reflect"), V, op_type="MirrorPad"),
    row("pad of bools", lambda x: tf.pad(x, [[1, 0]]), lambda x: np.pad(x, (1, 0)),
        np.array([True])),
    row("concat", lambda a, b: tf.concat([a, b], 0), lambda a, b: np.concatenate([a, b]), MATRIX,
        MATRIX[:1], op_type="ConcatV2", name="concat"),
    row("concat along the last axis", lambda a: tf.concat([a, a], axis=-1),
        lambda a: np.concatenate([a, a], -1), MATRIX, op_type="ConcatV2", name="concat"),
    row("concat of one", lambda a: tf.concat([a], 0), np.array, MATRIX, op_type="Identity",
        name="concat"),
    row("stack", lambda a, b: tf.stack([a, b], axis=1), lambda a, b: np.stack([a, b], 1), V,
        POSITIVE, op_type="Pack", name="stack"),
    row("stack with numbers", lambda x: tf.stack([x, 2.0]), lambda x: np.stack([x, F32(2)]), 0.5,
        op_type="Pack", name="stack"),
    row("unstack", lambda x: tf.unstack(x, num=2), list, MATRIX, op_type="Unpack", name="unstack"),
    row("split into parts", lambda x: tf.split(x, 3, axis=1), lambda x: np.split(x, 3, 1), MATRIX,
        op_type="Split", name="split"),
    row("split into sizes", lambda x: tf.split(x, [1, -1]), lambda x: [x[:1], x[1:]], V,
        op_type="Split", name="split"),
    row("identity_n", lambda a, b: tf.identity_n([a, b]), lambda a, b: [a, b], V, ints(1),
        op_type="IdentityN"),
    row("meshgrid", lambda a, b: tf.meshgrid(a, b, indexing="ij"),
        lambda a, b: np.meshgrid(a, b, indexing="ij"), V, [1.0, 2.0]),
    row("space_to_batch_nd", lambda x: tf.space_to_batch_nd(x, [2, 2], [[0, 0], [0, 0]]),
        lambda x: x[0].reshape(2, 2, 2, 2, 1).transpose(1, 3, 0, 2, 4).reshape(4, 2, 2, 1), IMAGE,
        op_type="SpaceToBatchND"),
    row("batch_to_space_nd", lambda x: tf.batch_to_space(tf.space_to_batch(
        x, [[0, 0], [0, 0]], 2), [[0, 0], [0, 0]], 2), np.array, IMAGE),
    row("zeros", lambda x: x + tf.zeros(tf.shape(x)), np.array, MATRIX),
    row("zeros of unknown size", lambda x: tf.zeros([tf.shape(x)[0], 2], tf.int64),
        lambda x: np.zeros((4, 2), I64), V),
    row("ones_like with a dtype", lambda x: tf.ones_like(x, dtype=tf.int32),
        lambda x: ints(1, 1, 1, 1), V, op_type="OnesLike", name="ones_like"),
    row("fill", lambda x: tf.fill([2, 2], x), lambda x: np.full((2, 2), x), 0.5,
        op_type="BroadcastTo", name="Fill"),
    row("range", lambda n: tf.range(n), lambda n: np.arange(4, dtype=I32), I32(4), op_type="Range",
        name="range"),
    row("range backwards", lambda n: tf.range(n, 0, -1), lambda n: ints(3, 2, 1), I32(3)),
    row("range of floats", lambda n: tf.range(0.5, n, 0.5), lambda n: np.array([0.5, 1, 1.5], F32),
        F32(2)),
    row("range of rows", lambda x: tf.range(tf.shape(x)[0]), lambda x: ints(0, 1), MATRIX),
    row("lin_space", lambda x: tf.lin_space(0.0, x, 5), lambda x: np.linspace(0, x, 5, dtype=F32),
        F32(2), op_type="LinSpace"),
    row("eye", lambda x: tf.eye(tf.shape(x)[0], 3), lambda x: np.eye(2, 3, dtype=F32), MATRIX),
    row("a batch of eyes", lambda x: tf.eye(tf.shape(x)[0], batch_shape=[2]),
        lambda x: np.stack([np.eye(2, dtype=F32)] * 2), MATRIX),
    row("sequence_mask", tf.sequence_mask, lambda n: np.arange(3) < n[:, None], ints(1, 3, 0)),
    row("sequence_mask of a length", lambda n: tf.sequence_mask(n, 2, tf.float32),
        lambda n: (np.arange(2) < n[:, None]).astype(F32), ints(1, 3, 0)),
    row("one_hot", lambda i: tf.one_hot(i, 3), lambda i: np.eye(3, dtype=F32)[i], ints(2, 0),
        op_type="OneHot", name="one_hot"),
    row("one_hot of values", lambda i: tf.one_hot(i, 3, on_value=5, off_value=-1, axis=0),
        lambda i: np.where(np.eye(3)[i].T > 0, I32(5), I32(-1)), ints(2, 0)),
    row("one_hot of a tensor", lambda i, v: tf.one_hot(i, 3, on_value=v),
        lambda i, v: v * np.eye(3, dtype=F32)[i], ints(2, 0), 0.5),
]  # fmt: skip

# -- picking -------------------------------------------------------------------------------------

PICKED = [
    row("gather", lambda x, i: tf.gather(x, i), lambda x, i: x[i], MATRIX, ints(1, 0, 1),
        op_type="GatherV2"),
    row("gather columns", lambda x, i: tf.gather(x, i, axis=1), lambda x, i: x[:, i], MATRIX,
        ints([1], [0]), op_type="GatherV2"),
    row("gather by a list", lambda x: tf.gather(x, [1]), lambda x: x[[1]], MATRIX),
    row("gather in a batch", lambda x, i: tf.gather(x, i, batch_dims=1),
        lambda x, i: np.take_along_axis(x, i, 1), MATRIX, ints([1], [2]), op_type="GatherV2"),
    row("scatter_nd", lambda i, u: tf.scatter_nd(i, u, [4]),
        lambda i, u: np.array([0, 2.5, 0, 1], F32), ints([1], [3]), [2.5, 1.0],
        op_type="ScatterNd"),
    row("tensor_scatter_update", tf.tensor_scatter_update,
        lambda x, i, u: np.array([9, x[1], x[2], x[3]], F32), V, ints([0]), [9.0],
        op_type="TensorScatterUpdate"),
    row("boolean_mask", lambda x, m: tf.boolean_mask(x, m), lambda x, m: x[m], MATRIX,
        np.array([False, True])),
    row("boolean_mask of columns", lambda x, m: tf.boolean_mask(x, m, axis=1),
        lambda x, m: x[:, m], MATRIX, np.array([True, False, True])),
    row("boolean_mask of a constant", lambda x: tf.boolean_mask(x, [False, True]),
        lambda x: x[[False, True]], MATRIX),
    row("slice", lambda x: tf.slice(x, [0, 1], [-1, 2]), lambda x: x[:, 1:3], MATRIX,
        op_type="Slice"),
    row("slice by tensors", lambda x, b: tf.slice(x, b, tf.shape(x) - b), lambda x, b: x[1:, 1:],
        MATRIX, ints(1, 1)),
    row("strided_slice", lambda x: tf.strided_slice(x, [0, 2], [2, 0], [1, -1]),
        lambda x: x[0:2, 2:0:-1], MATRIX, op_type="StridedSlice"),
    row("strided_slice with masks",
        lambda x: tf.strided_slice(x, [0, 1, 0], [0, 0, 0], end_mask=2, new_axis_mask=1,
                                   shrink_axis_mask=4),
        lambda x: x[None, 1:, 0], MATRIX),
    row("unique", lambda x: tuple(tf.unique(x)), lambda x: [ints(7, 3, 9), ints(0, 1, 0, 2)],
        ints(7, 3, 7, 9)),
    row("confusion_matrix", lambda a, b: tf.confusion_matrix(a, b),
        lambda a, b: ints([0, 1, 0], [0, 0, 0], [0, 0, 2]), ints(0, 2, 2), ints(1, 2, 2)),
    *[row(f"x[{text}]", lambda x, i=index: x[i], lambda x, i=index: x[i], MATRIX,
          op_type="StridedSlice", name="strided_slice")
      for text, index in [
          ("0", 0), ("-1", -1), ("1, 2", (1, 2)), (":, 1", (slice(None), 1)),
          ("1:", slice(1, None)), ("..., :2", (..., slice(None, 2))),
          ("::-1", slice(None, None, -1)), (":, None", (slice(None), None)),
          ("None, -1, 1:3", (None, -1, slice(1, 3))), (":-1", slice(None, -1)),
      ]],
    row("x[i] of a tensor", lambda x, i: x[i], lambda x, i: x[i], MATRIX, I32(1)),
    row("x[i, j] of tensors", lambda x, i: x[i, i], lambda x, i: x[i, i], MATRIX, I32(1)),
    row("x[i:] of a tensor", lambda x, i: x[i:], lambda x, i: x[i:], MATRIX, I32(1)),
    row("x[:n] of a size", lambda x: x[: tf.shape(x)[0] - 1], lambda x: x[:-1], MATRIX),
    row("x[mask]", lambda x: x[x > 0.0], lambda x: x[x > 0], V),
]  # fmt: skip

# -- matrices ------------------------------------------------------------------------------------

NORMAL = SQUARES + np.eye(2) * 0.5
RIGHT = np.arange(8.0).reshape(2, 2, 2) - 3


def signless(x):
    """Vectors are known up to their signs."""
    return abs(x)


MATRICES = [
    row("matmul, transposed", lambda a, b: tf.matmul(a, b, transpose_b=True),
        lambda a, b: a @ np.swapaxes(b, -1, -2), RIGHT, SQUARES, op_type="MatMul"),
    row("matmul, adjoint", lambda a: tf.matmul(a, a, adjoint_a=True), lambda a: a.conj().T @ a,
        np.array([[1j, 2], [0, 1 - 1j]])),
    row("tensordot", lambda a, b: tf.tensordot(a, b, 1), lambda a, b: np.tensordot(a, b, 1), CUBE,
        MATRIX[:, :2]),
    row("tensordot over axes", lambda a: tf.tensordot(a, a, [[0, 1], [0, 1]]),
        lambda a: np.tensordot(a, a, [[0, 1], [0, 1]]), CUBE),
    row("einsum", lambda a, b: tf.einsum("bij,bjk->bik", a, b), np.matmul, RIGHT, SQUARES,
        op_type="Einsum", name="einsum"),
    row("matrix_diag", tf.matrix_diag, np.diag, V, op_type="MatrixDiag"),
    row("matrix_diag_part", tf.matrix_diag_part, lambda x: np.diagonal(x, 0, 1, 2), SQUARES,
        op_type="MatrixDiagPart"),
    row("matrix_set_diag", tf.matrix_set_diag, lambda x, d: x - np.diag(np.diag(x)) + np.diag(d),
        SQUARE, np.array([7.0, 8.0])),
    row("diag", linalg.tensor_diag, np.diag, V),
    row("diag of a matrix", linalg.tensor_diag,
        lambda x: np.diag(x.ravel()).reshape(2, 3, 2, 3), MATRIX),
    row("diag_part", lambda x: linalg.tensor_diag_part(linalg.tensor_diag(x)), np.array, MATRIX),
    row("matrix_band_part", lambda x: tf.matrix_band_part(x, -1, 0), np.tril, MATRIX),
    row("a band", lambda x: tf.matrix_band_part(x, 0, 1), lambda x: np.tril(np.triu(x), 1), MATRIX),
    row("trace", tf.trace, lambda x: np.trace(x, axis1=1, axis2=2), SQUARES),
    row("matrix_determinant", tf.matrix_determinant, np.linalg.det, SQUARES,
        op_type="MatrixDeterminant"),
    row("slogdet", lambda x: tuple(tf.linalg.slogdet(x)), np.linalg.slogdet, SQUARES),
    row("logdet", tf.linalg.logdet, lambda x: np.log(np.linalg.det(x)), SQUARES),
    row("matrix_inverse", tf.matrix_inverse, np.linalg.inv, SQUARES, op_type="MatrixInverse"),
    row("matrix_inverse, adjoint", lambda x: tf.matrix_inverse(x, adjoint=True),
        lambda x: np.linalg.inv(np.swapaxes(x, 1, 2)), RIGHT),
    row("matrix_solve", tf.matrix_solve, np.linalg.solve, SQUARES, RIGHT, op_type="MatrixSolve"),
    row("matrix_triangular_solve", tf.matrix_triangular_solve,
        lambda a, b: np.linalg.solve(np.tril(a), b), SQUARES, RIGHT,
        op_type="MatrixTriangularSolve"),
    row("cholesky", tf.cholesky, np.linalg.cholesky, SQUARES, op_type="Cholesky"),
    row("cholesky_solve", lambda a, b: tf.cholesky_solve(tf.cholesky(a), b), np.linalg.solve,
        SQUARES, RIGHT),
    row("svd", lambda x: [signless(y) for y in tf.svd(x)], by_svd := lambda x: [
        signless(y) for y in (lambda u, s, vh: (s, u, np.swapaxes(vh, -1, -2)))(
            *np.linalg.svd(x, full_matrices=False))], MATRIX.astype(F64)),
    row("svd of values", lambda x: tf.svd(x, compute_uv=False),
        lambda x: np.linalg.svd(x, compute_uv=False), MATRIX.astype(F64)),
    row("qr", lambda x: [signless(y) for y in tf.qr(x)],
        lambda x: [signless(y) for y in np.linalg.qr(x)], MATRIX.T.astype(F64)),
    row("self_adjoint_eig", lambda x: [signless(y) for y in tf.self_adjoint_eig(x)],
        lambda x: [signless(y) for y in np.linalg.eigh(x)], SQUARES),
    row("self_adjoint_eigvals", tf.self_adjoint_eigvals, np.linalg.eigvalsh, SQUARES),
]  # fmt: skip

ROWS = [*UNARY, *BINARY, *REDUCED, *TRANSFORMED, *ALONG, *SHAPED, *PICKED, *MATRICES]
SHAPES = {
    "static": lambda a: a.shape,
    "sizes hidden": lambda a: [None] * a.ndim,
    "rank hidden": lambda a: None,
}
