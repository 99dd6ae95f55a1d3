"""A reversible network: memory that does not grow with depth (RevNet).

The activations of a reversible block can be computed from its output, so none need be kept. A
single `custom_grad` rule describes this for the whole stack: the backward pass inverts block after
block, and differentiates each at once. Without the rule, the same blocks keep what a tape keeps.

Run:     python examples/reversible_network.py
Prints:  for stacks of 4 to 256 blocks, the bytes that are kept for the backward pass (the new NumPy
         arrays that are alive between forward and backward pass, by tracemalloc), the largest
         error of any gradient relative to the ordinary one, and the time of both.
         The error grows with depth, because the inverse of a block has rounding errors. Weights
         four times as large make it 2e-10. Draws out/reversible_network.png.
Source:  Gomez, Ren, Urtasun and Grosse, "The Reversible Residual Network", 2017, arXiv 1707.04585.
"""

from __future__ import annotations

import timeit
import tracemalloc
from pathlib import Path

import numpy as np

import regrad as rg

WIDTH, BATCH = 16, 64


def residual(x, w):
    return rg.tanh(x @ w)


def ordinary(halves, blocks):
    x1, x2 = halves
    for f, g in blocks:
        x1 = x1 + residual(x2, f)
        x2 = x2 + residual(x1, g)
    return x1, x2


@rg.custom_grad
def reversible(halves, blocks):
    y = ordinary(halves, blocks)

    def grad_func(dys):
        (y1, y2), (dy1, dy2) = y, dys
        dblocks = []
        for f, g in reversed(blocks):
            r, (dx, dg) = rg.value_and_grads(residual)([y1, g], dy2)
            y2, dy1 = y2 - r, dy1 + dx
            r, (dx, df) = rg.value_and_grads(residual)([y2, f], dy1)
            y1, dy2 = y1 - r, dy2 + dx
            dblocks.append((df, dg))
        return (dy1, dy2), dblocks[::-1]

    return y, grad_func


# -- measuring ---------------------------------------------------------------------------------


def array_bytes() -> int:
    """Return the bytes of all living NumPy arrays that were made since tracemalloc started."""
    arrays = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    return sum(t.size for t in tracemalloc.take_snapshot().filter_traces([arrays]).traces)


def kept_bytes(net, halves, blocks) -> int:
    """Return the bytes that stay alive between the forward and the backward pass."""
    kept = 0

    def loss(halves, blocks):
        nonlocal kept
        before = array_bytes()
        y1, y2 = net(halves, blocks)
        kept = array_bytes() - before
        return rg.sum(y1 + y2)

    tracemalloc.start()
    rg.grads(loss)([halves, blocks])
    tracemalloc.stop()
    return kept


def gradients(net, halves, blocks):
    """Return the gradients of sum(y1² + y2²) by halves and weights, and the seconds (best of 3)."""

    def loss(halves, blocks):
        y1, y2 = net(halves, blocks)
        return rg.sum(rg.square(y1) + rg.square(y2))

    seconds = min(timeit.repeat(lambda: rg.grads(loss)([halves, blocks]), number=1, repeat=3))
    (dx1, dx2), dblocks = rg.grads(loss)([halves, blocks])
    return [dx.numpy() for dx in (dx1, dx2, *(dw for pair in dblocks for dw in pair))], seconds


def compare(depth: int) -> dict[str, float]:
    """Run both versions on one random stack of `depth` blocks, in float64."""
    rng = np.random.default_rng(0)
    halves = [rg.tensor(rng.normal(size=(BATCH, WIDTH))) for _ in range(2)]
    scale = 0.25 / np.sqrt(WIDTH)
    blocks = [
        [rg.tensor(rng.normal(size=(WIDTH, WIDTH)) * scale) for _ in range(2)] for _ in range(depth)
    ]
    expected, seconds = gradients(ordinary, halves, blocks)
    found, seconds_reversible = gradients(reversible, halves, blocks)
    return {
        "blocks": depth,
        "ordinary_bytes": kept_bytes(ordinary, halves, blocks),
        "reversible_bytes": kept_bytes(reversible, halves, blocks),
        "error": max(
            float(abs(a - b).max() / abs(b).max()) for a, b in zip(found, expected, strict=True)
        ),
        "ordinary_s": seconds,
        "reversible_s": seconds_reversible,
    }


def draw(rows: list[dict[str, float]], path: Path) -> None:
    import matplotlib.pyplot as plt

    plt.switch_backend("Agg")
    depths = [row["blocks"] for row in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for way, style in (("ordinary", "o-"), ("reversible", "s-")):
        left.loglog(depths, [row[f"{way}_bytes"] / 1024 for row in rows], style, label=way)
    left.set(xlabel="blocks", ylabel="KiB kept for the backward pass", ylim=(4, None))
    left.legend()
    right.loglog(depths, [row["error"] for row in rows], "s-", color="C1")
    right.axhline(np.finfo(float).eps, color="gray", ls=":", label="float64's epsilon")
    right.set(xlabel="blocks", ylabel="largest relative gradient error", ylim=(1e-16, 1e-11))
    right.legend()
    for axes in (left, right):
        axes.set_xticks(depths, [str(d) for d in depths])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> list[dict[str, float]]:
    """Print the table, draw it, and return its rows."""
    print("blocks   bytes: ordinary  reversible   gradient error   seconds: ordinary  reversible")
    rows = []
    for depth in (4, 16, 64, 256):
        row = compare(depth)
        print(
            f"{depth:6d} {row['ordinary_bytes']:17,d} {row['reversible_bytes']:11,d} "
            f"{row['error']:16.1e} {row['ordinary_s']:19.3f} {row['reversible_s']:11.3f}"
        )
        rows.append(row)
    draw(rows, Path("out/reversible_network.png"))
    return rows


if __name__ == "__main__":
    main()
