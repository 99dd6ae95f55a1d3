"""Each how-to as a notebook, written at build time next to its page, which leads to it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jupytext
from docutils import nodes
from pages import LINK
from sphinx.application import Sphinx

ROLE = re.compile(r"\{(doc|py:obj)\}`([^`<]+?)(?:\s*<[^`>]*>)?`")
BUTTON = '<p class="notebook"><a href="{0}" download>As a notebook</a></p>'


def words_of(role: re.Match[str]) -> str:
    """Return the words of a link of the site, which leads nowhere from a notebook."""
    return f"`{role[2]}`" if role[1] == "py:obj" else role[2].rpartition("/")[2]


def add_notebook(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Write a how-to as a notebook, and lead to it."""
    if not page.startswith("howto/") or page == "howto/index":
        return
    text = Path(app.srcdir, f"{page}.md").read_text(encoding="utf-8")
    text = LINK.sub(r"\1", ROLE.sub(words_of, text))
    text = text.replace("name: python3", "name: python3\n  display_name: Python 3", 1)
    (target := Path(app.outdir, f"{page}.ipynb")).parent.mkdir(parents=True, exist_ok=True)
    jupytext.write(jupytext.reads(text, fmt="md:myst"), target)
    context["body"] = BUTTON.format(target.name) + context["body"]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the writing of notebooks."""
    app.connect("html-page-context", add_notebook)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
