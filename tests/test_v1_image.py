"""tf.image: standardising, resizing, random flips."""

import numpy as np
import pytest

import regrad.v1 as tf
from tests.helpers.v1_session import run

pytestmark = pytest.mark.usefixtures("graph")

IMAGES = np.random.default_rng(0).normal(size=(2, 6, 5, 3)).astype(np.float32)


def near(x, y):
    np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


def test_per_image_standardization():
    got = run(tf.image.per_image_standardization(IMAGES))
    near(got.mean((1, 2, 3)), [0, 0])
    near(got.std((1, 2, 3)), [1, 1])
    flat = run(tf.image.per_image_standardization(tf.fill([2, 2, 1], 3.0)))
    assert not flat.any()


def test_resize_images():
    x = tf.placeholder(tf.uint8, [None, 6, 5, 3])
    y = tf.image.resize_images(x, [3, 3])
    z = tf.image.resize_images(x, [3, 3], tf.image.ResizeMethod.NEAREST_NEIGHBOR)
    assert (y.dtype, z.dtype) == (tf.float32, tf.uint8)
    assert y.shape.as_list() == [None, 3, 3, 3]
    with pytest.raises(ValueError, match="methods"):
        tf.image.resize_images(x, [3, 3], tf.image.ResizeMethod.AREA)


def test_random_flips():
    x = tf.placeholder(tf.float32, [None, 1, 2, 1])
    values = np.tile(np.float32([0, 1]).reshape(1, 1, 2, 1), (100, 1, 1, 1))
    flipped = run(tf.image.random_flip_left_right(x, seed=1), {x: values})[:, 0, 0, 0]
    assert 20 < flipped.sum() < 80
    assert run(tf.image.random_flip_up_down(IMAGES[0])).shape == (6, 5, 3)
