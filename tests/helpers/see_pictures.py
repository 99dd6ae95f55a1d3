"""The pictures of docs/see.md; `python -m tests.helpers.see_pictures` draws them."""

from __future__ import annotations

import re

import matplotlib

from tests.helpers.paths import DOCS

PAGE = DOCS / "see.md"
PICTURES = DOCS / "pictures"
# A program of the page, and the picture after it (and after what it prints), if there is one.
PROGRAM = re.compile(
    r"```python\n(.*?)```\n(?:\n```text\n.*?```\n)?(?:\n!\[[^]]*\]\((.*?)\))?", re.S
)


def draw() -> None:
    """Run the programs of the page, and keep the figure that each leaves before a picture."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    PICTURES.mkdir(exist_ok=True)
    scope: dict[str, object] = {}
    for program, picture in PROGRAM.findall(PAGE.read_text(encoding="utf-8")):
        exec(program, scope)
        if picture:
            plt.gcf().savefig(DOCS / picture, dpi=70)
        plt.close("all")


if __name__ == "__main__":
    draw()
