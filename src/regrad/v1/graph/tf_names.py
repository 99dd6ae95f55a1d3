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

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np

from regrad.core.dims import Dim, UnknownRank
from regrad.graph.graph import Node
from regrad.shapes.sizes import equal
from regrad.v1.graph.static_shapes import TensorShape

# An input: the index in the node's inputs, or the name and value of a constant.
Item = int | tuple[str, Any]
Getter = Callable[[Node, str], Any]  # reads an entry of this name

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
    for name, read, get in _parsed(_view(node))[0]:
        if name == "*":
            found += range(len(node.xs))
        else:
            found.append(int(name) if name.isdigit() else (name, get(node, read)))
    return found


def attrs(node: Node) -> dict[str, Any]:
    """Return TensorFlow's attributes, with NumPy dtypes, and bytes for strings."""
    listed = _parsed(_view(node))[1]
    if node.op.type not in VIEWS:
        listed = [*listed, *((name, name, _own) for name in node.attrs)]
    return {name: get(node, read) if callable(get) else get for name, read, get in listed}


def _view(node: Node) -> str:
    view = VIEWS.get(node.op.type, "* | T" if node.specs or node.symbols else "* |")
    return view(node) if callable(view) else view


@cache
def _parsed(view: str) -> list[list[tuple[str, str, Any]]]:
    """Return each input and attribute: its name, what to read, and its getter or a fixed value."""
    found = []
    for part, table, usual in zip(view.split("|"), (INPUTS, ATTRS), (_ints, _own), strict=True):
        entries = [entry.partition("=") for entry in part.split()]
        found.append([(n, read or n, table.get(read or n, usual)) for n, _, read in entries])
    return found


# -- values ----------------------------------------------------------------------------------------


def _own(node: Node, name: str) -> Any:
    """Return an attribute that is not in the table. Other dtypes are of integers."""
    if name[0] == "T":
        return INT32
    value = node.attrs[name]
    if isinstance(value, str):
        return value.encode()
    return np.dtype(value) if isinstance(value, type) else value


def _ints(node: Node, name: str) -> Any:
    return as_ints(node.attrs[name])


def _number(node: Node, name: str) -> np.ndarray:
    """Return an attribute with the dtype of the output."""
    return np.asarray(node.attrs[name], _result(node))


def _dtype(node: Node, _: str) -> np.dtype:
    """Return the dtype of the first input, or of the output of an op without inputs."""
    return node.specs[0][1] if node.specs else _result(node)


def _result(node: Node, _: str = "") -> np.dtype:
    return node.symbols[0].dtype


def as_ints(value: Any) -> Any:
    """Convert integers to an int32 array, or to lists if Dims are among them."""
    if value is None or isinstance(value, UnknownRank):
        return None
    found = np.array(value, object)
    return found.tolist() if any(isinstance(n, Dim) for n in found.flat) else found.astype(INT32)


def _rank(node: Node) -> int | None:
    shape = node.specs[0][0]
    return None if isinstance(shape, UnknownRank) else len(shape)


def _axes(node: Node, name: str) -> Any:
    """Return axes: all axes by default, reversed for a transpose."""
    axes, rank = node.attrs["axes" if name == "perm" else "axis"], _rank(node)
    if axes is None and rank is not None:
        axes = tuple(range(rank))[:: -1 if name == "perm" else 1]
    return as_ints(axes)


def _squeezed_axes(node: Node, _: str) -> list[int]:
    axis = node.attrs["axis"]
    return [] if axis is None else [axis] if isinstance(axis, int) else list(axis)


def _sizes(node: Node, _: str) -> list[Any] | None:
    """Return a static shape, with None for unknown sizes."""
    shape = TensorShape(node.symbols[0].shape)
    return None if shape.ndims is None else shape.as_list()


# -- slices --------------------------------------------------------------------------------------


def _entries(node: Node) -> Iterator[tuple[Any, ...]]:
    """Yield begin, end, step and the bits of the masks of each entry of a strided slice.

    The masks mark entries that start at the first element, run to the last element, add an axis,
    and drop an axis.
    """
    shape, axis = node.specs[0][0], 0
    for entry in node.attrs["index"]:
        if entry is None:
            yield 0, 0, 1, False, False, True, False
            continue
        if isinstance(entry, tuple):
            first, length, step = entry
            size = None if isinstance(shape, UnknownRank) else shape[axis]
            end = first + length * step
            if equal(first, 0) and equal(step, 1) and equal(length, size):
                yield 0, 0, 1, True, True, False, False
            else:
                backward = isinstance(end, int) and step < 0 and end < 0
                yield first, end, step, False, backward, False, False
        else:
            yield entry, entry + 1, 1, False, False, False, True
        axis += 1


def _part(i: int) -> Getter:
    """Return a getter of the begin, end or step of each entry of a strided slice."""
    return lambda node, _: as_ints(tuple(entry[i] for entry in _entries(node)))


def _mask(i: int) -> Getter:
    """Return a getter of a bit mask of the entries of a strided slice."""
    return lambda node, _: sum(entry[i] << n for n, entry in enumerate(_entries(node)))


# -- windows ---------------------------------------------------------------------------------------


def _window(node: Node, name: str) -> list[int]:
    """Return sizes, strides or dilations of windows, 1 for batch and channels."""
    return [1, *node.attrs[name], 1]


def _padding(node: Node, _: str) -> bytes:
    pad = node.attrs["pad"]
    return pad.upper().encode() if isinstance(pad, str) else b"EXPLICIT"


def _explicit_paddings(node: Node, _: str) -> list[int]:
    """Return the paddings of all axes in one list, if the padding is `EXPLICIT`."""
    pad = node.attrs["pad"]
    return [] if isinstance(pad, str) else [0, 0, *(n for pair in pad for n in pair), 0, 0]


# -- the tables ------------------------------------------------------------------------------------

INPUTS: dict[str, Any] = {
    "all_axes": _axes, "perm": _axes, "first": _part(0), "last": _part(1), "steps": _part(2),
    **dict.fromkeys(["on_value", "off_value", "constant_value"], _number),
}  # fmt: skip
ATTRS: dict[str, Any] = {
    **dict.fromkeys(["T", "SrcT", "Tparams", "TI", "Tcond", "Tcomplex"], _dtype),
    **dict.fromkeys(["dtype", "DstT", "out_type", "output_type", "output_dtype"], _result),
    **dict.fromkeys(("Tindices", "Tlabels"), lambda node, _: node.specs[1][1]),
    "Tin": lambda node, _: [dtype for _, dtype in node.specs],
    "rest": lambda node, _: [dtype for _, dtype in node.specs[1:]],
    "Tout": lambda node, _: [symbol.dtype for symbol in node.symbols],
    "Index": INT32, "0": 0, "no": False, "yes": True, "nothing": b"", "use_locking": False,
    "shape": _sizes, "N": lambda node, _: len(node.xs), "num": lambda node, _: len(node.symbols),
    "is_shaped": lambda node, _: node.attrs["shape"] is not None,
    "message": lambda node, _: str(node.attrs["message"]).encode(),
    "mode": lambda node, _: node.attrs["mode"].upper().encode(),
    "is_complete": lambda node, _: node.attrs["mode"] == "complete",
    "squeeze_dims": _squeezed_axes, "padding": _padding, "explicit_paddings": _explicit_paddings,
    **dict.fromkeys(["strides", "dilations", "filter_size"], _window),
    "data_format": lambda node, _: b"NHWC" if len(node.attrs["strides"]) == 2 else b"NDHWC",
    "begin_mask": _mask(3), "end_mask": _mask(4), "new_axis_mask": _mask(5),
    "shrink_axis_mask": _mask(6),
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
    if all(equal(part, parts[0]) for part in parts[1:]):
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
