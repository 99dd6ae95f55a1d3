"""`trace_gradients` for PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from regrad.inspection.numbers import Numbers, together
from regrad.inspection.traces import GradientTrace, Step
from regrad.torch.seeing.figures import Figures, Measures, numbers_or_none
from regrad.torch.seeing.modules import found_in
from regrad.torch.seeing.notes import OpNote
from regrad.torch.seeing.running import ModelRun, check_callable, let_go
from regrad.torch.seeing.watching import Looker


def trace_gradients(f: Callable[..., Any]) -> Callable[..., GradientTrace]:
    """Return a function that runs `f` and its backward pass, and tells what ran there.

    Args:
        f: A function of tensors and anything else, or a module. It returns a tensor, or a
            container with one loss (a scalar, or what is called `loss`); or it calls `backward()`
            itself, and returns what it likes. A result that is not a scalar is taken with the
            gradient 1 for each element.

    Returns:
        A function of f's arguments that returns a `GradientTrace`, with a step for each node of
        autograd's graph, in the order in which they ran: torch's function, its rule (built-in,
        an override of a `regrad.torch` scope, or custom: an `autograd.Function`), the line of the
        innermost code outside of torch that ran it, the path of the module, and figures of the
        gradients that arrived and left. Gradients are taken by all parameters and arguments that
        require grad; `.grad` is left as it is, unless f changes it. What torch.compile compiled
        runs op by op. `trace.worst()` says what is most likely wrong, and `trace.cuts` has the
        ops that passed no gradient on (`detach`, what ran under `no_grad`).

    Raises:
        ArgumentError: f is not callable.
        GradientError: what f returned has no gradient, or holds several losses.

    >>> import torch
    >>> import regrad.torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    >>> trace = regrad.torch.trace_gradients(lambda x: model(x).sum())(torch.ones(1, 2))
    >>> [(step.op_type, step.path) for step in trace.steps if step.op_type != "linear (t)"]
    [('sum', ''), ('relu', '1'), ('linear', '0')]
    """
    check_callable(f, "trace_gradients")

    def traced(*args: Any, **options: Any) -> GradientTrace:
        looker = _Tracer(found_in(f, args, options))
        with looker.looking():
            seen = ModelRun(f, args, options, looker, "trace_gradients")
            found = seen.walk()
        inputs = []
        for key, (name, _) in seen.sources().items():
            g = found.get(key)
            figures = looker.measures.of(g) if g is not None else looker.by_leaf.get(key)
            inputs.append((name, numbers_or_none(figures)))
        cuts = tuple(
            Step(op, "built-in", "", line, path, None, ((name, None),))
            for (op, line, path), name in looker.cuts.items()
        )
        return GradientTrace(looker.steps(), tuple(inputs), let_go(seen.value), cuts)

    return traced


class _Tracer(Looker):
    """Takes figures of each gradient that passes."""

    def __init__(self, held: dict[str, Any]) -> None:
        super().__init__(held)
        self.measures = Measures()
        self.made: list[tuple[OpNote, list[Any], list[Any]]] = []
        self.by_leaf: dict[int, Figures | None] = {}

    def arrived(self, note: OpNote, dys: Sequence[Any]) -> None:
        """Take figures of what arrived."""
        note.state = [self.measures.of(dy) for dy in dys], []
        self.made.append((note, *note.state))

    def left(self, note: OpNote, dxs: Sequence[Any], dys: Sequence[Any]) -> None:
        """Take figures of what left."""
        arrived, left = note.state
        if note.same and len(dxs) == len(arrived) == 1 and dxs[0] is not None:
            left.append(self.measures.like(dxs[0], arrived[0]))
        else:
            left += [self.measures.of(dx) for dx in dxs]
        note.state = None

    def reached(self, variable: torch.Tensor, g: Any) -> None:
        """Take figures of what is accumulated in a leaf."""
        self.by_leaf[id(variable)] = self.measures.of(g)

    def steps(self) -> tuple[Step, ...]:
        """The steps, in the order in which they ran."""
        return tuple(_step(*each) for each in self.made)


def _step(note: OpNote, arrived: Sequence[Any], left: Sequence[Any]) -> Step:
    given: Numbers | None = together(map(numbers_or_none, arrived))
    sent = tuple((note.name(i), numbers_or_none(figures)) for i, figures in enumerate(left))
    return Step(note.op_type, note.kind, note.rule, note.line, note.path, given, sent)
