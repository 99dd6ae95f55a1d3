"""Words by which a page is found although its text does not have them: `search: STE, BNN`.

The line is in the front matter of a page. Each of its entries becomes an entry of the index, which
Sphinx's search ranks above words of the text, and its words become keywords of the page.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

LINE = re.compile(r"\A---\n(?:.*\n)*?search: (.+)\n(?:.*\n)*?---\n")
TITLE = re.compile(r"^# .+\n", re.M)


def words_of(text: str) -> list[str]:
    """Return the entries of a page's line."""
    found = LINE.match(text)
    return [word.strip() for word in found[1].split(",")] if found else []


def add_entries(app: Sphinx, page: str, source: list[str]) -> None:
    """Write entries of the index below the title of a page."""
    if words := words_of(source[0]):
        main = ", ".join(f"! {word}" for word in words)  # the search shows the others last
        entries = f"\n```{{index}} {main}\n```\n"
        source[0] = TITLE.sub(lambda title: title[0] + entries, source[0], count=1)


def add_keywords(app: Sphinx, doctree: nodes.document) -> None:
    """Add the words to the head of a page, where Sphinx's search reads them."""
    if words := app.env.metadata[app.env.docname].get("search"):
        doctree.insert(0, nodes.meta("", name="keywords", content=words))


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the words."""
    app.connect("source-read", add_entries)
    app.connect("doctree-read", add_keywords)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
