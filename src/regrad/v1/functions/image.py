"""`tf.image`: resize, flip and standardize images (batch, height, width, channels)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import regrad as rg
from regrad.core import dims
from regrad.core.op import TensorLike
from regrad.errors import GraphError, ShapeError
from regrad.v1.functions.random_ops import random_uniform
from regrad.v1.graph.conversion import as_sizes, build, convert_to_tensor
from regrad.v1.graph.forms import one_op, rank_of, scope, shape_of, tensor
from regrad.v1.graph.rows import row
from regrad.v1.graph.tf_names import RESIZE


class ResizeMethod:
    """The methods of `resize_images`. The methods BICUBIC and AREA are not supported.

    Source: `tf.image.ResizeMethod`.

    >>> import regrad.v1 as tf
    >>> tf.image.ResizeMethod.NEAREST_NEIGHBOR
    1
    """

    BILINEAR = 0
    NEAREST_NEIGHBOR = 1
    BICUBIC = 2
    AREA = 3


def _as_floats(x: rg.Tensor) -> rg.Tensor:
    return x if x.dtype.kind == "f" and x.dtype.itemsize >= 4 else rg.astype(x, rg.float32)


@row("tf.image", f"ResizeBilinear: * size | {RESIZE}", size=as_sizes)
def resize_bilinear(images, size, align_corners=False, name=None, half_pixel_centers=False):
    """Return images resized by bilinear interpolation, as floats.

    Args:
        size: The new height and width.
        align_corners: Align the centers of the corner pixels of both images.
        half_pixel_centers: Treat pixels as squares with their centers at 1/2.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.image.resize_bilinear(rg.asarray([[[[1.0], [2.0]]]]), size=[1, 4])
    Tensor([[[[1. ],
              [1.5],
              [2. ],
              [2. ]]]], dtype=float32)
    """
    return rg.nn.resize_bilinear(_as_floats(images), size, align_corners, half_pixel_centers)


@row("tf.image", f"ResizeNearestNeighbor: * size | {RESIZE}", rg.nn.resize_nearest, size=as_sizes)
def resize_nearest_neighbor(images, size, align_corners=False, name=None, half_pixel_centers=False):
    """Return images resized by copying the nearest pixel.

    Args:
        size: The new height and width.
        align_corners: Align the centers of the corner pixels of both images.
        half_pixel_centers: Treat pixels as squares with their centers at 1/2.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.image.resize_nearest_neighbor(rg.asarray([[[[1.0], [2.0]]]]), size=[1, 4])
    Tensor([[[[1.],
              [1.],
              [2.],
              [2.]]]], dtype=float32)
    """


METHODS = resize_bilinear, resize_nearest_neighbor  # by their numbers


def resize_images(
    images: TensorLike, size: TensorLike, method: int = ResizeMethod.BILINEAR,
    align_corners: bool = False, preserve_aspect_ratio: bool = False, name: str | None = None,
) -> Any:  # fmt: skip
    """Resize images, or one image.

    Args:
        images: A tensor or array of the shape (batch, height, width, channels), or without the
            batch.
        size: The new height and width.
        method: `ResizeMethod.BILINEAR` or `NEAREST_NEIGHBOR`.
        align_corners: Align the centers of the corner pixels of both images.
        preserve_aspect_ratio: Must be false.

    Returns:
        A tensor of floats. Images that have this size are returned unchanged.

    Raises:
        GraphError: the method is not supported.

    Op types: `ResizeBilinear`, `ResizeNearestNeighbor`. Source: `tf.image.resize_images`.

    >>> with tf.Graph().as_default():
    ...     print(tf.image.resize_images(tf.zeros([1, 2, 2, 3]), [4, 6]).shape)
    (1, 4, 6, 3)
    """
    if method not in range(len(METHODS)) or preserve_aspect_ratio:
        raise GraphError(
            "resize_images: the methods are BILINEAR and NEAREST_NEIGHBOR, without "
            f"preserve_aspect_ratio; got the method {method!r}"
        )
    images, sizes = tensor(images), as_sizes(size)
    whole = isinstance(sizes, tuple) and rank_of(images) in (3, 4)
    if whole and dims.same(shape_of(images)[-3:-1], sizes):
        return images
    with scope(name or "resize", images):
        return METHODS[method](images, size, align_corners)


def flip_left_right(image: TensorLike) -> Any:
    """Return images (or one image) flipped left to right.

    Args:
        image: A tensor or array of the shape (batch, height, width, channels), or without batch.

    Returns:
        A tensor of the same shape and dtype.

    Raises:
        ShapeError: the image does not have rank 3 or 4.

    Op type: `ReverseV2`. Source: `tf.image.flip_left_right`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.image.flip_left_right([[[1], [2]], [[3], [4]]])).tolist())
    [[[2], [1]], [[4], [3]]]
    """
    return one_op(None, "flip_left_right", rg.flip, _image("flip_left_right", image), axis=-2)


def _image(what: str, image: TensorLike) -> Any:
    image = tensor(image)
    if rank_of(image) not in (3, 4, None):
        raise ShapeError(f"{what}: expected an image of rank 3, or 4 with a batch, got {image}")
    return image


def flip_up_down(image: TensorLike) -> Any:
    """Return images (or one image) flipped upside down.

    Args:
        image: A tensor or array of the shape (batch, height, width, channels), or without batch.

    Returns:
        A tensor of the same shape and dtype.

    Raises:
        ShapeError: the image does not have rank 3 or 4.

    Op type: `ReverseV2`. Source: `tf.image.flip_up_down`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.image.flip_up_down([[[1], [2]], [[3], [4]]])).tolist())
    [[[3], [4]], [[1], [2]]]
    """
    return one_op(None, "flip_up_down", rg.flip, _image("flip_up_down", image), axis=-3)


def random_flip_left_right(image: TensorLike, seed: int | None = None) -> Any:
    """Flip each image left to right with probability 1/2, at random in each run.

    Args:
        image: A tensor or array of the shape (batch, height, width, channels), or without batch.

    Returns:
        A tensor of the same shape and dtype.

    Raises:
        ShapeError: the image does not have rank 3 or 4.

    Source: `tf.image.random_flip_left_right`.

    >>> with tf.Graph().as_default():
    ...     print(tf.image.random_flip_left_right(tf.zeros([4, 5, 3])).shape)
    (4, 5, 3)
    """
    return _flip_half(flip_left_right, image, seed)


def random_flip_up_down(image: TensorLike, seed: int | None = None) -> Any:
    """Flip each image upside down with probability 1/2, at random in each run.

    Args:
        image: A tensor or array of the shape (batch, height, width, channels), or without batch.

    Returns:
        A tensor of the same shape and dtype.

    Raises:
        ShapeError: the image does not have rank 3 or 4.

    Source: `tf.image.random_flip_up_down`.

    >>> with tf.Graph().as_default():
    ...     print(tf.image.random_flip_up_down(tf.zeros([4, 5, 3])).shape)
    (4, 5, 3)
    """
    return _flip_half(flip_up_down, image, seed)


def _flip_half(flip: Callable[..., Any], image: TensorLike, seed: int | None) -> Any:
    """Return each image flipped with probability 1/2."""
    image = _image(f"random_{flip.__name__}", convert_to_tensor(image))
    shape = shape_of(image)
    with scope(f"random_{flip.__name__}"):
        each = [] if len(shape) == 3 else [shape[0], 1, 1, 1]
        half = random_uniform(each, seed=seed)
        return build("SelectV2", None, _where_less, half, flip(image), image)


def _where_less(noise: rg.Tensor, yes: rg.Tensor, no: rg.Tensor) -> Any:
    return rg.where(rg.less(noise, 0.5), yes, no)


def per_image_standardization(image: TensorLike) -> Any:
    """Return each image with mean 0 and variance 1. The divisor is at least `1 / sqrt(size)`.

    Args:
        image: A tensor or array of the shape (batch, height, width, channels), or without the
            batch.

    Returns:
        A tensor of floats, of the same shape.

    A composition. Source: `tf.image.per_image_standardization`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.image.per_image_standardization([[[1.0], [3.0]]])).tolist())
    [[[-1.0], [1.0]]]
    """
    return one_op("RealDiv", "per_image_standardization", _standardize, image)


def _standardize(x: rg.Tensor) -> Any:
    x, axes = _as_floats(x), (-3, -2, -1)
    count = rg.sum(rg.ones_like(x), axis=axes, keepdims=True)
    mean, variance = rg.nn.moments(x, axes, keepdims=True)
    return (x - mean) / rg.sqrt(rg.maximum(variance, 1 / count))
