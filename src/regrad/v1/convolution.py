"""Convolutions and pools under TensorFlow 1's arguments: strides for all axes, layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import regrad as rg
from regrad.errors import GraphError
from regrad.v1.forms import FLOATS, REALS, one_op, renamed, shape_of, tensor
from regrad.v1.tensors import sizes, static_value

__all__ = [
    "atrous_conv2d", "avg_pool", "avg_pool3d", "conv1d", "conv2d", "conv2d_transpose", "conv3d",
    "conv3d_transpose", "convolution", "depthwise_conv2d", "depthwise_conv2d_native", "max_pool",
    "max_pool3d", "separable_conv2d",
]  # fmt: skip

# By the number of spatial axes: channels last, channels first
LAYOUTS = {1: ("NWC", "NCW"), 2: ("NHWC", "NCHW"), 3: ("NDHWC", "NCDHW")}


# -- what users write ----------------------------------------------------------------------------


def channels_last(data_format: str | None, n: int) -> bool:
    """Whether a layout has its channels last; ValueError for an unknown one."""
    last, first = LAYOUTS[n]
    if n == 1:  # the older names are those of images
        data_format = {"NHWC": "NWC", "NCHW": "NCW"}.get(str(data_format), data_format)
    if data_format not in (None, last, first):
        raise GraphError(f"data_format must be {last!r} or {first!r}, got {data_format!r}")
    return data_format != first


def to_last(n: int) -> tuple[int, ...]:
    """The axes of data with the channels first, in the order with the channels last."""
    return (0, *range(2, n + 2), 1)


def to_first(n: int) -> tuple[int, ...]:
    """The axes of data with the channels last, in the order with the channels first."""
    return (0, n + 1, *range(1, n + 1))


def spatial(values: Any, n: int, last: bool, what: str) -> tuple[int, ...]:
    """The entries of the spatial axes among those for all axes; ValueError unless the rest is 1."""
    found = static_value(values, what)
    found = found if isinstance(found, tuple) else (found,)
    if len(found) == 1:
        return found * n
    if len(found) == n:
        return found
    batch, *rest = found
    rest = rest if last else [*rest[1:], *rest[:1]]
    if len(found) != n + 2 or batch != 1 or rest[-1] != 1:
        raise GraphError(
            f"{what} is a number, or one for each of {n} spatial axes, or {n + 2} with 1 for the "
            f"batch and the channels, got {values!r}"
        )
    return tuple(rest[:-1])


def padding_of(padding: Any, n: int, last: bool) -> Any:
    """`"SAME"`, `"VALID"`, or pairs for the spatial axes from pairs for all axes."""
    if isinstance(padding, bytes):  # as op.get_attr gives it
        padding = padding.decode()
    if isinstance(padding, str) and padding.upper() in ("SAME", "VALID"):
        return padding.lower()
    pairs = static_value(padding, "padding") if isinstance(padding, list | tuple) else ()
    if len(pairs) != n + 2:
        raise GraphError(
            f"padding is 'SAME', 'VALID' or {n + 2} pairs (before, after), got {padding!r}"
        )
    return pairs[1:-1] if last else pairs[2:]


def _turned(function: Callable[..., Any], n: int) -> Callable[..., Any]:
    """A function of data with the channels last as one of data with the channels first."""

    def turned(x: Any, *others: Any, **attrs: Any) -> Any:
        y = function(rg.permute_dims(x, to_last(n)), *others, **attrs)
        return rg.permute_dims(y, to_first(n))

    return turned


# -- convolutions --------------------------------------------------------------------------------


def _convolved(
    function: Callable[..., Any],
    op_type: str,
    name: str | None,
    n: int,
    tensors: Sequence[Any],
    strides: Any,
    padding: Any,
    data_format: str | None,
    dilations: Any,
    **attrs: Any,
) -> Any:
    last = channels_last(data_format, n)
    windows = {
        "strides": spatial(strides, n, last, "strides"),
        "pad": padding_of(padding, n, last),
        "dilations": spatial(1 if dilations is None else dilations, n, last, "dilations"),
    }
    function = function if last else _turned(function, n)
    return one_op(op_type, name or op_type, function, *tensors, kinds=FLOATS, **windows, **attrs)


def conv1d(
    value: Any = None,
    filters: Any = None,
    stride: Any = None,
    padding: Any = None,
    use_cudnn_on_gpu: bool | None = None,
    data_format: str | None = None,
    name: str | None = None,
    input: Any = None,
    dilations: Any = None,
) -> Any:
    """Convolve sequences, (batch, width, in), with a filter (width, in, out). Op type: `Conv2D`."""

    def convolve(x: Any, w: Any, strides: Any, pad: Any, dilations: Any) -> Any:
        return rg.nn.conv1d(x, w, strides[0], pad, dilations[0])

    tensors = renamed("value", value, "input", input), filters
    name = name or "conv1d"
    return _convolved(convolve, "Conv2D", name, 1, tensors, stride, padding, data_format, dilations)


def conv2d(
    input: Any,
    filter: Any = None,
    strides: Any = None,
    padding: Any = None,
    use_cudnn_on_gpu: bool = True,
    data_format: str = "NHWC",
    dilations: Any = (1, 1, 1, 1),
    name: str | None = None,
    filters: Any = None,
) -> Any:
    """Convolve images with a filter (height, width, in, out).

    Args:
        input: Images in the order of `data_format`, `"NHWC"` or `"NCHW"`.
        filter: The filter, also called `filters`.
        strides: Four numbers in the order of `data_format`, 1 for batch and channels.
        padding: `"SAME"`, `"VALID"`, or four pairs in the order of `data_format`.
        dilations: As `strides`.

    Op type: `Conv2D`. Source: `tf.nn.conv2d`.
    """
    tensors = input, renamed("filter", filter, "filters", filters)
    return _convolved(
        rg.nn.conv2d, "Conv2D", name, 2, tensors, strides, padding, data_format, dilations
    )


def conv3d(
    input: Any,
    filter: Any = None,
    strides: Any = None,
    padding: Any = None,
    data_format: str = "NDHWC",
    dilations: Any = (1, 1, 1, 1, 1),
    name: str | None = None,
    filters: Any = None,
) -> Any:
    """Convolve volumes with a filter (depth, height, width, in, out). Op type: `Conv3D`."""
    tensors = input, renamed("filter", filter, "filters", filters)
    return _convolved(
        rg.nn.conv3d, "Conv3D", name, 3, tensors, strides, padding, data_format, dilations
    )


def convolution(
    input: Any,
    filter: Any,
    padding: Any,
    strides: Any = None,
    dilation_rate: Any = None,
    name: str | None = None,
    data_format: str | None = None,
) -> Any:
    """`conv1d`, `conv2d` or `conv3d`, by the rank of the filter."""
    n = len(shape_of(tensor(filter))) - 2
    name = name or "convolution"
    strides = 1 if strides is None else strides
    if n == 1:
        return conv1d(
            input, filter, strides, padding, None, data_format, name, dilations=dilation_rate
        )
    function, op_type = {2: (rg.nn.conv2d, "Conv2D"), 3: (rg.nn.conv3d, "Conv3D")}[n]
    return _convolved(
        function, op_type, name, n, (input, filter), strides, padding, data_format, dilation_rate
    )


def atrous_conv2d(
    value: Any, filters: Any, rate: int, padding: Any, name: str | None = None
) -> Any:
    """`conv2d` with dilated filters, in one op (TensorFlow rearranges the image around it)."""
    name = name or "atrous_conv2d"
    return _convolved(rg.nn.conv2d, "Conv2D", name, 2, (value, filters), 1, padding, None, rate)


def depthwise_conv2d(
    input: Any,
    filter: Any,
    strides: Any,
    padding: Any,
    rate: Any = None,
    name: str | None = None,
    data_format: str | None = None,
    dilations: Any = None,
) -> Any:
    """Convolve each channel with filters of its own. Op type: `DepthwiseConv2dNative`.

    The filter is (height, width, in, multiplier).
    """
    dilations = renamed("rate", rate, "dilations", dilations)
    return _convolved(
        rg.nn.depthwise_conv2d, "DepthwiseConv2dNative", name or "depthwise", 2, (input, filter),
        strides, padding, data_format, dilations,
    )  # fmt: skip


def depthwise_conv2d_native(
    input: Any,
    filter: Any,
    strides: Any,
    padding: Any,
    data_format: str = "NHWC",
    dilations: Any = (1, 1, 1, 1),
    name: str | None = None,
) -> Any:
    """`depthwise_conv2d` under its op's name."""
    name = name or "DepthwiseConv2dNative"
    return depthwise_conv2d(input, filter, strides, padding, dilations, name, data_format)


def separable_conv2d(
    input: Any,
    depthwise_filter: Any,
    pointwise_filter: Any,
    strides: Any,
    padding: Any,
    rate: Any = None,
    name: str | None = None,
    data_format: str | None = None,
    dilations: Any = None,
) -> Any:
    """`depthwise_conv2d`, then a `conv2d` with the 1×1 filter `pointwise_filter`."""
    dilations = renamed("rate", rate, "dilations", dilations)
    tensors = input, depthwise_filter, pointwise_filter
    return _convolved(
        rg.nn.separable_conv2d, "Conv2D", name or "separable_conv2d", 2, tensors, strides, padding,
        data_format, dilations,
    )  # fmt: skip


def _transposed(
    function: Callable[..., Any],
    op_type: str,
    name: str | None,
    n: int,
    tensors: Sequence[Any],
    output_shape: Any,
    strides: Any,
    padding: Any,
    data_format: str | None,
    dilations: Any,
) -> Any:
    shape = sizes(output_shape)
    if not channels_last(data_format, n):
        shape = tuple([shape[axis] for axis in to_last(n)])
    return _convolved(
        function, op_type, name, n, tensors, strides, padding, data_format, dilations,
        output_shape=shape,
    )  # fmt: skip


def conv2d_transpose(
    value: Any = None,
    filter: Any = None,
    output_shape: Any = None,
    strides: Any = None,
    padding: Any = "SAME",
    data_format: str = "NHWC",
    name: str | None = None,
    input: Any = None,
    filters: Any = None,
    dilations: Any = None,
) -> Any:
    """The adjoint of `conv2d`, with a filter (height, width, out, in).

    `output_shape` is the shape of the result, in the order of `data_format`; it may be a tensor,
    or hold tensors. Op type: `Conv2DBackpropInput`. Source: `tf.nn.conv2d_transpose`.
    """
    tensors = (
        renamed("value", value, "input", input),
        renamed("filter", filter, "filters", filters),
    )
    return _transposed(
        rg.nn.conv2d_transpose, "Conv2DBackpropInput", name or "conv2d_transpose", 2, tensors,
        output_shape, strides, padding, data_format, dilations,
    )  # fmt: skip


def conv3d_transpose(
    value: Any,
    filter: Any = None,
    output_shape: Any = None,
    strides: Any = None,
    padding: Any = "SAME",
    data_format: str = "NDHWC",
    name: str | None = None,
    input: Any = None,
    filters: Any = None,
    dilations: Any = None,
) -> Any:
    """The adjoint of `conv3d`; see `conv2d_transpose`."""
    tensors = (
        renamed("value", value, "input", input),
        renamed("filter", filter, "filters", filters),
    )
    return _transposed(
        rg.nn.conv3d_transpose, "Conv3DBackpropInputV2", name or "conv3d_transpose", 3, tensors,
        output_shape, strides, padding, data_format, dilations,
    )  # fmt: skip


# -- pools ---------------------------------------------------------------------------------------


def _pool(op_type: str, name: str, function: Callable[..., Any], n: int) -> Callable[..., Any]:
    default = LAYOUTS[n][0]
    kinds = REALS if op_type.startswith("Max") else FLOATS

    def pool(
        value: Any = None,
        ksize: Any = None,
        strides: Any = None,
        padding: Any = None,
        data_format: str = default,
        name: str | None = None,
        input: Any = None,
    ) -> Any:
        last = channels_last(data_format, n)
        x = renamed("value", value, "input", input)
        windows = {
            "filter_size": spatial(ksize, n, last, "ksize"),
            "strides": spatial(strides, n, last, "strides"),
            "pad": padding_of(padding, n, last),
        }
        whole = function if last else _turned(function, n)
        return one_op(op_type, name or op_type, whole, x, kinds=kinds, **windows)

    pool.__name__ = pool.__qualname__ = name
    pool.__doc__ = (
        f"{(function.__doc__ or '').splitlines()[0]}\n\n"
        f"    `ksize` and `strides` are {n + 2} numbers in the order of `data_format`, 1 for batch "
        f"and channels.\n    Op type: `{op_type}`. Source: `tf.nn.{name}`."
    )
    return pool


max_pool = _pool("MaxPool", "max_pool", rg.nn.max_pool, 2)
avg_pool = _pool("AvgPool", "avg_pool", rg.nn.avg_pool, 2)
max_pool3d = _pool("MaxPool3D", "max_pool3d", rg.nn.max_pool3d, 3)
avg_pool3d = _pool("AvgPool3D", "avg_pool3d", rg.nn.avg_pool3d, 3)
