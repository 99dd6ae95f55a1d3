"""A page for each public name, written below docs/reference/names before Sphinx looks for pages.

The `{api}` blocks of docs/reference/api place the names, and list them in tables that lead to these
pages. An address of an entry on such a page, `reference/api/nn.html#regrad.nn.relu`, leads to the
row of the table, from where `moved.js` goes on to the page. (Names of TensorFlow 1 have no pages:
`{tensorflow-api}` blocks have their entries.)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import public_names
from api_reference import entry, find, home
from docutils import nodes
from sphinx.application import Sphinx

NAMES = "reference/names"
LISTS: dict[Any, str] = {}  # of this process


def shown() -> dict[str, str]:
    """Return the names that have an entry, each with the name of the page that shows it."""
    found: dict[str, str] = {}
    for page, block in public_names.blocks():
        for name in public_names.names_of(block):
            found.setdefault(f"{block.package}.{name}", page.stem)
    return {p: page for p, page in found.items() if has_entry(p)}


def has_entry(path: str) -> bool:
    """Return whether a name has an entry of its own: not a module, not a second name."""
    return home(path) == path and not isinstance(find(path), ModuleType)


def lines_of(path: str, page: str) -> Iterator[str]:
    """Yield the lines of the page of a name."""
    title = path.replace("_", r"\_")
    yield from (":orphan:", "", title, "=" * len(title), "")
    yield from (f".. py:currentmodule:: {path.rpartition('.')[0]}", "")
    yield from entry(path)
    yield f"More names: :doc:`/reference/api/{page}`. All names: :doc:`/reference/index`."


def write_pages(app: Sphinx) -> None:
    """Write the pages that have changed since the last build, and remove pages without a name."""
    folder = Path(app.srcdir, NAMES)
    folder.mkdir(exist_ok=True)
    pages = shown()
    files = public_names.files_of(pages)
    wanted = {folder / f"{files[p]}.rst": "\n".join(lines_of(p, pages[p])) + "\n" for p in pages}
    for path in {*folder.iterdir()} - wanted.keys():
        path.unlink()
    for path, text in wanted.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def share_navigation(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Make the list of all pages once for the pages that are not in it, such as pages of names.

    It took nearly all of the time in which a page was written. On these pages no entry is the
    current one, so the list depends only on the folder, by its relative links.
    """
    if not page.startswith((f"{NAMES}/", "_modules/")):
        return
    make = context["toctree"]

    def shared(**options: Any) -> str:
        key = page.split("/")[0], page.count("/"), *sorted(options.items())
        if key not in LISTS:
            LISTS[key] = make(**options)
        return LISTS[key]

    context["toctree"] = shared


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the writing of pages."""
    app.connect("builder-inited", write_pages)
    app.connect("html-page-context", share_navigation, priority=400)  # before the theme reads it
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
