"""A layer whose output solves an equation: z = tanh(W z + x) (deep equilibrium model).

By the implicit function theorem, the gradient depends only on the solution. With u = dy + Jᵀ u,
where J is the cell's Jacobian with respect to z, the gradient is u pulled back through one
application of the cell. The equation for u is again a fixed point, so the rule calls the function
it belongs to, and derivatives of every order are implicit, too. The memory does not depend on the
number of iterations of the forward pass.

Run:     python examples/implicit_layer.py
Prints:  compared with backpropagation through all iterations: the relative difference of first and
         second derivatives, and the bytes kept for the backward pass (the NumPy arrays that a
         tape and its closures keep alive, by tracemalloc). Draws out/implicit_layer.png.
Source:  Bai, Kolter and Koltun, "Deep Equilibrium Models", 2019, arXiv 1909.01377.
"""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np

import regrad as rg


def unrolled(cell, params, z, steps):
    for _ in range(steps):
        z = cell(params, z)
    return z


def fixed_point(cell, params, z, steps):
    """Return the z that cell(params, z) leaves unchanged, starting from the given z."""

    @rg.custom_grad
    def solve(params):
        constants = [rg.stop_gradient(p) for p in params]  # so that no order records the iterations
        solution = unrolled(cell, constants, z, steps)

        def adjoint(args, u):
            *params, solution, dy = args
            return dy + rg.grad(lambda z: cell(params, z))(solution, u)

        def grad_func(dy):
            start = rg.stop_gradient(dy)
            u = fixed_point(adjoint, [*params, solution, dy], start, steps)
            return rg.grad(lambda params: cell(params, solution))(params, u)

        return solution, grad_func

    return solve(params)


def cell(params, z):
    w, x = params
    return rg.tanh(z @ w + x)


# -- measuring ---------------------------------------------------------------------------------


def problem(size: int = 50, batch: int = 32, contraction: float = 0.9):
    """Return a random W whose spectral norm is `contraction`, and inputs x."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=(size, size))
    w *= contraction / np.linalg.norm(w, 2)
    return [rg.tensor(w), rg.tensor(rng.normal(size=(batch, size)))]


def derivatives(solver, params, steps):
    """Return the gradient g of sum(z²) with respect to W and x, and the Hessian times g."""
    zero = rg.zeros_like(params[1])

    def loss(params):
        return rg.sum(rg.square(solver(cell, params, zero, steps)))

    def half_norm(params):  # its gradient is H g
        return sum(rg.sum(rg.square(g)) for g in rg.grad(loss)(params)) / 2

    return rg.grad(loss)(params), rg.grad(half_norm)(params)


def kept_bytes(solver, params, steps) -> int:
    """Return the bytes of new arrays that are alive between the forward and backward pass."""
    arrays = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    zero, kept = rg.zeros_like(params[1]), 0

    def loss(params):
        nonlocal kept
        tracemalloc.start()
        z = solver(cell, params, zero, steps)
        traces = tracemalloc.take_snapshot().filter_traces([arrays]).traces
        kept = sum(trace.size for trace in traces)
        tracemalloc.stop()
        return rg.sum(z)

    rg.grad(loss)(params)
    return kept


def difference(found, expected) -> float:
    """Return the largest difference, relative to the largest expected number."""
    pairs = [(a.numpy(), b.numpy()) for a, b in zip(found, expected, strict=True)]
    return max(float(abs(a - b).max() / abs(b).max()) for a, b in pairs)


def compare(params, steps: int) -> dict[str, float]:
    expected, found = derivatives(unrolled, params, steps), derivatives(fixed_point, params, steps)
    return {
        "iterations": steps,
        "first": difference(found[0], expected[0]),
        "second": difference(found[1], expected[1]),
        "unrolled_bytes": kept_bytes(unrolled, params, steps),
        "implicit_bytes": kept_bytes(fixed_point, params, steps),
    }


def draw(rows: list[dict[str, float]], path: Path) -> None:
    import matplotlib.pyplot as plt

    plt.switch_backend("Agg")
    steps = [row["iterations"] for row in rows]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for order, style in (("first", "o-"), ("second", "s-")):
        left.semilogy(steps, [row[order] for row in rows], style, label=f"{order} derivatives")
    left.axhline(np.finfo(float).eps, color="gray", ls=":", label="float64's epsilon")
    left.set(xlabel="iterations", ylabel="implicit against unrolled, relative")
    for way, style in (("unrolled", "o-"), ("implicit", "s-")):
        right.loglog(steps, [row[f"{way}_bytes"] / 1024 for row in rows], style, label=way)
    right.set(xlabel="iterations", ylabel="KiB kept for the backward pass", ylim=(5, None))
    right.set_xticks(steps, [str(n) for n in steps])
    right.minorticks_off()
    for axes in (left, right):
        axes.legend()
        axes.grid(alpha=0.3)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> list[dict[str, float]]:
    """Print the table, draw it, and return its rows."""
    print("iterations   1st derivatives   2nd derivatives   bytes: unrolled   implicit")
    params = problem()
    rows = []
    for steps in (5, 10, 20, 30, 50, 100):
        row = compare(params, steps)
        print(
            f"{steps:10d} {row['first']:17.1e} {row['second']:17.1e} "
            f"{row['unrolled_bytes']:17,d} {row['implicit_bytes']:10,d}"
        )
        rows.append(row)
    draw(rows, Path("out/implicit_layer.png"))
    return rows


if __name__ == "__main__":
    main()
