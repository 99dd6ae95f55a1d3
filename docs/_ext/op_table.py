"""Tables of the keys of rules, generated from the code, with a box that filters the rows.

`{op-types}` lists all op types, and `{op-types} torch` the op types of PyTorch models.
`{decomposed}` lists torch's callables that compute op types among others. `{filtered}` adds the box
to a table of the page. The rows come from the library and its tests: rules from the registry, kinks
from the table in docs/conventions.md, names in torch and JAX from the code of the overrides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import public_names
import torch
import torch.nn.functional as F
import torch.overrides
from api_reference import find
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from regrad.core.registry import ALIASES, OPS, Op
from regrad.core.rule import NoGradient
from regrad.jax.optypes import targets_of
from regrad.torch.composites import fused
from regrad.torch.optypes import DUNDERS, families, spellings
from tests.helpers.sample_runs import NEEDS_VALUES, ROWS

COLUMNS = (
    "op type, function", "inputs", "rule", "convention", "dtypes", "modes", "in PyTorch",
    "in JAX",
)  # fmt: skip
IN_TORCH = "op type", "a rule may name", "in PyTorch"
APART = "callable", "decomposed if one of these has a rule"
PLACES = {
    "torch.": torch, "x.": torch.Tensor, "F.": F, "torch.special.": torch.special,
    "torch.linalg.": torch.linalg,
}  # fmt: skip
SIGNS = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "truediv": "/", "matmul": "@", "pow": "**",
    "mod": "%",
}  # fmt: skip
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
    table = CONVENTIONS.read_text(encoding="utf-8").partition("| function | at | gradient |")[2]
    found: dict[str, str] = {}
    for row in table.strip().split("\n\n")[0].splitlines()[1:]:
        names, where, gradient = (cell.strip() for cell in row.strip("|").split("|"))
        for name in re.findall(r"`([^`]+)`", names):
            name = SPELLED.get(name, name.rpartition(".")[2])
            by = f"{names.rpartition('`, ')[2]}:" if "with respect to" in names else ""
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
    """Return where an op runs. An op whose shape depends on values cannot be compiled."""
    if op.stateful or op.type in ONLY_IN_GRAPHS:
        return "graph"
    return "eager, graph" if values_decide else "eager, graph, jit"


def inputs(op: Op) -> str:
    """Return the inputs of an op and, behind a semicolon, its attributes."""
    marks = {"one": "", "optional": "?", "many": "…"}
    given = ", ".join(i.name + marks[i.kind] for i in op.inputs)
    return f"{given}; {', '.join(op.attrs)}" if op.attrs else given


def spelled(family: Any) -> Iterator[str]:
    """Yield how torch spells an op type."""
    for name in family.names:
        for place, owner in PLACES.items():
            found = spellings().get(getattr(owner, name, None))
            if found is not None and found.family.type == family.type:
                yield place + name
    words = [w for n in family.names for w in DUNDERS.get(n, "").split()]
    two = len(family.parameters) == 2
    yield from dict.fromkeys(f"x {SIGNS[w]} y" for w in words if two)
    if family.type == "Neg":
        yield "-x"


def composites() -> dict[str, Any]:
    """Return torch's callables that compute op types among others, with what is known of them."""
    rows: dict[str, Any] = {}
    for function, found in fused().items():
        if not isinstance(function, torch._ops.OpOverload):
            path = torch.overrides.resolve_name(function) or function.__name__
            rows |= {path.rpartition(".")[2]: row for row in found if row.when is None}
    return dict(sorted(rows.items()))


class Filtered(SphinxDirective):
    """A table with a box that filters it."""

    has_content = True
    optional_arguments = 1
    final_argument_whitespace = True
    classes = ("keys",)  # one table of several on a page: it scrolls

    def run(self) -> list[nodes.Node]:
        """Return the box and the table."""
        hint = self.arguments[0] if self.arguments else "relu, not differentiable, torch.clamp …"
        box = (
            '<div class="filter-box"><input class="table-filter" type="search" '
            f'placeholder="Filter: {hint}" '
            'aria-label="Filter the table"><output></output></div>'
        )
        around = nodes.container("", nodes.raw("", box, format="html"), classes=[*self.classes])
        self.add_table(around)
        for table in around.findall(nodes.table):
            table["classes"].append("filtered")
        return [around]

    def add_table(self, around: nodes.Element) -> None:
        """Add the table of the page."""
        self.state.nested_parse(self.content, self.content_offset, around)

    def make(
        self, columns: Iterable[str], rows: Iterable[Sequence[Sequence[nodes.Node]]]
    ) -> nodes.table:
        """Return a table of cells."""
        head, body, titles = nodes.thead(), nodes.tbody(), [[nodes.Text(c)] for c in columns]
        head += self.row(titles)
        body += [self.row(cells) for cells in rows]
        specs = [nodes.colspec(colwidth=1) for _ in titles]
        return nodes.table("", nodes.tgroup("", *specs, head, body, cols=len(titles)))

    @staticmethod
    def row(cells: Sequence[Sequence[nodes.Node]]) -> nodes.row:
        """Return a table row of these cells."""
        return nodes.row("", *[nodes.entry("", nodes.paragraph("", "", *cell)) for cell in cells])


class Decomposed(Filtered):
    """The callables of torch that regrad decomposes."""

    has_content = False

    def add_table(self, around: nodes.Element) -> None:
        """Add the table, made of the code."""
        around += self.make(APART, (
            [codes([name]), [*codes(sorted(row.contains)),
                             nodes.Text("" if row.parts is not None else ": refused")]]
            for name, row in composites().items()
        ))  # fmt: skip


class OpTypes(Filtered):
    """The op types."""

    has_content = False
    final_argument_whitespace = False

    def run(self) -> list[nodes.Node]:
        """Return the box and the table."""
        self.of_torch = self.arguments == ["torch"]
        self.arguments = ["relu, x @ y, conv2d …"] if self.of_torch else []
        self.classes = Filtered.classes if self.of_torch else ()
        return super().run()

    def add_table(self, around: nodes.Element) -> None:
        """Add the table, made of the code."""
        if self.of_torch:
            around += self.make(IN_TORCH, map(self.torch_cells, families().values()))
        else:
            around += self.make(COLUMNS, self.cells())

    @staticmethod
    def torch_cells(family: Any) -> list[list[nodes.Node]]:
        """Return the cells of an op type of PyTorch models."""
        taken = {ours for _, ours in family.parameters}
        names = [i.name for i in family.op.inputs] + [n for n in family.op.attrs if n in taken]
        return [codes([family.type]), codes([*names, "y"]), codes(spelled(family))]

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


def codes(names: Any) -> list[nodes.Node]:
    """Return names as code, with commas between them."""
    found: list[nodes.Node] = []
    for name in names:
        found += [nodes.Text(", ")] if found else []
        found.append(nodes.literal("", name))
    return found


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    app.add_directive("filtered", Filtered)
    app.add_directive("op-types", OpTypes)
    app.add_directive("decomposed", Decomposed)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
