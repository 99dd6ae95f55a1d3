"""Samples of the convolutions. References: jax.lax and PyTorch, in double precision."""

from __future__ import annotations

from typing import Any

import numpy as np

import regrad as rg
from regrad.ops import convolution as cv
from tests.helpers.optional import optional
from tests.samples import sample, spread

torch = optional("torch")
jax = optional("jax")


def lax(strides: Any, padding: Any, dilations: Any = 1, groups: int = 1) -> Any:
    """XLA's convolution of as many spatial axes as x has."""

    def convolve(x: Any, w: Any) -> Any:
        n = x.ndim - 2
        letters = "DHW"[3 - n :]
        return jax.lax.conv_general_dilated(
            x,
            w.reshape(*w.shape[:n], w.shape[n] // groups, -1),
            np.broadcast_to(strides, n).tolist(),
            padding,
            rhs_dilation=np.broadcast_to(dilations, n).tolist(),
            dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
            feature_group_count=groups,
        )

    return convolve


def to_torch(x: np.ndarray, w: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(x).movedim(-1, 1), torch.from_numpy(w).movedim((-1, -2), (0, 1))]


def torch_conv(name: str, **options: Any) -> Any:
    function = getattr(torch.nn.functional, name)
    return lambda x, w: function(*to_torch(x, w), **options).movedim(1, -1).numpy()


def by_x(convolve: Any, shape: tuple[int, ...]) -> Any:
    """JAX's own gradient by x."""
    return lambda dy, w: jax.vjp(lambda x: convolve(x, w), np.zeros(shape))[1](dy)[0]


def by_w(convolve: Any, shape: tuple[int, ...]) -> Any:
    return lambda x, dy: jax.vjp(lambda w: convolve(x, w), np.zeros(shape))[1](dy)[0]


def raw(type: str) -> Any:
    """The function of an op that is no public function."""
    return rg.find_op(type).function


ROWS_2D = [
    # what, x, w, strides, pad, dilations
    ("a filter of 2×2", (1, 3, 2, 2), (2, 2, 2, 1), 1, "valid", 1),
    ("a batch and two outputs", (2, 2, 3, 1), (2, 2, 1, 2), 1, "valid", 1),
    ("same, uneven padding", (1, 3, 4, 1), (2, 2, 1, 1), 1, "same", 1),
    ("same, stride 2", (1, 4, 3, 1), (3, 2, 1, 1), 2, "same", 1),
    ("same, dilated", (1, 4, 3, 1), (2, 2, 1, 1), 1, "same", 2),
    ("stride and dilation at once", (1, 4, 3, 1), (2, 2, 1, 1), 2, [[1, 1], [0, 2]], 2),
    ("strides that differ and leave a rest", (1, 4, 3, 1), (1, 2, 1, 2), (3, 2), "valid", 1),
    ("strides wider than the filter", (1, 4, 3, 1), (1, 1, 1, 1), 3, "same", 1),
    ("pairs of padding", (1, 3, 2, 1), (2, 2, 1, 2), 1, [[1, 0], [0, 2]], (1, 2)),
    ("a filter larger than the image", (1, 2, 2, 1), (3, 3, 1, 1), 1, "same", 1),
]


def padding_of(pad: Any) -> Any:
    return pad.upper() if isinstance(pad, str) else pad


def conv2d_rows() -> Any:
    for what, x, w, strides, pad, dilations in ROWS_2D:
        reference = lax(strides, padding_of(pad), dilations)
        window = (strides, pad, dilations)
        y = cv.conv2d(np.zeros(x), np.zeros(w), *window).shape
        full = (np.broadcast_to(strides, 2).tolist(), pad, np.broadcast_to(dilations, 2).tolist())
        yield sample(f"conv2d, {what}", lambda x, w, window=window: cv.conv2d(x, w, *window),
                     (spread(*x), spread(*w, seed=1)), covers="Conv2D",
                     reference=reference)  # fmt: skip
        yield sample(f"conv2d_transpose, {what}",
                     lambda dy, w, x=x, window=window: cv.conv2d_transpose(dy, w, x, *window),
                     (spread(*y), spread(*w, seed=1)), covers="Conv2DBackpropInput",
                     reference=by_x(reference, x))  # fmt: skip
        yield sample(f"the gradient of conv2d by its filter, {what}",
                     lambda x, dy, w=w, full=full: raw("Conv2DBackpropFilter")(
                         x, dy, w, tuple(full[0]), normal(full[1]), tuple(full[2])),
                     (spread(*x), spread(*y, seed=1)), covers="Conv2DBackpropFilter",
                     reference=by_w(reference, w))  # fmt: skip


def normal(pad: Any) -> Any:
    return pad if isinstance(pad, str) else tuple(map(tuple, pad))


DEPTHWISE = [
    ("a multiplier of 1", (1, 3, 2, 2), (2, 2, 2, 1), 1, "valid", 1),
    ("a multiplier of 2", (1, 2, 3, 2), (2, 1, 2, 2), 1, "same", 1),
    ("a stride", (1, 3, 2, 2), (2, 2, 2, 1), 2, "same", 1),
    ("a dilation", (1, 3, 2, 2), (2, 1, 2, 2), 1, "same", (2, 1)),
    ("one channel", (1, 3, 2, 1), (2, 1, 1, 3), 1, "valid", 1),
]


def depthwise_rows() -> Any:
    for what, x, w, strides, pad, dilations in DEPTHWISE:
        reference = lax(strides, padding_of(pad), dilations, groups=x[-1])
        window = (strides, pad, dilations)
        y = cv.depthwise_conv2d(np.zeros(x), np.zeros(w), *window).shape
        pairs = [tuple(np.broadcast_to(v, 2).tolist()) for v in (strides, dilations)]
        full = (pairs[0], pad, pairs[1])
        yield sample(f"depthwise_conv2d, {what}",
                     lambda x, w, window=window: cv.depthwise_conv2d(x, w, *window),
                     (spread(*x), spread(*w, seed=1)), covers="DepthwiseConv2dNative",
                     reference=reference)  # fmt: skip
        yield sample(f"the gradient of depthwise_conv2d by its images, {what}",
                     lambda dy, w, x=x, full=full: raw("DepthwiseConv2dNativeBackpropInput")(
                         dy, w, x, *full), (spread(*y), spread(*w, seed=1)),
                     covers="DepthwiseConv2dNativeBackpropInput",
                     reference=by_x(reference, x))  # fmt: skip
        yield sample(f"the gradient of depthwise_conv2d by its filter, {what}",
                     lambda x, dy, w=w, full=full: raw("DepthwiseConv2dNativeBackpropFilter")(
                         x, dy, w, *full), (spread(*x), spread(*y, seed=1)),
                     covers="DepthwiseConv2dNativeBackpropFilter",
                     reference=by_w(reference, w))  # fmt: skip


X3D, W3D = (1, 3, 2, 2, 1), (2, 1, 2, 1, 2)
ONES = (1, 1, 1)

SAMPLES = [
    *conv2d_rows(),
    *depthwise_rows(),
    sample("conv2d as PyTorch has it", lambda x, w: cv.conv2d(x, w, 2, 1, 1),
           (spread(1, 3, 2, 2), spread(2, 2, 2, 1, seed=1)), covers="Conv2D",
           reference=torch_conv("conv2d", stride=2, padding=1)),
    sample("conv2d_transpose as PyTorch has it",
           lambda x, w: cv.conv2d_transpose(x, w, (1, 5, 3, 1), 2, "valid"),
           (spread(1, 2, 1, 2), spread(3, 3, 1, 1, seed=1).repeat(2, axis=-1) * [1.0, 0.7]),
           covers="Conv2DBackpropInput",
           reference=lambda x, w: torch.nn.functional.conv_transpose2d(
               *to_torch(x, w), stride=2).movedim(1, -1).numpy()),
    sample("one image without a batch axis", lambda x, w: cv.conv2d(x, w, 1, "same"),
           (spread(3, 2, 1), spread(2, 2, 1, 2, seed=1)), covers=("Conv2D", "ExpandDims"),
           reference=lambda x, w: lax(1, "SAME")(x[None], w)[0]),
    sample("conv2d_transpose of one image without a batch axis",
           lambda x, w: cv.conv2d_transpose(x, w, (4, 2, 1), 2, "same"),
           (spread(2, 1, 2), spread(3, 1, 1, 2, seed=1)), covers="Conv2DBackpropInput",
           reference=lambda x, w: by_x(lax(2, "SAME"), (1, 4, 2, 1))(x[None], w)[0]),
    sample("complex conv2d", lambda x, w: cv.conv2d(x, w, 1, "same"),
           (spread(1, 2, 2, 1) + 1j * spread(1, 2, 2, 1, seed=2),
           spread(2, 1, 1, 1, seed=1) + 1j * spread(2, 1, 1, 1, seed=3)), covers="Conv2D",
           reference=lambda x, w: x * w[0] + w[1] * np.concatenate([x[:, 1:], 0 * x[:, :1]], 1)),
    sample("conv1d with a stride and a dilation", lambda x, w: cv.conv1d(x, w, 2, "same", 2),
           (spread(1, 6, 2), spread(2, 2, 1, seed=1)), covers="Conv2D",
           reference=lax(2, "SAME", 2)),
    sample("conv1d of one sequence, with a pair of padding",
           lambda x, w: cv.conv1d(x, w, 1, [[2, 0]]), (spread(4, 1), spread(3, 1, 2, seed=1)),
           covers="Conv2D", reference=lambda x, w: lax(1, [(2, 0)])(x[None], w)[0]),
    sample("conv3d, same", lambda x, w: cv.conv3d(x, w, (1, 2, 1), "same"),
           (spread(*X3D), spread(*W3D, seed=1)), covers="Conv3D", reference=lax((1, 2, 1), "SAME")),
    sample("conv3d, dilated", lambda x, w: cv.conv3d(x, w, 1, "valid", (2, 1, 1)),
           (spread(*X3D), spread(*W3D, seed=1)), covers="Conv3D",
           reference=lax(1, "VALID", (2, 1, 1))),
    sample("conv3d of one volume as PyTorch has it", lambda x, w: cv.conv3d(x, w, 2, 1),
           (spread(3, 2, 2, 1), spread(*W3D, seed=1)), covers="Conv3D",
           reference=lambda x, w: torch_conv("conv3d", stride=2, padding=1)(x[None], w)[0]),
    sample("conv3d_transpose", lambda x, w: cv.conv3d_transpose(x, w, X3D, (1, 2, 1), "same"),
           (spread(1, 3, 1, 2, 2), spread(*W3D, seed=1)), covers="Conv3DBackpropInputV2",
           reference=by_x(lax((1, 2, 1), "SAME"), X3D)),
    sample("the gradient of conv3d by its filter",
           lambda x, dy: raw("Conv3DBackpropFilterV2")(x, dy, W3D, (1, 2, 1), "same", ONES),
           (spread(*X3D), spread(1, 3, 1, 2, 2, seed=1)), covers="Conv3DBackpropFilterV2",
           reference=by_w(lax((1, 2, 1), "SAME"), W3D)),
    sample("separable_conv2d", lambda x, d, p: cv.separable_conv2d(x, d, p, 1, "same"),
           (spread(1, 3, 2, 2), spread(2, 1, 2, 2, seed=1), spread(1, 1, 4, 2, seed=2)),
           covers=("Conv2D", "DepthwiseConv2dNative"),
           reference=lambda x, d, p: lax(1, "VALID")(lax(1, "SAME", groups=2)(x, d), p)),
    sample("a small network of convolutions",
           lambda x, w: rg.sin(cv.conv2d(rg.sin(cv.conv2d(x, w, 1, "same")), w, 2, "same")),
           (spread(1, 3, 3, 1), spread(2, 2, 1, 1, seed=1)), covers="Conv2D",
           reference=lambda x, w: np.sin(lax(2, "SAME")(np.sin(lax(1, "SAME")(x, w)), w))),
    sample("an empty batch", lambda x, w: cv.conv2d(x, w, 1, "same"),
           (np.zeros((0, 3, 3, 1)), spread(2, 2, 1, 2)), covers="Conv2D",
           reference=lambda x, w: np.zeros((0, 3, 3, 2))),
]  # fmt: skip
