"""The thumbnails of docs/howto/index.md; `python -m tests.helpers.gallery [page …]` draws them."""

from __future__ import annotations

import io
import re
import sys
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from PIL import Image

from tests.helpers.paths import DOCS

PAGES, PICTURES = DOCS / "howto", DOCS / "pictures" / "howto"
CELL = re.compile(r"^```\{code-cell\}\n(?::\S[^\n]*\n)*(.*?)^```$", re.M | re.S)
FIRST = {"dead_network", "implicit"}  # pages whose first picture says more than their last
GREY, RED = "#e4e7eb", "#f2b8ad"


def panel_of(page: str) -> tuple[Figure, object]:
    """Return the last figure that a page shows (or its first), and the region of its last panel."""
    shown: list[Figure] = []
    plt.switch_backend("Agg")  # (it replaces `show`)
    plt.show = lambda: shown.append(plt.gcf())
    scope: dict[str, object] = {"__name__": "__main__"}
    for cell in CELL.findall((PAGES / f"{page}.md").read_text(encoding="utf-8")):
        exec(cell, scope)
    figure = shown[0 if page in FIRST else -1]
    figure.canvas.draw()
    panels = [ax for ax in figure.axes if ax.get_label() != "<colorbar>"]
    region = panels[-1].get_tightbbox()
    assert region is not None
    return figure, region.padded(6).transformed(figure.dpi_scale_trans.inverted())


def boxes(*drawn: tuple[float, float, float, float, str, str], joined: bool = False) -> Figure:
    """Return boxes `(left, bottom, width, height, text, colour)`, joined one after the other."""
    figure, ax = plt.subplots(figsize=(3, 2))
    ax.set(xlim=(0, 3), ylim=(0, 2))
    ax.axis("off")
    for left, bottom, width, height, text, colour in drawn:
        style = FancyBboxPatch(
            (left, bottom), width, height, boxstyle="round,pad=0.03", fc=colour, ec="#7b8794"
        )
        ax.add_patch(style)
        ax.text(left + 0.08, bottom + height - 0.06, text, va="top", fontsize=9)
    if joined:
        for a, b in pairwise(drawn):
            ends = (b[0] - 0.04, b[1] + b[3] / 2), (a[0] + a[2] + 0.04, a[1] + a[3] / 2)
            ax.annotate("", *ends, arrowprops={"arrowstyle": "->", "color": "#52606d"})
    return figure


def curves() -> Figure:
    """Return a training that was interrupted, and goes on as if it had not been."""
    figure, ax = plt.subplots(figsize=(3, 2), layout="constrained")
    x = np.linspace(0, 6, 61)
    y = np.exp(-0.6 * x) * (1 + 0.15 * np.sin(5 * x))
    ax.plot(x, y, color="C0", lw=4, alpha=0.4)
    ax.plot(x[30:], y[30:], "C3--")
    ax.axvline(3, color="0.5", lw=1)
    ax.set(xticks=[3], xticklabels=["save"], yticks=[], ylabel="loss")
    return figure


DRAWN = {
    "one_layer": lambda: boxes(*((0.3, 0.12 + 0.48 * i, 2.4, 0.34, f"layers.{i}",
                                  RED if i == 2 else GREY) for i in range(4))),
    "name_scope": lambda: boxes(
        (0.1, 0.1, 2.8, 1.75, "encoder", "white"),
        (0.25, 0.25, 1.15, 1.15, "block0", GREY),
        (1.6, 0.25, 1.15, 1.15, "block1", GREY),
        (1.75, 0.4, 0.85, 0.5, "Relu", RED),
    ),
    "graph_picture": lambda: boxes(
        (0.1, 1.4, 0.6, 0.4, "x", "#d9f2e3"),
        (1.1, 1.4, 0.75, 0.4, "MatMul", GREY),
        (1.1, 0.2, 0.75, 0.4, "Sign", RED),
        (2.2, 0.2, 0.65, 0.4, "Sum", GREY),
        joined=True,
    ),
    "resume": curves,
}  # fmt: skip


def draw(page: str) -> None:
    """Draw the thumbnail of a page: its own picture, or a scheme for one that has none."""
    figure, region = (DRAWN[page](), None) if page in DRAWN else panel_of(page)
    with io.BytesIO() as stream:
        figure.savefig(stream, dpi=100, bbox_inches=region, format="png")
        image = Image.open(stream).convert("RGB")
    image.thumbnail((320, 220))
    PICTURES.mkdir(parents=True, exist_ok=True)
    image.quantize(48).save(PICTURES / f"{page}.png", optimize=True)
    plt.close("all")


if __name__ == "__main__":
    for page in sys.argv[1:] or sorted(p.stem for p in PAGES.glob("*.md") if p.stem != "index"):
        draw(page)
