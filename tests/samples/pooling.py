"""Samples of pooling and local response normalisation. References: jax.lax and PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np

import regrad as rg
from regrad.ops import pooling
from tests.helpers.optional import optional
from tests.samples import sample, spread

torch = optional("torch")
jax = optional("jax")


def raw(type: str) -> Any:
    """The function of an op that is no public function."""
    return rg.find_op(type).function


def reduce_window(x: Any, start: float, function: Any, window: Any) -> Any:
    n = x.ndim - 2
    size, strides, pad = window
    size, strides = np.broadcast_to(size, n).tolist(), np.broadcast_to(strides, n).tolist()
    pad = pad.upper() if isinstance(pad, str) else [(0, 0), *pad, (0, 0)]
    return jax.lax.reduce_window(x, start, function, (1, *size, 1), (1, *strides, 1), pad)


def lax_max(*window: Any) -> Any:
    return lambda x: reduce_window(x, -np.inf, jax.lax.max, window)


def lax_mean(*window: Any) -> Any:
    def mean(x: Any) -> Any:
        total = reduce_window(x, 0.0, jax.lax.add, window)
        return total / reduce_window(np.ones(x.shape), 0.0, jax.lax.add, window)

    return mean


def vjp(f: Any, shape: Any = None) -> Any:
    """JAX's gradient, of `(x, dy)`, or of `dy` alone for a linear f of the given shape."""
    if shape:
        return lambda dy: jax.vjp(f, np.zeros(shape))[1](dy)[0]
    return lambda x, dy: jax.vjp(f, x)[1](dy)[0]


def full(x: Any, size: Any, strides: Any, pad: Any) -> Any:
    """The attributes as the ops hold them."""
    n = len(x) - 2
    pairs = [tuple(np.broadcast_to(v, n).tolist()) for v in (size, strides)]
    return (*pairs, pad if isinstance(pad, str) else tuple(map(tuple, pad)))


WINDOWS = [
    # what, x, size, strides, pad
    ("windows of 2×2", (1, 2, 4, 1), 2, 2, "valid"),
    ("windows that overlap", (1, 3, 3, 1), 2, 1, "valid"),
    ("a window as large as the image", (1, 3, 2, 2), (3, 2), 1, "valid"),
    ("a rest", (1, 3, 4, 1), 2, 3, "valid"),
    ("same", (1, 3, 3, 1), 2, 2, "same"),
    ("same, overlapping", (2, 2, 3, 1), (2, 3), 1, "same"),
    ("pairs of padding", (1, 3, 3, 1), (2, 3), (1, 2), [[1, 0], [2, 1]]),
    ("a volume", (1, 2, 2, 3, 1), 2, 1, "valid"),
    ("a volume, same", (1, 3, 2, 2, 1), 2, (2, 1, 1), "same"),
]


def pool_rows() -> Any:
    for what, shape, *window in WINDOWS:
        three = len(shape) == 5
        max_pool = pooling.max_pool3d if three else pooling.max_pool
        avg_pool = pooling.avg_pool3d if three else pooling.avg_pool
        reference, mean = lax_max(*window), lax_mean(*window)
        attrs, x = full(shape, *window), spread(*shape)
        y = spread(*max_pool(x, *window).shape, seed=1)
        yield sample(f"max_pool, {what}", lambda x, f=max_pool, w=window: rg.sin(f(x, *w)), x,
                     covers="MaxPool3D" if three else "MaxPool",
                     reference=lambda x, f=reference: np.sin(f(x)))  # fmt: skip
        yield sample(f"the gradient of max_pool, {what}",
                     lambda x, dy, a=attrs: rg.sin(raw("MaxPoolGrad")(x, dy, *a)), (x, y),
                     covers="MaxPoolGrad",
                     reference=lambda x, dy, f=reference: np.sin(vjp(f)(x, dy)))  # fmt: skip
        yield sample(f"the adjoint of the gradient of max_pool, {what}",
                     lambda x, dx, a=attrs: rg.sin(raw("MaxPoolGradGrad")(x, dx, *a)),
                     (x, spread(*shape, seed=2)), covers="MaxPoolGradGrad",
                     reference=lambda x, dx, f=reference: np.sin(picked(f, x, dx)))  # fmt: skip
        yield sample(f"avg_pool, {what}", lambda x, f=avg_pool, w=window: rg.sin(f(x, *w)), x,
                     covers="AvgPool3D" if three else "AvgPool",
                     reference=lambda x, f=mean: np.sin(f(x)))  # fmt: skip
        yield sample(f"the gradient of avg_pool, {what}",
                     lambda dy, s=shape, a=attrs: rg.sin(raw("AvgPoolGrad")(dy, s, *a)), y,
                     covers="AvgPoolGrad",
                     reference=lambda dy, s=shape, f=mean: np.sin(vjp(f, s)(dy)))  # fmt: skip


def picked(f: Any, x: np.ndarray, dx: np.ndarray) -> Any:
    """f's derivative along dx, which picks the elements at the maxima."""
    return jax.jvp(f, (x,), (dx,))[1]


def torch_pool(name: str, **options: Any) -> Any:
    function = getattr(torch.nn.functional, name)
    return lambda x: function(torch.from_numpy(x).movedim(-1, 1), **options).movedim(1, -1).numpy()


def lrn(radius: int, bias: float, alpha: float, beta: float) -> Any:
    size = 2 * radius + 1  # PyTorch divides alpha by it
    return torch_pool("local_response_norm", size=size, alpha=alpha * size, beta=beta, k=bias)


SAMPLES = [
    *pool_rows(),
    sample("max_pool as PyTorch has it", lambda x: pooling.max_pool(x, 3, 2, 1),
           spread(1, 4, 3, 1), covers="MaxPool",
           reference=torch_pool("max_pool2d", kernel_size=3, stride=2, padding=1)),
    sample("avg_pool as PyTorch has it", lambda x: pooling.avg_pool(x, 3, 2, 1),
           spread(1, 4, 3, 1), covers="AvgPool",
           reference=torch_pool("avg_pool2d", kernel_size=3, stride=2, padding=1,
           count_include_pad=False)),
    sample("max_pool of one image without a batch axis",
           lambda x: rg.square(pooling.max_pool(x, 2, 1, "same")), spread(3, 2, 2),
           covers=("MaxPool", "ExpandDims"),
           reference=lambda x: np.square(lax_max(2, 1, "same")(x[None])[0])),
    sample("avg_pool of one image without a batch axis",
           lambda x: pooling.avg_pool(x, 2, 1, "same"), spread(3, 2, 2), covers="AvgPool",
           reference=lambda x: lax_mean(2, 1, "same")(x[None])[0]),
    sample("pools of an empty batch",
           lambda x: pooling.max_pool(x, 2, 1, "same") + pooling.avg_pool(x, 2, 1, "same"),
           np.zeros((0, 3, 2, 2)), covers=("MaxPool", "AvgPool"), reference=lambda x: x),
    sample("max_pool of integers", lambda x: pooling.max_pool(x, 2, 1, "same"),
           np.arange(-6, 0).reshape(1, 3, 2, 1), covers="MaxPool", order=0,
           reason="integers have no gradient",
           reference=lambda x: lax_max(2, 1, "same")(x.astype(float)).astype(int)),
    sample("the square of max_pool by a weight before it",
           lambda x, w: rg.square(pooling.max_pool(x * w, 2, 1, "valid")),
           (spread(1, 3, 3, 1), spread(1, 3, 3, 1, low=0.5, seed=3)), covers="MaxPool",
           reference=lambda x, w: np.square(lax_max(2, 1, "valid")(x * w))),
    sample("LRN with TensorFlow.js's defaults", lambda x: pooling.local_response_normalization(x),
           spread(1, 1, 2, 6), covers="LRN", reference=lrn(5, 1.0, 1.0, 0.5)),
    sample("LRN over the nearest neighbours of one image",
           lambda x: pooling.local_response_normalization(x, 1, 2.0, 0.3, 0.75), spread(1, 2, 5),
           covers="LRN", reference=lambda x: lrn(1, 2.0, 0.3, 0.75)(x[None])[0]),
    sample("the sum over neighbouring channels", lambda x: raw("NeighbourSum")(x, 2), spread(2, 6),
           covers="NeighbourSum",
           reference=lambda x: np.stack([np.convolve(r, np.ones(5), "same") for r in x])),
]  # fmt: skip
