"""The ops that ran backward, in order, as data: `GradientTrace`, and its steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from regrad.core.extras import needed
from regrad.core.reports import Table
from regrad.inspection.numbers import Numbers, together
from regrad.inspection.recorder import Named, RuleKind, RunRecorder, SeenOp, Tool, located, settled

COLOURS = {"built-in": "#7a869a", "override": "#d9480f", "custom": "#1864ab"}
GROWTH = 1e3  # the ratio of norms, or its inverse, from which worst() mentions a step


@dataclass(frozen=True, slots=True)
class Step:
    """One op of the backward pass.

    Attributes:
        op_type: The op: regrad's op type, the PyTorch function, or the JAX primitive.
        kind: Whether the rule is built in, an override, or a custom gradient.
        rule: The rule's name and source location; "" for a built-in rule.
        line: The line of the user's code that ran the op forward, `file:line`.
        path: The module in which it ran (`layer1.0.relu`), or the name scope, or "".
        arrived: Statistics of the incoming gradients, of all outputs together.
        left: Statistics of the gradient by each input: (name, statistics), None for no gradient.
    """

    op_type: str
    kind: RuleKind
    rule: str
    line: str
    path: str
    arrived: Numbers | None
    left: tuple[tuple[str, Numbers | None], ...]

    @property
    def sent(self) -> Numbers | None:
        """Return statistics of all gradients that left, together."""
        return together(numbers for _, numbers in self.left)

    @property
    def growth(self) -> float:
        """The largest norm that left an input, divided by the norm that arrived; NaN if unknown."""
        norms = [numbers.norm for _, numbers in self.left if numbers is not None]
        if self.arrived is None or not self.arrived.norm or not norms:
            return math.nan
        return max(norms) / self.arrived.norm

    @property
    def dead(self) -> bool:
        """True if a nonzero gradient arrived and only zeros left."""
        arrived, sent = self.arrived, self.sent
        return bool(arrived and sent and sent.is_zero and arrived.size and not arrived.is_zero)

    @property
    def breaks(self) -> bool:
        """True if finite numbers arrived and non-finite numbers left."""
        arrived, sent = self.arrived, self.sent
        return bool(sent and not sent.finite and (arrived is None or arrived.finite))

    @property
    def place(self) -> str:
        """Return the op with its module and its line, for a message."""
        return located(self.op_type, self.line, self.path)

    @property
    def rule_text(self) -> str:
        """Return the rule as text for a table."""
        return self.kind if self.kind == "built-in" else f"{self.kind}: {self.rule}"


SymptomKind = Literal["not finite", "dead", "cut", "grows", "decays"]
CUTS = 3  # maximum number of cuts that worst() reports


@dataclass(frozen=True, slots=True)
class Symptom:
    """A problem, or possible problem, of a gradient, and the step that causes it."""

    kind: SymptomKind
    step: Step
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class GradientTrace:
    """The backward pass of one call: its steps in the order in which they ran.

    Attributes:
        steps: One step for each op.
        inputs: The gradients by arguments and Variables: (name, statistics), None without a path.
        value: The return value of the function.
        cuts: Ops with a differentiated input that passed no gradient on (`detach`, ops under
            `no_grad`), if the library can report them. They ran forward only.
    """

    steps: tuple[Step, ...]
    inputs: tuple[tuple[str, Numbers | None], ...] = ()
    value: Any = field(default=None, repr=False)
    cuts: tuple[Step, ...] = ()

    def table(self) -> Table:
        """Return the steps as a table: op, rule, norms, zeros, source line, module.

        Print it, or pass it to `rich`, which draws it; `rows` is the data.
        """
        return Table(
            ("op", "rule", "shape", "dy", "dx", "dx/dy", "zeros", "source line", "module"),
            [_row(step) for step in self.steps],
        )

    def worst(self) -> list[Symptom]:
        """Return the symptoms of the most likely problems, worst first.

        The first symptom is the first step that made a NaN or infinity from finite numbers. Then
        come steps at which the gradient died, and places where it was cut off, if an input has no
        gradient. The last symptoms are the steps of largest growth and decay if they change the
        norm a thousandfold, or a line that does so gradually.
        """
        found = [_not_finite(step) for step in self.steps if step.breaks][:1]
        # (One step of a line that runs repeatedly may have a zero gradient, for example the first
        # step of a recurrence.)
        alive = {(s.op_type, s.line) for s in self.steps if s.sent and not s.sent.is_zero}
        dead = [step for step in self.steps if step.dead]
        found += [_dead(step) for step in dead if (step.op_type, step.line) not in alive]
        if any(numbers is None for _, numbers in self.inputs):
            found += [_cut(step, self.inputs) for step in self.cuts[:CUTS]]
        finite = [step for step in self.steps if math.isfinite(step.growth) and step.growth > 0]
        if finite:
            most = max(finite, key=lambda step: step.growth)
            least = min(finite, key=lambda step: step.growth)
            if most.growth >= GROWTH:
                found.append(_changes("grows", most, most.growth))
            if least.growth <= 1 / GROWTH:
                found.append(_changes("decays", least, least.growth))
        found += _gradual(finite, {symptom.kind for symptom in found})
        return found + [_dead(step) for step in dead if (step.op_type, step.line) in alive]

    def plot(self, ax: Any = None) -> Any:
        """Draw the norms that arrived at and left each op, on a log scale, with matplotlib.

        Args:
            ax: The matplotlib Axes to draw into; by default, new Axes.

        Returns:
            The Axes. The backward pass goes from left to right. Ops with an override or a custom
            gradient have a separate color. Crosses mark gradients that died, and red lines mark
            non-finite gradients.
        """
        steps = self.steps
        ax = axes_of(ax, max(6.0, 0.22 * len(steps)), 4.0)
        places = np.arange(len(steps))
        arrived = np.array([step.arrived.norm if step.arrived else math.nan for step in steps])
        sent = np.array([numbers.norm if (numbers := step.sent) else math.nan for step in steps])
        ax.plot(places, _above_zero(arrived), color="#adb5bd", lw=1, label="arrived", zorder=1)
        for kind, colour in COLOURS.items():
            mine = [i for i, step in enumerate(steps) if step.kind == kind]
            if mine:
                ax.scatter(mine, _above_zero(sent[mine]), s=22, color=colour, label=kind, zorder=2)
        dead = [i for i, step in enumerate(steps) if step.dead]
        if dead:
            ax.scatter(dead, _above_zero(arrived[dead]), marker="x", color="black", label="died")
        for i, step in enumerate(steps):
            if step.breaks:
                ax.axvline(i, color="red", lw=1)
        ax.set_yscale("log")
        ax.set_ylabel("norm of the gradient")
        ax.set_xticks(places, [step.op_type for step in steps], rotation=90, fontsize=7)
        ax.set_xlim(-0.6, len(steps) - 0.4)
        ax.legend(fontsize=7, ncols=5, loc="best")
        return ax

    def __len__(self) -> int:
        return len(self.steps)

    def __str__(self) -> str:
        lines = [str(self.table()), *map(str, self.worst())]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return self.table().html(map(str, self.worst()))


def axes_of(ax: Any, width: float, height: float) -> Any:
    """Return the Axes to draw into: these, or new Axes of a size."""
    if ax is not None:
        return ax
    plt = needed("matplotlib.pyplot", "viz", "rg.plot")
    return plt.subplots(figsize=(width, height), layout="constrained")[1]


def _above_zero(norms: np.ndarray) -> np.ndarray:
    """Return norms for a log scale, which cannot show 0 or non-finite values."""
    return np.where((norms > 0) & np.isfinite(norms), norms, np.nan)


def _row(step: Step) -> Sequence[str]:
    arrived, sent = step.arrived, step.sent
    shape = arrived.shape_text if arrived else ""
    growth = "" if math.isnan(step.growth) else f"{step.growth:.3g}"
    figures = _figure(arrived), _figure(sent), growth, f"{sent.zero_share:.0%}" if sent else ""
    return step.op_type, step.rule_text, shape, *figures, step.line, step.path


def _figure(numbers: Numbers | None) -> str:
    if numbers is None:
        return "none"
    if not numbers.finite:
        return "NaN" if numbers.nans else "inf"
    return f"{numbers.norm:.3g}"


def _not_finite(step: Step) -> Symptom:
    sent = step.sent
    assert sent is not None
    what = " and ".join(sent.bad)
    text = f"not finite: {step.place} made {what} of finite gradients ({step.rule_text})"
    return Symptom("not finite", step, text)


def _dead(step: Step) -> Symptom:
    norm = step.arrived.norm  # pyright: ignore[reportOptionalMemberAccess]
    where = f"a gradient of norm {norm:.3g} arrived at {step.place}"
    return Symptom("dead", step, f"dead: {where}, and only zeros left ({step.rule_text})")


def _cut(step: Step, inputs: Sequence[tuple[str, Numbers | None]]) -> Symptom:
    without = [name for name, numbers in inputs if numbers is None]
    more = f" and {len(without) - 3} more" if len(without) > 3 else ""
    text = (
        f"cut: {step.place} passes no gradient on; there is no gradient by "
        f"{', '.join(without[:3])}{more}"
    )
    return Symptom("cut", step, text)


def _gradual(steps: Sequence[Step], known: set[SymptomKind]) -> list[Symptom]:
    """Return ops of one line, or of one type, that together change the norm a thousandfold."""
    found: list[Symptom] = []
    for key in (lambda step: (step.op_type, step.line), lambda step: (step.op_type,)):
        groups: dict[Any, list[Step]] = {}
        for step in steps:
            groups.setdefault(key(step), []).append(step)
        sums = [(sum(math.log(s.growth) for s in group), group) for group in groups.values()]
        for total, group in sorted(sums, key=lambda pair: -abs(pair[0])):
            kind: SymptomKind = "grows" if total > 0 else "decays"
            # (The norm itself must have changed on the path: other ops may compensate for these.)
            over = math.log(group[-1].sent.norm / group[0].arrived.norm)  # pyright: ignore
            least = min(abs(total), over if total > 0 else -over)
            if len(group) > 1 and least >= math.log(GROWTH) and kind not in known:
                known.add(kind)
                step = max(group, key=lambda s: math.log(s.growth) * (1 if total > 0 else -1))
                steps_of = f"in {len(group)} steps together "
                found.append(_changes(kind, step, math.exp(total), steps_of))
    return found


def _changes(kind: SymptomKind, step: Step, factor: float, steps: str = "") -> Symptom:
    change = f"multiplied the norm of the gradient by {factor:.3g} {steps}({step.rule_text})"
    return Symptom(kind, step, f"{kind}: {step.place} {change}")


# -- the tool ------------------------------------------------------------------------------------


class Tracer(Tool):
    """Stores statistics of each gradient in a backward pass."""

    def __init__(self, recorder: RunRecorder) -> None:
        self.figures: Callable[[Any], Any] = recorder.figures
        self.made: list[tuple[SeenOp, list[Any], list[tuple[str, Any]]]] = []
        # gradients that left an op when it last ran
        self.last: dict[SeenOp, list[tuple[str, Any]]] = {}

    def arrived(self, op: SeenOp, dys: Sequence[Any]) -> None:
        self.last[op] = []
        self.made.append((op, [self.figures(dy) for dy in dys], self.last[op]))

    def left(self, op: SeenOp, dxs: Named, dys: Sequence[Any]) -> None:
        self.last[op] += [(name, self.figures(dx)) for name, dx in dxs]

    def steps(self) -> list[Step]:
        """Return the steps, in the order in which they ran."""
        made = []
        for op, dys, dxs in self.made:
            left = [(name, settled(figures)) for name, figures in dxs]
            made.append(step_of(op, together(map(settled, dys)), left))
        return made


def step_of(
    op: SeenOp, arrived: Numbers | None = None, left: Sequence[tuple[str, Numbers | None]] = ()
) -> Step:
    """Return a step for an op."""
    return Step(op.op_type, op.kind, op.rule, op.line, op.path, arrived, tuple(left))


def traced(recorder: RunRecorder) -> Callable[..., GradientTrace]:
    """Return the function that runs a recorder, and makes a trace."""

    def traced(*args: Any, **options: Any) -> GradientTrace:
        tracer = Tracer(recorder)
        run = recorder.run(args, options, tracer)
        inputs = [(leaf.name, settled(recorder.figures(leaf.gradient))) for leaf in run.leaves]
        cuts = [step_of(op, left=[(name, None)] if name else ()) for op, name in run.cuts]
        return GradientTrace(tuple(tracer.steps()), tuple(inputs), run.value, tuple(cuts))

    return traced
