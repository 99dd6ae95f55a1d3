"""The path of a gradient from the result to one parameter, as data: `GradientPath`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from regrad.core.reports import Table
from regrad.errors import ArgumentError, near
from regrad.inspection.numbers import Numbers, together
from regrad.inspection.recorder import Leaf, Recording, RunRecorder, SeenOp, settled
from regrad.inspection.traces import Step, Tracer, step_of


@dataclass(frozen=True)
class GradientPath:
    """The ops through which the gradient by one argument or parameter passes.

    Attributes:
        name: The name of the argument or parameter: `args[0]`, `layer1.weight`.
        steps: The ops between the result and the parameter, starting at the result. `left` has only
            the gradients by inputs that lead to the parameter.
        gradient: Statistics of the gradient by the parameter, or None if there is no gradient.
        cuts: If there is no gradient, the ops of the run that passed no gradient on.
    """

    name: str
    steps: tuple[Step, ...]
    gradient: Numbers | None
    cuts: tuple[Step, ...] = ()

    @property
    def dies(self) -> Step | None:
        """The first step that turned a nonzero finite gradient into zeros or non-finite values."""
        return next((step for step in self.steps if step.dead or step.breaks), None)

    def table(self) -> Table:
        """Return the steps as a table: op, rule, norms, verdict, source line, module."""
        return Table(
            ("op", "rule", "dy", "dx", "verdict", "source line", "module"),
            [_row(step, verdict) for step, verdict in self._judged()],
        )

    def _judged(self) -> Iterable[tuple[Step, str]]:
        for step in self.steps:
            died = "dies" if step.dead else "not finite" if step.breaks else ""
            yield step, died or ("" if step.arrived else "nothing came")
        for step in self.cuts:
            yield step, "cut"

    @property
    def verdict(self) -> str:
        """Return the outcome of the gradient, as a sentence."""
        if self.gradient is None:
            places = ", ".join(dict.fromkeys(step.place for step in self.cuts))
            return f"{self.name} has no gradient" + (f"; cut off: {places}" if places else "")
        if self.dies is not None:
            what = "dies" if self.dies.dead else "is no longer finite"
            return f"the gradient by {self.name} {what} at {self.dies.place}"
        return f"the gradient by {self.name}: {self.gradient}"

    def __len__(self) -> int:
        return len(self.steps)

    def __str__(self) -> str:
        return f"{self.table()}\n{self.verdict}"

    def _repr_html_(self) -> str:
        return self.table().html([self.verdict])


def _row(step: Step, verdict: str) -> Sequence[str]:
    norms = [f"{n.norm:.3g}" if n else "none" for n in (step.arrived, step.sent)]
    return step.op_type, step.rule_text, *norms, verdict, step.line, step.path


# -- the tool ------------------------------------------------------------------------------------


def followed(recorder: RunRecorder, name: str) -> Callable[..., GradientPath]:
    """Return the function that runs a recorder, and follows one gradient."""

    def followed(*args: Any, **options: Any) -> GradientPath:
        tracer = Tracer(recorder)
        run = recorder.run(args, options, tracer)
        leaf = _named(run.leaves, name)
        ops, reached = between(run, leaf)
        figures = {op: (dys, dxs) for op, dys, dxs in tracer.made}
        steps = [_step(op, reached, *figures.get(op, ((), ()))) for op in reversed(ops)]
        g = settled(recorder.figures(leaf.gradient))
        cuts = () if g is not None else tuple(step_of(op) for op, _ in run.cuts)
        return GradientPath(name, tuple(steps), g, cuts)

    return followed


def between(run: Recording, leaf: Leaf) -> tuple[list[SeenOp], set[Any]]:
    """Return the ops between a leaf and the results, in the order of the run, and all reached keys.

    If the leaf leads to no result, these are all ops to which it leads.
    """
    reached = {leaf.key}
    after = []
    for op in run.ops:
        if not reached.isdisjoint(op.takes):
            reached.update(op.makes)
            after.append(op)
    wanted, found = set(run.made), []
    for op in reversed(after):
        if not wanted.isdisjoint(op.makes):
            wanted.update(op.takes)
            found.append(op)
    return found[::-1] or after, reached


def _step(op: SeenOp, reached: set[Any], dys: Sequence[Any], dxs: Sequence[Any]) -> Step:
    """Return a step with only the gradients by inputs that lead to the leaf."""
    pairs = zip(op.takes, dxs, strict=False)
    left = [(name, settled(figures)) for key, (name, figures) in pairs if key in reached]
    return step_of(op, together(map(settled, dys)), left)


def _named(leaves: Sequence[Leaf], name: str) -> Leaf:
    for leaf in leaves:
        if leaf.name == name:
            return leaf
    names = [leaf.name for leaf in leaves]
    known = ", ".join(map(repr, names[:8])) + (", …" if len(names) > 8 else "")
    raise ArgumentError(
        f"gradient_path(f, name): f has no differentiable input {name!r:.60}; it has "
        f"{known or 'none'}.{near(name, names)}"
    )
