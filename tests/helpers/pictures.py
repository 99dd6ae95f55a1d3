"""The pictures of README.md and docs/see.md; `python -m tests.helpers.pictures` draws them."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib
import numpy as np

import regrad as rg
from tests.helpers.paths import DOCS, ROOT

PICTURES = DOCS / "pictures"
# A program of the page, and the picture after it (and after what it prints), if there is one.
PROGRAM = re.compile(
    r"```python\n(.*?)```\n(?:\n```text\n.*?```\n)?(?:\n!\[[^]]*\]\((?:[^)]*/)?([^)]*)\))?", re.S
)


def draw() -> None:
    """Draw all pictures anew."""
    matplotlib.use("Agg")
    PICTURES.mkdir(exist_ok=True)
    scope = _run(ROOT / "README.md", stop=True)
    _regions(scope)
    _keep("circles.png")
    _run(DOCS / "see.md")


def _run(page: Path, stop: bool = False) -> dict[str, object]:
    """Run the programs of a page, and keep the figure that each leaves before a picture."""
    import matplotlib.pyplot as plt

    scope: dict[str, object] = {}
    for program, picture in PROGRAM.findall(page.read_text(encoding="utf-8")):
        exec(program, scope)
        if picture and stop:
            break
        if picture:
            _keep(picture)
        plt.close("all")
    return scope


def _regions(scope: dict[str, object]) -> None:
    """Draw what the two networks of the README have learned."""
    import matplotlib.pyplot as plt

    points, labels, model = scope["points"].numpy(), scope["labels"], scope["model"]
    a, b = np.meshgrid(*[np.linspace(-1.3, 1.3, 300)] * 2)
    grid = rg.tensor(np.stack([a.ravel(), b.ravel()], -1), dtype="float32")
    _, axes = plt.subplots(1, 2, figsize=(9, 4.4), layout="constrained")
    for ax, name, title in zip(
        axes, ("plain", "mended"), ("sign's own gradient", "a surrogate in force"), strict=True
    ):
        right = np.mean((model(scope[name], scope["points"]).numpy() > 0) == labels)
        z = model(scope[name], grid).numpy().reshape(a.shape)
        ax.contourf(a, b, z > 0, levels=1, colors=["C0", "C1"], alpha=0.2)
        ax.scatter(*points.T, c=np.where(labels, "C1", "C0"), s=8)
        ax.set(title=f"{title}: {right:.0%}", xticks=[], yticks=[])


def _keep(name: str) -> None:
    import matplotlib.pyplot as plt

    plt.gcf().savefig(PICTURES / name, dpi=70)


if __name__ == "__main__":
    draw()
