"""A neural ODE fits a spiral: the gradient of its solver, through the steps and by the adjoint.

The task is to find dy/dt = f(y) from one run of a spiral (Chen et al.'s, whose true f is A y³). f
is a small network. `rg.scan` takes a fixed number of Runge-Kutta steps along time, and the gradient
propagates back through all of them. The whole training step is one compiled program.

Chen et al. use another method, the adjoint. It is a second ODE that runs backwards in time and
needs only the end of the forward run. Here it is a `custom_grad`. The adjoint is the derivative of
the exact solution, and the other gradient is the derivative of the solver's steps. So the two
differ by the solver's error: a sixteenth when the step is halved, as Runge-Kutta's order is 4.

Run:     python examples/neural_ode.py [--quick]      (about a minute)
Prints:  the loss while training; the distance of the learned run from the true run; then, in
         float64, the difference between the two gradients as the steps are halved.
         Draws out/neural_ode.png: the data, the learned run, and f as arrows.
Needs:   jax, optax.
Source:  Chen, Rubanova, Bettencourt and Duvenaud, "Neural Ordinary Differential Equations", 2018,
         arXiv 1806.07366 (section 2; the spiral is from the authors' example).
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import regrad as rg

A = np.array([[-0.1, 2.0], [-2.0, -0.1]])
START, POINTS, DT = [1.3, 0.0], 400, 0.05  # of the training run


def spiral(y):
    return [(y[0] ** 3) @ A.astype(y[0].dtype)]


def network(params, y):
    w, offset, last = params
    return rg.tanh((y**3) @ w + offset) @ last


# -- the solver ----------------------------------------------------------------------------------


def rk4(f, y, dt: float):
    """Take one step of the classic Runge-Kutta method. y and f(y) are lists of tensors."""

    def ahead(h, slopes):
        return [a + h * slope for a, slope in zip(y, slopes, strict=True)]

    k1 = f(y)
    k2 = f(ahead(dt / 2, k1))
    k3 = f(ahead(dt / 2, k2))
    k4 = f(ahead(dt, k3))
    return ahead(dt / 6, [a + 2 * b + 2 * c + d for a, b, c, d in zip(k1, k2, k3, k4, strict=True)])


def solve(f, y, dt: float, steps: int):
    """Return the y at the end, and after each step."""

    def step(y, _):
        y = rk4(f, y, dt)
        return y, y

    return rg.scan(step, y, length=steps)


def end(params, y, dt: float, steps: int):
    """Return the end point of the network's ODE. The gradient goes back through the steps."""
    return solve(lambda y: [network(params, y[0])], [y], dt, steps)[0][0]


@rg.custom_grad
def end_by_adjoint(params, y, dt: float, steps: int):
    """Return the same end point. Its gradient solves da/dt = -a ∂f/∂y and sums up a ∂f/∂params."""
    last = end(params, y, dt, steps)

    def slopes(state):
        y, a, *_ = state
        value, pull = rg.vjp(network, params, y)
        dparams, dy = pull(a)
        return [value, -dy, *[-g for g in dparams]]

    def grad_func(dy):
        state = [last, dy, *[rg.zeros_like(p) for p in params]]
        _, a, *dparams = solve(slopes, state, -dt, steps)[0]
        return [dparams, a]

    return last, grad_func


def compare_gradients(params, time: float = 1.0) -> list[dict[str, float]]:
    """Compare in float64, on NumPy arrays, where scan is a Python loop."""
    params = [rg.tensor(p.numpy().astype(np.float64)) for p in params]
    y = rg.tensor(np.random.default_rng(0).uniform(-1.5, 1.5, (16, 2)))
    rows, table = (
        [],
        Table("steps", "by the adjoint, against through the steps", "of the row above"),
    )
    for steps in (10, 20, 40, 80):

        def gradient(way, steps=steps):
            dparams, dy = rg.grads(lambda p, y: rg.sum(way(p, y, time / steps, steps)))([params, y])
            return np.concatenate([g.numpy().ravel() for g in (*dparams, dy)])

        through, adjoint = gradient(end), gradient(end_by_adjoint)
        off = float(np.linalg.norm(adjoint - through) / np.linalg.norm(through))
        rows.append({"steps": steps, "difference": off})
        part = f"1/{rows[-2]['difference'] / off:.1f}" if len(rows) > 1 else ""
        table.add_row(f"{steps}", f"{off:.1e}", part)
    Console().print(table)
    return rows


# -- training --------------------------------------------------------------------------------------


def initial(hidden: int = 64) -> list[rg.Variable]:
    rng = np.random.default_rng(0)
    values = rng.normal(0, 0.5, (2, hidden)), np.zeros(hidden), rng.normal(0, 0.1, (hidden, 2))
    return [rg.Variable(v, dtype="float32") for v in values]


def train(run: np.ndarray, iterations: int, segment: int = 20, batch: int = 64):
    """Train on segments of the run with random starts."""
    params, rng = initial(), np.random.default_rng(0)
    adam = rg.train.Optimizer(optax.adam(optax.cosine_decay_schedule(1e-2, iterations)))
    adam.init(params)

    @rg.jit
    def step(pieces):
        def loss():
            _, (ys,) = solve(lambda y: [network(params, y[0])], [pieces[0]], DT, segment)
            return rg.mean(abs(ys - pieces[1:]))

        return adam.minimize(loss)

    def batches():
        for _ in range(iterations // 10):
            starts = rng.integers(0, POINTS - segment, batch)
            yield run[np.arange(segment + 1)[:, None] + starts]

    history = rg.train.fit(step, batches, epochs=10)
    return params, history["loss"]


def draw(params, run: np.ndarray, learned: np.ndarray, path: Path) -> None:
    import matplotlib.pyplot as plt

    plt.switch_backend("Agg")
    figure, axes = plt.subplots(figsize=(6, 5.6), layout="constrained")
    grid = np.stack(np.meshgrid(*[np.linspace(-1.5, 1.5, 23)] * 2), axis=-1).astype(np.float32)
    arrows = network(params, rg.tensor(grid)).numpy()
    arrows = arrows / (np.linalg.norm(arrows, axis=-1, keepdims=True) + 1e-6)
    axes.quiver(grid[..., 0], grid[..., 1], arrows[..., 0], arrows[..., 1], color="0.75", scale=35)
    axes.plot(*run.T, "k.", markersize=3, label="the run to learn from")
    axes.plot(*learned.T, "C3", lw=1.2, label="the learned run, from the same start")
    axes.set(aspect="equal", title="the learned f: its direction, and where it leads")
    axes.legend(loc="lower left")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)


def main(quick: bool = False) -> dict[str, object]:
    start = rg.tensor([START])
    _, (run,) = solve(spiral, [start], DT, POINTS)
    run = run.numpy()[:, 0]
    params, losses = train(run, iterations=200 if quick else 3000)
    print("loss:", *[f"{value:.4f}" for value in losses])
    _, (learned,) = solve(lambda y: [network(params, y[0])], [start], DT, POINTS)
    learned = learned.numpy()[:, 0]
    distance = float(np.linalg.norm(learned - run, axis=1).mean())
    print(f"the learned run is {distance:.3f} from the true one, on average over {POINTS} points")
    rows = compare_gradients(params)
    draw(params, run, learned, Path("out/neural_ode.png"))
    return {"losses": losses, "distance": distance, "gradients": rows}


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
