"""Gradients against differences: the core of `regrad.testing`, for functions of NumPy arrays.

The input is a function, its gradient function and its arguments; the output is a report of
findings. The functions may come from regrad, PyTorch or JAX.

The check first computes a quick difference along a few directions. Where it disagrees with the
gradient, the check computes differences of many steps, which estimate their own error element by
element. Only a disagreement beyond this error is a finding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from regrad.checking import findings
from regrad.checking.differences import EPS, Curve, Slopes, quick, refined
from regrad.checking.findings import Finding, GradientReport
from regrad.checking.reals import joined, like, natural, place_of, reals

Arrays = Sequence[np.ndarray]
Pull = Callable[[Arrays], Sequence[np.ndarray | None]]
Method = Literal["central", "complex"]
Mode = Literal["reverse", "forward"]
MODES: Sequence[Mode] = ("reverse", "forward")

SMALL = 8  # maximum number of inputs and outputs for which the full Jacobian is compared
# maximum number of elements per input that are checked one by one if something is wrong
ELEMENTS = 32
SURE = 5.0  # a disagreement counts if it exceeds this many errors of the differences
SHARP = 1e-3  # the relative error above which differences decide nothing
SHAKES = 4
# Other points to check: on both sides, and closer to 0, where saturated functions are not flat.
NEARBY = ((" (nearby)", 1.0, 0.01), (" (nearby)", 1.0, -0.01), (" (at an eighth)", 0.125, 0.01))
LOST = 32 * EPS  # relative to the value of f: the error that rounding may leave in a gradient


@dataclass(frozen=True)
class Function:
    """A function of arrays and its gradients.

    `vjp(xs)` returns `pull`, and `pull(dys)` returns the gradients by all xs of
    `sum(real(conj(dy) * y))` over all outputs (None for a missing gradient). For complex x, the
    gradient is the direction of steepest ascent, as in TensorFlow. `gradient(dys)` is the function
    `(*xs, *scales) -> pull(scales * dys)` with its own gradients, for the next order. If
    `jvp(xs, dxs)` is defined, it returns the tangents of all outputs along dxs, and is checked as
    well.
    """

    f: Callable[[Arrays], Arrays]
    vjp: Callable[[Arrays], Pull]
    gradient: Callable[[Arrays], Function] | None = None
    jvp: Callable[[Arrays, Arrays], Arrays] | None = None


@dataclass(frozen=True)
class Settings:
    """Tolerances and steps; with a step of None, each element gets a step by its size."""

    method: Method = "central"
    step: float | None = None
    rtol: float = 1e-6
    atol: float = 0.0
    seed: int = 0


def report(
    function: Function,
    args: Arrays,
    order: int = 1,
    *,
    names: Sequence[str] | None = None,
    settings: Settings | None = None,
) -> GradientReport:
    """Compare the gradients of a function at `args` with differences, up to an order.

    Args:
        function: The function with its gradients; `gradient` is needed beyond the first order.
        args: Arrays of float64 or complex128.
        order: 1 checks the gradient, 2 also the gradient of the gradient, by `args` and by the
            incoming gradients `dy`, and so on; the first order with findings is the last.
        names: The names of the arguments, by default `args[0]`, ….
        settings: Tolerances and steps.
    """
    names = names or [f"args[{i}]" for i in range(len(args))]
    found: list[Finding] = []
    doubts: list[Finding] = []
    comparisons, size, count = 0, None, len(args)
    with np.errstate(all="ignore"):
        for k in range(1, order + 1):
            levels = [
                OrderCheck(function, args, k, names, settings or Settings(), size, mode, count)
                for mode in MODES[: 1 if function.jvp is None else 2]
            ]
            for level in levels:
                wrong, unsure = level.judged()
                found += wrong or (level.elsewhere() if unsure else [])
                doubts += unsure
                comparisons += level.comparisons
            if found or k == order or any(doubt.kind == findings.SINGULAR for doubt in doubts):
                break
            assert function.gradient is not None, (
                "the next order needs a gradient function with its own gradients"
            )
            size, weights = levels[0].size_of_gradient, levels[0].shaped(levels[0].weights)
            function = function.gradient(weights)
            args = [*args, *map(np.ones_like, weights)]
            names = [*names, *_called(weights, k)]
    return GradientReport(order, comparisons, tuple(found), tuple(doubts))


def _called(weights: Arrays, order: int) -> list[str]:
    """Return the names of the incoming gradients, which are inputs of the next order."""
    name = "dy" if order == 1 else f"dy{order}"
    return [name] if len(weights) == 1 else [f"{name}[{i}]" for i in range(len(weights))]


# -- one order at one point ----------------------------------------------------------------------


class Column(NamedTuple):
    """A direction in one input; `element` is the place of the element, if only one moves."""

    input: int
    v: np.ndarray
    element: int | None


class Verdict(NamedTuple):
    """One comparison: the verdict ("" for right), and the numbers along the column."""

    verdict: str
    column: Column
    analytic: float
    numerical: float
    error: float
    weight: float  # weight of the output if only one counts, else 1


@dataclass
class OrderCheck:
    """The check of the gradient of one order at one point."""

    function: Function
    xs: Arrays
    order: int
    names: Sequence[str]
    settings: Settings
    # the size of the terms of each output, if they are larger than the output
    made_of: np.ndarray | None = None
    mode: Mode = "reverse"
    trusted: int | None = None  # from this input on, NaN counts only if nearby points have it too
    comparisons: int = 0
    known: dict[bytes, list[np.ndarray | None]] = field(default_factory=dict)
    trembling: dict[bytes, list[np.ndarray]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng: np.random.Generator = np.random.default_rng([self.settings.seed, self.order])
        self.flat: list[np.ndarray] = [reals(x) for x in self.xs]
        self.scales: list[np.ndarray] = [natural(x, self.settings.step) for x in self.flat]
        self.ys: Arrays = self.function.f(self.xs)
        self.y: np.ndarray = joined(self.ys)
        y = joined([np.abs(y) * (1 + 1j) if np.iscomplexobj(y) else np.abs(y) for y in self.ys])
        self.finite: np.ndarray = np.isfinite(self.y)
        self.pull: Pull = self.function.vjp(self.xs)
        size = y if self.made_of is None else np.maximum(self.made_of, y)
        self.size: np.ndarray = np.where(self.finite, size, 0.0)

    # -- what is compared ------------------------------------------------------------------------

    def columns(self) -> list[Column]:
        """Return each element of a small function at first order, else one direction per input."""
        size = sum(x.size for x in self.flat)
        small = self.order == 1 and max(size, self.y.size) <= SMALL
        columns: list[Column] = []
        for i, x in enumerate(self.flat):
            if small:
                columns += self.elements(i)
            elif x.size:
                columns.append(Column(i, self.signed(x.shape) * self.scales[i], None))
        return columns

    def elements(self, i: int) -> Iterator[Column]:
        """Yield the elements of an input one by one, or a selection if there are many."""
        size = self.flat[i].size
        some = size > ELEMENTS
        chosen = self.rng.choice(size, ELEMENTS, replace=False) if some else range(size)
        for k in sorted(chosen):
            v = np.zeros(size)
            v[k] = self.scales[i][k]
            yield Column(i, v, int(k))

    def signed(self, shape: Any) -> np.ndarray:
        """Return random numbers of both signs, none of them small."""
        return self.rng.uniform(0.5, 1.5, shape) * self.rng.choice([-1.0, 1.0], shape)

    def along(self, column: Column) -> Curve:
        """Return the outputs as a function of the step along a column."""
        i = column.input

        def at(t: Any) -> np.ndarray:
            x = self.flat[i] + t * column.v
            moved = x if isinstance(t, complex) else like(x, self.xs[i])
            xs = [*self.xs[:i], moved.reshape(self.xs[i].shape), *self.xs[i + 1 :]]
            try:
                ys = self.function.f(xs)
            except (ArithmeticError, np.linalg.LinAlgError):
                return np.full(self.y.shape, np.nan)
            return np.concatenate([*map(np.ravel, ys)]) if isinstance(t, complex) else joined(ys)

        return at

    def measured(self, column: Column) -> np.ndarray:
        """Return the slopes of all outputs along a column, without an error estimate."""
        f, step = self.along(column), self.settings.step
        if self.settings.method == "complex":
            step = step or 1e-20
            return np.imag(f(1j * step)) / step  # pyright: ignore[reportArgumentType] (complex)
        return quick(f, step or 1e-3)

    def refined(self, column: Column) -> Slopes:
        """Return the slopes with their errors."""
        if self.settings.method == "complex":
            best = self.measured(column)
            none = np.zeros((1, best.size))
            return Slopes(best, np.abs(best) * 4 * EPS, best[None], best[None], none)
        start = self.settings.step or 0.4 * max(1.0, min(1e12, 1 / np.abs(column.v).max()))
        return refined(self.along(column), start, self.size)

    # -- gradients -------------------------------------------------------------------------------

    def shaped(self, flat: np.ndarray) -> list[np.ndarray]:
        """Return a vector of reals in the shapes of the outputs."""
        ends = np.cumsum([reals(y).size for y in self.ys])[:-1]
        parts = np.split(flat, ends)
        return [like(part, y) for part, y in zip(parts, self.ys, strict=True)]

    def gradient(self, weights: np.ndarray) -> list[np.ndarray | None]:
        """Return the gradients of the weighted sum of all outputs, as reals."""
        key = weights.tobytes()
        if key not in self.known:
            pairs = zip(self.pull(self.shaped(weights)), self.xs, strict=True)
            found = [g if g is None else np.broadcast_to(g, x.shape) for g, x in pairs]
            self.known[key] = [g if g is None else reals(g) for g in found]
        return self.known[key]

    def slope(self, weights: np.ndarray, column: Column) -> float:
        """Return the slope along a column by the gradient."""
        if self.mode == "forward":
            used = weights != 0
            return float(weights[used] @ self.pushed(column)[used])
        g = self.gradient(weights)[column.input]
        if g is None:
            return 0.0
        moving = column.v != 0
        return float(g[moving] @ column.v[moving])

    def pushed(self, column: Column) -> np.ndarray:
        """Return the tangents of all outputs along a column, by forward mode."""
        assert self.function.jvp is not None
        dxs = [np.zeros_like(x) for x in self.xs]
        dxs[column.input] = like(column.v, self.xs[column.input])
        return joined(self.function.jvp(self.xs, dxs))

    @cached_property
    def shaken(self) -> list[Pull]:
        """Return the gradient function at points that differ from this one by rounding alone."""
        pulls = []
        for _ in range(SHAKES):
            moves = [self.rng.choice([-4 * EPS, 4 * EPS], x.shape) for x in self.flat]
            xs = [like(x * (1 + m), a) for x, m, a in zip(self.flat, moves, self.xs, strict=True)]
            pulls.append(self.function.vjp(xs))
        return pulls

    def tremble(self, weights: np.ndarray, column: Column) -> float:
        """Return the change of the analytic slope along a column under rounding."""
        key = weights.tobytes()
        if key not in self.trembling:
            now = self.gradient(weights)
            moved = [pull(self.shaped(weights)) for pull in self.shaken]
            self.trembling[key] = [
                np.zeros(0)
                if g is None
                else np.max([np.abs(reals(m[i]) - g) for m in moved], axis=0)
                for i, g in enumerate(now)
            ]
        moving = column.v != 0
        change = self.trembling[key][column.input]
        if not change.size:
            return 0.0
        return float(np.nan_to_num(change[moving]) @ np.abs(column.v[moving]))

    @cached_property
    def quick(self) -> tuple[list[Column], np.ndarray]:
        """Return the columns, and the quick slopes along each of them (outputs × columns)."""
        columns = self.columns()
        slopes = np.array([self.measured(c) for c in columns]).reshape(len(columns), self.y.size).T
        return columns, np.where(self.finite[:, None], slopes, 0.0)

    @cached_property
    def weights(self) -> np.ndarray:
        """Return weights of the outputs under which each of them moves about equally.

        An output that hardly moves, in absolute terms or relative to the resolution of differences,
        has a smaller weight.
        """
        slopes = np.nan_to_num(np.abs(self.quick[1])).sum(axis=1)
        sizes = slopes + 1e-6 * self.size
        largest = sizes.max(initial=0.0) or 1.0
        sizes = np.where(sizes > 0, sizes + 1e-9 * slopes.max(initial=0.0), largest)
        weights = self.signed(self.y.shape) / sizes
        return np.where(self.finite, weights, 0.0)

    @property
    def size_of_gradient(self) -> np.ndarray:
        """Return the sizes of the terms whose sums are the gradients by the inputs."""
        return float(np.abs(self.weights) @ self.size) / np.concatenate(self.scales)

    # -- verdicts --------------------------------------------------------------------------------

    def judged(self) -> tuple[list[Finding], list[Finding]]:
        """Return the wrong findings and the inconclusive ones; for each input, the worst."""
        if not any(x.size for x in self.flat) or not self.y.size:
            self.gradient(np.zeros(self.y.shape))
            return [], [self.doubt(findings.EMPTY, 0)]
        if not self.finite.any():
            return [], [self.doubt(findings.UNDEFINED, 0)]
        columns, slopes = self.quick
        each = len(columns) and columns[0].element is not None
        # A weight other than 1 shows errors that depend on the incoming gradient.
        rows = np.diag(self.signed(self.y.shape))[self.finite] if each else self.weights[None]
        analytic = np.array([[self.slope(w, c) for c in columns] for w in rows])
        expected = rows @ slopes
        scale = np.sqrt(rows**2 @ slopes**2)
        close = np.abs(analytic - expected) <= self.tolerance(scale)
        self.comparisons = close.size
        judged: list[Verdict] = []
        for j in np.flatnonzero(~close.all(axis=0)):
            judged += self.settled(columns[j], rows[~close[:, j]])
        found, unsure = self.findings(judged)
        flat = ~(analytic.any(axis=0) | expected.any(axis=0))
        if self.order == 1 and flat.all():
            unsure.append(self.doubt(findings.FLAT, 0))
        return found, unsure

    def tolerance(self, scale: Any) -> Any:
        return self.settings.atol + self.settings.rtol * scale

    def settled(self, column: Column, rows: np.ndarray) -> list[Verdict]:
        """Return the verdicts on a column that quick differences do not confirm."""
        slopes = self.refined(column)
        first = [self.verdict(w, column, slopes) for w in rows]
        if column.element is not None or all(j.verdict in ("", findings.UNSEEN) for j in first):
            return first
        single = self.alone(column.input, rows)
        wrong = [j for j in first if is_wrong(j)]
        complete = self.flat[column.input].size <= ELEMENTS
        return single if complete or any(map(is_wrong, single)) else [*wrong, *single]

    def alone(self, i: int, rows: np.ndarray) -> list[Verdict]:
        """Return the verdicts on the elements of an input."""
        judged = []
        for column in self.elements(i):
            slopes = self.refined(column)
            judged += [self.verdict(w, column, slopes) for w in rows]
        return judged

    def verdict(self, weights: np.ndarray, column: Column, slopes: Slopes) -> Verdict:
        """Return the verdict on the gradient along a column, by differences with an error."""
        first = self.compared(weights, column, slopes)
        if first.verdict in ("", "wrong") or np.count_nonzero(weights) < 2:
            return first
        # other outputs must not hide an error here
        clear = np.where(is_clear(slopes), weights, 0.0)
        if not clear.any() or np.array_equal(clear, weights):
            return first
        second = self.compared(clear, column, slopes)
        return second if second.verdict == "wrong" else first

    def compared(self, weights: np.ndarray, column: Column, slopes: Slopes) -> Verdict:
        used = weights != 0
        w, best = weights[used], slopes.best[used]
        a, b = self.slope(weights, column), float(w @ best)
        errors = SURE * float(np.abs(w) @ slopes.error[used]), SURE * self.tremble(weights, column)
        scale = float(np.linalg.norm(w * best))
        flat = 0.0 if b else float(np.abs(w).max() * max(self.size.max(), np.abs(column.v).max()))
        verdict = self.outcome(a, b, errors, scale, self.lost(weights, column) + LOST * flat)
        if verdict == "wrong" and in_kink(a, b, w, slopes, used):
            verdict = findings.KINK
        if not np.isfinite(a) and self.trusted is not None and column.input >= self.trusted:
            verdict = findings.SINGULAR  # the convention at a kink; elsewhere it is wrong
        return Verdict(verdict, column, a, b, sum(errors), float(w[0]) if w.size == 1 else 1.0)

    def outcome(
        self, a: float, b: float, errors: tuple[float, float], scale: float, lost: float
    ) -> str:
        """Return the verdict on two numbers with their errors; `lost` is the rounding residue."""
        gap, tolerance, error = abs(a - b), self.tolerance(scale), sum(errors)
        sharp = error <= SHARP * scale
        if not np.isfinite(a):
            return "wrong" if error <= SHARP * max(scale, lost) else findings.KINK
        if gap <= tolerance or (sharp and gap <= tolerance + error):
            return ""
        if abs(a) <= lost + error and abs(b) <= lost + errors[0]:
            return findings.UNSEEN if a else ""
        return "wrong" if gap > tolerance + error else findings.KINK

    def lost(self, weights: np.ndarray, column: Column) -> float:
        """Return the size of a slope that may be a residue of rounding."""
        rows = np.abs(np.nan_to_num(self.quick[1])).max(axis=1, initial=0.0)
        return LOST * float(np.abs(weights) @ (self.size + rows))

    # -- findings --------------------------------------------------------------------------------

    def findings(self, judged: Sequence[Verdict]) -> tuple[list[Finding], list[Finding]]:
        found, unsure = [], []
        for i in range(len(self.xs)):
            mine = [j for j in judged if j.column.input == i]
            wrong = [j for j in mine if is_wrong(j)]
            if wrong:
                worst = max(wrong, key=_size)
                found.append(self.finding(self.kind(wrong), worst, len(wrong)))
            doubtful = [j for j in mine if j.verdict and not is_wrong(j)]
            if doubtful:
                unsure.append(self.finding(doubtful[0].verdict, doubtful[0], len(doubtful)))
        return found, unsure

    def finding(self, kind: str, judged: Verdict, count: int) -> Finding:
        """Return a finding in the units of the input, if a single element of it moved."""
        _, (i, v, k), a, b, error, weight = judged
        unit = weight * (1.0 if k is None else v[k])
        place = None if k is None else place_of(k, self.xs[i])
        return Finding(
            kind, self.order, self.names[i], place, a / unit, b / unit, error / abs(unit), count,
            mode=self.mode,
        )  # fmt: skip

    def doubt(self, reason: str, i: int) -> Finding:
        return Finding(reason, self.order, self.names[i], None, np.nan, np.nan, np.inf)

    def kind(self, wrong: Sequence[Verdict]) -> str:
        """Return the kind of the error, if all wrong elements agree on it."""
        a = np.array([j.analytic for j in wrong])
        b = np.array([j.numerical for j in wrong])
        if not np.isfinite(a).all():
            return "not finite"
        if not a.any():
            none = [g[wrong[0].column.input] is None for g in self.known.values()]
            return "missing" if all(none) else "zero"
        with np.errstate(all="ignore"):
            ratio = a / b
        if np.allclose(ratio, -1, rtol=1e-3, atol=0):
            return "wrong sign"
        if len(ratio) > 1 and np.allclose(ratio, ratio[0], rtol=1e-3, atol=0):
            return f"scaled by {ratio[0]:.4g}"
        return "wrong value"

    def elsewhere(self) -> list[Finding]:
        """Return the findings at nearby points, if this point is inconclusive."""
        for what, shrink, spread in NEARBY:
            xs = [like(self.moved(i, shrink, spread), x) for i, x in enumerate(self.xs)]
            try:
                level = replace(
                    self, xs=xs, made_of=self.size, trusted=None, comparisons=0, known={},
                    trembling={},
                )  # fmt: skip
                found, _ = level.judged()
            except Exception:  # f is not defined for these values
                continue
            self.comparisons += level.comparisons
            if found:
                return [replace(f, at=what) for f in found]
        return []

    def moved(self, i: int, shrink: float, spread: float) -> np.ndarray:
        x = self.flat[i]
        signs = np.random.default_rng(self.settings.seed).choice([-1.0, 1.0], x.shape)
        return shrink * x + spread * signs * self.scales[i]


def is_wrong(judged: Verdict) -> bool:
    """Return whether a verdict is an error, and not inconclusive."""
    return judged.verdict == "wrong"


def _size(judged: Verdict) -> float:
    gap = abs(judged.analytic - judged.numerical)
    largest = max(abs(judged.analytic), abs(judged.numerical))
    return gap / largest if np.isfinite(gap) and largest else np.inf


def is_clear(slopes: Slopes) -> np.ndarray:
    """Return which outputs have one slope, the same on both sides."""
    kink = np.nanmin(np.abs(slopes.right - slopes.left) + slopes.noise, axis=0, initial=np.inf)
    size = np.abs(slopes.best)
    return (SURE * slopes.error <= SHARP * size) & (kink <= 0.01 * size)


def in_kink(a: float, b: float, w: np.ndarray, slopes: Slopes, used: np.ndarray) -> bool:
    """Return whether a gradient lies between the one-sided slopes at every conclusive step."""
    left, right = slopes.left[:, used] * w, slopes.right[:, used] * w
    noise = slopes.noise[:, used] @ np.abs(w)
    low = np.minimum(left, right).sum(axis=1) - noise
    high = np.maximum(left, right).sum(axis=1) + noise
    gap = abs(a - b)
    if not np.isfinite(gap):
        tells = np.isfinite(low) & np.isfinite(high)
        return not bool((high - low)[tells].min(initial=np.inf) <= 0.01 * (abs(b) + noise.min()))
    tells = noise < gap / 10
    inside = (low <= a) & (a <= high)
    return bool(inside[tells].all())
