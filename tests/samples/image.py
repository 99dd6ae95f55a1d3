"""Samples of dilation, resizing and space to batch."""

from __future__ import annotations

from typing import Any

import numpy as np

import regrad as rg
from regrad.ops import image
from tests.helpers.optional import optional
from tests.samples import sample, spread

torch = optional("torch")


def raw(type: str) -> Any:
    """The function of an op that is no public function."""
    return rg.find_op(type).function


def dilated(x: Any, w: Any, strides: Any, padding: Any, dilations: Any = (1, 1)) -> np.ndarray:
    """Window by window."""
    (sy, sx), (dy, dx) = strides, dilations
    x = np.pad(x, ((0, 0), *padding, (0, 0)), constant_values=-np.inf)
    h, k = dy * (w.shape[0] - 1) + 1, dx * (w.shape[1] - 1) + 1
    return np.stack(
        [
            np.stack(
                [
                    (x[:, i : i + h : dy, j : j + k : dx] + w).max(axis=(1, 2))
                    for j in range(0, x.shape[2] - k + 1, sx)
                ],
                axis=1,
            )
            for i in range(0, x.shape[1] - h + 1, sy)
        ],
        axis=1,
    )


DILATIONS = [
    # what, x, w, strides, pad, padding, dilations
    ("valid", (1, 3, 4, 1), (2, 2, 1), (1, 1), "valid", ((0, 0), (0, 0)), (1, 1)),
    ("same", (1, 3, 2, 2), (2, 2, 2), (1, 1), "same", ((0, 1), (0, 1)), (1, 1)),
    ("same with strides", (2, 3, 2, 1), (2, 1, 1), (2, 1), "same", ((0, 1), (0, 0)), (1, 1)),
    ("dilations", (1, 3, 4, 1), (2, 2, 1), (1, 1), "valid", ((0, 0), (0, 0)), (2, 3)),
    ("pairs of padding", (1, 2, 3, 1), (2, 3, 1), (1, 2), ((1, 0), (2, 1)), None, (1, 1)),
]


def dilation_rows() -> Any:
    for what, x, w, strides, pad, padding, dilations in DILATIONS:
        window = (strides, padding or pad, dilations)
        # values of x and w whose sums are distinct
        inputs = (spread(*x), spread(*w, low=-0.5, high=0.45, seed=1))
        yield sample(f"dilation2d, {what}",
                     lambda x, w, v=(strides, pad, dilations): rg.sin(image.dilation2d(x, w, *v)),
                     inputs, covers="Dilation2D",
                     reference=lambda x, w, v=window: np.sin(dilated(x, w, *v)))  # fmt: skip


TAPS = np.array([[0, 3], [2, 1]]).reshape(1, 2, 2, 1)
TAP_WINDOW = ((2, 2), (1, 2), "same", (1, 1))


def gathered(x: np.ndarray, taps: np.ndarray) -> np.ndarray:
    """Windows of 2×2, strides (1, 2), of a 2×4 image, same."""
    x = np.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0)))
    places = [(i + t // 2, 2 * j + t % 2) for (_, i, j, _), t in np.ndenumerate(taps)]
    return np.array([x[0, r, c, 0] for r, c in places]).reshape(taps.shape)


def scattered(dy: np.ndarray, taps: np.ndarray) -> np.ndarray:
    dx = np.zeros((1, 3, 4, 1))
    for (_, i, j, _), t in np.ndenumerate(taps):
        dx[0, i + t // 2, 2 * j + t % 2, 0] += dy[0, i, j, 0]
    return dx[:, :2]


def interpolated(**options: Any) -> Any:
    interpolate = torch.nn.functional.interpolate
    return lambda x: (
        interpolate(torch.from_numpy(x).movedim(-1, 1), **options).movedim(1, -1).numpy()
    )


def between(x: np.ndarray, size: Any) -> np.ndarray:
    """np.interp along both axes, corners at the upper left."""
    for axis, n in enumerate(size, 1):
        old = x.shape[axis]
        at = np.arange(n) * old / n
        x = np.apply_along_axis(lambda v, at=at, old=old: np.interp(at, range(old), v), axis, x)
    return x


def matrix(f: Any, shape: tuple[int, ...]) -> np.ndarray:
    """A linear function of images of that shape, column by column."""
    unit = np.eye(int(np.prod(shape))).reshape(-1, *shape)
    return np.stack([f(u).reshape(-1) for u in unit], axis=1)


def transpose(f: Any, shape: tuple[int, ...]) -> Any:
    return lambda dy: (matrix(f, shape).T @ dy.reshape(-1)).reshape(shape)


RESIZES = [
    # what, x, size, (align corners, half pixels), reference
    ("larger", (1, 2, 3, 1), (4, 5), (False, False), lambda x: between(x, (4, 5))),
    ("smaller", (1, 4, 3, 1), (3, 2), (False, False), lambda x: between(x, (3, 2))),
    ("aligned corners", (2, 2, 3, 1), (3, 4), (True, False),
     interpolated(size=(3, 4), mode="bilinear", align_corners=True)),
    ("half pixels", (1, 3, 2, 2), (2, 5), (False, True),
     interpolated(size=(2, 5), mode="bilinear", align_corners=False)),
    ("to a single pixel", (1, 3, 2, 1), (1, 1), (True, False), lambda x: x[:, :1, :1]),
]  # fmt: skip

NEAREST = [
    ("larger", (1, 2, 3, 1), (4, 5), (False, False), interpolated(size=(4, 5), mode="nearest")),
    ("smaller", (1, 4, 3, 1), (3, 2), (False, False), interpolated(size=(3, 2), mode="nearest")),
    ("half pixels", (2, 2, 3, 1), (3, 2), (False, True),
     interpolated(size=(3, 2), mode="nearest-exact")),
    ("aligned corners", (1, 3, 2, 2), (5, 3), (True, False),
     lambda x: x[:, [0, 1, 1, 2, 2]][:, :, [0, 1, 1]]),
]  # fmt: skip


def resize_rows(function: Any, type: str, rows: Any) -> Any:
    name = function.__name__
    for what, shape, size, options, reference in rows:
        yield sample(f"{name}, {what}", lambda x, s=size, o=options: function(x, s, *o),
                     spread(*shape), covers=type, reference=reference)  # fmt: skip
        yield sample(f"the gradient of {name}, {what}",
                     lambda dy, x=shape, s=size, o=options: raw(f"{type}Grad")(dy, x, s, *o),
                     spread(shape[0], *size, shape[3]), covers=f"{type}Grad",
                     reference=transpose(reference, shape))  # fmt: skip


def blocks(x: np.ndarray) -> np.ndarray:
    """2×3 blocks into the batch, by slices."""
    return np.concatenate([x[:, i::2, j::3] for i in range(2) for j in range(3)])


SAMPLES = [
    *dilation_rows(),
    sample("dilation2d of one image without a batch axis",
           lambda x, w: image.dilation2d(x, w, 1, "valid"),
           (spread(3, 2, 2), spread(2, 1, 2, low=-0.5, high=0.45, seed=1)), covers="Dilation2D",
           reference=lambda x, w: dilated(x[None], w, (1, 1), ((0, 0), (0, 0)))[0]),
    sample("which tap is the maximum",
           lambda x, w: raw("Dilation2DArgmax")(x, w, (1, 1), "valid", (1, 1)),
           (np.arange(6.0).reshape(1, 2, 3, 1), np.array([0.0, 5, 0, 0]).reshape(2, 2, 1)),
           covers="Dilation2DArgmax", order=0, reason="no gradient: the result is of integers",
           reference=lambda x, w: np.array([1, 1], np.int32).reshape(1, 1, 2, 1)),
    sample("elements of windows by their taps",
           lambda x, taps: raw("TapGather")(x, taps, *TAP_WINDOW), (spread(1, 2, 4, 1), TAPS),
           covers="TapGather", reference=gathered),
    sample("elements added at taps of windows",
           lambda dy, taps: raw("TapScatter")(dy, taps, (1, 2, 4, 1), *TAP_WINDOW),
           (spread(1, 2, 2, 1), TAPS), covers="TapScatter", reference=scattered),
    *resize_rows(image.resize_bilinear, "ResizeBilinear", RESIZES),
    *resize_rows(image.resize_nearest, "ResizeNearestNeighbor", NEAREST),
    sample("resize_bilinear of one image without a batch axis",
           lambda x: rg.sin(image.resize_bilinear(x, [3, 3])), spread(2, 2, 2),
           covers="ResizeBilinear", reference=lambda x: np.sin(between(x[None], (3, 3))[0])),
    sample("space_to_batch", lambda x: rg.sin(image.space_to_batch(x, [2, 3], [[0, 0], [0, 0]])),
           spread(1, 2, 3, 2), covers="SpaceToBatchND", reference=lambda x: np.sin(blocks(x))),
    sample("space_to_batch with paddings",
           lambda x: image.space_to_batch(x, (2, 3), ((1, 0), (0, 2))), spread(2, 1, 4, 1),
           covers="SpaceToBatchND",
           reference=lambda x: blocks(np.pad(x, ((0, 0), (1, 0), (0, 2), (0, 0))))),
    sample("space_to_batch of sequences", lambda x: image.space_to_batch(x, [2], [[0, 0]]),
           spread(2, 4), covers="SpaceToBatchND",
           reference=lambda x: np.concatenate([x[:, ::2], x[:, 1::2]])),
    sample("batch_to_space", lambda x: rg.sin(image.batch_to_space(x, [2, 1], [[0, 0], [0, 0]])),
           spread(2, 2, 3, 1), covers="BatchToSpaceND",
           reference=lambda x: np.sin(np.stack([x[:1], x[1:]], axis=2).reshape(1, 4, 3, 1))),
    sample("batch_to_space with crops",
           lambda x: image.batch_to_space(x, (2, 1), ((1, 0), (0, 2))), spread(2, 2, 3, 1),
           covers="BatchToSpaceND",
           reference=lambda x: np.stack([x[:1], x[1:]], axis=2).reshape(1, 4, 3, 1)[:, 1:, :1]),
]  # fmt: skip
