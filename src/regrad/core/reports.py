"""The hits of an override by source line: as data, as an assertion and as a table."""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from regrad.core.blocks import block, stay
from regrad.core.dims import Shape
from regrad.core.hints import hint_at
from regrad.core.names import REPORT
from regrad.errors import ArgumentError, NotFiredError, UnusedOverrideWarning, alike, printable

INTEGERS = frozenset({int})
SHAPES = 3  # the number of different shapes shown per line


# The hits whose rules ran in a backward pass that is traced, but may remain unused.
LATER: ContextVar[list[Hit] | None] = ContextVar("regrad_later", default=None)


@block
def counted_later() -> Generator[list[Hit]]:
    """List the hits whose rules run in this block, without counting the runs."""
    hits: list[Hit] = []
    yield from stay(hits, LATER, hits)


class Hit:
    """Ops of one type that one source line created under an override, in one module or scope.

    `count` is the number of created ops, `ran` the number of runs of their rule, and `shapes` the
    shapes of their first inputs. `path` is the path of the module or named scope, if any.
    """

    __slots__ = ("count", "op_type", "path", "ran", "rule", "sizes", "where")

    def __init__(self, op_type: str, rule: str, where: str, path: str = "") -> None:
        self.op_type: str = op_type
        self.rule: str = rule
        self.where: str = where
        self.path: str = path
        self.count: int = 0
        self.ran: int = 0
        self.sizes: dict[Any, None] = {}  # the shapes, in order of first use

    def add(self, shape: Shape) -> None:
        """Count one more op, whose first input has this shape."""
        self.count += 1
        known = isinstance(shape, tuple) and INTEGERS.issuperset(map(type, shape))
        self.sizes[shape if known else shape_text(shape)] = None

    def pulled(self) -> None:
        """Count one more run of the rule: now, or when the traced pass is used (`LATER`)."""
        later = LATER.get()
        if later is None:
            self.ran += 1
        else:
            later.append(self)

    @property
    def shapes(self) -> list[str]:
        """The shapes as text: `2×3`."""
        return [s if isinstance(s, str) else shape_text(s) for s in self.sizes]

    def __repr__(self) -> str:
        within = f" in {self.path}" * bool(self.path)
        return printable(
            f"{self.op_type}{within} <- {self.rule}: {self.count} created, rule ran {self.ran} "
            f"times ({self.where})"
        )


def shape_text(shape: Any) -> str:
    """Return a shape as text, `64×10`. For sizes of a graph, the text keeps no graph alive."""
    return "×".join(map(str, shape)) or "scalar" if isinstance(shape, tuple) else "?"


class Binding:
    """One entry of a map of overrides: an op type, the name of its rule, and its hits by line.

    The key of an entry that names a `place` is an `at` (see `core.places`).
    """

    replaces = False  # whether its rule replaces values, so that each call runs other code
    marked = False  # whether it may match nothing: see `optional` in core/scopes
    once = False  # whether its rule is for the first derivative alone
    sisters: Sequence[Binding] = ()  # the bindings of the same key, for all its op types

    def __init__(self, op_type: str, rule_name: str, place: Any = None) -> None:
        self.op_type = op_type
        self.rule_name = rule_name
        self.kind: str = "the op type " if place is None else ""
        self.shown: str = repr(op_type if place is None else place)
        self.by_line: dict[Any, Hit] = {}  # by line; at a place also by op type and path

    @property
    def optional(self) -> bool:
        """Return whether it may match nothing: it is marked, or its key matched another type."""
        return self.marked or any(binding.hits for binding in self.sisters)

    @property
    def hits(self) -> list[Hit]:
        """The hits of lines that created an op, or whose rule ran."""
        return [hit for hit in self.by_line.values() if hit.count or hit.ran]

    def hit_at(self, where: str, path: str = "") -> Hit:
        """Return the hit of a source line in a module or scope, the same one in all threads."""
        if path:
            return self.hit_in(path, self.op_type, where)
        if where not in self.by_line:
            self.by_line.setdefault(where, Hit(self.op_type, self.rule_name, where))
        return self.by_line[where]

    def hit_in(self, path: str, op_type: str, where: str) -> Hit:
        """Return the hit of an op type at a source line that a module runs."""
        key = path, op_type, where
        if key not in self.by_line:
            self.by_line.setdefault(key, Hit(op_type, self.rule_name, where, path))
        return self.by_line[key]


def reported(bindings: Mapping[Any, Binding]) -> dict[Any, Binding]:
    """Return the entries of a map without their rules, for a report in another process."""
    found: dict[Any, Binding] = {}
    for key, binding in bindings.items():
        made = found[key] = Binding(binding.op_type, binding.rule_name)
        made.kind, made.shown, made.by_line = binding.kind, binding.shown, binding.by_line
        made.marked = binding.optional
    return found


B = TypeVar("B", bound=Binding)


class Report(Generic[B]):
    """The report of an override: which ops it matched, and how often its rules ran."""

    _bindings: dict[str, B]  # by op type
    _untouched: Untouched  # (unless a subclass overrides `_others`)
    _name = "gradient_override_map"

    @property
    def hits(self) -> list[Hit]:
        """The ops that were bound, by op type, rule and source line."""
        return [hit for binding in self._bindings.values() for hit in binding.hits]

    def table(self) -> Table:
        """The hits as a table: op type, rule, calls, how often the rule ran, lines, shapes.

        If ops were created in named scopes or modules, a column has their paths. Print the table,
        or pass it to `rich`, which draws it.
        """
        rows = [
            (h.path, h.op_type, h.rule, str(h.count), str(h.ran), h.where, _shapes(h.shapes))
            for h in self.hits
        ]
        headings = "module", "op type", "rule", "calls", "rule ran", "source line", "shapes"
        return without_empty(headings, rows)

    def _repr_html_(self) -> str:
        return self.table().html()

    def assert_fired(self, *op_types: str) -> None:
        """Raise NotFiredError unless the rule of each of these op types (by default all) ran."""
        asked = [self._key_of(t) for t in op_types]
        for op_type in asked:
            if op_type not in self._bindings:
                raise ArgumentError(
                    f"assert_fired({op_type!r}): this scope does not override {op_type!r}, but "
                    f"{', '.join(map(repr, self._bindings))}. Name one of these, or none for all."
                )
        all_keys = [key for key, b in self._bindings.items() if b.hits or not b.optional]
        bindings = [self._bindings[key] for key in asked or all_keys]
        silent = [b for b in bindings if not any(h.ran or b.replaces for h in b.hits)]
        if silent:
            whats = [f"the rule {b.rule_name!r} for {b.kind}{b.shown}" for b in silent]
            pairs = zip(whats, map(self._why_not, silent), strict=True)
            raise NotFiredError("\n".join(f"{what} never ran: {why}" for what, why in pairs))
        if idle := self._idle_modules(*asked):
            raise NotFiredError("\n".join(idle))

    def _idle_modules(self, *keys: Any) -> list[str]:
        """Return messages for the modules that keys (by default all) name and that never ran."""
        return []

    def _key_of(self, op_type: str) -> str:
        """Return the key of a binding."""
        return op_type

    def _why_not(self, binding: B) -> str:
        """Return the reason why a rule never ran."""
        if not binding.hits:
            instead = self._instead(binding)
            why = "no op of that type was created in the scope" + f" ({instead})" * bool(instead)
            return f"{why}. Run the model, and not only its backward pass, inside the scope"
        lines = ", ".join(hit.where for hit in binding.hits)
        return (
            f"ops were created ({lines}), but no gradient passed through them. Call assert_fired() "
            "after the gradient has been computed. Check that the result depends on these ops, and "
            "that their inputs require a gradient."
        )

    def _unmatched(self) -> list[B]:
        """The entries that matched nothing, but should have."""
        return [b for b in self._bindings.values() if not (b.marked or b.hits or b.optional)]

    def _warn_of_idle(self, idle: Sequence[B], why: str, level: int) -> None:
        """Warn of entries that matched nothing, at the line `level` calls further up.

        `why` names the likely reason if no entry matched.
        """
        found = [self._instead(b) for b in idle]
        if why:
            message = f"{self._name} matched nothing: {why}"
            found = [f"{instead}." for instead in found if instead]
        else:
            message = f"{self._name}: a key of the map matched nothing."
            pairs = zip(found, idle, strict=True)
            found = [f"{instead or f'{b.shown} never ran'}." for instead, b in pairs]
            found.append("(rg.rules.optional(rule) marks a key that may match nothing.)")
        self._tell(" ".join([message, *found]), level + 1)

    def _tell(self, message: str, level: int) -> None:
        """Warn at the line `level` calls further up."""
        warnings.warn(message, UnusedOverrideWarning, stacklevel=level + 1)

    def _others(self) -> Iterable[tuple[str, int]]:
        """The ops that were created and kept their own gradient: names and counts."""
        return self._untouched.others()

    def _instead(self, binding: B) -> str:
        """`'Relu' never ran; 'Relu6' did, 3 times`, if an op of a similar name ran."""
        counts: Counter[str] = Counter()
        for name, count in self._others():
            counts[name.partition(" ")[0].rpartition(".")[2]] += count
        near = [(name, counts[name]) for name in alike(binding.op_type, counts)]
        ran = [f"{name!r} did, {f'{n} times' if n > 1 else 'once'}" for name, n in near if n]
        if not binding.kind:
            return f"{binding.shown} applied to no op"
        return f"{binding.op_type!r} never ran; {', '.join(ran)}" if ran else ""

    def __repr__(self) -> str:
        lines = [repr(hit) for hit in self.hits] or ["no op matched"]
        return f"{type(self).__name__}:\n  " + "\n  ".join(lines)


hint_at(Report, REPORT)


class Untouched:
    """Counts the differentiable ops that kept their own gradient, by name and source line."""

    def __init__(self) -> None:
        # by name, line and path (line and path may be "")
        self.counts: defaultdict[tuple[str, str, str], int] = defaultdict(int)

    def note(self, name: str, where: str, count: int = 1, path: str = "") -> None:
        """Count an op that kept its gradient (with its module's path, if the map names modules)."""
        self.counts[name, where, path] += count

    def add(self, other: Untouched) -> None:
        """Add the counts of another object."""
        for (name, where, path), count in other.counts.items():
            self.note(name, where, count, path)

    def others(self) -> Iterable[tuple[str, int]]:
        """Each name, with its count."""
        return ((name, count) for (name, *_), count in self.counts.items())

    def table(self, only: Iterable[str] | None = None) -> Table:
        """Return the ops as a table: name, calls, source line. `only` selects some names."""
        rows = sorted(self.counts.items(), key=lambda item: (item[0][0].lower(), *item[0][1:]))
        if only is not None:  # (a name may be `torch.einsum (MatMul, Reshape)`)
            wanted = {name.rpartition(".")[2] for name in only}
            rows = [row for row in rows if wanted & set(re.findall(r"[^\s(),.]+", row[0][0]))]
        cells = [(path, name, str(n), where) for (name, where, path), n in rows]
        end = 4 if any(row[3] for row in cells) else 3
        headings = ("module", "op", "calls", "source line")[:end]
        return without_empty(headings, [row[:end] for row in cells])


class Table:
    """Rows under headings: plain text in `print`, a drawn table in `rich`. `rows` has the data."""

    def __init__(self, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        self.headings: tuple[str, ...] = tuple(headings)
        self.rows: list[tuple[str, ...]] = [tuple(row) for row in rows]

    def __str__(self) -> str:
        lines = [self.headings, *[(*map(_short, row),) for row in self.rows]]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rule = tuple("-" * w for w in widths)
        return "\n".join(
            "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
            for line in (lines[0], rule, *lines[1:])
        )

    __repr__ = __str__

    def __len__(self) -> int:
        return len(self.rows)

    def _repr_html_(self) -> str:
        return self.html()

    def html(self, notes: Iterable[str] = ()) -> str:
        """Return the table as HTML for notebooks, with notes below it."""
        from html import escape

        head = "".join(f"<th>{escape(heading)}</th>" for heading in self.headings)
        cells = [[f"<td>{escape(_short(cell))}</td>" for cell in row] for row in self.rows]
        body = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
        below = "".join(f"<p>{escape(note)}</p>" for note in notes)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"

    def __rich__(self) -> Any:
        from rich.table import Table as RichTable

        drawn = RichTable(*self.headings)
        for row in self.rows:
            drawn.add_row(*map(_short, row))
        return drawn


def without_empty(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table without its first column, if the column is empty."""
    start = not any(row[0] for row in rows)
    return Table(headings[start:], [row[start:] for row in rows])


def _shapes(shapes: Iterable[str]) -> str:
    shown = list(shapes)
    more = [f"and {len(shown) - SHAPES} more"] if len(shown) > SHAPES else []
    return ", ".join([*shown[:SHAPES], *more])


def _short(cell: str) -> str:
    """Return a cell for display. Source lines below the working folder are relative to it."""
    return printable(cell.replace(os.getcwd() + os.sep, ""))
