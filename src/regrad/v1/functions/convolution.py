"""Convolutions and pools with TensorFlow 1's arguments: layouts, and strides for all axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import regrad as rg
from regrad.core.op import TensorLike
from regrad.errors import GraphError
from regrad.v1.graph.conversion import as_sizes, static_value
from regrad.v1.graph.forms import one_op, shape_of, tensor
from regrad.v1.graph.kinds import FLOATS, REALS
from regrad.v1.graph.rows import TENSOR, define, listed, plain_value, row, written
from regrad.v1.graph.tf_names import POOL
from regrad.v1.graph.values import of_rank

# "SAME", "VALID", or for each axis a pair of numbers of zeros to add before and after.
Padding = str | bytes | Sequence[Sequence[int]]

# The layouts with channels last and channels first, by the number of spatial axes.
LAYOUTS = {1: ("NWC", "NCW"), 2: ("NHWC", "NCHW"), 3: ("NDHWC", "NCDHW")}


# -- arguments -----------------------------------------------------------------------------------


def channels_last(data_format: str | None, n: int) -> bool:
    """Return whether a layout has its channels last. Raises ValueError for an unknown layout."""
    last, first = LAYOUTS[n]
    if n == 1:  # the older names, which are for images
        data_format = {"NHWC": "NWC", "NCHW": "NCW"}.get(str(data_format), data_format)
    if data_format not in (None, last, first):
        raise GraphError(f"data_format must be {last!r} or {first!r}, got {data_format!r}")
    return data_format != first


def to_last(n: int) -> tuple[int, ...]:
    """Return the permutation of axes from channels first to channels last."""
    return (0, *range(2, n + 2), 1)


def to_first(n: int) -> tuple[int, ...]:
    """Return the permutation of axes from channels last to channels first."""
    return (0, n + 1, *range(1, n + 1))


def spatial(values: TensorLike, n: int, last: bool, what: str) -> tuple[int, ...]:
    """Return the entries for the spatial axes. Raises ValueError if another entry is not 1."""
    found = static_value(values, what)
    found = found if isinstance(found, tuple) else (found,)
    if len(found) in (1, n):
        return found * (n // len(found))
    if len(found) != n + 2 or found[0] != 1 or found[-1 if last else 1] != 1:
        raise GraphError(
            f"{what} is a number, or one for each of {n} spatial axes, or {n + 2} with 1 for the "
            f"batch and the channels, got {values!r}"
        )
    return found[1:-1] if last else found[2:]


def padding_of(padding: Padding, n: int, last: bool) -> Any:
    """Return regrad's padding: `"same"`, `"valid"`, or pairs for the spatial axes."""
    if isinstance(padding, bytes):  # op.get_attr returns bytes
        padding = padding.decode()
    if isinstance(padding, str) and padding.upper() in ("SAME", "VALID"):
        return padding.lower()
    pairs = static_value(padding, "padding") if isinstance(padding, list | tuple) else ()
    if len(pairs) != n + 2:
        raise GraphError(
            f"padding is 'SAME', 'VALID' or {n + 2} pairs (before, after), got {padding!r}"
        )
    return pairs[1:-1] if last else pairs[2:]


def _channels_first(function: Callable[..., Any], n: int) -> Callable[..., Any]:
    """Make a function of data with the channels first from a function with the channels last."""

    def transpose_around(x: rg.Tensor, *others: rg.Tensor, **attrs: Any) -> Any:
        y = function(rg.permute_dims(x, to_last(n)), *others, **attrs)
        return rg.permute_dims(y, to_first(n))

    return transpose_around


# -- convolutions --------------------------------------------------------------------------------


# Arguments of windows: TensorFlow's names and regrad's names.
WINDOWS = {
    "ksize": "filter_size", "strides": "strides", "stride": "strides", "dilations": "dilations",
    "rate": "dilations",
}  # fmt: skip


def _slide(
    n: int, op_type: str, name: str, function: Callable[..., Any], *tensors: TensorLike,
    padding: Padding, data_format: str | None = None, **attrs: Any,
) -> Any:  # fmt: skip
    """Call `one_op` with TensorFlow's arguments for n spatial axes. This is a `call` of rows."""
    last, attrs = channels_last(data_format, n), {"strides": 1, **attrs}
    for given, taken in WINDOWS.items():
        if given in attrs:
            value = attrs.pop(given)
            attrs[taken] = spatial(1 if value is None else value, n, last, given)
    attrs["pad"] = padding_of(padding, n, last)
    if not last:
        function = _channels_first(function, n)
        if shape := attrs.get("output_shape"):  # of the adjoints
            attrs["output_shape"] = tuple([shape[axis] for axis in to_last(n)])
    return one_op(op_type, name, _of_images(name, function, n), *tensors, **attrs)


def _of_images(name: str, function: Callable[..., Any], n: int) -> Callable[..., Any]:
    """Check that images and filters have n spatial axes and two others."""

    def checked(*xs: Any, **attrs: Any) -> Any:
        return function(*[of_rank(name, x, n + 2) for x in xs], **attrs)

    return checked


def _conv1d(x: rg.Tensor, w: rg.Tensor, *, strides: Any, pad: Any, dilations: Any) -> rg.Tensor:
    return rg.nn.conv1d(x, w, strides, pad, dilations)


_slide2, _slide3 = partial(_slide, 2), partial(_slide, 3)
_conv = partial(row, "tf.nn", kinds=FLOATS)
_depthwise = partial(_conv, "DepthwiseConv2dNative", rg.nn.depthwise_conv2d, call=_slide2)
_adjoint = partial(_conv, input="value", filters="filter", output_shape=as_sizes)


@_conv("Conv2D", _conv1d, scope="conv1d", call=partial(_slide, 1), filters=TENSOR, input="value")
def conv1d(
    value=None, filters=None, stride=None, padding=None, use_cudnn_on_gpu=None, data_format=None,
    name=None, input=None, dilations=None,
):  # fmt: skip
    """Return sequences (batch, width, in) convolved with a filter (width, in, out).

    Args:
        stride: The step, a number.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> x, w = rg.asarray([[[1.0], [2.0]]]), rg.asarray([[[3.0]]])
    >>> tf.nn.conv1d(x, w, stride=1, padding="SAME")
    Tensor([[[3.],
             [6.]]], dtype=float32)
    """


@_conv("Conv2D", rg.nn.conv2d, call=_slide2, filters="filter")
def conv2d(
    input, filter=None, strides=None, padding=None, use_cudnn_on_gpu=True, data_format="NHWC",
    dilations=(1, 1, 1, 1), name=None, filters=None,
):  # fmt: skip
    """Return images convolved with a filter (height, width, in, out).

    Args:
        input: Images in the order of `data_format`, `"NHWC"` or `"NCHW"`.
        filter: The filter, also called `filters`.
        strides: Four numbers in the order of `data_format`, with 1 for batch and channels.
        padding: `"SAME"`, `"VALID"`, or four pairs in the order of `data_format`.
        dilations: The distances between filter elements, in the form of `strides`.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> x, w = rg.asarray([[[[1.0], [2.0]]]]), rg.asarray([[[[3.0]]]])
    >>> tf.nn.conv2d(x, w, strides=[1, 1, 1, 1], padding="SAME")
    Tensor([[[[3.],
              [6.]]]], dtype=float32)
    """


@_conv("Conv3D", rg.nn.conv3d, call=_slide3, filters="filter")
def conv3d(
    input, filter=None, strides=None, padding=None, data_format="NDHWC", dilations=(1, 1, 1, 1, 1),
    name=None, filters=None,
):  # fmt: skip
    """Return volumes convolved with a filter (depth, height, width, in, out).

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> x, w = rg.asarray([[[[[1.0], [2.0]]]]]), rg.asarray([[[[[3.0]]]]])
    >>> tf.nn.conv3d(x, w, strides=[1, 1, 1, 1, 1], padding="SAME")
    Tensor([[[[[3.],
               [6.]]]]], dtype=float32)
    """


@_conv("Conv2D", rg.nn.conv2d, scope="atrous_conv2d", call=_slide2, rate=plain_value)
def atrous_conv2d(value, filters, rate, padding):
    """Return `conv2d` with dilated filters, in one op. TensorFlow rearranges the image instead.

    Args:
        rate: The distance between elements of the filter, a number.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> x, w = rg.asarray([[[[1.0], [2.0]]]]), rg.asarray([[[[3.0]]]])
    >>> tf.nn.atrous_conv2d(x, w, rate=2, padding="SAME")
    Tensor([[[[3.],
              [6.]]]], dtype=float32)
    """


@_depthwise(scope="depthwise", rate="dilations")
def depthwise_conv2d(
    input, filter, strides, padding, rate=None, name=None, data_format=None, dilations=None
):
    """Return images with each channel convolved with its own filters.

    Args:
        filter: A filter of the shape (height, width, in, multiplier).

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> x, w = rg.asarray([[[[1.0], [2.0]]]]), rg.asarray([[[[3.0]]]])
    >>> tf.nn.depthwise_conv2d(x, w, strides=[1, 1, 1, 1], padding="SAME")
    Tensor([[[[3.],
              [6.]]]], dtype=float32)
    """


@_depthwise()
def depthwise_conv2d_native(
    input, filter, strides, padding, data_format="NHWC", dilations=(1, 1, 1, 1)
):
    """Return `depthwise_conv2d`. This function has the name of the op.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> x, w = rg.asarray([[[[1.0], [2.0]]]]), rg.asarray([[[[3.0]]]])
    >>> tf.nn.depthwise_conv2d_native(x, w, strides=[1, 1, 1, 1], padding="SAME")
    Tensor([[[[3.],
              [6.]]]], dtype=float32)
    """


@_conv("Conv2D", rg.nn.separable_conv2d, scope="separable_conv2d", call=_slide2, rate="dilations")
def separable_conv2d(
    input, depthwise_filter, pointwise_filter, strides, padding, rate=None, name=None,
    data_format=None, dilations=None,
):  # fmt: skip
    """Return `depthwise_conv2d` followed by a `conv2d` with the 1×1 filter `pointwise_filter`.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> x, w, pointwise = map(rg.asarray, ([[[[1.0], [2.0]]]], [[[[3.0]]]], [[[[2.0]]]]))
    >>> tf.nn.separable_conv2d(x, w, pointwise, strides=[1, 1, 1, 1], padding="SAME")
    Tensor([[[[ 6.],
              [12.]]]], dtype=float32)
    """


@_adjoint("Conv2DBackpropInput", rg.nn.conv2d_transpose, scope="conv2d_transpose", call=_slide2)
def conv2d_transpose(
    value=None, filter=None, output_shape=None, strides=None, padding="SAME", data_format="NHWC",
    name=None, input=None, filters=None, dilations=None,
):  # fmt: skip
    """Return the adjoint of `conv2d`, with a filter (height, width, out, in).

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> x, w = rg.asarray([[[[1.0], [2.0]]]]), rg.asarray([[[[3.0]]]])
    >>> tf.nn.conv2d_transpose(x, w, output_shape=[1, 1, 2, 1], strides=[1, 1, 1, 1])
    Tensor([[[[3.],
              [6.]]]], dtype=float32)
    """


@_adjoint("Conv3DBackpropInputV2", rg.nn.conv3d_transpose, scope="conv3d_transpose", call=_slide3)
def conv3d_transpose(
    value, filter=None, output_shape=None, strides=None, padding="SAME", data_format="NDHWC",
    name=None, input=None, filters=None, dilations=None,
):  # fmt: skip
    """Return the adjoint of `conv3d`, with a filter (depth, height, width, out, in).

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> x, w = rg.asarray([[[[[1.0], [2.0]]]]]), rg.asarray([[[[[3.0]]]]])
    >>> tf.nn.conv3d_transpose(x, w, output_shape=[1, 1, 1, 2, 1], strides=[1, 1, 1, 1, 1])
    Tensor([[[[[3.],
               [6.]]]]], dtype=float32)
    """


@written("tf.nn")
def conv2d_backprop_input(
    input_sizes, filter, out_backprop, strides, padding, use_cudnn_on_gpu=True, data_format="NHWC",
    dilations=(1, 1, 1, 1), name=None,
):  # fmt: skip
    """Return the gradient of `conv2d` with respect to the images; see `conv2d_transpose`.

    Args:
        input_sizes: The shape of the images, a tensor of integers or a list.
        filter: The filter of the convolution, (height, width, in, out).
        out_backprop: The gradient of the result.
        strides, padding, data_format, dilations: The arguments of the convolution.
        use_cudnn_on_gpu: Without effect.

    Returns:
        A tensor of the shape `input_sizes`.

    Op type: `Conv2DBackpropInput`. Source: `tf.nn.conv2d_backprop_input`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default():
    ...     dy, w = tf.zeros([1, 4, 4, 5]), tf.zeros([3, 3, 2, 5])
    ...     print(tf.nn.conv2d_backprop_input([1, 4, 4, 2], w, dy, [1, 1, 1, 1], "SAME").shape)
    (1, 4, 4, 2)
    """
    name = name or "Conv2DBackpropInput"
    return conv2d_transpose(
        out_backprop, filter, input_sizes, strides, padding, data_format, name, dilations=dilations
    )


def _by_filter(x: rg.Tensor, dy: rg.Tensor, *, filter_sizes: tuple[Any, ...], **window: Any) -> Any:
    return rg.find_op("Conv2DBackpropFilter").function(x, dy, filter_sizes, **window)


def _only_last(data_format: str | None) -> str | None:
    if not channels_last(data_format, 2):
        raise GraphError("conv2d_backprop_filter: data_format must be 'NHWC'")
    return data_format


@_conv(
    "Conv2DBackpropFilter", _by_filter, call=_slide2, filter_sizes=as_sizes, data_format=_only_last
)
def conv2d_backprop_filter(
    input, filter_sizes, out_backprop, strides, padding, use_cudnn_on_gpu=True, data_format="NHWC",
    dilations=(1, 1, 1, 1),
):  # fmt: skip
    """Return the gradient of `conv2d` with respect to the filter.

    Args:
        input: The images of the convolution.
        filter_sizes: The shape of the filter, a tensor of integers or a list.
        out_backprop: The gradient of the result.
        strides: The steps of the convolution.
        padding: The padding of the convolution.
        data_format: "NHWC".
        dilations: The dilations of the convolution.

    Returns:
        A tensor of the shape `filter_sizes`.

    Raises:
        GraphError: the data format is not supported. The error is a ValueError.

    >>> with tf.Graph().as_default():
    ...     x, dy = tf.zeros([1, 4, 4, 2]), tf.zeros([1, 4, 4, 5])
    ...     print(tf.nn.conv2d_backprop_filter(x, [3, 3, 2, 5], dy, [1, 1, 1, 1], "SAME").shape)
    (3, 3, 2, 5)
    """


@written("tf.nn")
def convolution(
    input, filter, padding, strides=None, dilation_rate=None, name=None, data_format=None
):
    """Return `conv1d`, `conv2d` or `conv3d`, depending on the rank of the filter.

    Args:
        input: Data with one, two or three spatial axes, in the order of `data_format`.
        filter: A filter of the shape `(*window, in, out)`.
        padding: "SAME", "VALID", or a pair (before, after) for each axis.
        strides: The steps, by default 1.
        dilation_rate: The distances between elements of the filter, by default 1.
        data_format: The order of axes: channels last ("NHWC", …) or first ("NCHW", …).

    Returns:
        A tensor of the input's dtype.

    Raises:
        GraphError: the filter does not have rank 3, 4 or 5.

    Op types: `Conv2D`, `Conv3D`. Source: `tf.nn.convolution`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     y = tf.nn.convolution([[[1.0], [2.0], [3.0]]], [[[1.0]], [[1.0]]], "VALID")
    ...     print(sess.run(y).ravel())
    [3. 5.]
    """
    n = len(shape_of(tensor(filter))) - 2
    if n not in LAYOUTS:
        raise GraphError(f"convolution: expected a filter of rank 3, 4 or 5, got {filter}")
    function = {1: conv1d, 2: conv2d, 3: conv3d}[n]
    return function(
        input, filter, strides, padding, data_format=data_format, dilations=dilation_rate,
        name=name or "convolution",
    )  # fmt: skip


# -- pools ---------------------------------------------------------------------------------------


def _pooling(name: str, op_type: str, n: int, function: Callable[..., Any], kinds: str) -> Any:
    once, more = "[" * n, "]" * n
    shown = f"{once}[[1.0], [3.0]]{more}", f"ksize=[{'1, ' * n}2, 1]", "strides=1"  # two pixels
    result = f"{once}[[{'3' if 'max' in name else '2'}.]]{more}"
    return define(
        f"tf.nn.{name}(value=None, ksize=None, strides=None, padding=None, "
        f"data_format='{LAYOUTS[n][0]}', name=None, input=None)",
        f"{op_type}: * | {POOL}", function, kinds, *shown, 'padding="VALID"', result,
        call=partial(_slide, n), input="value",
    )  # fmt: skip


max_pool = _pooling("max_pool", "MaxPool", 2, rg.nn.max_pool, REALS)
avg_pool = _pooling("avg_pool", "AvgPool", 2, rg.nn.avg_pool, FLOATS)
max_pool3d = _pooling("max_pool3d", "MaxPool3D", 3, rg.nn.max_pool3d, REALS)
avg_pool3d = _pooling("avg_pool3d", "AvgPool3D", 3, rg.nn.avg_pool3d, FLOATS)
__all__ = listed(__name__, place="tf.nn")
