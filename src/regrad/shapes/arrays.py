"""Forms of ops on arrays: elementwise, along axes, reshaping, slices, gathers.

The kernels call the functions without a leading underscore to check their arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from regrad.core.dims import Dim
from regrad.core.shapes import Axis, normalized_axes, normalized_axis
from regrad.errors import DTypeError, ShapeError
from regrad.shapes.sizes import (
    Clash,
    Shape,
    Size,
    as_sizes,
    broadcast,
    differ,
    listing,
    merge,
    pairs,
    shorten,
    unlike,
)
from regrad.shapes.table import (
    BOOL,
    INDEX,
    Arguments,
    Attrs,
    Spec,
    dtype_attribute,
    form,
    quotient_dtype,
    second_dtype,
    total_dtype,
)

# -- elementwise -----------------------------------------------------------------------------------


# (Ops that are declared elementwise need no form here, see `form_of`.)


@form("Cast", "FullLike", "OnesLike", "ZerosLike", "_Promote", dtype=dtype_attribute)
@form("MaxPoolGrad", dtype=second_dtype)
@form("HermitianWeights", "MatrixCofactors", "MatrixCofactorsChange", "ToDevice")
@form("LRN", "NeighbourSum", "OrZero", "OrZeroGrad", "TensorStridedSliceUpdate", "_Alias")
def _like_x(arguments: Arguments, attrs: Attrs) -> Shape:
    return arguments[0].shape


@form("AddN")
def _add_n(arguments: Arguments, attrs: Attrs) -> Shape:
    return _common("add_n", arguments[0])


def _common(name: str, xs: Sequence[Any]) -> tuple[Size, ...]:
    """Return the shape of the inputs, which must be the same for all."""
    shapes = [x.shape for x in xs]
    try:
        return merge(shapes)
    except Clash:
        raise ShapeError(
            f"{name}: all tensors must have one shape, got {listing(shapes)}"
        ) from None


# -- along axes ----------------------------------------------------------------------------------


@form("Mean")
@form("Sum", "Prod", dtype=total_dtype)
@form("All", "Any", dtype=BOOL)
@form("CountNonzero", dtype=INDEX)
def _reduction(arguments: Arguments, attrs: Attrs) -> Shape:
    shape, axis, keepdims = arguments[0].shape, attrs["axis"], attrs["keepdims"]
    if axis is None and not keepdims:
        return ()
    if shape is None:
        return None
    axes = normalized_axes(axis, len(shape))
    if keepdims:
        return tuple([1 if i in axes else n for i, n in enumerate(shape)])
    return tuple([n for i, n in enumerate(shape) if i not in axes])


@form("Max", "Min")
@form("ArgMax", "ArgMin", dtype=INDEX)
def _extreme(arguments: Arguments, attrs: Attrs) -> Any:
    shape, dtype = arguments[0]
    chosen = () if shape is None else [shape[i] for i in normalized_axes(attrs["axis"], len(shape))]
    if dtype.kind == "c" or any(type(n) is int and n == 0 for n in chosen):
        return NotImplemented  # the kernel raises the error
    return _reduction(arguments, attrs)


@form("CumulativeMax", "CumulativeMin", "LogSoftmax", "ReverseV2", "Shift", "Softmax", "Sort")
@form("Cumprod", "Cumsum", dtype=total_dtype)
@form("ArgSort", "RunStarts", dtype=INDEX)
def _along(arguments: Arguments, attrs: Attrs) -> Shape:
    shape = arguments[0].shape
    if shape is not None:
        normalized_axes(attrs["axis"], len(shape))
    return shape


@form("Roll")
def _roll(arguments: Arguments, attrs: Attrs) -> Shape:
    shape, axis = arguments[0].shape, attrs["axis"]
    if shape is not None and axis is not None:
        for a in axis if isinstance(axis, tuple) else (axis,):
            normalized_axis(a, len(shape))
    return shape


@form("Cross", "LinearRecurrence")
def _recurrence(arguments: Arguments, attrs: Attrs) -> Shape:
    shape = broadcast(arguments[0].shape, arguments[1].shape)
    if shape is not None:
        normalized_axis(attrs["axis"], len(shape))
    return shape


@form("TopKV2")
def _top_k(arguments: Arguments, attrs: Attrs) -> Any:
    (shape, dtype), k = arguments[0], attrs["k"]
    axis = axis_of_top(shape, attrs["axis"], k)
    found = (*shape[:axis], k, *shape[axis + 1 :])
    return [Spec(found, dtype), Spec(found, INDEX)]


def axis_of_top(shape: Sequence[Size], axis: int, k: Size) -> int:
    """Return the non-negative axis of which k elements are taken. Raises if it has fewer."""
    axis = normalized_axis(axis, len(shape))
    n = shape[axis]
    if type(k) is int and type(n) is int and not 0 <= k <= n:
        raise ShapeError(
            f"top_k: k must be from 0 to {n}, because x has {n} elements along axis {axis} of "
            f"{shape}; got {k}"
        )
    return axis


form("SearchSorted", dtype=INDEX)(lambda arguments, attrs: arguments[1].shape)

# -- reshaping -----------------------------------------------------------------------------------


@form("Shape", dtype=np.dtype(np.int32))
def _shape(arguments: Arguments, attrs: Attrs) -> Shape:
    shape = arguments[0].shape
    return (None if shape is None else len(shape),)


@form("Reshape")
def _reshape(arguments: Arguments, attrs: Attrs) -> Any:
    old, new = arguments[0].shape, as_sizes(attrs["shape"])
    if new is None:
        return None
    open_ = [i for i, n in enumerate(new) if type(n) is int and n == -1]
    if old is None:
        return tuple([None if i in open_ else n for i, n in enumerate(new)])
    count, free = _factors(old)
    told, bound = _factors([n for i, n in enumerate(new) if i not in open_])
    free, bound = _cancel(free, bound)
    wrong = not free and not bound and (count % (told or 1) if open_ else count != told)
    if wrong or len(open_) > 1:
        raise ShapeError(f"reshape: a Tensor of shape {old} cannot have the shape {new}")
    if not open_:
        return new
    if not told:
        return NotImplemented
    rest = None if bound else _quotient_of(count, told, free)
    return shorten([rest if i in open_ else n for i, n in enumerate(new)])


def _factors(sizes: Iterable[Any]) -> tuple[int, list[Dim]]:
    """Return sizes as the product of a number and of Dims that are not products themselves."""
    number, unknown = 1, []
    for n in sizes:
        if not isinstance(n, Dim):
            number *= n
        elif n.key[0] != "*":
            unknown.append(n)
        else:
            inner, more = _factors(n.args)
            number *= inner
            unknown += more
    return number, unknown


def _cancel(free: list[Dim], bound: list[Dim]) -> tuple[list[Dim], list[Dim]]:
    """Cancel common factors of a numerator and a denominator."""
    left, below = list(free), []
    for n in bound:
        same = next((i for i, m in enumerate(left) if m.key == n.key), None)
        if same is None:
            below.append(n)
        else:
            del left[same]
    return left, below


def _quotient_of(count: int, told: int, free: Sequence[Any]) -> Any:
    whole = count % told == 0
    product = math.prod(free, start=count // told if whole else count)
    return product if whole else product // told


@form("ExpandDims")
def _expand_dims(arguments: Arguments, attrs: Attrs) -> Shape:
    shape, axis = arguments[0].shape, attrs["axis"]
    axes = tuple(axis) if isinstance(axis, tuple | list) else (axis,)
    y = list(shape)
    for a in normalized_axes(axes, len(shape) + len(axes)):
        y.insert(a, 1)
    return tuple(y)


@form("Squeeze")
def _squeeze(arguments: Arguments, attrs: Attrs) -> Shape:
    shape, axis = arguments[0].shape, attrs["axis"]
    unknown = axis is None and any(isinstance(n, Dim) for n in shape)
    return None if unknown else squeezed(shape, axis)


def squeezed(shape: Sequence[Size], axis: Axis) -> tuple[Size, ...]:
    """Return a shape without some axes of size 1, or without all of them."""
    if axis is None:
        return tuple([n for n in shape if n != 1])
    axes = normalized_axes(axis, len(shape))
    if any(differ(shape[i], 1) for i in axes):
        raise ShapeError(f"squeeze: only axes of size 1 can be removed; got axis {axis} of {shape}")
    return tuple([n for i, n in enumerate(shape) if i not in axes])


@form("Transpose")
def _transpose(arguments: Arguments, attrs: Attrs) -> Shape:
    shape, axes = arguments[0].shape, attrs["axes"]
    if shape is None and axes is not None:
        shape = (None,) * len(axes)
    return shape and tuple([shape[a] for a in order_of(shape, axes)])


def order_of(shape: Sequence[Size], axes: Sequence[int] | None) -> tuple[int, ...]:
    """Return a permutation of the axes, non-negative. None reverses them."""
    n = len(shape)
    order = range(n)[::-1] if axes is None else [a + n if a < 0 else a for a in axes]
    if sorted(order) != list(range(n)):
        raise ShapeError(f"permute_dims: expected each axis of {shape} once, got the axes {axes}")
    return tuple(order)


@form("BroadcastTo")
def _broadcast_to(arguments: Arguments, attrs: Attrs) -> Shape:
    old, new = arguments[0].shape, as_sizes(attrs["shape"])
    if old is None or new is None:
        return new
    more = len(new) - len(old)
    if more < 0 or any(m != 1 and differ(m, n) for m, n in pairs(old, new[more:])):
        raise ShapeError(f"broadcast_to: the shape {old} cannot be broadcast to {new}")
    sizes = [m if type(m) is int and m != 1 else n for m, n in pairs(old, new[more:])]
    return (*new[:more], *sizes)


@form(
    "Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropFilter",
    "MirrorPadGrad", "ResizeBilinearGrad", "ResizeNearestNeighborGrad", "ScatterAdd",
    "ScatterAlongAxis", "StridedSliceGrad", "SumTo", "TapScatter", "Unreduce",
)  # fmt: skip
@form("AvgPoolGrad", "UnreduceMean", dtype=quotient_dtype)
@form("LastWriter", dtype=INDEX)
def _shape_attribute(arguments: Arguments, attrs: Attrs) -> Shape:
    return as_sizes(attrs["shape"])


@form("Tile")
def _tile(arguments: Arguments, attrs: Attrs) -> Shape:
    shape, counts = arguments[0].shape, as_sizes(attrs["repetitions"])
    if counts is None:
        return None
    more = len(counts) - len(shape)
    return shorten([n * k for n, k in pairs((1,) * more + shape, (1,) * -more + counts)])


# -- joining and splitting -------------------------------------------------------------------------


@form("ConcatV2")
def _concat(arguments: Arguments, attrs: Attrs) -> Shape:
    shapes = [x.shape for x in arguments[0]]
    axis = normalized_axis(attrs["axis"], len(shapes[0]))
    try:
        rest = merge([(*shape[:axis], *shape[axis + 1 :]) for shape in shapes])
    except Clash:
        raise ShapeError(
            f"concat: the shapes must agree except along axis {axis}, got {listing(shapes)}"
        ) from None
    return shorten((*rest[:axis], sum([shape[axis] for shape in shapes]), *rest[axis:]))


@form("Split")
def _split(arguments: Arguments, attrs: Attrs) -> list[Spec]:
    (shape, dtype), sizes = arguments[0], attrs["sizes"]
    if shape is None:
        return [Spec(None, dtype)] * len(sizes)
    axis = normalized_axis(attrs["axis"], len(shape))
    if differ(sum(sizes), shape[axis]):
        raise ShapeError(
            f"split: the sizes {sizes} do not add up to the size {shape[axis]} of axis {axis}"
        )
    return [Spec((*shape[:axis], n, *shape[axis + 1 :]), dtype) for n in sizes]


@form("Pack")
def _stack(arguments: Arguments, attrs: Attrs) -> Shape:
    shape = _common("stack", arguments[0])
    axis = normalized_axis(attrs["axis"], len(shape) + 1)
    return (*shape[:axis], len(arguments[0]), *shape[axis:])


@form("Unpack")
def _unstack(arguments: Arguments, attrs: Attrs) -> list[Spec]:
    shape, dtype = arguments[0]
    axis = normalized_axis(attrs["axis"], len(shape))
    return [Spec((*shape[:axis], *shape[axis + 1 :]), dtype)] * shape[axis]


# -- slices and padding ----------------------------------------------------------------------------


@form("StridedSlice")
def _strided_slice(arguments: Arguments, attrs: Attrs) -> Shape:
    shape, index = arguments[0].shape, attrs["index"]
    sizes = [1 if e is None else e[1] for e in index if e is None or isinstance(e, tuple)]
    taken = len(index) - sum([e is None for e in index])
    return shorten(sizes) if shape is None else shorten([*sizes, *shape[taken:]])


form("Slice")(lambda arguments, attrs: as_sizes(attrs["size"]))


@form("MirrorPad", "PadV2")
def _pad(arguments: Arguments, attrs: Attrs) -> Shape:
    shape, paddings = arguments[0].shape, attrs["paddings"]
    return shorten([n + (a + b) for n, (a, b) in pairs(shape, paddings)])


# -- gathers and scatters --------------------------------------------------------------------------


def _index(x: Spec) -> Any:
    """Return the shape of indices."""
    if x.dtype.kind == "b":
        raise DTypeError("indices must be integers, got bools. Select by a mask with x[mask].")
    return x.shape


@form("GatherV2")
def _gather(arguments: Arguments, attrs: Attrs) -> Shape:
    shape, ids = arguments[0].shape, _index(arguments[1])
    axis, batch = normalized_axis(attrs["axis"], len(shape)), attrs["batch_dims"]
    if unlike(shape[:batch], ids[:batch]):
        raise ShapeError(f"take: the first {batch} axes must agree, got {shape} and {ids}")
    return (*merge([shape[:batch], ids[:batch]]), *shape[batch:axis], *ids[batch:],
            *shape[axis + 1 :])  # fmt: skip


@form("TakeAlongAxis")
def _take_along_axis(arguments: Arguments, attrs: Attrs) -> Shape:
    shape, ids = arguments[0].shape, _index(arguments[1])
    axis = normalized_axis(attrs["axis"], len(ids))
    return broadcast((*shape[:axis], ids[axis], *shape[axis + 1 :]), ids)


@form("SparseSoftmaxCrossEntropyWithLogits")
def _cross_entropy(arguments: Arguments, attrs: Attrs) -> Shape:
    return examples(arguments[0].shape, _index(arguments[1]))


def examples(logits: Shape, labels: Shape) -> Shape:
    """Return the shape of the examples. Each example has a row of logits and a label."""
    if logits is None:
        return labels
    if not logits:
        raise ShapeError("logits need a last axis, for the classes; got logits of rank 0")
    expected = logits[:-1]
    if labels is None:
        return expected
    if unlike(labels, expected):
        raise ShapeError(
            f"labels must have the shape of logits without the last axis, {expected}; got {labels}"
        )
    return merge([expected, labels])


@form("GatherNd")
def _gather_nd(arguments: Arguments, attrs: Attrs) -> Shape:
    shape, ids = arguments[0].shape, _index(arguments[1])
    depth = index_depth("gather_nd", shape, ids)
    return None if depth is None else (*ids[:-1], *shape[depth:])


def index_depth(name: str, shape: Sequence[Size], ids: Sequence[Size]) -> Any:
    """Return the length of index vectors; None if it is unknown."""
    depth = ids[-1] if ids else len(shape) + 1
    if type(depth) is int and depth > len(shape):
        raise ShapeError(
            f"{name}: the last axis of indices holds index vectors of up to {len(shape)} entries "
            f"for the shape {shape}; got indices of shape {ids}"
        )
    return depth if type(depth) is int else None


@form("ScatterNd", dtype=second_dtype)
def _scatter_nd(arguments: Arguments, attrs: Attrs) -> Shape:
    shape, ids = as_sizes(attrs["shape"]), _index(arguments[0])
    if shape is not None and ids is not None:
        check_updates("scatter_nd", shape, ids, arguments[1].shape)
    return shape


@form("TensorScatterUpdate")
def _scatter_update(arguments: Arguments, attrs: Attrs) -> Shape:
    shape, ids = arguments[0].shape, _index(arguments[1])
    if shape is not None and ids is not None:
        check_updates("at_set", shape, ids, arguments[2].shape)
    return shape


def check_updates(name: str, shape: Sequence[Size], ids: Sequence[Size], updates: Shape) -> None:
    """Raise if the updates do not have the shape of the entries at the index vectors."""
    depth = index_depth(name, shape, ids)
    if depth is None or updates is None:
        return
    expected = (*ids[:-1], *shape[depth:])
    if unlike(expected, updates):
        raise ShapeError(
            f"{name}: for indices of shape {ids} into {shape} the updates must have the shape "
            f"{expected}, got {updates}"
        )


@form("UnsortedSegmentSum")
def _segments(arguments: Arguments, attrs: Attrs) -> Shape:
    shape, ids = arguments[0].shape, _index(arguments[1])
    return (attrs["num_segments"], *slice_of_segments(shape, ids))


def slice_of_segments(shape: Sequence[Size], ids: Sequence[Size]) -> Any:
    """Return the shape of the slices that have ids."""
    if unlike(shape[: len(ids)], ids):
        raise ShapeError(
            f"segment_sum: ids must have the shape of x's leading axes, got x of {shape} and ids "
            f"of {ids}"
        )
    return shape[len(ids) :]


@form("OneHot", dtype=dtype_attribute)
def _one_hot(arguments: Arguments, attrs: Attrs) -> Shape:
    ids = _index(arguments[0])
    axis = normalized_axis(attrs["axis"], len(ids) + 1)
    return (*ids[:axis], attrs["depth"], *ids[axis:])


@form("Where", dtype=INDEX)
def _where(arguments: Arguments, attrs: Attrs) -> Shape:
    shape = arguments[0].shape
    return (None, None if shape is None else len(shape))


form("UniqueValues")(lambda arguments, attrs: (None,))


@form("Unique")
def _unique(arguments: Arguments, attrs: Attrs) -> list[Spec]:
    (x,) = arguments
    some = Spec((None,), INDEX)
    return [Spec((None,), x.dtype), some, Spec(x.shape, INDEX), some]
