"""The table of op types: `{op-types}`, made of the registry, the rules of torch and JAX, samples.

What a row says comes from where the library and its tests have it: rules from the registry, kinks
from the table in docs/conventions.md, torch's and JAX's names from the code that overrides use.
"""

from __future__ import annotations

import re
from typing import Any

import public_names
from api_reference import find
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from regrad.core.registry import ALIASES, OPS, Op
from regrad.core.rule import NoGradient
from regrad.jax.optypes import targets_of
from regrad.torch.optypes import families
from tests.helpers.foreign_table import spelled
from tests.helpers.sample_runs import NEEDS_VALUES, ROWS

COLUMNS = (
    "op type, function", "inputs", "rule", "convention", "dtypes", "modes", "in PyTorch",
    "in JAX",
)  # fmt: skip
CONVENTIONS = public_names.V1.with_name("conventions.md")
SPELLED = {"a ** b": "pow"}
ONLY_IN_GRAPHS = {"Const", "Placeholder"}  # and those with a state
DECLARED = re.compile(r"Op types?: ((?:`\w+`(?:, | or | and )?)+)")


def functions() -> dict[str, list[str]]:
    """Return the public functions of each op type, by what their docstrings declare."""
    found: dict[str, list[str]] = {}
    for path in sorted(public_names.public_names(), key=lambda p: (p.count("."), p)):
        declared = DECLARED.search(getattr(find(path), "__doc__", None) or "")
        for op_type in re.findall(r"`(\w+)`", declared[1]) if declared else ():
            found.setdefault(op_type, []).append(path)
    return found


def conventions() -> dict[str, str]:
    """Return what docs/conventions.md says of kinks, by the name of the function."""
    table = CONVENTIONS.read_text(encoding="utf-8").partition("| function | where | gradient |")[2]
    found: dict[str, str] = {}
    for row in table.strip().split("\n\n")[0].splitlines()[1:]:
        names, where, gradient = (cell.strip() for cell in row.strip("|").split("|"))
        for name in re.findall(r"`([^`]+)`", names):
            name = SPELLED.get(name, name.rpartition(".")[2])
            by = names.rpartition("` ")[2] if " by " in names else ""
            told = f"{by} {where} → {gradient}".strip()
            found[name] = f"{found[name]}; {told}" if name in found else told
    return found


def kind_of_rule(op: Op) -> str:
    """Return whether an op has a rule, and of which kind."""
    if isinstance(op.rule, NoGradient):
        return "not differentiable"
    return "zero everywhere" if getattr(op.rule, "flat", False) else "its own"


def dtypes(op: Op) -> str:
    """Return which dtypes an op takes."""
    numbers = "real" if op.real else "real, complex"
    if op.to_float:
        return f"{numbers}; integers become floats"
    return numbers if op.real else "all"


def modes(op: Op, values_decide: bool) -> str:
    """Return where an op runs; what decides its shape by values cannot be compiled."""
    if op.stateful or op.type in ONLY_IN_GRAPHS:
        return "graph"
    return "eager, graph" if values_decide else "eager, graph, jit"


def inputs(op: Op) -> str:
    """Return the inputs of an op and, behind a semicolon, its attributes."""
    marks = {"one": "", "optional": "?", "many": "…"}
    given = ", ".join(i.name + marks[i.kind] for i in op.inputs)
    return f"{given}; {', '.join(op.attrs)}" if op.attrs else given


class OpTypes(SphinxDirective):
    """The table, with a box that filters it."""

    def run(self) -> list[nodes.Node]:
        """Return the box and the table."""
        table = nodes.table(classes=["filtered"])
        group = nodes.tgroup(cols=len(COLUMNS))
        group += [nodes.colspec(colwidth=1) for _ in COLUMNS]
        head, body = nodes.thead(), nodes.tbody()
        head += self.row([[nodes.Text(name)] for name in COLUMNS])
        body += [self.row(cells) for cells in self.cells()]
        group += [head, body]
        table += group
        box = (
            '<div class="filter-box"><input class="table-filter" type="search" '
            'placeholder="Filter: relu, not differentiable, torch.clamp …" '
            'aria-label="Filter the table"><output></output></div>'
        )
        return [nodes.container("", nodes.raw("", box, format="html"), table)]

    def cells(self) -> list[list[list[nodes.Node]]]:
        """Return the cells of all rows."""
        public, kinks, torchs = functions(), conventions(), families()
        values = {t for row in ROWS if str(row) in NEEDS_VALUES for t in row.covers}
        older = {new: old for old, new in ALIASES.items()}
        rows = []
        for op_type, op in sorted(OPS.items(), key=lambda i: (i[0] not in public, i[0])):
            also = f" ({older[op_type]}) " if op_type in older else " "
            family = torchs.get(op_type)
            kink = "" if isinstance(op.rule, NoGradient) else kinks.get(op.name, "")
            rows.append([
                [nodes.literal("", op_type), nodes.Text(also), *self.link(public.get(op_type))],
                [nodes.Text(inputs(op))],
                [nodes.Text(kind_of_rule(op))],
                [nodes.Text(kink.replace("`", ""))],
                [nodes.Text(dtypes(op))],
                [nodes.Text(modes(op, op_type in values))],
                codes(dict.fromkeys(spelled(family))) if family else [],
                codes(dict.fromkeys(target.name for target in targets_of(op_type))),
            ])  # fmt: skip
        return rows

    def link(self, paths: list[str] | None) -> list[nodes.Node]:
        """Return a reference to the entry of the first of some functions."""
        if not paths:
            return []
        label = f"{paths[0].removeprefix('regrad.')} <{paths[0]}>"
        role = self.env.domains["py"].roles["obj"]
        return role("py:obj", f":py:obj:`{label}`", label, self.lineno, self.state.inliner)[0]

    @staticmethod
    def row(cells: list[list[nodes.Node]]) -> nodes.row:
        """Return a row of such cells."""
        row = nodes.row()
        for cell in cells:
            entry, paragraph = nodes.entry(), nodes.paragraph()
            paragraph += cell
            entry += paragraph
            row += entry
        return row


def codes(names: Any) -> list[nodes.Node]:
    """Return names as code, with commas between them."""
    found: list[nodes.Node] = []
    for name in names:
        found += [nodes.Text(", ")] if found else []
        found.append(nodes.literal("", name))
    return found


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("op-types", OpTypes)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
