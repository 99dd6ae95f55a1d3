"""Formulations of kernels, compiled by JAX for one thread of the CPU.

`regrad` is the chosen formulation, called like in user code: a function of Tensors, traced. The
other rows are rejected formulations, and torch. If one of them wins by more than a tenth later (on
another processor, or with another XLA), its bound is missed and the choice must be revised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from jax import lax

import regrad as rg
from bench.contestants import Contestants
from bench.report import Measure, Row, compared
from bench.timing import Call, Effort, interleaved, sampler
from regrad import losses, nn
from regrad.core.tensor import wrap

torch.set_num_threads(1)

BOUND = 1.1
Arrays = tuple[Any, ...]


# -- calls -------------------------------------------------------------------------------------


def compiled(f: Callable[..., Any], *arrays: Any) -> Call:
    """Return a call of a compiled function that waits for the result."""
    run = jax.jit(f)
    return lambda: jax.block_until_ready(run(*arrays))


def traced(f: Callable[..., Any]) -> Callable[..., Any]:
    """Turn a function of Tensors into a function of JAX arrays."""

    def of_arrays(*arrays: Any) -> Any:
        return jax.tree.map(lambda t: t._data, f(*jax.tree.map(wrap, arrays)))

    return of_arrays


def pulled(f: Callable[..., Any], argument: int = 0) -> Callable[..., Any]:
    """Return the gradient of regrad's f by one argument. The incoming gradient comes last."""

    def pull(*args: Any) -> Any:
        *xs, dy = args
        of_one = lambda x: f(*xs[:argument], x, *xs[argument + 1 :])  # noqa: E731
        return rg.grad(of_one)(xs[argument], dy)

    return traced(pull)


def by_jax(f: Callable[..., Any], argument: int = 0) -> Callable[..., Any]:
    """Return the same gradient by JAX."""

    def pull(*args: Any) -> Any:
        *xs, dy = args
        return jax.vjp(f, *xs)[1](dy)[argument]

    return pull


def in_torch(f: Callable[..., Any], *arrays: Any, argument: int | None = None) -> Call:
    """Return torch's f, or its gradient by one argument. Images have torch's layout."""
    xs = [torch.tensor(np.asarray(a)) for a in arrays]
    xs = [x.movedim(-1, 1).contiguous() if x.ndim == 4 else x for x in xs]
    if argument is None:
        return lambda: f(*xs)
    *xs, dy = xs
    leaf = xs[argument].requires_grad_()
    return lambda: torch.autograd.grad(f(*xs), leaf, dy)


RNG = np.random.default_rng(0)


def normal(*shape: int) -> Any:
    return jnp.asarray(RNG.normal(size=shape).astype(np.float32))


@dataclass(frozen=True)
class Formulations:
    """The time of the chosen formulation against the times of the others."""

    title: str
    calls: Callable[[], Contestants]
    rounds: int = 15

    def __call__(self, effort: Effort) -> Iterator[Row]:
        samplers = {name: sampler(call, effort.seconds) for name, call in self.calls().items()}
        samples = interleaved(samplers, min(self.rounds, effort.rounds))
        bounds = {n: None if n == "torch" else BOUND for n in samplers if n != "regrad"}
        yield from compared(self.title, samples, bounds)


# -- convolution -------------------------------------------------------------------------------

X, W, DY = (64, 14, 14, 32), (3, 3, 32, 64), (64, 14, 14, 64)
DEPTHWISE, CHANNELS = (3, 3, 128, 1), (16, 14, 14, 128)


def xla(x: Any, w: Any, groups: int = 1) -> Any:
    w = w.reshape(*w.shape[:2], -1, w.shape[2] * w.shape[3]) if groups > 1 else w
    names = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=names, feature_group_count=groups
    )


def taps(x: Any, k: int = 3) -> list[Any]:
    """Return the data that the taps of a filter read."""
    _, h, w, _ = x.shape
    x = jnp.pad(x, ((0, 0), (k // 2,) * 2, (k // 2,) * 2, (0, 0)))
    return [x[:, i : i + h, j : j + w] for i in range(k) for j in range(k)]


def rows(x: Any) -> Any:
    return x.reshape(-1, x.shape[-1])


def windows_at_once(x: Any, w: Any) -> Any:
    y = rows(jnp.concatenate(taps(x), axis=-1)) @ rows(w)
    return y.reshape(*x.shape[:-1], w.shape[-1])


def product_per_tap(x: Any, w: Any) -> Any:
    parts = [rows(x) @ tap for x, tap in zip(taps(x), w.reshape(-1, *w.shape[2:]), strict=True)]
    return reduce(add, parts).reshape(*x.shape[:-1], w.shape[-1])


def by_images_in_columns(x: Any, w: Any, dy: Any) -> Any:
    """Compute a row for each window, and add the rows at the windows' positions."""
    k, n = w.shape[0], dy.shape
    columns = (rows(dy) @ rows(w).T).reshape(*n[:-1], k * k, w.shape[2])
    parts = [
        jnp.pad(columns[..., k * i + j, :], ((0, 0), (i, k - 1 - i), (j, k - 1 - j), (0, 0)))
        for i in range(k)
        for j in range(k)
    ]
    return reduce(add, parts)[:, k // 2 : k // 2 + n[1], k // 2 : k // 2 + n[2]]


def by_filter_at_once(x: Any, w: Any, dy: Any) -> Any:
    return (rows(jnp.concatenate(taps(x), axis=-1)).T @ rows(dy)).reshape(w.shape)


def by_filter_per_tap(x: Any, w: Any, dy: Any) -> Any:
    return jnp.stack([rows(tap).T @ rows(dy) for tap in taps(x)]).reshape(w.shape)


def torch_conv(x: Any, w: Any) -> Any:
    """Convolve. The last axis of w is moved, as in images: (height, out, width, in)."""
    return F.conv2d(x, w.permute(1, 3, 0, 2), padding=1)


def torch_depthwise(x: Any, w: Any) -> Any:
    """Convolve. w is (height, 1, width, channels)."""
    return F.conv2d(x, w.permute(3, 1, 0, 2), padding=1, groups=x.shape[1])


def conv(x: Any, w: Any) -> Any:
    return nn.conv2d(x, w, 1, "same")


def depthwise(x: Any, w: Any) -> Any:
    return nn.depthwise_conv2d(x, w, 1, "same")


def conv_forward() -> Contestants:
    x, w = normal(*X), normal(*W)
    return {
        "regrad": compiled(traced(conv), x, w),
        "all windows at once": compiled(windows_at_once, x, w),
        "a product per tap": compiled(product_per_tap, x, w),
        "torch": in_torch(torch_conv, x, w),
    }


def conv_images() -> Contestants:
    data = normal(*X), normal(*W), normal(*DY)
    return {
        "regrad": compiled(pulled(conv), *data),
        "added by windows": compiled(by_images_in_columns, *data),
        "torch": in_torch(torch_conv, *data, argument=0),
    }


def conv_filter() -> Contestants:
    data = normal(*X), normal(*W), normal(*DY)
    return {
        "regrad": compiled(pulled(conv, 1), *data),
        "XLA's, over the batch": compiled(by_jax(xla, 1), *data),
        "all windows at once": compiled(by_filter_at_once, *data),
        "a product per tap": compiled(by_filter_per_tap, *data),
        "torch": in_torch(torch_conv, *data, argument=1),
    }


def conv_depthwise() -> Contestants:
    x, w = normal(*CHANNELS), normal(*DEPTHWISE)
    return {
        "regrad": compiled(traced(depthwise), x, w),
        "XLA's, by groups": compiled(lambda x, w: xla(x, w, 128), x, w),
        "torch": in_torch(torch_depthwise, x, w),
    }


def depthwise_gradient(argument: int) -> Callable[[], Contestants]:
    def calls() -> Contestants:
        data = normal(*CHANNELS), normal(*DEPTHWISE), normal(*CHANNELS)
        return {
            "regrad": compiled(pulled(depthwise, argument), *data),
            "XLA's, by groups": compiled(by_jax(lambda x, w: xla(x, w, 128), argument), *data),
            "torch": in_torch(torch_depthwise, *data, argument=argument),
        }

    return calls


# -- pooling -----------------------------------------------------------------------------------


def reduce_window(x: Any, size: int, stride: int) -> Any:
    window, strides = (1, size, size, 1), (1, stride, stride, 1)
    return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, "VALID")


def reshaped(x: Any, reduction: Any) -> Any:
    n, h, w, c = x.shape
    return reduction(x.reshape(n, h // 2, 2, w // 2, 2, c), axis=(2, 4))


def pool_forward() -> Contestants:
    x = normal(64, 28, 28, 32)
    return {
        "regrad": compiled(traced(lambda x: nn.max_pool(x, 2, 2, "valid")), x),
        "reduce_window": compiled(lambda x: reduce_window(x, 2, 2), x),
        "reshape and max": compiled(lambda x: reshaped(x, jnp.max), x),
        "torch": in_torch(lambda x: F.max_pool2d(x, 2), x),
    }


def pool_gradient() -> Contestants:
    data = normal(64, 28, 28, 32), normal(64, 14, 14, 32)
    return {
        "regrad": compiled(pulled(lambda x: nn.max_pool(x, 2, 2, "valid")), *data),
        "reduce_window's": compiled(by_jax(lambda x: reduce_window(x, 2, 2)), *data),
        "reshape and max's": compiled(by_jax(lambda x: reshaped(x, jnp.max)), *data),
        "torch": in_torch(lambda x: F.max_pool2d(x, 2), *data, argument=0),
    }


def pool_overlapping() -> Contestants:
    data = normal(32, 28, 28, 32), normal(32, 13, 13, 32)
    return {
        "regrad": compiled(pulled(lambda x: nn.max_pool(x, 3, 2, "valid")), *data),
        "reduce_window's": compiled(by_jax(lambda x: reduce_window(x, 3, 2)), *data),
        "torch": in_torch(lambda x: F.max_pool2d(x, 3, 2), *data, argument=0),
    }


def pool_mean() -> Contestants:
    data = normal(64, 28, 28, 32), normal(64, 14, 14, 32)
    return {
        "regrad": compiled(pulled(lambda x: nn.avg_pool(x, 2, 2, "valid")), *data),
        "reshape and mean's": compiled(by_jax(lambda x: reshaped(x, jnp.mean)), *data),
        "torch": in_torch(lambda x: F.avg_pool2d(x, 2), *data, argument=0),
    }


# -- gathers, scatters and sorting -------------------------------------------------------------


def embedding() -> Contestants:
    """The gradient by a table from which 2048 rows are read."""
    table, dy = normal(256, 128), normal(2048, 128)
    ids = jnp.asarray(RNG.integers(0, 256, 2048).astype(np.int32))
    where, zeros = torch.tensor(np.asarray(ids)).long(), (256, 128)
    rows = torch.tensor(np.asarray(dy))

    def in_order(table, ids, dy):
        order = jnp.argsort(ids)
        return jax.ops.segment_sum(dy[order], ids[order], 256, indices_are_sorted=True)

    return {
        "regrad": compiled(pulled(lambda t, i: rg.take(t, i, axis=0)), table, ids, dy),
        "one-hot product": compiled(
            lambda table, ids, dy: jax.nn.one_hot(ids, 256).T @ dy, table, ids, dy
        ),
        "sorted segments": compiled(in_order, table, ids, dy),
        "torch": lambda: torch.zeros(zeros).index_add_(0, where, rows),
    }


def sorting() -> Contestants:
    data = normal(256, 1024), normal(256, 1024)

    def both(x, dy):
        return rg.sort(x), rg.grad(rg.sort)(x, dy)

    def sorted_twice(x, dy):
        lines = jnp.arange(x.shape[0])[:, None]
        return jnp.sort(x), jnp.zeros_like(dy).at[lines, jnp.argsort(x)].add(dy)

    return {
        "regrad": compiled(traced(both), *data),
        "sort and argsort": compiled(sorted_twice, *data),
        "torch": in_torch(lambda x: torch.sort(x)[0], *data, argument=0),
    }


def largest() -> Contestants:
    x = normal(256, 1024)
    return {
        "regrad": compiled(traced(lambda x: rg.top_k(x, 8)), x),
        "sort all": compiled(lambda x: jnp.argsort(-x)[:, :8], x),
        "torch": in_torch(lambda x: torch.topk(x, 8), x),
    }


# -- losses and normalization ------------------------------------------------------------------


def cross_entropy() -> Contestants:
    """Value and gradient for 2048 rows of 256 logits and the class label of each row."""
    logits, classes = normal(2048, 256), jnp.asarray(RNG.integers(0, 256, 2048).astype(np.int32))
    leaf = torch.tensor(np.asarray(logits)).requires_grad_()
    right = torch.tensor(np.asarray(classes)).long()

    def ours(x, labels):
        return rg.value_and_grad(lambda x: losses.sparse_softmax_cross_entropy(labels, x))(x)

    def in_jax(x, labels):
        chosen = jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], -1)
        return -chosen.mean()

    def by_comparison(x, labels):
        hot = labels[:, None] == jnp.arange(x.shape[1])
        top = x.max(-1, keepdims=True)
        e = jnp.exp(x - top)
        total = e.sum(-1, keepdims=True)
        value = (jnp.log(total) + top)[:, 0] - jnp.where(hot, x, 0).sum(-1)
        return value.mean(), (e / total - hot) / len(x)

    return {
        "regrad": compiled(traced(ours), logits, classes),
        "JAX's gradient": compiled(jax.value_and_grad(in_jax), logits, classes),
        "picked by comparison": compiled(by_comparison, logits, classes),
        "torch": lambda: torch.autograd.grad(F.cross_entropy(leaf, right), leaf),
    }


def batch_norm() -> Contestants:
    """The gradient by the data, including through mean and variance."""
    data = normal(64, 14, 14, 64), normal(64, 14, 14, 64)

    def ours(x):
        return nn.batch_norm(x, *nn.moments(x, (0, 1, 2)))

    def in_jax(x):
        mean = x.mean((0, 1, 2))
        return (x - mean) * lax.rsqrt(((x - mean) ** 2).mean((0, 1, 2)) + 1e-3)

    return {
        "regrad": compiled(pulled(ours), *data),
        "JAX's gradient": compiled(by_jax(in_jax), *data),
        "torch": in_torch(
            lambda x: F.batch_norm(x, None, None, training=True, eps=1e-3), *data, argument=0
        ),
    }


# -- products ----------------------------------------------------------------------------------


def dense() -> Contestants:
    """A dense layer on sequences: the gradient by its matrix."""
    data = normal(16, 128, 128), normal(128, 384), normal(16, 128, 384)
    return {
        "regrad": compiled(pulled(rg.matmul, 1), *data),
        "einsum": compiled(lambda x, w, dy: jnp.einsum("btd,bte->de", x, dy), *data),
        "torch": in_torch(torch.matmul, *data, argument=1),
    }


def attention(layout: str) -> Callable[..., Any]:
    """softmax(q kᵀ) v of 16 sequences of 128, 4 heads of width 32, written with einsum."""
    pairs, back = {"bhtd": ("bhqd,bhkd", "bhkd->bhqd"), "bthd": ("bqhd,bkhd", "bkhd->bqhd")}[layout]

    def f(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum(f"{pairs}->bhqk", q, k) / 32**0.5
        return jnp.einsum(f"bhqk,{back}", jax.nn.softmax(scores), v)

    return f


def heads() -> Contestants:
    """The gradient by the queries, keys and values."""
    first = [normal(16, 4, 128, 32) for _ in range(4)]
    inner = [x.swapaxes(1, 2).copy() for x in first]
    theirs = [torch.tensor(np.asarray(x)) for x in first]
    leaves = [x.requires_grad_() for x in theirs[:3]]

    def ours(q, k, v, dy):
        def f(q, k, v):
            return rg.matmul(nn.softmax(rg.matmul(q, k, False, True) / 32**0.5), v)

        return rg.grads(f)([q, k, v], dy)

    def of(f):
        return lambda q, k, v, dy: jax.vjp(f, q, k, v)[1](dy)

    def in_torch() -> Any:
        q, k, v = leaves
        y = torch.softmax(q @ k.transpose(-1, -2) / 32**0.5, -1) @ v
        return torch.autograd.grad(y, leaves, theirs[3])

    return {
        "regrad": compiled(traced(ours), *first),
        "einsum, heads first": compiled(of(attention("bhtd")), *first),
        "einsum, heads inside": compiled(of(attention("bthd")), *inner),
        "torch": in_torch,
    }


MEASURES: dict[str, Measure] = {
    "conv-forward": Formulations("convolution, 32 to 64 channels", conv_forward),
    "conv-images": Formulations("its gradient by the images", conv_images),
    "conv-filter": Formulations("its gradient by the filter", conv_filter),
    "depthwise": Formulations("depthwise convolution, 128 channels", conv_depthwise),
    "depthwise-images": Formulations("its gradient by the images", depthwise_gradient(0)),
    "depthwise-filter": Formulations("its gradient by the filter", depthwise_gradient(1)),
    "max-pool": Formulations("max_pool, 2×2", pool_forward),
    "max-pool-gradient": Formulations("its gradient", pool_gradient),
    "max-pool-overlapping": Formulations("gradient of max_pool, 3×3 by 2", pool_overlapping),
    "avg-pool-gradient": Formulations("gradient of avg_pool, 2×2", pool_mean),
    "embedding": Formulations("gradient of take, 2048 of 256 rows", embedding),
    "sort": Formulations("sort and its gradient, 256 × 1024", sorting),
    "top-k": Formulations("top_k, 8 of 1024, 256 times", largest),
    "cross-entropy": Formulations("sparse cross entropy, 2048 × 256", cross_entropy),
    "batch-norm": Formulations("gradient of batch_norm with moments", batch_norm),
    "dense": Formulations("a matrix's gradient, rank-3 input", dense),
    "attention": Formulations("gradient of attention", heads),
}
