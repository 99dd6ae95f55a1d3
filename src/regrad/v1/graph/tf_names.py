"""The inputs and attributes of ops under TensorFlow's names.

An attribute in regrad, such as an axis or a shape, is often an input in TensorFlow, and other
attributes have other names and forms. The declaration of an op type defines both:

    Roll: * shift axis | T Tshift Taxis

Before the bar are the inputs in TensorFlow's order: `*` for all inputs of the node, a number for
one of them, and a name for an attribute of the node. After the bar are the attributes. `dim=axis`
is called `dim` in TensorFlow, and is read as `axis`. The tables `INPUTS` and `ATTRS` have the names
that are read in a special way. Any other name is an attribute of the node.

The row of a function declares the op type that the function makes (see `rows`). This module
declares the op types without a function. Op types without a declaration show regrad's inputs and
attributes, and `T`.

Source: the op definitions of TensorFlow 1.15 (`tensorflow/core/ops`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from regrad.core.dims import Dim, UnknownRank
from regrad.graph.graph import Node

# An input: the index in the node's inputs, or the name and value of a constant.
Item = int | tuple[str, Any]
Getter = Callable[[Node], Any]

INT32 = np.dtype(np.int32)
VIEWS: dict[str, str | Callable[[Node], str]] = {}  # declarations by op type


def declare(op_types: str | None) -> str | None:
    """Store the declaration of one or several op types. Return the first op type."""
    names, colon, view = (op_types or "").partition(": ")
    for op_type in names.split() if colon else ():
        VIEWS[op_type] = view
    return names.partition(" ")[0] or None


def inputs(node: Node) -> list[Item]:
    """Return TensorFlow's inputs in order, as indices or as `(name, value)` of constants.

    Values are arrays. If a size is known only in the run, the value is a list with Dims. For all
    axes of a tensor of unknown rank the value is None.
    """
    found: list[Item] = []
    for name, get in _parsed(_view(node))[0]:
        if name == "*":
            found += range(len(node.xs))
        else:
            found.append(int(name) if name.isdigit() else (name, get(node)))
    return found


def attrs(node: Node) -> dict[str, Any]:
    """Return TensorFlow's attributes, with NumPy dtypes, and bytes for strings."""
    listed = _parsed(_view(node))[1]
    if node.op.type not in VIEWS:
        listed = [*listed, *((name, _own(name)) for name in node.attrs)]
    return {name: get(node) if callable(get) else get for name, get in listed}


def _view(node: Node) -> str:
    view = VIEWS.get(node.op.type, "* | T" if node.specs or node.symbols else "* |")
    return view(node) if callable(view) else view


@cache
def _parsed(view: str) -> list[list[tuple[str, Any]]]:
    """Return inputs and attributes by name, with functions that read them, or fixed values."""
    parts = zip(view.split("|"), (INPUTS, ATTRS), (_ints, _own), strict=True)
    return [[_named(n, table, usual) for n in part.split()] for part, table, usual in parts]


def _named(entry: str, table: dict[str, Any], usual: Callable[[str], Any]) -> tuple[str, Any]:
    name, _, read = entry.partition("=")
    return name, table[read or name] if (read or name) in table else usual(read or name)


# -- values ----------------------------------------------------------------------------------------


def _own(name: str) -> Any:
    """Return how to read an attribute that is not in the table. Other dtypes are of integers."""
    if name[0] == "T":
        return INT32

    def get(node: Node) -> Any:
        value = node.attrs[name]
        if isinstance(value, str):
            return value.encode()
        return np.dtype(value) if isinstance(value, type) else value

    return get


def _ints(name: str) -> Getter:
    return lambda node: as_ints(node.attrs[name])


def _number(name: str) -> Getter:
    """Return a getter of an attribute with the dtype of the output."""
    return lambda node: np.asarray(node.attrs[name], _result(node))


def _dtype(node: Node) -> np.dtype:
    """Return the dtype of the first input, or of the output of an op without inputs."""
    return node.specs[0][1] if node.specs else _result(node)


def _result(node: Node) -> np.dtype:
    return node.symbols[0].dtype


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


def _axes(name: str) -> Getter:
    """Return a getter of axes: all axes by default, reversed for a transpose."""

    def get(node: Node) -> Any:
        axes, rank = node.attrs[name], _rank(node)
        if axes is None and rank is not None:
            axes = tuple(range(rank))[:: -1 if name == "axes" else 1]
        return as_ints(axes)

    return get


def _squeezed_axes(node: Node) -> list[int]:
    axis = node.attrs["axis"]
    return [] if axis is None else [axis] if isinstance(axis, int) else list(axis)


def _sizes(node: Node) -> list[Any] | None:
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


def _part(part: int) -> Getter:
    """Return a getter of `begin` (0), `end` (1) or `strides` (2) of a strided slice."""
    return lambda node: as_ints(tuple(b[part] for b in _bounds(node)))


def _mask(which: Callable[[Node, int, Any], bool]) -> Getter:
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


# -- windows ---------------------------------------------------------------------------------------


def _window(name: str) -> Getter:
    """Return a getter of sizes, strides or dilations of windows, 1 for batch and channels."""
    return lambda node: [1, *node.attrs[name], 1]


def _padding(node: Node) -> bytes:
    pad = node.attrs["pad"]
    return pad.upper().encode() if isinstance(pad, str) else b"EXPLICIT"


def _explicit_paddings(node: Node) -> list[int]:
    """Return the paddings of all axes in one list, if the padding is `EXPLICIT`."""
    pad = node.attrs["pad"]
    return [] if isinstance(pad, str) else [0, 0, *(n for pair in pad for n in pair), 0, 0]


# -- the tables ------------------------------------------------------------------------------------

INPUTS: dict[str, Any] = {
    "all_axes": _axes("axis"), "perm": _axes("axes"), "first": _part(0), "last": _part(1),
    "steps": _part(2), **{n: _number(n) for n in ("on_value", "off_value", "constant_value")},
}  # fmt: skip
ATTRS: dict[str, Any] = {
    **dict.fromkeys(["T", "SrcT", "Tparams", "TI", "Tcond", "Tcomplex"], _dtype),
    **dict.fromkeys(["dtype", "DstT", "out_type", "output_type", "output_dtype"], _result),
    **dict.fromkeys(("Tindices", "Tlabels"), lambda node: node.specs[1][1]),
    "Tin": lambda node: [dtype for _, dtype in node.specs],
    "rest": lambda node: [dtype for _, dtype in node.specs[1:]],
    "Tout": lambda node: [symbol.dtype for symbol in node.symbols],
    "Index": INT32, "0": 0, "no": False, "yes": True, "nothing": b"", "use_locking": False,
    "shape": _sizes, "N": lambda node: len(node.xs), "num": lambda node: len(node.symbols),
    "is_shaped": lambda node: node.attrs["shape"] is not None,
    "message": lambda node: str(node.attrs["message"]).encode(),
    "mode": lambda node: node.attrs["mode"].upper().encode(),
    "is_complete": lambda node: node.attrs["mode"] == "complete",
    "squeeze_dims": _squeezed_axes, "padding": _padding, "explicit_paddings": _explicit_paddings,
    "strides": _window("strides"), "dilations": _window("dilations"),
    "filter_size": _window("filter_size"),
    "data_format": lambda node: b"NHWC" if len(node.attrs["strides"]) == 2 else b"NDHWC",
    "begin_mask": _mask(_is_whole), "end_mask": _mask(_runs_out),
    "new_axis_mask": _mask(lambda node, i, entry: entry is None),
    "shrink_axis_mask": _mask(lambda node, i, entry: not isinstance(entry, tuple | None)),
}  # fmt: skip

CONV = "T strides padding data_format dilations explicit_paddings"
POOL = "T ksize=filter_size strides padding data_format"
RESIZE = "T align_corners=align half_pixel_centers=half"
SLICES = "Index begin_mask end_mask ellipsis_mask=0 new_axis_mask shrink_axis_mask"

for _line in f"""
Const: * | value dtype
Placeholder PlaceholderWithDefault: * | dtype shape
VariableV2: * | dtype shape container=nothing shared_name=nothing
Assign: * | T validate_shape=is_shaped use_locking
AssignAdd AssignSub: * | T use_locking
IsVariableInitialized: * | dtype=T
PyFunc PyFuncStateless: * | token=nothing Tin Tout
Print: * | T U=rest message first_n summarize
Assert: * | T=rest summarize
If: * | Tcond Tin=rest Tout
While: * | T=Tin
EnsureShape: * | T shape
MaxPoolGrad MaxPoolGradGrad: * | {POOL}
AvgPoolGrad: orig_input_shape=shape 0 | {POOL}
Conv2D: * | {CONV} use_cudnn_on_gpu=yes
Conv3D DepthwiseConv2dNative: * | {CONV}
Conv2DBackpropFilter: 0 filter_sizes=shape 1 | {CONV} use_cudnn_on_gpu=yes
Conv3DBackpropFilterV2 DepthwiseConv2dNativeBackpropFilter: 0 filter_sizes=shape 1 | {CONV}
Conv2DBackpropInput: input_sizes=shape 1 0 | {CONV} use_cudnn_on_gpu=yes
Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput: input_sizes=shape 1 0 | {CONV}
Dilation2D: * | T strides rates=dilations padding
ResizeBilinearGrad ResizeNearestNeighborGrad: * | {RESIZE}
TensorScatterUpdate: * | T Tindices
""".strip().splitlines():
    declare(_line)


def _split(node: Node) -> str:
    """Return the declaration of `Split` for equal parts, else the declaration of `SplitV`."""
    parts = node.attrs["sizes"]
    if all(_same(part, parts[0]) for part in parts[1:]):
        return "split_dim=axis * | num_split=num T"
    return "* size_splits=sizes split_dim=axis | num_split=num T Tlen"


def _pad(node: Node) -> str:
    """Return the declaration of `Pad` for zeros, else the declaration of `PadV2`."""
    filled = "" if node.attrs["constant_value"] == 0 else " constant_values=constant_value"
    return f"* paddings{filled} | T Tpaddings"


def _matmul(node: Node) -> str:
    """Return the declaration of `MatMul`, or of `BatchMatMulV2`, which names them adjoints."""
    adjoints = "" if _rank(node) == 2 else " adj_x=transpose_a adj_y=transpose_b"
    return f"* | T transpose_a transpose_b{adjoints}"


VIEWS |= {"Split": _split, "PadV2": _pad, "MatMul": _matmul}
