"""Pictures of functions: boxes in nested scopes, with arrows, rendered as SVG or as a page.

Any code that can identify ops fills a `Drawing`, from a graph of `regrad.v1`, a run of a regrad
function, a PyTorch model, or a JAX program. Each scope (module, name scope) can be collapsed into
one box.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from itertools import count, takewhile
from typing import Any, Literal

from regrad.core.extras import install_line
from regrad.core.files import replace_file
from regrad.core.reports import shape_text
from regrad.errors import ArgumentError, RegradError, printable
from regrad.inspection.recorder import SeenOp

BoxKind = Literal["op", "override", "custom", "input", "variable", "constant", "scope"]
DIRECTIONS = ("TB", "BT", "LR", "RL")
MANY = 40  # maximum number of boxes for which a picture opens scopes by itself

LOOK = {
    "node": 'shape=box, style="rounded,filled", fillcolor="#f5f7fa", color="#9aa5b1", '
    'fontname="Helvetica", fontsize=10, margin="0.12,0.06"',
    "edge": 'color="#52606d", fontname="Helvetica", fontsize=8, arrowsize=0.6',
}
CLUSTER = 'style="rounded"; color="#cbd2d9"; fontname="Helvetica"; fontsize=9; labeljust=l'
KINDS: Mapping[str, str] = {
    "op": "",
    "override": ', fillcolor="#ffe3cc", color="#d9480f", penwidth=1.6',
    "custom": ', fillcolor="#d0ebff", color="#1864ab", penwidth=1.6',
    "input": ', fillcolor="#d9f2e3"',
    "variable": ', fillcolor="#dce8fb"',
    "constant": ', fillcolor="#ffffff"',
    "scope": ', fillcolor="#e9ecef", style="filled"',
}


class MissingProgramError(RegradError, ImportError):
    """Raised for a missing package or program."""


@dataclass(frozen=True, slots=True)
class Box:
    """One op, input or constant of a picture.

    Attributes:
        name: The unique name of the box.
        lines: The text in the box.
        scope: The scopes that contain it, outermost first.
        kind: The style of the box.
        details: Shown on a click: rule, source, shapes, figures of a trace.
    """

    name: str
    lines: tuple[str, ...]
    scope: tuple[str, ...] = ()
    kind: BoxKind = "op"
    details: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Arrow:
    """An arrow between two boxes; a dashed arrow is an ordering without data."""

    source: str
    target: str
    label: str = ""
    dashed: bool = False


@dataclass(frozen=True)
class Drawing:
    """A picture of a function.

    A notebook displays it directly. `svg` is drawn by Graphviz; `html` is a separate page that
    zooms, searches and opens scopes.
    """

    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    title: str = ""

    def collapsed(self, depth: int) -> Drawing:
        """Return the picture with every scope deeper than `depth` as one box."""
        shown: dict[str, Box] = {}
        place: dict[str, str] = {}
        for box in self.boxes:
            if len(box.scope) <= depth:
                shown[box.name] = box
                place[box.name] = box.name
                continue
            name = "/".join(box.scope[: depth + 1])
            place[box.name] = name
            before = shown.get(name)
            count = int(before.details["ops"]) if before else 0
            inside = _inside(before.kind if before else "scope", box.kind)
            lines = (box.scope[depth], f"{count + 1} op{'s' if count else ''}")
            details = {"ops": str(count + 1)}
            shown[name] = Box(name, lines, box.scope[:depth], inside, details)
        arrows = {}
        for arrow in self.arrows:
            source, target = place[arrow.source], place[arrow.target]
            if source != target:
                new = replace(arrow, source=source, target=target)
                arrows.setdefault((source, target, arrow.dashed), new)
        return Drawing(tuple(shown.values()), tuple(arrows.values()), self.title)

    def legible(self) -> Drawing:
        """Return the picture with as many levels of scopes open as stay legible."""
        deepest = max((len(box.scope) for box in self.boxes), default=0)
        best = self.collapsed(0)
        for depth in range(1, deepest + 1):
            more = self.collapsed(depth)
            if len(more.boxes) > MANY:
                break
            best = more
        return best

    def dot(self, rankdir: str = "TB") -> str:
        """Return the source of the picture for the program `dot`, with all scopes open.

        Args:
            rankdir: The direction of arrows: `"TB"` down, `"BT"` up, `"LR"` to the right, `"RL"` to
                the left.

        Raises:
            ArgumentError: `rankdir` is none of these.
        """
        if rankdir not in DIRECTIONS:
            raise ArgumentError(
                f"to_dot: rankdir must be one of {', '.join(DIRECTIONS)}, got {rankdir!r:.60}"
            )
        lines = [
            "digraph {",
            f"  rankdir={rankdir};",
            *[f"  {kind} [{look}];" for kind, look in LOOK.items()],
            *self._clusters(),
            *map(_arrow_line, self.arrows),
            "}",
        ]
        return "\n".join(lines) + "\n"

    def svg(
        self, path: str | os.PathLike[str] | None = None, *, depth: int | None = None,
        rankdir: str = "TB",
    ) -> str:  # fmt: skip
        """Return the picture as SVG, drawn by Graphviz.

        Args:
            path: A file to write, atomically, or None.
            depth: How many levels of scopes are open; by default, as many as stay legible.
            rankdir: As in `dot`.

        Raises:
            ImportError: The package `graphviz` or the program `dot` is missing; the message has the
                installation command.
        """
        shown = self.legible() if depth is None else self.collapsed(depth)
        return svg_of(shown.dot(rankdir), path)

    def html(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the picture as one self-contained HTML page.

        The page zooms (wheel), pans (drag), searches, opens and closes scopes (click on their
        titles), and shows the details of a box on a click. `path` is a file to write, atomically.
        """
        boxes = [(b.name, b.lines, b.scope, b.kind, dict(b.details)) for b in self.boxes]
        arrows = [(a.source, a.target, a.label, a.dashed) for a in self.arrows]
        data = {"title": self.title, "boxes": boxes, "arrows": arrows}
        # (A browser ends a script at the first "</", even inside a string.)
        text = json.dumps(data, ensure_ascii=False).replace("</", "<\\/")
        page = _template().replace("/*DATA*/null", text)
        if path is not None:
            replace_file(path, lambda file: file.write(page.encode()))
        return page

    def _repr_svg_(self) -> str | None:
        try:
            return self.svg()
        except MissingProgramError:
            return None

    def _clusters(self) -> Iterator[str]:
        """Return the boxes, nested in boxes for their scopes."""
        scopes = {box.scope[:i] for box in self.boxes for i in range(1, len(box.scope) + 1)}
        tree: dict[tuple[str, ...], list[Box | tuple[str, ...]]] = {(): []}
        for scope in sorted(scopes):
            tree[scope] = []
            tree[scope[:-1]].append(scope)
        for box in self.boxes:
            tree[box.scope].append(box)
        return _scope_lines(tree, (), "  ")


def _inside(kind: BoxKind, more: BoxKind) -> BoxKind:
    """Return the style of a closed scope: highlighted boxes inside highlight the scope."""
    if "override" in (kind, more):
        return "override"
    return "custom" if "custom" in (kind, more) else "scope"


def _scope_lines(
    tree: Mapping[tuple[str, ...], list[Box | tuple[str, ...]]], scope: tuple[str, ...], indent: str
) -> Iterator[str]:
    for item in tree[scope]:
        if isinstance(item, Box):
            yield f"{indent}{_box_line(item)}"
            continue
        yield f"{indent}subgraph {quote('cluster_' + '/'.join(item))} {{"
        yield f"{indent}  label={quote(item[-1])}; {CLUSTER};"
        yield from _scope_lines(tree, item, indent + "  ")
        yield f"{indent}}}"


def _box_line(box: Box) -> str:
    label = quote("\n".join(line for line in box.lines if line))
    return f"{quote(box.name)} [label={label}, tooltip={quote(box.name)}{KINDS[box.kind]}];"


def _arrow_line(arrow: Arrow) -> str:
    ends = f"  {quote(arrow.source)} -> {quote(arrow.target)}"
    if arrow.dashed:
        return f"{ends} [style=dashed];"
    return f"{ends} [label={quote(f' {arrow.label} ')}];"


def quote(text: str) -> str:
    """Return a string literal of Graphviz; line breaks are kept, control characters are shown."""
    lines = [printable(line).replace("\\", "\\\\") for line in text.split("\n")]
    escaped = "\\n".join(lines).replace('"', '\\"')
    return f'"{escaped}"'


def svg_of(dot: str, path: str | os.PathLike[str] | None = None) -> str:
    """Draw a picture with Graphviz, and write it to a file if a path is passed."""
    try:
        import graphviz  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise _not_installed("the Python package graphviz") from None
    try:
        svg = graphviz.Source(dot).pipe(format="svg", encoding="utf-8")
    except graphviz.ExecutableNotFound:
        raise _not_installed("the program dot") from None
    if path is not None:
        replace_file(path, lambda file: file.write(svg.encode()))
    return svg


def _not_installed(what: str) -> MissingProgramError:
    return MissingProgramError(
        f"to_svg: {what} is not installed. Drawing needs the package ({install_line('viz')}) "
        "and the program dot (apt-get install graphviz, brew install graphviz, or "
        "https://graphviz.org/download); to_dot() and html() need neither."
    )


@cache
def _template() -> str:
    return resources.files("regrad.inspection").joinpath("page.html").read_text(encoding="utf-8")


def moved_in(boxes: Sequence[Box], arrows: Iterable[Arrow]) -> tuple[Box, ...]:
    """Return the boxes, with each variable and constant in the common scope of its consumers."""
    scope_of = {box.name: box.scope for box in boxes}
    takers: dict[str, list[tuple[str, ...]]] = {}
    for arrow in arrows:
        takers.setdefault(arrow.source, []).append(scope_of[arrow.target])
    return tuple(
        replace(box, scope=_common(takers[box.name]))
        if box.kind in ("variable", "constant") and box.name in takers
        else box
        for box in boxes
    )


def _common(scopes: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the innermost scope around all of these boxes."""
    levels = takewhile(lambda parts: len(set(parts)) == 1, zip(*scopes, strict=False))
    return tuple(part for part, *_ in levels)


class Sketch:
    """The boxes and arrows of a picture under construction, and the box of each value."""

    def __init__(self) -> None:
        self.boxes: dict[str, Box] = {}
        self.arrows: dict[tuple[str, str], Arrow] = {}
        self.made: dict[Any, str] = {}

    def add(
        self, name: str, lines: Sequence[str], scope: Sequence[str] = (), kind: BoxKind = "op",
        details: Mapping[str, str] | None = None,
    ) -> str:  # fmt: skip
        """Add a box under a unique name; return the name."""
        own = next(each for each in _numbered(name) if each not in self.boxes)
        self.boxes[own] = Box(own, tuple(lines), tuple(scope), kind, details or {})
        return own

    def add_source(
        self, key: Any, name: str, spec: str, kind: BoxKind, label: str | None = None
    ) -> str:
        """Add the box of a value that no op makes."""
        self.made[key] = own = self.add(name, (label or name, spec), (), kind)
        return own

    def add_op(
        self, op: SeenOp, lines: Sequence[str], scope: Sequence[str], details: dict[str, str],
        takes: Iterable[tuple[Any, str]], makes: Iterable[Any],
    ) -> str:  # fmt: skip
        """Add the box of an op, with an arrow from each box that makes one of its inputs.

        The box names the op's rule if the rule is not built in. `takes` are the keys of inputs,
        with the labels of the arrows, and `makes` the keys of outputs.
        """
        kind: BoxKind = "op"
        if op.kind != "built-in":
            kind, details = op.kind, {**details, "rule": f"{op.kind}: {op.rule}"}
            lines = [*lines, f"rule: {op.rule.partition(',')[0]}"]
        name = self.add(op.op_type, lines, scope, kind, details)
        for key, label in takes:
            if (source := self.made.get(key)) is not None:
                self.arrows.setdefault((source, name), Arrow(source, name, label))
        self.made.update(dict.fromkeys(makes, name))
        return name

    def drawing(self, title: str, used: Callable[[Box], bool]) -> Drawing:
        """Return the picture of the boxes that are used."""
        boxes = [box for box in self.boxes.values() if used(box)]
        names = {box.name for box in boxes}
        arrows = tuple(arrow for arrow in self.arrows.values() if arrow.target in names)
        return Drawing(moved_in(boxes, arrows), arrows, title.strip("<>"))


def _numbered(name: str) -> Iterator[str]:
    """Yield the names `Mul`, `Mul_1`, …."""
    yield name
    yield from (f"{name}_{i}" for i in count(1))


def spec_of(dtype: Any, shape: Sequence[Any]) -> str:
    """Return the type of an array as text for a box: `float32 64×10`."""
    return f"{dtype} {shape_text(shape)}".strip()


def scopes_of(path: str, separator: str) -> tuple[str, ...]:
    """Return the scopes of a path: `("layer1", "0")` for `layer1.0`."""
    return tuple(part for part in path.split(separator) if part)


__all__: Sequence[str] = ["Arrow", "Box", "Drawing"]
