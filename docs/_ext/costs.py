"""Figures of cost in prose, from the records of `bench`: roles `{ratio}` and `{since}`.

{ratio}`calls; compiled call: *; jax.jit` is the range of these ratios in the newest record, with
its date; its tooltip has the machine. {since}`calls; 702afd24` counts the commits that have changed
the measured code since. `bench/costs.py` reads both.
"""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxRole

from bench import costs, results


class Ratio(SphinxRole):
    """A ratio, with its date."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Return the ratio, and its date, on which a tooltip has the machine."""
        found = costs.cost(self.text, results.newest())
        date = nodes.abbreviation("", found.date, explanation=found.place)
        return [nodes.Text(f"{found.text} ("), date, nodes.Text(")")], []


class Since(SphinxRole):
    """The number of commits that have changed the measured code."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Return the number. Each build counts again."""
        self.env.note_reread()
        suite, commit = (part.strip() for part in self.text.split(";"))
        return [nodes.Text(costs.since(suite, commit))], []


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the roles."""
    app.add_role("ratio", Ratio())
    app.add_role("since", Since())
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
