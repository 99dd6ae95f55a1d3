"""Blocks of images as channels: `tf.space_to_depth` and its inverse."""

from __future__ import annotations

import regrad as rg
from regrad.v1.graph.rows import row

__all__ = ["depth_to_space", "space_to_depth"]


@row("tf", None, block_size=int, data_format=None, deferred=True)
def space_to_depth(input, block_size, name=None, data_format="NHWC"):
    """Move square blocks of images to the channels.

    Args:
        input: A tensor of the shape (batch, height, width, channels).
        block_size: The height and width of a block, which divide the sizes of the image.

    Returns:
        A tensor with the square of the block size as many channels.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.space_to_depth(rg.asarray([[[[1], [2]], [[3], [4]]]]), 2)
    Tensor([[[[1, 2, 3, 4]]]], dtype=int64)
    """
    n, height, width, channels = input.shape
    k = block_size
    x = rg.reshape(input, (n, height // k, k, width // k, k, channels))
    x = rg.permute_dims(x, (0, 1, 3, 2, 4, 5))
    return rg.reshape(x, (n, height // k, width // k, k * k * channels))


@row("tf", None, block_size=int, data_format=None, deferred=True)
def depth_to_space(input, block_size, name=None, data_format="NHWC"):
    """Move channels of images to square blocks, the inverse of `space_to_depth`.

    Args:
        input: A tensor of the shape (batch, height, width, channels).
        block_size: The height and width of a block. Its square divides the number of channels.

    Returns:
        A tensor with the block size times the height and the width.

    >>> import regrad as rg
    >>> import regrad.v1 as tf
    >>> tf.depth_to_space(rg.asarray([[[[1, 2, 3, 4]]]]), 2)
    Tensor([[[[1],
              [2]],
    <BLANKLINE>
             [[3],
              [4]]]], dtype=int64)
    """
    n, height, width, channels = input.shape
    k = block_size
    x = rg.reshape(input, (n, height, width, k, k, channels // (k * k)))
    x = rg.permute_dims(x, (0, 1, 3, 2, 4, 5))
    return rg.reshape(x, (n, height * k, width * k, channels // (k * k)))
