"""The public names of regrad by the module that defines them, read from the sources.

A name is public if `__all__` lists it; in a module without `__all__`, if it is defined there or
imported as itself (`from … import name as name`, the convention of type checkers). The pages in
docs/reference/api place each name with an `{api}` block, and the test of the docs and the build
both fail if one has no place.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

PAGES = Path(__file__).parents[1] / "reference" / "api"
PACKAGES = (
    "regrad", "regrad.errors", "regrad.extend", "regrad.fft", "regrad.jax", "regrad.linalg",
    "regrad.losses", "regrad.nn", "regrad.plot", "regrad.random", "regrad.rules",
    "regrad.rules.attribution", "regrad.rules.lrp", "regrad.testing", "regrad.torch",
    "regrad.train",
)  # fmt: skip
V1 = Path(__file__).parents[1] / "tf1.md"


class Block(NamedTuple):
    """One `{api}` block: a package, and the defining modules or the names to show (all if none).

    A name that some block shows by name is not shown with its module.
    """

    package: str
    modules: tuple[str, ...]
    names: tuple[str, ...]


def origins(package: str) -> dict[str, str]:
    """Return the public names of a package, each with the module that defines it."""
    module = importlib.import_module(package)
    tree = ast.parse(inspect.getsource(module))
    listed = getattr(module, "__all__", None)
    found = dict(_declared(tree, package, () if listed is None else listed))
    if listed is None:
        return found
    tools = getattr(module, "_TOOLS", {})  # imported when they are first used
    parts = getattr(module, "_PARTS", ())
    names = [*listed, *tools, *(p for p in parts if p not in listed)]
    return {name: found.get(name, package) for name in names}


def _declared(tree: ast.Module, package: str, listed: Sequence[str]) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                shown = alias.asname == alias.name and not alias.name.startswith("_")
                if shown or (alias.asname is None and alias.name in listed):
                    yield alias.name, node.module
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, package


def names_of(block: Block) -> list[str]:
    """Return what an `{api}` block shows, in alphabetical order without regard to case."""
    known = origins(block.package)
    if unknown := [n for n in block.names if n not in known]:
        raise ValueError(f"{block.package} has no public name {', '.join(unknown)}")
    if not block.names and not block.modules:
        return sorted(known, key=str.lower)
    moved = {n for _, other in blocks() if other.package == block.package for n in other.names}
    chosen = {n for n, module in known.items() if module in block.modules} - moved | {*block.names}
    if not chosen:
        raise ValueError(f"{block.package} has no names from {', '.join(block.modules)}")
    return sorted(chosen, key=str.lower)


TF_FENCE = re.compile(r"^```\{tensorflow-api\} ([^`\n]*)\n```$", re.M)
FENCE = re.compile(r"^```\{api\} (\S+)\n(?::from: (.*)\n)?(?::names: (.*)\n)?```$", re.M)


def blocks() -> Iterator[tuple[Path, Block]]:
    """Yield the `{api}` blocks of all pages."""
    for page in sorted(PAGES.glob("*.md")):
        for package, modules, names in FENCE.findall(page.read_text(encoding="utf-8")):
            yield page, Block(package, tuple(modules.split()), tuple(names.split()))


def public_names() -> set[str]:
    """Return all public names, dotted: `regrad.sin`, `regrad.nn.relu`."""
    return {f"{package}.{name}" for package in PACKAGES for name in origins(package)}


def files_of(paths: Iterable[str]) -> dict[str, str]:
    """Return the file names of pages, which differ in more than capitals: not all disks see those.

    `regrad.Tensor` and `regrad.tensor` are `regrad.Tensor-class` and `regrad.tensor`.
    """
    paths = [*paths]
    same = Counter(path.lower() for path in paths)
    return {p: f"{p}-class" if same[p.lower()] > 1 and is_class(p) else p for p in paths}


def is_class(path: str) -> bool:
    """Return whether a name is written as classes are."""
    return path.rpartition(".")[2][:1].isupper()


def missing() -> set[str]:
    """Return the public names, and the rows of TensorFlow's, that no page shows."""
    placed = {f"{b.package}.{name}" for _, b in blocks() for name in names_of(b)}
    return (public_names() - placed) | (tensorflow_rows().keys() - rows_shown())


def rows_shown() -> set[str]:
    """Return the labels of all `{tensorflow-api}` blocks."""
    texts = [page.read_text(encoding="utf-8") for page in sorted(PAGES.glob("*.md"))]
    return {label for text in texts for label in TF_FENCE.findall(text)}


def tensorflow_rows() -> dict[str, list[str]]:
    """Return the rows of docs/tf1.md that list what `regrad.v1` covers: label to dotted names.

    A label is the first cell without its backticks: `tf: shapes`, `tf.nn`.
    """
    text = V1.read_text(encoding="utf-8")
    covered = text[text.index("## Supported names") : text.index("## Unsupported names")]
    rows = {}
    for label, names in re.findall(r"^\| (`tf[.\w]*`[^|]*) \| (.*) \|$", covered, re.M):
        space = label.split("`")[1].replace("tf", "regrad.v1", 1)
        rows[label.replace("`", "")] = [f"{space}.{name}" for name in re.findall(r"`(\w+)`", names)]
    return rows
