"""Whole training steps, compiled, against torch's: a binarised network and a transformer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F

import regrad as rg
from bench.contestants import Contestants
from bench.timing import Call
from regrad import losses, nn
from regrad.tensor import wrap

RNG = np.random.default_rng(0)
RATE = 0.01


def compiled(f: Callable[..., Any], *arrays: Any) -> Call:
    """A call of a compiled function that waits for the result."""
    run = jax.jit(f)
    return lambda: jax.block_until_ready(run(*arrays))


def traced(f: Callable[..., Any]) -> Callable[..., Any]:
    """A function of Tensors as one of JAX's arrays."""

    def of_arrays(*arrays: Any) -> Any:
        return jax.tree.map(lambda t: t._data, f(*jax.tree.map(wrap, arrays)))

    return of_arrays


def floats(*shape: int) -> np.ndarray:
    return (0.05 * RNG.normal(size=shape)).astype(np.float32)


def in_regrad(loss: Any, parameters: Any, *batch: np.ndarray) -> Any:
    """One step of gradient descent."""

    def step(parameters: Any, *batch: Any) -> Any:
        value, grads = rg.value_and_grad(lambda p: loss(p, *batch))(parameters)
        return value, jax.tree.map(lambda p, g: p - RATE * g, parameters, grads)

    return compiled(traced(step), *jax.tree.map(jnp.asarray, (parameters, *batch)))


def in_torch(loss: Any, parameters: Any, *batch: np.ndarray) -> Any:
    parameters = jax.tree.map(lambda p: torch.tensor(p, requires_grad=True), parameters)
    leaves = jax.tree.leaves(parameters)
    tensors = [torch.tensor(b) for b in batch]

    def step() -> Any:
        value = loss(parameters, *tensors)
        grads = torch.autograd.grad(value, leaves)
        with torch.no_grad():
            for p, g in zip(leaves, grads, strict=True):
                p -= RATE * g
        return value

    return step


# -- a binarised convolutional network ---------------------------------------------------------

BATCH = 64


def sign_regrad(x: Any) -> Any:
    @rg.custom_grad
    def binarise(x: Any, save: Any) -> Any:
        save([x])
        clipped = lambda dy, saved: rg.where(rg.abs(saved[0]) <= 1, dy, 0)  # noqa: E731
        return rg.where(x >= 0, 1.0, -1.0), clipped

    return binarise(x)


class SignTorch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.where(x >= 0, 1.0, -1.0)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return torch.where(x.abs() <= 1, dy, 0.0)


def binarised() -> Contestants:
    """conv 1 to 32 to 64 on 28 × 28, each with a 2×2 max-pool, then a dense layer."""
    parameters = floats(3, 3, 1, 32), floats(3, 3, 32, 64), floats(3136, 10)
    x, labels = floats(BATCH, 28, 28, 1), RNG.integers(0, 10, BATCH).astype(np.int32)

    def ours(p, x, labels):
        for w in p[:2]:
            y = nn.conv2d(x, sign_regrad(w), 1, "same")
            x = sign_regrad(nn.max_pool(y, 2, 2, "valid"))
        logits = rg.matmul(rg.reshape(x, (BATCH, -1)), sign_regrad(p[2]))
        return losses.sparse_softmax_cross_entropy(labels, logits)

    def theirs(p, x, labels):
        for w in p[:2]:
            x = SignTorch.apply(F.max_pool2d(F.conv2d(x, SignTorch.apply(w), padding=1), 2))
        return F.cross_entropy(x.reshape(BATCH, -1) @ SignTorch.apply(p[2]), labels)

    *filters, matrix = parameters
    first = (*(w.transpose(3, 2, 0, 1).copy() for w in filters), matrix)
    return {
        "regrad": in_regrad(ours, parameters, x, labels),
        "torch": in_torch(theirs, first, x.transpose(0, 3, 1, 2).copy(), labels.astype(np.int64)),
    }


# -- a small transformer -----------------------------------------------------------------------

SEQUENCES, LENGTH, WIDTH, HEADS, LAYERS, WORDS = 16, 128, 128, 4, 4, 256
SPLIT = (SEQUENCES, LENGTH, 3, HEADS, WIDTH // HEADS)


def layer() -> dict[str, np.ndarray]:
    ones, zeros = np.ones(WIDTH, np.float32), np.zeros(WIDTH, np.float32)
    return {
        "qkv": floats(WIDTH, 3 * WIDTH),
        "out": floats(WIDTH, WIDTH),
        "up": floats(WIDTH, 4 * WIDTH),
        "down": floats(4 * WIDTH, WIDTH),
        "scale1": ones,
        "offset1": zeros,
        "scale2": ones.copy(),
        "offset2": zeros.copy(),
    }


def attention_regrad(x: Any, p: Any, mask: Any) -> Any:
    q, k, v = rg.unstack(rg.permute_dims(rg.reshape(x @ p["qkv"], SPLIT), (2, 0, 3, 1, 4)))
    scores = rg.matmul(q, k, False, True) / (WIDTH // HEADS) ** 0.5 + mask
    y = rg.permute_dims(nn.softmax(scores) @ v, (0, 2, 1, 3))
    return rg.reshape(y, (SEQUENCES, LENGTH, WIDTH)) @ p["out"]


def transformer_regrad(p: Any, words: Any, following: Any, mask: Any) -> Any:
    h = rg.take(p["words"], words, axis=0) + p["places"]
    for at in p["layers"]:
        x = nn.layer_norm(h, scale=at["scale1"], offset=at["offset1"])
        h = h + attention_regrad(x, at, mask)
        x = nn.layer_norm(h, scale=at["scale2"], offset=at["offset2"])
        h = h + nn.relu(x @ at["up"]) @ at["down"]
    return losses.sparse_softmax_cross_entropy(following, h @ p["logits"])


def attention_torch(x: Any, p: Any, mask: Any) -> Any:
    q, k, v = (x @ p["qkv"]).reshape(SPLIT).permute(2, 0, 3, 1, 4)
    scores = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5 + mask
    y = (torch.softmax(scores, -1) @ v).permute(0, 2, 1, 3)
    return y.reshape(SEQUENCES, LENGTH, WIDTH) @ p["out"]


def transformer_torch(p: Any, words: Any, following: Any, mask: Any) -> Any:
    h = p["words"][words] + p["places"]
    for at in p["layers"]:
        x = F.layer_norm(h, (WIDTH,), at["scale1"], at["offset1"])
        h = h + attention_torch(x, at, mask)
        x = F.layer_norm(h, (WIDTH,), at["scale2"], at["offset2"])
        h = h + F.relu(x @ at["up"]) @ at["down"]
    return F.cross_entropy((h @ p["logits"]).reshape(-1, WORDS), following.reshape(-1))


def transformer() -> Contestants:
    """4 layers of width 128 with 4 heads, 16 sequences of 128 words out of 256."""
    parameters = {
        "words": floats(WORDS, WIDTH),
        "places": floats(LENGTH, WIDTH),
        "layers": [layer() for _ in range(LAYERS)],
        "logits": floats(WIDTH, WORDS),
    }
    words, following = RNG.integers(0, WORDS, (2, SEQUENCES, LENGTH))
    mask = np.where(np.tril(np.ones((LENGTH, LENGTH), bool)), 0, -1e9).astype(np.float32)
    batch = words.astype(np.int32), following.astype(np.int32), mask
    return {
        "regrad": in_regrad(transformer_regrad, parameters, *batch),
        "torch": in_torch(transformer_torch, parameters, words, following, mask),
    }
