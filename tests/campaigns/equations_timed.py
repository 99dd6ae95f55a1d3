"""The times of the experiment in `equations`: today's bodies, bodies or all as equations.

    python -m tests.campaigns.equations_timed [CASE]            the table (ten minutes)
    python -m tests.campaigns.equations_timed ROAD CASE ORDERS  rows of it, in this process

Roads: `today` is `rg.jit` of `rg.grad`; `bodies` is the same with the bodies of loops as equations;
`all` is `jax.jit` of `jax.grad` of a function whose every op is an equation; `jax` is the same
program in JAX's own functions.
"""

from __future__ import annotations

import cProfile
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import regrad as rg
from bench import transformer

RNG = np.random.default_rng(0)
W = (RNG.standard_normal((64, 64)) / 12).astype(np.float32)
X = RNG.standard_normal((200, 64)).astype(np.float32)
RULE = lambda dy, y: dy * (1 - y * y) * 2.0  # noqa: E731  (no derivative of tanh)
ROADS = ("today", "bodies", "all", "jax")


def chain(x: Any) -> Any:
    y = x
    for _ in range(150):
        y = rg.sin(y) * x
    return rg.sum(y)


def chain_in_jax(x: Any) -> Any:
    y = x
    for _ in range(150):
        y = jnp.sin(y) * x
    return jnp.sum(y)


def loop(w: Any, x: Any) -> Any:
    with rg.gradient_override_map({"Tanh": RULE}):
        step = lambda c, v: (rg.tanh(rg.matmul(c, w) + v), None)  # noqa: E731
        return rg.sum(rg.square(rg.scan(step, rg.zeros((64,)), x)[0]))


@jax.custom_vjp
def tanh_in_jax(x: Any) -> Any:
    return jnp.tanh(x)


tanh_in_jax.defvjp(
    lambda x: (y := tanh_in_jax(x), y), lambda y, dy: (dy * (1 - y * y) * 2.0,)
)  # (a residual that is the output, as regrad's rule has it)


def loop_in_jax(w: Any, x: Any) -> Any:
    step = lambda c, v: (tanh_in_jax(jnp.matmul(c, w) + v), None)  # noqa: E731
    return jnp.sum(jnp.square(jax.lax.scan(step, jnp.zeros(64), x)[0]))


def layers(w: Any, x: Any) -> Any:
    """A loop over 8 layers, whose body has 60 ops."""

    def layer(h: Any, w: Any) -> Any:
        for _ in range(10):
            a = rg.nn.layer_norm(h @ w)
            h = h + rg.nn.relu(a) * rg.nn.sigmoid(h) - 0.1 * a
        return h, None

    return rg.sum(rg.square(rg.scan(layer, x, w)[0]))


def layers_in_jax(w: Any, x: Any) -> Any:
    def layer(h: Any, w: Any) -> Any:
        for _ in range(10):
            a = h @ w
            a = a - a.mean(-1, keepdims=True)
            a = a * jax.lax.rsqrt(jnp.square(a).mean(-1, keepdims=True) + 1e-5)
            h = h + jax.nn.relu(a) * jax.nn.sigmoid(h) - 0.1 * a
        return h, None

    return jnp.sum(jnp.square(jax.lax.scan(layer, x, w)[0]))


def small_transformer() -> tuple[Any, Any, tuple[Any, ...]]:
    (p, (text, following)) = transformer.parameters()
    ours = lambda p: transformer.in_regrads_ops(p, text, following)  # noqa: E731
    theirs = lambda p: transformer.in_jaxs_ops(p, text, following)  # noqa: E731
    return ours, theirs, (p,)


CASES: dict[str, Callable[[], tuple[Any, Any, tuple[Any, ...]]]] = {
    "chain of 300 ops": lambda: (chain, chain_in_jax, (np.full(4, 0.9, np.float32),)),
    "scan of 200 steps": lambda: (loop, loop_in_jax, (W, X)),
    "scan of 8 layers of 60 ops": lambda: (
        layers, layers_in_jax, (np.stack([W] * 8), X[:16]),
    ),
    "transformer": small_transformer,
}  # fmt: skip


def raised(grad: Any, square: Any, f: Any, order: int) -> Any:
    """The gradient by the first argument of the squares of gradients, as often as it says."""
    for _ in range(order - 1):
        f = (lambda g: lambda *xs: square(g(*xs)))(grad(f))
    return grad(f)


def squares(xp: Any, tree: Any) -> Any:
    """The sum of the squares of all that a container holds."""
    leaves = list(tree.values()) if isinstance(tree, dict) else [tree]
    return sum((xp.sum(xp.square(leaf)) for leaf in leaves[1:]), xp.sum(xp.square(leaves[0])))


SQUARES = {xp: partial(squares, xp) for xp in (rg, jnp)}


def program(road: str, ours: Any, theirs: Any, xs: Any, order: int) -> tuple[Any, Any]:
    """The compiled gradient of this order, made anew, and its arguments."""
    if road in ("today", "bodies"):
        f = rg.jit(raised(partial(rg.grad, argnums=0), SQUARES[rg], ours, order))
        return f, [jax.tree.map(rg.tensor, x) for x in xs]
    g = theirs if road == "jax" else rg.jax.from_regrad(ours)
    return jax.jit(raised(jax.grad, SQUARES[jnp], g, order)), list(xs)


def measured(road: str, case: str, orders: int) -> list[dict[str, Any]]:
    """By order: calls and seconds to lower, microseconds of a warm call, bytes, and values."""
    if road in ("bodies", "all"):
        from tests.campaigns.equations import install

        install()
    ours, theirs, xs = CASES[case]()
    rows = []
    for order in range(1, orders + 1):
        f, args = program(road, ours, theirs, xs, order)
        with cProfile.Profile() as profile:
            f.lower(*args)
        calls = sum(entry.callcount for entry in profile.getstats())
        f, args = program(road, ours, theirs, xs, order)
        start = time.perf_counter()
        lowered = f.lower(*args)
        lower = time.perf_counter() - start
        memory = lowered.compile().memory_analysis().temp_size_in_bytes
        value = jax.tree.leaves(f(*args))
        value = [v.numpy() if hasattr(v, "numpy") else np.asarray(v) for v in value]
        times: list[float] = []
        while len(times) < 30 and sum(times) < 3:
            start = time.perf_counter()
            jax.block_until_ready([getattr(y, "_data", y) for y in jax.tree.leaves(f(*args))])
            times.append(time.perf_counter() - start)
        rows.append({
            "order": order, "calls": calls, "lower": lower, "warm": 1e6 * min(times),
            "memory": memory, "value": [float(np.abs(v.astype(np.float64)).sum()) for v in value],
        })  # fmt: skip
    return rows


def main(arguments: list[str]) -> None:
    if len(arguments) == 3:
        road, case, orders = arguments
        print(json.dumps(measured(road, case, int(orders))))
        return
    for case in arguments or CASES:
        orders = 2 if case == "transformer" else 3
        found = {}
        for turn in range(2):  # (the roads take turns; the lesser of two times counts)
            for road in ROADS:
                command = [sys.executable, "-m", __spec__.name, road, case, str(orders)]
                out = subprocess.run(command, capture_output=True, text=True)
                if out.returncode:
                    print(case, road, "fails:", out.stderr.strip().splitlines()[-1])
                    continue
                rows = json.loads(out.stdout.splitlines()[-1])
                for i, row in enumerate(rows if turn and road in found else ()):
                    for key in ("lower", "warm"):
                        row[key] = min(row[key], found[road][i][key])
                found[road] = rows
        for i in range(orders):
            for road, rows in found.items():
                row = rows[i]
                first = np.array(found["today"][i]["value"])
                apart = np.max(np.abs(np.array(row["value"]) - first) / np.abs(first))
                figures = f"{row['calls'] / 1000:.0f} | {row['lower']:.2f} | {row['warm']:.0f}"
                figures += f" | {row['memory']:,} | {apart:.1e}"
                print(f"| {case} | {i + 1} | {road} | {figures} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
