"""Tables for notebooks: small pieces of HTML, escaped, that need nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from regrad.core.reports import Table


def html_table(table: Table, notes: Sequence[str] = ()) -> str:
    """A table as HTML, with notes below it."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in table.headings)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    below = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"
