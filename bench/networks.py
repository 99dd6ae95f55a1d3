"""Training steps of small networks, written once for each library. Each takes one SGD step.

In regrad a network holds Variables, and its compiled step assigns to them. In JAX the step is a
function from old parameters to new ones. In torch it changes them in place. The binarized networks
use the sign of weights and activations. Its gradient passes where the input is in [-1, 1].
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from jax import lax

import regrad as rg
from regrad import losses, nn

torch.set_num_threads(1)

REGRAD, JAX, TORCH = "regrad", "jax.jit", "torch"
RATE = 1e-3  # small, because the measures repeat the first steps

Arrays = dict[str, np.ndarray]
Batch = tuple[np.ndarray, ...]


class Step(NamedTuple):
    """A network in training. `call` takes one step, waits for it and returns the loss."""

    call: Callable[[], Any]
    parameters: Callable[[], Mapping[str, Any]]  # returns the current parameters
    compiled: Any = None  # the function that `call` runs, to inspect its program
    given: tuple[Any, ...] = ()  # its arguments


def in_regrad(loss: Callable[..., Any], parameters: Arrays, batch: Batch) -> Step:
    variables = {name: rg.Variable(jnp.asarray(p), name=name) for name, p in parameters.items()}
    given = [rg.tensor(jnp.asarray(b)) for b in batch]

    @rg.jit
    def step(*batch):
        value, grads = rg.variable_grads(lambda: loss(variables, *batch))
        for name, v in variables.items():
            v.assign_sub(RATE * grads[name])
        return value

    def call():
        return jax.block_until_ready(step(*given).data)

    return Step(call, lambda: {n: v.numpy() for n, v in variables.items()}, step, tuple(given))


def in_jax(loss: Callable[..., Any], parameters: Arrays, batch: Batch) -> Step:
    held = [jax.tree.map(jnp.array, parameters)]
    given = [jnp.asarray(b) for b in batch]

    def step(parameters, *batch):
        value, grads = jax.value_and_grad(loss)(parameters, *batch)
        return value, jax.tree.map(lambda p, g: p - RATE * g, parameters, grads)

    step = jax.jit(step, donate_argnums=0)

    def call():
        value, held[0] = step(held[0], *given)
        return jax.block_until_ready(value)

    return Step(call, lambda: held[0], step, (held[0], *given))


def in_torch(
    loss: Callable[..., Any],
    parameters: Arrays,
    batch: Batch,
    axes: Mapping[str, Any] | None = None,
) -> Step:
    """Return a step in torch. `axes` is the order of the axes of some parameters."""
    order = {n: range(p.ndim) for n, p in parameters.items()} | dict(axes or {})
    turned = {n: p.transpose(order[n]).copy() for n, p in parameters.items()}
    held = {n: torch.tensor(p, requires_grad=True) for n, p in turned.items()}
    given = [torch.tensor(b) for b in batch]
    given = [b if b.is_floating_point() else b.long() for b in given]

    def call():
        value = loss(held, *given)
        grads = torch.autograd.grad(value, list(held.values()))
        with torch.no_grad():
            for p, g in zip(held.values(), grads, strict=True):
                p.sub_(g, alpha=RATE)
        return value.detach()

    def turned_back():
        return {n: p.detach().numpy().transpose(np.argsort(order[n])) for n, p in held.items()}

    return Step(call, turned_back)


def alike(steps: Mapping[str, Step]) -> Mapping[str, Step]:
    """Return the steps after each has taken one. Raise if a loss or a new parameter differs."""
    loss, *others = [float(step.call()) for step in steps.values()]
    np.testing.assert_allclose(others, loss, rtol=1e-5)
    first, *rest = [step.parameters() for step in steps.values()]
    for peer, (name, value) in itertools.product(rest, first.items()):
        np.testing.assert_allclose(peer[name], value, rtol=1e-3, atol=1e-6, err_msg=name)
    return steps


# -- binarized: the sign, with a clipped straight-through gradient -----------------------------


@rg.RegisterGradient("Clipped")
def clipped(dy, x):
    return rg.where(rg.abs(x) <= 1, dy, 0)


@jax.custom_vjp
def sign_jax(x):
    return jnp.sign(x)


sign_jax.defvjp(lambda x: (jnp.sign(x), x), lambda x, dy: (jnp.where(jnp.abs(x) <= 1, dy, 0.0),))


class SignTorch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return torch.where(x.abs() <= 1, dy, 0.0)


def overridden(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return a network of regrad whose signs have the clipped gradient."""

    def under_the_map(*args):
        with rg.gradient_override_map({"Sign": "Clipped"}):
            return loss(*args)

    return under_the_map


def scale(fan_in: int) -> float:
    return fan_in**-0.5


def weights(**shapes: tuple[int, ...]) -> Arrays:
    rng = np.random.default_rng(0)
    return {n: rng.uniform(-0.5, 0.5, s).astype(np.float32) for n, s in shapes.items()}


def images(*shape: int) -> Batch:
    """Return grey values in 256 steps, whose sums are exact in any order, and labels."""
    rng = np.random.default_rng(1)
    grey = (rng.integers(-128, 128, shape) / 256).astype(np.float32)
    return grey, rng.integers(0, 10, shape[0]).astype(np.int32)


def cross_entropy_jax(logits: Any, labels: Any) -> Any:
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)
    return -chosen.mean()


# -- layers of 512, 512 and 10 on 784 numbers --------------------------------------------------

WIDTHS = (784, 512, 512, 10)


def mlp_parameters() -> tuple[Arrays, Batch]:
    shapes = {f"w{i}": shape for i, shape in enumerate(itertools.pairwise(WIDTHS))}
    return weights(**shapes), images(256, 784)


@overridden
def mlp_regrad(p, x, labels):
    for i, w in enumerate(p.values()):
        x = (rg.sign(x) if i else x) @ rg.sign(w) * scale(WIDTHS[i])
    return losses.sparse_softmax_cross_entropy(labels, x)


def mlp_jax(p, x, labels):
    for i, w in enumerate(p.values()):
        x = (sign_jax(x) if i else x) @ sign_jax(w) * scale(WIDTHS[i])
    return cross_entropy_jax(x, labels)


def mlp_torch(p, x, labels):
    for i, w in enumerate(p.values()):
        x = (SignTorch.apply(x) if i else x) @ SignTorch.apply(w) * scale(WIDTHS[i])
    return F.cross_entropy(x, labels)


def mlp() -> Mapping[str, Step]:
    network = mlp_parameters()
    return alike(
        {
            REGRAD: in_regrad(mlp_regrad, *network),
            JAX: in_jax(mlp_jax, *network),
            TORCH: in_torch(mlp_torch, *network),
        }
    )


# -- convolutions from 1 to 32 to 64 channels, on 28 × 28 --------------------------------------

WINDOW, SAME_KERNELS = "jax.jit, reduce_window", "jax.jit, our kernels"
NHWC = ("NHWC", "HWIO", "NHWC")


def cnn_parameters() -> tuple[Arrays, Batch]:
    shapes = {"first": (3, 3, 1, 32), "second": (3, 3, 32, 64), "dense": (7 * 7 * 64, 10)}
    return weights(**shapes), images(64, 28, 28, 1)


@overridden
def cnn_regrad(p, x, labels):
    for w in (p["first"], p["second"]):
        y = nn.conv2d(x, rg.sign(w), 1, "same") * scale(9 * w.shape[2])
        x = rg.sign(nn.max_pool(y, 2, 2, "valid"))
    logits = x.reshape((len(x), -1)) @ rg.sign(p["dense"]) * scale(3136)
    return losses.sparse_softmax_cross_entropy(labels, logits)


def cnn_in_jax(conv: Callable[..., Any], pool: Callable[..., Any]) -> Callable[..., Any]:
    def loss(p, x, labels):
        for w in (p["first"], p["second"]):
            x = sign_jax(pool(conv(x, sign_jax(w)) * scale(9 * w.shape[2])))
        logits = x.reshape(len(x), -1) @ sign_jax(p["dense"]) * scale(3136)
        return cross_entropy_jax(logits, labels)

    return loss


def cnn_torch(p, x, labels):
    x = x.movedim(-1, 1)
    for w in (p["first"], p["second"]):
        y = F.conv2d(x, SignTorch.apply(w), padding=1) * scale(9 * w.shape[1])
        x = SignTorch.apply(F.max_pool2d(y, 2))
    logits = x.movedim(1, -1).reshape(len(x), -1) @ SignTorch.apply(p["dense"]) * scale(3136)
    return F.cross_entropy(logits, labels)


def conv_jax(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)


def reduce_window(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


# regrad's kernels on a CPU (src/regrad/ops/convolution.py, pooling.py), written by hand.


@jax.custom_vjp
def conv_by_hand(x, w):
    return conv_jax(x, w)


def conv_images(dy, w):
    flipped = ("NHWC", "HWOI", "NHWC")
    return lax.conv_general_dilated(dy, w[::-1, ::-1], (1, 1), "SAME", dimension_numbers=flipped)


def conv_filter(x, dy):
    """Multiply windows by their gradients, in blocks of images of about 2 MB."""
    n, h, w, channels = x.shape
    most = max(2**21 // (h * w * 9 * channels * 4), 1)
    count = max(d for d in range(1, n + 1) if n % d == 0 and d <= most)
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))

    def step(dw, block):
        x, dy = block
        taps = [x[:, i : i + h, j : j + w] for i in range(3) for j in range(3)]
        columns = jnp.concatenate(taps, axis=-1).reshape(-1, 9 * channels)
        return dw + columns.T @ dy.reshape(-1, dy.shape[-1]), None

    blocks = [a.reshape(-1, count, *a.shape[1:]) for a in (x, dy)]
    dw = lax.scan(step, jnp.zeros((9 * channels, dy.shape[-1])), blocks)[0]
    return dw.reshape(3, 3, channels, -1)


conv_by_hand.defvjp(
    lambda x, w: (conv_jax(x, w), (x, w)),
    lambda kept, dy: (conv_images(dy, kept[1]), conv_filter(kept[0], dy)),
)


@jax.custom_vjp
def pool_by_hand(x):
    x = jnp.maximum(x[:, ::2], x[:, 1::2])
    return jnp.maximum(x[:, :, ::2], x[:, :, 1::2])


def pool_images(x, dy):
    """Return dy at the position of the first maximum of its window, which is found by number."""
    best, *parts = [x[:, i::2, j::2] for i in range(2) for j in range(2)]
    which = jnp.zeros(best.shape, jnp.int16)
    for i, part in enumerate(parts, 1):
        better = ~(part <= best) & (best == best)
        which = jnp.maximum(which, better.astype(jnp.int16) * i)
        best = jnp.maximum(best, part)
    upon = lambda y: y[:, :, None, :, None]  # noqa: E731
    mine = upon(which) == jnp.arange(4, dtype=jnp.int16).reshape(1, 2, 1, 2, 1)
    return jnp.where(mine, upon(dy), 0).reshape(x.shape)


pool_by_hand.defvjp(
    lambda x: (pool_by_hand(x), x),
    lambda x, dy: (pool_images(x, dy),),
)


def cnn() -> Mapping[str, Step]:
    network = cnn_parameters()
    channels_first = {"first": (3, 2, 0, 1), "second": (3, 2, 0, 1)}
    return alike(
        {
            REGRAD: in_regrad(cnn_regrad, *network),
            WINDOW: in_jax(cnn_in_jax(conv_jax, reduce_window), *network),
            SAME_KERNELS: in_jax(cnn_in_jax(conv_by_hand, pool_by_hand), *network),
            TORCH: in_torch(cnn_torch, *network, axes=channels_first),
        }
    )
