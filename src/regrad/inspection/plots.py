"""Pictures of traces and comparisons, by matplotlib, which is imported when one is drawn."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from regrad.core.extras import needed

if TYPE_CHECKING:
    from regrad.inspection.comparisons import GradientComparison
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
    plt = needed("matplotlib.pyplot", "viz", "rg.plot")

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


OCTAVES = 3.0  # the ratio of norms at which the colour is full: 8 and 1/8


def plot_comparison(comparison: GradientComparison, ax: Any = None) -> Any:
    """Draw how two gradients agree, as heat strips: a column for each argument, parameter and op.

    Args:
        comparison: What `compare_gradients` returned.
        ax: The matplotlib Axes to draw into; by default new ones.

    Returns:
        The Axes. The strips are the cosine between the two gradients (blue 1, red -1), the ratio
        of their norms on a log scale (white where they are equal, full colour from a factor of 8
        on) and the share of elements with the same sign (blue all, red none). Grey is undefined:
        a gradient is zero or missing. Names of columns are red where the difference is not
        declared, and orange where it is.
    """
    plt = needed("matplotlib.pyplot", "viz", "rg.plot")

    rows = comparison.rows
    if ax is None:
        size = (max(4.0, 1.8 + 0.35 * len(rows)), 2.8)
        _, ax = plt.subplots(figsize=size, layout="constrained")
    ratios = np.array([row.ratio for row in rows], float)
    with np.errstate(divide="ignore", invalid="ignore"):
        octaves = np.log2(ratios) / OCTAVES
    strips = np.array(
        [
            [row.cosine for row in rows],
            np.where(np.isfinite(octaves), np.clip(octaves, -1, 1), np.nan),
            [2 * row.signs - 1 for row in rows],
        ],
        float,
    ).reshape(3, len(rows))
    colours = plt.get_cmap("RdBu").with_extremes(bad="#dee2e6")
    ax.imshow(np.ma.masked_invalid(strips), cmap=colours, vmin=-1, vmax=1, aspect="auto")
    ax.set_yticks(range(3), ["cosine", "ratio of norms", "same signs"])
    names = [f"{row.op_type} by {row.name}" if row.op_type else row.name for row in rows]
    ax.set_xticks(range(len(rows)), names, rotation=90, fontsize=7)
    undeclared = list(map(id, comparison.undeclared))
    for label, row in zip(ax.get_xticklabels(), rows, strict=True):
        if id(row) in undeclared:
            label.set_color("#c92a2a")
        elif row.differs(comparison.rtol):
            label.set_color("#d9480f")
    ax.set_title(" and ".join(comparison.names), fontsize=9)
    return ax


def _above_zero(norms: np.ndarray) -> np.ndarray:
    """Norms for a log scale, which has no place for 0 and what is not finite."""
    return np.where((norms > 0) & np.isfinite(norms), norms, np.nan)
