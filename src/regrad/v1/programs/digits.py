"""The digits of scikit-learn in the form of `tensorflow.examples.tutorials.mnist.input_data`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from regrad.core.extras import needed
from regrad.v1 import dtypes
from regrad.v1.errors import warn_once

__all__ = ["DataSet", "Datasets", "read_data_sets"]

TEST = 297  # images of the test set; 1,797 in all


class DataSet:
    """Images and labels, and batches of them.

    Args:
        images: The images, or vectors of their pixels.
        labels: The labels, numbers or one-hot vectors.
        seed: The seed of the order of batches, by default NumPy's global generator.

    >>> import numpy as np
    >>> from regrad.v1.programs.digits import DataSet
    >>> data = DataSet(np.eye(3), np.arange(3), seed=0)
    >>> images, labels = data.next_batch(2)
    >>> images.shape, data.num_examples, data.epochs_completed
    ((2, 3), 3, 0)
    """

    def __init__(self, images: Any, labels: Any, seed: int | None = None) -> None:
        self.images: Any = images
        self.labels: Any = labels
        self.num_examples: int = len(images)
        self.epochs_completed: int = 0
        self._random: Any = np.random if seed is None else np.random.RandomState(seed)
        self._order = np.arange(0)
        self._drawn = 0

    def next_batch(
        self, batch_size: int, fake_data: bool = False, shuffle: bool = True
    ) -> tuple[Any, Any]:
        """Return the next images and labels. A new epoch begins in the middle of a batch."""
        while len(self._order) < batch_size:
            new = np.arange(self.num_examples)
            if shuffle:
                self._random.shuffle(new)
            self._order = np.concatenate([self._order, new])
        rows, self._order = np.split(self._order, [batch_size])
        self._drawn += batch_size
        self.epochs_completed = self._drawn // self.num_examples
        return self.images[rows], self.labels[rows]


class Datasets(NamedTuple):
    """The three parts of the data.

    >>> from regrad.v1.programs.digits import Datasets
    >>> Datasets._fields
    ('train', 'validation', 'test')
    """

    train: DataSet
    validation: DataSet
    test: DataSet


def read_data_sets(
    train_dir: str = "", fake_data: bool = False, one_hot: bool = False,
    dtype: dtypes.DTypeLike = dtypes.float32, reshape: bool = True, validation_size: int = 5000,
    seed: int | None = None, source_url: str = "",
) -> Datasets:  # fmt: skip
    """Return scikit-learn's 1,797 digits, enlarged from 8×8 to 28×28 pixels, in the form of MNIST.

    The first call warns that these are not MNIST. 297 images are the test set. The validation set
    has 200 images, or `validation_size` if it is smaller.

    Args:
        train_dir, fake_data, source_url: Without effect. Nothing is downloaded.
        one_hot: Whether labels are one-hot vectors. Otherwise they are numbers.
        dtype: float32 for pixels from 0 to 1, uint8 for pixels from 0 to 255.
        reshape: Whether images are vectors of 784 pixels. Otherwise they are (28, 28, 1).
        validation_size: The size of the validation set.
        seed: The seed of the order of batches.

    Returns:
        A `Datasets` with `train`, `validation` and `test`.

    Raises:
        MissingPackageError: scikit-learn is not installed. The error is an ImportError.

    Source: `tensorflow.examples.tutorials.mnist.input_data.read_data_sets`; Alpaydin and Kaynak
    (1998), Optical Recognition of Handwritten Digits.

    >>> import warnings
    >>> from regrad.v1.programs.digits import read_data_sets
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     data = read_data_sets(one_hot=True)
    >>> data.train.images.shape, data.validation.num_examples, data.test.labels.shape
    ((1300, 784), 200, (297, 10))
    """
    sklearn = needed("sklearn.datasets", "examples", "input_data.read_data_sets")
    warn_once(
        "input_data.read_data_sets returns the 1,797 digits of scikit-learn in regrad.v1, "
        "enlarged to 28x28 pixels, not MNIST"
    )
    pixels, numbers = sklearn.load_digits(return_X_y=True)
    large = np.kron(pixels.reshape(-1, 8, 8), np.ones((3, 3)))
    images = np.pad(large, [(0, 0), (2, 2), (2, 2)])[..., np.newaxis] / 16
    images = images.reshape(-1, 784) if reshape else images
    scale = 255 if dtypes.as_dtype(dtype) == dtypes.uint8 else 1
    images = (images * scale).astype(dtypes.to_numpy(dtype))
    labels = np.eye(10)[numbers] if one_hot else numbers.astype(np.uint8)
    order = np.random.RandomState(0).permutation(len(images))
    kept = min(validation_size, 200)
    parts = np.split(order, [len(order) - TEST - kept, len(order) - TEST])
    return Datasets(*[DataSet(images[rows], labels[rows], seed) for rows in parts])
