"""The inputs and attributes of ops under TensorFlow's names.

An attribute in regrad, such as an axis or a shape, is often an input in TensorFlow, and other
attributes have other names and forms. One row per op type defines both. Op types without a row show
regrad's inputs and attributes, and `T`.

Source: the op definitions of TensorFlow 1.15 (`tensorflow/core/ops`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from regrad.core.dims import Dim, UnknownRank
from regrad.graph.graph import Node

# An input: the index in the node's inputs, or the name and value of a constant.
Item = int | tuple[str, Any]
Getter = Callable[[Node], Any]

INT32 = np.dtype(np.int32)


class TensorFlowView(NamedTuple):
    """One row: the inputs in TensorFlow's order, and the attributes by TensorFlow's names.

    An input is an index in the node's inputs, XS for all of them, or a pair of a name and a getter.
    An attribute is a getter or a fixed value.
    """

    inputs: Sequence[Any]
    attrs: Mapping[str, Any]


def inputs(node: Node) -> list[Item]:
    """Return TensorFlow's inputs in order, as indices or as `(name, value)` of constants.

    Values are arrays. If a size is known only in the run, the value is a list with Dims. For all
    axes of a tensor of unknown rank the value is None.
    """
    found: list[Item] = []
    for item in _view(node).inputs:
        if item is XS:
            found += range(len(node.xs))
        elif isinstance(item, int):
            found.append(item)
        else:
            name, get = item
            found.append((name, get(node)))
    return found


def attrs(node: Node) -> dict[str, Any]:
    """Return TensorFlow's attributes, with NumPy dtypes, and bytes for strings."""
    items = _view(node).attrs.items()
    return {name: value(node) if callable(value) else value for name, value in items}


def _view(node: Node) -> TensorFlowView:
    view = VIEWS.get(node.op.type)
    if view is None:
        own = {name: _own(name) for name in node.attrs}
        return TensorFlowView((XS,), {"T": T, **own} if node.specs or node.symbols else own)
    return view(node) if callable(view) else view


def _own(name: str) -> Getter:
    def get(node: Node) -> Any:
        value = node.attrs[name]
        if isinstance(value, str):
            return value.encode()
        return np.dtype(value) if isinstance(value, type) else value

    return get


# -- getters -------------------------------------------------------------------------------------

XS = object()


def T(node: Node) -> np.dtype:
    """Return the dtype of the first input, or of the output of an op without inputs."""
    return node.specs[0][1] if node.specs else node.symbols[0].dtype


def dtype_of(place: int) -> Getter:
    """Return a getter of the dtype of an input."""
    return lambda node: node.specs[place][1]


def result(node: Node) -> np.dtype:
    """Return the dtype of the first output."""
    return node.symbols[0].dtype


def dtypes(node: Node) -> list[np.dtype]:
    """Return the dtypes of all inputs."""
    return [dtype for _, dtype in node.specs]


def results(node: Node) -> list[np.dtype]:
    """Return the dtypes of all outputs."""
    return [symbol.dtype for symbol in node.symbols]


def count(node: Node) -> int:
    """Return the number of inputs of an op with a variable number of inputs."""
    return len(node.xs)


def at(name: str) -> Getter:
    """Return a getter of an unchanged attribute."""
    return lambda node: node.attrs[name]


def text(name: str) -> Getter:
    """Return a getter of a string as uppercase bytes."""
    return lambda node: node.attrs[name].upper().encode()


def ints(name: str, attr: str = "") -> tuple[str, Getter]:
    """Return an input made of an attribute of integers, by default of the same name."""
    return name, lambda node: as_ints(node.attrs[attr or name])


def number(name: str, attr: str = "") -> tuple[str, Getter]:
    """Return an input made of an attribute, with the dtype of the output."""
    return name, lambda node: np.asarray(node.attrs[attr or name], result(node))


def as_ints(value: Any) -> Any:
    """Convert integers to an int32 array, or to lists if Dims are among them."""
    if value is None or isinstance(value, UnknownRank):
        return None
    return _as_lists(value) if _has_dims(value) else np.asarray(value, INT32)


def _as_lists(value: Any) -> Any:
    return [_as_lists(v) for v in value] if isinstance(value, list | tuple) else value


def _has_dims(value: Any) -> bool:
    return isinstance(value, Dim) or (
        isinstance(value, list | tuple) and any(map(_has_dims, value))
    )


def _rank(node: Node) -> int | None:
    shape = node.specs[0][0]
    return None if isinstance(shape, UnknownRank) else len(shape)


def axes(node: Node) -> Any:
    """Return the axes of a reduction, by default a list of all axes."""
    axis, rank = node.attrs["axis"], _rank(node)
    return as_ints(tuple(range(rank)) if axis is None and rank is not None else axis)


def permutation(node: Node) -> Any:
    """Return the permutation of the axes of a transpose."""
    axes, rank = node.attrs["axes"], _rank(node)
    return as_ints(tuple(range(rank))[::-1] if axes is None and rank is not None else axes)


def squeezed_axes(node: Node) -> list[int]:
    """Return the axes that a squeeze names."""
    axis = node.attrs["axis"]
    return [] if axis is None else [axis] if isinstance(axis, int) else list(axis)


def sizes(node: Node) -> list[Any] | None:
    """Return a static shape, with None for unknown sizes."""
    shape = node.symbols[0].shape
    if isinstance(shape, UnknownRank):
        return None
    return [n if isinstance(n, int) else None for n in shape]


# -- slices --------------------------------------------------------------------------------------


def _bounds(node: Node) -> list[tuple[Any, Any, Any]]:
    """Return `(begin, end, step)` of each entry of a strided slice. Masks mark whole axes."""
    entries = enumerate(node.attrs["index"])
    return [(0, 0, 1) if _is_whole(node, i, entry) else _bound(entry) for i, entry in entries]


def _bound(entry: Any) -> tuple[Any, Any, Any]:
    if entry is None:
        return 0, 0, 1
    if not isinstance(entry, tuple):
        return entry, entry + 1, 1
    first, length, step = entry
    return first, first + length * step, step


def bound(part: int) -> Getter:
    """Return a getter of `begin` (0), `end` (1) or `strides` (2) of a strided slice."""
    return lambda node: as_ints(tuple(b[part] for b in _bounds(node)))


def mask(which: Callable[[Node, int, Any], bool]) -> Getter:
    """Return a getter of a bit mask of the entries of a strided slice that pass a test."""

    def bits(node: Node) -> int:
        entries = enumerate(node.attrs["index"])
        return sum(1 << i for i, entry in entries if which(node, i, entry))

    return bits


def _is_whole(node: Node, i: int, entry: Any) -> bool:
    """Return whether an entry takes an axis from its first element to its last."""
    shape = node.specs[0][0]
    if not isinstance(entry, tuple) or isinstance(shape, UnknownRank):
        return False
    first, length, step = entry
    size = shape[i - node.attrs["index"][:i].count(None)]
    return _same(first, 0) and _same(step, 1) and _same(length, size)


def _same(m: Any, n: Any) -> bool:
    if isinstance(m, Dim) and isinstance(n, Dim):
        return m.key == n.key
    return isinstance(m, int) and isinstance(n, int) and m == n


def _runs_out(node: Node, i: int, entry: Any) -> bool:
    """Return whether an entry takes an axis to its end, or backward to its first element."""
    if _is_whole(node, i, entry):
        return True
    end = _bound(entry)[1]
    return isinstance(entry, tuple) and isinstance(end, int) and entry[2] < 0 and end < 0


# -- windows -------------------------------------------------------------------------------------


def window(name: str) -> Getter:
    """Return a getter of sizes, strides or dilations of windows, 1 for batch and channels."""
    return lambda node: [1, *node.attrs[name], 1]


def padding(node: Node) -> bytes:
    """Return the padding: `SAME`, `VALID`, or `EXPLICIT`."""
    pad = node.attrs["pad"]
    return pad.upper().encode() if isinstance(pad, str) else b"EXPLICIT"


def explicit_paddings(node: Node) -> list[int]:
    """Return the paddings of all axes in one list, if the padding is `EXPLICIT`."""
    pad = node.attrs["pad"]
    return [] if isinstance(pad, str) else [0, 0, *(n for pair in pad for n in pair), 0, 0]


def data_format(node: Node) -> bytes:
    """Return the layout: `NHWC` for images, `NDHWC` for volumes."""
    return b"NHWC" if len(node.attrs["strides"]) == 2 else b"NDHWC"


WINDOWS: dict[str, Any] = {
    "T": T, "strides": window("strides"), "padding": padding, "data_format": data_format,
}  # fmt: skip
CONV: dict[str, Any] = {
    **WINDOWS, "dilations": window("dilations"), "explicit_paddings": explicit_paddings,
}  # fmt: skip
CONV2D: dict[str, Any] = {**CONV, "use_cudnn_on_gpu": True}
POOL: dict[str, Any] = {**WINDOWS, "ksize": window("filter_size")}
RESIZE: dict[str, Any] = {"T": T, "align_corners": at("align"), "half_pixel_centers": at("half")}

# -- op types that TensorFlow splits -------------------------------------------------------------


def _split(node: Node) -> TensorFlowView:
    """Return the row `Split` for equal parts, else `SplitV`."""
    parts, attrs = node.attrs["sizes"], {"num_split": lambda node: len(node.symbols), "T": T}
    axis = ints("split_dim", "axis")
    if all(_same(part, parts[0]) for part in parts[1:]):
        return TensorFlowView((axis, XS), attrs)
    return TensorFlowView((XS, ints("size_splits", "sizes"), axis), {**attrs, "Tlen": INT32})


def _pad(node: Node) -> TensorFlowView:
    """Return the row `Pad` for zeros, else `PadV2`."""
    filled = (
        () if node.attrs["constant_value"] == 0 else (number("constant_values", "constant_value"),)
    )
    return TensorFlowView((XS, ints("paddings"), *filled), {"T": T, "Tpaddings": INT32})


def _matmul(node: Node) -> TensorFlowView:
    """Return the row `MatMul`, or `BatchMatMulV2`, whose transposes are named adjoints."""
    names = ("transpose_a", "transpose_b")
    attrs = {"T": T, **{name: at(name) for name in names}}
    if _rank(node) != 2:
        attrs |= {"adj_x": at("transpose_a"), "adj_y": at("transpose_b")}
    return TensorFlowView((XS,), attrs)


# -- the table -----------------------------------------------------------------------------------


def row(*inputs: Any, **attrs: Any) -> TensorFlowView:
    """Make a row with the attribute `T`, by default with all inputs of the op."""
    return TensorFlowView(inputs or (XS,), {"T": T, **attrs})


def typed(*inputs: Any, **attrs: Any) -> TensorFlowView:
    """Make a row whose dtype attributes have other names than `T`."""
    return TensorFlowView(inputs or (XS,), attrs)


def each(op_types: str, view: TensorFlowView) -> dict[str, TensorFlowView]:
    """Return the same row for several op types."""
    return dict.fromkeys(op_types.split(), view)


REDUCED = (XS, ("reduction_indices", axes))
REDUCTION: dict[str, Any] = {"keep_dims": at("keepdims"), "Tidx": INT32}
SEEDS = {"seed": at("seed"), "seed2": at("seed2")}

VIEWS: dict[str, TensorFlowView | Callable[[Node], TensorFlowView]] = {
    # sources and state
    "Const": typed(value=at("value"), dtype=result),
    **each("Placeholder PlaceholderWithDefault", typed(dtype=result, shape=sizes)),
    "VariableV2": typed(dtype=result, shape=sizes, container=b"", shared_name=b""),
    "Assign": row(validate_shape=lambda node: node.attrs["shape"] is not None, use_locking=False),
    "IsVariableInitialized": typed(dtype=T),
    **each("Identity ZerosLike OnesLike Softmax LogSoftmax", row()),
    "IdentityN": typed(T=dtypes),
    "PyFunc": typed(token=b"", Tin=dtypes, Tout=results),
    "Print": row(
        U=lambda node: dtypes(node)[1:], message=lambda node: str(node.attrs["message"]).encode(),
        first_n=at("first_n"), summarize=at("summarize"),
    ),
    "Assert": typed(T=lambda node: dtypes(node)[1:], summarize=at("summarize")),
    "If": typed(Tcond=T, Tin=lambda node: dtypes(node)[1:], Tout=results),
    "While": typed(T=dtypes),
    "Shape": row(out_type=result),
    "EnsureShape": row(shape=sizes),
    "Range": typed(Tidx=T),
    "LinSpace": row(XS, ints("num"), Tidx=INT32),
    **each("AssignAdd AssignSub ApplyGradientDescent ApplyAdagrad ApplyAdadelta ApplyAdam "
           "ApplyRMSProp ApplyCenteredRMSProp ApplyFtrlV2", row(use_locking=False)),
    "ApplyMomentum": row(use_locking=False, use_nesterov=at("use_nesterov")),
    # dtypes and lists
    "Cast": typed(SrcT=T, DstT=result, Truncate=False),
    "AddN": row(N=count),
    "Pack": row(N=count, axis=at("axis")),
    "Unpack": row(num=lambda node: len(node.symbols), axis=at("axis")),
    "ConcatV2": row(XS, ints("axis"), N=count, Tidx=INT32),
    "Split": _split,
    "Einsum": row(N=count, equation=lambda node: node.attrs["equation"].encode()),
    # shapes
    "Reshape": row(XS, ints("shape"), Tshape=INT32),
    "ExpandDims": row(XS, ints("dim", "axis"), Tdim=INT32),
    "Squeeze": row(squeeze_dims=squeezed_axes),
    "Transpose": row(XS, ("perm", permutation), Tperm=INT32),
    "Tile": row(XS, ints("multiples", "repetitions"), Tmultiples=INT32),
    "BroadcastTo": row(XS, ints("shape"), Tidx=INT32),
    "ReverseV2": row(XS, ("axis", axes), Tidx=INT32),
    "Roll": row(XS, ints("shift"), ints("axis"), Tshift=INT32, Taxis=INT32),
    "PadV2": _pad,
    "MirrorPad": row(XS, ints("paddings"), mode=text("mode"), Tpaddings=INT32),
    "SpaceToBatchND": row(
        XS, ints("block_shape"), ints("paddings"), Tblock_shape=INT32, Tpaddings=INT32
    ),
    "BatchToSpaceND": row(XS, ints("block_shape"), ints("crops"), Tblock_shape=INT32, Tcrops=INT32),
    # slices and rows
    "Slice": row(XS, ints("begin"), ints("size"), Index=INT32),
    "StridedSlice": row(
        XS, ("begin", bound(0)), ("end", bound(1)), ("strides", bound(2)),
        Index=INT32, begin_mask=mask(_is_whole), end_mask=mask(_runs_out), ellipsis_mask=0,
        new_axis_mask=mask(lambda node, i, entry: entry is None),
        shrink_axis_mask=mask(lambda node, i, entry: not isinstance(entry, tuple | None)),
    ),
    "GatherV2": typed(
        XS, ints("axis"), batch_dims=at("batch_dims"), Tparams=T, Tindices=dtype_of(1), Taxis=INT32
    ),
    "GatherNd": typed(Tparams=T, Tindices=dtype_of(1)),
    "ScatterNd": typed(XS, ints("shape"), T=dtype_of(1), Tindices=T),
    "TensorScatterUpdate": row(Tindices=dtype_of(1)),
    "UnsortedSegmentSum": row(XS, ints("num_segments"), Tindices=dtype_of(1), Tnumsegments=INT32),
    "OneHot": typed(
        XS, ints("depth"), number("on_value"), number("off_value"), axis=at("axis"), T=result, TI=T
    ),
    "TopKV2": row(XS, ints("k"), sorted=True),
    "SelectV2": row(T=dtype_of(1)),
    "SparseSoftmaxCrossEntropyWithLogits": row(Tlabels=dtype_of(1)),
    # random numbers
    **each("RandomStandardNormal TruncatedNormal RandomUniform",
           typed(ints("shape"), dtype=result, T=INT32, **SEEDS)),
    "RandomUniformInt": typed(ints("shape"), XS, Tout=result, T=INT32, **SEEDS),
    "RandomShuffle": row(**SEEDS),
    "Multinomial": row(XS, ints("num_samples", "count"), output_dtype=result, **SEEDS),
    # reductions and scans
    **each("Sum Mean Prod Max Min", row(*REDUCED, **REDUCTION)),
    **each("Any All", typed(*REDUCED, **REDUCTION)),
    **each("ArgMax ArgMin",
           row(XS, ints("dimension", "axis"), Tidx=INT32, output_type=result)),
    **each("Cumsum Cumprod",
           row(XS, ints("axis"), exclusive=at("exclusive"), reverse=at("reverse"), Tidx=INT32)),
    # matrices
    "MatMul": _matmul,
    "MatrixInverse": row(adjoint=False),
    "MatrixSolve": row(adjoint=at("transpose")),
    "MatrixTriangularSolve": row(lower=at("lower"), adjoint=at("transpose")),
    "Qr": row(full_matrices=lambda node: node.attrs["mode"] == "complete"),
    "Svd": row(compute_uv=True, full_matrices=at("full_matrices")),
    "SelfAdjointEigV2": row(compute_v=True),
    # images
    "Conv2D": row(**CONV2D),
    "Conv2DBackpropInput": row(ints("input_sizes", "shape"), 1, 0, **CONV2D),
    "Conv2DBackpropFilter": row(0, ints("filter_sizes", "shape"), 1, **CONV2D),
    **each("Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput",
           row(ints("input_sizes", "shape"), 1, 0, **CONV)),
    **each("Conv3DBackpropFilterV2 DepthwiseConv2dNativeBackpropFilter",
           row(0, ints("filter_sizes", "shape"), 1, **CONV)),
    **each("Conv3D DepthwiseConv2dNative", row(**CONV)),
    "Dilation2D": row(strides=window("strides"), rates=window("dilations"), padding=padding),
    **each("MaxPool AvgPool MaxPool3D AvgPool3D MaxPoolGrad", row(**POOL)),
    "AvgPoolGrad": row(ints("orig_input_shape", "shape"), 0, **POOL),
    **each("ResizeBilinear ResizeNearestNeighbor", row(XS, ints("size"), **RESIZE)),
}  # fmt: skip
