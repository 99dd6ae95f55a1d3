"""Convolutions and their adjoints in JAX and PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, reduce
from operator import add
from typing import Any

from regrad.core.backends import Array
from regrad.ops import windows
from regrad.ops.windows import (
    ConvolutionPlan,
    Sizes,
    Windows,
    as_rows,
    repeat_channels,
    summed_copies,
    taps_of,
)

Kernel = Callable[..., Array]

# -- JAX: XLA's convolution, which dilates either operand ----------------------------------------


class JaxKernels:
    """Kernels by `lax.conv_general_dilated`. Each kernel names the order of its axes."""

    @staticmethod
    def forward(x: Array, w: Array, plan: ConvolutionPlan) -> Array:
        """Return the convolution."""
        win = plan.win
        axes = ("NDHWC", "DHWIO", "NDHWC")
        return _xla(
            x, w, axes, win.strides, win.padding, rhs_dilation=win.dilations,
            feature_group_count=plan.groups,
        )  # fmt: skip

    @staticmethod
    def by_images(dy: Array, w: Array, plan: ConvolutionPlan) -> Array:
        """Return the gradient of the images: the dilated dy, convolved with the flipped filter."""
        win, n = plan.win, len(plan.win.size)
        if plan.groups > 1:
            w = w.reshape(*w.shape[:n], plan.groups, -1)  # (channels, multiplier) become (out, in)
        padding = [
            (r - 1 - lo, size + r - 1 - ((out - 1) * s + 1) - (r - 1 - lo))
            for size, out, s, r, (lo, _) in zip(
                win.inputs, win.outputs, win.strides, win.reach, win.padding, strict=True
            )
        ]
        w = w[(slice(None, None, -1),) * n]
        axes = ("NDHWC", "DHWOI", "NDHWC")
        return _xla(
            dy, w, axes, (1,) * n, padding, lhs_dilation=win.strides,
            rhs_dilation=win.dilations, feature_group_count=plan.groups,
        )  # fmt: skip

    @staticmethod
    def by_filter(x: Array, dy: Array, plan: ConvolutionPlan) -> Array:
        """Return the gradient of the filter: x convolved with dy, summed over the batch."""
        win = plan.win
        padding = [
            (lo, (out - 1) * s + 1 + (k - 1) * d - size - lo)
            for size, out, k, s, d, (lo, _) in zip(
                win.inputs, win.outputs, win.size, win.strides, win.dilations, win.padding,
                strict=True,
            )
        ]  # fmt: skip
        axes = ("CDHWN", "IDHWO", "DHWNC")
        return _xla(
            x, dy, axes, win.dilations, padding, rhs_dilation=win.strides,
            batch_group_count=plan.groups,
        )  # fmt: skip


class JaxOnCpu(JaxKernels):
    """Faster formulations for CPUs. `bench/formulations.py` measures them."""

    @staticmethod
    def forward(x: Array, w: Array, plan: ConvolutionPlan) -> Array:
        """Return the convolution. XLA fuses the sum over the taps of a depthwise filter."""
        if plan.groups == 1:
            return JaxKernels.forward(x, w, plan)
        x = repeat_channels(_pad_in_jax(x, plan), plan)
        return reduce(add, [x[place] * tap for place, tap in taps_of(w, plan)])

    @staticmethod
    def by_images(dy: Array, w: Array, plan: ConvolutionPlan) -> Array:
        """Return the gradient of the images."""
        if plan.groups == 1:
            return JaxKernels.by_images(dy, w, plan)
        import jax.numpy

        parts = [dy * tap for _, tap in taps_of(w, plan)]
        shape = (plan.images[0], *plan.win.padded, plan.filter[-1])
        dx = windows.place_parts(jax.numpy, parts, plan.win.places(), shape)
        return summed_copies(windows.crop_spatial(dx, plan.win.padding), plan)

    @staticmethod
    def by_filter(x: Array, dy: Array, plan: ConvolutionPlan) -> Array:
        """Return the gradient of the filter: matrix products over blocks of images.

        XLA's convolution that sums over the batch takes twice as long. A single matrix of all
        windows would exceed the cache.
        """
        import jax

        x, places = _pad_in_jax(x, plan), plan.win.places()
        if plan.groups > 1:
            x, axes = repeat_channels(x, plan), tuple(range(x.ndim - 1))
            return jax.numpy.stack([(x[at] * dy).sum(axes) for at in places]).reshape(plan.filter)

        def step(dw: Array, block: Array) -> Array:
            columns = jax.numpy.concatenate([block[0][at] for at in places], axis=-1)
            return dw + as_rows(columns).T @ as_rows(block[1]), None

        each = math.prod(plan.win.outputs) * math.prod(plan.filter[:-1]) * x.dtype.itemsize
        count = _divisor(len(x), XLA_BLOCK // each)
        blocks = [a.reshape(-1, count, *a.shape[1:]) for a in (x, dy)]
        dw = jax.numpy.zeros((math.prod(plan.filter[:-1]), plan.filter[-1]), dy.dtype)
        return jax.lax.scan(step, dw, blocks)[0].reshape(plan.filter)


XLA_BLOCK = 2**21  # bytes of a matrix of windows that is multiplied at once
MANY_TAPS = 128  # each tap is an instruction to compile


def jax_kernels(x: Array, plan: ConvolutionPlan) -> Array:
    """Choose the kernels. XLA's convolution sums half floats in float32; a sum over taps cannot."""
    import jax

    few = math.prod(plan.win.size) <= MANY_TAPS and x.dtype.itemsize >= 4
    return JaxOnCpu if few and jax.default_backend() == "cpu" else JaxKernels


@cache
def compile_kernel(compute: Kernel) -> Any:
    """Compile a kernel with XLA, so that it also runs as one program outside of a jit."""
    import jax

    return jax.jit(compute, static_argnums=2)


def _pad_in_jax(x: Array, plan: ConvolutionPlan) -> Array:
    import jax.numpy

    return windows.pad_spatial(jax.numpy, x, plan.win.padding)


def _divisor(n: int, most: int) -> int:
    """Return the largest divisor of n that is at most `most`, or 1."""
    return max(d for d in range(1, n + 1) if n % d == 0 and d <= max(most, 1))


def _xla(
    a: Array, b: Array, axes: Sequence[str], strides: Sizes, padding: Any, **options: Any
) -> Array:
    import jax

    surplus = "DHW"[: 5 - a.ndim]
    names: Any = tuple("".join(c for c in spec if c not in surplus) for spec in axes)
    return jax.lax.conv_general_dilated(a, b, strides, padding, dimension_numbers=names, **options)


# -- PyTorch: channels first (the same memory under permuted axes) -------------------------------


class TorchKernels:
    """Kernels by `torch.nn.functional.conv2d` and related functions."""

    @staticmethod
    def forward(x: Array, w: Array, plan: ConvolutionPlan) -> Array:
        """Return the convolution."""
        import torch

        x, padding = _pad_in_torch(x, plan.win)
        conv = torch.nn.functional.conv2d if len(padding) == 2 else torch.nn.functional.conv3d
        y = conv(
            x.movedim(-1, 1), _oi_first(w), None, plan.win.strides, padding, plan.win.dilations,
            plan.groups,
        )  # fmt: skip
        return y.movedim(1, -1)

    @staticmethod
    def by_images(dy: Array, w: Array, plan: ConvolutionPlan) -> Array:
        """Return the gradient of the images."""
        grad = _torch_grad()
        even = _even_padding(plan.win)
        sizes = plan.win.padded if even is None else plan.win.inputs
        dx = (grad.conv2d_input if len(sizes) == 2 else grad.conv3d_input)(
            (plan.images[0], plan.images[-1], *sizes), _oi_first(w), dy.movedim(-1, 1),
            plan.win.strides, even or (0,) * len(sizes), plan.win.dilations, plan.groups,
        ).movedim(1, -1)  # fmt: skip
        return dx if even is not None else windows.crop_spatial(dx, plan.win.padding)

    @staticmethod
    def by_filter(x: Array, dy: Array, plan: ConvolutionPlan) -> Array:
        """Return the gradient of the filter."""
        grad = _torch_grad()
        x, padding = _pad_in_torch(x, plan.win)
        *size, i, o = plan.filter
        dw = (grad.conv2d_weight if len(padding) == 2 else grad.conv3d_weight)(
            x.movedim(-1, 1), (o, i, *size), dy.movedim(-1, 1), plan.win.strides, padding,
            plan.win.dilations, plan.groups,
        )  # fmt: skip
        return dw.movedim((0, 1), (-1, -2))


def _torch_grad() -> Any:
    import torch.nn.grad  # its annotations allow only int where it also accepts pairs

    return torch.nn.grad


def _pad_in_torch(x: Array, win: Windows) -> tuple[Any, Sizes]:
    """Return x and the padding left to torch. If the sides differ, x is padded here instead."""
    import array_api_compat.torch as xp

    even = _even_padding(win)
    if even is not None:
        return x, even
    return windows.pad_spatial(xp, x, win.padding), (0,) * len(win.size)


def _even_padding(win: Windows) -> Sizes | None:
    return tuple(lo for lo, _ in win.padding) if all(lo == hi for lo, hi in win.padding) else None


def _oi_first(w: Array) -> Array:
    return w.movedim((-1, -2), (0, 1))
