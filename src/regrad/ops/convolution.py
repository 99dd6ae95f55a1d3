"""Convolution. Images are NHWC, (batch, height, width, channels), and filters HWIO.

A convolution has two gradients, one with respect to the images and one with respect to the filter.
Each of the three ops is linear in two tensors, and the other two are its gradients. So the three
ops are each other's rules, for derivatives of any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from regrad.core.backends import Array, Namespace, placed_like
from regrad.core.dispatch import lift
from regrad.core.op import TensorLike, op
from regrad.core.registry import gradient
from regrad.core.shapes import Shape, as_shape
from regrad.core.tensor import Tensor
from regrad.errors import ShapeError
from regrad.graph.deferred import deferrable
from regrad.ops import windows
from regrad.ops.array import expand_dims, squeeze
from regrad.ops.convolution_kernels import Kernel, TorchKernels, compile_kernel, jax_kernels
from regrad.ops.windows import (
    ConvolutionPlan,
    Ints,
    NumPyKernels,
    Padding,
    Sizes,
    over_windows,
    plan_of,
)
from regrad.shapes.images import check_filter

# -- the kernels of the ops ----------------------------------------------------------------------

KERNELS: dict[str, Any] = {"numpy": NumPyKernels, "torch": TorchKernels}


def _compute(
    xp: Namespace, kernel: str, a: Array, b: Array, plan: ConvolutionPlan, shape: Sizes
) -> Array:
    """Run a kernel. Where there is nothing to sum, libraries disagree; regrad returns zeros."""
    if not (math.prod(plan.images) and math.prod(plan.filter) and math.prod(plan.output)):
        return xp.zeros(shape, dtype=a.dtype, **placed_like(a))
    library = windows.library(xp)
    if library == "jax":
        return compile_kernel(getattr(jax_kernels(a, plan), kernel))(a, b, plan)
    compute = getattr(KERNELS[library], kernel)
    if library == "torch" and a.is_complex():
        return _complex(xp, compute, a, b, plan)
    return compute(a, b, plan)


def _complex(xp: Namespace, compute: Kernel, a: Array, b: Array, plan: ConvolutionPlan) -> Array:
    """Run a kernel on complex numbers as four real kernels (torch lacks the complex gradients)."""
    ar, ai, br, bi = (part.contiguous() for part in (a.real, a.imag, b.real, b.imag))
    real = compute(ar, br, plan) - compute(ai, bi, plan)
    return real + 1j * (compute(ar, bi, plan) + compute(ai, br, plan))


# -- the ops -------------------------------------------------------------------------------------


def _triangle(name: str, *types: str, depthwise: bool = False) -> list[Callable[..., Tensor]]:
    """Return a convolution and its two gradients as ops of the given types, with their rules."""

    def convolve(
        xp, x: TensorLike, w: TensorLike, /, strides: Sizes, pad: Any, dilations: Sizes
    ) -> Tensor:
        plan = plan_of(name, x.shape, w.shape, strides, pad, dilations, depthwise)
        return _compute(xp, "forward", x, xp.reshape(w, plan.filter), plan, plan.output)

    def by_images(
        xp,
        x: TensorLike,
        w: TensorLike,
        /,
        shape: Shape,
        strides: Sizes,
        pad: Any,
        dilations: Sizes,
    ) -> Tensor:
        plan = plan_of(
            f"{name}_transpose", as_shape(shape), w.shape, strides, pad, dilations, depthwise
        )
        _check_transposed(f"{name}_transpose", x.shape, plan)
        return _compute(xp, "by_images", x, xp.reshape(w, plan.filter), plan, plan.images)

    def by_filter(
        xp,
        a: TensorLike,
        b: TensorLike,
        /,
        shape: Shape,
        strides: Sizes,
        pad: Any,
        dilations: Sizes,
    ) -> Tensor:
        plan = plan_of(name, a.shape, as_shape(shape), strides, pad, dilations, depthwise)
        dw = _compute(xp, "by_filter", a, b, plan, plan.filter)
        return xp.reshape(dw, as_shape(shape))

    kernels: tuple[Any, ...] = (convolve, by_images, by_filter)
    for kernel, suffix in zip(kernels, ("", "_backprop_input", "_backprop_filter"), strict=True):
        kernel.__name__ = name + suffix
    ops = [op(t, to_float=True)(k) for t, k in zip(types, kernels, strict=True)]
    _rules(types, *ops)
    return ops


def _rules(types: Sequence[str], convolve: Kernel, by_images: Kernel, by_filter: Kernel) -> None:
    @gradient(types[0], "x")
    def _(dy, w, x_shape, strides, pad, dilations):
        return by_images(dy, w, x_shape, strides, pad, dilations)

    @gradient(types[0], "w")
    def _(dy, x, w_shape, strides, pad, dilations):
        return by_filter(x, dy, w_shape, strides, pad, dilations)

    @gradient(types[1], "x")
    def _(dy, w, strides, pad, dilations):
        return convolve(dy, w, strides, pad, dilations)

    @gradient(types[1], "w")
    def _(dy, x, w_shape, strides, pad, dilations):
        return by_filter(dy, x, w_shape, strides, pad, dilations)

    @gradient(types[2], "a")
    def _(dy, b, a_shape, strides, pad, dilations):
        return by_images(b, dy, a_shape, strides, pad, dilations)

    @gradient(types[2], "b")
    def _(dy, a, strides, pad, dilations):
        return convolve(a, dy, strides, pad, dilations)


def _check_transposed(name: str, shape: Sequence[int], plan: ConvolutionPlan) -> None:
    if tuple(shape) != plan.output:
        raise ShapeError(
            f"{name}: x has the shape {tuple(shape)}, expected {plan.output} for output_shape "
            f"{plan.images}, a filter of shape {plan.filter} (out and in last) and strides "
            f"{plan.win.strides}"
        )


_conv2d, _conv2d_input, _ = _triangle(
    "conv2d", "Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter"
)
_conv3d, _conv3d_input, _ = _triangle(
    "conv3d", "Conv3D", "Conv3DBackpropInputV2", "Conv3DBackpropFilterV2"
)
_: Callable[..., Any]
_: Callable[..., Any]
_depthwise_conv2d, _, _ = _triangle(
    "depthwise_conv2d",
    "DepthwiseConv2dNative",
    "DepthwiseConv2dNativeBackpropInput",
    "DepthwiseConv2dNativeBackpropFilter",
    depthwise=True,
)


# -- what users call -----------------------------------------------------------------------------


@deferrable
def conv2d(
    x: TensorLike, w: TensorLike, /, strides: Ints, pad: Padding, dilations: Ints = 1
) -> Tensor:
    """Convolve images with a filter, without a flip (a cross-correlation, as usual in networks).

    Args:
        x: Images, (batch, height, width, in), or one image without the batch axis.
        w: The filter, (height, width, in, out).
        strides: The distance between windows, an int or a pair.
        pad: Zeros around the image: `"same"` (there are `ceil(n / stride)` windows, and the
            smaller half of the padding comes first), `"valid"` (no padding), an int, or pairs
            (before, after) for height and width.
        dilations: The distance between the taps of the filter, an int or a pair.

    Returns:
        A Tensor (batch, height, width, out), with the dtype to which x and w promote.

    Raises:
        ShapeError: the rank is wrong, the channels differ, or the filter does not fit.
        ArgumentError: `pad` is unknown, or strides or dilations are not positive ints.

    Op type: `Conv2D`. Source: `tf.conv2d` of TensorFlow.js.

    >>> import regrad as rg
    >>> from regrad.nn import conv2d
    >>> x = rg.tensor([1, 2, 3, 4, 5, 6, 7, 8, 9], (1, 3, 3, 1))
    >>> w = rg.ones((2, 2, 1, 1))
    >>> conv2d(x, w, 1, "valid").reshape((2, 2)).print()
    Tensor
        [[12, 16],
         [24, 28]]
    >>> rg.grad(lambda x: conv2d(x, w, 1, "valid"))(x).reshape((3, 3)).print()
    Tensor
        [[1, 2, 1],
         [2, 4, 2],
         [1, 2, 1]]
    """
    return over_windows(_conv2d, "conv2d", 2, x, (w,), strides, pad, dilations=dilations)


@deferrable
def conv3d(
    x: TensorLike, w: TensorLike, /, strides: Ints, pad: Padding, dilations: Ints = 1
) -> Tensor:
    """Convolve volumes with a filter; see `conv2d`.

    Args:
        x: Volumes, (batch, depth, height, width, in), or one volume without the batch axis.
        w: The filter, (depth, height, width, in, out).
        strides, pad, dilations: As in `conv2d`, for three axes.

    Returns a Tensor (batch, depth, height, width, out).
    Raises ShapeError and ArgumentError as `conv2d` does.

    Op type: `Conv3D`. Source: `tf.conv3d` of TensorFlow.js.

    >>> rg.nn.conv3d(rg.ones((1, 3, 3, 3, 1)), rg.ones((2, 2, 2, 1, 4)), 1, "valid").shape
    (1, 2, 2, 2, 4)
    """
    return over_windows(_conv3d, "conv3d", 3, x, (w,), strides, pad, dilations=dilations)


@deferrable
def conv1d(x: TensorLike, w: TensorLike, /, stride: int, pad: Padding, dilation: int = 1) -> Tensor:
    """Convolve sequences with a filter.

    It computes a `conv2d` of images of height 1, so overrides of `Conv2D` fire.

    Args:
        x: Sequences, (batch, width, in), or one sequence without the batch axis.
        w: The filter, (width, in, out).
        stride, pad, dilation: As in `conv2d`, for one axis.

    Returns a Tensor (batch, width, out).
    Raises ShapeError and ArgumentError as `conv2d` does.

    Source: `tf.conv1d` of TensorFlow.js.

    >>> rg.nn.conv1d(rg.ones((1, 5, 1)), rg.ones((2, 1, 4)), 1, "valid").shape
    (1, 4, 4)
    """
    (stride,) = windows.spread(stride, 1, "conv1d: stride")
    (dilation,) = windows.spread(dilation, 1, "conv1d: dilation")
    pad = windows.as_padding(pad, 1, "conv1d: pad")
    x, single = windows.as_batch("conv1d", x, 1)
    w = lift(w)
    check_filter("conv1d", x.shape, w.shape)
    y = _conv2d(
        expand_dims(x, axis=1),
        expand_dims(w, axis=0),
        (1, stride),
        pad if isinstance(pad, str) else ((0, 0), *pad),
        (1, dilation),
    )
    return windows.without_batch(squeeze(y, axis=1), single)


@deferrable
def depthwise_conv2d(
    x: TensorLike, w: TensorLike, /, strides: Ints, pad: Padding, dilations: Ints = 1
) -> Tensor:
    """Convolve each channel of images with its own filters.

    Args:
        x: Images, (batch, height, width, in), or one image without the batch axis.
        w: The filters, (height, width, in, multiplier).
        strides, pad, dilations: As in `conv2d`.

    Returns a Tensor (batch, height, width, in * multiplier). The outputs of a channel are adjacent.
    Raises ShapeError and ArgumentError as `conv2d` does.

    Op type: `DepthwiseConv2dNative`. Source: `tf.depthwiseConv2d` of TensorFlow.js.

    >>> rg.nn.depthwise_conv2d(rg.ones((1, 3, 3, 2)), rg.ones((2, 2, 2, 3)), 1, "valid").shape
    (1, 2, 2, 6)
    """
    return over_windows(
        _depthwise_conv2d, "depthwise_conv2d", 2, x, (w,), strides, pad, dilations=dilations
    )


@deferrable
def separable_conv2d(
    x: TensorLike,
    depthwise: TensorLike,
    pointwise: TensorLike,
    /,
    strides: Ints,
    pad: Padding,
    dilations: Ints = 1,
) -> Tensor:
    """Return a `depthwise_conv2d`, followed by a `conv2d` with a 1×1 filter.

    Args:
        x: Images, (batch, height, width, in), or one image without the batch axis.
        depthwise: The first filters, (height, width, in, multiplier).
        pointwise: The second filter, (1, 1, in * multiplier, out).
        strides, pad, dilations: As in `conv2d`.

    Returns a Tensor (batch, height, width, out).
    Raises ShapeError and ArgumentError as `conv2d` does.

    Source: `tf.separableConv2d` of TensorFlow.js.

    >>> from regrad.nn import separable_conv2d
    >>> x, a, b = rg.ones((1, 3, 3, 2)), rg.ones((2, 2, 2, 3)), rg.ones((1, 1, 6, 4))
    >>> separable_conv2d(x, a, b, 1, "valid").shape
    (1, 2, 2, 4)
    """
    pointwise = lift(pointwise)
    if pointwise.ndim != 4 or pointwise.shape[:2] != (1, 1):
        raise ShapeError(
            "separable_conv2d: the pointwise filter must have the shape (1, 1, in * multiplier, "
            f"out), got {pointwise.shape}"
        )
    return conv2d(depthwise_conv2d(x, depthwise, strides, pad, dilations), pointwise, 1, "valid")


@deferrable
def conv2d_transpose(
    x: TensorLike,
    w: TensorLike,
    /,
    output_shape: Sequence[int],
    strides: Ints,
    pad: Padding,
    dilations: Ints = 1,
) -> Tensor:
    """Return the adjoint of `conv2d`: its gradient with respect to the images, as a separate op.

    Args:
        x: Images, (batch, height, width, in), or one image without the batch axis. Its shape
            is the shape of `conv2d`'s result for images of shape `output_shape`.
        w: The filter, (height, width, out, in).
        output_shape: The shape of the result, (batch, height, width, out), or without the
            batch axis if x has none.
        strides, pad, dilations: The arguments of the convolution.

    Returns a Tensor of the shape `output_shape`.
    Raises ShapeError where the shapes do not fit. The error names the expected shape.

    Op type: `Conv2DBackpropInput`. Source: `tf.conv2dTranspose` of TensorFlow.js.

    >>> x, w = rg.ones((1, 2, 2, 4)), rg.ones((2, 2, 1, 4))
    >>> rg.nn.conv2d_transpose(x, w, (1, 3, 3, 1), 1, "valid").shape
    (1, 3, 3, 1)
    """
    return _transpose(_conv2d_input, "conv2d", x, w, 2, output_shape, strides, pad, dilations)


@deferrable
def conv3d_transpose(
    x: TensorLike,
    w: TensorLike,
    /,
    output_shape: Sequence[int],
    strides: Ints,
    pad: Padding,
    dilations: Ints = 1,
) -> Tensor:
    """Return the adjoint of `conv3d`; see `conv2d_transpose`.

    Args:
        x: Volumes, (batch, depth, height, width, in), or one volume without the batch axis.
        w: The filter, (depth, height, width, out, in).
        output_shape: The shape of the result.
        strides, pad, dilations: The arguments of the convolution.

    Returns a Tensor of the shape `output_shape`.
    Raises ShapeError where the shapes do not fit. The error names the expected shape.

    Op type: `Conv3DBackpropInputV2`. Source: `tf.conv3dTranspose` of TensorFlow.js.

    >>> x, w = rg.ones((1, 2, 2, 2, 4)), rg.ones((2, 2, 2, 1, 4))
    >>> rg.nn.conv3d_transpose(x, w, (1, 3, 3, 3, 1), 1, "valid").shape
    (1, 3, 3, 3, 1)
    """
    return _transpose(_conv3d_input, "conv3d", x, w, 3, output_shape, strides, pad, dilations)


def _transpose(
    adjoint: Kernel,
    forward: str,
    x: TensorLike,
    w: TensorLike,
    n: int,
    shape: Sequence[int],
    strides: Ints,
    pad: Padding,
    dilations: Ints,
) -> Tensor:
    name = f"{forward}_transpose"
    shape = tuple(shape)
    x, single = windows.as_batch(name, x, n)
    shape = (1, *shape) if single else shape
    if len(shape) != n + 2:
        raise ShapeError(
            f"{name}: output_shape must have {len(x.shape) - single} sizes, like x, got {shape}"
        )
    y = over_windows(adjoint, name, n, x, (w, shape), strides, pad, dilations=dilations)
    return windows.without_batch(y, single)
