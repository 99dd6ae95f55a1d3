"""Samples of the normalising functions, and of attention, dropout and embeddings."""

from __future__ import annotations

import numpy as np

from regrad import nn
from tests.helpers.optional import optional
from tests.samples import sample, spread
from tests.samples.activation import by_torch

torch = optional("torch")
functional = optional("torch.nn.functional")

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
    sample("layer_norm", nn.layer_norm, REAL,
           reference=by_torch(lambda x: functional.layer_norm(x, (3,)))),
    sample("layer_norm with offset and scale",
           lambda x, o, s: nn.layer_norm(x, offset=o, scale=s, epsilon=0.1), (REAL, *AFFINE),
           reference=by_torch(lambda x, o, s: functional.layer_norm(x, (3,), s, o, 0.1))),
    sample("layer_norm over two axes", lambda x: nn.layer_norm(x, axis=(0, 1)), REAL,
           reference=by_torch(lambda x: functional.layer_norm(x, (2, 3)))),
    sample("l2_normalize over all", nn.l2_normalize, REAL,
           reference=lambda x: x / np.linalg.norm(x)),
    sample("l2_normalize over an axis", lambda x: nn.l2_normalize(x, axis=-1), REAL,
           reference=by_torch(lambda x: functional.normalize(x, dim=-1))),
    sample("attention", nn.scaled_dot_product_attention, (Q, K, V), covers=("MatMul", "Softmax"),
           reference=attention_by_torch()),
    sample("attention, causal", lambda *qkv: nn.scaled_dot_product_attention(*qkv, is_causal=True),
           (Q, K, V), covers="Softmax", reference=attention_by_torch(is_causal=True)),
    sample("attention with a mask", lambda *qkv: nn.scaled_dot_product_attention(*qkv, MASK),
           (Q, K, V), covers="Softmax",
           reference=attention_by_torch(attn_mask=torch.asarray(MASK))),
    sample("attention with a bias, another scale, and values of another width",
           lambda q, k, v, bias: nn.scaled_dot_product_attention(q, k, v, bias, scale=0.3),
           (Q[0], K[0], V[0, :, :1], spread(3, 3, seed=8)),
           reference=by_torch(lambda q, k, v, bias: functional.scaled_dot_product_attention(
               q[None], k[None], v[None], attn_mask=bias, scale=0.3)[0])),
    sample("dropout", lambda x: nn.dropout(x, 0.4, 3), spread(6), covers="SelectV2",
           reference=lambda x: x * (np.random.default_rng(3).random(6, np.float32) < 0.6) / 0.6),
    sample("embedding with repeated ids", lambda x: nn.embedding(x, [[2, 0], [2, 2]]),
           spread(3, 2), covers="GatherV2", reference=lambda x: x[[[2, 0], [2, 2]]]),
]  # fmt: skip
