"""Samples of the normalising functions, and of attention, dropout and embeddings."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from regrad import nn
from tests.samples import sample, spread
from tests.samples.activation import by_torch

REAL = spread(2, 3)
PER_CHANNEL = (spread(3, seed=1), spread(3, low=0.5, high=2.0, seed=2))  # mean, variance
AFFINE = (spread(3, seed=3), spread(3, low=0.5, high=1.5, seed=4))  # offset, scale
Q, K, V = spread(2, 3, 2, seed=5), spread(2, 3, 2, seed=6), spread(2, 3, 2, seed=7)
MASK = np.array([[True, False, True], [False, True, True], [True, True, True]])


def batch_norm_by_torch(x, mean, variance, offset=None, scale=None, *, epsilon=0.001):
    tensors = [None if a is None else torch.asarray(a) for a in (x, mean, variance, scale, offset)]
    return functional.batch_norm(*tensors, eps=epsilon).numpy()


def attention_by_torch(**options):
    return by_torch(lambda *qkv: functional.scaled_dot_product_attention(*qkv, **options))


SAMPLES = [
    sample("batch_norm", nn.batch_norm, (REAL, *PER_CHANNEL, *AFFINE),
           covers=("Sub", "Rsqrt", "Mul", "AddV2"), reference=batch_norm_by_torch),
    sample("batch_norm without offset and scale", nn.batch_norm, (REAL, *PER_CHANNEL),
           reference=batch_norm_by_torch),
    sample("batch_norm with an offset, another epsilon",
           lambda x, m, v, o: nn.batch_norm(x, m, v, o, epsilon=0.1),
           (REAL, *PER_CHANNEL, AFFINE[0]),
           reference=lambda x, m, v, o: batch_norm_by_torch(x, m, v, o, epsilon=0.1)),
    sample("batch_norm with statistics of full rank", nn.batch_norm,
           (REAL, spread(2, 3, seed=1), spread(2, 1, low=0.5, high=2.0, seed=2)),
           reference=lambda x, m, v: (x - m) / np.sqrt(v + 0.001)),
    sample("l2_normalize over all", nn.l2_normalize, REAL,
           reference=lambda x: x / np.linalg.norm(x)),
    sample("l2_normalize over an axis", lambda x: nn.l2_normalize(x, axis=-1), REAL,
           reference=by_torch(lambda x: functional.normalize(x, dim=-1))),
]  # fmt: skip
