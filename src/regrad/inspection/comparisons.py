"""Two gradients of the same function, compared as data: `GradientComparison`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from regrad.core.extras import needed
from regrad.core.reports import Table
from regrad.errors import ArgumentError, GradientError, kind
from regrad.inspection.numbers import wide
from regrad.inspection.recorder import Leaf, Named, RunRecorder, Tool, located
from regrad.inspection.traces import axes_of

RowKind = Literal["argument", "parameter", "op"]
OCTAVES = 3.0  # log2 of the ratio of norms at which the colors of a picture saturate: 8 and 1/8
RTOL = 1e-4  # tolerance for equal gradients: float32, and sums in another order


@dataclass(frozen=True, slots=True)
class Compared:
    """Two gradients by the same argument or parameter, or by the same input of an op in place.

    In place means that both rules of an op received the same gradient (`dy`), so that a difference
    comes from the op itself, and not from another op.

    Attributes:
        kind: "argument", "parameter" or "op".
        name: The name of the argument or parameter: `args[0]`, `layer1.weight`; for an op, the name
            of the input.
        shape: The shape of both gradients.
        cosine: The cosine of the angle between them: 1 for the same direction, -1 for opposite
            directions; NaN if one of them is zero or not finite.
        ratio: The norm of the first gradient, divided by the norm of the second; NaN if both are
            zero.
        signs: The share of elements whose signs agree (0 agrees with 0 only).
        zeros: The share of zeros in the first gradient.
        other_zeros: The share of zeros in the second gradient.
        gap: The norm of the difference, relative to the larger of both norms.
        missing: "first" or "second" if this gradient does not exist, "both" if neither does, or "".
        op_type: For an op, its type.
        rule: For an op, the rule that is compared, with its source location.
        line: For an op, the line of the user's code that ran it.
        path: For an op, the module or name scope.
        declared: Whether the caller declared the difference as intended: a surrogate.
    """

    kind: RowKind
    name: str
    shape: tuple[int, ...]
    cosine: float
    ratio: float
    signs: float
    zeros: float
    other_zeros: float
    gap: float
    missing: Literal["", "first", "second", "both"] = ""
    op_type: str = ""
    rule: str = ""
    line: str = ""
    path: str = ""
    declared: bool = False

    @classmethod
    def of(cls, kind: RowKind, name: str, first: Any, second: Any, **about: str) -> Compared:
        """Compare two arrays that NumPy can read; None means no gradient.

        Args:
            kind: The kind of the row: "argument", "parameter" or "op".
            name: The name of the argument, parameter or input.
            first: The gradient to examine.
            second: The gradient to compare it with.
            **about: For an op, `op_type`, `rule`, `line` and `path`.
        """
        missing = "" if first is not None else "first"
        if second is None:
            missing = "both" if missing else "second"
        given = wide(np.zeros(()) if missing == "both" else second if first is None else first)
        # (A missing gradient counts as zeros, and is never close to another one.)
        a, b = (np.zeros_like(given) if x is None else wide(x) for x in (first, second))
        if a.shape != b.shape:
            raise GradientError(
                f"compare_gradients: the gradients by {name!r} have the shapes {a.shape} and "
                f"{b.shape}, which cannot be compared"
            )
        figures = _figures(a.ravel(), b.ravel())
        row = cls(kind, name, a.shape, *figures, missing, **about)  # pyright: ignore
        return replace(row, gap=math.inf) if missing and row.gap else row

    def differs(self, rtol: float = RTOL) -> bool:
        """Return whether the two differ, by a tolerance relative to the larger norm."""
        return not self.gap <= rtol

    @property
    def place(self) -> str:
        """Return the subject of the row as words, for a message."""
        if self.kind != "op":
            return f"the gradient by {self.name}"
        rule = f" ({self.rule})" if self.rule else ""
        return f"{located(self.op_type, self.line, self.path)}{rule}, input {self.name!r}"

    @property
    def text(self) -> str:
        """Return how the two gradients differ, for a message."""
        if self.missing:
            return (
                "neither has one"
                if self.missing == "both"
                else (f"the {self.missing} gradient is missing")
            )
        words = f"cosine {self.cosine:.4g}, ratio of norms {self.ratio:.4g}"
        return f"{words}, signs agree in {self.signs:.1%}"

    def __str__(self) -> str:
        return f"{self.place}: {self.text}" + (", as declared" if self.declared else "")


def _figures(a: np.ndarray, b: np.ndarray) -> tuple[float, float, float, float, float, float]:
    """Return cosine, ratio of norms, agreement of signs, zeros of both, and relative difference."""
    if not a.size:
        return math.nan, math.nan, 1.0, 0.0, 0.0, 0.0
    with np.errstate(all="ignore"):
        top = max(np.abs(a).max(), np.abs(b).max())
        # (scaled so that squares do not overflow)
        scale = top if np.isfinite(top) and top > 0 else 1.0
        a, b = a / scale, b / scale
        m, n = float(np.linalg.norm(a)), float(np.linalg.norm(b))
        # Rounding may leave 1.0000000000000002.
        cosine = min(1.0, max(-1.0, float(np.vdot(a, b).real) / m / n)) if m and n else math.nan
        ratio = m / n if n else (math.inf if m else math.nan)
        gap = float(np.linalg.norm(a - b)) / max(m, n) if m or n else 0.0
        signs = float(np.mean(np.sign(a) == np.sign(b)))
    zeros = [1 - int(np.count_nonzero(x)) / x.size for x in (a, b)]
    if not math.isfinite(m + n):
        same = np.array_equal(a, b, equal_nan=True)
        cosine, gap = math.nan, 0.0 if same else math.inf
    return cosine, ratio, signs, zeros[0], zeros[1], gap


@dataclass(frozen=True)
class GradientComparison:
    """Two gradients of the same function: by argument and parameter, and op by op in place.

    Attributes:
        rows: Arguments and parameters first, then the ops whose rules differ, in the order in which
            they ran backward.
        names: The names of the two gradients, for headings.
        rtol: The tolerance above which rows differ, relative to the larger of both norms.

    An op's difference is declared if its op type or its rule's name was passed as a surrogate. A
    difference by an argument or a parameter is explained if at least one op differs and all ops
    that differ are declared (except that no rule explains a missing gradient). It may also be
    declared by its own name.
    """

    rows: tuple[Compared, ...]
    names: tuple[str, str] = ("first", "second")
    rtol: float = RTOL

    @classmethod
    def declare(
        cls,
        rows: Iterable[Compared],
        surrogates: Iterable[str] = (),
        *,
        names: tuple[str, str] = ("first", "second"),
        rtol: float = RTOL,
    ) -> GradientComparison:
        """Create a comparison in which these op types, rules or names may differ.

        Args:
            rows: All rows.
            surrogates: Op types (`"Relu"`), names of rules (without source locations), or names of
                arguments and parameters.
            names: The names of the two gradients.
            rtol: The tolerance.

        Raises:
            GradientError: `surrogates` is not a list of strings.
        """
        if isinstance(surrogates, str) or not all(isinstance(s, str) for s in surrogates):
            raise GradientError(
                "compare_gradients: surrogates must be a list of op types or names of rules, as "
                f"in surrogates=['Relu'], got {surrogates!r:.60}"
            )
        meant = frozenset(surrogates)
        marked = [replace(row, declared=_is_meant(row, meant)) for row in rows]
        return cls(tuple(marked), names, rtol)

    @property
    def differences(self) -> list[Compared]:
        """Return the rows that differ, declared or not."""
        return [row for row in self.rows if row.differs(self.rtol)]

    @property
    def undeclared(self) -> list[Compared]:
        """Return the differences that are neither declared nor explained by a declared one."""
        ops = [row for row in self.differences if row.kind == "op"]
        explained = bool(ops) and all(row.declared for row in ops)
        return [
            row
            for row in self.differences
            if not row.declared and not (explained and row.kind != "op" and not row.missing)
        ]

    @property
    def ok(self) -> bool:
        """True if all differences are declared."""
        return not self.undeclared

    def worst(self) -> list[Compared]:
        """Return the differences: undeclared ones first, then ops, then sorted by angle."""
        undeclared = list(map(id, self.undeclared))
        return sorted(
            self.differences,
            key=lambda row: (id(row) not in undeclared, row.kind != "op", _angle(row)),
        )

    def assert_same(self) -> None:
        """Raise GradientError if there is an undeclared difference."""
        if not self.ok:
            rows = "; ".join(map(str, [r for r in self.worst() if not r.declared][:3]))
            more = len(self.undeclared) - 3
            raise GradientError(
                f"two gradients differ ({self.names[0]} and {self.names[1]}): {rows}"
                + (f"; and {more} more" if more > 0 else "")
                + (
                    ". If this difference is intended, declare it: surrogates=[…] takes op types "
                    "and names of rules"
                )
            )

    def table(self) -> Table:
        """Return the rows as a table: subject, cosine, norms, signs, zeros, rule, line, module."""
        zeros = [f"zeros, {name}" for name in self.names]
        return Table(
            ("gradient by", "op", "cosine", "ratio", "signs", *zeros, "verdict", "rule",
             "source line", "module"),
            [self._cells(row) for row in self.rows],
        )  # fmt: skip

    def plot(self, ax: Any = None) -> Any:
        """Draw the agreement as heat strips, with matplotlib: one column per row.

        Args:
            ax: The matplotlib Axes to draw into; by default, new Axes.

        Returns:
            The Axes. The strips show the cosine between the two gradients (blue 1, red -1), the
            ratio of their norms on a log scale (white for equal norms, full color from a factor of
            8 on) and the share of elements with the same sign (blue all, red none). Gray means
            undefined: a gradient is zero or missing. Names of columns are red for undeclared and
            orange for declared differences.
        """
        plt = needed("matplotlib.pyplot", "viz", "rg.plot")
        rows = self.rows
        ax = axes_of(ax, max(4.0, 1.8 + 0.35 * len(rows)), 2.8)
        ratios = np.array([row.ratio for row in rows], float)
        with np.errstate(divide="ignore", invalid="ignore"):
            octaves = np.log2(ratios) / OCTAVES
        norms = np.where(np.isfinite(octaves), np.clip(octaves, -1, 1), np.nan)
        cosines, signs = [row.cosine for row in rows], [2 * row.signs - 1 for row in rows]
        strips = np.array([cosines, norms, signs], float).reshape(3, len(rows))
        colours = plt.get_cmap("RdBu").with_extremes(bad="#dee2e6")
        ax.imshow(np.ma.masked_invalid(strips), cmap=colours, vmin=-1, vmax=1, aspect="auto")
        ax.set_yticks(range(3), ["cosine", "ratio of norms", "same signs"])
        names = [f"{row.op_type} by {row.name}" if row.op_type else row.name for row in rows]
        ax.set_xticks(range(len(rows)), names, rotation=90, fontsize=7)
        undeclared = list(map(id, self.undeclared))
        for label, row in zip(ax.get_xticklabels(), rows, strict=True):
            if id(row) in undeclared:
                label.set_color("#c92a2a")
            elif row.differs(self.rtol):
                label.set_color("#d9480f")
        ax.set_title(" and ".join(self.names), fontsize=9)
        return ax

    def _cells(self, row: Compared) -> Sequence[str]:
        verdict = "same"
        if row.differs(self.rtol):
            verdict = "as declared" if row.declared or row not in self.undeclared else "differs"
        if row.missing:
            which = "both" if row.missing == "both" else self.names[row.missing == "second"]
            verdict += f" (none: {which})"
        numbers = _number(row.cosine), _number(row.ratio)
        shares = [f"{share:.0%}" for share in (row.signs, row.zeros, row.other_zeros)]
        return row.name, row.op_type, *numbers, *shares, verdict, row.rule, row.line, row.path

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        return f"{self.table()}\n{self._verdict}"

    def _repr_html_(self) -> str:
        return self.table().html([self._verdict])

    @property
    def _verdict(self) -> str:
        if not self.differences:
            return "no difference"
        count = len(self.undeclared)
        declared = len(self.differences) - count
        return f"{count} undeclared and {declared} declared differences"


def _is_meant(row: Compared, meant: frozenset[str]) -> bool:
    """Return whether a row's difference was declared, by its op type, its rule or its name."""
    if row.kind != "op":
        return row.name in meant
    rule = row.rule.partition(",")[0]
    return bool({row.op_type, rule, rule.partition(".backward")[0], row.rule} & meant)


def _angle(row: Compared) -> float:
    """Return the number by which rows are sorted: the cosine, or less if it is undefined."""
    return -2.0 if math.isnan(row.cosine) else row.cosine


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4g}"


# -- the tool ------------------------------------------------------------------------------------


class InPlace(Tool):
    """Compares each rule that is not built in with the op's true derivative."""

    keeps: Literal["", "rules", "all"] = "rules"
    again = True

    def __init__(self, recorder: RunRecorder) -> None:
        self.recorder = recorder
        self.seen: dict[Any, tuple[dict[str, Any], Sequence[Any]]] = {}

    def left(self, op: Any, dxs: Named, dys: Sequence[Any]) -> None:
        if op.kind != "built-in":
            held = self.recorder.held
            self.seen[op] = {name: held(dx) for name, dx in dxs}, [held(dy) for dy in dys]

    def rows(self) -> Iterator[Compared]:
        """Yield a row for each input of each op; both rules get the same incoming gradient."""
        array = self.recorder.array
        for op, (dxs, dys) in self.seen.items():
            about = {"op_type": op.op_type, "rule": op.rule, "line": op.line, "path": op.path}
            with np.errstate(all="ignore"):
                true = list(op.true(dys))
            for name, dx in true:
                yield Compared.of("op", name, array(dxs.get(name)), array(dx), **about)


def compared(
    recorder: RunRecorder,
    other: Any,
    surrogates: Iterable[str],
    rtol: float,
    of_other: Callable[[Any], RunRecorder],
) -> Callable[..., GradientComparison]:
    """Return the function that runs a recorder, and compares its gradients with other gradients."""
    if not (other is None or other in ("true", "differences") or callable(other)):
        raise ArgumentError(
            "compare_gradients(f, other): other must be a function, 'true', 'differences' or "
            f"None, got {kind(other)}"
        )

    def compared(*args: Any, **options: Any) -> GradientComparison:
        tool, others = InPlace(recorder), InPlace(recorder)
        first = recorder.run(args, options, tool).leaves
        by_op = recorder.by_op if callable(other) else other != "differences"
        rows = list(tool.rows()) if by_op else []
        if callable(other):
            second = of_other(other).run(args, options, others).leaves
        elif other == "differences":
            second = recorder.differences(args, options)
            both = {leaf.same for leaf in first} & {leaf.same for leaf in second}
            first, second = ([x for x in each if x.same in both] for each in (first, second))
        else:
            second = recorder.true(args, options)
        known = {(op.op_type, op.rule) for op in others.seen}
        others = [row for row in rows if (row.op_type, row.rule) not in known]
        rows = [*leaf_rows(recorder, first, second), *others]
        # (`declare` raises unless it is a list of names.)
        is_text = isinstance(surrogates, str)
        meant = surrogates if is_text else recorder.meant(surrogates, tool.seen)
        return GradientComparison.declare(rows, meant, names=recorder.names(other), rtol=rtol)

    return compared


def leaf_rows(
    recorder: RunRecorder, first: Sequence[Leaf], second: Sequence[Leaf]
) -> list[Compared]:
    """Return a row for each leaf of either gradient."""
    array, leaves = recorder.array, {leaf.same: leaf for leaf in (*second, *first)}
    one, other = ({leaf.same: array(leaf.gradient) for leaf in each} for each in (first, second))
    keys = dict.fromkeys([*one, *other])
    pairs = [(leaves[key], one.get(key), other.get(key)) for key in keys]
    return [Compared.of(leaf.kind, leaf.name, a, b) for leaf, a, b in pairs]
