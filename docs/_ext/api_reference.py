"""The API reference: `{api}` blocks list public names, and the build fails if one has no entry.

`name_pages` writes the entries of `{api}` blocks, a page for each name; `{tensorflow-api}` blocks
have the entries below their table.

```{api} regrad.nn
```
```{api} regrad
:from: regrad.ops.reduction regrad.ops.scan
```
```{tensorflow-api} tf.nn
```
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any, ClassVar

import public_names
from docutils import nodes
from docutils.parsers.rst import directives
from docutils.utils import new_document
from myst_parser.mocking import MockRSTParser
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

BACK = re.compile(r'(id="([\w.]+)">\s*<a class="viewcode-back" href=")([^"#]*)#[^"]*')
DTYPES = {
    "bool", "complex64", "complex128", "float16", "float32", "float64", "int8", "int16", "int32",
    "int64", "uint8", "uint16", "uint32", "uint64",
}  # fmt: skip
RULES_IN_TABLES = {"howto/which_rule"}
CONSTANTS = {
    "Indices": "The annotation of a tensor of integers, in a kernel.",
    "e": "Euler's number.",
    "inf": "Infinity.",
    "nan": "Not a number.",
    "newaxis": "A new axis of length 1, in an index.",
    "pi": "The ratio of a circle's circumference to its diameter.",
}


def find(path: str) -> Any:
    """Return what a dotted public name means."""
    package, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(package), name)
    except ModuleNotFoundError:
        return getattr(find(package), name)


def home(path: str) -> str:
    """Return where a name has its entry: `regrad.extend.op` and `regrad.op` are one function."""
    value, regrad = find(path), importlib.import_module("regrad")
    for name in (getattr(value, "__name__", ""), path.rpartition(".")[2]):
        if name in regrad.__all__ and getattr(regrad, name) is value:
            return f"regrad.{name}"
    return path


def summary(path: str) -> str:
    """Return one line on what a name means."""
    name = path.rpartition(".")[2]
    if name in DTYPES:
        return f"The dtype {name}."
    return CONSTANTS.get(name) or first_lines(find(path))


def first_lines(value: Any) -> str:
    """Return the first paragraph of a docstring, on one line."""
    return " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())


def label(path: str) -> str:
    """Return the name by which programs call what is at a path."""
    return path.removeprefix("regrad.").replace("v1.", "tf.")


def table_of(rows: list[tuple[str, str]]) -> list[str]:
    """Return the lines of a table of two columns."""
    head = [".. list-table::", "   :widths: 30 70", "   :class: api-table", ""]
    return [*head, *(line for a, b in rows for line in (f"   * - {a}", f"     - {b}")), ""]


def entry(path: str) -> Iterator[str]:
    """Yield the lines of reStructuredText that document one name of the current module."""
    value, name = find(path), path.rpartition(".")[2]
    if isinstance(value, type) and value.__name__ != name:
        yield from (f".. py:data:: {name}", "", f"   Another name of ``{value.__name__}``.", "")
    elif isinstance(value, type):
        yield f".. autoclass:: {path}"
        if not issubclass(value, BaseException) and path != "regrad.Tensor":  # (it has a table)
            yield "   :members:"
            yield f"   :inherited-members: {', '.join(builtin_bases(value))}"
        yield ""
    elif callable(value):
        yield from (f".. autofunction:: {path}", "")
    else:
        yield from (f".. py:data:: {name}", f"   :value: {value!r}", "")
        yield from (f"   {summary(path)}", "")


def builtin_bases(cls: type) -> list[str]:
    """Return the bases of a class whose members are Python's, and need no entries."""
    return [base.__name__ for base in cls.__mro__ if not base.__module__.startswith("regrad")]


class Api(SphinxDirective):
    """A table of a package's public names, which leads to their pages."""

    required_arguments = 1
    final_argument_whitespace = True
    option_spec: ClassVar[dict[str, Any]] = {
        "from": directives.unchanged,
        "names": directives.unchanged,
    }

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        found = self.parsed(self.table())
        for row in (row for node in found for row in node.findall(nodes.row)):
            link = next(iter(row.findall(addnodes.pending_xref)))
            anchor = f'<span class="moved" id="{link["reftarget"]}"></span>'
            row[0].insert(0, nodes.raw("", anchor, format="html"))
        return found

    def entries(self) -> list[str]:
        """Return the names that are not modules; note all of them, for `check_complete`."""
        paths = self.paths()
        self.env.metadata[self.env.docname].setdefault("api", []).extend(paths)
        return [p for p in paths if not isinstance(find(p), ModuleType)]

    def table(self) -> list[str]:
        """Return the lines of the table."""
        entries = self.entries()
        links = [f":py:obj:`{label(p)} <{home(p)}>`" for p in entries]
        table = table_of([(link, summary(p)) for link, p in zip(links, entries, strict=True)])
        package = self.paths()[0].rpartition(".")[0]
        context = [f".. py:currentmodule:: {package}", ""]  # of the names in backticks
        return [*context, *table] if entries else []

    def paths(self) -> list[str]:
        """Return the dotted names to show."""
        package = self.arguments[0]
        modules = tuple(self.options.get("from", "").split())
        names = tuple(self.options.get("names", "").split())
        block = public_names.Block(package, modules, names)
        return [f"{package}.{name}" for name in public_names.names_of(block)]

    def parsed(self, lines: list[str]) -> list[nodes.Node]:
        """Return the nodes of lines of reStructuredText, the format that autodoc writes."""
        document = new_document(self.state.document["source"], self.state.document.settings)
        document.reporter = self.state.document.reporter
        MockRSTParser().parse("\n".join(lines), document)
        return list(document.children)


class TensorFlowApi(Api):
    """The entries of a row of docs/tf1.md: the names of one namespace that `regrad.v1` covers.

    They are below a table of their summaries.
    """

    def run(self) -> list[nodes.Node]:
        """Return the table and the entries."""
        own = [line for path in self.entries() if home(path) == path for line in entry(path)]
        return self.parsed([*self.table(), *own])

    def paths(self) -> list[str]:
        """Return the dotted names to show."""
        return sorted(public_names.tensorflow_rows()[self.arguments[0]], key=str.lower)


class TensorMethods(Api):
    """A table of the methods and attributes of Tensor."""

    required_arguments = 0

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        cls = find("regrad.Tensor")
        names = sorted(n for n in dir(cls) if n[0] != "_" and hasattr(cls, n))
        return self.parsed(table_of([(f"``{n}``", first_lines(getattr(cls, n))) for n in names]))


def settle_types(app: Sphinx, doctree: nodes.document) -> None:
    """Set the class that a signature means: Python's `bool`, and the `Tensor` of the page."""
    package = "regrad.v1" if "/tf1_" in app.env.docname else "regrad"
    for reference in list(doctree.findall(addnodes.pending_xref)):
        name = reference["reftarget"]
        if reference["reftype"] == "class" and name in DTYPES:
            reference.replace_self(reference.children)
        elif reference["reftype"] == "class" and name in ("Tensor", "Variable"):
            reference["reftarget"] = f"{package}.{name}"


def link_rules(app: Sphinx, doctree: nodes.document) -> None:
    """Lead from cells of the tables of some pages that have a rule to the entry of the rule."""
    if app.env.docname not in RULES_IN_TABLES:
        return
    rules = public_names.origins("regrad.rules")
    for cell in doctree.findall(nodes.entry):
        codes = list(cell.findall(nodes.literal))
        name = re.match(r"(\w+)(\(.*\))?$", cell.astext())
        linked = any(cell.findall(addnodes.pending_xref))
        if name and name[1] in rules and len(codes) == 1 and not linked:
            target = {"reftype": "obj", "reftarget": f"regrad.rules.{name[1]}"}
            link = addnodes.pending_xref(
                "", codes[0].deepcopy(), refdomain="py", refexplicit=True, refwarn=True, **target
            )
            link["refdoc"] = app.env.docname
            codes[0].replace_self(link)


def keep_together(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Write "A History: the figures" with a dash, or napoleon reads "A History" as a type."""
    for i, line in enumerate(lines):
        if lines[i - 1].strip() == "Returns:" or (i == 0 and what in ("attribute", "property")):
            lines[i] = re.sub(r"^((?:`[^`]*`|[^:`])*): ", r"\1 – ", line)
            lines[i] = re.sub("(?<!`)`([^`]*:[^`]*)`(?!`)", r"``\1``", lines[i])


def mark_code(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Mark indented paragraphs of a docstring as code: it is Markdown's habit, and ours."""
    for i in range(len(lines) - 2, 0, -1):
        before, gap, code = lines[i - 1 : i + 2]
        if before[:1] not in ("", " ", "*") and not gap and code.startswith("    "):
            lines[i : i + 1] = ["", "::", ""]


def lead_back(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Lead from a source to the entry of its function.

    (viewcode takes all functions of a module for names of one package. `regrad.ops.image` has
    functions of `regrad` and of `regrad.nn`.)
    """
    if not page.startswith("_modules/"):
        return
    known = app.env.domains["py"].objects

    def back(match: re.Match[str]) -> str:
        for name, entry in known.items():
            if not f".{name}".endswith(f".{match[2]}"):
                continue
            if app.builder.get_relative_uri(page, entry.docname) == match[3]:
                return f"{match[1]}{match[3]}#{entry.node_id}"
        return match[0]

    context["body"] = BACK.sub(back, context["body"])


def check_complete(app: Sphinx, env: BuildEnvironment) -> None:
    """Fail the build if a public name has no place or no entry in the reference."""
    if absent := public_names.missing():
        raise ExtensionError(f"no page of docs/reference/api shows {', '.join(sorted(absent))}")
    documented = env.domains["py"].objects
    shown = {p for metadata in env.metadata.values() for p in metadata.get("api", [])}
    entries = {home(p) for p in shown if not isinstance(find(p), ModuleType)}
    without = entries - documented.keys()
    if without:
        raise ExtensionError(f"autodoc made no entry for {', '.join(sorted(without))}")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives and the check."""
    app.add_directive("api", Api)
    app.add_directive("tensorflow-api", TensorFlowApi)
    app.add_directive("tensor-methods", TensorMethods)
    app.connect("doctree-read", settle_types)
    app.connect("doctree-read", link_rules)
    app.connect("autodoc-process-docstring", mark_code, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", keep_together, priority=400)
    app.connect("html-page-context", lead_back)
    app.connect("env-check-consistency", check_complete)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
