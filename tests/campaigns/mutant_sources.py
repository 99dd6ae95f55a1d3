"""Faults to put into the source: found in its syntax trees, one change each.

A mutant is named by its file, function, kind and place within the function, so that it keeps its
name when lines move. For each part of the package and each kind those with the lowest hashes of
their names are taken. `PAST` are faults that once were there, put back as changes of text.
"""

from __future__ import annotations

import ast
import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from tests.helpers.choices import number
from tests.helpers.paths import ROOT

SOURCE = ROOT / "src" / "regrad"
PROBE = "__regrad_hits__"


@dataclass(frozen=True)
class Mutant:
    """One fault: a change of one node of a file's syntax tree."""

    file: str  # under src/regrad
    function: str
    kind: str
    place: int  # among the changes of this kind in the function
    line: int
    text: str  # the line that is changed

    @property
    def name(self) -> str:
        return f"{self.file}:{self.function}:{self.kind}:{self.place}"

    @property
    def path(self) -> Path:
        return SOURCE / self.file

    def code(self) -> CodeType:
        return code_with(self)


# -- changes: a node -> what is put in its place (None: there is nothing to change) ----------------


def _named(node: ast.AST, *words: str) -> bool:
    names = (n.id if isinstance(n, ast.Name) else n.attr for n in ast.walk(node)
             if isinstance(n, ast.Name | ast.Attribute))  # fmt: skip
    return any(word in name.lower() for name in names for word in words)


def _only_raises(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and not node.orelse
        and len(node.body) == 1
        and isinstance(node.body[0], ast.Raise)
    )


def invert(node: Any) -> Iterator[Callable[[Any], Any]]:
    """A guard is inverted."""
    if isinstance(node, ast.If | ast.IfExp) and not _only_raises(node):
        yield lambda n: _with(n, test=ast.UnaryOp(ast.Not(), n.test))


def unchecked(node: Any) -> Iterator[Callable[[Any], Any]]:
    """A check that only raises is removed."""
    if _only_raises(node):
        yield lambda n: _with(n, test=ast.Constant(False))


def unchecked_state(node: Any) -> Iterator[Callable[[Any], Any]]:
    """A comparison of a version, dtype, shape or device is left out of a condition."""
    if isinstance(node, ast.BoolOp):
        for i, value in enumerate(node.values):
            if _named(value, "version", "dtype", "shape", "device", "requires_grad"):
                yield lambda n, i=i: _without(n, "values", i)


def keyless(node: Any) -> Iterator[Callable[[Any], Any]]:
    """A part of a cache's key is dropped."""
    target, value = getattr(node, "target", None), getattr(node, "value", None)
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
    names = ("key", "given") if isinstance(node, ast.Assign | ast.NamedExpr) else ()
    is_key = isinstance(target, ast.Name | ast.Attribute) and _named(target, *names)
    if is_key and isinstance(value, ast.Tuple) and len(value.elts) > 1:
        for i in range(len(value.elts)):
            yield lambda n, i=i: _with(n, value=_without(n.value, "elts", i, pad=True))
    is_entry = isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple)
    if is_entry and _named(node.value, "cache", "kept", "known", "made", "programs", "plans"):
        for i in range(len(node.slice.elts)):
            yield lambda n, i=i: _with(n, slice=_without(n.slice, "elts", i, pad=True))


def keyless_return(node: Any) -> Iterator[Callable[[Any], Any]]:
    """A part of several that a function returns is dropped."""
    if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
        for i in range(len(node.value.elts)):
            yield lambda n, i=i: _with(n, value=_without(n.value, "elts", i, pad=True))


def compare(node: Any) -> Iterator[Callable[[Any], Any]]:
    """A comparison is changed into its opposite or its neighbor."""
    others = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
              ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn,
              ast.NotIn: ast.In}  # fmt: skip
    if isinstance(node, ast.Compare):
        other = others[type(node.ops[0])]
        yield lambda n: _with(n, ops=[other(), *n.ops[1:]])


def half(node: Any) -> Iterator[Callable[[Any], Any]]:
    """A part of an `and` or `or` is dropped."""
    if isinstance(node, ast.BoolOp):
        for i in range(len(node.values)):
            yield lambda n, i=i: _without(n, "values", i)


def arithmetic(node: Any) -> Iterator[Callable[[Any], Any]]:
    """An operator of arithmetic is changed."""
    others = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult}
    if isinstance(node, ast.BinOp) and type(node.op) in others:
        other = others[type(node.op)]
        yield lambda n: _with(n, op=other())
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        yield lambda n: n.operand


def greater(node: Any) -> Iterator[Callable[[Any], Any]]:
    """A small integer is one greater."""
    if isinstance(node, ast.Constant) and type(node.value) is int and -2 < node.value < 4:
        yield lambda n: _with(n, value=n.value + 1)


def undone(node: Any) -> Iterator[Callable[[Any], Any]]:
    """A call whose result is not used is left out."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield lambda n: ast.Pass()


def unrestored(node: Any) -> Iterator[Callable[[Any], Any]]:
    """A statement of a `finally` is left out."""
    if isinstance(node, ast.Try):
        for i in range(len(node.finalbody)):
            yield lambda n, i=i: _with(
                n, finalbody=[*n.finalbody[:i], ast.Pass(), *n.finalbody[i + 1 :]]
            )


def unscoped(node: Any) -> Iterator[Callable[[Any], Any]]:
    """A `with` statement's manager is not entered."""
    if isinstance(node, ast.With) and all(item.optional_vars is None for item in node.items):
        yield lambda n: ast.If(ast.Constant(True), n.body, [])


def argument(node: Any) -> Iterator[Callable[[Any], Any]]:
    """A keyword argument of a call is left out."""
    if isinstance(node, ast.Call):
        for i, keyword in enumerate(node.keywords):
            if keyword.arg is not None:
                yield lambda n, i=i: _without(n, "keywords", i)


def swapped(node: Any) -> Iterator[Callable[[Any], Any]]:
    """The first two arguments of a call are swapped."""
    if isinstance(node, ast.Call) and len(node.args) > 1:
        a, b = node.args[:2]
        if not isinstance(a, ast.Starred | ast.Constant) and not isinstance(b, ast.Starred):
            yield lambda n: _with(n, args=[n.args[1], n.args[0], *n.args[2:]])


def nothing(node: Any) -> Iterator[Callable[[Any], Any]]:
    """A function returns None."""
    if isinstance(node, ast.Return) and node.value is not None:
        yield lambda n: _with(n, value=ast.Constant(None))


def unassigned(node: Any) -> Iterator[Callable[[Any], Any]]:
    """An attribute or an entry is not set."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript):
        yield lambda n: ast.Expr(n.value)


KINDS: dict[str, Callable[[Any], Iterator[Callable[[Any], Any]]]] = {
    "key": keyless, "returned": keyless_return, "check": unchecked, "state": unchecked_state,
    "guard": invert, "comparison": compare, "half": half, "arithmetic": arithmetic,
    "number": greater, "undone": undone, "finally": unrestored, "scope": unscoped,
    "argument": argument, "swapped": swapped, "nothing": nothing, "unset": unassigned,
}  # fmt: skip


def _with(node: Any, **fields: Any) -> Any:
    found = copy.copy(node)
    for name, value in fields.items():
        setattr(found, name, value)
    return found


def _without(node: Any, field: str, i: int, pad: bool = False) -> Any:
    """A node without an entry of a list; None stands for it where the length must stay."""
    parts = list(getattr(node, field))
    parts[i : i + 1] = [ast.Constant(None)] if pad else []
    if isinstance(node, ast.BoolOp) and len(parts) == 1:
        return parts[0]
    return _with(node, **{field: parts})


# -- where they are --------------------------------------------------------------------------------


def sites(tree: ast.Module) -> Iterator[tuple[str, str, int, ast.AST, Callable[[Any], Any]]]:
    """All changes of a file: function, kind, place, node, change. Only bodies of functions."""

    def inside(node: ast.AST, path: tuple[str, ...], within: bool) -> Iterator[Any]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            path = (*path, node.name)
            if node.name in ("__repr__", "__str__", "__dir__"):
                return
        if within:
            for kind, changes in KINDS.items():
                for change in changes(node):
                    yield ".".join(path), kind, node, change
        body = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for field, value in ast.iter_fields(node):
            if body and field != "body":
                continue  # (decorators, defaults and annotations)
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not _is_text(child):
                    yield from inside(child, path, within or body)

    counts: dict[tuple[str, str], int] = defaultdict(int)
    for function, kind, node, change in inside(tree, (), False):
        place = counts[function, kind]
        counts[function, kind] += 1
        yield function, kind, place, node, change


def _is_text(node: ast.AST) -> bool:
    """Whether a node only makes a message: an f-string, or what is raised."""
    return isinstance(node, ast.JoinedStr | ast.Raise)


def module_of(file: str) -> str:
    """The module that a file of src/regrad is."""
    parts = ["regrad", *Path(file).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def mutants_of(path: Path) -> Iterator[Mutant]:
    text = path.read_text(encoding="utf-8")
    lines, file = text.splitlines(), path.relative_to(SOURCE).as_posix()
    for function, kind, place, node, _ in sites(ast.parse(text)):
        line = getattr(node, "lineno", 0)
        yield Mutant(file, function, kind, place, line, lines[line - 1].strip())


def chosen(count: int, part_of: Callable[[str], str | None]) -> list[Mutant]:
    """For each part and kind the mutants of the lowest hashes, at most `count` of a kind."""
    groups: dict[tuple[str, str], list[Mutant]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        part = part_of(path.relative_to(SOURCE).as_posix())
        if part is not None:
            for mutant in mutants_of(path):
                groups[part, mutant.kind].append(mutant)
    for group in groups.values():
        group.sort(key=lambda m: number(m.name))
    return [mutant for key in sorted(groups) for mutant in groups[key][:count]]


# -- code with a change, or with probes ------------------------------------------------------------


class _Change(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: Callable[[Any], Any]) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        if node is self.old:
            return ast.copy_location(self.new(node), node)
        return super().generic_visit(node)


def code_with(mutant: Mutant) -> CodeType:
    """The code of a mutant's file, with its fault."""
    tree = ast.parse(mutant.path.read_text(encoding="utf-8"))
    for function, kind, place, node, change in sites(tree):
        if (function, kind, place) == (mutant.function, mutant.kind, mutant.place):
            changed = ast.fix_missing_locations(_Change(node, change).visit(tree))
            return compile(changed, mutant.path, "exec", dont_inherit=True)
    raise LookupError(f"{mutant.name} is not in the source")


def code_with_probes(path: Path, names: dict[int, list[str]]) -> CodeType:
    """The code of a file that notes when a statement is about to run, by the lines of these."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    for line, found in names.items():
        around = [s for s in statements if s.lineno <= line <= (s.end_lineno or s.lineno)]
        last = max(around, key=lambda s: (s.lineno, -(s.end_lineno or 0)))
        for node in ast.walk(tree):
            for field in ("body", "orelse", "finalbody"):
                body = getattr(node, field, None)
                if isinstance(body, list) and last in body:
                    at = body.index(last)
                    probes = [_probe(name, last) for name in found]
                    setattr(node, field, [*body[:at], *probes, *body[at:]])
                    break
    return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


def _probe(name: str, before: ast.stmt) -> ast.stmt:
    probe = ast.parse(f"{PROBE}[{name!r}] = 0").body[0]
    for node in ast.walk(probe):
        ast.copy_location(node, before)
    return probe
