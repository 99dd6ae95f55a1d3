"""The measures of compiled mode: `rg.jit` against `jax.jit`, torch and torch.compile.

Each program is written for each library in the library's fastest mode. The results of the libraries
are compared before any timing. The measures wait for JAX's results.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import regrad as rg
from bench import networks
from bench.contestants import SMALL, Contestants, regrad_square
from bench.measures import Speed
from bench.networks import (
    JAX,
    REGRAD,
    SAME_KERNELS,
    TORCH,
    WINDOW,
    SignTorch,
    Step,
    clipped,
    sign_jax,
)
from bench.report import Measure, Row, compared, megabytes, times
from bench.timing import Call, Effort, interleaved, sampler, timed
from bench.transformer import transformer
from regrad.core.interrupts import Deferred, set_handler

COMPILED_TORCH = "torch.compile"


def waiting(f: Callable[..., Any], *args: Any) -> Call:
    """Return a call that waits for JAX's results."""
    wait = jax.block_until_ready
    return lambda: wait(f(*args))


def waiting_for_tensors(f: Callable[..., Any], *args: Any) -> Call:
    """Return a call of a function of regrad that waits for the Tensor or Tensors it returns."""
    wait = jax.block_until_ready
    if isinstance(f(*args), rg.Tensor):
        return lambda: wait(f(*args).data)
    return lambda: [wait(t.data) for t in f(*args)]


def alike(calls: Contestants, rtol: float = 1e-5) -> Contestants:
    """Return the calls unchanged. Raise if they return different numbers."""
    first, *rest = [[np.asarray(x) for x in jax.tree.leaves(call())] for call in calls.values()]
    for other in rest:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_allclose(b, a, rtol=rtol, atol=rtol * np.abs(a).max())
    return calls


# -- a custom op of 4 numbers ------------------------------------------------------------------


@jax.custom_vjp
def square_jax(a):
    return a * a


square_jax.defvjp(lambda a: (a * a, a), lambda a, dy: (dy * jnp.abs(a),))


def custom_op() -> Contestants:
    """The cost of a call with almost no computation."""
    a = jnp.asarray(SMALL)
    ours = rg.jit(rg.grad(lambda a: regrad_square(a)))
    return alike(
        {
            REGRAD: waiting_for_tensors(ours, rg.tensor(a)),
            JAX: waiting(jax.jit(jax.grad(lambda a: square_jax(a).sum())), a),
        }
    )


def from_outside() -> Contestants:
    """The gradient of a compiled function that names its module's ops, computed by the caller."""
    a = jnp.asarray(SMALL)
    ours = rg.grad(rg.jit(lambda a: rg.sum(rg.sin(a) * a)))
    theirs = jax.grad(jax.jit(lambda a: jnp.sum(jnp.sin(a) * a)))
    return alike({REGRAD: waiting_for_tensors(ours, rg.tensor(a)), JAX: waiting(theirs, a)})


# -- the clipped straight-through sign of 10 million numbers -----------------------------------


def straight_through() -> Contestants:
    """Value and gradient. The incoming gradient is an array other than ones."""
    rng = np.random.default_rng(0)
    x, dy = rng.uniform(-2, 2, (2, 10_000_000)).astype(np.float32)
    leaf, arriving = torch.tensor(x, requires_grad=True), torch.tensor(dy)
    x, dy = jnp.asarray(x), jnp.asarray(dy)

    def ours(x, dy):
        with rg.gradient_override_map({"Sign": clipped}):
            return rg.value_and_grad(rg.sign)(x, dy)

    def in_jax(x, dy):
        y, pull = jax.vjp(sign_jax, x)
        return y, *pull(dy)

    def in_torch(f):
        def call():
            y = f(leaf)
            return y.detach(), *torch.autograd.grad(y, leaf, arriving)

        return call

    calls = {
        REGRAD: waiting_for_tensors(rg.jit(ours), rg.tensor(x), rg.tensor(dy)),
        JAX: waiting(jax.jit(in_jax), x, dy),
        TORCH: in_torch(SignTorch.apply),
    }
    if why_not() is None:
        calls[COMPILED_TORCH] = in_torch(torch.compile(SignTorch.apply))
    return alike(calls)


def why_not() -> str | None:
    """Return the reason if torch.compile does not work here: on a CPU it needs a C++ compiler."""
    try:
        torch.compile(torch.sin)(torch.ones(2))
    except Exception as error:
        return str(error).splitlines()[0]
    return None


def sign(effort: Effort) -> Iterator[Row]:
    title, calls = "straight-through sign of 10 million", straight_through()
    bounds = dict.fromkeys([name for name in calls if name != REGRAD], 1.05)
    yield from Speed(title, lambda: calls, bounds, rounds=15)(effort)
    if COMPILED_TORCH not in calls:
        yield Row(title, "", COMPILED_TORCH, "", f"left out: {why_not()}", "≤ 1.05 ×", None)


# -- a loop of 1,000 steps ---------------------------------------------------------------------


def loop() -> Contestants:
    """A recurrent cell, h = tanh(x w + h u + b), forward and backward; width 64, batch 16."""
    rng = np.random.default_rng(0)
    shapes = (64, 64), (64, 64), (64,), (16, 64), (1000, 16, 64)
    w, u, b, h, xs = [jnp.asarray(0.1 * rng.normal(size=s).astype(np.float32)) for s in shapes]

    def ours(w, u, b, h, xs):
        def loss(w, u, b):
            step = lambda h, x: ((y := rg.tanh(x @ w + h @ u + b)), y)  # noqa: E731
            return rg.scan(step, h, xs)[1].square().mean()

        value, grads = rg.value_and_grads(loss)([w, u, b])
        return value, *grads

    def in_jax(w, u, b, h, xs):
        def loss(w, u, b):
            step = lambda h, x: ((y := jnp.tanh(x @ w + h @ u + b)), y)  # noqa: E731
            return jnp.square(jax.lax.scan(step, h, xs)[1]).mean()

        value, grads = jax.value_and_grad(loss, (0, 1, 2))(w, u, b)
        return value, *grads

    given = w, u, b, h, xs
    return alike(
        {
            REGRAD: waiting_for_tensors(rg.jit(ours), *map(rg.tensor, given)),
            JAX: waiting(jax.jit(in_jax), *given),
        },
        rtol=1e-4,
    )


# -- training steps ----------------------------------------------------------------------------


def calls_of(steps: Callable[[], Mapping[str, Step]]) -> Callable[[], Contestants]:
    return lambda: {name: step.call for name, step in steps().items()}


def tracing(effort: Effort) -> Iterator[Row]:
    """The first call of the convolutional network's step: trace, compilation and one run.

    Each round has new functions, for which no cache has an entry.
    """
    network = networks.cnn_parameters()
    by_hand = networks.cnn_in_jax(networks.conv_by_hand, networks.pool_by_hand)
    plain = networks.cnn_in_jax(networks.conv_jax, networks.reduce_window)
    makes: dict[str, Callable[[], Step]] = {
        REGRAD: lambda: networks.in_regrad(networks.cnn_regrad, *network),
        SAME_KERNELS: lambda: networks.in_jax(lambda *args: by_hand(*args), *network),
        WINDOW: lambda: networks.in_jax(lambda *args: plain(*args), *network),
    }
    for make in makes.values():
        make().call()  # traces JAX's own small functions, which happens only once
    samplers = {name: lambda make=make: timed(make().call, 1) for name, make in makes.items()}
    samples = interleaved(samplers, min(effort.rounds, 9))
    yield from compared("first call of the CNN's step", samples, {SAME_KERNELS: 1.5, WINDOW: None})


def memory(effort: Effort) -> Iterator[Row]:
    """XLA's memory for a step of the dense network: arguments, results, and intermediates."""
    network = networks.mlp_parameters()
    ours = networks.in_regrad(networks.mlp_regrad, *network)
    ours.call()
    theirs = networks.in_jax(networks.mlp_jax, *network)
    a, b = needed(lowered(ours)), needed(theirs.compiled.lower(*theirs.given))
    ratio, bound = times(a / b), 1.05
    yield Row(
        "peak of the MLP's step",
        *(megabytes(a), JAX, megabytes(b), ratio, f"≤ {times(bound)}", a <= bound * b),
    )


def signals(effort: Effort) -> Iterator[Row]:
    """The cost of deferring Ctrl-C in a step while it overwrites the Variables."""
    before = signal.signal(signal.SIGINT, handler := signal.default_int_handler)

    def deferring() -> None:
        with Deferred():
            pass

    def twice() -> None:
        for _ in range(2):
            set_handler(signal.SIGINT, handler)

    calls = {"regrad": deferring, "signal.signal, twice": twice}
    samplers = {name: sampler(call, effort.seconds) for name, call in calls.items()}
    samples = interleaved(samplers, effort.rounds)
    signal.signal(signal.SIGINT, before)
    yield from compared("signals wait, per step", samples, {"signal.signal, twice": None})


def needed(program: Any) -> int:
    """Return the bytes. Memory that overwrites an argument counts once."""
    m = program.compile().memory_analysis()
    parts = m.argument_size_in_bytes, m.output_size_in_bytes, m.temp_size_in_bytes
    return sum(parts) - m.alias_size_in_bytes


def lowered(step: Step) -> Any:
    """Return the only program so far of a compiled step of regrad, as JAX lowers it."""
    (program,) = step.compiled.programs.values()
    (variant,) = program.variants.values()
    tensors = [*step.given, *map(program._value, program.sources)]
    kept, places = [[tensors[i].data for i in at] for at in (variant.kept, variant.places)]
    return variant.compiled.lower(*kept, *places)


MEASURES: dict[str, Measure] = {
    "jit-signals": signals,
    "jit-custom-op": Speed("custom op of 4 floats, compiled", custom_op, {JAX: 1.2}),
    "jit-outside": Speed("gradient of a compiled function, from outside", from_outside, {JAX: 0.4}),
    "jit-sign": sign,
    "jit-mlp": Speed("step of a binarised MLP", calls_of(networks.mlp), {JAX: 1.05, TORCH: 0.9}),
    "jit-cnn": Speed(
        "step of a binarised CNN",
        calls_of(networks.cnn),
        {WINDOW: 0.5, SAME_KERNELS: 1.05, TORCH: 0.95},
        rounds=15,
    ),
    "jit-transformer": Speed(
        "step of a transformer", calls_of(transformer), {JAX: 1.05, TORCH: 0.9}, rounds=15
    ),
    "jit-scan": Speed("scan of 1,000 steps and back", loop, {JAX: 1.1}),
    "jit-tracing": tracing,
    "jit-memory": memory,
}
