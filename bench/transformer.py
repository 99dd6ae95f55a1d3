"""A training step of a small transformer: 4 layers of width 128 with 4 heads, 96 characters."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import torch.nn.functional as F

import regrad as rg
from bench.networks import (
    JAX,
    REGRAD,
    TORCH,
    Arrays,
    Batch,
    Step,
    alike,
    cross_entropy_jax,
    in_jax,
    in_regrad,
    in_torch,
)
from regrad import losses, nn

LAYERS, WIDTH, HEADS, LENGTH, SEQUENCES, CHARACTERS = 4, 128, 4, 128, 16, 96
SPLIT = (SEQUENCES, LENGTH, 3, HEADS, WIDTH // HEADS)
JOINED = (SEQUENCES, LENGTH, WIDTH)


def parameters() -> tuple[Arrays, Batch]:
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(0, 0.08, shape).astype(np.float32)

    ones, zeros = np.ones(WIDTH, np.float32), np.zeros(WIDTH, np.float32)
    p = {"characters": normal(CHARACTERS, WIDTH), "places": normal(LENGTH, WIDTH)}
    for i in range(LAYERS):
        p |= {f"scale {i}": ones, f"offset {i}": zeros}
        p |= {f"qkv {i}": normal(WIDTH, 3 * WIDTH), f"out {i}": normal(WIDTH, WIDTH)}
        p |= {f"inner scale {i}": ones, f"inner offset {i}": zeros}
        p |= {f"up {i}": normal(WIDTH, 4 * WIDTH), f"down {i}": normal(4 * WIDTH, WIDTH)}
    p["logits"] = normal(WIDTH, CHARACTERS)
    text = rng.integers(0, CHARACTERS, (SEQUENCES, LENGTH + 1)).astype(np.int32)
    return p, (text[:, :-1].copy(), text[:, 1:].copy())


# -- regrad ------------------------------------------------------------------------------------


def attention_regrad(x, qkv, out):
    q, k, v = rg.unstack(rg.permute_dims((x @ qkv).reshape(SPLIT), (2, 0, 3, 1, 4)))
    y = nn.scaled_dot_product_attention(q, k, v, is_causal=True)
    return rg.permute_dims(y, (0, 2, 1, 3)).reshape(JOINED) @ out


def in_regrads_ops(p, text, following):
    h = rg.take(p["characters"], text, axis=0) + p["places"]
    for i in range(LAYERS):
        x = nn.layer_norm(h, scale=p[f"scale {i}"], offset=p[f"offset {i}"])
        h = h + attention_regrad(x, p[f"qkv {i}"], p[f"out {i}"])
        x = nn.layer_norm(h, scale=p[f"inner scale {i}"], offset=p[f"inner offset {i}"])
        h = h + nn.relu(x @ p[f"up {i}"]) @ p[f"down {i}"]
    return losses.sparse_softmax_cross_entropy(following, h @ p["logits"])


# -- JAX ---------------------------------------------------------------------------------------


def layer_norm_jax(x, scale, offset):
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * (jax.lax.rsqrt(variance + 1e-5) * scale) + offset


def attention_jax(x, qkv, out):
    q, k, v = (x @ qkv).reshape(SPLIT).transpose(2, 0, 3, 1, 4)
    scores = q @ k.swapaxes(-1, -2) * (WIDTH // HEADS) ** -0.5
    scores = jnp.where(np.tri(LENGTH, dtype=bool), scores, -1e30)
    y = jax.nn.softmax(scores) @ v
    return y.transpose(0, 2, 1, 3).reshape(JOINED) @ out


def in_jaxs_ops(p, text, following):
    h = p["characters"][text] + p["places"]
    for i in range(LAYERS):
        x = layer_norm_jax(h, p[f"scale {i}"], p[f"offset {i}"])
        h = h + attention_jax(x, p[f"qkv {i}"], p[f"out {i}"])
        x = layer_norm_jax(h, p[f"inner scale {i}"], p[f"inner offset {i}"])
        h = h + jax.nn.relu(x @ p[f"up {i}"]) @ p[f"down {i}"]
    return cross_entropy_jax(h @ p["logits"], following)


# -- torch -------------------------------------------------------------------------------------


def attention_torch(x, qkv, out):
    q, k, v = (x @ qkv).reshape(SPLIT).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.permute(0, 2, 1, 3).reshape(JOINED) @ out


def in_torchs_ops(p, text, following):
    h = F.embedding(text, p["characters"]) + p["places"]
    for i in range(LAYERS):
        x = F.layer_norm(h, (WIDTH,), p[f"scale {i}"], p[f"offset {i}"])
        h = h + attention_torch(x, p[f"qkv {i}"], p[f"out {i}"])
        x = F.layer_norm(h, (WIDTH,), p[f"inner scale {i}"], p[f"inner offset {i}"])
        h = h + F.relu(x @ p[f"up {i}"]) @ p[f"down {i}"]
    return F.cross_entropy((h @ p["logits"]).flatten(0, 1), following.flatten())


def transformer() -> Mapping[str, Step]:
    network = parameters()
    return alike(
        {
            REGRAD: in_regrad(in_regrads_ops, *network),
            JAX: in_jax(in_jaxs_ops, *network),
            TORCH: in_torch(in_torchs_ops, *network),
        }
    )
