"""Pictures of traces, by matplotlib, which is imported when one is drawn."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from regrad.inspection.traces import GradientTrace

COLOURS = {"built-in": "#7a869a", "override": "#d9480f", "custom": "#1864ab"}


def plot_trace(trace: GradientTrace, ax: Any = None) -> Any:
    """Draw the norm that arrived at each op and that left it, on a log scale.

    Args:
        trace: The backward pass, which goes from left to right.
        ax: The matplotlib Axes to draw into; by default new ones.

    Returns:
        The Axes. Ops whose rule is an override or a custom gradient have a colour of their own;
        crosses mark gradients that died, red lines those that are not finite.
    """
    import matplotlib.pyplot as plt

    steps = trace.steps
    if ax is None:
        _, ax = plt.subplots(figsize=(max(6.0, 0.22 * len(steps)), 4.0), layout="constrained")
    places = np.arange(len(steps))
    arrived = np.array([step.arrived.norm if step.arrived else math.nan for step in steps])
    sent = np.array([numbers.norm if (numbers := step.sent) else math.nan for step in steps])
    ax.plot(places, _above_zero(arrived), color="#adb5bd", lw=1, label="arrived", zorder=1)
    for kind, colour in COLOURS.items():
        mine = [i for i, step in enumerate(steps) if step.kind == kind]
        if mine:
            ax.scatter(mine, _above_zero(sent[mine]), s=22, color=colour, label=kind, zorder=2)
    dead = [i for i, step in enumerate(steps) if step.dead]
    if dead:
        ax.scatter(dead, _above_zero(arrived[dead]), marker="x", color="black", label="died")
    for i, step in enumerate(steps):
        if step.breaks:
            ax.axvline(i, color="red", lw=1)
    ax.set_yscale("log")
    ax.set_ylabel("norm of the gradient")
    ax.set_xticks(places, [step.op_type for step in steps], rotation=90, fontsize=7)
    ax.set_xlim(-0.6, len(steps) - 0.4)
    ax.legend(fontsize=7, ncols=5, loc="best")
    return ax


def _above_zero(norms: np.ndarray) -> np.ndarray:
    """Norms for a log scale, which has no place for 0 and what is not finite."""
    return np.where((norms > 0) & np.isfinite(norms), norms, np.nan)
