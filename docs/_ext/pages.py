"""How pages are read: a script as a page, and links from docs/ to files of the repository."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import jupytext
from nbformat import NotebookNode
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
REPOSITORY: str = SETTINGS["tool"]["regrad"]["repository"]
LINK = re.compile(r"\[([^][]+)\]\((\.\.?/[^)#]+)((?:#[^)]*)?)\)")
OPENING = re.compile(r'\A"""(.*?)"""\n', re.S)
GAP = re.compile(r"^((?:import|from) .*\n)\n+(?=import|from)", re.M)  # between imports
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def read_script(text: str) -> NotebookNode:
    """Return a script as a notebook: its docstring and its comments are the prose."""
    opening = OPENING.match(text)
    assert opening, "a script that is a page begins with a docstring"
    title, *lines = opening[1].rstrip().splitlines()
    prose = "".join(f"# {line}".rstrip() + "\n" for line in (title.rstrip("."), *lines))
    notebook = jupytext.reads(prose + GAP.sub(r"\1", text[opening.end() :]), fmt="py:light")
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "", "language": "python"}
    notebook.metadata.language_info = {"name": "python", "pygments_lexer": "python3"}
    return notebook


def lead_out(app: Sphinx, page: str, source: list[str]) -> None:
    """Lead relative links to files outside of docs/ to the repository, if that is known."""
    folder = Path(app.srcdir, page).parent

    def absolute(match: re.Match[str]) -> str:
        words, link, anchor = match.groups()
        target = Path(os.path.normpath(folder / link))
        if target.is_relative_to(app.srcdir):
            return match[0]
        inside = target.relative_to(ROOT).as_posix()
        if inside in PAGES:
            link = os.path.relpath(Path(app.srcdir, PAGES[inside]), folder)
        elif REPOSITORY:
            link = f"{REPOSITORY}/blob/main/{inside}"
        else:
            return words
        return f"[{words}]({link}{anchor})"

    source[0] = LINK.sub(absolute, source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the rewriting of links."""
    app.connect("source-read", lead_out)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
